// The host's part of sums over ranks within kernels; rank_sums.cuh has the kernels'. The memory
// that ranks send to is NCCL's, some MB for each shape of a launch, and lives as long as the
// process.
#include <map>
#include <mutex>
#include <tuple>

#include "cuda/collective/rank_sums.cuh"
#include "cuda/runtime/graph.cuh"

namespace dlsys {
namespace cuda {
namespace {

#ifdef DLSYS_NCCL_DEVICE
RankSums Made(const char* op, const Communicator& group, unsigned blocks, int elements) {
  RankSums made = {};
  made.elements = elements;
  ncclDevResourceRequirements memory = {};
  const int slots = Api().slots(group.size * elements, 16);
  CheckApi(op, Api().require((int)blocks, slots, &made.buffers, &memory));
  ncclDevCommRequirements all = {};
  all.resourceRequirementsList = &memory;
  CheckApi(op, Api().create(group.comm, &all, &made.comm));
  return made;
}
#else
RankSums Made(const char* op, const Communicator& group, unsigned, int elements) {
  if (group.size > 1)
    Fail("%s: the library was built without NCCL's headers, which sums in kernels need", op);
  return {elements};
}
#endif

}  // namespace

const RankSums* RankSumsOf(const char* op, int64_t handle, unsigned blocks, int elements) {
  static std::mutex mutex;
  static auto* const known = new std::map<std::tuple<int64_t, unsigned, int>, const RankSums*>;
  const Communicator& group = CommunicatorOf(op, handle);
  int device = 0;
  Check(op, cudaGetDevice(&device));
  if (device != group.device)
    Fail("%s: the communicator is of gpu(%d), the arrays are on gpu(%d)", op, group.device, device);
  std::lock_guard<std::mutex> lock(mutex);
  const RankSums*& found = (*known)[{handle, blocks, elements}];
  if (!found) {
    const RelaxedCapture relaxed;
    const RankSums made = Made(op, group, blocks, elements);
    void* at = nullptr;
    Check(op, cudaMalloc(&at, sizeof made));
    Check(op, cudaMemcpyAsync(at, &made, sizeof made, cudaMemcpyHostToDevice, nullptr));
    Check(op, cudaStreamSynchronize(nullptr));
    found = (const RankSums*)at;
  }
  return found;
}

}  // namespace cuda
}  // namespace dlsys
