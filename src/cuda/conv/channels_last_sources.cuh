// How the kernel of gemm/hopper_kernel.cuh reads and writes convolutions of images (n, h, w, c): as
// implicit GEMM, whose gathered operand TMA copies from the images (im2col). A panel is 64 channels
// at a kernel offset, so that channels are padded to 64 by reading zeros.
#pragma once
#include "cuda/gemm/hopper_kernel.cuh"
#include "cuda/runtime/divisor.cuh"

namespace dlsys {
namespace cuda {
namespace channels_last {

constexpr int kChannelsOfPanel = 64;

// Where the positions of a filter lie in images, and its kernel offsets.
struct PixelLayout {
  Divisor by_positions, by_width;        // of an image, of a line
  int first_h, first_w, step_h, step_w;  // of positions
  Divisor by_panels, by_kernel_w;        // of channels, of kernel offsets in a row
  int kernel_step_h, kernel_step_w;
  int filter_first, filter_step_h, filter_step_w;  // the offsets' numbers in the filter
  bool as_pixels;  // results are stored at the positions of an image map, not in rows

  struct Pixel {
    int w, h, n;
  };
  __device__ __forceinline__ Pixel InGrid(int position) const {
    const int n = position / by_positions, rest = position - n * (int)by_positions.value;
    const int i = rest / by_width;
    return {rest - i * (int)by_width.value, i, n};
  }
  __device__ __forceinline__ Pixel At(int position) const {
    const Pixel p = InGrid(position);
    return {first_w + p.w * step_w, first_h + p.h * step_h, p.n};
  }
};

// Forward and data gradient: M = positions, N = filters, K = (kernel offset, channel). B is the
// filter (filters, kernel, channels), as a map of three axes.
template <class E, class T>
class Correlation16 {
 public:
  using Layout = PixelLayout;
  static constexpr bool kAlongM = false, kAlongN = false, kHasEpilogue = false;

  __device__ __forceinline__ Correlation16(const hopper::Params&, const Layout& layout,
                                           const hopper::TileOrigin& origin)
      : layout_(layout), col_(origin.col), at_(layout.At(origin.row)) {}

  __device__ __forceinline__ void Load(const CUtensorMap* map_a, const CUtensorMap* map_b,
                                       int panel, int first, uint32_t a, uint32_t b,
                                       uint32_t barrier) const {
    const int offset = panel / layout_.by_panels;
    const int c = (panel - offset * (int)layout_.by_panels.value) * kChannelsOfPanel;
    const int i = offset / layout_.by_kernel_w, j = offset - i * (int)layout_.by_kernel_w.value;
    hopper::LoadPixels<false>(a, map_a, barrier, c, at_.w, at_.h, at_.n, j * layout_.kernel_step_w,
                              i * layout_.kernel_step_h);
    const int in_filter =
        layout_.filter_first + i * layout_.filter_step_h + j * layout_.filter_step_w;
    hopper::LoadBox<(T::kCluster > 1)>(b, map_b, barrier, c, in_filter, col_ + first);
  }

  static __device__ __forceinline__ void Store(const Layout& layout, const CUtensorMap* map,
                                               uint32_t from, int row, int col, int z) {
    if (layout.as_pixels) {
      const PixelLayout::Pixel p = layout.InGrid(row);
      hopper::StorePixels(map, from, col, p.w, p.h, p.n);
    } else {
      hopper::StoreBox(map, from, col, row, z);
    }
  }

 private:
  const Layout& layout_;
  int col_;
  PixelLayout::Pixel at_;
};

// Filter gradient: M = filters, N = (kernel offset, channel), K = positions.
template <class E, class T>
class FilterGradient16 {
 public:
  using Layout = PixelLayout;
  static constexpr bool kAlongM = true, kAlongN = true, kHasEpilogue = false;

  __device__ __forceinline__ FilterGradient16(const hopper::Params&, const Layout& layout,
                                              const hopper::TileOrigin& origin)
      : layout_(layout), origin_(origin) {}

  __device__ __forceinline__ void Load(const CUtensorMap* map_a, const CUtensorMap* map_b,
                                       int panel, int first, uint32_t a, uint32_t b,
                                       uint32_t barrier) const {
    const int position = panel * kPositions;
    hopper::LoadPanel<E, true, false, T::kTileM>(a, map_a, barrier, origin_.row, position, 0);
    const PixelLayout::Pixel at = layout_.At(position);
#pragma unroll
    for (int col = 0; col < T::kTileN / T::kCluster; col += kChannelsOfPanel) {
      const int column = (origin_.col + first + col) / kChannelsOfPanel;
      const int offset = column / layout_.by_panels;
      const int c = (column - offset * (int)layout_.by_panels.value) * kChannelsOfPanel;
      const int i = offset / layout_.by_kernel_w, j = offset - i * (int)layout_.by_kernel_w.value;
      hopper::LoadPixels<(T::kCluster > 1)>(b + col * T::kRowNbytes, map_b, barrier, c, at.w, at.h,
                                            at.n, j * layout_.kernel_step_w,
                                            i * layout_.kernel_step_h);
    }
  }

  static __device__ __forceinline__ void Store(const Layout&, const CUtensorMap* map, uint32_t from,
                                               int row, int col, int z) {
    hopper::StoreBox(map, from, col, row, z);
  }

 private:
  static constexpr int kPositions = 128 / (int)sizeof(E);  // of a panel
  const Layout& layout_;
  const hopper::TileOrigin& origin_;
};

}  // namespace channels_last
}  // namespace cuda
}  // namespace dlsys
