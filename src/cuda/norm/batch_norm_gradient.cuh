// How a gradient comes to a normalisation: as it is, or through the activation behind it, by what
// forward made of x, found again, which costs no bytes, or by the output, where something was added
// before the activation. And whose mean and deviation x is taken by.
#pragma once
#include "cuda/gemm/epilogue.cuh"
#include "cuda/norm/batch_norm_tile.cuh"
#include "cuda/norm/norm.cuh"

namespace dlsys {
namespace cuda {

// ---- where the gradient comes from ----

// dy itself.
struct Direct {
  const float* dy;

  struct Channel {};
  template <int kVector>
  using Loaded = Unit<kVector>;
  __device__ Channel Of(int64_t, const Moments&) const { return {}; }
  template <int kVector>
  __device__ __forceinline__ Unit<kVector> Load(int64_t at) const {
    return Read<kVector>(dy + at);
  }
  template <int kVector>
  __device__ __forceinline__ float Gradient(const Channel&, const Unit<kVector>& loaded, int e,
                                            float) const {
    return loaded.v[e];
  }
  template <int kVector>
  __device__ __forceinline__ void Keep(const Unit<kVector>&, int64_t) const {}
};

// slope(normalised x, dy)
template <class Slope>
struct ThroughActivation {
  const float* dy;
  const float* scale;  // (channels)
  const float* bias;   // (channels)
  Slope slope;

  using Channel = Affine;
  template <int kVector>
  using Loaded = Unit<kVector>;
  __device__ Affine Of(int64_t c, const Moments& m) const { return AffineOf(m, scale[c], bias[c]); }
  template <int kVector>
  __device__ __forceinline__ Unit<kVector> Load(int64_t at) const {
    return Read<kVector>(dy + at);
  }
  template <int kVector>
  __device__ __forceinline__ float Gradient(const Affine& affine, const Unit<kVector>& loaded,
                                            int e, float x) const {
    return slope(affine(x), loaded.v[e]);
  }
  template <int kVector>
  __device__ __forceinline__ void Keep(const Unit<kVector>&, int64_t) const {}
};

struct NumberedSlope {
  int gradient;
  bool of_output;
  __device__ __forceinline__ float operator()(float z, float dy) const {
    if (of_output) z = ApplyActivation(7, 0, 0.f, z);
    return ApplyActivation(0, gradient, z, dy);
  }
};

// The sum of one or two gradients where relu's output is positive, kept in dz: the output that is
// given, or else what normalised x gives.
template <bool kOutput, bool kTwo>
struct ThroughRelu {
  const float* dy;
  const float* more;
  const float* y;
  const float* scale;  // (channels)
  const float* bias;   // (channels)
  float* dz;

  using Channel = Affine;
  template <int kVector>
  struct Loaded {
    Unit<kVector> dy, more, y;
  };
  __device__ Affine Of(int64_t c, const Moments& m) const {
    if constexpr (kOutput) return {};
    return AffineOf(m, scale[c], bias[c]);
  }
  template <int kVector>
  __device__ __forceinline__ Loaded<kVector> Load(int64_t at) const {
    Loaded<kVector> loaded;
    loaded.dy = Read<kVector>(dy + at);
    if constexpr (kTwo) loaded.more = Read<kVector>(more + at);
    if constexpr (kOutput) loaded.y = ReadLast<kVector>(y + at);
    return loaded;
  }
  template <int kVector>
  __device__ __forceinline__ float Gradient(const Affine& affine, const Loaded<kVector>& loaded,
                                            int e, float x) const {
    float g = loaded.dy.v[e];
    if constexpr (kTwo) g = __fadd_rn(g, loaded.more.v[e]);
    return fn::ReluGradient{}(kOutput ? loaded.y.v[e] : affine(x), g);
  }
  template <int kVector>
  __device__ __forceinline__ void Keep(const Unit<kVector>& g, int64_t at) const {
    Write(dz + at, g);
  }
};

// ---- whose moments ----

struct OfBatch {
  BatchMoments moments;
  struct Channel {
    Moments fixed;
    __device__ __forceinline__ float Moved(float x, int64_t) const { return x - fixed.mean; }
  };
  __device__ Channel Of(int64_t c) const { return {moments.Of(c)}; }
  __device__ float Factor(int64_t c) const { return moments.Of(c).inverse; }  // of the sum
};

struct OfGroups {
  RowMoments rows;
  struct Channel {
    Moments fixed;  // none
    const float* mean;
    const float* inverse;
    int64_t groups;
    __device__ __forceinline__ float Moved(float x, int64_t n) const {
      return (x - mean[n * groups]) * inverse[n * groups];
    }
  };
  __device__ Channel Of(int64_t c) const {
    return {{}, rows.mean + c / rows.per, rows.inverse + c / rows.per, rows.groups};
  }
  __device__ float Factor(int64_t) const { return 1.f; }
};

}  // namespace cuda
}  // namespace dlsys
