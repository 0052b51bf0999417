// Matrix products by fused multiply-add, float32 accumulation in order of K.
//
// Weights lie in panels of 2 W columns: for each k, the panel's 2 W values side by side. A bfloat16 panel holds W
// 32-bit words per k: column j in the low half, column j + W in the high half, so that a shift and a mask widen it.
#pragma once

#include "blocks_fma.h"
#include "packing.h"
#include "rows.h"

namespace tandem {
namespace {

// Rows per pass: as many as the registers hold.
constexpr int kRows = W == 16 ? 12 : 6;
constexpr int kFewRows = 2;  // with so many, two panels at once
constexpr int kRowsPerTask = 252;  // a multiple of kRows; keeps a task's rows in the second-level cache

template <typename T>
int64_t panel_bytes(const Linear& w) {
  if (is_blocks(w.form)) return block_panel_bytes(w.k, w.form);
  return static_cast<int64_t>(kPanel) * w.k * static_cast<int64_t>(sizeof(T));
}

// A panel of blocks, expanded.
size_t gemm_scratch(int k) { return static_cast<size_t>(max_int(k, kGroup)) * kPanel * sizeof(float); }

TANDEM_INLINE void put_weight(float* row, int j, float x) { row[j] = x; }
TANDEM_INLINE void put_weight(uint16_t* row, int j, float x) { row[j % W * 2 + j / W] = float_to_bf16(x); }

template <typename T>
void pack(const Linear& w, const WeightPart* parts, int count, bool interleave, int panel, char*) {
  if (is_blocks(w.form)) return pack_blocks(w, parts, count, interleave, panel);
  T* out = static_cast<T*>(const_cast<void*>(w.panels)) + static_cast<size_t>(panel) * kPanel * w.k;
  for (int j = 0; j < kPanel; j++) {
    const SourceRow source = source_row(parts, count, interleave, static_cast<int64_t>(panel) * kPanel + j, w.k);
    for (int from = 0; from < w.k; from += kGroup) {
      const int n = min_int(kGroup, w.k - from);
      float columns[kGroup];
      read_columns(source, from, n, columns);
      for (int i = 0; i < n; i++) put_weight(out + static_cast<int64_t>(from + i) * kPanel, j, columns[i]);
    }
  }
}

TANDEM_INLINE void load_weights(const float* p, vf& a, vf& b) {
  a = load(p);
  b = load(p + W);
}
TANDEM_INLINE void load_weights(const uint16_t* p, vf& a, vf& b) {
  vu words;
  memcpy(&words, p, sizeof words);
  const vu low = words << 16, high = words & 0xffff0000u;
  a = cast<vf>(low);
  b = cast<vf>(high);
}

// Where the weights of P panels come from: next() returns those of the first one for `count()` more inputs, and the others' lie `apart()`
// from each other. What comes a little later is fetched: memory is what a product of few rows waits for. At the end of these panels that
// is what follows them.
template <typename T, int P>
class PlainWeights {
 public:
  PlainWeights(const T* panel, int k) : at_(panel), end_(panel + static_cast<int64_t>(k) * kPanel), apart_(end_ - panel) {}

  TANDEM_INLINE const T* next() {
    const T* now = at_;
    count_ = static_cast<int>(end_ - now) / kPanel;
    if (count_ > kGroup) count_ = kGroup;
    at_ += count_ * kPanel;
    fetched_ = now + 2048 / sizeof(T);
    if (P > 1 && fetched_ >= end_) fetched_ += (P - 1) * apart_;
    return now;
  }
  TANDEM_INLINE int count() const { return count_; }
  TANDEM_INLINE int64_t apart() const { return apart_; }
  TANDEM_INLINE void fetch(int input, int panel) const {
    __builtin_prefetch(fetched_ + input * kPanel + panel * apart_, 0, 3);
  }

 private:
  const T *at_, *end_, *fetched_ = nullptr;
  int64_t apart_;
  int count_ = 0;
};

// What comes this much later in a panel of blocks is fetched.
constexpr int kAhead = 2048;

class BlockWeights {
 public:
  // `space` has room for an expanded group.
  BlockWeights(const Linear& w, const char* panel, float* space)
      : walk_(panel, w.form), expand_(group_expander(w.form)), space_(space) {}

  TANDEM_INLINE const float* next() {
    walk_.next();
    for (int i = 0; i < walk_.bytes(); i += 64) __builtin_prefetch(walk_.group() + kAhead + i, 0, 3);
    expand_(walk_.block(), walk_.group(), space_);
    return space_;
  }
  TANDEM_INLINE int count() const { return kGroup; }
  TANDEM_INLINE int64_t apart() const { return 0; }
  TANDEM_INLINE void fetch(int, int) const {}

 private:
  BlockWalk walk_;
  const ExpandGroup expand_;
  float* const space_;
};

template <int R, int P>
TANDEM_INLINE void finish_sums(const Gemm& g, int row0, int n0, const vf (&sums)[R][P][2]) {
  for (int p = 0; p < P; p++) {
    float block[R * kPanel];
    for (int r = 0; r < R; r++) {
      store(block + r * kPanel, sums[r][p][0]);
      store(block + r * kPanel + W, sums[r][p][1]);
    }
    finish_product(g, row0, R, n0 + p * kPanel, block, kPanel);
  }
}

// R rows by P panels.
template <int R, int P, typename Weights>
void multiply_rows(const Gemm& g, int row0, int n0, Weights weights) {
  const int k = g.w.k;
  const int64_t stride = activation_stride(k);
  const float* x = static_cast<const float*>(g.x) + row0 * stride;
  vf sums[R][P][2] = {};
  for (int from = 0; from < k; from += weights.count()) {
    const auto* at = weights.next();
    const int count = weights.count();
    for (int i = 0; i < count; i++, at += kPanel) {
#pragma GCC unroll 2
      for (int p = 0; p < P; p++) {
        vf a, b;
        load_weights(at + p * weights.apart(), a, b);
        weights.fetch(i, p);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
          const vf v = splat(x[r * stride + from + i]);
          sums[r][p][0] += v * a;
          sums[r][p][1] += v * b;
        }
      }
    }
  }
  finish_sums(g, row0, n0, sums);
}

template <int R, int P, typename Weights>
void multiply_rest(const Gemm& g, int row0, int rows, int n0, Weights weights) {
  if (rows == R) return multiply_rows<R, P>(g, row0, n0, weights);
  if constexpr (R > 1) multiply_rest<R - 1, P>(g, row0, rows, n0, weights);
}

template <typename T>
void multiply_plain(const Gemm& g, int row, int row_end, int n0, const T* panel) {
  const PlainWeights<T, 1> weights(panel, g.w.k);
  // Passes of like size: one over few rows waits for its own sums.
  for (int passes = (row_end - row + kRows - 1) / kRows; passes > 0; passes--) {
    const int rows = (row_end - row + passes - 1) / passes;
    multiply_rest<kRows, 1>(g, row, rows, n0, weights);
    row += rows;
  }
}

// Few rows take each group while it is in the first-level cache. More rows find the whole panel in the second-level one.
void multiply_blocks(const Gemm& g, int row, int row_end, int n0, const char* panel) {
  float* const space = reinterpret_cast<float*>(g.scratch);
  if (row_end - row <= kRows)
    return multiply_rest<kRows, 1>(g, row, row_end - row, n0, BlockWeights(g.w, panel, space));
  BlockWalk walk(panel, g.w.form);
  const ExpandGroup expand = group_expander(g.w.form);
  for (int from = 0; from < g.w.k; from += kGroup) {
    walk.next();
    expand(walk.block(), walk.group(), space + static_cast<int64_t>(from) * kPanel);
  }
  multiply_plain(g, row, row_end, n0, space);
}

// R rows by two panels of blocks, whose weights never leave the registers.
template <int R, Dtype dtype>
void multiply_unexpanded(const Gemm& g, int row0, int n0, const char* panel) {
  const int64_t stride = activation_stride(g.w.k), apart = g.w.panel_bytes;
  const float* x = static_cast<const float*>(g.x) + row0 * stride;
  const char* const end = panel + apart;
  BlockWalk walk(panel, g.w.form);
  vf sums[R][2][2] = {};
  for (int from = 0; from < g.w.k; from += kGroup) {
    walk.next();
    const char* fetched = walk.group() + kAhead;
    if (fetched >= end) fetched += apart;
    for (int i = 0; i < walk.bytes(); i += 64) {
      __builtin_prefetch(fetched + i, 0, 3);
      __builtin_prefetch(fetched + apart + i, 0, 3);
    }
    unpack_group<dtype, 2>(walk.block(), walk.group(), apart, [&](int input, int p, vf a, vf b) __attribute__((always_inline)) {
      for (int r = 0; r < R; r++) {
        const vf v = splat(x[r * stride + from + input]);
        sums[r][p][0] += v * a;
        sums[r][p][1] += v * b;
      }
    });
  }
  finish_sums(g, row0, n0, sums);
}

// One or two rows by two panels: a sum waits for itself, so more sums at once keep the processor busy.
template <typename T>
void multiply_two(const Gemm& g, int row, int rows, int n0, const char* panel) {
  if (!is_blocks(g.w.form))
    return multiply_rest<kFewRows, 2>(g, row, rows, n0, PlainWeights<T, 2>(reinterpret_cast<const T*>(panel), g.w.k));
  with_form(g.w.form, [&]<Dtype form>(Form<form>) {
    rows == 1 ? multiply_unexpanded<1, form>(g, row, n0, panel) : multiply_unexpanded<2, form>(g, row, n0, panel);
  });
}

int panels_per_task(const Gemm& g) { return panels(g.w.n) >= 16 * g.threads ? 4 : 1; }

int gemm_tasks(const Gemm& g) {
  const int per_task = panels_per_task(g);
  return (panels(g.w.n) + per_task - 1) / per_task * ((g.m + kRowsPerTask - 1) / kRowsPerTask);
}

template <typename T>
void gemm(const Gemm& g, int task) {
  const int per_task = panels_per_task(g), count = panels(g.w.n), groups = (count + per_task - 1) / per_task;
  const int row_begin = task / groups * kRowsPerTask, row_end = min_int(g.m, row_begin + kRowsPerTask);
  const int first = task % groups * per_task, last = min_int(count, first + per_task);
  const int rows = row_end - row_begin;
  for (int p = first; p < last; p++) {
    const char* panel = static_cast<const char*>(g.w.panels) + p * g.w.panel_bytes;
    if (rows <= kFewRows && p + 1 < last)
      multiply_two<T>(g, row_begin, rows, p++ * kPanel, panel);
    else if (is_blocks(g.w.form))
      multiply_blocks(g, row_begin, row_end, p * kPanel, panel);
    else
      multiply_plain(g, row_begin, row_end, p * kPanel, reinterpret_cast<const T*>(panel));
  }
}

}  // namespace
}  // namespace tandem
