// Vectors of the width that the unit is compiled for, in GCC's vector extensions: one source for every
// instruction set. Included by units only; everything has internal linkage (see kernels.h).
#pragma once

#include <math.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "elements.h"
#include "kernels.h"

namespace tandem {
namespace {

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float vf __attribute__((vector_size(W * 4)));
typedef int32_t vi __attribute__((vector_size(W * 4)));
typedef uint32_t vu __attribute__((vector_size(W * 4)));
typedef uint16_t vh __attribute__((vector_size(W * 2)));

#define TANDEM_INLINE inline __attribute__((always_inline))

TANDEM_INLINE int round_up(int x, int step) { return (x + step - 1) / step * step; }
TANDEM_INLINE int min_int(int a, int b) { return a < b ? a : b; }
TANDEM_INLINE int max_int(int a, int b) { return a > b ? a : b; }

// The same bits as another type of vector.
template <typename To, typename From>
TANDEM_INLINE To cast(From v) {
  return (To)v;
}

TANDEM_INLINE vf load(const float* p) {
  vf v;
  memcpy(&v, p, sizeof v);
  return v;
}
TANDEM_INLINE void store(float* p, vf v) { memcpy(p, &v, sizeof v); }
TANDEM_INLINE vf load_part(const float* p, int n) {
  if (n >= W) return load(p);
  vf v = {};
  memcpy(&v, p, static_cast<size_t>(n) * 4);
  return v;
}
TANDEM_INLINE void store_part(float* p, vf v, int n) {
  if (n >= W) return store(p, v);
  memcpy(p, &v, static_cast<size_t>(n) * 4);
}
TANDEM_INLINE vf splat(float x) { return x - vf{}; }

TANDEM_INLINE vf select(vi mask, vf a, vf b) { return mask ? a : b; }
TANDEM_INLINE vf vmax(vf a, vf b) { return select(a > b, a, b); }

TANDEM_INLINE float sum(vf v) {
  float lanes[W];
  memcpy(lanes, &v, sizeof v);
  for (int half = W / 2; half > 0; half /= 2)
    for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
  return lanes[0];
}

TANDEM_INLINE vf load_bf16(const uint16_t* p) {
  vh h;
  memcpy(&h, p, sizeof h);
  const vu wide = __builtin_convertvector(h, vu) << 16;
  return cast<vf>(wide);
}
// W signed bytes.
TANDEM_INLINE vf load_bytes(const char* p) {
#if defined(__AVX512F__)
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  float wide[W];
  for (int i = 0; i < W; i++) wide[i] = static_cast<float>(static_cast<int8_t>(p[i]));
  return load(wide);
#endif
}
// W halves.
TANDEM_INLINE vf load_half(const void* p) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
#else
  vh h;
  memcpy(&h, p, sizeof h);
  const vu wide = __builtin_convertvector(h, vu), shifted = (wide & 0x7fff) << 13;
  // Exponents move by 112. A subnormal half gets a leading one that is taken away again: processors are slow with subnormal floats.
  const vf normal = cast<vf>(shifted + (112u << 23));
  const vf subnormal = cast<vf>(shifted + (113u << 23)) - 0x1p-14f;
  const vf finite = select(cast<vi>(shifted) < 1 << 23, subnormal, normal);
  const vu not_finite = cast<vu>(cast<vi>(shifted) >= 31 << 23);
  return cast<vf>(cast<vu>(finite) | (wide & 0x8000) << 16 | (not_finite & 0x7f800000u));
#endif
}
TANDEM_INLINE vh to_bf16(vf x) {
#if defined(__AVX512BF16__)
  const __m256bh narrow = _mm512_cvtneps_pbh(x);
  return cast<vh>(narrow);
#else
  const vu bits = cast<vu>(x);
  const vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const vi is_nan = x != x;
  const vu quiet = (bits >> 16) | 0x40;
  const vu chosen = is_nan ? quiet : rounded;
  return __builtin_convertvector(chosen, vh);
#endif
}
TANDEM_INLINE void store_bf16(uint16_t* p, vf x) {
  const vh h = to_bf16(x);
  memcpy(p, &h, sizeof h);
}

// Transposes W vectors of W words.
#if defined(__AVX512F__)
typedef __m512i Words;
TANDEM_INLINE void transpose(__m512i r[16]) {
  __m512i t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
  }
}
#elif defined(__AVX2__)
typedef __m256i Words;
TANDEM_INLINE void transpose(__m256i r[8]) {
  __m256i t[8];
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    r[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    t[i] = _mm256_permute2x128_si256(r[i], r[i + 4], 0x20);
    r[i + 4] = _mm256_permute2x128_si256(r[i], r[i + 4], 0x31);
    r[i] = t[i];
  }
}
#else
typedef vu Words;
TANDEM_INLINE void transpose(vu r[W]) {
  for (int i = 1; i < W; i++)
    for (int j = 0; j < i; j++) {
      const uint32_t word = r[i][j];
      r[i][j] = r[j][i];
      r[j][i] = word;
    }
}
#endif

constexpr float kLog2E = 1.44269504088896341f;

// e^x to about one unit in the last place; 0 below the smallest normal number, -inf included.
TANDEM_INLINE vf vexp(vf x) {
  const vf low = splat(-87.0f), high = splat(88.0f);
  const vi vanishes = x < low;
  vf y = select(vanishes, low, x);
  y = select(y > high, high, y);
  const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, kept in the low bits
  const vf shifted = y * kLog2E + magic;
  const vf n = shifted - magic;
  vf r = y - n * 0.693145751953125f;
  r = r - n * 1.42860682030941723212e-6f;
  vf p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const vi exponent = cast<vi>(shifted) << 23;
  const vi scaled = cast<vi>(p) + exponent;
  return select(vanishes, vf{}, cast<vf>(scaled));
}

#if defined(__AVX512F__)
// Off by up to 8e-5 of the result, which is rounded to bfloat16 anyway: to 2e-3.
TANDEM_INLINE __m512 power_of_two(__m512 x) {
  const __m512 r = _mm512_reduce_ps(x, 1);  // x - floor(x)
  __m512 p = _mm512_set1_ps(0.07802446186542511f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.22606724500656128f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.6958335041999817f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.9999251961708069f));
  return _mm512_scalef_ps(p, x);  // times 2^floor(x)
}
#endif

#if defined(__AVX512BF16__)
// Two neighbouring bfloat16 in every lane.
TANDEM_INLINE __m512bh broadcast_pair(const void* p) {
  int32_t pair;
  memcpy(&pair, p, sizeof pair);
  return reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
}
#endif

// a x + b y, rounded the same way wherever it stands.
TANDEM_INLINE vf combine(vf a, vf x, vf b, vf y) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, x, _mm512_mul_ps(b, y));
#else
  return a * x + b * y;
#endif
}

}  // namespace
}  // namespace tandem
