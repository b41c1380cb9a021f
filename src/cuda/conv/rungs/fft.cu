// The rung `fft`: convolution as a product of spectra. conv.cuh has the contract.
//
// Data, filters and gradients of outputs are spread over planes of one size, large enough that no
// window wraps around: x begins at the padding, filter elements are the dilation apart, outputs the
// stride apart. In the planes' spectra X, F and D, which cuFFT computes,
//   Y[n, o] = sum over c of X[n, c] conj(F[o, c]),  X'[n, c] = sum over o of D[n, o] F[o, c],
//   F'[o, c] = sum over n of conj(D[n, o]) X[n, c]
// are the convolution and its gradients (Mathieu, Henaff and LeCun, "Fast training of convolutional
// networks through FFTs", 2014). Images go in chunks that the workspace holds. float32, at every
// precision; an error is relative to the largest result of a plane, not to each. Limited by the
// traffic of the spectra: a 3 x 3 filter becomes a plane as large as an image's.
//
// cuFFT is loaded with dlopen; functions and constants are declared as in cufft.h.
#include <map>
#include <tuple>

#include "cuda/conv/conv.cuh"
#include "cuda/runtime/dlopen.cuh"
#include "cuda/runtime/launch.cuh"

namespace dlsys {
namespace cuda {
namespace {

// ---- cuFFT ----

using Plan = int;
using Status = int;
constexpr int kR2c = 0x2a, kC2r = 0x2c;  // CUFFT_R2C, CUFFT_C2R

struct Library {
  Status (*create)(Plan*) = nullptr;
  Status (*auto_allocation)(Plan, int) = nullptr;
  Status (*make)(Plan, int rank, int* sizes, int* in, int in_stride, int in_distance, int* out,
                 int out_stride, int out_distance, int type, int batch, size_t* nbytes) = nullptr;
  Status (*set_work_area)(Plan, void*) = nullptr;
  Status (*set_stream)(Plan, cudaStream_t) = nullptr;
  Status (*r2c)(Plan, float*, float2*) = nullptr;
  Status (*c2r)(Plan, float2*, float*) = nullptr;
  Status (*property)(int which, int*) = nullptr;
  std::string error;  // why it cannot be used, or ""
  std::string name;   // and its version
};

// The runtime's own major version first: the driver is known to be new enough for it.
std::vector<std::string> Sonames() {
  if (CUDART_VERSION / 1000 == 12) return {"libcufft.so.11", "libcufft.so.12"};
  return {"libcufft.so.12", "libcufft.so.11"};
}

Library Open() {
  Library l;
  void* library = OpenLibrary(Sonames(), &l.error);
  if (!library) return l;
  Find(library, "cufftCreate", &l.create, &l.error);
  Find(library, "cufftSetAutoAllocation", &l.auto_allocation, &l.error);
  Find(library, "cufftMakePlanMany", &l.make, &l.error);
  Find(library, "cufftSetWorkArea", &l.set_work_area, &l.error);
  Find(library, "cufftSetStream", &l.set_stream, &l.error);
  Find(library, "cufftExecR2C", &l.r2c, &l.error);
  Find(library, "cufftExecC2R", &l.c2r, &l.error);
  Find(library, "cufftGetProperty", &l.property, &l.error);
  if (l.error.empty()) l.name = "cuFFT " + VersionText(l.property);
  return l;
}

const Library& Cufft() {
  static const Library* const library = new Library(Open());
  return *library;
}

const char* Source() {
  if (!Cufft().error.empty())
    FailWith(DL_UNAVAILABLE,
             "cuFFT cannot be used (%s): install nvidia-cufft, or name its folder in "
             "DLSYS_CUDA_LIBRARY_PATH",
             Cufft().error.c_str());
  return Cufft().name.c_str();
}

void CheckCufft(const char* op, Status status) {
  if (status == 0) return;
  CheckFault(op);
  Fail("%s: cuFFT error %d", op, status);
}

// A plan of `batch` transforms of planes, and the scratch that it takes.
struct Transforms {
  Plan plan;
  size_t nbytes;
};

// Plans by device, plane, number and type. They last as long as the process, as handles do, and
// serve one call at a time.
std::mutex plans_mutex;
const Transforms& TransformsOf(const ConvCall& at, HW plane, int64_t batch, int type) {
  using Key = std::tuple<int, int64_t, int64_t, int64_t, int>;
  static auto* const plans = new std::map<Key, Transforms>;
  const Key key{at.ctx.device_id, plane.h, plane.w, batch, type};
  const auto found = plans->find(key);
  if (found != plans->end()) return found->second;
  const RelaxedCapture relaxed;  // plans come with memory of their own
  const Library& l = Cufft();
  Transforms made{};
  CheckCufft(at.op, l.create(&made.plan));
  CheckCufft(at.op, l.auto_allocation(made.plan, 0));
  int sizes[2] = {(int)plane.h, (int)plane.w};
  CheckCufft(at.op, l.make(made.plan, 2, sizes, nullptr, 1, 0, nullptr, 1, 0, type, (int)batch,
                           &made.nbytes));
  return plans->emplace(key, made).first->second;
}

// ---- kernels ----

// Where elements of an array (planes, size) lie in planes: `first`, and `step` apart.
struct Spread {
  HW size, first, step, plane;
};

__global__ void ToPlanesKernel(const Spread s, const float* from, float* planes, int64_t numel) {
  const int64_t area = s.plane.h * s.plane.w;
  for (int64_t k = FirstItem(); k < numel; k += ItemStep()) {
    const int64_t h = k % area / s.plane.w - s.first.h, w = k % s.plane.w - s.first.w;
    const int64_t i = h / s.step.h, j = w / s.step.w;
    const bool there =
        h >= 0 && w >= 0 && h % s.step.h == 0 && w % s.step.w == 0 && i < s.size.h && j < s.size.w;
    planes[k] = there ? from[k / area * s.size.h * s.size.w + i * s.size.w + j] : 0.f;
  }
}

// to (n, channels, size) = or += scale * planes, plus bias (channels) or none
__global__ void FromPlanesKernel(const Spread s, const float* planes, const float* bias,
                                 int64_t channels, float scale, bool add, float* to,
                                 int64_t numel) {
  const int64_t size = s.size.h * s.size.w, area = s.plane.h * s.plane.w;
  for (int64_t k = FirstItem(); k < numel; k += ItemStep()) {
    const int64_t plane = k / size;
    const int64_t h = k % size / s.size.w * s.step.h + s.first.h;
    const int64_t w = k % s.size.w * s.step.w + s.first.w;
    const float value = planes[plane * area + h * s.plane.w + w] * scale;
    to[k] = value + (bias ? bias[plane % channels] : 0.f) + (add ? to[k] : 0.f);
  }
}

// An operand of a product of spectra: plane (row, k) of a group lies at group * of_group + row *
// of_row + k * of_k; conjugated by the sign -1.
struct Spectra {
  const float2* data;
  int64_t of_group, of_row, of_k;
  float sign;
};

// c (groups, m, n), at strides as of operands, = sum over k of a (m, k) b (n, k), at every
// frequency.
struct SpectraProduct {
  Spectra a, b;
  float2* c;
  int64_t c_group, c_row, c_col;
  int64_t groups, m, n, k, frequencies;
};

constexpr int kQuad = 4;  // rows and columns of a thread

__device__ __forceinline__ float2 Read(const Spectra& s, int64_t group, int64_t row, int64_t k,
                                       int64_t frequencies, int64_t frequency) {
  const int64_t plane = group * s.of_group + row * s.of_row + k * s.of_k;
  const float2 z = s.data[plane * frequencies + frequency];
  return make_float2(z.x, z.y * s.sign);
}

// One thread computes kQuad x kQuad planes at one frequency; neighbors are at the next one.
__global__ void SpectraKernel(const SpectraProduct p, int64_t items) {
  const int64_t rows = CeilDiv(p.m, kQuad), cols = CeilDiv(p.n, kQuad);
  for (int64_t item = FirstItem(); item < items; item += ItemStep()) {
    const int64_t frequency = item % p.frequencies, tile = item / p.frequencies;
    const int64_t col = tile % cols * kQuad, row = tile / cols % rows * kQuad;
    const int64_t group = tile / cols / rows;
    float2 sums[kQuad][kQuad] = {};
    for (int64_t k = 0; k < p.k; k++) {
      float2 a[kQuad], b[kQuad];
#pragma unroll
      for (int i = 0; i < kQuad; i++) {
        a[i] = Read(p.a, group, min(row + i, p.m - 1), k, p.frequencies, frequency);
        b[i] = Read(p.b, group, min(col + i, p.n - 1), k, p.frequencies, frequency);
      }
#pragma unroll
      for (int i = 0; i < kQuad; i++)
#pragma unroll
        for (int j = 0; j < kQuad; j++) {
          sums[i][j].x += a[i].x * b[j].x - a[i].y * b[j].y;
          sums[i][j].y += a[i].x * b[j].y + a[i].y * b[j].x;
        }
    }
#pragma unroll
    for (int i = 0; i < kQuad; i++)
#pragma unroll
      for (int j = 0; j < kQuad; j++)
        if (row + i < p.m && col + j < p.n) {
          const int64_t plane = group * p.c_group + (row + i) * p.c_row + (col + j) * p.c_col;
          p.c[plane * p.frequencies + frequency] = sums[i][j];
        }
  }
}

// ---- launchers ----

// The least product of 2, 3, 5 and 7 from n on, for which cuFFT is fast.
int64_t Smooth(int64_t n) {
  for (;; n++) {
    int64_t rest = n;
    for (int64_t by : {2, 3, 5, 7})
      while (rest % by == 0) rest /= by;
    if (rest == 1) return n;
  }
}

int64_t PlaneAxis(int64_t in, int64_t pad, int64_t out, int64_t stride, int64_t kernel,
                  int64_t dilation) {
  return Smooth(std::max(pad + in, (out - 1) * stride + (kernel - 1) * dilation + 1));
}

HW PlaneOf(const Conv& c) {
  return {PlaneAxis(c.in.h, c.pad.h, c.out.h, c.stride.h, c.kernel.h, c.dilation.h),
          PlaneAxis(c.in.w, c.pad.w, c.out.w, c.stride.w, c.kernel.w, c.dilation.w)};
}

// The three arrays of a convolution in planes.
Spread OfData(const Conv& c) { return {c.in, c.pad, {1, 1}, PlaneOf(c)}; }
Spread OfFilter(const Conv& c) { return {c.kernel, {0, 0}, c.dilation, PlaneOf(c)}; }
Spread OfOutput(const Conv& c) { return {c.out, {0, 0}, c.stride, PlaneOf(c)}; }

int64_t Frequencies(HW plane) { return plane.h * (plane.w / 2 + 1); }

// The scratch of one chunk: planes, the spectra of both operands and of the result.
struct Buffers {
  float* planes;
  float2 *a, *b, *c;
};

void RunTransform(const ConvCall& at, HW plane, int64_t count, int type, float* planes,
                  float2* spectra) {
  const std::lock_guard<std::mutex> lock(plans_mutex);
  const Transforms& transforms = TransformsOf(at, plane, count, type);
  const Scratch work(at.ctx, (int64_t)transforms.nbytes, at.stream);
  if (Workspace::Querying()) return;
  const Library& l = Cufft();
  CheckCufft(at.op, l.set_stream(transforms.plan, Native(at.stream)));
  CheckCufft(at.op, l.set_work_area(transforms.plan, work.data()));
  CheckCufft(at.op, type == kR2c ? l.r2c(transforms.plan, planes, spectra)
                                 : l.c2r(transforms.plan, spectra, planes));
}

void ToSpectra(const ConvCall& at, const Spread& s, const float* from, int64_t count, float* planes,
               float2* spectra) {
  const int64_t numel = count * Size(s.plane);
  Launch(at.op, ToPlanesKernel, Blocks(numel), kThreads, 0, at.stream, s, from, planes, numel);
  RunTransform(at, s.plane, count, kR2c, planes, spectra);
}

void FromSpectra(const ConvCall& at, const Spread& s, float2* spectra, int64_t count,
                 const float* bias, int64_t channels, bool add, float* planes, float* to) {
  RunTransform(at, s.plane, count, kC2r, planes, spectra);
  const int64_t numel = count * Size(s.size);
  const float scale = 1.f / (float)Size(s.plane);
  Launch(at.op, FromPlanesKernel, Blocks(numel), kThreads, 0, at.stream, s, planes, bias, channels,
         scale, add, to, numel);
}

void Multiply(const ConvCall& at, SpectraProduct p, HW plane) {
  p.frequencies = Frequencies(plane);
  const int64_t items = p.groups * CeilDiv(p.m, kQuad) * CeilDiv(p.n, kQuad) * p.frequencies;
  Launch(at.op, SpectraKernel, Blocks(items), kThreads, 0, at.stream, p, items);
}

// Runs `work(chunk, first image, buffers)` over chunks of images. `work` is told where the spectra
// of the data, the outputs and the filters lie.
template <class Work>
void ForEachChunk(const ConvCall& at, const Conv& c, Work&& work) {
  Source();
  const HW plane = PlaneOf(c);
  const int64_t area = Size(plane) * (int64_t)sizeof(float);
  const int64_t spectrum = Frequencies(plane) * (int64_t)sizeof(float2);
  const int64_t filters = c.o * c.GroupChannels(), channels = std::max(c.c, c.o);
  const int64_t most = ImagesAtOnce(at, "fft", c.n, (c.c + c.o) * spectrum + channels * area,
                                    filters * (spectrum + area));
  const Scratch planes(at.ctx, std::max(most * channels, filters) * area, at.stream);
  const Scratch data(at.ctx, most * c.c * spectrum, at.stream);
  const Scratch outputs(at.ctx, most * c.o * spectrum, at.stream);
  const Scratch of_filters(at.ctx, filters * spectrum, at.stream);
  const Buffers buffers{planes.floats(), (float2*)data.data(), (float2*)outputs.data(),
                        (float2*)of_filters.data()};
  for (int64_t first = 0; first < c.n; first += most) {
    Conv chunk = c;
    chunk.n = std::min(most, c.n - first);
    work(chunk, first, buffers);
  }
}

void FftForward(const ConvCall& at, const Conv& conv, const float* x, const float* f,
                const float* bias, float* y) {
  ForEachChunk(at, conv, [&](const Conv& c, int64_t first, const Buffers& to) {
    const int64_t in = c.GroupChannels(), out = c.GroupFilters();
    if (first == 0) ToSpectra(at, OfFilter(c), f, c.o * in, to.planes, to.c);
    ToSpectra(at, OfData(c), x + first * c.c * Size(c.in), c.n * c.c, to.planes, to.a);
    Multiply(at,
             {{to.a, in, c.c, 1, 1},
              {to.c, out * in, in, 1, -1},
              to.b,
              out,
              c.o,
              1,
              c.groups,
              c.n,
              out,
              in,
              0},
             PlaneOf(c));
    FromSpectra(at, OfOutput(c), to.b, c.n * c.o, bias, c.o, false, to.planes,
                y + first * c.o * Size(c.out));
  });
}

void FftDataGradient(const ConvCall& at, const Conv& conv, const float* f, const float* dy,
                     float* dx) {
  ForEachChunk(at, conv, [&](const Conv& c, int64_t first, const Buffers& to) {
    const int64_t in = c.GroupChannels(), out = c.GroupFilters();
    if (first == 0) ToSpectra(at, OfFilter(c), f, c.o * in, to.planes, to.c);
    ToSpectra(at, OfOutput(c), dy + first * c.o * Size(c.out), c.n * c.o, to.planes, to.b);
    Multiply(at,
             {{to.b, out, c.o, 1, 1},
              {to.c, out * in, 1, in, 1},
              to.a,
              in,
              c.c,
              1,
              c.groups,
              c.n,
              in,
              out,
              0},
             PlaneOf(c));
    FromSpectra(at, OfData(c), to.a, c.n * c.c, nullptr, c.c, false, to.planes,
                dx + first * c.c * Size(c.in));
  });
}

// Chunks are added in their order.
void FftFilterGradient(const ConvCall& at, const Conv& conv, const float* x, const float* dy,
                       float* df) {
  ForEachChunk(at, conv, [&](const Conv& c, int64_t first, const Buffers& to) {
    const int64_t in = c.GroupChannels(), out = c.GroupFilters();
    ToSpectra(at, OfData(c), x + first * c.c * Size(c.in), c.n * c.c, to.planes, to.a);
    ToSpectra(at, OfOutput(c), dy + first * c.o * Size(c.out), c.n * c.o, to.planes, to.b);
    Multiply(at,
             {{to.b, out, 1, c.o, -1},
              {to.a, in, 1, c.c, 1},
              to.c,
              out * in,
              in,
              1,
              c.groups,
              out,
              in,
              c.n,
              0},
             PlaneOf(c));
    FromSpectra(at, OfFilter(c), to.c, c.o * in, nullptr, 1, first > 0, to.planes, df);
  });
}

const char* Refusal(const ConvCall&, const Conv& c) {
  constexpr int64_t kMost = INT32_MAX;
  const HW plane = PlaneOf(c);
  const int64_t largest = std::max({c.c, c.o, c.o * c.GroupChannels() / std::max<int64_t>(c.n, 1)});
  return Size(plane) > kMost / (largest * c.n) ? "its planes have more elements than its int counts"
                                               : nullptr;
}

}  // namespace

const ConvAlgorithm kFft = {"fft",      nullptr,         Source,           Refusal,
                            FftForward, FftDataGradient, FftFilterGradient};

}  // namespace cuda
}  // namespace dlsys
