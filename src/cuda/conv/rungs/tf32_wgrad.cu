// Filter gradient (wgrad) as implicit GEMM on tensor cores: mma.sync m16n8k8 with tf32 operands and
// float32 accumulation. conv.cuh has the contract, tf32.cuh the input layout.
//
// M = filters, N = (channel, kernel offset), K = output positions of all images, kStagePositions a
// stage. dy and the input runs of the tile's channels are double-buffered in shared memory by
// cp.async; each kernel offset reads the runs shifted. K is split over blocks and over warps of a
// block; the partial sums go to a workspace that a second kernel adds in a fixed order. Limited by
// shared-memory reads.
#include "cuda/conv/rungs/tf32.cuh"

namespace dlsys {
namespace cuda {
namespace {

constexpr int kStagePositions = 64;            // output positions (K) of a stage
constexpr int kDyPitch = kStagePositions + 4;  // eight rows by four positions fall in 32 banks
constexpr int kStages = 2;            // double buffer: one is copied while one is multiplied
constexpr int kTables = kStages + 1;  // address tables, filled a stage ahead
constexpr int kLeastStages = 4;       // per split

// N in columns of eight, the N of one mma: eight channels per kernel offset, or, with fewer than
// eight channels, eight adjacent filter elements.
struct Columns {
  int channels, kernel_size;

  __host__ __device__ bool OffsetMajor() const { return channels < 8; }
  __host__ __device__ int MmaColumns() const {
    return OffsetMajor() ? CeilDiv32(channels * kernel_size, 8)
                         : CeilDiv32(channels, 8) * kernel_size;
  }
  __device__ int Channel(int n) const {
    return OffsetMajor() ? n / kernel_size : n / 8 / kernel_size * 8 + n % 8;
  }
  __device__ int KernelOffset(int n) const {
    return OffsetMajor() ? n % kernel_size : n / 8 % kernel_size;
  }
  // The most channels that `mma_columns` adjacent columns span.
  int Channels(int mma_columns) const {
    if (OffsetMajor()) return std::min(channels, (mma_columns * 8 - 2) / kernel_size + 2);
    const int channel_groups = mma_columns % kernel_size == 0 ? mma_columns / kernel_size
                                                              : (mma_columns - 2) / kernel_size + 2;
    return 8 * std::min(CeilDiv32(channels, 8), channel_groups);
  }
};

struct FilterTask {
  Conv c;
  Strip strip;
  Columns columns;
  const float *x, *dy;
  float* partial;  // (splits, groups, rows, width)
  int m_tiles, n_tiles, width, channels, span, pitch;
  int positions, stages, split_stages;  // in all; per split, but for the last

  __host__ __device__ int TableNumel() const { return CeilDiv32(span + kStagePositions, 4) * 4; }
};

// kTileM x 8 * kMmaColumns by warps that hold MmaM x MmaN fragments of 16 x 8; Slices of them split
// the positions (sliced-K).
template <int MmaM, int MmaN, int WarpsM, int WarpsN, int Slices, int Resident>
struct Tiling {
  static constexpr int kMmaM = MmaM, kMmaN = MmaN, kWarpsN = WarpsN, kDeep = Slices;
  static constexpr int kWarps = WarpsM * WarpsN;  // of one slice
  static constexpr int kTileM = 16 * MmaM * WarpsM, kMmaColumns = MmaN * WarpsN;
  static constexpr int kThreads = 32 * kWarps * Slices;
  static constexpr int kResident = Resident;
  static_assert(kThreads % kStagePositions == 0, "a thread copies one position of dy");
};

// ---- kernels ----

template <class T>
using Sums = float[T::kMmaM][T::kMmaN][4];

// Multiplies one stage; an input element's address is cols[n] + positions[k].
template <class T>
__device__ __forceinline__ void MultiplyStage(const float* dy, const float* input,
                                              const int* positions, const int (&cols)[T::kMmaN],
                                              Sums<T>& sums) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row = warp % T::kWarps / T::kWarpsN * T::kMmaM * 16 + lane / 4;
#pragma unroll 1
  for (int step = warp / T::kWarps; step < kStagePositions / 8; step += T::kDeep) {
    const int k = step * 8 + lane % 4;
    const float* at[2] = {input + positions[k], input + positions[k + 4]};
    float a[T::kMmaM][4], b[T::kMmaN][2];
#pragma unroll
    for (int i = 0; i < T::kMmaM; i++)
#pragma unroll
      for (int e = 0; e < 4; e++)
        a[i][e] = RoundedToTf32(dy[(row + 16 * i + e % 2 * 8) * kDyPitch + k + e / 2 * 4]);
#pragma unroll
    for (int j = 0; j < T::kMmaN; j++)
#pragma unroll
      for (int e = 0; e < 2; e++) b[j][e] = RoundedToTf32(at[e][cols[j]]);
#pragma unroll
    for (int j = 0; j < T::kMmaN; j++)
#pragma unroll
      for (int i = 0; i < T::kMmaM; i++) MultiplyAddTf32(a[i], b[j], sums[i][j]);
  }
}

// Stores a thread's sums to its slice's partial sums of a split.
template <class T>
__device__ __forceinline__ void StorePartial(const FilterTask& task, const Sums<T>& sums, int split,
                                             int group, int first_row, int mma_column) {
  const Conv& c = task.c;
  const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
  const int rows = (int)c.o / (int)c.groups;
  const int slice = warp / T::kWarps;
  const int row = first_row + warp % T::kWarps / T::kWarpsN * T::kMmaM * 16 + lane / 4;
  float* to = task.partial +
              ((int64_t)(split * T::kDeep + slice) * c.groups + group) * rows * task.width +
              mma_column * 8 + lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < T::kMmaM; i++)
#pragma unroll
    for (int j = 0; j < T::kMmaN; j++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int r = row + 16 * i + 8 * e;
        if (r < rows)
          *(float2*)(to + (int64_t)r * task.width + 8 * j) =
              make_float2(sums[i][j][2 * e], sums[i][j][2 * e + 1]);
      }
}

// Where the input elements of a thread's columns lie in a stage: channel and kernel offset.
template <class T>
__device__ __forceinline__ void InputOffsets(const FilterTask& task, int mma_column,
                                             int first_channel, int (&cols)[T::kMmaN]) {
  const int lane = (int)threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < T::kMmaN; j++) {
    const int n = (mma_column + j) * 8 + lane / 4, channel = task.columns.Channel(n);
    cols[j] = channel < task.columns.channels ? (channel - first_channel) * task.pitch +
                                                    task.strip.Shift(task.columns.KernelOffset(n))
                                              : 0;
  }
}

template <class T>
__global__ __launch_bounds__(T::kThreads, T::kResident) void FilterKernel(const FilterTask task) {
  float* const memory = DynamicShared<float>();
  const Conv& c = task.c;
  const Strip& strip = task.strip;
  int rest = (int)blockIdx.x;
  const int first_mma_column = rest % task.n_tiles * T::kMmaColumns;
  rest /= task.n_tiles;
  const int first_row = rest % task.m_tiles * T::kTileM;
  rest /= task.m_tiles;
  const int group = rest % (int)c.groups, split = rest / (int)c.groups;
  const int rows = (int)c.o / (int)c.groups;
  const int first_channel = task.columns.Channel(first_mma_column * 8);
  const int begin = split * task.split_stages, end = min(begin + task.split_stages, task.stages);
  const int in_size = (int)(c.in.h * c.in.w), image_pitch = (int)c.c * in_size;
  const int positions = strip.Positions();
  const float* input = task.x + (group * (c.c / c.groups) + first_channel) * in_size;
  const float* dy = task.dy + ((int64_t)group * rows + first_row) * positions;
  int* tables = (int*)memory;
  float* stages = memory + kTables * task.TableNumel();
  const int stage_numel = T::kTileM * kDyPitch + task.channels * task.pitch;

  // Fills the tables of a stage: strip offsets of its positions, and sources of the run.
  auto fill = [&](int stage) {
    if (stage >= end) return;
    int* table = tables + stage % kTables * task.TableNumel();
    const int image = stage * kStagePositions / strip.by_positions;
    const int first = stage * kStagePositions - image * positions;
    const int origin = strip.At(first);
    for (int v = threadIdx.x; v < kStagePositions + task.span; v += T::kThreads)
      table[v] = v < kStagePositions
                     ? strip.At(first + v) - origin
                     : strip.Source(origin + v - kStagePositions, (int)c.n - image, image_pitch);
  };
  auto copy = [&](int stage) {
    if (stage < end) {
      float* to = stages + stage % kStages * stage_numel;
      const int at = (int)threadIdx.x % kStagePositions, position = stage * kStagePositions + at;
      constexpr int kStep = T::kThreads / kStagePositions;
      const int row = (int)threadIdx.x / kStagePositions, image_of = position / strip.by_positions;
      const int exist = position < task.positions ? rows - first_row - row : 0;
      const float* from = dy + (image_of * c.o + row - image_of) * positions + position;
#pragma unroll
      for (int r = 0; r < T::kTileM; r += kStep) {
        CopyAsync4(to + (row + r) * kDyPitch + at, from, r < exist);
        from += kStep * positions;
      }
      const int* table = tables + stage % kTables * task.TableNumel() + kStagePositions;
      const int64_t image = stage * kStagePositions / strip.by_positions;
      CopyChannels<T::kThreads>(to + T::kTileM * kDyPitch, task.pitch, task.channels,
                                task.columns.channels - first_channel, table, task.span,
                                input + image * image_pitch, in_size);
    }
    CloseCopies();
  };

  const int warp = (int)threadIdx.x / 32;
  const int mma_column = first_mma_column + warp % T::kWarpsN * T::kMmaN;
  int cols[T::kMmaN];
  InputOffsets<T>(task, mma_column, first_channel, cols);
  Sums<T> sums = {};
  for (int stage = 0; stage < kStages; stage++) fill(begin + stage);
  __syncthreads();
  for (int stage = 0; stage < kStages - 1; stage++) copy(begin + stage);
  for (int stage = begin; stage < end; stage++) {
    WaitForCopies<kStages - 2>();
    __syncthreads();
    copy(stage + kStages - 1);
    fill(stage + kStages);
    const float* from = stages + stage % kStages * stage_numel;
    MultiplyStage<T>(from, from + T::kTileM * kDyPitch,
                     tables + stage % kTables * task.TableNumel(), cols, sums);
  }
  WaitForCopies<0>();

  StorePartial<T>(task, sums, split, group, first_row, mma_column);
}

// df (filters of all groups, channels, kernel offsets) = sum of partial (splits, filters, width)
// over the splits. `readers` threads of a block split the splits of an element, and the first adds
// their sums.
__global__ void ReduceKernel(const float* partial, float* df, Columns columns, int64_t rows,
                             int width, int splits, int readers) {
  __shared__ float sums[kThreads];
  const int elements = kThreads / readers;
  const int64_t numel = rows * width;
  const int64_t i = (int64_t)blockIdx.x * elements + threadIdx.x % elements;
  float sum = 0.f;
  if (i < numel) {
#pragma unroll 8
    for (int split = threadIdx.x / elements; split < splits; split += readers)
      sum += partial[split * numel + i];
  }
  sums[threadIdx.x] = sum;
  __syncthreads();
  const int n = (int)(i % width), channel = columns.Channel(n);
  if ((int)threadIdx.x >= elements || i >= numel || channel >= columns.channels) return;
  for (int k = 1; k < readers; k++) sum += sums[k * elements + threadIdx.x];
  df[(i / width * columns.channels + channel) * columns.kernel_size + columns.KernelOffset(n)] =
      sum;
}

// ---- launchers ----

struct TileShape {
  int m, mma_columns;
  double speed;  // of a warp's products on an H200, relative to the fastest
  bool (*launch)(const ConvCall&, FilterTask&, float*);
};

// Pitch of a channel in shared memory: eight channels by four positions fall in 32 banks.
int PitchOf(int64_t span) { return (int)((span + 3) / 8 * 8 + 4); }

template <class T>
bool LaunchTiling(const ConvCall& at, FilterTask& task, float* df) {
  const int rows = (int)task.c.GroupFilters(), groups = (int)task.c.groups;
  task.m_tiles = (int)CeilDiv(rows, T::kTileM);
  task.n_tiles = (int)CeilDiv(task.columns.MmaColumns(), T::kMmaColumns);
  task.width = task.n_tiles * T::kMmaColumns * 8;
  task.channels = task.columns.Channels(T::kMmaColumns);
  const int64_t span = Span(task.strip, task.c.kernel.h, kStagePositions);
  const int64_t max_nbytes = (int64_t)SharedLimit(at.ctx.device_id);
  if (span > max_nbytes || task.channels * span > max_nbytes) return false;
  task.span = (int)span;
  task.pitch = PitchOf(span);
  const int64_t nbytes = 4 * (kTables * task.TableNumel() +
                              kStages * (T::kTileM * kDyPitch + task.channels * task.pitch));
  const int64_t tiles = (int64_t)task.m_tiles * task.n_tiles * groups;
  if (nbytes > max_nbytes || tiles > INT32_MAX / 64) return false;
  const int64_t wanted = (int64_t)Multiprocessors(at.ctx.device_id) * T::kResident / tiles;
  const int64_t most = std::max<int64_t>(1, std::min<int64_t>(wanted, task.stages / kLeastStages));
  task.split_stages = (int)CeilDiv(task.stages, most);
  const int splits = (int)CeilDiv(task.stages, task.split_stages);
  const int64_t numel = (int64_t)groups * rows * task.width;
  const Scratch partial(at.ctx, splits * T::kDeep * numel * (int64_t)sizeof(float), at.stream);
  task.partial = partial.floats();
  LaunchTask(at, FilterKernel<T>, tiles * splits, T::kThreads, nbytes, task);
  int readers = 1;  // enough to fill the chip
  while (readers < 8 && numel * readers < kThreads * 512) readers *= 2;
  Launch(at.op, ReduceKernel, (unsigned)CeilDiv(numel, kThreads / readers), kThreads, 0, at.stream,
         partial.floats(), df, task.columns, (int64_t)groups * rows, task.width, splits * T::kDeep,
         readers);
  return true;
}

template <class T>
constexpr TileShape ShapeOf(double speed) {
  return {T::kTileM, T::kMmaColumns, speed, LaunchTiling<T>};
}
constexpr TileShape kShapes[] = {
    ShapeOf<Tiling<4, 9, 1, 4, 1, 2>>(1.0),
    ShapeOf<Tiling<2, 9, 1, 4, 2, 2>>(0.75),
    ShapeOf<Tiling<1, 5, 1, 4, 2, 3>>(0.35),
    ShapeOf<Tiling<2, 2, 1, 1, 8, 4>>(0.15),
};

// The heuristic: the fastest shape of those not yet tried; -1 when all were.
int BestShape(const FilterTask& task, unsigned tried) {
  int best = -1;
  double least = 0;
  for (int k = 0; k < (int)(sizeof kShapes / sizeof *kShapes); k++) {
    const TileShape& s = kShapes[k];
    const double time =
        CeilDiv(task.c.GroupFilters(), s.m) * s.m *
        (CeilDiv(task.columns.MmaColumns(), s.mma_columns) * s.mma_columns / s.speed);
    if (tried >> k & 1 || (best >= 0 && time >= least)) continue;
    least = time;
    best = k;
  }
  return best;
}

bool FitsIndices(const Conv& c, const Strip& strip) {
  constexpr int64_t kMost = int64_t(1) << 30;
  const int64_t positions = Size(c.out), images = 2 * kStagePositions / positions + 2;
  return c.n * positions < kMost && images * strip.height * (int64_t)strip.width < kMost &&
         images * c.c * Size(c.in) < kMost && c.GroupChannels() * Size(c.kernel) < kMost / 16;
}

}  // namespace

std::vector<std::string> FilterTilesTf32() {
  std::vector<std::string> names;
  for (const TileShape& shape : kShapes) names.push_back(TileName(shape.m, 8 * shape.mma_columns));
  return names;
}

bool FilterGradientTf32(const ConvCall& at, const Conv& conv, const float* x, const float* dy,
                        float* df) {
  const int64_t kernel_size = Size(conv.kernel), positions = conv.n * Size(conv.out);
  if (positions == 0 || kernel_size * conv.GroupChannels() == 0) return false;
  FilterTask task{};
  task.c = conv;
  task.strip = StripOf(
      ForwardAxis(conv.out.h, conv.kernel.h, conv.stride.h, conv.pad.h, conv.dilation.h),
      ForwardAxis(conv.out.w, conv.kernel.w, conv.stride.w, conv.pad.w, conv.dilation.w), conv.in);
  if (!FitsIndices(conv, task.strip)) return false;
  task.columns = {(int)conv.GroupChannels(), (int)kernel_size};
  task.x = x;
  task.dy = dy;
  task.positions = (int)positions;
  task.stages = (int)CeilDiv(positions, kStagePositions);
  if (at.variant != kHeuristic) return kShapes[at.variant].launch(at, task, df);
  unsigned tried = 0;  // shapes that exceed shared memory
  for (int k; (k = BestShape(task, tried)) >= 0; tried |= 1u << k)
    if (kShapes[k].launch(at, task, df)) return true;
  return false;
}

}  // namespace cuda
}  // namespace dlsys
