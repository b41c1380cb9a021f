// The rung `cudnn`: convolution through cuDNN 9, by those of its algorithms that are deterministic:
// one that is named, or the first that its heuristics rank. conv.cuh has the contract. Loaded with
// dlopen; functions and constants are declared as in cudnn_graph.h, cudnn_ops.h and cudnn_cnn.h.
#include <algorithm>
#include <array>
#include <map>
#include <mutex>

#include "cuda/conv/conv.cuh"
#include "cuda/runtime/dlopen.cuh"

namespace dlsys {
namespace cuda {
namespace {

using Handle = struct CudnnContext*;
using Status = int;
using TensorOf = struct CudnnTensorStruct*;
using FilterOf = struct CudnnFilterStruct*;
using ConvolutionOf = struct CudnnConvolutionStruct*;

constexpr int kNchw = 0;              // CUDNN_TENSOR_NCHW
constexpr int kFloat = 0;             // CUDNN_DATA_FLOAT
constexpr int kCrossCorrelation = 1;  // CUDNN_CROSS_CORRELATION
constexpr int kTensorOpMath = 1;      // CUDNN_TENSOR_OP_MATH: at tf32 where data are float32
constexpr int kFmaMath = 3;           // CUDNN_FMA_MATH
constexpr int kMajor = 9;

// cudnnConvolutionFwdAlgoPerf_t, and the same of the other passes.
struct Ranked {
  int algorithm, status;
  float ms;
  size_t nbytes;
  int determinism, math, reserved[3];
};

struct Library {
  size_t (*version)() = nullptr;
  const char* (*text)(Status) = nullptr;
  Status (*create)(Handle*) = nullptr;
  Status (*set_stream)(Handle, cudaStream_t) = nullptr;
  Status (*create_tensor)(TensorOf*) = nullptr;
  Status (*set_tensor)(TensorOf, int format, int type, int n, int c, int h, int w) = nullptr;
  Status (*destroy_tensor)(TensorOf) = nullptr;
  Status (*create_filter)(FilterOf*) = nullptr;
  Status (*set_filter)(FilterOf, int type, int format, int o, int c, int h, int w) = nullptr;
  Status (*destroy_filter)(FilterOf) = nullptr;
  Status (*create_convolution)(ConvolutionOf*) = nullptr;
  Status (*set_convolution)(ConvolutionOf, int pad_h, int pad_w, int stride_h, int stride_w,
                            int dilation_h, int dilation_w, int mode, int type) = nullptr;
  Status (*set_groups)(ConvolutionOf, int) = nullptr;
  Status (*set_math)(ConvolutionOf, int) = nullptr;
  Status (*destroy_convolution)(ConvolutionOf) = nullptr;
  Status (*forward_nbytes)(Handle, TensorOf x, FilterOf, ConvolutionOf, TensorOf y, int algorithm,
                           size_t*) = nullptr;
  Status (*forward)(Handle, const void* alpha, TensorOf, const void* x, FilterOf, const void* f,
                    ConvolutionOf, int algorithm, void* workspace, size_t nbytes, const void* beta,
                    TensorOf, void* y) = nullptr;
  Status (*data_nbytes)(Handle, FilterOf, TensorOf dy, ConvolutionOf, TensorOf dx, int algorithm,
                        size_t*) = nullptr;
  Status (*data)(Handle, const void* alpha, FilterOf, const void* f, TensorOf, const void* dy,
                 ConvolutionOf, int algorithm, void* workspace, size_t nbytes, const void* beta,
                 TensorOf, void* dx) = nullptr;
  Status (*filter_nbytes)(Handle, TensorOf x, TensorOf dy, ConvolutionOf, FilterOf, int algorithm,
                          size_t*) = nullptr;
  Status (*filter)(Handle, const void* alpha, TensorOf, const void* x, TensorOf, const void* dy,
                   ConvolutionOf, int algorithm, void* workspace, size_t nbytes, const void* beta,
                   FilterOf, void* df) = nullptr;
  // Its heuristics: the algorithms for a pass, the one that it takes for the fastest first.
  Status (*forward_ranking)(Handle, TensorOf x, FilterOf, ConvolutionOf, TensorOf y, int most,
                            int* count, Ranked*) = nullptr;
  Status (*data_ranking)(Handle, FilterOf, TensorOf dy, ConvolutionOf, TensorOf dx, int most,
                         int* count, Ranked*) = nullptr;
  Status (*filter_ranking)(Handle, TensorOf x, TensorOf dy, ConvolutionOf, FilterOf, int most,
                           int* count, Ranked*) = nullptr;
  Status (*add)(Handle, const void* alpha, TensorOf, const void* a, const void* beta, TensorOf,
                void* c) = nullptr;
  std::string error;  // why it cannot be used, or ""
  std::string name;   // and its version
};

Library Open() {
  Library l;
  void* library = OpenLibrary({"libcudnn.so.9"}, &l.error);
  if (!library) return l;
  Find(library, "cudnnGetVersion", &l.version, &l.error);
  Find(library, "cudnnGetErrorString", &l.text, &l.error);
  Find(library, "cudnnCreate", &l.create, &l.error);
  Find(library, "cudnnSetStream", &l.set_stream, &l.error);
  Find(library, "cudnnCreateTensorDescriptor", &l.create_tensor, &l.error);
  Find(library, "cudnnSetTensor4dDescriptor", &l.set_tensor, &l.error);
  Find(library, "cudnnDestroyTensorDescriptor", &l.destroy_tensor, &l.error);
  Find(library, "cudnnCreateFilterDescriptor", &l.create_filter, &l.error);
  Find(library, "cudnnSetFilter4dDescriptor", &l.set_filter, &l.error);
  Find(library, "cudnnDestroyFilterDescriptor", &l.destroy_filter, &l.error);
  Find(library, "cudnnCreateConvolutionDescriptor", &l.create_convolution, &l.error);
  Find(library, "cudnnSetConvolution2dDescriptor", &l.set_convolution, &l.error);
  Find(library, "cudnnSetConvolutionGroupCount", &l.set_groups, &l.error);
  Find(library, "cudnnSetConvolutionMathType", &l.set_math, &l.error);
  Find(library, "cudnnDestroyConvolutionDescriptor", &l.destroy_convolution, &l.error);
  Find(library, "cudnnGetConvolutionForwardWorkspaceSize", &l.forward_nbytes, &l.error);
  Find(library, "cudnnConvolutionForward", &l.forward, &l.error);
  Find(library, "cudnnGetConvolutionBackwardDataWorkspaceSize", &l.data_nbytes, &l.error);
  Find(library, "cudnnConvolutionBackwardData", &l.data, &l.error);
  Find(library, "cudnnGetConvolutionBackwardFilterWorkspaceSize", &l.filter_nbytes, &l.error);
  Find(library, "cudnnConvolutionBackwardFilter", &l.filter, &l.error);
  Find(library, "cudnnGetConvolutionForwardAlgorithm_v7", &l.forward_ranking, &l.error);
  Find(library, "cudnnGetConvolutionBackwardDataAlgorithm_v7", &l.data_ranking, &l.error);
  Find(library, "cudnnGetConvolutionBackwardFilterAlgorithm_v7", &l.filter_ranking, &l.error);
  Find(library, "cudnnAddTensor", &l.add, &l.error);
  if (!l.error.empty()) return l;
  const size_t version = l.version(), major = version / 10000;
  l.name = "cuDNN " + std::to_string(major) + "." + std::to_string(version / 100 % 100) + "." +
           std::to_string(version % 100);
  if (major != kMajor) l.error = "it is " + l.name + ", expected version 9";
  return l;
}

const Library& Cudnn() {
  static const Library* const library = new Library(Open());
  return *library;
}

const char* Source() {
  if (!Cudnn().error.empty())
    FailWith(DL_UNAVAILABLE,
             "cuDNN cannot be used (%s): install nvidia-cudnn, or name its folder in "
             "DLSYS_CUDA_LIBRARY_PATH",
             Cudnn().error.c_str());
  return Cudnn().name.c_str();
}

constexpr const char* kName = "cudnn";

void CheckCudnn(const char* op, Status status) {
  constexpr Status kNotSupported = 3000, kNext = 4000;  // CUDNN_STATUS_NOT_SUPPORTED and its kinds
  if (status == 0) return;
  if (status >= kNotSupported && status < kNext) NotApplicable(op, kName);
  CheckFault(op);
  Fail("%s: cuDNN error %d, %s", op, status, Cudnn().text(status));
}

Handle MakeHandle(const char* op) {
  Handle handle = nullptr;
  CheckCudnn(op, Cudnn().create(&handle));
  return handle;
}

// ---- algorithms ----

// cuDNN's index of an algorithm for each pass, -1 where it has no deterministic one (see
// cudnn_ops.h). Those that transform their operands (FFT, Winograd) lose too much accuracy at tf32
// and run in float32.
struct Algorithm {
  const char* name;
  int by_pass[3];
  bool transforms;
};
constexpr Algorithm kAlgorithms[] = {
    {"implicit_gemm", {0, -1, -1}, false},  {"precomputed_gemm", {1, 1, 1}, false},
    {"gemm", {2, -1, -1}, false},           {"fft", {4, 2, 2}, true},
    {"tiled_fft", {5, 3, 6}, true},         {"winograd", {6, 4, -1}, true},
    {"winograd_in_parts", {7, 5, 5}, true},
};

std::vector<const Algorithm*> AlgorithmsOf(Pass pass) {
  std::vector<const Algorithm*> found;
  for (const Algorithm& algorithm : kAlgorithms)
    if (algorithm.by_pass[(int)pass] >= 0) found.push_back(&algorithm);
  return found;
}

std::vector<std::string> Variants(Pass pass) {
  std::vector<std::string> names;
  for (const Algorithm* algorithm : AlgorithmsOf(pass)) names.push_back(algorithm->name);
  return names;
}

// ---- calls ----

// The algorithm of a call and its workspace, and what they depend on.
struct Selected {
  const Algorithm* algorithm;
  size_t nbytes;
};
using Key = std::array<int64_t, 20>;

Key KeyOf(const ConvCall& at, const Conv& c, Pass pass) {
  return {at.ctx.device_id,
          (int64_t)pass,
          (int64_t)at.precision,
          at.variant,
          c.n,
          c.c,
          c.o,
          c.groups,
          c.in.h,
          c.in.w,
          c.kernel.h,
          c.kernel.w,
          c.out.h,
          c.out.w,
          c.stride.h,
          c.stride.w,
          c.pad.h,
          c.pad.w,
          c.dilation.h,
          c.dilation.w};
}

// They are remembered as long as the process lasts: to ask cuDNN takes longer than to launch.
class Memory {
 public:
  template <class Find>
  Selected At(const Key& key, Find&& find) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      const auto found = selected_.find(key);
      if (found != selected_.end()) return found->second;
    }
    const Selected made = find();
    const std::lock_guard<std::mutex> lock(mutex_);
    return selected_.emplace(key, made).first->second;
  }

 private:
  std::mutex mutex_;
  std::map<Key, Selected> selected_;
};

// Descriptors of a convolution and a borrowed handle on the stream, for one call.
class Call {
 public:
  Call(const ConvCall& at, const Conv& conv, Pass pass)
      : at_(at), c_(conv), pass_(pass), handle_(at.op, at.ctx.device_id, MakeHandle) {}
  ~Call() {
    const Library& l = Cudnn();
    if (conv_) l.destroy_convolution(conv_);
    if (f_) l.destroy_filter(f_);
    for (TensorOf tensor : {x_, y_, bias_})
      if (tensor) l.destroy_tensor(tensor);
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  // Runs the pass on arrays in cuDNN's order, with a workspace.
  void Run(const float* first, const float* second, float* result) {
    Describe();
    static Memory* const memory = new Memory;
    const auto [selected, nbytes] = memory->At(KeyOf(at_, c_, pass_), [&] {
      const Algorithm& found = Chosen();
      SetMath(found);
      return Selected{&found, Nbytes(found)};
    });
    const Algorithm& algorithm = *selected;
    SetMath(algorithm);
    if (nbytes > (size_t)ConvWorkspaceLimit()) NotApplicable(at_.op, kName);
    const Library& l = Cudnn();
    const Handle h = handle_.get();
    const float one = 1.f, zero = 0.f;
    const int index = IndexOf(algorithm);
    const Scratch scratch(at_.ctx, (int64_t)nbytes, at_.stream);
    if (Workspace::Querying()) return;
    void* space = scratch.data();
    if (pass_ == Pass::kForward)
      Do(l.forward(h, &one, x_, first, f_, second, conv_, index, space, nbytes, &zero, y_, result));
    else if (pass_ == Pass::kDataGradient)
      Do(l.data(h, &one, f_, first, y_, second, conv_, index, space, nbytes, &zero, x_, result));
    else
      Do(l.filter(h, &one, x_, first, y_, second, conv_, index, space, nbytes, &zero, f_, result));
  }

  void AddBias(const float* bias, float* y) {
    if (Workspace::Querying()) return;
    const float one = 1.f;
    Do(Cudnn().add(handle_.get(), &one, bias_, bias, &one, y_, y));
  }

 private:
  int IndexOf(const Algorithm& algorithm) const { return algorithm.by_pass[(int)pass_]; }

  size_t Nbytes(const Algorithm& algorithm) const {
    const Library& l = Cudnn();
    const Handle h = handle_.get();
    const int index = IndexOf(algorithm);
    size_t nbytes = 0;
    Do(pass_ == Pass::kForward        ? l.forward_nbytes(h, x_, f_, conv_, y_, index, &nbytes)
       : pass_ == Pass::kDataGradient ? l.data_nbytes(h, f_, y_, conv_, x_, index, &nbytes)
                                      : l.filter_nbytes(h, x_, y_, conv_, f_, index, &nbytes));
    return nbytes;
  }

  // The variant, or without one the first of cuDNN's ranking that is of the table and takes no
  // more workspace than there may be.
  const Algorithm& Chosen() const {
    const std::vector<const Algorithm*> known = AlgorithmsOf(pass_);
    if (at_.variant != kHeuristic) return *known[at_.variant];
    constexpr int kMost = 10;
    const Library& l = Cudnn();
    const Handle h = handle_.get();
    Do(l.set_math(conv_, at_.precision == Precision::kTf32 ? kTensorOpMath : kFmaMath));
    Ranked ranking[kMost];
    int count = 0;
    Do(pass_ == Pass::kForward ? l.forward_ranking(h, x_, f_, conv_, y_, kMost, &count, ranking)
       : pass_ == Pass::kDataGradient
           ? l.data_ranking(h, f_, y_, conv_, x_, kMost, &count, ranking)
           : l.filter_ranking(h, x_, y_, conv_, f_, kMost, &count, ranking));
    for (const Ranked* r = ranking; r < ranking + count; r++)
      for (const Algorithm* algorithm : known)
        if (r->status == 0 && r->algorithm == IndexOf(*algorithm) &&
            r->nbytes <= (size_t)ConvWorkspaceLimit())
          return *algorithm;
    NotApplicable(at_.op, kName);
  }

  void SetMath(const Algorithm& algorithm) const {
    const bool tf32 = at_.precision == Precision::kTf32 && !algorithm.transforms;
    Do(Cudnn().set_math(conv_, tf32 ? kTensorOpMath : kFmaMath));
  }

  void Do(Status status) const { CheckCudnn(at_.op, status); }

  void Describe() {
    const Library& l = Cudnn();
    const Conv& c = c_;
    Do(l.set_stream(handle_.get(), Native(at_.stream)));
    Do(l.create_tensor(&x_));
    Do(l.create_tensor(&y_));
    Do(l.create_tensor(&bias_));
    Do(l.create_filter(&f_));
    Do(l.create_convolution(&conv_));
    Do(l.set_tensor(x_, kNchw, kFloat, (int)c.n, (int)c.c, (int)c.in.h, (int)c.in.w));
    Do(l.set_tensor(y_, kNchw, kFloat, (int)c.n, (int)c.o, (int)c.out.h, (int)c.out.w));
    Do(l.set_tensor(bias_, kNchw, kFloat, 1, (int)c.o, 1, 1));
    Do(l.set_filter(f_, kFloat, kNchw, (int)c.o, (int)c.GroupChannels(), (int)c.kernel.h,
                    (int)c.kernel.w));
    Do(l.set_convolution(conv_, (int)c.pad.h, (int)c.pad.w, (int)c.stride.h, (int)c.stride.w,
                         (int)c.dilation.h, (int)c.dilation.w, kCrossCorrelation, kFloat));
    Do(l.set_groups(conv_, (int)c.groups));
  }

  const ConvCall& at_;
  const Conv& c_;
  Pass pass_;
  BorrowedHandle<Handle> handle_;
  TensorOf x_ = nullptr, y_ = nullptr, bias_ = nullptr;
  FilterOf f_ = nullptr;
  ConvolutionOf conv_ = nullptr;
};

// cuDNN pads symmetrically and takes every window that fits; its sizes are int and positive.
bool FitsAxis(int64_t in, int64_t kernel, int64_t out, int64_t stride, int64_t pad,
              int64_t dilation) {
  const int64_t room = in + 2 * pad - (kernel - 1) * dilation - 1;
  return room >= 0 && room / stride + 1 == out;
}

const char* Refusal(const ConvCall&, const Conv& c) {
  constexpr int64_t kMost = INT32_MAX;
  const int64_t least = std::min({c.n, c.c, c.o, Size(c.in), Size(c.kernel), Size(c.out)});
  if (least < 1) return "an array is empty";
  const int64_t largest = std::max(c.c * Size(c.in), c.o * Size(c.out));
  if (largest > kMost / c.n || c.o * c.GroupChannels() * Size(c.kernel) > kMost)
    return "an array has more elements than its int counts";
  const bool fits = FitsAxis(c.in.h, c.kernel.h, c.out.h, c.stride.h, c.pad.h, c.dilation.h) &&
                    FitsAxis(c.in.w, c.kernel.w, c.out.w, c.stride.w, c.pad.w, c.dilation.w);
  return fits ? nullptr : "it pads both sides of an axis alike";
}

void CudnnForward(const ConvCall& at, const Conv& conv, const float* x, const float* f,
                  const float* bias, float* y) {
  Source();
  Call call(at, conv, Pass::kForward);
  call.Run(x, f, y);
  if (bias) call.AddBias(bias, y);
}

void CudnnDataGradient(const ConvCall& at, const Conv& conv, const float* f, const float* dy,
                       float* dx) {
  Source();
  Call(at, conv, Pass::kDataGradient).Run(f, dy, dx);
}

void CudnnFilterGradient(const ConvCall& at, const Conv& conv, const float* x, const float* dy,
                         float* df) {
  Source();
  Call(at, conv, Pass::kFilterGradient).Run(x, dy, df);
}

}  // namespace

const ConvAlgorithm kCudnn = {
    kName, Variants, Source, Refusal, CudnnForward, CudnnDataGradient, CudnnFilterGradient};

}  // namespace cuda
}  // namespace dlsys
