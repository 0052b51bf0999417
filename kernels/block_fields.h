// How weights in blocks lie in a panel, in every unit.
//
// For each group of inputs a panel has: the outputs' scales (and least weights), the low bits of the quants, and their high bits. In blocks
// of several groups the scales are steps, bytes; the halves that they multiply stand once before the groups of a block. So do the float
// scales and the zeros of blocks that have them.
//
// Quants are bit fields of 32-bit words, in vectors of W words: a lane has those of one output (in units of bfloat16: of two, for every
// other input), in the order in which a product takes them.
#pragma once

#include "packing.h"

namespace tandem {
namespace {

constexpr int kHalves = kPanel * 2;  // bytes of a half for each output
constexpr int kFloats = kPanel * 4;  // and of a float; behind them lie the zeros, of 16 bits

struct BlockLayout {
  int block;  // bytes before the groups of a block
  int low;    // where in a group the low bits begin: 4 of a quant, or all 8
  int high;
  int bytes;  // of a group
};

constexpr BlockLayout layout_of(Dtype dtype) {
  const BlockKind kind = block_kind(dtype);
  const int halves = kHalves * (kind.least ? 2 : 1), steps = kPanel * (kind.steps + (kind.least ? 1 : 0));
  const int low = kind.zero ? 0 : kind.steps ? steps : halves, high = low + kPanel * kGroup * kind.low / 8;
  const int block = kind.zero ? kFloats + kPanel * 2 : kind.steps ? halves : 0;
  return {block, low, high, high + kPanel * kGroup * kind.high / 8};
}

int64_t block_panel_bytes(int k, Dtype dtype) {
  const BlockLayout layout = layout_of(dtype);
  return static_cast<int64_t>(k / kGroup) * layout.bytes + static_cast<int64_t>(k / block_kind(dtype).weights) * layout.block;
}

// Walks through a panel: the halves and the group of one step after the other.
class BlockWalk {
 public:
  BlockWalk(const char* panel, Dtype dtype)
      : layout_(layout_of(dtype)), groups_(layout_.block ? block_kind(dtype).weights / kGroup : 0), at_(panel) {}

  // Call next() before the first group, too.
  TANDEM_INLINE void next() {
    at_ += step_;
    if (layout_.block && left_-- == 0) {
      left_ = groups_ - 1;
      block_ = at_;
      at_ += layout_.block;
    }
    step_ = layout_.bytes;
  }
  const char* block() const { return block_; }
  const char* group() const { return at_; }
  int bytes() const { return layout_.bytes; }

 private:
  const BlockLayout layout_;
  const int groups_;
  const char *at_, *block_ = nullptr;
  int step_ = 0, left_ = 0;
};

// Writes bit field `field` of so many bits into a lane's words.
inline void put_field(char* words, int lane, int field, int bits, uint32_t value) {
  char* at = words + field * bits / 32 * 4 * W + lane * 4;
  uint32_t word;
  memcpy(&word, at, 4);
  word |= value << field * bits % 32;
  memcpy(at, &word, 4);
}

// Writes what a group has besides quants, for one output.
inline void put_scales(const Group& from, Dtype dtype, int output, char* block, char* group) {
  const BlockKind kind = block_kind(dtype);
  if (kind.zero) {
    memcpy(block + output * 4, &from.float_scale, 4);
    memcpy(block + kFloats + output * 2, &from.zero, 2);
    return;
  }
  char* halves = kind.steps ? block : group;
  memcpy(halves + output * 2, &from.scale, 2);
  if (kind.least) memcpy(halves + kHalves + output * 2, &from.least, 2);
  for (int i = 0; i < kind.steps; i++) group[i * kPanel + output] = static_cast<char>(from.steps[i]);
  if (kind.steps && kind.least) group[kind.steps * kPanel + output] = static_cast<char>(from.least_step);
}

template <Dtype dtype>
struct Form {};

// Calls f(Form<dtype>). Forms whose groups lie alike share their code.
template <typename F>
auto with_form(Dtype dtype, F&& f) {
  switch (dtype) {
    case Dtype::q4_0: return f(Form<Dtype::q4_0>{});
    case Dtype::q4_1: return f(Form<Dtype::q4_1>{});
    case Dtype::q5_0: return f(Form<Dtype::q5_0>{});
    case Dtype::q5_1: return f(Form<Dtype::q5_1>{});
    case Dtype::q4_k: return f(Form<Dtype::q4_k>{});
    case Dtype::q5_k: return f(Form<Dtype::q5_k>{});
    case Dtype::q6_k: return f(Form<Dtype::q6_k>{});
    case Dtype::i4_32:
    case Dtype::i4_64:
    case Dtype::i4_128: return f(Form<Dtype::i4_128>{});
    case Dtype::i8_32:
    case Dtype::i8_64:
    case Dtype::i8_128: return f(Form<Dtype::i8_128>{});
    default: return f(Form<Dtype::q8_0>{});
  }
}

// W zeros.
TANDEM_INLINE vf load_zeros(const char* p) {
  typedef int16_t shorts __attribute__((vector_size(W * 2)));
  shorts v;
  memcpy(&v, p, sizeof v);
  return __builtin_convertvector(__builtin_convertvector(v, vi), vf);
}

// Writes a panel into zeroed memory. `put_quants(quants, output, group)` writes those of an output.
template <typename F>
void pack_blocks(const Linear& w, const WeightPart* parts, int count, bool interleave, int panel, F&& put_quants) {
  char* const out = static_cast<char*>(const_cast<void*>(w.panels)) + panel * w.panel_bytes;
  for (int j = 0; j < kPanel; j++) {
    const SourceRow source = source_row(parts, count, interleave, static_cast<int64_t>(panel) * kPanel + j, w.k);
    BlockWalk walk(out, w.form);
    for (int from = 0; source.data && from < w.k; from += kGroup) {
      walk.next();
      const Group read = read_group(source.data, source.offset + from, source.dtype);
      char* const group = const_cast<char*>(walk.group());
      put_scales(read, w.form, j, const_cast<char*>(walk.block()), group);
      put_quants(read.quants, j, group);
    }
  }
}

}  // namespace
}  // namespace tandem
