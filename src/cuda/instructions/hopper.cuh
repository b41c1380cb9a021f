// What sm_90a adds: barriers in shared memory that count bytes (mbarrier), tile copies by the
// tensor memory accelerator (TMA), and products of a warpgroup's 128 threads (wgmma). One function
// an instruction, as ptx.cuh has them for all GPUs; src/emulator/cuda/instructions/hopper.cuh has
// the same for a CPU. Shared memory is named by its 32-bit address, which is what the instructions
// take.
#pragma once
#include <cuda.h>

#include <type_traits>

#include "cuda/instructions/ptx.cuh"
#include "math/storage.h"

namespace dlsys {
namespace cuda {
namespace hopper {

__device__ __forceinline__ uint32_t SharedAddress(const void* p) {
  return (uint32_t)__cvta_generic_to_shared(p);
}

// ---- barriers ----

__device__ __forceinline__ void InitBarrier(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes the barriers that this thread has initialized known to the cluster and to the TMA.
__device__ __forceinline__ void PublishBarriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Arrives, and lets the phase end only after `nbytes` bytes of copies.
__device__ __forceinline__ void ArriveExpecting(uint32_t barrier, uint32_t nbytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(nbytes)
               : "memory");
}
__device__ __forceinline__ void Arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives at the barrier at the same address in block `rank` of the cluster.
__device__ __forceinline__ void ArriveAt(uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{ .reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote]; }" ::"r"(barrier),
      "r"(rank)
      : "memory");
}
// Waits for the end of the phase of this parity; the waiting thread must not be two phases ahead.
__device__ __forceinline__ void WaitForPhase(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{ .reg .pred done;\n"
      "WAIT_%=:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra DONE_%=;\n"
      "bra WAIT_%=;\n"
      "DONE_%=: }" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Reads a counter; what was written before it was counted up is seen after.
__device__ __forceinline__ unsigned LoadAcquire(const unsigned* count) {
  unsigned now;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
               : "=r"(now)
               : "l"(__cvta_generic_to_global(count))
               : "memory");
  return now;
}

// Counts up; whoever finds that by LoadAcquire sees what this thread wrote before, and what others
// did of which it knows.
__device__ __forceinline__ void CountReleased(unsigned* count) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(__cvta_generic_to_global(count))
               : "memory");
}
// The same, from `last` on to zero.
__device__ __forceinline__ void CountReleased(unsigned* count, unsigned last) {
  asm volatile("red.release.gpu.global.inc.u32 [%0], %1;" ::"l"(__cvta_generic_to_global(count)),
               "r"(last)
               : "memory");
}
// Orders ordinary accesses of global memory, of this thread or known to it, and copies by the TMA.
__device__ __forceinline__ void FenceGlobalForCopies() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// Barriers of `threads` threads of a block by their number, 1 to 15; 0 is __syncthreads.
__device__ __forceinline__ void SyncThreads(int number, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
// The same where warps reach the barrier at different instructions of the program: `bar.sync` is
// the aligned form, which promises that all execute one and the same.
__device__ __forceinline__ void SyncThreadsUnaligned(int number, int threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
__device__ __forceinline__ void ArriveThreads(int number, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// The rank of this block in its cluster.
__device__ __forceinline__ uint32_t ClusterRank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// A warpgroup gives up registers, or takes what others gave up.
template <int kRegisters>
__device__ __forceinline__ void ReduceRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void RaiseRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// ---- tile copies (TMA) ----

// Copies the box of a tensor map at (x, y, z) to shared memory, here or to the same address in all
// blocks of a cluster of two (multicast); its bytes count at the barrier of each.
template <bool kMulticast>
__device__ __forceinline__ void LoadBox(uint32_t to, const CUtensorMap* map, uint32_t barrier,
                                        int x, int y, int z) {
  if constexpr (kMulticast)
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(to),
        "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "h"((uint16_t)3)
        : "memory");
  else
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
        "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z)
        : "memory");
}
// The same at (x, y, z, w) of a map of four axes, here alone.
__device__ __forceinline__ void LoadBox(uint32_t to, const CUtensorMap* map, uint32_t barrier,
                                        int x, int y, int z, int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}
// Copies the pixels of a map of images (im2col) that follow each other from (w, h, n) on, each read
// `by_w` and `by_h` further, and of them the channels from c on; multicast as above.
template <bool kMulticast>
__device__ __forceinline__ void LoadPixels(uint32_t to, const CUtensorMap* map, uint32_t barrier,
                                           int c, int w, int h, int n, int by_w, int by_h) {
  if constexpr (kMulticast)
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%3, %4, %5, %6}], [%2], {%7, %8}, %9;" ::"r"(to),
        "l"(map), "r"(barrier), "r"(c), "r"(w), "r"(h), "r"(n), "h"((uint16_t)by_w),
        "h"((uint16_t)by_h), "h"((uint16_t)3)
        : "memory");
  else
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %5, %6}], [%2], {%7, %8};" ::"r"(to),
        "l"(map), "r"(barrier), "r"(c), "r"(w), "r"(h), "r"(n), "h"((uint16_t)by_w),
        "h"((uint16_t)by_h)
        : "memory");
}
__device__ __forceinline__ void StorePixels(const CUtensorMap* map, uint32_t from, int c, int w,
                                            int h, int n) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.im2col_no_offs.bulk_group"
      " [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
      "r"(from), "r"(c), "r"(w), "r"(h), "r"(n)
      : "memory");
}
// Copies bytes that lie in a row; both sides and their number are multiples of 16.
__device__ __forceinline__ void LoadBytes(uint32_t to, const void* from, uint32_t nbytes,
                                          uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(__cvta_generic_to_global(from)), "r"(nbytes), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void StoreBox(const CUtensorMap* map, uint32_t from, int x, int y,
                                         int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
      "r"(from), "r"(x), "r"(y), "r"(z)
      : "memory");
}
__device__ __forceinline__ void StoreBox(const CUtensorMap* map, uint32_t from, int x, int y, int z,
                                         int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
          map),
      "r"(from), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}
// Stores bytes that lie in a row, or adds floats to those in memory; as LoadBytes.
__device__ __forceinline__ void StoreBytes(void* to, uint32_t from, uint32_t nbytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(
                   __cvta_generic_to_global(to)),
               "r"(from), "r"(nbytes)
               : "memory");
}
__device__ __forceinline__ void AddFloats(float* to, uint32_t from, uint32_t nbytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(
                   __cvta_generic_to_global(to)),
               "r"(from), "r"(nbytes)
               : "memory");
}
// Closes this thread's group of stores. One wait is for the reads of shared memory of all but the
// last kLeft groups, the other for the stores themselves.
__device__ __forceinline__ void CloseStores() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
template <int kLeft = 0>
__device__ __forceinline__ void WaitForStoresReads() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kLeft) : "memory");
}
__device__ __forceinline__ void WaitForStores() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// Stores four 8 x 8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix
// l / 8, and holds of each matrix the elements (l / 4, l % 4 * 2) and the next.
__device__ __forceinline__ void StoreMatrices(uint32_t to, const uint32_t (&x)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
               "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}

// Two floats rounded to 16 bits each, the first in the lower half.
template <class T>
__device__ __forceinline__ uint32_t Packed(float low, float high) {
  uint32_t bits;
  if constexpr (std::is_same_v<T, bfloat16>)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}

// ---- ordinary copies ----

// Begins to copy 8 or 16 bytes, aligned as one; CloseCopies and WaitForCopies as in ptx.cuh.
template <int kNbytes>
__device__ __forceinline__ void CopyAsync(void* shared, const void* p) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(SharedAddress(shared)), "l"(p),
               "n"(kNbytes)
               : "memory");
}
// Asks L2 to fetch the line of an address.
__device__ __forceinline__ void PrefetchToL2(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

// ---- products of a warpgroup (wgmma) ----

// Describes an operand in shared memory with a 128-byte swizzle, as TMA writes it. `leading` and
// `stride` are in bytes; PTX ISA, "Matrix descriptor format".
__device__ __forceinline__ uint64_t Descriptor(uint32_t address, uint32_t leading,
                                               uint32_t stride) {
  return (uint64_t)((address & 0x3FFFF) >> 4) | (uint64_t)(leading >> 4) << 16 |
         (uint64_t)(stride >> 4) << 32 | (uint64_t)1 << 62;
}

// The same `nbytes` further on. By halves, since a sum of 64 bits would carry into the upper one.
__device__ __forceinline__ uint64_t Advanced(uint64_t descriptor, uint32_t nbytes) {
  return (descriptor >> 32 << 32) | ((uint32_t)descriptor + (nbytes >> 4));
}

// Before the first product that reads accumulators or shared memory written by ordinary code.
__device__ __forceinline__ void BeginProducts() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void CloseProducts() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kLeft>
__device__ __forceinline__ void WaitForProducts() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}

#define DLSYS_REGS4(d, i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define DLSYS_REGS16(d, i) \
  DLSYS_REGS4(d, i), DLSYS_REGS4(d, i + 1), DLSYS_REGS4(d, i + 2), DLSYS_REGS4(d, i + 3)
#define DLSYS_REGS64(d, i) \
  DLSYS_REGS16(d, i), DLSYS_REGS16(d, i + 4), DLSYS_REGS16(d, i + 8), DLSYS_REGS16(d, i + 12)
#define DLSYS_NAMES16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define DLSYS_NAMES32 \
  DLSYS_NAMES16       \
  ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define DLSYS_NAMES64                                                                             \
  DLSYS_NAMES32                                                                                   \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54," \
  "%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define DLSYS_NAMES96                                                                             \
  DLSYS_NAMES64                                                                                   \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86," \
  "%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define DLSYS_NAMES128                                                                            \
  DLSYS_NAMES64                                                                                   \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86," \
  "%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,"  \
  "%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,"    \
  "%126,%127"
// `at` numbers the operands behind the accumulators: the descriptors, whether to accumulate, and
// for 16-bit types whether A and B lie along M and N.
#define DLSYS_WGMMA(shape, type, regs, names, a0, a1, a2, tail, ...)                           \
  asm volatile("{ .reg .pred p;\nsetp.ne.b32 p, " a2                                           \
               ", 0;\n"                                                                        \
               "wgmma.mma_async.sync.aligned." shape ".f32." type "." type " {" names "}, " a0 \
               ", " a1 ", p, 1, 1" tail "; }"                                                  \
               : regs                                                                          \
               : "l"(a), "l"(b), "r"((int)accumulate)__VA_OPT__(, ) __VA_ARGS__)
#define DLSYS_WGMMA_TYPES(n, regs, names, a0, a1, a2, a3, a4)                                   \
  if constexpr (std::is_same_v<T, float>)                                                       \
    DLSYS_WGMMA("m64n" #n "k8", "tf32", DLSYS_UNPACK regs, names, a0, a1, a2, "");              \
  else if constexpr (std::is_same_v<T, bfloat16>)                                               \
    DLSYS_WGMMA("m64n" #n "k16", "bf16", DLSYS_UNPACK regs, names, a0, a1, a2, ", " a3 ", " a4, \
                "n"((int)kAlongM), "n"((int)kAlongN));                                          \
  else                                                                                          \
    DLSYS_WGMMA("m64n" #n "k16", "f16", DLSYS_UNPACK regs, names, a0, a1, a2, ", " a3 ", " a4,  \
                "n"((int)kAlongM), "n"((int)kAlongN))
#define DLSYS_UNPACK(...) __VA_ARGS__

// d (64, 8 kBlocks) = A (64, 32 bytes of K) B, plus d with `accumulate`; T is bfloat16, float16 or
// float, which is read as tf32. Thread t of the warpgroup holds in d[j] the columns 8 j + t % 4 * 2
// and the next of row t / 32 * 16 + t % 32 / 4, and the same of the row 8 below.
template <class T, bool kAlongM, bool kAlongN, int kBlocks>
__device__ __forceinline__ void MultiplyAdd(float (&d)[kBlocks][4], uint64_t a, uint64_t b,
                                            bool accumulate) {
  static_assert(kBlocks == 1 || kBlocks == 4 || kBlocks == 8 || kBlocks == 16 || kBlocks == 24 ||
                    kBlocks == 32,
                "8 or 32 to 256 columns");
  static_assert(!std::is_same_v<T, float> || !(kAlongM || kAlongN), "tf32 lies along K");
  if constexpr (kBlocks == 32) {
    DLSYS_WGMMA_TYPES(256, (DLSYS_REGS64(d, 0), DLSYS_REGS64(d, 16)), DLSYS_NAMES128, "%128",
                      "%129", "%130", "%131", "%132");
  } else if constexpr (kBlocks == 24) {
    DLSYS_WGMMA_TYPES(192, (DLSYS_REGS64(d, 0), DLSYS_REGS16(d, 16), DLSYS_REGS16(d, 20)),
                      DLSYS_NAMES96, "%96", "%97", "%98", "%99", "%100");
  } else if constexpr (kBlocks == 16) {
    DLSYS_WGMMA_TYPES(128, (DLSYS_REGS64(d, 0)), DLSYS_NAMES64, "%64", "%65", "%66", "%67", "%68");
  } else if constexpr (kBlocks == 8) {
    DLSYS_WGMMA_TYPES(64, (DLSYS_REGS16(d, 0), DLSYS_REGS16(d, 4)), DLSYS_NAMES32, "%32", "%33",
                      "%34", "%35", "%36");
  } else if constexpr (kBlocks == 4) {
    DLSYS_WGMMA_TYPES(32, (DLSYS_REGS16(d, 0)), DLSYS_NAMES16, "%16", "%17", "%18", "%19", "%20");
  } else {
    DLSYS_WGMMA_TYPES(8, (DLSYS_REGS4(d, 0)), "%0,%1,%2,%3", "%4", "%5", "%6", "%7", "%8");
  }
}

#define DLSYS_WGMMA_REGISTERS(n, regs, names, a0, a1, a2, a3, b0, p0, t0)                        \
  if constexpr (std::is_same_v<T, float>)                                                        \
    DLSYS_WGMMA_OF_REGISTERS(#n "k8", "tf32", DLSYS_UNPACK regs, names, a0, a1, a2, a3, b0, p0,  \
                             "");                                                                \
  else if constexpr (std::is_same_v<T, bfloat16>)                                                \
    DLSYS_WGMMA_OF_REGISTERS(#n "k16", "bf16", DLSYS_UNPACK regs, names, a0, a1, a2, a3, b0, p0, \
                             ", " t0, "n"((int)kAlongN));                                        \
  else                                                                                           \
    DLSYS_WGMMA_OF_REGISTERS(#n "k16", "f16", DLSYS_UNPACK regs, names, a0, a1, a2, a3, b0, p0,  \
                             ", " t0, "n"((int)kAlongN))
#define DLSYS_WGMMA_OF_REGISTERS(shape, type, regs, names, a0, a1, a2, a3, b0, p0, tail, ...) \
  asm volatile("{ .reg .pred p;\nsetp.ne.b32 p, " p0                                          \
               ", 0;\n"                                                                       \
               "wgmma.mma_async.sync.aligned.m64n" shape ".f32." type "." type " {" names     \
               "}, {" a0 "," a1 "," a2 "," a3 "}, " b0 ", p, 1, 1" tail "; }"                 \
               : regs                                                                         \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),                          \
                 "r"((int)accumulate)__VA_OPT__(, ) __VA_ARGS__)

// The same with A (64, 16) of 16-bit elements in registers: thread t of the warpgroup holds the
// columns t % 4 * 2 and the next of row t / 32 * 16 + t % 32 / 4 in a[0], of the row 8 below in
// a[1], and those 8 columns on in a[2] and a[3]. Of float, which is read as tf32, A is (64, 8) and
// a[0] holds column t % 4, a[2] the one 4 columns on.
template <class T, bool kAlongN, int kBlocks>
__device__ __forceinline__ void MultiplyAdd(float (&d)[kBlocks][4], const uint32_t (&a)[4],
                                            uint64_t b, bool accumulate) {
  static_assert(kBlocks == 4 || kBlocks == 8 || kBlocks == 16 || kBlocks == 32,
                "32 to 256 columns");
  static_assert(!std::is_same_v<T, float> || !kAlongN, "tf32 lies along K");
  if constexpr (kBlocks == 32) {
    DLSYS_WGMMA_REGISTERS(256, (DLSYS_REGS64(d, 0), DLSYS_REGS64(d, 16)), DLSYS_NAMES128, "%128",
                          "%129", "%130", "%131", "%132", "%133", "%134");
  } else if constexpr (kBlocks == 16) {
    DLSYS_WGMMA_REGISTERS(128, (DLSYS_REGS64(d, 0)), DLSYS_NAMES64, "%64", "%65", "%66", "%67",
                          "%68", "%69", "%70");
  } else if constexpr (kBlocks == 8) {
    DLSYS_WGMMA_REGISTERS(64, (DLSYS_REGS16(d, 0), DLSYS_REGS16(d, 4)), DLSYS_NAMES32, "%32", "%33",
                          "%34", "%35", "%36", "%37", "%38");
  } else {
    DLSYS_WGMMA_REGISTERS(32, (DLSYS_REGS16(d, 0)), DLSYS_NAMES16, "%16", "%17", "%18", "%19",
                          "%20", "%21", "%22");
  }
}

#undef DLSYS_WGMMA_REGISTERS
#undef DLSYS_WGMMA_OF_REGISTERS
#undef DLSYS_REGS4
#undef DLSYS_REGS16
#undef DLSYS_REGS64
#undef DLSYS_NAMES16
#undef DLSYS_NAMES32
#undef DLSYS_NAMES64
#undef DLSYS_NAMES128
#undef DLSYS_NAMES96
#undef DLSYS_WGMMA
#undef DLSYS_WGMMA_TYPES
#undef DLSYS_UNPACK

}  // namespace hopper
}  // namespace cuda
}  // namespace dlsys
