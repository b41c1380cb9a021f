// Launches of convolution by wgmma and TMA: tensor maps of images and filters, a cost model that
// picks the tile, and copies that move a filter's channels last and back. channels_last_hopper.cuh
// has the contract, gemm/hopper_kernel.cuh the kernel. A data gradient at a stride is one launch
// for each phase that meets the filter, whose results are stored between those of others. Tensor
// cores limit filters of several elements, memory bandwidth most of one.
#include <algorithm>
#include <optional>
#include <tuple>

#include "cuda/conv/channels_last_hopper.cuh"
#include "cuda/conv/channels_last_sources.cuh"
#include "cuda/gemm/hopper.cuh"
#include "cuda/gemm/hopper_launch.cuh"

namespace dlsys {
namespace cuda {
namespace channels_last {
namespace {

using hopper::Config;
using hopper::Tiling;

// ---- filters ----

constexpr int kRun = 64;  // channels that a block moves
constexpr int64_t kMostOffsets = 256;

// y (filters, kernel, channels) = x (filters, channels, kernel), or, `back`, x from y; the channels
// of y are `pitch` elements apart.
template <class T, bool kBack>
__global__ void __launch_bounds__(kThreads)
    MoveChannelsKernel(const T* from, T* to, int channels, int pitch, int kernel, Divisor by_kernel,
                       Divisor by_runs) {
  T* tile = DynamicShared<T>();  // (kernel, kRun), in rows that begin at other banks
  constexpr int kRow = kRun + 2;
  const int filter = (int)blockIdx.x / by_runs;
  const int c0 = ((int)blockIdx.x - filter * (int)by_runs.value) * kRun;
  const int count = min(kRun, channels - c0) * kernel;
  const int64_t first = (int64_t)filter * channels * kernel + c0 * kernel;
  const int64_t last = (int64_t)filter * kernel * pitch + c0;
  for (int k = (int)threadIdx.x; k < (kBack ? kRun * kernel : count); k += kThreads) {
    if constexpr (kBack) {
      if (c0 + k % kRun < channels)
        tile[k / kRun * kRow + k % kRun] = from[last + (int64_t)(k / kRun) * pitch + k % kRun];
    } else {
      const int c = k / by_kernel;
      tile[(k - c * kernel) * kRow + c] = from[first + k];
    }
  }
  __syncthreads();
  for (int k = (int)threadIdx.x; k < (kBack ? count : kRun * kernel); k += kThreads) {
    if constexpr (kBack) {
      const int c = k / by_kernel;
      to[first + k] = tile[(k - c * kernel) * kRow + c];
    } else if (c0 + k % kRun < channels) {
      to[last + (int64_t)(k / kRun) * pitch + k % kRun] = tile[k / kRun * kRow + k % kRun];
    }
  }
}

template <bool kBack, class T>
void MoveChannels(const Call& at, const Conv& c, int64_t pitch, const T* from, T* to) {
  const int64_t kernel = Size(c.kernel), runs = CeilDiv(c.c, kRun);
  const size_t nbytes = (size_t)(kernel * (kRun + 2)) * sizeof(T);
  Launch(at.op, MoveChannelsKernel<T, kBack>, (unsigned)(c.o * runs), kThreads, nbytes, at.stream,
         from, to, (int)c.c, (int)pitch, (int)kernel, Divisor(kernel), Divisor(runs));
}

// ---- images of few channels ----

// The pixels that a filter's row meets lie side by side, so images of few channels are convolved as
// rows of them: images (n, h, out.w, 64), each pixel all that a row of the filter reads, by a
// filter of one column. Pixels overlap: they are a map of strides over a copy (n, h, width, pixel),
// padded with zeros on the left, and each pixel too.
struct Rows {
  int64_t pixel, line;  // elements
  Conv conv;
  std::array<int64_t, 3> strides;  // of its images

  // None where the row of a filter is longer, or its elements do not lie side by side.
  static std::optional<Rows> Of(const Conv& c) {
    constexpr int64_t kOf16Bytes = 8;
    if (c.groups > 1 || c.dilation.w > 1 || c.o % 8) return std::nullopt;
    int64_t pixel = c.c;
    while (pixel * c.stride.w % kOf16Bytes) pixel++;
    if (pixel * c.kernel.w > kChannelsOfPanel) return std::nullopt;
    const int64_t width = (c.out.w - 1) * c.stride.w + CeilDiv(kChannelsOfPanel, pixel);
    const int64_t line = RoundUp(width * pixel, kOf16Bytes);
    Rows rows{pixel, line, c, {c.stride.w * pixel, line, c.in.h * line}};
    rows.conv.c = kChannelsOfPanel, rows.conv.in.w = c.out.w;
    rows.conv.kernel.w = rows.conv.stride.w = 1, rows.conv.pad.w = 0;
    return rows;
  }
};

// to (n, h, line) of x (n, h, w, channels), eight elements a thread.
template <class T>
__global__ void CopyRowsKernel(const T* x, T* to, int w, int channels, int lead, Divisor by_line,
                               Divisor by_pixel, int64_t count) {
  for (int64_t k = FirstItem(); k < count; k += ItemStep()) {
    const int line = (int)k / by_line, first = ((int)k - line * (int)by_line.value) * 8;
    __align__(16) T made[8];
#pragma unroll
    for (int e = 0; e < 8; e++) {
      const int place = (first + e) / by_pixel, c = first + e - place * (int)by_pixel.value;
      const int at = place - lead;
      const bool exists = c < channels && at >= 0 && at < w;
      made[e] = exists ? x[((int64_t)line * w + at) * channels + c] : T(0.f);
    }
    ((float4*)to)[k] = *(const float4*)made;
  }
}

// rows (filters, kernel.h, 64) of f (filters, channels, kernel), or, `back`, f of rows.
template <class T, bool kBack>
__global__ void FilterRowsKernel(const T* from, T* to, int channels, int kernel_h, int kernel_w,
                                 int pixel, int numel) {
  for (int k = (int)FirstItem(); k < numel; k += (int)ItemStep()) {
    const int e = k % kChannelsOfPanel, i = k / kChannelsOfPanel % kernel_h;
    const int filter = k / kChannelsOfPanel / kernel_h, j = e / pixel, c = e % pixel;
    const bool exists = c < channels && j < kernel_w;
    const int in_filter = ((filter * channels + c) * kernel_h + i) * kernel_w + j;
    if (!kBack)
      to[k] = exists ? from[in_filter] : T(0.f);
    else if (exists)
      to[in_filter] = from[k];
  }
}

template <class T>
void CopyRows(const Call& at, const Conv& c, const Rows& rows, const T* x, T* to) {
  const int64_t count = c.n * c.in.h * rows.line / 8;
  Launch(at.op, CopyRowsKernel<T>, Blocks(count), kThreads, 0, at.stream, x, to, (int)c.in.w,
         (int)c.c, (int)c.pad.w, Divisor(rows.line / 8), Divisor(rows.pixel), count);
}
int64_t NumelOfFilter(const Conv& rows) { return rows.o * rows.kernel.h * kChannelsOfPanel; }
template <bool kBack, class T>
void FilterRows(const Call& at, const Conv& c, const Rows& rows, const T* from, T* to) {
  const int64_t numel = NumelOfFilter(rows.conv);
  Launch(at.op, FilterRowsKernel<T, kBack>, Blocks(numel), kThreads, 0, at.stream, from, to,
         (int)c.c, (int)c.kernel.h, (int)c.kernel.w, (int)rows.pixel, (int)numel);
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

int64_t PanelsOf(int64_t channels) { return CeilDiv(channels, kChannelsOfPanel); }

PixelLayout LayoutOf(const Ahead& h, const Ahead& w, int64_t channels, int64_t kernel_w) {
  PixelLayout layout{};
  layout.by_positions = Divisor(h.positions.count * w.positions.count);
  layout.by_width = Divisor(w.positions.count);
  layout.first_h = (int)h.positions.first, layout.first_w = (int)w.positions.first;
  layout.step_h = (int)h.positions.step, layout.step_w = (int)w.positions.step;
  layout.by_panels = Divisor(PanelsOf(channels)), layout.by_kernel_w = Divisor(w.kernel_size);
  layout.kernel_step_h = (int)h.kernel_step, layout.kernel_step_w = (int)w.kernel_step;
  layout.filter_first = (int)(h.filter_first * kernel_w + w.filter_first);
  layout.filter_step_h = (int)(h.filter_step * kernel_w);
  layout.filter_step_w = (int)w.filter_step;
  return layout;
}

// ---- tilings ----

using Tilings = std::tuple<Tiling<1, 256, false, 2, 4, 128>, Tiling<2, 128, true, 1, 5, 128>,
                           Tiling<2, 64, true, 1, 8, 64>>;
constexpr hopper::TileTime kTimes[] = {{128, 256, 2, false, 0.66, 2.4, 0},
                                       {128, 128, 1, true, 0.38, 0.6, 0},
                                       {128, 64, 1, true, 0.22, 0.5, 0}};
static_assert(std::tuple_size_v<Tilings> == std::size(kTimes));

Config BestConfig(const Call& at, const hopper::Extents& extents, bool may_split) {
  Config best{0, 0, 1, 1e30};
  for (int k = 0; k < (int)std::size(kTimes); k++) {
    if (at.tiling >= 0 && at.tiling != k) continue;
    const Config other =
        hopper::Estimated(kTimes[k], extents, Multiprocessors(at.ctx.device_id), k, may_split);
    if (other.us < best.us) best = other;
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

// A part of a correlation: `filter` is (filters, kernel, channels), and of `out` positions every
// h.out_by-th and w.out_by-th is written.
template <class T>
void Correlate(const Call& at, const Correlation& c, HW kernel, const T* x,
               const std::array<int64_t, 3>& strides, const T* filter, const T* bias, T* out) {
  const Ahead h = AheadOf(c.h), w = AheadOf(c.w);
  PixelLayout layout = LayoutOf(h, w, c.in_channels, kernel.w);
  layout.as_pixels = !c.UnitStride();
  hopper::Params params{};
  params.m = (int)(c.images * c.Positions()), params.n = (int)c.out_channels, params.batch = 1;
  params.k_panels = (int)(c.KernelSize() * PanelsOf(c.in_channels)), params.passes = 1;
  params.c = out, params.bias = bias;
  params.aligned = Aligned16(bias);
  const hopper::Extents extents{params.m, params.n, params.k_panels, 1};
  const Config config = BestConfig(at, extents, c.UnitStride());
  const PixelMapShape images{
      {c.in_channels, c.in.w, c.in.h, c.images}, strides, w.positions, h.positions};
  // The results of a phase, as images of their own.
  const int64_t line = c.out_hw.w * c.out_channels;
  const PixelMapShape results{{c.out_channels, c.w.count, c.h.count, c.images},
                              {c.w.out_by * c.out_channels, c.h.out_by * line, c.out_hw.h * line},
                              {c.w.count, 0, 1},
                              {c.h.count, 0, 1}};
  T* const first = out + c.h.out_from * line + c.w.out_from * c.out_channels;
  WithTiling(config, [&](auto tiling) {
    using Tile = decltype(tiling);
    const std::array<int, 3> box{kChannelsOfPanel, 1, Tile::kTileN / Tile::kCluster};
    const hopper::Maps maps{
        PixelMap(at.op, kDtype<T>, x, images, Tile::kTileM),
        ArrayMap<3>(at.op, kDtype<T>, filter, {c.in_channels, Size(kernel), c.out_channels},
                    {c.in_channels, c.in_channels * Size(kernel)}, box),
        layout.as_pixels ? PixelMap(at.op, kDtype<T>, first, results, Tile::kRows)
                         : RowsMap<T>(at, out, params.n, params.m, Tile::kRows),
        CUtensorMap{}};
    hopper::LaunchTiles<T, Tile, Correlation16<T, Tile>, false>(at.op, at.ctx, config, maps, params,
                                                                layout, at.stream);
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
    FailWith(DL_NOT_APPLICABLE, "%s: this tiling of implicit gemm has no kernel of 16 bits; use %s",
             at.op, "implicit gemm");
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

// C (filters, columns) of the gradient of a filter: a column for each kernel offset and channel, of
// which there are multiples of 64.
template <class T>
void MultiplyByPixels(const Call& at, const Conv& c, const T* x,
                      const std::array<int64_t, 3>& strides, const T* dy, T* to) {
  const ForwardAxes axes(c);
  const PixelLayout layout = LayoutOf(axes.h, axes.w, c.c, c.kernel.w);
  const int64_t positions = c.n * Size(c.out);
  hopper::Params params{};
  params.m = (int)c.o, params.n = (int)(Size(c.kernel) * PanelsOf(c.c) * kChannelsOfPanel);
  params.batch = params.passes = 1;
  params.k_panels = (int)CeilDiv(positions, kChannelsOfPanel);
  params.c = to, params.aligned = true;
  const Config config = BestConfig(at, {params.m, params.n, params.k_panels, 1}, true);
  const PixelMapShape images{
      {c.c, c.in.w, c.in.h, c.n}, strides, axes.w.positions, axes.h.positions};
  WithTiling(config, [&](auto tiling) {
    using Tile = decltype(tiling);
    const hopper::Maps maps{RowsMap<T>(at, dy, c.o, positions, kChannelsOfPanel),
                            PixelMap(at.op, kDtype<T>, x, images, kChannelsOfPanel),
                            RowsMap<T>(at, to, params.n, params.m, Tile::kRows), CUtensorMap{}};
    hopper::LaunchTiles<T, Tile, FilterGradient16<T, Tile>, false>(at.op, at.ctx, config, maps,
                                                                   params, layout, at.stream);
  });
}

const char* MapError(const Ahead& h, const Ahead& w, int64_t n, HW image, int64_t channels) {
  const int64_t reach = std::max(h.kernel_size * h.kernel_step, w.kernel_size * w.kernel_step);
  return PixelMapError(
      {{channels, image.w, image.h, n}, Strides(image, channels), w.positions, h.positions}, reach);
}

}  // namespace

std::vector<std::string> WgmmaTilings() {
  std::vector<std::string> names;
  for (const hopper::TileTime& time : kTimes)
    names.push_back(std::to_string(time.tile_m) + "x" + std::to_string(time.tile_n));
  return names;
}

const char* HopperRefusal(const Call& at, const Conv& conv, Pass pass, const void* x, const void* f,
                          const void* y) {
  const char* error = HopperDeviceError(at.ctx.device_id);
  if (*error) return error;
  if (at.kernel == Kernel::kGemm && !IsGemm(conv)) return "it is for 1 x 1 filters at stride 1";
  if (conv.groups > 1) return "it has no groups";
  if (!Aligned16(x) || !Aligned16(f) || !Aligned16(y)) return "it takes arrays at 16 bytes";
  if (Size(conv.kernel) > kMostOffsets) return "it takes filters of at most 256 elements";
  const bool of_data = pass == Pass::kDataGradient, by_eight = conv.c % 8 == 0 && conv.o % 8 == 0;
  const auto rows = of_data || by_eight ? std::nullopt : Rows::Of(conv);
  if (!by_eight && !rows) return "it takes channels and filters by eight";
  const Conv& c = rows ? rows->conv : conv;
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

template <class T>
void ForwardOnHopper(const Call& at, const Conv& c, const T* x, const T* f, const T* bias, T* y) {
  if (at.kernel != Kernel::kWgmma && IsGemm(c))
    return Multiply<T>(at, c.n * Size(c.in), c.o, c.c, x, false, f, true, bias, y);
  if (const auto rows = c.c % 8 ? Rows::Of(c) : std::nullopt) {
    const Scratch images(at.ctx, c.n * rows->strides[2] * (int64_t)sizeof(T), at.stream);
    const Scratch filter(at.ctx, NumelOfFilter(rows->conv) * (int64_t)sizeof(T), at.stream);
    CopyRows(at, c, *rows, x, (T*)images.data());
    FilterRows<false>(at, c, *rows, f, (T*)filter.data());
    return Correlate(at, dlsys::Forward(rows->conv, nullptr, nullptr, nullptr, nullptr),
                     rows->conv.kernel, (const T*)images.data(), rows->strides,
                     (const T*)filter.data(), bias, y);
  }
  const Correlation correlation = dlsys::Forward(c, nullptr, nullptr, nullptr, nullptr);
  const int64_t kernel = Size(c.kernel);
  const std::array<int64_t, 3> strides = Strides(c.in, c.c);
  if (kernel == 1) return Correlate(at, correlation, c.kernel, x, strides, f, bias, y);
  const Scratch filter(at.ctx, c.o * c.c * kernel * (int64_t)sizeof(T), at.stream);
  MoveChannels<false>(at, c, c.c, f, (T*)filter.data());
  Correlate(at, correlation, c.kernel, x, strides, (const T*)filter.data(), bias, y);
}

template <class T>
void DataGradientOnHopper(const Call& at, const Conv& c, const T* f, const T* dy, T* dx) {
  if (at.kernel != Kernel::kWgmma && IsGemm(c))
    return Multiply<T>(at, c.n * Size(c.in), c.c, c.o, dy, false, f, false, nullptr, dx);
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
    Correlate<T>(at, part, c.kernel, dy, Strides(c.out, c.o), (const T*)filter.data(), nullptr, dx);
}

template <class T>
void FilterGradientOnHopper(const Call& at, const Conv& c, const T* x, const T* dy, T* df) {
  if (at.kernel != Kernel::kWgmma && IsGemm(c))
    return Multiply<T>(at, c.o, c.c, c.n * Size(c.in), dy, true, x, false, nullptr, df);
  if (const auto rows = c.c % 8 ? Rows::Of(c) : std::nullopt) {
    const Scratch images(at.ctx, c.n * rows->strides[2] * (int64_t)sizeof(T), at.stream);
    const Scratch made(at.ctx, NumelOfFilter(rows->conv) * (int64_t)sizeof(T), at.stream);
    CopyRows(at, c, *rows, x, (T*)images.data());
    MultiplyByPixels(at, rows->conv, (const T*)images.data(), rows->strides, dy, (T*)made.data());
    return FilterRows<true>(at, c, *rows, (const T*)made.data(), df);
  }
  const int64_t pitch = PanelsOf(c.c) * kChannelsOfPanel;
  if (Size(c.kernel) == 1 && pitch == c.c)
    return MultiplyByPixels(at, c, x, Strides(c.in, c.c), dy, df);
  const Scratch made(at.ctx, c.o * Size(c.kernel) * pitch * (int64_t)sizeof(T), at.stream);
  MultiplyByPixels(at, c, x, Strides(c.in, c.c), dy, (T*)made.data());
  MoveChannels<true>(at, c, pitch, (const T*)made.data(), df);
}

#define DLSYS_ON_HOPPER(T)                                                                   \
  template void ForwardOnHopper(const Call&, const Conv&, const T*, const T*, const T*, T*); \
  template void DataGradientOnHopper(const Call&, const Conv&, const T*, const T*, T*);      \
  template void FilterGradientOnHopper(const Call&, const Conv&, const T*, const T*, T*)
DLSYS_ON_HOPPER(bfloat16);
DLSYS_ON_HOPPER(float16);
#undef DLSYS_ON_HOPPER

}  // namespace channels_last
}  // namespace cuda
}  // namespace dlsys
