// How one step's attention is divided into tasks. The same for all layers that share a block table and a window.
#pragma once

#include <stdint.h>

#include <vector>

#include "api.h"
#include "kernels.h"

namespace tandem {

struct AttentionPlan {
  int group;
  int window;
  bool sampled_only;  // just the tiles with rows whose logits are wanted, and what lies between them

  std::vector<AttentionTask> tasks;  // largest first
  std::vector<int32_t> pending;
  int64_t partial_floats;

  void make(const tandem_batch& batch, const tandem_spec& spec, const Kernels& kernels, int threads);
};

}  // namespace tandem
