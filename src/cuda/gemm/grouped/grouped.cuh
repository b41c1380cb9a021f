// Products by groups of rows on the GPU: one description of both, forward and the contraction over
// the rows of each group, and the rungs that compute them. The sizes of the groups are read by the
// kernels, which are launched for any sizes: nothing waits for the host, and a captured graph may
// find others in each replay. Arrays are row-major and contiguous, C overlaps nothing that is read.
// operators/grouped.h has the walk over the groups; in the order of reading: naive.cu, tiles.cuh
// (warp.cu, tensor.cu), hopper.cuh, then grouped.cu, which picks one.
#pragma once
#include "cuda/gemm/gemm.cuh"
#include "cuda/runtime/fault.cuh"
#include "operators/grouped.h"

namespace dlsys {
namespace cuda {

// Addresses are of elements of `dtype`.
struct Grouped {
  GroupedShape shape;
  const void *a, *b;
  void* c;
  Indices sizes;
  Faults faults;  // where sizes do not fit
  DLContext ctx;
  Precision precision;
  int dtype;
};

// Tells of sizes that do not fit; one thread of a launch calls it.
__device__ __forceinline__ void TellOfSizes(const Grouped& p) {
  CheckGroupSizes(p.sizes, p.shape, [&](int64_t size, int64_t group, int64_t most) {
    p.faults.OutOfRange(size, group, most + 1);
  });
}

// As GemmRung.
struct GroupedRung {
  const char* name;
  const char* (*source)();
  const char* (*refusal)(const Grouped&);
  void (*run)(const char* op, const Grouped&, DLStream);
  bool narrow = false;  // takes floats of 16 bits; others get them in float32
};
extern const GroupedRung kGroupedNaive;   // a thread an element
extern const GroupedRung kGroupedWarp;    // FFMA
extern const GroupedRung kGroupedTensor;  // mma.sync
extern const GroupedRung kGroupedHopper;  // wgmma, TMA
// False where the copies that `hopper` needs of operands take longer than it saves over `tensor`.
bool GroupedHopperPays(const Grouped& p);

}  // namespace cuda
}  // namespace dlsys
