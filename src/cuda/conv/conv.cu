// Operators of 2-d convolution: they check arguments and dispatch to a rung of the ladder that
// conv.cuh declares, to one that is named or by the heuristic.
//
// x (n, c, in), f (o, c / groups, kernel), y (n, o, out); a gradient has the shape of its array.
// Results overlap no input. In 16 bits channels_last/channels_last.cuh computes them, between
// copies that move the channels last and back, and a rung that is named does in float32.
#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "cuda/conv/channels_last/channels_last.cuh"
#include "cuda/conv/conv.cuh"
#include "cuda/runtime/widened.cuh"

namespace dlsys {
namespace cuda {
namespace {

// The rungs, slowest first; a name of two words is a kernel of the rung before it.
const ConvAlgorithm* const kAlgorithms[] = {&kNaiveConv,   &kIm2col,  &kWinograd,  &kFft,
                                            &kImplicit,    &kCompact, &kPointwise, &kImplicitGemm,
                                            &kTensorCores, &kWgmma,   &kDepthwise, &kCudnn};

bool IsRung(const ConvAlgorithm& algorithm) { return !strchr(algorithm.name, ' '); }

// The algorithms of a pass by number: each by its own heuristic, and every variant.
struct Ladder {
  struct Entry {
    const ConvAlgorithm* algorithm;
    int variant;
  };
  std::vector<Entry> entries;
  std::vector<Algorithm> algorithms;

  explicit Ladder(Pass pass) {
    for (const ConvAlgorithm* algorithm : kAlgorithms) {
      Add(algorithm, kHeuristic, algorithm->name);
      if (!algorithm->variants) continue;
      int variant = 0;
      for (const std::string& name : algorithm->variants(pass))
        Add(algorithm, variant++, std::string(algorithm->name) + " " + name);
    }
  }

  void Add(const ConvAlgorithm* algorithm, int variant, const std::string& name) {
    entries.push_back({algorithm, variant});
    algorithms.push_back({name, algorithm->source});
  }
};

template <Pass kPass>
const Ladder& LadderOf() {
  static const Ladder* const ladder = new Ladder(kPass);
  return *ladder;
}

template <Pass kPass>
const std::vector<Algorithm>& AlgorithmsOf() {
  return LadderOf<kPass>().algorithms;
}

// auto, and the rungs that can compute a convolution.
std::string ThatCan(const ConvCall& at, const Conv& conv) {
  std::string names = "auto";
  for (const ConvAlgorithm* algorithm : kAlgorithms)
    if (IsRung(*algorithm) && !RefusalOf(*algorithm, at, conv))
      names += std::string(", ") + algorithm->name;
  return names;
}

bool SumsNothing(const Conv& c) {
  return c.n * c.GroupChannels() * c.o * Size(c.kernel) * Size(c.in) * Size(c.out) == 0;
}

// Calls run(algorithm, call) for the algorithm of a number, or by the heuristic.
template <Pass kPass, class Run>
void RunConv(const Conv& conv, int64_t number, ConvCall at, Run&& run) {
  const Ladder& ladder = LadderOf<kPass>();
  const int64_t count = (int64_t)ladder.entries.size();
  if (number < 0 || number > count)
    Fail("%s: there is no algorithm %ld, expected 0 to %ld", at.op, (long)number, (long)count);
  if (SumsNothing(conv)) return run(kImplicitGemm, at);  // the same by every rung
  if (number == 0) return RunFirst(RankConv(at, conv, kPass), at, run);
  const Ladder::Entry& entry = ladder.entries[number - 1];
  at.variant = entry.variant;
  if (const char* why = RefusalOf(*entry.algorithm, at, conv))
    FailWith(DL_NOT_APPLICABLE, "%s: algo=%s cannot compute this: %s; use %s", at.op,
             ladder.algorithms[number - 1].name.c_str(), why, ThatCan(at, conv).c_str());
  run(*entry.algorithm, at);
}

void Conv2d(const DLArray* x, const DLArray* f, DLArray* y, Struct<WindowOptions> windows,
            int64_t groups, int64_t algorithm, int64_t precision, DLStream stream) {
  const ConvCall at{"conv2d", y->ctx, stream, CheckedPrecision("conv2d", precision)};
  Enter(at.op, y, x, f);
  const Conv conv = CheckedConv(at.op, x, f, y, *windows, groups);
  const float *data = In(at.op, x), *filter = In(at.op, f);
  float* out = Out(at.op, y);
  if (!Numel(y)) return;
  RunConv<Pass::kForward>(conv, algorithm, at, [&](const ConvAlgorithm& by, const ConvCall& call) {
    by.forward(call, conv, data, filter, nullptr, out);
  });
}

void CheckBias(const char* op, const Conv& conv, const DLArray* f, const DLArray* bias) {
  if (bias->ndim != 1 || bias->shape[0] != conv.o)
    Fail("%s: bias %s does not fit filter %s", op, ShapeText(bias).c_str(), ShapeText(f).c_str());
}

void Conv2dBias(const DLArray* x, const DLArray* f, const DLArray* bias, DLArray* y,
                Struct<WindowOptions> windows, int64_t groups, int64_t algorithm, int64_t precision,
                DLStream stream) {
  const ConvCall at{"conv2d_bias", y->ctx, stream, CheckedPrecision("conv2d_bias", precision)};
  Enter(at.op, y, x, f, bias);
  const Conv conv = CheckedConv(at.op, x, f, y, *windows, groups);
  CheckBias(at.op, conv, f, bias);
  const float *data = In(at.op, x), *filter = In(at.op, f), *add = In(at.op, bias);
  float* out = Out(at.op, y);
  if (!Numel(y)) return;
  RunConv<Pass::kForward>(conv, algorithm, at, [&](const ConvAlgorithm& by, const ConvCall& call) {
    by.forward(call, conv, data, filter, add, out);
  });
}

void Conv2dDataGradient(const DLArray* f, const DLArray* dy, DLArray* dx,
                        Struct<WindowOptions> windows, int64_t groups, int64_t algorithm,
                        int64_t precision, DLStream stream) {
  const char* op = "conv2d_data_gradient";
  const ConvCall at{op, dx->ctx, stream, CheckedPrecision(op, precision)};
  Enter(at.op, dx, f, dy);
  const Conv conv = CheckedConv(at.op, dx, f, dy, *windows, groups);
  const float *filter = In(at.op, f), *gradient = In(at.op, dy);
  float* out = Out(at.op, dx);
  if (!Numel(dx)) return;
  RunConv<Pass::kDataGradient>(conv, algorithm, at,
                               [&](const ConvAlgorithm& by, const ConvCall& call) {
                                 by.data_gradient(call, conv, filter, gradient, out);
                               });
}

void Conv2dFilterGradient(const DLArray* x, const DLArray* dy, DLArray* df,
                          Struct<WindowOptions> windows, int64_t groups, int64_t algorithm,
                          int64_t precision, DLStream stream) {
  const char* op = "conv2d_filter_gradient";
  const ConvCall at{op, df->ctx, stream, CheckedPrecision(op, precision)};
  Enter(at.op, df, x, dy);
  const Conv conv = CheckedConv(at.op, x, df, dy, *windows, groups);
  const float *data = In(at.op, x), *gradient = In(at.op, dy);
  float* out = Out(at.op, df);
  if (!Numel(df)) return;
  RunConv<Pass::kFilterGradient>(conv, algorithm, at,
                                 [&](const ConvAlgorithm& by, const ConvCall& call) {
                                   by.filter_gradient(call, conv, data, gradient, out);
                                 });
}

// ---- 16 bits ----

// True where a convolution of 16 bits runs with channels last.
bool ByChannelsLast(DLContext ctx, const Conv& conv, int64_t algorithm) {
  return algorithm == 0 && !SumsNothing(conv) && channels_last::Serves(ctx, conv);
}

template <class T>
using ChannelsLast = channels_last::ChannelsLast<T>;

// bias may be null.
template <class T>
void Forward16(const channels_last::Call& at, const Conv& conv, const DLArray* x, const DLArray* f,
               const DLArray* bias, DLArray* y) {
  const ChannelsLast<T> images(at, conv.n, conv.c, conv.in), result(at, conv.n, conv.o, conv.out);
  channels_last::Forward(at, conv, images.CopyOf(In<T>(at.op, x)), In<T>(at.op, f),
                         bias ? In<T>(at.op, bias) : nullptr, result.data());
  result.CopyTo(Out<T>(at.op, y));
}

template <class T>
void Conv2d16(const DLArray* x, const DLArray* f, DLArray* y, Struct<WindowOptions> windows,
              int64_t groups, int64_t algorithm, int64_t precision, DLStream stream) {
  const channels_last::Call at{"conv2d", y->ctx, stream};
  Enter(at.op, y, x, f);
  const Conv conv = CheckedConv(at.op, x, f, y, *windows, groups);
  if (ByChannelsLast(at.ctx, conv, algorithm)) return Forward16<T>(at, conv, x, f, nullptr, y);
  ::dlsys::InFloat32<Widening, T, Conv2d>::Run(x, f, y, windows, groups, algorithm, precision,
                                               stream);
}

template <class T>
void Conv2dBias16(const DLArray* x, const DLArray* f, const DLArray* bias, DLArray* y,
                  Struct<WindowOptions> windows, int64_t groups, int64_t algorithm,
                  int64_t precision, DLStream stream) {
  const channels_last::Call at{"conv2d_bias", y->ctx, stream};
  Enter(at.op, y, x, f, bias);
  const Conv conv = CheckedConv(at.op, x, f, y, *windows, groups);
  CheckBias(at.op, conv, f, bias);
  if (ByChannelsLast(at.ctx, conv, algorithm)) return Forward16<T>(at, conv, x, f, bias, y);
  ::dlsys::InFloat32<Widening, T, Conv2dBias>::Run(x, f, bias, y, windows, groups, algorithm,
                                                   precision, stream);
}

template <class T>
void DataGradient16(const DLArray* f, const DLArray* dy, DLArray* dx, Struct<WindowOptions> windows,
                    int64_t groups, int64_t algorithm, int64_t precision, DLStream stream) {
  const channels_last::Call at{"conv2d_data_gradient", dx->ctx, stream};
  Enter(at.op, dx, f, dy);
  const Conv conv = CheckedConv(at.op, dx, f, dy, *windows, groups);
  if (!ByChannelsLast(at.ctx, conv, algorithm))
    return ::dlsys::InFloat32<Widening, T, Conv2dDataGradient>::Run(f, dy, dx, windows, groups,
                                                                    algorithm, precision, stream);
  const ChannelsLast<T> gradient(at, conv.n, conv.o, conv.out), result(at, conv.n, conv.c, conv.in);
  channels_last::DataGradient(at, conv, In<T>(at.op, f), gradient.CopyOf(In<T>(at.op, dy)),
                              result.data());
  result.CopyTo(Out<T>(at.op, dx));
}

template <class T>
void FilterGradient16(const DLArray* x, const DLArray* dy, DLArray* df,
                      Struct<WindowOptions> windows, int64_t groups, int64_t algorithm,
                      int64_t precision, DLStream stream) {
  const channels_last::Call at{"conv2d_filter_gradient", df->ctx, stream};
  Enter(at.op, df, x, dy);
  const Conv conv = CheckedConv(at.op, x, df, dy, *windows, groups);
  if (!ByChannelsLast(at.ctx, conv, algorithm))
    return ::dlsys::InFloat32<Widening, T, Conv2dFilterGradient>::Run(x, dy, df, windows, groups,
                                                                      algorithm, precision, stream);
  const ChannelsLast<T> images(at, conv.n, conv.c, conv.in), gradient(at, conv.n, conv.o, conv.out);
  channels_last::FilterGradient(at, conv, images.CopyOf(In<T>(at.op, x)),
                                gradient.CopyOf(In<T>(at.op, dy)), Out<T>(at.op, df));
}

// Of a function for float32, and of a template for both types of 16 bits.
#define DLSYS_CONVOLUTION(name, Function, Template)                    \
  DLSYS_KERNEL(cuda, name, Function);                                  \
  DLSYS_KERNEL_OF(cuda, name, #name, DL_BFLOAT16, Template<bfloat16>); \
  DLSYS_KERNEL_OF(cuda, name, #name, DL_FLOAT16, Template<float16>)
DLSYS_CONVOLUTION(conv2d, Conv2d, Conv2d16);
DLSYS_CONVOLUTION(conv2d_bias, Conv2dBias, Conv2dBias16);
DLSYS_CONVOLUTION(conv2d_data_gradient, Conv2dDataGradient, DataGradient16);
DLSYS_CONVOLUTION(conv2d_filter_gradient, Conv2dFilterGradient, FilterGradient16);
#undef DLSYS_CONVOLUTION
DLSYS_ALGORITHMS(cuda, conv2d, AlgorithmsOf<Pass::kForward>);
DLSYS_ALGORITHMS(cuda, conv2d_bias, AlgorithmsOf<Pass::kForward>);
DLSYS_ALGORITHMS(cuda, conv2d_data_gradient, AlgorithmsOf<Pass::kDataGradient>);
DLSYS_ALGORITHMS(cuda, conv2d_filter_gradient, AlgorithmsOf<Pass::kFilterGradient>);

}  // namespace

int64_t ConvWorkspaceLimit() {
  static const int64_t limit = [] {
    constexpr int64_t kUsualMib = 1024;  // as much as is worth its speed
    const char* text = getenv("DLSYS_CONV_WORKSPACE");
    return (text && *text ? atoll(text) : kUsualMib) << 20;
  }();
  return limit;
}

int64_t ImagesAtOnce(const ConvCall& at, const char* rung, int64_t count, int64_t nbytes,
                     int64_t fixed) {
  const int64_t fitting = (ConvWorkspaceLimit() - fixed) / std::max<int64_t>(nbytes, 1);
  if (fitting < 1)
    FailWith(DL_NOT_APPLICABLE,
             "%s: algo=%s takes %ld MiB of workspace, and DLSYS_CONV_WORKSPACE allows %ld; use "
             "auto, naive, implicit",
             at.op, rung, (long)((fixed + nbytes) >> 20), (long)(ConvWorkspaceLimit() >> 20));
  return std::min(fitting, count);
}

}  // namespace cuda
}  // namespace dlsys
