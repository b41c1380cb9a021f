// The rung `cublas`: GEMM through cuBLAS, in true float32 or at tf32. The library is loaded with
// dlopen by soname when first needed, and the few functions used are declared here. Its workspace
// is set explicitly, which makes results independent of other streams. gemm.cuh has the contract.
// Large shapes are limited by FFMA or mma issue, small ones by the launch.
#include "cuda/gemm/gemm.cuh"
#include "cuda/runtime/dlopen.cuh"
#include "operators/epilogue.h"

namespace dlsys {
namespace cuda {
namespace {

using Handle = struct CublasContext*;
using Status = int;
constexpr Status kAllocFailed = 3;  // CUBLAS_STATUS_ALLOC_FAILED
constexpr int kNoTranspose = 0;     // CUBLAS_OP_N
constexpr int kTranspose = 1;       // CUBLAS_OP_T
constexpr int kDefaultMath = 0;     // CUBLAS_DEFAULT_MATH
constexpr int kTf32Math = 3;        // CUBLAS_TF32_TENSOR_OP_MATH
constexpr int kExactSums = 16;      // CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION
constexpr int kCompute32F = 68;     // CUBLAS_COMPUTE_32F
constexpr int kDefaultGemm = -1;    // CUBLAS_GEMM_DEFAULT

// The cudaDataType of a dtype.
int DataType(int dtype) { return dtype == DL_BFLOAT16 ? 14 : dtype == DL_FLOAT16 ? 2 : 0; }

struct Library {
  Status (*create)(Handle*) = nullptr;
  Status (*set_stream)(Handle, cudaStream_t) = nullptr;
  Status (*set_workspace)(Handle, void*, size_t) = nullptr;
  Status (*set_math_mode)(Handle, int) = nullptr;
  Status (*sgemm)(Handle, int trans_a, int trans_b, int64_t m, int64_t n, int64_t k,
                  const float* alpha, const float* a, int64_t lda, const float* b, int64_t ldb,
                  const float* beta, float* c, int64_t ldc) = nullptr;
  Status (*sgemm_batched)(Handle, int trans_a, int trans_b, int64_t m, int64_t n, int64_t k,
                          const float* alpha, const float* a, int64_t lda, int64_t of_a,
                          const float* b, int64_t ldb, int64_t of_b, const float* beta, float* c,
                          int64_t ldc, int64_t of_c, int64_t count) = nullptr;
  Status (*gemm_ex)(Handle, int trans_a, int trans_b, int64_t m, int64_t n, int64_t k,
                    const void* alpha, const void* a, int a_type, int64_t lda, const void* b,
                    int b_type, int64_t ldb, const void* beta, void* c, int c_type, int64_t ldc,
                    int compute_type, int algorithm) = nullptr;
  const char* (*text)(Status) = nullptr;
  Status (*property)(int which, int*) = nullptr;
  std::string error;  // why it cannot be used, or ""
  std::string name;   // and its version
};

// The runtime's own major version first: the driver is known to be new enough for it.
std::vector<std::string> Sonames() {
  if (CUDART_VERSION / 1000 == 12) return {"libcublas.so.12", "libcublas.so.13"};
  return {"libcublas.so.13", "libcublas.so.12"};
}

Library Open() {
  Library cublas;
  void* library = OpenLibrary(Sonames(), &cublas.error);
  if (!library) return cublas;
  Find(library, "cublasCreate_v2", &cublas.create, &cublas.error);
  Find(library, "cublasSetStream_v2", &cublas.set_stream, &cublas.error);
  Find(library, "cublasSetWorkspace_v2", &cublas.set_workspace, &cublas.error);
  Find(library, "cublasSetMathMode", &cublas.set_math_mode, &cublas.error);
  Find(library, "cublasSgemm_v2_64", &cublas.sgemm, &cublas.error);
  Find(library, "cublasSgemmStridedBatched_64", &cublas.sgemm_batched, &cublas.error);
  Find(library, "cublasGemmEx_64", &cublas.gemm_ex, &cublas.error);
  Find(library, "cublasGetStatusString", &cublas.text, &cublas.error);
  Find(library, "cublasGetProperty", &cublas.property, &cublas.error);
  if (cublas.error.empty()) cublas.name = "cuBLAS " + VersionText(cublas.property);
  return cublas;
}

const Library& Cublas() {
  static const Library* const library = new Library(Open());
  return *library;
}

void CheckCublas(const char* op, Status status) {
  if (status == 0) return;
  CheckFault(op);
  FailWith(status == kAllocFailed ? DL_OUT_OF_MEMORY : DL_ERROR,
           "%s: cuBLAS error %d, %s; DLSYS_BLAS=own uses the built-in kernel instead", op, status,
           Cublas().text(status));
}

Handle MakeHandle(const char* op) {
  Handle handle = nullptr;
  CheckCublas(op, Cublas().create(&handle));
  return handle;
}

// The size that cuBLAS documents for its own workspace: more from Hopper on.
int64_t WorkspaceNbytes(int device) { return int64_t(ComputeMajor(device) >= 9 ? 32 : 4) << 20; }

}  // namespace

const char* CublasError() { return Cublas().error.c_str(); }

const char* CublasSource() {
  if (*CublasError())
    FailWith(DL_UNAVAILABLE,
             "cuBLAS cannot be used (%s): install nvidia-cublas, or name its folder in "
             "DLSYS_CUDA_LIBRARY_PATH",
             CublasError());
  return Cublas().name.c_str();
}

// Prepares a handle for products of p's precision, with a workspace, and runs `work(handle)`. In
// this order: a new stream resets the workspace. One of our own makes results independent of other
// streams.
template <class Work>
static void WithHandle(const char* op, const Gemm& p, DLStream stream, Work&& work) {
  const Library& cublas = Cublas();
  const BorrowedHandle<Handle> handle(op, p.ctx.device_id, MakeHandle);
  const int64_t workspace_nbytes = WorkspaceNbytes(p.ctx.device_id);
  const Scratch workspace(p.ctx, workspace_nbytes, stream);
  if (Workspace::Querying()) return;
  CheckCublas(op, cublas.set_stream(handle.get(), Native(stream)));
  CheckCublas(op, cublas.set_workspace(handle.get(), workspace.data(), (size_t)workspace_nbytes));
  const bool tf32 = p.precision == Precision::kTf32;
  const int mode = p.IsNarrow() ? kExactSums : tf32 ? kTf32Math : kDefaultMath;
  CheckCublas(op, cublas.set_math_mode(handle.get(), mode));
  CheckCublas(op, work(handle.get()));
}

static int Transposed(bool transposed) { return transposed ? kTranspose : kNoTranspose; }

// A row-major matrix is its transpose in column-major cuBLAS: C^T = op(B)^T op(A)^T. A side that is
// added is what C has before.
void RunCublasGemm(const char* op, const Gemm& p, DLStream stream, int c_dtype) {
  if (p.m == 0 || p.n == 0) return;
  const bool adds = AddsSide(p.epilogue.gradient);
  const size_t nbytes = (size_t)(p.m * p.n * DtypeNbytes(c_dtype));
  if (adds && p.epilogue.side != p.c && !Workspace::Querying())
    Check(op,
          cudaMemcpyAsync(p.c, p.epilogue.side, nbytes, cudaMemcpyDeviceToDevice, Native(stream)));
  if (p.k == 0) {
    if (adds || Workspace::Querying()) return;
    Check(op, cudaMemsetAsync(p.c, 0, nbytes, Native(stream)));
    return;
  }
  WithHandle(op, p, stream, [&](Handle handle) {
    const float one = 1.f, beta = adds ? 1.f : 0.f;
    const int64_t row_a = p.trans_a ? p.m : p.k, row_b = p.trans_b ? p.k : p.n;
    const int trans_a = Transposed(p.trans_a), trans_b = Transposed(p.trans_b);
    if (!p.IsNarrow())
      return Cublas().sgemm(handle, trans_b, trans_a, p.n, p.m, p.k, &one, p.b, row_b, p.a, row_a,
                            &beta, p.c, p.n);
    const int type = DataType(p.dtype);
    return Cublas().gemm_ex(handle, trans_b, trans_a, p.n, p.m, p.k, &one, p.b, type, row_b, p.a,
                            type, row_a, &beta, p.c, DataType(c_dtype), p.n, kCompute32F,
                            kDefaultGemm);
  });
}

void RunNarrowCublasGemm(const char* op, const Gemm& p, DLStream stream) {
  if (p.epilogue.Empty()) {
    RunCublasGemm(op, p, stream, p.dtype);
    return RunEpilogueAndSums(op, p, stream);
  }
  const InFloat32 result(op, p, stream, /*operands=*/false);
  RunCublasGemm(op, result.get(), stream);
  RunEpilogueAndSums(op, result.get(), stream);
  result.StoreResult();
}

void RunCublasBatchedGemm(const char* op, const BatchedGemm& batch, DLStream stream) {
  const Gemm& p = batch.first;
  WithHandle(op, p, stream, [&](Handle handle) {
    const float one = 1.f, zero = 0.f;
    return Cublas().sgemm_batched(handle, Transposed(p.trans_b), Transposed(p.trans_a), p.n, p.m,
                                  p.k, &one, p.b, p.trans_b ? p.k : p.n, p.n * p.k, p.a,
                                  p.trans_a ? p.m : p.k, batch.shares_a ? 0 : p.m * p.k, &zero, p.c,
                                  p.n, p.m * p.n, batch.count);
  });
}

namespace {

const char* Refusal(const Gemm& p) {
  if (OwnGemmIsForced()) return "DLSYS_BLAS=own forbids it";
  return RefusalOfU8(p);
}

std::vector<std::string> Variants() {
  std::vector<std::string> names = {"sgemm"};
  for (int k = 1; k <= kLtProposals; k++) names.push_back("lt " + std::to_string(k));
  return names;
}

bool Fits(const Gemm& p, int variant) {
  return variant == 0 || (p.m && p.n && p.k && !p.IsNarrow());
}

void Run(const char* op, const Gemm& p, int variant, DLStream stream) {
  CublasSource();
  if (p.IsNarrow()) return RunNarrowCublasGemm(op, p, stream);
  if (variant > 0)
    RunCublasLtGemm(op, p, variant - 1, stream);
  else
    RunCublasGemm(op, p, stream);
  RunEpilogueAndSums(op, p, stream);
}

void MatmulCublas(const DLArray* a, int64_t trans_a, const DLArray* b, int64_t trans_b, DLArray* c,
                  DLStream stream) {
  const Gemm gemm = CheckedGemm("matmul_cublas", a, trans_a, b, trans_b, c);
  if (!Cublas().error.empty())
    FailWith(
        DL_UNAVAILABLE,
        "matmul_cublas: cuBLAS cannot be used (%s): install nvidia-cublas, or name its folder in "
        "DLSYS_CUDA_LIBRARY_PATH, or use matmul_own",
        Cublas().error.c_str());
  RunCublasGemm("matmul_cublas", gemm, stream);
}

DLSYS_KERNEL(cuda, matmul_cublas, MatmulCublas);

}  // namespace

const GemmRung kCublas = {"cublas", Variants, CublasSource, Refusal, Fits, Run, true};

}  // namespace cuda
}  // namespace dlsys
