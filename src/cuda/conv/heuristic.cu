// Which algorithm runs a convolution where nobody says so: the candidates of `auto` and of the rung
// `implicit`, by the cost model of cost.h. conv.cuh has the contract.
#include <algorithm>
#include <cstring>

#include "cuda/conv/conv.cuh"
#include "cuda/conv/cost.h"

namespace dlsys {
namespace cuda {
namespace {

struct Candidate {
  const ConvAlgorithm* algorithm;
  const char* variant;  // by name, or null for the algorithm's own heuristic
  double (*us)(const ConvWork&);
};

double Winograd2Us(const ConvWork& w) {
  return w.Is(Pass::kFilterGradient) ? WinogradUs(w, 2, {60, 5.0e7, 2.0e6})
                                     : WinogradUs(w, 2, {25, 4.0e7, 3.1e6});
}
double Winograd4Us(const ConvWork& w) {
  return w.Is(Pass::kFilterGradient) ? WinogradUs(w, 4, {36, 4.8e7, 1.0e6})
                                     : WinogradUs(w, 4, {24, 4.0e7, 3.3e6});
}
double CompactUs(const ConvWork& w) {
  const ConvWork dense = CompactOf(w);
  const double mma = w.tf32 ? MmaUs(dense) : kNever;
  return CompactCopyUs(w) + std::min({FmaUs(dense), BatchedUs(dense), mma});
}

const Candidate kParts[] = {{&kImplicitGemm, nullptr, FmaUs},
                            {&kTensorCores, nullptr, MmaUs},
                            {&kPointwise, nullptr, BatchedUs},
                            {&kCompact, nullptr, CompactUs}};
const Candidate kOthers[] = {{&kDepthwise, nullptr, DepthwiseUs},
                             {&kWinograd, "2x2", Winograd2Us},
                             {&kWinograd, "4x4", Winograd4Us},
                             {&kIm2col, nullptr, Im2colUs},
                             {&kCudnn, nullptr, CudnnUs}};

int VariantOf(const Candidate& candidate, Pass pass) {
  if (!candidate.variant) return kHeuristic;
  const std::vector<std::string> names = candidate.algorithm->variants(pass);
  const auto found = std::find(names.begin(), names.end(), candidate.variant);
  return found == names.end() ? kHeuristic : (int)(found - names.begin());
}

template <size_t kCount>
void Append(const Candidate (&candidates)[kCount], const ConvCall& at, const ConvWork& work,
            std::vector<ConvEstimate>* ranking) {
  for (const Candidate& candidate : candidates) {
    if (candidate.algorithm == &kCudnn && OwnGemmIsForced()) continue;
    if (RefusalOf(*candidate.algorithm, at, work.conv)) continue;
    ranking->push_back({candidate.algorithm, VariantOf(candidate, work.pass), candidate.us(work)});
  }
}

}  // namespace

std::vector<ConvEstimate> RankConv(const ConvCall& at, const Conv& conv, Pass pass,
                                   bool implicit_alone) {
  const int device = at.ctx.device_id;
  const bool tf32 = at.precision == Precision::kTf32 && ComputeMajor(device) >= 8;
  const ConvWork work{conv, pass, tf32, Multiprocessors(device)};
  std::vector<ConvEstimate> ranking;
  Append(kParts, at, work, &ranking);
  if (!implicit_alone) Append(kOthers, at, work, &ranking);
  std::stable_sort(ranking.begin(), ranking.end(),
                   [](const ConvEstimate& a, const ConvEstimate& b) { return a.us < b.us; });
  return ranking;
}

}  // namespace cuda
}  // namespace dlsys
