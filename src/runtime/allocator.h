// A caching allocator for one device: freed blocks stay in a pool of their size class and stream
// and are handed out again without a call to the device. Freeing never waits: the next owner works
// on the same stream, hence later.
#pragma once
#include <map>
#include <unordered_map>
#include <utility>
#include <vector>

#include "runtime/device.h"

namespace dlsys {

// The size of block that serves a request: at most an eighth and at most 2 MiB more than it, in
// steps of at least 512 bytes. A request is only served by its own class, so a repeated sequence of
// requests allocates nothing new.
size_t BlockSize(size_t nbytes);

// Not thread safe: the runtime holds its lock around every call.
class CachingAllocator {
 public:
  // With DLSYS_DEBUG_ARENA=separate it caches nothing and rounds nothing up.
  CachingAllocator(const Device& device, int id);
  CachingAllocator(const CachingAllocator&) = delete;

  // 256-byte aligned, never null; fails with DL_OUT_OF_MEMORY after giving back every cached block.
  void* Alloc(size_t nbytes, DLStream stream);
  void Free(void* data);
  void Trim();
  // The stream goes away: its blocks, cached or in use, belong to the null stream from now on.
  void Adopt(DLStream stream);
  void ResetPeak() { stats_.peak_in_use_nbytes = stats_.in_use_nbytes; }
  const DLMemoryStats& stats() const { return stats_; }

 private:
  struct Block {
    size_t nbytes;
    DLStream stream;
    bool in_use;
  };
  using Pools = std::map<std::pair<DLStream, size_t>, std::vector<void*>>;

  void* TakeCached(size_t nbytes, DLStream stream);
  void* TakeNew(size_t nbytes, DLStream stream);
  [[noreturn]] void FailOutOfMemory(size_t nbytes) const;

  const Device& device_;
  const int id_;
  const bool separate_;
  std::unordered_map<void*, Block> blocks_;
  Pools pools_;
  DLMemoryStats stats_ = {};
};

}  // namespace dlsys
