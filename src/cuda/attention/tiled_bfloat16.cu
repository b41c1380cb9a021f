// The rung `tiled` of attention in bfloat16: its kernels, see forward.cuh and backward.cuh.
#include "cuda/attention/backward.cuh"
#include "cuda/attention/forward.cuh"

namespace dlsys {
namespace cuda {
namespace attention {

const Tiled kTiledBfloat16 = {SharedNbytes<Narrow<bfloat16>>, Forward<Narrow<bfloat16>>,
                              Backward<Narrow<bfloat16>>};

}  // namespace attention
}  // namespace cuda
}  // namespace dlsys
