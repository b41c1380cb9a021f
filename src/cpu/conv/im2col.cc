// Convolution as a matrix product over a stored im2col matrix: what each kernel offset reads at
// each output position, a row of K = (channel, kernel offset) each. Its columns are the positions
// of as many images as make a product wide enough, of a single one where images are large; the
// product is that of cpu/gemm, over the filters as they lie in memory. The data gradient adds the
// gradient of that matrix up. Limited by memory bandwidth where images are large: the matrix is as
// many times as large as the image as the kernel has offsets. Where images are so small that
// filters are most of what is read, it is the fastest.
#include <algorithm>

#include "cpu/conv/conv.h"
#include "cpu/gemm/gemm.h"
#include "cpu/runtime/parallel.h"

namespace dlsys {
namespace cpu {
namespace {

// Images `first` to `first + count` of a group.
struct Block {
  const Conv& conv;
  int64_t group, first, count;

  int64_t Positions() const { return Size(conv.out); }
  int64_t Columns() const { return count * Positions(); }
  int64_t K() const { return conv.GroupChannels() * Size(conv.kernel); }
  // Where channel 0 of the group is in an image of x or dx, and in one of y or dy.
  int64_t InX(int64_t image) const {
    return ((first + image) * conv.c + group * conv.GroupChannels()) * Size(conv.in);
  }
  int64_t InY(int64_t image) const {
    return ((first + image) * conv.o + group * conv.GroupFilters()) * Positions();
  }
};

// Calls body(block) for all images of all groups, in order.
template <typename Body>
void ForBlocks(const Conv& conv, const Body& body) {
  const int64_t most = Im2colImages(conv);
  for (int64_t group = 0; group < conv.groups; group++)
    for (int64_t first = 0; first < conv.n; first += most)
      body(Block{conv, group, first, std::min(most, conv.n - first)});
}

// Calls body(read, at) for each output position that a kernel offset reads inside an image: the
// number of the element in its plane, and that of the position.
template <typename Body>
void ForInside(const Conv& c, int64_t offset, const Body& body) {
  const int64_t first_h = offset / c.kernel.w * c.dilation.h - c.pad.h;
  const int64_t first_w = offset % c.kernel.w * c.dilation.w - c.pad.w;
  for (int64_t i = 0; i < c.out.h; i++) {
    const int64_t h = first_h + i * c.stride.h;
    if (h < 0 || h >= c.in.h) continue;
    for (int64_t j = 0; j < c.out.w; j++) {
      const int64_t w = first_w + j * c.stride.w;
      if (w >= 0 && w < c.in.w) body(h * c.in.w + w, i * c.out.w + j);
    }
  }
}

// The im2col matrix (K, columns) of x.
void FillColumns(const Block& b, const float* x, float* columns) {
  const int64_t kernel = Size(b.conv.kernel), plane = Size(b.conv.in);
  const int64_t pitch = b.InX(1) - b.InX(0), positions = b.Positions();
  ParallelFor(b.K(), RowGrain(b.Columns()), [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; k++) {
      float* to = columns + k * b.Columns();
      const float* from = x + b.InX(0) + k / kernel * plane;
      std::fill(to, to + b.Columns(), 0.f);
      ForInside(b.conv, k % kernel, [&](int64_t read, int64_t at) {
        for (int64_t i = 0; i < b.count; i++) to[i * positions + at] = from[i * pitch + read];
      });
    }
  });
}

// dx from the gradient of the im2col matrix, each element in the order of kernel offsets.
void AddColumns(const Block& b, const float* columns, float* dx) {
  const int64_t kernel = Size(b.conv.kernel), plane = Size(b.conv.in);
  const int64_t grain = RowGrain(kernel * b.Columns());
  ParallelFor(b.conv.GroupChannels(), grain, [&](int64_t begin, int64_t end) {
    for (int64_t channel = begin; channel < end; channel++)
      for (int64_t image = 0; image < b.count; image++) {
        float* to = dx + b.InX(image) + channel * plane;
        const float* from = columns + channel * kernel * b.Columns() + image * b.Positions();
        std::fill_n(to, plane, 0.f);
        for (int64_t t = 0; t < kernel; t++, from += b.Columns())
          ForInside(b.conv, t, [&](int64_t read, int64_t at) { to[read] += from[at]; });
      }
  });
}

// Stores a matrix (filters, columns), with the bias, as y.
void StoreResults(const Block& b, const float* from, const float* bias, float* y) {
  ParallelFor(b.conv.GroupFilters(), RowGrain(b.Columns()), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++) {
      const float add = bias ? bias[b.group * b.conv.GroupFilters() + r] : 0;
      for (int64_t image = 0; image < b.count; image++) {
        const float* row = from + r * b.Columns() + image * b.Positions();
        float* to = y + b.InY(image) + r * b.Positions();
        for (int64_t k = 0; k < b.Positions(); k++) to[k] = row[k] + add;
      }
    }
  });
}

// dy as a matrix (filters, columns).
void LoadResults(const Block& b, const float* dy, float* to) {
  ParallelFor(b.conv.GroupFilters(), RowGrain(b.Columns()), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++)
      for (int64_t image = 0; image < b.count; image++) {
        const float* from = dy + b.InY(image) + r * b.Positions();
        std::copy(from, from + b.Positions(), to + r * b.Columns() + image * b.Positions());
      }
  });
}

}  // namespace

int64_t Im2colImages(const Conv& conv) {
  const int64_t few = kIm2colColumns / std::max<int64_t>(Size(conv.out), 1);
  return std::clamp<int64_t>(few, 1, std::max<int64_t>(conv.n, 1));
}

void Im2colForward(const Conv& conv, const float* x, const float* f, const float* bias, float* y) {
  const int64_t filters = conv.GroupFilters();
  ForBlocks(conv, [&](const Block& b) {
    const ScratchArray<float> columns(b.K() * b.Columns()), results(filters * b.Columns());
    FillColumns(b, x, columns.data());
    RunGemm({filters,
             b.Columns(),
             b.K(),
             {f + b.group * filters * b.K(), b.K(), 1},
             {columns.data(), b.Columns(), 1},
             results.data()});
    StoreResults(b, results.data(), bias, y);
  });
}

void Im2colDataGradient(const Conv& conv, const float* f, const float* dy, float* dx) {
  const int64_t filters = conv.GroupFilters();
  ForBlocks(conv, [&](const Block& b) {
    const ScratchArray<float> columns(b.K() * b.Columns()), results(filters * b.Columns());
    LoadResults(b, dy, results.data());
    RunGemm({b.K(),
             b.Columns(),
             filters,
             {f + b.group * filters * b.K(), 1, b.K()},
             {results.data(), b.Columns(), 1},
             columns.data()});
    AddColumns(b, columns.data(), dx);
  });
}

void Im2colFilterGradient(const Conv& conv, const float* x, const float* dy, float* df) {
  const int64_t filters = conv.GroupFilters();
  ForBlocks(conv, [&](const Block& b) {
    const int64_t numel = filters * b.K();
    const bool only = b.count == conv.n;
    const ScratchArray<float> columns(b.K() * b.Columns()), results(filters * b.Columns());
    const ScratchArray<float> part(only ? 0 : numel);
    float* const to = df + b.group * numel;
    FillColumns(b, x, columns.data());
    LoadResults(b, dy, results.data());
    RunGemm({filters,
             b.K(),
             b.Columns(),
             {results.data(), b.Columns(), 1},
             {columns.data(), 1, b.Columns()},
             only ? to : part.data()});
    if (only) return;
    ParallelFor(numel, kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t k = begin; k < end; k++)
        to[k] = b.first ? to[k] + part.data()[k] : part.data()[k];
    });
  });
}

}  // namespace cpu
}  // namespace dlsys
