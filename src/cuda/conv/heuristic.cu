// The heuristic of convolution: which algorithm runs one where nobody names any. The candidates of
// `auto` and of the rung `implicit` that are accurate enough for the precision are ranked by the
// roofline estimates of cost.h, and the first that can compute the convolution runs. conv.cuh has
// the contract. It launches nothing itself.
#include <algorithm>
#include <cstring>

#include "cuda/conv/channels_last/hopper.cuh"
#include "cuda/conv/conv.cuh"
#include "cuda/conv/cost.h"
#include "operators/conv_accuracy.h"

namespace dlsys {
namespace cuda {
namespace {

// The library that an algorithm's estimate assumes. DLSYS_BLAS=own grants none.
enum class Needs { kNothing, kCublas, kCufft, kCudnn };

struct Candidate {
  const ConvAlgorithm* algorithm;
  const char* variant;  // by name, or null for the algorithm's own heuristic
  double (*us)(const ConvWork&);
  Needs needs = Needs::kNothing;
};

// The dense convolution may be one by wgmma.
double CompactOrWgmmaUs(const ConvWork& work) {
  const double by_wgmma = channels_last::PlanesUs(CompactOf(work));
  return std::min(CompactUs(work), CompactCopyUs(work) + by_wgmma);
}

const Candidate kImplicitKernels[] = {{&kImplicitGemm, nullptr, FmaUs},
                                      {&kTensorCores, nullptr, MmaUs},
                                      {&kWgmma, nullptr, channels_last::PlanesUs},
                                      {&kCompact, nullptr, CompactOrWgmmaUs}};
const Candidate kBatched[] = {{&kPointwise, nullptr, BatchedUs, Needs::kCublas}};
const Candidate kDirect[] = {{&kDepthwise, nullptr, DepthwiseUs}};
const Candidate kOthers[] = {{&kWinograd, "2x2", Winograd2Us, Needs::kCublas},
                             {&kWinograd, "4x4", Winograd4Us, Needs::kCublas},
                             {&kIm2col, nullptr, Im2colUs, Needs::kCublas},
                             {&kFft, nullptr, FftUs, Needs::kCufft},
                             {&kCudnn, "precomputed_gemm", CudnnGemmUs, Needs::kCudnn},
                             {&kCudnn, "winograd_in_parts", CudnnWinogradUs, Needs::kCudnn},
                             {&kCudnn, "fft", CudnnFftUs, Needs::kCudnn},
                             {&kCudnn, "tiled_fft", CudnnTiledFftUs, Needs::kCudnn}};

// us of an implicit GEMM from which on another algorithm may be worth a library that is loaded, or
// the errors of Winograd and FFT.
constexpr double kShortUs = 20;

int VariantOf(const Candidate& candidate, Pass pass) {
  if (!candidate.variant) return kHeuristic;
  const std::vector<std::string> names = candidate.algorithm->variants(pass);
  const auto found = std::find(names.begin(), names.end(), candidate.variant);
  return found == names.end() ? kHeuristic : (int)(found - names.begin());
}

std::string NameOf(const Candidate& candidate) {
  const std::string name = candidate.algorithm->name;
  return candidate.variant ? name + " " + candidate.variant : name;
}

template <size_t kCount>
void Append(const Candidate (&candidates)[kCount], const ConvCall& at, const ConvWork& work,
            std::vector<ConvEstimate>* ranking) {
  for (const Candidate& candidate : candidates) {
    if (RefusalOf(*candidate.algorithm, at, work.conv)) continue;
    if (!IsAccurate(NameOf(candidate), work.tf32)) continue;
    if (candidate.needs != Needs::kNothing && OwnGemmIsForced()) continue;
    if (candidate.needs == Needs::kCublas && *CublasError()) continue;
    const double us = candidate.us(work);
    if (us < kNever) ranking->push_back({candidate.algorithm, VariantOf(candidate, work.pass), us});
  }
}

}  // namespace

std::vector<ConvEstimate> RankConv(const ConvCall& at, const Conv& conv, Pass pass,
                                   bool implicit_alone) {
  const int device = at.ctx.device_id;
  const bool tf32 = at.precision == Precision::kTf32 && ComputeMajor(device) >= 8;
  const ConvWork work{conv, pass, tf32, Multiprocessors(device), device};
  std::vector<ConvEstimate> ranking;
  const auto sort = [&] {
    std::stable_sort(ranking.begin(), ranking.end(),
                     [](const ConvEstimate& a, const ConvEstimate& b) { return a.us < b.us; });
  };
  Append(kImplicitKernels, at, work, &ranking);
  sort();
  const bool is_short = ranking.front().us < kShortUs;
  if (!is_short) Append(kBatched, at, work, &ranking);
  if (!implicit_alone) Append(kDirect, at, work, &ranking);
  if (!implicit_alone && !is_short) Append(kOthers, at, work, &ranking);
  sort();
  return ranking;
}

}  // namespace cuda
}  // namespace dlsys
