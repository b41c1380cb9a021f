// Loops over the CPU's worker threads. Work is cut into chunks whose borders depend on the size of
// the problem only, never on the number of threads, so that results are the same bits for any
// number of them.
#pragma once
#include <algorithm>
#include <climits>
#include <cstdint>

#include "runtime/workspace.h"

namespace dlsys {
namespace cpu {

// Calls body(state, k, worker) for every k in [0, n), each on some thread; returns when all are
// done. At most `most` threads take part, the workers 0, 1, …. The first exception is rethrown on
// the caller. A call from within a body, or while another thread's call runs, stays on its own
// thread.
void RunTasks(int64_t n, int most, void (*body)(void* state, int64_t k, int worker), void* state);

void SetThreads(int threads);  // 0 is one a core
int GetThreads();

// Calls body(begin, end, worker) for chunks of [0, n), on at most `most` threads.
template <class F>
void ForChunks(int64_t n, int64_t chunk, int most, F& body) {
  if (n <= chunk) return body(int64_t{0}, n, 0);
  struct State {
    F* body;
    int64_t n, chunk;
  } state{&body, n, std::max<int64_t>(chunk, 1)};
  const int64_t tasks = (n - 1) / state.chunk + 1;
  auto task = [](void* p, int64_t k, int worker) {
    const State& s = *(const State*)p;
    const int64_t begin = k * s.chunk;
    (*s.body)(begin, begin + std::min(s.chunk, s.n - begin), worker);
  };
  RunTasks(tasks, most, task, &state);
}

// Cuts [0, n) into chunks of `chunk` and calls body(begin, end) for each, on at most `most`
// threads. A workspace query (runtime/workspace.h) runs no body: arrays have no memory yet.
template <class F>
void ParallelFor(int64_t n, int64_t chunk, F&& body, int most = INT_MAX) {
  if (n <= 0 || Workspace::Querying()) return;
  auto numbered = [&](int64_t begin, int64_t end, int) { body(begin, end); };
  ForChunks(n, chunk, most, numbered);
}

// Does what a launcher does besides its loops, on the calling thread; a workspace query leaves it
// out as well.
template <class F>
void Serially(F&& body) {
  if (!Workspace::Querying()) body();
}

// Scratch of a launcher for `count` values of T, as long as it lives.
template <class T>
class ScratchArray {
 public:
  explicit ScratchArray(int64_t count)
      : scratch_({0, DL_CPU}, count * (int64_t)sizeof(T), nullptr) {}
  T* data() const { return (T*)scratch_.data(); }

 private:
  const ::dlsys::Scratch scratch_;
};

// The bytes of scratch that a function takes.
template <class F>
int64_t ScratchNbytes(const F& function) {
  const Workspace::Query query;
  function();
  return query.nbytes();
}

// ParallelFor whose tasks have scratch: body(begin, end, scratch) with what make() takes, of memory
// that a thread has to itself. Where a plan has memory for fewer threads than there are now, as
// many take part.
template <class Make, class F>
void ParallelForWithScratch(int64_t n, int64_t chunk, const Make& make, F&& body,
                            int most = INT_MAX) {
  if (n <= 0) return;
  const int64_t nbytes = ScratchNbytes([&] { make(); });
  const int64_t tasks = (n - 1) / std::max<int64_t>(chunk, 1) + 1;
  const int64_t planned = nbytes ? Workspace::Left() / nbytes : tasks;
  const int64_t workers = std::min({tasks, planned, (int64_t)GetThreads(), (int64_t)most});
  const ScratchArray<char> all(std::max<int64_t>(workers, 1) * nbytes);
  if (Workspace::Querying()) return;
  auto with_own = [&](int64_t begin, int64_t end, int worker) {
    const Workspace::Planned own(all.data() + worker * nbytes, nbytes);
    const auto scratch = make();
    body(begin, end, scratch);
  };
  ForChunks(n, chunk, (int)workers, with_own);
}

// Elements that are worth a task of their own: some microseconds of simple arithmetic.
inline constexpr int64_t kGrain = 32768;

// How many rows of `cols` elements make a task.
inline int64_t RowGrain(int64_t cols) {
  return std::max<int64_t>(1, kGrain / std::max<int64_t>(cols, 1));
}

}  // namespace cpu
}  // namespace dlsys
