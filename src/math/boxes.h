// Boxes of images as non-maximum suppression takes them on both devices: two opposite corners, or a
// center with width and height, which of them are candidates, how far two overlap.
//
// Which boxes stay must not depend on the device, so every result here is rounded as numpy rounds
// it: no product is contracted with a sum. __fmul_rn says so to nvcc; the Makefile compiles
// src/cpu/boxes/ with -ffp-contract=off.
#pragma once

#include "math/functors.h"
#include "math/sort_keys.h"
#include "runtime/registry.h"

namespace dlsys {
namespace nms {

DLSYS_HD float Product(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

// What a call says beside its arrays. A score is a candidate above the threshold; without one
// every score is, but NaN.
struct Options {
  float iou_threshold, score_threshold;
  bool thresholded, center;

  DLSYS_HD bool Takes(float score) const {
    return thresholded ? score > score_threshold : score == score;
  }
};

// The corners in order: low and high along the two axes.
struct Box {
  float low_x, low_y, high_x, high_y;

  DLSYS_HD float Area() const { return Product(high_x - low_x, high_y - low_y); }
};

DLSYS_HD Box BoxAt(const float* at, bool center) {
  if (center) {
    const float half_x = Product(at[2], 0.5f), half_y = Product(at[3], 0.5f);
    return {at[0] - half_x, at[1] - half_y, at[0] + half_x, at[1] + half_y};
  }
  const bool x = at[0] > at[2], y = at[1] > at[3];  // with NaN, an area is NaN in any order
  return {x ? at[2] : at[0], y ? at[3] : at[1], x ? at[0] : at[2], y ? at[1] : at[3]};
}

// The intersection over the union, 0 where the union is empty or not a number.
DLSYS_HD float Iou(const Box& a, float area_a, const Box& b, float area_b) {
  const float low_x = a.low_x > b.low_x ? a.low_x : b.low_x;
  const float low_y = a.low_y > b.low_y ? a.low_y : b.low_y;
  const float high_x = a.high_x < b.high_x ? a.high_x : b.high_x;
  const float high_y = a.high_y < b.high_y ? a.high_y : b.high_y;
  const float width = high_x - low_x, height = high_y - low_y;
  const float both = Product(width > 0.f ? width : 0.f, height > 0.f ? height : 0.f);
  const float all = area_a + area_b - both;
  return both > 0.f && all > 0.f ? both / all : 0.f;
}

// By how much Soft-NMS lowers a score beside a better box (Bodla et al., 2017): with `sigma` by
// exp(-iou²/sigma), in double, since float32 functions of devices differ; without, by 1 - iou above
// the threshold.
DLSYS_HD float Decay(float iou, float sigma, float iou_threshold) {
  if (sigma > 0.f) return iou > 0.f ? (float)exp(-((double)iou * iou) / sigma) : 1.f;
  return iou > iou_threshold ? 1.f - iou : 1.f;
}

// The extents of boxes (images, boxes, 4), scores (images, classes, boxes) and indices (images ·
// classes · most, 3).
struct Extents {
  int64_t images, classes, boxes, most = 0;

  Extents(const char* op, const DLArray* given, const DLArray* scores, const DLArray* indices,
          const DLArray* count) {
    const bool shaped = given->ndim == 3 && scores->ndim == 3 && indices->ndim == 2 &&
                        given->shape[2] == 4 && indices->shape[1] == 3 &&
                        given->shape[0] == scores->shape[0] && given->shape[1] == scores->shape[2];
    images = shaped ? scores->shape[0] : 0;
    classes = shaped ? scores->shape[1] : 0;
    boxes = shaped ? scores->shape[2] : 0;
    if (Columns()) most = indices->shape[0] / Columns();
    if (!shaped || most * Columns() != indices->shape[0] || most > boxes)
      Fail(
          "%s: expected boxes (N, B, 4), scores (N, C, B) and indices (N * C * most, 3), got %s, "
          "%s and %s",
          op, ShapeText(given).c_str(), ShapeText(scores).c_str(), ShapeText(indices).c_str());
    if (boxes > INT32_MAX)
      Fail("%s: expected at most %d boxes, got %lld", op, INT32_MAX, (long long)boxes);
    if (indices->dtype != DL_INT64 || count->dtype != DL_INT64 || Numel(count) != 1)
      Fail("%s: expected indices and a count of int64, got %s and %s of %s", op,
           DtypeText(indices->dtype), DtypeText(count->dtype), ShapeText(count).c_str());
  }

  // A column is a class of an image: its boxes are chosen among themselves.
  DLSYS_HD int64_t Columns() const { return images * classes; }
};

}  // namespace nms
}  // namespace dlsys
