// The convolution and its gradient for the data on tensor cores: factors of 10 bits of mantissa,
// sums in float32. conv.cuh has the contract, conv_tf32.cuh the planes in shared memory.
//
// It is the matrix product of filters (rows; channels and taps) with what the taps see (channels
// and taps; places). A block multiplies a tile of rows and neighbouring places in stages: some
// channels' runs of the planes come to shared memory once, and each tap reads them shifted. The
// filters come from scratch, where a first kernel has put them, rounded, in the order in which
// lanes want them.
#include "cuda/conv/tf32.cuh"

namespace dlsys {
namespace cuda {
namespace {

// In which order the product runs through channels and taps: stages of `steps` times eight.
// Channels are fastest, or, where there are fewer than eight, taps; then all is one stage.
struct Order {
  int channels, taps;
  int stage_channels, stage_taps, tap_stages, stages, steps;
  bool taps_fastest;

  struct Term {
    int channel, tap;  // of those of the stage
  };
  __host__ __device__ Term At(int k) const {
    if (taps_fastest) return {min(k / taps, channels), k % taps};
    const int step = k / 8, chunks = stage_channels / 8;
    return {step % chunks * 8 + k % 8, step / chunks};
  }
  // The steps of a stage that are more than padding.
  __device__ int Steps(int stage) const {
    if (taps_fastest) return steps;
    return min(stage_taps, taps - stage % tap_stages * stage_taps) * (stage_channels / 8);
  }
  // Channels in shared memory; past the last is one of zeros, for what pads the last step.
  __host__ __device__ int Planes() const { return taps_fastest ? channels + 1 : stage_channels; }
};

Order OrderOf(int channels, int taps) {
  constexpr int kMostTaps = 9, kLeastSteps = 4;
  Order o{channels, taps, channels, taps, 1, 1, (channels * taps + 7) / 8, channels < 8};
  if (o.taps_fastest) return o;
  o.tap_stages = (taps + kMostTaps - 1) / kMostTaps;
  o.stage_taps = (taps + o.tap_stages - 1) / o.tap_stages;
  const int chunks = std::min((channels + 7) / 8, std::max(kLeastSteps / o.stage_taps, 1));
  o.stage_channels = 8 * chunks;
  o.steps = o.stage_taps * chunks;
  o.stages = (channels + o.stage_channels - 1) / o.stage_channels * o.tap_stages;
  return o;
}

struct CorrelateTask {
  Correlation c;
  Strip strip;
  Order order;
  const float* packed;  // (groups, row_tiles, stages, steps, rows of a tile / 16, lanes, 4)
  int row_tiles, col_tiles, cols, span, pitch, stage_numel;

  // Bytes of the tables before the stages.
  __host__ __device__ int TableNbytes() const {
    return (int)sizeof(int) * (pitch + order.tap_stages * order.steps * 8);
  }
};

constexpr int kStages = 2;  // of the product in shared memory: one is copied as one is multiplied

// Rows x Cols of the result by warps that hold Down x Across times 16 x 8 of it.
template <int Down, int Across, int WarpsDown, int WarpsAcross, int Resident>
struct Tiling {
  static constexpr int kDown = Down, kAcross = Across, kWarpsAcross = WarpsAcross;
  static constexpr int kRows = 16 * Down * WarpsDown, kCols = 8 * Across * WarpsAcross;
  static constexpr int kThreads = 32 * WarpsDown * WarpsAcross;
  static constexpr int kResident = Resident;
  static constexpr int kPitch = kCols + 8;  // of the tile in shared memory
};

// ---- kernels ----

template <class T>
__global__ void PackKernel(const CorrelateTask task, float* packed, int quads) {
  const Correlation& c = task.c;
  const Order& order = task.order;
  const int across = (int)c.across.taps;
  for (int q = (int)FirstItem(); q < quads; q += (int)ItemStep()) {
    const int lane = q % 32, down = q / 32 % (T::kRows / 16);
    int rest = q / 32 / (T::kRows / 16);
    const int step = rest % order.steps;
    rest /= order.steps;
    const int stage = rest % order.stages;
    rest /= order.stages;
    const int first_row = rest % task.row_tiles * T::kRows + down * 16 + lane / 4;
    const float* filter = c.filter + rest / task.row_tiles * c.filter_group;
    float values[4];
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const int row = first_row + e % 2 * 8;
      const Order::Term term = order.At(step * 8 + lane % 4 + e / 2 * 4);
      const int channel = stage / order.tap_stages * order.stage_channels + term.channel;
      const int tap = stage % order.tap_stages * order.stage_taps + term.tap;
      const int64_t h = c.down.tap_from + tap / across * c.down.tap_by;
      const int64_t w = c.across.tap_from + tap % across * c.across.tap_by;
      const bool valid = row < c.rows && channel < order.channels && tap < order.taps;
      values[e] = valid ? RoundedToTf32(filter[row * c.filter_row + channel * c.filter_channel +
                                               h * c.filter_width + w])
                        : 0.f;
    }
    ((float4*)packed)[q] = make_float4(values[0], values[1], values[2], values[3]);
  }
}

// What a block computes.
struct Share {
  int row_tile, group, first_col;
};

template <class T>
__device__ __forceinline__ Share ShareOf(const CorrelateTask& task) {
  const int rest = (int)blockIdx.x / task.row_tiles;
  return {(int)blockIdx.x % task.row_tiles, rest / task.col_tiles,
          rest % task.col_tiles * T::kCols};
}

// Where a step's depths begin in a stage's planes, shifted by their taps; for each lane a pair.
template <class T>
__device__ __forceinline__ void FillOffsets(const CorrelateTask& task, int* offsets) {
  const Order& order = task.order;
  for (int k = threadIdx.x; k < order.tap_stages * order.steps * 8; k += T::kThreads) {
    const Order::Term term = order.At(k % (order.steps * 8));
    const int tap = min(k / (order.steps * 8) * order.stage_taps + term.tap, order.taps - 1);
    const int lane = k % 4, half = k / 4 % 2;
    offsets[k / 8 * 8 + lane * 2 + half] = term.channel * task.pitch + task.strip.Shift(tap);
  }
}

template <class T>
using Sums = float[T::kDown][T::kAcross][4];

// Adds the product of a stage; cols are where the lane's places lie in the planes.
template <class T>
__device__ __forceinline__ void MultiplyStage(const float* filters, const float* planes,
                                              const int2* offsets, int steps,
                                              const int (&cols)[T::kAcross], Sums<T>& sums) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 / T::kWarpsAcross * T::kDown;
  filters += row * 128 + lane * 4;
  offsets += lane % 4;
  for (int step = 0; step < steps; step++) {
    const float *first = planes + offsets->x, *second = planes + offsets->y;
    float a[T::kDown][4], b[T::kAcross][2];
#pragma unroll
    for (int i = 0; i < T::kDown; i++) *(float4*)a[i] = *(const float4*)(filters + i * 128);
#pragma unroll
    for (int j = 0; j < T::kAcross; j++) {
      b[j][0] = RoundedToTf32(first[cols[j]]);
      b[j][1] = RoundedToTf32(second[cols[j]]);
    }
    filters += T::kRows / 16 * 128;
    offsets += 4;
#pragma unroll
    for (int j = 0; j < T::kAcross; j++)
#pragma unroll
      for (int i = 0; i < T::kDown; i++) MultiplyAddTf32(a[i], b[j], sums[i][j]);
  }
}

template <class T>
__device__ __forceinline__ void StoreSums(const Sums<T>& sums, float* tile) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row = warp / T::kWarpsAcross * T::kDown * 16 + lane / 4;
  const int col = warp % T::kWarpsAcross * T::kAcross * 8 + lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < T::kDown; i++)
#pragma unroll
    for (int j = 0; j < T::kAcross; j++) {
      float* to = tile + (row + 16 * i) * T::kPitch + col + 8 * j;
      *(float2*)to = make_float2(sums[i][j][0], sums[i][j][1]);
      *(float2*)(to + 8 * T::kPitch) = make_float2(sums[i][j][2], sums[i][j][3]);
    }
}

// Writes the tile by places, which are neighbours in memory.
template <class T>
__device__ __forceinline__ void WriteTile(const CorrelateTask& task, const Share& share,
                                          const float* tile) {
  constexpr int kWidth = T::kCols < T::kThreads ? T::kCols : T::kThreads;
  constexpr int kHeight = T::kThreads / kWidth;
  const Correlation& c = task.c;
  const Strip& strip = task.strip;
  const int first_row = share.row_tile * T::kRows;
  const int64_t plane = c.out_plane.h * c.out_plane.w;
  if ((int)threadIdx.x >= kWidth * kHeight) return;
  for (int col = threadIdx.x % kWidth; col < T::kCols; col += kWidth) {
    const int at = share.first_col + col;
    if (at >= task.cols) break;
    const int line = at / strip.by_row, image = at / strip.by_places;
    const int64_t i = line - image * strip.count_h, j = at - line * strip.count_w;
    float* to = c.out + (image * c.groups + share.group) * c.rows * plane +
                (c.down.out_from + i * c.down.out_by) * c.out_plane.w + c.across.out_from +
                j * c.across.out_by;
#pragma unroll 8
    for (int r = threadIdx.x / kWidth; r < T::kRows; r += kHeight) {
      const int row = first_row + r;
      if (row >= c.rows) break;
      const float bias = c.bias ? c.bias[share.group * c.rows + row] : 0.f;
      to[row * plane] = tile[r * T::kPitch + col] + bias;
    }
  }
}

template <class T>
__global__ __launch_bounds__(T::kThreads,
                             T::kResident) void CorrelateKernel(const CorrelateTask task) {
  float* const memory = DynamicShared<float>();
  const Correlation& c = task.c;
  const Order& order = task.order;
  const Share share = ShareOf<T>(task);
  const int plane = (int)(c.plane.h * c.plane.w);
  const int image_pitch = (int)(c.groups * c.channels) * plane;
  const int image = share.first_col / task.strip.Places();
  const int first = share.first_col % task.strip.Places(), origin = task.strip.At(first);
  int* sources = (int*)memory;
  int* offsets = sources + task.pitch;
  float* stages = memory + task.TableNbytes() / sizeof(float);
  for (int v = threadIdx.x; v < task.span; v += T::kThreads)
    sources[v] = task.strip.Source(origin + v, (int)c.images - image, image_pitch);
  FillOffsets<T>(task, offsets);
  __syncthreads();

  const int filters = T::kRows / 16 * order.steps * 128;  // elements of a stage
  const float* packed = task.packed + ((int64_t)share.group * task.row_tiles + share.row_tile) *
                                          order.stages * filters;
  const float* planes = c.x + ((int64_t)image * c.groups + share.group) * c.channels * plane;
  auto copy = [&](int stage) {
    if (stage < order.stages) {
      float* to = stages + stage % kStages * task.stage_numel;
      const float* from = packed + (int64_t)stage * filters;
      for (int q = 4 * threadIdx.x; q < filters; q += 4 * T::kThreads)
        CopyQuad(to + q, from + q, 4, true);
      const int channel = stage / order.tap_stages * order.stage_channels;
      CopyPlanes<T::kThreads>(to + filters, task.pitch, order.Planes(), order.channels - channel,
                              sources, task.span, planes + (int64_t)channel * plane, plane);
    }
    CloseCopies();
  };

  const int lane = threadIdx.x % 32;
  const int col = threadIdx.x / 32 % T::kWarpsAcross * T::kAcross * 8 + lane / 4;
  int cols[T::kAcross];
#pragma unroll
  for (int j = 0; j < T::kAcross; j++) cols[j] = task.strip.At(first + col + 8 * j) - origin;
  float sums[T::kDown][T::kAcross][4] = {};
  for (int stage = 0; stage < kStages - 1; stage++) copy(stage);
  for (int stage = 0; stage < order.stages; stage++) {
    WaitForCopies<kStages - 2>();
    __syncthreads();
    copy(stage + kStages - 1);
    const float* from = stages + stage % kStages * task.stage_numel;
    MultiplyStage<T>(from, from + filters,
                     (const int2*)offsets + stage % order.tap_stages * order.steps * 4,
                     order.Steps(stage), cols, sums);
  }
  WaitForCopies<0>();
  __syncthreads();
  StoreSums<T>(sums, stages);
  __syncthreads();
  WriteTile<T>(task, share, stages);
}

// ---- launchers ----

// Speed: of a warp's products on an H200, relative to the fastest.
struct TileShape {
  int rows, cols;
  double speed;
  bool (*launch)(const Place&, CorrelateTask&);
};

// A row of the strip as it lies in shared memory: four channels by eight places on 32 banks.
int PitchOf(int64_t span) { return (int)((span + 23) / 32 * 32 + 8); }

template <class T>
bool LaunchTiling(const Place& at, CorrelateTask& task) {
  const Order& order = task.order;
  task.row_tiles = (int)CeilDiv(task.c.rows, T::kRows);
  task.col_tiles = (int)CeilDiv(task.cols, T::kCols);
  const int64_t span = Span(task.strip, task.c.down.taps, T::kCols);
  const int64_t filters = T::kRows / 16 * order.steps * 128;
  const int64_t stage = filters + order.Planes() * (span + 32);
  const int buffers = std::min(kStages, order.stages);
  const int64_t most = (int64_t)SharedLimit(at.ctx.device_id);
  if (4 * (buffers * stage + span) > most) return false;
  task.span = (int)span;
  task.pitch = PitchOf(span);
  task.stage_numel = (int)filters + order.Planes() * task.pitch;
  const int64_t body = std::max<int64_t>(buffers * task.stage_numel, T::kRows * T::kPitch);
  const int64_t nbytes = task.TableNbytes() + 4 * body;
  const int64_t blocks = (int64_t)task.row_tiles * task.col_tiles * task.c.groups;
  const int64_t numel = task.c.groups * task.row_tiles * order.stages * filters;
  if (nbytes > most || blocks > INT32_MAX || numel > INT32_MAX) return false;
  const Scratch packed(at.ctx, numel * (int64_t)sizeof(float), at.stream);
  Launch(at.op, PackKernel<T>, Blocks(numel / 4), kThreads, 0, at.stream, task, packed.floats(),
         (int)(numel / 4));
  task.packed = packed.floats();
  LaunchTask(at, CorrelateKernel<T>, blocks, T::kThreads, nbytes, task);
  return true;
}

template <class T>
constexpr TileShape ShapeOf(double speed) {
  return {T::kRows, T::kCols, speed, LaunchTiling<T>};
}
constexpr TileShape kShapes[] = {
    ShapeOf<Tiling<4, 4, 1, 8, 2>>(1.0),  ShapeOf<Tiling<4, 4, 1, 6, 2>>(0.97),
    ShapeOf<Tiling<4, 4, 1, 4, 4>>(0.93), ShapeOf<Tiling<2, 8, 1, 4, 4>>(0.82),
    ShapeOf<Tiling<2, 4, 1, 4, 4>>(0.75),
};

// The shape that takes the least time, of those not yet tried; -1 when all were.
int BestShape(const CorrelateTask& task, int multiprocessors, unsigned tried) {
  int best = -1;
  double least = 0;
  for (int k = 0; k < (int)(sizeof kShapes / sizeof *kShapes); k++) {
    const TileShape& s = kShapes[k];
    const int64_t blocks =
        CeilDiv(task.c.rows, s.rows) * CeilDiv(task.cols, s.cols) * task.c.groups;
    const double time = CeilDiv(blocks, multiprocessors) * (s.rows * s.cols / s.speed);
    if (tried >> k & 1 || (best >= 0 && time >= least)) continue;
    least = time;
    best = k;
  }
  return best;
}

// What indices in int reach, a tile behind the last place included.
bool FitsIndices(const Correlation& c, const Strip& strip) {
  constexpr int64_t kMost = int64_t(1) << 30, kTile = 512;
  const int64_t places = c.Count(), images = kTile / places + 2;
  return c.images * places < kMost && images * strip.height * (int64_t)strip.width < kMost &&
         images * c.groups * c.channels * Size(c.plane) < kMost;
}

}  // namespace

std::vector<std::string> CorrelateTilesTf32() {
  std::vector<std::string> names;
  for (const TileShape& shape : kShapes) names.push_back(TileName(shape.rows, shape.cols));
  return names;
}

bool CorrelateTf32(const Place& at, const Correlation& c) {
  constexpr int64_t kMostDepth = 1 << 24;  // leaves room for index arithmetic in int
  if (c.Count() == 0) return true;
  // Few rows or terms leave most of a tensor core's 16 x 8 x 8 empty.
  if (at.variant == kByRule && (c.rows < 9 || c.Depth() < 9)) return false;
  if (c.Depth() < 1 || c.Depth() > kMostDepth) return false;
  CorrelateTask task{};
  task.c = c;
  task.strip = StripOf(c.down, c.across, c.plane);
  if (!FitsIndices(c, task.strip)) return false;
  task.order = OrderOf((int)c.channels, (int)c.Taps());
  task.cols = (int)(c.images * c.Count());
  if (at.variant != kByRule) return kShapes[at.variant].launch(at, task);
  const int multiprocessors = Multiprocessors(at.ctx.device_id);
  unsigned tried = 0;  // those that need more shared memory than there is
  for (int k; (k = BestShape(task, multiprocessors, tried)) >= 0; tried |= 1u << k)
    if (kShapes[k].launch(at, task)) return true;
  return false;
}

}  // namespace cuda
}  // namespace dlsys
