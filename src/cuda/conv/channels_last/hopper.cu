// Launches of convolution by wgmma and TMA: tensor maps of images and filters, a cost model that
// picks the tile, copies that move a filter's channels last and back, and those that turn an array
// of float32 for the gradient of a filter. channels_last/hopper.cuh has the contract,
// gemm/hopper/kernel.cuh the kernel, channels_last/wgrad_halo.cu that of some filters' gradients. A
// data gradient at a stride is one launch for each phase that meets the filter, whose results are
// stored between those of others. Tensor cores limit filters of several elements, memory bandwidth
// most of one.
#include <algorithm>
#include <optional>
#include <tuple>

#include "cuda/conv/channels_last/hopper.cuh"
#include "cuda/conv/channels_last/sources.cuh"
#include "cuda/conv/channels_last/wgrad.cuh"
#include "cuda/conv/channels_last/wgrad_halo.cuh"
#include "cuda/gemm/hopper/hopper.cuh"
#include "cuda/gemm/hopper/launch.cuh"

namespace dlsys {
namespace cuda {
namespace channels_last {
namespace {

using hopper::Config;
using hopper::kRowsOfBox;
using hopper::Tiling;

// ---- filters ----

template <class T>
constexpr int kRun = 128 / (int)sizeof(T);  // channels that a block moves
constexpr int64_t kMostOffsets = 256;

// y (filters, kernel, channels) = x (filters, channels, kernel).
template <class T>
__global__ void __launch_bounds__(kThreads)
    MoveChannelsKernel(const T* x, T* y, int channels, int kernel, Divisor by_kernel,
                       Divisor by_runs) {
  T* tile = DynamicShared<T>();  // (kernel, kRun), in rows that begin at other banks
  constexpr int kRow = kRun<T> + 2;
  const int filter = (int)blockIdx.x / by_runs;
  const int c0 = ((int)blockIdx.x - filter * (int)by_runs.value) * kRun<T>;
  const int64_t first = (int64_t)filter * channels * kernel;
  GridDependencySynchronize();
  for (int k = (int)threadIdx.x; k < min(kRun<T>, channels - c0) * kernel; k += kThreads) {
    const int c = k / by_kernel;
    tile[(k - c * kernel) * kRow + c] = x[first + c0 * kernel + k];
  }
  __syncthreads();
  for (int k = (int)threadIdx.x; k < kRun<T> * kernel; k += kThreads) {
    const int i = k / kRun<T>, c = k % kRun<T>;
    if (c0 + c < channels) y[first + i * channels + c0 + c] = tile[i * kRow + c];
  }
}

template <class T>
void MoveChannels(const Call& at, const Conv& c, const T* x, T* y) {
  const int64_t kernel = Size(c.kernel), runs = CeilDiv(c.c, kRun<T>);
  const size_t nbytes = (size_t)(kernel * (kRun<T> + 2)) * sizeof(T);
  LaunchClusters(at.op, MoveChannelsKernel<T>, (unsigned)(c.o * runs), 1, kThreads, nbytes, true,
                 at.stream, x, y, (int)c.c, (int)kernel, Divisor(kernel), Divisor(runs));
}

// ---- parts of a filter's gradient ----

// A block adds those of `filters` filters, `channels` channels and all kernel offsets. The parts
// are (count, ...) with these strides; the filters lie side by side, or the channels, and are taken
// by four.
struct PartsTask {
  const float* parts;
  int64_t part;  // elements of one
  int count, filter_step, kernel_step, channel_step;
  int all_filters, all_channels, filters, channels, kernel, groups;
  Divisor by_channel_runs, by_fours, by_kernel, by_of_filter;
};

// df (filters, channels, kernel) = the sum of parts. Threads of `groups` groups add shares of them,
// in order, and these sums are added in order.
template <class T>
__global__ void __launch_bounds__(kThreads)
    AddPartsKernel(const __grid_constant__ PartsTask task, T* df) {
  constexpr int kAtOnce = 2;             // fours of a thread
  float* sums = DynamicShared<float>();  // (groups, filters, channels, kernel)
  const int filter_run = (int)blockIdx.x / task.by_channel_runs;
  const int filter0 = filter_run * task.filters;
  const int channel0 =
      ((int)blockIdx.x - filter_run * (int)task.by_channel_runs.value) * task.channels;
  const int numel = task.filters * task.channels * task.kernel, threads = kThreads / task.groups;
  const int group = (int)threadIdx.x / threads, thread = (int)threadIdx.x % threads;
  const int begin = task.count * group / task.groups, end = task.count * (group + 1) / task.groups;
  const bool filters_fast = task.filter_step == 1;
  const int to_next = filters_fast ? task.channels * task.kernel : task.kernel;  // of a four
  GridDependencySynchronize();
  for (int first = thread; first < numel / 4; first += kAtOnce * threads) {
    const float4* from[kAtOnce];
    int to[kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; u++) {
      const int k = min(first + u * threads, numel / 4 - 1);
      const int rest = k / task.by_fours, fast = (k - rest * (int)task.by_fours.value) * 4;
      const int slow = rest / task.by_kernel, i = rest - slow * task.kernel;
      const int f = filters_fast ? fast : slow, c = filters_fast ? slow : fast;
      const bool exists = filter0 + f < task.all_filters && channel0 + c < task.all_channels;
      from[u] = (const float4*)(!exists ? task.parts
                                        : task.parts + (int64_t)(filter0 + f) * task.filter_step +
                                              (int64_t)i * task.kernel_step +
                                              (int64_t)(channel0 + c) * task.channel_step);
      to[u] = (f * task.channels + c) * task.kernel + i;
    }
    float4 sum[kAtOnce] = {};
#pragma unroll 4
    for (int part = begin; part < end; part++) {
#pragma unroll
      for (int u = 0; u < kAtOnce; u++) {
        const float4 v = from[u][part * (task.part / 4)];
        sum[u].x += v.x, sum[u].y += v.y, sum[u].z += v.z, sum[u].w += v.w;
      }
    }
#pragma unroll
    for (int u = 0; u < kAtOnce; u++) {
      if (first + u * threads >= numel / 4) continue;
      float* const at = sums + group * numel + to[u];
      at[0] = sum[u].x, at[to_next] = sum[u].y, at[2 * to_next] = sum[u].z,
      at[3 * to_next] = sum[u].w;
    }
  }
  __syncthreads();
  for (int k = (int)threadIdx.x; k < numel; k += kThreads) {
    const int f = k / task.by_of_filter, in_filter = k - f * (int)task.by_of_filter.value;
    float sum = sums[k];
    for (int g = 1; g < task.groups; g++) sum += sums[g * numel + k];
    if (filter0 + f < task.all_filters && in_filter < (task.all_channels - channel0) * task.kernel)
      df[((int64_t)(filter0 + f) * task.all_channels + channel0) * task.kernel + in_filter] =
          T(sum);
  }
}

// The parts are (count, filters, kernel, pitch) or, `swapped`, (count, kernel, pitch, filters).
template <class T>
void AddParts(const Call& at, const Conv& c, int64_t count, int64_t pitch, bool swapped,
              const float* parts, T* df) {
  constexpr int64_t kMostNumel = 2048, kMostFast = 512, kBlocks = 1024;  // of a block; about a wave
  constexpr int64_t kLeastFast = 16, kFewBlocks = 256;
  const int64_t kernel = Size(c.kernel);
  PartsTask task{};
  task.parts = parts, task.part = c.o * kernel * pitch, task.count = (int)count;
  task.filter_step = (int)(swapped ? 1 : kernel * pitch);
  task.kernel_step = (int)(swapped ? pitch * c.o : pitch);
  task.channel_step = (int)(swapped ? c.o : 1);
  task.all_filters = (int)c.o, task.all_channels = (int)c.c, task.kernel = (int)kernel;
  // What lies side by side, and what does not.
  const int64_t of_fast = swapped ? c.o : c.c, of_slow = swapped ? c.c : c.o;
  int64_t fast = swapped ? 32 : 64, slow = 1;
  while (fast > 8 && fast * kernel > kMostNumel) fast /= 2;
  while (fast > kLeastFast && CeilDiv(of_fast, fast) * of_slow < kFewBlocks) fast /= 2;
  const auto may_grow = [&] {
    return fast * slow * kernel * 2 <= kMostNumel &&
           CeilDiv(of_fast, fast) * CeilDiv(of_slow, slow) > kBlocks;
  };
  while (may_grow() && fast < std::min(of_fast, kMostFast)) fast *= 2;
  while (may_grow() || (swapped && slow < 4 && fast * slow * kernel * 2 <= kMostNumel)) slow *= 2;
  task.filters = (int)(swapped ? fast : slow), task.channels = (int)(swapped ? slow : fast);
  const int64_t numel = fast * slow * kernel, runs = CeilDiv(c.c, task.channels);
  task.groups = 1;
  while (task.groups < 16 && task.groups * 2 <= count && task.groups * numel / 4 < kThreads)
    task.groups *= 2;
  task.by_channel_runs = Divisor(runs), task.by_fours = Divisor(fast / 4);
  task.by_kernel = Divisor(kernel), task.by_of_filter = Divisor(task.channels * kernel);
  LaunchClusters(at.op, AddPartsKernel<T>, (unsigned)(CeilDiv(c.o, task.filters) * runs), 1,
                 kThreads, (size_t)(task.groups * numel) * sizeof(float), true, at.stream, task,
                 df);
}

// ---- images of few channels ----

// The pixels that a filter's row meets lie side by side, so images of few channels are convolved as
// rows of them: images (n, lines, out.w, 128 bytes), each pixel all that a line of the filter
// reads, by a filter of one column. Pixels overlap: they are a map of strides over a copy (n,
// lines, width, pixel). As many rows as the stride skips make a line of the copy, and of the
// filter, interleaved, so that every line is met at stride 1. Zeros pad images on all sides, and
// pixels.
template <class T>
constexpr int64_t kOf16Bytes = 16 / (int64_t)sizeof(T);

struct Rows {
  int64_t fold, channels, width;   // rows of a line, channels of a row with padding, pixels
  Conv conv;                       // of the rows
  std::array<int64_t, 3> strides;  // of its images

  int64_t Pixel() const { return fold * channels; }

  // None where what a line of the filter reads is longer, or does not lie side by side.
  template <class T>
  static std::optional<Rows> Of(const Conv& c) {
    constexpr int64_t kUnit = kOf16Bytes<T>, kPanel = kChannelsOfPanel<T>;
    if (c.groups > 1 || Size(c.dilation) > 1 || c.o % kUnit) return std::nullopt;
    for (const int64_t fold : {c.stride.h, int64_t(1)}) {
      Rows rows{fold, c.c, 0, c, {}};
      while (rows.Pixel() * c.stride.w % kUnit) rows.channels++;
      const int64_t pixel = rows.Pixel();
      if (pixel * c.kernel.w > kPanel) continue;
      rows.width = RoundUp((c.out.w - 1) * c.stride.w + CeilDiv(kPanel, pixel), kUnit);
      Conv& of = rows.conv;
      of.c = kPanel, of.kernel = {CeilDiv(c.kernel.h, fold), 1};
      of.stride = {c.stride.h / fold, 1}, of.pad = {0, 0};
      of.in = {(c.out.h - 1) * of.stride.h + of.kernel.h, c.out.w};
      rows.strides = {c.stride.w * pixel, rows.width * pixel, of.in.h * rows.width * pixel};
      return rows;
    }
    return std::nullopt;
  }
};

struct RowsTask {
  int in_h, in_w, channels, kernel_h, kernel_w;  // of the convolution
  int fold, row_channels, lines, pad_h, pad_w;
  Divisor by_line, by_lines, by_pixel, by_channels;  // a line in units of 16 bytes
};

// to (n, lines, width, pixel) of x (n, h, w, channels), 16 bytes a thread: a pixel of kRows rows
// or, where that is 0, anything.
template <class T, int kRows>
__global__ void CopyRowsKernel(const __grid_constant__ RowsTask task, const T* x, T* to,
                               int count) {
  constexpr int kUnit = (int)kOf16Bytes<T>;
  for (int k = (int)FirstItem(); k < count; k += (int)ItemStep()) {
    const int of_all = k / task.by_line, in_line = k - of_all * (int)task.by_line.value;
    const int n = of_all / task.by_lines, line = of_all - n * task.lines;
    const auto in_image = [&](int h, int w) {
      return (unsigned)h < (unsigned)task.in_h && (unsigned)w < (unsigned)task.in_w;
    };
    const auto pixel_at = [&](int h, int w) {
      return x + (((int64_t)n * task.in_h + h) * task.in_w + w) * task.channels;
    };
    __align__(16) T made[kUnit];
    if constexpr (kRows > 0) {
      constexpr int kChannels = kUnit / kRows;
      const int w = in_line - task.pad_w;
#pragma unroll
      for (int r = 0; r < kRows; r++) {
        const int h = line * kRows + r - task.pad_h, count = in_image(h, w) ? task.channels : 0;
        const T* const from = pixel_at(h, w);
#pragma unroll
        for (int c = 0; c < kChannels; c++) made[r * kChannels + c] = c < count ? from[c] : T(0.f);
      }
    } else {
#pragma unroll
      for (int e = 0; e < kUnit; e++) {
        const int place = (in_line * kUnit + e) / task.by_pixel;
        const int in_pixel = in_line * kUnit + e - place * (int)task.by_pixel.value;
        const int r = in_pixel / task.by_channels, c = in_pixel - r * task.row_channels;
        const int h = line * task.fold + r - task.pad_h, w = place - task.pad_w;
        made[e] = c < task.channels && in_image(h, w) ? pixel_at(h, w)[c] : T(0.f);
      }
    }
    ((float4*)to)[k] = *(const float4*)made;
  }
}

// rows (filters, lines, panel) of f (filters, channels, kernel), or, kBack, f of rows (filters,
// panel, lines).
template <class T, bool kBack>
__global__ void FilterRowsKernel(const __grid_constant__ RowsTask task, const T* from, T* to,
                                 int lines, int numel) {
  constexpr int kPanel = kChannelsOfPanel<T>;
  for (int k = (int)FirstItem(); k < numel; k += (int)ItemStep()) {
    const int filter = k / kPanel / lines, line = k / kPanel % lines;
    const int e = k % kPanel, j = e / task.by_pixel;
    const int in_pixel = e - j * (int)task.by_pixel.value;
    const int r = in_pixel / task.by_channels, c = in_pixel - r * task.row_channels;
    const int i = line * task.fold + r;
    const bool exists = c < task.channels && i < task.kernel_h && j < task.kernel_w;
    const int at = ((filter * task.channels + c) * task.kernel_h + i) * task.kernel_w + j;
    if (!kBack)
      to[k] = exists ? from[at] : T(0.f);
    else if (exists)
      to[at] = from[(filter * kPanel + e) * lines + line];
  }
}

template <class T>
RowsTask TaskOf(const Conv& c, const Rows& rows) {
  RowsTask task{};
  task.in_h = (int)c.in.h, task.in_w = (int)c.in.w, task.channels = (int)c.c;
  task.kernel_h = (int)c.kernel.h, task.kernel_w = (int)c.kernel.w;
  task.fold = (int)rows.fold, task.row_channels = (int)rows.channels;
  task.lines = (int)rows.conv.in.h, task.pad_h = (int)c.pad.h, task.pad_w = (int)c.pad.w;
  task.by_line = Divisor(rows.width * rows.Pixel() / kOf16Bytes<T>),
  task.by_lines = Divisor(rows.conv.in.h);
  task.by_pixel = Divisor(rows.Pixel()), task.by_channels = Divisor(rows.channels);
  return task;
}

template <class T>
void CopyRows(const Call& at, const Conv& c, const Rows& rows, const T* x, T* to) {
  const int64_t count = c.n * rows.strides[2] / kOf16Bytes<T>;
  const bool is_unit = rows.Pixel() == kOf16Bytes<T>;
  const auto kernel = is_unit && rows.fold == 1   ? CopyRowsKernel<T, 1>
                      : is_unit && rows.fold == 2 ? CopyRowsKernel<T, 2>
                                                  : CopyRowsKernel<T, 0>;
  Launch(at.op, kernel, Blocks(count), kThreads, 0, at.stream, TaskOf<T>(c, rows), x, to,
         (int)count);
}
int64_t NumelOfFilter(const Conv& rows) { return rows.o * rows.kernel.h * rows.c; }
template <bool kBack, class T>
void FilterRows(const Call& at, const Conv& c, const Rows& rows, const T* from, T* to) {
  const int64_t numel = NumelOfFilter(rows.conv);
  Launch(at.op, FilterRowsKernel<T, kBack>, Blocks(numel), kThreads, 0, at.stream,
         TaskOf<T>(c, rows), from, to, (int)rows.conv.kernel.h, (int)numel);
}

// ---- where positions lie ----

// An axis of a correlation whose kernel offsets go forward.
struct Ahead {
  PixelAxis positions;
  int64_t kernel_size, kernel_step, filter_first, filter_step;
};
Ahead AheadOf(const ConvAxis& axis) {
  const int64_t last = axis.kernel_size - 1;
  if (axis.kernel_step >= 0)
    return {{axis.count, axis.first, axis.step},
            axis.kernel_size,
            axis.kernel_step,
            axis.kernel_from,
            axis.kernel_by};
  return {{axis.count, axis.first + last * axis.kernel_step, axis.step},
          axis.kernel_size,
          -axis.kernel_step,
          axis.kernel_from + last * axis.kernel_by,
          -axis.kernel_by};
}

// How contiguous images lie.
std::array<int64_t, 3> Strides(HW image, int64_t channels) {
  return {channels, image.w * channels, Size(image) * channels};
}

template <class T>
int64_t PanelsOf(int64_t channels) {
  return CeilDiv(channels, kChannelsOfPanel<T>);
}

template <class T>
PixelLayout LayoutOf(const Ahead& h, const Ahead& w, int64_t channels, int64_t kernel_w) {
  PixelLayout layout{};
  layout.by_positions = Divisor(h.positions.count * w.positions.count);
  layout.by_width = Divisor(w.positions.count);
  layout.first_h = (int)h.positions.first, layout.first_w = (int)w.positions.first;
  layout.step_h = (int)h.positions.step, layout.step_w = (int)w.positions.step;
  layout.by_panels = Divisor(PanelsOf<T>(channels)), layout.by_kernel_w = Divisor(w.kernel_size);
  layout.kernel_step_h = (int)h.kernel_step, layout.kernel_step_w = (int)w.kernel_step;
  layout.filter_first = (int)(h.filter_first * kernel_w + w.filter_first);
  layout.filter_step_h = (int)(h.filter_step * kernel_w);
  layout.filter_step_w = (int)w.filter_step;
  return layout;
}

// ---- tilings ----

using Tilings = std::tuple<Tiling<1, 256, false, 2, 4, 128>, Tiling<2, 128, true, 1, 5, 128>,
                           Tiling<2, 64, true, 1, 8, 64>>;
// Measured on an H200, of ResNet-50's shapes.
constexpr hopper::TileTime kTimes[] = {{128, 256, 2, false, 0.66, 2.4, 0},
                                       {128, 128, 1, true, 0.39, 0.6, 0},
                                       {128, 64, 1, true, 0.32, 0.4, 0}};
static_assert(std::tuple_size_v<Tilings> == std::size(kTimes));

// True where a tiling makes sums of columns: its tiles are staged as a whole, and one consumer's
// sums are made beside the other's products.
constexpr bool MakesSums(int tiling) { return kTimes[tiling].ping_pong; }

// The fastest by `us(tiling)`, a Config.
template <class Estimate>
Config Fastest(const Call& at, const Estimate& estimate) {
  Config best{0, 0, 0, 1e30};
  for (int k = 0; k < (int)std::size(kTimes); k++) {
    if (at.tiling >= 0 && at.tiling != k) continue;
    const Config other = estimate(k);
    if (other.us < best.us) best = other;
  }
  return best;
}

// Of a product whose every tile is summed in as many equal parts as there are workers, which are
// added behind it.
Config InParts(const hopper::TileTime& time, const hopper::Extents& of, int multiprocessors,
               int index) {
  constexpr int64_t kLeastPanels = 4, kMostWaves = 2;
  constexpr double kAddUs = 4, kNbytesUs = 3e6;  // of parts, written and read
  const int64_t clusters = multiprocessors / time.cluster;
  const int64_t tiles =
      CeilDiv(CeilDiv(of.m, time.tile_m), time.cluster) * CeilDiv(of.n, time.tile_n);
  const int64_t most = std::max<int64_t>(
      1, std::min(of.panels / kLeastPanels, kMostWaves * std::max(clusters, tiles) / tiles));
  Config best{index, 0, 1, 1e30};
  for (int64_t parts = 1; parts <= most; parts++) {
    const double waves = (double)CeilDiv(tiles * parts, clusters);
    const double of_tile = (double)CeilDiv(of.panels, parts) * time.panel_us + time.tile_us;
    const double us = waves * of_tile + kAddUs + (double)(parts * of.m * of.n) * 8 / kNbytesUs;
    if (us < best.us) best = {index, 0, (int)parts, us};
  }
  return best;
}

// Calls launch(tiling) with that of a configuration.
template <class Run, size_t... k>
void WithTiling(const Config& config, const Run& run, std::index_sequence<k...>) {
  ((config.index == (int)k ? run(std::tuple_element_t<k, Tilings>{}) : void()), ...);
}
template <class Run>
void WithTiling(const Config& config, const Run& run) {
  WithTiling(config, run, std::make_index_sequence<std::tuple_size_v<Tilings>>());
}

template <class T>
CUtensorMap RowsMap(const Call& at, const void* data, int64_t cols, int64_t rows, int box_rows) {
  return BoxMap(at.op, kDtype<T>, data, cols, rows, cols, 1, box_rows);
}

// ---- products ----

template <class T>
struct Type {
  using type = T;
};

// True where CorrelateBlocks has a kernel: 64 filters that fit into shared memory, and images of
// whole blocks of 8 x 8 positions.
template <class T>
bool HasBlocks(const Correlation& c) {
  const Ahead h = AheadOf(c.h), w = AheadOf(c.w);
  const HW kernel{h.kernel_size, w.kernel_size};
  const auto serves = [](const Ahead& axis) {
    return axis.kernel_step == 1 && axis.positions.step == 1 && axis.positions.count % 8 == 0;
  };
  return sizeof(T) == 2 && c.UnitStride() && (kernel == HW{3, 3} || kernel == HW{4, 1}) &&
         serves(h) && serves(w) && c.in_channels <= 64 && c.out_channels == 64;
}

// A correlation as below, block by block: the pixels that a block meets are copied once for all
// kernel offsets.
template <class T, int kHeight, int kWidth>
void CorrelateBlocks(const Call& at, const Correlation& c, HW kernel, const T* x,
                     const std::array<int64_t, 3>& strides, const T* filter, T* out,
                     const PixelLayout& layout, const hopper::Params& params,
                     const Statistics* statistics, const GradientSums* sums) {
  using hopper::OfColumns;
  using Tile = std::tuple_element_t<2, Tilings>;
  const int64_t height = c.h.count, width = c.w.count, channels = c.out_channels;
  const std::array<int64_t, 4> extents{channels, width, height, c.images};
  const std::array<int64_t, 3> of_out{channels, width * channels, height * width * channels};
  const auto map_of = [&](const void* data, int lines) {
    return ArrayMap<4>(at.op, kDtype<T>, data, extents, of_out, {64, 8, lines, 1});
  };
  const auto with_blocks = [&](auto of) {
    (PixelLayout&)of = layout;
    of.by_across = Divisor(width / 8), of.by_down = Divisor(height / 8);
    return of;
  };
  const Config config{0, 0, 0, 0};
  const auto launch = [&](auto tile, auto source, const auto& of_source) {
    using Halo = decltype(tile);
    const hopper::Maps maps{
        ArrayMap<4>(at.op, kDtype<T>, x, {c.in_channels, c.in.w, c.in.h, c.images}, strides,
                    {64, Halo::kPixels, Halo::kLines, 1}),
        ArrayMap<3>(at.op, kDtype<T>, filter, {c.in_channels, Size(kernel), channels},
                    {c.in_channels, c.in_channels * Size(kernel)}, {64, 1, 64}),
        map_of(out, 2), params.side ? map_of(params.side, 2) : CUtensorMap{}};
    hopper::LaunchTiles<T, Halo, typename decltype(source)::type, false>(
        at.op, at.ctx, config, maps, params, of_source, at.stream);
  };
  using Halo = WithHalo<Tile, kHeight, kWidth, 4>;
  const int rows = statistics ? Halo::template kMomentsRows<T> : Halo::kRows;
  const int64_t groups = CeilDiv(params.m, rows);
  if (!statistics && !sums)
    return launch(Halo{}, Type<HaloCorrelation16<T, Halo, BlockLayout, OfColumns::kNothing>>(),
                  with_blocks(BlockLayout{}));
  const Scratch scratch(at.ctx, groups * params.n * (int64_t)sizeof(float2), at.stream);
  float2* const of_groups = (float2*)scratch.data();
  if (statistics) {
    using Layout = MomentsLayoutOf<BlockLayout>;
    Layout of_moments = with_blocks(Layout{});
    of_moments.moments = of_groups;
    launch(Halo{}, Type<HaloCorrelation16<T, Halo, Layout, OfColumns::kMoments>>(), of_moments);
    CombineMoments(at.op, at.ctx, of_groups, params.m, rows, params.n, statistics->mean,
                   statistics->variance, at.stream);
  } else if constexpr (kWidth > 1) {  // images of few channels have no gradient
    using Layout = SumsLayoutOf<BlockLayout>;
    using OfSums = WithHalo<Tiling<2, 64, true, 1, 5, 64, 2>, kHeight, kWidth, 3>;
    Layout of_sums = with_blocks(Layout{});
    of_sums.map_aux = map_of(sums->x, 8), of_sums.bits = sums->bits;
    of_sums.mean = sums->moments.mean, of_sums.sums = of_groups;
    launch(OfSums{}, Type<HaloCorrelation16<T, OfSums, Layout, OfColumns::kGradientSums>>(),
           of_sums);
    CombineSums(at.op, at.ctx, of_groups, groups, params.n, sums->moments, sums->dscale,
                sums->dbias, at.stream);
  }
}

// A part of a correlation: `filter` is (filters, kernel, channels) or, `across`, of one element and
// with sums, (channels, filters); of `out` positions every h.out_by-th and w.out_by-th is written.
// Statistics or sums are of all positions.
template <class T>
void Correlate(const Call& at, const Correlation& c, HW kernel, const T* x,
               const std::array<int64_t, 3>& strides, const T* filter, const T* bias, T* out,
               const Statistics* statistics = nullptr, const GradientSums* sums = nullptr,
               bool across = false) {
  const Ahead h = AheadOf(c.h), w = AheadOf(c.w);
  PixelLayout layout = LayoutOf<T>(h, w, c.in_channels, kernel.w);
  layout.as_pixels = !c.UnitStride();
  layout.out_step_w = (int)c.w.out_by, layout.out_step_h = (int)(c.h.out_by * c.out_hw.w);
  layout.out_step_n = (int)Size(c.out_hw);
  if (at.planes) layout.as_pixels = true, layout.out_step_n *= (int)c.out_channels;
  hopper::Params params{};
  params.m = (int)(c.images * c.Positions()), params.n = (int)c.out_channels, params.batch = 1;
  params.k_panels = (int)(c.KernelSize() * PanelsOf<T>(c.in_channels));
  const int64_t line = c.out_hw.w * c.out_channels;
  const int64_t position = c.h.out_from * c.out_hw.w + c.w.out_from;
  T* const first = out + position * (at.planes ? 1 : c.out_channels);
  params.c = first, params.bias = bias;
  params.aligned = Aligned16(bias), params.in_boxes = true;
  const hopper::Extents extents{params.m, params.n, params.k_panels, 1};
  if (sums) params.side = sums->addend;
  if constexpr (sizeof(T) == 2)
    if ((at.kernel == Kernel::kHeuristic || at.kernel == Kernel::kHalo) && HasBlocks<T>(c)) {
      params.k_panels = 1;
      const auto run = w.kernel_size == 3 ? CorrelateBlocks<T, 3, 3> : CorrelateBlocks<T, 4, 1>;
      return run(at, c, kernel, x, strides, filter, out, layout, params, statistics, sums);
    }
  const Config config = Fastest(at, [&](int k) {
    if (sums && !MakesSums(k)) return Config{k, 0, 0, INFINITY};
    const auto estimated = [&](bool may_split) {
      return hopper::Estimated(kTimes[k], extents, Multiprocessors(at.ctx.device_id), k, may_split);
    };
    const Config found = estimated(c.UnitStride());
    const bool any =
        !(statistics || sums || at.planes) || hopper::AllInBoxes(found, params.k_panels);
    return any ? found : estimated(false);
  });
  const PixelMapShape images{
      {c.in_channels, c.in.w, c.in.h, c.images}, strides, w.positions, h.positions};
  // The results of a phase, as images of their own.
  const PixelMapShape results{{c.out_channels, c.w.count, c.h.count, c.images},
                              {c.w.out_by * c.out_channels, c.h.out_by * line, c.out_hw.h * line},
                              {c.w.count, 0, 1},
                              {c.h.count, 0, 1}};
  WithTiling(config, [&](auto tiling) {
    using Tile = decltype(tiling);
    const std::array<int, 3> box{kChannelsOfPanel<T>, 1, Tile::kTileN / Tile::kCluster};
    const hopper::Maps maps{
        PixelMap(at.op, kDtype<T>, x, images, Tile::kTileM),
        across
            ? RowsMap<T>(at, filter, c.out_channels, c.in_channels, kChannelsOfPanel<T>)
            : ArrayMap<3>(at.op, kDtype<T>, filter, {c.in_channels, Size(kernel), c.out_channels},
                          {c.in_channels, c.in_channels * Size(kernel)}, box),
        sizeof(T) == 4 && !statistics && !sums ? CUtensorMap{}
        : layout.as_pixels ? PixelMap(at.op, kDtype<T>, first, results, kRowsOfBox)
                           : BoxMap(at.op, kDtype<T>, out, params.n, params.m, params.n, 1,
                                    kRowsOfBox, /*rounds=*/false),
        sizeof(T) == 2 && params.side ? RowsMap<T>(at, params.side, params.n, params.m, kRowsOfBox)
                                      : CUtensorMap{}};
    const auto launch = [&](auto tile, auto source, const auto& of_source) {
      hopper::LaunchTiles<T, decltype(tile), typename decltype(source)::type, false>(
          at.op, at.ctx, config, maps, params, of_source, at.stream);
    };
    if constexpr (sizeof(T) == 4)
      if (at.planes)
        return launch(tiling, Type<CorrelationToPlanes<T, Tile>>(),
                      PlanesLayout{layout, (int)Size(c.out_hw)});
    if (!statistics && !sums) return launch(tiling, Type<Correlation16<T, Tile>>(), layout);
    const int rows = statistics ? Tile::template kMomentsRows<T> : Tile::kRows;
    const int64_t groups = CeilDiv(params.m, rows);
    const Scratch scratch(at.ctx, groups * params.n * (int64_t)sizeof(float2), at.stream);
    float2* const of_groups = (float2*)scratch.data();
    if (statistics) {
      launch(tiling, Type<CorrelationWithMoments16<T, Tile>>(), MomentsLayout{layout, of_groups});
      CombineMoments(at.op, at.ctx, of_groups, params.m, rows, params.n, statistics->mean,
                     statistics->variance, at.stream);
    } else if constexpr (Tile::kPingPong) {
      using WithAux = hopper::WithAux<Tile>;
      const SumsLayout of_sums{layout, RowsMap<T>(at, sums->x, params.n, params.m, Tile::kTileM),
                               sums->bits, sums->moments.mean, of_groups};
      if (sizeof(T) == 2 && across)
        launch(WithAux{}, Type<CorrelationWithSums16<T, WithAux, sizeof(T) == 2>>(), of_sums);
      else
        launch(WithAux{}, Type<CorrelationWithSums16<T, WithAux, false>>(), of_sums);
      CombineSums(at.op, at.ctx, of_groups, groups, params.n, sums->moments, sums->dscale,
                  sums->dbias, at.stream);
    }
  });
}

// True where it is a GEMM as it lies.
bool IsGemm(const Conv& c) {
  return Size(c.kernel) == 1 && Size(c.stride) == 1 && c.pad == HW{0, 0} && c.in == c.out;
}

// C (m, n) = op(A) op(B); the images of a 1 x 1 convolution are matrices (positions, channels).
template <class T>
void Multiply(const Call& at, int64_t m, int64_t n, int64_t k, const T* a, bool trans_a, const T* b,
              bool trans_b, const T* bias, T* c) {
  HopperGemm gemm{a, b, c, m, n, k, 1, trans_a, trans_b, kDtype<T>, false, at.ctx};
  gemm.bias = bias;
  if (at.tiling >= 0 && !HopperFits(gemm, at.tiling))
    FailWith(DL_NOT_APPLICABLE, "%s: this tiling of implicit gemm has no kernel of %s; use %s",
             at.op, DtypeText(kDtype<T>), "implicit gemm");
  RunHopperGemm(at.op, gemm, at.stream, at.tiling);
}

__global__ void ZeroKernel(float4* x, int64_t count) {
  for (int64_t i = FirstItem(); i < count; i += ItemStep()) x[i] = float4{};
}

// The axes of a forward pass, which a filter gradient goes through as well.
struct ForwardAxes {
  Ahead h, w;
  explicit ForwardAxes(const Conv& c)
      : h(AheadOf(ForwardAxis(c.out.h, c.kernel.h, c.stride.h, c.pad.h, c.dilation.h))),
        w(AheadOf(ForwardAxis(c.out.w, c.kernel.w, c.stride.w, c.pad.w, c.dilation.w))) {}
};

// The columns of the filter's gradient, channels padded to panels.
template <class T>
int64_t Columns(const Conv& c) {
  return Size(c.kernel) * PanelsOf<T>(c.c) * kChannelsOfPanel<T>;
}
// Positions in panels.
template <class T>
int64_t Depth(const Conv& c) {
  return CeilDiv(c.n * Size(c.out), kChannelsOfPanel<T>);
}
// Of a product for the filter's gradient, in as many parts as there are workers.
template <class T>
hopper::Params ParamsOf(const Conv& c, const Config& config, int64_t m, int64_t n, float* parts) {
  hopper::Params params{};
  params.m = (int)m, params.n = (int)n;
  params.batch = config.workers;
  params.k_panels = (int)CeilDiv(Depth<T>(c), config.workers);
  params.c = parts, params.aligned = params.in_boxes = true;
  return params;
}
template <class T>
Config BestInParts(const Call& at, const Conv& c, int64_t m, int64_t n) {
  constexpr double kFromRegisters = sizeof(T) == 4 ? 1.2 : 1;  // A, which tf32 has read across K
  return Fastest(at, [&](int k) {
    hopper::TileTime time = kTimes[k];
    time.panel_us *= kFromRegisters;
    return InParts(time, {m, n, Depth<T>(c), 1}, Multiprocessors(at.ctx.device_id), k);
  });
}

template <class T, bool kSwapped>
void MultiplyByPixels(const Call& at, const Conv& c, const Config& config, const T* x,
                      const std::array<int64_t, 3>& strides, const T* dy, float* parts) {
  const ForwardAxes axes(c);
  const PixelLayout layout = LayoutOf<T>(axes.h, axes.w, c.c, c.kernel.w);
  const int64_t positions = c.n * Size(c.out), cols = Columns<T>(c);
  const hopper::Params params =
      ParamsOf<T>(c, config, kSwapped ? cols : c.o, kSwapped ? c.o : cols, parts);
  const PixelMapShape images{
      {c.c, c.in.w, c.in.h, c.n}, strides, axes.w.positions, axes.h.positions};
  WithTiling(config, [&](auto tiling) {
    using Tile = decltype(tiling);
    const CUtensorMap pixels = PixelMap(at.op, kDtype<T>, x, images, kChannelsOfPanel<T>);
    const CUtensorMap rows = RowsMap<T>(at, dy, c.o, positions, kChannelsOfPanel<T>);
    const hopper::Maps maps{kSwapped ? pixels : rows, kSwapped ? rows : pixels, {}, {}};
    hopper::LaunchTiles<T, Tile, FilterGradient16<T, Tile, kSwapped>, false>(
        at.op, at.ctx, {config.index, 0, 0, 0}, maps, params, layout, at.stream);
  });
}

// The gradient of a filter of images with these strides.
template <class T>
void GradientInParts(const Call& at, const Conv& c, const T* x,
                     const std::array<int64_t, 3>& strides, const T* dy, T* df) {
  const int64_t cols = Columns<T>(c), pitch = cols / Size(c.kernel);
  const Config plain = BestInParts<T>(at, c, c.o, cols);
  const Config swapped = BestInParts<T>(at, c, cols, c.o);
  const bool is_swapped = swapped.us < plain.us;
  const Config& config = is_swapped ? swapped : plain;
  const auto halo = HaloConfigOf(c, Multiprocessors(at.ctx.device_id));
  if (at.kernel == Kernel::kHalo ||
      (at.kernel == Kernel::kHeuristic && halo && halo->us < config.us)) {
    const Scratch parts(at.ctx, halo->parts * c.o * cols * (int64_t)sizeof(float), at.stream);
    HaloGradient(at, c, *halo, x, strides, dy, parts.floats());
    return AddParts(at, c, halo->parts, pitch, false, parts.floats(), df);
  }
  const Scratch parts(at.ctx, config.workers * c.o * cols * (int64_t)sizeof(float), at.stream);
  if (is_swapped)
    MultiplyByPixels<T, true>(at, c, config, x, strides, dy, parts.floats());
  else
    MultiplyByPixels<T, false>(at, c, config, x, strides, dy, parts.floats());
  AddParts(at, c, config.workers, pitch, is_swapped, parts.floats(), df);
}

// ---- the gradient of a filter in float32 ----

// `to` (channels, pitch) of x (n, h, w, channels) at the positions of a filter of one element, and
// zeros behind them.
struct TransposeTask {
  const float* x;
  float* to;
  int64_t positions, pitch;
  int channels, in_h, in_w, strips;
  bool gathers;  // positions are not all pixels in their order
  PixelLayout layout;

  // The pixel of a position, or -1 where it is padding.
  __device__ __forceinline__ int64_t PixelAt(int64_t position) const {
    if (position >= positions) return -1;
    if (!gathers) return position;
    const PixelLayout::Pixel p = layout.At((int)position);
    if ((unsigned)p.h >= (unsigned)in_h || (unsigned)p.w >= (unsigned)in_w) return -1;
    return ((int64_t)p.n * in_h + p.h) * in_w + p.w;
  }
};

// A block takes a strip of positions of 64 channels, in tiles of 64 x 64 and accesses of 16 bytes.
// Memory bandwidth limits it.
__global__ void __launch_bounds__(kThreads)
    TransposeKernel(const __grid_constant__ TransposeTask task) {
  constexpr int kTile = 64, kQuads = kTile / 4, kLines = kThreads / kQuads,
                kAtOnce = kTile / kLines;
  __shared__ float tile[kTile][kTile + 1];  // (positions, channels)
  const int quad = (int)threadIdx.x % kQuads, line = (int)threadIdx.x / kQuads;
  const int64_t tiles = CeilDiv(task.pitch, kTile);
  const int channel0 = (int)blockIdx.x / task.strips * kTile, strip = (int)blockIdx.x % task.strips;
  const int64_t end = tiles * (strip + 1) / task.strips;
  for (int64_t t = tiles * strip / task.strips; t < end; t++) {
    float4 v[kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; u++) {
      const int64_t pixel = task.PixelAt(t * kTile + line + u * kLines);
      const int channel = channel0 + quad * 4;
      v[u] = make_float4(0.f, 0.f, 0.f, 0.f);
      if (pixel >= 0 && channel < task.channels)
        v[u] = *(const float4*)(task.x + pixel * task.channels + channel);
    }
    __syncthreads();  // the tile has been read
#pragma unroll
    for (int u = 0; u < kAtOnce; u++) {
      float* const at = &tile[line + u * kLines][quad * 4];
      at[0] = v[u].x, at[1] = v[u].y, at[2] = v[u].z, at[3] = v[u].w;
    }
    __syncthreads();
    const int k = quad * 4;
    const int64_t at = t * kTile + quad * 4;
#pragma unroll
    for (int u = 0; u < kAtOnce; u++) {
      const int c = line + u * kLines;
      if (channel0 + c < task.channels && at < task.pitch)
        *(float4*)(task.to + (channel0 + c) * task.pitch + at) =
            make_float4(tile[k][c], tile[k + 1][c], tile[k + 2][c], tile[k + 3][c]);
    }
  }
}

// Elements between the channels of the copy: panels that are whole.
int64_t PitchOf(const Conv& c) { return RoundUp(c.n * Size(c.out), 32); }

// `gathered` where x is images that a filter of one element meets, else it is dy.
void Transpose(const Call& at, const Conv& c, const float* x, int64_t channels, bool gathered,
               float* to) {
  constexpr int64_t kTile = 64;
  TransposeTask task{};
  task.x = x, task.to = to, task.positions = c.n * Size(c.out), task.pitch = PitchOf(c);
  task.channels = (int)channels, task.in_h = (int)c.in.h, task.in_w = (int)c.in.w;
  task.gathers = gathered && !IsGemm(c);
  if (gathered) {
    const ForwardAxes axes(c);
    task.layout = LayoutOf<float>(axes.h, axes.w, c.c, c.kernel.w);
  }
  const int64_t rows = CeilDiv(channels, kTile), wanted = 8 * Multiprocessors(at.ctx.device_id);
  task.strips = (int)std::min(CeilDiv(task.pitch, kTile), CeilDiv(wanted, rows));
  Launch(at.op, TransposeKernel, (unsigned)(rows * task.strips), kThreads, 0, at.stream, task);
}

// `to` (channels, pitch) of images (n, channels, plane), and zeros behind their positions: four
// elements a thread, which lie side by side in an image where kAligned.
template <bool kAligned>
__global__ void __launch_bounds__(kThreads)
    CopyPlanesKernel(const float* x, float* to, int n, int channels, int plane, Divisor by_plane,
                     Divisor by_quads, int quads) {
  for (int k = (int)FirstItem(); k < quads; k += (int)ItemStep()) {
    const int channel = k / by_quads, first = (k - channel * (int)by_quads.value) * 4;
    const auto from = [&](int position) {
      const int image = position / by_plane;
      return x + ((int64_t)image * channels + channel) * plane + position -
             image * (int)by_plane.value;
    };
    float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
    if (kAligned) {
      if (first < n * plane) v = *(const float4*)from(first);
    } else {
      if (first < n * plane) v.x = *from(first);
      if (first + 1 < n * plane) v.y = *from(first + 1);
      if (first + 2 < n * plane) v.z = *from(first + 2);
      if (first + 3 < n * plane) v.w = *from(first + 3);
    }
    ((float4*)to)[k] = v;
  }
}

// The copy of dy where that has its channels first.
void CopyPlanes(const Call& at, const Conv& c, const float* dy, float* to) {
  const int64_t plane = Size(c.out), quads = PitchOf(c) / 4, count = c.o * quads;
  const auto kernel = plane % 4 ? CopyPlanesKernel<false> : CopyPlanesKernel<true>;
  Launch(at.op, kernel, Blocks(count), kThreads, 0, at.stream, dy, to, (int)c.n, (int)c.o,
         (int)plane, Divisor(plane), Divisor(quads), (int)count);
}

// One operand lies along K as a copy: with kPixels dy, else x.
template <bool kPixels>
void MultiplyByCopy(const Call& at, const Conv& c, const Config& config, const float* x,
                    const std::array<int64_t, 3>& strides, const float* dy, float* parts) {
  const ForwardAxes axes(c);
  const PixelLayout layout = LayoutOf<float>(axes.h, axes.w, c.c, c.kernel.w);
  const int64_t positions = c.n * Size(c.out), pitch = PitchOf(c), channels = kPixels ? c.o : c.c;
  const Scratch copy(at.ctx, channels * pitch * (int64_t)sizeof(float), at.stream);
  if (kPixels && at.planes)
    CopyPlanes(at, c, dy, copy.floats());
  else
    Transpose(at, c, kPixels ? dy : x, channels, !kPixels, copy.floats());
  const hopper::Params params =
      ParamsOf<float>(c, config, kPixels ? Columns<float>(c) : c.o, channels, parts);
  const PixelMapShape images{
      {c.c, c.in.w, c.in.h, c.n}, strides, axes.w.positions, axes.h.positions};
  WithTiling(config, [&](auto tiling) {
    using Tile = decltype(tiling);
    constexpr int kPanel = kChannelsOfPanel<float>;
    const hopper::Maps maps{kPixels ? PixelMap(at.op, kDtype<float>, x, images, kPanel)
                                    : RowsMap<float>(at, dy, c.o, positions, kPanel),
                            BoxMap(at.op, kDtype<float>, copy.data(), pitch, channels, pitch, 1,
                                   Tile::kTileN / Tile::kCluster),
                            {},
                            {}};
    hopper::LaunchTiles<float, Tile, FilterGradient32<Tile, kPixels>, false>(
        at.op, at.ctx, {config.index, 0, 0, 0}, maps, params, layout, at.stream);
  });
}

// Microseconds of the copy.
double TransposeUs(const Conv& c, int64_t channels) {
  constexpr double kCopyUs = 4, kNbytesUs = 3e6;
  return kCopyUs + 8. * (double)(channels * PitchOf(c)) / kNbytesUs;
}

// Microseconds of moving the channels of images last.
double MoveUs(int64_t numel) {
  constexpr double kMoveUs = 3, kNbytesUs = 3e6;
  return kMoveUs + 8. * (double)numel / kNbytesUs;
}

// How the gradient of a filter is computed: by mma or by wgmma, which reads a copy; `swapped` with
// the columns along M, whose copy is of dy, else of x. That copy alone reads a dy whose channels
// are first.
struct GradientConfig {
  Config config;
  bool by_mma, swapped;
  double us;

  bool CopiesGradient() const { return !by_mma && swapped; }
};

// Measured on an H100, with the tiles of channels_last/wgrad.cuh.
constexpr hopper::TileTime kMmaTimes[] = {{64, 64, 1, false, 0.3, 1, 0},
                                          {64, 128, 1, false, 0.46, 2, 0},
                                          {64, 256, 1, false, 0.72, 2, 0},
                                          {128, 256, 1, false, 1.12, 3, 0}};
static_assert(std::size(kMmaTimes) == kWgradTiles);

GradientConfig BestByMma(const Call& at, const Conv& c, double memory_us) {
  const int64_t cols = Columns<float>(c);
  GradientConfig best{{0, 0, 0, 1e30}, true, false, 1e30};
  for (const bool swapped : {false, true}) {
    for (int k = 0; k < kWgradTiles; k++) {
      if (at.kernel == Kernel::kMma && at.tiling >= 0 && at.tiling != k) continue;
      const hopper::Extents of{swapped ? cols : c.o, swapped ? c.o : cols, Depth<float>(c), 1};
      const Config config = InParts(kMmaTimes[k], of, Multiprocessors(at.ctx.device_id), k);
      if (config.us < best.us) best = {config, true, swapped, config.us};
    }
  }
  best.us = std::max(best.us, memory_us);
  return best;
}

// Of a filter of one element the copy may be of x.
GradientConfig BestByWgmma(const Call& at, const Conv& c, double memory_us) {
  const Config pixels = BestInParts<float>(at, c, Columns<float>(c), c.o);
  GradientConfig best{pixels, false, true, std::max(pixels.us, memory_us) + TransposeUs(c, c.o)};
  if (Size(c.kernel) > 1) return best;
  const Config rows = BestInParts<float>(at, c, c.o, c.c);
  const double moved = at.planes ? MoveUs(c.n * c.o * Size(c.out)) : 0;
  const double us = std::max(rows.us, memory_us) + TransposeUs(c, c.c) + moved;
  return us < best.us ? GradientConfig{rows, false, false, us} : best;
}

GradientConfig ConfigOfGradient(const Call& at, const Conv& c) {
  constexpr double kNbytesUs = 3.6e6;
  const int64_t read =
      c.n * (std::min(Size(c.in), Size(c.out) * Size(c.kernel)) * c.c + Size(c.out) * c.o);
  const double memory_us = (double)read * sizeof(float) / kNbytesUs;
  if (at.kernel == Kernel::kMma) return BestByMma(at, c, memory_us);
  const GradientConfig by_wgmma = BestByWgmma(at, c, memory_us);
  if (at.kernel == Kernel::kWgmma) return by_wgmma;
  GradientConfig by_mma = BestByMma(at, c, memory_us);
  if (at.planes) by_mma.us += MoveUs(c.n * c.o * Size(c.out));
  return by_mma.us < by_wgmma.us ? by_mma : by_wgmma;
}

void MultiplyByMma(const Call& at, const Conv& c, const GradientConfig& by, const float* x,
                   const std::array<int64_t, 3>& strides, const float* dy, float* parts) {
  const ForwardAxes axes(c);
  const int64_t positions = c.n * Size(c.out), cols = Columns<float>(c);
  const PixelMapShape images{
      {c.c, c.in.w, c.in.h, c.n}, strides, axes.w.positions, axes.h.positions};
  WgradTask task{};
  task.m = (int)(by.swapped ? cols : c.o), task.n = (int)(by.swapped ? c.o : cols);
  task.panels = (int)Depth<float>(c), task.splits = by.config.workers;
  if (!IsGemm(c)) task.pixels = by.swapped ? Pixels::kA : Pixels::kB;
  task.layout = LayoutOf<float>(axes.h, axes.w, c.c, c.kernel.w), task.parts = parts;
  constexpr int kPanel = kChannelsOfPanel<float>;
  const CUtensorMap of_x = IsGemm(c) ? RowsMap<float>(at, x, c.c, positions, kPanel)
                                     : PixelMap(at.op, kDtype<float>, x, images, kPanel);
  const CUtensorMap of_dy = RowsMap<float>(at, dy, c.o, positions, kPanel);
  MultiplyAcross(at.op, at.stream, by.config.index, by.swapped ? of_x : of_dy,
                 by.swapped ? of_dy : of_x, task);
}

void GradientInParts(const Call& at, const Conv& c, const float* x,
                     const std::array<int64_t, 3>& strides, const float* dy, float* df) {
  const GradientConfig by = ConfigOfGradient(at, c);
  const int64_t padded = Columns<float>(c) / Size(c.kernel);
  const int64_t pitch = by.by_mma || by.swapped ? padded : c.c;
  const int64_t numel = by.config.workers * c.o * Size(c.kernel) * pitch;
  const Scratch parts(at.ctx, numel * (int64_t)sizeof(float), at.stream);
  std::optional<Scratch> moved;
  if (at.planes && !by.CopiesGradient()) {
    moved.emplace(at.ctx, c.n * c.o * Size(c.out) * (int64_t)sizeof(float), at.stream);
    SwapAxes(at, dy, c.n, c.o, Size(c.out), moved->floats());
    dy = moved->floats();
  }
  if (by.by_mma)
    MultiplyByMma(at, c, by, x, strides, dy, parts.floats());
  else if (by.swapped)
    MultiplyByCopy<true>(at, c, by.config, x, strides, dy, parts.floats());
  else
    MultiplyByCopy<false>(at, c, by.config, x, strides, dy, parts.floats());
  AddParts(at, c, by.config.workers, pitch, by.swapped, parts.floats(), df);
}

const char* MapError(const Ahead& h, const Ahead& w, int64_t n, HW image, int64_t channels) {
  const int64_t reach = std::max(h.kernel_size * h.kernel_step, w.kernel_size * w.kernel_step);
  return PixelMapError(
      {{channels, image.w, image.h, n}, Strides(image, channels), w.positions, h.positions}, reach);
}

}  // namespace

template <size_t kCount>
static std::vector<std::string> NamesOf(const hopper::TileTime (&times)[kCount]) {
  std::vector<std::string> names;
  for (const hopper::TileTime& time : times)
    names.push_back(std::to_string(time.tile_m) + "x" + std::to_string(time.tile_n));
  return names;
}
std::vector<std::string> WgmmaTilings() { return NamesOf(kTimes); }
std::vector<std::string> WgradTilings() { return NamesOf(kMmaTimes); }

// True where images are read once for all kernel offsets.
template <class T>
static bool HasHalo(const Conv& c, Pass pass, int multiprocessors) {
  if (pass == Pass::kFilterGradient)
    return sizeof(T) == 2 && HaloConfigOf(c, multiprocessors).has_value();
  if (pass == Pass::kForward)
    return HasBlocks<T>(dlsys::Forward(c, nullptr, nullptr, nullptr, nullptr));
  return Size(c.stride) == 1 && HasBlocks<T>(dlsys::DataGradient(c, nullptr, nullptr, nullptr, 0));
}

template <class T>
const char* HopperRefusal(const Call& at, const Conv& conv, Pass pass, const T* x, const T* f,
                          const T* y) {
  const char* error = HopperDeviceError(at.ctx.device_id);
  if (*error) return error;
  if (at.kernel == Kernel::kGemm && !IsGemm(conv)) return "it is for 1 x 1 filters at stride 1";
  if (conv.groups > 1) return "it has no groups";
  if (!Aligned16(x) || !Aligned16(f) || !Aligned16(y)) return "it takes arrays at 16 bytes";
  if (Size(conv.kernel) > kMostOffsets) return "it takes filters of at most 256 elements";
  constexpr int64_t kUnit = kOf16Bytes<T>;
  const bool of_data = pass == Pass::kDataGradient;
  const bool by_unit = conv.c % kUnit == 0 && conv.o % kUnit == 0;
  const auto rows = of_data || by_unit ? std::nullopt : Rows::Of<T>(conv);
  if (!by_unit && !rows)
    return kUnit == 8 ? "it takes channels and filters by eight"
                      : "it takes channels and filters by four";
  const Conv& c = rows ? rows->conv : conv;
  if (at.kernel == Kernel::kHalo && !HasHalo<T>(c, pass, Multiprocessors(at.ctx.device_id)))
    return "it is for filters of 3 x 3 elements at stride 1 in 16 bits and, beside their gradient, "
           "for 64 of them over at most 64 channels and whole blocks of 8 x 8 positions";
  if (of_data) {
    for (int64_t phase = 0; !*error && phase < Size(c.stride); phase++) {
      const Correlation part = dlsys::DataGradient(c, nullptr, nullptr, nullptr, phase);
      if (part.Positions() * part.KernelSize() > 0)
        error = MapError(AheadOf(part.h), AheadOf(part.w), c.n, c.out, c.o);
    }
  } else {
    const ForwardAxes axes(c);
    error = MapError(axes.h, axes.w, c.n, c.in, c.c);
  }
  return *error ? error : nullptr;
}

namespace {

// Microseconds of a pass in float32.
double Float32Us(const Call& at, const ConvWork& work) {
  constexpr double kLaunchUs = 3, kNbytesUs = 3.6e6;
  const auto rows = work.conv.c % kOf16Bytes<float> ? Rows::Of<float>(work.conv) : std::nullopt;
  const Conv& c = rows ? rows->conv : work.conv;
  const double copied = rows ? 4. * (double)(c.n * rows->strides[2]) : 0;
  const double memory = (AllBytes(work.conv) + 3 * copied) / kNbytesUs;
  if (work.pass == Pass::kFilterGradient)
    return kLaunchUs + std::max(memory, ConfigOfGradient(at, c).us);
  const bool forward = work.pass == Pass::kForward;
  const int64_t in = forward ? c.c : c.o, out = forward ? c.o : c.c;
  // The phases of a data gradient share the kernel offsets among them.
  const int64_t phases = forward ? 1 : std::min(Size(c.stride), Size(c.kernel));
  const int64_t positions = c.n * (forward ? Size(c.out) : CeilDiv(Size(c.in), Size(c.stride)));
  const int64_t panels = CeilDiv(Size(c.kernel) * PanelsOf<float>(in), phases);
  const Config config = Fastest(at, [&](int k) {
    return hopper::Estimated(kTimes[k], {positions, out, panels, 1}, work.multiprocessors, k);
  });
  return (1. + (double)phases) * kLaunchUs + std::max(memory, (double)phases * config.us);
}

}  // namespace

double PlanesUs(const ConvWork& work) {
  const Conv& c = work.conv;
  Call at{"conv2d", {work.device, DL_GPU}, nullptr};
  at.planes = true;
  const float* const none = nullptr;
  if (!work.tf32 || c.c % kOf16Bytes<float> || HopperRefusal(at, c, work.pass, none, none, none))
    return kNever;
  const int64_t images = c.n * c.c * Size(c.in), results = c.n * c.o * Size(c.out);
  const double moves = !work.Is(Pass::kDataGradient) ? MoveUs(images)
                       : Size(c.stride) == 1         ? MoveUs(results)
                                                     : MoveUs(results) + MoveUs(images);
  return moves + Float32Us(at, work);
}

bool PaysInFloat32(DLContext ctx, const Conv& conv) {
  const Call at{"conv2d", ctx, nullptr};
  const float* const none = nullptr;
  if (HopperRefusal(at, conv, Pass::kForward, none, none, none) ||
      HopperRefusal(at, conv, Pass::kFilterGradient, none, none, none))
    return false;
  double last = 0, first = 0;
  for (const Pass pass : {Pass::kForward, Pass::kDataGradient, Pass::kFilterGradient}) {
    if (HopperRefusal(at, conv, pass, none, none, none)) continue;
    const ConvWork work{conv, pass, true, Multiprocessors(ctx.device_id), ctx.device_id};
    last += Float32Us(at, work);
    const double pointwise = IsGemm(conv)             ? BatchedUs(work)
                             : Size(conv.kernel) == 1 ? CompactUs(work)
                                                      : kNever;
    first += std::min({FmaUs(work), MmaUs(work), PlanesUs(work), pointwise});
  }
  // Among others whose channels are last its images and their gradients would be transposed; images
  // of few channels, which are copied, have no others before them.
  const bool is_first = conv.c % kOf16Bytes<float>;
  const double images = is_first ? 0 : MoveUs(conv.n * conv.c * Size(conv.in));
  return last < first + 2 * (images + MoveUs(conv.n * conv.o * Size(conv.out)));
}

template <class T>
void ForwardOnHopper(const Call& at, const Conv& c, const T* x, const T* f, const T* bias, T* y,
                     const Statistics* statistics) {
  if (at.kernel == Kernel::kGemm) {
    Multiply<T>(at, c.n * Size(c.in), c.o, c.c, x, false, f, true, bias, y);
    if (statistics)
      ChannelStatistics(at.op, at.ctx, y, Channels(c.n * Size(c.out), c.o, 1), statistics->mean,
                        statistics->variance, at.stream);
    return;
  }
  if (const auto rows = c.c % kOf16Bytes<T> ? Rows::Of<T>(c) : std::nullopt) {
    const Scratch images(at.ctx, c.n * rows->strides[2] * (int64_t)sizeof(T), at.stream);
    const Scratch filter(at.ctx, NumelOfFilter(rows->conv) * (int64_t)sizeof(T), at.stream);
    CopyRows(at, c, *rows, x, (T*)images.data());
    FilterRows<false>(at, c, *rows, f, (T*)filter.data());
    return Correlate(at, dlsys::Forward(rows->conv, nullptr, nullptr, nullptr, nullptr),
                     rows->conv.kernel, (const T*)images.data(), rows->strides,
                     (const T*)filter.data(), bias, y, statistics);
  }
  const Correlation correlation = dlsys::Forward(c, nullptr, nullptr, nullptr, nullptr);
  const int64_t kernel = Size(c.kernel);
  const std::array<int64_t, 3> strides = Strides(c.in, c.c);
  if (kernel == 1) return Correlate(at, correlation, c.kernel, x, strides, f, bias, y, statistics);
  const Scratch filter(at.ctx, c.o * c.c * kernel * (int64_t)sizeof(T), at.stream);
  MoveChannels(at, c, f, (T*)filter.data());
  Correlate(at, correlation, c.kernel, x, strides, (const T*)filter.data(), bias, y, statistics);
}

template <class T>
void DataGradientOnHopper(const Call& at, const Conv& c, const T* f, const T* dy, T* dx,
                          const GradientSums* sums) {
  // The GEMM reads the filter as it lies.
  if (at.kernel != Kernel::kWgmma && IsGemm(c) && !sums && !at.planes)
    return Multiply<T>(at, c.n * Size(c.in), c.c, c.o, dy, false, f, false, nullptr, dx);
  if (sizeof(T) == 2 && IsGemm(c) && sums)
    return Correlate<T>(at, dlsys::DataGradient(c, nullptr, nullptr, nullptr, 0), c.kernel, dy,
                        Strides(c.out, c.o), f, nullptr, dx, nullptr, sums, true);
  const Scratch filter(at.ctx, c.o * c.c * Size(c.kernel) * (int64_t)sizeof(T), at.stream);
  SwapAxes(at, f, 1, c.o, c.c * Size(c.kernel), (T*)filter.data());  // (channels, kernel, filters)
  std::vector<Correlation> parts;
  bool meets_all = true;
  for (int64_t phase = 0; phase < Size(c.stride); phase++) {
    const Correlation part = dlsys::DataGradient(c, nullptr, nullptr, nullptr, phase);
    if (part.Positions() == 0) continue;
    if (part.KernelSize() > 0)
      parts.push_back(part);
    else
      meets_all = false;
  }
  if (!meets_all) {
    const int64_t count = c.n * Size(c.in) * c.c * (int64_t)sizeof(T) / (int64_t)sizeof(float4);
    Launch(at.op, ZeroKernel, Blocks(count), kThreads, 0, at.stream, (float4*)dx, count);
  }
  for (const Correlation& part : parts)
    Correlate<T>(at, part, c.kernel, dy, Strides(c.out, c.o), (const T*)filter.data(), nullptr, dx,
                 nullptr, sums);
}

bool HopperMakesSums(const Conv& c, const GradientSums& sums) {
  return Size(c.stride) == 1 && c.c % 64 == 0 && Aligned16(sums.x) && Aligned16(sums.addend) &&
         Aligned16(sums.bits) && Aligned16(sums.moments.mean);
}

template <class T>
void FilterGradientOnHopper(const Call& at, const Conv& c, const T* x, const T* dy, T* df) {
  if (at.kernel == Kernel::kGemm)
    return Multiply<T>(at, c.o, c.c, c.n * Size(c.in), dy, true, x, false, nullptr, df);
  const auto rows = c.c % kOf16Bytes<T> ? Rows::Of<T>(c) : std::nullopt;
  if (!rows) return GradientInParts(at, c, x, Strides(c.in, c.c), dy, df);
  const Scratch images(at.ctx, c.n * rows->strides[2] * (int64_t)sizeof(T), at.stream);
  const Scratch made(at.ctx, NumelOfFilter(rows->conv) * (int64_t)sizeof(T), at.stream);
  CopyRows(at, c, *rows, x, (T*)images.data());
  GradientInParts(at, rows->conv, (const T*)images.data(), rows->strides, dy, (T*)made.data());
  FilterRows<true>(at, c, *rows, (const T*)made.data(), df);
}

#define DLSYS_ON_HOPPER(T)                                                                  \
  template const char* HopperRefusal(const Call&, const Conv&, Pass, const T*, const T*,    \
                                     const T*);                                             \
  template void ForwardOnHopper(const Call&, const Conv&, const T*, const T*, const T*, T*, \
                                const Statistics*);                                         \
  template void DataGradientOnHopper(const Call&, const Conv&, const T*, const T*, T*,      \
                                     const GradientSums*);                                  \
  template void FilterGradientOnHopper(const Call&, const Conv&, const T*, const T*, T*)
DLSYS_ON_HOPPER(bfloat16);
DLSYS_ON_HOPPER(float16);
DLSYS_ON_HOPPER(float);
#undef DLSYS_ON_HOPPER

}  // namespace channels_last
}  // namespace cuda
}  // namespace dlsys
