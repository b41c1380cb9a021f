// A kernel of the rung `implicit`, for dense 1 x 1 filters: such a convolution is a product of
// matrices on the images as they lie, which are their own im2col matrix. conv.cuh has the contract.
//
// With F the filters (o, c) and X, Y an image (c, positions) and its result (o, positions), images
// are a batch of products Y = F X, of dX = F^T dY, and of dF = dY X^T, whose parts are then added
// in a fixed order. Limited by the traffic of the images with few channels, by the products with
// many.
#include "cuda/conv/conv.cuh"
#include "cuda/reduce/reduce.cuh"
#include "cuda/runtime/launch.cuh"

namespace dlsys {
namespace cuda {
namespace {

// ---- kernels ----

// y (images, o, positions) += bias (o)
__global__ void AddBiasKernel(const float* bias, int64_t o, int64_t positions, float* y,
                              int64_t numel) {
  for (int64_t k = FirstItem(); k < numel; k += ItemStep()) y[k] += bias[k / positions % o];
}

// ---- launchers ----

// (m, n) = op(a) (m, k) op(b) (k, n) for each image.
BatchedGemm Products(const ConvCall& at, const Conv& conv, const float* a, const float* b, float* c,
                     int64_t m, int64_t n, int64_t k) {
  return {{a, b, c, m, n, k, false, false, at.ctx, at.precision}, conv.n};
}

void BatchedForward(const ConvCall& at, const Conv& c, const float* x, const float* f,
                    const float* bias, float* y) {
  const int64_t positions = Size(c.out), numel = c.n * c.o * positions;
  BatchedGemm batch = Products(at, c, f, x, y, c.o, positions, c.c);
  batch.shares_a = true;
  RunBatchedGemm(at.op, batch, at.stream);
  if (bias)
    Launch(at.op, AddBiasKernel, Blocks(numel), kThreads, 0, at.stream, bias, c.o, positions, y,
           numel);
}

void BatchedDataGradient(const ConvCall& at, const Conv& c, const float* f, const float* dy,
                         float* dx) {
  BatchedGemm batch = Products(at, c, f, dy, dx, c.c, Size(c.out), c.o);
  batch.shares_a = batch.first.trans_a = true;
  RunBatchedGemm(at.op, batch, at.stream);
}

void BatchedFilterGradient(const ConvCall& at, const Conv& c, const float* x, const float* dy,
                           float* df) {
  const int64_t numel = c.o * c.c, nbytes = numel * (int64_t)sizeof(float);
  if (ImagesAtOnce(at, "implicit batched", c.n, nbytes, 0) < c.n)
    NotApplicable(at.op, "implicit batched");
  const Scratch parts(at.ctx, c.n * nbytes, at.stream);
  BatchedGemm batch = Products(at, c, dy, x, parts.floats(), c.o, c.c, Size(c.out));
  batch.first.trans_b = true;
  RunBatchedGemm(at.op, batch, at.stream);
  SumAxis(at.op, at.ctx, parts.floats(), 1, c.n, numel, 1.f, df, at.stream);
}

const char* Refusal(const ConvCall&, const Conv& c) {
  const HW one{1, 1};
  const bool fits =
      c.kernel == one && c.stride == one && c.in == c.out && c.pad == HW{0, 0} && c.groups == 1;
  return fits ? nullptr : "it is for 1 x 1 filters at stride 1, without padding and groups";
}

}  // namespace

const ConvAlgorithm kPointwise = {
    "implicit batched",   nullptr, nullptr, Refusal, BatchedForward, BatchedDataGradient,
    BatchedFilterGradient};

}  // namespace cuda
}  // namespace dlsys
