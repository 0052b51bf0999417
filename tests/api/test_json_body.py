"""JSON bodies: each mistake has its place, and long strings are decoded in pieces with the same outcome."""

from __future__ import annotations

import contextlib
import json
import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.api import json_body
from tandem.api.json_body import decode_in_pieces, parse_object
from tandem.base.errors import InvalidRequest


class Limits(msgspec.Struct, frozen=True):
    json_depth: int
    json_containers: int = 200_000
    json_items: int = 2_000_000
    json_members: int = 200_000


DEPTH = 8
CONTAINERS = 1000
LIMITS = Limits(json_depth=DEPTH, json_containers=CONTAINERS, json_items=5000, json_members=2000)


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (b"", "empty"),
        (b"  \n", "empty"),
        (b"{", "not JSON"),
        (b"nonsense", "not JSON"),
        (b"[]", "must be a JSON object"),
        (b'"text"', "must be a JSON object"),
        (b"null", "must be a JSON object"),
        (b'{"a": 1} {"b": 2}', "not JSON"),
        (b'{"a": 1,}', "not JSON"),
        (b"{'a': 1}", "not JSON"),
        (b'{"a": 1, "a": 2}', "given twice"),
        (b'{"x": {"b": 1, "b": 1}}', "given twice"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": -Infinity}', "Infinity"),
        (b'{"a": 1e400}', "too large"),
        (b'{"a": ' + b"9" * 5000 + b"}", "too large"),
        (b'{"a": "\\ud800"}', "surrogate"),
        (b'{"a": [' + b"[]," * CONTAINERS + b"[]]}", "objects and arrays"),
        (b'{"a": ["\\udc00\\ud800"]}', "surrogate"),
        (b'{"\\ud83d": 1}', "surrogate"),
        (b'{"a": "\xff"}', "not UTF-8"),
        (b'{"a": "\xed\xa0\x80"}', "not UTF-8"),
        (b'\xef\xbb\xbf{"a": 1}', "not JSON"),
        (b'{"a": ' + b"[" * DEPTH + b"]" * DEPTH + b"}", "nested"),
        (b'{"a": ' + b"[" * 100_000, "nested"),
        (b'{"a": ' * 100_000, "nested"),
        (b'{"a": "\t"}', "not JSON"),
        (b'{"a": [' + b"1," * 5001 + b"1]}", "items"),
        (b'{"a": {' + b",".join(b'"%d":1' % n for n in range(2001)) + b"}}", "members"),
    ],
)
def test_refuses(body: bytes, complaint: str) -> None:
    with pytest.raises(InvalidRequest, match=complaint):
        parse_object(body, LIMITS)


def test_the_deepest_that_is_allowed() -> None:
    body = b'{"a": ' + b"[" * (DEPTH - 1) + b"]" * (DEPTH - 1) + b"}"
    parse_object(body, LIMITS)


def test_a_whole_surrogate_pair_is_a_character() -> None:
    assert parse_object(b'{"a": "\\ud83d\\ude00"}', LIMITS) == {"a": "😀"}


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), JSON, max_size=4))
def test_reads_what_json_writes(value: dict[str, Any]) -> None:
    assert parse_object(json.dumps(value).encode(), Limits(json_depth=100)) == value


@given(st.binary(max_size=200))
def test_any_bytes_are_an_object_or_a_clear_refusal(body: bytes) -> None:
    with contextlib.suppress(InvalidRequest):
        assert isinstance(parse_object(body, LIMITS), dict)


def test_a_flood_of_objects_is_refused_before_they_are_made() -> None:
    body = b'{"a":[' + b"[],{}," * 200_000 + b"[]]}"
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest, match="more than 1000 objects and arrays"):
            parse_object(body, Limits(json_depth=10, json_containers=1000))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 3 * len(body)


@pytest.mark.parametrize("text", ["[" * 5000, '"[' * 5000, "\\[" * 5000, '\\"[' * 5000])
def test_brackets_in_strings_are_no_arrays(text: str) -> None:
    value = {"a": text, text: [[1], {"b": text}]}
    assert parse_object(json.dumps(value).encode(), Limits(json_depth=10, json_containers=4)) == value
    with pytest.raises(InvalidRequest, match="more than 3 objects and arrays"):
        parse_object(json.dumps(value).encode(), Limits(json_depth=10, json_containers=3))


def test_a_string_without_an_end_is_looked_through_once() -> None:
    with pytest.raises(InvalidRequest, match="not JSON"):
        parse_object(b'{"a":"' + b"[" * 1000 + b'\\"' * 1_000_000, Limits(json_depth=10, json_containers=100))


plain = st.none() | st.integers() | st.text(st.sampled_from('a,:[]{}"\\é'), max_size=30)


@given(
    value=st.dictionaries(
        st.text(max_size=5),
        st.recursive(
            plain, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        ),
        max_size=4,
    ),
    window=st.integers(1, 40),
)
def test_what_is_counted_is_what_stands_outside_of_strings(value: dict[str, Any], window: int) -> None:
    def counts(item: Any) -> tuple[int, int, int]:
        if not isinstance(item, dict | list):
            return 0, 0, 0
        inner = [counts(one) for one in (item.values() if isinstance(item, dict) else item)]
        here = (1, max(0, len(item) - 1), len(item) if isinstance(item, dict) else 0)
        return tuple(map(sum, zip(here, *inner, strict=True)))  # type: ignore[return-value]

    body = json.dumps(value).encode()
    most = dict(zip(("json_containers", "json_items", "json_members"), counts(value), strict=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_body, "_WINDOW_BYTES", window)
        assert parse_object(body, Limits(json_depth=100, **most)) == value
        for name, count in most.items():
            if count:
                with pytest.raises(InvalidRequest, match="more than"):
                    parse_object(body, Limits(json_depth=100, **most | {name: count - 1}))


def outcome(body: bytes) -> tuple[str, Any]:
    try:
        return "", parse_object(body, Limits(json_depth=4))
    except InvalidRequest as error:
        return str(error), None


PIECES = ["{", "}", "[", "]", ",", ":", '"a"', '"b"', '"a":', '"a":1', '"a":":"', '"b:" :"x:"', '"\\\\":', "1", "-0", "1e400", "1.5", "9" * 41, "9" * 20, "null", "NaN", '"\\\\u0041"', '"\\\\ud800"', '":"', " ", "\n", '"\u00e9"', '"\x00"']  # fmt: skip


@given(
    st.lists(st.sampled_from(PIECES), max_size=9).map(lambda parts: "{" + "".join(parts) + "}")
    | st.dictionaries(st.text(max_size=3), JSON, max_size=4).map(lambda value: json.dumps(value, ensure_ascii=False))
)
@settings(max_examples=250)
def test_a_short_body_is_read_as_the_strict_decoder_reads_it(text: str) -> None:
    body = text.encode("utf-8", "surrogatepass")
    found = outcome(body)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_body, "_AT_ONCE_BYTES", -1)
        strict = outcome(body)
    assert repr(found) == repr(strict)  # 1 and 1.0 are two answers


def test_colons_in_texts_are_no_members(monkeypatch: pytest.MonkeyPatch) -> None:
    def strictly(*of_no_concern: object) -> None:
        raise AssertionError("it was read twice")

    monkeypatch.setattr(json_body, "decode_in_pieces", strictly)
    value = {"model:x": "a: b", "messages": [{"role": "user", "content": ":: https://x"}], "stop": [":"]}
    assert parse_object(json.dumps(value).encode(), LIMITS) == value


@pytest.mark.parametrize("body", [b'{"a": ":", "a": ":"}', b'{"a" :":x", "a" :1}', b'{"x": [{":": 1, ":": ":"}]}'])
def test_a_colon_in_a_text_hides_no_member_that_was_given_twice(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match="given twice"):
        parse_object(body, LIMITS)


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


def outcome_in_pieces(text: str, *, in_pieces: bool) -> Any:
    try:
        return decode_in_pieces(text, json.loads, WINDOW) if in_pieces else json.loads(text)
    except json.JSONDecodeError as error:
        return error.msg, error.pos, error.lineno, error.colno


@given(values, st.booleans())
@settings(max_examples=60)
def test_the_value_is_the_same(value: Any, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    assert outcome_in_pieces(text, in_pieces=True) == outcome_in_pieces(text, in_pieces=False)


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
    assert outcome_in_pieces(text, in_pieces=True) == outcome_in_pieces(text, in_pieces=False)


def test_a_long_name_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="name is longer"):
        decode_in_pieces(json.dumps({"a" * 1000: 1}), json.loads, WINDOW)
