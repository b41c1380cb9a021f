// The transforms of Winograd's minimal filtering F(m x m, 3 x 3) over blocks of channels: y = A^T
// [(G g G^T) * (B^T d B)] A, in the notation and with the matrices of Lavin and Gray, "Fast
// algorithms for convolutional neural networks" (2016). The gradient for the filter is the adjoint
// of the same formula: dg = G^T [(A dy A^T) * (B^T d B)] G.
#pragma once
#include <cstdint>
#include <utility>

#include "cpu/runtime/simd.h"

namespace dlsys {
namespace cpu {

constexpr int kBlock = 16;  // channels of a block, side by side in memory
typedef float Block __attribute__((vector_size(kBlock * sizeof(float)), aligned(4), may_alias));

template <int kOut>
struct Winograd;

template <>
struct Winograd<2> {
  static constexpr float kInput[4][4] = {{1, 0, -1, 0}, {0, 1, 1, 0}, {0, -1, 1, 0}, {0, 1, 0, -1}};
  static constexpr float kFilter[4][3] = {{1, 0, 0}, {.5f, .5f, .5f}, {.5f, -.5f, .5f}, {0, 0, 1}};
  static constexpr float kOutput[2][4] = {{1, 1, 1, 0}, {0, 1, -1, -1}};
};

template <>
struct Winograd<4> {
  static constexpr float kInput[6][6] = {{4, 0, -5, 0, 1, 0},  {0, -4, -4, 1, 1, 0},
                                         {0, 4, -4, -1, 1, 0}, {0, -2, -1, 2, 1, 0},
                                         {0, 2, -1, -2, 1, 0}, {0, 4, 0, -5, 0, 1}};
  static constexpr float kFilter[6][3] = {{1 / 4.f, 0, 0},
                                          {-1 / 6.f, -1 / 6.f, -1 / 6.f},
                                          {-1 / 6.f, 1 / 6.f, -1 / 6.f},
                                          {1 / 24.f, 1 / 12.f, 1 / 6.f},
                                          {1 / 24.f, -1 / 12.f, 1 / 6.f},
                                          {0, 0, 1}};
  static constexpr float kOutput[4][6] = {
      {1, 1, 1, 1, 1, 0}, {0, 1, -1, 2, -2, 0}, {0, 1, 1, 4, 4, 0}, {0, 1, -1, 8, -8, 1}};
};

// Matrices as types, so that their zeros and ones cost nothing.
template <int kOut>
struct InputMatrix {
  static constexpr int kRows = kOut + 2, kCols = kOut + 2;
  static constexpr float At(int r, int k) { return Winograd<kOut>::kInput[r][k]; }
};
template <int kOut>
struct FilterMatrix {
  static constexpr int kRows = kOut + 2, kCols = 3;
  static constexpr float At(int r, int k) { return Winograd<kOut>::kFilter[r][k]; }
};
template <int kOut>
struct OutputMatrix {
  static constexpr int kRows = kOut, kCols = kOut + 2;
  static constexpr float At(int r, int k) { return Winograd<kOut>::kOutput[r][k]; }
};
template <class M>
struct Adjoint {
  static constexpr int kRows = M::kCols, kCols = M::kRows;
  static constexpr float At(int r, int k) { return M::At(k, r); }
};

template <class M>
constexpr int FirstTerm(int r) {
  int k = 0;
  while (M::At(r, k) == 0) k++;
  return k;
}

// Row r of M times the blocks at in, in + stride, ….
template <class M, int r, int k>
DLSYS_INLINE void AddTerm(Block& sum, const float* in, int64_t stride) {
  constexpr float weight = M::At(r, k);
  constexpr int first = FirstTerm<M>(r);
  const Block& x = *(const Block*)(in + k * stride);
  if constexpr (k == first)
    sum = weight * x;
  else if constexpr (weight != 0)
    sum += weight * x;
}
template <class M, int r, int... k>
DLSYS_INLINE void Row(const float* in, int64_t stride, float* out,
                      std::integer_sequence<int, k...>) {
  Block sum;
  (AddTerm<M, r, k>(sum, in, stride), ...);
  *(Block*)out = sum;
}
template <class M, int... r>
DLSYS_INLINE void Rows(const float* in, int64_t in_stride, float* out, int64_t out_stride,
                       std::integer_sequence<int, r...>) {
  (Row<M, r>(in, in_stride, out + r * out_stride, std::make_integer_sequence<int, M::kCols>()),
   ...);
}

// out = M in M^T: in (M::kCols, M::kCols) blocks whose rows are in_row floats apart, out (M::kRows,
// M::kRows) of them out_block floats apart.
template <class M>
DLSYS_INLINE void TransformTile(const float* in, int64_t in_row, int64_t in_block, float* out,
                                int64_t out_row, int64_t out_block) {
  float half[M::kRows * M::kCols * kBlock];
  const auto rows = std::make_integer_sequence<int, M::kRows>();
  for (int j = 0; j < M::kCols; j++)
    Rows<M>(in + j * in_block, in_row, half + j * kBlock, M::kCols * kBlock, rows);
  for (int i = 0; i < M::kRows; i++)
    Rows<M>(half + i * M::kCols * kBlock, kBlock, out + i * out_row, out_block, rows);
}

}  // namespace cpu
}  // namespace dlsys
