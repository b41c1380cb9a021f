// Matrix-vector products of generation: y (m, n) = activation(norm(x) Wᵀ + bias) + residual for a
// few rows x (m, k), m <= 8, and weights W (n, k) in float32; layer or RMS normalization of the
// rows, bias and residual may be missing. A block holds the rows in shared memory, normalized where
// asked for; a warp, or several that share k, makes an element of each row from a row of W, which
// is read once, 16 bytes a lane and eight loads in flight. The first of them begin before the
// predecessor on the stream has ended, where it does not write W. Row-major, contiguous, y overlaps
// nothing that is read; k is a multiple of 4. Reading W limits it. Sums are float32 in a fixed
// order.
#include "cuda/gemm/epilogue.cuh"
#include "cuda/gemm/gemm.cuh"
#include "cuda/reduce/group.cuh"

namespace dlsys {
namespace cuda {
namespace {

constexpr int64_t kMostRows = 8;
constexpr int64_t kMostShared = 32 << 10;  // floats of x in shared memory
constexpr int kWarps = kThreads / 32;
constexpr int kLoads = 8;  // of 16 bytes that a lane has in flight
constexpr int kBlocksOnEach = 3;

struct Matvec {
  const float *x, *w, *scale, *shift, *bias, *residual;
  float* y;
  int m, n, k;
  int parts, slice;  // warps that share a row of W, and the elements of each
  bool centered, aligned_x, aligned_w, weights_ready;
  float eps;
  int activation;
};

__device__ __forceinline__ float4 LoadFour(const float* p, bool aligned) {
  return aligned ? *(const float4*)p : make_float4(p[0], p[1], p[2], p[3]);
}

// Elements of a row of W on their way to registers: those of a lane between `at` and `end`.
struct Weights {
  float4 quad[kLoads];
  __device__ __forceinline__ void Load(const float* row, int at, int end, bool aligned) {
#pragma unroll
    for (int j = 0; j < kLoads; j++) {
      const int k = at + (j * 32 + (int)threadIdx.x % 32) * 4;
      quad[j] = k < end ? LoadFour(row + k, aligned) : make_float4(0.f, 0.f, 0.f, 0.f);
    }
  }
};

// Normalizes the rows in shared memory, a warp each.
__device__ __forceinline__ void NormalizeRows(const Matvec& p, float* rows) {
  const int lane = threadIdx.x % 32;
  for (int row = threadIdx.x / 32; row < p.m; row += kWarps) {
    float* x = rows + row * p.k;
    float mean = 0.f, squares = 0.f;
    if (p.centered) {
      for (int k = lane; k < p.k; k += 32) mean += x[k];
      mean = GroupReduce<SumMonoid, 32>(mean) / (float)p.k;
    }
    for (int k = lane; k < p.k; k += 32) squares += (x[k] - mean) * (x[k] - mean);
    const float variance = GroupReduce<SumMonoid, 32>(squares) / (float)p.k;
    const float inverse = 1.f / sqrtf(variance + p.eps);
    for (int k = lane; k < p.k; k += 32) x[k] = (x[k] - mean) * inverse * p.scale[k] + p.shift[k];
  }
}

// kRows: m rounded up to a power of 2; rows that do not exist are zeros.
template <int kRows>
__global__ void __launch_bounds__(kThreads, kRows <= 2 ? kBlocksOnEach : 2)
    MatvecKernel(const Matvec p) {
  float* const rows = DynamicShared<float>();
  __shared__ float sums[kWarps][kRows];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int of_block = kWarps / p.parts, begin = warp % p.parts * p.slice;
  const int end = min(begin + p.slice, p.k);
  int64_t column = (int64_t)blockIdx.x * of_block + warp / p.parts;
  Weights weights;
  const auto load = [&](int at) {
    weights.Load(p.w + column * p.k, at, column < p.n ? end : 0, p.aligned_w);
  };
  if (p.weights_ready) load(begin);
  GridDependencySynchronize();
  TriggerProgrammaticLaunch();
  if (!p.weights_ready) load(begin);
  for (int at = threadIdx.x * 4; at < kRows * p.k; at += kThreads * 4)
    *(float4*)(rows + at) =
        at < p.m * p.k ? LoadFour(p.x + at, p.aligned_x) : make_float4(0.f, 0.f, 0.f, 0.f);
  __syncthreads();
  if (p.scale) {
    NormalizeRows(p, rows);
    __syncthreads();
  }
  const int64_t tiles = CeilDiv(p.n, of_block);
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    float acc[kRows] = {};
    const bool finishes = warp % p.parts == 0 && lane < p.m && column < p.n;
    const int64_t to = finishes ? lane * (int64_t)p.n + column : 0;
    const float bias = finishes && p.bias ? p.bias[column] : 0.f;
    const float residual = finishes && p.residual ? p.residual[to] : 0.f;
    for (int at = begin; at < end;) {
#pragma unroll
      for (int j = 0; j < kLoads; j++) {
        const int k = at + (j * 32 + lane) * 4;
        if (k >= end) continue;
        const float4 w = weights.quad[j];
#pragma unroll
        for (int r = 0; r < kRows; r++) {
          const float4 x = *(const float4*)(rows + r * p.k + k);
          acc[r] += x.x * w.x + x.y * w.y + x.z * w.z + x.w * w.w;
        }
      }
      at += kLoads * 128;
      if (at < end) load(at);
    }
    column += (int64_t)gridDim.x * of_block;
    if (tile + gridDim.x < tiles) load(begin);  // of the next tile, while this one is reduced
#pragma unroll
    for (int r = 0; r < kRows; r++) {
      acc[r] = GroupReduce<SumMonoid, 32>(acc[r]);
      if (lane == 0) sums[warp][r] = acc[r];
    }
    p.parts == 1 ? __syncwarp() : __syncthreads();
    if (finishes) {
      float value[1] = {0.f};
      for (int part = 0; part < p.parts; part++) value[0] += sums[warp + part][lane];
      value[0] += bias;
      const float side[1] = {0.f};
      ApplyActivations(p.activation, 0, side, value);
      p.y[to] = value[0] + residual;
    }
    p.parts == 1 ? __syncwarp() : __syncthreads();
  }
}

int64_t RoundedRows(int64_t m) { return m <= 2 ? m : m <= 4 ? 4 : 8; }

bool Fits(const DLArray* x, const DLArray* w) {
  const int64_t m = x->shape[0], k = x->shape[1];
  return m <= kMostRows && k > 0 && k % 4 == 0 && RoundedRows(m) * k <= kMostShared &&
         w->shape[0] <= INT32_MAX;
}

const float* Optional(const char* op, const DLArrayList* list, const DLArray* y, int64_t numel) {
  if (list->count == 0) return nullptr;
  if (list->count != 1) Fail("%s: expected at most one array, got %ld", op, (long)list->count);
  CheckArray(op, list->arrays[0], y->ctx);
  if (Numel(list->arrays[0]) != numel)
    Fail("%s: expected %ld elements, got %s", op, (long)numel, ShapeText(list->arrays[0]).c_str());
  return In(op, list->arrays[0]);
}

// norm: none, or scale and shift (k) of a normalization, with a mean where `centered`. bias: none
// or one (n). residual: none or one (m, n). activation: a code of operators/epilogue.h, or 0.
void RunMatvec(const DLArray* x, const DLArray* w, const DLArrayList* norm, const DLArrayList* bias,
               const DLArrayList* residual, int64_t centered, float eps, int64_t activation,
               DLArray* y, DLStream stream) {
  const char* op = "matvec";
  const Gemm gemm = CheckedGemm(op, x, false, w, true, y);
  if (!Fits(x, w))
    Fail("%s: expected at most %ld rows of a multiple of 4 elements, got %s", op, (long)kMostRows,
         ShapeText(x).c_str());
  if (gemm.m == 0 || gemm.n == 0) return;
  Matvec p = {};
  p.x = gemm.a, p.w = gemm.b, p.y = gemm.c;
  p.m = (int)gemm.m, p.n = (int)gemm.n, p.k = (int)gemm.k;
  if (norm->count) {
    if (norm->count != 2) Fail("%s: expected scale and shift, got %ld", op, (long)norm->count);
    for (int i = 0; i < 2; i++) {
      CheckArray(op, norm->arrays[i], y->ctx);
      if (Numel(norm->arrays[i]) != gemm.k)
        Fail("%s: expected %ld elements, got %s", op, (long)gemm.k,
             ShapeText(norm->arrays[i]).c_str());
    }
    p.scale = In(op, norm->arrays[0]), p.shift = In(op, norm->arrays[1]);
  }
  p.bias = Optional(op, bias, y, gemm.n);
  p.residual = Optional(op, residual, y, gemm.m * gemm.n);
  p.centered = centered != 0, p.eps = eps;
  p.activation = CheckedEpilogue(op, activation, 0, kActivations);
  p.aligned_x = Aligned16(p.x), p.aligned_w = Aligned16(p.w);
  p.parts = gemm.k <= 1024 ? 1 : gemm.k <= 2048 ? 2 : gemm.k <= 4096 ? 4 : kWarps;
  p.slice = (int)CeilDiv(gemm.k, p.parts * 4) * 4;
  p.weights_ready = InputsAreReady(1, 1);
  const int device = y->ctx.device_id;
  const bool pdl = ComputeMajor(device) >= 9;
  const auto launch = [&](auto rows) {
    constexpr int kRows = decltype(rows)::value;
    const int64_t most = (int64_t)Multiprocessors(device) * kBlocksOnEach;
    const int64_t tiles = CeilDiv(gemm.n, kWarps / p.parts);
    LaunchClusters(op, MatvecKernel<kRows>, (unsigned)std::min(tiles, most), 1, kThreads,
                   kRows * gemm.k * sizeof(float), pdl, stream, p);
  };
  switch (RoundedRows(p.m)) {
    case 1:
      return launch(std::integral_constant<int, 1>());
    case 2:
      return launch(std::integral_constant<int, 2>());
    case 4:
      return launch(std::integral_constant<int, 4>());
    default:
      return launch(std::integral_constant<int, 8>());
  }
}

bool MatvecFits(const DLArray* x, const DLArray* w, const DLArrayList*, const DLArrayList*,
                const DLArrayList*, int64_t, float, int64_t, DLArray*) {
  return Fits(x, w);
}

DLSYS_KERNEL(cuda, matvec, RunMatvec);
DLSYS_FITS(cuda, matvec, MatvecFits);

}  // namespace
}  // namespace cuda
}  // namespace dlsys
