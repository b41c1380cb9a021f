// Layer and RMS normalization with what surrounds it in a residual stream, over rows in registers.
// Forward: x plus an addend, their sum's normalization, and a copy of it in 16 bits for products.
// Backward: the gradient of x through the normalization plus that of the stream, and column sums:
// the gradients of scale and bias, and that of a bias in front of the addition.
//
// A warp holds rows of up to 1024 values, a block those of up to 8192; every array is read once,
// four neighbors at a time where alignment allows, so that lanes side by side fill sectors. The
// variance is two-pass, the statistics are recomputed backward, and all sums are float32. Blocks
// add columns in registers over their rows and write a row of partial sums each, which a second
// kernel adds in a fixed order. Each array lies in float32 or in T. Outputs overlap no input.
// Memory bandwidth limits it.
#include "cuda/norm/norm.cuh"
#include "cuda/reduce/group.cuh"

namespace dlsys {
namespace cuda {
namespace {

constexpr int64_t kLongest = 8192;  // values of a row
constexpr int kMostSums = 3;

struct Rows {
  int64_t count;
  int length;
  bool centered;
  float eps;
};

// An array in float32 or in T; without data where there is none.
template <class T>
struct Floats {
  void* data;
  bool narrow;
};

// How a row lies in registers: kGroup threads hold it, each kChunks times kVector neighbors.
template <int group, int vector, int chunks>
struct Layout {
  static constexpr int kGroup = group, kVector = vector, kChunks = chunks;
  // Of the kernel that adds columns: the registers hold a row three times and its sums.
  static constexpr int kBlock = group == 32 && vector * chunks <= 24 ? 384 : kThreads;
  static constexpr int kBlocks = vector * chunks <= 8 ? 2 : 1;  // on a multiprocessor
  static constexpr int kSharedRows = group == 32 ? kBlock / 32 : 0;
};

// The part of a row that a thread holds; a length of 0 stands for a row that does not exist.
template <class L>
struct Part {
  int64_t start;
  int length, rank;

  __device__ __forceinline__ int Column(int chunk) const {
    return (chunk * L::kGroup + rank) * L::kVector;
  }
  __device__ __forceinline__ bool Has(int chunk) const { return Column(chunk) < length; }
};

template <class L>
using Values = float[L::kChunks][L::kVector];

// ---- loads and stores ----

template <int kCount>
struct alignas(4 * kCount) Words {
  uint32_t word[kCount];
};

// Elements `at` to `at` + kVector - 1 as they lie in memory; those of 16 bits fill half the words.
template <int kVector, class T>
__device__ __forceinline__ void LoadBits(const Floats<T>& from, bool narrow, int64_t at,
                                         uint32_t (&bits)[kVector]) {
  if (!narrow) {
    const auto words = *(const Words<kVector>*)((const float*)from.data + at);
#pragma unroll
    for (int j = 0; j < kVector; j++) bits[j] = words.word[j];
  } else if constexpr (kVector == 1) {
    bits[0] = ((const uint16_t*)from.data)[at];
  } else {
    const auto words = *(const Words<kVector / 2>*)((const uint16_t*)from.data + at);
#pragma unroll
    for (int j = 0; j < kVector / 2; j++) bits[j] = words.word[j];
  }
}

template <class T, int kVector>
__device__ __forceinline__ float Widened(const uint32_t (&bits)[kVector], int j, bool narrow) {
  if constexpr (kIs16Bit<T>) {
    if (narrow) {
      T value;
      value.bits = (uint16_t)(bits[j / 2] >> (j % 2 * 16));
      return value;
    }
  }
  return FloatOf(bits[j]);
}

// A row on its way to registers. It is widened where it is used, so that the loads of several rows
// are under way at once.
template <class T, class L>
class Incoming {
 public:
  __device__ __forceinline__ Incoming(const Floats<T>& from, const Part<L>& part)
      : narrow_(kIs16Bit<T> && from.narrow) {
    if (!from.data)
      Load(from, {part.start, 0, part.rank}, false);
    else if (narrow_)
      Load(from, part, true);
    else
      Load(from, part, false);
  }
  __device__ __forceinline__ void AddTo(Values<L>& to) const {
    narrow_ ? Add(to, true) : Add(to, false);
  }

 private:
  __device__ __forceinline__ void Load(const Floats<T>& from, const Part<L>& part, bool narrow) {
#pragma unroll
    for (int c = 0; c < L::kChunks; c++) {
#pragma unroll
      for (uint32_t& bits : bits_[c]) bits = 0;
      if (part.Has(c)) LoadBits(from, narrow, part.start + part.Column(c), bits_[c]);
    }
  }
  __device__ __forceinline__ void Add(Values<L>& to, bool narrow) const {
#pragma unroll
    for (int c = 0; c < L::kChunks; c++)
#pragma unroll
      for (int j = 0; j < L::kVector; j++) to[c][j] += Widened<T>(bits_[c], j, narrow);
  }

  bool narrow_;
  uint32_t bits_[L::kChunks][L::kVector];
};

// The values of scale or bias for a chunk.
template <class T, int kVector>
__device__ __forceinline__ void LoadColumns(const Floats<T>& from, int column,
                                            float (&values)[kVector]) {
  uint32_t bits[kVector];
  const bool narrow = kIs16Bit<T> && from.narrow;
  LoadBits(from, narrow, column, bits);
#pragma unroll
  for (int j = 0; j < kVector; j++) values[j] = Widened<T>(bits, j, narrow);
}

template <class T, class L>
__device__ __forceinline__ void Store(const Floats<T>& to, const Part<L>& part,
                                      const Values<L>& values) {
  if (!to.data) return;
#pragma unroll
  for (int c = 0; c < L::kChunks; c++) {
    if (!part.Has(c)) continue;
    const int64_t at = part.start + part.Column(c);
    if constexpr (kIs16Bit<T>) {
      if (to.narrow) {
        struct alignas(L::kVector * sizeof(T)) Narrow {
          T value[L::kVector];
        } narrow;
#pragma unroll
        for (int j = 0; j < L::kVector; j++) narrow.value[j] = T(values[c][j]);
        *(Narrow*)((T*)to.data + at) = narrow;
        continue;
      }
    }
    Words<L::kVector> words;
#pragma unroll
    for (int j = 0; j < L::kVector; j++) words.word[j] = BitsOf(values[c][j]);
    *(Words<L::kVector>*)((float*)to.data + at) = words;
  }
}

// ---- kernels ----

// Makes x̂ of x, and returns 1 / sqrt(variance + eps).
template <class L>
__device__ __forceinline__ float Standardize(const Rows& rows, const Part<L>& part, Values<L>& x) {
  const float length = (float)rows.length;
  float mean = 0.f, squares = 0.f;
  if (rows.centered) {
    float sum = 0.f;
#pragma unroll
    for (int c = 0; c < L::kChunks; c++)
#pragma unroll
      for (float value : x[c]) sum += value;
    mean = GroupReduce<SumMonoid, L::kGroup>(sum) / length;
  }
#pragma unroll
  for (int c = 0; c < L::kChunks; c++)
#pragma unroll
    for (float& value : x[c]) {
      value = part.Has(c) ? value - mean : 0.f;
      squares += value * value;
    }
  const float variance = GroupReduce<SumMonoid, L::kGroup>(squares) / length;
  const float inverse = 1.f / sqrtf(variance + rows.eps);
#pragma unroll
  for (int c = 0; c < L::kChunks; c++)
#pragma unroll
    for (float& value : x[c]) value *= inverse;
  return inverse;
}

template <class T>
struct ForwardArrays {
  Floats<T> x, addend, sum;  // (rows, length)
  Floats<T> scale, bias;     // (length)
  Floats<T> y[2];            // (rows, length), of which the second may be missing
};

template <class T, class L>
__global__ void __launch_bounds__(kThreads) ForwardKernel(Rows rows, ForwardArrays<T> arrays) {
  constexpr int kGroups = kThreads / L::kGroup;
  GridDependencySynchronize();
  for (int64_t first = (int64_t)blockIdx.x * kGroups; first < rows.count;
       first += (int64_t)gridDim.x * kGroups) {
    const int64_t row = first + threadIdx.x / L::kGroup;
    const Part<L> part{row * rows.length, row < rows.count ? rows.length : 0,
                       (int)threadIdx.x % L::kGroup};
    const Incoming<T, L> x(arrays.x, part), addend(arrays.addend, part);
    Values<L> values = {};
    x.AddTo(values);
    if (arrays.addend.data) {
      addend.AddTo(values);
      if constexpr (kIs16Bit<T>) {
        if (arrays.sum.narrow) {  // the row is that which backward reads
#pragma unroll
          for (int c = 0; c < L::kChunks; c++)
#pragma unroll
            for (float& value : values[c]) value = T(value);
        }
      }
      Store(arrays.sum, part, values);
    }
    Standardize(rows, part, values);
#pragma unroll
    for (int c = 0; c < L::kChunks; c++) {
      if (!part.Has(c)) continue;
      float scale[L::kVector], bias[L::kVector];
      LoadColumns(arrays.scale, part.Column(c), scale);
      LoadColumns(arrays.bias, part.Column(c), bias);
#pragma unroll
      for (int j = 0; j < L::kVector; j++) values[c][j] = values[c][j] * scale[j] + bias[j];
    }
    Store(arrays.y[0], part, values);
    Store(arrays.y[1], part, values);
  }
}

template <class T>
struct BackwardArrays {
  Floats<T> x, dy, other;  // (rows, length); other: added to dy where `early`, else to the result
  Floats<T> scale;         // (length)
  Floats<T> dx[2];         // (rows, length), each of which may be missing
  float* partial;          // (blocks, sums, length)
  int sums;                // of dy * x̂, of dy, of dx
  bool early;
};

// Of d = dy * scale makes its gradient through the normalization: (d - mean(d) - x̂ mean(d x̂)) *
// inverse.
template <class T, class L>
__device__ __forceinline__ void MakeGradient(const Rows& rows, const Part<L>& part,
                                             const Floats<T>& scales, const Values<L>& xhat,
                                             float inverse, Values<L>& d) {
  float sum = 0.f, product = 0.f;
#pragma unroll
  for (int c = 0; c < L::kChunks; c++) {
    if (!part.Has(c)) continue;
    float scale[L::kVector];
    LoadColumns(scales, part.Column(c), scale);
#pragma unroll
    for (int j = 0; j < L::kVector; j++) {
      d[c][j] *= scale[j];
      sum += d[c][j];
      product += d[c][j] * xhat[c][j];
    }
  }
  const float length = (float)rows.length;
  sum = GroupReduce<SumMonoid, L::kGroup>(sum);
  const float shift = rows.centered ? sum / length : 0.f;
  const float projection = GroupReduce<SumMonoid, L::kGroup>(product) / length;
#pragma unroll
  for (int c = 0; c < L::kChunks; c++)
#pragma unroll
    for (int j = 0; j < L::kVector; j++)
      d[c][j] = part.Has(c) ? (d[c][j] - (shift + xhat[c][j] * projection)) * inverse : 0.f;
}

// Writes the sums of a block's columns, (length): warps meet in shared memory, in their order.
template <class L>
__device__ __forceinline__ void WritePartial(const Part<L>& part, const Values<L>& sums,
                                             float* to) {
  float* columns = L::kGroup > 32 ? to : DynamicShared<float>();
  if (L::kGroup == 32) __syncthreads();  // the previous call's readers are done
  float* own = columns + (L::kGroup > 32 ? 0 : threadIdx.x / 32 * part.length);
#pragma unroll
  for (int c = 0; c < L::kChunks; c++)
    if (part.Has(c))
#pragma unroll
      for (int j = 0; j < L::kVector; j++) own[part.Column(c) + j] = sums[c][j];
  if (L::kGroup > 32) return;
  __syncthreads();
  for (int k = threadIdx.x; k < part.length; k += L::kBlock) {
    float sum = 0.f;
    for (int warp = 0; warp < L::kSharedRows; warp++) sum += columns[warp * part.length + k];
    to[k] = sum;
  }
}

template <class T, class L>
__global__ void __launch_bounds__(L::kBlock, L::kBlocks)
    BackwardKernel(Rows rows, BackwardArrays<T> arrays) {
  constexpr int kGroups = L::kBlock / L::kGroup;
  const int rank = threadIdx.x % L::kGroup;
  Values<L> of_scale = {}, of_bias = {}, of_x = {};
  GridDependencySynchronize();
  for (int64_t first = (int64_t)blockIdx.x * kGroups; first < rows.count;
       first += (int64_t)gridDim.x * kGroups) {
    const int64_t row = first + threadIdx.x / L::kGroup;
    const Part<L> part{row * rows.length, row < rows.count ? rows.length : 0, rank};
    const Incoming<T, L> x(arrays.x, part), other(arrays.other, part), dy(arrays.dy, part);
    Values<L> xhat = {}, d = {};
    x.AddTo(xhat);
    const float inverse = Standardize(rows, part, xhat);
    dy.AddTo(d);
    if (arrays.early) other.AddTo(d);
#pragma unroll
    for (int c = 0; c < L::kChunks; c++)
#pragma unroll
      for (int j = 0; j < L::kVector; j++) {
        of_scale[c][j] += d[c][j] * xhat[c][j];
        of_bias[c][j] += d[c][j];
      }
    MakeGradient(rows, part, arrays.scale, xhat, inverse, d);
    if (!arrays.early) other.AddTo(d);
#pragma unroll
    for (int c = 0; c < L::kChunks; c++)
#pragma unroll
      for (int j = 0; j < L::kVector; j++) of_x[c][j] += d[c][j];
    Store(arrays.dx[0], part, d);
    Store(arrays.dx[1], part, d);
  }
  if (!arrays.sums) return;
  const Part<L> columns{0, rows.length, rank};
  float* partial = arrays.partial + (int64_t)blockIdx.x * arrays.sums * rows.length;
  WritePartial(columns, of_scale, partial);
  WritePartial(columns, of_bias, partial + rows.length);
  if (arrays.sums == kMostSums) WritePartial(columns, of_x, partial + 2 * rows.length);
}

struct Results {
  float* sums[kMostSums];
};

// Adds the blocks' rows of partial sums, of which each result has `length` columns.
constexpr int kColumns = 32, kStrands = kThreads / kColumns;
__global__ void __launch_bounds__(kThreads)
    SumPartialsKernel(const float* partial, int blocks, int columns, int length, Results results) {
  const int col = threadIdx.x % kColumns, strand = threadIdx.x / kColumns;
  const int column = blockIdx.x * kColumns + col;
  float sum = 0.f;
  GridDependencySynchronize();
  if (column < columns)
    for (int k = strand; k < blocks; k += kStrands) sum += partial[(int64_t)k * columns + column];
  sum = ColumnReduce<SumMonoid, kColumns, kStrands>(sum, strand, col);
  if (strand == 0 && column < columns) results.sums[column / length][column % length] = sum;
}

// ---- launchers ----

template <class T>
Floats<T> FloatsOf(const char* op, const DLArray* a) {
  const bool narrow = kIs16Bit<T> && a->dtype == kDtype<T>;
  return {narrow ? a->data : (void*)In(op, a), narrow};
}

// Arrays of x's shape as `to`, at most `most` of them.
template <class T, class List>
void Collect(const char* op, const DLArray* x, const List* list, int64_t most, Floats<T>* to) {
  if (list->count > most)
    Fail("%s: expected at most %ld arrays in a list, got %ld", op, (long)most, (long)list->count);
  for (int64_t k = 0; k < list->count; k++) {
    CheckArray(op, list->arrays[k], x->ctx);
    CheckSameShape(op, x, list->arrays[k]);
    to[k] = FloatsOf<T>(op, list->arrays[k]);
  }
}

Rows RowsOf(const char* op, const DLArray* x, const DLArray* scale, int64_t centered, float eps) {
  const int64_t n = Numel(x), length = Numel(scale);
  if (length < 1 || length > kLongest || n % length)
    Fail("%s: expected rows of 1 to %ld values, got x %s and scale %s", op, (long)kLongest,
         ShapeText(x).c_str(), ShapeText(scale).c_str());
  return {n / length, (int)length, centered != 0, eps};
}

// Calls run with the layout for rows of `length`.
template <class Run>
void ByLayout(int length, bool aligned, const Run& run) {
  if (!aligned || length % 4) {
    if (length <= 128) return run(Layout<32, 1, 4>());
    return length <= 1024 ? run(Layout<32, 1, 32>()) : run(Layout<kThreads, 1, 32>());
  }
  if (length <= 256) return run(Layout<32, 4, 2>());
  if (length <= 768) return run(Layout<32, 4, 6>());
  if (length <= 1024) return run(Layout<32, 4, 8>());
  if (length <= 2048) return run(Layout<kThreads, 4, 2>());
  return length <= 4096 ? run(Layout<kThreads, 4, 4>()) : run(Layout<kThreads, 4, 8>());
}

template <class... F>
bool AllAligned(const F&... arrays) {
  return (Aligned16(arrays.data) && ...);
}

// terms: x and perhaps an addend. made: their sum where there are two, and one or two arrays for
// the normalized rows.
template <class T>
void FusedRowNormalize(const DLArrayList* terms, const DLArray* scale, const DLArray* bias,
                       DLArrayList* made, int64_t centered, float eps, DLStream stream) {
  const char* op = "fused_row_normalize";
  const bool adds = terms->count == 2;
  if (terms->count < 1 || terms->count > 2 || made->count < adds + 1)
    Fail("%s: %ld inputs do not fit %ld results", op, (long)terms->count, (long)made->count);
  const DLArray* x = terms->arrays[0];
  Enter(op, x, scale, bias);
  CheckSameShape(op, scale, bias);
  const Rows rows = RowsOf(op, x, scale, centered, eps);
  Floats<T> inputs[2] = {}, results[3] = {};
  Collect(op, x, terms, 2, inputs);
  Collect(op, x, made, adds + 2, results + !adds);
  const ForwardArrays<T> arrays{inputs[0],
                                inputs[1],
                                results[0],
                                FloatsOf<T>(op, scale),
                                FloatsOf<T>(op, bias),
                                {results[1], results[2]}};
  const bool aligned = AllAligned(inputs[0], inputs[1], results[0], results[1], results[2],
                                  arrays.scale, arrays.bias);
  const bool has_pdl = ComputeMajor(x->ctx.device_id) >= 9;
  ByLayout(rows.length, aligned, [&](auto layout) {
    using L = decltype(layout);
    LaunchClusters(op, ForwardKernel<T, L>, Blocks(rows.count, kThreads / L::kGroup), 1, kThreads,
                   0, has_pdl, stream, rows, arrays);
  });
}

// other: perhaps an array that is added, to dy where `early`, else to the gradient. gradients: of
// x, in none to two dtypes. sums: none, or those of dy * x̂, of dy, and perhaps of the gradient.
template <class T>
void FusedRowNormalizeGradient(const DLArray* x, const DLArray* scale, const DLArray* dy,
                               const DLArrayList* other, DLArrayList* gradients, DLArrayList* sums,
                               int64_t centered, int64_t early, float eps, DLStream stream) {
  const char* op = "fused_row_normalize_gradient";
  Enter(op, x, scale, dy);
  CheckSameShape(op, x, dy);
  const Rows rows = RowsOf(op, x, scale, centered, eps);
  BackwardArrays<T> arrays = {};
  arrays.x = FloatsOf<T>(op, x);
  arrays.dy = FloatsOf<T>(op, dy);
  Collect(op, x, other, 1, &arrays.other);
  Collect(op, x, gradients, 2, arrays.dx);
  arrays.scale = FloatsOf<T>(op, scale);
  arrays.early = early != 0;
  arrays.sums = (int)sums->count;
  if (sums->count == 1 || sums->count > kMostSums)
    Fail("%s: expected none, 2 or 3 sums, got %ld", op, (long)sums->count);
  Results results = {};
  for (int k = 0; k < arrays.sums; k++) {
    CheckArray(op, sums->arrays[k], x->ctx);
    results.sums[k] = ChannelResult(op, sums->arrays[k], rows.length);
  }
  const bool aligned =
      AllAligned(arrays.x, arrays.dy, arrays.other, arrays.scale, arrays.dx[0], arrays.dx[1]);
  const bool has_pdl = ComputeMajor(x->ctx.device_id) >= 9;
  ByLayout(rows.length, aligned, [&](auto layout) {
    using L = decltype(layout);
    const int64_t most = (int64_t)L::kBlocks * Multiprocessors(x->ctx.device_id);
    const unsigned needed = Blocks(rows.count, L::kBlock / L::kGroup);
    const unsigned blocks = (unsigned)std::clamp<int64_t>(needed, arrays.sums ? 1 : 0, most);
    const int columns = arrays.sums * rows.length;
    const Scratch partial(x->ctx, (int64_t)blocks * columns * (int64_t)sizeof(float), stream);
    arrays.partial = partial.floats();
    LaunchClusters(op, BackwardKernel<T, L>, blocks, 1, L::kBlock,
                   L::kSharedRows * rows.length * sizeof(float), has_pdl, stream, rows, arrays);
    LaunchClusters(op, SumPartialsKernel, Blocks(columns, kColumns), 1, kThreads, 0, has_pdl,
                   stream, arrays.partial, (int)blocks, columns, rows.length, results);
  });
}

bool ForwardFits(const DLArrayList*, const DLArray* scale, const DLArray*, DLArrayList*, int64_t,
                 float) {
  return Numel(scale) >= 1 && Numel(scale) <= kLongest;
}
bool BackwardFits(const DLArray*, const DLArray* scale, const DLArray*, const DLArrayList*,
                  DLArrayList*, DLArrayList*, int64_t, int64_t, float) {
  return Numel(scale) >= 1 && Numel(scale) <= kLongest;
}

DLSYS_KERNEL_TYPED(cuda, fused_row_normalize, FusedRowNormalize);
DLSYS_KERNEL_TYPED(cuda, fused_row_normalize_gradient, FusedRowNormalizeGradient);
DLSYS_FITS(cuda, fused_row_normalize, ForwardFits);
DLSYS_FITS(cuda, fused_row_normalize_gradient, BackwardFits);

}  // namespace
}  // namespace cuda
}  // namespace dlsys
