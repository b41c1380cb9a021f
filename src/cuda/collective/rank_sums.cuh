// Sums over the ranks of a group in the middle of a kernel, by NCCL's device API (device_api.cuh):
// each block sends what it has to the block of the same number on every other rank, straight into
// its GPU's memory, and adds what these send, in the order of ranks, so that all ranks get the same
// bits. The low-latency protocol has a flag beside each four bytes: no barrier, twice the bytes,
// which suits some hundred KB. Latency of NVLink limits it there.
//
// A block waits for blocks of other GPUs, so that all blocks of a launch must be resident together,
// and nothing else that waits for other ranks may run meanwhile. Launches of one shape share the
// memory that is sent to, so that they must be queued on one stream, or wait for each other.
#pragma once
#include "cuda/collective/device_api.cuh"

namespace dlsys {
namespace cuda {

// What a launch needs, on the device: of a group whose blocks have `elements` each, of up to 16
// bytes. Made together by all ranks at the first launch of a shape, which may not be captured.
struct RankSums;
const RankSums* RankSumsOf(const char* op, int64_t handle, unsigned blocks, int elements);

#ifdef DLSYS_NCCL_DEVICE
struct RankSums {
  ncclDevComm comm;
  ncclLLA2AHandle buffers;
  int elements;
};

// The sums of a block, all of whose threads make one. Each element has a number below `elements`,
// is sent once and then summed once, by the same thread; the same ones on all ranks.
class BlockSums {
 public:
  __device__ explicit BlockSums(const RankSums& ranks)
      : ranks_(ranks),
        session_(ncclCoopCta(), ranks.comm, ncclTeamLsa(ranks.comm), ranks.buffers, blockIdx.x,
                 ranks.comm.lsaSize * ranks.elements) {}

  template <class T>
  __device__ __forceinline__ void Send(int k, T x) {
    const int size = ranks_.comm.lsaSize, rank = ranks_.comm.lsaRank;
    for (int peer = rank + 1; peer < rank + size; peer++)
      session_.send(peer < size ? peer : peer - size, rank * ranks_.elements + k, x);
  }

  // own + what the others have sent, added by `add` in the order of ranks.
  template <class T, class Add>
  __device__ __forceinline__ T Sum(int k, T own, Add&& add) {
    const auto of = [&](int rank) {
      return rank == ranks_.comm.lsaRank ? own
                                         : session_.template recv<T>(rank * ranks_.elements + k);
    };
    T sum = of(0);
    for (int rank = 1; rank < ranks_.comm.lsaSize; rank++) sum = add(sum, of(rank));
    return sum;
  }

  // Of all threads, behind their sums.
  __device__ __forceinline__ void End() { session_.endEpoch(ncclCoopCta()); }

 private:
  const RankSums& ranks_;
  ncclLLA2ASession<ncclCoopCta> session_;
};
#else
struct RankSums {
  int elements;
};

class BlockSums {
 public:
  __device__ explicit BlockSums(const RankSums&) {}
  template <class T>
  __device__ __forceinline__ void Send(int, T) {}
  template <class T, class Add>
  __device__ __forceinline__ T Sum(int, T own, Add&&) {
    return own;
  }
  __device__ __forceinline__ void End() {}
};
#endif

}  // namespace cuda
}  // namespace dlsys
