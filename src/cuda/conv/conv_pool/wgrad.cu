// Filter and bias gradients of the fused convolution + relu + max-pool; operators/conv_pool.h has
// the contract.
//
// A block keeps row bands of an image in shared memory: padded x, and dy unpooled to convolution
// positions, outputs fastest. A thread owns one kernel row of one channel for some outputs and
// slides it along every row of its slice; a row of ones in place of x yields the bias gradient.
// Sums stay in registers over all images of a block, are reduced over slices, then over blocks by a
// second kernel, always in the same order; that one may step the filter and the bias at once, so
// that no gradient is written. Limited by FFMA issue and shared-memory reads.
#include <algorithm>
#include <string>

#include "cuda/conv/conv_pool/conv_pool.cuh"
#include "cuda/conv/conv_pool/sparse.cuh"
#include "cuda/gemm/gemm.cuh"
#include "cuda/optim/summed_update.cuh"
#include "cuda/runtime/launch.cuh"
#include "cuda/runtime/lists.cuh"
#include "cuda/runtime/widened.cuh"
#include "operators/optimizer_args.h"

namespace dlsys {
namespace cuda {
namespace {

struct Task {
  int images, channels, outputs;
  Plane plane;
  int kh, kw;
  int out_h, out_w;          // pooled
  int bands, band;           // row bands per image; pooled rows per band
  int groups, group_blocks;  // groups of outputs per block; blocks that share all groups
  int kernel_rows;           // (channel, kernel row) pairs, and the row of ones
  int slices;                // of rows, among threads
  int workers;               // blocks along the images
  int pitch;                 // of a position of dy
  int x_numel, dy_numel;     // floats of shared memory
  Frame frame;
  Divisor of_windows, of_width;  // windows of a band and of a row

  __device__ int Threads() const { return groups * kernel_rows; }
  // Sums that a worker leaves: filter, then bias.
  __host__ __device__ int Sums() const { return outputs * (channels * kh * kw + 1); }
};

// ---- kernels ----

// Unpools `rows` pooled rows of dy (outputs, out) to (rows * window, out_w * window, pitch), each
// element where its code says, zeros elsewhere and for outputs up to the pitch.
template <int kWindow>
__device__ __forceinline__ void ScatterWindows(const Task& t, const float* dy, const uint8_t* code,
                                               int outputs, int rows, float* to) {
  constexpr int kAtOnce = 4;
  const int windows = (int)t.of_windows.value, wide = t.out_w * kWindow;
  const int all = CeilDiv32(t.pitch, 4) * windows * 4;
  for (int first = (int)threadIdx.x; first < all; first += kAtOnce * (int)blockDim.x) {
    float value[kAtOnce];
    uint8_t position[kAtOnce];
#pragma unroll
    for (int e = 0; e < kAtOnce; e++) {
      const int k = first + e * (int)blockDim.x, quad = k / 4 / t.of_windows;
      const int window = k / 4 - quad * windows, output = quad * 4 + k % 4;
      const int64_t at = (int64_t)output * t.out_h * t.out_w + window;
      const bool exists = k < all && output < outputs && window < rows * t.out_w;
      position[e] = exists ? code[at] : kCut;
      value[e] = exists ? dy[at] : 0.f;
    }
#pragma unroll
    for (int e = 0; e < kAtOnce; e++) {
      const int k = first + e * (int)blockDim.x, quad = k / 4 / t.of_windows;
      const int window = k / 4 - quad * windows, output = quad * 4 + k % 4;
      if (k >= all || output >= t.pitch || window >= rows * t.out_w) continue;
      const int i = window / t.of_width, j = window - i * t.out_w;
      float* corner = to + (i * wide + j) * kWindow * t.pitch + output;
#pragma unroll
      for (int a = 0; a < kWindow; a++)
#pragma unroll
        for (int b = 0; b < kWindow; b++)
          corner[(a * wide + b) * t.pitch] = position[e] == a * kWindow + b ? value[e] : 0.f;
    }
  }
}

// sum[o][b] += over a row of positions: dy of kOutputs outputs times x shifted by b.
template <int kKernelW, int kWindow, int kOutputs>
__device__ __forceinline__ void Slide(const float* x, const float* dy, int pitch, int windows,
                                      float (&sum)[kOutputs][kKernelW]) {
  float seen[kKernelW + kWindow - 1];
#pragma unroll
  for (int b = 0; b < kKernelW - 1; b++) seen[b + kWindow] = x[b];
  x += kKernelW - 1;
#pragma unroll 2
  for (int j = 0; j < windows; j++, x += kWindow) {
#pragma unroll
    for (int b = 0; b < kKernelW - 1; b++) seen[b] = seen[b + kWindow];
#pragma unroll
    for (int k = 0; k < kWindow; k++) seen[kKernelW - 1 + k] = x[k];
#pragma unroll
    for (int k = 0; k < kWindow; k++, dy += pitch) {
      float gradients[kOutputs];
      Vectors<kOutputs>::Read(dy, gradients);
#pragma unroll
      for (int o = 0; o < kOutputs; o++)
#pragma unroll
        for (int b = 0; b < kKernelW; b++) sum[o][b] = fmaf(gradients[o], seen[b + k], sum[o][b]);
    }
  }
}

// Reduces the slices of a block into `partial`.
template <int kKernelW, int kOutputs>
__device__ void ReduceSlices(const Task& t, const float (&sum)[kOutputs][kKernelW], int first,
                             float* shared, float* partial) {
  const int threads = t.Threads(), all = t.slices * threads, kernel_size = t.channels * t.kh * t.kw;
  if ((int)threadIdx.x < all) {
#pragma unroll
    for (int k = 0; k < kOutputs * kKernelW; k++)
      shared[k * all + (int)threadIdx.x] = sum[k / kKernelW][k % kKernelW];
  }
  __syncthreads();
  for (int k = (int)threadIdx.x; k < kOutputs * kKernelW * threads; k += (int)blockDim.x) {
    const int of = k / threads, thread = k - of * threads, b = of % kKernelW;
    const int output = first + thread / t.kernel_rows * kOutputs + of / kKernelW;
    const int row = thread % t.kernel_rows;
    const bool of_bias = row == t.kernel_rows - 1;
    if (output >= t.outputs || b >= (of_bias ? 1 : t.kw)) continue;
    float total = 0.f;
    for (int s = 0; s < t.slices; s++) total += shared[of * all + s * threads + thread];
    partial[of_bias ? t.outputs * kernel_size + output : output * kernel_size + row * t.kw + b] =
        total;
  }
}

template <int kKernelW, int kWindow, int kOutputs>
__global__ void __launch_bounds__(kThreads)
    FilterGradientKernel(const Task t, const float* x, const float* dy, const uint8_t* code,
                         float* partial) {
  float* const shared = DynamicShared<float>();
  float *spread = shared, *input = spread + t.dy_numel, *ones = input + t.x_numel;
  const int worker = (int)blockIdx.x / t.group_blocks;
  const int first = (int)blockIdx.x % t.group_blocks * t.groups * kOutputs;
  const int slice = (int)threadIdx.x / t.Threads(), thread = (int)threadIdx.x % t.Threads();
  const int group = thread / t.kernel_rows, row = thread % t.kernel_rows;
  const bool of_bias = row == t.kernel_rows - 1;
  const float* from =
      of_bias ? ones : input + row / t.kh * t.frame.channel_pitch + row % t.kh * t.frame.pitch;
  const int down = of_bias ? 0 : t.frame.pitch, wide = t.out_w * kWindow * t.pitch;
  for (int k = (int)threadIdx.x; k < t.frame.width + kSlack; k += (int)blockDim.x) ones[k] = 1.f;
  if (t.bands == 1) Clear(input, t.x_numel);
  GridDependencySynchronize();
  TriggerProgrammaticLaunch();
  float sum[kOutputs][kKernelW] = {};
  for (int64_t unit = worker; unit < (int64_t)t.images * t.bands; unit += t.workers) {
    const int64_t image = unit / t.bands;
    const int begin = (int)(unit % t.bands) * t.band, rows = min(t.band, t.out_h - begin);
    const int64_t at = ((image * t.outputs + first) * t.out_h + begin) * t.out_w;
    __syncthreads();  // the previous unit has been read
    const float* planes = x + image * t.channels * t.plane.h * t.plane.w;
    if (t.bands == 1)
      LoadPlanes<4>(planes, t.channels, t.plane, t.frame, input);
    else
      LoadBand(planes, t.channels, t.plane.h, t.plane.w, t.plane.top - begin * kWindow,
               t.plane.left, t.frame, input);
    ScatterWindows<kWindow>(t, dy + at, code + at, min(t.groups * kOutputs, t.outputs - first),
                            rows, spread);
    __syncthreads();
    if (slice < t.slices)
      for (int r = slice; r < rows * kWindow; r += t.slices)
        Slide<kKernelW, kWindow>(from + r * down, spread + r * wide + group * kOutputs, t.pitch,
                                 t.out_w, sum);
  }
  __syncthreads();
  ReduceSlices(t, sum, first, shared, partial + (int64_t)worker * t.Sums());
}

constexpr int kSumCols = 32, kSumRows = 16;

// df and, if wanted, db: column sums of partial (workers, numel + biases).
__global__ void ReduceWorkersKernel(const float* partial, int workers, int numel, int biases,
                                    float* df, float* db) {
  __shared__ float of_row[kSumRows][kSumCols];
  const int lane = (int)threadIdx.x % kSumCols, row = (int)threadIdx.x / kSumCols;
  const int col = (int)blockIdx.x * kSumCols + lane, cols = numel + biases;
  float total = 0.f;
  GridDependencySynchronize();
  TriggerProgrammaticLaunch();
  if (col < cols) {
#pragma unroll 8
    for (int k = row; k < workers; k += kSumRows) total += partial[(int64_t)k * cols + col];
  }
  of_row[row][lane] = total;
  __syncthreads();
  if (row || col >= cols) return;
#pragma unroll
  for (int k = 1; k < kSumRows; k++) total += of_row[k][lane];
  if (col < numel)
    df[col] = total;
  else if (db)
    db[col - numel] = total;
}

// ---- launchers ----

constexpr int kMaxResident = 4;  // blocks per multiprocessor: each leaves sums to be reduced

int WidthOf(int64_t kernel_size) { return 3 + 2 * KernelWidthIndex(kernel_size); }

// Row pitches that bring the kernel rows of all channels to different banks, or tight ones where
// that does not fit.
void LayOutShared(Task* t, int window, bool close) {
  const int rows = t->band * window + t->kh - 1, width = t->out_w * window + t->kw - 1;
  const int pitch = width | 1;
  int channel_pitch = rows * pitch;
  while (!close && channel_pitch % 32 != t->kh * pitch % 32) channel_pitch++;
  t->frame = {rows, width, pitch, channel_pitch};
  t->x_numel = (int)RoundUp((int64_t)t->channels * channel_pitch + kSlack, 4);
  t->dy_numel = (int)RoundUp((int64_t)t->band * window * t->out_w * window * t->pitch, 4);
}

int64_t Shared(const Task& t) { return (int64_t)t.x_numel + t.dy_numel + t.frame.width + kSlack; }

// Partitions outputs and rows over blocks and threads for an option of outputs per thread.
void Partition(Task* t, int option, int window) {
  const int64_t groups = CeilDiv(t->outputs, kOutputsPerThread[option]);
  t->group_blocks = (int)CeilDiv(groups, std::max(1, kThreads / t->kernel_rows));
  t->groups = (int)CeilDiv(groups, t->group_blocks);
  t->pitch = PitchOf(kOutputsPerThread[option], t->groups);
  t->bands = 0;
  do {  // the fewest bands of rows that fit
    t->bands++;
    t->band = (int)CeilDiv(t->out_h, t->bands);
    LayOutShared(t, window, true);
  } while (Shared(*t) > kMaxSharedFloats && t->band > 1);
  t->of_windows = Divisor((int64_t)t->band * t->out_w), t->of_width = Divisor(t->out_w);
  const Task least = *t;
  LayOutShared(t, window, false);
  if (Shared(*t) > kMaxSharedFloats) *t = least;
  t->slices = std::max(1, std::min(kThreads / (t->groups * t->kernel_rows), t->band * window));
}

double Instructions(const Task& t, int option, int window) {
  const int outputs = kOutputsPerThread[option], kernel_size = WidthOf(t.kw);
  const int of_window =
      window * (outputs * kernel_size + outputs / (outputs % 4 ? 2 : 4) + 1) + kernel_size + 2;
  return (double)CeilDiv(t.band * window, t.slices) * t.bands * t.out_w * of_window;
}

template <int kKernelW, int kWindow, int kOutputs>
void LaunchFilterGradient(const char* op, const Task& t, int64_t numel, bool pdl, DLStream stream,
                          const float* x, const float* dy, const uint8_t* code, float* partial) {
  const int threads = (int)RoundUp(t.slices * t.groups * t.kernel_rows, 32);
  const int64_t joined = (int64_t)t.slices * t.groups * t.kernel_rows * kOutputs * kKernelW;
  LaunchSmall(op, FilterGradientKernel<kKernelW, kWindow, kOutputs>,
              (unsigned)(t.workers * t.group_blocks), 1, threads,
              std::max(numel, joined) * sizeof(float), pdl, stream, t, x, dy, code, partial);
}
using Launcher = decltype(&LaunchFilterGradient<3, 2, 2>);

#define DLSYS_OUTPUTS(...)                                                     \
  {LaunchFilterGradient<__VA_ARGS__, 2>, LaunchFilterGradient<__VA_ARGS__, 4>, \
   LaunchFilterGradient<__VA_ARGS__, 6>}
constexpr Launcher kLaunchers[2][3][3] = {
    {DLSYS_OUTPUTS(3, 2), DLSYS_OUTPUTS(5, 2), DLSYS_OUTPUTS(7, 2)},
    {DLSYS_OUTPUTS(3, 3), DLSYS_OUTPUTS(5, 3), DLSYS_OUTPUTS(7, 3)}};
#undef DLSYS_OUTPUTS

Task TaskOf(const ConvPool& p, const float* x) {
  Task t{};
  t.images = (int)p.conv.n;
  t.channels = (int)p.conv.c;
  t.outputs = (int)p.conv.o;
  t.plane = Plane::Of(x, p.conv.in.h, p.conv.in.w, p.conv.pad.h, p.conv.pad.w);
  t.kh = (int)p.conv.kernel.h;
  t.kw = (int)p.conv.kernel.w;
  t.out_h = (int)p.out.h;
  t.out_w = (int)p.out.w;
  t.kernel_rows = t.channels * t.kh + 1;
  return t;
}

// The option of outputs per thread with the least cost, for which the task is then partitioned.
int Choose(Task* t, int window, int multiprocessors) {
  int best = 0;
  double least = 0;
  for (int k = 0; k < 3; k++) {
    Partition(t, k, window);
    const double threads =
        (double)t->images * t->group_blocks * t->groups * t->kernel_rows * t->slices;
    const bool fits = Shared(*t) <= kMaxSharedFloats;
    const double cost =
        fits ? CostOf(threads, Instructions(*t, k, window), multiprocessors) : 1e300;
    if (k == 0 || cost < least) {
      least = cost;
      best = k;
    }
  }
  Partition(t, best, window);
  return best;
}

bool Conv2dPoolFilterGradientFits(const DLArray* x, const DLArray* dy, const DLArray* code,
                                  DLArrayList* gradients, Struct<HW> pad, int64_t window, int64_t) {
  const char* op = "conv2d_pool_filter_gradient";
  if (gradients->count < 1) return false;
  const ConvPool p = CheckedConvPool(op, x, gradients->arrays[0], dy, code, *pad, window);
  if (p.Empty()) return false;
  Task t = TaskOf(p, nullptr);
  const auto fits = [&](int k) {
    Partition(&t, k, (int)window);
    return Shared(t) <= kMaxSharedFloats;
  };
  return t.kernel_rows <= kThreads && (fits(0) || fits(1) || fits(2));
}

// The gradients of filter (o, c, kernel) and bias (o), to be added.
void RunFilterGradient(const char* op, const ConvPool& p, const DLArray* x, const DLArray* dy,
                       const DLArray* code, int64_t precision, const AddWorkers& add,
                       DLStream stream) {
  const bool tensor = CheckedPrecision(op, precision) == Precision::kTf32;
  if (tensor && ConvPoolTensorFilterGradient(op, p, In(op, x), In(op, dy), Codes(op, code), add,
                                             x->ctx, stream))
    return;
  if (SparseFilterGradient(op, p, In(op, x), In(op, dy), Codes(op, code), add, x->ctx, stream))
    return;
  Task t = TaskOf(p, In(op, x));
  const int device = x->ctx.device_id, multiprocessors = Multiprocessors(device);
  const int window = (int)p.window;
  const int option = t.kernel_rows > kThreads ? 0 : Choose(&t, window, multiprocessors);
  if (t.kernel_rows > kThreads || Shared(t) > kMaxSharedFloats)
    Fail("%s: the H x W of %s is too large", op, ShapeText(x).c_str());
  const int64_t units = (int64_t)t.images * t.bands;
  const int64_t max_workers = std::max<int64_t>(1, kMaxResident * multiprocessors / t.group_blocks);
  t.workers = (int)CeilDiv(units, std::max<int64_t>(1, CeilDiv(units, max_workers)));
  Scratch partial(x->ctx, (int64_t)t.workers * t.Sums() * sizeof(float), stream);
  kLaunchers[window - 2][KernelWidthIndex(t.kw)][option](
      op, t, Shared(t), ComputeMajor(device) >= 9, stream, In(op, x), In(op, dy), Codes(op, code),
      partial.floats());
  add(partial.floats(), t.workers, t.Sums() - t.outputs, t.outputs);
}

// df (o, c, kernel) and, if wanted, db (o) from x, dy and code.
void Conv2dPoolFilterGradient(const DLArray* x, const DLArray* dy, const DLArray* code,
                              DLArrayList* gradients, Struct<HW> pad, int64_t window,
                              int64_t precision, DLStream stream) {
  const char* op = "conv2d_pool_filter_gradient";
  if (gradients->count < 1 || gradients->count > 2) Fail("%s: expected one or two gradients", op);
  DLArray* df = gradients->arrays[0];
  Enter(op, df, x, dy, code);
  const ConvPool p = CheckedConvPool(op, x, df, dy, code, *pad, window);
  float *of_filter = Out(op, df), *of_bias = nullptr;
  if (gradients->count == 2) {
    Enter(op, df, gradients->arrays[1]);
    if (Numel(gradients->arrays[1]) != p.conv.o) Fail("%s: expected a bias for each filter", op);
    of_bias = Out(op, gradients->arrays[1]);
  }
  if (!Numel(df)) return;
  const bool pdl = ComputeMajor(df->ctx.device_id) >= 9;
  const auto reduce = [&](const float* partial, int workers, int numel, int biases) {
    LaunchSmall(op, ReduceWorkersKernel, (unsigned)CeilDiv(numel + biases, kSumCols), 1,
                kSumCols * kSumRows, 0, pdl, stream, partial, workers, numel, biases, of_filter,
                of_bias);
  };
  RunFilterGradient(op, p, x, dy, code, precision, reduce, stream);
}

template <class Rule>
const char* UpdateName() {
  static const std::string name = std::string("conv2d_pool_") + Rule::name;
  return name.c_str();
}

// Steps the filter and, where it has states, the bias by the rule with their gradients from x, dy
// and code. State j of the filter is at j times the number of parameters, of the bias behind it.
template <class Rule>
void Conv2dPoolUpdate(DLArrayList* states, const DLArray* x, const DLArray* dy, const DLArray* code,
                      const DLArrayList* lr, const DLArrayList* step, const DLArrayList* count,
                      const DLArrayList* scale, Struct<rule::UpdateOptions> options, Struct<HW> pad,
                      int64_t window, int64_t precision, DLStream stream) {
  const char* op = UpdateName<Rule>();
  EnterAll(op, {states, lr, step, count, scale});
  const int64_t parameters = states->count / Rule::kStates;
  if (parameters < 1 || parameters > 2 || states->count % Rule::kStates)
    Fail("%s: expected the states of a filter and perhaps a bias, got %ld arrays", op,
         (long)states->count);
  DLArray* filter = states->arrays[0];
  Enter(op, filter, x, dy, code);
  const ConvPool p = CheckedConvPool(op, x, filter, dy, code, *pad, window);
  if (parameters == 2 && Numel(states->arrays[1]) != p.conv.o)
    Fail("%s: expected a bias for each filter", op);
  SummedParameter<Rule::kStates> members[2];
  for (int64_t k = 0; k < parameters; k++)
    for (int j = 0; j < Rule::kStates; j++) {
      DLArray* state = states->arrays[j * parameters + k];
      CheckSameShape(op, state, states->arrays[k]);
      members[k].states[j] = Out(op, state);
    }
  const rule::Source source = CheckedSource(op, lr, step, count, scale, *options);
  if (!Numel(filter)) return;
  const auto update = [&](const float* partial, int workers, int numel, int biases) {
    members[0].parts = partial, members[1].parts = partial + numel;
    members[0].size = numel, members[1].size = biases;
    for (int64_t k = 0; k < parameters; k++)
      members[k].pitch = numel + biases, members[k].count = workers;
    RunSummedUpdate<Rule>(op, members, (int)parameters, source, filter->ctx.device_id, stream);
  };
  RunFilterGradient(op, p, x, dy, code, precision, update, stream);
}

DLSYS_KERNEL(cuda, conv2d_pool_filter_gradient, Conv2dPoolFilterGradient);
DLSYS_KERNEL_WIDENED(cuda, conv2d_pool_filter_gradient, Conv2dPoolFilterGradient);
DLSYS_FITS(cuda, conv2d_pool_filter_gradient, Conv2dPoolFilterGradientFits);

#define DLSYS_UPDATE(Rule)                                                        \
  DLSYS_KERNEL_OF(cuda, conv2d_pool_##Rule, UpdateName<rule::Rule>(), DL_FLOAT32, \
                  Conv2dPoolUpdate<rule::Rule>);
DLSYS_RULES(DLSYS_UPDATE)
#undef DLSYS_UPDATE

}  // namespace
}  // namespace cuda
}  // namespace dlsys
