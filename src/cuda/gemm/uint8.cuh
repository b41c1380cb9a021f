// A factor of bytes on its way through tensor cores: it lies in shared memory as bytes, a quarter
// of its floats, and becomes whole numbers where a thread takes them to its registers, which tf32
// holds exactly. What a byte counts as, a scale, multiplies the finished sums.
//
// A lane reads neighbours together, so that what it holds are other rows, columns or layers than
// those that the instruction has in mind: the same for both factors, or put right where sums are
// stored.
#pragma once
#include <type_traits>

#include "cuda/gemm/tile.cuh"

namespace dlsys {
namespace cuda {

// Panels of bytes as Panel has them of floats.
template <int kWidth, int kDepth, int kThreads, bool kDepthFastest>
class BytePanel {
  static constexpr int kSlow = kDepthFastest ? kWidth : kDepth;
  static constexpr int kFast = kDepthFastest ? kDepth : kWidth;

 public:
  // What the lanes of a warp read lies in banks of its own: words of 8 rows, or of 4 layers.
  static constexpr int kPitch = kDepthFastest ? kDepth + 16 : kWidth % 64 ? 32 : kWidth + 32;
  static constexpr int kNumel = kPitch * kSlow / (int)sizeof(float);
  static constexpr bool kHasSums = false;

  __device__ BytePanel(const float* matrix, int64_t width, int64_t pitch, int64_t origin,
                       int64_t depth)
      : pitch_(pitch), room_((int)min(width - origin, (int64_t)kWidth)) {
    from_ = (const uint8_t*)matrix + (kDepthFastest ? (origin + Slow(0)) * pitch + depth + Fast()
                                                    : (depth + Slow(0)) * pitch + origin + Fast());
  }

  // Begins to copy the next panel, of which `depth` layers exist.
  __device__ __forceinline__ void Copy(float* to, int depth, bool whole) {
#pragma unroll
    for (int q = 0; q < kChunks; q++) {
      if (kUneven && Slow(q) >= kSlow) break;
      if (!kDepthFastest && Fast() >= room_) break;
      const uint8_t* from = from_ + q * kSlowStep * pitch_;
      uint8_t* at = (uint8_t*)to + Slow(q) * kPitch + Fast();
      const int valid =
          Slow(q) < (kDepthFastest ? room_ : depth) ? (kDepthFastest ? depth : room_) - Fast() : 0;
      if (whole) {
        CopyAsync16((float*)at, (const float*)from, valid > 0);
      } else {
#pragma unroll 1
        for (int e = 0; e < kChunk; e++) at[e] = e < valid ? from[e] : 0;
      }
    }
    from_ += kDepthFastest ? kDepth : kDepth * pitch_;
  }

  // kCount neighbours from (w, d) on: along the width, or along the depth where that is fastest.
  template <int kCount>
  static __device__ __forceinline__ void Read(const float* panel, int w, int d,
                                              float (&to)[kCount]) {
    const uint8_t* at = (const uint8_t*)panel + (kDepthFastest ? w * kPitch + d : d * kPitch + w);
    unsigned word;
    if constexpr (kCount == 4)
      word = *(const unsigned*)at;
    else
      word = *(const uint16_t*)at;
#pragma unroll
    for (int k = 0; k < kCount; k++) to[k] = WholeNumber(word, k);
  }

 private:
  static constexpr int kChunk = 16;
  static constexpr int kInRow = kFast / kChunk;
  static constexpr int kSlowStep = kThreads / kInRow;
  static constexpr int kChunks = (kSlow + kSlowStep - 1) / kSlowStep;
  static constexpr bool kUneven = kSlow % kSlowStep != 0;
  static_assert(kSlowStep * kInRow == kThreads, "the threads copy whole rows");

  static __device__ __forceinline__ int Slow(int q) {
    return (int)threadIdx.x / kInRow + q * kSlowStep;
  }
  static __device__ __forceinline__ int Fast() { return (int)threadIdx.x % kInRow * kChunk; }

  const uint8_t* from_;
  int64_t pitch_;
  int room_;  // how much of kWidth the matrix has here
};

// The floats that are multiplied with bytes; kPairs: lanes read two neighbouring layers.
template <int kWidth, class T, bool kDepthFastest, bool kPairs>
using OtherPanel =
    Panel<kWidth, T::kDepth, T::kThreads, kDepthFastest, kDepthFastest == kPairs ? 8 : 4>;

// Tensor cores as Tf32Accumulator has them, where one factor is bytes.
template <Bytes kBytes>
struct BytesIn {
  static constexpr bool kOfA = kBytes == Bytes::kA;

  template <class T, bool kTransA, bool kTransB>
  class Accumulator {
    using Place = TilePlace<T, kTransA, kTransB>;
    static constexpr int kDown = T::kWarpRows / 16, kAcross = T::kWarpCols / 8;
    // Bytes lie by layers, and lanes take neighbours of the width; or by rows, and they take two
    // layers at a time, at which they read the other factor too.
    static constexpr bool kPairs = kOfA ? !kTransA : kTransB;
    // So many of them: of rows two, as four lanes beside each other would meet in the banks of a
    // tile.
    static constexpr int kTogether = kOfA || kAcross < 4 ? 2 : 4;

   public:
    using PanelA = std::conditional_t<kOfA, BytePanel<T::kRows, T::kDepth, T::kThreads, !kTransA>,
                                      OtherPanel<T::kRows, T, !kTransA, kPairs>>;
    using PanelB = std::conditional_t<kOfA, OtherPanel<T::kCols, T, kTransB, kPairs>,
                                      BytePanel<T::kCols, T::kDepth, T::kThreads, kTransB>>;

    __device__ explicit Accumulator(const Product& product) : scale_(*product.scale) {}

    template <class F>
    __device__ __forceinline__ void Add(const float* a, const float* b, int depth, F&& meanwhile) {
      meanwhile();
#pragma unroll
      for (int step = 0; step < T::kGroupDepth; step += 8) {
        float left[2 * kDown][2], right[kAcross][2];  // two layers each
        Read(a, b, depth + step, left, right);
#pragma unroll
        for (int i = 0; i < kDown; i++) {
          const float rows[4] = {left[2 * i][0], left[2 * i + 1][0], left[2 * i][1],
                                 left[2 * i + 1][1]};
#pragma unroll
          for (int j = 0; j < kAcross; j++) MultiplyAddTf32(rows, right[j], sums_[i][j]);
        }
      }
    }

    // Writes or adds what the thread holds to the tile.
    __device__ __forceinline__ void Store(float* tile, bool add) const {
#pragma unroll
      for (int r = 0; r < 2 * kDown; r++) {
        const int lane = place_.lane / 4, next = place_.lane % 4 * 2;
        const int row = place_.row + (kOfA ? OfWidth(r, lane) : 8 * r + lane);
        float* to = tile + row * T::kTilePitch + place_.col;
        if constexpr (kOfA) {
#pragma unroll
          for (int j = 0; j < kAcross; j++) Put(to + 8 * j + next, {At(r, j, 0), At(r, j, 1)}, add);
        } else {
          // Rows beside each other begin with either half, which are in other banks.
          const int odd = lane % 2;
#pragma unroll
          for (int j = 0; j < kAcross; j += kTogether)
#pragma unroll
            for (int half = 0; half < 2; half++) {
              float x[kTogether];
#pragma unroll
              for (int n = 0; n < kTogether; n++)
                x[n] = odd == half ? At(r, j + n, 0) : At(r, j + n, 1);
              Put(to + OfWidth(j, next + (odd ^ half)), x, add);
            }
        }
      }
    }

   private:
    // What the lane holds of rows and of columns at eight layers.
    __device__ __forceinline__ void Read(const float* a, const float* b, int depth,
                                         float (&left)[2 * kDown][2],
                                         float (&right)[kAcross][2]) const {
      if constexpr (kOfA) {
        ReadBytes<PanelA>(a, place_.row, depth, left);
        ReadFloats<PanelB, kTransB>(b, place_.col, depth, right);
      } else {
        ReadFloats<PanelA, !kTransA>(a, place_.row, depth, left);
        ReadBytes<PanelB>(b, place_.col, depth, right);
      }
    }

    // Where in the width of bytes number k of lane group `lane` is.
    static __device__ __forceinline__ int OfWidth(int k, int lane) {
      if constexpr (kPairs)
        return 8 * k + lane;
      else
        return k / kTogether * 8 * kTogether + lane * kTogether + k % kTogether;
    }

    template <class P, int kCount>
    __device__ __forceinline__ void ReadBytes(const float* panel, int origin, int depth,
                                              float (&to)[kCount][2]) const {
      const int lane = place_.lane / 4, layer = place_.lane % 4;
      if constexpr (kPairs) {
#pragma unroll
        for (int k = 0; k < kCount; k++)
          P::template Read<2>(panel, origin + 8 * k + lane, depth + 2 * layer, to[k]);
      } else {
#pragma unroll
        for (int k = 0; k < kCount; k += kTogether)
#pragma unroll
          for (int e = 0; e < 2; e++) {
            float x[kTogether];
            P::template Read<kTogether>(panel, origin + OfWidth(k, lane), depth + layer + 4 * e, x);
#pragma unroll
            for (int n = 0; n < kTogether; n++) to[k + n][e] = x[n];
          }
      }
    }

    template <class P, bool kDepthFastest, int kCount>
    __device__ __forceinline__ void ReadFloats(const float* panel, int origin, int depth,
                                               float (&to)[kCount][2]) const {
      const int lane = place_.lane / 4, layer = depth + place_.lane % 4 * (kPairs ? 2 : 1);
#pragma unroll
      for (int k = 0; k < kCount; k++) {
        const int w = origin + 8 * k + lane;
        float2 x;
        if constexpr (kPairs && kDepthFastest)
          x = *(const float2*)&P::At(panel, w, layer);
        else
          x = make_float2(P::At(panel, w, layer), P::At(panel, w, layer + (kPairs ? 1 : 4)));
        to[k][0] = RoundedToTf32(x.x), to[k][1] = RoundedToTf32(x.y);
      }
    }

    // The sum of its row r and its column j, of two for which there is one of the other factor.
    __device__ __forceinline__ float At(int r, int j, int e) const {
      return scale_ * sums_[r / 2][j][r % 2 * 2 + e];
    }

    static __device__ __forceinline__ void Put(float* to, const float (&x)[2], bool add) {
      const float2 old = add ? *(const float2*)to : make_float2(0.f, 0.f);
      *(float2*)to = make_float2(old.x + x[0], old.y + x[1]);
    }
    static __device__ __forceinline__ void Put(float* to, const float (&x)[4], bool add) {
      const float4 old = add ? *(const float4*)to : make_float4(0.f, 0.f, 0.f, 0.f);
      StoreQuad(to, old.x + x[0], old.y + x[1], old.z + x[2], old.w + x[3]);
    }

    Place place_;
    const float scale_;
    float sums_[kDown][kAcross][4] = {};
  };
};

}  // namespace cuda
}  // namespace dlsys
