// GEMM by wgmma and TMA, for sm_90a: bfloat16, float16, and float32 as tf32 or 3xtf32.
//
// Warp specialization: one thread of a producer warpgroup copies operand panels by TMA into a ring
// of stages in shared memory (panels.cuh), two consumer warpgroups multiply them into accumulators
// in registers (multiply.cuh, fragments.cuh). They halve a tile (cooperative), or take tiles in
// turn, so that one stores while the other multiplies (ping-pong). Blocks are persistent, one a
// multiprocessor; two of a cluster share the panels of B by multicast. Tiles that would not fill a
// wave are shared equally along K (stream-K: tiles.cuh, splits.cuh). 3xtf32 makes three products,
// of the upper and lower parts of both operands (Ootomo and Yokota 2022,
// doi:10.1177/10943420221090256). A consumer's warp makes the epilogue of its own rows
// (epilogue.cuh, boxes.cuh); their side comes by TMA while the tile is multiplied.
//
// Operands lie along K or, of 16 bits, along M or N. A of float32 may lie along M, B along N: by
// fragments, tiles of C's transpose, or turned in shared memory. C is row-major and overlaps
// nothing but its side, each element of which is read before that of C is stored. Large shapes are
// limited by the tensor cores' power, K below about 1,000 by the stores of C.
#pragma once
#include "cuda/gemm/hopper/fragments.cuh"
#include "cuda/gemm/hopper/splits.cuh"
#include "cuda/runtime/launch.cuh"

namespace dlsys {
namespace cuda {
namespace hopper {

// Those of a warp of the consumers.
template <class E, class T, class Source>
__device__ __forceinline__ Boxes<E, T, Source> BoxesOf(const Params& params,
                                                       const typename Source::Layout& layout,
                                                       unsigned char* shared, uint32_t barriers,
                                                       int warp) {
  return Boxes<E, T, Source>(params, layout,
                             shared + T::kStages * T::kStageNbytes + warp * (T::kStagingNbytes / 4),
                             barriers + (T::kBoxBarriersAt + warp * T::kBuffers) * 8,
                             {shared + T::kAuxAt, barriers + T::kAuxBarriersAt * 8});
}

template <class E, class T, class Source, bool kExact>
__device__ __forceinline__ void Consume(const CUtensorMap* map_c, const CUtensorMap* map_other,
                                        const Params& params, const typename Source::Layout& layout,
                                        unsigned char* shared, uint32_t full, uint32_t empty) {
  using R = std::conditional_t<Source::kFloatResult, float, E>;  // of C
  constexpr bool kInBoxes = !T::kFitted;
  const int consumer = threadIdx.x / 128, thread = threadIdx.x % 128;
  const int part = T::kPingPong ? 0 : consumer, first_row = part * T::kRows;  // of a tile
  const uint32_t rank = ClusterRankOf<T>(), memory = SharedAddress(shared);
  const auto origin_of = [&](const Segment& segment) {
    TileOrigin origin = OriginOf<T>(params, segment.tile, rank);
    origin.row += first_row;
    return origin;
  };
  const auto release = [&](int stage) {
    if (thread < T::kCluster) ArriveAt(empty + stage * 8, thread);
  };
  // Under ping-pong a consumer waits for its turn: it may not be two phases of a stage ahead.
  constexpr int kTurn = 1 + T::kConsumers;
  if (T::kPingPong && consumer == 1) ArriveThreads(kTurn, 256);
  Boxes<R, T, Source> boxes = BoxesOf<R, T, Source>(params, layout, shared, full, threadIdx.x / 32);
  Accumulators<T> d;
  RowSums<E, T, Source> sums(params, memory);
  Pair<R> bias[kBiasPairs<T, Source>];
  RingPosition<T::kStages> at;
  Segments<T> segments(params);
  Segment segment, next;
  bool more = segments.Next(next);
  for (int turn = 0; more; turn++) {
    segment = next;
    more = segments.Next(next);
    const int count = segment.end - segment.begin;
    const bool in_boxes = kInBoxes && IsInBoxes(params, segment);
    if (T::kPingPong && turn % 2 != consumer) {
      at.Advance(count);
      if (in_boxes) boxes.Skip();
      continue;
    }
    const TileOrigin origin = origin_of(segment);
    if (in_boxes) {
      boxes.Begin(origin, map_other);
      if (Source::kOfColumns == OfColumns::kNothing && params.bias)
        ReadBias<R, T, Source>(bias, params, origin);
    }
    sums.Begin(segment, origin.col);
    if (T::kPingPong) SyncThreads(kTurn + consumer, 256);
    const auto issued = [&] {
      if (T::kPingPong && more) ArriveThreads(kTurn + 1 - consumer, 256);
    };
    if constexpr (kExact)
      MultiplyFragmentsExactly<T, Source::kAlongM, Source::kTurnsB>(d, count, shared, full,
                                                                    first_row, at, release);
    else if constexpr (Source::kReadsA != ReadsA::kShared)
      MultiplyFragments<T, Source::kAlongM, Source::kTurnsB>(d, sums, count, shared, full,
                                                             first_row, at, release, issued);
    else if constexpr (T::kHasHalo)
      MultiplyShifted<E, T>(d, memory, full, at, release, issued);
    else
      MultiplyPanels<E, T, Source::kAlongM, Source::kAlongN>(d, sums, count, memory, full,
                                                             first_row, at, release, issued);
    sums.Store(segment, origin.row);
    if (in_boxes) {
      if (segment.splits > 1) AddPartials<T>(d, params, segment, rank, part, consumer);
      if constexpr (Source::kOfColumns == OfColumns::kMapped)
        Source::Map(d, params, layout, origin);
      if constexpr (kInBoxes) StoreTile<R, T, Source>(d, bias, boxes, params, map_c, map_other);
      continue;
    }
    const int width = WidthOf<T>(params, origin, kTransposed<Source>);
    WritePartial<T>(d, params, segment, width, rank, part, consumer);
    if (segment.splits == 1)
      StoreSlice<R, T, Source>(params, segment, origin, rank, part, consumer);
  }
  WaitForStores();
  // A cluster has written its splits before it waits for others': the first split of a tile is the
  // last that it makes.
  Segments<T> again(params);
  while (again.Next(segment) && segment.tile < params.split_tiles)
    if (segment.splits > 1 && !IsOwned(params, segment))
      StoreSlice<R, T, Source>(params, segment, origin_of(segment), rank, part, consumer);
}

template <class E, class T, class Source, bool kExact>
__global__ __launch_bounds__(T::kThreads, 1) void GemmKernel(
    const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b,
    const __grid_constant__ CUtensorMap map_c, const __grid_constant__ CUtensorMap map_other,
    const Params params, const __grid_constant__ typename Source::Layout layout) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __shared__ __align__(8) uint64_t barriers[T::kBarriers];
  unsigned char* shared = DynamicShared<unsigned char>();
  shared += -SharedAddress(shared) & (T::kAlignment - 1);
  const uint32_t full = SharedAddress(barriers), empty = full + 8 * T::kStages;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < T::kStages; stage++) {
      InitBarrier(full + stage * 8, 1);
      InitBarrier(empty + stage * 8, (T::kPingPong ? 1 : T::kConsumers) * T::kCluster);
    }
    for (int k = T::kBoxBarriersAt; k < T::kBarriers; k++)
      InitBarrier(full + k * 8, Source::kTurnsB && k >= T::kTurnedAt ? kTurningWarps * 32 : 1);
    PublishBarriers();
  }
  if constexpr (RowSums<E, T, Source>::kByProducts) {
    if (threadIdx.x < T::kOnesNbytes / 4)
      ((uint32_t*)(shared + T::kOnesAt))[threadIdx.x] = Packed<E>(1.f, 1.f);
    LetBulkFollow();
  }
  if (T::kCluster > 1)
    MeetCluster();
  else
    __syncthreads();
  GridDependencySynchronize();
  if (threadIdx.x / 128 == T::kConsumers) {
    ReduceRegisters<Source::kTurnsB ? 72 : 40>();
    const auto produce = [&](auto of_a, auto of_b) {
      Produce<T, Source, decltype(of_a)::value, decltype(of_b)::value>(
          &map_a, &map_b, params, layout, SharedAddress(shared), full, empty);
    };
    const int warp = threadIdx.x / 32 - T::kConsumers * 4, lane = threadIdx.x % 32;
    if constexpr (Source::kProducers == 1) {
      if (warp == 0 && lane == 0) produce(std::true_type(), std::true_type());
    } else {
      if (warp == 0 && lane == 0) produce(std::true_type(), std::false_type());
      if (warp == 1 && lane == 0) produce(std::false_type(), std::true_type());
    }
    if constexpr (Source::kTurnsB)
      if (warp > 0) TurnPanels<T, Source>(params, shared, full, full + T::kTurnedAt * 8, warp - 1);
    if constexpr (Source::kOfColumns == OfColumns::kGradientSums)
      if (warp == 2 && lane == 0)
        ProduceAux<E, T>(params, layout, SharedAddress(shared) + T::kAuxAt,
                         full + T::kAuxBarriersAt * 8);
  } else {
    RaiseRegisters<Source::kTurnsB ? 216 : 232>();
    Consume<E, T, Source, kExact>(&map_c, &map_other, params, layout, shared, full, empty);
  }
  TriggerProgrammaticLaunch();
  if (T::kCluster > 1) LeaveCluster();  // peers may still copy to its memory and arrive there
#endif
}

}  // namespace hopper
}  // namespace cuda
}  // namespace dlsys
