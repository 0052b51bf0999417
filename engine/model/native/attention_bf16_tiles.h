// Attention of prompts: tiles of 16 query rows, key blocks outside, tiles inside. See attention_bf16.h.
#pragma once

#include "attention_bf16.h"

namespace tandem {
namespace {

// K and V of a block's keys that any of the task's tiles reads.
inline void pack_block(const Attention& a, const AttentionTask& task, const Steps& steps, AttentionScratch& s) {
  const int d = a.cache.head_dim, step_bytes = padded_dim(d) * 64;
  for (int step = steps.from; step < steps.to; step++) {
    char *keys = s.keys + step * step_bytes, *values = s.values + step * step_bytes;
    Rows rows = find_rows(a, task, steps.first + step * 32, steps.begin, steps.end);
    if (rows.whole && d % 32 == 0) {
      pack_keys<true>(rows, d, keys);
      shift_rows(rows, a.cache.kv_stride);
      pack_values<true, true>(rows, 0, d, values, [] {});
    } else {
      pack_keys<false>(rows, d, keys);
      shift_rows(rows, a.cache.kv_stride);
      pack_values<false, true>(rows, 0, d, values, [] {});
    }
  }
}

// Scores of the block's keys, [key][16 lanes].
inline void score_lanes(const char* queries, const Steps& steps, int dim, AttentionScratch& s) {
  const int half = dim * 32;
  TILES;
  for (int step = steps.from; step < steps.to; step++) {
    const char* keys = s.keys + step * 2 * half;
    float* out = s.scores + step * 32 * kLanes;
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

// Scores of keys that a lane does not see become -inf.
inline void mask_lanes(const Tile& tile, const Steps& steps, float* scores) {
  const int from = steps.first + steps.from * 32, to = steps.first + steps.to * 32;
  const int seen_from = tile.low[kLanes - 1], seen_to = tile.limit[0] + 1;  // by all lanes
  if (seen_from <= from && to <= seen_to) return;
  const __m512 none = _mm512_set1_ps(-INFINITY);
  const __m512i limit = _mm512_loadu_si512(tile.limit), low = _mm512_loadu_si512(tile.low);
  for (int key = from; key < to; key++) {
    if (key >= seen_from && key < seen_to) continue;
    const __m512i at = _mm512_set1_epi32(key);
    const __mmask16 seen = _mm512_cmple_epi32_mask(at, limit) & _mm512_cmpge_epi32_mask(at, low);
    float* score = scores + (key - steps.first) * kLanes;
    _mm512_store_ps(score, _mm512_mask_mov_ps(none, seen, _mm512_load_ps(score)));
  }
}

TANDEM_INLINE __m512 highest_score(const Steps& steps, const float* scores) {
  __m512 top[4];
  for (__m512& t : top) t = _mm512_set1_ps(-INFINITY);
  for (int key = steps.from * 32; key < steps.to * 32; key += 8)
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) top[i & 3] = _mm512_max_ps(top[i & 3], _mm512_load_ps(scores + (key + i) * kLanes));
  return _mm512_max_ps(_mm512_max_ps(top[0], top[1]), _mm512_max_ps(top[2], top[3]));
}

// Scores become weights, pairs of keys (the right-hand operand). Returns their sums, added up key modulo 16 first.
TANDEM_INLINE __m512 soften_lanes(const Steps& steps, __m512 factor, __m512 shift, AttentionScratch& s) {
  __m512 sums[16];
  for (__m512& sum : sums) sum = _mm512_setzero_ps();
  for (int key = steps.from * 32; key < steps.to * 32; key += 16) {
    const float* scores = s.scores + key * kLanes;
    char* out = s.weights + key * 32;
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
      const __m512 x = power_of_two(_mm512_fmsub_ps(_mm512_load_ps(scores + i * kLanes), factor, shift));
      const __m512 y = power_of_two(_mm512_fmsub_ps(_mm512_load_ps(scores + (i + 1) * kLanes), factor, shift));
      sums[i] = _mm512_add_ps(sums[i], x);
      sums[i + 1] = _mm512_add_ps(sums[i + 1], y);
      _mm512_store_si512(out + i * 32, narrow(x, y, kAlternating));
    }
  }
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; i++) sums[i] = _mm512_add_ps(sums[i], sums[i + half]);
  return sums[0];
}

// The weighted sums of V into s.sums, [dim][lane].
inline void weigh_lanes(const Steps& steps, int dim, AttentionScratch& s) {
  const int columns = dim / 16;
  TILES;
  for (int column = 0; column < columns; column += 4) {
    const bool two = column + 2 < columns;
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
    for (int step = steps.from; step < steps.to; step++) {
      const char* v = s.values + (step * columns + column) * 1024;
      TILE_LOAD(4, s.weights + step * 1024, 64);
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
    float* out = s.sums + column * 256;
    TILE_STORE(0, out, 64);
    TILE_STORE(1, out + 256, 64);
    if (!two) continue;
    TILE_STORE(2, out + 512, 64);
    TILE_STORE(3, out + 768, 64);
  }
}

inline void merge_lanes(AttentionScratch& s, int t, __m512 highest, __m512 total, int dim, bool is_first) {
  if (is_first) {
    _mm512_store_ps(s.highest[t], highest);
    _mm512_store_ps(s.total[t], total);
    memcpy(s.merged[t], s.sums, static_cast<size_t>(dim) * kLanes * 4);
    return;
  }
  __m512 most = _mm512_load_ps(s.highest[t]), va, vb;
  merge_weights(most, highest, va, vb);
  _mm512_store_ps(s.highest[t], most);
  _mm512_store_ps(s.total[t], combine(_mm512_load_ps(s.total[t]), va, total, vb));
  for (int i = 0; i < dim; i++) {
    float* o = s.merged[t] + i * kLanes;
    _mm512_store_ps(o, combine(_mm512_load_ps(o), va, _mm512_load_ps(s.sums + i * kLanes), vb));
  }
}

inline void write_tile(const Attention& a, const Tile& tile, int t, AttentionScratch& s) {
  const int dim = padded_dim(a.cache.head_dim);
  for (int i = 0; i < dim; i += 16) {
    __m512i r[16];
    for (int j = 0; j < 16; j++) r[j] = _mm512_load_si512(s.merged[t] + (i + j) * kLanes);
    transpose(r);
    for (int lane = 0; lane < kLanes; lane++) _mm512_store_si512(s.sums + lane * dim + i, r[lane]);
  }
  for (int lane = 0; lane < tile.lanes; lane++) write_lane(a, tile, lane, s.sums + lane * dim, s.total[t][lane]);
}

// One tile over one block.
inline void attend_block(const Attention& a, const Tile& tile, int t, int block, AttentionScratch& s) {
  const Steps steps = steps_of(tile, block);
  if (steps.begin >= steps.end) return;
  const int dim = padded_dim(a.cache.head_dim);
  score_lanes(s.queries[t], steps, dim, s);
  mask_lanes(tile, steps, s.scores);
  const __m512 most = highest_score(steps, s.scores);
  const __mmask16 any = _mm512_cmpneq_ps_mask(most, _mm512_set1_ps(-INFINITY));
  const __m512 factor = _mm512_set1_ps(a.scale * kLog2E);
  const __m512 total = soften_lanes(steps, factor, _mm512_maskz_mul_ps(any, most, factor), s);
  weigh_lanes(steps, dim, s);
  merge_lanes(s, t, _mm512_mul_ps(most, _mm512_set1_ps(a.scale)), total, dim, block == tile.begin >> kKeyBlockShift);
}

inline void attend_tiles(const Attention& a, const AttentionTask& task, AttentionScratch& s) {
  const int count = task.tile_end - task.tile_begin;
  Tile tiles[kTaskTiles];
  for (int t = 0; t < count; t++) {
    tiles[t] = make_tile(a, task, task.tile_begin + t);
    pack_queries(a, tiles[t], s.queries[t]);
  }
  Tile all;
  all.begin = tiles[0].begin;
  all.end = tiles[count - 1].end;
  for (int block = all.begin >> kKeyBlockShift; block <= (all.end - 1) >> kKeyBlockShift; block++) {
    pack_block(a, task, steps_of(all, block), s);
    for (int t = 0; t < count; t++) attend_block(a, tiles[t], t, block, s);
  }
  for (int t = 0; t < count; t++) write_tile(a, tiles[t], t, s);
}

}  // namespace
}  // namespace tandem
