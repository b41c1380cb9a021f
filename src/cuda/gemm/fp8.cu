// Operators of products in floats of 8 bits. fp8_rows, fp8_columns and fp8_both round a matrix to
// e4m3 or e5m2 (math/fp8.h), by one scale that makes its largest magnitude the format's largest
// number; fp8_matmul multiplies what they made (hopper/fp8.cu). Such products read both operands
// along K: a copy may be of the transpose, and its rows are filled up to a multiple of 16. Matrices
// are of float32 or 16 bits, contiguous and row-major; what is written overlaps nothing. The
// largest magnitude takes a kernel of its own, whose reads memory bandwidth limits, as it does the
// copies.
#include <algorithm>
#include <cfloat>

#include "cuda/gemm/hopper/fp8.cuh"
#include "cuda/instructions/fp8.cuh"
#include "cuda/instructions/tensor_map.cuh"
#include "cuda/runtime/launch.cuh"

namespace dlsys {
namespace cuda {
namespace {

constexpr int kOfThread = 8;                       // elements of a row
constexpr int kTileRows = 128, kTileColumns = 64;  // of a block
constexpr int kBlocksOfEach = 4;                   // multiprocessor, at most
constexpr int kWordsOfColumn = kTileRows / 4;
static_assert(kTileRows / 4 * (kTileColumns / kOfThread) == kThreads, "four rows a thread");
constexpr uint32_t kInfinity = 0x7F800000u;

int64_t PitchOf(int64_t k) { return CeilDiv(std::max<int64_t>(k, 1), 16) * 16; }

// Elements of a row, zeros behind those that there are.
template <class E>
struct alignas(16) Eight {
  E x[kOfThread];
};
template <class E>
__device__ __forceinline__ Eight<E> LoadEight(const E* x, int64_t valid, bool aligned) {
  Eight<E> v;
  if (aligned && valid >= kOfThread) {
#pragma unroll
    for (int k = 0; k < (int)sizeof(E) / 2; k++) ((int4*)v.x)[k] = ((const int4*)x)[k];
  } else {
#pragma unroll
    for (int k = 0; k < kOfThread; k++) v.x[k] = k < valid ? x[k] : E(0.f);
  }
  return v;
}

// The largest of all threads of a block; NaN is above infinity, and that above all numbers.
__device__ __forceinline__ uint32_t LargestOfBlock(uint32_t most) {
  __shared__ uint32_t of_warps[kThreads / 32];
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2)
    most = max(most, __shfl_xor_sync(~0u, most, distance));
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = most;
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < kThreads / 32; warp++) most = max(most, of_warps[warp]);
  return most;
}

// The bits of the largest magnitude that each block reads.
template <class E>
__global__ void __launch_bounds__(kThreads)
    LargestKernel(const E* x, int64_t numel, bool aligned, uint32_t* largest) {
  constexpr int kAtOnce = 4;
  GridDependencySynchronize();
  uint32_t most = 0;
  for (int64_t i = FirstItem(); i * kOfThread < numel; i += kAtOnce * ItemStep()) {
    Eight<E> v[kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; u++) {
      const int64_t at = (i + u * ItemStep()) * kOfThread;
      v[u] = LoadEight(x + at, numel - at, aligned);
    }
#pragma unroll
    for (int k = 0; k < kAtOnce * kOfThread; k++)
      most = max(most, __float_as_uint((float)v[k / kOfThread].x[k % kOfThread]) & 0x7FFFFFFFu);
  }
  TriggerProgrammaticLaunch();
  most = LargestOfBlock(most);
  if (threadIdx.x == 0) largest[blockIdx.x] = most;
}

// What codes are made of: x times the scale. The unit is what a code of 1 stands for: 1 where all
// elements are 0, and NaN where one is NaN or infinite, as then all codes are.
struct Fp8Scale {
  float scale, unit;
};
template <class F>
__device__ __forceinline__ Fp8Scale ScaleOf(uint32_t largest) {
  if (largest == 0) return {1.f, 1.f};
  const float most = __uint_as_float(largest < kInfinity ? largest : 0x7FC00000u);
  const float scale = F::kLargest / most;
  return {scale > FLT_MAX ? FLT_MAX : scale, most / F::kLargest};
}

// Codes of x (rows, columns), by `count` largest magnitudes, and of its transpose, where wanted.
template <class F, class E>
__global__ void __launch_bounds__(kThreads, kBlocksOfEach)
    QuantizeKernel(const E* x, int64_t rows, int64_t columns, bool aligned, const uint32_t* largest,
                   int count, uint8_t* of_rows, int64_t rows_pitch, uint8_t* of_columns,
                   int64_t columns_pitch, float* unit) {
  __shared__ uint32_t tile[kTileColumns][kWordsOfColumn + 1];
  GridDependencySynchronize();
  uint32_t most = 0;
  for (int k = threadIdx.x; k < count; k += kThreads) most = max(most, largest[k]);
  const Fp8Scale by = ScaleOf<F>(LargestOfBlock(most));
  if (blockIdx.x == 0 && threadIdx.x == 0) *unit = by.unit;
  // Rows or columns that are none have codes all the same, which are zeros.
  const int64_t column_tiles = CeilDiv(max(columns, (int64_t)1), kTileColumns);
  const int64_t tiles = CeilDiv(max(rows, (int64_t)1), kTileRows) * column_tiles;
  const int own_column = threadIdx.x % 8 * kOfThread, own_word = threadIdx.x / 8;
  Eight<E> v[4];  // of four rows
  const auto load = [&](int64_t t) {
    const int64_t row = t / column_tiles * kTileRows + own_word * 4;
    const int64_t column = t % column_tiles * kTileColumns + own_column;
#pragma unroll
    for (int i = 0; i < 4; i++)
      v[i] = LoadEight(x + (row + i) * columns + column, row + i < rows ? columns - column : 0,
                       aligned);
  };
  // What was read last for the largest magnitude may be in the L2 cache yet.
  int64_t t = tiles - 1 - blockIdx.x;
  if (t >= 0) load(t);
  for (; t >= 0; t -= gridDim.x) {
    const int64_t row0 = t / column_tiles * kTileRows, column0 = t % column_tiles * kTileColumns;
    const int64_t column = column0 + own_column;
    uint32_t codes[4][2];
#pragma unroll
    for (int i = 0; i < 4; i++) {
#pragma unroll
      for (int k = 0; k < 2; k++) {
        const auto scaled = [&](int e) { return (float)v[i].x[k * 4 + e] * by.scale; };
        codes[i][k] = hopper::Packed8Bit<F>(scaled(0), scaled(1)) |
                      hopper::Packed8Bit<F>(scaled(2), scaled(3)) << 16;
      }
    }
    if (t >= gridDim.x) load(t - gridDim.x);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int64_t row = row0 + own_word * 4 + i;
      if (of_rows && row < rows && column < rows_pitch)
        *(uint64_t*)(of_rows + row * rows_pitch + column) = codes[i][0] | (uint64_t)codes[i][1]
                                                                              << 32;
    }
    if (!of_columns) continue;
    __syncthreads();  // the tile has been read
#pragma unroll
    for (int k = 0; k < 2; k++) {
      const uint32_t a = __byte_perm(codes[0][k], codes[1][k], 0x5140);
      const uint32_t b = __byte_perm(codes[0][k], codes[1][k], 0x7362);
      const uint32_t c = __byte_perm(codes[2][k], codes[3][k], 0x5140);
      const uint32_t d = __byte_perm(codes[2][k], codes[3][k], 0x7362);
      tile[own_column + k * 4][own_word] = __byte_perm(a, c, 0x5410);
      tile[own_column + k * 4 + 1][own_word] = __byte_perm(a, c, 0x7632);
      tile[own_column + k * 4 + 2][own_word] = __byte_perm(b, d, 0x5410);
      tile[own_column + k * 4 + 3][own_word] = __byte_perm(b, d, 0x7632);
    }
    __syncthreads();
    const int line = threadIdx.x / 4;
#pragma unroll
    for (int k = 0; k < 2; k++) {
      const int word = threadIdx.x % 4 * 8 + k * 4;
      const int64_t to_column = column0 + line, to_row = row0 + word * 4;
      if (to_column < columns && to_row < columns_pitch)
        *(int4*)(of_columns + to_column * columns_pitch + to_row) = {
            (int)tile[line][word], (int)tile[line][word + 1], (int)tile[line][word + 2],
            (int)tile[line][word + 3]};
    }
  }
  TriggerProgrammaticLaunch();
}

// Checks codes (rows, k, filled up to a multiple of 16), which may be none.
uint8_t* Codes(const char* op, const DLArray* codes, int64_t rows, int64_t k) {
  if (!codes) return nullptr;
  if (codes->ndim != 2 || codes->shape[0] != rows || codes->shape[1] != PitchOf(k))
    Fail("%s: expected codes of shape (%ld, %ld), got %s", op, (long)rows, (long)PitchOf(k),
         ShapeText(codes).c_str());
  return const_cast<uint8_t*>(In<uint8_t>(op, codes));
}

void CheckDevice(const char* op, const DLArray* x) {
  const char* error = WgmmaError(x->ctx.device_id);
  if (*error)
    FailWith(DL_UNAVAILABLE, "%s: no products in fp8 here: %s; use bf16, tf32, 3xtf32 or fp32", op,
             error);
}

template <class E>
void Quantize(const char* op, const DLArray* x, int64_t wide, DLArray* of_rows, DLArray* of_columns,
              DLArray* unit, DLStream stream) {
  Enter(op, x, unit);
  CheckDevice(op, x);
  if (x->ndim != 2) Fail("%s: expected a matrix, got shape %s", op, ShapeText(x).c_str());
  if (Numel(unit) != 1) Fail("%s: expected one unit, got %s", op, ShapeText(unit).c_str());
  const int64_t rows = x->shape[0], columns = x->shape[1], numel = rows * columns;
  uint8_t* const row_codes = Codes(op, of_rows, rows, columns);
  uint8_t* const column_codes = Codes(op, of_columns, columns, rows);
  const E* const data = In<E>(op, x);
  const int multiprocessors = Multiprocessors(x->ctx.device_id);
  const unsigned readers = (unsigned)std::clamp<int64_t>(CeilDiv(numel, kThreads * kOfThread), 1,
                                                         kBlocksOfEach * multiprocessors);
  const Scratch largest(x->ctx, readers * (int64_t)sizeof(uint32_t), stream);
  const bool aligned = Aligned16(data);
  LaunchClusters(op, LargestKernel<E>, readers, 1, kThreads, 0, true, stream, data, numel, aligned,
                 (uint32_t*)largest.data());
  const int64_t tiles = CeilDiv(std::max<int64_t>(rows, 1), kTileRows) *
                        CeilDiv(std::max<int64_t>(columns, 1), kTileColumns);
  const unsigned writers = (unsigned)std::min<int64_t>(tiles, kBlocksOfEach * multiprocessors);
  LaunchClusters(op, wide ? QuantizeKernel<e5m2, E> : QuantizeKernel<e4m3, E>, writers, 1, kThreads,
                 0, true, stream, data, rows, columns, aligned && columns % 8 == 0,
                 (const uint32_t*)largest.data(), (int)readers, row_codes, PitchOf(columns),
                 column_codes, PitchOf(rows), Out(op, unit));
}

template <class E>
void QuantizeRows(const DLArray* x, int64_t wide, DLArray* rows, DLArray* unit, DLStream stream) {
  Quantize<E>("fp8_rows", x, wide, rows, nullptr, unit, stream);
}
template <class E>
void QuantizeColumns(const DLArray* x, int64_t wide, DLArray* columns, DLArray* unit,
                     DLStream stream) {
  Quantize<E>("fp8_columns", x, wide, nullptr, columns, unit, stream);
}
template <class E>
void QuantizeBoth(const DLArray* x, int64_t wide, DLArray* rows, DLArray* columns, DLArray* unit,
                  DLStream stream) {
  Quantize<E>("fp8_both", x, wide, rows, columns, unit, stream);
}

// c (m, n) = a (m, k) bᵀ (n, k), of codes and their units; `wide` says which are e5m2.
void Fp8Matmul(const DLArray* a, const DLArray* unit_a, const DLArray* b, const DLArray* unit_b,
               int64_t wide_a, int64_t wide_b, DLArray* c, DLStream stream) {
  const char* op = "fp8_matmul";
  constexpr int64_t kMost = int64_t(1) << 30;
  Enter(op, c, a, unit_a, b, unit_b);
  CheckDevice(op, c);
  const bool matrices = a->ndim == 2 && b->ndim == 2 && c->ndim == 2;
  if (!matrices || a->shape[1] != b->shape[1] || a->shape[1] % 16 || c->shape[0] != a->shape[0] ||
      c->shape[1] != b->shape[0])
    Fail("%s: codes %s and %s do not fit into %s", op, ShapeText(a).c_str(), ShapeText(b).c_str(),
         ShapeText(c).c_str());
  if (std::max({a->shape[0], a->shape[1], b->shape[0]}) > kMost)
    Fail("%s: it takes at most 2^30 rows and columns", op);
  if (Numel(c) == 0) return;
  Output to((float*)c->data);
  to.dtype = c->dtype;
  hopper::RunFp8Gemm(op,
                     {{In<uint8_t>(op, a), In(op, unit_a), wide_a != 0},
                      {In<uint8_t>(op, b), In(op, unit_b), wide_b != 0},
                      to,
                      c->shape[0],
                      c->shape[1],
                      a->shape[1],
                      c->ctx},
                     stream);
}

DLSYS_KERNEL_TYPED(cuda, fp8_rows, QuantizeRows);
DLSYS_KERNEL_TYPED(cuda, fp8_columns, QuantizeColumns);
DLSYS_KERNEL_TYPED(cuda, fp8_both, QuantizeBoth);
DLSYS_KERNEL_ANY(cuda, fp8_matmul, Fp8Matmul);

}  // namespace
}  // namespace cuda
}  // namespace dlsys
