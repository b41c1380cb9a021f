// The CPU as a device: memory from the C library, copies, and time by the clock. Work is done on
// return, so there are no streams to speak of.
#include "runtime/device.h"

#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>

#include "runtime/registry.h"

namespace dlsys {
namespace cpu {
namespace {

const size_t kAlignment = 256;

// The value of a line such as "MemAvailable:   123 kB" or "model name : X", "" where there is none.
std::string ProcValue(const char* path, const std::string& key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.compare(0, key.size(), key)) continue;
    const size_t begin = line.find_first_not_of(" \t", line.find(':') + 1);
    return begin == std::string::npos ? "" : line.substr(begin);
  }
  return "";
}

size_t TotalMemory() { return (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE); }

int Count() { return 1; }

void Describe(int, char* text, size_t nbytes) {
  const std::string model = ProcValue("/proc/cpuinfo", "model name");
  snprintf(text, nbytes, "%s", model.empty() ? "CPU" : model.c_str());
}

void Memory(int, size_t* free_nbytes, size_t* total_nbytes) {
  *total_nbytes = TotalMemory();
  const size_t available =
      strtoull(ProcValue("/proc/meminfo", "MemAvailable").c_str(), nullptr, 10);
  *free_nbytes = available * 1024;
}

// The system promises more memory than it has and ends the process when it is touched: refuse the
// hopeless here.
void* Alloc(int, size_t nbytes) {
  if (nbytes > TotalMemory()) return nullptr;
  void* data = nullptr;  // posix_memalign, since aligned_alloc would have the size rounded up
  return posix_memalign(&data, kAlignment, nbytes) == 0 ? data : nullptr;
}

void Release(int, void* data) { free(data); }

void Fill(int, void* data, int byte, size_t nbytes, DLStream) { memset(data, byte, nbytes); }

void Copy(void* dst, DLContext, const void* src, DLContext, size_t nbytes, DLStream) {
  memmove(dst, src, nbytes);
}

DLStream CreateStream(int) { return nullptr; }
void FreeStream(int, DLStream) {}
void Synchronize(int, DLStream) {}
void Wait(int, DLStream, DLStream) {}

void Profile(int, DLStream, int64_t n, void (*body)(void* state, int64_t k), void* state,
             double* ms) {
  using Clock = std::chrono::steady_clock;
  for (int64_t k = 0; k < n; k++) {
    const auto begin = Clock::now();
    body(state, k);
    ms[k] = std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
  }
}

const DeviceRegistrar registrar(Device{DL_CPU, "cpu", Count, Describe, Memory, Alloc, Release, Fill,
                                       Copy, CreateStream, FreeStream, Synchronize, Wait, Profile,
                                       nullptr});

}  // namespace
}  // namespace cpu
}  // namespace dlsys
