// The matrices of Winograd's minimal filtering F(m x m, 3 x 3), y = A^T [(G g G^T) * (B^T d B)] A,
// in the notation of Lavin and Gray, "Fast algorithms for convolutional neural networks" (2016).
// The gradient for the filter is the adjoint of the same formula, dg = G^T [(A dy A^T) * (B^T d B)]
// G. Matrices are types, so that their zeros and ones cost nothing.
#pragma once

#ifdef __CUDACC__
#define DLSYS_MATRIX_FUNCTION __host__ __device__ constexpr
#else
#define DLSYS_MATRIX_FUNCTION constexpr
#endif

namespace dlsys {

// B^T (m + 2, m + 2)
template <int kOut>
struct WinogradInput {
  static constexpr int kRows = kOut + 2, kCols = kOut + 2;
  static DLSYS_MATRIX_FUNCTION float At(int r, int k) {
    constexpr float two[4][4] = {{1, 0, -1, 0}, {0, 1, 1, 0}, {0, -1, 1, 0}, {0, 1, 0, -1}};
    constexpr float four[6][6] = {{4, 0, -5, 0, 1, 0},  {0, -4, -4, 1, 1, 0}, {0, 4, -4, -1, 1, 0},
                                  {0, -2, -1, 2, 1, 0}, {0, 2, -1, -2, 1, 0}, {0, 4, 0, -5, 0, 1}};
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
    constexpr float four[6][3] = {{1 / 4.f, 0, 0},
                                  {-1 / 6.f, -1 / 6.f, -1 / 6.f},
                                  {-1 / 6.f, 1 / 6.f, -1 / 6.f},
                                  {1 / 24.f, 1 / 12.f, 1 / 6.f},
                                  {1 / 24.f, -1 / 12.f, 1 / 6.f},
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
    constexpr float four[4][6] = {
        {1, 1, 1, 1, 1, 0}, {0, 1, -1, 2, -2, 0}, {0, 1, 1, 4, 4, 0}, {0, 1, -1, 8, -8, 1}};
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
