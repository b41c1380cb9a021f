// The ladder of the matrix product: its rungs by name, and what is said where one cannot serve.
// gemm.cuh has the contract of a rung, heuristic.cu what runs where nobody names one.
#include "cuda/gemm/gemm.cuh"

namespace dlsys {
namespace cuda {
namespace {

// Slowest first.
const GemmRung* const kRungs[] = {&kNaive, &kTiled, &kRegister, &kWarp, &kTensor, &kCublas};

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

// auto, and the rungs that can compute a GEMM.
std::string ThatCan(const Gemm& p) {
  std::string names = "auto";
  for (const GemmRung* rung : kRungs)
    if (!rung->refusal(p)) names += std::string(", ") + rung->name;
  return names;
}

}  // namespace

const std::vector<Algorithm>& GemmAlgorithms() { return GetLadder().algorithms; }

void RunGemm(const char* op, const Gemm& p, DLStream stream, int64_t algorithm) {
  const Ladder& ladder = GetLadder();
  const int64_t count = (int64_t)ladder.entries.size();
  if (algorithm < 0 || algorithm > count)
    Fail("%s: there is no algorithm %ld, expected 0 to %ld", op, (long)algorithm, (long)count);
  if (algorithm == 0) return RunGemmByHeuristic(op, p, stream);
  const Entry& entry = ladder.entries[algorithm - 1];
  const char* name = ladder.algorithms[algorithm - 1].name.c_str();
  if (const char* why = entry.rung->refusal(p))
    FailWith(DL_NOT_APPLICABLE, "%s: algo=%s cannot compute this: %s; use %s", op, name, why,
             ThatCan(p).c_str());
  if (entry.variant != kHeuristic && entry.rung->fits && !entry.rung->fits(p, entry.variant))
    NotApplicable(op, name);
  if (p.m == 0 || p.n == 0) {
    if (p.sums) RunOperandSums(op, p, stream);
    return;
  }
  entry.rung->run(op, p, entry.variant, stream);
}

}  // namespace cuda
}  // namespace dlsys
