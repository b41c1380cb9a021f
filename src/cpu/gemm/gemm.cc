// Blocked GEMM C = op(A) op(B) in the scheme of Goto and van de Geijn (BLIS): a block of B (kBlockK
// x kBlockN) is packed once for all threads, panels of A are packed by the thread that uses them,
// and the micro-kernel of tile.h keeps a tile of C in registers. Threads split C only, so every
// element sums in the same order for any number of them. Limited by FMA issue; with few rows by
// reading B.
#include "cpu/gemm/gemm.h"

#include <cstring>

#include "cpu/gemm/tile.h"
#include "cpu/pointwise/strides.h"
#include "cpu/runtime/parallel.h"
#include "cpu/runtime/simd.h"

namespace dlsys {
namespace cpu {
namespace {

const int64_t kBlockK = 400;       // K of a block: a panel of A stays in the L1 cache
const int64_t kBlockN = 384;       // N of a block: a block of B stays in the L2 cache
const int64_t kUnpackedM = 24;     // at most this M: packing B would not pay
const int64_t kDotM = 4;           // at most this M: dot products
const int64_t kTasks = 8;          // per block at least, where it has as many tiles
const int64_t kTaskMacs = 131072;  // multiply-adds worth a task

// Packs `to` (k, width) from `lines` rows of k values, `line` apart, elements `step` apart; the
// rest of a row is 0.
void PackPanel(const float* from, int64_t lines, int64_t line, int64_t step, int64_t k,
               int64_t width, float* to) {
  const int64_t kBlock = 16;  // a cache line of every row at a time
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

// C += A times one block of B, (k, n) at (k0, n0).
class BlockGemm {
 public:
  BlockGemm(const Gemm& gemm, int64_t k0, int64_t k, int64_t n0, int64_t n)
      : p_(gemm), k0_(k0), k_(k), n0_(n0), n_(n), panel_n_(kernels_.MaxTileN()) {
    panels_ = CeilDiv(n_, panel_n_);
    first_packed_ = p_.m <= kUnpackedM && p_.b.col == 1 ? n_ / panel_n_ : 0;
  }

  void Run() {
    // As many on any processor, so that a plan says the same everywhere.
    const ScratchArray<float> packed(RoundUp(n_ - first_packed_ * panel_n_, kMaxTileN) * k_);
    packed_b_ = packed.data();
    PackB();
    const int64_t row_tiles = CeilDiv(p_.m, kernels_.MaxTileM());
    const int64_t row_group = std::clamp<int64_t>(row_tiles / kTasks, 1, 4) * kernels_.MaxTileM();
    const int64_t row_groups = CeilDiv(p_.m, row_group);
    const int64_t col_group = CeilDiv(panels_, CeilDiv(kTasks, std::min(row_groups, kTasks)));
    const int64_t col_groups = CeilDiv(panels_, col_group);
    const int64_t macs = std::min(p_.m, row_group) * std::min(n_, col_group * panel_n_) * k_;
    const int64_t grain = std::max<int64_t>(1, kTaskMacs / macs);
    ParallelFor(row_groups * col_groups, grain, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; t++) {
        const int64_t row = t / col_groups * row_group;
        const int64_t panel = t % col_groups * col_group;
        RunRows(row, std::min(p_.m, row + row_group), panel, std::min(panels_, panel + col_group));
      }
    });
  }

 private:
  int64_t PanelN(int64_t panel) const { return std::min(panel_n_, n_ - panel * panel_n_); }
  bool UsedInPlace(int64_t panel) const { return panel < first_packed_; }
  float* PackedB(int64_t panel) const {
    return packed_b_ + (panel - first_packed_) * panel_n_ * k_;
  }
  const float* PanelOfB(int64_t panel) const {
    return p_.b.data + k0_ * p_.b.row + (n0_ + panel * panel_n_) * p_.b.col;
  }

  void PackB() const {
    const int64_t grain = RowGrain(panel_n_ * k_);
    ParallelFor(panels_ - first_packed_, grain, [&](int64_t begin, int64_t end) {
      for (int64_t s = first_packed_ + begin; s < first_packed_ + end; s++)
        PackPanel(PanelOfB(s), PanelN(s), p_.b.col, p_.b.row, k_, panel_n_, PackedB(s));
    });
  }

  void RunRows(int64_t row, int64_t row_end, int64_t panel, int64_t panel_end) const {
    alignas(64) float packed_a[kMaxTileM * kBlockK];
    const bool strided = n_ <= kernels_.width;
    while (row < row_end) {
      const int size = TileSize(row_end - row, strided);
      TileArgs t;
      t.k = k_;
      t.a = p_.a.data + row * p_.a.row + k0_ * p_.a.col;
      t.a_row = p_.a.row;
      t.a_step = p_.a.col;
      t.c_stride = p_.n;
      t.rows = std::min<int64_t>(kernels_.tile_rows[size], row_end - row);
      t.add = k0_ > 0;
      if (!strided) {
        PackPanel(t.a, t.rows, t.a_row, t.a_step, k_, kernels_.tile_rows[size], packed_a);
        t.a = packed_a;
      }
      for (int64_t s = panel; s < panel_end; s++) {
        t.cols = PanelN(s);
        t.b = UsedInPlace(s) ? PanelOfB(s) : PackedB(s);
        t.b_stride = UsedInPlace(s) ? p_.b.row : panel_n_;
        t.c = p_.c + row * p_.n + n0_ + s * panel_n_;
        const bool wide = t.cols > kernels_.width;
        (strided ? kernels_.strided[size] : kernels_.packed[size][wide])(t);
      }
      row += t.rows;
    }
  }

  // The tile size for so many rows: a packed A is padded to the next size, a strided one must not
  // be overrun.
  int TileSize(int64_t rows, bool strided) const {
    int size = TileKernels::kTileSizes - 1;
    if (strided)
      while (kernels_.tile_rows[size] > rows) size--;
    else
      while (size > 0 && kernels_.tile_rows[size - 1] >= rows) size--;
    return size;
  }

  const TileKernels& kernels_ = CurrentTileKernels();
  const Gemm& p_;
  const int64_t k0_, k_, n0_, n_, panel_n_;
  int64_t panels_;
  int64_t first_packed_;  // the panels before it are read where they are
  float* packed_b_ = nullptr;
};

void BlockedGemm(const Gemm& p) {
  const int64_t block_k = EvenBlock(p.k, kBlockK, 1);
  const int64_t block_n = EvenBlock(p.n, kBlockN, CurrentTileKernels().MaxTileN());
  for (int64_t n = 0; n < p.n; n += block_n)
    for (int64_t k = 0; k < p.k; k += block_k)
      BlockGemm(p, k, std::min(block_k, p.k - k), n, std::min(block_n, p.n - n)).Run();
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

// A few rows of A times a transposed B: both are contiguous along k, so nothing is packed.
void DotGemm(const Gemm& p) {
  const float* a = p.a.data;
  const ScratchArray<float> rows(p.a.col == 1 ? 0 : p.m * p.k);
  if (p.a.col != 1) {
    Serially([&] {
      for (int64_t i = 0; i < p.m; i++)
        for (int64_t k = 0; k < p.k; k++) rows.data()[i * p.k + k] = a[i * p.a.row + k * p.a.col];
    });
    a = rows.data();
  }
  const int64_t grain = std::max<int64_t>(1, kTaskMacs / (p.m * p.k));
  ParallelFor(p.n, grain, [&](int64_t begin, int64_t end) {
    Dispatch([&]() __attribute__((always_inline)) {
      for (int64_t j = begin; j < end; j++)
        for (int64_t i = 0; i < p.m; i++)
          p.c[i * p.n + j] = Dot(a + i * p.k, p.b.data + j * p.b.col, p.k);
    });
  });
}

Matrix Operand(const float* data, const DLArray* stored, bool transposed) {
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

// float32 at every precision.
void MatMul(const DLArray* a, int64_t trans_a, const DLArray* b, int64_t trans_b, int64_t algorithm,
            [[maybe_unused]] int64_t precision, DLArray* c) {
  RunGemm("matmul", CheckedGemm("matmul", a, trans_a, b, trans_b, c), algorithm);
}

DLSYS_KERNEL(cpu, matmul, MatMul);
DLSYS_ALGORITHMS(cpu, matmul, GemmAlgorithms);

void RunOnThreads(Gemm p) {
  if (p.n == 1 && p.m > 1)  // one column: the same sums as one row of the transposed GEMM
    p = {1, p.m, p.k, {p.b.data, p.k, p.b.row}, {p.a.data, p.a.col, p.a.row}, p.c};
  if (p.m <= kDotM && p.b.row == 1)
    DotGemm(p);
  else
    BlockedGemm(p);
}

}  // namespace

Gemm CheckedGemm(const char* op, const DLArray* a, int64_t trans_a, const DLArray* b,
                 int64_t trans_b, DLArray* c) {
  const float* left = Input(op, a);
  const float* right = Input(op, b);
  float* out = Output(op, c);
  CheckShapes(op, a, trans_a != 0, b, trans_b != 0, c);
  return Gemm{c->shape[0],
              c->shape[1],
              a->shape[!trans_a],
              Operand(left, a, trans_a != 0),
              Operand(right, b, trans_b != 0),
              out};
}

const std::vector<Algorithm>& GemmAlgorithms() {
  static const auto* const algorithms = new std::vector<Algorithm>{{"threads"}};
  return *algorithms;
}

void RunGemm(const char* op, const Gemm& p, int64_t algorithm) {
  const int64_t count = (int64_t)GemmAlgorithms().size();
  if (algorithm < 0 || algorithm > count)
    Fail("%s: there is no algorithm %ld, expected 0 to %ld", op, (long)algorithm, (long)count);
  if (p.m == 0 || p.n == 0) return;
  if (p.k == 0) return Serially([&] { std::fill(p.c, p.c + p.m * p.n, 0.f); });
  RunOnThreads(p);
}

}  // namespace cpu
}  // namespace dlsys
