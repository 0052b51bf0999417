// The products of attention by vectors: see attention_bf16.h.
#pragma once

#include <type_traits>

#include "attention_ahead.h"
#include "attention_bf16.h"
#include "tile_dot.h"

namespace tandem {
namespace {

constexpr int kTilesTogether = 2;  // of query rows: every row of K or V that is broadcast serves both

// Scores of T tiles with the block's keys, each [key][16 lanes].
template <int T>
inline void score_lanes(int tile, const Steps& steps, int dim, AttentionScratch& s) {
  constexpr int R = kSumsAtOnce / T;
  for (int key = steps.from * 32; key < steps.to * 32; key += R) {
    const char* keys = s.keys + key / 16 * dim * 32 + key % 16 * 64;
    __m512 sums[R][T] = {};
    for (int t = 0; t < dim * 32; t += 1024)
      multiply_tile(sums, keys + t, s.queries[tile] + t, sizeof s.queries[0]);
    for (int i = 0; i < T; i++)
      for (int r = 0; r < R; r++) _mm512_store_ps(s.scores[i] + (key + r) * kLanes, sums[r][i]);
  }
}

// The weighted sums of V of T tiles, each [dim][lane].
template <int T>
inline void weigh_lanes(const Steps& steps, int dim, AttentionScratch& s) {
  constexpr int R = kSumsAtOnce / T;
  for (int row = 0; row < dim; row += R) {
    __m512 sums[R][T] = {};
    for (int step = steps.from; step < steps.to; step++)
      multiply_tile(sums, s.values + (step * dim + row) * 64, s.weights[0] + step * 1024, sizeof s.weights[0]);
    for (int i = 0; i < T; i++)
      for (int r = 0; r < R; r++) _mm512_store_ps(s.sums[i] + (row + r) * kLanes, sums[r][i]);
  }
}

// Decodes: up to 4 query rows by 4 vectors of keys, or of V's columns. K is transposed for that, because V's sums need
// the weights as rows of keys, which they then are already.
constexpr int kKeysAtOnce = 64;
constexpr int kColumnsAtOnce = 64;

// Scores of the block's keys, [lane][key].
inline void score_few(const Attention& a, const AttentionTask& task, const Tile& tile, const Steps& steps,
                      AttentionScratch& s) {
  const int d = a.cache.head_dim, dim = padded_dim(d);
  RowsAhead ahead(a, &task, a.cache.kv_stride);
  pack_queries<false>(a, tile, s.queries[0]);
  for (int key = steps.from * 32 / kKeysAtOnce * kKeysAtOnce; key < steps.to * 32; key += kKeysAtOnce) {
    for (int from = 0; from < kKeysAtOnce; from += 32) {
      const Rows rows = find_rows(a, task, steps.first + key + from, steps.begin, steps.end);
      if (rows.whole && d % 32 == 0)
        pack_keys<true, true>(rows, d, s.keys + from * dim * 2, [&] { ahead.fetch(16); });
      else
        pack_keys<false, true>(rows, d, s.keys + from * dim * 2, [&] { ahead.fetch(16); });
    }
    for (int lane = 0; lane < tile.lanes; lane += kQueryRows)
      with_rows(tile.lanes - lane, [&](auto count) {
        float* out = s.scores[0] + lane * kKeyBlock + key;
        __m512 sums[count][4] = {};
        for (int t = 0; t < dim * 32; t += 1024)
          multiply_tile(sums, s.queries[0] + t + lane * 64, s.keys + t, dim * 32);
        for (int r = 0; r < count; r++)
          for (int c = 0; c < 4; c++) _mm512_store_ps(out + r * kKeyBlock + c * 16, sums[r][c]);
      });
  }
}

// Softmax of the block's scores; the weights become rows of keys (the left-hand operand). Their sums are added up key
// modulo 16 first, as soften_lanes does.
inline void soften_few(const Attention& a, const Tile& tile, const Steps& steps, AttentionScratch& s, float* highest,
                       float* total) {
  const int from = steps.from * 32, to = steps.to * 32;
  const __m512 none = _mm512_set1_ps(-INFINITY), factor = _mm512_set1_ps(a.scale * kLog2E);
  const __m512i ascending = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  for (int lane = 0; lane < tile.lanes; lane++) {
    float* scores = s.scores[0] + lane * kKeyBlock;
    const __m512i low = _mm512_set1_epi32(tile.low[lane] - steps.first);
    const __m512i limit = _mm512_set1_epi32(tile.limit[lane] - steps.first);
    __m512 top = none;
    for (int key = from; key < to; key += 16) {
      const __m512i at = _mm512_add_epi32(ascending, _mm512_set1_epi32(key));
      const __mmask16 seen = _mm512_cmple_epi32_mask(at, limit) & _mm512_cmpge_epi32_mask(at, low);
      const __m512 x = _mm512_mask_mov_ps(none, seen, _mm512_load_ps(scores + key));
      _mm512_store_ps(scores + key, x);
      top = _mm512_max_ps(top, x);
    }
    const float most = _mm512_reduce_max_ps(top);
    const __m512 shift = _mm512_set1_ps(most == -INFINITY ? 0 : most * (a.scale * kLog2E));
    __m512 sums = _mm512_setzero_ps();
    for (int key = from; key < to; key += 32) {
      const __m512 x = power_of_two(_mm512_fmsub_ps(_mm512_load_ps(scores + key), factor, shift));
      const __m512 y = power_of_two(_mm512_fmsub_ps(_mm512_load_ps(scores + key + 16), factor, shift));
      sums = _mm512_add_ps(_mm512_add_ps(sums, x), y);
      _mm512_store_si512(s.weights[0] + key * 32 + lane * 64, narrow(x, y, kOneAfterTheOther));
    }
    highest[lane] = most * a.scale;
    total[lane] = sum(sums);
  }
}

// The weighted sums of columns of V for some lanes, [lane][dim].
template <int R, int C>
TANDEM_INLINE void weigh_columns(const Attention& a, const AttentionTask& task, int lane, int column,
                                 const Steps& steps, RowsAhead& ahead, AttentionScratch& s) {
  const int d = a.cache.head_dim, dim = padded_dim(d);
  __m512 sums[R][C] = {};
  for (int step = steps.from; step < steps.to; step++) {
    const char* weights = s.weights[0] + step * 1024 + lane * 64;
    Rows rows = find_rows(a, task, steps.first + step * 32, steps.begin, steps.end);
    shift_rows(rows, a.cache.kv_stride);
    const auto multiply = [&](auto whole) {
      multiply_tile(sums, weights, [&](int pair, int c) {
        const int from = column + c / 2 * 32;
        if (c == 0) ahead.fetch(C);
        return interleave(load_row<whole>(rows.at[pair * 2], from, d - from),
                          load_row<whole>(rows.at[pair * 2 + 1], from, d - from), c % 2);
      });
    };
    if (rows.whole && d % 32 == 0)
      multiply(std::true_type());
    else
      multiply(std::false_type());
  }
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) _mm512_store_ps(s.sums[0] + (lane + r) * dim + column + c * 16, sums[r][c]);
}

inline void weigh_few(const Attention& a, const AttentionTask& task, const AttentionTask* next, int lanes,
                      const Steps& steps, AttentionScratch& s) {
  const int dim = padded_dim(a.cache.head_dim);
  RowsAhead ahead(a, next, 0);
  for (int column = 0; column < dim; column += kColumnsAtOnce)
    for (int lane = 0; lane < lanes; lane += kQueryRows)
      with_rows(lanes - lane, [&](auto count) {
        if (column + 32 < dim)
          weigh_columns<count, 4>(a, task, lane, column, steps, ahead, s);
        else
          weigh_columns<count, 2>(a, task, lane, column, steps, ahead, s);
      });
}

}  // namespace
}  // namespace tandem
