// The cost model of convolutions: how long each algorithm takes for one, and so which one `auto`
// runs by. docs/learn/conv.md explains it, `python benchmarks conv --variants` checks it.
//
// A convolution or a gradient of it is a product of matrices (m, k) (k, n) for each group. An
// algorithm takes a fixed time for its launches, and more for what it multiplies and what it moves:
// us = fixed + operations / rate + bytes / bandwidth. Rates were fitted to times in captured graphs
// on an H200, of the networks in benchmarks/speed/conv.py and others; other chips scale all of them
// alike, which rarely changes the order.
#pragma once
#include <algorithm>
#include <cmath>

#include "math/conv_geometry.h"
#include "math/int_math.h"

namespace dlsys {
namespace cuda {

enum class Pass { kForward, kDataGradient, kFilterGradient };

struct ConvWork {
  Conv conv;
  Pass pass;
  bool tf32;
  int multiprocessors;

  bool Is(Pass other) const { return pass == other; }
  bool IsStridedGradient() const { return Is(Pass::kDataGradient) && Size(conv.stride) > 1; }
};

constexpr double kNever = 1e30;  // us of what is not worth a thought

// Of an algorithm: fixed microseconds, operations (additions and multiplications) and bytes in a
// microsecond.
struct Rate {
  double us, operations, bytes;
};
inline double Us(const Rate& rate, double operations, double bytes) {
  return rate.us + operations / rate.operations + bytes / rate.bytes;
}

// ---- what there is to do ----

struct ConvProduct {
  double m, n, k, groups;
  double Operations() const { return 2 * m * n * k * groups; }
};

inline ConvProduct ProductOf(const ConvWork& w) {
  const Conv& c = w.conv;
  const double filters = (double)c.GroupFilters(), channels = (double)c.GroupChannels();
  const double kernel = (double)Size(c.kernel), outputs = (double)(c.n * Size(c.out));
  const double inputs = (double)(c.n * Size(c.in)), groups = (double)c.groups;
  if (w.Is(Pass::kForward)) return {filters, outputs, channels * kernel, groups};
  if (w.Is(Pass::kFilterGradient)) return {filters, channels * kernel, outputs, groups};
  const double met = std::max(kernel / (double)Size(c.stride), 1.);  // kernel offsets of an input
  return {channels, inputs, filters * met, groups};
}

inline double ImageBytes(const Conv& c) { return 4. * (double)(c.n * c.c * Size(c.in)); }
inline double OutputBytes(const Conv& c) { return 4. * (double)(c.n * c.o * Size(c.out)); }
inline double FilterBytes(const Conv& c) {
  return 4. * (double)(c.o * c.GroupChannels() * Size(c.kernel));
}
inline double AllBytes(const Conv& c) { return ImageBytes(c) + OutputBytes(c) + FilterBytes(c); }

inline double Padded(double extent, double tile) { return std::ceil(extent / tile) * tile; }

// Tiles of m x n, and their rate relative to the fastest.
struct ConvTile {
  double m, n, speed;
};

// The operations of all tiles, padding and unfilled waves of blocks included, by the tiles that
// have the fewest. A tile begins and ends at the cost of `prologue` more of K. A split sum leaves
// no multiprocessor without work.
template <size_t kCount>
double TiledOperations(const ConvTile (&tiles)[kCount], const ConvWork& w, double prologue) {
  const ConvProduct p = ProductOf(w);
  double least = kNever;
  for (const ConvTile& t : tiles) {
    const double blocks = std::ceil(p.m / t.m) * std::ceil(p.n / t.n) * p.groups;
    const double waves = blocks / w.multiprocessors;
    const double all = w.Is(Pass::kFilterGradient) ? waves : std::ceil(waves);
    least = std::min(least, all * w.multiprocessors * t.m * t.n / t.speed);
  }
  return 2 * (p.k + prologue) * least;
}

// ---- what each algorithm takes, in microseconds ----

// Implicit GEMM by FFMA; a gradient for the data at a stride is one for each phase, and writes
// every second float.
inline double FmaUs(const ConvWork& w) {
  constexpr ConvTile kTiles[] = {
      {128, 128, 1}, {64, 128, 0.95}, {32, 128, 0.75}, {16, 128, 0.5}, {32, 32, 0.4}};
  constexpr double kPrologue = 32, kStreaming = 1e12;  // bytes are hidden behind multiplications
  const double operations = TiledOperations(kTiles, w, kPrologue);
  if (w.Is(Pass::kFilterGradient)) return Us({10, 3.5e7, kStreaming}, operations, 0);
  if (w.IsStridedGradient()) return Us({5, 2.34e7, 0.8e6}, operations, AllBytes(w.conv));
  return Us({2.5, 3.0e7, kStreaming}, operations, 0);
}

// Implicit GEMM by mma. The filter's gradient needs the runs of its channels in shared memory.
inline double MmaUs(const ConvWork& w) {
  constexpr ConvTile kTiles[] = {
      {64, 256, 1}, {64, 192, 0.97}, {64, 128, 0.93}, {32, 256, 0.82}, {32, 128, 0.75}};
  constexpr ConvTile kFilterTiles[] = {
      {64, 288, 1}, {32, 288, 0.75}, {16, 160, 0.35}, {32, 16, 0.15}};
  constexpr double kPrologue = 32, kMostRun = 160e3;
  const Conv& c = w.conv;
  const double bytes = AllBytes(c);
  if (w.Is(Pass::kFilterGradient)) {
    const double channels = (double)std::min<int64_t>(c.GroupChannels(), 32);
    if (8. * channels * (double)(c.in.w * c.kernel.h) > kMostRun) return kNever;
    return Us({12, 1.13e8, 4.3e6}, TiledOperations(kFilterTiles, w, 0), bytes);
  }
  const double operations = TiledOperations(kTiles, w, kPrologue);
  if (w.IsStridedGradient()) return Us({23, 9.3e7, 1.5e6}, operations, bytes);
  const ConvProduct p = ProductOf(w);
  const double gathered = 4 * std::ceil(p.m / 64) * p.n * p.k * p.groups / (double)Size(c.kernel);
  return Us({8.6, 1.5e8, 4.5e6}, operations, bytes) + gathered / 9.5e6;
}

// A batch of products, one for each image; the parts of the filter's gradient are added behind it.
inline double BatchedUs(const ConvWork& w) {
  const Conv& c = w.conv;
  const ConvProduct p = ProductOf(w);
  const bool filter = w.Is(Pass::kFilterGradient);
  const double n = filter ? p.n : (double)Size(c.out), k = filter ? (double)Size(c.out) : p.k;
  const double operations = 2 * (double)c.n * Padded(p.m, 64) * Padded(n, 64) * k;
  const double parts = filter ? 2 * (double)c.n * FilterBytes(c) : 0;
  const double unaligned = Size(c.out) % 4 ? 3 : 1;  // rows that are no multiple of 16 bytes
  return Us({8, w.tf32 ? 2.2e8 : 4.2e7, 3.4e6}, operations * unaligned, AllBytes(c) + parts);
}

// The columns are written and read, and results transposed.
inline double Im2colUs(const ConvWork& w) {
  const Conv& c = w.conv;
  const double patches = (double)(Size(c.out) * Size(c.kernel)) / (double)Size(c.in);
  const double bytes = AllBytes(c) + 2 * OutputBytes(c) + 2 * ImageBytes(c) * patches;
  return Us({17, w.tf32 ? 2.2e8 : 4.5e7, 1.0e6}, ProductOf(w).Operations(), bytes);
}

// F(out x out, 3 x 3): tiles of the images and of the results are written and read.
inline double WinogradUs(const ConvWork& w, int64_t out, const Rate& rate) {
  const Conv& c = w.conv;
  const HW of = w.Is(Pass::kDataGradient) ? c.in : c.out;
  const double tiles = (double)(CeilDiv(of.h, out) * CeilDiv(of.w, out) * c.n);
  const double elements = (double)((out + 2) * (out + 2));
  const double filters = (double)(c.o * c.GroupChannels());
  const double moved = 4 * elements * 2 * (tiles * (double)(c.c + c.o) + filters);
  return Us(rate, 2 * elements * tiles * filters, AllBytes(c) + moved);
}

// Every element of the result is gathered one by one.
inline double DepthwiseUs(const ConvWork& w) {
  const Conv& c = w.conv;
  const double elements = (w.Is(Pass::kDataGradient) ? ImageBytes(c) : OutputBytes(c)) / 4;
  const double terms = elements * (double)Size(c.kernel);
  const double rate = w.Is(Pass::kForward) ? 5e5 : w.Is(Pass::kDataGradient) ? 4e5 : 2.3e5;
  return Us({3, rate, 4e6}, terms, AllBytes(c));
}

// A strided 1 x 1 filter: its positions are copied, and the dense convolution follows.
inline ConvWork CompactOf(ConvWork w) {
  w.conv.in = w.conv.out;
  w.conv.stride = {1, 1};
  return w;
}
inline double CompactCopyUs(const ConvWork& w) {
  const double compact = ImageBytes(CompactOf(w).conv);
  const double spread = w.Is(Pass::kDataGradient) ? ImageBytes(w.conv) : 2 * compact;
  return Us({3, 1, 1.5e6}, 0, compact + spread);
}

// cuDNN's implicit GEMM. A stride costs transposes of the images.
inline double CudnnUs(const ConvWork& w) {
  const Conv& c = w.conv;
  const ConvProduct p = ProductOf(w);
  if (c.Depthwise()) return Us({13, 2.6e6, 9e6}, p.Operations(), AllBytes(c));
  if (w.tf32 && c.GroupChannels() < 4) return kNever;
  const double operations = 2 * Padded(p.m, 64) * Padded(p.n, 64) * Padded(p.k, 16) * p.groups;
  const bool strided = Size(c.stride) > 1;
  const double bytes = AllBytes(c) + (strided ? 2 * ImageBytes(c) : 0);
  if (w.tf32) return Us({30, w.Is(Pass::kFilterGradient) ? 1.6e8 : 3e8, 4e6}, operations, bytes);
  if (w.Is(Pass::kForward)) return Us({10, 4.3e7, 6e6}, operations, bytes);
  return Us({50, w.Is(Pass::kDataGradient) ? 2.7e7 : 4.8e7, strided ? 0.3e6 : 3e6}, operations,
            bytes);
}

}  // namespace cuda
}  // namespace dlsys
