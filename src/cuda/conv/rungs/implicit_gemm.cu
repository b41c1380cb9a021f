// Convolution as implicit GEMM in true float32: the im2col matrix is gathered on its way to shared
// memory and never stored. conv.cuh has the contract.
//
// Forward and data gradient: M = filters, N = output positions of all images, K = (channel, kernel
// offset). Filter gradient (wgrad): M = filters, N = (channel, kernel offset), K = output positions
// of all images, with split-K reduced in a fixed order. A is row-major (dy or the filter); B is
// gathered: an element's address and coordinates are the sum of an entry per n and an entry per k,
// precomputed in shared memory, kKTableSize k at a time. Panels are double-buffered; a thread
// accumulates quads by FFMA, which limits large shapes. Gathers limit shapes with few channels.
#include <algorithm>

#include "cuda/conv/conv.cuh"
#include "cuda/reduce/reduce.cuh"
#include "cuda/runtime/launch.cuh"

namespace dlsys {
namespace cuda {
namespace {

constexpr int kTileK = 8;                            // K of a panel
constexpr int kKTableSize = 256;                     // entries of the K table in shared memory
constexpr int kQuadStrideM = 16, kQuadStrideN = 32;  // stride of a thread's quads
constexpr int kOutside = -(1 << 30);                 // a coordinate outside of every input
constexpr int64_t kNoOffset = INT64_MIN / 4;

// TileM x TileN by threads that hold ThreadM x ThreadN each.
template <int TileM, int TileN, int ThreadM, int ThreadN, int Resident>
struct Tiling {
  static constexpr int kTileM = TileM, kTileN = TileN;
  static constexpr int kThreadM = ThreadM, kThreadN = ThreadN;
  static constexpr int kResident = Resident;
  static constexpr int kWarpM = ThreadM * 4, kWarpN = ThreadN * 8;
  static constexpr int kWarpsN = TileN / kWarpN;
  static constexpr int kThreads = TileM / kWarpM * kWarpsN * 32;
  static constexpr int kLoadsA = TileM * kTileK / kThreads, kLoadsB = TileN * kTileK / kThreads;
  static_assert(kLoadsA * kThreads == TileM * kTileK && kLoadsB * kThreads == TileN * kTileK,
                "the threads cover a panel once");
};
using Large = Tiling<128, 128, 8, 8, 2>;
using Medium = Tiling<64, 128, 8, 8, 3>;
using Low = Tiling<32, 128, 4, 8, 4>;
using Flat = Tiling<16, 128, 4, 8, 6>;
using Small = Tiling<32, 32, 4, 4, 12>;

// Contribution of a column n to the address and coordinates of elements of B.
struct NEntry {
  int64_t offset;
  int h, w;
};

// Contribution of k: to the address in A, and to the address and coordinates in B.
struct KEntry {
  int64_t a, b;
  int h, w;
};

// Problem size and tiling; groups and K-slices are further dimensions of the grid.
struct TileGrid {
  int m, n, m_tiles, n_tiles, groups;
  int64_t k, k_slice;
};

// ---- tasks ----

// Forward or data gradient.
struct CorrelateTask {
  static constexpr bool kKMajor = false;  // output positions are contiguous
  TileGrid grid;
  Correlation c;
  int positions;       // per image
  bool aligned_quads;  // quads of positions stay within an image and allow 16-byte stores

  __device__ int64_t RowPitch() const { return c.filter_row; }
  __device__ const float* A(int group) const { return c.filter + group * c.filter_group; }
  __device__ const float* B(int group) const { return c.x + group * c.in_channels * InSize(); }
  __device__ int64_t InSize() const { return c.in.h * c.in.w; }
  __device__ int Height() const { return (int)c.in.h; }
  __device__ int Width() const { return (int)c.in.w; }

  __device__ KEntry KEntryAt(int64_t k) const {
    const int kernel_w = (int)c.w.kernel_size, kernel_size = (int)c.h.kernel_size * kernel_w;
    const int channel = (int)k / kernel_size, kernel_offset = (int)k % kernel_size;
    const int h = kernel_offset / kernel_w, w = kernel_offset % kernel_w;
    const int64_t row = c.h.kernel_from + h * c.h.kernel_by;
    return {channel * c.filter_channel + row * c.filter_width + c.w.kernel_from + w * c.w.kernel_by,
            channel * InSize(), h * (int)c.h.kernel_step, w * (int)c.w.kernel_step};
  }

  __device__ NEntry NEntryAt(int col) const {
    const int width = (int)c.w.count;
    const int image = col / positions, i = col % positions / width, j = col % positions % width;
    return {image * (c.groups * c.in_channels * InSize()), (int)c.h.first + i * (int)c.h.step,
            (int)c.w.first + j * (int)c.w.step};
  }

  // Address in the output of row 0 at column `col`.
  __device__ float* Target(int group, int col) const {
    const int width = (int)c.w.count;
    const int image = col / positions, i = col % positions / width, j = col % positions % width;
    const int64_t out_size = c.out_hw.h * c.out_hw.w;
    return c.out + (image * c.groups + group) * (c.out_channels * out_size) +
           (c.h.out_from + i * c.h.out_by) * c.out_hw.w + c.w.out_from + j * c.w.out_by;
  }

  __device__ void Store(int group, int, int row, int col, float4 v) const {
    const int64_t out_size = c.out_hw.h * c.out_hw.w;
    const float bias = c.bias ? c.bias[group * c.out_channels + row] : 0.f;
    v = make_float4(v.x + bias, v.y + bias, v.z + bias, v.w + bias);
    if (aligned_quads) {
      *(float4*)(Target(group, col) + row * out_size) = v;
      return;
    }
    const float values[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int e = 0; e < 4; e++)
      if (col + e < grid.n) Target(group, col + e)[row * out_size] = values[e];
  }
};

// Filter gradient; `out` is (splits, groups, m, n): df itself, or a workspace.
struct FilterTask {
  static constexpr bool kKMajor = true;
  TileGrid grid;
  Conv c;
  const float *x, *dy;
  float* out;

  __device__ int64_t Positions() const { return c.out.h * c.out.w; }
  __device__ int64_t InSize() const { return c.in.h * c.in.w; }
  __device__ int64_t RowPitch() const { return Positions(); }
  __device__ const float* A(int group) const { return dy + group * grid.m * Positions(); }
  __device__ const float* B(int group) const { return x + group * (c.c / c.groups) * InSize(); }
  __device__ int Height() const { return (int)c.in.h; }
  __device__ int Width() const { return (int)c.in.w; }

  __device__ KEntry KEntryAt(int64_t k) const {
    const int64_t image = k / Positions();
    const int position = (int)(k % Positions()), width = (int)c.out.w;
    return {image * c.o * Positions() + position, image * c.c * InSize(),
            position / width * (int)c.stride.h - (int)c.pad.h,
            position % width * (int)c.stride.w - (int)c.pad.w};
  }

  __device__ NEntry NEntryAt(int col) const {
    const int kernel_w = (int)c.kernel.w, kernel_size = (int)c.kernel.h * kernel_w;
    const int channel = col / kernel_size, kernel_offset = col % kernel_size;
    return {channel * InSize(), kernel_offset / kernel_w * (int)c.dilation.h,
            kernel_offset % kernel_w * (int)c.dilation.w};
  }

  __device__ void Store(int group, int split, int row, int col, float4 v) const {
    float* to = out + ((int64_t)(split * grid.groups + group) * grid.m + row) * grid.n;
    const float values[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int e = 0; e < 4; e++)
      if (col + e < grid.n) to[col + e] = values[e];
  }
};

// ---- kernels ----

// Loads kCount values as quads, kStride elements apart.
template <int kCount, int kStride>
__device__ __forceinline__ void ReadQuads(const float* from, float (&to)[kCount]) {
#pragma unroll
  for (int q = 0; q < kCount / 4; q++) {
    const float4 v = *(const float4*)(from + q * kStride);
    to[4 * q] = v.x;
    to[4 * q + 1] = v.y;
    to[4 * q + 2] = v.z;
    to[4 * q + 3] = v.w;
  }
}

// Panel of A: global to registers to shared memory. Adjacent threads run along K, which is
// contiguous in filters and in dy.
template <class T>
class PanelA {
 public:
  using Buffer = float[kTileK][T::kTileM + 4];

  __device__ PanelA(const float* a, int64_t pitch, int row, int rows)
      : a_(a + (row + Row(0)) * pitch), step_(kRowStep * pitch), valid_(rows - row) {}

  __device__ __forceinline__ void Load(const KEntry* k_table) {
    const int64_t offset = k_table[(int)threadIdx.x % kTileK].a;
#pragma unroll
    for (int q = 0; q < T::kLoadsA; q++) {
      const bool valid = offset >= 0 && Row(q) < valid_;
      values_[q] = valid ? a_[q * step_ + offset] : 0.f;
    }
  }

  __device__ __forceinline__ void Store(Buffer& buffer) const {
#pragma unroll
    for (int q = 0; q < T::kLoadsA; q++) buffer[threadIdx.x % kTileK][Row(q)] = values_[q];
  }

 private:
  static constexpr int kRowStep = T::kThreads / kTileK;
  static __device__ __forceinline__ int Row(int q) {
    return (int)threadIdx.x / kTileK + q * kRowStep;
  }

  const float* a_;
  int64_t step_;
  int valid_;
  float values_[T::kLoadsA];
};

// Panel of B, gathered.
template <class T, class Task>
class PanelB {
 public:
  using Buffer = float[kTileK][T::kTileN + 4];
  using NTable = NEntry[T::kTileN];

  __device__ PanelB(const float* b, int height, int width, const NTable& n_table)
      : b_(b), height_(height), width_(width), n_table_(n_table) {
    if constexpr (!Task::kKMajor) {
#pragma unroll
      for (int s = 0; s < kOwnEntries; s++) own_entries_[s] = n_table[Col(s)];
    }
  }

  __device__ __forceinline__ void Load(const KEntry* k_table) {
#pragma unroll
    for (int q = 0; q < T::kLoadsB; q++) {
      const NEntry n_entry = Task::kKMajor ? n_table_[Col(q)] : own_entries_[q % kOwnEntries];
      const KEntry& k_entry = k_table[K(q)];
      const int h = n_entry.h + k_entry.h, w = n_entry.w + k_entry.w;
      const bool valid = (unsigned)h < (unsigned)height_ && (unsigned)w < (unsigned)width_;
      values_[q] = valid ? b_[n_entry.offset + k_entry.b + (h * width_ + w)] : 0.f;
    }
  }

  __device__ __forceinline__ void Store(Buffer& buffer) const {
#pragma unroll
    for (int q = 0; q < T::kLoadsB; q++) buffer[K(q)][Col(q)] = values_[q];
  }

 private:
  // Columns of a thread when N is contiguous: few, so their entries stay in registers.
  static constexpr int kOwnEntries = T::kTileN > T::kThreads ? T::kTileN / T::kThreads : 1;

  static __device__ __forceinline__ int Col(int q) {
    const int t = (int)threadIdx.x;
    return Task::kKMajor ? t / kTileK + q * (T::kThreads / kTileK)
                         : (t + q * T::kThreads) % T::kTileN;
  }
  static __device__ __forceinline__ int K(int q) {
    const int t = (int)threadIdx.x;
    return Task::kKMajor ? t % kTileK : (t + q * T::kThreads) / T::kTileN;
  }

  const float* b_;
  int height_, width_;
  const NTable& n_table_;
  NEntry own_entries_[kOwnEntries];
  float values_[T::kLoadsB];
};

// Fills the K table for kKTableSize k from k0 on; those from `end` on are outside.
template <class T, class Task>
__device__ __forceinline__ void FillTable(const Task& task, int64_t k0, int64_t end,
                                          KEntry* k_table) {
  for (int k = threadIdx.x; k < kKTableSize; k += T::kThreads)
    k_table[k] = k0 + k < end ? task.KEntryAt(k0 + k) : KEntry{kNoOffset, 0, kOutside, kOutside};
}

// The tile of a block.
struct TileCoord {
  int row, col, group, split;
};

__device__ __forceinline__ TileCoord TileCoordOf(const TileGrid& grid) {
  int rest = (int)blockIdx.x;
  TileCoord coord;
  coord.row = rest % grid.m_tiles;
  rest /= grid.m_tiles;
  coord.col = rest % grid.n_tiles;
  rest /= grid.n_tiles;
  coord.group = rest % grid.groups;
  coord.split = rest / grid.groups;
  return coord;
}

template <class T>
using Sums = float[T::kThreadM][T::kThreadN];

template <class T>
__device__ __forceinline__ void MultiplyPanel(const float (&a)[kTileK][T::kTileM + 4],
                                              const float (&b)[kTileK][T::kTileN + 4], int row,
                                              int col, Sums<T>& sums) {
#pragma unroll
  for (int k = 0; k < kTileK; k++) {
    float frag_a[T::kThreadM], frag_b[T::kThreadN];
    ReadQuads<T::kThreadM, kQuadStrideM>(&a[k][row], frag_a);
    ReadQuads<T::kThreadN, kQuadStrideN>(&b[k][col], frag_b);
#pragma unroll
    for (int i = 0; i < T::kThreadM; i++) {
#pragma unroll
      for (int j = 0; j < T::kThreadN; j++) sums[i][j] = fmaf(frag_a[i], frag_b[j], sums[i][j]);
    }
  }
}

template <class T, class Task>
__global__ __launch_bounds__(T::kThreads, T::kResident) void ImplicitGemmKernel(const Task task) {
  using TileA = PanelA<T>;
  using TileB = PanelB<T, Task>;
  __shared__ __align__(16) typename TileA::Buffer buffers_a[2];
  __shared__ __align__(16) typename TileB::Buffer buffers_b[2];
  __shared__ __align__(16) KEntry k_table[kKTableSize];
  __shared__ __align__(16) typename TileB::NTable n_table;
  const TileGrid& grid = task.grid;
  const TileCoord coord = TileCoordOf(grid);
  const int first_m = coord.row * T::kTileM, first_n = coord.col * T::kTileN;
  const int64_t begin = coord.split * grid.k_slice;
  const int64_t end = min(begin + grid.k_slice, grid.k);
  for (int k = threadIdx.x; k < T::kTileN; k += T::kThreads)
    n_table[k] = first_n + k < grid.n ? task.NEntryAt(first_n + k) : NEntry{0, kOutside, kOutside};
  FillTable<T>(task, begin, end, k_table);
  __syncthreads();
  TileA a(task.A(coord.group), task.RowPitch(), first_m, grid.m);
  TileB b(task.B(coord.group), task.Height(), task.Width(), n_table);

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row = warp / T::kWarpsN * T::kWarpM + lane / 8 * 4;
  const int col = warp % T::kWarpsN * T::kWarpN + lane % 8 * 4;
  float sums[T::kThreadM][T::kThreadN] = {};

  a.Load(k_table);
  b.Load(k_table);
  a.Store(buffers_a[0]);
  b.Store(buffers_b[0]);
  __syncthreads();
  int current = 0, next = kTileK;  // index of the next panel in the K table
  for (int64_t k0 = begin; k0 < end; k0 += kTileK) {
    const bool more = k0 + kTileK < end;
    if (more) {
      if (next == kKTableSize) {  // the last panel's entries have been read
        FillTable<T>(task, k0 + kTileK, end, k_table);
        __syncthreads();
        next = 0;
      }
      a.Load(k_table + next);
      b.Load(k_table + next);
      next += kTileK;
    }
    MultiplyPanel<T>(buffers_a[current], buffers_b[current], row, col, sums);
    if (more) {
      a.Store(buffers_a[current ^ 1]);
      b.Store(buffers_b[current ^ 1]);
    }
    __syncthreads();
    current ^= 1;
  }
#pragma unroll
  for (int i = 0; i < T::kThreadM; i++) {
    const int r = first_m + row + i / 4 * kQuadStrideM + i % 4;
#pragma unroll
    for (int j = 0; j < T::kThreadN; j += 4) {
      const int c = first_n + col + j / 4 * kQuadStrideN;
      if (r < grid.m && c < grid.n)
        task.Store(coord.group, coord.split, r, c,
                   make_float4(sums[i][j], sums[i][j + 1], sums[i][j + 2], sums[i][j + 3]));
    }
  }
}

// ---- launchers ----

// Tile shapes, with their speed on an H200 relative to the largest.
struct TileShape {
  int m, n, resident;
  double speed;
};
template <class T>
constexpr TileShape ShapeOf(double speed) {
  return {T::kTileM, T::kTileN, T::kResident, speed};
}
constexpr TileShape kShapes[] = {ShapeOf<Large>(1.0), ShapeOf<Medium>(0.95), ShapeOf<Low>(0.75),
                                 ShapeOf<Flat>(0.5), ShapeOf<Small>(0.4)};

// The heuristic: the shape that takes the least time in waves of blocks; with split-K every wave is
// full.
int BestShape(const TileGrid& grid, int multiprocessors, bool split) {
  int best = 0;
  double least = 0;
  for (int k = 0; k < (int)(sizeof kShapes / sizeof *kShapes); k++) {
    const TileShape& s = kShapes[k];
    const int64_t blocks = CeilDiv(grid.m, s.m) * CeilDiv(grid.n, s.n) * grid.groups;
    const int64_t waves = split ? blocks : CeilDiv(blocks, multiprocessors);
    const double time = waves * (s.m * s.n / s.speed);
    if (k == 0 || time < least) {
      least = time;
      best = k;
    }
  }
  return best;
}

int ShapeFor(const ConvCall& at, const TileGrid& grid, bool split) {
  return at.variant == kHeuristic ? BestShape(grid, Multiprocessors(at.ctx.device_id), split)
                                  : at.variant;
}

void SetTiles(const char* op, const TileShape& shape, TileGrid* grid) {
  const int64_t rows = CeilDiv(grid->m, shape.m), cols = CeilDiv(grid->n, shape.n);
  if (rows * cols > INT32_MAX / 2 / grid->groups) Fail("%s: the result is too large", op);
  grid->m_tiles = (int)rows;
  grid->n_tiles = (int)cols;
  grid->k_slice = RoundUp(grid->k, kTileK);
}

template <class T, class Task>
void LaunchTiling(const ConvCall& at, const Task& task, int splits) {
  const TileGrid& t = task.grid;
  const unsigned blocks = (unsigned)(t.m_tiles * t.n_tiles * t.groups * splits);
  Launch(at.op, ImplicitGemmKernel<T, Task>, blocks, T::kThreads, 0, at.stream, task);
}

template <class Task>
void LaunchTiles(const ConvCall& at, int shape, const Task& task, int splits) {
  using Launcher = void (*)(const ConvCall&, const Task&, int);
  static constexpr Launcher launchers[] = {LaunchTiling<Large, Task>, LaunchTiling<Medium, Task>,
                                           LaunchTiling<Low, Task>, LaunchTiling<Flat, Task>,
                                           LaunchTiling<Small, Task>};
  launchers[shape](at, task, splits);
}

constexpr int64_t kMaxN = int64_t(1) << 30;  // leaves room for index arithmetic in int

void CheckSizes(const char* op, const Conv& c) {
  if (Size(c.in) > kMaxN || Size(c.out) > kMaxN || c.o > kMaxN || c.c > kMaxN / Size(c.kernel) ||
      c.o > kMaxN / Size(c.kernel))
    Fail("%s: inputs or filters of more than %ld elements", op, (long)kMaxN);
}

void Correlate(const ConvCall& at, Correlation c) {
  const int64_t positions = c.Positions(), images = c.images;
  if (positions == 0) return;
  const int64_t max_images = kMaxN / positions;  // images at a time
  for (int64_t first = 0; first < images; first += max_images) {
    CorrelateTask task{};
    task.c = c;
    task.c.images = std::min(max_images, images - first);
    task.c.x += first * c.groups * c.in_channels * Size(c.in);
    task.c.out += first * c.groups * c.out_channels * Size(c.out_hw);
    task.positions = (int)positions;
    task.aligned_quads = c.UnitStride() && positions % 4 == 0 && Aligned16(task.c.out);
    task.grid.m = (int)c.out_channels;
    task.grid.n = (int)(task.c.images * positions);
    task.grid.groups = (int)c.groups;
    task.grid.k = c.K();
    const int shape = ShapeFor(at, task.grid, false);
    SetTiles(at.op, kShapes[shape], &task.grid);
    LaunchTiles(at, shape, task, 1);
  }
}

void GemmForward(const ConvCall& at, const Conv& conv, const float* x, const float* f,
                 const float* bias, float* y) {
  CheckSizes(at.op, conv);
  Correlate(at, Forward(conv, x, f, bias, y));
}

void GemmDataGradient(const ConvCall& at, const Conv& conv, const float* f, const float* dy,
                      float* dx) {
  CheckSizes(at.op, conv);
  for (int64_t phase = 0; phase < conv.stride.h * conv.stride.w; phase++)
    Correlate(at, DataGradient(conv, f, dy, dx, phase));
}

// Splits K so that all multiprocessors have blocks, each of at least 16 panels.
int SplitK(const TileShape& shape, int multiprocessors, TileGrid* grid) {
  const int64_t blocks = (int64_t)grid->m_tiles * grid->n_tiles * grid->groups;
  const int64_t wanted = (int64_t)multiprocessors * shape.resident / blocks;
  const int64_t splits = std::min(wanted, grid->k / (16 * kTileK));
  if (splits < 2) return 1;
  grid->k_slice = RoundUp(CeilDiv(grid->k, splits), kTileK);
  return (int)CeilDiv(grid->k, grid->k_slice);
}

void GemmFilterGradient(const ConvCall& at, const Conv& conv, const float* x, const float* dy,
                        float* df) {
  CheckSizes(at.op, conv);
  FilterTask task{};
  task.c = conv;
  task.x = x;
  task.dy = dy;
  task.out = df;
  task.grid.m = (int)conv.GroupFilters();
  task.grid.n = (int)(conv.GroupChannels() * Size(conv.kernel));
  task.grid.groups = (int)conv.groups;
  task.grid.k = conv.n * Size(conv.out);
  const int multiprocessors = Multiprocessors(at.ctx.device_id);
  const int shape = ShapeFor(at, task.grid, true);
  SetTiles(at.op, kShapes[shape], &task.grid);
  const int splits = SplitK(kShapes[shape], multiprocessors, &task.grid);
  if (splits == 1) return LaunchTiles(at, shape, task, 1);
  const int64_t numel = conv.groups * task.grid.m * (int64_t)task.grid.n;
  Scratch partial(at.ctx, splits * numel * (int64_t)sizeof(float), at.stream);
  task.out = partial.floats();
  LaunchTiles(at, shape, task, splits);
  SumAxis(at.op, at.ctx, partial.floats(), 1, splits, numel, 1.f, df, at.stream);
}

std::vector<std::string> Variants(Pass) {
  std::vector<std::string> names;
  for (const TileShape& shape : kShapes) names.push_back(TileName(shape.m, shape.n));
  return names;
}

}  // namespace

const ConvAlgorithm kImplicitGemm = {"implicit fma", Variants,         nullptr,           nullptr,
                                     GemmForward,    GemmDataGradient, GemmFilterGradient};

}  // namespace cuda
}  // namespace dlsys
