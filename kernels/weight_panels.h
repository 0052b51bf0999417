// Weights of the units that multiply bfloat16, and how they come back from memory.
//
// They lie in panels of 32 outputs: for each 32 inputs two tiles, each of 16 outputs and 16 pairs of inputs, side by
// side; plain (1 KiB a tile), compact (compact.h), or in blocks (block_panels.h).
#pragma once

#include "block_panels.h"
#include "compact.h"
#include "packing.h"
#include "unit_parts.h"

namespace tandem {
namespace {

constexpr int kRing = 4;     // expanded pairs of tiles: one is in use, another is written

int64_t panel_bytes(const Linear& w) {
  if (is_blocks(w.form)) return block_panel_bytes(w.k, w.form);
  if (w.outliers < 0) return tiles_along(w.k) * kPair;
  return static_cast<int64_t>(sizeof(CompactHeader)) + outlier_bytes(w.outliers) + tiles_along(w.k) * 2 * kCompactTile;
}

size_t gemm_scratch(int k) { return static_cast<size_t>(max_int(kRing, static_cast<int>(tiles_along(k)))) * kPair; }

// Columns [from, from + count) of a row, in bfloat16; the row may be missing.
TANDEM_INLINE void read_row(const SourceRow& row, int from, int count, uint16_t* out) {
  if (!row.data) {
    memset(out, 0, static_cast<size_t>(count) * 2);
  } else if (row.dtype == Dtype::bf16) {
    memcpy(out, static_cast<const char*>(row.data) + (row.offset + from) * 2, static_cast<size_t>(count) * 2);
  } else {
    float wide[512];
    for (int done = 0; done < count; done += 512) {
      const int n = min_int(512, count - done);
      read_columns(row, from + done, n, wide);
      for (int i = 0; i < n; i++) out[done + i] = float_to_bf16(wide[i]);
    }
  }
}

void pack_plain(const WeightPart* parts, int count, bool interleave, int k, int panel, char* out) {
  for (int j = 0; j < kPanel; j++) {
    const SourceRow source = source_row(parts, count, interleave, static_cast<int64_t>(panel) * kPanel + j, k);
    char* first = out + j / 16 * 1024 + j % 16 * 4;
    for (int from = 0; from < k; from += 32, first += kPair) {
      uint16_t row[32] = {};
      read_row(source, from, min_int(32, k - from), row);
      for (int pair = 0; pair < 16; pair++) memcpy(first + pair * 64, row + pair * 2, 4);
    }
  }
}

int outliers(const WeightPart* parts, int count, bool interleave, int k, int panel) {
  Histogram histogram;
  histogram.add_zeros((tiles_along(k) * 32 - k) * kPanel);
  for (int j = 0; j < kPanel; j++) {
    const SourceRow source = source_row(parts, count, interleave, static_cast<int64_t>(panel) * kPanel + j, k);
    uint16_t row[512];
    for (int from = 0; from < k; from += 512) {
      const int n = min_int(512, k - from);
      read_row(source, from, n, row);
      histogram.add(row, n);
    }
  }
  uint8_t upper[16];
  return histogram.choose(upper);
}

void pack(const Linear& w, const WeightPart* parts, int count, bool interleave, int panel, char* scratch) {
  char* out = static_cast<char*>(const_cast<void*>(w.panels)) + panel * w.panel_bytes;
  if (is_blocks(w.form)) return pack_blocks(w, parts, count, interleave, panel);
  if (w.outliers < 0) return pack_plain(parts, count, interleave, w.k, panel, out);
  pack_plain(parts, count, interleave, w.k, panel, scratch);
  make_compact(reinterpret_cast<const uint16_t*>(scratch), tiles_along(w.k) * (kPair / 2), w.outliers, out);
}

// Where a product's tiles come from. Each hands out pair after pair. The first three read a panel from memory, and
// fetch what comes a little later, if it was not fetched before.
class PlainStream {
 public:
  PlainStream(const char* panel, bool fetches) : at_(panel), lines_(fetches ? kPair / 64 : 0) {}

  TANDEM_INLINE const char* next() {
    const char* pair = at_;
    for (int i = 0; i < lines_; i++) __builtin_prefetch(pair + kPair + i * 64, 0, 2);
    at_ += kPair;
    return pair;
  }

 private:
  const char* at_;
  int lines_;
};

class CompactStream {
 public:
  // The panel has `pairs` pairs of tiles. They are expanded into `space`, a ring with room for `room` pairs.
  CompactStream(const char* panel, int outliers, int pairs, char* space, int room, bool fetches)
      : expander_(panel, outliers), space_(space), room_(room), left_(pairs - 1), lines_(fetches ? kFetch : 0) {
    expander_.expand(space_);
  }

  // Expands one pair ahead, so that a tile load does not wait for the stores of its own pair.
  TANDEM_INLINE const char* next() {
    for (int i = 0; i < lines_; i++) __builtin_prefetch(expander_.position() + 2 * kPair + i * 64, 0, 2);
    const char* pair = space_ + slot_ * kPair;
    if (++slot_ == room_) slot_ = 0;
    if (left_-- > 0) expander_.expand(space_ + slot_ * kPair);
    return pair;
  }

 private:
  static constexpr int kFetch = 2 * kCompactTile / 64;

  Expander expander_;
  char* space_;
  int room_, left_, lines_, slot_ = 0;
};

class BlockStream {
 public:
  // As CompactStream.
  BlockStream(const char* panel, Dtype dtype, int pairs, char* space, int room, bool fetches)
      : walk_(panel, dtype), expand_(pair_expander(dtype)), space_(space), room_(room), left_(pairs),
        lines_(fetches ? walk_.bytes() / 64 : 0) {
    expand(0);
  }

  TANDEM_INLINE const char* next() {
    const char* pair = space_ + slot_ * kPair;
    if (++slot_ == room_) slot_ = 0;
    if (left_ > 0) expand(slot_);
    return pair;
  }

 private:
  TANDEM_INLINE void expand(int slot) {
    walk_.next();
    for (int i = 0; i < lines_; i++) __builtin_prefetch(walk_.group() + kAhead + i * 64, 0, 2);
    expand_(walk_.block(), walk_.group(), space_ + slot * kPair);
    left_--;
  }

  static constexpr int kAhead = 4096;

  BlockWalk walk_;
  const ExpandPair expand_;
  char* space_;
  int room_, left_, lines_, slot_ = 0;
};

// Reads a panel that lies plain in a cache. With each pair it fetches `lines` lines from `ahead` on.
class CachedStream {
 public:
  CachedStream(const char* panel, const char* ahead, int lines) : at_(panel), ahead_(ahead), lines_(lines) {}

  TANDEM_INLINE const char* next() {
    for (int i = 0; i < lines_; i++, ahead_ += 64) __builtin_prefetch(ahead_, 0, 2);
    const char* pair = at_;
    at_ += kPair;
    return pair;
  }

 private:
  const char *at_, *ahead_;
  int lines_;
};

}  // namespace
}  // namespace tandem
