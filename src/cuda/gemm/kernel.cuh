// The matrix product by tiles; matmul.cuh has the contract.
//
// A block computes a tile of C from panels that pass through shared memory, and writes it by way of
// shared memory too, in rows. When C has too few tiles to fill the chip, the depth is split over
// blocks: from sm_90 on over a cluster, whose blocks add each other's tiles through distributed
// shared memory; before, partial products lie in scratch and a second kernel adds them. Both ways
// the order of additions is fixed.
#pragma once
#include "cuda/gemm/epilogue.cuh"
#include "cuda/gemm/tile.cuh"

namespace dlsys {
namespace cuda {

constexpr int kMaxSplits = 8;  // the largest cluster that every chip has

struct Problem {
  Product product;
  int row_tiles, col_tiles, splits;
  int64_t part;           // the depth is cut into `splits` parts of `part`, whole quads
  bool whole_a, whole_b;  // rows and base address allow 16-byte copies
  bool whole_out;         // and so do those of C and of what the epilogue reads
  float* partial;         // (splits, m, n) and then (splits, sums), or null: a cluster adds
  bool early;             // it may be set up while earlier kernels run
};

struct Place {
  int row, col, split;  // counting tiles
};

__device__ __forceinline__ int CeilDiv32(int n, int d) { return (n + d - 1) / d; }

// Which tile block number `block` computes. Its splits are neighbours, as a cluster's blocks are;
// tiles go down groups of eight tile rows, so that blocks that run together share panels in the L2
// cache.
__device__ __forceinline__ Place FindPlace(const Problem& problem, int block) {
  constexpr int kGroup = 8;
  const int split = block % problem.splits;
  const int tile = block / problem.splits;
  const int group = tile / (kGroup * problem.col_tiles);
  const int in_group = tile % (kGroup * problem.col_tiles);
  const int height = min(kGroup, problem.row_tiles - group * kGroup);
  return {group * kGroup + in_group % height, in_group / height, split};
}

// The sums over the depth of one operand's panels, each thread a width and a share of the layers.
template <class T, class P, int kWidth>
__device__ __forceinline__ float SumLayers(const float* panel) {
  constexpr int kShare = T::kDepth / (T::kThreads / kWidth);
  const int w = threadIdx.x % kWidth, d = threadIdx.x / kWidth * kShare;
  float sums[4] = {};
#pragma unroll
  for (int k = 0; k < kShare; k++) sums[k % 4] += P::At(panel, w, d + k);
  return sums[0] + sums[1] + (sums[2] + sums[3]);
}

// Which operand's sums a block has a share in.
struct Summed {
  bool a, b;
  __device__ __forceinline__ Summed(const Product& product, const Place& place)
      : a(product.sums && product.sums_of_a && place.col == 0),
        b(product.sums && !product.sums_of_a && place.row == 0) {}
};

// The number, in its tile, of the operand sum that a thread makes; the first threads may have
// elements of C.
template <class T>
__device__ __forceinline__ int OfSums() {
  return T::kThreads - 1 - (int)threadIdx.x;
}

// Leaves a block's share of the sums in the first of `shares`, which has one of each thread.
template <class T>
__device__ __forceinline__ void AddShares(Summed summed, float* shares) {
  const int w = OfSums<T>();
  const auto add = [&](auto width) {
    constexpr int kWidth = decltype(width)::value;
    if (w >= kWidth) return;
    float sum = 0.f;
#pragma unroll
    for (int share = 0; share < T::kThreads; share += kWidth) sum += shares[share + w];
    shares[w] = sum;
  };
  if (summed.a) add(std::integral_constant<int, T::kRows>());
  if (summed.b) add(std::integral_constant<int, T::kCols>());
}

// Calls write(number, sum) for each finished operand sum of this block's tile, from the shares of
// the blocks of its cluster.
template <class T, class F>
__device__ __forceinline__ void FinishSums(const Problem& problem, const Place& place,
                                           Summed summed, const float* shares, int splits,
                                           F&& write) {
  const int w = OfSums<T>();
  const int64_t at =
      summed.a ? (int64_t)place.row * T::kRows + w : (int64_t)place.col * T::kCols + w;
  if (!(summed.a && w < T::kRows && at < problem.product.m) &&
      !(summed.b && w < T::kCols && at < problem.product.n))
    return;
  float of[kMaxSplits], sum = 0.f;
#pragma unroll
  for (int k = 0; k < kMaxSplits; k++)
    of[k] = k >= splits ? 0.f : splits > 1 ? OfPeer(shares, k)[w] : shares[w];
#pragma unroll
  for (int k = 0; k < kMaxSplits; k++) sum += of[k];
  write(at, sum);
}

// The sum of this block's tiles at one place.
template <class T>
__device__ __forceinline__ float4 SumTiles(const float* tile) {
  float4 v = *(const float4*)tile;
#pragma unroll
  for (int k = 1; k < T::kTiles; k++) v = Sum(v, *(const float4*)(tile + k * T::kTileNumel));
  return v;
}
// The same of kCount quads, `step` apart, over the whole cluster; there is `count` of them, and
// copies of the last one. What comes from other blocks takes long, so all is asked for at once.
template <int kCount>
__device__ __forceinline__ void SumPeers(const float* tile, int step, int count, int splits,
                                         float4 (&sums)[kCount]) {
#pragma unroll
  for (int k = 0; k < kCount; k++) sums[k] = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 2
  for (int peer = 0; peer < splits; peer++) {
    const float* from = splits > 1 ? OfPeer(tile, peer) : tile;
    float4 v[kCount];
#pragma unroll
    for (int k = 0; k < kCount; k++) v[k] = *(const float4*)(from + min(k, count - 1) * step);
#pragma unroll
    for (int k = 0; k < kCount; k++) sums[k] = Sum(sums[k], v[k]);
  }
}

// Of the quads of its tile those that a block finishes, all or its share of the cluster's: a thread
// takes every T::kThreads-th.
template <class T>
struct Share {
  static constexpr int kInRow = T::kCols / 4, kQuads = T::kRows * kInRow;
  static_assert(T::kThreads % kInRow == 0, "a thread keeps to its columns");
  int begin, end;
  __device__ __forceinline__ Share(int splits, int split) {
    const int share = splits > 1 ? CeilDiv32(kQuads / kInRow, splits) * kInRow : kQuads;
    begin = split * share;
    end = min(begin + share, kQuads);
  }
  static __device__ __forceinline__ int At(int q) {
    return q / kInRow * T::kTilePitch + q % kInRow * 4;
  }
  static constexpr int kStep = T::kThreads / kInRow * T::kTilePitch;  // to the thread's next
};

// Leaves the sum of this block's tiles in the first.
template <class T>
__device__ __forceinline__ void AddTiles(float* tile) {
  if (T::kTiles > 1)
    for (int q = threadIdx.x; q < Share<T>::kQuads; q += T::kThreads)
      *(float4*)(tile + Share<T>::At(q)) = SumTiles<T>(tile + Share<T>::At(q));
}

// Adds up this block's tiles, and those of the cluster, and writes what this block has to write.
template <class T>
__device__ __forceinline__ void WriteTile(const Problem& problem, const Place& place, float* tile) {
  constexpr int kInRow = Share<T>::kInRow, kBatch = 2;
  const bool cluster = problem.splits > 1 && !problem.partial;
  Product product = problem.product;
  if (problem.partial) {
    product.c = problem.partial + place.split * product.m * product.n;
    product.epilogue = Epilogue{};
  }
  const Share<T> share(cluster ? problem.splits : 1, cluster ? place.split : 0);
  const int begin = share.begin, end = share.end;
  const int64_t row = (int64_t)place.row * T::kRows;
  const int64_t col = (int64_t)place.col * T::kCols + (begin + threadIdx.x) % kInRow * 4;
  const float4 bias = ReadBias(product, col, problem.whole_out);
  if (cluster) {
    AddTiles<T>(tile);
    MeetCluster();
  }
  for (int first = begin + threadIdx.x; first < end; first += kBatch * T::kThreads) {
    Quad quads[kBatch];
#pragma unroll
    for (int k = 0; k < kBatch; k++) {
      const int q = first + k * T::kThreads;
      quads[k].col = col;
      quads[k].row = q < end ? row + q / kInRow : product.m;
      ReadSide(product, problem.whole_out, quads[k]);
    }
    const float* from = tile + Share<T>::At(first);
    const int count = (end - first + T::kThreads - 1) / T::kThreads;
    float4 sums[kBatch];
    if (cluster) {
      SumPeers<kBatch>(from, Share<T>::kStep, count, problem.splits, sums);
    } else {
#pragma unroll
      for (int k = 0; k < kBatch; k++)
        sums[k] = SumTiles<T>(from + min(k, count - 1) * Share<T>::kStep);
    }
#pragma unroll
    for (int k = 0; k < kBatch; k++)
      quads[k].x[0] = sums[k].x, quads[k].x[1] = sums[k].y, quads[k].x[2] = sums[k].z,
      quads[k].x[3] = sums[k].w;
#pragma unroll
    for (int k = 0; k < kBatch; k++) Write(product, problem.whole_out, bias, quads[k]);
  }
}

// A block's tile on its way from panels to shared memory.
template <class T, template <class, bool, bool> class Accumulator, bool kTransA, bool kTransB>
class TileProduct {
  using PanelA = typename Accumulator<T, kTransA, kTransB>::PanelA;
  using PanelB = typename Accumulator<T, kTransA, kTransB>::PanelB;
  static constexpr int kStage = PanelA::kNumel + PanelB::kNumel;

 public:
  __device__ __forceinline__ TileProduct(const Problem& problem, const Place& place, float* memory)
      : problem_(problem),
        memory_(memory),
        begin_(place.split * problem.part),
        depth_((int)min(problem.part, problem.product.k - begin_)),
        panels_((depth_ + T::kDepth - 1) / T::kDepth),
        a_(problem.product.a, problem.product.m, kTransA ? problem.product.m : problem.product.k,
           (int64_t)place.row * T::kRows, begin_),
        b_(problem.product.b, problem.product.n, kTransB ? problem.product.k : problem.product.n,
           (int64_t)place.col * T::kCols, begin_) {}

  // Begins to copy the first panels.
  __device__ __forceinline__ void Begin() {
#pragma unroll 1
    for (int panel = 0; panel < T::kStages - 1; panel++) Copy(panel);
  }

  // Leaves the groups' sums in T::kTiles tiles at the beginning of the memory, and the block's
  // share of the sums of an operand in the first of `shares`, one a thread. Calls meanwhile() while
  // panels are on their way.
  template <class F>
  __device__ __forceinline__ void Finish(Summed summed, float* shares, F&& meanwhile) {
    const int group = threadIdx.x / T::kGroupThreads;
    Accumulator<T, kTransA, kTransB> accumulator(problem_.product);
    float sum = 0.f;
    for (int panel = 0; panel < panels_; panel++) {
      WaitForCopies<T::kStages - 2>();
      __syncthreads();
      const float* from = memory_ + panel % T::kStages * kStage;
      accumulator.Add(from, from + PanelA::kNumel, group * T::kGroupDepth, [&] {
        Copy(panel + T::kStages - 1);
        if (panel == 0) meanwhile();
      });
      if constexpr (PanelA::kHasSums)
        if (summed.a) sum += SumLayers<T, PanelA, T::kRows>(from);
      if constexpr (PanelB::kHasSums)
        if (summed.b) sum += SumLayers<T, PanelB, T::kCols>(from + PanelA::kNumel);
    }
    if (panels_ == 0) meanwhile();
    WaitForCopies<0>();
    __syncthreads();
    TriggerProgrammaticLaunch();
    shares[threadIdx.x] = sum;
#pragma unroll
    for (int round = 0; round < T::kGroups; round += T::kTiles) {
      if (group / T::kTiles * T::kTiles == round)
        accumulator.Store(memory_ + group % T::kTiles * T::kTileNumel, round > 0);
      __syncthreads();
    }
    AddShares<T>(summed, shares);
  }

 private:
  __device__ __forceinline__ void Copy(int panel) {
    if (panel < panels_) {
      float* to = memory_ + panel % T::kStages * kStage;
      a_.Copy(to, depth_ - panel * T::kDepth, problem_.whole_a);
      b_.Copy(to + PanelA::kNumel, depth_ - panel * T::kDepth, problem_.whole_b);
    }
    CloseCopies();
  }

  const Problem& problem_;
  float* const memory_;
  const int64_t begin_;
  const int depth_, panels_;
  PanelA a_;
  PanelB b_;
};

template <class T, template <class, bool, bool> class Accumulator, bool kTransA, bool kTransB>
__global__ __launch_bounds__(T::kThreads, T::kResident) void ProductKernel(const Problem problem) {
  float* const memory = DynamicShared<float>();
  __shared__ float shares[T::kThreads];
  const Product& product = problem.product;
  const Place place = FindPlace(problem, blockIdx.x);
  const Summed summed(product, place);
  TileProduct<T, Accumulator, kTransA, kTransB> tile(problem, place, memory);
  GridDependencySynchronize();
  tile.Begin();
  tile.Finish(summed, shares, [] {});
  WriteTile<T>(problem, place, memory);
  const bool cluster = problem.splits > 1 && !problem.partial;
  if ((summed.a || summed.b) && !(cluster && place.split > 0)) {
    float* to = product.sums;
    if (problem.partial)
      to = problem.partial + problem.splits * product.m * product.n +
           place.split * (summed.a ? product.m : product.n);
    FinishSums<T>(problem, place, summed, shares, cluster ? problem.splits : 1,
                  [&](int64_t at, float sum) { to[at] = sum; });
  }
  if (cluster) LeaveCluster();  // nobody goes while others read its memory
}

// What a block keeps in shared memory: panels, and then tiles.
template <class T, class Accumulator>
constexpr size_t MemoryNbytes() {
  using PanelA = typename Accumulator::PanelA;
  using PanelB = typename Accumulator::PanelB;
  constexpr int kPanels = T::kStages * (PanelA::kNumel + PanelB::kNumel);
  constexpr int kTiles = T::kTiles * T::kTileNumel;
  return (kPanels > kTiles ? kPanels : kTiles) * sizeof(float);
}

// kPlainA: where A is never transposed.
template <class T, template <class, bool, bool> class Accumulator, bool kPlainA = false>
void LaunchTiles(const char* op, const Problem& problem, DLStream stream) {
  const Product& p = problem.product;
  const unsigned blocks = (unsigned)(problem.row_tiles * problem.col_tiles * problem.splits);
  const unsigned cluster = problem.partial ? 1 : (unsigned)problem.splits;
  const auto launch = [&](auto trans_a, auto trans_b) {
    LaunchClusters(op, ProductKernel<T, Accumulator, trans_a, trans_b>, blocks, cluster,
                   T::kThreads, MemoryNbytes<T, Accumulator<T, trans_a, trans_b>>(), problem.early,
                   stream, problem);
  };
  using Yes = std::true_type;
  using No = std::false_type;
  if constexpr (!kPlainA)
    if (p.trans_a) return p.trans_b ? launch(Yes(), Yes()) : launch(Yes(), No());
  p.trans_b ? launch(No(), Yes()) : launch(No(), No());
}

// The kernels by their tilings: those of one number have tiles of one size in all of them.
enum class Tiles { kFp32, kTf32, kBytes };
Tiles TilesOf(const Product& product);

// A tiling, by its number, and splits, with an estimate of the time.
struct Cut {
  int tiling, splits;
  double us;
};
// The fastest for products on one GPU in one launch, of what its shared memory has room for.
Cut BestCut(Tiles tiles, const Product* products, int count, int most_splits);
// A product cut into tiles of that tiling and its depth into `splits` parts, for clusters.
Problem CutInto(const char* op, const Product& product, int tiling, int splits);

template <class T>
struct Type {
  using type = T;
};

// Calls f(Type<T>()) for the tiling T of that number.
template <class Tilings, int kNumber = 0, class F>
void WithTiling(int tiling, F&& f) {
  if constexpr (kNumber < std::tuple_size_v<Tilings>) {
    if (tiling > kNumber) return WithTiling<Tilings, kNumber + 1>(tiling, f);
    f(Type<std::tuple_element_t<kNumber, Tilings>>());
  } else {
    Fail("matmul: there is no tiling %d", tiling);
  }
}

void LaunchFp32(const char* op, int tiling, const Problem& problem, DLStream stream);
void LaunchTf32(const char* op, int tiling, const Problem& problem, DLStream stream);
// The same where A is bytes and is not transposed.
void LaunchBytes(const char* op, int tiling, const Problem& problem, DLStream stream);

}  // namespace cuda
}  // namespace dlsys
