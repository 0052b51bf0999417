// Kernels for any processor that the compiler targets.
#include "unit_fma.h"

namespace tandem {

const Kernels* portable_kernels(Dtype dtype) { return vector_kernels("portable", dtype); }

}  // namespace tandem
