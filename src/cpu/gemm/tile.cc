// The micro-kernels of tile.h, one template compiled for each instruction set and tile size.
#include "cpu/gemm/tile.h"

namespace dlsys {
namespace cpu {
namespace {

// kRows x kVectors registers of kWidth floats. With compiler vector types the loops over them
// unroll.
template <int kWidth, int kRows, int kVectors, bool kPacked>
DLSYS_INLINE void Tile(const TileArgs& t) {
  typedef float Vector __attribute__((vector_size(kWidth * sizeof(float)), aligned(4), may_alias));
  Vector sum[kRows][kVectors] = {};
  const float* a = t.a;
  const float* b = t.b;
  const int64_t a_row = kPacked ? 1 : t.a_row;
  const int64_t a_step = kPacked ? kRows : t.a_step;
  for (int64_t p = 0; p < t.k; p++, a += a_step, b += t.b_stride) {
    Vector right[kVectors];
    for (int v = 0; v < kVectors; v++) right[v] = *(const Vector*)(b + v * kWidth);
    for (int r = 0; r < kRows; r++)
      for (int v = 0; v < kVectors; v++) sum[r][v] += a[r * a_row] * right[v];
  }
  for (int r = 0; r < kRows; r++) {
    if (r >= t.rows) break;
    float* c = t.c + r * t.c_stride;
    if (t.cols == kVectors * kWidth) {
      for (int v = 0; v < kVectors; v++) {
        Vector* to = (Vector*)(c + v * kWidth);
        *to = t.add ? *to + sum[r][v] : sum[r][v];
      }
      continue;
    }
    float row[kVectors * kWidth];
    memcpy(row, sum[r], sizeof row);
    for (int64_t j = 0; j < t.cols; j++) c[j] = t.add ? c[j] + row[j] : row[j];
  }
}

#define DLSYS_PACKED(F, rows) {F<rows, 1, true>, F<rows, 2, true>}
#define DLSYS_TILES(F, width, r0, r1, r2, r3, r4)                                            \
  {                                                                                          \
      width,                                                                                 \
      {r0, r1, r2, r3, r4},                                                                  \
      {DLSYS_PACKED(F, r0), DLSYS_PACKED(F, r1), DLSYS_PACKED(F, r2), DLSYS_PACKED(F, r3),   \
       DLSYS_PACKED(F, r4)},                                                                 \
      {F<r0, 1, false>, F<r1, 1, false>, F<r2, 1, false>, F<r3, 1, false>, F<r4, 1, false>}, \
  }

template <int kRows, int kVectors, bool kPacked>
void TileBaseline(const TileArgs& t) {
  Tile<4, kRows, kVectors, kPacked>(t);
}

constexpr TileKernels kBaselineKernels = DLSYS_TILES(TileBaseline, 4, 1, 2, 3, 4, 6);

#ifdef __x86_64__
template <int kRows, int kVectors, bool kPacked>
DLSYS_AVX2 void TileAvx2(const TileArgs& t) {
  Tile<8, kRows, kVectors, kPacked>(t);
}

constexpr TileKernels kAvx2Kernels = DLSYS_TILES(TileAvx2, 8, 1, 2, 3, 4, 6);

template <int kRows, int kVectors, bool kPacked>
DLSYS_AVX512 void TileAvx512(const TileArgs& t) {
  Tile<16, kRows, kVectors, kPacked>(t);
}

constexpr TileKernels kAvx512Kernels = DLSYS_TILES(TileAvx512, 16, 1, 2, 4, 8, 12);
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
