// Elements of a checkpoint's arrays, in float32: of plain types, and of blocks. Units and the rest of the library
// include it, so everything has internal linkage (see kernels.h).
#pragma once

#include <string.h>

#include "kernels.h"

namespace tandem {
namespace {

inline float bf16_to_float(uint16_t h) {
  const uint32_t bits = static_cast<uint32_t>(h) << 16;
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

inline uint16_t float_to_bf16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if (x != x) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline float half_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16;
  const uint32_t exponent = (h >> 10) & 31, fraction = h & 1023;
  if (exponent == 0) {
    const float x = static_cast<float>(fraction) * 5.9604644775390625e-8f;
    return sign ? -x : x;
  }
  const uint32_t bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | (fraction << 13);
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

// A row of weights in blocks is read by groups of so many.
constexpr int kGroup = 32;

// A weight is scale * (quant - middle) + least. In blocks of several groups both are the block's, times what each group has: its steps.
// In blocks with a zero point a weight is scale * (quant - zero), rounded once: such a scale is a float.
struct BlockKind {
  int weights, bytes;  // of a block
  int low, high;       // bits of a quant, which are kept apart
  bool least;          // whether there is one; otherwise it is 0
  int steps;           // of the scale in each group: 0 in blocks of one group
  int middle;
  bool zero = false;
};

constexpr bool is_blocks(Dtype dtype) { return dtype >= Dtype::q4_0; }

constexpr BlockKind block_kind(Dtype dtype) {
  switch (dtype) {
    case Dtype::q4_0: return {32, 18, 4, 0, false, 0, 8};
    case Dtype::q4_1: return {32, 20, 4, 0, true, 0, 0};
    case Dtype::q5_0: return {32, 22, 4, 1, false, 0, 16};
    case Dtype::q5_1: return {32, 24, 4, 1, true, 0, 0};
    case Dtype::q4_k: return {256, 144, 4, 0, true, 1, 0};
    case Dtype::q5_k: return {256, 176, 4, 1, true, 1, 0};
    case Dtype::q6_k: return {256, 210, 4, 2, false, 2, 32};
    case Dtype::i4_32: return {32, 22, 4, 0, false, 0, 0, true};
    case Dtype::i4_64: return {64, 38, 4, 0, false, 0, 0, true};
    case Dtype::i4_128: return {128, 70, 4, 0, false, 0, 0, true};
    case Dtype::i8_32: return {32, 38, 8, 0, false, 0, 0, true};
    case Dtype::i8_64: return {64, 70, 8, 0, false, 0, 0, true};
    case Dtype::i8_128: return {128, 134, 8, 0, false, 0, 0, true};
    default: return {32, 34, 8, 0, false, 0, 0};  // q8_0
  }
}

// Bytes of so many elements of a contiguous array; whole blocks of them.
inline int64_t bytes_of(int64_t elements, Dtype dtype) {
  if (!is_blocks(dtype)) return elements * (dtype == Dtype::f32 ? 4 : 2);
  return elements / block_kind(dtype).weights * block_kind(dtype).bytes;
}

struct Group {
  float float_scale;       // this and the zero only where there is a zero
  int16_t zero;
  uint16_t scale, least;   // halves
  int8_t steps[2];         // of the scale: for the first and the last 16 weights
  uint8_t least_step;      // how often `least` is taken away; only where there are steps
  uint8_t quants[kGroup];  // of 8 bits: two's complement
};

// Two quants of 4 bits lie in a byte: the first half of a group in the lower bits, the second in the upper ones.
inline void split_bytes(const uint8_t* bytes, uint8_t* quants) {
  for (int i = 0; i < kGroup / 2; i++) {
    quants[i] = bytes[i] & 15;
    quants[i + kGroup / 2] = bytes[i] >> 4;
  }
}

// A block: scale, zero, and the quants of its groups.
inline Group read_zeroed_group(const uint8_t* block, int group, Dtype dtype) {
  const BlockKind kind = block_kind(dtype);
  Group g = {};
  memcpy(&g.float_scale, block, 4);
  memcpy(&g.zero, block + 4, 2);
  const uint8_t* quants = block + 6 + group * kGroup * kind.low / 8;
  if (kind.low == 8)
    memcpy(g.quants, quants, kGroup);
  else
    split_bytes(quants, g.quants);
  return g;
}

inline Group read_simple_group(const uint8_t* block, Dtype dtype) {
  const BlockKind kind = block_kind(dtype);
  Group g = {};
  memcpy(&g.scale, block, 2);
  block += 2;
  if (kind.least) {
    memcpy(&g.least, block, 2);
    block += 2;
  }
  if (kind.low == 8) {
    memcpy(g.quants, block, kGroup);
    return g;
  }
  uint32_t high = 0;
  if (kind.high) {
    memcpy(&high, block, 4);
    block += 4;
  }
  split_bytes(block, g.quants);
  for (int i = 0; i < kGroup; i++) g.quants[i] = static_cast<uint8_t>(g.quants[i] | (high >> i & 1) << 4);
  return g;
}

// Of q4_k and q5_k: eight groups, whose scale and least have steps of 6 bits.
inline Group read_k_group(const uint8_t* block, int group, Dtype dtype) {
  Group g = {};
  memcpy(&g.scale, block, 2);
  memcpy(&g.least, block + 2, 2);
  const uint8_t* steps = block + 4;
  if (group < 4) {
    g.steps[0] = static_cast<int8_t>(steps[group] & 63);
    g.least_step = steps[group + 4] & 63;
  } else {
    g.steps[0] = static_cast<int8_t>((steps[group + 4] & 15) | steps[group - 4] >> 6 << 4);
    g.least_step = static_cast<uint8_t>(steps[group + 4] >> 4 | steps[group] >> 6 << 4);
  }
  g.steps[1] = g.steps[0];
  const uint8_t* high = block + 16;
  const uint8_t* low = high + (dtype == Dtype::q5_k ? 32 : 0) + group / 2 * 32;
  for (int i = 0; i < kGroup; i++) {
    const int fifth = dtype == Dtype::q5_k ? high[i] >> group & 1 : 0;
    g.quants[i] = static_cast<uint8_t>((low[i] >> group % 2 * 4 & 15) | fifth << 4);
  }
  return g;
}

inline Group read_q6_group(const uint8_t* block, int group) {
  Group g = {};
  const uint8_t *low = block + group / 4 * 64 + group % 2 * 32, *high = block + 128 + group / 4 * 32;
  memcpy(&g.scale, block + 208, 2);
  memcpy(g.steps, block + 192 + group * 2, 2);
  for (int i = 0; i < kGroup; i++)
    g.quants[i] = static_cast<uint8_t>((low[i] >> group % 4 / 2 * 4 & 15) | (high[i] >> group % 4 * 2 & 3) << 4);
  return g;
}

// The group that begins at element `at` of an array.
inline Group read_group(const void* data, int64_t at, Dtype dtype) {
  const int64_t whole = block_kind(dtype).weights;
  const uint8_t* block = static_cast<const uint8_t*>(data) + bytes_of(at, dtype);
  const int group = static_cast<int>(at % whole) / kGroup;
  if (block_kind(dtype).zero) return read_zeroed_group(block, group, dtype);
  if (dtype == Dtype::q6_k) return read_q6_group(block, group);
  return whole > kGroup ? read_k_group(block, group, dtype) : read_simple_group(block, dtype);
}

// In float32, as the formats define it. Without a zero all products are exact, so only the sum is rounded.
inline void read_weights(const void* data, int64_t at, Dtype dtype, float* out) {
  const Group g = read_group(data, at, dtype);
  const BlockKind kind = block_kind(dtype);
  const float least = half_to_float(g.least) * (kind.steps ? -static_cast<float>(g.least_step) : 1.0f);
  for (int i = 0; i < kGroup; i++) {
    const float scale = half_to_float(g.scale) * (kind.steps ? static_cast<float>(g.steps[i / 16]) : 1.0f);
    const int quant = kind.low == 8 ? static_cast<int8_t>(g.quants[i]) : g.quants[i] - kind.middle;
    out[i] = kind.zero ? g.float_scale * static_cast<float>(quant - g.zero) : scale * static_cast<float>(quant) + least;
  }
}

// Of a plain array. Read byte-wise: a matrix inside a memory-mapped file need not be aligned.
inline float element(const void* data, int64_t i, Dtype dtype) {
  if (dtype == Dtype::f32) {
    float x;
    memcpy(&x, static_cast<const char*>(data) + i * 4, 4);
    return x;
  }
  uint16_t h;
  memcpy(&h, static_cast<const char*>(data) + i * 2, 2);
  return dtype == Dtype::bf16 ? bf16_to_float(h) : half_to_float(h);
}

// Elements [at, at + count) of any array. In blocks both are multiples of kGroup.
inline void read_elements(const void* data, int64_t at, int count, Dtype dtype, float* out) {
  if (is_blocks(dtype))
    for (int i = 0; i < count; i += kGroup) read_weights(data, at + i, dtype, out + i);
  else
    for (int i = 0; i < count; i++) out[i] = element(data, at + i, dtype);
}

}  // namespace
}  // namespace tandem
