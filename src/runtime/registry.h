// One line registers a kernel: DLSYS_KERNEL(cpu, relu, dlsys::cpu::Unary<fn::Relu>). Its signature
// is deduced from the C++ function, so that nothing is declared twice and Python declares nothing.
// A kernel that is a template over the storage type of its floats is registered for all of them by
// one line too: DLSYS_KERNEL_TYPED(cpu, gather, Gather) makes Gather<float>, Gather<bfloat16>, ….
//
// Rules that cost a day each when broken: launchers live in one namespace per device (dlsys::cpu,
// dlsys::cuda), else the linker keeps one body for both; objects go to the linker directly, never
// through an archive; nothing throws in a static initializer (DLLoadError tells instead).
#pragma once
#include <cstdio>
#include <new>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "include/dlsys.h"
#include "math/storage.h"

namespace dlsys {

// A failure with its status; everything else that is thrown becomes DL_ERROR.
struct Error : std::runtime_error {
  int status;
  Error(int status, const char* text) : std::runtime_error(text), status(status) {}
};

template <class... T>
[[noreturn]] inline void FailWith(int status, const char* format, T... args) {
  char text[1024];
  if constexpr (sizeof...(T) == 0)
    snprintf(text, sizeof text, "%s", format);
  else
    snprintf(text, sizeof text, format, args...);
  throw Error(status, text);
}
template <class... T>
[[noreturn]] inline void Fail(const char* format, T... args) {
  FailWith(DL_ERROR, format, args...);
}

// An index or a label at a position of its array, of which there are `count`, is none of them.
// `place` is where the caller's program asked for it, "" where that is not known.
[[noreturn]] inline void FailOutOfRange(const char* op, const char* what, int64_t value,
                                        int64_t position, int64_t count, const char* place = "") {
  FailWith(DL_OUT_OF_RANGE,
           "%s: %s %lld at position %lld is out of range: there are %lld, counted from 0%s%s%s", op,
           what, (long long)value, (long long)position, (long long)count, *place ? " [" : "", place,
           *place ? "]" : "");
}

void SetLastError(const char* text) noexcept;
void RegisterKernel(const DLKernelEntry& entry) noexcept;
// Of a kernel that is registered already. `sig` is that of the function, which takes no stream.
void RegisterFits(const char* device, const char* kernel, const char* sig,
                  int32_t (*fits)(const DLValue*)) noexcept;
const DLKernelEntry& KernelAt(int64_t index);

// An algorithm of a kernel; callers select one by an integer argument: 0 is the kernel's heuristic,
// 1 the first of its list. `source` gives the library that it comes from, with its version, and
// fails with DL_UNAVAILABLE; null for this library.
struct Algorithm {
  std::string name;
  const char* (*source)() = nullptr;
};
using Algorithms = const std::vector<Algorithm>& (*)();
void RegisterAlgorithms(const char* device, const char* kernel, Algorithms algorithms) noexcept;

[[noreturn]] inline void NotApplicable(const char* op, const char* algorithm) {
  FailWith(DL_NOT_APPLICABLE, "%s: %s does not do this; algorithm 0 finds what does", op,
           algorithm);
}

// While a thread is inside this library. What a device's code changes about the thread, such as
// which GPU is current, it puts right as the thread leaves: others in this process count on it.
class Visit {
 public:
  Visit() { depth_++; }
  ~Visit() {
    if (--depth_ == 0 && on_leaving) std::exchange(on_leaving, nullptr)();
  }
  Visit(const Visit&) = delete;
  Visit& operator=(const Visit&) = delete;
  static inline thread_local void (*on_leaving)() = nullptr;

 private:
  static inline thread_local int depth_ = 0;
};

// While a thread launches the kernels of one place in the caller's program. What they find is told
// when the launch is long over, and with this place.
class Place {
 public:
  explicit Place(int32_t number) { current_ = number; }
  ~Place() { current_ = 0; }
  Place(const Place&) = delete;
  Place& operator=(const Place&) = delete;
  static int32_t Current() { return current_; }
  static const char* TextOf(int32_t number);  // "" where it is not known; lives forever

 private:
  static inline thread_local int32_t current_ = 0;
};

// Runs f and turns whatever it throws into a status and the thread's error text. The one try block
// is not made anew for each kernel.
int GuardCall(void (*call)(void*), void* f) noexcept;
template <class F>
inline int Guard(F&& f) noexcept {
  return GuardCall([](void* f) { (*(std::remove_reference_t<F>*)f)(); }, (void*)&f);
}

inline void* NotNull(void* p) {
  if (!p) Fail("null array argument");
  return p;
}

// How a parameter type appears in a signature and is read from a DLValue.
template <class T>
struct Arg {
  static_assert(sizeof(T) == 0,
                "a kernel takes const DLArray*, DLArray*, const DLArrayList*, DLArrayList*, "
                "Struct<T>, int64_t, float and, last, DLStream");
};
template <>
struct Arg<const DLArray*> {
  static constexpr char letter = 'i';
  static const DLArray* Get(DLValue v) { return (const DLArray*)NotNull(v.p); }
  static void Check(const DLArray* a) { NotNull((void*)a); }
};
template <>
struct Arg<DLArray*> {
  static constexpr char letter = 'o';
  static DLArray* Get(DLValue v) { return (DLArray*)NotNull(v.p); }
  static void Check(DLArray* a) { NotNull(a); }
};
inline void CheckList(const DLArrayList* list) {
  NotNull((void*)list);
  if (list->count < 0 || (list->count && !list->arrays)) Fail("a list argument has no arrays");
  for (int64_t k = 0; k < list->count; k++) NotNull(list->arrays[k]);
}
template <>
struct Arg<const DLArrayList*> {
  static constexpr char letter = 'I';
  static const DLArrayList* Get(DLValue v) { return (const DLArrayList*)NotNull(v.p); }
  static void Check(const DLArrayList* list) { CheckList(list); }
};
template <>
struct Arg<DLArrayList*> {
  static constexpr char letter = 'O';
  static DLArrayList* Get(DLValue v) { return (DLArrayList*)NotNull(v.p); }
  static void Check(DLArrayList* list) { CheckList(list); }
};
template <>
struct Arg<int64_t> {
  static constexpr char letter = 'l';
  static int64_t Get(DLValue v) { return v.i; }
  static void Check(int64_t) {}
};
template <>
struct Arg<float> {
  static constexpr char letter = 'f';
  static float Get(DLValue v) { return v.f; }
  static void Check(float) {}
};
// A struct that a kernel takes as one argument.
template <class T>
struct Struct {
  const DLBytes* bytes;
  const T& operator*() const { return *(const T*)bytes->data; }
  const T* operator->() const { return (const T*)bytes->data; }
};
template <class T>
struct Arg<Struct<T>> {
  static_assert(std::is_trivially_copyable_v<T> && alignof(T) <= 8);
  static constexpr char letter = 'b';
  static Struct<T> Get(DLValue v) {
    const Struct<T> made{(const DLBytes*)v.p};
    Check(made);
    return made;
  }
  static void Check(Struct<T> s) {
    NotNull((void*)s.bytes);
    if (!s.bytes->data || s.bytes->nbytes != (int64_t)sizeof(T))
      Fail("a struct argument has %ld bytes, expected %zu", (long)s.bytes->nbytes, sizeof(T));
  }
};
template <>
struct Arg<DLStream> {
  static constexpr char letter = 's';
  static void Check(DLStream) {}
};

template <auto F>
struct Thunk;
template <class... A, void (*F)(A...)>
struct Thunk<F> {
  using Last = std::tuple_element_t<sizeof...(A) - 1, std::tuple<A...>>;
  static_assert(((Arg<A>::letter != 's') && ...) || Arg<Last>::letter == 's',
                "the stream goes last");
  static constexpr char sig[] = {Arg<A>::letter..., 0};

  static int Call(A... a) noexcept {
    return Guard([&] {
      (Arg<A>::Check(a), ...);
      F(a...);
    });
  }
  template <class T>
  static T Read(const DLValue* values, size_t index, DLStream stream) {
    if constexpr (Arg<T>::letter == 's')
      return stream;
    else
      return Arg<T>::Get(values[index]);
  }
  template <size_t... I>
  static void Spread(const DLValue* values, DLStream stream, std::index_sequence<I...>) {
    F(Read<A>(values, I, stream)...);
  }
  static void Invoke(const DLValue* values, DLStream stream) {
    Spread(values, stream, std::index_sequence_for<A...>{});
  }
};

// A function of a kernel's arguments, without the stream, that is asked before the kernel runs.
template <auto F>
struct Question;
template <class R, class... A, R (*F)(A...)>
struct Question<F> {
  static constexpr char sig[] = {Arg<A>::letter..., 0};

  template <size_t... I>
  static R Spread(const DLValue* values, std::index_sequence<I...>) {
    (Arg<A>::Check(Arg<A>::Get(values[I])), ...);
    return F(Arg<A>::Get(values[I])...);
  }
  static R Ask(const DLValue* values) { return Spread(values, std::index_sequence_for<A...>{}); }
  static int32_t Fits(const DLValue* values) { return Ask(values); }
};

template <auto F>
DLKernelEntry MakeEntry(const char* name, const char* device, int64_t dtype, const char* file,
                        int64_t line) {
  using T = Thunk<F>;
  return {name, device, T::sig, dtype, (void*)&T::Call, &T::Invoke, nullptr, file, line};
}

struct KernelRegistrar {
  explicit KernelRegistrar(const DLKernelEntry& entry) noexcept { RegisterKernel(entry); }
};

struct FitsRegistrar {
  FitsRegistrar(const char* device, const char* kernel, const char* sig,
                int32_t (*fits)(const DLValue*)) noexcept {
    RegisterFits(device, kernel, sig, fits);
  }
};

struct AlgorithmsRegistrar {
  AlgorithmsRegistrar(const char* device, const char* kernel, Algorithms algorithms) noexcept {
    RegisterAlgorithms(device, kernel, algorithms);
  }
};

// ---- what every kernel asks of its arrays ----
inline int64_t Numel(const DLArray* a) {
  int64_t n = 1;
  for (int i = 0; i < a->ndim; i++) n *= a->shape[i];
  return n;
}
inline std::string ShapeText(const DLArray* a) {
  std::string text = "(";
  for (int i = 0; i < a->ndim; i++) text += (i ? ", " : "") + std::to_string(a->shape[i]);
  return text + (a->ndim == 1 ? ",)" : ")");
}
inline bool SameShape(const DLArray* a, const DLArray* b) {
  bool same = a->ndim == b->ndim;
  for (int i = 0; same && i < a->ndim; i++) same = a->shape[i] == b->shape[i];
  return same;
}
inline void CheckSameShape(const char* op, const DLArray* a, const DLArray* b) {
  if (!SameShape(a, b))
    Fail("%s: shapes differ: %s and %s", op, ShapeText(a).c_str(), ShapeText(b).c_str());
}
inline const char* DtypeText(int dtype) {
  static const char* const names[] = {"float32", "float64", "int32",    "int64",
                                      "uint8",   "bool",    "bfloat16", "float16"};
  return dtype >= 0 && dtype < 8 ? names[dtype] : "an unknown dtype";
}
inline int64_t DtypeNbytes(int dtype) {
  static const int64_t sizes[] = {4, 8, 4, 8, 1, 1, 2, 2};
  if (dtype < 0 || dtype > 7) Fail("unknown dtype code %d", dtype);
  return sizes[dtype];
}
// The data of an array with elements of type T, or a failure that names the operator.
template <class T = float>
inline const T* In(const char* op, const DLArray* a) {
  if (a->dtype != kDtype<T>)
    Fail("%s: expected %s, got %s", op, DtypeText(kDtype<T>), DtypeText(a->dtype));
  return (const T*)a->data;
}
template <class T = float>
inline T* Out(const char* op, DLArray* a) {
  return const_cast<T*>(In<T>(op, a));
}

}  // namespace dlsys

#define DLSYS_CONCAT2(a, b) a##b
#define DLSYS_CONCAT(a, b) DLSYS_CONCAT2(a, b)
#define DLSYS_KERNEL_OF(device, id, name, dtype, ...)                                      \
  [[maybe_unused]] static const ::dlsys::KernelRegistrar kernel_##device##_##id##_##dtype( \
      ::dlsys::MakeEntry<&__VA_ARGS__>(name, #device, dtype, __FILE__, __LINE__))
#define DLSYS_KERNEL_NAMED(device, id, name, ...) \
  DLSYS_KERNEL_OF(device, id, name, DL_FLOAT32, __VA_ARGS__)
#define DLSYS_KERNEL(device, name, ...) DLSYS_KERNEL_NAMED(device, name, #name, __VA_ARGS__)
// Of a function template whose first parameter is the storage type; what follows it are the rest.
#define DLSYS_KERNEL_TYPED_NAMED(device, id, name, Function, ...)                            \
  DLSYS_KERNEL_OF(device, id, name, DL_FLOAT32, Function<float __VA_OPT__(, ) __VA_ARGS__>); \
  DLSYS_KERNEL_OF(device, id, name, DL_BFLOAT16,                                             \
                  Function<::dlsys::bfloat16 __VA_OPT__(, ) __VA_ARGS__>);                   \
  DLSYS_KERNEL_OF(device, id, name, DL_FLOAT16,                                              \
                  Function<::dlsys::float16 __VA_OPT__(, ) __VA_ARGS__>)
#define DLSYS_KERNEL_TYPED(device, name, ...) \
  DLSYS_KERNEL_TYPED_NAMED(device, name, #name, __VA_ARGS__)
// Of a function that looks at the dtypes of its arrays itself.
#define DLSYS_KERNEL_ANY(device, name, ...)                       \
  DLSYS_KERNEL_OF(device, name, #name, DL_FLOAT32, __VA_ARGS__);  \
  DLSYS_KERNEL_OF(device, name, #name, DL_BFLOAT16, __VA_ARGS__); \
  DLSYS_KERNEL_OF(device, name, #name, DL_FLOAT16, __VA_ARGS__)
// Says which arguments a kernel serves: a function of them, without the stream, that gives a bool.
// It goes behind DLSYS_KERNEL. Where it fails, as by the kernel's own checks, the kernel does not
// fit.
#define DLSYS_FITS(device, name, ...)                                             \
  [[maybe_unused]] static const ::dlsys::FitsRegistrar fits_##device##_##name##_( \
      #device, #name, ::dlsys::Question<&__VA_ARGS__>::sig,                       \
      &::dlsys::Question<&__VA_ARGS__>::Fits)
// Says among which implementations a kernel lets choose.
#define DLSYS_ALGORITHMS(device, name, algorithms)                                            \
  [[maybe_unused]] static const ::dlsys::AlgorithmsRegistrar algorithms_##device##_##name##_( \
      #device, #name, algorithms)
