// The kernel and device tables, the thread's error text, and what this library was built from.
#include "runtime/registry.h"

#include <dlfcn.h>

#include <cstring>
#include <string>
#include <vector>

#include "runtime/device.h"

#define DLSYS_VERSION "0.1.0"
#ifdef __clang__
#define DLSYS_COMPILER "clang " __clang_version__
#else
#define DLSYS_COMPILER "g++ " __VERSION__
#endif

namespace dlsys {
namespace {

// Plain bytes: a library that was opened at run time must not run destructors when a thread ends.
thread_local char last_error[1024];

struct AlgorithmEntry {
  const char *device, *kernel;
  Algorithms algorithms;
};

// They live until the process ends, whatever order its static destructors run in.
struct Tables {
  std::vector<DLKernelEntry> kernels;
  std::vector<AlgorithmEntry> algorithms;
  std::vector<Device> devices;
  char load_error[1024] = "";
  std::string version = DLSYS_VERSION " " DLSYS_COMPILER;
};
Tables& GetTables() {
  static Tables* const tables = new Tables;
  return *tables;
}

template <class... T>
void SetLoadError(const char* format, T... args) {
  char* text = GetTables().load_error;
  if (!*text) snprintf(text, sizeof Tables::load_error, format, args...);
}

const char* BaseName(const char* path) {
  const char* slash = strrchr(path, '/');
  return slash ? slash + 1 : path;
}

}  // namespace

void SetLastError(const char* text) noexcept {
  snprintf(last_error, sizeof last_error, "%s", text);
}

int GuardCall(void (*call)(void*), void* f) noexcept {
  const Visit visit;
  try {
    call(f);
    return DL_OK;
  } catch (const Error& e) {
    SetLastError(e.what());
    return e.status;
  } catch (const std::bad_alloc&) {
    SetLastError("out of memory on the host: it has none left for the library's own use");
    return DL_OUT_OF_MEMORY;
  } catch (const std::exception& e) {
    SetLastError(e.what());
  } catch (...) {
    SetLastError("unknown C++ exception");
  }
  return DL_ERROR;
}

void RegisterKernel(const DLKernelEntry& entry) noexcept {
  for (const DLKernelEntry& k : GetTables().kernels) {
    if (strcmp(k.name, entry.name) || strcmp(k.device, entry.device)) continue;
    if (k.dtype != entry.dtype && !strcmp(k.sig, entry.sig)) continue;
    SetLoadError("kernel %s/%s registered twice: %s:%ld and %s:%ld", k.device, k.name,
                 BaseName(k.file), (long)k.line, BaseName(entry.file), (long)entry.line);
    return;
  }
  GetTables().kernels.push_back(entry);
}

void RegisterFits(const char* device, const char* kernel, const char* sig,
                  int32_t (*fits)(const DLValue*)) noexcept {
  bool known = false;
  for (DLKernelEntry& k : GetTables().kernels) {
    if (strcmp(k.name, kernel) || strcmp(k.device, device)) continue;
    known = true;
    const size_t arity = strcspn(k.sig, "s");
    if (strlen(sig) == arity && !strncmp(k.sig, sig, arity))
      k.fits = fits;
    else
      SetLoadError("fits of kernel %s/%s takes other arguments (%s) than the kernel (%s)", device,
                   kernel, sig, k.sig);
  }
  if (!known) SetLoadError("fits of kernel %s/%s comes before the kernel", device, kernel);
}

const DLKernelEntry& KernelAt(int64_t index) {
  const auto& kernels = GetTables().kernels;
  if (index < 0 || index >= (int64_t)kernels.size())
    Fail("no kernel has index %ld: the table has %zu entries", (long)index, kernels.size());
  return kernels[index];
}

void RegisterAlgorithms(const char* device, const char* kernel, Algorithms algorithms) noexcept {
  GetTables().algorithms.push_back({device, kernel, algorithms});
}

// Null where the kernel has none of that number.
static const Algorithm* AlgorithmAt(int64_t index, int64_t algorithm) {
  const DLKernelEntry& kernel = KernelAt(index);
  for (const AlgorithmEntry& entry : GetTables().algorithms) {
    if (strcmp(entry.kernel, kernel.name) || strcmp(entry.device, kernel.device)) continue;
    const std::vector<Algorithm>& algorithms = entry.algorithms();
    return algorithm >= 1 && algorithm <= (int64_t)algorithms.size() ? &algorithms[algorithm - 1]
                                                                     : nullptr;
  }
  return nullptr;
}

void RegisterDevice(const Device& device) noexcept {
  for (const Device& d : GetTables().devices) {
    if (d.type != device.type) continue;
    SetLoadError("device type %d registered twice: %s and %s", d.type, d.name, device.name);
    return;
  }
  GetTables().devices.push_back(device);
}

void RegisterBuild(const char* text) noexcept { GetTables().version += std::string(" ") + text; }

const Device& FindDevice(int type) {
  for (const Device& d : GetTables().devices)
    if (d.type == type) return d;
  if (type == DL_GPU && !dlopen("libcuda.so.1", RTLD_LAZY))
    FailWith(DL_UNAVAILABLE, "%s", kNoDriver);
  if (type == DL_GPU)
    FailWith(DL_UNAVAILABLE,
             "gpu: this library was built without CUDA; install nvcc and run `make lib` again");
  FailWith(DL_UNAVAILABLE, "device type %d (%s) is not in this library; run `make lib` again", type,
           DeviceText(type));
}

}  // namespace dlsys

DLSYS_API const char* DLGetLastError(void) { return dlsys::last_error; }

DLSYS_API const char* DLLoadError(void) { return dlsys::GetTables().load_error; }

DLSYS_API const char* DLVersion(void) { return dlsys::GetTables().version.c_str(); }

DLSYS_API const DLKernelEntry* DLKernelTable(int64_t* count) {
  const auto& kernels = dlsys::GetTables().kernels;
  if (count) *count = (int64_t)kernels.size();
  return kernels.data();
}

DLSYS_API const char* DLAlgorithmName(int64_t kernel, int64_t algorithm) {
  const char* name = nullptr;
  dlsys::Guard([&] {
    const dlsys::Algorithm* found = dlsys::AlgorithmAt(kernel, algorithm);
    if (found) name = found->name.c_str();
  });
  return name;
}

DLSYS_API int DLAlgorithmSource(int64_t kernel, int64_t algorithm, const char** out) {
  return dlsys::Guard([&] {
    const dlsys::Algorithm* found = dlsys::AlgorithmAt(kernel, algorithm);
    if (!found || !out)
      dlsys::Fail("DLAlgorithmSource: null argument or no algorithm %ld", (long)algorithm);
    *out = found->source ? found->source() : "";
  });
}
