// Launches of the GEMM by FFMA and TMA (ffma.cuh): how it is divided and its tiles are shared, what
// that costs, the sum of parts of tiles, and where operands are packed that do not lie (k, mn), or
// whose rows TMA cannot read: to rows of a multiple of 16 bytes in planned workspace. A few rows
// and columns beyond those that fill warps are products of their own (slim.cu). C overlaps no
// operand. Memory bandwidth limits copies, sums and strips.
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
  for (int64_t first = blockIdx.x * (int64_t)kItems; first < (int64_t)shares.Split() * kOfTile;
       first += gridDim.x * (int64_t)kItems) {
    const int tile = (int)(first / kOfTile), item = (int)(first % kOfTile) + at;
    const int step = tile * shares.steps, slot = shares.BlockAt(step) + tile;
    const int parts = shares.BlockAt(step + shares.steps - 1) + tile - slot + 1;
    if (parts == 1) continue;  // in C already
    const TileCoord coord = FfmaTileCoord(params, shares, shares.Whole() + tile);
    const int thread = item % T::kThreads, row4 = item / T::kThreads % kQuadsM;
    const int col4 = item / T::kThreads / kQuadsM, lane = thread % 32;
    const WarpOrigin warp = FfmaWarpOrigin<T>(thread / 32);
    const int row0 = coord.row * T::kTileM + warp.row, col0 = coord.col * T::kTileN + warp.col;
    const bool exists = row0 < shares.rows && col0 < shares.cols;
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

__global__ void __launch_bounds__(kThreads) FfmaZeroKernel(unsigned* counters, int64_t count) {
  TriggerProgrammaticLaunch();  // the product is set up while this waits
  GridDependencySynchronize();
  for (int64_t i = FirstItem(); i < count; i += ItemStep()) counters[i] = 0;
}

// How a product is divided: the rows and columns of C that tiles compute, and whether tiles that do
// not fill a wave of blocks are shared; and what it is estimated to take. At most 16 rows, or
// columns, beyond those that fill warps may be a strip, a slim product of their own.
struct FfmaDivision {
  int64_t rows, cols;
  bool split;
  double us = INFINITY;
};

bool IsPacked(const Operand& x) { return x.of_mn != 1 || x.of_k % 4 || !Aligned16(x.data); }
// Along K, in rows of whole quads.
bool LiesInQuads(const Operand& x) { return x.of_k == 1 && x.of_mn % 4 == 0 && Aligned16(x.data); }

// Cost of a tiling, measured on an H200: of a launch, of a panel on each of the blocks that run
// together, of what a tile costs besides; and of adding parts, a launch and bytes a microsecond.
struct FfmaCost {
  const char* name;
  double us, panel_us, tile_us;
};
constexpr FfmaCost kCosts[] = {{"128x128 TMA", 4, 5.05, 3}, {"256x128 TMA", 4, 4.95, 3}};
constexpr double kSumUs = 3.5, kPartNbytesUs = 4e6;
constexpr double kTransposedTileUs = 5.5;  // what a tile costs besides, where panels are transposed

// The shares of a division; a block takes part in those of tiles where it has two panels at least.
template <class T>
FfmaShares SharesOf(const Gemm& p, const FfmaDivision& division) {
  constexpr int64_t kLeastTime = 2 * kFfmaSteps<T> * kFfmaFull;
  const int64_t places = (int64_t)Multiprocessors(p.ctx.device_id) * T::kResident;
  const int64_t rows = CeilDiv(division.rows, T::kTileM), cols = CeilDiv(division.cols, T::kTileN);
  // A half one of the two tiles of a multiprocessor takes the time of the other.
  const bool halves =
      T::kResident == 1 || division.rows <= T::kTileM / 2 || division.cols <= T::kTileN / 2;
  const auto is_half = [&](int64_t extent, int64_t tile) {
    return halves && 0 < extent % tile && extent % tile <= tile / 2;
  };
  const bool half_row = is_half(division.rows, T::kTileM);
  const bool half_col = is_half(division.cols, T::kTileN);
  const int64_t full = (rows - half_row) * (cols - half_col), half = rows * cols - full;
  FfmaShares shares = {};
  shares.rows = (int)division.rows, shares.cols = (int)division.cols;
  shares.steps = (int)CeilDiv(p.k, kFfmaUnroll);
  shares.whole_full = (int)full, shares.whole_half = (int)half;
  shares.half_in_row = half_row ? (int)cols : 0;
  shares.blocks = (int)std::min(places, full + half);
  shares.plain = AlignedOut(p) && p.epilogue.Empty();
  const int64_t time = (full % places * kFfmaFull + half % places * kFfmaHalf) * shares.steps;
  const int64_t sharers = std::min(places, time / kLeastTime);
  if (!division.split || sharers == 0 || time > INT32_MAX) return shares;
  shares.split_full = (int)(full % places), shares.split_half = (int)(half % places);
  shares.whole_full -= shares.split_full, shares.whole_half -= shares.split_half;
  shares.sharers = (int)sharers;
  shares.share = (int)(time / sharers), shares.longer = (int)(time % sharers);
  shares.blocks = (int)(shares.Whole() ? places : sharers);
  return shares;
}

// The slots of parts.
int64_t SlotsOf(const FfmaShares& shares) {
  return shares.Split() ? shares.Split() + shares.sharers : 0;
}

// Whether the kernel itself transposes panels of an operand that lies along K, or packs it as it
// multiplies whole tiles; a kernel does one of both. Packing costs nothing where many tiles use
// what is packed, and transposing slows a product by less than a copy that others wait for:
// measured where either begins to take more.
template <class T>
bool IsTransposed(const Operand& x, int64_t uses, const FfmaShares& shares) {
  constexpr int64_t kMostUses = 1500, kMostUsesOfWhole = 600;
  return T::kResident == 1 && LiesInQuads(x) &&
         uses <= (shares.Whole() > 0 ? kMostUsesOfWhole : kMostUses);
}
template <class T>
bool TransposesA(const Gemm& p, const FfmaShares& shares) {
  return IsTransposed<T>(OperandA(p), p.n, shares);
}
template <class T>
bool TransposesB(const Gemm& p, const FfmaShares& shares) {
  return IsTransposed<T>(OperandB(p), p.m, shares);
}
template <class T>
bool PacksAhead(const Gemm& p, const Operand& x, const FfmaShares& shares) {
  return T::kResident == 1 && LiesInQuads(x) && shares.Whole() > 0 && !TransposesA<T>(p, shares) &&
         !TransposesB<T>(p, shares);
}

// What the kernel packs of an operand, if it does: (`extent`, k) in tiles of so many rows or
// columns, of which blocks multiply so many `together`.
FfmaPacking PackingOf(const Operand& x, int64_t extent, int64_t k, bool ahead, int tile,
                      int together) {
  FfmaPacking packing = {};
  packing.from = x.data, packing.extent = (int)extent;
  packing.pitch = (int)CeilDiv(extent, 4) * 4, packing.panels = (int)CeilDiv(k, kFfmaItem);
  while (kFfmaItem << packing.log_tile < tile) packing.log_tile++;
  packing.log_group = packing.log_tile;
  while (1 << (packing.log_group - packing.log_tile) < together) packing.log_group++;
  const int64_t groups = CeilDiv(extent, (int64_t)kFfmaItem << packing.log_group);
  packing.items = ahead ? (int)(groups << packing.log_group) * packing.panels : 0;
  return packing;
}

// The counters of what is ready.
int64_t CountersOf(const FfmaPacking& x) {
  const int64_t tiles = CeilDiv(x.extent, (int64_t)kFfmaItem << x.log_tile);
  return x.items ? tiles * CeilDiv(x.panels, kFfmaReady) : 0;
}

// An operand as tiles and strips read it, in scratch where it is packed: by the kernel where
// `packing` has items, otherwise here.
template <class T>
class FfmaOperand {
 public:
  FfmaOperand(const char* op, const Gemm& p, Operand x, bool transposed, int box,
              FfmaPacking* packing, DLStream stream) {
    const int64_t extent = packing->extent;
    if (transposed) {
      map = BoxMap(op, DL_FLOAT32, x.data, p.k, extent, x.of_mn, 1, box, false);
      return;
    }
    if (IsPacked(x)) {
      const int64_t tiles = CeilDiv(extent, kPackMn) * CeilDiv(p.k, kPackK);
      packed_.emplace(p.ctx, packing->pitch * p.k * (int64_t)sizeof(float), stream);
      packing->to = packed_->floats();
      if (packing->items == 0)
        Launch(op, LiesInQuads(x) ? PackKernel<true> : PackKernel<false>, (unsigned)tiles, kThreads,
               0, stream, x, extent, p.k, (int64_t)packing->pitch, packing->to);
      x = {packing->to, 1, packing->pitch};
    }
    data = x.data, pitch = x.of_k;
    map = PlainMap(op, x.data, extent, p.k, x.of_k, box, T::kTileK);
  }

  CUtensorMap map;
  const float* data = nullptr;  // (k, pitch), where it is not transposed
  int64_t pitch = 0;

 private:
  std::optional<Scratch> packed_;
};

template <class T>
double PackUs(const Gemm& p, const Operand& x, int64_t extent, const FfmaShares& shares) {
  constexpr double kLaunchUs = 2, kNbytesUs = 2.8e6, kAheadUs = 3;
  if (!IsPacked(x)) return 0;
  if (PacksAhead<T>(p, x, shares)) return kAheadUs;
  return kLaunchUs + 8. * (double)extent * (double)p.k / kNbytesUs;
}

template <class T>
double TilesUs(const Gemm& p, const FfmaDivision& division, const FfmaShares& shares,
               const FfmaCost& cost) {
  const bool of_a = TransposesA<T>(p, shares), of_b = TransposesB<T>(p, shares);
  const double pack_us = (of_a ? 0 : PackUs<T>(p, OperandA(p), division.rows, shares)) +
                         (of_b ? 0 : PackUs<T>(p, OperandB(p), p.n, shares));
  const double tile_us = cost.tile_us + (of_a || of_b ? kTransposedTileUs : 0);
  constexpr double kHalf = (double)kFfmaHalf / kFfmaFull;
  const double full_waves = (double)CeilDiv(shares.whole_full, shares.blocks);
  const double waves = (double)CeilDiv(shares.Whole(), shares.blocks);
  const double shared = shares.split_full + kHalf * shares.split_half;
  const double whole = full_waves + kHalf * (waves - full_waves);
  const double panels = (double)shares.steps / kFfmaSteps<T>;
  // A part of a full tile, which is written and read.
  constexpr double kPartNbytes = 8. * T::kTileM * T::kTileN;
  const double tiles = std::max(1, shares.Split());
  const double parts_us = shared / tiles * kPartNbytes * (double)SlotsOf(shares) / kPartNbytesUs;
  const double waves_us = (whole + shared / std::max(1, shares.sharers)) * panels * cost.panel_us;
  return cost.us + pack_us + waves_us + waves * tile_us +
         (shares.Split() ? tile_us + kSumUs + parts_us : 0);
}

// C's last rows, with all columns, and its last columns, with the rows of tiles. Their wide
// operands lie (k, pitch).
SlimStrip LastRows(const Gemm& p, const FfmaDivision& division, const float* b, int64_t pitch) {
  return {true, division.rows, p.n, b, pitch};
}
SlimStrip LastCols(const FfmaDivision& division, const float* a, int64_t pitch) {
  return {false, division.cols, division.rows, a, pitch};
}

// Infinite where a strip is not slim or the kernel transposes what it would read.
template <class T>
double EstimatedUs(const Gemm& p, const FfmaDivision& division, const FfmaCost& cost) {
  const FfmaShares shares = SharesOf<T>(p, division);
  double us = TilesUs<T>(p, division, shares, cost);
  if (division.rows < p.m)
    us += TransposesB<T>(p, shares) ? INFINITY : SlimUs(p, LastRows(p, division, nullptr, 0));
  if (division.cols < p.n)
    us += TransposesA<T>(p, shares) ? INFINITY : SlimUs(p, LastCols(division, nullptr, 0));
  return us;
}

template <class T>
FfmaDivision BestDivision(const Gemm& p, const FfmaCost& cost) {
  const int64_t rows = p.m / T::kWarpM * T::kWarpM, cols = p.n / T::kWarpN * T::kWarpN;
  FfmaDivision best = {};
  const auto consider = [&](FfmaDivision division) {
    division.us = EstimatedUs<T>(p, division, cost);
    if (division.us < best.us) best = division;
  };
  for (const bool split : {false, true}) {
    consider({p.m, p.n, split});
    if (0 < rows && rows < p.m) consider({rows, p.n, split});
    if (0 < cols && cols < p.n) consider({p.m, cols, split});
    if (0 < rows && rows < p.m && 0 < cols && cols < p.n) consider({rows, cols, split});
  }
  return best;
}

template <class T>
void Run(const char* op, const Gemm& p, const FfmaCost& cost, DLStream stream) {
  const FfmaDivision division = BestDivision<T>(p, cost);
  FfmaShares shares = SharesOf<T>(p, division);
  const int row_tiles = (int)CeilDiv(division.rows, T::kTileM);
  const int col_tiles = (int)CeilDiv(p.n, T::kTileN);
  // Of a wave of blocks, which is within a band of TileCoordOf, or several where it has few
  // columns.
  const int cols_at_once = std::min(col_tiles, CeilDiv32(shares.blocks, std::min(8, row_tiles)));
  const int rows_at_once = std::min(row_tiles, CeilDiv32(shares.blocks, 8 * cols_at_once) * 8);
  FfmaPackings packings = {};
  FfmaPacking &packed_a = packings.of[0], &packed_b = packings.of[1];
  packed_a = PackingOf(OperandA(p), division.rows, p.k, PacksAhead<T>(p, OperandA(p), shares),
                       T::kTileM, rows_at_once);
  packed_b = PackingOf(OperandB(p), p.n, p.k, PacksAhead<T>(p, OperandB(p), shares), T::kTileN,
                       cols_at_once);
  const int64_t of_a = CountersOf(packed_a), of_b = CountersOf(packed_b);
  const int64_t count = of_a + of_b > 0 ? 1 + of_a + of_b : 0;
  const Scratch counters(p.ctx, count * (int64_t)sizeof(unsigned), stream);
  packings.next = (unsigned*)counters.data();
  packed_a.ready = packings.next + 1, packed_b.ready = packed_a.ready + of_a;
  LaunchClusters(op, FfmaZeroKernel, count ? Blocks(count) : 0, 1, kThreads, 0, true, stream,
                 packings.next, count);
  const bool transposes_a = TransposesA<T>(p, shares), transposes_b = TransposesB<T>(p, shares);
  const FfmaOperand<T> a(op, p, OperandA(p), transposes_a, T::kTileM, &packed_a, stream);
  const FfmaOperand<T> b(op, p, OperandB(p), transposes_b, T::kTileN, &packed_b, stream);
  GemmParams params = MakeParams(op, p, {T::kTileM, T::kTileN}, 1);
  // Of full tiles alone.
  params.row_tiles = row_tiles - (shares.half_in_row > 0);
  params.col_tiles = (shares.whole_full + shares.split_full) / std::max(1, params.row_tiles);
  const Scratch parts(p.ctx, SlotsOf(shares) * T::kTileM * T::kTileN * (int64_t)sizeof(float),
                      stream);
  shares.parts = (float4*)parts.data();
  const auto launch = [&](auto along_a, auto along_b) {
    using Memory = FfmaMemory<T, along_a, along_b>;
    LaunchClusters(op, FfmaKernel<T, along_a, along_b>, (unsigned)shares.blocks, 1,
                   Memory::kThreads, Memory::kNbytes, params.allow_pdl, stream, a.map, b.map,
                   params, shares, packings);
  };
  using Yes = std::true_type;
  using No = std::false_type;
  if constexpr (T::kResident == 1) {
    if (transposes_a) transposes_b ? launch(Yes(), Yes()) : launch(Yes(), No());
    if (!transposes_a && transposes_b) launch(No(), Yes());
  }
  if (!transposes_a && !transposes_b) launch(No(), No());
  const auto sum = [&](auto parts_at_once) {
    constexpr int kParts = decltype(parts_at_once)::value;
    const int64_t items = (int64_t)shares.Split() * T::kTileM * T::kTileN / 16;
    LaunchClusters(op, FfmaSumKernel<T, kParts>, Blocks(items * kParts), 1, kThreads, 0,
                   params.allow_pdl, stream, params, shares);
  };
  shares.sharers > 16 * shares.Split() ? sum(std::integral_constant<int, 16>())
                                       : sum(std::integral_constant<int, 1>());
  if (division.rows < p.m) RunSlim(op, p, LastRows(p, division, b.data, b.pitch), stream);
  if (division.cols < p.n) RunSlim(op, p, LastCols(division, a.data, a.pitch), stream);
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
  WithTiling<FfmaTilings>(tiling, [&](auto of) {
    us = BestDivision<typename decltype(of)::type>(p, kCosts[tiling]).us;
  });
  return us;
}

void RunFfma(const char* op, const Gemm& p, int tiling, DLStream stream) {
  WithTiling<FfmaTilings>(
      tiling, [&](auto of) { Run<typename decltype(of)::type>(op, p, kCosts[tiling], stream); });
  if (p.sums) RunOperandSums(op, p, stream);
}

}  // namespace cuda
}  // namespace dlsys
