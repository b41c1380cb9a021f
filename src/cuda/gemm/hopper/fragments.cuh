// Products of float32 whose A lies along M in shared memory. wgmma reads tf32 from there along K
// alone, but takes A as fragments in registers as well, which its threads may read in any order.
#pragma once
#include "cuda/instructions/hopper.cuh"
#include "cuda/instructions/ring.cuh"

namespace dlsys {
namespace cuda {
namespace hopper {

// The first of the two rows of A, side by side, of which a thread of a consumer reads fragments;
// wgmma counts them as rows l / 4 and l / 4 + 8 of a warp's 16, for lane l. A panel is boxes of
// (K, 32 rows), swizzled: the pairs of half a warp, four of these by four of K, lie in banks of
// their own.
__host__ __device__ constexpr int RowAcross(int thread) {
  const int warp = thread / 32, r = thread % 32 / 4;
  return warp / 2 * 32 + r / 2 % 2 * 16 + warp % 2 * 8 + r / 4 * 4 + r % 2 * 2;
}

// What a thread multiplies at once of a panel of A along M, by blocks of 64 rows and eights of K: a
// panel where registers allow it, or half of one.
template <class T>
constexpr int kEights = T::kWarpgroupM == 1 || T::kTileN <= 64 ? 4 : 2;
template <class T>
using Fragments = uint32_t[T::kWarpgroupM][kEights<T>][4];

template <class T, bool kAlongM>
__device__ __forceinline__ void ReadFragments(Fragments<T>& a, const unsigned char* panel,
                                              int first_row, int first_eight) {
  if constexpr (!kAlongM) {
    const int t = threadIdx.x % 128, r = t % 32 / 4;
    const unsigned char* const rows = panel + (first_row + t / 32 * 16 + r) * 128;
#pragma unroll
    for (int i = 0; i < T::kWarpgroupM; i++) {
#pragma unroll
      for (int q = 0; q < kEights<T>; q++) {
#pragma unroll
        for (int part = 0; part < 4; part++)
          a[i][q][part] = *(const uint32_t*)(rows + i * 64 * 128 + part % 2 * 1024 +
                                             ((r * 16 + t % 4 * 4) ^
                                              ((first_eight + q) * 32 + part / 2 * 16)));
      }
    }
    return;
  }
  constexpr int kRowsOfBox = 32, kBox = kRowsOfBox * 128;
  const int thread = threadIdx.x % 128, row = RowAcross(thread), k = thread % 4;
  const unsigned char* const from = panel + (first_row + row) / kRowsOfBox * kBox +
                                    first_eight * 1024 + k * 128 +
                                    (row % kRowsOfBox / 4 ^ k) * 16 + row % 4 * 4;
  // Four of K on, the swizzle takes the other half of the 128 bytes.
  const int further = 4 * 128 + (row % kRowsOfBox / 16 ? -64 : 64);
#pragma unroll
  for (int i = 0; i < T::kWarpgroupM; i++) {
#pragma unroll
    for (int q = 0; q < kEights<T>; q++) {
      const unsigned char* const at = from + i * 2 * kBox + q * 1024;
      const float2 near = *(const float2*)at, far = *(const float2*)(at + further);
      a[i][q][0] = __float_as_uint(near.x), a[i][q][1] = __float_as_uint(near.y);
      a[i][q][2] = __float_as_uint(far.x), a[i][q][3] = __float_as_uint(far.y);
    }
  }
}

// Adds the products of `count` panels, first into zeros; fragments are read while those before are
// multiplied. `sums`, `release` and `issued` are those of MultiplyPanels; where sums are wanted, A
// is not rounded yet.
template <class T, bool kAlongM, class Sums, class Release, class Issued>
__device__ __forceinline__ void MultiplyPanelsAcross(float (&d)[T::kWarpgroupM][T::kBlocks][4],
                                                     Sums& sums, int count,
                                                     const unsigned char* shared,
                                                     uint32_t full, int first_row,
                                                     RingPosition<T::kStages>& at,
                                                     Release&& release, Issued&& issued) {
  Fragments<T> even, odd;
  int previous = 0;
  bool takes = false;  // the panel, for the sums
  const auto multiply = [&](Fragments<T>& a, int panel, auto first_eight) {
    constexpr int kFirst = decltype(first_eight)::value;
    const unsigned char* stage = shared + at.stage * T::kStageNbytes;
    const uint32_t b = SharedAddress(stage) + T::kPanelA;
    if (kFirst == 0) WaitForPhase(full + at.stage * 8, at.parity);
    ReadFragments<T, kAlongM>(a, stage, first_row, kFirst);
    if (Sums::kMade && sums.AreWanted()) {
      if (kFirst == 0) takes = sums.TakesNext();
#pragma unroll
      for (int q = 0; q < T::kWarpgroupM * kEights<T>; q++) {
        uint32_t (&x)[4] = a[q / kEights<T>][q % kEights<T>];
        if (takes) sums.Add(q / kEights<T>, x);
#pragma unroll
        for (int e = 0; e < 4; e++)
          x[e] = __float_as_uint(RoundedToTf32(__uint_as_float(x[e])));
      }
    }
    BeginProducts();
#pragma unroll
    for (int q = 0; q < kEights<T>; q++) {
      const uint64_t of_b = Descriptor(b + (kFirst + q) * 32, 16, 1024);
#pragma unroll
      for (int i = 0; i < T::kWarpgroupM; i++)
        MultiplyAdd<float, false>(d[i], a[i][q], of_b, panel + kFirst + q > 0);
    }
    CloseProducts();
    WaitForProducts<1>();
    if (kFirst == 0 && panel > 0) release(previous);
    if (kFirst + kEights<T> < 4) return;
    previous = at.stage;
    at.Advance();
  };
  constexpr std::integral_constant<int, 0> kBegin;
  // ptxas has to see that no registers are written whose products may be under way.
  if constexpr (kEights<T> == 2) {
    for (int panel = 0; panel < count; panel++) {
      multiply(even, panel, kBegin);
      multiply(odd, panel, std::integral_constant<int, 2>());
    }
  } else {
    int panel = 0;
    for (; panel + 1 < count; panel += 2) {
      multiply(even, panel, kBegin);
      multiply(odd, panel + 1, kBegin);
    }
    if (panel < count) multiply(even, panel, kBegin);
  }
  issued();
  WaitForProducts<0>();
  release(previous);
}

}  // namespace hopper
}  // namespace cuda
}  // namespace dlsys
