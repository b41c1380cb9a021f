// Tensor maps, which tell the tensor memory accelerator how an array lies in memory.
#pragma once
#include <cuda.h>

#include <array>
#include <cstdint>

namespace dlsys {
namespace cuda {

// Why kernels of wgmma and TMA cannot run on a device, or "".
const char* WgmmaError(int device);

// A map of an array (batch, outer, inner) of float32, bfloat16 or float16, its rows `pitch`
// elements apart, in boxes of box_outer rows of 128 bytes, swizzled. What is outside of it reads as
// zeros and is not written. Loads of float32 round to tf32 where `rounds`. Where it `asks_ahead`,
// the L2 cache fetches 256 bytes at a time, which delays boxes that do not begin at such. No extent
// is 0; rows are at multiples of 16 bytes.
CUtensorMap BoxMap(const char* op, int dtype, const void* data, int64_t inner, int64_t outer,
                   int64_t pitch, int64_t batch, int box_outer, bool rounds = true,
                   bool asks_ahead = true);

// The same of an array of four axes, their extents given inner first, the strides of all but the
// inner one in elements; a box has box_rows of the second axis, and one of the outer ones.
CUtensorMap HeadMap(const char* op, int dtype, const void* data,
                    const std::array<int64_t, 4>& extents, const std::array<int64_t, 3>& strides,
                    int box_rows);

// The same with a box of any extents, its inner one of 128 bytes.
template <size_t kAxes>
CUtensorMap ArrayMap(const char* op, int dtype, const void* data,
                     const std::array<int64_t, kAxes>& extents,
                     const std::array<int64_t, kAxes - 1>& strides,
                     const std::array<int, kAxes>& box, bool rounds = true, bool asks_ahead = true);

// A map of a matrix (outer, inner) of float32, its rows `pitch` elements apart, in boxes that lie
// in shared memory as they are: neither swizzled nor rounded.
CUtensorMap PlainMap(const char* op, const float* data, int64_t inner, int64_t outer, int64_t pitch,
                     int box_inner, int box_outer);

// Positions of a filter over images along an axis: `count` of them, from `first` on, `step` apart.
struct PixelAxis {
  int64_t count, first, step;
};
// A map (im2col) of images (n, h, w, c), their extents and strides given as above, in boxes of 128
// bytes of the channels at `pixels` positions that follow each other along w, then h, then n. What
// is outside of the images reads as zeros and is not written.
struct PixelMapShape {
  std::array<int64_t, 4> extents;
  std::array<int64_t, 3> strides;
  PixelAxis w, h;
};
// Why there is no such map, or "": the instruction has few bits for some of it. `reach` is the
// largest distance from a position that is read.
const char* PixelMapError(const PixelMapShape& shape, int64_t reach);
CUtensorMap PixelMap(const char* op, int dtype, const void* data, const PixelMapShape& shape,
                     int pixels);

}  // namespace cuda
}  // namespace dlsys
