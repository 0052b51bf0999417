// Matrix products by AMX tiles, 32 rows by a panel. When the sums of some rows are complete, the rest of their work (see
// finish_product) runs between the tile instructions of the next rows.
#pragma once

#include "rows.h"
#include "tile_amx.h"
#include "weight_panels.h"

namespace tandem {
namespace {

constexpr int kRowsPerBlock = 32;
constexpr int kRowBytesPerTask = 5 << 18;  // of a task's activations: they stay in the second-level cache
constexpr int kStepsToSettle = 2;          // after these, sums that were stored can be loaded without waiting

// Finishes rows whose sums are complete, a few at a time, between the tile instructions of the next block, which leave the vector
// units idle. Its address must never escape, so that the compiler keeps it in registers.
class Finisher {
 public:
  TANDEM_INLINE Finisher(const Gemm& g, float* space) : g_(g), space_(space), free_(space) {}

  // The space for the next block's sums, in rows of kPanel floats. The previous block's sums may still wait in the other space.
  TANDEM_INLINE float* sums() const { return free_; }

  // Call it when the block in sums() is complete. The previous block must be finished by then.
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

// How many rows to finish in each step, so that all steps together finish 32.
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

}  // namespace
}  // namespace tandem
