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
  bool depth_fastest;  // of op(W) in memory
  bool rows;           // the result lies row by row, as a loss reads it, and not in a sheet
  int from_at, to_at, bias_at;
  int activation, slope;  // by the numbers of epilogue.h
  float* out;             // (rows, width)
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
  int copies, first_copies;  // these are what the first stage needs
  int layers, stages;        // a stage of each layer, then as many as there are gradients
  int sheets, logits_at, gradients_at, parts_at;  // numbers of all sheets, which come first
  float* dlogits;
  Copy copy[2 * kMostLayers];
  Stage stage[2 * kMostLayers];
};

__host__ __device__ constexpr int Whole(int n) { return (n + 3) / 4 * 4; }

// ---- sheets: kRows numbers of each column, columns up to whole quads ----

template <int kRows>
constexpr int kQuadPitch = 4 * kRows + 4;  // of four columns; the rest spreads them over the banks

template <int kRows>
__host__ __device__ constexpr int SheetNumel(int columns) {
  return (columns + 3) / 4 * kQuadPitch<kRows>;
}
template <int kRows>
__device__ __forceinline__ int At(int column) {
  return column / 4 * kQuadPitch<kRows> + column % 4 * kRows;
}

template <int kRows>
__device__ __forceinline__ void ReadColumn(const float* from, float (&to)[kRows]) {
  if constexpr (kRows % 4 == 0) {
#pragma unroll
    for (int r = 0; r < kRows; r += 4) {
      const float4 v = *(const float4*)(from + r);
      to[r] = v.x, to[r + 1] = v.y, to[r + 2] = v.z, to[r + 3] = v.w;
    }
  } else {
#pragma unroll
    for (int r = 0; r < kRows; r++) to[r] = from[r];
  }
}

// ---- products of a sheet and op(W) ----
// A thread takes the columns of a slot and a share of the depth. Its sums, kColumns * kRows of
// them, go to parts (groups, sums of a thread, slots), where a group has one share of the depth.

constexpr int kDeepColumns = 2;  // of a slot where the depth is fastest: slot, slot + slots
constexpr int kWideColumns = 4;  // and where the width is: 4 slot to 4 slot + 3

// The pitch of rows of W: whole quads, an odd number of them, so that quads of one column of rows
// are spread over the banks.
__host__ __device__ constexpr int Pitch(int row) { return (row + 3) / 4 * 4 | 4; }

__host__ __device__ constexpr int Slots(int width, bool depth_fastest) {
  const int columns = depth_fastest ? kDeepColumns : kWideColumns;
  return (width + columns - 1) / columns;
}

// How many threads stand side by side along the slots; the groups of so many share out the depth.
__host__ __device__ inline int Across(int slots) {
  int across = kLeastAcross;
  while (across < slots && across < kHeadThreads) across *= 2;
  return across;
}

template <int kRows, bool kDepthFastest>
__device__ __forceinline__ int Sum(const Stage& stage, const float* w, const float* in,
                                   float* parts) {
  constexpr int kColumns = kDepthFastest ? kDeepColumns : kWideColumns;
  const int slots = Slots(stage.width, kDepthFastest), across = Across(slots);
  const int group = threadIdx.x / across, groups = kHeadThreads / across;
  const int quads = (stage.depth + 3) / 4, share = (quads + groups - 1) / groups;
  const int begin = group * share, end = min(begin + share, quads);
  for (int slot = threadIdx.x % across; slot < slots && begin < end; slot += across) {
    float sums[kColumns][kRows] = {};
#pragma unroll 2
    for (int q = begin; q < end; q++) {
      float4 v[4];  // of each column, or of each of four layers
#pragma unroll
      for (int e = 0; e < (kDepthFastest ? kColumns : 4); e++) {
        const int row = kDepthFastest ? min(slot + e * slots, stage.width - 1)
                                      : min(4 * q + e, stage.depth - 1);
        v[e] = *(const float4*)(w + row * stage.pitch + 4 * (kDepthFastest ? q : slot));
      }
#pragma unroll
      for (int e = 0; e < 4; e++) {  // layers, that are zero in the sheet beyond the last
        float x[kRows];
        ReadColumn<kRows>(in + q * kQuadPitch<kRows> + e * kRows, x);
#pragma unroll
        for (int c = 0; c < kColumns; c++) {
          const float4 of = v[kDepthFastest ? c : e];
          const int k = kDepthFastest ? e : c;
          const float factor = k == 0 ? of.x : k == 1 ? of.y : k == 2 ? of.z : of.w;
#pragma unroll
          for (int r = 0; r < kRows; r++) sums[c][r] = fmaf(factor, x[r], sums[c][r]);
        }
      }
    }
    float* to = parts + group * kColumns * kRows * slots + slot;
#pragma unroll
    for (int c = 0; c < kColumns; c++)
#pragma unroll
      for (int r = 0; r < kRows; r++) to[(c * kRows + r) * slots] = sums[c][r];
  }
  return (quads + share - 1) / share;
}

// One stage for `valid` rows from `first` on; all threads have what it leaves.
template <int kRows>
__device__ __forceinline__ void Run(const Stage stage, int parts_at, int64_t first, int valid,
                                    float* memory) {
  const float *w = memory + stage.weight_at, *in = memory + stage.from_at;
  float *parts = memory + parts_at, *to = memory + stage.to_at;
  const int count = stage.depth_fastest ? Sum<kRows, true>(stage, w, in, parts)
                                        : Sum<kRows, false>(stage, w, in, parts);
  __syncthreads();
  const int slots = Slots(stage.width, stage.depth_fastest);
  const int columns = stage.depth_fastest ? kDeepColumns : kWideColumns;
  const int along = stage.depth_fastest ? 1 : kWideColumns, apart = stage.depth_fastest ? slots : 1;
  const int pitch = columns * kRows * slots;
#pragma unroll 1
  for (int number = threadIdx.x / 32; number < columns * kRows; number += kWarps) {
    const int c = number / kRows, r = number % kRows;
#pragma unroll 1
    for (int slot = threadIdx.x % 32; slot < slots; slot += 32) {
      const int column = slot * along + c * apart;
      if (column >= stage.width) break;
      const float* from = parts + number * slots + slot;
      float x = from[0];
#pragma unroll 4
      for (int part = 1; part < count; part++) x += from[part * pitch];
      if (stage.bias_at >= 0) x += memory[stage.bias_at + column];
      float& place = to[stage.rows ? r * stage.width + column : At<kRows>(column) + r];
      x = Ended(stage.activation, stage.slope, stage.slope ? place : 0.f, x);
      place = x;
      if (stage.out && r < valid) stage.out[(first + r) * stage.width + column] = x;
    }
  }
  __syncthreads();
}

// ---- the kernel ----

__device__ __forceinline__ void Begin(const Copy copy, float* memory) {
  const bool whole = copy.row % 4 == 0 && (uintptr_t)copy.from % 16 == 0;
#pragma unroll 2
  for (int row = threadIdx.x / 32; row < copy.rows; row += kWarps) {
    float* to = memory + copy.at + row * Pitch(copy.row);
    const float* from = copy.from + row * copy.row;
#pragma unroll 1
    for (int at = threadIdx.x % 32 * 4; at < copy.row; at += 128)
      CopyQuad(to + at, from + at, copy.row - at, whole);
  }
}

template <int kRows>
__device__ __forceinline__ void ReadRows(const float* x, int k, int valid, float* sheet) {
  const bool whole = k % 4 == 0 && (uintptr_t)x % 16 == 0;
#pragma unroll 2
  for (int i = threadIdx.x; i < (k + 3) / 4 * kRows; i += kHeadThreads) {
    const int r = i % kRows, column = i / kRows * 4;
    const float* from = x + (int64_t)r * k + column;
    const int room = r < valid ? k - column : 0;
    float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
    if (whole) {
      if (room > 0) v = *(const float4*)from;
    } else {
      if (room > 0) v.x = from[0];
      if (room > 1) v.y = from[1];
      if (room > 2) v.z = from[2];
      if (room > 3) v.w = from[3];
    }
    float* to = sheet + At<kRows>(column) + r;
    to[0] = v.x, to[kRows] = v.y, to[2 * kRows] = v.z, to[3 * kRows] = v.w;
  }
}

template <int kRows, class Labels>
__global__ __launch_bounds__(kHeadThreads, 1) void HeadKernel(const __grid_constant__ Head given,
                                                              Labels labels, Meeting meeting,
                                                              float scale, float* loss) {
  static_assert(kRows <= kWarps, "a warp has a row's loss");
  float* const memory = DynamicShared<float>();
  __shared__ float of_warp[kWarps];
  __shared__ Head head;  // each of a parameter's lines is slow to come when it is first read
  for (int i = threadIdx.x; i < (int)(sizeof(Head) / 4); i += kHeadThreads)
    ((int*)&head)[i] = ((const int*)&given)[i];
  __syncthreads();
  // Columns beyond the last of a sheet are read, and times zero they must be zero.
  for (int i = threadIdx.x; i < head.sheets; i += kHeadThreads) memory[i] = 0.f;
  __syncthreads();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float sum = 0.f;
  WaitForEarlierKernels();
#pragma unroll 1
  for (int64_t first = (int64_t)blockIdx.x * kRows; first < head.rows;
       first += (int64_t)gridDim.x * kRows) {
    const int valid = (int)min((int64_t)kRows, head.rows - first);
    const bool exists = warp < valid;
    const auto label = labels.Hold(first + warp, exists);
    ReadRows<kRows>(head.x + first * head.k, head.k, valid, memory + head.stage[0].from_at);
    if (first == (int64_t)blockIdx.x * kRows) {
#pragma unroll 1
      for (int c = 0; c < head.copies; c++) {
        Begin(head.copy[c], memory);
        if (c == head.first_copies - 1) CloseCopies();
      }
      CloseCopies();
    }
    WaitForCopies<1>();
    __syncthreads();
#pragma unroll 1
    for (int s = 0; s < head.stages; s++) {
      if (s == 1) {
        WaitForCopies<0>();
        __syncthreads();
      }
      Run<kRows>(head.stage[s], head.parts_at, first, valid, memory);
      if (s != head.layers - 1) continue;
      float* sheet = memory + head.gradients_at;
      const int classes = head.classes;
      if (warp < kRows) {
        float* of_row = head.dlogits + (first + warp) * classes;
        const auto put = [&](int64_t c, float d) {
          of_row[c] = d;
          sheet[At<kRows>((int)c) + warp] = d;
        };
        const float one = labels.template Row<32>(memory + head.logits_at + warp * classes, label,
                                                  classes, exists ? classes : 0, lane, put);
        if (exists && lane == 0) sum += one;
        for (int c = lane; !exists && c < classes; c += 32) sheet[At<kRows>(c) + warp] = 0.f;
      }
      __syncthreads();
    }
  }
  LetNextKernelBegin();
  if (lane == 0) of_warp[warp] = sum;
  __syncthreads();
  sum = of_warp[0];
  for (int k = 1; k < kWarps; k++) sum += of_warp[k];
  AddUp(sum, meeting, scale, loss);
}

}  // namespace dense
}  // namespace cuda
}  // namespace dlsys
