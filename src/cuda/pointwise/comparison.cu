// Comparisons of two arrays of one dtype, logic on truth values, and where, with numpy
// broadcasting.
//
// Arrays are contiguous and row-major. A bool is a byte: any but 0 is true, and 0 or 1 is written.
// An output may be the buffer of an input of its own shape and dtype: a thread reads what it
// overwrites before it writes, and no other thread reads it. Memory bandwidth limits it, index
// arithmetic when broadcasting.
#include "cuda/pointwise/loop.cuh"
#include "cuda/runtime/launch.cuh"
#include "operators/indexing.h"
#include "runtime/dtypes.h"

namespace dlsys {
namespace cuda {
namespace {

// A loop over the output with the strides of K operands in elements, 0 where one is broadcast.
template <int K>
struct StridedLoop {
  int ndim = 0;
  int64_t shape[DL_MAX_NDIM];
  int64_t stride[DL_MAX_NDIM][K];

  // Appends an axis, or folds it into the last one where all operands cross the two as one axis.
  void Append(int64_t size, const int64_t (&strides)[K]) {
    if (size == 1) return;
    bool fold = ndim > 0;
    for (int k = 0; fold && k < K; k++) fold = stride[ndim - 1][k] == strides[k] * size;
    if (!fold) shape[ndim++] = 1;
    shape[ndim - 1] *= size;
    for (int k = 0; k < K; k++) stride[ndim - 1][k] = strides[k];
  }
};

// ---- kernels ----

// The offsets in the operands of element `index` of the output.
template <int K>
__device__ __forceinline__ void Locate(const StridedLoop<K>& loop, int64_t index,
                                       int64_t (&at)[K]) {
#pragma unroll
  for (int k = 0; k < K; k++) at[k] = 0;
  for (int axis = loop.ndim - 1; axis >= 0; axis--) {
    int64_t position = index;
    if (axis > 0) {
      const int64_t outer = index / loop.shape[axis];
      position = index - outer * loop.shape[axis];
      index = outer;
    }
#pragma unroll
    for (int k = 0; k < K; k++) at[k] += position * loop.stride[axis][k];
  }
}

template <class Test, class T>
__global__ void TestKernel(const T* x, const T* y, uint8_t* out, int64_t n, StridedLoop<2> loop) {
  const Test test;
  for (int64_t i = FirstItem(); i < n; i += ItemStep()) {
    int64_t at[2];
    Locate(loop, i, at);
    out[i] = test(x[at[0]], y[at[1]]);
  }
}

template <class T>
__global__ void WhereKernel(const uint8_t* condition, const T* x, const T* y, T* out, int64_t n,
                            StridedLoop<3> loop) {
  for (int64_t i = FirstItem(); i < n; i += ItemStep()) {
    int64_t at[3];
    Locate(loop, i, at);
    out[i] = condition[at[0]] ? x[at[1]] : y[at[2]];
  }
}

__global__ void NotKernel(const uint8_t* x, uint8_t* y, int64_t n) {
  for (int64_t i = FirstItem(); i < n; i += ItemStep()) y[i] = !x[i];
}

#define DLSYS_TEST(Name, op, expression)                            \
  struct Name {                                                     \
    static constexpr const char* name = op;                         \
    template <class T>                                              \
    __device__ __forceinline__ uint8_t operator()(T x, T y) const { \
      return expression;                                            \
    }                                                               \
  };

DLSYS_TEST(Equal, "equal", x == y)
DLSYS_TEST(NotEqual, "not_equal", x != y)
DLSYS_TEST(Less, "less", x < y)
DLSYS_TEST(LessEqual, "less_equal", x <= y)
DLSYS_TEST(And, "logical_and", x&& y)
DLSYS_TEST(Or, "logical_or", x || y)
DLSYS_TEST(Xor, "logical_xor", !x != !y)

#undef DLSYS_TEST

// ---- launchers ----

void CheckDtype(const char* op, const DLArray* a, int dtype) {
  if (a->dtype != dtype) Fail("%s: expected %s, got %s", op, DtypeText(dtype), DtypeText(a->dtype));
}

template <int K>
StridedLoop<K> BroadcastLoopOver(const char* op, const DLArray* const (&operands)[K],
                                 const DLArray* out) {
  int64_t of_operand[K][DL_MAX_NDIM];
  for (int k = 0; k < K; k++)
    if (!BroadcastStrides(operands[k], out, of_operand[k]))
      Fail("%s: shape %s does not broadcast to %s", op, ShapeText(operands[k]).c_str(),
           ShapeText(out).c_str());
  StridedLoop<K> loop;
  for (int axis = 0; axis < out->ndim; axis++) {
    int64_t strides[K];
    for (int k = 0; k < K; k++) strides[k] = of_operand[k][axis];
    loop.Append(out->shape[axis], strides);
  }
  return loop;
}

template <class Test, class T>
void RunTest(const DLArray* x, const DLArray* y, DLArray* out, DLStream stream) {
  const StridedLoop<2> loop = BroadcastLoopOver<2>(Test::name, {x, y}, out);
  const int64_t n = Numel(out);
  Launch(Test::name, TestKernel<Test, T>, Blocks(n), kThreads, 0, stream, (const T*)x->data,
         (const T*)y->data, (uint8_t*)out->data, n, loop);
}

template <class Test>
void Compare(const DLArray* x, const DLArray* y, DLArray* out, DLStream stream) {
  const char* op = Test::name;
  Enter(op, out, x, y);
  CheckDtype(op, y, x->dtype);
  CheckDtype(op, out, DL_BOOL);
  WithComparable(op, x->dtype, [&](auto* type) {
    RunTest<Test, std::remove_pointer_t<decltype(type)>>(x, y, out, stream);
  });
}

template <class Test>
void Logical(const DLArray* x, const DLArray* y, DLArray* out, DLStream stream) {
  Enter(Test::name, out, x, y);
  for (const DLArray* a : {x, y, (const DLArray*)out}) CheckDtype(Test::name, a, DL_BOOL);
  RunTest<Test, uint8_t>(x, y, out, stream);
}

void LogicalNot(const DLArray* x, DLArray* y, DLStream stream) {
  const char* op = "logical_not";
  Enter(op, y, x);
  CheckDtype(op, x, DL_BOOL);
  CheckDtype(op, y, DL_BOOL);
  CheckSameShape(op, x, y);
  const int64_t n = Numel(y);
  Launch(op, NotKernel, Blocks(n), kThreads, 0, stream, (const uint8_t*)x->data, (uint8_t*)y->data,
         n);
}

template <class T>
void RunWhere(const DLArray* condition, const DLArray* x, const DLArray* y, DLArray* out,
              DLStream stream) {
  const StridedLoop<3> loop = BroadcastLoopOver<3>("where", {condition, x, y}, out);
  const int64_t n = Numel(out);
  Launch("where", WhereKernel<T>, Blocks(n), kThreads, 0, stream, (const uint8_t*)condition->data,
         (const T*)x->data, (const T*)y->data, (T*)out->data, n, loop);
}

void Where(const DLArray* condition, const DLArray* x, const DLArray* y, DLArray* out,
           DLStream stream) {
  Enter("where", out, condition, x, y);
  CheckDtype("where", condition, DL_BOOL);
  CheckDtype("where", y, x->dtype);
  CheckDtype("where", out, x->dtype);
  WithElementBits(x, [&](auto* type) {
    RunWhere<std::remove_pointer_t<decltype(type)>>(condition, x, y, out, stream);
  });
}

DLSYS_KERNEL_ANY(cuda, equal, Compare<Equal>);
DLSYS_KERNEL_ANY(cuda, not_equal, Compare<NotEqual>);
DLSYS_KERNEL_ANY(cuda, less, Compare<Less>);
DLSYS_KERNEL_ANY(cuda, less_equal, Compare<LessEqual>);
DLSYS_KERNEL(cuda, logical_and, Logical<And>);
DLSYS_KERNEL(cuda, logical_or, Logical<Or>);
DLSYS_KERNEL(cuda, logical_xor, Logical<Xor>);
DLSYS_KERNEL(cuda, logical_not, LogicalNot);
DLSYS_KERNEL_ANY(cuda, where, Where);

}  // namespace
}  // namespace cuda
}  // namespace dlsys
