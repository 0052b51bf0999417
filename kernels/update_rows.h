// What adapters add to the rows of a product: low-rank updates, each row's own.
#pragma once

#include "simd.h"

namespace tandem {
namespace {

TANDEM_INLINE float widened(float x) { return x; }
TANDEM_INLINE float widened(uint16_t x) { return bf16_to_float(x); }
TANDEM_INLINE void narrow_to(float& out, float x) { out = x; }
TANDEM_INLINE void narrow_to(uint16_t& out, float x) { out = float_to_bf16(x); }

// A step along a row: so many elements of both.
template <typename T>
struct RowStep {
  static constexpr int kElements = W;
  static TANDEM_INLINE vf add(vf sum, const float* x, const float* w) { return sum + load(x) * load(w); }
  static TANDEM_INLINE vf add(vf sum, const uint16_t* x, const uint16_t* w) {
    return sum + load_bf16(x) * load_bf16(w);
  }
};

#if defined(__AVX512BF16__)
TANDEM_INLINE __m512bh load_pairs(const uint16_t* p) { return reinterpret_cast<__m512bh>(_mm512_loadu_si512(p)); }

template <>
struct RowStep<uint16_t> {
  static constexpr int kElements = 2 * W;
  static TANDEM_INLINE vf add(vf sum, const uint16_t* x, const uint16_t* w) {
    return _mm512_dpbf16_ps(sum, load_pairs(x), load_pairs(w));
  }
};
#endif

// The first half: see Kernels. A row's sum does not depend on the others.
template <typename T>
void dot_rows(const void* row, const void* rows, const void* next, int64_t stride, int n, int k, void* results) {
  constexpr int kTogether = 4, kStep = RowStep<T>::kElements;
  const T *x = static_cast<const T*>(row), *w = static_cast<const T*>(rows), *ahead = static_cast<const T*>(next);
  T* out = static_cast<T*>(results);
  for (int j = 0; j < n; j += kTogether) {
    const int count = min_int(kTogether, n - j);
    const T *of[kTogether], *fetched[kTogether];
    for (int r = 0; r < kTogether; r++) {
      const int64_t at = (j + min_int(r, count - 1)) * stride;
      of[r] = w + at;
      fetched[r] = (ahead ? ahead : w) + at;
    }
    vf total[kTogether] = {};
    int i = 0;
    for (; i + kStep <= k; i += kStep)
      for (int r = 0; r < kTogether; r++) {
        __builtin_prefetch(fetched[r] + i, 0, 2);
        total[r] = RowStep<T>::add(total[r], x + i, of[r] + i);
      }
    for (int r = 0; r < count; r++) {
      float rest = sum(total[r]);
      for (int at = i; at < k; at++) rest += widened(x[at]) * widened(of[r][at]);
      narrow_to(out[j + r], rest);
    }
  }
}

// Computes what an update adds to W adjacent columns.
TANDEM_INLINE vf expanded(const float* low, const float* up, int rank) {
  vf total = {};
  for (int j = 0; j < rank; j++, up += W) total += splat(low[j]) * load(up);
  return total;
}
TANDEM_INLINE vf expanded(const uint16_t* low, const uint16_t* up, int rank) {
  vf total = {};
  for (int j = 0; j < rank; j += 2, up += 2 * W) {
#if defined(__AVX512BF16__)
    total = _mm512_dpbf16_ps(total, load_pairs(up), broadcast_pair(low + j));
#else
    vu pairs;
    memcpy(&pairs, up, sizeof pairs);
    total += splat(widened(low[j])) * cast<vf>(pairs << 16);
    total += splat(widened(low[j + 1])) * cast<vf>(pairs & 0xffff0000u);
#endif
  }
  return total;
}

// The offset of an element of an update's matrix, from the beginning of its slot.
TANDEM_INLINE int64_t up_at(int column, int j, int rank, int pair) {
  return static_cast<int64_t>(column / W * W) * rank + j / pair * pair * W + column % W * pair + j % pair;
}

// Computes what an update adds to columns [at, at + W) of a row; zero for columns that it does not have.
template <typename T>
TANDEM_INLINE vf updated(const Update& u, int row, int at) {
  const int64_t slot = u.slots[row];
  if (slot < 0) return vf{};
  const T* up = static_cast<const T*>(u.up) + slot * u.slot_stride;
  const T* low = static_cast<const T*>(u.low) + static_cast<int64_t>(row) * u.rank;
  if (at % W == 0 && at >= u.begin && at + W <= u.end) return expanded(low, up + static_cast<int64_t>(at) * u.rank, u.rank);
  // The columns do not match the update's vectors, or are the last of a part: compute them one by one.
  float lanes[W] = {};
  for (int lane = max_int(0, u.begin - at); lane < min_int(W, u.end - at); lane++)
    for (int j = 0; j < u.rank; j++)
      lanes[lane] += widened(low[j]) * widened(up[up_at(at + lane, j, u.rank, 4 / sizeof(T))]);
  return load(lanes);
}

TANDEM_INLINE vf updated(const Update& u, int row, int at) {
  return u.dtype == Dtype::f32 ? updated<float>(u, row, at) : updated<uint16_t>(u, row, at);
}

void add_update(const Update& u, int row, int begin, int end, float* out) {
  for (int at = begin; at < end; at += W) {
    const int part = min_int(W, end - at);
    store_part(out + at - begin, load_part(out + at - begin, part) + updated(u, row, at), part);
  }
}

// The update's column at packed column `column`, the first of W columns. The update may have only some of these columns, or none.
TANDEM_INLINE int own_column(const Update& u, int column) {
  if (u.half < 0) return column - u.first + u.begin;
  return column / W % 2 == u.half ? column / (2 * W) * W - u.first + u.begin : u.end;
}

// Adds a product's updates to its rows; the arguments are those of finish_product.
__attribute__((noinline)) void add_updates(const Gemm& g, int row0, int rows, int n0, float* block, int stride) {
  for (int i = 0; i < g.num_updates; i++) {
    const Update& u = g.updates[i];
    for (int half = 0; half < 2; half++) {
      const int at = own_column(u, n0 + half * W);
      if (at <= u.begin - W || at >= u.end) continue;
      for (int r = 0; r < rows; r++) {
        float* sums = block + r * stride + half * W;
        store(sums, load(sums) + updated(u, row0 + r, at));
      }
    }
  }
}

// Fetches the matrices of the updates of a block, a little with each step of the block's product.
class UpdatesAhead {
 public:
  TANDEM_INLINE UpdatesAhead(const Gemm& g, int row0, int rows, int n0, int steps) {
    if (g.num_updates > 0) find(g, row0, rows, n0, steps);
  }

  TANDEM_INLINE void step() {
    if (left_ > 0) fetch();
  }

 private:
  static constexpr int kMost = 64;

  __attribute__((noinline)) void find(const Gemm& g, int row0, int rows, int n0, int steps) {
    for (int i = 0; i < g.num_updates; i++) {
      const Update& u = g.updates[i];
      const int64_t element = u.dtype == Dtype::f32 ? 4 : 2, bytes = W * u.rank * element;
      for (int half = 0; half < 2; half++) {
        const int at = own_column(u, n0 + half * W);
        if (at < u.begin || at >= u.end) continue;
        for (int r = 0; r < rows && count_ < kMost; r++) {
          const int64_t slot = u.slots[row0 + r];
          if (slot < 0) continue;
          at_[count_++] = static_cast<const char*>(u.up) + (slot * u.slot_stride + at / W * W * u.rank) * element;
          left_ = max_int(left_, static_cast<int>((bytes + 63) / 64));
        }
      }
    }
    lines_ = (left_ + steps - 1) / steps;
  }

  __attribute__((noinline)) void fetch() {
    const int lines = min_int(lines_, left_);
    for (int i = 0; i < count_; i++)
      for (int line = 0; line < lines; line++) {
        __builtin_prefetch(at_[i], 0, 2);
        at_[i] += 64;
      }
    left_ -= lines;
  }

  const char* at_[kMost];
  int count_ = 0, left_ = 0, lines_ = 0;
};

}  // namespace
}  // namespace tandem
