// Convolution fused with bias, relu and max-pool on tensor cores in tf32; operators/conv_pool.h has
// the contract, conv_pool/conv_pool.cu true float32.
//
// x is in shared memory with its padding, rounded to tf32, the filters are there as fragments. A
// fragment holds eight windows by eight outputs. Its depths are rows of filters, whose elements a
// lane takes one after another: what it has read of a row of x serves all columns of the filters
// and both columns of a window. Sums are float32, in a fixed order. For windows of 2 x 2 under
// filters of 3, 5 or 7 columns. Limited by instructions issued, and with few images by latency.
#include "cuda/conv/conv_pool/tensor.cuh"

namespace dlsys {
namespace cuda {
namespace {

constexpr int kZeros = 16;
constexpr int kNowhere = -1;

// A launch of the convolution.
struct Task {
  Images in;
  int outputs, output_tiles;
  int across, patches;  // of an image
  Divisor of_patches, of_across, of_tiles;
  Divisor of_sets;  // of output tiles that a warp has at once
  bool relu, filters_ready;

  __host__ __device__ int WeightsNumel(int kernel_w) const {
    return in.groups * kernel_w * output_tiles * 64;
  }
};

// ---- kernels ----

// The filters as fragments: (groups, kernel_w, output_tiles, lanes), a lane's two depths each.
template <int kKernelW>
__device__ __forceinline__ void LoadFragments(const Task& t, const float* f, float2* to) {
  const int lane = (int)threadIdx.x % 32, all = t.in.groups * kKernelW * t.output_tiles;
#pragma unroll 4
  for (int k = (int)threadIdx.x / 32; k < all; k += kWarps) {
    const int of_row = k / t.of_tiles, tile = k - of_row * t.output_tiles;
    const int group = of_row / kKernelW, b = of_row - group * kKernelW;
    const int output = tile * kTile + lane / 4, row = group * kTile + lane % 4;
    const float* from = f + (output * t.in.rows + row) * kKernelW + b;
    const bool exists = output < t.outputs;
    const float first = exists && row < t.in.rows ? from[0] : 0.f;
    const float second = exists && row + 4 < t.in.rows ? from[4 * kKernelW] : 0.f;
    to[k * 32 + lane] = make_float2(RoundedToTf32(first), RoundedToTf32(second));
  }
}

// sum[unit][i][tile] += for eight windows a unit and eight outputs a tile: the rows of a fragment
// are the windows' positions (i, 0), then (i, 1). corner: of this lane's windows; rows: where the
// rows of filters lie behind it, kNowhere for those that only fill a group up.
template <int kKernelW, int kUnits, int kTilesN>
__device__ __forceinline__ void Multiply(const Images& in, const float* const (&corner)[kUnits],
                                         const float* zeros, const int* rows, const float2* weights,
                                         int pitch, float (&sum)[kUnits][kSide][kTilesN][4]) {
  constexpr int kRow = kKernelW + 1;
  int group = 0;
  do {
    float x[kUnits][kSide][2][kRow];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int at = rows[group * kTile + 4 * half], below = at == kNowhere ? 0 : in.frame.pitch;
#pragma unroll
      for (int u = 0; u < kUnits; u++) {
        const float* from = at == kNowhere ? zeros : corner[u] + at;
        ReadRow<kSide>(from, x[u][0][half]);
        ReadRow<kSide>(from + below, x[u][1][half]);
      }
    }
#pragma unroll
    for (int b = 0; b < kKernelW; b++, weights += pitch)
#pragma unroll
      for (int n = 0; n < kTilesN; n++) {
        const float2 pair = weights[n * 32];
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
  } while (++group < in.groups);
}

template <int kKernelW, int kUnits, int kTilesN>
__global__ void __launch_bounds__(kThreads)
    ConvPoolTensorKernel(const __grid_constant__ Task t, const float* x, const float* f,
                         const float* bias, float* y, uint8_t* code) {
  float* const zeros = DynamicShared<float>();
  float *biases = zeros + kZeros, *weights = biases + t.output_tiles * kTile;
  int* const rows = (int*)(weights + t.WeightsNumel(kKernelW));
  float* const input = (float*)(rows + t.in.groups * kTile);
  const int lane = (int)threadIdx.x % 32, sets = (int)t.of_sets.value;
  if (!t.filters_ready) GridDependencySynchronize();
  if ((int)threadIdx.x < kZeros) zeros[threadIdx.x] = 0.f;
  for (int k = (int)threadIdx.x; k < t.in.groups * kTile; k += kThreads)
    rows[k] = k < t.in.rows ? t.in.RowAt(k) : kNowhere;
  Clear(input, t.in.per_block * t.in.numel);
  LoadFragments<kKernelW>(t, f, (float2*)weights);
  if (t.filters_ready) GridDependencySynchronize();
  TriggerProgrammaticLaunch();
  for (int k = (int)threadIdx.x; k < t.output_tiles * kTile; k += kThreads)
    biases[k] = bias && k < t.outputs ? bias[k] : 0.f;
  const int64_t of_tile = (int64_t)t.in.per_block * t.outputs * t.patches;
  y += of_tile * blockIdx.x, code += of_tile * blockIdx.x;
  for (int tile = (int)blockIdx.x; tile < t.in.tiles; tile += (int)gridDim.x) {
    const int64_t first = (int64_t)tile * t.in.per_block;
    const int count = (int)min((int64_t)t.in.per_block, t.in.images - first);
    const int patches = count * t.patches, items = CeilDiv32(patches, kUnits * kTile) * sets;
    __syncthreads();  // the previous tile has been read
    LoadPlanes<8, true>(x + first * t.in.channels * t.in.plane.h * t.in.plane.w,
                        count * t.in.channels, t.in.plane, t.in.frame, input);
    __syncthreads();
    for (int item = (int)threadIdx.x / 32; item < items; item += kWarps) {
      const int unit = item / t.of_sets, first_tile = (item - unit * sets) * kTilesN;
      const int output = first_tile * kTile + lane % 4 * 2;  // and the next
      const float* corner[kUnits];
      int at[kUnits];  // in the tile's y and codes
      bool exists[kUnits];
#pragma unroll
      for (int u = 0; u < kUnits; u++) {
        const int k = (unit * kUnits + u) * kTile + lane / 4, own = min(k, patches - 1);
        const int image = own / t.of_patches, patch = own - image * t.patches;
        const int i = patch / t.of_across, j = patch - i * t.across;
        corner[u] = input + image * t.in.numel + (i * t.in.frame.pitch + j) * kSide;
        at[u] = (image * t.outputs + output) * t.patches + patch;
        exists[u] = k < patches;
      }
      float sum[kUnits][kSide][kTilesN][4];
#pragma unroll
      for (int n = 0; n < kTilesN; n++) {
        const float2 of = *(const float2*)(biases + output + n * kTile);
#pragma unroll
        for (int k = 0; k < kUnits * kSide * 4; k++)
          sum[k / 4 / kSide][k / 4 % kSide][n][k % 4] = k % 2 ? of.y : of.x;
      }
      Multiply<kKernelW, kUnits, kTilesN>(t.in, corner, zeros, rows + lane % 4,
                                          (const float2*)weights + first_tile * 32 + lane,
                                          t.output_tiles * 32, sum);
#pragma unroll
      for (int u = 0; u < kUnits; u++)
#pragma unroll
        for (int n = 0; n < kTilesN; n++)
#pragma unroll
          for (int e = 0; e < 2; e++) {
            if (!exists[u] || output + n * kTile + e >= t.outputs) continue;
            const float values[4] = {sum[u][0][n][e], sum[u][0][n][e + 2], sum[u][1][n][e],
                                     sum[u][1][n][e + 2]};
            const int own = at[u] + (n * kTile + e) * t.patches;
            Pool(values, t.relu, y + own, code + own);
          }
    }
    y += of_tile * gridDim.x, code += of_tile * gridDim.x;
  }
}

// ---- launchers ----

bool IsServed(const ConvPool& p, int device) {
  const int64_t width = p.conv.kernel.w;
  return OnTensorCores(p, device) && (width == 3 || width == 5 || width == 7);
}

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

}  // namespace

bool ConvPoolTensor(const char* op, const ConvPool& p, const float* x, const float* f,
                    const float* bias, bool relu, float* y, uint8_t* code, int device,
                    DLStream stream) {
  if (!IsServed(p, device)) return false;
  const int kernel_w = (int)p.conv.kernel.w;
  Task t{};
  t.in = Images::Of(x, p.conv);
  t.relu = relu;
  t.filters_ready = InputsAreReady(1, 1);
  t.outputs = (int)p.conv.o, t.output_tiles = CeilDiv32(t.outputs, kTile);
  t.across = (int)p.out.w, t.patches = (int)Size(p.out);
  t.of_patches = Divisor(t.patches), t.of_across = Divisor(t.across);
  t.of_tiles = Divisor(t.output_tiles);
  t.in.LayOut(p.out.h * kSide + p.conv.kernel.h - 1, p.out.w * kSide + kernel_w - 1,
              p.conv.kernel.h, FourRows);
  const int64_t beside =
      kZeros + t.output_tiles * kTile + t.WeightsNumel(kernel_w) + t.in.groups * kTile;
  t.in.Divide((kMostFloats - beside) / t.in.numel, device);
  const int64_t nbytes =
      (beside + RoundUp((int64_t)t.in.per_block * t.in.numel, 4)) * (int64_t)sizeof(float);
  const TensorLaunch launch{op, device, stream};
  if (!launch.Fits(nbytes)) return false;
  WithTile(kernel_w, t, [&](auto width, auto units, auto tiles) {
    const auto kernel = ConvPoolTensorKernel<width(), units(), tiles()>;
    t.of_sets = Divisor(CeilDiv32(t.output_tiles, tiles()));
    launch(kernel, t.in.tiles, (size_t)nbytes, t, x, f, bias, y, code);
  });
  return true;
}

}  // namespace cuda
}  // namespace dlsys
