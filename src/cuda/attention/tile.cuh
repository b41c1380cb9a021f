// Products of tiles in shared memory, for attention: a warp multiplies 16 rows of one tile with
// another one into registers, by a Multiplier: mma.sync on numbers of 16 bits, mma.sync at tf32, or
// FFMA. The sums lie alike in all of them: lane l holds, of each 16 x 8, the rows l / 4 and l / 4 +
// 8 at the columns l % 4 * 2 and the next. Rows of tiles are padded so that reads do not meet in
// the banks. Reads of shared memory limit FFMA, and tensor cores too where heads are small.
#pragma once
#include "cuda/attention/attention.cuh"

namespace dlsys {
namespace cuda {
namespace attention {

// The number of a lane's row, 0 or 1 for the upper and the lower one, and column of sum e.
__device__ __forceinline__ int LaneRow(int e) { return (int)threadIdx.x % 32 / 4 + e / 2 * 8; }
__device__ __forceinline__ int LaneColumn(int e) { return (int)threadIdx.x % 4 * 2 + e % 2; }

// Numbers of 16 bits on tensor cores, 16 deep.
template <class T>
struct Narrow {
  using Storage = T;
  using Element = T;
  static constexpr int kPad = 8, kDepth = 16;
  static constexpr bool kFromRegisters = true;  // sums can be the left operand as they lie
  struct Left {
    uint32_t words[4];
  };

  static __device__ __forceinline__ Element Rounded(T x) { return x; }
  static __device__ __forceinline__ float Exp(float x) { return exp2f(x * 1.44269504f); }

  // Rows [0, 16) of a tile, at depths from k on.
  static __device__ __forceinline__ Left Load(const Element* tile, int pitch, int k) {
    const int lane = threadIdx.x % 32;
    Left left;
    LoadMatrices<false>(tile + lane % 16 * pitch + k + lane / 16 * 8, left.words);
    return left;
  }

  static __device__ __forceinline__ uint32_t Pair(float low, float high) {
    return (uint32_t)T(low).bits | (uint32_t)T(high).bits << 16;
  }
  template <int kTiles>
  static __device__ __forceinline__ Left FromSums(const float (&sums)[kTiles][4], int k) {
    const float (&a)[4] = sums[k / 8], (&b)[4] = sums[k / 8 + 1];
    return {{Pair(a[0], a[1]), Pair(a[2], a[3]), Pair(b[0], b[1]), Pair(b[2], b[3])}};
  }

  // sums += left (16, 16) times the depths from k on of a tile: its columns where kByDepth, (depth,
  // column), else its rows, (column, depth).
  template <bool kByDepth, int kTiles>
  static __device__ __forceinline__ void MultiplyAdd(const Left& left, const Element* tile,
                                                     int pitch, int k, float (&sums)[kTiles][4]) {
    const int lane = threadIdx.x % 32;
    const int row = kByDepth ? k + lane % 16 : lane % 8 + lane / 16 * 8;
    const int col = kByDepth ? lane / 16 * 8 : k + lane / 8 % 2 * 8;
#pragma unroll
    for (int j = 0; j < kTiles; j += 2) {
      const int at = kByDepth ? row * pitch + col + j * 8 : (row + j * 8) * pitch + col;
      uint32_t words[4];
      LoadMatrices<kByDepth>(tile + at, words);
      const uint32_t first[2] = {words[0], words[1]}, second[2] = {words[2], words[3]};
      MultiplyAdd16Bit<T>(left.words, first, sums[j]);
      MultiplyAdd16Bit<T>(left.words, second, sums[j + 1]);
    }
  }
};

// float32 on tensor cores at tf32, 8 deep. Tiles hold rounded numbers.
struct Tf32 {
  using Storage = float;
  using Element = float;
  static constexpr int kPad = 4, kDepth = 8;
  static constexpr bool kFromRegisters = false;
  struct Left {
    float x[4];
  };

  static __device__ __forceinline__ float Rounded(float x) { return RoundedToTf32(x); }
  static __device__ __forceinline__ float Exp(float x) { return expf(x); }

  static __device__ __forceinline__ Left Load(const float* tile, int pitch, int k) {
    const float* at = tile + LaneRow(0) * pitch + k + (int)threadIdx.x % 4;
    return {{at[0], at[8 * pitch], at[4], at[8 * pitch + 4]}};
  }

  template <bool kByDepth, int kTiles>
  static __device__ __forceinline__ void MultiplyAdd(const Left& left, const float* tile, int pitch,
                                                     int k, float (&sums)[kTiles][4]) {
    const int depth = k + (int)threadIdx.x % 4, col = (int)threadIdx.x % 32 / 4;
#pragma unroll
    for (int j = 0; j < kTiles; j++) {
      const float* at =
          tile + (kByDepth ? depth * pitch + j * 8 + col : (j * 8 + col) * pitch + depth);
      const float right[2] = {at[0], at[kByDepth ? 4 * pitch : 4]};
      MultiplyAddTf32(left.x, right, sums[j]);
    }
  }
};

// float32 by FFMA, 4 deep.
struct Fp32 {
  using Storage = float;
  using Element = float;
  static constexpr int kPad = 4, kDepth = 4;
  static constexpr bool kFromRegisters = false;
  struct Left {
    float4 rows[2];
  };

  static __device__ __forceinline__ float Rounded(float x) { return x; }
  static __device__ __forceinline__ float Exp(float x) { return expf(x); }

  static __device__ __forceinline__ Left Load(const float* tile, int pitch, int k) {
    const float* at = tile + LaneRow(0) * pitch + k;
    return {{*(const float4*)at, *(const float4*)(at + 8 * pitch)}};
  }

  static __device__ __forceinline__ float Dot(const float4& a, const float4& b, float sum) {
    return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
  }

  template <bool kByDepth, int kTiles>
  static __device__ __forceinline__ void MultiplyAdd(const Left& left, const float* tile, int pitch,
                                                     int k, float (&sums)[kTiles][4]) {
    const int col = LaneColumn(0);
#pragma unroll
    for (int j = 0; j < kTiles; j++) {
      float4 right[2];
      if constexpr (kByDepth) {
        const float* at = tile + k * pitch + j * 8 + col;
        const float2 a = *(const float2*)at, b = *(const float2*)(at + pitch);
        const float2 c = *(const float2*)(at + 2 * pitch), d = *(const float2*)(at + 3 * pitch);
        right[0] = make_float4(a.x, b.x, c.x, d.x);
        right[1] = make_float4(a.y, b.y, c.y, d.y);
      } else {
        const float* at = tile + (j * 8 + col) * pitch + k;
        right[0] = *(const float4*)at;
        right[1] = *(const float4*)(at + pitch);
      }
#pragma unroll
      for (int e = 0; e < 4; e++) sums[j][e] = Dot(left.rows[e / 2], right[e % 2], sums[j][e]);
    }
  }
};

// sums (16, 8 kTiles) += the warp's rows of `left` times `right`, over kDepth, both in shared
// memory.
template <class M, bool kByDepth, int kDepth, int kTiles>
__device__ __forceinline__ void AddProduct(const typename M::Element* left, int left_pitch,
                                           const typename M::Element* right, int pitch,
                                           float (&sums)[kTiles][4]) {
#pragma unroll 4
  for (int k = 0; k < kDepth; k += M::kDepth)
    M::template MultiplyAdd<kByDepth>(M::Load(left, left_pitch, k), right, pitch, k, sums);
}

// sums += weights (16, 8 kDepthTiles), which are sums themselves, times `right` (depth, column).
// `room` is 16 rows of this warp in shared memory, where the lay of the sums has to change.
template <class M, int kDepthTiles, int kTiles>
__device__ __forceinline__ void AddWeighted(const float (&weights)[kDepthTiles][4],
                                            typename M::Element* room,
                                            const typename M::Element* right, int pitch,
                                            float (&sums)[kTiles][4]) {
  if constexpr (M::kFromRegisters) {
#pragma unroll
    for (int k = 0; k < 8 * kDepthTiles; k += M::kDepth)
      M::template MultiplyAdd<true>(M::FromSums(weights, k), right, pitch, k, sums);
  } else {
    constexpr int kPitch = 8 * kDepthTiles + M::kPad;
    __syncwarp();  // whoever reads what was there is done
#pragma unroll
    for (int j = 0; j < kDepthTiles; j++)
#pragma unroll
      for (int e = 0; e < 4; e++)
        room[LaneRow(e) * kPitch + j * 8 + LaneColumn(e)] = M::Rounded(weights[j][e]);
    __syncwarp();
    AddProduct<M, true, 8 * kDepthTiles>(room, kPitch, right, pitch, sums);
  }
}

// The shared memory of AddWeighted for all warps of a block, in elements.
template <class M, int kDepthTiles>
constexpr int kRoomNumel = M::kFromRegisters ? 0 : kRows * (8 * kDepthTiles + M::kPad);

// Copies `count` rows of `size` numbers, `pitch` apart, to a tile of kTileRows rows of kWidth,
// zeros around them.
template <class M, int kTileRows, int kWidth>
__device__ __forceinline__ void LoadTile(const void* from, int64_t count, int64_t size,
                                         int64_t pitch, typename M::Element* tile) {
  using T = typename M::Storage;
  constexpr int kPitch = kWidth + M::kPad, kVector = 16 / (int)sizeof(T);
  constexpr int kVectors = kWidth / kVector;
  const T* rows = (const T*)from;
  const bool aligned = size % kVector == 0 && pitch % kVector == 0 && (uintptr_t)rows % 16 == 0;
  for (int i = threadIdx.x; i < kTileRows * kVectors; i += kBlockThreads) {
    const int row = i / kVectors, col = i % kVectors * kVector;
    const T* at = rows + row * pitch + col;
    __align__(16) T values[kVector];
    if (aligned && row < count && col < size) {
      *(float4*)values = *(const float4*)at;
    } else {
#pragma unroll
      for (int e = 0; e < kVector; e++) values[e] = row < count && col + e < size ? at[e] : T(0.f);
    }
#pragma unroll
    for (int e = 0; e < kVector; e++) values[e] = M::Rounded(values[e]);
    *(float4*)(tile + row * kPitch + col) = *(const float4*)values;
  }
}

// Writes a warp's sums (16, kTiles * 8) times `factor` of each row, 0 where that is 0, to rows that
// are `pitch` apart, of which `count` rows and `cols` columns are there.
template <class T, int kTiles>
__device__ __forceinline__ void StoreRows(const float (&sums)[kTiles][4], const float (&factor)[2],
                                          T* to, int64_t count, int64_t pitch, int64_t cols) {
#pragma unroll
  for (int j = 0; j < kTiles; j++)
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const int row = LaneRow(e), col = j * 8 + LaneColumn(e);
      const float value = factor[e / 2] == 0.f ? 0.f : sums[j][e] * factor[e / 2];
      if (row < count && col < cols) to[row * pitch + col] = T(value);
    }
}

// The factors of dropout of the weights of a row at a column and the next one.
struct Factors {
  float x[2];
  __device__ Factors(const Attention& p, const philox::Stream& draw, uint64_t element) {
    const philox::Words words = draw.At(element / 4);
    x[0] = p.FactorOf(words, element);
    x[1] = element % 4 < 3 ? p.FactorOf(words, element + 1)
                           : p.Factor(draw.At(element / 4 + 1).word[0]);
  }
};

// Calls run(std::integral_constant<int, width>) for the tile of the heads.
template <class F>
void WithWidth(const Attention& p, F&& run) {
  switch (WidthOf(p)) {
    case 32:
      return run(std::integral_constant<int, 32>());
    case 64:
      return run(std::integral_constant<int, 64>());
    case 128:
      return run(std::integral_constant<int, 128>());
    default:
      return run(std::integral_constant<int, 256>());
  }
}

}  // namespace attention
}  // namespace cuda
}  // namespace dlsys
