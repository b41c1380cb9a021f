// Small convolutions fused with bias, relu and max-pool, and their gradient for the data; the
// contract is in conv_small.h, the gradient for the filter in conv_small_filter.cu.
//
// A block holds the planes of an image or of a few, with their padding, and all filters in shared
// memory; a thread sums a patch of places for some outputs in registers. Forward the patch is a
// window of the pool. The gradient for the data is the same sum over the planes of dy, which are
// spread out in shared memory and nowhere else: a window's dy stands where its code says, zeros
// stand elsewhere. Several threads share the planes that such a sum goes over.
#include <algorithm>

#include "cuda/conv/conv_pool.cuh"

namespace dlsys {
namespace cuda {
namespace {

constexpr int kPatch = 2;  // places a side, of dx

// One of both kernels: which planes it reads, what it makes of them, and how it is cut.
struct Task {
  int images, channels, outputs;  // planes read and made of an image
  int h, w, top, left;            // of the planes read; zeros above and to the left
  int kh, kw, window;
  int out_h, out_w;     // of pooled planes
  int down, across;     // patches
  int groups, parts;    // of outputs that a thread makes in a block; of all groups among blocks
  int slices;           // of channels that threads share
  int together, tiles;  // images that a block holds at a time, and how many such
  int pitch, filter_numel;
  Frame frame;
  bool relu;

  __device__ int Patches() const { return down * across; }
  // The floats that the filters and the planes of an image take.
  int64_t Shared() const { return filter_numel + (int64_t)channels * frame.plane + kSlack; }
};

// ---- kernels ----

// f (outputs, rest) to (rest, pitch)
__device__ __forceinline__ void LoadFilters(const Task& t, const float* f, float* to) {
  const int rest = t.channels * t.kh * t.kw, lane = (int)threadIdx.x % 32;
  for (int o = (int)threadIdx.x / 32; o < t.outputs; o += (int)blockDim.x / 32)
    for (int k = lane; k < rest; k += 32) to[k * t.pitch + o] = f[o * rest + k];
}

// f (channels, outputs, taps) to (channels, taps mirrored, pitch), `count` outputs from `first` on
__device__ __forceinline__ void LoadMirrored(const Task& t, const float* f, int first, int count,
                                             float* to) {
  const int taps = t.kh * t.kw, lane = (int)threadIdx.x % 32;
  for (int c = (int)threadIdx.x / 32; c < t.channels; c += (int)blockDim.x / 32)
    for (int k = lane; k < count * taps; k += 32) {
      const int o = k / taps, tap = k - o * taps;
      to[((c + 1) * taps - 1 - tap) * t.pitch + o] = f[(c * t.outputs + first) * taps + k];
    }
}

// The largest of a window's values and its place; with relu 0 takes over from what is below it.
template <int kCount>
__device__ __forceinline__ void Pool(const float (&values)[kCount], float bias, bool relu,
                                     float* largest, uint8_t* code) {
  float best = values[0] + bias;
  int place = 0;
#pragma unroll
  for (int k = 1; k < kCount; k++) {
    const float value = values[k] + bias;
    const bool larger = !(value <= best) && best == best;  // NaN is larger than every number
    best = larger ? value : best;
    place = larger ? k : place;
  }
  *largest = relu && best < 0.f ? 0.f : best;
  *code = relu && !(best > 0.f) ? kCut : (uint8_t)place;
}

template <int kTaps, int kSide, int kOutputs>
__global__ void __launch_bounds__(kThreads)
    ConvPoolKernel(const Task t, const float* x, const float* f, const float* bias, float* y,
                   uint8_t* code) {
  float *filters = DynamicShared<float>(), *planes = filters + t.filter_numel;
  LoadFilters(t, f, filters);
  for (int tile = (int)blockIdx.x; tile < t.tiles; tile += (int)gridDim.x) {
    const int64_t first = (int64_t)tile * t.together;
    const int count = (int)min((int64_t)t.together, t.images - first);
    __syncthreads();  // the previous tile's readers are done
    LoadPlanes(x + first * t.channels * t.h * t.w, count * t.channels, t.h, t.w, t.top, t.left,
               t.frame, planes);
    __syncthreads();
    const int patches = t.Patches(), of_group = count * patches;
    for (int item = (int)threadIdx.x; item < t.groups * of_group; item += (int)blockDim.x) {
      const int group = item / of_group, image = item % of_group / patches;
      const int patch = item % patches, i = patch / t.across, j = patch - i * t.across;
      float sum[kOutputs][kSide * kSide] = {};
      const float* corner =
          planes + image * t.channels * t.frame.plane + (i * t.frame.pitch + j) * kSide;
      Correlate<kTaps, kSide, kOutputs>(corner, t.channels, t.frame, t.kh, t.kw,
                                        filters + group * kOutputs, t.pitch, sum);
#pragma unroll
      for (int o = 0; o < kOutputs; o++) {
        const int output = group * kOutputs + o;
        if (output >= t.outputs) break;
        const int64_t at = ((first + image) * t.outputs + output) * patches + patch;
        Pool(sum[o], bias ? bias[output] : 0.f, t.relu, y + at, code + at);
      }
    }
  }
}

// Writes the windows of dy, each element where its code says, into planes of zeros.
__device__ __forceinline__ void Spread(const Task& t, const float* dy, const uint8_t* code,
                                       float* planes) {
  const int windows = t.out_h * t.out_w;
#pragma unroll 4
  for (int k = (int)threadIdx.x; k < t.channels * windows; k += (int)blockDim.x) {
    const int place = code[k];
    const float value = dy[k];
    if (place == kCut) continue;
    const int channel = k / windows, at = k - channel * windows;
    const int i = at / t.out_w * t.window + place / t.window + t.top;
    const int j = at % t.out_w * t.window + place % t.window + t.left;
    planes[channel * t.frame.plane + i * t.frame.pitch + j] = value;
  }
}

// To the end of the last quad, for which there is room behind the planes.
__device__ __forceinline__ void Clear(float* to, int numel) {
  const float4 zeros = make_float4(0.f, 0.f, 0.f, 0.f);
  const int quads = (numel + 3) / 4;
  for (int k = (int)threadIdx.x; k < quads; k += (int)blockDim.x) ((float4*)to)[k] = zeros;
}

// Adds what the slices have summed, always in the same order, and writes dx (outputs, h, w).
template <int kOutputs>
__device__ __forceinline__ void JoinSlices(const Task& t, const float* sums, int slice, int item,
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
    if (output >= outputs || row >= t.h) continue;
    float* to = dx + ((int64_t)output * t.h + row) * t.w + j;
    if (t.w % 2 == 0) {
      *(float2*)to = make_float2(left, right);
    } else {
      to[0] = left;
      if (j + 1 < t.w) to[1] = right;
    }
  }
}

template <int kTaps, int kOutputs>
__global__ void __launch_bounds__(kThreads)
    DataGradientKernel(const Task t, const float* f, const float* dy, const uint8_t* code,
                       float* dx) {
  float *filters = DynamicShared<float>(), *planes = filters + t.filter_numel;
  const int first = (int)blockIdx.x % t.parts * t.groups * kOutputs;
  const int outputs = min(t.groups * kOutputs, t.outputs - first);
  LoadMirrored(t, f, first, outputs, filters);
  const int items = t.groups * t.Patches();
  const int slice = (int)threadIdx.x / items, item = (int)threadIdx.x % items;
  const int part = (t.channels + t.slices - 1) / t.slices, channel = slice * part;
  const int group = item / t.Patches(), patch = item % t.Patches();
  const int corner = (patch / t.across * t.frame.pitch + patch % t.across) * kPatch;
  for (int64_t image = blockIdx.x / t.parts; image < t.images; image += gridDim.x / t.parts) {
    Clear(planes, t.channels * t.frame.plane);
    __syncthreads();
    const int64_t from = image * t.channels * t.out_h * t.out_w;
    Spread(t, dy + from, code + from, planes);
    __syncthreads();
    float sum[kOutputs][kPatch * kPatch] = {};
    if (slice < t.slices)
      Correlate<kTaps, kPatch, kOutputs>(
          planes + channel * t.frame.plane + corner, min(part, t.channels - channel), t.frame, t.kh,
          t.kw, filters + channel * t.kh * t.kw * t.pitch + group * kOutputs, t.pitch, sum);
    __syncthreads();
    if (slice < t.slices) {
#pragma unroll
      for (int k = 0; k < kOutputs * kPatch * kPatch; k++)
        planes[(slice * kOutputs * kPatch * kPatch + k) * items + item] =
            sum[k / (kPatch * kPatch)][k % (kPatch * kPatch)];
    }
    __syncthreads();
    if (slice < t.slices)
      JoinSlices<kOutputs>(t, planes, slice, item, items, outputs,
                           dx + (image * t.outputs + first) * t.h * t.w);
    __syncthreads();
  }
}

// ---- launchers ----

// Instructions of a thread that sums over `channels` planes.
double Instructions(const Task& t, int channels, int side, int outputs) {
  const int of_tap = side * side * outputs + CeilDiv(outputs, outputs % 4 ? 2 : 4);
  return (double)channels * t.kh * (t.kw * of_tap + 2 * (side + t.kw) + 6);
}

// Lays filters and planes in shared memory: rows so far apart that threads beside and below each
// other read other banks, or as close as they fit where that takes too much.
void Lay(Task* t, int side, int choice) {
  t->pitch = PitchOf(choice, t->groups);
  t->filter_numel = RoundUp((int64_t)t->channels * t->kh * t->kw * t->pitch, 4);
  const int rows = t->down * side + t->kh - 1, width = t->across * side + t->kw - 1;
  const int close = RoundUp(width, 2), banks = side % 2 ? 32 : 16;
  int pitch = close;
  while (pitch % banks != RoundUp(t->across, 2) % banks) pitch += 2;
  t->frame = {rows, width, pitch, rows * pitch};
  if (t->Shared() > kMostShared) t->frame = {rows, width, close, rows * close};
}

constexpr double kImpossible = 1e300;

// The choice of outputs a thread that takes the least time; cost(choice) is asked for it last.
template <class Cost>
int LeastCost(const Cost& cost) {
  int best = 0;
  double least = cost(0);
  for (int k = 1; k < 3; k++) {
    const double other = cost(k);
    if (other < least) {
      least = other;
      best = k;
    }
  }
  cost(best);
  return best;
}

int64_t Fitting(const char* op, int64_t numel) {
  if (numel > kMostShared)
    Fail("%s: the planes and filters of an image take %ld bytes of shared memory, of %ld", op,
         (long)(numel * sizeof(float)), (long)(kMostShared * sizeof(float)));
  return numel;
}

// As many blocks as run at once, or fewer where that leaves each as many tiles.
template <class Kernel>
unsigned Grid(const char* op, Kernel kernel, int threads, size_t nbytes, int tiles, int device) {
  int resident = 1;
  Check(op, cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, threads, nbytes));
  const int64_t at_once = (int64_t)std::max(resident, 1) * Multiprocessors(device);
  return (unsigned)CeilDiv(tiles, CeilDiv(tiles, at_once));
}

int WholeWarps(int items) {
  const int turns = (int)CeilDiv(items, kThreads);
  return RoundUp(CeilDiv(items, turns), 32);
}

template <int kTaps, int kSide, int kOutputs>
void LaunchForward(const char* op, const Task& t, int threads, size_t nbytes, int device,
                   DLStream stream, const float* x, const float* f, const float* bias, float* y,
                   uint8_t* code) {
  const auto kernel = ConvPoolKernel<kTaps, kSide, kOutputs>;
  Launch(op, kernel, Grid(op, kernel, threads, nbytes, t.tiles, device), threads, nbytes, stream, t,
         x, f, bias, y, code);
}
using Forward_ = decltype(&LaunchForward<3, 2, 2>);

#define DLSYS_OUTPUTS(F, ...) {F<__VA_ARGS__, 2>, F<__VA_ARGS__, 4>, F<__VA_ARGS__, 6>}
constexpr Forward_ kForward[2][3][3] = {
    {DLSYS_OUTPUTS(LaunchForward, 3, 2), DLSYS_OUTPUTS(LaunchForward, 5, 2),
     DLSYS_OUTPUTS(LaunchForward, 7, 2)},
    {DLSYS_OUTPUTS(LaunchForward, 3, 3), DLSYS_OUTPUTS(LaunchForward, 5, 3),
     DLSYS_OUTPUTS(LaunchForward, 7, 3)}};

Task TaskOf(const ConvPool& p) {
  Task t{};
  t.images = (int)p.conv.n;
  t.kh = (int)p.conv.size.h;
  t.kw = (int)p.conv.size.w;
  t.h = (int)p.conv.plane.h;
  t.w = (int)p.conv.plane.w;
  t.window = (int)p.window;
  t.out_h = (int)p.out.h;
  t.out_w = (int)p.out.w;
  return t;
}

Task ForwardTask(const ConvPool& p) {
  Task t = TaskOf(p);
  t.channels = (int)p.conv.c;
  t.outputs = (int)p.conv.o;
  t.top = (int)p.conv.before.h;
  t.left = (int)p.conv.before.w;
  t.down = t.out_h;
  t.across = t.out_w;
  return t;
}

// Lays out a block whose threads have outputs by a choice; true where it holds an image.
bool ForwardFits(Task* t, int side, int choice) {
  t->parts = 1;
  t->groups = (int)CeilDiv(t->outputs, kOutputChoices[choice]);
  Lay(t, side, choice);
  return t->Shared() <= kMostShared;
}

bool Conv2dPoolFits(const DLArray* x, const DLArray* f, const DLArrayList*, DLArray* y,
                    DLArray* code, int64_t before, int64_t window, int64_t) {
  const ConvPool p = CheckedConvPool("conv2d_pool", x, f, y, code, before, window);
  if (p.Empty()) return false;
  Task t = ForwardTask(p);
  const auto fits = [&](int k) { return ForwardFits(&t, (int)window, k); };
  return fits(0) || fits(1) || fits(2);
}

// x, f and, where there is one, bias
void Conv2dPool(const DLArray* x, const DLArray* f, const DLArrayList* bias, DLArray* y,
                DLArray* code, int64_t before, int64_t window, int64_t relu, DLStream stream) {
  const char* op = "conv2d_pool";
  Enter(op, y, x, f, code);
  const ConvPool p = CheckedConvPool(op, x, f, y, code, before, window);
  const float* add = nullptr;
  if (bias->count) {
    Enter(op, y, bias->arrays[0]);
    if (Numel(bias->arrays[0]) != p.conv.o) Fail("%s: expected a bias for each filter", op);
    add = In(op, bias->arrays[0]);
  }
  if (!Numel(y)) return;
  Task t = ForwardTask(p);
  t.relu = relu != 0;
  const int side = (int)window, patches = t.down * t.across, device = y->ctx.device_id;
  const int multiprocessors = Multiprocessors(device);
  const int choice = LeastCost([&](int k) {
    if (!ForwardFits(&t, side, k)) return kImpossible;
    return CostOf((double)t.images * patches * t.groups,
                  Instructions(t, t.channels, side, kOutputChoices[k]), multiprocessors);
  });
  const int image = t.channels * t.frame.plane, items = patches * t.groups;
  t.together =
      std::max(1, std::min({kThreads / items, t.images / (2 * multiprocessors),
                            (kMostShared - kSlack - t.filter_numel) / std::max(image, 1)}));
  t.tiles = (int)CeilDiv(t.images, t.together);
  const int64_t numel = Fitting(op, t.filter_numel + (int64_t)t.together * image + kSlack);
  kForward[side - 2][TapsFor(t.kw)][choice](op, t, WholeWarps(items * t.together),
                                            numel * sizeof(float), device, stream, In(op, x),
                                            In(op, f), add, Out(op, y), Codes(op, code));
}

template <int kTaps, int kOutputs>
void LaunchDataGradient(const char* op, const Task& t, int threads, size_t nbytes, int device,
                        DLStream stream, const float* f, const float* dy, const uint8_t* code,
                        float* dx) {
  const auto kernel = DataGradientKernel<kTaps, kOutputs>;
  const unsigned grid = Grid(op, kernel, threads, nbytes, t.images * t.parts, device);
  Launch(op, kernel, RoundUp(grid, t.parts), threads, nbytes, stream, t, f, dy, code, dx);
}
using DataGradient_ = decltype(&LaunchDataGradient<3, 2>);
constexpr DataGradient_ kDataGradient[3][3] = {DLSYS_OUTPUTS(LaunchDataGradient, 3),
                                               DLSYS_OUTPUTS(LaunchDataGradient, 5),
                                               DLSYS_OUTPUTS(LaunchDataGradient, 7)};
#undef DLSYS_OUTPUTS

// How blocks and their threads share `groups` groups of outputs: a block has as many as it has room
// for, and where room is left several threads share the channels of a sum.
void Share(Task* t, int64_t groups) {
  const int patches = t->down * t->across, room = std::max(1, kThreads / patches);
  t->parts = (int)CeilDiv(groups, room);
  t->groups = (int)CeilDiv(groups, t->parts);
  const int most = std::max(1, std::min(room / t->groups, t->channels));
  t->slices = (int)CeilDiv(t->channels, CeilDiv(t->channels, most));
}

// The sums of slices take the place of the planes.
int64_t DataGradientShared(const Task& t, int choice) {
  const int64_t items = (int64_t)t.down * t.across * t.groups;
  const int64_t sums = t.slices * items * kOutputChoices[choice] * kPatch * kPatch;
  return std::max(t.Shared(), t.filter_numel + sums);
}

Task DataGradientTask(const ConvPool& p) {
  Task t = TaskOf(p);
  t.channels = (int)p.conv.o;
  t.outputs = (int)p.conv.c;
  t.top = t.kh - 1 - (int)p.conv.before.h;
  t.left = t.kw - 1 - (int)p.conv.before.w;
  t.down = (int)CeilDiv(t.h, kPatch);
  t.across = (int)CeilDiv(t.w, kPatch);
  return t;
}

// Lays out a block whose threads have outputs by a choice; true where it holds an image.
bool DataGradientFits(Task* t, int choice) {
  Share(t, CeilDiv(t->outputs, kOutputChoices[choice]));
  Lay(t, kPatch, choice);
  return DataGradientShared(*t, choice) <= kMostShared;
}

bool Conv2dPoolDataGradientFits(const DLArray* f, const DLArray* dy, const DLArray* code,
                                DLArray* dx, int64_t before, int64_t window) {
  const ConvPool p = CheckedConvPool("conv2d_pool_data_gradient", dx, f, dy, code, before, window);
  if (p.Empty()) return false;
  Task t = DataGradientTask(p);
  const auto fits = [&](int k) { return DataGradientFits(&t, k); };
  return t.down * t.across <= kThreads && (fits(0) || fits(1) || fits(2));
}

// f, dy and code give dx (n, c, plane).
void Conv2dPoolDataGradient(const DLArray* f, const DLArray* dy, const DLArray* code, DLArray* dx,
                            int64_t before, int64_t window, DLStream stream) {
  const char* op = "conv2d_pool_data_gradient";
  Enter(op, dx, f, dy, code);
  const ConvPool p = CheckedConvPool(op, dx, f, dy, code, before, window);
  if (!Numel(dx)) return;
  Task t = DataGradientTask(p);
  const int patches = t.down * t.across, device = dx->ctx.device_id;
  if (patches > kThreads) Fail("%s: planes %s are too large", op, ShapeText(dx).c_str());
  const int choice = LeastCost([&](int k) {
    if (!DataGradientFits(&t, k)) return kImpossible;
    return CostOf((double)t.images * patches * t.groups * t.parts * t.slices,
                  Instructions(t, CeilDiv(t.channels, t.slices), kPatch, kOutputChoices[k]),
                  Multiprocessors(device));
  });
  const int64_t numel = Fitting(op, DataGradientShared(t, choice));
  kDataGradient[TapsFor(t.kw)][choice](op, t, RoundUp(patches * t.groups * t.slices, 32),
                                       numel * sizeof(float), device, stream, In(op, f), In(op, dy),
                                       Codes(op, code), Out(op, dx));
}

DLSYS_KERNEL(cuda, conv2d_pool, Conv2dPool);
DLSYS_KERNEL(cuda, conv2d_pool_data_gradient, Conv2dPoolDataGradient);
DLSYS_FITS(cuda, conv2d_pool, Conv2dPoolFits);
DLSYS_FITS(cuda, conv2d_pool_data_gradient, Conv2dPoolDataGradientFits);

}  // namespace
}  // namespace cuda
}  // namespace dlsys
