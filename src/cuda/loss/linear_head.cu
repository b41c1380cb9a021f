// Fused linear classifier: logits of a few classes, softmax cross-entropy and the gradients of
// weight and bias, in one launch. A block takes a few rows at a time: a thread has four features of
// each, in shared memory, and of every class's weights, in registers, so that x is read once and
// serves forward and back. Nothing is written but the loss and, by block, the gradients of its
// rows: an update adds these in a fixed order (optim/summed_update.cu).
//
// x (rows, k), k a multiple of 4, weight (classes, k) or (k, classes), all float32, contiguous;
// what does not allow 16-byte loads is copied first. Latency limits it: of the weight's loads, and
// of sums over a block's threads.
#include <optional>

#include "cuda/gemm/panel.cuh"
#include "cuda/loss/cross_entropy.cuh"
#include "cuda/runtime/launch.cuh"
#include "cuda/runtime/lists.cuh"
#include "operators/mlp_head.h"

namespace dlsys {
namespace cuda {
namespace linear_head {

constexpr int kRows = 8;  // of a block at a time, a warp's each
constexpr int kWarps = kThreads / 32;
static_assert(kRows == kWarps, "a warp has a row's loss");
constexpr int kMaxFeatures = 4 * kThreads, kMaxClasses = 16;

struct Head {
  const float *x, *weight, *bias;  // bias may be null
  float *of_weight, *of_bias;      // a block's gradients, one behind the other; of_bias may be null
  int64_t rows;
  int k, classes;
  bool x_ready;  // PDL: x and labels may be read before the predecessor ends
};

// ---- sums over the lanes of a warp ----

// Adds the values of lanes kLanes / 2 apart and leaves half of them to each: of kCount values, that
// are kCount / 2, or all where they are odd in number.
template <int kCount, int kLanes>
__device__ __forceinline__ void ScatterSums(float* values, int* first) {
  if constexpr (kLanes > 1) {
    constexpr int kApart = kLanes / 2;
    if constexpr (kCount % 2) {
#pragma unroll
      for (int i = 0; i < kCount; i++) values[i] += __shfl_xor_sync(0xffffffffu, values[i], kApart);
      ScatterSums<kCount, kApart>(values, first);
    } else {
      const bool upper = threadIdx.x & kApart;
#pragma unroll
      for (int i = 0; i < kCount / 2; i++) {
        const float mine = upper ? values[i + kCount / 2] : values[i];
        const float other = upper ? values[i] : values[i + kCount / 2];
        values[i] = mine + __shfl_xor_sync(0xffffffffu, other, kApart);
      }
      if (upper) *first += kCount / 2;
      ScatterSums<kCount / 2, kApart>(values, first);
    }
  }
}

// What ScatterSums of so many values leaves: how many to a lane, and how many lanes have the same.
struct Scattered {
  int count, lanes = 32;
  __host__ __device__ constexpr explicit Scattered(int values) : count(values) {
    for (; lanes > 1 && count % 2 == 0; lanes /= 2) count /= 2;
  }
};

// ---- the kernel ----

// Four features, from k0 on, of each class's weights; zeros where there are none.
template <int kClasses, bool kKMajor>
__device__ __forceinline__ void LoadWeights(const Head& head, int k0, float (&to)[kClasses][4]) {
  const int classes = head.classes;
  const float* from = head.weight + (kKMajor ? k0 : k0 * classes);
#pragma unroll
  for (int c = 0; c < kClasses; c++) {
    const bool exists = c < classes && k0 < head.k;
    if constexpr (kKMajor) {
      const float4 v = exists ? *(const float4*)from : make_float4(0.f, 0.f, 0.f, 0.f);
      to[c][0] = v.x, to[c][1] = v.y, to[c][2] = v.z, to[c][3] = v.w;
      from += head.k;
    } else {
#pragma unroll
      for (int e = 0; e < 4; e++) to[c][e] = exists ? from[e * classes + c] : 0.f;
    }
  }
}

// Writes them, of the gradient.
template <int kClasses, bool kKMajor>
__device__ __forceinline__ void StoreSums(const Head& head, int k0,
                                          const float (&sums)[kClasses][4]) {
  const int classes = head.classes;
  if (k0 >= head.k) return;
  float* to =
      head.of_weight + (int64_t)blockIdx.x * classes * head.k + (kKMajor ? k0 : k0 * classes);
#pragma unroll
  for (int c = 0; c < kClasses; c++) {
    if (c >= classes) break;
    if constexpr (kKMajor) {
      *(float4*)to = make_float4(sums[c][0], sums[c][1], sums[c][2], sums[c][3]);
      to += head.k;
    } else {
#pragma unroll
      for (int e = 0; e < 4; e++) to[e * classes + c] = sums[c][e];
    }
  }
}

__device__ __forceinline__ void AddScaled(float d, float4 x, float (&sums)[4]) {
  sums[0] = fmaf(d, x.x, sums[0]), sums[1] = fmaf(d, x.y, sums[1]);
  sums[2] = fmaf(d, x.z, sums[2]), sums[3] = fmaf(d, x.w, sums[3]);
}

// kClasses: an even upper bound of the classes. kKMajor: the weight is (classes, k).
template <int kClasses, bool kKMajor, class Labels>
__global__ __launch_bounds__(kThreads, kClasses > 10 ? 1 : 2)  // others run beside it
    void LinearHeadKernel(const Head head, Labels labels, GridReduction reduction, float scale,
                          Output loss) {
  constexpr int kPass = 2;  // rows whose logits are summed together
  constexpr int kSums = kPass * kClasses;
  constexpr Scattered kLeft(kSums);
  __shared__ float partial[kWarps][kRows * kClasses];
  __shared__ float logits[kRows][kClasses];
  __shared__ __align__(16) float gradients[kRows][kClasses];  // 0 past the classes
  __shared__ float of_row[kRows];
  const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, k0 = 4 * (int)threadIdx.x;
  const int classes = head.classes, k = head.k;
  __shared__ __align__(16) float x[kRows][kMaxFeatures];  // a thread reads what it copied
  const auto copy_rows = [&](int64_t first) {
#pragma unroll 1
    for (int r = 0; r < kRows; r++)
      CopyAsync16(x[r] + k0, head.x + (first + r) * k + k0, first + r < head.rows && k0 < k);
    CloseCopies();
  };
  const int64_t begin = (int64_t)blockIdx.x * kRows, step = (int64_t)gridDim.x * kRows;
  if (head.x_ready && begin < head.rows) copy_rows(begin);
  if ((int)threadIdx.x < kRows * kClasses)
    gradients[threadIdx.x / kClasses][threadIdx.x % kClasses] = 0.f;
  GridDependencySynchronize();
  TriggerProgrammaticLaunch();
  const unsigned arrival = Arrive(reduction);
  const int own = (int)threadIdx.x % kClasses;  // the class of the logit that the thread finishes
  static_assert(kRows * kClasses <= kThreads, "a thread finishes one logit");
  const float bias = head.bias && own < classes ? head.bias[own] : 0.f;
  float sums[kClasses][4] = {}, of_bias = 0.f, total = 0.f;
  for (int64_t first = begin; first < head.rows; first += step) {
    const bool exists = first + warp < head.rows;
    const auto label = labels.LoadLabel(first + warp, exists);
    if (first > begin || !head.x_ready) copy_rows(first);
    {
      float weight[kClasses][4];
      LoadWeights<kClasses, kKMajor>(head, k0, weight);
      WaitForCopies<0>();
#pragma unroll 1
      for (int pass = 0; pass < kRows; pass += kPass) {
        float products[kSums];
#pragma unroll
        for (int r = 0; r < kPass; r++) {
          const float4 v = *(const float4*)(x[pass + r] + k0);
#pragma unroll
          for (int c = 0; c < kClasses; c++)
            products[r * kClasses + c] = fmaf(v.x, weight[c][0], v.y * weight[c][1]) +
                                         fmaf(v.z, weight[c][2], v.w * weight[c][3]);
        }
        int at = pass * kClasses;
        ScatterSums<kSums, 32>(products, &at);
        if (lane % kLeft.lanes) continue;
#pragma unroll
        for (int i = 0; i < kLeft.count; i++) partial[warp][at + i] = products[i];
      }
    }
    __syncthreads();
    if ((int)threadIdx.x < kRows * kClasses) {
      float sum = bias;
#pragma unroll
      for (int w = 0; w < kWarps; w++) sum += partial[w][threadIdx.x];
      logits[threadIdx.x / kClasses][own] = sum;
    }
    __syncthreads();
    if (exists) {
      const auto put = [&](int64_t c, float d) { gradients[warp][c] = d; };
      total += labels.template Row<32, 1>(logits[warp], first + warp, label, classes, classes, lane,
                                          put);
    } else if (lane < kClasses) {
      gradients[warp][lane] = 0.f;
    }
    if (lane == 0) of_row[warp] = total;
    __syncthreads();
    if (first + step >= head.rows)
      PublishBlockSum(of_row, reduction);  // long before the block's end
#pragma unroll 2
    for (int r = 0; r < kRows; r++) {
      const float4 v = *(const float4*)(x[r] + k0);
#pragma unroll
      for (int c = 0; c < kClasses; c += 2) {
        const float2 d = *(const float2*)&gradients[r][c];
        AddScaled(d.x, v, sums[c]), AddScaled(d.y, v, sums[c + 1]);
      }
    }
    if ((int)threadIdx.x < classes) {
#pragma unroll
      for (int r = 0; r < kRows; r++) of_bias += gradients[r][threadIdx.x];
    }
    // The next rows' partial sums are written behind two barriers, gradients behind three.
  }
  if (begin >= head.rows) PublishBlockSum(0.f, reduction);
  StoreSums<kClasses, kKMajor>(head, k0, sums);
  if (head.of_bias && (int)threadIdx.x < classes)
    head.of_bias[(int64_t)blockIdx.x * classes + threadIdx.x] = of_bias;
  FinishGridSum(arrival, reduction, scale, loss);
}

}  // namespace linear_head

namespace {

using linear_head::kMaxClasses;
using linear_head::kMaxFeatures;

// ---- launchers ----

template <int kClasses, class Labels>
void LaunchLinearHead(const char* op, int device, const linear_head::Head& head, bool k_major,
                      unsigned blocks, const Labels& labels, const LossArgs& args,
                      DLStream stream) {
  const auto kernel = k_major ? linear_head::LinearHeadKernel<kClasses, true, Labels>
                              : linear_head::LinearHeadKernel<kClasses, false, Labels>;
  LaunchSmall(op, kernel, blocks, 1, kThreads, 0, ComputeMajor(device) >= 9, stream, head, labels,
              args.reduction, args.scale, args.loss);
}

template <class Labels>
void RunLinearHead(const char* op, int device, const linear_head::Head& head, bool k_major,
                   unsigned blocks, const Labels& labels, const LossArgs& args, DLStream stream) {
  const auto launch = head.classes <= 4    ? LaunchLinearHead<4, Labels>
                      : head.classes <= 10 ? LaunchLinearHead<10, Labels>
                                           : LaunchLinearHead<kMaxClasses, Labels>;
  launch(op, device, head, k_major, blocks, labels, args, stream);
}

struct Shape {
  int64_t rows, k, classes, parts;
  bool k_major;
  bool IsServed() const {
    return k >= 1 && k <= kMaxFeatures && k % 4 == 0 && classes >= 1 && classes <= kMaxClasses;
  }
};

// The elements of an array, or of a copy of it where they do not allow 16-byte loads.
const float* Aligned(const char* op, const DLArray* a, std::optional<Scratch>* copy,
                     DLStream stream) {
  const float* from = In(op, a);
  if (Aligned16(from)) return from;
  const int64_t nbytes = Numel(a) * (int64_t)sizeof(float);
  copy->emplace(a->ctx, nbytes, stream);
  if (!Workspace::Querying())
    Check(op,
          cudaMemcpyAsync((*copy)->data(), from, nbytes, cudaMemcpyDeviceToDevice, Native(stream)));
  return (*copy)->floats();
}

// The sizes of a head, checked against its arrays.
Shape CheckedShape(const char* op, const DLArray* x, const DLArray* weight,
                   const DLArrayList* biases, const HeadOptions& options,
                   const DLArrayList* gradients) {
  if (x->ndim != 2 || weight->ndim != 2 || biases->count > 1 || gradients->count < 1 ||
      gradients->count > 2)
    Fail("%s: expected matrices x and weight, a bias or none, and the gradients of one or two", op);
  Shape s = {x->shape[0], x->shape[1], 0, 0, options.layers[0].transposed != 0};
  s.classes = weight->shape[s.k_major ? 0 : 1];
  const DLArray* of_weight = gradients->arrays[0];
  s.parts = of_weight->ndim == 3 ? of_weight->shape[0] : 0;
  const bool fits = weight->shape[s.k_major ? 1 : 0] == s.k && s.parts >= 1 &&
                    s.parts <= kMaxPartials && of_weight->shape[1] == weight->shape[0] &&
                    of_weight->shape[2] == weight->shape[1] &&
                    (biases->count == 0 || Numel(biases->arrays[0]) == s.classes) &&
                    (gradients->count == 1 || Numel(gradients->arrays[1]) == s.parts * s.classes);
  if (!fits)
    Fail("%s: x %s, weight %s and gradients %s do not fit", op, ShapeText(x).c_str(),
         ShapeText(weight).c_str(), ShapeText(of_weight).c_str());
  return s;
}

// loss = scale * sum of the rows' losses; gradients: those of weight and, if wanted, bias times dy,
// (parts, ...), each of the rows that one block has.
template <bool kSparse>
void LinearHead(const DLArray* x, const DLArray* weight, const DLArrayList* biases,
                const DLArray* labels, const DLArray* partials, Struct<HeadOptions> options,
                DLArray* loss, DLArrayList* gradients, DLStream stream) {
  const char* op = kSparse ? "sparse_linear_head" : "linear_head";
  Enter(op, loss, x, weight, labels, partials);
  EnterAll(op, {biases, gradients});
  const Shape s = CheckedShape(op, x, weight, biases, *options, gradients);
  if (!s.IsServed())
    Fail("%s: expected up to %d features, a multiple of 4, and %d classes, got %ld and %ld", op,
         kMaxFeatures, kMaxClasses, (long)s.k, (long)s.classes);
  linear_head::Head head = {};
  std::optional<Scratch> aligned_x, aligned_weight;
  head.x = Aligned(op, x, &aligned_x, stream),
  head.weight = Aligned(op, weight, &aligned_weight, stream);
  head.bias = biases->count ? In(op, biases->arrays[0]) : nullptr;
  head.of_weight = Out(op, gradients->arrays[0]);
  head.of_bias = gradients->count > 1 ? Out(op, gradients->arrays[1]) : nullptr;
  head.rows = s.rows, head.k = (int)s.k, head.classes = (int)s.classes;
  const int label = 2 + (int)biases->count;  // its position among the inputs
  head.x_ready = !aligned_x && InputsAreReady(0, 1) && InputsAreReady(label, 1);
  const LossArgs args{CheckedReduction(op, partials), options->scale, CheckedLoss(op, loss)};
  if (!Aligned16(head.of_weight)) Fail("%s: expected gradients that allow 16-byte stores", op);
  const int device = x->ctx.device_id;
  DLArray logits = *x;  // what the labels belong to
  int64_t shape[2] = {s.rows, s.classes};
  logits.shape = shape;
  if constexpr (kSparse) {
    RunLinearHead(op, device, head, s.k_major, (unsigned)s.parts,
                  CheckedClasses(op, labels, &logits, options->dy), args, stream);
  } else {
    CheckSameShape(op, labels, &logits);
    RunLinearHead(op, device, head, s.k_major, (unsigned)s.parts,
                  DenseLabels{In(op, labels), options->dy}, args, stream);
  }
}

bool LinearHeadFits(const DLArray* x, const DLArray* weight, const DLArrayList* biases,
                    const DLArray*, const DLArray*, Struct<HeadOptions> options, DLArray*,
                    DLArrayList* gradients) {
  const Shape s = CheckedShape("linear_head", x, weight, biases, *options, gradients);
  return s.IsServed();
}

DLSYS_KERNEL(cuda, linear_head, LinearHead<false>);
DLSYS_KERNEL(cuda, sparse_linear_head, LinearHead<true>);
DLSYS_FITS(cuda, linear_head, LinearHeadFits);
DLSYS_FITS(cuda, sparse_linear_head, LinearHeadFits);

}  // namespace
}  // namespace cuda
}  // namespace dlsys
