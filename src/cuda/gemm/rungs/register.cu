// The rung `register`: GEMM in true float32 by tiles in registers. A block computes 128 x 128 of C
// from panels in shared memory, 8 deep; a thread holds 8 x 8 of it, so that 16 loaded floats serve
// 64 multiply-adds. Panels lie (k, mn), which makes every load from shared memory a quad without
// bank conflicts; the next panels are read from global memory into registers while these are
// multiplied. Limited by latency: one panel ahead does not hide that of global memory, and each
// panel costs a barrier.
#include "cuda/gemm/epilogue.cuh"
#include "cuda/runtime/launch.cuh"

namespace dlsys {
namespace cuda {
namespace {

constexpr int kTile = 128, kTileK = 8, kHalf = kTile / 2;
constexpr int kPitch = kTile + 4;  // quads stay aligned, columns fall in different banks
static_assert(kTile * kTileK == 4 * kThreads, "a thread copies one quad of a panel");

// A thread's quad of the successive panels of an operand: four elements along its stride of 1.
class PanelQuad {
 public:
  __device__ PanelQuad(const Operand& from, int64_t mn0, int64_t extent, int64_t k_extent)
      : k_major_(from.of_k == 1), k_extent_(k_extent) {
    const int quads = k_major_ ? kTileK / 4 : kTile / 4;
    const int slow = (int)threadIdx.x / quads, fast = (int)threadIdx.x % quads * 4;
    mn_ = k_major_ ? slow : fast;
    k_ = k_major_ ? fast : slow;
    left_ = extent - mn0 - mn_;
    pitch_ = k_major_ ? from.of_mn : from.of_k;
    from_ = from.data + (mn0 + mn_) * from.of_mn + k_ * from.of_k;
    aligned_ = (uintptr_t)from.data % 16 == 0 && pitch_ % 4 == 0;
  }

  // Reads the quad of the panel that begins at k; outside the matrix is 0.
  __device__ __forceinline__ void Read(int64_t k) {
    const int64_t k_left = k_extent_ - k - k_;
    const int64_t valid = k_major_ ? (left_ > 0 ? k_left : 0) : (k_left > 0 ? left_ : 0);
    const float* from = from_ + (k_major_ ? k : k * pitch_);
    if (aligned_ && valid >= 4) {
      const float4 v = *(const float4*)from;
      x_[0] = v.x, x_[1] = v.y, x_[2] = v.z, x_[3] = v.w;
    } else {
#pragma unroll
      for (int e = 0; e < 4; e++) x_[e] = e < valid ? from[e] : 0.f;
    }
  }

  // Writes it as panel[k][mn].
  __device__ __forceinline__ void Write(float (&panel)[kTileK][kPitch]) const {
    if (k_major_) {
#pragma unroll
      for (int e = 0; e < 4; e++) panel[k_ + e][mn_] = x_[e];
    } else {
      *(float4*)&panel[k_][mn_] = make_float4(x_[0], x_[1], x_[2], x_[3]);
    }
  }

 private:
  const bool k_major_;
  const int64_t k_extent_;
  const float* from_;
  int64_t pitch_, left_;
  int mn_, k_;
  bool aligned_;
  float x_[4];
};

// A thread's 8 of a panel's 128 elements at one k, in two quads half the tile apart.
__device__ __forceinline__ void ReadFragment(const float* panel_row, int first, float (&x)[8]) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const float4 v = *(const float4*)(panel_row + half * kHalf + first);
    x[4 * half] = v.x, x[4 * half + 1] = v.y, x[4 * half + 2] = v.z, x[4 * half + 3] = v.w;
  }
}

// Two blocks on a multiprocessor: 128 registers a thread.
__global__ void __launch_bounds__(kThreads, 2) RegisterGemmKernel(const Gemm gemm, bool aligned) {
  __shared__ __align__(16) float panels_a[2][kTileK][kPitch], panels_b[2][kTileK][kPitch];
  const int row = (int)threadIdx.x / 16 * 4, col = (int)threadIdx.x % 16 * 4;
  const int64_t col_tiles = CeilDiv(gemm.n, kTile), tiles = CeilDiv(gemm.m, kTile) * col_tiles;
  // Loop bounds are uniform in the block, as __syncthreads requires.
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int64_t row0 = tile / col_tiles * kTile, col0 = tile % col_tiles * kTile;
    PanelQuad a(OperandA(gemm), row0, gemm.m, gemm.k), b(OperandB(gemm), col0, gemm.n, gemm.k);
    float sums[8][8] = {};
    a.Read(0), b.Read(0);
    int parity = 0;
    for (int64_t k = 0; k < gemm.k; k += kTileK, parity ^= 1) {
      a.Write(panels_a[parity]), b.Write(panels_b[parity]);
      __syncthreads();  // the other pair is free: every thread has passed its multiplication
      a.Read(k + kTileK), b.Read(k + kTileK);
#pragma unroll
      for (int d = 0; d < kTileK; d++) {
        float x[8], y[8];
        ReadFragment(panels_a[parity][d], row, x);
        ReadFragment(panels_b[parity][d], col, y);
#pragma unroll
        for (int i = 0; i < 8; i++)
#pragma unroll
          for (int j = 0; j < 8; j++) sums[i][j] = fmaf(x[i], y[j], sums[i][j]);
      }
    }
    __syncthreads();  // before the next tile's panels
#pragma unroll
    for (int q = 0; q < 16; q++) {
      const int i = q / 2, half = q % 2;
      Quad quad = {row0 + i / 4 * kHalf + row + i % 4, col0 + half * kHalf + col, {}, {}};
#pragma unroll
      for (int e = 0; e < 4; e++) quad.x[e] = sums[i][4 * half + e];
      ReadSide(gemm, aligned, quad);
      WriteQuad(gemm, aligned, ReadBias(gemm, quad.col, aligned), quad);
    }
  }
}

void Run(const char* op, const Gemm& p, int, DLStream stream) {
  const int64_t tiles = CeilDiv(p.m, kTile) * CeilDiv(p.n, kTile);
  Launch(op, RegisterGemmKernel, Blocks(tiles, 1), kThreads, 0, stream, p, AlignedOut(p));
  if (p.sums) RunOperandSums(op, p, stream);
}

}  // namespace

const GemmRung kRegister = {"register", nullptr, nullptr, RefusalOfU8, nullptr, Run};

}  // namespace cuda
}  // namespace dlsys
