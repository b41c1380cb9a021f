// Optimizer steps in place whose gradients lie in parts, to be added: what the blocks of the kernel
// before left. One launch for all parameters; a block adds some columns of one parameter's parts
// (parts, size) in a fixed order and steps its elements, so that no gradient is written.
//
// Parts and states are float32, contiguous; parts are only read and overlap no state. Latency
// limits it where the parts are few, else memory bandwidth.
#include <string>

#include "cuda/runtime/launch.cuh"
#include "cuda/runtime/lists.cuh"
#include "math/optimizer_args.h"

namespace dlsys {
namespace cuda {
namespace {

constexpr int kMaxSummed = 16;            // parameters of a launch
constexpr int kLanes = 16, kRows = 16;    // threads side by side, each with four columns; and down
constexpr int kColumns = 4 * kLanes;      // of a block
static_assert(kLanes * kRows == kThreads && kColumns <= kThreads, "a thread steps one element");

template <int kStates>
struct Member {
  const float* parts;
  float* states[kStates];
  int64_t size;
  int count, first_block;
  bool aligned;  // rows of parts allow 16-byte loads
};

template <int kStates>
struct Members {
  Member<kStates> of[kMaxSummed];
  int count;
};

// ---- kernels ----

template <class Rule>
__global__ void SummedUpdateKernel(const __grid_constant__ Members<Rule::kStates> members,
                                   rule::Source source) {
  constexpr int kStates = Rule::kStates;
  __shared__ __align__(16) float sums[kRows][kColumns];
  __shared__ rule::Step<Rule> shared;
  int k = 0;
  while (k + 1 < members.count && (int)blockIdx.x >= members.of[k + 1].first_block) k++;
  const Member<kStates>& member = members.of[k];
  const int64_t begin = (int64_t)((int)blockIdx.x - member.first_block) * kColumns;
  const int lane = (int)threadIdx.x % kLanes, row = (int)threadIdx.x / kLanes;
  const int64_t column = begin + 4 * lane, at = begin + (int)threadIdx.x;
  const bool steps = (int)threadIdx.x < kColumns && at < member.size;
  GridDependencySynchronize();
  TriggerProgrammaticLaunch();
  if (!source.Due(Rule::kEveryRun)) return;
  rule::Source::Seen seen = {};
  if (threadIdx.x == 0) seen = source.Look();
  float states[kStates] = {};
#pragma unroll
  for (int j = 0; j < kStates; j++)
    if (steps) states[j] = member.states[j][at];
  float sum[4] = {};
  const float* from = member.parts + row * member.size + column;
  if (member.aligned && column < member.size) {
#pragma unroll 8
    for (int p = row; p < member.count; p += kRows, from += kRows * member.size) {
      const float4 v = *(const float4*)from;
      sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w;
    }
  } else {
#pragma unroll 2
    for (int p = row; p < member.count; p += kRows, from += kRows * member.size)
#pragma unroll
      for (int e = 0; e < 4; e++)
        if (column + e < member.size) sum[e] += from[e];
  }
  *(float4*)&sums[row][4 * lane] = make_float4(sum[0], sum[1], sum[2], sum[3]);
  if (threadIdx.x == 0) shared = source.Make<Rule>(seen);
  __syncthreads();
  if (!steps) return;
  float gradient = 0.f;
#pragma unroll
  for (int r = 0; r < kRows; r++) gradient += sums[r][threadIdx.x];
  shared(states, gradient);
#pragma unroll
  for (int j = 0; j < kStates; j++) member.states[j][at] = states[j];
}

// ---- launchers ----

template <class Rule>
const char* SummedName() {
  static const std::string name = std::string("summed_") + Rule::name;
  return name.c_str();
}

// Each parameter's gradient is the sum of its parts, (parts, ...); state j of parameter k is at j *
// parameters + k.
template <class Rule>
void SummedUpdate(DLArrayList* states, const DLArrayList* parts, const DLArrayList* lr,
                  const DLArrayList* step, const DLArrayList* count, const DLArrayList* scale,
                  Struct<rule::UpdateOptions> options, DLStream stream) {
  const char* op = SummedName<Rule>();
  EnterAll(op, {states, parts, lr, step, count, scale});
  const int64_t parameters = parts->count;
  if (parameters < 1 || parameters > kMaxSummed || states->count != parameters * Rule::kStates)
    Fail("%s: expected the parts and states of 1 to %d parameters, got %ld and %ld", op, kMaxSummed,
         (long)parameters, (long)states->count);
  const rule::Source source = CheckedSource(op, lr, step, count, scale, *options);
  Members<Rule::kStates> members = {};
  unsigned blocks = 0;
  for (int64_t k = 0; k < parameters; k++) {
    const DLArray* of = parts->arrays[k];
    const int64_t size = Numel(states->arrays[k]);
    if (of->ndim < 1 || of->shape[0] > INT32_MAX || Numel(of) != of->shape[0] * size)
      Fail("%s: parts %s do not fit a parameter %s", op, ShapeText(of).c_str(),
           ShapeText(states->arrays[k]).c_str());
    if (size == 0) continue;
    Member<Rule::kStates>& member = members.of[members.count++];
    member.parts = In(op, of);
    for (int j = 0; j < Rule::kStates; j++) {
      DLArray* state = states->arrays[j * parameters + k];
      if (Numel(state) != size) Fail("%s: expected states of one shape", op);
      member.states[j] = Out(op, state);
    }
    member.size = size, member.count = (int)of->shape[0], member.first_block = (int)blocks;
    member.aligned = size % 4 == 0 && Aligned16(member.parts);
    blocks += (unsigned)CeilDiv(size, kColumns);
  }
  const bool pdl = ComputeMajor(states->arrays[0]->ctx.device_id) >= 9;
  LaunchClusters(op, SummedUpdateKernel<Rule>, blocks, 1, kThreads, 0, pdl, stream, members,
                 source);
}

#define DLSYS_UPDATE(Rule)                                                   \
  DLSYS_KERNEL_OF(cuda, summed_##Rule, SummedName<rule::Rule>(), DL_FLOAT32, \
                  SummedUpdate<rule::Rule>);
DLSYS_RULES(DLSYS_UPDATE)
#undef DLSYS_UPDATE

}  // namespace
}  // namespace cuda
}  // namespace dlsys
