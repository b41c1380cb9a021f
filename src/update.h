// The rules of optimizers, written once for the CPU, CUDA and run-time compilation: what one step
// does to one element.
//
// A rule is made from the step's numbers (Make) and is then called with the element's states, the
// parameter first and its slots after it, and its gradient. ops/update.py has the same formulas and
// where they come from. Decays come as 1 - beta, which keeps digits that beta in float32 would
// lose.
#pragma once
#include "functors.h"

namespace dlsys {
namespace rule {

#ifndef __CUDACC__
using std::expm1;
using std::log1p;
using std::sqrt;
#endif

struct Numbers {
  float lr;            // 0 for a rule that takes none
  long long step;      // updates made before this one, -1 for a rule that is not told
  bool fresh;          // a round of accumulation begins
  float constants[3];  // the operator's, in its order
};

// 1 - beta^t, from 1 - beta.
DLSYS_HD double Correction(float decay, double t) { return -expm1(t * log1p(-(double)decay)); }

struct Sgd {
  static constexpr const char* name = "sgd_update";
  static constexpr int kStates = 1;
  static constexpr bool kEveryRun = false;  // it waits for a round of accumulation to be complete
  float lr;
  static DLSYS_HD Sgd Make(const Numbers& n) { return {n.lr}; }
  DLSYS_HD void operator()(float* s, float g) const { s[0] -= lr * g; }
};

struct Momentum {
  static constexpr const char* name = "sgd_momentum_update";
  static constexpr int kStates = 2;
  static constexpr bool kEveryRun = false;
  float lr, momentum, share, nesterov;
  static DLSYS_HD Momentum Make(const Numbers& n) {
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
  float decay1, decay2, eps, rate, scale;
  static DLSYS_HD Adam Make(const Numbers& n) {
    const float decay1 = n.constants[0], decay2 = n.constants[1];
    const double t = (double)(n.step + 1);
    return {decay1, decay2, n.constants[2], (float)(n.lr / Correction(decay1, t)),
            (float)(1 / sqrt(Correction(decay2, t)))};
  }
  DLSYS_HD void operator()(float* s, float g) const {
    s[1] += decay1 * (g - s[1]);
    s[2] += decay2 * (g * g - s[2]);
    s[0] -= rate * s[1] / (sqrt(s[2]) * scale + eps);
  }
};

// States: param, square, then mean where centred, then velocity where there is momentum.
template <bool kCentred, bool kMomentum>
struct RmsProp {
  static constexpr const char* name =
      kCentred ? (kMomentum ? "rmsprop_centred_momentum_update" : "rmsprop_centred_update")
               : (kMomentum ? "rmsprop_momentum_update" : "rmsprop_update");
  static constexpr int kStates = 2 + kCentred + kMomentum;
  static constexpr bool kEveryRun = false;
  float lr, decay, eps, momentum;
  static DLSYS_HD RmsProp Make(const Numbers& n) {
    return {n.lr, n.constants[0], n.constants[1], n.constants[2]};
  }
  DLSYS_HD void operator()(float* s, float g) const {
    s[1] += decay * (g * g - s[1]);
    float variance = s[1];
    if constexpr (kCentred) {
      s[2] += decay * (g - s[2]);
      variance -= s[2] * s[2];
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
  static DLSYS_HD Adagrad Make(const Numbers& n) { return {n.lr, n.constants[0]}; }
  DLSYS_HD void operator()(float* s, float g) const {
    s[1] += g * g;
    s[0] -= lr * g / (sqrt(s[1]) + eps);
  }
};

struct Lion {
  static constexpr const char* name = "lion_update";
  static constexpr int kStates = 2;
  static constexpr bool kEveryRun = false;
  float lr, decay1, decay2;
  static DLSYS_HD Lion Make(const Numbers& n) { return {n.lr, n.constants[0], n.constants[1]}; }
  DLSYS_HD void operator()(float* s, float g) const {
    s[0] -= lr * fn::Sign()(s[1] + decay1 * (g - s[1]));
    s[1] += decay2 * (g - s[1]);
  }
};

// The states' only array is the average, the gradient is the new value.
struct Average {
  static constexpr const char* name = "average_update";
  static constexpr int kStates = 1;
  static constexpr bool kEveryRun = false;
  float share;
  static DLSYS_HD Average Make(const Numbers& n) {
    const float decay = n.constants[0];
    return {(float)(decay / Correction(decay, (double)(n.step + 1)))};
  }
  DLSYS_HD void operator()(float* s, float value) const { s[0] += share * (value - s[0]); }
};

struct Accumulate {
  static constexpr const char* name = "accumulate_update";
  static constexpr int kStates = 1;
  static constexpr bool kEveryRun = true;
  bool fresh;
  static DLSYS_HD Accumulate Make(const Numbers& n) { return {n.fresh}; }
  DLSYS_HD void operator()(float* s, float g) const { s[0] = fresh ? g : s[0] + g; }
};

// A rule after what all rules share: the gradient is scaled, clipped and joined by that of an L2
// penalty; the parameter shrinks by decoupled weight decay.
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

// Where the numbers of a step are found, in the memory of the device, and the plain ones. `count`
// counts runs: `every` of them make one update.
struct Source {
  const float* lr;
  const long long *step, *count;
  const float* scale;
  long long every;
  float clip, l2, decay;
  float constants[3];

  DLSYS_HD bool Due(bool every_run) const {
    return every_run || !count || (*count + 1) % every == 0;
  }

  // What is there now.
  struct Seen {
    float rate, scale;
    long long step, count;
  };
  DLSYS_HD Seen Look() const {
    return {lr ? *lr : 0.f, scale ? *scale : 1.f, step ? *step : -1, count ? *count : -1};
  }
  template <class Rule>
  DLSYS_HD Step<Rule> Make(const Seen& seen) const {
    const Numbers numbers{seen.rate,
                          seen.step,
                          count && seen.count % every == 0,
                          {constants[0], constants[1], constants[2]}};
    return {Rule::Make(numbers), seen.scale, clip, l2, decay == 0.f ? 0.f : seen.rate * decay};
  }
};

}  // namespace rule
}  // namespace dlsys
