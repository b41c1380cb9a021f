// One term of a compensated sum, for both devices.
#pragma once
#ifdef __CUDACC__
#define DLSYS_SUM __host__ __device__ __forceinline__
#else
#define DLSYS_SUM inline
#endif

namespace dlsys {

// sum + error += x, after Knuth's two-sum: `error` takes exactly what rounding took from `sum`. It
// has no product that a compiler could contract.
DLSYS_SUM void AddTerm(float x, float* sum, float* error) {
  const float total = *sum + x;
  const float added = total - *sum;
  *error += (*sum - (total - added)) + (x - added);
  *sum = total;
}

}  // namespace dlsys
