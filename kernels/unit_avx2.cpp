// Kernels for AVX2 with FMA. Compiled with those flags; elsewhere the unit is empty.
#if defined(__x86_64__) && !defined(TANDEM_LEFT_OUT)

#include "unit_fma.h"

namespace tandem {

const Kernels* avx2_kernels(Dtype dtype) {
  const bool can = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  return can ? vector_kernels("avx2", dtype) : nullptr;
}

}  // namespace tandem

#else

#include "kernels.h"

namespace tandem {
const Kernels* avx2_kernels(Dtype) { return nullptr; }
}  // namespace tandem

#endif
