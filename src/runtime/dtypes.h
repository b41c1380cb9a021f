// The switch over dtypes that kernels share which look at the dtypes of their arrays themselves
// (DLSYS_KERNEL_ANY): a function is called with a null pointer to the dtype's C++ type.
#pragma once
#include <type_traits>

#include "runtime/registry.h"

namespace dlsys {

// Calls f((T*)nullptr) with the type of a dtype; `Bool` is that of bool.
template <class Bool, class F>
void WithDtype(const char* op, int dtype, F&& f) {
  switch (dtype) {
    case DL_FLOAT32:
      return f((float*)nullptr);
    case DL_FLOAT64:
      return f((double*)nullptr);
    case DL_INT32:
      return f((int32_t*)nullptr);
    case DL_INT64:
      return f((int64_t*)nullptr);
    case DL_UINT8:
      return f((uint8_t*)nullptr);
    case DL_BOOL:
      return f((Bool*)nullptr);
    case DL_BFLOAT16:
      return f((bfloat16*)nullptr);
    case DL_FLOAT16:
      return f((float16*)nullptr);
  }
  Fail("%s: unknown dtype code %d", op, dtype);
}

// The same for kernels that compare elements: they take no float64, and bools as bytes of 0 and 1.
template <class F>
void WithComparable(const char* op, int dtype, F&& f) {
  WithDtype<uint8_t>(op, dtype, [&](auto* type) {
    if constexpr (std::is_same_v<decltype(type), double*>)
      Fail("%s: does not take %s", op, DtypeText(DL_FLOAT64));
    else
      f(type);
  });
}

}  // namespace dlsys
