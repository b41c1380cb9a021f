// Non-maximum suppression on the CPU, a class of an image (a column) by one thread: candidates are
// sorted by their scores, and each stays unless it overlaps one that stayed. Those that stayed lie
// side by side, a coordinate at a time, so that a candidate meets a vector of them at once; blocks
// of kBlock are compared before the first overlap ends the search. Divisions limit it.
#include "cpu/boxes/boxes.h"
#include "cpu/runtime/simd.h"

namespace dlsys {
namespace cpu {
namespace {

constexpr int64_t kBlock = 64;

// The boxes that stayed, as five arrays of `room` floats.
struct Stayed {
  float* data;
  int64_t room;

  DLSYS_INLINE void Set(int64_t k, const nms::Box& box, float area) const {
    const float values[] = {box.low_x, box.low_y, box.high_x, box.high_y, area};
    for (int64_t i = 0; i < 5; i++) data[i * room + k] = values[i];
  }
  DLSYS_INLINE bool Overlap(int64_t count, const nms::Box& box, float area, float limit) const {
    const float *low_x = data, *low_y = low_x + room, *high_x = low_y + room,
                *high_y = high_x + room, *areas = high_y + room;
    for (int64_t begin = 0; begin < count; begin += kBlock) {
      const int64_t end = begin + kBlock < count ? begin + kBlock : count;
      int overlaps = 0;
      for (int64_t k = begin; k < end; k++) {
        const nms::Box other{low_x[k], low_y[k], high_x[k], high_y[k]};
        overlaps |= nms::Iou(other, areas[k], box, area) > limit;
      }
      if (overlaps) return true;
    }
    return false;
  }
};

struct Candidates {
  const float* boxes;     // of the image
  const uint64_t* order;  // keys, the best first
  int64_t count;
};

// The boxes of a column that stay, at most `most`: their positions in `picks`. Returns how many.
DLSYS_INLINE int64_t Pick(const Candidates& from, const nms::Options& options, int64_t most,
                          const Stayed& stayed, int64_t* picks) {
  int64_t count = 0;
  for (int64_t k = 0; k < from.count && count < most; k++) {
    const int64_t at = sorting::IndexOf<float>(from.order[k]);
    const nms::Box box = nms::BoxAt(from.boxes + 4 * at, options.center);
    const float area = box.Area();
    if (stayed.Overlap(count, box, area, options.iou_threshold)) continue;
    stayed.Set(count, box, area);
    picks[count++] = at;
  }
  return count;
}

struct ColumnScratch {
  ScratchArray<uint64_t> keys;
  ScratchArray<int64_t> picks;
  ScratchArray<float> stayed;

  explicit ColumnScratch(const nms::Extents& of)
      : keys(of.boxes), picks(of.most), stayed(5 * of.most) {}
};

void NonMaxSuppression(const DLArray* boxes, const DLArray* scores, float iou_threshold,
                       int64_t thresholded, float score_threshold, int64_t center, DLArray* indices,
                       DLArray* count) {
  const char* op = "non_max_suppression";
  const float *all = Input(op, boxes), *values = Input(op, scores);
  int64_t *rows = Output<int64_t>(op, indices), *total = Output<int64_t>(op, count);
  const nms::Extents of(op, boxes, scores, indices, count);
  const nms::Options options{iou_threshold, score_threshold, thresholded != 0, center != 0};
  const ScratchArray<int64_t> counts(of.Columns());
  const Selected selected{of, rows, total, nullptr, counts.data()};
  const auto make = [&] { return ColumnScratch(of); };
  const auto task = [&](int64_t begin, int64_t end, const ColumnScratch& scratch) {
    for (int64_t column = begin; column < end; column++) {
      const float* own = values + column * of.boxes;
      uint64_t* const keys = scratch.keys.data();
      int64_t candidates = 0;
      ForCandidates(own, of.boxes, options,
                    [&](int64_t k) { keys[candidates++] = sorting::KeyOf(own[k], k, true); });
      std::sort(keys, keys + candidates);
      const Candidates from{all + column / of.classes * of.boxes * 4, keys, candidates};
      const Stayed stayed{scratch.stayed.data(), of.most};
      int64_t* const picks = scratch.picks.data();
      int64_t picked = 0, *const result = &picked;
      Dispatch(DLSYS_SIMD { *result = Pick(from, options, of.most, stayed, picks); });
      selected.counts[column] = 0;
      for (int64_t k = 0; k < picked; k++) selected.Add(column, picks[k]);
    }
  };
  ParallelForWithScratch(of.Columns(), RowGrain(16 * of.boxes), make, task);
  Serially([&] { selected.Pack(); });
}

DLSYS_KERNEL(cpu, non_max_suppression, NonMaxSuppression);

}  // namespace
}  // namespace cpu
}  // namespace dlsys
