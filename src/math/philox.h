// Counter-based random numbers, functions of (seed, step, node, element): Philox4x32-10 of Salmon,
// Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (2011), and the
// distributions made of its words. One source for the CPU and CUDA;
// python/dlsys/ops/random/sampling.py has the same in numpy.
//
// Four neighboring elements share a block of four words. Words, uniforms and masks come from
// integers and exact products, so they are the same bits everywhere; normals go through double.
#pragma once
#include <math.h>
#include <stdint.h>

#include "math/functors.h"

namespace dlsys {
namespace philox {

struct Words {
  uint32_t word[4];
};

// The ten rounds on a counter, with a key.
DLSYS_HD Words Philox(Words counter, uint32_t key0, uint32_t key1) {
  uint32_t c0 = counter.word[0], c1 = counter.word[1];
  uint32_t c2 = counter.word[2], c3 = counter.word[3];
  for (int round = 0; round < 10; round++) {
    const uint64_t product0 = (uint64_t)0xD2511F53u * c0;
    const uint64_t product1 = (uint64_t)0xCD9E8D57u * c2;
    c0 = (uint32_t)(product1 >> 32) ^ c1 ^ key0;
    c2 = (uint32_t)(product0 >> 32) ^ c3 ^ key1;
    c1 = (uint32_t)product1;
    c3 = (uint32_t)product0;
    key0 += 0x9E3779B9u;  // the golden ratio
    key1 += 0xBB67AE85u;  // sqrt(3) - 1
  }
  return {{c0, c1, c2, c3}};
}

// The random numbers of one node in one step. The high half of the step distinguishes the draws of
// runs that do not advance the step (OfDraw).
struct Stream {
  uint64_t seed, step;
  uint32_t node;

  // The words of elements 4 * block to 4 * block + 3.
  DLSYS_HD Words At(uint64_t block) const {
    return Philox(
        {{(uint32_t)block, (uint32_t)(block >> 32) ^ (uint32_t)(step >> 32), (uint32_t)step, node}},
        (uint32_t)seed, (uint32_t)(seed >> 32));
  }
};

// The step of a draw by its index; of draw 0 it is the step itself. A draw is counted from the
// highest bit down and the blocks of an array from the lowest bit up. They share a word of the
// counter, and so collide only where an array has 2^34 elements, or 2^k times as many with draws
// above 2^(32-k).
DLSYS_HD uint64_t OfDraw(uint64_t step, uint64_t draw) {
  uint64_t reversed = 0;
  for (int bit = 0; bit < 32; bit++) reversed |= (draw >> bit & 1) << (63 - bit);
  return step ^ reversed;
}

// 24 bits of the word as a float32 in [0, 1).
DLSYS_HD float Unit(uint32_t word) { return (float)(word >> 8) * 5.9604644775390625e-8f; }

// low + range * unit; the product is exact in double, so that a fused multiplication changes
// nothing.
DLSYS_HD float Uniform(uint32_t word, float low, float range) {
  return (float)((double)Unit(word) * (double)range + (double)low);
}

DLSYS_HD double Polynomial(const double (&c)[8], double x) {
  return ((((((c[7] * x + c[6]) * x + c[5]) * x + c[4]) * x + c[3]) * x + c[2]) * x + c[1]) * x +
         c[0];
}

// The quantile function of the standard normal distribution, 0 < p < 1: algorithm
// AS 241, PPND16, of Wichura (1988), to about 16 digits. In its middle, q = p - 0.5 with |q| <=
// 0.425; in its tails, of which r = sqrt(-log(min(p, 1 - p))) <= 5; beyond them.
constexpr double kMiddle = 0.425, kTail = 5;

DLSYS_HD double MiddleQuantile(double q) {
  const double a[8] = {3.3871328727963666080e0, 1.3314166789178437745e2, 1.9715909503065514427e3,
                       1.3731693765509461125e4, 4.5921953931549871457e4, 6.7265770927008700853e4,
                       3.3430575583588128105e4, 2.5090809287301226727e3};
  const double b[8] = {1.0,
                       4.2313330701600911252e1,
                       6.8718700749205790830e2,
                       5.3941960214247511077e3,
                       2.1213794301586595867e4,
                       3.9307895800092710610e4,
                       2.8729085735721942674e4,
                       5.2264952788528545610e3};
  const double r = 0.180625 - q * q;
  return q * Polynomial(a, r) / Polynomial(b, r);
}

DLSYS_HD double TailQuantile(double r) {
  const double c[8] = {1.42343711074968357734e0,  4.63033784615654529590e0,
                       5.76949722146069140550e0,  3.64784832476320460504e0,
                       1.27045825245236838258e0,  2.41780725177450611770e-1,
                       2.27238449892691845833e-2, 7.74545014278341407640e-4};
  const double d[8] = {1.0,
                       2.05319162663775882187e0,
                       1.67638483018380384940e0,
                       6.89767334985100004550e-1,
                       1.48103976427480074590e-1,
                       1.51986665636164571966e-2,
                       5.47593808499534494600e-4,
                       1.05075007164441684324e-9};
  return Polynomial(c, r - 1.6) / Polynomial(d, r - 1.6);
}

DLSYS_HD double FarQuantile(double r) {
  const double e[8] = {6.65790464350110377720e0,  5.46378491116411436990e0,
                       1.78482653991729133580e0,  2.96560571828504891230e-1,
                       2.65321895265761230930e-2, 1.24266094738807843860e-3,
                       2.71155556874348757815e-5, 2.01033439929228813265e-7};
  const double f[8] = {1.0,
                       5.99832206555887937690e-1,
                       1.36929880922735805310e-1,
                       1.48753612908506148525e-2,
                       7.86869131145613259100e-4,
                       1.84631831751005468180e-5,
                       1.42151175831644588870e-7,
                       2.04426310338993978564e-15};
  return Polynomial(e, r - 5) / Polynomial(f, r - 5);
}

DLSYS_HD double NormalQuantile(double p) {
  const double q = p - 0.5;
  if (q >= -kMiddle && q <= kMiddle) return MiddleQuantile(q);
  const double r = sqrt(-log(q < 0 ? p : 1 - p));
  const double x = r <= kTail ? TailQuantile(r) : FarQuantile(r);
  return q < 0 ? -x : x;
}

// A normal variable truncated to [low, high] standard deviations; `below` is the probability below
// low, `within` that of the interval.
struct Normal {
  float mean, deviation, below, within, low, high;

  DLSYS_HD float At(uint32_t word) const { return Made(NormalQuantile(Probability(word))); }

  DLSYS_HD double Probability(uint32_t word) const {
    const double unit = ((double)word + 0.5) * 2.3283064365386962890625e-10;
    return (double)below + unit * (double)within;
  }

  DLSYS_HD float Made(double x) const {
    x = x < low ? low : x;
    x = x > high ? high : x;
    return (float)((double)mean + x * (double)deviation);
  }
};

}  // namespace philox
}  // namespace dlsys
