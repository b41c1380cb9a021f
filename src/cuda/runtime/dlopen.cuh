// Libraries that are opened when they are first needed, by soname, and whose few functions are
// declared where they are used: neither building nor loading this library needs them.
#pragma once
#include <mutex>
#include <string>
#include <vector>

#include "cuda/runtime/context.cuh"

namespace dlsys {
namespace cuda {

// The library that has the first of the sonames to be found: among what is loaded already, then in
// the folders of DLSYS_CUDA_LIBRARY_PATH, then by the system's rules. Null, and why, without any.
void* OpenLibrary(const std::vector<std::string>& sonames, std::string* error);

// A function of an opened library; the first that it lacks is told in `error`.
void* FindFunction(void* library, const char* name, std::string* error);

template <class F>
void Find(void* library, const char* name, F* function, std::string* error) {
  *function = (F)FindFunction(library, name, error);
}

// A version in words, of what a library says of it: 0 asks for the major part, 1 minor, 2 patch.
std::string VersionText(int (*property)(int which, int* value));

// If the GPU is lost, that is the reason for which a library failed.
void CheckFault(const char* op);

// A library's handles, by GPU. A handle serves one call at a time; there are as many as threads
// ever were in a call at once. Never destroyed: at exit the driver may be gone before static
// destructors run.
template <class Handle>
class HandlePool {
 public:
  // The pool of a GPU; `make` makes a handle there, or throws.
  static HandlePool* Of(const char* op, int device) {
    static HandlePool* const pools = new HandlePool[kMaxDevices];
    if (device >= kMaxDevices) Fail("%s: at most %d GPUs are supported", op, kMaxDevices);
    return &pools[device];
  }
  Handle Take(Handle (*make)(const char* op), const char* op) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!free_.empty()) {
        Handle handle = free_.back();
        free_.pop_back();
        return handle;
      }
    }
    const RelaxedCapture relaxed;  // handles come with memory of their own
    return make(op);
  }
  void Give(Handle handle) {
    std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(handle);
  }

 private:
  std::mutex mutex_;
  std::vector<Handle> free_;
};

template <class Handle>
class BorrowedHandle {
 public:
  BorrowedHandle(const char* op, int device, Handle (*make)(const char* op))
      : pool_(HandlePool<Handle>::Of(op, device)), handle_(pool_->Take(make, op)) {}
  ~BorrowedHandle() { pool_->Give(handle_); }
  BorrowedHandle(const BorrowedHandle&) = delete;
  BorrowedHandle& operator=(const BorrowedHandle&) = delete;
  Handle get() const { return handle_; }

 private:
  HandlePool<Handle>* pool_;
  Handle handle_;
};

}  // namespace cuda
}  // namespace dlsys
