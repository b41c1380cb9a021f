// Column-wise softmax and log-softmax on the CPU, over the middle axis of x (outer, n, inner).
//
// A task takes a strip of columns, narrow enough for the cache, in three passes: the maximum, the
// sum of exp(x - max), and the result. Short columns take a SIMD lane each. Arrays are contiguous;
// memory bandwidth limits it where a strip leaves the cache, else the arithmetic of exp.
#include "cpu/reduce/axes.h"
#include "math/monoids.h"

namespace dlsys {
namespace cpu {
namespace {

using Max = monoid::Max;

constexpr int64_t kElementCost = 4;  // of an element, in elements of simple arithmetic
constexpr int64_t kNarrow = 16;      // columns of a cache line

// The factor of exp(x - max), or the subtrahend of x - max for the logarithm, from the sum of exp.
template <bool kLog>
DLSYS_INLINE float Correction(double sum) {
  return kLog ? fn::log((float)sum) : (float)(1 / sum);
}

// x and y start at the first of `cols` columns of n rows. Where the strip is as wide as the array,
// rows are adjacent and fold into wide rows of about kFoldedColumns columns.
template <bool kLog, class T>
DLSYS_INLINE void SoftmaxStrip(const T* x, T* y, const Extents& s, int64_t cols) {
  constexpr bool kKeeps = !kLog && !kIs16Bit<T>;  // exp in y, which has its digits
  const int64_t fit = std::min(kFoldedColumns / s.inner, s.n / 4);
  const int64_t folded = cols == s.inner ? std::max<int64_t>(1, fit) : 1;
  const int64_t width = folded * cols, stride = folded * s.inner;
  const int64_t full = s.n / folded * folded, rest = (s.n - full) * cols;
  float max[kColumns], correction[kColumns];
  double sum[kColumns];
  for (int64_t c = 0; c < width; c++) max[c] = Max::kIdentity;
  for (int64_t r = 0; r < full; r += folded)
    for (int64_t c = 0; c < width; c++) max[c] = Max::Combine(max[c], x[r * s.inner + c]);
  for (int64_t c = 0; c < rest; c++) max[c] = Max::Combine(max[c], x[full * s.inner + c]);
  for (int64_t c = cols; c < width; c++) max[c % cols] = Max::Combine(max[c % cols], max[c]);
  for (int64_t c = cols; c < width; c++) max[c] = max[c - cols];

  std::fill(sum, sum + width, 0.0);
  auto row = [&](int64_t at, int64_t count) __attribute__((always_inline)) {
    for (int64_t c = 0; c < count; c++) {
      const float value = fn::exp(x[at + c] - max[c]);
      sum[c] += value;
      if (kKeeps) y[at + c] = T(value);
    }
  };
  for (int64_t at = 0; at < full * s.inner; at += stride) row(at, width);
  row(full * s.inner, rest);
  for (int64_t c = cols; c < width; c++) sum[c % cols] += sum[c];
  for (int64_t c = 0; c < cols; c++) correction[c] = Correction<kLog>(sum[c]);
  for (int64_t c = cols; c < width; c++) correction[c] = correction[c - cols];

  auto finish = [&](int64_t at, int64_t count) __attribute__((always_inline)) {
    for (int64_t c = 0; c < count; c++) {
      if (kLog)
        y[at + c] = T(x[at + c] - max[c] - correction[c]);
      else
        y[at + c] = T((kKeeps ? (float)y[at + c] : fn::exp(x[at + c] - max[c])) * correction[c]);
    }
  };
  for (int64_t at = 0; at < full * s.inner; at += stride) finish(at, width);
  finish(full * s.inner, rest);
}

template <bool kLog, class T>
void SoftmaxShort(const T* x, const Extents& s, T* y) {
  auto block = [=](const T* from, const int32_t* start, int64_t, int count)
                   __attribute__((always_inline)) {
                     T* to = y + (from - x);
                     float max[kLanes], correction[kLanes], value[kShort][kLanes];
                     double sum[kLanes] = {};
                     for (int j = 0; j < kLanes; j++) max[j] = Max::kIdentity;
                     for (int64_t r = 0; r < s.n; r++)
                       for (int j = 0; j < kLanes; j++) {
                         value[r][j] = from[start[j] + r * s.inner];
                         max[j] = Max::Combine(max[j], value[r][j]);
                       }
                     for (int64_t r = 0; r < s.n; r++)
                       for (int j = 0; j < kLanes; j++) {
                         const float power = fn::exp(value[r][j] - max[j]);
                         sum[j] += power;
                         value[r][j] = kLog ? value[r][j] - max[j] : power;
                       }
                     for (int j = 0; j < kLanes; j++) correction[j] = Correction<kLog>(sum[j]);
                     for (int64_t r = 0; r < s.n; r++)
                       for (int j = 0; j < count; j++)
                         to[start[j] + r * s.inner] =
                             T(kLog ? value[r][j] - correction[j] : value[r][j] * correction[j]);
                   };
  ForShort(x, s, block);
}

template <class T, bool kLog>
void Softmax(const DLArray* x, DLArray* y) {
  const char* op = kLog ? "log_softmax_columns" : "softmax_columns";
  const T* in = Input<T>(op, x);
  T* out = Output<T>(op, y);
  const Extents s = CheckedExtents(op, x, y, true);
  if (Numel(y) == 0) return;
  if (s.n <= kShort && s.inner < kLanes) return SoftmaxShort<kLog>(in, s, out);
  const int64_t fits = kSplit / s.n / kNarrow * kNarrow;
  const int64_t width = std::min(s.inner, std::max(kNarrow, std::min(kColumns, fits)));
  const int64_t strips = (s.inner - 1) / width + 1;
  ParallelFor(s.outer * strips, RowGrain(width * s.n * kElementCost),
              [&](int64_t begin, int64_t end) {
                Dispatch(DLSYS_SIMD {
                  for (int64_t k = begin; k < end; k++) {
                    const int64_t col = k % strips * width;
                    const int64_t at = k / strips * s.n * s.inner + col;
                    SoftmaxStrip<kLog>(in + at, out + at, s, std::min(width, s.inner - col));
                  }
                });
              });
}

DLSYS_KERNEL_TYPED(cpu, softmax_columns, Softmax, false);
DLSYS_KERNEL_TYPED(cpu, log_softmax_columns, Softmax, true);

}  // namespace
}  // namespace cpu
}  // namespace dlsys
