// Forward convolution and data gradient as implicit GEMM on tensor cores: mma.sync m16n8k8 with
// tf32 operands and float32 accumulation; and the table entry of all tf32 convolutions. conv.cuh
// has the contract, tf32.cuh the input layout, tf32_wgrad.cu the filter gradient.
//
// M = filters, N = output positions, K = (channel, kernel offset), in stages: the input runs of
// some channels are copied to shared memory once (cp.async, double-buffered), and every kernel
// offset reads them shifted. Filters are first packed, rounded to tf32 and in fragment order, into
// a workspace by a kernel of their own. Limited by shared-memory reads of the input and, with few
// output channels, by copies.
#include "cuda/conv/rungs/tf32.cuh"

namespace dlsys {
namespace cuda {
namespace {

// The order of K: stages of `steps` times eight, the K of one mma. Channels vary fastest, or, with
// fewer than eight of them, kernel offsets; then there is one stage.
struct KOrder {
  int channels, kernel_size;
  int stage_channels, stage_offsets, offset_stages, stages, steps;
  bool offset_major;

  struct Term {
    int channel, kernel_offset;  // relative to the stage
  };
  __host__ __device__ Term At(int k) const {
    if (offset_major) return {min(k / kernel_size, channels), k % kernel_size};
    const int step = k / 8, chunks = stage_channels / 8;
    return {step % chunks * 8 + k % 8, step / chunks};
  }
  // Steps of a stage without padding.
  __device__ int Steps(int stage) const {
    if (offset_major) return steps;
    return min(stage_offsets, kernel_size - stage % offset_stages * stage_offsets) *
           (stage_channels / 8);
  }
  // Channels in shared memory; with few channels a further one of zeros pads the last step.
  __host__ __device__ int SharedChannels() const {
    return offset_major ? channels + 1 : stage_channels;
  }
};

KOrder KOrderOf(int channels, int kernel_size) {
  constexpr int kMaxOffsets = 9, kLeastSteps = 4;
  KOrder o{
      channels,    kernel_size, channels, kernel_size, 1, 1, CeilDiv32(channels * kernel_size, 8),
      channels < 8};
  if (o.offset_major) return o;
  o.offset_stages = CeilDiv32(kernel_size, kMaxOffsets);
  o.stage_offsets = CeilDiv32(kernel_size, o.offset_stages);
  const int chunks = std::min(CeilDiv32(channels, 8), std::max(kLeastSteps / o.stage_offsets, 1));
  o.stage_channels = 8 * chunks;
  o.steps = o.stage_offsets * chunks;
  o.stages = CeilDiv32(channels, o.stage_channels) * o.offset_stages;
  return o;
}

struct CorrelateTask {
  Correlation c;
  Strip strip;
  KOrder order;
  const float* packed;  // (groups, m_tiles, stages, steps, rows of a tile / 16, lanes, 4)
  int m_tiles, n_tiles, n, span, pitch, stage_numel;

  // Bytes of the tables in front of the stages.
  __host__ __device__ int TableNbytes() const {
    return (int)sizeof(int) * (pitch + order.offset_stages * order.steps * 8);
  }
};

constexpr int kStages = 2;  // double buffer: one stage is copied while one is multiplied

// kTileM x kTileN by warps that hold MmaM x MmaN fragments of 16 x 8.
template <int MmaM, int MmaN, int WarpsM, int WarpsN, int Resident>
struct Tiling {
  static constexpr int kMmaM = MmaM, kMmaN = MmaN, kWarpsN = WarpsN;
  static constexpr int kTileM = 16 * MmaM * WarpsM, kTileN = 8 * MmaN * WarpsN;
  static constexpr int kThreads = 32 * WarpsM * WarpsN;
  static constexpr int kResident = Resident;
  static constexpr int kPitch = kTileN + 8;  // of the tile in shared memory
};

// ---- kernels ----

template <class T>
__global__ void PackKernel(const CorrelateTask task, float* packed, int quads) {
  const Correlation& c = task.c;
  const KOrder& order = task.order;
  const int kernel_w = (int)c.w.kernel_size;
  for (int q = (int)FirstItem(); q < quads; q += (int)ItemStep()) {
    const int lane = q % 32, mma_row = q / 32 % (T::kTileM / 16);
    int rest = q / 32 / (T::kTileM / 16);
    const int step = rest % order.steps;
    rest /= order.steps;
    const int stage = rest % order.stages;
    rest /= order.stages;
    const int first_row = rest % task.m_tiles * T::kTileM + mma_row * 16 + lane / 4;
    const float* filter = c.filter + rest / task.m_tiles * c.filter_group;
    float values[4];
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const int row = first_row + e % 2 * 8;
      const KOrder::Term term = order.At(step * 8 + lane % 4 + e / 2 * 4);
      const int channel = stage / order.offset_stages * order.stage_channels + term.channel;
      const int kernel_offset =
          stage % order.offset_stages * order.stage_offsets + term.kernel_offset;
      const int64_t h = c.h.kernel_from + kernel_offset / kernel_w * c.h.kernel_by;
      const int64_t w = c.w.kernel_from + kernel_offset % kernel_w * c.w.kernel_by;
      const bool valid =
          row < c.out_channels && channel < order.channels && kernel_offset < order.kernel_size;
      values[e] = valid ? RoundedToTf32(filter[row * c.filter_row + channel * c.filter_channel +
                                               h * c.filter_width + w])
                        : 0.f;
    }
    ((float4*)packed)[q] = make_float4(values[0], values[1], values[2], values[3]);
  }
}

// The tile of a block.
struct TileCoord {
  int m_tile, group, first_col;
};

template <class T>
__device__ __forceinline__ TileCoord TileCoordOf(const CorrelateTask& task) {
  const int rest = (int)blockIdx.x / task.m_tiles;
  return {(int)blockIdx.x % task.m_tiles, rest / task.n_tiles, rest % task.n_tiles * T::kTileN};
}

// Strip offsets of every k of a step, paired as a lane of mma.sync reads them.
template <class T>
__device__ __forceinline__ void FillOffsets(const CorrelateTask& task, int* offsets) {
  const KOrder& order = task.order;
  for (int k = threadIdx.x; k < order.offset_stages * order.steps * 8; k += T::kThreads) {
    const KOrder::Term term = order.At(k % (order.steps * 8));
    const int kernel_offset = min(k / (order.steps * 8) * order.stage_offsets + term.kernel_offset,
                                  order.kernel_size - 1);
    const int lane = k % 4, half = k / 4 % 2;
    offsets[k / 8 * 8 + lane * 2 + half] =
        term.channel * task.pitch + task.strip.Shift(kernel_offset);
  }
}

template <class T>
using Sums = float[T::kMmaM][T::kMmaN][4];

// Multiplies one stage; `cols` are the strip offsets of the lane's output positions.
template <class T>
__device__ __forceinline__ void MultiplyStage(const float* filters, const float* input,
                                              const int2* offsets, int steps,
                                              const int (&cols)[T::kMmaN], Sums<T>& sums) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 / T::kWarpsN * T::kMmaM;
  filters += row * 128 + lane * 4;
  offsets += lane % 4;
  for (int step = 0; step < steps; step++) {
    const float *first = input + offsets->x, *second = input + offsets->y;
    float a[T::kMmaM][4], b[T::kMmaN][2];
#pragma unroll
    for (int i = 0; i < T::kMmaM; i++) *(float4*)a[i] = *(const float4*)(filters + i * 128);
#pragma unroll
    for (int j = 0; j < T::kMmaN; j++) {
      b[j][0] = RoundedToTf32(first[cols[j]]);
      b[j][1] = RoundedToTf32(second[cols[j]]);
    }
    filters += T::kTileM / 16 * 128;
    offsets += 4;
#pragma unroll
    for (int j = 0; j < T::kMmaN; j++)
#pragma unroll
      for (int i = 0; i < T::kMmaM; i++) MultiplyAddTf32(a[i], b[j], sums[i][j]);
  }
}

template <class T>
__device__ __forceinline__ void StoreSums(const Sums<T>& sums, float* tile) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row = warp / T::kWarpsN * T::kMmaM * 16 + lane / 4;
  const int col = warp % T::kWarpsN * T::kMmaN * 8 + lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < T::kMmaM; i++)
#pragma unroll
    for (int j = 0; j < T::kMmaN; j++) {
      float* to = tile + (row + 16 * i) * T::kPitch + col + 8 * j;
      *(float2*)to = make_float2(sums[i][j][0], sums[i][j][1]);
      *(float2*)(to + 8 * T::kPitch) = make_float2(sums[i][j][2], sums[i][j][3]);
    }
}

// Writes the tile along output positions, which are contiguous.
template <class T>
__device__ __forceinline__ void WriteTile(const CorrelateTask& task, const TileCoord& coord,
                                          const float* tile) {
  constexpr int kWidth = T::kTileN < T::kThreads ? T::kTileN : T::kThreads;
  constexpr int kHeight = T::kThreads / kWidth;
  const Correlation& c = task.c;
  const Strip& strip = task.strip;
  const int first_row = coord.m_tile * T::kTileM;
  const int64_t out_size = c.out_hw.h * c.out_hw.w;
  if ((int)threadIdx.x >= kWidth * kHeight) return;
  for (int col = threadIdx.x % kWidth; col < T::kTileN; col += kWidth) {
    const int at = coord.first_col + col;
    if (at >= task.n) break;
    const int row_of_all = at / strip.by_row, image = at / strip.by_positions;
    const int64_t i = row_of_all - image * strip.count_h, j = at - row_of_all * strip.count_w;
    float* to = c.out + (image * c.groups + coord.group) * c.out_channels * out_size +
                (c.h.out_from + i * c.h.out_by) * c.out_hw.w + c.w.out_from + j * c.w.out_by;
#pragma unroll 8
    for (int r = threadIdx.x / kWidth; r < T::kTileM; r += kHeight) {
      const int row = first_row + r;
      if (row >= c.out_channels) break;
      const float bias = c.bias ? c.bias[coord.group * c.out_channels + row] : 0.f;
      to[row * out_size] = tile[r * T::kPitch + col] + bias;
    }
  }
}

template <class T>
__global__ __launch_bounds__(T::kThreads,
                             T::kResident) void CorrelateKernel(const CorrelateTask task) {
  float* const memory = DynamicShared<float>();
  const Correlation& c = task.c;
  const KOrder& order = task.order;
  const TileCoord coord = TileCoordOf<T>(task);
  const int in_size = (int)(c.in.h * c.in.w);
  const int image_pitch = (int)(c.groups * c.in_channels) * in_size;
  const int image = coord.first_col / task.strip.Positions();
  const int first = coord.first_col % task.strip.Positions(), origin = task.strip.At(first);
  int* sources = (int*)memory;
  int* offsets = sources + task.pitch;
  float* stages = memory + task.TableNbytes() / sizeof(float);
  for (int v = threadIdx.x; v < task.span; v += T::kThreads)
    sources[v] = task.strip.Source(origin + v, (int)c.images - image, image_pitch);
  FillOffsets<T>(task, offsets);
  __syncthreads();

  const int filters = T::kTileM / 16 * order.steps * 128;  // packed filter elements per stage
  const float* packed =
      task.packed + ((int64_t)coord.group * task.m_tiles + coord.m_tile) * order.stages * filters;
  const float* input = c.x + ((int64_t)image * c.groups + coord.group) * c.in_channels * in_size;
  auto copy = [&](int stage) {
    if (stage < order.stages) {
      float* to = stages + stage % kStages * task.stage_numel;
      const float* from = packed + (int64_t)stage * filters;
      for (int q = 4 * threadIdx.x; q < filters; q += 4 * T::kThreads)
        CopyQuad(to + q, from + q, 4, true);
      const int channel = stage / order.offset_stages * order.stage_channels;
      CopyChannels<T::kThreads>(to + filters, task.pitch, order.SharedChannels(),
                                order.channels - channel, sources, task.span,
                                input + (int64_t)channel * in_size, in_size);
    }
    CloseCopies();
  };

  const int lane = threadIdx.x % 32;
  const int col = threadIdx.x / 32 % T::kWarpsN * T::kMmaN * 8 + lane / 4;
  int cols[T::kMmaN];
#pragma unroll
  for (int j = 0; j < T::kMmaN; j++) cols[j] = task.strip.At(first + col + 8 * j) - origin;
  float sums[T::kMmaM][T::kMmaN][4] = {};
  for (int stage = 0; stage < kStages - 1; stage++) copy(stage);
  for (int stage = 0; stage < order.stages; stage++) {
    WaitForCopies<kStages - 2>();
    __syncthreads();
    copy(stage + kStages - 1);
    const float* from = stages + stage % kStages * task.stage_numel;
    MultiplyStage<T>(from, from + filters,
                     (const int2*)offsets + stage % order.offset_stages * order.steps * 4,
                     order.Steps(stage), cols, sums);
  }
  WaitForCopies<0>();
  __syncthreads();
  StoreSums<T>(sums, stages);
  __syncthreads();
  WriteTile<T>(task, coord, stages);
}

// ---- launchers ----

// `speed` is a warp's mma rate on an H200, relative to the fastest.
struct TileShape {
  int m, n;
  double speed;
  bool (*launch)(const ConvCall&, CorrelateTask&);
};

// Pitch of a channel in shared memory: four channels by eight positions fall in 32 banks.
int PitchOf(int64_t span) { return (int)((span + 23) / 32 * 32 + 8); }

template <class T>
bool LaunchTiling(const ConvCall& at, CorrelateTask& task) {
  const KOrder& order = task.order;
  task.m_tiles = (int)CeilDiv(task.c.out_channels, T::kTileM);
  task.n_tiles = (int)CeilDiv(task.n, T::kTileN);
  const int64_t span = Span(task.strip, task.c.h.kernel_size, T::kTileN);
  const int64_t filters = T::kTileM / 16 * order.steps * 128;
  const int64_t stage = filters + order.SharedChannels() * (span + 32);
  const int buffers = std::min(kStages, order.stages);
  const int64_t max_nbytes = (int64_t)SharedLimit(at.ctx.device_id);
  if (4 * (buffers * stage + span) > max_nbytes) return false;
  task.span = (int)span;
  task.pitch = PitchOf(span);
  task.stage_numel = (int)filters + order.SharedChannels() * task.pitch;
  const int64_t body = std::max<int64_t>(buffers * task.stage_numel, T::kTileM * T::kPitch);
  const int64_t nbytes = task.TableNbytes() + 4 * body;
  const int64_t blocks = (int64_t)task.m_tiles * task.n_tiles * task.c.groups;
  const int64_t numel = task.c.groups * task.m_tiles * order.stages * filters;
  if (nbytes > max_nbytes || blocks > INT32_MAX || numel > INT32_MAX) return false;
  const Scratch packed(at.ctx, numel * (int64_t)sizeof(float), at.stream);
  Launch(at.op, PackKernel<T>, Blocks(numel / 4), kThreads, 0, at.stream, task, packed.floats(),
         (int)(numel / 4));
  task.packed = packed.floats();
  LaunchTask(at, CorrelateKernel<T>, blocks, T::kThreads, nbytes, task);
  return true;
}

template <class T>
constexpr TileShape ShapeOf(double speed) {
  return {T::kTileM, T::kTileN, speed, LaunchTiling<T>};
}
constexpr TileShape kShapes[] = {
    ShapeOf<Tiling<4, 4, 1, 8, 2>>(1.0),  ShapeOf<Tiling<4, 4, 1, 6, 2>>(0.97),
    ShapeOf<Tiling<4, 4, 1, 4, 4>>(0.93), ShapeOf<Tiling<2, 8, 1, 4, 4>>(0.82),
    ShapeOf<Tiling<2, 4, 1, 4, 4>>(0.75),
};

// The heuristic: the fastest shape of those not yet tried; -1 when all were.
int BestShape(const CorrelateTask& task, int multiprocessors, unsigned tried) {
  int best = -1;
  double least = 0;
  for (int k = 0; k < (int)(sizeof kShapes / sizeof *kShapes); k++) {
    const TileShape& s = kShapes[k];
    const int64_t blocks = CeilDiv(task.c.out_channels, s.m) * CeilDiv(task.n, s.n) * task.c.groups;
    const double time = CeilDiv(blocks, multiprocessors) * (s.m * s.n / s.speed);
    if (tried >> k & 1 || (best >= 0 && time >= least)) continue;
    least = time;
    best = k;
  }
  return best;
}

// Index arithmetic in int must reach a tile behind the last position.
bool FitsIndices(const Correlation& c, const Strip& strip) {
  constexpr int64_t kMost = int64_t(1) << 30, kTile = 512;
  const int64_t positions = c.Positions(), images = kTile / positions + 2;
  return c.images * positions < kMost && images * strip.height * (int64_t)strip.width < kMost &&
         images * c.groups * c.in_channels * Size(c.in) < kMost;
}

}  // namespace

std::vector<std::string> CorrelateTilesTf32() {
  std::vector<std::string> names;
  for (const TileShape& shape : kShapes) names.push_back(TileName(shape.m, shape.n));
  return names;
}

bool CorrelateTf32(const ConvCall& at, const Correlation& c) {
  constexpr int64_t kMaxK = 1 << 24;  // leaves room for index arithmetic in int
  if (c.Positions() == 0) return true;
  if (c.K() < 1 || c.K() > kMaxK) return false;
  CorrelateTask task{};
  task.c = c;
  task.strip = StripOf(c.h, c.w, c.in);
  if (!FitsIndices(c, task.strip)) return false;
  task.order = KOrderOf((int)c.in_channels, (int)c.KernelSize());
  task.n = (int)(c.images * c.Positions());
  if (at.variant != kHeuristic) return kShapes[at.variant].launch(at, task);
  const int multiprocessors = Multiprocessors(at.ctx.device_id);
  unsigned tried = 0;  // shapes that exceed shared memory
  for (int k; (k = BestShape(task, multiprocessors, tried)) >= 0; tried |= 1u << k)
    if (kShapes[k].launch(at, task)) return true;
  return false;
}

namespace {

constexpr const char* kName = "implicit mma";

const char* Refusal(const ConvCall& at, const Conv& conv) {
  if (at.precision != Precision::kTf32) return "it is for tf32";
  if (ComputeMajor(at.ctx.device_id) < 8) return "the GPU has no tf32";
  return conv.Depthwise() ? "it is for more than one channel a group" : nullptr;
}

std::vector<std::string> Variants(Pass pass) {
  return pass == Pass::kFilterGradient ? FilterTilesTf32() : CorrelateTilesTf32();
}

// The heuristic falls back to the float32 kernels.
const ConvAlgorithm& Fallback(const ConvCall& at) {
  if (at.variant != kHeuristic) NotApplicable(at.op, kName);
  return kImplicitGemm;
}

void Tf32Forward(const ConvCall& at, const Conv& conv, const float* x, const float* f,
                 const float* bias, float* y) {
  if (!CorrelateTf32(at, Forward(conv, x, f, bias, y)))
    Fallback(at).forward(at, conv, x, f, bias, y);
}

void Tf32DataGradient(const ConvCall& at, const Conv& conv, const float* f, const float* dy,
                      float* dx) {
  for (int64_t phase = 0; phase < conv.stride.h * conv.stride.w; phase++)
    if (!CorrelateTf32(at, DataGradient(conv, f, dy, dx, phase)))
      return Fallback(at).data_gradient(at, conv, f, dy, dx);
}

void Tf32FilterGradient(const ConvCall& at, const Conv& conv, const float* x, const float* dy,
                        float* df) {
  if (!FilterGradientTf32(at, conv, x, dy, df)) Fallback(at).filter_gradient(at, conv, x, dy, df);
}

}  // namespace

const ConvAlgorithm kTensorCores = {kName,       Variants,         nullptr,           Refusal,
                                    Tf32Forward, Tf32DataGradient, Tf32FilterGradient};

}  // namespace cuda
}  // namespace dlsys
