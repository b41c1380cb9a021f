// The rung `cudnn` of batch normalization over x (N, C, ...): in training form statistics and map
// in one call, their gradients in another, which takes the mean and 1 / sqrt(variance + eps) that
// the first one saved; in inference form the map. Variances are over the count. x, y and their
// gradients are of float32, bfloat16 or float16, everything else, (C,), of float32. Running
// statistics are not cuDNN's business here: they change at the end of a step. The mode is the
// persistent one, several times as fast for few long channels: it repeats its bits, but adds
// gradients in scaled integers, whose sums are infinite beyond their range, as those of dy of 1e8
// are. Memory bandwidth limits them.
#include "cuda/cudnn/cudnn.cuh"
#include "cuda/norm/norm.cuh"

namespace dlsys {
namespace cuda {
namespace cudnn {
namespace {

struct Functions : FoundOnce<Functions> {
  Status (*training)(Handle, int mode, const void* alpha, const void* beta, TensorDescriptor,
                     const void* x, TensorDescriptor, void* y, TensorDescriptor of_channels,
                     const void* scale, const void* bias, double factor, void* running_mean,
                     void* running_variance, double eps, void* mean, void* inverse);
  Status (*inference)(Handle, int mode, const void* alpha, const void* beta, TensorDescriptor,
                      const void* x, TensorDescriptor, void* y, TensorDescriptor of_channels,
                      const void* scale, const void* bias, const void* mean, const void* variance,
                      double eps);
  Status (*backward)(Handle, int mode, const void* alpha_data, const void* beta_data,
                     const void* alpha_sums, const void* beta_sums, TensorDescriptor, const void* x,
                     TensorDescriptor, const void* dy, TensorDescriptor, void* dx,
                     TensorDescriptor of_channels, const void* scale, void* dscale, void* dbias,
                     double eps, const void* mean, const void* inverse);

  Functions() {
    Find("cudnnBatchNormalizationForwardTraining", &training);
    Find("cudnnBatchNormalizationForwardInference", &inference);
    Find("cudnnBatchNormalizationBackward", &backward);
  }
};

constexpr int kPersistent = 2;  // CUDNN_BATCHNORM_SPATIAL_PERSISTENT, the faster way of a channel
constexpr float kOne = 1.f, kZero = 0.f;

// An array (N, C, ...) and its channels.
class Call {
 public:
  Call(const char* op, const DLArray* x, DLStream stream)
      : session_(op, x->ctx, stream),
        x_(op, TypeOf(op, x), x->shape[0], x->shape[1], Rows(x), ChannelsOf(op, x).inner / Rows(x)),
        channels_(op, kFloat, 1, x->shape[1], 1, 1) {}
  Handle handle() const { return session_.handle(); }
  TensorDescriptor x() const { return x_.get(); }
  TensorDescriptor channels() const { return channels_.get(); }

 private:
  static int64_t Rows(const DLArray* x) { return x->ndim > 2 ? x->shape[2] : 1; }

  const Session session_;
  const Tensor x_, channels_;
};

// False for a workspace query.
bool Serves(const char* op, const DLArray* x) {
  Refuse(op, ChannelsOf(op, x).Numel() == 0 ? "an array is empty"
             : !FitsInt(x)                  ? "an array has more elements than its int counts"
                                            : nullptr);
  Source();
  return !Workspace::Querying();
}

const float* AffineOf(const char* op, const DLArray* values, const DLArray* x) {
  Refuse(op, values->dtype == DL_FLOAT32 ? nullptr : "its scale and bias are float32");
  return PerChannel(op, values, x->shape[1]);
}

void Training(const DLArray* x, const DLArray* scale, const DLArray* bias, float eps, DLArray* y,
              DLArray* mean, DLArray* inverse, DLStream stream) {
  const char* op = "cudnn_batch_normalize_training";
  Enter(op, y, x, scale, bias, mean, inverse);
  CheckAlike(op, x, y);
  if (!Serves(op, x)) return;
  const int64_t count = x->shape[1];
  const Call c(op, x, stream);
  Check(op, Functions::Get().training(
                c.handle(), kPersistent, &kOne, &kZero, c.x(), x->data, c.x(), y->data,
                c.channels(), AffineOf(op, scale, x), AffineOf(op, bias, x), 1., nullptr, nullptr,
                eps, ChannelResult(op, mean, count), ChannelResult(op, inverse, count)));
}

void Inference(const DLArray* x, const DLArray* mean, const DLArray* variance, const DLArray* scale,
               const DLArray* bias, float eps, DLArray* y, DLStream stream) {
  const char* op = "cudnn_batch_normalize";
  Enter(op, y, x, mean, variance, scale, bias);
  CheckAlike(op, x, y);
  if (!Serves(op, x)) return;
  const int64_t count = x->shape[1];
  const Call c(op, x, stream);
  Check(op, Functions::Get().inference(c.handle(), kPersistent, &kOne, &kZero, c.x(), x->data,
                                       c.x(), y->data, c.channels(), AffineOf(op, scale, x),
                                       AffineOf(op, bias, x), PerChannel(op, mean, count),
                                       PerChannel(op, variance, count), eps));
}

void Backward(const DLArray* x, const DLArray* scale, const DLArray* dy, const DLArray* mean,
              const DLArray* inverse, float eps, DLArray* dx, DLArray* dscale, DLArray* dbias,
              DLStream stream) {
  const char* op = "cudnn_batch_normalize_gradient";
  Enter(op, dx, x, scale, dy, mean, inverse, dscale, dbias);
  CheckAlike(op, x, dy);
  CheckAlike(op, x, dx);
  if (!Serves(op, x)) return;
  const int64_t count = x->shape[1];
  const Call c(op, x, stream);
  Check(op, Functions::Get().backward(c.handle(), kPersistent, &kOne, &kZero, &kOne, &kZero, c.x(),
                                      x->data, c.x(), dy->data, c.x(), dx->data, c.channels(),
                                      AffineOf(op, scale, x), ChannelResult(op, dscale, count),
                                      ChannelResult(op, dbias, count), eps,
                                      PerChannel(op, mean, count), PerChannel(op, inverse, count)));
}

DLSYS_KERNEL_ANY(cuda, cudnn_batch_normalize_training, Training);
DLSYS_KERNEL_ANY(cuda, cudnn_batch_normalize, Inference);
DLSYS_KERNEL_ANY(cuda, cudnn_batch_normalize_gradient, Backward);

}  // namespace
}  // namespace cudnn
}  // namespace cuda
}  // namespace dlsys
