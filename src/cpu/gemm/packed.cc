// The rungs `simd` and `threads`: blocked GEMM in the scheme of Goto and van de Geijn (BLIS). A
// block of B (kBlockK x kBlockN) is packed once, or read where it is, panels of A are packed by the
// thread that uses them, and the micro-kernel of tile.h keeps a tile of C in registers. `simd` is
// one thread; for `threads` tiles of C are split over all, and where C has few of them also K
// (split-K), into slices that do not depend on the number of threads, so that every element sums in
// the same order for any number. Limited by the issue of multiply-adds; with few rows or columns by
// reading the other operand.
#include <cstring>

#include "cpu/gemm/gemm.h"
#include "cpu/gemm/pack.h"
#include "cpu/gemm/tile.h"
#include "cpu/pointwise/strides.h"
#include "cpu/runtime/parallel.h"
#include "cpu/runtime/simd.h"

namespace dlsys {
namespace cpu {
namespace {

const int64_t kBlockK = 400;       // K of a block: a panel of A stays in the L1 cache
const int64_t kBlockN = 384;       // N of a block: a block of B stays in the L2 cache
const int64_t kFewM = 24;          // at most this M: packing B would not pay
const int64_t kSharedM = 1024;     // up to this M and
const int64_t kSharedN = 2048;     // this N neither: what other cores packed takes as long to read
const int64_t kUnpackedN = 128;    // at most this N: packing A would not pay
const int64_t kFewRows = 8;        // at most this M: a panel of A is read where it is
const int64_t kDotM = 4;           // at most this M: dot products
const int64_t kTasks = 8;          // per block at least, where it has as many tiles
const int64_t kTaskMacs = 131072;  // multiply-adds worth a task
const int64_t kSmallB = 65536;     // elements of B that need no packing to stay in the L2 cache
const int64_t kSliceK = 4096;      // K worth a slice of its own
const int64_t kMaxSlices = 32;
const int64_t kAliasing = 1024;  // floats: rows as far apart compete for the same cache lines

// Rows of A so far apart that the cache could not hold a panel of them are packed.
bool Aliases(const Matrix& a) {
  return a.col == 1 ? a.row % kAliasing == 0 : a.col % kAliasing == 0;
}

// Whether a B with contiguous rows is read where it is.
bool Unpacked(const Gemm& p) {
  return p.b.col == 1 && (p.m <= kFewM || (p.m <= kSharedM && p.n <= kSharedN));
}

// The smallest tile with at least so many rows, or the largest there is.
int TileAtLeast(const TileKernels& kernels, int64_t rows) {
  int size = TileKernels::kTileSizes - 1;
  while (size > 0 && kernels.tile_rows[size - 1] >= rows) size--;
  return size;
}

// The largest tile with at most so many rows.
int TileAtMost(const TileKernels& kernels, int64_t rows) {
  int size = TileKernels::kTileSizes - 1;
  while (kernels.tile_rows[size] > rows) size--;
  return size;
}

// C += A times one block of B, (k, n) at (k0, n0).
class BlockGemm {
 public:
  BlockGemm(const Gemm& gemm, int most, int64_t k0, int64_t k, int64_t n0, int64_t n)
      : p_(gemm), most_(most), k0_(k0), k_(k), n0_(n0), n_(n), panel_n_(kernels_.MaxTileN()) {
    panels_ = CeilDiv(n_, panel_n_);
    first_packed_ = Unpacked(p_) ? n_ / panel_n_ : 0;
    strided_ = p_.n <= kernels_.width || p_.m <= kFewRows || (p_.n <= kUnpackedN && !Aliases(p_.a));
  }

  void Run() {
    // As many on any processor, so that a plan says the same everywhere.
    const ScratchArray<float> packed(RoundUp(n_ - first_packed_ * panel_n_, kMaxTileN) * k_ +
                                     kPackSlack);
    packed_b_ = packed.data();
    PackB();
    const int64_t row_tiles = CeilDiv(p_.m, kernels_.MaxTileM());
    const int64_t row_group = std::clamp<int64_t>(row_tiles / kTasks, 1, 4) * kernels_.MaxTileM();
    const int64_t row_groups = CeilDiv(p_.m, row_group);
    const int64_t col_group = CeilDiv(panels_, CeilDiv(kTasks, std::min(row_groups, kTasks)));
    const int64_t col_groups = CeilDiv(panels_, col_group);
    const int64_t macs = std::min(p_.m, row_group) * std::min(n_, col_group * panel_n_) * k_;
    const int64_t grain = std::max<int64_t>(1, kTaskMacs / macs);
    auto run = [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; t++) {
        const int64_t row = t / col_groups * row_group;
        const int64_t panel = t % col_groups * col_group;
        RunRows(row, std::min(p_.m, row + row_group), panel, std::min(panels_, panel + col_group));
      }
    };
    ParallelFor(row_groups * col_groups, grain, run, most_);
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
    auto pack = [&](int64_t begin, int64_t end) {
      for (int64_t s = first_packed_ + begin; s < first_packed_ + end; s++)
        kernels_.pack_b(PanelOfB(s), PanelN(s), p_.b.col, p_.b.row, k_, PackedB(s));
    };
    ParallelFor(panels_ - first_packed_, RowGrain(panel_n_ * k_), pack, most_);
  }

  // A packed panel of A is padded to its tile, in place it must not be overrun.
  void RunRows(int64_t row, int64_t row_end, int64_t panel, int64_t panel_end) const {
    alignas(64) float packed_a[kMaxTileM * kBlockK + kPackSlack];
    while (row < row_end) {
      const int size = (strided_ ? TileAtMost : TileAtLeast)(kernels_, row_end - row);
      TileArgs t;
      t.k = k_;
      t.a = p_.a.data + row * p_.a.row + k0_ * p_.a.col;
      t.a_row = p_.a.row;
      t.a_step = p_.a.col;
      t.c_stride = p_.n;
      t.rows = std::min<int64_t>(kernels_.tile_rows[size], row_end - row);
      t.add = p_.add || k0_ > 0;
      if (!strided_) {
        kernels_.pack_a[size](t.a, t.rows, t.a_row, t.a_step, k_, packed_a);
        t.a = packed_a;
      }
      for (int64_t s = panel; s < panel_end; s++) {
        t.cols = PanelN(s);
        t.b = UsedInPlace(s) ? PanelOfB(s) : PackedB(s);
        t.b_stride = UsedInPlace(s) ? p_.b.row : panel_n_;
        t.c = p_.c + row * p_.n + n0_ + s * panel_n_;
        const bool wide = t.cols > kernels_.width;
        (strided_ ? kernels_.strided : kernels_.packed)[size][wide](t);
      }
      row += t.rows;
    }
  }

  const TileKernels& kernels_ = CurrentTileKernels();
  const Gemm& p_;
  const int most_;
  const int64_t k0_, k_, n0_, n_, panel_n_;
  int64_t panels_;
  int64_t first_packed_;  // the panels before it are read where they are
  bool strided_;          // A is read where it is
  float* packed_b_ = nullptr;
};

void RunBlocks(const Gemm& p, int most) {
  const int64_t block_k = EvenBlock(p.k, kBlockK, 1);
  const int64_t block_n = EvenBlock(p.n, kBlockN, CurrentTileKernels().MaxTileN());
  for (int64_t n = 0; n < p.n; n += block_n)
    for (int64_t k = 0; k < p.k; k += block_k)
      BlockGemm(p, most, k, std::min(block_k, p.k - k), n, std::min(block_n, p.n - n)).Run();
}

// ---- small ----

// So little that packing would take a good part of the time: tiles read A and B where they are. The
// last tile of a row or a column of tiles overlaps the one before it instead of being cut, which
// would be added twice.
bool IsSmall(const Gemm& p) {
  const int64_t vector = kMaxTileN / 2;
  return !p.add && p.b.col == 1 && p.n >= vector && p.k <= kBlockK && p.k * p.n <= kSmallB &&
         !Aliases(p.a);
}

// Rows [row, row_end) of C, columns [col, col + vectors of t).
void RunColumn(const Gemm& p, int64_t row, int64_t row_end, int64_t col, int64_t cols) {
  const TileKernels& kernels = CurrentTileKernels();
  TileArgs t;
  t.k = p.k;
  t.a_row = p.a.row;
  t.a_step = p.a.col;
  t.b = p.b.data + col;
  t.b_stride = p.b.row;
  t.c_stride = p.n;
  t.cols = cols;
  t.add = false;
  const int64_t first = row;
  while (row < row_end) {
    int size = TileAtLeast(kernels, row_end - row);
    if (kernels.tile_rows[size] > row_end - first) size = TileAtMost(kernels, row_end - row);
    t.rows = kernels.tile_rows[size];
    row = std::min(row, row_end - t.rows);
    t.a = p.a.data + row * p.a.row;
    t.c = p.c + row * p.n + col;
    kernels.strided[size][cols > kernels.width](t);
    row += t.rows;
  }
}

void RunSmall(const Gemm& p, int most) {
  const TileKernels& kernels = CurrentTileKernels();
  const int64_t tile = kernels.MaxTileM(), wide = kernels.MaxTileN();
  const int64_t group = CeilDiv(CeilDiv(kTaskMacs, p.n * p.k), tile) * tile;
  auto run = [&](int64_t begin, int64_t end) {
    for (int64_t col = 0; col < p.n;) {
      const int64_t cols = p.n - col > kernels.width && p.n >= wide ? wide : kernels.width;
      col = std::min(col, p.n - cols);
      RunColumn(p, begin, end, col, cols);
      col += cols;
    }
  };
  ParallelFor(p.m, group, run, most);
}

// ---- a row or a few, a column ----

// c[0 .. count) = the dot products of x with rows of y, `row` apart, four at a time, or these are
// added to it: each is the sum of 32 partial ones.
DLSYS_INLINE void FourDots(const float* x, const float* y, int64_t row, int64_t n, int64_t count,
                           bool add_to_c, float* c) {
  constexpr int kWidth = 16;
  using Vector = Vectors<kWidth>::Aligned;
  const float* rows[4];
  for (int r = 0; r < 4; r++) rows[r] = y + std::min<int64_t>(r, count - 1) * row;
  Vector sum[2][4] = {};
  int64_t k = 0;
  auto add = [&](Vector* to, int64_t some) __attribute__((always_inline)) {
    Vector left, right;
    LoadSome<kWidth>(x + k, some, &left);
    DLSYS_UNROLL
    for (int r = 0; r < 4; r++) {
      LoadSome<kWidth>(rows[r] + k, some, &right);
      to[r] += left * right;
    }
    k += kWidth;
  };
  while (k + 2 * kWidth <= n) {
    add(sum[0], kWidth);
    add(sum[1], kWidth);
  }
  while (k < n) add(sum[0], n - k);
  DLSYS_UNROLL
  for (int r = 0; r < 4; r++) sum[0][r] += sum[1][r];
  // Element 4 j + r of the last is a part of dot product r.
  constexpr auto elements = std::make_integer_sequence<int, kWidth>{};
  Vector* s = sum[0];
  ExchangeBlocks<kWidth, 1>(s, s + 1, elements);
  ExchangeBlocks<kWidth, 1>(s + 2, s + 3, elements);
  s[0] += s[1];
  s[2] += s[3];
  ExchangeBlocks<kWidth, 2>(s, s + 2, elements);
  s[0] += s[2];
  float parts[kWidth];
  memcpy(parts, s, sizeof parts);
  for (int64_t r = 0; r < count; r++) {
    const float dot = (parts[r] + parts[4 + r]) + (parts[8 + r] + parts[12 + r]);
    c[r] = add_to_c ? c[r] + dot : dot;
  }
}

// A few rows of A times a transposed B: both are contiguous along k, so nothing is packed.
void RunDots(const Gemm& p, int most) {
  const float* a = p.a.data;
  const ScratchArray<float> rows(p.a.col == 1 ? 0 : p.m * p.k);
  if (p.a.col != 1) {
    Serially([&] {
      for (int64_t i = 0; i < p.m; i++)
        for (int64_t k = 0; k < p.k; k++) rows.data()[i * p.k + k] = a[i * p.a.row + k * p.a.col];
    });
    a = rows.data();
  }
  const int64_t row = p.b.col;
  auto run = [&](int64_t begin, int64_t end) {
    Dispatch([&]() __attribute__((always_inline)) {
      for (int64_t j = begin; j < end; j += 4)
        for (int64_t i = 0; i < p.m; i++)
          FourDots(a + i * p.k, p.b.data + j * row, row, p.k, std::min<int64_t>(4, end - j), p.add,
                   p.c + i * p.n + j);
    });
  };
  ParallelFor(p.n, std::max<int64_t>(4, kTaskMacs / (p.m * p.k)), run, most);
}

// One row of A times B: B is read once, several cache lines of a row at a time.
void RunRow(const Gemm& p, int most) {
  const TileKernels& kernels = CurrentTileKernels();
  const int64_t cols = TileKernels::kRowVectors * kernels.width, full = p.n / cols;
  auto run = [&](int64_t begin, int64_t end) {
    TileArgs t = {p.k, p.a.data, 0, p.a.col, nullptr, p.b.row, nullptr, p.n, 1, cols, p.add};
    for (int64_t panel = begin; panel < end; panel++) {
      t.b = p.b.data + panel * cols;
      t.c = p.c + panel * cols;
      kernels.row(t);
    }
  };
  ParallelFor(full, std::max<int64_t>(1, kTaskMacs / (p.k * cols)), run, most);
  if (full * cols == p.n) return;
  Gemm rest = p;
  rest.n -= full * cols;
  rest.b.data += full * cols;
  rest.c += full * cols;
  RunBlocks(rest, most);
}

// ---- long K ----

// The slices of K that run side by side where C has too few tiles for that.
int64_t KSlicesOf(const Gemm& p) {
  const int64_t tiles = CeilDiv(p.m, kMaxTileM) * CeilDiv(p.n, kMaxTileN);
  return tiles >= 2 * kTasks ? 1 : std::clamp<int64_t>(p.k / kSliceK, 1, kMaxSlices);
}

Gemm KSliceOf(const Gemm& p, int64_t k0, int64_t k, float* c) {
  const Matrix a = {p.a.data + k0 * p.a.col, p.a.row, p.a.col};
  const Matrix b = {p.b.data + k0 * p.b.row, p.b.row, p.b.col};
  return {p.m, p.n, k, a, b, c};
}

void RunSplitK(const Gemm& p, int64_t slices, int most) {
  const int64_t size = p.m * p.n, slice_k = CeilDiv(p.k, slices);
  const ScratchArray<float> products(slices * size);
  const int64_t nbytes = ScratchNbytes([&] { RunBlocks(KSliceOf(p, 0, slice_k, p.c), 1); });
  const auto make = [=] { return ScratchArray<char>(nbytes); };
  auto run = [&](int64_t begin, int64_t end, const ScratchArray<char>& scratch) {
    for (int64_t slice = begin; slice < end; slice++) {
      const Workspace::Planned own(scratch.data(), nbytes);
      const int64_t k0 = slice * slice_k;
      RunBlocks(KSliceOf(p, k0, std::min(slice_k, p.k - k0), products.data() + slice * size), 1);
    }
  };
  ParallelForWithScratch(slices, 1, make, run, most);
  Serially([&] {
    if (!p.add) std::copy(products.data(), products.data() + size, p.c);
    for (int64_t slice = !p.add; slice < slices; slice++)
      for (int64_t k = 0; k < size; k++) p.c[k] += products.data()[slice * size + k];
  });
}

// Runs a GEMM with the same arithmetic for any number of threads.
void RunPacked(Gemm p, int most) {
  if (p.n == 1 && p.m > 1)  // one column: the same sums as one row of the transposed GEMM
    p = {1, p.m, p.k, {p.b.data, p.k, p.b.row}, {p.a.data, p.a.col, p.a.row}, p.c, p.add};
  if (p.m <= kDotM && p.b.row == 1) return RunDots(p, most);
  if (p.m == 1 && p.b.col == 1 && p.n > kMaxTileN) return RunRow(p, most);
  if (IsSmall(p)) return RunSmall(p, most);
  const int64_t slices = KSlicesOf(p);
  slices > 1 ? RunSplitK(p, CeilDiv(p.k, CeilDiv(p.k, slices)), most) : RunBlocks(p, most);
}

void RunSimd(const Gemm& p) { RunPacked(p, 1); }
void RunThreads(const Gemm& p) { RunPacked(p, INT_MAX); }

}  // namespace

const GemmRung kSimd = {"simd", RunSimd};
const GemmRung kThreads = {"threads", RunThreads};

}  // namespace cpu
}  // namespace dlsys
