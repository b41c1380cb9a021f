// The matrix product C = op(A) op(B) in blocks that fit the caches: a block of B is packed once for
// all threads, a strip of A by the thread that uses it, and a tile of C stays in registers. Threads
// share out C only, so every element adds its products in the same order for any number of them.
#include "cpu/gemm/gemm.h"

#include <cstring>

#include "cpu/gemm/tile.h"
#include "cpu/pointwise/strides.h"
#include "cpu/runtime/parallel.h"
#include "cpu/runtime/simd.h"

namespace dlsys {
namespace cpu {
namespace {

const int64_t kMostK = 400;  // steps of a block along k: a strip of A stays in the first cache
const int64_t kMostBlockCols = 384;    // columns of a block of B: it stays in the second cache
const int64_t kMostRows = 12;          // rows of the largest tile of any processor
const int64_t kFewRows = 24;           // of C: too few uses of B to pay for packing it
const int64_t kDotRows = 4;            // of C: rows of A against rows of B
const int64_t kTasks = 8;              // of a block, at least, where it has that many tiles
const int64_t kTaskProducts = 131072;  // products that are worth a task

static Scratch b_scratch, row_scratch;

int64_t CeilDiv(int64_t n, int64_t d) { return (n + d - 1) / d; }

// The size of the fewest equal blocks, none above `most`, rounded up to `unit`.
int64_t EvenBlock(int64_t n, int64_t most, int64_t unit) {
  return CeilDiv(CeilDiv(n, CeilDiv(n, most)), unit) * unit;
}

// `to` (k, width) from `lines` lines of k values: `line` apart, their values `step` apart; the rest
// of a row is 0.
void PackStrip(const float* from, int64_t lines, int64_t line, int64_t step, int64_t k,
               int64_t width, float* to) {
  const int64_t kBlock = 16;  // a cache line of each line at a time
  if (lines < width) std::fill(to, to + k * width, 0.f);
  if (line == 1) {
    for (int64_t p = 0; p < k; p++) memcpy(to + p * width, from + p * step, lines * sizeof(float));
    return;
  }
  for (int64_t p0 = 0; p0 < k; p0 += kBlock) {
    const int64_t end = std::min(k, p0 + kBlock);
    for (int64_t j = 0; j < lines; j++)
      for (int64_t p = p0; p < end; p++) to[p * width + j] = from[j * line + p * step];
  }
}

// The product of one block of B, (k, n) from (k0, n0), with all of A.
class BlockProduct {
 public:
  BlockProduct(const Product& product, int64_t k0, int64_t k, int64_t n0, int64_t n)
      : p_(product), k0_(k0), k_(k), n0_(n0), n_(n), strip_(kernels_.MostCols()) {
    in_place_ = p_.m <= kFewRows && p_.b.col == 1;
    strips_ = CeilDiv(n_, strip_);
  }

  void Run() {
    packed_b_ = b_scratch.Get<float>(strips_ * strip_ * k_);
    PackB();
    const int64_t panels = CeilDiv(p_.m, kernels_.MostRows());
    const int64_t row_group = std::clamp<int64_t>(panels / kTasks, 1, 4) * kernels_.MostRows();
    const int64_t row_groups = CeilDiv(p_.m, row_group);
    const int64_t col_group = CeilDiv(strips_, CeilDiv(kTasks, std::min(row_groups, kTasks)));
    const int64_t col_groups = CeilDiv(strips_, col_group);
    const int64_t products = std::min(p_.m, row_group) * std::min(n_, col_group * strip_) * k_;
    const int64_t grain = std::max<int64_t>(1, kTaskProducts / products);
    ParallelFor(row_groups * col_groups, grain, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; t++) {
        const int64_t row = t / col_groups * row_group;
        const int64_t strip = t % col_groups * col_group;
        RunRows(row, std::min(p_.m, row + row_group), strip, std::min(strips_, strip + col_group));
      }
    });
  }

 private:
  int64_t StripCols(int64_t strip) const { return std::min(strip_, n_ - strip * strip_); }
  bool UsedInPlace(int64_t strip) const { return in_place_ && StripCols(strip) == strip_; }
  const float* StripOfB(int64_t strip) const {
    return p_.b.data + k0_ * p_.b.row + (n0_ + strip * strip_) * p_.b.col;
  }

  void PackB() const {
    ParallelFor(strips_, RowGrain(strip_ * k_), [&](int64_t begin, int64_t end) {
      for (int64_t s = begin; s < end; s++)
        if (!UsedInPlace(s))
          PackStrip(StripOfB(s), StripCols(s), p_.b.col, p_.b.row, k_, strip_,
                    packed_b_ + s * strip_ * k_);
    });
  }

  void RunRows(int64_t row, int64_t row_end, int64_t strip, int64_t strip_end) const {
    alignas(64) float packed_a[kMostRows * kMostK];
    const bool strided = n_ <= kernels_.width;
    while (row < row_end) {
      const int size = RowSize(row_end - row, strided);
      TileArgs t;
      t.k = k_;
      t.a = p_.a.data + row * p_.a.row + k0_ * p_.a.col;
      t.a_row = p_.a.row;
      t.a_step = p_.a.col;
      t.c_stride = p_.n;
      t.rows = std::min<int64_t>(kernels_.row_sizes[size], row_end - row);
      t.add = k0_ > 0;
      if (!strided) {
        PackStrip(t.a, t.rows, t.a_row, t.a_step, k_, kernels_.row_sizes[size], packed_a);
        t.a = packed_a;
      }
      for (int64_t s = strip; s < strip_end; s++) {
        t.cols = StripCols(s);
        t.b = UsedInPlace(s) ? StripOfB(s) : packed_b_ + s * strip_ * k_;
        t.b_stride = UsedInPlace(s) ? p_.b.row : strip_;
        t.c = p_.c + row * p_.n + n0_ + s * strip_;
        const bool wide = t.cols > kernels_.width;
        (strided ? kernels_.strided[size] : kernels_.packed[size][wide])(t);
      }
      row += t.rows;
    }
  }

  // The tile for that many rows: a packed A is padded up to the next size, a strided one must not
  // be overrun.
  int RowSize(int64_t rows, bool strided) const {
    int size = TileKernels::kRowSizes - 1;
    if (strided)
      while (kernels_.row_sizes[size] > rows) size--;
    else
      while (size > 0 && kernels_.row_sizes[size - 1] >= rows) size--;
    return size;
  }

  const TileKernels& kernels_ = CurrentTileKernels();
  const Product& p_;
  const int64_t k0_, k_, n0_, n_, strip_;
  int64_t strips_;
  bool in_place_;
  float* packed_b_ = nullptr;
};

void BlockedProduct(const Product& p) {
  const int64_t block_k = EvenBlock(p.k, kMostK, 1);
  const int64_t block_n = EvenBlock(p.n, kMostBlockCols, CurrentTileKernels().MostCols());
  for (int64_t n = 0; n < p.n; n += block_n)
    for (int64_t k = 0; k < p.k; k += block_k)
      BlockProduct(p, k, std::min(block_k, p.k - k), n, std::min(block_n, p.n - n)).Run();
}

DLSYS_INLINE float Dot(const float* x, const float* y, int64_t n) {
  const int kLanes = 64;
  float lane[kLanes] = {};
  int64_t k = 0;
  for (; k + kLanes <= n; k += kLanes)
    for (int j = 0; j < kLanes; j++) lane[j] += x[k + j] * y[k + j];
  for (int j = 0; k < n; k++, j++) lane[j] += x[k] * y[k];
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int j = 0; j < width; j++) lane[j] += lane[j + width];
  return lane[0];
}

// A few rows of A against the rows of a transposed B: both run along k, so nothing needs packing.
void DotProduct(const Product& p) {
  const float* a = p.a.data;
  if (p.a.col != 1) {
    float* rows = row_scratch.Get<float>(p.m * p.k);
    for (int64_t i = 0; i < p.m; i++)
      for (int64_t k = 0; k < p.k; k++) rows[i * p.k + k] = a[i * p.a.row + k * p.a.col];
    a = rows;
  }
  const int64_t grain = std::max<int64_t>(1, kTaskProducts / (p.m * p.k));
  ParallelFor(p.n, grain, [&](int64_t begin, int64_t end) {
    Dispatch([&]() __attribute__((always_inline)) {
      for (int64_t j = begin; j < end; j++)
        for (int64_t i = 0; i < p.m; i++)
          p.c[i * p.n + j] = Dot(a + i * p.k, p.b.data + j * p.b.col, p.k);
    });
  });
}

Matrix Used(const float* data, const DLArray* stored, bool transposed) {
  const int64_t cols = stored->shape[1];
  return transposed ? Matrix{data, 1, cols} : Matrix{data, cols, 1};
}

void CheckShapes(const char* op, const DLArray* a, bool trans_a, const DLArray* b, bool trans_b,
                 const DLArray* c) {
  const bool matrices = a->ndim == 2 && b->ndim == 2 && c->ndim == 2;
  if (matrices && a->shape[!trans_a] == b->shape[trans_b] && c->shape[0] == a->shape[trans_a] &&
      c->shape[1] == b->shape[!trans_b])
    return;
  Fail("%s: %s%s @ %s%s does not give %s", op, ShapeText(a).c_str(), trans_a ? ".T" : "",
       ShapeText(b).c_str(), trans_b ? ".T" : "", ShapeText(c).c_str());
}

// Every precision is computed in float32, by the one implementation that there is.
void MatMul(const DLArray* a, int64_t trans_a, const DLArray* b, int64_t trans_b,
            [[maybe_unused]] int64_t choice, [[maybe_unused]] int64_t precision, DLArray* c) {
  Multiply(CheckedProduct("matmul", a, trans_a, b, trans_b, c));
}

DLSYS_KERNEL(cpu, matmul, MatMul);

}  // namespace

Product CheckedProduct(const char* op, const DLArray* a, int64_t trans_a, const DLArray* b,
                       int64_t trans_b, DLArray* c) {
  const float* left = Input(op, a);
  const float* right = Input(op, b);
  float* out = Output(op, c);
  CheckShapes(op, a, trans_a != 0, b, trans_b != 0, c);
  return Product{c->shape[0],
                 c->shape[1],
                 a->shape[!trans_a],
                 Used(left, a, trans_a != 0),
                 Used(right, b, trans_b != 0),
                 out};
}

void Multiply(Product p) {
  if (p.m == 0 || p.n == 0) return;
  if (p.k == 0) return std::fill(p.c, p.c + p.m * p.n, 0.f);
  if (p.n == 1 && p.m > 1)  // one column: the same numbers as one row of the transposed product
    p = {1, p.m, p.k, {p.b.data, p.k, p.b.row}, {p.a.data, p.a.col, p.a.row}, p.c};
  if (p.m <= kDotRows && p.b.row == 1)
    DotProduct(p);
  else
    BlockedProduct(p);
}

}  // namespace cpu
}  // namespace dlsys
