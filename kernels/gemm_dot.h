// Matrix products by vectors of bfloat16 pairs, up to 8 rows by a panel: as many sums as registers hold.
#pragma once

#include "rows.h"
#include "tile_dot.h"
#include "weight_panels.h"

namespace tandem {
namespace {

constexpr int kRowsPerBlock = 8;
constexpr int kRowBytesPerTask = 1 << 19;  // of a task's activations: they stay in the second-level cache

// Holds a block's sums and finishes its rows at once: the processor overlaps this with other instructions anyway.
class Finisher {
 public:
  TANDEM_INLINE Finisher(const Gemm& g, float* space) : g_(g), space_(space) {}

  TANDEM_INLINE float* sums() const { return space_; }
  TANDEM_INLINE void add(int row, int rows, int panel) { finish_product(g_, row, rows, panel * kPanel, space_, kPanel); }
  TANDEM_INLINE void finish_all() {}

  static constexpr int kBlock = kRowsPerBlock * kPanel;

 private:
  const Gemm& g_;
  float* const space_;
};

template <int R, typename Stream>
TANDEM_INLINE void multiply_few(const char* x, int tiles, Stream& weights, UpdatesAhead& ahead, float* out) {
  __m512 sums[R][2] = {};
  for (int t = 0; t < tiles; t++, x += 1024) {
    ahead.step();
    multiply_tile(sums, x, weights.next(), 1024);
  }
  for (int r = 0; r < R; r++) {
    _mm512_store_ps(out + r * kPanel, sums[r][0]);
    _mm512_store_ps(out + r * kPanel + 16, sums[r][1]);
  }
}

// Fetches the rows that a product will be added to. They lie far apart in memory, and the additions would wait for them.
TANDEM_INLINE void fetch_results(const Gemm& g, int row, int rows, int panel) {
  if (g.kind != GemmOut::add) return;
  for (int r = 0; r < rows; r++) {
    const float* out = g.out + (row + r) * g.out_stride + panel * kPanel;
    __builtin_prefetch(out, 1);
    __builtin_prefetch(out + 16, 1);
  }
}

template <typename Stream>
TANDEM_INLINE void multiply_block(const Gemm& g, int row, int rows, int panel, const char* x, Stream weights,
                                  Finisher& finisher) {
  const int tiles = static_cast<int>(tiles_along(g.w.k));
  fetch_results(g, row, rows, panel);
  UpdatesAhead ahead(g, row, rows, panel * kPanel, tiles);
  if (rows == 1)
    multiply_few<1>(x, tiles, weights, ahead, finisher.sums());
  else if (rows == 2)
    multiply_few<2>(x, tiles, weights, ahead, finisher.sums());
  else if (rows <= 4)
    multiply_few<4>(x, tiles, weights, ahead, finisher.sums());
  else
    multiply_few<8>(x, tiles, weights, ahead, finisher.sums());
  finisher.add(row, rows, panel);
}

}  // namespace
}  // namespace tandem
