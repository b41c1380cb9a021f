// A kernel of the rung `implicit` for sm_90a: implicit GEMM by wgmma and TMA at tf32, which reads
// images with their channels last (channels_last/hopper.cuh). conv.cuh has the contract. What is
// gathered, x or the gradient dy, is moved so first; y and dx are stored with their channels first,
// but a dx at a stride, of whose sectors a phase has every second float, is moved back. Limited by
// the tensor cores and by the traffic of these moves, 8 bytes an element.
#include <algorithm>

#include "cuda/conv/channels_last/hopper.cuh"
#include "cuda/conv/conv.cuh"

namespace dlsys {
namespace cuda {
namespace {

constexpr const char* kName = "implicit wgmma";

channels_last::Call CallOf(const ConvCall& at) {
  channels_last::Call call{at.op, at.ctx, at.stream};
  call.planes = true;
  return call;
}

using ChannelsLast = channels_last::ChannelsLast<float>;

void CheckPass(const channels_last::Call& at, const Conv& c, Pass pass, const float* x,
               const float* f, const float* y) {
  if (channels_last::HopperRefusal(at, c, pass, x, f, y)) NotApplicable(at.op, kName);
}

void Forward(const ConvCall& call, const Conv& c, const float* x, const float* f, const float* bias,
             float* y) {
  const channels_last::Call at = CallOf(call);
  CheckPass(at, c, Pass::kForward, x, f, y);
  const ChannelsLast images(at, c.n, c.c, c.in, ConvWorkspaceLimit());
  channels_last::ForwardOnHopper<float>(at, c, images.CopyOf(x), f, bias, y, nullptr);
}

void DataGradient(const ConvCall& call, const Conv& c, const float* f, const float* dy, float* dx) {
  channels_last::Call at = CallOf(call);
  CheckPass(at, c, Pass::kDataGradient, dx, f, dy);
  const ChannelsLast gradient(at, c.n, c.o, c.out, ConvWorkspaceLimit());
  gradient.CopyOf(dy);
  if (Size(c.stride) == 1)
    return channels_last::DataGradientOnHopper<float>(at, c, f, gradient.data(), dx, nullptr);
  at.planes = false;
  const ChannelsLast result(at, c.n, c.c, c.in, ConvWorkspaceLimit());
  channels_last::DataGradientOnHopper<float>(at, c, f, gradient.data(), result.data(), nullptr);
  result.CopyTo(dx);
}

void FilterGradient(const ConvCall& call, const Conv& c, const float* x, const float* dy,
                    float* df) {
  const channels_last::Call at = CallOf(call);
  CheckPass(at, c, Pass::kFilterGradient, x, df, dy);
  const ChannelsLast images(at, c.n, c.c, c.in, ConvWorkspaceLimit());
  channels_last::FilterGradientOnHopper<float>(at, c, images.CopyOf(x), dy, df);
}

const char* Refusal(const ConvCall& at, const Conv& c) {
  constexpr int64_t kMost = INT32_MAX;
  if (at.precision != Precision::kTf32) return "it is for tf32";
  if (c.c % 4) return "it takes channels and filters by four";
  if (std::max(c.c * Size(c.in), c.o * Size(c.out)) > kMost / c.n)
    return "an array has more elements than its int counts";
  const float* const none = nullptr;
  return channels_last::HopperRefusal(CallOf(at), c, Pass::kForward, none, none, none);
}

}  // namespace

const ConvAlgorithm kWgmma = {kName,   nullptr,      nullptr,       Refusal,
                              Forward, DataGradient, FilterGradient};

}  // namespace cuda
}  // namespace dlsys
