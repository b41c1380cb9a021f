// Attention, forward, by wgmma and TMA: FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608).
//
// Warp specialization: a thread of a producer warpgroup copies tiles of q, k and v by TMA, into
// rings of stages; each of two consumer warpgroups takes 64 rows of q and keeps its rows of y,
// their maxima and sums in registers (online softmax, Milakov and Gimelshein 2018). A consumer's
// product q kᵀ of the next keys and its product with v of these are under way while it finds the
// rows' maxima (ptxas of CUDA 13.0 moves the wait for the latter in front of the exponentials), and
// the two consumers take turns on the tensor cores. The weights never leave the registers. Blocks
// are persistent, and under a causal mask take pairs of a long and a short tile; heads go in bands
// whose k and v stay in L2. float32 is multiplied as tf32, with v from a transposed copy in the
// workspace. Dropped weights are 0 in the product with v alone; their words are drawn while
// products are under way. y overlaps nothing. Exponentials and the tensor cores limit it about
// equally at size 64, the tensor cores at 128.
#include "cuda/attention/flash_tile.cuh"

namespace dlsys {
namespace cuda {
namespace {

using namespace flash;  // NOLINT: this is a part of it

template <class E, int Size>
struct Tiling {
  static constexpr int kSize = Size, kConsumers = 2, kThreads = (kConsumers + 1) * 128;
  static constexpr int kRows = kConsumers * 64, kKeys = kTf32<E> ? 64 : 128;
  static constexpr int kStages = kTf32<E> && Size <= 64 ? 4 : 2;
  static constexpr int kStagesQ = kTf32<E> && Size > 64 ? 1 : 2;
  static constexpr int kTileQ = kRows * Size * (int)sizeof(E);
  static constexpr int kTileK = kKeys * Size * (int)sizeof(E);
  static constexpr int kOfK = kStagesQ * kTileQ,
                       kOfV = kOfK + kStages * kTileK;  // in shared memory
  static constexpr int kStaging = kOfV + kStages * kTileK;
  static constexpr int kNbytes = kAlignment + kStaging + (kTf32<E> ? 0 : kTileQ);
  static_assert(kNbytes <= kSharedNbytes, "what a block has");
  static constexpr int kQ = 0, kK = kStagesQ, kV = kK + kStages;  // pairs of barriers
  static constexpr int kPairs = kV + kStages;
  static constexpr bool kReadsQ = kTf32<E> && Size <= 64;  // into registers
  // A consumer lets the other one in when its products are done, not when they are begun: the
  // exponentials of one and the products of the other are side by side then. Measured at each size.
  static constexpr bool kPassesLate = !kTf32<E> && Size <= 64;
};

struct Params : Shape {
  float scale = 0.f;  // of the scores, times log2 e
  float* lse = nullptr;
};

// ---- the producer ----

template <class E, class T, bool kCausal>
__device__ __forceinline__ void Produce(const CUtensorMap* map_q, const CUtensorMap* map_k,
                                        const CUtensorMap* map_v, const Params& params,
                                        uint32_t memory, uint32_t barriers) {
  RingPosition<T::kStages> at_k, at_v;
  RingPosition<T::kStagesQ> at_q;
  const auto begin = [&](int pair, RingPosition<T::kStages>& at) {
    pair += at.stage;
    WaitForPhase(Empty(barriers, pair), at.parity ^ 1);
    ArriveExpecting(Full(barriers, pair), T::kTileK);
    return Full(barriers, pair);
  };
  RowTiles<T, kCausal> tiles(params);
  for (Tile tile; tiles.Next(tile); at_q.Advance()) {
    const Head of_q(tile.sample, params.heads);
    const Head of_keys(tile.sample / params.group, params.kv_heads);
    const int pair = T::kQ + at_q.stage;
    WaitForPhase(Empty(barriers, pair), at_q.parity ^ 1);
    ArriveExpecting(Full(barriers, pair), T::kTileQ);
    LoadTile<E, T::kRows, T::kSize>(memory + at_q.stage * T::kTileQ, map_q, Full(barriers, pair),
                                    tile.row, of_q);
    // v of a tile of keys comes after k of the next one, in the order in which they are needed.
    for (int block = tile.end - 1; block >= -1; block--) {
      if (block >= 0) {
        LoadTile<E, T::kKeys, T::kSize>(memory + T::kOfK + at_k.stage * T::kTileK, map_k,
                                        begin(T::kK, at_k), block * T::kKeys, of_keys);
        at_k.Advance();
      }
      if (block < tile.end - 1) {
        LoadSummed<E, T::kKeys, T::kSize>(memory + T::kOfV + at_v.stage * T::kTileK, map_v,
                                          begin(T::kV, at_v), (block + 1) * T::kKeys, of_keys);
        at_v.Advance();
      }
    }
  }
}

// ---- consumers ----

// Of this thread's two rows, over all keys so far: the largest score, and this thread's part of the
// sum of exponentials.
struct RowState {
  float largest[2] = {-INFINITY, -INFINITY}, sum[2] = {0.f, 0.f};
};

// Makes exponentials of scores, and what earlier ones have to be multiplied by. Maxima and sums are
// found in several parts at a time, since a warp has nobody to take turns with.
template <int kColumns>
__device__ __forceinline__ void TakeExponentials(float (&scores)[kColumns][4], RowState& rows,
                                                 float scale, float (&shrink)[2]) {
  constexpr int kParts = 4;
  float largest[2][kParts], shift[2], sum[2][kParts] = {};
#pragma unroll
  for (int j = 0; j < kColumns; j++) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const float of_pair = fmaxf(scores[j][half * 2], scores[j][half * 2 + 1]);
      float& part = largest[half][j % kParts];
      part = j < kParts ? of_pair : fmaxf(part, of_pair);
    }
  }
#pragma unroll
  for (int half = 0; half < 2; half++) {
    float (&part)[kParts] = largest[half];
    float most = fmaxf(fmaxf(part[0], part[1]), fmaxf(part[2], part[3]));
    most = fmaxf(most, rows.largest[half]);
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
    shift[half] = most == -INFINITY ? 0.f : most * scale;
    shrink[half] = ExpTwo(rows.largest[half] * scale - shift[half]);
    rows.largest[half] = most;
  }
#pragma unroll
  for (int j = 0; j < kColumns; j++) {
#pragma unroll
    for (int e = 0; e < 4; e++) {
      scores[j][e] = ExpTwo(scores[j][e] * scale - shift[e / 2]);
      sum[e / 2][j % 2 * 2 + e % 2] += scores[j][e];
    }
  }
#pragma unroll
  for (int half = 0; half < 2; half++)
    rows.sum[half] = rows.sum[half] * shrink[half] +
                     ((sum[half][0] + sum[half][1]) + (sum[half][2] + sum[half][3]));
}

// Divides rows by their sums, times `keep`, and writes the sums' logarithms.
template <int kColumns>
__device__ __forceinline__ void Finish(float (&y)[kColumns][4], const RowState& rows,
                                       const Params& params, int row, int sample, float keep) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    float sum = rows.sum[half];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    const float inverse = sum == 0.f ? 0.f : Reciprocal(sum) * keep;
#pragma unroll
    for (int j = 0; j < kColumns; j++) {
      y[j][half * 2] *= inverse;
      y[j][half * 2 + 1] *= inverse;
    }
    const int at = row + half * 8;
    if (threadIdx.x % 4 == 0 && at < params.rows)
      params.lse[(int64_t)sample * params.rows + at] =
          sum == 0.f ? -INFINITY : (rows.largest[half] * params.scale + LogTwo(sum)) * kLn2;
  }
}

template <class E, class T, bool kCausal, bool kDrops>
__device__ __forceinline__ void Consume(const Result<E>* to_y, const Params& params,
                                        const unsigned char* shared, uint32_t barriers) {
  const int consumer = Warpgroup(), thread = threadIdx.x % 128, l = threadIdx.x % 32;
  const uint32_t memory = SharedAddress(shared);
  const uint32_t staging = memory + T::kStaging + consumer * T::kTileQ / T::kConsumers;
  // Consumers take turns: each waits at its own barrier, and then lets the other one in.
  constexpr int kTurn = 1 + T::kConsumers;
  RingPosition<T::kStages> at_k, at_v;
  RingPosition<T::kStagesQ> at_q;
  const auto k = [&] { return memory + T::kOfK + at_k.stage * T::kTileK; };
  const auto v = [&] { return memory + T::kOfV + at_v.stage * T::kTileK; };
  const auto wait = [&](int pair, const auto& at) { WaitForStage(barriers, pair, at); };
  const auto release = [&](int pair, auto& at) {
    ReleaseStage(barriers, pair, at.stage);
    at.Advance();
  };
  const auto release_q = [&] {
    ReleaseStage<T::kReadsQ>(barriers, T::kQ, at_q.stage);
    at_q.Advance();
  };
  [[maybe_unused]] std::conditional_t<kDrops, Drawn, const Params&> drawn(params);
  RowTiles<T, kCausal> tiles(params);
  for (Tile tile; tiles.Next(tile);) {
    const int row = tile.row + consumer * 64 + thread / 32 * 16 + l / 4;
    const int of_warpgroup = at_q.stage * T::kTileQ + consumer * 64 * 128;  // its part of q
    // Which weights of a block are kept, and their rounding with the others 0.
    const auto kept_of = [&](int block) {
      if constexpr (kDrops)
        return KeptOfRows<T::kKeys / 8>(drawn, tile.sample, row, block * T::kKeys);
      else
        return 0;
    };
    const auto round = [&](auto& scores, auto& weights, const auto& kept) {
      if constexpr (kDrops) {
#pragma unroll
        for (int j = 0; j < T::kKeys / 8; j++) {
#pragma unroll
          for (int e = 0; e < 4; e++) scores[j][e] = kept.At(j, e) ? scores[j][e] : 0.f;
        }
      }
      Round<E, true>(scores, weights);
    };
    Sums<T::kSize> y;
    Sums<T::kKeys> scores;
    Operand<E, T::kKeys> weights;
    Operand<E, T::kReadsQ ? T::kSize : kDepth<E>> of_q;
    const auto begin_scores = [&] {
      BeginProducts();
      if constexpr (T::kReadsQ)
        BeginProduct<E>(scores, of_q, k(), false);
      else
        BeginProduct<E, T::kSize, T::kRows>(scores, memory + of_warpgroup, k());
    };
    // Hides keys of a block from rows, of `part` of its eights of columns.
    const auto hide = [&](auto& part, int block, int first = 0) {
      Hide<kCausal>(part, row, block * T::kKeys + first + l % 4 * 2, params.columns, -INFINITY);
    };
    RowState rows;
    float shrink[2];
    SetZero(y);
    wait(T::kQ, at_q);
    if constexpr (T::kReadsQ) {
      ReadOperand<T::kSize, T::kRows>(of_q, shared + of_warpgroup);
      release_q();
    }
    int block = tile.end - 1;
    if (kCausal && T::kKeys < T::kRows && block * T::kKeys >= tile.row + (consumer + 1) * 64) {
      wait(T::kK, at_k);  // none of these rows sees a key of it
      release(T::kK, at_k);
      wait(T::kV, at_v);
      release(T::kV, at_v);
      SyncThreads(kTurn + consumer, 256);
      ArriveThreads(kTurn + 1 - consumer, 256);
      block--;
    }
    wait(T::kK, at_k);
    begin_scores();
    const auto kept_first = kept_of(block);
    WaitForProducts<0>();
    release(T::kK, at_k);
    constexpr int kHalf = T::kKeys / 16;
    using Half = float[kHalf][4];
    if (kCausal && T::kKeys == T::kRows && block * T::kKeys == tile.row) {
      // The first consumer's rows see half of these keys, the other's all keys of that half.
      if (consumer == 0) {
        hide((Half&)scores, block);
        TakeExponentials((Half&)scores, rows, params.scale, shrink);
        SetZero((Half&)scores[kHalf]);
      } else {
        if (tile.row + T::kRows > params.columns) hide((Half&)scores, block);
        hide((Half&)scores[kHalf], block, T::kKeys / 2);
        TakeExponentials(scores, rows, params.scale, shrink);
      }
    } else {
      hide(scores, block);
      TakeExponentials(scores, rows, params.scale, shrink);
    }
    round(scores, weights, kept_first);
    if (tile.end > 1 && consumer == 1) ArriveThreads(kTurn, 256);
    while (--block >= 0) {
      wait(T::kK, at_k);
      SyncThreads(kTurn + consumer, 256);
      begin_scores();
      wait(T::kV, at_v);
      BeginProducts();
      BeginProduct<E>(y, weights, v());
      const auto pass = [&] {
        if (block > 0 || consumer == 0) ArriveThreads(kTurn + 1 - consumer, 256);
      };
      if (!T::kPassesLate) pass();
      const auto kept = kept_of(block);
      WaitForProducts<1>();
      release(T::kK, at_k);
      // Tiles of keys as long as those of rows have nothing to hide but in the last one.
      if (kCausal && T::kKeys < T::kRows && (block + 1) * T::kKeys > tile.row + consumer * 64)
        hide(scores, block);
      TakeExponentials(scores, rows, params.scale, shrink);
      WaitForProducts<0>();
      if (T::kPassesLate) pass();
      release(T::kV, at_v);
#pragma unroll
      for (int j = 0; j < T::kSize / 8; j++) {
#pragma unroll
        for (int e = 0; e < 4; e++) y[j][e] *= shrink[e / 2];
      }
      round(scores, weights, kept);
    }
    if constexpr (!T::kReadsQ) release_q();
    wait(T::kV, at_v);
    BeginProducts();
    BeginProduct<E>(y, weights, v());
    WaitForProducts<0>();
    release(T::kV, at_v);
    Finish(y, rows, params, row, tile.sample, kDrops ? params.dropout.keep : 1.f);
    StoreRows<E>(y, to_y, staging, tile.row + consumer * 64, Head(tile.sample, params.heads),
                 1 + consumer);
  }
  if (thread == 0) WaitForStores();
}

template <class E, class T, bool kCausal, bool kDrops>
__global__ __launch_bounds__(T::kThreads,
                             1) void FlashForwardKernel(const __grid_constant__ CUtensorMap map_q,
                                                        const __grid_constant__ CUtensorMap map_k,
                                                        const __grid_constant__ CUtensorMap map_v,
                                                        const __grid_constant__ Result<E> to_y,
                                                        const Params params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __shared__ __align__(8) uint64_t of_barriers[2 * T::kPairs];
  unsigned char* shared = DynamicShared<unsigned char>();
  shared += -SharedAddress(shared) & (kAlignment - 1);
  const uint32_t barriers = SharedAddress(of_barriers);
  if (threadIdx.x == 0) {
    InitBarriers(barriers, T::kQ, T::kK, T::kConsumers * kReleasing<T::kReadsQ>);
    InitBarriers(barriers, T::kK, T::kPairs, T::kConsumers * kReleasing<false>);
    PublishBarriers();
  }
  __syncthreads();
  GridDependencySynchronize();
  if (threadIdx.x / 128 == T::kConsumers) {
    ReduceRegisters<24>();
    if (threadIdx.x == T::kConsumers * 128)
      Produce<E, T, kCausal>(&map_q, &map_k, &map_v, params, SharedAddress(shared), barriers);
  } else {
    RaiseRegisters<240>();
    Consume<E, T, kCausal, kDrops>(&to_y, params, shared, barriers);
  }
  TriggerProgrammaticLaunch();
#endif
}

// ---- launches ----

template <class E, class T>
void LaunchForward(const char* op, const FlashProblem& problem, const FlashForward& arrays,
                   DLStream stream) {
  const FlashProblem& p = problem;
  Params params = {Shape(p)};
  params.grid = GridOf(CeilDiv(p.rows, T::kRows), p.batch * p.heads, p.causal,
                       2 * sizeof(E) * p.columns * p.size, p.heads / p.kv_heads,
                       Multiprocessors(p.ctx.device_id));
  params.scale = p.scale * kLog2E;
  params.lse = arrays.lse;
  const Heads q = RowsOf(p, p.of_q, arrays.q), k = KeysOf(p, p.of_k, arrays.k);
  const Heads v = KeysOf(p, p.of_v, arrays.v), y = RowsOf(p, p.of_y, arrays.y);
  SummedArrays<E> summed(op, p, {v}, stream);
  const CUtensorMap of_v = summed.template NextMap<T::kSize>(v, T::kKeys);
  WithVariant<E>(p, [&](auto causal, auto drops) {
    LaunchClusters(op, FlashForwardKernel<E, T, causal.value, drops.value>,
                   (unsigned)params.grid.blocks, 1, T::kThreads, T::kNbytes, true, stream,
                   MapOf<E>(op, p, q, T::kRows), MapOf<E>(op, p, k, T::kKeys), of_v,
                   ResultOf<E>(op, p, y), params);
  });
}

template <class E>
void RunOf(const char* op, const FlashProblem& problem, const FlashForward& arrays,
           DLStream stream) {
  if (problem.size <= 64)
    LaunchForward<E, Tiling<E, 64>>(op, problem, arrays, stream);
  else
    LaunchForward<E, Tiling<E, 128>>(op, problem, arrays, stream);
}

}  // namespace

const char* FlashError(const FlashProblem& problem) {
  constexpr int64_t kMost = int64_t(1) << 30;
  const char* error = WgmmaError(problem.ctx.device_id);
  if (*error) return error;
  if (problem.size % 8 || problem.size < 8 || problem.size > 128)
    return "it takes heads of 8 to 128 extents, a multiple of 8";
  if (std::min({problem.batch, problem.heads, problem.rows, problem.columns}) == 0)
    return "it takes at least one query and one key";
  const int64_t longest = std::max(problem.rows, problem.columns);
  if (longest > kMost || CeilDiv(longest, 64) * problem.batch * problem.heads > kMost)
    return "it takes at most 2^30 positions";
  return "";
}

void RunFlashForward(const char* op, const FlashProblem& problem, const FlashForward& arrays,
                     DLStream stream) {
  if (problem.dtype == DL_BFLOAT16) return RunOf<bfloat16>(op, problem, arrays, stream);
  if (problem.dtype == DL_FLOAT32) return RunOf<float>(op, problem, arrays, stream);
  RunOf<float16>(op, problem, arrays, stream);
}

}  // namespace cuda
}  // namespace dlsys
