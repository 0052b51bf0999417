// The parts of a forward pass, one call each, for models whose structure another library runs. These calls do the work that takes the
// time: products with packed weights, gated activations, norms, rotary embedding with the cache write, and attention over the paged
// cache.
#pragma once

#include <stdint.h>

#include <memory>
#include <vector>

#include "api.h"
#include "kernels.h"
#include "plan.h"
#include "region.h"
#include "team.h"
#include "updates.h"

namespace tandem {

class Operations {
 public:
  Operations(const Kernels* kernels, std::vector<int> cores);

  // Packs. With `interleave` the two parts are a gate and what it is multiplied with. Returns the matrix's number.
  int add_linear(const tandem_part* weights, const tandem_part* biases, int count, int inputs, bool interleave);
  int add_norm(const tandem_part& weight, float offset, float eps);
  int add_attention(const tandem_attention_kind& kind);
  void use_cache(const tandem_cache& cache);

  // Updates may be null.
  void linear(int matrix, const tandem_rows& x, const tandem_rows& out, const tandem_updates* updates);
  void gated(int gate_up, int down, int activation, const tandem_rows& x, const tandem_rows& out,
             const tandem_updates* of_gate_up, const tandem_updates* of_down);
  void norm(int norm, const tandem_rows& x, const tandem_rows& out);

  // Adds each row's low-rank update to `out`.
  void update(const tandem_updates& updates, const tandem_rows& x, const tandem_rows& out);

  int lanes() const { return kernels_->lanes; }
  int64_t meetings() const { return team_.meetings(); }

  // The batch's arrays must stay valid until the last `attend` of the step.
  void begin(const tandem_batch& batch);
  void attend(int kind, int slot, const tandem_heads& q, const tandem_heads& k, const tandem_heads& v,
              const tandem_rotary_rows* rotary, const tandem_rows& out);

 private:
  struct Packed {
    Linear w{};
    Region panels;
    std::vector<float> bias;
  };
  struct NormWeight {
    std::vector<float> weight;
    float eps;
  };
  struct Kind {
    tandem_attention_kind asked;
    AttentionPlan plan;
  };

  const Linear& matrix(int index) const;
  void take(int thread, const tandem_rows& x, int k, void* activation, Updates& updates);
  // Returns a row in the dtype of the matrices: in place if it has this dtype, else a copy in the thread's scratch.
  const void* in_own_dtype(int thread, const tandem_rows& x, int64_t row) const;
  // Runs a thread's share of `count` tasks and of the updates' first halves, for which read(row) returns a row. Ends at a barrier.
  template <typename Work, typename Read>
  void divide_with(int thread, int count, Updates& updates, Work&& work, Read&& read);
  void give(int thread, const float* from, int64_t stride, const tandem_rows& out);
  void multiply(int thread, Gemm gemm);
  void write_kv(int thread, const Kind& kind, const Cache& cache, const tandem_heads& q, const tandem_heads& k,
                const tandem_heads& v, const tandem_rotary_rows* rotary);
  Cache layer_cache(const Kind& kind, int slot) const;
  void grow_scratch(size_t bytes);
  char* scratch_of(int thread) const { return scratch_.data() + thread * scratch_stride_; }

  const Kernels* const kernels_;
  Team team_;
  std::vector<std::unique_ptr<Packed>> matrices_;
  std::vector<NormWeight> norms_;
  std::vector<Kind> kinds_;
  tandem_cache cache_{};
  int block_shift_ = 0;
  tandem_batch batch_{};
  bool begun_ = false;
  std::vector<int64_t> numbers_;  // 0, 1, 2, ...: where a token's own rotary row is
  Updates updates_, second_updates_;
  Region in_, middle_, out_, qkv_, table_, partials_, scratch_;
  int64_t scratch_stride_ = 0;
};

}  // namespace tandem
