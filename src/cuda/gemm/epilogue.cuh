// The epilogue of the tiled GEMM: bias, then an activation, or what is made with a side, applied to
// quads (four consecutive elements of a row of C) on their way from the accumulators to global
// memory. C and `side` are row-major (m, n) and contiguous; a quad is one access of 16 bytes where
// n and the addresses allow, and of single elements at the edge. Codes are switched over at run
// time, so that one kernel serves all activations. It reads `side` and writes C once, which hides
// behind the products unless K is short.
#pragma once
#include "cuda/gemm/gemm.cuh"
#include "operators/epilogue.h"

namespace dlsys {
namespace cuda {

// Not inlined, so that GEMM kernels hold none of these functions' code and registers.
static __device__ __attribute__((noinline)) float ApplyActivation(int activation, int gradient,
                                                                  float side, float x) {
#define DLSYS_CASE(code, F) \
  case code:                \
    return fn::F{}(x);
  switch (activation) { DLSYS_ACTIVATIONS(DLSYS_CASE) }
#undef DLSYS_CASE
#define DLSYS_CASE(code, F) \
  case code:                \
    return fn::F{}(side, x);
  switch (gradient) { DLSYS_ACTIVATION_GRADIENTS(DLSYS_CASE) }
#undef DLSYS_CASE
  return x;
}

// The same for kCount elements; relu and its gradient are inlined.
template <int kCount>
__device__ __forceinline__ void ApplyActivations(int activation, int gradient,
                                                 const float (&side)[kCount], float (&x)[kCount]) {
  if (activation == 1) {
#pragma unroll
    for (int e = 0; e < kCount; e++) x[e] = fn::Relu{}(x[e]);
  } else if (gradient == 1) {
#pragma unroll
    for (int e = 0; e < kCount; e++) x[e] = fn::ReluGradient{}(side[e], x[e]);
  } else if (activation || gradient) {
#pragma unroll
    for (int e = 0; e < kCount; e++) x[e] = ApplyActivation(activation, gradient, side[e], x[e]);
  }
}

// True where C, bias and side allow 16-byte access.
inline bool AlignedOut(const Gemm& p) {
  const Epilogue& e = p.epilogue;
  return p.n % 4 == 0 && Aligned16(p.c) && Aligned16(e.bias) && Aligned16(e.side);
}

// Elements (row, col) to (row, col + 3) of C, and what the epilogue reads for them.
struct Quad {
  int64_t row, col;
  float x[4], side[4];
};

__device__ __forceinline__ int ValidElements(const Gemm& gemm, const Quad& quad) {
  return quad.row < gemm.m ? (int)min(gemm.n - quad.col, (int64_t)4) : 0;
}

// The bias of columns col to col + 3. aligned: C, bias and side allow 16-byte access.
__device__ __forceinline__ float4 ReadBias(const Gemm& gemm, int64_t col, bool aligned) {
  const float* bias = gemm.epilogue.bias;
  float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
  if (!bias || col >= gemm.n) return v;
  if (aligned) return *(const float4*)(bias + col);
  v.x = bias[col];
  if (col + 1 < gemm.n) v.y = bias[col + 1];
  if (col + 2 < gemm.n) v.z = bias[col + 2];
  if (col + 3 < gemm.n) v.w = bias[col + 3];
  return v;
}

// Separate from WriteQuad, so that several loads are in flight together.
__device__ __forceinline__ void ReadSide(const Gemm& gemm, bool aligned, Quad& quad) {
  const float* side = gemm.epilogue.side;
  const int valid = ValidElements(gemm, quad);
  if (!side || valid <= 0) return;
  side += quad.row * gemm.n + quad.col;
  if (aligned) {
    const float4 v = *(const float4*)side;
    quad.side[0] = v.x, quad.side[1] = v.y, quad.side[2] = v.z, quad.side[3] = v.w;
    return;
  }
#pragma unroll
  for (int e = 0; e < 4; e++)
    if (e < valid) quad.side[e] = side[e];
}

__device__ __forceinline__ void WriteQuad(const Gemm& gemm, bool aligned, float4 bias, Quad& quad) {
  const Epilogue& epilogue = gemm.epilogue;
  const float biases[4] = {bias.x, bias.y, bias.z, bias.w};
  const int valid = ValidElements(gemm, quad);
  if (valid <= 0) return;
  if (epilogue.bias) {
#pragma unroll
    for (int e = 0; e < 4; e++) quad.x[e] += biases[e];
  }
  ApplyActivations(epilogue.activation, epilogue.gradient, quad.side, quad.x);
  float* c = gemm.c + quad.row * gemm.n + quad.col;
  if (aligned) {
    *(float4*)c = make_float4(quad.x[0], quad.x[1], quad.x[2], quad.x[3]);
    return;
  }
#pragma unroll
  for (int e = 0; e < 4; e++)
    if (e < valid) c[e] = quad.x[e];
}

// Writes element (row, col) of C, which exists.
__device__ __forceinline__ void WriteElement(const Gemm& gemm, int64_t row, int64_t col, float x) {
  const Epilogue& epilogue = gemm.epilogue;
  const int64_t at = row * gemm.n + col;
  if (epilogue.bias) x += epilogue.bias[col];
  const float side[1] = {epilogue.side ? epilogue.side[at] : 0.f};
  float value[1] = {x};
  ApplyActivations(epilogue.activation, epilogue.gradient, side, value);
  gemm.c[at] = value[0];
}

}  // namespace cuda
}  // namespace dlsys
