// Draws a token from each row of logits on the CPU: of softmax(logits / temperature), where only
// the `top_k` largest count, and of those the fewest that reach `top_p` together (nucleus sampling,
// Holtzman et al., 2020); among equals the first count. Both limits sort the tokens. Sums are
// float64. Sorting limits it, or exp.
#include "operators/token.h"

#include <algorithm>
#include <cmath>

#include "cpu/runtime/common.h"
#include "cpu/runtime/parallel.h"
#include "operators/indexing.h"

namespace dlsys {
namespace cpu {
namespace {

struct Settings {
  float temperature, top_k, top_p;
};

// weights[n] of a row, in which those that do not count are 0; `order` is scratch.
void Weigh(const float* logits, int64_t n, const Settings& settings, double* weights,
           int32_t* order) {
  const bool greedy = settings.temperature == 0.f;
  const float largest = *std::max_element(logits, logits + n);
  const double inverse = greedy ? 1. : 1. / settings.temperature;
  for (int64_t i = 0; i < n; i++) weights[i] = std::exp((logits[i] - largest) * inverse);
  const int64_t top_k = greedy ? 1 : (int64_t)settings.top_k;
  const bool cuts = top_k >= 1 && top_k < n;
  if (!cuts && settings.top_p >= 1.f) return;
  for (int64_t i = 0; i < n; i++) order[i] = (int32_t)i;
  const auto before = [&](int32_t a, int32_t b) {
    return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
  };
  int64_t count = n;
  if (cuts) {
    std::nth_element(order, order + top_k - 1, order + n, before);
    count = top_k;
  }
  if (settings.top_p < 1.f) {
    std::sort(order, order + count, before);
    double total = 0., sum = 0.;
    for (int64_t k = 0; k < count; k++) total += weights[order[k]];
    int64_t counted = 0;
    while (counted < count && sum < (double)settings.top_p * total)
      sum += weights[order[counted++]];
    count = std::max<int64_t>(counted, 1);
  }
  for (int64_t k = count; k < n; k++) weights[order[k]] = 0.;
}

int64_t Drawn(const double* weights, int64_t n, double unit) {
  double total = 0., sum = 0.;
  for (int64_t i = 0; i < n; i++) total += weights[i];
  int64_t last = 0;
  for (int64_t i = 0; i < n; i++) {
    if (!(weights[i] > 0.)) continue;
    last = i, sum += weights[i];
    if (sum > unit * total) break;
  }
  return last;
}

void DrawToken(const DLArray* logits, const DLArray* settings, const DLArray* seed,
               const DLArray* step, DLArray* tokens) {
  const char* op = "draw_token";
  const float *x = Input(op, logits), *limits = Input(op, settings);
  const int64_t *key = Input<int64_t>(op, seed), *at = Input<int64_t>(op, step);
  int64_t* out = Output<int64_t>(op, tokens);
  CheckScalar(op, "seed", seed, DL_INT64);
  CheckScalar(op, "step", step, DL_INT64);
  if (logits->ndim != 2 || logits->shape[1] < 1 || Numel(settings) != 3 ||
      Numel(tokens) != logits->shape[0])
    Fail("%s: expected logits of rows and 3 settings, got %s and %s", op, ShapeText(logits).c_str(),
         ShapeText(settings).c_str());
  const int64_t n = logits->shape[1];
  const ScratchArray<double> weights(n);
  const ScratchArray<int32_t> order(n);
  Serially([&] {
    for (int64_t row = 0; row < logits->shape[0]; row++) {
      Weigh(x + row * n, n, {limits[0], limits[1], limits[2]}, weights.data(), order.data());
      out[row] = Drawn(weights.data(), n, NumberOfRow(*key, *at, row));
    }
  });
}

DLSYS_KERNEL(cpu, draw_token, DrawToken);

}  // namespace
}  // namespace cpu
}  // namespace dlsys
