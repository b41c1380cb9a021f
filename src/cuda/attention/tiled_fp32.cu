// The kernels of the rung `tiled` of attention in float32, by FFMA: FlashAttention-2 (Dao, 2023),
// its templates instantiated. forward.cuh and backward.cuh have the algorithm, the layout of the
// arrays and what limits them.
#include "cuda/attention/backward.cuh"
#include "cuda/attention/forward.cuh"

namespace dlsys {
namespace cuda {
namespace attention {

const Tiled kTiledFp32 = {SharedNbytes<Fp32>, Forward<Fp32>, Backward<Fp32>};

}  // namespace attention
}  // namespace cuda
}  // namespace dlsys
