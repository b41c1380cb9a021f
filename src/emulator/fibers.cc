// Fibers: a stack and a stack pointer for each thread of a block, and a switch between them in a
// few instructions. A fiber runs until it has to wait or ends; the scheduler then goes to the next
// one that may run.
#include "emulator/fibers.h"

#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <list>
#include <mutex>
#include <thread>
#include <utility>
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

// No power of two: the tops of stacks so far apart would share the sets of every cache.
constexpr size_t kStackNbytes = (64 << 10) + 9 * 64;
constexpr unsigned kMostThreads = 1024, kWarpgroup = 128;
constexpr int kNumbered = 16;  // barriers of a block
// Shared memory that kernels declare lies around here, by its 32-bit address.
constexpr uint32_t kFixedAddress = 0x20000000;
constexpr auto kPatience = std::chrono::seconds(60);  // for other blocks
// Between two looks at what other blocks did: the longer they take the fewer.
constexpr std::chrono::microseconds kShortestPause(20), kLongestPause(640);

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

// Work of a thread that is under way, in groups that end where it closed them.
template <class Work>
class Queue {
 public:
  void Add(Work work) { under_way_.push_back(std::move(work)); }
  void Close() { ends_.push_back(under_way_.size()); }
  // Does all but the last `left` groups.
  template <class Do>
  void WaitFor(int left, Do&& act) {
    if ((int)ends_.size() <= left) return;
    const size_t groups = ends_.size() - left, end = ends_[groups - 1];
    for (size_t k = 0; k < end; k++) act(under_way_[k]);
    under_way_.erase(under_way_.begin(), under_way_.begin() + end);
    ends_.erase(ends_.begin(), ends_.begin() + groups);
    for (size_t& each : ends_) each -= end;
  }
  void Clear() { under_way_.clear(), ends_.clear(); }

 private:
  std::vector<Work> under_way_;
  std::vector<size_t> ends_;  // of the groups that are closed and not waited for
};
using Act = std::function<void()>;

struct Fiber {
  void* stack_pointer;  // null: it has not begun and has no stack
  unsigned stack;
  const Group* waits;  // for whose round to pass; null: it may run
  unsigned round, exchanges;
  bool ended, sleeps;
  bool asks;    // whether it waits for `until` to be true
  bool queues;  // whether anything was ever added to what follows
  std::function<bool()> until;
  Queue<Copy> copies;
  Queue<Act> units[(int)Unit::kCount];
};

// The clusters of a grid that have not begun. Those that are left may begin on another thread of
// the CPU, beside the ones that wait for them.
class Clusters {
 public:
  explicit Clusters(const Grid& grid) : grid_(grid), turns_(grid.blocks / grid.cluster) {}

  // Runs all that are left, one after the other. False if threads of one wait for ever.
  bool RunAll();
  // Does so on another thread of the CPU; false where none is left.
  bool RunBeside() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (next_ >= grid_.blocks / grid_.cluster) return false;
    beside_.emplace_back([this] { RunAll(); });
    return true;
  }
  bool End() {
    while (true) {
      std::thread last;
      {
        std::lock_guard<std::mutex> lock(mutex_);
        if (beside_.empty()) return fine_;
        last = std::move(beside_.front());
        beside_.pop_front();
      }
      last.join();
    }
  }

 private:
  const Grid& grid_;
  const Turns turns_;
  std::atomic<unsigned> next_{0};
  std::atomic<bool> fine_{true};
  std::mutex mutex_;
  std::list<std::thread> beside_;
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

  bool RunBlock(const Grid& grid, unsigned block, Cluster* cluster, Clusters* clusters);

  void Wait(Group& group) {
    Fiber& fiber = fibers_[current_];
    if (++group.arrived == group.size) return Release(group);
    fiber.waits = &group;
    fiber.round = group.round;
    SwitchAway();
  }
  void WaitUntil(std::function<bool()> done) {
    if (done()) return;
    fiber().until = std::move(done);
    fiber().asks = true;
    SwitchAway();
  }
  void Sleep() {
    fiber().sleeps = true;
    SwitchAway();
  }
  Group& Numbered(int number, int threads) {
    numbered_[number].size = (unsigned)threads;
    return numbered_[number];
  }
  void Arrive(Group& group) {
    if (++group.arrived == group.size) Release(group);
  }
  void Background(Act act) {
    if (late_)
      background_.push_back(std::move(act));
    else
      act();
  }
  void WaitForCluster() {
    Wait(all_);
    if (!cluster_) return;
    if (threadIdx.x == 0) RunBackground(), cluster_->Meet();
    Wait(all_);
  }
  Group& all() { return all_; }
  Group& warp() { return warps_[current_ / kLanes]; }
  Group& warpgroup() { return warpgroups_[current_ / kWarpgroup]; }
  Slots Exchange(const void* mine, size_t nbytes) {
    const Slots slots = slots_[current_ / kLanes][fiber().exchanges++ % 2];
    memcpy(slots[current_ % kLanes], mine, nbytes);
    Wait(warp());
    return slots;
  }
  char* dynamic() { return dynamic_; }
  Fiber& fiber() { return fibers_[current_]; }
  // The same, to add work to what it queues.
  Fiber& queuing() {
    fiber().queues = true;
    return fiber();
  }
  bool late() const { return late_; }
  int rank() const { return (int)rank_; }
  uint32_t AddressOf(const void* shared) const {
    const char* at = (const char*)shared;
    if (at >= dynamic_ && at < dynamic_ + nbytes_) return (uint32_t)(at - dynamic_);
    return kFixedAddress + (uint32_t)(at - &shared_of_this_thread);
  }
  void* At(uint32_t address) const {
    if (address < nbytes_) return dynamic_ + address;
    return &shared_of_this_thread + (int32_t)(address - kFixedAddress);
  }
  const void* OfPeer(const void* place, int peer) const {
    return cluster_ ? cluster_->OfPeer(rank_, (const char*)place, (unsigned)peer) : place;
  }

 private:
  static void Begin();  // of every fiber

  void Prepare(unsigned thread) {
    Fiber& fiber = fibers_[thread];
    fiber.waits = nullptr;
    fiber.exchanges = 0;
    fiber.ended = fiber.sleeps = fiber.asks = false;
    fiber.stack_pointer = nullptr;
    if (!std::exchange(fiber.queues, false)) return;
    fiber.copies.Clear();
    for (Queue<Act>& unit : fiber.units) unit.Clear();
  }
  // Gives a fiber the stack of one that has ended, which the caches have, or else one of its own.
  void GiveStack(Fiber& fiber) {
    fiber.stack = ended_stacks_.empty() ? stacks_taken_++ : ended_stacks_.back();
    if (!ended_stacks_.empty()) ended_stacks_.pop_back();
    // As if it had been switched away from at the first instruction of Begin, which expects its
    // stack as behind a call.
    void** top = (void**)(stacks_ + (fiber.stack + 1) * kStackNbytes) - 2;
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
    return !fiber.ended && (!fiber.waits || fiber.waits->round != fiber.round) &&
           (!fiber.asks || fiber.until());
  }
  void SwitchAway() { dlsys_switch_fiber(&fiber().stack_pointer, main_); }
  void Resume(unsigned thread) {
    current_ = thread;
    *thread_x_ = thread;
    fibers_[thread].waits = nullptr;
    fibers_[thread].asks = false;
    if (!fibers_[thread].stack_pointer) GiveStack(fibers_[thread]);
    dlsys_switch_fiber(&main_, fibers_[thread].stack_pointer);
  }
  // Has the caches fetch what a fiber reads first: the nearest one has no room for a block's
  // stacks.
  static void Expect(const Fiber& fiber) {
    const char* const top = (const char*)fiber.stack_pointer;
    for (int k = 0; k < 4; k++) __builtin_prefetch(top + 64 * k);
  }
  // Resumes each thread that may run, once. True where one did more than sleep.
  bool RunThreads(const Turns& turns, unsigned threads) {
    bool moved = false;
    for (unsigned k = 0; k < threads; k++) {
      const unsigned thread = turns[k];
      Fiber& fiber = fibers_[thread];
      if (!MayRun(fiber)) continue;
      const bool slept = std::exchange(fiber.sleeps, false);
      Expect(fibers_[turns[k + 1 < threads ? k + 1 : 0]]);
      Resume(thread);
      moved |= !(slept && fiber.sleeps);
    }
    return moved;
  }
  bool RunBackground() {
    const std::vector<Act> acts = std::exchange(background_, {});
    const Turns turns((unsigned)acts.size());
    for (unsigned k = 0; k < acts.size(); k++) acts[turns[k]]();
    return !acts.empty();
  }
  // True where some threads wait for what other blocks do.
  bool WaitsForBlocks(unsigned threads) const {
    for (unsigned k = 0; k < threads; k++)
      if (!fibers_[k].ended && (fibers_[k].sleeps || (cluster_ && fibers_[k].asks))) return true;
    return false;
  }

  char* stacks_;
  std::vector<unsigned> ended_stacks_;
  unsigned stacks_taken_ = 0;
  std::vector<Fiber> fibers_;
  std::vector<char> dynamic_memory_;
  char* dynamic_ = nullptr;
  size_t nbytes_ = 0;  // there
  void* main_ = nullptr;
  unsigned* const thread_x_ = &threadIdx.x;  // of the thread that owns this
  unsigned current_ = 0, rank_ = 0;
  Group all_, warps_[kMostThreads / kLanes], warpgroups_[kMostThreads / kWarpgroup];
  Group numbered_[kNumbered];
  std::vector<Act> background_;
  alignas(16) char slots_[kMostThreads / kLanes][2][kLanes][kSlotNbytes];
  const Call* call_ = nullptr;
  Cluster* cluster_ = nullptr;
  bool late_ = false;
};

// That of this thread of the CPU, while a block runs there.
__thread Scheduler* running;
Scheduler& scheduler() { return *running; }

bool RunHere(const Grid& grid, unsigned block, Cluster* cluster, Clusters* clusters) {
  static thread_local Scheduler own;
  running = &own;
  return own.RunBlock(grid, block, cluster, clusters);
}

void Scheduler::Begin() {
  Scheduler& own = scheduler();
  own.call_->Run();
  Fiber& fiber = own.fibers_[own.current_];
  fiber.ended = true;
  own.ended_stacks_.push_back(fiber.stack);  // nobody begins on it before this one is gone
  own.Drop(own.all_);
  own.Drop(own.warp());
  own.Drop(own.warpgroup());
  dlsys_switch_fiber(&fiber.stack_pointer, own.main_);
  abort();  // nobody comes back
}

bool Scheduler::RunBlock(const Grid& grid, unsigned block, Cluster* cluster, Clusters* clusters) {
  constexpr size_t kAligned = 1024;
  dynamic_memory_.assign(grid.shared_nbytes + kAligned, (char)0xff);
  dynamic_ = dynamic_memory_.data();
  dynamic_ += (kAligned - (uintptr_t)dynamic_ % kAligned) % kAligned;
  nbytes_ = grid.shared_nbytes;
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
  for (unsigned first = 0; first < grid.threads; first += kWarpgroup)
    warpgroups_[first / kWarpgroup] = {std::min(grid.threads - first, kWarpgroup), 0, 0};
  for (Group& group : numbered_) group = {};
  memset(slots_, 0xff, (grid.threads + kLanes - 1) / kLanes * sizeof slots_[0]);
  ended_stacks_.clear();
  stacks_taken_ = 0;
  for (unsigned k = 0; k < grid.threads; k++) Prepare(k);
  if (cluster) cluster->Enter(rank_, dynamic_, grid.shared_nbytes);
  const Turns turns(grid.threads);
  auto moved = std::chrono::steady_clock::now();
  auto pause = kShortestPause;
  while (all_.size) {
    if (RunThreads(turns, grid.threads) || RunBackground()) {
      moved = std::chrono::steady_clock::now();
      pause = kShortestPause;
    } else if (!WaitsForBlocks(grid.threads) ||
               std::chrono::steady_clock::now() - moved > kPatience) {
      break;
    } else if (!clusters->RunBeside()) {
      std::this_thread::sleep_for(pause);
      pause = std::min(2 * pause, kLongestPause);
    }
  }
  RunBackground();
  if (cluster) cluster->Leave();
  if (all_.size)
    fprintf(stderr, "emulated GPU: %u of %u threads of block %u wait for others that never come\n",
            all_.size, grid.threads, block);
  return all_.size == 0;
}

// Threads of the CPU that run the blocks of clusters. They stay, each with its shared memory and
// its stacks, which take longer to make than a small block to run.
class Crew {
 public:
  void Do(Act act) {
    std::lock_guard<std::mutex> lock(mutex_);
    acts_.push_back(std::move(act));
    if (acts_.size() > idle_)
      std::thread([this] { Work(); }).detach();
    else
      wakes_.notify_one();
  }

 private:
  void Work() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      while (!acts_.empty()) {
        const Act act = std::move(acts_.front());
        acts_.pop_front();
        lock.unlock();
        act();
        lock.lock();
      }
      idle_++;
      wakes_.wait(lock, [this] { return !acts_.empty(); });
      idle_--;
    }
  }

  std::list<Act> acts_;
  size_t idle_ = 0;
  std::mutex mutex_;
  std::condition_variable wakes_;
};

bool RunCluster(const Grid& grid, unsigned first, Clusters* clusters) {
  if (grid.cluster == 1) return RunHere(grid, first, nullptr, clusters);
  static Crew& crew = *new Crew;  // its threads outlive what is destroyed as the process ends
  Cluster cluster(grid.cluster);
  std::mutex mutex;
  std::condition_variable ended;
  unsigned left = grid.cluster - 1;
  bool fine = true;
  for (unsigned k = 1; k < grid.cluster; k++) {
    crew.Do([&, k] {
      const bool ok = RunHere(grid, first + k, &cluster, clusters);
      std::lock_guard<std::mutex> lock(mutex);
      fine &= ok;
      if (--left == 0) ended.notify_one();
    });
  }
  const bool ok = RunHere(grid, first, &cluster, clusters);
  std::unique_lock<std::mutex> lock(mutex);
  ended.wait(lock, [&] { return left == 0; });
  return ok && fine;
}

bool Clusters::RunAll() {
  while (fine_) {
    const unsigned k = next_++;
    if (k >= grid_.blocks / grid_.cluster) break;
    if (!RunCluster(grid_, turns_[k] * grid_.cluster, this)) fine_ = false;
  }
  return fine_;
}

}  // namespace

void MeetBlock() { scheduler().Wait(scheduler().all()); }
void MeetWarp() { scheduler().Wait(scheduler().warp()); }
void MeetWarpgroup() { scheduler().Wait(scheduler().warpgroup()); }
void MeetCluster() { scheduler().WaitForCluster(); }
Slots Exchange(const void* mine, size_t nbytes) { return scheduler().Exchange(mine, nbytes); }
void* DynamicShared() { return scheduler().dynamic(); }
const void* OfPeer(const void* shared, int peer) { return scheduler().OfPeer(shared, peer); }

uint32_t SharedAddress(const void* shared) { return scheduler().AddressOf(shared); }
void* SharedAt(uint32_t address) { return scheduler().At(address); }
void* SharedAt(uint32_t address, int rank) {
  return const_cast<void*>(scheduler().OfPeer(SharedAt(address), rank));
}
int ClusterRank() { return scheduler().rank(); }

void WaitUntil(std::function<bool()> done) { scheduler().WaitUntil(std::move(done)); }
void Sleep() { scheduler().Sleep(); }
void MeetNumbered(int number, int threads) {
  scheduler().Wait(scheduler().Numbered(number, threads));
}
void ArriveNumbered(int number, int threads) {
  scheduler().Arrive(scheduler().Numbered(number, threads));
}

void CopyLater(float* to, const float* from, int count, bool valid) {
  const Copy copy = {to, from, count, valid};
  if (scheduler().late())
    scheduler().queuing().copies.Add(copy);
  else
    copy.Do();
}
void CloseCopies() { scheduler().queuing().copies.Close(); }
void WaitForCopies(int left) {
  scheduler().fiber().copies.WaitFor(left, [](const Copy& copy) { copy.Do(); });
}

bool IsLate() { return scheduler().late(); }
void BeginLater(Unit unit, std::function<void()> act) {
  scheduler().queuing().units[(int)unit].Add(std::move(act));
}
void CloseGroup(Unit unit) { scheduler().queuing().units[(int)unit].Close(); }
void WaitForGroups(Unit unit, int left) {
  scheduler().fiber().units[(int)unit].WaitFor(left, [](const Act& act) { act(); });
}
void Background(std::function<void()> act) { scheduler().Background(std::move(act)); }

bool Run(const Grid& grid) {
  Clusters clusters(grid);
  clusters.RunAll();
  return clusters.End();
}

}  // namespace emulator
}  // namespace dlsys
