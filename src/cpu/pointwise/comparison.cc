// Comparisons of two arrays of one dtype, logic on truth values, and where, with numpy
// broadcasting, as vector loops over rows. A bool is a byte: any but 0 is true, and 0 or 1 is
// written. The output may be the buffer of an input of its shape and dtype. Memory bandwidth limits
// it.
#include <type_traits>

#include "cpu/pointwise/pieces.h"
#include "operators/indexing.h"
#include "runtime/dtypes.h"

namespace dlsys {
namespace cpu {
namespace {

#define DLSYS_TEST(Name, op, expression)              \
  struct Name {                                       \
    static constexpr const char* name = op;           \
    template <class T>                                \
    DLSYS_INLINE uint8_t operator()(T x, T y) const { \
      return expression;                              \
    }                                                 \
  };

DLSYS_TEST(Equal, "equal", x == y)
DLSYS_TEST(NotEqual, "not_equal", x != y)
DLSYS_TEST(Less, "less", x < y)
DLSYS_TEST(LessEqual, "less_equal", x <= y)
DLSYS_TEST(And, "logical_and", (x != 0) & (y != 0))
DLSYS_TEST(Or, "logical_or", (x | y) != 0)
DLSYS_TEST(Xor, "logical_xor", !x != !y)

#undef DLSYS_TEST

void CheckDtype(const char* op, const DLArray* a, int dtype) {
  if (a->dtype != dtype) Fail("%s: expected %s, got %s", op, DtypeText(dtype), DtypeText(a->dtype));
}

// The bounds of loops that write bytes are arguments: captured ones might alias the bytes.
template <class Test, class T>
DLSYS_INLINE void TestLoop(const T* x, bool x_moves, const T* y, bool y_moves, uint8_t* to,
                           int64_t n) {
  if (x_moves && y_moves) {
    DLSYS_IVDEP
    for (int64_t k = 0; k < n; k++) to[k] = Test()(x[k], y[k]);
    return;
  }
  const T first = *x, second = *y;
  DLSYS_IVDEP
  for (int64_t k = 0; k < n; k++) to[k] = Test()(x_moves ? x[k] : first, y_moves ? y[k] : second);
}

template <class Test, class T>
void TestRun(const char* op, const DLArray* x, const DLArray* y, DLArray* out) {
  const T* left = (const T*)x->data;
  const T* right = (const T*)y->data;
  uint8_t* to = (uint8_t*)out->data;
  ForPieces<2>(op, {x, y}, out,
               [&](const int64_t* offset, const int64_t* stride, int64_t at, int64_t n) {
                 const T* a = left + offset[0];
                 const T* b = right + offset[1];
                 const bool a_moves = stride[0], b_moves = stride[1];
                 Dispatch(DLSYS_SIMD { TestLoop<Test>(a, a_moves, b, b_moves, to + at, n); });
               });
}

template <class Test>
void Compare(const DLArray* x, const DLArray* y, DLArray* out) {
  const char* op = Test::name;
  Check(op, x);
  Check(op, y);
  Check(op, out);
  CheckDtype(op, y, x->dtype);
  CheckDtype(op, out, DL_BOOL);
  WithComparable(op, x->dtype, [&](auto* type) {
    TestRun<Test, std::remove_pointer_t<decltype(type)>>(op, x, y, out);
  });
}

template <class Test>
void Logical(const DLArray* x, const DLArray* y, DLArray* out) {
  Check(Test::name, x);
  Check(Test::name, y);
  Check(Test::name, out);
  for (const DLArray* a : {x, y, (const DLArray*)out}) CheckDtype(Test::name, a, DL_BOOL);
  TestRun<Test, uint8_t>(Test::name, x, y, out);
}

DLSYS_INLINE void NotLoop(const uint8_t* x, uint8_t* y, int64_t n) {
  DLSYS_IVDEP
  for (int64_t k = 0; k < n; k++) y[k] = !x[k];
}

void LogicalNot(const DLArray* x, DLArray* y) {
  const char* op = "logical_not";
  Check(op, x);
  Check(op, y);
  CheckDtype(op, x, DL_BOOL);
  CheckDtype(op, y, DL_BOOL);
  CheckSameShape(op, x, y);
  const uint8_t* in = (const uint8_t*)x->data;
  uint8_t* out = (uint8_t*)y->data;
  ParallelFor(Numel(y), 4 * kGrain, [&](int64_t begin, int64_t end) {
    Dispatch(DLSYS_SIMD { NotLoop(in + begin, out + begin, end - begin); });
  });
}

template <class T>
void WhereRun(const DLArray* condition, const DLArray* x, const DLArray* y, DLArray* out) {
  const uint8_t* test = (const uint8_t*)condition->data;
  const T* left = (const T*)x->data;
  const T* right = (const T*)y->data;
  T* to = (T*)out->data;
  ForPieces<3>("where", {condition, x, y}, out,
               [&](const int64_t* offset, const int64_t* stride, int64_t at, int64_t n) {
                 const uint8_t* c = test + offset[0];
                 const T* a = left + offset[1];
                 const T* b = right + offset[2];
                 const int64_t c_step = stride[0], a_step = stride[1], b_step = stride[2];
                 if (c_step == 1 && a_step == 1 && b_step == 1) {
                   Dispatch(DLSYS_SIMD {
                     DLSYS_IVDEP
                     for (int64_t k = 0; k < n; k++) {
                       const T chosen = a[k], other = b[k];
                       to[at + k] = c[k] ? chosen : other;
                     }
                   });
                   return;
                 }
                 Dispatch(DLSYS_SIMD {
                   DLSYS_IVDEP
                   for (int64_t k = 0; k < n; k++) {
                     const T chosen = a[k * a_step], other = b[k * b_step];
                     to[at + k] = c[k * c_step] ? chosen : other;
                   }
                 });
               });
}

void Where(const DLArray* condition, const DLArray* x, const DLArray* y, DLArray* out) {
  for (const DLArray* a : {condition, x, y, (const DLArray*)out}) Check("where", a);
  CheckDtype("where", condition, DL_BOOL);
  CheckDtype("where", y, x->dtype);
  CheckDtype("where", out, x->dtype);
  WithElementBits(x, [&](auto* type) {
    WhereRun<std::remove_pointer_t<decltype(type)>>(condition, x, y, out);
  });
}

DLSYS_KERNEL_ANY(cpu, equal, Compare<Equal>);
DLSYS_KERNEL_ANY(cpu, not_equal, Compare<NotEqual>);
DLSYS_KERNEL_ANY(cpu, less, Compare<Less>);
DLSYS_KERNEL_ANY(cpu, less_equal, Compare<LessEqual>);
DLSYS_KERNEL(cpu, logical_and, Logical<And>);
DLSYS_KERNEL(cpu, logical_or, Logical<Or>);
DLSYS_KERNEL(cpu, logical_xor, Logical<Xor>);
DLSYS_KERNEL(cpu, logical_not, LogicalNot);
DLSYS_KERNEL_ANY(cpu, where, Where);

}  // namespace
}  // namespace cpu
}  // namespace dlsys
