// Activations of the units that multiply bfloat16: tiles of 16 rows and 32 columns, 1 KiB each, in the order in which
// a matrix product walks through them: along K, then to the next 16 rows. Who writes a row's last columns fills its tile with zeros: a
// product multiplies all of it, and zero times the infinity of an earlier matrix is no zero.
#pragma once

#include "simd.h"

namespace tandem {
namespace {

TANDEM_INLINE int64_t tiles_along(int k) { return (k + 31) / 32; }

size_t activation_bytes(int rows, int k) {
  return static_cast<size_t>(round_up(rows, 16) / 16) * tiles_along(k) * 1024;
}

TANDEM_INLINE uint16_t* activation_at(void* activation, int k, int row, int column) {
  const int64_t tile = (row >> 4) * tiles_along(k) + (column >> 5);
  return static_cast<uint16_t*>(activation) + tile * 512 + (row & 15) * 32 + (column & 31);
}

// Columns [column, column + W) of a row; `column` is a multiple of W.
TANDEM_INLINE void put(void* activation, int k, int row, int column, vf v) {
  uint16_t* at = activation_at(activation, k, row, column);
  store_bf16(at, v);
  if (column + W >= k && column % 32 == 0) store_bf16(at + W, vf{});
}

TANDEM_INLINE void put_span(void* activation, int k, int row, int column, const float* x, int n) {
  int i = 0;
  if (column % W == 0)
    for (; i + W <= n; i += W) put(activation, k, row, column + i, load(x + i));
  for (; i < n; i++) *activation_at(activation, k, row, column + i) = float_to_bf16(x[i]);
  if (column + n < k) return;
  for (i = k; i < round_up(k, 32); i++) *activation_at(activation, k, row, i) = 0;
}

// x / (1 + e^-x), exact enough for the bfloat16 that it becomes.
TANDEM_INLINE vf silu(vf x) {
  return _mm512_mul_ps(x, _mm512_rcp14_ps(1.0f + power_of_two(x * -kLog2E)));
}

void gather(const void* from, void* to, int k, const int64_t* rows, int begin, int end) {
  for (int row = begin; row < end; row++)
    for (int column = 0; column < k; column += 32)
      memcpy(activation_at(to, k, row, column),
             activation_at(const_cast<void*>(from), k, static_cast<int>(rows[row]), column), 64);
}

void read_activation(const void* activation, int k, int row, float* out) {
  const uint16_t* tile = activation_at(const_cast<void*>(activation), k, row, 0);
  int i = 0;
  for (; i + 32 <= k; i += 32, tile += 512) {
    store(out + i, load_bf16(tile));
    store(out + i + W, load_bf16(tile + W));
  }
  for (; i < k; i++) out[i] = bf16_to_float(tile[i & 31]);
}

}  // namespace
}  // namespace tandem
