// Operand panels: blocks of A or B on their way from global to shared memory by cp.async, several
// stages in flight. A panel keeps the layout of global memory (nothing is transposed), so copies
// need no registers. Before sm_80, which lacks cp.async, each copy is synchronous.
#pragma once
#include "cuda/runtime/launch.cuh"

namespace dlsys {
namespace cuda {

// Copies p[0..3], of which the first `valid` exist; the rest become zero. kAligned: both sides are
// 16-byte aligned, and all four exist or none does.
template <bool kAligned>
__device__ __forceinline__ void CopyQuad(float* to, const float* p, int valid) {
  if constexpr (kAligned) {
    CopyAsync16(to, p, valid > 0);
  } else {
#pragma unroll
    for (int e = 0; e < 4; e++) CopyAsync4(to + e, p + e, valid > e);
  }
}

__device__ __forceinline__ void CopyQuad(float* to, const float* p, int valid, bool aligned) {
  aligned ? CopyQuad<true>(to, p, valid) : CopyQuad<false>(to, p, valid);
}

constexpr int PanelPadding(bool k_major) { return k_major ? 4 : 8; }

// Successive panels, kExtent rows of op(A) (or columns of op(B)) by kTileK. kKMajor: K is
// contiguous, (extent, k) in global and shared memory alike, else (k, extent). Elements past K are
// zero; those past the extent are undefined. Each of kSlices slices of the threads copies its own
// slice of K.
template <int kExtent, int kTileK, int kThreads, bool kKMajor, int kPadding = PanelPadding(kKMajor),
          int kSlices = 1>
class Panel {
 public:
  // Padding keeps quads 16-byte aligned and the accumulators' reads free of bank conflicts.
  static constexpr int kPitch = (kKMajor ? kTileK : kExtent) + kPadding;
  static constexpr int kNumel = kPitch * (kKMajor ? kExtent : kTileK);
  static constexpr bool kHasSums = true;

  // The first panel begins at `origin` along the extent and at `k`; ld is the leading dimension.
  __device__ Panel(const float* matrix, int64_t extent, int64_t ld, int64_t origin, int64_t k)
      : ld_(ld), valid_((int)min(extent - origin, (int64_t)kExtent)) {
    from_ = matrix + (kKMajor ? (origin + Strided(0)) * ld + k + Contiguous()
                              : (k + Strided(0)) * ld + origin + Contiguous());
  }

  // Issues the copy of the next panel, of which k elements remain along K.
  __device__ __forceinline__ void Copy(float* to, int k, bool aligned) {
    const int strided_valid = kKMajor ? valid_ : k;
    const int contiguous_valid = (kKMajor ? k : valid_) - Contiguous();
    if (aligned)
      CopyAll<true>(to, strided_valid, contiguous_valid);
    else
      CopyAll<false>(to, strided_valid, contiguous_valid);
    from_ += kKMajor ? kTileK : kTileK * ld_;
  }

  // Element (mn, k) of a panel.
  static __device__ __forceinline__ const float& At(const float* panel, int mn, int k) {
    return panel[kKMajor ? mn * kPitch + k : k * kPitch + mn];
  }

 private:
  static constexpr int kStrided = (kKMajor ? kExtent : kTileK) / kSlices;  // of a slice
  static constexpr int kSliceThreads = kThreads / kSlices;
  static constexpr int kQuadsPerRow = (kKMajor ? kTileK : kExtent) / 4;
  static constexpr int kStridedStep = kSliceThreads / kQuadsPerRow;
  static constexpr int kQuads = CeilDiv32(kStrided, kStridedStep);
  static constexpr bool kUneven = kStrided % kStridedStep != 0;
  static_assert(kStridedStep * kQuadsPerRow == kSliceThreads, "the threads copy whole rows");
  static_assert(kSlices == 1 || !kKMajor, "slices are of rows");

  template <bool kAligned>
  __device__ __forceinline__ void CopyAll(float* to, int strided_valid,
                                          int contiguous_valid) const {
    if (!kKMajor && contiguous_valid <= 0) return;
#pragma unroll
    for (int q = 0; q < kQuads; q++) {
      if (kUneven && InSlice(q) >= kStrided) break;
      CopyQuad<kAligned>(to + Strided(q) * kPitch + Contiguous(), from_ + q * kStridedStep * ld_,
                         Strided(q) < strided_valid ? contiguous_valid : 0);
    }
  }

  // Coordinates of this thread's quad q: along the strided and the contiguous dimension.
  static __device__ __forceinline__ int InSlice(int q) {
    const int thread = kSlices > 1 ? (int)threadIdx.x % kSliceThreads : (int)threadIdx.x;
    return thread / kQuadsPerRow + q * kStridedStep;
  }
  static __device__ __forceinline__ int Strided(int q) {
    return (kSlices > 1 ? (int)threadIdx.x / kSliceThreads * kStrided : 0) + InSlice(q);
  }
  static __device__ __forceinline__ int Contiguous() { return (int)threadIdx.x % kQuadsPerRow * 4; }

  const float* from_;
  int64_t ld_;
  int valid_;  // how much of kExtent lies within the matrix
};

// Successive panels of an operand whose K is contiguous in global memory, transposed on the way:
// (k, extent) in shared memory. Each copy is of one element; eight threads read a sector along K.
template <int kExtent, int kTileK, int kThreads>
class TransposedPanel {
 public:
  static constexpr int kPitch = kExtent + 4;  // the four rows of a warp fall in different banks
  static constexpr int kNumel = kPitch * kTileK;
  static constexpr bool kHasSums = true;

  // As Panel's.
  __device__ TransposedPanel(const float* matrix, int64_t extent, int64_t ld, int64_t origin,
                             int64_t k)
      : ld_(ld), valid_((int)min(extent - origin, (int64_t)kExtent)) {
    from_ = matrix + (origin + Row(0)) * ld + k + FirstK();
  }

  __device__ __forceinline__ void Copy(float* to, int k, bool) {
    if (valid_ == kExtent && k >= kTileK)
      CopyAll<true>(to, k);
    else
      CopyAll<false>(to, k);
    from_ += kTileK;
  }

  static __device__ __forceinline__ const float& At(const float* panel, int mn, int k) {
    return panel[k * kPitch + mn];
  }

 private:
  static constexpr int kRowStep = kThreads / 8, kRows = kExtent / kRowStep;
  static_assert(kRowStep * kRows == kExtent && kTileK % 8 == 0, "the threads copy whole octets");

  template <bool kFull>
  __device__ __forceinline__ void CopyAll(float* to, int k) const {
    const float* from = from_;
#pragma unroll
    for (int q = 0; q < kRows; q++, from += kRowStep * ld_) {
#pragma unroll
      for (int octet = 0; octet < kTileK; octet += 8) {
        const bool valid = kFull || (Row(q) < valid_ && FirstK() + octet < k);
        CopyAsync4(to + (FirstK() + octet) * kPitch + Row(q), from + octet, valid);
      }
    }
  }

  static __device__ __forceinline__ int Row(int q) { return (int)threadIdx.x / 8 + q * kRowStep; }
  static __device__ __forceinline__ int FirstK() { return (int)threadIdx.x % 8; }

  const float* from_;
  int64_t ld_;
  int valid_;
};

}  // namespace cuda
}  // namespace dlsys
