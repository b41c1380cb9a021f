// Epilogues of a tile, as it is stored: bias, activation, and the gradient of one by the side, or
// the sum with it. They work on pairs of accumulators in registers, and take exponentials and
// quotients by the special function unit, whose rate limits them.
#pragma once
#include "cuda/gemm/hopper/boxes.cuh"
#include "cuda/gemm/hopper/multiply.cuh"

namespace dlsys {
namespace cuda {
namespace hopper {

// Two derivatives, quantized, the first in the lower byte; by the last bits of 1.5 * 2^23 and
// more, which the addition rounds to.
__device__ __forceinline__ uint32_t QuantizedSlopes(float left, float right) {
  constexpr float kLast = 12582912.f;
  const auto bits = [](float slope) {
    return __float_as_uint(fmaf(slope, 1.f / kSlopeScale, kLast + kSlopeZeroPoint));
  };
  return __byte_perm(bits(left), bits(right), 0x0040);
}

// Functions of the epilogue that can give their derivative as well.
struct GeluOfC {
  __device__ __forceinline__ float operator()(float, float x) const { return fast::Gelu(x); }
  __device__ __forceinline__ fast::WithSlope Both(float x) const { return fast::GeluBoth(x); }
};
struct GateOfC {
  fast::Gate gate;
  __device__ __forceinline__ float operator()(float, float x) const { return gate.Of(x); }
  __device__ __forceinline__ fast::WithSlope Both(float x) const { return gate.Both(x); }
};
template <class F>
constexpr bool kHasSlope =
    std::is_same_v<std::decay_t<F>, GeluOfC> || std::is_same_v<std::decay_t<F>, GateOfC>;

// Calls f with the epilogue's function of an element of side and one of C, and with its code as a
// type, below 0 that of a gradient. All code is inlined, for a call would make the compiler wait
// after each wgmma.
template <class F>
__device__ __forceinline__ void WithFunction(const Params& params, F&& f) {
  const auto gate = params.gate;
  switch (params.activation) {
    case 1:
      return f([](float, float x) { return fn::Relu{}(x); }, Code<1>());
    case 2:
      return f([](float, float x) { return fast::Logistic(x); }, Code<2>());
    case 5:
      return f(GeluOfC{}, Code<5>());
    case 4:
    case 6:
      return f(GateOfC{gate}, Code<6>());
  }
  switch (params.gradient) {
    case 1:
      return f([](float side, float x) { return fn::ReluGradient{}(side, x); }, Code<-1>());
    case 3:
      return f([](float side, float x) { return fast::GeluGradient(side, x); }, Code<-3>());
    case 2:
    case 4:
      return f([gate](float side, float x) { return gate.Gradient(side, x); }, Code<-4>());
    case GradientCode::kAdd:
      return f([](float side, float x) { return fn::Add{}(side, x); }, Code<-GradientCode::kAdd>());
    case GradientCode::kAddRelu:
      return f([](float side, float x) { return fn::AddRelu{}(side, x); },
               Code<-GradientCode::kAddRelu>());
    case GradientCode::kMulQuantized:
      return f([](float side, float x) { return fn::MulQuantized{}(side, x); },
               Code<-GradientCode::kMulQuantized>());
  }
}

// The bias of a tile's columns, in pairs as a thread holds a row of accumulators, or a column.
template <class T, class Source>
constexpr int kBiasPairs = kTransposed<Source> ? T::kWarpgroupM : T::kBlocks;
template <class E, class T, class Source>
__device__ __forceinline__ void ReadBias(Pair<E> (&bias)[kBiasPairs<T, Source>],
                                         const Params& params, const TileOrigin& origin) {
  constexpr int kStep = kTransposed<Source> ? 64 : 8;
  const int col = PlaceOfPair<Source>(origin, threadIdx.x % 128, 0, 0, 0).col;
#pragma unroll
  for (int k = 0; k < kBiasPairs<T, Source>; k++)
    if (col + k * kStep < params.n)
      bias[k] = *(const Pair<E>*)((const E*)params.bias + col + k * kStep);
}

// Stores a consumer's part of a tile with its epilogue. The loop over boxes is rolled where there
// is a function, so that there is code for two; accumulators move down to the registers that it
// reads.
template <class E, class T, class Source, bool kSide, bool kBefore, bool kRolled,
          bool kQuantized = false, class F>
__device__ __forceinline__ void StoreBoxes(Accumulators<T>& d,
                                           Pair<E> (&bias)[kBiasPairs<T, Source>],
                                           Boxes<E, T, Source>& boxes, const Params& params,
                                           const CUtensorMap* map_c, const CUtensorMap* map_other,
                                           F&& function) {
  constexpr int kBlocks = Boxes<E, T, Source>::kBlocks, kCount = Boxes<E, T, Source>::kCount;
  constexpr int kAtOnce = !kRolled ? kCount : kCount < 2 ? 1 : 2;
  constexpr bool kInPieces =
      kRolled && (sizeof(E) == 2 || (kSide && Boxes<E, T, Source>::kStagesSide));
#pragma unroll 1
  for (int first = 0; first < kCount; first += kAtOnce) {
#pragma unroll
    for (int box = 0; box < kAtOnce; box++) {
      if (Source::kOfColumns == OfColumns::kNothing && params.bias) {
#pragma unroll
        for (int i = 0; i < T::kWarpgroupM; i++) {
#pragma unroll
          for (int j = 0; j < kBlocks; j++) {
            float (&v)[4] = d[i][box * kBlocks + j];
            const Pair<E>& added = bias[kTransposed<Source> ? i : box * kBlocks + j];
            const float even = ElementOf<0, E>(added), odd = ElementOf<1, E>(added);
#pragma unroll
            for (int half = 0; half < 2; half++)
              v[OfPair<Source>(half, 0)] += even, v[OfPair<Source>(half, 1)] += odd;
          }
        }
      }
      const auto pair_of = [&](int i, int j, int half, const Pair<E>& side, auto&& f) {
        const float (&v)[4] = d[i][box * kBlocks + j];
        return RoundedPair<E>(f(ElementOf<0, E>(side), v[OfPair<Source>(half, 0)]),
                              f(ElementOf<1, E>(side), v[OfPair<Source>(half, 1)]));
      };
      if constexpr (kInPieces && kQuantized) {
        boxes.StoreBySlopes(map_c, first + box, [&](int i, int j, int half, uint32_t slopes) {
          const float (&v)[4] = d[i][box * kBlocks + j];
          return RoundedPair<E>(function(ByteToFloat(slopes, 0), v[2 * half]),
                                function(ByteToFloat(slopes, 1), v[2 * half + 1]));
        });
      } else if constexpr (kInPieces) {
        if constexpr (kBefore && kHasSlope<F> && Boxes<E, T, Source>::kHasSlopes)
          if (params.slope) {
            boxes.StoreWithSlopes(map_c, map_other, first + box,
                                  [&](int i, int j, int half, uint16_t& slopes) {
                                    const float (&v)[4] = d[i][box * kBlocks + j];
                                    const fast::WithSlope left = function.Both(v[2 * half]),
                                                          right = function.Both(v[2 * half + 1]);
                                    slopes = (uint16_t)QuantizedSlopes(left.slope, right.slope);
                                    return RoundedPair<E>(left.value, right.value);
                                  });
            continue;
          }
        if (kBefore && params.before)
          boxes.template StorePieces<false>(
              map_other, nullptr, first + box, [&](int i, int j, int half, const Pair<E>& side) {
                return pair_of(i, j, half, side, [](float, float v) { return v; });
              });
        boxes.template StorePieces<kSide>(map_c, map_other, first + box,
                                          [&](int i, int j, int half, const Pair<E>& side) {
                                            return pair_of(i, j, half, side, function);
                                          });
      } else {
        typename Boxes<E, T, Source>::Pairs side = {}, x;
        if constexpr (kSide) boxes.ReadSide(map_other, first + box, side);
#pragma unroll
        for (int i = 0; i < T::kWarpgroupM; i++) {
#pragma unroll
          for (int j = 0; j < kBlocks; j++) {
#pragma unroll
            for (int half = 0; half < 2; half++)
              x[i][j][half] = pair_of(i, j, half, side[i][j][half], function);
          }
        }
        if constexpr (Source::kOfColumns == OfColumns::kGradientSums) boxes.Keep(x, box);
        boxes.template Store<kSide>(x, map_c, params.c, first + box);
        if ((box + 1) % T::kBuffers == 0) {
          if constexpr (Source::kOfColumns == OfColumns::kMoments)
            boxes.StoreMoments(box + 1 - T::kBuffers);
          if constexpr (Source::kOfColumns == OfColumns::kGradientSums)
            boxes.StoreSums(box + 1 - T::kBuffers);
        }
      }
    }
#pragma unroll
    for (int j = 0; j + kAtOnce * kBlocks < T::kBlocks; j++) {
      if constexpr (!kTransposed<Source>) bias[j] = bias[j + kAtOnce * kBlocks];
#pragma unroll
      for (int i = 0; i < T::kWarpgroupM; i++) {
#pragma unroll
        for (int e = 0; e < 4; e++) d[i][j][e] = d[i][j + kAtOnce * kBlocks][e];
      }
    }
  }
}

template <class E, class T, class Source>
__device__ __forceinline__ void StoreTile(Accumulators<T>& d,
                                          Pair<E> (&bias)[kBiasPairs<T, Source>],
                                          Boxes<E, T, Source>& boxes, const Params& params,
                                          const CUtensorMap* map_c, const CUtensorMap* map_other) {
  constexpr bool kHasGradients = sizeof(E) == 4 || Boxes<E, T, Source>::kCount <= T::kBuffers;
  if constexpr (Source::kOfColumns == OfColumns::kGradientSums && kHasGradients)
    if (params.side)
      return StoreBoxes<E, T, Source, true, false, false>(
          d, bias, boxes, params, map_c, map_other, [](float side, float x) { return side + x; });
  if (!Source::kHasEpilogue || (!params.activation && !params.gradient))
    return StoreBoxes<E, T, Source, false, false, false>(d, bias, boxes, params, map_c, map_other,
                                                         [](float, float x) { return x; });
  if constexpr (Source::kHasEpilogue)
    WithFunction(params, [&](auto&& function, auto code) {
      constexpr bool kActivation = code.value > 0;
      if constexpr (kActivation)
        StoreBoxes<E, T, Source, false, sizeof(E) == 2, true>(d, bias, boxes, params, map_c,
                                                              map_other, function);
      else if constexpr (sizeof(E) == 2 && code.value == -GradientCode::kMulQuantized) {
        if constexpr (Boxes<E, T, Source>::kHasSlopes)
          StoreBoxes<E, T, Source, true, false, true, true>(d, bias, boxes, params, map_c,
                                                            map_other, function);
      } else if constexpr (kHasGradients || AddsSide(-code.value)) {
        StoreBoxes<E, T, Source, true, false, true>(d, bias, boxes, params, map_c, map_other,
                                                    function);
      }
    });
}

}  // namespace hopper
}  // namespace cuda
}  // namespace dlsys
