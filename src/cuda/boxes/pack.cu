// The outputs of non-maximum suppression and Soft-NMS: what the columns selected, moved together in
// their order. A block for each column adds up the counts before its own; the places that are left
// are dealt to all threads. Integers alone are added. Memory bandwidth limits it.
#include "cuda/boxes/boxes.cuh"
#include "cuda/reduce/group.cuh"

namespace dlsys {
namespace cuda {
namespace {

struct Counts {
  int64_t before, all;
};
struct CountsMonoid {
  static __device__ Counts Combine(Counts a, Counts b) {
    return {a.before + b.before, a.all + b.all};
  }
};

struct Outputs {
  int64_t* rows;
  float* scores;  // or null
  int64_t* count;
};

__global__ void PackKernel(nms::Extents of, Selected selected, Outputs out) {
  const int64_t columns = of.Columns();
  int64_t all = 0;
  for (int64_t column = blockIdx.x; column < columns; column += gridDim.x) {
    Counts counts = {0, 0};
    for (int64_t k = threadIdx.x; k < columns; k += kThreads) {
      counts.all += selected.counts[k];
      if (k < column) counts.before += selected.counts[k];
    }
    counts = GroupReduce<CountsMonoid, kThreads>(counts);
    all = counts.all;
    for (int k = threadIdx.x; k < selected.counts[column]; k += kThreads) {
      const int64_t from = column * of.most + k, to = counts.before + k;
      out.rows[3 * to] = column / of.classes;
      out.rows[3 * to + 1] = column % of.classes;
      out.rows[3 * to + 2] = selected.picks[from];
      if (out.scores) out.scores[to] = selected.scores[from];
    }
  }
  if (FirstItem() == 0) *out.count = all;
  for (int64_t at = all + FirstItem(); at < columns * of.most; at += ItemStep()) {
    out.rows[3 * at] = out.rows[3 * at + 1] = out.rows[3 * at + 2] = -1;
    if (out.scores) out.scores[at] = 0.f;
  }
}

}  // namespace

void PackSelected(const char* op, const nms::Extents& of, const Selected& selected,
                  DLArray* indices, DLArray* scores, DLArray* count, DLStream stream) {
  const Outputs out{Out<int64_t>(op, indices), scores ? Out(op, scores) : nullptr,
                    Out<int64_t>(op, count)};
  const unsigned blocks = ColumnBlocks(of.Columns(), count->ctx.device_id);
  Launch(op, PackKernel, blocks ? blocks : 1, kThreads, 0, stream, of, selected, out);
}

}  // namespace cuda
}  // namespace dlsys
