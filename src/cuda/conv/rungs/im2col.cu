// The rung `im2col`: the patches of the images are copied to a matrix in scratch, one column for
// each output position, so that a convolution and its gradients become GEMMs. float32, at the
// precision of the GEMM; conv.cuh has the contract. Its variants name the rung of that GEMM.
//
// Columns (groups, K, images * positions), K = (channel, kernel offset), are made for as many
// images at a time as the workspace holds; a product over them has the layout (filters, images *
// positions) and is transposed on its way to and from NCHW. The data gradient gathers from its
// columns, so that the order of sums is fixed. Limited by the traffic of the columns, kernel times
// that of the images.
#include "cuda/conv/conv.cuh"
#include "cuda/runtime/launch.cuh"

namespace dlsys {
namespace cuda {
namespace {

// ---- kernels ----

// columns (c, kernel, images, out) of x (images, c, in)
__global__ void ColumnsKernel(const Conv c, const float* x, float* columns, int64_t numel) {
  const int64_t out = c.out.h * c.out.w, in = c.in.h * c.in.w, kernel = c.kernel.h * c.kernel.w;
  for (int64_t k = FirstItem(); k < numel; k += ItemStep()) {
    const int64_t position = k % out, n = k / out % c.n, row = k / out / c.n;
    const int64_t offset = row % kernel, channel = row / kernel;
    const int64_t h =
        position / c.out.w * c.stride.h - c.pad.h + offset / c.kernel.w * c.dilation.h;
    const int64_t w =
        position % c.out.w * c.stride.w - c.pad.w + offset % c.kernel.w * c.dilation.w;
    const bool inside = h >= 0 && h < c.in.h && w >= 0 && w < c.in.w;
    columns[k] = inside ? x[(n * c.c + channel) * in + h * c.in.w + w] : 0.f;
  }
}

// dx (images, c, in): each element sums what the columns have of it.
__global__ void GatherColumnsKernel(const Conv c, const float* columns, float* dx, int64_t numel) {
  const int64_t out = c.out.h * c.out.w, in = c.in.h * c.in.w, kernel = c.kernel.h * c.kernel.w;
  for (int64_t k = FirstItem(); k < numel; k += ItemStep()) {
    const int64_t n = k / in / c.c, channel = k / in % c.c;
    const int64_t h = k % in / c.in.w + c.pad.h, w = k % c.in.w + c.pad.w;
    float sum = 0.f;
    for (int64_t offset = 0; offset < kernel; offset++) {
      const int64_t down = h - offset / c.kernel.w * c.dilation.h;
      const int64_t across = w - offset % c.kernel.w * c.dilation.w;
      const int64_t i = down / c.stride.h, j = across / c.stride.w;
      if (down >= 0 && across >= 0 && down % c.stride.h == 0 && across % c.stride.w == 0 &&
          i < c.out.h && j < c.out.w)
        sum += columns[((channel * kernel + offset) * c.n + n) * out + i * c.out.w + j];
    }
    dx[k] = sum;
  }
}

// y (images, o, out) of rows (o, images, out), plus bias (o) or none
__global__ void ToImagesKernel(const Conv c, const float* rows, const float* bias, float* y,
                               int64_t numel) {
  const int64_t out = c.out.h * c.out.w;
  for (int64_t k = FirstItem(); k < numel; k += ItemStep()) {
    const int64_t n = k / out / c.o, o = k / out % c.o;
    y[k] = rows[(o * c.n + n) * out + k % out] + (bias ? bias[o] : 0.f);
  }
}

// rows (o, images, out) of dy (images, o, out)
__global__ void ToRowsKernel(const Conv c, const float* dy, float* rows, int64_t numel) {
  const int64_t out = c.out.h * c.out.w;
  for (int64_t k = FirstItem(); k < numel; k += ItemStep()) {
    const int64_t n = k / out % c.n, o = k / out / c.n;
    rows[k] = dy[(n * c.o + o) * out + k % out];
  }
}

__global__ void AddKernel(const float* part, float* sum, int64_t numel) {
  for (int64_t k = FirstItem(); k < numel; k += ItemStep()) sum[k] += part[k];
}

// ---- launchers ----

// The numbers of the rungs of GEMM among its algorithms, the others being their tiles.
std::vector<int64_t> GemmRungs() {
  std::vector<int64_t> numbers;
  const std::vector<Algorithm>& algorithms = GemmAlgorithms();
  for (size_t k = 0; k < algorithms.size(); k++)
    if (algorithms[k].name.find(' ') == std::string::npos) numbers.push_back((int64_t)k + 1);
  return numbers;
}

int64_t K(const Conv& c) { return c.GroupChannels() * Size(c.kernel); }

// Runs `work(chunk, first image)` for images in chunks, each with columns and rows in scratch.
template <class Work>
void ForEachChunk(const ConvCall& at, const Conv& c, int64_t fixed, Work&& work) {
  constexpr int64_t kFloat = sizeof(float);
  const int64_t columns = c.c * Size(c.kernel) * Size(c.out), rows = c.o * Size(c.out);
  const int64_t most = ImagesAtOnce(at, "im2col", c.n, (columns + rows) * kFloat, fixed * kFloat);
  const Scratch of_columns(at.ctx, most * columns * kFloat, at.stream);
  const Scratch of_rows(at.ctx, most * rows * kFloat, at.stream);
  for (int64_t first = 0; first < c.n; first += most) {
    Conv chunk = c;
    chunk.n = std::min(most, c.n - first);
    work(chunk, first, of_columns.floats(), of_rows.floats());
  }
}

void Product(const ConvCall& at, const float* a, const float* b, float* c, int64_t m, int64_t n,
             int64_t k, bool trans_a, bool trans_b) {
  Gemm gemm{a, b, c, m, n, k, trans_a, trans_b, at.ctx, at.precision};
  RunGemm(at.op, gemm, at.stream, at.variant == kHeuristic ? 0 : GemmRungs()[at.variant]);
}

void MakeColumns(const ConvCall& at, const Conv& c, const float* x, float* columns) {
  const int64_t numel = c.c * Size(c.kernel) * c.n * Size(c.out);
  Launch(at.op, ColumnsKernel, Blocks(numel), kThreads, 0, at.stream, c, x, columns, numel);
}

void MakeRows(const ConvCall& at, const Conv& c, const float* dy, float* rows) {
  const int64_t numel = c.n * c.o * Size(c.out);
  Launch(at.op, ToRowsKernel, Blocks(numel), kThreads, 0, at.stream, c, dy, rows, numel);
}

void Im2colForward(const ConvCall& at, const Conv& conv, const float* x, const float* f,
                   const float* bias, float* y) {
  ForEachChunk(at, conv, 0, [&](const Conv& c, int64_t first, float* columns, float* rows) {
    MakeColumns(at, c, x + first * c.c * Size(c.in), columns);
    const int64_t positions = c.n * Size(c.out), filters = c.GroupFilters();
    for (int64_t g = 0; g < c.groups; g++)
      Product(at, f + g * filters * K(c), columns + g * K(c) * positions,
              rows + g * filters * positions, filters, positions, K(c), false, false);
    const int64_t numel = c.o * positions;
    Launch(at.op, ToImagesKernel, Blocks(numel), kThreads, 0, at.stream, c, rows, bias,
           y + first * c.o * Size(c.out), numel);
  });
}

void Im2colDataGradient(const ConvCall& at, const Conv& conv, const float* f, const float* dy,
                        float* dx) {
  ForEachChunk(at, conv, 0, [&](const Conv& c, int64_t first, float* columns, float* rows) {
    MakeRows(at, c, dy + first * c.o * Size(c.out), rows);
    const int64_t positions = c.n * Size(c.out), filters = c.GroupFilters();
    for (int64_t g = 0; g < c.groups; g++)
      Product(at, f + g * filters * K(c), rows + g * filters * positions,
              columns + g * K(c) * positions, K(c), positions, filters, true, false);
    const int64_t numel = c.n * c.c * Size(c.in);
    Launch(at.op, GatherColumnsKernel, Blocks(numel), kThreads, 0, at.stream, c, columns,
           dx + first * c.c * Size(c.in), numel);
  });
}

// Chunks are added in their order.
void Im2colFilterGradient(const ConvCall& at, const Conv& conv, const float* x, const float* dy,
                          float* df) {
  const int64_t numel = conv.o * K(conv);
  const Scratch part(at.ctx, numel * (int64_t)sizeof(float), at.stream);
  ForEachChunk(at, conv, numel, [&](const Conv& c, int64_t first, float* columns, float* rows) {
    MakeColumns(at, c, x + first * c.c * Size(c.in), columns);
    MakeRows(at, c, dy + first * c.o * Size(c.out), rows);
    float* const to = first ? part.floats() : df;
    const int64_t positions = c.n * Size(c.out), filters = c.GroupFilters();
    for (int64_t g = 0; g < c.groups; g++)
      Product(at, rows + g * filters * positions, columns + g * K(c) * positions,
              to + g * filters * K(c), filters, K(c), positions, false, true);
    if (first) Launch(at.op, AddKernel, Blocks(numel), kThreads, 0, at.stream, to, df, numel);
  });
}

std::vector<std::string> Variants(Pass) {
  std::vector<std::string> names;
  for (int64_t number : GemmRungs()) names.push_back(GemmAlgorithms()[number - 1].name);
  return names;
}

}  // namespace

const ConvAlgorithm kIm2col = {
    "im2col", Variants, nullptr, nullptr, Im2colForward, Im2colDataGradient, Im2colFilterGradient};

}  // namespace cuda
}  // namespace dlsys
