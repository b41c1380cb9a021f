// Which kernel runs a GEMM where nobody says so: a cost model over tilings, split-K and cuBLAS.
// Also the split-K reduction before sm_90 and the epilogue after a GEMM by another library.
// gemm.cuh has the contract, kernel.cuh the kernel, ladder.cu the algorithms by name.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <optional>

#include "cuda/gemm/kernel.cuh"
#include "cuda/gemm/uint8.cuh"
#include "cuda/reduce/reduce.cuh"

namespace dlsys {
namespace cuda {
namespace {

// ---- kernels ----

// Sums `splits` partial products (splits, m, n) and applies the epilogue; with one split in place.
// Each quad is summed by kParts threads, which take equal shares of the splits: many splits are of
// few quads.
template <int kParts>
__global__ void __launch_bounds__(kThreads)
    EpilogueKernel(Gemm gemm, const float* partial, int splits, bool aligned) {
  constexpr int kQuads = kThreads / kParts;
  __shared__ float4 sums[kParts][kQuads];
  const int64_t in_row = CeilDiv(gemm.n, 4), numel = gemm.m * gemm.n;
  const int part = (int)threadIdx.x / kQuads, at = (int)threadIdx.x % kQuads;
  const int share = CeilDiv32(splits, kParts);
  const int begin = min(part * share, splits), end = min(begin + share, splits);
  for (int64_t first = blockIdx.x * (int64_t)kQuads; first < gemm.m * in_row;
       first += gridDim.x * (int64_t)kQuads) {
    const int64_t q = first + at;
    Quad quad = {q / in_row, q % in_row * 4, {}, {}};
    if (part == 0) ReadSide(gemm, aligned, quad);
    const float* from = partial + begin * numel + quad.row * gemm.n + quad.col;
#pragma unroll 8
    for (int split = begin; split < end; split++, from += numel) {
#pragma unroll
      for (int e = 0; e < 4; e++)
        if (quad.row < gemm.m && quad.col + e < gemm.n) quad.x[e] += from[e];
    }
    if constexpr (kParts > 1) {
      sums[part][at] = make_float4(quad.x[0], quad.x[1], quad.x[2], quad.x[3]);
      __syncthreads();
      float4 sum = sums[0][at];
#pragma unroll
      for (int other = 1; other < kParts; other++) sum = Sum(sum, sums[other][at]);
      quad.x[0] = sum.x, quad.x[1] = sum.y, quad.x[2] = sum.z, quad.x[3] = sum.w;
      __syncthreads();
    }
    if (part == 0) WriteQuad(gemm, aligned, ReadBias(gemm, quad.col, aligned), quad);
  }
}

// ---- launchers ----

constexpr int64_t kMaxTiles = int64_t(1) << 27;  // leaves room for index arithmetic in int
constexpr int64_t kKSliceUnit = 16;              // whole quads, and little padding

// Cost of a tiling in a captured graph, measured on an H200. Other chips scale all of them alike,
// which rarely changes the order.
struct TileCost {
  const char* name;  // the tile, and its threads where two tilings differ by them
  int m, n;
  int resident;        // blocks that a multiprocessor runs concurrently
  double us;           // fixed cost of a launch
  double ns, ns_more;  // per k: of the first block on a multiprocessor, of each further one
};

// In the order of WithTiling's index.
constexpr TileCost kFp32Costs[] = {
    {"128x64", 128, 64, 1, 4.0, 54.6, 54.6}, {"64x64", 64, 64, 1, 3.7, 30, 30},
    {"64x32", 64, 32, 2, 2.6, 20.5, 18.6},   {"32x32", 32, 32, 2, 2.5, 12.3, 8.8},
    {"32x16", 32, 16, 2, 2.8, 6.9, 5.7},     {"16x32", 16, 32, 2, 2.5, 6.9, 5.7}};
constexpr TileCost kLargeCosts[] = {{"128x128", 128, 128, 2, 5.0, 99, 89},
                                    {"256x128", 256, 128, 1, 6.0, 183, 183}};
constexpr TileCost kTf32Costs[] = {
    {"128x64", 128, 64, 1, 3.5, 18, 18},  {"64x64", 64, 64, 1, 3.0, 12, 12},
    {"64x32", 64, 32, 2, 2.5, 13.4, 9.2}, {"32x32", 32, 32, 2, 2.8, 7.9, 5.9},
    {"32x16", 32, 16, 2, 2.9, 6.0, 4.6},  {"16x32", 16, 32, 2, 2.6, 6.0, 4.6}};
constexpr TileCost kLargeTf32Costs[] = {{"128x128", 128, 128, 2, 5.0, 35, 30},
                                        {"256x128", 256, 128, 1, 6.0, 60, 60}};
constexpr TileCost kLarge3xTf32Costs[] = {{"128x128", 128, 128, 2, 5.0, 60, 58},
                                          {"256x128", 256, 128, 1, 6.0, 118, 118}};
// Three times the mma instructions of kTf32Costs.
constexpr TileCost k3xTf32Costs[] = {
    {"128x64", 128, 64, 1, 3.5, 40, 40}, {"64x64", 64, 64, 1, 3.0, 25, 25},
    {"64x32", 64, 32, 2, 2.5, 19, 17},   {"32x32", 32, 32, 2, 2.8, 12, 10},
    {"32x16", 32, 16, 2, 2.9, 8, 6.5},   {"16x32", 16, 32, 2, 2.9, 8, 6.5}};
constexpr TileCost kU8Costs[] = {
    {"128x64", 128, 64, 1, 3.5, 18, 18}, {"64x64", 64, 64, 1, 3.1, 10.3, 10.3},
    {"64x32", 64, 32, 1, 3.3, 5.0, 5.0}, {"32x32", 32, 32, 2, 2.8, 4.7, 2.9},
    {"32x16", 32, 16, 2, 2.7, 3.2, 3.9}, {"16x32", 16, 32, 2, 2.7, 3.2, 3.9}};

// Of MixedTilings: how many blocks a multiprocessor runs together, and nanoseconds per k of one of
// them; those of several together are kTogether times as long as one after the other. Of FFMA as
// above, the others estimated.
struct MixedCost {
  TileSize of_floats, of_u8_a, of_u8_b;
  int resident;
  size_t nbytes;
  double ns, ns_of_u8;
};
constexpr double kTogether = 0.7;
template <class Mixed>
constexpr MixedCost MixedCostOf(double ns, double ns_of_u8) {
  const auto size = [](auto of) {
    using T = typename decltype(of)::type;
    return TileSize{T::kTileM, T::kTileN};
  };
  return {size(Type<typename Mixed::OfFloats>()),
          size(Type<typename Mixed::OfU8A>()),
          size(Type<typename Mixed::OfU8B>()),
          std::min(Mixed::OfFloats::kResident, Mixed::OfU8A::kResident),
          Mixed::kNbytes,
          ns,
          ns_of_u8};
}
constexpr MixedCost kMixedCosts[] = {
    MixedCostOf<SmallMixedTiling>(12.3, 16), MixedCostOf<LargeMixedTiling>(30, 16),
    MixedCostOf<PortableMixedTiling>(12.3, 20), MixedCostOf<MediumMixedTiling>(20.5, 16)};

// Shared memory of a block, the largest over the operands' layouts.
template <class T, template <class, bool, bool> class Accumulator, bool kNeverTransA>
constexpr size_t MaxSharedNbytes() {
  return std::max({MemoryNbytes<T, Accumulator<T, !kNeverTransA, false>>(),
                   MemoryNbytes<T, Accumulator<T, !kNeverTransA, true>>(),
                   MemoryNbytes<T, Accumulator<T, false, false>>(),
                   MemoryNbytes<T, Accumulator<T, false, true>>()});
}

// A tiling of a family: its cost, and the shared memory of a block.
struct TileModel {
  TileCost cost;
  size_t nbytes;
};
using FamilyModel = std::vector<TileModel>;

template <class Tilings, template <class, bool, bool> class Accumulator, bool kNeverTransA,
          size_t... k>
FamilyModel ModelOf(const TileCost* costs, std::index_sequence<k...>) {
  return {{costs[k],
           MaxSharedNbytes<std::tuple_element_t<k, Tilings>, Accumulator, kNeverTransA>()}...};
}
template <class Tilings, template <class, bool, bool> class Accumulator, bool kNeverTransA = false,
          size_t kCount>
FamilyModel ModelOf(const TileCost (&costs)[kCount]) {
  static_assert(kCount == std::tuple_size_v<Tilings>);
  return ModelOf<Tilings, Accumulator, kNeverTransA>(costs, std::make_index_sequence<kCount>());
}

const FamilyModel& ModelOf(KernelFamily family) {
  static const auto* const models = new std::array<FamilyModel, kTiledFamilies>{
      ModelOf<Fp32Tilings, Fp32Accumulator>(kFp32Costs),
      ModelOf<Tf32Tilings, Tf32Accumulator>(kTf32Costs),
      ModelOf<Tf32Tilings, SplitTf32Accumulator>(k3xTf32Costs),
      ModelOf<U8Tilings, WithU8<U8Operand::kA, true>::Accumulator, true>(kU8Costs),
      ModelOf<LargeTilings, OuterAccumulator>(kLargeCosts),
      ModelOf<LargeTensorTilings, Tf32Accumulator>(kLargeTf32Costs),
      ModelOf<LargeTensorTilings, SplitTf32Accumulator>(kLarge3xTf32Costs)};
  return (*models)[(int)family];
}

// A block of the rung `hopper` has a multiprocessor's whole shared memory: it begins behind all
// blocks of the kernel before, and those of the next one behind it.
constexpr double kAloneUs = 1;
constexpr double kWaveUs = 1.5;  // of each wave of blocks after the first
// A GEMM with so large a K, and C of at most so many elements, may have more splits than a cluster
// has blocks, through a workspace.
constexpr int64_t kDeepK = 8192;
constexpr int kDeepSplits = 128;
constexpr double kDeepNumel = 125e3;
constexpr double kPartialNbytesUs = 4e6;  // written and read again, mostly in L2
constexpr double kKernelUs = 3.5;         // of a separate epilogue kernel
constexpr double kReduceUs = 4.5;  // of a separate sum of an operand, and of 16 bits its bytes
constexpr double kSumNbytesUs = 3e6;

// cuBLAS by what it multiplies: fixed cost, and FLOP per microsecond; more slowly in tf32 where B
// lies along N or A is transposed, most so of few elements of C, and of C with at most 128, or 16,
// rows or columns. It takes as long as its operands come from memory, and further kernels where it
// splits the long K of a small C.
struct CublasCost {
  double us, flop_us, flop_us_of_across, flop_us_of_transposed, flop_us_of_few_transposed,
      flop_us_of_128, flop_us_of_16;
};
constexpr CublasCost kCublasFp32 = {7, 5.05e7, 5.05e7, 5.05e7, 5.05e7, 4.3e7, 7e6};
constexpr CublasCost kCublasTf32 = {4.5, 3.95e8, 3.0e8, 2.6e8, 1.4e8, 2.6e8, 2.6e8};
constexpr CublasCost kCublasNarrow = {2.5, 7.6e8, 7.6e8, 7.6e8, 7.6e8, 7.6e8, 7.6e8};
constexpr double kCublasFewNumel = 1e6;
constexpr double kCublasNbytesUs = 3.3e6;
constexpr double kCublasVectorUs = 2.5, kCublasVectorNbytesUs = 4e6;  // of one row or column
constexpr double kCublasSplitUs = 4, kCublasSplitUsOf16 = 8, kCublasSplitNumel = 128 * 128;
constexpr double kCublasSplitUsOfNarrow = 3;
constexpr double kEpilogueNbytesUs = 3e6;
constexpr double kWidenNbytesUs = 3e6;  // of copies in float32, bytes a us

int64_t KSlice(int64_t k, int64_t splits) {
  return CeilDiv(CeilDiv(k, splits), kKSliceUnit) * kKSliceUnit;
}

// A cluster stays within a GPC, so that larger clusters leave more multiprocessors idle.
double UsableMultiprocessors(int multiprocessors, int splits) {
  const bool any = splits <= 2 || splits > kMaxSplits;  // blocks without a cluster go anywhere
  return multiprocessors * (any ? 1.0 : splits <= 4 ? 0.91 : 0.85);
}

double CountTiles(const Gemm* gemms, int count, const TileCost& cost) {
  double tiles = 0;
  for (const Gemm* p = gemms; p < gemms + count; p++)
    tiles += (double)(CeilDiv(p->m, cost.m) * CeilDiv(p->n, cost.n));
  return tiles;
}

// Of the sum over splits, of so many elements of C.
double ReduceUs(int splits, double numel) {
  return splits == 1   ? 0
         : splits == 2 ? 0.7
         : splits == 4 ? 1.1
         : splits == 8 ? 1.9
                       : kKernelUs + numel * splits * 8 / kPartialNbytesUs;
}

// Estimated time of tiles in one launch, the largest K of which is `k`.
double EstimateUs(double tiles, int64_t k, const TileCost& cost, int splits, int multiprocessors) {
  const double on_each = std::ceil(tiles * splits / UsableMultiprocessors(multiprocessors, splits));
  const double waves = std::ceil(on_each / cost.resident);
  const double concurrent = on_each < cost.resident ? on_each : cost.resident;
  const double k_ns = waves * (cost.ns + (concurrent - 1) * cost.ns_more);
  return cost.us + ReduceUs(splits, tiles * cost.m * cost.n) + (waves - 1) * kWaveUs +
         (double)KSlice(k, splits) * k_ns * 1e-3;
}

// No split of K may be empty.
bool HasNoEmptySplit(int64_t k, int splits) {
  return splits == 1 || (splits - 1) * KSlice(k, splits) < k;
}

// Dynamic shared memory, and up to 4 KB that a kernel declares statically.
bool FitsSharedMemory(size_t shared_limit, size_t nbytes) { return nbytes + 4096 <= shared_limit; }

// Of operand sums by a kernel behind the product.
double OperandSumsUs(const Gemm& p) {
  if (!p.sums) return 0;
  const double nbytes = 2. * (double)p.k * (double)(p.sums_of_a ? p.m : p.n);
  return kReduceUs + (p.IsNarrow() ? nbytes / kSumNbytesUs : 0);
}

// The epilogue once a side is added.
Epilogue WithoutAddition(Epilogue epilogue) {
  if (!AddsSide(epilogue.gradient)) return epilogue;
  if (epilogue.gradient == GradientCode::kAddRelu) epilogue.activation = ActivationCode::kRelu;
  epilogue.side = nullptr, epilogue.gradient = 0;
  return epilogue;
}

// cuBLAS needs further kernels for the epilogue, but for a sum with C, and for operand sums.
double CublasUs(const Gemm& p) {
  if (OwnGemmIsForced() || p.u8 != U8Operand::kNone) return INFINITY;
  const bool tf32 = p.precision == Precision::kTf32;
  const CublasCost& cost = p.IsNarrow() ? kCublasNarrow : tf32 ? kCublasTf32 : kCublasFp32;
  const int64_t least = std::min(p.m, p.n);
  double rate = least <= 16    ? cost.flop_us_of_16
                : least <= 128 ? cost.flop_us_of_128
                : p.trans_a    ? cost.flop_us_of_transposed
                : p.trans_b    ? cost.flop_us
                               : cost.flop_us_of_across;
  if (p.trans_a && (double)p.m * p.n <= kCublasFewNumel)
    rate = std::min(rate, cost.flop_us_of_few_transposed);
  const double nbytes = ((double)p.m + (double)p.n) * (double)p.k * (double)DtypeNbytes(p.dtype);
  double us = cost.us + std::max(2. * p.m * p.n * p.k / rate, nbytes / kCublasNbytesUs);
  if (least <= 1) us = kCublasVectorUs + nbytes / kCublasVectorNbytesUs;
  if (p.k >= kDeepK && (double)p.m * p.n <= kCublasSplitNumel)
    us += least <= 16 ? kCublasSplitUsOf16 : p.IsNarrow() ? kCublasSplitUsOfNarrow : kCublasSplitUs;
  const Epilogue rest = p.IsNarrow() ? p.epilogue : WithoutAddition(p.epilogue);
  if (p.epilogue.side && !rest.side)
    us += kKernelUs + 8. * p.m * p.n / kEpilogueNbytesUs;  // a copy to C
  if (!rest.Empty()) {
    // One kernel over C; of 16 bits it goes over C in float32, which another one then rounds.
    const double nbytes = (p.IsNarrow() ? 14. : 8.) + (rest.side ? 4 : 0);
    us += kKernelUs * (p.IsNarrow() ? 2 : 1) + nbytes * p.m * p.n / kEpilogueNbytesUs;
  }
  return us + OperandSumsUs(p);
}

// Of the tiled kernels; those of 16 bits copy their arrays from and to float32.
double TiledUs(const Gemm& p) {
  if (!p.IsNarrow()) return BestTileConfig(FamilyOf(p), p).us;
  Gemm wide = p;
  wide.dtype = DL_FLOAT32, wide.precision = Precision::kTf32;
  const double nbytes = 6. * ((double)p.m * p.k + (double)p.k * p.n + (double)p.m * p.n);
  return BestTileConfig(FamilyOf(wide), wide).us + 3 * kKernelUs + nbytes / kWidenNbytesUs;
}

void RunEpilogue(const char* op, const Gemm& p, const float* partial, int splits, DLStream stream) {
  constexpr int kParts = 8;
  const bool many = splits > kMaxSplits;
  Launch(op, many ? EpilogueKernel<kParts> : EpilogueKernel<1>,
         Blocks(p.m * CeilDiv(p.n, 4) * (many ? kParts : 1)), kThreads, 0, stream, p, partial,
         splits, AlignedOut(p));
}

}  // namespace

void RunOperandSums(const char* op, const Gemm& p, DLStream stream) {
  const void* of = p.sums_of_a ? p.a : p.b;
  const int64_t extent = p.sums_of_a ? p.m : p.n;
  const bool k_major = p.sums_of_a ? p.trans_a : !p.trans_b;
  const auto sum = [&](auto* x) {
    SumAxis(op, p.ctx, x, k_major ? 1 : extent, p.k, k_major ? extent : 1, 1.f, p.sums, stream);
  };
  if (p.dtype == DL_FLOAT32) return sum((const float*)of);
  if (p.dtype == DL_BFLOAT16) return sum((const bfloat16*)of);
  sum((const float16*)of);
}

bool OwnGemmIsForced() {
  static const bool forced = [] {
    const char* blas = getenv("DLSYS_BLAS");
    return blas && strcmp(blas, "own") == 0;
  }();
  return forced;
}

KernelFamily FamilyOf(const Gemm& p) {
  if (p.u8 != U8Operand::kNone) return KernelFamily::kU8;
  if (p.precision == Precision::kFp32 || ComputeMajor(p.ctx.device_id) < 8)
    return KernelFamily::kFp32;
  return p.precision == Precision::kTf32 ? KernelFamily::kTf32 : KernelFamily::k3xTf32;
}

TileConfig BestTileConfig(KernelFamily family, const Gemm* gemms, int count, int max_splits) {
  const int device = gemms->ctx.device_id, multiprocessors = Multiprocessors(device);
  const size_t shared_limit = SharedLimit(device);
  const FamilyModel& model = ModelOf(family);
  int64_t k = 0;
  for (int i = 0; i < count; i++) k = std::max(k, gemms[i].k);
  TileConfig best = {family, (int)model.size() - 1, 1, INFINITY};
  for (int tiling = 0; tiling < (int)model.size(); tiling++) {
    if (!FitsSharedMemory(shared_limit, model[tiling].nbytes)) continue;
    const TileCost& cost = model[tiling].cost;
    const double tiles = CountTiles(gemms, count, cost);
    const auto consider = [&](int splits) {
      if (!HasNoEmptySplit(k, splits)) return;
      const double us = EstimateUs(tiles, k, cost, splits, multiprocessors);
      if (us < best.us) best = {family, tiling, splits, us};
    };
    for (int splits = 1; splits <= std::min(max_splits, kMaxSplits); splits *= 2) consider(splits);
    // More splits than a cluster has are as many as give each multiprocessor its blocks.
    const int full = (int)(multiprocessors * cost.resident / std::max(tiles, 1.));
    if (max_splits > kMaxSplits && full > kMaxSplits)
      consider((int)CeilDiv(k, KSlice(k, std::min(full, max_splits))));
  }
  return best;
}

MixedConfig BestMixedConfig(const Gemm* gemms, int count, int max_splits) {
  const int multiprocessors = Multiprocessors(gemms->ctx.device_id);
  int64_t k = 0;
  for (int i = 0; i < count; i++) k = std::max(k, gemms[i].k);
  MixedConfig best = {};
  double best_us = INFINITY;
  const size_t shared_limit = SharedLimit(gemms->ctx.device_id);
  for (const MixedCost& cost : kMixedCosts) {
    if (!FitsSharedMemory(shared_limit, cost.nbytes)) continue;
    for (int splits = 1; splits <= max_splits && HasNoEmptySplit(k, splits); splits *= 2) {
      const MixedConfig config = {(int)(&cost - kMixedCosts), splits, cost.of_floats, cost.of_u8_a,
                                  cost.of_u8_b};
      double ns = 0, longest = 0, blocks = 0;  // per k
      for (const Gemm* p = gemms; p < gemms + count; p++) {
        const double of_block = p->u8 != U8Operand::kNone ? cost.ns_of_u8 : cost.ns;
        const TileSize& tile = config.Of(p->u8);
        const double tiles = (double)(splits * CeilDiv(p->m, tile.m) * CeilDiv(p->n, tile.n));
        ns += of_block * tiles, blocks += tiles;
        longest = std::max(longest, of_block);
      }
      const double usable = UsableMultiprocessors(multiprocessors, splits);
      const double shared = ns / usable * (cost.resident > 1 ? kTogether : 1);
      const bool at_once = blocks <= cost.resident * usable;
      const double on_each = at_once ? std::max(longest, shared) : longest + shared;
      const double us = on_each * 1e-3 * (double)KSlice(k, splits) + ReduceUs(splits, 0);
      if (us < best_us) best = config, best_us = us;
    }
  }
  return best;
}

namespace {

bool HasLargeFamily(KernelFamily family) { return family < KernelFamily::kU8; }
KernelFamily LargeFamily(KernelFamily family) {
  return (KernelFamily)((int)family + (int)KernelFamily::kLargeFp32);
}

// The best large tiling. Where its last wave is nearly empty, the tiles of that wave may be a
// launch of their own with a split K, from sm_90 on, where a cluster reduces them.
TileConfig BestLargeConfig(KernelFamily family, const Gemm& p, int max_splits) {
  const int device = p.ctx.device_id, multiprocessors = Multiprocessors(device);
  TileConfig best = BestTileConfig(family, &p, 1, max_splits);
  if (ComputeMajor(device) < 9) return best;
  const FamilyModel& model = ModelOf(family);
  for (int tiling = 0; tiling < (int)model.size(); tiling++) {
    const TileCost& cost = model[tiling].cost;
    const int64_t tiles = (int64_t)CountTiles(&p, 1, cost);
    const int64_t wave = (int64_t)multiprocessors * cost.resident, rest = tiles % wave;
    if (tiles < wave || rest == 0) continue;
    const double full_us = EstimateUs((double)(tiles - rest), p.k, cost, 1, multiprocessors);
    for (int splits = 2; splits <= kMaxSplits && HasNoEmptySplit(p.k, splits); splits *= 2) {
      const double us = full_us + EstimateUs((double)rest, p.k, cost, splits, multiprocessors);
      if (us < best.us) best = {family, tiling, 1, us, (int)rest, splits};
    }
  }
  return best;
}

}  // namespace

TileConfig BestTileConfig(KernelFamily family, const Gemm& p) {
  const bool deep = p.k >= kDeepK && (double)p.m * p.n < kDeepNumel;
  const int max_splits = deep ? kDeepSplits : kMaxSplits;
  const TileConfig best = BestTileConfig(family, &p, 1, max_splits);
  if (!HasLargeFamily(family)) return best;
  const TileConfig large = BestLargeConfig(LargeFamily(family), p, max_splits);
  TileConfig fastest = large.us < best.us ? large : best;
  const double slim_us = SlimUs(p) + (p.sums ? kReduceUs : 0);
  if (slim_us < fastest.us) fastest = {KernelFamily::kSlim, 0, 1, slim_us};
  if (family != KernelFamily::kFp32 || !FfmaFits(p)) return fastest;
  for (int tiling = 0; tiling < (int)FfmaTilingNames().size(); tiling++) {
    const double us = FfmaUs(p, tiling) + (p.sums ? kReduceUs : 0);
    if (us < fastest.us) fastest = {KernelFamily::kFfma, tiling, 1, us};
  }
  return fastest;
}

GemmParams MakeParams(const char* op, const Gemm& p, const TileConfig& config) {
  const TileCost& cost = ModelOf(config.family)[config.tiling].cost;
  return MakeParams(op, p, {cost.m, cost.n}, config.splits);
}

GemmParams MakeParams(const char* op, const Gemm& p, const TileSize& size, int splits) {
  // One tile at least: operand sums need the tiles of an empty C too.
  const int64_t rows = std::max<int64_t>(1, CeilDiv(p.m, size.m));
  const int64_t cols = std::max<int64_t>(1, CeilDiv(p.n, size.n));
  if (rows > kMaxTiles / (cols * kMaxSplits))
    Fail("%s: a result of %ld x %ld is too large", op, (long)p.m, (long)p.n);
  const int64_t row_a = p.trans_a ? p.m : p.k, row_b = p.trans_b ? p.k : p.n;
  const bool aligned_a = Aligned16(p.a) && row_a % (p.u8 == U8Operand::kA ? 16 : 4) == 0;
  const bool aligned_b = Aligned16(p.b) && row_b % (p.u8 == U8Operand::kB ? 16 : 4) == 0;
  return {p,         (int)rows,         (int)cols,     splits,  KSlice(p.k, splits),
          aligned_a, aligned_b,         AlignedOut(p), nullptr, ComputeMajor(p.ctx.device_id) >= 9,
          0,         (int)(rows * cols)};
}

void RunTiledGemm(const char* op, const Gemm& p, TileConfig config, DLStream stream) {
  if (config.family == KernelFamily::kFfma) return RunFfma(op, p, config.tiling, stream);
  if (config.family == KernelFamily::kSlim) return RunSlim(op, p, stream);
  const int64_t k_slice = KSlice(p.k, config.splits);
  if (k_slice > 0) config.splits = (int)CeilDiv(p.k, k_slice);
  const int tiling = config.tiling, splits = config.splits;
  GemmParams params = MakeParams(op, p, config);
  const auto launch = [&] {
    constexpr decltype(&LaunchFp32) kLaunch[] = {LaunchFp32,       LaunchTf32,      Launch3xTf32,
                                                 LaunchU8,         LaunchLargeFp32, LaunchLargeTf32,
                                                 LaunchLarge3xTf32};
    kLaunch[(int)config.family](op, tiling, params, stream);
  };
  if (config.rest > 0) {
    params.tiles -= config.rest;
    launch();
    params.first_tile = params.tiles, params.tiles = config.rest;
    params.splits = config.rest_splits, params.k_slice = KSlice(p.k, config.rest_splits);
    return launch();
  }
  const bool clusters = ComputeMajor(p.ctx.device_id) >= 9 && splits <= kMaxSplits;
  if (splits == 1 || clusters) return launch();
  const int64_t width = p.sums ? (p.sums_of_a ? p.m : p.n) : 0;
  const Scratch partial(p.ctx, splits * (p.m * p.n + width) * (int64_t)sizeof(float), stream);
  params.partial = partial.floats();
  params.aligned_out = p.n % 4 == 0;
  launch();
  RunEpilogue(op, p, partial.floats(), splits, stream);
  if (p.sums)
    SumAxis(op, p.ctx, partial.floats() + splits * p.m * p.n, 1, splits, width, 1.f, p.sums,
            stream);
}

void RunOwnGemm(const char* op, const Gemm& p, DLStream stream) {
  if (p.m == 0 || p.n == 0) {
    if (p.sums) RunOperandSums(op, p, stream);
    return;
  }
  if (p.IsNarrow()) {
    const InFloat32 floats(op, p, stream);
    RunOwnGemm(op, floats.get(), stream);
    return floats.StoreResult();
  }
  RunTiledGemm(op, p, BestTileConfig(FamilyOf(p), p), stream);
}

// Computes what cuBLAS and cuBLASLt leave out.
void RunEpilogueAndSums(const char* op, const Gemm& p, DLStream stream) {
  Gemm rest = p;
  rest.epilogue = WithoutAddition(p.epilogue);
  if (!rest.epilogue.Empty()) RunEpilogue(op, rest, p.c, 1, stream);
  if (p.sums) RunOperandSums(op, p, stream);
}

void RunGemmByHeuristic(const char* op, const Gemm& p, DLStream stream) {
  const double sums_us = p.IsNarrow() && MakesSumsOnHopper(p) ? kReduceUs : OperandSumsUs(p);
  const double tiled_us = TiledUs(p), hopper_us = HopperUs(p) + sums_us;
  const bool hopper = hopper_us + (p.IsNarrow() ? 0 : kAloneUs) < tiled_us;
  const double cublas_us = CublasUs(p), own_us = hopper ? hopper_us : tiled_us;
  if (p.IsNarrow() && SlimUs(p) + OperandSumsUs(p) < std::min(own_us, cublas_us))
    return RunSlim(op, p, stream);
  const bool cublas = cublas_us < own_us && !*CublasError();
  if (cublas && p.IsNarrow()) return RunNarrowCublasGemm(op, p, stream);
  if (cublas) {
    RunCublasGemm(op, p, stream);
    return RunEpilogueAndSums(op, p, stream);
  }
  if (hopper) return kHopper.run(op, p, kHeuristic, stream);
  RunOwnGemm(op, p, stream);
}

namespace {

constexpr int kSplitsPerTiling = 4;  // 1, 2, 4 and 8 splits
static_assert(1 << (kSplitsPerTiling - 1) == kMaxSplits);

}  // namespace

TileConfig VariantConfig(KernelFamily family, const Gemm& p, int variant) {
  if (variant == kHeuristic) return BestTileConfig(family, p);
  const int tilings = (int)ModelOf(family).size(), tiling = variant / kSplitsPerTiling;
  const int splits = 1 << variant % kSplitsPerTiling;
  if (tiling < tilings) return {family, tiling, splits, 0};
  const int large = (int)ModelOf(LargeFamily(family)).size();
  if (tiling < tilings + large) return {LargeFamily(family), tiling - tilings, splits, 0};
  const int rest = variant - (tilings + large) * kSplitsPerTiling;
  if (rest == (int)FfmaTilingNames().size()) return {KernelFamily::kSlim, 0, 1, 0};
  return {KernelFamily::kFfma, rest, 1, 0};
}

std::vector<std::string> TiledVariants(KernelFamily family) {
  std::vector<std::string> names;
  const auto add = [&](KernelFamily each) {
    for (const TileModel& tile : ModelOf(each))
      for (int k = 0; k < kSplitsPerTiling; k++)
        names.push_back(tile.cost.name + std::string(" by ") + std::to_string(1 << k));
  };
  add(family);
  add(LargeFamily(family));
  if (family != KernelFamily::kFp32) return names;
  for (const std::string& name : FfmaTilingNames()) names.push_back(name);
  names.push_back("slim");
  return names;
}

bool FitsTiled(KernelFamily family, const Gemm& p, int variant) {
  const int small = (int)ModelOf(family).size() * kSplitsPerTiling;
  if (variant >= small && !HasLargeFamily(family)) return false;
  const TileConfig config = VariantConfig(family, p, variant);
  if (config.family == KernelFamily::kFfma) return FfmaFits(p);
  if (config.family == KernelFamily::kSlim) return SlimFits(p);
  return FitsSharedMemory(SharedLimit(p.ctx.device_id),
                          ModelOf(config.family)[config.tiling].nbytes) &&
         HasNoEmptySplit(p.k, config.splits);
}

}  // namespace cuda
}  // namespace dlsys
