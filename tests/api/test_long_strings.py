"""Long strings are decoded in pieces, with the same outcome, mistakes and their places too."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.api.json_body import decode_in_pieces
from tandem.base.errors import InvalidRequest

WINDOW = 64
UNITS = ("a", "\u00e4", "\u20ac", "\U0001f600", '"', "\\", "\n", "\x00", "\ud83d", "\ude00", "/")


def longer(text: str, times: int) -> str:
    return text * times


strings = st.builds(longer, st.text(st.sampled_from(UNITS), max_size=9), st.sampled_from([1, 2, 40, 90]))
values = st.recursive(
    strings | st.integers() | st.none(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


def outcome(text: str, *, in_pieces: bool) -> Any:
    try:
        return decode_in_pieces(text, json.loads, WINDOW) if in_pieces else json.loads(text)
    except json.JSONDecodeError as error:
        return error.msg, error.pos, error.lineno, error.colno


@given(values, st.booleans())
@settings(max_examples=60)
def test_the_value_is_the_same(value: Any, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    assert outcome(text, in_pieces=True) == outcome(text, in_pieces=False)


@given(
    values, st.booleans(), st.integers(0), st.sampled_from(['"', "\\", "\\u12", "\n", "x", "{", ""]), st.integers(0, 9)
)
@settings(max_examples=60)
def test_a_mistake_is_found_in_the_same_place(
    value: Any, ascii_only: bool, place: int, wrong: str, dropped: int
) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    at = place % (len(text) + 1)
    text = text[:at] + wrong + text[at + dropped :]
    assert outcome(text, in_pieces=True) == outcome(text, in_pieces=False)


def test_a_long_name_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="name is longer"):
        decode_in_pieces(json.dumps({"a" * 1000: 1}), json.loads, WINDOW)
