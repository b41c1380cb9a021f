// Optimizer steps in place whose gradients lie in parts, to be added: what the blocks of the kernel
// before left. One launch for all parameters; a block adds some columns of one parameter's parts
// (count, size) in a fixed order and steps its elements, so that no gradient is written.
//
// Parts and states are float32, contiguous; parts are only read and overlap no state. Latency
// limits it where the parts are few, else memory bandwidth.
#include <string>

#include "cuda/optim/summed_update.cuh"
#include "cuda/runtime/launch.cuh"
#include "cuda/runtime/lists.cuh"
#include "operators/optimizer_args.h"

namespace dlsys {
namespace cuda {
namespace {

constexpr int kWarps = kThreads / 32;
// Threads side by side, each with four columns: few where these are few, for more blocks then add
// them, and a thread has fewer parts.
constexpr int kManyLanes = 16, kFewLanes = 4;
static_assert(4 * kManyLanes <= kThreads && kManyLanes < 32, "a thread steps one element");

template <int kStates>
struct Member {
  SummedParameter<kStates> of;
  int first_block;
  bool aligned;  // parts allow 16-byte loads
};

template <int kStates>
struct Members {
  Member<kStates> member[kMaxSummed];
  int count;
};

// ---- kernels ----

template <class Rule, int kLanes>
__global__ void SummedUpdateKernel(const __grid_constant__ Members<Rule::kStates> members,
                                   rule::Source source) {
  constexpr int kStates = Rule::kStates, kColumns = 4 * kLanes, kRows = kThreads / kLanes;
  __shared__ __align__(16) float sums[kWarps][kColumns];
  __shared__ rule::Step<Rule> shared;
  int k = 0;
  while (k + 1 < members.count && (int)blockIdx.x >= members.member[k + 1].first_block) k++;
  const SummedParameter<kStates>& of = members.member[k].of;
  const int64_t begin = (int64_t)((int)blockIdx.x - members.member[k].first_block) * kColumns;
  const int lane = (int)threadIdx.x % kLanes, row = (int)threadIdx.x / kLanes;
  const int64_t column = begin + 4 * lane, at = begin + (int)threadIdx.x;
  const bool steps = (int)threadIdx.x < kColumns && at < of.size;
  GridDependencySynchronize();
  TriggerProgrammaticLaunch();
  if (!source.Due(Rule::kEveryRun)) return;
  rule::Source::Seen seen = {};
  if (threadIdx.x == 0) seen = source.Look();
  float states[kStates] = {};
#pragma unroll
  for (int j = 0; j < kStates; j++)
    if (steps) states[j] = of.states[j][at];
  float sum[4] = {};
  const float* from = of.parts + row * of.pitch + column;
  if (members.member[k].aligned && column < of.size) {
#pragma unroll 8
    for (int p = row; p < of.count; p += kRows, from += kRows * of.pitch) {
      const float4 v = *(const float4*)from;
      sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w;
    }
  } else {
#pragma unroll 2
    for (int p = row; p < of.count; p += kRows, from += kRows * of.pitch)
#pragma unroll
      for (int e = 0; e < 4; e++)
        if (column + e < of.size) sum[e] += from[e];
  }
#pragma unroll
  for (int distance = kLanes; distance < 32; distance *= 2)
#pragma unroll
    for (int e = 0; e < 4; e++) sum[e] += __shfl_xor_sync(0xffffffffu, sum[e], distance);
  if ((int)threadIdx.x % 32 < kLanes)
    *(float4*)&sums[threadIdx.x / 32][4 * lane] = make_float4(sum[0], sum[1], sum[2], sum[3]);
  if (threadIdx.x == 0) shared = source.Make<Rule>(seen);
  __syncthreads();
  if (!steps) return;
  float gradient = 0.f;
#pragma unroll
  for (int w = 0; w < kWarps; w++) gradient += sums[w][threadIdx.x];
  shared(states, gradient);
#pragma unroll
  for (int j = 0; j < kStates; j++) of.states[j][at] = states[j];
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
  SummedParameter<Rule::kStates> members[kMaxSummed];
  for (int64_t k = 0; k < parameters; k++) {
    const DLArray* of = parts->arrays[k];
    const int64_t size = Numel(states->arrays[k]);
    if (of->ndim < 1 || of->shape[0] > INT32_MAX || Numel(of) != of->shape[0] * size)
      Fail("%s: parts %s do not fit a parameter %s", op, ShapeText(of).c_str(),
           ShapeText(states->arrays[k]).c_str());
    members[k] = {In(op, of), size, size, (int)of->shape[0], {}};
    for (int j = 0; j < Rule::kStates; j++) {
      DLArray* state = states->arrays[j * parameters + k];
      CheckSameShape(op, state, states->arrays[k]);
      members[k].states[j] = Out(op, state);
    }
  }
  RunSummedUpdate<Rule>(op, members, (int)parameters,
                        CheckedSource(op, lr, step, count, scale, *options),
                        states->arrays[0]->ctx.device_id, stream);
}

#define DLSYS_UPDATE(Rule)                                                   \
  DLSYS_KERNEL_OF(cuda, summed_##Rule, SummedName<rule::Rule>(), DL_FLOAT32, \
                  SummedUpdate<rule::Rule>);
DLSYS_RULES(DLSYS_UPDATE)
#undef DLSYS_UPDATE

}  // namespace

template <class Rule>
void RunSummedUpdate(const char* op, const SummedParameter<Rule::kStates>* parameters, int count,
                     const rule::Source& source, int device, DLStream stream) {
  Members<Rule::kStates> members = {};
  int64_t many = 0;  // blocks of many lanes
  for (int k = 0; k < count; k++) many += CeilDiv(parameters[k].size, 4 * kManyLanes);
  const bool few = 2 * many < Multiprocessors(device);
  const int columns = 4 * (few ? kFewLanes : kManyLanes);
  unsigned blocks = 0;
  for (int k = 0; k < count; k++) {
    const SummedParameter<Rule::kStates>& of = parameters[k];
    if (of.size == 0) continue;
    const bool aligned =
        of.pitch % 4 == 0 && Aligned16(of.parts) && RoundUp(of.size, 4) <= of.pitch;
    members.member[members.count++] = {of, (int)blocks, aligned};
    blocks += (unsigned)CeilDiv(of.size, columns);
  }
  const auto kernel =
      few ? SummedUpdateKernel<Rule, kFewLanes> : SummedUpdateKernel<Rule, kManyLanes>;
  LaunchSmall(op, kernel, blocks, 1, kThreads, 0, ComputeMajor(device) >= 9, stream, members,
              source);
}

#define DLSYS_RUN(Rule)                                                                       \
  template void RunSummedUpdate<rule::Rule>(const char*,                                      \
                                            const SummedParameter<rule::Rule::kStates>*, int, \
                                            const rule::Source&, int, DLStream);
DLSYS_RULES(DLSYS_RUN)
#undef DLSYS_RUN

}  // namespace cuda
}  // namespace dlsys
