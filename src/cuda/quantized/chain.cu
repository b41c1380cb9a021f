// quantized_matmul_chain: the quantized linear layers at a network's end for a few rows, in one
// launch, with the bits of quantized_matmul. One cluster of blocks makes them: a block makes every
// eighth panel of 16 outputs of a large layer, and its first block all of a small one behind that,
// as gemm/matvec_chain.cu does; outputs go to the distributed shared memory of all blocks that read
// them. The weights of all layers come to shared memory (cp.async), before the predecessor on the
// stream has ended where it does not write them. Warps share a panel: half of its columns and a
// part of the inputs each, by mma of bytes, of whose sixteen rows at most eight are used. Latency
// limits it.
#include <algorithm>

#include "cuda/quantized/mma.cuh"
#include "cuda/runtime/arrival.cuh"
#include "cuda/runtime/context.cuh"
#include "cuda/runtime/divisor.cuh"
#include "cuda/runtime/launch.cuh"

namespace dlsys {
namespace cuda {
namespace {

constexpr int kMostLayers = 4, kMostRows = 8, kCluster = kPortableCluster;
constexpr int kPanel = 16, kQuad = 4;      // outputs of a panel, inputs of a word
constexpr int kParts = kThreads / 32 / 2;  // of the inputs, among warps
constexpr int kStepQuads = 8;              // of an mma
constexpr int kPanelsAtOnce = 4;
constexpr int64_t kMostShared = 48 << 10;  // words
constexpr int64_t kSmall = 2 << 10;        // words of the weights of a layer of one block

// Where it keeps its weights in shared memory, in words.
struct Layer {
  const uint8_t* w;
  const int32_t* bias;
  const float* multiplier;
  int n, k, quads, panels, zero, low, high, weights_at, biases_at, multipliers_at;
  int owners;  // the blocks that have panels, 1 or all: panel p is that of block p % owners

  __device__ __forceinline__ int OwnPanels(int rank) const {
    if (owners == 1) return rank == 0 ? panels : 0;
    return (panels - rank + kCluster - 1) / kCluster;
  }
};

struct Chain {
  const uint8_t* x;
  uint8_t* bytes;  // of the result, or floats
  float* floats;
  int m, layers, sums_at;
  int input_at, input_words, pitch;  // two inputs, that of a layer and that of the next; of a row
  Divisor by_m;
  bool weights_ready, in_words;
  Arrival arrival;
  Layer layer[kMostLayers];
};

__device__ __forceinline__ int Rank() { return (int)blockIdx.x % kCluster; }

// Begins to copy the weights of this block's panels.
__device__ __forceinline__ void LoadWeights(const Chain& c, uint32_t* shared) {
  for (int q = 0; q < c.layers; q++) {
    const Layer& l = c.layer[q];
    const int of_panel = l.quads * kPanel / 4;  // copies of 16 bytes
    for (int own = 0; own < l.OwnPanels(Rank()); own++) {
      const float* from = (const float*)l.w + (int64_t)(Rank() + own * l.owners) * of_panel * 4;
      float* to = (float*)(shared + l.weights_at) + own * of_panel * 4;
      for (int at = (int)threadIdx.x * 4; at < of_panel * 4; at += kThreads * 4)
        CopyAsync16(to + at, from + at, true);
    }
    for (int id = (int)threadIdx.x; id < l.OwnPanels(Rank()) * kPanel; id += kThreads) {
      const int output = (Rank() + id / kPanel * l.owners) * kPanel + id % kPanel;
      const bool exists = output < l.n;
      CopyAsync4((float*)(shared + l.biases_at + id), (const float*)l.bias + (exists ? output : 0),
                 exists);
      CopyAsync4((float*)(shared + l.multipliers_at + id), l.multiplier + (exists ? output : 0),
                 exists);
    }
  }
  CloseCopies();
}

// Writes this warp's part of the products of the input with this block's panels to the sums,
// (panels, parts, rows, outputs), for several panels side by side.
__device__ __forceinline__ void MultiplyPanels(const Chain& c, const Layer& l,
                                               const uint32_t* input, uint32_t* shared) {
  const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, part = warp / 2;
  const int row = lane / 4, col = warp % 2 * 8, panels = l.OwnPanels(Rank());
  for (int first = 0; first < panels; first += kPanelsAtOnce) {
    int32_t made[kPanelsAtOnce][4] = {};
    for (int quad = part * kStepQuads + lane % 4; quad - lane % 4 < l.quads;
         quad += kParts * kStepQuads) {
      const bool near = quad < l.quads, far = quad + 4 < l.quads;
      const uint32_t* from = input + row * c.pitch + quad;
      const uint32_t a[4] = {row < c.m && near ? from[0] : 0, 0, row < c.m && far ? from[4] : 0, 0};
#pragma unroll
      for (int e = 0; e < kPanelsAtOnce; e++) {
        if (first + e >= panels) break;
        const uint32_t* w = shared + l.weights_at + (first + e) * l.quads * kPanel + col + lane / 4;
        const uint32_t b[2] = {near ? w[quad * kPanel] : 0, far ? w[(quad + 4) * kPanel] : 0};
        MultiplyAddBytes(a, b, made[e]);
      }
    }
#pragma unroll
    for (int e = 0; e < kPanelsAtOnce; e++) {
      if (first + e >= panels || row >= c.m) break;
      int32_t* to = (int32_t*)shared + c.sums_at +
                    (((first + e) * kParts + part) * c.m + row) * kPanel + col + lane % 4 * 2;
      to[0] = made[e][0];
      to[1] = made[e][1];
    }
  }
}

__device__ __forceinline__ uint8_t* InInput(const Chain& c, uint32_t* input, int row, int k) {
  return (uint8_t*)(input + row * c.pitch) + k;
}

// Requantizes this block's outputs: to the result, or to the next input of as many blocks.
__device__ __forceinline__ void FinishPanels(const Chain& c, const Layer& l, const uint32_t* shared,
                                             uint32_t* next, int blocks, unsigned replay) {
  const int32_t* sums = (const int32_t*)shared + c.sums_at;
  const float low = (float)(l.low - l.zero), high = (float)(l.high - l.zero);
  const int all = l.OwnPanels(Rank()) * c.m * kPanel;
#pragma unroll 1
  for (int id = (int)threadIdx.x; id < all; id += kThreads) {
    const int col = id % kPanel, own = id / kPanel / c.by_m, row = id / kPanel - own * c.m;
    const int output = (Rank() + own * l.owners) * kPanel + col;
    if (output >= l.n) continue;
    int32_t sum = (int32_t)shared[l.biases_at + own * kPanel + col];
#pragma unroll
    for (int part = 0; part < kParts; part++)
      sum += sums[((own * kParts + part) * c.m + row) * kPanel + col];
    const float scaled = (float)sum * ((const float*)shared)[l.multipliers_at + own * kPanel + col];
    const uint8_t byte = (uint8_t)((int)rintf(fminf(fmaxf(scaled, low), high)) + l.zero);
    const int at = row * l.n + output;
    if (next) {
      uint8_t* const in_next = InInput(c, next, row, output);
#pragma unroll 1
      for (int block = 0; block < blocks; block++)
        *(uint8_t*)OfPeer((const float*)in_next, block) = byte;
    } else if (c.arrival.elements) {
      c.arrival.TellElement(at, __float_as_uint(scaled), replay);
    } else if (c.floats) {
      c.floats[at] = scaled;
    } else {
      c.bytes[at] = byte;
    }
  }
}

// Copies x to `input`, by words where its rows have whole ones.
__device__ __forceinline__ void LoadInput(const Chain& c, uint32_t* input) {
  const int k = c.layer[0].k, words = k / kQuad;
  if (c.in_words) {
    for (int row = 0; row < c.m; row++)
      for (int word = (int)threadIdx.x; word < words; word += kThreads)
        input[row * c.pitch + word] = ((const uint32_t*)c.x)[row * words + word];
    return;
  }
  for (int id = (int)threadIdx.x; id < c.m * k; id += kThreads)
    *InInput(c, input, id / k, id % k) = c.x[id];
}

__global__ void __launch_bounds__(kThreads) QuantizedChainKernel(const __grid_constant__ Chain c) {
  uint32_t* const shared = DynamicShared<uint32_t>();
  uint32_t *input = shared + c.input_at, *next = input + c.input_words;
  if (c.weights_ready) LoadWeights(c, shared);
  const unsigned replay = c.arrival.count ? c.arrival.Next() : 0;
  MeetCluster();  // all blocks run
  GridDependencySynchronize();
  TriggerProgrammaticLaunch();
  if (!c.weights_ready) LoadWeights(c, shared);
  LoadInput(c, input);
  WaitForCopies<0>();
  __syncthreads();
#pragma unroll 1
  for (int q = 0; q < c.layers; q++) {
    const Layer& l = c.layer[q];
    const bool last = q + 1 == c.layers;
    const int blocks = last ? 1 : c.layer[q + 1].owners;
    MultiplyPanels(c, l, input, shared);
    __syncthreads();
    FinishPanels(c, l, shared, last ? nullptr : next, blocks, replay);
    if (last && !c.arrival.count) return;
    // All outputs are there, and the input has been read.
    l.owners > 1 || blocks > 1 ? MeetCluster() : __syncthreads();
    uint32_t* const read = input;
    input = next;
    next = read;
  }
  if (Rank() == 0 && threadIdx.x == 0) c.arrival.Tell(replay);
}

// ---- launchers ----

// Lays out shared memory; returns its words, or 0 where the kernel does not serve such layers, of
// packed weights and `biases` as long as their outputs.
int64_t LayOut(int64_t m, int64_t k, const DLArrayList* weights, const DLArrayList* biases,
               Chain* c) {
  if (m < 1 || m > kMostRows || weights->count < 2 || weights->count > kMostLayers ||
      biases->count != weights->count)
    return 0;
  int64_t at = 0, longest = 0, sums = 0;
  c->m = (int)m;
  c->by_m = Divisor(m);
  c->layers = (int)weights->count;
  for (int q = 0; q < c->layers; q++) {
    const DLArray *w = weights->arrays[q], *bias = biases->arrays[q];
    const int64_t n = bias->ndim == 1 ? bias->shape[0] : 0;
    const int64_t panels = CeilDiv(n, kPanel), quads = CeilDiv(k, kQuad);
    const int64_t owners = q > 0 && panels * quads * kPanel <= kSmall ? 1 : kCluster;
    const int64_t own = CeilDiv(panels, owners);
    if (n < 1 || k < 1 || w->ndim != 3 || w->shape[0] != panels || w->shape[1] != quads ||
        w->shape[2] != kPanel * kQuad || own * quads * kPanel > kMostShared || n > kMostShared)
      return 0;
    Layer& l = c->layer[q];
    l.n = (int)n, l.k = (int)k, l.owners = (int)owners, l.panels = (int)panels,
    l.quads = (int)quads;
    l.weights_at = (int)at;
    l.biases_at = (int)(at + own * quads * kPanel);
    l.multipliers_at = l.biases_at + (int)(own * kPanel);
    at += own * kPanel * (quads + 2);
    longest = std::max(longest, quads);
    sums = std::max(sums, own * kParts * m * kPanel);
    k = n;
  }
  c->sums_at = (int)at;
  c->input_at = (int)RoundUp(at + sums, 4);
  c->pitch = (int)RoundUp(longest, kStepQuads) + 4;  // rows share no banks
  c->input_words = (int)(m * c->pitch);
  const int64_t all = c->input_at + 2 * c->input_words;
  return all <= kMostShared ? all : 0;
}

// zeros, lows, highs: of the results, eight bits a layer.
void QuantizedMatMulChain(const DLArray* x, const DLArrayList* weights, const DLArrayList* biases,
                          const DLArrayList* multipliers, int64_t zeros, int64_t lows,
                          int64_t highs, DLArray* y, DLStream stream) {
  const char* op = "quantized_matmul_chain";
  Enter(op, y, x);
  Chain c{};
  const int64_t words = x->ndim == 2 ? LayOut(x->shape[0], x->shape[1], weights, biases, &c) : 0;
  if (!words || multipliers->count != weights->count || y->ndim != 2 || y->shape[0] != c.m ||
      y->shape[1] != c.layer[c.layers - 1].n)
    Fail("%s: %ld layers do not take %s to %s", op, (long)weights->count, ShapeText(x).c_str(),
         ShapeText(y).c_str());
  c.x = In<uint8_t>(op, x);
  c.in_words = c.layer[0].k % kQuad == 0 && Aligned16(c.x);
  c.floats = y->dtype == DL_FLOAT32 ? Out(op, y) : nullptr;
  c.bytes = c.floats ? nullptr : Out<uint8_t>(op, y);
  for (int q = 0; q < c.layers; q++) {
    Layer& l = c.layer[q];
    const DLArray *w = weights->arrays[q], *bias = biases->arrays[q];
    const DLArray* multiplier = multipliers->arrays[q];
    Enter(op, y, w, bias, multiplier);
    if (Numel(multiplier) != l.n || !Aligned16(w->data))
      Fail("%s: multiplier %s does not fit weights %s, which are aligned to 16 bytes", op,
           ShapeText(multiplier).c_str(), ShapeText(w).c_str());
    l.w = In<uint8_t>(op, w);
    l.bias = In<int32_t>(op, bias);
    l.multiplier = In(op, multiplier);
    l.zero = (int)(zeros >> 8 * q & 255);
    l.low = (int)(lows >> 8 * q & 255);
    l.high = (int)(highs >> 8 * q & 255);
  }
  c.weights_ready = InputsAreReady(1, 3 * c.layers);
  c.arrival = TakeArrival(c.floats != nullptr);
  LaunchBeside(op, QuantizedChainKernel, kCluster, kCluster, kThreads,
               (size_t)words * sizeof(uint32_t), stream, c);
}

bool QuantizedMatMulChainFits(const DLArray* x, const DLArrayList* weights,
                              const DLArrayList* biases, const DLArrayList*, int64_t, int64_t,
                              int64_t, DLArray* y) {
  Chain c{};
  return ComputeMajor(y->ctx.device_id) >= 9 && x->ndim == 2 &&
         LayOut(x->shape[0], x->shape[1], weights, biases, &c) > 0;
}

DLSYS_KERNEL(cuda, quantized_matmul_chain, QuantizedMatMulChain);
DLSYS_FITS(cuda, quantized_matmul_chain, QuantizedMatMulChainFits);

}  // namespace
}  // namespace cuda
}  // namespace dlsys
