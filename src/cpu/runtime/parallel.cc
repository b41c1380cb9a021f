#include "cpu/runtime/parallel.h"

#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "cpu/runtime/simd.h"
#include "runtime/registry.h"

namespace dlsys {
namespace cpu {
namespace {

using Body = void (*)(void* state, int64_t k, int worker);

const int kMostThreads = 1024;
const int kSpins = 2000;  // some tens of microseconds: the next kernel of a program comes sooner

inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

int ThreadsFromEnvironment() {
  const char* text = getenv("DLSYS_THREADS");
  if (!text || !*text) return 0;
  char* end = nullptr;
  const long value = strtol(text, &end, 10);
  if (*end || value < 0 || value > kMostThreads)
    Fail("DLSYS_THREADS=%s: expected a number from 0 (one thread a core) to %d", text,
         kMostThreads);
  return (int)value;
}

// OMP_NUM_THREADS, of a list such as "4,2" the first number; 0 where it has none, as in OpenMP.
int ThreadsOfOpenMp() {
  const char* text = getenv("OMP_NUM_THREADS");
  if (!text) return 0;
  char* end = nullptr;
  const long value = strtol(text, &end, 10);
  end += strspn(end, " \t");
  const bool ends = *end == 0 || *end == ',';
  return ends && value > 0 ? (int)std::min<long>(value, kMostThreads) : 0;
}

int Resolve(int threads) {
  if (threads > 0) return threads;
  const char* own = getenv("DLSYS_THREADS");
  const int wanted = own && *own ? 0 : ThreadsOfOpenMp();
  return wanted ? wanted : std::max((int)std::thread::hardware_concurrency(), 1);
}

// Each thread begins with tasks of its own, the same ones of every loop with as many, so that what
// a kernel leaves in a core's cache is there for the next; then it helps the others with theirs.
// The caller of Run takes tasks too and waits only for workers that joined in, so a worker that
// wakes late costs nothing. All atomics are sequentially consistent: a worker announces itself
// (active_) before it looks at open_, the caller closes open_ before it looks at active_, hence one
// of them sees the other.
class Pool {
 public:
  explicit Pool(int threads) { Reserve(threads); }

  // False when another call holds the workers.
  bool TryRun(int64_t n, int most, Body body, void* state) {
    if (busy_.exchange(true)) return false;
    StartWorkers();
    body_ = body;
    state_ = state;
    most_ = most;
    joined_ = 1;
    parts_ = (int)std::min<int64_t>(n, threads_);
    for (int k = 0; k < parts_; k++) parts_of_[k].Reset(n * k / parts_, n * (k + 1) / parts_);
    open_ = true;
    epoch_++;
    if (sleepers_ > 0) WakeAll();
    Work(0, 0);
    open_ = false;
    for (int k = 0; active_ > 0; k++) k < kSpins ? Pause() : std::this_thread::yield();
    std::exception_ptr error = std::exchange(error_, nullptr);
    busy_ = false;
    if (error) std::rethrow_exception(error);
    return true;
  }

  void SetThreads(int threads) {
    while (busy_.exchange(true)) std::this_thread::yield();
    stop_ = true;
    epoch_++;
    WakeAll();
    for (std::thread& worker : workers_) worker.join();
    workers_.clear();
    Reserve(threads);
    stop_ = false;
    busy_ = false;
  }

  int threads() const { return threads_; }

 private:
  // The tasks that a thread begins with: [next, end).
  struct alignas(64) Part {  // a cache line, which no other thread's tasks share
    std::atomic<int64_t> next{0};
    int64_t end = 0;

    void Reset(int64_t first, int64_t last) {
      next = first;
      end = last;
    }
  };

  void Reserve(int threads) {
    workers_.reserve(threads);
    parts_of_ = std::make_unique<Part[]>(threads);
    threads_ = threads;
  }

  void StartWorkers() {
    if ((int)workers_.size() >= threads_ - 1) return;
    sigset_t all, before;  // signals belong to the threads of the program, not to ours
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      while ((int)workers_.size() < threads_ - 1)
        workers_.emplace_back([this, seen = epoch_.load(), thread = (int)workers_.size() + 1] {
          Loop(seen, thread);
        });
    } catch (const std::system_error&) {
      threads_ = (int)workers_.size() + 1;  // the system has no more threads: go on with these
    } catch (const std::bad_alloc&) {
      threads_ = (int)workers_.size() + 1;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  void Loop(uint64_t seen, int thread) {
    while (true) {
      WaitForEpochAfter(seen);
      seen = epoch_;
      if (stop_) return;
      active_++;
      if (open_) {
        const int worker = joined_++;
        if (worker < most_) Work(worker, thread);
      }
      active_--;
    }
  }

  void WaitForEpochAfter(uint64_t seen) {
    for (int k = 0; k < kSpins; k++) {
      if (epoch_ != seen) return;
      Pause();
    }
    std::unique_lock<std::mutex> lock(mutex_);
    sleepers_++;
    wake_.wait(lock, [&] { return epoch_ != seen; });
    sleepers_--;
  }

  void WakeAll() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
    }
    wake_.notify_all();
  }

  void Work(int worker, int thread) {
    try {
      for (int turn = 0; turn < parts_; turn++) {
        Part& part = parts_of_[(thread + turn) % parts_];
        for (int64_t k; part.next < part.end && (k = part.next++) < part.end;)
          body_(state_, k, worker);
      }
    } catch (...) {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!error_) error_ = std::current_exception();
      for (int k = 0; k < parts_; k++) parts_of_[k].next = parts_of_[k].end;
    }
  }

  std::atomic<bool> busy_{false}, open_{false}, stop_{false};
  std::atomic<int> active_{0}, sleepers_{0}, joined_{0}, threads_{0};
  std::atomic<uint64_t> epoch_{0};
  Body body_ = nullptr;
  void* state_ = nullptr;
  int most_ = 0;  // threads, with the caller
  int parts_ = 0;
  std::unique_ptr<Part[]> parts_of_;  // of each thread
  std::exception_ptr error_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> workers_;
};

// Never destroyed: workers may still wait on it when the process ends. A forked child has none of
// the parent's workers, so it starts over with a pool of its own.
Pool* pool = nullptr;

Pool& GetPool() {
  static const bool made = [] {
    CurrentIsa();  // so that whoever makes the pool first has made all that is made once
    pool = new Pool(Resolve(ThreadsFromEnvironment()));
    pthread_atfork(nullptr, nullptr, [] { pool = new Pool(pool->threads()); });
    return true;
  }();
  (void)made;
  return *pool;
}

}  // namespace

void RunTasks(int64_t n, int most, Body body, void* state) {
  if (n > 1 && most > 1) {
    Pool& workers = GetPool();
    if (workers.threads() > 1 && workers.TryRun(n, most, body, state)) return;
  }
  for (int64_t k = 0; k < n; k++) body(state, k, 0);
}

void SetThreads(int threads) {
  if (threads < 0 || threads > kMostThreads)
    Fail("DLCpuSetThreads: got %d, expected 0 (one thread a core) to %d", threads, kMostThreads);
  GetPool().SetThreads(Resolve(threads));
}

int GetThreads() { return GetPool().threads(); }

}  // namespace cpu
}  // namespace dlsys

DLSYS_API int DLCpuSetThreads(int32_t threads) {
  return dlsys::Guard([&] { dlsys::cpu::SetThreads(threads); });
}

DLSYS_API int DLCpuGetThreads(int32_t* threads) {
  return dlsys::Guard([&] {
    if (!threads) dlsys::Fail("DLCpuGetThreads: null output argument");
    *threads = dlsys::cpu::GetThreads();
  });
}
