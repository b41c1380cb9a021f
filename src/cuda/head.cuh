// The kernel of the dense layers at a network's end, softmax cross-entropy behind them and the
// gradients that go back through them, in one launch; all in true float32.
//
// A block takes a few rows all the way and back. Weights, biases and the rows' values lie in its
// shared memory, and only what others read is written besides. Each sum is made of parts by several
// warps, which are added in one order. head.cu makes the plan that it follows.
#pragma once
#include "cuda/epilogue.cuh"
#include "cuda/loss_rows.cuh"
#include "cuda/matmul_panel.cuh"

namespace dlsys {
namespace cuda {
namespace dense {

constexpr int kMostLayers = 6;
constexpr int kHeadThreads = 256;
constexpr int kWarps = kHeadThreads / 32;
constexpr int kLeastAcross = 8;  // threads side by side along the columns

// A product of a sheet and op(W) (depth, width), whose rows are padded with zeros to whole quads;
// and what becomes of each number x of it: slope(what it replaces, activation(x + bias)). The
// numbers below zero and the null pointers stand for what there is none of.
struct alignas(16) Stage {
  int weight_at, pitch, depth, width;
  bool depth_fastest;           // of op(W) in memory
  int from_at, to_at, bias_at;  // of sheets: rows of numbers, with a pitch
  int activation, slope;        // by the numbers of epilogue.h
  float* out;                   // (rows, width)
};

// Rows of a matrix on their way to shared memory.
struct Copy {
  const float* from;
  int at, rows, row;
};

struct Head {
  const float* x;
  int64_t rows;
  int k, classes;
  int copies;
  int layers, stages;  // a stage of each layer, then as many as there are gradients
  int logits_at, gradients_at, parts_at;
  bool early;  // weights and biases may be read before earlier kernels are done
  float* dlogits;
  Copy copy[2 * kMostLayers];
  Stage stage[2 * kMostLayers];
};

__host__ __device__ constexpr int Whole(int n) { return (n + 3) / 4 * 4; }

// The pitch of rows in shared memory: whole quads, an odd number of them, so that quads of one
// column of rows are spread over the banks.
__host__ __device__ constexpr int Pitch(int row) { return Whole(row) | 4; }

// ---- products of a sheet and op(W) ----
// A thread takes the columns of a slot and a share of the depth. Its sums, a row's after the other
// of each column, go to parts (groups, slots, sums), where a group has one share of the depth.

// How a stage goes about it: along a quad of layers at a time where the depth is fastest, of two
// columns or, where there are many, of four, which reads less of the sheet; else along four
// columns.
enum class Way { kTwoDeep, kDeep, kWide };
constexpr int kFewColumns = 32;

__host__ __device__ constexpr Way WayOf(bool depth_fastest, int width) {
  return !depth_fastest ? Way::kWide : width > kFewColumns ? Way::kDeep : Way::kTwoDeep;
}

// Columns of a slot: slot, slot + slots, ... where the depth is fastest, else 4 slot to 4 slot + 3.
template <Way kWay>
constexpr int kColumns = kWay == Way::kTwoDeep ? 2 : 4;

template <int kRows, Way kWay>
constexpr int kSums = kColumns<kWay> * kRows;
// Quads and one more, which spreads the slots over the banks.
template <int kRows, Way kWay>
constexpr int kSumsPitch = Whole(kSums<kRows, kWay>) + 4;

template <Way kWay>
__host__ __device__ constexpr int Slots(int width) {
  return (width + kColumns<kWay> - 1) / kColumns<kWay>;
}

// How many threads stand side by side along the slots; the groups of so many share out the depth.
__host__ __device__ inline int Across(int slots) {
  int across = kLeastAcross;
  while (across < slots && across < kHeadThreads) across *= 2;
  return across;
}

template <int kRows, Way kWay>
__host__ __device__ int PartsNumel(int width) {
  const int slots = Slots<kWay>(width);
  return kHeadThreads / Across(slots) * slots * kSumsPitch<kRows, kWay>;
}

// Leaves the parts; returns how many there are of each sum.
template <int kRows, Way kWay>
__device__ __forceinline__ int Sum(const Stage stage, const float* w, const float* in,
                                   float* parts) {
  constexpr bool kDepthFastest = kWay != Way::kWide;
  constexpr int kOfSlot = kColumns<kWay>;
  const int slots = Slots<kWay>(stage.width), across = Across(slots);
  const int group = threadIdx.x / across, groups = kHeadThreads / across;
  const int quads = (stage.depth + 3) / 4, share = (quads + groups - 1) / groups;
  const int in_pitch = Pitch(stage.depth);
  const int begin = group * share, end = min(begin + share, quads);
  for (int slot = threadIdx.x % across; slot < slots && begin < end; slot += across) {
    float sums[kOfSlot * kRows] = {};
#pragma unroll 1
    for (int q = begin; q < end; q++) {
      float v[4][4];  // of each column four layers, or of each of four layers the columns
#pragma unroll
      for (int e = 0; e < (kDepthFastest ? kOfSlot : 4); e++) {
        const int row = kDepthFastest ? min(slot + e * slots, stage.width - 1)
                                      : min(4 * q + e, stage.depth - 1);
        *(float4*)v[e] = *(const float4*)(w + row * stage.pitch + 4 * (kDepthFastest ? q : slot));
      }
#pragma unroll
      for (int r = 0; r < kRows; r++) {
        float x[4];  // layers, that are zero in the sheet beyond the last
        *(float4*)x = *(const float4*)(in + r * in_pitch + 4 * q);
#pragma unroll
        for (int e = 0; e < 4; e++)
#pragma unroll
          for (int c = 0; c < kOfSlot; c++)
            sums[c * kRows + r] =
                fmaf(kDepthFastest ? v[c][e] : v[e][c], x[e], sums[c * kRows + r]);
      }
    }
    float* to = parts + (group * slots + slot) * kSumsPitch<kRows, kWay>;
    if constexpr (kOfSlot * kRows % 4 == 0) {
#pragma unroll
      for (int k = 0; k < kOfSlot * kRows; k += 4)
        *(float4*)(to + k) = make_float4(sums[k], sums[k + 1], sums[k + 2], sums[k + 3]);
    } else {
#pragma unroll
      for (int k = 0; k < kOfSlot * kRows; k++) to[k] = sums[k];
    }
  }
  return (quads + share - 1) / share;
}

// Adds up `count` parts of each sum, kBatch sums of a thread beside each other, and makes of it
// what the stage says.
template <int kRows, Way kWay, int kBatch>
__device__ __forceinline__ void Finish(const Stage stage, const float* parts, int count,
                                       int64_t first, int valid, float* memory) {
  constexpr int kOfSlot = kSums<kRows, kWay>, kPitch = kSumsPitch<kRows, kWay>;
  const int slots = Slots<kWay>(stage.width), pitch = slots * kPitch;
  const int along = kWay == Way::kWide ? kColumns<kWay> : 1;
  const int apart = kWay == Way::kWide ? 1 : slots;
  const int to_pitch = Pitch(stage.width);
#pragma unroll 1
  for (int begin = threadIdx.x; begin < slots * kOfSlot; begin += kBatch * kHeadThreads) {
    float x[kBatch];
    int column[kBatch], at[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; b++) {
      const int k = min(begin + b * kHeadThreads, slots * kOfSlot - 1);
      const int slot = k / kOfSlot, of_slot = k % kOfSlot;
      column[b] = slot * along + of_slot / kRows * apart;
      x[b] = stage.bias_at >= 0 ? memory[stage.bias_at + column[b]] : 0.f;
      at[b] = slot * kPitch + of_slot;
    }
#pragma unroll(8 / kBatch)
    for (int part = 0; part < count; part++) {
#pragma unroll
      for (int b = 0; b < kBatch; b++) x[b] += parts[part * pitch + at[b]];
    }
#pragma unroll
    for (int b = 0; b < kBatch; b++) {
      const int k = begin + b * kHeadThreads, r = k % kRows;
      if (k >= slots * kOfSlot || column[b] >= stage.width) continue;
      float& place = memory[stage.to_at + r * to_pitch + column[b]];
      x[b] = Ended(stage.activation, stage.slope, stage.slope ? place : 0.f, x[b]);
      place = x[b];
      if (stage.out && r < valid) stage.out[(first + r) * stage.width + column[b]] = x[b];
    }
  }
}

// One stage for `valid` rows from `first` on; all threads have what it leaves.
template <int kRows, Way kWay>
__device__ __forceinline__ void Run(const Stage& stage, int parts_at, int64_t first, int valid,
                                    float* memory) {
  float* parts = memory + parts_at;
  const int count =
      Sum<kRows, kWay>(stage, memory + stage.weight_at, memory + stage.from_at, parts);
  __syncthreads();
  constexpr int kBatch = kWay == Way::kTwoDeep ? 1 : 4;  // few columns make no more
  Finish<kRows, kWay, kBatch>(stage, parts, count, first, valid, memory);
  __syncthreads();
}

// ---- the kernel ----

// Begins a copy and returns how many bytes of it arrive by this thread's bulk copies. Each block
// begins with other rows, so that not all ask for the same bytes at once.
__device__ __forceinline__ int Begin(const Copy copy, float of_grid, float* memory,
                                     Arrivals* arrivals) {
  const int ahead = (int)((float)copy.rows * of_grid), pitch = Pitch(copy.row);
  float* const to = memory + copy.at;
  const bool whole = copy.row % 4 == 0 && (uintptr_t)copy.from % 16 == 0;
  if (kHasBulkCopies && whole) {
    int nbytes = 0;
#pragma unroll 1
    for (int i = threadIdx.x; i < copy.rows; i += kHeadThreads) {
      const int row = i + ahead < copy.rows ? i + ahead : i + ahead - copy.rows;
      CopyBulk(to + row * pitch, copy.from + row * copy.row, copy.row * (int)sizeof(float),
               arrivals);
      nbytes += copy.row * (int)sizeof(float);
    }
    return nbytes;
  }
  int log = 5;  // of the threads that share a row
  while (log > 0 && 4 << (log - 1) >= copy.row) log--;
#pragma unroll 1
  for (int i = threadIdx.x >> log; i < copy.rows; i += kHeadThreads >> log) {
    const int row = i + ahead < copy.rows ? i + ahead : i + ahead - copy.rows;
#pragma unroll 1
    for (int at = (threadIdx.x & ((1 << log) - 1)) * 4; at < copy.row; at += 4 << log)
      CopyQuad(to + row * pitch + at, copy.from + row * copy.row + at, copy.row - at, whole);
  }
  return 0;
}

// Columns beyond the last of a sheet are read, and times zero they must be zero.
template <int kRows>
__device__ __forceinline__ void ClearRest(float* sheet, int columns) {
  const int rest = Whole(columns) - columns;
  if ((int)threadIdx.x < kRows * rest)
    sheet[threadIdx.x / rest * Pitch(columns) + columns + threadIdx.x % rest] = 0.f;
}

template <int kRows, class Labels>
__global__ __launch_bounds__(kHeadThreads, 1) void HeadKernel(const __grid_constant__ Head given,
                                                              Labels labels, Meeting meeting,
                                                              float scale, float* loss) {
  static_assert(kRows <= kWarps, "a warp has a row's loss");
  float* const memory = DynamicShared<float>();
  __shared__ float of_warp[kWarps];
  __shared__ Arrivals arrivals;
  __shared__ Head head;  // each of a parameter's lines is slow to come when it is first read
  if (threadIdx.x == 0) MakeArrivals(&arrivals, kHeadThreads);
#pragma unroll 1
  for (int i = threadIdx.x; i < (int)(sizeof(Head) / 4); i += kHeadThreads)
    ((int*)&head)[i] = ((const int*)&given)[i];
  __syncthreads();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float sum = 0.f;
  int nbytes = 0, phase = 0;
  if (!head.early) WaitForEarlierKernels();
#pragma unroll 1
  for (int c = 0; c < head.copies; c++)
    nbytes += Begin(head.copy[c], (float)blockIdx.x / (float)gridDim.x, memory, &arrivals);
#pragma unroll 1
  for (int s = 1; s < head.layers; s++)
    ClearRest<kRows>(memory + head.stage[s].from_at, head.stage[s].depth);
  ClearRest<kRows>(memory + head.gradients_at, head.classes);
  if (head.early) WaitForEarlierKernels();
#pragma unroll 1
  for (int64_t first = (int64_t)blockIdx.x * kRows; first < head.rows;
       first += (int64_t)gridDim.x * kRows) {
    const int valid = (int)min((int64_t)kRows, head.rows - first);
    const bool exists = warp < valid;
    const Copy rows = {head.x + first * head.k, head.stage[0].from_at, valid, head.k};
    nbytes += Begin(rows, 0.f, memory, &arrivals);
    CloseCopies();
    const auto label = labels.Hold(first + warp, exists);
    WaitForCopies<0>();
    Arrive(&arrivals, nbytes);
    WaitForArrivals(&arrivals, phase);
    phase ^= 1, nbytes = 0;
#pragma unroll 1
    for (int s = 0; s < head.stages; s++) {
      const Stage& stage = head.stage[s];
      const Way way = WayOf(stage.depth_fastest, stage.width);
      if (way == Way::kTwoDeep)
        Run<kRows, Way::kTwoDeep>(stage, head.parts_at, first, valid, memory);
      else if (way == Way::kDeep)
        Run<kRows, Way::kDeep>(stage, head.parts_at, first, valid, memory);
      else
        Run<kRows, Way::kWide>(stage, head.parts_at, first, valid, memory);
      if (s != head.layers - 1) continue;
      if (exists) {
        const int classes = head.classes, at = warp * Pitch(classes);
        float* of_row = head.dlogits + (first + warp) * classes;
        const auto put = [&](int64_t c, float d) {
          of_row[c] = d;
          memory[head.gradients_at + at + c] = d;
        };
        sum += labels.template Row<32, 1>(memory + head.logits_at + at, label, classes, classes,
                                          lane, put);
      }
      __syncthreads();
    }
    LetBulkFollow();
  }
  LetNextKernelBegin();
  if (lane == 0) of_warp[warp] = sum;
  __syncthreads();
  sum = of_warp[0];
#pragma unroll 1
  for (int k = 1; k < kWarps; k++) sum += of_warp[k];
  AddUp(sum, meeting, scale, loss);
}

}  // namespace dense
}  // namespace cuda
}  // namespace dlsys
