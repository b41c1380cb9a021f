// The types of the driver's functions that are found at run time.
#pragma once
#include <cuda.h>

using PFN_cuTensorMapEncodeTiled_v12000 = CUresult (*)(CUtensorMap*, CUtensorMapDataType,
                                                       cuuint32_t, void*, const cuuint64_t*,
                                                       const cuuint64_t*, const cuuint32_t*,
                                                       const cuuint32_t*, CUtensorMapInterleave,
                                                       CUtensorMapSwizzle, CUtensorMapL2promotion,
                                                       CUtensorMapFloatOOBfill);
using PFN_cuTensorMapEncodeIm2col_v12000 = CUresult (*)(
    CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
    const int*, const int*, cuuint32_t, cuuint32_t, const cuuint32_t*, CUtensorMapInterleave,
    CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
