// DLInterface: what a caller has to agree about with this library, written down from the
// declarations themselves: enumerators, limits, layouts of structs, opcodes and functions, a fact a
// line. `make interface` copies the text into the Python package, which reads its constants there
// and refuses a library that says anything else.
#include <cstddef>
#include <string>
#include <type_traits>

#include "math/epilogue.h"
#include "math/pointwise_vm.h"
#include "runtime/device.h"
#include "runtime/registry.h"

namespace dlsys {
namespace {

template <class T>
std::string TypeText() {
  if constexpr (std::is_pointer_v<T>) return "pointer";
  if constexpr (std::is_same_v<T, float>) return "float32";
  if constexpr (std::is_same_v<T, DLContext>) return "DLContext";
  if constexpr (std::is_array_v<T>)
    return TypeText<std::remove_extent_t<T>>() + "*" + std::to_string(std::extent_v<T>);
  if constexpr (std::is_integral_v<T>)
    return (std::is_signed_v<T> ? "int" : "uint") + std::to_string(8 * sizeof(T));
}

class Text {
 public:
  template <class... T>
  void Add(const T&... words) {
    std::string line;
    ((line += (line.empty() ? "" : " ") + Word(words)), ...);
    text_ += line + "\n";
  }
  const char* get() const { return text_.c_str(); }

 private:
  static std::string Word(const std::string& word) { return word; }
  static std::string Word(int64_t number) { return std::to_string(number); }

  std::string text_;
};

template <class... A>
void AddFunction(Text* text, const char* name, int (*)(A...)) {
  std::string types;
  ((types += " " + TypeText<A>()), ...);
  text->Add("function", name + types);
}

#define DLSYS_ENUMERATOR(Name) text->Add("enum", #Name, (int64_t)Name);

void AddEnumerators(Text* text) {
  DLSYS_ENUMERATOR(DL_OK)
  DLSYS_ENUMERATOR(DL_ERROR)
  DLSYS_ENUMERATOR(DL_OUT_OF_MEMORY)
  DLSYS_ENUMERATOR(DL_DEVICE_LOST)
  DLSYS_ENUMERATOR(DL_UNAVAILABLE)
  DLSYS_ENUMERATOR(DL_NOT_APPLICABLE)
  DLSYS_ENUMERATOR(DL_OUT_OF_RANGE)
  DLSYS_ENUMERATOR(DL_CPU)
  DLSYS_ENUMERATOR(DL_GPU)
#define DLSYS_DEVICE(code, name, column, streams) \
  text->Add("device", name, (int64_t)code, column, (int64_t)streams);
  DLSYS_DEVICES(DLSYS_DEVICE)
#undef DLSYS_DEVICE
#define DLSYS_DTYPE(name, code) text->Add("dtype", #name, (int64_t)code);
  DLSYS_DTYPE(float32, DL_FLOAT32)
  DLSYS_DTYPE(float64, DL_FLOAT64)
  DLSYS_DTYPE(int32, DL_INT32)
  DLSYS_DTYPE(int64, DL_INT64)
  DLSYS_DTYPE(uint8, DL_UINT8)
  DLSYS_DTYPE(bool, DL_BOOL)
  DLSYS_DTYPE(bfloat16, DL_BFLOAT16)
  DLSYS_DTYPE(float16, DL_FLOAT16)
#undef DLSYS_DTYPE
}

void AddOpcodes(Text* text) {
#define DLSYS_ACTIVATION(number, Name) text->Add("activation", fn::Name::name, number);
  DLSYS_ACTIVATIONS(DLSYS_ACTIVATION)
#undef DLSYS_ACTIVATION
#define DLSYS_ACTIVATION(number, Name) text->Add("activation_gradient", fn::Name::name, number);
  DLSYS_ACTIVATION_GRADIENTS(DLSYS_ACTIVATION)
#undef DLSYS_ACTIVATION
  int64_t operands = 1;
#define DLSYS_OPCODE(Name) text->Add("opcode", pointwise::Name::name, pointwise::k##Name, operands);
  DLSYS_OPCODES_1(DLSYS_OPCODE)
  operands = 2;
  DLSYS_OPCODES_2(DLSYS_OPCODE)
  operands = 3;
  DLSYS_OPCODES_3(DLSYS_OPCODE)
  operands = 4;
  DLSYS_OPCODES_4(DLSYS_OPCODE)
#undef DLSYS_OPCODE
  text->Add("limit", "max_ndim", DL_MAX_NDIM);
  text->Add("limit", "pointwise_instructions", pointwise::kInstructions);
  text->Add("limit", "pointwise_inputs", pointwise::kInputs);
  text->Add("limit", "pointwise_immediates", pointwise::kImmediates);
  text->Add("limit", "pointwise_first_immediate", pointwise::kFirstImmediate);
}

#define DLSYS_STRUCT(Name) text->Add("struct", #Name, sizeof(Name));
#define DLSYS_FIELD(Name, field)                                                              \
  text->Add("field", #Name, #field, TypeText<decltype(Name::field)>(), offsetof(Name, field), \
            sizeof(Name::field));

// clang-format off
void AddStructs(Text* text) {
  DLSYS_STRUCT(DLContext)
  DLSYS_FIELD(DLContext, device_id)
  DLSYS_FIELD(DLContext, device_type)
  DLSYS_STRUCT(DLArray)
  DLSYS_FIELD(DLArray, data)
  DLSYS_FIELD(DLArray, ctx)
  DLSYS_FIELD(DLArray, ndim)
  DLSYS_FIELD(DLArray, dtype)
  DLSYS_FIELD(DLArray, shape)
  DLSYS_STRUCT(DLArrayList)
  DLSYS_FIELD(DLArrayList, count)
  DLSYS_FIELD(DLArrayList, arrays)
  DLSYS_STRUCT(DLBytes)
  DLSYS_FIELD(DLBytes, nbytes)
  DLSYS_FIELD(DLBytes, data)
  DLSYS_STRUCT(DLValue)
  DLSYS_FIELD(DLValue, p)
  DLSYS_FIELD(DLValue, i)
  DLSYS_FIELD(DLValue, f)
  DLSYS_STRUCT(DLKernelEntry)
  DLSYS_FIELD(DLKernelEntry, name)
  DLSYS_FIELD(DLKernelEntry, device)
  DLSYS_FIELD(DLKernelEntry, sig)
  DLSYS_FIELD(DLKernelEntry, dtype)
  DLSYS_FIELD(DLKernelEntry, call)
  DLSYS_FIELD(DLKernelEntry, invoke)
  DLSYS_FIELD(DLKernelEntry, fits)
  DLSYS_FIELD(DLKernelEntry, workspace)
  DLSYS_FIELD(DLKernelEntry, file)
  DLSYS_FIELD(DLKernelEntry, line)
  DLSYS_STRUCT(DLStep)
  DLSYS_FIELD(DLStep, kernel)
  DLSYS_FIELD(DLStep, first)
  DLSYS_FIELD(DLStep, nargs)
  DLSYS_FIELD(DLStep, place)
  DLSYS_STRUCT(DLMemoryStats)
  DLSYS_FIELD(DLMemoryStats, device_allocations)
  DLSYS_FIELD(DLMemoryStats, device_frees)
  DLSYS_FIELD(DLMemoryStats, reserved_nbytes)
  DLSYS_FIELD(DLMemoryStats, in_use_nbytes)
  DLSYS_FIELD(DLMemoryStats, peak_in_use_nbytes)
  DLSYS_FIELD(DLMemoryStats, requests)
  DLSYS_STRUCT(DLCounters)
  DLSYS_FIELD(DLCounters, program_launches)
  DLSYS_FIELD(DLCounters, kernel_launches)
  DLSYS_FIELD(DLCounters, synchronizations)
  DLSYS_STRUCT(DLCopy)
  DLSYS_FIELD(DLCopy, dst)
  DLSYS_FIELD(DLCopy, src)
  DLSYS_FIELD(DLCopy, nbytes)
  DLSYS_STRUCT(DLGraphInfo)
  DLSYS_FIELD(DLGraphInfo, nodes)
  DLSYS_FIELD(DLGraphInfo, kernels)
  DLSYS_FIELD(DLGraphInfo, copies)
  DLSYS_FIELD(DLGraphInfo, fills)
  DLSYS_STRUCT(DLGraphStreams)
  DLSYS_FIELD(DLGraphStreams, stream)
  DLSYS_FIELD(DLGraphStreams, waits)
  DLSYS_FIELD(DLGraphStreams, nwaits)
  DLSYS_FIELD(DLGraphStreams, ready_inputs)
}
// clang-format on

#define DLSYS_FUNCTION(Name) AddFunction(text, #Name, &Name);

void AddFunctions(Text* text) {
  DLSYS_FUNCTION(DLDeviceCount)
  DLSYS_FUNCTION(DLDeviceName)
  DLSYS_FUNCTION(DLDeviceMemory)
  DLSYS_FUNCTION(DLGetCounters)
  DLSYS_FUNCTION(DLStreamCreate)
  DLSYS_FUNCTION(DLStreamFree)
  DLSYS_FUNCTION(DLStreamSynchronize)
  DLSYS_FUNCTION(DLStreamDrain)
  DLSYS_FUNCTION(DLStreamWait)
  DLSYS_FUNCTION(DLMemoryAlloc)
  DLSYS_FUNCTION(DLMemoryFree)
  DLSYS_FUNCTION(DLMemoryTrim)
  DLSYS_FUNCTION(DLMemoryGetStats)
  DLSYS_FUNCTION(DLMemoryResetPeak)
  DLSYS_FUNCTION(DLMemoryFill)
  DLSYS_FUNCTION(DLMemoryCopy)
  DLSYS_FUNCTION(DLAlgorithmSource)
  DLSYS_FUNCTION(DLKernelFits)
  DLSYS_FUNCTION(DLKernelWorkspace)
  DLSYS_FUNCTION(DLPlaceNumber)
  DLSYS_FUNCTION(DLKernelCall)
  DLSYS_FUNCTION(DLProgramCreate)
  DLSYS_FUNCTION(DLProgramRun)
  DLSYS_FUNCTION(DLProgramProfile)
  DLSYS_FUNCTION(DLProgramCapture)
  DLSYS_FUNCTION(DLGraphReplay)
  DLSYS_FUNCTION(DLGraphDescribe)
  DLSYS_FUNCTION(DLGraphFree)
  DLSYS_FUNCTION(DLProgramFree)
  DLSYS_FUNCTION(DLCpuSetThreads)
  DLSYS_FUNCTION(DLCpuGetThreads)
}

}  // namespace
}  // namespace dlsys

DLSYS_API const char* DLInterface(void) {
  static const dlsys::Text* const text = [] {
    auto* made = new dlsys::Text;
    dlsys::AddEnumerators(made);
    dlsys::AddOpcodes(made);
    dlsys::AddStructs(made);
    dlsys::AddFunctions(made);
    return made;
  }();
  return text->get();
}
