// Filter gradient of 16 bits by wgmma, with a halo: M = 64 filters, N = (kernel offset, 64
// channels), K = positions in panels of rows of eight, split over blocks. A thread copies a panel
// of dy and all pixels that it meets by TMA into a ring of stages. A product's K are two rows of
// positions; its columns at another kernel offset begin some pixels further on in the same memory,
// so that images are read once for all offsets. Each warpgroup takes kernel offsets of its own.
// Positions that do not exist are zeros of dy, which make NaN of an infinite pixel beside them. Two
// blocks of a cluster add their sums before they are stored. Tensor cores limit it.
#include <algorithm>

#include "cuda/conv/channels_last/wgrad_halo.cuh"
#include "cuda/instructions/hopper.cuh"
#include "cuda/instructions/ring.cuh"
#include "cuda/instructions/tensor_map.cuh"
#include "cuda/runtime/divisor.cuh"
#include "cuda/runtime/launch.cuh"

namespace dlsys {
namespace cuda {
namespace channels_last {
namespace {

constexpr int kTile = 64;          // filters, and channels: 128 bytes
constexpr int kRow = 8;            // positions of a row of a panel
constexpr int kLines = 14;         // rows of a panel
constexpr int kPixelNbytes = 128;  // of 64 channels
constexpr int kMostShared = 226 << 10;
constexpr int kAlignment = 1024;  // of the swizzle
constexpr int kCluster = 2;

// Filters of kHeight x kWidth elements; the rows of a panel are of so many images.
template <int kHeight, int kWidth, int kImages_>
struct Halo {
  static constexpr int kImages = kImages_, kOffsets = kHeight * kWidth;
  static constexpr int kWarpgroups = kWidth > 1 ? kWidth : 2, kThreads = kWarpgroups * 128 + 32;
  static constexpr int kOfGroup = kOffsets / kWarpgroups;  // offsets of a warpgroup, down a column
  static constexpr int kBlocks = kOfGroup * kTile / 8;     // of eight columns
  static constexpr int kImageLines = kLines / kImages;
  // Of dy, and of x, whose rows are longer by the halo.
  static constexpr int kLineNbytes = kRow * kPixelNbytes, kNbytesOfDy = kLines * kLineNbytes;
  static constexpr int kPixels = kRow + kWidth - 1, kPixelLines = kImageLines + kHeight - 1;
  static constexpr int kPixelLineNbytes = kPixels * kPixelNbytes;
  static constexpr int kLoadedNbytes = kPixelLines * kPixelLineNbytes;  // of an image
  static constexpr int kImageNbytes = (kLoadedNbytes + kAlignment - 1) / kAlignment * kAlignment;
  static constexpr int kStageNbytes = kNbytesOfDy + kImages * kImageNbytes;
  static constexpr int kStages = (kMostShared - kAlignment) / kStageNbytes;
  static constexpr int kSharedNbytes = kAlignment + kStages * kStageNbytes;
  // A product sums two rows: of one image, or of two.
  static constexpr int kSteps = kLines / 2;
  static constexpr int kStep = kImages == 1 ? 2 : 1;  // lines from one product to the next
  static constexpr int kStrideOfDy = kImages == 1 ? kLineNbytes : kImageLines * kLineNbytes;
  static constexpr int kStrideOfX = kImages == 1 ? kPixelLineNbytes : kImageNbytes;

  static __device__ __forceinline__ int Offset(int group, int of_group) {
    return kWidth > 1 ? of_group * kWidth + group : group * kOfGroup + of_group;
  }
  // Bytes from an image's first pixel to that at a warpgroup's first offset.
  static __device__ __forceinline__ int ShiftOf(int group) {
    return group * (kWidth > 1 ? kPixelNbytes : kOfGroup * kPixelLineNbytes);
  }
};

struct HaloTask {
  int filters, tiles, splits, panels;
  Divisor by_tiles, by_filter_tiles, by_across, by_down;  // panels across and down an image
  int pad_h, pad_w;
  int64_t part;  // elements of one
  int pitch;     // channels
  float* parts;
};

template <class T>
__device__ __forceinline__ void Produce(const HaloTask& task, const CUtensorMap* map_x,
                                        const CUtensorMap* map_dy, int filter, int channel,
                                        int begin, int end, uint32_t memory, uint32_t full,
                                        uint32_t empty) {
  RingPosition<T::kStages> at;
  for (int panel = begin; panel < end; panel++, at.Advance()) {
    const int down = panel / task.by_across, images = down / task.by_down;
    const int w = (panel - down * (int)task.by_across.value) * kRow;
    const int h = (down - images * (int)task.by_down.value) * T::kImageLines;
    const uint32_t barrier = full + at.stage * 8, dy = memory + at.stage * T::kStageNbytes;
    hopper::WaitForPhase(empty + at.stage * 8, at.parity ^ 1);
    hopper::ArriveExpecting(barrier, T::kNbytesOfDy + T::kImages * T::kLoadedNbytes);
#pragma unroll
    for (int k = 0; k < T::kImages; k++) {
      const int n = images * T::kImages + k;
      hopper::LoadBox(dy + k * T::kImageLines * T::kLineNbytes, map_dy, barrier, filter, w, h, n);
      hopper::LoadBox(dy + T::kNbytesOfDy + k * T::kImageNbytes, map_x, barrier, channel,
                      w - task.pad_w, h - task.pad_h, n);
    }
  }
}

template <class E, class T>
__global__ void __launch_bounds__(T::kThreads, 1)
    HaloKernel(const __grid_constant__ CUtensorMap map_x,
               const __grid_constant__ CUtensorMap map_dy, const __grid_constant__ HaloTask task) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __shared__ __align__(8) uint64_t barriers[2 * T::kStages];
  unsigned char* shared = DynamicShared<unsigned char>();
  shared += -hopper::SharedAddress(shared) & (kAlignment - 1);
  const uint32_t memory = hopper::SharedAddress(shared);
  const uint32_t full = hopper::SharedAddress(barriers), empty = full + 8 * T::kStages;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < T::kStages; stage++) {
      hopper::InitBarrier(full + stage * 8, 1);
      hopper::InitBarrier(empty + stage * 8, T::kWarpgroups);
    }
    hopper::PublishBarriers();
  }
  __syncthreads();
  GridDependencySynchronize();
  // The blocks of a cluster have two splits of a tile.
  const int rank = (int)hopper::ClusterRank(), cluster = (int)blockIdx.x / kCluster;
  const int part = cluster / task.by_tiles, tile = cluster - part * task.tiles;
  const int split = part * kCluster + rank;
  const int channel_tile = tile / task.by_filter_tiles;
  const int channel = channel_tile * kTile;
  const int filter = (tile - channel_tile * (int)task.by_filter_tiles.value) * kTile;
  const int begin = (int)((int64_t)task.panels * split / task.splits);
  const int end = (int)((int64_t)task.panels * (split + 1) / task.splits);
  const int group = (int)threadIdx.x / 128, thread = (int)threadIdx.x % 128;
  if (group == T::kWarpgroups) {
    if (thread == 0)
      Produce<T>(task, &map_x, &map_dy, filter, channel, begin, end, memory, full, empty);
    __syncwarp();
    MeetCluster();
    LeaveCluster();
    return;
  }
  float d[T::kBlocks][4] = {};  // a block may have no panels
  RingPosition<T::kStages> at;
  int previous = 0;
  const auto release = [&](int stage) {
    if (thread == 0) hopper::Arrive(empty + stage * 8);
  };
  for (int panel = begin; panel < end; panel++, at.Advance()) {
    const uint32_t dy = memory + at.stage * T::kStageNbytes;
    const uint32_t x = dy + T::kNbytesOfDy + T::ShiftOf(group);
    hopper::WaitForPhase(full + at.stage * 8, at.parity);
    hopper::BeginProducts();
#pragma unroll
    for (int k = 0; k < T::kSteps; k++)
      hopper::MultiplyAdd<E, true, true>(
          d, hopper::Descriptor(dy + k * T::kStep * T::kLineNbytes, kAlignment, T::kStrideOfDy),
          hopper::Descriptor(x + k * T::kStep * T::kPixelLineNbytes, T::kPixelLineNbytes,
                             T::kStrideOfX),
          true);
    hopper::CloseProducts();
    hopper::WaitForProducts<1>();
    if (panel > begin) release(previous);
    previous = at.stage;
  }
  hopper::WaitForProducts<0>();
  TriggerProgrammaticLaunch();
  // A block adds one half of both blocks' sums; those of the other half lie in its memory.
  constexpr int kKept = T::kBlocks / kCluster, kConsumers = T::kWarpgroups * 128;
  float4* const other = (float4*)shared + threadIdx.x;  // (kKept, kConsumers)
  hopper::SyncThreads(1, kConsumers);                   // no product reads the stages any more
#pragma unroll
  for (int j = 0; j < kKept; j++) {
    float kept[4], given[4];
#pragma unroll
    for (int e = 0; e < 4; e++) {
      kept[e] = rank ? d[j + kKept][e] : d[j][e];
      given[e] = rank ? d[j][e] : d[j + kKept][e];
    }
    other[j * kConsumers] = make_float4(given[0], given[1], given[2], given[3]);
#pragma unroll
    for (int e = 0; e < 4; e++) d[j][e] = kept[e];
  }
  MeetCluster();
  const float4* const from = (const float4*)OfPeer((const float*)other, 1 - rank);
#pragma unroll
  for (int j = 0; j < kKept; j++) {
    const float4 sum = from[j * kConsumers];
    d[j][0] += sum.x, d[j][1] += sum.y, d[j][2] += sum.z, d[j][3] += sum.w;
  }
  float* const parts = task.parts + part * task.part + channel + thread % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int row = filter + thread / 32 * 16 + thread % 32 / 4 + half * 8;
    if (row >= task.filters) continue;
#pragma unroll
    for (int j = 0; j < kKept; j++) {
      const int block = rank * kKept + j, offset = T::Offset(group, block / (kTile / 8));
      float* const to =
          parts + ((int64_t)row * T::kOffsets + offset) * task.pitch + block % (kTile / 8) * 8;
      *(float2*)to = make_float2(d[j][half * 2], d[j][half * 2 + 1]);
    }
  }
  LeaveCluster();
#endif
}

// Calls f(halo) with the kernel of a convolution.
template <class F>
void WithHalo(const Conv& c, bool two_images, F&& f) {
  if (c.kernel.w == 1) return f(Halo<4, 1, 1>());
  two_images ? f(Halo<3, 3, 2>()) : f(Halo<3, 3, 1>());
}

int64_t Panels(const Conv& c, int64_t images) {
  return CeilDiv(c.n, images) * CeilDiv(c.out.h, kLines / images) * CeilDiv(c.out.w, kRow);
}
int64_t Tiles(const Conv& c) { return CeilDiv(c.o, kTile) * CeilDiv(c.c, kTile); }

}  // namespace

std::optional<HaloConfig> HaloConfigOf(const Conv& c, int multiprocessors) {
  // Microseconds on an H200: of a panel, by the columns of a tile; of a block; of parts.
  constexpr double kPanelUs = 1.35, kColumns = 9 * kTile, kBlockUs = 5, kAddUs = 3;
  constexpr double kNbytesUs = 4e6;
  constexpr int64_t kLeastPanels = 4;  // of a split
  const bool square = c.kernel == HW{3, 3}, column = c.kernel == HW{4, 1};
  if ((!square && !column) || Size(c.stride) > 1 || Size(c.dilation) > 1) return std::nullopt;
  const bool two_images = square && Panels(c, 2) < Panels(c, 1);
  const int64_t panels = Panels(c, two_images ? 2 : 1), clusters = multiprocessors / kCluster;
  const double panel_us = kPanelUs * (double)(Size(c.kernel) * kTile) / kColumns;
  const double part_us = 8. * (double)(c.o * Size(c.kernel) * c.c) / kNbytesUs;
  HaloConfig best{two_images, panels, kCluster, 1, 1e30};
  const int64_t most = std::max<int64_t>(
      1, std::min(panels / (kCluster * kLeastPanels), CeilDiv(2 * clusters, Tiles(c))));
  for (int64_t parts = 1; parts <= most; parts++) {
    const double waves = (double)CeilDiv(Tiles(c) * parts, clusters);
    const double of_block = (double)CeilDiv(panels, parts * kCluster) * panel_us + kBlockUs;
    const double us = waves * of_block + kAddUs + (double)parts * part_us;
    if (us < best.us) best.splits = parts * kCluster, best.parts = parts, best.us = us;
  }
  return best;
}

template <class E>
void HaloGradient(const Call& at, const Conv& c, const HaloConfig& config, const E* x,
                  const std::array<int64_t, 3>& strides, const E* dy, float* parts) {
  WithHalo(c, config.two_images, [&](auto halo) {
    using T = decltype(halo);
    HaloTask task{};
    task.filters = (int)c.o, task.tiles = (int)Tiles(c);
    task.splits = (int)config.splits, task.panels = (int)config.panels;
    task.by_tiles = Divisor(task.tiles), task.by_filter_tiles = Divisor(CeilDiv(c.o, kTile));
    task.by_across = Divisor(CeilDiv(c.out.w, kRow));
    task.by_down = Divisor(CeilDiv(c.out.h, T::kImageLines));
    task.pad_h = (int)c.pad.h, task.pad_w = (int)c.pad.w;
    task.pitch = (int)RoundUp(c.c, kTile), task.part = c.o * T::kOffsets * task.pitch;
    task.parts = parts;
    const CUtensorMap map_x = ArrayMap<4>(at.op, kDtype<E>, x, {c.c, c.in.w, c.in.h, c.n}, strides,
                                          {kTile, T::kPixels, T::kPixelLines, 1});
    const CUtensorMap map_dy =
        ArrayMap<4>(at.op, kDtype<E>, dy, {c.o, c.out.w, c.out.h, c.n},
                    {c.o, c.out.w * c.o, Size(c.out) * c.o}, {kTile, kRow, T::kImageLines, 1});
    LaunchClusters(at.op, HaloKernel<E, T>, (unsigned)(task.tiles * task.splits), kCluster,
                   T::kThreads, (size_t)T::kSharedNbytes, true, at.stream, map_x, map_dy, task);
  });
}
template void HaloGradient(const Call&, const Conv&, const HaloConfig&, const bfloat16*,
                           const std::array<int64_t, 3>&, const bfloat16*, float*);
template void HaloGradient(const Call&, const Conv&, const HaloConfig&, const float16*,
                           const std::array<int64_t, 3>&, const float16*, float*);

}  // namespace channels_last
}  // namespace cuda
}  // namespace dlsys
