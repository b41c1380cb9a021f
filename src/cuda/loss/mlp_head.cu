// The dense layers at a network's end, their loss and their gradients back: what a block of the
// kernel in head.cuh keeps where, and the launch. Where a chip has too little shared memory, or
// there are so many rows that tiles do better, products with epilogues and a loss kernel do the
// same.
#include <algorithm>

#include "cuda/loss/mlp_head.cuh"

namespace dlsys {
namespace cuda {
namespace {

using namespace dense;

constexpr int kLine = 256;          // of what is copied without lines of its own
constexpr int64_t kMostRounds = 2;  // times that a block goes through the layers

// y (rows, n) = activation(x (rows, k) op(W) + bias); and dx = slope(x, dy op(W)^T).
struct Layer {
  const float* weight;  // (k, n), or (n, k) with transposed
  const float* bias;    // (n), or null
  float* y;             // null for the last
  float* dx;            // null where no gradient goes
  int64_t k, n;
  bool transposed;
  int activation, slope;
};

struct Layers {
  Precision precision;
  const float* x;
  float* dlogits;
  int64_t rows, biases;
  int count;
  Layer of[kMostLayers];
};

// The plan of a block: sheets, then what stays, then what comes and goes; its bytes in *nbytes.
template <int kRows>
Head Plan(const Layers& layers, bool tensor, int64_t* nbytes) {
  const int count = layers.count;
  Head head = {};
  head.x = layers.x, head.rows = layers.rows, head.dlogits = layers.dlogits;
  head.k = (int)layers.of[0].k, head.classes = (int)layers.of[count - 1].n;
  head.layers = head.stages = count;
  int64_t at = 0, parts = 0;
  const auto take = [&](int64_t numel) {
    at += numel;
    return (int)(at - numel);
  };
  int sheets[kMostLayers + 1];  // of each layer's x, and of the gradient of the logits
  for (int l = 0; l < count; l++) sheets[l] = take(kRows * Pitch((int)layers.of[l].k));
  sheets[count] = head.gradients_at = take(kRows * Pitch(head.classes));
  head.logits_at = take(kRows * Pitch(head.classes));
  for (int l = 0; l < count; l++) {
    const Layer& layer = layers.of[l];
    const int k = (int)layer.k, n = (int)layer.n;
    const int rows = layer.transposed ? n : k, row = layer.transposed ? k : n;
    const Way way = WayOf(tensor, layer.transposed, k, n);
    // Lines that nobody reads in quads are copied as they lie in memory, where they are short.
    const bool pairs = way == Way::kFew && !layer.dx && row % 2 == 0;
    const bool joined = pairs || (way == Way::kTensor && row % 4 != 0);
    const int pitch = joined ? row : Pitch(row), numel = rows * row;
    const int weight_at = take(Whole(rows * pitch));
    head.copy[head.copies++] =
        joined ? Copy{layer.weight, weight_at, Ceil(numel, kLine), kLine, (numel - 1) % kLine + 1,
                      kLine}
               : Copy{layer.weight, weight_at, rows, row, row, pitch};
    int bias_at = -1;
    if (layer.bias) {
      bias_at = take(Pitch(n));
      head.copy[head.copies++] = {layer.bias, bias_at, 1, n, n, n};
    }
    const bool last = l == count - 1;
    Stage& stage = head.stage[l];
    stage.way = way, stage.depth = k, stage.width = n;
    stage.weight_at = weight_at;
    stage.depth_step = layer.transposed ? 1 : pitch;
    stage.column_step = layer.transposed ? pitch : 1;
    stage.from_at = sheets[l], stage.to_at = last ? head.logits_at : sheets[l + 1];
    stage.bias_at = bias_at, stage.activation = layer.activation, stage.out = layer.y;
    stage.whole_out = n % 4 == 0 && Aligned16(layer.y);
  }
  for (int l = count - 1; l >= 0 && layers.of[l].dx; l--) {
    const Layer& layer = layers.of[l];
    Stage& stage = head.stage[head.stages++];
    stage = head.stage[l];
    std::swap(stage.depth, stage.width), std::swap(stage.depth_step, stage.column_step);
    stage.way = WayOf(tensor, !layer.transposed, stage.depth, stage.width);
    stage.from_at = sheets[l + 1], stage.to_at = sheets[l];
    stage.bias_at = -1, stage.activation = 0, stage.slope = layer.slope, stage.out = layer.dx;
    stage.whole_out = layer.k % 4 == 0 && Aligned16(layer.dx);
  }
  for (Stage* stage = head.stage; stage < head.stage + head.stages; stage++) {
    ShareOut<kRows>(stage);
    if (!OfRows(stage->way))
      parts = std::max<int64_t>(parts, stage->parts * PartNumel<kRows>(stage->width));
  }
  head.parts_at = take(parts);
  *nbytes = at * (int64_t)sizeof(float);
  return head;
}

struct Target {
  Meeting meeting;
  float scale;
  float* loss;
};

// The same by a kernel for each product and one for the loss.
template <class Labels>
void RunApart(const char* op, DLContext ctx, const Layers& layers, const Labels& labels,
              const Target& target, DLStream stream) {
  const int count = layers.count;
  const int64_t rows = layers.rows, classes = layers.of[count - 1].n;
  const Scratch logits(ctx, std::max<int64_t>(1, rows * classes) * (int64_t)sizeof(float), stream);
  const float* x = layers.x;
  for (int l = 0; l < count; l++) {
    const Layer& layer = layers.of[l];
    Product p{x,     layer.weight,     layer.y ? layer.y : logits.floats(),
              rows,  layer.n,          layer.k,
              false, layer.transposed, ctx};
    p.precision = layers.precision;
    p.epilogue.bias = layer.bias;
    p.epilogue.activation = layer.activation;
    Multiply(op, p, stream);
    x = p.c;
  }
  RunPair(op, ctx.device_id, x, rows, classes, labels, layers.dlogits, target.meeting, target.scale,
          target.loss, stream);
  const float* dy = layers.dlogits;
  for (int l = count - 1; l >= 0 && layers.of[l].dx; l--) {
    const Layer& layer = layers.of[l];
    Product p{dy, layer.weight, layer.dx, rows, layer.k, layer.n, false, !layer.transposed, ctx};
    p.precision = layers.precision;
    p.epilogue.gradient = layer.slope;
    if (layer.slope) p.epilogue.side = l ? layers.of[l - 1].y : layers.x;
    Multiply(op, p, stream);
    dy = layer.dx;
  }
}

// By blocks of kRows rows, or of fewer where these are enough or more have no place.
template <int kRows, class Labels>
void RunHead(const char* op, DLContext ctx, const Layers& layers, const Labels& labels,
             const Target& target, DLStream stream) {
  const int device = ctx.device_id, multiprocessors = Multiprocessors(device);
  int64_t nbytes;
  const bool tensor = layers.precision == Precision::kTf32 && ComputeMajor(device) >= 8;
  Head head = Plan<kRows>(layers, tensor, &nbytes);
  const bool fits = (size_t)nbytes + sizeof(Head) + 1024 <= SharedLimit(device);
  if constexpr (kRows > 1) {
    if (!fits || CeilDiv(layers.rows, kRows / 2) <= multiprocessors)
      return RunHead<kRows / 2>(op, ctx, layers, labels, target, stream);
  }
  head.early = InputsAreReady(1, layers.count + (int)layers.biases);
  head.rows_early = InputsAreReady(0, 1) && ComputeMajor(device) >= 9 && layers.rows > 0 &&
                    head.k % 4 == 0 && Aligned16(layers.x);
  if (layers.rows == 0) head.copies = 0;  // nobody would wait for them
  const int64_t groups = CeilDiv(layers.rows, kRows);
  const int64_t most = std::min(multiprocessors, kMeetingPlaces);
  const int64_t rounds = std::max<int64_t>(1, CeilDiv(groups, most));
  if (!fits || rounds > kMostRounds) return RunApart(op, ctx, layers, labels, target, stream);
  const int64_t blocks = std::max<int64_t>(1, CeilDiv(groups, rounds));
  // Everything waits for the head: little else wants the room beside it.
  const size_t shared = SpreadOut(op, (unsigned)blocks, (size_t)nbytes);
  const auto kernel = tensor ? HeadKernel<kRows, true, Labels> : HeadKernel<kRows, false, Labels>;
  LaunchClusters(op, kernel, (unsigned)blocks, 1, kHeadThreads, shared, ComputeMajor(device) >= 9,
                 stream, head, labels, target.meeting, target.scale, target.loss);
}

// Ten bits of `code` a layer, the first one's lowest: the activation in four, the slope in four,
// whether W is transposed, whether there is a bias. The precision is in those above all layers.
Layers CheckedLayers(const char* op, const DLArray* x, const DLArrayList* weights,
                     const DLArrayList* biases, int64_t code, DLArray* dlogits, DLArrayList* values,
                     DLArrayList* gradients) {
  Layers layers = {};
  layers.count = (int)weights->count;
  if (layers.count < 1 || layers.count > kMostLayers)
    Fail("%s: expected 1 to %d layers, got %ld", op, kMostLayers, (long)weights->count);
  if (x->ndim != 2 || values->count != layers.count - 1 || gradients->count > layers.count)
    Fail("%s: %d layers of %s give no %ld values and %ld gradients", op, layers.count,
         ShapeText(x).c_str(), (long)values->count, (long)gradients->count);
  layers.precision = CheckedPrecision(op, code >> 10 * kMostLayers);
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
  for (int l = 0; l < layers.count; l++, code >>= 10) {
    const DLArray* w = weights->arrays[l];
    Layer& layer = layers.of[l];
    layer.activation = CheckedMap(op, code & 15, 0, kActivations);
    layer.slope = CheckedMap(op, code >> 4 & 15, 0, kActivationGradients);
    layer.transposed = code >> 8 & 1;
    const int64_t n = Numel(w) / (k ? k : 1);
    check(w, layer.transposed ? n : k, layer.transposed ? k : n);
    if (k < 1 || n < 1 || k > INT16_MAX || n > INT16_MAX)
      Fail("%s: a layer of %ld x %ld has no place in a block", op, (long)k, (long)n);
    layer.weight = In(op, w);
    layer.k = k, layer.n = n;
    if (code >> 9 & 1) {
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

void RunLayers(const char* op, const DLArray* x, const DLArrayList* weights,
               const DLArrayList* biases, const DLArray* labels, const DLArray* meeting,
               int64_t code, float scale, DLArray* loss, DLArray* dlogits, DLArrayList* values,
               DLArrayList* gradients, bool sparse, float dy, DLStream stream) {
  Enter(op, loss, x, labels, meeting, dlogits);
  const Layers layers = CheckedLayers(op, x, weights, biases, code, dlogits, values, gradients);
  const Target target{CheckedMeeting(op, meeting), scale, CheckedLoss(op, loss)};
  if (sparse)
    return RunHead<8>(op, x->ctx, layers, CheckedClasses(op, labels, dlogits, dy), target, stream);
  const Rows given(op, labels);  // of as many axes as the caller's logits had
  if (given.count != layers.rows || given.classes != dlogits->shape[1])
    Fail("%s: labels %s do not fit logits %s", op, ShapeText(labels).c_str(),
         ShapeText(dlogits).c_str());
  RunHead<8>(op, x->ctx, layers, DenseLabels{In(op, labels), dy}, target, stream);
}

// loss = scale * the sum of the rows' losses; dlogits = their gradients times dy; the layers'
// values but the last one's, first to last; the gradients of their inputs, last to first.
void CrossEntropyHead(const DLArray* x, const DLArrayList* weights, const DLArrayList* biases,
                      const DLArray* labels, const DLArray* meeting, int64_t code, float scale,
                      float dy, DLArray* loss, DLArray* dlogits, DLArrayList* values,
                      DLArrayList* gradients, DLStream stream) {
  RunLayers("fused_mlp_head", x, weights, biases, labels, meeting, code, scale, loss, dlogits,
            values, gradients, false, dy, stream);
}

void SparseCrossEntropyHead(const DLArray* x, const DLArrayList* weights, const DLArrayList* biases,
                            const DLArray* labels, const DLArray* meeting, int64_t code,
                            float scale, float dy, DLArray* loss, DLArray* dlogits,
                            DLArrayList* values, DLArrayList* gradients, DLStream stream) {
  RunLayers("fused_sparse_mlp_head", x, weights, biases, labels, meeting, code, scale, loss,
            dlogits, values, gradients, true, dy, stream);
}

// With larger weights than these, which a block keeps in shared memory, products by tiles are as
// fast.
constexpr int64_t kMostWeights = 32768;  // elements of all layers
constexpr int64_t kMostWidth = 1024;     // of a layer

// Of any number of rows: where there are very many, the launcher makes the products by tiles.
bool HeadFits(const DLArray*, const DLArrayList* weights, const DLArrayList*, const DLArray*,
              const DLArray*, int64_t, float, float, DLArray*, DLArray*, DLArrayList*,
              DLArrayList*) {
  int64_t numel = 0;
  for (int64_t k = 0; k < weights->count; k++) {
    const DLArray* w = weights->arrays[k];
    if (w->ndim != 2 || Numel(w) < 1 || std::max(w->shape[0], w->shape[1]) > kMostWidth)
      return false;
    numel += Numel(w);
  }
  return weights->count >= 1 && weights->count <= kMostLayers && numel <= kMostWeights;
}

DLSYS_KERNEL(cuda, fused_mlp_head, CrossEntropyHead);
DLSYS_KERNEL(cuda, fused_sparse_mlp_head, SparseCrossEntropyHead);
DLSYS_FITS(cuda, fused_mlp_head, HeadFits);
DLSYS_FITS(cuda, fused_sparse_mlp_head, HeadFits);

}  // namespace
}  // namespace cuda
}  // namespace dlsys
