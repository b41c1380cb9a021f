// The forward kernel of `tiled`: FlashAttention-2 (Dao, 2023) with the online softmax of Milakov
// and Gimelshein (2018). A block owns 64 queries of a head, in shared memory, 16 a warp, and goes
// over the keys by tiles; scores, weights and the output's sums stay in registers, no T × T matrix
// is written. Arrays are (batch, heads, positions, size) by their strides; y overlaps no input.
// Products limit it, with tensor cores also exp and the loads of tiles, which nothing hides but
// other blocks.
#pragma once
#include "cuda/attention/tile.cuh"

namespace dlsys {
namespace cuda {
namespace attention {

// Keys of a tile.
template <class M, int kWidth>
constexpr int kForwardColumns = kWidth <= 128 && sizeof(typename M::Storage) == 2 ? 64 : 32;

template <class M, int kWidth>
struct ForwardShared {
  static constexpr int kColumns = kForwardColumns<M, kWidth>, kPitch = kWidth + M::kPad;
  static constexpr int kQ = 0, kK = kRows * kPitch, kV = kK + kColumns * kPitch;
  static constexpr int kRoom = kV + kColumns * kPitch;
  static constexpr int kNumel = kRoom + kRoomNumel<M, kColumns / 8>;
  static constexpr size_t kNbytes = kNumel * sizeof(typename M::Element);
};

// Where a warp's rows are, and what of the keys they see.
struct WarpRows {
  int64_t n, h, row, row_end, columns;
};

// Scores from products: scaled, with the mask added, -inf where a key is hidden.
template <int kTiles>
__device__ __forceinline__ void FinishScores(const Attention& p, const WarpRows& at, int64_t column,
                                             float (&scores)[kTiles][4]) {
  const bool all = !p.mask.data && column + 8 * kTiles <= at.columns &&
                   (!p.causal || column + 8 * kTiles <= at.row + 1);
#pragma unroll
  for (int j = 0; j < kTiles; j++)
#pragma unroll
    for (int e = 0; e < 4; e++) {
      float& score = scores[j][e];
      score *= p.scale;
      if (all) continue;
      const int64_t l = at.row + LaneRow(e), s = column + j * 8 + LaneColumn(e);
      if (s >= at.columns || (p.causal && s > l))
        score = -INFINITY;
      else if (p.mask.data && l < at.row_end)
        score += p.mask.At(at.n, at.h, l, s);
    }
}

// A lane's two rows: maximum and sum of exponentials so far.
struct RunningRows {
  float largest[2] = {-INFINITY, -INFINITY}, total[2] = {0.f, 0.f};

  // Turns scores into weights exp(score - maximum), and gives by what earlier sums have to shrink.
  template <class M, int kTiles>
  __device__ __forceinline__ void Weigh(float (&scores)[kTiles][4], float (&shrink)[2]) {
    float shift[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float most = largest[r];
#pragma unroll
      for (int j = 0; j < kTiles; j++)
        most = fmaxf(most, fmaxf(scores[j][2 * r], scores[j][2 * r + 1]));
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
      shift[r] = most == -INFINITY ? 0.f : most;
      shrink[r] = M::Exp(largest[r] - shift[r]);
      largest[r] = most;
      total[r] *= shrink[r];
    }
#pragma unroll
    for (int j = 0; j < kTiles; j++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        scores[j][e] = M::Exp(scores[j][e] - shift[e / 2]);
        total[e / 2] += scores[j][e];
      }
  }

  // The sums of the rows over all lanes that hold them.
  __device__ __forceinline__ void Finish() {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      total[r] += __shfl_xor_sync(0xffffffffu, total[r], 1);
      total[r] += __shfl_xor_sync(0xffffffffu, total[r], 2);
    }
  }
};

template <int kTiles>
__device__ __forceinline__ void Drop(const Attention& p, const WarpRows& at, int64_t column,
                                     float (&weights)[kTiles][4]) {
  const philox::Stream draw = p.Draw();
#pragma unroll
  for (int j = 0; j < kTiles; j++)
#pragma unroll
    for (int e = 0; e < 4; e += 2) {
      const int64_t s = column + j * 8 + LaneColumn(e);
      const Factors factors(p, draw, p.Element(at.n, at.h, at.row + LaneRow(e)) + (uint64_t)s);
      weights[j][e] *= factors.x[0];
      weights[j][e + 1] *= factors.x[1];
    }
}

template <class M, int kWidth>
__global__ void __launch_bounds__(kBlockThreads)
    ForwardKernel(Attention p, ForwardArrays arrays, int64_t row_tiles, int64_t tiles) {
  using T = typename M::Storage;
  using Shared = ForwardShared<M, kWidth>;
  constexpr int kColumns = Shared::kColumns, kPitch = Shared::kPitch;
  auto* shared = DynamicShared<typename M::Element>();
  const int warp = (int)threadIdx.x / 32;
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int64_t head = tile / row_tiles, n = head / p.heads, h = head % p.heads;
    const int64_t row =
        (row_tiles - 1 - tile % row_tiles) * kRows;  // under `causal` long ones first
    const int64_t kv_head = h / p.Group(), rows = p.Rows(n);
    const int64_t row_end = min(row + kRows, p.rows);
    const int64_t end = row < rows ? p.Columns(n, row_end) : 0;
    const WarpRows at{n, h, row + warp * 16, row_end, end};
    __syncthreads();  // the tiles before are read
    LoadTile<M, kRows, kWidth>((const T*)arrays.q + p.of_q.At(n, h, row), min(row_end, rows) - row,
                               p.size, p.of_q.position, shared + Shared::kQ);
    RunningRows running;
    float sums[kWidth / 8][4] = {};
    for (int64_t column = 0; column < end; column += kColumns) {
      const int64_t count = end - column;
      __syncthreads();
      LoadTile<M, kColumns, kWidth>((const T*)arrays.k + p.of_k.At(n, kv_head, column), count,
                                    p.size, p.of_k.position, shared + Shared::kK);
      LoadTile<M, kColumns, kWidth>((const T*)arrays.v + p.of_v.At(n, kv_head, column), count,
                                    p.value_size, p.of_v.position, shared + Shared::kV);
      __syncthreads();
      float scores[kColumns / 8][4] = {}, shrink[2];
      AddProduct<M, false, kWidth>(shared + Shared::kQ + warp * 16 * kPitch, kPitch,
                                   shared + Shared::kK, kPitch, scores);
      FinishScores(p, at, column, scores);
      running.Weigh<M>(scores, shrink);
      if (p.step) Drop(p, at, column, scores);
#pragma unroll
      for (int j = 0; j < kWidth / 8; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) sums[j][e] *= shrink[e / 2];
      AddWeighted<M>(scores, shared + Shared::kRoom + warp * (kRoomNumel<M, kColumns / 8> / kWarps),
                     shared + Shared::kV, kPitch, sums);
    }
    running.Finish();
    float inverse[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const bool seen = at.row + LaneRow(2 * r) < rows && running.total[r] != 0.f;
      inverse[r] = seen ? 1.f / running.total[r] : 0.f;
      if (threadIdx.x % 4 == 0 && at.row + LaneRow(2 * r) < row_end)
        arrays.lse[head * p.rows + at.row + LaneRow(2 * r)] =
            seen ? running.largest[r] + logf(running.total[r]) : -INFINITY;
    }
    StoreRows((const float (&)[kWidth / 8][4]) sums, inverse,
              (T*)arrays.y + p.of_y.At(n, h, at.row), row_end - at.row, p.of_y.position,
              p.value_size);
  }
}

template <class M>
void Forward(const char* op, const Attention& p, const ForwardArrays& arrays, DLStream stream) {
  WithWidth(p, [&](auto width) {
    constexpr size_t kNbytes = ForwardShared<M, width>::kNbytes;
    const int64_t row_tiles = CeilDiv(p.rows, kRows), tiles = p.batch * p.heads * row_tiles;
    const auto kernel = ForwardKernel<M, width>;
    AllowShared(op, (const void*)kernel, kNbytes);
    Launch(op, kernel, Blocks(tiles, 1), kBlockThreads, kNbytes, stream, p, arrays, row_tiles,
           tiles);
  });
}

}  // namespace attention
}  // namespace cuda
}  // namespace dlsys
