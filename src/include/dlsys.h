// The C ABI of the runtime: arrays, devices, memory, streams, kernels, programs.
//
// Every function returns a status, 0 when all went well; the text of the last failure on this
// thread is DLGetLastError(). Nothing throws across this boundary. Python reads it through ctypes
// (python/dlsys/runtime/library.py); a C program may link it as well.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
#define DLSYS_API extern "C" __attribute__((visibility("default")))
#else
#define DLSYS_API __attribute__((visibility("default")))
#endif

enum {
  DL_OK = 0,
  DL_ERROR = 1,
  DL_OUT_OF_MEMORY = 2,
  DL_DEVICE_LOST = 3,
  DL_UNAVAILABLE = 4,
  DL_NOT_APPLICABLE = 5,  // the selected algorithm cannot compute this call
  DL_OUT_OF_RANGE = 6  // an index or a class number among the values is not one of those there are
};
enum { DL_CPU = 1, DL_GPU = 2 };
enum {
  DL_FLOAT32 = 0,
  DL_FLOAT64 = 1,
  DL_INT32 = 2,
  DL_INT64 = 3,
  DL_UINT8 = 4,
  DL_BOOL = 5,
  DL_BFLOAT16 = 6,
  DL_FLOAT16 = 7
};
enum { DL_MAX_NDIM = 8 };

typedef struct DLContext {
  int32_t device_id;
  int32_t device_type;
} DLContext;

// A contiguous, row-major array. `dtype` sits where the assignment's struct had padding, so its
// layout holds.
typedef struct DLArray {
  void* data;
  DLContext ctx;
  int32_t ndim;
  int32_t dtype;
  int64_t* shape;
} DLArray;

// Several arrays as one argument; their owner keeps `arrays` and what it points to alive.
typedef struct DLArrayList {
  int64_t count;
  DLArray* const* arrays;
} DLArrayList;

// A struct as one argument of a kernel, whose layout is in DLInterface.
typedef struct DLBytes {
  int64_t nbytes;
  const void* data;  // 8-byte aligned
} DLBytes;

typedef struct DLStreamOpaque* DLStream;  // a cudaStream_t on the GPU, always null on the CPU
typedef struct DLProgram DLProgram;
typedef struct DLGraph DLGraph;

// One argument of a kernel: an array, a list or a struct (p points to a DLArray, a DLArrayList or a
// DLBytes), an integer or a float.
typedef union DLValue {
  void* p;
  int64_t i;
  float f;
} DLValue;

// One registered kernel. Its key is its device, its name and `dtype`, the storage type of the
// floats that it takes: that of its float32, bfloat16 or float16 arrays, 16 bits before 32, and
// DL_FLOAT32 for a call without such arrays. `sig`, the same for all types, has a letter a
// parameter: i input array, o output array, I and O lists of them, b struct, l int64, f float, s
// stream (last, GPU only). `call` has exactly that C signature and returns a status. `fits` is null
// for a kernel that serves all that its checks accept; ask it through DLKernelFits.
typedef struct DLKernelEntry {
  const char *name, *device, *sig;
  int64_t dtype;
  void* call;
  void (*invoke)(const DLValue*, DLStream);
  int32_t (*fits)(const DLValue*);
  const char* file;
  int64_t line;
} DLKernelEntry;

// One kernel call of a program; its arguments are values[first .. first + nargs), the stream is not
// among them. One more than the kernel takes is an array for its workspace, without which it has
// none. `place` is a number of DLPlaceNumber, or 0.
typedef struct DLStep {
  int32_t kernel, first, nargs, place;
} DLStep;

typedef struct DLMemoryStats {
  int64_t device_allocations;  // calls to the device's own allocator since the library was loaded
  int64_t device_frees;
  int64_t reserved_nbytes;  // held from the device, in use or cached
  int64_t in_use_nbytes;
  int64_t peak_in_use_nbytes;
  int64_t requests;  // DLMemoryAlloc calls, cached or not
} DLMemoryStats;

DLSYS_API const char* DLGetLastError(void);
DLSYS_API const char* DLLoadError(void);  // "" or what went wrong while kernels registered
// What this library has asked of the GPU since it was loaded, over all threads and devices.
typedef struct DLCounters {
  int64_t program_launches;  // replays of captured programs
  int64_t kernel_launches;   // own kernels, launched or captured
  int64_t synchronizations;  // waits of the host for the device
} DLCounters;

// One copy on the device at the start or the end of a captured program.
typedef struct DLCopy {
  void* dst;
  const void* src;
  int64_t nbytes;
} DLCopy;

// The graph streams, or branches, of a captured program. Its tasks are the input copies, each step,
// and the output copies. stream[t] is the graph stream of task t, from 0; tasks of one stream run
// in order. waits: nwaits pairs (task, earlier task) sorted by task, for dependencies across
// streams. ready_inputs[t]: bit k is set where the task before t in its stream does not write input
// k of its step, so that a kernel launched by PDL may read it at once, and bit 63 where no task
// writes what the next one of its stream may read so; null where nothing is known.
typedef struct DLGraphStreams {
  const int32_t* stream;
  const int32_t* waits;
  int64_t nwaits;
  const uint64_t* ready_inputs;
} DLGraphStreams;

// The nodes of a captured graph: in all, and those that are kernels, copies and fills.
typedef struct DLGraphInfo {
  int64_t nodes, kernels, copies, fills;
} DLGraphInfo;

// What this library was built from, such as "0.1.0 g++ 12.2.0 cuda 13.0 sm_90a".
DLSYS_API const char* DLVersion(void);
// What callers and this library have to agree about, one fact a line: functions, structs,
// enumerators, limits and opcodes. A caller that was written for another text does not fit.
DLSYS_API const char* DLInterface(void);

// Devices. A device type that this build or machine lacks gives DL_UNAVAILABLE and one sentence
// saying why.
DLSYS_API int DLDeviceCount(int32_t device_type, int32_t* count);
DLSYS_API int DLDeviceName(DLContext ctx, char* text, int64_t nbytes);
DLSYS_API int DLDeviceMemory(DLContext ctx, int64_t* free_nbytes, int64_t* total_nbytes);

DLSYS_API int DLGetCounters(DLCounters* out);

// Streams. Work on one stream runs in order. On the CPU a stream is null and work is done on
// return.
DLSYS_API int DLStreamCreate(DLContext ctx, DLStream* out);
DLSYS_API int DLStreamFree(DLContext ctx, DLStream stream);
//
// A kernel on a GPU that finds an index or a label out of range goes on with NaN. The first wait
// after it, of any thread for the same GPU, by DLStreamSynchronize, a copy to the host or
// DLProgramProfile, does its work and returns DL_OUT_OF_RANGE, once. Of several that were found by
// then it tells of one.
DLSYS_API int DLStreamSynchronize(DLContext ctx, DLStream stream);
// The same for those that have nobody to tell of it: what was found is left to the next wait.
DLSYS_API int DLStreamDrain(DLContext ctx, DLStream stream);
// Lets `stream` wait for the work that `other` has been given so far.
DLSYS_API int DLStreamWait(DLContext ctx, DLStream stream, DLStream other);

// Memory over a caching allocator: a freed block is kept and handed out again on the stream that it
// was taken on. Blocks are 256-byte aligned and never null. Trim gives cached blocks back.
DLSYS_API int DLMemoryAlloc(DLContext ctx, int64_t nbytes, DLStream stream, void** out);
DLSYS_API int DLMemoryFree(DLContext ctx, void* data);
DLSYS_API int DLMemoryTrim(DLContext ctx);
DLSYS_API int DLMemoryGetStats(DLContext ctx, DLMemoryStats* out);
DLSYS_API int DLMemoryResetPeak(DLContext ctx);
DLSYS_API int DLMemoryFill(DLContext ctx, void* data, int32_t byte, int64_t nbytes,
                           DLStream stream);

// Pinned memory of the host, which kernels of the device read and write where it is: as the source
// or the destination of a captured program's copies. DL_UNAVAILABLE where there is none.
DLSYS_API int DLHostAlloc(DLContext ctx, int64_t nbytes, void** out);
DLSYS_API int DLHostFree(DLContext ctx, void* data);

// Copies nbytes between any two contexts, in stream order. The host side of a copy may be reused on
// return; a copy to the host has arrived on return.
DLSYS_API int DLMemoryCopy(void* dst, DLContext dst_ctx, const void* src, DLContext src_ctx,
                           int64_t nbytes, DLStream stream);

// Kernels and programs. A program keeps the addresses of `values`; their owner keeps them alive and
// may change what they hold between runs.
DLSYS_API const DLKernelEntry* DLKernelTable(int64_t* count);
// Some kernels have several algorithms, which their caller selects by an integer: 0 is the kernel's
// heuristic, from 1 on the name is that of an algorithm; null past the last, and for kernels with
// one. An algorithm that cannot compute a call fails with DL_NOT_APPLICABLE.
DLSYS_API const char* DLAlgorithmName(int64_t kernel, int64_t algorithm);
// The library that an algorithm comes from, with its version, such as "cuDNN 9.14.0", or ""
// for this one. Opens it; DL_UNAVAILABLE and the reason when it cannot be used.
DLSYS_API int DLAlgorithmSource(int64_t kernel, int64_t algorithm, const char** out);
// What a kernel says of a call before there is memory for it: its arguments as for the call, but
// the data pointers of arrays are never followed. They may be null, or stand for memory to come:
// only their alignment and which of them overlap is looked at. `fits` is 1 where the kernel does
// this, and not slower than several kernels do; what its checks refuse does not fit. `nbytes` is
// the scratch memory that the call takes.
DLSYS_API int DLKernelFits(int64_t kernel, const DLValue* values, int64_t* fits);
DLSYS_API int DLKernelWorkspace(int64_t kernel, const DLValue* values, int64_t* nbytes);
// A number, from 1 on, for a place in the caller's program, such as "train.py:12", the same for the
// same text. What a GPU finds in a step or a call later than they return is told with its place.
DLSYS_API int DLPlaceNumber(const char* text, int32_t* number);
DLSYS_API int DLKernelCall(const DLStep* step, const DLValue* values, int64_t nvalues,
                           DLStream stream);
DLSYS_API int DLProgramCreate(const DLStep* steps, int64_t nsteps, const DLValue* values,
                              int64_t nvalues, DLProgram** out);
DLSYS_API int DLProgramRun(DLProgram* program, DLStream stream);
// Runs the program and writes the device time of each step in milliseconds.
DLSYS_API int DLProgramProfile(DLProgram* program, DLContext ctx, DLStream stream, double* ms);
// The step at which the last run failed, -1 where it did not.
DLSYS_API int64_t DLProgramFailedStep(const DLProgram* program);
// Captures the program as a graph, with all addresses that its arrays hold now, so that one launch
// replays it; nothing is executed. The tables `inputs` and `outputs` stay where they are and are
// read at each replay: addresses in them may change between replays, sizes may not. Without
// `streams` the steps run in order.
// A failure leaves the program as it was.
DLSYS_API int DLProgramCapture(DLProgram* program, DLContext ctx, DLStream stream,
                               const DLCopy* inputs, int64_t ninputs, const DLCopy* outputs,
                               int64_t noutputs, const DLGraphStreams* streams, DLGraph** out);
// Queues `times` replays without waiting for any. The input copies happen in the first, the output
// copies in the last. An output that the last step writes to memory of DLHostAlloc itself, which is
// a copy from there to there, is complete only behind DLGraphReplayAndWait.
DLSYS_API int DLGraphReplay(DLGraph* graph, DLStream stream, int64_t times);
// Queues one replay and waits for its results: where the last output copy goes to memory of
// DLHostAlloc, until they have arrived there, without giving up the processor.
DLSYS_API int DLGraphReplayAndWait(DLGraph* graph, DLStream stream);
DLSYS_API int DLGraphDescribe(const DLGraph* graph, DLGraphInfo* out);
// Waits for the last replay. Free a graph before the memory that it reads and writes.
DLSYS_API int DLGraphFree(DLGraph* graph);
DLSYS_API int DLProgramFree(DLProgram* program);

// CPU worker threads; 0 for OMP_NUM_THREADS where DLSYS_THREADS is not set, else for one a core.
// Results do not depend on the number. A step whose workspace was planned for fewer threads goes on
// with as many as that.
DLSYS_API int DLCpuSetThreads(int32_t threads);
DLSYS_API int DLCpuGetThreads(int32_t* threads);
