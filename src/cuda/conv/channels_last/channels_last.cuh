// Convolution with channels last, of floats of 16 bits or of float32 at tf32: x (n, in, c), y (n,
// out, o), a gradient of the shape of its array; filters stay (o, c / groups, kernel). All
// contiguous, and they overlap nowhere but where it is said. channels_last/channels_last.cu has the
// algorithm, channels_last/groups.cu that of few channels a group, channels_last/depthwise.cu of
// one.
#pragma once
#include "cuda/gemm/gemm.cuh"
#include "cuda/norm/norm.cuh"
#include "operators/conv_geometry.h"

namespace dlsys {
namespace cuda {
namespace channels_last {

// kMma is implicit GEMM by mma, from sm_80 on. For sm_90a, kWgmma is the same by wgmma and TMA,
// kHalo reads images once for all kernel offsets, and kGemm is the GEMM that a 1 x 1 filter at
// stride 1 is. kGroups is by mma for groups of few channels, kDepthwise direct for groups of one.
enum class Kernel { kHeuristic, kMma, kWgmma, kHalo, kGemm, kGroups, kDepthwise };

// The operator's name for messages, where it runs, and by which kernel and which of its tilings.
// `planes`, of float32: the images that are not gathered, which are y or, of a data gradient, dx,
// have their channels first.
struct Call {
  const char* op;
  DLContext ctx;
  DLStream stream;
  Kernel kernel = Kernel::kHeuristic;
  int tiling = kHeuristic;
  bool planes = false;
};

// True where it computes a convolution of 16 bits: from sm_80 on, sizes within int, groups of
// enough channels or that channels_last/groups.cuh or channels_last/depthwise.cuh is for. Of
// float32 there is what these and channels_last/hopper.cuh have.
bool Serves(DLContext ctx, const Conv& conv);

// Of each filter's results as they are stored, (o): mean and variance.
struct Statistics {
  float *mean, *variance;
};

// relu's gradient of the data gradient plus an addend, and its sums for the batch normalization
// that relu's argument came from, or from a sum with it.
struct GradientSums {
  // What was normalized, and the addend, of the data's shape; dz may lie over the addend, which may
  // be null.
  const void *x, *addend;
  const uint8_t* bits;  // of relu's positive results
  BatchMoments moments;
  float *dscale, *dbias;  // (c)
};

// bias may be null; T is bfloat16, float16 or float.
template <class T>
void Forward(const Call& at, const Conv& conv, const T* x, const T* f, const T* bias, T* y);
template <class T>
void ForwardWithStatistics(const Call& at, const Conv& conv, const T* x, const T* f, T* y,
                           const Statistics& statistics);
template <class T>
void DataGradient(const Call& at, const Conv& conv, const T* f, const T* dy, T* dx);
template <class T>
void FilterGradient(const Call& at, const Conv& conv, const T* x, const T* dy, T* df);

// y (n, cols, rows) = x (n, rows, cols), each transposed.
template <class T>
void SwapAxes(const Call& at, const T* x, int64_t n, int64_t rows, int64_t cols, T* y);

// Images (n, channels, image) in scratch memory, in the layout that their caller's are not in, with
// the channels last or first: a copy, or room for a result.
template <class T, bool kLast>
class MovedImages {
 public:
  // Fails with DL_NOT_APPLICABLE where they take more than `limit` bytes.
  MovedImages(const Call& at, int64_t n, int64_t channels, HW image, int64_t limit = INT64_MAX)
      : at_(at),
        n_(n),
        rows_(kLast ? channels : Size(image)),
        cols_(kLast ? Size(image) : channels),
        scratch_(at.ctx, NbytesOf(at, n * channels * Size(image), limit), at.stream) {}
  const T* CopyOf(const T* x) const {
    SwapAxes(at_, x, n_, rows_, cols_, data());
    return data();
  }
  void CopyTo(T* x) const { SwapAxes(at_, data(), n_, cols_, rows_, x); }
  T* data() const { return (T*)scratch_.data(); }

 private:
  static int64_t NbytesOf(const Call& at, int64_t numel, int64_t limit) {
    const int64_t nbytes = numel * (int64_t)sizeof(T);
    if (nbytes > limit)
      FailWith(
          DL_NOT_APPLICABLE,
          "%s: images whose channels are moved take %ld MiB of workspace, and %ld are allowed; "
          "use auto, naive, implicit",
          at.op, (long)(nbytes >> 20), (long)(limit >> 20));
    return nbytes;
  }

  const Call at_;
  const int64_t n_, rows_, cols_;  // of an image as the caller has it
  const Scratch scratch_;
};
template <class T>
using ChannelsLast = MovedImages<T, true>;
template <class T>
using ChannelsFirst = MovedImages<T, false>;

}  // namespace channels_last
}  // namespace cuda
}  // namespace dlsys
