// Operators of 2-d convolution: they check arguments and dispatch to an algorithm of conv.h. The
// last argument, the precision, changes nothing: all is float32. Arrays are contiguous, NCHW, and
// outputs overlap no input.
#include "cpu/conv/conv.h"

#include <algorithm>

#include "cpu/runtime/parallel.h"

namespace dlsys {
namespace cpu {
namespace {

bool FitsAll(const Conv&) { return true; }
bool FitsDepthwise(const Conv& conv) { return conv.Depthwise(); }

constexpr ConvAlgorithm kAlgorithms[] = {
    {"depthwise", FitsDepthwise, DepthwiseForward, DirectDataGradient, DepthwiseFilterGradient},
    {"winograd_2x2", WinogradFits, WinogradForward<2>, WinogradDataGradient<2>,
     WinogradFilterGradient<2>},
    {"winograd_4x4", WinogradFits, WinogradForward<4>, WinogradDataGradient<4>,
     WinogradFilterGradient<4>},
    {"implicit_gemm", FitsAll, GemmForward, GemmDataGradient, GemmFilterGradient},
};

// Made when the library is loaded.
const std::vector<Algorithm>* const all_choices = [] {
  auto* names = new std::vector<Algorithm>;
  for (const ConvAlgorithm& algorithm : kAlgorithms) names->push_back({algorithm.name});
  return names;
}();
const std::vector<Algorithm>& AllAlgorithms() { return *all_choices; }

// Algorithm 0 is the first that fits (the heuristic), k the k-th of the table.
const ConvAlgorithm& Choose(const char* op, const Conv& conv, int64_t choice) {
  constexpr int64_t kCount = sizeof kAlgorithms / sizeof *kAlgorithms;
  if (choice < 0 || choice > kCount)
    Fail("%s: there is no choice %ld, expected 0 to %ld", op, (long)choice, (long)kCount);
  if (choice == 0) { static const int forced = getenv("CC_FORCE") ? atoi(getenv("CC_FORCE")) : 0; if (forced && kAlgorithms[forced-1].fits(conv) && conv.c>=16) return kAlgorithms[forced-1]; if(conv.Depthwise()) return kAlgorithms[0]; return kAlgorithms[3]; }
  if (choice == 0)
    return *std::find_if(kAlgorithms, kAlgorithms + kCount,
                         [&](const ConvAlgorithm& algorithm) { return algorithm.fits(conv); });
  const ConvAlgorithm& chosen = kAlgorithms[choice - 1];
  if (!chosen.fits(conv)) NotApplicable(op, chosen.name);
  return chosen;
}

void RunForward(const char* op, const DLArray* x, const DLArray* f, const float* bias, DLArray* y,
                const WindowOptions& windows, int64_t groups, int64_t choice) {
  const float *data = Input(op, x), *filter = Input(op, f);
  float* out = Output(op, y);
  const Conv conv = CheckedConv(op, x, f, y, windows, groups);
  if (Numel(y)) Choose(op, conv, choice).forward(conv, data, filter, bias, out);
}

void Conv2d(const DLArray* x, const DLArray* f, DLArray* y, Struct<WindowOptions> windows,
            int64_t groups, int64_t choice, int64_t) {
  RunForward("conv2d", x, f, nullptr, y, *windows, groups, choice);
}

void Conv2dBias(const DLArray* x, const DLArray* f, const DLArray* bias, DLArray* y,
                Struct<WindowOptions> windows, int64_t groups, int64_t choice, int64_t) {
  const char* op = "conv2d_bias";
  const float* add = Input(op, bias);
  if (f->ndim != 4 || bias->ndim != 1 || bias->shape[0] != f->shape[0])
    Fail("%s: bias %s does not fit filter %s", op, ShapeText(bias).c_str(), ShapeText(f).c_str());
  RunForward(op, x, f, add, y, *windows, groups, choice);
}

void Conv2dDataGradient(const DLArray* f, const DLArray* dy, DLArray* dx,
                        Struct<WindowOptions> windows, int64_t groups, int64_t choice, int64_t) {
  const char* op = "conv2d_data_gradient";
  const float *filter = Input(op, f), *gradient = Input(op, dy);
  float* out = Output(op, dx);
  const Conv conv = CheckedConv(op, dx, f, dy, *windows, groups);
  if (Numel(dx)) Choose(op, conv, choice).data_gradient(conv, filter, gradient, out);
}

void Conv2dFilterGradient(const DLArray* x, const DLArray* dy, DLArray* df,
                          Struct<WindowOptions> windows, int64_t groups, int64_t choice, int64_t) {
  const char* op = "conv2d_filter_gradient";
  const float *data = Input(op, x), *gradient = Input(op, dy);
  float* out = Output(op, df);
  const Conv conv = CheckedConv(op, x, df, dy, *windows, groups);
  if (!Numel(df)) return;
  if (!Numel(dy)) return Serially([&] { std::fill(out, out + Numel(df), 0.f); });
  Choose(op, conv, choice).filter_gradient(conv, data, gradient, out);
}

DLSYS_KERNEL(cpu, conv2d, Conv2d);
DLSYS_KERNEL(cpu, conv2d_bias, Conv2dBias);
DLSYS_KERNEL(cpu, conv2d_data_gradient, Conv2dDataGradient);
DLSYS_KERNEL(cpu, conv2d_filter_gradient, Conv2dFilterGradient);
DLSYS_ALGORITHMS(cpu, conv2d, AllAlgorithms);
DLSYS_ALGORITHMS(cpu, conv2d_bias, AllAlgorithms);
DLSYS_ALGORITHMS(cpu, conv2d_data_gradient, AllAlgorithms);
DLSYS_ALGORITHMS(cpu, conv2d_filter_gradient, AllAlgorithms);

}  // namespace
}  // namespace cpu
}  // namespace dlsys
