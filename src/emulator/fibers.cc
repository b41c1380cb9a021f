// Fibers: a stack and a stack pointer for each thread of a block, and a switch between them in a
// few instructions. A fiber runs until it has to wait or ends; the scheduler then goes to the next
// one that may run.
#include "emulator/fibers.h"

#include <sys/mman.h>

#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <vector>

#include "emulator/cuda_runtime.h"
#include "emulator/order.h"

#if defined(__x86_64__)
// switch_fiber(where to keep this stack pointer, the other one): what a call has to preserve lies
// on the stack of whoever does not run. A processor expects `ret` to go back to the last caller, so
// it would be wrong each time; a jump it learns.
extern "C" void dlsys_switch_fiber(void** keep, void* to);
asm(R"(
.text
.hidden dlsys_switch_fiber
.globl dlsys_switch_fiber
.type dlsys_switch_fiber, @function
dlsys_switch_fiber:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  popq %rdx
  jmp *%rdx
.size dlsys_switch_fiber, .-dlsys_switch_fiber
)");
#else
#error "the emulator switches fibers on x86-64 only"
#endif

__thread uint3 threadIdx, blockIdx, blockDim, gridDim;

namespace dlsys {
namespace emulator {

namespace {

constexpr size_t kStackNbytes = 64 << 10;
constexpr unsigned kMostThreads = 1024;

thread_local char shared_of_this_thread;  // the others lie at the same distance from it elsewhere

// Threads that wait for each other.
struct Group {
  unsigned size = 0, arrived = 0, round = 0;
};

// Blocks that run beside each other, each on a thread of the CPU.
class Cluster {
 public:
  explicit Cluster(unsigned size) : size_(size), blocks_(size) {}

  void Enter(unsigned rank, char* dynamic, size_t nbytes) {
    blocks_[rank] = {&shared_of_this_thread, dynamic, nbytes};
    Meet();
  }
  void Meet() {
    std::unique_lock<std::mutex> lock(mutex_);
    const unsigned round = round_;
    if (++arrived_ >= size_) {
      Release();
    } else {
      moved_.wait(lock, [&] { return round_ != round; });
    }
  }
  void Leave() {
    std::lock_guard<std::mutex> lock(mutex_);
    size_--;
    if (size_ && arrived_ >= size_) Release();
  }
  const void* OfPeer(unsigned rank, const char* place, unsigned peer) const {
    const Block &mine = blocks_[rank], &other = blocks_[peer];
    if (place >= mine.dynamic && place < mine.dynamic + mine.nbytes)
      return other.dynamic + (place - mine.dynamic);
    return other.fixed + (place - mine.fixed);
  }

 private:
  struct Block {
    char *fixed, *dynamic;
    size_t nbytes;
  };
  void Release() {
    arrived_ = 0;
    round_++;
    moved_.notify_all();
  }

  unsigned size_, arrived_ = 0, round_ = 0;
  std::vector<Block> blocks_;
  std::mutex mutex_;
  std::condition_variable moved_;
};

struct Copy {
  float* to;
  const float* from;
  int count;
  bool valid;
  void Do() const {
    for (int k = 0; k < count; k++) to[k] = valid ? from[k] : 0.f;
  }
};

struct Fiber {
  void* stack_pointer;
  const Group* waits;  // for whose round to pass; null: it may run
  unsigned round;
  bool ended;
  std::vector<Copy> copies;
  std::vector<size_t> batches;  // where each ends that is closed and not waited for
};

// Runs blocks, one at a time, on the thread of the CPU that owns it.
class Scheduler {
 public:
  Scheduler() {
    void* place = mmap(nullptr, kMostThreads * kStackNbytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (place == MAP_FAILED) abort();
    stacks_ = (char*)place;
    fibers_.resize(kMostThreads);
  }
  ~Scheduler() { munmap(stacks_, kMostThreads * kStackNbytes); }

  bool RunBlock(const Grid& grid, unsigned block, Cluster* cluster);

  void Wait(Group& group) {
    Fiber& fiber = fibers_[current_];
    if (++group.arrived == group.size) return Release(group);
    fiber.waits = &group;
    fiber.round = group.round;
    dlsys_switch_fiber(&fiber.stack_pointer, main_);
  }
  void WaitForCluster() {
    Wait(all_);
    if (!cluster_) return;
    if (threadIdx.x == 0) cluster_->Meet();
    Wait(all_);
  }
  Group& all() { return all_; }
  Group& warp() { return warps_[current_ / kLanes]; }
  Slots slots() { return slots_[current_ / kLanes]; }
  char* dynamic() { return dynamic_; }
  Fiber& fiber() { return fibers_[current_]; }
  bool late() const { return late_; }
  const void* OfPeer(const void* place, int peer) const {
    return cluster_ ? cluster_->OfPeer(rank_, (const char*)place, (unsigned)peer) : place;
  }

 private:
  static void Begin();  // of every fiber

  void Prepare(unsigned thread) {
    Fiber& fiber = fibers_[thread];
    fiber.waits = nullptr;
    fiber.ended = false;
    fiber.copies.clear();
    fiber.batches.clear();
    // As if it had been switched away from at the first instruction of Begin, which expects its
    // stack as behind a call.
    void** top = (void**)(stacks_ + (thread + 1) * kStackNbytes) - 2;
    top[0] = (void*)Begin;
    top[1] = nullptr;
    fiber.stack_pointer = top - 6;
  }
  void Release(Group& group) {
    group.arrived = 0;
    group.round++;
  }
  void Drop(Group& group) {
    group.size--;
    if (group.size && group.arrived == group.size) Release(group);
  }
  static bool MayRun(const Fiber& fiber) {
    return !fiber.ended && (!fiber.waits || fiber.waits->round != fiber.round);
  }
  void Resume(unsigned thread) {
    current_ = thread;
    *thread_x_ = thread;
    fibers_[thread].waits = nullptr;
    dlsys_switch_fiber(&main_, fibers_[thread].stack_pointer);
  }

  char* stacks_;
  std::vector<Fiber> fibers_;
  std::vector<char> dynamic_memory_;
  char* dynamic_ = nullptr;
  void* main_ = nullptr;
  unsigned* const thread_x_ = &threadIdx.x;  // of the thread that owns this
  unsigned current_ = 0, rank_ = 0;
  Group all_, warps_[kMostThreads / kLanes];
  alignas(16) char slots_[kMostThreads / kLanes][kLanes][kSlotNbytes];
  const Call* call_ = nullptr;
  Cluster* cluster_ = nullptr;
  bool late_ = false;
};

Scheduler& scheduler() {
  static thread_local Scheduler own;
  return own;
}

void Scheduler::Begin() {
  Scheduler& own = scheduler();
  own.call_->Run();
  Fiber& fiber = own.fibers_[own.current_];
  fiber.ended = true;
  own.Drop(own.all_);
  own.Drop(own.warp());
  dlsys_switch_fiber(&fiber.stack_pointer, own.main_);
  abort();  // nobody comes back
}

bool Scheduler::RunBlock(const Grid& grid, unsigned block, Cluster* cluster) {
  constexpr size_t kAligned = 1024;
  dynamic_memory_.assign(grid.shared_nbytes + kAligned, (char)0xff);
  dynamic_ = dynamic_memory_.data();
  dynamic_ += (kAligned - (uintptr_t)dynamic_ % kAligned) % kAligned;
  call_ = grid.call;
  cluster_ = cluster;
  rank_ = block % grid.cluster;
  late_ = NextDecision() & 1;
  threadIdx = {0, 0, 0};
  blockIdx = {block, 0, 0};
  blockDim = {grid.threads, 1, 1};
  gridDim = {grid.blocks, 1, 1};
  all_ = {grid.threads, 0, 0};
  for (unsigned first = 0; first < grid.threads; first += kLanes)
    warps_[first / kLanes] = {std::min(grid.threads - first, (unsigned)kLanes), 0, 0};
  memset(slots_, 0xff, sizeof slots_);
  for (unsigned k = 0; k < grid.threads; k++) Prepare(k);
  if (cluster) cluster->Enter(rank_, dynamic_, grid.shared_nbytes);
  const Turns turns(grid.threads);
  bool moved = true;
  while (moved && all_.size) {
    moved = false;
    for (unsigned k = 0; k < grid.threads; k++) {
      const unsigned thread = turns[k];
      if (!MayRun(fibers_[thread])) continue;
      moved = true;
      Resume(thread);
    }
  }
  if (cluster) cluster->Leave();
  if (all_.size)
    fprintf(stderr, "emulated GPU: %u of %u threads of block %u wait for others that never come\n",
            all_.size, grid.threads, block);
  return all_.size == 0;
}

bool RunCluster(const Grid& grid, unsigned first) {
  Cluster cluster(grid.cluster);
  std::vector<char> fine(grid.cluster);
  std::vector<std::thread> threads;
  for (unsigned k = 0; k < grid.cluster; k++)
    threads.emplace_back([&, k] { fine[k] = scheduler().RunBlock(grid, first + k, &cluster); });
  for (std::thread& thread : threads) thread.join();
  return std::all_of(fine.begin(), fine.end(), [](char ok) { return ok; });
}

}  // namespace

void MeetBlock() { scheduler().Wait(scheduler().all()); }
void MeetWarp() { scheduler().Wait(scheduler().warp()); }
void MeetCluster() { scheduler().WaitForCluster(); }
Slots SlotsOfWarp() { return scheduler().slots(); }
void* DynamicShared() { return scheduler().dynamic(); }
const void* OfPeer(const void* shared, int peer) { return scheduler().OfPeer(shared, peer); }

void CopyLater(float* to, const float* from, int count, bool valid) {
  const Copy copy = {to, from, count, valid};
  if (scheduler().late())
    scheduler().fiber().copies.push_back(copy);
  else
    copy.Do();
}

void CloseCopies() {
  Fiber& fiber = scheduler().fiber();
  fiber.batches.push_back(fiber.copies.size());
}

void WaitForCopies(int left) {
  Fiber& fiber = scheduler().fiber();
  if ((int)fiber.batches.size() <= left) return;
  const size_t batches = fiber.batches.size() - left, end = fiber.batches[batches - 1];
  for (size_t k = 0; k < end; k++) fiber.copies[k].Do();
  fiber.copies.erase(fiber.copies.begin(), fiber.copies.begin() + end);
  fiber.batches.erase(fiber.batches.begin(), fiber.batches.begin() + batches);
  for (size_t& batch : fiber.batches) batch -= end;
}

bool Run(const Grid& grid) {
  const unsigned runs = grid.blocks / grid.cluster;
  const Turns turns(runs);
  for (unsigned k = 0; k < runs; k++) {
    const unsigned first = turns[k] * grid.cluster;
    if (!(grid.cluster > 1 ? RunCluster(grid, first) : scheduler().RunBlock(grid, first, nullptr)))
      return false;
  }
  return true;
}

}  // namespace emulator
}  // namespace dlsys
