// Reduce: the reduction of any axes of an array by a monoid on the CPU, a type R with
//   State                                 what a stretch of elements is reduced to
//   State Identity() const                the state of no elements
//   State Run(RowOf, first) const         of a contiguous run, whose index in its column is `first`
//   Block<N>                              the states of up to N columns, as arrays for SIMD:
//                                         Reduce(rows, Tile), then Get(column, row of a fold, Tile)
//   static bool IsShort(n, inner)         columns so short that each takes a lane
//   kNarrow                               the columns of rows that are folded
//   static State Combine(State, State)    of two stretches
//   Result(State, run) const              the element of y; `run` has no elements where what was
//                                         reduced is not contiguous
//
// Where the innermost axis is reduced, runs of contiguous elements are reduced one by one; where it
// is kept, strips of columns are, of which narrow ones fold into wide rows; and where n and inner
// are small, vectors run across columns of different outer indices. A long reduction is split into
// groups, whose states are then combined in their order. All of it depends on the shape only, for
// any number of threads. Elements are of any storage type. Memory bandwidth limits it.
#pragma once
#include "cpu/pointwise/strides.h"
#include "cpu/reduce/rows.h"
#include "cpu/runtime/parallel.h"
#include "operators/extents.h"

namespace dlsys {
namespace cpu {

inline constexpr int64_t kSplit = 65536;        // elements of a task, about
inline constexpr int64_t kColumns = 512;        // columns of a task
inline constexpr int64_t kFoldedColumns = 256;  // columns of a folded row
inline constexpr int64_t kShort = 32;           // elements of a short column

// Rows of columns: `count` of `width`, then one of `rest`. Where rows of memory are folded, columns
// that are equal modulo `cols` are one. The first has index `first` in the column.
struct Tile {
  int64_t first, count, width, rest, cols;
};

// Calls add(row, columns, k) for the rows of a tile; rows() gives a function that returns the next.
template <class F, class G>
DLSYS_INLINE void EachRow(const F& rows, const Tile& t, const G& add) {
  auto next = rows();
  for (int64_t k = 0; k < t.count; k++) add(next(), t.width, k);
  if (t.rest) add(next(), t.rest, t.count);
}

// Calls body(x, offsets of the columns in it, first column, count of columns) for kLanes short
// columns at a time. The last block repeats its last column.
template <class T, class F>
void ForShort(const T* x, const Extents& of, const F& body) {
  const int64_t columns = of.outer * of.inner, skip = (of.n - 1) * of.inner;
  ParallelFor((columns - 1) / kLanes + 1, RowGrain(kLanes * of.n), [&](int64_t begin, int64_t end) {
    Dispatch([&]() __attribute__((always_inline)) {
      for (int64_t k = begin; k < end; k++) {
        const int64_t first = k * kLanes, i = first % of.inner;
        const int count = (int)std::min<int64_t>(kLanes, columns - first);
        int32_t start[kLanes] = {};
        int64_t left = of.inner - i;  // columns until the next row of `outer`
        for (int j = 1; j < kLanes; j++) {
          const bool wraps = --left == 0;
          start[j] = start[j - 1] + (j < count) * (1 + wraps * (int32_t)skip);
          left = wraps ? of.inner : left;
        }
        body(x + first / of.inner * of.n * of.inner + i, start, first, count);
      }
    });
  });
}

template <class R, class T, class U>
class Reduction {
  using State = typename R::State;

 public:
  // `axes` is the mask of the axes of x that are reduced; y has its other elements, in order.
  Reduction(const R& reduce, const DLArray* x, int64_t axes, U* y)
      : reduce_(reduce), x_((const T*)x->data), numel_(Numel(x)), y_(y) {
    int64_t stride = numel_;
    for (int a = 0; a < x->ndim; a++) {
      stride /= x->shape[a];
      (axes >> a & 1 ? reduced_ : kept_).Add(x->shape[a], {stride});
    }
  }

  void Run() {
    const bool row_wise = reduced_.ndim && reduced_.stride[reduced_.ndim - 1][0] == 1;
    if (reduced_.ndim == 1) {
      const int64_t n = reduced_.size[0], inner = reduced_.stride[0][0];
      if (inner < kLanes && R::IsShort(n, inner)) return Short({numel_ / (n * inner), n, inner});
    }
    int64_t stride[1];
    if (row_wise) {
      cols_ = reduced_.PopInner(stride);
      Rows();
    } else {
      cols_ = kept_.PopInner(stride);
      Columns();
    }
  }

 private:
  void Short(const Extents& of) const {
    ForShort(x_, of,
             [=](const T* from, const int32_t* start, int64_t first, int count)
                 __attribute__((always_inline)) {
                   const Tile tile{0, of.n, kLanes, 0, kLanes};
                   const int64_t stride = of.inner;
                   auto rows = [=]() __attribute__((always_inline)) {
                     return [=, row = from - stride]() mutable __attribute__((always_inline)) {
                       row += stride;
                       return Gathered{row, start};
                     };
                   };
                   typename R::template Block<kLanes> block;
                   block.Reduce(rows, tile);
                   for (int j = 0; j < count; j++)
                     y_[first + j] = (U)reduce_.Result(block.Get(j, 0, tile), RowOf<T>{});
                 });
  }

  // The elements of a row of short columns.
  struct Gathered {
    const T* row;
    const int32_t* start;
    DLSYS_INLINE T operator[](int64_t column) const { return row[start[column]]; }
  };

  // Row-wise: a result takes `units` pieces of runs of cols_ elements.
  void Rows() const {
    const int64_t outputs = kept_.Count(), piece = std::min(cols_, kSplit);
    const int64_t pieces = (cols_ - 1) / piece + 1, units = reduced_.Count() * pieces;
    const int64_t per_group = std::max<int64_t>(1, kSplit / piece);
    const int64_t groups = (units - 1) / per_group + 1;
    const ScratchArray<State> states(groups > 1 ? outputs * groups : 0);
    State* partial = groups > 1 ? states.data() : nullptr;
    const int64_t grain = groups > 1 ? 1 : RowGrain(cols_ * units / pieces);
    ParallelFor(outputs * groups, grain, [&](int64_t begin, int64_t end) {
      Dispatch([&]() __attribute__((always_inline)) {
        Cursor<1> output(kept_, begin / groups);
        int64_t group = begin % groups;
        for (int64_t k = begin; k < end; k++) {
          const T* from = x_ + output.offset[0];
          const int64_t first = group * per_group;
          const State state =
              Pieces(from, piece, pieces, first, std::min(units, first + per_group));
          if (partial)
            partial[k] = state;
          else
            y_[k] = (U)reduce_.Result(state, RowOf<T>{from, cols_, cols_});
          if (++group < groups) continue;
          group = 0;
          output.Next();
        }
      });
    });
    if (partial) CombineGroups(partial, outputs, groups, 1, true);
  }

  // The state of pieces [begin, end) of an output that begins at `from`.
  DLSYS_INLINE State Pieces(const T* from, int64_t piece, int64_t pieces, int64_t begin,
                            int64_t end) const {
    const int64_t rows = begin ? begin / pieces : 0;
    Cursor<1> row(reduced_, rows);
    int64_t at = (begin - rows * pieces) * piece, first = rows * cols_ + at;
    auto next = [&]() __attribute__((always_inline)) {
      const T* run = from + row.offset[0] + at;
      const int64_t n = std::min(piece, cols_ - at);
      const State state = reduce_.Run(RowOf<T>{run, n, x_ + numel_ - run}, first);
      first += n;
      at += n;
      if (at == cols_) row.Next();
      at = at == cols_ ? 0 : at;
      return state;
    };
    State state = next();
    for (int64_t u = begin + 1; u < end; u++) state = R::Combine(state, next());
    return state;
  }

  // Column-wise: a row of cols_ results takes `rows` contiguous rows.
  void Columns() const {
    const int64_t outer = kept_.Count(), rows = reduced_.Count();
    const int64_t width = std::min(cols_, kColumns), strips = (cols_ - 1) / width + 1;
    const int64_t per_group = std::max<int64_t>(64, kSplit / width);
    const int64_t groups = (rows - 1) / per_group + 1;
    const bool adjacent = reduced_.ndim == 1 && reduced_.stride[0][0] == cols_;
    const bool folds = adjacent && cols_ <= R::kNarrow;
    const int64_t folded =
        folds ? std::max<int64_t>(1, std::min(kFoldedColumns / cols_, rows / 8)) : 1;
    const ScratchArray<State> states(groups > 1 ? outer * groups * cols_ : 0);
    State* partial = groups > 1 ? states.data() : nullptr;
    const int64_t grain = RowGrain(std::min(rows, per_group) * width);
    ParallelFor(outer * groups * strips, grain, [&](int64_t begin, int64_t end) {
      Dispatch([&]() __attribute__((always_inline)) {
        for (int64_t k = begin; k < end; k++) {
          const int64_t job = k / strips, col = k % strips * width,
                        first = job % groups * per_group;
          const int64_t count = std::min(rows, first + per_group) - first;
          const int64_t cols = std::min(width, cols_ - col);
          const T* from = x_ + Cursor<1>(kept_, job / groups).offset[0] + col;
          const int64_t to = job * cols_ + col;
          if (reduced_.ndim > 1)
            Strip(from, Tile{first, count, cols, 0, cols}, partial, to);
          else
            Regular(from, Tile{first, count / folded, folded * cols, count % folded * cols, cols},
                    folded, partial, to);
        }
      });
    });
    if (partial) CombineGroups(partial, outer, groups, cols_, false);
  }

  DLSYS_INLINE void Strip(const T* from, const Tile& tile, State* partial, int64_t to) const {
    auto rows = [&]() __attribute__((always_inline)) {
      return [from, at = Cursor<1>(reduced_, tile.first)]() mutable __attribute__((always_inline)) {
        const T* row = from + at.offset[0];
        at.Next();
        return row;
      };
    };
    ReduceTile(rows, tile, partial, to);
  }

  // Rows at one distance, of which `folded` are one.
  DLSYS_INLINE void Regular(const T* from, const Tile& tile, int64_t folded, State* partial,
                            int64_t to) const {
    const int64_t stride = reduced_.ndim ? reduced_.stride[0][0] : 0, step = folded * stride;
    from += tile.first * stride - step;
    auto rows = [=]() __attribute__((always_inline)) {
      return [row = from, step]() mutable __attribute__((always_inline)) {
        row += step;
        return row;
      };
    };
    ReduceTile(rows, tile, partial, to);
  }

  template <class F>
  DLSYS_INLINE void ReduceTile(const F& rows, const Tile& t, State* partial, int64_t to) const {
    typename R::template Block<kColumns> block;
    block.Reduce(rows, t);
    auto store = [&](int64_t c, State state) __attribute__((always_inline)) {
      if (partial)
        partial[to + c] = state;
      else
        y_[to + c] = (U)reduce_.Result(state, RowOf<T>{});
    };
    const int64_t folded = t.width / t.cols;
    if (folded == 1) {
      for (int64_t c = 0; c < t.cols; c++) store(c, block.Get(c, 0, t));
      return;
    }
    for (int64_t c = 0; c < t.cols; c++) {
      State state = block.Get(c, 0, t);
      for (int64_t a = 1; a < folded; a++) state = R::Combine(state, block.Get(c, a, t));
      store(c, state);
    }
  }

  // y (outer, cols) of the states of the groups, partial (outer, groups, cols).
  void CombineGroups(const State* partial, int64_t outer, int64_t groups, int64_t cols,
                     bool row_wise) const {
    ParallelFor(outer * cols, RowGrain(groups), [&](int64_t begin, int64_t end) {
      for (int64_t k = begin; k < end; k++) {
        const State* states = partial + k / cols * groups * cols + k % cols;
        State state = states[0];
        for (int64_t g = 1; g < groups; g++) state = R::Combine(state, states[g * cols]);
        const RowOf<T> none{};
        y_[k] = (U)reduce_.Result(
            state, row_wise ? RowOf<T>{x_ + Cursor<1>(kept_, k).offset[0], cols_, cols_} : none);
      }
    });
  }

  const R reduce_;
  const T* const x_;
  const int64_t numel_;
  U* const y_;
  Loop<1> kept_, reduced_;
  int64_t cols_ = 1;  // of the innermost axis
};

// y = x reduced over the axes in the mask.
template <class T, class U, class R>
void Reduce(const R& reduce, const DLArray* x, int64_t axes, DLArray* y) {
  U* const out = (U*)y->data;
  const int64_t count = Numel(y);
  if (count == 0) return;
  if (Numel(x) == 0) {
    const U empty = (U)reduce.Result(reduce.Identity(), RowOf<T>{});
    return Serially([=] { std::fill(out, out + count, empty); });
  }
  Reduction<R, T, U>(reduce, x, axes, out).Run();
}

// The monoid of a line of math/monoids.h. Of long columns, kTree elements combine, in the type that
// `Of` gives, before they enter the state.
template <class M>
struct Listed : M {
  using State = typename M::State;
  static constexpr int64_t kNarrow = kFoldedColumns / 2;

  DLSYS_INLINE static bool IsShort(int64_t n, int64_t) { return n <= kShort; }
  DLSYS_INLINE static State Identity() { return M::kIdentity; }
  DLSYS_INLINE static State Combine(State a, State b) { return M::Combine(a, b); }
  template <class T>
  DLSYS_INLINE static float Result(State s, const RowOf<T>&) {
    return (float)s;
  }
  // Two accumulators hide the latency of Combine.
  template <class T>
  DLSYS_INLINE static State Run(const RowOf<T>& x, int64_t) {
    State lane[kLanes], other[kLanes];
    for (int j = 0; j < kLanes; j++) lane[j] = other[j] = M::kIdentity;
    auto add = [](State(&to)[kLanes], const auto* from) __attribute__((always_inline)) {
      for (int j = 0; j < kLanes; j++) to[j] = Combine(to[j], M::Of(from[j]));
    };
    int64_t k = 0;
    for (; k + 2 * kLanes <= x.n; k += 2 * kLanes) {
      add(lane, x.data + k);
      add(other, x.data + k + kLanes);
    }
    for (int j = 0; j < kLanes; j++) lane[j] = Combine(lane[j], other[j]);
    for (; k + kLanes <= x.n; k += kLanes) add(lane, x.data + k);
    if (k < x.n) add(lane, Tail(x, k, (Lane<T>)M::kIdentity).lane);
    return FoldLanes(lane,
                     [](State a, State b) __attribute__((always_inline)) { return Combine(a, b); });
  }

  template <int N>
  struct Block {
    alignas(64) State state[N];
    template <class F>
    DLSYS_INLINE void Reduce(const F& rows, const Tile& t) {
      std::fill(state, state + t.width, M::kIdentity);
      auto next = rows();
      int64_t k = 0;
      for (; N > kLanes && k + M::kTree <= t.count; k += M::kTree) {
        decltype(next()) r[M::kTree];
        for (auto& row : r) row = next();
        for (int64_t c = 0; c < t.width; c++)
          state[c] = M::Combine(state[c], (State)Tree<M::kTree>(r, c));
      }
      for (; k < t.count; k++) Add(next(), t.width);
      if (t.rest) Add(next(), t.rest);
    }
    template <int kRows, class E>
    DLSYS_INLINE static auto Tree(const E* r, int64_t c) {
      if constexpr (kRows == 1)
        return M::Of(r[0][c]);
      else
        return M::Combine(Tree<kRows / 2>(r, c), Tree<kRows / 2>(r + kRows / 2, c));
    }
    template <class E>
    DLSYS_INLINE void Add(const E& row, int64_t cols) {
      for (int64_t c = 0; c < cols; c++) state[c] = M::Combine(state[c], (State)M::Of(row[c]));
    }
    DLSYS_INLINE State Get(int64_t c, int64_t a, const Tile& t) const {
      return state[a * t.cols + c];
    }
  };
};

}  // namespace cpu
}  // namespace dlsys
