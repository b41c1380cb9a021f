// Opening libraries; see dlopen.cuh.
#include <dlfcn.h>

#include <cstdlib>
#include <cstring>

#include "cuda/runtime/dlopen.cuh"

namespace dlsys {
namespace cuda {
namespace {

// The paths of DLSYS_CUDA_LIBRARY_PATH, folders separated by colons, and "" for the system's.
std::vector<std::string> Prefixes() {
  std::vector<std::string> prefixes;
  const char* path = getenv("DLSYS_CUDA_LIBRARY_PATH");
  while (path && *path) {
    const char* end = strchrnul(path, ':');
    if (end != path) prefixes.push_back(std::string(path, end) + "/");
    path = *end ? end + 1 : end;
  }
  prefixes.push_back("");
  return prefixes;
}

}  // namespace

void* OpenLibrary(const std::vector<std::string>& sonames, std::string* error) {
#ifdef DLSYS_EMULATED
  const char* folder = getenv("DLSYS_EMULATED_LIBRARIES");  // of stand-ins, for tests
  if (folder)
    if (void* library = dlopen((folder + ("/" + sonames[0])).c_str(), RTLD_LAZY | RTLD_LOCAL))
      return library;
  *error = sonames[0] + " needs a GPU, and this one is emulated";
  return nullptr;
#endif
  for (const std::string& soname : sonames) {
    if (void* library = dlopen(soname.c_str(), RTLD_LAZY | RTLD_LOCAL | RTLD_NOLOAD))
      return library;
  }
  for (const std::string& prefix : Prefixes()) {
    for (const std::string& soname : sonames) {
      if (void* library = dlopen((prefix + soname).c_str(), RTLD_LAZY | RTLD_LOCAL)) {
        error->clear();
        return library;
      }
      const char* reason = dlerror();
      if (error->empty()) *error = reason ? reason : "dlopen gave no reason";
    }
  }
  return nullptr;
}

void* FindFunction(void* library, const char* name, std::string* error) {
  void* function = dlsym(library, name);
  if (!function && error->empty()) *error = std::string("it has no function ") + name;
  return function;
}

std::string VersionText(int (*property)(int which, int* value)) {
  std::string text;
  for (int which = 0; which < 3; which++) {
    int value = 0;
    property(which, &value);
    text += (which ? "." : "") + std::to_string(value);
  }
  return text;
}

void CheckFault(const char* op) {
  const cudaError_t fault = cudaStreamQuery(cudaStreamLegacy);
  if (fault != cudaErrorNotReady) Check(op, fault);
}

}  // namespace cuda
}  // namespace dlsys
