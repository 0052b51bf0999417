// Paged attention in float32, query rows in the lanes of a vector: scores and weights lie as [key][16 lanes].
#pragma once

#include "attention_common.h"

namespace tandem {
namespace {

constexpr int kLaneVectors = kLanes / W;
constexpr int kSums = kLaneVectors * W / 2;  // as many as registers hold: of some keys and all vectors of lanes
constexpr int kValueVectors = W == 16 ? 4 : 2;

struct AttentionScratch {
  float queries[256 * kLanes];  // [head_dim][lane], scaled
  float weights[kKeyBlock * kLanes];
  const float* keys[kKeyBlock + kSums];
  const float* values[kKeyBlock];
  float highest[2][kLanes], total[2][kLanes];
  float sums[2][kLanes * 256];
  float widened[2][kKeyBlock * 256];  // a bfloat16 cache's rows
};

size_t attention_scratch(int) { return sizeof(AttentionScratch); }

inline void gather_queries(const Attention& a, const Tile& tile, float* queries) {
  const int d = a.cache.head_dim;
  for (int lane = 0; lane < kLanes; lane++) {
    const float* q = a.q + tile.row[lane] * a.q_stride + tile.head[lane] * d;
    for (int i = 0; i < d; i++) queries[i * kLanes + lane] = q[i] * a.scale;
  }
}

inline void find_rows(const Attention& a, const AttentionTask& task, int begin, int end, AttentionScratch& s) {
  const int d = a.cache.head_dim;
  for (int key = begin; key < end; key++) {
    const int64_t at = key_offset(a, task, key);
    const int i = key - begin;
    if (a.cache.dtype == Dtype::f32) {
      s.keys[i] = static_cast<const float*>(a.cache.base) + at;
      s.values[i] = s.keys[i] + a.cache.kv_stride;
      continue;
    }
    const uint16_t* row = static_cast<const uint16_t*>(a.cache.base) + at;
    for (int which = 0; which < 2; which++, row += a.cache.kv_stride) {
      float* out = s.widened[which] + i * d;
      int j = 0;
      for (; j + W <= d; j += W) store(out + j, load_bf16(row + j));
      for (; j < d; j++) out[j] = bf16_to_float(row[j]);
    }
    s.keys[i] = s.widened[0] + i * d;
    s.values[i] = s.widened[1] + i * d;
  }
  for (int i = 0; i < kSums; i++) s.keys[end - begin + i] = s.keys[end - begin - 1];
}

// Of the first V vectors of lanes.
template <int V>
void score(const Attention& a, int keys, AttentionScratch& s) {
  constexpr int kAtOnce = kSums / V;
  const int d = a.cache.head_dim;
  for (int key = 0; key < keys; key += kAtOnce) {
    vf sums[kAtOnce][V] = {};
    const float* rows[kAtOnce];
    for (int j = 0; j < kAtOnce; j++) rows[j] = s.keys[key + j];
    for (int i = 0; i < d; i++) {
#pragma GCC unroll 8
      for (int j = 0; j < kAtOnce; j++) {
        const vf k = splat(rows[j][i]);
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) sums[j][v] += k * load(s.queries + i * kLanes + v * W);
      }
    }
    for (int j = 0; j < min_int(kAtOnce, keys - key); j++)
      for (int v = 0; v < V; v++) store(s.weights + (key + j) * kLanes + v * W, sums[j][v]);
  }
}

// Below, `vectors` is how many vectors of lanes the tile fills: decodes of few heads fill one.
inline void mask_keys(const Tile& tile, int vectors, int begin, int end, float* weights) {
  for (int v = 0; v < vectors; v++) {
    vi limit, low;
    memcpy(&limit, tile.limit + v * W, sizeof limit);
    memcpy(&low, tile.low + v * W, sizeof low);
    for (int key = begin; key < end; key++) {
      float* w = weights + (key - begin) * kLanes + v * W;
      store(w, select((key <= limit) & (key >= low), load(w), splat(-INFINITY)));
    }
  }
}

inline void soften(int vectors, int keys, float* weights, float* highest, float* total) {
  for (int v = 0; v < vectors; v++) {
    float* w = weights + v * W;
    vf top = load(w), sum = {};
    for (int key = 1; key < keys; key++) top = vmax(top, load(w + key * kLanes));
    store(highest + v * W, top);
    top = select(top == splat(-INFINITY), vf{}, top);
    for (int key = 0; key < keys; key++) {
      const vf p = vexp(load(w + key * kLanes) - top);
      sum += p;
      store(w + key * kLanes, p);
    }
    store(total + v * W, sum);
  }
}

inline void weigh(const Attention& a, int lanes, int keys, const AttentionScratch& s, float* out) {
  const int d = a.cache.head_dim, dim = padded_dim(d);
  for (int lane = 0; lane < lanes; lane += 4) {
    for (int i = 0; i < d; i += kValueVectors * W) {
      vf sums[4][kValueVectors] = {};
      const bool whole = i + kValueVectors * W <= d;
      for (int key = 0; key < keys; key++) {
        const float *p = s.weights + key * kLanes + lane, *row = s.values[key] + i;
        vf value[kValueVectors];
        for (int v = 0; v < kValueVectors; v++)
          value[v] = whole ? load(row + v * W) : load_part(row + v * W, max_int(0, d - i - v * W));
#pragma GCC unroll 4
        for (int r = 0; r < 4; r++) {
          const vf weight = splat(p[r]);
#pragma GCC unroll 4
          for (int v = 0; v < kValueVectors; v++) sums[r][v] += weight * value[v];
        }
      }
      for (int r = 0; r < min_int(4, lanes - lane); r++)
        for (int v = 0; v < kValueVectors && i + v * W < dim; v++)
          store(out + (lane + r) * dim + i + v * W, sums[r][v]);
    }
  }
}

// The block's keys within [tile.begin, tile.end).
inline void attend_block(const Attention& a, const AttentionTask& task, const Tile& tile, int block,
                         AttentionScratch& s, const Weighted& out) {
  const int begin = max_int(tile.begin, block * kKeyBlock), end = min_int(tile.end, (block + 1) * kKeyBlock);
  const int vectors = tile.lanes <= W ? 1 : kLaneVectors;
  float highest[kLanes], total[kLanes];
  find_rows(a, task, begin, end, s);
  if (vectors == 1)
    score<1>(a, end - begin, s);
  else
    score<kLaneVectors>(a, end - begin, s);
  if (end - 1 > tile.limit[0] || begin < tile.low[kLanes - 1]) mask_keys(tile, vectors, begin, end, s.weights);
  soften(vectors, end - begin, s.weights, highest, total);
  weigh(a, tile.lanes, end - begin, s, out.values);
  memcpy(out.highest, highest, static_cast<size_t>(tile.lanes) * 4);
  memcpy(out.total, total, static_cast<size_t>(tile.lanes) * 4);
}

void attention(const Attention& a, const AttentionTask& task, const AttentionTask*) {
  AttentionScratch& s = *reinterpret_cast<AttentionScratch*>(a.scratch);
  const int dim = padded_dim(a.cache.head_dim);
  if (task.blocks > 0) {
    const Tile tile = make_tile(a, task, 0);
    gather_queries(a, tile, s.queries);
    attend_block(a, task, tile, task.block, s, partial(a, task, task.block, tile.lanes));
    finish_block(a, task, tile);
    return;
  }
  const Weighted all{s.highest[0], s.total[0], s.sums[0]}, next{s.highest[1], s.total[1], s.sums[1]};
  for (int index = task.tile_begin; index < task.tile_end; index++) {
    const Tile tile = make_tile(a, task, index);
    gather_queries(a, tile, s.queries);
    const int first = tile.begin >> kKeyBlockShift, last = (tile.end - 1) >> kKeyBlockShift;
    attend_block(a, task, tile, first, s, all);
    for (int block = first + 1; block <= last; block++) {
      attend_block(a, task, tile, block, s, next);
      merge(all, next, tile.lanes, dim);
    }
    for (int i = 0; i < tile.lanes; i++) write_lane(a, tile, i, all.values + i * dim, all.total[i]);
  }
}

}  // namespace
}  // namespace tandem
