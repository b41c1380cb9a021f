// A stand-in for libcudnn for the emulated GPU, whose memory is the host's: activations, pooling
// and batch normalization with the arguments of cudnn_ops.h, by their definitions, in double
// precision. It has float32 and bfloat16; float16 it does not support. A call waits for its stream
// and computes at once, so that graphs are not to be captured.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "include/dlsys.h"

enum { kFloat = 0, kBfloat16 = 9, kBadParam = 2000, kNotSupported = 3000 };
enum { kSigmoid, kRelu, kTanh };
enum { kMeanWithPadding = 1, kMeanWithoutPadding = 2, kMax = 3 };

typedef struct {
  int type, n, c, h, w;
} Tensor;
typedef struct {
  int mode, nan;
} Activation;
typedef struct {
  int mode, nan, h, w, pad_h, pad_w, stride_h, stride_w;
} Pooling;
typedef struct {
  DLStream stream;
} Handle;

static long Numel(const Tensor* t) { return (long)t->n * t->c * t->h * t->w; }

static double Get(const Tensor* t, const void* data, long k) {
  if (t->type == kFloat) return ((const float*)data)[k];
  const uint32_t bits = (uint32_t)((const uint16_t*)data)[k] << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

static void Set(const Tensor* t, void* data, long k, double x) {
  const float value = (float)x;
  if (t->type == kFloat) {
    ((float*)data)[k] = value;
    return;
  }
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  ((uint16_t*)data)[k] = (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

// 0 once all that the stream was given is done, or a status.
static int Begin(const Handle* handle, const Tensor* t) {
  if (t->type != kFloat && t->type != kBfloat16) return kNotSupported;
  const DLContext gpu = {0, DL_GPU};
  void* library = dlopen(getenv("DLSYS_LIBRARY"), RTLD_LAZY | RTLD_NOLOAD);
  int (*wait)(DLContext, DLStream) = (int (*)(DLContext, DLStream))dlsym(library, "DLStreamDrain");
  return wait(gpu, handle->stream) ? kBadParam : 0;
}

static void* Made(size_t nbytes) { return calloc(1, nbytes); }

size_t cudnnGetVersion(void) { return 91400; }
const char* cudnnGetErrorString(int status) { return status == kBadParam ? "bad parameter" : "?"; }
int cudnnCreate(Handle** handle) { return *handle = Made(sizeof **handle), 0; }
int cudnnSetStream(Handle* handle, DLStream stream) { return handle->stream = stream, 0; }

int cudnnCreateTensorDescriptor(Tensor** t) { return *t = Made(sizeof **t), 0; }
int cudnnSetTensor4dDescriptor(Tensor* t, int format, int type, int n, int c, int h, int w) {
  *t = (Tensor){type, n, c, h, w};
  return format || n < 1 || c < 1 || h < 1 || w < 1 ? kBadParam : 0;
}
int cudnnDestroyTensorDescriptor(Tensor* t) { return free(t), 0; }

// ---- activations ----

int cudnnCreateActivationDescriptor(Activation** a) { return *a = Made(sizeof **a), 0; }
int cudnnSetActivationDescriptor(Activation* a, int mode, int nan, double coefficient) {
  *a = (Activation){mode, nan};
  return mode > kTanh || nan != 1 || coefficient != 0 ? kBadParam : 0;
}
int cudnnDestroyActivationDescriptor(Activation* a) { return free(a), 0; }

int cudnnActivationForward(Handle* handle, const Activation* a, const float* alpha, const Tensor* t,
                           const void* x, const float* beta, const Tensor* of_y, void* y) {
  if (*alpha != 1 || *beta != 0 || memcmp(t, of_y, sizeof *t)) return kBadParam;
  const int status = Begin(handle, t);
  for (long k = 0; !status && k < Numel(t); k++) {
    const double v = Get(t, x, k);
    Set(t, y, k,
        a->mode == kTanh   ? tanh(v)
        : a->mode == kRelu ? (v < 0 ? 0 : v)
                           : 1 / (1 + exp(-v)));
  }
  return status;
}

int cudnnActivationBackward(Handle* handle, const Activation* a, const float* alpha,
                            const Tensor* t, const void* y, const Tensor* of_dy, const void* dy,
                            const Tensor* of_x, const void* x, const float* beta,
                            const Tensor* of_dx, void* dx) {
  const int alike =
      !memcmp(t, of_dy, sizeof *t) && !memcmp(t, of_x, sizeof *t) && !memcmp(t, of_dx, sizeof *t);
  if (*alpha != 1 || *beta != 0 || !alike) return kBadParam;
  const int status = Begin(handle, t);
  for (long k = 0; !status && k < Numel(t); k++) {
    const double v = Get(t, y, k), g = Get(t, dy, k);
    Set(t, dx, k,
        a->mode == kTanh   ? g * (1 - v * v)
        : a->mode == kRelu ? (Get(t, x, k) > 0 ? g : 0)
                           : g * v * (1 - v));
  }
  return status;
}

// ---- pooling ----

int cudnnCreatePoolingDescriptor(Pooling** p) { return *p = Made(sizeof **p), 0; }
int cudnnSetPooling2dDescriptor(Pooling* p, int mode, int nan, int h, int w, int pad_h, int pad_w,
                                int stride_h, int stride_w) {
  *p = (Pooling){mode, nan, h, w, pad_h, pad_w, stride_h, stride_w};
  return nan != 1;
}
int cudnnDestroyPoolingDescriptor(Pooling* p) { return free(p), 0; }

// The elements of a window that are in the image, by visit(k, its index); their number.
typedef struct {
  const Pooling* p;
  const Tensor *x, *y;
} Windows;
static int Inside(const Windows* s, long at, long* inside) {
  const Pooling* p = s->p;
  const long w = at % s->y->w, h = at / s->y->w % s->y->h, image = at / s->y->w / s->y->h;
  int count = 0;
  for (long i = h * p->stride_h - p->pad_h; i < h * p->stride_h - p->pad_h + p->h; i++)
    for (long j = w * p->stride_w - p->pad_w; j < w * p->stride_w - p->pad_w + p->w; j++)
      if (i >= 0 && j >= 0 && i < s->x->h && j < s->x->w)
        inside[count++] = (image * s->x->h + i) * s->x->w + j;
  return count;
}

static double Divisor(const Pooling* p, int count) {
  return p->mode == kMeanWithPadding ? (double)p->h * p->w : count;
}

static int Fits(const Pooling* p, const Tensor* x, const Tensor* y) {
  return y->h == 1 + (x->h + 2 * p->pad_h - p->h) / p->stride_h &&
         y->w == 1 + (x->w + 2 * p->pad_w - p->w) / p->stride_w;
}

int cudnnPoolingForward(Handle* handle, const Pooling* p, const float* alpha, const Tensor* of_x,
                        const void* x, const float* beta, const Tensor* of_y, void* y) {
  if (*alpha != 1 || *beta != 0 || !Fits(p, of_x, of_y)) return kBadParam;
  const int status = Begin(handle, of_x);
  const Windows s = {p, of_x, of_y};
  long* inside = malloc(sizeof *inside * p->h * p->w);
  for (long at = 0; !status && at < Numel(of_y); at++) {
    const int count = Inside(&s, at, inside);
    double sum = 0, most = -FLT_MAX;  // as cuDNN does, where all are less
    for (int k = 0; k < count; k++) {
      const double v = Get(of_x, x, inside[k]);
      sum += v;
      if (v > most || isnan(v)) most = v;
    }
    Set(of_y, y, at, p->mode == kMax ? most : sum / Divisor(p, count));
  }
  return free(inside), status;
}

int cudnnPoolingBackward(Handle* handle, const Pooling* p, const float* alpha, const Tensor* of_y,
                         const void* y, const Tensor* of_dy, const void* dy, const Tensor* of_x,
                         const void* x, const float* beta, const Tensor* of_dx, void* dx) {
  if (*alpha != 1 || *beta != 0 || !Fits(p, of_x, of_y) || memcmp(of_y, of_dy, sizeof *of_y) ||
      memcmp(of_x, of_dx, sizeof *of_x))
    return kBadParam;
  const int status = Begin(handle, of_x);
  const Windows s = {p, of_x, of_y};
  long* inside = malloc(sizeof *inside * p->h * p->w);
  double* sums = calloc(Numel(of_x), sizeof *sums);
  for (long at = 0; !status && at < Numel(of_y); at++) {
    const int count = Inside(&s, at, inside);
    for (int k = 0; k < count; k++) {
      if (p->mode != kMax) sums[inside[k]] += Get(of_dy, dy, at) / Divisor(p, count);
      const double value = Get(of_x, x, inside[k]), wanted = Get(of_y, y, at);
      if (p->mode == kMax && (value == wanted || (isnan(value) && isnan(wanted)))) {
        sums[inside[k]] += Get(of_dy, dy, at);
        break;
      }
    }
  }
  for (long k = 0; !status && k < Numel(of_x); k++) Set(of_dx, dx, k, sums[k]);
  return free(inside), free(sums), status;
}

// ---- batch normalization ----

static int IsOfChannels(const Tensor* t, const Tensor* x) {
  return t->type == kFloat && t->n == 1 && t->c == x->c && t->h == 1 && t->w == 1;
}

// The index of element k of a channel.
static long At(const Tensor* t, long c, long k) {
  const long inner = (long)t->h * t->w;
  return (k / inner * t->c + c) * inner + k % inner;
}
static long PerChannel(const Tensor* t) { return Numel(t) / t->c; }

int cudnnBatchNormalizationForwardTraining(Handle* handle, int mode, const float* alpha,
                                           const float* beta, const Tensor* t, const void* x,
                                           const Tensor* of_y, void* y, const Tensor* channels,
                                           const float* scale, const float* bias, double factor,
                                           void* running_mean, void* running_variance, double eps,
                                           float* mean, float* inverse) {
  if (mode != 2 || *alpha != 1 || *beta != 0 || !IsOfChannels(channels, t) || factor != 1 ||
      running_mean || running_variance || memcmp(t, of_y, sizeof *t))
    return kBadParam;
  const int status = Begin(handle, t);
  const long count = PerChannel(t);
  for (long c = 0; !status && c < t->c; c++) {
    double sum = 0, square = 0;
    for (long k = 0; k < count; k++) sum += Get(t, x, At(t, c, k));
    for (long k = 0; k < count; k++) square += pow(Get(t, x, At(t, c, k)) - sum / count, 2);
    const double r = 1 / sqrt(square / count + eps);
    for (long k = 0; k < count; k++)
      Set(t, y, At(t, c, k), (Get(t, x, At(t, c, k)) - sum / count) * r * scale[c] + bias[c]);
    mean[c] = (float)(sum / count);
    inverse[c] = (float)r;
  }
  return status;
}

int cudnnBatchNormalizationForwardInference(Handle* handle, int mode, const float* alpha,
                                            const float* beta, const Tensor* t, const void* x,
                                            const Tensor* of_y, void* y, const Tensor* channels,
                                            const float* scale, const float* bias,
                                            const float* mean, const float* variance, double eps) {
  if (mode != 2 || *alpha != 1 || *beta != 0 || !IsOfChannels(channels, t) ||
      memcmp(t, of_y, sizeof *t))
    return kBadParam;
  const int status = Begin(handle, t);
  for (long c = 0; !status && c < t->c; c++)
    for (long k = 0; k < PerChannel(t); k++) {
      const double moved = Get(t, x, At(t, c, k)) - mean[c];
      Set(t, y, At(t, c, k), moved / sqrt(variance[c] + eps) * scale[c] + bias[c]);
    }
  return status;
}

int cudnnBatchNormalizationBackward(Handle* handle, int mode, const float* alpha_data,
                                    const float* beta_data, const float* alpha_sums,
                                    const float* beta_sums, const Tensor* t, const void* x,
                                    const Tensor* of_dy, const void* dy, const Tensor* of_dx,
                                    void* dx, const Tensor* channels, const float* scale,
                                    float* dscale, float* dbias, double eps, const float* mean,
                                    const float* inverse) {
  if (mode != 2 || *alpha_data != 1 || *beta_data != 0 || *alpha_sums != 1 || *beta_sums != 0 ||
      !IsOfChannels(channels, t) || !(eps > 0) || memcmp(t, of_dy, sizeof *t) ||
      memcmp(t, of_dx, sizeof *t))
    return kBadParam;
  const int status = Begin(handle, t);
  const long count = PerChannel(t);
  for (long c = 0; !status && c < t->c; c++) {
    double by_scale = 0, by_bias = 0;
    for (long k = 0; k < count; k++) {
      const double g = Get(t, dy, At(t, c, k));
      by_bias += g;
      by_scale += g * (Get(t, x, At(t, c, k)) - mean[c]) * inverse[c];
    }
    for (long k = 0; k < count; k++) {
      const double xhat = (Get(t, x, At(t, c, k)) - mean[c]) * inverse[c];
      const double g = Get(t, dy, At(t, c, k));
      Set(t, dx, At(t, c, k), scale[c] * inverse[c] * (g - (by_bias + xhat * by_scale) / count));
    }
    dscale[c] = (float)by_scale;
    dbias[c] = (float)by_bias;
  }
  return status;
}
