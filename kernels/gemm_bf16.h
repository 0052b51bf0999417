// Matrix products of bfloat16: float32 accumulation in order of K, a block of rows by a panel of weights at a time.
// Few rows stream the weights through, once; many rows reuse a panel from the first-level cache while the activations
// pass by.
#pragma once

#include "products_bf16.h"
#include "weight_panels.h"

namespace tandem {
namespace {

constexpr int kPanelsPerTask = 2;
constexpr int kRowsPerTask = 512;
constexpr int kTasksPerThread = 4;    // at least, so that threads finish together,
constexpr int kFewestRows = 64;       // unless this many rows would be fewer
constexpr int kRowsToFetchFar = 128;  // with more than these, a panel is fetched while the one before is used;
constexpr int kLinesToFetchNear = 2;  // with fewer only a part of it, so many lines a step:
constexpr int kNear = 4096;           // what lies after its beginning, which the streams fetch

TANDEM_INLINE void multiply_panel(const Gemm& g, int row_begin, int row_end, int panel, const char* x,
                                  Finisher& finisher) {
  const int tiles = static_cast<int>(tiles_along(g.w.k));
  const int blocks = (row_end - row_begin + kRowsPerBlock - 1) / kRowsPerBlock;
  const bool compact = g.w.outliers >= 0, in_blocks = is_blocks(g.w.form);
  const char* stored = static_cast<const char*>(g.w.panels) + panel * g.w.panel_bytes;
  const char *plain = compact || in_blocks ? g.scratch : stored, *ahead = stored + g.w.panel_bytes;
  // Many rows leave time to fetch the whole next panel meanwhile. With few rows, so many fetches would delay the activations, which
  // come from the second-level cache.
  const bool far = row_end - row_begin > kRowsToFetchFar;
  const int64_t lines = g.w.panel_bytes / 64, times = static_cast<int64_t>(blocks) * tiles;
  const int share = far ? static_cast<int>((lines + times - 1) / times) : kLinesToFetchNear;
  for (int i = 0; i < blocks; i++) {
    const int done = i * kRowsPerBlock, row = row_begin + done, rows = min_int(kRowsPerBlock, row_end - row);
    const char* block = x + done / 16 * static_cast<int64_t>(tiles) * 1024 + done % 16 * 64;
    const int64_t fetched = static_cast<int64_t>(far ? i : i - 1) * share * tiles * 64 + (far ? 0 : kNear);
    if (i > 0)
      multiply_block(g, row, rows, panel, block, CachedStream(plain, ahead + fetched, share), finisher);
    else if (compact)
      multiply_block(g, row, rows, panel, block,
                     CompactStream(stored, g.w.outliers, tiles, g.scratch, blocks > 1 ? tiles : kRing, !far), finisher);
    else if (in_blocks)
      multiply_block(g, row, rows, panel, block,
                     BlockStream(stored, g.w.form, tiles, g.scratch, blocks > 1 ? tiles : kRing, !far), finisher);
    else
      multiply_block(g, row, rows, panel, block, PlainStream(stored, !far), finisher);
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
