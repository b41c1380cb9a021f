// Packing of panels, for the table of tile.h: copies with strides, of which one is 1. Where the
// lines of a panel are contiguous along k, squares of kWidth x kWidth are transposed in registers.
// Limited by the shuffles of that, else by memory.
#pragma once
#include <cstdint>
#include <cstring>
#include <utility>

#include "cpu/runtime/simd.h"

namespace dlsys {
namespace cpu {

template <int kWidth>
struct Vectors {
  typedef float Aligned __attribute__((vector_size(kWidth * sizeof(float))));
  typedef float Unaligned
      __attribute__((vector_size(kWidth * sizeof(float)), aligned(4), may_alias));
  typedef int32_t Indices __attribute__((vector_size(kWidth * sizeof(float))));
};

// Exchanges the off-diagonal kStep x kStep blocks of two rows: one round of a transposition.
template <int kWidth, int kStep, int... j>
DLSYS_INLINE void ExchangeBlocks(typename Vectors<kWidth>::Aligned* x,
                                 typename Vectors<kWidth>::Aligned* y,
                                 std::integer_sequence<int, j...>) {
  const auto a = *x, b = *y;
#if defined(__clang__) || __GNUC__ >= 12
  *x = __builtin_shufflevector(a, b, (j & kStep ? kWidth + j - kStep : j)...);
  *y = __builtin_shufflevector(a, b, (j & kStep ? kWidth + j : j + kStep)...);
#else
  using Indices = typename Vectors<kWidth>::Indices;
  *x = __builtin_shuffle(a, b, Indices{(j & kStep ? kWidth + j - kStep : j)...});
  *y = __builtin_shuffle(a, b, Indices{(j & kStep ? kWidth + j : j + kStep)...});
#endif
}

template <int kWidth, int kStep = 1>
DLSYS_INLINE void Transpose(typename Vectors<kWidth>::Aligned* rows) {
  if constexpr (kStep < kWidth) {
    DLSYS_UNROLL
    for (int i = 0; i < kWidth; i++)
      if (!(i & kStep))
        ExchangeBlocks<kWidth, kStep>(rows + i, rows + i + kStep,
                                      std::make_integer_sequence<int, kWidth>{});
    Transpose<kWidth, 2 * kStep>(rows);
  }
}

// `count` values of a row, then zeros.
template <int kWidth>
DLSYS_INLINE void LoadSome(const float* from, int64_t count,
                           typename Vectors<kWidth>::Aligned* to) {
  if (count >= kWidth) {
    *to = *(const typename Vectors<kWidth>::Unaligned*)from;
    return;
  }
  *to = typename Vectors<kWidth>::Aligned{};
  memcpy(to, from, count * sizeof(float));
}

// The panel from lines that are contiguous along k. A panel that is no multiple of a vector is
// stored in ascending order, each row over what the one before it wrote too much.
template <int kWidth, int kPanel>
DLSYS_INLINE void PackTransposed(const float* from, int64_t lines, int64_t line, int64_t k,
                                 float* to) {
  constexpr int kGroups = (kPanel + kWidth - 1) / kWidth;
  using Aligned = typename Vectors<kWidth>::Aligned;
  for (int64_t p0 = 0; p0 < k; p0 += kWidth) {
    const int64_t steps = k - p0 < kWidth ? k - p0 : kWidth;
    Aligned square[kGroups][kWidth];
    for (int g = 0; g < kGroups; g++) {
      DLSYS_UNROLL
      for (int r = 0; r < kWidth; r++) {
        const int64_t i = g * kWidth + r;
        LoadSome<kWidth>(from + i * line + p0, i < kPanel && i < lines ? steps : 0, &square[g][r]);
      }
      Transpose<kWidth>(square[g]);
    }
    for (int64_t p = 0; p < steps; p++)
      for (int g = 0; g < kGroups; g++)
        *(typename Vectors<kWidth>::Unaligned*)(to + (p0 + p) * kPanel + g * kWidth) = square[g][p];
  }
}

// The panel from lines that are contiguous across it. What a row holds behind the last line is not
// used, so it may be the next elements of the matrix, as far as there are any.
template <int kPanel>
DLSYS_INLINE void PackRows(const float* from, int64_t lines, int64_t step, int64_t k, float* to) {
  const int64_t short_rows = (kPanel - lines + step - 1) / step;
  const int64_t full = k > short_rows ? k - short_rows : 0;
  for (int64_t p = 0; p < full; p++)
    memcpy(to + p * kPanel, from + p * step, kPanel * sizeof(float));
  for (int64_t p = full; p < k; p++) {
    float* row = to + p * kPanel;
    for (int64_t j = 0; j < lines; j++) row[j] = from[p * step + j];
    for (int64_t j = lines; j < kPanel; j++) row[j] = 0.f;
  }
}

template <int kWidth, int kPanel>
DLSYS_INLINE void Pack(const float* from, int64_t lines, int64_t line, int64_t step, int64_t k,
                       float* to) {
  if (line == 1) return PackRows<kPanel>(from, lines, step, k, to);
  PackTransposed<kWidth, kPanel>(from, lines, line, k, to);
}

}  // namespace cpu
}  // namespace dlsys
