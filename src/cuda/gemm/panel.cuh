// Panels of a product's operands on their way to shared memory, where they lie as they do in device
// memory: nothing is transposed, so that the copies need no registers and several are under way at
// once. Before sm_80, which has no such copies, each is finished where it is begun.
#pragma once
#include "cuda/runtime/launch.cuh"

namespace dlsys {
namespace cuda {

// Copies p[0..3], of which only the first `valid` exist; the rest become zero. kWhole: both sides
// are aligned, and all four exist or none does.
template <bool kWhole>
__device__ __forceinline__ void CopyQuad(float* to, const float* p, int valid) {
  if constexpr (kWhole) {
    CopyAsync16(to, p, valid > 0);
  } else {
#pragma unroll
    for (int e = 0; e < 4; e++) CopyAsync4(to + e, p + e, valid > e);
  }
}

__device__ __forceinline__ void CopyQuad(float* to, const float* p, int valid, bool whole) {
  whole ? CopyQuad<true>(to, p, valid) : CopyQuad<false>(to, p, valid);
}

// Panels of width x kDepth of a matrix, one after the other along the depth. kDepthFastest: the
// matrix is (width, depth) in memory and so is the panel, else both are (depth, width). Layers that
// do not exist are zeros; what is beyond the width may be anything.
template <int kWidth, int kDepth, int kThreads, bool kDepthFastest,
          int kPadding = kDepthFastest ? 4 : 8>
class Panel {
 public:
  // The padding keeps quads aligned and spreads what the accumulators read over the banks.
  static constexpr int kPitch = (kDepthFastest ? kDepth : kWidth) + kPadding;
  static constexpr int kNumel = kPitch * (kDepthFastest ? kWidth : kDepth);
  static constexpr bool kHasSums = true;

  // Begins at `origin` of the `width` rows of op(A) or columns of op(B), and at `depth`; pitch is
  // the length of a row in memory.
  __device__ Panel(const float* matrix, int64_t width, int64_t pitch, int64_t origin, int64_t depth)
      : pitch_(pitch), room_((int)min(width - origin, (int64_t)kWidth)) {
    from_ = matrix + (kDepthFastest ? (origin + Slow(0)) * pitch + depth + Fast()
                                    : (depth + Slow(0)) * pitch + origin + Fast());
  }

  // Begins to copy the next panel, of which `depth` layers exist.
  __device__ __forceinline__ void Copy(float* to, int depth, bool whole) {
    const int slow_room = kDepthFastest ? room_ : depth;
    const int fast_room = (kDepthFastest ? depth : room_) - Fast();
    if (whole)
      CopyAll<true>(to, slow_room, fast_room);
    else
      CopyAll<false>(to, slow_room, fast_room);
    from_ += kDepthFastest ? kDepth : kDepth * pitch_;
  }

  // The element at (w, d) of a panel.
  static __device__ __forceinline__ const float& At(const float* panel, int w, int d) {
    return panel[kDepthFastest ? w * kPitch + d : d * kPitch + w];
  }

 private:
  static constexpr int kSlow = kDepthFastest ? kWidth : kDepth;
  static constexpr int kQuadsInRow = (kDepthFastest ? kDepth : kWidth) / 4;
  static constexpr int kSlowStep = kThreads / kQuadsInRow;
  static constexpr int kQuads = (kSlow + kSlowStep - 1) / kSlowStep;
  static constexpr bool kUneven = kSlow % kSlowStep != 0;
  static_assert(kSlowStep * kQuadsInRow == kThreads, "the threads copy whole rows");

  template <bool kWhole>
  __device__ __forceinline__ void CopyAll(float* to, int slow_room, int fast_room) const {
    if (!kDepthFastest && fast_room <= 0) return;
#pragma unroll
    for (int q = 0; q < kQuads; q++) {
      if (kUneven && Slow(q) >= kSlow) break;
      CopyQuad<kWhole>(to + Slow(q) * kPitch + Fast(), from_ + q * kSlowStep * pitch_,
                       Slow(q) < slow_room ? fast_room : 0);
    }
  }

  // Where this thread's quad q lies: which row of the panel, and where in the row.
  static __device__ __forceinline__ int Slow(int q) {
    return (int)threadIdx.x / kQuadsInRow + q * kSlowStep;
  }
  static __device__ __forceinline__ int Fast() { return (int)threadIdx.x % kQuadsInRow * 4; }

  const float* from_;
  int64_t pitch_;
  int room_;  // how much of kWidth the matrix has here
};

}  // namespace cuda
}  // namespace dlsys
