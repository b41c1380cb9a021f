// The epilogue of a product, element by element.
#pragma once
#include "cuda/gemm/gemm.cuh"
#include "math/epilogue.h"

namespace dlsys {
namespace cuda {

// A call, so that a product kernel holds none of these functions' code and registers.
static __device__ __attribute__((noinline)) float Mapped(int activation, int gradient, float side,
                                                         float x) {
#define DLSYS_CASE(number, F) \
  case number:                \
    return fn::F{}(x);
  switch (activation) { DLSYS_ACTIVATIONS(DLSYS_CASE) }
#undef DLSYS_CASE
#define DLSYS_CASE(number, F) \
  case number:                \
    return fn::F{}(side, x);
  switch (gradient) { DLSYS_ACTIVATION_GRADIENTS(DLSYS_CASE) }
#undef DLSYS_CASE
  return x;
}

// The same of several, with what is common in line.
template <int kCount>
__device__ __forceinline__ void End(int activation, int gradient, const float (&side)[kCount],
                                    float (&x)[kCount]) {
  if (activation == 1) {
#pragma unroll
    for (int e = 0; e < kCount; e++) x[e] = fn::Relu{}(x[e]);
  } else if (gradient == 1) {
#pragma unroll
    for (int e = 0; e < kCount; e++) x[e] = fn::ReluGradient{}(side[e], x[e]);
  } else if (activation || gradient) {
#pragma unroll
    for (int e = 0; e < kCount; e++) x[e] = Mapped(activation, gradient, side[e], x[e]);
  }
}

// Elements (row, col) to (row, col + 3) of C on their way from the product to memory.
struct Quad {
  int64_t row, col;
  float x[4], side[4];
};

__device__ __forceinline__ int Valid(const Product& product, const Quad& quad) {
  return quad.row < product.m ? (int)min(product.n - quad.col, (int64_t)4) : 0;
}

// The bias of the columns from `col` on. whole: all that the epilogue reads and C are aligned
// quads.
__device__ __forceinline__ float4 ReadBias(const Product& product, int64_t col, bool whole) {
  const float* bias = product.epilogue.bias;
  float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
  if (!bias || col >= product.n) return v;
  if (whole) return *(const float4*)(bias + col);
  v.x = bias[col];
  if (col + 1 < product.n) v.y = bias[col + 1];
  if (col + 2 < product.n) v.z = bias[col + 2];
  if (col + 3 < product.n) v.w = bias[col + 3];
  return v;
}

// Apart from Write, so that many reads are under way at once.
__device__ __forceinline__ void ReadSide(const Product& product, bool whole, Quad& quad) {
  const float* side = product.epilogue.side;
  const int valid = Valid(product, quad);
  if (!side || valid <= 0) return;
  side += quad.row * product.n + quad.col;
  if (whole) {
    const float4 v = *(const float4*)side;
    quad.side[0] = v.x, quad.side[1] = v.y, quad.side[2] = v.z, quad.side[3] = v.w;
    return;
  }
#pragma unroll
  for (int e = 0; e < 4; e++)
    if (e < valid) quad.side[e] = side[e];
}

__device__ __forceinline__ void Write(const Product& product, bool whole, float4 bias, Quad& quad) {
  const Epilogue& epilogue = product.epilogue;
  const float biases[4] = {bias.x, bias.y, bias.z, bias.w};
  const int valid = Valid(product, quad);
  if (valid <= 0) return;
  if (epilogue.bias) {
#pragma unroll
    for (int e = 0; e < 4; e++) quad.x[e] += biases[e];
  }
  End(epilogue.activation, epilogue.gradient, quad.side, quad.x);
  float* c = product.c + quad.row * product.n + quad.col;
  if (whole) {
    *(float4*)c = make_float4(quad.x[0], quad.x[1], quad.x[2], quad.x[3]);
    return;
  }
#pragma unroll
  for (int e = 0; e < 4; e++)
    if (e < valid) c[e] = quad.x[e];
}

}  // namespace cuda
}  // namespace dlsys
