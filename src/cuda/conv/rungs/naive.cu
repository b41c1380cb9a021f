// The rung `naive`: direct convolution in true float32, one thread for each element of the result,
// which it sums in one order. Forward and data gradient are gathers; a filter's element is a sum
// over every position of the batch. conv.cuh has the contract. Every input element is read once
// for each filter and kernel offset: limited by the loads that the caches serve, two for each
// multiply-add, and the filter gradient by having too few threads.
#include "cuda/conv/conv.cuh"
#include "cuda/runtime/launch.cuh"

namespace dlsys {
namespace cuda {
namespace {

// ---- kernels ----

__global__ void NaiveForwardKernel(const Conv c, const float* x, const float* f, const float* bias,
                                   float* y, int64_t numel) {
  const int64_t out = c.out.h * c.out.w, in = c.in.h * c.in.w, channels = c.c / c.groups;
  for (int64_t k = FirstItem(); k < numel; k += ItemStep()) {
    const int64_t n = k / out / c.o, o = k / out % c.o, group = o / (c.o / c.groups);
    const int64_t top = k % out / c.out.w * c.stride.h - c.pad.h;
    const int64_t left = k % c.out.w * c.stride.w - c.pad.w;
    const float* from = x + (n * c.c + group * channels) * in;
    const float* filter = f + o * channels * c.kernel.h * c.kernel.w;
    float sum = 0.f;
    for (int64_t channel = 0; channel < channels; channel++, from += in)
      for (int64_t a = 0; a < c.kernel.h; a++)
        for (int64_t b = 0; b < c.kernel.w; b++, filter++) {
          const int64_t h = top + a * c.dilation.h, w = left + b * c.dilation.w;
          if (h >= 0 && h < c.in.h && w >= 0 && w < c.in.w)
            sum = fmaf(*filter, from[h * c.in.w + w], sum);
        }
    y[k] = bias ? sum + bias[o] : sum;
  }
}

__global__ void NaiveDataGradientKernel(const Conv c, const float* f, const float* dy, float* dx,
                                        int64_t numel) {
  const int64_t out = c.out.h * c.out.w, in = c.in.h * c.in.w, kernel = c.kernel.h * c.kernel.w;
  const int64_t channels = c.c / c.groups, filters = c.o / c.groups;
  for (int64_t k = FirstItem(); k < numel; k += ItemStep()) {
    const int64_t n = k / in / c.c, channel = k / in % c.c, group = channel / channels;
    const int64_t h = k % in / c.in.w + c.pad.h, w = k % c.in.w + c.pad.w;
    float sum = 0.f;
    for (int64_t o = group * filters; o < (group + 1) * filters; o++) {
      const float* from = dy + (n * c.o + o) * out;
      const float* filter = f + (o * channels + channel % channels) * kernel;
      for (int64_t a = 0; a < c.kernel.h; a++)
        for (int64_t b = 0; b < c.kernel.w; b++) {
          const int64_t down = h - a * c.dilation.h, across = w - b * c.dilation.w;
          const int64_t i = down / c.stride.h, j = across / c.stride.w;
          if (down >= 0 && across >= 0 && down % c.stride.h == 0 && across % c.stride.w == 0 &&
              i < c.out.h && j < c.out.w)
            sum = fmaf(filter[a * c.kernel.w + b], from[i * c.out.w + j], sum);
        }
    }
    dx[k] = sum;
  }
}

__global__ void NaiveFilterGradientKernel(const Conv c, const float* x, const float* dy, float* df,
                                          int64_t numel) {
  const int64_t out = c.out.h * c.out.w, in = c.in.h * c.in.w, kernel = c.kernel.h * c.kernel.w;
  const int64_t channels = c.c / c.groups;
  for (int64_t k = FirstItem(); k < numel; k += ItemStep()) {
    const int64_t o = k / kernel / channels;
    const int64_t channel = o / (c.o / c.groups) * channels + k / kernel % channels;
    const int64_t top = k % kernel / c.kernel.w * c.dilation.h - c.pad.h;
    const int64_t left = k % c.kernel.w * c.dilation.w - c.pad.w;
    float sum = 0.f;
    for (int64_t n = 0; n < c.n; n++)
      for (int64_t i = 0; i < c.out.h; i++)
        for (int64_t j = 0; j < c.out.w; j++) {
          const int64_t h = top + i * c.stride.h, w = left + j * c.stride.w;
          if (h >= 0 && h < c.in.h && w >= 0 && w < c.in.w)
            sum = fmaf(dy[(n * c.o + o) * out + i * c.out.w + j],
                       x[(n * c.c + channel) * in + h * c.in.w + w], sum);
        }
    df[k] = sum;
  }
}

// ---- launchers ----

void NaiveForward(const ConvCall& at, const Conv& c, const float* x, const float* f,
                  const float* bias, float* y) {
  const int64_t numel = c.n * c.o * Size(c.out);
  Launch(at.op, NaiveForwardKernel, Blocks(numel), kThreads, 0, at.stream, c, x, f, bias, y, numel);
}

void NaiveDataGradient(const ConvCall& at, const Conv& c, const float* f, const float* dy,
                       float* dx) {
  const int64_t numel = c.n * c.c * Size(c.in);
  Launch(at.op, NaiveDataGradientKernel, Blocks(numel), kThreads, 0, at.stream, c, f, dy, dx,
         numel);
}

void NaiveFilterGradient(const ConvCall& at, const Conv& c, const float* x, const float* dy,
                         float* df) {
  const int64_t numel = c.o * c.GroupChannels() * Size(c.kernel);
  Launch(at.op, NaiveFilterGradientKernel, Blocks(numel), kThreads, 0, at.stream, c, x, dy, df,
         numel);
}

}  // namespace

const ConvAlgorithm kNaiveConv = {
    "naive", nullptr, nullptr, nullptr, NaiveForward, NaiveDataGradient, NaiveFilterGradient};

}  // namespace cuda
}  // namespace dlsys
