// The table of one unit: the kernels that it was compiled with.
#pragma once

#include "unit_parts.h"
#if UNIT_MULTIPLIES_BF16
#include "attention_bf16_split.h"
#include "attention_bf16_tiles.h"
#include "gemm_bf16.h"
#else
#include "attention_fma.h"
#include "gemm_fma.h"
#endif
#include "rows.h"

namespace tandem {
namespace {

void nothing() {}

#if UNIT_MULTIPLIES_BF16
void attention(const Attention& a, const AttentionTask& task, const AttentionTask* next) {
  AttentionScratch& s = *reinterpret_cast<AttentionScratch*>(a.scratch);
  if (task.blocks > 0)
    attend_split(a, task, next, s);
  else
    attend_tiles(a, task, s);
}
#endif

constexpr Kernels table(const char* name, Dtype dtype) {
  Kernels k = {};
  k.name = name;
  k.dtype = dtype;
  k.lanes = W;
  k.dot_rows = dtype == Dtype::f32 ? dot_rows<float> : dot_rows<uint16_t>;
  k.add_update = add_update;
  k.padded_columns = padded_columns;
  k.panels = panels;
  k.pack_bias = pack_bias;
  k.activation_bytes = activation_bytes;
  k.read_activation = read_activation;
  k.write_activation = write_activation;
  k.gather = gather;
  k.gemm_scratch = gemm_scratch;
  k.gemm_tasks = gemm_tasks;
  k.norm = norm;
  k.norm_row = norm_row;
  k.rotary = rotary;
  k.attention_scratch = attention_scratch;
  k.partial_floats = partial_floats;
  k.attention = attention;
  k.enter = nothing;
  k.leave = nothing;
  return k;
}

}  // namespace
}  // namespace tandem
