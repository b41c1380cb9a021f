// Sparse cross-entropy of rows of thousands of classes, such as a vocabulary, its gradient, or
// both: each row is read from memory once and its gradient is written once.
//
// A block takes a row as vectors of 16 bytes, each of which one thread has for all three passes:
// the maximum, the sum of exp(x - max), the gradient. Vectors wait in shared memory, those that do
// not fit are read again; all of the next row's are on their way meanwhile, to a place of their
// own. Vectors that a row shares with its neighbors are read and written by elements; where there
// are none, and all fit, the passes have no branches. Statistics are float32. The gradient may
// overwrite the logits. Memory bandwidth limits it, of 16 bits nearly as much the two exponentials
// an element.
#pragma once
#include <cstring>

#include "cuda/loss/cross_entropy.cuh"

namespace dlsys {
namespace cuda {

constexpr int kLongRowThreads = 1024;  // of a multiprocessor, in one block, or in two
constexpr int64_t kWideRow = 2048;     // vectors from which on a row has all of them
constexpr int64_t kLongRowClasses = 4096;

// exp(x) for x <= 0, of 16-bit floats to about 2^-22.
template <class T>
__device__ __forceinline__ float ExpOf(float x) {
  constexpr float kLog2E = 1.44269504f;
  return kIs16Bit<T> ? ExpTwo(x * kLog2E) : expf(x);
}

template <class T>
struct alignas(16) Vector {
  static constexpr int kCount = 16 / (int)sizeof(T);
  T x[kCount];

  // In one access: where another branch fills it by elements, the compiler copies all by elements.
  static __device__ __forceinline__ Vector From(const void* p) {
    const float4 bits = *(const float4*)p;
    Vector v;
    memcpy(&v, &bits, sizeof v);
    return v;
  }
  __device__ __forceinline__ void To(void* p) const {
    float4 bits;
    memcpy(&bits, this, sizeof bits);
    *(float4*)p = bits;
  }
  // The same to global memory, which the compiler may not take apart.
  __device__ __forceinline__ void ToMemory(void* p) const {
    float4 bits;
    memcpy(&bits, this, sizeof bits);
    StoreQuadTo((float*)p, bits.x, bits.y, bits.z, bits.w);
  }

  // Two elements side by side of 16 bits: as floats, from floats, and the larger of each of two.
  static __device__ __forceinline__ float2 Pair(uint32_t pair) {
    T low, high;
    low.bits = (uint16_t)pair, high.bits = (uint16_t)(pair >> 16);
    if constexpr (std::is_same_v<T, bfloat16>)  // the same in an instruction each
      return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
    else
      return make_float2((float)low, (float)high);
  }
  static __device__ __forceinline__ uint32_t OfPair(float low, float high) {
#if __CUDA_ARCH__ >= 800
    uint32_t pair;
    if constexpr (std::is_same_v<T, bfloat16>)
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    else
      asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
#else
    return (uint32_t)T(high).bits << 16 | T(low).bits;
#endif
  }
  static __device__ __forceinline__ uint32_t LargerPair(uint32_t a, uint32_t b) {
#if __CUDA_ARCH__ >= 800
    uint32_t pair;
    if constexpr (std::is_same_v<T, bfloat16>)
      asm("max.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
    else
      asm("max.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
    return pair;
#else
    const float2 x = Pair(a), y = Pair(b);
    return OfPair(fmaxf(x.x, y.x), fmaxf(x.y, y.y));
#endif
  }
  __device__ __forceinline__ void Widen(float (&to)[kCount]) const {
    if constexpr (kIs16Bit<T>) {
      uint32_t pairs[kCount / 2];
      memcpy(pairs, this, sizeof pairs);
#pragma unroll
      for (int k = 0; k < kCount; k += 2) {
        const float2 pair = Pair(pairs[k / 2]);
        to[k] = pair.x, to[k + 1] = pair.y;
      }
    } else {
#pragma unroll
      for (int k = 0; k < kCount; k++) to[k] = x[k];
    }
  }
  static __device__ __forceinline__ Vector Narrowed(const float (&from)[kCount]) {
    Vector v;
    if constexpr (kIs16Bit<T>) {
      uint32_t pairs[kCount / 2];
#pragma unroll
      for (int k = 0; k < kCount; k += 2) pairs[k / 2] = OfPair(from[k], from[k + 1]);
      memcpy(&v, pairs, sizeof v);
    } else {
#pragma unroll
      for (int k = 0; k < kCount; k++) v.x[k] = from[k];
    }
    return v;
  }
  __device__ __forceinline__ Vector Larger(const Vector& other) const {
    Vector v;
    if constexpr (kIs16Bit<T>) {
      uint32_t a[kCount / 2], b[kCount / 2];
      memcpy(a, this, sizeof a);
      memcpy(b, &other, sizeof b);
#pragma unroll
      for (int k = 0; k < kCount / 2; k++) a[k] = LargerPair(a[k], b[k]);
      memcpy(&v, a, sizeof v);
    } else {
#pragma unroll
      for (int k = 0; k < kCount; k++) v.x[k] = fmaxf(x[k], other.x[k]);
    }
    return v;
  }
};

// Row `index` of x (rows, classes) as vectors, the first of which may begin before it and the last
// end behind it; no vectors behind the last row.
template <class T>
class LongRow {
 public:
  static constexpr int kCount = Vector<T>::kCount;

  __device__ __forceinline__ LongRow(T* x, int64_t index, int64_t rows, int64_t classes) {
    T* const row = x + index * classes;
    begin_ = (int)((uintptr_t)row % 16 / sizeof(T)), end_ = begin_ + (int)classes;
    vectors_ = row - begin_;
    count_ = index < rows ? (end_ + kCount - 1) / kCount : 0;
  }
  __device__ __forceinline__ int count() const { return count_; }

  // The vector and the element in it of class c.
  __device__ __forceinline__ int VectorOf(int64_t c) const { return (begin_ + (int)c) / kCount; }
  __device__ __forceinline__ int ElementOf(int64_t c) const { return (begin_ + (int)c) % kCount; }

  // Vector j from memory; what is not of the row is -infinity, which adds nothing to the sum.
  __device__ __forceinline__ Vector<T> Read(int j) const {
    if (IsFull(j)) return Vector<T>::From(At(j));
    Vector<T> v;
#pragma unroll
    for (int e = 0; e < kCount; e++) v.x[e] = Has(j, e) ? At(j)[e] : T(-INFINITY);
    return v;
  }
  // The same to shared memory, perhaps later.
  template <bool kFull>
  __device__ __forceinline__ void BeginRead(int j, Vector<T>* to) const {
    if (kFull || IsFull(j))
      CopyAsync16((float*)to, (const float*)At(j), true);
    else
      Read(j).To(to);
  }
  template <bool kFull>
  __device__ __forceinline__ void Write(int j, const Vector<T>& v) const {
    if constexpr (!kFull) {
      if (!IsFull(j)) {
#pragma unroll
        for (int e = 0; e < kCount; e++)
          if (Has(j, e)) At(j)[e] = v.x[e];
        return;
      }
    }
    v.ToMemory(At(j));
  }

 private:
  __device__ __forceinline__ T* At(int j) const { return vectors_ + (int64_t)j * kCount; }
  __device__ __forceinline__ bool Has(int j, int e) const {
    const int at = j * kCount + e;
    return at >= begin_ && at < end_;
  }
  __device__ __forceinline__ bool IsFull(int j) const {
    return j * kCount >= begin_ && (j + 1) * kCount <= end_;
  }
  T* vectors_;
  int begin_, end_, count_;  // in elements from vectors_[0]; of vectors
};

// What is made of rows: a type with `kGradient`, whether gradients are written, `Dy(row)`, that of
// the row's loss, and `Take(row, loss)`, which thread 0 calls.
struct SummedLosses {
  static constexpr bool kGradient = true;
  float dy, sum;
  __device__ __forceinline__ float Dy(int64_t) const { return dy; }
  __device__ __forceinline__ void Take(int64_t, float loss) { sum += loss; }
};
struct RowLosses {
  static constexpr bool kGradient = false;
  Output losses;
  __device__ __forceinline__ float Dy(int64_t) const { return 0.f; }
  __device__ __forceinline__ void Take(int64_t row, float loss) const { losses.Store(row, loss); }
};
struct RowGradients {
  static constexpr bool kGradient = true;
  RowFloats dy;
  __device__ __forceinline__ float Dy(int64_t row) const { return dy.At(row); }
  __device__ __forceinline__ void Take(int64_t, float) const {}
};

// Vector j, before its row's gradient is written: of the slots, or of memory. Under kPlain all
// vectors are full and in the slots, here and below.
template <bool kPlain, class T>
__device__ __forceinline__ Vector<T> LoadVector(const LongRow<T>& row, const Vector<T>* slots,
                                                int resident, int j) {
  return kPlain || j < resident ? Vector<T>::From(slots + j) : row.Read(j);
}

// Over all threads of the block: the maximum of a row, and the sum of exp(x - max).
template <int kThreads, bool kPlain, class T>
__device__ __forceinline__ float LargestOf(const LongRow<T>& row, const Vector<T>* slots,
                                           int resident) {
  constexpr int kCount = Vector<T>::kCount;
  Vector<T> most;
#pragma unroll
  for (int e = 0; e < kCount; e++) most.x[e] = T(-INFINITY);
#pragma unroll 4
  for (int j = threadIdx.x; j < row.count(); j += kThreads)
    most = most.Larger(LoadVector<kPlain>(row, slots, resident, j));
  float x[kCount];
  most.Widen(x);
  float largest = x[0];
#pragma unroll
  for (int e = 1; e < kCount; e++) largest = fmaxf(largest, x[e]);
  return GroupReduce<MaxMonoid, kThreads>(largest);
}
template <int kThreads, bool kPlain, class T>
__device__ __forceinline__ float SumOfExp(const LongRow<T>& row, const Vector<T>* slots,
                                          int resident, float largest) {
  constexpr int kCount = Vector<T>::kCount;
  float sums[4] = {};
#pragma unroll 2
  for (int j = threadIdx.x; j < row.count(); j += kThreads) {
    float x[kCount];
    LoadVector<kPlain>(row, slots, resident, j).Widen(x);
#pragma unroll
    for (int e = 0; e < kCount; e++) sums[e % 4] += ExpOf<T>(x[e] - largest);
  }
  return GroupReduce<SumMonoid, kThreads>((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// Goes along every gridDim.x-th row of x (rows, classes); dx lies as x does within 16 bytes.
// `resident` vectors of each of two rows fit shared memory.
template <int kThreads, bool kPlain, class T, class Use>
__device__ __forceinline__ void GoAlongRows(int64_t rows, int64_t classes, const T* x,
                                            const Labels& labels, T* dx, int resident, Use& use) {
  constexpr int kCount = Vector<T>::kCount;
  Vector<T>* slots = DynamicShared<Vector<T>>();
  Vector<T>* others = slots + resident;
  const auto row_of = [&](int64_t r) { return LongRow<T>((T*)x, r, rows, classes); };
  const auto label_of = [&](int64_t r) { return r < rows ? (int64_t)labels.At(r) : -1; };
  const auto begin_reads = [&](const LongRow<T>& of, Vector<T>* to) {
#pragma unroll 4
    for (int j = threadIdx.x; j < (kPlain ? of.count() : min(of.count(), resident)); j += kThreads)
      of.template BeginRead<kPlain>(j, to + j);
    CloseCopies();
  };
  LongRow<T> row = row_of(blockIdx.x);
  begin_reads(row, slots);
  int64_t label = label_of(blockIdx.x);
  for (int64_t r = blockIdx.x; r < rows; r += gridDim.x) {
    const LongRow<T> next = row_of(r + gridDim.x);
    begin_reads(next, others);
    const int64_t next_label = label_of(r + gridDim.x);
    const bool valid = label >= 0 && label < classes;
    const int label_vector = valid ? row.VectorOf(label) : -1, label_at = row.ElementOf(label);
    // Read before the barriers behind which the gradient may overwrite it.
    float logit = NAN;
    if (valid && threadIdx.x == 0) logit = x[r * classes + label];
    WaitForCopies<1>();
    const float largest = LargestOf<kThreads, kPlain>(row, slots, resident);
    const float sum = SumOfExp<kThreads, kPlain>(row, slots, resident, largest);
    if (threadIdx.x == 0) {
      use.Take(r, logf(sum) - (logit - largest));
      if (!valid) labels.faults.OutOfRange(label, r, classes);
    }
    const float share = 1.f / sum, dy = valid ? use.Dy(r) : NAN, factor = share * dy;
    const LongRow<T> to(dx, r, rows, classes);
#pragma unroll 2
    for (int j = threadIdx.x; Use::kGradient && j < row.count(); j += kThreads) {
      float x[kCount], d[kCount];
      LoadVector<kPlain>(row, slots, resident, j).Widen(x);
#pragma unroll
      for (int e = 0; e < kCount; e++) d[e] = ExpOf<T>(x[e] - largest) * factor;
      if (j == label_vector) {
#pragma unroll
        for (int e = 0; e < kCount; e++)
          if (e == label_at) d[e] = (ExpOf<T>(x[e] - largest) * share - 1.f) * dy;
      }
      to.template Write<kPlain>(j, Vector<T>::Narrowed(d));
    }
    row = next, label = next_label;
    Vector<T>* const done = slots;
    slots = others, others = done;
  }
}

// The same with the branches that these rows need.
template <int kThreads, class T, class Use>
__device__ __forceinline__ void GoAlongAllRows(int64_t rows, int64_t classes, const T* x,
                                               const Labels& labels, T* dx, int resident,
                                               Use& use) {
  const bool plain = classes % Vector<T>::kCount == 0 && (uintptr_t)x % 16 == 0 &&
                     classes / Vector<T>::kCount <= resident;
  if (plain)
    GoAlongRows<kThreads, true>(rows, classes, x, labels, dx, resident, use);
  else
    GoAlongRows<kThreads, false>(rows, classes, x, labels, dx, resident, use);
}

// loss[0] = `scale` times the sum of the losses of the rows, dx (rows, classes) = their gradients.
template <int kThreads, class T>
__global__ void __launch_bounds__(kThreads, kLongRowThreads / kThreads)
    FusedLongRowsKernel(int64_t rows, int64_t classes, const T* x, SparseLabels labels, T* dx,
                        int resident, GridReduction reduction, float scale, Output loss) {
  GridDependencySynchronize();
  const unsigned arrival = Arrive(reduction);
  SummedLosses losses{labels.dy, 0.f};
  GoAlongAllRows<kThreads>(rows, classes, x, labels.of, dx, resident, losses);
  TriggerProgrammaticLaunch();
  FinishGridSum<kThreads>(losses.sum, arrival, reduction, scale, loss);
}

template <int kThreads, class T, class Use>
__global__ void __launch_bounds__(kThreads, kLongRowThreads / kThreads)
    LongRowsKernel(int64_t rows, int64_t classes, const T* x, Labels labels, T* dx, int resident,
                   Use use) {
  GoAlongAllRows<kThreads>(rows, classes, x, labels, dx, resident, use);
}

template <class T>
bool HasLongRows(int64_t classes, const T* x, const T* dx) {
  return classes >= kLongRowClasses && classes < (1 << 30) &&
         (uintptr_t)x % 16 == (uintptr_t)dx % 16;
}

// The blocks of a launch, and the vectors of each of two rows that lie in the shared memory of one.
struct LongRowsGrid {
  unsigned blocks;
  int resident;
  bool wide;  // a block takes a multiprocessor
  size_t SharedNbytes() const { return (size_t)resident * 2 * 16; }

  LongRowsGrid(int device, int64_t rows, int64_t classes, int vector) {
    constexpr int64_t kStatic = 2048;  // that the system and the kernel's own arrays take
    const int64_t most = CeilDiv(classes, vector) + 1;
    wide = most > kWideRow;
    const int on_each = wide ? 1 : 2;
    const int64_t fits = ((int64_t)SharedLimit(device) / on_each - kStatic) / (2 * 16);
    resident = (int)(most < fits ? most : fits);
    int64_t count = (int64_t)Multiprocessors(device) * on_each;
    if (kMaxPartials < count) count = kMaxPartials;
    if (rows < count) count = rows ? rows : 1;
    blocks = (unsigned)count;
  }
  // Calls run with the threads of a block as a type.
  template <class Run>
  void WithThreads(const Run& run) const {
    wide ? run(std::integral_constant<int, kLongRowThreads>())
         : run(std::integral_constant<int, kLongRowThreads / 2>());
  }
};

template <class T>
void RunFusedLongRows(const char* op, int device, const T* x, int64_t rows, int64_t classes,
                      const SparseLabels& labels, T* dx, const GridReduction& reduction,
                      float scale, Output loss, DLStream stream) {
  const LongRowsGrid grid(device, rows, classes, Vector<T>::kCount);
  grid.WithThreads([&](auto threads) {
    constexpr int kThreads = decltype(threads)::value;
    LaunchClusters(op, FusedLongRowsKernel<kThreads, T>, grid.blocks, 1, kThreads,
                   grid.SharedNbytes(), ComputeMajor(device) >= 9, stream, rows, classes, x, labels,
                   dx, grid.resident, reduction, scale, loss);
  });
}

template <class T, class Use>
void RunLongRows(const char* op, int device, const T* x, const Rows& rows, const Labels& labels,
                 T* dx, const Use& use, DLStream stream) {
  const LongRowsGrid grid(device, rows.count, rows.classes, Vector<T>::kCount);
  grid.WithThreads([&](auto threads) {
    constexpr int kThreads = decltype(threads)::value;
    AllowShared(op, (const void*)LongRowsKernel<kThreads, T, Use>, grid.SharedNbytes());
    Launch(op, LongRowsKernel<kThreads, T, Use>, grid.blocks, kThreads, grid.SharedNbytes(), stream,
           rows.count, rows.classes, x, labels, dx, grid.resident, use);
  });
}

}  // namespace cuda
}  // namespace dlsys
