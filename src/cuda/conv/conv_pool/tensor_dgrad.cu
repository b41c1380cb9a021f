// The data gradient of conv + bias + relu + max-pool on tensor cores in tf32;
// operators/conv_pool.h has the contract.
//
// dy is in shared memory as words of its windows, so that a word serves all four positions. A warp
// has eight channels of dy, one a depth, all of whose filters it keeps in registers, and eight
// pairs of neighboring columns of dx. It goes down the windows' rows: a row of dy, read once, is
// multiplied by every element of the filters and added to the kernel's height of rows of dx, which
// stay in registers until they are complete. Warps of further channels of dy do the same, and their
// sums are added in a fixed order. For windows of 2 x 2 under filters of up to 7 x 7, which are
// filled up to an odd square with zeros. Limited by the issue of tensor cores.
#include <algorithm>

#include "cuda/conv/conv_pool/tensor.cuh"

namespace dlsys {
namespace cuda {
namespace {

struct Task {
  int images, channels, outputs;  // of dy; of dx
  int kh, kw, out_h, out_w;       // out: of dx
  int down, across;               // windows
  int pad, shift;                 // rows of dx above the first of dy; columns to the left of dx
  int columns, steps;             // pairs of columns, and of rows
  int lead;                       // words in front of a row that the first pair reads
  int slices, slots, output_tiles;
  int per_block, tiles;
  int width, pitch, channel_pitch;  // of words: an image's row, a row of all images, a channel
  int words_at, sums_at;            // in shared memory, behind the filters
  Divisor of_image, of_windows, of_across, of_columns;
  bool paired;         // a pair of columns may be stored as one
  bool filters_ready;  // PDL: they may be read before the predecessor ends
};

constexpr int kCompleted = 2 * 4;                     // sums of a lane, by a step
constexpr int kSumsNumel = kWarps * kCompleted * 32;  // of a block

// ---- kernels ----

// The filters of a warp's channels of dy and outputs: two depths of each element, zeros around.
template <int kKernel>
__device__ __forceinline__ void ReadFilters(const Task& t, const float* filters, int slice,
                                            int tile, float (&to)[kKernel][kKernel][2]) {
  const int lane = (int)threadIdx.x % 32, output = tile * kTile + lane / 4;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int channel = slice * kTile + lane % 4 + 4 * half;
    const bool exists = output < t.outputs && channel < t.channels;
    const float* from = filters + (channel * t.outputs + output) * t.kh * t.kw;
#pragma unroll
    for (int a = 0; a < kKernel; a++)
#pragma unroll
      for (int b = 0; b < kKernel; b++)
        to[a][b][half] = exists && a < t.kh && b < t.kw ? from[a * t.kw + b] : 0.f;
  }
}

// sum[i + a] += for the two rows of positions i of a row of windows. words: of this lane's pair of
// columns, in two channels.
template <int kKernel>
__device__ __forceinline__ void MultiplyRow(const uint32_t* first, const uint32_t* second,
                                            const float (&filters)[kKernel][kKernel][2],
                                            float (&sum)[kKernel + 1][4]) {
  constexpr int kWords = (kKernel + 1) / 2;
  uint32_t word[2][kWords];
#pragma unroll
  for (int half = 0; half < 2; half++)
#pragma unroll
    for (int k = 0; k < kWords; k++) word[half][k] = (half ? second : first)[k];
#pragma unroll
  for (int i = 0; i < kSide; i++) {
    float dy[2][kKernel + 1];
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int k = 0; k < kWords; k++)
#pragma unroll
        for (int c = 0; c < kSide; c++)
          dy[half][k * kSide + c] = (word[half][k] & 7) == (unsigned)(i * kSide + c)
                                        ? __uint_as_float(word[half][k])
                                        : 0.f;
#pragma unroll
    for (int b = 0; b < kKernel; b++) {
      constexpr int kLast = kKernel - 1;
      const float a[4] = {dy[0][kLast - b], dy[0][kLast - b + 1], dy[1][kLast - b],
                          dy[1][kLast - b + 1]};
#pragma unroll
      for (int row = 0; row < kKernel; row++) MultiplyAddTf32(a, filters[row][b], sum[i + row]);
    }
  }
}

// Copies dy of some images as words to (channels, rows, images, width), between words of zeros.
__device__ __forceinline__ void LoadWords(const Task& t, const float* dy, const uint8_t* code,
                                          int all, uint32_t* to) {
  constexpr int kAtOnce = 8;
  for (int first = (int)threadIdx.x; first < all; first += kAtOnce * kThreads) {
    float value[kAtOnce];
    uint8_t position[kAtOnce];
#pragma unroll
    for (int e = 0; e < kAtOnce; e++) {
      const int k = first + e * kThreads;
      value[e] = k < all ? dy[k] : 0.f;
      position[e] = k < all ? code[k] : kCut;
    }
#pragma unroll
    for (int e = 0; e < kAtOnce; e++) {
      const int k = first + e * kThreads;
      if (k >= all) break;
      const int image = k / t.of_image, of_image = k - image * (int)t.of_image.value;
      const int channel = of_image / t.of_windows;
      const int window = of_image - channel * (int)t.of_windows.value;
      const int row = window / t.of_across, col = window - row * t.across;
      to[channel * t.channel_pitch + row * t.pitch + image * t.width + t.lead + col] =
          Word(value[e], position[e]);
    }
  }
}

// Stores the two rows of a pair of columns from `y` on, of whose sums each slice has a part. sums:
// (slices, kCompleted, lanes).
template <int kRows>
__device__ __forceinline__ void StoreRows(const Task& t, const float (&sum)[kRows][4], int slice,
                                          float* sums, int output, int y, int x, float* dx) {
  const int lane = (int)threadIdx.x % 32;
  const auto store = [&](int row, int e, float left, float right) {
    if (y + row < 0 || y + row >= t.out_h || output + e >= t.outputs) return;
    float* const to = dx + (e * t.out_h + y + row) * t.out_w + x;
    if (t.paired) {
      *(float2*)to = make_float2(left, right);
    } else {
      if (x >= 0) to[0] = left;
      if (x + 1 < t.out_w) to[1] = right;
    }
  };
  if (t.slices == 1) {
#pragma unroll
    for (int k = 0; k < 4; k++) store(k / 2, k % 2, sum[k / 2][k % 2], sum[k / 2][k % 2 + 2]);
    return;
  }
#pragma unroll
  for (int k = 0; k < kCompleted; k++)
    sums[(slice * kCompleted + k) * 32 + lane] = sum[k / 4][k % 4];
  __syncthreads();
  if (output >= t.outputs) return;  // as those of warps beyond the slots, whose sums nobody adds
#pragma unroll 1
  for (int k = slice; k < 4; k += t.slices) {
    const float* from = sums + (k / 2 * 4 + k % 2) * 32 + lane;
    float left = from[0], right = from[2 * 32];
#pragma unroll 1
    for (int s = 1; s < t.slices; s++) {
      from += kCompleted * 32;
      left += from[0], right += from[2 * 32];
    }
    store(k / 2, k % 2, left, right);
  }
}

template <int kKernel>
__global__ void __launch_bounds__(kThreads)
    DataGradientTensorKernel(const __grid_constant__ Task t, const float* f, const float* dy,
                             const uint8_t* code, float* dx) {
  float* const filters = DynamicShared<float>();
  uint32_t* const words = (uint32_t*)(filters + t.words_at);
  const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
  const int slot = warp / t.slices, slice = warp - slot * t.slices;
  float* const sums = filters + t.sums_at + slot * t.slices * kCompleted * 32;
  if (!t.filters_ready) GridDependencySynchronize();
  const int numel = t.channels * t.outputs * t.kh * t.kw;
#pragma unroll 4
  for (int k = (int)threadIdx.x; k < numel; k += kThreads) filters[k] = RoundedToTf32(f[k]);
  Clear((float*)words, t.sums_at - t.words_at);
  if (t.filters_ready) GridDependencySynchronize();
  TriggerProgrammaticLaunch();
  const int numel_dy = (int)t.of_image.value, numel_dx = t.outputs * t.out_h * t.out_w;
  int turn = 0;  // of two copies of the sums
  for (int tile = (int)blockIdx.x; tile < t.tiles; tile += (int)gridDim.x) {
    const int64_t first = (int64_t)tile * t.per_block;
    const int count = (int)min((int64_t)t.per_block, t.images - first);
    const int pairs = count * t.columns, items = CeilDiv32(pairs, kTile) * t.output_tiles;
    __syncthreads();  // the previous tile has been read
    LoadWords(t, dy + first * numel_dy, code + first * numel_dy, count * numel_dy, words);
    __syncthreads();
    for (int begin = 0; begin < items; begin += t.slots) {
      const int item = begin + slot, unit = item / t.output_tiles;
      const int output_tile = item - unit * t.output_tiles;
      const bool exists = slot < t.slots && item < items;
      float weights[kKernel][kKernel][2], sum[kKernel + 1][4] = {};
      if (exists) ReadFilters(t, filters, slice, output_tile, weights);
      const int own = unit * kTile + lane / 4, at = min(own, pairs - 1), image = at / t.of_columns;
      const int pair = at - image * t.columns, output = output_tile * kTile + lane % 4 * 2;
      const uint32_t* from =
          words + (slice * kTile + lane % 4) * t.channel_pitch + image * t.width + pair;
      float* const to = dx + (first + image) * numel_dx + (int64_t)output * t.out_h * t.out_w;
      for (int step = 0; step < t.steps; step++, from += t.pitch, turn ^= 1) {
        if (exists && step < t.down)
          MultiplyRow<kKernel>(from, from + 4 * t.channel_pitch, weights, sum);
        StoreRows(t, sum, slice, sums + turn * kSumsNumel,
                  exists && own < pairs ? output : t.outputs, step * kSide - t.pad,
                  pair * kSide - t.shift, to);
#pragma unroll
        for (int row = 0; row < kKernel + 1; row++)
#pragma unroll
          for (int k = 0; k < 4; k++)
            sum[row][k] = row + kSide < kKernel + 1 ? sum[row + kSide][k] : 0.f;
      }
    }
  }
}

}  // namespace

bool ConvPoolTensorDataGradient(const char* op, const ConvPool& p, const float* f, const float* dy,
                                const uint8_t* code, float* dx, int device, DLStream stream) {
  const HW kernel = p.conv.kernel, pad = p.conv.pad, in = p.conv.in;
  if (!OnTensorCores(p, device) || CeilDiv(p.conv.o, kTile) > kWarps) return false;
  const int side =
      (int)std::max<int64_t>({kernel.h, kernel.w, 3}) | 1;  // of the filters, filled up
  Task t{};
  t.images = (int)p.conv.n, t.channels = (int)p.conv.o, t.outputs = (int)p.conv.c;
  t.kh = (int)kernel.h, t.kw = (int)kernel.w;
  t.out_h = (int)in.h, t.out_w = (int)in.w;
  t.down = (int)p.out.h, t.across = (int)p.out.w;
  t.pad = (int)pad.h, t.shift = (int)pad.w % kSide;
  t.columns = CeilDiv32(t.out_w + t.shift, kSide), t.steps = CeilDiv32(t.out_h + t.pad, kSide);
  t.lead = (side - 1 - (int)pad.w + t.shift) / kSide;
  t.slices = CeilDiv32(t.channels, kTile), t.slots = kWarps / t.slices;
  t.output_tiles = CeilDiv32(t.outputs, kTile);
  t.paired = t.shift == 0 && t.out_w % 2 == 0 && (uintptr_t)dx % sizeof(float2) == 0;
  t.filters_ready = InputsAreReady(0, 1);
  t.of_image = Divisor(t.channels * Size(p.out)), t.of_windows = Divisor(Size(p.out));
  t.of_across = Divisor(t.across), t.of_columns = Divisor(t.columns);
  t.width = t.columns + side / 2;
  t.words_at = (int)RoundUp(p.conv.c * p.conv.o * kernel.h * kernel.w, 4);
  const int beside = t.words_at + 2 * kSumsNumel, channels = t.slices * kTile;
  const int64_t room = (kMostFloats - beside) / (channels * (t.down * t.width + 32));
  t.per_block = ImagesOfBlock(t.images, room, device), t.tiles = CeilDiv32(t.images, t.per_block);
  t.pitch = t.per_block * t.width;
  t.channel_pitch = t.down * t.pitch;
  while (t.channel_pitch % 32 != 8) t.channel_pitch++;  // four rows of eight words, or nearly
  t.sums_at = t.words_at + channels * t.channel_pitch;
  const int64_t nbytes = (t.sums_at + 2 * kSumsNumel) * (int64_t)sizeof(float);
  const TensorLaunch launch{op, device, stream};
  if (!launch.Fits(nbytes)) return false;
  const auto gradient = side == 3   ? DataGradientTensorKernel<3>
                        : side == 5 ? DataGradientTensorKernel<5>
                                    : DataGradientTensorKernel<7>;
  launch(gradient, t.tiles, (size_t)nbytes, t, f, dy, code, dx);
  return true;
}

}  // namespace cuda
}  // namespace dlsys
