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

  // 256-byte aligned; what a query hands out is no memory.
  static void* Take(int64_t nbytes) {
    const int64_t at = now_.used, end = at + (nbytes + kAlignment - 1) / kAlignment * kAlignment;
    if (now_.source == kPlan && end > now_.limit)
      Fail("a kernel takes %ld bytes of workspace; %ld were planned for it", (long)end,
           (long)now_.limit);
    now_.held++;
    now_.used = end;
    now_.most = std::max(now_.most, end);
    return now_.data + at;
  }
  // The memory is free again when all that was taken has been given back: launchers are short.
  static void GiveBack() {
    if (--now_.held == 0) now_.used = 0;
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
  Query() : before_(now_) { now_ = {kQuery, nullptr, 0, 0, 0, 0}; }
  ~Query() { now_ = before_; }
  Query(const Query&) = delete;
  Query& operator=(const Query&) = delete;
  int64_t nbytes() const { return now_.most; }

 private:
  const State before_;
};

}  // namespace dlsys
