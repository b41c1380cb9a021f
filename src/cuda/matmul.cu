// The matrix product in true float32, by blocks: C (m, n) = op(A) (m, k) op(B) (k, n), row-major;
// matmul.cuh has the contract.
//
// A block computes a tile of C. Panels of A and B, kDepth deep, pass through two buffers in shared
// memory: while one is multiplied, the next is on its way from device memory in registers. Both
// panels lie with depth outermost, so that a thread reads its rows of A and its columns of B as
// quads and keeps an outer product of them in registers. When C has too few tiles to fill the chip,
// the depth is split over blocks whose partial products lie in scratch and are added in a fixed
// order.
#include "cuda/launch.cuh"
#include "cuda/matmul.cuh"
#include "cuda/reduce.cuh"

namespace dlsys {
namespace cuda {
namespace {

// ---- kernels ----

// A warp's 32 lanes lie 4 down and 8 across; a lane holds quads of rows kQuadRows apart and quads
// of columns kQuadCols apart, so that a warp's quads are consecutive in shared memory.
constexpr int kQuadRows = 16;
constexpr int kQuadCols = 32;

// A tile of C of kRows x kCols by 256 threads that hold kThreadRows x kThreadCols of it each.
template <int Rows, int Cols, int Depth, int ThreadRows, int ThreadCols,
          int BlocksPerMultiprocessor>
struct Tiling {
  static constexpr int kRows = Rows, kCols = Cols, kDepth = Depth;
  static constexpr int kThreadRows = ThreadRows, kThreadCols = ThreadCols;
  static constexpr int kResident = BlocksPerMultiprocessor;
  static constexpr int kWarpRows = ThreadRows * 4, kWarpCols = ThreadCols * 8;
  static constexpr int kWarpsAcross = Cols / kWarpCols;
  static_assert(Rows / kWarpRows * kWarpsAcross * 32 == kThreads, "the warps cover the tile once");
};
using Large = Tiling<128, 128, 8, 8, 8, 2>;
using Small = Tiling<64, 64, 32, 4, 4, 3>;

struct Problem {
  Product product;
  int row_tiles, col_tiles, splits;
  int64_t part;              // the depth is cut into `splits` parts of `part`, a multiple of kDepth
  bool whole_in, whole_out;  // rows and base addresses of A and B, and of C, allow 16-byte accesses
};

// Elements p[0..3] of which only the first `valid` exist; the rest are zero. kWhole: p is aligned
// and either all four exist or none does.
template <bool kWhole>
__device__ __forceinline__ float4 LoadQuad(const float* p, int valid) {
  float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
  if constexpr (kWhole) {
    if (valid > 0) v = *(const float4*)p;
    return v;
  }
  if (valid > 0) v.x = p[0];
  if (valid > 1) v.y = p[1];
  if (valid > 2) v.z = p[2];
  if (valid > 3) v.w = p[3];
  return v;
}

// A panel of kWidth x kDepth of a matrix on its way to shared memory, where it lies as
// [depth][width]. kDepthFastest: the matrix is (width, depth) in memory, else (depth, width).
template <int kWidth, int kDepth, bool kDepthFastest, bool kWhole>
class Panel {
 public:
  // A multiple of 4 keeps quads aligned; 4 more than the width spreads a column over the banks.
  using Buffer = float[kDepth][kWidth + 4];

  // The panel at `origin` of the `width` rows of op(A) or columns of op(B), first at `depth`; pitch
  // is the length of a row in memory.
  __device__ Panel(const float* matrix, int64_t width, int64_t pitch, int64_t origin, int64_t depth)
      : pitch_(pitch), room_((int)min(width - origin, (int64_t)kWidth)) {
    const int64_t w = origin + Width(0), d = depth + Depth(0);
    from_ = matrix + (kDepthFastest ? w * pitch + d : d * pitch + w);
  }

  // Reads the next panel, of which `depth` layers exist.
  __device__ __forceinline__ void Load(int depth) {
#pragma unroll
    for (int q = 0; q < kQuads; q++) {
      const int slow_room = kDepthFastest ? room_ : depth;
      const int fast_room = kDepthFastest ? depth : room_;
      const int valid = Slow(q) < slow_room ? fast_room - Fast() : 0;
      quad_[q] = LoadQuad<kWhole>(from_ + q * kSlowStep * pitch_, valid);
    }
    from_ += kDepthFastest ? kDepth : kDepth * pitch_;
  }

  __device__ __forceinline__ void Store(Buffer& buffer) const {
#pragma unroll
    for (int q = 0; q < kQuads; q++) {
      const int w = Width(q), d = Depth(q);
      if constexpr (kDepthFastest) {
        buffer[d][w] = quad_[q].x;
        buffer[d + 1][w] = quad_[q].y;
        buffer[d + 2][w] = quad_[q].z;
        buffer[d + 3][w] = quad_[q].w;
      } else {
        *(float4*)&buffer[d][w] = quad_[q];
      }
    }
  }

 private:
  static constexpr int kQuads = kWidth * kDepth / 4 / kThreads;
  static constexpr int kQuadsInRow = (kDepthFastest ? kDepth : kWidth) / 4;
  static constexpr int kSlowStep = kThreads / kQuadsInRow;
  static_assert(kQuads * 4 * kThreads == kWidth * kDepth && kSlowStep * kQuadsInRow == kThreads,
                "the threads cover the panel once, in whole rows");

  // Where this thread's quad q lies: which row of the panel in memory, and where in the row.
  static __device__ __forceinline__ int Slow(int q) {
    return (int)threadIdx.x / kQuadsInRow + q * kSlowStep;
  }
  static __device__ __forceinline__ int Fast() { return (int)threadIdx.x % kQuadsInRow * 4; }
  static __device__ __forceinline__ int Width(int q) { return kDepthFastest ? Slow(q) : Fast(); }
  static __device__ __forceinline__ int Depth(int q) { return kDepthFastest ? Fast() : Slow(q); }

  const float* from_;
  int64_t pitch_;
  int room_;  // how much of kWidth the matrix has here
  float4 quad_[kQuads];
};

// kCount values as quads that lie kApart elements apart.
template <int kCount, int kApart>
__device__ __forceinline__ void ReadQuads(const float* from, float (&to)[kCount]) {
#pragma unroll
  for (int q = 0; q < kCount / 4; q++) {
    const float4 v = *(const float4*)(from + q * kApart);
    to[4 * q] = v.x;
    to[4 * q + 1] = v.y;
    to[4 * q + 2] = v.z;
    to[4 * q + 3] = v.w;
  }
}

struct Place {
  int row, col, split;  // counting tiles
};

// Which tile this block computes. Tiles go down groups of eight tile rows, so that blocks that run
// together share panels in the L2 cache.
__device__ __forceinline__ Place FindPlace(const Problem& problem) {
  constexpr int kGroup = 8;
  const int tiles = problem.row_tiles * problem.col_tiles;
  const int split = (int)blockIdx.x / tiles;
  const int tile = (int)blockIdx.x % tiles;
  const int group = tile / (kGroup * problem.col_tiles);
  const int in_group = tile % (kGroup * problem.col_tiles);
  const int height = min(kGroup, problem.row_tiles - group * kGroup);
  return {group * kGroup + in_group % height, in_group / height, split};
}

template <class T>
__device__ __forceinline__ int64_t RowOf(const Place& place) {
  return (int64_t)place.row * T::kRows;
}
template <class T>
__device__ __forceinline__ int64_t ColOf(const Place& place) {
  return (int64_t)place.col * T::kCols;
}

// Writes a thread's part of the tile at c + row0 * n + col0, as far as the matrix goes.
template <class T>
__device__ __forceinline__ void StoreTile(const float (&sums)[T::kThreadRows][T::kThreadCols],
                                          const Problem& problem, float* c, int64_t row0,
                                          int64_t col0) {
  const int64_t m = problem.product.m, n = problem.product.n;
#pragma unroll
  for (int i = 0; i < T::kThreadRows; i++) {
    const int64_t row = row0 + i / 4 * kQuadRows + i % 4;
    if (row >= m) continue;
#pragma unroll
    for (int j = 0; j < T::kThreadCols; j += 4) {
      const int64_t col = col0 + j / 4 * kQuadCols;
      float* out = c + row * n + col;
      if (problem.whole_out) {
        if (col < n)
          *(float4*)out = make_float4(sums[i][j], sums[i][j + 1], sums[i][j + 2], sums[i][j + 3]);
        continue;
      }
#pragma unroll
      for (int e = 0; e < 4; e++) {
        if (col + e < n) out[e] = sums[i][j + e];
      }
    }
  }
}

// How many layers a panel has of the `depth` that are left.
template <class T>
__device__ __forceinline__ int Layers(int64_t depth) {
  return (int)min(depth, (int64_t)T::kDepth);
}

// c is (splits, m, n): C itself, or scratch.
template <class T, bool kTransA, bool kTransB, bool kWhole>
__global__ __launch_bounds__(kThreads, T::kResident) void MatmulKernel(const Problem problem,
                                                                       float* c) {
  using PanelA = Panel<T::kRows, T::kDepth, !kTransA, kWhole>;
  using PanelB = Panel<T::kCols, T::kDepth, kTransB, kWhole>;
  __shared__ __align__(16) typename PanelA::Buffer buffers_a[2];
  __shared__ __align__(16) typename PanelB::Buffer buffers_b[2];
  const Product& product = problem.product;
  __shared__ Place place;  // not in registers, which the loop needs
  if (threadIdx.x == 0) place = FindPlace(problem);
  __syncthreads();
  const int64_t begin = place.split * problem.part;
  int64_t to_load = min(problem.part, product.k - begin);  // layers of the depth
  PanelA a(product.a, product.m, kTransA ? product.m : product.k, RowOf<T>(place), begin);
  PanelB b(product.b, product.n, kTransB ? product.k : product.n, ColOf<T>(place), begin);

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row = warp / T::kWarpsAcross * T::kWarpRows + lane / 8 * 4;
  const int col = warp % T::kWarpsAcross * T::kWarpCols + lane % 8 * 4;
  float sums[T::kThreadRows][T::kThreadCols] = {};

  a.Load(Layers<T>(to_load));
  b.Load(Layers<T>(to_load));
  a.Store(buffers_a[0]);
  b.Store(buffers_b[0]);
  __syncthreads();
  int current = 0;
  while (to_load > 0) {
    to_load -= T::kDepth;
    if (to_load > 0) {
      a.Load(Layers<T>(to_load));
      b.Load(Layers<T>(to_load));
    }
#pragma unroll
    for (int d = 0; d < T::kDepth; d++) {
      float left[T::kThreadRows], right[T::kThreadCols];
      ReadQuads<T::kThreadRows, kQuadRows>(&buffers_a[current][d][row], left);
      ReadQuads<T::kThreadCols, kQuadCols>(&buffers_b[current][d][col], right);
#pragma unroll
      for (int i = 0; i < T::kThreadRows; i++) {
#pragma unroll
        for (int j = 0; j < T::kThreadCols; j++) sums[i][j] = fmaf(left[i], right[j], sums[i][j]);
      }
    }
    if (to_load > 0) {
      a.Store(buffers_a[current ^ 1]);
      b.Store(buffers_b[current ^ 1]);
    }
    __syncthreads();
    current ^= 1;
  }
  StoreTile<T>(sums, problem, c + place.split * product.m * product.n, RowOf<T>(place) + row,
               ColOf<T>(place) + col);
}

// ---- launchers ----

using Kernel = void (*)(Problem, float*);

template <class T, bool kWhole>
Kernel KernelFor(const Product& p) {
  if (p.trans_a)
    return p.trans_b ? MatmulKernel<T, true, true, kWhole> : MatmulKernel<T, true, false, kWhole>;
  return p.trans_b ? MatmulKernel<T, false, true, kWhole> : MatmulKernel<T, false, false, kWhole>;
}

template <class T>
void LaunchTiles(const char* op, const Problem& problem, float* c, DLStream stream) {
  const unsigned blocks = (unsigned)(problem.row_tiles * problem.col_tiles * problem.splits);
  const Kernel kernel =
      problem.whole_in ? KernelFor<T, true>(problem.product) : KernelFor<T, false>(problem.product);
  Launch(op, kernel, blocks, kThreads, 0, stream, problem, c);
}

constexpr int64_t kMaxTiles = int64_t(1) << 27;  // leaves room for index arithmetic in int

template <class T>
Problem Tiled(const char* op, const Product& p) {
  const int64_t rows = CeilDiv(p.m, T::kRows), cols = CeilDiv(p.n, T::kCols);
  if (rows > kMaxTiles / cols)
    Fail("%s: a result of %ld x %ld is too large", op, (long)p.m, (long)p.n);
  const int64_t row_a = p.trans_a ? p.m : p.k, row_b = p.trans_b ? p.k : p.n;
  const int64_t part = CeilDiv(p.k, T::kDepth) * T::kDepth;
  const bool whole_in = Aligned16(p.a) && row_a % 4 == 0 && Aligned16(p.b) && row_b % 4 == 0;
  return Problem{p, (int)rows, (int)cols, 1, part, whole_in, Aligned16(p.c) && p.n % 4 == 0};
}

// Cuts the depth so that the chip has two blocks a multiprocessor, none with less than four panels.
void SplitDepth(Problem* problem, int multiprocessors) {
  const int64_t k = problem->product.k;
  const int64_t wanted = 2 * multiprocessors / (problem->row_tiles * problem->col_tiles);
  const int64_t most = k / (4 * Small::kDepth);
  const int64_t splits = wanted < most ? wanted : most;
  if (splits < 2) return;
  problem->part = CeilDiv(CeilDiv(k, splits), Small::kDepth) * Small::kDepth;
  problem->splits = (int)CeilDiv(k, problem->part);
}

}  // namespace

Product CheckedProduct(const char* op, const DLArray* a, int64_t trans_a, const DLArray* b,
                       int64_t trans_b, DLArray* c) {
  Enter(op, c, a, b);
  if (a->ndim != 2 || b->ndim != 2 || c->ndim != 2)
    Fail("%s: expected matrices, got %s and %s into %s", op, ShapeText(a).c_str(),
         ShapeText(b).c_str(), ShapeText(c).c_str());
  const int64_t m = a->shape[trans_a ? 1 : 0], k = a->shape[trans_a ? 0 : 1];
  const int64_t n = b->shape[trans_b ? 0 : 1], k_of_b = b->shape[trans_b ? 1 : 0];
  if (k != k_of_b || c->shape[0] != m || c->shape[1] != n)
    Fail("%s: shapes do not fit: %s%s and %s%s into %s", op, ShapeText(a).c_str(),
         trans_a ? " transposed" : "", ShapeText(b).c_str(), trans_b ? " transposed" : "",
         ShapeText(c).c_str());
  return Product{In(op, a), In(op, b), Out(op, c), m, n, k, trans_a != 0, trans_b != 0, c->ctx};
}

void MultiplyOwn(const char* op, const Product& product, DLStream stream) {
  if (product.m == 0 || product.n == 0) return;
  const int multiprocessors = Multiprocessors(product.ctx.device_id);
  const Problem large = Tiled<Large>(op, product);
  if (4 * large.row_tiles * large.col_tiles >= 3 * multiprocessors)
    return LaunchTiles<Large>(op, large, product.c, stream);
  Problem small = Tiled<Small>(op, product);
  SplitDepth(&small, multiprocessors);
  if (small.splits == 1) return LaunchTiles<Small>(op, small, product.c, stream);
  const int64_t numel = product.m * product.n;
  Scratch partial(product.ctx, small.splits * numel * (int64_t)sizeof(float), stream);
  small.whole_out = product.n % 4 == 0;
  LaunchTiles<Small>(op, small, partial.floats(), stream);
  SumAxis(op, product.ctx, partial.floats(), 1, small.splits, numel, 1.f, product.c, stream);
}

namespace {

void MatmulOwn(const DLArray* a, int64_t trans_a, const DLArray* b, int64_t trans_b, DLArray* c,
               DLStream stream) {
  MultiplyOwn("matmul_own", CheckedProduct("matmul_own", a, trans_a, b, trans_b, c), stream);
}

DLSYS_KERNEL(cuda, matmul_own, MatmulOwn);

}  // namespace
}  // namespace cuda
}  // namespace dlsys
