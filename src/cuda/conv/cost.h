// The cost model of convolutions: how long each algorithm takes for one, and so which one `auto`
// runs by. Host code alone, which docs/learn/conv.md explains and benchmarks/speed/conv.py checks.
//
// A convolution or gradient is a product of matrices (m, k) (k, n) for each group. An algorithm
// launches kernels, moves bytes and multiplies, each at a rate measured in captured graphs on an
// H200; other chips scale all of them alike, which rarely changes the order.
#pragma once
#include <algorithm>
#include <cmath>

#include "math/conv_geometry.h"

namespace dlsys {
namespace cuda {

enum class Pass { kForward, kDataGradient, kFilterGradient };

struct ConvWork {
  Conv conv;
  Pass pass;
  bool tf32;
};

constexpr double kBytesPerUs = 3.6e6;  // read and written by a kernel that streams
constexpr double kLaunchUs = 2.5;      // of a kernel that follows another one
constexpr double kNever = 1e30;        // us of an algorithm that cannot compute it

// FLOP per us of full tiles.
constexpr double kFmaRate = 3.6e7;        // the FFMA implicit GEMM
constexpr double kMmaRate = 9.0e7;        // the mma implicit GEMM
constexpr double kDirectRate = 2.0e6;     // depthwise, by elements
constexpr double kCublasRate[2] = {4.4e7, 2.4e8};  // fp32, tf32
constexpr double kCudnnRate[2] = {3.6e7, 2.6e8};   // of its precomputed GEMM

// ---- what there is to do ----

struct ConvProduct {
  double m, n, k, groups;
  double Flop() const { return 2 * m * n * k * groups; }
};

inline ConvProduct ProductOf(const ConvWork& w) {
  const Conv& c = w.conv;
  const double filters = (double)c.GroupFilters(), channels = (double)c.GroupChannels();
  const double kernel = (double)Size(c.kernel), positions = (double)(c.n * Size(c.out));
  if (w.pass == Pass::kForward) return {filters, positions, channels * kernel, (double)c.groups};
  if (w.pass == Pass::kFilterGradient)
    return {filters, channels * kernel, positions, (double)c.groups};
  const double inputs = (double)(c.n * Size(c.in));  // a stride leaves out kernel offsets
  return {channels, inputs, filters * kernel * positions / inputs, (double)c.groups};
}

inline double ImageBytes(const Conv& c) { return 4. * c.n * c.c * Size(c.in); }
inline double ResultBytes(const Conv& c) { return 4. * c.n * c.o * Size(c.out); }
inline double FilterBytes(const Conv& c) { return 4. * c.o * c.GroupChannels() * Size(c.kernel); }
inline double AllBytes(const Conv& c) { return ImageBytes(c) + ResultBytes(c) + FilterBytes(c); }

// The share of tiles that is not padding.
inline double Filled(double extent, double tile) {
  return extent / (std::ceil(extent / tile) * tile);
}

// us of moving bytes and of multiplying, whichever takes longer.
inline double RooflineUs(double bytes, double flop, double rate) {
  return std::max(bytes / kBytesPerUs, flop / rate);
}

}  // namespace cuda
}  // namespace dlsys
