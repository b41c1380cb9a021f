// The rung `winograd`: convolution of 3 x 3 filters at stride 1 by Winograd's F(m x m, 3 x 3), m =
// 2 or 4. conv.cuh has the contract, math/winograd.h the matrices.
//
// Images are cut into tiles of (m + 2)^2 that overlap by 2. Filters U (e, groups, o, c), tiles V
// (e, groups, c, tiles) and results (e, groups, o, tiles) of the (m + 2)^2 elements e are
// transformed by a thread each; between them stand products of matrices, one for each element and
// group, that take 4 / 9 (m = 2) or 1 / 4 (m = 4) of the multiplications of a direct convolution.
// The data gradient is the convolution of dy by the rotated filters; the filter gradient sums the
// adjoint over the tiles. Products are in float32, at tf32 as 3xtf32 where cuBLAS does not compute
// them, since the transforms amplify errors; an infinity or NaN spreads over its tile. Limited by
// the traffic of the transforms with few channels, by the products with many.
#include "cuda/conv/conv.cuh"
#include "cuda/runtime/launch.cuh"
#include "math/winograd.h"

namespace dlsys {
namespace cuda {
namespace {

// Images (n, groups, channels, hw) cut into tiles kOut apart, the first at `from`.
struct Tiles {
  int64_t n, groups, channels;
  HW hw, from, tiles;

  __host__ __device__ int64_t OfImage() const { return tiles.h * tiles.w; }
  __host__ __device__ int64_t Count() const { return n * OfImage(); }
  __host__ __device__ int64_t Planes() const { return groups * channels; }
  int64_t Items() const { return Planes() * Count(); }
};

// ---- transforms ----

// out = M in M^T
template <class M>
__device__ __forceinline__ void Transform(const float (&in)[M::kCols][M::kCols],
                                          float (&out)[M::kRows][M::kRows]) {
  float half[M::kRows][M::kCols];
#pragma unroll
  for (int r = 0; r < M::kRows; r++)
#pragma unroll
    for (int j = 0; j < M::kCols; j++) {
      half[r][j] = 0.f;
#pragma unroll
      for (int k = 0; k < M::kCols; k++)
        if (M::At(r, k) != 0.f) half[r][j] = fmaf(M::At(r, k), in[k][j], half[r][j]);
    }
#pragma unroll
  for (int r = 0; r < M::kRows; r++)
#pragma unroll
    for (int s = 0; s < M::kRows; s++) {
      out[r][s] = 0.f;
#pragma unroll
      for (int k = 0; k < M::kCols; k++)
        if (M::At(s, k) != 0.f) out[r][s] = fmaf(M::At(s, k), half[r][k], out[r][s]);
    }
}

// ---- kernels ----

// to[e * items] = element e of M in M^T
template <class M>
__device__ __forceinline__ void StoreTransform(const float (&in)[M::kCols][M::kCols], float* to,
                                               int64_t items) {
  float out[M::kRows][M::kRows];
  Transform<M>(in, out);
#pragma unroll
  for (int i = 0; i < M::kRows; i++)
#pragma unroll
    for (int j = 0; j < M::kRows; j++) to[(i * M::kRows + j) * items] = out[i][j];
}

// to (e, planes, tiles) = M (tile) M^T; a tile is what M takes.
template <class M, int kOut>
__global__ void TilesKernel(const Tiles t, const float* x, float* to, int64_t items) {
  for (int64_t item = FirstItem(); item < items; item += ItemStep()) {
    const int64_t plane = item / t.Count(), tile = item % t.Count(), at = tile % t.OfImage();
    const int64_t n = tile / t.OfImage();
    const float* from = x + (n * t.Planes() + plane) * t.hw.h * t.hw.w;
    const int64_t top = t.from.h + at / t.tiles.w * kOut, left = t.from.w + at % t.tiles.w * kOut;
    float in[M::kCols][M::kCols];
#pragma unroll
    for (int i = 0; i < M::kCols; i++)
#pragma unroll
      for (int j = 0; j < M::kCols; j++) {
        const int64_t h = top + i, w = left + j;
        const bool inside = h >= 0 && h < t.hw.h && w >= 0 && w < t.hw.w;
        in[i][j] = inside ? from[h * t.hw.w + w] : 0.f;
      }
    StoreTransform<M>(in, to + item, items);
  }
}

// Images y of the products (e, planes, tiles), plus bias (planes) or none.
template <int kOut>
__global__ void OutputKernel(const Tiles t, const float* products, const float* bias, float* y,
                             int64_t items) {
  using M = WinogradOutput<kOut>;
  for (int64_t item = FirstItem(); item < items; item += ItemStep()) {
    const int64_t plane = item / t.Count(), tile = item % t.Count(), at = tile % t.OfImage();
    const int64_t n = tile / t.OfImage();
    float* to = y + (n * t.Planes() + plane) * t.hw.h * t.hw.w;
    const int64_t top = at / t.tiles.w * kOut, left = at % t.tiles.w * kOut;
    float in[M::kCols][M::kCols], out[kOut][kOut];
#pragma unroll
    for (int i = 0; i < M::kCols; i++)
#pragma unroll
      for (int j = 0; j < M::kCols; j++) in[i][j] = products[(i * M::kCols + j) * items + item];
    Transform<M>(in, out);
    const float add = bias ? bias[plane] : 0.f;
#pragma unroll
    for (int i = 0; i < kOut; i++)
#pragma unroll
      for (int j = 0; j < kOut; j++)
        if (top + i < t.hw.h && left + j < t.hw.w)
          to[(top + i) * t.hw.w + left + j] = out[i][j] + add;
  }
}

// to (e, items) of the filters f (items, 3, 3), rotated by half a turn or not
template <int kOut>
__global__ void FiltersKernel(const float* f, bool rotated, float* to, int64_t items) {
  using M = WinogradFilter<kOut>;
  for (int64_t item = FirstItem(); item < items; item += ItemStep()) {
    float in[3][3];
#pragma unroll
    for (int k = 0; k < 9; k++) in[k / 3][k % 3] = f[item * 9 + (rotated ? 8 - k : k)];
    StoreTransform<M>(in, to + item, items);
  }
}

// df (items, 3, 3) = or += G^T (products) G of products (e, items)
template <int kOut>
__global__ void FilterGradientKernel(const float* products, bool add, float* df, int64_t items) {
  using M = Adjoint<WinogradFilter<kOut>>;
  for (int64_t item = FirstItem(); item < items; item += ItemStep()) {
    float in[M::kCols][M::kCols], out[3][3];
#pragma unroll
    for (int i = 0; i < M::kCols; i++)
#pragma unroll
      for (int j = 0; j < M::kCols; j++) in[i][j] = products[(i * M::kCols + j) * items + item];
    Transform<M>(in, out);
#pragma unroll
    for (int k = 0; k < 9; k++)
      df[item * 9 + k] = (add ? df[item * 9 + k] : 0.f) + out[k / 3][k % 3];
  }
}

// ---- launchers ----

constexpr int64_t kFloat = sizeof(float);

template <int kOut>
Tiles TilesOf(int64_t n, int64_t groups, int64_t channels, HW hw, HW from, HW out) {
  return {n, groups, channels, hw, from, {CeilDiv(out.h, kOut), CeilDiv(out.w, kOut)}};
}

template <class M, int kOut>
void TransformTiles(const ConvCall& at, const Tiles& t, const float* x, float* to) {
  Launch(at.op, TilesKernel<M, kOut>, Blocks(t.Items()), kThreads, 0, at.stream, t, x, to,
         t.Items());
}

// c (count, m, n) = op(a) op(b) of `count` matrices each.
void Products(const ConvCall& at, int64_t count, const Gemm& first) {
  BatchedGemm batch{first, count};
  if (at.precision == Precision::kTf32) batch.first.precision = Precision::k3xTf32;
  RunBatchedGemm(at.op, batch, at.stream);
}

// The arguments of a correlation at stride 1: x (n, groups, in) by filters to y (n, groups, out).
struct Correlating {
  int64_t n, groups, in, out;
  HW in_hw, out_hw, from;
  bool swapped;  // filters are (groups, in, out, 3, 3) and rotated
};

template <int kOut>
void Correlate(const ConvCall& at, const Correlating& c, const float* x, const float* f,
               const float* bias, float* y) {
  constexpr int64_t kElements = (kOut + 2) * (kOut + 2);
  const int64_t filters = c.groups * c.in * c.out;
  const int64_t tiles = CeilDiv(c.out_hw.h, kOut) * CeilDiv(c.out_hw.w, kOut);
  const int64_t in = kElements * c.groups * c.in * tiles,
                out = kElements * c.groups * c.out * tiles;
  const int64_t fixed = kElements * filters * kFloat;
  const int64_t most = ImagesAtOnce(at, "winograd", c.n, (in + out) * kFloat, fixed);
  const Scratch u(at.ctx, fixed, at.stream), v(at.ctx, most * in * kFloat, at.stream);
  const Scratch products(at.ctx, most * out * kFloat, at.stream);
  Launch(at.op, FiltersKernel<kOut>, Blocks(filters), kThreads, 0, at.stream, f, c.swapped,
         u.floats(), filters);
  for (int64_t first = 0; first < c.n; first += most) {
    const int64_t n = std::min(most, c.n - first);
    const Tiles from = TilesOf<kOut>(n, c.groups, c.in, c.in_hw, c.from, c.out_hw);
    const Tiles to = TilesOf<kOut>(n, c.groups, c.out, c.out_hw, {0, 0}, c.out_hw);
    TransformTiles<WinogradInput<kOut>, kOut>(at, from, x + first * c.groups * c.in * Size(c.in_hw),
                                              v.floats());
    Products(at, kElements * c.groups,
             {u.floats(), v.floats(), products.floats(), c.out, from.Count(), c.in, c.swapped,
              false, at.ctx});
    Launch(at.op, OutputKernel<kOut>, Blocks(to.Items()), kThreads, 0, at.stream, to,
           products.floats(), bias, y + first * c.groups * c.out * Size(c.out_hw), to.Items());
  }
}

template <int kOut>
void FilterGradient(const ConvCall& at, const Conv& c, const float* x, const float* dy, float* df) {
  constexpr int64_t kElements = (kOut + 2) * (kOut + 2);
  const int64_t filters = c.o * c.GroupChannels();
  const int64_t tiles = CeilDiv(c.out.h, kOut) * CeilDiv(c.out.w, kOut);
  const int64_t in = kElements * c.c * tiles, out = kElements * c.o * tiles;
  const int64_t fixed = kElements * filters * kFloat;
  const int64_t most = ImagesAtOnce(at, "winograd", c.n, (in + out) * kFloat, fixed);
  const Scratch products(at.ctx, fixed, at.stream), v(at.ctx, most * in * kFloat, at.stream);
  const Scratch d(at.ctx, most * out * kFloat, at.stream);
  for (int64_t first = 0; first < c.n; first += most) {
    const int64_t n = std::min(most, c.n - first);
    const HW from{-c.pad.h, -c.pad.w};
    const Tiles of_x = TilesOf<kOut>(n, c.groups, c.GroupChannels(), c.in, from, c.out);
    const Tiles of_dy = TilesOf<kOut>(n, c.groups, c.GroupFilters(), c.out, {0, 0}, c.out);
    TransformTiles<WinogradInput<kOut>, kOut>(at, of_x, x + first * c.c * Size(c.in), v.floats());
    TransformTiles<Adjoint<WinogradOutput<kOut>>, kOut>(at, of_dy, dy + first * c.o * Size(c.out),
                                                        d.floats());
    Products(at, kElements * c.groups,
             {d.floats(), v.floats(), products.floats(), c.GroupFilters(), c.GroupChannels(),
              of_x.Count(), false, true, at.ctx});
    Launch(at.op, FilterGradientKernel<kOut>, Blocks(filters), kThreads, 0, at.stream,
           products.floats(), first > 0, df, filters);
  }
}

// Variant 0 is F(2x2, 3x3), 1 is F(4x4, 3x3); by heuristic the larger where tiles fill the images.
int OutOf(const ConvCall& at, HW out) {
  if (at.variant != kHeuristic) return at.variant == 0 ? 2 : 4;
  const int64_t by_4 = CeilDiv(out.h, 4) * CeilDiv(out.w, 4) * 36;
  return by_4 < CeilDiv(out.h, 2) * CeilDiv(out.w, 2) * 16 ? 4 : 2;
}

void CorrelateBy(int out, const ConvCall& at, const Correlating& c, const float* x, const float* f,
                 const float* bias, float* y) {
  out == 2 ? Correlate<2>(at, c, x, f, bias, y) : Correlate<4>(at, c, x, f, bias, y);
}

void WinogradForward(const ConvCall& at, const Conv& c, const float* x, const float* f,
                     const float* bias, float* y) {
  const HW from{-c.pad.h, -c.pad.w};
  const Correlating of{c.n,  c.groups, c.GroupChannels(), c.GroupFilters(), c.in, c.out,
                       from, false};
  CorrelateBy(OutOf(at, c.out), at, of, x, f, bias, y);
}

void WinogradDataGradient(const ConvCall& at, const Conv& c, const float* f, const float* dy,
                          float* dx) {
  const HW from{c.pad.h - 2, c.pad.w - 2};
  const Correlating of{c.n, c.groups, c.GroupFilters(), c.GroupChannels(), c.out, c.in, from, true};
  CorrelateBy(OutOf(at, c.in), at, of, dy, f, nullptr, dx);
}

void WinogradFilterGradient(const ConvCall& at, const Conv& c, const float* x, const float* dy,
                            float* df) {
  OutOf(at, c.out) == 2 ? FilterGradient<2>(at, c, x, dy, df) : FilterGradient<4>(at, c, x, dy, df);
}

const char* Refusal(const ConvCall&, const Conv& c) {
  const HW one{1, 1}, three{3, 3};
  const bool fits = c.kernel == three && c.stride == one && c.dilation == one;
  return fits ? nullptr : "it is for 3 x 3 filters at stride 1 without dilation";
}

std::vector<std::string> Variants(Pass) { return {"2x2", "4x4"}; }

}  // namespace

const ConvAlgorithm kWinograd = {"winograd",
                                 Variants,
                                 nullptr,
                                 Refusal,
                                 WinogradForward,
                                 WinogradDataGradient,
                                 WinogradFilterGradient};

}  // namespace cuda
}  // namespace dlsys
