"""Drafts come from what followed the newest tokens when they last stood in the text."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tandem.engine.model.speculation.capability import propose_from_text


def drafts(tokens: list[int], count: int) -> list[int]:
    return propose_from_text(np.array(tokens, np.int32), count)


def test_a_repeated_phrase_is_continued() -> None:
    assert drafts([1, 2, 3, 4, 5, 9, 1, 2, 3], 2) == [4, 5]


def test_the_longest_match_wins_over_a_later_one() -> None:
    assert drafts([1, 2, 3, 4, 8, 3, 4, 7, 1, 2, 3, 4], 1) == [8]


def test_of_equal_matches_the_latest_wins() -> None:
    assert drafts([1, 2, 5, 1, 2, 6, 1, 2], 1) == [6]


def test_a_repeating_token_is_drafted_in_full() -> None:
    assert drafts([4, 4, 4, 4, 4, 4, 4], 3) == [4, 4, 4]


def test_text_without_repetition_has_no_drafts() -> None:
    assert drafts([1, 2, 3, 4, 5], 3) == []
    assert drafts([1], 3) == []
    assert drafts([], 3) == []


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 6))
def test_drafts_stand_in_the_text_after_its_last_two_tokens(tokens: list[int], count: int) -> None:
    proposed = drafts(tokens, count)
    assert len(proposed) <= count
    if proposed:
        phrase = tokens[-2:] + proposed
        assert any(tokens[i : i + len(phrase)] == phrase for i in range(len(tokens)))
