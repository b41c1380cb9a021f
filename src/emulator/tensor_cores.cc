// What tensor cores and tile copies do, in loops over each element. Kernels call these functions
// instead of inlining them, so that the loops are optimized whatever the kernels are compiled with.
#include <stdexcept>

#include "cuda/instructions/fp8.cuh"
#include "cuda/instructions/ptx.cuh"
#include "cuda/quantized/mma.cuh"

namespace dlsys {
namespace cuda {
namespace {

// The slots of this warp once each lane has shown its own factors.
template <class Factors>
emulator::Slots Shown(const Factors& mine) {
  static_assert(sizeof(Factors) <= emulator::kSlotNbytes, "they fit into a slot");
  return emulator::Exchange(&mine, sizeof mine);
}

// What a lane of mma.sync multiplies: row lane / 4 of A and the one 8 below it, and columns
// lane % 4 * 2 and the next one of B, whose elements lie in four lanes each, along the depth.
template <class T, int kDepth>
struct Lines {
  T a[2][kDepth], b[2][kDepth];
};

// A lane shows kOfWord neighbors along the depth in each word: of A the words of both rows in the
// first half of the depth, then in the second one, and of B one in each half.
template <class T, int kOfWord, class A, class B>
Lines<T, 8 * kOfWord> LinesOf(const A (&a)[4], const B (&b)[2]) {
  struct Factors {
    A a[4];
    B b[2];
  } mine;
  memcpy(mine.a, a, sizeof a);
  memcpy(mine.b, b, sizeof b);
  const emulator::Slots slots = Shown(mine);
  const int lane = emulator::Lane(), row = lane / 4, col = lane % 4 * 2;
  Lines<T, 8 * kOfWord> lines;
  for (int line = 0; line < 2; line++) {
    for (int quad = 0; quad < 4; quad++) {
      Factors left, right;
      memcpy(&left, slots[row * 4 + quad], sizeof left);
      memcpy(&right, slots[(col + line) * 4 + quad], sizeof right);
      for (int half = 0; half < 2; half++) {
        const int d = (half * 4 + quad) * kOfWord;
        memcpy(&lines.a[line][d], &left.a[line + half * 2], kOfWord * sizeof(T));
        memcpy(&lines.b[line][d], &right.b[half], kOfWord * sizeof(T));
      }
    }
  }
  return lines;
}

template <class T, int kDepth, class Sum>
void AddProductsOf(const T (&a)[2][kDepth], const T (&b)[2][kDepth], Sum (&sums)[4]) {
  for (int d = 0; d < kDepth; d++)
    for (int k = 0; k < 4; k++) sums[k] += (Sum)a[k / 2][d] * (Sum)b[k % 2][d];
}

}  // namespace

// ---- of a warp (mma.sync) ----

void MultiplyAddTf32(const float (&a)[4], const float (&b)[2], float (&sums)[4]) {
  float cut_a[4], cut_b[2];
  for (int k = 0; k < 4; k++) cut_a[k] = CutToTf32(a[k]);
  for (int k = 0; k < 2; k++) cut_b[k] = CutToTf32(b[k]);
  const auto lines = LinesOf<float, 1>(cut_a, cut_b);
  AddProductsOf(lines.a, lines.b, sums);
}

template <class T>
void MultiplyAdd16Bit(const uint32_t (&a)[4], const uint32_t (&b)[2], float (&sums)[4]) {
  const auto lines = LinesOf<T, 2>(a, b);
  float wide_a[2][16], wide_b[2][16];
  for (int line = 0; line < 2; line++) {
    for (int d = 0; d < 16; d++) {
      wide_a[line][d] = (float)lines.a[line][d];
      wide_b[line][d] = (float)lines.b[line][d];
    }
  }
  AddProductsOf(wide_a, wide_b, sums);
}

void MultiplyAddBytes(const uint32_t (&a)[4], const uint32_t (&b)[2], int32_t (&sums)[4]) {
  const auto lines = LinesOf<uint8_t, 4>(a, b);
  for (int k = 0; k < 4; k++) {
    int32_t sum = 0;
    for (int d = 0; d < 32; d++) sum += lines.a[k / 2][d] * (int8_t)lines.b[k % 2][d];
    sums[k] += sum;
  }
}

template <bool kTransposed>
void LoadMatrices(const void* row, uint32_t (&words)[4]) {
  const int lane = emulator::Lane();
  const emulator::Slots slots = Shown(row);
  for (int k = 0; k < 4; k++) {
    uint32_t word = 0;
    for (int half = 0; half < 2; half++) {
      const int i = lane / 4, j = lane % 4 * 2 + half;
      const uint16_t* from;
      memcpy(&from, slots[8 * k + (kTransposed ? j : i)], sizeof from);
      word |= (uint32_t)from[kTransposed ? i : j] << 16 * half;
    }
    words[k] = word;
  }
  emulator::MeetWarp();  // what the lanes do to the rows comes behind this
}
template void LoadMatrices<false>(const void*, uint32_t (&)[4]);
template void LoadMatrices<true>(const void*, uint32_t (&)[4]);

namespace hopper {

void StoreMatrices(uint32_t to, const uint32_t (&x)[4]) {
  const int lane = emulator::Lane();
  const emulator::Slots slots = Shown(to);
  for (int k = 0; k < 4; k++) {
    uint32_t row;
    memcpy(&row, slots[k * 8 + lane / 4], sizeof row);
    memcpy(emulator::SharedAt(row + lane % 4 * 4), &x[k], sizeof x[k]);
  }
}

// ---- of a warpgroup (wgmma) ----

namespace {

// The elements of an operand along K, which are 32 bytes, at one of its rows, or where it lies
// across, at a column of its boxes.
template <class T>
struct Operand {
  static constexpr int kDepth = 32 / sizeof(T), kOfBox = 128 / sizeof(T);

  Operand(uint64_t descriptor, bool across) : across(across) {
    const auto field = [&](int bit) { return (uint32_t)(descriptor >> bit & 0x3FFF) << 4; };
    start = field(0), leading = field(16), stride = field(32);
    zero = (const char*)emulator::SharedAt(start) - start;
  }
  const T* At(int row, int k) const {
    const uint32_t at =
        across ? row / kOfBox * leading + k / 8 * stride + k % 8 * 128 + row % kOfBox * sizeof(T)
               : row / 8 * stride + row % 8 * 128 + k * sizeof(T);
    return (const T*)(zero + Swizzled(start + at));
  }

  bool across;
  uint32_t start, leading, stride;
  const char* zero;  // of its addresses
};

template <class T>
float Widened(T x) {
  return sizeof(T) == 4 ? CutToTf32((float)x) : (float)x;
}

constexpr int kMostBlocks = 32;  // of 8 columns

// Those of B at the two columns of each block that are this thread's, by k. The swizzle moves
// pieces of 16 bytes, in which neighbors stay together.
template <class T>
void ReadColumns(const Operand<T>& b, int blocks, T (*to)[2 * kMostBlocks]) {
  constexpr int kDepth = Operand<T>::kDepth, kOfPiece = 16 / sizeof(T);
  const int first = (int)threadIdx.x % 4 * 2;
  for (int j = 0; j < blocks; j++) {
    if (b.across) {
      for (int k = 0; k < kDepth; k++) memcpy(&to[k][2 * j], b.At(j * 8 + first, k), 2 * sizeof(T));
      continue;
    }
    for (int e = 0; e < 2; e++) {
      T column[kDepth];
      for (int k = 0; k < kDepth; k += kOfPiece) memcpy(&column[k], b.At(j * 8 + first + e, k), 16);
      for (int k = 0; k < kDepth; k++) to[k][2 * j + e] = column[k];
    }
  }
}

}  // namespace

template <class T>
void AddProducts(float (*sums)[4], int blocks, const OfA<T>& a, uint64_t b, bool across,
                 bool accumulate) {
  constexpr int kDepth = Operand<T>::kDepth, kMost = 2 * kMostBlocks;
  T columns[kDepth][kMost];
  ReadColumns(Operand<T>(b, across), blocks, columns);
  float products[2][kMost] = {};
  for (int k = 0; k < kDepth; k++) {
    float of_b[kMost];
    for (int c = 0; c < 2 * blocks; c++) of_b[c] = Widened(columns[k][c]);
    for (int half = 0; half < 2; half++)
      for (int c = 0; c < 2 * blocks; c++) products[half][c] += a.rows[half][k] * of_b[c];
  }
  for (int j = 0; j < blocks; j++) {
    for (int k = 0; k < 4; k++) {
      const float product = products[k / 2][2 * j + k % 2];
      sums[j][k] = accumulate ? sums[j][k] + product : product;
    }
  }
}

template <class T>
OfA<T> ReadRows(uint64_t a, bool across) {
  const int thread = (int)threadIdx.x % 128, row = thread / 32 * 16 + thread % 32 / 4;
  const Operand<T> operand(a, across);
  OfA<T> of_a;
  for (int half = 0; half < 2; half++)
    for (int k = 0; k < Operand<T>::kDepth; k++)
      of_a.rows[half][k] = Widened(*operand.At(row + half * 8, k));
  return of_a;
}

template <class T>
OfA<T> ShownRows(const uint32_t (&a)[4]) {
  constexpr int kOfWord = 4 / sizeof(T);
  const emulator::Slots slots = Shown(a);
  OfA<T> of_a;
  for (int word = 0; word < 8; word++) {
    uint32_t words[4];
    memcpy(words, slots[emulator::Lane() / 4 * 4 + word % 4], sizeof words);
    for (int half = 0; half < 2; half++) {
      T x[kOfWord];
      memcpy(x, &words[word / 4 * 2 + half], sizeof x);
      for (int k = 0; k < kOfWord; k++) of_a.rows[half][word * kOfWord + k] = Widened(x[k]);
    }
  }
  return of_a;
}

#define DLSYS_WARPGROUP_PRODUCTS(T)                                                  \
  template void AddProducts(float (*)[4], int, const OfA<T>&, uint64_t, bool, bool); \
  template OfA<T> ReadRows(uint64_t, bool);
DLSYS_WARPGROUP_PRODUCTS(float)
DLSYS_WARPGROUP_PRODUCTS(bfloat16)
DLSYS_WARPGROUP_PRODUCTS(float16)
DLSYS_WARPGROUP_PRODUCTS(e4m3)
DLSYS_WARPGROUP_PRODUCTS(e5m2)
template OfA<float> ShownRows(const uint32_t (&)[4]);
template OfA<bfloat16> ShownRows(const uint32_t (&)[4]);
template OfA<float16> ShownRows(const uint32_t (&)[4]);

// ---- tile copies (TMA) ----

namespace {

// The coordinates of a pixel of an image map from one on, as many positions further as `count`.
Coordinates PixelAt(const CUtensorMap& map, const Coordinates& from, uint32_t count,
                    const Distances& by) {
  int64_t carry = count;
  Coordinates at = from;
  for (int k = 0; k < 2; k++) {
    const int distance = from[k + 1] - map.first[k], step = (int)map.step[k];
    if (distance < 0 || distance % step || distance / step >= (int)map.count[k])
      throw std::logic_error("a pixel copy begins at no position of its map");
    carry += distance / step;
    at[k + 1] = map.first[k] + (int)(carry % map.count[k]) * step + by[k];
    carry /= map.count[k];
  }
  at[3] += (int)carry;
  return at;
}

// Calls f with each element of a box that lies inside of the array, and with null for the rest, and
// with its swizzled address in shared memory. `by` is of image maps.
template <class F>
void ForBox(const CUtensorMap& map, uint32_t shared, const Coordinates& origin, const Distances& by,
            F&& f) {
  if (map.swizzled && origin[0] * map.size % 16)  // an H200 finds the instruction illegal
    throw std::logic_error("a swizzled copy begins at no multiple of 16 bytes of its rows");
  uint32_t address = shared;
  for (uint32_t line = 0; line < map.box[1] * map.box[2]; line++) {
    const uint32_t of[4] = {0, line % map.box[1], line / map.box[1], 0};
    const Coordinates pixel = map.count[0] ? PixelAt(map, origin, of[1], by) : Coordinates{};
    char* begin = map.data;
    bool inside = true;
    for (int k = 1; k < map.dimensions; k++) {
      const int64_t index = map.count[0] ? pixel[k] : origin[k] + (int64_t)of[k];
      inside &= index >= 0 && index < (int64_t)map.extents[k];
      begin += index * (int64_t)map.strides[k];
    }
    for (uint32_t x = 0; x < map.box[0]; x++, address += (uint32_t)map.size) {
      const int64_t index = origin[0] + (int64_t)x;
      const bool within = inside && index >= 0 && index < (int64_t)map.extents[0];
      char* const element = within ? begin + index * (int64_t)map.strides[0] : nullptr;
      f(element, map.swizzled ? Swizzled(address) : address);
    }
  }
}

void Copy(void* to, const void* from, int nbytes) {
  nbytes == 4 ? memcpy(to, from, 4) : nbytes == 2 ? memcpy(to, from, 2) : memcpy(to, from, nbytes);
}

}  // namespace

void LoadBoxAt(uint32_t to, const CUtensorMap* map, uint32_t barrier, const Coordinates& at,
               bool multicast, const Distances& by) {
  const int rank = emulator::ClusterRank();
  emulator::Background([=, map = *map] {
    const int first = multicast ? 0 : rank, last = multicast ? 1 : rank;
    for (int peer = first; peer <= last; peer++) {
      char* const zero = (char*)emulator::SharedAt(to, peer) - to;
      ForBox(map, to, at, by, [&](const char* from, uint32_t address) {
        char* element = zero + address;
        if (from)
          Copy(element, from, map.size);
        else
          memset(element, 0, map.size);
        if (map.rounds) *(float*)element = CutToTf32(RoundedToTf32(*(float*)element));
      });
      CountBytes(barrier, peer, -(int)(map.box[0] * map.box[1] * map.box[2] * map.size));
    }
  });
}

void StoreBox(const CUtensorMap* map, uint32_t from, int x, int y, int z, int w) {
  emulator::Begin(emulator::Unit::kStores, [=, map = *map] {
    ForBox(map, from, {x, y, z, w}, {}, [&](char* to, uint32_t address) {
      if (to) Copy(to, emulator::SharedAt(address), map.size);
    });
  });
}

}  // namespace hopper

template void MultiplyAdd16Bit<bfloat16>(const uint32_t (&)[4], const uint32_t (&)[2],
                                         float (&)[4]);
template void MultiplyAdd16Bit<float16>(const uint32_t (&)[4], const uint32_t (&)[2], float (&)[4]);

}  // namespace cuda
}  // namespace dlsys
