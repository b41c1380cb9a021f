// Filter gradient of float32 as implicit GEMM by mma.sync at tf32: M and N = filters and (kernel
// offset, channel), K = positions, split over blocks. A warp copies panels of both operands by TMA,
// which rounds them, into a ring of stages; eight others multiply them from registers. Memory
// bandwidth limits 1 x 1 filters of few channels, the issue of mma others.
#include "cuda/conv/channels_last/wgrad.cuh"
#include "cuda/runtime/launch.cuh"

namespace dlsys {
namespace cuda {
namespace channels_last {
namespace {

constexpr int kBox = 32;  // positions, and channels, of a box of 4 KB
constexpr int kBoxNbytes = kBox * kBox * (int)sizeof(float);
constexpr int kConsumers = 8;  // warps, beside a warpgroup one of whose threads is the producer
constexpr int kBlockThreads = (kConsumers + 4) * 32;
constexpr int kAlignment = 1024;  // of the swizzle

// Warps of kWarpM x kWarpN; blocks are of 16 rows and of 8 columns.
template <int kM, int kN, int kWarpsM, int kStages_>
struct Tile {
  static constexpr int kTileM = kM, kTileN = kN, kStages = kStages_;
  static constexpr int kWarpsN = kConsumers / kWarpsM;
  static constexpr int kWarpM = kM / kWarpsM, kWarpN = kN / kWarpsN;
  static constexpr int kBlocksM = kWarpM / 16, kBlocksN = kWarpN / 8;
  static constexpr int kPanelA = kM / kBox * kBoxNbytes;
  static constexpr int kStageNbytes = kPanelA + kN / kBox * kBoxNbytes;
  static constexpr int kSharedNbytes = kAlignment + kStages * kStageNbytes;
};

// Where a thread reads an operand: of the element (position, channel) of a box, a row of 128 bytes
// for each position, swizzled. The positions that mma's lane l multiplies are 2 (l % 4) and the
// next of every eight, which lie in banks of their own for the eight channels of other lanes.
class Across {
 public:
  __device__ __forceinline__ explicit Across(int first) : box_(first / kBox * kBoxNbytes) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int e = 0; e < 4; e++) {
#pragma unroll
      for (int part = 0; part < 2; part++) {
        const int k = lane % 4 * 2 + part, c = (first + e * 8) % kBox + lane / 4;
        offsets_[e][part] = k * 128 + ((c / 4) ^ k) * 16 + c % 4 * 4;
      }
    }
  }
  // Of channels first + 8 block + lane / 4, from the eight positions `eight` on.
  __device__ __forceinline__ float Read(const unsigned char* panel, int block, int eight,
                                        int part) const {
    return *(const float*)(panel + box_ + block / 4 * kBoxNbytes + eight * 1024 +
                           offsets_[block % 4][part]);
  }

 private:
  int box_, offsets_[4][2];
};

// Which tile of C, and which panels.
struct Share {
  int row, col, split, begin, end;
};
template <class T>
__device__ __forceinline__ Share ShareOf(const WgradTask& task) {
  const int rows = (task.m + T::kTileM - 1) / T::kTileM;
  const int tiles = rows * ((task.n + T::kTileN - 1) / T::kTileN);
  const int tile = blockIdx.x % tiles, split = blockIdx.x / tiles;
  const auto begin = [&](int k) { return (int)((int64_t)task.panels * k / task.splits); };
  return {tile % rows * T::kTileM, tile / rows * T::kTileN, split, begin(split), begin(split + 1)};
}

// Copies boxes of `kCount` runs of 32 channels, of which there are `channels`.
template <int kCount>
__device__ __forceinline__ void LoadOperand(const WgradTask& task, bool from_pixels, uint32_t to,
                                            const CUtensorMap* map, uint32_t barrier, int first,
                                            int channels, int position) {
  if (from_pixels) {
    const PixelLayout::Pixel at = task.layout.At(position);
#pragma unroll
    for (int k = 0; k < kCount; k++) {
      const int run = min(first + k * kBox, channels - 1) / kBox;
      const PixelColumn column = PixelColumn::Of(task.layout, run, kBox);
      hopper::LoadPixels<false>(to + k * kBoxNbytes, map, barrier, column.c, at.w, at.h, at.n,
                                column.by_w, column.by_h);
    }
  } else {
#pragma unroll
    for (int k = 0; k < kCount; k++)
      hopper::LoadBox<false>(to + k * kBoxNbytes, map, barrier, first + k * kBox, position, 0);
  }
}

template <class T>
__global__ void __launch_bounds__(kBlockThreads, 1)
    WgradKernel(const __grid_constant__ CUtensorMap map_a,
                const __grid_constant__ CUtensorMap map_b, const __grid_constant__ WgradTask task) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __shared__ __align__(8) uint64_t barriers[2 * T::kStages];
  unsigned char* shared = DynamicShared<unsigned char>();
  shared += -hopper::SharedAddress(shared) & (kAlignment - 1);
  const uint32_t full = hopper::SharedAddress(barriers), empty = full + 8 * T::kStages;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < T::kStages; stage++) {
      hopper::InitBarrier(full + stage * 8, 1);
      hopper::InitBarrier(empty + stage * 8, kConsumers);
    }
    hopper::PublishBarriers();
  }
  __syncthreads();
  GridDependencySynchronize();
  const Share share = ShareOf<T>(task);
  const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
  RingPosition<T::kStages> at;
  if (warp >= kConsumers) {
    hopper::ReduceRegisters<40>();
    if (threadIdx.x != kConsumers * 32) return;
    for (int panel = share.begin; panel < share.end; panel++, at.Advance()) {
      const uint32_t barrier = full + at.stage * 8;
      const uint32_t a = hopper::SharedAddress(shared) + at.stage * T::kStageNbytes;
      hopper::WaitForPhase(empty + at.stage * 8, at.parity ^ 1);
      hopper::ArriveExpecting(barrier, T::kStageNbytes);
      LoadOperand<T::kTileM / kBox>(task, task.pixels == Pixels::kA, a, &map_a, barrier, share.row,
                                    task.m, panel * kBox);
      LoadOperand<T::kTileN / kBox>(task, task.pixels == Pixels::kB, a + T::kPanelA, &map_b,
                                    barrier, share.col, task.n, panel * kBox);
    }
    return;
  }
  hopper::RaiseRegisters<232>();
  const int row0 = warp / T::kWarpsN * T::kWarpM, col0 = warp % T::kWarpsN * T::kWarpN;
  const Across of_a(row0), of_b(col0);
  float sums[T::kBlocksM][T::kBlocksN][4] = {};
  for (int panel = share.begin; panel < share.end; panel++, at.Advance()) {
    const unsigned char* const stage = shared + at.stage * T::kStageNbytes;
    hopper::WaitForPhase(full + at.stage * 8, at.parity);
#pragma unroll
    for (int eight = 0; eight < kBox / 8; eight++) {
      float a[T::kBlocksM][4], b[T::kBlocksN][2];
#pragma unroll
      for (int i = 0; i < T::kBlocksM; i++) {
#pragma unroll
        for (int e = 0; e < 4; e++) a[i][e] = of_a.Read(stage, i * 2 + e % 2, eight, e / 2);
      }
#pragma unroll
      for (int j = 0; j < T::kBlocksN; j++) {
#pragma unroll
        for (int e = 0; e < 2; e++) b[j][e] = of_b.Read(stage + T::kPanelA, j, eight, e);
      }
#pragma unroll
      for (int i = 0; i < T::kBlocksM; i++) {
#pragma unroll
        for (int j = 0; j < T::kBlocksN; j++) MultiplyAddTf32(a[i], b[j], sums[i][j]);
      }
    }
    __syncwarp();
    if (lane == 0) hopper::Arrive(empty + at.stage * 8);
  }
  TriggerProgrammaticLaunch();
  float* const part = task.parts + (int64_t)share.split * task.m * task.n;
#pragma unroll
  for (int i = 0; i < T::kBlocksM; i++) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = share.row + row0 + i * 16 + half * 8 + lane / 4;
#pragma unroll
      for (int j = 0; j < T::kBlocksN; j++) {
        const int col = share.col + col0 + j * 8 + lane % 4 * 2;
        if (row < task.m && col < task.n)
          *(float2*)(part + (int64_t)row * task.n + col) =
              make_float2(sums[i][j][half * 2], sums[i][j][half * 2 + 1]);
      }
    }
  }
#endif
}

template <class T>
void LaunchTile(const char* op, DLStream stream, const CUtensorMap& a, const CUtensorMap& b,
                const WgradTask& task) {
  const int64_t tiles = CeilDiv(task.m, T::kTileM) * CeilDiv(task.n, T::kTileN);
  LaunchClusters(op, WgradKernel<T>, (unsigned)(tiles * task.splits), 1, kBlockThreads,
                 (size_t)T::kSharedNbytes, true, stream, a, b, task);
}

}  // namespace

void MultiplyAcross(const char* op, DLStream stream, int tile, const CUtensorMap& a,
                    const CUtensorMap& b, const WgradTask& task) {
  const auto launch = tile == 0   ? LaunchTile<Tile<64, 64, 2, 10>>
                      : tile == 1 ? LaunchTile<Tile<64, 128, 2, 8>>
                      : tile == 2 ? LaunchTile<Tile<64, 256, 2, 5>>
                                  : LaunchTile<Tile<128, 256, 2, 4>>;
  launch(op, stream, a, b, task);
}

}  // namespace channels_last
}  // namespace cuda
}  // namespace dlsys
