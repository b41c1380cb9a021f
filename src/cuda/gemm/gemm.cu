// Which kernel computes a matrix product, with which tiles, over how many splits of the depth, by a
// rule or by the caller's choice; and the kernels that come after one: for partial products in
// scratch, and for epilogues of products by other libraries. matmul.cuh has the contract,
// matmul_kernel.cuh the kernel.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "cuda/gemm/kernel.cuh"
#include "cuda/gemm/uint8.cuh"
#include "cuda/reduce/reduce.cuh"

namespace dlsys {
namespace cuda {
namespace {

// ---- kernels ----

// C from `splits` partial products (splits, m, n), which for one split may be C itself.
__global__ void FinishKernel(Product product, const float* partial, int splits, bool whole) {
  const int64_t quads = (product.n + 3) / 4, numel = product.m * product.n;
  for (int64_t q = FirstItem(); q < product.m * quads; q += ItemStep()) {
    Quad quad = {q / quads, q % quads * 4, {}, {}};
    ReadSide(product, whole, quad);
    const float* from = partial + quad.row * product.n + quad.col;
    for (int split = 0; split < splits; split++, from += numel) {
#pragma unroll
      for (int e = 0; e < 4; e++)
        if (quad.col + e < product.n) quad.x[e] += from[e];
    }
    Write(product, whole, ReadBias(product, quad.col, whole), quad);
  }
}

// ---- launchers ----

constexpr int64_t kMaxTiles = int64_t(1) << 27;  // leaves room for index arithmetic in int
constexpr int64_t kPartUnit = 16;                // layers of a part: whole quads, and few to spare

// What a tiling costs in a captured graph, measured on an H200. Other chips are slower or faster at
// all of them, which changes no choice much.
struct TileCost {
  int rows, cols;
  int resident;        // blocks that a multiprocessor holds at once
  double us;           // of a launch without depth
  double ns, ns_more;  // a layer of the depth: for one block on a multiprocessor, for each further
};

// By the numbers that WithTiling takes.
constexpr int kTilings = 6;
constexpr TileCost kFp32Costs[kTilings] = {
    {128, 64, 1, 4.0, 54.6, 54.6}, {64, 64, 1, 3.7, 30, 30},   {64, 32, 2, 2.6, 20.5, 18.6},
    {32, 32, 2, 2.5, 12.3, 8.8},   {32, 16, 2, 2.8, 6.9, 5.7}, {16, 32, 2, 2.8, 6.9, 5.7}};
constexpr TileCost kTf32Costs[kTilings] = {{128, 64, 1, 3.5, 18, 18},   {64, 64, 1, 3.0, 12, 12},
                                           {64, 32, 2, 2.5, 13.4, 9.2}, {32, 32, 2, 2.8, 7.9, 5.9},
                                           {32, 16, 2, 2.9, 6.0, 4.6},  {16, 32, 2, 2.9, 6.0, 4.6}};
constexpr TileCost kBytesCosts[kTilings] = {
    {128, 64, 1, 3.5, 18, 18},  {64, 64, 1, 3.1, 10.3, 10.3}, {64, 32, 1, 3.3, 5.0, 5.0},
    {32, 32, 2, 2.8, 4.7, 2.9}, {32, 16, 2, 2.7, 3.2, 3.9},   {16, 32, 2, 2.7, 3.2, 3.9}};

// The shared memory of a block, at most.
template <class T, template <class, bool, bool> class Accumulator, bool kPlainA>
constexpr size_t MostNbytes() {
  return std::max({MemoryNbytes<T, Accumulator<T, !kPlainA, false>>(),
                   MemoryNbytes<T, Accumulator<T, !kPlainA, true>>(),
                   MemoryNbytes<T, Accumulator<T, false, false>>(),
                   MemoryNbytes<T, Accumulator<T, false, true>>()});
}
template <class Tilings, template <class, bool, bool> class Accumulator, bool kPlainA, size_t... k>
constexpr std::array<size_t, kTilings> EachNbytes(std::index_sequence<k...>) {
  return {MostNbytes<std::tuple_element_t<k, Tilings>, Accumulator, kPlainA>()...};
}

struct Family {
  const TileCost* costs;
  std::array<size_t, kTilings> nbytes;
};
const Family& FamilyOf(Tiles tiles) {
  using Numbers = std::make_index_sequence<kTilings>;
  static constexpr Family kFamilies[] = {
      {kFp32Costs, EachNbytes<Fp32Tilings, Fp32Accumulator, false>(Numbers())},
      {kTf32Costs, EachNbytes<Tf32Tilings, Tf32Accumulator, false>(Numbers())},
      {kBytesCosts, EachNbytes<BytesTilings, BytesIn<Bytes::kA>::Accumulator, true>(Numbers())}};
  return kFamilies[(int)tiles];
}

constexpr double kRoundUs = 1.5;            // where blocks follow others on their multiprocessor
constexpr double kKernelUs = 3.5;           // of a further kernel after a product
constexpr double kReduceUs = 4.5;           // and of the sums of an operand
constexpr double kCublasUs[] = {7.0, 7.0};  // by precision: of a product without depth
constexpr double kCublasFlopUs[] = {4.5e7, 3.0e8};  // and the operations of a microsecond

int64_t PartOf(int64_t k, int64_t splits) {
  return CeilDiv(CeilDiv(k, splits), kPartUnit) * kPartUnit;
}

// A cluster lies within a group of multiprocessors, so that the larger it is the more of them are
// left over.
double Usable(int multiprocessors, int splits) {
  return multiprocessors * (splits <= 2 ? 1.0 : splits <= 4 ? 0.91 : 0.85);
}

// Of products in one launch, `depth` layers at most.
double ProductsUs(const Product* products, int count, int64_t depth, const TileCost& cost,
                  int splits, int multiprocessors) {
  double tiles = 0;
  for (const Product* p = products; p < products + count; p++)
    tiles += (double)(CeilDiv(p->m, cost.rows) * CeilDiv(p->n, cost.cols));
  const double on_each = std::ceil(tiles * splits / Usable(multiprocessors, splits));
  const double rounds = std::ceil(on_each / cost.resident);
  const double at_once = on_each < cost.resident ? on_each : cost.resident;
  const double layer_ns = rounds * (cost.ns + (at_once - 1) * cost.ns_more);
  const double joining = splits == 1 ? 0 : splits == 2 ? 0.7 : splits == 4 ? 1.1 : 1.9;
  return cost.us + joining + (rounds - 1) * kRoundUs +
         (double)PartOf(depth, splits) * layer_ns * 1e-3;
}

// Whether none of the splits would be empty.
bool HasSplits(int64_t k, int splits) {
  return splits == 1 || (splits - 1) * PartOf(k, splits) < k;
}

// Whether a block may have the shared memory; a kernel declares some besides.
bool HasTiling(size_t shared_limit, const Family& family, int tiling) {
  return family.nbytes[tiling] + 4096 <= shared_limit;
}

// Whether cuBLAS, with what it lacks in kernels of their own, takes less time.
bool CublasIsFaster(const Product& p, double own_us) {
  const int precision = (int)p.precision;
  double us = kCublasUs[precision] + 2. * p.m * p.n * p.k / kCublasFlopUs[precision];
  if (!p.epilogue.Empty()) us += kKernelUs;
  if (p.sums) us += kReduceUs;
  return us < own_us;
}

bool WholeOut(const Product& p) {
  const Epilogue& e = p.epilogue;
  return p.n % 4 == 0 && Aligned16(p.c) && Aligned16(e.bias) && Aligned16(e.side);
}

void Finish(const char* op, const Product& p, const float* partial, int splits, DLStream stream) {
  Launch(op, FinishKernel, Blocks(p.m * CeilDiv(p.n, 4)), kThreads, 0, stream, p, partial, splits,
         WholeOut(p));
}

void SumOperand(const char* op, const Product& p, DLStream stream) {
  const float* of = p.sums_of_a ? p.a : p.b;
  const int64_t width = p.sums_of_a ? p.m : p.n;
  const bool depth_first = p.sums_of_a ? p.trans_a : !p.trans_b;
  SumAxis(op, p.ctx, of, depth_first ? 1 : width, p.k, depth_first ? width : 1, 1.f, p.sums,
          stream);
}

bool OwnIsWanted() {
  static const bool wanted = [] {
    const char* blas = getenv("DLSYS_BLAS");
    return blas && strcmp(blas, "own") == 0;
  }();
  return wanted;
}

}  // namespace

Tiles TilesOf(const Product& p) {
  if (p.bytes != Bytes::kNone) return Tiles::kBytes;
  const bool tensor = p.precision == Precision::kTf32 && ComputeMajor(p.ctx.device_id) >= 8;
  return tensor ? Tiles::kTf32 : Tiles::kFp32;
}

Cut BestCut(Tiles tiles, const Product* products, int count, int most_splits) {
  const int device = products->ctx.device_id, multiprocessors = Multiprocessors(device);
  const size_t shared_limit = SharedLimit(device);
  const Family& family = FamilyOf(tiles);
  int64_t depth = 0;
  for (int k = 0; k < count; k++) depth = std::max(depth, products[k].k);
  Cut best = {kTilings - 1, 1, INFINITY};
  for (int tiling = 0; tiling < kTilings; tiling++) {
    if (!HasTiling(shared_limit, family, tiling)) continue;
    for (int splits = 1; splits <= most_splits && HasSplits(depth, splits); splits *= 2) {
      const double us =
          ProductsUs(products, count, depth, family.costs[tiling], splits, multiprocessors);
      if (us < best.us) best = {tiling, splits, us};
    }
  }
  return best;
}

Problem CutInto(const char* op, const Product& p, int tiling, int splits) {
  const TileCost& size = kFp32Costs[tiling];
  // One at least: sums of the other operand are made in its rows and columns too.
  const int64_t rows = std::max<int64_t>(1, CeilDiv(p.m, size.rows));
  const int64_t cols = std::max<int64_t>(1, CeilDiv(p.n, size.cols));
  if (rows > kMaxTiles / (cols * kMaxSplits))
    Fail("%s: a result of %ld x %ld is too large", op, (long)p.m, (long)p.n);
  const int64_t row_a = p.trans_a ? p.m : p.k, row_b = p.trans_b ? p.k : p.n;
  const bool whole_a = Aligned16(p.a) && row_a % (p.bytes == Bytes::kA ? 16 : 4) == 0;
  const bool whole_b = Aligned16(p.b) && row_b % (p.bytes == Bytes::kB ? 16 : 4) == 0;
  return {p,       (int)rows, (int)cols,   splits,  PartOf(p.k, splits),
          whole_a, whole_b,   WholeOut(p), nullptr, ComputeMajor(p.ctx.device_id) >= 9};
}

void MultiplyTiled(const char* op, const Product& p, int tiling, int splits, DLStream stream) {
  const int64_t part = PartOf(p.k, splits);
  if (part > 0) splits = (int)CeilDiv(p.k, part);
  Problem problem = CutInto(op, p, tiling, splits);
  const Tiles tiles = TilesOf(p);
  const auto launch = tiles == Tiles::kBytes  ? LaunchBytes
                      : tiles == Tiles::kTf32 ? LaunchTf32
                                              : LaunchFp32;
  if (splits == 1 || ComputeMajor(p.ctx.device_id) >= 9) return launch(op, tiling, problem, stream);
  const int64_t width = p.sums ? (p.sums_of_a ? p.m : p.n) : 0;
  const Scratch partial(p.ctx, splits * (p.m * p.n + width) * (int64_t)sizeof(float), stream);
  problem.partial = partial.floats();
  problem.whole_out = p.n % 4 == 0;
  launch(op, tiling, problem, stream);
  Finish(op, p, partial.floats(), splits, stream);
  if (p.sums)
    SumAxis(op, p.ctx, partial.floats() + splits * p.m * p.n, 1, splits, width, 1.f, p.sums,
            stream);
}

void MultiplyOwn(const char* op, const Product& p, DLStream stream) {
  if (p.m == 0 || p.n == 0) {
    if (p.sums) SumOperand(op, p, stream);
    return;
  }
  const Cut cut = BestCut(TilesOf(p), &p, 1, kMaxSplits);
  MultiplyTiled(op, p, cut.tiling, cut.splits, stream);
}

namespace {

// What a product by another library lacks.
void AddTheRest(const char* op, const Product& p, DLStream stream) {
  if (!p.epilogue.Empty()) Finish(op, p, p.c, 1, stream);
  if (p.sums) SumOperand(op, p, stream);
}

void MultiplyByRule(const char* op, const Product& p, DLStream stream) {
  const bool own = OwnIsWanted() || p.bytes != Bytes::kNone;
  if (own || !CublasIsFaster(p, BestCut(TilesOf(p), &p, 1, kMaxSplits).us) || *CublasError())
    return MultiplyOwn(op, p, stream);
  MultiplyCublas(op, p, stream);
  AddTheRest(op, p, stream);
}

// The choices from 1 on: every tiling over every number of splits, cuBLAS, what cuBLASLt proposes.
constexpr int kCutsOfTiling = 4;  // 1, 2, 4 and 8 splits
constexpr int kCuts = kTilings * kCutsOfTiling;
static_assert(1 << (kCutsOfTiling - 1) == kMaxSplits);

bool Applies(const Product& p, int number) {
  if (p.m == 0 || p.n == 0 || p.k == 0) return false;
  if (number >= kCuts) return !OwnIsWanted() && p.bytes == Bytes::kNone;
  const size_t shared_limit = SharedLimit(p.ctx.device_id);
  return HasTiling(shared_limit, FamilyOf(TilesOf(p)), number / kCutsOfTiling) &&
         HasSplits(p.k, 1 << number % kCutsOfTiling);
}

}  // namespace

const std::vector<Algorithm>& GemmAlgorithms() {
  static const std::vector<Algorithm>* const choices = [] {
    auto* made = new std::vector<Algorithm>;
    for (int k = 0; k < kCuts; k++) {
      const TileCost& tile = kFp32Costs[k / kCutsOfTiling];
      made->push_back({"tiles " + std::to_string(tile.rows) + "x" + std::to_string(tile.cols) +
                       " by " + std::to_string(1 << k % kCutsOfTiling)});
    }
    made->push_back({"cublas", CublasSource});
    for (int k = 1; k <= kLtProposals; k++)
      made->push_back({"cublaslt " + std::to_string(k), CublasLtSource});
    return made;
  }();
  return *choices;
}

void Multiply(const char* op, const Product& p, DLStream stream, int64_t choice) {
  const std::vector<Algorithm>& choices = GemmAlgorithms();
  if (choice < 0 || choice > (int64_t)choices.size())
    Fail("%s: there is no choice %ld, expected 0 to %zu", op, (long)choice, choices.size());
  if (choice == 0) return MultiplyByRule(op, p, stream);
  const int number = (int)choice - 1;
  if (!Applies(p, number)) NotApplicable(op, choices[number].name.c_str());
  if (number < kCuts)
    return MultiplyTiled(op, p, number / kCutsOfTiling, 1 << number % kCutsOfTiling, stream);
  if (number == kCuts) {
    CublasSource();
    MultiplyCublas(op, p, stream);
  } else {
    MultiplyLt(op, p, number - kCuts - 1, stream);
  }
  AddTheRest(op, p, stream);
}

Precision CheckedPrecision(const char* op, int64_t precision) {
  if (precision < 0 || precision > (int64_t)Precision::kTf32)
    Fail("%s: there is no precision %ld, expected 0 (fp32) or 1 (tf32)", op, (long)precision);
  return (Precision)precision;
}

Product CheckedProduct(const char* op, const DLArray* a, int64_t trans_a, const DLArray* b,
                       int64_t trans_b, DLArray* c, Bytes bytes, const DLArray* scale) {
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
  const auto factor = [&](const DLArray* x, Bytes number) {
    if (bytes != number) return In(op, x);
    if (x->dtype != DL_UINT8) Fail("%s: expected bytes, got %s", op, DtypeText(x->dtype));
    return (const float*)x->data;
  };
  const float *left = factor(a, Bytes::kA), *right = factor(b, Bytes::kB);
  Product product{left, right, Out(op, c), m, n, k, trans_a != 0, trans_b != 0, c->ctx};
  if (bytes == Bytes::kNone) return product;
  Enter(op, c, scale);
  if (Numel(scale) != 1)
    Fail("%s: expected one scale of bytes, got shape %s", op, ShapeText(scale).c_str());
  product.bytes = bytes, product.scale = In(op, scale);
  return product;
}

namespace {

void Matmul(const DLArray* a, int64_t trans_a, const DLArray* b, int64_t trans_b, int64_t choice,
            int64_t precision, DLArray* c, DLStream stream) {
  Product product = CheckedProduct("matmul", a, trans_a, b, trans_b, c);
  product.precision = CheckedPrecision("matmul", precision);
  Multiply("matmul", product, stream, choice);
}

void MatmulOwn(const DLArray* a, int64_t trans_a, const DLArray* b, int64_t trans_b, DLArray* c,
               DLStream stream) {
  MultiplyOwn("matmul_own", CheckedProduct("matmul_own", a, trans_a, b, trans_b, c), stream);
}

DLSYS_KERNEL(cuda, matmul, Matmul);
DLSYS_KERNEL(cuda, matmul_own, MatmulOwn);
DLSYS_ALGORITHMS(cuda, matmul, GemmAlgorithms);

}  // namespace
}  // namespace cuda
}  // namespace dlsys
