// Convolution: the kernels of the table over a choice of algorithms, which conv.cuh declares.
//
// x (n, c, plane), f (o, c / groups, size), y (n, o, out); gradients have the shape of what they
// are the gradient of. Results overlap no input.
#include "cuda/conv.cuh"
#include "cuda/matmul.cuh"

namespace dlsys {
namespace cuda {
namespace {

const ConvAlgorithm* const kAlgorithms[] = {&kDepthwise, &kImplicitGemm};

// Policy 0 is the first that fits, or tensor cores where the precision allows them; k is the k-th
// of the table.
const ConvAlgorithm& Choose(const Place& at, const Conv& conv, int64_t policy, int64_t precision) {
  const bool tf32 = CheckedPrecision(at.op, precision) == Precision::kTf32;
  if (policy == 0 && tf32 && !conv.Depthwise() && ComputeMajor(at.ctx.device_id) >= 8)
    return kTensorCores;
  int64_t number = 0;
  for (const ConvAlgorithm* algorithm : kAlgorithms)
    if ((policy == ++number || policy == 0) && algorithm->fits(conv)) return *algorithm;
  Fail("%s: algorithm %ld does not fit this convolution; 0 chooses one", at.op, (long)policy);
}

void Conv2d(const DLArray* x, const DLArray* f, DLArray* y, int64_t stride, int64_t before,
            int64_t dilation, int64_t groups, int64_t policy, int64_t precision, DLStream stream) {
  const Place at{"conv2d", y->ctx, stream};
  Enter(at.op, y, x, f);
  const Conv conv = CheckedConv(at.op, x, f, y, stride, before, dilation, groups);
  const float *data = In(at.op, x), *filter = In(at.op, f);
  float* out = Out(at.op, y);
  if (Numel(y)) Choose(at, conv, policy, precision).forward(at, conv, data, filter, nullptr, out);
}

void Conv2dBias(const DLArray* x, const DLArray* f, const DLArray* bias, DLArray* y, int64_t stride,
                int64_t before, int64_t dilation, int64_t groups, int64_t policy, int64_t precision,
                DLStream stream) {
  const Place at{"conv2d_bias", y->ctx, stream};
  Enter(at.op, y, x, f, bias);
  const Conv conv = CheckedConv(at.op, x, f, y, stride, before, dilation, groups);
  if (bias->ndim != 1 || bias->shape[0] != conv.o)
    Fail("%s: bias %s does not fit filter %s", at.op, ShapeText(bias).c_str(),
         ShapeText(f).c_str());
  const float *data = In(at.op, x), *filter = In(at.op, f), *add = In(at.op, bias);
  float* out = Out(at.op, y);
  if (Numel(y)) Choose(at, conv, policy, precision).forward(at, conv, data, filter, add, out);
}

void Conv2dDataGradient(const DLArray* f, const DLArray* dy, DLArray* dx, int64_t stride,
                        int64_t before, int64_t dilation, int64_t groups, int64_t policy,
                        int64_t precision, DLStream stream) {
  const Place at{"conv2d_data_gradient", dx->ctx, stream};
  Enter(at.op, dx, f, dy);
  const Conv conv = CheckedConv(at.op, dx, f, dy, stride, before, dilation, groups);
  const float *filter = In(at.op, f), *gradient = In(at.op, dy);
  float* out = Out(at.op, dx);
  if (Numel(dx)) Choose(at, conv, policy, precision).data_gradient(at, conv, filter, gradient, out);
}

void Conv2dFilterGradient(const DLArray* x, const DLArray* dy, DLArray* df, int64_t stride,
                          int64_t before, int64_t dilation, int64_t groups, int64_t policy,
                          int64_t precision, DLStream stream) {
  const Place at{"conv2d_filter_gradient", df->ctx, stream};
  Enter(at.op, df, x, dy);
  const Conv conv = CheckedConv(at.op, x, df, dy, stride, before, dilation, groups);
  const float *data = In(at.op, x), *gradient = In(at.op, dy);
  float* out = Out(at.op, df);
  if (Numel(df)) Choose(at, conv, policy, precision).filter_gradient(at, conv, data, gradient, out);
}

DLSYS_KERNEL(cuda, conv2d, Conv2d);
DLSYS_KERNEL(cuda, conv2d_bias, Conv2dBias);
DLSYS_KERNEL(cuda, conv2d_data_gradient, Conv2dDataGradient);
DLSYS_KERNEL(cuda, conv2d_filter_gradient, Conv2dFilterGradient);

}  // namespace
}  // namespace cuda
}  // namespace dlsys
