// Convolution by Winograd's F(m x m, 3 x 3), m = 2 or 4: tiles of m x m outputs are transformed so
// that (m + 2)^2 products of matrices (tiles, channels) by (channels, filters) take the place of
// the 9 m^2 of a direct one. Inside, blocks of 16 channels lie side by side; images are transposed
// on their way to and from the transforms. Chunks of tiles, of which the caches hold the
// transforms, go one after the other; tasks within a chunk share no result, so that every element
// is summed in one order. Limited by FMA issue with many channels, by the transforms with few.
//
// Transforms add and subtract neighbors, so an infinity or NaN would spread over its tile: where a
// result is not finite, implicit GEMM computes all of it again.
#include <atomic>
#include <cmath>

#include "cpu/conv/conv.h"
#include "cpu/conv/conv_pool.h"
#include "cpu/conv/winograd_transform.h"
#include "cpu/gemm/tile.h"
#include "cpu/runtime/parallel.h"

namespace dlsys {
namespace cpu {
namespace {

constexpr int64_t kChunkNumel = int64_t(1) << 20;  // floats of a chunk's transformed images
constexpr int64_t kTaskTiles = 48;                 // multiplied at a time
constexpr int64_t kPanel = 32;                     // filters multiplied at a time
constexpr int64_t kUnit = 4;                       // tiles are padded to a multiple of it
constexpr int64_t kSkew = 16;  // floats between the elements of a tile, against equal cache sets

// ---- micro-kernels ----

// c (rows, 2 vectors) = or += over k: A's element (r, k) is a[r * a_row + k % 16 * a_step + k / 16
// * a_block], B's row k is at b + k * b_step, its second vector at b2 + k * b_step.
struct ProductArgs {
  int64_t k, a_block, b_step, c_row;
  const float *a, *b, *b2;
  float* c;
  bool add;
};
using ProductFunction = void (*)(const ProductArgs&);

// kOfTiles: rows are tiles, 16 channels apart, else filters, side by side.
template <int kWidth, int kRows, bool kOfTiles>
DLSYS_INLINE void Product(const ProductArgs& p) {
  typedef float Vector __attribute__((vector_size(kWidth * sizeof(float)), aligned(4), may_alias));
  constexpr int64_t kRowStep = kOfTiles ? kBlock : 1, kStep = kOfTiles ? 1 : kBlock;
  Vector sum[kRows][2] = {};
  const float *b = p.b, *b2 = p.b2;
  for (int64_t k0 = 0; k0 < p.k; k0 += kBlock) {
    const float* a = p.a + k0 / kBlock * p.a_block;
    const int64_t steps = std::min<int64_t>(kBlock, p.k - k0);
    for (int64_t k = 0; k < steps; k++, a += kStep, b += p.b_step, b2 += p.b_step) {
      const Vector first = *(const Vector*)b, second = *(const Vector*)b2;
      for (int r = 0; r < kRows; r++) {
        sum[r][0] += a[r * kRowStep] * first;
        sum[r][1] += a[r * kRowStep] * second;
      }
    }
  }
  for (int r = 0; r < kRows; r++)
    for (int v = 0; v < 2; v++) {
      Vector* to = (Vector*)(p.c + r * p.c_row + v * kWidth);
      *to = p.add ? *to + sum[r][v] : sum[r][v];
    }
}

// The micro-kernels of one instruction set.
struct ProductKernels {
  int width;
  ProductFunction of_tiles[3];  // for 4, 8 and 12 tiles
  int most_tiles, filters;
  ProductFunction of_filters;
};
#define DLSYS_PRODUCTS(F, width, most, filters)                                    \
  {                                                                                \
      width,                                                                       \
      {F<4, true>, F < most < 8 ? 4 : 8, true >, F < most < 12 ? 4 : 12, true > }, \
      most,                                                                        \
      filters,                                                                     \
      F<filters, false>,                                                           \
  }

template <int kRows, bool kOfTiles>
void ProductBaseline(const ProductArgs& p) {
  Product<4, kRows, kOfTiles>(p);
}
constexpr ProductKernels kBaselineProducts = DLSYS_PRODUCTS(ProductBaseline, 4, 4, 4);

#ifdef __x86_64__
template <int kRows, bool kOfTiles>
DLSYS_AVX2 void ProductAvx2(const ProductArgs& p) {
  Product<8, kRows, kOfTiles>(p);
}
constexpr ProductKernels kAvx2Products = DLSYS_PRODUCTS(ProductAvx2, 8, 4, 4);

template <int kRows, bool kOfTiles>
DLSYS_AVX512 void ProductAvx512(const ProductArgs& p) {
  Product<16, kRows, kOfTiles>(p);
}
constexpr ProductKernels kAvx512Products = DLSYS_PRODUCTS(ProductAvx512, 16, 12, 8);
#endif

const ProductKernels& CurrentProducts() {
#ifdef __x86_64__
  if (CurrentIsa() == Isa::kAvx512) return kAvx512Products;
  if (CurrentIsa() == Isa::kAvx2) return kAvx2Products;
#endif
  return kBaselineProducts;
}

// ---- images as transformed tiles ----

// The tiles of a chunk: rows of tiles, of one image after the other.
struct Chunk {
  int64_t first, rows;
};

// Images (images, groups, channels, hw) cut into rows of tiles: tiles are `step` pixels apart from
// the pixel `from` on, each of kSize^2, zeros outside.
template <int kSize>
struct TileRows {
  const float* x;
  int64_t groups, channels;
  HW hw, from, tiles;
  int64_t step;

  int64_t Blocks() const { return CeilDiv(channels, kBlock); }
  int64_t Width() const { return (tiles.w - 1) * step + kSize; }
  int64_t BufferNumel() const { return kSize * Width() * kBlock; }

  // Row `row` of tiles of a block of channels, as pixels (kSize, Width()) of blocks.
  void Load(int64_t row, int64_t group, int64_t block, float* to) const {
    const int64_t image = row / tiles.h, top = from.h + row % tiles.h * step;
    const int64_t first = block * kBlock, count = std::min<int64_t>(kBlock, channels - first);
    const float* at = x + ((image * groups + group) * channels + first) * Size(hw);
    const int64_t begin = std::max<int64_t>(0, -from.w);
    const int64_t end = std::clamp<int64_t>(hw.w - from.w, begin, std::max(begin, Width()));
    for (int64_t i = 0; i < kSize; i++, to += Width() * kBlock) {
      const int64_t h = top + i;
      const bool inside = h >= 0 && h < hw.h && end > begin;
      if (!inside || count < kBlock) std::fill(to, to + Width() * kBlock, 0.f);
      if (!inside) continue;
      std::fill(to, to + begin * kBlock, 0.f);
      std::fill(to + end * kBlock, to + Width() * kBlock, 0.f);
      Transpose(at + h * hw.w + from.w + begin, Size(hw), count, end - begin, to + begin * kBlock,
                kBlock);
    }
  }
};

// Transformed tiles of a chunk: (elements of a tile, blocks of channels, tiles, 16).
struct Transformed {
  float* data;
  int64_t blocks, tiles;  // tiles are padded

  static int64_t Pitch(int64_t blocks, int64_t tiles) { return blocks * tiles * kBlock + kSkew; }
  int64_t Pitch() const { return Pitch(blocks, tiles); }
  float* At(int64_t element, int64_t block, int64_t tile) const {
    return data + element * Pitch() + (block * tiles + tile) * kBlock;
  }
};

template <class Matrix>
void TransformRows(const TileRows<Matrix::kCols>& images, int64_t group, const Chunk& chunk,
                   const Transformed& to) {
  constexpr int kElements = Matrix::kRows * Matrix::kRows;
  const int64_t across = images.tiles.w, filled = chunk.rows * across;
  const auto make = [&] { return ScratchArray<float>(images.BufferNumel()); };
  auto run = [&](int64_t begin, int64_t end, const ScratchArray<float>& scratch) {
    float* pixels = scratch.data();
    for (int64_t t = begin; t < end; t++) {
      const int64_t row = t / to.blocks, block = t % to.blocks;
      images.Load(chunk.first + row, group, block, pixels);
      float* into = to.At(0, block, row * across);
      Dispatch([&]() __attribute__((always_inline)) {
        for (int64_t j = 0; j < across; j++)
          TransformTile<Matrix>(pixels + j * images.step * kBlock, images.Width() * kBlock, kBlock,
                                into + j * kBlock, Matrix::kRows * to.Pitch(), to.Pitch());
      });
      if (row == chunk.rows - 1)
        for (int e = 0; e < kElements; e++)
          std::fill(to.At(e, block, filled), to.At(e, block, to.tiles), 0.f);
    }
  };
  const int64_t grain = RowGrain(across * kElements * kBlock);
  ParallelForWithScratch(chunk.rows * to.blocks, grain, make, run);
}

// Cuts rows of tiles into chunks that hold about `numel` floats, each row `of_row` of them.
template <class F>
void ForChunks(int64_t rows, int64_t of_row, F&& body) {
  const int64_t most = EvenBlock(rows, std::max<int64_t>(1, kChunkNumel / of_row), 1);
  for (int64_t first = 0; first < rows; first += most)
    body(Chunk{first, std::min(most, rows - first)}, most);
}

// ---- convolution and data gradient ----

template <int kOut>
class WinogradConvolution {
  static constexpr int kSize = kOut + 2, kElements = kSize * kSize;

 public:
  explicit WinogradConvolution(const Correlation& c, const Kept* kept = nullptr)
      : c_(c),
        kept_(kept),
        tiles_{CeilDiv(c.h.count, kOut), CeilDiv(c.w.count, kOut)},
        blocks_(CeilDiv(c.in_channels, kBlock)),
        panels_(CeilDiv(c.out_channels, kPanel)) {}

  int64_t FiltersNumel() const { return c_.groups * OfGroup(); }

  // False where a result is not finite.
  bool Run() {
    const ScratchArray<float> filters(kept_ ? 0 : FiltersNumel());
    filters_ = kept_ ? kept_->filters : filters.data();
    if (!kept_ || !kept_->ready) TransformFilters();
    const int64_t rows = c_.images * tiles_.h;
    for (int64_t group = 0; group < c_.groups; group++)
      ForChunks(rows, kElements * blocks_ * kBlock * tiles_.w,
                [&](const Chunk& chunk, int64_t most) { RunChunk(group, chunk, most); });
    return finite_;
  }

 private:
  int64_t PaddedChannels() const { return blocks_ * kBlock; }
  int64_t OfGroup() const { return panels_ * kElements * PaddedChannels() * kPanel; }
  static int64_t Low(const ConvAxis& axis) {
    return axis.first + std::min<int64_t>(0, 2 * axis.kernel_step);
  }

  // Filters as (group, panel, element, channel, 32 filters).
  void TransformFilters() const {
    ParallelFor(c_.groups * panels_ * PaddedChannels(), RowGrain(kElements * kPanel),
                [&](int64_t begin, int64_t end) {
                  for (int64_t t = begin; t < end; t++)
                    TransformFilter(t / PaddedChannels(), t % PaddedChannels());
                });
  }
  void TransformFilter(int64_t panel, int64_t channel) const {
    float taken[9 * kPanel] = {};
    const int64_t group = panel / panels_, first = panel % panels_ * kPanel;
    const int64_t count = std::min(kPanel, c_.out_channels - first);
    const float* from =
        c_.filter + group * c_.filter_group + first * c_.filter_row + channel * c_.filter_channel;
    if (channel < c_.in_channels)
      for (int64_t r = 0; r < count; r++, from += c_.filter_row)
        for (int64_t k = 0; k < 9; k++) {
          const int64_t i = c_.h.kernel_step < 0 ? 2 - k / 3 : k / 3;
          const int64_t j = c_.w.kernel_step < 0 ? 2 - k % 3 : k % 3;
          taken[k * kPanel + r] = from[i * c_.filter_width + j];
        }
    float* to = filters_ + panel * kElements * PaddedChannels() * kPanel + channel * kPanel;
    const int64_t pitch = PaddedChannels() * kPanel;
    Dispatch([&]() __attribute__((always_inline)) {
      for (int64_t r = 0; r < kPanel; r += kBlock)
        TransformTile<WinogradFilter<kOut>>(taken + r, 3 * kPanel, kPanel, to + r, kSize * pitch,
                                            pitch);
    });
  }

  void RunChunk(int64_t group, const Chunk& chunk, int64_t most_rows) {
    const int64_t padded = RoundUp(most_rows * tiles_.w, kUnit);
    const ScratchArray<float> scratch(kElements * Transformed::Pitch(blocks_, padded));
    const Transformed images{scratch.data(), blocks_, padded};
    const TileRows<kSize> rows{c_.x,   c_.groups, c_.in_channels, c_.in, {Low(c_.h), Low(c_.w)},
                               tiles_, kOut};
    TransformRows<WinogradInput<kOut>>(rows, group, chunk, images);
    const int64_t step = EvenBlock(most_rows, std::max<int64_t>(1, kTaskTiles / tiles_.w), 1);
    const int64_t steps = CeilDiv(chunk.rows, step), of_task = RoundUp(step * tiles_.w, kUnit);
    const auto make = [&] {
      return ScratchArray<float>(kElements * (of_task * kPanel + kSkew) + OutputNumel());
    };
    auto run = [&](int64_t begin, int64_t end, const ScratchArray<float>& own) {
      for (int64_t t = begin; t < end; t++) {
        const int64_t panel = t / steps, first = t % steps * step;
        const int64_t count = std::min(step, chunk.rows - first);
        Multiply(group, panel, images, first * tiles_.w, count * tiles_.w, of_task, own.data());
        Store(group, panel, chunk.first + first, count, of_task, own.data());
      }
    };
    ParallelForWithScratch(panels_ * steps, 1, make, run);
  }

  int64_t OutputNumel() const { return kOut * tiles_.w * kOut * kBlock; }

  // Products of the tiles [first, first + count) by a panel of filters: (element, tile, 32).
  void Multiply(int64_t group, int64_t panel, const Transformed& images, int64_t first,
                int64_t count, int64_t of_task, float* to) const {
    const ProductKernels& kernels = CurrentProducts();
    ProductArgs p;
    p.k = PaddedChannels();
    p.a_block = images.tiles * kBlock;
    p.b_step = p.c_row = kPanel;
    p.add = false;
    const float* filters =
        filters_ + group * OfGroup() + panel * kElements * PaddedChannels() * kPanel;
    for (int e = 0; e < kElements; e++, filters += PaddedChannels() * kPanel) {
      float* c = to + e * (of_task * kPanel + kSkew);
      for (int64_t tile = 0; tile < count;) {
        const int64_t left = RoundUp(count - tile, kUnit);
        const int64_t rows = std::min<int64_t>(left, kernels.most_tiles);
        p.a = images.At(e, 0, first + tile);
        for (int64_t s = 0; s < kPanel; s += 2 * kernels.width) {
          p.b = filters + s;
          p.b2 = p.b + kernels.width;
          p.c = c + tile * kPanel + s;
          kernels.of_tiles[rows / kUnit - 1](p);
        }
        tile += rows;
      }
    }
  }

  // Transforms products back and transposes them to rows of images.
  void Store(int64_t group, int64_t panel, int64_t first, int64_t count, int64_t of_task,
             float* products) {
    const int64_t pitch = of_task * kPanel + kSkew, width = tiles_.w * kOut * kBlock;
    float* pixels = products + kElements * pitch;
    for (int64_t r = 0; r < kPanel && panel * kPanel + r < c_.out_channels; r += kBlock)
      for (int64_t row = 0; row < count; row++) {
        const float* from = products + row * tiles_.w * kPanel + r;
        Dispatch([&]() __attribute__((always_inline)) {
          for (int64_t j = 0; j < tiles_.w; j++)
            TransformTile<WinogradOutput<kOut>>(from + j * kPanel, kSize * pitch, pitch,
                                                pixels + j * kOut * kBlock, width, kBlock);
        });
        StoreRow(group, panel * kPanel + r, first + row, pixels);
      }
  }

  void StoreRow(int64_t group, int64_t channel, int64_t row, float* pixels) {
    const int64_t width = tiles_.w * kOut * kBlock, image = row / tiles_.h;
    const int64_t count = std::min<int64_t>(kBlock, c_.out_channels - channel);
    const int64_t top = row % tiles_.h * kOut, rows = std::min<int64_t>(kOut, c_.h.count - top);
    const int64_t out = group * c_.out_channels + channel;
    float* to =
        c_.out + (image * c_.groups * c_.out_channels + out) * Size(c_.out_hw) + top * c_.out_hw.w;
    Block check = {}, bias = {};
    for (int64_t k = 0; k < count && c_.bias; k++) bias[k] = c_.bias[out + k];
    for (int64_t i = 0; i < rows; i++) {
      float* from = pixels + i * width;
      for (int64_t j = 0; j < c_.w.count; j++) {
        Block& pixel = *(Block*)(from + j * kBlock);
        pixel += bias;
        check += 0 * pixel;
      }
      Transpose(from, kBlock, c_.w.count, count, to + i * c_.out_hw.w, Size(c_.out_hw));
    }
    if (kept_) Finish(to, count, rows);
    for (int64_t k = 0; k < count; k++)
      if (check[k] != 0) finite_ = false;
  }

  // Adds the residual to rows of some channels, then cuts off what is below 0.
  void Finish(float* to, int64_t channels, int64_t rows) const {
    const int64_t plane = Size(c_.out_hw), n = rows * c_.out_hw.w;
    for (int64_t k = 0; k < channels; k++, to += plane) {
      const float* from = kept_->residual ? kept_->residual + (to - c_.out) : nullptr;
      if (from)
        for (int64_t j = 0; j < n; j++) to[j] += from[j];
      if (kept_->relu)
        for (int64_t j = 0; j < n; j++) to[j] = to[j] < 0 ? 0 : to[j];
    }
  }

  const Correlation c_;
  const Kept* const kept_;
  const HW tiles_;
  const int64_t blocks_, panels_;
  float* filters_ = nullptr;
  std::atomic<bool> finite_{true};
};

// ---- filter gradient ----

template <int kOut>
class FilterGradientOf {
  static constexpr int kSize = kOut + 2, kElements = kSize * kSize;

 public:
  FilterGradientOf(const Conv& c, const float* x, const float* dy)
      : c_(c),
        tiles_{CeilDiv(c.out.h, kOut), CeilDiv(c.out.w, kOut)},
        in_blocks_(RoundUp(CeilDiv(c.GroupChannels(), kBlock), 2)),
        out_blocks_(CeilDiv(c.GroupFilters(), kBlock)),
        of_x_{x, c.groups, c.GroupChannels(), c.in, {-c.pad.h, -c.pad.w}, tiles_, kOut},
        of_dy_{dy, c.groups, c.GroupFilters(), c.out, {0, 0}, tiles_, kOut} {}

  // False where a result is not finite.
  bool Run(float* df) {
    const int64_t numel = kElements * out_blocks_ * in_blocks_ * kBlock * kBlock;
    const ScratchArray<float> sums(numel);
    sums_ = sums.data();
    const int64_t of_row = kElements * (in_blocks_ + out_blocks_) * kBlock * tiles_.w;
    for (int64_t group = 0; group < c_.groups; group++) {
      ForChunks(c_.n * tiles_.h, of_row,
                [&](const Chunk& chunk, int64_t most) { RunChunk(group, chunk, most); });
      Store(group, df);
    }
    return finite_;
  }

 private:
  int64_t PaddedChannels() const { return in_blocks_ * kBlock; }

  void RunChunk(int64_t group, const Chunk& chunk, int64_t most_rows) {
    const int64_t padded = RoundUp(most_rows * tiles_.w, kUnit);
    const ScratchArray<float> of_x(kElements * Transformed::Pitch(in_blocks_, padded));
    const ScratchArray<float> of_dy(kElements * Transformed::Pitch(out_blocks_, padded));
    const Transformed x{of_x.data(), in_blocks_, padded}, dy{of_dy.data(), out_blocks_, padded};
    TransformRows<WinogradInput<kOut>>(of_x_, group, chunk, x);
    TransformRows<Adjoint<WinogradOutput<kOut>>>(of_dy_, group, chunk, dy);
    const int64_t tiles = chunk.rows * tiles_.w;
    ParallelFor(kElements * out_blocks_, 1, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; t++)
        Multiply(t / out_blocks_, t % out_blocks_, x, dy, tiles, chunk.first > 0);
    });
  }

  // Adds to the sums of one element of a tile and a block of filters: (filters, channels).
  void Multiply(int64_t element, int64_t block, const Transformed& x, const Transformed& dy,
                int64_t tiles, bool add) const {
    const ProductKernels& kernels = CurrentProducts();
    ProductArgs p;
    p.k = tiles;
    p.a_block = kBlock * kBlock;
    p.b_step = kBlock;
    p.c_row = PaddedChannels();
    p.add = add;
    float* c = sums_ + (element * out_blocks_ + block) * kBlock * PaddedChannels();
    for (int64_t channel = 0; channel < PaddedChannels(); channel += 2 * kernels.width) {
      const int64_t second = channel + kernels.width;
      p.b = x.At(element, channel / kBlock, 0) + channel % kBlock;
      p.b2 = x.At(element, second / kBlock, 0) + second % kBlock;
      for (int64_t r = 0; r < kBlock; r += kernels.filters) {
        p.a = dy.At(element, block, 0) + r;
        p.c = c + r * PaddedChannels() + channel;
        kernels.of_filters(p);
      }
    }
  }

  // Transforms the sums to filters.
  void Store(int64_t group, float* df) {
    const int64_t filters = c_.GroupFilters(), channels = c_.GroupChannels();
    const int64_t blocks = CeilDiv(channels, kBlock),
                  pitch = out_blocks_ * kBlock * PaddedChannels();
    df += group * filters * channels * 9;
    ParallelFor(filters * blocks, RowGrain(kElements * kBlock), [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; t++) {
        const int64_t filter = t / blocks, channel = t % blocks * kBlock;
        const float* from = sums_ + filter * PaddedChannels() + channel;
        float taken[9 * kBlock];
        Dispatch([&]() __attribute__((always_inline)) {
          TransformTile<Adjoint<WinogradFilter<kOut>>>(from, kSize * pitch, pitch, taken,
                                                       3 * kBlock, kBlock);
        });
        float* to = df + (filter * channels + channel) * 9;
        const int64_t count = std::min<int64_t>(kBlock, channels - channel);
        float check = 0;
        for (int64_t k = 0; k < count * 9; k++) {
          to[k] = taken[k % 9 * kBlock + k / 9];
          check += 0 * to[k];
        }
        if (check != 0) finite_ = false;
      }
    });
  }

  const Conv c_;
  const HW tiles_;
  const int64_t in_blocks_, out_blocks_;
  const TileRows<kSize> of_x_;
  const TileRows<kOut> of_dy_;
  float* sums_ = nullptr;
  std::atomic<bool> finite_{true};
};

}  // namespace

bool WinogradFits(const Conv& c) {
  const HW one{1, 1}, three{3, 3};
  return c.kernel == three && c.stride == one && c.dilation == one && c.c > 0 && c.o > 0;
}

template <int kOut>
void WinogradForward(const Conv& conv, const float* x, const float* f, const float* bias,
                     float* y) {
  const bool finite = WinogradConvolution<kOut>(Forward(conv, x, f, bias, y)).Run();
  if (!finite || Workspace::Querying()) GemmForward(conv, x, f, bias, y);
}

template <int kOut>
void WinogradForwardKept(const Conv& conv, const float* x, const float* f, const float* bias,
                         const Kept& kept, float* y) {
  const bool finite = WinogradConvolution<kOut>(Forward(conv, x, f, bias, y), &kept).Run();
  if (finite && !Workspace::Querying()) return;
  const ScratchArray<float> filters(GemmFiltersNumel(conv));
  GemmForwardKept(conv, x, f, bias, {filters.data(), false, kept.residual, kept.relu}, y);
}

template <int kOut>
int64_t WinogradFiltersNumel(const Conv& conv) {
  return WinogradConvolution<kOut>(Forward(conv, nullptr, nullptr, nullptr, nullptr))
      .FiltersNumel();
}

template <int kOut>
void WinogradDataGradient(const Conv& conv, const float* f, const float* dy, float* dx) {
  const bool finite = WinogradConvolution<kOut>(DataGradient(conv, f, dy, dx, 0)).Run();
  if (!finite || Workspace::Querying()) GemmDataGradient(conv, f, dy, dx);
}

template <int kOut>
void WinogradFilterGradient(const Conv& conv, const float* x, const float* dy, float* df) {
  const bool finite = FilterGradientOf<kOut>(conv, x, dy).Run(df);
  if (!finite || Workspace::Querying()) GemmFilterGradient(conv, x, dy, df);
}

#define DLSYS_WINOGRAD(kOut)                                                                     \
  template void WinogradForward<kOut>(const Conv&, const float*, const float*, const float*,     \
                                      float*);                                                   \
  template void WinogradForwardKept<kOut>(const Conv&, const float*, const float*, const float*, \
                                          const Kept&, float*);                                  \
  template int64_t WinogradFiltersNumel<kOut>(const Conv&);                                      \
  template void WinogradDataGradient<kOut>(const Conv&, const float*, const float*, float*);     \
  template void WinogradFilterGradient<kOut>(const Conv&, const float*, const float*, float*)
DLSYS_WINOGRAD(2);
DLSYS_WINOGRAD(4);

}  // namespace cpu
}  // namespace dlsys
