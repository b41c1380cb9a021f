// Soft-NMS (Bodla et al., 2017) on a GPU: a block for each class of an image (a column), then
// pack.cu. Each pass over a column's candidates lowers their scores by how far they overlap the box
// that was taken last, and finds the best of them: the smallest key of score and index, so that the
// order of candidates and threads changes nothing. A score lies in scratch at its box's index, NaN
// once it is no candidate. The latency of a pass, with its barriers, limits it.
#include "cuda/boxes/boxes.cuh"
#include "cuda/reduce/group.cuh"

namespace dlsys {
namespace cuda {
namespace {

constexpr uint64_t kNone = ~uint64_t{0};

struct SmallestMonoid {
  static __device__ uint64_t Combine(uint64_t a, uint64_t b) { return a < b ? a : b; }
};

// Of a block, in device memory, `boxes` of each.
struct BlockScratch {
  float* scores;
  int* candidates;
};

struct Column {
  const float *scores, *boxes;
  int64_t n, most;
  nms::Options options;
  float sigma;
};

// The indices of a column's candidates, in any order, and their scores. Returns how many there are.
__device__ int Collect(const Column& of, const BlockScratch& scratch) {
  __shared__ unsigned count;
  __syncthreads();  // the previous column's readers are done
  if (threadIdx.x == 0) count = 0;
  __syncthreads();
  for (int64_t k = threadIdx.x; k < of.n; k += kBoxThreads) {
    const float score = of.scores[k];
    if (!of.options.Takes(score)) continue;
    scratch.scores[k] = score;
    scratch.candidates[atomicAdd(&count, 1u)] = (int)k;
  }
  __syncthreads();
  return (int)count;
}

// The key of the best of this thread's candidates, once box `taken` is (none: -1).
__device__ uint64_t Lower(const Column& of, const BlockScratch& scratch, int count, int taken) {
  uint64_t best = kNone;
  nms::Box box = {0.f, 0.f, 0.f, 0.f};
  if (taken >= 0) box = nms::BoxAt(of.boxes + 4 * (int64_t)taken, of.options.center);
  const float area = box.Area();
  for (int k = threadIdx.x; k < count; k += kBoxThreads) {
    const int at = scratch.candidates[k];
    float score = scratch.scores[at];
    if (score != score) continue;
    if (taken >= 0) {
      const nms::Box other = nms::BoxAt(of.boxes + 4 * (int64_t)at, of.options.center);
      const float iou = nms::Iou(box, area, other, other.Area());
      score = nms::Product(score, nms::Decay(iou, of.sigma, of.options.iou_threshold));
      if (at == taken || !of.options.Takes(score)) score = NAN;
      scratch.scores[at] = score;
      if (score != score) continue;
    }
    best = SmallestMonoid::Combine(best, sorting::KeyOf(score, at, true));
  }
  return best;
}

__global__ void __launch_bounds__(kBoxThreads)
    SoftKernel(const float* all_boxes, const float* scores, nms::Extents of, nms::Options options,
               float sigma, BlockScratch all_scratch, Selected selected) {
  const BlockScratch scratch = {all_scratch.scores + blockIdx.x * of.boxes,
                                all_scratch.candidates + blockIdx.x * of.boxes};
  for (int64_t at = blockIdx.x; at < of.Columns(); at += gridDim.x) {
    const Column column = {scores + at * of.boxes,
                           all_boxes + at / of.classes * of.boxes * 4,
                           of.boxes,
                           of.most,
                           options,
                           sigma};
    const int count = Collect(column, scratch);
    int taken = -1, taken_count = 0;
    while (taken_count < of.most) {
      const uint64_t own = Lower(column, scratch, count, taken);
      const uint64_t best = GroupReduce<SmallestMonoid, kBoxThreads>(own);
      if (best == kNone) break;
      taken = (int)sorting::IndexOf<float>(best);
      if (threadIdx.x == 0) {
        selected.picks[at * of.most + taken_count] = taken;
        selected.scores[at * of.most + taken_count] = scratch.scores[taken];
      }
      taken_count++;
      __syncthreads();
    }
    if (threadIdx.x == 0) selected.counts[at] = taken_count;
  }
}

void SoftNms(const DLArray* boxes, const DLArray* scores, float sigma, float iou_threshold,
             int64_t thresholded, float score_threshold, int64_t center, DLArray* indices,
             DLArray* decayed, DLArray* count, DLStream stream) {
  const char* op = "soft_nms";
  Enter(op, count, boxes, scores, indices, decayed);
  const nms::Extents of(op, boxes, scores, indices, count);
  if (Numel(decayed) != indices->shape[0])
    Fail("%s: expected %lld scores, got %s", op, (long long)indices->shape[0],
         ShapeText(decayed).c_str());
  const nms::Options options{iou_threshold, score_threshold, thresholded != 0, center != 0};
  const DLContext ctx = count->ctx;
  const unsigned blocks = ColumnBlocks(of.Columns(), ctx.device_id);
  const int64_t places = of.Columns() * of.most;
  const Scratch picks(ctx, places * (int64_t)sizeof(int), stream);
  const Scratch found(ctx, places * (int64_t)sizeof(float), stream);
  const Scratch counts(ctx, of.Columns() * (int64_t)sizeof(int), stream);
  const Scratch lowered(ctx, blocks * of.boxes * (int64_t)sizeof(float), stream);
  const Scratch candidates(ctx, blocks * of.boxes * (int64_t)sizeof(int), stream);
  const BlockScratch scratch{lowered.floats(), (int*)candidates.data()};
  const Selected selected{(int*)picks.data(), found.floats(), (int*)counts.data()};
  Launch(op, SoftKernel, blocks, kBoxThreads, 0, stream, In(op, boxes), In(op, scores), of, options,
         sigma, scratch, selected);
  PackSelected(op, of, selected, indices, decayed, count, stream);
}

DLSYS_KERNEL(cuda, soft_nms, SoftNms);

}  // namespace
}  // namespace cuda
}  // namespace dlsys
