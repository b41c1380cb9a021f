// Tensor cores as one of the algorithms of conv.cuh: by rule another does what they do not.
// conv_tf32.cu and conv_tf32_filter.cu have the kernels.
#include "cuda/conv/tf32.cuh"

namespace dlsys {
namespace cuda {
namespace {

constexpr const char* kName = "tensor_cores";

bool FitsTf32(const Place& at, const Conv& conv) {
  return at.precision == Precision::kTf32 && ComputeMajor(at.ctx.device_id) >= 8 &&
         !conv.Depthwise();
}

std::vector<std::string> Variants(Pass pass) {
  return pass == Pass::kFilterGradient ? FilterTilesTf32() : CorrelateTilesTf32();
}

// What does the convolution instead of tensor cores, by rule.
const ConvAlgorithm& Instead(const Place& at) {
  if (at.variant != kByRule) NotApplicable(at.op, kName);
  return kImplicitGemm;
}

void TensorForward(const Place& at, const Conv& conv, const float* x, const float* f,
                   const float* bias, float* y) {
  if (!CorrelateTf32(at, Forward(conv, x, f, bias, y)))
    Instead(at).forward(at, conv, x, f, bias, y);
}

void TensorDataGradient(const Place& at, const Conv& conv, const float* f, const float* dy,
                        float* dx) {
  for (int64_t phase = 0; phase < conv.stride.h * conv.stride.w; phase++)
    if (!CorrelateTf32(at, DataGradient(conv, f, dy, dx, phase)))
      return Instead(at).data_gradient(at, conv, f, dy, dx);
}

void TensorFilterGradient(const Place& at, const Conv& conv, const float* x, const float* dy,
                          float* df) {
  if (!FilterGradientTf32(at, conv, x, dy, df)) Instead(at).filter_gradient(at, conv, x, dy, df);
}

}  // namespace

const ConvAlgorithm kTensorCores = {
    kName, Variants, nullptr, FitsTf32, TensorForward, TensorDataGradient, TensorFilterGradient};

}  // namespace cuda
}  // namespace dlsys
