// Tensor maps are encoded by the driver, whose function is found at run time, so that the library
// links without it.
#include <cudaTypedefs.h>

#include <cstdlib>
#include <utility>

#include "cuda/instructions/tensor_map.cuh"
#include "cuda/runtime/context.cuh"

namespace dlsys {
namespace cuda {
namespace {

constexpr size_t kSharedOfHopper = 227 << 10;

void* DriverFunction(const char* name) {
  void* f = nullptr;
  cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
  cudaGetDriverEntryPointByVersion(name, &f, 12000, cudaEnableDefault, &result);
#else
  cudaGetDriverEntryPoint(name, &f, cudaEnableDefault, &result);
#endif
  return f;
}
PFN_cuTensorMapEncodeTiled_v12000 Encoder() {
  static const auto encoder =
      (PFN_cuTensorMapEncodeTiled_v12000)DriverFunction("cuTensorMapEncodeTiled");
  return encoder;
}
PFN_cuTensorMapEncodeIm2col_v12000 PixelEncoder() {
  static const auto encoder =
      (PFN_cuTensorMapEncodeIm2col_v12000)DriverFunction("cuTensorMapEncodeIm2col");
  return encoder;
}

// Of sm_90a's code the library has none where this is of another size.
__global__ void ProbeKernel() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  [[maybe_unused]] __shared__ char has_wgmma[64];
  ((volatile char*)has_wgmma)[threadIdx.x] = 0;
#endif
}

bool HasWgmma(int device) {
  static int known[kMaxDevices];  // 1 no, 2 yes
  if (!known[device]) {
    cudaFuncAttributes attributes;
    Check("device", cudaFuncGetAttributes(&attributes, ProbeKernel));
    known[device] = attributes.sharedSizeBytes >= 64 && Encoder() && PixelEncoder() ? 2 : 1;
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

CUtensorMapDataType TypeOf(int dtype, bool rounds = true) {
  return dtype == DL_FLOAT32
             ? rounds ? CU_TENSOR_MAP_DATA_TYPE_TFLOAT32 : CU_TENSOR_MAP_DATA_TYPE_FLOAT32
         : dtype == DL_BFLOAT16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
         : dtype == DL_UINT8    ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                                : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
}

// An array as the driver takes it.
template <size_t kAxes>
struct Extents {
  cuuint64_t dimensions[kAxes], nbytes[kAxes - 1];
  Extents(int64_t size, const std::array<int64_t, kAxes>& extents,
          const std::array<int64_t, kAxes - 1>& strides) {
    for (size_t k = 0; k < kAxes; k++) dimensions[k] = (cuuint64_t)extents[k];
    for (size_t k = 0; k + 1 < kAxes; k++) nbytes[k] = (cuuint64_t)(strides[k] * size);
  }
};

void CheckMap(const char* op, CUresult result) {
  if (result != CUDA_SUCCESS) Fail("%s: no tensor map of an operand: CUDA error %d", op, result);
}

}  // namespace

template <size_t kAxes>
CUtensorMap ArrayMap(const char* op, int dtype, const void* data,
                     const std::array<int64_t, kAxes>& extents,
                     const std::array<int64_t, kAxes - 1>& strides,
                     const std::array<int, kAxes>& box, bool rounds, bool asks_ahead) {
  const Extents<kAxes> array(DtypeNbytes(dtype), extents, strides);
  cuuint32_t of_box[kAxes], steps[kAxes];
  for (size_t k = 0; k < kAxes; k++) of_box[k] = (cuuint32_t)box[k], steps[k] = 1;
  CUtensorMap map;
  CheckMap(op, Encoder()(&map, TypeOf(dtype, rounds), kAxes, const_cast<void*>(data),
                         array.dimensions, array.nbytes, of_box, steps,
                         CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                         asks_ahead ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B
                                    : CU_TENSOR_MAP_L2_PROMOTION_NONE,
                         CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
  return map;
}
template CUtensorMap ArrayMap(const char*, int, const void*, const std::array<int64_t, 3>&,
                              const std::array<int64_t, 2>&, const std::array<int, 3>&, bool, bool);
template CUtensorMap ArrayMap(const char*, int, const void*, const std::array<int64_t, 4>&,
                              const std::array<int64_t, 3>&, const std::array<int, 4>&, bool, bool);

namespace {

// How far the last position lies beyond the end of the images: the upper corner of the box that the
// positions span, as `first` is the lower one.
int64_t UpperCorner(const PixelAxis& positions, int64_t extent) {
  return positions.first + (positions.count - 1) * positions.step + 1 - extent;
}

}  // namespace

const char* PixelMapError(const PixelMapShape& shape, int64_t reach) {
  constexpr int64_t kMostCorner = 127, kMostStep = 8, kMostReach = 255;
  for (const auto& [positions, extent] :
       {std::pair{shape.w, shape.extents[1]}, std::pair{shape.h, shape.extents[2]}}) {
    const int64_t upper = UpperCorner(positions, extent);
    if (std::abs(positions.first) > kMostCorner || std::abs(upper) > kMostCorner)
      return "its positions begin or end further than 127 from the border of the images";
    if (positions.step > kMostStep) return "its stride is above 8";
  }
  return reach > kMostReach ? "its filter reaches further than 255" : "";
}

CUtensorMap PixelMap(const char* op, int dtype, const void* data, const PixelMapShape& shape,
                     int pixels) {
  const int64_t size = DtypeNbytes(dtype);
  const Extents<4> array(size, shape.extents, shape.strides);
  const int lower[2] = {(int)shape.w.first, (int)shape.h.first};
  const int upper[2] = {(int)UpperCorner(shape.w, shape.extents[1]),
                        (int)UpperCorner(shape.h, shape.extents[2])};
  const cuuint32_t steps[4] = {1, (cuuint32_t)shape.w.step, (cuuint32_t)shape.h.step, 1};
  CUtensorMap map;
  CheckMap(op,
           PixelEncoder()(&map, TypeOf(dtype), 4, const_cast<void*>(data), array.dimensions,
                          array.nbytes, lower, upper, (cuuint32_t)(128 / size), (cuuint32_t)pixels,
                          steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                          CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
  return map;
}

CUtensorMap BoxMap(const char* op, int dtype, const void* data, int64_t inner, int64_t outer,
                   int64_t pitch, int64_t batch, int box_outer, bool rounds, bool asks_ahead) {
  const int in_row = 128 / (int)DtypeNbytes(dtype);
  return ArrayMap<3>(op, dtype, data, {inner, outer, batch}, {pitch, pitch * outer},
                     {in_row, box_outer, 1}, rounds, asks_ahead);
}

CUtensorMap HeadMap(const char* op, int dtype, const void* data,
                    const std::array<int64_t, 4>& extents, const std::array<int64_t, 3>& strides,
                    int box_rows) {
  const int in_row = 128 / (int)DtypeNbytes(dtype);
  return ArrayMap<4>(op, dtype, data, extents, strides, {in_row, box_rows, 1, 1});
}

CUtensorMap PlainMap(const char* op, const float* data, int64_t inner, int64_t outer, int64_t pitch,
                     int box_inner, int box_outer) {
  const Extents<3> array(sizeof(float), {inner, outer, 1}, {pitch, pitch * outer});
  const cuuint32_t box[3] = {(cuuint32_t)box_inner, (cuuint32_t)box_outer, 1}, steps[3] = {1, 1, 1};
  CUtensorMap map;
  CheckMap(op, Encoder()(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 3, const_cast<float*>(data),
                         array.dimensions, array.nbytes, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                         CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                         CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
  return map;
}

}  // namespace cuda
}  // namespace dlsys
