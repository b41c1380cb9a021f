// The kernels of conv + bias + relu + max-pool share this on the CPU: the part of the input that
// windows see, which elements of it are padding, and transpositions of small matrices in vectors of
// four, which bring positions side by side for SIMD. operators/conv_pool.h has the contract.
// Limited by the multiply-adds of the direct convolution that uses them.
#pragma once
#include <algorithm>
#include <cstring>

#include "cpu/runtime/common.h"
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

typedef float Four __attribute__((vector_size(16)));
typedef float UnalignedFour __attribute__((vector_size(16), aligned(4), may_alias));

// Elements a, b, c, d of the eight of x and y.
#if defined(__clang__) || __GNUC__ >= 12
#define DLSYS_PICK(x, y, a, b, c, d) __builtin_shufflevector(x, y, a, b, c, d)
#else
typedef int32_t FourIndices __attribute__((vector_size(16)));
#define DLSYS_PICK(x, y, a, b, c, d) __builtin_shuffle(x, y, FourIndices{a, b, c, d})
#endif

inline void StoreFour(const Four& v, float* to) { *(UnalignedFour*)to = v; }
inline void StoreFour(const Four& v, uint8_t* to) {
  typedef int32_t Integers __attribute__((vector_size(16)));
  typedef uint8_t Bytes __attribute__((vector_size(4)));
  const Bytes bytes = __builtin_convertvector(__builtin_convertvector(v, Integers), Bytes);
  memcpy(to, &bytes, sizeof bytes);
}

template <class To>
inline void TransposeTile(const float* from, int64_t from_pitch, To* to, int64_t to_pitch) {
  const Four a = *(const UnalignedFour*)from, b = *(const UnalignedFour*)(from + from_pitch);
  const Four c = *(const UnalignedFour*)(from + 2 * from_pitch);
  const Four d = *(const UnalignedFour*)(from + 3 * from_pitch);
  const Four ab = DLSYS_PICK(a, b, 0, 4, 1, 5), cd = DLSYS_PICK(c, d, 0, 4, 1, 5);
  const Four more_ab = DLSYS_PICK(a, b, 2, 6, 3, 7), more_cd = DLSYS_PICK(c, d, 2, 6, 3, 7);
  StoreFour(DLSYS_PICK(ab, cd, 0, 1, 4, 5), to);
  StoreFour(DLSYS_PICK(ab, cd, 2, 3, 6, 7), to + to_pitch);
  StoreFour(DLSYS_PICK(more_ab, more_cd, 0, 1, 4, 5), to + 2 * to_pitch);
  StoreFour(DLSYS_PICK(more_ab, more_cd, 2, 3, 6, 7), to + 3 * to_pitch);
}

// to[j * to_pitch + i] = from[i * from_pitch + j] for i < rows and j < cols. The last tile of a row
// or a column overlaps the one before it.
template <class To>
inline void Transpose(const float* from, int64_t from_pitch, int64_t rows, int64_t cols, To* to,
                      int64_t to_pitch) {
  if (rows >= 4 && cols >= 4) {
    for (int64_t j = 0; j < cols; j += 4)
      for (int64_t i = 0; i < rows; i += 4) {
        const int64_t row = std::min(i, rows - 4), col = std::min(j, cols - 4);
        TransposeTile(from + row * from_pitch + col, from_pitch, to + col * to_pitch + row,
                      to_pitch);
      }
    return;
  }
  for (int64_t i = 0; i < rows; i++)
    for (int64_t j = 0; j < cols; j++) to[j * to_pitch + i] = (To)from[i * from_pitch + j];
}

}  // namespace cpu
}  // namespace dlsys
