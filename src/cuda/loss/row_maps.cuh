// The products of linear_cross_entropy.cu, as sources of gemm/hopper/kernel.cuh whose epilogues
// take a number of each row: exponentials of what is less than that, with their sums, and rows
// times it. Both change accumulators in registers. Exponentials are one instruction of the special
// function unit an element, which takes longer than the additions beside it.
#pragma once
#include "cuda/gemm/hopper/kernel.cuh"

namespace dlsys {
namespace cuda {
namespace hopper {

// Calls f(d, row) with the pairs of accumulators that a thread has of a row of its tile, d(j, k)
// for column 8 j + k, and the row, m or more where C has not got it.
template <class T, class F>
__device__ __forceinline__ void ForRows(Accumulators<T>& d, const TileOrigin& origin, F&& f) {
  const int row0 = origin.row + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
  for (int i = 0; i < 2 * T::kWarpgroupM; i++)
    f([&](int j, int k) -> float& { return d[i / 2][j][i % 2 * 2 + k]; },
      row0 + i / 2 * 64 + i % 2 * 8);
}

// Matrices whose products a class derived from this maps in registers.
template <class E, class T, bool kAlongN, class LayoutOfRows>
class MappedRows : public Matrices<E, T, false, kAlongN> {
 public:
  using Layout = LayoutOfRows;
  static constexpr bool kHasEpilogue = false;
  static constexpr OfColumns kOfColumns = OfColumns::kMapped;

  __device__ __forceinline__ MappedRows(const Params& params, const Layout&,
                                        const TileOrigin& origin, int first)
      : Matrices<E, T, false, kAlongN>(params, {}, origin, first) {}

  static __device__ __forceinline__ void Store(const Layout&, const CUtensorMap* map, uint32_t from,
                                               int row, int col, int z) {
    StoreBox(map, from, col, row, z);
  }
};

struct ShiftsAndSums {
  const float* shifts;  // (m)
  float* sums;          // (column tiles, m)
};

// exp2(log2(e) A Bᵀ + shift), with a shift for each row, and its sums over the columns of a tile,
// of an even n.
template <class E, class T>
class Exponentials : public MappedRows<E, T, false, ShiftsAndSums> {
 public:
  using MappedRows<E, T, false, ShiftsAndSums>::MappedRows;

  // Four lanes hold a row.
  static __device__ __forceinline__ void Map(Accumulators<T>& d, const Params& params,
                                             const ShiftsAndSums& layout,
                                             const TileOrigin& origin) {
    const int lane = threadIdx.x % 32, columns = params.n - origin.col - lane % 4 * 2;
    float* const sums = layout.sums + (int64_t)(origin.col / T::kTileN) * params.m;
    ForRows<T>(d, origin, [&](auto&& of_row, int row) {
      const float shift = row < params.m ? layout.shifts[row] : 0.f;
      float even = 0.f, odd = 0.f;
#pragma unroll
      for (int j = 0; j < T::kBlocks; j++) {
        float &x = of_row(j, 0), &y = of_row(j, 1);
        x = ExpTwo(fmaf(x, fast::kLog2E, shift)), y = ExpTwo(fmaf(y, fast::kLog2E, shift));
        if (columns > j * 8) even += x, odd += y;
      }
      float sum = even + odd;
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      if (lane % 4 == 0 && row < params.m) sums[row] = sum;
    });
  }
};

struct Factors {
  const float* of_rows;  // (m)
};

// A B, each row times a factor of its own.
template <class E, class T>
class RowFactors : public MappedRows<E, T, true, Factors> {
 public:
  using MappedRows<E, T, true, Factors>::MappedRows;

  static __device__ __forceinline__ void Map(Accumulators<T>& d, const Params& params,
                                             const Factors& layout, const TileOrigin& origin) {
    ForRows<T>(d, origin, [&](auto&& of_row, int row) {
      const float factor = row < params.m ? layout.of_rows[row] : 0.f;
#pragma unroll
      for (int j = 0; j < T::kBlocks; j++) of_row(j, 0) *= factor, of_row(j, 1) *= factor;
    });
  }
};

}  // namespace hopper
}  // namespace cuda
}  // namespace dlsys
