// DLInterface: what a caller has to agree about with this library, written down from the
// declarations themselves: enumerators, limits, layouts of structs, opcodes and functions, a fact a
// line. `make interface` copies the text into the Python package, which reads its constants there
// and refuses a library that says anything else.
#include <algorithm>
#include <cstddef>
#include <map>
#include <string>
#include <type_traits>
#include <typeindex>

#include "math/pointwise_vm.h"
#include "operators/all_reduce_update_args.h"
#include "operators/conv_accuracy.h"
#include "operators/conv_geometry.h"
#include "operators/indexing.h"
#include "operators/mlp_head.h"
#include "operators/optimizer_args.h"
#include "runtime/communicator.h"
#include "runtime/device.h"
#include "runtime/registry.h"

namespace dlsys {
namespace {

class Text {
 public:
  template <class... T>
  void Add(const T&... words) {
    std::string line;
    ((line += Word(words) + " "), ...);
    text_ += line.erase(line.find_last_not_of(' ') + 1) + "\n";
  }
  template <class T>
  void AddStruct(std::string name) {
    name.erase(0, name.rfind(':') + 1);  // its namespace
    Add("struct", structs_[typeid(T)] = name, sizeof(T));
  }
  template <class... A>
  void AddFunction(const char* name, int (*)(A...)) {
    Add("function", name, Type<A>()...);
  }
  template <class T>
  std::string Type() {
    if constexpr (std::is_pointer_v<T>) return "pointer";
    if constexpr (std::is_same_v<T, float>) return "float32";
    if constexpr (std::is_array_v<T>)
      return Type<std::remove_extent_t<T>>() + "*" + std::to_string(std::extent_v<T>);
    if constexpr (std::is_integral_v<T>)
      return (std::is_signed_v<T> ? "int" : "uint") + std::to_string(8 * sizeof(T));
    return structs_[typeid(T)];
  }
  const char* get() const { return text_.c_str(); }

 private:
  static std::string Word(std::string word) {
    word.erase(std::remove(word.begin(), word.end(), ','), word.end());  // of a list
    return word;
  }
  static std::string Word(int64_t number) { return std::to_string(number); }

  std::string text_;
  std::map<std::type_index, std::string> structs_;  // the names of those added so far
};

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
  text->Add("operand", "A", kOperandA);
  text->Add("operand", "B", kOperandB);
  text->Add("limit", "max_ndim", DL_MAX_NDIM);
  text->Add("limit", "communicator_id_nbytes", kCommunicatorIdNbytes);
  text->Add("limit", "mlp_head_layers", kMaxHeadLayers);
  text->Add("limit", "weight_update_gemms", kMaxGemms);
  text->Add("limit", "pointwise_instructions", pointwise::kInstructions);
  text->Add("limit", "pointwise_inputs", pointwise::kInputs);
  text->Add("limit", "pointwise_immediates", pointwise::kImmediates);
  text->Add("limit", "pointwise_first_immediate", pointwise::kFirstImmediate);
}

// Of algorithms of convolution that are no plain sums; see conv_accuracy.h.
void AddAccuracies(Text* text) {
  for (const ConvAccuracy& known : kConvAccuracies)
    text->Add("units", known.units, known.algorithm);
  text->Add("limit", "units_fp32", MostUnits(false));
  text->Add("limit", "units_tf32", MostUnits(true));
}

// Optimizer rules: whether it acts in every run of an accumulation, its slots, its constants.
void AddRules(Text* text) {
#define DLSYS_TELL(Rule)                                               \
  text->Add("rule", rule::Rule::name, (int64_t)rule::Rule::kEveryRun); \
  text->Add("slots", rule::Rule::name, rule::Rule::slots);             \
  text->Add("constants", rule::Rule::name, rule::Rule::constants);
  DLSYS_RULES(DLSYS_TELL)
#undef DLSYS_TELL
}

// A struct and its fields, ten at most.
#define DLSYS_FIELD(Name, field)                                                      \
  text->Add("field", text->Type<Name>(), #field, text->Type<decltype(Name::field)>(), \
            offsetof(Name, field), sizeof(Name::field));
#define DLSYS_FIELDS_1(Name, field) DLSYS_FIELD(Name, field)
#define DLSYS_FIELDS_2(Name, field, ...) DLSYS_FIELD(Name, field) DLSYS_FIELDS_1(Name, __VA_ARGS__)
#define DLSYS_FIELDS_3(Name, field, ...) DLSYS_FIELD(Name, field) DLSYS_FIELDS_2(Name, __VA_ARGS__)
#define DLSYS_FIELDS_4(Name, field, ...) DLSYS_FIELD(Name, field) DLSYS_FIELDS_3(Name, __VA_ARGS__)
#define DLSYS_FIELDS_5(Name, field, ...) DLSYS_FIELD(Name, field) DLSYS_FIELDS_4(Name, __VA_ARGS__)
#define DLSYS_FIELDS_6(Name, field, ...) DLSYS_FIELD(Name, field) DLSYS_FIELDS_5(Name, __VA_ARGS__)
#define DLSYS_FIELDS_7(Name, field, ...) DLSYS_FIELD(Name, field) DLSYS_FIELDS_6(Name, __VA_ARGS__)
#define DLSYS_FIELDS_8(Name, field, ...) DLSYS_FIELD(Name, field) DLSYS_FIELDS_7(Name, __VA_ARGS__)
#define DLSYS_FIELDS_9(Name, field, ...) DLSYS_FIELD(Name, field) DLSYS_FIELDS_8(Name, __VA_ARGS__)
#define DLSYS_FIELDS_10(Name, field, ...) DLSYS_FIELD(Name, field) DLSYS_FIELDS_9(Name, __VA_ARGS__)
#define DLSYS_PICK(_1, _2, _3, _4, _5, _6, _7, _8, _9, _10, Macro, ...) Macro
#define DLSYS_STRUCT(Name, ...)                                                              \
  text->AddStruct<Name>(#Name);                                                              \
  DLSYS_PICK(__VA_ARGS__, DLSYS_FIELDS_10, DLSYS_FIELDS_9, DLSYS_FIELDS_8, DLSYS_FIELDS_7,   \
             DLSYS_FIELDS_6, DLSYS_FIELDS_5, DLSYS_FIELDS_4, DLSYS_FIELDS_3, DLSYS_FIELDS_2, \
             DLSYS_FIELDS_1, )(Name, __VA_ARGS__)

void AddStructs(Text* text) {
  DLSYS_STRUCT(DLContext, device_id, device_type);
  DLSYS_STRUCT(DLArray, data, ctx, ndim, dtype, shape);
  DLSYS_STRUCT(DLArrayList, count, arrays);
  DLSYS_STRUCT(DLBytes, nbytes, data);
  DLSYS_STRUCT(DLValue, p, i, f);
  DLSYS_STRUCT(DLKernelEntry, name, device, sig, dtype, call, invoke, fits, file, line);
  DLSYS_STRUCT(DLStep, kernel, first, nargs, place);
  DLSYS_STRUCT(DLMemoryStats, device_allocations, device_frees, reserved_nbytes, in_use_nbytes,
               peak_in_use_nbytes, requests);
  DLSYS_STRUCT(DLCounters, program_launches, kernel_launches, synchronizations);
  DLSYS_STRUCT(DLCopy, dst, src, nbytes);
  DLSYS_STRUCT(DLGraphInfo, nodes, kernels, copies, fills);
  DLSYS_STRUCT(DLGraphStreams, stream, waits, nwaits, ready_inputs);
  DLSYS_STRUCT(rule::UpdateOptions, every, clip, l2, decay, constants);
  DLSYS_STRUCT(AllReduceUpdateOptions, update, ranks, shares);
  DLSYS_STRUCT(WeightUpdateOptions, update, precision, sums, u8, ranks);
  DLSYS_STRUCT(pointwise::Instruction, opcode, destination, operands, unused);
  DLSYS_STRUCT(pointwise::Bytecode, code, immediates);
  DLSYS_STRUCT(HeadLayer, transposed, has_bias, activation, dact);
  DLSYS_STRUCT(Permutation, axes);
  DLSYS_STRUCT(HW, h, w);
  DLSYS_STRUCT(WindowOptions, size, stride, before, after, dilation);
  DLSYS_STRUCT(HeadOptions, precision, scale, dy, layers);
}

#define DLSYS_FUNCTION(Name) text->AddFunction(#Name, &Name);

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
  DLSYS_FUNCTION(DLCommunicatorId)
  DLSYS_FUNCTION(DLCommunicatorCreate)
  DLSYS_FUNCTION(DLCommunicatorCheck)
  DLSYS_FUNCTION(DLCommunicatorSumsInKernels)
  DLSYS_FUNCTION(DLCommunicatorMemory)
  DLSYS_FUNCTION(DLMemoryAlloc)
  DLSYS_FUNCTION(DLMemoryFree)
  DLSYS_FUNCTION(DLMemoryTrim)
  DLSYS_FUNCTION(DLMemoryGetStats)
  DLSYS_FUNCTION(DLMemoryResetPeak)
  DLSYS_FUNCTION(DLHostAlloc)
  DLSYS_FUNCTION(DLHostFree)
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
  DLSYS_FUNCTION(DLGraphReplayAndWait)
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
    dlsys::AddAccuracies(made);
    dlsys::AddRules(made);
    dlsys::AddStructs(made);
    dlsys::AddFunctions(made);
    return made;
  }();
  return text->get();
}
