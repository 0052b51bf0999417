// One step of a model.
#include <string.h>
#include <time.h>

#include <algorithm>
#include <cmath>

#include "elements.h"
#include "model.h"

namespace tandem {
namespace {

constexpr int kRowsPerTask = 8;
constexpr int64_t kMaxPositions = 1 << 24;  // float32 counts no further
constexpr int64_t kRotaryChunk = 1024;      // positions whose angles are computed at once

int64_t now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1'000'000'000LL + t.tv_nsec;
}

}  // namespace

// Measures the calling thread's phases, each up to the barrier that ends it.
class Model::Stopwatch {
 public:
  Stopwatch(Model& model, int thread) : times_(model.profiling_ && thread == 0 ? model.times_ : nullptr) {
    if (times_) last_ = now();
  }
  void lap(tandem_phase phase) {
    if (!times_) return;
    const int64_t t = now();
    times_[phase] += t - last_;
    last_ = t;
  }

 private:
  int64_t* times_;
  int64_t last_ = 0;
};

void Model::extend_rotary(int64_t positions) {
  const size_t half = inverse_frequencies_.size();
  const int64_t known = static_cast<int64_t>(rotary_.size() / (2 * half));
  if (positions <= known) return;
  const int64_t end = std::max(2 * known, (positions + kRotaryChunk - 1) / kRotaryChunk * kRotaryChunk);
  rotary_.resize(static_cast<size_t>(end) * 2 * half);
  float* table = rotary_.data() + static_cast<size_t>(known) * 2 * half;
  for (int64_t p = known; p < end; p++, table += 2 * half) {
    for (size_t i = 0; i < half; i++) {
      const float angle = inverse_frequencies_[i] * static_cast<float>(p);
      table[i] = std::cos(angle) * rotary_scaling_;
      table[half + i] = std::sin(angle) * rotary_scaling_;
    }
  }
}

Cache Model::layer_cache(const Layer& layer) const {
  const int64_t head = static_cast<int64_t>(cache_.block_size) * spec_.head_dim, kv = head * spec_.kv_heads;
  const int element = kernels_->dtype == Dtype::f32 ? 4 : 2;
  Cache c;
  c.base = static_cast<char*>(cache_.data) + layer.slot * 2 * kv * element;
  c.block_stride = cache_.slots * 2 * kv;
  c.kv_stride = kv;
  c.head_stride = head;
  c.block_shift = block_shift_;
  c.head_dim = spec_.head_dim;
  c.dtype = kernels_->dtype;
  return c;
}

void Model::reserve(int tokens, int logit_rows) {
  const size_t t = static_cast<size_t>(tokens);
  x_.reserve(t * static_cast<size_t>(spec_.hidden) * sizeof(float));
  qkv_.reserve(t * static_cast<size_t>(qkv_size_) * sizeof(float));
  normed_.reserve(kernels_->activation_bytes(tokens, spec_.hidden));
  attended_.reserve(kernels_->activation_bytes(tokens, q_size_));
  gated_.reserve(kernels_->activation_bytes(tokens, spec_.intermediate));
  if (logit_rows < tokens) {
    sampled_x_.reserve(static_cast<size_t>(logit_rows) * static_cast<size_t>(spec_.hidden) * sizeof(float));
    sampled_attended_.reserve(kernels_->activation_bytes(logit_rows, q_size_));
  }
}

void check_batch(const tandem_batch& batch, const tandem_cache& cache, int block_shift) {
  require(batch.tokens > 0, "the batch is empty");
  for (int r = 0; r < batch.requests; r++) {
    const int queries = batch.query_start[r + 1] - batch.query_start[r];
    require(queries > 0 && batch.context_lens[r] >= queries, "a request's lengths do not agree");
  }
  require(batch.query_start[0] == 0 && batch.query_start[batch.requests] == batch.tokens,
          "the requests' tokens are not the batch's");
  for (int g = 0; g < cache.groups; g++) {
    for (int i = 0; i < batch.tokens; i++) {
      const int64_t slot = batch.slot_mapping[g][i];
      require(slot >= 0 && slot >> block_shift < cache.blocks, "a slot is not in the cache");
    }
    for (int r = 0; r < batch.requests; r++) {
      const int blocks = (batch.context_lens[r] + cache.block_size - 1) >> block_shift;
      require(blocks <= batch.block_table_strides[g], "a block table is too short");
      const int32_t* table = batch.block_tables[g] + r * batch.block_table_strides[g];
      int32_t low = 0, high = 0;
      for (int i = 0; i < blocks; i++) {
        low = std::min(low, table[i]);
        high = std::max(high, table[i]);
      }
      require(low >= 0 && high < cache.blocks, "a block is not in the cache");
    }
  }
}

// Everything that a step reads or writes by index. A mistake elsewhere must not become another request's answer.
void Model::check(const tandem_batch& batch) const {
  check_batch(batch, cache_, block_shift_);
  for (int i = 0; i < batch.tokens; i++) {
    require(batch.token_ids[i] >= 0 && batch.token_ids[i] < spec_.vocab, "a token is not in the vocabulary");
    require(batch.positions[i] >= 0 && batch.positions[i] < kMaxPositions, "a position is out of range");
  }
  for (int i = 0; i < batch.num_logit_rows; i++) {
    const int64_t row = batch.logit_rows[i];
    require(row >= 0 && row < batch.tokens, "a logit row is not in the batch");
    require(i == 0 || row > batch.logit_rows[i - 1], "logit rows must ascend");
  }
  for (int i = 0; i < batch.num_given_rows; i++)
    require(batch.given_rows[i] >= 0 && batch.given_rows[i] < batch.tokens, "a given row is not in the batch");
}

void Model::begin(const tandem_batch& batch) {
  require_loaded();
  next_layer_ = -1;
  check(batch);
  const int64_t last_position = *std::max_element(batch.positions, batch.positions + batch.tokens);
  extend_rotary(last_position + 1);
  reserve(batch.tokens, batch.num_logit_rows);
  size_t partials = 0;
  const auto make = [&](AttentionPlan& plan) {
    plan.make(batch, spec_, *kernels_, team_.size());
    partials = std::max(partials, static_cast<size_t>(plan.partial_floats));
  };
  for (AttentionPlan& plan : plans_) make(plan);
  if (batch.num_logit_rows < batch.tokens) make(last_plan_);
  partials_.reserve(partials * sizeof(float));
  batch_ = batch;
  next_layer_ = 0;
}

void Model::embed(int thread) {
  const int n = spec_.hidden;
  const Dtype dtype = static_cast<Dtype>(embedding_.dtype);
  float* x = reinterpret_cast<float*>(x_.data());
  team_.divide(thread, batch_.tokens, [&](int row) {
    const int64_t from = batch_.token_ids[row] * n;
    float* out = x + static_cast<int64_t>(row) * n;
    read_elements(embedding_.data, from, n, dtype, out);
    // As if the embedding had been widened in memory.
    if (is_blocks(dtype) && kernels_->dtype == Dtype::bf16)
      for (int i = 0; i < n; i++) out[i] = bf16_to_float(float_to_bf16(out[i]));
  });
  team_.barrier();
  if (batch_.num_given_rows == 0) return;
  team_.divide(thread, batch_.num_given_rows, [&](int i) {
    const float* from = batch_.given + static_cast<int64_t>(i) * n;
    std::copy(from, from + n, x + batch_.given_rows[i] * n);
  });
  team_.barrier();
}

void Model::normalise(int thread, const Norm& norm, int rows) {
  team_.divide(thread, (rows + kRowsPerTask - 1) / kRowsPerTask, [&](int task) {
    kernels_->norm(norm, task * kRowsPerTask, std::min(rows, (task + 1) * kRowsPerTask));
  });
  team_.barrier();
}

Gemm Model::product(const void* x, int rows, const Linear& w, GemmOut kind) const {
  Gemm g{};
  g.x = x;
  g.m = rows;
  g.w = w;
  g.kind = kind;
  g.threads = team_.size();
  return g;
}

void Model::multiply(int thread, const Gemm* gemms, int count) {
  int tasks = 0;
  for (int i = 0; i < count; i++) tasks += kernels_->gemm_tasks(gemms[i]);
  team_.divide(thread, tasks, [&](int task) {
    const Gemm* of = gemms;
    for (int its; task >= (its = kernels_->gemm_tasks(*of)); of++) task -= its;
    Gemm gemm = *of;
    gemm.scratch = scratch_of(thread);
    kernels_->gemm(gemm, task);
  });
  team_.barrier();
}

void Model::multiply_qkv(int thread, const Layer& layer) {
  const std::vector<Linear>& parts = layer.apart;
  Gemm gemms[3];
  float* out = reinterpret_cast<float*>(qkv_.data());
  const int count = parts.empty() ? 1 : static_cast<int>(parts.size());
  for (int i = 0; i < count; i++) {
    const Linear& w = parts.empty() ? layer.qkv : parts[static_cast<size_t>(i)];
    gemms[i] = product(normed_.data(), batch_.tokens, w, GemmOut::store);
    gemms[i].out = out;
    gemms[i].out_stride = qkv_size_;
    out += w.n;
  }
  multiply(thread, gemms, count);
}

void Model::rotate(int thread, const Layer& layer) {
  Rotary a{};
  a.qkv = reinterpret_cast<float*>(qkv_.data());
  a.stride = qkv_size_;
  a.heads = spec_.heads;
  a.kv_heads = spec_.kv_heads;
  a.head_dim = spec_.head_dim;
  a.q_norm = spec_.qk_norm ? layer.q_norm.data() : nullptr;
  a.k_norm = spec_.qk_norm ? layer.k_norm.data() : nullptr;
  a.eps = spec_.eps;
  a.table = rotary_.data();
  a.positions = batch_.positions;
  a.slots = batch_.slot_mapping[layer.group];
  a.cache = layer_cache(layer);
  team_.divide(thread, (batch_.tokens + kRowsPerTask - 1) / kRowsPerTask, [&](int task) {
    kernels_->rotary(a, task * kRowsPerTask, std::min(batch_.tokens, (task + 1) * kRowsPerTask));
  });
  team_.barrier();
}

void Model::attend(int thread, const Layer& layer, AttentionPlan& plan) {
  Attention a{};
  a.q = reinterpret_cast<const float*>(qkv_.data());
  a.q_stride = qkv_size_;
  a.cache = layer_cache(layer);
  a.group = spec_.heads / spec_.kv_heads;
  a.scale = 1.0f / std::sqrt(static_cast<float>(spec_.head_dim));
  a.window = plan.window;
  a.table = batch_.block_tables[layer.group];
  a.table_stride = batch_.block_table_strides[layer.group];
  a.query_start = batch_.query_start;
  a.context_lens = batch_.context_lens;
  a.activation = attended_.data();
  a.out_columns = q_size_;
  a.partials = reinterpret_cast<float*>(partials_.data());
  a.pending = plan.pending.data();
  a.scratch = scratch_of(thread);
  const int count = static_cast<int>(plan.tasks.size());
  team_.share(count, [&](int index) {
    const AttentionTask* task = &plan.tasks[static_cast<size_t>(index)];
    const AttentionTask* next = index + team_.size() < count ? task + team_.size() : nullptr;
    kernels_->attention(a, *task, next && next->blocks > 0 ? next : nullptr);
  });
  team_.barrier();
}

// Only the rows whose logits are wanted go on from here.
void Model::select_rows(int thread) {
  const int n = spec_.hidden;
  const float* from = reinterpret_cast<const float*>(x_.data());
  float* to = reinterpret_cast<float*>(sampled_x_.data());
  team_.divide(thread, batch_.num_logit_rows, [&](int row) {
    memcpy(to + static_cast<int64_t>(row) * n, from + batch_.logit_rows[row] * n, static_cast<size_t>(n) * 4);
    kernels_->gather(attended_.data(), sampled_attended_.data(), q_size_, batch_.logit_rows, row, row + 1);
  });
  team_.barrier();
}

void Model::run_layer(int index, int thread, Stopwatch& time) {
  const Layer& layer = layers_[static_cast<size_t>(index)];
  const bool selects = index + 1 == spec_.layers && batch_.num_logit_rows < batch_.tokens;
  int rows = batch_.tokens;
  float* x = reinterpret_cast<float*>(x_.data());

  Norm norm{x, spec_.hidden, spec_.hidden, layer.input_norm.data(), spec_.eps, normed_.data()};
  normalise(thread, norm, rows);
  time.lap(TANDEM_TIME_NORM);

  multiply_qkv(thread, layer);
  time.lap(TANDEM_TIME_QKV);

  rotate(thread, layer);
  time.lap(TANDEM_TIME_ROTARY);
  // Of the last layer of a chunk that wants no logits, only K and V are needed.
  if (selects && batch_.num_logit_rows == 0) return;

  attend(thread, layer, selects ? last_plan_ : plans_[static_cast<size_t>(layer.plan)]);
  const void* attended = attended_.data();
  if (selects) {
    select_rows(thread);
    rows = batch_.num_logit_rows;
    x = reinterpret_cast<float*>(sampled_x_.data());
    attended = sampled_attended_.data();
  }
  time.lap(TANDEM_TIME_ATTENTION);

  Gemm g = product(attended, rows, layer.o, GemmOut::add);
  g.out = x;
  g.out_stride = spec_.hidden;
  multiply(thread, g);
  time.lap(TANDEM_TIME_O);

  norm.x = x;
  norm.weight = layer.post_norm.data();
  normalise(thread, norm, rows);
  time.lap(TANDEM_TIME_NORM);

  g = product(normed_.data(), rows, layer.gate_up, GemmOut::silu_mul);
  g.activation = gated_.data();
  multiply(thread, g);
  time.lap(TANDEM_TIME_GATE_UP);

  g = product(gated_.data(), rows, layer.down, GemmOut::add);
  g.out = x;
  g.out_stride = spec_.hidden;
  multiply(thread, g);
  time.lap(TANDEM_TIME_DOWN);
}

void Model::run_layers(int first, int last) {
  require(next_layer_ >= 0 && first == next_layer_ && last > first && last <= spec_.layers,
          "layers must run once each, in order, after a step has begun");
  team_.run([&](int thread) {
    Stopwatch time(*this, thread);
    kernels_->enter();
    if (first == 0) {
      embed(thread);
      time.lap(TANDEM_TIME_EMBED);
    }
    for (int layer = first; layer < last; layer++) run_layer(layer, thread, time);
    kernels_->leave();
  });
  next_layer_ = last;
}

const float* Model::last_rows() const {
  require(next_layer_ == spec_.layers, "a step's results come after the last layer");
  const Region& x = batch_.num_logit_rows < batch_.tokens ? sampled_x_ : x_;
  return reinterpret_cast<const float*>(x.data());
}

const float* Model::last_row(int64_t place) const {
  require(place >= 0 && place < batch_.num_logit_rows, "a row is not among the step's logit rows");
  return last_rows() + place * spec_.hidden;
}

void Model::logits(float* out, int64_t stride) { project(last_rows(), batch_.num_logit_rows, out, stride); }

void Model::logits_of(const int64_t* places, int count, float* out, int64_t stride) {
  const size_t row = static_cast<size_t>(spec_.hidden) * sizeof(float);
  picked_x_.reserve(static_cast<size_t>(count) * row);
  for (int i = 0; i < count; i++) memcpy(picked_x_.data() + static_cast<size_t>(i) * row, last_row(places[i]), row);
  project(reinterpret_cast<const float*>(picked_x_.data()), count, out, stride);
}

void Model::hidden_of(const int64_t* places, int count, float* out, int64_t stride) {
  for (int i = 0; i < count; i++) {
    float* to = out + i * stride;
    memcpy(to, last_row(places[i]), static_cast<size_t>(spec_.hidden) * sizeof(float));
    kernels_->norm_row(to, final_norm_.data(), spec_.hidden, spec_.eps);
  }
}

void Model::project(const float* x, int rows, float* out, int64_t stride) {
  if (rows == 0) return;
  const Norm norm{x, spec_.hidden, spec_.hidden, final_norm_.data(), spec_.eps, normed_.data()};
  Gemm g = product(normed_.data(), rows, head_, GemmOut::store);
  g.out = out;
  g.out_stride = stride;
  team_.run([&](int thread) {
    Stopwatch time(*this, thread);
    kernels_->enter();
    normalise(thread, norm, g.m);
    multiply(thread, g);
    kernels_->leave();
    time.lap(TANDEM_TIME_HEAD);
  });
}

void Model::profile(bool on, int64_t* out) {
  memcpy(out, times_, sizeof times_);
  if (on && !profiling_) memset(times_, 0, sizeof times_);
  profiling_ = on;
}

}  // namespace tandem
