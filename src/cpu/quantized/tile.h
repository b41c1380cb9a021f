// The micro-kernel of products of 8 bits: rows of uint8 times packed int8 weights, accumulated in
// int32, which is exact, and requantized before they are stored. Weights come in panels of 16
// output channels (python/dlsys/ops/quantize.py has the layout): a vector of 64 bytes holds four
// consecutive inputs of each channel. tile.cc has the code for each instruction set.
#pragma once
#include <cstdint>

#include "runtime/registry.h"

namespace dlsys {
namespace cpu {

constexpr int64_t kPanel = 16;      // output channels of a panel
constexpr int64_t kStep = 4;        // inputs of a step
constexpr int64_t kTilePanels = 4;  // panels of a tile at most
constexpr int64_t kTileRows = 6;    // rows of a tile at most

// What becomes of the sums: clip(round(sum * multiplier) + zero, low, high) as uint8, or sum *
// multiplier as float.
struct Requantization {
  const int32_t* bias;      // by channel, from the tile's first
  const float* multiplier;  // likewise
  int32_t zero, low, high;
};

struct QuantizedTile {
  const uint8_t* a;
  int64_t a_row;    // bytes from a row to the next
  int64_t steps;    // of four inputs; rows are padded to that
  const int8_t* w;  // the first panel
  int64_t panel;    // bytes from a panel to the next
  int64_t cols;     // output channels of the tile, at least one of each panel
  Requantization to;
  uint8_t* bytes;  // of the result, null where it is floats
  float* floats;
  int64_t y_row;  // elements from a row to the next
};
using QuantizedTileFunction = void (*)(const QuantizedTile&);

// The micro-kernels of an instruction set, by rows and panels.
struct QuantizedTileKernels {
  static constexpr int kSizes = 4;
  int rows[kSizes];  // ascending, the first 1
  QuantizedTileFunction run[kSizes][kTilePanels];
};

// The kernels for this processor.
const QuantizedTileKernels& CurrentQuantizedTileKernels();

}  // namespace cpu
}  // namespace dlsys
