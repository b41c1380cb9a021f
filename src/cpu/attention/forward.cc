// Attention on the CPU: y = softmax(q kᵀ scale) v and the logarithm of each row's sum, by the
// online softmax of Milakov and Gimelshein (2018) over blocks, as in FlashAttention-2 (Dao, 2023).
// A task is kRows queries of a head and goes over the keys; no T × T matrix is held. Sums are
// float32 for every storage type. Arrays are (batch, heads, positions, size) by their strides; y
// overlaps no input. Multiply-adds and exp limit it.
#include "cpu/attention/blocks.h"

namespace dlsys {
namespace cpu {
namespace attention {
namespace {

// Scratch of a task, and its rows' running maximum, sum and output.
struct Scratch {
  ScratchArray<float> packed_q, rows, keys, values, scores, y, largest, total, shrink;
  explicit Scratch(const Attention& p)
      : packed_q(Right::PackedNumel(p.size)),
        rows(BlockNumel(p.size)),
        keys(BlockNumel(p.size)),
        values(BlockNumel(p.value_size)),
        scores(kRows * kColumns),
        y(BlockNumel(p.value_size)),
        largest(kRows),
        total(kRows),
        shrink(kRows) {}
};

// Turns a block's scores into weights exp(score - maximum), with maxima and sums brought up to
// date, and notes by what earlier sums have to shrink. A row that has seen no key has the maximum
// -inf.
DLSYS_INLINE void Weigh(int64_t rows, int64_t columns, float* scores, float* largest, float* total,
                        float* shrink) {
  alignas(64) float grown[kRows], shift[kRows];
  for (int64_t i = 0; i < rows; i++) grown[i] = largest[i];
  for (int64_t s = 0; s < columns; s++) {
    const float* score = scores + s * kRows;
    for (int64_t i = 0; i < rows; i++) grown[i] = score[i] > grown[i] ? score[i] : grown[i];
  }
  for (int64_t i = 0; i < rows; i++) {
    shift[i] = grown[i] == -INFINITY ? 0.f : grown[i];
    shrink[i] = cpu::exp(largest[i] - shift[i]);
    largest[i] = grown[i];
    total[i] *= shrink[i];
  }
  for (int64_t s = 0; s < columns; s++) {
    float* score = scores + s * kRows;
    for (int64_t i = 0; i < rows; i++) {
      score[i] = cpu::exp(score[i] - shift[i]);
      total[i] += score[i];
    }
  }
}

template <class T>
struct Arrays {
  const T *q, *k, *v;
  T* y;
  float* lse;
};

// Writes the rows of a block: the sums over their total; 0 for a row that saw no key.
template <class T>
DLSYS_INLINE void Store(const Attention& p, const Block& b, const Scratch& scratch, int64_t pitch,
                        const Arrays<T>& arrays) {
  const int64_t first = (b.n * p.heads + b.h) * p.rows + b.row;
  for (int64_t i = 0; i < b.RowCount(); i++) {
    const float total = scratch.total.data()[i], largest = scratch.largest.data()[i];
    const float inverse = total == 0.f ? 0.f : 1.f / total;
    const float* from = scratch.y.data() + i * pitch;
    T* to = arrays.y + p.of_y.At(b.n, b.h, b.row + i);
    for (int64_t j = 0; j < p.value_size; j++) to[j] = T(from[j] * inverse);
    arrays.lse[first + i] = total == 0.f ? -INFINITY : largest + cpu::log(total);
  }
}

template <class T>
DLSYS_INLINE void ForwardRows(const Attention& p, Block b, const Scratch& scratch,
                              const Arrays<T>& arrays) {
  const int64_t pitch = RoundUp(p.value_size, kPad), count = b.RowCount();
  const int64_t kv_head = b.h / p.Group();
  float *y = scratch.y.data(), *scores = scratch.scores.data();
  std::fill(y, y + count * pitch, 0.f);
  std::fill(scratch.total.data(), scratch.total.data() + count, 0.f);
  std::fill(scratch.largest.data(), scratch.largest.data() + count, -INFINITY);
  const Rows q = RowsOf(arrays.q + p.of_q.At(b.n, b.h, b.row), count, p.size, p.of_q.position,
                        scratch.rows.data());
  const Right packed_q = Right::Transposed(q, count, p.size, scratch.packed_q.data());
  const int64_t end = p.Columns(b.n, b.row_end);
  for (b.column = 0; b.column < end; b.column = b.column_end) {
    b.column_end = std::min(b.column + kColumns, end);
    const int64_t columns = b.ColumnCount();
    const Rows k = RowsOf(arrays.k + p.of_k.At(b.n, kv_head, b.column), columns, p.size,
                          p.of_k.position, scratch.keys.data());
    const Rows v = RowsOf(arrays.v + p.of_v.At(b.n, kv_head, b.column), columns, p.value_size,
                          p.of_v.position, scratch.values.data());
    Multiply(columns, count, p.size, {k.data, k.pitch, 1}, packed_q, scores, kRows, false);
    FinishScores(p, b, scores);
    Weigh(count, columns, scores, scratch.largest.data(), scratch.total.data(),
          scratch.shrink.data());
    ForFactors(p, b, [=](int64_t i, int64_t s, float factor) __attribute__((always_inline)) {
      scores[s * kRows + i] *= factor;
    });
    for (int64_t i = 0; i < count; i++)
      for (int64_t j = 0; j < pitch; j++) y[i * pitch + j] *= scratch.shrink.data()[i];
    Multiply(count, p.value_size, columns, {scores, 1, kRows}, Right::InPlace(v), y, pitch, true);
  }
  Store(p, b, scratch, pitch, arrays);
}

// What stands in rows behind a sample's length.
template <class T>
DLSYS_INLINE void ClearRows(const Attention& p, const Block& b, const Arrays<T>& arrays) {
  const int64_t first = (b.n * p.heads + b.h) * p.rows;
  for (int64_t row = b.row; row < b.row_end; row++)
    std::fill_n(arrays.y + p.of_y.At(b.n, b.h, row), p.value_size, T(0.f));
  std::fill(arrays.lse + first + b.row, arrays.lse + first + b.row_end, -INFINITY);
}

template <class T>
void Run(const Attention& p, const Arrays<T>& arrays) {
  const int64_t blocks = CeilDiv(p.rows, kRows);
  const auto make = [&] { return Scratch(p); };
  auto task = [&](int64_t begin, int64_t end, const Scratch& scratch) {
    Dispatch([&]() __attribute__((always_inline)) {
      for (int64_t t = begin; t < end; t++) {
        Block b{t / blocks / p.heads, t / blocks % p.heads, t % blocks * kRows, 0, 0, 0};
        const int64_t row_end = std::min(b.row + kRows, p.rows);
        b.row_end = std::clamp(p.Rows(b.n), b.row, row_end);
        if (b.RowCount()) ForwardRows(p, b, scratch, arrays);
        b.row = b.row_end, b.row_end = row_end;
        if (b.RowCount()) ClearRows(p, b, arrays);
      }
    });
  };
  ParallelForWithScratch(p.batch * p.heads * blocks, 1, make, task);
}

template <class T>
void Forward(const DLArray* q, const DLArray* k, const DLArray* v, const DLArrayList* optional,
             int64_t flags, float scale, int64_t seed, int64_t node, int64_t threshold, float keep,
             int64_t algorithm, [[maybe_unused]] int64_t precision, DLArray* y, DLArray* lse) {
  const char* op = "attention";
  const Arrays<T> arrays{Input<T>(op, q), Input<T>(op, k), Input<T>(op, v), Output<T>(op, y),
                         Output(op, lse)};
  CheckAlgorithm(op, algorithm);
  const Attention p =
      CheckedAttention(op, q, k, v, optional, {flags, scale, seed, node, threshold, keep});
  CheckResults(op, p, y, lse);
  Run(p, arrays);
}

template <class T>
void PackedForward(const DLArray* qkv, const DLArrayList* optional, int64_t flags, float scale,
                   int64_t seed, int64_t node, int64_t threshold, float keep, int64_t heads,
                   int64_t kv_heads, int64_t algorithm, [[maybe_unused]] int64_t precision,
                   DLArray* y, DLArray* lse) {
  const char* op = "packed_attention";
  const T* x = Input<T>(op, qkv);
  CheckAlgorithm(op, algorithm);
  const Attention p = CheckedPackedAttention(
      op, qkv, optional, {flags, scale, seed, node, threshold, keep}, heads, kv_heads);
  CheckResults(op, p, y, lse);
  Run<T>(p, {x, x + PackedKeys(p), x + PackedValues(p), Output<T>(op, y), Output(op, lse)});
}

DLSYS_KERNEL_TYPED_NAMED(cpu, attention, "attention", Forward);
DLSYS_KERNEL_TYPED_NAMED(cpu, packed_attention, "packed_attention", PackedForward);
DLSYS_ALGORITHMS(cpu, attention, AttentionAlgorithms);
DLSYS_ALGORITHMS(cpu, packed_attention, AttentionAlgorithms);

}  // namespace
}  // namespace attention
}  // namespace cpu
}  // namespace dlsys
