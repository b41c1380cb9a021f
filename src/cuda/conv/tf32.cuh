// What the tf32 convolutions stand on: how the planes that a tile sees lie in shared memory, and
// how tensor cores multiply.
#pragma once
#include <cstdlib>

#include "cuda/conv/conv.cuh"
#include "cuda/gemm/panel.cuh"
#include "cuda/runtime/divisor.cuh"

namespace dlsys {
namespace cuda {

// ---- planes in shared memory ----

// What places and their taps see of one channel: the images' planes one below another, each with
// the margin into which taps reach, in rows of `width`. A tile of neighbouring places sees a run of
// it, which every tap shifts.
struct Strip {
  int count_h, count_w, step_h, step_w;          // an image's places and how far they lie apart
  int height, width;                             // of an image in the strip
  Divisor by_places, by_row, by_area, by_width;  // of places, then of the strip
  int first_h, first_w;                          // where its corner lies on the plane
  int plane_h, plane_w;
  int taps_w, tap_h, tap_w, tap_0;  // how far taps shift: tap_0 and multiples

  __host__ __device__ int Places() const { return count_h * count_w; }

  // Where a place of the first image, or of those behind it, lies.
  __device__ int At(int place) const {
    const int row = place / by_row, image = place / by_places;
    const int i = row - image * count_h, j = place - row * count_w;
    return (image * height + i * step_h) * width + j * step_w;
  }

  __device__ int Shift(int tap) const {
    return tap_0 + tap / taps_w * tap_h + tap % taps_w * tap_w;
  }

  // Where what lies at `at` is found in the first of `images`, `pitch` apart; -1 off the planes.
  __device__ int Source(int at, int images, int pitch) const {
    const int line = at / by_width, image = at / by_area;
    const int h = first_h + line - image * height, w = first_w + at - line * width;
    const bool valid =
        image < images && (unsigned)h < (unsigned)plane_h && (unsigned)w < (unsigned)plane_w;
    return valid ? image * pitch + h * plane_w + w : -1;
  }
};

inline Strip StripOf(const Sweep& down, const Sweep& across, Pair plane) {
  const int64_t reach_h = (down.taps - 1) * down.tap, reach_w = (across.taps - 1) * across.tap;
  Strip s;
  s.count_h = (int)down.count;
  s.count_w = (int)across.count;
  s.step_h = (int)down.step;
  s.step_w = (int)across.step;
  s.height = (int)((down.count - 1) * down.step + std::max(std::abs(reach_h) + 1, down.step));
  s.width = (int)((across.count - 1) * across.step + std::abs(reach_w) + 1);
  s.first_h = (int)(down.first + std::min<int64_t>(reach_h, 0));
  s.first_w = (int)(across.first + std::min<int64_t>(reach_w, 0));
  s.plane_h = (int)plane.h;
  s.plane_w = (int)plane.w;
  s.taps_w = (int)across.taps;
  s.by_places = Divisor(down.count * across.count);
  s.by_row = Divisor(s.count_w);
  s.by_area = Divisor((int64_t)s.height * s.width);
  s.by_width = Divisor(s.width);
  s.tap_h = (int)down.tap * s.width;
  s.tap_w = (int)across.tap;
  s.tap_0 = (int)(std::max<int64_t>(-reach_h, 0) * s.width + std::max<int64_t>(-reach_w, 0));
  return s;
}

// The longest run that `places` neighbouring places and their taps see. They lie in `down` more
// rows than one, or in one more than that.
inline int64_t Span(const Strip& s, int64_t taps_h, int64_t places) {
  int64_t longest = 0;
  const int64_t down = (places - 1) / s.count_w;
  for (int64_t rows = down; rows <= down + 1; rows++) {
    const int64_t borders = CeilDiv(rows, s.count_h);
    const int64_t lines = rows * s.step_h + borders * (s.height - s.count_h * s.step_h);
    const int64_t across = (places - 1 - rows * s.count_w) * s.step_w;
    longest = std::max(longest, lines * s.width + across);
  }
  const int64_t reach_h = (taps_h - 1) * std::abs(s.tap_h);
  return longest + reach_h + (s.taps_w - 1) * std::abs(s.tap_w) + 1;
}

// Begins to copy `rows` channels' runs, `pitch` apart in shared memory; those from `valid` on
// become zero. sources[v] is where element v lies from `planes` on, or -1.
template <int kThreads>
__device__ __forceinline__ void CopyPlanes(float* to, int pitch, int rows, int valid,
                                           const int* sources, int span, const float* planes,
                                           int plane_size) {
  for (int v = threadIdx.x; v < span; v += kThreads) {
    const int source = sources[v];
    const int exist = source < 0 ? 0 : valid;  // of the rows
    const float* from = planes + source;
    float* at = to + v;
    int first = 0;
    for (; first + 8 <= rows; first += 8) {
#pragma unroll
      for (int r = 0; r < 8; r++)
        CopyAsync4(at + r * pitch, from + (int64_t)r * plane_size, first + r < exist);
      at += 8 * pitch;
      from += (int64_t)8 * plane_size;
    }
    for (; first < rows; first++) {
      CopyAsync4(at, from, first < exist);
      at += pitch;
      from += plane_size;
    }
  }
}

// ---- launchers ----

// Launches a kernel that may want more shared memory than kernels have unasked.
template <class Task>
void LaunchTask(const Place& at, void (*kernel)(Task), int64_t blocks, int threads, int64_t nbytes,
                const Task& task) {
  AllowShared(at.op, (const void*)kernel, (size_t)nbytes);
  Launch(at.op, kernel, (unsigned)blocks, (unsigned)threads, (size_t)nbytes, at.stream, task);
}

// The names of their variants.
std::vector<std::string> CorrelateTilesTf32();
std::vector<std::string> FilterTilesTf32();

// The whole result by tensor cores, or false where that is not possible or, by rule, no gain.
bool CorrelateTf32(const Place& at, const Correlation& c);
bool FilterGradientTf32(const Place& at, const Conv& conv, const float* x, const float* dy,
                        float* df);

}  // namespace cuda
}  // namespace dlsys
