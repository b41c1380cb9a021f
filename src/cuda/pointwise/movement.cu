// Movement kernels for every dtype: fill, cast, broadcast_to, transpose.
//
// Moves depend on the size of an element only. The output never overlaps the input, except that a
// cast between dtypes of one size may be in place. A transpose whose fastest input axis is not its
// fastest output axis is tiled through shared memory, so that reads and writes are coalesced; one
// to a few values side by side, as of colors that move last, is made in registers.
// Memory bandwidth limits it.
#include "cuda/pointwise/copy.cuh"
#include "cuda/runtime/divisor.cuh"
#include "cuda/runtime/launch.cuh"
#include "operators/indexing.h"
#include "runtime/dtypes.h"

namespace dlsys {
namespace cuda {
namespace {

// ---- kernels ----

template <class To, class From>
__device__ __forceinline__ To Convert(From value) {
  if constexpr (kIs16Bit<From>) {
    return Convert<To>((float)value);
  } else if constexpr (kIs16Bit<To>) {
    return To((float)value);
  } else if constexpr (std::is_floating_point_v<From> && std::is_same_v<To, uint8_t>) {
    return (To)(int64_t)value;  // wraps as numpy and the CPU do; a direct conversion would saturate
  } else {
    return (To)value;
  }
}

template <class T>
__global__ void FillKernel(float value, T* y, int64_t n) {
  const T converted = Convert<T>(value);
  for (int64_t i = FirstItem(); i < n; i += ItemStep()) y[i] = converted;
}

template <class From, class To>
__global__ void CastKernel(const From* x, To* y, int64_t n) {
  for (int64_t i = FirstItem(); i < n; i += ItemStep()) y[i] = Convert<To>(x[i]);
}

constexpr int kTileBits = 10;  // of the elements of a tile
constexpr int kPaddings = 512;

// A batched 2-D transpose, y (batch, high, low) from x (batch, low, high) up to strides. A tile is
// square or, where one of the two is short, as wide as that to the next power of 2.
struct TransposeTiling {
  int64_t high, low;  // sizes of the output axis that is fastest in x, and of the fastest one in y
  int64_t x_low, y_high;      // strides of the slow axis on either side
  Loop batch;                 // the other axes; loop.x are strides in x, loop.y in y
  int low_bits, high_bits;    // of the extents of a tile
  int64_t high_tiles, tiles;  // tiles along `high`, and of one matrix
};

template <class T>
__global__ void TransposeKernel(const T* x, T* y, int64_t jobs, TransposeTiling tiling) {
  __shared__ T tile[(1 << kTileBits) + kPaddings];
  const int low_mask = (1 << tiling.low_bits) - 1, high_mask = (1 << tiling.high_bits) - 1;
  const int row =
      (1 << tiling.high_bits) + max(1, 32 >> tiling.low_bits);  // against bank conflicts
  for (int64_t job = blockIdx.x; job < jobs; job += gridDim.x) {
    const int64_t batch = job / tiling.tiles;
    const int64_t in_batch = job - batch * tiling.tiles;
    const int64_t tile_row = in_batch / tiling.high_tiles;
    const int64_t low0 = tile_row << tiling.low_bits;
    const int64_t high0 = (in_batch - tile_row * tiling.high_tiles) << tiling.high_bits;
    const Offsets at = Locate(tiling.batch, batch);
#pragma unroll
    for (int i = threadIdx.x; i < 1 << kTileBits; i += kThreads) {
      const int low = i >> tiling.high_bits, high = i & high_mask;
      if (low0 + low < tiling.low && high0 + high < tiling.high)
        tile[low * row + high] = x[at.x + (low0 + low) * tiling.x_low + high0 + high];
    }
    __syncthreads();
#pragma unroll
    for (int i = threadIdx.x; i < 1 << kTileBits; i += kThreads) {
      const int high = i >> tiling.low_bits, low = i & low_mask;
      if (high0 + high < tiling.high && low0 + low < tiling.low)
        y[at.y + (high0 + high) * tiling.y_high + low0 + low] = tile[low * row + high];
    }
    __syncthreads();
  }
}

// The same to kLow values side by side: a thread reads 16 bytes of each of kLow rows of x, and a
// warp, whose results are contiguous, writes them in runs by way of shared memory. There are
// `items` such threads' shares, those of a row in whole warps.
template <class T, int kLow>
__global__ void __launch_bounds__(kThreads)
    InterleaveKernel(const T* x, T* y, int items, Divisor of_row, TransposeTiling tiling) {
  constexpr int kVector = 16 / (int)sizeof(T);
  __shared__ float4 of_warps[kThreads / 32][32 * kLow];
  float4* const staged = of_warps[threadIdx.x / 32];
  const int lane = (int)threadIdx.x % 32;
  for (int k = (int)FirstItem(); k < items; k += (int)ItemStep()) {
    const int batch = k / of_row, first = (k - batch * (int)of_row.value) * kVector;
    const Offsets at = Locate(tiling.batch, batch);
    __align__(16) T from[kLow][kVector];
    __align__(16) T to[kVector * kLow];
#pragma unroll
    for (int low = 0; low < kLow; low++)
      *(float4*)from[low] = *(const float4*)(x + at.x + low * tiling.x_low + first);
#pragma unroll
    for (int e = 0; e < kVector * kLow; e++) to[e] = from[e % kLow][e / kLow];
#pragma unroll
    for (int q = 0; q < kLow; q++) staged[lane * kLow + q] = *(const float4*)(to + q * kVector);
    __syncwarp();
    float4* const run = (float4*)(y + at.y + (int64_t)(first - lane * kVector) * kLow);
#pragma unroll
    for (int q = 0; q < kLow; q++) run[q * 32 + lane] = staged[q * 32 + lane];
    __syncwarp();  // before others write there
  }
}

// ---- launchers ----

void Fill(float value, DLArray* y, DLStream stream) {
  Enter("fill", y);
  const int64_t n = Numel(y);
  WithDtype<bool>("fill", y->dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    Launch("fill", FillKernel<T>, Blocks(n), kThreads, 0, stream, value, (T*)y->data, n);
  });
}

void CopyElements(const char* op, const DLArray* x, DLArray* y, DLStream stream) {
  const size_t nbytes = (size_t)(Numel(y) * DtypeNbytes(y->dtype));
  if (nbytes == 0 || x->data == y->data || Workspace::Querying()) return;
  Check(op, cudaMemcpyAsync(y->data, x->data, nbytes, cudaMemcpyDeviceToDevice, Native(stream)));
}

void Cast(const DLArray* x, DLArray* y, DLStream stream) {
  Enter("cast", y, x);
  const int64_t n = Numel(y);
  if (Numel(x) != n)
    Fail("cast: element counts differ: %s and %s", ShapeText(x).c_str(), ShapeText(y).c_str());
  if (x->dtype == y->dtype) return CopyElements("cast", x, y, stream);
  WithDtype<bool>("cast", x->dtype, [&](auto* from) {
    WithDtype<bool>("cast", y->dtype, [&](auto* to) {
      using From = std::remove_pointer_t<decltype(from)>;
      using To = std::remove_pointer_t<decltype(to)>;
      Launch("cast", CastKernel<From, To>, Blocks(n), kThreads, 0, stream, (const From*)x->data,
             (To*)y->data, n);
    });
  });
}

void BroadcastTo(const DLArray* x, DLArray* y, DLStream stream) {
  Enter("broadcast_to", y, x);
  CheckSameDtypes("broadcast_to", x, y);
  Loop loop;
  loop.ndim = y->ndim;
  int64_t stride = 1;
  for (int k = y->ndim - 1; k >= 0; k--) {
    loop.shape[k] = y->shape[k];
    loop.y[k] = stride;
    stride *= y->shape[k];
  }
  if (!BroadcastStrides(x, y, loop.x))
    Fail("broadcast_to: shape %s does not broadcast to %s", ShapeText(x).c_str(),
         ShapeText(y).c_str());
  if (Numel(x) == Numel(y)) return CopyElements("broadcast_to", x, y, stream);
  if (stride == 0) return;
  CopyAlong("broadcast_to", x->data, y->data, DtypeNbytes(y->dtype), loop, stream);
}

// The folded loop over y with the strides of x that the permutation gives, and y's own.
Loop TransposeLoop(const DLArray* x, const Permutation& perm, const DLArray* y) {
  int64_t strides[DL_MAX_NDIM], stride = 1;
  for (int k = x->ndim - 1; k >= 0; k--) {
    strides[k] = stride;
    stride *= x->shape[k];
  }
  int64_t y_stride = Numel(y);
  unsigned seen = 0;
  bool fits = x->ndim == y->ndim;
  Loop loop;
  for (int k = 0; fits && k < y->ndim; k++) {
    const int axis = perm.axes[k];
    fits = axis >= 0 && axis < x->ndim && !(seen >> axis & 1) && y->shape[k] == x->shape[axis];
    if (!fits) break;
    seen |= 1u << axis;
    y_stride /= y->shape[k] ? y->shape[k] : 1;
    loop.Append(y->shape[k], strides[axis], y_stride);
  }
  if (!fits)
    Fail("transpose: %s with its axes in the order %s is not %s", ShapeText(x).c_str(),
         PermutationText(perm, y->ndim).c_str(), ShapeText(y).c_str());
  return Fold(loop);
}

// Splits a folded loop into a 2-D transpose, of its last axis and the axis that is fastest in x,
// and its batch axes.
TransposeTiling TilingOf(const Loop& loop) {
  const int low = loop.ndim - 1;
  int high = 0;
  while (loop.x[high] != 1) high++;
  TransposeTiling tiling{
      loop.shape[high], loop.shape[low], loop.x[low], loop.y[high], Loop(), 0, 0, 0, 0};
  for (int k = 0; k < low; k++) {
    if (k != high) tiling.batch.Append(loop.shape[k], loop.x[k], loop.y[k]);
  }
  if (tiling.batch.ndim == 0) tiling.batch.Append(1, 0, 0);
  const auto bits = [](int64_t extent) {
    int bits = 1;
    while (bits < kTileBits / 2 && int64_t(1) << bits < extent) bits++;
    return bits;
  };
  tiling.low_bits = bits(tiling.low);
  tiling.high_bits =
      tiling.low_bits < kTileBits / 2 ? kTileBits - tiling.low_bits : bits(tiling.high);
  tiling.low_bits = kTileBits - tiling.high_bits;
  tiling.high_tiles = CeilDiv(tiling.high, int64_t(1) << tiling.high_bits);
  tiling.tiles = tiling.high_tiles * CeilDiv(tiling.low, int64_t(1) << tiling.low_bits);
  return tiling;
}

// True where InterleaveKernel makes it: few values side by side, rows of whole warps, everything at
// 16 bytes.
bool IsInterleaving(const TransposeTiling& tiling, const DLArray* x, const DLArray* y) {
  const int64_t vector = 16 / DtypeNbytes(y->dtype);
  bool aligned = Aligned16(x->data) && Aligned16(y->data) && tiling.x_low % vector == 0;
  for (int k = 0; k < tiling.batch.ndim; k++)
    aligned = aligned && tiling.batch.x[k] % vector == 0 && tiling.batch.y[k] % vector == 0;
  const bool in_warps = tiling.y_high == tiling.low && tiling.high % (32 * vector) == 0;
  return aligned && in_warps && tiling.low >= 2 && tiling.low <= 4 && Numel(y) <= INT32_MAX;
}

template <class T>
void Interleave(const DLArray* x, DLArray* y, const TransposeTiling& tiling, DLStream stream) {
  constexpr int64_t kVector = 16 / (int64_t)sizeof(T);
  const int64_t items = Numel(y) / (tiling.low * kVector), of_row = tiling.high / kVector;
  const auto kernel = tiling.low == 2   ? InterleaveKernel<T, 2>
                      : tiling.low == 3 ? InterleaveKernel<T, 3>
                                        : InterleaveKernel<T, 4>;
  Launch("transpose", kernel, Blocks(items), kThreads, 0, stream, (const T*)x->data, (T*)y->data,
         (int)items, Divisor(of_row), tiling);
}

void Transpose(const DLArray* x, Struct<Permutation> perm, DLArray* y, DLStream stream) {
  Enter("transpose", y, x);
  CheckSameDtypes("transpose", x, y);
  const Loop loop = TransposeLoop(x, *perm, y);
  const int64_t n = Numel(y);
  if (n == 0) return;
  if (loop.ndim == 1) return CopyElements("transpose", x, y, stream);
  if (loop.x[loop.ndim - 1] == 1)
    return CopyAlong("transpose", x->data, y->data, DtypeNbytes(y->dtype), loop, stream);
  const TransposeTiling tiling = TilingOf(loop);
  const int64_t jobs = n / (tiling.high * tiling.low) * tiling.tiles;
  WithElementBits(y, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    if constexpr (sizeof(T) <= 4)
      if (IsInterleaving(tiling, x, y)) return Interleave<T>(x, y, tiling, stream);
    Launch("transpose", TransposeKernel<T>, Blocks(jobs, 1), kThreads, 0, stream, (const T*)x->data,
           (T*)y->data, jobs, tiling);
  });
}

DLSYS_KERNEL_ANY(cuda, fill, Fill);
DLSYS_KERNEL_ANY(cuda, cast, Cast);
DLSYS_KERNEL_ANY(cuda, broadcast_to, BroadcastTo);
DLSYS_KERNEL_ANY(cuda, transpose, Transpose);

}  // namespace
}  // namespace cuda
}  // namespace dlsys
