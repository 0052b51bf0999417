// AMX tile instructions. GCC's own intrinsics do not tell the compiler which memory they read and write.
#pragma once

#include <string.h>

#include "simd.h"

#define TILE_LOAD(t, p, stride) \
  asm volatile("tileloadd (%0,%1,1), %%tmm" #t ::"r"(p), "r"(static_cast<int64_t>(stride)) : "memory")
// Loads data that is used once, with a hint not to evict data from the first-level cache that is used again.
#define TILE_LOAD_ONCE(t, p, stride) \
  asm volatile("tileloaddt1 (%0,%1,1), %%tmm" #t ::"r"(p), "r"(static_cast<int64_t>(stride)) : "memory")
#define TILE_STORE(t, p, stride) \
  asm volatile("tilestored %%tmm" #t ", (%0,%1,1)" ::"r"(p), "r"(static_cast<int64_t>(stride)) : "memory")
#define TILE_ZERO(t) asm volatile("tilezero %%tmm" #t ::)
// c += a b, where a tile of `b` holds pairs of rows interleaved
#define TILE_MULTIPLY(c, a, b) asm volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::)

namespace tandem {
namespace {

// Every tile is 16 rows of 64 bytes; smaller operands are padded in memory.
void tile_enter() {
  struct alignas(64) {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  } config;
  memset(&config, 0, sizeof config);
  config.palette = 1;
  for (int t = 0; t < 8; t++) {
    config.row_bytes[t] = 64;
    config.rows[t] = 16;
  }
  asm volatile("ldtilecfg %0" ::"m"(config) : "memory");
}

void tile_leave() { asm volatile("tilerelease" ::); }

}  // namespace
}  // namespace tandem
