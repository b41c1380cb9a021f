// One body of code compiled for several generations of processors, chosen at run time. The body and
// all that it calls are inlined into each version; nothing with external linkage is compiled for
// more than the baseline, else the linker could keep the wrong copy. With DLSYS_ONE_ISA there is a
// single version, for the processor that the compiler is told of, such as by -march=native; with
// DLSYS_ONLY_AVX512 there is a single one too, on a machine that never runs the others.
#pragma once

#define DLSYS_INLINE inline __attribute__((always_inline))

// Before a loop whose output may be the very buffer of an input: element k only ever depends on
// element k.
#ifdef __clang__
#define DLSYS_IVDEP _Pragma("clang loop vectorize(assume_safety)")
#else
#define DLSYS_IVDEP _Pragma("GCC ivdep")
#endif

// Before a loop over registers: unrolled altogether, so that none of them needs an address.
#ifdef __clang__
#define DLSYS_UNROLL _Pragma("clang loop unroll(full)")
#else
#define DLSYS_UNROLL _Pragma("GCC unroll 32")
#endif

namespace dlsys {
namespace cpu {

enum class Isa { kBaseline, kAvx2, kAvx512 };

// The best of these that this processor has.
inline Isa DetectIsa() {
#ifdef __x86_64__
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw"))
    return Isa::kAvx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return Isa::kAvx2;
#endif
  return Isa::kBaseline;
}

inline Isa CurrentIsa() {
  static const Isa isa = DetectIsa();
  return isa;
}

#ifdef __x86_64__
#define DLSYS_AVX2 __attribute__((target("avx2,fma")))
#define DLSYS_AVX512 __attribute__((target("avx2,fma,avx512f,avx512vl,avx512dq,avx512bw")))

template <class F>
DLSYS_AVX2 void CallAvx2(const F& f) {
  f();
}
template <class F>
DLSYS_AVX512 void CallAvx512(const F& f) {
  f();
}
#endif

// Runs f, whose call operator must be always_inline (DLSYS_SIMD), as compiled for this processor.
template <class F>
inline void Dispatch(const F& f) {
#ifdef DLSYS_ONLY_AVX512
  CallAvx512(f);
#else
#if defined(__x86_64__) && !defined(DLSYS_ONE_ISA)
  const Isa isa = CurrentIsa();
  if (isa == Isa::kAvx512) return CallAvx512(f);
  if (isa == Isa::kAvx2) return CallAvx2(f);
#endif
  f();
#endif
}

// The head of a lambda for Dispatch: Dispatch(DLSYS_SIMD { ... });
#define DLSYS_SIMD [=]() __attribute__((always_inline))

}  // namespace cpu
}  // namespace dlsys
