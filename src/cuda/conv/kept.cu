// conv2d_kept: convolution with bias, residual sum and relu, for inference of a few images in
// float32. conv2d_store says which convolutions it serves: those that the other kernels compute
// with less than a GPU full of tiles.
//
// Implicit GEMM as in rungs/implicit_gemm.cu: M = filters, N = output positions of all images, K =
// (channel, kernel offset). The blocks of a cluster share a tile, each with a slice of K, and read
// each other's sums through distributed shared memory in a fixed order; warps of a block share a
// slice likewise where a tile is small. Panels of both operands pass through a ring of shared
// memory (cp.async). The filter's first panels are on their way before the predecessor on the
// stream has ended, where that does not write the filter. It reads filters as they lie, so that its
// store is but a place that says that the kernel serves. Latency limits small shapes, FFMA the
// others.
#include <algorithm>

#include "cuda/conv/conv.cuh"
#include "cuda/runtime/divisor.cuh"
#include "cuda/runtime/launch.cuh"

namespace dlsys {
namespace cuda {
namespace {

constexpr int kStages = 4;      // of the ring of panels
constexpr int kGroupStep = 16;  // K of a panel, for each group of warps
constexpr int kMostSplits = kPortableCluster;
constexpr int kResident = 3;             // blocks on a multiprocessor
constexpr int kMostKernel = 64;          // offsets of a filter, one bit each
constexpr int64_t kMostSlice = 4 << 10;  // of K, in a block's table
constexpr int64_t kStoreNumel = 4;

// kM x kN by groups of warps with 4 x 4 sums a thread, each with its part of the K of a panel.
template <int M, int N>
struct Tile {
  static constexpr int kM = M, kN = N;
  static constexpr int kGroupThreads = M * N / 16, kGroups = kThreads / kGroupThreads;
  static constexpr int kStep = kGroups * kGroupStep;
  static constexpr int kPitch = kStep + 4;  // floats of a filter's row: rows share no banks
  static constexpr int kStageNumel = M * kPitch + kStep * N;
  static constexpr int kWarpsAcross = N / 32;
  static_assert(kStages * kStageNumel >= kGroups * M * N, "the sums fit in the ring");
};
using Large = Tile<64, 64>;
using Medium = Tile<32, 64>;
using Small = Tile<32, 32>;

// What a k says: where it lies beside a position's corner, and the bit of its kernel offset among
// those of a position that are inside the image.
struct alignas(16) Place {
  int offset;
  unsigned low, high, unused;
};

struct KeptTask {
  const float *x, *filter, *bias, *residual;
  float* y;
  int m, n, k, slice, groups, splits, m_tiles, n_tiles;
  int channels, in_h, in_w, positions;
  int stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
  int kernel_h, kernel_w;
  Divisor by_splits, by_m_tiles, by_n_tiles, by_positions, by_width, by_kernel, by_kernel_w;
  bool relu, aligned_filter, aligned_out, filter_ready, triggers_early;
};

// The tile of a block, and its slice of K.
struct Part {
  int rank, group, first_m, first_n, begin, end;
};
template <class T>
__device__ __forceinline__ Part PartOf(const KeptTask& t) {
  const int tile = (int)blockIdx.x / t.by_splits, across = tile / t.by_m_tiles;
  const int group = across / t.by_n_tiles;
  Part p;
  p.rank = (int)blockIdx.x - tile * t.splits;
  p.group = group;
  p.first_m = (tile - across * t.m_tiles) * T::kM;
  p.first_n = (across - group * t.n_tiles) * T::kN;
  p.begin = min(p.rank * t.slice, t.k);
  p.end = min(p.begin + t.slice, t.k);
  return p;
}

// Begins to copy the filters of a panel from k on, a row for each.
template <class T>
__device__ __forceinline__ void LoadFilters(const KeptTask& t, const Part& p, int k, float* to) {
  constexpr int kQuads = T::kStep / 4;
  const float* filter = t.filter + ((int64_t)p.group * t.m + p.first_m) * t.k;
#pragma unroll
  for (int q = 0; q < T::kM * kQuads / kThreads; q++) {
    const int id = (int)threadIdx.x + q * kThreads, row = id / kQuads, at = k + id % kQuads * 4;
    float* shared = to + row * T::kPitch + id % kQuads * 4;
    const bool exists = p.first_m + row < t.m;
    const float* from = exists ? filter + (int64_t)row * t.k + at : t.filter;
    if (t.aligned_filter) {
      const bool valid = exists && at < p.end;
      CopyAsync16(shared, valid ? from : t.filter, valid);
    } else {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const bool valid = exists && at + e < p.end;
        CopyAsync4(shared + e, valid ? from + e : t.filter, valid);
      }
    }
  }
}

// The gathered operand: a thread copies a column of panels, or with kDense, for filters of one
// element, four side by side.
template <class T, bool kDense>
class Images {
 public:
  __device__ Images(const KeptTask& t, const Part& p) : t_(t), x_(t.x), low_(0), high_(0) {
    constexpr int kWide = kDense ? 4 : 1;
    col_ = (int)threadIdx.x % (T::kN / kWide) * kWide;
    row_ = (int)threadIdx.x / (T::kN / kWide);
    const int n = p.first_n + col_;
    if (n >= t.n) return;
    const int image = n / t.by_positions, rest = n - image * t.positions;
    const int64_t plane = (int64_t)t.in_h * t.in_w;
    const float* of_group = t.x + ((int64_t)image * t.groups + p.group) * t.channels * plane;
    if (kDense) {
      x_ = of_group + rest;
      low_ = 1;
      return;
    }
    const int i = rest / t.by_width, j = rest - i * (int)t.by_width.value;
    const int h = i * t.stride_h - t.pad_h, w = j * t.stride_w - t.pad_w;
    x_ = of_group + (int64_t)h * t.in_w + w;
    int bit = 0;
    for (int a = 0; a < t.kernel_h; a++)
      for (int b = 0; b < t.kernel_w; b++, bit++) {
        const int down = h + a * t.dilation_h, across = w + b * t.dilation_w;
        const bool inside =
            (unsigned)down < (unsigned)t.in_h && (unsigned)across < (unsigned)t.in_w;
        (bit < 32 ? low_ : high_) |= (unsigned)inside << bit % 32;
      }
  }

  // `places` are those of the panel's k; of a dense filter there are none.
  __device__ __forceinline__ void Load(const Part& p, const Place* places, int k, float* to) const {
    constexpr int kRows = kThreads / (T::kN / (kDense ? 4 : 1));
#pragma unroll
    for (int q = 0; q < T::kStep / kRows; q++) {
      const int row = row_ + q * kRows;
      float* shared = to + row * T::kN + col_;
      if (kDense) {
        const bool valid = low_ && k + row < p.end;
        const int64_t plane = (int64_t)t_.in_h * t_.in_w;
        CopyAsync16(shared, x_ + (k + row) * plane, valid);
      } else {
        const Place place = places[row];
        CopyAsync4(shared, x_ + place.offset, (low_ & place.low) | (high_ & place.high));
      }
    }
  }

 private:
  const KeptTask& t_;
  const float* x_;
  unsigned low_, high_;  // the kernel offsets that are inside
  int col_, row_;
};

// The places of a slice's k, and of those behind it up to a whole panel, which are nowhere.
template <class T>
__device__ __forceinline__ void FillPlaces(const KeptTask& t, const Part& p, Place* places) {
  const int count = CeilDiv32(t.slice, T::kStep) * T::kStep;
  for (int q = (int)threadIdx.x; q < count; q += kThreads) {
    const int k = p.begin + q, channel = k / t.by_kernel;
    const int bit = k - channel * (int)t.by_kernel.value, i = bit / t.by_kernel_w;
    const int j = bit - i * t.kernel_w;
    const int offset = (channel * t.in_h + i * t.dilation_h) * t.in_w + j * t.dilation_w;
    const unsigned one = k < p.end ? 1u << bit % 32 : 0;
    places[q] = {k < p.end ? offset : 0, bit < 32 ? one : 0, bit < 32 ? 0 : one, 0};
  }
}

// Where a thread's sums are in the tile: rows four apart, columns side by side.
struct Spot {
  int group, row, col;
};
template <class T>
__device__ __forceinline__ Spot SpotOf() {
  const int warp = (int)threadIdx.x % T::kGroupThreads / 32, lane = (int)threadIdx.x % 32;
  return {(int)threadIdx.x / T::kGroupThreads, warp / T::kWarpsAcross * 16 + lane / 8,
          warp % T::kWarpsAcross * 32 + lane % 8 * 4};
}

template <class T>
__device__ __forceinline__ void MultiplyPanel(const float* stage, const Spot& at,
                                              float (&sums)[4][4]) {
  const float* a = stage + at.row * T::kPitch + at.group * kGroupStep;
  const float* b = stage + T::kM * T::kPitch + at.group * kGroupStep * T::kN + at.col;
#pragma unroll
  for (int k = 0; k < kGroupStep; k += 4) {
    float4 of_a[4], of_b[4];
#pragma unroll
    for (int i = 0; i < 4; i++) of_a[i] = *(const float4*)(a + i * 4 * T::kPitch + k);
#pragma unroll
    for (int e = 0; e < 4; e++) of_b[e] = *(const float4*)(b + (k + e) * T::kN);
#pragma unroll
    for (int e = 0; e < 4; e++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float left = e == 0 ? of_a[i].x : e == 1 ? of_a[i].y : e == 2 ? of_a[i].z : of_a[i].w;
        sums[i][0] = fmaf(left, of_b[e].x, sums[i][0]);
        sums[i][1] = fmaf(left, of_b[e].y, sums[i][1]);
        sums[i][2] = fmaf(left, of_b[e].z, sums[i][2]);
        sums[i][3] = fmaf(left, of_b[e].w, sums[i][3]);
      }
  }
}

// Writes four neighbors of a row of the tile, of which there may be fewer.
__device__ __forceinline__ void StoreResult(const KeptTask& t, const Part& p, int row, int col,
                                            float4 sum) {
  const int m = p.group * t.m + row;
  const float bias = t.bias ? t.bias[m] : 0.f;
  float values[4] = {sum.x + bias, sum.y + bias, sum.z + bias, sum.w + bias};
  const auto at = [&](int n) {
    const int image = n / t.by_positions;
    return ((int64_t)image * t.groups * t.m + m) * t.positions + n - image * t.positions;
  };
  if (t.aligned_out) {
    const int64_t to = at(col);
    if (t.residual) {
      const float4 add = *(const float4*)(t.residual + to);
      values[0] += add.x, values[1] += add.y, values[2] += add.z, values[3] += add.w;
    }
#pragma unroll
    for (int e = 0; e < 4; e++) values[e] = t.relu && values[e] <= 0.f ? 0.f : values[e];
    *(float4*)(t.y + to) = make_float4(values[0], values[1], values[2], values[3]);
    return;
  }
#pragma unroll
  for (int e = 0; e < 4; e++) {
    if (col + e >= t.n) return;
    const int64_t to = at(col + e);
    const float value = values[e] + (t.residual ? t.residual[to] : 0.f);
    t.y[to] = t.relu && value <= 0.f ? 0.f : value;
  }
}

// Adds the sums of all groups of all blocks of the cluster; a block does its share of the tile.
template <class T>
__device__ __forceinline__ void AddParts(const KeptTask& t, const Part& p, const float* sums) {
  constexpr int kNumel = T::kM * T::kN;
  const int share = kNumel / 4 / t.splits;
  for (int q = p.rank * share + (int)threadIdx.x; q < (p.rank + 1) * share; q += kThreads) {
    const int row = p.first_m + q / (T::kN / 4), col = p.first_n + q % (T::kN / 4) * 4;
    if (row >= t.m || col >= t.n) continue;
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 4
    for (int peer = 0; peer < t.splits; peer++) {
      const float* from = OfPeer(sums, peer) + q * 4;
#pragma unroll
      for (int group = 0; group < T::kGroups; group++) {
        const float4 part = *(const float4*)(from + group * kNumel);
        sum = make_float4(sum.x + part.x, sum.y + part.y, sum.z + part.z, sum.w + part.w);
      }
    }
    StoreResult(t, p, row, col, sum);
  }
}

template <class T, bool kDense>
__global__ void __launch_bounds__(kThreads, kResident) KeptKernel(const KeptTask t) {
  float* const ring = DynamicShared<float>();
  Place* const places = (Place*)(ring + kStages * T::kStageNumel);
  const Part p = PartOf<T>(t);
  const int panels = CeilDiv32(p.end - p.begin, T::kStep);
  const auto stage = [&](int panel) { return ring + panel % kStages * T::kStageNumel; };
  const auto load_filters = [&](int panel) {
    if (panel < panels) LoadFilters<T>(t, p, p.begin + panel * T::kStep, stage(panel));
  };
  if (t.filter_ready)
#pragma unroll
    for (int panel = 0; panel < kStages - 1; panel++) load_filters(panel);
  const Images<T, kDense> images(t, p);
  if (!kDense) FillPlaces<T>(t, p, places);
  if (t.triggers_early) TriggerProgrammaticLaunch();
  GridDependencySynchronize();
  if (!t.triggers_early) TriggerProgrammaticLaunch();
  __syncthreads();
  const auto load_images = [&](int panel) {
    if (panel < panels)
      images.Load(p, places + panel * T::kStep, p.begin + panel * T::kStep,
                  stage(panel) + T::kM * T::kPitch);
    CloseCopies();
  };
#pragma unroll
  for (int panel = 0; panel < kStages - 1; panel++) {
    if (!t.filter_ready) load_filters(panel);
    load_images(panel);
  }
  const Spot at = SpotOf<T>();
  float sums[4][4] = {};
  for (int panel = 0; panel < panels; panel++) {
    WaitForCopies<kStages - 2>();
    __syncthreads();
    load_filters(panel + kStages - 1);
    load_images(panel + kStages - 1);
    MultiplyPanel<T>(stage(panel), at, sums);
  }
  WaitForCopies<0>();
  __syncthreads();  // the ring has been read
  float* to = ring + at.group * T::kM * T::kN + at.row * T::kN + at.col;
#pragma unroll
  for (int i = 0; i < 4; i++)
    *(float4*)(to + i * 4 * T::kN) = make_float4(sums[i][0], sums[i][1], sums[i][2], sums[i][3]);
  __syncthreads();
  if (t.splits > 1) MeetCluster();
  AddParts<T>(t, p, ring);
  if (t.splits > 1) LeaveCluster();
}

// ---- the choice of a tile and of the slices ----

// A tile, and what a panel of it takes relative to the largest.
struct Shape {
  int m, n, step;
  double panel;
};
template <class T>
constexpr Shape ShapeOf(double panel) {
  return {T::kM, T::kN, T::kStep, panel};
}
constexpr Shape kShapes[] = {ShapeOf<Large>(1.0), ShapeOf<Medium>(1.2), ShapeOf<Small>(1.2)};

struct Choice {
  int shape, splits, slice;
  double us;
};

int64_t TilesOf(const Shape& s, const Correlation& c) {
  return CeilDiv(c.out_channels, s.m) * CeilDiv(c.images * c.Positions(), s.n) * c.groups;
}

// Microseconds of a wave of blocks, two on each multiprocessor where there are so many: the same to
// begin and to end it, and so much for each panel, of gathered or of dense columns. Fitted to 1,000
// times of the layers of ResNet-50 and ResNetMNIST, batches 1 to 32, on an H200: the choice takes 1
// % longer than the best of the 12.
constexpr double kLaunchUs = 2, kWaveUs = 2.2, kClusterUs = 0.75;
constexpr double kGatheredUs = 0.8, kDenseUs = 0.5, kTwoBlocks = 1.65;

// What a convolution takes by the best tile and number of slices.
Choice BestChoice(const Correlation& c, bool dense, int multiprocessors) {
  Choice best{0, 0, 0, kNever};
  for (int k = 0; k < 3; k++) {
    const Shape& s = kShapes[k];
    for (int splits = 1; splits <= kMostSplits; splits *= 2) {
      const int64_t slice = RoundUp(CeilDiv(c.K(), splits), kGroupStep);
      if (slice > kMostSlice || (splits > 1 && slice * (splits - 1) >= c.K())) continue;
      const double on_each = (double)(TilesOf(s, c) * splits) / multiprocessors;
      const double waves = on_each <= 1 ? 1 : on_each <= 4 ? std::ceil(on_each / 2) : on_each / 2;
      const double panel =
          (dense ? kDenseUs : kGatheredUs) * s.panel * (on_each > 1 ? kTwoBlocks : 1);
      const double begin = kWaveUs + (splits > 1 ? kClusterUs : 0);
      const double us = kLaunchUs + waves * (begin + panel * (double)CeilDiv(slice, s.step));
      if (us < best.us) best = {k, splits, (int)slice, us};
    }
  }
  return best;
}

// True for what is a product of the images as they lie, in rows of quads.
bool IsDense(const Conv& c) {
  const HW one{1, 1}, none{0, 0};
  return c.kernel == one && c.stride == one && c.pad == none && c.in == c.out &&
         Size(c.out) % 4 == 0;
}

Choice BestChoice(const Conv& c, DLContext ctx) {
  return BestChoice(Forward(c, nullptr, nullptr, nullptr, nullptr), IsDense(c),
                    Multiprocessors(ctx.device_id));
}

// Why the kernel does not serve a convolution, or null.
const char* Refusal(DLContext ctx, const Conv& c) {
  constexpr int64_t kMostNumel = INT32_MAX / 2;
  if (ComputeMajor(ctx.device_id) < 9) return "clusters of blocks need sm_90";
  if (Size(c.kernel) > kMostKernel) return "the filter has too many offsets";
  if (c.GroupFilters() < 16 || c.GroupChannels() * Size(c.kernel) < 16) return "products are small";
  if (c.n * c.c * Size(c.in) > kMostNumel || c.n * c.o * Size(c.out) > kMostNumel ||
      c.o * c.GroupChannels() * Size(c.kernel) > kMostNumel)
    return "indices are 32 bits";
  return nullptr;
}

// True where it is the fastest way. Estimates of cost.h are those of training's batches; what takes
// little time takes others longer than that, Winograd's tiles above this, as the same layers show.
bool Pays(DLContext ctx, const Conv& conv) {
  constexpr double kAlwaysUs = 60, kUnlessTiledUs = 150;
  if (Refusal(ctx, conv)) return false;
  const HW one{1, 1}, three{3, 3};
  const bool tiled = conv.kernel == three && conv.stride == one && conv.dilation == one;
  const double us = BestChoice(conv, ctx).us;
  if (us < (tiled ? kAlwaysUs : kUnlessTiledUs)) return true;
  const ConvCall at{"conv2d_kept", ctx, nullptr, Precision::kFp32};
  return us < RankConv(at, conv, Pass::kForward).front().us;
}

// ---- launchers ----

KeptTask TaskOf(const Conv& c, const Choice& by) {
  const Shape& shape = kShapes[by.shape];
  KeptTask t{};
  t.m = (int)c.GroupFilters();
  t.n = (int)(c.n * Size(c.out));
  t.k = (int)(c.GroupChannels() * Size(c.kernel));
  t.slice = by.slice;
  t.splits = by.splits;
  t.groups = (int)c.groups;
  t.m_tiles = (int)CeilDiv(t.m, shape.m);
  t.n_tiles = (int)CeilDiv(t.n, shape.n);
  t.channels = (int)c.GroupChannels();
  t.in_h = (int)c.in.h, t.in_w = (int)c.in.w;
  t.positions = (int)Size(c.out);
  t.stride_h = (int)c.stride.h, t.stride_w = (int)c.stride.w;
  t.pad_h = (int)c.pad.h, t.pad_w = (int)c.pad.w;
  t.dilation_h = (int)c.dilation.h, t.dilation_w = (int)c.dilation.w;
  t.kernel_h = (int)c.kernel.h, t.kernel_w = (int)c.kernel.w;
  t.by_splits = Divisor(t.splits), t.by_m_tiles = Divisor(t.m_tiles);
  t.by_n_tiles = Divisor(t.n_tiles), t.by_positions = Divisor(t.positions);
  t.by_width = Divisor(c.out.w), t.by_kernel = Divisor(Size(c.kernel));
  t.by_kernel_w = Divisor(c.kernel.w);
  return t;
}

template <class T, bool kDense>
void LaunchKept(const char* op, const KeptTask& t, DLStream stream) {
  const unsigned blocks = (unsigned)(t.m_tiles * t.n_tiles * t.groups * t.splits);
  const size_t places = kDense ? 0 : (size_t)RoundUp(t.slice, T::kStep) * sizeof(Place);
  LaunchBeside(op, KeptKernel<T, kDense>, blocks, (unsigned)t.splits, kThreads,
               kStages * T::kStageNumel * sizeof(float) + places, stream, t);
}

template <bool kDense>
void LaunchShape(const char* op, int shape, const KeptTask& t, DLStream stream) {
  using Launcher = void (*)(const char*, const KeptTask&, DLStream);
  static constexpr Launcher launchers[] = {LaunchKept<Large, kDense>, LaunchKept<Medium, kDense>,
                                           LaunchKept<Small, kDense>};
  launchers[shape](op, t, stream);
}

// Its workspace is the size of the store that conv2d_kept takes, none where that does not serve.
void Conv2dStore(const DLArray* x, const DLArray* f, DLArray* y, Struct<WindowOptions> windows,
                 int64_t groups, DLStream) {
  const Conv conv = CheckedConv("conv2d_store", x, f, y, *windows, groups);
  const bool serves = Numel(y) && Numel(f) && Pays(y->ctx, conv);
  const Scratch store(y->ctx, serves ? kStoreNumel * (int64_t)sizeof(float) : 0, nullptr);
}

// bias: none or one (o); residual: none or one of y's shape.
void Conv2dKept(const DLArray* x, const DLArray* f, const DLArrayList* bias,
                const DLArrayList* residual, const DLArray* store, DLArray* y,
                Struct<WindowOptions> windows, int64_t groups, int64_t relu, DLStream stream) {
  const char* op = "conv2d_kept";
  Enter(op, y, x, f, store);
  const Conv conv = CheckedConv(op, x, f, y, *windows, groups);
  if (bias->count > 1 || residual->count > 1)
    Fail("%s: expected at most one bias and one residual", op);
  if (!Numel(y)) return;
  if (const char* why = Numel(f) ? Refusal(y->ctx, conv) : "the filter is empty")
    Fail("%s: it does not serve %s by %s: %s", op, ShapeText(x).c_str(), ShapeText(f).c_str(), why);
  const Choice by = BestChoice(conv, y->ctx);
  KeptTask t = TaskOf(conv, by);
  t.x = In(op, x), t.filter = In(op, f), t.y = Out(op, y);
  if (bias->count) {
    Enter(op, y, bias->arrays[0]);
    if (Numel(bias->arrays[0]) != conv.o) Fail("%s: expected a bias for each filter", op);
    t.bias = In(op, bias->arrays[0]);
  }
  if (residual->count) {
    Enter(op, y, residual->arrays[0]);
    CheckSameShape(op, residual->arrays[0], y);
    t.residual = In(op, residual->arrays[0]);
  }
  t.relu = relu != 0;
  t.filter_ready = InputsAreReady(1, 1);
  t.triggers_early = MayTriggerEarly();
  t.aligned_filter = t.k % 4 == 0 && Aligned16(t.filter);
  t.aligned_out = t.positions % 4 == 0 && Aligned16(t.y) && (!t.residual || Aligned16(t.residual));
  const bool dense = IsDense(conv) && Aligned16(t.x);
  dense ? LaunchShape<true>(op, by.shape, t, stream) : LaunchShape<false>(op, by.shape, t, stream);
}

DLSYS_KERNEL(cuda, conv2d_store, Conv2dStore);
DLSYS_KERNEL(cuda, conv2d_kept, Conv2dKept);

}  // namespace
}  // namespace cuda
}  // namespace dlsys
