// Scans along the middle axis of x (outer, n, inner) on the CPU: cumulative sums and products, the
// linear recurrence, and the product of all elements but one (exclusive prefix times exclusive
// suffix products) with its tangent. A column belongs to one task; sums and products are carried in
// double. Outputs never overlap inputs. Limited by the latency of one addition after the other.
#include <type_traits>

#include "cpu/runtime/common.h"
#include "cpu/runtime/parallel.h"
#include "cpu/runtime/simd.h"
#include "math/scans.h"

namespace dlsys {
namespace cpu {
namespace {

const int kColumns = 256;  // columns of a task

// The columns of a task that keeps its columns in double, 2 MiB of them.
int64_t HeldColumns(const DLArray* x) {
  const int64_t columns = (1 << 18) / std::max<int64_t>(x->ndim == 3 ? x->shape[1] : 1, 1);
  return std::min<int64_t>(std::max<int64_t>(columns, 8), kColumns);
}

// Calls body(offset of the first row, columns, scratch, capacity) for strips of columns, with
// scratch for `held` doubles an element. The capacity is a compile-time bound on the columns, equal
// to them where they are few, so that states are kept in registers.
template <int kCapacity, class F>
DLSYS_INLINE void RunStrips(const DLArray* x, int64_t columns, int64_t held, const F& body) {
  const int64_t outer = x->shape[0], n = x->shape[1];
  const int64_t inner = kCapacity < kColumns ? kCapacity : x->shape[2];
  const int64_t width = std::min(inner, columns);
  const int64_t strips = (inner - 1) / width + 1;
  auto task = [&](int64_t begin, int64_t end, const ScratchArray<double>& scratch) {
    Dispatch([&]() __attribute__((always_inline)) {
      for (int64_t k = begin; k < end; k++) {
        const int64_t row = strips == 1 ? k : k / strips, col = (k - row * strips) * width;
        body(row * n * inner + col, kCapacity < kColumns ? kCapacity : std::min(width, inner - col),
             scratch.data(), std::integral_constant<int, kCapacity>());
      }
    });
  };
  const auto make = [=] { return ScratchArray<double>(held * n * width); };
  ParallelForWithScratch(outer * strips, RowGrain(width * n), make, task);
}

template <class F>
void ForStrips(const char* op, const DLArray* x, const DLArray* y, int64_t columns, int64_t held,
               const F& body) {
  CheckSameShape(op, x, y);
  if (x->ndim != 3) Fail("%s: expected (outer, n, inner), got %s", op, ShapeText(x).c_str());
  if (Numel(x) == 0) return;
  switch (x->shape[2]) {
    case 1:
      return RunStrips<1>(x, columns, held, body);
    case 2:
      return RunStrips<2>(x, columns, held, body);
    case 3:
      return RunStrips<3>(x, columns, held, body);
    case 4:
      return RunStrips<4>(x, columns, held, body);
  }
  RunStrips<kColumns>(x, columns, held, body);
}

template <class T, class Op>
void Cumulate(const DLArray* x, int64_t reverse, DLArray* y) {
  using Carry = scan::Carried<T>;
  const T* in = Input<T>(Op::name, x);
  T* out = Output<T>(Op::name, y);
  auto strip = [=](int64_t first, int64_t cols, double*, auto capacity)
                   __attribute__((always_inline)) {
                     const int64_t n = x->shape[1], inner = x->shape[2];
                     Carry carry[decltype(capacity)::value];
                     std::fill(carry, carry + cols, (Carry)Op::kIdentity);
                     for (int64_t k = 0; k < n; k++) {
                       const int64_t at = first + (reverse ? n - 1 - k : k) * inner;
                       for (int64_t c = 0; c < cols; c++) {
                         carry[c] = Op::Combine(carry[c], (Carry)in[at + c]);
                         out[at + c] = T(carry[c]);
                       }
                     }
                   };
  ForStrips(Op::name, x, y, kColumns, 0, strip);
}

// y[k] = a[k] y[k - 1] + b[k], from the end with `reverse`; `initial` stands before the first.
template <class T>
void Recurrence(const DLArray* a, const DLArray* b, int64_t reverse, float initial, DLArray* y) {
  const char* op = "recurrence";
  const T *factor = Input<T>(op, a), *term = Input<T>(op, b);
  T* out = Output<T>(op, y);
  CheckSameShape(op, a, b);
  auto strip = [=](int64_t first, int64_t cols, double*, auto capacity)
                   __attribute__((always_inline)) {
                     const int64_t n = a->shape[1], inner = a->shape[2];
                     double carry[decltype(capacity)::value];
                     std::fill(carry, carry + cols, (double)initial);
                     for (int64_t k = 0; k < n; k++) {
                       const int64_t at = first + (reverse ? n - 1 - k : k) * inner;
                       for (int64_t c = 0; c < cols; c++) {
                         carry[c] = carry[c] * factor[at + c] + term[at + c];
                         out[at + c] = T(carry[c]);
                       }
                     }
                   };
  ForStrips(op, a, y, kColumns, 0, strip);
}

template <class T>
void ProdOthers(const DLArray* x, DLArray* y) {
  const T* in = Input<T>("prod_others", x);
  T* out = Output<T>("prod_others", y);
  auto strip = [=](int64_t first, int64_t cols, double* before, auto capacity)
                   __attribute__((always_inline)) {
                     const int64_t n = x->shape[1], inner = x->shape[2];
                     double product[decltype(capacity)::value];
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
                         out[at + c] = T(before[k * cols + c] * product[c]);
                         product[c] *= in[at + c];
                       }
                     }
                   };
  ForStrips("prod_others", x, y, HeldColumns(x), 1, strip);
}

// y = the product of all other elements, dy = its tangent along g.
template <class T>
void ProdOthersTangent(const DLArray* x, const DLArray* g, DLArray* y, DLArray* dy) {
  const char* op = "prod_others_tangent";
  const T* in = Input<T>(op, x);
  const T* along = Input<T>(op, g);
  T* out = Output<T>(op, y);
  T* tangent_out = Output<T>(op, dy);
  CheckSameShape(op, x, g);
  CheckSameShape(op, x, dy);
  auto strip = [=](int64_t first, int64_t cols, double* before,
                   auto capacity) __attribute__((always_inline)) {
    const int64_t n = x->shape[1], inner = x->shape[2];
    double product[decltype(capacity)::value], tangent[decltype(capacity)::value];
    double* tangent_before = before + n * cols;
    std::fill(product, product + cols, 1.0);
    std::fill(tangent, tangent + cols, 0.0);
    for (int64_t k = 0; k < n; k++) {
      const int64_t at = first + k * inner;
      for (int64_t c = 0; c < cols; c++) {
        before[k * cols + c] = product[c];
        tangent_before[k * cols + c] = tangent[c];
        tangent[c] = tangent[c] * in[at + c] + product[c] * along[at + c];
        product[c] *= in[at + c];
      }
    }
    std::fill(product, product + cols, 1.0);
    std::fill(tangent, tangent + cols, 0.0);
    for (int64_t k = n - 1; k >= 0; k--) {
      const int64_t at = first + k * inner;
      for (int64_t c = 0; c < cols; c++) {
        const double front = before[k * cols + c];
        tangent_out[at + c] = T(tangent_before[k * cols + c] * product[c] + front * tangent[c]);
        out[at + c] = T(front * product[c]);
        tangent[c] = tangent[c] * in[at + c] + product[c] * along[at + c];
        product[c] *= in[at + c];
      }
    }
  };
  ForStrips(op, x, y, HeldColumns(x), 2, strip);
}

DLSYS_KERNEL_TYPED(cpu, cumsum, Cumulate, scan::Sum);
DLSYS_KERNEL_TYPED(cpu, cumprod, Cumulate, scan::Product);
DLSYS_KERNEL_OF(cpu, cumsum, "cumsum", DL_INT64, Cumulate<int64_t, scan::Sum>);
DLSYS_KERNEL_OF(cpu, cumprod, "cumprod", DL_INT64, Cumulate<int64_t, scan::Product>);
DLSYS_KERNEL_TYPED(cpu, recurrence, Recurrence);
DLSYS_KERNEL_TYPED(cpu, prod_others, ProdOthers);
DLSYS_KERNEL_TYPED(cpu, prod_others_tangent, ProdOthersTangent);

}  // namespace
}  // namespace cpu
}  // namespace dlsys
