// Attention of a request with few query rows over one key block: see attention_bf16.h.
#pragma once

#include "attention_bf16.h"
#include "products_bf16.h"

namespace tandem {
namespace {

inline void attend_split(const Attention& a, const AttentionTask& task, const AttentionTask* next,
                         AttentionScratch& s) {
  const Tile tile = make_tile(a, task, 0);
  const Steps steps = steps_of(tile.begin, tile.end, task.block);
  const Weighted out = partial(a, task, task.block, tile.lanes);
  score_few(a, task, tile, steps, s);
  soften_few(a, tile, steps, s, out.highest, out.total);
  weigh_few(a, task, next, tile.lanes, steps, s);
  memcpy(out.values, s.sums[0], static_cast<size_t>(tile.lanes) * padded_dim(a.cache.head_dim) * 4);
  finish_block(a, task, tile);
}

}  // namespace
}  // namespace tandem
