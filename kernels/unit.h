// The table of one unit. Included last by each unit's source, after its kernels.
#pragma once

namespace tandem {
namespace {

void nothing() {}

constexpr Kernels table(const char* name, Dtype dtype) {
  Kernels k = {};
  k.name = name;
  k.dtype = dtype;
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
