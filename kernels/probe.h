// Single kernels, for tests and benchmarks: plain float32 in and out, whatever the unit makes of it inside.
// `dtype` and `limit` choose the unit as in tandem_create. Every function returns as those of api.h do.
#pragma once

#include "api.h"

// y = x w + bias ([m, n]), added to y with `kind` 1; with `kind` 2 the two parts are gate and up and y is [m, n / 2]. The
// weights are kept compact if `compact`, where the unit can.
TANDEM_API int tandem_probe_gemm(int32_t dtype, const char* limit, int32_t kind, int32_t m, int32_t n, int32_t k,
                                 const float* x, const tandem_part* weights, const tandem_part* biases,
                                 int32_t count, int32_t threads, int32_t compact, float* y);

// y = RMSNorm(x), [m, n].
TANDEM_API int tandem_probe_norm(int32_t dtype, const char* limit, int32_t m, int32_t n, const float* x,
                                 const float* weight, float eps, float* y);

struct tandem_probe_shape {
  int32_t heads;
  int32_t kv_heads;
  int32_t head_dim;
  int32_t window;
  float eps;
};

// qkv [tokens, (heads + 2 kv_heads) head_dim] in place, K and V to slot 0 of the cache. Norms may be null.
TANDEM_API int tandem_probe_rotary(int32_t dtype, const char* limit, const tandem_probe_shape*, const tandem_cache*,
                                   int32_t tokens, float* qkv, const float* table, const int64_t* positions,
                                   const int64_t* slots, const float* q_norm, const float* k_norm);

// Attention of q [tokens, heads, head_dim] to slot 0 of the cache, in `threads` threads; out is like q.
TANDEM_API int tandem_probe_attention(int32_t dtype, const char* limit, const tandem_probe_shape*,
                                      const tandem_cache*, const tandem_batch*, const float* q, int32_t threads,
                                      float* out);
