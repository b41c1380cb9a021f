// The kernels of the rung `tiled` of attention in float16: FlashAttention-2 (Dao, 2023), its
// templates instantiated. forward.cuh and backward.cuh have the algorithm, the layout of the arrays
// and what limits them.
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
