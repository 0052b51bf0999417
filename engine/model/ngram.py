"""Drafts from the text itself: what followed the last time that the newest tokens stood there."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_LONGEST, _SHORTEST = 4, 2


def propose(tokens: npt.NDArray[np.int32], num_drafts: int) -> list[int]:
    """Up to `num_drafts` tokens that may follow `tokens`; the longest match wins, the latest of equals."""
    for length in range(min(_LONGEST, len(tokens) - 1), _SHORTEST - 1, -1):
        # Starts 0 .. len - length - 1: a match before the newest tokens themselves, with something after it.
        ends = len(tokens) - length
        matches = tokens[:ends] == tokens[-length]
        for offset in range(1, length):
            matches &= tokens[offset : ends + offset] == tokens[offset - length]
        starts = np.flatnonzero(matches)
        if starts.size:
            # Overlapping repetition ("a a a a") leaves little after the latest match; prefer one with all.
            full = starts[starts + length + num_drafts <= len(tokens)]
            start = int(full[-1] if full.size else starts[0]) + length
            return [int(token) for token in tokens[start : start + num_drafts]]
    return []
