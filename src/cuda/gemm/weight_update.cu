// Weight gradients that an optimizer uses up where they are made: a group of products in one
// launch, whose epilogue is the step of a rule (src/math/optimizer_rules.h). No gradient is
// written.
//
// Each product is A^T B, (k, m) and (k, n) to the gradient of a parameter of m * n elements, and
// may have the sums over the depth of A or of B, the gradient of another. States are float32,
// contiguous and only this kernel's: they overlap nothing that it reads, and each element is one
// thread's. All products have one tiling and one number of splits; their blocks follow each other,
// so that the small ones run beside the large. The order of additions is fixed.
#include <algorithm>
#include <memory>

#include "cuda/gemm/weight_update.cuh"
#include "cuda/runtime/lists.cuh"
#include "math/optimizer_args.h"

namespace dlsys {
namespace cuda {
namespace {

using namespace grouped;

// ---- launchers ----

template <class Tilings, template <class, bool, bool> class Accumulator, bool kBytes>
void LaunchGroup(const char* op, int tiling, const Group& group, unsigned blocks, bool early,
                 DLStream stream) {
  WithTiling<Tilings>(tiling, [&](auto of) {
    using T = typename decltype(of)::type;
    LaunchClusters(op, GroupKernel<T, Accumulator, kBytes>, blocks, (unsigned)group.splits,
                   T::kThreads, MemoryNbytes<T, Accumulator<T, true, false>>(), early, stream,
                   group);
  });
}

// The lists that a kernel gets. Parameters are those of the products, then those of the sums; state
// j of parameter k is at j * parameters + k.
struct Lists {
  const DLArrayList *states, *left, *right;
  const DLArrayList* byte_scale;  // of a factor of bytes, or nothing
  int of_each;                    // states of a parameter
  // Two bits a product, the first one's lowest: which factor has sums, which is bytes; 1 is A, 2 B.
  int64_t sums, bytes;

  int SumsOf(int64_t product) const { return (int)(sums >> 2 * product & 3); }
  Bytes BytesOf(int64_t product) const { return (Bytes)(bytes >> 2 * product & 3); }
  int64_t Parameters() const {
    int64_t count = left->count;
    for (int64_t k = 0; k < left->count; k++) count += SumsOf(k) != 0;
    return count;
  }
};

void CheckLists(const char* op, const Lists& lists) {
  const int64_t count = lists.left->count;
  if (count < 1 || count > kMostProducts || lists.right->count != count)
    Fail("%s: expected the factors of 1 to %d products, got %ld and %ld", op, kMostProducts,
         (long)count, (long)lists.right->count);
  if (lists.states->count != lists.of_each * lists.Parameters())
    Fail("%s: %ld parameters need %ld states, got %ld", op, (long)lists.Parameters(),
         (long)(lists.of_each * lists.Parameters()), (long)lists.states->count);
  if (lists.byte_scale->count != (lists.bytes != 0) || (lists.bytes & lists.sums) != 0)
    Fail("%s: expected a scale where there are bytes, and no sums of these", op);
}

// The addresses of a parameter's states, of `numel` elements each.
void TakeStates(const char* op, const Lists& lists, int64_t parameter, int64_t numel, float** to) {
  for (int j = 0; j < lists.of_each; j++) {
    DLArray* state = lists.states->arrays[j * lists.Parameters() + parameter];
    if (Numel(state) != numel)
      Fail("%s: expected a state of %ld elements, got shape %s", op, (long)numel,
           ShapeText(state).c_str());
    to[j] = Out(op, state);
  }
}

int64_t Nbytes(const DLArray* a) { return Numel(a) * DtypeNbytes(a->dtype); }

bool Overlap(const DLArray* a, const DLArray* b) {
  const auto begin = [](const DLArray* x) { return (uintptr_t)x->data; };
  const auto end = [&](const DLArray* x) { return begin(x) + (uintptr_t)Nbytes(x); };
  return begin(a) < end(b) && begin(b) < end(a);
}

// Factors as they may be read while states are written: one that shows a state, as what is fed may,
// is copied first.
class Factors {
 public:
  Factors(const char* op, const DLArrayList* states, DLStream stream)
      : op_(op), states_(states), stream_(stream) {}

  const float* Of(const DLArray* factor) {
    const auto shown = [&](const DLArray* state) { return Overlap(state, factor); };
    if (std::none_of(states_->arrays, states_->arrays + states_->count, shown))
      return (const float*)factor->data;
    const int64_t nbytes = Nbytes(factor);
    copies_.push_back(std::make_unique<Scratch>(factor->ctx, nbytes, stream_));
    if (!Workspace::Querying())
      Check(op_, cudaMemcpyAsync(copies_.back()->data(), factor->data, nbytes,
                                 cudaMemcpyDeviceToDevice, Native(stream_)));
    return copies_.back()->floats();
  }

  // Makes floats of a product's bytes where it has to be of those.
  void Widen(Product* product) {
    widened_.push_back(std::make_unique<Widened>(op_, product, stream_));
  }

 private:
  const char* op_;
  const DLArrayList* states_;
  DLStream stream_;
  std::vector<std::unique_ptr<Scratch>> copies_;
  std::vector<std::unique_ptr<Widened>> widened_;
};

// Products with all but how they are cut, the one with most work first.
void TakeMembers(const char* op, const Lists& lists, Precision precision, Factors* factors,
                 Group* group) {
  int64_t next = lists.left->count;  // parameter of sums
  for (int64_t k = 0; k < lists.left->count; k++) {
    const DLArray *a = lists.left->arrays[k], *b = lists.right->arrays[k];
    if (a->ndim != 2 || b->ndim != 2 || lists.SumsOf(k) > 2)
      Fail("%s: expected matrices and at most the sums of one, got %s, %s and %d", op,
           ShapeText(a).c_str(), ShapeText(b).c_str(), lists.SumsOf(k));
    DLArray c = *lists.states->arrays[k];  // the gradient as the product has it
    int64_t shape[2] = {a->shape[1], b->shape[1]};
    c.ndim = 2, c.shape = shape;
    Member& member = group->of[group->count++];
    Product& product = member.problem.product;
    const Bytes bytes = lists.BytesOf(k);
    const DLArray* scale = bytes == Bytes::kNone ? nullptr : lists.byte_scale->arrays[0];
    product = CheckedProduct(op, a, true, b, false, &c, bytes, scale);
    product.a = factors->Of(a), product.b = factors->Of(b);
    product.precision = precision;
    factors->Widen(&product);
    group->bytes |= product.bytes != Bytes::kNone;
    TakeStates(op, lists, k, product.m * product.n, member.states);
    if (const int sums = lists.SumsOf(k)) {
      product.sums_of_a = sums == 1;
      TakeStates(op, lists, next++, product.sums_of_a ? product.m : product.n, member.of_sums);
      product.sums = member.of_sums[0];
    }
  }
  const auto work = [](const Member& member) {
    const Product& p = member.problem.product;
    return (double)p.m * p.n * p.k;
  };
  std::stable_sort(group->of, group->of + group->count,
                   [&](const Member& a, const Member& b) { return work(a) > work(b); });
}

void RunGroup(const char* op, const Lists& lists, Precision precision, Group* group,
              DLStream stream) {
  CheckLists(op, lists);
  Factors factors(op, lists.states, stream);
  TakeMembers(op, lists, precision, &factors, group);
  const int device = lists.states->arrays[0]->ctx.device_id, major = ComputeMajor(device);
  const Tiles tiles = precision == Precision::kTf32 && major >= 8 ? Tiles::kTf32 : Tiles::kFp32;
  std::vector<Product> products;
  for (int k = 0; k < group->count; k++) products.push_back(group->of[k].problem.product);
  const Cut cut = BestCut(tiles, products.data(), group->count, major >= 9 ? kMaxSplits : 1);
  group->splits = cut.splits;
  unsigned blocks = 0;
  for (int k = 0; k < group->count; k++) {
    Member& member = group->of[k];
    Problem& problem = member.problem;
    problem = CutInto(op, products[k], cut.tiling, cut.splits);
    for (int j = 1; j < lists.of_each; j++) problem.whole_out &= Aligned16(member.states[j]);
    group->first[k] = (int)blocks;
    blocks += (unsigned)(problem.row_tiles * problem.col_tiles * cut.splits);
  }
  const auto launch = tiles == Tiles::kFp32 ? LaunchGroup<Fp32Tilings, Fp32Accumulator, false>
                      : group->bytes        ? LaunchGroup<Tf32Tilings, Tf32Accumulator, true>
                                            : LaunchGroup<Tf32Tilings, Tf32Accumulator, false>;
  launch(op, cut.tiling, *group, blocks, major >= 9, stream);
}

// Each parameter by the rule of that number, with the gradient left[k]^T right[k] or the sums of
// one of the two, as Lists has it.
template <int kRule>
void MatmulUpdate(DLArrayList* states, const DLArrayList* left, const DLArrayList* right,
                  const DLArrayList* lr, const DLArrayList* step, const DLArrayList* count,
                  const DLArrayList* scale, const DLArrayList* byte_scale, int64_t sums,
                  int64_t bytes, int64_t precision, int64_t every, float clip, float l2,
                  float decay, float a, float b, float c, float d, float e, DLStream stream) {
  using Rule = std::tuple_element_t<kRule, Rules>;
  static const std::string name = std::string("matmul_") + Rule::name;
  const char* op = name.c_str();
  EnterAll(op, {states, left, right, lr, step, count, scale, byte_scale});
  Group group = {};
  group.source = CheckedSource(op, lr, step, count, scale, every, clip, l2, decay, a, b, c, d, e);
  group.rule = kRule;
  group.every_run = Rule::kEveryRun;
  RunGroup(op, {states, left, right, byte_scale, Rule::kStates, sums, bytes},
           CheckedPrecision(op, precision), &group, stream);
}

DLSYS_KERNEL(cuda, matmul_sgd_update, MatmulUpdate<0>);
DLSYS_KERNEL(cuda, matmul_sgd_momentum_update, MatmulUpdate<1>);
DLSYS_KERNEL(cuda, matmul_adam_update, MatmulUpdate<2>);
DLSYS_KERNEL(cuda, matmul_rmsprop_update, MatmulUpdate<3>);
DLSYS_KERNEL(cuda, matmul_rmsprop_centred_update, MatmulUpdate<4>);
DLSYS_KERNEL(cuda, matmul_rmsprop_momentum_update, MatmulUpdate<5>);
DLSYS_KERNEL(cuda, matmul_rmsprop_centred_momentum_update, MatmulUpdate<6>);
DLSYS_KERNEL(cuda, matmul_adagrad_update, MatmulUpdate<7>);
DLSYS_KERNEL(cuda, matmul_lion_update, MatmulUpdate<8>);
DLSYS_KERNEL(cuda, matmul_accumulate_update, MatmulUpdate<9>);

}  // namespace
}  // namespace cuda
}  // namespace dlsys
