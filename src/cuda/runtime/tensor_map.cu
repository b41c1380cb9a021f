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

namespace {

// How the boxes of a map lie in shared memory: of the inner two axes, and 1 of the others.
struct Boxes {
  CUtensorMapDataType type;
  CUtensorMapSwizzle swizzle;
  int64_t inner, outer;
};

// Rows of 128 bytes, swizzled.
Boxes Swizzled(int dtype, int rows) {
  const CUtensorMapDataType type = dtype == DL_FLOAT32    ? CU_TENSOR_MAP_DATA_TYPE_TFLOAT32
                                   : dtype == DL_BFLOAT16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                          : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  return {type, CU_TENSOR_MAP_SWIZZLE_128B, 128 / DtypeNbytes(dtype), rows};
}

template <size_t kAxes>
CUtensorMap Encoded(const char* op, const Boxes& boxes, int64_t size, const void* data,
                    const std::array<int64_t, kAxes>& extents,
                    const std::array<int64_t, kAxes - 1>& strides) {
  cuuint64_t dimensions[kAxes], nbytes[kAxes - 1];
  cuuint32_t box[kAxes], steps[kAxes];
  for (size_t k = 0; k < kAxes; k++) {
    dimensions[k] = (cuuint64_t)extents[k];
    if (k) nbytes[k - 1] = (cuuint64_t)(strides[k - 1] * size);
    box[k] = k == 0 ? (cuuint32_t)boxes.inner : k == 1 ? (cuuint32_t)boxes.outer : 1;
    steps[k] = 1;
  }
  CUtensorMap map;
  const CUresult result =
      Encoder()(&map, boxes.type, kAxes, const_cast<void*>(data), dimensions, nbytes, box, steps,
                CU_TENSOR_MAP_INTERLEAVE_NONE, boxes.swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) Fail("%s: no tensor map of an operand: CUDA error %d", op, result);
  return map;
}

}  // namespace

CUtensorMap BoxMap(const char* op, int dtype, const void* data, int64_t inner, int64_t outer,
                   int64_t pitch, int64_t batch, int box_outer) {
  return Encoded<3>(op, Swizzled(dtype, box_outer), DtypeNbytes(dtype), data, {inner, outer, batch},
                    {pitch, pitch * outer});
}

CUtensorMap HeadMap(const char* op, int dtype, const void* data,
                    const std::array<int64_t, 4>& extents, const std::array<int64_t, 3>& strides,
                    int box_rows) {
  return Encoded<4>(op, Swizzled(dtype, box_rows), DtypeNbytes(dtype), data, extents, strides);
}

CUtensorMap PlainMap(const char* op, const float* data, int64_t inner, int64_t outer, int64_t pitch,
                     int box_inner, int box_outer) {
  const Boxes boxes = {CU_TENSOR_MAP_DATA_TYPE_FLOAT32, CU_TENSOR_MAP_SWIZZLE_NONE, box_inner,
                       box_outer};
  return Encoded<3>(op, boxes, sizeof(float), data, {inner, outer, 1}, {pitch, pitch * outer});
}

}  // namespace cuda
}  // namespace dlsys
