// Making a model: weights, rotary embedding, cache.
#include "model.h"

#include <string.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "elements.h"
#include "packed.h"

namespace tandem {

void require(bool condition, const std::string& message) {
  if (!condition) throw std::invalid_argument(message);
}

const Kernels* choose_kernels(Dtype dtype, const char* limit) {
  const Kernels* (*const units[])(Dtype) = {amx_kernels, avx512bf16_kernels, avx512_kernels, avx2_kernels,
                                             portable_kernels};
  const char* const names[] = {"amx", "avx512bf16", "avx512", "avx2", "portable"};
  bool allowed = limit == nullptr || *limit == 0;
  for (int i = 0; i < 5; i++) {
    allowed = allowed || strcmp(limit, names[i]) == 0;
    if (const Kernels* k = allowed ? units[i](dtype) : nullptr) return k;
  }
  return nullptr;
}

Model::Model(const tandem_spec& spec, const Kernels* kernels, std::vector<int> cores)
    : spec_(spec),
      kernels_(kernels),
      team_(std::move(cores)),
      q_size_(spec.heads * spec.head_dim),
      qkv_size_(q_size_ + 2 * spec.kv_heads * spec.head_dim),
      layers_(static_cast<size_t>(spec.layers)) {
  // Room for plain weights; what smaller ones leave free is never touched, so it costs nothing.
  int64_t bytes = 0;
  size_t scratch = kernels_->attention_scratch(spec.head_dim);
  const auto expect = [&](Linear& w, int n, int k) {
    w.n = n;
    w.k = k;
    w.form = kernels_->dtype;
    w.outliers = -1;
    bytes += kernels_->panels(n) * kernels_->panel_bytes(w);
    scratch = std::max(scratch, kernels_->gemm_scratch(k));
    missing_.insert(&w);
  };
  for (Layer& layer : layers_) {
    expect(layer.qkv, qkv_size_, spec.hidden);
    bytes += 2 * kernels_->panel_bytes(layer.qkv);  // its parts may lie apart
    expect(layer.o, spec.hidden, q_size_);
    expect(layer.gate_up, 2 * spec.intermediate, spec.hidden);
    expect(layer.down, spec.hidden, spec.intermediate);
  }
  expect(head_, spec.vocab, spec.hidden);
  weights_ = Region(static_cast<size_t>(bytes));

  scratch_stride_ = static_cast<int64_t>((scratch + 4095) / 4096 * 4096);
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
  const std::vector<WeightPart> parts = parts_of(weights, count);
  int64_t rows = 0;
  for (const WeightPart& part : parts) rows += part.rows;
  require(rows == w.n, "the matrix has " + std::to_string(rows) + " rows where " + std::to_string(w.n) + " belong");
  require(which != TANDEM_QKV || count <= 3, "Q, K and V are three parts");
  require(!interleave || (count == 2 && weights[0].rows == weights[1].rows), "gate and up must be alike");
  require(missing_.erase(&w) == 1, "a matrix is loaded twice");

  const std::vector<WeightPart> bias_parts = biases ? parts_of(biases, count) : std::vector<WeightPart>();
  const auto in_blocks = [](const WeightPart& part) { return is_blocks(part.dtype); };
  if (which != TANDEM_QKV || is_blocks(form_of(parts, *kernels_)) || std::none_of(parts.begin(), parts.end(), in_blocks))
    return pack(w, parts, bias_parts, interleave);
  std::vector<Linear>& apart = layers_[static_cast<size_t>(layer)].apart;
  for (size_t i = 0; i < parts.size(); i++) {
    Linear part{};
    part.n = static_cast<int>(parts[i].rows);
    part.k = w.k;
    // Not `bias_parts` itself: copying a vector needs a newer libstdc++ than wheels may ask for.
    pack(part, {parts[i]}, biases ? std::vector<WeightPart>{bias_parts[i]} : std::vector<WeightPart>(), false);
    apart.push_back(part);
  }
}

void Model::pack(Linear& w, const std::vector<WeightPart>& parts, const std::vector<WeightPart>& biases,
                 bool interleave) {
  // Matrices lie in the order in which they are loaded, which is the order in which a step reads them: a prefetch
  // past one's end fetches the next.
  choose_form(w, *kernels_, team_, parts, interleave);
  w.panels = weights_.data() + weights_used_;
  weights_used_ += kernels_->panels(w.n) * w.panel_bytes;
  pack_panels(w, *kernels_, team_, parts, interleave, [this](int thread) { return scratch_of(thread); });
  if (biases.empty()) return;
  biases_.emplace_back(static_cast<size_t>(kernels_->padded_columns(w.n)));
  kernels_->pack_bias(biases_.back().data(), biases.data(), static_cast<int>(biases.size()), interleave);
  w.bias = biases_.back().data();
}

void Model::load_vector(int which, int layer, const tandem_part& part) {
  const int expected = which == TANDEM_Q_NORM || which == TANDEM_K_NORM ? spec_.head_dim : spec_.hidden;
  require(part.rows == expected, "the vector has " + std::to_string(part.rows) + " elements where " +
                                     std::to_string(expected) + " belong");
  std::vector<float>& v = vector(which, layer);
  v.resize(static_cast<size_t>(expected));
  for (int i = 0; i < expected; i++) v[static_cast<size_t>(i)] = element(part.data, i, static_cast<Dtype>(part.dtype));
}

void Model::use_embedding(const tandem_part& part) {
  const Dtype dtype = static_cast<Dtype>(part.dtype);
  require(part.rows >= spec_.vocab, "the embedding is smaller than the vocabulary");
  require(!is_blocks(dtype) || spec_.hidden % block_kind(dtype).weights == 0, "the embedding's rows end within a block");
  embedding_ = part;
}

void Model::set_rotary(const float* inverse_frequencies, int count, float scaling) {
  require(count * 2 == spec_.head_dim, "rotary embedding must cover the whole head");
  inverse_frequencies_.assign(inverse_frequencies, inverse_frequencies + count);
  rotary_scaling_ = scaling;
  rotary_.clear();
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
    if (found == plans_.end()) plans_.push_back({layer.group, window, false, {}, {}, 0});
    last_plan_ = {layer.group, window, true, {}, {}, 0};
  }
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

}  // namespace tandem
