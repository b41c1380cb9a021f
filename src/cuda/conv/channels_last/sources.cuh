// How the kernel of gemm/hopper/kernel.cuh reads and writes convolutions of images (n, h, w, c): as
// implicit GEMM, whose gathered operand TMA copies from the images (im2col). A panel is 128 bytes
// of channels at a kernel offset, so that channels are padded by reading zeros.
#pragma once
#include "cuda/gemm/hopper/kernel.cuh"
#include "cuda/runtime/divisor.cuh"

namespace dlsys {
namespace cuda {
namespace channels_last {

template <class E>
constexpr int kChannelsOfPanel = 128 / (int)sizeof(E);

// Where the positions of a filter lie in images, and its kernel offsets.
struct PixelLayout {
  Divisor by_positions, by_width;        // of an image, of a line
  int first_h, first_w, step_h, step_w;  // of positions
  Divisor by_panels, by_kernel_w;        // of channels, of kernel offsets in a row
  int kernel_step_h, kernel_step_w;
  int filter_first, filter_step_h, filter_step_w;  // the offsets' numbers in the filter
  bool as_pixels;  // results are stored at the positions of an image map, not in rows
  int out_step_w, out_step_h, out_step_n;  // between these positions, in pixels

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

// Channels side by side at a kernel offset: a column of the filter's gradient.
struct PixelColumn {
  int c, by_w, by_h;
  static __device__ __forceinline__ PixelColumn Of(const PixelLayout& layout, int column,
                                                   int channels) {
    const int offset = column / layout.by_panels;
    const int i = offset / layout.by_kernel_w, j = offset - i * (int)layout.by_kernel_w.value;
    return {(column - offset * (int)layout.by_panels.value) * channels, j * layout.kernel_step_w,
            i * layout.kernel_step_h};
  }
};

// Forward and data gradient: M = positions, N = filters, K = (kernel offset, channel). B is the
// filter (filters, kernel, channels), as a map of three axes; or, kAcross, one of a single element,
// (channels, filters).
template <class E, class T, bool kAcross = false>
class Correlation16 {
 public:
  using Layout = PixelLayout;
  static constexpr bool kAlongM = false, kAlongN = kAcross, kHasEpilogue = false;
  static constexpr hopper::ReadsA kReadsA = hopper::ReadsA::kShared;
  static constexpr bool kTurnsB = false;
  static constexpr bool kSumsA = false;
  static constexpr bool kFloatResult = false;
  static constexpr hopper::OfColumns kOfColumns = hopper::OfColumns::kNothing;
  static constexpr int kProducers = 2;

  __device__ __forceinline__ Correlation16(const hopper::Params&, const Layout& layout,
                                           const hopper::TileOrigin& origin, int first)
      : layout_(layout), col_(origin.col + first), at_(layout.At(origin.row)) {}

  template <bool kOfA, bool kOfB>
  __device__ __forceinline__ void Load(const CUtensorMap* map_a, const CUtensorMap* map_b,
                                       int panel, uint32_t a, uint32_t b, uint32_t barrier) const {
    const int offset = panel / layout_.by_panels;
    const int c = (panel - offset * (int)layout_.by_panels.value) * kChannelsOfPanel<E>;
    const int i = offset / layout_.by_kernel_w, j = offset - i * (int)layout_.by_kernel_w.value;
    if (kOfA)
      hopper::LoadPixels<false>(a, map_a, barrier, c, at_.w, at_.h, at_.n,
                                j * layout_.kernel_step_w, i * layout_.kernel_step_h);
    const int in_filter =
        layout_.filter_first + i * layout_.filter_step_h + j * layout_.filter_step_w;
    constexpr bool kMulticast = T::kCluster > 1;
    if constexpr (!kOfB)
      return;
    else if constexpr (kAcross)
      hopper::LoadPanel<E, true, kMulticast, T::kTileN / T::kCluster>(b, map_b, barrier, col_, c,
                                                                      0);
    else
      hopper::LoadBox<kMulticast>(b, map_b, barrier, c, in_filter, col_);
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
  static __device__ __forceinline__ int64_t RowOf(const hopper::Params&, const Layout& layout,
                                                  int row, int) {
    if (!layout.as_pixels) return row;
    const PixelLayout::Pixel p = layout.InGrid(row);
    return (int64_t)p.n * layout.out_step_n + p.h * layout.out_step_h + p.w * layout.out_step_w;
  }

 private:
  const Layout& layout_;
  int col_;
  PixelLayout::Pixel at_;
};

// Forward, with the moments of each filter's results.
template <class Base>
struct MomentsLayoutOf : Base {
  float2* moments;
};
using MomentsLayout = MomentsLayoutOf<PixelLayout>;
template <class E, class T>
class CorrelationWithMoments16 : public Correlation16<E, T> {
 public:
  using Layout = MomentsLayout;
  static constexpr hopper::OfColumns kOfColumns = hopper::OfColumns::kMoments;
  using Correlation16<E, T>::Correlation16;
};

// The same with results whose channels are first: columns of C are planes, and `as_pixels`, with
// steps in elements, says where a row is in them. Eight rows of a warp fill a sector.
struct PlanesLayout : PixelLayout {
  int plane;  // elements of one
};
template <class E, class T>
class CorrelationToPlanes : public Correlation16<E, T> {
 public:
  using Layout = PlanesLayout;
  static constexpr bool kToPlanes = true;
  using Correlation16<E, T>::Correlation16;
};

// Data gradient, of which relu's gradient is taken, with its sums for batch normalization.
template <class Base>
struct SumsLayoutOf : Base {
  CUtensorMap map_aux;  // of what the normalization reads
  const uint8_t* bits;
  const float* mean;
  float2* sums;
};
using SumsLayout = SumsLayoutOf<PixelLayout>;
template <class E, class T, bool kAcross>
class CorrelationWithSums16 : public Correlation16<E, T, kAcross> {
 public:
  using Layout = SumsLayout;
  static constexpr hopper::OfColumns kOfColumns = hopper::OfColumns::kGradientSums;
  using Correlation16<E, T, kAcross>::Correlation16;
};

// A tiling of blocks of 8 x 8 positions for a filter of kHeight x kWidth elements, which stays in
// shared memory behind all else. A stage has the pixels that the blocks of a tile meet.
template <class T, int kHeight, int kWidth, int kStages_>
struct WithHalo : T {
  static constexpr bool kHasHalo = true;
  static constexpr int kOffsets = kHeight * kWidth, kPixels = 8 + kWidth - 1,
                       kLines = 8 + kHeight - 1;
  static constexpr int kLineNbytes = kPixels * T::kRowNbytes, kLoadedNbytes = kLines * kLineNbytes;
  static constexpr int kBlockNbytes =
      (kLoadedNbytes + T::kAlignment - 1) / T::kAlignment * T::kAlignment;
  static constexpr int kBlocksOfTile = T::kTileM / 64;
  static constexpr int kStages = kStages_, kStageNbytes = kBlocksOfTile * kBlockNbytes;
  static constexpr int kCopiedNbytes = kBlocksOfTile * kLoadedNbytes;
  static constexpr int kAuxAt = kStages * kStageNbytes + T::kConsumers * T::kStagingNbytes;
  static constexpr int kOnesAt = kAuxAt + T::kAuxTiles * T::kAuxNbytes;
  static constexpr int kFilterAt = kOnesAt + T::kOnesNbytes;
  static constexpr int kSharedNbytes = T::kAlignment + kFilterAt + kOffsets * T::kPanelB;
  static_assert(T::kPingPong && T::kCluster == 1 && T::kTileN == 64, "a tile is a block's own");
  static_assert(kSharedNbytes <= 226 << 10, "227 KB a block, and a few barriers");
  static constexpr int kBoxBarriersAt = 2 * kStages;
  static constexpr int kAuxBarriersAt = kBoxBarriersAt + T::kWarps * T::kBuffers;
  static constexpr int kFilterBarrierAt = kAuxBarriersAt + (T::kConsumers + 1) * T::kAuxTiles;
  static constexpr int kBarriers = kFilterBarrierAt + 1;

  // Bytes from a block's first pixel to that at a kernel offset.
  static __device__ __forceinline__ int ShiftOf(int offset) {
    return offset / kWidth * kLineNbytes + offset % kWidth * T::kRowNbytes;
  }
};

// Rows of the product are positions block by block, whole blocks in each image.
struct BlockLayout : PixelLayout {
  Divisor by_across, by_down;  // blocks of an image

  // The first position of the row's block.
  __device__ __forceinline__ Pixel BlockOf(int row) const {
    const int block = row / 64, down = block / by_across, n = down / by_down;
    return {(block - down * (int)by_across.value) * 8, (down - n * (int)by_down.value) * 8, n};
  }
  __device__ __forceinline__ int64_t PositionOf(int row) const {
    const Pixel p = BlockOf(row);
    return (int64_t)p.n * by_positions.value + (p.h + row % 64 / 8) * (int)by_width.value + p.w +
           row % 8;
  }
  // Copies the rows of the blocks of a tile, or 16 rows, by maps of (channels, w, h, n).
  template <int kRows>
  __device__ __forceinline__ void LoadBlocks(uint32_t to, const CUtensorMap* map, uint32_t barrier,
                                             int row, int col) const {
#pragma unroll
    for (int k = 0; k < kRows; k += 64) {
      const Pixel p = BlockOf(row + k);
      hopper::LoadBox(to + k * 128, map, barrier, col, p.w, p.h, p.n);
    }
  }
  __device__ __forceinline__ void LoadLines(uint32_t to, const CUtensorMap* map, uint32_t barrier,
                                            int row, int col) const {
    const Pixel p = BlockOf(row);
    hopper::LoadBox(to, map, barrier, col, p.w, p.h + row % 64 / 8, p.n);
  }
};

// Forward and data gradient at stride 1 by T, WithHalo: of 64 filters and at most 64 channels.
template <class E, class T, class Layout_, hopper::OfColumns kOfColumns_>
class HaloCorrelation16 {
 public:
  using Layout = Layout_;
  static constexpr bool kAlongM = false, kAlongN = false, kHasEpilogue = false;
  static constexpr hopper::ReadsA kReadsA = hopper::ReadsA::kShared;
  static constexpr bool kTurnsB = false;
  static constexpr bool kSumsA = false, kFloatResult = false;
  static constexpr hopper::OfColumns kOfColumns = kOfColumns_;
  static constexpr int kProducers = 1;

  __device__ __forceinline__ HaloCorrelation16(const hopper::Params&, const Layout& layout,
                                               const hopper::TileOrigin& origin, int)
      : layout_(layout), row_(origin.row) {}

  static __device__ __forceinline__ void LoadFilter(const CUtensorMap* map, const Layout& layout,
                                                    uint32_t to, uint32_t barrier) {
    hopper::ArriveExpecting(barrier, T::kOffsets * T::kPanelB);
#pragma unroll 1
    for (int offset = 0; offset < T::kOffsets; offset++) {
      const int i = offset / layout.by_kernel_w, j = offset - i * (int)layout.by_kernel_w.value;
      hopper::LoadBox<false>(
          to + offset * T::kPanelB, map, barrier, 0,
          layout.filter_first + i * layout.filter_step_h + j * layout.filter_step_w, 0);
    }
  }
  template <bool, bool>
  __device__ __forceinline__ void Load(const CUtensorMap* map_a, const CUtensorMap*, int,
                                       uint32_t a, uint32_t, uint32_t barrier) const {
#pragma unroll
    for (int k = 0; k < T::kBlocksOfTile; k++) {
      const PixelLayout::Pixel p = layout_.BlockOf(row_ + k * 64);
      hopper::LoadBox(a + k * T::kBlockNbytes, map_a, barrier, 0, p.w + layout_.first_w,
                      p.h + layout_.first_h, p.n);
    }
  }
  static __device__ __forceinline__ void Store(const Layout& layout, const CUtensorMap* map,
                                               uint32_t from, int row, int col, int) {
    const PixelLayout::Pixel p = layout.BlockOf(row);
    hopper::StoreBox(map, from, col, p.w, p.h + row % 64 / 8, p.n);
  }
  static __device__ __forceinline__ int64_t RowOf(const hopper::Params&, const Layout& layout,
                                                  int row, int) {
    return layout.PositionOf(row);
  }

 private:
  const Layout& layout_;
  int row_;
};

// Filter gradient, in parts of float32, each the sum over the positions of `panels` of them: M =
// filters, N = (kernel offset, channel), K = positions; or, kSwapped, M and N the other way round.
template <class E, class T, bool kSwapped>
class FilterGradient16 {
 public:
  using Layout = PixelLayout;
  static constexpr bool kAlongM = true, kAlongN = true, kHasEpilogue = false;
  static constexpr hopper::ReadsA kReadsA = hopper::ReadsA::kShared;
  static constexpr bool kTurnsB = false;
  static constexpr bool kSumsA = false;
  static constexpr bool kFloatResult = true;
  static constexpr hopper::OfColumns kOfColumns = hopper::OfColumns::kNothing;
  static constexpr int kProducers = 2;

  __device__ __forceinline__ FilterGradient16(const hopper::Params& params, const Layout& layout,
                                              const hopper::TileOrigin& origin, int first)
      : layout_(layout),
        filter_(kSwapped ? origin.col + first : origin.row),
        first_panel_(origin.z * params.k_panels) {
    const int col = kSwapped ? origin.row : origin.col + first;
#pragma unroll
    for (int k = 0; k < kColumns; k++)
      columns_[k] = PixelColumn::Of(layout, col / kChannelsOfPanel<E> + k, kChannelsOfPanel<E>);
  }

  template <bool kOfA, bool kOfB>
  __device__ __forceinline__ void Load(const CUtensorMap* map_a, const CUtensorMap* map_b,
                                       int panel, uint32_t a, uint32_t b, uint32_t barrier) const {
    const int position = (first_panel_ + panel) * kPositions;
    if (kSwapped ? kOfB : kOfA)
      hopper::LoadPanel<E, true, kSwapped && kMulticast, kSwapped ? kRowsB : T::kTileM>(
          kSwapped ? b : a, kSwapped ? map_b : map_a, barrier, filter_, position, 0);
    if (!(kSwapped ? kOfA : kOfB)) return;
    const PixelLayout::Pixel at = layout_.At(position);
#pragma unroll
    for (int k = 0; k < kColumns; k++)
      hopper::LoadPixels<!kSwapped && kMulticast>(
          (kSwapped ? a : b) + k * kChannelsOfPanel<E> * T::kRowNbytes, kSwapped ? map_a : map_b,
          barrier, columns_[k].c, at.w, at.h, at.n, columns_[k].by_w, columns_[k].by_h);
  }
  static __device__ __forceinline__ int64_t RowOf(const hopper::Params& params, const Layout&,
                                                  int row, int z) {
    return (int64_t)z * params.m + row;
  }

 private:
  static constexpr bool kMulticast = T::kCluster > 1;
  static constexpr int kRowsB = T::kTileN / T::kCluster;
  static constexpr int kColumns = (kSwapped ? T::kTileM : kRowsB) / kChannelsOfPanel<E>;
  static constexpr int kPositions = 128 / (int)sizeof(E);  // of a panel
  const Layout& layout_;
  int filter_, first_panel_;
  PixelColumn columns_[kColumns];
};

// The same of float32, whose B lies along K: a transposed copy of one of the arrays. With kPixels
// that is dy, M = (kernel offset, channel) and N = filters; else, for filters of one element, it is
// x, M = filters and N = channels.
template <class T, bool kPixels>
class FilterGradient32 {
 public:
  using Layout = PixelLayout;
  static constexpr bool kAlongM = true, kAlongN = false, kHasEpilogue = false;
  static constexpr hopper::ReadsA kReadsA = hopper::ReadsA::kRegisters;
  static constexpr bool kTurnsB = false;
  static constexpr bool kFloatResult = true;
  static constexpr hopper::OfColumns kOfColumns = hopper::OfColumns::kNothing;
  static constexpr bool kSumsA = false;
  static constexpr int kProducers = 2;

  __device__ __forceinline__ FilterGradient32(const hopper::Params& params, const Layout& layout,
                                              const hopper::TileOrigin& origin, int first)
      : layout_(layout),
        row_(origin.row),
        col_(origin.col + first),
        first_panel_(origin.z * params.k_panels) {
    if constexpr (kPixels) {
#pragma unroll
      for (int k = 0; k < kColumns; k++)
        columns_[k] = PixelColumn::Of(layout, row_ / kOfPanel + k, kOfPanel);
    }
  }

  template <bool kOfA, bool kOfB>
  __device__ __forceinline__ void Load(const CUtensorMap* map_a, const CUtensorMap* map_b,
                                       int panel, uint32_t a, uint32_t b, uint32_t barrier) const {
    const int position = (first_panel_ + panel) * kOfPanel;
    if (kOfB) hopper::LoadBox<(T::kCluster > 1)>(b, map_b, barrier, position, col_, 0);
    if (!kOfA) return;
    if constexpr (kPixels) {
      const PixelLayout::Pixel at = layout_.At(position);
#pragma unroll
      for (int k = 0; k < kColumns; k++)
        hopper::LoadPixels<false>(a + k * kOfPanel * T::kRowNbytes, map_a, barrier, columns_[k].c,
                                  at.w, at.h, at.n, columns_[k].by_w, columns_[k].by_h);
    } else {
      hopper::LoadPanel<float, true, false, T::kTileM>(a, map_a, barrier, row_, position, 0);
    }
  }
  static __device__ __forceinline__ int64_t RowOf(const hopper::Params& params, const Layout&,
                                                  int row, int z) {
    return (int64_t)z * params.m + row;
  }

 private:
  static constexpr int kOfPanel = kChannelsOfPanel<float>;  // channels, and positions
  static constexpr int kColumns = T::kTileM / kOfPanel;
  const Layout& layout_;
  int row_, col_, first_panel_;
  PixelColumn columns_[kColumns];
};

}  // namespace channels_last
}  // namespace cuda
}  // namespace dlsys
