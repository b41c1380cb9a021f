// Batches of a data set that resides on a device: the order of samples, and the affine map of
// pixels to floats. One source for the CPU and CUDA; python/dlsys/ops/random/device_batch.py has
// the same in numpy.
//
// Samples form a stream: position p is sample p % count of epoch p / count, and each epoch has its
// own permutation, so that every sample occurs exactly once in it.
#pragma once
#include <cmath>

#include "math/philox.h"
#include "operators/indexing.h"

namespace dlsys {
namespace batch {

constexpr uint32_t kOrders = 0x6F726472u;  // the fourth counter word, which is the node elsewhere
constexpr int kRounds = 6;          // fewer rounds leave visible structure in orders of 100 samples
constexpr uint32_t kLeastSide = 8;  // smaller squares have too few permutations

// The finalizer of MurmurHash3 (Appleby).
DLSYS_HD uint32_t Mix(uint32_t h) {
  h = (h ^ h >> 16) * 0x85EBCA6Bu;
  h = (h ^ h >> 13) * 0xC2B2AE35u;
  return h ^ h >> 16;
}

// The permutation of each epoch: a Feistel network over pairs (left, right) below `side`, iterated
// until the result is below `count` (cycle walking; Black and Rogaway, "Ciphers with arbitrary
// finite domains", 2002), with keys that Philox makes of the seed and the epoch.
struct Order {
  uint64_t seed, count;
  uint32_t side;  // its square is at least `count` and fits in 32 bits
  bool shuffled;

  // The sample at a position of the stream.
  DLSYS_HD int64_t At(uint64_t position) const {
    const uint64_t epoch = position / count;
    uint32_t at = (uint32_t)(position - epoch * count);
    if (!shuffled) return at;
    const philox::Words keys =
        philox::Philox({{(uint32_t)epoch, (uint32_t)(epoch >> 32), 0, kOrders}}, (uint32_t)seed,
                       (uint32_t)(seed >> 32));
    do at = Permuted(at, keys);
    while (at >= count);
    return at;
  }

  DLSYS_HD uint32_t Permuted(uint32_t at, const philox::Words& keys) const {
    uint32_t left = at / side, right = at - left * side;
    for (int round = 0; round < kRounds; round++) {
      const uint32_t key = keys.word[round & 3] + (uint32_t)round * 0x9E3779B9u;
      const uint32_t moved = left + (uint32_t)((uint64_t)Mix(right ^ key) * side >> 32);
      left = right;
      right = moved >= side ? moved - side : moved;
    }
    return left * side + right;
  }
};

inline Order OrderOf(const char* op, int64_t count, int64_t seed, int64_t shuffle) {
  if (count < 1 || count > INT32_MAX)
    Fail("%s: expected 1 to %d samples, got %lld", op, INT32_MAX, (long long)count);
  uint32_t side = kLeastSide;
  while ((uint64_t)side * side < (uint64_t)count) side++;
  return {(uint64_t)seed, (uint64_t)count, side, shuffle != 0};
}

inline const int64_t* StepOf(const char* op, const DLArray* step) {
  CheckScalar(op, "step", step, DL_INT64);
  return (const int64_t*)step->data;
}

// scale[c] * x + shift[c], where a sample of `size` elements is (channels, inner). The product
// is exact in double, so a fused multiply-add changes nothing.
struct Affine {
  const float *scale, *shift;  // (channels)
  int64_t size, channels, inner;

  template <class T>
  DLSYS_HD static float Of(T x, float scale, float shift) {
    return (float)((double)x * (double)scale + (double)shift);
  }
};

// Affine::Of; without a shift it rounds once, and so a float product gives the same bits for less.
template <class T>
DLSYS_HD float Scaled(T x, float scale, float shift) {
  return shift == 0.f ? fmaf((float)x, scale, 0.f) : Affine::Of(x, scale, shift);
}

inline Affine AffineOf(const char* op, const DLArray* data, const DLArray* scale,
                       const DLArray* shift) {
  const int64_t channels = Numel(scale);
  int64_t size = 1;
  for (int a = 1; a < data->ndim; a++) size *= data->shape[a];
  if (data->ndim < 1 || channels < 1 || Numel(shift) != channels || size % channels)
    Fail("%s: scale %s and shift %s do not fit samples of %s", op, ShapeText(scale).c_str(),
         ShapeText(shift).c_str(), ShapeText(data).c_str());
  if (data->dtype != DL_UINT8 && data->dtype != DL_FLOAT32)
    Fail("%s: expected samples of uint8 or float32, got %s", op, DtypeText(data->dtype));
  return {In(op, scale), In(op, shift), size, channels, size / channels};
}

// Labels of `nbytes` a sample, copied as bytes; nbytes is 0 without labels.
struct Labels {
  const uint8_t* from = nullptr;
  uint8_t* to = nullptr;
  int64_t nbytes = 0;
};

inline Labels LabelsOf(const char* op, const DLArray* samples, const DLArray* labels, DLArray* y) {
  CheckSameDtypes(op, labels, y);
  CheckSameExceptAxis(op, labels, y, 0);
  if (labels->ndim < 1 || labels->shape[0] != samples->shape[0])
    Fail("%s: %s samples have labels of %s", op, ShapeText(samples).c_str(),
         ShapeText(labels).c_str());
  int64_t nbytes = DtypeNbytes(labels->dtype);
  for (int a = 1; a < labels->ndim; a++) nbytes *= labels->shape[a];
  return {(const uint8_t*)labels->data, (uint8_t*)y->data, nbytes};
}

// The order of the samples, checked against a batch x and its labels y.
inline Order BatchOrder(const char* op, const DLArray* samples, int64_t seed, int64_t shuffle,
                        const DLArray* x, const DLArray* y) {
  CheckSameExceptAxis(op, samples, x, 0);
  if (y->ndim < 1 || y->shape[0] != x->shape[0])
    Fail("%s: a batch %s has labels %s", op, ShapeText(x).c_str(), ShapeText(y).c_str());
  return OrderOf(op, samples->shape[0], seed, shuffle);
}

}  // namespace batch
}  // namespace dlsys
