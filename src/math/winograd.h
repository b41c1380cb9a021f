// The matrices of Winograd's minimal filtering F(m x m, 3 x 3), y = A^T [(G g G^T) * (B^T d B)] A,
// in the notation of Lavin and Gray, "Fast algorithms for convolutional neural networks" (2016).
// The gradient for the filter is the adjoint of the same formula, dg = G^T [(A dy A^T) * (B^T d B)]
// G. Matrices are types, so that their zeros and ones cost nothing.
//
// They interpolate at 0, 1, -1 and infinity for m = 2, and at 0, sqrt(1/2), -sqrt(1/2), sqrt(2),
// -sqrt(2) and infinity for m = 4: with Lavin and Gray's 1, -1, 2 and -2 powers of the points reach
// 8, and results of 64 channels err up to 4 times as much.
#pragma once

#ifdef __CUDACC__
#define DLSYS_MATRIX_FUNCTION __host__ __device__ constexpr
#else
#define DLSYS_MATRIX_FUNCTION constexpr
#endif

namespace dlsys {

constexpr float kSqrt2 = 1.41421356237309504880f;

// B^T (m + 2, m + 2)
template <int kOut>
struct WinogradInput {
  static constexpr int kRows = kOut + 2, kCols = kOut + 2;
  static DLSYS_MATRIX_FUNCTION float At(int r, int k) {
    constexpr float two[4][4] = {{1, 0, -1, 0}, {0, 1, 1, 0}, {0, -1, 1, 0}, {0, 1, 0, -1}};
    constexpr float b = kSqrt2;
    constexpr float four[6][6] = {{1, 0, -2.5f, 0, 1, 0},     {0, -b, -2, b / 2, 1, 0},
                                  {0, b, -2, -b / 2, 1, 0},   {0, -b / 2, -.5f, b, 1, 0},
                                  {0, b / 2, -.5f, -b, 1, 0}, {0, 1, 0, -2.5f, 0, 1}};
    if constexpr (kOut == 2)
      return two[r][k];
    else
      return four[r][k];
  }
};

// G (m + 2, 3)
template <int kOut>
struct WinogradFilter {
  static constexpr int kRows = kOut + 2, kCols = 3;
  static DLSYS_MATRIX_FUNCTION float At(int r, int k) {
    constexpr float two[4][3] = {{1, 0, 0}, {.5f, .5f, .5f}, {.5f, -.5f, .5f}, {0, 0, 1}};
    constexpr float b = kSqrt2;
    constexpr float four[6][3] = {{1, 0, 0},
                                  {-2 / 3.f, -b / 3, -1 / 3.f},
                                  {-2 / 3.f, b / 3, -1 / 3.f},
                                  {1 / 6.f, b / 6, 1 / 3.f},
                                  {1 / 6.f, -b / 6, 1 / 3.f},
                                  {0, 0, 1}};
    if constexpr (kOut == 2)
      return two[r][k];
    else
      return four[r][k];
  }
};

// A^T (m, m + 2)
template <int kOut>
struct WinogradOutput {
  static constexpr int kRows = kOut, kCols = kOut + 2;
  static DLSYS_MATRIX_FUNCTION float At(int r, int k) {
    constexpr float two[2][4] = {{1, 1, 1, 0}, {0, 1, -1, -1}};
    constexpr float b = kSqrt2;
    constexpr float four[4][6] = {{1, 1, 1, 1, 1, 0},
                                  {0, b / 2, -b / 2, b, -b, 0},
                                  {0, .5f, .5f, 2, 2, 0},
                                  {0, b / 4, -b / 4, 2 * b, -2 * b, 1}};
    if constexpr (kOut == 2)
      return two[r][k];
    else
      return four[r][k];
  }
};

// M^T of a matrix M.
template <class M>
struct Adjoint {
  static constexpr int kRows = M::kCols, kCols = M::kRows;
  static DLSYS_MATRIX_FUNCTION float At(int r, int k) { return M::At(k, r); }
};

#undef DLSYS_MATRIX_FUNCTION

}  // namespace dlsys
