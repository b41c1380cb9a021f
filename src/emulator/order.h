// Decisions that CUDA leaves open: other ones each time, the same ones in each process. The
// variable DLSYS_EMULATED_SEED chooses others.
#pragma once
#include <atomic>
#include <cstdint>
#include <cstdlib>

namespace dlsys {
namespace emulator {

// The next of many numbers without a pattern (the finaliser of splitmix64, Steele, Lea and Flood,
// 2014).
inline uint64_t NextDecision() {
  static const char* const seed = getenv("DLSYS_EMULATED_SEED");
  static std::atomic<uint64_t> count{seed ? strtoull(seed, nullptr, 10) << 32 : 0};
  uint64_t x = (count.fetch_add(1, std::memory_order_relaxed) + 1) * 0x9e3779b97f4a7c15u;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}

// The numbers below n, each once, from one of them on up or down.
class Turns {
 public:
  explicit Turns(unsigned n) : n_(n) {
    const uint64_t decision = NextDecision();
    start_ = (unsigned)(decision % (n ? n : 1));
    down_ = decision >> 63;
  }
  unsigned operator[](unsigned k) const {
    const unsigned at = start_ + (down_ ? n_ - k : k);
    return at < n_ ? at : at - n_;
  }

 private:
  unsigned n_, start_;
  bool down_;
};

}  // namespace emulator
}  // namespace dlsys
