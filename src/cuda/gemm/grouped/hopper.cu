// The rung `hopper` of grouped products: wgmma and TMA of sm_90a, at tf32, and of bfloat16 and
// float16. Operands that TMA or wgmma cannot read as they lie are copied first, which memory
// bandwidth limits: of 16 bits those whose rows are not at multiples of 16 bytes, of float32 all
// that do not lie along K. hopper.cuh has the kernel and what limits it.
#include <algorithm>
#include <optional>

#include "cuda/gemm/grouped/hopper.cuh"
#include "cuda/gemm/hopper/products.cuh"
#include "cuda/pointwise/copy.cuh"

namespace dlsys {
namespace cuda {

using namespace hopper;  // NOLINT: this file launches what is in there

namespace {

// Copies x (batch, k, rows) to y (batch, rows, pitch), a tile of 64 x 64 at a time in accesses of
// 16 bytes: `rows` and `pitch` are multiples of four.
__global__ void __launch_bounds__(kThreads)
    TransposeGroupsKernel(const float* x, int64_t batch, int64_t k, int64_t rows, int64_t pitch,
                          float* y) {
  constexpr int kTile = 64, kQuads = kTile / 4, kLines = kThreads / kQuads;
  __shared__ float tile[kTile][kTile + 1];
  const int quad = (int)threadIdx.x % kQuads * 4, line = (int)threadIdx.x / kQuads;
  const int64_t row_tiles = CeilDiv(rows, kTile), k_tiles = CeilDiv(k, kTile);
  // Loop bounds are uniform in the block, as __syncthreads requires.
  for (int64_t job = blockIdx.x; job < batch * row_tiles * k_tiles; job += gridDim.x) {
    const int64_t z = job / (row_tiles * k_tiles), in_batch = job - z * row_tiles * k_tiles;
    const int64_t row0 = in_batch % row_tiles * kTile, k0 = in_batch / row_tiles * kTile;
    float4 v[kTile / kLines];
#pragma unroll
    for (int u = 0; u < kTile / kLines; u++) {
      const int64_t at = k0 + line + u * kLines, row = row0 + quad;
      v[u] = make_float4(0.f, 0.f, 0.f, 0.f);
      if (at < k && row < rows) v[u] = *(const float4*)(x + (z * k + at) * rows + row);
    }
    __syncthreads();  // the tile has been read
#pragma unroll
    for (int u = 0; u < kTile / kLines; u++) {
      float* const to = &tile[line + u * kLines][quad];
      to[0] = v[u].x, to[1] = v[u].y, to[2] = v[u].z, to[3] = v[u].w;
    }
    __syncthreads();
#pragma unroll
    for (int u = 0; u < kTile / kLines; u++) {
      const int r = line + u * kLines;
      if (row0 + r < rows && k0 + quad < pitch)
        *(float4*)(y + (z * rows + row0 + r) * pitch + k0 + quad) =
            make_float4(tile[quad][r], tile[quad + 1][r], tile[quad + 2][r], tile[quad + 3][r]);
    }
  }
}

// An operand whose rows along M or N are `rows`, and what is summed over `k`, `batch` times. Where
// it lies `across`, along M or N, and `packs`, it is a copy along K.
template <class E>
class GroupedOperand {
 public:
  GroupedOperand(const char* op, const Grouped& p, const void* data, int64_t rows, int64_t k,
                 int64_t batch, bool across, bool packs, DLStream stream) {
    if constexpr (sizeof(E) == 4)
      if (packs && across && rows % 4 == 0 && Aligned16(data)) {
        Transpose(op, p, (const float*)data, rows, k, batch, stream);
        return;
      }
    HopperGemm gemm{};
    gemm.k = k, gemm.batch = batch, gemm.dtype = p.dtype, gemm.ctx = p.ctx;
    other_.emplace(op, gemm, data, rows, across, packs, false, nullptr, stream);
    operand_ = other_->get();
  }
  const hopper::Operand& get() const { return operand_; }

 private:
  void Transpose(const char* op, const Grouped& p, const float* x, int64_t rows, int64_t k,
                 int64_t batch, DLStream stream) {
    const int64_t pitch = RoundUp(k, 32);  // of whole lines
    transposed_.emplace(p.ctx, batch * rows * pitch * (int64_t)sizeof(float), stream);
    const int64_t tiles = batch * CeilDiv(rows, 64) * CeilDiv(k, 64);
    Launch(op, TransposeGroupsKernel, Blocks(tiles, 1), kThreads, 0, stream, x, batch, k, rows,
           pitch, transposed_->floats());
    operand_ = {transposed_->data(), rows, k, pitch, batch, false};
  }

  std::optional<Scratch> transposed_;
  std::optional<OperandOf<E>> other_;
  hopper::Operand operand_;
};

template <class E, bool kContracts, bool kAcrossA, bool kAcrossB>
void LaunchGroups(const char* op, const Grouped& p, const hopper::Operand& a,
                  const hopper::Operand& b, DLStream stream) {
  using T = GroupedTiling;
  const GroupedParams params{p, p.shape.n * (int64_t)sizeof(E) % 16 == 0 && Aligned16(p.c)};
  const int64_t tiles =
      GroupTiles::MostRowTiles(p.shape, T::kTileM) * CeilDiv(p.shape.n, T::kTileN);
  const int64_t blocks = std::min<int64_t>(tiles, Multiprocessors(p.ctx.device_id));
  LaunchClusters(op, GroupedKernel<E, kContracts, kAcrossA, kAcrossB>, (unsigned)blocks, 1,
                 T::kThreads, T::kSharedNbytes, true, stream, MapOf<E>(op, a, T::kTileM),
                 MapOf<E>(op, b, T::kTileN), params);
}

template <class E>
void RunOf(const char* op, const Grouped& p, DLStream stream) {
  constexpr bool kNarrow = sizeof(E) == 2;
  const GroupedShape& shape = p.shape;
  const auto readable = [](const void* data, int64_t inner) {
    return Aligned16(data) && inner * (int64_t)sizeof(E) % 16 == 0;
  };
  if (shape.contracts) {
    const bool across = kNarrow && readable(p.a, shape.k) && readable(p.b, shape.n);
    const GroupedOperand<E> a(op, p, p.a, shape.k, shape.rows, 1, true, !across, stream);
    const GroupedOperand<E> b(op, p, p.b, shape.n, shape.rows, 1, true, !across, stream);
    if constexpr (kNarrow)
      if (across) return LaunchGroups<E, true, true, true>(op, p, a.get(), b.get(), stream);
    return LaunchGroups<E, true, false, false>(op, p, a.get(), b.get(), stream);
  }
  const bool packs_a = !readable(p.a, shape.k), across = !shape.trans_b;
  const bool packs_b = !readable(p.b, across ? shape.n : shape.k) || (!kNarrow && across);
  const GroupedOperand<E> a(op, p, p.a, shape.rows, shape.k, 1, false, packs_a, stream);
  const GroupedOperand<E> b(op, p, p.b, shape.n, shape.k, shape.groups, across, packs_b, stream);
  if constexpr (kNarrow)
    if (across && !packs_b)
      return LaunchGroups<E, false, false, true>(op, p, a.get(), b.get(), stream);
  LaunchGroups<E, false, false, false>(op, p, a.get(), b.get(), stream);
}

const char* Refusal(const Grouped& p) {
  constexpr int64_t kMost = int64_t(1) << 30;
  const GroupedShape& shape = p.shape;
  if (p.dtype == DL_FLOAT32 && p.precision != Precision::kTf32)
    return "it multiplies float32 at tf32, and the precision is another";
  if (std::max({shape.rows, shape.k, shape.n, shape.groups}) > kMost)
    return "it takes at most 2^30 rows and columns";
  const char* const error = HopperDeviceError(p.ctx.device_id);
  return *error ? error : nullptr;
}

const char* Source() {
  int device = 0;
  Check("grouped_matmul", cudaGetDevice(&device));
  Use("grouped_matmul", device);
  const char* error = HopperDeviceError(device);
  if (*error) FailWith(DL_UNAVAILABLE, "grouped_matmul: algo=hopper cannot run here: %s", error);
  return "";
}

void Run(const char* op, const Grouped& p, DLStream stream) {
  const GroupedShape& shape = p.shape;
  if (shape.rows == 0 || shape.k == 0 || shape.groups == 0) {  // a tensor map has no empty extents
    const int64_t rows = shape.contracts ? shape.groups * shape.k : shape.rows;
    return FillBits(op, 0, p.c, rows * shape.n, DtypeNbytes(p.dtype), stream);
  }
  if (p.dtype == DL_FLOAT32) return RunOf<float>(op, p, stream);
  if (p.dtype == DL_BFLOAT16) return RunOf<bfloat16>(op, p, stream);
  RunOf<float16>(op, p, stream);
}

}  // namespace

bool GroupedHopperPays(const Grouped& p) {
  // Flop and bytes a microsecond, on an H200.
  constexpr double kHopperFlopUs = 330e6, kTensorFlopUs = 125e6, kCopiedNbytesUs = 3.2e6;
  const GroupedShape& shape = p.shape;
  if (p.dtype != DL_FLOAT32) return true;
  const double k = (double)shape.k, n = (double)shape.n, rows = (double)shape.rows;
  const double copied = shape.contracts ? rows * (k + n)
                        : shape.trans_b ? 0
                                        : (double)shape.groups * k * n;
  const double saved_us = 2 * rows * k * n * (1 / kTensorFlopUs - 1 / kHopperFlopUs);
  return 2 * sizeof(float) * copied / kCopiedNbytesUs < saved_us;
}

const GroupedRung kGroupedHopper = {"hopper", Source, Refusal, Run, true};

}  // namespace cuda
}  // namespace dlsys
