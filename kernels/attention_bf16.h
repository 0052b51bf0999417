// Paged attention: bfloat16 products, float32 softmax. This is what its two ways share.
//  - attention_bf16_tiles.h, prompts: query rows are the lanes of vectors; K and V are packed once per key block and
//    used by many tiles;
//  - attention_bf16_split.h, decodes: few query rows, and K and V are read once.
// A unit brings the products of both (attention_amx.h or attention_dot.h). They and the sums run in the same order
// either way, so that the bits are the same.
#pragma once

#include "attention_common.h"

namespace tandem {
namespace {

constexpr int kMaxDim = 256;
constexpr int kSteps = kKeyBlock / 32;

constexpr int kTilesAtOnce = 2;  // at most, in a unit's products

struct AttentionScratch {
  alignas(64) float scores[kTilesAtOnce][kKeyBlock * kLanes + 16];  // + what the last, overlapping store spills
  alignas(64) char weights[kTilesAtOnce][kSteps * 1024];            // bfloat16 tiles
  alignas(64) char keys[kSteps * (kMaxDim / 16) * 1024];  // per 16 keys, tiles along head_dim
  alignas(64) char values[kSteps * (kMaxDim / 16) * 1024];
  alignas(64) float sums[kTilesAtOnce][kMaxDim * kLanes];
  alignas(64) char queries[kTaskTiles][kMaxDim / 32 * 1024];
  alignas(64) float highest[kTaskTiles][kLanes], total[kTaskTiles][kLanes];
  alignas(64) float merged[kTaskTiles][kMaxDim * kLanes];  // [dim][lane]
};

size_t attention_scratch(int) { return sizeof(AttentionScratch); }

// Rounds two vectors to bfloat16 (halves up) and returns the 32 elements in the given order: in `order`, 2 i + 1 stands for number i
// of the first vector, and 32 + 2 i + 1 for number i of the second. Cheaper than the conversion instruction and a permutation.
TANDEM_INLINE __m512i narrow(__m512 x, __m512 y, const uint16_t* order) {
  const __m512i half = _mm512_set1_epi32(0x8000);
  return _mm512_permutex2var_epi16(_mm512_add_epi32(_mm512_castps_si512(x), half), _mm512_load_si512(order),
                                   _mm512_add_epi32(_mm512_castps_si512(y), half));
}
alignas(64) const uint16_t kAlternating[32] = {1,  33, 3,  35, 5,  37, 7,  39, 9,  41, 11, 43, 13, 45, 15, 47,
                                               17, 49, 19, 51, 21, 53, 23, 55, 25, 57, 27, 59, 29, 61, 31, 63};
alignas(64) const uint16_t kOneAfterTheOther[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21,
                                                    23, 25, 27, 29, 31, 33, 35, 37, 39, 41, 43,
                                                    45, 47, 49, 51, 53, 55, 57, 59, 61, 63};

// Packs Q into tiles along head_dim, a row for each lane. TRANSPOSED: tile rows are pairs along head_dim, columns are lanes.
template <bool TRANSPOSED>
inline void pack_queries(const Attention& a, const Tile& tile, char* out) {
  const int d = a.cache.head_dim;
  for (int i = 0; i < d; i += 32, out += 1024) {
    __m512i r[16];
    for (int lane = 0; lane < kLanes; lane++) {
      const float* q = a.q + tile.row[lane] * a.q_stride + tile.head[lane] * d + i;
      const vf low = load_part(q, d - i), high = d - i > 16 ? load_part(q + 16, d - i - 16) : vf{};
      r[lane] = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
    }
    if (TRANSPOSED) transpose(r);
    for (int row = 0; row < 16; row++) _mm512_store_si512(out + row * 64, r[row]);
  }
}

TANDEM_INLINE const uint16_t* cache_row(const Attention& a, const AttentionTask& task, int key) {
  return static_cast<const uint16_t*>(a.cache.base) + key_offset(a, task, key);
}

// Rows of K or V of 32 keys of a block. Keys outside [begin, end) are null: what lies there may be anything, even
// NaN, or beyond the block table.
struct Rows {
  const uint16_t* at[32];
  bool whole;  // none is null
};

inline Rows find_rows(const Attention& a, const AttentionTask& task, int first, int begin, int end) {
  Rows rows;
  rows.whole = begin <= first && first + 32 <= end;
  const int run = rows.whole && a.cache.block_shift >= 4 ? 16 : 1;  // rows that lie one below the other
  for (int i = 0; i < 32; i += run) {
    const int key = first + i;
    rows.at[i] = key >= begin && key < end ? cache_row(a, task, key) : nullptr;
    for (int j = 1; j < run; j++) rows.at[i + j] = rows.at[i] + j * a.cache.head_dim;
  }
  return rows;
}

// 32 columns of a row. WHOLE: the row exists and has all of them.
template <bool WHOLE>
TANDEM_INLINE __m512i load_row(const uint16_t* row, int from, int left) {
  if (WHOLE) return _mm512_loadu_si512(row + from);
  const __mmask32 mask = left >= 32 ? ~0u : (1u << left) - 1;
  return row ? _mm512_maskz_loadu_epi16(mask, row + from) : _mm512_setzero_si512();
}

// Packs K into tiles: for each 16 keys, the tiles along head_dim one after another, plain or transposed as in pack_queries. Packing plain
// rows pays too, because rows in different cache blocks have addresses so alike that they evict each other from the first-level cache.
// Runs `between()` for every tile.
template <bool WHOLE, bool TRANSPOSED, typename F>
inline void pack_keys(const Rows& rows, int d, char* out, F&& between) {
  for (int group = 0; group < 32; group += 16) {
    for (int from = 0; from < d; from += 32, out += 1024) {
      __m512i r[16];
      between();
#pragma GCC unroll 16
      for (int i = 0; i < 16; i++) r[i] = load_row<WHOLE>(rows.at[group + i], from, d - from);
      if (TRANSPOSED) transpose(r);
#pragma GCC unroll 16
      for (int i = 0; i < 16; i++) _mm512_store_si512(out + i * 64, r[i]);
    }
  }
}

// Interleaves 16 columns of two rows into pairs: the first 16 of 32 columns, or (`half` 1) the last 16.
TANDEM_INLINE __m512i interleave(__m512i even, __m512i odd, int half) {
  alignas(64) static const uint16_t kOrder[2][32] = {
      {0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39,
       8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47},
      {16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55,
       24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63}};
  return _mm512_permutex2var_epi16(even, _mm512_load_si512(kOrder[half]), odd);
}

// Packs V's columns [begin, end) into tiles of 32 keys by 16 columns: pairs of keys interleaved (the right-hand operand), or
// transposed (the left-hand operand). Runs `between()` twice for every 16 columns.
template <bool WHOLE, bool TRANSPOSED, typename F>
inline void pack_values(const Rows& rows, int begin, int end, char* out, F&& between) {
  for (int from = begin; from < end; from += 32) {
    for (int half = 0; half < 2; half++, out += 1024) {
      __m512i r[16];
      between();
#pragma GCC unroll 16
      for (int pair = 0; pair < 16; pair++)
        r[pair] = interleave(load_row<WHOLE>(rows.at[pair * 2], from, end - from),
                             load_row<WHOLE>(rows.at[pair * 2 + 1], from, end - from), half);
      if (TRANSPOSED) transpose(r);
      between();
#pragma GCC unroll 16
      for (int pair = 0; pair < 16; pair++) _mm512_store_si512(out + pair * 64, r[pair]);
    }
  }
}

TANDEM_INLINE void shift_rows(Rows& rows, int64_t distance) {
  for (int i = 0; i < 32; i++)
    if (rows.at[i]) rows.at[i] += distance;
}

// The steps of 32 keys in a block that contain any key of a range.
struct Steps {
  int first, begin, end;  // the block's first key; which of its keys are meant
  int from, to;           // steps
};

TANDEM_INLINE Steps steps_of(int begin, int end, int block) {
  Steps s;
  s.first = block * kKeyBlock;
  s.begin = max_int(begin, s.first);
  s.end = min_int(end, s.first + kKeyBlock);
  s.from = (s.begin - s.first) >> 5;
  s.to = (s.end - s.first + 31) >> 5;
  return s;
}

}  // namespace
}  // namespace tandem
