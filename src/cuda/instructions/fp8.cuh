// What sm_90a has for floats of 8 bits (math/fp8.h): products of a warpgroup, and conversions. One
// function an instruction; src/emulator/cuda/instructions/fp8.cuh has the same for a CPU.
#pragma once
#include "cuda/instructions/hopper.cuh"
#include "math/fp8.h"

namespace dlsys {
namespace cuda {
namespace hopper {

// Two floats as codes, the first in the lower byte.
template <class T>
__device__ __forceinline__ uint32_t Packed8Bit(float low, float high) {
  uint16_t codes;
  if constexpr (std::is_same_v<T, e4m3>)
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  else
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  return codes;
}

#define DLSYS_REGS4(d, i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define DLSYS_REGS32(d, i)                                                                \
  DLSYS_REGS4(d, i), DLSYS_REGS4(d, i + 1), DLSYS_REGS4(d, i + 2), DLSYS_REGS4(d, i + 3), \
      DLSYS_REGS4(d, i + 4), DLSYS_REGS4(d, i + 5), DLSYS_REGS4(d, i + 6), DLSYS_REGS4(d, i + 7)
#define DLSYS_NAMES64                                                                          \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24," \
  "%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,"   \
  "%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define DLSYS_NAMES96                                                                         \
  DLSYS_NAMES64                                                                               \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85," \
  "%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define DLSYS_WGMMA(n, types, regs, names, a0, a1, a2)                                             \
  asm volatile("{ .reg .pred p;\nsetp.ne.b32 p, " a2                                               \
               ", 0;\n"                                                                            \
               "wgmma.mma_async.sync.aligned.m64n" #n "k32.f32." types " {" names "}, " a0 ", " a1 \
               ", p, 1, 1; }"                                                                      \
               : DLSYS_UNPACK regs                                                                 \
               : "l"(a), "l"(b), "r"((int)accumulate))
#define DLSYS_UNPACK(...) __VA_ARGS__
#define DLSYS_WGMMA_TYPES(n, regs, names, a0, a1, a2)               \
  if constexpr (std::is_same_v<A, e4m3> && std::is_same_v<B, e4m3>) \
    DLSYS_WGMMA(n, "e4m3.e4m3", regs, names, a0, a1, a2);           \
  else if constexpr (std::is_same_v<A, e4m3>)                       \
    DLSYS_WGMMA(n, "e4m3.e5m2", regs, names, a0, a1, a2);           \
  else if constexpr (std::is_same_v<B, e4m3>)                       \
    DLSYS_WGMMA(n, "e5m2.e4m3", regs, names, a0, a1, a2);           \
  else                                                              \
    DLSYS_WGMMA(n, "e5m2.e5m2", regs, names, a0, a1, a2)

// d (64, 8 kBlocks) = A (64, 32) B, plus d with `accumulate`, as MultiplyAdd of hopper.cuh has it;
// A and B lie along K and are e4m3 or e5m2 each. Sums keep some 14 bits.
template <class A, class B, int kBlocks>
__device__ __forceinline__ void MultiplyAdd8Bit(float (&d)[kBlocks][4], uint64_t a, uint64_t b,
                                                bool accumulate) {
  static_assert(kBlocks == 16 || kBlocks == 24, "128 or 192 columns");
  if constexpr (kBlocks == 24) {
    DLSYS_WGMMA_TYPES(192, (DLSYS_REGS32(d, 0), DLSYS_REGS32(d, 8), DLSYS_REGS32(d, 16)),
                      DLSYS_NAMES96, "%96", "%97", "%98");
  } else {
    DLSYS_WGMMA_TYPES(128, (DLSYS_REGS32(d, 0), DLSYS_REGS32(d, 8)), DLSYS_NAMES64, "%64", "%65",
                      "%66");
  }
}

#undef DLSYS_REGS4
#undef DLSYS_REGS32
#undef DLSYS_NAMES64
#undef DLSYS_NAMES96
#undef DLSYS_UNPACK
#undef DLSYS_WGMMA
#undef DLSYS_WGMMA_TYPES

}  // namespace hopper
}  // namespace cuda
}  // namespace dlsys
