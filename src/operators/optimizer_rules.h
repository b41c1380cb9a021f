// Optimizer update rules, written once for the CPU and CUDA (plain and as a GEMM epilogue): the
// step of one element.
//
// A rule is made from the scalars of the step and its constants (Make) and is called with the
// states of an element, the parameter first and its slots after it, and its gradient.
// ops/optim/rules.py has the same formulas for numpy, with their references. A decay rate comes as
// two constants, keep = beta and take = 1 - beta, since neither in float32 has the digits of the
// other. DLSYS_RULES is the list that kernels and the interface are made from.
#pragma once
#include <cstring>
#include <type_traits>

#include "math/functors.h"
#include "math/storage.h"

namespace dlsys {
namespace rule {

#ifndef __CUDACC__
using std::expm1;
using std::log1p;
using std::sqrt;
#endif

constexpr float kLargest = 3.40282347e38f;  // finite float

struct Scalars {
  float lr;        // 0 for a rule that takes none
  long long step;  // updates before this one, -1 for a rule without a step count
  bool fresh;      // the first gradient of an accumulation
};

// How many names a list of them has.
constexpr int Names(const char* list) {
  int count = *list != 0;
  for (; *list; list++) count += *list == ',';
  return count;
}

// A rule's kernel, its slots, and whether it acts in every run of an accumulation of gradients or
// only when that is complete.
#define DLSYS_RULE(kernel, names_of_slots, in_every_run)               \
  static constexpr const char *name = kernel, *slots = names_of_slots; \
  static constexpr int kStates = 1 + Names(slots);                     \
  static constexpr bool kEveryRun = in_every_run;
// Its constants, and their names.
#define DLSYS_CONSTANTS(...) \
  struct Constants {         \
    float __VA_ARGS__;       \
  };                         \
  static constexpr const char* constants = #__VA_ARGS__;
#define DLSYS_NO_CONSTANTS \
  struct Constants {};     \
  static constexpr const char* constants = "";

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
  DLSYS_RULE("sgd_update", "", false)
  DLSYS_NO_CONSTANTS
  float lr;
  static DLSYS_HD Sgd Make(const Scalars& n, const Constants&) { return {n.lr}; }
  DLSYS_HD void operator()(float* s, float g) const { s[0] -= lr * g; }
};

struct Momentum {
  DLSYS_RULE("sgd_momentum_update", "velocity", false)
  DLSYS_CONSTANTS(momentum, share, nesterov)
  float lr, momentum, share, nesterov;
  static DLSYS_HD Momentum Make(const Scalars& n, const Constants& c) {
    const float share = n.step == 0 ? 1.f : c.share;  // the first gradient counts in full
    return {n.lr, c.momentum, share, c.nesterov};
  }
  DLSYS_HD void operator()(float* s, float g) const {
    s[1] = momentum * s[1] + share * g;
    s[0] -= lr * (nesterov != 0.f ? g + momentum * s[1] : s[1]);
  }
};

struct Adam {
  DLSYS_RULE("adam_update", "mean, square", false)
  DLSYS_CONSTANTS(mean_keep, mean_take, square_keep, square_take, eps)
  Blend mean, square;
  float eps, rate, scale;
  static DLSYS_HD Adam Make(const Scalars& n, const Constants& c) {
    const Blend mean{c.mean_keep, c.mean_take}, square{c.square_keep, c.square_take};
    const double t = (double)(n.step + 1);
    return {mean, square, c.eps, (float)(n.lr / Correction(mean.take, t)),
            (float)(1 / sqrt(Correction(square.take, t)))};
  }
  DLSYS_HD void operator()(float* s, float g) const {
    s[1] = mean(s[1], g);
    s[2] = square.Square(s[2], g);
    s[0] -= rate * (s[1] / (sqrt(s[2]) * scale + eps));
  }
};

template <bool kCentered, bool kMomentum>
struct RmsPropOf {
  DLSYS_RULE(kCentered
                 ? (kMomentum ? "rmsprop_centered_momentum_update" : "rmsprop_centered_update")
                 : (kMomentum ? "rmsprop_momentum_update" : "rmsprop_update"),
             kCentered ? (kMomentum ? "square, mean, velocity" : "square, mean")
                       : (kMomentum ? "square, velocity" : "square"),
             false)
  DLSYS_CONSTANTS(keep, take, eps, momentum)
  float lr;
  Blend blend;
  float eps, momentum;
  static DLSYS_HD RmsPropOf Make(const Scalars& n, const Constants& c) {
    return {n.lr, {c.keep, c.take}, c.eps, c.momentum};
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
  DLSYS_RULE("adagrad_update", "total", false)
  DLSYS_CONSTANTS(eps)
  float lr, eps;
  static DLSYS_HD Adagrad Make(const Scalars& n, const Constants& c) { return {n.lr, c.eps}; }
  DLSYS_HD void operator()(float* s, float g) const {
    s[1] += g * g;
    s[0] -= lr * (g / (sqrt(s[1]) + eps));
  }
};

struct Lion {
  DLSYS_RULE("lion_update", "mean", false)
  DLSYS_CONSTANTS(direction_keep, direction_take, mean_keep, mean_take)
  float lr;
  Blend direction, mean;
  static DLSYS_HD Lion Make(const Scalars& n, const Constants& c) {
    return {n.lr, {c.direction_keep, c.direction_take}, {c.mean_keep, c.mean_take}};
  }
  DLSYS_HD void operator()(float* s, float g) const {
    s[0] -= lr * fn::Sign()(direction(s[1], g));
    s[1] = mean(s[1], g);
  }
};

// Its only state is the average; the gradient is the new value.
struct Average {
  DLSYS_RULE("average_update", "", false)
  DLSYS_CONSTANTS(decay)
  Blend blend;
  static DLSYS_HD Average Make(const Scalars& n, const Constants& c) {
    const float keep = (float)(1 - c.decay / Correction(c.decay, (double)(n.step + 1)));
    return {{keep, 1.f - keep}};  // they add up to 1, so that the mean of equal values is unbiased
  }
  DLSYS_HD void operator()(float* s, float value) const { s[0] = blend(s[0], value); }
};

struct Accumulate {
  DLSYS_RULE("accumulate_update", "", true)
  DLSYS_NO_CONSTANTS
  bool fresh;
  static DLSYS_HD Accumulate Make(const Scalars& n, const Constants&) { return {n.fresh}; }
  DLSYS_HD void operator()(float* s, float g) const { s[0] = fresh ? g : s[0] + g; }
};

#undef DLSYS_RULE
#undef DLSYS_CONSTANTS
#undef DLSYS_NO_CONSTANTS

using RmsProp = RmsPropOf<false, false>;
using CenteredRmsProp = RmsPropOf<true, false>;
using MomentumRmsProp = RmsPropOf<false, true>;
using CenteredMomentumRmsProp = RmsPropOf<true, true>;

#define DLSYS_RULES(X)       \
  X(Sgd)                     \
  X(Momentum)                \
  X(Adam)                    \
  X(RmsProp)                 \
  X(CenteredRmsProp)         \
  X(MomentumRmsProp)         \
  X(CenteredMomentumRmsProp) \
  X(Adagrad)                 \
  X(Lion)                    \
  X(Average)                 \
  X(Accumulate)

// The type in which the first state of a rule lies, where arrays are of storage type T: that of the
// Parameter, or float32 where it is a sum or an average beside one, as slots are.
template <class T, class Rule>
using Stored =
    std::conditional_t<std::is_same_v<Rule, Average> || std::is_same_v<Rule, Accumulate>, float, T>;

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

// What of an update is the same in every run: an argument of its kernel.
struct UpdateOptions {
  int64_t every;  // runs that make one update
  float clip, l2, decay;
  float constants[5];  // of the rule, the first of its Constants first
};

// The sources of the scalars of a step: those in device memory, which may change between runs of a
// captured program, and constants. `count` counts runs.
struct Source {
  const float* lr;
  const long long *step, *count;
  const float* scale;
  UpdateOptions options;

  DLSYS_HD bool Due(bool every_run) const {
    return every_run || !count || (*count + 1) % options.every == 0;
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
    typename Rule::Constants constants;
    static_assert(sizeof constants <= sizeof options.constants, "there is room for them");
    memcpy(&constants, options.constants, sizeof constants);
    const Scalars scalars{seen.rate, seen.step, count && seen.count % options.every == 0};
    return {Rule::Make(scalars, constants), seen.scale, options.clip, options.l2,
            options.decay == 0.f ? 0.f : seen.rate * options.decay};
  }
};

}  // namespace rule
}  // namespace dlsys
