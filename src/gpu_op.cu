// The assignment's C names over the kernels of the table, for programs that link this library as
// they did the course's.
//
// Every function returns 0 or a status, with the text in DLGetLastError(). Arrays are float32. All
// kernels of a GPU run on one stream of its own, so that calls from any thread happen in the order
// in which they are made and nothing here orders them against other streams; copies to the host
// wait for it. A copy on a stream of the caller's is ordered behind that stream and the own one,
// and later calls behind the copy.
#include <cstring>
#include <memory>
#include <mutex>

#include "cuda/runtime/context.cuh"

namespace dlsys {
namespace cuda {
namespace {

void CheckStatus(int status) {
  if (status != DL_OK) throw Error(status, DLGetLastError());
}

// The stream of these functions on a GPU, null on the CPU.
DLStream OwnStream(DLContext ctx) {
  static std::mutex mutex;
  static DLStream streams[kMaxDevices];
  if (ctx.device_type != DL_GPU) return nullptr;
  if (ctx.device_id < 0 || ctx.device_id >= kMaxDevices)
    Fail("expected a GPU from 0 to %d, got %d", kMaxDevices - 1, ctx.device_id);
  std::lock_guard<std::mutex> lock(mutex);
  DLStream& stream = streams[ctx.device_id];
  if (!stream) CheckStatus(DLStreamCreate(ctx, &stream));
  return stream;
}

const DLKernelEntry& FindKernel(const char* name) {
  int64_t count = 0;
  const DLKernelEntry* table = DLKernelTable(&count);
  for (int64_t k = 0; k < count; k++) {
    if (!strcmp(table[k].name, name) && !strcmp(table[k].device, "cuda")) return table[k];
  }
  Fail("%s: this library has no such kernel for the GPU", name);
}

DLValue Value(const DLArray* array) {
  DLValue value;
  value.p = (void*)array;
  return value;
}
DLValue Value(int64_t integer) {
  DLValue value;
  value.i = integer;
  return value;
}
DLValue Value(float number) {
  DLValue value;
  value.f = number;
  return value;
}

// Queues a kernel on the stream of `out`'s GPU.
template <class... Args>
int Call(const char* name, const DLArray* out, Args... args) {
  return Guard([&] {
    NotNull((void*)out);
    const DLValue values[] = {Value(args)...};
    FindKernel(name).invoke(values, OwnStream(out->ctx));
  });
}

DLArray* NewArray(const int64_t* shape, int64_t ndim, DLContext ctx) {
  if (ndim < 0 || ndim > DL_MAX_NDIM || (ndim && !shape))
    Fail("DLArrayAlloc: expected 0 to %d dimensions, got %ld", DL_MAX_NDIM, (long)ndim);
  auto sizes = std::make_unique<int64_t[]>((size_t)ndim);
  int64_t nbytes = sizeof(float);
  for (int64_t k = 0; k < ndim; k++) {
    sizes[(size_t)k] = shape[k];
    if (shape[k] < 0 || __builtin_mul_overflow(nbytes, shape[k], &nbytes))
      Fail("DLArrayAlloc: dimension %ld has the impossible size %ld", (long)k, (long)shape[k]);
  }
  auto array = std::make_unique<DLArray>(DLArray{nullptr, ctx, (int32_t)ndim, DL_FLOAT32, nullptr});
  CheckStatus(DLMemoryAlloc(ctx, nbytes, OwnStream(ctx), &array->data));
  array->shape = sizes.release();
  return array.release();
}

void CopyOnStream(const DLArray* from, DLArray* to, DLContext ctx, DLStream stream) {
  const DLStream own = OwnStream(ctx);
  if (!stream || ctx.device_type != DL_GPU) stream = own;
  const int64_t nbytes = Numel(from) * DtypeNbytes(from->dtype);
  if (stream != own) CheckStatus(DLStreamWait(ctx, stream, own));
  CheckStatus(DLMemoryCopy(to->data, to->ctx, from->data, from->ctx, nbytes, stream));
  if (stream != own) CheckStatus(DLStreamWait(ctx, own, stream));
}

void CopyArray(const DLArray* from, DLArray* to, DLStream stream) {
  NotNull((void*)from);
  NotNull(to);
  if (Numel(from) != Numel(to) || from->dtype != to->dtype)
    Fail("DLArrayCopyFromTo: expected arrays of one size and dtype, got %s and %s",
         ShapeText(from).c_str(), ShapeText(to).c_str());
  const bool from_gpu = from->ctx.device_type == DL_GPU, to_gpu = to->ctx.device_type == DL_GPU;
  const DLContext ctx = to_gpu ? to->ctx : from->ctx;
  const bool between_gpus = from_gpu && to_gpu && from->ctx.device_id != to->ctx.device_id;
  // The source's stream is another GPU's: it is ordered against the copy by waiting, before and
  // after.
  if (between_gpus) CheckStatus(DLStreamSynchronize(from->ctx, OwnStream(from->ctx)));
  CopyOnStream(from, to, ctx, stream);
  if (between_gpus) CheckStatus(DLStreamSynchronize(ctx, OwnStream(ctx)));
}

}  // namespace
}  // namespace cuda
}  // namespace dlsys

using dlsys::Guard;
using dlsys::cuda::Call;

DLSYS_API int DLArrayAlloc(const int64_t* shape, int64_t ndim, DLContext ctx, DLArray** out) {
  return Guard([&] { *(DLArray**)dlsys::NotNull(out) = dlsys::cuda::NewArray(shape, ndim, ctx); });
}

DLSYS_API int DLArrayFree(DLArray* array) {
  if (!array) return DL_OK;
  const int status = DLMemoryFree(array->ctx, array->data);
  delete[] array->shape;
  delete array;
  return status;
}

DLSYS_API int DLArrayCopyFromTo(DLArray* from, DLArray* to, void* stream) {
  return Guard([&] { dlsys::cuda::CopyArray(from, to, (DLStream)stream); });
}

DLSYS_API int DLGpuArraySet(DLArray* array, float value) {
  return Call("fill", array, value, array);
}

DLSYS_API int DLGpuBroadcastTo(const DLArray* input, DLArray* output) {
  return Call("broadcast_to", output, input, output);
}

DLSYS_API int DLGpuReduceSumAxisZero(const DLArray* input, DLArray* output) {
  return Call("reduce_sum", output, input, int64_t(1), 1.f, output);
}

DLSYS_API int DLGpuMatrixElementwiseAdd(const DLArray* a, const DLArray* b, DLArray* output) {
  return Call("add", output, a, b, output);
}

DLSYS_API int DLGpuMatrixElementwiseAddByConst(const DLArray* input, float value, DLArray* output) {
  return Call("add_const", output, input, value, output);
}

DLSYS_API int DLGpuMatrixElementwiseMultiply(const DLArray* a, const DLArray* b, DLArray* output) {
  return Call("mul", output, a, b, output);
}

DLSYS_API int DLGpuMatrixMultiplyByConst(const DLArray* input, float value, DLArray* output) {
  return Call("mul_const", output, input, value, output);
}

DLSYS_API int DLGpuMatrixMultiply(const DLArray* a, bool trans_a, const DLArray* b, bool trans_b,
                                  DLArray* c) {
  return Call("matmul", c, a, int64_t(trans_a), b, int64_t(trans_b), int64_t(0), int64_t(0), c);
}

DLSYS_API int DLGpuRelu(const DLArray* input, DLArray* output) {
  return Call("relu", output, input, output);
}

DLSYS_API int DLGpuReluGradient(const DLArray* input, const DLArray* in_grad, DLArray* output) {
  return Call("relu_gradient", output, input, in_grad, output);
}

DLSYS_API int DLGpuSoftmax(const DLArray* input, DLArray* output) {
  return Call("softmax", output, input, output);
}

DLSYS_API int DLGpuSoftmaxCrossEntropy(const DLArray* a, const DLArray* b, DLArray* output) {
  return Call("softmax_cross_entropy_mean", output, a, b, output);
}
