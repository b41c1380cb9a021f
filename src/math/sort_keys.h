// Sort keys: integers whose order is the one in which elements are sorted, with the element's index
// in the low bits. So elements are distinct, equal ones stay in order under any algorithm, and NaN
// counts as the largest number; -0 and 0 are equal.
#pragma once
#include <type_traits>

#include "math/functors.h"
#include "math/storage.h"
#include "operators/indexing.h"
#include "runtime/registry.h"

namespace dlsys {
namespace sorting {

// 32 bits of the element and of its index, or 64 of both.
template <class T>
using Key = std::conditional_t<sizeof(T) == 8, unsigned __int128, uint64_t>;
template <class T>
inline constexpr int kIndexBits = 4 * sizeof(Key<T>);

DLSYS_HD uint32_t Ordered(float x) {
  if (x != x) return 0xFFFFFFFFu;
  const uint32_t bits = BitsOf(x + 0.f);  // 0 of -0
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
DLSYS_HD uint32_t Ordered(bfloat16 x) { return Ordered((float)x); }
DLSYS_HD uint32_t Ordered(float16 x) { return Ordered((float)x); }
DLSYS_HD uint32_t Ordered(uint8_t x) { return x; }
DLSYS_HD uint32_t Ordered(int32_t x) { return (uint32_t)x ^ 0x80000000u; }
DLSYS_HD uint64_t Ordered(int64_t x) { return (uint64_t)x ^ 0x8000000000000000u; }

template <class T>
DLSYS_HD Key<T> KeyOf(T x, int64_t index, bool descending) {
  const auto order = Ordered(x);
  return (Key<T>)(descending ? ~order : order) << kIndexBits<T> | (Key<T>)index;
}
template <class T>
DLSYS_HD int64_t IndexOf(Key<T> key) {
  return (int64_t)(key & (((Key<T>)1 << kIndexBits<T>)-1));
}

// x (outer, n, inner) sorted along n, of which the first `count` are wanted.
struct Shape {
  int64_t outer, n, inner, count;

  Shape(const DLArray* x, int64_t axis, const DLArray* values, const DLArray* indices) {
    CheckSameDtypes("sort", x, values);
    CheckSameShape("sort", values, indices);
    CheckSameExceptAxis("sort", x, values, axis);
    if (indices->dtype != DL_INT64)
      Fail("sort: expected indices of int64, got %s", DtypeText(indices->dtype));
    const AxisSplit split("sort", x, axis);
    outer = split.outer, n = split.n, inner = split.inner;
    count = values->shape[axis];
    if (count > n || n > INT32_MAX)
      Fail("sort: cannot give %lld of %lld elements: expected at most %d", (long long)count,
           (long long)n, INT32_MAX);
  }
};

}  // namespace sorting
}  // namespace dlsys
