// Strided loops on the CPU: broadcasting, transposition and reduction iterate over one list of
// axes, in which the stride of an operand is 0 where it is broadcast. Neighboring axes that all
// operands cross as one are merged, so that the innermost loop is long; a cursor steps through the
// others without divisions. It moves no data itself and asks nothing of aliasing.
#pragma once
#include <algorithm>
#include <cstdint>

#include "cpu/runtime/common.h"
#include "cpu/runtime/simd.h"

namespace dlsys {
namespace cpu {

// Axes from the outermost to the innermost, with the strides of K operands in elements. Axes of
// size 1 are left out and axes that all operands cross as one are merged, so most loops end with
// one or two axes.
template <int K>
struct Loop {
  int ndim = 0;
  int64_t size[DL_MAX_NDIM];
  int64_t stride[DL_MAX_NDIM][K];

  void Add(int64_t n, const int64_t (&strides)[K]) {
    if (n == 1) return;
    bool merge = ndim > 0;
    for (int k = 0; merge && k < K; k++) merge = stride[ndim - 1][k] == strides[k] * n;
    if (!merge) size[ndim++] = 1;
    size[ndim - 1] *= n;
    std::copy(strides, strides + K, stride[ndim - 1]);
  }

  int64_t Count() const {
    int64_t n = 1;
    for (int a = 0; a < ndim; a++) n *= size[a];
    return n;
  }

  // Takes the innermost axis off; a loop without axes gives one of size 1.
  int64_t PopInner(int64_t (&strides)[K]) {
    std::fill(strides, strides + K, 0);
    if (ndim == 0) return 1;
    ndim--;
    std::copy(stride[ndim], stride[ndim] + K, strides);
    return size[ndim];
  }
};

// A position in a Loop and each operand's offset there.
template <int K>
class Cursor {
 public:
  DLSYS_INLINE Cursor(const Loop<K>& loop, int64_t index) : loop_(loop) {
    for (int a = loop.ndim - 1; a >= 0; a--) {
      at_[a] = index % loop.size[a];
      index /= loop.size[a];
      for (int k = 0; k < K; k++) offset[k] += at_[a] * loop.stride[a][k];
    }
  }

  DLSYS_INLINE void Next() {
    for (int a = loop_.ndim - 1; a >= 0; a--) {
      for (int k = 0; k < K; k++) offset[k] += loop_.stride[a][k];
      if (++at_[a] < loop_.size[a]) return;
      at_[a] = 0;
      for (int k = 0; k < K; k++) offset[k] -= loop_.size[a] * loop_.stride[a][k];
    }
  }

  int64_t offset[K] = {};

 private:
  const Loop<K>& loop_;
  int64_t at_[DL_MAX_NDIM];
};

// The stride of `a` along axis `axis` of an array of `ndim` axes that it broadcasts to, by numpy's
// right-aligned rule.
inline int64_t BroadcastStride(const DLArray* a, int ndim, int axis) {
  const int own = axis - (ndim - a->ndim);
  if (own < 0 || a->shape[own] == 1) return 0;
  int64_t stride = 1;
  for (int k = own + 1; k < a->ndim; k++) stride *= a->shape[k];
  return stride;
}

inline bool BroadcastsTo(const DLArray* a, const DLArray* out) {
  const int lead = out->ndim - a->ndim;
  if (lead < 0) return false;
  for (int k = 0; k < a->ndim; k++)
    if (a->shape[k] != 1 && a->shape[k] != out->shape[lead + k]) return false;
  return true;
}

}  // namespace cpu
}  // namespace dlsys
