// Convolution as implicit GEMM: the im2col matrix is packed block by block into a thread's scratch,
// in the layout of the GEMM micro-kernel (cpu/gemm/tile.h), and never stored. Forward and
// data gradient (one GEMM per phase of the stride): M = filters, N = output positions of an image,
// K = (channel, kernel offset), with filters packed once. Filter gradient: N = (channel, kernel
// offset), K = output positions, over a fixed number of splits of the images that are added in
// order.
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

const int64_t kBlockK = 400;                    // K packed at a time
const int64_t kBlockN = 192;                    // output positions packed at a time
const int64_t kTaskMacs = 131072;               // multiply-adds worth a task
const int64_t kPitch = kBlockN + kMaxTileN;     // of packed positions
const int64_t kSplits = 16;                     // of the images of a filter gradient
const int64_t kMaxPartials = int64_t(1) << 23;  // floats that their partial sums may take
const int64_t kPackRows = 64;                   // positions transposed at a time

// Index of the smallest tile that holds so many rows.
int TileSizeFor(const TileKernels& kernels, int64_t rows) {
  int size = TileKernels::kTileSizes - 1;
  while (size > 0 && kernels.tile_rows[size - 1] >= rows) size--;
  return size;
}

// Rows of the im2col matrix of one channel, for a run of output positions. LoadChannel copies the
// input that the run needs into a zero-padded halo buffer, columns a stride apart side by side, so
// that a row is a few short copies (of whole vectors, which may overrun by kSlack). Where the halo
// would be much larger than what is gathered from it, as for 1 x 1 kernels or large dilation, rows
// are gathered from the input itself.
class Im2colReader {
  struct Run {
    int64_t offset, n;
  };

 public:
  Im2colReader(const ConvAxis& h_axis, const ConvAxis& w_axis, HW in)
      : h_axis_(h_axis),
        w_axis_(w_axis),
        in_(in),
        low_h_(Low(h_axis)),
        low_w_(Low(w_axis)),
        reach_h_(Reach(h_axis)),
        reach_w_(Reach(w_axis)),
        identity_(h_axis.kernel_size == 1 && w_axis.kernel_size == 1 && Matches(h_axis, in.h) &&
                  Matches(w_axis, in.w)) {}

  // The scratch of a reader, for up to n positions at a time.
  struct Scratch {
    const ScratchArray<Run> runs;
    const ScratchArray<float> halo;

    Scratch(const Im2colReader& reader, int64_t n)
        : runs(reader.MostRuns(n)), halo(reader.MostHalo(n)) {}
  };
  Im2colReader With(const Scratch& scratch) const {
    Im2colReader reader = *this;
    reader.runs_ = scratch.runs.data();
    reader.halo_ = scratch.halo.data();
    return reader;
  }

  // Selects positions [position, position + n) for the calls that follow.
  void SetPositions(int64_t position, int64_t n) {
    position_ = position;
    n_ = n;
    if (identity_) return;
    row_ = position / w_axis_.count;
    const int64_t last = (position + n - 1) / w_axis_.count;
    col_ = last == row_ ? position % w_axis_.count : 0;
    rows_ = (last - row_) * h_axis_.step + reach_h_;
    phase_ = (reach_w_ - 1) / w_axis_.step + (last == row_ ? n : w_axis_.count) + kSlack;
    pitch_ = phase_ * w_axis_.step;
    copied_ = rows_ <= MostCopied(n) / pitch_;
    if (copied_) PlanCopies();
  }

  // Selects the channel that ReadRow gathers from.
  void LoadChannel(const float* x) {
    x_ = x;
    if (identity_ || !copied_) return;
    float* to = halo_;
    std::fill(to, to + rows_ * pitch_, 0.f);
    const int64_t first = row_ * h_axis_.step + low_h_, step = w_axis_.step;
    const int64_t low = std::max<int64_t>(0, -first);
    const int64_t high = std::min(rows_, in_.h - first);
    for (int64_t h = low; h < high; h++)
      for (int64_t p = 0; p < step; p++) {
        // Column from + k * step goes to element k of phase p.
        const int64_t from = low_w_ + col_ * step + p;
        const int64_t begin = from < 0 ? CeilDiv(-from, step) : 0;
        const int64_t end =
            std::min(phase_ - kSlack, from < in_.w ? (in_.w - 1 - from) / step + 1 : 0);
        const float* row = x + (first + h) * in_.w + from;
        float* into = to + h * pitch_ + p * phase_;
        for (int64_t k = begin; k < end; k++) into[k] = row[k * step];
      }
  }

  // Row of kernel offset t at the positions. `row_buffer` has room for kSlack more; the result may
  // lie in x instead.
  DLSYS_INLINE const float* ReadRow(int64_t t, float* row_buffer) const {
    if (identity_) return x_ + position_;
    if (!copied_) {
      ReadUnpadded(t, row_buffer);
      return row_buffer;
    }
    const int64_t w = w_axis_.first + t % w_axis_.kernel_size * w_axis_.kernel_step - low_w_;
    const int64_t h = h_axis_.first + t / w_axis_.kernel_size * h_axis_.kernel_step - low_h_;
    const float* from = halo_ + h * pitch_ + w % w_axis_.step * phase_ + w / w_axis_.step;
    float* to = row_buffer;
    for (int64_t r = 0; r < run_count_; r++) {
      const Run run = runs_[r];
      const float* in_row = from + run.offset;
      for (int64_t k = 0; k < run.n; k += kSlack)
        memcpy(to + k, in_row + k, kSlack * sizeof(float));
      to += run.n;
    }
    return row_buffer;
  }

  static constexpr int64_t kSlack = 16;  // floats copied at a time

 private:
  static constexpr int64_t kMaxCopied = 2;  // halo elements per element gathered from them

  int64_t MostCopied(int64_t n) const {
    return kMaxCopied * h_axis_.kernel_size * w_axis_.kernel_size * n;
  }
  // Runs of n positions, and the floats of the halo around them.
  int64_t MostRuns(int64_t n) const { return n / w_axis_.count + 2; }
  int64_t MostHalo(int64_t n) const {
    const int64_t rows = MostRuns(n) * h_axis_.step + reach_h_;
    const int64_t pitch = reach_w_ + (w_axis_.count + kSlack) * w_axis_.step;
    return identity_ ? 0 : std::min(rows * pitch, MostCopied(n)) + kSlack;
  }

  static int64_t Low(const ConvAxis& s) {
    return s.first + std::min<int64_t>(0, (s.kernel_size - 1) * s.kernel_step);
  }
  static int64_t Reach(const ConvAxis& s) {
    return std::abs((s.kernel_size - 1) * s.kernel_step) + 1;
  }
  static bool Matches(const ConvAxis& s, int64_t extent) {
    return s.first == 0 && s.step == 1 && s.count == extent;
  }

  void PlanCopies() {
    run_count_ = 0;
    for (int64_t at = position_; at < position_ + n_;) {
      const int64_t i = at / w_axis_.count, j = at % w_axis_.count;
      const int64_t run = std::min(w_axis_.count - j, position_ + n_ - at);
      runs_[run_count_++] = {(i - row_) * h_axis_.step * pitch_ + j - col_, run};
      at += run;
    }
  }

  DLSYS_INLINE void ReadUnpadded(int64_t t, float* to) const {
    const int64_t h0 = h_axis_.first + t / w_axis_.kernel_size * h_axis_.kernel_step;
    const int64_t step = w_axis_.step;
    const int64_t w0 = w_axis_.first + t % w_axis_.kernel_size * w_axis_.kernel_step;
    const int64_t begin_on =
        w0 < 0 ? CeilDiv(-w0, step) : 0;  // positions [begin_on, end_on) are inside
    const int64_t end_on = w0 < in_.w ? (in_.w - 1 - w0) / step + 1 : 0;
    int64_t i = row_, j = position_ % w_axis_.count;
    for (int64_t left = n_; left > 0; i++, j = 0) {
      const int64_t run = std::min(left, w_axis_.count - j), h = h0 + i * h_axis_.step;
      const bool inside = h >= 0 && h < in_.h;
      const int64_t low = inside ? std::clamp<int64_t>(begin_on - j, 0, run) : run;
      const int64_t high = inside ? std::clamp<int64_t>(end_on - j, low, run) : run;
      const float* from = x_ + h * in_.w + w0 + j * step;
      std::fill(to, to + low, 0.f);
      for (int64_t k = low; k < high; k++) to[k] = from[k * step];
      std::fill(to + high, to + run, 0.f);
      to += run;
      left -= run;
    }
  }

  const ConvAxis h_axis_, w_axis_;
  const HW in_;
  const int64_t low_h_, low_w_, reach_h_, reach_w_;
  const bool identity_;  // 1 x 1, stride 1: im2col is the input itself
  Run* runs_ = nullptr;
  int64_t run_count_ = 0;
  float* halo_ = nullptr;
  const float* x_ = nullptr;
  int64_t position_ = 0, n_ = 0;
  bool copied_ = false;
  int64_t row_ = 0, col_ = 0, rows_ = 0, phase_ = 0, pitch_ = 0;  // of the halo
};

// ---- forward and data gradient ----

class ImplicitGemm {
 public:
  explicit ImplicitGemm(const Correlation& c, const Kept* kept = nullptr)
      : c_(c), kept_(kept), reader_(c.h, c.w, c.in), k_(c.K()), count_(c.Positions()) {
    panel_n_ = kernels_.MaxTileN();
    block_ = EvenBlock(count_, kBlockN, panel_n_);
    panels_ = CeilDiv(c_.out_channels, kernels_.MaxTileM());
  }

  int64_t FiltersNumel() const { return c_.groups * panels_ * kernels_.MaxTileM() * k_; }

  void Run() {
    const ScratchArray<float> packed(kept_ ? 0 : FiltersNumel());
    packed_ = kept_ ? kept_->filters : packed.data();
    if (!kept_ || !kept_->ready) PackFilters();
    const int64_t blocks = CeilDiv(count_, block_);
    const int64_t macs = std::max<int64_t>(1, c_.out_channels * block_ * k_);
    const int64_t grain = std::max<int64_t>(1, kTaskMacs / macs);
    const auto make = [&] { return Task(*this); };
    auto run = [&](int64_t begin, int64_t end, const Task& task) {
      for (int64_t t = begin; t < end; t++) RunBlock(t / blocks, t % blocks * block_, task);
    };
    ParallelForWithScratch(c_.images * c_.groups * blocks, grain, make, run);
  }

 private:
  // The scratch of a task: the im2col matrix of a block, and its results where they are scattered.
  struct Task {
    const ScratchArray<float> packed, scattered;
    const Im2colReader::Scratch of_reader;

    explicit Task(const ImplicitGemm& gemm)
        : packed(std::min(kBlockK, gemm.k_) * kPitch),
          scattered(gemm.c_.UnitStride() ? 0 : gemm.c_.out_channels * gemm.block_),
          of_reader(gemm.reader_, gemm.block_) {}
  };

  const float* Panel(int64_t group, int64_t panel) const {
    return packed_ + (group * panels_ + panel) * kernels_.MaxTileM() * k_;
  }
  int64_t PanelRows(int64_t panel) const {
    return std::min<int64_t>(kernels_.MaxTileM(), c_.out_channels - panel * kernels_.MaxTileM());
  }

  // Packs panels of filters as (k, rows of the tile).
  void PackFilters() {
    const int64_t grain = RowGrain(kernels_.MaxTileM() * k_);
    ParallelFor(c_.groups * panels_, grain, [&](int64_t begin, int64_t end) {
      for (int64_t p = begin; p < end; p++) PackPanel(p / panels_, p % panels_);
    });
  }

  void PackPanel(int64_t group, int64_t panel) const {
    const int64_t rows = PanelRows(panel), width = kernels_.tile_rows[TileSizeFor(kernels_, rows)];
    float* to = const_cast<float*>(Panel(group, panel));
    const float* filters =
        c_.filter + group * c_.filter_group + panel * kernels_.MaxTileM() * c_.filter_row;
    for (int64_t c = 0; c < c_.in_channels; c++)
      for (int64_t t = 0; t < c_.KernelSize(); t++, to += width) {
        const int64_t h = c_.h.kernel_from + t / c_.w.kernel_size * c_.h.kernel_by;
        const int64_t w = c_.w.kernel_from + t % c_.w.kernel_size * c_.w.kernel_by;
        const float* from = filters + c * c_.filter_channel + h * c_.filter_width + w;
        for (int64_t r = 0; r < width; r++) to[r] = r < rows ? from[r * c_.filter_row] : 0;
      }
  }

  // Computes positions [position, position + block) of one group of one image.
  void RunBlock(int64_t image_group, int64_t position, const Task& task) const {
    const int64_t cols = std::min(block_, count_ - position);
    const float* x = c_.x + image_group * c_.in_channels * Size(c_.in);
    float* out = c_.out + image_group * c_.out_channels * Size(c_.out_hw);
    float* packed = task.packed.data();
    float* to = c_.UnitStride() ? out + position : task.scattered.data();
    const int64_t pitch = c_.UnitStride() ? Size(c_.out_hw) : cols;
    Im2colReader reader = reader_.With(task.of_reader);
    reader.SetPositions(position, cols);
    for (int64_t k = 0; k == 0 || k < k_; k += kBlockK) {
      const int64_t k_block = std::min(kBlockK, k_ - k);
      Dispatch([&]() __attribute__((always_inline)) {
        PackBlock(&reader, x, cols, k, k_block, packed);
      });
      MultiplyBlock(image_group % c_.groups, k, k_block, packed, cols, to, pitch);
    }
    if (c_.bias) AddBias(image_group % c_.groups, to, pitch, cols);
    if (kept_) Finish(image_group, position, to, pitch, cols);
    if (!c_.UnitStride()) Scatter(to, position, cols, out);
  }

  // Packs im2col as (k, kPitch). Vectors of the micro-kernel that reach behind the columns find
  // zeros there: arithmetic on denormals would be slow.
  DLSYS_INLINE void PackBlock(Im2colReader* reader, const float* x, int64_t cols, int64_t k,
                              int64_t k_block, float* to) const {
    const int64_t kernel_size = c_.KernelSize(), padded = RoundUp(cols, kernels_.width);
    for (int64_t d = k; d < k + k_block; d++, to += kPitch) {
      if (d == k || d % kernel_size == 0) reader->LoadChannel(x + d / kernel_size * Size(c_.in));
      const float* in_row = reader->ReadRow(d % kernel_size, to);
      if (in_row != to) std::copy(in_row, in_row + cols, to);
      std::fill(to + cols, to + padded, 0.f);
    }
  }

  void MultiplyBlock(int64_t group, int64_t k, int64_t k_block, const float* packed, int64_t cols,
                     float* to, int64_t pitch) const {
    for (int64_t p = 0; p < panels_; p++) {
      TileArgs t;
      t.rows = PanelRows(p);
      const int size = TileSizeFor(kernels_, t.rows);
      t.k = k_block;
      t.a = Panel(group, p) + k * kernels_.tile_rows[size];
      t.b_stride = kPitch;
      t.c_stride = pitch;
      t.add = k > 0;
      for (int64_t s = 0; s < cols; s += panel_n_) {
        t.cols = std::min(panel_n_, cols - s);
        t.b = packed + s;
        t.c = to + p * kernels_.MaxTileM() * pitch + s;
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

  // Adds the residual, then cuts off what is below 0. NaN stays.
  void Finish(int64_t image_group, int64_t position, float* to, int64_t pitch, int64_t cols) const {
    const float* from = kept_->residual;
    if (from) from += image_group * c_.out_channels * Size(c_.out_hw) + position;
    for (int64_t r = 0; r < c_.out_channels; r++, to += pitch) {
      if (from)
        for (int64_t j = 0; j < cols; j++) to[j] += from[r * Size(c_.out_hw) + j];
      if (kept_->relu)
        for (int64_t j = 0; j < cols; j++) to[j] = to[j] < 0 ? 0 : to[j];
    }
  }

  void Scatter(const float* from, int64_t position, int64_t cols, float* out) const {
    for (int64_t r = 0; r < c_.out_channels; r++, out += Size(c_.out_hw))
      for (int64_t k = position; k < position + cols; k++) {
        const int64_t i = k / c_.w.count, j = k % c_.w.count;
        out[(c_.h.out_from + i * c_.h.out_by) * c_.out_hw.w + c_.w.out_from + j * c_.w.out_by] =
            *from++;
      }
  }

  const TileKernels& kernels_ = CurrentTileKernels();
  const Correlation c_;
  const Kept* const kept_;
  const Im2colReader reader_;
  const int64_t k_, count_;
  int64_t panel_n_, block_, panels_;
  float* packed_ = nullptr;
};

void Correlate(const Correlation& c) {
  if (c.images && c.out_channels && c.groups && c.Positions()) ImplicitGemm(c).Run();
}

// ---- filter gradient ----

class FilterGradient {
 public:
  FilterGradient(const Conv& conv, const float* x, const float* dy)
      : c_(conv),
        reader_(ForwardAxis(c_.out.h, c_.kernel.h, c_.stride.h, c_.pad.h, c_.dilation.h),
                ForwardAxis(c_.out.w, c_.kernel.w, c_.stride.w, c_.pad.w, c_.dilation.w), c_.in),
        x_(x),
        dy_(dy),
        rows_(c_.GroupFilters()),
        cols_(c_.GroupChannels() * Size(c_.kernel)) {}

  void Run(float* df) const {
    const int64_t size = c_.groups * rows_ * cols_;
    const int64_t splits = std::clamp<int64_t>(kMaxPartials / size, 1, std::min(c_.n, kSplits));
    const int64_t images = CeilDiv(c_.n, splits), used = CeilDiv(c_.n, images);
    const int64_t blocks = CeilDiv(cols_, kBlockN);
    const ScratchArray<float> of_splits(used > 1 ? used * size : 0);
    float* partial = used > 1 ? of_splits.data() : df;
    const auto make = [&] { return Task(*this); };
    auto run = [&](int64_t begin, int64_t end, const Task& task) {
      for (int64_t t = begin; t < end; t++) {
        const int64_t split = t / blocks / c_.groups, group = t / blocks % c_.groups;
        const int64_t last = std::min(c_.n, (split + 1) * images);
        RunBlock(group, split * images, last, t % blocks * kBlockN, partial + split * size, task);
      }
    };
    ParallelForWithScratch(used * c_.groups * blocks, 1, make, run);
    if (used > 1) ReduceSplits(partial, used, size, df);
  }

 private:
  // The scratch of a task: panels of both operands.
  struct Task {
    const ScratchArray<float> a, b;
    const Im2colReader::Scratch of_reader;

    explicit Task(const FilterGradient& gemm)
        : a(kBlockK * kMaxTileM),
          b(kBlockK * RoundUp(std::min(kBlockN, gemm.cols_), gemm.kernels_.MaxTileN())),
          of_reader(gemm.reader_, kPackRows) {}
  };

  static void ReduceSplits(const float* partial, int64_t splits, int64_t size, float* df) {
    ParallelFor(size, kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t k = begin; k < end; k++) {
        double sum = 0;
        for (int64_t p = 0; p < splits; p++) sum += partial[p * size + k];
        df[k] = (float)sum;
      }
    });
  }

  // Computes columns from `col` on of one group's df, over images [image, last).
  void RunBlock(int64_t group, int64_t image, int64_t last, int64_t col, float* to,
                const Task& task) const {
    const int64_t positions = Size(c_.out), cols = std::min(kBlockN, cols_ - col);
    const int64_t panel_n = kernels_.MaxTileN();
    float *packed_a = task.a.data(), *packed_b = task.b.data();
    Im2colReader reader = reader_.With(task.of_reader);
    const int64_t end = last * positions;
    bool add = false;
    for (int64_t q = image * positions; q < end; q += kBlockK, add = true) {
      const int64_t k_block = std::min(kBlockK, end - q);
      PackB(&reader, group, col, cols, q, k_block, packed_b);
      for (int64_t row = 0; row < rows_; row += kernels_.MaxTileM()) {
        TileArgs t;
        t.rows = std::min<int64_t>(kernels_.MaxTileM(), rows_ - row);
        const int size = TileSizeFor(kernels_, t.rows);
        PackA(group, row, t.rows, kernels_.tile_rows[size], q, k_block, packed_a);
        t.k = k_block;
        t.a = packed_a;
        t.b_stride = panel_n;
        t.c_stride = cols_;
        t.add = add;
        for (int64_t s = 0; s < cols; s += panel_n) {
          t.cols = std::min(panel_n, cols - s);
          t.b = packed_b + s * k_block;
          t.c = to + (group * rows_ + row) * cols_ + col + s;
          kernels_.packed[size][t.cols > kernels_.width](t);
        }
      }
    }
  }

  // Calls piece(image, position, n, k) for runs of positions that make up [q, q + k_block), each
  // within an image and short enough for the L1 cache.
  template <class F>
  void ForPieces(int64_t q, int64_t k_block, F&& piece) const {
    const int64_t positions = Size(c_.out);
    for (int64_t k = 0; k < k_block;) {
      const int64_t position = (q + k) % positions;
      const int64_t n = std::min({k_block - k, positions - position, kPackRows});
      piece((q + k) / positions, position, n, k);
      k += n;
    }
  }

  // Packs im2col, transposed: panels of (k, panel_n).
  void PackB(Im2colReader* reader, int64_t group, int64_t col, int64_t cols, int64_t q,
             int64_t k_block, float* to) const {
    const int64_t panel_n = kernels_.MaxTileN(), kernel_size = Size(c_.kernel);
    constexpr int64_t kRowPitch = kPackRows + Im2colReader::kSlack;
    float rows_buffer[kMaxTileN * kRowPitch];
    for (int64_t s = 0; s < cols; s += panel_n, to += panel_n * k_block) {
      const int64_t n = std::min(panel_n, cols - s);
      if (n < panel_n) std::fill(to, to + panel_n * k_block, 0.f);
      ForPieces(q, k_block, [&](int64_t image, int64_t position, int64_t run, int64_t k) {
        const float* x = x_ + (image * c_.c + group * c_.GroupChannels()) * Size(c_.in);
        reader->SetPositions(position, run);
        Dispatch([&]() __attribute__((always_inline)) {
          for (int64_t j = 0; j < n; j++) {
            const int64_t kernel_offset = col + s + j;
            if (j == 0 || kernel_offset % kernel_size == 0)
              reader->LoadChannel(x + kernel_offset / kernel_size * Size(c_.in));
            const float* in_row =
                reader->ReadRow(kernel_offset % kernel_size, rows_buffer + j * kRowPitch);
            if (in_row != rows_buffer + j * kRowPitch)
              std::copy(in_row, in_row + run, rows_buffer + j * kRowPitch);
          }
          Transpose(rows_buffer, kRowPitch, n, run, to + k * panel_n, panel_n);
        });
      });
    }
  }

  // Packs rows of dy as (k, rows of the tile).
  void PackA(int64_t group, int64_t row, int64_t rows, int64_t width, int64_t q, int64_t k_block,
             float* to) const {
    if (rows < width) std::fill(to, to + width * k_block, 0.f);
    ForPieces(q, k_block, [&](int64_t image, int64_t position, int64_t run, int64_t k) {
      const float* dy = dy_ + (image * c_.o + group * rows_ + row) * Size(c_.out) + position;
      Transpose(dy, Size(c_.out), rows, run, to + k * width, width);
    });
  }

  const TileKernels& kernels_ = CurrentTileKernels();
  const Conv c_;
  const Im2colReader reader_;
  const float *x_, *dy_;
  const int64_t rows_, cols_;
};

bool AllFinite(const float* x, int64_t n) {
  std::atomic<bool> finite{true};
  ParallelFor(n, kGrain, [&](int64_t begin, int64_t end) {
    uint32_t largest = 0;  // bit patterns without the sign order floats by magnitude
    uint32_t* const result = &largest;
    Dispatch(DLSYS_SIMD {
      uint32_t most = 0;
      for (int64_t k = begin; k < end; k++) most = std::max(most, BitsOf(x[k]) & 0x7fffffffu);
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

void GemmForwardKept(const Conv& conv, const float* x, const float* f, const float* bias,
                     const Kept& kept, float* y) {
  const Correlation c = Forward(conv, x, f, bias, y);
  if (c.images && c.out_channels && c.groups && c.Positions()) ImplicitGemm(c, &kept).Run();
}

int64_t GemmFiltersNumel(const Conv& conv) {
  return ImplicitGemm(Forward(conv, nullptr, nullptr, nullptr, nullptr)).FiltersNumel();
}

// A filter element that is not finite would turn the zeros around dy into NaN where it has no part:
// then the gradient is computed directly.
void GemmDataGradient(const Conv& conv, const float* f, const float* dy, float* dx) {
  if (!AllFinite(f, conv.o * conv.GroupChannels() * Size(conv.kernel)))
    return DirectDataGradient(conv, f, dy, dx);
  for (int64_t phase = 0; phase < conv.stride.h * conv.stride.w; phase++)
    Correlate(DataGradient(conv, f, dy, dx, phase));
}

void GemmFilterGradient(const Conv& conv, const float* x, const float* dy, float* df) {
  FilterGradient(conv, x, dy).Run(df);
}

}  // namespace cpu
}  // namespace dlsys
