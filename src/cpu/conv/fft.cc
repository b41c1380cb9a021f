// Convolution by Fourier transforms: planes are zero-padded to powers of two, a correlation is the
// product of one transform and the conjugate of another, and sums over channels (or, for a filter's
// gradient, over images) are taken between the transforms. Strides sample the result, or space dy
// out; dilation spaces the filter out. The transform is Cooley and Tukey's of radix 2, by columns,
// in SIMD along the rows, with a transposition between the axes; forward ones leave the order
// bit-reversed and inverse ones take it, so that nothing is permuted. It pays for large filters.
//
// A transform mixes all elements of a plane, so where a result is not finite, implicit GEMM
// computes all of it again.
#include <atomic>
#include <cmath>

#include "cpu/conv/conv.h"
#include "cpu/conv/conv_pool.h"
#include "cpu/runtime/parallel.h"
#include "cpu/runtime/simd.h"

namespace dlsys {
namespace cpu {
namespace {

constexpr int64_t kChunkNumel = int64_t(1) << 22;  // complex numbers of a chunk's transforms

int64_t PowerOfTwo(int64_t n) {
  int64_t size = 1;
  while (size < n) size *= 2;
  return size;
}

// Complex numbers as an array of real parts and one of imaginary parts.
struct Complex {
  float *re, *im;
  Complex operator+(int64_t k) const { return {re + k, im + k}; }
};

// Columns of x (n, width) transformed in place. roots: exp(-2 pi i k / n) for k < n / 2.
DLSYS_INLINE void TransformColumns(const Complex& x, int64_t n, int64_t width, const Complex& roots,
                                   bool inverse) {
  for (int64_t stage = 1; stage < n; stage *= 2) {
    const int64_t half = inverse ? stage : n / 2 / stage, by = n / 2 / half;
    for (int64_t k = 0; k < half; k++) {
      const float re = roots.re[k * by], im = inverse ? -roots.im[k * by] : roots.im[k * by];
      for (int64_t first = k; first < n; first += 2 * half) {
        const Complex a = x + first * width, b = x + (first + half) * width;
        DLSYS_IVDEP
        for (int64_t j = 0; j < width; j++) {
          const float b_re = b.re[j], b_im = b.im[j];
          // Forward multiplies the difference, inverse the second operand.
          const float t_re = inverse ? b_re * re - b_im * im : b_re;
          const float t_im = inverse ? b_re * im + b_im * re : b_im;
          const float d_re = a.re[j] - t_re, d_im = a.im[j] - t_im;
          a.re[j] += t_re;
          a.im[j] += t_im;
          b.re[j] = inverse ? d_re : d_re * re - d_im * im;
          b.im[j] = inverse ? d_im : d_re * im + d_im * re;
        }
      }
    }
  }
}

// Transforms of planes (h, w), both powers of two, to (w, h) in bit-reversed order and back.
class Fft {
 public:
  explicit Fft(HW size) : size_(size), roots_(size.h + size.w) {
    Serially([&] {
      FillRoots(size_.h, Roots(0, size_.h));
      FillRoots(size_.w, Roots(size_.h, size_.w));
    });
  }
  int64_t Numel() const { return Size(size_); }

  // x becomes to's input; both have Numel() numbers, and x is overwritten.
  void Forward(const Complex& x, const Complex& to) const {
    Dispatch([&]() __attribute__((always_inline)) {
      TransformColumns(x, size_.h, size_.w, Roots(0, size_.h), false);
    });
    Transpose(x.re, size_.w, size_.h, size_.w, to.re, size_.h);
    Transpose(x.im, size_.w, size_.h, size_.w, to.im, size_.h);
    Dispatch([&]() __attribute__((always_inline)) {
      TransformColumns(to, size_.w, size_.h, Roots(size_.h, size_.w), false);
    });
  }
  // Times Numel().
  void Inverse(const Complex& x, const Complex& to) const {
    Dispatch([&]() __attribute__((always_inline)) {
      TransformColumns(x, size_.w, size_.h, Roots(size_.h, size_.w), true);
    });
    Transpose(x.re, size_.h, size_.w, size_.h, to.re, size_.w);
    Transpose(x.im, size_.h, size_.w, size_.h, to.im, size_.w);
    Dispatch([&]() __attribute__((always_inline)) {
      TransformColumns(to, size_.h, size_.w, Roots(0, size_.h), true);
    });
  }

 private:
  Complex Roots(int64_t first, int64_t n) const {
    return {roots_.data() + first, roots_.data() + first + n / 2};
  }
  static void FillRoots(int64_t n, const Complex& roots) {
    for (int64_t k = 0; k < n / 2; k++) {
      const double angle = -2 * M_PI * (double)k / (double)n;
      roots.re[k] = (float)std::cos(angle);
      roots.im[k] = (float)std::sin(angle);
    }
  }

  const HW size_;
  const ScratchArray<float> roots_;
};

// Elements of a plane with strides, spaced out over a zero-padded plane that is transformed:
// element (i, j) is at origin + (i, j) * spacing there; what lies outside is left out.
struct Plane {
  HW count, stride, origin, spacing;

  void Load(const float* from, HW size, float* to) const {
    std::fill(to, to + Size(size), 0.f);
    for (int64_t i = 0; i < count.h; i++) {
      const int64_t h = origin.h + i * spacing.h;
      if (h < 0 || h >= size.h) continue;
      for (int64_t j = 0; j < count.w; j++) {
        const int64_t w = origin.w + j * spacing.w;
        if (w >= 0 && w < size.w) to[h * size.w + w] = from[i * stride.h + j * stride.w];
      }
    }
  }
};

// results[a, b] = sum over k of the correlation of left[a, k] with right[b, k], sampled.
struct Correlations {
  int64_t a, b, k;
  Plane left, right;
  int64_t left_a, left_k, right_b, right_k;  // strides
  HW count, sample;                          // of a result: how many, and how far apart
  HW result_stride;
  int64_t result_a, result_b;
  HW span;                                 // of the padded planes
  const float *of_left, *of_right, *bias;  // of b, or null
  float* results;
};

class FftProduct {
 public:
  explicit FftProduct(const Correlations& c)
      : c_(c), size_{PowerOfTwo(c.span.h), PowerOfTwo(c.span.w)}, fft_(size_) {}

  // False where a result is not finite.
  bool Run() {
    if (!c_.a || !c_.b || !Size(c_.count)) return true;
    const int64_t numel = std::max<int64_t>(1, c_.k * fft_.Numel());
    const int64_t most = std::clamp<int64_t>(kChunkNumel / numel, 1, c_.a);
    const ScratchArray<float> transformed(2 * most * c_.k * fft_.Numel());
    for (int64_t first = 0; first < c_.a; first += most)
      RunChunk(first, std::min(most, c_.a - first), transformed.data());
    return finite_;
  }

 private:
  // Work of a task: two planes, and the transforms of the right operand.
  struct Task {
    const ScratchArray<float> planes, right;
    explicit Task(const FftProduct& f)
        : planes(4 * f.fft_.Numel()), right(2 * f.c_.k * f.fft_.Numel()) {}
    Complex Of(int64_t plane, int64_t numel) const {
      return {planes.data() + 2 * plane * numel, planes.data() + (2 * plane + 1) * numel};
    }
  };
  Complex At(float* data, int64_t k) const {
    return {data + 2 * k * fft_.Numel(), data + (2 * k + 1) * fft_.Numel()};
  }

  void RunChunk(int64_t first, int64_t count, float* transformed) {
    const auto make = [&] { return Task(*this); };
    auto load = [&](int64_t begin, int64_t end, const Task& task) {
      for (int64_t t = begin; t < end; t++)
        Transform(c_.left, c_.of_left + (first + t / c_.k) * c_.left_a + t % c_.k * c_.left_k, task,
                  At(transformed, t));
    };
    ParallelForWithScratch(count * c_.k, RowGrain(fft_.Numel()), make, load);
    auto multiply = [&](int64_t begin, int64_t end, const Task& task) {
      for (int64_t b = begin; b < end; b++) {
        for (int64_t k = 0; k < c_.k; k++)
          Transform(c_.right, c_.of_right + b * c_.right_b + k * c_.right_k, task,
                    At(task.right.data(), k));
        for (int64_t a = 0; a < count; a++) Multiply(first + a, b, At(transformed, a * c_.k), task);
      }
    };
    ParallelForWithScratch(c_.b, 1, make, multiply);
  }

  void Transform(const Plane& plane, const float* from, const Task& task, const Complex& to) const {
    const Complex padded = task.Of(0, fft_.Numel());
    plane.Load(from, size_, padded.re);
    std::fill(padded.im, padded.im + fft_.Numel(), 0.f);
    fft_.Forward(padded, to);
  }

  void Multiply(int64_t a, int64_t b, const Complex& left, const Task& task) {
    const int64_t numel = fft_.Numel();
    const Complex sum = task.Of(0, numel), result = task.Of(1, numel);
    std::fill(sum.re, sum.re + 2 * numel, 0.f);
    Dispatch([&]() __attribute__((always_inline)) {
      for (int64_t k = 0; k < c_.k; k++) {
        const Complex x = left + 2 * k * numel, f = At(task.right.data(), k);
        DLSYS_IVDEP
        for (int64_t j = 0; j < numel; j++) {
          sum.re[j] += x.re[j] * f.re[j] + x.im[j] * f.im[j];
          sum.im[j] += x.im[j] * f.re[j] - x.re[j] * f.im[j];
        }
      }
    });
    fft_.Inverse(sum, result);
    const float scale = 1 / (float)numel, bias = c_.bias ? c_.bias[b] : 0;
    float* to = c_.results + a * c_.result_a + b * c_.result_b;
    float check = 0;
    for (int64_t i = 0; i < c_.count.h; i++)
      for (int64_t j = 0; j < c_.count.w; j++) {
        const float value = result.re[i * c_.sample.h * size_.w + j * c_.sample.w] * scale + bias;
        to[i * c_.result_stride.h + j * c_.result_stride.w] = value;
        check += 0 * value;
      }
    if (check != 0) finite_ = false;
  }

  const Correlations c_;
  const HW size_;
  const Fft fft_;
  std::atomic<bool> finite_{true};
};

// The forward sums x at i * stride - pad + a * dilation: planes begin with the padding.
Correlations ForwardOf(const Conv& c) {
  Correlations p;
  p.k = c.GroupChannels();
  p.a = c.n;
  p.b = c.GroupFilters();
  p.left = {c.in, {c.in.w, 1}, c.pad, {1, 1}};
  p.right = {c.kernel, {c.kernel.w, 1}, {0, 0}, c.dilation};
  p.left_a = c.c * Size(c.in);
  p.left_k = Size(c.in);
  p.right_b = p.k * Size(c.kernel);
  p.right_k = Size(c.kernel);
  p.count = c.out;
  p.sample = c.stride;
  p.result_stride = {c.out.w, 1};
  p.result_a = c.o * Size(c.out);
  p.result_b = Size(c.out);
  p.span = {(c.out.h - 1) * c.stride.h + (c.kernel.h - 1) * c.dilation.h + 1,
            (c.out.w - 1) * c.stride.w + (c.kernel.w - 1) * c.dilation.w + 1};
  p.bias = nullptr;
  return p;
}

}  // namespace

bool FftFits(const Conv& c) { return Size(c.kernel) > 0 && c.c > 0 && c.o > 0; }

void FftForward(const Conv& c, const float* x, const float* f, const float* bias, float* y) {
  Correlations p = ForwardOf(c);
  bool finite = true;
  for (int64_t group = 0; group < c.groups; group++) {
    p.of_left = x + group * p.k * p.left_k;
    p.of_right = f + group * p.b * p.right_b;
    p.bias = bias ? bias + group * p.b : nullptr;
    p.results = y + group * p.b * p.result_b;
    finite &= FftProduct(p).Run();
    if (Workspace::Querying()) break;  // the other groups take as much
  }
  if (!finite || Workspace::Querying()) GemmForward(c, x, f, bias, y);
}

// dx at h sums dy at (h + pad - a * dilation) / stride: dy is spaced out by the stride behind the
// filter's extent, and correlated with the mirrored filter.
void FftDataGradient(const Conv& c, const float* f, const float* dy, float* dx) {
  Correlations p = ForwardOf(c);
  const HW extent{(c.kernel.h - 1) * c.dilation.h, (c.kernel.w - 1) * c.dilation.w};
  std::swap(p.k, p.b);
  p.left = {c.out, {c.out.w, 1}, {extent.h - c.pad.h, extent.w - c.pad.w}, c.stride};
  p.right = {c.kernel, {-c.kernel.w, -1}, {0, 0}, c.dilation};
  p.left_a = c.o * Size(c.out);
  p.left_k = Size(c.out);
  p.right_b = Size(c.kernel);
  p.right_k = c.GroupChannels() * Size(c.kernel);
  p.count = c.in;
  p.sample = {1, 1};
  p.result_stride = {c.in.w, 1};
  p.result_a = c.c * Size(c.in);
  p.result_b = Size(c.in);
  p.span = {c.in.h + extent.h, c.in.w + extent.w};
  bool finite = true;
  for (int64_t group = 0; group < c.groups; group++) {
    p.of_left = dy + group * p.k * p.left_k;
    p.of_right = f + group * p.k * p.right_k + Size(c.kernel) - 1;
    p.results = dx + group * p.b * p.result_b;
    finite &= FftProduct(p).Run();
    if (Workspace::Querying()) break;
  }
  if (!finite || Workspace::Querying()) GemmDataGradient(c, f, dy, dx);
}

void FftFilterGradient(const Conv& c, const float* x, const float* dy, float* df) {
  Correlations p = ForwardOf(c);
  p.a = c.GroupChannels();
  p.k = c.n;
  p.right = {c.out, {c.out.w, 1}, {0, 0}, c.stride};
  p.left_a = Size(c.in);
  p.left_k = c.c * Size(c.in);
  p.right_b = Size(c.out);
  p.right_k = c.o * Size(c.out);
  p.count = c.kernel;
  p.sample = c.dilation;
  p.result_stride = {c.kernel.w, 1};
  p.result_a = Size(c.kernel);
  p.result_b = c.GroupChannels() * Size(c.kernel);
  bool finite = true;
  for (int64_t group = 0; group < c.groups; group++) {
    p.of_left = x + group * p.a * p.left_a;
    p.of_right = dy + group * p.b * p.right_b;
    p.results = df + group * p.b * p.result_b;
    finite &= FftProduct(p).Run();
    if (Workspace::Querying()) break;
  }
  if (!finite || Workspace::Querying()) GemmFilterGradient(c, x, dy, df);
}

}  // namespace cpu
}  // namespace dlsys
