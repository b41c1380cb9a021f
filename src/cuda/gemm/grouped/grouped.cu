// The operators of grouped products and their ladder: they check arguments, and hand a Grouped to
// the rung that is named, or to the fastest that can compute it. Floats of 16 bits go to a rung
// that takes none through float32 copies in scratch, where tf32 is exact. Each rung's file names
// what limits it.
#include "cuda/gemm/grouped/grouped.cuh"

namespace dlsys {
namespace cuda {
namespace {

// Slowest first.
const GroupedRung* const kRungs[] = {&kGroupedNaive, &kGroupedWarp, &kGroupedTensor,
                                     &kGroupedHopper};

const std::vector<Algorithm>& GroupedAlgorithms() {
  static const auto* const algorithms = [] {
    auto* made = new std::vector<Algorithm>;
    for (const GroupedRung* rung : kRungs) made->push_back({rung->name, rung->source});
    return made;
  }();
  return *algorithms;
}

// As the rung gets it: of 16 bits perhaps in float32, and at tf32, or at fp32 where it has no other
// precision. Only what a refusal looks at.
Grouped AsTaken(const GroupedRung& rung, const Grouped& p) {
  Grouped taken = p;
  if (p.dtype == DL_FLOAT32 || rung.narrow) return taken;
  taken.dtype = DL_FLOAT32, taken.precision = Precision::kTf32;
  if (rung.refusal(taken)) taken.precision = Precision::kFp32;
  return taken;
}

// Where nobody names one. Of true float32 FFMA is the best.
const GroupedRung& RungByHeuristic(const Grouped& p) {
  const auto can = [&](const GroupedRung& rung) { return !rung.refusal(AsTaken(rung, p)); };
  if (can(kGroupedHopper) && GroupedHopperPays(p)) return kGroupedHopper;
  return can(kGroupedTensor) ? kGroupedTensor : kGroupedWarp;
}

const GroupedRung& RungOf(const char* op, const Grouped& p, int64_t algorithm) {
  const int64_t count = (int64_t)std::size(kRungs);
  if (algorithm < 0 || algorithm > count)
    Fail("%s: there is no algorithm %ld, expected 0 to %ld", op, (long)algorithm, (long)count);
  if (algorithm == 0) return RungByHeuristic(p);
  const GroupedRung& rung = *kRungs[algorithm - 1];
  if (const char* why = rung.refusal(AsTaken(rung, p))) {
    std::string names = "auto";
    for (const GroupedRung* other : kRungs)
      if (!other->refusal(AsTaken(*other, p))) names += std::string(", ") + other->name;
    FailWith(DL_NOT_APPLICABLE, "%s: algo=%s cannot compute this: %s; use %s", op, rung.name, why,
             names.c_str());
  }
  return rung;
}

void Run(const char* op, const Grouped& p, int64_t algorithm, DLStream stream) {
  const GroupedShape& shape = p.shape;
  const GroupedRung& rung = RungOf(op, p, algorithm);
  const int64_t numel = (shape.contracts ? shape.groups * shape.k : shape.rows) * shape.n;
  if (numel == 0) return;
  if (p.dtype == DL_FLOAT32 || rung.narrow) return rung.run(op, p, stream);
  const int64_t of_a = shape.rows * shape.k;
  const int64_t of_b = (shape.contracts ? shape.rows : shape.groups * shape.k) * shape.n;
  const auto nbytes = [](int64_t count) { return count * (int64_t)sizeof(float); };
  const Scratch a(p.ctx, nbytes(of_a), stream), b(p.ctx, nbytes(of_b), stream);
  const Scratch c(p.ctx, nbytes(numel), stream);
  Grouped wide = AsTaken(rung, p);
  wide.a = a.data(), wide.b = b.data(), wide.c = c.data();
  Widen(op, p.dtype, p.a, a.floats(), of_a, stream);
  Widen(op, p.dtype, p.b, b.floats(), of_b, stream);
  rung.run(op, wide, stream);
  Narrow(op, p.dtype, c.floats(), p.c, numel, stream);
}

template <class T>
Grouped ArgumentsOf(const char* op, const GroupedShape& shape, const DLArray* a, const DLArray* b,
                    const DLArray* sizes, int64_t precision, DLArray* c) {
  return {shape,
          In<T>(op, a),
          In<T>(op, b),
          Out<T>(op, c),
          IndicesOf(op, sizes),
          FaultsOf(op, "group size", c->ctx.device_id),
          c->ctx,
          CheckedPrecision(op, precision),
          kDtype<T>};
}

template <class T>
void GroupedMatmul(const DLArray* a, const DLArray* b, const DLArray* sizes, int64_t trans_b,
                   int64_t algorithm, int64_t precision, DLArray* c, DLStream stream) {
  const char* op = "grouped_matmul";
  Enter(op, c, a, b, sizes);
  const GroupedShape shape = GroupedMatmulShape(op, a, b, sizes, trans_b != 0, c);
  Run(op, ArgumentsOf<T>(op, shape, a, b, sizes, precision, c), algorithm, stream);
}

template <class T>
void GroupedContraction(const DLArray* a, const DLArray* b, const DLArray* sizes, int64_t algorithm,
                        int64_t precision, DLArray* c, DLStream stream) {
  const char* op = "grouped_contraction";
  Enter(op, c, a, b, sizes);
  const GroupedShape shape = GroupedContractionShape(op, a, b, sizes, c);
  Run(op, ArgumentsOf<T>(op, shape, a, b, sizes, precision, c), algorithm, stream);
}

DLSYS_KERNEL_TYPED(cuda, grouped_matmul, GroupedMatmul);
DLSYS_ALGORITHMS(cuda, grouped_matmul, GroupedAlgorithms);
DLSYS_KERNEL_TYPED(cuda, grouped_contraction, GroupedContraction);
DLSYS_ALGORITHMS(cuda, grouped_contraction, GroupedAlgorithms);

}  // namespace
}  // namespace cuda
}  // namespace dlsys
