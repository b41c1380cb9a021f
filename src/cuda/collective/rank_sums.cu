// The host's part of sums over ranks within kernels; rank_sums.cuh has the kernels'. NCCL is opened
// by soname, as in nccl.cu, and used where it is of the minor version of the headers, since what a
// kernel reads differs between these. The memory that ranks send to is NCCL's, some MB for each
// shape of a launch, and lives as long as the process.
#include <map>
#include <mutex>
#include <tuple>

#include "cuda/collective/rank_sums.cuh"
#include "cuda/runtime/dlopen.cuh"
#include "cuda/runtime/graph.cuh"

namespace dlsys {
namespace cuda {
namespace {

#ifdef DLSYS_NCCL_DEVICE
struct Library {
  decltype(&ncclGetVersion) version = nullptr;
  ncclTeam (*team)(ncclComm_t) = nullptr;  // ncclTeamLsa: the ranks that share memory
  decltype(&ncclLLA2ACalcSlots) slots = nullptr;
  decltype(&ncclLLA2ACreateRequirement) require = nullptr;
  decltype(&ncclDevCommCreate) create = nullptr;
  decltype(&ncclGetErrorString) text = nullptr;
  std::string error;  // why it cannot be used, or ""
};

Library Open() {
  Library nccl;
  void* library = OpenLibrary({"libnccl.so.2"}, &nccl.error);
  if (!library) return nccl;
  Find(library, "ncclGetVersion", &nccl.version, &nccl.error);
  Find(library, "ncclTeamLsa", &nccl.team, &nccl.error);
  Find(library, "ncclLLA2ACalcSlots", &nccl.slots, &nccl.error);
  Find(library, "ncclLLA2ACreateRequirement", &nccl.require, &nccl.error);
  Find(library, "ncclDevCommCreate", &nccl.create, &nccl.error);
  Find(library, "ncclGetErrorString", &nccl.text, &nccl.error);
  int version = 0;
  const bool known = nccl.error.empty() && nccl.version(&version) == ncclSuccess;
  if (known &&
      version / 100 != NCCL_VERSION_CODE / 100)  // structures differ between minor versions
    nccl.error = "it is not of the version of the headers";
  return nccl;
}

const Library& Nccl() {
  static const Library* const library = new Library(Open());
  return *library;
}

void CheckNccl(const char* op, ncclResult_t status) {
  if (status == ncclSuccess) return;
  CheckFault(op);
  Fail("%s: NCCL error %d, %s; NCCL_DEBUG=INFO tells more", op, (int)status, Nccl().text(status));
}

RankSums Made(const char* op, const Communicator& group, unsigned blocks, int elements) {
  RankSums made = {};
  made.elements = elements;
  ncclDevResourceRequirements memory = {};
  const int slots = Nccl().slots(group.size * elements, 16);
  CheckNccl(op, Nccl().require((int)blocks, slots, &made.buffers, &memory));
  ncclDevCommRequirements all = {};
  all.resourceRequirementsList = &memory;
  CheckNccl(op, Nccl().create(group.comm, &all, &made.comm));
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

int SumsInKernels(int64_t handle) {
  const Communicator& group = CommunicatorOf("NCCL", handle);
#ifdef DLSYS_NCCL_DEVICE
  const bool can = Nccl().error.empty() && Nccl().team(group.comm).nRanks == group.size;
#else
  const bool can = group.size == 1;
#endif
  return can ? Multiprocessors(group.device) : 0;
}

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
