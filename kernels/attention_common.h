// What both attention kernels share: which rows and keys a tile covers, merging key blocks, writing the result.
#pragma once

#include <type_traits>

#include "rows.h"

namespace tandem {
namespace {

// Up to 16 rows (token, head) of one request and one KV head. Lane i is query i of the request's tokens, each
// with its `group` heads side by side.
struct Tile {
  int lanes;
  int row[kLanes];    // of the batch
  int head[kLanes];   // query head
  int limit[kLanes];  // the last key that the lane reads; lanes that pad the tile repeat the last one's
  int low[kLanes];    // the first
  int begin, end;     // keys that any lane reads
};

TANDEM_INLINE int request_lanes(const Attention& a, int request) {
  return (a.query_start[request + 1] - a.query_start[request]) * a.group;
}

inline Tile make_tile(const Attention& a, const AttentionTask& task, int index) {
  Tile tile;
  const int first = index * kLanes, row0 = a.query_start[task.request];
  const int past = a.context_lens[task.request] - (a.query_start[task.request + 1] - row0);
  tile.lanes = min_int(kLanes, request_lanes(a, task.request) - first);
  int token = first / a.group, head = first % a.group;
  for (int i = 0; i < kLanes; i++) {
    tile.row[i] = row0 + token;
    tile.head[i] = task.kv_head * a.group + head;
    tile.limit[i] = past + token;
    tile.low[i] = a.window ? max_int(0, past + token - a.window + 1) : 0;
    if (i + 1 < tile.lanes && ++head == a.group) {
      head = 0;
      token++;
    }
  }
  tile.begin = tile.low[0];
  tile.end = tile.limit[kLanes - 1] + 1;
  return tile;
}

constexpr int kQueryRows = 4;  // of queries: decodes take so many at once

// f(R) for the next of so many rows, R a constant.
template <typename F>
TANDEM_INLINE void with_rows(int left, F&& f) {
  if (left == 1)
    f(std::integral_constant<int, 1>());
  else if (left == 2)
    f(std::integral_constant<int, 2>());
  else if (left == 3)
    f(std::integral_constant<int, 3>());
  else
    f(std::integral_constant<int, kQueryRows>());
}

TANDEM_INLINE int64_t key_offset(const Attention& a, const AttentionTask& task, int key) {
  const int shift = a.cache.block_shift;
  const int64_t block = a.table[task.request * a.table_stride + (key >> shift)];
  return block * a.cache.block_stride + task.kv_head * a.cache.head_stride +
         static_cast<int64_t>(key & ((1 << shift) - 1)) * a.cache.head_dim;
}

// A softmax over some keys: per lane the maximum, the sum of weights, and the weighted sum of V, with rows of
// `dim` floats.
struct Weighted {
  float* highest;  // -inf: no key
  float* total;
  float* values;
};

// Computes the factors `a` and `b` by which two softmaxes are scaled when they are merged. It works elementwise, so that every layout
// gets the same bits.
TANDEM_INLINE void merge_weights(vf& highest, vf next, vf& a, vf& b) {
  const vf merged = vmax(highest, next);
  const vf base = select(merged == splat(-INFINITY), vf{}, merged);
  a = vexp(highest - base);
  b = vexp(next - base);
  highest = merged;
}

inline void merge(const Weighted& into, const Weighted& next, int lanes, int dim) {
  float a[kLanes], b[kLanes];
  for (int i = 0; i < lanes; i += W) {
    const int part = lanes - i;
    vf highest = load_part(into.highest + i, part), va, vb;
    merge_weights(highest, load_part(next.highest + i, part), va, vb);
    store_part(into.highest + i, highest, part);
    store_part(into.total + i, combine(load_part(into.total + i, part), va, load_part(next.total + i, part), vb),
               part);
    store(a + i, va);
    store(b + i, vb);
  }
  for (int i = 0; i < lanes; i++) {
    float *o = into.values + i * dim, *v = next.values + i * dim;
    for (int j = 0; j < dim; j += W) store(o + j, combine(load(o + j), splat(a[i]), load(v + j), splat(b[i])));
  }
}

inline void write_lane(const Attention& a, const Tile& tile, int lane, const float* values, float total) {
  const vf factor = splat(1.0f / total);
  const int d = a.cache.head_dim;
  alignas(64) float out[256];
  for (int j = 0; j < d; j += W) store(out + j, load(values + j) * factor);
  put_span(a.activation, a.out_columns, tile.row[lane], tile.head[lane] * d, out, d);
}

TANDEM_INLINE int padded_dim(int head_dim) { return round_up(head_dim, 32); }

int64_t partial_floats(int head_dim, int lanes) { return static_cast<int64_t>(lanes) * (padded_dim(head_dim) + 2); }

TANDEM_INLINE Weighted partial(const Attention& a, const AttentionTask& task, int block, int lanes) {
  float* p = a.partials + task.partial + (block - task.first_block) * partial_floats(a.cache.head_dim, lanes);
  return {p, p + lanes, p + 2 * lanes};
}

// Marks one block of a split request as done. The thread that finishes the last block merges all blocks, in order.
inline void finish_block(const Attention& a, const AttentionTask& task, const Tile& tile) {
  if (__atomic_sub_fetch(&a.pending[task.pending], 1, __ATOMIC_ACQ_REL) != 0) return;
  __atomic_store_n(&a.pending[task.pending], task.blocks, __ATOMIC_RELAXED);  // for the next layer
  const int dim = padded_dim(a.cache.head_dim);
  const Weighted all = partial(a, task, task.first_block, tile.lanes);
  for (int b = 1; b < task.blocks; b++)
    merge(all, partial(a, task, task.first_block + b, tile.lanes), tile.lanes, dim);
  for (int i = 0; i < tile.lanes; i++) write_lane(a, tile, i, all.values + i * dim, all.total[i]);
}

}  // namespace
}  // namespace tandem
