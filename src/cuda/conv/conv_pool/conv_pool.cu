// Direct convolution fused with bias, relu and max-pool, and its data gradient where neither
// conv_pool/sparse.cu nor conv_pool/tensor.cu serves it; operators/conv_pool.h has the contract,
// conv_pool/wgrad.cu the filter gradient.
//
// A block keeps the padded channels of one or a few images and all filters in shared memory; a
// thread accumulates a patch of positions for some outputs in registers. Forward a patch is a
// pooling window. The data gradient is the same correlation with mirrored filters over dy unpooled
// into shared memory: a window's dy stands where its code says, zeros elsewhere; channels are split
// over threads and reduced in a fixed order. Limited by FFMA issue and by shared memory, which
// bounds the shapes that fit.
#include <algorithm>
#include <iterator>

#include "cuda/conv/conv_pool/conv_pool.cuh"
#include "cuda/conv/conv_pool/few.cuh"
#include "cuda/conv/conv_pool/sparse.cuh"
#include "cuda/gemm/gemm.cuh"
#include "cuda/runtime/launch.cuh"
#include "cuda/runtime/pinned.cuh"
#include "cuda/runtime/widened.cuh"

namespace dlsys {
namespace cuda {
namespace {

constexpr int kPatch = 2;  // side of a patch of dx

// Outputs of a thread of the forward kernel, and threads of a block by them.
constexpr int kForwardOutputs[] = {1, 2, 4, 6};
constexpr int MostThreads(int outputs) { return outputs > 2 ? kThreads : 2 * kThreads; }

// A launch of either kernel: what it reads and writes, and how work is partitioned.
struct Task {
  int images, channels, outputs;  // channels read and outputs written per image
  Plane plane;                    // of the channels read
  int kh, kw, window;
  int out_h, out_w;             // pooled
  int down, across;             // patches
  int groups, group_blocks;     // groups of outputs per block; blocks that share all groups
  int slices;                   // of channels, among threads
  int images_per_block, tiles;  // images a block holds together; tiles of so many images
  int pitch, filter_numel, biases_at;
  Frame frame;
  Divisor of_patches, of_across, of_windows, of_width, of_window;
  bool relu;
  bool filters_ready;  // PDL: they may be read before the predecessor ends

  __device__ int Patches() const { return down * across; }
  // Floats of shared memory for the filters and one image.
  int64_t Shared() const { return filter_numel + (int64_t)channels * frame.channel_pitch + kSlack; }
};

// ---- kernels ----

// f (outputs, rest) to (rest, pitch)
__device__ __forceinline__ void LoadFilters(const Task& t, const float* f, float* to) {
  const int rest = t.channels * t.kh * t.kw, lane = (int)threadIdx.x % 32;
  for (int o = (int)threadIdx.x / 32; o < t.outputs; o += (int)blockDim.x / 32)
    for (int k = lane; k < rest; k += 32) to[k * t.pitch + o] = f[o * rest + k];
}

// f (channels, outputs, kernel) to (channels, mirrored kernel, pitch), `count` outputs from `first`
// on
__device__ __forceinline__ void LoadMirrored(const Task& t, const float* f, int first, int count,
                                             float* to) {
  const int kernel_size = t.kh * t.kw, lane = (int)threadIdx.x % 32;
  for (int c = (int)threadIdx.x / 32; c < t.channels; c += (int)blockDim.x / 32)
    for (int k = lane; k < count * kernel_size; k += 32) {
      const int o = k / kernel_size, kernel_offset = k - o * kernel_size;
      to[((c + 1) * kernel_size - 1 - kernel_offset) * t.pitch + o] =
          f[(c * t.outputs + first) * kernel_size + k];
    }
}

template <int kKernelW, int kSide, int kOutputs>
__global__ void __launch_bounds__(MostThreads(kOutputs), 4 * kThreads / MostThreads(kOutputs))
    ConvPoolKernel(const Task t, const float* x, const float* f, const float* bias, float* y,
                   uint8_t* code) {
  float *filters = DynamicShared<float>(), *input = filters + t.filter_numel;
  float* const biases = filters + t.biases_at;
  if (!t.filters_ready) GridDependencySynchronize();
  Clear(input, t.images_per_block * t.channels * t.frame.channel_pitch);
  LoadFilters(t, f, filters);
  if (t.filters_ready) GridDependencySynchronize();
  TriggerProgrammaticLaunch();
  for (int o = (int)threadIdx.x; o < t.outputs; o += (int)blockDim.x)
    biases[o] = bias ? bias[o] : 0.f;
  for (int tile = (int)blockIdx.x; tile < t.tiles; tile += (int)gridDim.x) {
    const int64_t first = (int64_t)tile * t.images_per_block;
    const int count = (int)min((int64_t)t.images_per_block, t.images - first);
    __syncthreads();  // the previous tile has been read
    LoadPlanes<4>(x + first * t.channels * t.plane.h * t.plane.w, count * t.channels, t.plane,
                  t.frame, input);
    __syncthreads();
    const int patches = t.Patches(), items = t.groups * count * patches;
    for (int item = (int)threadIdx.x; item < items; item += (int)blockDim.x) {
      const int of_all = item / t.of_patches, patch = item - of_all * patches;
      const int group = of_all / count, image = of_all - group * count;
      const int i = patch / t.of_across, j = patch - i * t.across;
      float sum[kOutputs][kSide * kSide];
#pragma unroll
      for (int k = 0; k < kOutputs * kSide * kSide; k++)
        sum[k / (kSide * kSide)][k % (kSide * kSide)] =
            biases[min(group * kOutputs + k / (kSide * kSide), t.outputs - 1)];
      const float* corner =
          input + image * t.channels * t.frame.channel_pitch + (i * t.frame.pitch + j) * kSide;
      Correlate<kKernelW, kSide, kOutputs>(corner, t.channels, t.frame, t.kh, t.kw,
                                           filters + group * kOutputs, t.pitch, sum);
      const int outputs = t.outputs - group * kOutputs;
      const int64_t at = ((first + image) * t.outputs + group * kOutputs) * patches + patch;
#pragma unroll
      for (int o = 0; o < kOutputs; o++) {
        if (o >= outputs) break;
        Pool(sum[o], t.relu, y + at + o * patches, code + at + o * patches);
      }
    }
  }
}

// Unpools dy: each element goes where its code says, into zeroed channels.
__device__ __forceinline__ void ScatterWindows(const Task& t, const float* dy, const uint8_t* code,
                                               float* input) {
  constexpr int kAtOnce = 4;
  const int windows = (int)t.of_windows.value, all = t.channels * windows;
  for (int first = (int)threadIdx.x; first < all; first += kAtOnce * (int)blockDim.x) {
    float value[kAtOnce];
    uint8_t position[kAtOnce];
#pragma unroll
    for (int e = 0; e < kAtOnce; e++) {
      const int k = first + e * (int)blockDim.x;
      position[e] = k < all ? code[k] : kCut;
      value[e] = k < all ? dy[k] : 0.f;
    }
#pragma unroll
    for (int e = 0; e < kAtOnce; e++) {
      if (position[e] == kCut) continue;
      const int k = first + e * (int)blockDim.x, channel = k / t.of_windows;
      const int at = k - channel * windows, row = at / t.of_width,
                inner = position[e] / t.of_window;
      const int i = row * t.window + inner + t.plane.top;
      const int j = (at - row * t.out_w) * t.window + position[e] - inner * t.window + t.plane.left;
      input[channel * t.frame.channel_pitch + i * t.frame.pitch + j] = value[e];
    }
  }
}

// Reduces the channel slices in a fixed order and writes dx (outputs, h, w).
template <int kOutputs>
__device__ __forceinline__ void ReduceSlices(const Task& t, const float* sums, int slice, int item,
                                             int items, int outputs, float* dx) {
  const int group = item / t.Patches(), patch = item % t.Patches();
  const int i = patch / t.across * kPatch, j = patch % t.across * kPatch;
  const int stride = kOutputs * kPatch * kPatch * items;
  for (int k = slice; k < kOutputs * kPatch; k += t.slices) {
    const int output = group * kOutputs + k / kPatch, row = i + k % kPatch;
    float left = 0.f, right = 0.f;
    for (int s = 0; s < t.slices; s++) {
      left += sums[s * stride + k * kPatch * items + item];
      right += sums[s * stride + (k * kPatch + 1) * items + item];
    }
    if (output >= outputs || row >= t.plane.h) continue;
    float* to = dx + ((int64_t)output * t.plane.h + row) * t.plane.w + j;
    if (t.plane.w % 2 == 0) {
      *(float2*)to = make_float2(left, right);
    } else {
      to[0] = left;
      if (j + 1 < t.plane.w) to[1] = right;
    }
  }
}

template <int kKernelW, int kOutputs>
__global__ void __launch_bounds__(kThreads)
    DataGradientKernel(const Task t, const float* f, const float* dy, const uint8_t* code,
                       float* dx) {
  float *filters = DynamicShared<float>(), *input = filters + t.filter_numel;
  const int first = (int)blockIdx.x % t.group_blocks * t.groups * kOutputs;
  const int outputs = min(t.groups * kOutputs, t.outputs - first);
  if (!t.filters_ready) GridDependencySynchronize();
  LoadMirrored(t, f, first, outputs, filters);
  if (t.filters_ready) GridDependencySynchronize();
  TriggerProgrammaticLaunch();
  const int items = t.groups * t.Patches();
  const int slice = (int)threadIdx.x / items, item = (int)threadIdx.x % items;
  const int slice_channels = CeilDiv32(t.channels, t.slices), channel = slice * slice_channels;
  const int group = item / t.Patches(), patch = item % t.Patches();
  const int corner = (patch / t.across * t.frame.pitch + patch % t.across) * kPatch;
  for (int64_t image = blockIdx.x / t.group_blocks; image < t.images;
       image += gridDim.x / t.group_blocks) {
    Clear(input, t.channels * t.frame.channel_pitch);
    __syncthreads();
    const int64_t from = image * t.channels * t.out_h * t.out_w;
    ScatterWindows(t, dy + from, code + from, input);
    __syncthreads();
    float sum[kOutputs][kPatch * kPatch] = {};
    if (slice < t.slices)
      Correlate<kKernelW, kPatch, kOutputs>(
          input + channel * t.frame.channel_pitch + corner,
          min(slice_channels, t.channels - channel), t.frame, t.kh, t.kw,
          filters + channel * t.kh * t.kw * t.pitch + group * kOutputs, t.pitch, sum);
    __syncthreads();
    if (slice < t.slices) {
#pragma unroll
      for (int k = 0; k < kOutputs * kPatch * kPatch; k++)
        input[(slice * kOutputs * kPatch * kPatch + k) * items + item] =
            sum[k / (kPatch * kPatch)][k % (kPatch * kPatch)];
    }
    __syncthreads();
    if (slice < t.slices)
      ReduceSlices<kOutputs>(t, input, slice, item, items, outputs,
                             dx + (image * t.outputs + first) * t.plane.h * t.plane.w);
    __syncthreads();
  }
}

// ---- launchers ----

// Instructions of a thread that reduces over `channels`.
double Instructions(const Task& t, int channels, int side, int outputs) {
  const int per_offset = side * side * outputs + outputs / VectorWidth(outputs);
  return (double)channels * t.kh * (t.kw * per_offset + 2 * (side + t.kw) + 6);
}

// Lays out shared memory: rows padded so that threads beside and below each other read different
// banks, or tightly packed where that does not fit.
void LayOutShared(Task* t, int side, int outputs) {
  t->pitch = PitchOf(outputs, t->groups);
  t->biases_at = t->channels * t->kh * t->kw * t->pitch;
  t->filter_numel = (int)RoundUp(t->biases_at + t->outputs, 4);
  const int rows = t->down * side + t->kh - 1, width = t->across * side + t->kw - 1;
  const int close = (int)RoundUp(width, 2), banks = side % 2 ? 32 : 16;
  int pitch = close;
  while (pitch % banks != (int)RoundUp(t->across, 2) % banks) pitch += 2;
  t->frame = {rows, width, pitch, rows * pitch};
  if (t->Shared() > kMaxSharedFloats) t->frame = {rows, width, close, rows * close};
}

constexpr double kImpossible = 1e300;

// The index of the outputs per thread with the least cost; cost(outputs) is evaluated for them
// last.
template <size_t kCount, class Cost>
int LeastCost(const int (&outputs)[kCount], const Cost& cost) {
  int best = 0;
  double least = cost(outputs[0]);
  for (int k = 1; k < (int)kCount; k++) {
    const double other = cost(outputs[k]);
    if (other < least) {
      least = other;
      best = k;
    }
  }
  cost(outputs[best]);
  return best;
}

int64_t Fitting(const char* op, int64_t numel) {
  if (numel > kMaxSharedFloats)
    Fail("%s: the channels and filters of an image take %ld bytes of shared memory, of %ld", op,
         (long)(numel * sizeof(float)), (long)(kMaxSharedFloats * sizeof(float)));
  return numel;
}

int RoundUpToWarps(int items, int most) {
  const int waves = (int)CeilDiv(items, most);
  return (int)RoundUp(CeilDiv(items, waves), 32);
}

template <int kKernelW, int kSide, int kOutputs>
void LaunchForward(const char* op, const Task& t, int threads, size_t nbytes, int device,
                   DLStream stream, const float* x, const float* f, const float* bias, float* y,
                   uint8_t* code) {
  const auto kernel = ConvPoolKernel<kKernelW, kSide, kOutputs>;
  const unsigned grid = TiledGrid(op, kernel, threads, nbytes, t.tiles, device);
  LaunchSmall(op, kernel, grid, 1, threads, nbytes, ComputeMajor(device) >= 9, stream, t, x, f,
              bias, y, code);
}
using ForwardLauncher = decltype(&LaunchForward<3, 2, 2>);

#define DLSYS_OUTPUTS(F, ...) \
  {F<__VA_ARGS__, 1>, F<__VA_ARGS__, 2>, F<__VA_ARGS__, 4>, F<__VA_ARGS__, 6>}
constexpr ForwardLauncher kForward[2][3][4] = {
    {DLSYS_OUTPUTS(LaunchForward, 3, 2), DLSYS_OUTPUTS(LaunchForward, 5, 2),
     DLSYS_OUTPUTS(LaunchForward, 7, 2)},
    {DLSYS_OUTPUTS(LaunchForward, 3, 3), DLSYS_OUTPUTS(LaunchForward, 5, 3),
     DLSYS_OUTPUTS(LaunchForward, 7, 3)}};
#undef DLSYS_OUTPUTS

Task TaskOf(const ConvPool& p) {
  Task t{};
  t.images = (int)p.conv.n;
  t.kh = (int)p.conv.kernel.h;
  t.kw = (int)p.conv.kernel.w;
  t.window = (int)p.window;
  t.out_h = (int)p.out.h;
  t.out_w = (int)p.out.w;
  t.of_windows = Divisor(Size(p.out)), t.of_width = Divisor(p.out.w),
  t.of_window = Divisor(p.window);
  return t;
}

Task ForwardTask(const ConvPool& p, const float* x) {
  Task t = TaskOf(p);
  t.channels = (int)p.conv.c;
  t.outputs = (int)p.conv.o;
  t.plane = Plane::Of(x, p.conv.in.h, p.conv.in.w, p.conv.pad.h, p.conv.pad.w);
  t.down = t.out_h;
  t.across = t.out_w;
  t.of_patches = t.of_windows, t.of_across = t.of_width;
  return t;
}

// Lays out a block for so many outputs per thread; true if shared memory holds an image.
bool ForwardFits(Task* t, int side, int outputs) {
  t->group_blocks = 1;
  t->groups = (int)CeilDiv(t->outputs, outputs);
  LayOutShared(t, side, outputs);
  return t->Shared() <= kMaxSharedFloats;
}

// ---- a few images ----

constexpr int kFewOnEach = 2;  // outputs of images on a multiprocessor, up to which they are few

// The task of a block that makes one output, false where images are many or do not fit.
bool FewImagesFit(const Task& whole, int side, int multiprocessors, FewImages* few) {
  Task t = whole;
  const int windows = t.down * t.across;
  if ((int64_t)t.images * t.outputs > kFewOnEach * multiprocessors || windows > kThreads)
    return false;
  t.groups = 1;
  LayOutShared(&t, side, 1);
  const int slices = std::max(1, std::min(kThreads / windows, t.channels));
  const int of_slice = (int)CeilDiv(t.channels, slices);
  *few = {t.channels,
          t.outputs,
          t.kh,
          t.kw,
          t.down,
          t.across,
          (int)CeilDiv(t.channels, of_slice),
          of_slice,
          (int)RoundUp(t.channels * t.kh * t.kw, 4),
          PartOfEach(t.channels * (int64_t)t.plane.of_plane.value, t.outputs),
          t.plane,
          t.frame,
          t.relu,
          false,
          false,
          false};
  return true;
}

int64_t FewShared(const FewImages& t, int side) {
  const int64_t channels = (int64_t)t.channels * t.frame.channel_pitch + kSlack;
  const int64_t sums = t.slices > 1 ? (int64_t)t.slices * t.Windows() * side * side : 0;
  return t.filter_numel + std::max(channels, sums);
}

template <int kKernelW, int kSide>
void LaunchFew(const char* op, const FewImages& t, unsigned images, int device, DLStream stream,
               const float* x, const float* f, const float* bias, float* y, uint8_t* code) {
  LaunchSmall(op, ConvPoolFewKernel<kKernelW, kSide>, images * t.outputs,
              t.shares ? (unsigned)t.outputs : 1, kThreads, FewShared(t, kSide) * sizeof(float),
              ComputeMajor(device) >= 9, stream, t, x, f, bias, y, code);
}
using FewLauncher = decltype(&LaunchFew<3, 2>);
constexpr FewLauncher kFew[2][3] = {{LaunchFew<3, 2>, LaunchFew<5, 2>, LaunchFew<7, 2>},
                                    {LaunchFew<3, 3>, LaunchFew<5, 3>, LaunchFew<7, 3>}};

bool Conv2dPoolFits(const DLArray* x, const DLArray* f, const DLArrayList*, DLArray* y,
                    DLArray* code, Struct<HW> pad, int64_t window, int64_t, int64_t) {
  const ConvPool p = CheckedConvPool("conv2d_pool", x, f, y, code, *pad, window);
  if (p.Empty()) return false;
  Task t = ForwardTask(p, nullptr);
  const auto fits = [&](int outputs) { return ForwardFits(&t, (int)window, outputs); };
  return std::any_of(std::begin(kForwardOutputs), std::end(kForwardOutputs), fits);
}

// x, f and, where there is one, bias
void Conv2dPool(const DLArray* x, const DLArray* f, const DLArrayList* bias, DLArray* y,
                DLArray* code, Struct<HW> pad, int64_t window, int64_t relu, int64_t precision,
                DLStream stream) {
  const char* op = "conv2d_pool";
  Enter(op, y, x, f, code);
  const ConvPool p = CheckedConvPool(op, x, f, y, code, *pad, window);
  const float* add = nullptr;
  if (bias->count) {
    Enter(op, y, bias->arrays[0]);
    if (Numel(bias->arrays[0]) != p.conv.o) Fail("%s: expected a bias for each filter", op);
    add = In(op, bias->arrays[0]);
  }
  const bool tensor = CheckedPrecision(op, precision) == Precision::kTf32;
  if (!Numel(y)) return;
  const int device = y->ctx.device_id;
  if (tensor && ConvPoolTensor(op, p, In(op, x), In(op, f), add, relu != 0, Out(op, y),
                               Codes(op, code), device, stream))
    return;
  Task t = ForwardTask(p, In(op, x));
  t.relu = relu != 0;
  t.filters_ready = InputsAreReady(1, 1);
  const int side = (int)window, patches = t.down * t.across;
  const int multiprocessors = Multiprocessors(device);
  FewImages few;
  if (FewImagesFit(t, side, multiprocessors, &few) && FewShared(few, side) <= kMaxSharedFloats) {
    few.filters_ready = InputsAreReady(1, 1);
    few.triggers_early = MayTriggerEarly();
    few.shares = t.images == 1 && t.outputs <= kPortableCluster && ComputeMajor(device) >= 9 &&
                 few.part <= kThreads && InputsAreReady(0, 1) && IsPinned(In(op, x));
    return kFew[side - 2][KernelWidthIndex(t.kw)](op, few, (unsigned)t.images, device, stream,
                                                  In(op, x), In(op, f), add, Out(op, y),
                                                  Codes(op, code));
  }
  const int option = LeastCost(kForwardOutputs, [&](int outputs) {
    if (!ForwardFits(&t, side, outputs)) return kImpossible;
    return CostOf((double)t.images * patches * t.groups, Instructions(t, t.channels, side, outputs),
                  multiprocessors);
  });
  const int most = MostThreads(kForwardOutputs[option]);
  const int image = t.channels * t.frame.channel_pitch, items = patches * t.groups;
  t.images_per_block =
      std::max(1, std::min({most / items, t.images / (2 * multiprocessors),
                            (kMaxSharedFloats - kSlack - t.filter_numel) / std::max(image, 1)}));
  t.tiles = (int)CeilDiv(t.images, t.images_per_block);
  const int64_t numel = Fitting(op, t.filter_numel + (int64_t)t.images_per_block * image + kSlack);
  kForward[side - 2][KernelWidthIndex(t.kw)][option](
      op, t, RoundUpToWarps(items * t.images_per_block, most), numel * sizeof(float), device,
      stream, In(op, x), In(op, f), add, Out(op, y), Codes(op, code));
}

template <int kKernelW, int kOutputs>
void LaunchDataGradient(const char* op, const Task& t, int threads, size_t nbytes, int device,
                        DLStream stream, const float* f, const float* dy, const uint8_t* code,
                        float* dx) {
  const auto kernel = DataGradientKernel<kKernelW, kOutputs>;
  const unsigned grid = TiledGrid(op, kernel, threads, nbytes, t.images * t.group_blocks, device);
  LaunchSmall(op, kernel, (unsigned)RoundUp(grid, t.group_blocks), 1, threads, nbytes,
              ComputeMajor(device) >= 9, stream, t, f, dy, code, dx);
}
using DataGradientLauncher = decltype(&LaunchDataGradient<3, 2>);
#define DLSYS_OUTPUTS(...)                                                 \
  {LaunchDataGradient<__VA_ARGS__, 2>, LaunchDataGradient<__VA_ARGS__, 4>, \
   LaunchDataGradient<__VA_ARGS__, 6>}
constexpr DataGradientLauncher kDataGradient[3][3] = {DLSYS_OUTPUTS(3), DLSYS_OUTPUTS(5),
                                                      DLSYS_OUTPUTS(7)};
#undef DLSYS_OUTPUTS

// Partitions `groups` groups of outputs over blocks and threads: a block takes as many as it has
// threads for, and spare threads split the channels.
void Partition(Task* t, int64_t groups) {
  const int patches = t->down * t->across, room = std::max(1, kThreads / patches);
  t->group_blocks = (int)CeilDiv(groups, room);
  t->groups = (int)CeilDiv(groups, t->group_blocks);
  const int max_slices = std::max(1, std::min(room / t->groups, t->channels));
  t->slices = (int)CeilDiv(t->channels, CeilDiv(t->channels, max_slices));
}

// The slices' sums reuse the memory of the channels.
int64_t DataGradientShared(const Task& t, int outputs) {
  const int64_t items = (int64_t)t.down * t.across * t.groups;
  const int64_t sums = t.slices * items * outputs * kPatch * kPatch;
  return std::max(t.Shared(), t.filter_numel + sums);
}

Task DataGradientTask(const ConvPool& p) {
  Task t = TaskOf(p);
  t.channels = (int)p.conv.o;
  t.outputs = (int)p.conv.c;
  const HW in = p.conv.in, pad = p.conv.pad;
  t.plane = Plane::Of(nullptr, in.h, in.w, t.kh - 1 - pad.h, t.kw - 1 - pad.w);
  t.down = (int)CeilDiv(in.h, kPatch);
  t.across = (int)CeilDiv(in.w, kPatch);
  return t;
}

// Lays out a block for so many outputs per thread; true if shared memory holds an image.
bool DataGradientFits(Task* t, int outputs) {
  Partition(t, CeilDiv(t->outputs, outputs));
  LayOutShared(t, kPatch, outputs);
  return DataGradientShared(*t, outputs) <= kMaxSharedFloats;
}

bool Conv2dPoolDataGradientFits(const DLArray* f, const DLArray* dy, const DLArray* code,
                                DLArray* dx, Struct<HW> pad, int64_t window, int64_t) {
  const ConvPool p = CheckedConvPool("conv2d_pool_data_gradient", dx, f, dy, code, *pad, window);
  if (p.Empty()) return false;
  Task t = DataGradientTask(p);
  const auto fits = [&](int outputs) { return DataGradientFits(&t, outputs); };
  return t.down * t.across <= kThreads &&
         std::any_of(std::begin(kOutputsPerThread), std::end(kOutputsPerThread), fits);
}

// dx (n, c, in) from f, dy and code.
void Conv2dPoolDataGradient(const DLArray* f, const DLArray* dy, const DLArray* code, DLArray* dx,
                            Struct<HW> pad, int64_t window, int64_t precision, DLStream stream) {
  const char* op = "conv2d_pool_data_gradient";
  Enter(op, dx, f, dy, code);
  const ConvPool p = CheckedConvPool(op, dx, f, dy, code, *pad, window);
  const bool tensor = CheckedPrecision(op, precision) == Precision::kTf32;
  if (!Numel(dx)) return;
  const int device = dx->ctx.device_id;
  if (tensor && ConvPoolTensorDataGradient(op, p, In(op, f), In(op, dy), Codes(op, code),
                                           Out(op, dx), device, stream))
    return;
  if (SparseDataGradient(op, p, In(op, f), In(op, dy), Codes(op, code), Out(op, dx), device,
                         stream))
    return;
  Task t = DataGradientTask(p);
  t.filters_ready = InputsAreReady(0, 1);
  const int patches = t.down * t.across;
  if (patches > kThreads) Fail("%s: the H x W of %s is too large", op, ShapeText(dx).c_str());
  const int option = LeastCost(kOutputsPerThread, [&](int outputs) {
    if (!DataGradientFits(&t, outputs)) return kImpossible;
    return CostOf((double)t.images * patches * t.groups * t.group_blocks * t.slices,
                  Instructions(t, CeilDiv(t.channels, t.slices), kPatch, outputs),
                  Multiprocessors(device));
  });
  const int64_t numel = Fitting(op, DataGradientShared(t, kOutputsPerThread[option]));
  kDataGradient[KernelWidthIndex(t.kw)][option](
      op, t, (int)RoundUp(patches * t.groups * t.slices, 32), numel * sizeof(float), device, stream,
      In(op, f), In(op, dy), Codes(op, code), Out(op, dx));
}

DLSYS_KERNEL(cuda, conv2d_pool, Conv2dPool);
DLSYS_KERNEL_WIDENED(cuda, conv2d_pool, Conv2dPool);
DLSYS_KERNEL(cuda, conv2d_pool_data_gradient, Conv2dPoolDataGradient);
DLSYS_KERNEL_WIDENED(cuda, conv2d_pool_data_gradient, Conv2dPoolDataGradient);
DLSYS_FITS(cuda, conv2d_pool, Conv2dPoolFits);
DLSYS_FITS(cuda, conv2d_pool_data_gradient, Conv2dPoolDataGradientFits);

}  // namespace
}  // namespace cuda
}  // namespace dlsys
