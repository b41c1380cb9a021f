// The rung `tiled` of attention in float32, by FFMA: its kernels, see forward.cuh and backward.cuh.
#include "cuda/attention/backward.cuh"
#include "cuda/attention/forward.cuh"

namespace dlsys {
namespace cuda {
namespace attention {

const Tiled kTiledFp32 = {SharedNbytes<Fp32>, Forward<Fp32>, Backward<Fp32>};

}  // namespace attention
}  // namespace cuda
}  // namespace dlsys
