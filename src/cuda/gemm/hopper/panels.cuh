// How operands come to shared memory: a thread of the producer warpgroup copies panels by TMA into
// a ring of stages. Panels of float32 that lie along N are turned there, and an epilogue's
// auxiliary operand comes to memory of its own.
#pragma once
#include "cuda/gemm/hopper/fragments.cuh"
#include "cuda/gemm/hopper/tiles.cuh"

namespace dlsys {
namespace cuda {
namespace hopper {

// A `Source` says how the panels of both operands are copied and where boxes of C go; its Layout is
// what it needs beside the tensor maps. It begins at a tile. Without kHasEpilogue there is a bias
// at most. With two producers, one copies A and one B. This one reads matrices, or batches of them;
// those of convolutions are in conv/channels_last/sources.cuh.

// Where wgmma reads A: in shared memory, or of float32 in registers, as it must be where A lies
// along M; kRegistersOfColumns where the rows of A are the columns of C.
enum class ReadsA { kShared, kRegisters, kRegistersOfColumns };

// True where tiles are those of C's transpose.
template <class Source>
constexpr bool kTransposed = Source::kReadsA == ReadsA::kRegistersOfColumns;
// True where a thread has the rows of RowAcross.
template <class Source>
constexpr bool kHasRowsAcross = Source::kReadsA != ReadsA::kShared && Source::kAlongM;
// The first row of a consumer's 64 that a thread has accumulators of, and how far below is the
// other.
template <class Source>
constexpr int kBelow = kHasRowsAcross<Source> ? 1 : 8;
template <class Source>
__device__ __forceinline__ int RowOfThread(int thread) {
  return kHasRowsAcross<Source> ? RowAcross(thread) : thread / 32 * 16 + thread % 32 / 4;
}

// What a source has made of the columns of C as it is stored, in boxes; then there is no bias.
enum class OfColumns {
  kNothing,
  // Layout::moments, (groups of kMomentsRows rows, n): means and sums of squared deviations from
  // them.
  kMoments,
  // C is relu's gradient of C + side, by Layout::bits: 0 where an element's bit is not set. Of it
  // Layout::sums, (groups of kRows rows, n): Σ c (x - mean) and Σ c, by Layout::mean, (n), and x,
  // the auxiliary operand, of C's shape: Layout::map_aux reads kTileM rows of 128 bytes. n is a
  // multiple of 64.
  kGradientSums,
  // C is what Source::Map makes of the accumulators; all tiles are stored from registers.
  kMapped
};

// Copies a panel's rows [0, kRows) to shared memory: one box along K, else boxes of 128 bytes along
// M or N.
template <class E, bool kAcross, bool kMulticast, int kRows>
__device__ __forceinline__ void LoadPanel(uint32_t to, const CUtensorMap* map, uint32_t barrier,
                                          int row, int k, int z) {
  constexpr int kTileK = 128 / (int)sizeof(E);
  if constexpr (!kAcross) {
    LoadBox<kMulticast>(to, map, barrier, k, row, z);
  } else {
#pragma unroll
    for (int first = 0; first < kRows; first += kTileK)
      LoadBox<kMulticast>(to + first * 128, map, barrier, row + first, k, z);
  }
}

template <class E, class T, bool kAlongM_, bool kAlongN_, ReadsA kReadsA_ = ReadsA::kShared>
class Matrices {
 public:
  struct Layout {};
  static constexpr bool kAlongM = kAlongM_, kAlongN = kAlongN_, kHasEpilogue = true;
  static constexpr ReadsA kReadsA = kReadsA_;
  static constexpr bool kSumsA = kAlongM_;  // where asked to
  static constexpr bool kTurnsB = sizeof(E) == 4 && kAlongN_;
  static constexpr OfColumns kOfColumns = OfColumns::kNothing;
  static constexpr bool kFloatResult = sizeof(E) == 4;
  static constexpr int kProducers = 1;

  // `first` of a tile's rows of B are copied by another block.
  __device__ __forceinline__ Matrices(const Params& params, const Layout&, const TileOrigin& origin,
                                      int first)
      : origin_(origin),
        col_(origin.col + first),
        width_(WidthOf<T>(params, origin, kTransposed<Matrices>)) {}

  // What a panel of a fitted tile brings to a stage.
  __device__ __forceinline__ uint32_t Nbytes() const {
    constexpr int kOfBox = 128 / (int)sizeof(E);
    return T::kPanelA + (width_ + kOfBox - 1) / kOfBox * kOfBox * T::kRowNbytes;
  }

  // Copies a panel to `a` and `b`, or to one of them.
  template <bool kOfA, bool kOfB>
  __device__ __forceinline__ void Load(const CUtensorMap* map_a, const CUtensorMap* map_b,
                                       int panel, uint32_t a, uint32_t b, uint32_t barrier) const {
    constexpr int kTileK = 128 / (int)sizeof(E);
    const int k = panel * kTileK, z = origin_.z;
    if (kOfA) LoadPanel<E, kAlongM, false, T::kTileM>(a, map_a, barrier, origin_.row, k, z);
    const auto load_b = [&](uint32_t to, int of) {
      LoadPanel<E, kAlongN, (T::kCluster > 1), T::kTileN / T::kCluster>(to, map_b, barrier, col_, k,
                                                                        of);
    };
    if constexpr (T::kFitted) {
      for (int first = 0; first < width_; first += kTileK)
        LoadBox<false>(b + first * T::kRowNbytes, map_b, barrier, col_ + first, k, z);
      return;
    }
    if (kOfB) load_b(b, z);
    if (kOfB && T::kBothParts) load_b(b + T::kPanelB / 2, z + 1);
  }

  static __device__ __forceinline__ void Store(const Layout&, const CUtensorMap* map, uint32_t from,
                                               int row, int col, int z) {
    StoreBox(map, from, col, row, z);
  }
  // The row of C, among those of all batches, that a row of the product is stored in.
  static __device__ __forceinline__ int64_t RowOf(const Params& params, const Layout&, int row,
                                                  int z) {
    return (int64_t)z * params.m + row;
  }

 private:
  const TileOrigin& origin_;
  const int col_, width_;
};

template <class T, class Source, bool kOfA, bool kOfB>
__device__ __forceinline__ void Produce(const CUtensorMap* map_a, const CUtensorMap* map_b,
                                        const Params& params, const typename Source::Layout& layout,
                                        uint32_t memory, uint32_t full, uint32_t empty) {
  const uint32_t rank = ClusterRankOf<T>();
  const int first = (int)rank * (T::kTileN / T::kCluster);
  RingPosition<T::kStages> at;
  Segments<T> segments(params);
  if constexpr (T::kHasHalo)
    Source::LoadFilter(map_b, layout, memory + T::kFilterAt, full + T::kFilterBarrierAt * 8);
  for (Segment segment; segments.Next(segment);) {
    const TileOrigin origin = OriginOf<T>(params, segment.tile, rank);
    const Source source(params, layout, origin, first);
    for (int panel = segment.begin; panel < segment.end; panel++, at.Advance()) {
      const uint32_t a = memory + at.stage * T::kStageNbytes, barrier = full + at.stage * 8;
      WaitForPhase(empty + at.stage * 8, at.parity ^ 1);
      if constexpr (T::kFitted)
        ArriveExpecting(barrier, source.Nbytes());
      else if (kOfA)
        ArriveExpecting(barrier, T::kCopiedNbytes);
      source.template Load<kOfA, kOfB>(map_a, map_b, panel, a,
                                       a + T::kPanelA + first * T::kRowNbytes, barrier);
    }
  }
}

// ---- panels of float32 across ----
// wgmma reads B of tf32 along K alone. Where B lies along N, the producer's other warps turn its
// boxes, each to where it was.

constexpr int kTurningWarps = 3;

// Transposes a box of 32 rows of 128 bytes, swizzled before and after, as a warp. A lane takes four
// rows by four columns at a time, such that those of a quarter of the warp lie in banks of their
// own both ways. For 3xtf32 the upper parts take the place of the elements, and the lower ones lie
// `lower` bytes further on.
template <bool kInParts>
__device__ __forceinline__ void TurnBox(unsigned char* box, int lower) {
  const int lane = threadIdx.x % 32, row4 = lane % 8;
  const int first = (row4 / 2 + lane / 8) % 4;  // of its columns, by fours
  float4 v[2][4];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int col4 = first + half * 4;
#pragma unroll
    for (int e = 0; e < 4; e++)
      v[half][e] = *(const float4*)(box + (row4 * 4 + e) * 128 + (col4 ^ (row4 % 2 * 4 + e)) * 16);
  }
  __syncwarp();
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const float4(&x)[4] = v[half];
    const int col4 = first + half * 4;
    const auto write = [&](int e, float a, float b, float c, float d) {
      unsigned char* const to = box + (col4 * 4 + e) * 128 + (row4 ^ (col4 % 2 * 4 + e)) * 16;
      if constexpr (kInParts) {
        const float x[4] = {a, b, c, d};
        float upper[4], rest[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const Tf32Parts parts = PartsOf(x[i]);
          upper[i] = __uint_as_float(parts.upper), rest[i] = __uint_as_float(parts.lower);
        }
        *(float4*)to = make_float4(upper[0], upper[1], upper[2], upper[3]);
        *(float4*)(to + lower) = make_float4(rest[0], rest[1], rest[2], rest[3]);
      } else {
        *(float4*)to = make_float4(a, b, c, d);
      }
    };
    write(0, x[0].x, x[1].x, x[2].x, x[3].x);
    write(1, x[0].y, x[1].y, x[2].y, x[3].y);
    write(2, x[0].z, x[1].z, x[2].z, x[3].z);
    write(3, x[0].w, x[1].w, x[2].w, x[3].w);
  }
}

// Turns the panels of B of all tiles, as one of the warps that do.
template <class T, class Source>
__device__ __forceinline__ void TurnPanels(const Params& params, unsigned char* shared,
                                           uint32_t full, uint32_t turned, int warp) {
  constexpr int kOfBox = 32;
  RingPosition<T::kStages> at;
  Segments<T> segments(params);
  for (Segment segment; segments.Next(segment);) {
    const TileOrigin origin = OriginOf<T>(params, segment.tile, 0);
    const int width = WidthOf<T>(params, origin, kTransposed<Source>);
    for (int panel = segment.begin; panel < segment.end; panel++, at.Advance()) {
      unsigned char* const b = shared + at.stage * T::kStageNbytes + T::kPanelA;
      WaitForPhase(full + at.stage * 8, at.parity);
      for (int col = warp * kOfBox; col < width; col += kTurningWarps * kOfBox)
        TurnBox<T::kBothParts>(b + col * T::kRowNbytes, T::kPanelB / 2);
      LetBulkFollow();  // wgmma reads by way of the same proxy
      Arrive(turned + at.stage * 8);
    }
  }
}

// ---- the auxiliary operand ----
// Columns of C are summed with it. It comes to memory of its own: a stage of the ring that is held
// through an epilogue would hold up the panels behind it.

// The auxiliary tiles that a tile of E takes, one behind the other.
template <class E, class T>
constexpr int kAuxOfTile = T::kTileN / T::template kStagedN<E>;

// Copies those of all tiles to `memory` as it becomes empty.
template <class E, class T, class Layout>
__device__ __forceinline__ void ProduceAux(const Params& params, const Layout& layout,
                                           uint32_t memory, uint32_t barriers) {
  constexpr int kColumns = 128 / (int)sizeof(E);  // of a box
  const uint32_t empty = barriers + T::kConsumers * T::kAuxTiles * 8;
  RingPosition<T::kAuxTiles> at;
  Segments<T> segments(params);
  Segment segment;
  for (int turn = 0; segments.Next(segment); turn++) {
    if (!IsInBoxes(params, segment)) continue;
    const TileOrigin origin = OriginOf<T>(params, segment.tile, 0);
    for (int k = 0; k < kAuxOfTile<E, T>; k++, at.Advance()) {
      const uint32_t full = barriers + (turn % T::kConsumers * T::kAuxTiles + at.stage) * 8;
      WaitForPhase(empty + at.stage * 8, at.parity ^ 1);
      ArriveExpecting(full, T::kAuxNbytes);
#pragma unroll
      for (int box = 0; box < T::kBuffers; box++) {
        const uint32_t to = memory + at.stage * T::kAuxNbytes + box * T::kTileM * 128;
        const int col = origin.col + (k * T::kBuffers + box) * kColumns;
        if constexpr (T::kHasHalo)
          layout.template LoadBlocks<T::kTileM>(to, &layout.map_aux, full, origin.row, col);
        else
          LoadBox<false>(to, &layout.map_aux, full, col, origin.row, 0);
      }
    }
  }
}

// A consumer's way through the auxiliary tiles. Each consumer has barriers of its own, so that none
// waits for the phase after the next.
template <class E, class T>
class AuxTiles {
 public:
  __device__ __forceinline__ AuxTiles(unsigned char* memory, uint32_t barriers)
      : memory_(memory),
        full_(barriers + threadIdx.x / 128 * T::kAuxTiles * 8),
        empty_(barriers + T::kConsumers * T::kAuxTiles * 8) {}

  // The next one, once it is there.
  __device__ __forceinline__ unsigned char* Wait() {
    WaitForPhase(full_ + at_.stage * 8, parities_ >> at_.stage & 1);
    parities_ ^= 1u << at_.stage;
    return memory_ + at_.stage * T::kAuxNbytes;
  }
  // Goes on from it, after all threads of the consumer are done with it.
  __device__ __forceinline__ void Release() {
    if (threadIdx.x % 128 == 0) Arrive(empty_ + at_.stage * 8);
    at_.Advance();
  }
  // Goes past those of a tile of the other consumer.
  __device__ __forceinline__ void Skip() { at_.Advance(kAuxOfTile<E, T>); }

 private:
  unsigned char* const memory_;
  const uint32_t full_, empty_;
  RingPosition<(T::kAuxTiles > 0 ? T::kAuxTiles : 1)> at_;
  uint32_t parities_ = 0;  // by place, of this consumer's next wait
};

}  // namespace hopper
}  // namespace cuda
}  // namespace dlsys
