// The kernels of conv + bias + relu + max-pool share this on the CPU: the part of the input that
// windows see, which elements of it are padding, and transpositions of small matrices in registers,
// which bring positions side by side for SIMD. operators/conv_pool.h has the contract.
// Limited by the multiply-adds of the direct convolution that uses them.
#pragma once
#include <algorithm>
#include <cstring>

#include "cpu/gemm/pack.h"
#include "cpu/runtime/common.h"
#include "cpu/runtime/simd.h"
#include "operators/conv_pool.h"

namespace dlsys {
namespace cpu {

// y and codes; bias may be null.
void ConvPoolForward(const ConvPool& p, const float* x, const float* f, const float* bias,
                     bool relu, float* y, uint8_t* code);
void ConvPoolDataGradient(const ConvPool& p, const float* f, const float* dy, const uint8_t* code,
                          float* dx);
// db may be null.
void ConvPoolFilterGradient(const ConvPool& p, const float* x, const float* dy, const uint8_t* code,
                            float* df, float* db);

// H x W of the padded input that windows see.
inline HW SeenByWindows(const ConvPool& p) {
  return {p.conv.out.h + p.conv.kernel.h - 1, p.conv.out.w + p.conv.kernel.w - 1};
}

// Of `extent` padded elements, the first of them `pad` in front of the input, those inside it:
// [begin, end).
struct Inside {
  int64_t begin, end;
  Inside(int64_t extent, int64_t pad, int64_t in)
      : begin(std::clamp<int64_t>(pad, 0, extent)), end(std::clamp(pad + in, begin, extent)) {}
  int64_t Size() const { return end - begin; }
};

// ---- transposition ----

template <int kWidth>
DLSYS_INLINE void StoreRow(const typename Vectors<kWidth>::Aligned& v, float* to) {
  *(typename Vectors<kWidth>::Unaligned*)to = v;
}
template <int kWidth>
DLSYS_INLINE void StoreRow(const typename Vectors<kWidth>::Aligned& v, uint8_t* to) {
  typedef uint8_t Bytes __attribute__((vector_size(kWidth)));
  using Integers = typename Vectors<kWidth>::Indices;
  const Bytes bytes = __builtin_convertvector(__builtin_convertvector(v, Integers), Bytes);
  memcpy(to, &bytes, sizeof bytes);
}

// to[k * to_pitch + i] = from[i * from_pitch + k] of a square. Of fewer rows the last one is
// repeated behind them; columns from `cols` on are not stored.
template <int kWidth, class To>
DLSYS_INLINE void TransposeSquare(const float* from, int64_t from_pitch, int64_t rows, To* to,
                                  int64_t to_pitch, int64_t cols) {
  typename Vectors<kWidth>::Aligned square[kWidth];
  DLSYS_UNROLL
  for (int64_t k = 0; k < kWidth; k++)
    square[k] =
        *(const typename Vectors<kWidth>::Unaligned*)(from + std::min(k, rows - 1) * from_pitch);
  Transpose<kWidth>(square);
  DLSYS_UNROLL
  for (int k = 0; k < kWidth; k++)
    if (k < cols) StoreRow<kWidth>(square[k], to + k * to_pitch);
}

// As Transpose below, in squares, of which the last of a row or a column overlaps the one before.
template <int kWidth, class To>
DLSYS_INLINE void TransposeSquares(const float* from, int64_t from_pitch, int64_t rows,
                                   int64_t cols, To* to, int64_t to_pitch) {
  for (int64_t j = 0; j < cols; j += kWidth)
    for (int64_t i = 0; i < rows; i += kWidth) {
      const int64_t row = std::min(i, rows - kWidth), col = std::min(j, cols - kWidth);
      TransposeSquare<kWidth>(from + row * from_pitch + col, from_pitch, kWidth,
                              to + col * to_pitch + row, to_pitch, kWidth);
    }
}

// to[j * to_pitch + i] = from[i * from_pitch + j] for i < rows and j < cols.
template <class To>
inline void Transpose(const float* from, int64_t from_pitch, int64_t rows, int64_t cols, To* to,
                      int64_t to_pitch) {
  const int64_t fewer = std::min(rows, cols);
#ifdef __x86_64__
  const Isa isa = CurrentIsa();
  if (fewer >= 16 && isa == Isa::kAvx512)
    return CallAvx512([&]() __attribute__((always_inline)) {
      TransposeSquares<16>(from, from_pitch, rows, cols, to, to_pitch);
    });
  if (fewer >= 8 && isa != Isa::kBaseline)
    return CallAvx2([&]() __attribute__((always_inline)) {
      TransposeSquares<8>(from, from_pitch, rows, cols, to, to_pitch);
    });
#endif
  if (fewer >= 4) return TransposeSquares<4>(from, from_pitch, rows, cols, to, to_pitch);
  for (int64_t i = 0; i < rows; i++)
    for (int64_t j = 0; j < cols; j++) to[j * to_pitch + i] = (To)from[i * from_pitch + j];
}

}  // namespace cpu
}  // namespace dlsys
