// Kernels with faults that a GPU may hide, and the same ones without, on the emulated GPU. Prints a
// line a check: its name, then yes or no.
#include <cudaTypedefs.h>

#include <cmath>
#include <cstdio>

#include "cuda/instructions/hopper.cuh"
#include "cuda/instructions/ptx.cuh"
#include "cuda/runtime/stream_order.cuh"
#include "cuda_runtime.h"

namespace {

constexpr int kThreads = 128, kLaunches = 40;
constexpr size_t kSharedNbytes = 8 << 10;

float* device;  // kThreads floats
cudaStream_t stream;

template <class... Params, class... Args>
cudaError_t LaunchGrid(void (*kernel)(Params...), size_t shared, unsigned blocks, unsigned cluster,
                       Args... args) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {cluster, 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = cluster > 1;
  return cudaLaunchKernelEx(&config, kernel, args...);
}
template <class... Params, class... Args>
cudaError_t Launch(void (*kernel)(Params...), size_t shared, unsigned cluster, Args... args) {
  return LaunchGrid(kernel, shared, cluster, cluster, args...);
}

void Say(const char* name, bool yes) { printf("%s: %s\n", name, yes ? "yes" : "no"); }

// How many of many launches leave k + 1, modulo the threads, in place k.
template <class Kernel, class... Args>
int RightOnes(Kernel kernel, Args... args) {
  int right = 0;
  for (int n = 0; n < kLaunches; n++) {
    Launch(kernel, kSharedNbytes, 1, args...);
    bool all = true;
    for (int k = 0; k < kThreads; k++) all &= device[k] == (float)((k + 1) % kThreads);
    right += all;
  }
  return right;
}

__global__ void Exchange(float* out, bool waits) {
  __shared__ float place[kThreads];
  const int k = (int)threadIdx.x;
  place[k] = -1.f;
  __syncthreads();
  place[k] = (float)k;
  if (waits) __syncthreads();
  out[k] = place[(k + 1) % kThreads];
}

__global__ void Copies(float* out, const float* in, bool waits) {
  float* place = dlsys::cuda::DynamicShared<float>() + threadIdx.x;
  dlsys::cuda::CopyAsync4(place, in + threadIdx.x, true);
  dlsys::cuda::CloseCopies();
  if (waits) dlsys::cuda::WaitForCopies<0>();
  out[threadIdx.x] = *place;
}

__global__ void Untouched(float* out) {
  out[threadIdx.x] = dlsys::cuda::DynamicShared<float>()[threadIdx.x];
}

__global__ void Apart(float* out) {
  if (threadIdx.x % 32 == 0) {
    __syncthreads();
  } else {
    out[threadIdx.x] = __shfl_xor_sync(0xffffffffu, 1.f, 1);
  }
}

__global__ void AskPeer(float* out) {
  __shared__ float fixed[kThreads];
  float* asked = dlsys::cuda::DynamicShared<float>();
  fixed[threadIdx.x] = 10.f * blockIdx.x;
  asked[threadIdx.x] = 1.f + blockIdx.x;
  dlsys::cuda::MeetCluster();
  const int peer = 1 - (int)blockIdx.x;
  out[blockIdx.x] = dlsys::cuda::OfPeer(fixed, peer)[5] + dlsys::cuda::OfPeer(asked, peer)[7];
  dlsys::cuda::LeaveCluster();
}

__global__ void Put(float* out, float value) { *out = value; }
__global__ void Twice(float* out) {
  if (threadIdx.x == 0) *out *= 2.f;
}

// How many of many replays of "put 1, then twice" end with 2.
int RightReplays(bool in_turn) {
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
  Launch(Put, 0, 1, device, 1.f);
  if (!in_turn) cudaStreamUpdateCaptureDependencies(stream, nullptr, nullptr, 0, 0);
  Launch(Twice, 0, 1, device);
  cudaStreamEndCapture(stream, &graph);
  cudaGraphInstantiate(&exec, graph, 0);
  int right = 0;
  for (int n = 0; n < kLaunches; n++) {
    cudaGraphLaunch(exec, stream);
    right += *device == 2.f;
  }
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  return right;
}

void CheckRecording() {
  Say("recorded steps run in turn", RightReplays(true) == kLaunches);
  const int loose = RightReplays(false);
  Say("a dependency that lacks shows", loose > 0 && loose < kLaunches);
  void* data = nullptr;
  cudaGraph_t graph;
  cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
  Say("nothing is allocated while recording",
      cudaMalloc(&data, 16) == cudaErrorStreamCaptureUnsupported);
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaThreadExchangeStreamCaptureMode(&mode);
  Say("unless it is said to be no part of it", cudaMalloc(&data, 16) == cudaSuccess);
  cudaThreadExchangeStreamCaptureMode(&mode);
  cudaStreamEndCapture(stream, &graph);
  cudaGraphDestroy(graph);
  cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
  cudaStreamSynchronize(stream);
  Say("who waits for a stream that records breaks what it records",
      cudaStreamEndCapture(stream, &graph) == cudaErrorStreamCaptureInvalidated);
}

// Waits around two streams that record, from others and for others.
void CheckOrder() {
  cudaStream_t other, second;
  cudaGraph_t graph = nullptr, graph_of_second = nullptr;
  cudaEvent_t event;
  size_t count = 1;
  cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking);
  cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking);
  cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
  dlsys::cuda::BeginCapture(0, stream);
  Say("an event on a stream that records is refused",
      cudaEventRecord(event, stream) == cudaErrorStreamCaptureUnsupported);
  bool fine = true;
  try {
    dlsys::cuda::Order(0, other, stream);
    dlsys::cuda::Order(0, stream, other);
    dlsys::cuda::BeginCapture(0, second);
    dlsys::cuda::Order(0, stream, second);
    dlsys::cuda::WaitFor("wait", 0, stream);
    dlsys::cuda::WaitFor("wait", 0, other);
  } catch (const dlsys::Error& error) {
    fprintf(stderr, "%s\n", error.what());
    fine = false;
  }
  fine &= dlsys::cuda::EndCapture(0, stream, &graph) == cudaSuccess;
  fine &= dlsys::cuda::EndCapture(0, second, &graph_of_second) == cudaSuccess;
  cudaGraphGetNodes(graph, nullptr, &count);
  Say("waits around recordings are no part of them", fine && count == 0);
  cudaGraphDestroy(graph);
  cudaGraphDestroy(graph_of_second);
}

// What a second GPU has is not the first one's, and whoever calls keeps the GPU that was current.
void CheckSecond() {
  float* numbers;
  cudaEvent_t event;
  int current = -1, inside = -1;
  cudaSetDevice(1);
  cudaMalloc((void**)&numbers, kThreads * sizeof(float));
  cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
  Say("a stream of another GPU is refused",
      Launch(Untouched, 0, 1, numbers) == cudaErrorInvalidResourceHandle &&
          cudaEventRecord(event, stream) == cudaErrorInvalidResourceHandle);
  cudaSetDevice(0);
  Say("memory of another GPU is refused",
      Launch(Untouched, 0, 1, numbers + 1) == cudaErrorIllegalAddress);
  dlsys::Guard([&] {
    dlsys::Guard([] { dlsys::cuda::Use("second", 1); });
    cudaGetDevice(&inside);
    dlsys::cuda::Use("first again", 0);
    dlsys::cuda::Use("second again", 1);
  });
  cudaGetDevice(&current);
  Say("a GPU is current within a call, and not behind it", inside == 1 && current == 0);
}

// ---- what sm_90a adds ----

namespace hopper = dlsys::cuda::hopper;

constexpr int kBoxColumns = 32;  // of floats, 128 bytes

__global__ void LoadTile(float* out, CUtensorMap map, bool waits) {
  __shared__ __align__(8) uint64_t barrier;
  float* tile = dlsys::cuda::DynamicShared<float>();
  const uint32_t at = hopper::SharedAddress(&barrier);
  if (threadIdx.x == 0) {
    hopper::InitBarrier(at, 1);
    hopper::PublishBarriers();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    hopper::ArriveExpecting(at, kThreads * sizeof(float));
    hopper::LoadBox<false>(hopper::SharedAddress(tile), &map, at, 0, 0, 0);
  }
  if (waits) hopper::WaitForPhase(at, 0);
  const int row = (int)threadIdx.x / kBoxColumns, column = (int)threadIdx.x % kBoxColumns;
  out[threadIdx.x] = tile[row * kBoxColumns + ((column / 4 ^ row % 8) * 4 + column % 4)];
}

__global__ void StoreTile(float* out, CUtensorMap map, bool waits) {
  float* tile = dlsys::cuda::DynamicShared<float>();
  const int row = (int)threadIdx.x / kBoxColumns, column = (int)threadIdx.x % kBoxColumns;
  tile[row * kBoxColumns + ((column / 4 ^ row % 8) * 4 + column % 4)] =
      (float)((threadIdx.x + 1) % kThreads);
  dlsys::cuda::LetBulkFollow();
  __syncthreads();
  out[threadIdx.x] = -1.f;
  __syncthreads();
  if (threadIdx.x == 0) {
    hopper::StoreBox(&map, hopper::SharedAddress(tile), 0, 0, 0);
    hopper::CloseStores();
    if (waits) hopper::WaitForStores();
  }
}

// Ones, which a swizzle leaves as they are: each sum is of 16 products.
__global__ void MultiplyOnes(float* out, bool waits) {
  unsigned char* memory = dlsys::cuda::DynamicShared<unsigned char>();
  for (int k = (int)threadIdx.x; k < 64 * 64; k += kThreads)
    ((dlsys::bfloat16*)memory)[k] = dlsys::bfloat16(1.f);
  __syncthreads();
  float d[8][4] = {};
  const uint64_t ones = hopper::Descriptor(hopper::SharedAddress(memory), 16, 1024);
  hopper::BeginProducts();
  hopper::MultiplyAdd<dlsys::bfloat16, false, false>(d, ones, ones, true);
  hopper::CloseProducts();
  if (waits) hopper::WaitForProducts<0>();
  out[threadIdx.x] = d[7][3] == 16.f ? (float)((threadIdx.x + 1) % kThreads) : -1.f;
}

__global__ void ExchangeInWarpgroup(float* out, bool waits) {
  __shared__ float place[kThreads];
  const int k = (int)threadIdx.x;
  place[k] = -1.f;
  __syncthreads();
  place[k] = (float)k;
  if (waits) hopper::SyncThreads(3, kThreads);
  out[k] = place[(k + 1) % kThreads];
}

__global__ void MeetInMemory(unsigned* count) {
  if (threadIdx.x == 0) {
    dlsys::cuda::CountUp(count);
    while (hopper::LoadAcquire(count) < gridDim.x) __nanosleep(64);
  }
}

CUtensorMap MapOf(float* data) {
  void* encode = nullptr;
  cudaDriverEntryPointQueryResult found;
  cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000, cudaEnableDefault,
                                   &found);
  const uint64_t extents[3] = {kBoxColumns, kThreads / kBoxColumns, 1};
  const uint64_t strides[2] = {kBoxColumns * sizeof(float), kThreads * sizeof(float)};
  const uint32_t box[3] = {kBoxColumns, kThreads / kBoxColumns, 1}, steps[3] = {1, 1, 1};
  CUtensorMap map;
  ((PFN_cuTensorMapEncodeTiled_v12000)encode)(
      &map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 3, data, extents, strides, box, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return map;
}

// A wait that is there, and one that lacks.
template <class Kernel, class... Args>
void CheckWait(const char* there, const char* lacks, Kernel kernel, Args... args) {
  Say(there, RightOnes(kernel, device, args..., true) == kLaunches);
  Say(lacks, RightOnes(kernel, device, args..., false) < kLaunches);
}

void CheckHopper(float* numbers) {
  CheckWait("tiles that are waited for are there", "tiles that are not waited for show", LoadTile,
            MapOf(numbers));
  CheckWait("tiles are stored", "stores that are not waited for show", StoreTile, MapOf(device));
  CheckWait("products that are waited for are there", "products that are not waited for show",
            MultiplyOnes);
  CheckWait("a numbered barrier is one", "a numbered barrier that lacks shows",
            ExchangeInWarpgroup);
  *(unsigned*)device = 0;
  Say("blocks may wait for each other",
      LaunchGrid(MeetInMemory, 0, 5, 1, (unsigned*)device) == cudaSuccess);
}

}  // namespace

int main() {
  float* numbers;
  cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  cudaMalloc((void**)&device, kThreads * sizeof(float));
  cudaMalloc((void**)&numbers, kThreads * sizeof(float));
  Say("memory is NaN at first", std::isnan(device[3]));
  for (int k = 0; k < kThreads; k++) numbers[k] = (float)((k + 1) % kThreads);

  Say("a barrier is one", RightOnes(Exchange, device, true) == kLaunches);
  Say("a barrier that lacks shows", RightOnes(Exchange, device, false) < kLaunches);
  Say("copies that are waited for are there",
      RightOnes(Copies, device, (const float*)numbers, true) == kLaunches);
  Say("copies that are not waited for show",
      RightOnes(Copies, device, (const float*)numbers, false) < kLaunches);
  Launch(Untouched, kThreads * sizeof(float), 1, device);
  Say("shared memory is NaN at first", std::isnan(device[3]));
  Launch(AskPeer, kThreads * sizeof(float), 2, device);
  Say("blocks of a cluster see each other", device[0] == 12.f && device[1] == 1.f);
  Say("too much shared memory is refused",
      Launch(Untouched, 64 << 10, 1, device) == cudaErrorInvalidValue);
  CheckHopper(numbers);
  CheckRecording();
  CheckOrder();
  CheckSecond();
  Say("threads that wait for ever are told", Launch(Apart, 0, 1, device) == cudaErrorLaunchFailure);
  Say("and the GPU is lost", cudaStreamSynchronize(stream) == cudaErrorLaunchFailure);
}
