// Launches of GEMM by wgmma and TMA of one element type: tensor maps, and copies of operands that
// TMA or wgmma cannot read as they lie, which memory bandwidth limits. hopper/launch.cu picks the
// tiling and how K is cut; each element type is compiled in a file of its own.
#pragma once
#include <array>
#include <optional>
#include <tuple>

#include "cuda/gemm/hopper/hopper.cuh"
#include "cuda/gemm/hopper/launch.cuh"
#include "cuda/reduce/reduce.cuh"

namespace dlsys {
namespace cuda {
namespace hopper {

// ---- tilings ----

using Tilings =
    std::tuple<Tiling<1, 256, false, 2, 4, 128>, Tiling<2, 128, true, 1, 5, 128>,
               Tiling<1, 128, false, 1, 6, 128>, Tiling<1, 64, false, 1, 8, 64>,
               Tiling<1, 256, false, 1, 4, 64, 0, true>, Tiling<1, 128, false, 1, 6, 64, 0, true>>;
static_assert(std::tuple_size_v<Tilings> == kHopperTilings);

// What a tiling has kernels for, and its times on an H200: of a panel (128 bytes of K), of what a
// tile costs besides, and of an epilogue of few instructions, or of a function of more.
struct TilingCost {
  const char* name;
  int tile_m, tile_n, cluster;
  double panel_us, tile_us, simple_us, fast_us;
  bool exact, plain;  // has a kernel of 3xtf32, and one of the rest
  double across_us;   // of a panel of float32 that is read into registers; 0 where it has no kernel
};
constexpr int kPingPong = 1;
// Of float32 that lies across in both operands, as in the gradient of weights: 128 rows of the one
// with fewer, by as many of the other as make tiles alike. One is of tf32, one of 3xtf32.
constexpr bool IsFitted(int tiling) { return tiling == 4 || tiling == 5; }
constexpr TilingCost kCosts[kHopperTilings] = {
    {"128x256", 128, 256, 2, 0.69, 1.2, 0.6, 4, false, true, 0.69},
    {"128x128 ping-pong", 128, 128, 1, 0.38, 0.6, 0.8, 8, false, true, 0},
    {"128x128", 128, 128, 1, 0.37, 1.6, 0.4, 1.6, true, false, 0.42},
    {"128x64", 128, 64, 1, 0.25, 0.8, 0.3, 0.9, true, true, 0.25},
    {"128x256 fitted", 128, 256, 1, 0, 1.6, 1, 1.6, false, true, 1.15},
    {"128x128 fitted", 128, 128, 1, 0.57, 1.6, 1, 1.6, true, false, 0}};

inline bool IsAligned(const HopperGemm& gemm) {
  return gemm.n % 4 == 0 && Aligned16(gemm.c) && Aligned16(gemm.before) && Aligned16(gemm.bias) &&
         Aligned16(gemm.side);
}
// True where tiles are stored from registers, of 16 bits by TMA; others go through memory first.
inline bool IsInBoxes(const HopperGemm& gemm) {
  const int columns = gemm.dtype == DL_FLOAT32 ? 4 : gemm.slope || gemm.quantized ? 16 : 8;
  return IsAligned(gemm) && gemm.n % columns == 0;
}

inline int64_t PanelsOf(const HopperGemm& gemm) {
  return CeilDiv(gemm.k, 128 / DtypeNbytes(gemm.dtype));
}

// The tiling and cuts of the least estimated time, or the cuts of a tiling that is given.
Config BestConfig(const HopperGemm& gemm, int tiling);

// ---- operands that TMA cannot read as they lie ----

constexpr int kPackTile = 32;

// Copies op(X) (rows, k) to (rows, pitch), in zeros beyond k. X is (rows, k), or (k, rows) where
// `transposed`. With `split`, of float32: the upper part of each element, which is x as tf32, and
// behind those of all elements the lower parts, x minus its upper part.
template <class E>
__global__ void __launch_bounds__(kThreads)
    PackKernel(const E* x, int64_t rows, int64_t k, int64_t pitch, bool transposed, bool split,
               E* packed) {
  __shared__ E tile[kPackTile][kPackTile + 1];
  constexpr int kStep = kThreads / kPackTile;
  const int64_t row_tiles = CeilDiv(rows, kPackTile), k_tiles = CeilDiv(pitch, kPackTile);
  const int column = threadIdx.x % kPackTile, line = threadIdx.x / kPackTile;
  const int64_t batch = blockIdx.y;
  x += batch * rows * k;
  packed += batch * rows * pitch;
  for (int64_t t = blockIdx.x; t < row_tiles * k_tiles; t += gridDim.x) {
    const int64_t row0 = t / k_tiles * kPackTile, k0 = t % k_tiles * kPackTile;
    for (int i = line; i < kPackTile; i += kStep) {
      const int64_t row = row0 + (transposed ? column : i), at = k0 + (transposed ? i : column);
      const bool exists = row < rows && at < k;
      const E value = exists ? x[transposed ? at * rows + row : row * k + at] : E(0.f);
      (transposed ? tile[column][i] : tile[i][column]) = value;
    }
    __syncthreads();
    for (int i = line; i < kPackTile; i += kStep) {
      const int64_t row = row0 + i, at = k0 + column;
      if (row < rows && at < pitch) {
        const float value = (float)tile[i][column];
        E* to = packed + row * pitch + at;
        if (split) {
          const float upper = __uint_as_float(__float_as_uint(RoundedToTf32(value)) & 0xFFFFE000u);
          to[0] = E(upper);
          // An infinity or NaN is in the upper part alone: its difference would be NaN.
          to[rows * pitch] = E(isfinite(upper) ? value - upper : 0.f);
        } else {
          to[0] = tile[i][column];
        }
      }
    }
    __syncthreads();
  }
}

constexpr int kTransposeTile = 64;

// The same of float32 that is transposed and not split, a tile of 64 x 64 at a time in accesses of
// 16 bytes; `rows` is a multiple of four. A block takes a strip of K of 64 rows, and leaves the
// sums of these in `sums` (strips, rows), if any.
static __global__ void __launch_bounds__(kThreads)
    TransposeKernel(const float* x, int64_t rows, int64_t k, int64_t pitch, int strips,
                    float* packed, float* sums) {
  constexpr int kTile = kTransposeTile, kQuads = kTile / 4, kLines = kThreads / kQuads;
  __shared__ float tile[kTile][kTile + 1];
  const int quad = threadIdx.x % kQuads, line = threadIdx.x / kQuads;
  const int64_t k_tiles = CeilDiv(pitch, kTile), jobs = CeilDiv(rows, kTile) * strips;
  for (int64_t job = blockIdx.x; job < jobs; job += gridDim.x) {
    const int64_t row0 = job / strips * kTile, strip = job % strips;
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
    for (int64_t t = k_tiles * strip / strips; t < k_tiles * (strip + 1) / strips; t++) {
      const int64_t k0 = t * kTile;
      float4 v[kTile / kLines];
#pragma unroll
      for (int u = 0; u < kTile / kLines; u++) {
        const int64_t at = k0 + line + u * kLines, row = row0 + quad * 4;
        v[u] = make_float4(0.f, 0.f, 0.f, 0.f);
        if (at < k && row < rows) v[u] = *(const float4*)(x + at * rows + row);
      }
      __syncthreads();  // the tile has been read
#pragma unroll
      for (int u = 0; u < kTile / kLines; u++) {
        float* const to = &tile[line + u * kLines][quad * 4];
        to[0] = v[u].x, to[1] = v[u].y, to[2] = v[u].z, to[3] = v[u].w;
        sum.x += v[u].x, sum.y += v[u].y, sum.z += v[u].z, sum.w += v[u].w;
      }
      __syncthreads();
#pragma unroll
      for (int u = 0; u < kTile / kLines; u++) {
        const int r = line + u * kLines, at = quad * 4;
        if (row0 + r < rows && k0 + at < pitch)
          *(float4*)(packed + (row0 + r) * pitch + k0 + at) =
              make_float4(tile[at][r], tile[at + 1][r], tile[at + 2][r], tile[at + 3][r]);
      }
    }
    if (!sums) continue;
    __syncthreads();
    float* const to = &tile[line][quad * 4];
    to[0] = sum.x, to[1] = sum.y, to[2] = sum.z, to[3] = sum.w;
    __syncthreads();
    if (threadIdx.x < kTile && row0 + threadIdx.x < rows) {
      float total = tile[0][threadIdx.x];
#pragma unroll
      for (int l = 1; l < kLines; l++) total += tile[l][threadIdx.x];
      sums[strip * rows + row0 + threadIdx.x] = total;
    }
  }
}

// An operand as TMA reads it: `rows` along M or N; `across` where they are its inner extent.
struct Operand {
  const void* data;
  int64_t rows, k, pitch, batch;  // pitch: elements between rows, or along K where across
  bool across;
};

inline int64_t RoundUp(int64_t x, int64_t unit) { return CeilDiv(x, unit) * unit; }

// Which operands are packed, along K, and which are read as they lie along M or N.
struct Roles {
  bool packs_a, packs_b, a_across, b_across;
};

// TMA reads rows at multiples of 16 bytes. Of float32, one operand may lie across, which is read
// into registers: where both do, the smaller one is packed. So is one that is smaller than C where
// the epilogue reads a side, which TMA can copy then. At 3xtf32 what is not read into registers is
// packed in both parts: the smaller operand, or a B along K. The fitted tilings turn in shared
// memory what others pack.
inline Roles RolesOf(const HopperGemm& gemm, int tiling = -1) {
  const auto readable = [&](const void* data, int64_t inner) {
    return Aligned16(data) && inner * DtypeNbytes(gemm.dtype) % 16 == 0;
  };
  bool packs_a = !readable(gemm.a, gemm.trans_a ? gemm.m : gemm.k);
  bool packs_b = !readable(gemm.b, gemm.trans_b ? gemm.k : gemm.n);
  const bool a_across = gemm.trans_a, b_across = !gemm.trans_b;
  if (IsFitted(tiling) && a_across && b_across && !packs_a && !packs_b)
    return {false, false, true, true};
  if (gemm.split) {
    const bool reads_b = b_across && !packs_b && (gemm.m <= gemm.n || packs_a);
    return {packs_a || reads_b, !reads_b, a_across && !packs_a && !reads_b, reads_b};
  }
  if (gemm.dtype == DL_FLOAT32) {
    if (a_across && b_across && !packs_a && !packs_b) (gemm.m < gemm.n ? packs_a : packs_b) = true;
    packs_a = packs_a || (a_across && gemm.side && gemm.k < gemm.n);
    packs_b = packs_b || (b_across && gemm.side && gemm.k < gemm.m);
  }
  return {packs_a, packs_b, a_across && !packs_a, b_across && !packs_b};
}

// True where an operand of float32 is read into registers as it lies.
inline bool ReadsAcross(const HopperGemm& gemm) {
  const Roles roles = RolesOf(gemm);
  return gemm.dtype == DL_FLOAT32 && !gemm.split && (roles.a_across || roles.b_across);
}

// True where tiles are those of C's transpose.
inline bool IsOfColumns(const HopperGemm& gemm, int tiling) {
  if (IsFitted(tiling)) return gemm.n <= gemm.m;
  return gemm.dtype == DL_FLOAT32 && RolesOf(gemm).b_across;
}

// True where the product sums an operand in its kernel: of 16 bits an A that lies along M, of
// float32 what is read into registers.
inline bool SumsAsItMultiplies(const HopperGemm& gemm, int tiling) {
  const Roles roles = RolesOf(gemm, tiling);
  const bool either = gemm.dtype == DL_FLOAT32 && !gemm.sums_of_a && roles.b_across;
  return HopperMakesSums(gemm) && ((gemm.sums_of_a && roles.a_across) || either);
}

// True where TransposeKernel packs it.
inline bool IsTransposed(const HopperGemm& gemm, const void* data, bool across, int64_t rows) {
  return gemm.dtype == DL_FLOAT32 && across && rows % 4 == 0 && Aligned16(data);
}

// Elements between the rows of a packed operand: those of long rows begin at lines of 128 bytes, as
// the boxes do that are read of them.
inline int64_t PackedPitch(const HopperGemm& gemm) {
  const int64_t size = DtypeNbytes(gemm.dtype);
  return RoundUp(gemm.k, (gemm.k * size < 1024 ? 16 : 128) / size);
}

// Its packed copy, in scratch memory that lives as long as this, and its sums, if wanted and made
// on the way.
template <class E>
class OperandOf {
 public:
  OperandOf(const char* op, const HopperGemm& gemm, const void* data, int64_t rows, bool across,
            bool packs, bool splits, float* sums, DLStream stream) {
    const int64_t inner = across ? rows : gemm.k, k = gemm.k;
    operand_ = {data, rows, k, inner, gemm.batch, across};
    if (!packs) return;
    const int64_t pitch = PackedPitch(gemm), parts = splits ? 2 : 1;
    packed_.emplace(gemm.ctx, parts * gemm.batch * rows * pitch * (int64_t)sizeof(E), stream);
    operand_ = {packed_->data(), rows, k, pitch, parts * gemm.batch, false};
    if constexpr (sizeof(E) == 4)
      if (!splits && IsTransposed(gemm, data, across, rows)) {
        Transpose(op, gemm, (const float*)data, pitch, sums, stream);
        return;
      }
    const int64_t tiles = CeilDiv(rows, kPackTile) * CeilDiv(pitch, kPackTile);
    LaunchPack(op, (const E*)data, rows, k, pitch, across, splits, gemm.batch, tiles, stream);
  }
  const Operand& get() const { return operand_; }

 private:
  void LaunchPack(const char* op, const E* x, int64_t rows, int64_t k, int64_t pitch, bool across,
                  bool split, int64_t batch, int64_t tiles, DLStream stream) {
    for (int64_t z = 0; z < batch; z++)
      Launch(op, PackKernel<E>, Blocks(tiles, 1), kThreads, 0, stream, x + z * rows * k, rows, k,
             pitch, across, split, (E*)packed_->data() + z * rows * pitch);
  }
  void Transpose(const char* op, const HopperGemm& gemm, const float* x, int64_t pitch, float* sums,
                 DLStream stream) {
    const int64_t wanted = 8 * Multiprocessors(gemm.ctx.device_id), rows = operand_.rows;
    const int64_t row_tiles = CeilDiv(rows, kTransposeTile),
                  k_tiles = CeilDiv(pitch, kTransposeTile);
    const int64_t strips = std::min(k_tiles, CeilDiv(wanted, row_tiles));
    std::optional<Scratch> partial;
    if (sums) partial.emplace(gemm.ctx, strips * rows * (int64_t)sizeof(float), stream);
    for (int64_t z = 0; z < gemm.batch; z++)
      Launch(op, TransposeKernel, Blocks(row_tiles * strips, 1), kThreads, 0, stream,
             x + z * rows * gemm.k, rows, gemm.k, pitch, (int)strips,
             packed_->floats() + z * rows * pitch, sums ? partial->floats() : nullptr);
    if (sums) SumAxis(op, gemm.ctx, partial->floats(), 1, strips, rows, 1.f, sums, stream);
  }
  Operand operand_;
  std::optional<Scratch> packed_;
};

// ---- tensor maps ----

template <class E>
CUtensorMap MapOf(const char* op, const Operand& x, int box_rows, bool rounds = true) {
  constexpr int kTileK = 128 / sizeof(E);
  const int64_t inner = x.across ? x.rows : x.k, outer = x.across ? x.k : x.rows;
  const bool asks_ahead = !x.across || x.pitch * sizeof(E) % 256 == 0;
  return BoxMap(op, kDtype<E>, x.data, inner, outer, x.pitch, x.batch, x.across ? kTileK : box_rows,
                rounds, asks_ahead);
}

// ---- launches ----

// How many splits a tile may have.
inline int MostSplits(const Config& config, int64_t panels) {
  if (!config.split_tiles) return 1;
  return (int)CeilDiv(panels - 1, config.split_tiles * panels / config.workers) + 1;
}

// `a` and `b` as the kernel has them, which are op(B) and op(A) for tiles of C's transpose.
template <class E, class T, class Source, bool kExact = false>
void LaunchGemm(const char* op, const HopperGemm& gemm, const Operand& a, const Operand& b,
                const Config& config, DLStream stream) {
  Params params = {};
  params.m = (int)gemm.m, params.n = (int)gemm.n, params.batch = (int)gemm.batch;
  params.k_panels = (int)PanelsOf(gemm);
  params.c = gemm.c, params.before = gemm.before, params.slope = gemm.slope;
  params.bias = gemm.bias, params.side = gemm.side;
  params.activation = gemm.activation, params.gradient = gemm.gradient;
  params.gate =
      gemm.activation == 4 || gemm.gradient == 2 ? fast::Gate::Silu() : fast::Gate::GeluTanh();
  params.aligned = IsAligned(gemm), params.in_boxes = !T::kFitted && IsInBoxes(gemm);
  std::optional<Scratch> parts;  // of the sums of A
  const int64_t cols = kTransposed<Source> ? gemm.m : gemm.n;
  const int64_t count = CeilDiv(cols, T::kTileN) * MostSplits(config, PanelsOf(gemm));
  const bool sums = RowSums<E, T, Source>::kMade && SumsAsItMultiplies(gemm, config.index);
  if (sums) {
    parts.emplace(gemm.ctx, count * a.rows * (int64_t)sizeof(float), stream);
    params.sums = parts->floats(), params.sum_parts = MostSplits(config, PanelsOf(gemm));
  }
  const auto map_of_boxes = [&](const void* data, int dtype) {
    return params.in_boxes && data ? BoxMap(op, dtype, data, gemm.n, gemm.m, gemm.n, gemm.batch,
                                            kRowsOfBox, /*rounds=*/false)
                                   : CUtensorMap{};
  };
  const bool rounds = !sums && !gemm.split;  // else A of float32 is rounded in registers
  const Maps maps{MapOf<E>(op, a, T::kTileM, rounds),
                  MapOf<E>(op, b, T::kTileN / T::kCluster, !gemm.split),
                  map_of_boxes(gemm.c, kDtype<E>),
                  map_of_boxes(gemm.before ? gemm.before : gemm.side,
                               gemm.slope || gemm.quantized ? DL_UINT8 : kDtype<E>)};
  LaunchTiles<E, T, Source, kExact>(op, gemm.ctx, config, maps, params, {}, stream);
  if (sums) SumAxis(op, gemm.ctx, parts->floats(), 1, count, a.rows, 1.f, gemm.sums, stream);
}

template <class E, int kTiling>
void LaunchTiling(const char* op, const HopperGemm& gemm, const Operand& a, const Operand& b,
                  const Config& config, DLStream stream) {
  using T = std::tuple_element_t<kTiling, Tilings>;
  constexpr TilingCost kCost = kCosts[kTiling];
  using AlongK = Matrices<E, T, false, false>;
  if constexpr (IsFitted(kTiling)) {
    if constexpr (sizeof(E) == 4 && kCost.plain) {
      using OfRows = Matrices<E, T, true, true, ReadsA::kRegisters>;
      using OfColumns = Matrices<E, T, true, true, ReadsA::kRegistersOfColumns>;
      IsOfColumns(gemm, kTiling) ? LaunchGemm<E, T, OfColumns>(op, gemm, b, a, config, stream)
                                 : LaunchGemm<E, T, OfRows>(op, gemm, a, b, config, stream);
    }
  } else if constexpr (sizeof(E) == 4) {
    if constexpr (kCost.plain)
      if (!a.across && !b.across) return LaunchGemm<E, T, AlongK>(op, gemm, a, b, config, stream);
    if constexpr (kCost.across_us > 0) {
      using AAcross = Matrices<E, T, true, false, ReadsA::kRegisters>;
      using BAcross = Matrices<E, T, true, false, ReadsA::kRegistersOfColumns>;
      if (a.across) LaunchGemm<E, T, AAcross>(op, gemm, a, b, config, stream);
      if (b.across) LaunchGemm<E, T, BAcross>(op, gemm, b, a, config, stream);
    }
  } else if constexpr (kCost.plain) {
    if (a.across)
      b.across ? LaunchGemm<E, T, Matrices<E, T, true, true>>(op, gemm, a, b, config, stream)
               : LaunchGemm<E, T, Matrices<E, T, true, false>>(op, gemm, a, b, config, stream);
    else
      b.across ? LaunchGemm<E, T, Matrices<E, T, false, true>>(op, gemm, a, b, config, stream)
               : LaunchGemm<E, T, AlongK>(op, gemm, a, b, config, stream);
  }
}

// The same at 3xtf32.
template <int kTiling>
void LaunchTilingInParts(const char* op, const HopperGemm& gemm, const Operand& a, const Operand& b,
                         const Config& config, DLStream stream) {
  if constexpr (kCosts[kTiling].exact) {
    constexpr bool kTurns = IsFitted(kTiling);
    using T = WithBothParts<std::tuple_element_t<kTiling, Tilings>>;
    using Along = Matrices<float, T, false, false, ReadsA::kRegisters>;
    using OfRows = Matrices<float, T, true, kTurns, ReadsA::kRegisters>;
    using OfColumns = Matrices<float, T, true, kTurns, ReadsA::kRegistersOfColumns>;
    if (IsOfColumns(gemm, kTiling))
      return LaunchGemm<float, T, OfColumns, true>(op, gemm, b, a, config, stream);
    if (a.across) return LaunchGemm<float, T, OfRows, true>(op, gemm, a, b, config, stream);
    if constexpr (!kTurns) LaunchGemm<float, T, Along, true>(op, gemm, a, b, config, stream);
  }
}

template <class E, bool kInParts, size_t... k>
void LaunchBest(const char* op, const HopperGemm& gemm, const Operand& a, const Operand& b,
                const Config& config, DLStream stream, std::index_sequence<k...>) {
  constexpr auto kLaunch = [] {
    if constexpr (kInParts)
      return std::array{&LaunchTilingInParts<(int)k>...};
    else
      return std::array{&LaunchTiling<E, (int)k>...};
  }();
  kLaunch[config.index](op, gemm, a, b, config, stream);
}

// Runs a GEMM of E, by kernels of 3xtf32 or by the others; `tiling` as RunHopperGemm has it.
template <class E, bool kInParts>
void RunBest(const char* op, const HopperGemm& gemm, DLStream stream, int tiling) {
  const Config config = BestConfig(gemm, tiling);
  const bool sums_packed = HopperMakesSums(gemm) && !SumsAsItMultiplies(gemm, config.index);
  float* const sums = sums_packed ? gemm.sums : nullptr;
  const Roles roles = RolesOf(gemm, config.index);
  const OperandOf<E> a(op, gemm, gemm.a, gemm.m, gemm.trans_a, roles.packs_a,
                       kInParts && roles.b_across, gemm.sums_of_a ? sums : nullptr, stream);
  const OperandOf<E> b(op, gemm, gemm.b, gemm.n, !gemm.trans_b, roles.packs_b,
                       kInParts && !roles.b_across, gemm.sums_of_a ? nullptr : sums, stream);
  LaunchBest<E, kInParts>(op, gemm, a.get(), b.get(), config, stream,
                          std::make_index_sequence<kHopperTilings>());
}

// Each in a file of its own.
template <class E>
void RunOf(const char* op, const HopperGemm& gemm, DLStream stream, int tiling) {
  RunBest<E, false>(op, gemm, stream, tiling);
}
extern template void RunOf<float>(const char* op, const HopperGemm& gemm, DLStream stream,
                                  int tiling);
extern template void RunOf<bfloat16>(const char* op, const HopperGemm& gemm, DLStream stream,
                                     int tiling);
extern template void RunOf<float16>(const char* op, const HopperGemm& gemm, DLStream stream,
                                    int tiling);
void RunInParts(const char* op, const HopperGemm& gemm, DLStream stream, int tiling);  // at 3xtf32

}  // namespace hopper
}  // namespace cuda
}  // namespace dlsys
