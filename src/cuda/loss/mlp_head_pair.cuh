// The MLP head of two layers, a hidden one and the classes, for sm_90a (mlp_head.cu has the
// contract, and the general kernel). A block takes eight rows. TMA brings the hidden layer's
// weights to shared memory, rounded to tf32 if so, in panels of 32 inputs; it is asked before the
// kernel's predecessor ends. Between the two large products a warp has a row alone: hidden values,
// logits, loss and gradients of one row stay in its registers.
//
// Weights are (n, k), k a multiple of 4, all float32 in 16-byte quads. Products are FFMA, or
// mma.sync at tf32. Latency limits it: of the rows' first load, of code that runs once, of shared
// memory and of three barriers.
#pragma once
#include <algorithm>

#include "cuda/instructions/hopper.cuh"
#include "cuda/loss/cross_entropy.cuh"
#include "cuda/loss/mlp_head_gemm.cuh"
#include "cuda/runtime/divisor.cuh"

namespace dlsys {
namespace cuda {
namespace mlp_head {

constexpr int kPairRows = 8, kMaxInputs = 256, kMaxHidden = 128, kMaxPairClasses = 16;
constexpr int kPanelK = 32, kPanelQuads = kPanelK / 4;
constexpr int kHiddenPitch = kMaxHidden + 8;  // of rows of hidden gradients: free of conflicts
constexpr int kBackGroups = 4;                // of hidden units, with FFMA
constexpr int kSwizzleNbytes = 1024;          // what the weights are aligned to

// The arguments: x (rows, inputs), weights (hidden, inputs) and (classes, hidden); the hidden
// values; the gradients of logits, of hidden values and, unless null, of x.
struct Pair {
  const float *x, *of_classes, *bias, *class_bias;  // biases may be null
  float *y, *dlogits, *dy, *dx;
  int64_t rows;
  int inputs, hidden, classes;
  int activation, dact, dact_of_x;
  bool weights_ready;  // PDL: weights and biases may be read before the predecessor ends
};

// What follows from the sizes, made by the host: a division is long where code runs once. Offsets
// are in floats of shared memory; the last is its size.
struct PairLayout {
  int units;          // hidden ones, up to whole steps of a product: those that are none have zeros
  int panels;         // of inputs
  int share, groups;  // forward: panels of a group of warps, and such groups
  int of_classes, partials, x, dlogits, dy, end;
  Divisor of_tiles;  // of hidden units, side by side in a group

  PairLayout(const Pair& pair, bool tensor) {
    const int tiles = CeilDiv32(pair.hidden, kTileN);
    of_tiles = Divisor(tiles);
    units = CeilDiv32(pair.hidden, kStepK) * kStepK;
    panels = CeilDiv32(pair.inputs, kPanelK);
    share = tensor ? CeilDiv32(panels, kWarps / tiles) : 1;
    groups = CeilDiv32(panels, share);
    const int forward = groups * PartialNumel<kPairRows>(pair.hidden);
    const int back = tensor ? 0 : kBackGroups * PartialNumel<kPairRows>(pair.inputs);
    of_classes = panels * units * kPanelK;
    partials = of_classes + pair.classes * pair.hidden;
    x = partials + std::max(forward, back);
    dlogits = x + (tensor ? 0 : kPairRows * Pitch(pair.inputs));
    dy = dlogits + kPairRows * kMaxPairClasses;
    end = dy + kPairRows * kHiddenPitch;
  }
};

// The float quad at p, or zeros.
__device__ __forceinline__ void LoadQuad(const float* p, bool exists, float (&to)[4]) {
  const float4 v = exists ? *(const float4*)p : make_float4(0.f, 0.f, 0.f, 0.f);
  to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
}

// Quad `quad` of a panel's row in shared memory, as TMA has swizzled it.
__device__ __forceinline__ const float* OfPanel(const float* panel, int row, int quad) {
  return panel + row * kPanelK + (quad ^ row % 8) * 4;
}

// ---- the large products: hidden values, and gradients of x ----

// mma.sync at tf32. A warp has 32 columns as two M, of the eight rows as N.
class TensorPair {
  static constexpr int kSteps = kMaxInputs / kStepK / 2;  // of sixteen inputs that a warp has

 public:
  static constexpr bool kTensorCores = true;

  // `first`: the block's first row.
  __device__ __forceinline__ TensorPair(const Pair& pair, const PairLayout& at, int64_t first) {
    const int warp = threadIdx.x / 32;
    group_ = warp / at.of_tiles;
    col_ = (warp - group_ * (int)at.of_tiles.value) * kTileN + group_of_lane() * 4;
    panel_ = group_ * at.share, count_ = min(at.share, at.panels - panel_);
    const int k = panel_ * kPanelK + next() * 4;
    quads_ = min(2 * count_, CeilDiv32(pair.inputs - k, kStepK));
    from_ = pair.x + (first + group_of_lane()) * pair.inputs + k;
  }

  // Loads what this thread needs of its row of x. The next rows are `step` further.
  __device__ __forceinline__ void LoadX(const Pair& pair, int64_t first, int64_t step,
                                        const PairLayout&, float*) {
    const int quads = first + group_of_lane() < pair.rows ? quads_ : 0;
#pragma unroll
    for (int s = 0; s < kSteps; s++) LoadQuad(from_ + s * kStepK, s < quads, x_[s]);
    from_ += step * pair.inputs;
  }

  // Loads x where this thread makes its gradients.
  __device__ __forceinline__ void LoadSides(const Pair& pair, int64_t first) {
    ForQuads(pair, first, [&](int e, int64_t at) { LoadQuad(pair.x + at, true, side_[e]); });
  }

  // Leaves this warp's partial sums of the hidden values.
  __device__ __forceinline__ void Forward(const Pair& pair, const PairLayout& at,
                                          float* memory) const {
    float sums[2][2][4] = {};
#pragma unroll
    for (int s = 0; s < kSteps; s++) {
      if (s >= 2 * count_) break;
      const float* const panel = memory + (panel_ + s / 2) * at.units * kPanelK;
      float w[4][4];
#pragma unroll
      for (int c = 0; c < 4; c++)
        LoadQuad(OfPanel(panel, min(col_ + c, at.units - 1), s % 2 * 4 + next()), true, w[c]);
      MultiplyAddStep(w, x_[s], sums);
    }
    if (count_ <= 0 || col_ >= pair.hidden) return;
    float* const to = memory + at.partials + group_ * PartialNumel<kPairRows>(pair.hidden) + col_;
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const auto sum = [&](int i, int k) { return sums[0][i][k] + sums[1][i][k]; };
      StoreQuad(to + (2 * next() + e) * pair.hidden, sum(0, e), sum(0, 2 + e), sum(1, e),
                sum(1, 2 + e));
    }
  }

  static __device__ __forceinline__ float Gradient(float x) { return RoundedToTf32(x); }

  // Writes the gradients of x.
  __device__ __forceinline__ void Backward(const Pair& pair, const PairLayout& at, int64_t first,
                                           float* memory) const {
    const int warp = threadIdx.x / 32;
    if (warp >= at.panels) return;
    const float* const panel = memory + warp * at.units * kPanelK;
    const float* w[2] = {OfPanel(panel, 2 * next(), group_of_lane()),
                         OfPanel(panel, 2 * next() + 1, group_of_lane())};
    const float* d = memory + at.dy + group_of_lane() * kHiddenPitch + 2 * next();
    float sums[2][2][4] = {};
#pragma unroll 1
    for (int k = 0; k < at.units; k += kStepK, d += kStepK) {
      float v[4][4];  // v[column][k]
#pragma unroll
      for (int e = 0; e < 4; e++) {  // k + 2 * next and the next, and those eight behind them
        const float4 q = *(const float4*)(w[e % 2] + (k + e / 2 * 8) * kPanelK);
        v[0][e] = q.x, v[1][e] = q.y, v[2][e] = q.z, v[3][e] = q.w;
      }
      const float2 low = *(const float2*)d, high = *(const float2*)(d + 8);
      const float of_row[4] = {low.x, low.y, high.x, high.y};
      MultiplyAddStep<false>(v, of_row, sums);
    }
    ForQuads(pair, first, [&](int e, int64_t to) {
      const auto sum = [&](int i, int k) { return sums[0][i][k] + sums[1][i][k]; };
      float x[4] = {sum(0, e), sum(0, 2 + e), sum(1, e), sum(1, 2 + e)};
      ApplyActivations(0, pair.dact_of_x, side_[e], x);
      StoreQuadTo(pair.dx + to, x[0], x[1], x[2], x[3]);
    });
  }

 private:
  static __device__ __forceinline__ int next() { return threadIdx.x % 4; }
  static __device__ __forceinline__ int group_of_lane() { return threadIdx.x % 32 / 4; }

  // Calls f(e, offset) for the two quads of gradients of x that the lane has, if they exist.
  template <class F>
  static __device__ __forceinline__ void ForQuads(const Pair& pair, int64_t first, F&& f) {
    const int col = threadIdx.x / 32 * kTileN + group_of_lane() * 4;
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int64_t row = first + 2 * next() + e;
      if (row < pair.rows && col < pair.inputs) f(e, row * pair.inputs + col);
    }
  }

  // Adds the products of four columns at four k, which are four of sixteen, to two sums each.
  template <bool kRound = true>
  static __device__ __forceinline__ void MultiplyAddStep(const float (&w)[4][4],
                                                         const float (&x)[4],
                                                         float (&sums)[2][2][4]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int k0 = 2 * half, k1 = k0 + 1;
      const float b[2] = {kRound ? RoundedToTf32(x[k0]) : x[k0],
                          kRound ? RoundedToTf32(x[k1]) : x[k1]};
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float a[4] = {w[2 * i][k0], w[2 * i + 1][k0], w[2 * i][k1], w[2 * i + 1][k1]};
        MultiplyAddTf32(a, b, sums[half][i]);
      }
    }
  }

  int group_, col_, panel_, count_;
  int quads_;  // of x that a thread multiplies by
  const float* from_;
  float x_[kSteps][4], side_[2][4];
};

// FFMA. Forward a warp has a panel's inputs, a lane four columns of all rows; backward a thread has
// four columns of all rows at a quarter of the hidden units.
class FfmaPair {
 public:
  static constexpr bool kTensorCores = false;
  static_assert(kMaxInputs == kWarps * kPanelK, "a warp has a panel");

  __device__ __forceinline__ FfmaPair(const Pair& pair, const PairLayout&, int64_t)
      : first_(threadIdx.x / 32 * kPanelQuads),
        count_(min(kPanelQuads, pair.inputs / 4 - first_)),
        columns_(pair.hidden / 4) {}

  __device__ __forceinline__ void LoadX(const Pair& pair, int64_t first, int64_t,
                                        const PairLayout& at, float* memory) {
    const int lane = threadIdx.x % 32, quad = lane % kPanelQuads;
    constexpr int kAtOnce = 32 / kPanelQuads;
    float x[kPairRows / kAtOnce][4];
#pragma unroll
    for (int i = 0; i < kPairRows / kAtOnce; i++) {
      const int64_t row = first + i * kAtOnce + lane / kPanelQuads;
      LoadQuad(pair.x + row * pair.inputs + (first_ + quad) * 4, row < pair.rows && quad < count_,
               x[i]);
    }
#pragma unroll
    for (int i = 0; i < kPairRows / kAtOnce; i++)
      if (quad < count_)
        StoreQuad(memory + at.x + (i * kAtOnce + lane / kPanelQuads) * Pitch(pair.inputs) +
                      (first_ + quad) * 4,
                  x[i][0], x[i][1], x[i][2], x[i][3]);
    __syncwarp();
  }

  __device__ __forceinline__ void LoadSides(const Pair& pair, int64_t first) {
    ForQuads(pair, first,
             [&](int i, int, int, int64_t from) { LoadQuad(pair.x + from, true, side_[i]); });
  }

  __device__ __forceinline__ void Forward(const Pair& pair, const PairLayout& at,
                                          float* memory) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, pitch = Pitch(pair.inputs);
    const float* const x = memory + at.x + first_ * 4;
    const float* const panel = memory + warp * at.units * kPanelK;
    float sums[4][kPairRows] = {};
#pragma unroll 1
    for (int q = 0; q < count_; q++) {
      float w[4][4];
#pragma unroll
      for (int c = 0; c < 4; c++)
        LoadQuad(OfPanel(panel, min(lane + c * columns_, at.units - 1), q), true, w[c]);
#pragma unroll
      for (int r = 0; r < kPairRows; r++) {
        float v[4];
        LoadQuad(x + r * pitch + q * 4, true, v);
#pragma unroll
        for (int e = 0; e < 4; e++)
#pragma unroll
          for (int c = 0; c < 4; c++) sums[c][r] = fmaf(w[c][e], v[e], sums[c][r]);
      }
    }
    float* const to = memory + at.partials + warp * PartialNumel<kPairRows>(pair.hidden) + lane;
    if (lane >= columns_ || warp >= at.groups) return;
#pragma unroll
    for (int r = 0; r < kPairRows; r++)
#pragma unroll
      for (int c = 0; c < 4; c++) to[r * pair.hidden + c * columns_] = sums[c][r];
  }

  static __device__ __forceinline__ float Gradient(float x) { return x; }

  __device__ __forceinline__ void Backward(const Pair& pair, const PairLayout& at, int64_t first,
                                           float* memory) const {
    constexpr int kLanes = kHeadThreads / kBackGroups;
    const int group = threadIdx.x / kLanes, quad = threadIdx.x % kLanes;
    const int share = CeilDiv32(pair.hidden / 4, kBackGroups) * 4;
    const int begin = group * share, end = min(begin + share, pair.hidden);
    const int numel = PartialNumel<kPairRows>(pair.inputs);
    if (4 * quad < pair.inputs) {
      float sums[kPairRows][4] = {};
      const float* const panel = memory + quad / kPanelQuads * at.units * kPanelK;
      const float* const d = memory + at.dy;
#pragma unroll 1
      for (int k = begin; k < end; k += 4) {
        float w[4][4];
#pragma unroll
        for (int e = 0; e < 4; e++) LoadQuad(OfPanel(panel, k + e, quad % kPanelQuads), true, w[e]);
#pragma unroll
        for (int r = 0; r < kPairRows; r++) {
          float of_row[4];
          LoadQuad(d + r * kHiddenPitch + k, true, of_row);
#pragma unroll
          for (int e = 0; e < 4; e++)
#pragma unroll
            for (int c = 0; c < 4; c++) sums[r][c] = fmaf(of_row[e], w[e][c], sums[r][c]);
        }
      }
      float* const to = memory + at.partials + group * numel + 4 * quad;
#pragma unroll
      for (int r = 0; r < kPairRows; r++)
        StoreQuad(to + r * pair.inputs, sums[r][0], sums[r][1], sums[r][2], sums[r][3]);
    }
    __syncthreads();
    ForQuads(pair, first, [&](int i, int row, int col, int64_t to) {
      float x[4] = {};
#pragma unroll
      for (int k = 0; k < kBackGroups; k++) {
        float v[4];
        LoadQuad(memory + at.partials + k * numel + row * pair.inputs + col, true, v);
#pragma unroll
        for (int e = 0; e < 4; e++) x[e] += v[e];
      }
      ApplyActivations(0, pair.dact_of_x, side_[i], x);
      StoreQuadTo(pair.dx + to, x[0], x[1], x[2], x[3]);
    });
  }

 private:
  static constexpr int kOwn = kPairRows * kMaxInputs / 4 / kHeadThreads;

  // Calls f(i, row of the block, column, offset) for the quads of gradients of x that the thread
  // finishes.
  template <class F>
  static __device__ __forceinline__ void ForQuads(const Pair& pair, int64_t first, F&& f) {
    constexpr int kInRow = kMaxInputs / 4;
#pragma unroll
    for (int i = 0; i < kOwn; i++) {
      const int row = i * (kHeadThreads / kInRow) + threadIdx.x / kInRow;
      const int col = threadIdx.x % kInRow * 4;
      if (first + row < pair.rows && col < pair.inputs)
        f(i, row, col, (first + row) * pair.inputs + col);
    }
  }

  int first_, count_, columns_;
  float side_[kOwn][4];
};

// ---- the kernel ----

// kClasses: an upper bound of the classes. `map` has the hidden layer's weights.
template <class Product, int kClasses, class Labels>
__global__ __launch_bounds__(kHeadThreads,
                             1) void PairKernel(const __grid_constant__ CUtensorMap map,
                                                const __grid_constant__ Pair pair,
                                                const __grid_constant__ PairLayout at,
                                                Labels labels, GridReduction reduction, float scale,
                                                Output loss) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  static_assert(kWarps == kPairRows && kHeadThreads == kThreads, "a warp has a row; FinishGridSum");
  static_assert(kMaxPairClasses <= kMostInLanes, "SumLanes leaves a class to two lanes");
  float* memory = DynamicShared<float>();
  memory += (-hopper::SharedAddress(memory) & (kSwizzleNbytes - 1)) / sizeof(float);
  __shared__ float of_warp[kWarps];
  __shared__ __align__(8) uint64_t barrier;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int classes = pair.classes, hidden = pair.hidden, col = 4 * lane;
  const uint32_t weights = hopper::SharedAddress(&barrier);
  const int64_t begin = (int64_t)blockIdx.x * kPairRows, step = (int64_t)gridDim.x * kPairRows;
  if (!pair.weights_ready) GridDependencySynchronize();
  if (threadIdx.x == 0) {
    const int of_panel = at.units * kPanelK * (int)sizeof(float);
    const int of_classes = classes * hidden * (int)sizeof(float);
    const uint32_t to = hopper::SharedAddress(memory);
    hopper::InitBarrier(weights, 1);
    hopper::PublishBarriers();
    hopper::ArriveExpecting(weights, at.panels * of_panel + of_classes);
#pragma unroll 1
    for (int k = 0; k < at.panels; k++)
      hopper::LoadBox<false>(to + k * of_panel, &map, weights, k * kPanelK, 0, 0);
    hopper::LoadBytes(hopper::SharedAddress(memory + at.of_classes), pair.of_classes, of_classes,
                      weights);
  }
  float bias[4], class_bias = 0.f;
  LoadQuad(pair.bias + col, pair.bias && col < hidden, bias);
  if (pair.class_bias && lane / 2 < classes) class_bias = pair.class_bias[lane / 2];
  Product product(pair, at, begin);
  __syncthreads();
  if (pair.weights_ready) GridDependencySynchronize();
  unsigned arrival = 0;
  float sum = 0.f;
#pragma unroll 1
  for (int64_t first = begin; first < pair.rows; first += step) {
    const int64_t row = first + warp;
    const bool exists = row < pair.rows;
    product.LoadX(pair, first, step, at, memory);
    const auto label = labels.LoadLabel(row, exists);
    if (first == begin) arrival = Arrive(reduction);
    hopper::WaitForPhase(weights, 0);
    product.Forward(pair, at, memory);
    if (pair.dx) product.LoadSides(pair, first);
    float weight[kClasses][4];
#pragma unroll
    for (int c = 0; c < kClasses; c++)
      LoadQuad(memory + at.of_classes + c * hidden + col, c < classes && col < hidden, weight[c]);
    __syncthreads();

    float h[4] = {}, logits[16] = {};
    if (col < hidden) {
      const float* from = memory + at.partials + warp * hidden + col;
#pragma unroll 1
      for (int k = 0; k < at.groups; k++, from += PartialNumel<kPairRows>(hidden)) {
        float v[4];
        LoadQuad(from, true, v);
#pragma unroll
        for (int e = 0; e < 4; e++) h[e] += v[e];
      }
#pragma unroll
      for (int e = 0; e < 4; e++) h[e] += bias[e];
      ApplyActivations(pair.activation, 0, h, h);
      if (exists) *(float4*)(pair.y + row * hidden + col) = make_float4(h[0], h[1], h[2], h[3]);
    }
#pragma unroll
    for (int c = 0; c < kClasses; c++)
#pragma unroll
      for (int e = 0; e < 4; e++) logits[c] = fmaf(h[e], weight[c][e], logits[c]);
    const float logit = SumLanes(logits) + class_bias;
    float* const d_of_row = memory + at.dlogits + warp * kMaxPairClasses;
    if (lane < kMaxPairClasses) d_of_row[lane] = 0.f;
    __syncwarp();
    if (exists) {
      const auto put = [&](int c, float d) {
        pair.dlogits[row * classes + c] = d;
        d_of_row[c] = d;
      };
      sum += labels.RowOfLanes(logit, row, label, classes, put);
    }
    if (lane == 0) of_warp[warp] = sum;
    __syncwarp();
    float dh[4] = {};
#pragma unroll
    for (int c = 0; c < kClasses; c++) {
      const float d = d_of_row[c];
#pragma unroll
      for (int e = 0; e < 4; e++) dh[e] = fmaf(d, weight[c][e], dh[e]);
    }
    if (col < hidden) {
      ApplyActivations(0, pair.dact, h, dh);
      if (exists) StoreQuadTo(pair.dy + row * hidden + col, dh[0], dh[1], dh[2], dh[3]);
    }
    if (col < at.units)  // those that are no hidden unit have weights of zero, and finite gradients
      StoreQuad(memory + at.dy + warp * kHiddenPitch + col, Product::Gradient(dh[0]),
                Product::Gradient(dh[1]), Product::Gradient(dh[2]), Product::Gradient(dh[3]));
    __syncthreads();

    if (first + step >= pair.rows)
      PublishBlockSum(of_warp, reduction);  // long before the block's end
    if (pair.dx) product.Backward(pair, at, first, memory);
    if (first + step < pair.rows) __syncthreads();
  }
  TriggerProgrammaticLaunch();
  FinishGridSum(arrival, reduction, scale, loss);
#endif
}

}  // namespace mlp_head
}  // namespace cuda
}  // namespace dlsys
