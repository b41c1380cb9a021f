// Layer, group, instance and RMS normalization: row-wise over x (rows, length), forward and
// backward.
//
// A thread group takes a row: 16 lanes for up to 32 values, a warp for up to 1024, a block beyond.
// The variance is two-pass, the mean first and then the squares about it; the later reads of a row
// hit the cache. Backward recomputes the statistics. Scale and bias go by channel, and a row holds
// complete channels. dx may be dy; outputs overlap no other input. Memory bandwidth limits it.
#include "cuda/norm/norm.cuh"
#include "cuda/reduce/group.cuh"

namespace dlsys {
namespace cuda {
namespace {

// Rows (outer, groups) of `length` values, `inner` neighbors a channel.
struct Layout {
  int64_t rows, length, inner, groups;
  bool centered, small;
  float eps;

  // The channel of value k of a row.
  __device__ __forceinline__ int64_t Channel(int64_t row, int64_t k) const {
    const int64_t first = row % groups * (length / inner);
    if (inner == 1) return first + k;
    return first + (small ? (uint32_t)k / (uint32_t)inner : k / inner);
  }
};

// ---- kernels ----

template <int kGroup, class T>
__device__ Moments MomentsOf(const Layout& layout, const T* x, int64_t count, int rank) {
  const float length = (float)layout.length;
  float mean = 0.f, sum = 0.f;
  if (layout.centered) {
    for (int64_t k = rank; k < count; k += kGroup) sum += x[k];
    mean = GroupReduce<SumMonoid, kGroup>(sum) / length;
    sum = 0.f;
  }
  for (int64_t k = rank; k < count; k += kGroup) sum += (x[k] - mean) * (x[k] - mean);
  const float variance = GroupReduce<SumMonoid, kGroup>(sum) / length;
  return {mean, 1.f / sqrtf(variance + layout.eps)};
}

// Runs op on every row with a group of kGroup threads. A group without a row sees a row of no
// values, since all threads of the block have to reach the barriers.
template <int kGroup, class Op>
__global__ void RowsKernel(Layout layout, Op op) {
  constexpr int kGroups = kThreads / kGroup;
  const int rank = threadIdx.x % kGroup;
  for (int64_t first = (int64_t)blockIdx.x * kGroups; first < layout.rows;
       first += (int64_t)gridDim.x * kGroups) {
    const int64_t row = first + threadIdx.x / kGroup;
    const bool exists = row < layout.rows;
    op.template Row<kGroup>(layout, exists ? row : 0, exists ? layout.length : 0, rank);
  }
}

template <class T>
struct NormalizeOp {
  const T* x;  // (rows, length)
  ChannelFloats<T> scale;
  ChannelFloats<T> bias;
  T* y;  // (rows, length)
  template <int kGroup>
  __device__ void Row(const Layout& layout, int64_t row, int64_t count, int rank) const {
    const T* in = x + row * layout.length;
    T* out = y + row * layout.length;
    const Moments of = MomentsOf<kGroup>(layout, in, count, rank);
    for (int64_t k = rank; k < count; k += kGroup) {
      const int64_t c = layout.Channel(row, k);
      out[k] = T((in[k] - of.mean) * of.inverse * scale[c] + bias[c]);
    }
  }
};

// With d = dy * scale: (d - mean(d) - xhat * mean(d * xhat)) * inverse, mean(d) where centered.
template <class T>
struct GradientOp {
  const T* x;  // (rows, length)
  ChannelFloats<T> scale;
  const T* dy;  // (rows, length)
  T* dx;        // (rows, length)
  template <int kGroup>
  __device__ void Row(const Layout& layout, int64_t row, int64_t count, int rank) const {
    const T* in = x + row * layout.length;
    const T* gradient = dy + row * layout.length;
    T* out = dx + row * layout.length;
    const Moments of = MomentsOf<kGroup>(layout, in, count, rank);
    float sum = 0.f, product = 0.f;
    for (int64_t k = rank; k < count; k += kGroup) {
      const float d = gradient[k] * scale[layout.Channel(row, k)];
      sum += d;
      product += d * ((in[k] - of.mean) * of.inverse);
    }
    const float length = (float)layout.length;
    sum = GroupReduce<SumMonoid, kGroup>(sum);
    const float shift = layout.centered ? sum / length : 0.f;
    const float projection = GroupReduce<SumMonoid, kGroup>(product) / length * of.inverse;
    for (int64_t k = rank; k < count; k += kGroup) {
      const float d = gradient[k] * scale[layout.Channel(row, k)];
      out[k] = T((d - (shift + (in[k] - of.mean) * projection)) * of.inverse);
    }
  }
};

template <class T>
struct MomentsOp {
  const T* x;      // (rows, length)
  float* mean;     // (rows)
  float* inverse;  // (rows)
  template <int kGroup>
  __device__ void Row(const Layout& layout, int64_t row, int64_t count, int rank) const {
    const Moments of = MomentsOf<kGroup>(layout, x + row * layout.length, count, rank);
    if (count == 0 || rank != 0) return;
    mean[row] = of.mean;
    inverse[row] = of.inverse;
  }
};

// ---- launchers ----

Layout CheckedLayout(const char* op, const DLArray* x, const DLArray* scale, int64_t length,
                     int64_t inner, int64_t centered, float eps) {
  const int64_t n = Numel(x), count = Numel(scale);
  int64_t image;  // elements that share their n
  if (length < 0 || inner < 0 || __builtin_mul_overflow(count, inner, &image) ||
      (image ? n % image : n) || (length ? image % length : n))
    Fail("%s: rows of %ld values do not fit x %s and scale %s", op, (long)length,
         ShapeText(x).c_str(), ShapeText(scale).c_str());
  Layout layout;
  layout.rows = length ? n / length : 0;
  layout.length = length;
  layout.inner = inner;
  layout.groups = length ? image / length : 0;
  layout.centered = centered != 0;
  layout.small = length < int64_t(1) << 32;
  layout.eps = eps;
  return layout;
}

template <class Op>
void RunRows(const char* op, const Layout& layout, const Op& body, DLStream stream) {
  if (layout.length <= 32) {
    Launch(op, RowsKernel<16, Op>, Blocks(layout.rows, kThreads / 16), kThreads, 0, stream, layout,
           body);
  } else if (layout.length <= 1024) {
    Launch(op, RowsKernel<32, Op>, Blocks(layout.rows, kThreads / 32), kThreads, 0, stream, layout,
           body);
  } else {
    Launch(op, RowsKernel<kThreads, Op>, Blocks(layout.rows, 1), kThreads, 0, stream, layout, body);
  }
}

template <class T>
void RowNormalize(const DLArray* x, const DLArray* scale, const DLArray* bias, int64_t length,
                  int64_t inner, int64_t centered, float eps, DLArray* y, DLStream stream) {
  const char* op = "row_normalize";
  Enter(op, x, scale, bias, y);
  CheckSameShape(op, x, y);
  CheckSameShape(op, scale, bias);
  const Layout layout = CheckedLayout(op, x, scale, length, inner, centered, eps);
  const int64_t count = Numel(scale);
  const NormalizeOp<T> body{In<T>(op, x), ChannelFloatsOf<T>(op, scale, count),
                            ChannelFloatsOf<T>(op, bias, count), Out<T>(op, y)};
  RunRows(op, layout, body, stream);
}

template <class T>
void RowNormalizeGradient(const DLArray* x, const DLArray* scale, const DLArray* dy, int64_t length,
                          int64_t inner, int64_t centered, float eps, DLArray* dx,
                          DLStream stream) {
  const char* op = "row_normalize_gradient";
  Enter(op, x, scale, dy, dx);
  CheckSameShape(op, x, dy);
  CheckSameShape(op, x, dx);
  const Layout layout = CheckedLayout(op, x, scale, length, inner, centered, eps);
  const GradientOp<T> body{In<T>(op, x), ChannelFloatsOf<T>(op, scale, Numel(scale)), In<T>(op, dy),
                           Out<T>(op, dx)};
  RunRows(op, layout, body, stream);
}

// The moments of every row go to scratch, then the channel sums over all rows; `scale` gives the
// number of channels.
template <class T>
void RowNormalizeSums(const DLArray* x, const DLArray* scale, const DLArray* dy, int64_t length,
                      int64_t inner, int64_t centered, float eps, DLArray* dscale, DLArray* dbias,
                      DLStream stream) {
  const char* op = "row_normalize_sums";
  Enter(op, x, scale, dy, dscale, dbias);
  CheckSameShape(op, x, dy);
  const Layout layout = CheckedLayout(op, x, scale, length, inner, centered, eps);
  const int64_t channels = Numel(scale);
  float* of_scale = ChannelResult(op, dscale, channels);
  float* of_bias = ChannelResult(op, dbias, channels);
  const Scratch scratch(x->ctx, 2 * layout.rows * (int64_t)sizeof(float), stream);
  float* mean = scratch.floats();
  float* inverse = mean + layout.rows;
  RunRows(op, layout, MomentsOp<T>{In<T>(op, x), mean, inverse}, stream);
  const int64_t image = channels * inner;
  ChannelSums(op, x->ctx, In<T>(op, x), In<T>(op, dy),
              Channels(image ? Numel(x) / image : 0, channels, inner),
              {mean, inverse, layout.groups, inner && length ? length / inner : 1}, of_scale,
              of_bias, stream);
}

DLSYS_KERNEL_TYPED(cuda, row_normalize, RowNormalize);
DLSYS_KERNEL_TYPED(cuda, row_normalize_gradient, RowNormalizeGradient);
DLSYS_KERNEL_TYPED(cuda, row_normalize_sums, RowNormalizeSums);

}  // namespace
}  // namespace cuda
}  // namespace dlsys
