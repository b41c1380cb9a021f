// Loops over the CPU's worker threads. Work is cut into chunks whose borders depend on the size of
// the problem only, never on the number of threads, so that results are the same bits for any
// number of them.
#pragma once
#include <algorithm>
#include <cstdint>

namespace dlsys {
namespace cpu {

// Calls body(state, k) for every k in [0, n), each on some thread; returns when all are done. The
// first exception is rethrown on the caller. A call from within a body, or while another thread's
// call runs, stays on its own thread.
void RunTasks(int64_t n, void (*body)(void* state, int64_t k), void* state);

void SetThreads(int threads);  // 0 is one a core
int GetThreads();

// Cuts [0, n) into chunks of `chunk` and calls body(begin, end) for each.
template <class F>
void ParallelFor(int64_t n, int64_t chunk, F&& body) {
  if (n <= 0) return;
  if (n <= chunk) return body(int64_t{0}, n);
  struct State {
    F* body;
    int64_t n, chunk;
  } state{&body, n, std::max<int64_t>(chunk, 1)};
  const int64_t tasks = (n - 1) / state.chunk + 1;
  auto task = [](void* p, int64_t k) {
    const State& s = *(const State*)p;
    const int64_t begin = k * s.chunk;
    (*s.body)(begin, begin + std::min(s.chunk, s.n - begin));
  };
  RunTasks(tasks, task, &state);
}

// Elements that are worth a task of their own: some microseconds of simple arithmetic.
inline constexpr int64_t kGrain = 32768;

// How many rows of `cols` elements make a task.
inline int64_t RowGrain(int64_t cols) {
  return std::max<int64_t>(1, kGrain / std::max<int64_t>(cols, 1));
}

}  // namespace cpu
}  // namespace dlsys
