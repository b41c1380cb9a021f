// Reductions of the middle axis of x (outer, n, inner) to y (outer, inner): extremes, products,
// logsumexp and the positions of extremes; and the mask of the first element that equals its
// extreme. NaN is larger and smaller than everything. How values are grouped depends on the shape
// only.
#include <limits>

#include "../functors.h"
#include "common.h"
#include "parallel.h"
#include "rows.h"

namespace dlsys {
namespace cpu {
namespace {

const int64_t kColumns = 512;  // columns whose results a task holds
const int64_t kSplit = 65536;  // elements that one task joins at most, give or take

thread_local Scratch partial_scratch;

struct Max {
  static constexpr const char* name = "reduce_max";
  static constexpr float kStart = -std::numeric_limits<float>::infinity();
  DLSYS_INLINE float operator()(float a, float b) const { return b > a || b != b ? b : a; }
};
struct Min {
  static constexpr const char* name = "reduce_min";
  static constexpr float kStart = std::numeric_limits<float>::infinity();
  DLSYS_INLINE float operator()(float a, float b) const { return b < a || b != b ? b : a; }
};
struct Prod {
  static constexpr const char* name = "reduce_prod";
  static constexpr float kStart = 1.f;
  DLSYS_INLINE float operator()(float a, float b) const { return a * b; }
};

struct Shape {
  int64_t outer, n, inner;
};

// Checks x (outer, n, inner) against a result of shape (outer, inner), or of x's shape.
Shape CheckedShape(const char* op, const DLArray* x, const DLArray* y, bool keeps = false) {
  Check(op, x);
  Check(op, y);
  bool fits = x->ndim == 3 && y->ndim == (keeps ? 3 : 2);
  fits = fits && y->shape[0] == x->shape[0] && y->shape[y->ndim - 1] == x->shape[2];
  if (!fits || (keeps && y->shape[1] != x->shape[1]))
    Fail("%s: %s does not reduce to %s: expected (outer, n, inner) and %s", op,
         ShapeText(x).c_str(), ShapeText(y).c_str(), keeps ? "the same" : "(outer, inner)");
  return {x->shape[0], x->shape[1], x->shape[2]};
}

// Calls body(outer index, first column, columns) for strips of columns.
template <class F>
void ForStrips(const Shape& s, const F& body) {
  if (s.outer == 0 || s.inner == 0) return;
  const int64_t width = std::min(s.inner, kColumns);
  const int64_t strips = (s.inner - 1) / width + 1;
  ParallelFor(s.outer * strips, RowGrain(width * std::max<int64_t>(s.n, 1)),
              [&](int64_t begin, int64_t end) {
                for (int64_t k = begin; k < end; k++) {
                  const int64_t col = k % strips * width;
                  body(k / strips, col, std::min(width, s.inner - col));
                }
              });
}

// ---- max, min, prod ----

template <class F>
DLSYS_INLINE float JoinRun(const float* x, int64_t n) {
  float lane[kLanes];
  for (int j = 0; j < kLanes; j++) lane[j] = F::kStart;
  int64_t k = 0;
  for (; k + kLanes <= n; k += kLanes)
    for (int j = 0; j < kLanes; j++) lane[j] = F()(lane[j], x[k + j]);
  for (int j = 0; k < n; k++, j++) lane[j] = F()(lane[j], x[k]);
  return FoldLanes(lane, F());
}

// y (outer, groups, inner) from groups of `part` along n.
template <class F>
void JoinParts(const float* x, const Shape& s, int64_t groups, int64_t part, float* y) {
  const int64_t width = std::min(s.inner, kColumns);
  const int64_t strips = (s.inner - 1) / width + 1;
  const int64_t grain = RowGrain(width * std::min(part, s.n));
  ParallelFor(s.outer * groups * strips, grain, [&](int64_t begin, int64_t end) {
    Dispatch([&]() __attribute__((always_inline)) {
      for (int64_t k = begin; k < end; k++) {
        const int64_t job = k / strips, group = job % groups, col = k % strips * width;
        const int64_t cols = std::min(width, s.inner - col);
        const int64_t first = group * part, last = std::min(s.n, first + part);
        const float* from = x + (job / groups * s.n + first) * s.inner + col;
        float* to = y + job * s.inner + col;
        if (s.inner == 1) {
          *to = JoinRun<F>(from, last - first);
          continue;
        }
        std::fill(to, to + cols, F::kStart);
        for (int64_t r = first; r < last; r++, from += s.inner) {
          DLSYS_IVDEP
          for (int64_t c = 0; c < cols; c++) to[c] = F()(to[c], from[c]);
        }
      }
    });
  });
}

template <class F>
void Reduce(const DLArray* x, DLArray* y) {
  const float* in = Input(F::name, x);
  float* out = Output(F::name, y);
  const Shape s = CheckedShape(F::name, x, y);
  if (s.outer == 0 || s.inner == 0) return;
  const int64_t part = std::max<int64_t>(64, kSplit / std::min(s.inner, kColumns));
  const int64_t groups = s.n > part ? (s.n - 1) / part + 1 : 1;
  if (groups == 1) return JoinParts<F>(in, s, 1, part, out);
  float* partial = partial_scratch.Get<float>(s.outer * groups * s.inner);
  JoinParts<F>(in, s, groups, part, partial);
  JoinParts<F>(partial, {s.outer, groups, s.inner}, 1, groups, out);
}

// ---- positions of extremes ----

template <bool kMax, class T>
struct Better {
  DLSYS_INLINE bool operator()(T x, T best) const {
    return (kMax ? x > best : x < best) || (x != x && best == best);
  }
};

template <bool kMax, class T>
void ArgRun(const T* x, const Shape& s, int64_t* y) {
  ForStrips(s, [&](int64_t o, int64_t col, int64_t cols) {
    T best[kColumns];
    const T* row = x + o * s.n * s.inner + col;
    int64_t* at = y + o * s.inner + col;
    for (int64_t c = 0; c < cols; c++) {
      best[c] = row[c];
      at[c] = 0;
    }
    for (int64_t r = 1; r < s.n; r++) {
      row += s.inner;
      for (int64_t c = 0; c < cols; c++) {
        if (!Better<kMax, T>()(row[c], best[c])) continue;
        best[c] = row[c];
        at[c] = r;
      }
    }
  });
}

template <bool kMax>
void Arg(const DLArray* x, DLArray* y) {
  const char* op = kMax ? "argmax" : "argmin";
  const Shape s = CheckedShape(op, x, y);
  if (y->dtype != DL_INT64) Fail("%s: expected int64, got %s", op, DtypeText(y->dtype));
  if (Numel(y) == 0) return;
  if (s.n == 0) Fail("%s: shape %s has no elements to choose from", op, ShapeText(x).c_str());
  int64_t* out = (int64_t*)y->data;
  switch (x->dtype) {
    case DL_FLOAT32:
      return ArgRun<kMax>((const float*)x->data, s, out);
    case DL_INT32:
      return ArgRun<kMax>((const int32_t*)x->data, s, out);
    case DL_INT64:
      return ArgRun<kMax>((const int64_t*)x->data, s, out);
    case DL_UINT8:
    case DL_BOOL:
      return ArgRun<kMax>((const uint8_t*)x->data, s, out);
  }
  Fail("%s: does not take %s", op, DtypeText(x->dtype));
}

// mask (outer, n, inner): 1 at the first element of each column that equals y (outer, inner).
void FirstMatch(const DLArray* x, const DLArray* y, DLArray* mask) {
  const char* op = "first_match";
  const float* in = Input(op, x);
  const float* wanted = Input(op, y);
  const Shape s = CheckedShape(op, x, y);
  CheckedShape(op, x, mask, true);
  if (mask->dtype != DL_BOOL) Fail("%s: expected bool, got %s", op, DtypeText(mask->dtype));
  uint8_t* out = (uint8_t*)mask->data;
  ForStrips(s, [&](int64_t o, int64_t col, int64_t cols) {
    uint8_t open[kColumns];  // nothing found yet
    std::fill(open, open + cols, (uint8_t)1);
    const float* target = wanted + o * s.inner + col;
    for (int64_t r = 0; r < s.n; r++) {
      const int64_t at = (o * s.n + r) * s.inner + col;
      for (int64_t c = 0; c < cols; c++) {
        const float value = in[at + c], sought = target[c];
        const bool equal = value == sought || (value != value && sought != sought);
        out[at + c] = open[c] & (uint8_t)equal;
        open[c] &= (uint8_t)!out[at + c];
      }
    }
  });
}

// ---- logsumexp ----

DLSYS_INLINE float LogSumExpRun(const float* x, int64_t n) {
  float shift = JoinRun<Max>(x, n);
  if (shift == Max::kStart || shift == Min::kStart) shift = 0.f;  // inf - inf would be NaN
  const double sum =
      SumOf(Row{x, n, n}, Max::kStart,
            [=](float value) __attribute__((always_inline)) { return fn::exp(value - shift); });
  return fn::log((float)sum) + shift;
}

void LogSumExp(const DLArray* x, DLArray* y) {
  const char* op = "reduce_logsumexp";
  const float* in = Input(op, x);
  float* out = Output(op, y);
  const Shape s = CheckedShape(op, x, y);
  if (s.inner == 1) {
    return ParallelFor(s.outer, RowGrain(s.n), [&](int64_t begin, int64_t end) {
      Dispatch(DLSYS_SIMD {
        for (int64_t o = begin; o < end; o++) out[o] = LogSumExpRun(in + o * s.n, s.n);
      });
    });
  }
  ForStrips(s, [&](int64_t o, int64_t col, int64_t cols) {
    const float* first = in + o * s.n * s.inner + col;
    float* to = out + o * s.inner + col;
    Dispatch([&]() __attribute__((always_inline)) {
      float shift[kColumns];
      double sum[kColumns];
      std::fill(shift, shift + cols, Max::kStart);
      std::fill(sum, sum + cols, 0.0);
      for (int64_t r = 0; r < s.n; r++)
        for (int64_t c = 0; c < cols; c++) shift[c] = Max()(shift[c], first[r * s.inner + c]);
      for (int64_t c = 0; c < cols; c++)
        if (shift[c] == Max::kStart || shift[c] == Min::kStart) shift[c] = 0.f;
      for (int64_t r = 0; r < s.n; r++)
        for (int64_t c = 0; c < cols; c++) sum[c] += fn::exp(first[r * s.inner + c] - shift[c]);
      for (int64_t c = 0; c < cols; c++) to[c] = fn::log((float)sum[c]) + shift[c];
    });
  });
}

DLSYS_KERNEL(cpu, reduce_max, Reduce<Max>);
DLSYS_KERNEL(cpu, reduce_min, Reduce<Min>);
DLSYS_KERNEL(cpu, reduce_prod, Reduce<Prod>);
DLSYS_KERNEL(cpu, reduce_logsumexp, LogSumExp);
DLSYS_KERNEL(cpu, argmax, Arg<true>);
DLSYS_KERNEL(cpu, argmin, Arg<false>);
DLSYS_KERNEL(cpu, first_match, FirstMatch);

}  // namespace
}  // namespace cpu
}  // namespace dlsys
