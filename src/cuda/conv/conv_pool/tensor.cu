// Convolution fused with bias, relu and max-pool, and its gradients, on tensor cores in tf32;
// operators/conv_pool.h has the contract, conv_pool/conv_pool.cu and conv_pool/wgrad.cu true
// float32.
//
// A lane multiplies what it slides along: of the depths of a product it has whole rows of filters,
// whose elements it takes one after another, so that what it has read of a row of x serves all
// columns of the filters and both columns of a patch of 2 x 2 positions. A fragment holds eight
// patches by eight outputs. x, or dy unpooled, is in shared memory with its padding, rounded to
// tf32. Filters are there as fragments. The filter gradient takes dy as words of a window's value,
// rounded, with its code in the bits that tensor cores leave out. Sums are float32, in a fixed
// order; the bias's are of dy as it is. For windows of 2 x 2 under filters of 3, 5 or 7 columns.
// Limited by the reads from shared memory, and with few images by latency.
#include <algorithm>

#include "cuda/conv/conv_pool/conv_pool.cuh"
#include "cuda/runtime/launch.cuh"

namespace dlsys {
namespace cuda {
namespace {

constexpr int kWarps = kThreads / 32;
constexpr int kSide = 2;  // of a window, and of a patch of dx
constexpr int kTile = 8;  // patches, outputs and rows of filters in a fragment
constexpr int kZeros = 16;

// Images, their padded channels in shared memory, and the rows of filters: pairs of a channel and a
// kernel row.
struct Images {
  int images, channels, kh;
  Plane plane;
  int rows, groups;  // of filters; of eight rows
  int per_block, tiles;
  int numel;  // of an image in shared memory
  Frame frame;
  Divisor of_kh;

  __device__ __forceinline__ int RowAt(int row) const {
    const int channel = row / of_kh;
    return channel * frame.channel_pitch + (row - channel * (int)of_kh.value) * frame.pitch;
  }
};

// A launch of the convolution, or of the data gradient, which is one over dy unpooled by mirrored
// filters.
struct Task {
  Images in;
  int outputs, output_tiles;
  int across, patches;  // of an image
  int out_h, out_w;     // of dx
  Divisor of_patches, of_across, of_windows, of_width;
  bool relu, filters_ready;

  __host__ __device__ int WeightsNumel(int kernel_w) const {
    return in.groups * kernel_w * output_tiles * 64;
  }
};

// ---- kernels ----

// The filters as fragments: (groups, kernel_w, output_tiles, lanes), a lane's two depths each.
template <int kKernelW, class F>
__device__ __forceinline__ void LoadFragments(const Task& t, const F& filter, float2* to) {
  const int lane = (int)threadIdx.x % 32, all = t.in.groups * kKernelW * t.output_tiles;
#pragma unroll 4
  for (int k = (int)threadIdx.x / 32; k < all; k += kWarps) {
    const int of_row = k / t.output_tiles, tile = k - of_row * t.output_tiles;
    const int group = of_row / kKernelW, b = of_row - group * kKernelW;
    const int output = tile * kTile + lane / 4, row = group * kTile + lane % 4;
    const bool exists = output < t.outputs;
    const float first = exists && row < t.in.rows ? filter(output, row, b) : 0.f;
    const float second = exists && row + 4 < t.in.rows ? filter(output, row + 4, b) : 0.f;
    to[k * 32 + lane] = make_float2(RoundedToTf32(first), RoundedToTf32(second));
  }
}

// sum[unit][i][tile] += for eight patches a unit and eight outputs a tile: the rows of a fragment
// are the patches' positions (i, 0), then (i, 1). corner: of this lane's patches.
template <int kKernelW, int kUnits, int kTilesN>
__device__ __forceinline__ void Multiply(const Images& in, const float* const (&corner)[kUnits],
                                         const float* zeros, const float2* weights, int pitch,
                                         float (&sum)[kUnits][kSide][kTilesN][4]) {
  constexpr int kRow = kKernelW + 1;
  const int lane = (int)threadIdx.x % 32;
  for (int group = 0; group < in.groups; group++, weights += kKernelW * pitch) {
    float x[kUnits][kSide][2][kRow];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = group * kTile + lane % 4 + 4 * half, at = in.RowAt(row);
      const bool exists = row < in.rows;
#pragma unroll
      for (int u = 0; u < kUnits; u++) {
        const float* from = exists ? corner[u] + at : zeros;
        ReadRow<kSide>(from, x[u][0][half]);
        ReadRow<kSide>(from + (exists ? in.frame.pitch : 0), x[u][1][half]);
      }
    }
#pragma unroll
    for (int b = 0; b < kKernelW; b++)
#pragma unroll
      for (int n = 0; n < kTilesN; n++) {
        const float2 pair = weights[b * pitch + n * 32 + lane];
        const float weight[2] = {pair.x, pair.y};
#pragma unroll
        for (int u = 0; u < kUnits; u++)
#pragma unroll
          for (int i = 0; i < kSide; i++) {
            const float (&of)[2][kRow] = x[u][i];
            const float a[4] = {of[0][b], of[0][b + 1], of[1][b], of[1][b + 1]};
            MultiplyAddTf32(a, weight, sum[u][i][n]);
          }
      }
  }
}

// Divides the patches of `count` images and the outputs among warps; put(image, patch, output,
// values) gets the four positions of each.
template <int kKernelW, int kUnits, int kTilesN, class Put>
__device__ __forceinline__ void ForEachPatch(const Task& t, int count, const float* input,
                                             const float* zeros, const float2* weights,
                                             const Put& put) {
  const int lane = (int)threadIdx.x % 32, patches = count * t.patches;
  const int sets = CeilDiv32(t.output_tiles, kTilesN);
  const int items = CeilDiv32(patches, kUnits * kTile) * sets;
  for (int item = (int)threadIdx.x / 32; item < items; item += kWarps) {
    const int unit = item / sets, first_tile = (item - unit * sets) * kTilesN;
    const float* corner[kUnits];
    int image[kUnits], patch[kUnits];
#pragma unroll
    for (int u = 0; u < kUnits; u++) {
      const int k = (unit * kUnits + u) * kTile + lane / 4, at = min(k, patches - 1);
      image[u] = at / t.of_patches;
      patch[u] = at - image[u] * t.patches;
      const int i = patch[u] / t.of_across, j = patch[u] - i * t.across;
      corner[u] = input + image[u] * t.in.numel + (i * t.in.frame.pitch + j) * kSide;
      if (k >= patches) image[u] = -1;
    }
    float sum[kUnits][kSide][kTilesN][4] = {};
    Multiply<kKernelW, kUnits, kTilesN>(t.in, corner, zeros, weights + first_tile * 32,
                                        t.output_tiles * 32, sum);
#pragma unroll
    for (int u = 0; u < kUnits; u++)
#pragma unroll
      for (int n = 0; n < kTilesN; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const int output = (first_tile + n) * kTile + lane % 4 * 2 + e;
          const float values[4] = {sum[u][0][n][e], sum[u][0][n][e + 2], sum[u][1][n][e],
                                   sum[u][1][n][e + 2]};
          if (image[u] >= 0 && output < t.outputs) put(image[u], patch[u], output, values);
        }
  }
}

template <int kKernelW, int kUnits, int kTilesN>
__global__ void __launch_bounds__(kThreads)
    ConvPoolTensorKernel(const __grid_constant__ Task t, const float* x, const float* f,
                         const float* bias, float* y, uint8_t* code) {
  float* const memory = DynamicShared<float>();
  float *weights = memory + kZeros, *input = weights + t.WeightsNumel(kKernelW);
  if (!t.filters_ready) GridDependencySynchronize();
  if ((int)threadIdx.x < kZeros) memory[threadIdx.x] = 0.f;
  Clear(input, t.in.per_block * t.in.numel);
  LoadFragments<kKernelW>(
      t, [&](int o, int row, int b) { return f[(o * t.in.rows + row) * kKernelW + b]; },
      (float2*)weights);
  if (t.filters_ready) GridDependencySynchronize();
  TriggerProgrammaticLaunch();
  for (int tile = (int)blockIdx.x; tile < t.in.tiles; tile += (int)gridDim.x) {
    const int64_t first = (int64_t)tile * t.in.per_block;
    const int count = (int)min((int64_t)t.in.per_block, t.in.images - first);
    __syncthreads();  // the previous tile has been read
    LoadPlanes<8, true>(x + first * t.in.channels * t.in.plane.h * t.in.plane.w,
                        count * t.in.channels, t.in.plane, t.in.frame, input);
    __syncthreads();
    ForEachPatch<kKernelW, kUnits, kTilesN>(
        t, count, input, memory, (const float2*)weights,
        [&](int image, int patch, int output, const float (&values)[4]) {
          const int64_t at = ((first + image) * t.outputs + output) * t.patches + patch;
          Pool(values, bias ? bias[output] : 0.f, t.relu, y + at, code + at);
        });
  }
}

// Unpools dy (channels, windows), rounded, into padded channels: all four elements of each window.
__device__ __forceinline__ void Unpool(const Task& t, const float* dy, const uint8_t* code,
                                       int channels, float* to) {
  const int windows = (int)t.of_windows.value, width = (int)t.of_width.value;
  constexpr int kAtOnce = 4;
  const int all = channels * windows;
  for (int first = (int)threadIdx.x; first < all; first += kAtOnce * kThreads) {
    float value[kAtOnce];
    uint8_t position[kAtOnce];
#pragma unroll
    for (int e = 0; e < kAtOnce; e++) {
      const int k = first + e * kThreads;
      position[e] = k < all ? code[k] : kCut;
      value[e] = k < all ? RoundedToTf32(dy[k]) : 0.f;
    }
#pragma unroll
    for (int e = 0; e < kAtOnce; e++) {
      const int k = first + e * kThreads;
      if (k >= all) break;
      const int channel = k / t.of_windows, at = k - channel * windows;
      const int i = at / t.of_width, j = at - i * width;
      float* corner = to + channel * t.in.frame.channel_pitch +
                      (i * kSide + t.in.plane.top) * t.in.frame.pitch + j * kSide + t.in.plane.left;
#pragma unroll
      for (int c = 0; c < kSide * kSide; c++)
        corner[c / kSide * t.in.frame.pitch + c % kSide] = c == position[e] ? value[e] : 0.f;
    }
  }
}

template <int kKernelW, int kUnits, int kTilesN>
__global__ void __launch_bounds__(kThreads)
    DataGradientTensorKernel(const __grid_constant__ Task t, const float* f, const float* dy,
                             const uint8_t* code, float* dx) {
  float* const memory = DynamicShared<float>();
  float *weights = memory + kZeros, *input = weights + t.WeightsNumel(kKernelW);
  if (!t.filters_ready) GridDependencySynchronize();
  if ((int)threadIdx.x < kZeros) memory[threadIdx.x] = 0.f;
  Clear(input, t.in.per_block * t.in.numel);
  LoadFragments<kKernelW>(
      t,
      [&](int o, int row, int b) {  // (channels, outputs, kernel), mirrored
        const int channel = row / t.in.of_kh, a = row - channel * t.in.kh;
        return f[((channel * t.outputs + o + 1) * t.in.kh - a) * kKernelW - 1 - b];
      },
      (float2*)weights);
  if (t.filters_ready) GridDependencySynchronize();
  TriggerProgrammaticLaunch();
  const int64_t of_image = (int64_t)t.in.channels * (int)t.of_windows.value;
  for (int tile = (int)blockIdx.x; tile < t.in.tiles; tile += (int)gridDim.x) {
    const int64_t first = (int64_t)tile * t.in.per_block;
    const int count = (int)min((int64_t)t.in.per_block, t.in.images - first);
    __syncthreads();  // the previous tile has been read
    Unpool(t, dy + first * of_image, code + first * of_image, count * t.in.channels, input);
    __syncthreads();
    ForEachPatch<kKernelW, kUnits, kTilesN>(
        t, count, input, memory, (const float2*)weights,
        [&](int image, int patch, int output, const float (&values)[4]) {
          const int i = patch / t.of_across * kSide;
          const int j = (patch - i / kSide * t.across) * kSide;
          float* to = dx + (((first + image) * t.outputs + output) * t.out_h + i) * t.out_w + j;
#pragma unroll
          for (int e = 0; e < kSide * kSide; e++)
            if (i + e / kSide < t.out_h && j + e % kSide < t.out_w)
              to[e / kSide * t.out_w + e % kSide] = values[e];
        });
  }
}

// A launch of the filter gradient.
struct FilterTask {
  Images in;
  int outputs, output_tiles;
  int windows, across;  // of an image and an output; of a row
  int slots, slot_blocks, slices;
  int workers;
  int words_at, biases_at, lines_at;  // in shared memory
  Divisor of_rows;                    // rows of positions of an image
};

// Copies `planes` of dy, one of each output of each image, as words, and notes what each sums to.
__device__ __forceinline__ void LoadWords(const FilterTask& t, const float* dy, const uint8_t* code,
                                          int planes, uint32_t* words, float* sums) {
  constexpr int kAtOnce = 4;
  const int lane = (int)threadIdx.x % 32;
  for (int plane = (int)threadIdx.x / 32; plane < planes; plane += kWarps * kAtOnce) {
    float sum[kAtOnce] = {};
    for (int k = lane; k < t.windows; k += 64) {
      float value[kAtOnce][2];
      uint8_t position[kAtOnce][2];
#pragma unroll
      for (int e = 0; e < 2 * kAtOnce; e++) {
        const int own = plane + e / 2 * kWarps, window = k + e % 2 * 32;
        const bool exists = own < planes && window < t.windows;
        const int at = own * t.windows + window;
        value[e / 2][e % 2] = exists ? dy[at] : 0.f;
        position[e / 2][e % 2] = exists ? code[at] : kCut;
      }
#pragma unroll
      for (int e = 0; e < 2 * kAtOnce; e++) {
        const int own = plane + e / 2 * kWarps, window = k + e % 2 * 32;
        const float found = value[e / 2][e % 2];
        const unsigned of = position[e / 2][e % 2];
        if (of != kCut) sum[e / 2] += found;
        if (own < planes && window < t.windows)
          words[own * t.windows + window] =
              (__float_as_uint(RoundedToTf32(found)) & ~0x1fffu) | (of & 7);
      }
    }
#pragma unroll
    for (int e = 0; e < kAtOnce; e++) {
#pragma unroll
      for (int distance = 16; distance > 0; distance /= 2)
        sum[e] += __shfl_xor_sync(0xffffffffu, sum[e], distance);
      if (lane == 0 && plane + e * kWarps < planes) sums[plane + e * kWarps] = sum[e];
    }
  }
}

// sum[m][.] += over `windows` windows of a row of positions, of which each half of the depths has
// one: the elements of x at a row of filters times dy. The rows of fragment m are eight rows of
// filters at column m, then at column m + kHalf.
template <int kKernelW>
__device__ __forceinline__ void Slide(const float* const (&x)[2], const uint32_t* const (&word)[2],
                                      const uint32_t (&code)[2], int windows,
                                      float (&sum)[(kKernelW + 1) / 2][4]) {
  constexpr int kHalf = (kKernelW + 1) / 2, kSeen = kKernelW + 1;
  float seen[2][kSeen];
#pragma unroll
  for (int half = 0; half < 2; half++)
#pragma unroll
    for (int k = 2; k < kSeen; k++) seen[half][k] = x[half][k - 2];
#pragma unroll 2
  for (int j = 0; j < windows; j++) {
    uint32_t pair[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
      for (int k = 0; k < kSeen - 2; k++) seen[half][k] = seen[half][k + 2];
      const float2 next = *(const float2*)(x[half] + kSeen - 2 + 2 * j);
      seen[half][kSeen - 2] = next.x, seen[half][kSeen - 1] = next.y;
      pair[half] = word[half][j] ^ code[half];
    }
#pragma unroll
    for (int c = 0; c < 2; c++) {
      float b[2];
#pragma unroll
      for (int half = 0; half < 2; half++)
        b[half] = (pair[half] & 7) == (unsigned)c ? __uint_as_float(pair[half]) : 0.f;
#pragma unroll
      for (int m = 0; m < kHalf; m++) {
        const int other = m + kHalf < kKernelW ? m + kHalf : m;  // nobody reads those beyond
        const float a[4] = {seen[0][c + m], seen[0][c + other], seen[1][c + m], seen[1][c + other]};
        MultiplyAddTf32(a, b, sum[m]);
      }
    }
  }
}

// Adds the slices' sums and writes those of this block's slots to `partial`.
template <int kKernelW>
__device__ __forceinline__ void StoreSums(const FilterTask& t, int slot, int slice, int first_slot,
                                          const float (&sum)[(kKernelW + 1) / 2][4], float* shared,
                                          float* partial) {
  constexpr int kHalf = (kKernelW + 1) / 2, kSums = kHalf * 4;
  const int lane = (int)threadIdx.x % 32, here = kWarps / t.slices;
#pragma unroll
  for (int k = 0; k < kSums; k++)
    shared[((slice * here + slot) * kSums + k) * 32 + lane] = sum[k / 4][k % 4];
  __syncthreads();
  for (int k = (int)threadIdx.x; k < here * kSums * 32; k += kThreads) {
    float total = 0.f;
    for (int s = 0; s < t.slices; s++) total += shared[s * here * kSums * 32 + k];
    const int own = first_slot + k / (kSums * 32), e = k / 32 % kSums, thread = k % 32;
    const int group = own / t.output_tiles, tile = own - group * t.output_tiles;
    const int row = group * kTile + thread / 4, b = e / 4 + e % 4 / 2 * kHalf;
    const int output = tile * kTile + thread % 4 * 2 + e % 2;
    if (own < t.slots && row < t.in.rows && b < kKernelW && output < t.outputs)
      partial[(output * t.in.rows + row) * kKernelW + b] = total;
  }
}

template <int kKernelW>
__global__ void __launch_bounds__(kThreads)
    FilterGradientTensorKernel(const __grid_constant__ FilterTask t, const float* x,
                               const float* dy, const uint8_t* code, float* partial) {
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
  const int group = own / t.output_tiles,
            output = (own - group * t.output_tiles) * kTile + lane / 4;
  const int row = t.in.RowAt(min(group * kTile + lane / 4, t.in.rows - 1));
  const int position_rows = (int)t.of_rows.value;
  const int64_t of_image = (int64_t)t.outputs * t.windows;
  GridDependencySynchronize();
  TriggerProgrammaticLaunch();
  float sum[(kKernelW + 1) / 2][4] = {};
  for (int tile = worker; tile < t.in.tiles; tile += t.workers) {
    const int64_t first = (int64_t)tile * t.in.per_block;
    const int count = (int)min((int64_t)t.in.per_block, t.in.images - first);
    __syncthreads();  // the previous tile has been read
    LoadWords(t, dy + first * of_image, code + first * of_image, count * t.outputs, words, sums);
    LoadPlanes<8, true>(x + first * t.in.channels * t.in.plane.h * t.in.plane.w,
                        count * t.in.channels, t.in.plane, t.in.frame, input);
    __syncthreads();
    for (int o = (int)threadIdx.x; o < t.outputs; o += kThreads)
      for (int k = 0; k < count; k++) biases[o] += sums[k * t.outputs + o];
    if (own >= t.slots) continue;
    for (int k = slice * kTile; k < count * position_rows; k += t.slices * kTile) {
      const float* from[2];
      const uint32_t* word[2];
      uint32_t codes[2];
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int q = k + lane % 4 + 4 * half, image = q / t.of_rows;
        const int i = q - image * position_rows;
        const bool exists = q < count * position_rows;
        from[half] = exists ? input + image * t.in.numel + row + i * t.in.frame.pitch : line;
        word[half] = exists && output < t.outputs
                         ? words + (image * t.outputs + output) * t.windows + i / 2 * t.across
                         : cut;
        codes[half] = i % 2 * 2;
      }
      Slide<kKernelW>(from, word, codes, t.across, sum);
    }
  }
  __syncthreads();
  float* to = partial + (int64_t)worker * (t.outputs * (t.in.rows * kKernelW + 1));
  if (first_slot == 0)
    for (int k = (int)threadIdx.x; k < t.outputs; k += kThreads)
      to[t.outputs * t.in.rows * kKernelW + k] = biases[k];
  __syncthreads();
  StoreSums<kKernelW>(t, slot, slice, first_slot, sum, input, to);
}

// ---- launchers ----

constexpr int64_t kPlain = 48 * 1024 / (int)sizeof(float);  // beyond it fewer blocks are resident

bool IsServed(const ConvPool& p, int device) {
  const int64_t width = p.conv.kernel.w;
  return p.window == kSide && (width == 3 || width == 5 || width == 7) && !p.Empty() &&
         ComputeMajor(device) >= 8 && p.conv.n <= INT32_MAX / 2;
}

// Padded channels of `rows` x `width`. Rows are `banks` apart, modulo 32, or that much less, and
// those of the next channel follow as if there were none between, so that lanes that read different
// rows of filters read different banks.
template <class Pitch>
void LayOut(int rows, int width, const Pitch& fits, Images* in) {
  int pitch = (int)RoundUp(width, 2);
  while (!fits(pitch % 32)) pitch += 2;
  int channel_pitch = rows * pitch;
  while (channel_pitch % 32 != in->kh * pitch % 32) channel_pitch += 2;
  in->frame = {rows, width, pitch, channel_pitch};
  in->numel = in->channels * channel_pitch;
}

Images ImagesOf(const float* x, int64_t images, int64_t channels, HW size, HW pad, HW kernel) {
  Images in{};
  in.images = (int)images, in.channels = (int)channels, in.kh = (int)kernel.h;
  in.plane = Plane::Of(x, size.h, size.w, pad.h, pad.w);
  in.rows = in.channels * in.kh;
  in.groups = CeilDiv32(in.rows, kTile);
  in.of_kh = Divisor(in.kh);
  return in;
}

// Images of a tile: as many as make two tiles a multiprocessor, and fit, but at most `most`.
void Tile(Images* in, int64_t beside, int most, int multiprocessors) {
  const int64_t room = (kPlain - beside) / in->numel;
  in->per_block = (int)std::max<int64_t>(
      1, std::min<int64_t>({most, room, CeilDiv(in->images, 2 * multiprocessors)}));
  in->tiles = (int)CeilDiv(in->images, in->per_block);
}

struct Launching {
  const char* op;
  int device;
  DLStream stream;

  bool Fits(int64_t nbytes) const { return nbytes + 2048 <= (int64_t)SharedLimit(device); }
  template <class... Params, class... Args>
  void operator()(void (*kernel)(Params...), int tiles, size_t nbytes, Args... args) const {
    AllowShared(op, (const void*)kernel, nbytes);
    const unsigned grid = TiledGrid(op, kernel, kThreads, nbytes, tiles, device);
    LaunchSmall(op, kernel, grid, 1, kThreads, nbytes, ComputeMajor(device) >= 9, stream, args...);
  }
};

// f(kernel width, units, output tiles) with constants: eight or sixteen patches by eight or sixteen
// outputs a warp, the more the fewer reads from shared memory, but only where that leaves work for
// all warps.
template <class F>
void WithTile(int64_t kernel_w, const Task& t, const F& f) {
  const auto by_tile = [&](auto width) {
    const int units = CeilDiv32(t.in.per_block * t.patches, kTile);
    const bool wide = t.output_tiles % 2 == 0;
    const std::integral_constant<int, 1> one;
    const std::integral_constant<int, 2> two;
    if (wide && units * t.output_tiles >= 4 * kWarps)
      f(width, two, two);
    else if (units * t.output_tiles >= 2 * kWarps)
      f(width, two, one);
    else
      f(width, one, one);
  };
  if (kernel_w == 3)
    by_tile(std::integral_constant<int, 3>());
  else if (kernel_w == 5)
    by_tile(std::integral_constant<int, 5>());
  else
    by_tile(std::integral_constant<int, 7>());
}

// Rows 8 or 24 banks apart: four rows of four float2s.
bool FourRows(int pitch) { return pitch == 8 || pitch == 24; }

// Rows of which seven, of one float2, lie in different banks.
bool SevenRows(int pitch) {
  unsigned seen = 0;
  for (int row = 0; row < 7; row++) {
    const unsigned bank = 1u << (row * pitch % 32);
    if (seen & bank) return false;
    seen |= bank;
  }
  return true;
}

void Finish(int64_t outputs, int64_t down, int64_t across, int kernel_w, int multiprocessors,
            Task* t) {
  t->outputs = (int)outputs;
  t->output_tiles = CeilDiv32(t->outputs, kTile);
  t->across = (int)across, t->patches = (int)(down * across);
  t->of_patches = Divisor(t->patches), t->of_across = Divisor(across);
  LayOut((int)down * kSide + t->in.kh - 1, (int)across * kSide + kernel_w - 1, FourRows, &t->in);
  Tile(&t->in, kZeros + t->WeightsNumel(kernel_w), 4, multiprocessors);
}

int64_t SharedNbytes(const Task& t, int kernel_w) {
  const int64_t numel =
      kZeros + t.WeightsNumel(kernel_w) + RoundUp((int64_t)t.in.per_block * t.in.numel, 4);
  return numel * (int64_t)sizeof(float);
}

}  // namespace

bool ConvPoolTensor(const char* op, const ConvPool& p, const float* x, const float* f,
                    const float* bias, bool relu, float* y, uint8_t* code, int device,
                    DLStream stream) {
  if (!IsServed(p, device)) return false;
  const int kernel_w = (int)p.conv.kernel.w;
  Task t{};
  t.in = ImagesOf(x, p.conv.n, p.conv.c, p.conv.in, p.conv.pad, p.conv.kernel);
  t.relu = relu;
  t.filters_ready = InputsAreReady(1, 1);
  Finish(p.conv.o, p.out.h, p.out.w, kernel_w, Multiprocessors(device), &t);
  const int64_t nbytes = SharedNbytes(t, kernel_w);
  const Launching launch{op, device, stream};
  if (!launch.Fits(nbytes)) return false;
  WithTile(kernel_w, t, [&](auto width, auto units, auto tiles) {
    const auto kernel = ConvPoolTensorKernel<width(), units(), tiles()>;
    launch(kernel, t.in.tiles, (size_t)nbytes, t, x, f, bias, y, code);
  });
  return true;
}

bool ConvPoolTensorDataGradient(const char* op, const ConvPool& p, const float* f, const float* dy,
                                const uint8_t* code, float* dx, int device, DLStream stream) {
  if (!IsServed(p, device)) return false;
  const HW kernel = p.conv.kernel, pad = p.conv.pad, in = p.conv.in;
  const int kernel_w = (int)kernel.w;
  Task t{};
  t.in = ImagesOf(dy, p.conv.n, p.conv.o, p.conv.out, {kernel.h - 1 - pad.h, kernel.w - 1 - pad.w},
                  kernel);
  t.out_h = (int)in.h, t.out_w = (int)in.w;
  t.of_windows = Divisor(Size(p.out)), t.of_width = Divisor(p.out.w);
  t.filters_ready = InputsAreReady(0, 1);
  Finish(p.conv.c, CeilDiv(in.h, kSide), CeilDiv(in.w, kSide), kernel_w, Multiprocessors(device),
         &t);
  const int64_t nbytes = SharedNbytes(t, kernel_w);
  const Launching launch{op, device, stream};
  if (!launch.Fits(nbytes)) return false;
  WithTile(kernel_w, t, [&](auto width, auto units, auto tiles) {
    const auto gradient = DataGradientTensorKernel<width(), units(), tiles()>;
    launch(gradient, t.in.tiles, (size_t)nbytes, t, f, dy, code, dx);
  });
  return true;
}

bool ConvPoolTensorFilterGradient(const char* op, const ConvPool& p, const float* x,
                                  const float* dy, const uint8_t* code, const AddWorkers& add,
                                  DLContext ctx, DLStream stream) {
  const int device = ctx.device_id, multiprocessors = Multiprocessors(device);
  if (!IsServed(p, device)) return false;
  const int kernel_w = (int)p.conv.kernel.w, kernel_h = (int)p.conv.kernel.h;
  FilterTask t{};
  t.in = ImagesOf(x, p.conv.n, p.conv.c, p.conv.in, p.conv.pad, p.conv.kernel);
  t.outputs = (int)p.conv.o;
  t.output_tiles = CeilDiv32(t.outputs, kTile);
  t.windows = (int)Size(p.out), t.across = (int)p.out.w;
  t.of_rows = Divisor(p.out.h * kSide);
  t.slots = t.in.groups * t.output_tiles;
  t.slot_blocks = CeilDiv32(t.slots, kWarps);
  t.slices = std::max(1, kWarps / t.slots);
  LayOut((int)p.out.h * kSide + kernel_h - 1, t.across * kSide + kernel_w - 1, SevenRows, &t.in);
  const int words = t.outputs * t.windows, line = t.in.frame.width + kSlack;
  Images room = t.in;
  room.numel += words + t.outputs;
  Tile(&room, t.outputs + line, 4, multiprocessors);
  t.in.per_block = room.per_block, t.in.tiles = room.tiles;
  t.words_at = (int)RoundUp((int64_t)t.in.per_block * t.in.numel, 4);
  t.biases_at = t.words_at + t.in.per_block * words;
  t.lines_at = (int)RoundUp(t.biases_at + t.outputs * (1 + t.in.per_block), 4);
  const int64_t sums = kThreads * 4 * ((kernel_w + 1) / 2);
  const int64_t nbytes = std::max<int64_t>(t.lines_at + line, sums) * (int64_t)sizeof(float);
  const Launching launch{op, device, stream};
  if (!launch.Fits(nbytes)) return false;
  const int64_t most = std::max(1, 2 * multiprocessors / t.slot_blocks);
  t.workers = (int)CeilDiv(t.in.tiles, std::max<int64_t>(1, CeilDiv(t.in.tiles, most)));
  const int numel = t.outputs * t.in.rows * kernel_w;
  const Scratch partial(ctx, (int64_t)t.workers * (numel + t.outputs) * (int64_t)sizeof(float),
                        stream);
  const auto kernel = kernel_w == 3   ? FilterGradientTensorKernel<3>
                      : kernel_w == 5 ? FilterGradientTensorKernel<5>
                                      : FilterGradientTensorKernel<7>;
  const bool pdl = ComputeMajor(device) >= 9;
  LaunchSmall(op, kernel, (unsigned)(t.workers * t.slot_blocks), 1, kThreads, (size_t)nbytes, pdl,
              stream, t, x, dy, code, partial.floats());
  add(partial.floats(), t.workers, numel, t.outputs);
  return true;
}

}  // namespace cuda
}  // namespace dlsys
