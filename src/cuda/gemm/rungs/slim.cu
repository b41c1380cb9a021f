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
constexpr int kRing = 8;  // rows of K of the wide operand that a warp has in shared memory

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

// Begins to copy four elements to shared memory.
__device__ __forceinline__ void CopyQuadAsync(QuadOf<float>* to, const float* from) {
  CopyAsync16((float*)to, from, true);
}
template <class E>
__device__ __forceinline__ void CopyQuadAsync(QuadOf<E>* to, const E* from) {
  CopyAsync4((float*)to, (const float*)from, true);
  CopyAsync4((float*)to + 1, (const float*)from + 1, true);
}

// Blocks that a multiprocessor runs together.
constexpr int ResidentOf(int count) { return count <= 4 ? 4 : count <= 8 ? 3 : 2; }

template <class E, int kCount>
__global__ void __launch_bounds__(kThreads, ResidentOf(kCount)) SlimKernel(const SlimParams p) {
  constexpr int kPanel = kCount <= 4 ? 256 : 128;  // rows of K of the slim operand
  constexpr int kValues = kPanel * kCount / kThreads;
  constexpr int kPart = kCount < 4 ? kCount : 4;  // of the slim extent, that meets at once
  static_assert(kPanel % kWarps == 0 && kPanel >= kStrip && kCount % kPart == 0);
  __shared__ __align__(16) float slim[kPanel * kCount];  // later the sums of the block
  __shared__ __align__(16) QuadOf<E> ring[kWarps][kRing][32];
  auto* const parts = (float (*)[kPart][kStrip])ring;  // of warps, when all rows have been read
  static_assert(sizeof(float[kWarps][kPart][kStrip]) <= sizeof ring);
  const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
  const int in_cluster = (int)blockIdx.x % p.cluster, at = (int)blockIdx.x / p.cluster;
  const int split = at % p.splits;
  const int64_t first = (int64_t)(at / p.splits) * kStrip;  // of the wide columns
  const int64_t begin = (split * p.cluster + in_cluster) * p.share;
  const int64_t end = min(begin + p.share, p.gemm.k);
  const bool exists = first + lane * 4 < p.width, along_k = p.slim_k == 1;
  const E* const slim_from = (const E*)p.slim;
  // A lane copies what it reads itself, so that nobody else waits for it.
  int64_t copied = begin + warp;  // the row that is copied next
  const E* from = (const E*)p.wide + first + lane * 4 + copied * p.pitch;
  unsigned to = 0;  // of the ring
  const auto copy = [&] {
    if (exists && copied < end) CopyQuadAsync(&ring[warp][to][lane], from);
    CloseCopies();
    copied += kWarps, from += kWarps * p.pitch, to = (to + 1) % kRing;
  };
  float values[kValues];  // of the slim operand's next panel
  const auto load = [&](int64_t panel) {
#pragma unroll
    for (int j = 0; j < kValues; j++) {
      const int i = (int)threadIdx.x + j * kThreads;
      const int k = along_k ? i % kPanel : i / kCount, each = along_k ? i / kPanel : i % kCount;
      values[j] = panel + k < end && each < p.count
                      ? (float)slim_from[(panel + k) * p.slim_k + each * p.slim_each]
                      : 0.f;
    }
  };
  float4 sums[kCount] = {};
  GridDependencySynchronize();
#pragma unroll 1
  for (int i = 0; i < kRing - 1; i++) copy();
  load(begin);
  unsigned row = 0;  // of the ring, which is multiplied
#pragma unroll 1
  for (int64_t panel = begin; panel < end; panel += kPanel) {
    const int rows = (int)min((int64_t)kPanel, end - panel);
    __syncthreads();  // the panel before has been read
#pragma unroll
    for (int j = 0; j < kValues; j++) {
      const int i = (int)threadIdx.x + j * kThreads;
      slim[along_k ? i % kPanel * kCount + i / kPanel : i] = values[j];
    }
    __syncthreads();
    load(panel + kPanel);
#pragma unroll 1
    for (int k = warp; k < rows; k += kWarps) {
      WaitForCopies<kRing - 2>();
      const float4 x = LoadQuad((const E*)&ring[warp][row][lane]);
      row = (row + 1) % kRing;
      copy();  // to where the row before was
      float y[kCount];
      if constexpr (kCount == 1) {
        y[0] = slim[k];
      } else {
#pragma unroll
        for (int c = 0; c < kCount; c += 4) {
          const float4 v = *(const float4*)(slim + k * kCount + c);
          y[c] = v.x, y[c + 1] = v.y, y[c + 2] = v.z, y[c + 3] = v.w;
        }
      }
#pragma unroll
      for (int c = 0; c < kCount; c++) {
        sums[c].x = fmaf(x.x, y[c], sums[c].x), sums[c].y = fmaf(x.y, y[c], sums[c].y);
        sums[c].z = fmaf(x.z, y[c], sums[c].z), sums[c].w = fmaf(x.w, y[c], sums[c].w);
      }
    }
  }
  TriggerProgrammaticLaunch();
#pragma unroll
  for (int c = 0; c < kCount; c += kPart) {
    __syncthreads();  // the operands, or the parts before, have been read
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
  // Larger clusters than of two leave some of the places empty; where one of them is enough, there
  // is no second kernel.
  const int64_t places = ResidentOf(s.count) * (int64_t)Multiprocessors(p.ctx.device_id);
  const int64_t most = CeilDiv(p.k, kLeastShare), one = std::min(places * 5 / 6 / strips, most);
  const bool clusters = ComputeMajor(p.ctx.device_id) >= 9, is_enough = one <= kPortableCluster;
  s.cluster = !clusters ? 1 : is_enough ? (int)std::max<int64_t>(1, one) : 2;
  s.splits = clusters && is_enough
                 ? 1
                 : (int)std::max<int64_t>(1, std::min(places / strips, most) / s.cluster);
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
  constexpr double kUs = 5, kSumUs = 2, kNbytesUs = 4e6, kFlopUs = 2e7;
  const double work = (double)s.width * (double)s.gemm.k;
  return kUs + (s.splits > 1 ? kSumUs : 0) +
         std::max(work * (double)DtypeNbytes(s.gemm.dtype) / kNbytesUs,
                  2 * work * s.count / kFlopUs);
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
