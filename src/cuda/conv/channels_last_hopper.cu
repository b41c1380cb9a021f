// Launches of convolution by wgmma and TMA: tensor maps of images and filters, a cost model that
// picks the tile, and copies that move a filter's channels last and back. channels_last_hopper.cuh
// has the contract, gemm/hopper_kernel.cuh the kernel. A data gradient at a stride is one launch
// for each phase that meets the filter, whose results are stored between those of others. Tensor
// cores limit filters of several elements, memory bandwidth most of one.
#include <algorithm>
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

PixelMapShape ImagesOf(int64_t n, HW image, int64_t channels, const PixelAxis& h,
                       const PixelAxis& w) {
  return {{channels, image.w, image.h, n},
          {channels, image.w * channels, Size(image) * channels},
          w,
          h};
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
void Correlate(const Call& at, const Correlation& c, HW kernel, const T* x, const T* filter,
               const T* bias, T* out) {
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
  const PixelMapShape images = ImagesOf(c.images, c.in, c.in_channels, h.positions, w.positions);
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

const char* MapError(const Ahead& h, const Ahead& w, int64_t n, HW image, int64_t channels) {
  const int64_t reach = std::max(h.kernel_size * h.kernel_step, w.kernel_size * w.kernel_step);
  return PixelMapError(ImagesOf(n, image, channels, h.positions, w.positions), reach);
}

}  // namespace

std::vector<std::string> WgmmaTilings() {
  std::vector<std::string> names;
  for (const hopper::TileTime& time : kTimes)
    names.push_back(std::to_string(time.tile_m) + "x" + std::to_string(time.tile_n));
  return names;
}

const char* HopperRefusal(const Call& at, const Conv& c, const void* x, const void* f,
                          const void* y) {
  const char* error = HopperDeviceError(at.ctx.device_id);
  if (*error) return error;
  if (at.kernel == Kernel::kGemm && !IsGemm(c)) return "it is for 1 x 1 filters at stride 1";
  if (c.groups > 1) return "it has no groups";
  if (c.c % 8 || c.o % 8) return "it takes channels and filters by eight";
  if (!Aligned16(x) || !Aligned16(f) || !Aligned16(y)) return "it takes arrays at 16 bytes";
  if (Size(c.kernel) > kMostOffsets) return "it takes filters of at most 256 elements";
  const ForwardAxes axes(c);
  error = MapError(axes.h, axes.w, c.n, c.in, c.c);
  for (int64_t phase = 0; !*error && phase < Size(c.stride); phase++) {
    const Correlation part = dlsys::DataGradient(c, nullptr, nullptr, nullptr, phase);
    if (part.Positions() * part.KernelSize() > 0)
      error = MapError(AheadOf(part.h), AheadOf(part.w), c.n, c.out, c.o);
  }
  return *error ? error : nullptr;
}

template <class T>
void ForwardOnHopper(const Call& at, const Conv& c, const T* x, const T* f, const T* bias, T* y) {
  if (at.kernel != Kernel::kWgmma && IsGemm(c))
    return Multiply<T>(at, c.n * Size(c.in), c.o, c.c, x, false, f, true, bias, y);
  const Correlation correlation = dlsys::Forward(c, nullptr, nullptr, nullptr, nullptr);
  const int64_t kernel = Size(c.kernel);
  if (kernel == 1) return Correlate(at, correlation, c.kernel, x, f, bias, y);
  const Scratch filter(at.ctx, c.o * c.c * kernel * (int64_t)sizeof(T), at.stream);
  MoveChannels<false>(at, c, c.c, f, (T*)filter.data());
  Correlate(at, correlation, c.kernel, x, (const T*)filter.data(), bias, y);
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
    Correlate<T>(at, part, c.kernel, dy, (const T*)filter.data(), nullptr, dx);
}

template <class T>
void FilterGradientOnHopper(const Call& at, const Conv& c, const T* x, const T* dy, T* df) {
  if (at.kernel != Kernel::kWgmma && IsGemm(c))
    return Multiply<T>(at, c.o, c.c, c.n * Size(c.in), dy, true, x, false, nullptr, df);
  const ForwardAxes axes(c);
  const PixelLayout layout = LayoutOf(axes.h, axes.w, c.c, c.kernel.w);
  const int64_t pitch = PanelsOf(c.c) * kChannelsOfPanel, positions = c.n * Size(c.out);
  const bool in_place = Size(c.kernel) == 1 && pitch == c.c;
  const int64_t cols = Size(c.kernel) * pitch;
  const Scratch made(at.ctx, in_place ? 0 : c.o * cols * (int64_t)sizeof(T), at.stream);
  T* const to = in_place ? df : (T*)made.data();
  hopper::Params params{};
  params.m = (int)c.o, params.n = (int)cols, params.batch = 1;
  params.k_panels = (int)CeilDiv(positions, kChannelsOfPanel), params.passes = 1;
  params.c = to, params.aligned = true;
  const Config config = BestConfig(at, {params.m, params.n, params.k_panels, 1}, true);
  const PixelMapShape images = ImagesOf(c.n, c.in, c.c, axes.h.positions, axes.w.positions);
  WithTiling(config, [&](auto tiling) {
    using Tile = decltype(tiling);
    const hopper::Maps maps{RowsMap<T>(at, dy, c.o, positions, kChannelsOfPanel),
                            PixelMap(at.op, kDtype<T>, x, images, kChannelsOfPanel),
                            RowsMap<T>(at, to, params.n, params.m, Tile::kRows), CUtensorMap{}};
    hopper::LaunchTiles<T, Tile, FilterGradient16<T, Tile>, false>(at.op, at.ctx, config, maps,
                                                                   params, layout, at.stream);
  });
  if (!in_place) MoveChannels<true>(at, c, pitch, to, df);
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
