#include "updates.h"

#include <string.h>

#include <algorithm>
#include <string>

#include "model.h"

namespace tandem {

void Updates::prepare(const tandem_updates* given, const Kernels& kernels, int inputs, int outputs, bool halves,
                      int64_t rows) {
  downs_.clear();
  updates_.clear();
  if (!given || given->count == 0) return;
  kernels_ = &kernels;
  slots_ = given->slots;
  rows_ = rows;
  rank_ = given->rank;
  inputs_ = inputs;
  element_ = kernels.dtype == Dtype::f32 ? 4 : 2;
  padded_rank_ = element_ == 2 ? (rank_ + 1) / 2 * 2 : rank_;
  require(rank_ > 0, "the slots of an update have one rank");
  for (int64_t row = 0; row < rows; row++)
    require(slots_[row] < given->num_slots, "there is no slot " + std::to_string(slots_[row]));
  const int64_t low_bytes = rows * padded_rank_ * element_;
  low_.reserve(static_cast<size_t>(given->count * low_bytes));
  for (int i = 0; i < given->count; i++) {
    const tandem_update& one = given->updates[i];
    const int width = one.end - one.begin, of_half = outputs / 2;
    require(one.inputs == inputs, "an update reads rows of " + std::to_string(one.inputs) + " elements where " +
                                      std::to_string(inputs) + " belong");
    require(one.begin >= 0 && width > 0 && one.end <= one.vectors * kernels.lanes && one.first >= 0 &&
                one.first + width <= outputs,
            "an update is added to columns that a product does not have");
    Update u{};
    u.half = halves ? one.first / of_half : -1;
    u.first = halves ? one.first % of_half : one.first;
    require(!halves || u.first + width <= of_half, "an update is added to gate and up at once");
    const auto same = std::find_if(downs_.begin(), downs_.end(), [&](const Down& down) { return down.matrix == one.down; });
    if (same == downs_.end()) {
      char* const low = low_.data() + static_cast<int64_t>(downs_.size()) * low_bytes;
      downs_.push_back({one.down, low});
      u.low = low;
    } else {
      u.low = same->low;
    }
    u.up = one.up;
    u.dtype = kernels.dtype;
    u.slot_stride = static_cast<int64_t>(one.vectors) * padded_rank_ * kernels.lanes;
    u.slots = slots_;
    u.rank = padded_rank_;
    u.begin = one.begin;
    u.end = one.end;
    updates_.push_back(u);
  }
}

// The rows of a matrix that a task reads.
const void* Updates::lines_of(int task) const {
  const Down& down = downs_[static_cast<size_t>(task / kParts) % downs_.size()];
  return static_cast<const char*>(down.matrix) + (slots_[row_of(task)] * rank_ + part(task % kParts)) * inputs_ * element_;
}

void Updates::shrink(int task, const void* row) {
  const int begin = part(task % kParts), end = part(task % kParts + 1);
  if (begin == end) return;
  char* const low = downs_[static_cast<size_t>(task / kParts) % downs_.size()].low + row_of(task) * padded_rank_ * element_;
  const void* next = task + 1 < tasks() && !is_void(task + 1) ? lines_of(task + 1) : nullptr;
  kernels_->dot_rows(row, lines_of(task), next, inputs_, end - begin, inputs_, low + begin * element_);
  if (end == rank_) memset(low + rank_ * element_, 0, static_cast<size_t>((padded_rank_ - rank_) * element_));
}

}  // namespace tandem
