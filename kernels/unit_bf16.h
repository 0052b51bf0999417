// What the units that multiply bfloat16 have in common.
#pragma once

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
