// The graph-private memory pool. A captured graph bakes in the addresses that its kernels use, so
// the blocks that a thread allocates while it captures belong to the graph: a freed block serves
// later requests of the same graph stream (whose steps run in order), and all blocks return to the
// allocator with the graph.
#pragma once
#include <map>
#include <utility>
#include <vector>

#include "include/dlsys.h"

namespace dlsys {

class GraphPool {
 public:
  explicit GraphPool(DLContext ctx) : ctx_(ctx) {}
  ~GraphPool() {
    for (void* data : blocks_) DLMemoryFree(ctx_, data);
  }
  GraphPool(const GraphPool&) = delete;
  GraphPool& operator=(const GraphPool&) = delete;

  // Serves the calling thread's requests from `pool` while it lives.
  class Scope {
   public:
    explicit Scope(GraphPool* pool) { current_ = pool; }
    ~Scope() { current_ = nullptr; }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;
  };

  // The pool of the graph that the calling thread captures on this device, or null.
  static GraphPool* Current(DLContext ctx) {
    return current_ && current_->ctx_.device_type == ctx.device_type &&
                   current_->ctx_.device_id == ctx.device_id
               ? current_
               : nullptr;
  }

  // Sets the graph stream of the steps from now on.
  void EnterStream(int32_t stream) { stream_ = stream; }

  // Returns the smallest block that an earlier step of the stream has freed, of those that are
  // large enough and waste at most seven eighths; or null.
  void* Take(int64_t nbytes) {
    constexpr int64_t kMostWaste = 8;
    for (auto it = idle_.lower_bound({stream_, nbytes}); it != idle_.end(); ++it) {
      const auto& [stream, size] = it->first;
      if (stream != stream_ || size > kMostWaste * nbytes) break;
      if (it->second.empty()) continue;
      void* data = it->second.back();
      it->second.pop_back();
      return data;
    }
    return nullptr;
  }
  void Own(void* data, int64_t nbytes) {
    blocks_.push_back(data);
    nbytes_[data] = nbytes;
  }
  // Takes a block of its own back for later requests of the stream; false for any other block.
  bool Return(void* data) {
    const auto found = nbytes_.find(data);
    if (found == nbytes_.end()) return false;
    idle_[{stream_, found->second}].push_back(data);
    return true;
  }

 private:
  static inline thread_local GraphPool* current_ = nullptr;
  const DLContext ctx_;
  std::vector<void*> blocks_;
  std::map<void*, int64_t> nbytes_;
  int32_t stream_ = 0;
  std::map<std::pair<int32_t, int64_t>, std::vector<void*>> idle_;
};

}  // namespace dlsys
