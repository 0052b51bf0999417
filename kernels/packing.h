// How the columns of a packed matrix follow from the checkpoint's: fused parts, alternating parts, padding.
#pragma once

#include "simd.h"

namespace tandem {
namespace {

constexpr int kPanel = 2 * W;  // columns packed together

int padded_columns(int n) { return round_up(n, kPanel); }
int panels(int n) { return padded_columns(n) / kPanel; }

// Where packed column `column` comes from; null if it is padding.
struct SourceRow {
  const void* data;
  int64_t offset;  // in elements
  Dtype dtype;
};

inline SourceRow source_row(const WeightPart* parts, int count, bool interleave, int64_t column, int64_t k) {
  if (interleave) {
    const WeightPart& part = parts[column / W % 2];
    const int64_t row = column / (2 * W) * W + column % W;
    return row < part.rows ? SourceRow{part.data, row * k, part.dtype} : SourceRow{};
  }
  for (int i = 0; i < count; i++) {
    if (column < parts[i].rows) return {parts[i].data, column * k, parts[i].dtype};
    column -= parts[i].rows;
  }
  return {};
}

// Columns [from, from + count) of a row in float32; the row may be missing. In blocks both are multiples of kGroup.
inline void read_columns(const SourceRow& row, int from, int count, float* out) {
  if (row.data)
    read_elements(row.data, row.offset + from, count, row.dtype, out);
  else
    memset(out, 0, static_cast<size_t>(count) * 4);
}

void pack_bias(float* out, const WeightPart* parts, int count, bool interleave) {
  int64_t n = 0;
  for (int i = 0; i < count; i++) n += parts[i].rows;
  for (int64_t j = 0; j < padded_columns(static_cast<int>(n)); j++) {
    const SourceRow source = source_row(parts, count, interleave, j, 1);
    out[j] = source.data ? element(source.data, source.offset, source.dtype) : 0;
  }
}

}  // namespace
}  // namespace tandem
