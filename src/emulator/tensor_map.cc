// Tensor maps as the driver encodes them, with its rules for what a tile copy can read.
#include <cudaTypedefs.h>

#include <algorithm>
#include <cstring>

#include "emulator/cuda_runtime.h"

namespace {

constexpr uint32_t kMostOfBox = 256, kSwizzledNbytes = 128;

// Fills in how the array lies; false where that cannot be.
bool SetArray(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t dimensions, void* data,
              const cuuint64_t* extents, const cuuint64_t* strides) {
  *map = {};
  map->data = (char*)data;
  map->dimensions = (int)dimensions;
  map->swizzled = true;
  map->rounds = type == CU_TENSOR_MAP_DATA_TYPE_TFLOAT32;
  map->size = map->rounds || type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4
              : type == CU_TENSOR_MAP_DATA_TYPE_UINT8                ? 1
                                                                     : 2;
  bool valid = dimensions >= 1 && dimensions <= kMostMapDimensions && (uintptr_t)data % 16 == 0;
  for (cuuint32_t k = 0; valid && k < dimensions; k++) {
    map->extents[k] = extents[k];
    map->box[k] = 1;
    map->strides[k] = k ? strides[k - 1] : (uint64_t)map->size;
    valid =
        extents[k] > 0 && extents[k] <= uint64_t(1) << 32 && (k == 0 || map->strides[k] % 16 == 0);
  }
  return valid;
}

CUresult Encode(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t dimensions, void* data,
                const cuuint64_t* extents, const cuuint64_t* strides, const cuuint32_t* box,
                const cuuint32_t* steps, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  bool valid = SetArray(map, type, dimensions, data, extents, strides);
  map->swizzled = swizzle == CU_TENSOR_MAP_SWIZZLE_128B;
  for (cuuint32_t k = 0; valid && k < dimensions; k++) {
    map->box[k] = box[k];
    valid = box[k] > 0 && box[k] <= kMostOfBox && steps[k] == 1;
  }
  valid = valid && (!map->swizzled || box[0] * map->size <= kSwizzledNbytes);
  return valid ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

// Of images (n, h, w, c) alone.
CUresult EncodePixels(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t dimensions, void* data,
                      const cuuint64_t* extents, const cuuint64_t* strides, const int* lower,
                      const int* upper, cuuint32_t channels, cuuint32_t pixels,
                      const cuuint32_t* steps, CUtensorMapInterleave, CUtensorMapSwizzle,
                      CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  constexpr int kLeastCorner = -128, kMostCorner = 127;
  constexpr uint32_t kMostStep = 8, kMostPixels = 1024;
  bool valid = dimensions == 4 && SetArray(map, type, dimensions, data, extents, strides) &&
               pixels > 0 && pixels <= kMostPixels;
  for (int k = 0; valid && k < 2; k++) {
    const int64_t length = (int64_t)extents[k + 1] + upper[k] - lower[k];
    valid = std::min(lower[k], upper[k]) >= kLeastCorner &&
            std::max(lower[k], upper[k]) <= kMostCorner && steps[k + 1] > 0 &&
            steps[k + 1] <= kMostStep && length > 0;
    map->first[k] = lower[k], map->step[k] = steps[k + 1];
    map->count[k] = valid ? (uint32_t)((length - 1) / steps[k + 1] + 1) : 0;
  }
  map->box[0] = channels, map->box[1] = pixels;
  return valid && channels * map->size <= kSwizzledNbytes ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

}  // namespace

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  *result = cudaDriverEntryPointSuccess;
  *function = !strcmp(name, "cuTensorMapEncodeTiled")    ? (void*)Encode
              : !strcmp(name, "cuTensorMapEncodeIm2col") ? (void*)EncodePixels
                                                         : nullptr;
  return *function ? cudaSuccess : cudaErrorInvalidValue;
}
