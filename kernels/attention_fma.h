// Paged attention in float32, in two ways whose sums run in the same order, so that the bits are the same.
//  - Prompts: query rows in the lanes of a vector; scores and weights lie as [key][16 lanes].
//  - Decodes (split tasks): few query rows, keys in the lanes; scores and weights lie as [lane][key].
#pragma once

#include "attention_ahead.h"

namespace tandem {
namespace {

constexpr int kLaneVectors = kLanes / W;
constexpr int kKeysTogether = W / 2;  // with all vectors of lanes as many sums as registers hold
constexpr int kValueVectors = W == 16 ? 4 : 2;
constexpr int kKeyVectors = W == 16 ? 4 : 2;  // by 4 query rows, the same
constexpr int kKeysAtOnce = kKeyVectors * W;

struct AttentionScratch {
  float queries[256 * kLanes];  // scaled: [head_dim][lane], of decodes [lane][head_dim]
  float weights[kKeyBlock * kLanes];
  const char* rows[kKeyBlock];  // of decodes: where K's lie; null outside what is read
  float columns[256 * kKeysAtOnce];  // of decodes: K transposed, [head_dim][key]
  const float* keys[kKeyBlock + kKeysTogether];
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
  for (int i = 0; i < kKeysTogether; i++) s.keys[end - begin + i] = s.keys[end - begin - 1];
}

inline void score(const Attention& a, int keys, AttentionScratch& s) {
  const int d = a.cache.head_dim;
  for (int key = 0; key < keys; key += kKeysTogether) {
    vf sums[kKeysTogether][kLaneVectors] = {};
    const float* rows[kKeysTogether];
    for (int j = 0; j < kKeysTogether; j++) rows[j] = s.keys[key + j];
    for (int i = 0; i < d; i++) {
#pragma GCC unroll 8
      for (int j = 0; j < kKeysTogether; j++) {
        const vf k = splat(rows[j][i]);
#pragma GCC unroll 4
        for (int v = 0; v < kLaneVectors; v++) sums[j][v] += k * load(s.queries + i * kLanes + v * W);
      }
    }
    for (int j = 0; j < min_int(kKeysTogether, keys - key); j++)
      for (int v = 0; v < kLaneVectors; v++) store(s.weights + (key + j) * kLanes + v * W, sums[j][v]);
  }
}

inline void mask_keys(const Tile& tile, int begin, int end, float* weights) {
  for (int v = 0; v < kLaneVectors; v++) {
    vi limit, low;
    memcpy(&limit, tile.limit + v * W, sizeof limit);
    memcpy(&low, tile.low + v * W, sizeof low);
    for (int key = begin; key < end; key++) {
      float* w = weights + (key - begin) * kLanes + v * W;
      store(w, select((key <= limit) & (key >= low), load(w), splat(-INFINITY)));
    }
  }
}

// Sums are added up key modulo W first, as soften_few does.
inline void soften(int begin, int keys, float* weights, float* highest, float* total) {
  for (int v = 0; v < kLaneVectors; v++) {
    float* w = weights + v * W;
    vf top = load(w), sums[W] = {};
    for (int key = 1; key < keys; key++) top = vmax(top, load(w + key * kLanes));
    store(highest + v * W, top);
    top = select(top == splat(-INFINITY), vf{}, top);
    for (int key = 0; key < keys; key++) {
      const vf p = vexp(load(w + key * kLanes) - top);
      sums[(begin + key) % W] += p;
      store(w + key * kLanes, p);
    }
    for (int half = W / 2; half > 0; half /= 2)
      for (int i = 0; i < half; i++) sums[i] += sums[i + half];
    store(total + v * W, sums[0]);
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
  find_rows(a, task, begin, end, s);
  score(a, end - begin, s);
  if (end - 1 > tile.limit[0] || begin < tile.low[kLanes - 1]) mask_keys(tile, begin, end, s.weights);
  soften(begin, end - begin, s.weights, out.highest, out.total);
  weigh(a, tile.lanes, end - begin, s, out.values);
}

// W words of a row; those that it does not have, and all of a row that is null, are zero.
TANDEM_INLINE Words load_words(const char* row, int from, int left) {
  Words words = {};
  if (row && left >= W)
    memcpy(&words, row + from * 4, sizeof words);
  else if (row)
    memcpy(&words, row + from * 4, static_cast<size_t>(left) * 4);
  return words;
}

// Transposes K of the keys from `key` of the block on.
inline void transpose_keys(const Attention& a, int key, RowsAhead& ahead, AttentionScratch& s) {
  const bool is_wide = a.cache.dtype == Dtype::f32;
  const int words = is_wide ? a.cache.head_dim : a.cache.head_dim / 2;
  for (int v = 0; v < kKeysAtOnce; v += W) {
    for (int from = 0; from < words; from += W) {
      Words r[W];
      ahead.fetch(W * W / 16);
#pragma GCC unroll 16
      for (int i = 0; i < W; i++) r[i] = load_words(s.rows[key + v + i], from, words - from);
      transpose(r);
      for (int i = 0; i < min_int(W, words - from); i++) {
        const vu column = cast<vu>(r[i]);
        float* out = s.columns + (from + i) * (is_wide ? 1 : 2) * kKeysAtOnce + v;
        if (is_wide) {
          store(out, cast<vf>(column));
        } else {
          store(out, cast<vf>(column << 16));
          store(out + kKeysAtOnce, cast<vf>(column & 0xffff0000u));
        }
      }
    }
  }
}

inline void score_few(const Attention& a, int lanes, int from, int to, RowsAhead& ahead, AttentionScratch& s) {
  const int d = a.cache.head_dim;
  for (int key = from / kKeysAtOnce * kKeysAtOnce; key < to; key += kKeysAtOnce) {
    transpose_keys(a, key, ahead, s);
    for (int lane = 0; lane < lanes; lane += kQueryRows)
      with_rows(lanes - lane, [&](auto count) {
        constexpr int R = count;
        vf sums[R][kKeyVectors] = {};
        const float* q = s.queries + lane * d;
        for (int i = 0; i < d; i++) {
          vf k[kKeyVectors];
#pragma GCC unroll 4
          for (int v = 0; v < kKeyVectors; v++) k[v] = load(s.columns + i * kKeysAtOnce + v * W);
#pragma GCC unroll 4
          for (int r = 0; r < R; r++) {
            const vf x = splat(q[r * d + i]);
#pragma GCC unroll 4
            for (int v = 0; v < kKeyVectors; v++) sums[r][v] += k[v] * x;
          }
        }
        for (int r = 0; r < R; r++)
          for (int v = 0; v < kKeyVectors; v++) store(s.weights + (lane + r) * kKeyBlock + key + v * W, sums[r][v]);
      });
  }
}

// Of keys [from, to) of the block, both multiples of W.
inline void soften_few(const Tile& tile, int first, int from, int to, AttentionScratch& s, const Weighted& out) {
  vi ascending;
  for (int i = 0; i < W; i++) ascending[i] = first + i;
  for (int lane = 0; lane < tile.lanes; lane++) {
    float *w = s.weights + lane * kKeyBlock, highest[W];
    vf top = splat(-INFINITY), sums = {};
    for (int key = from; key < to; key += W) {
      const vi at = ascending + key;
      const vf x = select((at <= tile.limit[lane]) & (at >= tile.low[lane]), load(w + key), splat(-INFINITY));
      store(w + key, x);
      top = vmax(top, x);
    }
    store(highest, top);
    float most = highest[0];
    for (int i = 1; i < W; i++) most = highest[i] > most ? highest[i] : most;
    const vf shift = splat(most == -INFINITY ? 0 : most);
    for (int key = from; key < to; key += W) {
      const vf p = vexp(load(w + key) - shift);
      sums += p;
      store(w + key, p);
    }
    out.highest[lane] = most;
    out.total[lane] = sum(sums);
  }
}

TANDEM_INLINE vf load_value(const float* row) { return load(row); }
TANDEM_INLINE vf load_value(const uint16_t* row) { return load_bf16(row); }
template <typename T>
TANDEM_INLINE vf load_value(const T* row, int left) {
  if (left >= W) return load_value(row);
  T part[W] = {};
  if (left > 0) memcpy(part, row, static_cast<size_t>(left) * sizeof(T));
  return load_value(part);
}

// The weighted sums of C vectors of V's columns, for R lanes.
template <typename T, int R, int C>
TANDEM_INLINE void weigh_columns(const Attention& a, int lane, int column, int from, int to, RowsAhead& ahead,
                                 const AttentionScratch& s, float* out) {
  const int d = a.cache.head_dim, dim = padded_dim(d);
  const float* weights = s.weights + lane * kKeyBlock;
  vf sums[R][C] = {};
  const auto multiply = [&](auto whole) {
    for (int key = from; key < to; key++) {
      const T* row = reinterpret_cast<const T*>(s.rows[key]) + a.cache.kv_stride + column;
      ahead.fetch(max_int(1, C * W * static_cast<int>(sizeof(T)) / 64));
      vf weight[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) weight[r] = splat(weights[r * kKeyBlock + key]);
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) {
        const vf value = whole ? load_value(row + c * W) : load_value(row + c * W, d - column - c * W);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) sums[r][c] += weight[r] * value;
      }
    }
  };
  if (column + C * W <= d)
    multiply(std::true_type());
  else
    multiply(std::false_type());
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C && column + c * W < dim; c++) store(out + (lane + r) * dim + column + c * W, sums[r][c]);
}

template <typename T>
void weigh_few(const Attention& a, int lanes, int from, int to, RowsAhead& ahead, const AttentionScratch& s,
               float* out) {
  for (int lane = 0; lane < lanes; lane += kQueryRows)
    with_rows(lanes - lane, [&](auto count) {
      constexpr int R = count, C = W == 16 || R < kQueryRows ? 4 : 2;
      for (int column = 0; column < a.cache.head_dim; column += C * W)
        weigh_columns<T, R, C>(a, lane, column, from, to, ahead, s, out);
    });
}

// The request's only tile over one key block.
inline void attend_split(const Attention& a, const AttentionTask& task, const AttentionTask* next,
                         AttentionScratch& s) {
  const Tile tile = make_tile(a, task, 0);
  const bool is_wide = a.cache.dtype == Dtype::f32;
  const int d = a.cache.head_dim, first = task.block * kKeyBlock, mask = (1 << a.cache.block_shift) - 1;
  const int from = max_int(tile.begin - first, 0), to = min_int(tile.end - first, kKeyBlock);
  const Weighted out = partial(a, task, task.block, tile.lanes);
  for (int lane = 0; lane < tile.lanes; lane++) {
    const float* q = a.q + tile.row[lane] * a.q_stride + tile.head[lane] * d;
    for (int i = 0; i < d; i++) s.queries[lane * d + i] = q[i] * a.scale;
  }
  memset(s.rows, 0, sizeof s.rows);
  for (int key = from; key < to; key++)
    s.rows[key] = key > from && (first + key) & mask
                      ? s.rows[key - 1] + d * (is_wide ? 4 : 2)
                      : static_cast<const char*>(a.cache.base) + key_offset(a, task, first + key) * (is_wide ? 4 : 2);
  RowsAhead values(a, &task, a.cache.kv_stride), keys(a, next, 0);
  score_few(a, tile.lanes, from, to, values, s);
  soften_few(tile, first, from / W * W, round_up(to, W), s, out);
  if (is_wide)
    weigh_few<float>(a, tile.lanes, from, to, keys, s, out.values);
  else
    weigh_few<uint16_t>(a, tile.lanes, from, to, keys, s, out.values);
  finish_block(a, task, tile);
}

void attention(const Attention& a, const AttentionTask& task, const AttentionTask* next) {
  AttentionScratch& s = *reinterpret_cast<AttentionScratch*>(a.scratch);
  const int dim = padded_dim(a.cache.head_dim);
  if (task.blocks > 0) return attend_split(a, task, next, s);
  const Weighted all{s.highest[0], s.total[0], s.sums[0]}, other{s.highest[1], s.total[1], s.sums[1]};
  for (int index = task.tile_begin; index < task.tile_end; index++) {
    const Tile tile = make_tile(a, task, index);
    gather_queries(a, tile, s.queries);
    const int first = tile.begin >> kKeyBlockShift, last = (tile.end - 1) >> kKeyBlockShift;
    attend_block(a, task, tile, first, s, all);
    for (int block = first + 1; block <= last; block++) {
      attend_block(a, task, tile, block, s, other);
      merge(all, other, tile.lanes, dim);
    }
    for (int i = 0; i < tile.lanes; i++) write_lane(a, tile, i, all.values + i * dim, all.total[i]);
  }
}

}  // namespace
}  // namespace tandem
