// The host's functions of NCCL's device API, by soname; see device_api.cuh. A group whose ranks
// share memory, on GPUs of as many multiprocessors, may be summed over within kernels:
// rank_sums.cuh and window.cuh have the ways.
#include "cuda/collective/window.cuh"
#include "cuda/runtime/dlopen.cuh"

namespace dlsys {
namespace cuda {

#ifdef DLSYS_NCCL_DEVICE
namespace {

DeviceApi Open() {
  DeviceApi nccl;
  void* library = OpenLibrary({"libnccl.so.2"}, &nccl.error);
  if (!library) return nccl;
  Find(library, "ncclGetVersion", &nccl.version, &nccl.error);
  Find(library, "ncclTeamLsa", &nccl.team, &nccl.error);
  Find(library, "ncclLLA2ACalcSlots", &nccl.slots, &nccl.error);
  Find(library, "ncclLLA2ACreateRequirement", &nccl.require, &nccl.error);
  Find(library, "ncclDevCommCreate", &nccl.create, &nccl.error);
  Find(library, "ncclMemAlloc", &nccl.allocate, &nccl.error);
  Find(library, "ncclCommWindowRegister", &nccl.share, &nccl.error);
  Find(library, "ncclGetErrorString", &nccl.text, &nccl.error);
  int version = 0;
  const bool known = nccl.error.empty() && nccl.version(&version) == ncclSuccess;
  if (known &&
      version / 100 != NCCL_VERSION_CODE / 100)  // structures differ between minor versions
    nccl.error = "it is not of the version of the headers";
  return nccl;
}

}  // namespace

const DeviceApi& Api() {
  static const DeviceApi* const api = new DeviceApi(Open());
  return *api;
}

void CheckApi(const char* op, ncclResult_t status) {
  if (status == ncclSuccess) return;
  CheckFault(op);
  Fail("%s: NCCL error %d, %s; NCCL_DEBUG=INFO tells more", op, (int)status, Api().text(status));
}
#endif

int SumsInKernels(int64_t handle) {
  const Communicator& group = CommunicatorOf("NCCL", handle);
#ifdef DLSYS_NCCL_DEVICE
  const bool can =
      Api().error.empty() && Api().team(group.comm).nRanks == group.size && MakeBarrier(handle);
#else
  const bool can = group.size == 1;
#endif
  return can ? Multiprocessors(group.device) : 0;
}

}  // namespace cuda
}  // namespace dlsys
