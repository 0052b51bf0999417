// A decoder of the Llama family and one step of it.
#pragma once

#include <stdint.h>

#include <set>
#include <string>
#include <vector>

#include "api.h"
#include "kernels.h"
#include "plan.h"
#include "region.h"
#include "team.h"

namespace tandem {

// Throws std::invalid_argument.
void require(bool condition, const std::string& message);

// Everything that a step reads or writes by index. Throws std::invalid_argument.
void check_batch(const tandem_batch& batch, const tandem_cache& cache, int block_shift);

// The best kernels that this processor has for the dtype, not above `limit`; null without any.
const Kernels* choose_kernels(Dtype dtype, const char* limit);

class Model {
 public:
  Model(const tandem_spec& spec, const Kernels* kernels, std::vector<int> cores);

  void load_linear(int which, int layer, const tandem_part* weights, const tandem_part* biases, int count);
  void load_vector(int which, int layer, const tandem_part& part);
  void use_embedding(const tandem_part& part);
  void set_rotary(const float* inverse_frequencies, int count, float scaling);
  // Writes what was loaded to the file, which is empty. Throws std::system_error.
  void write_weights(int file);
  // Maps what a model like this one wrote. A model that was loaded frees its own weights. Throws std::exception.
  void use_weights(int file);
  void use_cache(const tandem_cache& cache);

  void begin(const tandem_batch& batch);
  void run_layers(int first, int last);
  void logits(float* out, int64_t stride);
  void logits_of(const int64_t* places, int count, float* out, int64_t stride);
  void hidden_of(const int64_t* places, int count, float* out, int64_t stride);

  void profile(bool on, int64_t* out);

  // Of all packed matrices.
  int64_t weight_bytes() const { return weights_used_; }

 private:
  struct Layer {
    Linear qkv{}, o{}, gate_up{}, down{};
    std::vector<Linear> apart;  // Q, K and V, where a file keeps these in different blocks; qkv has no weights then
    std::vector<float> input_norm, post_norm, q_norm, k_norm;
    int group = 0, slot = 0, plan = 0;
  };

  class Stopwatch;

  // What the last layer has left of the logit rows.
  const float* last_rows() const;
  const float* last_row(int64_t place) const;
  // By the last norm and the head.
  void project(const float* x, int rows, float* out, int64_t stride);

  Linear& linear(int which, int layer);
  void pack(Linear& w, const std::vector<WeightPart>& parts, const std::vector<WeightPart>& biases, bool interleave);
  std::vector<float>& vector(int which, int layer);
  template <typename Walk>
  void each_loaded(Walk& walk);
  void require_loaded() const;
  void check(const tandem_batch& batch) const;
  void reserve(int tokens, int logit_rows);
  void extend_rotary(int64_t positions);
  Cache layer_cache(const Layer& layer) const;
  char* scratch_of(int thread) const { return scratch_.data() + thread * scratch_stride_; }

  void embed(int thread);
  void run_layer(int index, int thread, Stopwatch& time);
  void normalise(int thread, const Norm& norm, int rows);
  void rotate(int thread, const Layer& layer);
  void select_rows(int thread);
  void multiply(int thread, const Gemm& gemm) { multiply(thread, &gemm, 1); }
  // Several products of the same rows. Ends at a barrier.
  void multiply(int thread, const Gemm* gemms, int count);
  void multiply_qkv(int thread, const Layer& layer);
  Gemm product(const void* x, int rows, const Linear& w, GemmOut kind) const;
  void attend(int thread, const Layer& layer, AttentionPlan& plan);

  const tandem_spec spec_;
  const Kernels* const kernels_;
  Team team_;
  const int q_size_, qkv_size_;

  Region weights_;
  int64_t weights_used_ = 0;
  std::vector<Layer> layers_;
  Linear head_{};
  std::set<const Linear*> missing_;  // not loaded yet
  std::vector<float> final_norm_;
  std::vector<std::vector<float>> biases_;
  tandem_part embedding_{};
  std::vector<float> inverse_frequencies_;
  float rotary_scaling_ = 1;
  std::vector<float> rotary_;  // per position: cosines, then sines; grows with the positions seen

  tandem_cache cache_{};
  int block_shift_ = 0;
  std::vector<AttentionPlan> plans_;  // per different (group, window)
  AttentionPlan last_plan_{};         // of the last layer, for the rows whose logits are wanted

  tandem_batch batch_{};
  int next_layer_ = -1;  // that run_layers expects; -1: no step has begun
  Region x_, qkv_, normed_, attended_, gated_, sampled_x_, sampled_attended_, picked_x_, partials_, scratch_;
  int64_t scratch_stride_ = 0;

  bool profiling_ = false;
  int64_t times_[TANDEM_TIME_COUNT] = {};
};

}  // namespace tandem
