// Weight gradients that an optimizer uses up where they are made: a group of products in one
// launch, whose epilogue is the step of a rule (src/update.h). No gradient is written.
//
// Each product is A^T B, (k, m) and (k, n) to the gradient of a parameter of m * n elements, and
// may have the sums over the depth of A or of B, the gradient of another. States are float32,
// contiguous and only this kernel's: they overlap nothing that it reads, and each element is one
// thread's. All products have one tiling and one number of splits; their blocks follow each other,
// so that the small ones run beside the large. The order of additions is fixed.
#include <algorithm>
#include <memory>

#include "cuda/lists.cuh"
#include "cuda/matmul_kernel.cuh"
#include "update_args.h"

namespace dlsys {
namespace cuda {
namespace {

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
// What depends on the rule are calls, so that a kernel holds none of the rules' code and registers,
// and there is one for all of them.

template <int kRule = 0, class F>
__device__ __forceinline__ void WithRule(int rule, F&& f) {
  if constexpr (kRule < std::tuple_size_v<Rules>) {
    if (rule == kRule)
      f(Type<std::tuple_element_t<kRule, Rules>>());
    else
      WithRule<kRule + 1>(rule, f);
  }
}

__device__ __attribute__((noinline)) void MakeStep(int rule, const rule::Source& source,
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
__device__ __attribute__((noinline)) void UpdateStrip(int rule, const AnyStep& any,
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

__device__ __attribute__((noinline)) void UpdateElement(int rule, const AnyStep& any,
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

template <class T, template <class, bool, bool> class Accumulator>
__global__ __launch_bounds__(T::kThreads,
                             T::kResident) void GroupKernel(const __grid_constant__ Group group) {
  float* const memory = DynamicShared<float>();
  __shared__ float shares[T::kThreads];
  __shared__ AnyStep step;
  __shared__ rule::Source source;
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
  TileProduct<T, Accumulator, true, false> tile(problem, place, memory);
  WaitForEarlierKernels();
  if (!group.source.Due(group.every_run)) return;
  rule::Source::Seen seen = {};  // before the copies, which it would wait for
  if (threadIdx.x == 0) seen = group.source.Look(), source = group.source;
  tile.Begin();
  tile.Finish(summed, shares, [&] {
    if (threadIdx.x == 0) MakeStep(group.rule, source, seen, &step);
  });
  AddTiles<T>(memory);  // a thread alone reads what it wrote, but for a cluster, which meets
  UpdateStrip(group.rule, step, member, StripOf<T>(problem, place, memory));
  if (place.split == 0)
    FinishSums<T>(problem, place, summed, shares, problem.splits, [&](int64_t at, float sum) {
      UpdateElement(group.rule, step, member.of_sums, at, sum);
    });
  if (problem.splits > 1) LeaveCluster();  // nobody goes while others read its memory
}

// ---- launchers ----

template <class Tilings, template <class, bool, bool> class Accumulator>
void LaunchGroup(const char* op, int tiling, const Group& group, unsigned blocks, bool early,
                 DLStream stream) {
  WithTiling<Tilings>(tiling, [&](auto of) {
    using T = typename decltype(of)::type;
    LaunchClusters(op, GroupKernel<T, Accumulator>, blocks, (unsigned)group.splits, T::kThreads,
                   MemoryNbytes<T, true, false>(), early, stream, group);
  });
}

// The lists that a kernel gets. Parameters are those of the products, then those of the sums; state
// j of parameter k is at j * parameters + k.
struct Lists {
  const DLArrayList *states, *left, *right;
  int of_each;   // states of a parameter
  int64_t sums;  // two bits a product, the first one's lowest: 1 has the sums of A, 2 those of B

  int SumsOf(int64_t product) const { return (int)(sums >> 2 * product & 3); }
  int64_t Parameters() const {
    int64_t count = left->count;
    for (int64_t k = 0; k < left->count; k++) count += SumsOf(k) != 0;
    return count;
  }
};

void CheckLists(const char* op, const Lists& lists) {
  const int64_t count = lists.left->count;
  if (count < 1 || count > kMostProducts || lists.right->count != count)
    Fail("%s: expected the factors of 1 to %d products, got %ld and %ld", op, kMostProducts,
         (long)count, (long)lists.right->count);
  if (lists.states->count != lists.of_each * lists.Parameters())
    Fail("%s: %ld parameters need %ld states, got %ld", op, (long)lists.Parameters(),
         (long)(lists.of_each * lists.Parameters()), (long)lists.states->count);
}

// The addresses of a parameter's states, of `numel` elements each.
void TakeStates(const char* op, const Lists& lists, int64_t parameter, int64_t numel, float** to) {
  for (int j = 0; j < lists.of_each; j++) {
    DLArray* state = lists.states->arrays[j * lists.Parameters() + parameter];
    if (Numel(state) != numel)
      Fail("%s: expected a state of %ld elements, got shape %s", op, (long)numel,
           ShapeText(state).c_str());
    to[j] = Out(op, state);
  }
}

bool Overlap(const DLArray* a, const DLArray* b) {
  const auto begin = [](const DLArray* x) { return (uintptr_t)x->data; };
  const auto end = [&](const DLArray* x) { return begin(x) + Numel(x) * sizeof(float); };
  return begin(a) < end(b) && begin(b) < end(a);
}

// Factors as they may be read while states are written: one that shows a state, as what is fed may,
// is copied first.
class Factors {
 public:
  Factors(const char* op, const DLArrayList* states, DLStream stream)
      : op_(op), states_(states), stream_(stream) {}

  const float* Of(const DLArray* factor) {
    const auto shown = [&](const DLArray* state) { return Overlap(state, factor); };
    if (std::none_of(states_->arrays, states_->arrays + states_->count, shown))
      return (const float*)factor->data;
    const size_t nbytes = Numel(factor) * sizeof(float);
    copies_.push_back(std::make_unique<Scratch>(factor->ctx, (int64_t)nbytes, stream_));
    Check(op_, cudaMemcpyAsync(copies_.back()->data(), factor->data, nbytes,
                               cudaMemcpyDeviceToDevice, Native(stream_)));
    return copies_.back()->floats();
  }

 private:
  const char* op_;
  const DLArrayList* states_;
  DLStream stream_;
  std::vector<std::unique_ptr<Scratch>> copies_;
};

// Products with all but how they are cut, the one with most work first.
void TakeMembers(const char* op, const Lists& lists, Precision precision, Factors* factors,
                 Group* group) {
  int64_t next = lists.left->count;  // parameter of sums
  for (int64_t k = 0; k < lists.left->count; k++) {
    const DLArray *a = lists.left->arrays[k], *b = lists.right->arrays[k];
    if (a->ndim != 2 || b->ndim != 2 || lists.SumsOf(k) > 2)
      Fail("%s: expected matrices and at most the sums of one, got %s, %s and %d", op,
           ShapeText(a).c_str(), ShapeText(b).c_str(), lists.SumsOf(k));
    DLArray c = *lists.states->arrays[k];  // the gradient as the product has it
    int64_t shape[2] = {a->shape[1], b->shape[1]};
    c.ndim = 2, c.shape = shape;
    Member& member = group->of[group->count++];
    Product& product = member.problem.product;
    product = CheckedProduct(op, a, true, b, false, &c);
    product.a = factors->Of(a), product.b = factors->Of(b);
    product.precision = precision;
    TakeStates(op, lists, k, product.m * product.n, member.states);
    if (const int sums = lists.SumsOf(k)) {
      product.sums_of_a = sums == 1;
      TakeStates(op, lists, next++, product.sums_of_a ? product.m : product.n, member.of_sums);
      product.sums = member.of_sums[0];
    }
  }
  const auto work = [](const Member& member) {
    const Product& p = member.problem.product;
    return (double)p.m * p.n * p.k;
  };
  std::stable_sort(group->of, group->of + group->count,
                   [&](const Member& a, const Member& b) { return work(a) > work(b); });
}

void RunGroup(const char* op, const Lists& lists, Precision precision, Group* group,
              DLStream stream) {
  CheckLists(op, lists);
  Factors factors(op, lists.states, stream);
  TakeMembers(op, lists, precision, &factors, group);
  const int device = lists.states->arrays[0]->ctx.device_id, major = ComputeMajor(device);
  std::vector<Product> products;
  for (int k = 0; k < group->count; k++) products.push_back(group->of[k].problem.product);
  const Cut cut = BestCut(products.data(), group->count, major >= 9 ? kMaxSplits : 1);
  group->splits = cut.splits;
  unsigned blocks = 0;
  for (int k = 0; k < group->count; k++) {
    Member& member = group->of[k];
    Problem& problem = member.problem;
    problem = CutInto(op, products[k], cut.tiling, cut.splits);
    for (int j = 1; j < lists.of_each; j++) problem.whole_out &= Aligned16(member.states[j]);
    group->first[k] = (int)blocks;
    blocks += (unsigned)(problem.row_tiles * problem.col_tiles * cut.splits);
  }
  if (precision == Precision::kTf32 && major >= 8)
    LaunchGroup<Tf32Tilings, Tf32Accumulator>(op, cut.tiling, *group, blocks, major >= 9, stream);
  else
    LaunchGroup<Fp32Tilings, Fp32Accumulator>(op, cut.tiling, *group, blocks, major >= 9, stream);
}

// Each parameter by the rule of that number, with the gradient left[k]^T right[k] or the sums of
// one of the two, as Lists has it.
template <int kRule>
void MatmulUpdate(DLArrayList* states, const DLArrayList* left, const DLArrayList* right,
                  const DLArrayList* lr, const DLArrayList* step, const DLArrayList* count,
                  const DLArrayList* scale, int64_t sums, int64_t precision, int64_t every,
                  float clip, float l2, float decay, float a, float b, float c, DLStream stream) {
  using Rule = std::tuple_element_t<kRule, Rules>;
  static const std::string name = std::string("matmul_") + Rule::name;
  const char* op = name.c_str();
  EnterAll(op, {states, left, right, lr, step, count, scale});
  Group group = {};
  group.source = CheckedSource(op, lr, step, count, scale, every, clip, l2, decay, a, b, c);
  group.rule = kRule;
  group.every_run = Rule::kEveryRun;
  RunGroup(op, {states, left, right, Rule::kStates, sums}, CheckedPrecision(op, precision), &group,
           stream);
}

DLSYS_KERNEL(cuda, matmul_sgd_update, MatmulUpdate<0>);
DLSYS_KERNEL(cuda, matmul_sgd_momentum_update, MatmulUpdate<1>);
DLSYS_KERNEL(cuda, matmul_adam_update, MatmulUpdate<2>);
DLSYS_KERNEL(cuda, matmul_rmsprop_update, MatmulUpdate<3>);
DLSYS_KERNEL(cuda, matmul_rmsprop_centred_update, MatmulUpdate<4>);
DLSYS_KERNEL(cuda, matmul_rmsprop_momentum_update, MatmulUpdate<5>);
DLSYS_KERNEL(cuda, matmul_rmsprop_centred_momentum_update, MatmulUpdate<6>);
DLSYS_KERNEL(cuda, matmul_adagrad_update, MatmulUpdate<7>);
DLSYS_KERNEL(cuda, matmul_lion_update, MatmulUpdate<8>);
DLSYS_KERNEL(cuda, matmul_accumulate_update, MatmulUpdate<9>);

}  // namespace
}  // namespace cuda
}  // namespace dlsys
