// Operators of 2-d convolution over images with channels last, of 16 bits or of float32 at tf32: x
// (n, in, c), y (n, out, o), filters (o, c / groups, kernel); a gradient has the shape of its
// array. channels_last/channels_last.cu computes them; what it cannot of float32 runs between
// copies that move the channels first and back. Results overlap no input but dz its addend.
#include <algorithm>

#include "cuda/conv/channels_last/depthwise.cuh"
#include "cuda/conv/channels_last/groups.cuh"
#include "cuda/conv/channels_last/hopper.cuh"
#include "cuda/conv/conv.cuh"
#include "cuda/gemm/hopper/hopper.cuh"
#include "cuda/runtime/launch.cuh"

namespace dlsys {
namespace cuda {
namespace {

// The shape of images (n, h, w, c) as (n, c, h, w).
class AsNchw {
 public:
  AsNchw(const char* op, const DLArray* images) : array_(*images) {
    CheckNchw(op, images);
    const int64_t* s = images->shape;
    const int64_t shape[4] = {s[0], s[3], s[1], s[2]};
    std::copy(shape, shape + 4, shape_);
    array_.shape = shape_;
  }
  AsNchw(const AsNchw&) = delete;
  const DLArray* get() const { return &array_; }

 private:
  DLArray array_;
  int64_t shape_[4];
};

Conv ConvOf(const char* op, const DLArray* x, const DLArray* f, const DLArray* y,
            Struct<WindowOptions> windows, int64_t groups) {
  return CheckedConv(op, AsNchw(op, x).get(), f, AsNchw(op, y).get(), *windows, groups);
}

// The convolution, checked, of which no array is empty.
Conv CheckedCall(const char* op, const DLArray* x, const DLArray* f, const DLArray* y,
                 Struct<WindowOptions> windows, int64_t groups) {
  Enter(op, x, f, y);
  const Conv conv = ConvOf(op, x, f, y, windows, groups);
  if ((x->dtype != DL_FLOAT32 && !channels_last::Serves(x->ctx, conv)) || !Numel(x) || !Numel(y))
    Fail("%s: %ld groups of %s by %s are not for channels last", op, (long)groups,
         ShapeText(x).c_str(), ShapeText(f).c_str());
  return conv;
}

// The algorithms by number, from 1 on, of the rungs `implicit` and `depthwise`.
struct Choices {
  struct Choice {
    channels_last::Kernel kernel;
    int tiling;
  };
  std::vector<Choice> choices;
  std::vector<Algorithm> algorithms;

  Choices() {
    using channels_last::Kernel;
    Add("implicit", Kernel::kHeuristic, {});
    Add("implicit mma", Kernel::kMma, channels_last::WgradTilings());
    Add("implicit wgmma", Kernel::kWgmma, channels_last::WgmmaTilings());
    Add("implicit gemm", Kernel::kGemm, HopperTilings());
    Add("implicit halo", Kernel::kHalo, {});
    Add("implicit groups", Kernel::kGroups, {});
    Add("depthwise", Kernel::kDepthwise, {});
  }
  void Add(const std::string& name, channels_last::Kernel kernel,
           const std::vector<std::string>& tilings) {
    for (int k = kHeuristic; k < (int)tilings.size(); k++) {
      choices.push_back({kernel, k});
      algorithms.push_back({k < 0 ? name : name + " " + tilings[k], nullptr});
    }
  }
};
const Choices& AllChoices() {
  static const Choices* const all = new Choices;
  return *all;
}
const std::vector<Algorithm>& AlgorithmsOf() { return AllChoices().algorithms; }

channels_last::Call CallOf(const char* op, DLContext ctx, DLStream stream, int64_t algorithm) {
  const auto& choices = AllChoices().choices;
  if (algorithm < 0 || algorithm > (int64_t)choices.size())
    Fail("%s: there is no algorithm %ld, expected 0 to %ld", op, (long)algorithm,
         (long)choices.size());
  const Choices::Choice choice = choices[algorithm ? algorithm - 1 : 0];
  return {op, ctx, stream, choice.kernel, choice.tiling};
}

// ---- float32 with channels first ----

using ChannelsFirst = channels_last::ChannelsFirst<float>;

bool HasKernel(const channels_last::Call& at, const Conv& c, Pass pass, const float* x,
               const float* f, const float* y) {
  return at.kernel != channels_last::Kernel::kHeuristic || channels_last::IsDepthwise(c) ||
         !channels_last::GroupsRefusal(at, c, x, f, y) ||
         !channels_last::HopperRefusal(at, c, pass, x, f, y);
}
template <class Run>
void RunFirstOf(const channels_last::Call& at, const Conv& c, Pass pass, Run&& run) {
  const ConvCall call{at.op, at.ctx, at.stream, Precision::kTf32};
  RunFirst(RankConv(call, c, pass), call, run);
}

template <class T>
void Convolve(const channels_last::Call& at, const Conv& c, const T* x, const T* f, T* y,
              const channels_last::Statistics* statistics = nullptr) {
  if constexpr (sizeof(T) == 4)
    if (!HasKernel(at, c, Pass::kForward, x, f, y)) {
      const ChannelsFirst in(at, c.n, c.c, c.in), out(at, c.n, c.o, c.out);
      in.CopyOf(x);
      RunFirstOf(at, c, Pass::kForward, [&](const ConvAlgorithm& by, const ConvCall& call) {
        by.forward(call, c, in.data(), f, nullptr, out.data());
      });
      out.CopyTo(y);
      if (statistics)
        ChannelStatistics(at.op, at.ctx, y, Channels(c.n * Size(c.out), c.o, 1), statistics->mean,
                          statistics->variance, at.stream);
      return;
    }
  if (statistics) return channels_last::ForwardWithStatistics<T>(at, c, x, f, y, *statistics);
  channels_last::Forward<T>(at, c, x, f, nullptr, y);
}
template <class T>
void ToData(const channels_last::Call& at, const Conv& c, const T* f, const T* dy, T* dx) {
  if constexpr (sizeof(T) == 4)
    if (!HasKernel(at, c, Pass::kDataGradient, dx, f, dy)) {
      const ChannelsFirst in(at, c.n, c.o, c.out), out(at, c.n, c.c, c.in);
      in.CopyOf(dy);
      RunFirstOf(at, c, Pass::kDataGradient, [&](const ConvAlgorithm& by, const ConvCall& call) {
        by.data_gradient(call, c, f, in.data(), out.data());
      });
      return out.CopyTo(dx);
    }
  channels_last::DataGradient(at, c, f, dy, dx);
}
template <class T>
void ToDataWithSums(const channels_last::Call& at, const Conv& c, const T* f, const T* dy, T* dz,
                    const channels_last::GradientSums& sums) {
  if (channels_last::HopperMakesSums(c, sums) &&
      !channels_last::HopperRefusal(at, c, Pass::kDataGradient, dz, f, dy))
    return channels_last::DataGradientOnHopper(at, c, f, dy, dz, &sums);
  const Channels shape(c.n * Size(c.in), c.c, 1);
  const auto add = [&](const T* addend) {
    ReluSumsByBits(at.op, at.ctx, (const T*)sums.x, shape, sums.moments, sums.bits, addend, dz,
                   sums.dscale, sums.dbias, at.stream);
  };
  if (sums.addend != dz) {
    ToData(at, c, f, dy, dz);
    return add((const T*)sums.addend);
  }
  const Scratch dx(at.ctx, shape.Numel() * (int64_t)sizeof(T), at.stream);
  ToData(at, c, f, dy, (T*)dx.data());
  add((const T*)dx.data());
}
template <class T>
void ToFilter(const channels_last::Call& at, const Conv& c, const T* x, const T* dy, T* df) {
  if constexpr (sizeof(T) == 4)
    if (!HasKernel(at, c, Pass::kFilterGradient, x, df, dy)) {
      const ChannelsFirst images(at, c.n, c.c, c.in), gradient(at, c.n, c.o, c.out);
      images.CopyOf(x);
      gradient.CopyOf(dy);
      return RunFirstOf(at, c, Pass::kFilterGradient,
                        [&](const ConvAlgorithm& by, const ConvCall& call) {
                          by.filter_gradient(call, c, images.data(), gradient.data(), df);
                        });
    }
  channels_last::FilterGradient(at, c, x, dy, df);
}

// ---- operators ----

template <class T>
void Forward(const DLArray* x, const DLArray* f, DLArray* y, Struct<WindowOptions> windows,
             int64_t groups, int64_t algorithm, DLStream stream) {
  const channels_last::Call at = CallOf("conv2d_channels_last", y->ctx, stream, algorithm);
  const Conv conv = CheckedCall(at.op, x, f, y, windows, groups);
  Convolve(at, conv, In<T>(at.op, x), In<T>(at.op, f), Out<T>(at.op, y));
}

// mean and variance (o) are those of each filter's results.
template <class T>
void ForwardStatistics(const DLArray* x, const DLArray* f, DLArray* y, DLArray* mean,
                       DLArray* variance, Struct<WindowOptions> windows, int64_t groups,
                       int64_t algorithm, DLStream stream) {
  const channels_last::Call at =
      CallOf("conv2d_channels_last_statistics", y->ctx, stream, algorithm);
  Enter(at.op, y, mean, variance);
  const Conv conv = CheckedCall(at.op, x, f, y, windows, groups);
  const channels_last::Statistics statistics{ChannelResult(at.op, mean, conv.o),
                                             ChannelResult(at.op, variance, conv.o)};
  Convolve(at, conv, In<T>(at.op, x), In<T>(at.op, f), Out<T>(at.op, y), &statistics);
}

template <class T>
void DataGradient(const DLArray* f, const DLArray* dy, DLArray* dx, Struct<WindowOptions> windows,
                  int64_t groups, int64_t algorithm, DLStream stream) {
  const channels_last::Call at =
      CallOf("conv2d_data_gradient_channels_last", dx->ctx, stream, algorithm);
  const Conv conv = CheckedCall(at.op, dx, f, dy, windows, groups);
  ToData(at, conv, In<T>(at.op, f), In<T>(at.op, dy), Out<T>(at.op, dx));
}

// dz = the data gradient, plus an addend if there is one, where the bit of an element is set, and
// its sums for batch normalization: x, as the addend, is of the data's shape, but may be
// (positions, channels).
template <class T>
void DataGradientSums(const DLArray* f, const DLArray* dy, const DLArray* bits, const DLArray* x,
                      const DLArray* mean, const DLArray* variance, const DLArrayList* addends,
                      float eps, DLArray* dz, DLArray* dscale, DLArray* dbias,
                      Struct<WindowOptions> windows, int64_t groups, DLStream stream) {
  const char* op = "conv2d_data_gradient_channels_last_sums";
  Enter(op, dz, bits, x, mean, variance, dscale, dbias);
  const Conv conv = CheckedCall(op, dz, f, dy, windows, groups);
  const auto like_dz = [&](const DLArray* a) {
    Enter(op, dz, a);
    if (Numel(a) != Numel(dz))
      Fail("%s: expected %ld elements, got shape %s", op, (long)Numel(dz), ShapeText(a).c_str());
    return In<T>(op, a);
  };
  if (addends->count > 1) Fail("%s: expected one addend or none", op);
  if (Numel(bits) != CeilDiv(Numel(dz), 8))
    Fail("%s: expected %ld bytes of bits, got shape %s", op, (long)CeilDiv(Numel(dz), 8),
         ShapeText(bits).c_str());
  const channels_last::GradientSums sums{like_dz(x),
                                         addends->count ? like_dz(addends->arrays[0]) : nullptr,
                                         In<uint8_t>(op, bits),
                                         MomentsOf(op, mean, variance, conv.c, eps),
                                         ChannelResult(op, dscale, conv.c),
                                         ChannelResult(op, dbias, conv.c)};
  ToDataWithSums({op, dz->ctx, stream}, conv, In<T>(op, f), In<T>(op, dy), Out<T>(op, dz), sums);
}

template <class T>
void FilterGradient(const DLArray* x, const DLArray* dy, DLArray* df, Struct<WindowOptions> windows,
                    int64_t groups, int64_t algorithm, DLStream stream) {
  const channels_last::Call at =
      CallOf("conv2d_filter_gradient_channels_last", df->ctx, stream, algorithm);
  const Conv conv = CheckedCall(at.op, x, df, dy, windows, groups);
  ToFilter(at, conv, In<T>(at.op, x), In<T>(at.op, dy), Out<T>(at.op, df));
}

// Of x, f and y, which a pass has as inputs or as its result.
template <Pass kPass>
bool Fits(const DLArray* x, const DLArray* f, const DLArray* y, Struct<WindowOptions> windows,
          int64_t groups) {
  if (!Numel(x) || !Numel(y) || !Numel(f)) return false;
  const channels_last::Call at{"conv2d_channels_last", y->ctx, nullptr};
  const Conv conv = ConvOf(at.op, x, f, y, windows, groups);
  if (y->dtype != DL_FLOAT32) return channels_last::Serves(y->ctx, conv);
  const float* const none = nullptr;
  if (channels_last::IsDepthwise(conv) || !channels_last::GroupsRefusal(at, conv, none, none, none))
    return true;
  return !channels_last::HopperRefusal(at, conv, kPass, none, none, none) &&
         channels_last::PaysInFloat32(y->ctx, conv);
}
bool FitsForward(const DLArray* x, const DLArray* f, DLArray* y, Struct<WindowOptions> windows,
                 int64_t groups, int64_t) {
  return Fits<Pass::kForward>(x, f, y, windows, groups);
}
bool FitsDataGradient(const DLArray* f, const DLArray* dy, DLArray* dx,
                      Struct<WindowOptions> windows, int64_t groups, int64_t) {
  return Fits<Pass::kDataGradient>(dx, f, dy, windows, groups);
}
bool FitsFilterGradient(const DLArray* x, const DLArray* dy, DLArray* df,
                        Struct<WindowOptions> windows, int64_t groups, int64_t) {
  return Fits<Pass::kFilterGradient>(x, df, dy, windows, groups);
}

#define DLSYS_CHANNELS_LAST(name, Template)                            \
  DLSYS_KERNEL_OF(cuda, name, #name, DL_FLOAT32, Template<float>);     \
  DLSYS_KERNEL_OF(cuda, name, #name, DL_BFLOAT16, Template<bfloat16>); \
  DLSYS_KERNEL_OF(cuda, name, #name, DL_FLOAT16, Template<float16>)
DLSYS_CHANNELS_LAST(conv2d_channels_last, Forward);
DLSYS_CHANNELS_LAST(conv2d_data_gradient_channels_last, DataGradient);
DLSYS_CHANNELS_LAST(conv2d_filter_gradient_channels_last, FilterGradient);
DLSYS_CHANNELS_LAST(conv2d_channels_last_statistics, ForwardStatistics);
DLSYS_CHANNELS_LAST(conv2d_data_gradient_channels_last_sums, DataGradientSums);
#undef DLSYS_CHANNELS_LAST
DLSYS_FITS(cuda, conv2d_channels_last, FitsForward);
DLSYS_FITS(cuda, conv2d_data_gradient_channels_last, FitsDataGradient);
DLSYS_FITS(cuda, conv2d_filter_gradient_channels_last, FitsFilterGradient);
DLSYS_ALGORITHMS(cuda, conv2d_channels_last, AlgorithmsOf);
DLSYS_ALGORITHMS(cuda, conv2d_channels_last_statistics, AlgorithmsOf);
DLSYS_ALGORITHMS(cuda, conv2d_data_gradient_channels_last, AlgorithmsOf);
DLSYS_ALGORITHMS(cuda, conv2d_filter_gradient_channels_last, AlgorithmsOf);

}  // namespace
}  // namespace cuda
}  // namespace dlsys
