// GEMM by wgmma and TMA, for sm_90a: what hopper/launch.cu does for the rest of the library. Arrays
// are contiguous and row-major; C overlaps nothing. hopper/kernel.cuh has the algorithm and what
// limits it.
#pragma once
#include <string>
#include <vector>

#include "cuda/runtime/context.cuh"

namespace dlsys {
namespace cuda {

// C (batch, m, n) = epilogue(op(A) op(B)), contiguous and row-major; op transposes where told to.
// All arrays but the epilogue's slopes are of one dtype: bfloat16, float16, or float32, of which
// the product is in tf32 or, with `split`, in 3xtf32. C overlaps nothing.
struct HopperGemm {
  const void* a;  // (batch, m, k), or (batch, k, m) with trans_a
  const void* b;  // (batch, k, n), or (batch, n, k) with trans_b
  void* c;
  int64_t m, n, k, batch;
  bool trans_a, trans_b;
  int dtype;
  bool split = false;
  DLContext ctx;
  const void *bias = nullptr, *side = nullptr;  // (n), and of C's shape
  int activation = 0, gradient = 0;             // codes of operators/epilogue.h
  // Of C's shape, where HopperHasEpilogue: C before its activation or, with `slope`, the derivative
  // of that, quantized to uint8; so is the side where it is `quantized`.
  void* before = nullptr;
  bool slope = false, quantized = false;
  float* sums = nullptr;  // over k of op(A), (m), or of op(B), (n), where HopperMakesSums
  bool sums_of_a = false;
};

// Why a device runs none, or "".
const char* HopperDeviceError(int device);
// Why a GEMM of k > 0 cannot run this way, or "".
const char* HopperError(const HopperGemm& gemm);
// Runs it; operands that TMA cannot read as they lie are copied first. `tiling` is an index of
// HopperTilings, -1 leaves it to the cost model.
void RunHopperGemm(const char* op, const HopperGemm& gemm, DLStream stream, int tiling = -1);
// True where it makes the sums that it is asked for: of float32 that does not lie along K, and of
// 16 bits those of an A that lies along M.
bool HopperMakesSums(const HopperGemm& gemm);
// True where it can store C before its activation too, or the derivative, and read the quantized
// one.
bool HopperHasEpilogue(const HopperGemm& gemm);
// True where it has code for the activation or gradient: relu and its gradient, and but for 3xtf32,
// whose results they are not exact enough for, the functions of fast_functions.cuh.
bool HopperHasFunction(const HopperGemm& gemm);
// Estimated time in microseconds, on an H200, of one that can.
double HopperEstimateUs(const HopperGemm& gemm);

constexpr int kHopperTilings = 6;
std::vector<std::string> HopperTilings();
bool HopperFits(const HopperGemm& gemm, int tiling);

}  // namespace cuda
}  // namespace dlsys
