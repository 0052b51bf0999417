#include "api.h"

#include <stdexcept>
#include <vector>

#include "errors.h"
#include "model.h"

struct tandem_model {
  tandem::Model model;
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

int tandem_use_embedding(tandem_model* m, const tandem_part* part) {
  return guarded([&] { m->model.use_embedding(*part); });
}

int tandem_set_rotary(tandem_model* m, const float* inverse_frequencies, int32_t count, float scaling) {
  return guarded([&] { m->model.set_rotary(inverse_frequencies, count, scaling); });
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

int tandem_profile(tandem_model* m, int32_t on, int64_t* out) {
  return guarded([&] { m->model.profile(on != 0, out); });
}
