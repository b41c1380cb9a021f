// GEMM of bytes by wgmma at tf32: C = activation(scale A Bᵀ + bias), A (m, k) uint8 as a batch of
// images is, B (n, k) float32. A block of two warpgroups has 64 x 32 of C and all of K in shared
// memory: it asks for everything at once, and multiplies each panel of B when it is there. TMA
// rounds B to tf32, which holds bytes exactly; a warp takes A from shared memory as fragments in
// registers. The warpgroups take panels in turn and add up in the end, in their order.
//
// k is a multiple of 16 and at most kMaxK, n is even, all addresses are of 16 bytes; C overlaps
// nothing. It is for products of about as many tiles as there are multiprocessors, which latency
// limits: of the first panel, and of code that runs once.
#include "cuda/gemm/epilogue.cuh"
#include "cuda/gemm/hopper/uint8.cuh"
#include "cuda/instructions/hopper.cuh"
#include "cuda/instructions/tensor_map.cuh"
#include "cuda/runtime/launch.cuh"

namespace dlsys {
namespace cuda {
namespace hopper {
namespace {

constexpr int kTileM = 64, kTileN = 32, kGroups = 2, kU8Threads = kGroups * 128;
constexpr int kPanelK = 32, kPanelNbytes = kTileN * kPanelK * 4, kBlocks = kTileN / 8;
constexpr int kMaxK = 1024, kMaxPanels = kMaxK / kPanelK;
constexpr int kAlignment = 1024;                                        // of the swizzle
constexpr int kWarps = kU8Threads / 32, kRowsOfWarp = kTileM / kWarps;  // of A, that a warp copies
constexpr int kSumsNbytes = kGroups * kTileM * kTileN * 4;
constexpr int kOwn = kBlocks / kGroups;  // eights of columns that a warpgroup stores

struct U8Product {
  const uint8_t* a;
  const float *scale, *bias;  // bias may be null
  float* c;
  int m, n, k, activation;
  bool a_ready;  // PDL: A may be read before the predecessor ends
};

__host__ __device__ constexpr int Panels(int k) { return CeilDiv32(k, kPanelK); }
// Of rows of A, 16 bytes longer than whole panels: eight rows fall in different banks.
__host__ __device__ constexpr int RowPitch(int k) { return Panels(k) * kPanelK + 16; }

// Byte t of a word as the bits of a float.
__device__ __forceinline__ uint32_t FloatOfByte(uint32_t word, int t) {
  return __float_as_uint(ByteToFloat(word, t));
}

// The fragments of A at a panel's four eights of K: of each the bytes `t` and t + 4 of two rows.
__device__ __forceinline__ void ReadBytes(const uint8_t* rows, int pitch, int t,
                                          uint32_t (&a)[kPanelK / 8][4]) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
#pragma unroll
    for (int row = 0; row < 2; row++) {
      const float4 v = *(const float4*)(rows + row * 8 * pitch + half * 16);
      a[2 * half][row] = FloatOfByte(__float_as_uint(v.x), t);
      a[2 * half][2 + row] = FloatOfByte(__float_as_uint(v.y), t);
      a[2 * half + 1][row] = FloatOfByte(__float_as_uint(v.z), t);
      a[2 * half + 1][2 + row] = FloatOfByte(__float_as_uint(v.w), t);
    }
  }
}

__global__ __launch_bounds__(kU8Threads, 1) void U8Kernel(const __grid_constant__ CUtensorMap map_b,
                                                          const U8Product p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __shared__ __align__(8) uint64_t barriers[kMaxPanels + 1];
  unsigned char* shared = DynamicShared<unsigned char>();
  shared += -SharedAddress(shared) & (kAlignment - 1);
  const int panels = Panels(p.k), pitch = RowPitch(p.k);
  uint8_t* const rows = shared + panels * kPanelNbytes;
  float* const sums = (float*)(rows + kTileM * pitch);
  const uint32_t of_panels = SharedAddress(barriers), of_rows = of_panels + kMaxPanels * 8;
  const int col_tiles = CeilDiv32(p.n, kTileN);
  const int row0 = blockIdx.x / col_tiles * kTileM, col0 = blockIdx.x % col_tiles * kTileN;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int k = 0; k < panels; k++) InitBarrier(of_panels + 8 * k, 1);
    InitBarrier(of_rows, kTileM / kRowsOfWarp);
    PublishBarriers();
  }
  __syncthreads();
  const auto load_rows = [&] {
    const int first = warp * kRowsOfWarp, count = max(0, min(kRowsOfWarp, p.m - row0 - first));
    if (lane == 0) ArriveExpecting(of_rows, count * p.k);
    __syncwarp();
    if (lane < count)
      LoadBytes(SharedAddress(rows + (first + lane) * pitch),
                p.a + (int64_t)(row0 + first + lane) * p.k, p.k, of_rows);
  };
  if (p.a_ready) load_rows();
  if (lane == 0)
    for (int k = warp; k < panels; k += kWarps) ArriveExpecting(of_panels + 8 * k, kPanelNbytes);
  GridDependencySynchronize();
  if (lane == 0)
    for (int k = warp; k < panels; k += kWarps)
      LoadBox<false>(SharedAddress(shared) + k * kPanelNbytes, &map_b, of_panels + 8 * k,
                     k * kPanelK, col0, 0);
  __syncwarp();
  if (!p.a_ready) load_rows();
  const int group = warp / 4, t = lane % 4, row = warp % 4 * 16 + lane / 4;
  const int col = col0 + group * 8 * kOwn + 2 * t;  // the first that this thread stores
  const float scale = *p.scale;
  float bias[kOwn][2] = {};
#pragma unroll
  for (int j = 0; j < kOwn; j++)
#pragma unroll
    for (int e = 0; e < 2; e++)
      if (p.bias && col + 8 * j < p.n) bias[j][e] = p.bias[col + 8 * j + e];
  WaitForPhase(of_rows, 0);
  float d[kBlocks][4];
  uint32_t even[kPanelK / 8][4], odd[kPanelK / 8][4];
  const auto multiply = [&](auto& a, int k) {
    const int panel = k * kGroups + group;
    ReadBytes(rows + row * pitch + panel * kPanelK, pitch, t, a);
    WaitForPhase(of_panels + 8 * panel, 0);
    BeginProducts();
#pragma unroll
    for (int q = 0; q < kPanelK / 8; q++) {
      const uint32_t b = SharedAddress(shared) + panel * kPanelNbytes + q * 32;
      MultiplyAdd<float, false>(d, a[q], Descriptor(b, 16, 1024), k + q > 0);
    }
    CloseProducts();
    WaitForProducts<1>();
  };
  const int count = (panels - group + kGroups - 1) / kGroups;
  int k = 0;
#pragma unroll 1
  for (; k + 1 < count; k += 2) {
    multiply(even, k);
    multiply(odd, k + 1);
  }
  if (k < count) multiply(even, k);
  WaitForProducts<0>();
  TriggerProgrammaticLaunch();
  if (count == 0) {
#pragma unroll
    for (int j = 0; j < kBlocks; j++) d[j][0] = d[j][1] = d[j][2] = d[j][3] = 0.f;
  }
  // (warpgroups, eights of columns, threads)
  float4* const left = (float4*)sums + threadIdx.x % 128;
#pragma unroll
  for (int j = 0; j < kBlocks; j++)
    left[(group * kBlocks + j) * 128] = make_float4(d[j][0], d[j][1], d[j][2], d[j][3]);
  __syncthreads();
#pragma unroll
  for (int j = 0; j < kOwn; j++) {
    float x[4] = {};
#pragma unroll
    for (int g = 0; g < kGroups; g++) {
      const float4 v = left[(g * kBlocks + group * kOwn + j) * 128];
      x[0] += v.x, x[1] += v.y, x[2] += v.z, x[3] += v.w;
    }
#pragma unroll
    for (int e = 0; e < 4; e++) x[e] = scale * x[e] + bias[j][e % 2];
    ApplyActivations(p.activation, 0, x, x);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int64_t at = row0 + row + 8 * half, column = col + 8 * j;
      if (at < p.m && column < p.n)
        *(float2*)(p.c + at * p.n + column) = make_float2(x[2 * half], x[2 * half + 1]);
    }
  }
#endif
}

}  // namespace

bool U8Fits(const Gemm& p) {
  return p.u8 == U8Operand::kA && !p.trans_a && p.trans_b && p.precision == Precision::kTf32 &&
         p.k > 0 && p.k <= kMaxK && p.k % 16 == 0 && p.n % 2 == 0 && !p.sums &&
         !p.epilogue.gradient && Aligned16(p.a) && Aligned16(p.b) && Aligned16(p.c) &&
         !*WgmmaError(p.ctx.device_id);
}

void RunU8(const char* op, const Gemm& p, DLStream stream) {
  const unsigned blocks = (unsigned)(CeilDiv(p.m, kTileM) * CeilDiv(p.n, kTileN));
  const size_t nbytes =
      kAlignment + Panels((int)p.k) * kPanelNbytes + kTileM * RowPitch((int)p.k) + kSumsNbytes;
  const CUtensorMap map = BoxMap(op, DL_FLOAT32, p.b, p.k, p.n, p.k, 1, kTileN);
  const U8Product product = {(const uint8_t*)p.a,
                             p.scale,
                             p.epilogue.bias,
                             p.c,
                             (int)p.m,
                             (int)p.n,
                             (int)p.k,
                             p.epilogue.activation,
                             InputsAreReady(0, 1)};
  LaunchSmall(op, U8Kernel, blocks, 1, kU8Threads, nbytes, true, stream, map, product);
}

}  // namespace hopper
}  // namespace cuda
}  // namespace dlsys
