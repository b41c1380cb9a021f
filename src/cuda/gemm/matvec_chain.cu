// matvec_chain: the linear layers at a network's end for a few rows, in one launch: y = f_L(...
// f_1(x W_1ᵀ + b_1) ... W_Lᵀ + b_L) for rows x (m, k), m <= 4, and weights (n, k) in float32, each
// n the next k. One cluster of blocks makes them: a block makes every eighth output of a large
// layer, and its first block all outputs of a small one behind that, which takes less than another
// exchange. A block that needs the outputs of others reads them from distributed shared memory. The
// weights of all layers come to shared memory (cp.async), before the predecessor on the stream has
// ended where it does not write them. Row-major, contiguous, y overlaps nothing that is read; every
// k is a multiple of 4. A warp, or a quarter of one where a block has many outputs, sums an output
// in a fixed order. x and y may be memory of the host: all blocks read x together, and the host is
// told of y. Latency limits it.
#include <algorithm>

#include "cuda/gemm/epilogue.cuh"
#include "cuda/gemm/gemm.cuh"
#include "cuda/reduce/group.cuh"
#include "cuda/runtime/arrival.cuh"
#include "cuda/runtime/pinned.cuh"

namespace dlsys {
namespace cuda {
namespace {

constexpr int kMostLayers = 4, kMostRows = 4, kCluster = 8;
constexpr int kChainThreads = 512, kChainWarps = kChainThreads / 32;
constexpr int64_t kMostShared = 48 << 10;  // floats
constexpr int64_t kSmall = 16 << 10;       // weights of a layer that one block makes
constexpr int kCodeBits = 8;               // of an activation

// Where it keeps its weights, and what it writes, in shared memory.
struct Layer {
  const float *w, *bias;
  int n, k, activation, weights_at, biases_at, outputs_at;
  int owners;  // the blocks that have outputs: output o is that of block o % owners
};

struct Chain {
  const float* x;
  float* y;
  int m, layers, input_at;
  bool weights_ready, shares;  // shares: each block reads a part of x, for all
  Arrival arrival;
  Layer layer[kMostLayers];
};

__device__ __forceinline__ int Rank() { return (int)blockIdx.x % kCluster; }

__device__ __forceinline__ int OwnOutputs(const Layer& l) {
  return Rank() < l.owners ? (l.n - Rank() + l.owners - 1) / l.owners : 0;
}

// Begins to copy the weights of this block's outputs.
__device__ __forceinline__ void LoadWeights(const Chain& c, float* shared) {
  for (int q = 0; q < c.layers; q++) {
    const Layer& l = c.layer[q];
    const int quads = l.k / 4, count = OwnOutputs(l) * quads;
    for (int id = (int)threadIdx.x; id < count; id += kChainThreads) {
      const int row = id / quads, at = (id - row * quads) * 4;
      CopyAsync16(shared + l.weights_at + row * l.k + at,
                  l.w + (int64_t)(Rank() + row * l.owners) * l.k + at, true);
    }
    for (int own = (int)threadIdx.x; own < OwnOutputs(l); own += kChainThreads)
      CopyAsync4(shared + l.biases_at + own, l.bias + Rank() + own * l.owners, true);
    CloseCopies();
  }
}

// What a layer makes of `input` (m, k) for this block's outputs, each by kLanes threads: the
// result, or (outputs, m) in shared memory.
template <int kLanes>
__device__ __forceinline__ void RunLayer(const Chain& c, const Layer& l, const float* input,
                                         float* shared, bool last) {
  const int lane = (int)threadIdx.x % kLanes, count = OwnOutputs(l);
  const int rounds = (count + kChainThreads / kLanes - 1) / (kChainThreads / kLanes);
  for (int round = 0; round < rounds; round++) {
    // All lanes of a warp take part in its sums.
    const int output_of_block = (int)threadIdx.x / kLanes + round * (kChainThreads / kLanes);
    const bool exists = output_of_block < count;
    const int own = exists ? output_of_block : 0;
    const float* w = shared + l.weights_at + own * l.k;
    const int output = Rank() + own * l.owners;
    const float bias = shared[l.biases_at + own];
    float sums[kMostRows] = {};
    for (int k = lane * 4; k < l.k; k += kLanes * 4) {
      const float4 right = *(const float4*)(w + k);
#pragma unroll
      for (int row = 0; row < kMostRows; row++) {
        if (row >= c.m) break;
        const float4 left = *(const float4*)(input + row * l.k + k);
        sums[row] += left.x * right.x + left.y * right.y + left.z * right.z + left.w * right.w;
      }
    }
#pragma unroll
    for (int row = 0; row < kMostRows; row++) {
      if (row >= c.m) break;
      float value[1] = {GroupReduce<SumMonoid, kLanes>(sums[row]) + bias};
      const float side[1] = {0.f};
      ApplyActivations(l.activation, 0, side, value);
      if (lane > 0 || !exists) continue;
      if (last)
        c.y[(int64_t)row * l.n + output] = value[0];
      else
        shared[l.outputs_at + own * c.m + row] = value[0];
    }
  }
}

// Copies x to the input of all blocks, an element a thread: memory of the host is read once.
__device__ __forceinline__ void ShareInput(const Chain& c, const float* input) {
  const int k = Rank() * kChainThreads + (int)threadIdx.x, all = c.m * c.layer[0].k;
  const float x = k < all ? c.x[k] : 0.f;
  MeetCluster();  // all blocks run
  for (int peer = 0; peer < kCluster && k < all; peer++) *(float*)OfPeer(input + k, peer) = x;
}

__global__ void __launch_bounds__(kChainThreads) MatvecChainKernel(const Chain c) {
  float* const shared = DynamicShared<float>();
  float* const input = shared + c.input_at;
  if (c.weights_ready) LoadWeights(c, shared);
  GridDependencySynchronize();
  TriggerProgrammaticLaunch();
  if (!c.weights_ready) LoadWeights(c, shared);
  if (c.shares)
    ShareInput(c, input);
  else
    for (int k = (int)threadIdx.x; k < c.m * c.layer[0].k; k += kChainThreads) input[k] = c.x[k];
  WaitForCopies<0>();
  c.shares ? MeetCluster() : __syncthreads();
  for (int q = 0; q < c.layers; q++) {
    const Layer& l = c.layer[q];
    const bool last = q + 1 == c.layers;
    if (OwnOutputs(l) > kChainWarps)
      RunLayer<8>(c, l, input, shared, last);
    else
      RunLayer<32>(c, l, input, shared, last);
    if (last) break;
    // All outputs are there, and the input has been read.
    const int next = c.layer[q + 1].owners;
    l.owners > 1 || next > 1 ? MeetCluster() : __syncthreads();
    if (Rank() >= next) continue;
    for (int k = (int)threadIdx.x; k < c.m * l.n; k += kChainThreads) {
      const int row = k / l.n, output = k - row * l.n;
      input[k] = *OfPeer(shared + l.outputs_at + output / l.owners * c.m + row, output % l.owners);
    }
    __syncthreads();
  }
  if (c.arrival.count) {
    c.layer[c.layers - 1].owners > 1 ? MeetCluster() : __syncthreads();
    if (Rank() == 0 && threadIdx.x == 0) c.arrival.Tell();
  }
  LeaveCluster();
}

// ---- launchers ----

// Lays out shared memory; returns its floats, or 0 where the kernel does not serve such layers.
int64_t LayOut(int64_t m, int64_t k, const DLArrayList* weights, Chain* c) {
  if (m < 1 || m > kMostRows || weights->count < 2 || weights->count > kMostLayers) return 0;
  int64_t at = 0, longest = 0;
  c->m = (int)m;
  c->layers = (int)weights->count;
  for (int q = 0; q < c->layers; q++) {
    const DLArray* w = weights->arrays[q];
    if (w->ndim != 2 || w->shape[1] != k || k < 4 || k % 4 || w->shape[0] < 1) return 0;
    const int64_t n = w->shape[0], owners = q > 0 && n * k <= kSmall ? 1 : kCluster;
    const int64_t own = CeilDiv(n, owners);
    if (own * k > kMostShared || m * n > kMostShared) return 0;
    Layer& l = c->layer[q];
    l.n = (int)n, l.k = (int)k, l.owners = (int)owners, l.weights_at = (int)at;
    l.biases_at = (int)(at + own * k);
    l.outputs_at = (int)(l.biases_at + own);
    at += RoundUp(own * (k + 1 + m), 4);
    longest = std::max(longest, k);
    k = n;
  }
  c->input_at = (int)at;
  at += m * longest;
  return at <= kMostShared ? at : 0;
}

// activations: codes of operators/epilogue.h, or 0, eight bits a layer.
void MatvecChain(const DLArray* x, const DLArrayList* weights, const DLArrayList* biases,
                 int64_t activations, DLArray* y, DLStream stream) {
  const char* op = "matvec_chain";
  Enter(op, y, x);
  Chain c{};
  const int64_t numel = x->ndim == 2 ? LayOut(x->shape[0], x->shape[1], weights, &c) : 0;
  if (!numel || biases->count != weights->count || y->ndim != 2 || y->shape[0] != c.m ||
      y->shape[1] != c.layer[c.layers - 1].n)
    Fail("%s: %ld layers do not take %s to %s", op, (long)weights->count, ShapeText(x).c_str(),
         ShapeText(y).c_str());
  c.x = In(op, x);
  c.y = Out(op, y);
  for (int q = 0; q < c.layers; q++) {
    Layer& l = c.layer[q];
    const DLArray *w = weights->arrays[q], *bias = biases->arrays[q];
    Enter(op, y, w, bias);
    if (Numel(bias) != l.n || !Aligned16(w->data))
      Fail("%s: bias %s does not fit weights %s, which are aligned to 16 bytes", op,
           ShapeText(bias).c_str(), ShapeText(w).c_str());
    l.w = In(op, w);
    l.bias = In(op, bias);
    l.activation = CheckedEpilogue(op, activations >> q * kCodeBits & 255, 0, kActivations);
  }
  c.weights_ready = InputsAreReady(1, 2 * c.layers);
  c.arrival = TakeArrival();
  c.shares = IsPinned(c.x) && c.m * c.layer[0].k <= kCluster * kChainThreads;
  LaunchClusters(op, MatvecChainKernel, kCluster, kCluster, kChainThreads,
                 (size_t)numel * sizeof(float), true, stream, c);
}

bool MatvecChainFits(const DLArray* x, const DLArrayList* weights, const DLArrayList*, int64_t,
                     DLArray* y) {
  Chain c{};
  return ComputeMajor(y->ctx.device_id) >= 9 && x->ndim == 2 &&
         LayOut(x->shape[0], x->shape[1], weights, &c) > 0;
}

DLSYS_KERNEL(cuda, matvec_chain, MatvecChain);
DLSYS_FITS(cuda, matvec_chain, MatvecChainFits);

}  // namespace
}  // namespace cuda
}  // namespace dlsys
