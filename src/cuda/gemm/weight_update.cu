// Grouped GEMM of weight gradients with the optimizer's step as epilogue: no gradient is written.
// One launch computes up to kMaxGemms products A^T B, (k, m) and (k, n), each the gradient of a
// parameter of m * n elements, and optionally the sums over k of A or of B, the gradient of a bias;
// each finished element updates its parameter and optimizer states (operators/optimizer_rules.h) in
// place.
//
// States are float32, contiguous and disjoint from everything else the kernel reads; operands that
// alias a state are copied first. All products share one tiling and split-K, and their blocks
// follow each other, largest first, so that small ones fill the tail. The order of summation is
// fixed. What depends on the rule is not inlined, so one kernel serves all rules without their
// registers.
//
// With the communicator of a group each block sends its part of a gradient to the other ranks and
// adds theirs before it updates (cuda/collective/rank_sums.cuh): a sum over ranks at the price of a
// tile's way over NVLink. All blocks must run together then, so splits may be fewer.
#include <algorithm>
#include <memory>

#include "cuda/collective/rank_sums.cuh"
#include "cuda/gemm/kernel.cuh"
#include "cuda/gemm/uint8.cuh"
#include "cuda/runtime/launch.cuh"
#include "cuda/runtime/lists.cuh"
#include "operators/optimizer_args.h"
#include "operators/optimizer_rules.h"

namespace dlsys {
namespace cuda {
namespace grouped {

#define DLSYS_NUMBER(Rule) k##Rule,
enum RuleNumber { DLSYS_RULES(DLSYS_NUMBER) };
#undef DLSYS_NUMBER

constexpr int kMaxStates = 4;

// A GEMM whose C is the parameter, the parameter that takes its operand sums, and both their
// states.
struct GroupMember {
  GemmParams params;
  float* states[kMaxStates];
  float* sum_states[kMaxStates];
};

struct GroupedGemm {
  rule::Source source;
  int rule;
  bool every_run;
  int count, splits;
  bool u8;                     // some operand is uint8
  const RankSums* ranks;       // over which gradients are summed, or null
  int first_block[kMaxGemms];  // of each GEMM
  GroupMember members[kMaxGemms];
};

#define DLSYS_NBYTES(Rule) sizeof(rule::Step<rule::Rule>),
struct alignas(8) AnyStep {
  unsigned char bytes[std::max({DLSYS_RULES(DLSYS_NBYTES)})];
};
#undef DLSYS_NBYTES

// The quads of a finished tile that a thread updates: columns col to col + 3 of every row_step-th
// row.
struct ThreadQuads {
  float* tile;  // the first quad in shared memory, the same in each of `splits` blocks
  int pitch;    // floats from one quad to the next
  int count, row_step, splits;
  int64_t row, col;
};

// ---- kernels ----

template <class F>
__device__ __forceinline__ void WithRule(int rule, F&& f) {
#define DLSYS_CASE(Rule)                                                                \
  static_assert(rule::Rule::kStates <= kMaxStates, "a member has room for its states"); \
  if (rule == k##Rule) return f(Type<rule::Rule>());
  DLSYS_RULES(DLSYS_CASE)
#undef DLSYS_CASE
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

// Optimizer states of kBatch of a thread's quads, from `first` on.
template <class Rule>
class StateBatch {
 public:
  static constexpr int kStates = Rule::kStates, kBatch = 2;

  __device__ __forceinline__ StateBatch(const GroupMember& member, const ThreadQuads& quads)
      : member_(member), quads_(quads) {}

  __device__ __forceinline__ void Read(int first) {
    ForEach(first, [&](int k, int64_t at, int valid) {
#pragma unroll
      for (int j = 0; j < kStates; j++) {
        const float* from = member_.states[j] + at;
        float (&x)[4] = states_[k][j];
        if (member_.params.aligned_out) {
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
    SumCluster<kBatch>(quads_.tile + first * quads_.pitch, quads_.pitch, quads_.count - first,
                       quads_.splits, sums);
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
        if (member_.params.aligned_out) {
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
  // Calls f(k, offset in memory, elements that exist of four) for the quads that exist.
  template <class F>
  __device__ __forceinline__ void ForEach(int first, F&& f) const {
    const Gemm& gemm = member_.params.gemm;
    const int64_t left = gemm.n - quads_.col;
    if (left <= 0) return;
#pragma unroll
    for (int k = 0; k < kBatch; k++) {
      const int64_t row = quads_.row + (int64_t)(first + k) * quads_.row_step;
      if (first + k < quads_.count && row < gemm.m)
        f(k, row * gemm.n + quads_.col, (int)min(left, (int64_t)4));
    }
  }

  const GroupMember& member_;
  const ThreadQuads& quads_;
  float states_[kBatch][kStates][4] = {};
};

// The first states are loaded while the cluster synchronizes.
static __device__ __attribute__((noinline)) void UpdateQuads(int rule, const AnyStep& any,
                                                             const GroupMember& member,
                                                             ThreadQuads quads) {
  WithRule(rule, [&](auto of) {
    using Rule = typename decltype(of)::type;
    const rule::Step<Rule> step = StepOf<Rule>(any);
    StateBatch<Rule> batch(member, quads);
    batch.Read(0);
    if (quads.splits > 1) MeetCluster();
    for (int first = 0; first < quads.count; first += StateBatch<Rule>::kBatch) {
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
__device__ __forceinline__ ThreadQuads QuadsOf(const GemmParams& params, const TileCoord& coord,
                                               float* tile) {
  constexpr int kInRow = QuadRange<T>::kInRow, kStep = T::kThreads / kInRow;
  const QuadRange<T> range(params.splits, coord.split);
  const int begin = range.begin + threadIdx.x;
  return {tile + QuadRange<T>::At(begin),
          QuadRange<T>::kStep,
          begin < range.end ? (range.end - begin + T::kThreads - 1) / T::kThreads : 0,
          kStep,
          params.splits,
          (int64_t)coord.row * T::kTileM + begin / kInRow,
          (int64_t)coord.col * T::kTileN + begin % kInRow * 4};
}

// The elements that a block has for other ranks: its quads and its operand sums.
template <class T>
DLSYS_HD int RankElements(int splits) {
  const int share = (QuadRange<T>::kQuads / QuadRange<T>::kInRow + splits - 1) / splits;
  return ((share * QuadRange<T>::kInRow + T::kThreads - 1) / T::kThreads + 1) * T::kThreads;
}

// Sums the quads of a thread over the cluster and over ranks, in their place, and updates by the
// operand sums of all ranks.
template <class T>
static __device__ __attribute__((noinline)) void SumOverRanks(
    int rule, const AnyStep& step, const GroupMember& member, TileCoord coord,
    OperandSums operand_sums, const float* thread_sums, ThreadQuads quads, const RankSums& ranks) {
  const GemmParams& params = member.params;
  // A share of rows that are all beyond the edge has nothing to send.
  const QuadRange<T> range(params.splits, coord.split);
  if (coord.row * T::kTileM + range.begin / QuadRange<T>::kInRow >= params.gemm.m) {
    if (params.splits > 1) MeetCluster();
    return;
  }
  BlockSums sums(ranks);  // what it reads is on its way while the cluster synchronizes
  if (params.splits > 1) MeetCluster();
  const auto for_each = [&](auto&& f) {
    for (int k = 0; k < quads.count; k++)
      if (quads.row + (int64_t)k * quads.row_step < params.gemm.m && quads.col < params.gemm.n)
        f(k * T::kThreads + (int)threadIdx.x, quads.tile + k * quads.pitch);
  };
  for_each([&](int k, float* quad) {
    float4 own[1];
    SumCluster<1>(quad, 0, 1, params.splits, own);
    *(float4*)quad = own[0];
    sums.Send(k, own[0]);
  });
  if (coord.split == 0)
    StoreOperandSums<T>(params, coord, operand_sums, thread_sums, params.splits,
                        [&](int64_t at, float own) {
                          const int k = RankElements<T>(params.splits) - 1 - (int)threadIdx.x;
                          sums.Send(k, own);
                          const auto add = [](float a, float b) { return a + b; };
                          UpdateElement(rule, step, member.sum_states, at, sums.Sum(k, own, add));
                        });
  for_each([&](int k, float* quad) {
    const auto add = [](float4 a, float4 b) { return Sum(a, b); };
    *(float4*)quad = sums.Sum(k, *(const float4*)quad, add);
  });
  sums.End();
}

// What the blocks of a launch have in shared memory beside panels and tiles.
struct Shared {
  rule::Source source;
  AnyStep step;
  GroupMember member;
  RankSums ranks;
};

// Computes a tile of a GEMM and updates the parameter, in tiles of T by that accumulator. The
// rule's step is made during the mainloop.
template <class T, template <class, bool, bool> class Accumulator>
__device__ __forceinline__ void RunTile(const GroupedGemm& group, int block, float* memory,
                                        float* thread_sums, Shared* shared) {
  const GemmParams params = shared->member.params;
  const TileCoord coord = TileCoordOf(params, block);
  const OperandSums operand_sums(params.gemm, coord);
  Mainloop<T, Accumulator, true, false> mainloop(params, coord, memory);
  GridDependencySynchronize();
  if (!group.source.Due(group.every_run)) return;
  rule::Source::Seen seen = {};  // issued before the copies, behind which it would queue
  if (threadIdx.x == 0) seen = group.source.Look();
  mainloop.Begin();
  mainloop.Run(operand_sums, thread_sums, [&] {
    if (threadIdx.x == 0) MakeStep(group.rule, shared->source, seen, &shared->step);
  });
  ReduceSlices<T>(memory);  // without a cluster each thread reads only what it wrote
  ThreadQuads quads = QuadsOf<T>(params, coord, memory);
  if (group.ranks) {
    SumOverRanks<T>(group.rule, shared->step, shared->member, coord, operand_sums, thread_sums,
                    quads, shared->ranks);
    quads.splits = 1;
  }
  UpdateQuads(group.rule, shared->step, shared->member, quads);
  if (coord.split == 0 && !group.ranks)
    StoreOperandSums<T>(
        params, coord, operand_sums, thread_sums, params.splits, [&](int64_t at, float sum) {
          UpdateElement(group.rule, shared->step, shared->member.sum_states, at, sum);
        });
  if (params.splits > 1) LeaveCluster();  // its shared memory outlives the peers' reads
}

// The same tiling with room for all slices' tiles, which are then stored in one round: panels take
// as much shared memory. The slices copy and multiply on their own, so that some multiply while
// others read their operands; where operand sums take a thread beyond its slice, they do not.
template <class T>
struct WithAllSlices : T {
  static constexpr int kSliceTiles = T::kSlices;
  static constexpr int kApart = T::kSliceThreads >= std::max(T::kTileM, T::kTileN) ? T::kSlices : 1;
};

// One tiling for all GEMMs.
template <class T>
struct Uniform {
  using OfFloats = WithAllSlices<T>;
  using OfU8A = OfFloats;
  using OfU8B = OfFloats;
  static constexpr size_t kNbytes = 0;  // besides what the heuristic knows of
};

// The accumulators of a product with a uint8 operand; kExact: at fp32.
template <U8Operand kU8, bool kExact>
using U8Accumulator = std::conditional_t<kExact, UnpackedU8<kU8>, WithU8<kU8, false>>;

// Those with a uint8 operand are in tiles of their own. kExact: at fp32.
template <class Tilings, template <class, bool, bool> class Accumulator, bool kAnyU8, bool kExact>
__global__ __launch_bounds__(
    Tilings::OfFloats::kThreads,
    std::min(Tilings::OfFloats::kResident,
             Tilings::OfU8A::kResident)) void GroupedGemmKernel(const __grid_constant__ GroupedGemm
                                                                    group) {
  using T = typename Tilings::OfFloats;
  using OfU8A = typename Tilings::OfU8A;
  using OfU8B = typename Tilings::OfU8B;
  static_assert(T::kThreads == OfU8A::kThreads && T::kThreads == OfU8B::kThreads, "one launch");
  float* const memory = DynamicShared<float>();
  __shared__ float thread_sums[T::kThreads];
  __shared__ __align__(16) unsigned char bytes[sizeof(Shared)];
  Shared& shared = *(Shared*)bytes;
  int k = 0;
  while (k + 1 < group.count && (int)blockIdx.x >= group.first_block[k + 1]) k++;
  // Kernel parameters that are indexed dynamically are slow to load: copied to shared memory first.
  for (int i = threadIdx.x; i < (int)(sizeof(GroupMember) / sizeof(int)); i += T::kThreads)
    ((int*)&shared.member)[i] = ((const int*)&group.members[k])[i];
  if (group.ranks)  // written before the launch
    for (int i = threadIdx.x; i < (int)(sizeof(RankSums) / sizeof(int)); i += T::kThreads)
      ((int*)&shared.ranks)[i] = ((const int*)group.ranks)[i];
  if (threadIdx.x == 0) shared.source = group.source;
  __syncthreads();
  const int block = blockIdx.x - group.first_block[k];
  const U8Operand u8 = kAnyU8 ? shared.member.params.gemm.u8 : U8Operand::kNone;
  if (kAnyU8 && u8 == U8Operand::kA)
    RunTile<OfU8A, U8Accumulator<U8Operand::kA, kExact>::template Accumulator>(
        group, block, memory, thread_sums, &shared);
  else if (kAnyU8 && u8 == U8Operand::kB)
    RunTile<OfU8B, U8Accumulator<U8Operand::kB, kExact>::template Accumulator>(
        group, block, memory, thread_sums, &shared);
  else
    RunTile<T, Accumulator>(group, block, memory, thread_sums, &shared);
}

}  // namespace grouped

namespace {

using namespace grouped;

// ---- launchers ----

template <class Tilings, template <class, bool, bool> class Accumulator, bool kAnyU8, bool kExact>
void LaunchTilings(const char* op, GroupedGemm group, unsigned blocks, int64_t ranks,
                   bool allow_pdl, DLStream stream) {
  using T = typename Tilings::OfFloats;
  using OfU8A = typename Tilings::OfU8A;
  using OfU8B = typename Tilings::OfU8B;
  size_t nbytes = MemoryNbytes<T, Accumulator<T, true, false>>();
  if (kAnyU8) {
    using A =
        typename U8Accumulator<U8Operand::kA, kExact>::template Accumulator<OfU8A, true, false>;
    using B =
        typename U8Accumulator<U8Operand::kB, kExact>::template Accumulator<OfU8B, true, false>;
    nbytes = std::max({nbytes, MemoryNbytes<OfU8A, A>(), MemoryNbytes<OfU8B, B>()});
    if constexpr (kExact) nbytes = std::max(nbytes, Tilings::kNbytes);
  }
  if (ranks && !Workspace::Querying()) {
    const int splits = group.splits;
    group.ranks = RankSumsOf(op, ranks, blocks,
                             std::max({RankElements<T>(splits), RankElements<OfU8A>(splits),
                                       RankElements<OfU8B>(splits)}));
  }
  LaunchSmall(op, GroupedGemmKernel<Tilings, Accumulator, kAnyU8, kExact>, blocks,
              (unsigned)group.splits, T::kThreads, nbytes, allow_pdl, stream, group);
}

template <class Tilings, template <class, bool, bool> class Accumulator, bool kAnyU8>
void LaunchUniform(const char* op, int tiling, const GroupedGemm& group, unsigned blocks,
                   int64_t ranks, bool allow_pdl, DLStream stream) {
  WithTiling<Tilings>(tiling, [&](auto of) {
    LaunchTilings<Uniform<typename decltype(of)::type>, Accumulator, kAnyU8, false>(
        op, group, blocks, ranks, allow_pdl, stream);
  });
}

void LaunchMixed(const char* op, int mixed, const GroupedGemm& group, unsigned blocks,
                 int64_t ranks, bool allow_pdl, DLStream stream) {
  WithTiling<MixedTilings>(mixed, [&](auto of) {
    LaunchTilings<typename decltype(of)::type, Fp32Accumulator, true, true>(
        op, group, blocks, ranks, allow_pdl, stream);
  });
}

// The array lists of a kernel. Parameters are those of the GEMMs, then those of the operand sums;
// state j of parameter k is at j * parameters + k.
struct Lists {
  const DLArrayList *states, *left, *right;
  const DLArrayList* u8_scale;  // of the uint8 operands, or empty
  int state_count;              // states per parameter
  const WeightUpdateOptions& options;

  int64_t ParameterCount() const {
    int64_t count = left->count;
    for (int64_t k = 0; k < left->count; k++) count += options.sums[k] != kNoOperand;
    return count;
  }
};

void CheckLists(const char* op, const Lists& lists) {
  const int64_t count = lists.left->count;
  if (count < 1 || count > kMaxGemms || lists.right->count != count)
    Fail("%s: expected the operands of 1 to %d products, got %ld and %ld", op, kMaxGemms,
         (long)count, (long)lists.right->count);
  if (lists.states->count != lists.state_count * lists.ParameterCount())
    Fail("%s: %ld parameters need %ld states, got %ld", op, (long)lists.ParameterCount(),
         (long)(lists.state_count * lists.ParameterCount()), (long)lists.states->count);
  bool any_u8 = false, summed = false;
  for (int64_t k = 0; k < count; k++) {
    const int sums = lists.options.sums[k], u8 = lists.options.u8[k];
    if (sums < kNoOperand || sums > kOperandB || u8 < kNoOperand || u8 > kOperandB)
      Fail("%s: expected operands %d to %d, got %d and %d", op, kNoOperand, kOperandB, sums, u8);
    any_u8 |= u8 != kNoOperand;
    summed |= u8 != kNoOperand && u8 == sums;
  }
  if (lists.u8_scale->count != any_u8 || summed)
    Fail("%s: expected a scale exactly where an operand is uint8, and no sums of that operand", op);
}

// Addresses of a parameter's states, of `numel` elements each.
void CollectStates(const char* op, const Lists& lists, int64_t parameter, int64_t numel,
                   float** to) {
  for (int j = 0; j < lists.state_count; j++) {
    DLArray* state = lists.states->arrays[j * lists.ParameterCount() + parameter];
    if (Numel(state) != numel)
      Fail("%s: expected a state of %ld elements, got shape %s", op, (long)numel,
           ShapeText(state).c_str());
    to[j] = Out(op, state);
  }
}

int64_t Nbytes(const DLArray* a) { return Numel(a) * DtypeNbytes(a->dtype); }

bool Overlap(const DLArray* a, const DLArray* b) {
  const auto begin = [](const DLArray* x) { return (uintptr_t)x->data; };
  const auto end = [&](const DLArray* x) { return begin(x) + (uintptr_t)Nbytes(x); };
  return begin(a) < end(b) && begin(b) < end(a);
}

// Operands that stay valid while states are written: one that aliases a state, as a feed may, is
// copied first.
class Operands {
 public:
  Operands(const char* op, const DLArrayList* states, DLStream stream)
      : op_(op), states_(states), stream_(stream) {}

  const float* Of(const DLArray* operand) {
    const auto aliases = [&](const DLArray* state) { return Overlap(state, operand); };
    if (std::none_of(states_->arrays, states_->arrays + states_->count, aliases))
      return (const float*)operand->data;
    const int64_t nbytes = Nbytes(operand);
    copies_.push_back(std::make_unique<Scratch>(operand->ctx, nbytes, stream_));
    if (!Workspace::Querying())
      Check(op_, cudaMemcpyAsync(copies_.back()->data(), operand->data, nbytes,
                                 cudaMemcpyDeviceToDevice, Native(stream_)));
    return copies_.back()->floats();
  }

  // Dequantizes a uint8 operand where the kernels take none.
  void Dequantize(Gemm* gemm) {
    dequantized_.push_back(std::make_unique<Dequantized>(op_, gemm, stream_));
  }

 private:
  const char* op_;
  const DLArrayList* states_;
  DLStream stream_;
  std::vector<std::unique_ptr<Scratch>> copies_;
  std::vector<std::unique_ptr<Dequantized>> dequantized_;
};

// Describes the GEMMs except for their tiling, the one with most work first.
void CollectMembers(const char* op, const Lists& lists, Precision precision, Operands* operands,
                    GroupedGemm* group) {
  int64_t next = lists.left->count;  // the next parameter whose gradient is operand sums
  for (int64_t k = 0; k < lists.left->count; k++) {
    const DLArray *a = lists.left->arrays[k], *b = lists.right->arrays[k];
    if (a->ndim != 2 || b->ndim != 2)
      Fail("%s: expected matrices, got %s and %s", op, ShapeText(a).c_str(), ShapeText(b).c_str());
    DLArray c = *lists.states->arrays[k];  // the gradient, shaped as the GEMM writes it
    int64_t shape[2] = {a->shape[1], b->shape[1]};
    c.ndim = 2, c.shape = shape;
    GroupMember& member = group->members[group->count++];
    Gemm& gemm = member.params.gemm;
    const U8Operand u8 = (U8Operand)lists.options.u8[k];
    const DLArray* scale = u8 == U8Operand::kNone ? nullptr : lists.u8_scale->arrays[0];
    gemm = CheckedGemm(op, a, true, b, false, &c, u8, scale);
    gemm.a = operands->Of(a), gemm.b = operands->Of(b);
    gemm.precision = precision;
    operands->Dequantize(&gemm);
    group->u8 |= gemm.u8 != U8Operand::kNone;
    CollectStates(op, lists, k, gemm.m * gemm.n, member.states);
    if (const int sums = lists.options.sums[k]) {
      gemm.sums_of_a = sums == kOperandA;
      CollectStates(op, lists, next++, gemm.sums_of_a ? gemm.m : gemm.n, member.sum_states);
      gemm.sums = member.sum_states[0];
    }
  }
  const auto work = [](const GroupMember& member) {
    const Gemm& p = member.params.gemm;
    return (double)p.m * p.n * p.k;
  };
  std::stable_sort(group->members, group->members + group->count,
                   [&](const GroupMember& a, const GroupMember& b) { return work(a) > work(b); });
}

// The tiling of that index, as tilings of floats and of bytes.
template <class F>
void WithUniform(int tiling, F&& f) {
  WithTiling<Fp32Tilings>(tiling, [&](auto of) {  // as large as those of tf32
    f(Type<Uniform<typename decltype(of)::type>>());
  });
}
template <class F>
void WithMixed(int mixed, F&& f) {
  WithTiling<MixedTilings>(mixed, f);
}

template <class T>
TileSize SizeOf() {
  return {T::kTileM, T::kTileN};
}

// Takes less splits, and then another of `count` tilings, until all blocks are resident together,
// since they wait for those of other ranks. `with` is one of the two above.
template <class With>
void MakeResident(const char* op, const std::vector<Gemm>& gemms, int device, With&& with,
                  int count, int* tiling, int* splits) {
  const auto fits = [&] {
    int64_t tiles = 0, room = 0;
    with(*tiling, [&](auto of) {
      using T = typename decltype(of)::type;
      for (const Gemm& gemm : gemms) {
        const TileSize size = gemm.u8 == U8Operand::kNone ? SizeOf<typename T::OfFloats>()
                              : gemm.u8 == U8Operand::kA  ? SizeOf<typename T::OfU8A>()
                                                          : SizeOf<typename T::OfU8B>();
        tiles += CeilDiv(gemm.m, size.m) * CeilDiv(gemm.n, size.n);
      }
      room = std::min(T::OfFloats::kResident, T::OfU8A::kResident) * Multiprocessors(device);
      if (T::kNbytes + 4096 > SharedLimit(device)) room = 0;
    });
    // A cluster stays within a GPC: not all multiprocessors have room for one.
    return tiles * *splits <= (*splits > 2 ? room * 85 / 100 : room);
  };
  while (*splits > 1 && !fits()) *splits /= 2;
  for (int other = 0; !fits(); other++) {
    if (other == count)
      Fail(
          "%s: the tiles do not run together, which sums over ranks need; leave them out with "
          "DLSYS_FUSION=-weight_update",
          op);
    *tiling = other;
  }
}

void RunGroupedGemm(const char* op, const Lists& lists, Precision precision, GroupedGemm* group,
                    DLStream stream) {
  CheckLists(op, lists);
  Operands operands(op, lists.states, stream);
  CollectMembers(op, lists, precision, &operands, group);
  const int device = lists.states->arrays[0]->ctx.device_id, major = ComputeMajor(device);
  const bool tf32 = precision == Precision::kTf32 && major >= 8, mixed = group->u8 && !tf32;
  std::vector<Gemm> gemms;
  for (int k = 0; k < group->count; k++) gemms.push_back(group->members[k].params.gemm);
  const int max_splits = major >= 9 ? kMaxSplits : 1;
  TileConfig uniform = {};
  MixedConfig config = {};
  if (mixed)
    config = BestMixedConfig(gemms.data(), group->count, max_splits);
  else
    uniform = BestTileConfig(tf32 ? KernelFamily::kTf32 : KernelFamily::kFp32, gemms.data(),
                             group->count, max_splits);
  if (lists.options.ranks && mixed) {
    MakeResident(
        op, gemms, device, [](int of, auto&& f) { WithMixed(of, f); },
        std::tuple_size_v<MixedTilings>, &config.mixed, &config.splits);
    WithMixed(config.mixed, [&](auto of) {
      using T = typename decltype(of)::type;
      config.of_floats = SizeOf<typename T::OfFloats>();
      config.of_u8_a = SizeOf<typename T::OfU8A>(), config.of_u8_b = SizeOf<typename T::OfU8B>();
    });
  } else if (lists.options.ranks) {
    MakeResident(
        op, gemms, device, [](int of, auto&& f) { WithUniform(of, f); },
        std::tuple_size_v<Fp32Tilings>, &uniform.tiling, &uniform.splits);
  }
  group->splits = mixed ? config.splits : uniform.splits;
  unsigned blocks = 0;
  for (int k = 0; k < group->count; k++) {
    GroupMember& member = group->members[k];
    GemmParams& params = member.params;
    params = mixed ? MakeParams(op, gemms[k], config.Of(gemms[k].u8), config.splits)
                   : MakeParams(op, gemms[k], uniform);
    for (int j = 1; j < lists.state_count; j++) params.aligned_out &= Aligned16(member.states[j]);
    group->first_block[k] = (int)blocks;
    blocks += (unsigned)(params.tiles * params.splits);
  }
  const auto launch = mixed       ? LaunchMixed
                      : !tf32     ? LaunchUniform<Fp32Tilings, Fp32Accumulator, false>
                      : group->u8 ? LaunchUniform<Tf32Tilings, Tf32Accumulator, true>
                                  : LaunchUniform<Tf32Tilings, Tf32Accumulator, false>;
  launch(op, mixed ? config.mixed : uniform.tiling, *group, blocks, lists.options.ranks, major >= 9,
         stream);
}

template <class Rule>
const char* MatmulName() {
  static const std::string name = std::string("matmul_") + Rule::name;
  return name.c_str();
}

// Updates each parameter by that rule with gradient left[k]^T right[k], or the sums of one of the
// two.
template <class Rule, int kRule>
void MatmulUpdate(DLArrayList* states, const DLArrayList* left, const DLArrayList* right,
                  const DLArrayList* lr, const DLArrayList* step, const DLArrayList* count,
                  const DLArrayList* scale, const DLArrayList* u8_scale,
                  Struct<WeightUpdateOptions> options, DLStream stream) {
  const char* op = MatmulName<Rule>();
  EnterAll(op, {states, left, right, lr, step, count, scale, u8_scale});
  GroupedGemm group = {};
  group.source = CheckedSource(op, lr, step, count, scale, options->update);
  group.rule = kRule;
  group.every_run = Rule::kEveryRun;
  RunGroupedGemm(op, {states, left, right, u8_scale, Rule::kStates, *options},
                 CheckedPrecision(op, options->precision), &group, stream);
}

#define DLSYS_UPDATE(Rule)                                                   \
  DLSYS_KERNEL_OF(cuda, matmul_##Rule, MatmulName<rule::Rule>(), DL_FLOAT32, \
                  MatmulUpdate<rule::Rule, k##Rule>);
DLSYS_RULES(DLSYS_UPDATE)
#undef DLSYS_UPDATE

}  // namespace
}  // namespace cuda
}  // namespace dlsys
