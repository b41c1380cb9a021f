// GEMMs within one block of the fused MLP head (mlp_head.cu): a few rows of values in shared memory
// times a weight that lies there too, with the epilogue (bias, activation or dact) fused.
//
// With few columns or a short K a warp computes a row alone (lanes reduce over K with shuffles, or
// hold columns), without block barriers. Otherwise all threads split N and K (sliced-K, by FFMA or
// mma.sync), leave partial sums in shared memory and reduce them in a fixed order. Operands are
// small: latency of shared memory and of barriers is the limit.
#pragma once
#include "cuda/gemm/epilogue.cuh"
#include "cuda/instructions/ptx.cuh"
#include "cuda/runtime/divisor.cuh"

namespace dlsys {
namespace cuda {
namespace mlp_head {

constexpr int kHeadThreads = 256;
constexpr int kWarps = kHeadThreads / 32;

__host__ __device__ constexpr int RoundUp4(int n) { return CeilDiv32(n, 4) * 4; }

// Pitch of rows in shared memory: an odd number of quads, so that quads of one column fall in
// different banks. The padding of a row's last quad is zero.
__host__ __device__ constexpr int Pitch(int row) { return RoundUp4(row) | 4; }

// The algorithm of a stage, by its shape and by which of K and N is contiguous in the weight.
enum class GemmKind {
  kNarrow,
  kNarrowKMajor,
  kShortK,
  kShortKKMajor,
  kGeneral,
  kGeneralKMajor,
  kTensorCores
};
constexpr int kMaxNarrow = 20;  // N, or K, up to which a warp computes a row alone
constexpr int kTileN = 32;      // columns of a warp's mma tile
constexpr int kStepK = 16;      // k of a step with mma

inline GemmKind KindOf(bool tensor, bool k_major, int k, int n) {
  if (n <= kMaxNarrow) return k_major ? GemmKind::kNarrowKMajor : GemmKind::kNarrow;
  if (k <= kMaxNarrow) return k_major ? GemmKind::kShortKKMajor : GemmKind::kShortK;
  return tensor ? GemmKind::kTensorCores : k_major ? GemmKind::kGeneralKMajor : GemmKind::kGeneral;
}
__host__ __device__ constexpr bool IsWarpPerRow(GemmKind kind) {
  return kind <= GemmKind::kShortKKMajor;
}

// One GEMM: values (rows, k) times op(W) (k, n); each element x becomes dact(old value,
// activation(x + bias)). Offsets are in floats of shared memory; a negative one, or a null pointer,
// means none.
struct alignas(16) Stage {
  GemmKind kind;
  int weight_at, k_stride, n_stride;  // of op(W); one of the strides is 1
  int k, n;
  int from_at, to_at, bias_at;  // of value buffers (rows, Pitch)
  int activation, dact;         // codes of operators/epilogue.h
  bool aligned_out;             // rows of `out` allow 16-byte stores
  float* out;                   // (rows, n), or null
  // Partition among all threads: units_n threads (warps for mma) side by side along N; k_groups of
  // them, each with k_per_group quads (sixteens for mma) of K; the k_slices of partial sums they
  // leave; and the threads that reduce one quad.
  int units_n, k_groups, k_per_group, k_slices, reducers;
  Divisor by_units_n, by_quads;  // by_quads: quads of a row
};

// A slice of partial sums is (kRows, RoundUp4(n)) and a quad, which shifts slices to other banks.
template <int kRows>
__host__ __device__ constexpr int PartialNumel(int n) {
  return kRows * RoundUp4(n) + 4;
}

template <int kRows>
void Partition(Stage* stage) {
  if (IsWarpPerRow(stage->kind)) return;
  const bool tensor = stage->kind == GemmKind::kTensorCores;
  const int units = tensor ? kWarps : kHeadThreads, quads = CeilDiv32(stage->n, 4);
  const int k_steps = CeilDiv32(stage->k, tensor ? kStepK : 4);
  stage->units_n = std::min(units, tensor ? CeilDiv32(stage->n, kTileN) : quads);
  stage->k_groups = units / stage->units_n;
  stage->k_per_group = CeilDiv32(k_steps, stage->k_groups);
  stage->k_slices = CeilDiv32(k_steps, stage->k_per_group);
  stage->reducers = 1;
  while (stage->reducers < 8 && 2 * stage->reducers * kRows * quads <= kHeadThreads)
    stage->reducers *= 2;
  stage->by_units_n = Divisor(stage->units_n), stage->by_quads = Divisor(quads);
}

// ---- a warp per row ----

// One step of a reduce-scatter: lanes 2 * kCount apart exchange halves and add.
template <int kCount>
__device__ __forceinline__ void ReduceScatter(float (&values)[16]) {
  const bool upper = threadIdx.x & 2 * kCount;
#pragma unroll
  for (int i = 0; i < kCount; i++) {
    const float mine = upper ? values[i + kCount] : values[i];
    const float other = upper ? values[i] : values[i + kCount];
    values[i] = mine + __shfl_xor_sync(0xffffffffu, other, 2 * kCount);
  }
}

// Returns to lane l the sum over all lanes of values[l / 2].
__device__ __forceinline__ float SumLanes(float (&values)[16]) {
  ReduceScatter<8>(values), ReduceScatter<4>(values), ReduceScatter<2>(values),
      ReduceScatter<1>(values);
  return values[0] + __shfl_xor_sync(0xffffffffu, values[0], 1);
}

// The output row of a warp: in shared memory, and in global memory or null.
struct Row {
  float *values, *out;
  const float* bias;  // or null
};

// Small N: lanes split K, in quads where K is contiguous, else reading two adjacent columns at a
// time.
template <bool kKMajor>
__device__ __forceinline__ void RunNarrow(const Stage& stage, const float* w, const float* in,
                                          const Row& row) {
  constexpr int kColumns = 10, kVectorK = kKMajor ? 4 : 1;
  const int lane = threadIdx.x % 32, n = stage.n;
#pragma unroll 1
  for (int first = 0; first < n; first += kColumns) {
    float sums[16] = {};
#pragma unroll(kKMajor ? 1 : 2)
    for (int k = kVectorK * lane; k < stage.k; k += kVectorK * 32) {
      if constexpr (kKMajor) {
        float x[4], v[kColumns][4];
        *(float4*)x = *(const float4*)(in + k);
#pragma unroll
        for (int c = 0; c < kColumns; c++)
          *(float4*)v[c] = *(const float4*)(w + min(first + c, n - 1) * stage.n_stride + k);
#pragma unroll
        for (int e = 0; e < 4; e++)
#pragma unroll
          for (int c = 0; c < kColumns; c++) sums[c] = fmaf(x[e], v[c][e], sums[c]);
      } else {
        const float x = in[k];
#pragma unroll
        for (int c = 0; c < kColumns; c += 2) {
          const int pair = min(first + c, n - 1) & ~1;
          const float2 v = *(const float2*)(w + k * stage.k_stride + pair);
          sums[c] = fmaf(x, v.x, sums[c]), sums[c + 1] = fmaf(x, v.y, sums[c + 1]);
        }
      }
    }
    float x[1] = {SumLanes(sums)}, old[1];
    const int col = first + lane / 2, end = first + kColumns;
    if (lane % 2 || col >= (end < n ? end : RoundUp4(n)))
      continue;  // the last lanes write the padding
    old[0] = row.values[col];
    if (row.bias) x[0] += row.bias[col];
    ApplyActivations(stage.activation, stage.dact, old, x);
    row.values[col] = col < n ? x[0] : 0.f;
    if (row.out && col < n) row.out[col] = x[0];
  }
}

// Small K: a lane has columns 32 apart.
template <bool kKMajor>
__device__ __forceinline__ void RunShortK(const Stage& stage, const float* w, const float* in,
                                          const Row& row) {
  const int n = stage.n, last = n - 1;
#pragma unroll 1
  for (int first = threadIdx.x % 32; first < RoundUp4(n); first += 4 * 32) {
    float sums[4] = {}, old[4];
#pragma unroll 1
    for (int k = 0; k < stage.k; k += 4) {
      float x[4], v[4][4];
      *(float4*)x = *(const float4*)(in + k);
#pragma unroll
      for (int c = 0; c < 4; c++) {
        const float* from = w + min(first + 32 * c, last) * stage.n_stride;
        if constexpr (kKMajor) {
          *(float4*)v[c] = *(const float4*)(from + k);
        } else {
#pragma unroll
          for (int e = 0; e < 4; e++) v[c][e] = from[min(k + e, stage.k - 1) * stage.k_stride];
        }
      }
#pragma unroll
      for (int e = 0; e < 4; e++)
#pragma unroll
        for (int c = 0; c < 4; c++) sums[c] = fmaf(x[e], v[c][e], sums[c]);
    }
#pragma unroll
    for (int c = 0; c < 4; c++) {
      const int col = first + 32 * c;
      old[c] = row.values[col < RoundUp4(n) ? col : first];  // written by no other lane
      if (row.bias) sums[c] += row.bias[min(col, last)];
    }
    ApplyActivations(stage.activation, stage.dact, old, sums);
#pragma unroll
    for (int c = 0; c < 4; c++) {
      const int col = first + 32 * c;
      if (col < RoundUp4(n)) row.values[col] = col < n ? sums[c] : 0.f;
      if (row.out && col < n) row.out[col] = sums[c];
    }
  }
}

// ---- all threads: each leaves k_slices partial sums of the stage ----

// FFMA: a thread has four columns of all rows, and the K of its group.
template <int kRows, bool kKMajor>
__device__ __forceinline__ void MultiplyGeneral(const Stage& stage, const float* w, const float* in,
                                                float* partials) {
  const int group = (int)threadIdx.x / stage.by_units_n, quads_n = CeilDiv32(stage.n, 4);
  const int begin = group * stage.k_per_group;
  const int end = min(begin + stage.k_per_group, CeilDiv32(stage.k, 4));
  const int in_pitch = Pitch(stage.k), pitch = RoundUp4(stage.n);
#pragma unroll 1
  for (int quad_n = threadIdx.x - group * stage.units_n; quad_n < quads_n && begin < end;
       quad_n += stage.units_n) {
    float sums[4][kRows] = {};
#pragma unroll 1
    for (int q = begin; q < end; q++) {
      float v[4][4];  // four k of four columns, or four columns of four k
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const int at = kKMajor ? min(quad_n + e * quads_n, stage.n - 1) * stage.n_stride + 4 * q
                               : min(4 * q + e, stage.k - 1) * stage.k_stride + 4 * quad_n;
        *(float4*)v[e] = *(const float4*)(w + at);
      }
#pragma unroll
      for (int r = 0; r < kRows; r++) {
        float x[4];
        *(float4*)x = *(const float4*)(in + r * in_pitch + 4 * q);
#pragma unroll
        for (int e = 0; e < 4; e++)
#pragma unroll
          for (int c = 0; c < 4; c++)
            sums[c][r] = fmaf(kKMajor ? v[c][e] : v[e][c], x[e], sums[c][r]);
      }
    }
    float* to = partials + group * PartialNumel<kRows>(stage.n) + (kKMajor ? 1 : 4) * quad_n;
#pragma unroll
    for (int r = 0; r < kRows; r++, to += pitch) {
      if constexpr (kKMajor) {
#pragma unroll
        for (int c = 0; c < 4; c++) to[c * quads_n] = sums[c][r];
      } else {
        StoreQuad(to, sums[0][r], sums[1][r], sums[2][r], sums[3][r]);
      }
    }
  }
}

// mma.sync at tf32: the transposed product, a warp has 32 columns as two M and the rows as N. Which
// of sixteen k belong to which of two mma, and which columns to a lane, is chosen so that lanes
// read quads of the weight.
template <int kRows, bool kKMajor>
__device__ __forceinline__ void MultiplyTensorCores(const Stage& stage, const float* w,
                                                    const float* in, float* partials) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, pitch = RoundUp4(stage.n);
  const int group = warp / stage.by_units_n, next = lane % 4;
  const int begin = kStepK * group * stage.k_per_group;
  const int end = min(begin + kStepK * stage.k_per_group, stage.k);
  const float* x = in + min(lane / 4, kRows - 1) * Pitch(stage.k);
#pragma unroll 1
  for (int tile = warp - group * stage.units_n; tile * kTileN < stage.n && begin < end;
       tile += stage.units_n) {
    const int col = tile * kTileN + lane / 4 * 4;
    float sums[2][4] = {};
#pragma unroll 2
    for (int k = begin; k < end; k += kStepK) {
      float v[4][4], of_x[4];   // v[k][column]
      if constexpr (kKMajor) {  // k + 4 * next and the three behind it
        const bool exists = k + 4 * next < end;
        const int at = exists ? k + 4 * next : 0;
#pragma unroll
        for (int c = 0; c < 4; c++) {
          const float4 q = *(const float4*)(w + min(col + c, stage.n - 1) * stage.n_stride + at);
          v[0][c] = q.x, v[1][c] = q.y, v[2][c] = q.z, v[3][c] = q.w;
        }
        const float4 q = *(const float4*)(x + at);
        of_x[0] = q.x, of_x[1] = q.y, of_x[2] = q.z, of_x[3] = q.w;
        if (!exists) {
#pragma unroll
          for (int e = 0; e < 4; e++) {
            of_x[e] = 0.f;
#pragma unroll
            for (int c = 0; c < 4; c++) v[e][c] = 0.f;
          }
        }
      } else {  // k + 2 * next and the next, and those eight behind them
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const int at = k + e / 2 * 8 + 2 * next + e % 2;
          const bool exists = at < end;
          const float4 q = *(const float4*)(w + (exists ? at : 0) * stage.k_stride +
                                            min(col, RoundUp4(stage.n) - 4));
          v[e][0] = exists ? q.x : 0.f, v[e][1] = exists ? q.y : 0.f;
          v[e][2] = exists ? q.z : 0.f, v[e][3] = exists ? q.w : 0.f;
          of_x[e] = exists ? x[at] : 0.f;
        }
      }
#pragma unroll
      for (int step = 0; step < 2; step++) {
        const int k0 = 2 * step, k1 = k0 + 1;
        const float b[2] = {RoundedToTf32(of_x[k0]), RoundedToTf32(of_x[k1])};
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const float a[4] = {RoundedToTf32(v[k0][2 * i]), RoundedToTf32(v[k0][2 * i + 1]),
                              RoundedToTf32(v[k1][2 * i]), RoundedToTf32(v[k1][2 * i + 1])};
          MultiplyAddTf32(a, b, sums[i]);
        }
      }
    }
    float* to = partials + group * PartialNumel<kRows>(stage.n) + col;
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int row = 2 * next + e;
      if (col < stage.n && row < kRows)
        StoreQuad(to + row * pitch, sums[0][e], sums[0][2 + e], sums[1][e], sums[1][2 + e]);
    }
  }
}

// Reduces the partial sums, applies the epilogue, writes the values and `valid` rows of `out` from
// `first` on. Up to eight threads reduce a quad.
template <int kRows>
__device__ __forceinline__ void Finish(const Stage& stage, const float* partials, int64_t first,
                                       int valid, float* memory) {
  const int in_row = CeilDiv32(stage.n, 4), quads = kRows * in_row;
  const int reducer = threadIdx.x % stage.reducers, numel = PartialNumel<kRows>(stage.n);
#pragma unroll 1
  for (int begin = 0; begin < quads; begin += kHeadThreads / stage.reducers) {
    const int quad = begin + (int)threadIdx.x / stage.reducers, at = 4 * min(quad, quads - 1);
    float x[4] = {}, old[4];
#pragma unroll 4
    for (int slice = reducer; slice < stage.k_slices; slice += stage.reducers) {
      const float4 v = *(const float4*)(partials + slice * numel + at);
      x[0] += v.x, x[1] += v.y, x[2] += v.z, x[3] += v.w;
    }
#pragma unroll 1
    for (int distance = 1; distance < stage.reducers; distance *= 2)
#pragma unroll
      for (int e = 0; e < 4; e++) x[e] += __shfl_xor_sync(0xffffffffu, x[e], distance);
    if (quad >= quads || reducer > 0) continue;
    const int row = quad / stage.by_quads, col = (quad - row * in_row) * 4;
    float* to = memory + stage.to_at + row * Pitch(stage.n) + col;
    *(float4*)old = *(const float4*)to;
    if (stage.bias_at >= 0) {
      const float4 v = *(const float4*)(memory + stage.bias_at + col);
      x[0] += v.x, x[1] += v.y, x[2] += v.z, x[3] += v.w;
    }
    ApplyActivations(stage.activation, stage.dact, old, x);
#pragma unroll
    for (int e = 1; e < 4; e++)
      if (col + e >= stage.n) x[e] = 0.f;
    const float4 v = make_float4(x[0], x[1], x[2], x[3]);
    *(float4*)to = v;
    if (!stage.out || row >= valid) continue;
    float* out = stage.out + (first + row) * stage.n + col;
    if (stage.aligned_out) {
      *(float4*)out = v;
    } else {
#pragma unroll
      for (int e = 0; e < 4; e++)
        if (col + e < stage.n) out[e] = x[e];
    }
  }
}

// Runs a stage for `valid` rows from `first` on. A warp-per-row stage needs only its own warp's
// input; the others begin and end with a block barrier.
template <int kRows, bool kTensorCores>
__device__ __forceinline__ void Run(const Stage stage, int partials_at, int64_t first, int valid,
                                    float* memory) {
  const float *w = memory + stage.weight_at, *in = memory + stage.from_at;
  if (IsWarpPerRow(stage.kind)) {
    const int row = threadIdx.x / 32;
    if (row >= kRows) return;
    in += row * Pitch(stage.k);
    const Row to = {memory + stage.to_at + row * Pitch(stage.n),
                    stage.out && row < valid ? stage.out + (first + row) * stage.n : nullptr,
                    stage.bias_at >= 0 ? memory + stage.bias_at : nullptr};
    if (stage.kind == GemmKind::kNarrow)
      RunNarrow<false>(stage, w, in, to);
    else if (stage.kind == GemmKind::kNarrowKMajor)
      RunNarrow<true>(stage, w, in, to);
    else if (stage.kind == GemmKind::kShortK)
      RunShortK<false>(stage, w, in, to);
    else
      RunShortK<true>(stage, w, in, to);
    return __syncwarp();
  }
  float* partials = memory + partials_at;
  __syncthreads();
  if constexpr (kTensorCores) {
    if (stage.k_stride == 1)
      MultiplyTensorCores<kRows, true>(stage, w, in, partials);
    else
      MultiplyTensorCores<kRows, false>(stage, w, in, partials);
  } else if (stage.kind == GemmKind::kGeneral)
    MultiplyGeneral<kRows, false>(stage, w, in, partials);
  else
    MultiplyGeneral<kRows, true>(stage, w, in, partials);
  __syncthreads();
  Finish<kRows>(stage, partials, first, valid, memory);
  __syncthreads();
}

}  // namespace mlp_head
}  // namespace cuda
}  // namespace dlsys
