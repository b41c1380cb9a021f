// Operators of convolution fused with bias, relu and max-pool, and of their gradients;
// conv_pool_forward.cc and conv_pool_gradient.cc have the algorithms. Arrays are contiguous, NCHW,
// and outputs overlap no input. The last argument is the precision, which a CPU has one of.
#include "cpu/conv/conv_pool.h"

#include "cpu/runtime/widened.h"

namespace dlsys {
namespace cpu {
namespace {

void CheckBias(const char* op, const ConvPool& p, const DLArray* bias) {
  if (Numel(bias) != p.conv.o) Fail("%s: expected a bias for each filter", op);
}

void Conv2dPool(const DLArray* x, const DLArray* f, const DLArrayList* bias, DLArray* y,
                DLArray* code, Struct<HW> pad, int64_t window, int64_t relu, int64_t) {
  const char* op = "conv2d_pool";
  Check(op, code);
  const float *data = Input(op, x), *filter = Input(op, f), *add = nullptr;
  float* out = Output(op, y);
  uint8_t* codes = Codes(op, code);
  const ConvPool p = CheckedConvPool(op, x, f, y, code, *pad, window);
  if (bias->count) {
    add = Input(op, bias->arrays[0]);
    CheckBias(op, p, bias->arrays[0]);
  }
  if (Numel(y)) ConvPoolForward(p, data, filter, add, relu != 0, out, codes);
}

void Conv2dPoolDataGradient(const DLArray* f, const DLArray* dy, const DLArray* code, DLArray* dx,
                            Struct<HW> pad, int64_t window, int64_t) {
  const char* op = "conv2d_pool_data_gradient";
  Check(op, code);
  const float *filter = Input(op, f), *gradient = Input(op, dy);
  float* out = Output(op, dx);
  const uint8_t* codes = Codes(op, code);
  const ConvPool p = CheckedConvPool(op, dx, f, dy, code, *pad, window);
  if (Numel(dx)) ConvPoolDataGradient(p, filter, gradient, codes, out);
}

void Conv2dPoolFilterGradient(const DLArray* x, const DLArray* dy, const DLArray* code,
                              DLArrayList* gradients, Struct<HW> pad, int64_t window, int64_t) {
  const char* op = "conv2d_pool_filter_gradient";
  if (gradients->count < 1 || gradients->count > 2) Fail("%s: expected one or two gradients", op);
  Check(op, code);
  const float *data = Input(op, x), *gradient = Input(op, dy);
  float *df = Output(op, gradients->arrays[0]), *db = nullptr;
  const uint8_t* codes = Codes(op, code);
  const ConvPool p = CheckedConvPool(op, x, gradients->arrays[0], dy, code, *pad, window);
  if (gradients->count == 2) {
    db = Output(op, gradients->arrays[1]);
    CheckBias(op, p, gradients->arrays[1]);
  }
  ConvPoolFilterGradient(p, data, gradient, codes, df, db);
}

// With more channels or filters than this a matrix product is as fast.
constexpr int64_t kMostChannels = 64;
constexpr int64_t kMostElements = 1 << 30;  // of an image: offsets in it have 32 bits

bool Fits(const ConvPool& p) {
  return !p.Empty() && std::max(p.conv.c, p.conv.o) <= kMostChannels &&
         p.conv.c * Size(SeenByWindows(p)) <= kMostElements;
}

bool Conv2dPoolFits(const DLArray* x, const DLArray* f, const DLArrayList*, DLArray* y,
                    DLArray* code, Struct<HW> before, int64_t window, int64_t, int64_t) {
  return Fits(CheckedConvPool("conv2d_pool", x, f, y, code, *before, window));
}

bool Conv2dPoolDataGradientFits(const DLArray* f, const DLArray* dy, const DLArray* code,
                                DLArray* dx, Struct<HW> before, int64_t window, int64_t) {
  return Fits(CheckedConvPool("conv2d_pool_data_gradient", dx, f, dy, code, *before, window));
}

bool Conv2dPoolFilterGradientFits(const DLArray* x, const DLArray* dy, const DLArray* code,
                                  DLArrayList* gradients, Struct<HW> before, int64_t window,
                                  int64_t) {
  const char* op = "conv2d_pool_filter_gradient";
  return gradients->count >= 1 &&
         Fits(CheckedConvPool(op, x, gradients->arrays[0], dy, code, *before, window));
}

DLSYS_KERNEL(cpu, conv2d_pool, Conv2dPool);
DLSYS_KERNEL_WIDENED(cpu, conv2d_pool, Conv2dPool);
DLSYS_KERNEL(cpu, conv2d_pool_data_gradient, Conv2dPoolDataGradient);
DLSYS_KERNEL_WIDENED(cpu, conv2d_pool_data_gradient, Conv2dPoolDataGradient);
DLSYS_KERNEL(cpu, conv2d_pool_filter_gradient, Conv2dPoolFilterGradient);
DLSYS_KERNEL_WIDENED(cpu, conv2d_pool_filter_gradient, Conv2dPoolFilterGradient);
DLSYS_FITS(cpu, conv2d_pool, Conv2dPoolFits);
DLSYS_FITS(cpu, conv2d_pool_data_gradient, Conv2dPoolDataGradientFits);
DLSYS_FITS(cpu, conv2d_pool_filter_gradient, Conv2dPoolFilterGradientFits);

}  // namespace
}  // namespace cpu
}  // namespace dlsys
