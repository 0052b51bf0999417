// What works on rows: RMSNorm, rotary embedding with the cache write, and what follows a matrix product.
#pragma once

#include "simd.h"
#include "unit_parts.h"
#include "update_rows.h"

namespace tandem {
namespace {

void write_activation(void* activation, int k, int row, const float* x) { put_span(activation, k, row, 0, x, k); }

TANDEM_INLINE float mean_square(const float* x, int n) {
  vf a = {}, b = {};
  int i = 0;
  for (; i + 2 * W <= n; i += 2 * W) {
    const vf u = load(x + i), v = load(x + i + W);
    a += u * u;
    b += v * v;
  }
  for (; i < n; i += W) {
    const vf u = load_part(x + i, min_int(W, n - i));
    a += u * u;
  }
  return sum(a + b) / static_cast<float>(n);
}

void norm(const Norm& a, int begin, int end) {
  for (int row = begin; row < end; row++) {
    const float* x = a.x + row * a.stride;
    const vf factor = splat(1.0f / sqrtf(mean_square(x, a.n) + a.eps));
    int i = 0;
    for (; i + W <= a.n; i += W) put(a.activation, a.n, row, i, load(a.weight + i) * (load(x + i) * factor));
    if (i < a.n) {
      float rest[W];
      store(rest, load_part(a.weight + i, a.n - i) * (load_part(x + i, a.n - i) * factor));
      put_span(a.activation, a.n, row, i, rest, a.n - i);
    }
  }
}

TANDEM_INLINE void norm_head(float* x, const float* weight, int n, float eps) {
  const vf factor = splat(1.0f / sqrtf(mean_square(x, n) + eps));
  for (int i = 0; i < n; i += W) {
    const int part = min_int(W, n - i);
    store_part(x + i, load_part(weight + i, part) * (load_part(x + i, part) * factor), part);
  }
}

void norm_row(float* x, const float* weight, int n, float eps) { norm_head(x, weight, n, eps); }

// GELU by its approximation with tanh, which is x times a sigmoid.
TANDEM_INLINE vf gelu_tanh(vf x) {
  return x / (1.0f + vexp(-1.5957691216057308f * (x + 0.044715f * x * x * x)));
}

// Pairs are (i, i + half), as in the checkpoints that transformers loads.
TANDEM_INLINE void rotate_head(float* x, const float* table, int half) {
  const float *cosines = table, *sines = table + half;
  for (int i = 0; i < half; i += W) {
    const int part = min_int(W, half - i);
    const vf c = load_part(cosines + i, part), s = load_part(sines + i, part);
    const vf a = load_part(x + i, part), b = load_part(x + half + i, part);
    store_part(x + i, a * c - b * s, part);
    store_part(x + half + i, b * c + a * s, part);
  }
}

TANDEM_INLINE void write_head(const Cache& cache, int64_t at, const float* x) {
  if (cache.dtype == Dtype::f32) {
    memcpy(static_cast<float*>(cache.base) + at, x, static_cast<size_t>(cache.head_dim) * 4);
    return;
  }
  uint16_t* out = static_cast<uint16_t*>(cache.base) + at;
  int i = 0;
  for (; i + W <= cache.head_dim; i += W) store_bf16(out + i, load(x + i));
  for (; i < cache.head_dim; i++) out[i] = float_to_bf16(x[i]);
}

void rotary(const Rotary& a, int begin, int end) {
  const int d = a.head_dim, mask = (1 << a.cache.block_shift) - 1;
  for (int row = begin; row < end; row++) {
    float* x = a.qkv + row * a.stride;
    const float* table = a.table + a.positions[row] * d;
    for (int h = 0; h < a.heads; h++) {
      if (a.q_norm) norm_head(x + h * d, a.q_norm, d, a.eps);
      rotate_head(x + h * d, table, d / 2);
    }
    const int64_t slot = a.slots[row];
    int64_t at = (slot >> a.cache.block_shift) * a.cache.block_stride + (slot & mask) * d;
    float *k = x + a.heads * d, *v = k + a.kv_heads * d;
    for (int h = 0; h < a.kv_heads; h++, at += a.cache.head_stride) {
      if (a.k_norm) norm_head(k + h * d, a.k_norm, d, a.eps);
      rotate_head(k + h * d, table, d / 2);
      write_head(a.cache, at, k + h * d);
      write_head(a.cache, at + a.cache.kv_stride, v + h * d);
    }
  }
}

// Rows of a product, 2 W columns of it from packed column n0, in `block` with rows of `stride` floats.
TANDEM_INLINE void finish_product(const Gemm& g, int row0, int rows, int n0, float* block, int stride) {
  if (g.num_updates > 0) add_updates(g, row0, rows, n0, block, stride);
  const float* bias = g.w.bias ? g.w.bias + n0 : nullptr;
  const vf bias0 = bias ? load(bias) : vf{}, bias1 = bias ? load(bias + W) : vf{};
  if (g.kind == GemmOut::silu_mul || g.kind == GemmOut::gelu_mul) {
    const int k = g.w.n / 2;
    for (int r = 0; r < rows; r++) {
      const vf gate = load(block + r * stride) + bias0, up = load(block + r * stride + W) + bias1;
      const vf passed = g.kind == GemmOut::silu_mul ? silu(gate) : gelu_tanh(gate);
      put(g.activation, k, row0 + r, n0 / 2, passed * up);
    }
    return;
  }
  const int first = min_int(W, g.w.n - n0), second = min_int(W, g.w.n - n0 - W);
  for (int r = 0; r < rows; r++) {
    float* out = g.out + (row0 + r) * g.out_stride + n0;
    vf a = load(block + r * stride) + bias0, b = load(block + r * stride + W) + bias1;
    if (second == W) {
      if (g.kind == GemmOut::add) {
        a += load(out);
        b += load(out + W);
      }
      store(out, a);
      store(out + W, b);
      continue;
    }
    if (g.kind == GemmOut::add) a += load_part(out, first);
    store_part(out, a, first);
    if (second > 0) {
      if (g.kind == GemmOut::add) b += load_part(out + W, second);
      store_part(out + W, b, second);
    }
  }
}

}  // namespace
}  // namespace tandem
