// Collectives among the GPUs of several ranks, by NCCL: all_reduce, all_gather, reduce_scatter,
// broadcast, reduce, all_to_all and send_recv. The library is opened by soname when a communicator
// is first made; the functions and constants that are used are declared here, after nccl.h. Arrays
// are contiguous, results may not overlap inputs. The arrays of one all_reduce that lie side by
// side go as one, which is quicker; others as one group, which NCCL joins into one launch: nothing
// is packed. All ranks must queue the same calls in the same order, on one stream each; calls may
// be captured once each kind has run. Bound by NVLink or the network: 2 (n - 1) / n of the bytes
// pass each of n GPUs in an all_reduce.
#include <cstring>

#include "cuda/collective/communicator.cuh"
#include "cuda/runtime/dlopen.cuh"
#include "cuda/runtime/graph.cuh"
#include "cuda/runtime/lists.cuh"
#include "runtime/communicator.h"

namespace dlsys {
namespace cuda {
namespace {

struct UniqueId {
  char bytes[kCommunicatorIdNbytes];  // NCCL_UNIQUE_ID_BYTES
};
using Comm = ncclComm*;
using Status = int;
constexpr Status kSuccess = 0;     // ncclSuccess
constexpr Status kInProgress = 7;  // ncclInProgress
constexpr int kUint8 = 1;          // ncclUint8
constexpr int kSum = 0;            // ncclSum; other reductions come as ncclRedOp_t from Python

struct Library {
  Status (*version)(int*) = nullptr;
  Status (*unique_id)(UniqueId*) = nullptr;
  Status (*init_rank)(Comm*, int size, UniqueId, int rank) = nullptr;
  Status (*async_error)(Comm, Status*) = nullptr;
  const char* (*text)(Status) = nullptr;
  Status (*group_start)() = nullptr;
  Status (*group_end)() = nullptr;
  Status (*all_reduce)(const void*, void*, size_t, int, int, Comm, cudaStream_t) = nullptr;
  Status (*all_gather)(const void*, void*, size_t, int, Comm, cudaStream_t) = nullptr;
  Status (*reduce_scatter)(const void*, void*, size_t, int, int, Comm, cudaStream_t) = nullptr;
  Status (*broadcast)(const void*, void*, size_t, int, int, Comm, cudaStream_t) = nullptr;
  Status (*reduce)(const void*, void*, size_t, int, int, int, Comm, cudaStream_t) = nullptr;
  Status (*send)(const void*, size_t, int, int, Comm, cudaStream_t) = nullptr;
  Status (*recv)(void*, size_t, int, int, Comm, cudaStream_t) = nullptr;
  std::string error;  // why it cannot be used, or ""
};

Library Open() {
  Library nccl;
  void* library = OpenLibrary({"libnccl.so.2"}, &nccl.error);
  if (!library) return nccl;
  Find(library, "ncclGetVersion", &nccl.version, &nccl.error);
  Find(library, "ncclGetUniqueId", &nccl.unique_id, &nccl.error);
  Find(library, "ncclCommInitRank", &nccl.init_rank, &nccl.error);
  Find(library, "ncclCommGetAsyncError", &nccl.async_error, &nccl.error);
  Find(library, "ncclGetErrorString", &nccl.text, &nccl.error);
  Find(library, "ncclGroupStart", &nccl.group_start, &nccl.error);
  Find(library, "ncclGroupEnd", &nccl.group_end, &nccl.error);
  Find(library, "ncclAllReduce", &nccl.all_reduce, &nccl.error);
  Find(library, "ncclAllGather", &nccl.all_gather, &nccl.error);
  Find(library, "ncclReduceScatter", &nccl.reduce_scatter, &nccl.error);
  Find(library, "ncclBroadcast", &nccl.broadcast, &nccl.error);
  Find(library, "ncclReduce", &nccl.reduce, &nccl.error);
  Find(library, "ncclSend", &nccl.send, &nccl.error);
  Find(library, "ncclRecv", &nccl.recv, &nccl.error);
  return nccl;
}

const Library& Nccl() {
  static const Library* const library = new Library(Open());
  if (!library->error.empty())
    FailWith(DL_UNAVAILABLE,
             "NCCL cannot be used (%s): install nvidia-nccl-cu%d, or name its folder in "
             "DLSYS_CUDA_LIBRARY_PATH",
             library->error.c_str(), CUDART_VERSION / 1000);
  return *library;
}

void CheckNccl(const char* op, Status status) {
  if (status == kSuccess || status == kInProgress) return;
  CheckFault(op);
  Fail("%s: NCCL error %d, %s; NCCL_DEBUG=INFO tells more", op, status, Nccl().text(status));
}

// The ncclDataType_t of a dtype.
int DataType(const char* op, int dtype) {
  switch (dtype) {
    case DL_FLOAT32:
      return 7;
    case DL_FLOAT64:
      return 8;
    case DL_INT32:
      return 2;
    case DL_INT64:
      return 4;
    case DL_UINT8:
    case DL_BOOL:
      return kUint8;
    case DL_BFLOAT16:
      return 9;
    case DL_FLOAT16:
      return 6;
  }
  Fail("%s: NCCL has no %s", op, DtypeText(dtype));
}

// What every call begins with: the communicator, on whose GPU the arrays are.
const Communicator& Begin(const char* op, int64_t handle, const DLArray* x, const DLArray* y) {
  Enter(op, x, y);
  const Communicator& group = CommunicatorOf(op, handle);
  if (group.device != x->ctx.device_id)
    Fail("%s: the communicator is of gpu(%d), the arrays are on gpu(%d)", op, group.device,
         x->ctx.device_id);
  if (x->dtype != y->dtype)
    Fail("%s: expected one dtype, got %s and %s", op, DtypeText(x->dtype), DtypeText(y->dtype));
  return group;
}

void CheckTimes(const char* op, const DLArray* small, const DLArray* large, int times) {
  if (Numel(small) * times != Numel(large))
    Fail("%s: expected %d times as many elements as %s has, got %s", op, times,
         ShapeText(small).c_str(), ShapeText(large).c_str());
}

// While it lives, calls of this thread are collected; `End` queues them together.
class NcclGroup {
 public:
  explicit NcclGroup(const char* op) : op_(op) { CheckNccl(op, Nccl().group_start()); }
  ~NcclGroup() {
    if (open_) Nccl().group_end();
  }
  NcclGroup(const NcclGroup&) = delete;
  NcclGroup& operator=(const NcclGroup&) = delete;
  void End() {
    open_ = false;
    CheckNccl(op_, Nccl().group_end());
  }

 private:
  const char* op_;
  bool open_ = true;
};

// The elements from the first array of a list to the end of its last one, which are side by side:
// at the same distances from the first as those of `others`. With what lies between them.
size_t JoinedNumel(const char* op, const DLArrayList* list, const DLArrayList* others) {
  const char *begin = (const char*)list->arrays[0]->data, *end = begin;
  const char* other = (const char*)others->arrays[0]->data;
  for (int64_t k = 0; k < list->count; k++) {
    const DLArray* x = list->arrays[k];
    const char* data = (const char*)x->data;
    if (data < end || data - begin != (const char*)others->arrays[k]->data - other)
      Fail("%s: expected arrays side by side", op);
    end = data + Numel(x) * DtypeNbytes(x->dtype);
  }
  return (size_t)((end - begin) / DtypeNbytes(list->arrays[0]->dtype));
}

// `joined` arrays, which lie side by side, go as one. `count` is not read: a captured graph has
// every collective in it, in every run.
void AllReduce(int64_t handle, int64_t reduction, int64_t joined, const DLArrayList* xs,
               const DLArrayList*, DLArrayList* ys, DLStream stream) {
  const char* op = "all_reduce";
  if (Workspace::Querying()) return;
  if (xs->count != ys->count) Fail("%s: expected as many results as arrays", op);
  EnterAll(op, {xs, ys});
  NcclGroup calls(op);
  for (int64_t k = 0; k < xs->count; k++) {
    const DLArray *x = xs->arrays[k], *y = ys->arrays[k];
    const Communicator& group = Begin(op, handle, x, y);
    CheckSameShape(op, x, y);
    if (joined && k) continue;
    const size_t count = joined ? JoinedNumel(op, xs, ys) : (size_t)Numel(x);
    CheckNccl(op, Nccl().all_reduce(x->data, y->data, count, DataType(op, x->dtype), (int)reduction,
                                    group.comm, Native(stream)));
  }
  calls.End();
  Hasten(Native(stream));  // a sum has few blocks, the update beside it many
}

void AllGather(int64_t handle, const DLArray* x, DLArray* y, DLStream stream) {
  const char* op = "all_gather";
  if (Workspace::Querying()) return;
  const Communicator& group = Begin(op, handle, x, y);
  CheckTimes(op, x, y, group.size);
  CheckNccl(op, Nccl().all_gather(x->data, y->data, (size_t)Numel(x), DataType(op, x->dtype),
                                  group.comm, Native(stream)));
}

void ReduceScatter(int64_t handle, int64_t reduction, const DLArray* x, DLArray* y,
                   DLStream stream) {
  const char* op = "reduce_scatter";
  if (Workspace::Querying()) return;
  const Communicator& group = Begin(op, handle, x, y);
  CheckTimes(op, y, x, group.size);
  CheckNccl(op, Nccl().reduce_scatter(x->data, y->data, (size_t)Numel(y), DataType(op, x->dtype),
                                      (int)reduction, group.comm, Native(stream)));
}

void Broadcast(int64_t handle, int64_t root, const DLArray* x, DLArray* y, DLStream stream) {
  const char* op = "broadcast";
  if (Workspace::Querying()) return;
  const Communicator& group = Begin(op, handle, x, y);
  CheckSameShape(op, x, y);
  CheckNccl(op, Nccl().broadcast(x->data, y->data, (size_t)Numel(x), DataType(op, x->dtype),
                                 (int)root, group.comm, Native(stream)));
}

void Zero(const char* op, DLArray* y, DLStream stream) {
  const size_t nbytes = (size_t)(Numel(y) * DtypeNbytes(y->dtype));
  if (nbytes) Check(op, cudaMemsetAsync(y->data, 0, nbytes, Native(stream)));
}

void Reduce(int64_t handle, int64_t root, const DLArray* x, DLArray* y, DLStream stream) {
  const char* op = "reduce";
  if (Workspace::Querying()) return;
  const Communicator& group = Begin(op, handle, x, y);
  CheckSameShape(op, x, y);
  CheckNccl(op, Nccl().reduce(x->data, y->data, (size_t)Numel(x), DataType(op, x->dtype), kSum,
                              (int)root, group.comm, Native(stream)));
  if (group.rank != root) Zero(op, y, stream);
}

void AllToAll(int64_t handle, const DLArray* x, DLArray* y, DLStream stream) {
  const char* op = "all_to_all";
  if (Workspace::Querying()) return;
  const Communicator& group = Begin(op, handle, x, y);
  CheckSameShape(op, x, y);
  if (Numel(x) % group.size) Fail("%s: %d ranks do not divide the array", op, group.size);
  const int64_t count = Numel(x) / group.size, nbytes = count * DtypeNbytes(x->dtype);
  const int type = DataType(op, x->dtype);
  NcclGroup calls(op);
  for (int peer = 0; peer < group.size; peer++) {
    CheckNccl(op, Nccl().send((const char*)x->data + peer * nbytes, (size_t)count, type, peer,
                              group.comm, Native(stream)));
    CheckNccl(op, Nccl().recv((char*)y->data + peer * nbytes, (size_t)count, type, peer, group.comm,
                              Native(stream)));
  }
  calls.End();
}

// Ranks are -1 where there is none to send to or to receive from.
void SendRecv(int64_t handle, int64_t target, int64_t source, const DLArray* x, DLArray* y,
              DLStream stream) {
  const char* op = "send_recv";
  if (Workspace::Querying()) return;
  const Communicator& group = Begin(op, handle, x, y);
  CheckSameShape(op, x, y);
  const int type = DataType(op, x->dtype);
  const size_t count = (size_t)Numel(x);
  NcclGroup calls(op);
  if (target >= 0)
    CheckNccl(op, Nccl().send(x->data, count, type, (int)target, group.comm, Native(stream)));
  if (source >= 0)
    CheckNccl(op, Nccl().recv(y->data, count, type, (int)source, group.comm, Native(stream)));
  calls.End();
  if (source < 0) Zero(op, y, stream);
}

void CommunicatorId(void* id) {
  UniqueId made;
  CheckNccl("NCCL", Nccl().unique_id(&made));
  memcpy(id, made.bytes, sizeof made.bytes);
}

int64_t CommunicatorCreate(int device, const void* id, int rank, int size) {
  const char* op = "NCCL";
  const Library& nccl = Nccl();
  Use(op, device);
  UniqueId common;
  memcpy(common.bytes, id, sizeof common.bytes);
  Comm comm = nullptr;
  CheckNccl(op, nccl.init_rank(&comm, size, common, rank));
  return (int64_t)new Communicator{comm, device, rank, size};
}

void CommunicatorCheck(int64_t handle) {
  Status found = kSuccess;
  CheckNccl("NCCL", Nccl().async_error(CommunicatorOf("NCCL", handle).comm, &found));
  CheckNccl("NCCL", found);
}

const CommunicatorsRegistrar registrar({DL_GPU, CommunicatorId, CommunicatorCreate,
                                        CommunicatorCheck, SumsInKernels, WindowMemory});

DLSYS_KERNEL_ANY(cuda, all_reduce, AllReduce);
DLSYS_KERNEL_ANY(cuda, all_gather, AllGather);
DLSYS_KERNEL_ANY(cuda, reduce_scatter, ReduceScatter);
DLSYS_KERNEL_ANY(cuda, broadcast, Broadcast);
DLSYS_KERNEL_ANY(cuda, reduce, Reduce);
DLSYS_KERNEL_ANY(cuda, all_to_all, AllToAll);
DLSYS_KERNEL_ANY(cuda, send_recv, SendRecv);

}  // namespace

const Communicator& CommunicatorOf(const char* op, int64_t handle) {
  if (!handle)
    FailWith(DL_UNAVAILABLE,
             "%s: this group has no communicator of the GPU: call its connect(gpu) on every rank "
             "first, or give the Executor group=",
             op);
  return *(const Communicator*)handle;
}

}  // namespace cuda
}  // namespace dlsys
