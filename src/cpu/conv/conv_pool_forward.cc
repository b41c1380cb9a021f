// Forward convolution + bias + relu + max-pool, direct, with images in SIMD lanes: a block of as
// many images as a vector has lanes is transposed to images-last, so that a window element under
// several filters is one vector, accumulated in registers. A row of windows is kept until the
// maxima are known. One to three images have filters in the lanes instead, and elements of windows
// go to all of them. Sums have one order either way, so that an image's result does not depend on
// the images beside it.
#include "cpu/conv/conv_pool.h"
#include "cpu/runtime/parallel.h"
#include "cpu/runtime/simd.h"
#include "math/int_math.h"

namespace dlsys {
namespace cpu {
namespace {

constexpr int64_t kFewBlocks = 8;   // of images: with fewer, tasks also split the filters
constexpr int64_t kMostLanes = 16;  // on any processor

// ---- kernels ----

// Arguments of a kernel; vectors have one lane per image.
struct Lanes {
  const float* x;     // (channels, rows, cols) vectors
  const float* f;     // (channels, kernel, filters)
  const float* bias;  // (filters)
  float* sums;        // room for (filters, positions of a window, out.w) vectors
  float *y, *code;    // (filters, out) vectors; codes as floats
  int64_t channels, rows, cols;
  HW kernel, out;
  bool relu;
};
using LaneFunction = void (*)(const Lanes&);

// First largest of each window's elements (positions, n), NaN being larger than every other value.
// Conditionals stand one by one, so that compilers vectorize them.
template <int kPositions, bool kRelu>
DLSYS_INLINE void Largest(const float* values, int64_t n, float* y, float* code) {
  DLSYS_IVDEP
  for (int64_t j = 0; j < n; j++) {
    float best = values[j], position = 0;
    for (int k = 1; k < kPositions; k++) {
      const float value = values[k * n + j];
      const float at = value <= best ? position : (float)k, larger = value <= best ? best : value;
      position = best != best ? position : at;
      best = best != best ? best : larger;
    }
    if (kRelu) position = best > 0.f ? position : (float)kCut;
    y[j] = kRelu && best < 0.f ? 0.f : best;
    code[j] = position;
  }
}

// Convolution outputs of a row of windows, to sums (filters, positions, windows) of vectors.
template <int kWidth, int kWindow, int kFilters>
DLSYS_INLINE void Row(const Lanes& a, int64_t row, float* sums) {
  typedef float Vector __attribute__((vector_size(kWidth * sizeof(float)), may_alias));
  constexpr int kPositions = kWindow * kWindow;
  for (int64_t j = 0; j < a.out.w; j++) {
    Vector sum[kFilters][kPositions];
    for (int o = 0; o < kFilters; o++)
      for (int k = 0; k < kPositions; k++) sum[o][k] = Vector{} + a.bias[o];
    const float* f = a.f;
    for (int64_t c = 0; c < a.channels; c++)
      for (int64_t h = 0; h < a.kernel.h; h++) {
        const int64_t at = (c * a.rows + row * kWindow + h) * a.cols + j * kWindow;
        const Vector* x = (const Vector*)a.x + at;
        for (int64_t w = 0; w < a.kernel.w; w++, x++, f += kFilters)
          for (int k = 0; k < kPositions; k++) {
            const Vector in_vector = x[k / kWindow * a.cols + k % kWindow];
            for (int o = 0; o < kFilters; o++) sum[o][k] += f[o] * in_vector;
          }
      }
    for (int o = 0; o < kFilters; o++)
      for (int k = 0; k < kPositions; k++)
        ((Vector*)sums)[(o * kPositions + k) * a.out.w + j] = sum[o][k];
  }
}

template <int kWidth, int kWindow, int kFilters>
DLSYS_INLINE void Windows(const Lanes& a) {
  constexpr int kPositions = kWindow * kWindow;
  const int64_t n = a.out.w * kWidth;
  for (int64_t row = 0; row < a.out.h; row++) {
    Row<kWidth, kWindow, kFilters>(a, row, a.sums);
    for (int o = 0; o < kFilters; o++) {
      const float* values = a.sums + o * kPositions * n;
      const int64_t at = (o * a.out.h + row) * n;
      if (a.relu)
        Largest<kPositions, true>(values, n, a.y + at, a.code + at);
      else
        Largest<kPositions, false>(values, n, a.y + at, a.code + at);
    }
  }
}

// The kernels of one instruction set and vector width, for 1 to `filters` filters.
struct LaneKernels {
  int width;
  int filters[2];  // at a time, for windows of 2 and 3
  LaneFunction of_two[6], of_three[3];
};

// With 16 registers, and with 32.
#define DLSYS_FEW(F, width)                                                             \
  {                                                                                     \
    width, {3, 1}, {F<width, 2, 1>, F<width, 2, 2>, F<width, 2, 3>}, { F<width, 3, 1> } \
  }
#define DLSYS_MANY(F, width)                                                           \
  {                                                                                    \
      width,                                                                           \
      {6, 3},                                                                          \
      {F<width, 2, 1>, F<width, 2, 2>, F<width, 2, 3>, F<width, 2, 4>, F<width, 2, 5>, \
       F<width, 2, 6>},                                                                \
      {F<width, 3, 1>, F<width, 3, 2>, F<width, 3, 3>},                                \
  }

template <int kWidth, int kWindow, int kFilters>
void WindowsBaseline(const Lanes& a) {
  Windows<kWidth, kWindow, kFilters>(a);
}

#ifdef __x86_64__
constexpr LaneKernels kBaseline[] = {DLSYS_FEW(WindowsBaseline, 4)};

template <int kWidth, int kWindow, int kFilters>
DLSYS_AVX2 void WindowsAvx2(const Lanes& a) {
  Windows<kWidth, kWindow, kFilters>(a);
}
template <int kWidth, int kWindow, int kFilters>
DLSYS_AVX512 void WindowsAvx512(const Lanes& a) {
  Windows<kWidth, kWindow, kFilters>(a);
}

constexpr LaneKernels kAvx2[] = {DLSYS_FEW(WindowsAvx2, 8)};
constexpr LaneKernels kAvx512[] = {DLSYS_MANY(WindowsAvx512, 8), DLSYS_MANY(WindowsAvx512, 16)};
#else
constexpr LaneKernels kBaseline[] = {DLSYS_MANY(WindowsBaseline, 4)};
#endif

template <size_t n>
const LaneKernels& Narrowest(const LaneKernels (&kernels)[n], int64_t lanes) {
  size_t k = 0;
  while (k + 1 < n && kernels[k].width < lanes) k++;
  return kernels[k];
}

// The narrowest kernels for so many lanes, or the widest.
const LaneKernels& KernelsFor(int64_t lanes) {
#ifdef __x86_64__
  if (CurrentIsa() == Isa::kAvx512) return Narrowest(kAvx512, lanes);
  if (CurrentIsa() == Isa::kAvx2) return Narrowest(kAvx2, lanes);
#endif
  return Narrowest(kBaseline, lanes);
}

const LaneKernels& WidestKernels() { return KernelsFor(kMostLanes); }

// ---- blocks of images and of filters ----

// Where images are few, each is cut into strips of rows of windows, a lane for each strip.
struct Block {
  int64_t image, images, strips, rows;  // of an image; of windows in a strip
  const LaneKernels* kernels;

  int64_t Lanes() const { return images * strips; }
};

class Forward {
 public:
  Forward(const ConvPool& p, const float* x, bool relu, float* y, uint8_t* code)
      : p_(p), x_(x), relu_(relu), y_(y), code_(code) {
    const LaneKernels& widest = WidestKernels();
    images_ = widest.width;
    filters_ = widest.filters[p.window - 2];
    groups_ = CeilDiv(p.conv.o, filters_);
  }

  void Run(const float* f, const float* bias) {
    const ScratchArray<float> packed(p_.conv.o * (1 + K()));
    packed_ = packed.data();
    Serially([&] { Pack(f, bias); });
    const int64_t blocks = CeilDiv(p_.conv.n, images_);
    const int64_t shares = blocks < kFewBlocks ? groups_ : 1, groups = groups_ / shares;
    auto task = [&](int64_t begin, int64_t end, const ScratchArray<float>& scratch) {
      for (int64_t k = begin; k < end; k++) {
        const int64_t first = k % shares * groups;
        RunBlock(BlockOf(k / shares * images_), first, first + groups, scratch.data());
      }
    };
    // Every block but the last is like the first.
    const int64_t numel =
        std::max(SizesOf(BlockOf(0)).Numel(), SizesOf(BlockOf((blocks - 1) * images_)).Numel());
    const auto make = [=] { return ScratchArray<float>(numel); };
    ParallelForWithScratch(blocks * shares, 1, make, task);
  }

 private:
  int64_t K() const { return p_.conv.c * Size(p_.conv.kernel); }
  int64_t OfY() const { return p_.conv.o * Size(p_.out); }
  // The filters of a group are [FirstOf(group), FirstOf(group + 1)).
  int64_t FirstOf(int64_t group) const { return group * p_.conv.o / groups_; }
  float* PackedBias() const { return packed_ + p_.conv.o * K(); }

  // Packs the filters of each group as (channels, kernel, filters).
  void Pack(const float* f, const float* bias) const {
    for (int64_t g = 0; g < groups_; g++) {
      const int64_t first = FirstOf(g) * K(), filters = FirstOf(g + 1) - FirstOf(g);
      Transpose(f + first, K(), filters, K(), packed_ + first, filters);
    }
    for (int64_t o = 0; o < p_.conv.o; o++) PackedBias()[o] = bias ? bias[o] : 0;
  }

  Block BlockOf(int64_t image) const {
    Block b;
    b.image = image;
    b.images = std::min(images_, p_.conv.n - image);
    b.rows = CeilDiv(p_.out.h, std::min(p_.out.h, images_ / b.images));
    b.strips = CeilDiv(p_.out.h, b.rows);
    b.kernels = &KernelsFor(b.Lanes());
    return b;
  }

  // The floats of a block's arrays: its input, its results and as many codes, sums of a row.
  struct Sizes {
    int64_t rows, x, y, sums;
    int64_t Numel() const { return x + 2 * y + sums; }
  };
  Sizes SizesOf(const Block& block) const {
    const int64_t width = block.kernels->width;
    const int64_t rows = block.rows * p_.window + p_.conv.kernel.h - 1;
    return {rows, p_.conv.c * rows * SeenByWindows(p_).w * width,
            filters_ * block.rows * p_.out.w * width,
            filters_ * p_.window * p_.window * p_.out.w * width};
  }

  // One block under the filters of groups [group, last).
  void RunBlock(const Block& block, int64_t group, int64_t last, float* scratch) const {
    const Sizes sizes = SizesOf(block);
    Lanes a;
    a.channels = p_.conv.c;
    a.rows = sizes.rows;
    a.cols = SeenByWindows(p_).w;
    a.kernel = p_.conv.kernel;
    a.out = {block.rows, p_.out.w};
    a.relu = relu_;
    a.x = scratch;
    a.y = scratch + sizes.x;
    a.code = a.y + sizes.y;
    a.sums = a.code + sizes.y;
    Load(block, a, scratch);
    for (; group < last; group++) {
      const int64_t o = FirstOf(group), filters = FirstOf(group + 1) - o;
      a.f = packed_ + o * K();
      a.bias = PackedBias() + o;
      const LaneKernels& kernels = *block.kernels;
      (p_.window == 2 ? kernels.of_two : kernels.of_three)[filters - 1](a);
      Store(block, a.y, o, filters, y_);
      Store(block, a.code, o, filters, code_);
    }
  }

  // Transposes what windows see into lanes, with zero padding. Unused lanes and rows behind the
  // last strip are zeros too: arithmetic on the denormals that may be there would be slow.
  void Load(const Block& b, const Lanes& a, float* to) const {
    const HW seen = SeenByWindows(p_), in = p_.conv.in, pad = p_.conv.pad;
    const int64_t of_x = p_.conv.c * Size(in), width = b.kernels->width;
    const float* x = x_ + b.image * of_x;
    const bool unused = b.Lanes() < width || b.strips > 1;
    const bool padded = pad.h || pad.w || seen.h > in.h || seen.w > in.w;
    if (padded || unused) memset(to, 0, p_.conv.c * a.rows * a.cols * width * sizeof(float));
    if (b.strips == 1 && !padded && seen == in)
      return Transpose(x, of_x, b.images, of_x, to, width);
    if (b.strips == 1) return LoadLanes(x, b.images, of_x, 0, a, to, width);
    const int64_t rows = b.rows * p_.window;
    for (int64_t k = 0; k < b.images; k++)
      LoadLanes(x + k * of_x, b.strips, rows * in.w, rows, a, to + k * b.strips, width);
  }

  // Transposes lanes that lie `pitch` elements apart and begin `step` rows apart.
  void LoadLanes(const float* x, int64_t lanes, int64_t pitch, int64_t step, const Lanes& a,
                 float* to, int64_t width) const {
    const Conv& conv = p_.conv;
    const Inside across(a.cols, conv.pad.w, conv.in.w);
    for (int64_t c = 0; c < conv.c; c++)
      for (int64_t h = 0; h < a.rows; h++) {
        const int64_t row = h - conv.pad.h;
        int64_t first = 0, last = lanes;  // lanes whose row is inside
        while (first < last && row + first * step < 0) first++;
        while (first < last && row + (last - 1) * step >= conv.in.h) last--;
        if (first == last) continue;
        const int64_t at = (c * conv.in.h + row) * conv.in.w + across.begin - conv.pad.w;
        Transpose(x + at + first * pitch, pitch, last - first, across.Size(),
                  to + ((c * a.rows + h) * a.cols + across.begin) * width + first, width);
      }
  }

  // From lanes (filters, windows) of a block; the last strip may be shorter.
  template <class T>
  void Store(const Block& b, const float* from, int64_t o, int64_t filters, T* to) const {
    const int64_t width = b.kernels->width, out = Size(p_.out), of_strip = b.rows * p_.out.w;
    to += b.image * OfY() + o * out;
    if (b.strips == 1) return Transpose(from, width, filters * out, b.images, to, OfY());
    const int64_t full = out / of_strip;
    for (int64_t k = 0; k < b.images; k++)
      for (int64_t j = 0; j < filters; j++) {
        const float* lanes = from + j * of_strip * width + k * b.strips;
        T* of_filter = to + k * OfY() + j * out;
        Transpose(lanes, width, of_strip, full, of_filter, of_strip);
        Transpose(lanes + full, width, out - full * of_strip, b.strips - full,
                  of_filter + full * of_strip, of_strip);
      }
  }

  const ConvPool p_;
  const float* x_;
  const bool relu_;
  float* y_;
  uint8_t* code_;
  int64_t images_, filters_, groups_;  // images per block, filters per group, groups
  float* packed_ = nullptr;
};

// ---- few images, with filters in SIMD lanes ----

constexpr int64_t kMostFew = 3;       // images
constexpr int64_t kWorth = 1 << 19;   // multiplications of a task, below which a thread is not
constexpr int kWindowsAtOnce = 4;     // whose sums are in registers
constexpr double kFilledLanes = 0.6;  // the least part of the lanes that have a filter

// Arguments of a kernel; vectors have one lane per filter.
struct FilterLanes {
  const float* x;     // (channels, rows, cols), padded
  const float* f;     // (channels, kernel) vectors
  const float* bias;  // a vector
  float* sums;        // room for (positions of a window, out.w) vectors
  float *y, *code;    // (out) vectors; codes as floats
  int64_t channels, rows, cols;
  HW kernel, out;
  bool relu;
};
using FilterLaneFunction = void (*)(const FilterLanes&);

// Convolution outputs of kCount windows from window j of a row on.
template <int kWidth, int kWindow, int kCount>
DLSYS_INLINE void SeveralWindows(const FilterLanes& a, int64_t row, int64_t j) {
  typedef float Vector __attribute__((vector_size(kWidth * sizeof(float)), may_alias));
  constexpr int kPositions = kWindow * kWindow;
  Vector sum[kCount][kPositions];
  for (int n = 0; n < kCount; n++)
    for (int k = 0; k < kPositions; k++) sum[n][k] = *(const Vector*)a.bias;
  const Vector* f = (const Vector*)a.f;
  for (int64_t c = 0; c < a.channels; c++)
    for (int64_t h = 0; h < a.kernel.h; h++) {
      const float* x = a.x + (c * a.rows + row * kWindow + h) * a.cols + j * kWindow;
      for (int64_t w = 0; w < a.kernel.w; w++, x++, f++) {
        const Vector filter = *f;
        DLSYS_UNROLL
        for (int n = 0; n < kCount; n++) DLSYS_UNROLL
        for (int k = 0; k < kPositions; k++)
          sum[n][k] += filter * x[k / kWindow * a.cols + n * kWindow + k % kWindow];
      }
    }
  for (int k = 0; k < kPositions; k++)
    for (int n = 0; n < kCount; n++) ((Vector*)a.sums)[k * a.out.w + j + n] = sum[n][k];
}

template <int kWidth, int kWindow>
DLSYS_INLINE void WindowsUnderFilters(const FilterLanes& a) {
  constexpr int kPositions = kWindow * kWindow;
  constexpr int kCount = kWindow == 2 ? kWindowsAtOnce : 2;
  const int64_t n = a.out.w * kWidth;
  for (int64_t row = 0; row < a.out.h; row++) {
    int64_t j = 0;
    for (; j + kCount <= a.out.w; j += kCount) SeveralWindows<kWidth, kWindow, kCount>(a, row, j);
    for (; j < a.out.w; j++) SeveralWindows<kWidth, kWindow, 1>(a, row, j);
    if (a.relu)
      Largest<kPositions, true>(a.sums, n, a.y + row * n, a.code + row * n);
    else
      Largest<kPositions, false>(a.sums, n, a.y + row * n, a.code + row * n);
  }
}

// The kernels of one instruction set and vector width, for windows of 2 and 3.
struct FilterLaneKernels {
  int width;
  FilterLaneFunction of[2];
};

template <int kWidth, int kWindow>
void FewBaseline(const FilterLanes& a) {
  WindowsUnderFilters<kWidth, kWindow>(a);
}
constexpr FilterLaneKernels kFewOfBaseline[] = {{4, {FewBaseline<4, 2>, FewBaseline<4, 3>}}};
#ifdef __x86_64__
template <int kWidth, int kWindow>
DLSYS_AVX2 void FewAvx2(const FilterLanes& a) {
  WindowsUnderFilters<kWidth, kWindow>(a);
}
template <int kWidth, int kWindow>
DLSYS_AVX512 void FewAvx512(const FilterLanes& a) {
  WindowsUnderFilters<kWidth, kWindow>(a);
}
constexpr FilterLaneKernels kFewOfAvx2[] = {{8, {FewAvx2<8, 2>, FewAvx2<8, 3>}}};
constexpr FilterLaneKernels kFewOfAvx512[] = {{8, {FewAvx512<8, 2>, FewAvx512<8, 3>}},
                                              {16, {FewAvx512<16, 2>, FewAvx512<16, 3>}}};
#endif

template <size_t n>
const FilterLaneKernels& NarrowestFew(const FilterLaneKernels (&kernels)[n], int64_t filters) {
  size_t k = 0;
  while (k + 1 < n && kernels[k].width < filters) k++;
  return kernels[k];
}

const FilterLaneKernels& KernelsForFilters(int64_t filters) {
#ifdef __x86_64__
  if (CurrentIsa() == Isa::kAvx512) return NarrowestFew(kFewOfAvx512, filters);
  if (CurrentIsa() == Isa::kAvx2) return NarrowestFew(kFewOfAvx2, filters);
#endif
  return NarrowestFew(kFewOfBaseline, filters);
}

class FewImages {
 public:
  FewImages(const ConvPool& p, const float* x, const float* f, const float* bias, bool relu,
            float* y, uint8_t* code)
      : p_(p),
        x_(x),
        f_(f),
        bias_(bias),
        relu_(relu),
        y_(y),
        code_(code),
        kernels_(KernelsForFilters(p.conv.o)),
        width_(kernels_.width),
        groups_(CeilDiv(p.conv.o, width_)) {}

  bool Serves() const {
    const double filled = (double)p_.conv.o / (double)(groups_ * width_);
    return p_.conv.n <= kMostFew && filled >= kFilledLanes;
  }

  // A task is a group of filters under an image.
  void Run() const {
    const int64_t multiplications = Size(p_.conv.out) * K() * width_;
    const int64_t chunk = std::max<int64_t>(1, kWorth / std::max<int64_t>(multiplications, 1));
    const auto make = [this] { return ScratchArray<float>(Numel()); };
    ParallelForWithScratch(p_.conv.n * groups_, chunk, make,
                           [&](int64_t begin, int64_t end, const ScratchArray<float>& scratch) {
                             for (int64_t k = begin; k < end; k++)
                               RunGroup(k / groups_, k % groups_, scratch.data());
                           });
  }

 private:
  int64_t K() const { return p_.conv.c * Size(p_.conv.kernel); }
  int64_t Windows() const { return Size(p_.out); }
  int64_t PaddedNumel() const { return RoundUp(p_.conv.c * Size(SeenByWindows(p_)), kMostLanes); }
  int64_t SumsNumel() const { return p_.window * p_.window * p_.out.w * width_; }
  int64_t Numel() const { return PaddedNumel() + (K() + 1 + 2 * Windows()) * width_ + SumsNumel(); }

  void RunGroup(int64_t image, int64_t group, float* scratch) const {
    const int64_t first = group * width_, filters = std::min(width_, p_.conv.o - first);
    const HW seen = SeenByWindows(p_);
    float *f = scratch + PaddedNumel(), *bias = f + K() * width_;
    FilterLanes a;
    a.x = scratch;
    a.f = f;
    a.bias = bias;
    a.y = bias + width_;
    a.code = a.y + Windows() * width_;
    a.sums = a.code + Windows() * width_;
    a.channels = p_.conv.c;
    a.rows = seen.h;
    a.cols = seen.w;
    a.kernel = p_.conv.kernel;
    a.out = p_.out;
    a.relu = relu_;
    if (filters < width_) memset(f, 0, (K() + 1) * width_ * sizeof(float));
    Transpose(f_ + first * K(), K(), filters, K(), f, width_);
    for (int64_t o = 0; o < filters; o++) bias[o] = bias_ ? bias_[first + o] : 0;
    Pad(x_ + image * p_.conv.c * Size(p_.conv.in), scratch);
    kernels_.of[p_.window - 2](a);
    const int64_t to = (image * p_.conv.o + first) * Windows();
    Transpose(a.y, width_, Windows(), filters, y_ + to, Windows());
    Transpose(a.code, width_, Windows(), filters, code_ + to, Windows());
  }

  void Pad(const float* x, float* to) const {
    const HW seen = SeenByWindows(p_), in = p_.conv.in, pad = p_.conv.pad;
    const Inside down(seen.h, pad.h, in.h), across(seen.w, pad.w, in.w);
    if (down.Size() < seen.h || across.Size() < seen.w)
      memset(to, 0, p_.conv.c * Size(seen) * sizeof(float));
    for (int64_t c = 0; c < p_.conv.c; c++)
      for (int64_t h = down.begin; h < down.end; h++)
        memcpy(to + (c * seen.h + h) * seen.w + across.begin,
               x + (c * in.h + h - pad.h) * in.w + across.begin - pad.w,
               across.Size() * sizeof(float));
  }

  const ConvPool p_;
  const float *x_, *f_, *bias_;
  const bool relu_;
  float* y_;
  uint8_t* code_;
  const FilterLaneKernels& kernels_;
  const int64_t width_, groups_;
};

}  // namespace

void ConvPoolForward(const ConvPool& p, const float* x, const float* f, const float* bias,
                     bool relu, float* y, uint8_t* code) {
  const FewImages few(p, x, f, bias, relu, y, code);
  if (few.Serves()) return few.Run();
  Forward(p, x, relu, y, code).Run(f, bias);
}

}  // namespace cpu
}  // namespace dlsys
