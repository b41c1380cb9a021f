// Soft-NMS (Bodla et al., 2017) on the CPU, a class of an image (a column) by one thread: the best
// candidate is taken, the scores of the others are lowered by how far they overlap it, and again,
// which is one pass over the candidates for each that is taken. Divisions limit it.
#include "cpu/boxes/boxes.h"

namespace dlsys {
namespace cpu {
namespace {

struct Candidate {
  boxes::Box box;
  float area, score;
  int64_t at;
};

// Takes candidates in turn. They stay in order, so that of equal scores the first is the best.
void Take(Candidate* from, int64_t count, const boxes::Options& options, float sigma,
          int64_t column, const Selected& selected) {
  int64_t best = 0;
  for (int64_t k = 1; k < count; k++)
    if (from[k].score > from[best].score) best = k;
  for (int64_t taken = 0; count > 0 && taken < selected.of.most; taken++) {
    const Candidate one = from[best];
    selected.Add(column, one.at, one.score);
    int64_t left = 0, next = 0;
    for (int64_t k = 0; k < count; k++) {
      if (k == best) continue;
      Candidate other = from[k];
      const float iou = boxes::Iou(one.box, one.area, other.box, other.area);
      other.score = other.score * boxes::Decay(iou, sigma, options.iou_threshold);
      if (!options.Takes(other.score)) continue;
      if (left == 0 || other.score > from[next].score) next = left;
      from[left++] = other;
    }
    count = left, best = next;
  }
}

void SoftNms(const DLArray* boxes_, const DLArray* scores, float sigma, float iou_threshold,
             int64_t thresholded, float score_threshold, int64_t center, DLArray* indices,
             DLArray* decayed, DLArray* count) {
  const char* op = "soft_nms";
  const float *all = Input(op, boxes_), *values = Input(op, scores);
  int64_t *rows = Output<int64_t>(op, indices), *total = Output<int64_t>(op, count);
  const boxes::Extents of(op, boxes_, scores, indices, count);
  if (Numel(decayed) != indices->shape[0])
    Fail("%s: expected %lld scores, got %s", op, (long long)indices->shape[0],
         ShapeText(decayed).c_str());
  const boxes::Options options{iou_threshold, score_threshold, thresholded != 0, center != 0};
  const ScratchArray<int64_t> counts(of.Columns());
  const Selected selected{of, rows, total, Output(op, decayed), counts.data()};
  const auto make = [&] { return ScratchArray<Candidate>(of.boxes); };
  const auto task = [&](int64_t begin, int64_t end, const ScratchArray<Candidate>& scratch) {
    for (int64_t column = begin; column < end; column++) {
      const float* own = values + column * of.boxes;
      const float* of_image = all + column / of.classes * of.boxes * 4;
      Candidate* const candidates = scratch.data();
      int64_t found = 0;
      for (int64_t k = 0; k < of.boxes; k++) {
        if (!options.Takes(own[k])) continue;
        const boxes::Box box = boxes::BoxAt(of_image + 4 * k, options.center);
        candidates[found++] = {box, box.Area(), own[k], k};
      }
      selected.counts[column] = 0;
      Take(candidates, found, options, sigma, column, selected);
    }
  };
  ParallelForWithScratch(of.Columns(), RowGrain(64 * of.boxes), make, task);
  Serially([&] { selected.Pack(); });
}

DLSYS_KERNEL(cpu, soft_nms, SoftNms);

}  // namespace
}  // namespace cpu
}  // namespace dlsys
