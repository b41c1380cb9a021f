// Pointwise fusion on the CPU: an interpreter of the bytecode of src/math/pointwise_vm.h that runs
// each instruction as a vector loop over a block of elements, whose operands are still in the L1
// cache.
//
// Inputs of float32 and the output's shape are read in place; immediates, other dtypes and
// broadcast inputs are expanded to blocks first. The output, of a storage type or bool, may be the
// buffer of an input of its shape and dtype: a block is written after all reads of it.
#include <type_traits>

#include "cpu/pointwise/map.h"
#include "cpu/runtime/common.h"
#include "cpu/runtime/parallel.h"
#include "cpu/runtime/simd.h"
#include "math/pointwise_vm.h"

namespace dlsys {
namespace cpu {
namespace {

using pointwise::Broadcast;
using pointwise::Instruction;
using pointwise::PowConst;
using pointwise::Program;

constexpr int64_t kBlock = 1024;

// ---- instructions ----

using Operands = const float* const (&)[4];
using Map = void (*)(Operands from, float* to, int64_t n);

template <class F>
void Map1(Operands from, float* to, int64_t n) {
  const float* a = from[0];
  Dispatch(DLSYS_SIMD { MapRun<F>::Run(a, to, n); });
}

template <class F>
void Map2(Operands from, float* to, int64_t n) {
  const float *a = from[0], *b = from[1];
  Dispatch(DLSYS_SIMD {
    if constexpr (std::is_same_v<F, PowConst>) return ConstRun<F>::Run(a, *b, to, n);
    DLSYS_IVDEP
    for (int64_t k = 0; k < n; k++) to[k] = F()(a[k], b[k]);
  });
}

template <class F>
void Map3(Operands from, float* to, int64_t n) {
  const float *a = from[0], *b = from[1], *c = from[2];
  Dispatch(DLSYS_SIMD {
    DLSYS_IVDEP
    for (int64_t k = 0; k < n; k++) to[k] = F()(a[k], b[k], c[k]);
  });
}

template <class F>
void Map4(Operands from, float* to, int64_t n) {
  const float *a = from[0], *b = from[1], *c = from[2], *d = from[3];
  Dispatch(DLSYS_SIMD {
    DLSYS_IVDEP
    for (int64_t k = 0; k < n; k++) to[k] = F()(a[k], b[k], c[k], d[k]);
  });
}

// By opcode; operands that an instruction lacks are read by no loop.
constexpr Map kMaps[] = {nullptr,
#define DLSYS_MAP(Name) Map1<pointwise::Name>,
                         DLSYS_OPCODES_1(DLSYS_MAP)
#undef DLSYS_MAP
#define DLSYS_MAP(Name) Map2<pointwise::Name>,
                             DLSYS_OPCODES_2(DLSYS_MAP)
#undef DLSYS_MAP
#define DLSYS_MAP(Name) Map3<pointwise::Name>,
                                 DLSYS_OPCODES_3(DLSYS_MAP)
#undef DLSYS_MAP
#define DLSYS_MAP(Name) Map4<pointwise::Name>,
                                     DLSYS_OPCODES_4(DLSYS_MAP)
#undef DLSYS_MAP
};

// ---- operands ----

struct Source {
  const void* data;
  int dtype;
  Broadcast broadcast;
  bool direct;  // float32 of the shape of the output
};

template <class T>
void Spread(const T* x, const Broadcast& broadcast, int64_t begin, int64_t n, float* to) {
  int64_t at = begin / broadcast.inner % broadcast.count;
  if (broadcast.inner == 1) {  // the elements in order, repeated
    for (int64_t k = 0; k < n; at = 0) {
      const int64_t run = std::min(broadcast.count - at, n - k);
      for (int64_t i = 0; i < run; i++) to[k + i] = (float)x[at + i];
      k += run;
    }
    return;
  }
  for (int64_t k = 0, left = broadcast.inner - begin % broadcast.inner; k < n;
       left = broadcast.inner) {
    const int64_t run = std::min(left, n - k);
    std::fill_n(to + k, run, (float)x[at]);
    at = at + 1 < broadcast.count ? at + 1 : 0;
    k += run;
  }
}

template <class T>
void Load(const Source& source, int64_t begin, int64_t n, float* to) {
  const T* x = (const T*)source.data;
  if (!kIs16Bit<T> || source.broadcast.inner != 1 || begin + n > source.broadcast.count)
    return Spread(x, source.broadcast, begin, n, to);
  Dispatch(DLSYS_SIMD {
    DLSYS_IVDEP
    for (int64_t k = 0; k < n; k++) to[k] = x[begin + k];
  });
}

void LoadInput(const Source& source, int64_t begin, int64_t n, float* to) {
  switch (source.dtype) {
    case DL_FLOAT32:
      return Load<float>(source, begin, n, to);
    case DL_BFLOAT16:
      return Load<bfloat16>(source, begin, n, to);
    case DL_FLOAT16:
      return Load<float16>(source, begin, n, to);
    case DL_INT32:
      return Load<int32_t>(source, begin, n, to);
    case DL_INT64:
      return Load<int64_t>(source, begin, n, to);
    case DL_UINT8:
      return Load<uint8_t>(source, begin, n, to);
  }
  Load<uint8_t>(source, begin, n, to);
  for (int64_t k = 0; k < n; k++) to[k] = to[k] != 0.f;
}

template <class T>
void Store(const float* values, T* out, int64_t n) {
  Dispatch(DLSYS_SIMD {
    DLSYS_IVDEP
    for (int64_t k = 0; k < n; k++) out[k] = T(values[k]);
  });
}

// Stores the elements of a block; those of float32 lie in the output already.
void StoreOutput(const float* values, DLArray* out, int64_t begin, int64_t n) {
  if (out->dtype == DL_BFLOAT16) return Store(values, (bfloat16*)out->data + begin, n);
  if (out->dtype == DL_FLOAT16) return Store(values, (float16*)out->data + begin, n);
  if (out->dtype == DL_FLOAT32) return;
  for (int64_t k = 0; k < n; k++) ((uint8_t*)out->data)[begin + k] = values[k] != 0.f;
}

// ---- the kernel ----

// A program with its slots, blocks of up to `block` elements.
class Worker {
 public:
  static int64_t ScratchNumel(const Program& program, int count, int64_t block) {
    return block * (program.slots + 1 + count + program.count);
  }

  Worker(const Program& program, const Source* sources, int count, int64_t block, float* scratch)
      : program_(program),
        sources_(sources),
        count_(count),
        block_(block),
        slots_(scratch),
        constants_(scratch + (program.slots + 1) * block) {
    for (int k = 0; k < count; k++)
      if (sources[k].broadcast.count == 1) LoadInput(sources[k], 0, block, Constant(k));
    for (int k = 0; k < program.count; k++)
      std::fill_n(Constant(count + k), block, program.immediates[k]);
  }

  // Computes elements begin to begin + n of the output.
  void Run(int64_t begin, int64_t n, DLArray* out) const {
    const float* values[1 + pointwise::kSlots];  // by operand
    std::fill_n(values, 1 + pointwise::kSlots, Slot(program_.slots));
    for (int k = 0; k < count_; k++) values[1 + k] = Input(k, begin, n);
    for (int at = 0; at < program_.length; at++) {
      const Instruction& step = program_.code[at];
      const float* from[4];
      for (int k = 0; k < 4; k++) {
        const int immediate = step.operands[k] - pointwise::kFirstImmediate;
        from[k] = immediate < 0 ? values[step.operands[k]] : Constant(count_ + immediate);
      }
      float* to = Slot(step.destination ? step.destination - 1 : program_.slots);
      if (at + 1 == program_.length && out->dtype == DL_FLOAT32) to = (float*)out->data + begin;
      kMaps[step.opcode](from, to, n);
      values[0] = values[step.destination] = to;
    }
    StoreOutput(values[0], out, begin, n);
  }

 private:
  float* Slot(int k) const { return slots_ + k * block_; }
  float* Constant(int k) const { return constants_ + k * block_; }

  const float* Input(int k, int64_t begin, int64_t n) const {
    const Source& source = sources_[k];
    if (source.direct) return (const float*)source.data + begin;
    if (source.broadcast.count == 1) return Constant(k);
    LoadInput(source, begin, n, Slot(k));
    return Slot(k);
  }

  const Program& program_;
  const Source* sources_;
  int count_;
  int64_t block_;
  float *slots_, *constants_;
};

void Pointwise(const DLArrayList* inputs, Struct<pointwise::Bytecode> bytecode, DLArray* out) {
  const Program program = pointwise::Checked(*bytecode, inputs);
  Check("pointwise", out);
  pointwise::CheckOutput(out);
  const int64_t n = Numel(out);
  Source sources[pointwise::kInputs];
  const int count = (int)inputs->count;
  for (int k = 0; k < count; k++) {
    const DLArray* a = inputs->arrays[k];
    Check("pointwise", a);
    pointwise::CheckInput(a);
    const Broadcast broadcast = pointwise::BroadcastOf(a, out);
    const bool direct = a->dtype == DL_FLOAT32 && broadcast.inner == 1 && broadcast.count == n;
    sources[k] = {a->data, a->dtype, broadcast, direct};
  }
  const int64_t numel = Worker::ScratchNumel(program, count, std::min(kBlock, n));
  const auto make = [=] { return ScratchArray<float>(numel); };
  auto task = [&](int64_t begin, int64_t end, const ScratchArray<float>& scratch) {
    const Worker worker(program, sources, count, std::min(kBlock, end - begin), scratch.data());
    for (int64_t at = begin; at < end; at += kBlock)
      worker.Run(at, std::min(kBlock, end - at), out);
  };
  ParallelForWithScratch(n, kGrain, make, task);
}

DLSYS_KERNEL_ANY(cpu, pointwise, Pointwise);

}  // namespace
}  // namespace cpu
}  // namespace dlsys
