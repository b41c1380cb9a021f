// src/cuda/instructions/hopper.cuh for a CPU; see there. Copies and products that are asynchronous
// happen at once or as late as they may, by turns of the block, so that a missing wait shows. What
// has loops over elements is in tensor_cores.cc.
#pragma once
#include <cuda.h>

#include <array>
#include <mutex>
#include <type_traits>

#include "cuda/instructions/ptx.cuh"
#include "math/storage.h"

namespace dlsys {
namespace cuda {
namespace hopper {

inline uint32_t SharedAddress(const void* p) { return emulator::SharedAddress(p); }

// ---- barriers ----

struct MemoryBarrier {
  uint16_t expected, pending;  // arrivals of a phase
  int32_t nbytes : 31;         // that copies have to bring yet
  uint32_t phase : 1;
};
static_assert(sizeof(MemoryBarrier) == sizeof(uint64_t), "as large as the GPU's");

inline std::mutex of_barriers;  // one for all that is done with them, by whichever function

// Calls f with a barrier of a block, alone: blocks of a cluster run at a time.
template <class F>
auto WithBarrier(uint32_t barrier, int rank, F&& f) {
  std::lock_guard<std::mutex> lock(of_barriers);
  auto& it = *(MemoryBarrier*)emulator::SharedAt(barrier, rank);
  const auto result = f(it);
  if (it.pending == 0 && it.nbytes == 0) {
    it.pending = it.expected;
    it.phase ^= 1u;
  }
  return result;
}
inline void CountBytes(uint32_t barrier, int rank, int nbytes) {
  WithBarrier(barrier, rank, [=](MemoryBarrier& it) { return it.nbytes += nbytes; });
}

inline void InitBarrier(uint32_t barrier, int arrivals) {
  *(MemoryBarrier*)emulator::SharedAt(barrier) = {(uint16_t)arrivals, (uint16_t)arrivals, 0, 0};
}
inline void PublishBarriers() {}
inline void ArriveExpecting(uint32_t barrier, uint32_t nbytes) {
  WithBarrier(barrier, emulator::ClusterRank(), [=](MemoryBarrier& it) {
    it.nbytes += (int)nbytes;
    return it.pending--;
  });
}
inline void ArriveAt(uint32_t barrier, uint32_t rank) {
  WithBarrier(barrier, (int)rank, [](MemoryBarrier& it) { return it.pending--; });
}
inline void Arrive(uint32_t barrier) { ArriveAt(barrier, (uint32_t)emulator::ClusterRank()); }
inline void WaitForPhase(uint32_t barrier, uint32_t parity) {
  const int rank = emulator::ClusterRank();
  emulator::WaitUntil([=] {
    return WithBarrier(barrier, rank, [=](MemoryBarrier& it) { return it.phase != parity; });
  });
}

inline unsigned LoadAcquire(const unsigned* count) {
  return __atomic_load_n(count, __ATOMIC_ACQUIRE);
}
inline void CountReleased(unsigned* count) { atomicAdd(count, 1u); }
inline void CountReleased(unsigned* count, unsigned last) {
  unsigned now = LoadAcquire(count);
  while (!__atomic_compare_exchange_n(count, &now, now >= last ? 0 : now + 1, false,
                                      __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
  }
}
inline void FenceGlobalForCopies() {}

inline void SyncThreads(int number, int threads) { emulator::MeetNumbered(number, threads); }
inline void SyncThreadsUnaligned(int number, int threads) { SyncThreads(number, threads); }
inline void ArriveThreads(int number, int threads) { emulator::ArriveNumbered(number, threads); }

inline uint32_t ClusterRank() { return (uint32_t)emulator::ClusterRank(); }

template <int kRegisters>
void ReduceRegisters() {}
template <int kRegisters>
void RaiseRegisters() {}

// ---- tile copies (TMA) ----

// Where the swizzle of 128 bytes keeps what has an address.
inline uint32_t Swizzled(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

using Coordinates = std::array<int, 4>;  // of a box, which is 1 long in the fourth axis
using Distances = std::array<int, 2>;    // from a pixel along w and h

void LoadBoxAt(uint32_t to, const CUtensorMap* map, uint32_t barrier, const Coordinates& at,
               bool multicast, const Distances& by = {});
template <bool kMulticast>
void LoadBox(uint32_t to, const CUtensorMap* map, uint32_t barrier, int x, int y, int z) {
  LoadBoxAt(to, map, barrier, {x, y, z}, kMulticast);
}
inline void LoadBox(uint32_t to, const CUtensorMap* map, uint32_t barrier, int x, int y, int z,
                    int w) {
  LoadBoxAt(to, map, barrier, {x, y, z, w}, false);
}
template <bool kMulticast>
void LoadPixels(uint32_t to, const CUtensorMap* map, uint32_t barrier, int c, int w, int h, int n,
                int by_w, int by_h) {
  LoadBoxAt(to, map, barrier, {c, w, h, n}, kMulticast, {by_w, by_h});
}
inline void LoadBytes(uint32_t to, const void* from, uint32_t nbytes, uint32_t barrier) {
  const int rank = emulator::ClusterRank();
  emulator::Background([=] {
    memcpy(emulator::SharedAt(to, rank), from, nbytes);
    CountBytes(barrier, rank, -(int)nbytes);
  });
}
void StoreBox(const CUtensorMap* map, uint32_t from, int x, int y, int z, int w = 0);
inline void StorePixels(const CUtensorMap* map, uint32_t from, int c, int w, int h, int n) {
  StoreBox(map, from, c, w, h, n);
}
inline void StoreBytes(void* to, uint32_t from, uint32_t nbytes) {
  emulator::Begin(emulator::Unit::kStores, [=] { memcpy(to, emulator::SharedAt(from), nbytes); });
}
inline void AddFloats(float* to, uint32_t from, uint32_t nbytes) {
  emulator::Begin(emulator::Unit::kStores, [=] {
    const float* const added = (const float*)emulator::SharedAt(from);
    for (uint32_t k = 0; k < nbytes / sizeof(float); k++) to[k] += added[k];
  });
}
inline void CloseStores() { emulator::CloseGroup(emulator::Unit::kStores); }
template <int kLeft = 0>
void WaitForStoresReads() {
  emulator::WaitForGroups(emulator::Unit::kStores, kLeft);
}
inline void WaitForStores() { emulator::WaitForGroups(emulator::Unit::kStores, 0); }

void StoreMatrices(uint32_t to, const uint32_t (&x)[4]);

template <class T>
uint32_t Packed(float low, float high) {
  return (uint32_t)T(high).bits << 16 | T(low).bits;
}

// ---- ordinary copies ----

template <int kNbytes>
void CopyAsync(void* shared, const void* p) {
  emulator::CopyLater((float*)shared, (const float*)p, kNbytes / (int)sizeof(float), true);
}
inline void PrefetchToL2(const void*) {}

// ---- products of a warpgroup (wgmma) ----

inline uint64_t Descriptor(uint32_t address, uint32_t leading, uint32_t stride) {
  return (uint64_t)((address & 0x3FFFF) >> 4) | (uint64_t)(leading >> 4) << 16 |
         (uint64_t)(stride >> 4) << 32 | (uint64_t)1 << 62;
}
inline uint64_t Advanced(uint64_t descriptor, uint32_t nbytes) {
  return (descriptor >> 32 << 32) | ((uint32_t)descriptor + (nbytes >> 4));
}

// Its threads begin and end products together: none may free what others have yet to read.
inline void BeginProducts() { emulator::MeetWarpgroup(); }
inline void CloseProducts() { emulator::CloseGroup(emulator::Unit::kProducts); }
template <int kLeft>
void WaitForProducts() {
  emulator::WaitForGroups(emulator::Unit::kProducts, kLeft);
  emulator::MeetWarpgroup();
}

// The elements along K of the two rows of A that a thread multiplies, as float: from shared memory,
// or from the registers of its warp.
template <class T>
struct OfA {
  float rows[2][32 / sizeof(T)];
};
template <class T>
OfA<T> ReadRows(uint64_t a, bool across);
template <class T>
OfA<T> ShownRows(const uint32_t (&a)[4]);

// What a thread's accumulators gain from them and from B, which may lie across.
template <class T>
void AddProducts(float (*sums)[4], int blocks, const OfA<T>& a, uint64_t b, bool across,
                 bool accumulate);

template <class T, bool kAlongM, bool kAlongN, int kBlocks>
void MultiplyAdd(float (&d)[kBlocks][4], uint64_t a, uint64_t b, bool accumulate) {
  emulator::Begin(emulator::Unit::kProducts, [=, sums = d] {
    AddProducts(sums, kBlocks, ReadRows<T>(a, kAlongM), b, kAlongN, accumulate);
  });
}

template <class T, bool kAlongN, int kBlocks>
void MultiplyAdd(float (&d)[kBlocks][4], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  emulator::Begin(emulator::Unit::kProducts, [=, sums = d, of_a = ShownRows<T>(a)] {
    AddProducts(sums, kBlocks, of_a, b, kAlongN, accumulate);
  });
}

}  // namespace hopper
}  // namespace cuda
}  // namespace dlsys
