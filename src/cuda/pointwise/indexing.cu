// Indexing kernels: slice, place, concat, pad, gather, one_hot, and the gradients of pads
// (scatter_add is in scatter.cu).
//
// A view of an array is copied by a loop over its elements with the strides of both sides. Moves
// depend on the size of an element only. The output never overlaps an input. An index out of range
// fills its row with 0xFF bytes, which are NaN in floats and -1 in integers, and is reported
// (fault.cuh). Memory bandwidth limits it.
#include <cstring>
#include <utility>

#include "cuda/pointwise/copy.cuh"
#include "cuda/runtime/fault.cuh"
#include "cuda/runtime/launch.cuh"
#include "operators/indexing.h"

namespace dlsys {
namespace cuda {
namespace {

// ---- kernels ----

// x (outer, padding.n, inner) -> y (outer, padding.m, inner), n elements
template <class T>
__global__ void PadKernel(const T* x, T* y, int64_t n, int64_t inner, Padding padding) {
  for (int64_t i = FirstItem(); i < n; i += ItemStep()) {
    const int64_t row = i / inner;
    const int64_t outer = row / padding.m;
    const int64_t source = padding.Source(row - outer * padding.m);
    y[i] = x[(outer * padding.n + source) * inner + (i - row * inner)];
  }
}

// dy (outer, padding.m, inner) -> dx (outer, padding.n, inner), n elements
template <class T>
__global__ void PadGradientKernel(const T* dy, T* dx, int64_t n, int64_t inner, Padding padding) {
  for (int64_t i = FirstItem(); i < n; i += ItemStep()) {
    const int64_t row = i / inner;
    const int64_t outer = row / padding.n;
    const T* column = dy + outer * padding.m * inner + (i - row * inner);
    float total = 0.f;
    padding.EachCopy(row - outer * padding.n, [&](int64_t k) { total += column[k * inner]; });
    dx[i] = T(total);
  }
}

// x (outer, extent, inner) -> y (outer, count, inner), n units of one or more elements
template <class T, class Index>
__global__ void GatherKernel(const T* x, Indices indices, T* y, int64_t n, int64_t count,
                             int64_t extent, int64_t inner, Faults faults) {
  T missing;
  memset(&missing, 0xFF, sizeof missing);
  for (int64_t i = FirstItem(); i < n; i += ItemStep()) {
    const int64_t row = (Index)i / (Index)inner;
    const int64_t outer = (Index)row / (Index)count;
    const int64_t at = indices[row - outer * count];
    const bool exists = at >= 0 && at < extent;
    y[i] = exists ? x[(outer * extent + at) * inner + (i - row * inner)] : missing;
    if (!exists && i == row * inner) faults.OutOfRange(at, row - outer * count, extent);
  }
}

// indices (rows) -> y (rows, classes), n elements
template <class T>
__global__ void OneHotKernel(Indices indices, T* y, int64_t n, int64_t classes, Faults faults) {
  for (int64_t i = FirstItem(); i < n; i += ItemStep()) {
    const int64_t row = i / classes;
    const int64_t at = indices[row];
    const bool exists = at >= 0 && at < classes;
    y[i] = T(!exists ? NAN : at == i - row * classes ? 1.f : 0.f);
    if (!exists && i == row * classes) faults.OutOfRange(at, row, classes);
  }
}

// ---- launchers ----

// Copies between a view and a dense array of its shape: out of the view, or into it.
void CopyView(const char* op, const View& view, const DLArray* x, DLArray* y, bool into,
              DLStream stream) {
  const DLArray* dense = into ? x : y;
  const int64_t n = Numel(dense);
  if (n == 0) return;
  Loop loop;
  int64_t stride = n;
  for (int a = 0; a < dense->ndim; a++) {
    stride /= dense->shape[a];
    loop.Append(dense->shape[a], into ? stride : view.stride[a], into ? view.stride[a] : stride);
  }
  const int64_t nbytes = DtypeNbytes(x->dtype), offset = view.offset * nbytes;
  CopyAlong(op, (const char*)x->data + (into ? 0 : offset), (char*)y->data + (into ? offset : 0),
            nbytes, loop, stream);
}

void Slice(const DLArray* x, int64_t offset, int64_t s0, int64_t s1, int64_t s2, int64_t s3,
           int64_t s4, int64_t s5, int64_t s6, int64_t s7, DLArray* y, DLStream stream) {
  Enter("slice", y, x);
  CheckSameDtypes("slice", x, y);
  const int64_t steps[] = {s0, s1, s2, s3, s4, s5, s6, s7};
  CopyView("slice", ViewOf("slice", x, offset, steps, y), x, y, false, stream);
}

void Place(const DLArray* x, int64_t bits, int64_t offset, int64_t s0, int64_t s1, int64_t s2,
           int64_t s3, int64_t s4, int64_t s5, int64_t s6, int64_t s7, DLArray* y,
           DLStream stream) {
  Enter("place", y, x);
  CheckSameDtypes("place", x, y);
  const int64_t steps[] = {s0, s1, s2, s3, s4, s5, s6, s7};
  const View view = ViewOf("place", y, offset, steps, x);
  const int64_t n = Numel(y);
  if (Numel(x) != n) FillBits("place", (uint64_t)bits, y->data, n, DtypeNbytes(y->dtype), stream);
  CopyView("place", view, x, y, true, stream);
}

// concat_N: N arrays one after the other along an axis.
template <class>
struct Concat;
template <size_t... I>
struct Concat<std::index_sequence<I...>> {
  template <size_t>
  using Array = const DLArray*;

  static void Run(Array<I>... arrays, int64_t axis, DLArray* y, DLStream stream) {
    Enter("concat", y, arrays...);
    int64_t at = 0;
    View views[sizeof...(I)];
    View* view = views;
    for (const DLArray* x : {arrays...}) {
      *view++ = ConcatView("concat", x, axis, at, y);
      at += x->shape[axis];
    }
    if (at != y->shape[axis])
      Fail("concat: the arrays have %lld positions along axis %lld, the output is %s",
           (long long)at, (long long)axis, ShapeText(y).c_str());
    view = views;
    for (const DLArray* x : {arrays...}) CopyView("concat", *view++, x, y, true, stream);
  }
};
template <size_t N>
using ConcatOf = Concat<std::make_index_sequence<N>>;

void Pad(const char* op, const DLArray* x, int64_t axis, int64_t before, bool reflect, DLArray* y,
         DLStream stream) {
  Enter(op, y, x);
  const AxisSplit split(op, y, axis);
  const Padding padding = PaddingOf(op, x, axis, before, reflect, y);
  const int64_t n = Numel(y);
  WithElementBits(x, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    Launch(op, PadKernel<T>, Blocks(n), kThreads, 0, stream, (const T*)x->data, (T*)y->data, n,
           split.inner, padding);
  });
}

template <class T>
void PadGradient(const char* op, const DLArray* dy, int64_t axis, int64_t before, bool reflect,
                 DLArray* dx, DLStream stream) {
  Enter(op, dx, dy);
  const AxisSplit split(op, dx, axis);
  const Padding padding = PaddingOf(op, dx, axis, before, reflect, dy);
  const int64_t n = Numel(dx);
  Launch(op, PadGradientKernel<T>, Blocks(n), kThreads, 0, stream, In<T>(op, dy), Out<T>(op, dx), n,
         split.inner, padding);
}

void PadEdge(const DLArray* x, int64_t axis, int64_t before, DLArray* y, DLStream stream) {
  Pad("pad_edge", x, axis, before, false, y, stream);
}
void PadReflect(const DLArray* x, int64_t axis, int64_t before, DLArray* y, DLStream stream) {
  Pad("pad_reflect", x, axis, before, true, y, stream);
}
template <class T>
void PadEdgeGradient(const DLArray* dy, int64_t axis, int64_t before, DLArray* dx,
                     DLStream stream) {
  PadGradient<T>("pad_edge_gradient", dy, axis, before, false, dx, stream);
}
template <class T>
void PadReflectGradient(const DLArray* dy, int64_t axis, int64_t before, DLArray* dx,
                        DLStream stream) {
  PadGradient<T>("pad_reflect_gradient", dy, axis, before, true, dx, stream);
}

void Gather(const DLArray* x, const DLArray* indices, int64_t axis, DLArray* y, DLStream stream) {
  Enter("gather", y, x, indices);
  CheckSameDtypes("gather", x, y);
  const AxisSplit split("gather", x, axis);
  CheckGathered("gather", x, axis, indices, y);
  const Indices at = IndicesOf("gather", indices);
  // Rows are moved in units of up to 16 bytes.
  const int64_t nbytes = DtypeNbytes(x->dtype), of_row = split.inner * nbytes;
  int64_t unit = Aligned16(x->data) && Aligned16(y->data) ? 16 : nbytes;
  while (unit > nbytes && of_row % unit) unit /= 2;
  const int64_t n = Numel(y) * nbytes / unit;
  WithBits(unit, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const auto kernel = n <= UINT32_MAX ? GatherKernel<T, uint32_t> : GatherKernel<T, int64_t>;
    Launch("gather", kernel, Blocks(n), kThreads, 0, stream, (const T*)x->data, at, (T*)y->data, n,
           Numel(indices), split.n, of_row / unit, FaultsOf("gather", "index", y->ctx.device_id));
  });
}

template <class T>
void OneHot(const DLArray* indices, DLArray* y, DLStream stream) {
  Enter("one_hot", y, indices);
  CheckOneHot(indices, y);
  const int64_t n = Numel(y);
  if (n == 0) return;
  Launch("one_hot", OneHotKernel<T>, Blocks(n), kThreads, 0, stream, IndicesOf("one_hot", indices),
         Out<T>("one_hot", y), n, y->shape[y->ndim - 1],
         FaultsOf("one_hot", "index", y->ctx.device_id));
}

DLSYS_KERNEL_ANY(cuda, slice, Slice);
DLSYS_KERNEL_ANY(cuda, place, Place);
DLSYS_KERNEL_ANY(cuda, concat_1, ConcatOf<1>::Run);
DLSYS_KERNEL_ANY(cuda, concat_2, ConcatOf<2>::Run);
DLSYS_KERNEL_ANY(cuda, concat_3, ConcatOf<3>::Run);
DLSYS_KERNEL_ANY(cuda, concat_4, ConcatOf<4>::Run);
DLSYS_KERNEL_ANY(cuda, concat_5, ConcatOf<5>::Run);
DLSYS_KERNEL_ANY(cuda, concat_6, ConcatOf<6>::Run);
DLSYS_KERNEL_ANY(cuda, concat_7, ConcatOf<7>::Run);
DLSYS_KERNEL_ANY(cuda, concat_8, ConcatOf<8>::Run);
DLSYS_KERNEL_ANY(cuda, pad_edge, PadEdge);
DLSYS_KERNEL_ANY(cuda, pad_reflect, PadReflect);
DLSYS_KERNEL_TYPED(cuda, pad_edge_gradient, PadEdgeGradient);
DLSYS_KERNEL_TYPED(cuda, pad_reflect_gradient, PadReflectGradient);
DLSYS_KERNEL_ANY(cuda, gather, Gather);
DLSYS_KERNEL_TYPED(cuda, one_hot, OneHot);

}  // namespace
}  // namespace cuda
}  // namespace dlsys
