// The products of attention by AMX tiles: see attention_bf16.h.
#pragma once

#include "attention_ahead.h"
#include "attention_bf16.h"
#include "tile_amx.h"

namespace tandem {
namespace {

constexpr int kTilesTogether = 1;   // of query rows
constexpr int kColumnsAtOnce = 64;  // of V: as many sums as there are tiles for

// Scores of the block's keys, [key][16 lanes].
template <int T>
inline void score_lanes(int tile, const Steps& steps, int dim, AttentionScratch& s) {
  static_assert(T == 1);
  const char* queries = s.queries[tile];
  const int half = dim * 32;
  for (int step = steps.from; step < steps.to; step++) {
    const char* keys = s.keys + step * 2 * half;
    float* out = s.scores[0] + step * 32 * kLanes;
    TILE_ZERO(0);
    TILE_ZERO(1);
    for (int t = 0; t < half; t += 1024) {
      TILE_LOAD(4, queries + t, 64);
      TILE_LOAD(5, keys + t, 64);
      TILE_MULTIPLY(0, 5, 4);
      TILE_LOAD(6, keys + half + t, 64);
      TILE_MULTIPLY(1, 6, 4);
    }
    TILE_STORE(0, out, 64);
    TILE_STORE(1, out + 16 * kLanes, 64);
  }
}

// The weighted sums of V into s.sums[0], [dim][lane].
template <int T>
inline void weigh_lanes(const Steps& steps, int dim, AttentionScratch& s) {
  const int columns = dim / 16;
  for (int column = 0; column < columns; column += 4) {
    const bool two = column + 2 < columns;
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
    for (int step = steps.from; step < steps.to; step++) {
      const char* v = s.values + (step * columns + column) * 1024;
      TILE_LOAD(4, s.weights[0] + step * 1024, 64);
      TILE_LOAD(5, v, 64);
      TILE_MULTIPLY(0, 5, 4);
      TILE_LOAD(6, v + 1024, 64);
      TILE_MULTIPLY(1, 6, 4);
      if (!two) continue;
      TILE_LOAD(7, v + 2048, 64);
      TILE_MULTIPLY(2, 7, 4);
      TILE_LOAD(5, v + 3072, 64);
      TILE_MULTIPLY(3, 5, 4);
    }
    float* out = s.sums[0] + column * 256;
    TILE_STORE(0, out, 64);
    TILE_STORE(1, out + 256, 64);
    if (!two) continue;
    TILE_STORE(2, out + 512, 64);
    TILE_STORE(3, out + 768, 64);
  }
}

// Scores of the block's keys, [key][lanes]; those of keys that do not exist are left as they were.
inline void score_few(const Attention& a, const AttentionTask& task, const Tile& tile, const Steps& steps,
                      AttentionScratch& s) {
  const int d = a.cache.head_dim, tiles = padded_dim(d) / 32;
  const bool as_they_lie = a.cache.block_shift >= 4 && d % 32 == 0;
  RowsAhead ahead(a, &task, a.cache.kv_stride);
  pack_queries<true>(a, tile, s.queries[0]);
  for (int step = steps.from; step < steps.to; step++) {
    const int first = steps.first + step * 32;
    if (!as_they_lie) pack_keys<false, false>(find_rows(a, task, first, steps.begin, steps.end), d, s.keys, [] {});
    for (int group = 0; group < 2; group++) {
      const int key = first + group * 16;
      if (key >= steps.end || key + 16 <= steps.begin) continue;
      const char* keys = as_they_lie ? reinterpret_cast<const char*>(cache_row(a, task, key))
                                     : s.keys + group * tiles * 1024;
      const int stride = as_they_lie ? d * 2 : 64, along = as_they_lie ? 64 : 1024;
      TILE_ZERO(0);
      for (int t = 0; t < tiles; t++) {
        TILE_LOAD(4, s.queries[0] + t * 1024, 64);
        ahead.fetch(8);
        TILE_LOAD(5, keys + t * along, stride);
        ahead.fetch(8);
        TILE_MULTIPLY(0, 5, 4);
      }
      // Rows are stored in order, so each one overwrites what the one before spilled.
      TILE_STORE(0, s.scores[0] + (step * 32 + group * 16) * tile.lanes, tile.lanes * 4);
    }
  }
}

// Softmax of the block's scores, which lie [key][lanes]: of each 16 keys, vector j holds elements 16 j .. 16 j + 15.
// The weights become rows of keys (the left-hand operand).
inline void soften_few(const Attention& a, const Tile& tile, const Steps& steps, AttentionScratch& s, float* highest,
                       float* total) {
  const int lanes = tile.lanes, first = steps.first, from = steps.from * 32, to = steps.to * 32;
  const __m512 none = _mm512_set1_ps(-INFINITY);
  for (int key = from; key < to; key++) {
    if (first + key >= tile.low[lanes - 1] && first + key <= tile.limit[0]) continue;
    float* p = s.scores[0] + key * lanes;
    for (int lane = 0; lane < lanes; lane++)
      if (first + key < tile.low[lane] || first + key > tile.limit[lane]) p[lane] = -INFINITY;
  }
  __m512 vectors[kLanes];
  float elements[kLanes * kLanes];
  for (int j = 0; j < lanes; j++) {
    __m512 top = none;
    for (int key = from; key < to; key += 16)
      top = _mm512_max_ps(top, _mm512_loadu_ps(s.scores[0] + key * lanes + j * 16));
    _mm512_storeu_ps(elements + j * 16, top);
  }
  for (int lane = 0; lane < lanes; lane++) {
    float most = elements[lane];
    for (int i = 1; i < 16; i++) most = elements[i * lanes + lane] > most ? elements[i * lanes + lane] : most;
    highest[lane] = most * a.scale;
    const float shift = most == -INFINITY ? 0 : most * (a.scale * kLog2E);
    for (int i = 0; i < 16; i++) elements[i * lanes + lane] = shift;
  }
  const __m512 factor = _mm512_set1_ps(a.scale * kLog2E);
  for (int j = 0; j < lanes; j++) {
    const __m512 shift = _mm512_loadu_ps(elements + j * 16);
    __m512 sum = _mm512_setzero_ps();
    for (int key = from; key < to; key += 16) {
      float* p = s.scores[0] + key * lanes + j * 16;
      const __m512 x = power_of_two(_mm512_fmsub_ps(_mm512_loadu_ps(p), factor, shift));
      sum = _mm512_add_ps(sum, x);
      _mm512_storeu_ps(p, x);
    }
    vectors[j] = sum;
  }
  for (int j = 0; j < lanes; j++) _mm512_storeu_ps(elements + j * 16, vectors[j]);
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half * lanes; i++) elements[i] += elements[i + half * lanes];
  memcpy(total, elements, static_cast<size_t>(lanes) * 4);

  const __m512i at = _mm512_mullo_epi32(
      _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0), _mm512_set1_epi32(lanes));
  for (int key = from; key < to; key += 32) {
    const float* p = s.scores[0] + key * lanes;
    for (int lane = 0; lane < lanes; lane++) {
      const __m512 x = _mm512_i32gather_ps(at, p + lane, 4), y = _mm512_i32gather_ps(at, p + 16 * lanes + lane, 4);
      _mm512_store_si512(s.weights[0] + key * 32 + lane * 64, narrow(x, y, kOneAfterTheOther));
    }
  }
}

// The weighted sums of V, [lane][dim]. V is packed as it is used, in pieces that stay in the first-level cache.
inline void weigh_few(const Attention& a, const AttentionTask& task, const AttentionTask* next, int lanes,
                      const Steps& steps, AttentionScratch& s) {
  const int d = a.cache.head_dim, dim = padded_dim(d);
  RowsAhead ahead(a, next, 0);
  for (int column = 0; column < dim; column += kColumnsAtOnce) {
    const int end = min_int(d, column + kColumnsAtOnce);
    const bool two = column + 32 < dim, whole = end % 32 == 0;
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
    for (int step = steps.from; step < steps.to; step++) {
      char* v = s.values + step % 4 * 4096;
      Rows rows = find_rows(a, task, steps.first + step * 32, steps.begin, steps.end);
      shift_rows(rows, a.cache.kv_stride);
      if (whole && rows.whole)
        pack_values<true, false>(rows, column, end, v, [&] { ahead.fetch(8); });
      else
        pack_values<false, false>(rows, column, end, v, [&] { ahead.fetch(8); });
      TILE_LOAD(4, s.weights[0] + step * 1024, 64);
      TILE_LOAD(5, v, 64);
      TILE_MULTIPLY(0, 4, 5);
      TILE_LOAD(6, v + 1024, 64);
      TILE_MULTIPLY(1, 4, 6);
      if (!two) continue;
      TILE_LOAD(7, v + 2048, 64);
      TILE_MULTIPLY(2, 4, 7);
      TILE_LOAD(5, v + 3072, 64);
      TILE_MULTIPLY(3, 4, 5);
    }
    float* out = s.sums[0] + column;
    TILE_STORE(0, out, dim * 4);
    TILE_STORE(1, out + 16, dim * 4);
    if (!two) continue;
    TILE_STORE(2, out + 32, dim * 4);
    TILE_STORE(3, out + 48, dim * 4);
  }
}

}  // namespace
}  // namespace tandem
