// matvec_chain: the linear layers at a network's end for a few rows, in one launch: y = f_L(...
// f_1(x W_1ᵀ + b_1) ... W_Lᵀ + b_L) for rows x (m, k), m <= 4, and weights (n, k) in float32, each
// n the next k. One cluster of blocks makes them: a block makes every eighth output of a large
// layer, and its first block all outputs of a small one behind that, which takes less than another
// exchange. Outputs go to the distributed shared memory of all blocks that read them, one cluster
// barrier a layer. The weights of all layers come to shared memory (cp.async), before the
// predecessor on the stream has ended where it does not write them. Row-major, contiguous, y
// overlaps nothing that is read; every k is a multiple of 4. Some lanes of a warp sum an output, in
// a fixed order. x and y may be memory of the host: all blocks read x together, and the host is
// told of y. Latency limits it, that of fetching instructions and of divisions, too: there are few
// of both.
#include <algorithm>

#include "cuda/gemm/epilogue.cuh"
#include "cuda/gemm/gemm.cuh"
#include "cuda/runtime/arrival.cuh"
#include "cuda/runtime/launch.cuh"
#include "cuda/runtime/pinned.cuh"

namespace dlsys {
namespace cuda {
namespace {

constexpr int kMostLayers = 4, kMostRows = 4, kCluster = kPortableCluster;
constexpr int kChainThreads = 512, kChainWarps = kChainThreads / 32;
constexpr int kFewestLaneBits = 3;  // of lanes that write an output to a block each
static_assert(1 << kFewestLaneBits >= kCluster, "each block is written to");
constexpr int64_t kMostShared = 48 << 10;  // floats
constexpr int64_t kSmall = 4 << 10;        // weights of a layer that one block makes
constexpr int kCodeBits = 8;               // of an activation

// Where it keeps its weights in shared memory.
struct Layer {
  const float *w, *bias;
  int n, k, activation, weights_at, biases_at;
  int owners;     // the blocks that have outputs, 1 or all: output o is that of block o % owners
  int lane_bits;  // 1 << lane_bits lanes sum an output
};

struct Chain {
  const float* x;
  float* y;
  int m, layers;
  int part;                    // of x, that a block reads where it shares
  int input_at, input_numel;   // of two inputs, that of a layer and that of the next
  bool weights_ready, shares;  // shares: each block reads a part of x, which is ready, for all
  Arrival arrival;
  Layer layer[kMostLayers];
};

__device__ __forceinline__ int Rank() { return (int)blockIdx.x % kCluster; }

__device__ __forceinline__ int OwnOutputs(const Layer& l) {
  if (l.owners == 1) return Rank() == 0 ? l.n : 0;
  return (l.n - Rank() + kCluster - 1) / kCluster;
}

// Begins to copy the weights of this block's outputs, a row a warp.
__device__ __forceinline__ void LoadWeights(const Chain& c, float* shared) {
  const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
#pragma unroll 1
  for (int q = 0; q < c.layers; q++) {
    const Layer& l = c.layer[q];
#pragma unroll 1
    for (int own = warp; own < OwnOutputs(l); own += kChainWarps) {
      const int64_t output = Rank() + own * l.owners;
      float* to = shared + l.weights_at + own * l.k;
#pragma unroll 1
      for (int k = lane * 4; k < l.k; k += 32 * 4)
        CopyAsync16(to + k, l.w + output * l.k + k, true);
      if (lane == 0) CopyAsync4(shared + l.biases_at + own, l.bias + output, true);
    }
  }
  CloseCopies();
}

// What a layer makes of `input` (m, k) for this block's outputs: the result, or (m, n) to the next
// input of as many blocks.
template <int kRows>
__device__ __forceinline__ void RunLayer(const Chain& c, const Layer& l, const float* input,
                                         const float* shared, float* next, int blocks,
                                         unsigned replay) {
  const int count = OwnOutputs(l), lanes = 1 << l.lane_bits;
  const int lane = (int)threadIdx.x & (lanes - 1), group = (int)threadIdx.x >> l.lane_bits;
#pragma unroll 1
  for (int first = 0; first < count; first += kChainThreads >> l.lane_bits) {
    // All lanes of a warp take part in its sums.
    const bool exists = first + group < count;
    const int own = exists ? first + group : 0;
    const float* w = shared + l.weights_at + own * l.k;
    float sums[kRows] = {};
#pragma unroll 1
    for (int k = lane * 4; k < l.k; k += lanes * 4) {
      const float4 right = *(const float4*)(w + k);
#pragma unroll
      for (int row = 0; row < kRows; row++) {
        if (row >= c.m) break;
        const float4 left = *(const float4*)(input + row * l.k + k);
        sums[row] += left.x * right.x + left.y * right.y + left.z * right.z + left.w * right.w;
      }
    }
#pragma unroll 1
    for (int distance = lanes / 2; distance > 0; distance /= 2)
#pragma unroll
      for (int row = 0; row < kRows; row++)
        sums[row] += __shfl_xor_sync(0xffffffffu, sums[row], distance);
    const float side[kRows] = {}, bias = shared[l.biases_at + own];
#pragma unroll
    for (int row = 0; row < kRows; row++) sums[row] += bias;
    ApplyActivations(l.activation, 0, side, sums);
    if (!exists || lane >= blocks) continue;
    const int output = Rank() + own * l.owners;
#pragma unroll
    for (int row = 0; row < kRows; row++) {
      if (row >= c.m) break;
      const int at = row * l.n + output;
      if (next)
        *(float*)OfPeer(next + at, lane) = sums[row];
      else if (c.arrival.elements)
        c.arrival.TellElement(at, __float_as_uint(sums[row]), replay);
      else
        c.y[at] = sums[row];
    }
  }
}

template <int kRows>
__global__ void __launch_bounds__(kChainThreads)
    MatvecChainKernel(const __grid_constant__ Chain c) {
  float* const shared = DynamicShared<float>();
  float *input = shared + c.input_at, *next = input + c.input_numel;
  // Memory of the host is read once, an element a thread, and takes long to answer.
  const int own = Rank() * c.part + (int)threadIdx.x, all = c.m * c.layer[0].k;
  const bool reads = c.shares && (int)threadIdx.x < c.part && own < all;
  const float x = reads ? c.x[own] : 0.f;
  if (c.weights_ready) LoadWeights(c, shared);
  const unsigned replay = c.arrival.count ? c.arrival.Next() : 0;
  MeetCluster();  // all blocks run
  GridDependencySynchronize();
  TriggerProgrammaticLaunch();
  if (!c.weights_ready) LoadWeights(c, shared);
  if (c.shares)
    for (int peer = 0; peer < kCluster && reads; peer++) *(float*)OfPeer(input + own, peer) = x;
  else
    for (int k = (int)threadIdx.x; k < all; k += kChainThreads) input[k] = c.x[k];
  WaitForCopies<0>();
  c.shares ? MeetCluster() : __syncthreads();
#pragma unroll 1
  for (int q = 0; q < c.layers; q++) {
    const Layer& l = c.layer[q];
    const bool last = q + 1 == c.layers;
    const int blocks = last ? 1 : c.layer[q + 1].owners;
    RunLayer<kRows>(c, l, input, shared, last ? nullptr : next, blocks, replay);
    if (last && !c.arrival.count) return;
    // All outputs are there, and the input has been read.
    l.owners > 1 || blocks > 1 ? MeetCluster() : __syncthreads();
    float* const read = input;
    input = next;
    next = read;
  }
  if (Rank() == 0 && threadIdx.x == 0) c.arrival.Tell(replay);
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
    l.lane_bits = 5;
    while (l.lane_bits > kFewestLaneBits && own << l.lane_bits > kChainThreads) l.lane_bits--;
    at += RoundUp(own * (k + 1), 4);
    longest = std::max(longest, k);
    k = n;
  }
  c->input_at = (int)at;
  c->input_numel = (int)(m * longest);
  at += 2 * m * longest;
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
  c.arrival = TakeArrival(true);
  c.part = PartOfEach((int64_t)c.m * c.layer[0].k, kCluster);
  c.shares = c.part <= kChainThreads && InputsAreReady(0, 1) && IsPinned(c.x);
  const auto kernel = c.m == 1 ? MatvecChainKernel<1> : MatvecChainKernel<kMostRows>;
  LaunchClusters(op, kernel, kCluster, kCluster, kChainThreads, (size_t)numel * sizeof(float), true,
                 stream, c);
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
