// Indexing kernels on the CPU: slice, place, concat, pad, gather, scatter_add, one_hot. Rows of the
// inner axes are copied or added as vector loops. The output never overlaps an input. Memory
// bandwidth limits it.
#include "operators/indexing.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "cpu/pointwise/strides.h"
#include "cpu/runtime/parallel.h"
#include "cpu/runtime/simd.h"

namespace dlsys {
namespace cpu {
namespace {

template <class T>
DLSYS_INLINE void ReverseRow(const T* from, T* to, int64_t n) {
  DLSYS_IVDEP
  for (int64_t j = 0; j < n; j++) to[j] = from[-j];
}

template <class T>
void CopyRow(const T* from, int64_t from_stride, T* to, int64_t to_stride, int64_t n) {
  if (from_stride == 1 && to_stride == 1)
    std::copy(from, from + n, to);
  else if (from_stride == -1 && to_stride == 1)
    Dispatch(DLSYS_SIMD { ReverseRow(from, to, n); });
  else if (to_stride == 1)
    for (int64_t j = 0; j < n; j++) to[j] = from[j * from_stride];
  else
    for (int64_t j = 0; j < n; j++) to[j * to_stride] = from[j * from_stride];
}

// Copies along a loop with the strides of x and y. No element of y is written twice.
template <class T>
void CopyStrided(const T* x, T* y, Loop<2> rows) {
  int64_t stride[2];
  const int64_t cols = rows.PopInner(stride);
  const int64_t piece = std::min(cols, kGrain);
  const int64_t pieces = (cols - 1) / piece + 1;
  ParallelFor(rows.Count() * pieces, RowGrain(piece), [&](int64_t begin, int64_t end) {
    Cursor<2> row(rows, begin / pieces);
    for (int64_t k = begin; k < end; k++) {
      const int64_t at = k % pieces * piece;
      CopyRow(x + row.offset[0] + at * stride[0], stride[0], y + row.offset[1] + at * stride[1],
              stride[1], std::min(piece, cols - at));
      if (at + piece >= cols) row.Next();
    }
  });
}

// Copies between a view and a dense array of its shape: out of the view, or into it.
void CopyView(const View& view, const DLArray* x, DLArray* y, bool into) {
  const DLArray* dense = into ? x : y;
  if (Numel(dense) == 0) return;
  Loop<2> loop;
  int64_t stride = Numel(dense);
  for (int a = 0; a < dense->ndim; a++) {
    stride /= dense->shape[a];
    loop.Add(dense->shape[a], {into ? stride : view.stride[a], into ? view.stride[a] : stride});
  }
  WithElementBits(x, [&](auto* type) {
    CopyStrided((decltype(type))x->data + (into ? 0 : view.offset),
                (decltype(type))y->data + (into ? view.offset : 0), loop);
  });
}

void FillBits(DLArray* y, uint64_t bits) {
  WithElementBits(y, [&](auto* type) {
    auto* out = (decltype(type))y->data;
    const auto value = (std::remove_pointer_t<decltype(type)>)bits;
    ParallelFor(Numel(y), kGrain,
                [&](int64_t begin, int64_t end) { std::fill(out + begin, out + end, value); });
  });
}

// y = the view of x that starts at element `offset` and advances by s0, s1, … along its axes.
void Slice(const DLArray* x, int64_t offset, int64_t s0, int64_t s1, int64_t s2, int64_t s3,
           int64_t s4, int64_t s5, int64_t s6, int64_t s7, DLArray* y) {
  Check("slice", x);
  Check("slice", y);
  CheckSameDtypes("slice", x, y);
  const int64_t steps[] = {s0, s1, s2, s3, s4, s5, s6, s7};
  CopyView(ViewOf("slice", x, offset, steps, y), x, y, false);
}

// The view of y that slice would read is x; every other element has these bits.
void Place(const DLArray* x, int64_t bits, int64_t offset, int64_t s0, int64_t s1, int64_t s2,
           int64_t s3, int64_t s4, int64_t s5, int64_t s6, int64_t s7, DLArray* y) {
  Check("place", x);
  Check("place", y);
  CheckSameDtypes("place", x, y);
  const int64_t steps[] = {s0, s1, s2, s3, s4, s5, s6, s7};
  const View view = ViewOf("place", y, offset, steps, x);
  if (Numel(x) != Numel(y)) FillBits(y, (uint64_t)bits);
  CopyView(view, x, y, true);
}

// concat_N: N arrays one after the other along an axis.
template <class>
struct Concat;
template <size_t... I>
struct Concat<std::index_sequence<I...>> {
  template <size_t>
  using Array = const DLArray*;

  static void Run(Array<I>... arrays, int64_t axis, DLArray* y) {
    Check("concat", y);
    int64_t at = 0;
    View views[sizeof...(I)];
    View* view = views;
    for (const DLArray* x : {arrays...}) {
      Check("concat", x);
      *view++ = ConcatView("concat", x, axis, at, y);
      at += x->shape[axis];
    }
    if (at != y->shape[axis])
      Fail("concat: the arrays have %lld positions along axis %lld, the output is %s",
           (long long)at, (long long)axis, ShapeText(y).c_str());
    view = views;
    for (const DLArray* x : {arrays...}) CopyView(*view++, x, y, true);
  }
};
template <size_t N>
using ConcatOf = Concat<std::make_index_sequence<N>>;

// ---- pad ----

// Calls body(o, first, last) for positions first to last of one axis at outer index o, until
// positions begin to end, counted over the outer axes, are covered.
template <class F>
DLSYS_INLINE void EachRun(int64_t begin, int64_t end, int64_t n, const F& body) {
  int64_t outer = begin / n, first = begin - outer * n;
  for (int64_t left = end - begin; left > 0; outer++, first = 0) {
    const int64_t last = std::min(n, first + left);
    body(outer, first, last);
    left -= last - first;
  }
}

// Writes positions first to last of a padded axis; the interior is one copy.
template <class T>
DLSYS_INLINE void PadRun(const Padding& padding, const T* from, int64_t first, int64_t last,
                         int64_t inner, T* to) {
  const int64_t before = padding.before, n = padding.n;
  const int64_t middle = std::clamp(before, first, last);
  const int64_t tail = std::clamp(before + n, middle, last);
  if (inner == 1) {
    const bool mirror = padding.reflect;
    for (int64_t i = first; i < middle; i++) to[i] = from[mirror ? before - i : 0];
    DLSYS_IVDEP
    for (int64_t i = middle; i < tail; i++) to[i] = from[i - before];
    for (int64_t i = tail; i < last; i++) to[i] = from[mirror ? 2 * (n - 1) - i + before : n - 1];
    return;
  }
  const auto copy = [&](int64_t source, int64_t i, int64_t count) {
    std::copy(from + source * inner, from + (source + count) * inner, to + i * inner);
  };
  for (int64_t i = first; i < middle; i++) copy(padding.Source(i), i, 1);
  copy(middle - before, middle, tail - middle);
  for (int64_t i = tail; i < last; i++) copy(padding.Source(i), i, 1);
}

void Pad(const char* op, const DLArray* x, int64_t axis, int64_t before, bool reflect, DLArray* y) {
  Check(op, x);
  Check(op, y);
  const AxisSplit split(op, y, axis);
  const Padding padding = PaddingOf(op, x, axis, before, reflect, y);
  WithElementBits(x, [&](auto* type) {
    const auto* from = (decltype(type))x->data;
    auto* to = (decltype(type))y->data;
    const int64_t inner = split.inner, n = padding.n, m = padding.m;
    ParallelFor(split.outer * m, RowGrain(inner), [&](int64_t begin, int64_t end) {
      Dispatch([&]() __attribute__((always_inline)) {
        EachRun(begin, end, m,
                [&](int64_t outer, int64_t first, int64_t last) __attribute__((always_inline)) {
                  PadRun(padding, from + outer * n * inner, first, last, inner,
                         to + outer * m * inner);
                });
      });
    });
  });
}

constexpr int64_t kSumPiece = 512;  // columns summed at a time, in floats or doubles on the stack

// Writes the gradients of positions first to last of the unpadded axis; positions that the padding
// does not repeat have one copy, and their copies are contiguous.
template <class T>
DLSYS_INLINE void PadGradientRun(const Padding& padding, const T* from, int64_t first, int64_t last,
                                 int64_t inner, T* to) {
  const auto sums = [&](int64_t begin, int64_t end) __attribute__((always_inline)) {
    for (int64_t k = begin; k < end; k++) {
      for (int64_t col = 0; col < inner; col += kSumPiece) {
        const int64_t cols = std::min(kSumPiece, inner - col);
        float total[kSumPiece];
        std::fill(total, total + cols, 0.f);
        padding.EachCopy(k, [&](int64_t i) __attribute__((always_inline)) {
          for (int64_t j = 0; j < cols; j++) total[j] += from[i * inner + col + j];
        });
        for (int64_t j = 0; j < cols; j++) to[k * inner + col + j] = T(total[j]);
      }
    }
  };
  const int64_t after = padding.m - padding.n - padding.before;
  const int64_t left = padding.reflect ? padding.before + 1 : 1;
  const int64_t right = padding.reflect ? padding.n - 1 - after : padding.n - 1;
  const int64_t middle = std::clamp(left, first, last);
  const int64_t tail = std::clamp(right, middle, last);
  sums(first, middle);
  const T* one = from + padding.before * inner;
  for (int64_t k = middle * inner; k < tail * inner; k++) to[k] = T(0.f + one[k]);
  sums(tail, last);
}

// dx = the sum of dy over all copies of an element, in order.
template <class T>
void PadGradient(const char* op, const DLArray* dy, int64_t axis, int64_t before, bool reflect,
                 DLArray* dx) {
  const T* from = Input<T>(op, dy);
  T* to = Output<T>(op, dx);
  const AxisSplit split(op, dx, axis);
  const Padding padding = PaddingOf(op, dx, axis, before, reflect, dy);
  const int64_t inner = split.inner, n = padding.n, m = padding.m;
  ParallelFor(split.outer * n, RowGrain(inner), [&](int64_t begin, int64_t end) {
    Dispatch(DLSYS_SIMD {
      EachRun(begin, end, n,
              [=](int64_t outer, int64_t first, int64_t last) __attribute__((always_inline)) {
                PadGradientRun(padding, from + outer * m * inner, first, last, inner,
                               to + outer * n * inner);
              });
    });
  });
}

void PadEdge(const DLArray* x, int64_t axis, int64_t before, DLArray* y) {
  Pad("pad_edge", x, axis, before, false, y);
}
void PadReflect(const DLArray* x, int64_t axis, int64_t before, DLArray* y) {
  Pad("pad_reflect", x, axis, before, true, y);
}
template <class T>
void PadEdgeGradient(const DLArray* dy, int64_t axis, int64_t before, DLArray* dx) {
  PadGradient<T>("pad_edge_gradient", dy, axis, before, false, dx);
}
template <class T>
void PadReflectGradient(const DLArray* dy, int64_t axis, int64_t before, DLArray* dx) {
  PadGradient<T>("pad_reflect_gradient", dy, axis, before, true, dx);
}

// ---- gather, scatter_add, one_hot ----

// The position of the first index outside 0 … n - 1, or `count`.
template <class T>
int64_t FirstOutside(const T* indices, int64_t count, int64_t n) {
  constexpr int64_t kRun = 4096;
  for (int64_t at = 0; at < count; at += kRun) {
    const int64_t end = std::min(count, at + kRun);
    bool inside = true;
    for (int64_t k = at; k < end; k++) inside &= indices[k] >= 0 && (int64_t)indices[k] < n;
    if (inside) continue;
    for (int64_t k = at; k < end; k++)
      if (indices[k] < 0 || (int64_t)indices[k] >= n) return k;
  }
  return count;
}

Indices CheckedIndices(const char* op, const DLArray* a, int64_t n) {
  Check(op, a);
  const Indices indices = IndicesOf(op, a);
  const int64_t count = Numel(a);
  Serially([&] {
    const int64_t k = indices.wide ? FirstOutside((const int64_t*)indices.data, count, n)
                                   : FirstOutside((const int32_t*)indices.data, count, n);
    if (k < count) FailOutOfRange(op, "index", indices[k], k, n);
  });
  return indices;
}

// The indices as int32, for kernels that read them for every row.
class Narrowed {
 public:
  Narrowed(const Indices& indices, int64_t count, int64_t n)
      : fit_(!indices.wide || n <= INT32_MAX), copy_(indices.wide && fit_ ? count : 0) {
    if (!indices.wide) data_ = (const int32_t*)indices.data;
    if (!indices.wide || !fit_) return;
    data_ = copy_.data();
    Serially([&] {
      const int64_t* wide = (const int64_t*)indices.data;
      for (int64_t k = 0; k < count; k++) copy_.data()[k] = (int32_t)wide[k];
    });
  }
  const int32_t* data() const { return data_; }  // null where they do not fit

 private:
  const bool fit_;
  const ScratchArray<int32_t> copy_;
  const int32_t* data_ = nullptr;
};

// Gathers single elements of rows of n: the axis is the innermost one.
template <class T, class Index>
DLSYS_INLINE void GatherElements(const T* from, const Index* at, int64_t n, int64_t count,
                                 int64_t begin, int64_t end, T* to) {
  EachRun(begin, end, count,
          [&](int64_t outer, int64_t first, int64_t last) __attribute__((always_inline)) {
            const T* row = from + outer * n;
            T* out = to + outer * count;
            DLSYS_IVDEP
            for (int64_t k = first; k < last; k++) out[k] = row[at[k]];
          });
}

// y[o, k, :] = x[o, indices[k], :]
void Gather(const DLArray* x, const DLArray* indices, int64_t axis, DLArray* y) {
  Check("gather", x);
  Check("gather", y);
  CheckSameDtypes("gather", x, y);
  const AxisSplit split("gather", x, axis);
  CheckGathered("gather", x, axis, indices, y);
  const Indices at = CheckedIndices("gather", indices, split.n);
  const int64_t count = Numel(indices), inner = split.inner, n = split.n;
  if (Numel(y) == 0) return;
  const Narrowed copied(at, inner == 1 ? count : 0, n);
  const int32_t* narrow = inner == 1 ? copied.data() : nullptr;
  WithElementBits(x, [&](auto* type) {
    const auto* from = (decltype(type))x->data;
    auto* to = (decltype(type))y->data;
    ParallelFor(split.outer * count, RowGrain(inner), [&](int64_t begin, int64_t end) {
      if (narrow)
        return Dispatch(DLSYS_SIMD { GatherElements(from, narrow, n, count, begin, end, to); });
      EachRun(begin, end, count, [&](int64_t outer, int64_t first, int64_t last) {
        for (int64_t k = first; k < last; k++) {
          const auto* row = from + (outer * n + at[k]) * inner;
          std::copy(row, row + inner, to + (outer * count + k) * inner);
        }
      });
    });
  });
}

// The segments of a stable counting sort of the updates by row: row r gets the updates
// order[begin[r]] … order[begin[r + 1] - 1], ascending.
struct Segments {
  const ScratchArray<int64_t> scratch;
  const int64_t *const begin, *const order;

  Segments(Indices indices, int64_t count, int64_t n)
      : scratch(n + 2 + count), begin(scratch.data()), order(begin + n + 2) {
    Serially([&] { Sort(indices, count, n, scratch.data(), scratch.data() + n + 2); });
  }

  static void Sort(Indices indices, int64_t count, int64_t n, int64_t* starts, int64_t* sorted) {
    std::fill(starts, starts + n + 2, 0);
    // Counts are two rows ahead, so that placing the updates moves every start to its own row.
    for (int64_t k = 0; k < count; k++) starts[indices[k] + 2]++;
    for (int64_t row = 0; row < n; row++) starts[row + 2] += starts[row + 1];
    for (int64_t k = 0; k < count; k++) sorted[starts[indices[k] + 1]++] = k;
  }
};

// to[j] = the sum of from[k * inner + j] over the updates k, in order.
template <class T>
DLSYS_INLINE void AddRows(const T* from, const int64_t* updates, const int64_t* end, int64_t inner,
                          int64_t cols, T* to) {
  const auto row = [&](int64_t k) __attribute__((always_inline)) { return from + k * inner; };
  const int64_t count = end - updates;
  if (count == 0) return std::fill(to, to + cols, T(0.f));
  const T* first = row(updates[0]);
  if (count == 1) {
    std::copy(first, first + cols, to);
    return;
  }
  const T* second = row(updates[1]);
  if (count == 2) {  // float(double(a) + double(b)) is a + b
    DLSYS_IVDEP
    for (int64_t j = 0; j < cols; j++) to[j] = T(0.f + (first[j] + second[j]));
    return;
  }
  double total[kSumPiece];
  for (int64_t j = 0; j < cols; j++) total[j] = 0.0 + first[j] + second[j];
  for (updates += 2; updates != end; updates++) {
    const T* next = row(*updates);
    for (int64_t j = 0; j < cols; j++) total[j] += next[j];
  }
  for (int64_t j = 0; j < cols; j++) to[j] = T((float)total[j]);
}

// Adds single elements into rows of n, where the axis is the innermost one and the sums of a row
// fit the cache.
constexpr int64_t kMostSums = 16384;

template <class T, class Index>
void AddElements(const T* from, const Index* at, int64_t outer, int64_t n, int64_t count, T* to) {
  const auto make = [=] { return ScratchArray<double>(n); };
  auto task = [=](int64_t begin, int64_t end, const ScratchArray<double>& scratch) {
    double* sums = scratch.data();
    for (int64_t row = begin; row < end; row++) {
      std::fill(sums, sums + n, 0.0);
      for (int64_t k = 0; k < count; k++) sums[at[k]] += from[row * count + k];
      for (int64_t k = 0; k < n; k++) to[row * n + k] = T((float)sums[k]);
    }
  };
  ParallelForWithScratch(outer, RowGrain(count + n), make, task);
}

// y[o, row, :] = the sum of updates[o, k, :] over all k with indices[k] == row
template <class T>
void ScatterAdd(const DLArray* updates, const DLArray* indices, int64_t axis, DLArray* y) {
  const char* op = "scatter_add";
  const T* from = Input<T>(op, updates);
  T* to = Output<T>(op, y);
  const AxisSplit split(op, y, axis);
  CheckGathered(op, y, axis, indices, updates);
  const Indices at = CheckedIndices(op, indices, split.n);
  if (Numel(y) == 0) return;
  const int64_t count = Numel(indices), inner = split.inner;
  if (inner == 1 && split.n <= kMostSums && split.outer > 1)
    return AddElements(from, Narrowed(at, count, split.n).data(), split.outer, split.n, count, to);
  const Segments segments(at, count, split.n);
  const int64_t piece = std::min(inner, kSumPiece);
  const int64_t pieces = (inner - 1) / piece + 1;
  ParallelFor(split.outer * split.n * pieces, RowGrain(piece), [&](int64_t begin, int64_t end) {
    Dispatch([&]() __attribute__((always_inline)) {
      for (int64_t k = begin; k < end; k++) {
        const int64_t row = k / pieces, col = k % pieces * piece;
        const int64_t* first = segments.begin + row % split.n;
        AddRows(from + row / split.n * count * inner + col, segments.order + first[0],
                segments.order + first[1], inner, std::min(piece, inner - col),
                to + row * inner + col);
      }
    });
  });
}

// y[k, :] is 1 at indices[k] and 0 elsewhere.
template <class T>
void OneHot(const DLArray* indices, DLArray* y) {
  T* to = Output<T>("one_hot", y);
  const AxisSplit split("one_hot", y, y->ndim - 1);
  CheckOneHot(indices, y);
  const Indices at = CheckedIndices("one_hot", indices, split.n);
  ParallelFor(split.outer, RowGrain(split.n), [&](int64_t begin, int64_t end) {
    std::fill(to + begin * split.n, to + end * split.n, T(0.f));
    for (int64_t k = begin; k < end; k++) to[k * split.n + at[k]] = T(1.f);
  });
}

DLSYS_KERNEL_ANY(cpu, slice, Slice);
DLSYS_KERNEL_ANY(cpu, place, Place);
DLSYS_KERNEL_ANY(cpu, concat_1, ConcatOf<1>::Run);
DLSYS_KERNEL_ANY(cpu, concat_2, ConcatOf<2>::Run);
DLSYS_KERNEL_ANY(cpu, concat_3, ConcatOf<3>::Run);
DLSYS_KERNEL_ANY(cpu, concat_4, ConcatOf<4>::Run);
DLSYS_KERNEL_ANY(cpu, concat_5, ConcatOf<5>::Run);
DLSYS_KERNEL_ANY(cpu, concat_6, ConcatOf<6>::Run);
DLSYS_KERNEL_ANY(cpu, concat_7, ConcatOf<7>::Run);
DLSYS_KERNEL_ANY(cpu, concat_8, ConcatOf<8>::Run);
DLSYS_KERNEL_ANY(cpu, pad_edge, PadEdge);
DLSYS_KERNEL_ANY(cpu, pad_reflect, PadReflect);
DLSYS_KERNEL_TYPED(cpu, pad_edge_gradient, PadEdgeGradient);
DLSYS_KERNEL_TYPED(cpu, pad_reflect_gradient, PadReflectGradient);
DLSYS_KERNEL_ANY(cpu, gather, Gather);
DLSYS_KERNEL_TYPED(cpu, scatter_add, ScatterAdd);
DLSYS_KERNEL_TYPED(cpu, one_hot, OneHot);

}  // namespace
}  // namespace cpu
}  // namespace dlsys
