// GEMM with an epilogue (bias, residual, activation or activation gradient), applied in one pass
// while C is in the cache, and with the sums of an operand over k, the bias gradient of a dense
// layer. The GEMM is that of ladder.cc, by any of its algorithms, in float32 whatever the
// precision.
#include "cpu/gemm/gemm.h"
#include "cpu/runtime/common.h"
#include "cpu/runtime/parallel.h"
#include "cpu/runtime/simd.h"
#include "cpu/runtime/widened.h"
#include "operators/epilogue.h"

namespace dlsys {
namespace cpu {
namespace {

const int64_t kMapCost = 8;    // additions that an element of a smooth activation costs
const int64_t kColumns = 32;   // of a task
const int64_t kSumRows = 256;  // summed in float before a double takes them

void CheckPrecision(const char* op, int64_t precision) {
  if (precision < 0 || precision > 2)
    Fail("%s: there is no precision %ld, expected 0 (fp32), 1 (tf32) or 2 (3xtf32)", op,
         (long)precision);
}

const float* CheckedBias(const char* op, const DLArray* bias, const Gemm& p) {
  const float* data = Input(op, bias);
  if (Numel(bias) != p.n)
    Fail("%s: expected a bias of %ld elements, got shape %s", op, (long)p.n,
         ShapeText(bias).c_str());
  return data;
}

// c[i, j] = f(c[i, j], i * n + j, j) over all rows of C.
template <class F>
void MapRows(const Gemm& p, const F& f) {
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

// Calls then(f) with the activation of that code.
template <class Then>
void WithActivation(int code, const Then& then) {
  switch (code) {
#define DLSYS_CASE(value, F) \
  case value:                \
    return then(fn::F{});
    DLSYS_ACTIVATIONS(DLSYS_CASE)
#undef DLSYS_CASE
  }
}

void MatmulMap(const DLArray* a, const DLArray* b, int64_t trans_a, int64_t trans_b,
               int64_t algorithm, int64_t precision, int64_t activation, DLArray* y) {
  const char* op = "matmul_map";
  const Gemm p = CheckedGemm(op, a, trans_a, b, trans_b, y);
  CheckPrecision(op, precision);
  const int code = CheckedEpilogue(op, activation, 1, kActivations);
  RunGemm(op, p, algorithm);
  WithActivation(code, [&](auto f) { MapRows(p, DLSYS_VALUE { return f(x); }); });
}

void MatmulBias(const DLArray* a, const DLArray* b, const DLArray* bias, int64_t trans_a,
                int64_t trans_b, int64_t algorithm, int64_t precision, int64_t activation,
                DLArray* y) {
  const char* op = "matmul_bias";
  const Gemm p = CheckedGemm(op, a, trans_a, b, trans_b, y);
  CheckPrecision(op, precision);
  const float* add = CheckedBias(op, bias, p);
  const int code = CheckedEpilogue(op, activation, 0, kActivations);
  RunGemm(op, p, algorithm);
  if (code == 0) return MapRows(p, DLSYS_VALUE { return x + add[j]; });
  WithActivation(code, [&](auto f) { MapRows(p, DLSYS_VALUE { return f(x + add[j]); }); });
}

void MatmulGradient(const DLArray* a, const DLArray* b, const DLArray* side, int64_t trans_a,
                    int64_t trans_b, int64_t algorithm, int64_t precision, int64_t gradient,
                    DLArray* dx) {
  const char* op = "matmul_gradient";
  const Gemm p = CheckedGemm(op, a, trans_a, b, trans_b, dx);
  CheckPrecision(op, precision);
  CheckSameShape(op, side, dx);
  const int code = CheckedEpilogue(op, gradient, 1, kActivationGradients);
  const uint8_t* slopes = code == GradientCode::kMulQuantized ? Input<uint8_t>(op, side) : nullptr;
  const float* of = slopes ? nullptr : Input(op, side);
  RunGemm(op, p, algorithm);
  if (slopes) return MapRows(p, DLSYS_VALUE { return fn::MulQuantized{}((float)slopes[at], x); });
  switch (code) {
#define DLSYS_CASE(value, F) \
  case value:                \
    return MapRows(p, DLSYS_VALUE { return fn::F{}(of[at], x); });
    DLSYS_ACTIVATION_GRADIENTS(DLSYS_CASE)
#undef DLSYS_CASE
  }
}

// C += A B, where C begins as r, whose memory may be C's.
void AddTo(const char* op, const DLArray* r, const DLArray* y, int64_t algorithm, Gemm p) {
  CheckSameShape(op, r, y);
  const float* from = Input(op, r);
  const auto copy = [&](int64_t begin, int64_t end) {
    std::copy(from + begin, from + end, p.c + begin);
  };
  if (from != p.c) ParallelFor(p.m * p.n, kGrain, copy);
  p.add = true;
  RunGemm(op, p, algorithm);
}

// y = r + op(A) op(B), or relu of that (activation 1).
void MatmulAdd(const DLArray* a, const DLArray* b, const DLArray* r, int64_t trans_a,
               int64_t trans_b, int64_t algorithm, int64_t precision, int64_t activation,
               DLArray* y) {
  const char* op = "matmul_add";
  const Gemm p = CheckedGemm(op, a, trans_a, b, trans_b, y);
  CheckPrecision(op, precision);
  const bool relu = CheckedEpilogue(op, activation, 0, ActivationCode::kRelu);
  AddTo(op, r, y, algorithm, p);
  if (relu) MapRows(p, DLSYS_VALUE { return fn::Relu{}(x); });
}

// The same with a bias (n).
void MatmulBiasAdd(const DLArray* a, const DLArray* b, const DLArray* bias, const DLArray* r,
                   int64_t trans_a, int64_t trans_b, int64_t algorithm, int64_t precision,
                   int64_t activation, DLArray* y) {
  const char* op = "matmul_bias_add";
  const Gemm p = CheckedGemm(op, a, trans_a, b, trans_b, y);
  CheckPrecision(op, precision);
  const float* add = CheckedBias(op, bias, p);
  const bool relu = CheckedEpilogue(op, activation, 0, ActivationCode::kRelu);
  AddTo(op, r, y, algorithm, p);
  if (relu) return MapRows(p, DLSYS_VALUE { return fn::AddRelu{}(x, add[j]); });
  MapRows(p, DLSYS_VALUE { return x + add[j]; });
}

// sums[i] over k of a matrix (extent, k) with strides `stride` and k_stride.
void SumOverK(const Matrix& x, int64_t stride, int64_t k_stride, int64_t extent, int64_t k_extent,
              float* sums) {
  ParallelFor(extent, kColumns, [&](int64_t begin, int64_t end) {
    Dispatch([&]() __attribute__((always_inline)) {
      double total[kColumns] = {};
      for (int64_t first = 0; first < k_extent; first += kSumRows) {
        const int64_t last = std::min(k_extent, first + kSumRows);
        float partial[kColumns] = {};
        if (stride == 1) {
          for (int64_t k = first; k < last; k++)
            for (int64_t w = begin; w < end; w++) partial[w - begin] += x.data[w + k * k_stride];
        } else {
          for (int64_t w = begin; w < end; w++)
            for (int64_t k = first; k < last; k++)
              partial[w - begin] += x.data[w * stride + k * k_stride];
        }
        for (int64_t w = begin; w < end; w++) total[w - begin] += partial[w - begin];
      }
      for (int64_t w = begin; w < end; w++) sums[w] = (float)total[w - begin];
    });
  });
}

void MatmulSums(const DLArray* a, const DLArray* b, int64_t trans_a, int64_t trans_b,
                int64_t algorithm, int64_t precision, int64_t of_a, DLArray* y, DLArray* sums) {
  const char* op = "matmul_sums";
  const Gemm p = CheckedGemm(op, a, trans_a, b, trans_b, y);
  CheckPrecision(op, precision);
  float* to = Output(op, sums);
  const int64_t extent = of_a ? p.m : p.n;
  if (Numel(sums) != extent)
    Fail("%s: expected %ld sums, got shape %s", op, (long)extent, ShapeText(sums).c_str());
  RunGemm(op, p, algorithm);
  if (of_a) return SumOverK(p.a, p.a.row, p.a.col, extent, p.k, to);
  SumOverK(p.b, p.b.col, p.b.row, extent, p.k, to);
}

DLSYS_KERNEL(cpu, matmul_map, MatmulMap);
DLSYS_KERNEL_WIDENED(cpu, matmul_map, MatmulMap);
DLSYS_ALGORITHMS(cpu, matmul_map, GemmAlgorithms);
DLSYS_KERNEL(cpu, matmul_bias, MatmulBias);
DLSYS_KERNEL_WIDENED(cpu, matmul_bias, MatmulBias);
DLSYS_ALGORITHMS(cpu, matmul_bias, GemmAlgorithms);
DLSYS_KERNEL(cpu, matmul_gradient, MatmulGradient);
DLSYS_KERNEL_WIDENED(cpu, matmul_gradient, MatmulGradient);
DLSYS_ALGORITHMS(cpu, matmul_gradient, GemmAlgorithms);
DLSYS_KERNEL(cpu, matmul_add, MatmulAdd);
DLSYS_KERNEL_WIDENED(cpu, matmul_add, MatmulAdd);
DLSYS_ALGORITHMS(cpu, matmul_add, GemmAlgorithms);
DLSYS_KERNEL(cpu, matmul_bias_add, MatmulBiasAdd);
DLSYS_KERNEL_WIDENED(cpu, matmul_bias_add, MatmulBiasAdd);
DLSYS_ALGORITHMS(cpu, matmul_bias_add, GemmAlgorithms);
DLSYS_KERNEL(cpu, matmul_sums, MatmulSums);
DLSYS_KERNEL_WIDENED(cpu, matmul_sums, MatmulSums);
DLSYS_ALGORITHMS(cpu, matmul_sums, GemmAlgorithms);

}  // namespace
}  // namespace cpu
}  // namespace dlsys
