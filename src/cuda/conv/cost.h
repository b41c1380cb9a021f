// The cost model of convolutions: how long each algorithm takes for one, and so which one `auto`
// runs by. docs/learn/conv.md explains it, `python benchmarks conv --variants` checks it.
//
// A convolution or a gradient of it is a product of matrices (m, k) (k, n) for each group. An
// algorithm launches kernels, moves bytes and multiplies, at rates that were measured in captured
// graphs on an H200; other chips scale all of them alike, which rarely changes the order.
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
};

constexpr double kNever = 1e30;         // us of what would be computed for nothing
constexpr double kConvLaunchUs = 2.5;   // of a kernel behind another one
constexpr double kConvBytesUs = 3.4e6;  // bytes that a kernel reads and writes in a microsecond
constexpr double kLibraryUs = 8;        // of a call of cuBLAS or cuDNN, which launches several

// FLOP in a microsecond of full tiles, at fp32 and at tf32.
constexpr double kFmaRate = 3.6e7;
constexpr double kMmaRate = 1.0e8;
constexpr double kMmaFilterRate = 8e7;
constexpr double kBatchedRate[] = {4.2e7, 2.2e8};
constexpr double kColumnsRate[] = {4.5e7, 3e8};  // of the product behind im2col
constexpr double kCudnnRate[] = {4.2e7, 2.4e8};
constexpr double kWinogradRate = 4.0e7;  // of its products
constexpr double kDepthwiseRate = 4e6;   // of elements that are read one by one
constexpr double kSpectraRate = 8e6;     // of the products of spectra

// ---- what there is to do ----

struct ConvProduct {
  double m, n, k, groups;
  double Flop() const { return 2 * m * n * k * groups; }
};

inline ConvProduct ProductOf(const ConvWork& w) {
  const Conv& c = w.conv;
  const double filters = (double)c.GroupFilters(), channels = (double)c.GroupChannels();
  const double kernel = (double)Size(c.kernel), outputs = (double)(c.n * Size(c.out));
  const double inputs = (double)(c.n * Size(c.in)), groups = (double)c.groups;
  if (w.pass == Pass::kForward) return {filters, outputs, channels * kernel, groups};
  if (w.pass == Pass::kFilterGradient) return {filters, channels * kernel, outputs, groups};
  const double met = std::max(kernel / (double)Size(c.stride), 1.);  // kernel offsets of an element
  return {channels, inputs, filters * met, groups};
}

inline double ImageBytes(const Conv& c) { return 4. * (double)(c.n * c.c * Size(c.in)); }
inline double OutputBytes(const Conv& c) { return 4. * (double)(c.n * c.o * Size(c.out)); }
inline double FilterBytes(const Conv& c) {
  return 4. * (double)(c.o * c.GroupChannels() * Size(c.kernel));
}
inline double AllBytes(const Conv& c) { return ImageBytes(c) + OutputBytes(c) + FilterBytes(c); }

inline double Padded(double extent, double tile) { return std::ceil(extent / tile) * tile; }
inline double MoveUs(double bytes) { return bytes / kConvBytesUs; }

// Tiles of m x n, and their rate relative to the fastest.
struct ConvTile {
  double m, n, speed;
};

// The least FLOP of the tiles that a multiprocessor goes through, times their number: what counts
// for time. A split sum leaves no multiprocessor without work.
template <size_t kCount>
double TiledFlop(const ConvTile (&tiles)[kCount], const ConvProduct& p, int multiprocessors,
                 bool split) {
  double least = kNever;
  for (const ConvTile& t : tiles) {
    const double blocks = std::ceil(p.m / t.m) * std::ceil(p.n / t.n) * p.groups;
    const double waves = split ? blocks / multiprocessors : std::ceil(blocks / multiprocessors);
    least = std::min(least, waves * multiprocessors * t.m * t.n / t.speed);
  }
  return 2 * p.k * least;
}

// ---- what each algorithm takes, in microseconds ----

// Implicit GEMM by FFMA; a gradient for the data at a stride has a launch for each phase.
inline double FmaUs(const ConvWork& w) {
  constexpr ConvTile kTiles[] = {
      {128, 128, 1}, {64, 128, 0.95}, {32, 128, 0.75}, {16, 128, 0.5}, {32, 32, 0.4}};
  const bool filter = w.pass == Pass::kFilterGradient;
  const double launches = filter                          ? 2
                          : w.pass == Pass::kDataGradient ? (double)Size(w.conv.stride)
                                                          : 1;
  const double flop = TiledFlop(kTiles, ProductOf(w), w.multiprocessors, filter);
  return launches * kConvLaunchUs + std::max(flop / kFmaRate, MoveUs(AllBytes(w.conv)));
}

// Implicit GEMM by mma.
inline double MmaUs(const ConvWork& w) {
  constexpr ConvTile kTiles[] = {
      {64, 256, 1}, {64, 192, 0.97}, {64, 128, 0.93}, {32, 256, 0.82}, {32, 128, 0.75}};
  constexpr ConvTile kFilterTiles[] = {
      {64, 288, 1}, {32, 288, 0.75}, {16, 160, 0.35}, {32, 16, 0.15}};
  const ConvProduct p = ProductOf(w);
  if (w.pass == Pass::kFilterGradient)
    return 2 * kConvLaunchUs +
           std::max(TiledFlop(kFilterTiles, p, w.multiprocessors, true) / kMmaFilterRate,
                    MoveUs(AllBytes(w.conv)));
  const double launches =
      2 * (w.pass == Pass::kDataGradient ? (double)Size(w.conv.stride) : 1);  // packed filters
  return launches * kConvLaunchUs +
         std::max(TiledFlop(kTiles, p, w.multiprocessors, false) / kMmaRate,
                  MoveUs(AllBytes(w.conv)));
}

// A batch of products, one for each image; the filter's gradients are added behind it.
inline double BatchedUs(const ConvWork& w) {
  const Conv& c = w.conv;
  const double positions = (double)Size(c.out), images = (double)c.n;
  const double rate = kBatchedRate[w.tf32] / (Size(c.out) % 4 ? 3 : 1);  // rows off 16 bytes
  const bool filter = w.pass == Pass::kFilterGradient;
  const double m = w.pass == Pass::kDataGradient ? (double)c.c : (double)c.o;
  const double n = filter ? (double)c.c : positions;
  const double k = filter ? positions : (double)(c.c * c.o) / m;
  const double flop = 2 * images * Padded(m, 64) * Padded(n, 64) * k;
  const double parts = filter ? images * FilterBytes(c) : 0;
  return kLibraryUs + std::max(flop / rate, MoveUs(AllBytes(c) + parts)) + MoveUs(parts);
}

// The columns are written and read, and results transposed.
inline double Im2colUs(const ConvWork& w) {
  const Conv& c = w.conv;
  const double columns =
      ImageBytes(c) / (double)Size(c.in) * (double)(Size(c.out) * Size(c.kernel));
  const double bytes = AllBytes(c) + 2 * columns + 2 * OutputBytes(c);
  return kLibraryUs + 2 * kConvLaunchUs + MoveUs(bytes) +
         ProductOf(w).Flop() / kColumnsRate[w.tf32];
}

// F(out x out, 3 x 3): tiles of the images and of the results are written and read.
inline double WinogradUs(const ConvWork& w, int64_t out) {
  const Conv& c = w.conv;
  const HW of = w.pass == Pass::kDataGradient ? c.in : c.out;
  const double tiles = (double)(CeilDiv(of.h, out) * CeilDiv(of.w, out) * c.n);
  const double elements = (double)((out + 2) * (out + 2));
  const double moved = 4 * elements * 2 * tiles * (double)(c.c + c.o) +
                       4 * elements * 2 * (double)(c.o * c.GroupChannels());
  const double flop = 2 * elements * tiles * (double)(c.o * c.GroupChannels());
  return kLibraryUs + 4 * kConvLaunchUs + MoveUs(AllBytes(c) + moved) + flop / kWinogradRate;
}

// Every element of the result is gathered one by one.
inline double DepthwiseUs(const ConvWork& w) {
  const double flop = 2. * (double)(w.conv.n * w.conv.o * Size(w.conv.out) * Size(w.conv.kernel));
  return kConvLaunchUs + std::max(flop / kDepthwiseRate, MoveUs(AllBytes(w.conv)));
}

// cuDNN's implicit GEMM; at tf32 arrays are transposed to NHWC and back.
inline double CudnnUs(const ConvWork& w) {
  const ConvProduct p = ProductOf(w);
  const double flop = 2 * Padded(p.m, 64) * Padded(p.n, 64) * Padded(p.k, 16) * p.groups;
  const double moved = (w.tf32 ? 3 : 1) * AllBytes(w.conv);
  return kLibraryUs + std::max(flop / kCudnnRate[w.tf32], MoveUs(moved));
}

// A strided 1 x 1 filter: its positions are copied, and the dense convolution follows.
inline ConvWork CompactOf(ConvWork w) {
  w.conv.in = w.conv.out;
  w.conv.stride = {1, 1};
  return w;
}
inline double CompactCopyUs(const ConvWork& w) {
  const double compact = ImageBytes(CompactOf(w).conv);
  return kConvLaunchUs +
         MoveUs(compact + (w.pass == Pass::kDataGradient ? ImageBytes(w.conv) : 2 * compact));
}

}  // namespace cuda
}  // namespace dlsys
