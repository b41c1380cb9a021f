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
  if (Size(c.kernel) == 1 && Size(c.stride) > 1) return kNever;  // it would read what it skips
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

// Winograd's F(out x out, 3 x 3): tiles of the images and of the results are written and read.
inline double WinogradUs(const ConvWork& w, int64_t out, const Rate& rate) {
  const Conv& c = w.conv;
  if (c.groups > 1) return kNever;  // products of too few channels
  const HW of = w.Is(Pass::kDataGradient) ? c.in : c.out;
  const double tiles = (double)(CeilDiv(of.h, out) * CeilDiv(of.w, out) * c.n);
  const double elements = (double)((out + 2) * (out + 2));
  const double filters = (double)(c.o * c.GroupChannels());
  const double moved = 4 * elements * 2 * (tiles * (double)(c.c + c.o) + filters);
  return Us(rate, 2 * elements * tiles * filters, AllBytes(c) + moved);
}
inline double Winograd2Us(const ConvWork& w) {
  return WinogradUs(w, 2,
                    w.Is(Pass::kFilterGradient) ? Rate{60, 5.0e7, 2.0e6} : Rate{25, 4.0e7, 3.1e6});
}
inline double Winograd4Us(const ConvWork& w) {
  return WinogradUs(w, 4,
                    w.Is(Pass::kFilterGradient) ? Rate{36, 4.8e7, 1.0e6} : Rate{24, 4.0e7, 3.3e6});
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

// cuDNN's implicit GEMM. At tf32 it takes channels by 32, and where the stride skips positions or
// rows are no multiple of 16 bytes, arrays are transposed first.
inline double CudnnGemmUs(const ConvWork& w) {
  const Conv& c = w.conv;
  ConvProduct p = ProductOf(w);
  const double bytes = AllBytes(c);
  if (c.Depthwise()) return Us({13, 2.6e6, 9e6}, p.Operations(), bytes);
  const bool strided = Size(c.stride) > 1;
  if (w.tf32) {
    const double channels = w.Is(Pass::kDataGradient) ? 32 : (double)c.GroupChannels();
    const double padded = Padded(channels, 32) / channels;
    const bool transposed = strided || Size(c.out) % 4;
    const double operations = 2 * Padded(p.m, 64) * p.n * p.k * p.groups * padded;
    const double rate = w.Is(Pass::kFilterGradient) ? 1.6e8 : 2.9e8;
    if (transposed) return Us({20, rate, 3.0e6}, operations, bytes);
    return 16 + std::max(operations / rate, bytes / 4e6);
  }
  const double operations = 2 * Padded(p.m, 64) * Padded(p.n, 64) * Padded(p.k, 16) * p.groups;
  if (w.Is(Pass::kForward)) return Us({10, 4.3e7, 6e6}, operations, bytes);
  if (w.Is(Pass::kDataGradient)) return Us({50, 2.7e7, strided ? 0.2e6 : 3e6}, operations, bytes);
  return Us({50, 4.8e7, 0.6e6}, operations, bytes);
}

// cuDNN's own F(4 x 4, 3 x 3), in float32 at every precision.
inline double CudnnWinogradUs(const ConvWork& w) {
  const HW three{3, 3}, one{1, 1};
  if (!(w.conv.kernel == three) || !(w.conv.stride == one) || w.conv.groups > 1) return kNever;
  return WinogradUs(w, 4,
                    w.Is(Pass::kFilterGradient) ? Rate{40, 6e7, 1.2e6} : Rate{40, 6.0e7, 4.2e6});
}

// cuDNN's products of spectra of the images, in float32 at every precision.
inline double CudnnFftUs(const ConvWork& w) {
  const Conv& c = w.conv;
  const HW one{1, 1};
  const bool fits = c.stride == one && c.dilation == one && c.groups == 1 && Size(c.kernel) > 1;
  if (!fits) return kNever;
  const double high = (double)(c.in.h + 2 * c.pad.h), wide = (double)(c.in.w + 2 * c.pad.w);
  const double frequencies = high * (wide / 2 + 1);
  const double planes = (double)(c.n * c.c + c.n * c.o + c.o * c.c);
  return Us({40, 6e7, 1.8e6}, 8 * (double)(c.n * c.o * c.c) * frequencies,
            8 * planes * frequencies);
}

}  // namespace cuda
}  // namespace dlsys
