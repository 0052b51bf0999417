// Matrix products by fused multiply-add, float32 accumulation in order of K.
//
// Weights lie in panels of 2 W columns: for each k, the panel's 2 W values side by side. A bfloat16 panel holds W
// 32-bit words per k: column j in the low half, column j + W in the high half, so that a shift and a mask widen it.
#pragma once

#include "packing.h"
#include "rows.h"

namespace tandem {
namespace {

// Rows per pass: as many as the registers hold.
constexpr int kRows = W == 16 ? 12 : 6;
constexpr int kRowsPerTask = 252;  // a multiple of kRows; keeps a task's rows in the second-level cache

template <typename T>
int64_t panel_bytes(int k, int) {
  return static_cast<int64_t>(kPanel) * k * static_cast<int64_t>(sizeof(T));
}

size_t gemm_scratch(int) { return 0; }

template <typename T>
void pack(const Linear& w, const WeightPart* parts, int count, bool interleave, int panel, char*) {
  T* out = static_cast<T*>(const_cast<void*>(w.panels)) + static_cast<size_t>(panel) * kPanel * w.k;
  for (int j = 0; j < kPanel; j++) {
    const SourceRow source = source_row(parts, count, interleave, static_cast<int64_t>(panel) * kPanel + j, w.k);
    for (int i = 0; i < w.k; i++) {
      const float x = source.data ? element(source.data, source.offset + i, source.dtype) : 0;
      if constexpr (sizeof(T) == 4)
        out[i * kPanel + j] = x;
      else
        out[i * kPanel + j % W * 2 + j / W] = float_to_bf16(x);
    }
  }
}

TANDEM_INLINE void load_weights(const float* p, vf& a, vf& b) {
  a = load(p);
  b = load(p + W);
}
TANDEM_INLINE void load_weights(const uint16_t* p, vf& a, vf& b) {
  vu words;
  memcpy(&words, p, sizeof words);
  const vu low = words << 16, high = words & 0xffff0000u;
  a = cast<vf>(low);
  b = cast<vf>(high);
}

template <int R, typename T>
void multiply_rows(const Gemm& g, int row0, int n0, const T* panel) {
  const int k = g.w.k;
  const int64_t stride = activation_stride(k);
  const float* x = static_cast<const float*>(g.x) + row0 * stride;
  vf sums[R][2] = {};
  for (int i = 0; i < k; i++) {
    vf a, b;
    load_weights(panel + static_cast<int64_t>(i) * kPanel, a, b);
    if (R < 4) __builtin_prefetch(panel + static_cast<int64_t>(i) * kPanel + 2048 / sizeof(T), 0, 3);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      const vf v = splat(x[r * stride + i]);
      sums[r][0] += v * a;
      sums[r][1] += v * b;
    }
  }
  float block[R * kPanel];
  for (int r = 0; r < R; r++) {
    store(block + r * kPanel, sums[r][0]);
    store(block + r * kPanel + W, sums[r][1]);
  }
  finish_product(g, row0, R, n0, block, kPanel);
}

template <int R, typename T>
void multiply_rest(const Gemm& g, int row0, int rows, int n0, const T* panel) {
  if (rows == R) return multiply_rows<R>(g, row0, n0, panel);
  if constexpr (R > 1) multiply_rest<R - 1>(g, row0, rows, n0, panel);
}

int panels_per_task(const Gemm& g) { return panels(g.w.n) >= 16 * g.threads ? 4 : 1; }

int gemm_tasks(const Gemm& g) {
  const int per_task = panels_per_task(g);
  return (panels(g.w.n) + per_task - 1) / per_task * ((g.m + kRowsPerTask - 1) / kRowsPerTask);
}

template <typename T>
void gemm(const Gemm& g, int task) {
  const int per_task = panels_per_task(g), count = panels(g.w.n), groups = (count + per_task - 1) / per_task;
  const int row_begin = task / groups * kRowsPerTask, row_end = min_int(g.m, row_begin + kRowsPerTask);
  const int first = task % groups * per_task, last = min_int(count, first + per_task);
  for (int p = first; p < last; p++) {
    const T* panel = static_cast<const T*>(g.w.panels) + static_cast<size_t>(p) * kPanel * g.w.k;
    int row = row_begin;
    for (; row + kRows <= row_end; row += kRows) multiply_rows<kRows>(g, row, p * kPanel, panel);
    if (row < row_end) multiply_rest<kRows - 1>(g, row, row_end - row, p * kPanel, panel);
  }
}

}  // namespace
}  // namespace tandem
