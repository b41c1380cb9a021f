// Attention of generation over a cache of keys and values on the CPU: new ones are stored at the
// positions from `start` on, and new queries attend to all positions up to their own. A task is a
// query of a head, whose scores lie in scratch. float32; the result overlaps nothing that is read.
// Reading the cache limits it.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "cpu/runtime/common.h"
#include "cpu/runtime/parallel.h"
#include "operators/attention.h"
#include "operators/indexing.h"

namespace dlsys {
namespace cpu {
namespace {

void AppendToCache(DLArray* keys, DLArray* values, const DLArray* k, const DLArray* v,
                   const DLArray* start) {
  const char* op = "append_to_cache";
  float *to_keys = Output(op, keys), *to_values = Output(op, values);
  const float *new_keys = Input(op, k), *new_values = Input(op, v);
  const int64_t* at = Input<int64_t>(op, start);
  CheckScalar(op, "start", start, DL_INT64);
  CheckFitsCache(op, k, keys);
  CheckSameShape(op, k, v);
  CheckSameShape(op, keys, values);
  const int64_t pairs = k->shape[0] * k->shape[1], length = k->shape[2], d = k->shape[3];
  const int64_t capacity = keys->shape[2];
  Serially([&] {
    for (int64_t pair = 0; pair < pairs; pair++)
      for (int64_t row = 0; row < length; row++) {
        const int64_t position = *at + row;
        if (position < 0 || position >= capacity) continue;
        const int64_t to = (pair * capacity + position) * d, from = (pair * length + row) * d;
        memcpy(to_keys + to, new_keys + from, d * sizeof(float));
        memcpy(to_values + to, new_values + from, d * sizeof(float));
      }
  });
}

void CachedAttention(const DLArray* q, const DLArray* keys, const DLArray* values,
                     const DLArray* start, float scale, DLArray* y) {
  const char* op = "cached_attention";
  const float *queries = Input(op, q), *all_keys = Input(op, keys), *all_values = Input(op, values);
  const int64_t* at = Input<int64_t>(op, start);
  float* out = Output(op, y);
  CheckScalar(op, "start", start, DL_INT64);
  CheckFitsCache(op, q, keys);
  CheckSameShape(op, keys, values);
  const int64_t heads = q->shape[1], length = q->shape[2], d = q->shape[3];
  const int64_t capacity = keys->shape[2];
  const auto make = [=] { return ScratchArray<float>(capacity); };
  const auto task = [&](int64_t begin, int64_t end, const ScratchArray<float>& scratch) {
    float* const scores = scratch.data();
    for (int64_t item = begin; item < end; item++) {
      const int64_t pair = item / length, row = item % length;
      const int64_t count = std::clamp<int64_t>(*at + row + 1, 0, capacity);
      const float *own = queries + item * d, *key = all_keys + pair * capacity * d;
      float largest = -INFINITY, total = 0.f;
      for (int64_t j = 0; j < count; j++) {
        float dot = 0.f;
        for (int64_t e = 0; e < d; e++) dot += own[e] * key[j * d + e];
        scores[j] = dot * scale;
        largest = std::max(largest, scores[j]);
      }
      const float* value = all_values + pair * capacity * d;
      float* to = out + ((pair / heads * length + row) * heads + pair % heads) * d;
      std::fill(to, to + d, 0.f);
      for (int64_t j = 0; j < count; j++) {
        const float weight = std::exp(scores[j] - largest);
        total += weight;
        for (int64_t e = 0; e < d; e++) to[e] += weight * value[j * d + e];
      }
      for (int64_t e = 0; e < d; e++) to[e] /= total;
    }
  };
  ParallelForWithScratch(Numel(q) / std::max<int64_t>(d, 1), RowGrain(2 * d * capacity), make,
                         task);
}

DLSYS_KERNEL(cpu, append_to_cache, AppendToCache);
DLSYS_KERNEL(cpu, cached_attention, CachedAttention);

}  // namespace
}  // namespace cpu
}  // namespace dlsys
