// Running results along the middle axis of x (outer, n, inner): cumulative sums, and the product of
// all elements but one, with its change along a direction. A column belongs to one task; sums are
// carried in double.
#include "common.h"
#include "parallel.h"
#include "simd.h"

namespace dlsys {
namespace cpu {
namespace {

const int64_t kColumns = 256;  // columns that a task carries

// Calls body(offset of the first row, columns) for strips of columns.
template <class F>
void ForStrips(const char* op, const DLArray* x, const DLArray* y, const F& body) {
  CheckSameShape(op, x, y);
  if (x->ndim != 3) Fail("%s: expected (outer, n, inner), got %s", op, ShapeText(x).c_str());
  const int64_t outer = x->shape[0], n = x->shape[1], inner = x->shape[2];
  if (outer == 0 || n == 0 || inner == 0) return;
  const int64_t width = std::min(inner, kColumns);
  const int64_t strips = (inner - 1) / width + 1;
  ParallelFor(outer * strips, RowGrain(width * n), [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; k++) {
      const int64_t col = k % strips * width;
      body(k / strips * n * inner + col, std::min(width, inner - col));
    }
  });
}

void CumSum(const DLArray* x, int64_t reverse, DLArray* y) {
  const float* in = Input("cumsum", x);
  float* out = Output("cumsum", y);
  ForStrips("cumsum", x, y, [&](int64_t first, int64_t cols) {
    const int64_t n = x->shape[1], inner = x->shape[2];
    double sum[kColumns];
    std::fill(sum, sum + cols, 0.0);
    for (int64_t k = 0; k < n; k++) {
      const int64_t at = first + (reverse ? n - 1 - k : k) * inner;
      for (int64_t c = 0; c < cols; c++) {
        sum[c] += in[at + c];
        out[at + c] = (float)sum[c];
      }
    }
  });
}

void ProdOthers(const DLArray* x, DLArray* y) {
  const float* in = Input("prod_others", x);
  float* out = Output("prod_others", y);
  ForStrips("prod_others", x, y, [&](int64_t first, int64_t cols) {
    const int64_t n = x->shape[1], inner = x->shape[2];
    float product[kColumns];
    std::fill(product, product + cols, 1.f);
    for (int64_t k = 0; k < n; k++) {  // of those before
      const int64_t at = first + k * inner;
      for (int64_t c = 0; c < cols; c++) {
        out[at + c] = product[c];
        product[c] *= in[at + c];
      }
    }
    std::fill(product, product + cols, 1.f);
    for (int64_t k = n - 1; k >= 0; k--) {  // of those behind
      const int64_t at = first + k * inner;
      for (int64_t c = 0; c < cols; c++) {
        out[at + c] *= product[c];
        product[c] *= in[at + c];
      }
    }
  });
}

// The product of all others, y, and its change along g, dy.
void ProdOthersTangent(const DLArray* x, const DLArray* g, DLArray* y, DLArray* dy) {
  const char* op = "prod_others_tangent";
  const float* in = Input(op, x);
  const float* along = Input(op, g);
  float* out = Output(op, y);
  float* change_out = Output(op, dy);
  CheckSameShape(op, x, g);
  CheckSameShape(op, x, dy);
  ForStrips(op, x, y, [&](int64_t first, int64_t cols) {
    const int64_t n = x->shape[1], inner = x->shape[2];
    float product[kColumns], change[kColumns];
    for (int pass = 0; pass < 2; pass++) {  // those before, those behind
      std::fill(product, product + cols, 1.f);
      std::fill(change, change + cols, 0.f);
      for (int64_t k = 0; k < n; k++) {
        const int64_t at = first + (pass ? n - 1 - k : k) * inner;
        for (int64_t c = 0; c < cols; c++) {
          const float before = pass ? out[at + c] : 1.f;
          const float change_before = pass ? change_out[at + c] : 0.f;
          change_out[at + c] = change_before * product[c] + before * change[c];
          out[at + c] = before * product[c];
          change[c] = change[c] * in[at + c] + product[c] * along[at + c];
          product[c] *= in[at + c];
        }
      }
    }
  });
}

DLSYS_KERNEL(cpu, cumsum, CumSum);
DLSYS_KERNEL(cpu, prod_others, ProdOthers);
DLSYS_KERNEL(cpu, prod_others_tangent, ProdOthersTangent);

}  // namespace
}  // namespace cpu
}  // namespace dlsys
