// Optimizer steps in place on the CPU, each over all parameters at once (multi-tensor). Rates and
// counts are arrays, which may change between runs of a captured program. Parameters and slots are
// read and written, gradients only read. Parameters and gradients of 16 bits are widened a block at
// a time, which stays in the cache, and parameters rounded back. Memory bandwidth limits it.
#include "cpu/pointwise/strides.h"
#include "cpu/runtime/parallel.h"
#include "cpu/runtime/simd.h"
#include "operators/optimizer_args.h"

namespace dlsys {
namespace cpu {
namespace {

void CheckAll(const char* op, std::initializer_list<const DLArrayList*> lists) {
  for (const DLArrayList* list : lists)
    for (int64_t k = 0; k < list->count; k++) Check(op, list->arrays[k]);
}

// Several arrays as one range of elements, in which array k starts at starts[k].
class Concatenated {
 public:
  explicit Concatenated(const DLArrayList* arrays)
      : count_(arrays->count), scratch_(count_ + 1), starts_(scratch_.data()) {
    for (int64_t k = 0; k < count_; k++) size_ += Numel(arrays->arrays[k]);
    Serially([&] {
      starts_[0] = 0;
      for (int64_t k = 0; k < count_; k++) starts_[k + 1] = starts_[k] + Numel(arrays->arrays[k]);
    });
  }
  int64_t Size() const { return size_; }

  // Calls body(k, first, n) for the segment of each array that lies in [begin, end).
  template <class F>
  void ForSegments(int64_t begin, int64_t end, F&& body) const {
    int64_t k = std::upper_bound(starts_, starts_ + count_, begin) - starts_ - 1;
    for (; begin < end; k++) {
      const int64_t stop = std::min(end, starts_[k + 1]);
      if (begin < stop) body(k, begin - starts_[k], stop - begin);
      begin = stop;
    }
  }

 private:
  const int64_t count_;
  const ScratchArray<int64_t> scratch_;
  int64_t* const starts_;
  int64_t size_ = 0;
};

constexpr int64_t kBlock = 512;  // elements of 16 bits that are widened at a time

// A part of an array of float32 or of storage type T as floats: in place, or a copy of it.
template <class T>
class Floats {
 public:
  Floats(const DLArray* a, int64_t first, int64_t n) : n_(n) {
    if (!kIs16Bit<T> || a->dtype == DL_FLOAT32) {
      data_ = (float*)a->data + first;
      return;
    }
    stored_ = (T*)a->data + first;
    data_ = widened_;
    float* to = widened_;
    const T* from = stored_;
    Dispatch(DLSYS_SIMD {
      for (int64_t i = 0; i < n; i++) to[i] = from[i];
    });
  }
  float* data() { return data_; }
  // Rounds the copy back.
  void Store() {
    if (!stored_) return;
    const int64_t n = n_;
    T* to = stored_;
    const float* from = widened_;
    Dispatch(DLSYS_SIMD {
      for (int64_t i = 0; i < n; i++) to[i] = T(from[i]);
    });
  }

 private:
  const int64_t n_;
  float* data_;
  T* stored_ = nullptr;
  float widened_[kIs16Bit<T> ? kBlock : 1];
};

template <class Rule>
void StepRun(const rule::Step<Rule> step, float* const* states, const float* grad, int64_t n) {
  Dispatch(DLSYS_SIMD {
    DLSYS_IVDEP
    for (int64_t i = 0; i < n; i++) {
      float s[Rule::kStates];
      for (int j = 0; j < Rule::kStates; j++) s[j] = states[j][i];
      step(s, grad[i]);
      for (int j = 0; j < Rule::kStates; j++) states[j][i] = s[j];
    }
  });
}

template <class T, class Rule>
void Update(DLArrayList* states, const DLArrayList* grads, const DLArrayList* lr,
            const DLArrayList* step, const DLArrayList* count, const DLArrayList* scale,
            Struct<rule::UpdateOptions> options) {
  const char* op = Rule::name;
  CheckAll(op, {states, grads, lr, step, count, scale});
  CheckStates<T, Rule>(op, states, grads);
  CheckOneDtype(op, grads);
  const rule::Source source = CheckedSource(op, lr, step, count, scale, *options);
  const Concatenated all(grads);
  if (Workspace::Querying() || !source.Due(Rule::kEveryRun)) return;
  const rule::Step<Rule> made = source.Make<Rule>(source.Look());
  const int64_t stride = grads->count;
  ParallelFor(all.Size(), kGrain, [&](int64_t begin, int64_t end) {
    all.ForSegments(begin, end, [&](int64_t k, int64_t first, int64_t length) {
      const int64_t most = kIs16Bit<T> ? kBlock : length, last = first + length;
      for (; first < last; first += most) {
        const int64_t n = std::min(most, last - first);
        Floats<T> parameter(states->arrays[k], first, n), gradient(grads->arrays[k], first, n);
        float* s[Rule::kStates] = {parameter.data()};
        for (int j = 1; j < Rule::kStates; j++)
          s[j] = (float*)states->arrays[j * stride + k]->data + first;
        StepRun(made, s, gradient.data(), n);
        parameter.Store();
      }
    });
  });
}

// Increments counters of runs or updates, at the end of every `every` runs.
void Advance(DLArrayList* counters, const DLArrayList* count, int64_t every) {
  const char* op = "advance_step";
  CheckAll(op, {counters, count});
  const long long* runs = OptionalCount(op, "count", count);
  for (int64_t k = 0; k < counters->count; k++)
    CheckScalar(op, "step", counters->arrays[k], DL_INT64);
  if (Workspace::Querying() || (runs && (*runs + 1) % every != 0)) return;
  for (int64_t k = 0; k < counters->count; k++) ++*(int64_t*)counters->arrays[k]->data;
}

template <class T>
DLSYS_INLINE double SumOfSquares(const T* x, int64_t n) {
  constexpr int kLanes = 16;
  double sums[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int lane = 0; lane < kLanes; lane++) {
      const float v = x[i + lane];
      sums[lane] += (double)v * v;
    }
  for (; i < n; i++) {
    const float v = x[i];
    sums[0] += (double)v * v;
  }
  double sum = 0;
  for (double lane_sum : sums) sum += lane_sum;
  return sum;
}

// norm = sqrt(sum of all squares), in double, in an order that depends on the sizes only; arrays
// are of float32 or of T.
template <class T>
void GlobalNorm(const DLArrayList* arrays, DLArray* norm) {
  const char* op = "global_norm";
  CheckAll(op, {arrays});
  for (int64_t k = 0; k < arrays->count; k++)
    if (arrays->arrays[k]->dtype != DL_FLOAT32) In<T>(op, arrays->arrays[k]);
  float* out = Output(op, norm);
  CheckScalar(op, "norm", norm, DL_FLOAT32);
  const Concatenated all(arrays);
  const int64_t parts = (all.Size() + kGrain - 1) / kGrain;
  const ScratchArray<double> of_parts(parts);
  double* sums = of_parts.data();
  ParallelFor(all.Size(), kGrain, [&](int64_t begin, int64_t end) {
    double sum = 0;
    all.ForSegments(begin, end, [&](int64_t k, int64_t first, int64_t n) {
      const DLArray* a = arrays->arrays[k];
      double* total = &sum;
      Dispatch(DLSYS_SIMD {
        if (a->dtype == DL_FLOAT32)
          *total += SumOfSquares((const float*)a->data + first, n);
        else
          *total += SumOfSquares((const T*)a->data + first, n);
      });
    });
    sums[begin / kGrain] = sum;
  });
  Serially([=] {
    double total = 0;
    for (int64_t k = 0; k < parts; k++) total += sums[k];
    *out = (float)std::sqrt(total);
  });
}

// copies[k] = arrays[k], float32, in T.
template <class T>
void CastAll(const DLArrayList* arrays, DLArrayList* copies) {
  const char* op = "casts";
  CheckAll(op, {arrays, copies});
  CheckCopies<T>(op, arrays, copies);
  const Concatenated all(arrays);
  ParallelFor(all.Size(), kGrain, [&](int64_t begin, int64_t end) {
    all.ForSegments(begin, end, [&](int64_t k, int64_t first, int64_t n) {
      const float* x = (const float*)arrays->arrays[k]->data + first;
      T* y = (T*)copies->arrays[k]->data + first;
      Dispatch(DLSYS_SIMD {
        for (int64_t i = 0; i < n; i++) y[i] = T(x[i]);
      });
    });
  });
}

#define DLSYS_UPDATE(Rule) \
  DLSYS_KERNEL_TYPED_NAMED(cpu, Rule, rule::Rule::name, Update, rule::Rule);
DLSYS_RULES(DLSYS_UPDATE)
#undef DLSYS_UPDATE
DLSYS_KERNEL(cpu, advance_step, Advance);
DLSYS_KERNEL_TYPED(cpu, global_norm, GlobalNorm);
DLSYS_KERNEL_TYPED(cpu, casts, CastAll);

}  // namespace
}  // namespace cpu
}  // namespace dlsys
