// What runs a GEMM by wgmma and TMA: a cost model, whose constants were measured, picks the tiling
// and how tiles are cut along K. hopper/hopper.cuh has the contract, hopper/kernel.cuh the kernel
// and what limits it.
#include <algorithm>
#include <cmath>

#include "cuda/gemm/hopper/products.cuh"

namespace dlsys {
namespace cuda {

using namespace hopper;  // NOLINT: this file launches what is in there

namespace {

constexpr double kLaunchUs = 0.9;
constexpr double kTileNbytesUs = 32e3;  // that a multiprocessor reads and writes of memory, a us
constexpr double kPackUs = 4, kPackNbytesUs = 3.2e6;  // of a copy of an operand

bool HasSimpleGradient(const HopperGemm& gemm) {
  return gemm.gradient <= GradientCode::kReluGradient ||
         gemm.gradient == GradientCode::kMulQuantized || AddsSide(gemm.gradient);
}
bool IsSimple(const HopperGemm& gemm) {
  return gemm.activation <= ActivationCode::kRelu && HasSimpleGradient(gemm);
}

// Of the copies that a tiling needs of the operands.
double PackUs(const HopperGemm& gemm, int tiling) {
  const auto pack_us = [&](bool packs, int64_t rows, bool splits) {
    const double nbytes = (double)rows * gemm.k * gemm.batch * DtypeNbytes(gemm.dtype);
    return packs ? kPackUs + nbytes * (splits ? 3 : 2) / kPackNbytesUs : 0.;
  };
  const Roles roles = RolesOf(gemm, tiling);
  return pack_us(roles.packs_a, gemm.m, gemm.split && roles.b_across) +
         pack_us(roles.packs_b, gemm.n, gemm.split && !roles.b_across);
}

Config EstimatedOf(const HopperGemm& gemm, int index, int multiprocessors) {
  const TilingCost& cost = kCosts[index];
  const bool plain = !gemm.bias && !gemm.activation && !gemm.gradient;
  const double function_us = plain ? 0 : IsSimple(gemm) ? cost.simple_us : cost.fast_us;
  const bool waits = gemm.side && gemm.dtype == DL_FLOAT32;  // for a side, of which little is ahead
  const double side_us = waits ? cost.tile_m * cost.tile_n * 8 / kTileNbytesUs : 0;
  const double epilogue_us = function_us + side_us;
  const double panel_us = ReadsAcross(gemm) ? cost.across_us : cost.panel_us * (gemm.split ? 3 : 1);
  const TileTime time{cost.tile_m, cost.tile_n,  cost.cluster, index == kPingPong,
                      panel_us,    cost.tile_us, epilogue_us};
  const bool of_columns = IsOfColumns(gemm, index);
  const int64_t rows = of_columns ? gemm.n : gemm.m, cols = of_columns ? gemm.m : gemm.n;
  const Roles roles = RolesOf(gemm, index);
  const int64_t again = !gemm.split      ? 0
                        : roles.b_across ? roles.packs_a * gemm.m
                                         : roles.packs_b * gemm.n;  // in two parts
  const double nbytes = (double)(gemm.m + gemm.n + again) * (double)(gemm.k * gemm.batch) *
                        (double)DtypeNbytes(gemm.dtype);
  Config config =
      Estimated(time, {rows, cols, PanelsOf(gemm), gemm.batch, nbytes}, multiprocessors, index);
  config.us += PackUs(gemm, index);
  return config;
}

// True where the tiling has room in shared memory for the side of a tile, which float32 needs not.
template <size_t... k>
bool HasRoomForSide(int tiling, std::index_sequence<k...>) {
  using std::tuple_element_t;
  constexpr bool kHas[] = {tuple_element_t<k, Tilings>::kTileN <=
                           tuple_element_t<k, Tilings>::kStagingN...};
  return kHas[tiling];
}
// True where there is room for slopes beside results.
template <size_t... k>
bool HasRoomForSlopes(int tiling, std::index_sequence<k...>) {
  constexpr bool kHas[] = {std::tuple_element_t<k, Tilings>::kHasSlopes...};
  return kHas[tiling];
}
template <size_t... k>
bool MakesSums(int tiling, std::index_sequence<k...>) {
  constexpr bool kDoes[] = {std::tuple_element_t<k, Tilings>::kMakesSums...};
  return kDoes[tiling];
}

bool HasKernel(const HopperGemm& gemm, int tiling) {
  constexpr std::make_index_sequence<kHopperTilings> kAll;
  const bool narrow = gemm.dtype != DL_FLOAT32;
  if (IsFitted(tiling)) {
    const Roles roles = RolesOf(gemm, tiling);
    const bool sums_of_turned =
        HopperMakesSums(gemm) && gemm.sums_of_a == IsOfColumns(gemm, tiling);
    return !narrow && gemm.split == kCosts[tiling].exact && roles.a_across && roles.b_across &&
           !sums_of_turned;
  }
  if (narrow && HopperMakesSums(gemm) && !MakesSums(tiling, kAll)) return false;
  if (narrow && gemm.gradient && !AddsSide(gemm.gradient) && !HasRoomForSide(tiling, kAll))
    return false;
  if ((gemm.slope || gemm.quantized) && !HasRoomForSlopes(tiling, kAll)) return false;
  if (gemm.split) return kCosts[tiling].exact;
  return ReadsAcross(gemm) ? kCosts[tiling].across_us > 0 : kCosts[tiling].plain;
}

}  // namespace

Config hopper::BestConfig(const HopperGemm& gemm, int tiling) {
  const int multiprocessors = Multiprocessors(gemm.ctx.device_id);
  if (tiling >= 0) return EstimatedOf(gemm, tiling, multiprocessors);
  Config best{0, 0, 0, INFINITY};
  for (int k = 0; k < kHopperTilings; k++) {
    if (!HasKernel(gemm, k)) continue;
    const Config other = EstimatedOf(gemm, k, multiprocessors);
    if (other.us < best.us) best = other;
  }
  return best;
}

const char* HopperDeviceError(int device) { return WgmmaError(device); }

const char* HopperError(const HopperGemm& gemm) {
  constexpr int64_t kMost = int64_t(1) << 30;
  const char* error = HopperDeviceError(gemm.ctx.device_id);
  if (*error) return error;
  if (std::max({gemm.m, gemm.n, gemm.k, gemm.batch}) > kMost)
    return "it takes at most 2^30 rows and columns";
  if (gemm.split && gemm.batch > 1) return "in 3xtf32 it takes one product at a time";
  if (!HopperHasFunction(gemm)) return "it has no code for this activation";
  return "";
}

void RunHopperGemm(const char* op, const HopperGemm& gemm, DLStream stream, int tiling) {
  if (gemm.m == 0 || gemm.n == 0 || gemm.batch == 0) return;  // a tensor map has no empty extents
  if (gemm.split) return RunInParts(op, gemm, stream, tiling);
  if (gemm.dtype == DL_FLOAT32) return RunOf<float>(op, gemm, stream, tiling);
  if (gemm.dtype == DL_BFLOAT16) return RunOf<bfloat16>(op, gemm, stream, tiling);
  RunOf<float16>(op, gemm, stream, tiling);
}

double HopperEstimateUs(const HopperGemm& gemm) { return kLaunchUs + BestConfig(gemm, -1).us; }

bool HopperMakesSums(const HopperGemm& gemm) {
  const bool summed =
      gemm.sums && !gemm.split && gemm.m > 0 && gemm.n > 0 && gemm.k > 0 && gemm.batch == 1;
  if (!summed) return false;
  const Roles roles = RolesOf(gemm);
  if (gemm.dtype != DL_FLOAT32) return gemm.sums_of_a && roles.a_across;
  if (gemm.sums_of_a ? roles.a_across : roles.b_across) return true;
  return gemm.sums_of_a ? roles.packs_a && IsTransposed(gemm, gemm.a, gemm.trans_a, gemm.m)
                        : roles.packs_b && IsTransposed(gemm, gemm.b, !gemm.trans_b, gemm.n);
}

bool HopperHasEpilogue(const HopperGemm& gemm) {
  return gemm.dtype != DL_FLOAT32 && HopperHasFunction(gemm);
}

bool HopperHasFunction(const HopperGemm& gemm) {
  if (gemm.split) return IsSimple(gemm);
  const bool is_fast =
      gemm.activation >= ActivationCode::kSilu && gemm.activation <= ActivationCode::kGeluTanh;
  return (is_fast || gemm.activation <= ActivationCode::kSigmoid) &&
         (HasSimpleGradient(gemm) || gemm.gradient <= GradientCode::kGeluTanhGradient);
}

bool HopperFits(const HopperGemm& gemm, int tiling) { return HasKernel(gemm, tiling); }

std::vector<std::string> HopperTilings() {
  std::vector<std::string> names;
  for (const TilingCost& cost : kCosts) names.push_back(cost.name);
  return names;
}

}  // namespace cuda
}  // namespace dlsys
