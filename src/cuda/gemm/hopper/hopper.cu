// The rung `hopper`: GEMM on the tensor cores of sm_90a by wgmma and TMA, at tf32 or 3xtf32, and of
// bfloat16 and float16. hopper/kernel.cuh has the algorithm and what limits it, hopper/launch.cu
// the launches.
#include <cmath>

#include "cuda/gemm/gemm.cuh"
#include "cuda/gemm/hopper/hopper.cuh"

namespace dlsys {
namespace cuda {
namespace {

HopperGemm ForHopper(const Gemm& p, int64_t batch = 1) {
  const bool split = !p.IsNarrow() && p.precision == Precision::k3xTf32;
  HopperGemm gemm = {p.a,   p.b,       p.c,       p.m,     p.n,   p.k,
                     batch, p.trans_a, p.trans_b, p.dtype, split, p.ctx};
  gemm.bias = p.epilogue.bias, gemm.side = p.epilogue.side;
  gemm.activation = p.epilogue.activation, gemm.gradient = p.epilogue.gradient;
  gemm.before = p.epilogue.before, gemm.slope = p.epilogue.slope;
  gemm.quantized = p.epilogue.quantized;
  gemm.sums = p.sums, gemm.sums_of_a = p.sums_of_a;
  return gemm;
}

// An activation that its kernels have no code for is applied behind the product, in float32.
bool IsInTwoSteps(const Gemm& p) { return !HopperHasFunction(ForHopper(p)); }
HopperGemm WithoutEpilogue(Gemm p) {
  p.epilogue = {};
  return ForHopper(p);
}
HopperGemm FirstStep(const Gemm& p) { return IsInTwoSteps(p) ? WithoutEpilogue(p) : ForHopper(p); }

const char* Refusal(const Gemm& p) {
  if (p.u8 != U8Operand::kNone) return RefusalOfU8(p);
  if (!p.IsNarrow() && p.precision == Precision::kFp32)
    return "it multiplies float32 at tf32 or 3xtf32, and the precision is fp32";
  const char* error = HopperError(FirstStep(p));
  return *error ? error : nullptr;
}

const char* Source() {
  int device = 0;
  Check("matmul", cudaGetDevice(&device));
  Use("matmul", device);
  const char* error = HopperDeviceError(device);
  if (*error) FailWith(DL_UNAVAILABLE, "matmul: algo=hopper cannot run here: %s", error);
  return "";
}

bool Fits(const Gemm& p, int variant) { return p.k > 0 && HopperFits(ForHopper(p), variant); }

void Run(const char* op, const Gemm& p, int variant, DLStream stream) {
  if (p.k == 0) return RunOwnGemm(op, p, stream);
  if (p.IsNarrow() && IsInTwoSteps(p)) {
    const InFloat32 floats(op, p, stream);
    Run(op, floats.get(), variant, stream);
    return floats.StoreResult();
  }
  RunHopperGemm(op, FirstStep(p), stream, variant);
  if (IsInTwoSteps(p)) {
    Gemm rest = p;
    if (HopperMakesSums(FirstStep(p))) rest.sums = nullptr;
    return RunEpilogueAndSums(op, rest, stream);
  }
  if (p.sums && !HopperMakesSums(ForHopper(p))) RunOperandSums(op, p, stream);
}

}  // namespace

double HopperUs(const Gemm& p) {
  constexpr double kKernelUs = 3.5, kNbytesUs = 3e6;  // of a separate epilogue
  const bool two_steps = !Refusal(p) && IsInTwoSteps(p);
  if (Refusal(p) || p.k == 0 || (two_steps && p.IsNarrow())) return INFINITY;
  const double nbytes = (p.epilogue.side ? 12. : 8.) * (double)p.m * (double)p.n;
  return HopperEstimateUs(FirstStep(p)) + (two_steps ? kKernelUs + nbytes / kNbytesUs : 0);
}

bool HasEpilogueOnHopper(const Gemm& p) {
  return p.k > 0 && !Refusal(p) && HopperHasEpilogue(ForHopper(p));
}

bool MakesSumsOnHopper(const Gemm& p) { return HopperMakesSums(ForHopper(p)); }

bool RunBatchOnHopper(const char* op, const Gemm& first, int64_t count, DLStream stream) {
  const HopperGemm gemm = ForHopper(first, count);
  if (first.k == 0 || Refusal(first) || *HopperError(gemm)) return false;
  RunHopperGemm(op, gemm, stream);
  return true;
}

const GemmRung kHopper = {"hopper", HopperTilings, Source, Refusal, Fits, Run, true};

}  // namespace cuda
}  // namespace dlsys
