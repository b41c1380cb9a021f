// Working memory of kernels: what each thread keeps between calls.
//
// Memory that grows in the middle of a step may not be there, behind updates that nobody can take
// back. So each Scratch remembers the most that was ever asked of it, and before the first step of
// a program ReserveScratch gives that much to every thread that may run one. A program asks for the
// same in every run: only its first run can fail for want of working memory behind its first step.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace dlsys {
namespace cpu {

// The working memory of one thread: a room for each Scratch, by its number.
class Rooms {
 public:
  struct Room {
    void* data;
    size_t nbytes;
  };

  Rooms() = default;
  Rooms(const Rooms&) = delete;
  ~Rooms();

  bool Has(int number, size_t nbytes) const {
    return number < count_ && nbytes <= rooms_[number].nbytes;
  }
  void* At(int number) const { return rooms_[number].data; }

  // Room for nbytes. What was there is given up once the new one is there: a failure changes
  // nothing.
  void* Grow(int number, size_t nbytes);
  // Room for the most that was asked of each Scratch, within tasks or anywhere. Nobody else may be
  // using these rooms.
  void Reserve(bool tasks_alone);

 private:
  void Enlarge(int count);

  Room* rooms_ = nullptr;
  int count_ = 0;
};

// What a thread works with.
struct OfThread {
  Rooms* rooms;  // null until it asks for some
  bool in_task;  // which any other thread may run next time
};
inline thread_local OfThread of_thread = {nullptr, false};

// Marks the calling thread as running tasks.
class InTask {
 public:
  InTask() : before_(of_thread.in_task) { of_thread.in_task = true; }
  ~InTask() { of_thread.in_task = before_; }
  InTask(const InTask&) = delete;

 private:
  const bool before_;
};

// One use of working memory; make it a static variable. Each thread has memory of its own for it.
class Scratch {
 public:
  constexpr Scratch() = default;
  Scratch(const Scratch&) = delete;

  // Room for n values, 64-byte aligned, with whatever this thread's last use left there. Fails with
  // DL_OUT_OF_MEMORY.
  template <class T>
  T* Get(size_t n) {
    const size_t nbytes = (n * sizeof(T) + 63) / 64 * 64;
    const int number = number_.load(std::memory_order_relaxed);
    const Rooms* rooms = of_thread.rooms;
    return (T*)(rooms && rooms->Has(number, nbytes) ? rooms->At(number) : Grow(nbytes));
  }

 private:
  friend class Rooms;
  static constexpr int kNone = INT32_MAX;

  void* Grow(size_t nbytes);
  void Enlist();

  std::atomic<int> number_{kNone};
  std::atomic<size_t> most_[2] = {};  // asked for outside tasks, which the caller does, and within
  Scratch* next_ = nullptr;           // of all that were ever used
};

// A count of the times that more was asked of a Scratch than ever before.
uint64_t ScratchChanges();

// Has the calling thread and all workers hold what was ever asked for (parallel.cc). Fails with
// DL_OUT_OF_MEMORY.
void ReserveScratch();

// The calling thread's rooms.
Rooms& RoomsOfThread();

}  // namespace cpu
}  // namespace dlsys
