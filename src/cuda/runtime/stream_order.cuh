// Order between streams, some of which may be capturing.
#pragma once
#include "cuda/runtime/context.cuh"

namespace dlsys {
namespace cuda {

// Lets `stream` wait for the work queued on `other` so far. Captured work is not queued: for a
// stream that captures, the work before the capture counts, and it waits itself when the capture
// has ended. Any thread may call it, such as one that frees memory that another's stream has used.
void Order(int device, cudaStream_t stream, cudaStream_t other);

// Lets the host wait for that work, from any thread too: a wait for the stream itself would break
// its capture.
void WaitFor(const char* op, int device, cudaStream_t stream);

// Begins to capture the work that the calling thread queues on the stream; ends it and returns the
// graph.
void BeginCapture(int device, cudaStream_t stream);
cudaError_t EndCapture(int device, cudaStream_t stream, cudaGraph_t* graph);

}  // namespace cuda
}  // namespace dlsys
