// Launches of the GEMM by FFMA and TMA (ffma.cuh): how its tiles are shared, what it costs, the sum
// of parts of tiles, and the copies that it needs: of operands that do not lie (k, mn), or whose
// rows TMA cannot read, to rows of a multiple of 16 bytes in planned workspace. A few rows beyond
// whole tiles are a product of their own (slim.cu). C overlaps no operand. Memory bandwidth limits
// copies and sums.
#include <optional>

#include "cuda/gemm/rungs/ffma.cuh"
#include "cuda/instructions/tensor_map.cuh"

namespace dlsys {
namespace cuda {
namespace {

constexpr int kPackMn = 64, kPackK = 64;

// Copies an operand to (k, pitch): element (mn, k) is at x[mn * of_mn + k * of_k]. kInQuads: it
// lies along K, in rows of whole quads, so that eight lanes read a line of 128 bytes.
template <bool kInQuads>
__global__ void __launch_bounds__(kThreads)
    PackKernel(Operand x, int64_t extent, int64_t k_extent, int64_t pitch, float* packed) {
  __shared__ float tile[kPackK][kPackMn + 1];
  const bool along_k = x.of_k == 1;
  const int64_t k_tiles = CeilDiv(k_extent, kPackK);
  const int64_t mn0 = blockIdx.x / k_tiles * kPackMn, k0 = blockIdx.x % k_tiles * kPackK;
  const int mn_valid = (int)min((int64_t)kPackMn, extent - mn0);
  const int k_valid = (int)min((int64_t)kPackK, k_extent - k0);
  const float* const from = x.data + mn0 * x.of_mn + k0 * x.of_k;
  if constexpr (kInQuads) {
    constexpr int kInRow = kPackK / 4, kStep = kThreads / kInRow;
    const int k = (int)threadIdx.x % kInRow * 4;
#pragma unroll
    for (int mn = (int)threadIdx.x / kInRow; mn < kPackMn; mn += kStep) {
      const bool exists = mn < mn_valid && k < k_valid;
      const float4 v = exists ? *(const float4*)(from + mn * x.of_mn + k) : make_float4(0, 0, 0, 0);
      tile[k][mn] = v.x, tile[k + 1][mn] = v.y, tile[k + 2][mn] = v.z, tile[k + 3][mn] = v.w;
    }
  } else {
#pragma unroll 8
    for (int i = threadIdx.x; i < kPackMn * kPackK; i += kThreads) {
      const int mn = along_k ? i / kPackK : i % kPackMn, k = along_k ? i % kPackK : i / kPackMn;
      tile[k][mn] = mn < mn_valid && k < k_valid ? from[mn * x.of_mn + k * x.of_k] : 0.f;
    }
  }
  __syncthreads();
  const int mn = (int)threadIdx.x % kPackMn;
  float* const to = packed + k0 * pitch + mn0 + mn;
  if (mn0 + mn >= pitch) return;
#pragma unroll
  for (int k = (int)threadIdx.x / kPackMn; k < kPackK; k += kThreads / kPackMn)
    if (k < k_valid) to[k * pitch] = tile[k][mn];
}

// Adds the parts of tiles that blocks shared, and applies the epilogue. Of the sums of a thread of
// FfmaKernel, four rows by four columns are an item; kParts threads take equal shares of its parts.
template <class T, int kParts>
__global__ void __launch_bounds__(kThreads)
    FfmaSumKernel(const GemmParams params, const FfmaShares shares) {
  constexpr int kItems = kThreads / kParts, kOfTile = T::kTileM * T::kTileN / 16;
  constexpr int kQuadsM = T::kThreadM / 4;
  static_assert(kOfTile % kItems == 0);
  __shared__ float4 sums[kParts][4][kItems];
  const Gemm& gemm = params.gemm;
  const int part = (int)threadIdx.x / kItems, at = (int)threadIdx.x % kItems;
  GridDependencySynchronize();
  for (int64_t first = blockIdx.x * (int64_t)kItems; first < (int64_t)shares.split_tiles * kOfTile;
       first += gridDim.x * (int64_t)kItems) {
    const int tile = (int)(first / kOfTile), item = (int)(first % kOfTile) + at;
    const int step = tile * shares.steps, slot = shares.BlockAt(step) + tile;
    const int parts = shares.BlockAt(step + shares.steps - 1) + tile - slot + 1;
    if (parts == 1) continue;  // in C already
    const TileCoord coord = TileCoordOf(params, tile);
    const int thread = item % T::kThreads, row4 = item / T::kThreads % kQuadsM;
    const int col4 = item / T::kThreads / kQuadsM, lane = thread % 32;
    const WarpOrigin warp = FfmaWarpOrigin<T>(thread / 32);
    const int row0 = coord.row * T::kTileM + warp.row, col0 = coord.col * T::kTileN + warp.col;
    const bool exists = row0 < gemm.m && col0 < gemm.n;
    const int share = CeilDiv32(parts, kParts), begin = min(part * share, parts);
    const int end = exists ? min(begin + share, parts) : begin;
    const float4* from = shares.parts + (int64_t)(slot + begin) * (kOfTile * 4) +
                         (col4 * 4 * kQuadsM + row4) * T::kThreads + thread;
    float4 sum[4] = {};  // of a column, its rows in the order of StorePart
#pragma unroll 4
    for (int k = begin; k < end; k++, from += kOfTile * 4) {
#pragma unroll
      for (int j = 0; j < 4; j++) sum[j] = Sum(sum[j], from[j * kQuadsM * T::kThreads]);
    }
    if constexpr (kParts > 1) {
#pragma unroll
      for (int j = 0; j < 4; j++) sums[part][j][at] = sum[j];
      __syncthreads();
#pragma unroll
      for (int other = 1; other < kParts; other++)
#pragma unroll
        for (int j = 0; j < 4; j++)
          if (part == 0) sum[j] = Sum(sum[j], sums[other][j][at]);
      __syncthreads();
    }
    if (part > 0 || !exists) continue;
    const int row = row0 + (row4 * T::kLanesM + LaneRow<T>(lane)) * 4;
    const int col = col0 + (col4 * T::kLanesN + LaneCol<T>(lane)) * 4;
    const float4 bias = ReadBias(gemm, col, params.aligned_out);
    Quad quads[4] = {{row, col, {sum[0].y, sum[1].y, sum[2].y, sum[3].y}, {}},
                     {row + 1, col, {sum[0].x, sum[1].x, sum[2].x, sum[3].x}, {}},
                     {row + 2, col, {sum[0].w, sum[1].w, sum[2].w, sum[3].w}, {}},
                     {row + 3, col, {sum[0].z, sum[1].z, sum[2].z, sum[3].z}, {}}};
#pragma unroll
    for (Quad& quad : quads) ReadSide(gemm, params.aligned_out, quad);
#pragma unroll
    for (Quad& quad : quads) WriteQuad(gemm, params.aligned_out, bias, quad);
  }
}

bool IsPacked(const Operand& x) { return x.of_mn != 1 || x.of_k % 4 || !Aligned16(x.data); }

// Whether the kernel transposes an operand that lies along K: in rows that TMA can read, and in
// tiles that leave registers and memory for it. The product is then 3 % slower, which an operand
// of few rows or columns of C is worth: a copy costs as much as some 1,500 of them.
template <class T>
bool IsTransposed(const Operand& x, int64_t uses) {
  constexpr int64_t kMostUses = 1500;
  return T::kResident == 1 && uses <= kMostUses && x.of_k == 1 && x.of_mn % 4 == 0 &&
         Aligned16(x.data);
}

// An operand as the kernel reads it, in scratch where it has to be copied.
template <class T>
class FfmaOperand {
 public:
  FfmaOperand(const char* op, const Gemm& p, Operand x, int64_t extent, int64_t uses, int box,
              DLStream stream)
      : transposed(IsTransposed<T>(x, uses)) {
    if (transposed) {
      map = BoxMap(op, DL_FLOAT32, x.data, p.k, extent, x.of_mn, 1, box, false);
      return;
    }
    if (IsPacked(x)) {
      const int64_t pitch = CeilDiv(extent, 4) * 4;
      packed_.emplace(p.ctx, pitch * p.k * (int64_t)sizeof(float), stream);
      const int64_t tiles = CeilDiv(extent, kPackMn) * CeilDiv(p.k, kPackK);
      const bool in_quads = x.of_k == 1 && x.of_mn % 4 == 0 && Aligned16(x.data);
      Launch(op, in_quads ? PackKernel<true> : PackKernel<false>, (unsigned)tiles, kThreads, 0,
             stream, x, extent, p.k, pitch, packed_->floats());
      x = {packed_->floats(), 1, pitch};
    }
    map = PlainMap(op, x.data, extent, p.k, x.of_k, box, T::kTileK);
  }

  const bool transposed;
  CUtensorMap map;

 private:
  std::optional<Scratch> packed_;
};

// Cost of a tiling, measured on an H200: of a launch, of a panel on each of the blocks that run
// together, of what a tile costs besides; and of adding parts, a launch and bytes a microsecond.
struct FfmaCost {
  const char* name;
  double us, panel_us, tile_us;
};
constexpr FfmaCost kCosts[] = {{"128x128 TMA", 4, 5.05, 3}, {"256x128 TMA", 4, 4.95, 3}};
constexpr double kSumUs = 3.5, kPartNbytesUs = 4e6;
constexpr double kHalf = 0.53;             // of a panel's time, where half of the tiles is beyond C
constexpr double kTransposedTileUs = 5.5;  // what a tile costs besides, where panels are transposed

// Of so many rows of C. Tiles that would not fill a wave of blocks are shared by all, where each
// then has a few panels.
template <class T>
FfmaShares SharesOf(const Gemm& p, int64_t rows) {
  constexpr int64_t kLeastSteps = 2 * kFfmaSteps<T>;
  const int64_t blocks = (int64_t)Multiprocessors(p.ctx.device_id) * T::kResident;
  const int64_t steps = CeilDiv(p.k, kFfmaUnroll);
  const int64_t tiles = CeilDiv(rows, T::kTileM) * CeilDiv(p.n, T::kTileN), left = tiles % blocks;
  const bool split = left * steps >= blocks * kLeastSteps && left * steps < INT32_MAX;
  return {(int)steps,
          (int)tiles,
          split ? (int)left : 0,
          (int)(split ? blocks : std::min(blocks, tiles)),
          AlignedOut(p) && p.epilogue.Empty(),
          nullptr};
}

// The slots of parts.
int64_t SlotsOf(const FfmaShares& shares) {
  return shares.split_tiles ? shares.split_tiles + shares.blocks : 0;
}

double PackUs(const Operand& x, const Gemm& p, int64_t extent) {
  constexpr double kLaunchUs = 2, kNbytesUs = 2.8e6;
  return IsPacked(x) ? kLaunchUs + 8. * (double)extent * (double)p.k / kNbytesUs : 0;
}

template <class T>
double TilesUs(const Gemm& p, int64_t rows, const FfmaCost& cost) {
  const FfmaShares shares = SharesOf<T>(p, rows);
  const auto pack_us = [&](const Operand& x, int64_t extent, int64_t uses) {
    return IsTransposed<T>(x, uses) ? 0 : PackUs(x, p, extent);
  };
  const bool transposes = IsTransposed<T>(OperandA(p), p.n) || IsTransposed<T>(OperandB(p), p.m);
  const double tile_us = cost.tile_us + (transposes ? kTransposedTileUs : 0);
  const double whole = (double)CeilDiv(shares.tiles - shares.split_tiles, shares.blocks);
  const double panels = (double)shares.steps / kFfmaSteps<T>;
  const double shared = (double)shares.split_tiles * panels / shares.blocks;
  // Warps without elements of C leave their issue slots to the others.
  const bool half = rows <= T::kTileM / 2 || p.n <= T::kTileN / 2;
  const double panel_us = cost.panel_us * (half ? kHalf : 1);
  const double part_nbytes = (half ? 4. : 8.) * T::kTileM * T::kTileN * (double)SlotsOf(shares);
  return cost.us + pack_us(OperandA(p), rows, p.n) + pack_us(OperandB(p), p.n, p.m) +
         (whole * panels + shared) * panel_us + whole * tile_us +
         (shares.split_tiles ? tile_us + kSumUs + part_nbytes / kPartNbytesUs : 0);
}

// The rows of C that tiles compute: all but those beyond whole tiles, where these are a slim
// product that takes less.
template <class T>
int64_t TiledRows(const Gemm& p, const FfmaCost& cost) {
  const int64_t whole = p.m / T::kTileM * T::kTileM;
  if (whole == 0 || whole == p.m || !SlimFits(p, whole)) return p.m;
  const bool less = TilesUs<T>(p, whole, cost) + SlimUs(p, whole) < TilesUs<T>(p, p.m, cost);
  return less ? whole : p.m;
}

template <class T>
double EstimatedUs(const Gemm& p, const FfmaCost& cost) {
  const int64_t rows = TiledRows<T>(p, cost);
  return TilesUs<T>(p, rows, cost) + (rows < p.m ? SlimUs(p, rows) : 0);
}

template <class T>
void Run(const char* op, const Gemm& all, const FfmaCost& cost, DLStream stream) {
  Gemm p = all;
  p.m = TiledRows<T>(all, cost);
  if (p.m < all.m) RunSlim(op, all, stream, p.m);
  const FfmaOperand<T> a(op, p, OperandA(all), p.m, p.n, T::kTileM, stream);
  const FfmaOperand<T> b(op, p, OperandB(p), p.n, p.m, T::kTileN, stream);
  const GemmParams params = MakeParams(op, p, {T::kTileM, T::kTileN}, 1);
  FfmaShares shares = SharesOf<T>(p, p.m);
  const Scratch parts(p.ctx, SlotsOf(shares) * T::kTileM * T::kTileN * (int64_t)sizeof(float),
                      stream);
  shares.parts = (float4*)parts.data();
  const auto launch = [&](auto along_a, auto along_b) {
    using Memory = FfmaMemory<T, along_a, along_b>;
    LaunchClusters(op, FfmaKernel<T, along_a, along_b>, (unsigned)shares.blocks, 1,
                   Memory::kThreads, Memory::kNbytes, params.allow_pdl, stream, a.map, b.map,
                   params, shares);
  };
  using Yes = std::true_type;
  using No = std::false_type;
  if constexpr (T::kResident == 1) {
    if (a.transposed) b.transposed ? launch(Yes(), Yes()) : launch(Yes(), No());
    if (!a.transposed && b.transposed) launch(No(), Yes());
  }
  if (!a.transposed && !b.transposed) launch(No(), No());
  const auto sum = [&](auto parts_at_once) {
    constexpr int kParts = decltype(parts_at_once)::value;
    const int64_t items = (int64_t)shares.split_tiles * T::kTileM * T::kTileN / 16;
    LaunchClusters(op, FfmaSumKernel<T, kParts>, Blocks(items * kParts), 1, kThreads, 0,
                   params.allow_pdl, stream, params, shares);
  };
  shares.blocks > 16 * shares.split_tiles ? sum(std::integral_constant<int, 16>())
                                          : sum(std::integral_constant<int, 1>());
}

}  // namespace

const std::vector<std::string>& FfmaTilingNames() {
  static const auto* const names = [] {
    auto* made = new std::vector<std::string>;
    for (const FfmaCost& cost : kCosts) made->push_back(cost.name);
    return made;
  }();
  return *names;
}

bool FfmaFits(const Gemm& p) {
  constexpr int64_t kMost = int64_t(1) << 30;
  return p.m > 0 && p.n > 0 && p.k > 0 && p.m < kMost && p.n < kMost && p.k < kMost &&
         !*WgmmaError(p.ctx.device_id);
}

double FfmaUs(const Gemm& p, int tiling) {
  double us = 0;
  WithTiling<FfmaTilings>(
      tiling, [&](auto of) { us = EstimatedUs<typename decltype(of)::type>(p, kCosts[tiling]); });
  return us;
}

void RunFfma(const char* op, const Gemm& p, int tiling, DLStream stream) {
  WithTiling<FfmaTilings>(
      tiling, [&](auto of) { Run<typename decltype(of)::type>(op, p, kCosts[tiling], stream); });
  if (p.sums) RunOperandSums(op, p, stream);
}

}  // namespace cuda
}  // namespace dlsys
