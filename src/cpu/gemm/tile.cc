// The micro-kernels of tile.h, one template compiled for each instruction set and tile size. The
// sums stay in registers for all of k: a step loads kVectors vectors of B and kRows single values
// of A, and issues kRows * kVectors multiply-adds. With 12 x 2 of the 32 registers of AVX-512, 6 x
// 2 of the 16 of AVX2, there are more of them than their latency needs, so that their issue limits.
#include "cpu/gemm/tile.h"

#include "cpu/gemm/pack.h"

namespace dlsys {
namespace cpu {
namespace {

// The first t.cols of a row of sums, to C.
template <int kWidth, int kVectors>
DLSYS_INLINE void StoreRow(const TileArgs& t, const typename Vectors<kWidth>::Aligned* sum,
                           float* c) {
  DLSYS_UNROLL
  for (int v = 0; v < kVectors; v++) {
    using Unaligned = typename Vectors<kWidth>::Unaligned;
    Unaligned* to = (Unaligned*)(c + v * kWidth);
    if (t.cols >= (v + 1) * kWidth) {
      *to = t.add ? *to + sum[v] : sum[v];
      continue;
    }
    float row[kWidth];
    memcpy(row, &sum[v], sizeof row);
    for (int64_t j = v * kWidth; j < t.cols; j++)
      c[j] = t.add ? c[j] + row[j - v * kWidth] : row[j - v * kWidth];
  }
}

template <int kWidth, int kRows, int kVectors, bool kPacked>
DLSYS_INLINE void Tile(const TileArgs& t) {
  using Vector = typename Vectors<kWidth>::Aligned;
  using Unaligned = typename Vectors<kWidth>::Unaligned;
  Vector sum[kRows][kVectors] = {};
  const float* a = t.a;
  const float* b = t.b;
  const int64_t a_row = kPacked ? 1 : t.a_row;
  const int64_t a_step = kPacked ? kRows : t.a_step;
  for (int64_t p = 0; p < t.k; p++, a += a_step, b += t.b_stride) {
    Vector right[kVectors];
    DLSYS_UNROLL
    for (int v = 0; v < kVectors; v++) right[v] = *(const Unaligned*)(b + v * kWidth);
    DLSYS_UNROLL
    for (int r = 0; r < kRows; r++) {
      DLSYS_UNROLL
      for (int v = 0; v < kVectors; v++) sum[r][v] += a[r * a_row] * right[v];
    }
  }
  DLSYS_UNROLL
  for (int r = 0; r < kRows; r++)
    if (r < t.rows) StoreRow<kWidth, kVectors>(t, sum[r], t.c + r * t.c_stride);
}

#define DLSYS_WIDTHS(F, rows, packed) {F<rows, 1, packed>, F<rows, 2, packed>}
#define DLSYS_FIVE(F, packed, r0, r1, r2, r3, r4)                                         \
  {DLSYS_WIDTHS(F, r0, packed), DLSYS_WIDTHS(F, r1, packed), DLSYS_WIDTHS(F, r2, packed), \
   DLSYS_WIDTHS(F, r3, packed), DLSYS_WIDTHS(F, r4, packed)}
#define DLSYS_TILES(Isa, width, r0, r1, r2, r3, r4)                                \
  {                                                                                \
      width,                                                                       \
      {r0, r1, r2, r3, r4},                                                        \
      DLSYS_FIVE(Tile##Isa, true, r0, r1, r2, r3, r4),                             \
      DLSYS_FIVE(Tile##Isa, false, r0, r1, r2, r3, r4),                            \
      {Pack##Isa<r0>, Pack##Isa<r1>, Pack##Isa<r2>, Pack##Isa<r3>, Pack##Isa<r4>}, \
      Pack##Isa<2 * width>,                                                        \
      Tile##Isa<1, TileKernels::kRowVectors, false>,                               \
  }

// The functions of an instruction set, by its attribute and the floats in a vector.
#define DLSYS_TILE_FUNCTIONS(Isa, attribute, width)                                      \
  template <int kRows, int kVectors, bool kPacked>                                       \
  attribute void Tile##Isa(const TileArgs& t) {                                          \
    Tile<width, kRows, kVectors, kPacked>(t);                                            \
  }                                                                                      \
  template <int kPanel>                                                                  \
  attribute void Pack##Isa(const float* from, int64_t lines, int64_t line, int64_t step, \
                           int64_t k, float* to) {                                       \
    Pack<width, kPanel>(from, lines, line, step, k, to);                                 \
  }

DLSYS_TILE_FUNCTIONS(Baseline, , 4)
constexpr TileKernels kBaselineKernels = DLSYS_TILES(Baseline, 4, 1, 2, 3, 4, 6);

#ifdef __x86_64__
DLSYS_TILE_FUNCTIONS(Avx2, DLSYS_AVX2, 8)
constexpr TileKernels kAvx2Kernels = DLSYS_TILES(Avx2, 8, 1, 2, 3, 4, 6);

DLSYS_TILE_FUNCTIONS(Avx512, DLSYS_AVX512, 16)
constexpr TileKernels kAvx512Kernels = DLSYS_TILES(Avx512, 16, 1, 2, 4, 8, 12);
#endif

}  // namespace

const TileKernels& CurrentTileKernels() {
#ifdef __x86_64__
  if (CurrentIsa() == Isa::kAvx512) return kAvx512Kernels;
  if (CurrentIsa() == Isa::kAvx2) return kAvx2Kernels;
#endif
  return kBaselineKernels;
}

}  // namespace cpu
}  // namespace dlsys
