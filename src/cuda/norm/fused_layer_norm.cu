// Layer and RMS normalization with what surrounds it in a residual stream, over rows in registers.
// Forward: x plus an addend, their sum's normalization, and a copy of it in 16 bits for products.
// Backward: the gradient of x through the normalization plus that of the stream, and column sums:
// the gradients of scale and bias, and that of a bias in front of the addition.
//
// A warp holds rows of up to 1024 values, a block those of up to 8192; every array is read once,
// four neighbors at a time where alignment allows, so that lanes side by side fill sectors. On
// sm_90 a warp's next rows come to shared memory meanwhile. The variance is two-pass, the
// statistics are recomputed backward, and all sums are float32. Blocks add columns in registers
// over their rows and write a row of partial sums each, which a second kernel adds in a fixed
// order. Each array lies in float32 or in T. Outputs overlap no input. Memory bandwidth limits it.
#include "cuda/instructions/hopper.cuh"
#include "cuda/instructions/ring.cuh"
#include "cuda/norm/norm.cuh"
#include "cuda/reduce/group.cuh"

namespace dlsys {
namespace cuda {
namespace {

constexpr int64_t kLongest = 8192;  // values of a row
constexpr int kMostSums = 3;
constexpr int kMostThreads = 384;  // of a block

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
  static constexpr int kColumns = group * vector * chunks;
  // Of the kernel that adds columns: the registers hold a row three times and its sums.
  static constexpr int kBlock = group == 32 && vector * chunks <= 24 ? kMostThreads : kThreads;
  static constexpr int kBlocks = vector * chunks <= 8 ? 2 : 1;  // on a multiprocessor
  static constexpr int kSharedRows = group == 32 ? kBlock / 32 : 0;
};

// Rows of a warp may come to shared memory ahead of it, so many of them.
constexpr int kRowsAhead = 2;
template <class L>
constexpr bool kMayComeAhead = L::kGroup == 32 && L::kVector == 4;

struct SumOfTwo {
  static __device__ float2 Combine(float2 a, float2 b) { return make_float2(a.x + b.x, a.y + b.y); }
};

// The part of a row that a thread holds.
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

// A row on its way to registers, zeros where there is none. It is widened where it is used, so that
// the loads of several rows are under way at once.
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

// Scale or bias in shared memory, with zeros behind them: each row would wait for them elsewhere.
template <class T, class L>
__device__ __forceinline__ void StageColumns(const Floats<T>& from, int length, float* to) {
  for (int k = threadIdx.x; k < L::kColumns; k += blockDim.x) {
    uint32_t bits[1] = {};
    const bool narrow = kIs16Bit<T> && from.narrow;
    if (k < length) LoadBits(from, narrow, k, bits);
    to[k] = Widened<T>(bits, 0, narrow);
  }
}
template <int kVector>
__device__ __forceinline__ void LoadColumns(const float* from, float (&values)[kVector]) {
  const auto words = *(const Words<kVector>*)from;
#pragma unroll
  for (int j = 0; j < kVector; j++) values[j] = FloatOf(words.word[j]);
}

// Calls f with each value of a row and its place. One branch for all of them lets their loads be
// under way together.
template <class T, class L, class F>
__device__ __forceinline__ void ForRow(const Floats<T>& from, const Part<L>& part, F&& f) {
  const auto map = [&](bool narrow) {
#pragma unroll
    for (int c = 0; c < L::kChunks; c++) {
      uint32_t bits[L::kVector] = {};
      if (part.Has(c)) LoadBits(from, narrow, part.start + part.Column(c), bits);
#pragma unroll
      for (int j = 0; j < L::kVector; j++) f(c, j, Widened<T>(bits, j, narrow));
    }
  };
  const bool narrow = kIs16Bit<T> && from.narrow;
  narrow ? map(true) : map(false);
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

// ---- rows on their way ----

// The rows of a thread group: every `step`-th of [first, end). Those of a block's groups lie side
// by side, so that a multiprocessor reads few pages at a time.
struct RowsOfGroup {
  int64_t first, step, end;
};
template <class L>
__device__ __forceinline__ RowsOfGroup OwnRows(const Rows& rows) {
  const int64_t groups = blockDim.x / L::kGroup;
  return {blockIdx.x * groups + threadIdx.x / L::kGroup, gridDim.x * groups, rows.count};
}

// A row in shared memory, which is read as it is added; zeros where there is none.
template <class T, class L>
class Staged {
 public:
  __device__ __forceinline__ Staged(const Floats<T>& row, const Part<L>& part)
      : row_(row), part_{0, row.data ? part.length : 0, part.rank} {}
  __device__ __forceinline__ void AddTo(Values<L>& to) const {
    ForRow(row_, part_, [&](int c, int j, float value) { to[c][j] += value; });
  }

 private:
  const Floats<T> row_;
  const Part<L> part_;
};

// A warp's ring of rows of kArrays arrays in shared memory, where bulk copies bring the next kAhead
// rows while it computes: what is under way neither takes registers nor waits for them.
template <class T, class L, int kArrays, int kAhead>
class RowRing {
 public:
  static constexpr int kBarriers = kAhead * kMostThreads / 32;
  static_assert(L::kGroup == 32, "a warp holds a row");

  __device__ __forceinline__ RowRing(const Floats<T> (&arrays)[kArrays], int length,
                                     const RowsOfGroup& own, float* memory, uint64_t* barriers)
      : arrays_(arrays), length_(length), own_(own) {
    const int warp = threadIdx.x / 32;
    barriers_ = hopper::SharedAddress(barriers + warp * kAhead);
    row_nbytes_ = 0;
#pragma unroll
    for (int k = 0; k < kArrays; k++) {
      starts_[k] = row_nbytes_;
      row_nbytes_ += NbytesOf(k);
    }
    memory_ = (unsigned char*)memory + warp * kAhead * row_nbytes_;
    if (threadIdx.x % 32 == 0) {
#pragma unroll
      for (int stage = 0; stage < kAhead; stage++) hopper::InitBarrier(barriers_ + stage * 8, 1);
      hopper::PublishBarriers();
    }
    __syncwarp();
    GridDependencySynchronize();
#pragma unroll
    for (int stage = 0; stage < kAhead; stage++) Load(stage, own.first + stage * own.step);
  }

  __device__ __forceinline__ void Wait() const {
    hopper::WaitForPhase(barriers_ + at_.stage * 8, at_.parity);
  }
  __device__ __forceinline__ Staged<T, L> Read(int k, const Part<L>& part) const {
    unsigned char* const row = memory_ + at_.stage * row_nbytes_ + starts_[k];
    return {{arrays_[k].data ? row : nullptr, arrays_[k].narrow}, part};
  }
  // Goes on from `row`, of which all has been read.
  __device__ __forceinline__ void Release(int64_t row) {
    __syncwarp();
    Load(at_.stage, row + kAhead * own_.step);
    at_.Advance();
  }

 private:
  __device__ __forceinline__ int NbytesOf(int k) const {
    return arrays_[k].data ? length_ * (kIs16Bit<T> && arrays_[k].narrow ? 2 : 4) : 0;
  }
  __device__ __forceinline__ void Load(int stage, int64_t row) const {
    if (row >= own_.end || threadIdx.x % 32) return;
    const uint32_t barrier = barriers_ + stage * 8;
    const uint32_t to = hopper::SharedAddress(memory_ + stage * row_nbytes_);
    hopper::ArriveExpecting(barrier, row_nbytes_);
#pragma unroll
    for (int k = 0; k < kArrays; k++)
      if (arrays_[k].data)
        hopper::LoadBytes(to + starts_[k],
                          (const unsigned char*)arrays_[k].data + row * NbytesOf(k), NbytesOf(k),
                          barrier);
  }

  const Floats<T> (&arrays_)[kArrays];
  const int length_;
  const RowsOfGroup& own_;
  int starts_[kArrays], row_nbytes_;
  unsigned char* memory_;
  uint32_t barriers_;
  RingPosition<kAhead> at_;
};

// The same without stages: rows are read where they lie.
template <class T, class L, int kArrays>
class RowRing<T, L, kArrays, 0> {
 public:
  static constexpr int kBarriers = 1;

  __device__ __forceinline__ RowRing(const Floats<T> (&arrays)[kArrays], int, const RowsOfGroup&,
                                     float*, uint64_t*)
      : arrays_(arrays) {
    GridDependencySynchronize();
  }
  __device__ __forceinline__ void Wait() const {}
  __device__ __forceinline__ Incoming<T, L> Read(int k, const Part<L>& part) const {
    return {arrays_[k], part};
  }
  __device__ __forceinline__ void Release(int64_t) const {}

 private:
  const Floats<T> (&arrays_)[kArrays];
};

// ---- kernels ----

// Makes x̂ of x, and returns 1 / sqrt(variance + eps).
template <class L>
__device__ __forceinline__ float Standardize(const Rows& rows, const Part<L>& part, Values<L>& x) {
  const float share = 1.f / (float)rows.length;
  float mean = 0.f, squares = 0.f;
  if (rows.centered) {
    float sum = 0.f;
#pragma unroll
    for (int c = 0; c < L::kChunks; c++)
#pragma unroll
      for (float value : x[c]) sum += value;
    mean = GroupReduce<SumMonoid, L::kGroup>(sum) * share;
  }
#pragma unroll
  for (int c = 0; c < L::kChunks; c++)
#pragma unroll
    for (float& value : x[c]) {
      value = part.Has(c) ? value - mean : 0.f;
      squares += value * value;
    }
  const float inverse = rsqrtf(GroupReduce<SumMonoid, L::kGroup>(squares) * share + rows.eps);
#pragma unroll
  for (int c = 0; c < L::kChunks; c++)
#pragma unroll
    for (float& value : x[c]) value *= inverse;
  return inverse;
}

template <class T>
struct ForwardArrays {
  Floats<T> terms[2], sum;  // (rows, length); the second term may be missing
  Floats<T> scale, bias;    // (length)
  Floats<T> y[2];           // (rows, length), of which the second may be missing
};

template <class T, class L>
__global__ void __launch_bounds__(kThreads) ForwardKernel(Rows rows, ForwardArrays<T> arrays) {
  const RowsOfGroup own = OwnRows<L>(rows);
  GridDependencySynchronize();
  for (int64_t row = own.first; row < own.end; row += own.step) {
    const Part<L> part{row * rows.length, rows.length, (int)threadIdx.x % L::kGroup};
    const Incoming<T, L> x(arrays.terms[0], part), addend(arrays.terms[1], part);
    Values<L> values = {};
    x.AddTo(values);
    if (arrays.terms[1].data) {
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
    const Part<L> columns{0, rows.length, part.rank};
    ForRow(arrays.scale, columns, [&](int c, int j, float scale) { values[c][j] *= scale; });
    ForRow(arrays.bias, columns, [&](int c, int j, float bias) { values[c][j] += bias; });
    Store(arrays.y[0], part, values);
    Store(arrays.y[1], part, values);
  }
}

template <class T>
struct BackwardArrays {
  // x, dy, and perhaps what is added to dy where `early`, else to the result, (rows, length).
  Floats<T> read[3];
  Floats<T> scale;  // (length)
  Floats<T> dx[2];  // (rows, length), each of which may be missing
  float* partial;   // (blocks, sums, length)
  int sums;         // of dy * x̂, of dy, of dx
  bool early;
};

// Of d = dy * scale makes its gradient through the normalization: (d - mean(d) - x̂ mean(d x̂)) *
// inverse.
template <class L>
__device__ __forceinline__ void MakeGradient(const Rows& rows, const Part<L>& part,
                                             const float* scales, const Values<L>& xhat,
                                             float inverse, Values<L>& d) {
  float sum = 0.f, product = 0.f;
#pragma unroll
  for (int c = 0; c < L::kChunks; c++) {
    float scale[L::kVector];
    LoadColumns(scales + part.Column(c), scale);
#pragma unroll
    for (int j = 0; j < L::kVector; j++) {
      d[c][j] *= scale[j];
      sum += d[c][j];
      product += d[c][j] * xhat[c][j];
    }
  }
  const float share = 1.f / (float)rows.length;
  const float2 sums = GroupReduce<SumOfTwo, L::kGroup>(make_float2(sum, product));
  const float shift = rows.centered ? sums.x * share : 0.f, projection = sums.y * share;
#pragma unroll
  for (int c = 0; c < L::kChunks; c++)
#pragma unroll
    for (int j = 0; j < L::kVector; j++)
      d[c][j] = (d[c][j] - (shift + xhat[c][j] * projection)) * inverse;
}

// Writes the sums of a block's columns, (length): warps meet in shared memory, in their order.
template <class L>
__device__ __forceinline__ void WritePartial(const Part<L>& columns, const Values<L>& sums,
                                             float* to) {
  float* const memory = L::kGroup > 32 ? to : DynamicShared<float>();
  if (L::kGroup == 32) __syncthreads();  // all have read what is there
  float* const own = memory + (L::kGroup > 32 ? 0 : threadIdx.x / 32 * columns.length);
#pragma unroll
  for (int c = 0; c < L::kChunks; c++) {
    if (!columns.Has(c)) continue;
    Words<L::kVector> words;
#pragma unroll
    for (int j = 0; j < L::kVector; j++) words.word[j] = BitsOf(sums[c][j]);
    *(Words<L::kVector>*)(own + columns.Column(c)) = words;
  }
  if (L::kGroup > 32) return;
  __syncthreads();
  for (int k = threadIdx.x; k < columns.length; k += L::kBlock) {
    float sum = 0.f;
#pragma unroll
    for (int warp = 0; warp < L::kSharedRows; warp++) sum += memory[warp * columns.length + k];
    to[k] = sum;
  }
}

template <class T, class L, int kAhead>
__device__ __forceinline__ void Backward(const Rows& rows, const BackwardArrays<T>& arrays) {
  using Ring = RowRing<T, L, 3, kAhead>;
  __shared__ __align__(8) uint64_t barriers[Ring::kBarriers];
  const int rank = threadIdx.x % L::kGroup;
  float* const scales = DynamicShared<float>();
  Values<L> of_scale = {}, of_bias = {}, of_x = {};
  const RowsOfGroup own = OwnRows<L>(rows);
  Ring ring(arrays.read, rows.length, own, scales + L::kColumns, barriers);
  StageColumns<T, L>(arrays.scale, rows.length, scales);
  __syncthreads();
  for (int64_t row = own.first; row < own.end; row += own.step) {
    const Part<L> part{row * rows.length, rows.length, rank};
    ring.Wait();
    const auto x = ring.Read(0, part), dy = ring.Read(1, part), other = ring.Read(2, part);
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
    MakeGradient(rows, part, scales, xhat, inverse, d);
    if (!arrays.early) other.AddTo(d);
    ring.Release(row);
#pragma unroll
    for (int c = 0; c < L::kChunks; c++)
#pragma unroll
      for (int j = 0; j < L::kVector; j++) of_x[c][j] += d[c][j];
    Store(arrays.dx[0], part, d);
    Store(arrays.dx[1], part, d);
  }
  if (!arrays.sums) return;
  TriggerProgrammaticLaunch();  // what adds the blocks' sums is set up meanwhile
  const Part<L> columns{0, rows.length, rank};
  float* const partial = arrays.partial + (int64_t)blockIdx.x * arrays.sums * rows.length;
  WritePartial(columns, of_scale, partial);
  WritePartial(columns, of_bias, partial + rows.length);
  if (arrays.sums == kMostSums) WritePartial(columns, of_x, partial + 2 * rows.length);
}

template <class T, class L, int kAhead>
__global__ void __launch_bounds__(L::kBlock, L::kBlocks)
    BackwardKernel(Rows rows, BackwardArrays<T> arrays) {
  if constexpr (kAhead == 0 || kHasBulkCopies) Backward<T, L, kAhead>(rows, arrays);
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
  TriggerProgrammaticLaunch();
  if (column < columns) {
#pragma unroll 8
    for (int k = strand; k < blocks; k += kStrands) sum += partial[(int64_t)k * columns + column];
  }
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

// The bytes of a block's rings of rows; 0 where rows cannot come by bulk copies, or are so few that
// hardly any would be ahead.
template <class L, class T, size_t kArrays>
int64_t RingNbytes(DLContext ctx, const Floats<T> (&arrays)[kArrays], const Rows& rows) {
  constexpr int64_t kShared = 227 << 10, kOfBlock = 1 << 10;  // of sm_90, and what each block takes
  constexpr int64_t kWarps = L::kBlock / 32, kScale = L::kColumns * (int64_t)sizeof(float);
  const int64_t warps = kWarps * L::kBlocks * Multiprocessors(ctx.device_id);
  if (ComputeMajor(ctx.device_id) < 9 || rows.count < 2 * warps) return 0;
  int64_t nbytes = 0;
  for (const Floats<T>& array : arrays) {
    const int64_t of_row = array.data ? rows.length * (array.narrow ? 2 : 4) : 0;
    if (of_row % 16) return 0;
    nbytes += kWarps * kRowsAhead * of_row;
  }
  return L::kBlocks * (nbytes + kScale + kOfBlock) <= kShared ? nbytes : 0;
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
  const ForwardArrays<T> arrays{{inputs[0], inputs[1]},
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
  arrays.read[0] = FloatsOf<T>(op, x);
  arrays.read[1] = FloatsOf<T>(op, dy);
  Collect(op, x, other, 1, arrays.read + 2);
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
  const bool aligned = AllAligned(arrays.read[0], arrays.read[1], arrays.read[2], arrays.scale,
                                  arrays.dx[0], arrays.dx[1]);
  const bool has_pdl = ComputeMajor(x->ctx.device_id) >= 9;
  ByLayout(rows.length, aligned, [&](auto layout) {
    using L = decltype(layout);
    const int64_t most = (int64_t)L::kBlocks * Multiprocessors(x->ctx.device_id);
    const unsigned needed = Blocks(rows.count, L::kBlock / L::kGroup);
    const unsigned blocks = (unsigned)std::clamp<int64_t>(needed, arrays.sums ? 1 : 0, most);
    const int columns = arrays.sums * rows.length;
    const Scratch partial(x->ctx, (int64_t)blocks * columns * (int64_t)sizeof(float), stream);
    arrays.partial = partial.floats();
    const auto launch = [&](auto ahead, int64_t nbytes) {
      const int64_t of_rows = nbytes + L::kColumns * (int64_t)sizeof(float);
      const int64_t of_sums = L::kSharedRows * rows.length * (int64_t)sizeof(float);
      LaunchClusters(op, BackwardKernel<T, L, decltype(ahead)::value>, blocks, 1, L::kBlock,
                     std::max(of_rows, of_sums), has_pdl, stream, rows, arrays);
    };
    int64_t nbytes = 0;
    if constexpr (kMayComeAhead<L>) {
      nbytes = RingNbytes<L>(x->ctx, arrays.read, rows);
      if (nbytes) launch(std::integral_constant<int, kRowsAhead>(), nbytes);
    }
    if (!nbytes) launch(std::integral_constant<int, 0>(), 0);
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
