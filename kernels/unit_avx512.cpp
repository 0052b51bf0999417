// Kernels for AVX-512 as every server processor since Skylake has it.
#if defined(__x86_64__) && !defined(TANDEM_LEFT_OUT)

#include "unit_fma.h"

namespace tandem {

const Kernels* avx512_kernels(Dtype dtype) {
  const bool can = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return can ? vector_kernels("avx512", dtype) : nullptr;
}

}  // namespace tandem

#else

#include "kernels.h"

namespace tandem {
const Kernels* avx512_kernels(Dtype) { return nullptr; }
}  // namespace tandem

#endif
