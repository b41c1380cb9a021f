// Tensor maps as the driver encodes them, with its rules for what a tile copy can read.
#include <cudaTypedefs.h>

#include <cstring>

#include "emulator/cuda_runtime.h"

namespace {

constexpr uint32_t kMostOfBox = 256, kSwizzledNbytes = 128;

CUresult Encode(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t dimensions, void* data,
                const cuuint64_t* extents, const cuuint64_t* strides, const cuuint32_t* box,
                const cuuint32_t* steps, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  *map = {};
  map->data = (char*)data;
  map->dimensions = (int)dimensions;
  map->swizzled = swizzle == CU_TENSOR_MAP_SWIZZLE_128B;
  map->rounds = type == CU_TENSOR_MAP_DATA_TYPE_TFLOAT32;
  map->size = map->rounds || type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4 : 2;
  bool valid = dimensions >= 1 && dimensions <= kMostMapDimensions && (uintptr_t)data % 16 == 0;
  for (cuuint32_t k = 0; valid && k < dimensions; k++) {
    map->extents[k] = extents[k];
    map->box[k] = box[k];
    map->strides[k] = k ? strides[k - 1] : (uint64_t)map->size;
    valid = extents[k] > 0 && extents[k] <= uint64_t(1) << 32 && box[k] > 0 &&
            box[k] <= kMostOfBox && steps[k] == 1 && (k == 0 || map->strides[k] % 16 == 0);
  }
  valid = valid && (!map->swizzled || box[0] * map->size <= kSwizzledNbytes);
  return valid ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

}  // namespace

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  *result = cudaDriverEntryPointSuccess;
  *function = strcmp(name, "cuTensorMapEncodeTiled") ? nullptr : (void*)Encode;
  return *function ? cudaSuccess : cudaErrorInvalidValue;
}
