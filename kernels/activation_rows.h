// Activations of the units that multiply with FMA: float32 rows.
#pragma once

#include "simd.h"

namespace tandem {
namespace {

TANDEM_INLINE int64_t activation_stride(int k) { return round_up(k, 16); }

size_t activation_bytes(int rows, int k) { return static_cast<size_t>(rows) * activation_stride(k) * 4; }

TANDEM_INLINE float* activation_row(void* activation, int k, int row) {
  return static_cast<float*>(activation) + row * activation_stride(k);
}

// Columns [column, column + W) of a row; `column` is a multiple of W.
TANDEM_INLINE void put(void* activation, int k, int row, int column, vf v) {
  store(activation_row(activation, k, row) + column, v);
}

TANDEM_INLINE void put_span(void* activation, int k, int row, int column, const float* x, int n) {
  memcpy(activation_row(activation, k, row) + column, x, static_cast<size_t>(n) * 4);
}

TANDEM_INLINE vf silu(vf x) { return x / (1.0f + vexp(-x)); }

void gather(const void* from, void* to, int k, const int64_t* rows, int begin, int end) {
  for (int row = begin; row < end; row++)
    memcpy(activation_row(to, k, row), static_cast<const float*>(from) + rows[row] * activation_stride(k),
           static_cast<size_t>(k) * 4);
}

void read_activation(const void* activation, int k, int row, float* out) {
  memcpy(out, static_cast<const float*>(activation) + row * activation_stride(k), static_cast<size_t>(k) * 4);
}

}  // namespace
}  // namespace tandem
