// Transposed copies of heads for flash attention with tf32, by tiles of 64 positions in shared
// memory. Arrays are (batch, heads, positions, size) by their strides, rows at multiples of 16
// bytes; copies overlap nothing. Memory limits it.
#include "cuda/attention/flash_tile.cuh"

namespace dlsys {
namespace cuda {
namespace flash {
namespace {

constexpr int kTile = 64, kTransposing = 256;  // threads

struct Transposition {
  const float* from;
  AttentionLayout layout;
  Divisor tiles, heads;  // of a head, of a sample
  int all;               // tiles
  int64_t positions, size, pitch;
  float* to;
};

__global__ void __launch_bounds__(kTransposing) TransposeKernel(const Transposition x) {
  __shared__ float tile[kTile][kTile + 1];
  GridDependencySynchronize();
  for (int at = (int)blockIdx.x; at < x.all; at += (int)gridDim.x) {
    const int sample = at / x.tiles, first = (at - sample * (int)x.tiles.value) * kTile;
    const Head head(sample, x.heads);
    const float* from = x.from + x.layout.At(head.sample, head.number, first);
    float* to = x.to + sample * x.size * x.pitch + first;
    for (int64_t column = 0; column < x.size; column += kTile) {
#pragma unroll
      for (int part = 0; part < kTile * kTile / 4 / kTransposing; part++) {
        const int quad = part * kTransposing + (int)threadIdx.x;
        const int row = quad / (kTile / 4), of = quad % (kTile / 4) * 4;
        float4 y = make_float4(0.f, 0.f, 0.f, 0.f);
        if (first + row < x.positions && column + of < x.size)
          y = *(const float4*)(from + row * x.layout.position + column + of);
        tile[row][of] = y.x, tile[row][of + 1] = y.y;
        tile[row][of + 2] = y.z, tile[row][of + 3] = y.w;
      }
      __syncthreads();
#pragma unroll
      for (int part = 0; part < kTile * kTile / 4 / kTransposing; part++) {
        // A warp takes four quads of each of eight columns.
        const int quad = part % 4 * 4 + (int)threadIdx.x % 4;
        const int of = part / 4 * 64 + (int)threadIdx.x / 4;
        const int row = quad / 2 * 8 + quad % 2;
        if (first + quad * 4 < x.pitch && column + of < x.size)
          StoreQuadTo(to + (column + of) * x.pitch + quad * 4, tile[row][of], tile[row + 2][of],
                      tile[row + 4][of], tile[row + 6][of]);
      }
      __syncthreads();
    }
  }
  TriggerProgrammaticLaunch();
}

}  // namespace

void RunTransposition(const char* op, const FlashProblem& p, const Heads& x, int64_t pitch,
                      float* to, DLStream stream) {
  const int64_t tiles = CeilDiv(pitch, kTile), all = tiles * p.batch * x.heads;
  LaunchClusters(op, TransposeKernel, Blocks(all, 1), 1, kTransposing, 0, true, stream,
                 Transposition{(const float*)x.data, x.layout, Divisor(tiles), Divisor(x.heads),
                               (int)all, x.positions, p.size, pitch, to});
}

}  // namespace flash
}  // namespace cuda
}  // namespace dlsys
