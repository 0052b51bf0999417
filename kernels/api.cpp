#include "api.h"

#include <stdexcept>
#include <vector>

#include "elements.h"
#include "errors.h"
#include "model.h"
#include "operations.h"

struct tandem_model {
  tandem::Model model;
};

struct tandem_operations {
  tandem::Operations operations;
};

namespace tandem {

std::string& last_error() {
  thread_local std::string message;
  return message;
}

}  // namespace tandem

using tandem::guarded;

const char* tandem_error() { return tandem::last_error().c_str(); }

const char* tandem_instruction_set(int32_t dtype, const char* limit) {
  const tandem::Kernels* k = tandem::choose_kernels(static_cast<tandem::Dtype>(dtype), limit);
  return k ? k->name : nullptr;
}

tandem_model* tandem_create(const tandem_spec* spec, const int32_t* cores, int32_t threads, const char* limit) {
  tandem_model* made = nullptr;
  guarded([&] {
    const tandem::Kernels* k = tandem::choose_kernels(static_cast<tandem::Dtype>(spec->dtype), limit);
    if (!k) throw std::runtime_error("no kernels for this dtype on this processor");
    made = new tandem_model{{*spec, k, std::vector<int>(cores, cores + threads)}};
  });
  return made;
}

void tandem_destroy(tandem_model* m) { delete m; }

int tandem_load_linear(tandem_model* m, int32_t which, int32_t layer, const tandem_part* weights,
                       const tandem_part* biases, int32_t count) {
  return guarded([&] { m->model.load_linear(which, layer, weights, biases, count); });
}

int tandem_load_vector(tandem_model* m, int32_t which, int32_t layer, const tandem_part* part) {
  return guarded([&] { m->model.load_vector(which, layer, *part); });
}

int64_t tandem_weight_bytes(const tandem_model* m) { return m->model.weight_bytes(); }

int tandem_widen(const tandem_part* part, int64_t inputs, int32_t dtype, void* out) {
  return guarded([&] {
    using namespace tandem;
    const Dtype from = static_cast<Dtype>(part->dtype), to = static_cast<Dtype>(dtype);
    require(to == Dtype::f32 || to == Dtype::bf16, "weights are widened to float32 or bfloat16");
    require(inputs % kGroup == 0, "rows end within a group of weights");
    for (int64_t at = 0; at < part->rows * inputs; at += kGroup) {
      float wide[kGroup];
      read_elements(part->data, at, kGroup, from, wide);
      if (to == Dtype::f32) memcpy(static_cast<float*>(out) + at, wide, sizeof wide);
      if (to == Dtype::bf16)
        for (int i = 0; i < kGroup; i++) static_cast<uint16_t*>(out)[at + i] = float_to_bf16(wide[i]);
    }
  });
}

int tandem_use_embedding(tandem_model* m, const tandem_part* part) {
  return guarded([&] { m->model.use_embedding(*part); });
}

int tandem_set_rotary(tandem_model* m, const float* inverse_frequencies, int32_t count, float scaling) {
  return guarded([&] { m->model.set_rotary(inverse_frequencies, count, scaling); });
}

int tandem_write_weights(tandem_model* m, int32_t file) {
  return guarded([&] { m->model.write_weights(file); });
}

int tandem_use_weights(tandem_model* m, int32_t file) {
  return guarded([&] { m->model.use_weights(file); });
}

int tandem_use_cache(tandem_model* m, const tandem_cache* cache) {
  return guarded([&] { m->model.use_cache(*cache); });
}

int tandem_begin(tandem_model* m, const tandem_batch* batch) {
  return guarded([&] { m->model.begin(*batch); });
}

int tandem_run_layers(tandem_model* m, int32_t first, int32_t last) {
  return guarded([&] { m->model.run_layers(first, last); });
}

int tandem_logits(tandem_model* m, float* out, int64_t stride) {
  return guarded([&] { m->model.logits(out, stride); });
}

int tandem_logits_of(tandem_model* m, const int64_t* places, int32_t count, float* out, int64_t stride) {
  return guarded([&] { m->model.logits_of(places, count, out, stride); });
}

int tandem_hidden_of(tandem_model* m, const int64_t* places, int32_t count, float* out, int64_t stride) {
  return guarded([&] { m->model.hidden_of(places, count, out, stride); });
}

int tandem_profile(tandem_model* m, int32_t on, int64_t* out) {
  return guarded([&] { m->model.profile(on != 0, out); });
}

tandem_operations* tandem_operations_create(int32_t dtype, const int32_t* cores, int32_t threads, const char* limit) {
  tandem_operations* made = nullptr;
  guarded([&] {
    const tandem::Kernels* k = tandem::choose_kernels(static_cast<tandem::Dtype>(dtype), limit);
    if (!k) throw std::runtime_error("no kernels for this dtype on this processor");
    made = new tandem_operations{{k, std::vector<int>(cores, cores + threads)}};
  });
  return made;
}

void tandem_operations_destroy(tandem_operations* o) { delete o; }

int32_t tandem_lanes(const tandem_operations* o) { return o->operations.lanes(); }

int64_t tandem_meetings(const tandem_operations* o) { return o->operations.meetings(); }

// A number from 0, or what guarded() returns for an error.
template <typename F>
static int numbered(F&& f) {
  int number = -1;
  const int status = guarded([&] { number = f(); });
  return status == 0 ? number : status;
}

int tandem_add_linear(tandem_operations* o, const tandem_part* weights, const tandem_part* biases, int32_t count,
                      int32_t inputs, int32_t interleave) {
  return numbered([&] { return o->operations.add_linear(weights, biases, count, inputs, interleave != 0); });
}

int tandem_add_norm(tandem_operations* o, const tandem_part* weight, float offset, float eps) {
  return numbered([&] { return o->operations.add_norm(*weight, offset, eps); });
}

int tandem_add_attention(tandem_operations* o, const tandem_attention_kind* kind) {
  return numbered([&] { return o->operations.add_attention(*kind); });
}

int tandem_operations_use_cache(tandem_operations* o, const tandem_cache* cache) {
  return guarded([&] { o->operations.use_cache(*cache); });
}

int tandem_linear_rows(tandem_operations* o, int32_t matrix, const tandem_rows* x, const tandem_rows* out,
                       const tandem_updates* updates) {
  return guarded([&] { o->operations.linear(matrix, *x, *out, updates); });
}

int tandem_gated_rows(tandem_operations* o, int32_t gate_up, int32_t down, int32_t activation, const tandem_rows* x,
                      const tandem_rows* out, const tandem_updates* of_gate_up, const tandem_updates* of_down) {
  return guarded([&] { o->operations.gated(gate_up, down, activation, *x, *out, of_gate_up, of_down); });
}

int tandem_norm_rows(tandem_operations* o, int32_t norm, const tandem_rows* x, const tandem_rows* out) {
  return guarded([&] { o->operations.norm(norm, *x, *out); });
}

int tandem_update_rows(tandem_operations* o, const tandem_updates* updates, const tandem_rows* x,
                       const tandem_rows* out) {
  return guarded([&] { o->operations.update(*updates, *x, *out); });
}

int tandem_operations_begin(tandem_operations* o, const tandem_batch* batch) {
  return guarded([&] { o->operations.begin(*batch); });
}

int tandem_attend(tandem_operations* o, int32_t kind, int32_t slot, const tandem_heads* q, const tandem_heads* k,
                  const tandem_heads* v, const tandem_rotary_rows* rotary, const tandem_rows* out) {
  return guarded([&] { o->operations.attend(kind, slot, *q, *k, *v, rotary, *out); });
}
