// GEMM of C with at most 16 rows or columns, by FFMA: gradients of the weights of a head, products
// with few rows. One operand is wide, (k, wide), and lies along the other extent of C; the other is
// slim: panels of it fit in shared memory, and all lanes of a warp share what they read there. A
// warp takes every eighth row of K of its block's share, four columns a lane; K is split over
// blocks, whose sums meet in a cluster, and those of clusters in a second kernel. The order of each
// sum is fixed: results are deterministic. Operands and C are of float32 or a type of 16 bits, sums
// of float32. Reading the wide operand limits it.
#include <optional>

#include "cuda/gemm/epilogue.cuh"
#include "cuda/gemm/kernel.cuh"
#include "cuda/pointwise/quad.cuh"
#include "cuda/runtime/launch.cuh"

namespace dlsys {
namespace cuda {
namespace {

constexpr int64_t kMostSlim = 16;
constexpr int kWarps = kThreads / 32, kStrip = 128;  // wide columns of a block
constexpr int kPanel = 256;  // rows of K of the slim operand in shared memory

struct SlimParams {
  Gemm gemm;
  const void *wide, *slim;
  int64_t width, pitch;       // of the wide operand, and elements between its rows of K
  int64_t slim_k, slim_each;  // steps of the slim operand
  int count;                  // of the slim operand's rows or columns
  bool is_row;                // the slim extent is that of C's rows, not of its columns,
  int64_t first;              // from this one on
  int cluster, splits;        // blocks of a cluster, and clusters, among which K is divided
  int64_t share;              // of K, of a block
  float* partial;             // (splits, count, width), or null where there is one
};

// Stores element (each, at) of the slim and the wide extent of C, with its epilogue.
template <class E>
__device__ __forceinline__ void StoreElement(const SlimParams& p, int each, int64_t at, float x) {
  const Gemm& gemm = p.gemm;
  const Epilogue& epilogue = gemm.epilogue;
  const int64_t row = p.is_row ? p.first + each : at, col = p.is_row ? at : p.first + each;
  const int64_t place = row * gemm.n + col;
  if (epilogue.bias) x += (float)((const E*)epilogue.bias)[col];
  const float side[1] = {epilogue.side ? (float)((const E*)epilogue.side)[place] : 0.f};
  float value[1] = {x};
  ApplyActivations(epilogue.activation, epilogue.gradient, side, value);
  ((E*)gemm.c)[place] = E(value[0]);
}

// Blocks that a multiprocessor runs together.
constexpr int ResidentOf(int count) { return count <= 8 ? 3 : 2; }

template <class E, int kCount>
__global__ void __launch_bounds__(kThreads, ResidentOf(kCount)) SlimKernel(const SlimParams p) {
  constexpr int kAtOnce = kCount == 1 ? 8 : 4;  // rows of a warp that are under way
  constexpr int kStep = kWarps * kAtOnce;
  constexpr int kPart = kCount < 4 ? kCount : 4;  // of the slim extent, that meets at once
  static_assert(kPanel % kStep == 0 && kCount % kPart == 0);
  __shared__ __align__(16) float slim[kPanel * kCount];  // later the sums of the block
  __shared__ __align__(16) float parts[kWarps][kPart][kStrip];
  static_assert(kPanel >= kStrip);
  const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
  const int in_cluster = (int)blockIdx.x % p.cluster, at = (int)blockIdx.x / p.cluster;
  const int split = at % p.splits;
  const int64_t first = (int64_t)(at / p.splits) * kStrip;  // of the wide columns
  const int64_t begin = (split * p.cluster + in_cluster) * p.share;
  const int64_t end = min(begin + p.share, p.gemm.k);
  const bool exists = first + lane * 4 < p.width;
  const E* const from = (const E*)p.wide + first + lane * 4;
  const E* const slim_from = (const E*)p.slim;
  float4 next[kAtOnce];
  const auto load = [&](int64_t k) {
#pragma unroll
    for (int u = 0; u < kAtOnce; u++)
      next[u] = exists && k + u * kWarps < end ? LoadQuad(from + (k + u * kWarps) * p.pitch)
                                               : make_float4(0.f, 0.f, 0.f, 0.f);
  };
  float4 sums[kCount] = {};
  const bool along_k = p.slim_k == 1;
  static_assert(kPanel == kThreads);
  GridDependencySynchronize();
  load(begin + warp);
  for (int64_t panel = begin; panel < end; panel += kPanel) {
    const int rows = (int)min((int64_t)kPanel, end - panel);
    __syncthreads();       // the panel before has been read
    float values[kCount];  // of the slim operand, all under way
#pragma unroll
    for (int j = 0; j < kCount; j++) {
      const int i = (int)threadIdx.x + j * kThreads;
      const int k = along_k ? i % kPanel : i / kCount, each = along_k ? i / kPanel : i % kCount;
      values[j] = k < rows && each < p.count
                      ? (float)slim_from[(panel + k) * p.slim_k + each * p.slim_each]
                      : 0.f;
    }
#pragma unroll
    for (int j = 0; j < kCount; j++) {
      const int i = (int)threadIdx.x + j * kThreads;
      slim[along_k ? i % kPanel * kCount + i / kPanel : i] = values[j];
    }
    __syncthreads();
#pragma unroll 1
    for (int k = warp; k < rows; k += kStep) {
      float4 x[kAtOnce];
#pragma unroll
      for (int u = 0; u < kAtOnce; u++) x[u] = next[u];
      load(panel + k + kStep);
#pragma unroll
      for (int u = 0; u < kAtOnce; u++) {
        float y[kCount];
        const float* const from_slim = slim + (k + u * kWarps) * kCount;
        if constexpr (kCount == 1) {
          y[0] = *from_slim;
        } else {
#pragma unroll
          for (int c = 0; c < kCount; c += 4) {
            const float4 v = *(const float4*)(from_slim + c);
            y[c] = v.x, y[c + 1] = v.y, y[c + 2] = v.z, y[c + 3] = v.w;
          }
        }
#pragma unroll
        for (int c = 0; c < kCount; c++) {
          sums[c].x = fmaf(x[u].x, y[c], sums[c].x), sums[c].y = fmaf(x[u].y, y[c], sums[c].y);
          sums[c].z = fmaf(x[u].z, y[c], sums[c].z), sums[c].w = fmaf(x[u].w, y[c], sums[c].w);
        }
      }
    }
  }
  TriggerProgrammaticLaunch();
#pragma unroll
  for (int c = 0; c < kCount; c += kPart) {
    __syncthreads();  // the slim operand, or the parts before, have been read
#pragma unroll
    for (int e = 0; e < kPart; e++) *(float4*)&parts[warp][e][lane * 4] = sums[c + e];
    __syncthreads();
    for (int i = threadIdx.x; i < kPart * kStrip; i += kThreads) {
      float sum = parts[0][i / kStrip][i % kStrip];
#pragma unroll
      for (int w = 1; w < kWarps; w++) sum += parts[w][i / kStrip][i % kStrip];
      slim[c * kStrip + i] = sum;
    }
  }
  if (p.cluster > 1)
    MeetCluster();
  else
    __syncthreads();
  for (int i = in_cluster * kThreads + (int)threadIdx.x; i < p.count * kStrip;
       i += p.cluster * kThreads) {
    const int64_t column = first + i % kStrip;
    if (column >= p.width) continue;
    float of[kPortableCluster], sum = 0.f;
#pragma unroll
    for (int peer = 0; peer < kPortableCluster; peer++)
      of[peer] = peer >= p.cluster ? 0.f : p.cluster > 1 ? OfPeer(slim, peer)[i] : slim[i];
#pragma unroll
    for (int peer = 0; peer < kPortableCluster; peer++) sum += of[peer];
    if (p.partial)
      p.partial[((int64_t)split * p.count + i / kStrip) * p.width + column] = sum;
    else
      StoreElement<E>(p, i / kStrip, column, sum);
  }
  if (p.cluster > 1) LeaveCluster();
}

// Adds the parts of clusters. Eight lanes share those of an element.
template <class E>
__global__ void __launch_bounds__(kThreads) SlimSumKernel(const SlimParams p) {
  constexpr int kLanes = 8;
  const int64_t numel = p.count * p.width;
  const int lane = (int)threadIdx.x / (kThreads / kLanes);
  __shared__ float parts[kLanes][kThreads / kLanes];
  GridDependencySynchronize();
  const int64_t i = (int64_t)blockIdx.x * (kThreads / kLanes) + threadIdx.x % (kThreads / kLanes);
  float sum = 0.f;
  if (i < numel) {
#pragma unroll 8
    for (int split = lane; split < p.splits; split += kLanes) sum += p.partial[split * numel + i];
  }
  parts[lane][threadIdx.x % (kThreads / kLanes)] = sum;
  __syncthreads();
  if (lane > 0 || i >= numel) return;
#pragma unroll
  for (int other = 1; other < kLanes; other++) sum += parts[other][threadIdx.x];
  StoreElement<E>(p, (int)(i / p.width), i % p.width, sum);
}

// The operands of a strip, and how K is divided; false where it is not slim, or its wide operand
// does not lie in whole quads.
bool ParamsOf(const Gemm& p, const SlimStrip& strip, SlimParams* params) {
  const int64_t nbytes = DtypeNbytes(p.dtype), extent = strip.of_rows ? p.m : p.n;
  const Operand slim = strip.of_rows ? OperandA(p) : OperandB(p);
  SlimParams& s = *params;
  s = {};
  s.gemm = p;
  s.wide = strip.wide, s.width = strip.width, s.pitch = strip.pitch;
  s.slim = (const char*)slim.data + strip.first * slim.of_mn * nbytes;
  s.slim_k = slim.of_k, s.slim_each = slim.of_mn;
  s.count = (int)std::min(extent - strip.first, kMostSlim + 1);
  s.is_row = strip.of_rows, s.first = strip.first;
  if (s.count <= 0 || s.count > kMostSlim || s.width <= 0 || p.k <= 0 || p.u8 != U8Operand::kNone ||
      s.pitch % 4 || (uintptr_t)s.wide % (4 * nbytes))
    return false;
  constexpr int64_t kLeastShare = 64;
  const int64_t strips = CeilDiv(s.width, kStrip);
  // Two thirds of the blocks that run together: clusters leave some of the places empty.
  const int64_t places = ResidentOf(s.count) * (int64_t)Multiprocessors(p.ctx.device_id);
  const int64_t wanted = places * 2 / 3 / strips;
  const int64_t most = std::min(wanted, CeilDiv(p.k, kLeastShare));
  const bool clusters = ComputeMajor(p.ctx.device_id) >= 9;
  s.cluster = clusters ? (int)std::max<int64_t>(1, std::min<int64_t>(most, kPortableCluster)) : 1;
  s.splits = (int)std::max<int64_t>(1, most / s.cluster);
  s.share = CeilDiv(p.k, s.cluster * s.splits);
  return strips * s.cluster * s.splits < INT32_MAX;
}

// The same of all of C.
bool ParamsOf(const Gemm& p, SlimParams* params) {
  return (!p.trans_b && ParamsOf(p, {true, 0, p.n, p.b, p.n}, params)) ||
         (p.trans_a && ParamsOf(p, {false, 0, p.m, p.a, p.m}, params));
}

template <class E>
void Run(const char* op, SlimParams p, DLStream stream) {
  std::optional<Scratch> partial;
  if (p.splits > 1) {
    partial.emplace(p.gemm.ctx, p.splits * p.count * p.width * (int64_t)sizeof(float), stream);
    p.partial = partial->floats();
  }
  const bool pdl = ComputeMajor(p.gemm.ctx.device_id) >= 9;
  const unsigned blocks = (unsigned)(CeilDiv(p.width, kStrip) * p.splits * p.cluster);
  const auto launch = [&](auto count) {
    LaunchClusters(op, SlimKernel<E, decltype(count)::value>, blocks, (unsigned)p.cluster, kThreads,
                   0, pdl, stream, p);
  };
  if (p.count == 1)
    launch(std::integral_constant<int, 1>());
  else if (p.count <= 4)
    launch(std::integral_constant<int, 4>());
  else if (p.count <= 8)
    launch(std::integral_constant<int, 8>());
  else if (p.count <= 12)
    launch(std::integral_constant<int, 12>());
  else
    launch(std::integral_constant<int, 16>());
  if (p.splits == 1) return;
  LaunchClusters(op, SlimSumKernel<E>, (unsigned)CeilDiv(p.count * p.width, kThreads / 8), 1,
                 kThreads, 0, pdl, stream, p);
}

double UsOf(const SlimParams& s) {
  constexpr double kUs = 5.5, kSumUs = 1.5, kNbytesUs = 4e6, kFlopUs = 2.4e7;
  const double work = (double)s.width * (double)s.gemm.k;
  return kUs + (s.splits > 1 ? kSumUs : 0) + work * (double)DtypeNbytes(s.gemm.dtype) / kNbytesUs +
         2 * work * s.count / kFlopUs;
}

}  // namespace

bool SlimFits(const Gemm& p) {
  SlimParams params;
  return ParamsOf(p, &params);
}

double SlimUs(const Gemm& p) {
  SlimParams params;
  return ParamsOf(p, &params) ? UsOf(params) : INFINITY;
}

double SlimUs(const Gemm& p, const SlimStrip& strip) {
  SlimParams params;
  return ParamsOf(p, strip, &params) ? UsOf(params) : INFINITY;
}

void RunSlim(const char* op, const Gemm& p, DLStream stream) {
  SlimParams params;
  if (!ParamsOf(p, &params)) NotApplicable(op, "slim");
  if (p.dtype == DL_FLOAT32)
    Run<float>(op, params, stream);
  else if (p.dtype == DL_BFLOAT16)
    Run<bfloat16>(op, params, stream);
  else
    Run<float16>(op, params, stream);
  if (p.sums) RunOperandSums(op, p, stream);
}

void RunSlim(const char* op, const Gemm& p, const SlimStrip& strip, DLStream stream) {
  SlimParams params;
  if (!ParamsOf(p, strip, &params)) NotApplicable(op, "slim");
  Run<float>(op, params, stream);
}

}  // namespace cuda
}  // namespace dlsys
