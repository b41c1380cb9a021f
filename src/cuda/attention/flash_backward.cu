// The gradients of attention by wgmma and TMA, after FlashAttention-2 (Dao 2023, arXiv:2307.08691).
//
// The weights are computed anew from the rows' sums of exponentials. One kernel makes dk and dv, a
// block a tile of keys, over the rows that see them; it computes transposed scores, so that weights
// and their gradients are operands from registers as they come. With 16 bits and more than 64
// columns it makes dq too, five products in all: blocks add their parts to float32 sums in memory,
// in an order of tiles that is fixed, and a last kernel rounds the sums. Otherwise another kernel
// makes dq, a block a tile of rows, and computes the scores a second time, seven products. Either
// way results are deterministic. A thread of a producer warpgroup copies tiles by TMA, a ring of
// stages ahead of two consumer warpgroups, whose accumulators stay in registers; two more of its
// threads add to dq for the consumers. A first kernel sums dy y over each row. With D the factors
// of dropout, dv is of weights times D and the weights' gradients are D times dy vᵀ. float32 is
// multiplied as tf32, with transposed copies of q, dy and k in the workspace where positions are
// summed over; in the kernel of dq a block's rows are operands in registers up to size 64. What is
// written overlaps nothing. The tensor cores limit all but short rows, with tf32 also the reads of
// shared memory.
#include "cuda/attention/flash_tile.cuh"
#include "cuda/reduce/group.cuh"
#include "cuda/runtime/launch_together.cuh"

namespace dlsys {
namespace cuda {
namespace {

using namespace flash;  // NOLINT: this is a part of it

// The order of tiles of keys where their sums of dq have one. Blocks go through waves together, in
// each through a segment of the tiles of some heads, every one on blocks of its own.
struct Waves {
  int tiles, rows;        // of keys, and pairs of tiles of rows, of a head
  int segment, segments;  // tiles of a segment, and how many a head has
  int width, heads;       // blocks of a segment, and heads of a wave
  int samples;
};

inline Waves WavesOf(int64_t tiles, int64_t rows, int64_t samples, bool causal,
                     int multiprocessors) {
  const int64_t segments = CeilDiv(tiles, multiprocessors * (causal ? 2 : 1));
  const int64_t segment = CeilDiv(tiles, segments);
  const int64_t width = causal ? CeilDiv(segment, 2) : segment;
  const int64_t heads = segments > 1 ? 1 : std::min<int64_t>(multiprocessors / width, samples);
  return {(int)tiles, (int)rows, (int)segment, (int)segments, (int)width, (int)heads, (int)samples};
}

struct Params : Shape {
  int padded = 0;                                   // rows, up to a multiple of kPadding
  float scale = 0.f;                                // of the scores
  const float *lse = nullptr, *row_sums = nullptr;  // (samples, padded): times log2 e, and of dy y
  // Where one kernel makes all gradients: its order of tiles, the sums of dq over the keys so far,
  // as PartOfDq lays them out, and how many tiles of keys are in each of its parts of 64 rows.
  Waves waves = {};
  float* dq = nullptr;
  unsigned* added = nullptr;
};
constexpr int kPadding = 128, kRowsOfSum = 64, kPartsOfSum = 2;

// ---- sums of rows ----

// kGroup threads take a row, 16 bytes each. Rows that see no key, and those that pad, get a sum of
// exponentials whose weights are 0.
template <class E, int kGroup>
__global__ void __launch_bounds__(kThreads)
    RowSumsKernel(const E* y, const E* dy, const float* lse, AttentionLayout of_y, int count,
                  Divisor padded, Divisor heads, int rows, int size, float* scaled_lse,
                  float* row_sums, unsigned* added) {
  constexpr int kCount = 16 / (int)sizeof(E);
  struct alignas(16) Vector {
    E x[kCount];
  };
  const int k = (int)threadIdx.x % kGroup * kCount;
  GridDependencySynchronize();
  const int step = (int)ItemStep() / kGroup;
  for (int at = (int)FirstItem() / kGroup; at < count; at += step) {
    const int of_all = at / padded, row = at - of_all * (int)padded.value;
    float sum = 0.f;
    if (row < rows && k < size) {
      const Head head(of_all, heads);
      const int64_t from = of_y.At(head.sample, head.number, row) + k;
      const Vector a = *(const Vector*)(y + from), b = *(const Vector*)(dy + from);
#pragma unroll
      for (int e = 0; e < kCount; e++) sum += (float)a.x[e] * (float)b.x[e];
    }
    sum = GroupReduce<SumMonoid, kGroup>(sum);
    if (k) continue;
    const float of_row = row < rows ? lse[(int64_t)of_all * rows + row] : -INFINITY;
    scaled_lse[at] = of_row == -INFINITY ? INFINITY : of_row * kLog2E;
    row_sums[at] = sum;
    constexpr int kOfPart = kRowsOfSum / kPartsOfSum;
    if (added && at % kOfPart == 0) added[at / kOfPart] = 0;
  }
  TriggerProgrammaticLaunch();
}

// ---- dk and dv ----

// Of 16 bits and large heads it makes dq too.
template <class E, int Size>
struct KeysTiling {
  static constexpr bool kLarge = kTf32<E> && Size > 64;
  static constexpr int kSize = Size, kConsumers = 2, kThreads = (kConsumers + 1) * 128;
  static constexpr int kKeys = kConsumers * 64, kRows = kLarge ? 32 : 64;
  static constexpr bool kMakesDq = !kTf32<E> && Size > 64;
  static constexpr bool kOverlaps = !kTf32<E> && Size <= 64;  // a block's last product and the next
  static constexpr int kStages = kLarge ? 1 : kOverlaps ? 3 : 2;
  static constexpr int kCopies = kTf32<E> ? kStages : 0;  // transposed
  static constexpr int kStagesK = !kTf32<E> && Size <= 64 ? 2 : 1;
  static constexpr int kTileK = kKeys * Size * (int)sizeof(E);
  static constexpr int kTileQ = kRows * Size * (int)sizeof(E);
  static constexpr int kOfQ = kStagesK * 2 * kTileK;  // in shared memory
  static constexpr int kOfDy = kOfQ + kStages * kTileQ;
  static constexpr int kToCopies = 2 * kStages * kTileQ;  // of q and dy, from these
  // Two buffers of the scores' gradients, keys by rows, and two of each consumer's part of dq.
  static constexpr int kOfScores = kOfQ + 2 * (kStages + kCopies) * kTileQ;
  static constexpr int kTileScores = kMakesDq ? kKeys * kRows * (int)sizeof(E) : 0;
  static constexpr int kPartOfDq = kMakesDq ? kRows * Size / kConsumers * (int)sizeof(float) : 0;
  static constexpr int kOfDq = kOfScores + 2 * kTileScores;
  // Results are staged behind, or where k and v were.
  static constexpr int kStaging = kOfDq + 2 * kConsumers * kPartOfDq;
  static constexpr int kOfLse = kStaging + (kTf32<E> || kMakesDq ? 0 : 2 * kTileK);  // and sums
  static constexpr int kRowNbytes = kRows * (int)sizeof(float);
  static constexpr int kNbytes = kAlignment + kOfLse + kStages * 2 * kRowNbytes;
  static_assert(kNbytes <= kSharedNbytes, "what a block has");
  static constexpr int kK = 0, kQ = kStagesK, kDy = kQ + kStages;  // pairs of barriers
  static constexpr int kSummedQ = kDy + kStages, kSummedDy = kSummedQ + kCopies;
  static constexpr int kPairs = kSummedDy + kCopies;
  static constexpr int kAllPairs = kPairs + (kMakesDq ? 2 * kConsumers : 0);
  static constexpr bool kReadsAhead = kOverlaps;
};

// A tile of keys and the tiles of rows that it meets in each head: `count` of them, kTogether at a
// time, from `first` on and, after `turning` times, from `second` on by `step`.
template <int kRows, int kTogether>
struct KeyTile {
  int row, sample, count;
  int first, turning, second, step;
  __device__ __forceinline__ int RowAt(int turn) const {
    const int time = turn / kTogether;
    const int at = time < turning ? first + time : second + (time - turning) * step;
    return (at * kTogether + turn % kTogether) * kRows;
  }
};

// The tiles of keys of a block; the first keys of a head, which most rows see under a causal mask,
// come first.
template <class T, bool kCausal>
class KeyTiles {
 public:
  using Tile = KeyTile<T::kRows, 1>;

  __device__ __forceinline__ explicit KeyTiles(const Params& params) : params_(params) {}

  __device__ __forceinline__ bool Next(Tile& tile) {
    Position at;
    if (!turns_.Next(params_.grid, at)) return false;
    const int key = at.tile * T::kKeys, end = (params_.rows + T::kRows - 1) / T::kRows;
    const int first = kCausal ? min(key / T::kRows, end) : 0;
    tile = {key, at.sample, end - first, first, end, 0, 0};
    return true;
  }

 private:
  const Params& params_;
  Turns<kCausal> turns_;
};

// The same where tiles add to sums of dq in a fixed order: blocks meet the rows of a head in turns,
// such that no two meet the same ones at a time if all are equally fast. Without a mask each begins
// further down and goes around. Under a causal mask a block takes a tile c of the first half and
// the one as far from the end, the latter first, downwards from the diagonal; then c from the
// middle down, and from there up to the diagonal. With n tiles of both, of which h are the first
// half, it is n - 1 - c at the rows n - 1 - c + t at time t, and c at h + (t - c - 1), then at
// 2 h + c - t: of blocks that meet in the same half, each is elsewhere.
template <class T, bool kCausal>
class OrderedKeyTiles {
 public:
  static constexpr int kTogether = kPadding / T::kRows;
  using Tile = KeyTile<T::kRows, kTogether>;

  __device__ __forceinline__ explicit OrderedKeyTiles(const Params& params)
      : waves_(params.waves) {}

  __device__ __forceinline__ bool Next(Tile& tile) {
    const int slot = (int)blockIdx.x / waves_.width;
    const int column = (int)blockIdx.x - slot * waves_.width;
    while (true) {
      const bool later = kCausal && turn_ % 2 == 0;
      const int wave = kCausal ? turn_ / 2 : turn_;
      turn_++;
      const int of_wave = wave / waves_.segments;
      const int sample = of_wave * waves_.heads + slot;
      if (sample >= waves_.samples) return false;
      before_ = (wave - of_wave * waves_.segments) * waves_.segment;
      tiles_ = min(waves_.segment, waves_.tiles - before_);
      half_ = kCausal ? (tiles_ + 1) / 2 : tiles_;
      if (column >= half_) continue;
      number_ = later ? tiles_ - 1 - column : column;
      if (later && number_ == column) continue;  // the middle one is no pair
      const int rows = waves_.rows, first = before_ + number_, half = before_ + half_;
      const int row = first * T::kKeys;
      if constexpr (!kCausal) {
        const int at = number_ * rows / tiles_;
        tile = {row, sample, rows, at, rows - at, 0, 1};
      } else if (later) {
        tile = {row, sample, rows - first, first, rows, 0, 0};
      } else {
        tile = {row, sample, rows - first, half, max(rows - half, 0), min(half, rows) - 1, -1};
      }
      tile.count = max(tile.count, 0) * kTogether;
      return true;
    }
  }

  // How many tiles of keys add to the sums of a row before this one does.
  __device__ __forceinline__ int Before(int row) const {
    const int at = row / kPadding;
    if constexpr (!kCausal) {
      const int begun =
          ((at + 1) * tiles_ + waves_.rows - 1) / waves_.rows;  // at this row or above
      return before_ + begun - 1 - number_ + (number_ < begun ? 0 : tiles_);
    } else {
      const int last = min(at - before_, tiles_ - 1);  // that sees the row
      return before_ + (number_ < half_ ? number_ + max(last + 1 - half_, 0) : last - number_);
    }
  }

 private:
  const Waves& waves_;
  int turn_ = 0;
  int before_, tiles_, half_;  // tiles of segments before, of this one and of its first half
  int number_;                 // of the tile in its segment
};

template <class T, bool kCausal>
using KeyTilesOf =
    std::conditional_t<T::kMakesDq, OrderedKeyTiles<T, kCausal>, KeyTiles<T, kCausal>>;

// The maps of what a block loads: q and dy twice with tf32, transposed where they are summed over.
struct KeysMaps {
  CUtensorMap q, k, v, dy, summed_q, summed_dy;
};

template <class E, class T, bool kCausal>
__device__ __forceinline__ void ProduceForKeys(const KeysMaps& maps, const Params& params,
                                               uint32_t memory, uint32_t barriers) {
  RingPosition<T::kStages> at;
  RingPosition<T::kStagesK> at_k;
  KeyTilesOf<T, kCausal> tiles(params);
  for (typename KeyTilesOf<T, kCausal>::Tile tile; tiles.Next(tile); at_k.Advance()) {
    const Head of_keys(tile.sample, params.kv_heads);
    const int pair = T::kK + at_k.stage;
    const uint32_t to = memory + at_k.stage * 2 * T::kTileK;
    WaitForPhase(Empty(barriers, pair), at_k.parity ^ 1);
    ArriveExpecting(Full(barriers, pair), 2 * T::kTileK);
    LoadTile<E, T::kKeys, T::kSize>(to, &maps.k, Full(barriers, pair), tile.row, of_keys);
    LoadTile<E, T::kKeys, T::kSize>(to + T::kTileK, &maps.v, Full(barriers, pair), tile.row,
                                    of_keys);
    const int group = (int)params.group.value;
    for (int of_group = 0; of_group < group; of_group++) {
      const int sample = tile.sample * group + of_group;
      const Head of_rows(sample, params.heads);
      for (int turn = 0; turn < tile.count; turn++, at.Advance()) {
        const int row = tile.RowAt(turn);
        const int64_t of_row = (int64_t)sample * params.padded + row;
        const auto begin = [&](int pair, int nbytes) {
          WaitForPhase(Empty(barriers, pair + at.stage), at.parity ^ 1);
          ArriveExpecting(Full(barriers, pair + at.stage), nbytes);
          return Full(barriers, pair + at.stage);
        };
        const auto load = [&](const CUtensorMap& map, int pair, uint32_t ring, const float* from,
                              uint32_t to) {
          const uint32_t full = begin(pair, T::kTileQ + T::kRowNbytes);
          LoadTile<E, T::kRows, T::kSize>(ring + at.stage * T::kTileQ, &map, full, row, of_rows);
          LoadBytes(to + at.stage * 2 * T::kRowNbytes, from + of_row, T::kRowNbytes, full);
        };
        const auto load_copy = [&](const CUtensorMap& map, int pair, uint32_t ring) {
          LoadSummed<E, T::kRows, T::kSize>(ring + T::kToCopies + at.stage * T::kTileQ, &map,
                                            begin(pair, T::kTileQ), row, of_rows);
        };
        const uint32_t sums = memory + T::kOfLse;
        load(maps.q, T::kQ, memory + T::kOfQ, params.lse, sums);
        load(maps.dy, T::kDy, memory + T::kOfDy, params.row_sums, sums + T::kRowNbytes);
        if constexpr (kTf32<E>) {
          load_copy(maps.summed_dy, T::kSummedDy, memory + T::kOfDy);
          load_copy(maps.summed_q, T::kSummedQ, memory + T::kOfQ);
        }
      }
    }
  }
}

// Numbers of the rows that are columns of a thread's accumulators, from shared memory: read ahead,
// or, where registers are short, when they are needed.
template <int kRows, bool kAhead>
class OfRows {
 public:
  __device__ __forceinline__ explicit OfRows(const float* rows)
      : rows_(rows + threadIdx.x % 4 * 2) {
    if constexpr (kAhead) {
#pragma unroll
      for (int j = 0; j < kRows / 8; j++) read_[j] = *(const float2*)(rows_ + j * 8);
    }
  }
  __device__ __forceinline__ float2 At(int j) const {
    if constexpr (kAhead) return read_[j];
    return *(const float2*)(rows_ + j * 8);
  }

 private:
  const float* rows_;
  float2 read_[kAhead ? kRows / 8 : 1];
};

// The barrier of both consumers; those of each one are before.
template <class T>
constexpr int kBothConsumers = 1 + T::kConsumers;

// A consumer's part of dq, half of its columns for a tile of rows, of all keys of the block.
template <class E, class T>
class PartOfDq {
 public:
  __device__ __forceinline__ PartOfDq(unsigned char* shared, uint32_t barriers, int consumer)
      : sums_((float4*)(shared + T::kOfDq + consumer * 2 * T::kPartOfDq)),
        scores_(SharedAddress(shared) + T::kOfScores),
        barriers_(barriers),
        consumer_(consumer) {}

  // Writes this consumer's keys of the scores' gradients, keys by rows.
  __device__ __forceinline__ void Stage(const uint32_t (&scores)[T::kRows / 16][4]) const {
    const int key = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 16, half = threadIdx.x % 32 / 16;
    const uint32_t to = Scores() + consumer_ * 64 * 128 + key * 128;
#pragma unroll
    for (int step = 0; step < T::kRows / 16; step++)
      StoreMatrices(to + ((step * 2 + half) ^ key % 8) * 16, scores[step]);
    LetBulkFollow();
  }

  // Multiplies the gradients of both consumers with the keys at `k`, and gives the product to the
  // writer. `multiply` begins a product meanwhile.
  template <int kLeft, class Multiply>
  __device__ __forceinline__ void Make(uint32_t k, Multiply&& multiply) {
    static_assert(T::kConsumers == kPartsOfSum && T::kRows == kRowsOfSum, "the layout of sums");
    constexpr int kBox = T::kKeys * 128, kColumns = T::kSize / T::kConsumers;
    Sums<kColumns> dq;
    // Under a causal mask one consumer may come from rows that see no key, the other not.
    SyncThreadsUnaligned(kBothConsumers<T>, T::kConsumers * 128);
    BeginProducts();
    const uint64_t of_scores = Descriptor(Scores(), kBox, 1024);
    const uint64_t of_k = Descriptor(k + consumer_ * kBox, kBox, 1024);
#pragma unroll
    for (int step = 0; step < T::kKeys / 16; step++)
      MultiplyAdd<E, true, true>(dq, Advanced(of_scores, step * 2048), Advanced(of_k, step * 2048),
                                 step > 0);
    CloseProducts();
    multiply();
    WaitForProducts<kLeft>();
    const int pair = T::kPairs + consumer_ * 2 + at_.stage;
    WaitForPhase(Empty(barriers_, pair), at_.parity ^ 1);
    float4* const to = sums_ + at_.stage * (T::kPartOfDq / 16) + threadIdx.x % 128;
#pragma unroll
    for (int j = 0; j < kColumns / 8; j++)
      to[j * 128] = make_float4(dq[j][0], dq[j][1], dq[j][2], dq[j][3]);
    LetBulkFollow();
    __syncwarp();
    if (threadIdx.x % 32 == 0) Arrive(Full(barriers_, pair));
    at_.Advance();
  }

 private:
  __device__ __forceinline__ uint32_t Scores() const {
    return scores_ + at_.stage * T::kTileScores;
  }

  float4* sums_;
  uint32_t scores_, barriers_;
  int consumer_;
  RingPosition<2> at_;
};

// Adds a consumer's parts of dq to the sums in memory, each when all tiles of keys before have been
// added, so that sums are the same every time. A thread does, beside the consumers.
template <class T, bool kCausal>
__device__ __forceinline__ void WriteDq(const Params& params, uint32_t memory, uint32_t barriers,
                                        int consumer) {
  constexpr int kPart = T::kPartOfDq / (int)sizeof(float);
  const int group = (int)params.group.value;
  RingPosition<2> at;
  KeyTilesOf<T, kCausal> tiles(params);
  for (typename KeyTilesOf<T, kCausal>::Tile tile; tiles.Next(tile);) {
    for (int of_group = 0; of_group < group; of_group++) {
      for (int turn = 0; turn < tile.count; turn++, at.Advance()) {
        const int row = tile.RowAt(turn), pair = T::kPairs + consumer * 2 + at.stage;
        const unsigned before = (unsigned)tiles.Before(row);
        const int sample = tile.sample * group + of_group;
        const int part = (sample * params.padded + row) / T::kRows * kPartsOfSum + consumer;
        const uint32_t from = memory + T::kOfDq + (consumer * 2 + at.stage) * T::kPartOfDq;
        float* const to = params.dq + (int64_t)part * kPart;
        WaitForPhase(Full(barriers, pair), at.parity);
        while (LoadAcquire(params.added + part) < before) __nanosleep(32);
        if (before)
          AddFloats(to, from, T::kPartOfDq);
        else
          StoreBytes(to, from, T::kPartOfDq);
        CloseStores();
        WaitForStoresReads();
        Arrive(Empty(barriers, pair));
        WaitForStores();
        CountUp(params.added + part);
      }
    }
  }
}

template <class E, class T, bool kCausal, bool kDrops>
__device__ __forceinline__ void ConsumeForKeys(const Result<E>* to_dk, const Result<E>* to_dv,
                                               const Params& params, unsigned char* shared,
                                               uint32_t barriers) {
  const int consumer = Warpgroup(), thread = threadIdx.x % 128, l = threadIdx.x % 32;
  const uint32_t memory = SharedAddress(shared);
  const float scale = params.scale * kLog2E;
  RingPosition<T::kStages> at;
  RingPosition<T::kStagesK> at_k;
  [[maybe_unused]] std::conditional_t<kDrops, Drawn, const Params&> drawn(params);
  [[maybe_unused]] PartOfDq<E, T> part_of_dq(shared, barriers, consumer);
  KeyTilesOf<T, kCausal> tiles(params);
  for (typename KeyTilesOf<T, kCausal>::Tile tile; tiles.Next(tile); at_k.Advance()) {
    const int key = tile.row + consumer * 64 + thread / 32 * 16 + l / 4;
    const int of_warpgroup = at_k.stage * 2 * T::kTileK + consumer * 64 * 128;
    const uint32_t k = memory + of_warpgroup, v = k + T::kTileK;
    const uint32_t of_block = memory + at_k.stage * 2 * T::kTileK;
    Sums<T::kSize> dk, dv;
    SetZero(dk);
    SetZero(dv);
    WaitForStage(barriers, T::kK, at_k);
    int next = 0, sample = tile.sample * (int)params.group.value;
    int unreleased = -1;  // the stage of rows that a product still reads
    const auto release_rows = [&](int stage) {
      ReleaseStage<true>(barriers, T::kQ, stage);  // threads have read the rows' numbers
      ReleaseStage<true>(barriers, T::kDy, stage);
    };
    const auto finish_product = [&] {
      WaitForProducts<0>();
      if (unreleased >= 0) release_rows(unreleased);
      unreleased = -1;
    };
    for (int turn = 0; turn < tile.count * (int)params.group.value; turn++, at.Advance()) {
      const uint32_t q = memory + T::kOfQ + at.stage * T::kTileQ;
      const uint32_t dy = memory + T::kOfDy + at.stage * T::kTileQ;
      const float* lse = (const float*)(shared + T::kOfLse) + at.stage * 2 * T::kRows;
      const float* row_sums = lse + T::kRows;
      const int row = tile.RowAt(next);
      [[maybe_unused]] const int of_rows = sample;
      if (++next == tile.count) next = 0, sample++;  // of the next head
      const auto wait_for_copy = [&](int pair) {
        if constexpr (kTf32<E>) WaitForStage(barriers, pair, at);
      };
      const auto release_copies = [&] {
        if constexpr (kTf32<E>) {
          ReleaseStage(barriers, T::kSummedQ, at.stage);
          ReleaseStage(barriers, T::kSummedDy, at.stage);
        }
      };
      constexpr int kToSummed = kTf32<E> ? T::kToCopies : 0;
      Sums<T::kRows> weights, gradients;
      Operand<E, T::kRows> operand;
      WaitForStage(barriers, T::kQ, at);
      if (kCausal && row + T::kRows <= tile.row + consumer * 64) {  // these rows see no key of it
        WaitForStage(barriers, T::kDy, at);
        if constexpr (T::kOverlaps) finish_product();
        if constexpr (T::kMakesDq) {
          const uint32_t none[T::kRows / 16][4] = {};
          part_of_dq.Stage(none);
          part_of_dq.template Make<0>(of_block, [] {});
        }
        release_rows(at.stage);
        wait_for_copy(T::kSummedDy);
        wait_for_copy(T::kSummedQ);
        release_copies();
        continue;
      }
      BeginProducts();
      BeginProduct<E, T::kSize, T::kKeys>(weights, k, q);
      WaitForStage(barriers, T::kDy, at);
      BeginProducts();
      BeginProduct<E, T::kSize, T::kKeys>(gradients, v, dy);
      OfRows<T::kRows, T::kReadsAhead> shifts(lse), of_dy(row_sums);
      if constexpr (T::kOverlaps) {
        WaitForProducts<2>();
        if (unreleased >= 0) release_rows(unreleased);
      }
      [[maybe_unused]] const auto kept = [&] {
        if constexpr (kDrops)
          return KeptOfKeys(drawn, of_rows, row, key);
        else
          return 0;
      }();
      WaitForProducts<1>();
#pragma unroll
      for (int j = 0; j < T::kRows / 8; j++) {
        const float2 shift = shifts.At(j);
#pragma unroll
        for (int e = 0; e < 4; e++)
          weights[j][e] = ExpTwo(weights[j][e] * scale - (e % 2 ? shift.y : shift.x));
      }
      if (kCausal && row < tile.row + consumer * 64 + 63) {
#pragma unroll
        for (int j = 0; j < T::kRows / 8; j++) {
#pragma unroll
          for (int e = 0; e < 4; e++)
            if (key + e / 2 * 8 > row + j * 8 + l % 4 * 2 + e % 2) weights[j][e] = 0.f;
        }
      }
      if constexpr (kDrops) {
        Sums<T::kRows> left;
#pragma unroll
        for (int j = 0; j < T::kRows / 8; j++) {
#pragma unroll
          for (int e = 0; e < 4; e++) left[j][e] = kept.At(j, e) ? weights[j][e] : 0.f;
        }
        Round<E, true>(left, operand);
      } else {
        Round<E, true>(weights, operand);
      }
      WaitForProducts<0>();
      wait_for_copy(T::kSummedDy);
      BeginProducts();
      BeginProduct<E>(dv, operand, dy + kToSummed);
#pragma unroll
      for (int j = 0; j < T::kRows / 8; j++) {
        const float2 sum = of_dy.At(j);
#pragma unroll
        for (int e = 0; e < 4; e++) {
          if constexpr (kDrops)
            gradients[j][e] = kept.At(j, e) ? gradients[j][e] * params.dropout.keep : 0.f;
          gradients[j][e] = weights[j][e] * (gradients[j][e] - (e % 2 ? sum.y : sum.x));
        }
      }
      Operand<E, T::kRows> of_scores;
      Round<E, false>(gradients, of_scores);
      if constexpr (kTf32<E>) release_rows(at.stage);
      wait_for_copy(T::kSummedQ);
      if constexpr (T::kMakesDq) part_of_dq.Stage(of_scores);
      const auto multiply = [&] {
        BeginProducts();
        BeginProduct<E>(dk, of_scores, q + kToSummed);
      };
      if constexpr (T::kMakesDq)
        part_of_dq.template Make<1>(of_block, multiply);
      else
        multiply();
      unreleased = at.stage;
      if constexpr (T::kOverlaps) continue;
      if constexpr (kTf32<E>) unreleased = -1;
      finish_product();
      release_copies();
    }
    if constexpr (T::kOverlaps) finish_product();
    if constexpr (!T::kMakesDq) ReleaseStage(barriers, T::kK, at_k.stage);
#pragma unroll
    for (int j = 0; j < T::kSize / 8; j++) {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        dk[j][e] *= params.scale;
        if constexpr (kDrops) dv[j][e] *= params.dropout.keep;
      }
    }
    const int first = tile.row + consumer * 64;
    const Head head(tile.sample, params.kv_heads);
    const uint32_t staging = (T::kMakesDq ? of_block : memory + T::kStaging) + consumer * T::kTileK;
    if constexpr (T::kMakesDq) SyncThreads(kBothConsumers<T>, T::kConsumers * 128);  // k is read
    StoreRows<E>(dk, to_dk, staging, first, head, 1 + consumer);
    StoreRows<E>(dv, to_dv, staging + T::kTileK / 2, first, head, 1 + consumer);
    if constexpr (T::kMakesDq) {
      if (thread == 0) WaitForStoresReads();
      SyncThreads(1 + consumer, 128);
      ReleaseStage(barriers, T::kK, at_k.stage);
    }
  }
  if (thread == 0) WaitForStores();
}

template <class E, class T, bool kCausal, bool kDrops>
__global__ __launch_bounds__(T::kThreads,
                             1) void FlashKeysKernel(const __grid_constant__ KeysMaps maps,
                                                     const __grid_constant__ Result<E> to_dk,
                                                     const __grid_constant__ Result<E> to_dv,
                                                     const Params params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __shared__ __align__(8) uint64_t of_barriers[2 * T::kAllPairs];
  unsigned char* shared = DynamicShared<unsigned char>();
  shared += -SharedAddress(shared) & (kAlignment - 1);
  const uint32_t barriers = SharedAddress(of_barriers);
  if (threadIdx.x == 0) {
    for (int pair = T::kPairs; pair < T::kAllPairs; pair++) {  // from a consumer to its writer
      InitBarrier(Full(barriers, pair), 4);
      InitBarrier(Empty(barriers, pair), 1);
    }
    InitBarriers(barriers, T::kK, T::kQ, T::kConsumers * kReleasing<false>);
    InitBarriers(barriers, T::kQ, T::kSummedQ, T::kConsumers * kReleasing<true>);
    InitBarriers(barriers, T::kSummedQ, T::kPairs, T::kConsumers * kReleasing<false>);
    PublishBarriers();
  }
  __syncthreads();
  GridDependencySynchronize();
  if (threadIdx.x / 128 == T::kConsumers) {
    ReduceRegisters<24>();
    if (threadIdx.x == T::kConsumers * 128)
      ProduceForKeys<E, T, kCausal>(maps, params, SharedAddress(shared), barriers);
    if constexpr (T::kMakesDq) {
      const int writer = (int)threadIdx.x / 32 - T::kConsumers * 4 - 1;  // a warp's first thread
      if (threadIdx.x % 32 == 0 && writer >= 0 && writer < T::kConsumers)
        WriteDq<T, kCausal>(params, SharedAddress(shared), barriers, writer);
    }
  } else {
    RaiseRegisters<240>();
    ConsumeForKeys<E, T, kCausal, kDrops>(&to_dk, &to_dv, params, shared, barriers);
  }
  TriggerProgrammaticLaunch();
#endif
}

__device__ __forceinline__ void Write16(void* to, const uint32_t (&x)[4]) {
  struct alignas(16) Words {
    uint32_t x[4];
  };
  *(Words*)to = {{x[0], x[1], x[2], x[3]}};
}

// Rounds the sums of dq to dq, a thread the same eight columns of two rows.
template <class E, int kSize>
__global__ void __launch_bounds__(kThreads)
    RowsOfSumsKernel(const float4* sums, int count, Divisor padded, Divisor heads, int rows,
                     int size, float scale, AttentionLayout of_q, E* dq) {
  constexpr int kColumns = kSize / 8, kQuads = kRowsOfSum / 2;
  GridDependencySynchronize();
  for (int item = (int)FirstItem(); item < count; item += (int)ItemStep()) {
    const int column = item % kColumns, quad = item / kColumns % kQuads;
    const int place = item / (kColumns * kQuads), of_sample = place * kRowsOfSum / padded;
    const int row = place * kRowsOfSum - of_sample * (int)padded.value + quad / 8 * 16 + quad % 8;
    if (row >= rows || column * 8 >= size) continue;
    const float4* from = sums + ((int64_t)place * kColumns + column) * 128 + quad * 4;
    uint32_t upper[4], lower[4];
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const float4 x = from[k];
      upper[k] = Packed<E>(x.x * scale, x.y * scale);
      lower[k] = Packed<E>(x.z * scale, x.w * scale);
    }
    const Head head(of_sample, heads);
    E* const to = dq + of_q.At(head.sample, head.number, row) + column * 8;
    Write16(to, upper);
    if (row + 8 < rows) Write16(to + 8 * of_q.position, lower);
  }
  TriggerProgrammaticLaunch();
}

// ---- dq ----

// Of 16 bits with up to 64 columns, and of tf32.
template <class E, int Size>
struct RowsTiling {
  static constexpr bool kLarge = kTf32<E> && Size > 64;
  static constexpr int kSize = Size, kConsumers = 2, kThreads = (kConsumers + 1) * 128;
  static constexpr int kRows = kConsumers * 64, kKeys = 64;
  static constexpr int kStages = kLarge ? 1 : 3;
  static constexpr int kCopies = kTf32<E> ? kStages : 0, kStagesQ = kTf32<E> ? 1 : 2;
  static constexpr int kTileQ = kRows * Size * (int)sizeof(E);
  static constexpr int kTileK = kKeys * Size * (int)sizeof(E);
  static constexpr int kOfK = kStagesQ * 2 * kTileQ;  // in shared memory
  static constexpr int kOfV = kOfK + kStages * kTileK, kOfCopies = kOfV + kStages * kTileK;
  static constexpr int kStaging = kOfCopies + kCopies * kTileK;
  static constexpr int kNbytes = kAlignment + kStaging + (kTf32<E> ? 0 : kTileQ);
  static_assert(kNbytes <= kSharedNbytes, "what a block has");
  static constexpr int kQ = 0, kK = kStagesQ, kV = kK + kStages;  // pairs of barriers
  static constexpr int kSummedK = kV + kStages, kPairs = kSummedK + kCopies;
  static constexpr bool kReads = kTf32<E> && !kLarge;  // q and dy into registers
  static constexpr bool kOverlaps = !kTf32<E>;         // a block's last product and the next
};

struct RowsMaps {
  CUtensorMap q, k, v, dy, summed_k;
};

template <class E, class T, bool kCausal>
__device__ __forceinline__ void ProduceForRows(const RowsMaps& maps, const Params& params,
                                               uint32_t memory, uint32_t barriers) {
  RingPosition<T::kStages> at;
  RingPosition<T::kStagesQ> at_q;
  RowTiles<T, kCausal> tiles(params);
  for (Tile tile; tiles.Next(tile); at_q.Advance()) {
    const Head of_rows(tile.sample, params.heads);
    const Head of_keys(tile.sample / params.group, params.kv_heads);
    const int pair = T::kQ + at_q.stage;
    const uint32_t to = memory + at_q.stage * 2 * T::kTileQ;
    WaitForPhase(Empty(barriers, pair), at_q.parity ^ 1);
    ArriveExpecting(Full(barriers, pair), 2 * T::kTileQ);
    LoadTile<E, T::kRows, T::kSize>(to, &maps.q, Full(barriers, pair), tile.row, of_rows);
    LoadTile<E, T::kRows, T::kSize>(to + T::kTileQ, &maps.dy, Full(barriers, pair), tile.row,
                                    of_rows);
    for (int block = 0; block < tile.end; block++, at.Advance()) {
      const auto begin = [&](int pair) {
        WaitForPhase(Empty(barriers, pair + at.stage), at.parity ^ 1);
        ArriveExpecting(Full(barriers, pair + at.stage), T::kTileK);
        return Full(barriers, pair + at.stage);
      };
      const auto load = [&](const CUtensorMap& map, int pair, uint32_t ring) {
        LoadTile<E, T::kKeys, T::kSize>(ring + at.stage * T::kTileK, &map, begin(pair),
                                        block * T::kKeys, of_keys);
      };
      load(maps.k, T::kK, memory + T::kOfK);
      load(maps.v, T::kV, memory + T::kOfV);
      if constexpr (kTf32<E>)
        LoadSummed<E, T::kKeys, T::kSize>(memory + T::kOfCopies + at.stage * T::kTileK,
                                          &maps.summed_k, begin(T::kSummedK), block * T::kKeys,
                                          of_keys);
    }
  }
}

template <class E, class T, bool kCausal, bool kDrops>
__device__ __forceinline__ void ConsumeForRows(const Result<E>* to_dq, const Params& params,
                                               const unsigned char* shared, uint32_t barriers) {
  const int consumer = Warpgroup(), thread = threadIdx.x % 128, l = threadIdx.x % 32;
  const uint32_t memory = SharedAddress(shared);
  const uint32_t staging = memory + T::kStaging + consumer * T::kTileQ / T::kConsumers;
  const float scale = params.scale * kLog2E;
  RingPosition<T::kStages> at;
  RingPosition<T::kStagesQ> at_q;
  [[maybe_unused]] std::conditional_t<kDrops, Drawn, const Params&> drawn(params);
  RowTiles<T, kCausal> tiles(params);
  for (Tile tile; tiles.Next(tile); at_q.Advance()) {
    const int row = tile.row + consumer * 64 + thread / 32 * 16 + l / 4;
    const int64_t of_row = (int64_t)tile.sample * params.padded + row;
    const float lse[2] = {params.lse[of_row], params.lse[of_row + 8]};
    const float sums[2] = {params.row_sums[of_row], params.row_sums[of_row + 8]};
    const int of_warpgroup = at_q.stage * 2 * T::kTileQ + consumer * 64 * 128;
    const uint32_t q = memory + of_warpgroup, dy = q + T::kTileQ;
    Sums<T::kSize> dq;
    SetZero(dq);
    WaitForStage(barriers, T::kQ, at_q);
    Operand<E, T::kReads ? T::kSize : kDepth<E>> of_q, of_dy;
    if constexpr (T::kReads) {
      ReadOperand<T::kSize, T::kRows>(of_q, shared + of_warpgroup);
      ReadOperand<T::kSize, T::kRows>(of_dy, shared + of_warpgroup + T::kTileQ);
      ReleaseStage<true>(barriers, T::kQ, at_q.stage);
    }
    int unreleased = -1;  // the stage of keys that a product still reads
    const auto release_keys = [&] {
      if (unreleased >= 0) ReleaseStage(barriers, T::kK, unreleased);
      unreleased = -1;
    };
    for (int block = 0; block < tile.end; block++, at.Advance()) {
      const uint32_t k = memory + T::kOfK + at.stage * T::kTileK;
      const uint32_t v = memory + T::kOfV + at.stage * T::kTileK;
      const uint32_t summed_k = kTf32<E> ? memory + T::kOfCopies + at.stage * T::kTileK : k;
      Sums<T::kKeys> weights, gradients;
      Operand<E, T::kKeys> operand;
      WaitForStage(barriers, T::kK, at);
      const int last = tile.row + consumer * 64 + 63, column = block * T::kKeys;
      if (kCausal && column > last) {  // none of these rows sees a key of it
        WaitForStage(barriers, T::kV, at);
        ReleaseStage(barriers, T::kV, at.stage);
        if constexpr (T::kOverlaps) {
          WaitForProducts<0>();
          release_keys();
        }
        ReleaseStage(barriers, T::kK, at.stage);
        if constexpr (kTf32<E>) {
          WaitForStage(barriers, T::kSummedK, at);
          ReleaseStage(barriers, T::kSummedK, at.stage);
        }
        continue;
      }
      BeginProducts();
      if constexpr (T::kReads)
        BeginProduct<E>(weights, of_q, k, false);
      else
        BeginProduct<E, T::kSize, T::kRows>(weights, q, k);
      WaitForStage(barriers, T::kV, at);
      BeginProducts();
      if constexpr (T::kReads)
        BeginProduct<E>(gradients, of_dy, v, false);
      else
        BeginProduct<E, T::kSize, T::kRows>(gradients, dy, v);
      if constexpr (T::kOverlaps) {
        WaitForProducts<2>();
        release_keys();
      }
      [[maybe_unused]] const auto kept = [&] {
        if constexpr (kDrops)
          return KeptOfRows<T::kKeys / 8>(drawn, tile.sample, row, column);
        else
          return 0;
      }();
      WaitForProducts<1>();
#pragma unroll
      for (int j = 0; j < T::kKeys / 8; j++) {
#pragma unroll
        for (int e = 0; e < 4; e++) weights[j][e] = ExpTwo(weights[j][e] * scale - lse[e / 2]);
      }
      if (column + T::kKeys > params.columns || (kCausal && column + T::kKeys > last - 63))
        Hide<kCausal>(weights, row, column + l % 4 * 2, params.columns, 0.f);
      WaitForProducts<0>();
      ReleaseStage(barriers, T::kV, at.stage);
      if constexpr (kTf32<E>) ReleaseStage(barriers, T::kK, at.stage);
#pragma unroll
      for (int j = 0; j < T::kKeys / 8; j++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
          if constexpr (kDrops)
            gradients[j][e] = kept.At(j, e) ? gradients[j][e] * params.dropout.keep : 0.f;
          gradients[j][e] = weights[j][e] * (gradients[j][e] - sums[e / 2]);
        }
      }
      Round<E, false>(gradients, operand);
      constexpr int kSummed = kTf32<E> ? T::kSummedK : T::kK;
      if constexpr (kTf32<E>) WaitForStage(barriers, kSummed, at);
      BeginProducts();
      BeginProduct<E>(dq, operand, summed_k);
      if constexpr (T::kOverlaps) {
        unreleased = at.stage;
      } else {
        WaitForProducts<0>();
        ReleaseStage(barriers, kSummed, at.stage);
      }
    }
    if constexpr (T::kOverlaps) {
      WaitForProducts<0>();
      release_keys();
    }
    if constexpr (!T::kReads) ReleaseStage(barriers, T::kQ, at_q.stage);
#pragma unroll
    for (int j = 0; j < T::kSize / 8; j++) {
#pragma unroll
      for (int e = 0; e < 4; e++) dq[j][e] *= params.scale;
    }
    StoreRows<E>(dq, to_dq, staging, tile.row + consumer * 64, Head(tile.sample, params.heads),
                 1 + consumer);
  }
  if (thread == 0) WaitForStores();
}

template <class E, class T, bool kCausal, bool kDrops>
__global__ __launch_bounds__(T::kThreads,
                             1) void FlashRowsKernel(const __grid_constant__ RowsMaps maps,
                                                     const __grid_constant__ Result<E> to_dq,
                                                     const Params params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __shared__ __align__(8) uint64_t of_barriers[2 * T::kPairs];
  unsigned char* shared = DynamicShared<unsigned char>();
  shared += -SharedAddress(shared) & (kAlignment - 1);
  const uint32_t barriers = SharedAddress(of_barriers);
  if (threadIdx.x == 0) {
    InitBarriers(barriers, T::kQ, T::kK, T::kConsumers * kReleasing<T::kReads>);
    InitBarriers(barriers, T::kK, T::kPairs, T::kConsumers * kReleasing<false>);
    PublishBarriers();
  }
  __syncthreads();
  GridDependencySynchronize();
  if (threadIdx.x / 128 == T::kConsumers) {
    ReduceRegisters<24>();
    if (threadIdx.x == T::kConsumers * 128)
      ProduceForRows<E, T, kCausal>(maps, params, SharedAddress(shared), barriers);
  } else {
    RaiseRegisters<240>();
    ConsumeForRows<E, T, kCausal, kDrops>(&to_dq, params, shared, barriers);
  }
  TriggerProgrammaticLaunch();
#endif
}

// ---- launches ----

template <class E, int kSize>
void LaunchBackward(const char* op, const FlashProblem& p, const FlashBackward& arrays,
                    DLStream stream) {
  using OfKeys = KeysTiling<E, kSize>;
  const int64_t samples = p.batch * p.heads, kv_samples = p.batch * p.kv_heads;
  const int64_t padded = CeilDiv(p.rows, kPadding) * kPadding;
  const int64_t key_tiles = CeilDiv(p.columns, OfKeys::kKeys);
  const int multiprocessors = Multiprocessors(p.ctx.device_id);
  const int64_t places = samples * padded / kRowsOfSum, parts = places * kPartsOfSum;  // of sums
  Scratch sums(p.ctx, (2 * samples * padded + parts) * (int64_t)sizeof(float), stream);
  float *scaled_lse = sums.floats(), *row_sums = scaled_lse + samples * padded;
  unsigned* const added = OfKeys::kMakesDq ? (unsigned*)(row_sums + samples * padded) : nullptr;
  constexpr int kGroup = kSize * (int)sizeof(E) / 16;  // threads of a row
  LaunchClusters(op, RowSumsKernel<E, kGroup>, Blocks(samples * padded * kGroup), 1, kThreads, 0,
                 true, stream, (const E*)arrays.y, (const E*)arrays.dy, arrays.lse, p.of_y,
                 (int)(samples * padded), Divisor(padded), Divisor(p.heads), (int)p.rows,
                 (int)p.size, scaled_lse, row_sums, added);
  const int64_t group = p.heads / p.kv_heads;
  Params params = {Shape(p)};
  params.padded = (int)padded;
  params.scale = p.scale, params.lse = scaled_lse, params.row_sums = row_sums;
  const Heads q = RowsOf(p, p.of_q, arrays.q), dy = RowsOf(p, p.of_y, arrays.dy);
  const Heads k = KeysOf(p, p.of_k, arrays.k), v = KeysOf(p, p.of_v, arrays.v);
  SummedArrays<E> summed(op, p, {q, dy, k}, stream);
  const auto map = [&](const Heads& x, int rows) { return MapOf<E>(op, p, x, rows); };
  const KeysMaps of_keys = {map(q, OfKeys::kRows),
                            map(k, OfKeys::kKeys),
                            map(v, OfKeys::kKeys),
                            map(dy, OfKeys::kRows),
                            summed.template NextMap<kSize>(q, OfKeys::kRows),
                            summed.template NextMap<kSize>(dy, OfKeys::kRows)};
  constexpr int64_t kNbytes = (kTf32<E> ? 4 : 2) * sizeof(E);  // of q and dy, or of k and v
  std::optional<Scratch> of_dq;
  unsigned blocks;
  if constexpr (OfKeys::kMakesDq) {
    of_dq.emplace(p.ctx, samples * padded * kSize * (int64_t)sizeof(float), stream);
    params.dq = of_dq->floats(), params.added = added;
    params.waves = WavesOf(key_tiles, padded / kPadding, kv_samples, p.causal, multiprocessors);
    blocks = (unsigned)(params.waves.width * params.waves.heads);
  } else {
    params.grid = GridOf(key_tiles, kv_samples, p.causal, kNbytes * p.rows * p.size * group, 1,
                         multiprocessors);
    blocks = (unsigned)params.grid.blocks;
  }
  WithVariant<E>(p, [&](auto causal, auto drops) {
    const auto kernel = FlashKeysKernel<E, OfKeys, causal.value, drops.value>;
    const Result<E> to_dk = ResultOf<E>(op, p, KeysOf(p, p.of_k, arrays.dk));
    const Result<E> to_dv = ResultOf<E>(op, p, KeysOf(p, p.of_v, arrays.dv));
    if constexpr (OfKeys::kMakesDq)  // blocks wait for those that add to dq before them
      LaunchTogether(op, kernel, blocks, OfKeys::kThreads, OfKeys::kNbytes, stream, of_keys, to_dk,
                     to_dv, params);
    else
      LaunchClusters(op, kernel, blocks, 1, OfKeys::kThreads, OfKeys::kNbytes, true, stream,
                     of_keys, to_dk, to_dv, params);
  });
  if constexpr (OfKeys::kMakesDq) {
    const int64_t items = places * kRowsOfSum / 2 * (kSize / 8);
    LaunchClusters(op, RowsOfSumsKernel<E, kSize>, Blocks(items), 1, kThreads, 0, true, stream,
                   (const float4*)params.dq, (int)items, Divisor(padded), Divisor(p.heads),
                   (int)p.rows, (int)p.size, p.scale, p.of_q, (E*)arrays.dq);
  } else {
    using OfRows = RowsTiling<E, kSize>;
    const RowsMaps of_rows = {map(q, OfRows::kRows), map(k, OfRows::kKeys), map(v, OfRows::kKeys),
                              map(dy, OfRows::kRows),
                              summed.template NextMap<kSize>(k, OfRows::kKeys)};
    params.grid = GridOf(CeilDiv(p.rows, OfRows::kRows), samples, p.causal,
                         kNbytes * p.columns * p.size, group, multiprocessors);
    WithVariant<E>(p, [&](auto causal, auto drops) {
      LaunchClusters(op, FlashRowsKernel<E, OfRows, causal.value, drops.value>,
                     (unsigned)params.grid.blocks, 1, OfRows::kThreads, OfRows::kNbytes, true,
                     stream, of_rows, ResultOf<E>(op, p, RowsOf(p, p.of_q, arrays.dq)), params);
    });
  }
}

template <class E>
void RunOf(const char* op, const FlashProblem& problem, const FlashBackward& arrays,
           DLStream stream) {
  if (problem.size <= 64) return LaunchBackward<E, 64>(op, problem, arrays, stream);
  LaunchBackward<E, 128>(op, problem, arrays, stream);
}

}  // namespace

void RunFlashBackward(const char* op, const FlashProblem& problem, const FlashBackward& arrays,
                      DLStream stream) {
  if (problem.dtype == DL_BFLOAT16) return RunOf<bfloat16>(op, problem, arrays, stream);
  if (problem.dtype == DL_FLOAT32) return RunOf<float>(op, problem, arrays, stream);
  RunOf<float16>(op, problem, arrays, stream);
}

}  // namespace cuda
}  // namespace dlsys
