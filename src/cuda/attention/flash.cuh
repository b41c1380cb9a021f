// Attention by wgmma and TMA, for sm_90a: what flash_forward.cu and flash_backward.cu do for the
// rung `flash`. Arrays are (batch, heads, positions, size) by their strides, with rows at multiples
// of 16 bytes; what is written overlaps nothing.
#pragma once
#include "cuda/runtime/context.cuh"
#include "operators/attention.h"

namespace dlsys {
namespace cuda {

// Dropout of the weights: an element is kept where its word of Philox is at most `limit`, and then
// multiplied by `keep` (operators/attention.h).
struct FlashDropout {
  const uint64_t* step;  // null without dropout
  uint64_t seed;
  uint32_t node, limit;
  float keep;
};

// y = softmax(q kᵀ · scale) v.
struct FlashProblem {
  int64_t batch, heads, kv_heads;  // kv_heads divides heads
  int64_t rows, columns, size;
  AttentionLayout of_q, of_k, of_v, of_y;  // and of their gradients
  int dtype;                               // of 16 bits, or float32, multiplied as tf32
  float scale;
  bool causal;  // row r sees the columns up to r
  FlashDropout dropout;
  DLContext ctx;
};

// Why it cannot run, or "". Strides, of size % 8 == 0 too, are multiples of 16 bytes then.
const char* FlashError(const FlashProblem& problem);

struct FlashForward {
  const void *q, *k, *v;
  void* y;
  float* lse;  // (batch, heads, rows), logarithms of the rows' sums of exponentials
};
void RunFlashForward(const char* op, const FlashProblem& problem, const FlashForward& arrays,
                     DLStream stream);

struct FlashBackward {
  const void *q, *k, *v, *y;
  const float* lse;
  const void* dy;
  void *dq, *dk, *dv;
};
void RunFlashBackward(const char* op, const FlashProblem& problem, const FlashBackward& arrays,
                      DLStream stream);

}  // namespace cuda
}  // namespace dlsys
