#include "plan.h"

#include <algorithm>

namespace tandem {
namespace {

constexpr int kTasksPerThread = 6;  // so that threads finish together

// The query tiles of one request and KV head.
struct Tiles {
  int begin = 0, end = 0;
  bool split = false;  // the only tile is cut along its keys instead
};

int64_t keys_of(const AttentionTask& t) {
  return t.blocks > 0 ? 1 : static_cast<int64_t>(t.tile_end) * (t.tile_end - t.tile_begin);
}

}  // namespace

void AttentionPlan::make(const tandem_batch& batch, const tandem_spec& spec, const Kernels& kernels, int threads) {
  const int heads = spec.heads / spec.kv_heads;
  tasks.clear();
  pending.clear();
  partial_floats = 0;

  std::vector<Tiles> wanted(static_cast<size_t>(batch.requests));
  int64_t all_tiles = 0;
  const int64_t* row = batch.logit_rows;
  for (int r = 0; r < batch.requests; r++) {
    const int begin = batch.query_start[r], end = batch.query_start[r + 1], lanes = (end - begin) * heads;
    Tiles& tiles = wanted[static_cast<size_t>(r)];
    tiles = {0, (lanes + kLanes - 1) / kLanes, lanes <= kLanes};
    if (sampled_only) {
      const int64_t* const first = row;
      while (row < batch.logit_rows + batch.num_logit_rows && *row < end) row++;
      if (row == first) {
        tiles = {};
        continue;
      }
      tiles.begin = static_cast<int>(first[0] - begin) * heads / kLanes;
      tiles.end = (static_cast<int>(row[-1] - begin + 1) * heads + kLanes - 1) / kLanes;
    }
    if (!tiles.split) all_tiles += static_cast<int64_t>(tiles.end - tiles.begin) * spec.kv_heads;
  }
  const int64_t share = threads == 1 ? kTaskTiles : all_tiles / (kTasksPerThread * threads);
  const int tiles_per_task = static_cast<int>(std::clamp<int64_t>(share, 1, kTaskTiles));

  for (int r = 0; r < batch.requests; r++) {
    const Tiles tiles = wanted[static_cast<size_t>(r)];
    const int queries = batch.query_start[r + 1] - batch.query_start[r];
    if (tiles.begin == tiles.end) continue;
    for (int h = 0; h < spec.kv_heads; h++) {
      AttentionTask task{};
      task.request = r;
      task.kv_head = h;
      if (!tiles.split) {
        for (int t = tiles.begin; t < tiles.end; t += tiles_per_task) {
          task.tile_begin = t;
          task.tile_end = std::min(tiles.end, t + tiles_per_task);
          tasks.push_back(task);
        }
        continue;
      }
      const int past = batch.context_lens[r] - queries, low = window ? std::max(0, past - window + 1) : 0;
      task.first_block = low >> kKeyBlockShift;
      task.blocks = ((batch.context_lens[r] - 1) >> kKeyBlockShift) - task.first_block + 1;
      task.pending = static_cast<int32_t>(pending.size());
      task.partial = partial_floats;
      pending.push_back(task.blocks);
      partial_floats += kernels.partial_floats(spec.head_dim, queries * heads) * task.blocks;
      for (int b = 0; b < task.blocks; b++) {
        task.block = task.first_block + b;
        tasks.push_back(task);
      }
    }
  }
  std::stable_sort(tasks.begin(), tasks.end(),
                   [](const AttentionTask& a, const AttentionTask& b) { return keys_of(a) > keys_of(b); });
}

}  // namespace tandem
