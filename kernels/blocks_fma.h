// Panels of weights in blocks (block_fields.h), for the units that multiply by fused multiply-add. A group becomes what a panel of float32
// has. The weights are the formats' own: these units multiply in float32, so nothing is rounded.
#pragma once

#include "block_fields.h"

namespace tandem {
namespace {

TANDEM_INLINE vu load_words(const char* p) {
  vu words;
  memcpy(&words, p, sizeof words);
  return words;
}

// The quants of field `field` of all lanes.
template <Dtype dtype>
TANDEM_INLINE vf quants(const char* low, const char* high, int field) {
  constexpr BlockKind kind = block_kind(dtype);
  const vu words = load_words(low + field * kind.low / 32 * 4 * W);
  if constexpr (kind.low == 8)
    return __builtin_convertvector(cast<vi>(words << (24 - field % 4 * 8)) >> 24, vf);
  vu found = words >> (field % 8 * 4) & 15;
  if constexpr (kind.high > 0) {
    const vu above = load_words(high + field * kind.high / 32 * 4 * W);
    found |= (above >> (field * kind.high % 32) & ((1 << kind.high) - 1)) << 4;
  }
  return __builtin_convertvector(cast<vi>(found), vf);
}

// Of W outputs.
struct Scales {
  vf scale, least;  // or the zero
};

// `part` counts the groups' parts with a scale each; `half` is that of the outputs.
template <Dtype dtype>
TANDEM_INLINE Scales read_scales(const char* block, const char* group, int part, int half) {
  constexpr BlockKind kind = block_kind(dtype);
  if constexpr (kind.zero)
    return {load(reinterpret_cast<const float*>(block) + half * W), load_zeros(block + kFloats + half * 2 * W)};
  const char* halves = (kind.steps ? block : group) + half * 2 * W;
  Scales s = {load_half(halves), vf{}};
  if constexpr (kind.steps > 0) s.scale *= load_bytes(group + part * kPanel + half * W);
  if constexpr (kind.least) {
    s.least = load_half(halves + kHalves);
    if constexpr (kind.steps > 0) s.least *= -load_bytes(group + kind.steps * kPanel + half * W);
  } else if constexpr (kind.middle) {
    s.least = s.scale * static_cast<float>(-kind.middle);
  }
  return s;
}

template <Dtype dtype>
TANDEM_INLINE vf weight_of(vf quant, const Scales& s) {
  return block_kind(dtype).zero ? (quant - s.least) * s.scale : quant * s.scale + s.least;
}

// Unpacks a group of P panels that lie `apart` from each other: use(input, p, a, b) takes the weights of an input.
template <Dtype dtype, int P, typename F>
TANDEM_INLINE void unpack_group(const char* block, const char* group, int64_t apart, F&& use) {
  constexpr BlockKind kind = block_kind(dtype);
  constexpr BlockLayout layout = layout_of(dtype);
  constexpr int kParts = kind.steps == 2 ? 2 : 1, kTogether = 16;  // whole words of every field
#pragma GCC unroll 2
  for (int part = 0; part < kParts; part++) {
    Scales scales[P][2];
#pragma GCC unroll 2
    for (int p = 0; p < P; p++)
      for (int half = 0; half < 2; half++)
        scales[p][half] = read_scales<dtype>(block + p * apart, group + p * apart, part, half);
    for (int from = part * kTogether; from < kGroup; from += kParts * kTogether) {
      const char* low = group + layout.low + from * kPanel * kind.low / 8;
      const char* high = group + layout.high + from * kPanel * kind.high / 8;
#pragma GCC unroll 16
      for (int i = 0; i < kTogether; i++) {
#pragma GCC unroll 2
        for (int p = 0; p < P; p++)
          use(from + i, p, weight_of<dtype>(quants<dtype>(low + p * apart, high + p * apart, 2 * i), scales[p][0]),
              weight_of<dtype>(quants<dtype>(low + p * apart, high + p * apart, 2 * i + 1), scales[p][1]));
      }
    }
  }
}

template <Dtype dtype>
void expand_group(const char* block, const char* group, float* out) {
  unpack_group<dtype, 1>(block, group, 0, [=](int input, int, vf a, vf b) __attribute__((always_inline)) {
    store(out + input * kPanel, a);
    store(out + input * kPanel + W, b);
  });
}

using ExpandGroup = void (*)(const char* block, const char* group, float* out);

ExpandGroup group_expander(Dtype dtype) {
  return with_form(dtype, []<Dtype form>(Form<form>) -> ExpandGroup { return expand_group<form>; });
}

// The panel's memory is zeroed.
void pack_blocks(const Linear& w, const WeightPart* parts, int count, bool interleave, int panel) {
  const BlockKind kind = block_kind(w.form);
  const BlockLayout layout = layout_of(w.form);
  pack_blocks(w, parts, count, interleave, panel, [=](const uint8_t* from, int output, char* group) {
    for (int input = 0; input < kGroup; input++) {
      const int field = input * 2 + output / W, lane = output % W;
      const int quant = from[input], mask = (1 << kind.low) - 1;
      put_field(group + layout.low, lane, field, kind.low, static_cast<uint32_t>(quant & mask));
      if (kind.high) put_field(group + layout.high, lane, field, kind.high, static_cast<uint32_t>(quant >> 4));
    }
  });
}

}  // namespace
}  // namespace tandem
