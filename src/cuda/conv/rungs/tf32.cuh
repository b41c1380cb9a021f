// The tf32 convolutions share this: input strips, the halo layout in which a tile keeps its input
// in shared memory. Consecutive output positions read a contiguous run of a strip, shifted by every
// kernel offset, so im2col is a shift and each input element is copied once, by cp.async. Arrays
// are as in conv.cuh; padding is written as zeros. The copies of the strips limit convolutions of
// few channels, mma issue those of many.
#pragma once
#include <cstdlib>

#include "cuda/conv/conv.cuh"
#include "cuda/gemm/panel.cuh"
#include "cuda/runtime/divisor.cuh"

namespace dlsys {
namespace cuda {

// ---- input strips in shared memory ----

// The input of one channel that output positions gather from: the padded images one below another,
// in rows of `width`. A tile of consecutive output positions reads a contiguous run of it, shifted
// by every kernel offset.
struct Strip {
  int count_h, count_w, step_h, step_w;             // an image's output positions and their strides
  int height, width;                                // of an image in the strip
  Divisor by_positions, by_row, by_area, by_width;  // divisors of positions, then of strip offsets
  int first_h, first_w;                             // input coordinates of the strip's corner
  int in_h, in_w;
  int kernel_w, shift_h, shift_w, shift_0;  // strip offset of a kernel offset

  __host__ __device__ int Positions() const { return count_h * count_w; }

  // Strip offset of an output position, counted from the first image.
  __device__ int At(int position) const {
    const int row = position / by_row, image = position / by_positions;
    const int i = row - image * count_h, j = position - row * count_w;
    return (image * height + i * step_h) * width + j * step_w;
  }

  __device__ int Shift(int kernel_offset) const {
    return shift_0 + kernel_offset / kernel_w * shift_h + kernel_offset % kernel_w * shift_w;
  }

  // Offset in x of strip element `at`, in the first of `images`, `pitch` apart; -1 in the padding.
  __device__ int Source(int at, int images, int pitch) const {
    const int row = at / by_width, image = at / by_area;
    const int h = first_h + row - image * height, w = first_w + at - row * width;
    const bool valid =
        image < images && (unsigned)h < (unsigned)in_h && (unsigned)w < (unsigned)in_w;
    return valid ? image * pitch + h * in_w + w : -1;
  }
};

inline Strip StripOf(const ConvAxis& h_axis, const ConvAxis& w_axis, HW in) {
  const int64_t reach_h = (h_axis.kernel_size - 1) * h_axis.kernel_step,
                reach_w = (w_axis.kernel_size - 1) * w_axis.kernel_step;
  Strip s;
  s.count_h = (int)h_axis.count;
  s.count_w = (int)w_axis.count;
  s.step_h = (int)h_axis.step;
  s.step_w = (int)w_axis.step;
  s.height = (int)((h_axis.count - 1) * h_axis.step + std::max(std::abs(reach_h) + 1, h_axis.step));
  s.width = (int)((w_axis.count - 1) * w_axis.step + std::abs(reach_w) + 1);
  s.first_h = (int)(h_axis.first + std::min<int64_t>(reach_h, 0));
  s.first_w = (int)(w_axis.first + std::min<int64_t>(reach_w, 0));
  s.in_h = (int)in.h;
  s.in_w = (int)in.w;
  s.kernel_w = (int)w_axis.kernel_size;
  s.by_positions = Divisor(h_axis.count * w_axis.count);
  s.by_row = Divisor(s.count_w);
  s.by_area = Divisor((int64_t)s.height * s.width);
  s.by_width = Divisor(s.width);
  s.shift_h = (int)h_axis.kernel_step * s.width;
  s.shift_w = (int)w_axis.kernel_step;
  s.shift_0 = (int)(std::max<int64_t>(-reach_h, 0) * s.width + std::max<int64_t>(-reach_w, 0));
  return s;
}

// Longest run that `positions` consecutive output positions read; they span one of two row
// counts.
inline int64_t Span(const Strip& s, int64_t kernel_h, int64_t positions) {
  int64_t longest = 0;
  const int64_t least_rows = (positions - 1) / s.count_w;
  for (int64_t rows = least_rows; rows <= least_rows + 1; rows++) {
    const int64_t borders = CeilDiv(rows, s.count_h);
    const int64_t lines = rows * s.step_h + borders * (s.height - s.count_h * s.step_h);
    const int64_t columns = (positions - 1 - rows * s.count_w) * s.step_w;
    longest = std::max(longest, lines * s.width + columns);
  }
  const int64_t reach_h = (kernel_h - 1) * std::abs(s.shift_h);
  return longest + reach_h + (s.kernel_w - 1) * std::abs(s.shift_w) + 1;
}

// Issues the copies of the runs of `rows` channels, `pitch` apart in shared memory; channels from
// `valid` on become zero. sources[v] is the offset of element v in the input, or -1.
template <int kThreads>
__device__ __forceinline__ void CopyChannels(float* to, int pitch, int rows, int valid,
                                             const int* sources, int span, const float* input,
                                             int in_size) {
  for (int v = threadIdx.x; v < span; v += kThreads) {
    const int source = sources[v];
    const int exist = source < 0 ? 0 : valid;  // of the channels
    const float* from = input + source;
    float* at = to + v;
    int first = 0;
    for (; first + 8 <= rows; first += 8) {
#pragma unroll
      for (int r = 0; r < 8; r++)
        CopyAsync4(at + r * pitch, from + (int64_t)r * in_size, first + r < exist);
      at += 8 * pitch;
      from += (int64_t)8 * in_size;
    }
    for (; first < rows; first++) {
      CopyAsync4(at, from, first < exist);
      at += pitch;
      from += in_size;
    }
  }
}

// ---- launchers ----

// Launches a kernel that may need more than the default shared memory.
template <class Task>
void LaunchTask(const ConvCall& at, void (*kernel)(Task), int64_t blocks, int threads,
                int64_t nbytes, const Task& task) {
  AllowShared(at.op, (const void*)kernel, (size_t)nbytes);
  Launch(at.op, kernel, (unsigned)blocks, (unsigned)threads, (size_t)nbytes, at.stream, task);
}

// Variant names: their tile shapes.
std::vector<std::string> CorrelateTilesTf32();
std::vector<std::string> FilterTilesTf32();

// Computes the result, or returns false where it cannot.
bool CorrelateTf32(const ConvCall& at, const Correlation& c);
bool FilterGradientTf32(const ConvCall& at, const Conv& conv, const float* x, const float* dy,
                        float* df);

}  // namespace cuda
}  // namespace dlsys
