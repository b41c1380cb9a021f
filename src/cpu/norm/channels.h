// The normalizations of the CPU share this: an array as (outer, channels, inner), its means and
// inverse deviations, and ChannelSums, the sums over each channel that gradients of scales and
// biases need. Arrays are contiguous; values of one a channel are float32, or of x's storage type,
// which is widened first. Memory bandwidth limits the sums, which read x and dy once.
#pragma once
#include <cstdint>

#include "cpu/runtime/common.h"
#include "cpu/runtime/parallel.h"
#include "cpu/runtime/simd.h"

namespace dlsys {
namespace cpu {

struct Channels {
  int64_t outer, count, inner;
  int64_t Numel() const { return outer * count * inner; }
};

// The data of an array of one value a channel, checked.
inline void CheckCount(const char* op, const DLArray* values, int64_t count) {
  if (Numel(values) != count)
    Fail("%s: expected %ld values, one a channel, got shape %s", op, (long)count,
         ShapeText(values).c_str());
}
inline const float* PerChannel(const char* op, const DLArray* values, int64_t count) {
  const float* data = Input(op, values);
  CheckCount(op, values, count);
  return data;
}
inline float* ChannelResult(const char* op, DLArray* values, int64_t count) {
  float* data = Output(op, values);
  CheckCount(op, values, count);
  return data;
}

// Values of an array of one a channel as floats: those of float32 as they lie, those of the storage
// type of x widened into scratch.
template <class T>
class ChannelFloats {
 public:
  ChannelFloats(const char* op, const DLArray* values, int64_t count)
      : widened_(IsNarrow(values) ? count : 0), data_(widened_.data()) {
    if (!IsNarrow(values)) {
      data_ = PerChannel(op, values, count);
      return;
    }
    const T* from = Input<T>(op, values);
    CheckCount(op, values, count);
    Serially([&] { std::copy_n(from, count, widened_.data()); });
  }
  const float* data() const { return data_; }

 private:
  static bool IsNarrow(const DLArray* values) { return kIs16Bit<T> && values->dtype == kDtype<T>; }
  const ScratchArray<float> widened_;
  const float* data_;
};

// Means and inverse deviations: one a channel, or `groups` of them for each n, each for `per`
// channels.
struct Statistics {
  const float* mean;
  const float* inverse;
  int64_t groups, per;

  DLSYS_INLINE int64_t At(int64_t n, int64_t c) const { return n * groups + c / per; }
};

// dscale = the sum of dy * (x - mean) * inverse over each channel, dbias that of dy.
template <class T>
void ChannelSums(const T* x, const T* dy, const Channels& shape, const Statistics& stats,
                 float* dscale, float* dbias);

}  // namespace cpu
}  // namespace dlsys
