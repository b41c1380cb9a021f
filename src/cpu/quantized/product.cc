// quantized_matmul and quantized_conv2d on the CPU: rows of uint8 times packed int8 weights, with
// bias, bounds and requantization in the micro-kernel of tile.h. Images are (N, H, W, C): a row is
// an output position of a window's inputs in the order row, column, channel, gathered by copies of
// whole pixels into a thread's scratch (im2col), but for 1 x 1 windows, whose rows are the image.
// The result overlaps no input. Sums are exact, so that bits depend neither on the order nor on
// threads. The micro-kernel limits products, the gathering windows over few channels.
#include <algorithm>
#include <cstring>

#include "cpu/quantized/tile.h"
#include "cpu/runtime/common.h"
#include "cpu/runtime/parallel.h"
#include "cpu/runtime/simd.h"
#include "math/int_math.h"
#include "operators/conv_geometry.h"

namespace dlsys {
namespace cpu {
namespace {

constexpr int64_t kBlockRows = 48;                    // rows of a task
constexpr int64_t kBlockCols = kTilePanels * kPanel;  // channels of a tile
constexpr int64_t kShort = 16;                        // bytes of short rows of a window
constexpr int64_t kTaskMacs = 1 << 19;                // multiply-adds worth a task

// The operands of a product of m rows of k inputs.
struct Product {
  int64_t m, n, k;
  const int8_t* w;
  int64_t panel;  // bytes from a panel of weights to the next
  Requantization to;
  uint8_t* bytes;  // of the result, or floats
  float* floats;
};

Product CheckedProduct(const char* op, const DLArray* w, const DLArray* bias,
                       const DLArray* multiplier, int64_t k, int64_t zero, int64_t low,
                       int64_t high, DLArray* y) {
  const int64_t n = Numel(bias), m = n ? Numel(y) / n : 0;
  const int64_t panels = CeilDiv(n, kPanel), steps = CeilDiv(k, kStep);
  const bool packed = w->ndim == 3 && w->shape[0] == panels && w->shape[1] == steps &&
                      w->shape[2] == kPanel * kStep;
  if (!packed || Numel(multiplier) != n || y->ndim < 1 || y->shape[y->ndim - 1] != n)
    Fail("%s: weights %s do not take %ld inputs to %s", op, ShapeText(w).c_str(), (long)k,
         ShapeText(y).c_str());
  const bool floats = y->dtype == DL_FLOAT32;
  return {
      m,
      n,
      k,
      (const int8_t*)Input<uint8_t>(op, w),
      steps * kPanel * kStep,
      {Input<int32_t>(op, bias), Input(op, multiplier), (int32_t)zero, (int32_t)low, (int32_t)high},
      floats ? nullptr : Output<uint8_t>(op, y),
      floats ? Output(op, y) : nullptr};
}

// The rows [row, row + rows) of the result at columns [begin, end); a has them, a_row apart.
void MultiplyBlock(const Product& p, const uint8_t* a, int64_t a_row, int64_t row, int64_t rows,
                   int64_t begin, int64_t end) {
  const QuantizedTileKernels& kernels = CurrentQuantizedTileKernels();
  for (int64_t n = begin; n < end; n += kBlockCols) {
    QuantizedTile t;
    t.a_row = a_row;
    t.steps = CeilDiv(p.k, kStep);
    t.w = p.w + n / kPanel * p.panel;
    t.panel = p.panel;
    t.cols = std::min(kBlockCols, end - n);
    t.to = p.to;
    t.to.bias += n;
    t.to.multiplier += n;
    t.y_row = p.n;
    const int64_t panels = CeilDiv(t.cols, kPanel);
    for (int64_t r = 0; r < rows;) {
      int size = QuantizedTileKernels::kSizes - 1;
      while (kernels.rows[size] > rows - r) size--;
      t.a = a + r * a_row;
      const int64_t at = (row + r) * p.n + n;
      t.bytes = p.bytes ? p.bytes + at : nullptr;
      t.floats = p.floats ? p.floats + at : nullptr;
      kernels.run[size][panels - 1](t);
      r += kernels.rows[size];
    }
  }
}

// The tasks of a product: blocks of rows, and of columns where there are few of those.
struct Blocks {
  int64_t rows, cols, across, count, chunk;

  explicit Blocks(const Product& p)
      : rows(RoundUp(CeilDiv(p.m, CeilDiv(p.m, kBlockRows)), kTileRows)) {
    const int64_t down = CeilDiv(p.m, rows);
    const int64_t parts = down >= 8 ? 1 : std::min<int64_t>(8 / down, CeilDiv(p.n, kBlockCols));
    cols = RoundUp(CeilDiv(p.n, parts), kBlockCols);
    across = CeilDiv(p.n, cols);
    count = down * across;
    chunk = std::max<int64_t>(1, kTaskMacs / std::max<int64_t>(1, rows * cols * p.k));
  }
};

// Calls body(scratch, row, rows, begin, end) for each block.
template <class Make, class F>
void ForBlocks(const Product& p, const Make& make, const F& body) {
  const Blocks blocks(p);
  ParallelForWithScratch(blocks.count, blocks.chunk, make,
                         [&](int64_t first, int64_t last, const auto& scratch) {
                           for (int64_t task = first; task < last; task++) {
                             const int64_t row = task / blocks.across * blocks.rows;
                             const int64_t begin = task % blocks.across * blocks.cols;
                             body(scratch, row, std::min(blocks.rows, p.m - row), begin,
                                  std::min(begin + blocks.cols, p.n));
                           }
                         });
}

// The product of rows that lie side by side, of whole steps.
void MultiplyRows(const Product& p, const uint8_t* a) {
  ForBlocks(
      p, [] { return 0; },
      [&](int, int64_t row, int64_t rows, int64_t begin, int64_t end) {
        MultiplyBlock(p, a + row * p.k, p.k, row, rows, begin, end);
      });
}

// The product of rows that gather(row, rows, pitch, to) writes to scratch; what is between their
// ends and the next step meets weights of 0.
template <class F>
void MultiplyGathered(const Product& p, const F& gather) {
  const int64_t pitch = RoundUp(p.k, kStep), most = Blocks(p).rows;
  ForBlocks(
      p, [=] { return ScratchArray<uint8_t>(most * pitch + kShort); },
      [&](const ScratchArray<uint8_t>& scratch, int64_t row, int64_t rows, int64_t begin,
          int64_t end) {
        gather(row, rows, pitch, scratch.data());
        MultiplyBlock(p, scratch.data(), pitch, row, rows, begin, end);
      });
}

void QuantizedMatMul(const DLArray* x, const DLArray* w, const DLArray* bias,
                     const DLArray* multiplier, int64_t zero, int64_t low, int64_t high,
                     DLArray* y) {
  const char* op = "quantized_matmul";
  const uint8_t* a = Input<uint8_t>(op, x);
  if (x->ndim < 1) Fail("%s: expected x (..., K)", op);
  const Product p =
      CheckedProduct(op, w, bias, multiplier, x->shape[x->ndim - 1], zero, low, high, y);
  if (!p.m || !p.n) return;
  if (p.k % kStep == 0) return MultiplyRows(p, a);
  MultiplyGathered(p, [&](int64_t row, int64_t rows, int64_t pitch, uint8_t* to) {
    for (int64_t r = 0; r < rows; r++) memcpy(to + r * pitch, a + (row + r) * p.k, p.k);
  });
}

// Copies of a few bytes without a call.
DLSYS_INLINE void CopyBytes(uint8_t* to, const uint8_t* from, int64_t n) {
  if (n >= 64) {
    memcpy(to, from, n);
  } else if (n >= 8) {
    for (int64_t k = 0; k + 8 < n; k += 8) memcpy(to + k, from + k, 8);
    memcpy(to + n - 8, from + n - 8, 8);
  } else if (n >= 4) {
    uint32_t first, last;
    memcpy(&first, from, 4);
    memcpy(&last, from + n - 4, 4);
    memcpy(to, &first, 4);
    memcpy(to + n - 4, &last, 4);
  } else {
    for (int64_t k = 0; k < n; k++) to[k] = from[k];
  }
}

DLSYS_INLINE void FillBytes(uint8_t* to, uint8_t byte, int64_t n) {
  if (n >= 8)
    memset(to, byte, n);
  else
    for (int64_t k = 0; k < n; k++) to[k] = byte;
}

// Images (n, in, channels), and the windows over them.
struct Images {
  const uint8_t* x;
  int64_t channels;
  HW in, out;
  WindowOptions windows;
  uint8_t pad;
  int64_t nbytes;  // of the images
};

// The inputs of one row of a window, columns from `first`.
DLSYS_INLINE void GatherRow(const Images& g, const uint8_t* row, int64_t first, uint8_t* to) {
  const int64_t step = g.windows.dilation.w, width = g.windows.size.w, c = g.channels;
  if (step == 1) {
    const int64_t begin = std::min(std::max<int64_t>(0, -first), width);
    const int64_t end = std::max(begin, std::min(width, g.in.w - first));
    if (begin) FillBytes(to, g.pad, begin * c);
    CopyBytes(to + begin * c, row + (first + begin) * c, (end - begin) * c);
    if (end < width) FillBytes(to + end * c, g.pad, (width - end) * c);
    return;
  }
  for (int64_t j = 0; j < width; j++, to += c) {
    const int64_t column = first + j * step;
    if (column >= 0 && column < g.in.w)
      CopyBytes(to, row + column * c, c);
    else
      FillBytes(to, g.pad, c);
  }
}

// An output position among those of all images.
struct Position {
  int64_t image, i, j;

  Position(const Images& g, int64_t at)
      : image(at / Size(g.out)), i(at / g.out.w % g.out.h), j(at % g.out.w) {}
  void Next(const Images& g) {
    if (++j < g.out.w) return;
    j = 0;
    if (++i < g.out.h) return;
    i = 0;
    image++;
  }
};

// Gather for windows of short rows without dilation: a copy of 16 bytes may read on within the
// image and write on where the next row will be, or into kShort bytes of slack.
DLSYS_INLINE bool GatherShort(const Images& g, const uint8_t* x, int64_t top, int64_t left,
                              int64_t row_bytes, uint8_t* to) {
  const uint8_t* from = x + (top * g.in.w + left) * g.channels;
  const int64_t pitch = g.in.w * g.channels, height = g.windows.size.h;
  const bool inside =
      top >= 0 && left >= 0 && top + height <= g.in.h && left + g.windows.size.w <= g.in.w;
  if (!inside || from + (height - 1) * pitch + kShort > g.x + g.nbytes) return false;
  for (int64_t r = 0; r < height; r++) memcpy(to + r * row_bytes, from + r * pitch, kShort);
  return true;
}

// The inputs of output positions [position, position + count), rows `pitch` apart.
void Gather(const Images& g, int64_t position, int64_t count, int64_t pitch, uint8_t* to) {
  const int64_t row_bytes = g.windows.size.w * g.channels;
  const bool is_short =
      row_bytes <= kShort && g.windows.dilation.w == 1 && g.windows.dilation.h == 1;
  Position at(g, position);
  for (int64_t k = 0; k < count; k++, to += pitch, at.Next(g)) {
    const int64_t top = at.i * g.windows.stride.h - g.windows.before.h;
    const int64_t left = at.j * g.windows.stride.w - g.windows.before.w;
    const uint8_t* x = g.x + at.image * Size(g.in) * g.channels;
    if (is_short && GatherShort(g, x, top, left, row_bytes, to)) continue;
    for (int64_t r = 0; r < g.windows.size.h; r++) {
      const int64_t h = top + r * g.windows.dilation.h;
      if (h < 0 || h >= g.in.h)
        FillBytes(to + r * row_bytes, g.pad, row_bytes);
      else
        GatherRow(g, x + h * g.in.w * g.channels, left, to + r * row_bytes);
    }
  }
}

Images CheckedImages(const char* op, const DLArray* x, const DLArray* y,
                     const WindowOptions& windows, int64_t pad) {
  CheckNchw(op, x);
  CheckNchw(op, y);
  const Images g{Input<uint8_t>(op, x),
                 x->shape[3],
                 {x->shape[1], x->shape[2]},
                 {y->shape[1], y->shape[2]},
                 windows,
                 (uint8_t)pad,
                 Numel(x)};
  const HW size = windows.size, dilation = windows.dilation;
  if (size.h < 1 || size.w < 1 || dilation.h < 1 || dilation.w < 1 || x->shape[0] != y->shape[0])
    Fail("%s: windows do not take %s to %s", op, ShapeText(x).c_str(), ShapeText(y).c_str());
  const HW reach{g.in.h + size.h * dilation.h, g.in.w + size.w * dilation.w};
  CheckAttributes(op, windows.stride, windows.before, reach, g.out);
  return g;
}

void QuantizedConv2d(const DLArray* x, const DLArray* w, const DLArray* bias,
                     const DLArray* multiplier, Struct<WindowOptions> windows, int64_t pad,
                     int64_t zero, int64_t low, int64_t high, DLArray* y) {
  const char* op = "quantized_conv2d";
  const Images g = CheckedImages(op, x, y, *windows, pad);
  const int64_t k = Size(windows->size) * g.channels;
  const Product p = CheckedProduct(op, w, bias, multiplier, k, zero, low, high, y);
  if (!p.m || !p.n) return;
  const bool same = Size(windows->size) == 1 && windows->stride == HW{1, 1} && g.in == g.out &&
                    windows->before == HW{0, 0};
  if (same && k % kStep == 0) return MultiplyRows(p, g.x);
  MultiplyGathered(p, [&](int64_t position, int64_t count, int64_t pitch, uint8_t* to) {
    Gather(g, position, count, pitch, to);
  });
}

// y = max(x, y) of n bytes, or x.
DLSYS_INLINE void MaxBytes(const uint8_t* x, uint8_t* y, int64_t n, bool first) {
  if (first) return CopyBytes(y, x, n);
  DLSYS_IVDEP
  for (int64_t k = 0; k < n; k++) y[k] = x[k] > y[k] ? x[k] : y[k];
}

// The largest elements of a window; each window sees an element of the image.
DLSYS_INLINE void PoolAt(const Images& g, const Position& at, uint8_t* y) {
  const HW size = g.windows.size, step = g.windows.dilation;
  const int64_t top = at.i * g.windows.stride.h - g.windows.before.h;
  const int64_t left = at.j * g.windows.stride.w - g.windows.before.w;
  bool first = true;
  for (int64_t r = 0, h = top; r < size.h; r++, h += step.h) {
    if (h < 0 || h >= g.in.h) continue;
    const uint8_t* row = g.x + (at.image * g.in.h + h) * g.in.w * g.channels;
    for (int64_t s = 0, w = left; s < size.w; s++, w += step.w)
      if (w >= 0 && w < g.in.w) {
        MaxBytes(row + w * g.channels, y, g.channels, first);
        first = false;
      }
  }
}

void QuantizedMaxPool(const DLArray* x, Struct<WindowOptions> windows, DLArray* y) {
  const char* op = "quantized_max_pool2d";
  const Images g = CheckedImages(op, x, y, *windows, 0);
  uint8_t* to = Output<uint8_t>(op, y);
  if (y->shape[3] != g.channels) Fail("%s: %s has other channels", op, ShapeText(y).c_str());
  const int64_t work = g.channels * Size(windows->size);
  ParallelFor(y->shape[0] * Size(g.out), RowGrain(work), [=](int64_t begin, int64_t end) {
    Dispatch(DLSYS_SIMD {
      Position at(g, begin);
      for (int64_t k = begin; k < end; k++, at.Next(g)) PoolAt(g, at, to + k * g.channels);
    });
  });
}

DLSYS_KERNEL(cpu, quantized_matmul, QuantizedMatMul);
DLSYS_KERNEL(cpu, quantized_conv2d, QuantizedConv2d);
DLSYS_KERNEL(cpu, quantized_max_pool2d, QuantizedMaxPool);

}  // namespace
}  // namespace cpu
}  // namespace dlsys
