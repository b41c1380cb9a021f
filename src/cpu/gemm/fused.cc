// Matrix products with what follows them, in one pass over the product while it is in the cache: a
// bias and an activation, the gradient of an activation; and the sums of one operand over the
// depth. The product itself is that of matmul.cc, in float32 whatever the precision, and there is
// nothing to choose.
#include "cpu/gemm/gemm.h"
#include "cpu/runtime/common.h"
#include "cpu/runtime/parallel.h"
#include "cpu/runtime/simd.h"
#include "math/epilogue.h"

namespace dlsys {
namespace cpu {
namespace {

const int64_t kMapCost = 8;    // an element of a smooth activation costs as much as some additions
const int64_t kColumns = 32;   // that one task sums
const int64_t kSumRows = 256;  // that are added in float before a double takes them

void CheckPrecision(const char* op, int64_t precision) {
  if (precision < 0 || precision > 1)
    Fail("%s: there is no precision %ld, expected 0 (fp32) or 1 (tf32)", op, (long)precision);
}

// c[i, j] = f(c[i, j], i * n + j, j) for the whole of a product, in rows.
template <class F>
void MapRows(const Product& p, const F& f) {
  ParallelFor(p.m, RowGrain(p.n * kMapCost), [&](int64_t begin, int64_t end) {
    Dispatch([&]() __attribute__((always_inline)) {
      for (int64_t i = begin; i < end; i++) {
        float* row = p.c + i * p.n;
        DLSYS_IVDEP
        for (int64_t j = 0; j < p.n; j++) row[j] = f(row[j], i * p.n + j, j);
      }
    });
  });
}

#define DLSYS_VALUE                                                     \
  [=](float x, [[maybe_unused]] int64_t at, [[maybe_unused]] int64_t j) \
      __attribute__((always_inline))

// Calls then(f) with the activation of that number.
template <class Then>
void WithActivation(int number, const Then& then) {
  switch (number) {
#define DLSYS_CASE(value, F) \
  case value:                \
    return then(fn::F{});
    DLSYS_ACTIVATIONS(DLSYS_CASE)
#undef DLSYS_CASE
  }
}

void MatmulMap(const DLArray* a, const DLArray* b, int64_t trans_a, int64_t trans_b, int64_t,
               int64_t precision, int64_t activation, DLArray* y) {
  const char* op = "matmul_map";
  const Product p = CheckedProduct(op, a, trans_a, b, trans_b, y);
  CheckPrecision(op, precision);
  const int number = CheckedEpilogue(op, activation, 1, kActivations);
  Multiply(p);
  WithActivation(number, [&](auto f) { MapRows(p, DLSYS_VALUE { return f(x); }); });
}

void MatmulBias(const DLArray* a, const DLArray* b, const DLArray* bias, int64_t trans_a,
                int64_t trans_b, int64_t, int64_t precision, int64_t activation, DLArray* y) {
  const char* op = "matmul_bias";
  const Product p = CheckedProduct(op, a, trans_a, b, trans_b, y);
  CheckPrecision(op, precision);
  const float* add = Input(op, bias);
  if (Numel(bias) != p.n)
    Fail("%s: expected a bias of %ld elements, got shape %s", op, (long)p.n,
         ShapeText(bias).c_str());
  const int number = CheckedEpilogue(op, activation, 0, kActivations);
  Multiply(p);
  if (number == 0) return MapRows(p, DLSYS_VALUE { return x + add[j]; });
  WithActivation(number, [&](auto f) { MapRows(p, DLSYS_VALUE { return f(x + add[j]); }); });
}

void MatmulGradient(const DLArray* a, const DLArray* b, const DLArray* side, int64_t trans_a,
                    int64_t trans_b, int64_t, int64_t precision, int64_t gradient, DLArray* dx) {
  const char* op = "matmul_gradient";
  const Product p = CheckedProduct(op, a, trans_a, b, trans_b, dx);
  CheckPrecision(op, precision);
  const float* of = Input(op, side);
  CheckSameShape(op, side, dx);
  const int number = CheckedEpilogue(op, gradient, 1, kActivationGradients);
  Multiply(p);
  switch (number) {
#define DLSYS_CASE(value, F) \
  case value:                \
    return MapRows(p, DLSYS_VALUE { return fn::F{}(of[at], x); });
    DLSYS_ACTIVATION_GRADIENTS(DLSYS_CASE)
#undef DLSYS_CASE
  }
}

// sums[w] of the matrix x (width, depth) as it is used, whose steps are those of `x`.
void SumDepth(const Matrix& x, int64_t along_width, int64_t along_depth, int64_t width,
              int64_t depth, float* sums) {
  ParallelFor(width, kColumns, [&](int64_t begin, int64_t end) {
    Dispatch([&]() __attribute__((always_inline)) {
      double total[kColumns] = {};
      for (int64_t first = 0; first < depth; first += kSumRows) {
        const int64_t last = std::min(depth, first + kSumRows);
        float part[kColumns] = {};
        if (along_width == 1) {
          for (int64_t k = first; k < last; k++)
            for (int64_t w = begin; w < end; w++) part[w - begin] += x.data[w + k * along_depth];
        } else {
          for (int64_t w = begin; w < end; w++)
            for (int64_t k = first; k < last; k++)
              part[w - begin] += x.data[w * along_width + k * along_depth];
        }
        for (int64_t w = begin; w < end; w++) total[w - begin] += part[w - begin];
      }
      for (int64_t w = begin; w < end; w++) sums[w] = (float)total[w - begin];
    });
  });
}

void MatmulSums(const DLArray* a, const DLArray* b, int64_t trans_a, int64_t trans_b, int64_t,
                int64_t precision, int64_t of_a, DLArray* y, DLArray* sums) {
  const char* op = "matmul_sums";
  const Product p = CheckedProduct(op, a, trans_a, b, trans_b, y);
  CheckPrecision(op, precision);
  float* to = Output(op, sums);
  const int64_t width = of_a ? p.m : p.n;
  if (Numel(sums) != width)
    Fail("%s: expected %ld sums, got shape %s", op, (long)width, ShapeText(sums).c_str());
  Multiply(p);
  if (of_a) return SumDepth(p.a, p.a.row, p.a.col, width, p.k, to);
  SumDepth(p.b, p.b.col, p.b.row, width, p.k, to);
}

DLSYS_KERNEL(cpu, matmul_map, MatmulMap);
DLSYS_KERNEL(cpu, matmul_bias, MatmulBias);
DLSYS_KERNEL(cpu, matmul_gradient, MatmulGradient);
DLSYS_KERNEL(cpu, matmul_sums, MatmulSums);

}  // namespace
}  // namespace cpu
}  // namespace dlsys
