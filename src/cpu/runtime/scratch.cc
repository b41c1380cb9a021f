#include "cpu/runtime/scratch.h"

#include <algorithm>
#include <cstdlib>

#include "runtime/registry.h"

namespace dlsys {
namespace cpu {
namespace {

std::atomic<int> numbers{0};
std::atomic<Scratch*> used{nullptr};  // the first of a list
std::atomic<uint64_t> changes{0};
std::atomic<int64_t> held{0}, limit{-1};  // bytes; no limit below 0

[[noreturn]] void FailOutOfMemory(size_t nbytes) {
  FailWith(DL_OUT_OF_MEMORY,
           "out of memory on cpu(0): requested %zu bytes for the working memory of a kernel, of "
           "which threads hold %ld bytes; use smaller batches or fewer threads",
           nbytes, (long)held.load());
}

void* Allocate(size_t nbytes) {
  held += (int64_t)nbytes;
  void* data = limit >= 0 && held > limit ? nullptr : aligned_alloc(64, nbytes);
  if (data) return data;
  held -= (int64_t)nbytes;
  FailOutOfMemory(nbytes);
}

void Release(void* data, size_t nbytes) {
  free(data);
  held -= (int64_t)nbytes;
}

void RaiseTo(std::atomic<size_t>* most, size_t nbytes) {
  size_t before = *most;
  while (before < nbytes && !most->compare_exchange_weak(before, nbytes)) {
  }
  if (before < nbytes) changes++;
}

}  // namespace

uint64_t ScratchChanges() { return changes; }

// Without a lock, which a forked child could inherit locked.
void Scratch::Enlist() {
  if (number_ != kNone) return;
  int none = kNone;
  if (!number_.compare_exchange_strong(none, numbers++)) return;
  next_ = used;
  while (!used.compare_exchange_weak(next_, this)) {
  }
  changes++;
}

void* Scratch::Grow(size_t nbytes) {
  Enlist();
  void* data = RoomsOfThread().Grow(number_, nbytes);
  RaiseTo(&most_[of_thread.in_task], nbytes);  // now that it is known that it can be had
  return data;
}

Rooms& RoomsOfThread() {
  struct Own : Rooms {
    ~Own() { of_thread.rooms = nullptr; }
  };
  if (!of_thread.rooms) {
    static thread_local Own own;
    of_thread.rooms = &own;
  }
  return *of_thread.rooms;
}

Rooms::~Rooms() {
  for (int k = 0; k < count_; k++) Release(rooms_[k].data, rooms_[k].nbytes);
  free(rooms_);
}

void Rooms::Enlarge(int count) {
  if (count <= count_) return;
  auto* rooms = (Room*)realloc(rooms_, count * sizeof(Room));
  if (!rooms) FailOutOfMemory(count * sizeof(Room));
  for (int k = count_; k < count; k++) rooms[k] = {nullptr, 0};
  rooms_ = rooms;
  count_ = count;
}

void* Rooms::Grow(int number, size_t nbytes) {
  Enlarge(number + 1);
  Room& room = rooms_[number];
  if (nbytes > room.nbytes) {
    void* data = Allocate(nbytes);
    Release(room.data, room.nbytes);
    room = {data, nbytes};
  }
  return room.data;
}

void Rooms::Reserve(bool tasks_alone) {
  for (const Scratch* s = used; s; s = s->next_) {
    const size_t outside = tasks_alone ? 0 : s->most_[0].load();
    const size_t nbytes = std::max(outside, s->most_[1].load());
    if (nbytes) Grow(s->number_, nbytes);
  }
}

}  // namespace cpu
}  // namespace dlsys

DLSYS_API int DLCpuSetScratchLimit(int64_t nbytes) {
  return dlsys::Guard([&] { dlsys::cpu::limit = nbytes; });
}

DLSYS_API int DLCpuGetScratch(int64_t* nbytes) {
  return dlsys::Guard([&] {
    if (!nbytes) dlsys::Fail("DLCpuGetScratch: null output argument");
    *nbytes = dlsys::cpu::held;
  });
}
