// Optimizer steps of parameters whose gradients lie in parts, for the kernels that leave those:
// what each block of such a kernel has summed. summed_update.cu has the kernel that adds them in a
// fixed order, and what limits it.
#pragma once
#include "cuda/runtime/launch.cuh"
#include "operators/optimizer_rules.h"

namespace dlsys {
namespace cuda {

constexpr int kMaxSummed = 16;  // parameters of a launch

// A parameter of `size` elements whose gradient is the sum of `count` parts, `pitch` elements
// apart, and its states, the parameter first.
template <int kStates>
struct SummedParameter {
  const float* parts;
  int64_t size, pitch;
  int count;
  float* states[kStates];
};

// Adds the parts of each gradient in a fixed order and steps its parameter by the rule, in place.
template <class Rule>
void RunSummedUpdate(const char* op, const SummedParameter<Rule::kStates>* parameters, int count,
                     const rule::Source& source, int device, DLStream stream);

}  // namespace cuda
}  // namespace dlsys
