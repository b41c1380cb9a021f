// Gradients of convolution + relu + max-pool, sparse: a window passes its gradient to one element
// at most, so nothing is unpooled. Each window that relu left open adds its dy times one patch of x
// to the filter gradient (gather), or its dy times the filter to one patch of dx (scatter). Images
// are kept channels last (NHWC), where a patch is a few contiguous rows. Sums over images are split
// in a fixed way and added in order.
#include <cmath>
#include <type_traits>

#include "cpu/conv/conv_pool.h"
#include "cpu/runtime/parallel.h"
#include "cpu/runtime/simd.h"
#include "math/int_math.h"

namespace dlsys {
namespace cpu {
namespace {

constexpr int64_t kSplits = 16;        // of the images
constexpr int64_t kTaskMacs = 131072;  // multiply-adds worth a task
constexpr int64_t kMostVectors = 12;   // of a patch at a time

// ---- kernels ----

// Windows: where their patches begin and the gradients of their values.
struct Open {
  int64_t count;
  int64_t* at;
  float* dy;
};

// Vectors of a patch: their offsets in the input, and the values that multiply them or accumulate
// them, vector after vector.
struct Vectors {
  const int64_t* at;
  float *in, *values;
};
using PatchFunction = void (*)(const Open&, const Vectors&);

template <int kWidth>
struct Types {
  typedef float Vector __attribute__((vector_size(kWidth * sizeof(float))));
  typedef float Anywhere
      __attribute__((vector_size(kWidth * sizeof(float)), aligned(4), may_alias));
};

// values += sum over windows of dy * patch. Few vectors are accumulated in two alternating sets, to
// hide FMA latency.
template <int kWidth, int kVectors>
DLSYS_INLINE void Gather(const Open& open, const Vectors& v) {
  typedef typename Types<kWidth>::Vector Vector;
  typedef typename Types<kWidth>::Anywhere Anywhere;
  constexpr int kSets = kVectors <= kMostVectors / 2 ? 2 : 1;
  Vector sum[kSets][kVectors] = {};
  int64_t at[kVectors];
  for (int k = 0; k < kVectors; k++) at[k] = v.at[k];
  const auto add = [&](int64_t window, Vector* to) __attribute__((always_inline)) {
    const float* patch = v.in + open.at[window];
    const float dy = open.dy[window];
    for (int k = 0; k < kVectors; k++) to[k] += dy * *(const Anywhere*)(patch + at[k]);
  };
  int64_t window = 0;
  for (; window + kSets <= open.count; window += kSets)
    for (int s = 0; s < kSets; s++) add(window + s, sum[s]);
  for (; window < open.count; window++) add(window, sum[0]);
  for (int k = 0; k < kVectors; k++) {
    if (kSets == 2) sum[0][k] += sum[kSets - 1][k];
    *(Anywhere*)(v.values + k * kWidth) += sum[0][k];
  }
}

// Each window's patch += dy * values.
template <int kWidth, int kVectors>
DLSYS_INLINE void Scatter(const Open& open, const Vectors& v) {
  typedef typename Types<kWidth>::Vector Vector;
  typedef typename Types<kWidth>::Anywhere Anywhere;
  Vector values[kVectors];
  int64_t at[kVectors];
  for (int k = 0; k < kVectors; k++) values[k] = *(const Anywhere*)(v.values + k * kWidth);
  for (int k = 0; k < kVectors; k++) at[k] = v.at[k];
  for (int64_t window = 0; window < open.count; window++) {
    float* patch = v.in + open.at[window];
    const float dy = open.dy[window];
    for (int k = 0; k < kVectors; k++) *(Anywhere*)(patch + at[k]) += dy * values[k];
  }
}

// For 1 to kMostVectors vectors.
struct PatchKernels {
  int width;
  PatchFunction gather[kMostVectors], scatter[kMostVectors];
};

#define DLSYS_PATCH_SIZES(F, width)                                                    \
  {                                                                                    \
      F<width, 1>, F<width, 2>, F<width, 3>, F<width, 4>,  F<width, 5>,  F<width, 6>,  \
      F<width, 7>, F<width, 8>, F<width, 9>, F<width, 10>, F<width, 11>, F<width, 12>, \
  }
#define DLSYS_PATCHES(Isa, width) \
  {width, DLSYS_PATCH_SIZES(Gather##Isa, width), DLSYS_PATCH_SIZES(Scatter##Isa, width)}

template <int kWidth, int kVectors>
void GatherBaseline(const Open& open, const Vectors& v) {
  Gather<kWidth, kVectors>(open, v);
}
template <int kWidth, int kVectors>
void ScatterBaseline(const Open& open, const Vectors& v) {
  Scatter<kWidth, kVectors>(open, v);
}
constexpr PatchKernels kBaseline[] = {DLSYS_PATCHES(Baseline, 4)};

#ifdef __x86_64__
template <int kWidth, int kVectors>
DLSYS_AVX2 void GatherAvx2(const Open& open, const Vectors& v) {
  Gather<kWidth, kVectors>(open, v);
}
template <int kWidth, int kVectors>
DLSYS_AVX2 void ScatterAvx2(const Open& open, const Vectors& v) {
  Scatter<kWidth, kVectors>(open, v);
}
constexpr PatchKernels kAvx2[] = {DLSYS_PATCHES(Avx2, 4), DLSYS_PATCHES(Avx2, 8)};

template <int kWidth, int kVectors>
DLSYS_AVX512 void GatherAvx512(const Open& open, const Vectors& v) {
  Gather<kWidth, kVectors>(open, v);
}
template <int kWidth, int kVectors>
DLSYS_AVX512 void ScatterAvx512(const Open& open, const Vectors& v) {
  Scatter<kWidth, kVectors>(open, v);
}
constexpr PatchKernels kAvx512[] = {DLSYS_PATCHES(Avx512, 4), DLSYS_PATCHES(Avx512, 8),
                                    DLSYS_PATCHES(Avx512, 16)};
#endif

template <size_t n>
const PatchKernels& Narrowest(const PatchKernels (&kernels)[n], int64_t elements) {
  const auto vectors = [&](size_t k) { return (elements - 1) / kernels[k].width; };
  size_t k = 0;
  while (vectors(k) > vectors(n - 1)) k++;
  return kernels[k];
}

// The narrowest that hold so many elements in the fewest vectors.
const PatchKernels& KernelsFor(int64_t elements) {
#ifdef __x86_64__
  if (CurrentIsa() == Isa::kAvx512) return Narrowest(kAvx512, elements);
  if (CurrentIsa() == Isa::kAvx2) return Narrowest(kAvx2, elements);
#endif
  return Narrowest(kBaseline, elements);
}

// ---- input and patches ----

float Total(const float* values, int64_t n) {
  constexpr int kSums = 16;
  float sums[kSums] = {}, total = 0;
  int64_t k = 0;
  for (; k + kSums <= n; k += kSums)
    for (int j = 0; j < kSums; j++) sums[j] += values[k + j];
  for (; k < n; k++) sums[k % kSums] += values[k];
  for (float sum : sums) total += sum;
  return total;
}

// An image, channels last, as far as windows see it; the vectors of a patch or a filter; and the
// open windows.
class Patches {
 public:
  explicit Patches(const ConvPool& p)
      : p_(p),
        length_(p.conv.kernel.w * p.conv.c),
        kernels_(KernelsFor(length_)),
        seen_(SeenByWindows(p)),
        down_(seen_.h, p.conv.pad.h, p.conv.in.h),
        across_(seen_.w, p.conv.pad.w, p.conv.in.w),
        row_(RoundUp(length_, kernels_.width)),
        pitch_((seen_.w - p.conv.kernel.w) * p.conv.c + row_),
        vectors_(p.conv.kernel.h * row_ / kernels_.width),
        at_scratch_(vectors_),
        at_(at_scratch_.data()) {
    const int64_t width = kernels_.width, vectors = row_ / width;
    Serially([&] {
      for (int64_t k = 0; k < vectors_; k++) at_[k] = k / vectors * pitch_ + k % vectors * width;
    });
    for (int64_t k = 0; k < p.window * p.window; k++)
      offsets_[k] = k / p.window * pitch_ + k % p.window * p.conv.c;
  }

  const PatchKernels& kernels() const { return kernels_; }
  int64_t InputNumel() const { return seen_.h * pitch_; }

  // The scratch of a task: an input, and the open windows of an image under one filter, whose
  // gradients are behind their positions: in an array apart they took 15 % longer to store.
  struct Task {
    const ScratchArray<float> input;
    const ScratchArray<int64_t> windows;

    explicit Task(const Patches& patches)
        : input(patches.InputNumel()), windows(2 * Size(patches.p_.out)) {}
  };

  int64_t FilterNumel() const { return p_.conv.kernel.h * row_; }  // in vectors

  // Transposes to channels last inside zero padding; `to` had zeros there before.
  void Load(const float* x, float* to) const {
    ForRows([&](int64_t in_offset, int64_t at) {
      Transpose(x + in_offset, Size(p_.conv.in), p_.conv.c, across_.Size(), to + at, p_.conv.c);
    });
  }

  // All of x, zeros where no window sees it.
  void Store(const float* from, float* x) const {
    if (down_.Size() < p_.conv.in.h || across_.Size() < p_.conv.in.w)
      std::fill(x, x + p_.conv.c * Size(p_.conv.in), 0.f);
    ForRows([&](int64_t in_offset, int64_t at) {
      Transpose(from + at, p_.conv.c, across_.Size(), p_.conv.c, x + in_offset, Size(p_.conv.in));
    });
  }

  // One filter (c, size) as the vectors of a patch, zeros behind its rows; and back.
  void LoadFilter(const float* f, float* to) const {
    std::fill(to, to + FilterNumel(), 0.f);
    for (int64_t h = 0; h < p_.conv.kernel.h; h++)
      Transpose(f + h * p_.conv.kernel.w, Size(p_.conv.kernel), p_.conv.c, p_.conv.kernel.w,
                to + h * row_, p_.conv.c);
  }
  void StoreFilter(const float* from, float* f) const {
    for (int64_t h = 0; h < p_.conv.kernel.h; h++)
      Transpose(from + h * row_, p_.conv.c, p_.conv.kernel.w, p_.conv.c, f + h * p_.conv.kernel.w,
                Size(p_.conv.kernel));
  }

  // The windows of one image under one filter that have a gradient: first every `apart`th of every
  // `apart`th row, then their neighbors; the distance may be a constant. Inlined, its loops would
  // be short of registers.
  template <class Apart>
  __attribute__((noinline)) Open Find(int64_t image, int64_t o, const float* dy,
                                      const uint8_t* code, Apart apart, const Task& task) const {
    const HW out = p_.out;
    const int64_t windows = Size(out), positions = p_.window * p_.window;
    const int64_t down = p_.window * pitch_, across = p_.window * p_.conv.c;
    dy += (image * p_.conv.o + o) * windows;
    code += (image * p_.conv.o + o) * windows;
    int64_t count = 0;
    int64_t* at = task.windows.data();
    float* values = (float*)(at + windows);
    for (int64_t row = 0; row < apart; row++)
      for (int64_t col = 0; col < apart; col++)
        for (int64_t i = row; i < out.h; i += apart)
          for (int64_t j = col; j < out.w; j += apart) {
            const int64_t k = i * out.w + j;
            at[count] = i * down + j * across + offsets_[code[k] % 16];
            values[count] = dy[k];
            count += code[k] < positions;
          }
    return {count, at, values};
  }

  // The distance that windows must have for their patches not to overlap.
  int64_t Apart() const {
    return (std::max(p_.conv.kernel.h, p_.conv.kernel.w) + 2 * p_.window - 2) / p_.window;
  }

  // Calls kernels[k](open, vectors) for pieces of k + 1 vectors that make up a patch and a filter.
  void Run(const PatchFunction* kernels, const Open& open, float* input, float* filter) const {
    const int64_t vectors = vectors_;
    const int64_t pieces = CeilDiv(vectors, kMostVectors);
    for (int64_t k = 0; k < pieces; k++) {
      const int64_t first = k * vectors / pieces, last = (k + 1) * vectors / pieces;
      kernels[last - first - 1](open, {&at_[first], input, filter + first * kernels_.width});
    }
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
  // Calls row(offset in x, offset in the channels-last input) for each row inside.
  template <class F>
  void ForRows(const F& row) const {
    for (int64_t h = down_.begin; h < down_.end; h++)
      row((h - p_.conv.pad.h) * p_.conv.in.w + across_.begin - p_.conv.pad.w,
          h * pitch_ + across_.begin * p_.conv.c);
  }

  const ConvPool p_;
  const int64_t length_;  // of a patch's row
  const PatchKernels& kernels_;
  const HW seen_;
  const Inside down_, across_;
  const int64_t row_, pitch_;  // row pitch of a filter, and of the input
  const int64_t vectors_;      // of a patch
  const ScratchArray<int64_t> at_scratch_;
  int64_t* const at_;         // their offsets in the input
  int64_t offsets_[16] = {};  // where a patch begins, by its window's code
};

// ---- sums over images ----

// Adds the gradients of images [begin, end) to df, its filters as vectors, and db.
void AddGradients(const ConvPool& p, const Patches& patches, const float* x, const float* dy,
                  const uint8_t* code, int64_t begin, int64_t end, const Patches::Task& task,
                  float* df, double* db) {
  const int64_t of_x = p.conv.c * Size(p.conv.in);
  const std::integral_constant<int64_t, 1> adjacent;
  float* input = task.input.data();
  std::fill(input, input + patches.InputNumel(), 0.f);
  for (int64_t image = begin; image < end; image++) {
    patches.Load(x + image * of_x, input);
    for (int64_t o = 0; o < p.conv.o; o++) {
      const Open open = patches.Find(image, o, dy, code, adjacent, task);
      patches.Run(patches.kernels().gather, open, input, df + o * patches.FilterNumel());
      db[o] += Total(open.dy, open.count);
    }
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
  // Consecutive windows lie apart, so that a patch is not read right after an overlapping one was
  // written.
  const int64_t apart = patches.Apart();
  const int64_t macs = std::max<int64_t>(1, p.conv.o * Size(p.out) * numel);
  const int64_t grain = std::max<int64_t>(1, kTaskMacs / macs);
  const auto make = [&] { return Patches::Task(patches); };
  auto run = [&](int64_t begin, int64_t end, const Patches::Task& task) {
    float* input = task.input.data();
    for (int64_t image = begin; image < end; image++) {
      std::fill(input, input + patches.InputNumel(), 0.f);
      for (int64_t o = 0; o < p.conv.o; o++) {
        const Open open = patches.Find(image, o, dy, code, apart, task);
        if (std::isfinite(Total(open.dy, open.count)))
          patches.Run(patches.kernels().scatter, open, input, filters + o * numel);
        else
          patches.ScatterExactly(open, input, filters + o * numel);
      }
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
