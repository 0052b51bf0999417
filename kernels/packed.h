// Packing a checkpoint's matrix for a unit, by a team of threads.
#pragma once

#include <stdint.h>

#include <functional>
#include <vector>

#include "api.h"
#include "kernels.h"
#include "team.h"

namespace tandem {

// Compact weights take time to expand. With many outliers they are not small enough to be worth it.
bool compact_is_worthwhile(int64_t compact_bytes, int64_t plain_bytes);

std::vector<WeightPart> parts_of(const tandem_part* parts, int count);

// How weights of these parts are kept: blocks of one kind stay blocks; anything else takes the unit's own dtype.
Dtype form_of(const std::vector<WeightPart>& parts, const Kernels& kernels);

// Sets the form, the outliers and the panels' size of a matrix whose n and k are set. Throws std::invalid_argument for rows that end
// within a block.
void choose_form(Linear& w, const Kernels& kernels, Team& team, const std::vector<WeightPart>& parts, bool interleave);

// Fills the panels, whose memory is there and zeroed. `scratch_of(thread)` is that of its products.
void pack_panels(const Linear& w, const Kernels& kernels, Team& team, const std::vector<WeightPart>& parts,
                 bool interleave, const std::function<char*(int)>& scratch_of);

}  // namespace tandem
