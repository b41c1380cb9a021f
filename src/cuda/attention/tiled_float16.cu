// The rung `tiled` of attention in float16: its kernels, see forward.cuh and backward.cuh.
#include "cuda/attention/backward.cuh"
#include "cuda/attention/forward.cuh"

namespace dlsys {
namespace cuda {
namespace attention {

const Tiled kTiledFloat16 = {SharedNbytes<Narrow<float16>>, Forward<Narrow<float16>>,
                             Backward<Narrow<float16>>};

}  // namespace attention
}  // namespace cuda
}  // namespace dlsys
