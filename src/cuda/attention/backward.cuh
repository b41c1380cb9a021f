// The backward kernels of `tiled`, after FlashAttention-2 (Dao, 2023): one goes over the keys for
// 64 queries and sums dq, the other over the queries for 64 keys and sums dk and dv, so that no sum
// crosses blocks and every run gives the same bits. Both compute a tile's weights p anew from lse,
// and ds = p (dp - Σ y dy) scale. Arrays are (batch, heads, positions, size) by their strides;
// results overlap no input. Products and, with small heads, the loads of tiles limit them.
#pragma once
#include "cuda/attention/tile.cuh"

namespace dlsys {
namespace cuda {
namespace attention {

constexpr int kBackwardColumns = 32;  // keys of a tile that goes by, or queries

template <class M, int kWidth>
struct BackwardShared {
  static constexpr int kColumns = kBackwardColumns, kPitch = kWidth + M::kPad;
  static constexpr int kOwnA = 0, kOwnB = kRows * kPitch, kOtherA = 2 * kRows * kPitch;
  static constexpr int kOtherB = kOtherA + kColumns * kPitch;
  static constexpr int kRoom = kOtherB + kColumns * kPitch;
  static constexpr int kRowFloats = kRoom + kRoomNumel<M, kColumns / 8>;  // of dk and dv
  static constexpr size_t kNbytes =
      kRowFloats * sizeof(typename M::Element) + 2 * kColumns * sizeof(float);
};

// The weight of a query and a key from their product, 0 where the query does not see the key.
template <class M>
__device__ __forceinline__ float WeightOf(const Attention& p, int64_t n, int64_t h, int64_t l,
                                          int64_t s, bool there, float product, float lse) {
  if (!there || (p.causal && s > l) || lse == -INFINITY) return 0.f;
  const float score = product * p.scale;
  return M::Exp((p.mask.data ? score + p.mask.At(n, h, l, s) : score) - lse);
}

template <class M, int kWidth>
__global__ void __launch_bounds__(kBlockThreads)
    QueryGradientKernel(Attention p, BackwardArrays arrays, int64_t row_tiles, int64_t tiles) {
  using T = typename M::Storage;
  using Shared = BackwardShared<M, kWidth>;
  constexpr int kColumns = Shared::kColumns, kPitch = Shared::kPitch, kTiles = kColumns / 8;
  auto* shared = DynamicShared<typename M::Element>();
  const int warp = (int)threadIdx.x / 32;
  const auto* own = shared + warp * 16 * kPitch;
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int64_t head = tile / row_tiles, n = head / p.heads, h = head % p.heads;
    const int64_t row =
        (row_tiles - 1 - tile % row_tiles) * kRows;  // under `causal` long ones first
    const int64_t kv_head = h / p.Group(), rows = p.Rows(n);
    const int64_t row_end = min(row + kRows, p.rows), first = head * p.rows + row;
    const int64_t end = row < rows ? p.Columns(n, row_end) : 0, count = min(row_end, rows) - row;
    __syncthreads();  // the tiles before are read
    LoadTile<M, kRows, kWidth>((const T*)arrays.q + p.of_q.At(n, h, row), count, p.size,
                               p.of_q.position, shared + Shared::kOwnA);
    LoadTile<M, kRows, kWidth>((const T*)arrays.dy + p.of_y.At(n, h, row), count, p.value_size,
                               p.of_y.position, shared + Shared::kOwnB);
    float lse[2], row_sums[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int64_t at = warp * 16 + LaneRow(2 * r);
      lse[r] = at < count ? arrays.lse[first + at] : -INFINITY;
      row_sums[r] = at < count ? arrays.row_sums[first + at] : 0.f;
    }
    float sums[kWidth / 8][4] = {};
    for (int64_t column = 0; column < end; column += kColumns) {
      __syncthreads();
      LoadTile<M, kColumns, kWidth>((const T*)arrays.k + p.of_k.At(n, kv_head, column),
                                    end - column, p.size, p.of_k.position,
                                    shared + Shared::kOtherA);
      LoadTile<M, kColumns, kWidth>((const T*)arrays.v + p.of_v.At(n, kv_head, column),
                                    end - column, p.value_size, p.of_v.position,
                                    shared + Shared::kOtherB);
      __syncthreads();
      float weights[kTiles][4] = {}, ds[kTiles][4] = {};
      AddProduct<M, false, kWidth>(own + Shared::kOwnA, kPitch, shared + Shared::kOtherA, kPitch,
                                   weights);
      AddProduct<M, false, kWidth>(own + Shared::kOwnB, kPitch, shared + Shared::kOtherB, kPitch,
                                   ds);
#pragma unroll
      for (int j = 0; j < kTiles; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const int64_t l = row + warp * 16 + LaneRow(e), s = column + j * 8 + LaneColumn(e);
          const bool there = s < end;
          const float weight = WeightOf<M>(p, n, h, l, s, there, weights[j][e], lse[e / 2]);
          if (p.step && there) ds[j][e] *= p.FactorAt(p.Element(n, h, l) + (uint64_t)s);
          ds[j][e] = weight == 0.f ? 0.f : weight * (ds[j][e] - row_sums[e / 2]) * p.scale;
        }
      AddWeighted<M>(ds, shared + Shared::kRoom + warp * (kRoomNumel<M, kTiles> / kWarps),
                     shared + Shared::kOtherA, kPitch, sums);
    }
    const float one[2] = {1.f, 1.f};
    StoreRows((const float (&)[kWidth / 8][4]) sums, one,
              (T*)arrays.dq + p.of_q.At(n, h, row + warp * 16), row_end - row - warp * 16,
              p.of_q.position, p.size);
  }
}

// Transposed: a warp's rows are keys. Heads of 256 are too wide for the registers, so a block sums
// kOut of their columns.
template <class M, int kWidth>
__global__ void __launch_bounds__(kBlockThreads)
    KeyGradientKernel(Attention p, BackwardArrays arrays, int64_t key_tiles, int64_t tiles) {
  using T = typename M::Storage;
  using Shared = BackwardShared<M, kWidth>;
  constexpr int kColumns = Shared::kColumns, kPitch = Shared::kPitch, kTiles = kColumns / 8;
  constexpr int kOut = kWidth < 128 ? kWidth : 128, kParts = kWidth / kOut;
  auto* shared = DynamicShared<typename M::Element>();
  float* lse = (float*)(shared + Shared::kRowFloats);
  float* row_sums = lse + kColumns;
  const int warp = (int)threadIdx.x / 32;
  const auto* own = shared + warp * 16 * kPitch;
  auto* room = shared + Shared::kRoom + warp * (kRoomNumel<M, kTiles> / kWarps);
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int64_t part = tile % kParts * kOut, of_kv = tile / kParts / key_tiles;
    const int64_t n = of_kv / p.kv_heads, kv_head = of_kv % p.kv_heads;
    const int64_t key = tile / kParts % key_tiles * kRows, keys = p.lengths.At(n, p.columns);
    const int64_t count = min((int64_t)kRows, keys - key), rows = count > 0 ? p.Rows(n) : 0;
    __syncthreads();  // the tiles before are read
    LoadTile<M, kRows, kWidth>((const T*)arrays.k + p.of_k.At(n, kv_head, key), count, p.size,
                               p.of_k.position, shared + Shared::kOwnA);
    LoadTile<M, kRows, kWidth>((const T*)arrays.v + p.of_v.At(n, kv_head, key), count, p.value_size,
                               p.of_v.position, shared + Shared::kOwnB);
    float dk[kOut / 8][4] = {}, dv[kOut / 8][4] = {};
    const int64_t first_row = p.causal ? key / kColumns * kColumns : 0, group = p.Group();
    for (int64_t g = 0; g < group; g++) {
      const int64_t h = kv_head * group + g, head = n * p.heads + h;
      for (int64_t row = first_row; row < rows; row += kColumns) {
        const int64_t from = head * p.rows + row;
        __syncthreads();
        LoadTile<M, kColumns, kWidth>((const T*)arrays.q + p.of_q.At(n, h, row), rows - row, p.size,
                                      p.of_q.position, shared + Shared::kOtherA);
        LoadTile<M, kColumns, kWidth>((const T*)arrays.dy + p.of_y.At(n, h, row), rows - row,
                                      p.value_size, p.of_y.position, shared + Shared::kOtherB);
        if (threadIdx.x < kColumns) {
          const bool there = row + threadIdx.x < rows;
          lse[threadIdx.x] = there ? arrays.lse[from + threadIdx.x] : -INFINITY;
          row_sums[threadIdx.x] = there ? arrays.row_sums[from + threadIdx.x] : 0.f;
        }
        __syncthreads();
        float weights[kTiles][4] = {}, ds[kTiles][4] = {};
        AddProduct<M, false, kWidth>(own + Shared::kOwnA, kPitch, shared + Shared::kOtherA, kPitch,
                                     weights);
        AddProduct<M, false, kWidth>(own + Shared::kOwnB, kPitch, shared + Shared::kOtherB, kPitch,
                                     ds);
#pragma unroll
        for (int j = 0; j < kTiles; j++)
#pragma unroll
          for (int e = 0; e < 4; e++) {
            const int of = j * 8 + LaneColumn(e);
            const int64_t l = row + of, s = key + warp * 16 + LaneRow(e);
            const bool there = s < keys && l < rows;
            float factor = 1.f;
            if (p.step && there) factor = p.FactorAt(p.Element(n, h, l) + (uint64_t)s);
            const float weight = WeightOf<M>(p, n, h, l, s, there, weights[j][e], lse[of]);
            const float gradient = ds[j][e] * factor - row_sums[of];
            ds[j][e] = weight == 0.f ? 0.f : weight * gradient * p.scale;
            weights[j][e] = weight * factor;
          }
        AddWeighted<M>(weights, room, shared + Shared::kOtherB + part, kPitch, dv);
        AddWeighted<M>(ds, room, shared + Shared::kOtherA + part, kPitch, dk);
      }
    }
    const int64_t to = key + warp * 16, there = p.columns - to;
    const float one[2] = {1.f, 1.f};
    StoreRows((const float (&)[kOut / 8][4]) dk, one,
              (T*)arrays.dk + p.of_k.At(n, kv_head, to) + part, there, p.of_k.position,
              p.size - part);
    StoreRows((const float (&)[kOut / 8][4]) dv, one,
              (T*)arrays.dv + p.of_v.At(n, kv_head, to) + part, there, p.of_v.position,
              p.value_size - part);
  }
}

// Of a block of any of the kernels: backward takes most.
template <class M>
size_t SharedNbytes(int width) {
  const size_t nbytes[] = {BackwardShared<M, 32>::kNbytes, BackwardShared<M, 64>::kNbytes,
                           BackwardShared<M, 128>::kNbytes, BackwardShared<M, 256>::kNbytes};
  return nbytes[width > 128 ? 3 : width / 64];
}

template <class M>
void Backward(const char* op, const Attention& p, const BackwardArrays& arrays, DLStream stream) {
  WithWidth(p, [&](auto width) {
    constexpr size_t kNbytes = BackwardShared<M, width>::kNbytes;
    constexpr int kParts = width > 128 ? width / 128 : 1;
    const int64_t key_tiles = CeilDiv(p.columns, kRows), row_tiles = CeilDiv(p.rows, kRows);
    const auto of_keys = KeyGradientKernel<M, width>;
    const auto of_queries = QueryGradientKernel<M, width>;
    AllowShared(op, (const void*)of_keys, kNbytes);
    AllowShared(op, (const void*)of_queries, kNbytes);
    const int64_t of_kv = p.batch * p.kv_heads * key_tiles * kParts;
    Launch(op, of_keys, Blocks(of_kv, 1), kBlockThreads, kNbytes, stream, p, arrays, key_tiles,
           of_kv);
    const int64_t of_q = p.batch * p.heads * row_tiles;
    Launch(op, of_queries, Blocks(of_q, 1), kBlockThreads, kNbytes, stream, p, arrays, row_tiles,
           of_q);
  });
}

}  // namespace attention
}  // namespace cuda
}  // namespace dlsys
