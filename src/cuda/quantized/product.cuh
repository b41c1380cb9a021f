// What the kernels of quantized products share: their operands, and what follows a sum, which is
// exact in int32. It is scaled in float32, rounded to a byte within bounds, and, where a residual
// is added, rounded again, by the same functions in every kernel, so that all give the same bits.
#pragma once
#include "cuda/quantized/rounding.cuh"
#include "cuda/runtime/context.cuh"
#include "cuda/runtime/divisor.cuh"
#include "cuda/runtime/launch.cuh"

namespace dlsys {
namespace cuda {

constexpr int kPanel = 16;    // output channels of a panel of packed weights
constexpr int kQuad = 4;      // inputs of a word
constexpr int kMostPool = 2;  // positions along a side of a window that is pooled

// A sum behind a product: the quantized result times scale_a, residual times scale_b, and offset.
struct Residual {
  const uint8_t* bytes;  // null: none
  float scale_a, scale_b, offset, low;
};

struct Product {
  const uint8_t *x, *w;
  const float* images;  // instead of x, (N, C, H, W), in units of `unit`, and 0 at `origin`
  const float* unit;
  const uint8_t* origin;
  const int32_t* bias;
  const float* multiplier;
  uint8_t* bytes;  // of the result, or floats
  float* floats;
  int rows, cols, depth, quads, panels;  // quads and panels are those of the weights
  int in_h, in_w, channels, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
  int zero, low, high;
  unsigned pad;             // what stands for 0 in x, four times
  int pool, splits, slice;  // slice: steps of K of a block
  Residual residual;
  bool aligned_out, weights_ready;
  Divisor by_channels, by_window_w, by_positions, by_width, by_col_tiles, by_pool, by_splits;

  // True where the sums pass through shared memory.
  __device__ __forceinline__ bool IsShared() const { return splits > 1 || pool > 1; }
};

// Of a column: what is added to a sum, and what that is multiplied by.
struct Column {
  int32_t bias;
  float multiplier;

  __device__ __forceinline__ float Scaled(int32_t sum) const {
    return (float)(sum + bias) * multiplier;
  }
};

// Begins to copy a column to shared memory, or writes zeros.
__device__ __forceinline__ void CopyColumn(const Product& p, int col, Column* to) {
  const bool exists = col < p.cols;
  CopyAsync4((float*)&to->bias, (const float*)p.bias + (exists ? col : 0), exists);
  CopyAsync4(&to->multiplier, p.multiplier + (exists ? col : 0), exists);
}

__device__ __forceinline__ int Requantized(const Product& p, const Column& column, int32_t sum) {
  const float low = (float)(p.low - p.zero), high = (float)(p.high - p.zero);
  return (int)rintf(fminf(fmaxf(column.Scaled(sum), low), high)) + p.zero;
}

// A quantized result with the byte that is added to it.
__device__ __forceinline__ int WithResidual(const Product& p, int byte, int added) {
  const Residual& r = p.residual;
  return AddedBytes(byte, added, r.scale_a, r.scale_b, r.offset, r.low, 255.f);
}

// Writes up to four neighbors of a row of the result, with what follows the product.
__device__ __forceinline__ void StoreFour(const Product& p, int64_t to, int col,
                                          const Column* columns, const int32_t (&sums)[4]) {
  const Residual& r = p.residual;
  const bool in_fours = p.cols % 4 == 0 && !p.floats;
  const uint32_t added = r.bytes && in_fours ? *(const uint32_t*)(r.bytes + to) : 0;
  uint32_t word = 0;
#pragma unroll
  for (int e = 0; e < 4; e++) {
    if (col + e >= p.cols) break;
    if (p.floats) {
      p.floats[to + e] = columns[e].Scaled(sums[e]);
      continue;
    }
    int byte = Requantized(p, columns[e], sums[e]);
    if (r.bytes) {
      const int other = in_fours ? added >> 8 * e & 255 : r.bytes[to + e];
      byte = WithResidual(p, byte, other);
    }
    word |= (uint32_t)byte << 8 * e;
    if (!in_fours) p.bytes[to + e] = (uint8_t)byte;
  }
  if (in_fours) *(uint32_t*)(p.bytes + to) = word;
}

// An element of the result behind the quantized one or the float that a product makes.
__device__ __forceinline__ void StoreOne(const Product& p, int64_t to, const Column& column,
                                         int32_t sum) {
  if (p.floats) {
    p.floats[to] = column.Scaled(sum);
    return;
  }
  int byte = Requantized(p, column, sum);
  if (p.residual.bytes) byte = WithResidual(p, byte, p.residual.bytes[to]);
  p.bytes[to] = (uint8_t)byte;
}

}  // namespace cuda
}  // namespace dlsys
