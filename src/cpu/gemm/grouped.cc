// Products by groups of rows on the CPU, forward and the contraction over the rows of each group. A
// task is some rows of the result of one group, a product of the ladder that stays on its thread;
// the cut does not depend on the number of threads, nor do the bits. Arithmetic limits it, and with
// few rows a group the reading of its matrix.
#include "operators/grouped.h"

#include "cpu/gemm/gemm.h"
#include "cpu/runtime/parallel.h"
#include "cpu/runtime/widened.h"

namespace dlsys {
namespace cpu {
namespace {

constexpr int64_t kMostRows = 64, kTasks = 32;  // rows of a task; tasks at least, of enough rows
constexpr int64_t kMostK = 400;  // of a product: up to this one, scratch grows with K

struct Grouped {
  const char* op;
  GroupedShape shape;
  const float *a, *b;
  float* c;
  Indices sizes;
  int64_t algorithm;
};

int TaskRows(const GroupedShape& shape) {
  const int64_t rows = shape.contracts ? shape.k : shape.rows;
  return (int)std::clamp<int64_t>(CeilDiv(rows, kTasks), 1, kMostRows);
}

// The product of `rows` rows of C, from A and B on, over `k`.
Gemm ProductOf(const Grouped& p, int64_t rows, int64_t k, const float* a, const float* b,
               float* c) {
  const GroupedShape& shape = p.shape;
  const Matrix left = shape.contracts ? Matrix{a, 1, shape.k} : Matrix{a, shape.k, 1};
  const Matrix right = shape.trans_b ? Matrix{b, 1, shape.k} : Matrix{b, shape.n, 1};
  return {rows, shape.n, k, left, right, c};
}

// Scratch of the products of a task, whatever the sizes of the groups.
int64_t ProductNbytes(const Grouped& p, int64_t task_rows) {
  const int64_t most_k = std::min(p.shape.rows, kMostK);
  int64_t nbytes = 0;
  const auto ask = [&](int64_t rows, int64_t k) {
    const Gemm gemm = ProductOf(p, rows, k, p.a, p.b, p.c);
    nbytes = std::max(nbytes, ScratchNbytes([&] { RunGemm(p.op, gemm, p.algorithm); }));
  };
  if (!p.shape.contracts)
    for (int64_t rows = 1; rows <= task_rows; rows++) ask(rows, p.shape.k);
  else
    for (const int64_t rows : {task_rows, p.shape.k % task_rows}) ask(rows, most_k);
  return nbytes;
}

void RunContraction(const Grouped& p, int64_t begin, int64_t end, int64_t row, int64_t rows,
                    float* c, float* part) {
  const GroupedShape& shape = p.shape;
  if (begin == end) std::fill(c, c + rows * shape.n, 0.f);
  for (int64_t k0 = begin; k0 < end; k0 += kMostK) {
    const int64_t k = std::min(kMostK, end - k0);
    float* const to = k0 == begin ? c : part;
    RunGemm(p.op, ProductOf(p, rows, k, p.a + k0 * shape.k + row, p.b + k0 * shape.n, to),
            p.algorithm);
    if (k0 > begin)
      for (int64_t at = 0; at < rows * shape.n; at++) c[at] += part[at];
  }
}

void Run(const Grouped& p) {
  const GroupedShape& shape = p.shape;
  if (shape.n == 0 || (shape.contracts ? shape.groups * shape.k : shape.rows) == 0) return;
  const int64_t task_rows = TaskRows(shape), cols = std::max<int64_t>(shape.n, 1);
  const int64_t part = shape.contracts && shape.rows > kMostK ? task_rows * cols : 0;
  const int64_t nbytes = ProductNbytes(p, task_rows);
  const auto make = [=] {
    return std::pair<ScratchArray<float>, ScratchArray<char>>(part, nbytes);
  };
  const auto task = [&](int64_t first, int64_t last, const auto& scratch) {
    const Workspace::Planned of_gemm(scratch.second.data(), nbytes);
    GroupTiles tiles(p.sizes, shape, (int)task_rows, (int)cols);
    for (int64_t t = first; t < last && tiles.GoTo(t); t++) {
      const int64_t row = tiles.row() * task_rows, begin = tiles.begin() + row;
      if (shape.contracts) {
        const int64_t rows = std::min(task_rows, shape.k - row);
        RunContraction(p, tiles.begin(), tiles.end(), row, rows,
                       p.c + (tiles.group() * shape.k + row) * shape.n, scratch.first.data());
        continue;
      }
      const int64_t rows = std::min(task_rows, tiles.end() - begin);
      float* const c = p.c + begin * shape.n;
      if (tiles.IsRest())
        std::fill(c, c + rows * shape.n, 0.f);
      else
        RunGemm(p.op,
                ProductOf(p, rows, shape.k, p.a + begin * shape.k,
                          p.b + tiles.group() * shape.k * shape.n, c),
                p.algorithm);
    }
  };
  ParallelForWithScratch(GroupTiles::MostRowTiles(shape, (int)task_rows), 1, make, task);
}

// Checks the sizes and multiplies, in float32 at every precision.
void Run(const char* op, const GroupedShape& shape, const DLArray* a, const DLArray* b,
         const DLArray* sizes, int64_t algorithm, DLArray* c) {
  const float *left = Input(op, a), *right = Input(op, b);
  const Grouped p{op, shape, left, right, Output(op, c), IndicesOf(op, sizes), algorithm};
  if (!Workspace::Querying())
    CheckGroupSizes(p.sizes, shape, [&](int64_t size, int64_t group, int64_t most) {
      FailOutOfRange(op, "group size", size, group, most + 1);
    });
  Run(p);
}

void GroupedMatmul(const DLArray* a, const DLArray* b, const DLArray* sizes, int64_t trans_b,
                   int64_t algorithm, [[maybe_unused]] int64_t precision, DLArray* c) {
  const char* op = "grouped_matmul";
  Run(op, GroupedMatmulShape(op, a, b, sizes, trans_b != 0, c), a, b, sizes, algorithm, c);
}

void GroupedContraction(const DLArray* a, const DLArray* b, const DLArray* sizes, int64_t algorithm,
                        [[maybe_unused]] int64_t precision, DLArray* c) {
  const char* op = "grouped_contraction";
  Run(op, GroupedContractionShape(op, a, b, sizes, c), a, b, sizes, algorithm, c);
}

DLSYS_KERNEL(cpu, grouped_matmul, GroupedMatmul);
DLSYS_KERNEL_WIDENED(cpu, grouped_matmul, GroupedMatmul);
DLSYS_ALGORITHMS(cpu, grouped_matmul, GemmAlgorithms);
DLSYS_KERNEL(cpu, grouped_contraction, GroupedContraction);
DLSYS_KERNEL_WIDENED(cpu, grouped_contraction, GroupedContraction);
DLSYS_ALGORITHMS(cpu, grouped_contraction, GemmAlgorithms);

}  // namespace
}  // namespace cpu
}  // namespace dlsys
