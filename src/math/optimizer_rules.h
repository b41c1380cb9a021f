// Optimizer update rules, written once for the CPU and CUDA (plain and as a GEMM epilogue): the
// step of one element.
//
// A rule is made from the scalars of the step (Make) and is called with the states of an element,
// the parameter first and its slots after it, and its gradient. ops/optim/rules.py has the same
// formulas with their references. A decay rate comes as two constants, beta and 1 - beta, since
// neither in float32 has the digits of the other.
#pragma once
#include "math/functors.h"

namespace dlsys {
namespace rule {

#ifndef __CUDACC__
using std::expm1;
using std::log1p;
using std::sqrt;
#endif

constexpr float kLargest = 3.40282347e38f;  // finite float

struct Scalars {
  float lr;            // 0 for a rule that takes none
  long long step;      // updates before this one, -1 for a rule without a step count
  bool fresh;          // the first gradient of an accumulation
  float constants[5];  // of the operator, in its order
};

// An exponential moving average, keep * state + take * value. The form state + take * (value -
// state) would cancel where the state is much larger, and is NaN where both are infinite. With keep
// == 0 the state is dropped even where it is infinite.
struct Blend {
  float keep, take;
  DLSYS_HD float operator()(float state, float value) const { return Add(state, take * value); }
  // The average of squares. A square that overflows stays infinite, and a gradient divided by its
  // root is 0, as in PyTorch.
  DLSYS_HD float Square(float state, float value) const { return Add(state, take * value * value); }

 private:
  DLSYS_HD float Add(float state, float taken) const {
    return keep == 0.f ? taken : keep * state + taken;
  }
};

// 1 - beta^t, from 1 - beta.
DLSYS_HD double Correction(float decay, double t) { return -expm1(t * log1p(-(double)decay)); }

struct Sgd {
  static constexpr const char* name = "sgd_update";
  static constexpr int kStates = 1;
  static constexpr bool kEveryRun = false;  // only when an accumulation of gradients is complete
  float lr;
  static DLSYS_HD Sgd Make(const Scalars& n) { return {n.lr}; }
  DLSYS_HD void operator()(float* s, float g) const { s[0] -= lr * g; }
};

struct Momentum {
  static constexpr const char* name = "sgd_momentum_update";
  static constexpr int kStates = 2;
  static constexpr bool kEveryRun = false;
  float lr, momentum, share, nesterov;
  static DLSYS_HD Momentum Make(const Scalars& n) {
    const float share = n.step == 0 ? 1.f : n.constants[1];  // the first gradient counts in full
    return {n.lr, n.constants[0], share, n.constants[2]};
  }
  DLSYS_HD void operator()(float* s, float g) const {
    s[1] = momentum * s[1] + share * g;
    s[0] -= lr * (nesterov != 0.f ? g + momentum * s[1] : s[1]);
  }
};

struct Adam {
  static constexpr const char* name = "adam_update";
  static constexpr int kStates = 3;
  static constexpr bool kEveryRun = false;
  Blend mean, square;
  float eps, rate, scale;
  static DLSYS_HD Adam Make(const Scalars& n) {
    const Blend mean{n.constants[0], n.constants[1]}, square{n.constants[2], n.constants[3]};
    const double t = (double)(n.step + 1);
    return {mean, square, n.constants[4], (float)(n.lr / Correction(mean.take, t)),
            (float)(1 / sqrt(Correction(square.take, t)))};
  }
  DLSYS_HD void operator()(float* s, float g) const {
    s[1] = mean(s[1], g);
    s[2] = square.Square(s[2], g);
    s[0] -= rate * (s[1] / (sqrt(s[2]) * scale + eps));
  }
};

// States: param, square, then mean where centered, then velocity where there is momentum.
template <bool kCentered, bool kMomentum>
struct RmsProp {
  static constexpr const char* name =
      kCentered ? (kMomentum ? "rmsprop_centered_momentum_update" : "rmsprop_centered_update")
                : (kMomentum ? "rmsprop_momentum_update" : "rmsprop_update");
  static constexpr int kStates = 2 + kCentered + kMomentum;
  static constexpr bool kEveryRun = false;
  float lr;
  Blend blend;
  float eps, momentum;
  static DLSYS_HD RmsProp Make(const Scalars& n) {
    return {n.lr, {n.constants[0], n.constants[1]}, n.constants[2], n.constants[3]};
  }
  DLSYS_HD void operator()(float* s, float g) const {
    s[1] = blend.Square(s[1], g);
    float variance = s[1];
    if constexpr (kCentered) {
      s[2] = blend(s[2], g);
      // An infinite square stays infinite: inf - inf would be NaN.
      variance = variance > kLargest ? variance : variance - s[2] * s[2];
      variance = variance < 0.f ? 0.f : variance;  // by rounding; NaN stays NaN
    }
    float change = g / (sqrt(variance) + eps);
    if constexpr (kMomentum) change = s[kStates - 1] = momentum * s[kStates - 1] + change;
    s[0] -= lr * change;
  }
};

struct Adagrad {
  static constexpr const char* name = "adagrad_update";
  static constexpr int kStates = 2;
  static constexpr bool kEveryRun = false;
  float lr, eps;
  static DLSYS_HD Adagrad Make(const Scalars& n) { return {n.lr, n.constants[0]}; }
  DLSYS_HD void operator()(float* s, float g) const {
    s[1] += g * g;
    s[0] -= lr * (g / (sqrt(s[1]) + eps));
  }
};

struct Lion {
  static constexpr const char* name = "lion_update";
  static constexpr int kStates = 2;
  static constexpr bool kEveryRun = false;
  float lr;
  Blend direction, mean;
  static DLSYS_HD Lion Make(const Scalars& n) {
    return {n.lr, {n.constants[0], n.constants[1]}, {n.constants[2], n.constants[3]}};
  }
  DLSYS_HD void operator()(float* s, float g) const {
    s[0] -= lr * fn::Sign()(direction(s[1], g));
    s[1] = mean(s[1], g);
  }
};

// Its only state is the average; the gradient is the new value.
struct Average {
  static constexpr const char* name = "average_update";
  static constexpr int kStates = 1;
  static constexpr bool kEveryRun = false;
  Blend blend;
  static DLSYS_HD Average Make(const Scalars& n) {
    const float decay = n.constants[0];
    const float keep = (float)(1 - decay / Correction(decay, (double)(n.step + 1)));
    return {{keep, 1.f - keep}};  // they add up to 1, so that the mean of equal values is unbiased
  }
  DLSYS_HD void operator()(float* s, float value) const { s[0] = blend(s[0], value); }
};

struct Accumulate {
  static constexpr const char* name = "accumulate_update";
  static constexpr int kStates = 1;
  static constexpr bool kEveryRun = true;
  bool fresh;
  static DLSYS_HD Accumulate Make(const Scalars& n) { return {n.fresh}; }
  DLSYS_HD void operator()(float* s, float g) const { s[0] = fresh ? g : s[0] + g; }
};

// A rule after the stages that all rules share: the gradient is scaled, clipped, and gets the
// gradient of an L2 penalty; the parameter shrinks by decoupled weight decay.
template <class Rule>
struct Step {
  Rule rule;
  float scale, clip, l2, shrink;
  DLSYS_HD void operator()(float* s, float g) const {
    g = fn::Clip(g * scale, -clip, clip);
    if (l2 != 0.f) g += l2 * s[0];
    if (shrink != 0.f) s[0] -= shrink * s[0];  // 1 - shrink would lose most digits of shrink
    rule(s, g);
  }
};

// The sources of the scalars of a step: those in device memory, which may change between runs of a
// captured program, and constants. `count` counts runs, of which `every` make one update.
struct Source {
  const float* lr;
  const long long *step, *count;
  const float* scale;
  long long every;
  float clip, l2, decay;
  float constants[5];

  DLSYS_HD bool Due(bool every_run) const {
    return every_run || !count || (*count + 1) % every == 0;
  }

  // The current values of the scalars in device memory.
  struct Seen {
    float rate, scale;
    long long step, count;
  };
  DLSYS_HD Seen Look() const {
    return {lr ? *lr : 0.f, scale ? *scale : 1.f, step ? *step : -1, count ? *count : -1};
  }
  template <class Rule>
  DLSYS_HD Step<Rule> Make(const Seen& seen) const {
    const Scalars scalars{seen.rate,
                          seen.step,
                          count && seen.count % every == 0,
                          {constants[0], constants[1], constants[2], constants[3], constants[4]}};
    return {Rule::Make(scalars), seen.scale, clip, l2, decay == 0.f ? 0.f : seen.rate * decay};
  }
};

}  // namespace rule
}  // namespace dlsys
