// The kernels of the rung `tiled` of attention in float32 at tf32: FlashAttention-2 (Dao, 2023),
// its templates instantiated. forward.cuh and backward.cuh have the algorithm, the layout of the
// arrays and what limits them.
#include "cuda/attention/backward.cuh"
#include "cuda/attention/forward.cuh"

namespace dlsys {
namespace cuda {
namespace attention {

const Tiled kTiledTf32 = {SharedNbytes<Tf32>, Forward<Tf32>, Backward<Tf32>};

}  // namespace attention
}  // namespace cuda
}  // namespace dlsys
