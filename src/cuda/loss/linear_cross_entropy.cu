// Cross-entropy of class indices over the logits x wᵀ of a linear layer, of bfloat16, where only
// the loss and products with the logits' gradient read them: logits are not stored, and no kernel
// goes over them between the products.
//
// The gradient of a row is a factor, dy / Σ exp(l - c), times g = exp(l - c), less that sum at the
// label, for any c. The product's epilogue (row_maps.cuh) stores exponentials in place of logits,
// of accumulators in float32, and their sums over a tile's columns. Of the products with the
// gradient that for dx multiplies rows of its accumulators by the factors, that for dw reads
// `scaled`, x times these. c has to be known before the product: a dot product of each row and its
// label's weights gives the label's logit, and c is 40 binary orders above, so that bfloat16, with
// float32's range, holds what is 2^120 times as likely as the label, and what is 2^-86 times as
// likely becomes 0. Rows beyond that, of losses above 83, are computed again by the block that adds
// up their sums, slowly, with their largest logit for c. The factor makes up for the rounding of g
// at the label.
//
// Tensor cores limit the products; exponentials add 8 % to the first of them. The small kernels
// before and behind it read x, the labels' weights and the sums, and write `scaled`.
#include "cuda/gemm/hopper/products.cuh"
#include "cuda/loss/cross_entropy.cuh"
#include "cuda/loss/row_maps.cuh"
#include "cuda/pointwise/vector.cuh"

namespace dlsys {
namespace cuda {
namespace {

constexpr float kLog2E = fast::kLog2E;
constexpr float kShift = 40;                              // of c above the label's logit, in log2
constexpr float kUnit = 1.f / (float)(int64_t(1) << 40);  // 2^-kShift: the label's exponential
constexpr float kMostSum = (float)(int64_t(1) << 40) * (float)(int64_t(1) << 40);

template <class T>
struct Problem {
  int64_t rows, classes, features;
  const T *x, *w;  // (rows, features) and (classes, features)
  SparseLabels labels;
  T* g;                          // (rows, classes)
  float* factors;                // (rows)
  T* scaled;                     // (rows, features)
  const float* exact = nullptr;  // x before it was rounded, or null
  bool aligned = false;          // rows of all but g
  // The vectors of 16 bytes of a row; what is left is read by elements.
  __device__ __forceinline__ int64_t Wide() const { return aligned ? features / kWide<T> : 0; }
  __device__ __forceinline__ bool IsClass(int64_t label) const {
    return label >= 0 && label < classes;
  }
};

// The logit of a class in a row; all lanes of the warp get it.
template <class T>
__device__ __forceinline__ float Logit(const Problem<T>& p, int64_t row, int64_t c) {
  const T *x = p.x + row * p.features, *w = p.w + c * p.features;
  const int64_t wide = p.Wide();
  float sum = 0.f;
#pragma unroll 4
  for (int64_t k = threadIdx.x % 32; k < wide; k += 32) {
    const auto a = Read<kWide<T>>(x + k * kWide<T>), b = Read<kWide<T>>(w + k * kWide<T>);
#pragma unroll
    for (int e = 0; e < kWide<T>; e++) sum = fmaf(a[e], b[e], sum);
  }
  for (int64_t k = wide * kWide<T> + threadIdx.x % 32; k < p.features; k += 32)
    sum = fmaf(x[k], w[k], sum);
  return GroupReduce<SumMonoid, 32>(sum);
}

// shifts (rows): -c of each row, in log2. A warp takes a row.
template <class T>
__global__ void __launch_bounds__(kThreads) ShiftsKernel(Problem<T> p, float* shifts) {
  constexpr int kRows = kThreads / 32;
  GridDependencySynchronize();
  for (int64_t row = (int64_t)blockIdx.x * kRows + threadIdx.x / 32; row < p.rows;
       row += (int64_t)gridDim.x * kRows) {
    const int64_t label = p.labels.of.At(row);
    const float logit = Logit(p, row, p.IsClass(label) ? label : 0);
    if (threadIdx.x % 32 == 0) shifts[row] = fmaf(-kLog2E, logit, -kShift);
  }
  TriggerProgrammaticLaunch();
}

// What a row's loss and gradient are made of: Σ exp(l - c), the label's exponential, and the loss.
struct RowSums {
  float sum, of_label, loss;
};

// Computes a row's exponentials with its largest logit for c. All threads of the block call it.
template <class T>
__device__ RowSums Recomputed(const Problem<T>& p, int64_t row, int64_t label) {
  constexpr int kWarps = kThreads / 32;
  T* const g = p.g + row * p.classes;
  float max = -INFINITY;
  for (int64_t c = threadIdx.x / 32; c < p.classes; c += kWarps) {
    const T logit = T(Logit(p, row, c));
    if (threadIdx.x % 32 == 0) g[c] = logit;
    max = fmaxf(max, logit);
  }
  max = GroupReduce<MaxMonoid, kThreads>(max);
  __syncthreads();
  const float of_label = (float)g[label] - max;
  __syncthreads();
  float sum = 0.f;
  for (int64_t c = threadIdx.x; c < p.classes; c += kThreads) {
    const float e = ExpTwo(kLog2E * ((float)g[c] - max));
    g[c] = T(e);
    sum += e;
  }
  sum = GroupReduce<SumMonoid, kThreads>(sum);
  __syncthreads();  // the label's exponential is written before its gradient
  return {sum, ExpTwo(kLog2E * of_label), logf(sum) - of_label};
}

// Writes a row of x times its factor, rounded once where x is known exactly; a warp takes it.
template <class T>
__device__ __forceinline__ void ScaleRow(const Problem<T>& p, int64_t row, float factor) {
  constexpr int kCount = kWide<T>;
  const int64_t start = row * p.features, wide = p.Wide();
  T* const to = p.scaled + start;
  const auto scale = [&](const auto* from) {
    using From = std::decay_t<decltype(*from)>;
#pragma unroll 4
    for (int64_t k = threadIdx.x % 32; k < wide; k += 32) {
      float made[kCount];
#pragma unroll
      for (int e = 0; e < kCount; e += kWide<From>) {
        const auto part = Read<kWide<From>>(from + k * kCount + e);
#pragma unroll
        for (int d = 0; d < kWide<From>; d++) made[e + d] = part[d] * factor;
      }
      Write<kCount>(to + k * kCount, made);
    }
    for (int64_t k = wide * kCount + threadIdx.x % 32; k < p.features; k += 32)
      to[k] = T(from[k] * factor);
  };
  p.exact ? scale(p.exact + start) : scale(p.x + start);
}

constexpr int kFinishRows = 32;  // of a block at a time
constexpr int kStrands = kThreads / kFinishRows;

// Adds up the rows' `sums` (tiles, rows), for the losses' sum, the factors, and the labels' g.
template <class T>
__global__ void __launch_bounds__(kThreads)
    FinishKernel(Problem<T> p, const float* sums, int tiles, GridReduction reduction, float scale,
                 Output loss) {
  const int r = threadIdx.x % kFinishRows, strand = threadIdx.x / kFinishRows;
  GridDependencySynchronize();
  const unsigned arrival = Arrive(reduction);
  float losses = 0.f;
  __shared__ float factors[kFinishRows];
  for (int64_t first = (int64_t)blockIdx.x * kFinishRows; first < p.rows;
       first += (int64_t)gridDim.x * kFinishRows) {
    const int64_t row = first + r;
    const bool exists = row < p.rows;
    float sum = 0.f;
    if (exists)
      for (int tile = strand; tile < tiles; tile += kStrands)
        sum += sums[(int64_t)tile * p.rows + row];
    sum = ColumnReduce<SumMonoid, kFinishRows, kStrands>(sum, strand, r);
    const int64_t label = exists ? p.labels.of.At(row) : 0;
    const bool valid = p.IsClass(label);
    // It is at least the label's, but for the rounding of products in different orders.
    if (sum < kUnit) sum = kUnit;
    RowSums of_row = {sum, kUnit, logf(sum / kUnit)};
#pragma unroll 1
    for (int k = 0; k < kFinishRows; k++) {
      if (__shfl_sync(0xffffffffu, sum, k) < kMostSum) continue;
      const RowSums made = Recomputed(p, first + k, __shfl_sync(0xffffffffu, valid ? label : 0, k));
      if (r == k) of_row = made;
    }
    if (exists && strand == 0) {
      if (!valid) p.labels.of.faults.OutOfRange(label, row, p.classes);
      losses += valid ? of_row.loss : NAN;
      const float of_label = of_row.of_label - of_row.sum, rounded = T(of_label);
      const float exactly = of_label == 0.f ? 1.f : of_label / rounded;
      factors[r] = p.factors[row] = valid ? p.labels.dy / of_row.sum * exactly : NAN;
      if (valid) p.g[row * p.classes + label] = T(rounded);
    }
    __syncthreads();
    for (int k = strand; k < kFinishRows && first + k < p.rows; k += kStrands)
      ScaleRow(p, first + k, factors[k]);
  }
  TriggerProgrammaticLaunch();
  FinishGridSum(GroupReduce<SumMonoid, kThreads>(losses), arrival, reduction, scale, loss);
}

// ---- launchers ----

using E = bfloat16;
using Tile = std::tuple_element_t<0, hopper::Tilings>;

// C (m, n) = a source's product of A (m, k) and B, (n, k) or (k, n).
template <class Source>
void RunProduct(const char* op, const HopperGemm& gemm, const hopper::Config& config,
                const typename Source::Layout& layout, DLStream stream) {
  const hopper::Roles roles = hopper::RolesOf(gemm);
  const hopper::OperandOf<E> a(op, gemm, gemm.a, gemm.m, false, roles.packs_a, false, nullptr,
                               stream);
  const hopper::OperandOf<E> b(op, gemm, gemm.b, gemm.n, !gemm.trans_b, roles.packs_b, false,
                               nullptr, stream);
  hopper::Params params = {};
  params.m = (int)gemm.m, params.n = (int)gemm.n, params.batch = 1;
  params.k_panels = (int)hopper::PanelsOf(gemm);
  params.c = gemm.c, params.aligned = params.in_boxes = true;
  const hopper::Maps maps{hopper::MapOf<E>(op, a.get(), Tile::kTileM),
                          hopper::MapOf<E>(op, b.get(), Tile::kTileN / Tile::kCluster),
                          BoxMap(op, DL_BFLOAT16, gemm.c, gemm.n, gemm.m, gemm.n, 1,
                                 hopper::kRowsOfBox, /*rounds=*/false),
                          CUtensorMap{}};
  hopper::LaunchTiles<E, Tile, Source, false>(op, gemm.ctx, config, maps, params, layout, stream);
}

// Why there is no product of these extents on a device, or "".
const char* Refusal(int device, int64_t m, int64_t n, int64_t k) {
  constexpr int64_t kMost = int64_t(1) << 30;
  const char* error = WgmmaError(device);
  if (*error) return error;
  if (n % 8) return "it stores multiples of 8 columns";
  if (std::max({m, n, k}) > kMost) return "it takes at most 2^30 rows and columns";
  return std::min({m, n, k}) < 1 ? "it has no elements" : "";
}
// True where its tiles fill the multiprocessors.
bool Fills(int device, int64_t m, int64_t n) {
  return CeilDiv(m, Tile::kTileM) * CeilDiv(n, Tile::kTileN) >= Multiprocessors(device);
}

// loss = scale * the sum of the losses of the rows of x wᵀ; g (rows, classes) times factors (rows,
// 1) = their gradients times dy; scaled = x times factors. exact: x, or that in float32.
void LinearCrossEntropy(const DLArray* x, const DLArray* exact, const DLArray* w,
                        const DLArray* labels, const DLArray* workspace, float scale, float dy,
                        DLArray* loss, DLArray* g, DLArray* factors, DLArray* scaled,
                        DLStream stream) {
  const char* op = "linear_cross_entropy";
  Enter(op, x, exact, w, labels, workspace, loss, g, factors, scaled);
  CheckSameShape(op, x, exact);
  CheckSameShape(op, x, scaled);
  const int64_t rows = x->shape[0], features = x->shape[1], classes = w->shape[0];
  if (const char* error = Refusal(x->ctx.device_id, rows, classes, features); *error)
    Fail("%s: no kernel for x %s and weights %s: %s", op, ShapeText(x).c_str(),
         ShapeText(w).c_str(), error);
  Problem<E> p{rows,          classes,          features,
               In<E>(op, x),  In<E>(op, w),     CheckedClasses(op, labels, g, dy),
               Out<E>(op, g), Out(op, factors), Out<E>(op, scaled)};
  if (exact->dtype == DL_FLOAT32) p.exact = In(op, exact);
  p.aligned = features % kWide<E> == 0 && Aligned16(p.x) && Aligned16(p.w) && Aligned16(p.scaled) &&
              Aligned16(p.exact);
  const GridReduction reduction = CheckedReduction(op, workspace);
  const int tiles = (int)CeilDiv(classes, Tile::kTileN);
  const Scratch shifts(x->ctx, rows * (int64_t)sizeof(float), stream);
  const Scratch sums(x->ctx, tiles * rows * (int64_t)sizeof(float), stream);
  LaunchClusters(op, ShiftsKernel<E>, Blocks(rows, kThreads / 32), 1, kThreads, 0, true, stream, p,
                 shifts.floats());
  const HopperGemm gemm = {p.x, p.w,   p.g,  rows,        classes, features,
                           1,   false, true, DL_BFLOAT16, false,   x->ctx};
  RunProduct<hopper::Exponentials<E, Tile>>(op, gemm, {}, {shifts.floats(), sums.floats()}, stream);
  const unsigned blocks = std::clamp(Blocks(rows, kFinishRows), 1u, (unsigned)kMaxPartials);
  LaunchClusters(op, FinishKernel<E>, blocks, 1, kThreads, 0, true, stream, p, sums.floats(), tiles,
                 reduction, scale, CheckedLoss<E>(op, loss));
}

bool Fits(const DLArray* x, const DLArray*, const DLArray* w, const DLArray*, const DLArray*, float,
          float, DLArray*, DLArray*, DLArray*, DLArray*) {
  const int device = x->ctx.device_id;
  const int64_t rows = x->shape[0], classes = w->shape[0];
  return !*Refusal(device, rows, classes, x->shape[1]) && Fills(device, rows, classes);
}

// How the product's tiles are cut along K; all are stored from registers.
hopper::Config ConfigOf(const HopperGemm& gemm) {
  const hopper::TilingCost& cost = hopper::kCosts[0];
  const hopper::TileTime time{cost.tile_m,   cost.tile_n,  cost.cluster,  false,
                              cost.panel_us, cost.tile_us, cost.simple_us};
  const int64_t panels = hopper::PanelsOf(gemm);
  const hopper::Extents extents{gemm.m, gemm.n, panels, 1};
  const int multiprocessors = Multiprocessors(gemm.ctx.device_id);
  const hopper::Config config = Estimated(time, extents, multiprocessors, 0);
  return AllInBoxes(config, panels) ? config : Estimated(time, extents, multiprocessors, 0, false);
}

// c = factors * (a b), of a (m, k), b (k, n), and a factor for each row.
void MatmulRowFactors(const DLArray* a, const DLArray* b, const DLArray* factors, DLArray* c,
                      DLStream stream) {
  const char* op = "matmul_row_factors";
  Enter(op, a, b, factors, c);
  const int64_t m = a->shape[0], k = a->shape[1], n = b->shape[1];
  if (const char* error = Refusal(a->ctx.device_id, m, n, k); *error)
    Fail("%s: no kernel for %s by %s: %s", op, ShapeText(a).c_str(), ShapeText(b).c_str(), error);
  if (Numel(factors) != m)
    Fail("%s: expected %ld factors, got %s", op, (long)m, ShapeText(factors).c_str());
  const HopperGemm gemm = {In<E>(op, a), In<E>(op, b), Out<E>(op, c), m,     n,     k, 1,
                           false,        false,        DL_BFLOAT16,   false, a->ctx};
  RunProduct<hopper::RowFactors<E, Tile>>(op, gemm, ConfigOf(gemm), {In(op, factors)}, stream);
}
// True where the tiles, or shares of them, fill the multiprocessors.
bool MatmulRowFactorsFits(const DLArray* a, const DLArray* b, const DLArray*, DLArray*) {
  const int64_t m = a->shape[0], k = a->shape[1], n = b->shape[1];
  HopperGemm gemm = {};
  gemm.m = m, gemm.n = n, gemm.k = k, gemm.batch = 1, gemm.dtype = DL_BFLOAT16, gemm.ctx = a->ctx;
  const int device = a->ctx.device_id;
  return !*Refusal(device, m, n, k) && (Fills(device, m, n) || ConfigOf(gemm).split_tiles > 0);
}

DLSYS_KERNEL_OF(cuda, linear_cross_entropy, "linear_cross_entropy", DL_BFLOAT16,
                LinearCrossEntropy);
DLSYS_KERNEL_OF(cuda, matmul_row_factors, "matmul_row_factors", DL_BFLOAT16, MatmulRowFactors);
DLSYS_FITS(cuda, linear_cross_entropy, Fits);
DLSYS_FITS(cuda, matmul_row_factors, MatmulRowFactorsFits);

}  // namespace
}  // namespace cuda
}  // namespace dlsys
