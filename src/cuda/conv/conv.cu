// Operators of 2-d convolution: they check arguments and dispatch to one of the algorithms of
// conv.cuh, by heuristic or as the caller (the autotuner) chooses.
//
// x (n, c, in), f (o, c / groups, kernel), y (n, o, out); a gradient has the shape of its array.
// Results overlap no input.
#include "cuda/conv/conv.cuh"

namespace dlsys {
namespace cuda {
namespace {

// The heuristic takes the first that fits.
const ConvAlgorithm* const kAlgorithms[] = {&kDepthwise, &kTensorCores, &kImplicitGemm, &kCudnn};

// The algorithms of a pass that callers choose among: every variant of each.
struct Candidates {
  struct Candidate {
    const ConvAlgorithm* algorithm;
    int variant;
  };
  std::vector<Candidate> by_choice;
  std::vector<Algorithm> choices;

  explicit Candidates(Pass pass) {
    for (const ConvAlgorithm* algorithm : kAlgorithms) {
      int variant = 0;
      for (const std::string& name : algorithm->variants(pass)) {
        by_choice.push_back({algorithm, variant++});
        const std::string space = name.empty() ? "" : " ";
        choices.push_back({algorithm->name + space + name, algorithm->source});
      }
    }
  }
};

template <Pass kPass>
const Candidates& CandidatesOf() {
  static const Candidates* const candidates = new Candidates(kPass);
  return *candidates;
}

template <Pass kPass>
const std::vector<Algorithm>& AlgorithmsOf() {
  return CandidatesOf<kPass>().choices;
}

// Returns the algorithm, and its variant in `at`.
template <Pass kPass>
const ConvAlgorithm& Choose(const Conv& conv, int64_t choice, ConvCall* at) {
  if (choice == 0) {
    for (const ConvAlgorithm* algorithm : kAlgorithms)
      if (algorithm->fits(*at, conv)) return *algorithm;
  }
  const Candidates& all = CandidatesOf<kPass>();
  const int64_t count = (int64_t)all.choices.size();
  if (choice < 1 || choice > count)
    Fail("%s: there is no choice %ld, expected 0 to %ld", at->op, (long)choice, (long)count);
  const auto& chosen = all.by_choice[choice - 1];
  at->variant = chosen.variant;
  if (!chosen.algorithm->fits(*at, conv))
    NotApplicable(at->op, all.choices[choice - 1].name.c_str());
  return *chosen.algorithm;
}

void Conv2d(const DLArray* x, const DLArray* f, DLArray* y, Struct<WindowOptions> windows,
            int64_t groups, int64_t choice, int64_t precision, DLStream stream) {
  ConvCall at{"conv2d", y->ctx, stream, CheckedPrecision("conv2d", precision)};
  Enter(at.op, y, x, f);
  const Conv conv = CheckedConv(at.op, x, f, y, *windows, groups);
  const float *data = In(at.op, x), *filter = In(at.op, f);
  float* out = Out(at.op, y);
  if (!Numel(y)) return;
  const ConvAlgorithm& algorithm = Choose<Pass::kForward>(conv, choice, &at);
  algorithm.forward(at, conv, data, filter, nullptr, out);
}

void Conv2dBias(const DLArray* x, const DLArray* f, const DLArray* bias, DLArray* y,
                Struct<WindowOptions> windows, int64_t groups, int64_t choice, int64_t precision,
                DLStream stream) {
  ConvCall at{"conv2d_bias", y->ctx, stream, CheckedPrecision("conv2d_bias", precision)};
  Enter(at.op, y, x, f, bias);
  const Conv conv = CheckedConv(at.op, x, f, y, *windows, groups);
  if (bias->ndim != 1 || bias->shape[0] != conv.o)
    Fail("%s: bias %s does not fit filter %s", at.op, ShapeText(bias).c_str(),
         ShapeText(f).c_str());
  const float *data = In(at.op, x), *filter = In(at.op, f), *add = In(at.op, bias);
  float* out = Out(at.op, y);
  if (!Numel(y)) return;
  const ConvAlgorithm& algorithm = Choose<Pass::kForward>(conv, choice, &at);
  algorithm.forward(at, conv, data, filter, add, out);
}

void Conv2dDataGradient(const DLArray* f, const DLArray* dy, DLArray* dx,
                        Struct<WindowOptions> windows, int64_t groups, int64_t choice,
                        int64_t precision, DLStream stream) {
  const char* op = "conv2d_data_gradient";
  ConvCall at{op, dx->ctx, stream, CheckedPrecision(op, precision)};
  Enter(at.op, dx, f, dy);
  const Conv conv = CheckedConv(at.op, dx, f, dy, *windows, groups);
  const float *filter = In(at.op, f), *gradient = In(at.op, dy);
  float* out = Out(at.op, dx);
  if (!Numel(dx)) return;
  const ConvAlgorithm& algorithm = Choose<Pass::kDataGradient>(conv, choice, &at);
  algorithm.data_gradient(at, conv, filter, gradient, out);
}

void Conv2dFilterGradient(const DLArray* x, const DLArray* dy, DLArray* df,
                          Struct<WindowOptions> windows, int64_t groups, int64_t choice,
                          int64_t precision, DLStream stream) {
  const char* op = "conv2d_filter_gradient";
  ConvCall at{op, df->ctx, stream, CheckedPrecision(op, precision)};
  Enter(at.op, df, x, dy);
  const Conv conv = CheckedConv(at.op, x, df, dy, *windows, groups);
  const float *data = In(at.op, x), *gradient = In(at.op, dy);
  float* out = Out(at.op, df);
  if (!Numel(df)) return;
  const ConvAlgorithm& algorithm = Choose<Pass::kFilterGradient>(conv, choice, &at);
  algorithm.filter_gradient(at, conv, data, gradient, out);
}

DLSYS_KERNEL(cuda, conv2d, Conv2d);
DLSYS_KERNEL(cuda, conv2d_bias, Conv2dBias);
DLSYS_KERNEL(cuda, conv2d_data_gradient, Conv2dDataGradient);
DLSYS_KERNEL(cuda, conv2d_filter_gradient, Conv2dFilterGradient);
DLSYS_ALGORITHMS(cuda, conv2d, AlgorithmsOf<Pass::kForward>);
DLSYS_ALGORITHMS(cuda, conv2d_bias, AlgorithmsOf<Pass::kForward>);
DLSYS_ALGORITHMS(cuda, conv2d_data_gradient, AlgorithmsOf<Pass::kDataGradient>);
DLSYS_ALGORITHMS(cuda, conv2d_filter_gradient, AlgorithmsOf<Pass::kFilterGradient>);

}  // namespace
}  // namespace cuda
}  // namespace dlsys
