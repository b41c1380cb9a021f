// The gradient of the convolution for the filter on tensor cores: factors of 10 bits of mantissa,
// sums in float32. conv.cuh has the contract, conv_tf32.cuh the planes in shared memory.
//
// It is the matrix product of dy (rows; places) with what the taps see (places; channels and taps).
// A block takes some rows and columns through a part of the places, kPlaces of them a stage; each
// tap reads a channel's run of the planes shifted. What the parts give lies in scratch and is added
// in a fixed order.
#include "cuda/conv/tf32.cuh"

namespace dlsys {
namespace cuda {
namespace {

constexpr int kPlaces = 64;            // of a stage
constexpr int kDyPitch = kPlaces + 4;  // eight rows by four places lie on 32 banks
constexpr int kStages = 2;             // in shared memory: one is copied as one is multiplied
constexpr int kTables = kStages + 1;   // of where things lie, which are made a stage earlier
constexpr int kLeastStages = 4;        // of a part

// The columns of the product in eights: of channels, tap after tap, or, where there are fewer than
// eight channels, of what lies side by side in the filter.
struct Columns {
  int channels, taps;

  __host__ __device__ bool TapsFastest() const { return channels < 8; }
  __host__ __device__ int Eights() const {
    return TapsFastest() ? (channels * taps + 7) / 8 : (channels + 7) / 8 * taps;
  }
  __device__ int Channel(int n) const {
    return TapsFastest() ? n / taps : n / 8 / taps * 8 + n % 8;
  }
  __device__ int Tap(int n) const { return TapsFastest() ? n % taps : n / 8 % taps; }
  // How many channels `eights` neighbouring eights have, at most.
  int Channels(int eights) const {
    if (TapsFastest()) return std::min(channels, (eights * 8 - 2) / taps + 2);
    const int whole = eights % taps == 0 ? eights / taps : (eights - 2) / taps + 2;
    return 8 * std::min((channels + 7) / 8, whole);
  }
};

struct FilterTask {
  Conv c;
  Strip strip;
  Columns columns;
  const float *x, *dy;
  float* partial;  // (parts, groups, rows, width)
  int row_tiles, col_tiles, width, planes, span, pitch;
  int places, stages, part_stages;  // of all; a part has part_stages but the last

  __host__ __device__ int TableNumel() const { return (span + kPlaces + 3) / 4 * 4; }
};

// Rows x Cols of the result by warps that hold Down x Across times 16 x 8 of it; Deep of them share
// out the places.
template <int Down, int Across, int WarpsDown, int WarpsAcross, int Deep, int Resident>
struct Tiling {
  static constexpr int kDown = Down, kAcross = Across, kWarpsAcross = WarpsAcross, kDeep = Deep;
  static constexpr int kWarps = WarpsDown * WarpsAcross;  // of those that share out the places one
  static constexpr int kRows = 16 * Down * WarpsDown, kEights = Across * WarpsAcross;
  static constexpr int kThreads = 32 * kWarps * Deep;
  static constexpr int kResident = Resident;
  static_assert(kThreads % kPlaces == 0, "a thread copies one place of dy");
};

// ---- kernels ----

template <class T>
using Sums = float[T::kDown][T::kAcross][4];

// Adds the product of a stage; cols and places add up to where an element of the planes lies.
template <class T>
__device__ __forceinline__ void MultiplyStage(const float* dy, const float* planes,
                                              const int* places, const int (&cols)[T::kAcross],
                                              Sums<T>& sums) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row = warp % T::kWarps / T::kWarpsAcross * T::kDown * 16 + lane / 4;
#pragma unroll 1
  for (int step = warp / T::kWarps; step < kPlaces / 8; step += T::kDeep) {
    const int k = step * 8 + lane % 4;
    const float* at[2] = {planes + places[k], planes + places[k + 4]};
    float a[T::kDown][4], b[T::kAcross][2];
#pragma unroll
    for (int i = 0; i < T::kDown; i++)
#pragma unroll
      for (int e = 0; e < 4; e++)
        a[i][e] = RoundedToTf32(dy[(row + 16 * i + e % 2 * 8) * kDyPitch + k + e / 2 * 4]);
#pragma unroll
    for (int j = 0; j < T::kAcross; j++)
#pragma unroll
      for (int e = 0; e < 2; e++) b[j][e] = RoundedToTf32(at[e][cols[j]]);
#pragma unroll
    for (int j = 0; j < T::kAcross; j++)
#pragma unroll
      for (int i = 0; i < T::kDown; i++) MultiplyAddTf32(a[i], b[j], sums[i][j]);
  }
}

template <class T>
__global__ __launch_bounds__(T::kThreads, T::kResident) void FilterKernel(const FilterTask task) {
  float* const memory = DynamicShared<float>();
  const Conv& c = task.c;
  const Strip& strip = task.strip;
  int rest = (int)blockIdx.x;
  const int first_eight = rest % task.col_tiles * T::kEights;
  rest /= task.col_tiles;
  const int first_row = rest % task.row_tiles * T::kRows;
  rest /= task.row_tiles;
  const int group = rest % (int)c.groups, part = rest / (int)c.groups;
  const int rows = (int)c.o / (int)c.groups;
  const int first_channel = task.columns.Channel(first_eight * 8);
  const int begin = part * task.part_stages, end = min(begin + task.part_stages, task.stages);
  const int plane = (int)(c.plane.h * c.plane.w), image_pitch = (int)c.c * plane;
  const int places = strip.Places();
  const float* planes = task.x + (group * (c.c / c.groups) + first_channel) * plane;
  const float* dy = task.dy + ((int64_t)group * rows + first_row) * places;
  int* tables = (int*)memory;
  float* stages = memory + kTables * task.TableNumel();
  const int stage_numel = T::kRows * kDyPitch + task.planes * task.pitch;

  // Where a stage's places lie in its runs of the planes, and where these come from.
  auto fill = [&](int stage) {
    if (stage >= end) return;
    int* table = tables + stage % kTables * task.TableNumel();
    const int image = stage * kPlaces / strip.by_places, first = stage * kPlaces - image * places;
    const int origin = strip.At(first);
    for (int v = threadIdx.x; v < kPlaces + task.span; v += T::kThreads)
      table[v] = v < kPlaces ? strip.At(first + v) - origin
                             : strip.Source(origin + v - kPlaces, (int)c.n - image, image_pitch);
  };
  auto copy = [&](int stage) {
    if (stage < end) {
      float* to = stages + stage % kStages * stage_numel;
      const int at = (int)threadIdx.x % kPlaces, place = stage * kPlaces + at;
      constexpr int kStep = T::kThreads / kPlaces;
      const int row = (int)threadIdx.x / kPlaces, image_of = place / strip.by_places;
      const int exist = place < task.places ? rows - first_row - row : 0;
      const float* from = dy + (image_of * c.o + row - image_of) * places + place;
#pragma unroll
      for (int r = 0; r < T::kRows; r += kStep) {
        CopyAsync4(to + (row + r) * kDyPitch + at, from, r < exist);
        from += kStep * places;
      }
      const int* table = tables + stage % kTables * task.TableNumel() + kPlaces;
      const int64_t image = stage * kPlaces / strip.by_places;
      CopyPlanes<T::kThreads>(to + T::kRows * kDyPitch, task.pitch, task.planes,
                              task.columns.channels - first_channel, table, task.span,
                              planes + image * image_pitch, plane);
    }
    CloseCopies();
  };

  const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
  const int eight = first_eight + warp % T::kWarpsAcross * T::kAcross;
  int cols[T::kAcross];
#pragma unroll
  for (int j = 0; j < T::kAcross; j++) {
    const int n = (eight + j) * 8 + lane / 4, channel = task.columns.Channel(n);
    cols[j] = channel < task.columns.channels
                  ? (channel - first_channel) * task.pitch + strip.Shift(task.columns.Tap(n))
                  : 0;
  }
  float sums[T::kDown][T::kAcross][4] = {};
  for (int stage = 0; stage < kStages; stage++) fill(begin + stage);
  __syncthreads();
  for (int stage = 0; stage < kStages - 1; stage++) copy(begin + stage);
  for (int stage = begin; stage < end; stage++) {
    WaitForCopies<kStages - 2>();
    __syncthreads();
    copy(stage + kStages - 1);
    fill(stage + kStages);
    const float* from = stages + stage % kStages * stage_numel;
    MultiplyStage<T>(from, from + T::kRows * kDyPitch, tables + stage % kTables * task.TableNumel(),
                     cols, sums);
  }
  WaitForCopies<0>();

  const int deep = warp / T::kWarps;
  const int row = first_row + warp % T::kWarps / T::kWarpsAcross * T::kDown * 16 + lane / 4;
  float* to = task.partial +
              ((int64_t)(part * T::kDeep + deep) * c.groups + group) * rows * task.width +
              eight * 8 + lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < T::kDown; i++)
#pragma unroll
    for (int j = 0; j < T::kAcross; j++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int r = row + 16 * i + 8 * e;
        if (r < rows)
          *(float2*)(to + (int64_t)r * task.width + 8 * j) =
              make_float2(sums[i][j][2 * e], sums[i][j][2 * e + 1]);
      }
}

// df (rows of all groups, channels, taps) = the sum over the parts of partial (parts, rows, width).
// `shares` threads of a block share out the parts of an element, and the first adds their sums.
__global__ void JoinKernel(const float* partial, float* df, Columns columns, int64_t rows,
                           int width, int parts, int shares) {
  __shared__ float sums[kThreads];
  const int neighbours = kThreads / shares;
  const int64_t numel = rows * width;
  const int64_t i = (int64_t)blockIdx.x * neighbours + threadIdx.x % neighbours;
  float sum = 0.f;
  if (i < numel) {
#pragma unroll 8
    for (int part = threadIdx.x / neighbours; part < parts; part += shares)
      sum += partial[part * numel + i];
  }
  sums[threadIdx.x] = sum;
  __syncthreads();
  const int n = (int)(i % width), channel = columns.Channel(n);
  if ((int)threadIdx.x >= neighbours || i >= numel || channel >= columns.channels) return;
  for (int k = 1; k < shares; k++) sum += sums[k * neighbours + threadIdx.x];
  df[(i / width * columns.channels + channel) * columns.taps + columns.Tap(n)] = sum;
}

// ---- launchers ----

struct TileShape {
  int rows, eights;
  double speed;  // of a warp's products on an H200, relative to the fastest
  bool (*launch)(const Place&, FilterTask&, float*);
};

// A row of the strip as it lies in shared memory: eight channels by four places on 32 banks.
int PitchOf(int64_t span) { return (int)((span + 3) / 8 * 8 + 4); }

template <class T>
bool LaunchTiling(const Place& at, FilterTask& task, float* df) {
  const int rows = (int)task.c.GroupFilters(), groups = (int)task.c.groups;
  task.row_tiles = (int)CeilDiv(rows, T::kRows);
  task.col_tiles = (int)CeilDiv(task.columns.Eights(), T::kEights);
  task.width = task.col_tiles * T::kEights * 8;
  task.planes = task.columns.Channels(T::kEights);
  const int64_t span = Span(task.strip, task.c.size.h, kPlaces);
  const int64_t most = (int64_t)SharedLimit(at.ctx.device_id);
  if (span > most || task.planes * span > most) return false;
  task.span = (int)span;
  task.pitch = PitchOf(span);
  const int64_t nbytes = 4 * (kTables * task.TableNumel() +
                              kStages * (T::kRows * kDyPitch + task.planes * task.pitch));
  const int64_t tiles = (int64_t)task.row_tiles * task.col_tiles * groups;
  if (nbytes > most || tiles > INT32_MAX / 64) return false;
  const int64_t wanted = (int64_t)Multiprocessors(at.ctx.device_id) * T::kResident / tiles;
  const int64_t splits =
      std::max<int64_t>(1, std::min<int64_t>(wanted, task.stages / kLeastStages));
  task.part_stages = (int)CeilDiv(task.stages, splits);
  const int parts = (int)CeilDiv(task.stages, task.part_stages);
  const int64_t numel = (int64_t)groups * rows * task.width;
  const Scratch partial(at.ctx, parts * T::kDeep * numel * (int64_t)sizeof(float), at.stream);
  task.partial = partial.floats();
  LaunchTask(at, FilterKernel<T>, tiles * parts, T::kThreads, nbytes, task);
  int shares = 1;  // as many as fill the chip
  while (shares < 8 && numel * shares < kThreads * 512) shares *= 2;
  Launch(at.op, JoinKernel, (unsigned)CeilDiv(numel, kThreads / shares), kThreads, 0, at.stream,
         partial.floats(), df, task.columns, (int64_t)groups * rows, task.width, parts * T::kDeep,
         shares);
  return true;
}

template <class T>
constexpr TileShape ShapeOf(double speed) {
  return {T::kRows, T::kEights, speed, LaunchTiling<T>};
}
constexpr TileShape kShapes[] = {
    ShapeOf<Tiling<4, 9, 1, 4, 1, 2>>(1.0),
    ShapeOf<Tiling<2, 9, 1, 4, 2, 2>>(0.75),
    ShapeOf<Tiling<1, 5, 1, 4, 2, 3>>(0.35),
    ShapeOf<Tiling<2, 2, 1, 1, 8, 4>>(0.15),
};

// The shape that takes the least time, of those not yet tried; -1 when all were.
int BestShape(const FilterTask& task, unsigned tried) {
  int best = -1;
  double least = 0;
  for (int k = 0; k < (int)(sizeof kShapes / sizeof *kShapes); k++) {
    const TileShape& s = kShapes[k];
    const double time = CeilDiv(task.c.GroupFilters(), s.rows) * s.rows *
                        (CeilDiv(task.columns.Eights(), s.eights) * s.eights / s.speed);
    if (tried >> k & 1 || (best >= 0 && time >= least)) continue;
    least = time;
    best = k;
  }
  return best;
}

bool FitsIndices(const Conv& c, const Strip& strip) {
  constexpr int64_t kMost = int64_t(1) << 30;
  const int64_t places = Size(c.out), images = 2 * kPlaces / places + 2;
  return c.n * places < kMost && images * strip.height * (int64_t)strip.width < kMost &&
         images * c.c * Size(c.plane) < kMost && c.GroupChannels() * Size(c.size) < kMost / 16;
}

}  // namespace

std::vector<std::string> FilterTilesTf32() {
  std::vector<std::string> names;
  for (const TileShape& shape : kShapes) names.push_back(TileName(shape.rows, 8 * shape.eights));
  return names;
}

bool FilterGradientTf32(const Place& at, const Conv& conv, const float* x, const float* dy,
                        float* df) {
  // With few rows or columns most of what is copied to shared memory is used once.
  const int64_t taps = Size(conv.size), places = conv.n * Size(conv.out);
  if (places == 0 || taps * conv.GroupChannels() == 0) return false;
  const bool few = conv.GroupFilters() < 9 || conv.GroupChannels() * taps < 32;
  if (at.variant == kByRule && few) return false;
  FilterTask task{};
  task.c = conv;
  task.strip =
      StripOf(ForwardSweep(conv.out.h, conv.size.h, conv.stride.h, conv.before.h, conv.dilation.h),
              ForwardSweep(conv.out.w, conv.size.w, conv.stride.w, conv.before.w, conv.dilation.w),
              conv.plane);
  if (!FitsIndices(conv, task.strip)) return false;
  task.columns = {(int)conv.GroupChannels(), (int)taps};
  task.x = x;
  task.dy = dy;
  task.places = (int)places;
  task.stages = (int)CeilDiv(places, kPlaces);
  if (at.variant != kByRule) return kShapes[at.variant].launch(at, task, df);
  unsigned tried = 0;  // those that need more shared memory than there is
  for (int k; (k = BestShape(task, tried)) >= 0; tried |= 1u << k)
    if (kShapes[k].launch(at, task, df)) return true;
  return false;
}

}  // namespace cuda
}  // namespace dlsys
