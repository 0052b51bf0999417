// Matrix products by AMX tiles: bfloat16 inputs, float32 accumulation in order of K.
//
// Weights lie in panels of 32 outputs: for each 32 inputs two tiles, each of 16 outputs and 16 pairs of inputs, side
// by side; plain (1 KiB a tile) or compact (compact.h). Few rows stream the weights through, once; many rows reuse a
// panel from the first-level cache while the activations pass by. What a product's rows still need when their sums are
// complete is done between the tile instructions of the next rows.
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
constexpr int kBlocksToFetchFar = 4;       // with more than these, a panel is fetched while the one before is used;
constexpr int kLinesToFetchNear = 2;       // with fewer only a part of it, so many lines a step:
constexpr int kNear = 4096;                // what lies behind its beginning, which the streams fetch
constexpr int kStepsToSettle = 2;          // after these, sums that were stored can be loaded without waiting
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

// Rows whose sums are complete, and what makes a product of them: a few rows at a time, between the tile instructions
// of the next block, which leave the vector units idle. Never passed on: so that the compiler keeps it in registers.
class Finisher {
 public:
  TANDEM_INLINE Finisher(const Gemm& g, float* space) : g_(g), space_(space), free_(space) {}

  // Where a block's sums go, while those of the one before may still wait: rows of kPanel floats.
  TANDEM_INLINE float* sums() const { return free_; }

  // The block in sums() is complete. The one before must have been finished.
  TANDEM_INLINE void add(int row, int rows, int panel) {
    waiting_ = free_;
    free_ = free_ == space_ ? space_ + kBlock : space_;
    row_ = row;
    left_ = rows;
    column_ = panel * kPanel;
  }

  TANDEM_INLINE void finish(int most) {
    const int rows = min_int(most, left_);
    if (rows == 0) return;
    finish_product(g_, row_, rows, column_, waiting_, kPanel);
    waiting_ += rows * kPanel;
    row_ += rows;
    left_ -= rows;
  }

  TANDEM_INLINE void finish_all() { finish(left_); }

  static constexpr int kBlock = 32 * kPanel;

 private:
  const Gemm& g_;
  float *const space_, *free_, *waiting_ = nullptr;
  int row_ = 0, left_ = 0, column_ = 0;
};

// How many rows to finish in a step, so that 32 are finished in all of them.
TANDEM_INLINE int rows_per_step(int tiles) {
  return tiles > kStepsToSettle ? (31 + tiles - kStepsToSettle) / (tiles - kStepsToSettle) : 32;
}

// Up to 16 rows by a panel.
template <typename Stream>
TANDEM_INLINE void multiply_16(const char* x, int tiles, Stream& weights, Finisher& finisher) {
  const int rows = rows_per_step(tiles);
  TILE_ZERO(0);
  TILE_ZERO(1);
  for (int t = 0; t < tiles; t++) {
    const char* pair = weights.next();
    TILE_LOAD(4, x + static_cast<int64_t>(t) * 1024, 64);
    TILE_LOAD(6, pair, 64);
    TILE_MULTIPLY(0, 4, 6);
    if (t >= kStepsToSettle) finisher.finish(rows);
    TILE_LOAD(7, pair + 1024, 64);
    TILE_MULTIPLY(1, 4, 7);
  }
  finisher.finish_all();
  TILE_STORE(0, finisher.sums(), 128);
  TILE_STORE(1, finisher.sums() + 16, 128);
}

// 32 rows by a panel.
template <typename Stream>
TANDEM_INLINE void multiply_32(const char* x, int tiles, Stream& weights, Finisher& finisher) {
  const int64_t below = static_cast<int64_t>(tiles) * 1024;  // the next 16 rows
  const int rows = rows_per_step(tiles);
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
    if (t >= kStepsToSettle) finisher.finish(rows);
    TILE_MULTIPLY(3, 5, 7);
  }
  finisher.finish_all();
  TILE_STORE(0, finisher.sums(), 128);
  TILE_STORE(1, finisher.sums() + 16, 128);
  TILE_STORE(2, finisher.sums() + 512, 128);
  TILE_STORE(3, finisher.sums() + 528, 128);
}

template <typename Stream>
TANDEM_INLINE void multiply_block(const Gemm& g, int row, int rows, int panel, const char* x, Stream weights,
                                  Finisher& finisher) {
  const int tiles = static_cast<int>(tiles_along(g.w.k));
  if (rows <= 16)
    multiply_16(x, tiles, weights, finisher);
  else
    multiply_32(x, tiles, weights, finisher);
  finisher.add(row, rows, panel);
}

TANDEM_INLINE void multiply_panel(const Gemm& g, int row_begin, int row_end, int panel, const char* x,
                                  Finisher& finisher) {
  const int tiles = static_cast<int>(tiles_along(g.w.k)), blocks = (row_end - row_begin + 31) / 32;
  const bool compact = g.w.outliers >= 0;
  const char* stored = static_cast<const char*>(g.w.panels) + panel * g.w.panel_bytes;
  const char *plain = compact ? g.scratch : stored, *ahead = stored + g.w.panel_bytes;
  // Many blocks leave time to fetch the whole next panel meanwhile. Between few, so much would keep the activations,
  // which come from the second-level cache, waiting behind it.
  const bool far = blocks > kBlocksToFetchFar;
  const int64_t lines = g.w.panel_bytes / 64, times = static_cast<int64_t>(blocks) * tiles;
  const int share = far ? static_cast<int>((lines + times - 1) / times) : kLinesToFetchNear;
  for (int i = 0; i < blocks; i++, x += tiles * kPair) {
    const int row = row_begin + i * 32, rows = min_int(32, row_end - row);
    const int64_t fetched = static_cast<int64_t>(far ? i : i - 1) * share * tiles * 64 + (far ? 0 : kNear);
    if (i > 0)
      multiply_block(g, row, rows, panel, x, CachedStream(plain, ahead + fetched, share), finisher);
    else if (compact)
      multiply_block(g, row, rows, panel, x,
                     CompactStream(stored, g.w.outliers, tiles, g.scratch, blocks > 1 ? tiles : kRing, !far), finisher);
    else
      multiply_block(g, row, rows, panel, x, PlainStream(stored, !far), finisher);
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
  alignas(64) float space[2 * Finisher::kBlock];
  Finisher finisher(g, space);
  for (int panel = first; rows > 0 && panel < last; panel++)
    multiply_panel(g, row_begin, row_end, panel, x, finisher);
  finisher.finish_all();
}

}  // namespace
}  // namespace tandem
