"""Makes drafts from the text itself: what followed the last occurrence of the newest tokens."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from tandem.engine.model.batching import RequestRows
from tandem.engine.model.parts import Drafts

_LONGEST, _SHORTEST = 4, 2


def propose_from_text(tokens: npt.NDArray[np.int32], num_drafts: int) -> list[int]:
    """Returns up to `num_drafts` tokens that may follow `tokens`: those after the longest earlier match of the newest tokens, and the
    latest of equally long ones."""
    for length in range(min(_LONGEST, len(tokens) - 1), _SHORTEST - 1, -1):
        # Starts 0 .. len - length - 1: matches before the newest tokens themselves, with at least one token after them.
        ends = len(tokens) - length
        matches = tokens[:ends] == tokens[-length]
        for offset in range(1, length):
            matches &= tokens[offset : ends + offset] == tokens[offset - length]
        starts = np.flatnonzero(matches)
        if starts.size:
            # In overlapping repetition ("a a a a") few tokens follow the latest match. Prefer one that enough tokens follow.
            full = starts[starts + length + num_drafts <= len(tokens)]
            start = int(full[-1] if full.size else starts[0]) + length
            return [int(token) for token in tokens[start : start + num_drafts]]
    return []


class TextDrafter:
    """See engine.model.parts.Drafter."""

    guess_s = 0.0

    def propose(self, requests: RequestRows, wanted: Mapping[str, int]) -> Drafts:
        drafts: Drafts = {}
        for req_id, most in wanted.items():
            row = requests.row(req_id)
            drafts[req_id] = propose_from_text(requests.tokens[row, : int(requests.num_tokens[row])], most)
        return drafts

    def forget_requests(self) -> None:
        """It keeps nothing."""
