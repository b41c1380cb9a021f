// The cost model of convolutions: how long each algorithm takes for one, and so which one `auto`
// runs by. docs/learn/conv.md explains it, `python benchmarks conv --variants` checks it.
//
// A convolution or a gradient of it is a product of matrices (m, k) (k, n) for each group. An
// algorithm takes a fixed time for its launches, and more for what it multiplies and what it moves:
// us = fixed + operations / rate + bytes / bandwidth. Rates were fitted to times in captured graphs
// on an H200, of the networks in benchmarks/operators/conv.py and others; other chips scale all of
// them alike, which rarely changes the order.
#pragma once
#include <algorithm>
#include <cmath>

#include "math/int_math.h"
#include "operators/conv_geometry.h"

namespace dlsys {
namespace cuda {

enum class Pass { kForward, kDataGradient, kFilterGradient };

struct ConvWork {
  Conv conv;
  Pass pass;
  bool tf32;
  int multiprocessors, device;

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

// Tiles of m x n, and their rate relative to the fastest. A block alone on a multiprocessor takes
// the time of `alone` waves, since nothing hides its latency.
struct ConvTile {
  double m, n, speed, alone = 1;
};

// The operations of all tiles, padding and unfilled waves of blocks included, by the tiles that
// have the fewest, as the kernels choose them. A tile begins and ends at the cost of `prologue`
// more of K. Sums of less than a wave are split, which leaves no multiprocessor without work.
template <size_t kCount>
double TiledOperations(const ConvTile (&tiles)[kCount], const ConvWork& w, double prologue) {
  const ConvProduct p = ProductOf(w);
  const bool split = w.Is(Pass::kFilterGradient);
  double least = kNever, taken = kNever;
  for (const ConvTile& t : tiles) {
    const double blocks = std::ceil(p.m / t.m) * std::ceil(p.n / t.n) * p.groups;
    const double waves = blocks / w.multiprocessors;
    const double all = split && waves < 1 ? waves : std::ceil(waves);
    const double wave = w.multiprocessors * t.m * t.n / t.speed;
    if ((split ? waves : all) * wave >= least) continue;
    least = (split ? waves : all) * wave;
    taken = wave * (split ? all : std::max(all, t.alone));
  }
  return 2 * (p.k + prologue) * taken;
}

// ---- what each algorithm takes, in microseconds ----

constexpr double kHidden = 1e30;  // bytes a microsecond, of copies behind multiplications

// Implicit GEMM by FFMA; a gradient for the data at a stride is one for each phase, and writes
// every second float.
inline double FmaUs(const ConvWork& w) {
  constexpr ConvTile kTiles[] = {
      {128, 128, 1}, {64, 128, 0.95}, {32, 128, 0.75}, {16, 128, 0.5, 4.2}, {32, 32, 0.4}};
  constexpr double kPrologue = 32;
  const double operations = TiledOperations(kTiles, w, kPrologue);
  if (w.Is(Pass::kFilterGradient)) return Us({10, 3.5e7, kHidden}, operations, 0);
  if (w.IsStridedGradient()) return Us({5, 2.3e7, 0.8e6}, operations, AllBytes(w.conv));
  return Us({2.5, 3.0e7, kHidden}, operations, 0);
}

// Implicit GEMM by mma. The filter's gradient needs the runs of its channels in shared memory.
inline double MmaUs(const ConvWork& w) {
  constexpr ConvTile kTiles[] = {{64, 256, 1, 1.7},
                                 {64, 192, 0.97, 1.7},
                                 {64, 128, 0.93, 1.7},
                                 {32, 256, 0.82, 1.7},
                                 {32, 128, 0.75, 1.7}};
  constexpr ConvTile kFilterTiles[] = {
      {64, 288, 1}, {32, 288, 0.75}, {16, 160, 0.35}, {32, 16, 0.15}};
  constexpr double kPrologue = 32, kMostRun = 160e3, kOffsets = 30;
  const Conv& c = w.conv;
  const int64_t kernel = Size(c.kernel), channels = c.GroupChannels();
  if (kernel == 1 && Size(c.stride) > 1) return kNever;  // it would read what it skips
  const double bytes = AllBytes(c), stages = std::max(1., (double)kernel / kOffsets);
  if (w.Is(Pass::kFilterGradient)) {
    const double run = 8. * (double)(std::min<int64_t>(channels, 32) * c.in.w * c.kernel.h);
    if (run > kMostRun) return kNever;
    const double rate = channels < 8 ? 7e7 : kernel == 1 ? 7.3e7 : 9.5e7;
    return Us({12, rate, 5e6}, stages * TiledOperations(kFilterTiles, w, 0), bytes);
  }
  const double operations = stages * TiledOperations(kTiles, w, kPrologue);
  if (w.IsStridedGradient()) return Us({23, 9.3e7, 1.5e6}, operations, bytes);
  const ConvProduct p = ProductOf(w);
  const double gathered = 4 * std::ceil(p.m / 64) * p.n * p.k * p.groups / (double)kernel;
  return Us({8.5, 1.5e8, 5.5e6}, operations, bytes) + gathered / 8.5e6;
}

// A batch of products, one for each image; the parts of the filter's gradient are added behind it.
inline double BatchedUs(const ConvWork& w) {
  const Conv& c = w.conv;
  const ConvProduct p = ProductOf(w);
  const bool filter = w.Is(Pass::kFilterGradient), aligned = Size(c.out) % 4 == 0;
  const double n = filter ? p.n : (double)Size(c.out), k = filter ? (double)Size(c.out) : p.k;
  const double operations = 2 * (double)c.n * Padded(p.m, 64) * Padded(n, 64) * k;
  const double bytes = AllBytes(c), parts = filter ? 2 * (double)c.n * FilterBytes(c) : 0;
  if (!w.tf32 && filter) return Us({50, 5.5e7, 6e6}, operations, bytes + parts);
  if (!w.tf32) return Us({17, aligned ? 5.1e7 : 4.6e7, 6.5e6}, operations, bytes);
  if (filter) {
    const double moved = bytes / 4e6 + parts / 3.2e6;
    return 5 + (aligned ? std::max(operations / 3e8, moved) : operations / 1.7e8 + moved);
  }
  const double rate = aligned ? 2.6e8 : 6e7;  // rows that are no multiple of 16 bytes
  return Us({20, rate, 7.5e6}, operations, bytes);
}

// The columns are written and read, and results transposed.
inline double Im2colUs(const ConvWork& w) {
  const Conv& c = w.conv;
  const double patches = (double)(Size(c.out) * Size(c.kernel)) / (double)Size(c.in);
  const double bytes = AllBytes(c) + 2 * OutputBytes(c) + 2 * ImageBytes(c) * patches;
  const double strided = w.IsStridedGradient() ? 3 : 1;
  const bool data = w.Is(Pass::kDataGradient), few = data && c.GroupChannels() < 16;
  const double bandwidth = few ? 0.45e6 : data ? 1.05e6 : Size(c.kernel) > 1 ? 1.25e6 : 2.6e6;
  return Us({17, w.tf32 ? 2.0e8 : 4.3e7, bandwidth}, ProductOf(w).Operations(), strided * bytes);
}

// Winograd's F(out x out, kernel x kernel): tiles of the images and of the results are written and
// read, between products in blocks of 128 x 128.
struct WinogradWork {
  double tiles, elements, bytes;  // elements of a tile

  WinogradWork(const ConvWork& w, int64_t out) {
    const Conv& c = w.conv;
    const HW of = w.Is(Pass::kDataGradient) ? c.in : c.out;
    tiles = (double)(CeilDiv(of.h, out) * CeilDiv(of.w, out) * c.n);
    elements = (double)((out + c.kernel.h - 1) * (out + c.kernel.w - 1));
    bytes = 8 * elements * (tiles * (double)(c.o + c.c) + (double)(c.o * c.GroupChannels()));
    bytes += AllBytes(c);
  }
  double Blocks(const ConvProduct& p, double height) const {
    return elements * p.groups * std::ceil(p.m / height) * std::ceil(tiles / 128);
  }
};
// Of a filter's gradient, whose sums are long and split, results are padded to `rows` x `cols`.
inline double WinogradUs(const ConvWork& w, int64_t out, const Rate& rate, double rows = 1,
                         double cols = 1) {
  const Conv& c = w.conv;
  if (c.groups > 1) return kNever;
  const WinogradWork work(w, out);
  const double filters = Padded((double)c.o, rows), channels = Padded((double)c.c, cols);
  if (w.Is(Pass::kFilterGradient))
    return Us(rate, 2 * work.elements * work.tiles * filters * channels, work.bytes);
  const ConvProduct p = ProductOf(w);
  const double height = std::min(p.m, 128.);
  const double all = Padded(work.Blocks(p, height), w.multiprocessors) * height * 128;
  return Us(rate, 2 * all * p.k / (double)Size(c.kernel), work.bytes);
}
// F(4 x 4, 3 x 3) of groups: the products have few channels, and each block takes `block_us` and
// `channel_us` for each of them, over all multiprocessors.
inline double GroupedWinogradUs(const ConvWork& w, double us, double block_us, double channel_us,
                                double bandwidth) {
  if (w.conv.Depthwise()) return kNever;
  const WinogradWork work(w, 4);
  const ConvProduct p = ProductOf(w);
  const double of_block = block_us + channel_us * p.k / (double)Size(w.conv.kernel);
  return us + work.bytes / bandwidth + work.Blocks(p, 32) * of_block;
}
inline double Winograd2Us(const ConvWork& w) {
  const bool filter = w.Is(Pass::kFilterGradient);
  return WinogradUs(w, 2, filter ? Rate{7, 3e8, 1.0e6} : Rate{6.5, 5.6e7, 3.9e6});
}
inline double Winograd4Us(const ConvWork& w) {
  const bool filter = w.Is(Pass::kFilterGradient);
  if (w.conv.groups > 1) {
    const bool few = w.conv.GroupChannels() < 16;
    if (!filter)
      return GroupedWinogradUs(w, 18, w.Is(Pass::kDataGradient) && few ? 6.2e-3 : 2.2e-3, 2.4e-4,
                               3.9e6);
    const double idle = std::max(1., w.multiprocessors / (36. * (double)w.conv.groups));
    return GroupedWinogradUs(w, 5, 0, 0, (few ? 2.9e6 : 2.2e6) / idle);
  }
  return WinogradUs(w, 4, filter ? Rate{5, 4.85e7, 2.0e6} : Rate{18, 4.6e7, 3.9e6}, 128, 64);
}

// Strips of columns: mostly what they move.
inline double DepthwiseUs(const ConvWork& w) {
  const Conv& c = w.conv;
  const double us = w.Is(Pass::kFilterGradient) ? 9 : 3;
  return Us({us, 1.1e7, 4.5e6}, ProductOf(w).Operations(), AllBytes(c));
}

// A strided 1 x 1 filter: its positions are copied, and the dense convolution follows.
inline ConvWork CompactOf(ConvWork w) {
  w.conv.in = w.conv.out;
  w.conv.stride = {1, 1};
  return w;
}
inline double CompactCopyUs(const ConvWork& w) {
  const double met = ImageBytes(w.conv) / (double)w.conv.stride.h;  // rows, read as a whole
  const double other = w.Is(Pass::kDataGradient) ? ImageBytes(w.conv) : met;
  return Us({3, 1, 2.8e6}, 0, ImageBytes(CompactOf(w).conv) + other);
}
inline double CompactUs(const ConvWork& w) {
  const ConvWork dense = CompactOf(w);
  const double mma = w.tf32 ? MmaUs(dense) : kNever;
  return CompactCopyUs(w) + std::min({FmaUs(dense), BatchedUs(dense), mma});
}

// cuDNN's implicit GEMM. At tf32 it takes channels by 32, and where the stride skips positions or
// rows are no multiple of 16 bytes, arrays are transposed first.
inline double CudnnGemmUs(const ConvWork& w) {
  const Conv& c = w.conv;
  const ConvProduct p = ProductOf(w);
  const double bytes = AllBytes(c);
  if (c.Depthwise()) return Us({13, 2.6e6, 9e6}, p.Operations(), bytes);
  const bool filter = w.Is(Pass::kFilterGradient);
  const bool transposed = Size(c.stride) > 1 || Size(c.out) % (filter ? 8 : 4);
  const double operations = 2 * Padded(p.m, 64) * Padded(p.n, 64) * Padded(p.k, 16) * p.groups;
  if (!w.tf32) {
    if (w.Is(Pass::kForward)) {
      const double rows = p.m > 128 ? 256 : p.m > 64 ? 128 : 64, odd = Size(c.out) % 4 ? 1.15 : 1;
      const double few = Size(c.stride) > 1 && c.GroupChannels() < 8 ? 1.7 : 1;
      const double blocks = std::ceil(p.m / rows) * std::ceil(p.n / 128) * p.groups;
      const double all = 2 * Padded(blocks, w.multiprocessors) * rows * 128 * Padded(p.k, 16);
      return Us({4, 4.2e7, 3.5e6}, odd * few * all, bytes);
    }
    if (filter) return Us({150, 4.0e7, 0.36e6}, operations, bytes);
    return w.IsStridedGradient() ? kNever : Us({10, 2.6e7, 2.3e6}, operations, bytes);
  }
  const double channels = (double)c.GroupChannels();
  if (c.groups > 1 && channels <= 32)  // limited by how it reads them
    return filter ? Us({40, 1, 0.48e6}, 0, bytes) : Us({15, 1, 0.88e6}, 0, bytes);
  if (w.Is(Pass::kForward)) {
    const double rows = Padded(p.m, 128) / Padded(p.m, 64);
    return Us({14, 3.0e8, transposed ? 2.0e6 : 5.1e6},
              operations * rows * Padded(channels, 32) / channels, bytes);
  }
  if (filter) {
    const double rows = Padded(p.m, 128) / Padded(p.m, 64),
                 columns = Padded(channels, 8) / channels;
    return Us({Size(c.kernel) > 1 ? 80. : 16, 2.0e8, transposed ? 1.9e6 : 1e7},
              operations * rows * columns, bytes);
  }
  const double wide = 2 * Padded(p.m, 128) * Padded(p.n, 128) * p.k * p.groups;
  return Us({18, transposed ? 5.4e8 : 2.8e8, transposed ? 1.3e6 : 7.6e6}, wide, bytes);
}

// cuDNN's own F(4 x 4, 3 x 3), in float32 at every precision. No precision allows the errors of its
// F(4 x 4, 5 x 5); see operators/conv_accuracy.h.
inline double CudnnWinogradUs(const ConvWork& w) {
  const HW three{3, 3}, one{1, 1};
  if (!(w.conv.kernel == three) || !(w.conv.stride == one)) return kNever;
  const bool filter = w.Is(Pass::kFilterGradient);
  if (w.conv.groups > 1) return filter ? kNever : GroupedWinogradUs(w, 20, 3.7e-3, 5e-5, 3.55e6);
  return WinogradUs(w, 4, filter ? Rate{10, 5.6e7, 2.1e6} : Rate{20, 4.9e7, 3.55e6}, 128, 128);
}

// Products of spectra of planes, in float32 at every precision. cuDNN has whole images in planes of
// a power of two, or tiles of 32 x 32 that overlap.
inline double SpectraUs(const Conv& c, double images, HW plane, const Rate& rate) {
  const double frequencies = (double)(plane.h * (plane.w / 2 + 1)), filters = (double)(c.o * c.c);
  return Us(rate, 8 * images * filters * frequencies,
            8 * (images * (double)(c.c + c.o) + filters) * frequencies);
}
inline bool HasSpectra(const Conv& c) {
  return c.dilation == HW{1, 1} && c.groups == 1 && Size(c.kernel) > 1;
}
inline double CudnnFftUs(const ConvWork& w) {
  const Conv& c = w.conv;
  if (!HasSpectra(c) || Size(c.stride) > 1) return kNever;
  const int64_t reach = std::max(c.kernel.h, c.kernel.w) - 1, pad = std::max(c.pad.h, c.pad.w);
  const int64_t padded = w.Is(Pass::kDataGradient) ? std::max(c.out.h, c.out.w) + 2 * (reach - pad)
                                                   : std::max(c.in.h, c.in.w) + 2 * pad;
  int64_t plane = 16;
  while (plane < padded) plane *= 2;
  const Rate rate = w.Is(Pass::kFilterGradient) ? Rate{12, 3e8, 0.55e6} : Rate{12, 7.5e7, 0.95e6};
  return SpectraUs(c, (double)c.n, {plane, plane}, plane > 32 ? Rate{12, 5e7, 0.5e6} : rate);
}
inline double CudnnTiledFftUs(const ConvWork& w) {
  constexpr int64_t kTile = 32;
  const Conv& c = w.conv;
  if (!HasSpectra(c) || w.Is(Pass::kFilterGradient) || c.kernel.h >= kTile || c.kernel.w >= kTile)
    return kNever;
  const int64_t high = CeilDiv(c.in.h, kTile - c.kernel.h + 1);
  const int64_t wide = CeilDiv(c.in.w, kTile - c.kernel.w + 1);
  const double bandwidth = high > 2 && Size(c.stride) == 1 ? 0.6e6 : 1.1e6;
  return SpectraUs(c, (double)(c.n * high * wide), {kTile, kTile}, {20, 9e7, bandwidth});
}

// The rung `fft`, in planes as small as may be; its products are for few channels, and it is worth
// a thought where planes are small.
inline double FftUs(const ConvWork& w) {
  constexpr int64_t kMost = 32;
  const Conv& c = w.conv;
  if (!HasSpectra(c) || w.Is(Pass::kFilterGradient) || std::max(c.in.h, c.in.w) > kMost)
    return kNever;
  const HW plane{std::max(c.pad.h + c.in.h, (c.out.h - 1) * c.stride.h + c.kernel.h),
                 std::max(c.pad.w + c.in.w, (c.out.w - 1) * c.stride.w + c.kernel.w)};
  return SpectraUs(c, (double)c.n, plane, {40, 5.8e6, 0.45e6});
}

}  // namespace cuda
}  // namespace dlsys
