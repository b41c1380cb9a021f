// GEMM through cuBLASLt, by one of the algorithms that its heuristic proposes for a shape; only
// where the caller (the autotuner) selects it. Loaded with dlopen; functions and constants are
// declared as in cublasLt.h. Of its split-K reductions only those through a workspace, in a fixed
// order, are allowed.
#include <algorithm>

#include "cuda/gemm/gemm.cuh"
#include "cuda/runtime/dlopen.cuh"
#include "operators/epilogue.h"

namespace dlsys {
namespace cuda {
namespace {

using Handle = struct CublasLtContext*;
using Status = int;
constexpr Status kNotSupported = 15;     // CUBLAS_STATUS_NOT_SUPPORTED
constexpr int kFloat = 0;                // CUDA_R_32F
constexpr int kComputeFloat = 68;        // CUBLAS_COMPUTE_32F
constexpr int kComputeTf32 = 77;         // CUBLAS_COMPUTE_32F_FAST_TF32
constexpr int kTransA = 3, kTransB = 4;  // CUBLASLT_MATMUL_DESC_TRANSA and TRANSB
constexpr int kWorkspace = 1;            // CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES
constexpr int kReductions = 3;           // CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK
constexpr int kAlignment = 5;  // CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES; B, C, D follow
constexpr uint32_t kFromWorkspace = 6;  // CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE and OUTPUT_TYPE
constexpr uint64_t kMostWorkspace = 32 << 20;

struct Algorithm {
  uint64_t words[8];
};
struct Proposal {
  Algorithm algorithm;
  size_t workspace_nbytes;
  Status status;
  float waves;
  int reserved[4];
};

struct Library {
  Status (*create)(Handle*) = nullptr;
  Status (*property)(int which, int*) = nullptr;
  Status (*create_product)(void**, int compute, int scale) = nullptr;
  Status (*set_product)(void*, int attribute, const void*, size_t) = nullptr;
  Status (*destroy_product)(void*) = nullptr;
  Status (*create_matrix)(void**, int type, uint64_t rows, uint64_t cols, int64_t pitch) = nullptr;
  Status (*destroy_matrix)(void*) = nullptr;
  Status (*create_preference)(void**) = nullptr;
  Status (*set_preference)(void*, int attribute, const void*, size_t) = nullptr;
  Status (*destroy_preference)(void*) = nullptr;
  Status (*propose)(Handle, void* gemm, void* a, void* b, void* c, void* d, void* preference,
                    int wanted, Proposal*, int* count) = nullptr;
  Status (*multiply)(Handle, void* gemm, const void* alpha, const void*, void* a, const void*,
                     void* b, const void* beta, const void*, void* c, void*, void* d,
                     const Algorithm*, void* workspace, size_t, cudaStream_t) = nullptr;
  std::string error;  // why it cannot be used, or ""
  std::string name;   // and its version
};

Library Open() {
  Library l;
  const bool older = CUDART_VERSION / 1000 == 12;
  void* library = older ? OpenLibrary({"libcublasLt.so.12", "libcublasLt.so.13"}, &l.error)
                        : OpenLibrary({"libcublasLt.so.13", "libcublasLt.so.12"}, &l.error);
  if (!library) return l;
  Find(library, "cublasLtCreate", &l.create, &l.error);
  Find(library, "cublasLtGetProperty", &l.property, &l.error);
  Find(library, "cublasLtMatmulDescCreate", &l.create_product, &l.error);
  Find(library, "cublasLtMatmulDescSetAttribute", &l.set_product, &l.error);
  Find(library, "cublasLtMatmulDescDestroy", &l.destroy_product, &l.error);
  Find(library, "cublasLtMatrixLayoutCreate", &l.create_matrix, &l.error);
  Find(library, "cublasLtMatrixLayoutDestroy", &l.destroy_matrix, &l.error);
  Find(library, "cublasLtMatmulPreferenceCreate", &l.create_preference, &l.error);
  Find(library, "cublasLtMatmulPreferenceSetAttribute", &l.set_preference, &l.error);
  Find(library, "cublasLtMatmulPreferenceDestroy", &l.destroy_preference, &l.error);
  Find(library, "cublasLtMatmulAlgoGetHeuristic", &l.propose, &l.error);
  Find(library, "cublasLtMatmul", &l.multiply, &l.error);
  if (l.error.empty()) l.name = "cuBLASLt " + VersionText(l.property);
  return l;
}

const Library& Lt() {
  static const Library* const library = new Library(Open());
  return *library;
}

constexpr const char* kName = "cublaslt";

void CheckLt(const char* op, Status status) {
  if (status == 0) return;
  if (status == kNotSupported) NotApplicable(op, kName);
  CheckFault(op);
  Fail("%s: cuBLASLt error %d", op, status);
}

Handle MakeHandle(const char* op) {
  Handle handle = nullptr;
  CheckLt(op, Lt().create(&handle));
  return handle;
}

// Alignment of an address, at most 256.
uint32_t AlignmentOf(const void* p) {
  const uintptr_t lowest = (uintptr_t)p & -(uintptr_t)p;
  return (uint32_t)std::min<uintptr_t>(lowest ? lowest : 256, 256);
}

// As in cublas.cu: C^T = op(B)^T op(A)^T in column-major; a side that is added is read from where
// it is.
class Call {
 public:
  Call(const char* op, const Gemm& p)
      : op_(op),
        p_(p),
        adds_(AddsSide(p.epilogue.gradient)),
        added_(adds_ ? p.epilogue.side : p.c),
        handle_(op, p.ctx.device_id, MakeHandle) {}
  ~Call() {
    if (preference_) Lt().destroy_preference(preference_);
    for (void* matrix : {first_, second_, out_})
      if (matrix) Lt().destroy_matrix(matrix);
    if (product_) Lt().destroy_product(product_);
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  void Run(int index, DLStream stream) {
    Describe();
    SetPreference();
    const Proposal proposal = Proposed(index);
    const Scratch workspace(p_.ctx, (int64_t)proposal.workspace_nbytes, stream);
    if (Workspace::Querying()) return;
    const float one = 1.f, beta = adds_ ? 1.f : 0.f;
    Do(Lt().multiply(handle_.get(), product_, &one, p_.b, first_, p_.a, second_, &beta, added_,
                     out_, p_.c, out_, &proposal.algorithm, workspace.data(),
                     proposal.workspace_nbytes, Native(stream)));
  }

 private:
  void Do(Status status) const { CheckLt(op_, status); }

  void Describe() {
    const int trans_first = p_.trans_b, trans_second = p_.trans_a;
    const bool tf32 = p_.precision == Precision::kTf32;
    Do(Lt().create_product(&product_, tf32 ? kComputeTf32 : kComputeFloat, kFloat));
    Do(Lt().set_product(product_, kTransA, &trans_first, sizeof trans_first));
    Do(Lt().set_product(product_, kTransB, &trans_second, sizeof trans_second));
    const int64_t row_a = p_.trans_a ? p_.m : p_.k, row_b = p_.trans_b ? p_.k : p_.n;
    Do(Lt().create_matrix(&first_, kFloat, row_b, p_.trans_b ? p_.n : p_.k, row_b));
    Do(Lt().create_matrix(&second_, kFloat, row_a, p_.trans_a ? p_.k : p_.m, row_a));
    Do(Lt().create_matrix(&out_, kFloat, p_.n, p_.m, p_.n));
  }

  void SetPreference() {
    Do(Lt().create_preference(&preference_));
    Do(Lt().set_preference(preference_, kWorkspace, &kMostWorkspace, sizeof kMostWorkspace));
    Do(Lt().set_preference(preference_, kReductions, &kFromWorkspace, sizeof kFromWorkspace));
    const void* const arrays[] = {p_.b, p_.a, added_, p_.c};
    for (int k = 0; k < 4; k++) {
      const uint32_t alignment = AlignmentOf(arrays[k]);
      Do(Lt().set_preference(preference_, kAlignment + k, &alignment, sizeof alignment));
    }
  }

  Proposal Proposed(int index) {
    Proposal proposals[kLtProposals];
    int count = 0;
    Do(Lt().propose(handle_.get(), product_, first_, second_, out_, out_, preference_, kLtProposals,
                    proposals, &count));
    if (index >= count || proposals[index].status != 0) NotApplicable(op_, kName);
    return proposals[index];
  }

  const char* op_;
  const Gemm& p_;
  const bool adds_;
  const float* const added_;
  BorrowedHandle<Handle> handle_;
  void *product_ = nullptr, *first_ = nullptr, *second_ = nullptr, *out_ = nullptr;
  void* preference_ = nullptr;
};

}  // namespace

const char* CublasLtSource() {
  if (!Lt().error.empty())
    FailWith(DL_UNAVAILABLE,
             "cuBLASLt cannot be used (%s): install nvidia-cublas, or name its folder in "
             "DLSYS_CUDA_LIBRARY_PATH",
             Lt().error.c_str());
  return Lt().name.c_str();
}

void RunCublasLtGemm(const char* op, const Gemm& p, int index, DLStream stream) {
  CublasLtSource();
  Call(op, p).Run(index, stream);
}

}  // namespace cuda
}  // namespace dlsys
