// The sorted elements of one axis with their indices, or the first of them, for many columns at
// once. Elements are keys with indices (math/sort_keys.h), all of which are distinct.
//
// A block sorts a tile of kThreads keys by rank: a thread counts the keys before its own. Then runs
// are merged in pairs, a launch each time: an element's position is its own in its run plus the
// number of elements before it in the other run, by binary search. Nothing depends on the order of
// threads. Outputs overlap no input. Memory latency limits it, arithmetic the tiles.
#include "cuda/runtime/launch.cuh"
#include "math/sort_keys.h"
#include "runtime/dtypes.h"

namespace dlsys {
namespace cuda {
namespace {

// ---- kernels ----

// keys (columns, n): each tile of kThreads sorted.
template <class T>
__global__ void TileKernel(const T* x, sorting::Key<T>* keys, sorting::Shape of, int64_t tiles,
                           bool descending) {
  __shared__ sorting::Key<T> tile[kThreads];
  const int64_t per_column = (of.n + kThreads - 1) / kThreads;
  // The bounds are uniform over the block, as its barriers require.
  for (int64_t t = blockIdx.x; t < tiles; t += gridDim.x) {
    const int64_t column = t / per_column, first = (t - column * per_column) * kThreads;
    const int64_t o = column / of.inner, i = column - o * of.inner;
    const int count = (int)min((int64_t)kThreads, of.n - first), own = (int)threadIdx.x;
    const int64_t k = first + own;
    __syncthreads();  // the previous tile's readers are done
    if (own < count) tile[own] = sorting::KeyOf(x[(o * of.n + k) * of.inner + i], k, descending);
    __syncthreads();
    if (own >= count) continue;
    int rank = 0;
    for (int j = 0; j < count; j++) rank += tile[j] < tile[own];
    keys[column * of.n + first + rank] = tile[own];
  }
}

// Merges sorted runs of `run` keys in pairs.
template <class K>
__global__ void MergeKernel(const K* from, K* to, int64_t size, int64_t n, int64_t run) {
  for (int64_t at = FirstItem(); at < size; at += ItemStep()) {
    const int64_t column = at / n, k = at - column * n;
    const int64_t pair = k / (2 * run) * (2 * run), middle = min(pair + run, n);
    const int64_t end = min(pair + 2 * run, n);
    const K* const keys = from + column * n;
    const K key = keys[k];
    const int64_t other = k < middle ? middle : pair;
    int64_t low = other, high = k < middle ? end : middle;
    while (low < high) {
      const int64_t half = low + (high - low) / 2;
      if (keys[half] < key)
        low = half + 1;
      else
        high = half;
    }
    const int64_t before = k - (k < middle ? pair : middle);
    to[column * n + pair + before + (low - other)] = key;
  }
}

// The first keys of each column as values and indices.
template <class T>
__global__ void StoreKernel(const T* x, const sorting::Key<T>* keys, T* values, int64_t* indices,
                            int64_t size, sorting::Shape of) {
  for (int64_t at = FirstItem(); at < size; at += ItemStep()) {
    const int64_t row = at / of.inner, i = at - row * of.inner;
    const int64_t o = row / of.count, k = row - o * of.count;
    const int64_t index = sorting::IndexOf<T>(keys[(o * of.inner + i) * of.n + k]);
    indices[at] = index;
    values[at] = x[(o * of.n + index) * of.inner + i];
  }
}

// ---- launchers ----

template <class T>
void SortColumns(const DLArray* x, const sorting::Shape& of, bool descending, DLArray* values,
                 DLArray* indices, DLStream stream) {
  using Key = sorting::Key<T>;
  const int64_t columns = of.outer * of.inner, size = columns * of.n;
  const Scratch first(x->ctx, size * (int64_t)sizeof(Key), stream);
  const Scratch second(x->ctx, of.n > kThreads ? size * (int64_t)sizeof(Key) : 0, stream);
  Key *keys = (Key*)first.data(), *merged = (Key*)second.data();
  const int64_t tiles = columns * CeilDiv(of.n, kThreads);
  Launch("sort", TileKernel<T>, Blocks(tiles, 1), kThreads, 0, stream, (const T*)x->data, keys, of,
         tiles, descending);
  for (int64_t run = kThreads; run < of.n; run *= 2) {
    Launch("sort", MergeKernel<Key>, Blocks(size), kThreads, 0, stream, keys, merged, size, of.n,
           run);
    std::swap(keys, merged);
  }
  const int64_t wanted = Numel(values);
  Launch("sort", StoreKernel<T>, Blocks(wanted), kThreads, 0, stream, (const T*)x->data, keys,
         (T*)values->data, (int64_t*)indices->data, wanted, of);
}

void Sort(const DLArray* x, int64_t axis, int64_t descending, DLArray* values, DLArray* indices,
          DLStream stream) {
  Enter("sort", values, x, indices);
  const sorting::Shape of(x, axis, values, indices);
  if (Numel(values) == 0) return;
  WithComparable("sort", x->dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    SortColumns<T>(x, of, descending != 0, values, indices, stream);
  });
}

DLSYS_KERNEL_ANY(cuda, sort, Sort);

}  // namespace
}  // namespace cuda
}  // namespace dlsys
