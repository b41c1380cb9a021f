// The matrix products, own and cuBLAS, behind one description of the problem.
#pragma once
#include <memory>

#include "cuda/runtime/context.cuh"

namespace dlsys {
namespace cuda {

enum class Precision { kFp32 = 0, kTf32 = 1 };

// What becomes of the element x of op(A) op(B) at (i, j) before it is written:
// activation(x + bias[j]), or gradient(side[i, j], x). The numbers are those of epilogue.h.
struct Epilogue {
  const float* bias = nullptr;  // (n)
  const float* side = nullptr;  // (m, n)
  int activation = 0;
  int gradient = 0;
  bool Empty() const { return !bias && !activation && !gradient; }
};

// Which factor is uint8, each of whose elements counts as so many times a scale. Only tiles of tf32
// take it.
enum class Bytes { kNone, kA, kB };

// C (m, n) = op(A) (m, k) op(B) (k, n), all float32 but for a factor of bytes, contiguous and
// row-major; op transposes where told to. C overlaps nothing that is read.
struct Product {
  const float* a;  // (m, k), or (k, m) with trans_a; of bytes, the address
  const float* b;  // (k, n), or (n, k) with trans_b
  float* c;        // (m, n)
  int64_t m, n, k;
  bool trans_a, trans_b;
  DLContext ctx;
  Precision precision = Precision::kFp32;
  Epilogue epilogue = {};
  // The sums over k of op(A), which are (m), or of op(B), which are (n), in true float32; or null.
  float* sums = nullptr;
  bool sums_of_a = false;
  Bytes bytes = Bytes::kNone;
  const float* scale = nullptr;  // of them: one number on the device
};

// Makes the GPU of the arrays current and checks dtypes and shapes.
Product CheckedProduct(const char* op, const DLArray* a, int64_t trans_a, const DLArray* b,
                       int64_t trans_b, DLArray* c, Bytes bytes = Bytes::kNone,
                       const DLArray* scale = nullptr);
// Lets it have a bias.
void TakeBias(const char* op, const DLArray* bias, const DLArray* y, Product* product);
// A factor of bytes as floats, where the product has to be of those, which it is then.
class Widened {
 public:
  Widened(const char* op, Product* product, DLStream stream);

 private:
  std::unique_ptr<Scratch> floats_;
};

Precision CheckedPrecision(const char* op, int64_t precision);

// The product by a choice of GemmAlgorithms, whose first has the number 1. By 0 it is the kernel
// that should be the fastest for its shape: an own one, or cuBLAS where that can be used and
// DLSYS_BLAS is not "own".
void Multiply(const char* op, const Product& product, DLStream stream, int64_t choice = 0);
const std::vector<Algorithm>& GemmAlgorithms();

void MultiplyOwn(const char* op, const Product& product, DLStream stream);
// By tiles of one size, numbered as in matmul.cu, over so many splits of the depth.
void MultiplyTiled(const char* op, const Product& product, int tiling, int splits, DLStream stream);

// cuBLAS takes neither epilogue nor sums. CublasError is why it cannot be used, or "".
const char* CublasError();
const char* CublasSource();  // as in registry.h
void MultiplyCublas(const char* op, const Product& product, DLStream stream);

// cuBLASLt neither, nor arrays without elements. It proposes up to kLtProposals algorithms.
constexpr int kLtProposals = 6;
const char* CublasLtSource();
void MultiplyLt(const char* op, const Product& product, int number, DLStream stream);

}  // namespace cuda
}  // namespace dlsys
