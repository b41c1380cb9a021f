// How far off the algorithms of convolution may be, and so which of them a heuristic or the
// autotuner may take for its time alone.
//
// The units of an algorithm bound the error of an element of its result, relative to the magnitudes
// of the element's terms: |error| <= units 2^-24 sum |x f|, of normally distributed float32. They
// are the largest error that was measured over shapes of networks (docs/learn/conv.md), rounded up
// to a power of two. Most algorithms sum the terms as they are, in some order, which measures 3;
// those that transform their operands are in the table. Times alone may decide for an algorithm
// where its units are at most
//     kOfSums + 2 u / 2^-24,
// with u the rounding of operands: 0 at fp32 and 2^-11 at tf32, which may take 2 u off each term.
// kOfSums allows what sums of 64 terms could be off in the worst order. So FFT and Winograd's
// F(2 x 2, 3 x 3) and F(4 x 4, 3 x 3) may be taken at every precision, and cuDNN's F(4 x 4, 5 x 5)
// at none. Whoever names an algorithm gets it.
#pragma once
#include <cstdint>
#include <string>

namespace dlsys {

struct ConvAccuracy {
  const char* algorithm;  // as registered, of any device
  int64_t units;
};
constexpr ConvAccuracy kConvAccuracies[] = {
    {"winograd", 32},
    {"winograd 2x2", 8},
    {"winograd 4x4", 32},
    {"fft", 32},
    {"cudnn", 64},
    {"cudnn fft", 8},
    {"cudnn tiled_fft", 8},
    {"cudnn winograd", 64},
    {"cudnn winograd_in_parts", 64},
    {"cudnn winograd_5x5", 1 << 17},
};

constexpr int64_t kOfSums = 64;
constexpr int64_t MostUnits(bool tf32) { return kOfSums + (tf32 ? 2 << (24 - 11) : 0); }

// Whether times alone may decide for an algorithm at fp32, or at tf32.
inline bool IsAccurate(const std::string& algorithm, bool tf32) {
  for (const ConvAccuracy& known : kConvAccuracies)
    if (algorithm == known.algorithm) return known.units <= MostUnits(tf32);
  return true;
}

}  // namespace dlsys
