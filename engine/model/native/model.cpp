#include "model.h"

#include <string.h>
#include <time.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

namespace tandem {
namespace {

constexpr int kRowsPerTask = 8;
constexpr int64_t kMaxPositions = 1 << 24;  // float32 counts no further
constexpr int64_t kRotaryChunk = 1024;  // positions whose angles are computed at once

int64_t now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1'000'000'000LL + t.tv_nsec;
}

void require(bool condition, const std::string& message) {
  if (!condition) throw std::invalid_argument(message);
}

float read_element(const void* data, int64_t i, Dtype dtype) {
  if (dtype == Dtype::f32) {
    float x;
    memcpy(&x, static_cast<const char*>(data) + i * 4, 4);
    return x;
  }
  uint16_t h;
  memcpy(&h, static_cast<const char*>(data) + i * 2, 2);
  if (dtype == Dtype::bf16) {
    const uint32_t bits = static_cast<uint32_t>(h) << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
  }
  const int exponent = h >> 10 & 31, fraction = h & 1023;
  const float x = exponent == 31  ? (fraction ? NAN : INFINITY)
                  : exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24)
                                  : std::ldexp(static_cast<float>(fraction + 1024), exponent - 25);
  return h & 0x8000 ? -x : x;
}

}  // namespace

const Kernels* choose_kernels(Dtype dtype, const char* limit) {
  const Kernels* (*const units[])(Dtype) = {amx_kernels, avx512_kernels, avx2_kernels, portable_kernels};
  const char* const names[] = {"amx", "avx512", "avx2", "portable"};
  bool allowed = limit == nullptr || *limit == 0;
  for (int i = 0; i < 4; i++) {
    allowed = allowed || strcmp(limit, names[i]) == 0;
    if (const Kernels* k = allowed ? units[i](dtype) : nullptr) return k;
  }
  return nullptr;
}

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

Model::Model(const tandem_spec& spec, const Kernels* kernels, std::vector<int> cores)
    : spec_(spec),
      kernels_(kernels),
      team_(std::move(cores)),
      q_size_(spec.heads * spec.head_dim),
      qkv_size_(q_size_ + 2 * spec.kv_heads * spec.head_dim),
      layers_(static_cast<size_t>(spec.layers)) {
  // In the order in which a step reads them, so that a prefetch past one matrix's end fetches the next.
  size_t bytes = 0;
  std::vector<std::pair<Linear*, size_t>> places;
  const auto place = [&](Linear& w, int n, int k) {
    w.n = n;
    w.k = k;
    places.emplace_back(&w, bytes);
    bytes += (kernels_->weight_bytes(n, k) + 63) / 64 * 64;
  };
  for (Layer& layer : layers_) {
    place(layer.qkv, qkv_size_, spec.hidden);
    place(layer.o, spec.hidden, q_size_);
    place(layer.gate_up, 2 * spec.intermediate, spec.hidden);
    place(layer.down, spec.hidden, spec.intermediate);
  }
  place(head_, spec.vocab, spec.hidden);
  weights_ = Region(bytes);
  for (const auto& [w, offset] : places) {
    w->panels = weights_.data() + offset;
    missing_.insert(w);
  }

  scratch_stride_ = static_cast<int64_t>((kernels_->attention_scratch(spec.head_dim) + 4095) / 4096 * 4096);
  scratch_ = Region(static_cast<size_t>(scratch_stride_ * team_.size()));
}

Linear& Model::linear(int which, int layer) {
  if (which == TANDEM_HEAD) return head_;
  require(layer >= 0 && layer < spec_.layers, "no such layer");
  Layer& l = layers_[static_cast<size_t>(layer)];
  switch (which) {
    case TANDEM_QKV: return l.qkv;
    case TANDEM_O: return l.o;
    case TANDEM_GATE_UP: return l.gate_up;
    case TANDEM_DOWN: return l.down;
    default: throw std::invalid_argument("no such matrix");
  }
}

std::vector<float>& Model::vector(int which, int layer) {
  if (which == TANDEM_FINAL_NORM) return final_norm_;
  require(layer >= 0 && layer < spec_.layers, "no such layer");
  Layer& l = layers_[static_cast<size_t>(layer)];
  switch (which) {
    case TANDEM_INPUT_NORM: return l.input_norm;
    case TANDEM_POST_NORM: return l.post_norm;
    case TANDEM_Q_NORM: return l.q_norm;
    case TANDEM_K_NORM: return l.k_norm;
    default: throw std::invalid_argument("no such vector");
  }
}

void Model::load_linear(int which, int layer, const tandem_part* weights, const tandem_part* biases, int count) {
  Linear& w = linear(which, layer);
  const bool interleave = which == TANDEM_GATE_UP;
  std::vector<WeightPart> parts, bias_parts;
  int64_t rows = 0;
  for (int i = 0; i < count; i++) {
    parts.push_back({weights[i].data, weights[i].rows, static_cast<Dtype>(weights[i].dtype)});
    rows += weights[i].rows;
    if (biases) bias_parts.push_back({biases[i].data, biases[i].rows, static_cast<Dtype>(biases[i].dtype)});
  }
  require(rows == w.n, "the matrix has " + std::to_string(rows) + " rows where " + std::to_string(w.n) + " belong");
  require(!interleave || (count == 2 && weights[0].rows == weights[1].rows), "gate and up must be alike");
  char* panels = const_cast<char*>(static_cast<const char*>(w.panels));
  team_.run([&](int thread) {
    team_.divide(thread, kernels_->panels(w.n),
                 [&](int p) { kernels_->pack(panels, parts.data(), count, interleave, w.k, p, p + 1); });
  });
  missing_.erase(&w);
  if (!biases) return;
  biases_.emplace_back(static_cast<size_t>(kernels_->padded_columns(w.n)));
  kernels_->pack_bias(biases_.back().data(), bias_parts.data(), count, interleave);
  w.bias = biases_.back().data();
}

void Model::load_vector(int which, int layer, const tandem_part& part) {
  const int expected = which == TANDEM_Q_NORM || which == TANDEM_K_NORM ? spec_.head_dim : spec_.hidden;
  require(part.rows == expected, "the vector has " + std::to_string(part.rows) + " elements where " +
                                     std::to_string(expected) + " belong");
  std::vector<float>& v = vector(which, layer);
  v.resize(static_cast<size_t>(expected));
  for (int i = 0; i < expected; i++) v[static_cast<size_t>(i)] = read_element(part.data, i, static_cast<Dtype>(part.dtype));
}

void Model::use_embedding(const tandem_part& part) {
  require(part.rows >= spec_.vocab, "the embedding is smaller than the vocabulary");
  embedding_ = part;
}

void Model::set_rotary(const float* inverse_frequencies, int count, float scaling) {
  require(count * 2 == spec_.head_dim, "rotary embedding must cover the whole head");
  inverse_frequencies_.assign(inverse_frequencies, inverse_frequencies + count);
  rotary_scaling_ = scaling;
  rotary_.clear();
}

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

void Model::use_cache(const tandem_cache& cache) {
  require(cache.block_size > 0 && (cache.block_size & (cache.block_size - 1)) == 0,
          "the block size must be a power of two");
  cache_ = cache;
  block_shift_ = 0;
  while (1 << block_shift_ < cache.block_size) block_shift_++;
  plans_.clear();
  for (int i = 0; i < spec_.layers; i++) {
    Layer& layer = layers_[static_cast<size_t>(i)];
    layer.group = cache.layer_group[i];
    layer.slot = cache.layer_slot[i];
    require(layer.group >= 0 && layer.group < cache.groups, "no such cache group");
    require(layer.slot >= 0 && layer.slot < cache.slots, "no such slot in the cache");
    const int window = cache.layer_window[i];
    const auto same = [&](const AttentionPlan& p) { return p.group == layer.group && p.window == window; };
    const auto found = std::find_if(plans_.begin(), plans_.end(), same);
    layer.plan = static_cast<int>(found - plans_.begin());
    if (found == plans_.end()) plans_.push_back({layer.group, window, {}, {}, 0});
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

void Model::require_loaded() const {
  require(cache_.data != nullptr, "there is no cache yet");
  require(missing_.empty(), std::to_string(missing_.size()) + " matrices are missing");
  require(embedding_.data != nullptr, "the embedding is missing");
  require(!inverse_frequencies_.empty(), "the rotary embedding is missing");
  require(!final_norm_.empty(), "the final norm is missing");
  for (const Layer& layer : layers_) {
    require(!layer.input_norm.empty() && !layer.post_norm.empty(), "a norm is missing");
    require(!spec_.qk_norm || (!layer.q_norm.empty() && !layer.k_norm.empty()), "a head norm is missing");
  }
}

void Model::reserve(int tokens, int logit_rows) {
  const size_t t = static_cast<size_t>(tokens);
  x_.reserve(t * static_cast<size_t>(spec_.hidden) * sizeof(float));
  qkv_.reserve(t * static_cast<size_t>(qkv_size_) * sizeof(float));
  normed_.reserve(kernels_->activation_bytes(tokens, spec_.hidden));
  attended_.reserve(kernels_->activation_bytes(tokens, q_size_));
  gated_.reserve(kernels_->activation_bytes(tokens, spec_.intermediate));
  sampled_.reserve(kernels_->activation_bytes(logit_rows, spec_.hidden));
}

void Model::begin(const tandem_batch& batch) {
  require_loaded();
  next_layer_ = -1;
  int64_t last_position = -1;
  for (int i = 0; i < batch.tokens; i++) {
    require(batch.token_ids[i] >= 0 && batch.token_ids[i] < spec_.vocab, "a token is not in the vocabulary");
    require(batch.positions[i] >= 0 && batch.positions[i] < kMaxPositions, "a position is out of range");
    last_position = std::max(last_position, batch.positions[i]);
  }
  for (int g = 0; g < cache_.groups; g++)
    for (int i = 0; i < batch.tokens; i++) {
      const int64_t slot = batch.slot_mapping[g][i];
      require(slot >= 0 && slot >> block_shift_ < cache_.blocks, "a slot is not in the cache");
    }
  for (int i = 0; i < batch.num_logit_rows; i++)
    require(batch.logit_rows[i] >= 0 && batch.logit_rows[i] < batch.tokens, "a logit row is not in the batch");
  for (int r = 0; r < batch.requests; r++) {
    const int queries = batch.query_start[r + 1] - batch.query_start[r];
    require(queries > 0 && batch.context_lens[r] >= queries, "a request's lengths do not agree");
  }

  extend_rotary(last_position + 1);
  reserve(batch.tokens, batch.num_logit_rows);
  size_t partials = 0;
  for (AttentionPlan& plan : plans_) {
    plan.make(batch, spec_, *kernels_, team_.size());
    partials = std::max(partials, static_cast<size_t>(plan.partial_floats));
  }
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
    if (dtype == Dtype::bf16)
      for (int i = 0; i < n; i++) out[i] = read_element(embedding_.data, from + i, Dtype::bf16);
    else
      for (int i = 0; i < n; i++) out[i] = read_element(embedding_.data, from + i, dtype);
  });
  team_.barrier();
}

void Model::normalise(int thread, const Norm& norm, int rows) {
  team_.divide(thread, (rows + kRowsPerTask - 1) / kRowsPerTask, [&](int task) {
    kernels_->norm(norm, task * kRowsPerTask, std::min(rows, (task + 1) * kRowsPerTask));
  });
  team_.barrier();
}

Gemm Model::product(const void* x, const Linear& w, GemmOut kind) const {
  Gemm g{};
  g.x = x;
  g.m = batch_.tokens;
  g.w = w;
  g.kind = kind;
  g.threads = team_.size();
  return g;
}

void Model::multiply(int thread, const Gemm& gemm) {
  team_.divide(thread, kernels_->gemm_tasks(gemm), [&](int task) { kernels_->gemm(gemm, task); });
  team_.barrier();
}

void Model::attend(int thread, const Layer& layer) {
  AttentionPlan& plan = plans_[static_cast<size_t>(layer.plan)];
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
  a.scratch = scratch_.data() + thread * scratch_stride_;
  const int count = static_cast<int>(plan.tasks.size());
  team_.share(count, [&](int index) {
    const AttentionTask* task = &plan.tasks[static_cast<size_t>(index)];
    const AttentionTask* next = index + team_.size() < count ? task + team_.size() : nullptr;
    kernels_->attention(a, *task, next && next->blocks > 0 ? next : nullptr);
  });
  team_.barrier();
}

void Model::run_layer(int index, int thread, Stopwatch& time) {
  const Layer& layer = layers_[static_cast<size_t>(index)];
  const int tokens = batch_.tokens;
  float *x = reinterpret_cast<float*>(x_.data()), *qkv = reinterpret_cast<float*>(qkv_.data());

  Norm norm{x, spec_.hidden, spec_.hidden, layer.input_norm.data(), spec_.eps, nullptr, normed_.data()};
  normalise(thread, norm, tokens);
  time.lap(TANDEM_TIME_NORM);

  Gemm g = product(normed_.data(), layer.qkv, GemmOut::store);
  g.out = qkv;
  g.out_stride = qkv_size_;
  multiply(thread, g);
  time.lap(TANDEM_TIME_QKV);

  Rotary rotary{};
  rotary.qkv = qkv;
  rotary.stride = qkv_size_;
  rotary.heads = spec_.heads;
  rotary.kv_heads = spec_.kv_heads;
  rotary.head_dim = spec_.head_dim;
  rotary.q_norm = spec_.qk_norm ? layer.q_norm.data() : nullptr;
  rotary.k_norm = spec_.qk_norm ? layer.k_norm.data() : nullptr;
  rotary.eps = spec_.eps;
  rotary.table = rotary_.data();
  rotary.positions = batch_.positions;
  rotary.slots = batch_.slot_mapping[layer.group];
  rotary.cache = layer_cache(layer);
  team_.divide(thread, (tokens + kRowsPerTask - 1) / kRowsPerTask, [&](int task) {
    kernels_->rotary(rotary, task * kRowsPerTask, std::min(tokens, (task + 1) * kRowsPerTask));
  });
  team_.barrier();
  time.lap(TANDEM_TIME_ROTARY);
  // Nobody reads what the last layer makes of a chunk that wants no logits, except its K and V.
  if (index + 1 == spec_.layers && batch_.num_logit_rows == 0) return;

  attend(thread, layer);
  time.lap(TANDEM_TIME_ATTENTION);

  g = product(attended_.data(), layer.o, GemmOut::add);
  g.out = x;
  g.out_stride = spec_.hidden;
  multiply(thread, g);
  time.lap(TANDEM_TIME_O);

  norm.weight = layer.post_norm.data();
  normalise(thread, norm, tokens);
  time.lap(TANDEM_TIME_NORM);

  g = product(normed_.data(), layer.gate_up, GemmOut::silu_mul);
  g.activation = gated_.data();
  multiply(thread, g);
  time.lap(TANDEM_TIME_GATE_UP);

  g = product(gated_.data(), layer.down, GemmOut::add);
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

void Model::logits(float* out, int64_t stride) {
  require(next_layer_ == spec_.layers, "logits come after the last layer");
  if (batch_.num_logit_rows == 0) return;
  const Norm norm{reinterpret_cast<const float*>(x_.data()), spec_.hidden,       spec_.hidden,   final_norm_.data(),
                  spec_.eps,                                 batch_.logit_rows, sampled_.data()};
  Gemm g = product(sampled_.data(), head_, GemmOut::store);
  g.m = batch_.num_logit_rows;
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
