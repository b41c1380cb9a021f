// Random words and uniforms by cuRAND's Philox4x32-10, to check the generator of random.cu against:
// word i of the output is word offset + i of the stream of a seed. cuRAND is opened by soname at
// the first use, and its few functions are declared here. A call makes a generator and
// synchronizes, which limits it: the kernel is for checks, not for training.
#include "cuda/runtime/dlopen.cuh"

namespace dlsys {
namespace cuda {
namespace {

using Generator = struct CurandGenerator*;
using Status = int;
constexpr const char* kSoname = "libcurand.so.10";
constexpr int kPhilox = 161;  // CURAND_RNG_PSEUDO_PHILOX4_32_10

struct Library {
  Status (*create)(Generator*, int kind) = nullptr;
  Status (*destroy)(Generator) = nullptr;
  Status (*set_seed)(Generator, unsigned long long) = nullptr;
  Status (*set_offset)(Generator, unsigned long long) = nullptr;
  Status (*set_stream)(Generator, cudaStream_t) = nullptr;
  Status (*words)(Generator, unsigned int*, size_t) = nullptr;
  Status (*uniform)(Generator, float*, size_t) = nullptr;
  std::string error;  // why it cannot be used, or ""
};

Library Open() {
  Library curand;
  void* library = OpenLibrary({kSoname}, &curand.error);
  if (!library) return curand;
  Find(library, "curandCreateGenerator", &curand.create, &curand.error);
  Find(library, "curandDestroyGenerator", &curand.destroy, &curand.error);
  Find(library, "curandSetPseudoRandomGeneratorSeed", &curand.set_seed, &curand.error);
  Find(library, "curandSetGeneratorOffset", &curand.set_offset, &curand.error);
  Find(library, "curandSetStream", &curand.set_stream, &curand.error);
  Find(library, "curandGenerate", &curand.words, &curand.error);
  Find(library, "curandGenerateUniform", &curand.uniform, &curand.error);
  return curand;
}

const Library& Curand() {
  static const Library* const library = new Library(Open());
  return *library;
}

void CheckCurand(Status status) {
  if (status != 0) Fail("rand: cuRAND error %d", status);
}

class OwnedGenerator {
 public:
  OwnedGenerator() { CheckCurand(Curand().create(&generator_, kPhilox)); }
  ~OwnedGenerator() { Curand().destroy(generator_); }
  OwnedGenerator(const OwnedGenerator&) = delete;
  OwnedGenerator& operator=(const OwnedGenerator&) = delete;
  Generator get() const { return generator_; }

 private:
  Generator generator_ = nullptr;
};

// Fills out with words (int32) or with uniforms in (0, 1] (float32), from word `offset` on. It
// makes a generator at each call and synchronizes: this kernel is for checks, not for training.
void Rand(int64_t seed, int64_t offset, DLArray* out, DLStream stream) {
  Enter("rand", out);
  const Library& curand = Curand();
  if (!curand.error.empty())
    FailWith(DL_UNAVAILABLE,
             "rand: cuRAND cannot be used (%s): install nvidia-curand, or name its folder in "
             "DLSYS_CUDA_LIBRARY_PATH, or use random_uniform",
             curand.error.c_str());
  if (out->dtype != DL_INT32 && out->dtype != DL_FLOAT32)
    Fail("rand: expected int32 for words or float32, got %s", DtypeText(out->dtype));
  const size_t n = (size_t)Numel(out);
  if (n == 0 || Workspace::Querying()) return;
  const OwnedGenerator generator;
  CheckCurand(curand.set_seed(generator.get(), (unsigned long long)seed));
  CheckCurand(curand.set_offset(generator.get(), (unsigned long long)offset));
  CheckCurand(curand.set_stream(generator.get(), Native(stream)));
  CheckCurand(out->dtype == DL_INT32 ? curand.words(generator.get(), (unsigned int*)out->data, n)
                                     : curand.uniform(generator.get(), (float*)out->data, n));
  Check("rand", cudaStreamSynchronize(Native(stream)));
}

DLSYS_KERNEL(cuda, rand, Rand);

}  // namespace
}  // namespace cuda
}  // namespace dlsys
