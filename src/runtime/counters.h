// What this library has asked of the GPU since it was loaded, over all threads and devices.
#pragma once
#include <atomic>
#include <cstdint>

namespace dlsys {

struct Counters {
  static inline std::atomic<int64_t> program_launches{0};  // replays of captured programs
  static inline std::atomic<int64_t> kernel_launches{0};   // own kernels, launched or captured
  static inline std::atomic<int64_t> synchronizations{0};  // waits of the host for the device
};

}  // namespace dlsys
