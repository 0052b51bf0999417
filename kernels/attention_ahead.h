// Fetching what a split request's attention reads next, between other instructions: V while K is used, and the next task's K while V is.
#pragma once

#include "attention_common.h"

namespace tandem {
namespace {

// Fetches K or V (`distance` behind K) of a task, if there is one, a few lines at a time between other instructions: in one go they would
// fill the queue to memory, and everything else would wait for them. Who uses it fetches as many lines as it reads.
class RowsAhead {
 public:
  RowsAhead(const Attention& a, const AttentionTask* task, int64_t distance) {
    if (!task || a.cache.block_shift < 4) return;
    const int element = a.cache.dtype == Dtype::f32 ? 4 : 2;
    const int first = task->block * kKeyBlock, end = min_int(a.context_lens[task->request], first + kKeyBlock);
    const char* base = static_cast<const char*>(a.cache.base) + distance * element;
    for (int key = first; key < end; key += 16) runs_[count_++] = base + key_offset(a, *task, key) * element;
    bytes_ = 16 * a.cache.head_dim * element;
  }

  TANDEM_INLINE void fetch(int lines) {
    if (run_ == count_) return;
    const char* p = runs_[run_] + done_;
    for (int i = 0; i < lines; i++) __builtin_prefetch(p + i * 64, 0, 2);
    done_ += lines * 64;
    if (done_ < bytes_) return;
    done_ = 0;
    run_++;
  }

 private:
  const char* runs_[kKeyBlock / 16];  // of 16 keys
  int count_ = 0, run_ = 0, done_ = 0, bytes_ = 0;
};

}  // namespace
}  // namespace tandem
