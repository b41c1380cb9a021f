// The gradients of small convolutions for the filter and the bias; the contract is in conv_small.h.
//
// A block holds rows of an image in shared memory: x with its padding, and dy spread out to the
// places of the convolution, outputs fastest. A thread has one row of taps of one channel for some
// outputs and slides it over every row that its slice of the block has; a row of ones in place of x
// gives the bias its gradient. Sums stay in registers over all the images of a block, are then
// added over its slices, and over blocks by a second kernel: always in the same order.
#include <algorithm>

#include "cuda/conv/conv_pool.cuh"

namespace dlsys {
namespace cuda {
namespace {

struct Task {
  int images, channels, outputs;
  int h, w, top, left, kh, kw;
  int out_h, out_w;       // of pooled planes
  int bands, band;        // of pooled rows in an image, and how many each has
  int groups, parts;      // of outputs in a block; of all groups among blocks
  int rows_of_taps;       // a group's, and the row of ones
  int slices;             // of rows
  int workers;            // blocks of a part
  int pitch;              // of places in dy
  int x_numel, dy_numel;  // of shared memory
  Frame frame;

  __device__ int Threads() const { return groups * rows_of_taps; }
  // Sums that a worker leaves: of the filter, then of the bias.
  __host__ __device__ int Sums() const { return outputs * (channels * kh * kw + 1); }
};

// ---- kernels ----

// dy (outputs, out) of `rows` pooled rows to (rows * window, out_w * window, pitch), each element
// where its code says and zeros elsewhere; no outputs from `outputs` up to the pitch.
template <int kWindow>
__device__ __forceinline__ void Spread(const Task& t, const float* dy, const uint8_t* code,
                                       int outputs, int rows, float* to) {
  const int windows = rows * t.out_w, wide = t.out_w * kWindow;
  const int quads = (t.pitch + 3) / 4;
#pragma unroll 2
  for (int k = (int)threadIdx.x; k < quads * windows * 4; k += (int)blockDim.x) {
    const int quad = k / 4 / windows, window = k / 4 - quad * windows, output = quad * 4 + k % 4;
    if (output >= t.pitch) continue;
    const int i = window / t.out_w, j = window - i * t.out_w;
    int place = kCut;
    float value = 0.f;
    if (output < outputs) {
      const int64_t at = (int64_t)output * t.out_h * t.out_w + window;
      place = code[at];
      value = dy[at];
    }
    float* corner = to + (i * wide + j) * kWindow * t.pitch + output;
#pragma unroll
    for (int a = 0; a < kWindow; a++)
#pragma unroll
      for (int b = 0; b < kWindow; b++)
        corner[(a * wide + b) * t.pitch] = place == a * kWindow + b ? value : 0.f;
  }
}

// sum[o][b] += over a row of places: dy of kOutputs outputs times x, b elements on.
template <int kTaps, int kWindow, int kOutputs>
__device__ __forceinline__ void Slide(const float* x, const float* dy, int pitch, int windows,
                                      float (&sum)[kOutputs][kTaps]) {
  float seen[kTaps + kWindow - 1];
#pragma unroll
  for (int b = 0; b < kTaps - 1; b++) seen[b + kWindow] = x[b];
  x += kTaps - 1;
#pragma unroll 2
  for (int j = 0; j < windows; j++, x += kWindow) {
#pragma unroll
    for (int b = 0; b < kTaps - 1; b++) seen[b] = seen[b + kWindow];
#pragma unroll
    for (int k = 0; k < kWindow; k++) seen[kTaps - 1 + k] = x[k];
#pragma unroll
    for (int k = 0; k < kWindow; k++, dy += pitch) {
      float gradients[kOutputs];
      Vectors<kOutputs>::Read(dy, gradients);
#pragma unroll
      for (int o = 0; o < kOutputs; o++)
#pragma unroll
        for (int b = 0; b < kTaps; b++) sum[o][b] = fmaf(gradients[o], seen[b + k], sum[o][b]);
    }
  }
}

// Adds the slices of a block and leaves the sums in `partial`.
template <int kTaps, int kOutputs>
__device__ void JoinSlices(const Task& t, const float (&sum)[kOutputs][kTaps], int first,
                           float* shared, float* partial) {
  const int threads = t.Threads(), all = t.slices * threads, taps = t.channels * t.kh * t.kw;
  if ((int)threadIdx.x < all) {
#pragma unroll
    for (int k = 0; k < kOutputs * kTaps; k++)
      shared[k * all + (int)threadIdx.x] = sum[k / kTaps][k % kTaps];
  }
  __syncthreads();
  for (int k = (int)threadIdx.x; k < kOutputs * kTaps * threads; k += (int)blockDim.x) {
    const int of = k / threads, thread = k - of * threads, b = of % kTaps;
    const int output = first + thread / t.rows_of_taps * kOutputs + of / kTaps;
    const int row = thread % t.rows_of_taps;
    const bool of_bias = row == t.rows_of_taps - 1;
    if (output >= t.outputs || b >= (of_bias ? 1 : t.kw)) continue;
    float total = 0.f;
    for (int s = 0; s < t.slices; s++) total += shared[of * all + s * threads + thread];
    partial[of_bias ? t.outputs * taps + output : output * taps + row * t.kw + b] = total;
  }
}

template <int kTaps, int kWindow, int kOutputs>
__global__ void __launch_bounds__(kThreads)
    FilterGradientKernel(const Task t, const float* x, const float* dy, const uint8_t* code,
                         float* partial) {
  float* const shared = DynamicShared<float>();
  float *spread = shared, *planes = spread + t.dy_numel, *ones = planes + t.x_numel;
  const int worker = (int)blockIdx.x / t.parts;
  const int first = (int)blockIdx.x % t.parts * t.groups * kOutputs;
  const int slice = (int)threadIdx.x / t.Threads(), thread = (int)threadIdx.x % t.Threads();
  const int group = thread / t.rows_of_taps, row = thread % t.rows_of_taps;
  const bool of_bias = row == t.rows_of_taps - 1;
  const float* from =
      of_bias ? ones : planes + row / t.kh * t.frame.plane + row % t.kh * t.frame.pitch;
  const int down = of_bias ? 0 : t.frame.pitch, wide = t.out_w * kWindow * t.pitch;
  for (int k = (int)threadIdx.x; k < t.frame.width + kSlack; k += (int)blockDim.x) ones[k] = 1.f;
  float sum[kOutputs][kTaps] = {};
  for (int64_t unit = worker; unit < (int64_t)t.images * t.bands; unit += t.workers) {
    const int64_t image = unit / t.bands;
    const int begin = (int)(unit % t.bands) * t.band, rows = min(t.band, t.out_h - begin);
    const int64_t at = ((image * t.outputs + first) * t.out_h + begin) * t.out_w;
    __syncthreads();  // the previous unit's readers are done
    LoadPlanes(x + image * t.channels * t.h * t.w, t.channels, t.h, t.w, t.top - begin * kWindow,
               t.left, t.frame, planes);
    Spread<kWindow>(t, dy + at, code + at, min(t.groups * kOutputs, t.outputs - first), rows,
                    spread);
    __syncthreads();
    if (slice < t.slices)
      for (int r = slice; r < rows * kWindow; r += t.slices)
        Slide<kTaps, kWindow>(from + r * down, spread + r * wide + group * kOutputs, t.pitch,
                              t.out_w, sum);
  }
  __syncthreads();
  JoinSlices(t, sum, first, shared, partial + (int64_t)worker * t.Sums());
}

constexpr int kSumCols = 32, kSumRows = 16;

// df and db, where it is wanted: the sums of the columns of partial (workers, numel + biases).
__global__ void JoinWorkersKernel(const float* partial, int workers, int numel, int biases,
                                  float* df, float* db) {
  __shared__ float of_row[kSumRows][kSumCols];
  const int lane = (int)threadIdx.x % kSumCols, row = (int)threadIdx.x / kSumCols;
  const int col = (int)blockIdx.x * kSumCols + lane, cols = numel + biases;
  float total = 0.f;
  if (col < cols) {
#pragma unroll 8
    for (int k = row; k < workers; k += kSumRows) total += partial[(int64_t)k * cols + col];
  }
  of_row[row][lane] = total;
  __syncthreads();
  if (row || col >= cols) return;
#pragma unroll
  for (int k = 1; k < kSumRows; k++) total += of_row[k][lane];
  if (col < numel)
    df[col] = total;
  else if (db)
    db[col - numel] = total;
}

// ---- launchers ----

constexpr int kMostResident = 4;  // blocks a multiprocessor, each with sums to be added

int WidthOf(int64_t taps) { return 3 + 2 * TapsFor(taps); }

// Rows of x at distances that bring the rows of taps of all channels to different banks, or as
// close as they fit where that takes too much.
void Lay(Task* t, int window, bool close) {
  const int rows = t->band * window + t->kh - 1, width = t->out_w * window + t->kw - 1;
  const int pitch = width | 1;
  int plane = rows * pitch;
  while (!close && plane % 32 != t->kh * pitch % 32) plane++;
  t->frame = {rows, width, pitch, plane};
  t->x_numel = RoundUp((int64_t)t->channels * plane + kSlack, 4);
  t->dy_numel = RoundUp((int64_t)t->band * window * t->out_w * window * t->pitch, 4);
}

int64_t Shared(const Task& t) { return (int64_t)t.x_numel + t.dy_numel + t.frame.width + kSlack; }

// How blocks and their threads share the outputs and rows when a thread has outputs by choice.
void Share(Task* t, int choice, int window) {
  const int64_t groups = CeilDiv(t->outputs, kOutputChoices[choice]);
  t->parts = (int)CeilDiv(groups, std::max(1, kThreads / t->rows_of_taps));
  t->groups = (int)CeilDiv(groups, t->parts);
  t->pitch = PitchOf(choice, t->groups);
  t->bands = 0;
  do {  // the fewest bands of rows that fit
    t->bands++;
    t->band = (int)CeilDiv(t->out_h, t->bands);
    Lay(t, window, true);
  } while (Shared(*t) > kMostShared && t->band > 1);
  const Task least = *t;
  Lay(t, window, false);
  if (Shared(*t) > kMostShared) *t = least;
  t->slices = std::max(1, std::min(kThreads / (t->groups * t->rows_of_taps), t->band * window));
}

double Instructions(const Task& t, int choice, int window) {
  const int outputs = kOutputChoices[choice], taps = WidthOf(t.kw);
  const int of_window = window * (outputs * taps + outputs / (outputs % 4 ? 2 : 4) + 1) + taps + 2;
  return (double)CeilDiv(t.band * window, t.slices) * t.bands * t.out_w * of_window;
}

template <int kTaps, int kWindow, int kOutputs>
void LaunchFilterGradient(const char* op, const Task& t, int64_t numel, DLStream stream,
                          const float* x, const float* dy, const uint8_t* code, float* partial) {
  const int threads = RoundUp(t.slices * t.groups * t.rows_of_taps, 32);
  const int64_t joined = (int64_t)t.slices * t.groups * t.rows_of_taps * kOutputs * kTaps;
  Launch(op, FilterGradientKernel<kTaps, kWindow, kOutputs>, t.workers * t.parts, threads,
         std::max(numel, joined) * sizeof(float), stream, t, x, dy, code, partial);
}
using Launcher = decltype(&LaunchFilterGradient<3, 2, 2>);

#define DLSYS_OUTPUTS(...)                                                     \
  {LaunchFilterGradient<__VA_ARGS__, 2>, LaunchFilterGradient<__VA_ARGS__, 4>, \
   LaunchFilterGradient<__VA_ARGS__, 6>}
constexpr Launcher kLaunchers[2][3][3] = {
    {DLSYS_OUTPUTS(3, 2), DLSYS_OUTPUTS(5, 2), DLSYS_OUTPUTS(7, 2)},
    {DLSYS_OUTPUTS(3, 3), DLSYS_OUTPUTS(5, 3), DLSYS_OUTPUTS(7, 3)}};
#undef DLSYS_OUTPUTS

Task TaskOf(const ConvPool& p) {
  Task t{};
  t.images = (int)p.conv.n;
  t.channels = (int)p.conv.c;
  t.outputs = (int)p.conv.o;
  t.h = (int)p.conv.plane.h;
  t.w = (int)p.conv.plane.w;
  t.top = (int)p.conv.before.h;
  t.left = (int)p.conv.before.w;
  t.kh = (int)p.conv.size.h;
  t.kw = (int)p.conv.size.w;
  t.out_h = (int)p.out.h;
  t.out_w = (int)p.out.w;
  t.rows_of_taps = t.channels * t.kh + 1;
  return t;
}

// The choice of outputs a thread that takes the least time, for which the task is then shared out.
int Choose(Task* t, int window, int multiprocessors) {
  int best = 0;
  double least = 0;
  for (int k = 0; k < 3; k++) {
    Share(t, k, window);
    const double threads = (double)t->images * t->parts * t->groups * t->rows_of_taps * t->slices;
    const bool fits = Shared(*t) <= kMostShared;
    const double cost =
        fits ? CostOf(threads, Instructions(*t, k, window), multiprocessors) : 1e300;
    if (k == 0 || cost < least) {
      least = cost;
      best = k;
    }
  }
  Share(t, best, window);
  return best;
}

bool Conv2dPoolFilterGradientFits(const DLArray* x, const DLArray* dy, const DLArray* code,
                                  DLArrayList* gradients, int64_t before, int64_t window) {
  const char* op = "conv2d_pool_filter_gradient";
  if (gradients->count < 1) return false;
  const ConvPool p = CheckedConvPool(op, x, gradients->arrays[0], dy, code, before, window);
  if (p.Empty()) return false;
  Task t = TaskOf(p);
  const auto fits = [&](int k) {
    Share(&t, k, (int)window);
    return Shared(t) <= kMostShared;
  };
  return t.rows_of_taps <= kThreads && (fits(0) || fits(1) || fits(2));
}

// x, dy and code give df (o, c, size) and, where it is wanted, db (o).
void Conv2dPoolFilterGradient(const DLArray* x, const DLArray* dy, const DLArray* code,
                              DLArrayList* gradients, int64_t before, int64_t window,
                              DLStream stream) {
  const char* op = "conv2d_pool_filter_gradient";
  if (gradients->count < 1 || gradients->count > 2) Fail("%s: expected one or two gradients", op);
  DLArray* df = gradients->arrays[0];
  Enter(op, df, x, dy, code);
  const ConvPool p = CheckedConvPool(op, x, df, dy, code, before, window);
  float *of_filter = Out(op, df), *of_bias = nullptr;
  if (gradients->count == 2) {
    Enter(op, df, gradients->arrays[1]);
    if (Numel(gradients->arrays[1]) != p.conv.o) Fail("%s: expected a bias for each filter", op);
    of_bias = Out(op, gradients->arrays[1]);
  }
  if (!Numel(df)) return;
  Task t = TaskOf(p);
  const int device = df->ctx.device_id, multiprocessors = Multiprocessors(device);
  const int choice = t.rows_of_taps > kThreads ? 0 : Choose(&t, (int)window, multiprocessors);
  if (t.rows_of_taps > kThreads || Shared(t) > kMostShared)
    Fail("%s: planes %s are too large", op, ShapeText(x).c_str());
  const int64_t units = (int64_t)t.images * t.bands;
  const int64_t most = std::max<int64_t>(1, kMostResident * multiprocessors / t.parts);
  t.workers = (int)CeilDiv(units, std::max<int64_t>(1, CeilDiv(units, most)));
  Scratch partial(df->ctx, (int64_t)t.workers * t.Sums() * sizeof(float), stream);
  kLaunchers[window - 2][TapsFor(t.kw)][choice](op, t, Shared(t), stream, In(op, x), In(op, dy),
                                                Codes(op, code), partial.floats());
  Launch(op, JoinWorkersKernel, (unsigned)CeilDiv(t.Sums(), kSumCols), kSumCols * kSumRows, 0,
         stream, partial.floats(), t.workers, t.Sums() - t.outputs, t.outputs, of_filter, of_bias);
}

DLSYS_KERNEL(cuda, conv2d_pool_filter_gradient, Conv2dPoolFilterGradient);
DLSYS_FITS(cuda, conv2d_pool_filter_gradient, Conv2dPoolFilterGradientFits);

}  // namespace
}  // namespace cuda
}  // namespace dlsys
