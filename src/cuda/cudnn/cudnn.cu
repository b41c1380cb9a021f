// Opening cuDNN, handles and descriptors: see cudnn.cuh. Handles and the library last as long as
// the process; descriptors, which are made in host memory alone, as long as a call. Nothing here is
// limited by the GPU: a captured graph has none of these calls.
#include "cuda/cudnn/cudnn.cuh"

namespace dlsys {
namespace cuda {
namespace cudnn {
namespace {

constexpr size_t kMajor = 9;

struct Library {
  void* opened = nullptr;
  size_t (*version)() = nullptr;
  const char* (*text)(Status) = nullptr;
  Status (*create)(Handle*) = nullptr;
  Status (*set_stream)(Handle, cudaStream_t) = nullptr;
  Status (*create_tensor)(TensorDescriptor*) = nullptr;
  Status (*set_tensor)(TensorDescriptor, int format, int type, int n, int c, int h,
                       int w) = nullptr;
  Status (*destroy_tensor)(TensorDescriptor) = nullptr;
  std::string error;  // why it cannot be used, or ""
  std::string name;   // and its version
};

Library Open() {
  Library l;
  l.opened = OpenLibrary({"libcudnn.so.9"}, &l.error);
  if (!l.opened) return l;
  cuda::Find(l.opened, "cudnnGetVersion", &l.version, &l.error);
  cuda::Find(l.opened, "cudnnGetErrorString", &l.text, &l.error);
  cuda::Find(l.opened, "cudnnCreate", &l.create, &l.error);
  cuda::Find(l.opened, "cudnnSetStream", &l.set_stream, &l.error);
  cuda::Find(l.opened, "cudnnCreateTensorDescriptor", &l.create_tensor, &l.error);
  cuda::Find(l.opened, "cudnnSetTensor4dDescriptor", &l.set_tensor, &l.error);
  cuda::Find(l.opened, "cudnnDestroyTensorDescriptor", &l.destroy_tensor, &l.error);
  if (!l.error.empty()) return l;
  const size_t version = l.version(), major = version / 10000;
  l.name = "cuDNN " + std::to_string(major) + "." + std::to_string(version / 100 % 100) + "." +
           std::to_string(version % 100);
  if (major != kMajor) l.error = "it is " + l.name + ", expected version 9";
  return l;
}

[[noreturn]] void Unavailable(const std::string& why) {
  FailWith(DL_UNAVAILABLE,
           "cuDNN cannot be used (%s): install nvidia-cudnn, or name its folder in "
           "DLSYS_CUDA_LIBRARY_PATH",
           why.c_str());
}

const Library& Opened() {
  static const Library* const library = new Library(Open());
  if (!library->error.empty()) Unavailable(library->error);
  return *library;
}

Handle MakeHandle(const char* op) {
  Handle handle = nullptr;
  Check(op, Opened().create(&handle));
  return handle;
}

}  // namespace

const char* Source() { return Opened().name.c_str(); }

void* FunctionOf(const char* name) {
  std::string error;
  void* function = FindFunction(Opened().opened, name, &error);
  if (!function) Unavailable(error);
  return function;
}

void Check(const char* op, Status status) {
  constexpr Status kNotSupported = 3000, kNext = 4000;  // CUDNN_STATUS_NOT_SUPPORTED and its kinds
  if (status == 0) return;
  if (status >= kNotSupported && status < kNext) NotApplicable(op, "cudnn");
  CheckFault(op);
  Fail("%s: cuDNN error %d, %s", op, status, Opened().text(status));
}

Session::Session(const char* op, DLContext ctx, DLStream stream)
    : handle_(op, ctx.device_id, MakeHandle) {
  Check(op, Opened().set_stream(handle(), Native(stream)));
}

Tensor::Tensor(const char* op, int type, int64_t n, int64_t c, int64_t h, int64_t w) {
  Check(op, Opened().create_tensor(&descriptor_));
  Check(op, Opened().set_tensor(descriptor_, kNchw, type, (int)n, (int)c, (int)h, (int)w));
}
Tensor::~Tensor() { Opened().destroy_tensor(descriptor_); }

int TypeOf(const char* op, const DLArray* a) {
  constexpr int kHalf = 2, kBfloat16 = 9;  // CUDNN_DATA_HALF, CUDNN_DATA_BFLOAT16
  if (a->dtype == DL_FLOAT32) return kFloat;
  if (a->dtype == DL_FLOAT16) return kHalf;
  if (a->dtype == DL_BFLOAT16) return kBfloat16;
  Fail("%s: expected float32, float16 or bfloat16, got %s", op, DtypeText(a->dtype));
}

void Refuse(const char* op, const char* why) {
  if (why) FailWith(DL_NOT_APPLICABLE, "%s: algo=cudnn cannot compute this: %s; use auto", op, why);
}

bool FitsAxis(int64_t in, int64_t window, int64_t out, int64_t stride, int64_t pad,
              int64_t dilation) {
  const int64_t room = in + 2 * pad - (window - 1) * dilation - 1;
  return room >= 0 && room / stride + 1 == out;
}

}  // namespace cudnn
}  // namespace cuda
}  // namespace dlsys
