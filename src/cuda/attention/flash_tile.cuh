// What the kernels of flash attention share: tiles in shared memory, in boxes of 128 bytes of each
// row, swizzled, their products on the tensor cores of sm_90a, and the order of tiles.
// flash_forward.cu and flash_backward.cu have the algorithms and what limits them.
//
// wgmma reads operands of tf32 along K only, so that float32 arrays whose positions are summed over
// have transposed copies (flash_transposed.cu), in which each eight positions lie as tf32 operands
// in registers count the columns of accumulators: the even ones first.
#pragma once
#include <algorithm>
#include <initializer_list>
#include <optional>
#include <type_traits>

#include "cuda/attention/flash.cuh"
#include "cuda/instructions/hopper.cuh"
#include "cuda/instructions/ring.cuh"
#include "cuda/instructions/tensor_map.cuh"
#include "cuda/runtime/divisor.cuh"
#include "cuda/runtime/launch.cuh"
#include "math/philox.h"

namespace dlsys {
namespace cuda {
namespace flash {

using namespace hopper;  // NOLINT: the instructions of sm_90a

constexpr float kLog2E = 1.44269504f, kLn2 = 0.693147181f;
constexpr int kAlignment = 1024;  // of tiles, for the swizzle
constexpr int kSharedNbytes = 227 << 10;

// A tile of rows of one head, and the tiles [begin, end) of the other side that it meets. `sample`
// numbers the heads of all samples.
struct Tile {
  int row, sample, begin, end;
};

// Heads of which each takes so many tiles, on so many blocks. Those of a band share k and v, or q
// and dy, in L2; `width` is of a band, `last` of the last one. Under a causal mask a block takes
// pairs of tiles, see Turns.
struct Grid {
  int tiles, samples, blocks;
  int rounds, rest;  // of pairs: each block takes so many, and so many are left
  Divisor of_band, width, last;
};

inline Grid GridOf(int64_t tiles, int64_t samples, bool causal, int64_t nbytes_of_sample,
                   int64_t group, int multiprocessors) {
  constexpr int64_t kOfL2 = 24 << 20;
  const int64_t most = kOfL2 / std::max<int64_t>(nbytes_of_sample, 1) * group;
  const int64_t band = std::clamp(most, std::min(group, samples), samples);
  const int64_t blocks = std::min<int64_t>(tiles * samples, multiprocessors);
  const int64_t of_head = CeilDiv(tiles, 2), pairs = of_head * samples;
  const int64_t rounds = std::max<int64_t>(pairs / blocks - 1, 0);
  const int64_t last = samples % band ? samples % band : band;
  return {(int)tiles,
          (int)samples,
          (int)blocks,
          (int)rounds,
          (int)(pairs - rounds * blocks),
          Divisor(band * (causal ? of_head : tiles)),
          Divisor(band),
          Divisor(last)};
}

// A tile by its number within its head, and the head.
struct Position {
  int tile, sample;
};
// The position of `index`, of a tile or of a pair.
__device__ __forceinline__ Position PositionOf(const Grid& grid, int index) {
  const int band = index / grid.of_band, in_band = index - band * (int)grid.of_band.value;
  const int first = band * (int)grid.width.value;
  const Divisor width = first + (int)grid.width.value > grid.samples ? grid.last : grid.width;
  const int tile = in_band / width;
  return {tile, first + in_band - tile * (int)width.value};
}

// The tiles of a block, by a fixed order. All are of one length: every so-many-th. Under a causal
// mask a head's tile 0 is the longest and each of the next is shorter by as much, so that the first
// with the last, the second with the last but one and so on are pairs of one length: a block takes
// every so-many-th pair. What does not fill all blocks with pairs goes as single tiles, the longest
// first, to the blocks from first to last, back, and so on: blocks end within a few hundredths of
// each other, where every so-many-th tile would leave a tenth.
template <bool kCausal>
class Turns {
 public:
  __device__ __forceinline__ bool Next(const Grid& grid, Position& at) {
    if constexpr (kCausal) {
      return NextOfPairs(grid, at);
    } else {
      const int index = turn_++ * grid.blocks + (int)blockIdx.x;
      if (index >= grid.tiles * grid.samples) return false;
      at = PositionOf(grid, index);
      return true;
    }
  }

 private:
  __device__ __forceinline__ bool NextOfPairs(const Grid& grid, Position& at) {
    const int block = (int)blockIdx.x, blocks = grid.blocks;
    while (true) {
      const int turn = turn_++, last = turn - 2 * grid.rounds;
      int pair = turn / 2 * blocks + block;
      bool shorter = turn % 2;
      if (last >= 0) {
        const int slot = last * blocks + (last % 2 ? blocks - 1 - block : block);
        if (last * blocks >= 2 * grid.rest) return false;
        if (slot >= 2 * grid.rest) continue;
        shorter = slot >= grid.rest;
        pair = grid.rounds * blocks + (shorter ? 2 * grid.rest - 1 - slot : slot);
      }
      at = PositionOf(grid, pair);
      const int other = grid.tiles - 1 - at.tile;
      if (shorter && other == at.tile) continue;  // the middle one is no pair
      if (shorter) at.tile = other;
      return true;
    }
  }

  int turn_ = 0;
};

// What all kernels know of a problem.
struct Shape {
  int rows, columns;
  Divisor heads, kv_heads, group;  // `group` heads of q share one of k and v
  Grid grid;
  FlashDropout dropout;

  Shape() = default;
  explicit Shape(const FlashProblem& p)
      : rows((int)p.rows),
        columns((int)p.columns),
        heads(p.heads),
        kv_heads(p.kv_heads),
        group(p.heads / p.kv_heads),
        dropout(p.dropout) {}
};

// A head of a sample by its number among all.
struct Head {
  int number, sample;
  __device__ __forceinline__ Head(int of_all, const Divisor& heads)
      : number(of_all - of_all / heads * (int)heads.value), sample(of_all / heads) {}
};

// The tiles of rows of a block. The last rows of a head come first, since under a causal mask they
// see most.
template <class T, bool kCausal>
class RowTiles {
 public:
  __device__ __forceinline__ explicit RowTiles(const Shape& shape) : shape_(shape) {}

  __device__ __forceinline__ bool Next(Tile& tile) {
    Position at;
    if (!turns_.Next(shape_.grid, at)) return false;
    const int row = (shape_.grid.tiles - 1 - at.tile) * T::kRows;
    const int seen = kCausal ? min(shape_.columns, row + T::kRows) : shape_.columns;
    tile = {row, at.sample, 0, (seen + T::kKeys - 1) / T::kKeys};
    return true;
  }

 private:
  const Shape& shape_;
  Turns<kCausal> turns_;
};

// Pairs of barriers, full and empty: of a tile, or of a stage of a ring.
__device__ __forceinline__ uint32_t Full(uint32_t barriers, int pair) {
  return barriers + pair * 16;
}
__device__ __forceinline__ uint32_t Empty(uint32_t barriers, int pair) {
  return barriers + pair * 16 + 8;
}
// Initializes the pairs [begin, end), of stages that so many threads give back.
__device__ __forceinline__ void InitBarriers(uint32_t barriers, int begin, int end, int threads) {
  for (int pair = begin; pair < end; pair++) {
    InitBarrier(Full(barriers, pair), 1);
    InitBarrier(Empty(barriers, pair), threads);
  }
}

// The number of this thread's warpgroup, known to be the same for all of a warp.
__device__ __forceinline__ int Warpgroup() {
  return __shfl_sync(0xffffffffu, (int)threadIdx.x / 128, 0);
}

// A consumer waits for a stage.
template <int kStages>
__device__ __forceinline__ void WaitForStage(uint32_t barriers, int pair,
                                             const RingPosition<kStages>& at) {
  WaitForPhase(Full(barriers, pair + at.stage), at.parity);
}
// A consumer gives a stage back: a thread of each warp does for all where products alone have read
// it, and every thread, with kEach, where threads have. For those __syncwarp would do, but ptxas
// leaves it out of warps that are together, and racecheck then takes the arrival of a lane for the
// order of that lane's reads.
template <bool kEach>
constexpr int kReleasing = kEach ? 128 : 4;  // threads of a consumer
template <bool kEach = false>
__device__ __forceinline__ void ReleaseStage(uint32_t barriers, int pair, int stage) {
  if constexpr (!kEach) __syncwarp();
  if (kEach || threadIdx.x % 32 == 0) Arrive(Empty(barriers, pair + stage));
}

// Whether elements are multiplied as tf32; those of a row of a box, and the columns that an
// instruction multiplies.
template <class E>
constexpr bool kTf32 = sizeof(E) == sizeof(float);
template <class E>
constexpr int kOfBox = 128 / (int)sizeof(E);
template <class E>
constexpr int kDepth = 32 / (int)sizeof(E);

// Begins to copy a tile of a head, all of it within one row of boxes.
template <class E, int kRows, int kSize>
__device__ __forceinline__ void LoadTile(uint32_t to, const CUtensorMap* map, uint32_t barrier,
                                         int row, const Head& head) {
#pragma unroll 1  // a producer has few registers
  for (int box = 0; box < kSize / kOfBox<E>; box++)
    LoadBox(to + box * kRows * 128, map, barrier, box * kOfBox<E>, row, head.number, head.sample);
}

// The same of a tile whose rows are summed over: with tf32 of the transposed copy.
template <class E, int kRows, int kSize>
__device__ __forceinline__ void LoadSummed(uint32_t to, const CUtensorMap* map, uint32_t barrier,
                                           int row, const Head& head) {
  if constexpr (kTf32<E>) {
#pragma unroll 1
    for (int box = 0; box < kRows / kOfBox<E>; box++)
      LoadBox(to + box * kSize * 128, map, barrier, row + box * kOfBox<E>, 0, head.number,
              head.sample);
  } else {
    LoadTile<E, kRows, kSize>(to, map, barrier, row, head);
  }
}

// Accumulators of 64 rows of a product, by eight columns, and as an operand of the next product.
template <int kColumns>
using Sums = float[kColumns / 8][4];
template <class E, int kColumns>
using Operand = uint32_t[kColumns / kDepth<E>][4];

// Begins d = a bᵀ over rows of kSize elements. `a` is where 64 rows begin of a tile of kRowsA.
template <class E, int kSize, int kRowsA, int kColumns>
__device__ __forceinline__ void BeginProduct(float (&d)[kColumns][4], uint32_t a, uint32_t b) {
  const uint64_t of_a = Descriptor(a, 16, 1024), of_b = Descriptor(b, 16, 1024);
#pragma unroll
  for (int step = 0; step < kSize / kDepth<E>; step++) {
    const int box = step / 4, in_box = step % 4 * 32;
    MultiplyAdd<E, false, false>(d, Advanced(of_a, box * kRowsA * 128 + in_box),
                                 Advanced(of_b, box * kColumns * 8 * 128 + in_box), step > 0);
  }
  CloseProducts();
}

// Begins d += a b, b a tile of as many rows as a has columns, with tf32 its transposed copy; or
// d = a b, where there is no d yet.
template <class E, int kSteps, int kColumns>
__device__ __forceinline__ void BeginProduct(float (&d)[kColumns][4],
                                             const uint32_t (&a)[kSteps][4], uint32_t b,
                                             bool accumulate = true) {
  const uint64_t of_b = Descriptor(b, kTf32<E> ? 16 : kSteps * 16 * 128, 1024);
#pragma unroll
  for (int step = 0; step < kSteps; step++) {
    const int at = kTf32<E> ? step / 4 * kColumns * 8 * 128 + step % 4 * 32 : step * 2048;
    MultiplyAdd<E, !kTf32<E>>(d, a[step], Advanced(of_b, at), accumulate || step > 0);
  }
  CloseProducts();
}

// Reads a warpgroup's 64 rows of a tile of kRows as an operand, which takes tf32 from registers at
// half the shared memory's reads.
template <int kSize, int kRows>
__device__ __forceinline__ void ReadOperand(uint32_t (&a)[kSize / 8][4],
                                            const unsigned char* rows) {
  const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4;
#pragma unroll
  for (int step = 0; step < kSize / 8; step++) {
#pragma unroll
    for (int part = 0; part < 4; part++) {
      const int at = row + part % 2 * 8, chunk = step % 4 * 2 + part / 2;
      a[step][part] = *(const uint32_t*)(rows + step / 4 * kRows * 128 + at * 128 +
                                         (chunk ^ at % 8) * 16 + column * 4);
    }
  }
}

template <int kColumns>
__device__ __forceinline__ void SetZero(float (&d)[kColumns][4]) {
#pragma unroll
  for (int j = 0; j < kColumns; j++) d[j][0] = d[j][1] = d[j][2] = d[j][3] = 0.f;
}

// Writes `hidden` at the keys behind the last one and, under a causal mask, at those behind a row.
// `row` and `column` are of the thread's first score.
template <bool kCausal, int kColumns>
__device__ __forceinline__ void Hide(float (&scores)[kColumns][4], int row, int column, int columns,
                                     float hidden) {
#pragma unroll
  for (int j = 0; j < kColumns; j++) {
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const int at = column + j * 8 + e % 2;
      if (at >= columns || (kCausal && at > row + e / 2 * 8)) scores[j][e] = hidden;
    }
  }
}

// ---- dropout ----

// The words of the weights of this run. Four neighboring columns share a block of four words, whose
// 40 multiplications cost more than the exponentials: so lanes draw for each other. Columns come in
// fours.
class Drawn {
 public:
  __device__ __forceinline__ Drawn(const Shape& shape)
      : stream_{shape.dropout.seed, *shape.dropout.step, shape.dropout.node},
        limit_(shape.dropout.limit),
        rows_(shape.rows),
        blocks_(shape.columns / 4) {}

  // The block of words of a row of a sample at a column; those of the next row are OfRow() on.
  __device__ __forceinline__ uint64_t Block(int sample, int row, int column) const {
    return ((uint64_t)sample * rows_ + row) * blocks_ + column / 4;
  }
  __device__ __forceinline__ uint32_t OfRow() const { return blocks_; }
  // Which of the four weights of a block are kept, a bit each.
  __device__ __forceinline__ uint32_t Kept(uint64_t block) const {
    const philox::Words words = stream_.At(block);
    uint32_t bits = 0;
#pragma unroll
    for (int k = 0; k < 4; k++) bits |= (uint32_t)(words.word[k] <= limit_) << k;
    return bits;
  }

 private:
  philox::Stream stream_;
  uint32_t limit_, rows_, blocks_;
};

// Which weights of a thread's accumulators are kept, of rows of queries; `column` is the first of
// all. The two lanes that share blocks draw those of one of their rows each.
template <int kColumns>
class KeptOfRows {
 public:
  __device__ __forceinline__ KeptOfRows(const Drawn& drawn, int sample, int row, int column) {
    const int lane = threadIdx.x % 4, odd = lane % 2;
    const uint64_t block = drawn.Block(sample, row + odd * 8, column) + lane / 2;
#pragma unroll
    for (int word = 0; word < kWords; word++) {
      uint32_t own = 0;
#pragma unroll
      for (int j = 0; j < 8; j++) own |= drawn.Kept(block + (word * 8 + j) * 2) << j * 4;
      const uint32_t others = __shfl_xor_sync(0xffffffffu, own, 1);
      bits_[0][word] = (odd ? others : own) >> odd * 2;
      bits_[1][word] = (odd ? own : others) >> odd * 2;
    }
  }
  __device__ __forceinline__ bool At(int j, int e) const {
    return bits_[e / 2][j / 8] >> (j % 8 * 4 + e % 2) & 1;
  }

 private:
  static constexpr int kWords = kColumns / 8;
  uint32_t bits_[2][kWords];
};

// The same of transposed weights: `key` is this thread's first one, `row` the first of all. Of the
// four lanes that share blocks each draws what one of the four elements of all of them takes.
class KeptOfKeys {
 public:
  __device__ __forceinline__ KeptOfKeys(const Drawn& drawn, int sample, int row, int key) {
    const int lane = threadIdx.x % 32, number = lane / 4 % 4;
    const uint64_t block =
        drawn.Block(sample, row + lane % 4 * 2 + number % 2, key - number + number / 2 * 8);
    uint32_t own = 0;
#pragma unroll
    for (int j = 0; j < 8; j++) own |= drawn.Kept(block + (uint64_t)j * 8 * drawn.OfRow()) << j * 4;
#pragma unroll
    for (int e = 0; e < 4; e++)
      bits_[e] = __shfl_sync(0xffffffffu, own, (lane & ~12) | e << 2) >> number;
  }
  __device__ __forceinline__ bool At(int j, int e) const { return bits_[e] >> j * 4 & 1; }

 private:
  uint32_t bits_[4];
};

// Calls run(causal, drops), two std::bool_constant. Weights of float32 are never dropped here.
template <class E, class F>
void WithVariant(const FlashProblem& p, F&& run) {
  const auto with = [&](auto drops) {
    if (p.causal) return run(std::true_type(), drops);
    run(std::false_type(), drops);
  };
  if constexpr (!kTf32<E>) {
    if (p.dropout.step) return with(std::true_type());
  }
  with(std::false_type());
}

// The bits of a number that tensor cores cut to tf32, rounded to nearest; a weight is no less than
// 0, and NaN, the largest of such bits, stays NaN.
__device__ __forceinline__ uint32_t Tf32OfWeight(float x) {
  return min(__float_as_uint(x) + 0x1000u, 0x7fffffffu);
}

// Accumulators of a product are laid out as operands of the next one: of 16 bits two side by side
// as one, of tf32 with the even columns first.
template <class E, bool kWeights, int kSteps>
__device__ __forceinline__ void Round(const float (&d)[kSteps * kDepth<E> / 8][4],
                                      uint32_t (&to)[kSteps][4]) {
#pragma unroll
  for (int step = 0; step < kSteps; step++) {
#pragma unroll
    for (int part = 0; part < 4; part++) {
      if constexpr (kTf32<E>) {
        const float x = d[step][part % 2 * 2 + part / 2];
        to[step][part] = kWeights ? Tf32OfWeight(x) : __float_as_uint(RoundedToTf32(x));
      } else {
        const float (&x)[4] = d[step * 2 + part / 2];
        to[step][part] = Packed<E>(x[part % 2 * 2], x[part % 2 * 2 + 1]);
      }
    }
  }
}

// Where rows of a head are written: 16-bit elements by TMA, float32 by ordinary stores of 32 bytes.
struct Rows {
  float* data;
  AttentionLayout layout;
  int count, size;
};
template <class E>
using Result = std::conditional_t<kTf32<E>, Rows, CUtensorMap>;

// Stores a warpgroup's 64 rows by way of shared memory; rows behind the last one are not written.
// `number` is of the warpgroup's barrier.
template <class E, int kColumns>
__device__ __forceinline__ void StoreRows(const float (&d)[kColumns][4], const CUtensorMap* map,
                                          uint32_t staging, int row, const Head& head, int number) {
  const int thread = threadIdx.x % 128, l = threadIdx.x % 32;
  const int r = thread / 32 * 16 + l % 16;  // of the row whose address this lane gives
  if (thread == 0) WaitForStoresReads();
  SyncThreads(number, 128);
#pragma unroll
  for (int j = 0; j < kColumns; j += 2) {
    const float (&x)[4] = d[j], (&y)[4] = d[j + 1];
    const int chunk = j + l / 16;
    StoreMatrices(staging + chunk / 8 * 64 * 128 + r * 128 + ((chunk % 8 ^ r % 8) * 16),
                  {Packed<E>(x[0], x[1]), Packed<E>(x[2], x[3]), Packed<E>(y[0], y[1]),
                   Packed<E>(y[2], y[3])});
  }
  LetBulkFollow();
  SyncThreads(number, 128);
  if (thread == 0) {
#pragma unroll
    for (int box = 0; box < kColumns / 8; box++)
      StoreBox(map, staging + box * 64 * 128, box * 64, row, head.number, head.sample);
    CloseStores();
  }
}

template <class E, int kColumns>
__device__ __forceinline__ void StoreRows(const float (&d)[kColumns][4], const Rows* to, uint32_t,
                                          int row, const Head& head, int) {
  const int thread = threadIdx.x % 128, column = thread % 4 * 2;
  row += thread / 32 * 16 + thread % 32 / 4;
  float* at = to->data + to->layout.At(head.sample, head.number, row) + column;
#pragma unroll
  for (int half = 0; half < 2; half++) {
#pragma unroll
    for (int j = 0; j < kColumns; j++) {
      if (row + half * 8 < to->count && j * 8 + column < to->size)
        *(float2*)(at + half * 8 * to->layout.position + j * 8) =
            make_float2(d[j][half * 2], d[j][half * 2 + 1]);
    }
  }
}

// An array of rows, or of keys, of so many heads of a sample.
struct Heads {
  void* data;
  AttentionLayout layout;
  int64_t positions, heads;
};
inline Heads RowsOf(const FlashProblem& p, const AttentionLayout& layout, const void* data) {
  return {const_cast<void*>(data), layout, p.rows, p.heads};
}
inline Heads KeysOf(const FlashProblem& p, const AttentionLayout& layout, const void* data) {
  return {const_cast<void*>(data), layout, p.columns, p.kv_heads};
}

// Its map, in boxes of `rows` positions of a head.
template <class E>
CUtensorMap MapOf(const char* op, const FlashProblem& p, const Heads& x, int rows) {
  return HeadMap(op, kDtype<E>, x.data, {p.size, x.positions, x.heads, p.batch},
                 {x.layout.position, x.layout.head, x.layout.batch}, rows);
}
template <class E>
Result<E> ResultOf(const char* op, const FlashProblem& p, const Heads& x) {
  if constexpr (kTf32<E>)
    return {(float*)x.data, x.layout, (int)x.positions, (int)p.size};
  else
    return MapOf<E>(op, p, x, 64);
}

// Copies an array of float32 to (batch, heads, size, pitch). The even ones of each eight positions
// come first; those that pad are 0.
void RunTransposition(const char* op, const FlashProblem& p, const Heads& x, int64_t pitch,
                      float* to, DLStream stream);

// Arrays whose positions are summed over: with tf32 their transposed copies, else themselves.
template <class E>
class SummedArrays {
 public:
  SummedArrays(const char* op, const FlashProblem& p, std::initializer_list<Heads> arrays,
               DLStream stream)
      : op_(op), p_(p) {
    if constexpr (kTf32<E>) {
      int64_t numel = 0;
      for (const Heads& x : arrays) numel += Numel(x);
      copies_.emplace(p.ctx, numel * (int64_t)sizeof(float), stream);
      float* to = copies_->floats();
      next_ = to;
      for (const Heads& x : arrays) {
        RunTransposition(op, p, x, Pitch(x), to, stream);
        to += Numel(x);
      }
    }
  }

  // The maps of the arrays, in their order, by tiles of `rows` positions and kSize.
  template <int kSize>
  CUtensorMap NextMap(const Heads& x, int rows) {
    if constexpr (kTf32<E>) {
      const int64_t pitch = Pitch(x), of_head = p_.size * pitch;
      const float* data = next_;
      next_ += Numel(x);
      return HeadMap(op_, kDtype<E>, data, {pitch, p_.size, x.heads, p_.batch},
                     {pitch, of_head, x.heads * of_head}, kSize);
    } else {
      return MapOf<E>(op_, p_, x, rows);
    }
  }

 private:
  static int64_t Pitch(const Heads& x) { return CeilDiv(x.positions, 8) * 8; }
  int64_t Numel(const Heads& x) const { return p_.batch * x.heads * p_.size * Pitch(x); }

  const char* op_;
  const FlashProblem& p_;
  std::optional<Scratch> copies_;
  const float* next_ = nullptr;
};

}  // namespace flash
}  // namespace cuda
}  // namespace dlsys
