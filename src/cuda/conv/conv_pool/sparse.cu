// Gradients of the fused convolution + relu + max-pool by what passes a window: one element of dy,
// or none; operators/conv_pool.h has the contract.
//
// A block lists an image's elements of dy that are not cut off, each with the place in a padded
// channel that its code says. For the filter gradient a warp takes the elements of one output in
// turn and adds the patch of x under each, lanes side by side over channels and kernel elements, to
// sums in registers. For the data gradient it adds the filter to the patch of dx under each; a warp
// has its own dx in shared memory, and these are added in a fixed order. That is a window's size
// times fewer products than a dense convolution has. Channels are apart so that the lanes of a warp
// read different banks. True float32. Limited by the reads from shared memory.
#include <algorithm>

#include "cuda/conv/conv_pool/conv_pool.cuh"
#include "cuda/conv/conv_pool/sparse.cuh"
#include "cuda/runtime/context.cuh"
#include "cuda/runtime/launch.cuh"

namespace dlsys {
namespace cuda {
namespace {

constexpr int kWarps = kThreads / 32;

// What both gradients need: sizes, and the frame that a channel of an image lies in.
struct Task {
  int images, channels, outputs;
  int kernel_size, windows;  // of a channel; of an output
  int kh, kw, window, across;
  int split;  // log2 of the parts of an output's list, for different warps
  Frame frame;
  Plane plane;
  Divisor of_across, of_window;
  bool filters_ready;  // PDL: they may be read before the predecessor ends

  __host__ __device__ int Items() const { return outputs << split; }
};

// An element of dy and its place in a frame.
struct alignas(8) Element {
  float value;
  int at;
};

// ---- kernels ----

// Lists the elements of each output of an image that are not cut off, in the order of the windows.
// kAtOnce loads of a lane, of 32 windows of an output each, are under way together.
__device__ __forceinline__ void ListElements(const Task& t, const float* dy, const uint8_t* code,
                                             Element* list, int* counts) {
  constexpr int kAtOnce = 4;
  const int lane = (int)threadIdx.x % 32;
  int count = 0, output = (int)threadIdx.x / 32, begin = 0;  // the next windows
  while (output < t.outputs) {
    float value[kAtOnce];
    int position[kAtOnce], of[kAtOnce], at[kAtOnce];
#pragma unroll
    for (int e = 0; e < kAtOnce; e++) {
      of[e] = output, at[e] = begin + lane;
      const bool exists = output < t.outputs && at[e] < t.windows;
      position[e] = exists ? code[output * t.windows + at[e]] : kCut;
      value[e] = exists ? dy[output * t.windows + at[e]] : 0.f;
      begin += 32;
      if (begin >= t.windows) begin = 0, output += kWarps;
    }
#pragma unroll
    for (int e = 0; e < kAtOnce; e++) {
      if (of[e] >= t.outputs) break;
      const bool passes = position[e] != kCut;
      int upto = passes ? 1 : 0;  // of the lanes up to this one
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const int before = __shfl_up_sync(0xffffffffu, upto, distance);
        if (lane >= distance) upto += before;
      }
      if (at[e] == lane) count = 0;
      if (passes) {
        const int i = at[e] / t.of_across, j = at[e] - i * t.across;
        const int row = position[e] / t.of_window, col = position[e] - row * t.window;
        list[of[e] * t.windows + count + upto - 1] = {
            value[e], (i * t.window + row) * t.frame.pitch + j * t.window + col};
      }
      count += __shfl_sync(0xffffffffu, upto, 31);
      if (lane == 0) counts[of[e]] = count;  // after the last windows, that of all
    }
  }
}

// The part of its output's list that an item has.
struct Part {
  int output, begin, end;

  __device__ Part(const Task& t, const int* counts, int item) : output(item >> t.split) {
    const int parts = 1 << t.split, part = item & (parts - 1);
    const int each = (counts[output] + parts - 1) >> t.split;
    begin = output * t.windows + part * each;
    end = output * t.windows + min(counts[output], (part + 1) * each);
  }
};

// kSteps times 32 lanes have the elements of a filter, of all channels.
template <int kSteps>
__global__ void __launch_bounds__(kThreads)
    SparseFilterGradientKernel(const __grid_constant__ Task t, const float* x, const float* dy,
                               const uint8_t* code, float* partial) {
  const int lane = (int)threadIdx.x % 32, numel = t.channels * t.kernel_size;
  const int input_numel = t.channels * t.frame.channel_pitch;
  float* const input = DynamicShared<float>();
  Element* const list = (Element*)(input + (input_numel + 3) / 4 * 4);
  int* const counts = (int*)(list + t.outputs * t.windows);
  float* const sums = (float*)(counts + t.outputs);  // (items, numel + 1), the bias's last
  int offset[kSteps];
#pragma unroll
  for (int s = 0; s < kSteps; s++) {
    const int k = lane + 32 * s, channel = k / t.kernel_size, rest = k - channel * t.kernel_size;
    offset[s] =
        k < numel ? channel * t.frame.channel_pitch + rest / t.kw * t.frame.pitch + rest % t.kw : 0;
  }
  Clear(input, input_numel);
  for (int k = (int)threadIdx.x; k < t.Items() * (numel + 1); k += kThreads) sums[k] = 0.f;
  GridDependencySynchronize();
  TriggerProgrammaticLaunch();
  for (int image = (int)blockIdx.x; image < t.images; image += (int)gridDim.x) {
    const int64_t at = (int64_t)image * t.outputs * t.windows;
    __syncthreads();  // the previous image has been read
    LoadPlanes<4>(x + (int64_t)image * t.channels * t.plane.h * t.plane.w, t.channels, t.plane,
                  t.frame, input);
    ListElements(t, dy + at, code + at, list, counts);
    __syncthreads();
    for (int item = (int)threadIdx.x / 32; item < t.Items(); item += kWarps) {
      const Part part(t, counts, item);
      float sum[kSteps] = {}, bias = 0.f;
#pragma unroll 4
      for (int k = part.begin; k < part.end; k++) {
        const Element element = list[k];
        const float* const corner = input + element.at;
        bias += element.value;
#pragma unroll
        for (int s = 0; s < kSteps; s++) sum[s] = fmaf(element.value, corner[offset[s]], sum[s]);
      }
      float* const own = sums + item * (numel + 1);
#pragma unroll
      for (int s = 0; s < kSteps; s++)
        if (lane + 32 * s < numel) own[lane + 32 * s] += sum[s];
      if (lane == 0) own[numel] += bias;
    }
  }
  __syncthreads();
  partial += (int64_t)blockIdx.x * t.outputs * (numel + 1);
  for (int k = (int)threadIdx.x; k < t.outputs * (numel + 1); k += kThreads) {
    const int output = k / (numel + 1), element = k - output * (numel + 1);
    float total = 0.f;
    for (int part = 0; part < 1 << t.split; part++)
      total += sums[((output << t.split) + part) * (numel + 1) + element];
    partial[element < numel ? output * numel + element : t.outputs * numel + output] = total;
  }
}

// Lanes have columns of the filters of some channels, kGroups times; a lane takes a column's kRows
// elements in turn.
template <int kRows, int kGroups>
__global__ void __launch_bounds__(kThreads)
    SparseDataGradientKernel(const __grid_constant__ Task t, const float* f, const float* dy,
                             const uint8_t* code, float* dx) {
  const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
  const int numel = t.channels * t.kernel_size, copy = t.channels * t.frame.channel_pitch;
  float* const sums = DynamicShared<float>();  // (warps, channels) frames
  float* const filters = sums + (kWarps * copy + 3) / 4 * 4;
  Element* const list = (Element*)(filters + (t.outputs * numel + 3) / 4 * 4);
  int* const counts = (int*)(list + t.outputs * t.windows);
  const int together = 32 / t.kw, column = lane % t.kw;
  int offset[kGroups], from[kGroups];
  bool exists[kGroups];
#pragma unroll
  for (int g = 0; g < kGroups; g++) {
    const int channel = lane / t.kw + g * together;
    exists[g] = lane / t.kw < together && channel < t.channels;
    offset[g] = channel * t.frame.channel_pitch + column;
    from[g] = channel * t.kernel_size + column;
  }
  if (!t.filters_ready) GridDependencySynchronize();
  Clear(sums, kWarps * copy);
  for (int k = (int)threadIdx.x; k < t.outputs * numel; k += kThreads) filters[k] = f[k];
  if (t.filters_ready) GridDependencySynchronize();
  TriggerProgrammaticLaunch();
  const int pitch = t.frame.pitch;
  for (int image = (int)blockIdx.x; image < t.images; image += (int)gridDim.x) {
    const int64_t at = (int64_t)image * t.outputs * t.windows;
    ListElements(t, dy + at, code + at, list, counts);
    __syncthreads();
    for (int item = warp; item < t.Items(); item += kWarps) {
      const Part part(t, counts, item);
      float weight[kGroups][kRows];
#pragma unroll
      for (int g = 0; g < kGroups; g++)
#pragma unroll
        for (int a = 0; a < kRows; a++)
          weight[g][a] = exists[g] ? filters[part.output * numel + from[g] + a * t.kw] : 0.f;
      for (int k = part.begin; k < part.end; k++) {
        const Element element = list[k];
#pragma unroll
        for (int g = 0; g < kGroups; g++) {
          if (!exists[g]) continue;
          float* const to = sums + warp * copy + element.at + offset[g];
          float sum[kRows];
#pragma unroll
          for (int a = 0; a < kRows; a++) sum[a] = to[a * pitch];
#pragma unroll
          for (int a = 0; a < kRows; a++) to[a * pitch] = fmaf(element.value, weight[g][a], sum[a]);
        }
        __syncwarp();  // the next patch overlaps this one
      }
    }
    __syncthreads();
    float* const of_image = dx + (int64_t)image * t.channels * t.plane.h * t.plane.w;
    const int plane = t.plane.h * t.plane.w;
    for (int k = (int)threadIdx.x; k < t.channels * plane; k += kThreads) {
      const int channel = k / t.plane.of_plane, rest = k - channel * plane;
      const int y = rest / t.plane.of_row;
      const int i = y + t.plane.top, j = rest - y * t.plane.w + t.plane.left;
      float total = 0.f;
      if (i < t.frame.rows && j < t.frame.width) {
        float* const own = sums + channel * t.frame.channel_pitch + i * pitch + j;
#pragma unroll
        for (int w = 0; w < kWarps; w++) total += own[w * copy], own[w * copy] = 0.f;
      }
      of_image[k] = total;
    }
    __syncthreads();
  }
}

// ---- launchers ----

constexpr int64_t kMostNbytes = 64 * 1024;  // so that three blocks are resident together

// Frames of rows and channels so far apart, modulo the banks.
Task TaskOf(const ConvPool& p, int64_t row_banks, int64_t channel_banks) {
  Task t{};
  t.images = (int)p.conv.n, t.channels = (int)p.conv.c, t.outputs = (int)p.conv.o;
  t.kh = (int)p.conv.kernel.h, t.kw = (int)p.conv.kernel.w;
  t.kernel_size = t.kh * t.kw;
  t.windows = (int)Size(p.out), t.across = (int)p.out.w, t.window = (int)p.window;
  t.of_across = Divisor(t.across), t.of_window = Divisor(t.window);
  while (t.Items() % kWarps != 0 && t.split < 3) t.split++;
  const int rows = (int)p.conv.out.h + t.kh - 1, width = (int)p.conv.out.w + t.kw - 1;
  int pitch = width;
  while (row_banks && pitch % 32 != row_banks % 32) pitch++;
  int channel_pitch = rows * pitch;
  while (channel_pitch % 32 != channel_banks % 32) channel_pitch++;
  t.frame = {rows, width, pitch, channel_pitch};
  return t;
}

// Blocks of so much shared memory can run, and several on a multiprocessor.
bool IsSmall(int64_t nbytes, int device) {
  return nbytes <= std::min<int64_t>(kMostNbytes, SharedLimit(device));
}

bool IsServed(const ConvPool& p, const Task& t) {
  return !p.Empty() && t.windows > 0 && p.conv.n > 0 && p.conv.n <= INT32_MAX / 2;
}

int64_t ListNbytes(const Task& t) {
  return (int64_t)t.outputs * (t.windows * (int64_t)sizeof(Element) + (int64_t)sizeof(int));
}

int64_t Floats(int64_t numel) { return RoundUp(numel, 4) * (int64_t)sizeof(float); }

// Blocks for the images: as many as are resident together, at most `most` a multiprocessor.
template <class... Params>
unsigned GridOf(const char* op, void (*kernel)(Params...), const Task& t, size_t nbytes, int most,
                int device) {
  AllowShared(op, (const void*)kernel, nbytes);
  const unsigned grid = TiledGrid(op, kernel, kThreads, nbytes, t.images, device);
  const int64_t few = (int64_t)most * Multiprocessors(device);
  return std::min(grid, (unsigned)CeilDiv(t.images, CeilDiv(t.images, few)));
}

}  // namespace

bool SparseDataGradient(const char* op, const ConvPool& p, const float* f, const float* dy,
                        const uint8_t* code, float* dx, int device, DLStream stream) {
  Task t = TaskOf(p, 0, p.conv.kernel.w);
  if (!IsServed(p, t)) return false;
  t.plane = Plane::Of(dx, p.conv.in.h, p.conv.in.w, p.conv.pad.h, p.conv.pad.w);
  t.plane.of_plane = Divisor(Size(p.conv.in)), t.plane.of_row = Divisor(p.conv.in.w);
  t.filters_ready = InputsAreReady(0, 1);
  const int together = 32 / t.kw, groups = CeilDiv32(t.channels, together);
  const int64_t nbytes = Floats((int64_t)kWarps * t.channels * t.frame.channel_pitch) +
                         Floats((int64_t)t.outputs * t.channels * t.kernel_size) + ListNbytes(t);
  const bool rows = t.kh == 3 || t.kh == 5 || t.kh == 7;
  if (!rows || groups > 2 || t.channels * t.kw * 2 < groups * 32 || !IsSmall(nbytes, device))
    return false;
  const auto kernel =
      t.kh == 3     ? groups == 1 ? SparseDataGradientKernel<3, 1> : SparseDataGradientKernel<3, 2>
      : t.kh == 5   ? groups == 1 ? SparseDataGradientKernel<5, 1> : SparseDataGradientKernel<5, 2>
      : groups == 1 ? SparseDataGradientKernel<7, 1>
                    : SparseDataGradientKernel<7, 2>;
  const unsigned grid = GridOf(op, kernel, t, (size_t)nbytes, 4, device);
  LaunchSmall(op, kernel, grid, 1, kThreads, (size_t)nbytes, ComputeMajor(device) >= 9, stream, t,
              f, dy, code, dx);
  return true;
}

bool SparseFilterGradient(const char* op, const ConvPool& p, const float* x, const float* dy,
                          const uint8_t* code, const AddWorkers& add, DLContext ctx,
                          DLStream stream) {
  Task t = TaskOf(p, p.conv.kernel.w, p.conv.kernel.h * p.conv.kernel.w);
  if (!IsServed(p, t)) return false;
  const int device = ctx.device_id, numel = t.channels * t.kernel_size;
  t.plane = Plane::Of(x, p.conv.in.h, p.conv.in.w, p.conv.pad.h, p.conv.pad.w);
  const int steps = CeilDiv32(numel, 32);
  const int64_t nbytes = Floats((int64_t)t.channels * t.frame.channel_pitch) + ListNbytes(t) +
                         (int64_t)t.Items() * (numel + 1) * (int64_t)sizeof(float);
  // With fewer products to an element, listing it takes longer than they do.
  if (steps < 2 || steps > 8 || numel * 2 < steps * 32 || !IsSmall(nbytes, device)) return false;
  const auto kernel = steps == 2   ? SparseFilterGradientKernel<2>
                      : steps == 3 ? SparseFilterGradientKernel<3>
                      : steps <= 5 ? SparseFilterGradientKernel<5>
                                   : SparseFilterGradientKernel<8>;
  const int sums = t.outputs * numel + t.outputs;
  // Each block leaves sums to be reduced.
  const unsigned workers = GridOf(op, kernel, t, (size_t)nbytes, sums > 1024 ? 2 : 4, device);
  const Scratch partial(ctx, (int64_t)workers * sums * (int64_t)sizeof(float), stream);
  const bool pdl = ComputeMajor(device) >= 9;
  LaunchSmall(op, kernel, workers, 1, kThreads, (size_t)nbytes, pdl, stream, t, x, dy, code,
              partial.floats());
  add(partial.floats(), (int)workers, sums - t.outputs, t.outputs);
  return true;
}

}  // namespace cuda
}  // namespace dlsys
