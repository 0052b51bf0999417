// Weights in three quarters of their bytes, and exactly the same weights: decodes wait for nothing but memory.
//
// The upper byte of a bfloat16 (sign, and all of the exponent but its last bit) has few values that are frequent.
// A panel lists its 16 most frequent ones; each weight keeps its lower byte and the 4-bit index of its upper one.
// The few weights whose upper byte is not listed are listed themselves, and put right after expansion.
//
// A panel: header, outliers, then 768 bytes for each tile. Four tile rows (32 weights each) make a group of 192
// bytes: 64 lower bytes of the first two rows, 64 of the others, and 64 bytes with the indices of the first two
// rows in their lower and those of the others in their upper halves. Within 64 bytes the two rows alternate by 8.
#pragma once

#include <string.h>

#include "simd.h"

namespace tandem {
namespace {

constexpr int kCompactTile = 768;

struct CompactHeader {
  uint8_t upper[16];
  uint32_t outliers;
  uint8_t reserved[44];
};

struct Outlier {
  uint32_t index;  // in the expanded panel, in weights
  uint16_t value;
  uint16_t reserved;
};

TANDEM_INLINE int64_t outlier_bytes(int count) { return (static_cast<int64_t>(count) * 8 + 63) / 64 * 64; }

// How often each upper byte occurs. Four counters in turn, for one alone would wait for its own last increment.
class Histogram {
 public:
  void add(const uint16_t* weights, int64_t count) {
    int64_t i = 0;
    for (; i + 4 <= count; i += 4)
      for (int j = 0; j < 4; j++) counts_[j][weights[i + j] >> 8]++;
    for (; i < count; i++) counts_[0][weights[i] >> 8]++;
  }

  void add_zeros(int64_t count) { counts_[0][0] += static_cast<uint32_t>(count); }

  // Lists the 16 most frequent ones; returns how many weights have another one.
  int choose(uint8_t* upper) const {
    int64_t frequency[256], others = 0;
    for (int byte = 0; byte < 256; byte++) {
      frequency[byte] = 0;
      for (int j = 0; j < 4; j++) frequency[byte] += counts_[j][byte];
      others += frequency[byte];
    }
    for (int i = 0; i < 16; i++) {
      int best = 0;
      for (int byte = 1; byte < 256; byte++)
        if (frequency[byte] > frequency[best]) best = byte;
      upper[i] = static_cast<uint8_t>(best);
      others -= frequency[best] > 0 ? frequency[best] : 0;
      frequency[best] = -1;
    }
    return static_cast<int>(others);
  }

 private:
  uint32_t counts_[4][256] = {};
};

// `capacity`: outliers for which the panel has room.
void make_compact(const uint16_t* weights, int64_t count, int capacity, char* panel) {
  CompactHeader header = {};
  Histogram histogram;
  histogram.add(weights, count);
  header.outliers = static_cast<uint32_t>(histogram.choose(header.upper));
  memcpy(panel, &header, sizeof header);
  uint8_t index_of[256];
  memset(index_of, 0xff, sizeof index_of);
  for (int i = 15; i >= 0; i--) index_of[header.upper[i]] = static_cast<uint8_t>(i);
  char* outlier = panel + sizeof header;
  uint8_t* group = reinterpret_cast<uint8_t*>(panel) + sizeof header + outlier_bytes(capacity);
  for (int64_t first = 0; first < count; first += 128, group += 192) {
    memset(group + 128, 0, 64);
    for (int i = 0; i < 128; i++) {
      const uint16_t weight = weights[first + i];
      const int row = i / 32, column = i % 32, at = column / 8 * 16 + row % 2 * 8 + column % 8;
      uint8_t index = index_of[weight >> 8];
      if (index == 0xff) {
        const Outlier o = {static_cast<uint32_t>(first + i), weight, 0};
        memcpy(outlier, &o, sizeof o);
        outlier += sizeof o;
        index = 0;
      }
      group[row / 2 * 64 + at] = static_cast<uint8_t>(weight);
      group[128 + at] = static_cast<uint8_t>(group[128 + at] | index << (row / 2 * 4));
    }
  }
}

// Expands a panel from its beginning to its end.
class Expander {
 public:
  Expander(const char* panel, int capacity) : at_(panel + sizeof(CompactHeader) + outlier_bytes(capacity)) {
    CompactHeader header;
    memcpy(&header, panel, sizeof header);
    upper_ = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(panel)));
    outlier_ = reinterpret_cast<const Outlier*>(panel + sizeof header);
    last_ = outlier_ + header.outliers;
  }

  const char* position() const { return at_; }

  // The next two tiles, 2 KiB.
  TANDEM_INLINE void expand(char* out) {
    const __m512i nibble = _mm512_set1_epi8(15);
#pragma GCC unroll 8
    for (int group = 0; group < 8; group++, at_ += 192) {
      const __m512i low0 = _mm512_loadu_si512(at_), low1 = _mm512_loadu_si512(at_ + 64);
      const __m512i index = _mm512_loadu_si512(at_ + 128);
      const __m512i high0 = _mm512_shuffle_epi8(upper_, _mm512_and_si512(index, nibble));
      const __m512i high1 =
          _mm512_shuffle_epi8(upper_, _mm512_and_si512(_mm512_srli_epi16(index, 4), nibble));
      _mm512_store_si512(out + group * 256, _mm512_unpacklo_epi8(low0, high0));
      _mm512_store_si512(out + group * 256 + 64, _mm512_unpackhi_epi8(low0, high0));
      _mm512_store_si512(out + group * 256 + 128, _mm512_unpacklo_epi8(low1, high1));
      _mm512_store_si512(out + group * 256 + 192, _mm512_unpackhi_epi8(low1, high1));
    }
    end_ += 1024;
    for (; outlier_ < last_ && outlier_->index < end_; outlier_++)
      memcpy(out + (outlier_->index - (end_ - 1024)) * 2, &outlier_->value, 2);
  }

 private:
  const char* at_;
  __m512i upper_;
  const Outlier *outlier_, *last_;
  uint32_t end_ = 0;
};

}  // namespace
}  // namespace tandem
