// Products of bfloat16 tiles by vectors (AVX-512 BF16): what matrix products and attention have in common.
#pragma once

#include "simd.h"

namespace tandem {
namespace {

// As many sums at once keep both multipliers busy and leave registers for the operands.
constexpr int kSumsAtOnce = 16;

// Adds R rows of 16 pairs, 64 bytes apart, times C columns of vectors; `column(pair, c)` gives each of these. A sum
// takes its pairs in order, so that its bits do not depend on R and C.
template <int R, int C, typename F>
TANDEM_INLINE void multiply_tile(__m512 (&sums)[R][C], const char* rows, F&& column) {
#pragma GCC unroll 16
  for (int pair = 0; pair < 16; pair++) {
    __m512bh v[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) v[c] = reinterpret_cast<__m512bh>(column(pair, c));
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      const __m512bh x = broadcast_pair(rows + r * 64 + pair * 4);
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) sums[r][c] = _mm512_dpbf16_ps(sums[r][c], x, v[c]);
    }
  }
}

// The same for columns that lie as tiles of 16 vectors, `distance` bytes apart.
template <int R, int C>
TANDEM_INLINE void multiply_tile(__m512 (&sums)[R][C], const char* rows, const char* columns, int64_t distance) {
  multiply_tile(sums, rows, [=](int pair, int c) { return _mm512_load_si512(columns + c * distance + pair * 64); });
}

}  // namespace
}  // namespace tandem
