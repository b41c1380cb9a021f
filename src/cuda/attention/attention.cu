// The launchers of attention on a GPU: checks, which kernels serve a dtype and a precision, the
// sums Σ y dy of backward, and the model by which `auto` leaves a problem to the composition of
// other operators. Arrays are (batch, heads, positions, size), contiguous, or parts of one that
// holds q, k and v; results overlap no input. forward.cuh and backward.cuh say what limits the
// kernels.
#include "cuda/attention/attention.cuh"
#include "cuda/attention/flash.cuh"
#include "cuda/gemm/gemm.cuh"
#include "cuda/reduce/group.cuh"

namespace dlsys {
namespace cuda {
namespace attention {
namespace {

const Tiled& TiledOf(const char* op, int dtype, int64_t precision) {
  if (dtype == DL_BFLOAT16) return kTiledBfloat16;
  if (dtype == DL_FLOAT16) return kTiledFloat16;
  return CheckedPrecision(op, precision) == Precision::kTf32 ? kTiledTf32 : kTiledFp32;
}

bool OnTensorCores(const Tiled& tiled) { return &tiled != &kTiledFp32; }

// Why `tiled` cannot compute a problem on a GPU, null where it can.
const char* Refusal(const Attention& p, const Tiled& tiled, int device) {
  if (p.size > kLargestHead || p.value_size > kLargestHead) return "a head is larger than 256";
  if (OnTensorCores(tiled) && ComputeMajor(device) < 8)
    return "tensor cores multiply so from sm_80 on";
  if (tiled.shared_nbytes(WidthOf(p)) > SharedLimit(device))
    return "a block of this GPU has too little shared memory for such heads";
  return nullptr;
}

// ---- rungs ----

enum { kAuto, kTiled, kFlash };  // 0 is the kernel's heuristic

// The ladder's rungs that are kernels, from 1 on; the rung `naive` is a composition of operators.
const std::vector<Algorithm>& AttentionAlgorithms() {
  static const auto* const algorithms = new std::vector<Algorithm>{{"tiled"}, {"flash"}};
  return *algorithms;
}

FlashProblem ForFlash(const Attention& p, int dtype, DLContext ctx) {
  const FlashDropout dropout = {p.step, p.seed, p.node, (uint32_t)(p.threshold - 1), p.keep};
  return {p.batch, p.heads, p.kv_heads, p.rows,  p.columns, p.size,  p.of_q, p.of_k,
          p.of_v,  p.of_y,  dtype,      p.scale, p.causal,  dropout, ctx};
}

// Why `flash` cannot compute a problem, null where it can.
const char* FlashRefusal(const Attention& p, int dtype, int64_t precision, DLContext ctx) {
  if (dtype == DL_FLOAT32 && (Precision)precision != Precision::kTf32)
    return "it takes float32 at precision tf32";
  if (p.mask.data || p.lengths.data || p.query_lengths.data) return "it takes no mask or lengths";
  if (p.step && dtype == DL_FLOAT32) return "it drops no weights of float32";
  if (p.step && (p.columns % 4 || p.threshold == 0))
    return "it drops weights of keys in multiples of four, not all of them";
  if (p.size != p.value_size) return "it takes heads of keys and values of one size";
  const char* error = FlashError(ForFlash(p, dtype, ctx));
  return *error ? error : nullptr;
}

// The rung that computes a problem. `aligned`: all arrays are at multiples of 16 bytes.
int RungOf(const char* op, const Attention& p, const Tiled& tiled, const DLArray* q,
           int64_t algorithm, int64_t precision, bool aligned) {
  if (algorithm < 0 || algorithm > (int64_t)AttentionAlgorithms().size())
    Fail("%s: there is no algorithm %ld, expected 0 to %zu", op, (long)algorithm,
         AttentionAlgorithms().size());
  const char* of_flash = aligned ? FlashRefusal(p, q->dtype, precision, q->ctx)
                                 : "it takes arrays at multiples of 16 bytes";
  const char* of_tiled = Refusal(p, tiled, q->ctx.device_id);
  if (algorithm != kTiled && !of_flash) return kFlash;
  if (algorithm != kFlash && !of_tiled) return kTiled;
  const bool flash = algorithm == kFlash;
  FailWith(DL_NOT_APPLICABLE, "%s: algo=%s cannot compute this: %s; use auto, naive%s", op,
           flash ? "flash" : "tiled", flash ? of_flash : of_tiled,
           flash && !of_tiled ? ", tiled" : "");
}

// ---- the model of `auto` ----

// What an H100's data sheet says times what such kernels reach by rule of thumb; not measured.
// Floating-point operations a second of `tiled` and of the products of the composition, bytes a
// second, and seconds that a launch takes.
struct Rates {
  double tiled, products;
};
constexpr Rates kTensorRates = {300e12, 450e12}, kFp32Rates = {22e12, 35e12},
                kTf32Rates = {120e12, kFp32Rates.products};  // batched products have no tf32
constexpr double kBandwidth = 2.5e12, kLaunch = 3e-6;
constexpr int kMultiprocessors = 132;
constexpr int64_t kMostWeightNbytes = int64_t(1) << 30;  // of a matrix that one would hold

Rates RatesOf(const Tiled& tiled, int64_t nbytes) {
  if (nbytes == 2) return kTensorRates;
  return OnTensorCores(tiled) ? kTf32Rates : kFp32Rates;
}

// True where the composition takes less time: its products fill the GPU with few queries too and do
// not stop at tiles of 64, but it reads and writes the weights some times.
bool ComposedIsFaster(const Attention& p, const Tiled& tiled, int64_t nbytes, int device,
                      double products, double passes) {
  const double pairs = (double)p.batch * (double)p.heads * (double)p.rows * (double)p.columns;
  if (pairs * (double)nbytes > kMostWeightNbytes) return false;
  const Rates rates = RatesOf(tiled, nbytes);
  const double flop = products * (double)(p.size + p.value_size);
  const double more =
      (p.mask.data || p.lengths.data ? 3. : 0.) + (p.causal ? 2. : 0.) + (p.step ? 2. : 0.);
  const double composed =
      pairs * (flop / rates.products + (passes + more) * (double)nbytes / kBandwidth) +
      (passes + more) * kLaunch;
  const int64_t tiles = p.batch * p.heads * CeilDiv(p.rows, kRows);
  const double waves = (double)CeilDiv(tiles, Multiprocessors(device));
  const double tile = (double)kRows * (double)p.columns * (p.causal ? .55 : 1.);
  return composed < waves * tile * flop * kMultiprocessors / rates.tiled + kLaunch;
}

// The products of forward and of backward, and how often the composition reads or writes weights.
struct Work {
  double products, passes;
};
constexpr Work kForward = {2., 4.}, kBackward = {5., 10.};

bool Fits(const char* op, const Attention& p, const DLArray* q, int64_t precision,
          const Work& work) {
  const int device = q->ctx.device_id;
  Use(op, device);
  const Tiled& tiled = TiledOf(op, q->dtype, precision);
  if (!FlashRefusal(p, q->dtype, precision, q->ctx)) return true;
  return !Refusal(p, tiled, device) &&
         !ComposedIsFaster(p, tiled, DtypeNbytes(q->dtype), device, work.products, work.passes);
}

bool ForwardFits(const DLArray* q, const DLArray* k, const DLArray* v, const DLArrayList* optional,
                 int64_t flags, float scale, int64_t seed, int64_t node, int64_t threshold,
                 float keep, int64_t, int64_t precision, DLArray*, DLArray*) {
  const char* op = "attention";
  const Attention p =
      CheckedAttention(op, q, k, v, optional, {flags, scale, seed, node, threshold, keep});
  return Fits(op, p, q, precision, kForward);
}

bool BackwardFits(const DLArray* q, const DLArray* k, const DLArray* v, const DLArray*,
                  const DLArray*, const DLArray*, const DLArrayList* optional, int64_t flags,
                  float scale, int64_t seed, int64_t node, int64_t threshold, float keep, int64_t,
                  int64_t precision, DLArray*, DLArray*, DLArray*) {
  const char* op = "attention_gradient";
  const Attention p =
      CheckedAttention(op, q, k, v, optional, {flags, scale, seed, node, threshold, keep});
  return Fits(op, p, q, precision, kBackward);
}

bool PackedForwardFits(const DLArray* qkv, const DLArrayList* optional, int64_t flags, float scale,
                       int64_t seed, int64_t node, int64_t threshold, float keep, int64_t heads,
                       int64_t kv_heads, int64_t, int64_t precision, DLArray*, DLArray*) {
  const char* op = "packed_attention";
  const Attention p = CheckedPackedAttention(
      op, qkv, optional, {flags, scale, seed, node, threshold, keep}, heads, kv_heads);
  return Fits(op, p, qkv, precision, kForward);
}

bool PackedBackwardFits(const DLArray* qkv, const DLArray*, const DLArray*, const DLArray*,
                        const DLArrayList* optional, int64_t flags, float scale, int64_t seed,
                        int64_t node, int64_t threshold, float keep, int64_t heads,
                        int64_t kv_heads, int64_t, int64_t precision, DLArray*) {
  const char* op = "packed_attention_gradient";
  const Attention p = CheckedPackedAttention(
      op, qkv, optional, {flags, scale, seed, node, threshold, keep}, heads, kv_heads);
  return Fits(op, p, qkv, precision, kBackward);
}

// ---- launchers ----

// Σ y dy of each row, by a warp.
template <class T>
__global__ void RowSumsKernel(const T* y, const T* dy, Attention p, float* sums) {
  const int lane = (int)threadIdx.x % 32;
  const int64_t rows = p.batch * p.heads * p.rows;
  for (int64_t row = FirstItem() / 32; row < rows; row += ItemStep() / 32) {
    const int64_t head = row / p.rows;
    const int64_t from = p.of_y.At(head / p.heads, head % p.heads, row % p.rows);
    float sum = 0.f;
    for (int64_t j = lane; j < p.value_size; j += 32)
      sum += (float)y[from + j] * (float)dy[from + j];
    sum = GroupReduce<SumMonoid, 32>(sum);
    if (lane == 0) sums[row] = sum;
  }
}

template <class... Arrays>
bool AllAligned(const Arrays*... arrays) {
  return (Aligned16(arrays->data) && ...);
}

void EnterAll(const char* op, const DLArray* first, const DLArrayList* optional) {
  for (int64_t k = 0; k < optional->count; k++) CheckArray(op, optional->arrays[k], first->ctx);
}

template <class T>
void RunForward(const char* op, const Attention& p, const ForwardArrays& arrays, const DLArray* q,
                int64_t algorithm, int64_t precision, bool aligned, DLStream stream) {
  const Tiled& tiled = TiledOf(op, kDtype<T>, precision);
  if (p.batch * p.heads * p.rows == 0) return;
  if (RungOf(op, p, tiled, q, algorithm, precision, aligned) == kTiled)
    return tiled.forward(op, p, arrays, stream);
  RunFlashForward(op, ForFlash(p, q->dtype, q->ctx),
                  {arrays.q, arrays.k, arrays.v, arrays.y, arrays.lse}, stream);
}

template <class T>
void Forward(const DLArray* q, const DLArray* k, const DLArray* v, const DLArrayList* optional,
             int64_t flags, float scale, int64_t seed, int64_t node, int64_t threshold, float keep,
             int64_t algorithm, int64_t precision, DLArray* y, DLArray* lse, DLStream stream) {
  const char* op = "attention";
  Enter(op, y, q, k, v, lse);
  EnterAll(op, y, optional);
  const Attention p =
      CheckedAttention(op, q, k, v, optional, {flags, scale, seed, node, threshold, keep});
  CheckResults(op, p, y, lse);
  RunForward<T>(op, p, {In<T>(op, q), In<T>(op, k), In<T>(op, v), Out<T>(op, y), Out(op, lse)}, q,
                algorithm, precision, AllAligned(q, k, v, y), stream);
}

template <class T>
void PackedForward(const DLArray* qkv, const DLArrayList* optional, int64_t flags, float scale,
                   int64_t seed, int64_t node, int64_t threshold, float keep, int64_t heads,
                   int64_t kv_heads, int64_t algorithm, int64_t precision, DLArray* y, DLArray* lse,
                   DLStream stream) {
  const char* op = "packed_attention";
  Enter(op, y, qkv, lse);
  EnterAll(op, y, optional);
  const Attention p = CheckedPackedAttention(
      op, qkv, optional, {flags, scale, seed, node, threshold, keep}, heads, kv_heads);
  CheckResults(op, p, y, lse);
  const T* x = In<T>(op, qkv);
  RunForward<T>(op, p, {x, x + PackedKeys(p), x + PackedValues(p), Out<T>(op, y), Out(op, lse)},
                qkv, algorithm, precision, AllAligned(qkv, y), stream);
}

template <class T>
void RunBackward(const char* op, const Attention& p, const FlashBackward& arrays, const DLArray* q,
                 int64_t algorithm, int64_t precision, bool aligned, DLStream stream) {
  const Tiled& tiled = TiledOf(op, kDtype<T>, precision);
  if (RungOf(op, p, tiled, q, algorithm, precision, aligned) == kFlash)
    return RunFlashBackward(op, ForFlash(p, q->dtype, q->ctx), arrays, stream);
  const int64_t rows = p.batch * p.heads * p.rows;
  const Scratch sums(q->ctx, rows * (int64_t)sizeof(float), stream);
  Launch(op, RowSumsKernel<T>, Blocks(rows * 32), kThreads, 0, stream, (const T*)arrays.y,
         (const T*)arrays.dy, p, sums.floats());
  tiled.backward(op, p,
                 {arrays.q, arrays.k, arrays.v, arrays.dy, arrays.lse, sums.floats(), arrays.dq,
                  arrays.dk, arrays.dv},
                 stream);
}

template <class T>
void Backward(const DLArray* q, const DLArray* k, const DLArray* v, const DLArray* y,
              const DLArray* lse, const DLArray* dy, const DLArrayList* optional, int64_t flags,
              float scale, int64_t seed, int64_t node, int64_t threshold, float keep,
              int64_t algorithm, int64_t precision, DLArray* dq, DLArray* dk, DLArray* dv,
              DLStream stream) {
  const char* op = "attention_gradient";
  Enter(op, dq, q, k, v, y, lse, dy, dk, dv);
  EnterAll(op, dq, optional);
  const Attention p =
      CheckedAttention(op, q, k, v, optional, {flags, scale, seed, node, threshold, keep});
  CheckResults(op, p, y, lse);
  CheckSameShape(op, y, dy);
  CheckSameShape(op, q, dq);
  CheckSameShape(op, k, dk);
  CheckSameShape(op, v, dv);
  RunBackward<T>(op, p,
                 {In<T>(op, q), In<T>(op, k), In<T>(op, v), In<T>(op, y), In(op, lse),
                  In<T>(op, dy), Out<T>(op, dq), Out<T>(op, dk), Out<T>(op, dv)},
                 q, algorithm, precision, AllAligned(q, k, v, y, dy, dq, dk, dv), stream);
}

template <class T>
void PackedBackward(const DLArray* qkv, const DLArray* y, const DLArray* lse, const DLArray* dy,
                    const DLArrayList* optional, int64_t flags, float scale, int64_t seed,
                    int64_t node, int64_t threshold, float keep, int64_t heads, int64_t kv_heads,
                    int64_t algorithm, int64_t precision, DLArray* dqkv, DLStream stream) {
  const char* op = "packed_attention_gradient";
  Enter(op, dqkv, qkv, y, lse, dy);
  EnterAll(op, dqkv, optional);
  const Attention p = CheckedPackedAttention(
      op, qkv, optional, {flags, scale, seed, node, threshold, keep}, heads, kv_heads);
  CheckResults(op, p, y, lse);
  CheckSameShape(op, y, dy);
  CheckSameShape(op, qkv, dqkv);
  const int64_t keys = PackedKeys(p), values = PackedValues(p);
  const T* x = In<T>(op, qkv);
  T* dx = Out<T>(op, dqkv);
  RunBackward<T>(op, p,
                 {x, x + keys, x + values, In<T>(op, y), In(op, lse), In<T>(op, dy), dx, dx + keys,
                  dx + values},
                 qkv, algorithm, precision, AllAligned(qkv, y, dy, dqkv), stream);
}

DLSYS_KERNEL_TYPED_NAMED(cuda, attention, "attention", Forward);
DLSYS_KERNEL_TYPED_NAMED(cuda, attention_gradient, "attention_gradient", Backward);
DLSYS_KERNEL_TYPED_NAMED(cuda, packed_attention, "packed_attention", PackedForward);
DLSYS_KERNEL_TYPED_NAMED(cuda, packed_attention_gradient, "packed_attention_gradient",
                         PackedBackward);
DLSYS_ALGORITHMS(cuda, attention, AttentionAlgorithms);
DLSYS_ALGORITHMS(cuda, attention_gradient, AttentionAlgorithms);
DLSYS_ALGORITHMS(cuda, packed_attention, AttentionAlgorithms);
DLSYS_ALGORITHMS(cuda, packed_attention_gradient, AttentionAlgorithms);
DLSYS_FITS(cuda, attention, ForwardFits);
DLSYS_FITS(cuda, attention_gradient, BackwardFits);
DLSYS_FITS(cuda, packed_attention, PackedForwardFits);
DLSYS_FITS(cuda, packed_attention_gradient, PackedBackwardFits);

}  // namespace
}  // namespace attention
}  // namespace cuda
}  // namespace dlsys
