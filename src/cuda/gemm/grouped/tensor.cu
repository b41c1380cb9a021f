// The rung `tensor` of grouped products: tensor cores by mma.sync, which every GPU from sm_80 on
// has, at tf32, or at 3xtf32 with errors like float32's. tiles.cuh has the kernel; limited by the
// copies of operands to shared memory and from there to registers.
#include "cuda/gemm/grouped/tiles.cuh"

namespace dlsys {
namespace cuda {
namespace {

const char* Refusal(const Grouped& p) {
  if (p.precision == Precision::kFp32)
    return "it multiplies at tf32 or 3xtf32, and the precision is fp32";
  if (ComputeMajor(p.ctx.device_id) < 8) return "tensor cores take tf32 from sm_80 on";
  return nullptr;
}

void Run(const char* op, const Grouped& p, DLStream stream) {
  using Large = std::tuple_element_t<0, LargeTensorTilings>;
  using Small = Tiling<64, 64, 4, 8, 8, 32, 3>;
  if (p.precision == Precision::kTf32)
    RunGroupedTiles<Large, Tf32Accumulator, Small, Tf32Accumulator>(op, p, stream);
  else
    RunGroupedTiles<Large, SplitTf32Accumulator, Small, SplitTf32Accumulator>(op, p, stream);
}

}  // namespace

const GroupedRung kGroupedTensor = {"tensor", nullptr, Refusal, Run};

}  // namespace cuda
}  // namespace dlsys
