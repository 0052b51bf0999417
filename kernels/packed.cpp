#include "packed.h"

#include <algorithm>
#include <string>

#include "elements.h"
#include "model.h"

namespace tandem {
namespace {

// Of any panel: all have the same size.
int most_outliers(const Linear& w, const Kernels& kernels, Team& team, const std::vector<WeightPart>& parts,
                  bool interleave) {
  std::vector<int> most(static_cast<size_t>(team.size()));
  team.run([&](int thread) {
    int& mine = most[static_cast<size_t>(thread)];
    team.divide(thread, kernels.panels(w.n), [&](int p) {
      mine = std::max(mine, kernels.outliers(parts.data(), static_cast<int>(parts.size()), interleave, w.k, p));
    });
  });
  return *std::max_element(most.begin(), most.end());
}

}  // namespace

bool compact_is_worthwhile(int64_t compact_bytes, int64_t plain_bytes) { return compact_bytes <= plain_bytes * 0.85; }

std::vector<WeightPart> parts_of(const tandem_part* parts, int count) {
  std::vector<WeightPart> out;
  for (int i = 0; i < count; i++) out.push_back({parts[i].data, parts[i].rows, static_cast<Dtype>(parts[i].dtype)});
  return out;
}

Dtype form_of(const std::vector<WeightPart>& parts, const Kernels& kernels) {
  const Dtype first = parts.front().dtype;
  const bool alike = std::all_of(parts.begin(), parts.end(), [&](const WeightPart& p) { return p.dtype == first; });
  return alike && is_blocks(first) ? first : kernels.dtype;
}

void choose_form(Linear& w, const Kernels& kernels, Team& team, const std::vector<WeightPart>& parts, bool interleave) {
  for (const WeightPart& part : parts)
    require(!is_blocks(part.dtype) || w.k % block_kind(part.dtype).weights == 0,
            "rows of " + std::to_string(w.k) + " weights end within a block");
  w.form = form_of(parts, kernels);
  w.outliers = -1;
  w.panel_bytes = kernels.panel_bytes(w);
  if (is_blocks(w.form) || !kernels.outliers) return;
  Linear compact = w;
  compact.outliers = most_outliers(w, kernels, team, parts, interleave);
  compact.panel_bytes = kernels.panel_bytes(compact);
  if (compact_is_worthwhile(compact.panel_bytes, w.panel_bytes)) w = compact;
}

void pack_panels(const Linear& w, const Kernels& kernels, Team& team, const std::vector<WeightPart>& parts,
                 bool interleave, const std::function<char*(int)>& scratch_of) {
  team.run([&](int thread) {
    team.divide(thread, kernels.panels(w.n), [&](int p) {
      kernels.pack(w, parts.data(), static_cast<int>(parts.size()), interleave, p, scratch_of(thread));
    });
  });
}

}  // namespace tandem
