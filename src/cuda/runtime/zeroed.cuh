// Counters by which the blocks of a kernel tell each other what they have done. They are zeros
// whenever no kernel counts by them, since each leaves them as it found them, and so take no launch
// that clears them. A stream has some, for its kernels run one after the other; a captured graph
// has some for each of its launches, for its branches run side by side, and beside other graphs.
#pragma once
#include <cstdint>
#include <vector>

#include "cuda/runtime/context.cuh"

namespace dlsys {
namespace cuda {

// `count` zeros for this thread's next kernel, on the stream; null in a workspace query.
unsigned* ZeroedCounters(const char* op, int device, int64_t count, DLStream stream);

// A stream without work goes away.
void FreeCountersOf(int device, DLStream stream);

// The counters of a captured graph. It outlives the last replay.
class GraphCounters {
 public:
  GraphCounters() = default;
  ~GraphCounters();
  GraphCounters(const GraphCounters&) = delete;
  GraphCounters& operator=(const GraphCounters&) = delete;

  // Those of the next launch that is captured.
  unsigned* Take(int device, int64_t count);
  // Clears them, before the first replay, on its stream.
  void Clear(const char* op, cudaStream_t stream);

 private:
  struct Chunk {
    unsigned* data;
    int64_t count;
    int device;
  };
  std::vector<Chunk> chunks_;
  int64_t left_ = 0;  // of the last chunk
  bool cleared_ = false;
};

// Where launches take theirs while this thread captures.
inline thread_local GraphCounters* graph_counters = nullptr;

}  // namespace cuda
}  // namespace dlsys
