// Tensor maps are encoded by the driver, whose function is found at run time, so that the library
// links without it.
#include <cudaTypedefs.h>

#include "cuda/runtime/context.cuh"
#include "cuda/runtime/tensor_map.cuh"

namespace dlsys {
namespace cuda {
namespace {

constexpr size_t kSharedOfHopper = 227 << 10;

PFN_cuTensorMapEncodeTiled_v12000 Encoder() {
  static const PFN_cuTensorMapEncodeTiled_v12000 encoder = [] {
    void* f = nullptr;
    cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault,
                                     &result);
#else
    cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &f, cudaEnableDefault, &result);
#endif
    return (PFN_cuTensorMapEncodeTiled_v12000)f;
  }();
  return encoder;
}

// Of sm_90a's code the library has none where this is of another size.
__global__ void ProbeKernel() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __shared__ char has_wgmma[64];
  ((volatile char*)has_wgmma)[threadIdx.x] = 0;
#endif
}

bool HasWgmma(int device) {
  static int known[kMaxDevices];  // 1 no, 2 yes
  if (!known[device]) {
    cudaFuncAttributes attributes;
    Check("device", cudaFuncGetAttributes(&attributes, ProbeKernel));
    known[device] = attributes.sharedSizeBytes >= 64 && Encoder() ? 2 : 1;
  }
  return known[device] == 2;
}

}  // namespace

const char* WgmmaError(int device) {
  if (ComputeMajor(device) != 9 || !HasWgmma(device))
    return "it needs a GPU of sm_90a, and a library built for that";
  if (SharedLimit(device) < kSharedOfHopper)
    return "it needs more shared memory than a block has here";
  return "";
}

CUtensorMap BoxMap(const char* op, int dtype, const void* data, int64_t inner, int64_t outer,
                   int64_t pitch, int64_t batch, int box_outer) {
  const int64_t size = DtypeNbytes(dtype);
  const CUtensorMapDataType type = dtype == DL_FLOAT32    ? CU_TENSOR_MAP_DATA_TYPE_TFLOAT32
                                   : dtype == DL_BFLOAT16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                          : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const cuuint64_t extents[3] = {(cuuint64_t)inner, (cuuint64_t)outer, (cuuint64_t)batch};
  const cuuint64_t strides[2] = {(cuuint64_t)(pitch * size), (cuuint64_t)(pitch * outer * size)};
  const cuuint32_t box[3] = {(cuuint32_t)(128 / size), (cuuint32_t)box_outer, 1};
  const cuuint32_t steps[3] = {1, 1, 1};
  CUtensorMap map;
  const CUresult result =
      Encoder()(&map, type, 3, const_cast<void*>(data), extents, strides, box, steps,
                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) Fail("%s: no tensor map of an operand: CUDA error %d", op, result);
  return map;
}

}  // namespace cuda
}  // namespace dlsys
