// The rung `tiled` of attention in float32 at tf32: its kernels, see forward.cuh and backward.cuh.
#include "cuda/attention/backward.cuh"
#include "cuda/attention/forward.cuh"

namespace dlsys {
namespace cuda {
namespace attention {

const Tiled kTiledTf32 = {SharedNbytes<Tf32>, Forward<Tf32>, Backward<Tf32>};

}  // namespace attention
}  // namespace cuda
}  // namespace dlsys
