// Convolution as a matrix product whose right factor is never stored: for a block of places in an
// image, what the taps see there is packed into a thread's own scratch, as the product's kernels
// want it, and multiplied with the filters, packed once. The gradient for the data is of the same
// form, once for each phase of the stride. The gradient for the filter sums over images in a fixed
// number of parts. Depthwise convolutions run directly, row by row.
#include <atomic>
#include <cstdlib>

#include "cpu/conv/conv.h"
#include "cpu/conv/conv_pool.h"
#include "cpu/gemm/tile.h"
#include "cpu/runtime/parallel.h"
#include "math/float_math.h"

namespace dlsys {
namespace cpu {
namespace {

const int64_t kMostK = 400;            // steps along the depth that are packed at a time
const int64_t kMostBlockCols = 192;    // places packed at a time
const int64_t kTaskProducts = 131072;  // products that are worth a task
const int64_t kMostRows = 12;          // of a tile, on any processor
const int64_t kMostTileCols = 32;
const int64_t kPitch = kMostBlockCols + kMostTileCols;  // of packed places
const int64_t kParts = 16;                              // of a sum over images
const int64_t kMostPartials = int64_t(1) << 23;         // floats that such parts may take
const int64_t kPackRows = 64;                           // of a transposed packing at a time

static Scratch filter_scratch, block_scratch, out_scratch, part_scratch, run_scratch, plane_scratch;

int64_t CeilDiv(int64_t n, int64_t d) { return (n + d - 1) / d; }

// The size of the fewest equal blocks, none above `most`, rounded up to `unit`.
int64_t EvenBlock(int64_t n, int64_t most, int64_t unit) {
  return CeilDiv(CeilDiv(n, CeilDiv(n, most)), unit) * unit;
}

// The smallest tile that holds so many rows.
int TileFor(const TileKernels& kernels, int64_t rows) {
  int size = TileKernels::kRowSizes - 1;
  while (size > 0 && kernels.row_sizes[size - 1] >= rows) size--;
  return size;
}

// What the taps of the windows see of one plane, for a run of places in row-major order. Load
// copies the part of the plane that the run needs with zeros around it, the columns that lie a
// stride apart side by side; what a tap sees are then short copies, whose last vector may go too
// far. Where that part is large beside what the taps see of it, as it is for one tap or for taps
// that lie far apart, they read the plane itself. Aim takes the thread's working memory: a thread
// uses one reader at a time.
class TapReader {
 public:
  TapReader(const ConvAxis& down, const ConvAxis& across, HW plane)
      : down_(down),
        across_(across),
        plane_(plane),
        low_h_(Low(down)),
        low_w_(Low(across)),
        reach_h_(Reach(down)),
        reach_w_(Reach(across)),
        whole_(down.taps == 1 && across.taps == 1 && Matches(down, plane.h) &&
               Matches(across, plane.w)) {}

  // Places [place, place + n), for the calls that follow.
  void Aim(int64_t place, int64_t n) {
    place_ = place;
    n_ = n;
    if (whole_) return;
    row_ = place / across_.count;
    const int64_t last = (place + n - 1) / across_.count;
    col_ = last == row_ ? place % across_.count : 0;
    rows_ = (last - row_) * down_.step + reach_h_;
    phase_ = (reach_w_ - 1) / across_.step + (last == row_ ? n : across_.count) + kSlack;
    pitch_ = phase_ * across_.step;
    copied_ = rows_ <= kMostCopied * down_.taps * across_.taps * n / pitch_;
    if (copied_) PlanCopies();
  }

  // The plane that the calls of Read see.
  void Load(const float* x) {
    x_ = x;
    if (whole_ || !copied_) return;
    float* to = plane_copy_;
    std::fill(to, to + rows_ * pitch_, 0.f);
    const int64_t first = row_ * down_.step + low_h_, step = across_.step;
    const int64_t low = std::max<int64_t>(0, -first);
    const int64_t high = std::min(rows_, plane_.h - first);
    for (int64_t h = low; h < high; h++)
      for (int64_t p = 0; p < step; p++) {
        // Column from + k * step goes to place k of phase p.
        const int64_t from = low_w_ + col_ * step + p;
        const int64_t begin = from < 0 ? CeilDiv(-from, step) : 0;
        const int64_t end =
            std::min(phase_ - kSlack, from < plane_.w ? (plane_.w - 1 - from) / step + 1 : 0);
        const float* row = x + (first + h) * plane_.w + from;
        float* into = to + h * pitch_ + p * phase_;
        for (int64_t k = begin; k < end; k++) into[k] = row[k * step];
      }
  }

  // What tap t (row-major) sees at the places. `line` has room for kSlack more; the values may lie
  // in x instead.
  DLSYS_INLINE const float* Read(int64_t t, float* line) const {
    if (whole_) return x_ + place_;
    if (!copied_) {
      ReadPlane(t, line);
      return line;
    }
    const int64_t across = across_.first + t % across_.taps * across_.tap - low_w_;
    const int64_t down = down_.first + t / across_.taps * down_.tap - low_h_;
    const float* from =
        plane_copy_ + down * pitch_ + across % across_.step * phase_ + across / across_.step;
    float* to = line;
    for (int64_t r = 0; r < run_count_; r++) {
      const Run run = runs_[r];
      const float* seen = from + run.offset;
      for (int64_t k = 0; k < run.n; k += kSlack) memcpy(to + k, seen + k, kSlack * sizeof(float));
      to += run.n;
    }
    return line;
  }

  static constexpr int64_t kSlack = 16;  // floats copied at a time

 private:
  static constexpr int64_t kMostCopied = 2;  // floats for each one that a tap sees

  struct Run {
    int64_t offset, n;
  };

  static int64_t Low(const ConvAxis& s) {
    return s.first + std::min<int64_t>(0, (s.taps - 1) * s.tap);
  }
  static int64_t Reach(const ConvAxis& s) { return std::abs((s.taps - 1) * s.tap) + 1; }
  static bool Matches(const ConvAxis& s, int64_t extent) {
    return s.first == 0 && s.step == 1 && s.count == extent;
  }

  void PlanCopies() {
    runs_ = run_scratch.Get<Run>(n_ / across_.count + 2);
    run_count_ = 0;
    for (int64_t at = place_; at < place_ + n_;) {
      const int64_t i = at / across_.count, j = at % across_.count;
      const int64_t run = std::min(across_.count - j, place_ + n_ - at);
      runs_[run_count_++] = {(i - row_) * down_.step * pitch_ + j - col_, run};
      at += run;
    }
    plane_copy_ = plane_scratch.Get<float>(rows_ * pitch_ + kSlack);
  }

  DLSYS_INLINE void ReadPlane(int64_t t, float* to) const {
    const int64_t h0 = down_.first + t / across_.taps * down_.tap, step = across_.step;
    const int64_t w0 = across_.first + t % across_.taps * across_.tap;
    const int64_t on = w0 < 0 ? CeilDiv(-w0, step) : 0;  // windows [on, off) see the plane
    const int64_t off = w0 < plane_.w ? (plane_.w - 1 - w0) / step + 1 : 0;
    int64_t i = row_, j = place_ % across_.count;
    for (int64_t left = n_; left > 0; i++, j = 0) {
      const int64_t run = std::min(left, across_.count - j), h = h0 + i * down_.step;
      const bool seen = h >= 0 && h < plane_.h;
      const int64_t low = seen ? std::clamp<int64_t>(on - j, 0, run) : run;
      const int64_t high = seen ? std::clamp<int64_t>(off - j, low, run) : run;
      const float* from = x_ + h * plane_.w + w0 + j * step;
      std::fill(to, to + low, 0.f);
      for (int64_t k = low; k < high; k++) to[k] = from[k * step];
      std::fill(to + high, to + run, 0.f);
      to += run;
      left -= run;
    }
  }

  const ConvAxis down_, across_;
  const HW plane_;
  const int64_t low_h_, low_w_, reach_h_, reach_w_;
  const bool whole_;  // a tap sees the plane as it lies
  Run* runs_ = nullptr;
  int64_t run_count_ = 0;
  float* plane_copy_ = nullptr;
  const float* x_ = nullptr;
  int64_t place_ = 0, n_ = 0;
  bool copied_ = false;
  int64_t row_ = 0, col_ = 0, rows_ = 0, phase_ = 0, pitch_ = 0;  // of the part
};

// ---- the convolution and its gradient for the data ----

class Correlator {
 public:
  explicit Correlator(const Correlation& c)
      : c_(c), reader_(c.h, c.w, c.in), depth_(c.K()), count_(c.Positions()) {
    strip_ = kernels_.MostCols();
    block_ = EvenBlock(count_, kMostBlockCols, strip_);
    panels_ = CeilDiv(c_.out_channels, kernels_.MostRows());
  }

  void Run() {
    packed_ = filter_scratch.Get<float>(c_.groups * panels_ * kernels_.MostRows() * depth_);
    PackFilters();
    const int64_t blocks = CeilDiv(count_, block_);
    const int64_t products = std::max<int64_t>(1, c_.out_channels * block_ * depth_);
    const int64_t grain = std::max<int64_t>(1, kTaskProducts / products);
    ParallelFor(c_.images * c_.groups * blocks, grain, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; t++) RunBlock(t / blocks, t % blocks * block_);
    });
  }

 private:
  const float* Panel(int64_t group, int64_t panel) const {
    return packed_ + (group * panels_ + panel) * kernels_.MostRows() * depth_;
  }
  int64_t PanelRows(int64_t panel) const {
    return std::min<int64_t>(kernels_.MostRows(), c_.out_channels - panel * kernels_.MostRows());
  }

  // Each panel of rows lies as (depth, rows of its tile).
  void PackFilters() {
    const int64_t grain = RowGrain(kernels_.MostRows() * depth_);
    ParallelFor(c_.groups * panels_, grain, [&](int64_t begin, int64_t end) {
      for (int64_t p = begin; p < end; p++) PackPanel(p / panels_, p % panels_);
    });
  }

  void PackPanel(int64_t group, int64_t panel) const {
    const int64_t rows = PanelRows(panel), width = kernels_.row_sizes[TileFor(kernels_, rows)];
    float* to = const_cast<float*>(Panel(group, panel));
    const float* filters =
        c_.filter + group * c_.filter_group + panel * kernels_.MostRows() * c_.filter_row;
    for (int64_t c = 0; c < c_.in_channels; c++)
      for (int64_t t = 0; t < c_.KernelSize(); t++, to += width) {
        const int64_t h = c_.h.tap_from + t / c_.w.taps * c_.h.tap_by;
        const int64_t w = c_.w.tap_from + t % c_.w.taps * c_.w.tap_by;
        const float* from = filters + c * c_.filter_channel + h * c_.filter_width + w;
        for (int64_t r = 0; r < width; r++) to[r] = r < rows ? from[r * c_.filter_row] : 0;
      }
  }

  // Places [place, place + block) of one group of one image.
  void RunBlock(int64_t image_group, int64_t place) const {
    const int64_t cols = std::min(block_, count_ - place);
    const float* x = c_.x + image_group * c_.in_channels * Size(c_.in);
    float* out = c_.out + image_group * c_.out_channels * Size(c_.out_hw);
    float* to = c_.UnitStride() ? out + place : out_scratch.Get<float>(c_.out_channels * cols);
    const int64_t pitch = c_.UnitStride() ? Size(c_.out_hw) : cols;
    float* packed = block_scratch.Get<float>(std::min(kMostK, depth_) * kPitch);
    TapReader reader = reader_;
    reader.Aim(place, cols);
    for (int64_t k = 0; k == 0 || k < depth_; k += kMostK) {
      const int64_t depth = std::min(kMostK, depth_ - k);
      Dispatch(
          [&]() __attribute__((always_inline)) { PackBlock(&reader, x, cols, k, depth, packed); });
      Multiply(image_group % c_.groups, k, depth, packed, cols, to, pitch);
    }
    if (c_.bias) AddBias(image_group % c_.groups, to, pitch, cols);
    if (!c_.UnitStride()) Scatter(to, place, cols, out);
  }

  // Lies as (depth, kPitch); what is behind the columns is anything.
  DLSYS_INLINE void PackBlock(TapReader* reader, const float* x, int64_t cols, int64_t k,
                              int64_t depth, float* to) const {
    const int64_t taps = c_.KernelSize();
    for (int64_t d = k; d < k + depth; d++, to += kPitch) {
      if (d == k || d % taps == 0) reader->Load(x + d / taps * Size(c_.in));
      const float* seen = reader->Read(d % taps, to);
      if (seen != to) std::copy(seen, seen + cols, to);
    }
  }

  void Multiply(int64_t group, int64_t k, int64_t depth, const float* packed, int64_t cols,
                float* to, int64_t pitch) const {
    for (int64_t p = 0; p < panels_; p++) {
      TileArgs t;
      t.rows = PanelRows(p);
      const int size = TileFor(kernels_, t.rows);
      t.k = depth;
      t.a = Panel(group, p) + k * kernels_.row_sizes[size];
      t.b_stride = kPitch;
      t.c_stride = pitch;
      t.add = k > 0;
      for (int64_t s = 0; s < cols; s += strip_) {
        t.cols = std::min(strip_, cols - s);
        t.b = packed + s;
        t.c = to + p * kernels_.MostRows() * pitch + s;
        kernels_.packed[size][t.cols > kernels_.width](t);
      }
    }
  }

  void AddBias(int64_t group, float* to, int64_t pitch, int64_t cols) const {
    for (int64_t r = 0; r < c_.out_channels; r++) {
      const float bias = c_.bias[group * c_.out_channels + r];
      for (int64_t j = 0; j < cols; j++) to[r * pitch + j] += bias;
    }
  }

  void Scatter(const float* from, int64_t place, int64_t cols, float* out) const {
    for (int64_t r = 0; r < c_.out_channels; r++, out += Size(c_.out_hw))
      for (int64_t k = place; k < place + cols; k++) {
        const int64_t i = k / c_.w.count, j = k % c_.w.count;
        out[(c_.h.out_from + i * c_.h.out_by) * c_.out_hw.w + c_.w.out_from +
            j * c_.w.out_by] = *from++;
      }
  }

  const TileKernels& kernels_ = CurrentTileKernels();
  const Correlation c_;
  const TapReader reader_;
  const int64_t depth_, count_;
  int64_t strip_, block_, panels_;
  float* packed_ = nullptr;
};

void Correlate(const Correlation& c) {
  if (c.images && c.out_channels && c.groups && c.Positions()) Correlator(c).Run();
}

// ---- the gradient for the filter ----

class FilterSum {
 public:
  FilterSum(const Conv& conv, const float* x, const float* dy)
      : c_(conv),
        reader_(ForwardAxis(c_.out.h, c_.kernel.h, c_.stride.h, c_.pad.h, c_.dilation.h),
                ForwardAxis(c_.out.w, c_.kernel.w, c_.stride.w, c_.pad.w, c_.dilation.w),
                c_.in),
        x_(x),
        dy_(dy),
        rows_(c_.GroupFilters()),
        cols_(c_.GroupChannels() * Size(c_.kernel)) {}

  void Run(float* df) const {
    const int64_t size = c_.groups * rows_ * cols_;
    const int64_t parts = std::clamp<int64_t>(kMostPartials / size, 1, std::min(c_.n, kParts));
    const int64_t images = CeilDiv(c_.n, parts), used = CeilDiv(c_.n, images);
    const int64_t blocks = CeilDiv(cols_, kMostBlockCols);
    float* partial = used > 1 ? part_scratch.Get<float>(used * size) : df;
    ParallelFor(used * c_.groups * blocks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; t++) {
        const int64_t part = t / blocks / c_.groups, group = t / blocks % c_.groups;
        const int64_t last = std::min(c_.n, (part + 1) * images);
        RunBlock(group, part * images, last, t % blocks * kMostBlockCols, partial + part * size);
      }
    });
    if (used > 1) AddParts(partial, used, size, df);
  }

 private:
  static void AddParts(const float* partial, int64_t parts, int64_t size, float* df) {
    ParallelFor(size, kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t k = begin; k < end; k++) {
        double sum = 0;
        for (int64_t p = 0; p < parts; p++) sum += partial[p * size + k];
        df[k] = (float)sum;
      }
    });
  }

  // Columns from `col` on of one group's gradient, over images [image, last).
  void RunBlock(int64_t group, int64_t image, int64_t last, int64_t col, float* to) const {
    const int64_t places = Size(c_.out), cols = std::min(kMostBlockCols, cols_ - col);
    const int64_t strip = kernels_.MostCols(), strips = CeilDiv(cols, strip);
    float* right = block_scratch.Get<float>(kMostK * (strips * strip + kMostRows));
    float* left = right + kMostK * strips * strip;
    const int64_t end = last * places;
    bool add = false;
    for (int64_t q = image * places; q < end; q += kMostK, add = true) {
      const int64_t depth = std::min(kMostK, end - q);
      PackRight(group, col, cols, q, depth, right);
      for (int64_t row = 0; row < rows_; row += kernels_.MostRows()) {
        TileArgs t;
        t.rows = std::min<int64_t>(kernels_.MostRows(), rows_ - row);
        const int size = TileFor(kernels_, t.rows);
        PackLeft(group, row, t.rows, kernels_.row_sizes[size], q, depth, left);
        t.k = depth;
        t.a = left;
        t.b_stride = strip;
        t.c_stride = cols_;
        t.add = add;
        for (int64_t s = 0; s < cols; s += strip) {
          t.cols = std::min(strip, cols - s);
          t.b = right + s * depth;
          t.c = to + (group * rows_ + row) * cols_ + col + s;
          kernels_.packed[size][t.cols > kernels_.width](t);
        }
      }
    }
  }

  // Calls piece(image, place, n, k) for the runs of places that make up [q, q + depth), all within
  // an image and short enough for the first cache.
  template <class F>
  void ForPieces(int64_t q, int64_t depth, F&& piece) const {
    const int64_t places = Size(c_.out);
    for (int64_t k = 0; k < depth;) {
      const int64_t place = (q + k) % places;
      const int64_t n = std::min({depth - k, places - place, kPackRows});
      piece((q + k) / places, place, n, k);
      k += n;
    }
  }

  // Each strip of taps lies as (depth, strip).
  void PackRight(int64_t group, int64_t col, int64_t cols, int64_t q, int64_t depth,
                 float* to) const {
    const int64_t strip = kernels_.MostCols(), taps = Size(c_.kernel);
    constexpr int64_t kLine = kPackRows + TapReader::kSlack;
    float lines[kMostTileCols * kLine];
    TapReader reader = reader_;
    for (int64_t s = 0; s < cols; s += strip, to += strip * depth) {
      const int64_t n = std::min(strip, cols - s);
      if (n < strip) std::fill(to, to + strip * depth, 0.f);
      ForPieces(q, depth, [&](int64_t image, int64_t place, int64_t run, int64_t k) {
        const float* x = x_ + (image * c_.c + group * c_.GroupChannels()) * Size(c_.in);
        reader.Aim(place, run);
        Dispatch([&]() __attribute__((always_inline)) {
          for (int64_t j = 0; j < n; j++) {
            const int64_t tap = col + s + j;
            if (j == 0 || tap % taps == 0) reader.Load(x + tap / taps * Size(c_.in));
            const float* seen = reader.Read(tap % taps, lines + j * kLine);
            if (seen != lines + j * kLine) std::copy(seen, seen + run, lines + j * kLine);
          }
          Transpose(lines, kLine, n, run, to + k * strip, strip);
        });
      });
    }
  }

  // Rows of dy as (depth, rows of the tile).
  void PackLeft(int64_t group, int64_t row, int64_t rows, int64_t width, int64_t q, int64_t depth,
                float* to) const {
    if (rows < width) std::fill(to, to + width * depth, 0.f);
    ForPieces(q, depth, [&](int64_t image, int64_t place, int64_t run, int64_t k) {
      const float* dy = dy_ + (image * c_.o + group * rows_ + row) * Size(c_.out) + place;
      Transpose(dy, Size(c_.out), rows, run, to + k * width, width);
    });
  }

  const TileKernels& kernels_ = CurrentTileKernels();
  const Conv c_;
  const TapReader reader_;
  const float *x_, *dy_;
  const int64_t rows_, cols_;
};

bool AllFinite(const float* x, int64_t n) {
  std::atomic<bool> finite{true};
  ParallelFor(n, kGrain, [&](int64_t begin, int64_t end) {
    uint32_t largest = 0;  // of the bits but for the sign, which order numbers by size
    uint32_t* const result = &largest;
    Dispatch(DLSYS_SIMD {
      uint32_t most = 0;
      for (int64_t k = begin; k < end; k++) most = std::max(most, BitsOfFloat(x[k]) & 0x7fffffffu);
      *result = most;
    });
    if (largest >= 0x7f800000u) finite = false;
  });
  return finite;
}

}  // namespace

void GemmForward(const Conv& conv, const float* x, const float* f, const float* bias, float* y) {
  Correlate(Forward(conv, x, f, bias, y));
}

// A tap that is not finite would make NaN with the zeros around dy, in elements that it has no part
// in: then the sum goes tap by tap.
void GemmDataGradient(const Conv& conv, const float* f, const float* dy, float* dx) {
  if (!AllFinite(f, conv.o * conv.GroupChannels() * Size(conv.kernel)))
    return DirectDataGradient(conv, f, dy, dx);
  for (int64_t phase = 0; phase < conv.stride.h * conv.stride.w; phase++)
    Correlate(DataGradient(conv, f, dy, dx, phase));
}

void GemmFilterGradient(const Conv& conv, const float* x, const float* dy, float* df) {
  FilterSum(conv, x, dy).Run(df);
}

}  // namespace cpu
}  // namespace dlsys
