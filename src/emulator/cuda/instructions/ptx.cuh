// src/cuda/instructions/ptx.cuh for a CPU; see there.
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

inline float MaxOrNan(float a, float b) { return a != a || a > b ? a : b; }

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

// In tensor_cores.cc, for each type of 16 bits.
void MultiplyAddTf32(const float (&a)[4], const float (&b)[2], float (&sums)[4]);
template <class T>
void MultiplyAdd16Bit(const uint32_t (&a)[4], const uint32_t (&b)[2], float (&sums)[4]);
template <bool kTransposed>
void LoadMatrices(const void* row, uint32_t (&words)[4]);

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
