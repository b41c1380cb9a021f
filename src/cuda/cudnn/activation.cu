// The rung `cudnn` of relu, sigmoid and tanh, and of their gradients dx = f'(y) dy, which are of
// the output: cuDNN asks for x as well and is given y, which has the sign that relu needs. NaN of x
// reaches y. Arrays of one shape, of float32, bfloat16 or float16; y may be x, and dx may be dy.
// Memory bandwidth limits them.
#include "cuda/cudnn/cudnn.cuh"

namespace dlsys {
namespace cuda {
namespace cudnn {
namespace {

using ActivationDescriptor = struct CudnnActivationStruct*;

struct Functions : FoundOnce<Functions> {
  Status (*create)(ActivationDescriptor*);
  Status (*set)(ActivationDescriptor, int mode, int nan, double coefficient);
  Status (*destroy)(ActivationDescriptor);
  Status (*forward)(Handle, ActivationDescriptor, const void* alpha, TensorDescriptor,
                    const void* x, const void* beta, TensorDescriptor, void* y);
  Status (*backward)(Handle, ActivationDescriptor, const void* alpha, TensorDescriptor,
                     const void* y, TensorDescriptor, const void* dy, TensorDescriptor,
                     const void* x, const void* beta, TensorDescriptor, void* dx);

  Functions() {
    Find("cudnnCreateActivationDescriptor", &create);
    Find("cudnnSetActivationDescriptor", &set);
    Find("cudnnDestroyActivationDescriptor", &destroy);
    Find("cudnnActivationForward", &forward);
    Find("cudnnActivationBackward", &backward);
  }
};

struct Activation {
  const char *name, *gradient;  // of the kernels
  int mode;                     // cudnnActivationMode_t
};
constexpr Activation kSigmoid = {"cudnn_sigmoid", "cudnn_sigmoid_gradient", 0};
constexpr Activation kRelu = {"cudnn_relu", "cudnn_relu_gradient", 1};
constexpr Activation kTanh = {"cudnn_tanh", "cudnn_tanh_gradient", 2};

// What all arrays of a call have in common, and the function.
class Call {
 public:
  Call(const char* op, const Activation& activation, const DLArray* like, DLStream stream)
      : session_(op, like->ctx, stream),
        tensor_(op, TypeOf(op, like), Extent(like, 0), Extent(like, 1), Extent(like, 2),
                Rest(like)),
        activation_(op, Functions::Get().create, Functions::Get().destroy) {
    const Functions& f = Functions::Get();
    Check(op, f.set(activation_.get(), activation.mode, kPropagateNan, 0.));
  }
  Handle handle() const { return session_.handle(); }
  TensorDescriptor tensor() const { return tensor_.get(); }
  ActivationDescriptor activation() const { return activation_.get(); }

 private:
  static int64_t Extent(const DLArray* a, int axis) { return axis < a->ndim ? a->shape[axis] : 1; }
  static int64_t Rest(const DLArray* a) {
    int64_t rest = 1;
    for (int axis = 3; axis < a->ndim; axis++) rest *= a->shape[axis];
    return rest;
  }

  const Session session_;
  const Tensor tensor_;
  const Described<ActivationDescriptor> activation_;
};

// True where there is nothing to compute.
bool IsNothing(const char* op, const DLArray* a) {
  Refuse(op, FitsInt(a) ? nullptr : "an array has more elements than its int counts");
  Source();
  return !Numel(a) || Workspace::Querying();
}

template <const Activation& kActivation>
void Forward(const DLArray* x, DLArray* y, DLStream stream) {
  const char* op = kActivation.name;
  Enter(op, y, x);
  CheckAlike(op, x, y);
  if (IsNothing(op, x)) return;
  const Call call(op, kActivation, x, stream);
  const float one = 1.f, zero = 0.f;
  Check(op, Functions::Get().forward(call.handle(), call.activation(), &one, call.tensor(), x->data,
                                     &zero, call.tensor(), y->data));
}

template <const Activation& kActivation>
void Backward(const DLArray* y, const DLArray* dy, DLArray* dx, DLStream stream) {
  const char* op = kActivation.gradient;
  Enter(op, dx, y, dy);
  CheckAlike(op, y, dy);
  CheckAlike(op, y, dx);
  if (IsNothing(op, y)) return;
  const Call call(op, kActivation, y, stream);
  const float one = 1.f, zero = 0.f;
  const TensorDescriptor tensor = call.tensor();
  Check(op, Functions::Get().backward(call.handle(), call.activation(), &one, tensor, y->data,
                                      tensor, dy->data, tensor, y->data, &zero, tensor, dx->data));
}

DLSYS_KERNEL_ANY(cuda, cudnn_relu, Forward<kRelu>);
DLSYS_KERNEL_ANY(cuda, cudnn_relu_gradient, Backward<kRelu>);
DLSYS_KERNEL_ANY(cuda, cudnn_sigmoid, Forward<kSigmoid>);
DLSYS_KERNEL_ANY(cuda, cudnn_sigmoid_gradient, Backward<kSigmoid>);
DLSYS_KERNEL_ANY(cuda, cudnn_tanh, Forward<kTanh>);
DLSYS_KERNEL_ANY(cuda, cudnn_tanh_gradient, Backward<kTanh>);

}  // namespace
}  // namespace cudnn
}  // namespace cuda
}  // namespace dlsys
