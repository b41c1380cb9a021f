// src/cuda/runtime/hopper.cuh for a CPU; see there. Copies and products that are asynchronous
// happen at once or as late as they may, by turns of the block, so that a missing wait shows.
#pragma once
#include <cuda.h>

#include <array>
#include <mutex>
#include <stdexcept>
#include <type_traits>

#include "cuda/runtime/ptx.cuh"
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

inline void SyncThreads(int number, int threads) { emulator::MeetNumbered(number, threads); }
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

// The coordinates of a pixel of an image map from one on, as many positions further as `count`.
inline Coordinates PixelAt(const CUtensorMap& map, const Coordinates& from, uint32_t count,
                           const Distances& by) {
  int64_t carry = count;
  Coordinates at = from;
  for (int k = 0; k < 2; k++) {
    const int distance = from[k + 1] - map.first[k], step = (int)map.step[k];
    if (distance < 0 || distance % step || distance / step >= (int)map.count[k])
      throw std::logic_error("a pixel copy begins at no position of its map");
    carry += distance / step;
    at[k + 1] = map.first[k] + (int)(carry % map.count[k]) * step + by[k];
    carry /= map.count[k];
  }
  at[3] += (int)carry;
  return at;
}

// Calls f with each element of a box that lies inside of the array, and with null for the rest, and
// with its swizzled address in shared memory. `by` is of image maps.
template <class F>
void ForBox(const CUtensorMap& map, uint32_t shared, const Coordinates& origin, const Distances& by,
            F&& f) {
  for (uint32_t at = 0; at < map.box[0] * map.box[1] * map.box[2]; at++) {
    const uint32_t of[4] = {at % map.box[0], at / map.box[0] % map.box[1],
                            at / (map.box[0] * map.box[1]), 0};
    const Coordinates pixel = map.count[0] ? PixelAt(map, origin, of[1], by) : Coordinates{};
    char* element = map.data;
    bool inside = true;
    for (int k = 0; k < map.dimensions; k++) {
      const int64_t index = map.count[0] && k > 0 ? pixel[k] : origin[k] + (int64_t)of[k];
      inside &= index >= 0 && index < (int64_t)map.extents[k];
      element += index * (int64_t)map.strides[k];
    }
    const uint32_t address = shared + at * (uint32_t)map.size;
    f(inside ? element : nullptr, map.swizzled ? Swizzled(address) : address);
  }
}

inline void LoadBoxAt(uint32_t to, const CUtensorMap* map, uint32_t barrier, const Coordinates& at,
                      bool multicast, const Distances& by = {}) {
  const int rank = emulator::ClusterRank();
  emulator::Background([=, map = *map] {
    const int first = multicast ? 0 : rank, last = multicast ? 1 : rank;
    for (int peer = first; peer <= last; peer++) {
      char* const zero = (char*)emulator::SharedAt(to, peer) - to;
      ForBox(map, to, at, by, [&](const char* from, uint32_t address) {
        char* element = zero + address;
        if (from)
          memcpy(element, from, map.size);
        else
          memset(element, 0, map.size);
        if (map.rounds) *(float*)element = CutToTf32(RoundedToTf32(*(float*)element));
      });
      CountBytes(barrier, peer, -(int)(map.box[0] * map.box[1] * map.box[2] * map.size));
    }
  });
}
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
inline void StoreBox(const CUtensorMap* map, uint32_t from, int x, int y, int z, int w = 0) {
  emulator::Begin(emulator::Unit::kStores, [=, map = *map] {
    ForBox(map, from, {x, y, z, w}, {}, [&](char* to, uint32_t address) {
      if (to) memcpy(to, emulator::SharedAt(address), map.size);
    });
  });
}
inline void StorePixels(const CUtensorMap* map, uint32_t from, int c, int w, int h, int n) {
  StoreBox(map, from, c, w, h, n);
}
inline void CloseStores() { emulator::CloseGroup(emulator::Unit::kStores); }
template <int kLeft = 0>
void WaitForStoresReads() {
  emulator::WaitForGroups(emulator::Unit::kStores, kLeft);
}
inline void WaitForStores() { emulator::WaitForGroups(emulator::Unit::kStores, 0); }

inline void StoreMatrices(uint32_t to, const uint32_t (&x)[4]) {
  const int lane = emulator::Lane();
  for (int k = 0; k < 4; k++) {
    const uint32_t row = emulator::FromLane(to, k * 8 + lane / 4);
    memcpy(emulator::SharedAt(row + lane % 4 * 4), &x[k], sizeof x[k]);
  }
}

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

// The elements of an operand along K at a row, or, where it lies across, at a column of its boxes.
template <class T, bool kAcross>
void ReadOperand(uint64_t descriptor, int row, float (&to)[32 / sizeof(T)]) {
  constexpr int kOfBox = 128 / sizeof(T);
  const auto field = [&](int bit) { return (uint32_t)(descriptor >> bit & 0x3FFF) << 4; };
  const uint32_t start = field(0), leading = field(16), stride = field(32);
  const char* const zero = (const char*)emulator::SharedAt(start) - start;  // of its addresses
  for (int k = 0; k < 32 / (int)sizeof(T); k++) {
    const uint32_t at =
        kAcross ? row / kOfBox * leading + k / 8 * stride + k % 8 * 128 + row % kOfBox * sizeof(T)
                : row / 8 * stride + row % 8 * 128 + k * sizeof(T);
    const T* element = (const T*)(zero + Swizzled(start + at));
    to[k] = sizeof(T) == 4 ? CutToTf32((float)*element) : (float)*element;
  }
}

// What a thread's accumulators gain from two rows of A, each 32 bytes of K.
template <class T, bool kAlongN, int kBlocks>
void AddProducts(float (*sums)[4], const float (&of_a)[2][32 / sizeof(T)], uint64_t b,
                 bool accumulate) {
  float of_b[32 / sizeof(T)];
  for (int j = 0; j < kBlocks; j++) {
    for (int e = 0; e < 2; e++) {
      ReadOperand<T, kAlongN>(b, j * 8 + (int)threadIdx.x % 4 * 2 + e, of_b);
      for (int half = 0; half < 2; half++) {
        float& sum = sums[j][half * 2 + e];
        float products = 0;
        for (int k = 0; k < 32 / (int)sizeof(T); k++) products += of_a[half][k] * of_b[k];
        sum = accumulate ? sum + products : products;
      }
    }
  }
}

template <class T, bool kAlongM, bool kAlongN, int kBlocks>
void MultiplyAdd(float (&d)[kBlocks][4], uint64_t a, uint64_t b, bool accumulate) {
  const int thread = (int)threadIdx.x % 128, row = thread / 32 * 16 + thread % 32 / 4;
  emulator::Begin(emulator::Unit::kProducts, [=, sums = d] {
    float of_a[2][32 / sizeof(T)];
    for (int half = 0; half < 2; half++) ReadOperand<T, kAlongM>(a, row + half * 8, of_a[half]);
    AddProducts<T, kAlongN, kBlocks>(sums, of_a, b, accumulate);
  });
}

template <class T, bool kAlongN, int kBlocks>
void MultiplyAdd(float (&d)[kBlocks][4], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  constexpr int kOfWord = 4 / sizeof(T), kDepth = 32 / sizeof(T);
  struct Rows {
    float x[2][kDepth];
  } rows;
  const int lane = emulator::Lane();
  for (int word = 0; word < 8; word++) {
    for (int half = 0; half < 2; half++) {
      const uint32_t bits = emulator::FromLane(a[word / 4 * 2 + half], lane / 4 * 4 + word % 4);
      float* const to = &rows.x[half][word * kOfWord];
      if constexpr (kOfWord == 1) {
        *to = CutToTf32(__uint_as_float(bits));
      } else {
        for (int k = 0; k < kOfWord; k++) {
          T x;
          x.bits = (uint16_t)(bits >> 16 * k);
          to[k] = (float)x;
        }
      }
    }
  }
  emulator::Begin(emulator::Unit::kProducts,
                  [=, sums = d] { AddProducts<T, kAlongN, kBlocks>(sums, rows.x, b, accumulate); });
}

}  // namespace hopper
}  // namespace cuda
}  // namespace dlsys
