// Fused MLP head: the last dense layers of a network, softmax cross-entropy and the gradients back
// through the layers, in one launch. A block takes a few rows forward and back; weights, biases and
// the rows' values stay in shared memory, brought by bulk copies (TMA) on sm_90, and only what
// other kernels read is written. Blocks sum the loss in a single pass: the last block to arrive
// adds the partial sums in block order.
//
// x (rows, k), weights (k, n) or (n, k), all float32, contiguous; outputs overlap no input. Small
// networks are limited by latency: copying the weights and one GEMM stage after another. Where
// shared memory is too small or the rows are many, GEMMs with epilogues and a fused cross-entropy
// run instead.
#include <algorithm>
#include <optional>

#include "cuda/gemm/panel.cuh"
#include "cuda/instructions/tensor_map.cuh"
#include "cuda/loss/cross_entropy.cuh"
#include "cuda/loss/mlp_head_gemm.cuh"
#include "cuda/loss/mlp_head_pair.cuh"
#include "cuda/runtime/launch.cuh"
#include "operators/mlp_head.h"

namespace dlsys {
namespace cuda {
namespace mlp_head {

// Rows of a matrix to be copied to shared memory, where they are `pitch` apart; the last may be
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
  int layers, stages;  // one per layer, then one per gradient
  int logits_at, gradients_at, partials_at;
  bool weights_ready;  // PDL: weights and biases may be read before the predecessor ends
  bool x_ready;        // and so may x, by bulk copies
  float* dlogits;
  Copy copy[2 * kMaxHeadLayers];
  Stage stage[2 * kMaxHeadLayers];
};

// ---- the kernel ----

// Lanes of a warp issue bulk copies one after another, some 75 cycles each, so rows go to warps in
// turn.
__device__ __forceinline__ int FirstLine() {
  return (int)threadIdx.x % 32 * kWarps + (int)threadIdx.x / 32;
}

// Issues a copy and returns the bytes of it that arrive by this thread's bulk copies. Each block
// starts at another row, so that blocks do not all request the same bytes together.
__device__ __forceinline__ int Begin(const Copy copy, float of_grid, float* memory,
                                     Arrivals* arrivals) {
  const int ahead = (int)((float)copy.lines * of_grid);
  float* const to = memory + copy.at;
  const bool aligned = (copy.line | copy.last) % 4 == 0 && (uintptr_t)copy.from % 16 == 0;
  const auto line_of = [&](int i) {
    return i + ahead < copy.lines ? i + ahead : i + ahead - copy.lines;
  };
  const auto numel_of = [&](int line) { return line < copy.lines - 1 ? copy.line : copy.last; };
  if (kHasBulkCopies && aligned) {
    int nbytes = 0;
#pragma unroll 1
    for (int i = FirstLine(); i < copy.lines; i += kHeadThreads) {
      const int line = line_of(i), of_line = numel_of(line) * (int)sizeof(float);
      CopyBulk(to + line * copy.pitch, copy.from + line * copy.line, of_line, arrivals);
      nbytes += of_line;
    }
    return nbytes;
  }
  int log = 5;  // of the threads that copy a row together
  while (log > 0 && 4 << (log - 1) >= copy.line) log--;
#pragma unroll 1
  for (int i = threadIdx.x >> log; i < copy.lines; i += kHeadThreads >> log) {
    const int line = line_of(i), numel = numel_of(line);
#pragma unroll 1
    for (int at = (threadIdx.x & ((1 << log) - 1)) * 4; at < numel; at += 4 << log)
      CopyQuad(to + line * copy.pitch + at, copy.from + line * copy.line + at, numel - at, aligned);
  }
  return 0;
}

// Zeroes the padding of a buffer's rows: it is read, and multiplied by zero must be zero.
template <int kRows>
__device__ __forceinline__ void ClearPadding(float* values, int columns) {
  const int padding = RoundUp4(columns) - columns;
  if ((int)threadIdx.x < kRows * padding)
    values[threadIdx.x / padding * Pitch(columns) + columns + threadIdx.x % padding] = 0.f;
}

template <int kRows, bool kTensorCores, class Labels>
__global__ __launch_bounds__(kHeadThreads,
                             1) void HeadKernel(const __grid_constant__ Head given, Labels labels,
                                                GridReduction reduction, float scale, Output loss) {
  static_assert(kRows <= kWarps && kHeadThreads == kThreads, "a warp has a row; FinishGridSum");
  float* const memory = DynamicShared<float>();
  __shared__ float of_warp[kWarps];
  __shared__ Arrivals arrivals;
  __shared__ Head head;  // kernel parameters are slow on first access
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
  if (head.x_ready && row < kRows && begin + row < head.rows) {
    nbytes = head.k * (int)sizeof(float);
    CopyBulk(memory + head.stage[0].from_at + row * Pitch(head.k), head.x + (begin + row) * head.k,
             nbytes, &arrivals);
  }
  if (!head.weights_ready) GridDependencySynchronize();
#pragma unroll 1
  for (int c = 0; c < head.copies; c++)
    nbytes += Begin(head.copy[c], (float)blockIdx.x / (float)gridDim.x, memory, &arrivals);
  ClearPadding<kRows>(memory + head.gradients_at, head.classes);
  if (head.weights_ready) GridDependencySynchronize();
  const unsigned arrival = Arrive(reduction);
#pragma unroll 1
  for (int64_t first = begin; first < head.rows; first += (int64_t)gridDim.x * kRows) {
    const int valid = (int)min((int64_t)kRows, head.rows - first);
    const bool exists = warp < valid;
    const Copy rows = {
        head.x + first * head.k, head.stage[0].from_at, valid, head.k, head.k, Pitch(head.k)};
    if (first > begin || !head.x_ready) nbytes += Begin(rows, 0.f, memory, &arrivals);
    CloseCopies();
    const auto label = labels.LoadLabel(first + warp, exists);
    WaitForCopies<0>();
    Arrive(&arrivals, nbytes);
    WaitForArrivals(&arrivals, phase);
    phase ^= 1, nbytes = 0;
#pragma unroll 1
    for (int s = 0; s < head.stages; s++) {
      Run<kRows, kTensorCores>(head.stage[s], head.partials_at, first, valid, memory);
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
      if (lane == 0) of_warp[warp] = sum;
      __syncthreads();
      if (first + (int64_t)gridDim.x * kRows >= head.rows)
        PublishBlockSum(of_warp, reduction);  // long before the block's end
    }
    LetBulkFollow();
    __syncthreads();
  }
  TriggerProgrammaticLaunch();
  if (begin >= head.rows) PublishBlockSum(0.f, reduction);
  FinishGridSum(arrival, reduction, scale, loss);
}

}  // namespace mlp_head

namespace {

using namespace mlp_head;

// ---- launchers ----

constexpr int kChunk = 256;        // floats, of a matrix copied without padding
constexpr int64_t kMaxPasses = 2;  // groups of rows that one block computes

// y (rows, n) = activation(x (rows, k) op(W) + bias), and dx = dact(x, dy op(W)^T).
struct Layer {
  const float* weight;  // (k, n), or (n, k) with transposed
  const float* bias;    // (n), or null
  float* y;             // null for the last layer
  float* dx;            // null where none is wanted
  int64_t k, n;
  bool transposed;
  int activation, dact;
};

struct Layers {
  Precision precision;
  const float* x;
  float* dlogits;
  int64_t rows, biases;
  int count;
  Layer of[kMaxHeadLayers];
};

// True where a weight is copied as it lies in memory: rows that nobody reads in quads, where they
// are short.
bool IsChunked(const Layer& layer, GemmKind kind) {
  const int row = (int)(layer.transposed ? layer.k : layer.n);
  return kind == GemmKind::kNarrow && !layer.dx && row % 2 == 0;
}

// The copy of a weight to `at` with rows `pitch` apart, or in chunks.
Copy WeightCopy(const Layer& layer, bool chunked, int at, int pitch) {
  const int rows = (int)(layer.transposed ? layer.n : layer.k);
  const int row = (int)(layer.transposed ? layer.k : layer.n), numel = rows * row;
  Copy copy = {layer.weight, at, rows, row, row, pitch};
  if (chunked) {
    copy.lines = CeilDiv32(numel, kChunk), copy.line = copy.pitch = kChunk;
    copy.last = (numel - 1) % kChunk + 1;
  }
  return copy;
}

// The stage that computes dx of a layer from the one that computes y.
Stage BackwardStage(const Layer& layer, Stage stage, bool tensor, int from_at, int to_at) {
  std::swap(stage.k, stage.n), std::swap(stage.k_stride, stage.n_stride);
  stage.kind = KindOf(tensor, !layer.transposed, stage.k, stage.n);
  stage.from_at = from_at, stage.to_at = to_at;
  stage.bias_at = -1, stage.activation = 0, stage.dact = layer.dact, stage.out = layer.dx;
  stage.aligned_out = layer.k % 4 == 0 && Aligned16(layer.dx);
  return stage;
}

// Lays out shared memory and the stages: value buffers, then weights, biases, and partial sums; its
// size in *nbytes.
template <int kRows>
Head Plan(const Layers& layers, bool tensor, int64_t* nbytes) {
  const int count = layers.count;
  Head head = {};
  head.x = layers.x, head.rows = layers.rows, head.dlogits = layers.dlogits;
  head.k = (int)layers.of[0].k, head.classes = (int)layers.of[count - 1].n;
  head.layers = head.stages = count;
  int64_t at = 0, partials = 0;
  const auto take = [&](int64_t numel) {
    at += numel;
    return (int)(at - numel);
  };
  int buffers[kMaxHeadLayers + 1];  // of each layer's input, and of dlogits
  for (int l = 0; l < count; l++) buffers[l] = take(kRows * Pitch((int)layers.of[l].k));
  buffers[count] = head.gradients_at = take(kRows * Pitch(head.classes));
  head.logits_at = take(kRows * Pitch(head.classes));
  for (int l = 0; l < count; l++) {
    const Layer& layer = layers.of[l];
    Stage& stage = head.stage[l];
    stage.k = (int)layer.k, stage.n = (int)layer.n;
    stage.kind = KindOf(tensor, layer.transposed, stage.k, stage.n);
    const bool chunked = IsChunked(layer, stage.kind);
    const int rows = layer.transposed ? stage.n : stage.k;
    const int row = layer.transposed ? stage.k : stage.n, pitch = chunked ? row : Pitch(row);
    stage.weight_at = take(RoundUp4(rows * pitch));
    head.copy[head.copies++] = WeightCopy(layer, chunked, stage.weight_at, pitch);
    stage.bias_at = layer.bias ? take(Pitch(stage.n)) : -1;
    if (layer.bias)
      head.copy[head.copies++] = {layer.bias, stage.bias_at, 1, stage.n, stage.n, stage.n};
    stage.k_stride = layer.transposed ? 1 : pitch;
    stage.n_stride = layer.transposed ? pitch : 1;
    stage.from_at = buffers[l], stage.to_at = l == count - 1 ? head.logits_at : buffers[l + 1];
    stage.activation = layer.activation, stage.out = layer.y;
    stage.aligned_out = stage.n % 4 == 0 && Aligned16(layer.y);
  }
  for (int l = count - 1; l >= 0 && layers.of[l].dx; l--)
    head.stage[head.stages++] =
        BackwardStage(layers.of[l], head.stage[l], tensor, buffers[l + 1], buffers[l]);
  for (Stage* stage = head.stage; stage < head.stage + head.stages; stage++) {
    Partition<kRows>(stage);
    if (!IsWarpPerRow(stage->kind))
      partials = std::max<int64_t>(partials, stage->k_slices * PartialNumel<kRows>(stage->n));
  }
  head.partials_at = take(partials);
  *nbytes = at * (int64_t)sizeof(float);
  return head;
}

// Fallback: a GEMM per product and a fused cross-entropy.
template <class Labels>
void RunUnfused(const char* op, DLContext ctx, const Layers& layers, const Labels& labels,
                const LossArgs& loss_args, DLStream stream) {
  const int count = layers.count;
  const int64_t rows = layers.rows, classes = layers.of[count - 1].n;
  const Scratch logits(ctx, std::max<int64_t>(1, rows * classes) * (int64_t)sizeof(float), stream);
  const float* x = layers.x;
  for (int l = 0; l < count; l++) {
    const Layer& layer = layers.of[l];
    Gemm p{x,     layer.weight,     layer.y ? layer.y : logits.floats(),
           rows,  layer.n,          layer.k,
           false, layer.transposed, ctx};
    p.precision = layers.precision;
    p.epilogue.bias = layer.bias;
    p.epilogue.activation = layer.activation;
    RunGemm(op, p, stream);
    x = p.c;
  }
  RunFusedCrossEntropy(op, ctx.device_id, x, rows, classes, labels, layers.dlogits,
                       loss_args.reduction, loss_args.scale, loss_args.loss, stream);
  const float* dy = layers.dlogits;
  for (int l = count - 1; l >= 0 && layers.of[l].dx; l--) {
    const Layer& layer = layers.of[l];
    Gemm p{dy, layer.weight, layer.dx, rows, layer.k, layer.n, false, !layer.transposed, ctx};
    p.precision = layers.precision;
    p.epilogue.gradient = layer.dact;
    if (layer.dact) p.epilogue.side = l ? layers.of[l - 1].y : layers.x;
    RunGemm(op, p, stream);
    dy = layer.dx;
  }
}

// The arguments of the kernel for two layers (mlp_head_pair.cuh), or none where it does not serve
// these.
std::optional<Pair> PairOf(const Layers& layers, int device) {
  const Layer &first = layers.of[0], &last = layers.of[1];
  const bool fits = layers.count == 2 && first.transposed && last.transposed && last.dx &&
                    first.k <= kMaxInputs && first.n <= kMaxHidden && last.n <= kMaxPairClasses &&
                    first.k % 4 == 0 && first.n % 4 == 0;
  if (!fits || last.activation || *WgmmaError(device)) return {};
  for (const void* p :
       {(const void*)layers.x, (const void*)first.weight, (const void*)last.weight,
        (const void*)first.bias, (const void*)first.y, (const void*)first.dx, (const void*)last.dx})
    if (!Aligned16(p)) return {};
  return Pair{layers.x,         last.weight,
              first.bias,       last.bias,
              first.y,          layers.dlogits,
              last.dx,          first.dx,
              layers.rows,      (int)first.k,
              (int)first.n,     (int)last.n,
              first.activation, last.dact,
              first.dact,       InputsAreReady(1, layers.count + (int)layers.biases)};
}

// Dynamic shared memory of the kernel for two layers.
size_t PairNbytes(const PairLayout& layout) { return kSwizzleNbytes + layout.end * sizeof(float); }

template <class Product, class Labels>
void RunPair(const char* op, const Layers& layers, const Pair& pair, const PairLayout& layout,
             int64_t blocks, const Labels& labels, const LossArgs& loss_args, DLStream stream) {
  const Layer& first = layers.of[0];
  const CUtensorMap map = BoxMap(op, DL_FLOAT32, first.weight, first.k, first.n, first.k, 1,
                                 layout.units, Product::kTensorCores);
  const auto kernel = pair.classes <= 10 ? PairKernel<Product, 10, Labels>
                                         : PairKernel<Product, kMaxPairClasses, Labels>;
  LaunchSmall(op, kernel, (unsigned)blocks, 1, kHeadThreads,
              SpreadOut(op, (unsigned)blocks, PairNbytes(layout)), true, stream, map, pair, layout,
              labels, loss_args.reduction, loss_args.scale, loss_args.loss);
}

// Launches blocks of kRows rows, or of fewer where these suffice or more do not fit.
template <int kRows, class Labels>
void RunHead(const char* op, DLContext ctx, const Layers& layers, const Labels& labels,
             const LossArgs& loss_args, DLStream stream) {
  const int device = ctx.device_id, multiprocessors = Multiprocessors(device);
  int64_t nbytes;
  const bool tensor = layers.precision == Precision::kTf32 && ComputeMajor(device) >= 8;
  Head head = Plan<kRows>(layers, tensor, &nbytes);
  const bool fits = (size_t)nbytes + sizeof(Head) + 1024 <= SharedLimit(device);
  if constexpr (kRows > 1) {
    if (!fits || CeilDiv(layers.rows, kRows / 2) <= multiprocessors)
      return RunHead<kRows / 2>(op, ctx, layers, labels, loss_args, stream);
  }
  head.weights_ready = InputsAreReady(1, layers.count + (int)layers.biases);
  head.x_ready = InputsAreReady(0, 1) && ComputeMajor(device) >= 9 && layers.rows > 0 &&
                 head.k % 4 == 0 && Aligned16(layers.x);
  if (layers.rows == 0) head.copies = 0;  // nothing would wait for them
  const int64_t groups = CeilDiv(layers.rows, kRows);
  const int64_t most = std::min(multiprocessors, kMaxPartials);
  const int64_t passes = std::max<int64_t>(1, CeilDiv(groups, most));
  if (!fits || passes > kMaxPasses) return RunUnfused(op, ctx, layers, labels, loss_args, stream);
  const int64_t blocks = std::max<int64_t>(1, CeilDiv(groups, passes));
  if constexpr (kRows == kPairRows) {
    if (const std::optional<Pair> pair = PairOf(layers, device)) {
      const PairLayout layout(*pair, tensor);
      const auto run = tensor ? RunPair<TensorPair, Labels> : RunPair<FfmaPair, Labels>;
      if (PairNbytes(layout) + 1024 <= SharedLimit(device))
        return run(op, layers, *pair, layout, blocks, labels, loss_args, stream);
    }
  }
  // No other kernel runs beside this one, so its blocks are spread over all multiprocessors.
  const size_t shared = SpreadOut(op, (unsigned)blocks, (size_t)nbytes);
  const auto kernel = tensor ? HeadKernel<kRows, true, Labels> : HeadKernel<kRows, false, Labels>;
  LaunchSmall(op, kernel, (unsigned)blocks, 1, kHeadThreads, shared, ComputeMajor(device) >= 9,
              stream, head, labels, loss_args.reduction, loss_args.scale, loss_args.loss);
}

Layers CheckedLayers(const char* op, const DLArray* x, const DLArrayList* weights,
                     const DLArrayList* biases, const HeadOptions& options, DLArray* dlogits,
                     DLArrayList* values, DLArrayList* gradients) {
  Layers layers = {};
  layers.count = (int)weights->count;
  if (layers.count < 1 || layers.count > kMaxHeadLayers)
    Fail("%s: expected 1 to %d layers, got %ld", op, kMaxHeadLayers, (long)weights->count);
  if (x->ndim != 2 || values->count != layers.count - 1 || gradients->count > layers.count)
    Fail("%s: %d layers of %s give no %ld values and %ld gradients", op, layers.count,
         ShapeText(x).c_str(), (long)values->count, (long)gradients->count);
  layers.precision = CheckedPrecision(op, options.precision);
  layers.x = In(op, x);
  layers.rows = x->shape[0];
  layers.biases = biases->count;
  const auto check = [&](const DLArray* a, int64_t rows, int64_t columns) {
    CheckArray(op, a, x->ctx);
    if (a->ndim != 2 || a->shape[0] != rows || a->shape[1] != columns)
      Fail("%s: expected shape (%ld, %ld), got %s", op, (long)rows, (long)columns,
           ShapeText(a).c_str());
  };
  int64_t k = x->shape[1], bias = 0;
  for (int l = 0; l < layers.count; l++) {
    const DLArray* w = weights->arrays[l];
    const HeadLayer& given = options.layers[l];
    Layer& layer = layers.of[l];
    layer.activation = CheckedEpilogue(op, given.activation, 0, kActivations);
    layer.dact = CheckedEpilogue(op, given.dact, 0, kActivationGradients);
    layer.transposed = given.transposed;
    const int64_t n = Numel(w) / (k ? k : 1);
    check(w, layer.transposed ? n : k, layer.transposed ? k : n);
    if (k < 1 || n < 1 || k > INT16_MAX || n > INT16_MAX)
      Fail("%s: a layer of %ld x %ld does not fit a block", op, (long)k, (long)n);
    layer.weight = In(op, w);
    layer.k = k, layer.n = n;
    if (given.has_bias) {
      if (bias == biases->count || Numel(biases->arrays[bias]) != n)
        Fail("%s: expected a bias of %ld elements for layer %d", op, (long)n, l);
      CheckArray(op, biases->arrays[bias], x->ctx);
      layer.bias = In(op, biases->arrays[bias++]);
    }
    if (l + 1 < layers.count) {
      check(values->arrays[l], layers.rows, n);
      layer.y = Out(op, values->arrays[l]);
    }
    if (l >= layers.count - gradients->count) {
      DLArray* dx = gradients->arrays[layers.count - 1 - l];
      check(dx, layers.rows, k);
      layer.dx = Out(op, dx);
    }
    k = n;
  }
  check(dlogits, layers.rows, k);
  layers.dlogits = Out(op, dlogits);
  return layers;
}

// loss = scale * sum of the rows' losses; dlogits = their gradients times dy; the layers' values
// but the last, first to last; the gradients of their inputs, last to first.
template <bool kSparse>
void MlpHead(const DLArray* x, const DLArrayList* weights, const DLArrayList* biases,
             const DLArray* labels, const DLArray* partials, Struct<HeadOptions> options,
             DLArray* loss, DLArray* dlogits, DLArrayList* values, DLArrayList* gradients,
             DLStream stream) {
  const char* op = kSparse ? "fused_sparse_mlp_head" : "fused_mlp_head";
  Enter(op, loss, x, labels, partials, dlogits);
  const Layers layers = CheckedLayers(op, x, weights, biases, *options, dlogits, values, gradients);
  const LossArgs loss_args{CheckedReduction(op, partials), options->scale, CheckedLoss(op, loss)};
  if constexpr (kSparse) {
    RunHead<8>(op, x->ctx, layers, CheckedClasses(op, labels, dlogits, options->dy), loss_args,
               stream);
  } else {
    const Rows given(op, labels);  // (rows, classes), as the logits
    if (given.count != layers.rows || given.classes != dlogits->shape[1])
      Fail("%s: labels %s do not fit logits %s", op, ShapeText(labels).c_str(),
           ShapeText(dlogits).c_str());
    RunHead<8>(op, x->ctx, layers, DenseLabels{In(op, labels), options->dy}, loss_args, stream);
  }
}

// With larger weights than these, which a block keeps in shared memory, tiled GEMMs are as fast.
constexpr int64_t kMaxWeights = 32768;  // elements of all layers
constexpr int64_t kMaxWidth = 1024;     // of a layer

// Any number of rows fits: the launcher runs tiled GEMMs where there are very many.
bool HeadFits(const DLArray*, const DLArrayList* weights, const DLArrayList*, const DLArray*,
              const DLArray*, Struct<HeadOptions>, DLArray*, DLArray*, DLArrayList*, DLArrayList*) {
  int64_t numel = 0;
  for (int64_t k = 0; k < weights->count; k++) {
    const DLArray* w = weights->arrays[k];
    if (w->ndim != 2 || Numel(w) < 1 || std::max(w->shape[0], w->shape[1]) > kMaxWidth)
      return false;
    numel += Numel(w);
  }
  return weights->count >= 1 && weights->count <= kMaxHeadLayers && numel <= kMaxWeights;
}

DLSYS_KERNEL(cuda, fused_mlp_head, MlpHead<false>);
DLSYS_KERNEL(cuda, fused_sparse_mlp_head, MlpHead<true>);
DLSYS_FITS(cuda, fused_mlp_head, HeadFits);
DLSYS_FITS(cuda, fused_sparse_mlp_head, HeadFits);

}  // namespace
}  // namespace cuda
}  // namespace dlsys
