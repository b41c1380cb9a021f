// Scratch memory of a recorded program. A recording bakes in the addresses of the scratch that its
// kernels take, so while one is made on a thread, what that thread allocates stays out of the
// allocator's pools: freed blocks serve later requests in the same lane of the recording (its steps
// run in the order in which they were recorded), and all of them go back when the recording does.
#pragma once
#include <map>
#include <utility>
#include <vector>

#include "include/dlsys.h"

namespace dlsys {

class KeptMemory {
 public:
  explicit KeptMemory(DLContext ctx) : ctx_(ctx) {}
  ~KeptMemory() {
    for (void* data : blocks_) DLMemoryFree(ctx_, data);
  }
  KeptMemory(const KeptMemory&) = delete;
  KeptMemory& operator=(const KeptMemory&) = delete;

  // While it lives, the calling thread's requests pass through `memory`.
  class Recording {
   public:
    explicit Recording(KeptMemory* memory) { open_ = memory; }
    ~Recording() { open_ = nullptr; }
    Recording(const Recording&) = delete;
    Recording& operator=(const Recording&) = delete;
  };

  // The one that the calling thread records into for this device, or null.
  static KeptMemory* Open(DLContext ctx) {
    return open_ && open_->ctx_.device_type == ctx.device_type &&
                   open_->ctx_.device_id == ctx.device_id
               ? open_
               : nullptr;
  }

  // The lane of the steps from now on.
  void Enter(int32_t lane) { lane_ = lane; }

  // The smallest block that an earlier step of the lane has freed, of those that are large enough
  // and not far too large; or null.
  void* Take(int64_t nbytes) {
    constexpr int64_t kMostWaste = 8;
    for (auto it = idle_.lower_bound({lane_, nbytes}); it != idle_.end(); ++it) {
      const auto& [lane, size] = it->first;
      if (lane != lane_ || size > kMostWaste * nbytes) break;
      if (it->second.empty()) continue;
      void* data = it->second.back();
      it->second.pop_back();
      return data;
    }
    return nullptr;
  }
  void Keep(void* data, int64_t nbytes) {
    blocks_.push_back(data);
    nbytes_[data] = nbytes;
  }
  // Whether the block is one of its own; it then serves later requests of the lane.
  bool Return(void* data) {
    const auto found = nbytes_.find(data);
    if (found == nbytes_.end()) return false;
    idle_[{lane_, found->second}].push_back(data);
    return true;
  }

 private:
  static inline thread_local KeptMemory* open_ = nullptr;
  const DLContext ctx_;
  std::vector<void*> blocks_;
  std::map<void*, int64_t> nbytes_;
  int32_t lane_ = 0;
  std::map<std::pair<int32_t, int64_t>, std::vector<void*>> idle_;
};

}  // namespace dlsys
