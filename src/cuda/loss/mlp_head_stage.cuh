// The products that a block of the head's kernel makes (head.cuh): a sheet, which is a few rows of
// numbers in shared memory, times a matrix that lies there too.
//
// Where there are few columns or layers, a warp makes a row of its own, without waiting for the
// others. Else all threads share out columns and depth, and leave parts of the sums by groups of
// the depth, which are added up, in one order, quad by quad.
#pragma once
#include "cuda/gemm/epilogue.cuh"
#include "cuda/runtime/divisor.cuh"
#include "cuda/runtime/ptx.cuh"

namespace dlsys {
namespace cuda {
namespace dense {

constexpr int kHeadThreads = 256;
constexpr int kWarps = kHeadThreads / 32;

__host__ __device__ constexpr int Ceil(int n, int d) { return (n + d - 1) / d; }
__host__ __device__ constexpr int Whole(int n) { return Ceil(n, 4) * 4; }

// The pitch of rows in shared memory: whole quads, an odd number of them, so that quads of one
// column of rows are spread over the banks. What a row's last quad has beyond its numbers is zero.
__host__ __device__ constexpr int Pitch(int row) { return Whole(row) | 4; }

// How a stage is made. Deep: the depth is fastest in memory.
enum class Way { kFew, kFewDeep, kShallow, kShallowDeep, kMany, kManyDeep, kTensor };
constexpr int kFewest = 20;       // columns, or layers, up to which a warp has a row
constexpr int kTileColumns = 16;  // of a tile by tensor cores, which is a warp's

inline Way WayOf(bool tensor, bool deep, int depth, int width) {
  if (width <= kFewest) return deep ? Way::kFewDeep : Way::kFew;
  if (depth <= kFewest) return deep ? Way::kShallowDeep : Way::kShallow;
  return tensor ? Way::kTensor : deep ? Way::kManyDeep : Way::kMany;
}
__host__ __device__ constexpr bool OfRows(Way way) { return way <= Way::kShallowDeep; }

// A product of a sheet and op(W) (depth, width), and what becomes of each number x of it:
// slope(what it replaces, activation(x + bias)). The numbers below zero and the null pointers stand
// for what there is none of.
struct alignas(16) Stage {
  Way way;
  int weight_at, depth_step, column_step;  // in op(W); one of the steps is 1
  int depth, width;
  int from_at, to_at, bias_at;  // of sheets: rows of numbers, with a pitch
  int activation, slope;        // by the numbers of epilogue.h
  bool whole_out;               // rows of `out` are aligned quads
  float* out;                   // (rows, width), or null
  // Where all threads share it out: those, or warps for tensor cores, side by side along the
  // columns; groups of so many, and the quads of layers, or eights, that a group has; the parts
  // that they leave; and the threads that share those of a quad.
  int across, groups, share, parts, sharers;
  Divisor by_across, by_quads;  // the latter of a row
};

// A part is (kRows, Whole(width)) and a quad more, which spreads parts over the banks.
template <int kRows>
__host__ __device__ constexpr int PartNumel(int width) {
  return kRows * Whole(width) + 4;
}

template <int kRows>
void ShareOut(Stage* stage) {
  if (OfRows(stage->way)) return;
  const bool tensor = stage->way == Way::kTensor;
  const int units = tensor ? kWarps : kHeadThreads, quads = Ceil(stage->width, 4);
  const int layers = Ceil(stage->depth, tensor ? 8 : 4);
  stage->across = std::min(units, tensor ? Ceil(stage->width, kTileColumns) : quads);
  stage->groups = units / stage->across;
  stage->share = Ceil(layers, stage->groups);
  stage->parts = Ceil(layers, stage->share);
  stage->sharers = 1;
  while (stage->sharers < 8 && 2 * stage->sharers * kRows * quads <= kHeadThreads)
    stage->sharers *= 2;
  stage->by_across = Divisor(stage->across), stage->by_quads = Divisor(quads);
}

// ---- a warp a row ----

// Lanes that are 2 * kCount apart share out twice that many values, each with what the other has.
template <int kCount>
__device__ __forceinline__ void Halve(float (&values)[16]) {
  const bool upper = threadIdx.x & 2 * kCount;
#pragma unroll
  for (int i = 0; i < kCount; i++) {
    const float mine = upper ? values[i + kCount] : values[i];
    const float other = upper ? values[i] : values[i + kCount];
    values[i] = mine + __shfl_xor_sync(0xffffffffu, other, 2 * kCount);
  }
}

// For lane l the sum over all lanes of values[l / 2].
__device__ __forceinline__ float SumOfLanes(float (&values)[16]) {
  Halve<8>(values), Halve<4>(values), Halve<2>(values), Halve<1>(values);
  return values[0] + __shfl_xor_sync(0xffffffffu, values[0], 1);
}

// What stages by rows write to: a row of a sheet, and of memory or null.
struct Row {
  float *sheet, *out;
  const float* bias;  // or null
};

// Few columns: the lanes share out the layers, in quads where these are side by side, else each
// reads pairs of columns.
template <bool kDeep>
__device__ __forceinline__ void RunFew(const Stage& stage, const float* w, const float* in,
                                       const Row& row) {
  constexpr int kColumns = 10, kLayers = kDeep ? 4 : 1;
  const int lane = threadIdx.x % 32, width = stage.width;
#pragma unroll 1
  for (int first = 0; first < width; first += kColumns) {
    float sums[16] = {};
#pragma unroll(kDeep ? 1 : 2)
    for (int d = kLayers * lane; d < stage.depth; d += kLayers * 32) {
      if constexpr (kDeep) {
        float x[4], v[kColumns][4];
        *(float4*)x = *(const float4*)(in + d);
#pragma unroll
        for (int c = 0; c < kColumns; c++)
          *(float4*)v[c] = *(const float4*)(w + min(first + c, width - 1) * stage.column_step + d);
#pragma unroll
        for (int e = 0; e < 4; e++)
#pragma unroll
          for (int c = 0; c < kColumns; c++) sums[c] = fmaf(x[e], v[c][e], sums[c]);
      } else {
        const float x = in[d];
#pragma unroll
        for (int c = 0; c < kColumns; c += 2) {
          const int pair = min(first + c, width - 1) & ~1;
          const float2 v = *(const float2*)(w + d * stage.depth_step + pair);
          sums[c] = fmaf(x, v.x, sums[c]), sums[c + 1] = fmaf(x, v.y, sums[c + 1]);
        }
      }
    }
    float x[1] = {SumOfLanes(sums)}, old[1];
    const int col = first + lane / 2, end = first + kColumns;
    if (lane % 2 || col >= (end < width ? end : Whole(width))) continue;  // the last have the rest
    old[0] = row.sheet[col];
    if (row.bias) x[0] += row.bias[col];
    End(stage.activation, stage.slope, old, x);
    row.sheet[col] = col < width ? x[0] : 0.f;
    if (row.out && col < width) row.out[col] = x[0];
  }
}

// Few layers: a lane has columns 32 apart.
template <bool kDeep>
__device__ __forceinline__ void RunShallow(const Stage& stage, const float* w, const float* in,
                                           const Row& row) {
  const int width = stage.width, last = width - 1;
#pragma unroll 1
  for (int first = threadIdx.x % 32; first < Whole(width); first += 4 * 32) {
    float sums[4] = {}, old[4];
#pragma unroll 1
    for (int d = 0; d < stage.depth; d += 4) {
      float x[4], v[4][4];
      *(float4*)x = *(const float4*)(in + d);
#pragma unroll
      for (int c = 0; c < 4; c++) {
        const float* from = w + min(first + 32 * c, last) * stage.column_step;
        if constexpr (kDeep) {
          *(float4*)v[c] = *(const float4*)(from + d);
        } else {
#pragma unroll
          for (int e = 0; e < 4; e++)
            v[c][e] = from[min(d + e, stage.depth - 1) * stage.depth_step];
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
      old[c] = row.sheet[col < Whole(width) ? col : first];  // no other lane writes there
      if (row.bias) sums[c] += row.bias[min(col, last)];
    }
    End(stage.activation, stage.slope, old, sums);
#pragma unroll
    for (int c = 0; c < 4; c++) {
      const int col = first + 32 * c;
      if (col < Whole(width)) row.sheet[col] = col < width ? sums[c] : 0.f;
      if (row.out && col < width) row.out[col] = sums[c];
    }
  }
}

// ---- all threads ----
// Each of these leaves the parts of the stage's sums.

// A thread has four columns of all rows, and the layers of its group.
template <int kRows, bool kDeep>
__device__ __forceinline__ void SumMany(const Stage& stage, const float* w, const float* in,
                                        float* parts) {
  const int group = (int)threadIdx.x / stage.by_across, slots = Ceil(stage.width, 4);
  const int begin = group * stage.share, end = min(begin + stage.share, Ceil(stage.depth, 4));
  const int in_pitch = Pitch(stage.depth), pitch = Whole(stage.width);
#pragma unroll 1
  for (int slot = threadIdx.x - group * stage.across; slot < slots && begin < end;
       slot += stage.across) {
    float sums[4][kRows] = {};
#pragma unroll 1
    for (int q = begin; q < end; q++) {
      float v[4][4];  // of each of four columns four layers, or of each layer the columns
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const int at = kDeep ? min(slot + e * slots, stage.width - 1) * stage.column_step + 4 * q
                             : min(4 * q + e, stage.depth - 1) * stage.depth_step + 4 * slot;
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
            sums[c][r] = fmaf(kDeep ? v[c][e] : v[e][c], x[e], sums[c][r]);
      }
    }
    float* to = parts + group * PartNumel<kRows>(stage.width) + (kDeep ? 1 : 4) * slot;
#pragma unroll
    for (int r = 0; r < kRows; r++, to += pitch) {
      if constexpr (kDeep) {
#pragma unroll
        for (int c = 0; c < 4; c++) to[c * slots] = sums[c][r];
      } else {
        StoreQuad(to, sums[0][r], sums[1][r], sums[2][r], sums[3][r]);
      }
    }
  }
}

// A warp has 16 columns. The columns are the rows of what the tensor cores multiply, and the rows
// the columns.
template <int kRows>
__device__ __forceinline__ void SumTensor(const Stage& stage, const float* w, const float* in,
                                          float* parts) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, pitch = Whole(stage.width);
  const int group = warp / stage.by_across;
  const int begin = 8 * group * stage.share, end = min(begin + 8 * stage.share, stage.depth);
  const int depth_step = stage.depth_step, last = stage.width - 1;
  const float* x = in + min(lane / 4, kRows - 1) * Pitch(stage.depth) + begin + lane % 4;
  w += (begin + lane % 4) * depth_step;
#pragma unroll 1
  for (int tile = warp - group * stage.across; tile * kTileColumns <= last && begin < end;
       tile += stage.across) {
    const int col = tile * kTileColumns + lane / 4;
    const float* left = w + min(col, last) * stage.column_step;
    const float* right = w + min(col + 8, last) * stage.column_step;
    float sums[2][4] = {};  // by turns, so that one need not wait for the other
    int layer = 0;
    const auto multiply = [&](float (&of)[4], auto whole) {
      float a[4] = {}, b[2] = {};
#pragma unroll
      for (int e = 0; e < 2; e++, layer += 4) {
        if (!decltype(whole)::value && begin + layer + lane % 4 >= end) continue;
        a[2 * e] = RoundedToTf32(left[layer * depth_step]);
        a[2 * e + 1] = RoundedToTf32(right[layer * depth_step]);
        b[e] = RoundedToTf32(x[layer]);
      }
      MultiplyAddTf32(a, b, of);
    };
#pragma unroll 1
    while (begin + layer + 32 <= end) {
#pragma unroll
      for (int k = 0; k < 4; k++) multiply(sums[k % 2], std::true_type());
    }
#pragma unroll 1
    while (begin + layer < end) multiply(sums[0], std::false_type());
    float* to = parts + group * PartNumel<kRows>(stage.width);
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const int column = col + k / 2 * 8, row = lane % 4 * 2 + k % 2;
      if (column <= last && row < kRows) to[row * pitch + column] = sums[0][k] + sums[1][k];
    }
  }
}

// Adds up the parts and writes the sheet that the stage makes, and `valid` rows of `out` from
// `first` on. Up to eight threads have a quad's parts.
template <int kRows>
__device__ __forceinline__ void Finish(const Stage& stage, const float* parts, int64_t first,
                                       int valid, float* memory) {
  const int in_row = Ceil(stage.width, 4), quads = kRows * in_row;
  const int share = threadIdx.x % stage.sharers, numel = PartNumel<kRows>(stage.width);
#pragma unroll 1
  for (int begin = 0; begin < quads; begin += kHeadThreads / stage.sharers) {
    const int quad = begin + (int)threadIdx.x / stage.sharers, at = 4 * min(quad, quads - 1);
    float x[4] = {}, old[4];
#pragma unroll 4
    for (int part = share; part < stage.parts; part += stage.sharers) {
      const float4 v = *(const float4*)(parts + part * numel + at);
      x[0] += v.x, x[1] += v.y, x[2] += v.z, x[3] += v.w;
    }
#pragma unroll 1
    for (int distance = 1; distance < stage.sharers; distance *= 2)
#pragma unroll
      for (int e = 0; e < 4; e++) x[e] += __shfl_xor_sync(0xffffffffu, x[e], distance);
    if (quad >= quads || share > 0) continue;
    const int row = quad / stage.by_quads, col = (quad - row * in_row) * 4;
    float* place = memory + stage.to_at + row * Pitch(stage.width) + col;
    *(float4*)old = *(const float4*)place;
    if (stage.bias_at >= 0) {
      const float4 v = *(const float4*)(memory + stage.bias_at + col);
      x[0] += v.x, x[1] += v.y, x[2] += v.z, x[3] += v.w;
    }
    End(stage.activation, stage.slope, old, x);
#pragma unroll
    for (int e = 1; e < 4; e++)
      if (col + e >= stage.width) x[e] = 0.f;
    const float4 v = make_float4(x[0], x[1], x[2], x[3]);
    *(float4*)place = v;
    if (!stage.out || row >= valid) continue;
    float* out = stage.out + (first + row) * stage.width + col;
    if (stage.whole_out) {
      *(float4*)out = v;
    } else {
#pragma unroll
      for (int e = 0; e < 4; e++)
        if (col + e < stage.width) out[e] = x[e];
    }
  }
}

// One stage for `valid` rows from `first` on. Where it is by rows, a warp has what its own leaves;
// else all threads meet before it, as what it reads may be by rows, and have what it leaves.
template <int kRows, bool kTensor>
__device__ __forceinline__ void Run(const Stage stage, int parts_at, int64_t first, int valid,
                                    float* memory) {
  const float *w = memory + stage.weight_at, *in = memory + stage.from_at;
  if (OfRows(stage.way)) {
    const int row = threadIdx.x / 32;
    if (row >= kRows) return;
    in += row * Pitch(stage.depth);
    const Row to = {memory + stage.to_at + row * Pitch(stage.width),
                    stage.out && row < valid ? stage.out + (first + row) * stage.width : nullptr,
                    stage.bias_at >= 0 ? memory + stage.bias_at : nullptr};
    if (stage.way == Way::kFew)
      RunFew<false>(stage, w, in, to);
    else if (stage.way == Way::kFewDeep)
      RunFew<true>(stage, w, in, to);
    else if (stage.way == Way::kShallow)
      RunShallow<false>(stage, w, in, to);
    else
      RunShallow<true>(stage, w, in, to);
    return __syncwarp();
  }
  float* parts = memory + parts_at;
  __syncthreads();
  if constexpr (kTensor)
    SumTensor<kRows>(stage, w, in, parts);
  else if (stage.way == Way::kMany)
    SumMany<kRows, false>(stage, w, in, parts);
  else
    SumMany<kRows, true>(stage, w, in, parts);
  __syncthreads();
  Finish<kRows>(stage, parts, first, valid, memory);
  __syncthreads();
}

}  // namespace dense
}  // namespace cuda
}  // namespace dlsys
