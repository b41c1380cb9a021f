// The rung `warp` of grouped products: FFMA in true float32, by warp tiles whose panels come by
// asynchronous copies, large ones where groups have the rows for that. tiles.cuh has the kernel;
// FFMA issue limits it.
#include "cuda/gemm/grouped/tiles.cuh"

namespace dlsys {
namespace cuda {
namespace {

const char* Refusal(const Grouped&) { return nullptr; }

void Run(const char* op, const Grouped& p, DLStream stream) {
  RunGroupedTiles<std::tuple_element_t<0, LargeTilings>, OuterAccumulator,
                  Tiling<64, 64, 4, 8, 8, 32, 3>, Fp32Accumulator>(op, p, stream);
}

}  // namespace

const GroupedRung kGroupedWarp = {"warp", nullptr, Refusal, Run};

}  // namespace cuda
}  // namespace dlsys
