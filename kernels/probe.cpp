#include "probe.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <vector>

#include "errors.h"
#include "kernels.h"
#include "elements.h"
#include "model.h"
#include "packed.h"
#include "plan.h"
#include "region.h"
#include "team.h"

namespace tandem {
namespace {

const Kernels& unit(int32_t dtype, const char* limit) {
  const Kernels* k = choose_kernels(static_cast<Dtype>(dtype), limit);
  if (!k) throw std::runtime_error("no kernels for this dtype on this processor");
  return *k;
}

Region activation(const Kernels& k, int rows, int columns) { return Region(k.activation_bytes(rows, columns)); }

int shift_of(const tandem_cache& cache) {
  int shift = 0;
  while (1 << shift < cache.block_size) shift++;
  return shift;
}

Cache slot_zero(const Kernels& k, const tandem_cache& cache, const tandem_probe_shape& shape) {
  const int64_t head = static_cast<int64_t>(cache.block_size) * shape.head_dim, kv = head * shape.kv_heads;
  return {cache.data, cache.slots * 2 * kv, kv, head, shift_of(cache), shape.head_dim, k.dtype};
}

void gemm(const Kernels& k, GemmOut kind, int m, int n, int inner, const float* x, const tandem_part* weights,
          const tandem_part* biases, int count, int threads, bool compact, float* y) {
  const bool interleave = kind == GemmOut::silu_mul;
  const std::vector<WeightPart> sources = parts_of(weights, count);
  Region in = activation(k, m, inner), out = activation(k, m, n / 2), scratch(k.gemm_scratch(inner));
  std::vector<float> bias(static_cast<size_t>(k.padded_columns(n)));
  Linear w{nullptr, 0, form_of(sources, k), -1, biases ? bias.data() : nullptr, n, inner};
  for (int p = 0; compact && !is_blocks(w.form) && k.outliers && p < k.panels(n); p++)
    w.outliers = std::max(w.outliers, k.outliers(sources.data(), count, interleave, inner, p));
  w.panel_bytes = k.panel_bytes(w);
  Region panels(static_cast<size_t>(k.panels(n) * w.panel_bytes));
  w.panels = panels.data();
  for (int p = 0; p < k.panels(n); p++) k.pack(w, sources.data(), count, interleave, p, scratch.data());
  if (biases) k.pack_bias(bias.data(), parts_of(biases, count).data(), count, interleave);
  for (int row = 0; row < m; row++) k.write_activation(in.data(), inner, row, x + static_cast<int64_t>(row) * inner);
  Gemm g{};
  g.x = in.data();
  g.m = m;
  g.w = w;
  g.scratch = scratch.data();
  g.kind = kind;
  g.out = y;
  g.out_stride = n;
  g.activation = out.data();
  g.threads = threads;
  k.enter();
  for (int task = 0; task < k.gemm_tasks(g); task++) k.gemm(g, task);
  k.leave();
  if (!interleave) return;
  for (int row = 0; row < m; row++) k.read_activation(out.data(), n / 2, row, y + static_cast<int64_t>(row) * (n / 2));
}

void attention(const Kernels& k, const tandem_probe_shape& shape, const tandem_cache& cache,
               const tandem_batch& batch, const float* q, int threads, float* out) {
  tandem_spec spec{};
  spec.heads = shape.heads;
  spec.kv_heads = shape.kv_heads;
  spec.head_dim = shape.head_dim;
  AttentionPlan plan{0, shape.window, false, {}, {}, 0};
  plan.make(batch, spec, k, threads);
  const int columns = shape.heads * shape.head_dim, count = static_cast<int>(plan.tasks.size());
  const size_t scratch_bytes = (k.attention_scratch(shape.head_dim) + 4095) / 4096 * 4096;
  Region result = activation(k, batch.tokens, columns);
  Region partials(static_cast<size_t>(plan.partial_floats) * sizeof(float));
  Region scratch(scratch_bytes * static_cast<size_t>(threads));
  Attention a{};
  a.q = q;
  a.q_stride = columns;
  a.cache = slot_zero(k, cache, shape);
  a.group = shape.heads / shape.kv_heads;
  a.scale = 1.0f / std::sqrt(static_cast<float>(shape.head_dim));
  a.window = shape.window;
  a.table = batch.block_tables[0];
  a.table_stride = batch.block_table_strides[0];
  a.query_start = batch.query_start;
  a.context_lens = batch.context_lens;
  a.activation = result.data();
  a.out_columns = columns;
  a.partials = reinterpret_cast<float*>(partials.data());
  a.pending = plan.pending.data();
  Team team(std::vector<int>(static_cast<size_t>(threads), -1));
  team.run([&](int thread) {
    Attention mine = a;
    mine.scratch = scratch.data() + static_cast<size_t>(thread) * scratch_bytes;
    k.enter();
    team.share(count, [&](int index) {
      const AttentionTask* task = &plan.tasks[static_cast<size_t>(index)];
      const AttentionTask* next = index + 1 < count && task[1].blocks > 0 ? task + 1 : nullptr;
      k.attention(mine, *task, next);
    });
    k.leave();
  });
  for (int row = 0; row < batch.tokens; row++)
    k.read_activation(result.data(), columns, row, out + static_cast<int64_t>(row) * columns);
}

}  // namespace
}  // namespace tandem

using tandem::guarded;

int tandem_probe_gemm(int32_t dtype, const char* limit, int32_t kind, int32_t m, int32_t n, int32_t k, const float* x,
                      const tandem_part* weights, const tandem_part* biases, int32_t count, int32_t threads,
                      int32_t compact, float* y) {
  return guarded([&] {
    tandem::gemm(tandem::unit(dtype, limit), static_cast<tandem::GemmOut>(kind), m, n, k, x, weights, biases, count,
                 threads, compact != 0, y);
  });
}

int tandem_probe_norm(int32_t dtype, const char* limit, int32_t m, int32_t n, const float* x,
                      const float* weight, float eps, float* y) {
  return guarded([&] {
    const tandem::Kernels& k = tandem::unit(dtype, limit);
    tandem::Region out = tandem::activation(k, m, n);
    const tandem::Norm norm{x, n, n, weight, eps, out.data()};
    k.norm(norm, 0, m);
    for (int row = 0; row < m; row++) k.read_activation(out.data(), n, row, y + static_cast<int64_t>(row) * n);
  });
}

int tandem_probe_rotary(int32_t dtype, const char* limit, const tandem_probe_shape* shape, const tandem_cache* cache,
                        int32_t tokens, float* qkv, const float* table, const int64_t* positions,
                        const int64_t* slots, const float* q_norm, const float* k_norm) {
  return guarded([&] {
    const tandem::Kernels& k = tandem::unit(dtype, limit);
    tandem::Rotary r{};
    r.qkv = qkv;
    r.stride = (shape->heads + 2 * shape->kv_heads) * shape->head_dim;
    r.heads = shape->heads;
    r.kv_heads = shape->kv_heads;
    r.head_dim = shape->head_dim;
    r.q_norm = q_norm;
    r.k_norm = k_norm;
    r.eps = shape->eps;
    r.table = table;
    r.positions = positions;
    r.slots = slots;
    r.cache = tandem::slot_zero(k, *cache, *shape);
    k.rotary(r, 0, tokens);
  });
}

int tandem_probe_attention(int32_t dtype, const char* limit, const tandem_probe_shape* shape,
                           const tandem_cache* cache, const tandem_batch* batch, const float* q, int32_t threads,
                           float* out) {
  return guarded(
      [&] { tandem::attention(tandem::unit(dtype, limit), *shape, *cache, *batch, q, threads, out); });
}
