// Movement kernels for every dtype on the CPU: fill, cast, broadcast_to and transpose. Strided
// copies go along the innermost axis of the output; a transposition whose input is contiguous along
// another axis goes in square tiles that fit the L1 cache. Arrays are contiguous; only cast between
// equal dtypes may have its input as output. Memory bandwidth limits all of them.
#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>

#include "cpu/pointwise/strides.h"
#include "cpu/runtime/parallel.h"
#include "cpu/runtime/simd.h"
#include "operators/indexing.h"
#include "runtime/dtypes.h"

namespace dlsys {
namespace cpu {
namespace {

struct Bool {
  uint8_t value;
};

// Truncates. What an integer cannot hold becomes its lowest value; uint8 is int64 modulo 256.
template <class To, class From>
DLSYS_INLINE To ToInteger(From x) {
  using Wide = std::conditional_t<sizeof(To) == 1, int64_t, To>;
  const From limit = (From)(uint64_t{1} << (sizeof(Wide) * 8 - 1));
  const bool fits = x >= -limit && x < limit;
  return (To)(fits ? (Wide)x : std::numeric_limits<Wide>::min());
}

template <class To, class From>
DLSYS_INLINE To Convert(From x) {
  if constexpr (kIs16Bit<From>) {
    return Convert<To>((float)x);
  } else if constexpr (kIs16Bit<To> && std::is_same_v<From, Bool>) {
    return To((float)x.value);
  } else if constexpr (kIs16Bit<To>) {
    return To((float)x);
  } else if constexpr (std::is_same_v<From, Bool>) {
    return Convert<To>(x.value);
  } else if constexpr (std::is_same_v<To, Bool>) {
    return Bool{(uint8_t)(x != 0)};
  } else if constexpr (std::is_floating_point_v<From> && std::is_integral_v<To>) {
    return ToInteger<To>(x);
  } else {
    return (To)x;
  }
}

// The bounds are arguments: captured ones might alias what it writes.
template <class To, class From>
DLSYS_INLINE void CastLoop(const From* x, To* y, int64_t n) {
  for (int64_t k = 0; k < n; k++) y[k] = Convert<To>(x[k]);
}

template <class To, class From>
void CastRun(const From* x, To* y, int64_t n) {
  ParallelFor(n, kGrain, [&](int64_t begin, int64_t end) {
    Dispatch(DLSYS_SIMD { CastLoop(x + begin, y + begin, end - begin); });
  });
}

void CopyRun(const void* x, void* y, int64_t nbytes) {
  if (x == y) return;
  ParallelFor(nbytes, kGrain * 16, [&](int64_t begin, int64_t end) {
    memcpy((char*)y + begin, (const char*)x + begin, end - begin);
  });
}

void Cast(const DLArray* x, DLArray* y) {
  Check("cast", x);
  Check("cast", y);
  if (Numel(x) != Numel(y))
    Fail("cast: element counts differ: %s and %s", ShapeText(x).c_str(), ShapeText(y).c_str());
  if (x->dtype == y->dtype) return CopyRun(x->data, y->data, Numel(x) * DtypeNbytes(x->dtype));
  WithDtype<Bool>("cast", x->dtype, [&](auto* from) {
    WithDtype<Bool>("cast", y->dtype, [&](auto* to) {
      CastRun((decltype(from))x->data, (decltype(to))y->data, Numel(x));
    });
  });
}

void FillWith(float c, DLArray* y) {
  Check("fill", y);
  WithDtype<Bool>("fill", y->dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    T* out = (T*)y->data;
    const T value = Convert<T>(c);
    ParallelFor(Numel(y), kGrain,
                [&](int64_t begin, int64_t end) { std::fill(out + begin, out + end, value); });
  });
}

// Copies x, iterated with the strides of `rows` and an innermost axis of `cols` values `stride`
// apart, to contiguous y.
template <class T>
void StridedCopy(const T* x, T* y, const Loop<1>& rows, int64_t cols, int64_t stride) {
  const int64_t piece = std::min(cols, kGrain);
  const int64_t pieces = (cols - 1) / piece + 1;
  ParallelFor(rows.Count() * pieces, RowGrain(piece), [&](int64_t begin, int64_t end) {
    Cursor<1> row(rows, begin / pieces);
    for (int64_t k = begin; k < end; k++) {
      const int64_t at = k % pieces * piece;
      const int64_t n = std::min(piece, cols - at);
      const T* from = x + row.offset[0] + at * stride;
      T* to = y + k / pieces * cols + at;
      if (stride == 0)
        std::fill(to, to + n, *from);
      else if (stride == 1)
        std::copy(from, from + n, to);
      else
        for (int64_t j = 0; j < n; j++) to[j] = from[j * stride];
      if (at + piece >= cols) row.Next();
    }
  });
}

void BroadcastTo(const DLArray* x, DLArray* y) {
  Check("broadcast_to", x);
  Check("broadcast_to", y);
  CheckSameDtypes("broadcast_to", x, y);
  if (!BroadcastsTo(x, y))
    Fail("broadcast_to: shape %s does not broadcast to %s", ShapeText(x).c_str(),
         ShapeText(y).c_str());
  if (Numel(y) == 0) return;
  Loop<1> rows;
  for (int a = 0; a < y->ndim; a++) rows.Add(y->shape[a], {BroadcastStride(x, y->ndim, a)});
  int64_t stride[1];
  const int64_t cols = rows.PopInner(stride);
  WithElementBits(x, [&](auto* type) {
    StridedCopy((decltype(type))x->data, (decltype(type))y->data, rows, cols, stride[0]);
  });
}

const int64_t kTile = 32;  // a tile of both arrays fits the L1 cache

// Transposes a batch of matrices in square tiles: y[r][c] = x[c * x_stride + r]. `outer` is the
// loop over the batch.
template <class T>
void TransposeTiles(const T* x, T* y, const Loop<1>& outer, int64_t rows, int64_t cols,
                    int64_t x_stride) {
  const int64_t bands = (rows - 1) / kTile + 1;
  const int64_t grain = std::max<int64_t>(1, kGrain / (kTile * cols));
  ParallelFor(outer.Count() * bands, grain, [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; k++) {
      const T* from = x + Cursor<1>(outer, k / bands).offset[0];
      T* to = y + k / bands * rows * cols;
      const int64_t row = k % bands * kTile;
      const int64_t row_end = std::min(rows, row + kTile);
      for (int64_t col = 0; col < cols; col += kTile) {
        const int64_t col_end = std::min(cols, col + kTile);
        for (int64_t r = row; r < row_end; r++)
          for (int64_t c = col; c < col_end; c++) to[r * cols + c] = from[c * x_stride + r];
      }
    }
  });
}

Loop<1> TransposeLoop(const DLArray* x, const Permutation& perm, const DLArray* y) {
  Loop<1> loop;
  int seen = 0;
  bool valid = x->ndim == y->ndim;
  for (int k = 0; valid && k < y->ndim; k++) {
    const int axis = perm.axes[k];
    valid = axis >= 0 && axis < x->ndim && !(seen >> axis & 1) && x->shape[axis] == y->shape[k];
    if (!valid) break;
    seen |= 1 << axis;
    int64_t stride = 1;
    for (int a = axis + 1; a < x->ndim; a++) stride *= x->shape[a];
    loop.Add(y->shape[k], {stride});
  }
  if (!valid)
    Fail("transpose: %s with its axes in the order %s is not %s", ShapeText(x).c_str(),
         PermutationText(perm, y->ndim).c_str(), ShapeText(y).c_str());
  return loop;
}

void Transpose(const DLArray* x, Struct<Permutation> perm, DLArray* y) {
  Check("transpose", x);
  Check("transpose", y);
  CheckSameDtypes("transpose", x, y);
  Loop<1> loop = TransposeLoop(x, *perm, y);
  if (Numel(y) == 0) return;
  int64_t stride[1], row_stride[1];
  const int64_t cols = loop.PopInner(stride);
  WithElementBits(x, [&](auto* type) {
    auto* from = (decltype(type))x->data;
    auto* to = (decltype(type))y->data;
    // Tiles pay where the axis next to the innermost is the one that is contiguous in x.
    if (stride[0] == 1 || loop.ndim == 0 || loop.stride[loop.ndim - 1][0] != 1)
      return StridedCopy(from, to, loop, cols, stride[0]);
    const int64_t rows = loop.PopInner(row_stride);
    TransposeTiles(from, to, loop, rows, cols, stride[0]);
  });
}

DLSYS_KERNEL_ANY(cpu, fill, FillWith);
DLSYS_KERNEL_ANY(cpu, cast, Cast);
DLSYS_KERNEL_ANY(cpu, broadcast_to, BroadcastTo);
DLSYS_KERNEL_ANY(cpu, transpose, Transpose);

}  // namespace
}  // namespace cpu
}  // namespace dlsys
