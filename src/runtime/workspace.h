// Scratch memory of launchers. A step of a program takes it from the buffer that was planned for
// it, a call of its own from the caching allocator. How much a call takes is found as LAPACK finds
// it, by a workspace query: the launcher itself runs, with its launches left out, and what it takes
// is counted. So no size is written down twice, and a step that takes more than it asked for fails.
#pragma once
#include <algorithm>

#include "runtime/registry.h"

namespace dlsys {

class Workspace {
 public:
  // While it lives, the calling thread's launchers take scratch from `nbytes` bytes at `data`.
  class Planned;
  // While it lives, they launch nothing, and what they take is counted.
  class Query;

  static bool Querying() { return now_.source == kQuery; }
  static bool FromAllocator() { return now_.source == kAllocator; }

  // A multiple of the alignment of all scratch.
  static int64_t Rounded(int64_t nbytes) {
    return (nbytes + kAlignment - 1) / kAlignment * kAlignment;
  }
  // The bytes of a plan that are left; anywhere else there is no limit.
  static int64_t Left() { return now_.source == kPlan ? now_.limit - now_.used : INT64_MAX; }

  // 256-byte aligned; what a query hands out is no memory.
  static void* Take(int64_t nbytes) {
    const int64_t at = now_.used, end = at + Rounded(nbytes);
    if (now_.source == kPlan && end > now_.limit)
      Fail("a kernel takes %ld bytes of workspace; %ld were planned for it", (long)end,
           (long)now_.limit);
    now_.held++;
    now_.used = end;
    now_.most = std::max(now_.most, end);
    return now_.data + at;
  }
  // What was taken last is free again at once, the rest when all has been given back: launchers are
  // short.
  static void GiveBack(const void* data, int64_t nbytes) {
    const int64_t at = (const char*)data - now_.data;
    if (--now_.held == 0)
      now_.used = 0;
    else if (at + Rounded(nbytes) == now_.used)
      now_.used = at;
  }

 private:
  static constexpr int64_t kAlignment = 256;

  enum Source { kAllocator, kPlan, kQuery };
  struct State {
    Source source;
    char* data;
    int64_t limit, used, most;
    int held;
  };
  static inline thread_local State now_ = {kAllocator, nullptr, 0, 0, 0, 0};
};

class Workspace::Planned {
 public:
  Planned(void* data, int64_t nbytes) : before_(now_) {
    now_ = {kPlan, (char*)data, nbytes, 0, 0, 0};
  }
  ~Planned() { now_ = before_; }
  Planned(const Planned&) = delete;
  Planned& operator=(const Planned&) = delete;

 private:
  const State before_;
};

class Workspace::Query {
 public:
  Query() : before_(now_) { now_ = {kQuery, (char*)kAlignment, 0, 0, 0, 0}; }
  ~Query() { now_ = before_; }
  Query(const Query&) = delete;
  Query& operator=(const Query&) = delete;
  int64_t nbytes() const { return now_.most; }

 private:
  const State before_;
};

// Scratch memory for the length of a launcher: of the step's workspace, or of the allocator, which
// hands the block out again on the same stream only. So it may be given back as soon as the kernels
// that use it are queued.
class Scratch {
 public:
  Scratch(DLContext ctx, int64_t nbytes, DLStream stream)
      : ctx_(ctx), nbytes_(nbytes), owned_(Workspace::FromAllocator()) {
    if (!owned_) {
      data_ = Workspace::Take(nbytes);
      return;
    }
    const int status = DLMemoryAlloc(ctx, nbytes, stream, &data_);
    if (status != DL_OK) throw Error(status, DLGetLastError());
  }
  ~Scratch() {
    if (owned_)
      DLMemoryFree(ctx_, data_);
    else
      Workspace::GiveBack(data_, nbytes_);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  void* data() const { return data_; }
  float* floats() const { return (float*)data_; }

 private:
  const DLContext ctx_;
  const int64_t nbytes_;
  const bool owned_;
  void* data_ = nullptr;
};

}  // namespace dlsys
