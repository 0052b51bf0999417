// Panels of weights in blocks (block_fields.h), for the units that multiply bfloat16. A group is a pair of tiles, and becomes one on its
// way to the product. Each weight is rounded once, as when the matrix is widened in memory, so products have the same bits.
#pragma once

#include "block_fields.h"
#include "unit_parts.h"

namespace tandem {
namespace {

constexpr int kPair = 2048;  // bytes of two tiles side by side, expanded

// Of one tile: each number for the outputs 0 to 7 (`low`) and 8 to 15, twice in turn, because two inputs of an output lie side by side.
struct Spread {
  __m512 low, high;

  explicit TANDEM_INLINE Spread(__m512 v)
      : low(_mm512_permutexvar_ps(_mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0), v)),
        high(_mm512_permutexvar_ps(_mm512_set_epi32(15, 15, 14, 14, 13, 13, 12, 12, 11, 11, 10, 10, 9, 9, 8, 8), v)) {}
};

// The quants of field `field` of all lanes.
template <Dtype dtype>
TANDEM_INLINE __m512 quants(const char* low, const char* high, int field) {
  constexpr BlockKind kind = block_kind(dtype);
  if constexpr (kind.low == 8) return load_bytes(low + field * 16);
  const __m512i nibbles = _mm512_srli_epi32(_mm512_loadu_si512(low + field / 8 * 64), static_cast<unsigned>(field % 8 * 4));
  if constexpr (kind.high == 0) {
    // The permutation looks at the lowest 4 bits alone.
    return _mm512_permutexvar_ps(nibbles, _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0));
  } else {
    const int shift = field * kind.high % 32;
    const __m512i words = _mm512_loadu_si512(high + field * kind.high / 32 * 64);
    const __m512i above = shift < 4 ? _mm512_slli_epi32(words, static_cast<unsigned>(4 - shift))
                                    : _mm512_srli_epi32(words, static_cast<unsigned>(shift - 4));
    return _mm512_cvtepi32_ps(
        _mm512_or_si512(_mm512_and_si512(nibbles, _mm512_set1_epi32(15)),
                        _mm512_and_si512(above, _mm512_set1_epi32(((1 << kind.high) - 1) << 4))));
  }
}

template <Dtype dtype>
TANDEM_INLINE __m512 weight_of(__m512 quant, __m512 scale, __m512 least) {
  if constexpr (block_kind(dtype).zero) return _mm512_mul_ps(_mm512_sub_ps(quant, least), scale);
  return _mm512_fmadd_ps(quant, scale, least);
}

template <Dtype dtype>
void expand_pair(const char* block, const char* group, char* out) {
  constexpr BlockKind kind = block_kind(dtype);
  constexpr BlockLayout layout = layout_of(dtype);
  constexpr int kParts = kind.steps == 2 ? 2 : 1;  // of a group, with a scale each
  const char* halves = kind.steps ? block : group;
  for (int tile = 0; tile < 2; tile++) {
    const char* low = group + layout.low + tile * kPanel * kGroup * kind.low / 16;
    const char* high = group + layout.high + tile * kPanel * kGroup * kind.high / 16;
#pragma GCC unroll 2
    for (int part = 0; part < kParts; part++) {
      __m512 scale, least = _mm512_setzero_ps();  // or the zero
      if constexpr (kind.zero) {
        scale = _mm512_loadu_ps(block + tile * 64);
        least = load_zeros(block + kFloats + tile * 32);
      } else {
        scale = load_half(halves + tile * 32);
      }
      if constexpr (kind.steps > 0) scale = _mm512_mul_ps(scale, load_bytes(group + part * kPanel + tile * 16));
      if constexpr (kind.least) {
        least = load_half(halves + kHalves + tile * 32);
        if constexpr (kind.steps > 0)
          least = _mm512_mul_ps(least, -load_bytes(group + kind.steps * kPanel + tile * 16));
      } else if constexpr (kind.middle) {
        least = _mm512_mul_ps(scale, _mm512_set1_ps(-kind.middle));
      }
      const Spread scales(scale), leasts(least);
#pragma GCC unroll 16
      for (int row = part * (16 / kParts); row < (part + 1) * (16 / kParts); row++) {
        const __m512 a = weight_of<dtype>(quants<dtype>(low, high, 2 * row), scales.low, leasts.low);
        const __m512 b = weight_of<dtype>(quants<dtype>(low, high, 2 * row + 1), scales.high, leasts.high);
        const __m512bh both = _mm512_cvtne2ps_pbh(b, a);
        memcpy(out + tile * 1024 + row * 64, &both, sizeof both);
      }
    }
  }
}

using ExpandPair = void (*)(const char* block, const char* group, char* out);

ExpandPair pair_expander(Dtype dtype) {
  return with_form(dtype, []<Dtype form>(Form<form>) -> ExpandPair { return expand_pair<form>; });
}

// The panel's memory is zeroed.
void pack_blocks(const Linear& w, const WeightPart* parts, int count, bool interleave, int panel) {
  const BlockKind kind = block_kind(w.form);
  const BlockLayout layout = layout_of(w.form);
  pack_blocks(w, parts, count, interleave, panel, [=](const uint8_t* from, int output, char* group) {
    const int tile = output / 16, of_tile = output % 16;
    char* low = group + layout.low + tile * kPanel * kGroup * kind.low / 16;
    char* high = group + layout.high + tile * kPanel * kGroup * kind.high / 16;
    for (int input = 0; input < kGroup; input++) {
      const int field = input / 2 * 2 + of_tile / 8, lane = of_tile % 8 * 2 + input % 2;
      if (kind.low == 8) {
        low[field * 16 + lane] = static_cast<char>(from[input]);
        continue;
      }
      put_field(low, lane, field, 4, from[input] & 15);
      if (kind.high) put_field(high, lane, field, kind.high, from[input] >> 4);
    }
  });
}

}  // namespace
}  // namespace tandem
