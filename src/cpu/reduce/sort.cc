// The sorted elements of one axis with their indices on the CPU, or the first of them. A column is
// sorted by one thread, as keys with indices (math/sort_keys.h); where few are wanted, they are
// selected before they are sorted. Outputs overlap no input. Comparisons limit it.
#include "cpu/runtime/common.h"
#include "cpu/runtime/parallel.h"
#include "math/sort_keys.h"
#include "runtime/dtypes.h"

namespace dlsys {
namespace cpu {
namespace {

template <class T>
void SortColumns(const sorting::Shape& of, const T* x, bool descending, T* values,
                 int64_t* indices) {
  using Key = sorting::Key<T>;
  const int64_t n = of.n, count = of.count, inner = of.inner;
  const auto make = [=] { return ScratchArray<Key>(n); };
  auto task = [=](int64_t begin, int64_t end, const ScratchArray<Key>& scratch) {
    Key* const keys = scratch.data();
    for (int64_t column = begin; column < end; column++) {
      const int64_t o = column / inner, i = column - o * inner;
      const T* from = x + o * n * inner + i;
      for (int64_t k = 0; k < n; k++) keys[k] = sorting::KeyOf(from[k * inner], k, descending);
      if (count < n) std::nth_element(keys, keys + count, keys + n);
      std::sort(keys, keys + count);
      for (int64_t k = 0; k < count; k++) {
        const int64_t at = sorting::IndexOf<T>(keys[k]), to = (o * count + k) * inner + i;
        indices[to] = at;
        values[to] = from[at * inner];
      }
    }
  };
  ParallelForWithScratch(of.outer * inner, RowGrain(16 * n), make, task);
}

void Sort(const DLArray* x, int64_t axis, int64_t descending, DLArray* values, DLArray* indices) {
  for (const DLArray* a : {x, (const DLArray*)values, (const DLArray*)indices}) Check("sort", a);
  const sorting::Shape of(x, axis, values, indices);
  if (Numel(values) == 0) return;
  WithComparable("sort", x->dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    SortColumns<T>(of, (const T*)x->data, descending != 0, (T*)values->data,
                   (int64_t*)indices->data);
  });
}

DLSYS_KERNEL_ANY(cpu, sort, Sort);

}  // namespace
}  // namespace cpu
}  // namespace dlsys
