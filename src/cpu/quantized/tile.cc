// The micro-kernels of tile.h. AVX-512 VNNI multiplies and adds 64 pairs of bytes in one
// instruction, vpdpbusd, whose issue limits a tile of 6 rows by 4 panels: 24 sums in registers for
// 10 loads a step. AVX2 widens bytes to 16 bits first, since its own product of bytes saturates:
// vpmaddwd adds pairs of products exactly. The baseline is plain loops.
#include "cpu/quantized/tile.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "cpu/runtime/intrinsics.h"
#include "cpu/runtime/simd.h"

namespace dlsys {
namespace cpu {
namespace {

// Four bytes of a row.
DLSYS_INLINE int32_t LoadStep(const uint8_t* a) {
  int32_t four;
  memcpy(&four, a, kStep);
  return four;
}

// Stores the sums of one row and panel, the bias not among them.
DLSYS_INLINE void StorePanel(const QuantizedTile& t, const int32_t* sums, int64_t row,
                             int64_t first) {
  const int64_t count = std::min(kPanel, t.cols - first);
  const Requantization& to = t.to;
  for (int64_t j = 0; j < count; j++) {
    const int32_t sum = sums[j] + to.bias[first + j];
    float value = (float)sum * to.multiplier[first + j];
    const int64_t at = row * t.y_row + first + j;
    if (!t.bytes) {
      t.floats[at] = value;
      continue;
    }
    value = std::max(value, (float)(to.low - to.zero));
    value = std::min(value, (float)(to.high - to.zero));
    t.bytes[at] = (uint8_t)((int32_t)rintf(value) + to.zero);
  }
}

template <int kRows, int kPanels>
void TileBaseline(const QuantizedTile& t) {
  for (int r = 0; r < kRows; r++)
    for (int v = 0; v < kPanels; v++) {
      int32_t sums[kPanel] = {};
      const uint8_t* a = t.a + r * t.a_row;
      const int8_t* w = t.w + v * t.panel;
      for (int64_t p = 0; p < t.steps; p++, a += kStep, w += kPanel * kStep)
        for (int64_t j = 0; j < kPanel; j++)
          for (int64_t q = 0; q < kStep; q++) sums[j] += int32_t{a[q]} * w[j * kStep + q];
      StorePanel(t, sums, r, v * kPanel);
    }
}

#ifdef __x86_64__

template <int kRows, int kPanels>
DLSYS_AVX2 void TileAvx2(const QuantizedTile& t) {
  for (int v = 0; v < kPanels; v++) {
    __m256i sum[kRows][4];  // of pairs of inputs, four channels each
    DLSYS_UNROLL
    for (int r = 0; r < kRows; r++) {
      DLSYS_UNROLL
      for (int q = 0; q < 4; q++) sum[r][q] = _mm256_setzero_si256();
    }
    const int8_t* w = t.w + v * t.panel;
    for (int64_t p = 0; p < t.steps; p++, w += kPanel * kStep) {
      __m256i right[4];
      DLSYS_UNROLL
      for (int q = 0; q < 4; q++)
        right[q] = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(w + 16 * q)));
      DLSYS_UNROLL
      for (int r = 0; r < kRows; r++) {
        const int32_t four = LoadStep(t.a + r * t.a_row + p * kStep);
        const __m256i left = _mm256_cvtepu8_epi16(_mm_set1_epi32(four));
        DLSYS_UNROLL
        for (int q = 0; q < 4; q++)
          sum[r][q] = _mm256_add_epi32(sum[r][q], _mm256_madd_epi16(left, right[q]));
      }
    }
    for (int r = 0; r < kRows; r++) {
      int32_t pairs[2 * kPanel], sums[kPanel];
      memcpy(pairs, sum[r], sizeof pairs);
      for (int64_t j = 0; j < kPanel; j++) sums[j] = pairs[2 * j] + pairs[2 * j + 1];
      StorePanel(t, sums, r, v * kPanel);
    }
  }
}

#define DLSYS_VNNI __attribute__((target("avx2,fma,avx512f,avx512vl,avx512dq,avx512bw,avx512vnni")))

// sum += the products of bytes, four by four. GCC 12 keeps copies of the sums on the stack where it
// sees the intrinsic; an operand that is read and written leaves it no other way than a register.
DLSYS_VNNI inline __attribute__((always_inline)) void AddProducts(__m512i* sum, __m512i left,
                                                                  __m512i right) {
  asm("vpdpbusd %2, %1, %0" : "+v"(*sum) : "v"(left), "v"(right));
}

template <int kRows, int kPanels>
DLSYS_VNNI void TileVnni(const QuantizedTile& t) {
  __m512i sum[kRows][kPanels];
  DLSYS_UNROLL
  for (int r = 0; r < kRows; r++) {
    DLSYS_UNROLL
    for (int v = 0; v < kPanels; v++) sum[r][v] = _mm512_setzero_si512();
  }
  const uint8_t* a = t.a;
  const int8_t* w = t.w;
  const int64_t a_row = t.a_row, panel = t.panel;
  for (int64_t p = 0; p < t.steps; p++, a += kStep, w += kPanel * kStep) {
    __m512i right[kPanels];
    DLSYS_UNROLL
    for (int v = 0; v < kPanels; v++) right[v] = _mm512_loadu_si512(w + v * panel);
    DLSYS_UNROLL
    for (int r = 0; r < kRows; r++) {
      const __m512i left = _mm512_set1_epi32(LoadStep(a + r * a_row));
      DLSYS_UNROLL
      for (int v = 0; v < kPanels; v++) AddProducts(&sum[r][v], left, right[v]);
    }
  }
  const __m512 low = _mm512_set1_ps((float)(t.to.low - t.to.zero));
  const __m512 high = _mm512_set1_ps((float)(t.to.high - t.to.zero));
  const __m512i zero = _mm512_set1_epi32(t.to.zero);
  DLSYS_UNROLL
  for (int v = 0; v < kPanels; v++) {
    const int64_t left = t.cols - v * kPanel;
    const __mmask16 used = left >= kPanel ? 0xffff : (__mmask16)((1 << left) - 1);
    const __m512i bias = _mm512_maskz_loadu_epi32(used, t.to.bias + v * kPanel);
    const __m512 factor = _mm512_maskz_loadu_ps(used, t.to.multiplier + v * kPanel);
    DLSYS_UNROLL
    for (int r = 0; r < kRows; r++) {
      const __m512 value =
          _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_add_epi32(sum[r][v], bias)), factor);
      const int64_t at = r * t.y_row + v * kPanel;
      if (!t.bytes) {
        _mm512_mask_storeu_ps(t.floats + at, used, value);
        continue;
      }
      const __m512i clipped = _mm512_cvtps_epi32(_mm512_min_ps(_mm512_max_ps(value, low), high));
      _mm512_mask_cvtepi32_storeu_epi8(t.bytes + at, used, _mm512_add_epi32(clipped, zero));
    }
  }
}
#endif

#define DLSYS_PANELS(F, rows) {F<rows, 1>, F<rows, 2>, F<rows, 3>, F<rows, 4>}
#define DLSYS_QUANTIZED_TILES(F, r0, r1, r2, r3)                                         \
  {                                                                                      \
    {r0, r1, r2, r3}, {                                                                  \
      DLSYS_PANELS(F, r0), DLSYS_PANELS(F, r1), DLSYS_PANELS(F, r2), DLSYS_PANELS(F, r3) \
    }                                                                                    \
  }

constexpr QuantizedTileKernels kBaselineTiles = DLSYS_QUANTIZED_TILES(TileBaseline, 1, 2, 3, 4);
#ifdef __x86_64__
constexpr QuantizedTileKernels kAvx2Tiles = DLSYS_QUANTIZED_TILES(TileAvx2, 1, 2, 3, 4);
constexpr QuantizedTileKernels kVnniTiles = DLSYS_QUANTIZED_TILES(TileVnni, 1, 2, 4, 6);
#endif

}  // namespace

const QuantizedTileKernels& CurrentQuantizedTileKernels() {
#ifdef __x86_64__
  static const bool vnni = CurrentIsa() == Isa::kAvx512 && __builtin_cpu_supports("avx512vnni");
  if (vnni) return kVnniTiles;
  if (CurrentIsa() != Isa::kBaseline) return kAvx2Tiles;
#endif
  return kBaselineTiles;
}

}  // namespace cpu
}  // namespace dlsys
