// Sums over the channels of arrays (outer, channels, inner), for normalisations of every kind.
#pragma once
#include "cuda/context.cuh"

namespace dlsys {
namespace cuda {

struct Channels {
  int64_t outer, count, inner;
  bool small;  // all positions fit 32 bits, in which division is several times faster

  Channels(int64_t outer, int64_t count, int64_t inner)
      : outer(outer), count(count), inner(inner), small(Numel() < int64_t(1) << 32) {}
  __host__ __device__ int64_t Numel() const { return outer * count * inner; }
  __host__ __device__ int64_t PerChannel() const { return outer * inner; }
};

// The data of an array of one value a channel.
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

struct Moments {
  float mean, inverse;  // inverse: 1 / sqrt(variance + eps)
};

// Moments of rows (outer, groups), each of `per` channels.
struct RowMoments {
  const float* mean;
  const float* inverse;
  int64_t groups, per;
};

// dscale = the sum of dy * (x - mean) * inverse over each channel, dbias that of dy.
void ChannelSums(const char* op, DLContext ctx, const float* x, const float* dy,
                 const Channels& shape, const RowMoments& moments, float* dscale, float* dbias,
                 DLStream stream);

}  // namespace cuda
}  // namespace dlsys
