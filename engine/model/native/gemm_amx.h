// Matrix products by AMX tiles: bfloat16 inputs, float32 accumulation in order of K.
//
// Weights lie in columns of tiles: 16 outputs wide, 32 inputs high (16 pairs), 1 KiB each, along K; two tile
// columns make a panel. Few rows stream the weights once, four tile columns side by side; many rows reuse a
// panel from the first-level cache while the activations pass by.
#pragma once

#include "packing.h"
#include "rows.h"
#include "tile.h"

namespace tandem {
namespace {

constexpr int kPanelsPerTask = 2;
constexpr int kRowsPerTask = 512;
constexpr int kRowBytesPerTask = 5 << 18;  // of a task's activations: they stay in the second-level cache
constexpr int kTasksPerThread = 4;         // at least, so that threads finish together,
constexpr int kFewestRows = 64;            // unless this many rows would be fewer
constexpr int kPrefetchTiles = 1;

size_t weight_bytes(int n, int k) { return static_cast<size_t>(panels(n)) * 2 * tiles_along(k) * 1024; }

void pack(void* out, const WeightPart* parts, int count, bool interleave, int k, int begin, int end) {
  const int tiles = static_cast<int>(tiles_along(k));
  for (int column = begin * kPanel; column < end * kPanel; column++) {
    const SourceRow source = source_row(parts, count, interleave, column, k);
    char* first = static_cast<char*>(out) + static_cast<size_t>(column / 16) * tiles * 1024 + column % 16 * 4;
    for (int t = 0; t < tiles; t++) {
      const int n = source.data ? min_int(32, k - t * 32) : 0;
      uint16_t row[32] = {};
      if (n && source.dtype == Dtype::bf16) {
        memcpy(row, static_cast<const char*>(source.data) + (source.offset + t * 32) * 2, static_cast<size_t>(n) * 2);
      } else {
        for (int i = 0; i < n; i++)
          row[i] = float_to_bf16(element(source.data, source.offset + t * 32 + i, source.dtype));
      }
      for (int pair = 0; pair < 16; pair++) memcpy(first + t * 1024 + pair * 64, row + pair * 2, 4);
    }
  }
}

// Up to 16 rows by 4 tile columns. `ahead` leads from a tile column's end to the next one that this task's
// successor reads at the same place.
template <int C>
TANDEM_INLINE void multiply_16(const char* x, const char* w, int tiles, float* block) {
  const int64_t column = static_cast<int64_t>(tiles) * 1024;
  TILE_ZERO(0);
  TILE_ZERO(1);
  if (C == 4) {
    TILE_ZERO(2);
    TILE_ZERO(3);
  }
  for (int t = 0; t < tiles; t++) {
    const char* p = w + static_cast<int64_t>(t) * 1024;
    const char* ahead = p + kPrefetchTiles * 1024 + (t + kPrefetchTiles >= tiles ? (C - 1) * column : 0);
    TILE_LOAD(4, x + static_cast<int64_t>(t) * 1024, 64);
    prefetch_tile(ahead);
    TILE_LOAD(5, p, 64);
    TILE_MULTIPLY(0, 4, 5);
    prefetch_tile(ahead + column);
    TILE_LOAD(6, p + column, 64);
    TILE_MULTIPLY(1, 4, 6);
    if (C == 4) {
      prefetch_tile(ahead + 2 * column);
      TILE_LOAD(7, p + 2 * column, 64);
      TILE_MULTIPLY(2, 4, 7);
      prefetch_tile(ahead + 3 * column);
      TILE_LOAD(5, p + 3 * column, 64);
      TILE_MULTIPLY(3, 4, 5);
    }
  }
  TILE_STORE(0, block, C * 64);
  TILE_STORE(1, block + 16, C * 64);
  if (C == 4) {
    TILE_STORE(2, block + 32, C * 64);
    TILE_STORE(3, block + 48, C * 64);
  }
}

// 32 rows by 2 tile columns. STREAM: the weights come from memory and are used once; otherwise `ahead` fetches what
// other rows will need.
template <bool STREAM>
TANDEM_INLINE void multiply_32(const char* x, const char* w, int tiles, Ahead ahead, float* block) {
  const int64_t column = static_cast<int64_t>(tiles) * 1024;
  TILE_ZERO(0);
  TILE_ZERO(1);
  TILE_ZERO(2);
  TILE_ZERO(3);
  for (int t = 0; t < tiles; t++) {
    const char *a = x + static_cast<int64_t>(t) * 1024, *b = w + static_cast<int64_t>(t) * 1024;
    if (STREAM) {
      const char* next = b + kPrefetchTiles * 1024 + (t + kPrefetchTiles >= tiles ? column : 0);
      for (int i = 0; i < 1024; i += 64) {
        __builtin_prefetch(next + i, 0, 2);
        __builtin_prefetch(next + column + i, 0, 2);
      }
    } else {
      ahead.fetch();
    }
    TILE_LOAD_ONCE(4, a, 64);
    TILE_LOAD(6, b, 64);
    TILE_MULTIPLY(0, 4, 6);
    TILE_LOAD(7, b + column, 64);
    TILE_MULTIPLY(1, 4, 7);
    TILE_LOAD_ONCE(5, a + column, 64);  // the next 16 rows: as far away as the next tile column
    TILE_MULTIPLY(2, 5, 6);
    TILE_MULTIPLY(3, 5, 7);
  }
  TILE_STORE(0, block, 128);
  TILE_STORE(1, block + 16, 128);
  TILE_STORE(2, block + 512, 128);
  TILE_STORE(3, block + 528, 128);
}

// All rows of a task by one panel.
void multiply_panel(const Gemm& g, int row_begin, int row_end, int panel) {
  const int tiles = static_cast<int>(tiles_along(g.w.k)), blocks = (row_end - row_begin + 31) / 32;
  const int64_t column = static_cast<int64_t>(tiles) * 1024;
  const char* x = static_cast<const char*>(g.x) + row_begin / 16 * column;
  const char* w = static_cast<const char*>(g.w.panels) + panel * 2 * column;
  Ahead ahead{w + 2 * column, (32 + blocks - 1) / blocks};  // the next panel
  alignas(64) float block[32 * 32];
  for (int row = row_begin; row < row_end; row += 32, x += 2 * column) {
    const int rows = min_int(32, row_end - row);
    if (rows <= 16)
      multiply_16<2>(x, w, tiles, block);
    else if (blocks == 1)
      multiply_32<true>(x, w, tiles, ahead, block);
    else
      multiply_32<false>(x, w, tiles, ahead, block);
    ahead.at += static_cast<int64_t>(ahead.lines) * tiles * 64;
    finish_product(g, row, rows, panel * kPanel, block, 32);
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
  if (rows <= 0) return;
  const int first = task % d.groups * d.panels, last = min_int(panels(g.w.n), first + d.panels);
  if (rows > 16 || last - first < 2) {
    for (int panel = first; panel < last; panel++) multiply_panel(g, row_begin, row_end, panel);
    return;
  }
  const int tiles = static_cast<int>(tiles_along(g.w.k));
  const int64_t column = static_cast<int64_t>(tiles) * 1024;
  alignas(64) float block[16 * 64];
  multiply_16<4>(static_cast<const char*>(g.x) + row_begin / 16 * column,
                 static_cast<const char*>(g.w.panels) + first * 2 * column, tiles, block);
  finish_product(g, row_begin, rows, first * kPanel, block, 64);
  finish_product(g, row_begin, rows, (first + 1) * kPanel, block + kPanel, 64);
}

}  // namespace
}  // namespace tandem
