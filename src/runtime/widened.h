// A kernel of float32 as one of a storage type of 16 bits: what it reads in that type is widened
// into scratch memory, which is exact, and what it writes is rounded from there. For kernels that
// have no form of their own type; limited by these copies where the kernel does little.
#pragma once
#include <optional>

#include "runtime/workspace.h"

namespace dlsys {

// An argument as it is.
template <class Device, class T, class A>
class Widened {
 public:
  Widened(A value, DLStream) : value_(value) {}
  A get() { return value_; }
  void Store() {}

 private:
  A value_;
};

// A float32 array in scratch memory, of the shape of one of T.
template <class T>
class WideArray {
 public:
  WideArray(const DLArray* of, DLStream stream) : array_(*of) {
    scratch_.emplace(of->ctx, Numel(of) * (int64_t)sizeof(float), stream);
    array_.data = scratch_->data();
    array_.dtype = DL_FLOAT32;
  }
  DLArray* get() { return &array_; }

 private:
  DLArray array_;
  std::optional<Scratch> scratch_;
};

template <class Device, class T>
class Widened<Device, T, const DLArray*> {
 public:
  Widened(const DLArray* array, DLStream stream) : array_(array) {
    if (array->dtype != kDtype<T>) return;
    Device::Enter(array);
    wide_.emplace(array, stream);
    Device::template Convert<T, float>(array, wide_->get(), stream);
  }
  const DLArray* get() { return wide_ ? wide_->get() : array_; }
  void Store() {}

 private:
  const DLArray* array_;
  std::optional<WideArray<T>> wide_;
};

template <class Device, class T>
class Widened<Device, T, DLArray*> {
 public:
  Widened(DLArray* array, DLStream stream) : array_(array), stream_(stream) {
    if (array->dtype != kDtype<T>) return;
    Device::Enter(array);
    wide_.emplace(array, stream);
  }
  DLArray* get() { return wide_ ? wide_->get() : array_; }
  void Store() {
    if (wide_) Device::template Convert<float, T>(wide_->get(), array_, stream_);
  }

 private:
  DLArray* array_;
  const DLStream stream_;
  std::optional<WideArray<T>> wide_;
};

// A list of arrays, each of which may be of T.
template <class Device, class T, class List, class Array>
class WidenedList {
 public:
  WidenedList(List* list, DLStream stream) {
    if (list->count > kMost) Fail("a widened list has %ld arrays", (long)list->count);
    for (int64_t k = 0; k < list->count; k++) {
      each_[k].emplace(list->arrays[k], stream);
      arrays_[k] = const_cast<DLArray*>(each_[k]->get());
    }
    list_.arrays = arrays_;
    list_.count = list->count;
  }
  List* get() { return &list_; }
  void Store() {
    for (int64_t k = 0; k < list_.count; k++) each_[k]->Store();
  }

 private:
  static constexpr int64_t kMost = 4;  // on the stack: nothing is allocated
  std::optional<Widened<Device, T, Array>> each_[kMost];
  DLArray* arrays_[kMost];
  DLArrayList list_;
};
template <class Device, class T>
class Widened<Device, T, const DLArrayList*>
    : public WidenedList<Device, T, const DLArrayList, const DLArray*> {
  using WidenedList<Device, T, const DLArrayList, const DLArray*>::WidenedList;
};
template <class Device, class T>
class Widened<Device, T, DLArrayList*> : public WidenedList<Device, T, DLArrayList, DLArray*> {
  using WidenedList<Device, T, DLArrayList, DLArray*>::WidenedList;
};

// Device has Enter(array), which checks it, and Convert<From, To>(from, to, stream).
template <class Device, class T, auto F>
struct InFloat32;
template <class Device, class T, class... A, void (*F)(A...)>
struct InFloat32<Device, T, F> {
  static void Run(A... arguments) {
    const DLStream stream = Last(arguments...);
    Then(Widened<Device, T, A>(arguments, stream)...);
  }

 private:
  // The stream that the arguments end with, if they do.
  template <class Only>
  static DLStream Last(Only value) {
    if constexpr (std::is_same_v<Only, DLStream>)
      return value;
    else
      return nullptr;
  }
  template <class First, class Second, class... Rest>
  static DLStream Last(First, Second second, Rest... rest) {
    return Last(second, rest...);
  }
  static void Then(Widened<Device, T, A>&&... arguments) {
    F(arguments.get()...);
    (arguments.Store(), ...);
  }
};

}  // namespace dlsys

// Of a kernel of float32, which is registered for that already, for the types of 16 bits.
#define DLSYS_KERNEL_WIDENED(device, name, Function)                               \
  DLSYS_KERNEL_OF(device, name, #name, DL_BFLOAT16,                                \
                  ::dlsys::InFloat32<Widening, ::dlsys::bfloat16, Function>::Run); \
  DLSYS_KERNEL_OF(device, name, #name, DL_FLOAT16,                                 \
                  ::dlsys::InFloat32<Widening, ::dlsys::float16, Function>::Run)
