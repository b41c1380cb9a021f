// Convolution of groups of few channels with channels last. channels_last/groups.cuh has the
// contract.
//
// A warp has 16 channels, which are whole groups: their filters are a matrix of 16 x 16 at each
// kernel offset with zeros off the blocks of the diagonal. That wastes at most three quarters of
// the products, of which tensor cores have plenty: what it moves limits it. Two segments of eight
// positions of a line are the rows of mma; the warp goes down the lines of a strip with its filters
// in registers and the next lines on their way to a ring in shared memory, and adds a line of what
// it reads to all results that meet it. For the filter's gradient positions are the depth, and the
// sums of warps are added in a fixed order.
#include <algorithm>
#include <type_traits>

#include "cuda/conv/channels_last/groups.cuh"
#include "cuda/conv/channels_last/parts.cuh"
#include "cuda/pointwise/quad.cuh"
#include "cuda/runtime/divisor.cuh"
#include "cuda/runtime/launch.cuh"

namespace dlsys {
namespace cuda {
namespace channels_last {
namespace {

constexpr int kOfWarp = 16;  // channels
constexpr int kSegment = 8;  // positions of a line
constexpr int kSize = 3, kKernel = kSize * kSize;
constexpr int kBlock = 128;  // threads
// Blocks at once on a multiprocessor, and those of the gradient of a filter.
template <class T>
constexpr int kBlocks = sizeof(T) == 4 ? 3 : 4;
template <class T, int kStride>
constexpr int kGradientBlocks = sizeof(T) == 4 && kStride > 1 ? 2 : 3;

// Images (n, from) are read, results (n, to) are made in strips of `rows` lines, an item being a
// strip of two segments. Warps of `lines` times all channels go over the items.
struct Task {
  int from_h, from_w, to_h, to_w, pad_h, pad_w, channels, group;
  int segments, rows, items, lines;        // all segments of the images
  int made_h, made_w;                      // of a gradient at stride 2, whose `to` are steps
  Divisor by_runs, by_pairs, by_segments;  // runs of channels, pairs of segments, those of a line
};

struct Lane {
  int row, quad;  // of mma's fragments
  int line, c;    // the warp's first item and channel
  __device__ explicit Lane(const Task& p)
      : row((int)threadIdx.x % 32 / 4), quad((int)threadIdx.x % 4) {
    const int warp = (int)(blockIdx.x * (kBlock / 32) + threadIdx.x / 32);
    line = warp / p.by_runs;
    c = (warp - line * (int)p.by_runs.value) * kOfWarp;
  }
};

// Of an item: the strip's first line, and for both segments the image, or -1, and first position.
struct Place {
  int top, image[2], col[2];
};
__device__ __forceinline__ Place PlaceOf(const Task& p, int item) {
  const int strip = item / p.by_pairs, pair = item - strip * (int)p.by_pairs.value;
  Place at;
  at.top = strip * p.rows;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int segment = pair * 2 + half, image = segment / p.by_segments;
    at.image[half] = segment < p.segments ? image : -1;
    at.col[half] = (segment - image * (int)p.by_segments.value) * kSegment;
  }
  return at;
}

// ---- lines in shared memory ----

// Steps of a warp's ring, of kLines lines each.
template <int kLines>
constexpr int kStages = 4 / kLines;

// Pixels that kWidth elements meet of a segment.
template <int kWidth, int kStride>
constexpr int kPixelsOf = (kSegment - 1) * kStride + kWidth;

// Copies what both segments meet of one line of images after the other, as (2, kPixels, kPitch):
// the pixels from `left` on of the first position's; zeros outside.
template <class T, int kPixels, int kPitch>
class LineCopies {
 public:
  // Lines from `line` on, and below `end`.
  __device__ LineCopies(const Lane& lane, const Place& at, const T* x, int height, int width,
                        int channels, int line, int end, int stride, int left)
      : x_(x), pitch_(width * channels), line_(line), end_(min(height, end)) {
#pragma unroll
    for (int turn = 0; turn < kTurns; turn++) {
      const int k = turn * 32 + (int)threadIdx.x % 32, pixel = k / kChunks;
      const int half = pixel >= kPixels, image = half ? at.image[1] : at.image[0];
      const int col = (half ? at.col[1] : at.col[0]) * stride + left + pixel - half * kPixels;
      from_[turn] = x + (((int64_t)max(image, 0) * height + line) * width + col) * channels +
                    lane.c + k % kChunks * kChunk;
      const bool there = k < kCount && image >= 0 && (unsigned)col < (unsigned)width;
      inside_ |= (unsigned)there << turn;
    }
  }
  __device__ __forceinline__ void Next(T* to) {
    const unsigned inside = line_ >= 0 && line_ < end_ ? inside_ : 0;
#pragma unroll
    for (int turn = 0; turn < kTurns; turn++) {
      const int k = turn * 32 + (int)threadIdx.x % 32;
      const bool there = inside >> turn & 1;
      if (k < kCount)
        CopyAsync16((float*)(to + k / kChunks * kPitch + k % kChunks * kChunk),
                    (const float*)(there ? from_[turn] : x_), there);
      from_[turn] += pitch_;
    }
    line_++;
  }

 private:
  static constexpr int kChunk = 16 / (int)sizeof(T), kChunks = kOfWarp / kChunk;
  static constexpr int kCount = 2 * kPixels * kChunks, kTurns = (kCount + 31) / 32;

  const T *x_, *from_[kTurns];
  int pitch_, line_, end_;
  unsigned inside_ = 0;
};

// Calls use(step, slot) for steps from `first` on and below `end`, each of which finds in slot what
// load(slot) copied kSlots - 1 steps before.
template <int kSlots, class Load, class Use>
__device__ __forceinline__ void ForSteps(int first, int end, const Load& load, const Use& use) {
#pragma unroll 1
  for (int k = 0; k < kSlots - 1; k++) {
    load(k);
    CloseCopies();
  }
  int slot = 0;
#pragma unroll 1
  for (int step = first; step < end; step++) {
    WaitForCopies<kSlots - 2>();
    __syncwarp();
    load(slot == 0 ? kSlots - 1 : slot - 1);
    CloseCopies();
    use(step, slot);
    slot = slot + 1 == kSlots ? 0 : slot + 1;
  }
  WaitForCopies<0>();
  __syncwarp();
}

// ---- products ----

// sums[j] += a b[j], all channels of the warp, of which each lane has four side by side: of a at
// two positions, of b for columns of the matrix, of sums as of a.
template <class T>
struct Quads {
  int2 words;  // four of 16 bits
};
template <>
struct Quads<float> {
  float4 words;
};
__device__ __forceinline__ void Round(Quads<float>& q) {
  q.words = make_float4(RoundedToTf32(q.words.x), RoundedToTf32(q.words.y),
                        RoundedToTf32(q.words.z), RoundedToTf32(q.words.w));
}
template <class T>
__device__ __forceinline__ void Round(Quads<T>&) {}

__device__ __forceinline__ void MultiplyAdd(const Quads<float> (&a)[2], const Quads<float> (&b)[2],
                                            float (&sums)[2][4]) {
  const float low[4] = {a[0].words.x, a[1].words.x, a[0].words.y, a[1].words.y};
  const float high[4] = {a[0].words.z, a[1].words.z, a[0].words.w, a[1].words.w};
#pragma unroll
  for (int j = 0; j < 2; j++) {
    const float of_low[2] = {b[j].words.x, b[j].words.y}, of_high[2] = {b[j].words.z, b[j].words.w};
    MultiplyAddTf32(low, of_low, sums[j]);
    MultiplyAddTf32(high, of_high, sums[j]);
  }
}
template <class T>
__device__ __forceinline__ void MultiplyAdd(const Quads<T> (&a)[2], const Quads<T> (&b)[2],
                                            float (&sums)[2][4]) {
  const uint32_t both[4] = {(uint32_t)a[0].words.x, (uint32_t)a[1].words.x, (uint32_t)a[0].words.y,
                            (uint32_t)a[1].words.y};
#pragma unroll
  for (int j = 0; j < 2; j++) {
    const uint32_t of_b[2] = {(uint32_t)b[j].words.x, (uint32_t)b[j].words.y};
    MultiplyAdd16Bit<T>(both, of_b, sums[j]);
  }
}

// ---- forward and data gradient ----

// Of a lane: its four channels at kWidth pixels of a line and at both of its positions.
template <class T, int kWidth, int kStride>
__device__ __forceinline__ void ReadLine(const Lane& lane, const T* line,
                                         Quads<T> (&quads)[kWidth][2]) {
  constexpr int kPixels = kPixelsOf<kWidth, kStride>;
#pragma unroll
  for (int b = 0; b < kWidth; b++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int pixel = half * kPixels + lane.row * kStride + b;
      quads[b][half] = *(const Quads<T>*)(line + pixel * kOfWarp + lane.quad * 4);
      Round(quads[b][half]);
    }
}

// Of a lane's filter in each half of the columns, four channels; where `turned`, of its channel
// four filters, at the opposite kernel offset.
template <class T>
__device__ __forceinline__ void ReadFilters(const Task& p, const Lane& lane, const T* f,
                                            bool turned, Quads<T> (&filters)[kKernel][2]) {
#pragma unroll
  for (int j = 0; j < 2; j++) {
    const int made = lane.row / 2 * 4 + j * 2 + lane.row % 2;
    T values[kKernel][4];
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const int met = lane.quad * 4 + e, o = turned ? met : made, c = turned ? made : met;
      const bool same = o / p.group == c / p.group;
      const T* const from = f + ((int64_t)(lane.c + o) * p.group + c % p.group) * kKernel;
#pragma unroll
      for (int k = 0; k < kKernel; k++)
        values[k][e] = same ? from[turned ? kKernel - 1 - k : k] : T(0.f);
    }
#pragma unroll
    for (int k = 0; k < kKernel; k++) {
      memcpy(&filters[k][j], values[k], sizeof values[k]);
      Round(filters[k][j]);
    }
  }
}

template <class T, int kStride>
__global__ void __launch_bounds__(kBlock, kBlocks<T>)
    CorrelateGroupsKernel(const __grid_constant__ Task p, const T* x, const T* f, bool turned,
                          const T* bias, T* y) {
  constexpr int kLive = (kSize + kStride - 1) / kStride;  // lines of results that one of x meets
  const Lane lane(p);
  if (lane.line >= p.lines) return;
  Quads<T> filters[kKernel][2];
  ReadFilters(p, lane, f, turned, filters);
  const float4 none = bias ? LoadQuad(bias + lane.c + lane.quad * 4) : float4{};
  constexpr int kPixels = kPixelsOf<kSize, kStride>, kLine = 2 * kPixels * kOfWarp;
  T* const ring = DynamicShared<T>() + (int)threadIdx.x / 32 * (kStages<kStride> * kStride * kLine);
#pragma unroll 1
  for (int item = lane.line; item < p.items; item += p.lines) {
    const Place at = PlaceOf(p, item);
    const int count = min(p.rows, p.to_h - at.top), top = at.top * kStride - p.pad_h;
    LineCopies<T, kPixels, kOfWarp> copies(lane, at, x, p.from_h, p.from_w, p.channels, top,
                                           top + (count - 1) * kStride + kSize, kStride, -p.pad_w);
    float sums[kLive][2][4] = {};
    const auto load = [&](int slot) {
#pragma unroll
      for (int i = 0; i < kStride; i++) copies.Next(ring + (slot * kStride + i) * kLine);
    };
    ForSteps<kStages<kStride>>(1 - kLive, count, load, [&](int step, int slot) {
#pragma unroll
      for (int i = 0; i < kStride; i++) {
        Quads<T> line[kSize][2];
        ReadLine<T, kSize, kStride>(lane, ring + (slot * kStride + i) * kLine, line);
#pragma unroll
        for (int m = 0; m < kLive; m++) {
          const int a = m * kStride + i;
          if (a >= kSize) continue;
#pragma unroll
          for (int b = 0; b < kSize; b++) MultiplyAdd(line[b], filters[a * kSize + b], sums[m]);
        }
      }
      const float (&done)[2][4] = sums[kLive - 1];
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int col = at.col[half] + lane.row;
        if (step < 0 || at.image[half] < 0 || col >= p.to_w) continue;
        const int64_t row = (int64_t)at.image[half] * p.to_h + at.top + step;
        StoreQuad(y + (row * p.to_w + col) * p.channels + lane.c + lane.quad * 4,
                  make_float4(done[0][half * 2] + none.x, done[0][half * 2 + 1] + none.y,
                              done[1][half * 2] + none.z, done[1][half * 2 + 1] + none.w));
      }
#pragma unroll
      for (int m = kLive - 1; m >= 0; m--)
#pragma unroll
        for (int e = 0; e < 8; e++) sums[m][e / 4][e % 4] = m > 0 ? sums[m - 1][e / 4][e % 4] : 0.f;
    });
  }
}

// dx at stride 2. Positions are those of dy: each has two lines and columns of dx, of which the
// first meet the filter's first line and column, and a step reads a line of dy and completes two.
template <class T>
__global__ void __launch_bounds__(kBlock, kBlocks<T>)
    StridedGradientKernel(const __grid_constant__ Task p, const T* f, const T* dy, T* dx) {
  constexpr int kStride = 2, kMet = 2;  // columns of dy that an element meets
  const Lane lane(p);
  if (lane.line >= p.lines) return;
  Quads<T> filters[kKernel][2];
  ReadFilters(p, lane, f, true, filters);
  constexpr int kPixels = kPixelsOf<kMet, 1>, kLine = 2 * kPixels * kOfWarp;
  T* const ring = DynamicShared<T>() + (int)threadIdx.x / 32 * (kStages<1> * kLine);
#pragma unroll 1
  for (int item = lane.line; item < p.items; item += p.lines) {
    const Place at = PlaceOf(p, item);
    const int count = min(p.rows, p.to_h - at.top), top = at.top + p.pad_h / kStride;
    const int left = p.pad_w / kStride;
    float sums[kStride][2][4] = {};  // of the line that the next step completes
    LineCopies<T, kPixels, kOfWarp> copies(lane, at, dy, p.from_h, p.from_w, p.channels,
                                           top + 1 - kMet, top + count, 1, left + 1 - kMet);
    const auto load = [&](int slot) { copies.Next(ring + slot * kLine); };
    ForSteps<kStages<1>>(1 - kMet, count, load, [&](int step, int slot) {
      Quads<T> line[kMet][2];
      ReadLine<T, kMet, 1>(lane, ring + slot * kLine, line);
#pragma unroll
      for (int a = 0; a < kSize; a++) {
        float made[kStride][2][4] = {};
        if (a == 0) memcpy(made, sums, sizeof made);
#pragma unroll
        for (int b = 0; b < kSize; b++)
          MultiplyAdd(line[kMet - 1 - b / kStride], filters[kKernel - 1 - a * kSize - b],
                      made[b % kStride]);
        if (a == kStride) memcpy(sums, made, sizeof made);
        const int h = (top + step) * kStride + a - p.pad_h;
        if (a == kStride || step < 0 || (unsigned)h >= (unsigned)p.made_h) continue;
#pragma unroll
        for (int e = 0; e < kStride; e++)
#pragma unroll
          for (int half = 0; half < 2; half++) {
            const int w = (at.col[half] + lane.row + left) * kStride + e - p.pad_w;
            if (at.image[half] < 0 || (unsigned)w >= (unsigned)p.made_w) continue;
            const int64_t pixel = ((int64_t)at.image[half] * p.made_h + h) * p.made_w + w;
            StoreQuad(dx + pixel * p.channels + lane.c + lane.quad * 4,
                      make_float4(made[e][0][half * 2], made[e][0][half * 2 + 1],
                                  made[e][1][half * 2], made[e][1][half * 2 + 1]));
          }
      }
    });
  }
}

// ---- filter gradient ----

// Elements of a pixel in shared memory, of float32 so many that no two lanes meet in a bank.
template <class T>
constexpr int kPitch = sizeof(T) == 4 ? 24 : kOfWarp;

// Of a lane: the channels lane.row and eight further (j) at two positions of both segments, read
// from a line: of 16 bits neighbors in a word, of float32 such as are four apart.
template <class T>
struct Columns {
  uint32_t words[2][2];  // (segment, j)

  template <int kPixels>
  __device__ __forceinline__ void Read(const Lane& lane, const T* line, int stride, int b) {
    const int l = (int)threadIdx.x % 32;
    const int pixel = l / 16 * kPixels + l % 8 * stride + b;
    uint32_t made[4];
    LoadMatrices<true>(line + pixel * kPitch<T> + l / 8 % 2 * 8, made);
    memcpy(words, made, sizeof made);
  }
};
template <>
struct Columns<float> {
  float of[2][2][2];  // (segment, j, position)

  template <int kPixels>
  __device__ __forceinline__ void Read(const Lane& lane, const float* line, int stride, int b) {
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int pixel = half * kPixels + (lane.quad + 4 * e) * stride + b;
#pragma unroll
        for (int j = 0; j < 2; j++)
          of[half][j][e] = RoundedToTf32(line[pixel * kPitch<float> + lane.row + j * 8]);
      }
  }
};

// sums[j] += the products of filters' columns a and channels' b over all positions.
__device__ __forceinline__ void MultiplyAdd(const Columns<float>& a, const Columns<float>& b,
                                            float (&sums)[2][4]) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const float of_a[4] = {a.of[half][0][0], a.of[half][1][0], a.of[half][0][1], a.of[half][1][1]};
#pragma unroll
    for (int j = 0; j < 2; j++) MultiplyAddTf32(of_a, b.of[half][j], sums[j]);
  }
}
template <class T>
__device__ __forceinline__ void MultiplyAdd(const Columns<T>& a, const Columns<T>& b,
                                            float (&sums)[2][4]) {
  const uint32_t of_a[4] = {a.words[0][0], a.words[0][1], a.words[1][0], a.words[1][1]};
#pragma unroll
  for (int j = 0; j < 2; j++) {
    const uint32_t of_b[2] = {b.words[0][j], b.words[1][j]};
    MultiplyAdd16Bit<T>(of_a, of_b, sums[j]);
  }
}

// Elements of a step in the ring: lines of x, and one of dy.
template <class T, int kStride>
constexpr int kGradientStep = 2 * (kStride * kPixelsOf<kSize, kStride> + kSegment) * kPitch<T>;

// parts (lines, kernel, channels, group).
template <class T, int kStride>
__global__ void __launch_bounds__(kBlock, kGradientBlocks<T, kStride>)
    GroupsFilterKernel(const __grid_constant__ Task p, const T* x, const T* dy, float* parts) {
  constexpr int kLive = (kSize + kStride - 1) / kStride;
  constexpr int kPixels = kPixelsOf<kSize, kStride>, kStep = kGradientStep<T, kStride>;
  constexpr int kLine = 2 * kPixels * kPitch<T>;
  const Lane lane(p);
  if (lane.line >= p.lines) return;
  T* const ring = DynamicShared<T>() + (int)threadIdx.x / 32 * (kStages<kStride> * kStep);
  float sums[kKernel][2][4] = {};
#pragma unroll 1
  for (int item = lane.line; item < p.items; item += p.lines) {
    const Place at = PlaceOf(p, item);
    const int count = min(p.rows, p.to_h - at.top), top = at.top * kStride - p.pad_h;
    LineCopies<T, kPixels, kPitch<T>> copies(lane, at, x, p.from_h, p.from_w, p.channels, top,
                                             top + (count - 1) * kStride + kSize, kStride,
                                             -p.pad_w);
    LineCopies<T, kSegment, kPitch<T>> gradients(lane, at, dy, p.to_h, p.to_w, p.channels, at.top,
                                                 at.top + count, 1, 0);
    const auto load = [&](int slot) {
      T* const to = ring + slot * kStep;
#pragma unroll
      for (int i = 0; i < kStride; i++) copies.Next(to + i * kLine);
      gradients.Next(to + kStride * kLine);
    };
    Columns<T> met[kLive] = {};
    ForSteps<kStages<kStride>>(0, count + kLive - 1, load, [&](int, int slot) {
      const T* const from = ring + slot * kStep;
#pragma unroll
      for (int m = kLive - 1; m > 0; m--) met[m] = met[m - 1];
      met[0].template Read<kSegment>(lane, from + kStride * kLine, 1, 0);
#pragma unroll
      for (int i = 0; i < kStride; i++) {
#pragma unroll
        for (int b = 0; b < kSize; b++) {
          Columns<T> column;
          column.template Read<kPixels>(lane, from + i * kLine, kStride, b);
#pragma unroll
          for (int m = 0; m < kLive; m++)
            if (m * kStride + i < kSize)
              MultiplyAdd(met[m], column, sums[(m * kStride + i) * kSize + b]);
        }
      }
    });
  }
#pragma unroll
  for (int j = 0; j < 2; j++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int o = lane.row + half * 8, c = j * 8 + lane.quad * 2;
      if (o / p.group != c / p.group) continue;
      const int64_t part = (int64_t)lane.line * kKernel * p.channels + lane.c + o;
#pragma unroll
      for (int k = 0; k < kKernel; k++)
        *(float2*)(parts + (part + (int64_t)k * p.channels) * p.group + c % p.group) =
            make_float2(sums[k][j][half * 2], sums[k][j][half * 2 + 1]);
    }
}

// ---- launchers ----

// `blocks` are at once on a multiprocessor. Strips are so long that few warps are idle, and
// read two lines more than they have.
Task TaskOf(const Call& at, const Conv& c, HW from, HW to, HW pad, int blocks) {
  Task p{};
  p.from_h = (int)from.h, p.from_w = (int)from.w, p.to_h = (int)to.h, p.to_w = (int)to.w;
  p.pad_h = (int)pad.h, p.pad_w = (int)pad.w, p.channels = (int)c.c;
  p.group = (int)c.GroupChannels();
  const int64_t runs = c.c / kOfWarp, of_line = CeilDiv(to.w, kSegment), segments = c.n * of_line;
  const int64_t pairs = CeilDiv(segments, 2);
  const int64_t at_once = std::max<int64_t>(
      1, (int64_t)blocks * (kBlock / 32) * Multiprocessors(at.ctx.device_id) / runs);
  int64_t least = INT64_MAX;
  for (int64_t strips = 1; strips <= CeilDiv(to.h, 4); strips++) {
    const int64_t rows = CeilDiv(to.h, strips), items = pairs * CeilDiv(to.h, rows);
    const int64_t cost = CeilDiv(items, at_once) * (rows + 3);
    if (cost < least) least = cost, p.rows = (int)rows, p.items = (int)items;
  }
  p.segments = (int)segments, p.lines = (int)std::min<int64_t>(at_once, p.items);
  p.by_runs = Divisor(runs), p.by_pairs = Divisor(pairs), p.by_segments = Divisor(of_line);
  return p;
}
unsigned BlocksOf(const Task& p) {
  return (unsigned)CeilDiv((int64_t)p.lines * p.by_runs.value, kBlock / 32);
}

// Each warp has a ring of `nbytes`.
template <class Kernel, class... Args>
void LaunchWithRings(const Call& at, const Kernel& kernel, const Task& p, size_t nbytes,
                     Args... args) {
  const size_t shared = kBlock / 32 * nbytes;
  AllowShared(at.op, (const void*)kernel, shared);
  Launch(at.op, kernel, BlocksOf(p), kBlock, shared, at.stream, args...);
}

template <class T>
void Correlate(const Call& at, const Task& p, int64_t stride, const T* x, const T* f, bool turned,
               const T* bias, T* y) {
  const auto kernel = stride == 1 ? CorrelateGroupsKernel<T, 1> : CorrelateGroupsKernel<T, 2>;
  const int pixels =
      stride == 1 ? kStages<1> * kPixelsOf<kSize, 1> : kStages<2> * 2 * kPixelsOf<kSize, 2>;
  LaunchWithRings(at, kernel, p, (size_t)(2 * pixels * kOfWarp) * sizeof(T), p, x, f, turned, bias,
                  y);
}

}  // namespace

template <class T>
const char* GroupsRefusal(const Call& at, const Conv& c, const T* x, const T* f, const T* y) {
  constexpr int64_t kMost = int64_t(1) << 30;
  const HW three{3, 3}, one{1, 1}, two{2, 2};
  const int64_t group = c.GroupChannels();
  if (ComputeMajor(at.ctx.device_id) < 8) return "it is from sm_80 on";
  if (c.groups < 2 || c.c % kOfWarp || group != c.GroupFilters() ||
      (group != 4 && group != 8 && group != 16))
    return "it is for groups of 4, 8 or 16 channels and filters, 16 channels or more in all";
  if (!(c.kernel == three) || !(c.dilation == one)) return "it is for 3 x 3 filters, not dilated";
  if (!(c.stride == one) && !(c.stride == two)) return "it is for strides of 1 and 2";
  if (!Aligned16(x) || !Aligned16(f) || !Aligned16(y)) return "it takes arrays at 16 bytes";
  const bool small = c.n * Size(c.in) < kMost && c.n * Size(c.out) < kMost &&
                     std::max(c.in.w, c.out.w) * c.c < kMost;
  return small ? nullptr : "an array has more elements than its int counts";
}

template <class T>
void ForwardOfGroups(const Call& at, const Conv& c, const T* x, const T* f, const T* bias, T* y) {
  Correlate(at, TaskOf(at, c, c.in, c.out, c.pad, kBlocks<T>), c.stride.h, x, f, false, bias, y);
}
template <class T>
void DataGradientOfGroups(const Call& at, const Conv& c, const T* f, const T* dy, T* dx) {
  if (c.stride.h == 1) {
    const HW pad{kSize - 1 - c.pad.h, kSize - 1 - c.pad.w};
    return Correlate<T>(at, TaskOf(at, c, c.out, c.in, pad, kBlocks<T>), 1, dy, f, true, nullptr,
                        dx);
  }
  const auto steps = [](int64_t in, int64_t pad) { return (in - 1 + pad) / 2 - pad / 2 + 1; };
  const HW of{steps(c.in.h, c.pad.h), steps(c.in.w, c.pad.w)};
  Task p = TaskOf(at, c, c.out, of, c.pad, kBlocks<T>);
  p.made_h = (int)c.in.h, p.made_w = (int)c.in.w;
  LaunchWithRings(at, StridedGradientKernel<T>, p,
                  (size_t)(kStages<1> * 2 * kPixelsOf<2, 1> * kOfWarp) * sizeof(T), p, f, dy, dx);
}
template <class T>
void FilterGradientOfGroups(const Call& at, const Conv& c, const T* x, const T* dy, T* df) {
  const int at_once = c.stride.h == 1 ? kGradientBlocks<T, 1> : kGradientBlocks<T, 2>;
  const Task p = TaskOf(at, c, c.in, c.out, c.pad, at_once);
  const int64_t filters = c.o * c.GroupChannels();
  const Scratch parts(at.ctx, p.lines * kKernel * filters * (int64_t)sizeof(float), at.stream);
  const auto kernel = c.stride.h == 1 ? GroupsFilterKernel<T, 1> : GroupsFilterKernel<T, 2>;
  const int step =
      c.stride.h == 1 ? kStages<1> * kGradientStep<T, 1> : kStages<2> * kGradientStep<T, 2>;
  LaunchWithRings(at, kernel, p, (size_t)step * sizeof(T), p, x, dy, parts.floats());
  AddInOrder(at, parts.floats(), p.lines, kKernel, filters, df);
}

#define DLSYS_GROUPS(T)                                                                       \
  template const char* GroupsRefusal(const Call&, const Conv&, const T*, const T*, const T*); \
  template void ForwardOfGroups(const Call&, const Conv&, const T*, const T*, const T*, T*);  \
  template void DataGradientOfGroups(const Call&, const Conv&, const T*, const T*, T*);       \
  template void FilterGradientOfGroups(const Call&, const Conv&, const T*, const T*, T*)
DLSYS_GROUPS(float);
DLSYS_GROUPS(bfloat16);
DLSYS_GROUPS(float16);
#undef DLSYS_GROUPS

}  // namespace channels_last
}  // namespace cuda
}  // namespace dlsys
