// Non-maximum suppression on a GPU: a block for each class of an image (a column), then pack.cu.
//
// A block sorts the keys of its candidates by a bitonic network, in shared memory where they fit,
// else in scratch. Then it takes kChunk candidates at a time, in order: its threads compare them
// with all boxes that stayed so far and with each other, which gives each a word of the mask, a bit
// for each later one that it would suppress. One thread reads the words of those that stay, in
// order, and the chunk's boxes join those that stayed. So no mask of all pairs is ever held. The
// order of threads changes nothing: keys are distinct. The latency of the sort and of a chunk's
// barriers limits it, divisions where most candidates stay.
#include "cuda/boxes/boxes.cuh"
#include "cuda/reduce/group.cuh"

namespace dlsys {
namespace cuda {
namespace {

constexpr int kSharedKeys = 4096;
constexpr int kChunk = 64;                     // boxes of a word
constexpr int kSlices = kBoxThreads / kChunk;  // of the boxes that stayed, and of a word

struct Column {
  const float *scores, *boxes;
  int64_t n, most;
  nms::Options options;
};

// Of a block, in device memory.
struct BlockScratch {
  uint64_t* keys;  // n, or null where they always fit in shared memory
  nms::Box* stayed;
};

// ---- the sort ----

// The keys of a column's candidates, in any order. Returns how many there are.
__device__ int Collect(const Column& of, uint64_t* shared_keys, uint64_t* more_keys) {
  __shared__ unsigned count;
  __syncthreads();  // the previous column's readers are done
  if (threadIdx.x == 0) count = 0;
  __syncthreads();
  for (int64_t k = threadIdx.x; k < of.n; k += kBoxThreads) {
    const float score = of.scores[k];
    if (!of.options.Takes(score)) continue;
    const unsigned at = atomicAdd(&count, 1u);
    const uint64_t key = sorting::KeyOf(score, k, true);
    if (at < kSharedKeys) shared_keys[at] = key;
    if (more_keys) more_keys[at] = key;
  }
  __syncthreads();
  return (int)count;
}

// Sorts by a bitonic network in which every comparison puts the smaller key first, so that the keys
// that a power of 2 lacks may be taken for larger than all and be left out.
__device__ void Sort(uint64_t* keys, int n) {
  for (int64_t size = 2; size / 2 < n; size *= 2) {
    const int64_t pairs = size / 2 * CeilDiv(n, size);
    for (int64_t stride = size / 2; stride > 0; stride /= 2) {
      for (int64_t pair = threadIdx.x; pair < pairs; pair += kBoxThreads) {
        const int64_t low = 2 * pair - (pair & (stride - 1));
        // The first step of a size meets the two halves head to tail.
        const int64_t high = stride == size / 2 ? low ^ (size - 1) : low + stride;
        if (high >= n || keys[low] < keys[high]) continue;
        const uint64_t key = keys[low];
        keys[low] = keys[high], keys[high] = key;
      }
      __syncthreads();
    }
  }
}

// ---- the choice ----

struct OrMonoid {
  static __device__ unsigned Combine(unsigned a, unsigned b) { return a | b; }
};

struct Chunk {
  nms::Box boxes[kChunk];
  float areas[kChunk];
  int at[kChunk];
  unsigned suppressed[kSlices][kChunk / 32];  // bits: by one of a slice of those that stayed
  unsigned char mask[kChunk][kSlices];
  uint64_t staying;
};

__device__ void Load(const Column& of, const uint64_t* keys, int count, Chunk* chunk) {
  const int k = threadIdx.x;
  if (k >= count) return;
  const int at = (int)sorting::IndexOf<float>(keys[k]);
  const nms::Box box = nms::BoxAt(of.boxes + 4 * (int64_t)at, of.options.center);
  chunk->at[k] = at, chunk->boxes[k] = box, chunk->areas[k] = box.Area();
}

// Compares the chunk's boxes with those that stayed, and with each other.
__device__ void Compare(const Column& of, int count, const nms::Box* stayed, int64_t stayed_count,
                        Chunk* chunk) {
  const int own = threadIdx.x % kChunk, slice = threadIdx.x / kChunk;
  const float limit = of.options.iou_threshold;
  const nms::Box box = chunk->boxes[own];
  const float area = chunk->areas[own];
  bool suppressed = own >= count;
  for (int64_t k = slice; k < stayed_count && !suppressed; k += kSlices)
    suppressed = nms::Iou(stayed[k], stayed[k].Area(), box, area) > limit;
  const unsigned word = GroupReduce<OrMonoid, 32>(suppressed ? 1u << threadIdx.x % 32 : 0u);
  if (threadIdx.x % 32 == 0) chunk->suppressed[slice][own / 32] = word;
  unsigned bits = 0;
  for (int k = 0; k < 8; k++) {
    const int other = slice * 8 + k;
    if (other <= own || other >= count) continue;
    const bool over = nms::Iou(box, area, chunk->boxes[other], chunk->areas[other]) > limit;
    bits |= (unsigned)over << k;
  }
  chunk->mask[own][slice] = (unsigned char)bits;
}

// The chunk's boxes that stay, as bits, at most `most`: each in turn suppresses those of its word.
__device__ uint64_t Staying(const Chunk& chunk, int64_t most) {
  unsigned low = 0, high = 0;
  for (const unsigned (&words)[2] : chunk.suppressed) low |= words[0], high |= words[1];
  uint64_t left = ~((uint64_t)high << 32 | low), staying = 0;
  while (left != 0 && most-- > 0) {
    const int k = __ffsll((long long)left) - 1;
    uint64_t word;
    memcpy(&word, chunk.mask[k], sizeof word);
    staying |= uint64_t{1} << k;
    left &= ~(word | uint64_t{1} << k);
  }
  return staying;
}

__global__ void __launch_bounds__(kBoxThreads)
    SelectKernel(const float* all_boxes, const float* scores, nms::Extents of, nms::Options options,
                 BlockScratch scratch, Selected selected) {
  __shared__ uint64_t shared_keys[kSharedKeys];
  __shared__ Chunk chunk;
  static_assert(kSlices == sizeof(uint64_t), "a slice is a byte of a word");
  uint64_t* const more_keys = scratch.keys ? scratch.keys + blockIdx.x * of.boxes : nullptr;
  nms::Box* const stayed = scratch.stayed + blockIdx.x * of.most;
  for (int64_t at = blockIdx.x; at < of.Columns(); at += gridDim.x) {
    const Column column = {scores + at * of.boxes, all_boxes + at / of.classes * of.boxes * 4,
                           of.boxes, of.most, options};
    const int candidates = Collect(column, shared_keys, more_keys);
    uint64_t* const keys = candidates > kSharedKeys ? more_keys : shared_keys;
    Sort(keys, candidates);
    int64_t staying = 0;
    for (int first = 0; first < candidates && staying < of.most; first += kChunk) {
      const int count = min(kChunk, candidates - first);
      Load(column, keys + first, count, &chunk);
      __syncthreads();
      Compare(column, count, stayed, staying, &chunk);
      __syncthreads();
      if (threadIdx.x == 0) chunk.staying = Staying(chunk, of.most - staying);
      __syncthreads();
      const uint64_t bits = chunk.staying, own = uint64_t{1} << threadIdx.x % kChunk;
      if (threadIdx.x < kChunk && (bits & own) != 0) {
        const int64_t to = staying + __popcll(bits & (own - 1));
        stayed[to] = chunk.boxes[threadIdx.x];
        selected.picks[at * of.most + to] = chunk.at[threadIdx.x];
      }
      staying += __popcll(bits);
      __syncthreads();
    }
    if (threadIdx.x == 0) selected.counts[at] = (int)staying;
  }
}

// ---- launcher ----

void NonMaxSuppression(const DLArray* boxes, const DLArray* scores, float iou_threshold,
                       int64_t thresholded, float score_threshold, int64_t center, DLArray* indices,
                       DLArray* count, DLStream stream) {
  const char* op = "non_max_suppression";
  Enter(op, count, boxes, scores, indices);
  const nms::Extents of(op, boxes, scores, indices, count);
  const nms::Options options{iou_threshold, score_threshold, thresholded != 0, center != 0};
  const DLContext ctx = count->ctx;
  const unsigned blocks = ColumnBlocks(of.Columns(), ctx.device_id);
  const bool fits = of.boxes <= kSharedKeys;
  const Scratch picks(ctx, of.Columns() * of.most * (int64_t)sizeof(int), stream);
  const Scratch counts(ctx, of.Columns() * (int64_t)sizeof(int), stream);
  const Scratch keys(ctx, fits ? 0 : blocks * of.boxes * (int64_t)sizeof(uint64_t), stream);
  const Scratch stayed(ctx, blocks * of.most * (int64_t)sizeof(nms::Box), stream);
  const BlockScratch scratch{fits ? nullptr : (uint64_t*)keys.data(), (nms::Box*)stayed.data()};
  const Selected selected{(int*)picks.data(), nullptr, (int*)counts.data()};
  Launch(op, SelectKernel, blocks, kBoxThreads, 0, stream, In(op, boxes), In(op, scores), of,
         options, scratch, selected);
  PackSelected(op, of, selected, indices, nullptr, count, stream);
}

DLSYS_KERNEL(cuda, non_max_suppression, NonMaxSuppression);

}  // namespace
}  // namespace cuda
}  // namespace dlsys
