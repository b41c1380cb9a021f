// GEMM in true float32 by FFMA, fed by TMA, for large products on sm_90a; ffma.cu launches it and
// says how tiles are shared, kernel.cuh has the parameters.
//
// A warp computes 64 x 64 of C, a thread 16 x 8 sums; a block 256 x 128, alone on a multiprocessor,
// or 128 x 128, as one of two. TMA copies panels into a ring of stages in shared memory; a warp
// waits for the next panel's mbarrier before it multiplies this one, so that its loop has no
// branch, and arrives at another behind it. Operands lie (k, mn), so that a thread's rows and
// columns at one k are quads. Blocks are persistent, and share what would not fill a wave
// (FfmaShares). Of a block of 256 x 128, a warpgroup of its own copies; it also transposes panels
// of operands that lie along K, where ffma.cu does not have them copied. Sums go over k in
// ascending order within a block, then over blocks.
//
// Limited by the issue of FFMA: 128 of 135 instructions for each k are multiply-adds, and each of
// the six loads takes some three cycles from them, since it writes four registers: 86 % of FFMA's
// rate at most, of which the loop reaches 82 to 84 (FfmaAccumulator).
#pragma once
#include <algorithm>

#include "cuda/gemm/kernel.cuh"
#include "cuda/instructions/hopper.cuh"
#include "cuda/instructions/ring.cuh"

namespace dlsys {
namespace cuda {

// In the order of their costs in ffma.cu.
using FfmaTilings =
    std::tuple<LargeTiling<128, 128, 16, 8, 32, 3, 2>, LargeTiling<256, 128, 16, 8, 32, 4, 1>>;
constexpr int kFfmaUnroll = 8;  // of k, an even divisor of a panel's
template <class T>
constexpr int kFfmaSteps = T::kTileK / kFfmaUnroll;  // of a panel
constexpr int kFfmaAlignment = 1024;                 // of what TMA writes in its swizzle

template <class T>
constexpr int kFfmaPanelA = T::kTileM * T::kTileK;
template <class T>
constexpr int kFfmaStageNumel = kFfmaPanelA<T> + T::kTileN * T::kTileK;
// Of a warp, through which its sums leave: two rows of each lane.
template <class T>
constexpr int kFfmaStaging = 2 * T::kLanesM * T::kWarpN;

// Shared memory and threads of a block: a ring of stages, what warps store through, and the next
// panels of operands that lie along K. Registers are by thread, of 168 that each begins with; with
// fewer, warps that multiply would load too late.
template <class T, bool kAlongA, bool kAlongB>
struct FfmaMemory {
  static constexpr bool kTransposes = kAlongA || kAlongB, kProduces = T::kResident == 1;
  static constexpr int kStages = T::kStages - kTransposes;
  static_assert(kProduces || !kTransposes);
  static constexpr int kStagingAt = kStages * kFfmaStageNumel<T>;
  static constexpr int kRawAt = kStagingAt + T::kThreads / 32 * kFfmaStaging<T>;
  static constexpr int kRawOfA = kAlongA ? kFfmaPanelA<T> : 0;
  static constexpr int kRaw = kRawOfA + (kAlongB ? T::kTileN * T::kTileK : 0);
  static constexpr size_t kNbytes = (kRawAt + kRaw) * sizeof(float) + kFfmaAlignment;
  static constexpr int kThreads = T::kThreads + (kProduces ? 128 : 0);
  static constexpr int kRegisters = kTransposes ? 224 : 232;
  static constexpr int kProducerRegisters = kTransposes ? 56 : 40;
};

// The row and column of a lane among those of its warp. Adjacent lanes share a column, lanes two
// apart a row: shared memory broadcasts to them.
template <class T>
__device__ __forceinline__ int LaneRow(int lane) {
  return lane % 2 + lane / (2 * T::kLanesN) * 2;
}
template <class T>
__device__ __forceinline__ int LaneCol(int lane) {
  return lane / 2 % T::kLanesN;
}

// A thread's sums, and its operands at this k and at the next. An FFMA that reads three registers
// takes two cycles, and some more time where it reads two of one bank, the even or the odd ones. So
// the products of a column of sums go down and those of the next one up, such that a column's
// operand is kept for all of its rows, and a sum is in the other bank than its row's operand
// (Begin). A load has to stand 40 instructions before its use, and apart from other loads, which
// the order of Read and Add and enough registers make the compiler do: the loop is otherwise 4 %
// slower. It is unrolled by eight of k, for instructions of 16 do not fit the cache, and panels are
// deep, since each costs a warp its wait.
template <class T>
class FfmaAccumulator {
 public:
  __device__ FfmaAccumulator(int row, int col, int lane)
      : row_(row + 4 * LaneRow<T>(lane)), col_(col + 4 * LaneCol<T>(lane)) {}

  // Reads the first operands of a panel. Sums begin as `zeros` in shared memory, read as quads that
  // have the rows of each pair exchanged: a quad lies in four adjacent registers, so that sums of
  // even rows come to odd registers, where operands of even rows are in even ones.
  __device__ __forceinline__ void Begin(const float4 (&zeros)[T::kAccumulators / 4],
                                        const float* panel) {
#pragma unroll
    for (int j = 0; j < T::kThreadN; j++)
#pragma unroll
      for (int i = 0; i < T::kThreadM; i += 4) {
        const float4 x = zeros[j * T::kThreadM / 4 + i / 4];
        sums_[i + 1][j] = x.x, sums_[i][j] = x.y, sums_[i + 3][j] = x.z, sums_[i + 2][j] = x.w;
      }
    from_a_ = panel + row_, from_b_ = panel + kFfmaPanelA<T> + col_;
    Read(0);
  }

  // Multiplies kFfmaUnroll of k and reads the first operands of what follows: in this panel, or
  // where it `ends`, in the next.
  __device__ __forceinline__ void Multiply(bool ends, const float* next) {
    const float* const next_a = ends ? next + row_ : from_a_ + kFfmaUnroll * T::kTileM;
    const float* const next_b =
        ends ? next + kFfmaPanelA<T> + col_ : from_b_ + kFfmaUnroll * T::kTileN;
#pragma unroll
    for (int k = 0; k < kFfmaUnroll - 1; k++) {
      Read(k + 1);
      Add(k);
    }
    from_a_ = next_a, from_b_ = next_b;
    Read(0);
    Add(kFfmaUnroll - 1);
  }

  // Stores the sums as a part of a tile, in the quads of a column that Begin made.
  __device__ __forceinline__ void StorePart(float4* part) const {
#pragma unroll
    for (int j = 0; j < T::kThreadN; j++)
#pragma unroll
      for (int i = 0; i < T::kThreadM; i += 4)
        part[(j * T::kThreadM / 4 + i / 4) * T::kThreads + threadIdx.x] =
            make_float4(sums_[i + 1][j], sums_[i][j], sums_[i + 3][j], sums_[i + 2][j]);
  }

  // Stores the sums to C, from `c` on, of which `rows` by `cols` exist, in rows of aligned quads. A
  // `zero` that only run time knows is added: quads that lie in registers of one row would meet the
  // operands' banks in the loop.
  __device__ __forceinline__ void StoreAligned(float* c, int64_t n, int rows, int cols,
                                               float zero) const {
    const int row0 = row_ % T::kWarpM, col0 = col_ % T::kWarpN;
#pragma unroll
    for (int i = 0; i < T::kThreadM; i++) {
      const int row = row0 + i / 4 * 4 * T::kLanesM + i % 4;
      if (row >= rows) break;
#pragma unroll
      for (int j = 0; j < T::kThreadN; j += 4) {
        const int col = col0 + j * T::kLanesN;
        if (col < cols)
          *(float4*)(c + row * n + col) =
              make_float4(sums_[i][j] + zero, sums_[i][j + 1] + zero, sums_[i][j + 2] + zero,
                          sums_[i][j + 3] + zero);
      }
    }
  }

  // Calls f(row, col, quad) for the quads of the warp's sums, by way of `staging`. They are stored
  // there one by one: as quads they would have to lie in registers of one row, whose banks then
  // meet those of the operands.
  template <class F>
  __device__ __forceinline__ void ForQuads(volatile float* staging, F&& f) const {
    constexpr int kInRow = T::kWarpN / 4;
    const int lane_row = row_ % T::kWarpM / 4, lane_col = col_ % T::kWarpN;
#pragma unroll
    for (int first = 0; first < T::kThreadM; first += 2) {
#pragma unroll
      for (int i = 0; i < 2; i++)
#pragma unroll
        for (int j = 0; j < T::kThreadN; j++)
          staging[(lane_row * 2 + i) * T::kWarpN + lane_col + j / 4 * 4 * T::kLanesN + j % 4] =
              sums_[first + i][j];
      __syncwarp();
#pragma unroll 1
      for (int q = (int)threadIdx.x % 32; q < kFfmaStaging<T> / 4; q += 32) {
        const int row = q / kInRow;  // staged
        f((first / 4 * T::kLanesM + row / 2) * 4 + first % 4 + row % 2, q % kInRow * 4,
          *(const float4*)((float*)staging + q * 4));
      }
      __syncwarp();
    }
  }

 private:
  // Reads the operands k further on; the parity of k says which they replace.
  __device__ __forceinline__ void Read(int k) {
    ReadQuads<T::kLanesN>(from_b_ + k * T::kTileN, b_[k % 2]);
    ReadQuads<T::kLanesM>(from_a_ + k * T::kTileM, a_[k % 2]);
  }

  // Adds the products of operands that were read, from the last column to the first.
  __device__ __forceinline__ void Add(int k) {
#pragma unroll
    for (int j = T::kThreadN - 1; j >= 0; j--)
#pragma unroll
      for (int q = 0; q < T::kThreadM; q++) {
        const int i = j % 2 ? T::kThreadM - 1 - q : q;
        sums_[i][j] = fmaf(a_[k % 2][i], b_[k % 2][j], sums_[i][j]);
      }
  }

  const int row_, col_;
  const float *from_a_, *from_b_;
  float a_[2][T::kThreadM], b_[2][T::kThreadN];
  float sums_[T::kThreadM][T::kThreadN];
};

// The first row and column of a warp in its tile. The warps of a column are of all four schedulers,
// and so are those of two rows: at C's edge, warps without elements of it leave their issue slots
// to the others.
struct WarpOrigin {
  int row, col;
};
template <class T>
__device__ __forceinline__ WarpOrigin FfmaWarpOrigin(int warp) {
  constexpr int kWarpsM = T::kTileM / T::kWarpM;
  const int col = warp / kWarpsM, row = (warp + col * 2) % kWarpsM;
  return {row * T::kWarpM, col * T::kWarpN};
}

// How a product is shared among the blocks that run together. Of its tiles, the first `split_tiles`
// lie one behind the other along K, cut into as many equal shares as there are blocks (stream-K),
// at any step of kFfmaUnroll of k; the blocks take the others in turn. A tile that a block finishes
// goes to C; of others, blocks write their parts of the sums, which FfmaSumKernel adds in the order
// of K.
struct FfmaShares {
  int steps;  // along K
  int tiles, split_tiles, blocks;
  bool plain;  // there is no epilogue, and rows of C are of aligned quads
  float4* parts;

  __host__ __device__ int BeginOf(int block) const {
    return (int)((int64_t)split_tiles * steps * block / blocks);
  }
  // The block that multiplies a step of those that are shared.
  __host__ __device__ int BlockAt(int step) const {
    return (int)((((int64_t)step + 1) * blocks - 1) / ((int64_t)split_tiles * steps));
  }
};

// Steps [begin, end) of a tile, in panels from `begin` on. The parts of a tile have adjacent slots,
// in the order of K.
struct FfmaSegment {
  int tile, begin, end, slot;
};

// What a block multiplies.
class FfmaSegments {
 public:
  __device__ explicit FfmaSegments(const FfmaShares& shares)
      : shares_(shares),
        at_(shares.BeginOf((int)blockIdx.x)),
        end_(shares.BeginOf((int)blockIdx.x + 1)),
        whole_(shares.split_tiles + (int)blockIdx.x) {}

  __device__ __forceinline__ bool Next(FfmaSegment& segment) {
    if (at_ < end_) {
      const int tile = at_ / shares_.steps, begin = at_ - tile * shares_.steps;
      segment = {tile, begin, min(shares_.steps, begin + end_ - at_), (int)blockIdx.x + tile};
      at_ += segment.end - begin;
      return true;
    }
    segment = {whole_, 0, shares_.steps, 0};
    whole_ += shares_.blocks;
    return segment.tile < shares_.tiles;
  }

 private:
  const FfmaShares& shares_;
  int at_, end_, whole_;
};

// Transposes a panel of kRows rows of 128 bytes, their quads exchanged, as a warpgroup: a thread
// takes four rows at four k at a time, so that neither reads nor stores meet in a bank.
template <int kRows>
__device__ __forceinline__ void TransposePanel(const float* raw, float* panel) {
  constexpr int kRow = 32, kQuads = kRow / 4, kOfWarp = 32 * 4;  // rows
  static_assert(kRows % kOfWarp == 0);
  const int lane = (int)threadIdx.x % 32, eighth = lane % 8;
  const int quad0 = (eighth / 2 + (int)threadIdx.x % 128 / 32) % kQuads;
#pragma unroll
  for (int at = 0; at < kRows / kOfWarp * 2; at++) {
    const int row = at / 2 * kOfWarp + lane * 4, quad = quad0 ^ at % 2 * 4;
    const float* const from = raw + row * kRow;
    float4 v[4];
#pragma unroll
    for (int e = 0; e < 4; e++)
      v[e] = *(const float4*)(from + e * kRow + (quad ^ eighth % 2 * 4 ^ e) * 4);
    float* const to = panel + quad * 4 * kRows + row;
    *(float4*)to = make_float4(v[0].x, v[1].x, v[2].x, v[3].x);
    *(float4*)(to + kRows) = make_float4(v[0].y, v[1].y, v[2].y, v[3].y);
    *(float4*)(to + 2 * kRows) = make_float4(v[0].z, v[1].z, v[2].z, v[3].z);
    *(float4*)(to + 3 * kRows) = make_float4(v[0].w, v[1].w, v[2].w, v[3].w);
  }
}

// The panels that a block multiplies, one after the other, of all of its segments.
template <class T>
class FfmaPanels {
 public:
  __device__ FfmaPanels(const GemmParams& params, const FfmaShares& shares)
      : params_(params), segments_(shares) {
    Advance();
  }
  __device__ __forceinline__ bool More() const { return more_; }
  __device__ __forceinline__ void Next() {
    segment_.begin += kFfmaSteps<T>;
    if (segment_.begin >= segment_.end) Advance();
  }
  __device__ __forceinline__ int K() const { return segment_.begin * kFfmaUnroll; }
  __device__ __forceinline__ int Row() const { return row_; }
  __device__ __forceinline__ int Col() const { return col_; }

 private:
  __device__ __forceinline__ void Advance() {
    more_ = segments_.Next(segment_);
    const TileCoord coord = TileCoordOf(params_, segment_.tile);
    row_ = coord.row * T::kTileM, col_ = coord.col * T::kTileN;
  }
  const GemmParams& params_;
  FfmaSegments segments_;
  FfmaSegment segment_;
  bool more_;
  int row_, col_;
};

template <class T, bool kAlongA, bool kAlongB>
__global__ __launch_bounds__(
    FfmaMemory<T, kAlongA, kAlongB>::kThreads,
    T::kResident) void FfmaKernel(const __grid_constant__ CUtensorMap map_a,
                                  const __grid_constant__ CUtensorMap map_b,
                                  const __grid_constant__ GemmParams params,
                                  const __grid_constant__ FfmaShares shares) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Memory = FfmaMemory<T, kAlongA, kAlongB>;
  constexpr int kStages = Memory::kStages, kAhead = kStages - 1;  // panels in flight
  constexpr int kWarps = T::kThreads / 32;
  constexpr int kFloat = (int)sizeof(float), kZeros = T::kAccumulators / 4;
  constexpr int kDirect = kFfmaStageNumel<T> - Memory::kRaw;  // floats that are copied as they lie
  static_assert(T::kTileK % kFfmaUnroll == 0 && kFfmaUnroll % 2 == 0 && kZeros <= T::kThreads);
  __shared__ float4 zeros[kZeros];
  __shared__ __align__(8) uint64_t barriers[2 * kStages + 1];
  unsigned char* const dynamic = DynamicShared<unsigned char>();
  auto* const memory = (float*)(dynamic + (-hopper::SharedAddress(dynamic) & (kFfmaAlignment - 1)));
  const uint32_t shared = hopper::SharedAddress(memory);
  const uint32_t full = hopper::SharedAddress(barriers), empty = full + 8 * kStages;
  const uint32_t raw_full = empty + 8 * kStages;
  if (threadIdx.x < kZeros) zeros[threadIdx.x] = make_float4(0, 0, 0, 0);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; stage++) {
      hopper::InitBarrier(full + stage * 8, (kDirect > 0) + 128 * Memory::kTransposes);
      hopper::InitBarrier(empty + stage * 8, kWarps * (Memory::kTransposes ? 32 : 1));
    }
    hopper::InitBarrier(raw_full, 1);
    hopper::PublishBarriers();
  }
  __syncthreads();
  GridDependencySynchronize();

  RingPosition<kStages> filled, at;  // what is copied next, and multiplied
  FfmaPanels<T> ahead(params, shares);
  const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
  int copied = 0;
  const auto wait_for_room = [&] {
    if (copied++ >= kStages) hopper::WaitForPhase(empty + filled.stage * 8, filled.parity ^ 1);
  };
  // Copies what lies (k, mn).
  const auto copy = [&] {
    const uint32_t to = shared + filled.stage * kFfmaStageNumel<T> * kFloat;
    const uint32_t barrier = full + filled.stage * 8;
    hopper::ArriveExpecting(barrier, kDirect * kFloat);
    if (!kAlongA) hopper::LoadBox<false>(to, &map_a, barrier, ahead.Row(), ahead.K(), 0);
    if (!kAlongB)
      hopper::LoadBox<false>(to + kFfmaPanelA<T> * kFloat, &map_b, barrier, ahead.Col(), ahead.K(),
                             0);
  };
  if constexpr (Memory::kProduces) {
    if (warp >= kWarps) {
      hopper::ReduceRegisters<Memory::kProducerRegisters>();
      const bool copies = threadIdx.x == T::kThreads;
      if (!Memory::kTransposes && !copies) return;
      const auto copy_raw = [&] {
        const uint32_t to = shared + Memory::kRawAt * kFloat;
        if (Memory::kTransposes) hopper::ArriveExpecting(raw_full, Memory::kRaw * kFloat);
        if (kAlongA) hopper::LoadBox<false>(to, &map_a, raw_full, ahead.K(), ahead.Row(), 0);
        if (kAlongB)
          hopper::LoadBox<false>(to + Memory::kRawOfA * kFloat, &map_b, raw_full, ahead.K(),
                                 ahead.Col(), 0);
      };
      uint32_t parity = 0;
      if (copies && ahead.More()) copy_raw();
      while (ahead.More()) {
        wait_for_room();
        if (copies && kDirect > 0) copy();
        const float* const raw = memory + Memory::kRawAt;
        float* const panel = memory + filled.stage * kFfmaStageNumel<T>;
        if (Memory::kTransposes) hopper::WaitForPhase(raw_full, parity);
        parity ^= 1;
        if (kAlongA) TransposePanel<T::kTileM>(raw, panel);
        if (kAlongB) TransposePanel<T::kTileN>(raw + Memory::kRawOfA, panel + kFfmaPanelA<T>);
        if (Memory::kTransposes) {
          hopper::Arrive(full + filled.stage * 8);
          hopper::SyncThreads(1, 128);  // all have read
        }
        filled.Advance();
        ahead.Next();
        if (copies && ahead.More()) copy_raw();
      }
      return;
    }
    hopper::RaiseRegisters<Memory::kRegisters>();
  }
  const bool copies = !Memory::kProduces && threadIdx.x == 0;
  const auto copy_next = [&] {
    if (!copies || !ahead.More()) return;
    wait_for_room();
    copy();
    filled.Advance();
    ahead.Next();
  };
  for (int k = 0; k < kAhead; k++) copy_next();

  const WarpOrigin origin = FfmaWarpOrigin<T>(warp);
  FfmaAccumulator<T> accumulator(origin.row, origin.col, lane);
  // All lanes arrive for warps that wait for what threads stored: racecheck takes the arrival of
  // one for the order of its own accesses alone.
  const auto release = [&](int stage) {
    __syncwarp();
    if (Memory::kTransposes || lane == 0) hopper::Arrive(empty + stage * 8);
  };
  FfmaSegments segments(shares);
  FfmaSegment segment;
#pragma unroll 1
  while (segments.Next(segment)) {
    const TileCoord coord = TileCoordOf(params, segment.tile);
    const int row0 = coord.row * T::kTileM + origin.row;
    const int col0 = coord.col * T::kTileN + origin.col;
    if (row0 < params.gemm.m && col0 < params.gemm.n) {
      hopper::WaitForPhase(full + at.stage * 8, at.parity);
      accumulator.Begin(zeros, memory + at.stage * kFfmaStageNumel<T>);
#pragma unroll 1
      for (int step = segment.begin; step < segment.end; step += kFfmaSteps<T>) {
        copy_next();
        const int stage = at.stage;
        at.Advance();
        const bool more = step + kFfmaSteps<T> < segment.end;
        if (more) hopper::WaitForPhase(full + at.stage * 8, at.parity);
        // After the last panel it reads what nobody needs.
        const float* const next = memory + (more ? at.stage : stage) * kFfmaStageNumel<T>;
#pragma unroll 1
        for (int left = min(kFfmaSteps<T>, segment.end - step); left > 0; left--)
          accumulator.Multiply(left == 1, next);
        release(stage);
      }
      if (segment.end - segment.begin < shares.steps) {
        accumulator.StorePart(shares.parts + (int64_t)segment.slot * T::kTileM * T::kTileN / 4);
        continue;
      }
      if (!Memory::kTransposes && shares.plain) {
        const int64_t n = params.gemm.n;
        accumulator.StoreAligned(params.gemm.c + row0 * n + col0, n,
                                 (int)min((int64_t)T::kWarpM, params.gemm.m - row0),
                                 (int)min((int64_t)T::kWarpN, n - col0), zeros[0].x);
        continue;
      }
      accumulator.ForQuads(
          memory + Memory::kStagingAt + warp * kFfmaStaging<T>, [&](int row, int col, float4 x) {
            Quad quad = {row0 + row, col0 + col, {x.x, x.y, x.z, x.w}, {}};
            ReadSide(params.gemm, params.aligned_out, quad);
            const float4 bias = ReadBias(params.gemm, quad.col, params.aligned_out);
            WriteQuad(params.gemm, params.aligned_out, bias, quad);
          });
    } else {
#pragma unroll 1
      for (int step = segment.begin; step < segment.end; step += kFfmaSteps<T>, at.Advance()) {
        copy_next();
        hopper::WaitForPhase(full + at.stage * 8, at.parity);
        release(at.stage);
      }
    }
  }
  TriggerProgrammaticLaunch();
#endif
}

}  // namespace cuda
}  // namespace dlsys
