// The windows of an image under a filter through which a gradient passes, which those of
// conv_pool_gradient.cc find before they compute: where the patch begins whose element was the
// largest, and dy. One pass over the codes, limited by its stores; AVX-512 compresses 16 at a time.
#pragma once
#include <cstdint>

#include "cpu/runtime/intrinsics.h"
#include "cpu/runtime/parallel.h"
#include "cpu/runtime/simd.h"
#include "math/int_math.h"
#include "operators/conv_pool.h"

namespace dlsys {
namespace cpu {

// Offsets of patches in the input and gradients of their windows; the sum of these gradients.
struct Open {
  int64_t count;
  const int32_t* at;
  const float* dy;
  float total;
};

class OpenWindows {
 public:
  // Rows of the input lie `row` apart and its columns `col`.
  OpenWindows(const ConvPool& p, int64_t row, int64_t col)
      : windows_(Size(p.out)), positions_(p.window * p.window), begins_(Padded()) {
    for (int k = 0; k < positions_; k++)
      offsets_[k] = (int32_t)(k / p.window * row + k % p.window * col);
    Serially([&] {
      for (int64_t k = 0; k < windows_; k++)
        begins_.data()[k] = (int32_t)((k / p.out.w * row + k % p.out.w * col) * p.window);
    });
  }

  // Of an image and a filter, into room for ScratchNumel() values.
  Open Find(const float* dy, const uint8_t* code, int32_t* scratch) const {
#ifdef __x86_64__
    if (CurrentIsa() == Isa::kAvx512) return FindAvx512(dy, code, scratch);
#endif
    float sums[kLanes] = {}, *values = (float*)(scratch + Padded());
    int64_t count = 0;
    for (int64_t k = 0; k < windows_; k++) {
      scratch[count] = begins_.data()[k] + offsets_[code[k] % kLanes];
      values[count] = dy[k];
      count += code[k] < positions_;
    }
    for (int64_t k = 0; k < count; k++) sums[k % kLanes] += values[k];
    return {count, scratch, values, Total(sums)};
  }

  // Gradients are behind their positions: in an array apart they took 15 % longer to store.
  int64_t ScratchNumel() const { return 2 * Padded(); }

 private:
  static constexpr int kLanes = 16;

  // What is stored at once may begin at the last window.
  int64_t Padded() const { return RoundUp(windows_, kLanes) + kLanes; }

  static float Total(const float* sums) {
    float total = 0;
    for (int k = 0; k < kLanes; k++) total += sums[k];
    return total;
  }

#ifdef __x86_64__
  DLSYS_AVX512 Open FindAvx512(const float* dy, const uint8_t* code, int32_t* scratch) const {
    const __m512i offsets = _mm512_loadu_si512(offsets_);
    const __m512i positions = _mm512_set1_epi32((int)positions_);
    __m512 sums = _mm512_setzero_ps();
    float* values = (float*)(scratch + Padded());
    int64_t count = 0;
    for (int64_t k = 0; k < windows_; k += kLanes) {
      const int64_t left = windows_ - k;
      const __mmask16 there = left < kLanes ? (1u << left) - 1 : 0xffff;
      const __m512i here = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(there, code + k));
      const __mmask16 open = _mm512_mask_cmplt_epi32_mask(there, here, positions);
      const __m512 gradients = _mm512_maskz_loadu_ps(open, dy + k);
      const __m512i at = _mm512_add_epi32(_mm512_loadu_si512(begins_.data() + k),
                                          _mm512_permutexvar_epi32(here, offsets));
      _mm512_storeu_si512(scratch + count, _mm512_maskz_compress_epi32(open, at));
      _mm512_storeu_ps(values + count, _mm512_maskz_compress_ps(open, gradients));
      sums = _mm512_add_ps(sums, gradients);
      count += __builtin_popcount(open);
    }
    float lanes[kLanes];
    _mm512_storeu_ps(lanes, sums);
    return {count, scratch, values, Total(lanes)};
  }
#endif

  const int64_t windows_, positions_;
  const ScratchArray<int32_t> begins_;
  int32_t offsets_[kLanes] = {};  // from a window to its elements, by code
};

}  // namespace cpu
}  // namespace dlsys
