// GEMM on the GPU: one description of a problem, C = epilogue(op(A) op(B)), for the tiled kernels
// of this library, cuBLAS and cuBLASLt; the contract of the ladder's rungs; and the functions that
// run them. Matrices are row-major and contiguous, C overlaps nothing that is read. In the order of
// reading, rungs/ first: naive.cu, tiled.cu, register.cu, tile.cuh and kernel.cuh (rungs/warp.cu,
// tensor.cu), slim.cu, ffma.cuh, hopper/hopper.cu, rungs/cublas.cu, then heuristic.cu, which picks
// one, and ladder.cu. Each file names what limits it.
#pragma once
#include <memory>

#include "cuda/runtime/context.cuh"

namespace dlsys {
namespace cuda {

// k3xTf32 multiplies on tensor cores with errors like float32's: see tile.cuh. Kernels that have no
// such form compute it in float32.
enum class Precision { kFp32 = 0, kTf32 = 1, k3xTf32 = 2 };

// What becomes of element x of op(A) op(B) at (i, j) before it is stored: activation(x + bias[j]),
// or gradient(side[i, j], x + bias[j]). Activations and gradients are codes of
// operators/epilogue.h; a side that is added may be C, each element of which is read before it is
// stored.
struct Epilogue {
  const float* bias = nullptr;  // (n)
  const float* side = nullptr;  // (m, n)
  int activation = 0;
  int gradient = 0;
  // (m, n): where x + bias goes as well or, with `slope`, the derivative of the activation there,
  // quantized to uint8.
  float* before = nullptr;
  bool slope = false;
  bool quantized = false;  // the side is uint8
  bool Empty() const { return !bias && !activation && !gradient; }
};

// The operand that is uint8, dequantized by one scale. Only tensor cores take one.
enum class U8Operand { kNone, kA, kB };

// C (m, n) = op(A) (m, k) op(B) (k, n), contiguous, row-major; op transposes where told to. C
// overlaps nothing that is read but a side that is added. Of float32, where an operand may be
// uint8; or all of one type of 16 bits, and then a, b, c, bias and side are addresses alone.
struct Gemm {
  const float* a;  // (m, k), or (k, m) with trans_a; the address where uint8
  const float* b;  // (k, n), or (n, k) with trans_b
  float* c;        // (m, n)
  int64_t m, n, k;
  bool trans_a, trans_b;
  DLContext ctx;
  Precision precision = Precision::kFp32;
  Epilogue epilogue = {};
  // The sums over k of op(A), (m), or of op(B), (n), in true float32; or null.
  float* sums = nullptr;
  bool sums_of_a = false;
  U8Operand u8 = U8Operand::kNone;
  const float* scale = nullptr;  // one float on the device: what a uint8 element is multiplied by
  int dtype = DL_FLOAT32;        // or DL_BFLOAT16 or DL_FLOAT16
  bool IsNarrow() const { return dtype != DL_FLOAT32; }
};

// op(A) or op(B): element (mn, k), a row of op(A) or a column of op(B), is at mn * of_mn + k *
// of_k.
struct Operand {
  const float* data;
  int64_t of_mn, of_k;
};
inline __host__ __device__ Operand OperandA(const Gemm& p) {
  return {p.a, p.trans_a ? 1 : p.k, p.trans_a ? p.m : 1};
}
inline __host__ __device__ Operand OperandB(const Gemm& p) {
  return {p.b, p.trans_b ? p.k : 1, p.trans_b ? 1 : p.n};
}

// Makes the GPU of the arrays current and checks dtypes and shapes; `dtype` is that of floats.
Gemm CheckedGemm(const char* op, const DLArray* a, int64_t trans_a, const DLArray* b,
                 int64_t trans_b, DLArray* c, U8Operand u8 = U8Operand::kNone,
                 const DLArray* scale = nullptr, int dtype = DL_FLOAT32);
// Gives the epilogue a bias (n).
void SetBias(const char* op, const DLArray* bias, const DLArray* y, Gemm* gemm);
// Dequantizes a uint8 operand into scratch where the kernels that will run take none.
class Dequantized {
 public:
  Dequantized(const char* op, Gemm* gemm, DLStream stream);

 private:
  std::unique_ptr<Scratch> floats_;
};

// n elements of a dtype of 16 bits in float32, and back.
void Widen(const char* op, int dtype, const void* x, float* y, int64_t n, DLStream stream);
void Narrow(const char* op, int dtype, const float* x, void* y, int64_t n, DLStream stream);

// A GEMM of 16 bits through one of float32: its arrays, operands only where told to, in scratch
// memory. Products of such floats are exact at tf32, which `get` therefore asks for.
class InFloat32 {
 public:
  InFloat32(const char* op, const Gemm& narrow, DLStream stream, bool operands = true);
  const Gemm& get() const { return wide_; }
  void StoreResult() const;  // rounds C to its own type

 private:
  float* Floats(int64_t numel);
  const float* Copied(const float* narrow, int64_t numel);
  const char* op_;
  const Gemm& narrow_;
  Gemm wide_;
  DLStream stream_;
  std::vector<std::unique_ptr<Scratch>> scratch_;
};

Precision CheckedPrecision(const char* op, int64_t precision);

constexpr int kHeuristic = -1;  // the variant of a rung by its own heuristic

// A rung of the ladder, a family of kernels that users name; docs/learn/gemm.md shows them. Each
// computes all of a Gemm that it does not refuse, with epilogue and operand sums.
struct GemmRung {
  const char* name;
  std::vector<std::string> (*variants)();  // its tiles and splits, or null
  const char* (*source)();                 // as in registry.h, or null
  const char* (*refusal)(const Gemm&);     // why it cannot compute a Gemm, or null where it can
  bool (*fits)(const Gemm&, int variant);  // whether a variant can, or null where all can
  void (*run)(const char* op, const Gemm&, int variant, DLStream);
  bool narrow = false;  // takes floats of 16 bits; others get them in float32
};
extern const GemmRung kNaive;     // a thread an element
extern const GemmRung kTiled;     // tiles in shared memory
extern const GemmRung kRegister;  // and tiles in registers
extern const GemmRung kWarp;      // FFMA, warp tiles, asynchronous copies, split-K
extern const GemmRung kTensor;    // mma.sync, the same otherwise
extern const GemmRung kHopper;    // wgmma, TMA
extern const GemmRung kCublas;    // cuBLAS and cuBLASLt

// Runs the GEMM by an algorithm of GemmAlgorithms, counted from 1: a rung by its heuristic, or one
// of its variants. 0 asks the heuristic: a tiled kernel, or cuBLAS where it is usable, estimated to
// be faster, and DLSYS_BLAS is not "own". Of 16 bits the rung `hopper` stores what the activation
// is applied to as well, where it can; elsewhere the activation is a kernel behind the product.
void RunGemm(const char* op, const Gemm& gemm, DLStream stream, int64_t algorithm = 0);
const std::vector<Algorithm>& GemmAlgorithms();

// `count` GEMMs of one shape, whose operands and results lie one behind the other from those of
// `first` on, but for an A that all share; no epilogue, no sums.
struct BatchedGemm {
  Gemm first;
  int64_t count;
  bool shares_a = false;
};
// By the kernels of this library, or by cuBLAS where it is usable, estimated to be faster, and
// DLSYS_BLAS is not "own".
void RunBatchedGemm(const char* op, const BatchedGemm& batch, DLStream stream);

void RunGemmByHeuristic(const char* op, const Gemm& gemm, DLStream stream);
double HopperUs(const Gemm& gemm);  // estimated on an H200; infinite where the rung refuses
bool HasEpilogueOnHopper(const Gemm& gemm);  // which stores two or reads slopes, of 16 bits
bool MakesSumsOnHopper(const Gemm& gemm);    // beside the product
// y = activation(x) of n elements of 16 bits; the derivative of the activation there, quantized.
void RunActivation(const char* op, int dtype, int activation, const void* x, void* y, int64_t n,
                   DLStream stream);
void RunSlope(const char* op, int dtype, int activation, const void* x, uint8_t* slopes, int64_t n,
              DLStream stream);
// y = slopes as they are, as floats of a dtype.
void WidenSlopes(const char* op, int dtype, const uint8_t* slopes, void* y, int64_t n,
                 DLStream stream);
// `count` GEMMs whose operands and results lie one behind the other, by the rung `hopper`; false,
// and nothing done, where it cannot.
bool RunBatchOnHopper(const char* op, const Gemm& first, int64_t count, DLStream stream);
void RunOwnGemm(const char* op, const Gemm& gemm, DLStream stream);
// Applies the epilogue to C, but for a side that is added, and makes the operand sums, for kernels
// that do neither. The side is in C already.
void RunEpilogueAndSums(const char* op, const Gemm& gemm, DLStream stream);
void RunOperandSums(const char* op, const Gemm& gemm, DLStream stream);
bool OwnGemmIsForced();  // by DLSYS_BLAS=own
// A refusal, as in GemmRung, of kernels that take no uint8.
inline const char* RefusalOfU8(const Gemm& p) {
  return p.u8 == U8Operand::kNone ? nullptr : "it takes no uint8";
}

// cuBLAS: of the epilogue a side that is added, no operand sums; of 16 bits with C in `c_dtype`,
// that of the operands or float32. CublasError is why it is unusable, or "".
const char* CublasError();
const char* CublasSource();  // as in registry.h
void RunCublasGemm(const char* op, const Gemm& gemm, DLStream stream, int c_dtype = DL_FLOAT32);
void RunCublasBatchedGemm(const char* op, const BatchedGemm& batch, DLStream stream);
// One of 16 bits, with its epilogue.
void RunNarrowCublasGemm(const char* op, const Gemm& gemm, DLStream stream);

// cuBLASLt: the same, of float32, and no empty arrays. Its heuristic proposes up to kLtProposals
// algorithms.
constexpr int kLtProposals = 6;
const char* CublasLtSource();
void RunCublasLtGemm(const char* op, const Gemm& gemm, int index, DLStream stream);

}  // namespace cuda
}  // namespace dlsys
