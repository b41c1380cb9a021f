// The rung `naive` of grouped products, in true float32: one thread for each element of C, which
// finds the group of its row by adding up sizes and sums in the order of k from global memory.
// Limited by the loads that the L1 cache serves, two for each multiply-add.
#include "cuda/gemm/grouped/grouped.cuh"
#include "cuda/runtime/launch.cuh"

namespace dlsys {
namespace cuda {
namespace {

__global__ void NaiveGroupedKernel(const Grouped p) {
  const GroupedShape& shape = p.shape;
  if (FirstItem() == 0) TellOfSizes(p);
  GroupTiles rows(p.sizes, shape, 1, (int)shape.n);  // a tile is a row of C
  const int64_t numel = (shape.contracts ? shape.groups * shape.k : shape.rows) * shape.n;
  for (int64_t at = FirstItem(); at < numel; at += ItemStep()) {
    const int64_t row = at / shape.n, col = at - row * shape.n;
    rows.GoTo(row);
    const bool is_rest = rows.IsRest();
    const int64_t terms = shape.contracts ? rows.end() - rows.begin() : is_rest ? 0 : shape.k;
    const float *x = (const float*)p.a, *y = (const float*)p.b;
    int64_t x_step = 1, y_step = shape.n;
    if (shape.contracts) {
      x += rows.begin() * shape.k + rows.row(), x_step = shape.k;
      y += rows.begin() * shape.n + col;
    } else {
      x += row * shape.k;
      y += rows.group() * shape.k * shape.n + (shape.trans_b ? col * shape.k : col);
      if (shape.trans_b) y_step = 1;
    }
    float sum = 0.f;
    for (int64_t k = 0; k < terms; k++) sum = fmaf(x[k * x_step], y[k * y_step], sum);
    ((float*)p.c)[at] = sum;
  }
}

const char* Refusal(const Grouped&) { return nullptr; }

void Run(const char* op, const Grouped& p, DLStream stream) {
  const GroupedShape& shape = p.shape;
  const int64_t rows = shape.contracts ? shape.groups * shape.k : shape.rows;
  Launch(op, NaiveGroupedKernel, Blocks(rows * shape.n), kThreads, 0, stream, p);
}

}  // namespace

const GroupedRung kGroupedNaive = {"naive", nullptr, Refusal, Run};

}  // namespace cuda
}  // namespace dlsys
