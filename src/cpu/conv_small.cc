// Small convolutions fused with bias, relu and max-pool, and their gradients; the contract is in
// conv_small.h. Images go a few at a time, so that what lies between convolution and pool stays in
// a thread's cache, and only there.
#include "../conv_small.h"

#include <algorithm>
#include <cstring>

#include "conv.h"
#include "parallel.h"

namespace dlsys {
namespace cpu {
namespace {

constexpr int64_t kBetween = 65536;  // floats between convolution and pool at a time
constexpr int64_t kParts = 16;       // of a sum over images

thread_local Scratch between_scratch, gradient_scratch, part_scratch;

// Some images of a convolution.
Conv Part(const ConvPool& p, int64_t images) {
  Conv conv = p.conv;
  conv.n = images;
  return conv;
}

int64_t ImagesAtOnce(const ConvPool& p) {
  return std::max<int64_t>(1, kBetween / (p.conv.o * Size(p.conv.out)));
}

// ---- forward ----

// The windows of `planes` planes: the first largest element, where NaN is larger than every number.
void PoolPlanes(const ConvPool& p, int64_t planes, bool relu, const float* x, float* y,
                uint8_t* code) {
  const int64_t width = p.conv.out.w, window = p.window;
  for (int64_t row = 0; row < planes * p.out.h; row++, x += window * width) {
    for (int64_t j = 0; j < p.out.w; j++, y++, code++) {
      const float* corner = x + j * window;
      float best = corner[0];
      int place = 0;
      for (int64_t k = 1; k < window * window; k++) {
        const float value = corner[k / window * width + k % window];
        const bool larger = !(value <= best) && best == best;
        best = larger ? value : best;
        place = larger ? (int)k : place;
      }
      *y = relu && best < 0.f ? 0.f : best;
      *code = relu && !(best > 0.f) ? kCut : (uint8_t)place;
    }
  }
}

void Conv2dPool(const DLArray* x, const DLArray* f, const DLArrayList* bias, DLArray* y,
                DLArray* code, int64_t before, int64_t window, int64_t relu) {
  const char* op = "conv2d_pool";
  Check(op, code);
  const float *data = Input(op, x), *filter = Input(op, f), *add = nullptr;
  float* out = Output(op, y);
  uint8_t* codes = Codes(op, code);
  const ConvPool p = CheckedConvPool(op, x, f, y, code, before, window);
  if (bias->count) {
    add = Input(op, bias->arrays[0]);
    if (Numel(bias->arrays[0]) != p.conv.o) Fail("%s: expected a bias for each filter", op);
  }
  if (!Numel(y)) return;
  const int64_t of_x = p.conv.c * Size(p.conv.plane), of_y = p.conv.o * Size(p.out);
  ParallelFor(p.conv.n, ImagesAtOnce(p), [&](int64_t begin, int64_t end) {
    const int64_t planes = (end - begin) * p.conv.o;
    float* between = between_scratch.Get<float>(planes * Size(p.conv.out));
    GemmForward(Part(p, end - begin), data + begin * of_x, filter, add, between);
    PoolPlanes(p, planes, relu != 0, between, out + begin * of_y, codes + begin * of_y);
  });
}

// ---- gradients ----

// dy where the codes say, zeros elsewhere: the gradient of the convolution's result.
float* Spread(const ConvPool& p, int64_t images, const float* dy, const uint8_t* code) {
  const int64_t numel = images * p.conv.o * Size(p.conv.out), width = p.conv.out.w;
  float* to = between_scratch.Get<float>(numel);
  memset(to, 0, numel * sizeof(float));
  float* row = to;
  for (int64_t i = 0; i < images * p.conv.o * p.out.h; i++, row += p.window * width)
    for (int64_t j = 0; j < p.out.w; j++, dy++, code++)
      if (*code != kCut) row[*code / p.window * width + j * p.window + *code % p.window] = *dy;
  return to;
}

void Conv2dPoolDataGradient(const DLArray* f, const DLArray* dy, const DLArray* code, DLArray* dx,
                            int64_t before, int64_t window) {
  const char* op = "conv2d_pool_data_gradient";
  Check(op, code);
  const float *filter = Input(op, f), *gradient = Input(op, dy);
  float* out = Output(op, dx);
  const uint8_t* codes = Codes(op, code);
  const ConvPool p = CheckedConvPool(op, dx, f, dy, code, before, window);
  const int64_t of_x = p.conv.c * Size(p.conv.plane), of_y = p.conv.o * Size(p.out);
  ParallelFor(p.conv.n, ImagesAtOnce(p), [&](int64_t begin, int64_t end) {
    const float* spread = Spread(p, end - begin, gradient + begin * of_y, codes + begin * of_y);
    GemmDataGradient(Part(p, end - begin), filter, spread, out + begin * of_x);
  });
}

// Adds the gradients of images [begin, end) to df, and to db those of the bias in double.
void AddGradients(const ConvPool& p, const float* x, const float* dy, const uint8_t* code,
                  int64_t begin, int64_t end, float* df, double* db) {
  const int64_t of_x = p.conv.c * Size(p.conv.plane), of_y = p.conv.o * Size(p.out);
  const int64_t numel = p.conv.o * p.conv.c * Size(p.conv.size);
  float* of_filter = gradient_scratch.Get<float>(numel);
  const int64_t step = ImagesAtOnce(p);
  for (int64_t first = begin; first < end; first += step) {
    const int64_t images = std::min(step, end - first);
    const float* spread = Spread(p, images, dy + first * of_y, code + first * of_y);
    GemmFilterGradient(Part(p, images), x + first * of_x, spread, of_filter);
    for (int64_t k = 0; k < numel; k++) df[k] += of_filter[k];
  }
  for (int64_t plane = begin * p.conv.o; plane < end * p.conv.o; plane++)
    for (int64_t k = plane * Size(p.out); k < (plane + 1) * Size(p.out); k++)
      if (code[k] != kCut) db[plane % p.conv.o] += dy[k];
}

void Conv2dPoolFilterGradient(const DLArray* x, const DLArray* dy, const DLArray* code,
                              DLArrayList* gradients, int64_t before, int64_t window) {
  const char* op = "conv2d_pool_filter_gradient";
  if (gradients->count < 1 || gradients->count > 2) Fail("%s: expected one or two gradients", op);
  Check(op, code);
  const float *data = Input(op, x), *gradient = Input(op, dy);
  float *df = Output(op, gradients->arrays[0]), *db = nullptr;
  const uint8_t* codes = Codes(op, code);
  const ConvPool p = CheckedConvPool(op, x, gradients->arrays[0], dy, code, before, window);
  if (gradients->count == 2) {
    db = Output(op, gradients->arrays[1]);
    if (Numel(gradients->arrays[1]) != p.conv.o) Fail("%s: expected a bias for each filter", op);
  }
  const int64_t numel = Numel(gradients->arrays[0]), images = (p.conv.n + kParts - 1) / kParts;
  const int64_t parts = images ? (p.conv.n + images - 1) / images : 0;
  double* of_bias = part_scratch.Get<double>(parts * (p.conv.o + numel));  // floats behind them
  float* of_filter = (float*)(of_bias + parts * p.conv.o);
  memset((void*)of_bias, 0, parts * (p.conv.o * sizeof(double) + numel * sizeof(float)));
  ParallelFor(parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; k++)
      AddGradients(p, data, gradient, codes, k * images, std::min((k + 1) * images, p.conv.n),
                   of_filter + k * numel, of_bias + k * p.conv.o);
  });
  for (int64_t k = 0; k < numel; k++) {
    float sum = 0;
    for (int64_t part = 0; part < parts; part++) sum += of_filter[part * numel + k];
    df[k] = sum;
  }
  for (int64_t o = 0; db && o < p.conv.o; o++) {
    double sum = 0;
    for (int64_t part = 0; part < parts; part++) sum += of_bias[part * p.conv.o + o];
    db[o] = (float)sum;
  }
}

DLSYS_KERNEL(cpu, conv2d_pool, Conv2dPool);
DLSYS_KERNEL(cpu, conv2d_pool_data_gradient, Conv2dPoolDataGradient);
DLSYS_KERNEL(cpu, conv2d_pool_filter_gradient, Conv2dPoolFilterGradient);

}  // namespace
}  // namespace cpu
}  // namespace dlsys
