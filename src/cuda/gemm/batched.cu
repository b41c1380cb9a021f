// Batched GEMM in true float32, at another precision by a rung that is named, or of floats of 16
// bits: C[p] (m, n) = op(A[p]) (m, k) op(B[p]) (k, n), where the axes before the last two broadcast
// against each other. Arrays are contiguous and row-major; C overlaps neither input.
//
// One launch computes 64 x 64 tiles of all batches over K panels in shared memory, 4 x 4
// accumulators a thread, limited by FFMA issue. Every element sums in the order of k. Large
// matrices go one by one to the tiled kernels of kernel.cuh, and all by a rung that is named. Of 16
// bits one launch of hopper/kernel.cuh computes all, where it can; else this one, in float32.
#include <algorithm>

#include "cuda/gemm/gemm.cuh"
#include "cuda/pointwise/loop.cuh"
#include "cuda/runtime/launch.cuh"

namespace dlsys {
namespace cuda {
namespace {

constexpr int kTileMN = 64;
constexpr int kTileK = 16;
constexpr int kPitch = kTileMN + 4;  // quads stay aligned, columns fall in different banks
constexpr int kLoads = kTileMN * kTileK / kThreads;  // per thread and panel
constexpr int64_t kLargeMnk = int64_t(1) << 27;

// ---- kernels ----

// op(A) or op(B): element (i, j) is at i * row + j * col; one of the strides is 1.
struct Matrix {
  const float* data;
  int64_t row, col;
};

struct Batch {
  Matrix a, b;  // of batch 0
  float* c;
  int64_t m, n, k;
  int64_t row_tiles, col_tiles, tiles;
  Loop loop;  // over batches, with the strides of a and b
};

// Loads panel[k][mn] from global memory with strides mn_stride and k_stride; outside is 0. Adjacent
// threads read along the stride of 1.
__device__ __forceinline__ void LoadPanel(float (&panel)[kTileK][kPitch], const float* from,
                                          int64_t mn_stride, int64_t k_stride, int64_t extent,
                                          int64_t k_left) {
#pragma unroll
  for (int q = 0; q < kLoads; q++) {
    const int item = q * kThreads + (int)threadIdx.x;
    const int w = k_stride == 1 ? item / kTileK : item % kTileMN;
    const int d = k_stride == 1 ? item % kTileK : item / kTileMN;
    panel[d][w] = w < extent && d < k_left ? from[w * mn_stride + d * k_stride] : 0.f;
  }
}

__global__ void __launch_bounds__(kThreads) BatchedKernel(Batch batch) {
  __shared__ __align__(16) float panel_a[kTileK][kPitch];
  __shared__ __align__(16) float panel_b[kTileK][kPitch];
  const int row = (int)threadIdx.x / 16 * 4, col = (int)threadIdx.x % 16 * 4;
  // Loop bounds are uniform in the block, as __syncthreads requires.
  for (int64_t tile = blockIdx.x; tile < batch.tiles; tile += gridDim.x) {
    const int64_t tile_row = tile / batch.col_tiles;
    const int64_t col0 = (tile - tile_row * batch.col_tiles) * kTileMN;
    const int64_t p = tile_row / batch.row_tiles;
    const int64_t row0 = (tile_row - p * batch.row_tiles) * kTileMN;
    const Offsets at = Locate(batch.loop, p);
    const float* a = batch.a.data + at.x + row0 * batch.a.row;
    const float* b = batch.b.data + at.y + col0 * batch.b.col;
    float sums[4][4] = {};
    for (int64_t k = 0; k < batch.k; k += kTileK) {
      LoadPanel(panel_a, a + k * batch.a.col, batch.a.row, batch.a.col, batch.m - row0,
                batch.k - k);
      LoadPanel(panel_b, b + k * batch.b.row, batch.b.col, batch.b.row, batch.n - col0,
                batch.k - k);
      __syncthreads();
#pragma unroll
      for (int d = 0; d < kTileK; d++) {
        const float4 x = *(const float4*)&panel_a[d][row];
        const float4 y = *(const float4*)&panel_b[d][col];
        const float frag_a[4] = {x.x, x.y, x.z, x.w};
        const float frag_b[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
#pragma unroll
          for (int j = 0; j < 4; j++) sums[i][j] = fmaf(frag_a[i], frag_b[j], sums[i][j]);
        }
      }
      __syncthreads();  // before the panels are overwritten
    }
    float* c = batch.c + p * batch.m * batch.n;
#pragma unroll
    for (int i = 0; i < 4; i++) {
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int64_t r = row0 + row + i, s = col0 + col + j;
        if (r < batch.m && s < batch.n) c[r * batch.n + s] = sums[i][j];
      }
    }
  }
}

// ---- launchers ----

// Extent of op(A) along the last two axes.
int64_t Extent(const DLArray* a, bool transposed, int axis) {
  return a->shape[a->ndim - 2 + (transposed ? 1 - axis : axis)];
}

Matrix Operand(const float* data, const DLArray* stored, bool transposed) {
  const int64_t cols = stored->shape[stored->ndim - 1];
  return transposed ? Matrix{data, 1, cols} : Matrix{data, cols, 1};
}

// Batch strides of an operand along C's leading axes; false when they do not broadcast.
bool BatchStrides(const DLArray* a, const DLArray* c, int64_t* strides) {
  if (a->ndim > c->ndim) return false;
  int64_t stride = a->shape[a->ndim - 2] * a->shape[a->ndim - 1];
  for (int k = c->ndim - 3; k >= 0; k--) {
    const int axis = k - (c->ndim - a->ndim);
    const int64_t size = axis < 0 ? 1 : a->shape[axis];
    if (size != 1 && size != c->shape[k]) return false;
    strides[k] = size == 1 ? 0 : stride;
    stride *= size;
  }
  return true;
}

Loop CheckedLoop(const DLArray* a, bool trans_a, const DLArray* b, bool trans_b, const DLArray* c) {
  Loop loop;
  bool fits = a->ndim >= 2 && b->ndim >= 2 && c->ndim >= 2;
  fits = fits && BatchStrides(a, c, loop.x) && BatchStrides(b, c, loop.y) &&
         Extent(a, trans_a, 1) == Extent(b, trans_b, 0) &&
         Extent(c, false, 0) == Extent(a, trans_a, 0) &&
         Extent(c, false, 1) == Extent(b, trans_b, 1);
  if (!fits)
    Fail("batched_matmul: shapes do not fit: %s%s and %s%s into %s", ShapeText(a).c_str(),
         trans_a ? " transposed" : "", ShapeText(b).c_str(), trans_b ? " transposed" : "",
         ShapeText(c).c_str());
  loop.ndim = c->ndim - 2;
  for (int k = 0; k < loop.ndim; k++) loop.shape[k] = c->shape[k];
  return Fold(loop);
}

template <class F>
void ForEachGemm(const Batch& batch, int64_t count, bool trans_a, bool trans_b, DLContext ctx,
                 F&& run) {
  for (int64_t p = 0; p < count; p++) {
    const Offsets at = Locate(batch.loop, p);
    run(Gemm{batch.a.data + at.x, batch.b.data + at.y, batch.c + p * batch.m * batch.n, batch.m,
             batch.n, batch.k, trans_a, trans_b, ctx});
  }
}

void BatchedMatmul(const DLArray* a, int64_t trans_a, const DLArray* b, int64_t trans_b,
                   int64_t algorithm, int64_t precision, DLArray* c, DLStream stream) {
  const char* op = "batched_matmul";
  Enter(op, c, a, b);
  const bool flip_a = trans_a != 0, flip_b = trans_b != 0;
  const Loop loop = CheckedLoop(a, flip_a, b, flip_b, c);
  Batch batch{Operand(In(op, a), a, flip_a),
              Operand(In(op, b), b, flip_b),
              Out(op, c),
              Extent(c, false, 0),
              Extent(c, false, 1),
              Extent(a, flip_a, 1),
              0,
              0,
              0,
              loop};
  if (Numel(c) == 0) return;
  const int64_t count = Numel(c) / (batch.m * batch.n);
  if (algorithm != 0)
    return ForEachGemm(batch, count, flip_a, flip_b, c->ctx, [&](Gemm gemm) {
      gemm.precision = CheckedPrecision(op, precision);
      RunGemm(op, gemm, stream, algorithm);
    });
  if (batch.m * batch.n >= kLargeMnk / (batch.k ? batch.k : 1))
    return ForEachGemm(batch, count, flip_a, flip_b, c->ctx,
                       [&](const Gemm& gemm) { RunOwnGemm(op, gemm, stream); });
  batch.row_tiles = CeilDiv(batch.m, kTileMN);
  batch.col_tiles = CeilDiv(batch.n, kTileMN);
  batch.tiles = count * batch.row_tiles * batch.col_tiles;
  Launch(op, BatchedKernel, Blocks(batch.tiles, 1), kThreads, 0, stream, batch);
}

}  // namespace

// cuBLAS, where it may be used: from work on that outlasts what its launch costs beside ours.
static bool UsesCublas(const BatchedGemm& batch) {
  constexpr double kLeastFlop = 2e8;
  const Gemm& p = batch.first;
  const double flop = 2. * (double)batch.count * p.m * p.n * p.k;
  return flop >= kLeastFlop && !OwnGemmIsForced() && !*CublasError();
}

void RunBatchedGemm(const char* op, const BatchedGemm& batched, DLStream stream) {
  const Gemm& p = batched.first;
  if (!batched.count || !p.m || !p.n) return;
  if (UsesCublas(batched)) return RunCublasBatchedGemm(op, batched, stream);
  const int64_t row_tiles = CeilDiv(p.m, kTileMN), col_tiles = CeilDiv(p.n, kTileMN);
  const int64_t tiles = batched.count * row_tiles * col_tiles;
  const int64_t of_a = batched.shares_a ? 0 : p.m * p.k;
  // Those that fill the GPU alone, and those whose sums are worth splitting, go one by one.
  const bool few = tiles < 2 * Multiprocessors(p.ctx.device_id) && p.k > 64 * kTileK;
  if (few || p.m * p.n >= kLargeMnk / std::max<int64_t>(p.k, 1)) {
    for (int64_t at = 0; at < batched.count; at++) {
      Gemm gemm = p;
      gemm.a += at * of_a, gemm.b += at * p.n * p.k, gemm.c += at * p.m * p.n;
      RunGemm(op, gemm, stream);
    }
    return;
  }
  Loop loop{};
  loop.Append(batched.count, of_a, p.n * p.k);
  const Matrix a = p.trans_a ? Matrix{p.a, 1, p.m} : Matrix{p.a, p.k, 1};
  const Matrix b = p.trans_b ? Matrix{p.b, 1, p.k} : Matrix{p.b, p.n, 1};
  const Batch batch{a, b, p.c, p.m, p.n, p.k, row_tiles, col_tiles, tiles, loop};
  Launch(op, BatchedKernel, Blocks(tiles, 1), kThreads, 0, stream, batch);
}

namespace {

void BatchedMatmulInFloat32(const DLArray* a, int64_t trans_a, const DLArray* b, int64_t trans_b,
                            DLArray* c, DLStream stream) {
  const char* op = "batched_matmul";
  const auto nbytes = [](const DLArray* x) { return Numel(x) * (int64_t)sizeof(float); };
  const Scratch of_a(c->ctx, nbytes(a), stream), of_b(c->ctx, nbytes(b), stream);
  const Scratch of_c(c->ctx, nbytes(c), stream);
  const auto in_floats = [](const DLArray* x, const Scratch& scratch) {
    DLArray wide = *x;
    wide.data = scratch.data(), wide.dtype = DL_FLOAT32;
    return wide;
  };
  const DLArray wide_a = in_floats(a, of_a), wide_b = in_floats(b, of_b);
  DLArray wide_c = in_floats(c, of_c);
  Widen(op, a->dtype, a->data, of_a.floats(), Numel(a), stream);
  Widen(op, b->dtype, b->data, of_b.floats(), Numel(b), stream);
  BatchedMatmul(&wide_a, trans_a, &wide_b, trans_b, 0, 0, &wide_c, stream);
  Narrow(op, c->dtype, of_c.floats(), c->data, Numel(c), stream);
}

template <class T>
void NarrowBatchedMatmul(const DLArray* a, int64_t trans_a, const DLArray* b, int64_t trans_b,
                         int64_t algorithm, int64_t precision, DLArray* c, DLStream stream) {
  const char* op = "batched_matmul";
  Enter(op, c, a, b);
  const bool flip_a = trans_a != 0, flip_b = trans_b != 0;
  const Loop loop = CheckedLoop(a, flip_a, b, flip_b, c);
  const T *from_a = In<T>(op, a), *from_b = In<T>(op, b);
  T* const to = Out<T>(op, c);
  Gemm gemm{(const float*)from_a,
            (const float*)from_b,
            (float*)to,
            Extent(c, false, 0),
            Extent(c, false, 1),
            Extent(a, flip_a, 1),
            flip_a,
            flip_b,
            c->ctx};
  gemm.dtype = kDtype<T>, gemm.precision = CheckedPrecision(op, precision);
  if (Numel(c) == 0) return;
  const int64_t count = Numel(c) / (gemm.m * gemm.n);
  const bool even = Numel(a) == count * gemm.m * gemm.k && Numel(b) == count * gemm.k * gemm.n;
  if (algorithm == 0 && even && RunBatchOnHopper(op, gemm, count, stream)) return;
  if (algorithm == 0) return BatchedMatmulInFloat32(a, trans_a, b, trans_b, c, stream);
  for (int64_t p = 0; p < count; p++) {
    const Offsets at = Locate(loop, p);
    gemm.a = (const float*)(from_a + at.x), gemm.b = (const float*)(from_b + at.y);
    gemm.c = (float*)(to + p * gemm.m * gemm.n);
    RunGemm(op, gemm, stream, algorithm);
  }
}

DLSYS_KERNEL(cuda, batched_matmul, BatchedMatmul);
DLSYS_KERNEL_OF(cuda, batched_matmul, "batched_matmul", DL_BFLOAT16, NarrowBatchedMatmul<bfloat16>);
DLSYS_KERNEL_OF(cuda, batched_matmul, "batched_matmul", DL_FLOAT16, NarrowBatchedMatmul<float16>);
DLSYS_ALGORITHMS(cuda, batched_matmul, GemmAlgorithms);

}  // namespace
}  // namespace cuda
}  // namespace dlsys
