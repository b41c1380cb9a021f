// The communicators of NCCL behind the handles of groups: which GPU and rank each is of, and
// whether kernels of ours may sum over its ranks. nccl.cu makes them; they live as long as the
// process. `ncclComm` is a structure of NCCL's, into which nothing here looks.
#pragma once
#include <cstdint>

struct ncclComm;

namespace dlsys {
namespace cuda {

struct Communicator {
  ncclComm* comm;
  int device, rank, size;
};

// Fails where a group has none yet.
const Communicator& CommunicatorOf(const char* op, int64_t handle);

// Multiprocessors of its GPU, which must be as many on all ranks since they decide the shapes of
// launches, where kernels can sum over the ranks (rank_sums.cuh): these read and write each other's
// memory, and the library is of the version of the headers. Else 0.
int SumsInKernels(int64_t handle);

// Memory of so many bytes that can be a window (window.cuh), the same for one group and size: it
// lives as long as the process.
void* WindowMemory(int64_t handle, int64_t nbytes);

}  // namespace cuda
}  // namespace dlsys
