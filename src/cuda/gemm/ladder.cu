// The ladder of the matrix product: its rungs by name, and what is said where one cannot serve.
// Floats of 16 bits go to a rung that takes none through float32 copies in scratch. gemm.cuh has
// the contract of a rung, heuristic.cu what runs where nobody names one; each rung's file names
// what limits it.
#include <optional>

#include "cuda/gemm/gemm.cuh"

namespace dlsys {
namespace cuda {
namespace {

// Slowest first.
const GemmRung* const kRungs[] = {&kNaive,  &kTiled,  &kRegister, &kWarp,
                                  &kTensor, &kHopper, &kCublas};

// An algorithm of the list: a rung by its heuristic, or by a variant.
struct Entry {
  const GemmRung* rung;
  int variant;
};

struct Ladder {
  std::vector<Entry> entries;
  std::vector<Algorithm> algorithms;

  Ladder() {
    for (const GemmRung* rung : kRungs) {
      Add(rung, kHeuristic, rung->name);
      if (!rung->variants) continue;
      int variant = 0;
      for (const std::string& name : rung->variants())
        Add(rung, variant++, std::string(rung->name) + " " + name);
    }
  }

  void Add(const GemmRung* rung, int variant, const std::string& name) {
    entries.push_back({rung, variant});
    algorithms.push_back({name, rung->source});
  }
};

const Ladder& GetLadder() {
  static const Ladder* const ladder = new Ladder;
  return *ladder;
}

// The GEMM as a rung gets it: of 16 bits perhaps in float32, and at tf32, or at fp32 by rungs that
// have no other precision. Only what a rung's refusal looks at.
Gemm AsTaken(const GemmRung& rung, const Gemm& p) {
  Gemm taken = p;
  if (!p.IsNarrow() || rung.narrow) return taken;
  taken.dtype = DL_FLOAT32, taken.precision = Precision::kTf32;
  if (rung.refusal(taken)) taken.precision = Precision::kFp32;
  return taken;
}

// auto, and the rungs that can compute a GEMM.
std::string ThatCan(const Gemm& p) {
  std::string names = "auto";
  for (const GemmRung* rung : kRungs)
    if (!rung->refusal(AsTaken(*rung, p))) names += std::string(", ") + rung->name;
  return names;
}

void Run(const char* op, const GemmRung& rung, const Gemm& p, int variant, DLStream stream) {
  if (!p.IsNarrow() || rung.narrow) return rung.run(op, p, variant, stream);
  const InFloat32 floats(op, p, stream);
  Gemm wide = floats.get();
  wide.precision = AsTaken(rung, p).precision;
  rung.run(op, wide, variant, stream);
  floats.StoreResult();
}

// The product, and behind it its activation, whose input is stored too, or its derivative.
void RunInTwoSteps(const char* op, const Gemm& p, DLStream stream, int64_t algorithm) {
  Gemm product = p;
  std::optional<Scratch> input;
  if (p.epilogue.slope) input.emplace(p.ctx, p.m * p.n * DtypeNbytes(p.dtype), stream);
  product.c = input ? input->floats() : p.epilogue.before;
  product.epilogue.before = nullptr, product.epilogue.activation = 0;
  product.epilogue.slope = false;
  RunGemm(op, product, stream, algorithm);
  RunActivation(op, p.dtype, p.epilogue.activation, product.c, p.c, p.m * p.n, stream);
  if (input)
    RunSlope(op, p.dtype, p.epilogue.activation, input->data(), (uint8_t*)p.epilogue.before,
             p.m * p.n, stream);
}

// The same with a side of quantized slopes, which are exact in the floats of C.
void RunWithCodesWidened(const char* op, const Gemm& p, DLStream stream, int64_t algorithm) {
  const Scratch side(p.ctx, p.m * p.n * DtypeNbytes(p.dtype), stream);
  WidenSlopes(op, p.dtype, (const uint8_t*)p.epilogue.side, side.data(), p.m * p.n, stream);
  Gemm product = p;
  product.epilogue.side = side.floats(), product.epilogue.quantized = false;
  RunGemm(op, product, stream, algorithm);
}

}  // namespace

const std::vector<Algorithm>& GemmAlgorithms() { return GetLadder().algorithms; }

void RunGemm(const char* op, const Gemm& p, DLStream stream, int64_t algorithm) {
  const Ladder& ladder = GetLadder();
  const int64_t count = (int64_t)ladder.entries.size();
  if (algorithm < 0 || algorithm > count)
    Fail("%s: there is no algorithm %ld, expected 0 to %ld", op, (long)algorithm, (long)count);
  if (p.epilogue.before || p.epilogue.quantized) {
    const bool hopper = algorithm == 0 || ladder.entries[algorithm - 1].rung == &kHopper;
    if (!hopper || !HasEpilogueOnHopper(p))
      return p.epilogue.before ? RunInTwoSteps(op, p, stream, algorithm)
                               : RunWithCodesWidened(op, p, stream, algorithm);
    if (algorithm == 0) return kHopper.run(op, p, kHeuristic, stream);
  }
  if (algorithm == 0) return RunGemmByHeuristic(op, p, stream);
  const Entry& entry = ladder.entries[algorithm - 1];
  const char* name = ladder.algorithms[algorithm - 1].name.c_str();
  const Gemm taken = AsTaken(*entry.rung, p);
  if (const char* why = entry.rung->refusal(taken))
    FailWith(DL_NOT_APPLICABLE, "%s: algo=%s cannot compute this: %s; use %s", op, name, why,
             ThatCan(p).c_str());
  if (entry.variant != kHeuristic && entry.rung->fits && !entry.rung->fits(taken, entry.variant))
    NotApplicable(op, name);
  if (p.m == 0 || p.n == 0) {
    if (p.sums) RunOperandSums(op, p, stream);
    return;
  }
  Run(op, *entry.rung, p, entry.variant, stream);
}

}  // namespace cuda
}  // namespace dlsys
