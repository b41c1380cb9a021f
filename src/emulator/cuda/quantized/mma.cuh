// src/cuda/quantized/mma.cuh for a CPU.
#pragma once
#include <cuda_runtime.h>

namespace dlsys {
namespace cuda {

inline int32_t AddFourProducts(uint32_t a, uint32_t b, int32_t sum) {
  for (int e = 0; e < 32; e += 8) sum += (int32_t)(uint8_t)(a >> e) * (int8_t)(uint8_t)(b >> e);
  return sum;
}

inline uint32_t FourBytes(uint32_t low, uint32_t high, int shift) {
  return (uint32_t)(((uint64_t)high << 32 | low) >> shift);
}

inline void MultiplyAddBytes(const uint32_t (&a)[4], const uint32_t (&b)[2], int32_t (&sums)[4]) {
  struct Factors {
    uint8_t a[4][4];
    int8_t b[2][4];
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
    for (int d = 0; d < 32; d++) {
      const auto* left = (const Factors*)slots[row % 8 * 4 + d % 16 / 4];
      const auto* right = (const Factors*)slots[col * 4 + d % 16 / 4];
      sums[k] += left->a[row / 8 + d / 16 * 2][d % 4] * right->b[d / 16][d % 4];
    }
  }
}

}  // namespace cuda
}  // namespace dlsys
