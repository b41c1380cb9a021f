// Of CUDA's driver API: tensor maps, which describe arrays to the tile copies of sm_90.
#pragma once
#include <cstdint>

using cuuint32_t = uint32_t;
using cuuint64_t = uint64_t;

enum CUresult : int { CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_VALUE = 1 };
enum CUtensorMapDataType {
  CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
  CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
  CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
  CU_TENSOR_MAP_DATA_TYPE_TFLOAT32,
  CU_TENSOR_MAP_DATA_TYPE_UINT8,
};
enum CUtensorMapInterleave { CU_TENSOR_MAP_INTERLEAVE_NONE };
enum CUtensorMapSwizzle { CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_SWIZZLE_128B };
enum CUtensorMapL2promotion { CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_256B };
enum CUtensorMapFloatOOBfill { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE };

constexpr int kMostMapDimensions = 5;
struct CUtensorMap {
  char* data;
  int dimensions;
  uint64_t extents[kMostMapDimensions], strides[kMostMapDimensions];  // inner first; in bytes
  uint32_t box[kMostMapDimensions];
  // Of a map of images (im2col), along w and h: the first position, how far apart they are, and how
  // many there are, 0 in a map of boxes.
  int first[2];
  uint32_t step[2], count[2];
  int size;     // of an element
  bool rounds;  // float32 to tf32, as it is loaded
  bool swizzled;
};
