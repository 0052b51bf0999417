// The tiles of tile_amx.h for processors that multiply bfloat16 by vectors (AVX-512 BF16). An operand stays where it
// lies; sums are held in memory, which is the first-level cache, and in registers while a product is added to them.
#pragma once

#include <string.h>

#include "simd.h"

namespace tandem {
namespace {

// Adds R rows of `a`, each of 16 pairs, times the 16 columns of `b`, which has 16 rows of pairs side by side.
template <int R>
TANDEM_INLINE void multiply_rows(float* sums, const char* a, int64_t a_stride, const char* b, int64_t b_stride) {
  __m512 s[R];
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) s[r] = _mm512_load_ps(sums + r * 16);
#pragma GCC unroll 4
  for (int pair = 0; pair < 16; pair++, a += 4, b += b_stride) {
    const __m512bh w = reinterpret_cast<__m512bh>(_mm512_loadu_si512(b));
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) s[r] = _mm512_dpbf16_ps(s[r], broadcast_pair(a + r * a_stride), w);
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) _mm512_store_ps(sums + r * 16, s[r]);
}

class Tiles {
 public:
  // Of left-hand operands only so many rows count.
  TANDEM_INLINE void set_rows(int count) { rows_ = count; }
  TANDEM_INLINE void zero(int t) { memset(sums_[t], 0, sizeof sums_[t]); }
  TANDEM_INLINE void load(int t, const void* p, int64_t stride) {
    at_[t] = static_cast<const char*>(p);
    stride_[t] = stride;
  }
  TANDEM_INLINE void multiply(int c, int a, int b) {
    if (rows_ <= 4)
      multiply_rows<4>(sums_[c], at_[a], stride_[a], at_[b], stride_[b]);
    else if (rows_ <= 8)
      multiply_rows<8>(sums_[c], at_[a], stride_[a], at_[b], stride_[b]);
    else
      multiply_rows<16>(sums_[c], at_[a], stride_[a], at_[b], stride_[b]);
  }
  TANDEM_INLINE void store(int t, void* p, int64_t stride) const {
    for (int r = 0; r < 16; r++) _mm512_storeu_ps(static_cast<char*>(p) + r * stride, _mm512_load_ps(sums_[t] + r * 16));
  }

 private:
  alignas(64) float sums_[4][256];
  const char* at_[8];
  int64_t stride_[8];
  int rows_ = 16;
};

}  // namespace
}  // namespace tandem

#define TILES Tiles tiles_here
#define TILE_ROWS(count) tiles_here.set_rows(count)
#define TILE_ZERO(t) tiles_here.zero(t)
#define TILE_LOAD(t, p, stride) tiles_here.load(t, p, stride)
#define TILE_MULTIPLY(c, a, b) tiles_here.multiply(c, a, b)
#define TILE_STORE(t, p, stride) tiles_here.store(t, p, stride)
