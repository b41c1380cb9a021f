// Gradients of convolution + relu + max-pool, sparse: a window passes its gradient to one element
// at most, so nothing is unpooled. Each window that relu left open adds its dy times one patch of x
// to the filter gradient (gather), or its dy times the filter to one patch of dx (scatter). Images
// are kept channels last (NHWC), where a patch is a few contiguous rows; padded to whole vectors
// where that costs little, since what crosses a cache line takes twice as long. Sums over images
// are split in a fixed way and added in order.
#include <cmath>

#include "cpu/conv/conv_pool.h"
#include "cpu/conv/open_windows.h"
#include "cpu/runtime/parallel.h"
#include "cpu/runtime/simd.h"
#include "math/int_math.h"

namespace dlsys {
namespace cpu {
namespace {

constexpr int64_t kSplits = 16;        // of the images
constexpr int64_t kTaskMacs = 524288;  // multiply-adds worth a task, where all windows are open
constexpr int64_t kMostVectors = 12;   // of a patch at a time
constexpr int kColumn = 8;             // floats that a column of an image may be padded to

// ---- kernels ----

// Vectors of a patch: where they are in the patch at the beginning of the input, and the values
// that multiply them or accumulate them, vector after vector.
struct Vectors {
  float* const* in;
  float* values;
};
using PatchFunction = void (*)(const Open&, const Vectors&);

template <int kWidth>
struct Types {
  typedef float Vector __attribute__((vector_size(kWidth * sizeof(float))));
  typedef float Anywhere
      __attribute__((vector_size(kWidth * sizeof(float)), aligned(4), may_alias));
};

// values += sum over windows of dy * patch, whose vectors are kRows times kVectors beside each
// other. Few are accumulated in two alternating sets, to hide FMA latency.
template <int kWidth, int kRows, int kVectors>
DLSYS_INLINE void Gather(const Open& open, const Vectors& v) {
  typedef typename Types<kWidth>::Vector Vector;
  typedef typename Types<kWidth>::Anywhere Anywhere;
  constexpr int kAll = kRows * kVectors, kSets = kAll <= kMostVectors / 2 ? 2 : 1;
  Vector sum[kSets][kAll] = {};
  const float* in[kRows];
  DLSYS_UNROLL
  for (int r = 0; r < kRows; r++) in[r] = v.in[r * kVectors];
  const auto add = [&](int64_t window, Vector* to) __attribute__((always_inline)) {
    const int64_t at = open.at[window];
    const float dy = open.dy[window];
    DLSYS_UNROLL
    for (int k = 0; k < kAll; k++)
      to[k] += dy * *(const Anywhere*)(in[k / kVectors] + at + k % kVectors * kWidth);
  };
  int64_t window = 0;
  for (; window + kSets <= open.count; window += kSets)
    for (int s = 0; s < kSets; s++) add(window + s, sum[s]);
  for (; window < open.count; window++) add(window, sum[0]);
  DLSYS_UNROLL
  for (int k = 0; k < kAll; k++) {
    if (kSets == 2) sum[0][k] += sum[kSets - 1][k];
    *(Anywhere*)(v.values + k * kWidth) += sum[0][k];
  }
}

// Each window's patch += dy * values. Windows of both halves take turns, so that a patch is not
// read right after an overlapping one was written.
template <int kWidth, int kRows, int kVectors>
DLSYS_INLINE void Scatter(const Open& open, const Vectors& v) {
  typedef typename Types<kWidth>::Vector Vector;
  typedef typename Types<kWidth>::Anywhere Anywhere;
  constexpr int kAll = kRows * kVectors;
  Vector values[kAll];
  float* in[kRows];
  DLSYS_UNROLL
  for (int r = 0; r < kRows; r++) in[r] = v.in[r * kVectors];
  DLSYS_UNROLL
  for (int k = 0; k < kAll; k++) values[k] = *(const Anywhere*)(v.values + k * kWidth);
  const auto add = [&](int64_t window) __attribute__((always_inline)) {
    const int64_t at = open.at[window];
    const float dy = open.dy[window];
    DLSYS_UNROLL
    for (int k = 0; k < kAll; k++)
      *(Anywhere*)(in[k / kVectors] + at + k % kVectors * kWidth) += dy * values[k];
  };
  const int64_t half = open.count / 2;
  for (int64_t window = 0; window < half; window++) {
    add(window);
    add(half + window);
  }
  if (2 * half < open.count) add(2 * half);
}

// Whole patches that registers hold though they are more than kMostVectors.
struct WholePatch {
  int rows, vectors;  // of a row
  PatchFunction gather, scatter;
};

// For pieces of 1 to kMostVectors vectors, and for whole patches, behind which is one of no rows.
struct PatchKernels {
  int width;
  PatchFunction gather[kMostVectors], scatter[kMostVectors];
  const WholePatch* whole;
};

constexpr WholePatch kNone[] = {{}};

#define DLSYS_PATCH_SIZES(F, width)                                      \
  {                                                                      \
      F<width, 1, 1>, F<width, 2, 1>,  F<width, 3, 1>,  F<width, 4, 1>,  \
      F<width, 5, 1>, F<width, 6, 1>,  F<width, 7, 1>,  F<width, 8, 1>,  \
      F<width, 9, 1>, F<width, 10, 1>, F<width, 11, 1>, F<width, 12, 1>, \
  }
#define DLSYS_PATCHES(Isa, width, whole) \
  {width, DLSYS_PATCH_SIZES(Gather##Isa, width), DLSYS_PATCH_SIZES(Scatter##Isa, width), whole}

template <int kWidth, int kRows, int kVectors>
void GatherBaseline(const Open& open, const Vectors& v) {
  Gather<kWidth, kRows, kVectors>(open, v);
}
template <int kWidth, int kRows, int kVectors>
void ScatterBaseline(const Open& open, const Vectors& v) {
  Scatter<kWidth, kRows, kVectors>(open, v);
}
constexpr PatchKernels kBaseline[] = {DLSYS_PATCHES(Baseline, 4, kNone)};

#ifdef __x86_64__
template <int kWidth, int kRows, int kVectors>
DLSYS_AVX2 void GatherAvx2(const Open& open, const Vectors& v) {
  Gather<kWidth, kRows, kVectors>(open, v);
}
template <int kWidth, int kRows, int kVectors>
DLSYS_AVX2 void ScatterAvx2(const Open& open, const Vectors& v) {
  Scatter<kWidth, kRows, kVectors>(open, v);
}
constexpr PatchKernels kAvx2[] = {DLSYS_PATCHES(Avx2, 4, kNone), DLSYS_PATCHES(Avx2, 8, kNone)};

template <int kWidth, int kRows, int kVectors>
DLSYS_AVX512 void GatherAvx512(const Open& open, const Vectors& v) {
  Gather<kWidth, kRows, kVectors>(open, v);
}
template <int kWidth, int kRows, int kVectors>
DLSYS_AVX512 void ScatterAvx512(const Open& open, const Vectors& v) {
  Scatter<kWidth, kRows, kVectors>(open, v);
}

#define DLSYS_WHOLE(width, rows, vectors) \
  {rows, vectors, GatherAvx512<width, rows, vectors>, ScatterAvx512<width, rows, vectors>}
template <int kWidth>
constexpr WholePatch kWhole[] = {
    DLSYS_WHOLE(kWidth, 3, 5), DLSYS_WHOLE(kWidth, 3, 6), DLSYS_WHOLE(kWidth, 3, 7),
    DLSYS_WHOLE(kWidth, 3, 8), DLSYS_WHOLE(kWidth, 3, 9), DLSYS_WHOLE(kWidth, 5, 3),
    DLSYS_WHOLE(kWidth, 5, 4), DLSYS_WHOLE(kWidth, 5, 5), {},
};
constexpr PatchKernels kAvx512[] = {DLSYS_PATCHES(Avx512, 4, kNone),
                                    DLSYS_PATCHES(Avx512, 8, kWhole<8>),
                                    DLSYS_PATCHES(Avx512, 16, kWhole<16>)};
#endif

template <size_t n>
const PatchKernels& Narrowest(const PatchKernels (&kernels)[n], int64_t elements) {
  const auto vectors = [&](size_t k) { return (elements - 1) / kernels[k].width; };
  size_t k = 0;
  while (vectors(k) > vectors(n - 1)) k++;
  return kernels[k];
}

// The kernels for rows of a patch that have so many elements: the narrowest that hold one in the
// fewest vectors, or those as wide as its columns are aligned.
const PatchKernels& KernelsFor(int64_t elements, bool aligned) {
#ifdef __x86_64__
  const Isa isa = CurrentIsa();
  if (isa == Isa::kAvx512) return aligned ? kAvx512[1] : Narrowest(kAvx512, elements);
  if (isa == Isa::kAvx2) return aligned ? kAvx2[1] : Narrowest(kAvx2, elements);
#endif
  return Narrowest(kBaseline, elements);
}

// The floats from one column of an image to the next: its channels, and what fills whole vectors of
// kColumn where that is little. No result depends on what stands there.
int64_t ColumnOf(int64_t channels) {
  const int64_t padded = RoundUp(channels, kColumn);
  return CurrentIsa() != Isa::kBaseline && 3 * padded <= 4 * channels ? padded : channels;
}

// ---- input and patches ----

// An image, channels last, as far as windows see it; the vectors of a patch or a filter; and the
// open windows.
class Patches {
 public:
  explicit Patches(const ConvPool& p)
      : p_(p),
        column_(ColumnOf(p.conv.c)),
        length_(p.conv.kernel.w * column_),
        kernels_(KernelsFor(length_, column_ % 16 == kColumn)),
        seen_(SeenByWindows(p)),
        down_(seen_.h, p.conv.pad.h, p.conv.in.h),
        across_(seen_.w, p.conv.pad.w, p.conv.in.w),
        row_(RoundUp(length_, kernels_.width)),
        pitch_((seen_.w - p.conv.kernel.w) * column_ + row_),
        vectors_(p.conv.kernel.h * row_ / kernels_.width),
        whole_(WholeOf(kernels_.whole, p.conv.kernel.h, row_ / kernels_.width)),
        open_(p, pitch_, column_) {}

  int64_t InputNumel() const { return seen_.h * pitch_; }

  // The scratch of a task: an input, the vectors of a patch in it, and the open windows of an image
  // under one filter.
  struct Task {
    const ScratchArray<float> input;
    const ScratchArray<float*> vectors;
    const ScratchArray<int32_t> windows;

    explicit Task(const Patches& patches)
        : input(patches.InputNumel()),
          vectors(patches.vectors_),
          windows(patches.open_.ScratchNumel()) {
      const int64_t width = patches.kernels_.width, of_row = patches.row_ / width;
      Serially([&] {
        for (int64_t k = 0; k < patches.vectors_; k++)
          vectors.data()[k] = input.data() + k / of_row * patches.pitch_ + k % of_row * width;
      });
    }
  };

  int64_t FilterNumel() const { return p_.conv.kernel.h * row_; }  // in vectors

  // Transposes to channels last inside zero padding; `to` had zeros there before.
  void Load(const float* x, float* to) const {
    ForRows([&](int64_t in_offset, int64_t at) { LoadRow(x + in_offset, to + at); });
  }

  // All of x, zeros where no window sees it.
  void Store(const float* from, float* x) const {
    if (down_.Size() < p_.conv.in.h || across_.Size() < p_.conv.in.w)
      std::fill(x, x + p_.conv.c * Size(p_.conv.in), 0.f);
    ForRows([&](int64_t in_offset, int64_t at) { StoreRow(from + at, x + in_offset); });
  }

  // One filter (c, size) as the vectors of a patch, zeros between and behind its rows; and back.
  void LoadFilter(const float* f, float* to) const {
    std::fill(to, to + FilterNumel(), 0.f);
    for (int64_t h = 0; h < p_.conv.kernel.h; h++)
      Transpose(f + h * p_.conv.kernel.w, Size(p_.conv.kernel), p_.conv.c, p_.conv.kernel.w,
                to + h * row_, column_);
  }
  void StoreFilter(const float* from, float* f) const {
    for (int64_t h = 0; h < p_.conv.kernel.h; h++)
      Transpose(from + h * row_, column_, p_.conv.kernel.w, p_.conv.c, f + h * p_.conv.kernel.w,
                Size(p_.conv.kernel));
  }

  // Calls body(filter, open) for the filters of an image.
  template <class F>
  void ForFilters(int64_t image, const float* dy, const uint8_t* code, const Task& task,
                  const F& body) const {
    for (int64_t o = 0; o < p_.conv.o; o++) {
      const int64_t at = (image * p_.conv.o + o) * Size(p_.out);
      body(o, open_.Find(dy + at, code + at, task.windows.data()));
    }
  }

  // Adds dy times patches to a filter.
  void Gather(const Open& open, const Task& task, float* filter) const {
    Run(whole_.gather, kernels_.gather, open, task, filter);
  }
  // Adds dy times a filter to patches.
  void Scatter(const Open& open, const Task& task, float* filter) const {
    Run(whole_.scatter, kernels_.scatter, open, task, filter);
  }

  // Each window's patch += dy * filter, but not what lies in the vectors behind its rows, where
  // zeros times what is not finite would make NaN of neighbors.
  void ScatterExactly(const Open& open, float* input, const float* filter) const {
    for (int64_t window = 0; window < open.count; window++)
      for (int64_t h = 0; h < p_.conv.kernel.h; h++)
        for (int64_t k = 0; k < length_; k++)
          input[open.at[window] + h * pitch_ + k] += open.dy[window] * filter[h * row_ + k];
  }

 private:
  static const WholePatch& WholeOf(const WholePatch* whole, int64_t rows, int64_t vectors) {
    while (whole->rows && (whole->rows != rows || whole->vectors != vectors)) whole++;
    return *whole;
  }

  // Calls the kernel of a whole patch, or where there is none kernels[k](open, vectors) for pieces
  // of k + 1 vectors that make up a patch and a filter.
  void Run(PatchFunction whole, const PatchFunction* kernels, const Open& open, const Task& task,
           float* filter) const {
    if (whole) return whole(open, {task.vectors.data(), filter});
    const int64_t vectors = vectors_;
    const int64_t pieces = CeilDiv(vectors, kMostVectors);
    for (int64_t k = 0; k < pieces; k++) {
      const int64_t first = k * vectors / pieces, last = (k + 1) * vectors / pieces;
      kernels[last - first - 1](open,
                                {task.vectors.data() + first, filter + first * kernels_.width});
    }
  }

  // Calls row(offset in x, offset in the channels-last input) for each row inside.
  template <class F>
  void ForRows(const F& row) const {
    for (int64_t h = down_.begin; h < down_.end; h++)
      row((h - p_.conv.pad.h) * p_.conv.in.w + across_.begin - p_.conv.pad.w,
          h * pitch_ + across_.begin * column_);
  }

  bool InSquares() const { return column_ % kColumn == 0 && across_.Size() >= kColumn; }

  // A row of an image, of each channel Size(in) elements apart, to columns; and back.
  void LoadRow(const float* x, float* to) const {
    const int64_t channels = p_.conv.c, cols = across_.Size(), plane = Size(p_.conv.in);
    if (column_ == 1) {
      std::copy(x, x + cols, to);
    } else if (InSquares()) {
      Dispatch([&]() __attribute__((always_inline)) {
        for (int64_t c = 0; c < channels; c += kColumn)
          for (int64_t j = 0; j < cols; j += kColumn) {
            const int64_t col = std::min(j, cols - kColumn);
            TransposeSquare<kColumn>(x + c * plane + col, plane, channels - c,
                                     to + col * column_ + c, column_, kColumn);
          }
      });
    } else {
      Transpose(x, plane, channels, cols, to, column_);
    }
  }
  void StoreRow(const float* from, float* x) const {
    const int64_t channels = p_.conv.c, cols = across_.Size(), plane = Size(p_.conv.in);
    if (column_ == 1) {
      std::copy(from, from + cols, x);
    } else if (InSquares()) {
      Dispatch([&]() __attribute__((always_inline)) {
        for (int64_t c = 0; c < channels; c += kColumn)
          for (int64_t j = 0; j < cols; j += kColumn) {
            const int64_t col = std::min(j, cols - kColumn);
            TransposeSquare<kColumn>(from + col * column_ + c, column_, kColumn,
                                     x + c * plane + col, plane, channels - c);
          }
      });
    } else {
      Transpose(from, column_, cols, channels, x, plane);
    }
  }

  const ConvPool p_;
  const int64_t column_;  // floats of a column of the input
  const int64_t length_;  // of a patch's row
  const PatchKernels& kernels_;
  const HW seen_;
  const Inside down_, across_;
  const int64_t row_, pitch_;  // row pitch of a filter, and of the input
  const int64_t vectors_;      // of a patch
  const WholePatch& whole_;
  const OpenWindows open_;
};

// ---- sums over images ----

// Adds the gradients of images [begin, end) to df, its filters as vectors, and db.
void AddGradients(const ConvPool& p, const Patches& patches, const float* x, const float* dy,
                  const uint8_t* code, int64_t begin, int64_t end, const Patches::Task& task,
                  float* df, double* db) {
  const int64_t of_x = p.conv.c * Size(p.conv.in);
  float* input = task.input.data();
  std::fill(input, input + patches.InputNumel(), 0.f);
  for (int64_t image = begin; image < end; image++) {
    patches.Load(x + image * of_x, input);
    patches.ForFilters(image, dy, code, task, [&](int64_t o, const Open& open) {
      patches.Gather(open, task, df + o * patches.FilterNumel());
      db[o] += open.total;
    });
  }
}

}  // namespace

void ConvPoolDataGradient(const ConvPool& p, const float* f, const float* dy, const uint8_t* code,
                          float* dx) {
  const Patches patches(p);
  const int64_t of_x = p.conv.c * Size(p.conv.in), numel = patches.FilterNumel();
  const ScratchArray<float> loaded(p.conv.o * numel);
  float* filters = loaded.data();
  Serially([&] {
    for (int64_t o = 0; o < p.conv.o; o++)
      patches.LoadFilter(f + o * p.conv.c * Size(p.conv.kernel), filters + o * numel);
  });
  const int64_t macs = std::max<int64_t>(1, p.conv.o * Size(p.out) * numel);
  const int64_t grain = std::max<int64_t>(1, kTaskMacs / macs);
  const auto make = [&] { return Patches::Task(patches); };
  auto run = [&](int64_t begin, int64_t end, const Patches::Task& task) {
    float* input = task.input.data();
    for (int64_t image = begin; image < end; image++) {
      std::fill(input, input + patches.InputNumel(), 0.f);
      patches.ForFilters(image, dy, code, task, [&](int64_t o, const Open& open) {
        if (std::isfinite(open.total))
          patches.Scatter(open, task, filters + o * numel);
        else
          patches.ScatterExactly(open, input, filters + o * numel);
      });
      patches.Store(input, dx + image * of_x);
    }
  };
  ParallelForWithScratch(p.conv.n, grain, make, run);
}

void ConvPoolFilterGradient(const ConvPool& p, const float* x, const float* dy, const uint8_t* code,
                            float* df, float* db) {
  const Patches patches(p);
  const int64_t numel = p.conv.o * patches.FilterNumel();
  const int64_t images = CeilDiv(p.conv.n, kSplits);
  const int64_t splits = images ? CeilDiv(p.conv.n, images) : 1;
  const ScratchArray<double> bias_sums(splits * p.conv.o);
  const ScratchArray<float> filter_sums(splits * numel);
  double* of_bias = bias_sums.data();
  float* of_filter = filter_sums.data();
  const auto make = [&] { return Patches::Task(patches); };
  auto run = [&](int64_t begin, int64_t end, const Patches::Task& task) {
    for (int64_t k = begin; k < end; k++) {
      std::fill(of_bias + k * p.conv.o, of_bias + (k + 1) * p.conv.o, 0.);
      std::fill(of_filter + k * numel, of_filter + (k + 1) * numel, 0.f);
      AddGradients(p, patches, x, dy, code, k * images, std::min((k + 1) * images, p.conv.n), task,
                   of_filter + k * numel, of_bias + k * p.conv.o);
    }
  };
  ParallelForWithScratch(splits, 1, make, run);
  Serially([&] {
    for (int64_t split = 1; split < splits; split++) {
      for (int64_t k = 0; k < numel; k++) of_filter[k] += of_filter[split * numel + k];
      for (int64_t o = 0; o < p.conv.o; o++) of_bias[o] += of_bias[split * p.conv.o + o];
    }
    for (int64_t o = 0; o < p.conv.o; o++) {
      patches.StoreFilter(of_filter + o * patches.FilterNumel(),
                          df + o * p.conv.c * Size(p.conv.kernel));
      if (db) db[o] = (float)of_bias[o];
    }
  });
}

}  // namespace cpu
}  // namespace dlsys
