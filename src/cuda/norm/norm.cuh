// Types and helpers that the kernels of batch norm (forward and backward) and layer norm share:
// (outer, channels, inner) views, moments, the affine map, and channel sums. Moments and sums are
// float32 for every storage type of x; scale and bias are of either.
#pragma once
#include "cuda/runtime/context.cuh"

namespace dlsys {
namespace cuda {

struct Channels {
  int64_t outer, count, inner;

  Channels(int64_t outer, int64_t count, int64_t inner)
      : outer(outer), count(count), inner(inner) {}
  __host__ __device__ int64_t Numel() const { return outer * count * inner; }
  __host__ __device__ int64_t PerChannel() const { return outer * inner; }
};

// x (N, C, ...) as (outer, channels, inner).
inline Channels ChannelsOf(const char* op, const DLArray* x) {
  if (x->ndim < 2) Fail("%s: expected an array of (N, C, ...), got %s", op, ShapeText(x).c_str());
  int64_t inner = 1;
  for (int axis = 2; axis < x->ndim; axis++) inner *= x->shape[axis];
  return Channels(x->shape[0], x->shape[1], inner);
}

// The data of an array of one value a channel, checked.
inline void CheckCount(const char* op, const DLArray* values, int64_t count) {
  if (Numel(values) != count)
    Fail("%s: expected %ld values, one a channel, got shape %s", op, (long)count,
         ShapeText(values).c_str());
}
inline const float* PerChannel(const char* op, const DLArray* values, int64_t count) {
  CheckCount(op, values, count);
  return In(op, values);
}
inline float* ChannelResult(const char* op, DLArray* values, int64_t count) {
  CheckCount(op, values, count);
  return Out(op, values);
}

// Values, one a channel, that lie in float32 or in the storage type of x.
template <class T>
struct ChannelFloats {
  const void* data;
  bool narrow;
  __device__ __forceinline__ float operator[](int64_t c) const {
    return narrow ? (float)((const T*)data)[c] : ((const float*)data)[c];
  }
};
template <>
struct ChannelFloats<float> {
  const float* data;
  __device__ __forceinline__ float operator[](int64_t c) const { return data[c]; }
};

template <class T>
ChannelFloats<T> ChannelFloatsOf(const char* op, const DLArray* values, int64_t count) {
  if constexpr (kIs16Bit<T>) {
    if (values->dtype == kDtype<T>) {
      CheckCount(op, values, count);
      return {In<T>(op, values), true};
    }
    return {PerChannel(op, values, count), false};
  } else {
    return {PerChannel(op, values, count)};
  }
}

struct Moments {
  float mean, inverse;  // inverse: 1 / sqrt(variance + eps)
};

struct BatchMoments {
  const float* mean;      // (channels)
  const float* variance;  // (channels)
  float eps;
  __device__ Moments Of(int64_t c) const { return {mean[c], 1.f / sqrtf(variance[c] + eps)}; }
};

inline BatchMoments MomentsOf(const char* op, const DLArray* mean, const DLArray* variance,
                              int64_t count, float eps) {
  return {PerChannel(op, mean, count), PerChannel(op, variance, count), eps};
}

// The affine map of a channel. Backward recomputes forward's pre-activation by it, bit-identically,
// so each operation names its rounding and no compiler contracts them.
struct Affine {
  float mean, factor, bias;
  __device__ __forceinline__ float operator()(float x) const {
    return fmaf(__fsub_rn(x, mean), factor, bias);
  }
};

__device__ __forceinline__ Affine AffineOf(const Moments& m, float scale, float bias) {
  return {m.mean, __fmul_rn(m.inverse, scale), bias};
}

// Moments of rows (outer, groups), each of `per` channels.
struct RowMoments {
  const float* mean;
  const float* inverse;
  int64_t groups, per;
};

// dscale = the sum of dy * (x - mean) * inverse over each channel, dbias that of dy.
template <class T>
void ChannelSums(const char* op, DLContext ctx, const T* x, const T* dy, const Channels& shape,
                 const RowMoments& moments, float* dscale, float* dbias, DLStream stream);

// dz = dz + addend, which may be null, where the bit of an element is set, else 0, and dscale and
// dbias of it.
template <class T>
void ReluSumsByBits(const char* op, DLContext ctx, const T* x, const Channels& shape,
                    const BatchMoments& moments, const uint8_t* bits, const T* addend, T* dz,
                    float* dscale, float* dbias, DLStream stream);

// Mean and variance of each channel of x.
template <class T>
void ChannelStatistics(const char* op, DLContext ctx, const T* x, const Channels& shape,
                       float* mean, float* variance, DLStream stream);

// The same of x (rows, channels) from the moments of every `of_group` rows: (groups, channels) of
// the mean and the sum of squared deviations from it, at 16 bytes. Channels are even.
void CombineMoments(const char* op, DLContext ctx, const float2* moments, int64_t rows,
                    int64_t of_group, int64_t channels, float* mean, float* variance,
                    DLStream stream);

// The same of `groups` groups that have `counts` rows each.
void CombineMoments(const char* op, DLContext ctx, const float2* moments, const int* counts,
                    int64_t rows, int64_t groups, int64_t channels, float* mean, float* variance,
                    DLStream stream);

// dscale and dbias from sums of groups of rows, (groups, channels) of Σ dy (x - mean) and Σ dy, at
// 16 bytes. Channels are even.
void CombineSums(const char* op, DLContext ctx, const float2* sums, int64_t groups,
                 int64_t channels, const BatchMoments& moments, float* dscale, float* dbias,
                 DLStream stream);

}  // namespace cuda
}  // namespace dlsys
