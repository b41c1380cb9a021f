// The filter and bias gradients of conv + bias + relu + max-pool on tensor cores in tf32;
// operators/conv_pool.h has the contract.
//
// x is in shared memory with its padding, rounded to tf32, dy as words of its windows. A fragment
// holds 16 outputs, or eight, by eight rows of filters; its depths are the two rows of positions of
// four rows of windows, which a lane slides along: what it has read of x serves all columns of the
// filters. Sums are float32, in a fixed order; the bias's are of dy as it is. Blocks leave parts,
// which a second kernel adds. For windows of 2 x 2 under filters of 3, 5 or 7 columns. Limited by
// instructions issued, and with few images by latency.
#include <algorithm>

#include "cuda/conv/conv_pool/tensor.cuh"
#include "cuda/runtime/context.cuh"

namespace dlsys {
namespace cuda {
namespace {

// A launch of the filter gradient.
struct FilterTask {
  Images in;
  int outputs, output_tiles;
  int windows, down, across;  // of an image and an output
  int slots, slot_blocks, slices;
  int workers;
  int words_at, biases_at, lines_at;  // in shared memory
  Divisor of_down, of_tiles;
  Divisor of_output, of_kernel_w;  // of the elements of the filters
};

// Copies `planes` of dy, one of each output of each image, as words, and notes what each sums to.
// A warp has kPlanes of them at once, kChunks lanes' worth of each.
template <int kPlanes, int kChunks>
__device__ __forceinline__ void LoadWords(const FilterTask& t, const float* dy, const uint8_t* code,
                                          int planes, uint32_t* words, float* sums) {
  const int lane = (int)threadIdx.x % 32;
  for (int plane = (int)threadIdx.x / 32; plane < planes; plane += kWarps * kPlanes) {
    float sum[kPlanes] = {};
    for (int first = lane; first < t.windows; first += 32 * kChunks) {
      float value[kPlanes][kChunks];
      uint8_t position[kPlanes][kChunks];
#pragma unroll
      for (int e = 0; e < kPlanes * kChunks; e++) {
        const int own = plane + e / kChunks * kWarps, window = first + e % kChunks * 32;
        const bool exists = own < planes && window < t.windows;
        const int at = own * t.windows + window;
        value[e / kChunks][e % kChunks] = exists ? dy[at] : 0.f;
        position[e / kChunks][e % kChunks] = exists ? code[at] : kCut;
      }
#pragma unroll
      for (int e = 0; e < kPlanes * kChunks; e++) {
        const int own = plane + e / kChunks * kWarps, window = first + e % kChunks * 32;
        const float found = value[e / kChunks][e % kChunks];
        const unsigned of = position[e / kChunks][e % kChunks];
        if (of != kCut) sum[e / kChunks] += found;
        if (own < planes && window < t.windows) words[own * t.windows + window] = Word(found, of);
      }
    }
#pragma unroll
    for (int e = 0; e < kPlanes; e++) {
#pragma unroll
      for (int distance = 16; distance > 0; distance /= 2)
        sum[e] += __shfl_xor_sync(0xffffffffu, sum[e], distance);
      if (lane == 0 && plane + e * kWarps < planes) sums[plane + e * kWarps] = sum[e];
    }
  }
}

// sum[b][.] += over a row of windows, whose two rows of positions are two of the depths: dy of 16
// outputs, or of eight, times the elements of x at a row of filters, shifted by b.
template <int kKernelW, bool kTall>
__device__ __forceinline__ void Slide(const float* upper, const float* lower,
                                      const uint32_t* const (&words)[1 + kTall], int windows,
                                      float (&sum)[kKernelW][4]) {
  constexpr int kSeen = kKernelW + 1;
  float seen[kSeen][2];
#pragma unroll
  for (int k = 2; k < kSeen; k++) seen[k][0] = upper[k - 2], seen[k][1] = lower[k - 2];
  upper += kSeen - 2, lower += kSeen - 2;
#pragma unroll(kSeen / 2)
  for (int j = 0; j < windows; j++) {
#pragma unroll
    for (int k = 0; k < kSeen - 2; k++) seen[k][0] = seen[k + 2][0], seen[k][1] = seen[k + 2][1];
#pragma unroll
    for (int k = 0; k < 2; k++) {
      seen[kSeen - 2 + k][0] = upper[2 * j + k];
      seen[kSeen - 2 + k][1] = lower[2 * j + k];
    }
#pragma unroll
    for (int c = 0; c < kSide; c++) {
      float a[4] = {};
#pragma unroll
      for (int k = 0; k <= kTall; k++) {
        const uint32_t word = words[k][j];
#pragma unroll
        for (int i = 0; i < kSide; i++)
          a[kSide * i + k] = (word & 7) == (unsigned)(kSide * i + c) ? __uint_as_float(word) : 0.f;
      }
#pragma unroll
      for (int b = 0; b < kKernelW; b++) MultiplyAddTf32(a, seen[c + b], sum[b]);
    }
  }
}

// Adds the slices' sums and writes those of this block's slots to `partial`.
template <int kKernelW, bool kTall>
__device__ __forceinline__ void StoreSums(const FilterTask& t, int slot, int slice, int first_slot,
                                          const float (&sum)[kKernelW][4], float* shared,
                                          float* partial) {
  constexpr int kSums = kKernelW * 4, kOutputs = kTall ? 2 * kTile : kTile;
  const int lane = (int)threadIdx.x % 32, here = kWarps / t.slices;
#pragma unroll
  for (int k = 0; k < kSums; k++)
    shared[((slice * here + slot) * kSums + k) * 32 + lane] = sum[k / 4][k % 4];
  __syncthreads();
  for (int k = (int)threadIdx.x; k < t.outputs * t.in.rows * kKernelW; k += kThreads) {
    const int output = k / t.of_output, element = k - output * t.in.rows * kKernelW;
    const int row = element / t.of_kernel_w, b = element - row * kKernelW;
    const int own = row / kTile * t.output_tiles + output / kOutputs - first_slot;
    if (own < 0 || own >= here) continue;
    const int e = output % kOutputs / kTile * 2 + row % 2;
    const int thread = output % kTile * 4 + row % kTile / 2;
    const float* from = shared + (own * kSums + b * 4 + e) * 32 + thread;
    float total = 0.f;
#pragma unroll 1
    for (int s = 0; s < t.slices; s++) total += from[s * here * kSums * 32];
    partial[k] = total;
  }
}

template <int kKernelW, bool kTall>
__global__ void __launch_bounds__(kThreads)
    FilterGradientTensorKernel(const __grid_constant__ FilterTask t, const float* x,
                               const float* dy, const uint8_t* code, float* partial) {
  constexpr int kOutputs = kTall ? 2 * kTile : kTile;
  float* const input = DynamicShared<float>();
  uint32_t* const words = (uint32_t*)(input + t.words_at);
  float *biases = input + t.biases_at, *sums = biases + t.outputs, *line = input + t.lines_at;
  uint32_t* const cut = (uint32_t*)line;  // words that no position has; as numbers they are finite
  for (int k = (int)threadIdx.x; k < t.outputs; k += kThreads) biases[k] = 0.f;
  for (int k = (int)threadIdx.x; k < t.in.frame.width + kSlack; k += kThreads) cut[k] = 7;
  Clear(input, t.words_at);
  const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, here = kWarps / t.slices;
  const int worker = (int)blockIdx.x / t.slot_blocks;
  const int first_slot = (int)blockIdx.x % t.slot_blocks * here;
  const int slot = warp % here, slice = warp / here, own = first_slot + slot;
  const int group = own / t.of_tiles;
  const int output = (own - group * t.output_tiles) * kOutputs + lane / 4;
  const int row = t.in.RowAt(min(group * kTile + lane / 4, t.in.rows - 1));
  const int64_t of_image = (int64_t)t.outputs * t.windows;
  GridDependencySynchronize();
  TriggerProgrammaticLaunch();
  float sum[kKernelW][4] = {};
  for (int tile = worker; tile < t.in.tiles; tile += t.workers) {
    const int64_t first = (int64_t)tile * t.in.per_block;
    const int count = (int)min((int64_t)t.in.per_block, t.in.images - first);
    const float* const of_dy = dy + first * of_image;
    const uint8_t* const of_code = code + first * of_image;
    __syncthreads();  // the previous tile has been read
    if (t.windows > 32)
      LoadWords<1, 8>(t, of_dy, of_code, count * t.outputs, words, sums);
    else
      LoadWords<8, 1>(t, of_dy, of_code, count * t.outputs, words, sums);
    LoadPlanes<8, true>(x + first * t.in.channels * t.in.plane.h * t.in.plane.w,
                        count * t.in.channels, t.in.plane, t.in.frame, input);
    __syncthreads();
    for (int o = (int)threadIdx.x; o < t.outputs; o += kThreads)
      for (int k = 0; k < count; k++) biases[o] += sums[k * t.outputs + o];
    if (own >= t.slots) continue;
    // Of rows of windows four at a time: lanes have one each.
    for (int k = slice * 4; k < count * t.down; k += t.slices * 4) {
      const int r = k + lane % 4, image = r / t.of_down, i = r - image * t.down;
      const bool exists = r < count * t.down;
      const float* upper =
          exists ? input + image * t.in.numel + row + i * kSide * t.in.frame.pitch : line;
      const uint32_t* of[1 + kTall];
#pragma unroll
      for (int h = 0; h <= kTall; h++)
        of[h] = exists && output + h * kTile < t.outputs
                    ? words + (image * t.outputs + output + h * kTile) * t.windows + i * t.across
                    : cut;
      Slide<kKernelW, kTall>(upper, exists ? upper + t.in.frame.pitch : line, of, t.across, sum);
    }
  }
  __syncthreads();
  float* to = partial + (int64_t)worker * (t.outputs * (t.in.rows * kKernelW + 1));
  if (first_slot == 0)
    for (int k = (int)threadIdx.x; k < t.outputs; k += kThreads)
      to[t.outputs * t.in.rows * kKernelW + k] = biases[k];
  __syncthreads();
  StoreSums<kKernelW, kTall>(t, slot, slice, first_slot, sum, input, to);
}

}  // namespace

bool ConvPoolTensorFilterGradient(const char* op, const ConvPool& p, const float* x,
                                  const float* dy, const uint8_t* code, const AddWorkers& add,
                                  DLContext ctx, DLStream stream) {
  const int device = ctx.device_id, multiprocessors = Multiprocessors(device);
  const int kernel_w = (int)p.conv.kernel.w;
  if (!OnTensorCores(p, device) || (kernel_w != 3 && kernel_w != 5 && kernel_w != 7)) return false;
  FilterTask t{};
  t.in = Images::Of(x, p.conv);
  t.outputs = (int)p.conv.o;
  const bool tall = t.outputs > kTile;
  t.output_tiles = CeilDiv32(t.outputs, tall ? 2 * kTile : kTile);
  t.windows = (int)Size(p.out), t.down = (int)p.out.h, t.across = (int)p.out.w;
  t.of_down = Divisor(t.down), t.of_tiles = Divisor(t.output_tiles);
  t.of_output = Divisor(t.in.rows * kernel_w), t.of_kernel_w = Divisor(kernel_w);
  t.slots = t.in.groups * t.output_tiles;
  t.slot_blocks = CeilDiv32(t.slots, kWarps);
  t.slices = std::max(1, kWarps / t.slots);
  // Lanes read rows of x of eight rows of filters under four rows of windows.
  t.in.LayOut(p.out.h * kSide + p.conv.kernel.h - 1, p.out.w * kSide + kernel_w - 1,
              p.conv.kernel.h + 3 * kSide, [](int pitch) { return pitch % 2 == 1; });
  const int words = t.outputs * t.windows, line = t.in.frame.width + kSlack;
  t.in.Divide((kMostFloats - t.outputs - line) / (t.in.numel + words + t.outputs), device);
  t.words_at = (int)RoundUp((int64_t)t.in.per_block * t.in.numel, 4);
  t.biases_at = t.words_at + t.in.per_block * words;
  t.lines_at = (int)RoundUp(t.biases_at + t.outputs * (1 + t.in.per_block), 4);
  const int64_t sums = kThreads * 4 * kernel_w;
  const int64_t nbytes = std::max<int64_t>(t.lines_at + line, sums) * (int64_t)sizeof(float);
  const TensorLaunch launch{op, device, stream};
  if (!launch.Fits(nbytes)) return false;
  const int64_t most = std::max(1, 2 * multiprocessors / t.slot_blocks);
  t.workers = (int)CeilDiv(t.in.tiles, std::max<int64_t>(1, CeilDiv(t.in.tiles, most)));
  const int numel = t.outputs * t.in.rows * kernel_w;
  const Scratch partial(ctx, (int64_t)t.workers * (numel + t.outputs) * (int64_t)sizeof(float),
                        stream);
  const auto kernel =
      kernel_w == 3
          ? tall ? FilterGradientTensorKernel<3, true> : FilterGradientTensorKernel<3, false>
      : kernel_w == 5
          ? tall ? FilterGradientTensorKernel<5, true> : FilterGradientTensorKernel<5, false>
      : tall ? FilterGradientTensorKernel<7, true>
             : FilterGradientTensorKernel<7, false>;
  const bool pdl = ComputeMajor(device) >= 9;
  LaunchSmall(op, kernel, (unsigned)(t.workers * t.slot_blocks), 1, kThreads, (size_t)nbytes, pdl,
              stream, t, x, dy, code, partial.floats());
  add(partial.floats(), t.workers, numel, t.outputs);
  return true;
}

}  // namespace cuda
}  // namespace dlsys
