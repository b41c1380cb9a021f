// src/cuda/runtime/ptx.cuh for a CPU; see there.
#pragma once
#include <cuda_runtime.h>

#include "math/storage.h"

namespace dlsys {
namespace cuda {

template <class T>
T* DynamicShared() {
  return (T*)emulator::DynamicShared();
}

inline void StoreQuad(float* shared, float x, float y, float z, float w) {
  *(float4*)shared = make_float4(x, y, z, w);
}

inline void StoreQuadTo(float* p, float x, float y, float z, float w) {
  *(float4*)p = make_float4(x, y, z, w);
}

inline float ByteToFloat(unsigned word, int k) { return (float)(word >> 8 * k & 255); }

inline float WithoutSubnormals(float x) { return fabsf(x) < 1.17549435e-38f ? 0.f : x; }
inline float ExpTwo(float x) { return WithoutSubnormals(exp2f(x)); }
inline float LogTwo(float x) { return log2f(WithoutSubnormals(x)); }
inline float Reciprocal(float x) { return WithoutSubnormals(1.f / x); }

inline void CopyAsync16(float* shared, const float* p, bool valid) {
  emulator::CopyLater(shared, p, 4, valid);
}
inline void CopyAsync4(float* shared, const float* p, bool valid) {
  emulator::CopyLater(shared, p, 1, valid);
}
inline void CloseCopies() { emulator::CloseCopies(); }
template <int kLeft>
void WaitForCopies() {
  emulator::WaitForCopies(kLeft);
}

constexpr bool kHasBulkCopies = true;
struct Arrivals {
  uint64_t state;
};
inline void MakeArrivals(Arrivals*, int) {}
inline void CopyBulk(float* shared, const float* p, int nbytes, Arrivals*) {
  emulator::CopyLater(shared, p, nbytes / (int)sizeof(float), true);
}
inline void LetBulkFollow() {}
inline void Arrive(Arrivals*, int) { emulator::CloseCopies(); }
inline void WaitForArrivals(Arrivals*, int) {
  emulator::WaitForCopies(0);
  emulator::MeetBlock();
}

// As tensor cores read it.
inline float CutToTf32(float x) { return __uint_as_float(__float_as_uint(x) & ~0x1fffu); }

inline float RoundedToTf32(float x) {
  return isfinite(x) ? __uint_as_float(__float_as_uint(x) + 0x1000u) : x;
}

inline void MultiplyAddTf32(const float (&a)[4], const float (&b)[2], float (&sums)[4]) {
  struct Factors {
    float a[4], b[2];
  };
  static_assert(sizeof(Factors) <= emulator::kSlotNbytes, "they fit into a slot");
  const int lane = emulator::Lane();
  Factors mine;
  for (int k = 0; k < 4; k++) mine.a[k] = CutToTf32(a[k]);
  for (int k = 0; k < 2; k++) mine.b[k] = CutToTf32(b[k]);
  const emulator::Slots slots = emulator::NextSlots();
  memcpy(slots[lane], &mine, sizeof mine);
  emulator::MeetWarp();
  for (int k = 0; k < 4; k++) {
    const int row = lane / 4 + k / 2 * 8, col = lane % 4 * 2 + k % 2;
    for (int d = 0; d < 8; d++) {
      const auto* left = (const Factors*)slots[row % 8 * 4 + d % 4];
      const auto* right = (const Factors*)slots[col * 4 + d % 4];
      sums[k] += left->a[row / 8 + d / 4 * 2] * right->b[d / 4];
    }
  }
}

template <class T>
float HalfOf(uint32_t word, int half) {
  T value;
  value.bits = (uint16_t)(word >> 16 * half);
  return value;
}

template <class T>
void MultiplyAdd16Bit(const uint32_t (&a)[4], const uint32_t (&b)[2], float (&sums)[4]) {
  struct Factors {
    uint32_t a[4], b[2];
  };
  static_assert(sizeof(Factors) <= emulator::kSlotNbytes, "they fit into a slot");
  const int lane = emulator::Lane();
  Factors mine;
  memcpy(mine.a, a, sizeof a);
  memcpy(mine.b, b, sizeof b);
  const emulator::Slots slots = emulator::NextSlots();
  memcpy(slots[lane], &mine, sizeof mine);
  emulator::MeetWarp();
  for (int k = 0; k < 4; k++) {
    const int row = lane / 4 + k / 2 * 8, col = lane % 4 * 2 + k % 2;
    for (int d = 0; d < 16; d++) {
      const auto* left = (const Factors*)slots[row % 8 * 4 + d % 8 / 2];
      const auto* right = (const Factors*)slots[col * 4 + d % 8 / 2];
      sums[k] += HalfOf<T>(left->a[row / 8 + d / 8 * 2], d % 2) * HalfOf<T>(right->b[d / 8], d % 2);
    }
  }
}

template <bool kTransposed>
void LoadMatrices(const void* row, uint32_t (&words)[4]) {
  const int lane = emulator::Lane();
  const emulator::Slots slots = emulator::NextSlots();
  memcpy(slots[lane], &row, sizeof row);
  emulator::MeetWarp();
  for (int k = 0; k < 4; k++) {
    uint32_t word = 0;
    for (int half = 0; half < 2; half++) {
      const int i = lane / 4, j = lane % 4 * 2 + half;
      const uint16_t* from;
      memcpy(&from, slots[8 * k + (kTransposed ? j : i)], sizeof from);
      word |= (uint32_t)from[kTransposed ? i : j] << 16 * half;
    }
    words[k] = word;
  }
  emulator::MeetWarp();  // what the lanes do to the rows comes behind this
}

inline unsigned CountUp(unsigned* count) { return atomicAdd(count, 1u); }

inline void MeetCluster() { emulator::MeetCluster(); }
inline void LeaveCluster() { emulator::MeetCluster(); }
inline const float* OfPeer(const float* shared, int peer) {
  return (const float*)emulator::OfPeer(shared, peer);
}

inline void GridDependencySynchronize() {}
inline void TriggerProgrammaticLaunch() {}

}  // namespace cuda
}  // namespace dlsys
