// NCCL's device API (from 2.28 on), by which kernels reach the memory of other ranks: its headers,
// where they are there, and the host's functions behind it. NCCL is opened by soname, as in
// nccl.cu, and used where it is of the minor version of the headers, since what a kernel reads
// differs between these. Without the headers, and on the emulated GPU, kernels are for groups of
// one rank.
#pragma once
#if !defined(DLSYS_EMULATED) && defined(__has_include)
#if __has_include(<nccl_device.h>)
#define DLSYS_NCCL_DEVICE
#include <nccl_device.h>
#endif
#endif

#include <string>

#include "cuda/collective/communicator.cuh"
#include "cuda/runtime/context.cuh"

namespace dlsys {
namespace cuda {

#ifdef DLSYS_NCCL_DEVICE
struct DeviceApi {
  decltype(&ncclGetVersion) version = nullptr;
  ncclTeam (*team)(ncclComm_t) = nullptr;  // ncclTeamLsa: the ranks that share memory
  decltype(&ncclLLA2ACalcSlots) slots = nullptr;
  decltype(&ncclLLA2ACreateRequirement) require = nullptr;
  decltype(&ncclDevCommCreate) create = nullptr;
  decltype(&ncclMemAlloc) allocate = nullptr;
  decltype(&ncclCommWindowRegister) share = nullptr;
  decltype(&ncclGetErrorString) text = nullptr;
  std::string error;  // why it cannot be used, or ""
};

const DeviceApi& Api();

void CheckApi(const char* op, ncclResult_t status);
#endif

}  // namespace cuda
}  // namespace dlsys
