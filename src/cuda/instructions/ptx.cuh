// What the GPU does and C++ has no name for: one function an instruction. What an older GPU lacks
// is done otherwise or left out, as said. src/emulator/cuda/instructions/ptx.cuh has the same
// functions for a CPU.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "math/storage.h"

namespace dlsys {
namespace cuda {

// The shared memory that a launch asked for, at a multiple of 16 bytes.
template <class T>
__device__ __forceinline__ T* DynamicShared() {
  extern __shared__ __align__(16) unsigned char dynamic_shared[];
  return (T*)dynamic_shared;
}

// Writes four floats, aligned as one: the compiler may take them apart, and then lanes that write
// quads side by side meet in the banks.
__device__ __forceinline__ void StoreQuad(float* shared, float x, float y, float z, float w) {
  const unsigned at = (unsigned)__cvta_generic_to_shared(shared);
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at), "f"(x), "f"(y), "f"(z), "f"(w)
               : "memory");
}

// The same to global memory, where parts of what lanes write side by side would be parts of
// sectors.
__device__ __forceinline__ void StoreQuadTo(float* p, float x, float y, float z, float w) {
  asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(p)),
               "f"(x), "f"(y), "f"(z), "f"(w)
               : "memory");
}

// Byte k of a word as a float: as the last bits of 2^23 and more, less 2^23, which is no conversion
// of the few that a multiprocessor makes at a time.
__device__ __forceinline__ float ByteToFloat(unsigned word, int k) {
  return __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440 + k)) - 8388608.f;
}

// ---- functions of the special function unit ----

// 2^x, to about 2 ulp; results below the smallest normal number are 0.
__device__ __forceinline__ float ExpTwo(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// log2 x, to about 2^-22; that of numbers below the smallest normal one is -inf.
__device__ __forceinline__ float LogTwo(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// 1 / x, to about 1 ulp; results below the smallest normal number are 0.
__device__ __forceinline__ float Reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The larger of two numbers, NaN where one of them is.
__device__ __forceinline__ float MaxOrNan(float a, float b) {
#if __CUDA_ARCH__ >= 800
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
#else
  return a != a || a > b ? a : b;
#endif
}

// ---- copies to shared memory that are under way while the thread goes on ----

// Begins to copy 16 bytes, both sides aligned, or writes zeros. Before sm_80 it is done on return.
__device__ __forceinline__ void CopyAsync16(float* shared, const float* p, bool valid) {
#if __CUDA_ARCH__ >= 800
  const unsigned at = (unsigned)__cvta_generic_to_shared(shared);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(p),
               "r"(valid ? 16 : 0)
               : "memory");
#else
  *(float4*)shared = valid ? *(const float4*)p : make_float4(0.f, 0.f, 0.f, 0.f);
#endif
}

// The same for one float.
__device__ __forceinline__ void CopyAsync4(float* shared, const float* p, bool valid) {
#if __CUDA_ARCH__ >= 800
  const unsigned at = (unsigned)__cvta_generic_to_shared(shared);
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(at), "l"(p), "r"(valid ? 4 : 0)
               : "memory");
#else
  *shared = valid ? *p : 0.f;
#endif
}

// Closes a batch of this thread's copies; WaitForCopies<n> waits for all but the last n batches.
__device__ __forceinline__ void CloseCopies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int kLeft>
__device__ __forceinline__ void WaitForCopies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
#endif
}

// ---- copies of many bytes by one thread, from sm_90 on; before, they are done on return ----

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr bool kHasBulkCopies = false;
#else
constexpr bool kHasBulkCopies = true;
#endif

// Where the threads of a block wait for all of its copies: one thread makes it, all see that, each
// begins copies and arrives with the bytes of its own, and then waits for the phase, 0 and 1 in
// turn. Whoever has waited has met all other threads.
struct Arrivals {
  uint64_t state;
};

__device__ __forceinline__ void MakeArrivals(Arrivals* arrivals, int threads) {
#if __CUDA_ARCH__ >= 900
  const unsigned at = (unsigned)__cvta_generic_to_shared(arrivals);
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(threads) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

// Both sides are aligned to 16 bytes, of which there are whole ones.
__device__ __forceinline__ void CopyBulk(float* shared, const float* p, int nbytes,
                                         Arrivals* arrivals) {
#if __CUDA_ARCH__ >= 900
  const unsigned to = (unsigned)__cvta_generic_to_shared(shared);
  const unsigned at = (unsigned)__cvta_generic_to_shared(arrivals);
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(__cvta_generic_to_global(p)), "r"(nbytes), "r"(at)
      : "memory");
#else
  for (int i = 0; i < nbytes / 16; i++) ((float4*)shared)[i] = ((const float4*)p)[i];
#endif
}

// What this thread has read or written of shared memory comes before bulk copies to there.
__device__ __forceinline__ void LetBulkFollow() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

__device__ __forceinline__ void Arrive(Arrivals* arrivals, int nbytes) {
#if __CUDA_ARCH__ >= 900
  const unsigned at = (unsigned)__cvta_generic_to_shared(arrivals);
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(nbytes)
               : "memory");
#endif
}

__device__ __forceinline__ void WaitForArrivals(Arrivals* arrivals, int phase) {
#if __CUDA_ARCH__ >= 900
  const unsigned at = (unsigned)__cvta_generic_to_shared(arrivals);
  unsigned done;
  do {
    asm volatile(
        "{ .reg .pred done;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done; }"
        : "=r"(done)
        : "r"(at), "r"(phase)
        : "memory");
  } while (!done);
#else
  __syncthreads();
#endif
}

// ---- tensor cores, from sm_80 on ----

// Rounds to the 10 bits of mantissa that tensor cores read, to nearest, halves away from zero; what
// is in the bits below, which they leave out, is anything. cvt.rna is three instructions.
__device__ __forceinline__ float RoundedToTf32(float x) {
  return fabsf(x) < INFINITY ? __uint_as_float(__float_as_uint(x) + 0x1000u) : x;
}

// sums (16, 8) += a (16, 8) b (8, 8), by all lanes of a warp. Lane l holds of a the rows l / 4 and
// l / 4 + 8 at the depths l % 4 and l % 4 + 4, of b those depths at column l / 4, of the sums those
// rows at the columns l % 4 * 2 and the next.
__device__ __forceinline__ void MultiplyAddTf32(const float (&a)[4], const float (&b)[2],
                                                float (&sums)[4]) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])),
        "r"(__float_as_uint(a[3])), "r"(__float_as_uint(b[0])), "r"(__float_as_uint(b[1])));
#endif
}

// The same over products of two numbers of 16 bits in a word: sums (16, 8) += a (16, 16) b (16, 8).
// Lane l holds of a the rows l / 4 and l / 4 + 8 at the depths l % 4 * 2 and the next, then both
// rows 8 deeper, of b those depths, then 8 deeper, at column l / 4, of the sums what it holds
// above.
template <class T>
__device__ __forceinline__ void MultiplyAdd16Bit(const uint32_t (&a)[4], const uint32_t (&b)[2],
                                                 float (&sums)[4]) {
#if __CUDA_ARCH__ >= 800
  if constexpr (std::is_same_v<T, bfloat16>)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

// Reads four matrices (8, 8) of 16 bits from shared memory, of each of which eight neighboring
// lanes name the rows, 16 bytes aligned as such: lane l gets of each row l / 4 at the columns l % 4
// * 2 and the next, or with kTransposed column l / 4 at those rows.
template <bool kTransposed>
__device__ __forceinline__ void LoadMatrices(const void* row, uint32_t (&words)[4]) {
#if __CUDA_ARCH__ >= 800
  const unsigned at = (unsigned)__cvta_generic_to_shared(row);
  if constexpr (kTransposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(at)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(at)
                 : "memory");
#endif
}

// ---- between blocks ----

// Adds one and returns what was there; whoever finds a block counted sees what its thread wrote
// before, and so do those that this thread tells.
__device__ __forceinline__ unsigned CountUp(unsigned* count) {
#if __CUDA_ARCH__ >= 700
  unsigned before;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;"
               : "=r"(before)
               : "l"(__cvta_generic_to_global(count))
               : "memory");
  return before;
#else
  __threadfence();
  const unsigned before = atomicAdd(count, 1u);
  __threadfence();
  return before;
#endif
}

// ---- clusters of blocks, from sm_90 on ----

// Waits for the other blocks of the cluster, and sees what they wrote.
__device__ __forceinline__ void MeetCluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Waits until the other blocks of the cluster no longer read this one's memory.
__device__ __forceinline__ void LeaveCluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
}

// The same place in the shared memory of another block of the cluster.
__device__ __forceinline__ const float* OfPeer(const float* shared, int peer) {
#if __CUDA_ARCH__ >= 900
  uint64_t at;
  asm("mapa.u64 %0, %1, %2;" : "=l"(at) : "l"(shared), "r"(peer));
  return (const float*)at;
#else
  return shared;
#endif
}

// ---- programmatic dependent launch (PDL), from sm_90 on ----

// Waits until the kernels that this one depends on are done; before it, a kernel launched by PDL
// may touch no memory but its ready inputs.
__device__ __forceinline__ void GridDependencySynchronize() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the dependent kernel be set up once all blocks have come this far; without it, once they are
// done. Long kernels call it near the end: blocks that wait occupy multiprocessors.
__device__ __forceinline__ void TriggerProgrammaticLaunch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

}  // namespace cuda
}  // namespace dlsys
