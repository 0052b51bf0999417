// Kernels for AMX: bfloat16 only.
#if defined(__x86_64__) && defined(__linux__) && !defined(TANDEM_LEFT_OUT)

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "unit_bf16.h"

namespace tandem {
namespace {

bool processor_has_amx() {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  return (d >> 22 & 1) && (d >> 24 & 1);  // AMX-BF16, AMX-TILE
}

// Linux gives the tile registers' state to a process that asks for it.
bool system_permits_amx() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

bool can_use_amx() {
  return processor_has_amx() && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && system_permits_amx();
}

constexpr Kernels amx_table() {
  Kernels k = bf16_table("amx");
  k.enter = tile_enter;
  k.leave = tile_leave;
  return k;
}

}  // namespace

const Kernels* amx_kernels(Dtype dtype) {
  static const bool can = can_use_amx();
  static const Kernels kernels = amx_table();
  return can && dtype == Dtype::bf16 ? &kernels : nullptr;
}

}  // namespace tandem

#else

#include "kernels.h"

namespace tandem {
const Kernels* amx_kernels(Dtype) { return nullptr; }
}  // namespace tandem

#endif
