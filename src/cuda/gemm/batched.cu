// Products of many matrices in true float32: C[p] (m, n) = op(A[p]) (m, k) op(B[p]) (k, n), where
// the axes before the last two broadcast against each other.
//
// Arrays are contiguous and row-major; C overlaps neither A nor B. A block computes tiles of 64 x
// 64 of any of the products, over panels of A and B in shared memory; a thread keeps 4 x 4 of the
// tile in registers. Every element adds its products in the order of k. Large matrices go to the
// kernel of matmul.cu one by one.
#include "cuda/gemm/gemm.cuh"
#include "cuda/pointwise/loop.cuh"
#include "cuda/runtime/launch.cuh"

namespace dlsys {
namespace cuda {
namespace {

constexpr int kTile = 64;
constexpr int kDepth = 16;
constexpr int kPitch = kTile + 4;  // keeps quads aligned and spreads columns over the banks
constexpr int kLoads = kTile * kDepth / kThreads;  // of a panel, by a thread
constexpr int64_t kLargeProducts = int64_t(1) << 27;

// ---- kernels ----

// A matrix as it is used: element (i, j) lies at i * row + j * col; one of the two is 1.
struct Matrix {
  const float* data;
  int64_t row, col;
};

struct Batch {
  Matrix a, b;  // of the first product
  float* c;
  int64_t m, n, k;
  int64_t row_tiles, col_tiles, jobs;
  Loop loop;  // over the products, with the strides of a and b
};

// Panel[depth][width] from element (first, depth) on, where width runs along `wide` steps and depth
// along `deep` steps; what lies outside is 0. Neighbouring threads read along the step of 1.
__device__ __forceinline__ void LoadPanel(float (&panel)[kDepth][kPitch], const float* from,
                                          int64_t wide, int64_t deep, int64_t width,
                                          int64_t depth) {
#pragma unroll
  for (int q = 0; q < kLoads; q++) {
    const int item = q * kThreads + (int)threadIdx.x;
    const int w = deep == 1 ? item / kDepth : item % kTile;
    const int d = deep == 1 ? item % kDepth : item / kTile;
    panel[d][w] = w < width && d < depth ? from[w * wide + d * deep] : 0.f;
  }
}

__global__ void __launch_bounds__(kThreads) BatchedKernel(Batch batch) {
  __shared__ __align__(16) float panel_a[kDepth][kPitch];
  __shared__ __align__(16) float panel_b[kDepth][kPitch];
  const int row = (int)threadIdx.x / 16 * 4, col = (int)threadIdx.x % 16 * 4;
  // The bounds are the same for the whole block, as its barriers need.
  for (int64_t job = blockIdx.x; job < batch.jobs; job += gridDim.x) {
    const int64_t line = job / batch.col_tiles;
    const int64_t col0 = (job - line * batch.col_tiles) * kTile;
    const int64_t p = line / batch.row_tiles;
    const int64_t row0 = (line - p * batch.row_tiles) * kTile;
    const Offsets at = Locate(batch.loop, p);
    const float* a = batch.a.data + at.x + row0 * batch.a.row;
    const float* b = batch.b.data + at.y + col0 * batch.b.col;
    float sums[4][4] = {};
    for (int64_t k = 0; k < batch.k; k += kDepth) {
      LoadPanel(panel_a, a + k * batch.a.col, batch.a.row, batch.a.col, batch.m - row0,
                batch.k - k);
      LoadPanel(panel_b, b + k * batch.b.row, batch.b.col, batch.b.row, batch.n - col0,
                batch.k - k);
      __syncthreads();
#pragma unroll
      for (int d = 0; d < kDepth; d++) {
        const float4 x = *(const float4*)&panel_a[d][row];
        const float4 y = *(const float4*)&panel_b[d][col];
        const float left[4] = {x.x, x.y, x.z, x.w};
        const float right[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
#pragma unroll
          for (int j = 0; j < 4; j++) sums[i][j] = fmaf(left[i], right[j], sums[i][j]);
        }
      }
      __syncthreads();  // before the panels are filled again
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

// Extent `axis` of the matrices at the end of an array's shape, as they are used.
int64_t Extent(const DLArray* a, bool transposed, int axis) {
  return a->shape[a->ndim - 2 + (transposed ? 1 - axis : axis)];
}

Matrix Used(const float* data, const DLArray* stored, bool transposed) {
  const int64_t cols = stored->shape[stored->ndim - 1];
  return transposed ? Matrix{data, 1, cols} : Matrix{data, cols, 1};
}

// The strides of an array's products along the leading axes of C; false when they do not broadcast.
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

void OneByOne(const char* op, const Batch& batch, int64_t count, bool trans_a, bool trans_b,
              DLContext ctx, DLStream stream) {
  for (int64_t p = 0; p < count; p++) {
    const Offsets at = Locate(batch.loop, p);
    MultiplyOwn(op,
                Product{batch.a.data + at.x, batch.b.data + at.y, batch.c + p * batch.m * batch.n,
                        batch.m, batch.n, batch.k, trans_a, trans_b, ctx},
                stream);
  }
}

void BatchedMatmul(const DLArray* a, int64_t trans_a, const DLArray* b, int64_t trans_b, DLArray* c,
                   DLStream stream) {
  const char* op = "batched_matmul";
  Enter(op, c, a, b);
  const bool flip_a = trans_a != 0, flip_b = trans_b != 0;
  const Loop loop = CheckedLoop(a, flip_a, b, flip_b, c);
  Batch batch{Used(In(op, a), a, flip_a),
              Used(In(op, b), b, flip_b),
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
  if (batch.m * batch.n >= kLargeProducts / (batch.k ? batch.k : 1))
    return OneByOne(op, batch, count, flip_a, flip_b, c->ctx, stream);
  batch.row_tiles = CeilDiv(batch.m, kTile);
  batch.col_tiles = CeilDiv(batch.n, kTile);
  batch.jobs = count * batch.row_tiles * batch.col_tiles;
  Launch(op, BatchedKernel, Blocks(batch.jobs, 1), kThreads, 0, stream, batch);
}

DLSYS_KERNEL(cuda, batched_matmul, BatchedMatmul);

}  // namespace
}  // namespace cuda
}  // namespace dlsys
