// Attention of prompts: tiles of 16 query rows, key blocks outside, tiles inside. See attention_bf16.h.
#pragma once

#include "attention_bf16.h"
#include "products_bf16.h"

namespace tandem {
namespace {

// K and V of a block's keys that any of the task's tiles reads.
inline void pack_block(const Attention& a, const AttentionTask& task, const Steps& steps, AttentionScratch& s) {
  const int d = a.cache.head_dim, step_bytes = padded_dim(d) * 64;
  for (int step = steps.from; step < steps.to; step++) {
    char *keys = s.keys + step * step_bytes, *values = s.values + step * step_bytes;
    Rows rows = find_rows(a, task, steps.first + step * 32, steps.begin, steps.end);
    if (rows.whole && d % 32 == 0) {
      pack_keys<true, false>(rows, d, keys, [] {});
      shift_rows(rows, a.cache.kv_stride);
      pack_values<true, true>(rows, 0, d, values, [] {});
    } else {
      pack_keys<false, false>(rows, d, keys, [] {});
      shift_rows(rows, a.cache.kv_stride);
      pack_values<false, true>(rows, 0, d, values, [] {});
    }
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
TANDEM_INLINE __m512 soften_lanes(const Steps& steps, __m512 factor, __m512 shift, const float* all_scores,
                                  char* weights) {
  __m512 sums[16];
  for (__m512& sum : sums) sum = _mm512_setzero_ps();
  for (int key = steps.from * 32; key < steps.to * 32; key += 16) {
    const float* scores = all_scores + key * kLanes;
    char* out = weights + key * 32;
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

inline void merge_lanes(AttentionScratch& s, int t, __m512 highest, __m512 total, const float* sums, int dim,
                        bool is_first) {
  if (is_first) {
    _mm512_store_ps(s.highest[t], highest);
    _mm512_store_ps(s.total[t], total);
    memcpy(s.merged[t], sums, static_cast<size_t>(dim) * kLanes * 4);
    return;
  }
  __m512 most = _mm512_load_ps(s.highest[t]), va, vb;
  merge_weights(most, highest, va, vb);
  _mm512_store_ps(s.highest[t], most);
  _mm512_store_ps(s.total[t], combine(_mm512_load_ps(s.total[t]), va, total, vb));
  for (int i = 0; i < dim; i++) {
    float* o = s.merged[t] + i * kLanes;
    _mm512_store_ps(o, combine(_mm512_load_ps(o), va, _mm512_load_ps(sums + i * kLanes), vb));
  }
}

inline void write_tile(const Attention& a, const Tile& tile, int t, AttentionScratch& s) {
  const int dim = padded_dim(a.cache.head_dim);
  for (int i = 0; i < dim; i += 16) {
    __m512i r[16];
    for (int j = 0; j < 16; j++) r[j] = _mm512_load_si512(s.merged[t] + (i + j) * kLanes);
    transpose(r);
    for (int lane = 0; lane < kLanes; lane++) _mm512_store_si512(s.sums[0] + lane * dim + i, r[lane]);
  }
  for (int lane = 0; lane < tile.lanes; lane++) write_lane(a, tile, lane, s.sums[0] + lane * dim, s.total[t][lane]);
}

// T tiles, from tile `first` of the task, over one block.
template <int T>
inline void attend_block(const Attention& a, const Tile* tiles, int first, int block, AttentionScratch& s) {
  const int begin = tiles[first].begin;
  const Steps steps = steps_of(begin, tiles[first + T - 1].end, block);
  if (steps.begin >= steps.end) return;
  const int dim = padded_dim(a.cache.head_dim);
  const __m512 factor = _mm512_set1_ps(a.scale * kLog2E);
  __m512 most[T], total[T];
  score_lanes<T>(first, steps, dim, s);
  for (int t = 0; t < T; t++) {
    mask_lanes(tiles[first + t], steps, s.scores[t]);
    most[t] = highest_score(steps, s.scores[t]);
    const __mmask16 any = _mm512_cmpneq_ps_mask(most[t], _mm512_set1_ps(-INFINITY));
    const __m512 shift = _mm512_maskz_mul_ps(any, most[t], factor);
    total[t] = soften_lanes(steps, factor, shift, s.scores[t], s.weights[t]);
  }
  weigh_lanes<T>(steps, dim, s);
  for (int t = 0; t < T; t++)
    merge_lanes(s, first + t, _mm512_mul_ps(most[t], _mm512_set1_ps(a.scale)), total[t], s.sums[t], dim,
                block == begin >> kKeyBlockShift);
}

inline void attend_tiles(const Attention& a, const AttentionTask& task, AttentionScratch& s) {
  const int count = task.tile_end - task.tile_begin;
  Tile tiles[kTaskTiles];
  for (int t = 0; t < count; t++) {
    tiles[t] = make_tile(a, task, task.tile_begin + t);
    pack_queries<true>(a, tiles[t], s.queries[t]);
  }
  const int begin = tiles[0].begin, end = tiles[count - 1].end;
  for (int block = begin >> kKeyBlockShift; block <= (end - 1) >> kKeyBlockShift; block++) {
    pack_block(a, task, steps_of(begin, end, block), s);
    int t = 0;
    for (; t + kTilesTogether <= count; t += kTilesTogether) attend_block<kTilesTogether>(a, tiles, t, block, s);
    for (; t < count; t++) attend_block<1>(a, tiles, t, block, s);
  }
  for (int t = 0; t < count; t++) write_tile(a, tiles[t], t, s);
}

}  // namespace
}  // namespace tandem
