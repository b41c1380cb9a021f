// The rung `cudnn` of max and mean pooling with their gradients: x and dx (n, c, in), y and dy (n,
// c, out), of float32, bfloat16 or float16. cuDNN keeps no indices: its gradient of the maximum
// finds them again in x, where it meets y, and is the deterministic one. NaN is the largest; of a
// window of -inf alone it makes the least finite number, and no gradient. For the gradient of the
// mean it asks for x and y too, but their values do not count, so that it is given dx and dy.
// Windows are not dilated, both ends of an axis padded alike. Memory bandwidth limits them.
#include "cuda/cudnn/cudnn.cuh"
#include "operators/conv_geometry.h"

namespace dlsys {
namespace cuda {
namespace cudnn {
namespace {

using PoolingDescriptor = struct CudnnPoolingStruct*;

struct Functions : FoundOnce<Functions> {
  Status (*create)(PoolingDescriptor*);
  Status (*set)(PoolingDescriptor, int mode, int nan, int window_h, int window_w, int pad_h,
                int pad_w, int stride_h, int stride_w);
  Status (*destroy)(PoolingDescriptor);
  Status (*forward)(Handle, PoolingDescriptor, const void* alpha, TensorDescriptor, const void* x,
                    const void* beta, TensorDescriptor, void* y);
  Status (*backward)(Handle, PoolingDescriptor, const void* alpha, TensorDescriptor, const void* y,
                     TensorDescriptor, const void* dy, TensorDescriptor, const void* x,
                     const void* beta, TensorDescriptor, void* dx);

  Functions() {
    Find("cudnnCreatePoolingDescriptor", &create);
    Find("cudnnSetPooling2dDescriptor", &set);
    Find("cudnnDestroyPoolingDescriptor", &destroy);
    Find("cudnnPoolingForward", &forward);
    Find("cudnnPoolingBackward", &backward);
  }
};

enum Mode { kMeanWithPadding = 1, kMeanWithoutPadding = 2, kMax = 3 };  // cudnnPoolingMode_t

Mode MeanBy(int64_t padding) { return padding ? kMeanWithPadding : kMeanWithoutPadding; }

// Images x, what is pooled of them, y, and the windows.
class Call {
 public:
  Call(const char* op, Mode mode, const DLArray* x, const DLArray* y, const Pool& p,
       DLStream stream)
      : session_(op, x->ctx, stream),
        x_(op, TypeOf(op, x), x->shape[0], x->shape[1], p.in.h, p.in.w),
        y_(op, TypeOf(op, y), y->shape[0], y->shape[1], p.out.h, p.out.w),
        pooling_(op, Functions::Get().create, Functions::Get().destroy) {
    Check(op, Functions::Get().set(pooling_.get(), mode, kPropagateNan, (int)p.window.h,
                                   (int)p.window.w, (int)p.pad.h, (int)p.pad.w, (int)p.stride.h,
                                   (int)p.stride.w));
  }
  Handle handle() const { return session_.handle(); }
  TensorDescriptor x() const { return x_.get(); }
  TensorDescriptor y() const { return y_.get(); }
  PoolingDescriptor pooling() const { return pooling_.get(); }

 private:
  const Session session_;
  const Tensor x_, y_;
  const Described<PoolingDescriptor> pooling_;
};

// The last window of an axis ends within the padding.
bool EndsInside(int64_t in, int64_t window, int64_t out, int64_t stride, int64_t before,
                int64_t after) {
  return (out - 1) * stride - before + window <= in + after;
}

const char* Refusal(const Pool& p, const WindowOptions& options, const DLArray* x) {
  if (p.Dilated()) return "its windows are not dilated";
  if (!FitsInt(x)) return "an array has more elements than its int counts";
  const HW after = options.after;
  const bool fits = FitsAxis(p.in.h, p.window.h, p.out.h, p.stride.h, p.pad.h, 1) &&
                    FitsAxis(p.in.w, p.window.w, p.out.w, p.stride.w, p.pad.w, 1) &&
                    EndsInside(p.in.h, p.window.h, p.out.h, p.stride.h, p.pad.h, after.h) &&
                    EndsInside(p.in.w, p.window.w, p.out.w, p.stride.w, p.pad.w, after.w);
  return fits ? nullptr : "it pads both ends of an axis alike and has no window that is cut";
}

// Of images x and what is pooled from them. Calls run(call, one, zero).
template <class Run>
void RunPooling(const char* op, Mode mode, const DLArray* x, const DLArray* y,
                const WindowOptions& windows, DLStream stream, Run&& run) {
  const Pool p = CheckedPool(op, x, y, windows);
  Refuse(op, Refusal(p, windows, x));
  Source();
  if (!Numel(x)) return;
  if (Workspace::Querying()) return;
  const float one = 1.f, zero = 0.f;
  Check(op, run(Call(op, mode, x, y, p, stream), &one, &zero));
}

void RunForward(const char* op, Mode mode, const DLArray* x, DLArray* y,
                const WindowOptions& windows, DLStream stream) {
  Enter(op, y, x);
  RunPooling(op, mode, x, y, windows, stream,
             [&](const Call& c, const void* one, const void* zero) {
               return Functions::Get().forward(c.handle(), c.pooling(), one, c.x(), x->data, zero,
                                               c.y(), y->data);
             });
}

void MaxPool2d(const DLArray* x, DLArray* y, Struct<WindowOptions> windows, DLStream stream) {
  RunForward("cudnn_max_pool2d", kMax, x, y, *windows, stream);
}

void MaxPool2dGradient(const DLArray* x, const DLArray* y, const DLArray* dy, DLArray* dx,
                       Struct<WindowOptions> windows, DLStream stream) {
  const char* op = "cudnn_max_pool2d_gradient";
  Enter(op, dx, x, y, dy);
  CheckSameShape(op, x, dx);
  CheckSameShape(op, y, dy);
  RunPooling(op, kMax, x, y, *windows, stream,
             [&](const Call& c, const void* one, const void* zero) {
               return Functions::Get().backward(c.handle(), c.pooling(), one, c.y(), y->data, c.y(),
                                                dy->data, c.x(), x->data, zero, c.x(), dx->data);
             });
}

void AvgPool2d(const DLArray* x, DLArray* y, Struct<WindowOptions> windows, int64_t padding,
               DLStream stream) {
  RunForward("cudnn_avg_pool2d", MeanBy(padding), x, y, *windows, stream);
}

void AvgPool2dGradient(const DLArray* dy, DLArray* dx, Struct<WindowOptions> windows,
                       int64_t padding, DLStream stream) {
  const char* op = "cudnn_avg_pool2d_gradient";
  Enter(op, dx, dy);
  RunPooling(op, MeanBy(padding), dx, dy, *windows, stream,
             [&](const Call& c, const void* one, const void* zero) {
               return Functions::Get().backward(c.handle(), c.pooling(), one, c.y(), dy->data,
                                                c.y(), dy->data, c.x(), dx->data, zero, c.x(),
                                                dx->data);
             });
}

DLSYS_KERNEL_ANY(cuda, cudnn_max_pool2d, MaxPool2d);
DLSYS_KERNEL_ANY(cuda, cudnn_max_pool2d_gradient, MaxPool2dGradient);
DLSYS_KERNEL_ANY(cuda, cudnn_avg_pool2d, AvgPool2d);
DLSYS_KERNEL_ANY(cuda, cudnn_avg_pool2d_gradient, AvgPool2dGradient);

}  // namespace
}  // namespace cudnn
}  // namespace cuda
}  // namespace dlsys
