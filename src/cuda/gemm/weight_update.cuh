// The kernel of weight gradients that an optimizer uses up where they are made, matmul_update.cu,
// and what it is told: a group of products whose epilogue is the step of a rule.
//
// What depends on the rule are calls, so that a kernel holds none of the rules' code and registers,
// and there is one for all of them.
#pragma once
#include <algorithm>

#include "cuda/gemm/kernel.cuh"
#include "cuda/gemm/uint8.cuh"
#include "math/optimizer_rules.h"

namespace dlsys {
namespace cuda {
namespace grouped {

// By the numbers that kernels know them by.
using Rules = std::tuple<rule::Sgd, rule::Momentum, rule::Adam, rule::RmsProp<false, false>,
                         rule::RmsProp<true, false>, rule::RmsProp<false, true>,
                         rule::RmsProp<true, true>, rule::Adagrad, rule::Lion, rule::Accumulate>;

constexpr int kMostProducts = 8;
constexpr int kMostStates = 4;

// A product, whose C is the parameter and whose sums are those of the other one, and all states of
// the two.
struct Member {
  Problem problem;
  float* states[kMostStates];
  float* of_sums[kMostStates];
};

struct Group {
  rule::Source source;
  int rule;
  bool every_run;
  int count, splits;
  bool bytes;                // whether there is a factor of them
  int first[kMostProducts];  // block of each
  Member of[kMostProducts];
};

template <class>
struct Largest;
template <class... Rule>
struct Largest<std::tuple<Rule...>> {
  static constexpr size_t kNbytes = std::max({sizeof(rule::Step<Rule>)...});
  static_assert(std::max({Rule::kStates...}) <= kMostStates, "a member has room for its states");
};
struct alignas(8) AnyStep {
  unsigned char bytes[Largest<Rules>::kNbytes];
};

// A thread's quads of a finished tile: columns `col` to `col + 3` of every `row_step`-th row.
struct Strip {
  const float* tile;  // the first one, in each of `splits` blocks, and how far it is to the next
  int pitch;
  int count, row_step, splits;
  int64_t row, col;
};

// ---- kernels ----

template <int kRule = 0, class F>
__device__ __forceinline__ void WithRule(int rule, F&& f) {
  if constexpr (kRule < std::tuple_size_v<Rules>) {
    if (rule == kRule)
      f(Type<std::tuple_element_t<kRule, Rules>>());
    else
      WithRule<kRule + 1>(rule, f);
  }
}

static __device__ __attribute__((noinline)) void MakeStep(int rule, const rule::Source& source,
                                                          rule::Source::Seen seen, AnyStep* to) {
  WithRule(rule, [&](auto of) {
    using Rule = typename decltype(of)::type;
    *(rule::Step<Rule>*)to->bytes = source.template Make<Rule>(seen);
  });
}

template <class Rule>
__device__ __forceinline__ rule::Step<Rule> StepOf(const AnyStep& step) {
  return *(const rule::Step<Rule>*)step.bytes;
}

// The states of kBatch quads of a strip, from number `first` on.
template <class Rule>
class Batch {
 public:
  static constexpr int kStates = Rule::kStates, kBatch = 2;

  __device__ __forceinline__ Batch(const Member& member, const Strip& strip)
      : member_(member), strip_(strip) {}

  __device__ __forceinline__ void Read(int first) {
    ForEach(first, [&](int k, int64_t at, int valid) {
#pragma unroll
      for (int j = 0; j < kStates; j++) {
        const float* from = member_.states[j] + at;
        float (&x)[4] = states_[k][j];
        if (member_.problem.whole_out) {
          const float4 v = *(const float4*)from;
          x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
        } else {
#pragma unroll
          for (int e = 0; e < 4; e++) x[e] = e < valid ? from[e] : 0.f;
        }
      }
    });
  }

  __device__ __forceinline__ void Update(int first, const rule::Step<Rule>& step) {
    float4 sums[kBatch];
    SumPeers<kBatch>(strip_.tile + first * strip_.pitch, strip_.pitch, strip_.count - first,
                     strip_.splits, sums);
    ForEach(first, [&](int k, int64_t at, int valid) {
      const float gradients[4] = {sums[k].x, sums[k].y, sums[k].z, sums[k].w};
#pragma unroll
      for (int e = 0; e < 4; e++) {
        float states[kStates];
#pragma unroll
        for (int j = 0; j < kStates; j++) states[j] = states_[k][j][e];
        step(states, gradients[e]);
#pragma unroll
        for (int j = 0; j < kStates; j++) states_[k][j][e] = states[j];
      }
#pragma unroll
      for (int j = 0; j < kStates; j++) {
        float* to = member_.states[j] + at;
        const float (&x)[4] = states_[k][j];
        if (member_.problem.whole_out) {
          *(float4*)to = make_float4(x[0], x[1], x[2], x[3]);
        } else {
#pragma unroll
          for (int e = 0; e < 4; e++)
            if (e < valid) to[e] = x[e];
        }
      }
    });
  }

 private:
  // Calls f(k, place in memory, how many of four exist) for the quads of which there is something.
  template <class F>
  __device__ __forceinline__ void ForEach(int first, F&& f) const {
    const Product& product = member_.problem.product;
    const int64_t left = product.n - strip_.col;
    if (left <= 0) return;
#pragma unroll
    for (int k = 0; k < kBatch; k++) {
      const int64_t row = strip_.row + (int64_t)(first + k) * strip_.row_step;
      if (first + k < strip_.count && row < product.m)
        f(k, row * product.n + strip_.col, (int)min(left, (int64_t)4));
    }
  }

  const Member& member_;
  const Strip& strip_;
  float states_[kBatch][kStates][4] = {};
};

// The first states are on their way while the cluster meets.
static __device__ __attribute__((noinline)) void UpdateStrip(int rule, const AnyStep& any,
                                                             const Member& member, Strip strip) {
  WithRule(rule, [&](auto of) {
    using Rule = typename decltype(of)::type;
    const rule::Step<Rule> step = StepOf<Rule>(any);
    Batch<Rule> batch(member, strip);
    batch.Read(0);
    if (strip.splits > 1) MeetCluster();
    for (int first = 0; first < strip.count; first += Batch<Rule>::kBatch) {
      if (first) batch.Read(first);
      batch.Update(first, step);
    }
  });
}

static __device__ __attribute__((noinline)) void UpdateElement(int rule, const AnyStep& any,
                                                               float* const* arrays, int64_t at,
                                                               float gradient) {
  WithRule(rule, [&](auto of) {
    using Rule = typename decltype(of)::type;
    float states[Rule::kStates];
#pragma unroll
    for (int j = 0; j < Rule::kStates; j++) states[j] = arrays[j][at];
    StepOf<Rule>(any)(states, gradient);
#pragma unroll
    for (int j = 0; j < Rule::kStates; j++) arrays[j][at] = states[j];
  });
}

template <class T>
__device__ __forceinline__ Strip StripOf(const Problem& problem, const Place& place,
                                         const float* tile) {
  constexpr int kInRow = Share<T>::kInRow, kStep = T::kThreads / kInRow;
  const Share<T> share(problem.splits, place.split);
  const int begin = share.begin + threadIdx.x;
  return {tile + Share<T>::At(begin),
          Share<T>::kStep,
          begin < share.end ? (share.end - begin + T::kThreads - 1) / T::kThreads : 0,
          kStep,
          problem.splits,
          (int64_t)place.row * T::kRows + begin / kInRow,
          (int64_t)place.col * T::kCols + begin % kInRow * 4};
}

// A block's tile and sums as TileProduct leaves them, and the step of the rule; false where nothing
// is to be done in this run.
template <class T, template <class, bool, bool> class Accumulator>
__device__ __forceinline__ bool Multiply(const Group& group, const Problem& problem,
                                         const Place& place, Summed summed, float* memory,
                                         float* shares, AnyStep* step) {
  __shared__ rule::Source source;
  if (threadIdx.x == 0) source = group.source;
  TileProduct<T, Accumulator, true, false> tile(problem, place, memory);
  GridDependencySynchronize();
  if (!group.source.Due(group.every_run)) return false;
  rule::Source::Seen seen = {};  // before the copies, which it would wait for
  if (threadIdx.x == 0) seen = group.source.Look();
  tile.Begin();
  tile.Finish(summed, shares, [&] {
    if (threadIdx.x == 0) MakeStep(group.rule, source, seen, step);
  });
  return true;
}

// kBytes: there may be factors of bytes.
template <class T, template <class, bool, bool> class Accumulator, bool kBytes>
__global__ __launch_bounds__(T::kThreads,
                             T::kResident) void GroupKernel(const __grid_constant__ Group group) {
  float* const memory = DynamicShared<float>();
  __shared__ float shares[T::kThreads];
  __shared__ AnyStep step;
  int k = 0;
  while (k + 1 < group.count && (int)blockIdx.x >= group.first[k + 1]) k++;
  // Parameters that are found by a number are slow to come.
  __shared__ __align__(16) int copied[sizeof(Member) / sizeof(int)];
  for (int i = threadIdx.x; i < (int)(sizeof(Member) / sizeof(int)); i += T::kThreads)
    copied[i] = ((const int*)&group.of[k])[i];
  __syncthreads();
  const Member& member = *(const Member*)copied;
  const Problem problem = member.problem;
  const Place place = FindPlace(problem, blockIdx.x - group.first[k]);
  const Summed summed(problem.product, place);
  bool due;
  if (kBytes && problem.product.bytes == Bytes::kA)
    due = Multiply<T, BytesIn<Bytes::kA>::template Accumulator>(group, problem, place, summed,
                                                                memory, shares, &step);
  else if (kBytes && problem.product.bytes == Bytes::kB)
    due = Multiply<T, BytesIn<Bytes::kB>::template Accumulator>(group, problem, place, summed,
                                                                memory, shares, &step);
  else
    due = Multiply<T, Accumulator>(group, problem, place, summed, memory, shares, &step);
  if (!due) return;
  AddTiles<T>(memory);  // a thread alone reads what it wrote, but for a cluster, which meets
  UpdateStrip(group.rule, step, member, StripOf<T>(problem, place, memory));
  if (place.split == 0)
    FinishSums<T>(problem, place, summed, shares, problem.splits, [&](int64_t at, float sum) {
      UpdateElement(group.rule, step, member.of_sums, at, sum);
    });
  if (problem.splits > 1) LeaveCluster();  // nobody goes while others read its memory
}

}  // namespace grouped
}  // namespace cuda
}  // namespace dlsys
