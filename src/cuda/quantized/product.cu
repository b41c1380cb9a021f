// quantized_matmul and quantized_conv2d on the GPU: implicit GEMM on tensor cores, uint8 rows times
// packed int8 weights (mma m16n8k32), accumulated in int32, which is exact, so that bits depend on
// no order. Images are (N, H, W, C): M = output positions, N = output channels, K = (row, column,
// channel) of a window. Operands pass through a ring of shared panels (cp.async); where the image
// ends, what stands for 0 is written instead. Bias, bounds and requantization are the epilogue.
// python/dlsys/ops/quantize.py has the layout of the weights: words of four consecutive inputs, as
// mma takes them. The result overlaps no input. Loads limit them. Where channels are no multiple of
// 16, direct.cuh serves small images and patch.cuh larger ones; of others, such as those
// whose windows are of one element, inputs are gathered byte by byte.
//
// Where tiles are few, the blocks of a cluster share one, each with a slice of K, and add their
// sums through distributed shared memory; the weights' first panels are on their way before the
// predecessor on the stream has ended, where that does not write them. Latency limits them.
// quantized_conv2d_fused begins with the quantization of its images, or ends with a sum or with
// windows of 2 x 2, whose four positions are rows beside each other.
#include <algorithm>

#include "cuda/quantized/direct.cuh"
#include "cuda/quantized/mma.cuh"
#include "cuda/quantized/patch.cuh"
#include "cuda/quantized/product.cuh"
#include "operators/conv_geometry.h"

namespace dlsys {
namespace cuda {
namespace {

constexpr int kProductThreads = 128;  // two by two warps
constexpr int kStep = 64;             // bytes of K of a stage
constexpr int kStages = 3;            // of the ring of panels
constexpr int kChunks = kStep / 16;   // copies of a row
constexpr int kRowsOfPass = kProductThreads / kChunks;
constexpr int kMostSplits = kPortableCluster;
constexpr int kDeep = 8 * kStep;        // of K, from which on two blocks may share a large tile
constexpr int kMostPlaces = 8 * kStep;  // of K that is gathered, in a block's table

struct alignas(16) Sixteen {  // bytes, that are moved together
  uint32_t words[4];
};

template <int kM, int kN>
struct Tile {
  static constexpr int kRows = kM, kCols = kN;
  static constexpr int kWarpRows = kM / 2, kWarpCols = kN / 2;
  static constexpr int kStageWords = (kM + kN) * kStep / 4;
  static constexpr int kResident = kM > 64 ? 4 : 1;  // blocks that registers leave room for
  static constexpr int kPitch = kN + 16;  // bytes of a row of the result in shared memory
  static constexpr int kNbytes = kStages * kStageWords * 4;
  static_assert(kM * kPitch <= kNbytes);
};
using Large = Tile<128, 64>;
using Small = Tile<32, 32>;

// Where the window of a row begins: rows go through the positions of windows that are pooled.
struct Corner {
  int image, h, w;
};
__device__ __forceinline__ Corner CornerOf(const Product& p, int row) {
  const int window = row / p.by_pool, inner = row - window * (int)p.by_pool.value;
  const int image = window / p.by_positions, rest = window - image * (int)p.by_positions.value;
  const int i = rest / p.by_width, j = rest - i * (int)p.by_width.value;
  const int down = i * p.pool + inner / p.pool, across = j * p.pool + inner % p.pool;
  return {image, down * p.stride_h - p.pad_h, across * p.stride_w - p.pad_w};
}

// Where a word of the rows lies in their panel: chunks of 16 bytes are swizzled, so that the eight
// rows that a warp reads at once share no banks.
__device__ __forceinline__ int InRows(int row, int chunk, int word) {
  return row * (kStep / 4) + (chunk ^ (row >> 1 & 3)) * 4 + word;
}
// The same for the weights: a panel has 16 words for each four inputs.
__device__ __forceinline__ int InWeights(int col, int quad) {
  return (col / kPanel * (kStep / kQuad) + quad) * kPanel + (col % kPanel ^ (quad >> 1 & 1) * 8);
}

// Where an input of a window lies, beside its corner: `at` is the distance in the array.
struct Place {
  int at, h, w;
};

// The rows of a tile: windows, gathered from the images, 16 bytes at a time or one by one.
template <int kRows, bool kAligned>
class Windows {
 public:
  // places: those of the K of this block from `from` on, where there is room for them, or null.
  __device__ Windows(const Product& p, int first, const Place* places, int from)
      : p_(p), places_(places), from_(from) {
#pragma unroll
    for (int q = 0; q < kPasses; q++) {
      const int row = first + Row(q);
      const Corner corner = CornerOf(p, row);
      h_[q] = row < p.rows ? corner.h : kNowhere;
      w_[q] = corner.w;
      at_[q] = At(corner.image, corner.h, corner.w, 0);
    }
  }

  __device__ __forceinline__ void Load(uint32_t* panel, int k0) const {
    const int k = k0 + Chunk() * 16;
    const Place place = kAligned ? PlaceOf(p_, k) : Place{};
#pragma unroll
    for (int q = 0; q < kPasses; q++) {
      uint32_t* to = panel + InRows(Row(q), Chunk(), 0);
      if (kAligned && IsInside(q, place)) {
        CopyAsync16((float*)to, (const float*)(p_.x + at_[q] + place.at), true);
        continue;
      }
      Sixteen made = {{p_.pad, p_.pad, p_.pad, p_.pad}};
      if (!kAligned) Gather(q, k, made);
      *(Sixteen*)to = made;
    }
  }

  static __device__ __forceinline__ Place PlaceOf(const Product& p, int k) {
    const int offset = k / p.by_channels, c = k - offset * p.channels;
    const int i = offset / p.by_window_w, j = offset - i * (int)p.by_window_w.value;
    const int h = i * p.dilation_h, w = j * p.dilation_w;
    const int at =
        !kAligned && p.images ? (c * p.in_h + h) * p.in_w + w : (h * p.in_w + w) * p.channels + c;
    return {k < p.depth ? at : 0, k < p.depth ? h : kNowhere, w};
  }

 private:
  static constexpr int kPasses = kRows / kRowsOfPass;
  static constexpr int kNowhere = -(1 << 30);  // a line that is in no image
  __device__ static __forceinline__ int Chunk() { return (int)threadIdx.x % kChunks; }
  __device__ static __forceinline__ int Row(int q) {
    return (int)threadIdx.x / kChunks + q * kRowsOfPass;
  }
  __device__ __forceinline__ int64_t At(int image, int h, int w, int c) const {
    const int64_t line = (int64_t)image * p_.in_h * (!kAligned && p_.images ? p_.channels : 1) + h;
    return !kAligned && p_.images ? line * p_.in_w + w : (line * p_.in_w + w) * p_.channels + c;
  }
  __device__ __forceinline__ bool IsInside(int q, const Place& place) const {
    return (unsigned)(h_[q] + place.h) < (unsigned)p_.in_h &&
           (unsigned)(w_[q] + place.w) < (unsigned)p_.in_w;
  }

  // Sixteen bytes from k on: all loads are under way before the first is looked at.
  __device__ __forceinline__ void Gather(int q, int k, Sixteen& made) const {
    bool inside[16];
    unsigned bytes[16];
    float floats[16];
#pragma unroll
    for (int e = 0; e < 16; e++) {
      const Place place = places_ ? places_[k + e - from_] : PlaceOf(p_, k + e);
      inside[e] = IsInside(q, place);
      if (p_.images)
        floats[e] = inside[e] ? p_.images[at_[q] + place.at] : 0.f;
      else
        bytes[e] = inside[e] ? p_.x[at_[q] + place.at] : 0u;
    }
    const float unit = p_.images ? *p_.unit : 1.f, origin = p_.images ? *p_.origin : 0.f;
#pragma unroll
    for (int e = 0; e < 16; e++) {
      if (p_.images) bytes[e] = QuantizedByte(floats[e], unit, origin);
      const unsigned byte = inside[e] ? bytes[e] : p_.pad & 255;
      made.words[e / 4] = (made.words[e / 4] & ~(255u << e % 4 * 8)) | byte << e % 4 * 8;
    }
  }

  const Product& p_;
  const Place* places_;
  int from_, h_[kPasses], w_[kPasses];
  int64_t at_[kPasses];  // of the corners
};

// Copies the weights of a tile's columns; there are zeros behind the last input and panel.
template <int kCols>
__device__ __forceinline__ void LoadWeights(const Product& p, uint32_t* panel, int col, int k0) {
  constexpr int kOfPanel = kStep / kQuad * kPanel / 4;  // copies of 16 bytes
#pragma unroll
  for (int id = threadIdx.x; id < kCols / kPanel * kOfPanel; id += kProductThreads) {
    const int n = id / kOfPanel * kPanel + id % (kPanel / 4) * 4, quad = id % kOfPanel / 4;
    const int64_t from = (int64_t)(col + n) / kPanel * p.quads + k0 / kQuad + quad;
    const bool valid = k0 / kQuad + quad < p.quads && (col + n) / kPanel < p.panels;
    const uint8_t* at = valid ? p.w + (from * kPanel + n % kPanel) * kQuad : p.w;
    CopyAsync16((float*)(panel + InWeights(n, quad)), (const float*)at, valid);
  }
}

// Begins to copy what the sums of a tile's columns are scaled by.
template <int kCols>
__device__ __forceinline__ void LoadColumns(const Product& p, int first, Column* columns) {
  for (int k = threadIdx.x; k < kCols; k += kProductThreads) CopyColumn(p, first + k, columns + k);
}

template <class Tile>
using Sums = int32_t[Tile::kWarpRows / 16][Tile::kWarpCols / 8][4];

template <class Tile>
__device__ __forceinline__ void MultiplyStage(const uint32_t* rows, const uint32_t* weights,
                                              Sums<Tile>& sums) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  // Of those that this lane names for the instruction, and of its own columns.
  const int row = warp / 2 * Tile::kWarpRows + lane % 16;
  const int col = warp % 2 * Tile::kWarpCols + lane / 4;
#pragma unroll
  for (int k = 0; k < kStep / 32; k++) {
    uint32_t b[Tile::kWarpCols / 8][2];
#pragma unroll
    for (int j = 0; j < Tile::kWarpCols / 8; j++)
#pragma unroll
      for (int half = 0; half < 2; half++)
        b[j][half] = weights[InWeights(col + j * 8, k * 8 + half * 4 + lane % 4)];
#pragma unroll
    for (int i = 0; i < Tile::kWarpRows / 16; i++) {
      uint32_t a[4];
      LoadMatrices<false>(rows + InRows(row + i * 16, k * 2 + lane / 16, 0), a);
#pragma unroll
      for (int j = 0; j < Tile::kWarpCols / 8; j++) MultiplyAddBytes(a, b[j], sums[i][j]);
    }
  }
}

// Calls body(row, col, left, right) for each two neighbors of a thread's sums, by their place in
// the tile, column by column.
template <class Tile, class F>
__device__ __forceinline__ void ForPairs(const Sums<Tile>& sums, const F& body) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int row = warp / 2 * Tile::kWarpRows + lane / 4;
  const int col = warp % 2 * Tile::kWarpCols + lane % 4 * 2;
#pragma unroll
  for (int j = 0; j < Tile::kWarpCols / 8; j++)
#pragma unroll
    for (int i = 0; i < Tile::kWarpRows / 16; i++)
#pragma unroll
      for (int half = 0; half < 2; half++)
        body(row + i * 16 + half * 8, col + j * 8, sums[i][j][2 * half], sums[i][j][2 * half + 1]);
}

// The sums behind a product of sixteen of its results.
__device__ __forceinline__ Sixteen SumOf(const Product& p, const Sixteen& made,
                                         const Sixteen& added) {
  Sixteen sum;
#pragma unroll
  for (int q = 0; q < 4; q++) {
    sum.words[q] = 0;
#pragma unroll
    for (int e = 0; e < 32; e += 8)
      sum.words[q] |= (uint32_t)WithResidual(p, made.words[q] >> e & 255, added.words[q] >> e & 255)
                      << e;
  }
  return sum;
}

// Requantizes a tile and writes it, bytes through shared memory, so that they leave 16 at a time.
template <class Tile>
__device__ __forceinline__ void Store(const Product& p, const Sums<Tile>& sums, int first_row,
                                      int first_col, const Column* columns, uint8_t* shared) {
  if (p.floats) {
    ForPairs<Tile>(sums, [&](int row, int col, int32_t left, int32_t right) {
      float* to = p.floats + (int64_t)(first_row + row) * p.cols + first_col + col;
      if (first_row + row >= p.rows) return;
      if (first_col + col < p.cols) to[0] = columns[col].Scaled(left);
      if (first_col + col + 1 < p.cols) to[1] = columns[col + 1].Scaled(right);
    });
    return;
  }
  __syncthreads();  // the panels have been read
  ForPairs<Tile>(sums, [&](int row, int col, int32_t left, int32_t right) {
    const int both = Requantized(p, columns[col], left) | Requantized(p, columns[col + 1], right)
                                                              << 8;
    *(uint16_t*)(shared + row * Tile::kPitch + col) = (uint16_t)both;
  });
  __syncthreads();
  const int rows = min(Tile::kRows, p.rows - first_row),
            cols = min(Tile::kCols, p.cols - first_col);
  const int64_t corner = (int64_t)first_row * p.cols + first_col;
  const uint8_t* added = p.residual.bytes ? p.residual.bytes + corner : nullptr;
  uint8_t* to = p.bytes + corner;
  if (p.aligned_out) {
    constexpr int kAcross = Tile::kCols / 16;
#pragma unroll 4
    for (int k = threadIdx.x; k < rows * kAcross; k += kProductThreads) {
      const int row = k / kAcross, col = k % kAcross * 16;
      const int64_t at = (int64_t)row * p.cols + col;
      if (col >= cols) continue;
      const Sixteen made = *(const Sixteen*)(shared + row * Tile::kPitch + col);
      *(Sixteen*)(to + at) = added ? SumOf(p, made, *(const Sixteen*)(added + at)) : made;
    }
  } else {
    for (int k = threadIdx.x; k < rows * Tile::kCols; k += kProductThreads) {
      const int row = k / Tile::kCols, col = k % Tile::kCols;
      const int64_t at = (int64_t)row * p.cols + col;
      if (col >= cols) continue;
      const int made = shared[row * Tile::kPitch + col];
      to[at] = (uint8_t)(added ? WithResidual(p, made, added[at]) : made);
    }
  }
}

// Adds the sums of all blocks of the cluster, pools, and requantizes: a block does its share of the
// tile's rows.
template <class Tile>
__device__ __forceinline__ void StoreShare(const Product& p, int rank, int first_row, int first_col,
                                           const Column* columns, const int32_t* sums) {
  constexpr int kQuads = Tile::kCols / 4;
  const int positions = p.pool * p.pool, share = Tile::kRows / p.splits;
  for (int id = (int)threadIdx.x; id < share / positions * kQuads; id += kProductThreads) {
    const int local = rank * share + id / kQuads * positions, quad = id % kQuads * 4;
    const int col = first_col + quad, row = first_row + local;
    if (row >= p.rows || col >= p.cols) continue;
    int32_t largest[4];
    for (int position = 0; position < positions; position++) {
      int32_t sum[4] = {};
      const int32_t* from = sums + (local + position) * Tile::kCols + quad;
#pragma unroll 4
      for (int peer = 0; peer < p.splits; peer++) {
        const Sixteen part = *(const Sixteen*)OfPeer((const float*)from, peer);
#pragma unroll
        for (int e = 0; e < 4; e++) sum[e] += (int32_t)part.words[e];
      }
#pragma unroll
      for (int e = 0; e < 4; e++) largest[e] = position ? max(largest[e], sum[e]) : sum[e];
    }
    StoreFour(p, (int64_t)(row / p.by_pool) * p.cols + col, col, columns + quad, largest);
  }
}

template <class Tile, bool kAligned>
__global__ void __launch_bounds__(kProductThreads, Tile::kResident) ProductKernel(const Product p) {
  uint32_t* shared = DynamicShared<uint32_t>();
  const int tile = (int)blockIdx.x / p.by_splits, rank = (int)blockIdx.x - tile * p.splits;
  const int down = tile / p.by_col_tiles, first_row = down * Tile::kRows;
  const int first_col = (tile - down * (int)p.by_col_tiles.value) * Tile::kCols;
  using Rows = Windows<Tile::kRows, kAligned>;
  __shared__ Column columns[Tile::kCols];
  __shared__ Place places[kAligned ? 1 : kMostPlaces];
  const int begin = rank * p.slice;
  const int end = min(begin + p.slice, (p.depth + kStep - 1) / kStep);
  const int gathered = kAligned ? 0 : (end - begin) * kStep;
  const bool has_places = !kAligned && gathered <= kMostPlaces;
  for (int k = threadIdx.x; has_places && k < gathered; k += kProductThreads)
    places[k] = Rows::PlaceOf(p, begin * kStep + k);
  if (has_places) __syncthreads();
  const Rows windows(p, first_row, has_places ? places : nullptr, begin * kStep);
  const auto stage = [&](int step) {
    return shared + (step - begin) % kStages * Tile::kStageWords;
  };
  const auto load_weights = [&](int step) {
    if (step < end)
      LoadWeights<Tile::kCols>(p, stage(step) + Tile::kRows * kStep / 4, first_col, step * kStep);
  };
  const auto load_rows = [&](int step) {
    if (step < end) windows.Load(stage(step), step * kStep);
    CloseCopies();
  };
  if (p.weights_ready) {
    LoadColumns<Tile::kCols>(p, first_col, columns);
#pragma unroll
    for (int step = 0; step < kStages - 1; step++) load_weights(begin + step);
  }
  GridDependencySynchronize();
  TriggerProgrammaticLaunch();
  if (!p.weights_ready) LoadColumns<Tile::kCols>(p, first_col, columns);
#pragma unroll
  for (int step = 0; step < kStages - 1; step++) {
    if (!p.weights_ready) load_weights(begin + step);
    load_rows(begin + step);
  }
  Sums<Tile> sums = {};
  for (int step = begin; step < end; step++) {
    WaitForCopies<kStages - 2>();
    __syncthreads();
    load_weights(step + kStages - 1);
    load_rows(step + kStages - 1);
    const uint32_t* ready = stage(step);
    MultiplyStage<Tile>(ready, ready + Tile::kRows * kStep / 4, sums);
  }
  WaitForCopies<0>();
  if (!p.IsShared()) return Store<Tile>(p, sums, first_row, first_col, columns, (uint8_t*)shared);
  __syncthreads();  // the panels have been read
  ForPairs<Tile>(sums, [&](int row, int col, int32_t left, int32_t right) {
    ((int32_t*)shared)[row * Tile::kCols + col] = left;
    ((int32_t*)shared)[row * Tile::kCols + col + 1] = right;
  });
  __syncthreads();
  if (p.splits > 1) MeetCluster();
  StoreShare<Tile>(p, rank, first_row, first_col, columns, (const int32_t*)shared);
  if (p.splits > 1) LeaveCluster();
}

// ---- launchers ----

// Slices of K: as many as give every multiprocessor a block, a power of 2.
int64_t SplitsOf(const Product& p, int64_t tiles, int device) {
  if (ComputeMajor(device) < 9) return 1;
  const int64_t steps = CeilDiv(p.depth, kStep), most = std::min<int64_t>(steps, kMostSplits);
  int64_t splits = 1;
  while (2 * splits <= most && 2 * splits * tiles <= 2 * Multiprocessors(device)) splits *= 2;
  return splits;
}

template <class Tile, bool kAligned>
void LaunchTiles(const char* op, Product p, int device, DLStream stream) {
  const int64_t across = CeilDiv(p.cols, Tile::kCols), down = CeilDiv(p.rows, Tile::kRows);
  const int64_t splits = SplitsOf(p, across * down, device);
  p.by_col_tiles = Divisor(across);
  p.by_pool = Divisor(p.pool * p.pool);
  p.splits = (int)splits;
  p.by_splits = Divisor(splits);
  p.slice = (int)CeilDiv(CeilDiv(p.depth, kStep), splits);
  p.weights_ready = InputsAreReady(1, 3);
  LaunchBeside(op, ProductKernel<Tile, kAligned>, (unsigned)(across * down * splits),
               (unsigned)splits, kProductThreads, Tile::kNbytes, stream, p);
}

// Checks the operands of a product of windows, whose fields about images are set, and launches it.
void Multiply(const char* op, Product p, const DLArray* w, const DLArray* bias,
              const DLArray* multiplier, int64_t zero, int64_t low, int64_t high, DLArray* y,
              DLStream stream) {
  const int64_t n = Numel(bias), quads = CeilDiv(p.depth, kQuad), panels = CeilDiv(n, kPanel);
  const bool packed = w->ndim == 3 && w->shape[0] == panels && w->shape[1] == quads &&
                      w->shape[2] == kPanel * kQuad;
  if (!packed || Numel(multiplier) != n || y->ndim < 1 || y->shape[y->ndim - 1] != n)
    Fail("%s: weights %s do not take %ld inputs to %s", op, ShapeText(w).c_str(), (long)p.depth,
         ShapeText(y).c_str());
  if (!n || !Numel(y)) return;
  p.pool = std::max(p.pool, 1);
  if (Numel(y) / n > INT32_MAX / 2 / (p.pool * p.pool) || n > INT32_MAX / 2)
    Fail("%s: %s has too many rows or columns", op, ShapeText(y).c_str());
  const bool floats = y->dtype == DL_FLOAT32;
  p.w = In<uint8_t>(op, w);
  p.bias = In<int32_t>(op, bias);
  p.multiplier = In(op, multiplier);
  p.bytes = floats ? nullptr : Out<uint8_t>(op, y);
  p.floats = floats ? Out(op, y) : nullptr;
  p.rows = (int)(Numel(y) / n) * p.pool * p.pool;
  p.cols = (int)n;
  p.quads = (int)quads;
  p.panels = (int)panels;
  p.zero = (int)zero;
  p.low = (int)low;
  p.high = (int)high;
  p.aligned_out = n % 16 == 0 && Aligned16(y->data) && Aligned16(p.residual.bytes);
  const bool aligned = !p.images && p.channels % 16 == 0 && Aligned16(p.x);
  const int64_t tiles = CeilDiv(n, Large::kCols) * CeilDiv(p.rows, Large::kRows);
  const int device = y->ctx.device_id;
  Direct direct;
  Patch patch;
  if (!aligned && LayOutDirect(p, device, &direct))
    LaunchDirect(op, p, direct, device, stream);
  else if (!aligned && LayOutPatch(p, device, &patch))
    LaunchPatch(op, p, patch, stream);
  else if (!aligned)
    LaunchTiles<Small, false>(op, p, device, stream);
  else if (tiles < Multiprocessors(device) &&
           (2 * tiles < Multiprocessors(device) || p.depth < kDeep))
    LaunchTiles<Small, true>(op, p, device, stream);
  else
    LaunchTiles<Large, true>(op, p, device, stream);
}

void QuantizedMatMul(const DLArray* x, const DLArray* w, const DLArray* bias,
                     const DLArray* multiplier, int64_t zero, int64_t low, int64_t high, DLArray* y,
                     DLStream stream) {
  const char* op = "quantized_matmul";
  Enter(op, y, x, w, bias, multiplier);
  if (x->ndim < 1 || x->shape[x->ndim - 1] > INT32_MAX / 2) Fail("%s: expected x (..., K)", op);
  const int64_t k = x->shape[x->ndim - 1];
  Product p = {};
  p.x = In<uint8_t>(op, x);
  p.in_h = p.in_w = p.stride_h = p.stride_w = p.dilation_h = p.dilation_w = 1;
  p.channels = p.depth = (int)k;
  p.by_channels = Divisor(std::max<int64_t>(k, 1));
  p.by_window_w = p.by_positions = p.by_width = Divisor(1);
  Multiply(op, p, w, bias, multiplier, zero, low, high, y, stream);
}

// A product of the windows of images x, (N, H, W, C) or with `channels_first` (N, C, H, W), to y
// (N, H, W, C), or to windows of pool x pool of it.
Product ConvProduct(const char* op, const DLArray* x, bool channels_first, const DLArray* y,
                    const WindowOptions& windows, int64_t pool, int64_t pad) {
  CheckNchw(op, x);
  CheckNchw(op, y);
  const int64_t *of_x = x->shape, *out = y->shape;
  const int64_t in[4] = {of_x[0], of_x[channels_first ? 2 : 1], of_x[channels_first ? 3 : 2],
                         of_x[channels_first ? 1 : 3]};
  const HW size = windows.size, dilation = windows.dilation;
  const int64_t depth = size.h * size.w * in[3];
  if (size.h < 1 || size.w < 1 || dilation.h < 1 || dilation.w < 1 || in[0] != out[0] ||
      Numel(x) > INT32_MAX || depth > INT32_MAX / 2)
    Fail("%s: windows do not take %s to %s", op, ShapeText(x).c_str(), ShapeText(y).c_str());
  const HW reach{in[1] + size.h * dilation.h, in[2] + size.w * dilation.w};
  CheckAttributes(op, windows.stride, windows.before, reach, {out[1] * pool, out[2] * pool});
  Product p = {};
  p.in_h = (int)in[1];
  p.in_w = (int)in[2];
  p.channels = (int)in[3];
  p.depth = (int)depth;
  p.stride_h = (int)windows.stride.h;
  p.stride_w = (int)windows.stride.w;
  p.pad_h = (int)windows.before.h;
  p.pad_w = (int)windows.before.w;
  p.dilation_h = (int)dilation.h;
  p.dilation_w = (int)dilation.w;
  p.pool = (int)pool;
  p.pad = (unsigned)(pad & 255) * 0x01010101u;
  p.by_channels = Divisor(std::max<int64_t>(in[3], 1));
  p.by_window_w = Divisor(size.w);
  p.by_positions = Divisor(std::max<int64_t>(out[1] * out[2], 1));
  p.by_width = Divisor(std::max<int64_t>(out[2], 1));
  return p;
}

void QuantizedConv2d(const DLArray* x, const DLArray* w, const DLArray* bias,
                     const DLArray* multiplier, Struct<WindowOptions> windows, int64_t pad,
                     int64_t zero, int64_t low, int64_t high, DLArray* y, DLStream stream) {
  const char* op = "quantized_conv2d";
  Enter(op, y, x, w, bias, multiplier);
  Product p = ConvProduct(op, x, false, y, *windows, 1, pad);
  p.x = In<uint8_t>(op, x);
  Multiply(op, p, w, bias, multiplier, zero, low, high, y, stream);
}

// residual: none or one of y's shape; quantization: none, or the unit and the origin of x, which is
// float32 and (N, C, H, W) then, as quantize has them. y are the largest of windows of pool x pool,
// or, with pool 1, all results.
void QuantizedConv2dFused(const DLArray* x, const DLArray* w, const DLArray* bias,
                          const DLArray* multiplier, const DLArrayList* quantization,
                          const DLArrayList* residual, Struct<WindowOptions> windows, int64_t pad,
                          int64_t zero, int64_t low, int64_t high, int64_t pool, float scale_a,
                          float scale_b, float offset, int64_t sum_low, DLArray* y,
                          DLStream stream) {
  const char* op = "quantized_conv2d_fused";
  Enter(op, y, x, w, bias, multiplier);
  if (pool < 1 || pool > kMostPool || (pool > 1 && residual->count) || residual->count > 1)
    Fail("%s: windows of 1 or %d, or one sum, may follow", op, kMostPool);
  Product p = ConvProduct(op, x, quantization->count > 0, y, *windows, pool, pad);
  if (quantization->count) {
    if (quantization->count != 2 || Numel(quantization->arrays[0]) != 1 ||
        Numel(quantization->arrays[1]) != 1)
      Fail("%s: expected one unit and one origin", op);
    Enter(op, y, quantization->arrays[0], quantization->arrays[1]);
    p.images = In(op, x);
    p.unit = In(op, quantization->arrays[0]);
    p.origin = In<uint8_t>(op, quantization->arrays[1]);
  } else {
    p.x = In<uint8_t>(op, x);
  }
  if (residual->count) {
    Enter(op, y, residual->arrays[0]);
    CheckSameShape(op, residual->arrays[0], y);
    p.residual = {In<uint8_t>(op, residual->arrays[0]), scale_a, scale_b, offset, (float)sum_low};
  }
  Multiply(op, p, w, bias, multiplier, zero, low, high, y, stream);
}

// True for few channels, as direct.cuh and patch.cuh serve them; for a sum; and for few tiles,
// whose sums pass through shared memory in any case, where each image is quantized few times.
bool QuantizedConv2dFusedFits(const DLArray* x, const DLArray*, const DLArray*, const DLArray*,
                              const DLArrayList* quantization, const DLArrayList* residual,
                              Struct<WindowOptions> windows, int64_t pad, int64_t, int64_t, int64_t,
                              int64_t pool, float, float, float, int64_t, DLArray* y) {
  const char* op = "quantized_conv2d_fused";
  constexpr int64_t kMostGathered = 1 << 17;
  if (x->ndim != 4 || y->ndim != 4 || !Numel(y)) return false;
  const int device = y->ctx.device_id;
  const int64_t n = y->shape[3], rows = Numel(y) / n * pool * pool;
  Product p = ConvProduct(op, x, quantization->count > 0, y, *windows, pool, pad);
  Direct direct;
  Patch patch;
  p.rows = (int)rows;
  p.cols = (int)n;
  const bool gathers = quantization->count || p.channels % 16;
  if (gathers && rows <= INT32_MAX / 2 &&
      (LayOutDirect(p, device, &direct) || LayOutPatch(p, device, &patch)))
    return true;
  if (residual->count && !quantization->count) return true;
  const int64_t tiles = CeilDiv(n, Large::kCols) * CeilDiv(rows, Large::kRows);
  return tiles < Multiprocessors(device) &&
         (!quantization->count || rows * p.depth <= kMostGathered);
}

DLSYS_KERNEL(cuda, quantized_conv2d_fused, QuantizedConv2dFused);
DLSYS_FITS(cuda, quantized_conv2d_fused, QuantizedConv2dFusedFits);
DLSYS_KERNEL(cuda, quantized_matmul, QuantizedMatMul);
DLSYS_KERNEL(cuda, quantized_conv2d, QuantizedConv2d);

}  // namespace
}  // namespace cuda
}  // namespace dlsys
