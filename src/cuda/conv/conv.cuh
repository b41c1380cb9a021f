// The convolution algorithms of the GPU and their common interface. Arrays are float32, NCHW
// (filters O, C / groups, H, W), contiguous, and overlap nowhere. Each algorithm has a forward
// pass, a data gradient and a filter gradient; its file in rungs/ names what limits it. In the
// order of reading: naive.cu, im2col.cu, implicit_gemm.cu, tf32.cu, wgmma.cu, depthwise.cu,
// winograd.cu, fft.cu, cudnn.cu; heuristic.cu ranks them, conv.cu is the ladder.
#pragma once
#include <string>
#include <vector>

#include "cuda/conv/cost.h"
#include "cuda/gemm/gemm.cuh"
#include "operators/conv_geometry.h"

namespace dlsys {
namespace cuda {

// One call: the operator's name for messages, device and stream, precision, and the variant of the
// algorithm (its tile shape). A variant that cannot do a convolution fails with DL_NOT_APPLICABLE;
// with kHeuristic the algorithm picks one that can.
struct ConvCall {
  const char* op;
  DLContext ctx;
  DLStream stream;
  Precision precision;
  int variant = kHeuristic;
};

// A rung of the ladder, or a kernel of one with tiles of its own: docs/learn/conv.md shows them.
// Every function writes all of its result; bias may be null. No function is called for empty
// results.
struct ConvAlgorithm {
  const char* name;
  std::vector<std::string> (*variants)(Pass pass);  // or null
  const char* (*source)();                          // as in registry.h, or null
  const char* (*refusal)(const ConvCall& at,
                         const Conv& conv);  // why it cannot; null: it always can
  void (*forward)(const ConvCall& at, const Conv& conv, const float* x, const float* f,
                  const float* bias, float* y);
  void (*data_gradient)(const ConvCall& at, const Conv& conv, const float* f, const float* dy,
                        float* dx);
  void (*filter_gradient)(const ConvCall& at, const Conv& conv, const float* x, const float* dy,
                          float* df);
};

extern const ConvAlgorithm kNaiveConv;     // a thread an element
extern const ConvAlgorithm kIm2col;        // the column matrix in scratch, and a GEMM
extern const ConvAlgorithm kWinograd;      // F(2x2, 3x3) and F(4x4, 3x3)
extern const ConvAlgorithm kFft;           // products of spectra, by cuFFT
extern const ConvAlgorithm kImplicit;      // implicit GEMM: the best of the next five
extern const ConvAlgorithm kCompact;       // of a strided 1 x 1 filter, dense
extern const ConvAlgorithm kPointwise;     // of a dense 1 x 1 filter, batched GEMM
extern const ConvAlgorithm kImplicitGemm;  // by FFMA
extern const ConvAlgorithm kTensorCores;   // by mma, at tf32
extern const ConvAlgorithm kWgmma;         // by wgmma, at tf32, of images that are moved
extern const ConvAlgorithm kDepthwise;     // direct, one channel per group
extern const ConvAlgorithm kCudnn;

inline const char* RefusalOf(const ConvAlgorithm& algorithm, const ConvCall& at, const Conv& conv) {
  return algorithm.refusal ? algorithm.refusal(at, conv) : nullptr;
}

// An algorithm by one of its variants, and how long the cost model expects it to take.
struct ConvEstimate {
  const ConvAlgorithm* algorithm;
  int variant;
  double us;
};
// Those that can compute a convolution that sums anything, the fastest first; or the kernels of
// `implicit` alone. Each may still lack its library or fail with DL_NOT_APPLICABLE.
std::vector<ConvEstimate> RankConv(const ConvCall& at, const Conv& conv, Pass pass,
                                   bool implicit_alone = false);

// Calls run(algorithm, at), with the algorithm's variant in `at`, for the first of a ranking that
// computes the convolution.
template <class Run>
void RunFirst(const std::vector<ConvEstimate>& ranking, ConvCall at, Run&& run) {
  for (const ConvEstimate& estimate : ranking) {
    at.variant = estimate.variant;
    try {
      return run(*estimate.algorithm, at);
    } catch (const Error& error) {
      if (error.status != DL_NOT_APPLICABLE && error.status != DL_UNAVAILABLE) throw;
      if (&estimate == &ranking.back()) throw;
    }
  }
}

// The bytes of scratch that a convolution may take: DLSYS_CONV_WORKSPACE, in MiB.
int64_t ConvWorkspaceLimit();

// As many of `count` images as a scratch of `nbytes` each leaves room for beside `fixed` bytes.
// Where that is none it fails with DL_NOT_APPLICABLE.
int64_t ImagesAtOnce(const ConvCall& at, const char* rung, int64_t count, int64_t nbytes,
                     int64_t fixed);

// The name of a variant.
inline std::string TileName(int rows, int cols) {
  return std::to_string(rows) + "x" + std::to_string(cols);
}

}  // namespace cuda
}  // namespace dlsys
