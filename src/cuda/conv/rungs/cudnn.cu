// The rung `cudnn`: convolution through cuDNN 9, by those of its algorithms that are deterministic:
// one that is named, or the first that its heuristics rank and that is accurate enough. conv.cuh
// has the contract. Functions and constants are declared as in cudnn_ops.h and cudnn_cnn.h; what
// all rungs of cuDNN share is in cudnn.cuh.
#include <algorithm>
#include <array>
#include <map>
#include <mutex>

#include "cuda/conv/conv.cuh"
#include "cuda/cudnn/cudnn.cuh"
#include "operators/conv_accuracy.h"

namespace dlsys {
namespace cuda {
namespace {

using cudnn::Handle;
using cudnn::Status;
using cudnn::TensorDescriptor;
using FilterDescriptor = struct CudnnFilterStruct*;
using ConvolutionDescriptor = struct CudnnConvolutionStruct*;

constexpr int kCrossCorrelation = 1;  // CUDNN_CROSS_CORRELATION
constexpr int kTensorOpMath = 1;      // CUDNN_TENSOR_OP_MATH: at tf32 where data are float32
constexpr int kFmaMath = 3;           // CUDNN_FMA_MATH

// cudnnConvolutionFwdAlgoPerf_t, and the same of the other passes.
struct Ranked {
  int algorithm, status;
  float ms;
  size_t nbytes;
  int determinism, math, reserved[3];
};

struct Functions : cudnn::FoundOnce<Functions> {
  Status (*create_filter)(FilterDescriptor*);
  Status (*set_filter)(FilterDescriptor, int type, int format, int o, int c, int h, int w);
  Status (*destroy_filter)(FilterDescriptor);
  Status (*create_convolution)(ConvolutionDescriptor*);
  Status (*set_convolution)(ConvolutionDescriptor, int pad_h, int pad_w, int stride_h, int stride_w,
                            int dilation_h, int dilation_w, int mode, int type);
  Status (*set_groups)(ConvolutionDescriptor, int);
  Status (*set_math)(ConvolutionDescriptor, int);
  Status (*destroy_convolution)(ConvolutionDescriptor);
  Status (*forward_nbytes)(Handle, TensorDescriptor x, FilterDescriptor, ConvolutionDescriptor,
                           TensorDescriptor y, int algorithm, size_t*);
  Status (*forward)(Handle, const void* alpha, TensorDescriptor, const void* x, FilterDescriptor,
                    const void* f, ConvolutionDescriptor, int algorithm, void* workspace,
                    size_t nbytes, const void* beta, TensorDescriptor, void* y);
  Status (*data_nbytes)(Handle, FilterDescriptor, TensorDescriptor dy, ConvolutionDescriptor,
                        TensorDescriptor dx, int algorithm, size_t*);
  Status (*data)(Handle, const void* alpha, FilterDescriptor, const void* f, TensorDescriptor,
                 const void* dy, ConvolutionDescriptor, int algorithm, void* workspace,
                 size_t nbytes, const void* beta, TensorDescriptor, void* dx);
  Status (*filter_nbytes)(Handle, TensorDescriptor x, TensorDescriptor dy, ConvolutionDescriptor,
                          FilterDescriptor, int algorithm, size_t*);
  Status (*filter)(Handle, const void* alpha, TensorDescriptor, const void* x, TensorDescriptor,
                   const void* dy, ConvolutionDescriptor, int algorithm, void* workspace,
                   size_t nbytes, const void* beta, FilterDescriptor, void* df);
  // Its heuristics: the algorithms for a pass, the one that it takes for the fastest first.
  Status (*forward_ranking)(Handle, TensorDescriptor x, FilterDescriptor, ConvolutionDescriptor,
                            TensorDescriptor y, int most, int* count, Ranked*);
  Status (*data_ranking)(Handle, FilterDescriptor, TensorDescriptor dy, ConvolutionDescriptor,
                         TensorDescriptor dx, int most, int* count, Ranked*);
  Status (*filter_ranking)(Handle, TensorDescriptor x, TensorDescriptor dy, ConvolutionDescriptor,
                           FilterDescriptor, int most, int* count, Ranked*);
  Status (*add)(Handle, const void* alpha, TensorDescriptor, const void* a, const void* beta,
                TensorDescriptor, void* c);

  Functions() {
    cudnn::Find("cudnnCreateFilterDescriptor", &create_filter);
    cudnn::Find("cudnnSetFilter4dDescriptor", &set_filter);
    cudnn::Find("cudnnDestroyFilterDescriptor", &destroy_filter);
    cudnn::Find("cudnnCreateConvolutionDescriptor", &create_convolution);
    cudnn::Find("cudnnSetConvolution2dDescriptor", &set_convolution);
    cudnn::Find("cudnnSetConvolutionGroupCount", &set_groups);
    cudnn::Find("cudnnSetConvolutionMathType", &set_math);
    cudnn::Find("cudnnDestroyConvolutionDescriptor", &destroy_convolution);
    cudnn::Find("cudnnGetConvolutionForwardWorkspaceSize", &forward_nbytes);
    cudnn::Find("cudnnConvolutionForward", &forward);
    cudnn::Find("cudnnGetConvolutionBackwardDataWorkspaceSize", &data_nbytes);
    cudnn::Find("cudnnConvolutionBackwardData", &data);
    cudnn::Find("cudnnGetConvolutionBackwardFilterWorkspaceSize", &filter_nbytes);
    cudnn::Find("cudnnConvolutionBackwardFilter", &filter);
    cudnn::Find("cudnnGetConvolutionForwardAlgorithm_v7", &forward_ranking);
    cudnn::Find("cudnnGetConvolutionBackwardDataAlgorithm_v7", &data_ranking);
    cudnn::Find("cudnnGetConvolutionBackwardFilterAlgorithm_v7", &filter_ranking);
    cudnn::Find("cudnnAddTensor", &add);
  }
};

const char* Source() {
  Functions::Get();
  return cudnn::Source();
}

constexpr const char* kName = "cudnn";

// ---- algorithms ----

// cuDNN's index of an algorithm for each pass, -1 where it has no deterministic one (see
// cudnn_ops.h). Those that transform their operands (FFT, Winograd) lose too much accuracy at tf32
// and run in float32. One of cuDNN's is two here, of filters of 3 x 3 and of 5 x 5, since these
// differ in their errors.
struct Algorithm {
  const char* name;
  int by_pass[3];
  bool transforms;
  int64_t kernel = 0;  // both extents of the filters that it is for; 0: any
};
constexpr Algorithm kAlgorithms[] = {
    {"implicit_gemm", {0, -1, -1}, false},
    {"precomputed_gemm", {1, 1, 1}, false},
    {"gemm", {2, -1, -1}, false},
    {"fft", {4, 2, 2}, true},
    {"tiled_fft", {5, 3, 6}, true},
    {"winograd", {6, 4, -1}, true},
    {"winograd_in_parts", {7, 5, 5}, true, 3},
    {"winograd_5x5", {7, 5, 5}, true, 5},
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
      : at_(at),
        c_(conv),
        pass_(pass),
        session_(at.op, at.ctx, at.stream),
        x_(at.op, cudnn::kFloat, conv.n, conv.c, conv.in.h, conv.in.w),
        y_(at.op, cudnn::kFloat, conv.n, conv.o, conv.out.h, conv.out.w),
        f_(at.op, Functions::Get().create_filter, Functions::Get().destroy_filter),
        conv_(at.op, Functions::Get().create_convolution, Functions::Get().destroy_convolution) {
    const Functions& l = Functions::Get();
    const Conv& c = c_;
    Do(l.set_filter(f_.get(), cudnn::kFloat, cudnn::kNchw, (int)c.o, (int)c.GroupChannels(),
                    (int)c.kernel.h, (int)c.kernel.w));
    Do(l.set_convolution(conv_.get(), (int)c.pad.h, (int)c.pad.w, (int)c.stride.h, (int)c.stride.w,
                         (int)c.dilation.h, (int)c.dilation.w, kCrossCorrelation, cudnn::kFloat));
    Do(l.set_groups(conv_.get(), (int)c.groups));
  }

  // Runs the pass on arrays in cuDNN's order, with a workspace.
  void Run(const float* first, const float* second, float* result) {
    static Memory* const memory = new Memory;
    const auto [selected, nbytes] = memory->At(KeyOf(at_, c_, pass_), [&] {
      const Algorithm& found = Chosen();
      SetMath(found);
      return Selected{&found, Nbytes(found)};
    });
    const Algorithm& algorithm = *selected;
    SetMath(algorithm);
    if (nbytes > (size_t)ConvWorkspaceLimit()) NotApplicable(at_.op, kName);
    const Functions& l = Functions::Get();
    const Handle h = session_.handle();
    const float one = 1.f, zero = 0.f;
    const int index = IndexOf(algorithm);
    const Scratch scratch(at_.ctx, (int64_t)nbytes, at_.stream);
    if (Workspace::Querying()) return;
    void* space = scratch.data();
    if (pass_ == Pass::kForward)
      Do(l.forward(h, &one, x_.get(), first, f_.get(), second, conv_.get(), index, space, nbytes,
                   &zero, y_.get(), result));
    else if (pass_ == Pass::kDataGradient)
      Do(l.data(h, &one, f_.get(), first, y_.get(), second, conv_.get(), index, space, nbytes,
                &zero, x_.get(), result));
    else
      Do(l.filter(h, &one, x_.get(), first, y_.get(), second, conv_.get(), index, space, nbytes,
                  &zero, f_.get(), result));
  }

  void AddBias(const float* bias, float* y) {
    if (Workspace::Querying()) return;
    const float one = 1.f;
    const cudnn::Tensor of_bias(at_.op, cudnn::kFloat, 1, c_.o, 1, 1);
    Do(Functions::Get().add(session_.handle(), &one, of_bias.get(), bias, &one, y_.get(), y));
  }

 private:
  int IndexOf(const Algorithm& algorithm) const { return algorithm.by_pass[(int)pass_]; }

  size_t Nbytes(const Algorithm& algorithm) const {
    const Functions& l = Functions::Get();
    const Handle h = session_.handle();
    const int index = IndexOf(algorithm);
    size_t nbytes = 0;
    Do(pass_ == Pass::kForward
           ? l.forward_nbytes(h, x_.get(), f_.get(), conv_.get(), y_.get(), index, &nbytes)
       : pass_ == Pass::kDataGradient
           ? l.data_nbytes(h, f_.get(), y_.get(), conv_.get(), x_.get(), index, &nbytes)
           : l.filter_nbytes(h, x_.get(), y_.get(), conv_.get(), f_.get(), index, &nbytes));
    return nbytes;
  }

  // The variant, or without one the first of cuDNN's ranking that is of the table and takes no
  // more workspace than there may be.
  const Algorithm& Chosen() const {
    const std::vector<const Algorithm*> known = AlgorithmsOf(pass_);
    const bool tf32 = at_.precision == Precision::kTf32;
    const auto fits = [&](const Algorithm& algorithm) {
      return !algorithm.kernel || c_.kernel == HW{algorithm.kernel, algorithm.kernel};
    };
    if (at_.variant != kHeuristic) {
      if (!fits(*known[at_.variant])) NotApplicable(at_.op, kName);
      return *known[at_.variant];
    }
    constexpr int kMost = 10;
    const Functions& l = Functions::Get();
    const Handle h = session_.handle();
    Do(l.set_math(conv_.get(), tf32 ? kTensorOpMath : kFmaMath));
    Ranked ranking[kMost];
    int count = 0;
    Do(pass_ == Pass::kForward
           ? l.forward_ranking(h, x_.get(), f_.get(), conv_.get(), y_.get(), kMost, &count, ranking)
       : pass_ == Pass::kDataGradient
           ? l.data_ranking(h, f_.get(), y_.get(), conv_.get(), x_.get(), kMost, &count, ranking)
           : l.filter_ranking(h, x_.get(), y_.get(), conv_.get(), f_.get(), kMost, &count,
                              ranking));
    for (const Ranked* r = ranking; r < ranking + count; r++)
      for (const Algorithm* algorithm : known)
        if (r->status == 0 && r->algorithm == IndexOf(*algorithm) && fits(*algorithm) &&
            IsAccurate(std::string(kName) + " " + algorithm->name, tf32) &&
            r->nbytes <= (size_t)ConvWorkspaceLimit())
          return *algorithm;
    NotApplicable(at_.op, kName);
  }

  void SetMath(const Algorithm& algorithm) const {
    const bool tf32 = at_.precision == Precision::kTf32 && !algorithm.transforms;
    Do(Functions::Get().set_math(conv_.get(), tf32 ? kTensorOpMath : kFmaMath));
  }

  void Do(Status status) const { cudnn::Check(at_.op, status); }

  const ConvCall& at_;
  const Conv& c_;
  Pass pass_;
  const cudnn::Session session_;
  const cudnn::Tensor x_, y_;
  const cudnn::Described<FilterDescriptor> f_;
  const cudnn::Described<ConvolutionDescriptor> conv_;
};

// Its sizes are int and positive.
const char* Refusal(const ConvCall&, const Conv& c) {
  constexpr int64_t kMost = INT32_MAX;
  const int64_t least = std::min({c.n, c.c, c.o, Size(c.in), Size(c.kernel), Size(c.out)});
  if (least < 1) return "an array is empty";
  const int64_t largest = std::max(c.c * Size(c.in), c.o * Size(c.out));
  if (largest > kMost / c.n || c.o * c.GroupChannels() * Size(c.kernel) > kMost)
    return "an array has more elements than its int counts";
  const bool fits =
      cudnn::FitsAxis(c.in.h, c.kernel.h, c.out.h, c.stride.h, c.pad.h, c.dilation.h) &&
      cudnn::FitsAxis(c.in.w, c.kernel.w, c.out.w, c.stride.w, c.pad.w, c.dilation.w);
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
