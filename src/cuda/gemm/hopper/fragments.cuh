// Products of float32 whose A is read into registers: wgmma reads tf32 from shared memory along K
// alone, but takes A as fragments in registers as well, which its threads may read in any order and
// cut into parts.
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

// Of a panel of A, by blocks of 64 rows and eights of K.
template <class T, int kEights>
using Fragments = uint32_t[T::kWarpgroupM][kEights][4];

template <class T, bool kAlongM, int kEights>
__device__ __forceinline__ void ReadFragments(Fragments<T, kEights>& a, const unsigned char* panel,
                                              int first_row, int first_eight) {
  const int thread = threadIdx.x % 128;
  if constexpr (kAlongM) {
    constexpr int kRowsOfBox = 32, kBox = kRowsOfBox * 128;
    const int row = RowAcross(thread), k = thread % 4;
    const unsigned char* const from = panel + (first_row + row) / kRowsOfBox * kBox +
                                      first_eight * 1024 + k * 128 +
                                      (row % kRowsOfBox / 4 ^ k) * 16 + row % 4 * 4;
    // Four of K on, the swizzle takes the other half of the 128 bytes.
    const int further = 4 * 128 + (row % kRowsOfBox / 16 ? -64 : 64);
#pragma unroll
    for (int i = 0; i < T::kWarpgroupM; i++) {
#pragma unroll
      for (int q = 0; q < kEights; q++) {
        const unsigned char* const at = from + i * 2 * kBox + q * 1024;
        const float2 near = *(const float2*)at, far = *(const float2*)(at + further);
        a[i][q][0] = __float_as_uint(near.x), a[i][q][1] = __float_as_uint(near.y);
        a[i][q][2] = __float_as_uint(far.x), a[i][q][3] = __float_as_uint(far.y);
      }
    }
  } else {
    const int row = thread % 32 / 4, swizzled = row * 16 + thread % 4 * 4;
    const unsigned char* const from = panel + (first_row + thread / 32 * 16 + row) * 128;
#pragma unroll
    for (int i = 0; i < T::kWarpgroupM; i++) {
#pragma unroll
      for (int q = 0; q < kEights; q++) {
#pragma unroll
        for (int part = 0; part < 4; part++) {
          const int chunk = (first_eight + q) * 32 + part / 2 * 16;
          a[i][q][part] =
              *(const uint32_t*)(from + i * 64 * 128 + part % 2 * 8 * 128 + (swizzled ^ chunk));
        }
      }
    }
  }
}

// What a thread multiplies at once: a panel where registers allow it, or half of one.
template <class T>
constexpr int kEightsAtOnce = T::kWarpgroupM == 1 || T::kTileN <= 64 ? 4 : 2;

// Adds the products of `count` panels, first into zeros; fragments are read while those before are
// multiplied. `sums`, `release` and `issued` are those of MultiplyPanels; where sums are wanted, A
// is not rounded yet. With kTurnsB, stages have a second barrier: B lies along K.
template <class T, bool kAlongM, bool kTurnsB, class Sums, class Release, class Issued>
__device__ __forceinline__ void MultiplyFragments(float (&d)[T::kWarpgroupM][T::kBlocks][4],
                                                  Sums& sums, int count,
                                                  const unsigned char* shared, uint32_t full,
                                                  int first_row, RingPosition<T::kStages>& at,
                                                  Release&& release, Issued&& issued) {
  constexpr int kEights = kEightsAtOnce<T>;
  Fragments<T, kEights> even, odd;
  int previous = 0;
  bool takes = false;  // the panel, for the sums
  const auto multiply = [&](auto& a, int panel, auto first_eight) {
    constexpr int kFirst = decltype(first_eight)::value;
    const unsigned char* stage = shared + at.stage * T::kStageNbytes;
    const uint32_t b = SharedAddress(stage) + T::kPanelA;
    if (kFirst == 0) WaitForPhase(full + at.stage * 8, at.parity);
    ReadFragments<T, kAlongM, kEights>(a, stage, first_row, kFirst);
    if (Sums::kMade && sums.AreWanted()) {
      if (kFirst == 0) takes = sums.TakesNext();
#pragma unroll
      for (int q = 0; q < T::kWarpgroupM * kEights; q++) {
        uint32_t (&x)[4] = a[q / kEights][q % kEights];
        if (takes) sums.Add(q / kEights, x);
#pragma unroll
        for (int e = 0; e < 4; e++) x[e] = __float_as_uint(RoundedToTf32(__uint_as_float(x[e])));
      }
    }
    if (kTurnsB && kFirst == 0) WaitForPhase(full + (T::kTurnedAt + at.stage) * 8, at.parity);
    BeginProducts();
#pragma unroll
    for (int q = 0; q < kEights; q++) {
      const uint64_t of_b = Descriptor(b + (kFirst + q) * 32, 16, 1024);
#pragma unroll
      for (int i = 0; i < T::kWarpgroupM; i++)
        MultiplyAdd<float, false>(d[i], a[i][q], of_b, panel + kFirst + q > 0);
    }
    CloseProducts();
    WaitForProducts<1>();
    if (kFirst == 0 && panel > 0) release(previous);
    if (kFirst + kEights < 4) return;
    previous = at.stage;
    at.Advance();
  };
  constexpr std::integral_constant<int, 0> kBegin;
  // ptxas has to see that no registers are written whose products may be under way.
  if constexpr (kEights == 2) {
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

// ---- 3xtf32 ----

// An element as two of tf32. An infinity or NaN is in the upper part alone: its difference would be
// NaN.
struct Tf32Parts {
  uint32_t upper, lower;
};
__device__ __forceinline__ Tf32Parts PartsOf(float x) {
  const float upper = __uint_as_float(__float_as_uint(RoundedToTf32(x)) & 0xFFFFE000u);
  const float rest = fabsf(upper) < INFINITY ? x - upper : 0.f;
  return {__float_as_uint(upper), __float_as_uint(RoundedToTf32(rest))};
}

template <class T, int kEights>
struct FragmentsInParts {
  Fragments<T, kEights> upper, lower;
};

// The same as MultiplyFragments by both parts of B, of which A gets its own in registers. Tensor
// cores cut off what an addition does not hold, so that their error grows with K: a few panels'
// sums at a time are added by ordinary, rounded additions.
template <class T, bool kAlongM, bool kTurnsB, class Release>
__device__ __forceinline__ void MultiplyFragmentsExactly(
    float (&sums)[T::kWarpgroupM][T::kBlocks][4], int count, const unsigned char* shared,
    uint32_t full, int first_row, RingPosition<T::kStages>& at, Release&& release) {
  constexpr int kPanels = 4, kEights = 2;
  FragmentsInParts<T, kEights> even, odd;
#pragma unroll
  for (int q = 0; q < T::kWarpgroupM * T::kBlocks; q++) {
    float (&x)[4] = sums[q / T::kBlocks][q % T::kBlocks];
    x[0] = x[1] = x[2] = x[3] = 0.f;
  }
  for (int begin = 0; begin < count; begin += kPanels) {
    float d[T::kWarpgroupM][T::kBlocks][4];
    const int panels = min(kPanels, count - begin);
    int previous = 0;
    const auto multiply = [&](auto& a, int panel, auto first_eight) {
      constexpr int kFirst = decltype(first_eight)::value;
      const unsigned char* stage = shared + at.stage * T::kStageNbytes;
      const uint32_t b = SharedAddress(stage) + T::kPanelA;
      if (kFirst == 0) WaitForPhase(full + at.stage * 8, at.parity);
      ReadFragments<T, kAlongM, kEights>(a.upper, stage, first_row, kFirst);
#pragma unroll
      for (int q = 0; q < T::kWarpgroupM * kEights * 4; q++) {
        const int i = q / 4 / kEights, eight = q / 4 % kEights;
        const Tf32Parts parts = PartsOf(__uint_as_float(a.upper[i][eight][q % 4]));
        a.upper[i][eight][q % 4] = parts.upper, a.lower[i][eight][q % 4] = parts.lower;
      }
      if (kTurnsB && kFirst == 0) WaitForPhase(full + (T::kTurnedAt + at.stage) * 8, at.parity);
      BeginProducts();
#pragma unroll
      for (int product = 0; product < 3; product++) {  // the smaller ones first
#pragma unroll
        for (int q = 0; q < kEights; q++) {
          const uint32_t part = product == 1 ? T::kPanelB / 2 : 0;
          const uint64_t of_b = Descriptor(b + part + (kFirst + q) * 32, 16, 1024);
#pragma unroll
          for (int i = 0; i < T::kWarpgroupM; i++)
            MultiplyAdd<float, false>(d[i], product == 0 ? a.lower[i][q] : a.upper[i][q], of_b,
                                      panel + kFirst + product + q > 0);
        }
      }
      CloseProducts();
      WaitForProducts<1>();
      if (kFirst == 0) {
        if (panel > 0) release(previous);
        return;
      }
      previous = at.stage;
      at.Advance();
    };
    for (int panel = 0; panel < panels; panel++) {
      multiply(even, panel, std::integral_constant<int, 0>());
      multiply(odd, panel, std::integral_constant<int, 2>());
    }
    WaitForProducts<0>();
    release(previous);
#pragma unroll
    for (int q = 0; q < T::kWarpgroupM * T::kBlocks; q++) {
      float (&x)[4] = sums[q / T::kBlocks][q % T::kBlocks];
#pragma unroll
      for (int e = 0; e < 4; e++) x[e] += d[q / T::kBlocks][q % T::kBlocks][e];
    }
  }
}

}  // namespace hopper
}  // namespace cuda
}  // namespace dlsys
