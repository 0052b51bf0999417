// What the units that multiply bfloat16 have in common. Included after a unit's activations, products of one block, and
// products of attention.
#pragma once

#include "attention_bf16_split.h"
#include "attention_bf16_tiles.h"
#include "gemm_bf16.h"

namespace tandem {
namespace {

void attention(const Attention& a, const AttentionTask& task, const AttentionTask* next) {
  AttentionScratch& s = *reinterpret_cast<AttentionScratch*>(a.scratch);
  if (task.blocks > 0)
    attend_split(a, task, next, s);
  else
    attend_tiles(a, task, s);
}

}  // namespace
}  // namespace tandem

#include "unit.h"

namespace tandem {
namespace {

constexpr Kernels bf16_table(const char* name) {
  Kernels k = table(name, Dtype::bf16);
  k.panel_bytes = panel_bytes;
  k.outliers = outliers;
  k.pack = pack;
  k.gemm = gemm;
  return k;
}

}  // namespace
}  // namespace tandem
