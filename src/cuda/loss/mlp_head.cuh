// The kernel of the dense layers at a network's end, softmax cross-entropy behind them and the
// gradients that go back through them, in one launch.
//
// A block takes a few rows all the way and back. Weights, biases and the rows' values lie in its
// shared memory, and only what others read is written besides. head_stage.cuh has the products, and
// head.cu makes the plan that the block follows.
#pragma once
#include "cuda/gemm/panel.cuh"
#include "cuda/loss/cross_entropy.cuh"
#include "cuda/loss/mlp_head_stage.cuh"

namespace dlsys {
namespace cuda {
namespace dense {

constexpr int kMostLayers = 6;

// Lines of a matrix on their way to shared memory, where they are `pitch` apart; the last may be
// shorter.
struct Copy {
  const float* from;
  int at, lines, line, last, pitch;
};

struct Head {
  const float* x;
  int64_t rows;
  int k, classes;
  int copies;
  int layers, stages;  // a stage of each layer, then as many as there are gradients
  int logits_at, gradients_at, parts_at;
  bool early;       // weights and biases may be read before earlier kernels are done
  bool rows_early;  // and so may x, by bulk copies
  float* dlogits;
  Copy copy[2 * kMostLayers];
  Stage stage[2 * kMostLayers];
};

// ---- the kernel ----

// The lanes of a warp begin bulk copies one after the other, each in some 75 cycles: lines go to
// warps in turn.
__device__ __forceinline__ int FirstLine() {
  return (int)threadIdx.x % 32 * kWarps + (int)threadIdx.x / 32;
}

// Begins a copy and returns how many bytes of it arrive by this thread's bulk copies. Each block
// begins with other lines, so that not all ask for the same bytes at once.
__device__ __forceinline__ int Begin(const Copy copy, float of_grid, float* memory,
                                     Arrivals* arrivals) {
  const int ahead = (int)((float)copy.lines * of_grid);
  float* const to = memory + copy.at;
  const bool whole = (copy.line | copy.last) % 4 == 0 && (uintptr_t)copy.from % 16 == 0;
  const auto line_of = [&](int i) {
    return i + ahead < copy.lines ? i + ahead : i + ahead - copy.lines;
  };
  const auto numel_of = [&](int line) { return line < copy.lines - 1 ? copy.line : copy.last; };
  if (kHasBulkCopies && whole) {
    int nbytes = 0;
#pragma unroll 1
    for (int i = FirstLine(); i < copy.lines; i += kHeadThreads) {
      const int line = line_of(i), of_line = numel_of(line) * (int)sizeof(float);
      CopyBulk(to + line * copy.pitch, copy.from + line * copy.line, of_line, arrivals);
      nbytes += of_line;
    }
    return nbytes;
  }
  int log = 5;  // of the threads that share a line
  while (log > 0 && 4 << (log - 1) >= copy.line) log--;
#pragma unroll 1
  for (int i = threadIdx.x >> log; i < copy.lines; i += kHeadThreads >> log) {
    const int line = line_of(i), numel = numel_of(line);
#pragma unroll 1
    for (int at = (threadIdx.x & ((1 << log) - 1)) * 4; at < numel; at += 4 << log)
      CopyQuad(to + line * copy.pitch + at, copy.from + line * copy.line + at, numel - at, whole);
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

template <int kRows, bool kTensor, class Labels>
__global__ __launch_bounds__(kHeadThreads, 1) void HeadKernel(const __grid_constant__ Head given,
                                                              Labels labels, Meeting meeting,
                                                              float scale, float* loss) {
  static_assert(kRows <= kWarps && kHeadThreads == kThreads, "a warp has a row; AddUp");
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
  const int64_t begin = (int64_t)blockIdx.x * kRows;
  const int row = FirstLine();
  if (head.rows_early && row < kRows && begin + row < head.rows) {
    nbytes = head.k * (int)sizeof(float);
    CopyBulk(memory + head.stage[0].from_at + row * Pitch(head.k), head.x + (begin + row) * head.k,
             nbytes, &arrivals);
  }
  if (!head.early) GridDependencySynchronize();
#pragma unroll 1
  for (int c = 0; c < head.copies; c++)
    nbytes += Begin(head.copy[c], (float)blockIdx.x / (float)gridDim.x, memory, &arrivals);
  ClearRest<kRows>(memory + head.gradients_at, head.classes);
  if (head.early) GridDependencySynchronize();
  const unsigned came_before = Come(meeting);
#pragma unroll 1
  for (int64_t first = begin; first < head.rows; first += (int64_t)gridDim.x * kRows) {
    const int valid = (int)min((int64_t)kRows, head.rows - first);
    const bool exists = warp < valid;
    const Copy rows = {
        head.x + first * head.k, head.stage[0].from_at, valid, head.k, head.k, Pitch(head.k)};
    if (first > begin || !head.rows_early) nbytes += Begin(rows, 0.f, memory, &arrivals);
    CloseCopies();
    const auto label = labels.Hold(first + warp, exists);
    WaitForCopies<0>();
    Arrive(&arrivals, nbytes);
    WaitForArrivals(&arrivals, phase);
    phase ^= 1, nbytes = 0;
#pragma unroll 1
    for (int s = 0; s < head.stages; s++) {
      Run<kRows, kTensor>(head.stage[s], head.parts_at, first, valid, memory);
      if (s != head.layers - 1) continue;
      if (exists) {
        const int classes = head.classes, at = warp * Pitch(classes);
        float* of_row = head.dlogits + (first + warp) * classes;
        const auto put = [&](int64_t c, float d) {
          of_row[c] = d;
          memory[head.gradients_at + at + c] = d;
        };
        sum += labels.template Row<32, 1>(memory + head.logits_at + at, first + warp, label,
                                          classes, classes, lane, put);
      }
      __syncwarp();
    }
    LetBulkFollow();
    __syncthreads();
  }
  TriggerProgrammaticLaunch();
  if (lane == 0) of_warp[warp] = sum;
  __syncthreads();
  sum = of_warp[0];
#pragma unroll
  for (int k = 1; k < kWarps; k++) sum += of_warp[k];
  AddUp(sum, came_before, meeting, scale, loss);
}

}  // namespace dense
}  // namespace cuda
}  // namespace dlsys
