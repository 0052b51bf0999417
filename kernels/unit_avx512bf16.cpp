// Kernels for AVX-512 BF16 without AMX, as in AMD's processors since Zen 4: bfloat16 only.
#if defined(__x86_64__) && !defined(TANDEM_LEFT_OUT)

#include "unit_bf16.h"

namespace tandem {

const Kernels* avx512bf16_kernels(Dtype dtype) {
  static const bool can = __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  static const Kernels kernels = bf16_table("avx512bf16");
  return can && dtype == Dtype::bf16 ? &kernels : nullptr;
}

}  // namespace tandem

#else

#include "kernels.h"

namespace tandem {
const Kernels* avx512bf16_kernels(Dtype) { return nullptr; }
}  // namespace tandem

#endif
