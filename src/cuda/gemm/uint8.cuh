// GEMM with one uint8 operand on tensor cores. The operand stays uint8 in shared memory, a quarter
// of its size as floats, and is converted as fragments are loaded (WithU8), or once a panel
// (UnpackedU8, weight gradients at fp32); tf32 and bfloat16 hold 0 to 255
// exactly. The dequantization scale multiplies the finished sums.
//
// At tf32 the other operand is rounded. At fp32 it is the sum of three numbers of bfloat16, whose
// 8 bits each are all 24 of a float32: every product is exact, and sums are of float32. That is
// three mma.sync of twice the depth, which is still far less than FFMA takes.
//
// In WithU8 a lane loads adjacent bytes together, so its fragments are a permutation of what
// mma.sync expects: either the same permutation of K in both operands, or one of M (or N) that
// Store undoes.
#pragma once
#include <type_traits>

#include "cuda/gemm/tile.cuh"

namespace dlsys {
namespace cuda {

// The uint8 counterpart of Panel.
template <int kExtent, int kTileK, int kThreads, bool kKMajor, int kSlices = 1>
class U8Panel {
  static constexpr int kStrided = (kKMajor ? kExtent : kTileK) / kSlices;  // of a slice
  static constexpr int kContiguous = kKMajor ? kTileK : kExtent;

 public:
  // The lanes of a warp read words of 8 rows, or of 4 k, without bank conflicts.
  static constexpr int kPitch = kKMajor ? kTileK + 16 : kExtent % 64 ? 32 : kExtent + 32;
  static constexpr int kNumel = kPitch * kSlices * kStrided / (int)sizeof(float);
  static constexpr bool kHasSums = false;

  __device__ U8Panel(const float* matrix, int64_t extent, int64_t ld, int64_t origin, int64_t k)
      : ld_(ld), valid_((int)min(extent - origin, (int64_t)kExtent)) {
    from_ = (const uint8_t*)matrix + (kKMajor ? (origin + Strided(0)) * ld + k + Contiguous()
                                              : (k + Strided(0)) * ld + origin + Contiguous());
  }

  // Issues the copy of the next panel, of which k elements remain along K.
  __device__ __forceinline__ void Copy(float* to, int k, bool aligned) {
#pragma unroll
    for (int q = 0; q < kChunks; q++) {
      if (kUneven && InSlice(q) >= kStrided) break;
      if (!kKMajor && Contiguous() >= valid_) break;
      const uint8_t* from = from_ + q * kStridedStep * ld_;
      uint8_t* at = (uint8_t*)to + Strided(q) * kPitch + Contiguous();
      const int valid =
          Strided(q) < (kKMajor ? valid_ : k) ? (kKMajor ? k : valid_) - Contiguous() : 0;
      if (aligned) {
        CopyAsync16((float*)at, (const float*)from, valid > 0);
      } else {
#pragma unroll 1
        for (int e = 0; e < kChunk; e++) at[e] = e < valid ? from[e] : 0;
      }
    }
    from_ += kKMajor ? kTileK : kTileK * ld_;
  }

  // kCount adjacent elements from (mn, k) on, along K if K-major, else along M (or N).
  template <int kCount>
  static __device__ __forceinline__ void Read(const float* panel, int mn, int k,
                                              float (&to)[kCount]) {
    const uint8_t* at = (const uint8_t*)panel + (kKMajor ? mn * kPitch + k : k * kPitch + mn);
    unsigned word;
    if constexpr (kCount == 4)
      word = *(const unsigned*)at;
    else
      word = *(const uint16_t*)at;
#pragma unroll
    for (int e = 0; e < kCount; e++) to[e] = ByteToFloat(word, e);
  }

 private:
  static constexpr int kChunk = 16;
  static constexpr int kInRow = kContiguous / kChunk;
  static constexpr int kSliceThreads = kThreads / kSlices;
  static constexpr int kStridedStep = kSliceThreads / kInRow;
  static constexpr int kChunks = CeilDiv32(kStrided, kStridedStep);
  static constexpr bool kUneven = kStrided % kStridedStep != 0;
  static_assert(kStridedStep * kInRow == kSliceThreads, "the threads copy whole rows");

  static __device__ __forceinline__ int InSlice(int q) {
    const int thread = kSlices > 1 ? (int)threadIdx.x % kSliceThreads : (int)threadIdx.x;
    return thread / kInRow + q * kStridedStep;
  }
  static __device__ __forceinline__ int Strided(int q) {
    return (kSlices > 1 ? (int)threadIdx.x / kSliceThreads * kStrided : 0) + InSlice(q);
  }
  static __device__ __forceinline__ int Contiguous() { return (int)threadIdx.x % kInRow * kChunk; }

  const uint8_t* from_;
  int64_t ld_;
  int valid_;  // how much of kExtent the matrix has here
};

// Panel of the float operand; kKPairs: lanes read two adjacent k.
template <int kExtent, class T, bool kKMajor, bool kKPairs>
using FloatPanel =
    Panel<kExtent, T::kTileK, T::kThreads, kKMajor, kKMajor == kKPairs ? 8 : 4, T::kApart>;

// The first 8 bits of a float, a number of bfloat16.
__device__ __forceinline__ float FirstBits(float x) {
  return __uint_as_float(__float_as_uint(x) & 0xffff0000u);
}

// Two floats as numbers of bfloat16, which leave out what is below their first 8 bits: the upper
// halves of both in a word.
__device__ __forceinline__ uint32_t CutToBfloat16(const float (&x)[2]) {
  return __byte_perm(__float_as_uint(x[0]), __float_as_uint(x[1]), 0x7632);
}

// What CutToBfloat16 leaves out of a float; of infinities and NaNs, whose parts must not differ,
// nothing.
__device__ __forceinline__ float BelowBfloat16(float x) {
  return fabsf(FirstBits(x)) < INFINITY ? x - FirstBits(x) : 0.f;
}

// The three numbers of bfloat16 whose sum a float is, of two floats: the first 8 bits, the next,
// the last.
__device__ __forceinline__ void SplitToBfloat16(const float (&x)[2], uint32_t (&words)[3]) {
  const float below[2] = {BelowBfloat16(x[0]), BelowBfloat16(x[1])};
  const float last[2] = {below[0] - FirstBits(below[0]), below[1] - FirstBits(below[1])};
  words[0] = CutToBfloat16(x), words[1] = CutToBfloat16(below), words[2] = CutToBfloat16(last);
}

// The accumulators for one uint8 operand: at tf32, or with kExact at fp32.
template <U8Operand kU8, bool kExact>
struct WithU8 {
  static constexpr bool kAIsU8 = kU8 == U8Operand::kA;

  template <class T, bool kTransA, bool kTransB>
  class Accumulator {
    using Warp = WarpTile<T, kTransA, kTransB>;
    static constexpr int kMmaM = T::kWarpM / 16, kMmaN = T::kWarpN / 8;
    static constexpr int kParts = 3;  // of a float, which together are all of it
    // M- or N-major bytes: a lane takes adjacent rows (columns). K-major: two adjacent k at a time,
    // at which it reads the float operand too.
    static constexpr bool kKPairs = kAIsU8 ? !kTransA : kTransB;
    // Adjacent rows (columns) per lane; two rows, for four would cause bank conflicts in Store.
    static constexpr int kVector = kAIsU8 || kMmaN < 4 ? 2 : 4;

   public:
    using PanelA =
        std::conditional_t<kAIsU8, U8Panel<T::kTileM, T::kTileK, T::kThreads, !kTransA, T::kApart>,
                           FloatPanel<T::kTileM, T, !kTransA, kKPairs>>;
    using PanelB =
        std::conditional_t<kAIsU8, FloatPanel<T::kTileN, T, kTransB, kKPairs>,
                           U8Panel<T::kTileN, T::kTileK, T::kThreads, kTransB, T::kApart>>;

    __device__ explicit Accumulator(const Gemm& gemm) : scale_(*gemm.scale) {}

    template <class F>
    __device__ __forceinline__ void Add(const float* a, const float* b, int k, F&& overlap) {
      overlap();
      if constexpr (kExact)
        AddExactly(a, b, k);
      else
        AddRounded(a, b, k);
    }

    // Stores the accumulators to the tile in shared memory, or adds them to it.
    __device__ __forceinline__ void Store(float* tile, bool add) const {
#pragma unroll
      for (int r = 0; r < 2 * kMmaM; r++) {
        const int group = warp_.lane / 4, next = warp_.lane % 4 * 2;
        const int row = warp_.row + (kAIsU8 ? MnOffset(r, group) : 8 * r + group);
        float* to = tile + row * T::kTilePitch + warp_.col;
        if constexpr (kAIsU8) {
#pragma unroll
          for (int j = 0; j < kMmaN; j++) Put(to + 8 * j + next, {At(r, j, 0), At(r, j, 1)}, add);
        } else {
          // Even and odd rows store opposite halves first, which lie in different banks.
          const int odd = group % 2;
#pragma unroll
          for (int j = 0; j < kMmaN; j += kVector)
#pragma unroll
            for (int half = 0; half < 2; half++) {
              float x[kVector];
#pragma unroll
              for (int n = 0; n < kVector; n++)
                x[n] = odd == half ? At(r, j + n, 0) : At(r, j + n, 1);
              Put(to + MnOffset(j, next + (odd ^ half)), x, add);
            }
        }
      }
    }

   private:
    __device__ __forceinline__ void AddRounded(const float* a, const float* b, int k) {
#pragma unroll
      for (int step = 0; step < T::kSliceK; step += 8) {
        float frag_a[2 * kMmaM][2], frag_b[kMmaN][2];  // two k each
        Read(a, b, k + step, frag_a, frag_b);
#pragma unroll
        for (int i = 0; i < kMmaM; i++) {
          const float a16x8[4] = {frag_a[2 * i][0], frag_a[2 * i + 1][0], frag_a[2 * i][1],
                                  frag_a[2 * i + 1][1]};
#pragma unroll
          for (int j = 0; j < kMmaN; j++) MultiplyAddTf32(a16x8, frag_b[j], sums_[i][j]);
        }
      }
    }

    // mma.sync m16n8k16: a word is a lane's two k of eight. Where a slice is eight deep, the other
    // eight are zero. The parts below the first have sums of their own, to which the first would
    // leave less room.
    __device__ __forceinline__ void AddExactly(const float* a, const float* b, int k) {
      constexpr int kDepth = T::kSliceK % 16 == 0 ? 16 : 8;
      constexpr int kPartsA = kAIsU8 ? 1 : kParts, kPartsB = kAIsU8 ? kParts : 1;
#pragma unroll(T::kResident > 1 ? 1 : 2)  // for want of registers
      for (int step = 0; step < T::kSliceK; step += kDepth) {
        uint32_t words_a[kPartsA][kMmaM][4] = {}, words_b[kPartsB][kMmaN][2] = {};
#pragma unroll
        for (int half = 0; half < kDepth / 8; half++) {
          float frag_a[2 * kMmaM][2], frag_b[kMmaN][2];
          Read(a, b, k + step + 8 * half, frag_a, frag_b);
#pragma unroll
          for (int r = 0; r < 2 * kMmaM; r++)
            SplitTo<kPartsA>(frag_a[r], [&](int part) -> uint32_t& {
              return words_a[part][r / 2][2 * half + r % 2];
            });
#pragma unroll
          for (int j = 0; j < kMmaN; j++)
            SplitTo<kPartsB>(frag_b[j],
                             [&](int part) -> uint32_t& { return words_b[part][j][half]; });
        }
#pragma unroll
        for (int part = kParts - 1; part >= 0; part--)
#pragma unroll
          for (int i = 0; i < kMmaM; i++)
#pragma unroll
            for (int j = 0; j < kMmaN; j++)
              MultiplyAdd16Bit<bfloat16>(words_a[part % kPartsA][i], words_b[part % kPartsB][j],
                                         part ? low_sums_[i][j] : sums_[i][j]);
      }
    }

    // The first of the parts of two floats to the words that `word` returns.
    template <int kCount, class F>
    static __device__ __forceinline__ void SplitTo(const float (&x)[2], F&& word) {
      uint32_t words[kParts];
      SplitToBfloat16(x, words);
#pragma unroll
      for (int part = 0; part < kCount; part++) word(part) = words[part];
    }

    // The lane's fragments of A and B at eight k.
    __device__ __forceinline__ void Read(const float* a, const float* b, int k,
                                         float (&frag_a)[2 * kMmaM][2],
                                         float (&frag_b)[kMmaN][2]) const {
      if constexpr (kAIsU8) {
        ReadU8<PanelA>(a, warp_.row, k, frag_a);
        ReadFloats<PanelB, kTransB>(b, warp_.col, k, frag_b);
      } else {
        ReadFloats<PanelA, !kTransA>(a, warp_.row, k, frag_a);
        ReadU8<PanelB>(b, warp_.col, k, frag_b);
      }
    }

    // Row (column) within the warp's tile of fragment element `index` of lane group `group`.
    static __device__ __forceinline__ int MnOffset(int index, int group) {
      if constexpr (kKPairs)
        return 8 * index + group;
      else
        return index / kVector * 8 * kVector + group * kVector + index % kVector;
    }

    template <class P, int kCount>
    __device__ __forceinline__ void ReadU8(const float* panel, int origin, int k0,
                                           float (&to)[kCount][2]) const {
      const int group = warp_.lane / 4, thread = warp_.lane % 4;
      if constexpr (kKPairs) {
#pragma unroll
        for (int i = 0; i < kCount; i++)
          P::template Read<2>(panel, origin + 8 * i + group, k0 + 2 * thread, to[i]);
      } else {
#pragma unroll
        for (int i = 0; i < kCount; i += kVector)
#pragma unroll
          for (int e = 0; e < 2; e++) {
            float x[kVector];
            P::template Read<kVector>(panel, origin + MnOffset(i, group), k0 + thread + 4 * e, x);
#pragma unroll
            for (int n = 0; n < kVector; n++) to[i + n][e] = x[n];
          }
      }
    }

    template <class P, bool kKMajor, int kCount>
    __device__ __forceinline__ void ReadFloats(const float* panel, int origin, int k0,
                                               float (&to)[kCount][2]) const {
      const int group = warp_.lane / 4, k = k0 + warp_.lane % 4 * (kKPairs ? 2 : 1);
#pragma unroll
      for (int i = 0; i < kCount; i++) {
        const int mn = origin + 8 * i + group;
        float2 x;
        if constexpr (kKPairs && kKMajor)
          x = *(const float2*)&P::At(panel, mn, k);
        else
          x = make_float2(P::At(panel, mn, k), P::At(panel, mn, k + (kKPairs ? 1 : 4)));
        to[i][0] = kExact ? x.x : RoundedToTf32(x.x), to[i][1] = kExact ? x.y : RoundedToTf32(x.y);
      }
    }

    // The accumulator of the lane's row r and column 2 * j + e, scaled.
    __device__ __forceinline__ float At(int r, int j, int e) const {
      const float sum = sums_[r / 2][j][r % 2 * 2 + e];
      return scale_ * (kExact ? sum + low_sums_[r / 2][j][r % 2 * 2 + e] : sum);
    }

    static __device__ __forceinline__ void Put(float* to, const float (&x)[2], bool add) {
      const float2 old = add ? *(const float2*)to : make_float2(0.f, 0.f);
      *(float2*)to = make_float2(old.x + x[0], old.y + x[1]);
    }
    static __device__ __forceinline__ void Put(float* to, const float (&x)[4], bool add) {
      const float4 old = add ? *(const float4*)to : make_float4(0.f, 0.f, 0.f, 0.f);
      StoreQuad(to, old.x + x[0], old.y + x[1], old.z + x[2], old.w + x[3]);
    }

    Warp warp_;
    const float scale_;
    float sums_[kMmaM][kMmaN][4] = {}, low_sums_[kMmaM][kMmaN][4] = {};
  };
};

// The accumulators for weight gradients of uint8 activations at fp32: both operands lie (k, mn).
// All threads unpack each panel into numbers of bfloat16 in shared memory, from where warps load
// whole fragments: what several warps read is converted once.
template <U8Operand kU8>
struct UnpackedU8 {
  static constexpr bool kAIsU8 = kU8 == U8Operand::kA;
  static constexpr int kParts = 3;  // of a float, which together are all of it
  static constexpr int kPartsA = kAIsU8 ? 1 : kParts, kPartsB = kAIsU8 ? kParts : 1;

  template <class T, bool kTransA, bool kTransB>
  class Accumulator {
    static_assert(kTransA && !kTransB && T::kSlices == 1, "panels are (k, mn), warps share them");
    static constexpr int kMmaM = T::kWarpM / 16, kMmaN = T::kWarpN / 8;
    // Rows, each a multiple of 16 bytes, fall in different banks.
    static constexpr int kPitchA = T::kTileM + 8, kPitchB = T::kTileN + 8;
    static constexpr int kNumelA = T::kTileK * kPitchA, kNumelB = T::kTileK * kPitchB;

   public:
    using PanelA = std::conditional_t<kAIsU8, U8Panel<T::kTileM, T::kTileK, T::kThreads, false>,
                                      Panel<T::kTileM, T::kTileK, T::kThreads, false>>;
    using PanelB = std::conditional_t<kAIsU8, Panel<T::kTileN, T::kTileK, T::kThreads, false>,
                                      U8Panel<T::kTileN, T::kTileK, T::kThreads, false>>;
    // Shared memory in floats: the stages, then an unpacked panel.
    static constexpr int kStagesNumel = T::kStages * (PanelA::kNumel + PanelB::kNumel);
    static constexpr int kNumel = kStagesNumel + (kPartsA * kNumelA + kPartsB * kNumelB) / 2;

    __device__ explicit Accumulator(const Gemm& gemm)
        : scale_(*gemm.scale),
          a_((uint16_t*)(DynamicShared<float>() + kStagesNumel)),
          b_(a_ + kPartsA * kNumelA) {}

    template <class F>
    __device__ __forceinline__ void Add(const float* a, const float* b, int, F&& overlap) {
      overlap();
      if constexpr (kAIsU8) {
        UnpackBytes<PanelA, T::kTileM>(a, a_);
        UnpackFloats<PanelB, T::kTileN>(b, b_);
      } else {
        UnpackFloats<PanelA, T::kTileM>(a, a_);
        UnpackBytes<PanelB, T::kTileN>(b, b_);
      }
      __syncthreads();
      const int lane = warp_.lane;
      const uint16_t* from_a =
          a_ + (lane % 8 + lane / 16 * 8) * kPitchA + warp_.row + lane / 8 % 2 * 8;
      const uint16_t* from_b = b_ + lane % 16 * kPitchB + warp_.col + lane / 16 * 8;
#pragma unroll
      for (int k = 0; k < T::kTileK; k += 16) {
        uint32_t words_a[kPartsA][kMmaM][4], words_b[kPartsB][kMmaN / 2][4];
#pragma unroll
        for (int part = 0; part < kPartsA; part++)
#pragma unroll
          for (int i = 0; i < kMmaM; i++)
            LoadMatrices<true>(from_a + part * kNumelA + k * kPitchA + 16 * i, words_a[part][i]);
#pragma unroll
        for (int part = 0; part < kPartsB; part++)
#pragma unroll
          for (int j = 0; j < kMmaN / 2; j++)
            LoadMatrices<true>(from_b + part * kNumelB + k * kPitchB + 16 * j, words_b[part][j]);
#pragma unroll
        for (int part = kParts - 1; part >= 0; part--)
#pragma unroll
          for (int i = 0; i < kMmaM; i++)
#pragma unroll
            for (int j = 0; j < kMmaN; j++) {
              const uint32_t* words = words_b[part % kPartsB][j / 2] + j % 2 * 2;
              const uint32_t b16x8[2] = {words[0], words[1]};
              MultiplyAdd16Bit<bfloat16>(words_a[part % kPartsA][i], b16x8,
                                         part ? low_sums_[i][j] : sums_[i][j]);
            }
      }
    }

    // Stores the accumulators to the tile in shared memory.
    __device__ __forceinline__ void Store(float* tile, bool) const {
#pragma unroll
      for (int i = 0; i < kMmaM; i++)
#pragma unroll
        for (int j = 0; j < kMmaN; j++)
#pragma unroll
          for (int half = 0; half < 2; half++) {
            const int row = warp_.row + 16 * i + 8 * half + warp_.lane / 4;
            const auto at = [&](int e) {
              return scale_ * (sums_[i][j][2 * half + e] + low_sums_[i][j][2 * half + e]);
            };
            *(float2*)(tile + row * T::kTilePitch + warp_.col + 8 * j + warp_.lane % 4 * 2) =
                make_float2(at(0), at(1));
          }
    }

   private:
    // Eight bytes a thread at a time.
    template <class P, int kExtent>
    static __device__ __forceinline__ void UnpackBytes(const float* panel, uint16_t* to) {
      constexpr int kInRow = kExtent / 8, kStep = T::kThreads / kInRow;
      const int mn = threadIdx.x % kInRow * 8;
#pragma unroll
      for (int k = threadIdx.x / kInRow; k < T::kTileK; k += kStep) {
        const float2 v = *(const float2*)((const uint8_t*)panel + k * P::kPitch + mn);
        float words[4];
#pragma unroll
        for (int w = 0; w < 4; w++) {
          const unsigned bytes = __float_as_uint(w < 2 ? v.x : v.y);
          const float x[2] = {ByteToFloat(bytes, w % 2 * 2), ByteToFloat(bytes, w % 2 * 2 + 1)};
          words[w] = __uint_as_float(CutToBfloat16(x));
        }
        StoreQuad((float*)(to + k * (kExtent + 8) + mn), words[0], words[1], words[2], words[3]);
      }
    }

    // Four floats a thread at a time.
    template <class P, int kExtent>
    static __device__ __forceinline__ void UnpackFloats(const float* panel, uint16_t* to) {
      constexpr int kInRow = kExtent / 4, kStep = T::kThreads / kInRow;
      const int mn = threadIdx.x % kInRow * 4;
#pragma unroll
      for (int k = threadIdx.x / kInRow; k < T::kTileK; k += kStep) {
        const float4 v = *(const float4*)&P::At(panel, mn, k);
        const float left[2] = {v.x, v.y}, right[2] = {v.z, v.w};
        uint32_t of_left[kParts], of_right[kParts];
        SplitToBfloat16(left, of_left);
        SplitToBfloat16(right, of_right);
#pragma unroll
        for (int part = 0; part < kParts; part++)
          *(float2*)(to + (part * T::kTileK + k) * (kExtent + 8) + mn) =
              make_float2(__uint_as_float(of_left[part]), __uint_as_float(of_right[part]));
      }
    }

    WarpTile<T, kTransA, kTransB> warp_;
    const float scale_;
    uint16_t *const a_, *const b_;
    float sums_[kMmaM][kMmaN][4] = {}, low_sums_[kMmaM][kMmaN][4] = {};
  };
};

// Shared memory of tiles whose A, or whose B, is of bytes.
template <class OfU8A, class OfU8B>
constexpr size_t kUnpackedNbytes =
    sizeof(float) * std::max(UnpackedU8<U8Operand::kA>::Accumulator<OfU8A, true, false>::kNumel,
                             UnpackedU8<U8Operand::kB>::Accumulator<OfU8B, true, false>::kNumel);

// Tiles of GEMMs in one launch at fp32: of floats, by FFMA, and of those whose A, or whose B, is of
// bytes, by tensor cores, which take a fraction of the time for an element. Two of the first tiles
// are resident together, and two of the last, for GEMMs of more floats; the second ones are for
// many or large GEMMs of floats, the third ones for GPUs whose blocks cannot have the shared memory
// of the others.
struct SmallMixedTiling {
  using OfFloats = Tiling<32, 32, 4, 4, 4, 32, 5>;
  using OfU8A = Tiling<128, 64, 1, 8, 4, 64, 2>;
  using OfU8B = Tiling<64, 128, 1, 8, 4, 64, 2>;
  static constexpr size_t kNbytes = kUnpackedNbytes<OfU8A, OfU8B>;
};
struct LargeMixedTiling {
  using OfFloats = Tiling<64, 64, 4, 8, 8, 32, 3>;
  using OfU8A = SmallMixedTiling::OfU8A;
  using OfU8B = SmallMixedTiling::OfU8B;
  static constexpr size_t kNbytes = kUnpackedNbytes<OfU8A, OfU8B>;
};
struct PortableMixedTiling {
  using OfFloats = SmallMixedTiling::OfFloats;
  using OfU8A = Tiling<128, 64, 1, 8, 4, 32, 2>;
  using OfU8B = Tiling<64, 128, 1, 8, 4, 32, 2>;
  static constexpr size_t kNbytes = kUnpackedNbytes<OfU8A, OfU8B>;
};
struct MediumMixedTiling {
  using OfFloats = Tiling<64, 32, 4, 8, 4, 32, 4>;
  using OfU8A = SmallMixedTiling::OfU8A;
  using OfU8B = SmallMixedTiling::OfU8B;
  static constexpr size_t kNbytes = kUnpackedNbytes<OfU8A, OfU8B>;
};
using MixedTilings =
    std::tuple<SmallMixedTiling, LargeMixedTiling, PortableMixedTiling, MediumMixedTiling>;

}  // namespace cuda
}  // namespace dlsys
