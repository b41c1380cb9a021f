// Attention as the kernels of all devices take it: the arrays' extents, which keys a query sees,
// and the factors of dropout, functions of (seed, step, node, element) of the (batch, heads, rows,
// columns) weights, which nobody stores. python/dlsys/ops/attention/ has the same in numpy.
#pragma once
#include "math/philox.h"
#include "runtime/registry.h"

namespace dlsys {

// An optional array by its data; null where it is not there.
struct AttentionMask {
  const void* data;
  int dtype;
  int64_t stride[4];  // in elements along batch, heads, rows and columns

  // What is added to a score: -inf hides the key.
  DLSYS_HD float At(int64_t n, int64_t h, int64_t l, int64_t s) const {
    const int64_t at = n * stride[0] + h * stride[1] + l * stride[2] + s * stride[3];
    if (dtype == DL_BOOL) return ((const uint8_t*)data)[at] ? 0.f : -INFINITY;
    if (dtype == DL_BFLOAT16) return ((const bfloat16*)data)[at];
    if (dtype == DL_FLOAT16) return ((const float16*)data)[at];
    return ((const float*)data)[at];
  }
};

struct AttentionLengths {
  const void* data;
  bool wide;  // int64, else int32

  DLSYS_HD int64_t At(int64_t n, int64_t most) const {
    if (!data) return most;
    const int64_t length = wide ? ((const int64_t*)data)[n] : ((const int32_t*)data)[n];
    return length < 0 ? 0 : length < most ? length : most;
  }
};

// How an array (batch, heads, positions, size) lies in memory: strides in elements, that of `size`
// is 1.
struct AttentionLayout {
  int64_t batch, head, position;

  DLSYS_HD int64_t At(int64_t n, int64_t h, int64_t l) const {
    return n * batch + h * head + l * position;
  }
};

struct Attention {
  int64_t batch, heads, kv_heads, rows, columns, size, value_size;
  AttentionLayout of_q, of_k, of_v, of_y;  // and of their gradients
  bool causal;
  float scale;
  AttentionMask mask;
  AttentionLengths lengths, query_lengths;
  const uint64_t* step;  // null without dropout
  uint64_t seed, threshold;
  uint32_t node;
  float keep;

  DLSYS_HD int64_t Group() const { return heads / kv_heads; }
  DLSYS_HD int64_t Rows(int64_t n) const { return query_lengths.At(n, rows); }
  // The keys that rows before `row_end` of sample n see are among the first so many.
  DLSYS_HD int64_t Columns(int64_t n, int64_t row_end) const {
    const int64_t count = lengths.At(n, columns);
    return causal && row_end < count ? row_end : count;
  }
  DLSYS_HD philox::Stream Draw() const { return {seed, *step, node}; }
  // The element of the weights at column 0 of a row of a head.
  DLSYS_HD uint64_t Element(int64_t n, int64_t h, int64_t l) const {
    return (uint64_t)((n * heads + h) * rows + l) * (uint64_t)columns;
  }
  DLSYS_HD float Factor(uint32_t word) const { return word < threshold ? keep : 0.f; }
  // The factor of an element; its word is selected, since an index would put the words in memory.
  DLSYS_HD float FactorOf(const philox::Words& words, uint64_t element) const {
    const uint32_t low = element % 2 ? words.word[1] : words.word[0];
    const uint32_t high = element % 2 ? words.word[3] : words.word[2];
    return Factor(element % 4 < 2 ? low : high);
  }
  DLSYS_HD float FactorAt(uint64_t element) const {
    return FactorOf(Draw().At(element / 4), element);
  }
};

// The scalars of both kernels, in the order of their signatures.
struct AttentionScalars {
  int64_t flags;
  float scale;
  int64_t seed, node, threshold;
  float keep;
};
enum { kCausal = 1, kMasked = 2, kPadded = 4, kQueriesPadded = 8, kDrops = 16 };

// Takes over the scalars, and the optional arrays that they announce.
inline void SetOptions(const char* op, Attention& p, const DLArrayList* optional,
                       const AttentionScalars& scalars) {
  p.causal = (scalars.flags & kCausal) != 0;
  p.scale = scalars.scale;
  p.seed = (uint64_t)scalars.seed, p.threshold = (uint64_t)scalars.threshold;
  p.node = (uint32_t)scalars.node, p.keep = scalars.keep;
  int64_t next = 0;
  const auto taken = [&](int flag) -> const DLArray* {
    if (!(scalars.flags & flag)) return nullptr;
    if (next == optional->count) Fail("%s: an optional array is missing", op);
    return optional->arrays[next++];
  };
  if (const DLArray* mask = taken(kMasked)) {
    const int64_t scores[4] = {p.batch, p.heads, p.rows, p.columns};
    int64_t stride = 1;
    if (mask->ndim > 4) Fail("%s: the mask has %d dimensions", op, mask->ndim);
    for (int axis = 3, own = mask->ndim - 1; own >= 0; axis--, own--) {
      if (mask->shape[own] != 1 && mask->shape[own] != scores[axis])
        Fail("%s: the mask %s does not broadcast to the scores", op, ShapeText(mask).c_str());
      p.mask.stride[axis] = mask->shape[own] == 1 ? 0 : stride;
      stride *= mask->shape[own];
    }
    p.mask.data = mask->data, p.mask.dtype = mask->dtype;
  }
  const auto lengths = [&](int flag) -> AttentionLengths {
    const DLArray* given = taken(flag);
    if (!given) return {nullptr, false};
    if (Numel(given) != p.batch || (given->dtype != DL_INT64 && given->dtype != DL_INT32))
      Fail("%s: expected a length of int32 or int64 for each sample", op);
    return {given->data, given->dtype == DL_INT64};
  };
  p.lengths = lengths(kPadded);
  p.query_lengths = lengths(kQueriesPadded);
  if (const DLArray* step = taken(kDrops)) p.step = (const uint64_t*)In<int64_t>(op, step);
}

// Checks shapes and dtypes, and describes the problem of contiguous arrays.
inline Attention CheckedAttention(const char* op, const DLArray* q, const DLArray* k,
                                  const DLArray* v, const DLArrayList* optional,
                                  const AttentionScalars& scalars) {
  const int64_t *sq = q->shape, *sk = k->shape, *sv = v->shape;
  const bool ranks = q->ndim == 4 && k->ndim == 4 && v->ndim == 4;
  if (!ranks || sk[0] != sq[0] || sv[0] != sq[0] || sk[1] != sv[1] || sk[2] != sv[2] ||
      sk[3] != sq[3] || (sk[1] == 0 ? sq[1] != 0 : sq[1] % sk[1] != 0))
    Fail("%s: q %s, k %s and v %s do not fit", op, ShapeText(q).c_str(), ShapeText(k).c_str(),
         ShapeText(v).c_str());
  Attention p = {};
  p.batch = sq[0], p.heads = sq[1], p.kv_heads = sk[1], p.rows = sq[2], p.columns = sk[2];
  p.size = sq[3], p.value_size = sv[3];
  const auto layout = [](int64_t heads, int64_t positions, int64_t size) -> AttentionLayout {
    return {heads * positions * size, positions * size, size};
  };
  p.of_q = layout(p.heads, p.rows, p.size), p.of_k = layout(p.kv_heads, p.columns, p.size);
  p.of_v = layout(p.kv_heads, p.columns, p.value_size);
  p.of_y = layout(p.heads, p.rows, p.value_size);
  SetOptions(op, p, optional, scalars);
  return p;
}

// The same of qkv (batch, positions, (heads + 2 kv_heads) size), whose heads are those of q, then
// those of k and of v; y is (batch, positions, heads size).
inline Attention CheckedPackedAttention(const char* op, const DLArray* qkv,
                                        const DLArrayList* optional,
                                        const AttentionScalars& scalars, int64_t heads,
                                        int64_t kv_heads) {
  const int64_t all = heads + 2 * kv_heads;
  if (qkv->ndim != 3 || heads < 1 || kv_heads < 1 || heads % kv_heads || qkv->shape[2] % all)
    Fail("%s: qkv %s has no %ld heads of queries and %ld of keys", op, ShapeText(qkv).c_str(),
         (long)heads, (long)kv_heads);
  Attention p = {};
  p.batch = qkv->shape[0], p.heads = heads, p.kv_heads = kv_heads;
  p.rows = p.columns = qkv->shape[1], p.size = p.value_size = qkv->shape[2] / all;
  p.of_q = p.of_k = p.of_v = {p.rows * all * p.size, p.size, all * p.size};
  p.of_y = {p.rows * heads * p.size, p.size, heads * p.size};
  SetOptions(op, p, optional, scalars);
  return p;
}

// Where k and v begin in an array that holds q, k and v, in elements.
inline int64_t PackedKeys(const Attention& p) { return p.heads * p.size; }
inline int64_t PackedValues(const Attention& p) { return (p.heads + p.kv_heads) * p.size; }

inline void CheckResults(const char* op, const Attention& p, const DLArray* y, const DLArray* lse) {
  if (Numel(lse) != p.batch * p.heads * p.rows || Numel(y) != Numel(lse) * p.value_size)
    Fail("%s: y %s and lse %s do not fit the inputs", op, ShapeText(y).c_str(),
         ShapeText(lse).c_str());
}

// a (N, heads, length, size) has to fit b (N, heads, capacity, size), the keys or values that
// generation has kept.
inline void CheckFitsCache(const char* op, const DLArray* a, const DLArray* b) {
  const bool fits = a->ndim == 4 && b->ndim == 4 && a->shape[0] == b->shape[0] &&
                    a->shape[1] == b->shape[1] && a->shape[3] == b->shape[3];
  if (!fits)
    Fail("%s: shapes do not fit: %s and a cache of %s", op, ShapeText(a).c_str(),
         ShapeText(b).c_str());
}

}  // namespace dlsys
