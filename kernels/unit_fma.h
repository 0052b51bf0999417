// A unit that multiplies with vectors: in float32, and in bfloat16 widened to float32.
#pragma once

#include "unit.h"

namespace tandem {
namespace {

template <typename T>
constexpr Kernels vector_table(const char* name, Dtype dtype) {
  Kernels k = table(name, dtype);
  k.panel_bytes = panel_bytes<T>;
  k.pack = pack<T>;
  k.gemm = gemm<T>;
  return k;
}

const Kernels* vector_kernels(const char* name, Dtype dtype) {
  static const Kernels f32 = vector_table<float>(name, Dtype::f32);
  static const Kernels bf16 = vector_table<uint16_t>(name, Dtype::bf16);
  return dtype == Dtype::f32 ? &f32 : dtype == Dtype::bf16 ? &bf16 : nullptr;
}

}  // namespace
}  // namespace tandem
