// What a consumer multiplies: panels in shared memory by wgmma into accumulators in registers, and
// the sums of A beside them. hopper/fragments.cuh has the products of A in registers. Tensor cores
// limit it, where panels are there in time.
#pragma once
#include "cuda/gemm/hopper/panels.cuh"

namespace dlsys {
namespace cuda {
namespace hopper {

template <class T>
using Accumulators = float[T::kWarpgroupM][T::kBlocks][4];

// The sums over K of a consumer's rows of A, as products with ones, or of fragments in float32. The
// tiles of C that read the same rows take their panels in turn, so that all are equally long.
template <class E, class T, class Source>
class RowSums {
 public:
  static constexpr bool kOfFragments = Source::kReadsA != ReadsA::kShared;
  static constexpr bool kMade = Source::kSumsA && (kOfFragments || T::kMakesSums);
  static constexpr bool kByProducts = kMade && !kOfFragments;

  __device__ __forceinline__ RowSums(const Params& params, uint32_t memory) : params_(params) {
    if (kByProducts) ones_ = Descriptor(memory + T::kOnesAt, 16, 1024);
  }
  __device__ __forceinline__ void Begin(const Segment& segment, int col) {
    if (!kMade) return;
    const int tiles = params_.col_tiles;
    col_tile_ = col / params_.step;
    wait_ = params_.sums ? (col_tile_ - segment.begin % tiles + tiles) % tiles : INT32_MAX;
#pragma unroll
    for (int q = 0; q < 4 * T::kWarpgroupM; q++) d_[q / 4][0][q % 4] = 0.f;
  }
  __device__ __forceinline__ bool AreWanted() const { return params_.sums; }
  // True where the next panel falls to this tile.
  __device__ __forceinline__ bool TakesNext() {
    if (wait_-- > 0) return false;
    wait_ = params_.col_tiles - 1;
    return true;
  }
  __device__ __forceinline__ void Add(int i, uint64_t of_a) {
    if constexpr (kByProducts) MultiplyAdd<E, Source::kAlongM, false>(d_[i], of_a, ones_, true);
  }
  __device__ __forceinline__ void Add(int i, const uint32_t (&of_a)[4]) {
    if constexpr (kMade) {
      d_[i][0][0] += __uint_as_float(of_a[0]) + __uint_as_float(of_a[2]);
      d_[i][0][2] += __uint_as_float(of_a[1]) + __uint_as_float(of_a[3]);
    }
  }
  // Stores the part of a segment; the last split of a tile clears the parts that it does not have.
  __device__ __forceinline__ void Store(const Segment& segment, int first_row) {
    if (!kMade || !params_.sums) return;
    if constexpr (kOfFragments) {
#pragma unroll
      for (int q = 0; q < 2 * T::kWarpgroupM; q++) {
        float& sum = d_[q / 2][0][q % 2 * 2];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      }
    }
    if (threadIdx.x % 4) return;
    const int end = segment.split + 1 < segment.splits ? segment.split + 1 : params_.sum_parts;
    const int row0 = first_row + RowOfThread<Source>(threadIdx.x % 128);
    const int rows = kTransposed<Source> ? params_.n : params_.m;
#pragma unroll 1
    for (int part = segment.split; part < end; part++) {
      float* const to =
          params_.sums + ((int64_t)col_tile_ * params_.sum_parts + part) * rows + row0;
#pragma unroll
      for (int i = 0; i < 2 * T::kWarpgroupM; i++) {
        const int row = i / 2 * 64 + i % 2 * kBelow<Source>;
        if (row0 + row < rows) to[row] = part == segment.split ? d_[i / 2][0][i % 2 * 2] : 0.f;
      }
    }
  }

 private:
  const Params& params_;
  uint64_t ones_;
  float d_[T::kWarpgroupM][1][4];
  int col_tile_, wait_;
};

// Adds the products of `count` panels, first into zeros. Each stage is released as soon as the
// products that read it are done; `issued` is called when all are under way.
template <class E, class T, bool kAlongM, bool kAlongN, class Sums, class Release, class Issued>
__device__ __forceinline__ void MultiplyPanels(Accumulators<T>& d, Sums& sums, int count,
                                               uint32_t memory, uint32_t full, int first_row,
                                               RingPosition<T::kStages>& at, Release&& release,
                                               Issued&& issued) {
  constexpr int kAcross = 128 / (int)sizeof(E) * T::kRowNbytes;  // a column of boxes
  int previous = 0;
  for (int panel = 0; panel < count; panel++, at.Advance()) {
    const uint32_t a = memory + at.stage * T::kStageNbytes + first_row * T::kRowNbytes;
    const uint32_t b = memory + at.stage * T::kStageNbytes + T::kPanelA;
    const auto of_a = [&](int i, int k) {
      const uint32_t rows = a + i * 64 * T::kRowNbytes;
      return kAlongM ? Descriptor(rows + k * 2048, kAcross, 1024)
                     : Descriptor(rows + k * 32, 16, 1024);
    };
    WaitForPhase(full + at.stage * 8, at.parity);
    BeginProducts();
#pragma unroll
    for (int k = 0; k < 4; k++) {  // 32 bytes of K, or 16 rows of it
      const uint64_t of_b =
          kAlongN ? Descriptor(b + k * 2048, kAcross, 1024) : Descriptor(b + k * 32, 16, 1024);
#pragma unroll
      for (int i = 0; i < T::kWarpgroupM; i++)
        MultiplyAdd<E, kAlongM, kAlongN>(d[i], of_a(i, k), of_b, panel + k > 0);
    }
    if (Sums::kByProducts && sums.TakesNext()) {
      BeginProducts();
#pragma unroll
      for (int q = 0; q < 4 * T::kWarpgroupM; q++) sums.Add(q / 4, of_a(q / 4, q % 4));
    }
    CloseProducts();
    WaitForProducts<1>();
    if (panel > 0) release(previous);
    previous = at.stage;
  }
  issued();
  WaitForProducts<0>();
  release(previous);
}

// The same of a tile whose B stays in memory, and whose A is one stage: the pixels of blocks of
// positions, which products at other kernel offsets read shifted.
template <class E, class T, class Release, class Issued>
__device__ __forceinline__ void MultiplyShifted(Accumulators<T>& d, uint32_t memory, uint32_t full,
                                                RingPosition<T::kStages>& at, Release&& release,
                                                Issued&& issued) {
  const uint32_t a = memory + at.stage * T::kStageNbytes, b = memory + T::kFilterAt;
  WaitForPhase(full + T::kFilterBarrierAt * 8, 0);
  WaitForPhase(full + at.stage * 8, at.parity);
  BeginProducts();
#pragma unroll
  for (int offset = 0; offset < T::kOffsets; offset++) {
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const uint64_t of_b = Descriptor(b + offset * T::kPanelB + k * 32, 16, 1024);
#pragma unroll
      for (int i = 0; i < T::kWarpgroupM; i++)
        MultiplyAdd<E, false, false>(
            d[i],
            Descriptor(a + i * T::kBlockNbytes + T::ShiftOf(offset) + k * 32, 16, T::kLineNbytes),
            of_b, offset + k > 0);
    }
  }
  CloseProducts();
  issued();
  WaitForProducts<0>();
  release(at.stage);
  at.Advance();
}

}  // namespace hopper
}  // namespace cuda
}  // namespace dlsys
