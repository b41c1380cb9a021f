// The gradients of attention by wgmma and TMA, after FlashAttention-2 (Dao 2023, arXiv:2307.08691).
//
// The weights are computed anew from the rows' sums of exponentials. One kernel makes dk and dv, a
// block a tile of keys, over the rows that see them; it computes transposed scores, so that weights
// and their gradients are operands from registers as they come. Another makes dq, a block a tile of
// rows. Computing the scores twice, seven products where five would do, spares float32 partial sums
// of dq in memory and their atomic additions: results are deterministic. In both a thread of a
// producer warpgroup copies tiles by TMA, a ring of stages ahead of two consumer warpgroups, whose
// accumulators stay in registers. A first kernel sums dy y over each row. With D the factors of
// dropout, dv is of weights times D and the weights' gradients are D times dy vᵀ. float32 is
// multiplied as tf32, with transposed copies of q, dy and k in the workspace where positions are
// summed over; in the kernel of dq a block's rows are operands in registers up to size 64. What is
// written overlaps nothing. The tensor cores limit all but short rows, with tf32 also the reads of
// shared memory.
#include "cuda/attention/flash_tile.cuh"
#include "cuda/reduce/group.cuh"

namespace dlsys {
namespace cuda {
namespace {

using namespace flash;  // NOLINT: this is a part of it

struct Params : Shape {
  int padded = 0;                                   // rows, up to a multiple of kPadding
  float scale = 0.f;                                // of the scores
  const float *lse = nullptr, *row_sums = nullptr;  // (samples, padded): times log2 e, and of dy y
};
constexpr int kPadding = 128;

// ---- sums of rows ----

// kGroup threads take a row, 16 bytes each. Rows that see no key, and those that pad, get a sum of
// exponentials whose weights are 0.
template <class E, int kGroup>
__global__ void __launch_bounds__(kThreads)
    RowSumsKernel(const E* y, const E* dy, const float* lse, AttentionLayout of_y, int count,
                  Divisor padded, Divisor heads, int rows, int size, float* scaled_lse,
                  float* row_sums) {
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
  }
  TriggerProgrammaticLaunch();
}

// ---- dk and dv ----

template <class E, int Size>
struct KeysTiling {
  static constexpr bool kLarge = kTf32<E> && Size > 64;
  static constexpr int kSize = Size, kConsumers = 2, kThreads = (kConsumers + 1) * 128;
  static constexpr int kKeys = kConsumers * 64, kRows = kLarge ? 32 : 64;
  static constexpr bool kOverlaps = !kTf32<E> && Size <= 64;  // a block's last product and the next
  static constexpr int kStages = kLarge ? 1 : kOverlaps ? 3 : 2;
  static constexpr int kCopies = kTf32<E> ? kStages : 0;  // transposed
  static constexpr int kStagesK = !kTf32<E> && Size <= 64 ? 2 : 1;
  static constexpr int kTileK = kKeys * Size * (int)sizeof(E);
  static constexpr int kTileQ = kRows * Size * (int)sizeof(E);
  static constexpr int kOfQ = kStagesK * 2 * kTileK;  // in shared memory
  static constexpr int kOfDy = kOfQ + kStages * kTileQ;
  static constexpr int kToCopies = 2 * kStages * kTileQ;  // of q and dy, from these
  static constexpr int kStaging = kOfQ + 2 * (kStages + kCopies) * kTileQ;
  static constexpr int kOfLse = kStaging + (kTf32<E> ? 0 : 2 * kTileK);  // and the sums of rows
  static constexpr int kRowNbytes = kRows * (int)sizeof(float);
  static constexpr int kNbytes = kAlignment + kOfLse + kStages * 2 * kRowNbytes;
  static_assert(kNbytes <= kSharedNbytes, "what a block has");
  static constexpr int kK = 0, kQ = kStagesK, kDy = kQ + kStages;  // pairs of barriers
  static constexpr int kSummedQ = kDy + kStages, kSummedDy = kSummedQ + kCopies;
  static constexpr int kPairs = kSummedDy + kCopies;
  static constexpr bool kReadsAhead = kOverlaps;
};

// The tiles of keys of a block; the first keys of a head, which most rows see under a causal mask,
// come first. begin and end are of the rows that see a tile.
template <class T, bool kCausal>
class KeyTiles {
 public:
  __device__ __forceinline__ explicit KeyTiles(const Params& params) : params_(params) {}

  __device__ __forceinline__ bool Next(Tile& tile) {
    Position at;
    if (!turns_.Next(params_.grid, at)) return false;
    const int key = at.tile * T::kKeys, end = (params_.rows + T::kRows - 1) / T::kRows;
    tile = {key, at.sample, kCausal ? min(key / T::kRows, end) : 0, end};
    return true;
  }

 private:
  const Params& params_;
  Turns<kCausal> turns_;
};

// The maps of what a block loads: q and dy twice with tf32, transposed where they are summed over.
struct KeysMaps {
  CUtensorMap q, k, v, dy, summed_q, summed_dy;
};

template <class E, class T, bool kCausal>
__device__ __forceinline__ void ProduceForKeys(const KeysMaps& maps, const Params& params,
                                               uint32_t memory, uint32_t barriers) {
  RingPosition<T::kStages> at;
  RingPosition<T::kStagesK> at_k;
  KeyTiles<T, kCausal> tiles(params);
  for (Tile tile; tiles.Next(tile); at_k.Advance()) {
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
      for (int block = tile.begin; block < tile.end; block++, at.Advance()) {
        const int row = block * T::kRows;
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

template <class E, class T, bool kCausal, bool kDrops>
__device__ __forceinline__ void ConsumeForKeys(const Result<E>* to_dk, const Result<E>* to_dv,
                                               const Params& params, unsigned char* shared,
                                               uint32_t barriers) {
  const int consumer = Warpgroup(), thread = threadIdx.x % 128, l = threadIdx.x % 32;
  const uint32_t memory = SharedAddress(shared);
  const uint32_t staging = memory + T::kStaging + consumer * T::kTileK;
  const float scale = params.scale * kLog2E;
  RingPosition<T::kStages> at;
  RingPosition<T::kStagesK> at_k;
  [[maybe_unused]] std::conditional_t<kDrops, Drawn, const Params&> drawn(params);
  KeyTiles<T, kCausal> tiles(params);
  for (Tile tile; tiles.Next(tile); at_k.Advance()) {
    const int key = tile.row + consumer * 64 + thread / 32 * 16 + l / 4;
    const int of_warpgroup = at_k.stage * 2 * T::kTileK + consumer * 64 * 128;
    const uint32_t k = memory + of_warpgroup, v = k + T::kTileK;
    Sums<T::kSize> dk, dv;
    SetZero(dk);
    SetZero(dv);
    WaitForStage(barriers, T::kK, at_k);
    int block = tile.begin, sample = tile.sample * (int)params.group.value;
    int unreleased = -1;  // the stage of rows that a product still reads
    const auto release_rows = [&](int stage) {
      ReleaseStage(barriers, T::kQ, stage);
      ReleaseStage(barriers, T::kDy, stage);
    };
    const auto finish_product = [&] {
      WaitForProducts<0>();
      if (unreleased >= 0) release_rows(unreleased);
      unreleased = -1;
    };
    for (int turn = 0; turn < (tile.end - tile.begin) * (int)params.group.value;
         turn++, at.Advance()) {
      const uint32_t q = memory + T::kOfQ + at.stage * T::kTileQ;
      const uint32_t dy = memory + T::kOfDy + at.stage * T::kTileQ;
      const float* lse = (const float*)(shared + T::kOfLse) + at.stage * 2 * T::kRows;
      const float* row_sums = lse + T::kRows;
      const int row = block * T::kRows;
      [[maybe_unused]] const int of_rows = sample;
      if (++block == tile.end) block = tile.begin, sample++;  // of the next head
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
      BeginProducts();
      BeginProduct<E>(dk, of_scores, q + kToSummed);
      unreleased = at.stage;
      if constexpr (T::kOverlaps) continue;
      if constexpr (kTf32<E>) unreleased = -1;
      finish_product();
      release_copies();
    }
    if constexpr (T::kOverlaps) finish_product();
    ReleaseStage(barriers, T::kK, at_k.stage);
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
    StoreRows<E>(dk, to_dk, staging, first, head, 1 + consumer);
    StoreRows<E>(dv, to_dv, staging + T::kTileK / 2, first, head, 1 + consumer);
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
  __shared__ __align__(8) uint64_t of_barriers[2 * T::kPairs];
  unsigned char* shared = DynamicShared<unsigned char>();
  shared += -SharedAddress(shared) & (kAlignment - 1);
  const uint32_t barriers = SharedAddress(of_barriers);
  if (threadIdx.x == 0) InitBarriers(barriers, T::kPairs, T::kConsumers);
  __syncthreads();
  GridDependencySynchronize();
  if (threadIdx.x / 128 == T::kConsumers) {
    ReduceRegisters<24>();
    if (threadIdx.x == T::kConsumers * 128)
      ProduceForKeys<E, T, kCausal>(maps, params, SharedAddress(shared), barriers);
  } else {
    RaiseRegisters<240>();
    ConsumeForKeys<E, T, kCausal, kDrops>(&to_dk, &to_dv, params, shared, barriers);
  }
  TriggerProgrammaticLaunch();
#endif
}

// ---- dq ----

template <class E, int Size>
struct RowsTiling {
  static constexpr bool kLarge = kTf32<E> && Size > 64;
  static constexpr int kSize = Size, kConsumers = 2, kThreads = (kConsumers + 1) * 128;
  static constexpr int kRows = kConsumers * 64, kKeys = 64;
  static constexpr int kStages = kLarge ? 1 : kTf32<E> || Size <= 64 ? 3 : 2;
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
  static constexpr bool kReads = kTf32<E> && !kLarge;         // q and dy into registers
  static constexpr bool kOverlaps = !kTf32<E> && Size <= 64;  // a block's last product and the next
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
      ReleaseStage(barriers, T::kQ, at_q.stage);
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
  if (threadIdx.x == 0) InitBarriers(barriers, T::kPairs, T::kConsumers);
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
  using OfRows = RowsTiling<E, kSize>;
  const int64_t samples = p.batch * p.heads, kv_samples = p.batch * p.kv_heads;
  const int64_t padded = CeilDiv(p.rows, kPadding) * kPadding;
  const int64_t row_tiles = CeilDiv(p.rows, OfRows::kRows);
  const int64_t key_tiles = CeilDiv(p.columns, OfKeys::kKeys);
  const int multiprocessors = Multiprocessors(p.ctx.device_id);
  Scratch sums(p.ctx, 2 * samples * padded * (int64_t)sizeof(float), stream);
  float *scaled_lse = (float*)sums.data(), *row_sums = scaled_lse + samples * padded;
  constexpr int kGroup = kSize * (int)sizeof(E) / 16;  // threads of a row
  LaunchClusters(op, RowSumsKernel<E, kGroup>, Blocks(samples * padded * kGroup), 1, kThreads, 0,
                 true, stream, (const E*)arrays.y, (const E*)arrays.dy, arrays.lse, p.of_y,
                 (int)(samples * padded), Divisor(padded), Divisor(p.heads), (int)p.rows,
                 (int)p.size, scaled_lse, row_sums);
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
  const RowsMaps of_rows = {map(q, OfRows::kRows), map(k, OfRows::kKeys), map(v, OfRows::kKeys),
                            map(dy, OfRows::kRows),
                            summed.template NextMap<kSize>(k, OfRows::kKeys)};
  constexpr int64_t kNbytes = (kTf32<E> ? 4 : 2) * sizeof(E);  // of q and dy, or of k and v
  params.grid = GridOf(key_tiles, kv_samples, p.causal, kNbytes * p.rows * p.size * group, 1,
                       multiprocessors);
  WithVariant<E>(p, [&](auto causal, auto drops) {
    LaunchClusters(op, FlashKeysKernel<E, OfKeys, causal.value, drops.value>,
                   (unsigned)params.grid.blocks, 1, OfKeys::kThreads, OfKeys::kNbytes, true, stream,
                   of_keys, ResultOf<E>(op, p, KeysOf(p, p.of_k, arrays.dk)),
                   ResultOf<E>(op, p, KeysOf(p, p.of_v, arrays.dv)), params);
  });
  params.grid =
      GridOf(row_tiles, samples, p.causal, kNbytes * p.columns * p.size, group, multiprocessors);
  WithVariant<E>(p, [&](auto causal, auto drops) {
    LaunchClusters(op, FlashRowsKernel<E, OfRows, causal.value, drops.value>,
                   (unsigned)params.grid.blocks, 1, OfRows::kThreads, OfRows::kNbytes, true, stream,
                   of_rows, ResultOf<E>(op, p, RowsOf(p, p.of_q, arrays.dq)), params);
  });
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
