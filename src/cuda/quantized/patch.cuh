// Quantized convolutions of few channels over large images, such as a network's first, by mma of
// bytes without gathering: a block keeps the lines that its positions see in shared memory, in a
// patch, quantized on their way where the image is of floats. A row of a window is bytes in a row
// of the patch, and a word of the operand is shifted out of two of its words; so are those of the
// filters, line by line, each filled up with zeros, once for all tiles that a block makes. A tile
// is 128 positions of neighboring rows of the result by 64 outputs; four warps share its positions.
// What shared memory gives in a clock limits it.
#pragma once
#include <algorithm>

#include "cuda/quantized/mma.cuh"
#include "cuda/quantized/product.cuh"

namespace dlsys {
namespace cuda {

constexpr int kPatchThreads = 128, kPatchRows = 128, kPatchCols = 64;
constexpr int kPatchPitch = kPatchCols + 8;  // words of an input of the filters: no shared banks
constexpr int kWordsOfStep = 8;              // of the inputs of an mma
constexpr int kPatchLoads = 8;               // of a thread at once
constexpr int kMostPatchNbytes = 56 << 10;

// A launch: `tiles` tiles of down x across positions, shared by the blocks of a column of tiles.
struct Patch {
  int down, across, tiles, blocks;
  int window_h, of_line;          // of_line: bytes of a window's row
  int row_words, words;           // of a window's row, and of all of them, in whole steps
  uint32_t last_mask;             // of the bytes in the last word of a row
  int lines, line_nbytes, pitch;  // of the patch; pitch: bytes
  int conv_h, conv_w;
  int weights_at, places_at;  // words of shared memory; sums take the place of the patch
  Divisor by_blocks, by_row_words, by_across, by_tiles_across, by_tiles_down;
};

// Where a tile begins.
struct PatchTile {
  int image, row, col;
};
__device__ __forceinline__ PatchTile PatchTileOf(const Patch& q, int tile) {
  const int line = tile / q.by_tiles_across, image = line / q.by_tiles_down;
  return {image, (line - image * (int)q.by_tiles_down.value) * q.down,
          (tile - line * (int)q.by_tiles_across.value) * q.across};
}

// The filters of the outputs from `first` on, (words, outputs), and where each word of a window
// begins in the patch.
__device__ __forceinline__ void LoadPatchWeights(const Product& p, const Patch& q, int first,
                                                 uint32_t* shared) {
  for (int id = (int)threadIdx.x; id < q.words * kPatchCols; id += kPatchThreads) {
    const int word = id / kPatchCols, col = id % kPatchCols, output = first + col;
    const int line = word / q.by_row_words, in_row = word - line * q.row_words;
    const int k = line * q.of_line + in_row * kQuad, quad = k / kQuad;
    const bool exists = line < q.window_h && output < p.cols;
    const uint32_t* from =
        (const uint32_t*)p.w + (output / kPanel * p.quads + quad) * kPanel + output % kPanel;
    const uint32_t low = exists ? from[0] : 0;
    const uint32_t high = exists && quad + 1 < p.quads ? from[kPanel] : 0;
    const uint32_t mask = in_row + 1 < q.row_words ? ~0u : q.last_mask;
    shared[q.weights_at + word * kPatchPitch + col] = FourBytes(low, high, k % kQuad * 8) & mask;
  }
  for (int word = (int)threadIdx.x; word < q.words; word += kPatchThreads) {
    const int line = word / q.by_row_words;
    const int at = line * q.pitch + (word - line * q.row_words) * kQuad;
    shared[q.places_at + word] = line < q.window_h ? (uint32_t)at : 0;
  }
}

// Copies what a tile sees, or quantizes it: a warp has a line of the patch, or one of a channel.
__device__ __forceinline__ void LoadPatch(const Product& p, const Patch& q, const PatchTile& tile,
                                          uint8_t* to) {
  const int lane = (int)threadIdx.x % 32, channels = p.images ? p.channels : 1;
  const int count = p.images ? q.line_nbytes / p.by_channels : q.line_nbytes;
  const int of_line = p.images ? p.in_w : p.in_w * p.channels;
  const int top = tile.row * p.stride_h - p.pad_h, left = tile.col * p.stride_w - p.pad_w;
  const int begin = p.images ? left : left * p.channels;
  const float unit = p.images ? *p.unit : 1.f, origin = p.images ? (float)*p.origin : 0.f;
  for (int k = (int)threadIdx.x / 32; k < q.lines * channels; k += kPatchThreads / 32) {
    const int line = p.images ? k / p.by_channels : k, c = k - line * channels, h = top + line;
    const int64_t plane = (int64_t)tile.image * channels + c, from = (plane * p.in_h + h) * of_line;
    const bool exists = (unsigned)h < (unsigned)p.in_h;
    for (int first = lane; first < count; first += kPatchLoads * 32) {
      unsigned bytes[kPatchLoads];
      float floats[kPatchLoads];
      bool inside[kPatchLoads];
#pragma unroll
      for (int e = 0; e < kPatchLoads; e++) {
        const int at = begin + first + e * 32;
        inside[e] = exists && (unsigned)at < (unsigned)of_line && first + e * 32 < count;
        bytes[e] = p.pad & 255;
        if (inside[e] && p.images) floats[e] = p.images[from + at];
        if (inside[e] && !p.images) bytes[e] = p.x[from + at];
      }
#pragma unroll
      for (int e = 0; e < kPatchLoads; e++) {
        if (p.images && inside[e]) bytes[e] = QuantizedByte(floats[e], unit, origin);
        if (first + e * 32 < count)
          to[line * q.pitch + (first + e * 32) * channels + c] = (uint8_t)bytes[e];
      }
    }
  }
}

using PatchSums = int32_t[2][kPatchCols / 8][4];

// Where the windows of a thread's rows of the operand begin in the patch.
__device__ __forceinline__ int PatchCorner(const Product& p, const Patch& q, int position) {
  const int within = position < q.down * q.across ? position : 0, i = within / q.by_across;
  const int j = within - i * q.across;
  return i * p.stride_h * q.pitch + j * p.stride_w * p.channels;
}

// Adds the products of a warp's 32 positions by all outputs of a block.
__device__ __forceinline__ void MultiplyPatch(const Product& p, const Patch& q,
                                              const uint32_t* shared, PatchSums& sums) {
  const int lane = (int)threadIdx.x % 32, row = (int)threadIdx.x / 32 * 32 + lane / 4;
  int corners[4];
#pragma unroll
  for (int k = 0; k < 4; k++) corners[k] = PatchCorner(p, q, row + k * 8);
  for (int step = 0; step < q.words; step += kWordsOfStep) {
    uint32_t b[kPatchCols / 8][2], a[2][4];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int word = step + half * 4 + lane % 4, place = (int)shared[q.places_at + word];
      const uint32_t* weights = shared + q.weights_at + word * kPatchPitch + lane / 4;
#pragma unroll
      for (int j = 0; j < kPatchCols / 8; j++) b[j][half] = weights[j * 8];
#pragma unroll
      for (int k = 0; k < 4; k++) {
        const int at = corners[k] + place;
        a[k / 2][half * 2 + k % 2] = FourBytes(shared[at / 4], shared[at / 4 + 1], at % 4 * 8);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int j = 0; j < kPatchCols / 8; j++) MultiplyAddBytes(a[i], b[j], sums[i][j]);
  }
}

// Writes the results of a tile, four neighbors at a time.
__device__ __forceinline__ void StorePatch(const Product& p, const Patch& q, const PatchTile& tile,
                                           int first_col, const Column* columns,
                                           const int32_t* sums) {
  constexpr int kQuads = kPatchCols / 4;
  for (int id = (int)threadIdx.x; id < q.down * q.across * kQuads; id += kPatchThreads) {
    const int position = id / kQuads, col = id % kQuads * 4, i = position / q.by_across;
    const int h = tile.row + i, w = tile.col + position - i * q.across;
    if (h >= q.conv_h || w >= q.conv_w || first_col + col >= p.cols) continue;
    const int32_t* from = sums + position * kPatchPitch + col;
    const int32_t four[4] = {from[0], from[1], from[2], from[3]};
    const int64_t to = (((int64_t)tile.image * q.conv_h + h) * q.conv_w + w) * p.cols;
    StoreFour(p, to + first_col + col, first_col + col, columns + col, four);
  }
}

__global__ void __launch_bounds__(kPatchThreads, 4)
    PatchKernel(const __grid_constant__ Product p, const __grid_constant__ Patch q) {
  __shared__ Column columns[kPatchCols];
  uint32_t* const shared = DynamicShared<uint32_t>();
  const int col_tile = (int)blockIdx.x / q.by_blocks, first_col = col_tile * kPatchCols;
  const int begin = (int)blockIdx.x - col_tile * q.blocks;
  const auto load_weights = [&] {
    LoadPatchWeights(p, q, first_col, shared);
    for (int k = (int)threadIdx.x; k < kPatchCols; k += kPatchThreads)
      CopyColumn(p, first_col + k, columns + k);
    CloseCopies();
  };
  if (p.weights_ready) load_weights();
  GridDependencySynchronize();
  TriggerProgrammaticLaunch();
  if (!p.weights_ready) load_weights();
  WaitForCopies<0>();
  const int warp_row = (int)threadIdx.x / 32 * 32 + (int)threadIdx.x % 32 / 4;
  const int col = (int)threadIdx.x % 4 * 2;
  for (int k = begin; k < q.tiles; k += q.blocks) {
    const PatchTile tile = PatchTileOf(q, k);
    PatchSums sums = {};
    __syncthreads();  // the sums of the tile before have been read
    LoadPatch(p, q, tile, (uint8_t*)shared);
    __syncthreads();
    MultiplyPatch(p, q, shared, sums);
    __syncthreads();  // the patch has been read
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int j = 0; j < kPatchCols / 8; j++)
#pragma unroll
        for (int e = 0; e < 4; e++)
          ((int32_t*)shared)[(warp_row + i * 16 + e / 2 * 8) * kPatchPitch + col + j * 8 + e % 2] =
              sums[i][j][e];
    __syncthreads();
    StorePatch(p, q, tile, first_col, columns, (const int32_t*)shared);
  }
}

// ---- launchers ----

// Lays out a block for a product of windows with `rows` and `cols` that nothing pools; false where
// it does not serve them.
inline bool LayOutPatch(const Product& p, int device, Patch* out) {
  Patch q = {};
  if (p.pool > 1 || p.dilation_h > 1 || p.dilation_w > 1 || p.rows < 1 || p.cols < 1) return false;
  const int64_t positions = p.by_positions.value, window_w = p.by_window_w.value;
  const int64_t of_line = window_w * p.channels, window_h = p.depth / std::max<int64_t>(of_line, 1);
  if (window_h * window_w < 2) return false;
  q.conv_w = (int)p.by_width.value;
  q.conv_h = (int)(positions / q.conv_w);
  const int64_t images = p.rows / positions, tiles_across = CeilDiv(q.conv_w, kPatchRows);
  q.across = (int)CeilDiv(q.conv_w, tiles_across);
  q.down = std::min(kPatchRows / q.across, q.conv_h);
  const int64_t tiles_down = CeilDiv(q.conv_h, q.down), row_words = CeilDiv(of_line, kQuad);
  q.tiles = (int)(images * tiles_down * tiles_across);
  q.window_h = (int)window_h;
  q.of_line = (int)of_line;
  q.row_words = (int)row_words;
  q.last_mask = of_line % kQuad ? (1u << of_line % kQuad * 8) - 1 : ~0u;
  const int64_t words = RoundUp(window_h * row_words, kWordsOfStep);
  const int64_t lines = (int64_t)(q.down - 1) * p.stride_h + window_h;
  const int64_t nbytes = ((int64_t)(q.across - 1) * p.stride_w + window_w) * p.channels;
  const int64_t pitch = RoundUp(nbytes, 4);
  // A word that is shifted reaches beyond the patch, and so do rows that are filled up.
  const int64_t begin = std::max(lines * pitch / 4 + 2, (int64_t)kPatchRows * kPatchPitch);
  if (begin + words * (kPatchPitch + 1) > kMostPatchNbytes / 4) return false;
  const int64_t col_tiles = CeilDiv(p.cols, kPatchCols), each = 4 * Multiprocessors(device);
  q.blocks = (int)std::min<int64_t>(q.tiles, CeilDiv(each, col_tiles));
  q.words = (int)words;
  q.lines = (int)lines;
  q.line_nbytes = (int)nbytes;
  q.pitch = (int)pitch;
  q.weights_at = (int)begin;
  q.places_at = (int)(begin + words * kPatchPitch);
  q.by_blocks = Divisor(q.blocks), q.by_row_words = Divisor(row_words);
  q.by_across = Divisor(q.across);
  q.by_tiles_across = Divisor(tiles_across), q.by_tiles_down = Divisor(tiles_down);
  *out = q;
  return true;
}

inline void LaunchPatch(const char* op, Product p, const Patch& q, DLStream stream) {
  const size_t nbytes = (size_t)(q.places_at + q.words) * sizeof(uint32_t);
  p.weights_ready = InputsAreReady(1, 3);
  LaunchBeside(op, PatchKernel, (unsigned)(CeilDiv(p.cols, kPatchCols) * q.blocks), 1,
               kPatchThreads, nbytes, stream, p, q);
}

}  // namespace cuda
}  // namespace dlsys
