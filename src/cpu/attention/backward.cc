// The gradients of attention on the CPU, after FlashAttention-2 (Dao, 2023): for each pair of
// blocks the weights are computed anew from lse, ds = p (dp - Σ y dy) scale, dq += ds k, dk += dsᵀ
// q and dv += pᵀ dy. Where there are heads enough a task is a head of k and v and computes all
// three by five products; else one set of tasks computes dq and another one dk and dv, by seven.
// Sums are float32 and their order depends on shapes alone. Arrays are (batch, heads, positions,
// size) by their strides; dq, dk and dv overlap no input. Multiply-adds limit it.
#include "cpu/attention/blocks.h"

namespace dlsys {
namespace cpu {
namespace attention {
namespace {

constexpr int64_t kManyHeads = 8;  // of all samples: as many tasks keep threads busy

template <class T>
struct Arrays {
  const T *q, *k, *v, *y;
  const float* lse;
  const T* dy;
  T *dq, *dk, *dv;
};

// Scratch of a task. Sums of storage types of 16 bits are float32 there, for all of a head.
struct Scratch {
  ScratchArray<float> packed_q, packed_dy, q, dy, k, v, weights, ds, row_sums, dq, dk, dv;
  Scratch(const Attention& p, int64_t sum_columns)
      : packed_q(Right::PackedNumel(p.size)),
        packed_dy(Right::PackedNumel(p.value_size)),
        q(BlockNumel(p.size)),
        dy(BlockNumel(p.value_size)),
        k(BlockNumel(p.size)),
        v(BlockNumel(p.value_size)),
        weights(kRows * kColumns),
        ds(kRows * kColumns),
        row_sums(kRows),
        dq(kRows * p.size),
        dk(sum_columns * p.size),
        dv(sum_columns * p.value_size) {}
};

// A block of queries: its rows of q and dy as they are and transposed.
struct Queries {
  Rows q, dy;
  Right packed_q, packed_dy;
  const float* lse;
};

template <class T>
DLSYS_INLINE Queries Prepare(const Attention& p, const Block& b, const Arrays<T>& arrays,
                             const Scratch& scratch) {
  const int64_t count = b.RowCount(), pitch = p.of_y.position;
  const int64_t first = p.of_y.At(b.n, b.h, b.row);
  const T *y = arrays.y + first, *dy = arrays.dy + first;
  for (int64_t i = 0; i < count; i++) {
    float sum = 0.f;
    for (int64_t j = 0; j < p.value_size; j++)
      sum += (float)y[i * pitch + j] * (float)dy[i * pitch + j];
    scratch.row_sums.data()[i] = sum;
  }
  Queries made;
  made.q = RowsOf(arrays.q + p.of_q.At(b.n, b.h, b.row), count, p.size, p.of_q.position,
                  scratch.q.data());
  made.dy = RowsOf(dy, count, p.value_size, pitch, scratch.dy.data());
  made.packed_q = Right::Transposed(made.q, count, p.size, scratch.packed_q.data());
  made.packed_dy = Right::Transposed(made.dy, count, p.value_size, scratch.packed_dy.data());
  made.lse = arrays.lse + (b.n * p.heads + b.h) * p.rows + b.row;
  return made;
}

// The weights of a block, and in `ds` the gradient of its scores from that of the weights.
DLSYS_INLINE void Weigh(const Attention& p, const Block& b, const Queries& queries,
                        const float* row_sums, float* weights, float* ds) {
  const int64_t rows = b.RowCount(), columns = b.ColumnCount();
  FinishScores(p, b, weights);
  alignas(64) float shift[kRows];
  for (int64_t i = 0; i < rows; i++) shift[i] = queries.lse[i] == -INFINITY ? 0.f : queries.lse[i];
  ForFactors(p, b, [=](int64_t i, int64_t s, float factor) __attribute__((always_inline)) {
    ds[s * kRows + i] *= factor;
  });
  for (int64_t s = 0; s < columns; s++) {
    float *weight = weights + s * kRows, *to = ds + s * kRows;
    for (int64_t i = 0; i < rows; i++) {
      weight[i] = cpu::exp(weight[i] - shift[i]);
      to[i] = weight[i] * (to[i] - row_sums[i]) * p.scale;
    }
  }
  ForFactors(p, b, [=](int64_t i, int64_t s, float factor) __attribute__((always_inline)) {
    weights[s * kRows + i] *= factor;
  });
}

// Sums of rows, `pitch` apart; null where a task computes none.
struct SumRows {
  float* data;
  int64_t pitch;
};

// Where the sums of a task go: dq of the block of queries, and dk and dv of the keys from `column`
// on.
struct Sums {
  SumRows dq, dk, dv;
  int64_t column;
};

// Adds what a block of scores contributes.
template <class T>
DLSYS_INLINE void AddBlock(const Attention& p, const Block& b, const Arrays<T>& arrays,
                           const Queries& queries, const Scratch& scratch, const Sums& sums) {
  const int64_t rows = b.RowCount(), columns = b.ColumnCount();
  const int64_t kv_head = b.h / p.Group();
  float *weights = scratch.weights.data(), *ds = scratch.ds.data();
  const Rows k = RowsOf(arrays.k + p.of_k.At(b.n, kv_head, b.column), columns, p.size,
                        p.of_k.position, scratch.k.data());
  const Rows v = RowsOf(arrays.v + p.of_v.At(b.n, kv_head, b.column), columns, p.value_size,
                        p.of_v.position, scratch.v.data());
  Multiply(columns, rows, p.size, {k.data, k.pitch, 1}, queries.packed_q, weights, kRows, false);
  Multiply(columns, rows, p.value_size, {v.data, v.pitch, 1}, queries.packed_dy, ds, kRows, false);
  Weigh(p, b, queries, scratch.row_sums.data(), weights, ds);
  const auto add = [](int64_t m, int64_t n, int64_t depth, Left a, const Rows& rows_of_b,
                      const SumRows& to, int64_t row) {
    Multiply(m, n, depth, a, Right::InPlace(rows_of_b), to.data + row * to.pitch, to.pitch, true);
  };
  if (sums.dq.data) add(rows, p.size, columns, {ds, 1, kRows}, k, sums.dq, 0);
  if (!sums.dk.data) return;
  const int64_t to = b.column - sums.column;
  add(columns, p.size, rows, {ds, kRows, 1}, queries.q, sums.dk, to);
  add(columns, p.value_size, rows, {weights, kRows, 1}, queries.dy, sums.dv, to);
}

// A result's rows of `size`, `stride` apart.
template <class T>
struct Result {
  T* data;
  int64_t count, size, stride;

  // Sums from 0 on: in the result itself where it is float32, else in scratch.
  DLSYS_INLINE SumRows Begin(float* scratch) const {
    SumRows sums{scratch, size};
    if constexpr (!kIs16Bit<T>) sums = {data, stride};
    for (int64_t i = 0; i < count; i++) std::fill_n(sums.data + i * sums.pitch, size, 0.f);
    return sums;
  }
  DLSYS_INLINE void Store(const SumRows& sums) const {
    if constexpr (kIs16Bit<T>)
      for (int64_t i = 0; i < count; i++)
        for (int64_t j = 0; j < size; j++) data[i * stride + j] = T(sums.data[i * size + j]);
  }
};

// What a task computes: of the keys [column, column_end) of a head of k and v, or of the queries
// [row, row_end) of one of q.
struct Part {
  bool queries, keys;
  int64_t n, kv_head, h, h_end, row, row_end, column, column_end;
};

template <class T>
DLSYS_INLINE void Compute(const Attention& p, const Part& part, const Arrays<T>& arrays,
                          const Scratch& scratch) {
  const int64_t columns = part.column_end - part.column;
  const Result<T> dk{arrays.dk + p.of_k.At(part.n, part.kv_head, part.column), columns, p.size,
                     p.of_k.position};
  const Result<T> dv{arrays.dv + p.of_v.At(part.n, part.kv_head, part.column), columns,
                     p.value_size, p.of_v.position};
  Sums sums{{}, {}, {}, part.column};
  if (part.keys) {
    sums.dk = dk.Begin(scratch.dk.data());
    sums.dv = dv.Begin(scratch.dv.data());
  }
  const int64_t real = p.Rows(part.n);
  for (int64_t h = part.h; h < part.h_end; h++) {
    for (int64_t row = part.row; row < part.row_end; row += kRows) {
      const int64_t last = std::min(row + kRows, part.row_end);
      Block b{part.n, h, row, std::clamp(real, row, last), 0, 0};
      const Result<T> dq{arrays.dq + p.of_q.At(part.n, h, row), last - row, p.size,
                         p.of_q.position};
      if (part.queries) sums.dq = dq.Begin(scratch.dq.data());
      const int64_t end = std::min(part.column_end, p.Columns(b.n, b.row_end));
      if (b.RowCount() && part.column < end) {
        const Queries queries = Prepare(p, b, arrays, scratch);
        for (b.column = part.column; b.column < end; b.column = b.column_end) {
          b.column_end = std::min(b.column + kColumns, end);
          AddBlock(p, b, arrays, queries, scratch, sums);
        }
      }
      if (part.queries) dq.Store(sums.dq);
    }
  }
  if (part.keys) {
    dk.Store(sums.dk);
    dv.Store(sums.dv);
  }
}

// Runs the parts that of(k) names, k in [0, n).
template <class T, class Of>
void RunParts(const Attention& p, int64_t n, int64_t sum_columns, const Arrays<T>& arrays,
              const Of& of) {
  const auto make = [&] { return Scratch(p, kIs16Bit<T> ? sum_columns : 0); };
  auto task = [&](int64_t begin, int64_t end, const Scratch& scratch) {
    Dispatch([&]() __attribute__((always_inline)) {
      for (int64_t k = begin; k < end; k++) Compute(p, of(k), arrays, scratch);
    });
  };
  ParallelForWithScratch(n, 1, make, task);
}

template <class T>
void Run(const Attention& p, const Arrays<T>& arrays) {
  const int64_t kv = p.batch * p.kv_heads, group = p.kv_heads ? p.Group() : 1;
  const auto of_keys = [&](bool queries, int64_t at, int64_t column, int64_t column_end) {
    const int64_t n = at / p.kv_heads, head = at % p.kv_heads;
    return Part{queries, true,   n,      head,      head * group, head * group + group,
                0,       p.rows, column, column_end};
  };
  if (kv >= kManyHeads || (p.rows <= kRows && p.columns <= kColumns))
    return RunParts(p, kv, p.columns, arrays, [&](int64_t at) __attribute__((always_inline)) {
      return of_keys(true, at, 0, p.columns);
    });
  const int64_t columns = CeilDiv(p.columns, kColumns), rows = CeilDiv(p.rows, kRows);
  RunParts(p, kv * columns, kColumns, arrays, [&](int64_t k) __attribute__((always_inline)) {
    const int64_t column = k % columns * kColumns;
    return of_keys(false, k / columns, column, std::min(column + kColumns, p.columns));
  });
  const int64_t heads = p.batch * p.heads;
  RunParts(p, heads * rows, 0, arrays, [&](int64_t k) __attribute__((always_inline)) {
    const int64_t at = k / rows, row = k % rows * kRows, h = at % p.heads;
    const int64_t row_end = std::min(row + kRows, p.rows);
    return Part{true, false, at / p.heads, h / group, h, h + 1, row, row_end, 0, p.columns};
  });
}

template <class T>
void Backward(const DLArray* q, const DLArray* k, const DLArray* v, const DLArray* y,
              const DLArray* lse, const DLArray* dy, const DLArrayList* optional, int64_t flags,
              float scale, int64_t seed, int64_t node, int64_t threshold, float keep,
              int64_t algorithm, [[maybe_unused]] int64_t precision, DLArray* dq, DLArray* dk,
              DLArray* dv) {
  const char* op = "attention_gradient";
  const Arrays<T> arrays{Input<T>(op, q),   Input<T>(op, k),   Input<T>(op, v),
                         Input<T>(op, y),   Input(op, lse),    Input<T>(op, dy),
                         Output<T>(op, dq), Output<T>(op, dk), Output<T>(op, dv)};
  CheckAlgorithm(op, algorithm);
  const Attention p =
      CheckedAttention(op, q, k, v, optional, {flags, scale, seed, node, threshold, keep});
  CheckResults(op, p, y, lse);
  CheckSameShape(op, y, dy);
  CheckSameShape(op, q, dq);
  CheckSameShape(op, k, dk);
  CheckSameShape(op, v, dv);
  Run(p, arrays);
}

template <class T>
void PackedBackward(const DLArray* qkv, const DLArray* y, const DLArray* lse, const DLArray* dy,
                    const DLArrayList* optional, int64_t flags, float scale, int64_t seed,
                    int64_t node, int64_t threshold, float keep, int64_t heads, int64_t kv_heads,
                    int64_t algorithm, [[maybe_unused]] int64_t precision, DLArray* dqkv) {
  const char* op = "packed_attention_gradient";
  const T* x = Input<T>(op, qkv);
  T* dx = Output<T>(op, dqkv);
  CheckAlgorithm(op, algorithm);
  const Attention p = CheckedPackedAttention(
      op, qkv, optional, {flags, scale, seed, node, threshold, keep}, heads, kv_heads);
  CheckResults(op, p, y, lse);
  CheckSameShape(op, y, dy);
  CheckSameShape(op, qkv, dqkv);
  const int64_t keys = PackedKeys(p), values = PackedValues(p);
  Run<T>(p, {x, x + keys, x + values, Input<T>(op, y), Input(op, lse), Input<T>(op, dy), dx,
             dx + keys, dx + values});
}

DLSYS_KERNEL_TYPED_NAMED(cpu, attention_gradient, "attention_gradient", Backward);
DLSYS_KERNEL_TYPED_NAMED(cpu, packed_attention_gradient, "packed_attention_gradient",
                         PackedBackward);
DLSYS_ALGORITHMS(cpu, attention_gradient, AttentionAlgorithms);
DLSYS_ALGORITHMS(cpu, packed_attention_gradient, AttentionAlgorithms);

}  // namespace
}  // namespace attention
}  // namespace cpu
}  // namespace dlsys
