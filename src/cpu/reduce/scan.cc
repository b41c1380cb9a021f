// Running results along the middle axis of x (outer, n, inner): cumulative sums, and the product of
// all elements but one, with its change along a direction. A column belongs to one task; sums and
// products are carried in double.
#include <type_traits>

#include "cpu/runtime/common.h"
#include "cpu/runtime/parallel.h"
#include "cpu/runtime/simd.h"

namespace dlsys {
namespace cpu {
namespace {

const int kColumns = 256;  // columns that a task carries

static Scratch held_scratch;

// How many columns a task takes that holds a column's values in double, 2 MiB of them.
int64_t HeldColumns(const DLArray* x) {
  const int64_t columns = (1 << 18) / std::max<int64_t>(x->ndim == 3 ? x->shape[1] : 1, 1);
  return std::min<int64_t>(std::max<int64_t>(columns, 8), kColumns);
}

// Calls body(offset of the first row, columns, room for them) for strips of columns. The room is a
// constant, and where columns are few it is their number, so that states lie in registers.
template <int kRoom, class F>
DLSYS_INLINE void RunStrips(const DLArray* x, int64_t columns, const F& body) {
  const int64_t outer = x->shape[0], n = x->shape[1];
  const int64_t inner = kRoom < kColumns ? kRoom : x->shape[2];
  const int64_t width = std::min(inner, columns);
  const int64_t strips = (inner - 1) / width + 1;
  ParallelFor(outer * strips, RowGrain(width * n), [&](int64_t begin, int64_t end) {
    Dispatch([&]() __attribute__((always_inline)) {
      for (int64_t k = begin; k < end; k++) {
        const int64_t row = strips == 1 ? k : k / strips, col = (k - row * strips) * width;
        body(row * n * inner + col, kRoom < kColumns ? kRoom : std::min(width, inner - col),
             std::integral_constant<int, kRoom>());
      }
    });
  });
}

template <class F>
void ForStrips(const char* op, const DLArray* x, const DLArray* y, int64_t columns, const F& body) {
  CheckSameShape(op, x, y);
  if (x->ndim != 3) Fail("%s: expected (outer, n, inner), got %s", op, ShapeText(x).c_str());
  if (Numel(x) == 0) return;
  switch (x->shape[2]) {
    case 1:
      return RunStrips<1>(x, columns, body);
    case 2:
      return RunStrips<2>(x, columns, body);
    case 3:
      return RunStrips<3>(x, columns, body);
    case 4:
      return RunStrips<4>(x, columns, body);
  }
  RunStrips<kColumns>(x, columns, body);
}

void CumSum(const DLArray* x, int64_t reverse, DLArray* y) {
  const float* in = Input("cumsum", x);
  float* out = Output("cumsum", y);
  auto strip = [=](int64_t first, int64_t cols, auto room) __attribute__((always_inline)) {
    const int64_t n = x->shape[1], inner = x->shape[2];
    double sum[decltype(room)::value];
    std::fill(sum, sum + cols, 0.0);
    for (int64_t k = 0; k < n; k++) {
      const int64_t at = first + (reverse ? n - 1 - k : k) * inner;
      for (int64_t c = 0; c < cols; c++) {
        sum[c] += in[at + c];
        out[at + c] = (float)sum[c];
      }
    }
  };
  ForStrips("cumsum", x, y, kColumns, strip);
}

void ProdOthers(const DLArray* x, DLArray* y) {
  const float* in = Input("prod_others", x);
  float* out = Output("prod_others", y);
  auto strip = [=](int64_t first, int64_t cols, auto room) __attribute__((always_inline)) {
    const int64_t n = x->shape[1], inner = x->shape[2];
    double product[decltype(room)::value];
    double* before = held_scratch.Get<double>(n * cols);
    std::fill(product, product + cols, 1.0);
    for (int64_t k = 0; k < n; k++) {
      for (int64_t c = 0; c < cols; c++) {
        before[k * cols + c] = product[c];
        product[c] *= in[first + k * inner + c];
      }
    }
    std::fill(product, product + cols, 1.0);
    for (int64_t k = n - 1; k >= 0; k--) {
      const int64_t at = first + k * inner;
      for (int64_t c = 0; c < cols; c++) {
        out[at + c] = (float)(before[k * cols + c] * product[c]);
        product[c] *= in[at + c];
      }
    }
  };
  ForStrips("prod_others", x, y, HeldColumns(x), strip);
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
  auto strip = [=](int64_t first, int64_t cols, auto room) __attribute__((always_inline)) {
    const int64_t n = x->shape[1], inner = x->shape[2];
    double product[decltype(room)::value], change[decltype(room)::value];
    double* before = held_scratch.Get<double>(2 * n * cols);
    double* change_before = before + n * cols;
    std::fill(product, product + cols, 1.0);
    std::fill(change, change + cols, 0.0);
    for (int64_t k = 0; k < n; k++) {
      const int64_t at = first + k * inner;
      for (int64_t c = 0; c < cols; c++) {
        before[k * cols + c] = product[c];
        change_before[k * cols + c] = change[c];
        change[c] = change[c] * in[at + c] + product[c] * along[at + c];
        product[c] *= in[at + c];
      }
    }
    std::fill(product, product + cols, 1.0);
    std::fill(change, change + cols, 0.0);
    for (int64_t k = n - 1; k >= 0; k--) {
      const int64_t at = first + k * inner;
      for (int64_t c = 0; c < cols; c++) {
        const double front = before[k * cols + c];
        change_out[at + c] = (float)(change_before[k * cols + c] * product[c] + front * change[c]);
        out[at + c] = (float)(front * product[c]);
        change[c] = change[c] * in[at + c] + product[c] * along[at + c];
        product[c] *= in[at + c];
      }
    }
  };
  ForStrips(op, x, y, HeldColumns(x), strip);
}

DLSYS_KERNEL(cpu, cumsum, CumSum);
DLSYS_KERNEL(cpu, prod_others, ProdOthers);
DLSYS_KERNEL(cpu, prod_others_tangent, ProdOthersTangent);

}  // namespace
}  // namespace cpu
}  // namespace dlsys
