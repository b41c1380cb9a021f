// The fused MLP head's argument: what of its layers is the same in every run.
#pragma once
#include "operators/epilogue.h"

namespace dlsys {

constexpr int kMaxHeadLayers = 6;

// y = activation(x op(W) + bias), and dx = dact(x, dy op(W)^T).
struct HeadLayer {
  int32_t transposed, has_bias;
  int32_t activation, dact;  // codes of operators/epilogue.h, 0 for none
};

struct HeadOptions {
  int32_t precision;
  float scale, dy;  // of the loss, and of its gradient
  HeadLayer layers[kMaxHeadLayers];
};

}  // namespace dlsys
