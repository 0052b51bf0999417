"""Drafts come from what followed the newest tokens when they last stood in the text."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.engine.model.speculation.capability import propose_from_text


def drafts(tokens: list[int], count: int) -> list[int]:
    return propose_from_text(np.array(tokens, np.int32), count)


@pytest.mark.parametrize(
    ("tokens", "found"),
    [
        ([1, 2, 3, 4, 5, 9, 1, 2, 3], [4, 5]),
        ([1, 2, 3, 4, 8, 3, 4, 7, 1, 2, 3, 4], [8]),  # the longest match, and not a later one
        ([1, 2, 5, 1, 2, 6, 1, 2], [6]),  # the latest of equal ones
        ([4, 4, 4, 4, 4, 4, 4], [4, 4, 4]),
        *((tokens, []) for tokens in ([1, 2, 3, 4, 5], [1], [])),
    ],
)
def test_what_followed_the_newest_tokens_is_drafted(tokens: list[int], found: list[int]) -> None:
    assert drafts(tokens, len(found) or 3) == found


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 6))
def test_drafts_stand_in_the_text_after_its_last_two_tokens(tokens: list[int], count: int) -> None:
    proposed = drafts(tokens, count)
    assert len(proposed) <= count
    if proposed:
        phrase = tokens[-2:] + proposed
        assert any(tokens[i : i + len(phrase)] == phrase for i in range(len(tokens)))
