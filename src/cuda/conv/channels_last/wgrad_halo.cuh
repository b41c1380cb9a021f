// The gradient of a filter of 16 bits with channels last at stride 1, for sm_90a: what lies at all
// kernel offsets of a block of positions is copied to shared memory once, with the pixels around it
// (the halo). channels_last/wgrad_halo.cu has the kernel.
#pragma once
#include <array>
#include <optional>

#include "cuda/conv/channels_last/channels_last.cuh"

namespace dlsys {
namespace cuda {
namespace channels_last {

// How it would be computed: panels of positions, blocks that share those of a tile, the parts that
// they store, and how long that takes.
struct HaloConfig {
  bool two_images;  // in a panel
  int64_t panels, splits, parts;
  double us;
};
// None where it has no kernel: it is for filters of 3 x 3 elements and of 4 x 1 at stride 1.
std::optional<HaloConfig> HaloConfigOf(const Conv& conv, int multiprocessors);

// The parts (parts, filters, kernel, pitch) for images with these strides; pitch is channels,
// padded to 64. T is bfloat16 or float16.
template <class T>
void HaloGradient(const Call& at, const Conv& conv, const HaloConfig& config, const T* x,
                  const std::array<int64_t, 3>& strides, const T* dy, float* parts);

}  // namespace channels_last
}  // namespace cuda
}  // namespace dlsys
