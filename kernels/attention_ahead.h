// Fetching what the next task of a split request reads, between other instructions.
#pragma once

#include "attention_bf16.h"

namespace tandem {
namespace {

// Fetches K or V of a task that will soon run, a few lines at a time between other instructions: in one go they
// would fill the queue to memory, and everything else would wait for them.
class NextTask {
 public:
  NextTask(const Attention& a, const AttentionTask* next, int64_t distance) : bytes_(16 * a.cache.head_dim * 2) {
    if (!next || a.cache.block_shift < 4) return;
    const int first = next->block * kKeyBlock, end = min_int(a.context_lens[next->request], first + kKeyBlock);
    for (int key = first; key < end; key += 16) runs_[count_++] = cache_row(a, *next, key) + distance;
  }

  TANDEM_INLINE void fetch(int lines) {
    if (run_ == count_) return;
    const char* p = reinterpret_cast<const char*>(runs_[run_]) + done_;
    for (int i = 0; i < lines; i++) __builtin_prefetch(p + i * 64, 0, 2);
    done_ += lines * 64;
    if (done_ < bytes_) return;
    done_ = 0;
    run_++;
  }

 private:
  const uint16_t* runs_[kKeyBlock / 16];  // of 16 keys
  int count_ = 0, run_ = 0, done_ = 0, bytes_;
};

}  // namespace
}  // namespace tandem
