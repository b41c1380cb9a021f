// Winograd's transforms of tiles (math/winograd.h) on the CPU, M X M^T by its rows and then its
// columns, over blocks of channels: an element of a tile is a vector of kBlock of them. The
// matrices are constants of the template, so products by 0 and additions of them vanish. Input and
// output do not overlap. Additions and the traffic of the L1 cache limit them.
#pragma once
#include <cstdint>
#include <utility>

#include "cpu/runtime/simd.h"
#include "math/winograd.h"

namespace dlsys {
namespace cpu {

constexpr int kBlock = 16;  // channels of a block, side by side in memory
typedef float Block __attribute__((vector_size(kBlock * sizeof(float)), aligned(4), may_alias));

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
