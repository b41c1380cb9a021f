// Convolution as a matrix product of gathered factors; conv_tile.cuh has the kernel, conv.cuh the
// contract.
//
// The convolution and its gradient for the data multiply filters (rows, channels and taps) with
// what the taps see (channels and taps, places); the gradient for the filter multiplies dy (rows,
// places) with what the taps see (places, channels and taps). It is split along the depth into
// parts that are added in a fixed order.
#include <algorithm>

#include "cuda/conv/conv.cuh"
#include "cuda/conv/implicit_gemm.cuh"
#include "cuda/reduce/reduce.cuh"

namespace dlsys {
namespace cuda {
namespace {

// ---- tasks ----

// The convolution, or its gradient for the data.
struct CorrelateTask {
  static constexpr bool kDepthFastest = false;  // places are neighbours in memory
  Tiles tiles;
  Correlation c;
  int places;  // of an image
  bool quads;  // of places lie in one image and are 16-byte aligned in the result

  __device__ int64_t RowPitch() const { return c.filter_row; }
  __device__ const float* A(int group) const { return c.filter + group * c.filter_group; }
  __device__ const float* B(int group) const { return c.x + group * c.channels * PlaneSize(); }
  __device__ int64_t PlaneSize() const { return c.plane.h * c.plane.w; }
  __device__ int Height() const { return (int)c.plane.h; }
  __device__ int Width() const { return (int)c.plane.w; }

  __device__ Layer LayerAt(int64_t depth) const {
    const int across = (int)c.across.taps, taps = (int)c.down.taps * across;
    const int channel = (int)depth / taps, tap = (int)depth % taps;
    const int h = tap / across, w = tap % across;
    const int64_t row = c.down.tap_from + h * c.down.tap_by;
    return {
        channel * c.filter_channel + row * c.filter_width + c.across.tap_from + w * c.across.tap_by,
        channel * PlaneSize(), h * (int)c.down.tap, w * (int)c.across.tap};
  }

  __device__ Spot SpotAt(int col) const {
    const int width = (int)c.across.count;
    const int image = col / places, i = col % places / width, j = col % places % width;
    return {image * (c.groups * c.channels * PlaneSize()), (int)c.down.first + i * (int)c.down.step,
            (int)c.across.first + j * (int)c.across.step};
  }

  // Where the element of row 0 at a place goes.
  __device__ float* Target(int group, int col) const {
    const int width = (int)c.across.count;
    const int image = col / places, i = col % places / width, j = col % places % width;
    const int64_t plane = c.out_plane.h * c.out_plane.w;
    return c.out + (image * c.groups + group) * (c.rows * plane) +
           (c.down.out_from + i * c.down.out_by) * c.out_plane.w + c.across.out_from +
           j * c.across.out_by;
  }

  __device__ void Store(int group, int, int row, int col, float4 v) const {
    const int64_t plane = c.out_plane.h * c.out_plane.w;
    const float bias = c.bias ? c.bias[group * c.rows + row] : 0.f;
    v = make_float4(v.x + bias, v.y + bias, v.z + bias, v.w + bias);
    if (quads) {
      *(float4*)(Target(group, col) + row * plane) = v;
      return;
    }
    const float values[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int e = 0; e < 4; e++)
      if (col + e < tiles.cols) Target(group, col + e)[row * plane] = values[e];
  }
};

// The gradient for the filter; `out` is (parts, groups, rows, cols), df itself or scratch.
struct FilterTask {
  static constexpr bool kDepthFastest = true;
  Tiles tiles;
  Conv c;
  const float *x, *dy;
  float* out;

  __device__ int64_t Places() const { return c.out.h * c.out.w; }
  __device__ int64_t PlaneSize() const { return c.plane.h * c.plane.w; }
  __device__ int64_t RowPitch() const { return Places(); }
  __device__ const float* A(int group) const { return dy + group * tiles.rows * Places(); }
  __device__ const float* B(int group) const { return x + group * (c.c / c.groups) * PlaneSize(); }
  __device__ int Height() const { return (int)c.plane.h; }
  __device__ int Width() const { return (int)c.plane.w; }

  __device__ Layer LayerAt(int64_t depth) const {
    const int64_t image = depth / Places();
    const int place = (int)(depth % Places()), width = (int)c.out.w;
    return {image * c.o * Places() + place, image * c.c * PlaneSize(),
            place / width * (int)c.stride.h - (int)c.before.h,
            place % width * (int)c.stride.w - (int)c.before.w};
  }

  __device__ Spot SpotAt(int col) const {
    const int across = (int)c.size.w, taps = (int)c.size.h * across;
    const int channel = col / taps, tap = col % taps;
    return {channel * PlaneSize(), tap / across * (int)c.dilation.h,
            tap % across * (int)c.dilation.w};
  }

  __device__ void Store(int group, int part, int row, int col, float4 v) const {
    float* to = out + ((int64_t)(part * tiles.groups + group) * tiles.rows + row) * tiles.cols;
    const float values[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int e = 0; e < 4; e++)
      if (col + e < tiles.cols) to[col + e] = values[e];
  }
};

// ---- launchers ----

// Tiles of every kind, with their speed on an H200 relative to the largest.
struct Shape {
  int rows, cols, resident;
  double speed;
};
template <class T>
constexpr Shape ShapeOf(double speed) {
  return {T::kRows, T::kCols, T::kResident, speed};
}
constexpr Shape kShapes[] = {ShapeOf<Large>(1.0), ShapeOf<Medium>(0.95), ShapeOf<Low>(0.75),
                             ShapeOf<Flat>(0.5), ShapeOf<Small>(0.4)};

// The kind of tile that takes the least time: some blocks for each multiprocessor, one after
// another; a product that is split fills them all.
int BestShape(const Tiles& tiles, int multiprocessors, bool split) {
  int best = 0;
  double least = 0;
  for (int k = 0; k < (int)(sizeof kShapes / sizeof *kShapes); k++) {
    const Shape& s = kShapes[k];
    const int64_t blocks = CeilDiv(tiles.rows, s.rows) * CeilDiv(tiles.cols, s.cols) * tiles.groups;
    const int64_t turns = split ? blocks : CeilDiv(blocks, multiprocessors);
    const double time = turns * (s.rows * s.cols / s.speed);
    if (k == 0 || time < least) {
      least = time;
      best = k;
    }
  }
  return best;
}

int ShapeFor(const Place& at, const Tiles& tiles, bool split) {
  return at.variant == kByRule ? BestShape(tiles, Multiprocessors(at.ctx.device_id), split)
                               : at.variant;
}

void CutIntoTiles(const char* op, const Shape& shape, Tiles* tiles) {
  const int64_t rows = CeilDiv(tiles->rows, shape.rows), cols = CeilDiv(tiles->cols, shape.cols);
  if (rows * cols > INT32_MAX / 2 / tiles->groups) Fail("%s: the result is too large", op);
  tiles->row_tiles = (int)rows;
  tiles->col_tiles = (int)cols;
  tiles->part = CeilDiv(tiles->depth, kDepth) * kDepth;
}

template <class T, class Task>
void LaunchShape(const Place& at, const Task& task, int parts) {
  const Tiles& t = task.tiles;
  const unsigned blocks = (unsigned)(t.row_tiles * t.col_tiles * t.groups * parts);
  Launch(at.op, TileKernel<T, Task>, blocks, T::kBlock, 0, at.stream, task);
}

template <class Task>
void LaunchTiles(const Place& at, int shape, const Task& task, int parts) {
  using Launcher = void (*)(const Place&, const Task&, int);
  static constexpr Launcher launchers[] = {LaunchShape<Large, Task>, LaunchShape<Medium, Task>,
                                           LaunchShape<Low, Task>, LaunchShape<Flat, Task>,
                                           LaunchShape<Small, Task>};
  launchers[shape](at, task, parts);
}

constexpr int64_t kMostCols = int64_t(1) << 30;  // leaves room for index arithmetic in int

void CheckSizes(const char* op, const Conv& c) {
  if (Size(c.plane) > kMostCols || Size(c.out) > kMostCols || c.o > kMostCols ||
      c.c > kMostCols / Size(c.size) || c.o > kMostCols / Size(c.size))
    Fail("%s: planes or filters of more than %ld elements", op, (long)kMostCols);
}

void Correlate(const Place& at, Correlation c) {
  const int64_t places = c.Count(), images = c.images;
  if (places == 0) return;
  const int64_t most = kMostCols / places;  // images at a time
  for (int64_t first = 0; first < images; first += most) {
    CorrelateTask task{};
    task.c = c;
    task.c.images = std::min(most, images - first);
    task.c.x += first * c.groups * c.channels * Size(c.plane);
    task.c.out += first * c.groups * c.rows * Size(c.out_plane);
    task.places = (int)places;
    task.quads = c.Dense() && places % 4 == 0 && Aligned16(task.c.out);
    task.tiles.rows = (int)c.rows;
    task.tiles.cols = (int)(task.c.images * places);
    task.tiles.groups = (int)c.groups;
    task.tiles.depth = c.Depth();
    const int shape = ShapeFor(at, task.tiles, false);
    CutIntoTiles(at.op, kShapes[shape], &task.tiles);
    LaunchTiles(at, shape, task, 1);
  }
}

void GemmForward(const Place& at, const Conv& conv, const float* x, const float* f,
                 const float* bias, float* y) {
  CheckSizes(at.op, conv);
  Correlate(at, Forward(conv, x, f, bias, y));
}

void GemmDataGradient(const Place& at, const Conv& conv, const float* f, const float* dy,
                      float* dx) {
  CheckSizes(at.op, conv);
  for (int64_t phase = 0; phase < conv.stride.h * conv.stride.w; phase++)
    Correlate(at, DataGradient(conv, f, dy, dx, phase));
}

// Cuts the depth so that every multiprocessor has its blocks, none of fewer than 16 panels.
int SplitDepth(const Shape& shape, int multiprocessors, Tiles* tiles) {
  const int64_t blocks = (int64_t)tiles->row_tiles * tiles->col_tiles * tiles->groups;
  const int64_t wanted = (int64_t)multiprocessors * shape.resident / blocks;
  const int64_t splits = std::min(wanted, tiles->depth / (16 * kDepth));
  if (splits < 2) return 1;
  tiles->part = CeilDiv(CeilDiv(tiles->depth, splits), kDepth) * kDepth;
  return (int)CeilDiv(tiles->depth, tiles->part);
}

void GemmFilterGradient(const Place& at, const Conv& conv, const float* x, const float* dy,
                        float* df) {
  CheckSizes(at.op, conv);
  FilterTask task{};
  task.c = conv;
  task.x = x;
  task.dy = dy;
  task.out = df;
  task.tiles.rows = (int)conv.GroupFilters();
  task.tiles.cols = (int)(conv.GroupChannels() * Size(conv.size));
  task.tiles.groups = (int)conv.groups;
  task.tiles.depth = conv.n * Size(conv.out);
  const int multiprocessors = Multiprocessors(at.ctx.device_id);
  const int shape = ShapeFor(at, task.tiles, true);
  CutIntoTiles(at.op, kShapes[shape], &task.tiles);
  const int parts = SplitDepth(kShapes[shape], multiprocessors, &task.tiles);
  if (parts == 1) return LaunchTiles(at, shape, task, 1);
  const int64_t numel = conv.groups * task.tiles.rows * (int64_t)task.tiles.cols;
  Scratch partial(at.ctx, parts * numel * (int64_t)sizeof(float), at.stream);
  task.out = partial.floats();
  LaunchTiles(at, shape, task, parts);
  SumAxis(at.op, at.ctx, partial.floats(), 1, parts, numel, 1.f, df, at.stream);
}

bool FitsAll(const Place&, const Conv&) { return true; }

std::vector<std::string> Variants(Pass) {
  std::vector<std::string> names;
  for (const Shape& shape : kShapes) names.push_back(TileName(shape.rows, shape.cols));
  return names;
}

}  // namespace

const ConvAlgorithm kImplicitGemm = {"implicit_gemm", Variants,         nullptr,           FitsAll,
                                     GemmForward,     GemmDataGradient, GemmFilterGradient};

}  // namespace cuda
}  // namespace dlsys
