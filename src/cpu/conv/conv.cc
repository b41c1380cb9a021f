// Operators of 2-d convolution: they check arguments and dispatch to an algorithm of conv.h. The
// last argument, the precision, changes nothing: all is float32. Arrays are contiguous, NCHW, and
// outputs overlap no input.
#include "cpu/conv/conv.h"

#include <algorithm>
#include <string>

#include "cpu/runtime/parallel.h"
#include "cpu/runtime/widened.h"
#include "math/int_math.h"

namespace dlsys {
namespace cpu {
namespace {

constexpr int64_t kFewChannels = 16;   // with fewer, Winograd's transforms cost more than they save
constexpr double kWinogradCost = 1.3;  // of its products and transforms, in products of implicit
constexpr int64_t kFilterTiles = 60;   // whose products take as long as the filters' transforms
// With fewer tiles and as many filters, times channels, these take longer to transform than to
// read.
constexpr int64_t kFewTiles = 32, kManyFilters = 65536;
constexpr int64_t kFewPositions = 16;  // of an image: implicit's tiles, of one image, are not full
constexpr char kOfWinograd[] = "3 x 3 filters at stride 1 without dilation";

bool FitsAll(const Conv&) { return true; }
bool FitsDepthwise(const Conv& conv) { return conv.Depthwise(); }

// The rungs of the ladder, slowest first; depthwise is beside it. A rung with variants is one of
// them by its own name.
constexpr ConvAlgorithm kAlgorithms[] = {
    {"naive", "", FitsAll, NaiveForward, NaiveDataGradient, NaiveFilterGradient},
    {"im2col", "", FitsAll, Im2colForward, Im2colDataGradient, Im2colFilterGradient},
    {"fft", "filters that are not empty", FftFits, FftForward, FftDataGradient, FftFilterGradient},
    {"implicit", "", FitsAll, GemmForward, GemmDataGradient, GemmFilterGradient},
    {"winograd", kOfWinograd, WinogradFits, WinogradForward<2>, WinogradDataGradient<2>,
     WinogradFilterGradient<2>},
    {"winograd 2x2", kOfWinograd, WinogradFits, WinogradForward<2>, WinogradDataGradient<2>,
     WinogradFilterGradient<2>},
    {"winograd 4x4", kOfWinograd, WinogradFits, WinogradForward<4>, WinogradDataGradient<4>,
     WinogradFilterGradient<4>},
    {"depthwise", "one channel a group", FitsDepthwise, DepthwiseForward, DirectDataGradient,
     DepthwiseFilterGradient},
};
constexpr int kIm2col = 1, kImplicit = 3, kWinograd2 = 5, kWinograd4 = 6, kDepthwise = 7;
constexpr int64_t kCount = sizeof kAlgorithms / sizeof *kAlgorithms;

// Made when the library is loaded.
const std::vector<Algorithm>* const all_algorithms = [] {
  auto* names = new std::vector<Algorithm>;
  for (const ConvAlgorithm& algorithm : kAlgorithms) names->push_back({algorithm.name});
  return names;
}();
const std::vector<Algorithm>& AllAlgorithms() { return *all_algorithms; }

// Multiplications of Winograd's tiles of m x m outputs for a filter and a channel.
int64_t OfTiles(const Conv& c, int64_t m, int64_t more_tiles = 0) {
  return (m + 2) * (m + 2) * (c.n * CeilDiv(c.out.h, m) * CeilDiv(c.out.w, m) + more_tiles);
}

// Winograd's tiles, where they multiply less and there are channels enough to make up for the
// transforms; null elsewhere. Those of 4 x 4 outputs multiply least, but where images are small the
// transforms of their filters count. Both round nearly as a direct convolution does.
const ConvAlgorithm* Winograd(const Conv& c) {
  if (!WinogradFits(c) || std::min(c.GroupChannels(), c.GroupFilters()) < kFewChannels)
    return nullptr;
  const bool large = OfTiles(c, 4, kFilterTiles) < OfTiles(c, 2, kFilterTiles);
  const int64_t channels = RoundUp(c.GroupChannels(), 16) * RoundUp(c.GroupFilters(), 32);
  const double by_tiles = (double)(OfTiles(c, large ? 4 : 2) * channels);
  const double direct = 9. * (double)(c.n * Size(c.out) * c.GroupChannels() * c.GroupFilters());
  if (by_tiles * kWinogradCost >= direct) return nullptr;
  return &kAlgorithms[large ? kWinograd4 : kWinograd2];
}

// Where filters are packed or transformed once and kept.
const ConvAlgorithm& HeuristicKept(const Conv& conv) {
  if (conv.Depthwise()) return kAlgorithms[kDepthwise];
  const ConvAlgorithm* winograd = Winograd(conv);
  return winograd ? *winograd : kAlgorithms[kImplicit];
}

// A batch of small images is one product over all of their positions, which reads filters once and
// as they are.
bool SmallImages(const Conv& c, const ConvAlgorithm& otherwise) {
  if (c.groups != 1 || Im2colImages(c) < c.n || std::min(c.c, c.o) < kFewChannels) return false;
  if (&otherwise == &kAlgorithms[kImplicit]) return c.n > 1 && Size(c.out) <= kFewPositions;
  return c.c * c.o >= kManyFilters && c.n * CeilDiv(c.out.h, 2) * CeilDiv(c.out.w, 2) < kFewTiles;
}

const ConvAlgorithm& Heuristic(const Conv& conv) {
  const ConvAlgorithm& found = HeuristicKept(conv);
  return SmallImages(conv, found) ? kAlgorithms[kIm2col] : found;
}

[[noreturn]] void Refuse(const char* op, const ConvAlgorithm& algorithm, const Conv& conv) {
  std::string others;
  for (const ConvAlgorithm& other : kAlgorithms)
    if (other.fits(conv)) others += std::string(others.empty() ? "" : ", ") + other.name;
  FailWith(DL_NOT_APPLICABLE, "%s: %s is for %s; use %s", op, algorithm.name, algorithm.serves,
           others.c_str());
}

// Algorithm 0 is the heuristic, k the k-th of the table.
const ConvAlgorithm& Choose(const char* op, const Conv& conv, int64_t algorithm) {
  if (algorithm < 0 || algorithm > kCount)
    Fail("%s: there is no algorithm %ld, expected 0 to %ld", op, (long)algorithm, (long)kCount);
  if (algorithm == 0) return Heuristic(conv);
  const ConvAlgorithm& chosen = kAlgorithms[algorithm - 1];
  if (!chosen.fits(conv)) Refuse(op, chosen, conv);
  return chosen;
}

void RunForward(const char* op, const DLArray* x, const DLArray* f, const float* bias, DLArray* y,
                const WindowOptions& windows, int64_t groups, int64_t algorithm) {
  const float *data = Input(op, x), *filter = Input(op, f);
  float* out = Output(op, y);
  const Conv conv = CheckedConv(op, x, f, y, windows, groups);
  if (Numel(y)) Choose(op, conv, algorithm).forward(conv, data, filter, bias, out);
}

void Conv2d(const DLArray* x, const DLArray* f, DLArray* y, Struct<WindowOptions> windows,
            int64_t groups, int64_t algorithm, int64_t) {
  RunForward("conv2d", x, f, nullptr, y, *windows, groups, algorithm);
}

void Conv2dBias(const DLArray* x, const DLArray* f, const DLArray* bias, DLArray* y,
                Struct<WindowOptions> windows, int64_t groups, int64_t algorithm, int64_t) {
  const char* op = "conv2d_bias";
  const float* add = Input(op, bias);
  if (f->ndim != 4 || bias->ndim != 1 || bias->shape[0] != f->shape[0])
    Fail("%s: bias %s does not fit filter %s", op, ShapeText(bias).c_str(), ShapeText(f).c_str());
  RunForward(op, x, f, add, y, *windows, groups, algorithm);
}

// ---- kept filters ----

// Of a store: a word that is 1 once the filters are in it, and what begins behind it.
constexpr int64_t kHeader = 16;  // floats

// The floats of the filters that a convolution keeps, 0 where its algorithm packs none.
int64_t KeptNumel(const ConvAlgorithm& algorithm, const Conv& conv) {
  if (&algorithm == &kAlgorithms[kImplicit]) return GemmFiltersNumel(conv);
  if (&algorithm == &kAlgorithms[kWinograd2]) return WinogradFiltersNumel<2>(conv);
  if (&algorithm == &kAlgorithms[kWinograd4]) return WinogradFiltersNumel<4>(conv);
  return 0;
}

// Its workspace is the size of the store that conv2d_kept takes, none where nothing is kept.
void Conv2dStore(const DLArray* x, const DLArray* f, DLArray* y, Struct<WindowOptions> windows,
                 int64_t groups) {
  const Conv conv = CheckedConv("conv2d_store", x, f, y, *windows, groups);
  const int64_t numel = Numel(y) && Numel(f) ? KeptNumel(HeuristicKept(conv), conv) : 0;
  const ScratchArray<float> store(numel ? kHeader + numel : 0);
}

// bias: none or one (o); residual: none or one of y's shape. store: zeros in the first run, then
// what that has written.
void Conv2dKept(const DLArray* x, const DLArray* f, const DLArrayList* bias,
                const DLArrayList* residual, const DLArray* store, DLArray* y,
                Struct<WindowOptions> windows, int64_t groups, int64_t relu) {
  const char* op = "conv2d_kept";
  const float *data = Input(op, x), *filter = Input(op, f);
  float* out = Output(op, y);
  const Conv conv = CheckedConv(op, x, f, y, *windows, groups);
  const ConvAlgorithm& algorithm = HeuristicKept(conv);
  if (!KeptNumel(algorithm, conv) || Numel(store) < kHeader + KeptNumel(algorithm, conv) ||
      bias->count > 1 || residual->count > 1)
    Fail("%s: expected a store of conv2d_store, got %s", op, ShapeText(store).c_str());
  const float* add = bias->count ? Input(op, bias->arrays[0]) : nullptr;
  if (bias->count && Numel(bias->arrays[0]) != conv.o) Fail("%s: expected a bias a filter", op);
  if (residual->count) CheckSameShape(op, residual->arrays[0], y);
  float* const kept_at = (float*)Input(op, store);
  volatile int32_t* const ready = (int32_t*)kept_at;
  const Kept kept{kept_at + kHeader, !Workspace::Querying() && *ready == 1,
                  residual->count ? Input(op, residual->arrays[0]) : nullptr, relu != 0};
  if (&algorithm == &kAlgorithms[kImplicit])
    GemmForwardKept(conv, data, filter, add, kept, out);
  else if (&algorithm == &kAlgorithms[kWinograd2])
    WinogradForwardKept<2>(conv, data, filter, add, kept, out);
  else
    WinogradForwardKept<4>(conv, data, filter, add, kept, out);
  if (!Workspace::Querying()) *ready = 1;
}

void Conv2dDataGradient(const DLArray* f, const DLArray* dy, DLArray* dx,
                        Struct<WindowOptions> windows, int64_t groups, int64_t algorithm, int64_t) {
  const char* op = "conv2d_data_gradient";
  const float *filter = Input(op, f), *gradient = Input(op, dy);
  float* out = Output(op, dx);
  const Conv conv = CheckedConv(op, dx, f, dy, *windows, groups);
  if (Numel(dx)) Choose(op, conv, algorithm).data_gradient(conv, filter, gradient, out);
}

void Conv2dFilterGradient(const DLArray* x, const DLArray* dy, DLArray* df,
                          Struct<WindowOptions> windows, int64_t groups, int64_t algorithm,
                          int64_t) {
  const char* op = "conv2d_filter_gradient";
  const float *data = Input(op, x), *gradient = Input(op, dy);
  float* out = Output(op, df);
  const Conv conv = CheckedConv(op, x, df, dy, *windows, groups);
  if (!Numel(df)) return;
  if (!Numel(dy)) return Serially([&] { std::fill(out, out + Numel(df), 0.f); });
  Choose(op, conv, algorithm).filter_gradient(conv, data, gradient, out);
}

DLSYS_KERNEL(cpu, conv2d, Conv2d);
DLSYS_KERNEL_WIDENED(cpu, conv2d, Conv2d);
DLSYS_KERNEL(cpu, conv2d_bias, Conv2dBias);
DLSYS_KERNEL_WIDENED(cpu, conv2d_bias, Conv2dBias);
DLSYS_KERNEL(cpu, conv2d_store, Conv2dStore);
DLSYS_KERNEL(cpu, conv2d_kept, Conv2dKept);
DLSYS_KERNEL(cpu, conv2d_data_gradient, Conv2dDataGradient);
DLSYS_KERNEL_WIDENED(cpu, conv2d_data_gradient, Conv2dDataGradient);
DLSYS_KERNEL(cpu, conv2d_filter_gradient, Conv2dFilterGradient);
DLSYS_KERNEL_WIDENED(cpu, conv2d_filter_gradient, Conv2dFilterGradient);
DLSYS_ALGORITHMS(cpu, conv2d, AllAlgorithms);
DLSYS_ALGORITHMS(cpu, conv2d_bias, AllAlgorithms);
DLSYS_ALGORITHMS(cpu, conv2d_data_gradient, AllAlgorithms);
DLSYS_ALGORITHMS(cpu, conv2d_filter_gradient, AllAlgorithms);

}  // namespace
}  // namespace cpu
}  // namespace dlsys
