// Order between streams, and recordings, around which it is another matter.
#pragma once
#include "cuda/runtime/context.cuh"

namespace dlsys {
namespace cuda {

// Lets `stream` wait for the work that `other` has been given so far. What a stream records is not
// given yet: of one that records, what came before counts, and it waits as soon as it has recorded.
// Any thread may ask, such as one that frees what another thread's stream has used.
void Order(int device, cudaStream_t stream, cudaStream_t other);

// Lets the host wait for that work, from any thread too: a wait for the stream itself would break
// what it records.
void WaitFor(const char* op, int device, cudaStream_t stream);

// Begins to record what the calling thread queues on the stream; ends it, and gives the graph.
void BeginRecording(int device, cudaStream_t stream);
cudaError_t EndRecording(int device, cudaStream_t stream, cudaGraph_t* graph);

}  // namespace cuda
}  // namespace dlsys
