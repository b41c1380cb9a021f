// Windows and barriers of the ranks of a group; see window.cuh. NCCL allocates the memory, since
// only such can be mapped into other processes. A barrier is a launch of one warp; it takes the
// latency of NVLink, some microseconds, or as long as the last rank takes to come.
#include <map>
#include <mutex>

#include "cuda/collective/window.cuh"
#include "cuda/runtime/graph.cuh"
#include "cuda/runtime/launch.cuh"

namespace dlsys {
namespace cuda {
namespace {

struct Memory {
  char* begin = nullptr;
  bool shared = false;  // with the other ranks, as `window`
  Window window = {};
};

// What the ranks of a group share.
struct Shared {
  std::map<int64_t, Memory> memory;  // by size
#ifdef DLSYS_NCCL_DEVICE
  ncclDevComm barrier = {};
#endif
};

std::mutex mutex;  // of all groups
Shared& SharedBy(int64_t handle) {
  static auto* const known = new std::map<int64_t, Shared>;
  return (*known)[handle];
}

#ifdef DLSYS_NCCL_DEVICE
char* Allocate(int64_t nbytes) {
  void* made = nullptr;
  CheckApi("NCCL", Api().allocate(&made, (size_t)nbytes));
  return (char*)made;
}

Window Share(const char* op, const Communicator& group, char* begin, int64_t nbytes) {
  Window made = {nullptr, begin, group.rank, group.size};
  if (group.size == 1) return made;
  CheckApi(op,
           Api().share(group.comm, begin, (size_t)nbytes, &made.handle, NCCL_WIN_COLL_SYMMETRIC));
  if (!made.handle) Fail("%s: NCCL shares no memory between these GPUs", op);
  return made;
}

__global__ void BarrierKernel(const __grid_constant__ ncclDevComm comm) {
  GridDependencySynchronize();
  ncclLsaBarrierSession<ncclCoopCta> barrier(ncclCoopCta(), comm, ncclTeamTagLsa(), 0);
  barrier.sync(ncclCoopCta(), ::cuda::memory_order_acq_rel);
}
#else
char* Allocate(int64_t nbytes) {
  void* made = nullptr;
  Check("NCCL", cudaMalloc(&made, (size_t)nbytes));
  return (char*)made;
}

Window Share(const char* op, const Communicator& group, char* begin, int64_t) {
  if (group.size > 1)
    Fail("%s: the library was built without NCCL's headers, which sums in kernels need", op);
  return {begin, group.rank, group.size};
}
#endif

}  // namespace

#ifdef DLSYS_NCCL_DEVICE
bool MakeBarrier(int64_t handle) {
  const Communicator& group = CommunicatorOf("NCCL", handle);
  if (group.size == 1) return true;
  Use("NCCL", group.device);
  std::lock_guard<std::mutex> lock(mutex);
  ncclDevCommRequirements one = {};
  one.lsaBarrierCount = 1;
  // NCCL makes a window without a handle where its settings, as NCCL_CUMEM_ENABLE=0, forbid these.
  void* memory = nullptr;
  ncclWindow_t window = nullptr;
  return Api().create(group.comm, &one, &SharedBy(handle).barrier) == ncclSuccess &&
         Api().allocate(&memory, NCCL_WIN_REQUIRED_ALIGNMENT) == ncclSuccess &&
         Api().share(group.comm, memory, NCCL_WIN_REQUIRED_ALIGNMENT, &window,
                     NCCL_WIN_COLL_SYMMETRIC) == ncclSuccess &&
         window;
}
#endif

void* WindowMemory(int64_t handle, int64_t nbytes) {
  Use("NCCL", CommunicatorOf("NCCL", handle).device);
  std::lock_guard<std::mutex> lock(mutex);
  Memory& memory = SharedBy(handle).memory[nbytes];
  if (!memory.begin) memory.begin = Allocate(nbytes);
  return memory.begin;
}

Window WindowOf(const char* op, int64_t handle, const void* data, int64_t nbytes) {
  const char* begin = (const char*)data;
  const Communicator& group = CommunicatorOf(op, handle);
  std::lock_guard<std::mutex> lock(mutex);
  Shared& by = SharedBy(handle);
  for (auto& [size, memory] : by.memory) {
    if (begin < memory.begin || begin + nbytes > memory.begin + size) continue;
    if (!memory.shared) {
      const RelaxedCapture relaxed;
      memory.window = Share(op, group, memory.begin, size);
      memory.shared = true;
    }
    return memory.window;
  }
  Fail("%s: expected arrays in memory that the ranks of the group share", op);
}

void Barrier([[maybe_unused]] const char* op, [[maybe_unused]] int64_t handle,
             [[maybe_unused]] DLStream stream) {
#ifdef DLSYS_NCCL_DEVICE
  const Communicator& group = CommunicatorOf(op, handle);
  if (group.size == 1) return;
  std::lock_guard<std::mutex> lock(mutex);
  LaunchClusters(op, BarrierKernel, 1, 1, 32, 0, ComputeMajor(group.device) >= 9, stream,
                 SharedBy(handle).barrier);
#endif
}

}  // namespace cuda
}  // namespace dlsys
