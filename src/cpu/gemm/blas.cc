// The rung `blas`: GEMM by the cblas_sgemm of OpenBLAS, BLIS or MKL, the measure of the other
// rungs. What this process has loaded already comes first, such as the OpenBLAS of numpy, then the
// system's by soname; neither building nor loading this library needs one. The BLAS has threads of
// its own (OPENBLAS_NUM_THREADS and the like), and its sums may depend on their number.
#include <dlfcn.h>
#ifdef __linux__
#include <link.h>
#endif

#include <string>

#include "cpu/gemm/gemm.h"
#include "cpu/runtime/parallel.h"

namespace dlsys {
namespace cpu {
namespace {

enum { kRowMajor = 101, kNoTranspose = 111, kTranspose = 112 };  // of CBLAS

// With 32-bit or 64-bit integers, by how the library was built.
template <class Int>
using Sgemm = void (*)(int order, int trans_a, int trans_b, Int m, Int n, Int k, float alpha,
                       const float* a, Int lda, const float* b, Int ldb, float beta, float* c,
                       Int ldc);

struct Blas {
  Sgemm<int32_t> sgemm32 = nullptr;
  Sgemm<int64_t> sgemm64 = nullptr;
  std::string name;

  bool Found() const { return sgemm32 || sgemm64; }
};

const char* const kSonames[] = {"libopenblas.so.0", "libopenblas.so", "libblis.so.4",
                                "libmkl_rt.so.2", "libmkl_rt.so"};

// The names of cblas_sgemm with 64-bit integers: of a plain build, and of numpy's own.
const char* const kNames64[] = {"cblas_sgemm64_", "scipy_cblas_sgemm64_", "cblas_sgemm_64"};
const char* const kNames32[] = {"cblas_sgemm", "scipy_cblas_sgemm"};

std::string ConfigOf(void* library) {
  for (const char* name : {"openblas_get_config", "openblas_get_config64_",
                           "scipy_openblas_get_config", "scipy_openblas_get_config64_"})
    if (auto config = (const char* (*)())dlsym(library, name)) return config();
  return "";
}

Blas Functions(void* library, const std::string& file) {
  Blas blas;
  if (!library) return blas;
  for (const char* name : kNames64)
    if (!blas.Found()) blas.sgemm64 = (Sgemm<int64_t>)dlsym(library, name);
  for (const char* name : kNames32)
    if (!blas.Found()) blas.sgemm32 = (Sgemm<int32_t>)dlsym(library, name);
  const std::string config = ConfigOf(library);
  blas.name = config.empty() ? file : config;
  return blas;
}

#ifdef __linux__
int Collect(dl_phdr_info* info, size_t, void* paths) {
  ((std::vector<std::string>*)paths)->push_back(info->dlpi_name);
  return 0;
}
#endif

// The loaded libraries whose files are named like a BLAS.
std::vector<std::string> Loaded() {
  std::vector<std::string> paths, found;
#ifdef __linux__
  dl_iterate_phdr(Collect, &paths);
#endif
  for (const std::string& path : paths)
    for (const char* word : {"openblas", "libblis", "libmkl_rt"})
      if (path.find(word, path.rfind('/') + 1) != std::string::npos) found.push_back(path);
  return found;
}

Blas Open() {
  for (const std::string& path : Loaded()) {
    const Blas blas = Functions(dlopen(path.c_str(), RTLD_LAZY | RTLD_LOCAL | RTLD_NOLOAD), path);
    if (blas.Found()) return blas;
  }
  for (const char* soname : kSonames) {
    const Blas blas = Functions(dlopen(soname, RTLD_LAZY | RTLD_LOCAL), soname);
    if (blas.Found()) return blas;
  }
  return {};
}

const Blas& GetBlas() {
  static const Blas* const blas = new Blas(Open());
  return *blas;
}

const char* Refusal() {
  if (GetBlas().Found()) return nullptr;
  return "no BLAS is loaded in this process, and the system has none as libopenblas.so.0, "
         "libblis.so.4 or libmkl_rt.so.2";
}

const char* Source() {
  if (const char* why = Refusal()) FailWith(DL_UNAVAILABLE, "%s", why);
  return GetBlas().name.c_str();
}

template <class Int>
void Call(Sgemm<Int> sgemm, const Gemm& p) {
  const bool trans_a = p.a.col != 1, trans_b = p.b.col != 1;
  const int64_t lda = trans_a ? std::max(p.a.col, p.m) : std::max(p.a.row, p.k);
  const int64_t ldb = trans_b ? std::max(p.b.col, p.k) : std::max(p.b.row, p.n);
  sgemm(kRowMajor, trans_a ? kTranspose : kNoTranspose, trans_b ? kTranspose : kNoTranspose,
        (Int)p.m, (Int)p.n, (Int)p.k, 1.f, p.a.data, (Int)lda, p.b.data, (Int)ldb,
        p.add ? 1.f : 0.f, p.c, (Int)p.n);
}

void Run(const Gemm& p) {
  const Blas& blas = GetBlas();
  if (!blas.sgemm64 && std::max({p.m, p.n, p.k}) > INT32_MAX)
    FailWith(DL_NOT_APPLICABLE, "algo=blas: %s takes extents to 2^31 - 1; use threads",
             blas.name.c_str());
  Serially([&] { blas.sgemm64 ? Call(blas.sgemm64, p) : Call(blas.sgemm32, p); });
}

}  // namespace

const GemmRung kBlas = {"blas", Run, Refusal, Source};

}  // namespace cpu
}  // namespace dlsys
