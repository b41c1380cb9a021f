// The threads of a block, and how they wait for each other.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>

#include "emulator/vectors.h"

// Of the thread that runs now. Blocks and grids are lines. Hidden, they need one address for all.
extern __attribute__((visibility("hidden"))) __thread uint3 threadIdx, blockIdx, blockDim, gridDim;

namespace dlsys {
namespace emulator {

constexpr int kLanes = 32;
inline int Lane() { return (int)(threadIdx.x % kLanes); }

constexpr size_t kSlotNbytes = 32;

// Until all threads of the block, the warp, the warpgroup or the cluster have come here or ended.
void MeetBlock();
void MeetWarp();
void MeetWarpgroup();
void MeetCluster();

// Shows the other lanes of this warp some bytes, and returns what each of them shows, by lane.
// There are two sets of slots, by turns, so that one meeting an exchange suffices: whoever fills a
// set again has met all others behind their reading of it.
using Slots = char (*)[kSlotNbytes];
Slots Exchange(const void* mine, size_t nbytes);

template <class T>
T FromLane(const T& value, int lane) {
  static_assert(sizeof(T) <= kSlotNbytes, "it fits into a slot");
  T other;
  memcpy(&other, Exchange(&value, sizeof value)[lane], sizeof other);
  return other;
}

// Shared memory: what the launch asked for, and where a place of it is found in another block of
// the cluster.
void* DynamicShared();
const void* OfPeer(const void* shared, int peer);

// Shared memory by 32-bit addresses, which are the same in all blocks of a cluster; what the launch
// asked for begins at 0. SharedAt finds an address in this block, or in another one.
uint32_t SharedAddress(const void* shared);
void* SharedAt(uint32_t address);
void* SharedAt(uint32_t address, int rank);
int ClusterRank();

// Until `done`, which is asked again and again, is true.
void WaitUntil(std::function<bool()> done);
// Lets other threads run, and other blocks of the grid where all of this one wait.
void Sleep();
// Barriers of a block by their number: threads that wait, and threads that only arrive.
void MeetNumbered(int number, int threads);
void ArriveNumbered(int number, int threads);

// What a thread begins and waits for later: done at any time between. Groups are as those of
// CopyLater. Of what others wait for, nobody knows the time: see Background.
enum class Unit { kProducts, kStores, kCount };
bool IsLate();  // whether this block does it as late as it may
void BeginLater(Unit unit, std::function<void()> act);
template <class F>
void Begin(Unit unit, const F& act) {
  IsLate() ? BeginLater(unit, act) : act();
}
void CloseGroup(Unit unit);
void WaitForGroups(Unit unit, int left);
// Does it now, or when nothing else in the block can go on.
void Background(std::function<void()> act);

// Copies `count` floats, or zeros, at some time between now and the end of WaitForCopies.
void CopyLater(float* to, const float* from, int count, bool valid);
void CloseCopies();
void WaitForCopies(int left);  // for all but the last `left` batches

class Call;
struct Grid {
  const Call* call;
  unsigned blocks, threads, cluster;  // blocks in all, of which `cluster` each run together
  size_t shared_nbytes;
};

// Runs a grid. False, with a line on stderr, if some threads wait for others that never come.
bool Run(const Grid& grid);

}  // namespace emulator
}  // namespace dlsys
