// Soft-NMS (Bodla et al., 2017) on the CPU, a class of an image (a column) by one thread: the best
// candidate is taken, the scores of the others are lowered by how far they overlap it, and again,
// which is two passes over the candidates for each that is taken: overlaps by vectors, a coordinate
// at a time, then scores. Candidates have no order: of equal scores the lower index is the better.
// Memory bandwidth of a core's caches limits it, where most boxes are apart.
#include "cpu/boxes/boxes.h"
#include "cpu/runtime/simd.h"

namespace dlsys {
namespace cpu {
namespace {

// The candidates of a column: arrays with room for all of its boxes.
class Candidates {
 public:
  struct Memory {
    ScratchArray<float> floats;
    ScratchArray<int64_t> at;

    explicit Memory(int64_t room) : floats(kArrays * room), at(room) {}
  };

  Candidates(const Memory& memory, int64_t room)
      : room_(room), floats_(memory.floats.data()), at_(memory.at.data()) {}

  void Collect(const float* boxes, const float* scores, const nms::Options& options) {
    count_ = 0;
    ForCandidates(scores, room_, options, [&](int64_t k) {
      const nms::Box box = nms::BoxAt(boxes + 4 * k, options.center);
      const float values[] = {box.low_x, box.low_y, box.high_x, box.high_y, box.Area(), scores[k]};
      for (int i = 0; i < 6; i++) Array(i)[count_] = values[i];
      at_[count_++] = k;
    });
  }

  // Takes candidates in turn.
  void Take(const nms::Options& options, float sigma, int64_t column, const Selected& selected) {
    int64_t best = 0;
    for (int64_t k = 1; k < count_; k++)
      if (Better(k, best)) best = k;
    for (int64_t taken = 0; count_ > 0 && taken < selected.of.most; taken++) {
      selected.Add(column, at_[best], Array(kScore)[best]);
      const nms::Box box{Array(0)[best], Array(1)[best], Array(2)[best], Array(3)[best]};
      const float area = Array(kArea)[best];
      Remove(best);
      const Candidates* const own = this;
      Dispatch(DLSYS_SIMD { own->Overlap(box, area); });
      best = Lower(options, sigma);
    }
  }

 private:
  static constexpr int kArea = 4, kScore = 5, kOverlap = 6, kArrays = 7;

  DLSYS_INLINE float* Array(int i) const { return floats_ + i * room_; }

  DLSYS_INLINE void Overlap(const nms::Box& box, float area) const {
    const float *low_x = Array(0), *low_y = Array(1), *high_x = Array(2), *high_y = Array(3),
                *areas = Array(kArea);
    float* overlap = Array(kOverlap);
    DLSYS_IVDEP
    for (int64_t k = 0; k < count_; k++) {
      const nms::Box other{low_x[k], low_y[k], high_x[k], high_y[k]};
      overlap[k] = nms::Iou(box, area, other, areas[k]);
    }
  }

  // Lowers the scores by the overlaps, and removes what is no candidate any more. Returns the best.
  int64_t Lower(const nms::Options& options, float sigma) {
    float *scores = Array(kScore), *overlap = Array(kOverlap);
    int64_t best = 0, k = 0;
    while (k < count_) {
      if (overlap[k] > 0.f) scores[k] *= nms::Decay(overlap[k], sigma, options.iou_threshold);
      if (!options.Takes(scores[k])) {
        Remove(k);
        continue;
      }
      if (Better(k, best)) best = k;
      k++;
    }
    return best;
  }

  // False of a candidate and itself.
  bool Better(int64_t a, int64_t b) const {
    const float *scores = Array(kScore), x = scores[a], y = scores[b];
    return x > y || (x == y && at_[a] < at_[b]);
  }

  // The last candidate comes in its place.
  void Remove(int64_t k) {
    const int64_t last = --count_;
    for (int i = 0; i < kArrays; i++) Array(i)[k] = Array(i)[last];
    at_[k] = at_[last];
  }

  const int64_t room_;
  float* const floats_;
  int64_t* const at_;
  int64_t count_ = 0;
};

void SoftNms(const DLArray* boxes, const DLArray* scores, float sigma, float iou_threshold,
             int64_t thresholded, float score_threshold, int64_t center, DLArray* indices,
             DLArray* decayed, DLArray* count) {
  const char* op = "soft_nms";
  const float *all = Input(op, boxes), *values = Input(op, scores);
  int64_t *rows = Output<int64_t>(op, indices), *total = Output<int64_t>(op, count);
  const nms::Extents of(op, boxes, scores, indices, count);
  if (Numel(decayed) != indices->shape[0])
    Fail("%s: expected %lld scores, got %s", op, (long long)indices->shape[0],
         ShapeText(decayed).c_str());
  const nms::Options options{iou_threshold, score_threshold, thresholded != 0, center != 0};
  const ScratchArray<int64_t> counts(of.Columns());
  const Selected selected{of, rows, total, Output(op, decayed), counts.data()};
  const auto make = [&] { return Candidates::Memory(of.boxes); };
  const auto task = [&](int64_t begin, int64_t end, const Candidates::Memory& memory) {
    Candidates candidates(memory, of.boxes);
    for (int64_t column = begin; column < end; column++) {
      const float* of_image = all + column / of.classes * of.boxes * 4;
      candidates.Collect(of_image, values + column * of.boxes, options);
      selected.counts[column] = 0;
      candidates.Take(options, sigma, column, selected);
    }
  };
  ParallelForWithScratch(of.Columns(), RowGrain(64 * of.boxes), make, task);
  Serially([&] { selected.Pack(); });
}

DLSYS_KERNEL(cpu, soft_nms, SoftNms);

}  // namespace
}  // namespace cpu
}  // namespace dlsys
