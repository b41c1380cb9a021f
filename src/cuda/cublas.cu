// The matrix product through cuBLAS.
//
// cuBLAS is opened when it is first needed, by soname, and its few functions are declared here:
// neither building nor loading this library needs it. Its default math mode computes float32
// products in true float32.
#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cuda/matmul.cuh"

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

struct Library {
  Status (*create)(Handle*) = nullptr;
  Status (*set_stream)(Handle, cudaStream_t) = nullptr;
  Status (*set_workspace)(Handle, void*, size_t) = nullptr;
  Status (*set_math_mode)(Handle, int) = nullptr;
  Status (*sgemm)(Handle, int trans_a, int trans_b, int64_t m, int64_t n, int64_t k,
                  const float* alpha, const float* a, int64_t lda, const float* b, int64_t ldb,
                  const float* beta, float* c, int64_t ldc) = nullptr;
  const char* (*text)(Status) = nullptr;
  std::string error;  // why it cannot be used, or ""
};

// The runtime's own major version first: the driver is known to be new enough for it.
std::vector<std::string> Sonames() {
  if (CUDART_VERSION / 1000 == 12) return {"libcublas.so.12", "libcublas.so.13"};
  return {"libcublas.so.13", "libcublas.so.12"};
}

// The paths of DLSYS_CUDA_LIBRARY_PATH, folders separated by colons.
std::vector<std::string> Folders() {
  std::vector<std::string> folders;
  const char* path = getenv("DLSYS_CUDA_LIBRARY_PATH");
  while (path && *path) {
    const char* end = strchrnul(path, ':');
    if (end != path) folders.emplace_back(path, end);
    path = *end ? end + 1 : end;
  }
  return folders;
}

// What is loaded already, then the folders, then what the system finds.
void* OpenLibrary(std::string* error) {
  const std::vector<std::string> sonames = Sonames();
  for (const std::string& soname : sonames) {
    if (void* library = dlopen(soname.c_str(), RTLD_LAZY | RTLD_LOCAL | RTLD_NOLOAD))
      return library;
  }
  std::vector<std::string> prefixes;
  for (const std::string& folder : Folders()) prefixes.push_back(folder + "/");
  prefixes.push_back("");
  for (const std::string& prefix : prefixes) {
    for (const std::string& soname : sonames) {
      if (void* library = dlopen((prefix + soname).c_str(), RTLD_LAZY | RTLD_LOCAL)) return library;
      const char* reason = dlerror();
      if (error->empty()) *error = reason ? reason : "dlopen gave no reason";
    }
  }
  return nullptr;
}

template <class F>
void Find(void* library, const char* name, F* function, std::string* error) {
  *function = (F)dlsym(library, name);
  if (!*function && error->empty()) *error = std::string("it has no function ") + name;
}

Library Open() {
  Library cublas;
  void* library = OpenLibrary(&cublas.error);
  if (!library) return cublas;
  cublas.error.clear();
  Find(library, "cublasCreate_v2", &cublas.create, &cublas.error);
  Find(library, "cublasSetStream_v2", &cublas.set_stream, &cublas.error);
  Find(library, "cublasSetWorkspace_v2", &cublas.set_workspace, &cublas.error);
  Find(library, "cublasSetMathMode", &cublas.set_math_mode, &cublas.error);
  Find(library, "cublasSgemm_v2_64", &cublas.sgemm, &cublas.error);
  Find(library, "cublasGetStatusString", &cublas.text, &cublas.error);
  return cublas;
}

const Library& Cublas() {
  static const Library* const library = new Library(Open());
  return *library;
}

void CheckCublas(const char* op, Status status) {
  if (status == 0) return;
  const cudaError_t fault =
      cudaStreamQuery(cudaStreamLegacy);  // if the GPU is lost, that is the reason
  if (fault != cudaErrorNotReady) Check(op, fault);
  FailWith(status == kAllocFailed ? DL_OUT_OF_MEMORY : DL_ERROR,
           "%s: cuBLAS error %d, %s; DLSYS_BLAS=own uses the built-in kernel instead", op, status,
           Cublas().text(status));
}

// Handles of one GPU. A handle serves one call at a time; there are as many as threads ever were in
// a call at once.
class HandlePool {
 public:
  Handle Take(const char* op) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!free_.empty()) {
        Handle handle = free_.back();
        free_.pop_back();
        return handle;
      }
    }
    Handle handle = nullptr;
    CheckCublas(op, Cublas().create(&handle));
    return handle;
  }
  void Give(Handle handle) {
    std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(handle);
  }

 private:
  std::mutex mutex_;
  std::vector<Handle> free_;
};

class BorrowedHandle {
 public:
  BorrowedHandle(const char* op, HandlePool* pool) : pool_(pool), handle_(pool->Take(op)) {}
  ~BorrowedHandle() { pool_->Give(handle_); }
  BorrowedHandle(const BorrowedHandle&) = delete;
  BorrowedHandle& operator=(const BorrowedHandle&) = delete;
  Handle get() const { return handle_; }

 private:
  HandlePool* pool_;
  Handle handle_;
};

constexpr int kMaxDevices = 64;

HandlePool* PoolOf(const char* op, int device) {
  // Never destroyed: at exit the driver may be gone before static destructors run.
  static HandlePool* const pools = new HandlePool[kMaxDevices];
  if (device >= kMaxDevices) Fail("%s: at most %d GPUs are supported", op, kMaxDevices);
  return &pools[device];
}

// What cuBLAS documents for its own workspace: more from Hopper on.
int64_t WorkspaceNbytes(int device) { return int64_t(ComputeMajor(device) >= 9 ? 32 : 4) << 20; }

}  // namespace

const char* CublasError() { return Cublas().error.c_str(); }

// cuBLAS counts by columns, where a row-major matrix is its transpose: C^T = op(B)^T op(A)^T.
void MultiplyCublas(const char* op, const Product& p, DLStream stream) {
  if (p.m == 0 || p.n == 0) return;
  if (p.k == 0) {
    Check(op, cudaMemsetAsync(p.c, 0, (size_t)(p.m * p.n) * sizeof(float), Native(stream)));
    return;
  }
  const Library& cublas = Cublas();
  const BorrowedHandle handle(op, PoolOf(op, p.ctx.device_id));
  const int64_t workspace_nbytes = WorkspaceNbytes(p.ctx.device_id);
  const Scratch workspace(p.ctx, workspace_nbytes, stream);
  // In this order: a new stream resets the workspace. One of our own makes results independent of
  // other streams.
  CheckCublas(op, cublas.set_stream(handle.get(), Native(stream)));
  CheckCublas(op, cublas.set_workspace(handle.get(), workspace.data(), (size_t)workspace_nbytes));
  const bool tf32 = p.precision == Precision::kTf32;
  CheckCublas(op, cublas.set_math_mode(handle.get(), tf32 ? kTf32Math : kDefaultMath));
  const float one = 1.f, zero = 0.f;
  CheckCublas(op, cublas.sgemm(handle.get(), p.trans_b ? kTranspose : kNoTranspose,
                               p.trans_a ? kTranspose : kNoTranspose, p.n, p.m, p.k, &one, p.b,
                               p.trans_b ? p.k : p.n, p.a, p.trans_a ? p.m : p.k, &zero, p.c, p.n));
}

namespace {

void MatmulCublas(const DLArray* a, int64_t trans_a, const DLArray* b, int64_t trans_b, DLArray* c,
                  DLStream stream) {
  const Product product = CheckedProduct("matmul_cublas", a, trans_a, b, trans_b, c);
  if (!Cublas().error.empty())
    FailWith(
        DL_UNAVAILABLE,
        "matmul_cublas: cuBLAS cannot be used (%s): install nvidia-cublas, or name its folder in "
        "DLSYS_CUDA_LIBRARY_PATH, or use matmul_own",
        Cublas().error.c_str());
  MultiplyCublas("matmul_cublas", product, stream);
}

DLSYS_KERNEL(cuda, matmul_cublas, MatmulCublas);

}  // namespace
}  // namespace cuda
}  // namespace dlsys
