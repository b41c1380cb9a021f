// Sparse cross-entropy of rows of thousands of classes, such as a vocabulary, its gradient, or
// both: each row is read from memory once and its gradient is written once.
//
// A block takes a row as vectors of 16 bytes, each of which one thread has for all three passes:
// the maximum, the sum of exp(x - max), the gradient. Vectors wait in shared memory, those that do
// not fit are read again; the next row's are on their way while the gradient is written. Vectors
// that a row shares with its neighbors are read and written by elements. Statistics are float32.
// The gradient may overwrite the logits. Memory bandwidth limits it, of 16 bits nearly as much the
// two exponentials an element.
#pragma once
#include <cstring>

#include "cuda/loss/cross_entropy.cuh"

namespace dlsys {
namespace cuda {

constexpr int kLongRowThreads = 512, kLongRowBlocks = 2;  // of a multiprocessor
constexpr int64_t kLongRowClasses = 4096;                 // and more: a vector a thread

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
  __device__ __forceinline__ void BeginRead(int j, Vector<T>* to) const {
    if (IsFull(j))
      CopyAsync16((float*)to, (const float*)At(j), true);
    else
      Read(j).To(to);
  }
  __device__ __forceinline__ void Write(int j, const Vector<T>& v) const {
    if (IsFull(j)) return v.To(At(j));
#pragma unroll
    for (int e = 0; e < kCount; e++)
      if (Has(j, e)) At(j)[e] = v.x[e];
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

// Goes along every gridDim.x-th row of x (rows, classes); dx lies as x does within 16 bytes.
// `resident` vectors of a row fit shared memory.
template <class T, class Use>
__device__ __forceinline__ void GoAlongRows(int64_t rows, int64_t classes, const T* x,
                                            const Labels& labels, T* dx, int resident, Use& use) {
  constexpr int kThreads = kLongRowThreads, kCount = Vector<T>::kCount;
  Vector<T>* const slots = DynamicShared<Vector<T>>();
  const auto row_of = [&](int64_t r) { return LongRow<T>((T*)x, r, rows, classes); };
  LongRow<T> row = row_of(blockIdx.x);
  for (int j = threadIdx.x; j < min(row.count(), resident); j += kThreads)
    row.BeginRead(j, slots + j);
  CloseCopies();
  for (int64_t r = blockIdx.x; r < rows; r += gridDim.x) {
    const LongRow<T> next = row_of(r + gridDim.x);
    const int64_t label = labels.At(r);
    const bool valid = label >= 0 && label < classes;
    // Read before the barriers, behind which the gradient may overwrite it.
    const float logit = valid && threadIdx.x == 0 ? (float)x[r * classes + label] : NAN;
    const auto load = [&](int j) {
      return j < resident ? Vector<T>::From(slots + j) : row.Read(j);
    };
    WaitForCopies<0>();
    float largest = -INFINITY;
#pragma unroll 4
    for (int j = threadIdx.x; j < row.count(); j += kThreads) {
      const Vector<T> v = load(j);
#pragma unroll
      for (int e = 0; e < kCount; e++) largest = fmaxf(largest, (float)v.x[e]);
    }
    largest = GroupReduce<MaxMonoid, kThreads>(largest);
    float sums[2] = {};
#pragma unroll 2
    for (int j = threadIdx.x; j < row.count(); j += kThreads) {
      const Vector<T> v = load(j);
#pragma unroll
      for (int e = 0; e < kCount; e++) sums[e % 2] += ExpOf<T>((float)v.x[e] - largest);
    }
    const float sum = GroupReduce<SumMonoid, kThreads>(sums[0] + sums[1]);
    if (threadIdx.x == 0) {
      use.Take(r, logf(sum) - (logit - largest));
      if (!valid) labels.faults.OutOfRange(label, r, classes);
    }
    const float share = 1.f / sum, dy = valid ? use.Dy(r) : NAN, factor = share * dy;
    const int label_vector = valid ? row.VectorOf(label) : -1, label_at = row.ElementOf(label);
    const LongRow<T> to(dx, r, rows, classes);
    for (int j = threadIdx.x; j < max(row.count(), next.count()); j += kThreads) {
      if (Use::kGradient && j < row.count()) {
        const Vector<T> v = load(j);
        Vector<T> d;
#pragma unroll
        for (int e = 0; e < kCount; e++) d.x[e] = T(ExpOf<T>((float)v.x[e] - largest) * factor);
        if (j == label_vector) {
#pragma unroll
          for (int e = 0; e < kCount; e++)
            if (e == label_at) d.x[e] = T((ExpOf<T>((float)v.x[e] - largest) * share - 1.f) * dy);
        }
        to.Write(j, d);
      }
      if (j < min(next.count(), resident)) next.BeginRead(j, slots + j);
    }
    CloseCopies();
    row = next;
  }
}

// loss[0] = `scale` times the sum of the losses of the rows, dx (rows, classes) = their gradients.
template <class T>
__global__ void __launch_bounds__(kLongRowThreads, kLongRowBlocks)
    FusedLongRowsKernel(int64_t rows, int64_t classes, const T* x, SparseLabels labels, T* dx,
                        int resident, GridReduction reduction, float scale, Output loss) {
  GridDependencySynchronize();
  const unsigned arrival = Arrive(reduction);
  SummedLosses losses{labels.dy, 0.f};
  GoAlongRows(rows, classes, x, labels.of, dx, resident, losses);
  TriggerProgrammaticLaunch();
  FinishGridSum<kLongRowThreads>(losses.sum, arrival, reduction, scale, loss);
}

template <class T, class Use>
__global__ void __launch_bounds__(kLongRowThreads, kLongRowBlocks)
    LongRowsKernel(int64_t rows, int64_t classes, const T* x, Labels labels, T* dx, int resident,
                   Use use) {
  GoAlongRows(rows, classes, x, labels, dx, resident, use);
}

template <class T>
bool HasLongRows(int64_t classes, const T* x, const T* dx) {
  return classes >= kLongRowClasses && classes < (1 << 30) &&
         (uintptr_t)x % 16 == (uintptr_t)dx % 16;
}

// The blocks of a launch, and the vectors of a row that lie in the shared memory of each.
struct LongRowsGrid {
  unsigned blocks;
  int resident;
  size_t SharedNbytes() const { return (size_t)resident * 16; }

  LongRowsGrid(int device, int64_t rows, int64_t classes, int vector) {
    constexpr int64_t kStatic = 2048;  // that the system and the kernel's own arrays take
    const int64_t fits = ((int64_t)SharedLimit(device) / kLongRowBlocks - kStatic) / 16;
    const int64_t most = CeilDiv(classes, vector) + 1;
    resident = (int)(most < fits ? most : fits);
    int64_t count = (int64_t)Multiprocessors(device) * kLongRowBlocks;
    if (kMaxPartials < count) count = kMaxPartials;
    if (rows < count) count = rows ? rows : 1;
    blocks = (unsigned)count;
  }
};

template <class T>
void RunFusedLongRows(const char* op, int device, const T* x, int64_t rows, int64_t classes,
                      const SparseLabels& labels, T* dx, const GridReduction& reduction,
                      float scale, Output loss, DLStream stream) {
  const LongRowsGrid grid(device, rows, classes, Vector<T>::kCount);
  LaunchClusters(op, FusedLongRowsKernel<T>, grid.blocks, 1, kLongRowThreads, grid.SharedNbytes(),
                 ComputeMajor(device) >= 9, stream, rows, classes, x, labels, dx, grid.resident,
                 reduction, scale, loss);
}

template <class T, class Use>
void RunLongRows(const char* op, int device, const T* x, const Rows& rows, const Labels& labels,
                 T* dx, const Use& use, DLStream stream) {
  const LongRowsGrid grid(device, rows.count, rows.classes, Vector<T>::kCount);
  AllowShared(op, (const void*)LongRowsKernel<T, Use>, grid.SharedNbytes());
  Launch(op, LongRowsKernel<T, Use>, grid.blocks, kLongRowThreads, grid.SharedNbytes(), stream,
         rows.count, rows.classes, x, labels, dx, grid.resident, use);
}

}  // namespace cuda
}  // namespace dlsys
