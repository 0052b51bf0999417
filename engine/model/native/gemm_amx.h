// Matrix products by AMX tiles: bfloat16 inputs, float32 accumulation in order of K.
//
// Weights lie in panels of 32 outputs: for each 32 inputs two tiles, each of 16 outputs and 16 pairs of inputs, side
// by side; plain (1 KiB a tile) or compact (compact.h). Few rows stream the weights through, once; many rows reuse a
// panel from the first-level cache while the activations pass by.
#pragma once

#include "compact.h"
#include "packing.h"
#include "rows.h"
#include "tile.h"

namespace tandem {
namespace {

constexpr int kPair = 2048;  // bytes of two tiles side by side
constexpr int kPanelsPerTask = 2;
constexpr int kRowsPerTask = 512;
constexpr int kRowBytesPerTask = 5 << 18;  // of a task's activations: they stay in the second-level cache
constexpr int kTasksPerThread = 4;         // at least, so that threads finish together,
constexpr int kFewestRows = 64;            // unless this many rows would be fewer
constexpr int kBlocksToFetchFar = 4;
constexpr int kRing = 4;                   // expanded pairs of tiles: one is in use, another is written

int64_t panel_bytes(int k, int outliers) {
  if (outliers < 0) return tiles_along(k) * kPair;
  const int64_t bytes = sizeof(CompactHeader) + outlier_bytes(outliers) + tiles_along(k) * 2 * kCompactTile;
  return bytes;
}

size_t gemm_scratch(int k) { return static_cast<size_t>(max_int(kRing, static_cast<int>(tiles_along(k)))) * kPair; }

// Columns [from, from + count) of a row, in bfloat16; the row may be missing.
TANDEM_INLINE void read_row(const SourceRow& row, int from, int count, uint16_t* out) {
  if (!row.data) {
    memset(out, 0, static_cast<size_t>(count) * 2);
  } else if (row.dtype == Dtype::bf16) {
    memcpy(out, static_cast<const char*>(row.data) + (row.offset + from) * 2, static_cast<size_t>(count) * 2);
  } else {
    for (int i = 0; i < count; i++) out[i] = float_to_bf16(element(row.data, row.offset + from + i, row.dtype));
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
  if (w.outliers < 0) return pack_plain(parts, count, interleave, w.k, panel, out);
  pack_plain(parts, count, interleave, w.k, panel, scratch);
  make_compact(reinterpret_cast<const uint16_t*>(scratch), tiles_along(w.k) * (kPair / 2), w.outliers, out);
}

// Where a product's tiles come from. Each hands out pair after pair. The first two read a panel from memory, and
// fetch what comes a little later, if nobody has fetched it before.
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
  // The panel has `pairs` pairs; `room` of them are expanded into `space` before the first is overwritten.
  CompactStream(const char* panel, int outliers, int pairs, char* space, int room, bool fetches)
      : expander_(panel, outliers), space_(space), room_(room), left_(pairs - 1), lines_(fetches ? kFetch : 0) {
    expander_.expand(space_);
  }

  // One pair ahead, so that a tile load need not wait for stores that have just been made.
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

// A panel that lies plain in a cache. In between, `lines` lines are fetched of what comes next.
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

// Up to 16 rows by a panel.
template <typename Stream>
TANDEM_INLINE void multiply_16(const char* x, int tiles, Stream& weights, float* block) {
  TILE_ZERO(0);
  TILE_ZERO(1);
  for (int t = 0; t < tiles; t++) {
    const char* pair = weights.next();
    TILE_LOAD(4, x + static_cast<int64_t>(t) * 1024, 64);
    TILE_LOAD(6, pair, 64);
    TILE_MULTIPLY(0, 4, 6);
    TILE_LOAD(7, pair + 1024, 64);
    TILE_MULTIPLY(1, 4, 7);
  }
  TILE_STORE(0, block, 128);
  TILE_STORE(1, block + 16, 128);
}

// 32 rows by a panel.
template <typename Stream>
TANDEM_INLINE void multiply_32(const char* x, int tiles, Stream& weights, float* block) {
  const int64_t below = static_cast<int64_t>(tiles) * 1024;  // the next 16 rows
  TILE_ZERO(0);
  TILE_ZERO(1);
  TILE_ZERO(2);
  TILE_ZERO(3);
  for (int t = 0; t < tiles; t++, x += 1024) {
    const char* pair = weights.next();
    TILE_LOAD_ONCE(4, x, 64);
    TILE_LOAD(6, pair, 64);
    TILE_MULTIPLY(0, 4, 6);
    TILE_LOAD(7, pair + 1024, 64);
    TILE_MULTIPLY(1, 4, 7);
    TILE_LOAD_ONCE(5, x + below, 64);
    TILE_MULTIPLY(2, 5, 6);
    TILE_MULTIPLY(3, 5, 7);
  }
  TILE_STORE(0, block, 128);
  TILE_STORE(1, block + 16, 128);
  TILE_STORE(2, block + 512, 128);
  TILE_STORE(3, block + 528, 128);
}

template <typename Stream>
TANDEM_INLINE void multiply_block(const Gemm& g, int row, int rows, int panel, const char* x, Stream weights) {
  const int tiles = static_cast<int>(tiles_along(g.w.k));
  alignas(64) float block[32 * 32];
  if (rows <= 16)
    multiply_16(x, tiles, weights, block);
  else
    multiply_32(x, tiles, weights, block);
  finish_product(g, row, rows, panel * kPanel, block, 32);
}

void multiply_panel(const Gemm& g, int row_begin, int row_end, int panel, const char* x) {
  const int tiles = static_cast<int>(tiles_along(g.w.k)), blocks = (row_end - row_begin + 31) / 32;
  const bool compact = g.w.outliers >= 0;
  const char* stored = static_cast<const char*>(g.w.panels) + panel * g.w.panel_bytes;
  const char *plain = compact ? g.scratch : stored, *ahead = stored + g.w.panel_bytes;
  // Many blocks leave time to fetch the whole next panel meanwhile; few do better to fetch as they go.
  const bool far = blocks > kBlocksToFetchFar;
  const int64_t lines = g.w.panel_bytes / 64, times = static_cast<int64_t>(blocks) * tiles;
  const int share = far ? static_cast<int>((lines + times - 1) / times) : 0;
  for (int i = 0; i < blocks; i++, x += tiles * kPair, ahead += share * tiles * 64) {
    const int row = row_begin + i * 32, rows = min_int(32, row_end - row);
    if (i > 0)
      multiply_block(g, row, rows, panel, x, CachedStream(plain, ahead, share));
    else if (compact)
      multiply_block(g, row, rows, panel, x,
                     CompactStream(stored, g.w.outliers, tiles, g.scratch, blocks > 1 ? tiles : kRing, !far));
    else
      multiply_block(g, row, rows, panel, x, PlainStream(stored, !far));
  }
}

// How a product is divided: panels of one task, and chunks of rows of equal size.
struct Division {
  int panels, groups, chunks;
};

Division divide(const Gemm& g) {
  const int64_t fit = kRowBytesPerTask / (tiles_along(g.w.k) * 64) / 32 * 32;
  const int rows = min_int(kRowsPerTask, max_int(32, static_cast<int>(fit)));
  Division d{kPanelsPerTask, (panels(g.w.n) + kPanelsPerTask - 1) / kPanelsPerTask, (g.m + rows - 1) / rows};
  if (g.threads == 1) return d;
  const int enough = kTasksPerThread * g.threads, most = max_int(1, g.m / kFewestRows);
  if (d.groups * d.chunks < enough) d.chunks = max_int(d.chunks, min_int(most, (enough + d.groups - 1) / d.groups));
  if (d.groups * d.chunks < enough) d = {1, panels(g.w.n), d.chunks};
  return d;
}

int gemm_tasks(const Gemm& g) {
  const Division d = divide(g);
  return d.groups * d.chunks;
}

void gemm(const Gemm& g, int task) {
  const Division d = divide(g);
  const int chunk_rows = round_up((g.m + d.chunks - 1) / d.chunks, 32);
  const int row_begin = task / d.groups * chunk_rows, row_end = min_int(g.m, row_begin + chunk_rows);
  const int rows = row_end - row_begin;
  const char* x = static_cast<const char*>(g.x) + row_begin / 16 * tiles_along(g.w.k) * 1024;
  const int first = task % d.groups * d.panels, last = min_int(panels(g.w.n), first + d.panels);
  for (int panel = first; rows > 0 && panel < last; panel++)
    multiply_panel(g, row_begin, row_end, panel, x);
}

}  // namespace
}  // namespace tandem
