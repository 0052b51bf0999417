// What adapters add to the products of one call. The first half of each update, which makes few numbers of a row, is divided among
// threads here; the second is part of the product (update_rows.h), so that threads do not meet once more for it.
#pragma once

#include <stdint.h>

#include <vector>

#include "api.h"
#include "kernels.h"
#include "region.h"

namespace tandem {

class Updates {
 public:
  // Checks the updates; null: there are none. `halves`: the product's columns are two parts that alternate. Throws
  // std::invalid_argument.
  void prepare(const tandem_updates* given, const Kernels& kernels, int inputs, int outputs, bool halves, int64_t rows);

  void give(Gemm& gemm) const {
    gemm.updates = updates_.data();
    gemm.num_updates = static_cast<int>(updates_.size());
  }
  const std::vector<Update>& all() const { return updates_; }

  // The tasks of the first half. Those of one row follow each other, so that a thread reads a row once.
  int tasks() const { return static_cast<int>(rows_ * static_cast<int64_t>(downs_.size())) * kParts; }
  int64_t row_of(int task) const { return task / kParts / static_cast<int64_t>(downs_.size()); }
  bool is_void(int task) const { return slots_[row_of(task)] < 0; }
  // Runs one task. `row` must have the dtype of the matrices.
  void shrink(int task, const void* row);

 private:
  // A row's task is divided by rank, so that a single row keeps several threads busy. The division does not change the results.
  static constexpr int kParts = 4;

  struct Down {
    const void* matrix;
    char* low;
  };

  int part(int index) const { return rank_ * index / kParts; }
  const void* lines_of(int task) const;

  const Kernels* kernels_ = nullptr;
  const int64_t* slots_ = nullptr;
  int64_t rows_ = 0;
  int rank_ = 0, padded_rank_ = 0, inputs_ = 0, element_ = 0;
  std::vector<Down> downs_;  // each matrix once
  std::vector<Update> updates_;
  Region low_;
};

}  // namespace tandem
