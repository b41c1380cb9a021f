// cuDNN 9 as the rungs `cudnn` share it: the library, which is opened with dlopen when it is first
// needed, handles on a stream, descriptors, and what a status means. Functions and constants are
// declared as in cudnn_graph.h and cudnn_ops.h; each file finds those that it alone calls.
// conv/rungs/cudnn.cu has convolutions, the files beside this one activations, pooling and batch
// normalization.
#pragma once
#include "cuda/runtime/dlopen.cuh"

namespace dlsys {
namespace cuda {
namespace cudnn {

using Handle = struct CudnnContext*;
using Status = int;
using TensorDescriptor = struct CudnnTensorStruct*;

constexpr int kNchw = 0;          // CUDNN_TENSOR_NCHW
constexpr int kFloat = 0;         // CUDNN_DATA_FLOAT
constexpr int kPropagateNan = 1;  // CUDNN_PROPAGATE_NAN

// The library's name and version, such as "cuDNN 9.14.0". Fails with DL_UNAVAILABLE where there is
// none.
const char* Source();

// A function of the library by its name. Fails with DL_UNAVAILABLE where it has none.
void* FunctionOf(const char* name);
template <class F>
void Find(const char* name, F* function) {
  *function = (F)FunctionOf(name);
}

// Base of functions of the library that a constructor finds when they are first needed. Fails with
// DL_UNAVAILABLE where cuDNN cannot be used.
template <class Functions>
struct FoundOnce {
  static const Functions& Get() {
    static const Functions* const functions = new Functions;
    return *functions;
  }
};

// Turns a status into a failure: DL_NOT_APPLICABLE for what cuDNN does not support.
void Check(const char* op, Status status);

// A handle on a stream, for one call.
class Session {
 public:
  Session(const char* op, DLContext ctx, DLStream stream);
  Handle handle() const { return handle_.get(); }

 private:
  const BorrowedHandle<Handle> handle_;
};

// The descriptor of an array in NCHW.
class Tensor {
 public:
  Tensor(const char* op, int type, int64_t n, int64_t c, int64_t h, int64_t w);
  ~Tensor();
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;
  TensorDescriptor get() const { return descriptor_; }

 private:
  TensorDescriptor descriptor_ = nullptr;
};

// A descriptor of another kind that one call needs.
template <class Descriptor>
class Described {
 public:
  using Function = Status (*)(Descriptor);
  Described(const char* op, Status (*create)(Descriptor*), Function destroy) : destroy_(destroy) {
    Check(op, create(&descriptor_));
  }
  ~Described() { destroy_(descriptor_); }
  Described(const Described&) = delete;
  Described& operator=(const Described&) = delete;
  Descriptor get() const { return descriptor_; }

 private:
  const Function destroy_;
  Descriptor descriptor_ = nullptr;
};

// cuDNN's number of a storage type.
int TypeOf(const char* op, const DLArray* a);

// Fails with DL_NOT_APPLICABLE and the reason, unless that is null.
void Refuse(const char* op, const char* why);

// cuDNN pads both ends of an axis alike and has every window that fits, and no other.
bool FitsAxis(int64_t in, int64_t window, int64_t out, int64_t stride, int64_t pad,
              int64_t dilation);

// cuDNN counts in int.
inline bool FitsInt(const DLArray* a) { return Numel(a) <= INT32_MAX; }

// Arrays of one shape and one storage type.
inline void CheckAlike(const char* op, const DLArray* a, const DLArray* b) {
  CheckSameShape(op, a, b);
  if (a->dtype != b->dtype)
    Fail("%s: dtypes differ: %s and %s", op, DtypeText(a->dtype), DtypeText(b->dtype));
}

}  // namespace cudnn
}  // namespace cuda
}  // namespace dlsys
