"""Parses and checks a body of JSON from an untrusted client. The result is a typed request, or an
InvalidRequest that names the field, what is wrong, and what would be right.

It is stricter than the standard library where leniency would answer a different question than the client
asked: it refuses a key given twice, NaN, numbers beyond a double, half a surrogate pair, and nesting meant to
exhaust memory.

msgspec reads a short body in a twentieth of the time, but explains less and accepts a key given twice. So the
standard library's decoder reads a body again in which msgspec finds a fault or a member seems to be missing.

The standard library's decoder lets no other thread run while it reads one string, however long. So long
strings are cut out first, decoded in pieces, and put back; the rest is short or consists of many values.
"""

from __future__ import annotations

import functools
import json
import math
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, TypeVar

import msgspec

from tandem.api.field_table import INTERNAL, FieldTable
from tandem.api.openai.mistakes import explain
from tandem.api.settings import RequestLimits
from tandem.base.errors import InvalidRequest

# The largest single match, and the largest piece.
WINDOW = 256 << 10
_LEAST = 64  # longer than any escape, however small a window a test sets

# Text outside of strings and whole strings, then the quote of a string that does not end in this window.
_TO_OPEN_STRING = re.compile(r'(?:[^"]++|"[^"\\]*+(?:\\.[^"\\]*+)*+")*+(?:(")|\Z)', re.DOTALL)
_IN_TEXT = re.compile(r'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
# Whole characters and escapes. The first half of a surrogate pair is matched together with what follows it.
_UNITS = re.compile(
    r"(?:[^\\]++|\\[^u]|\\u(?![dD][89abAB])[^\\]{4}|\\u[dD][89abAB][^\\]{2}(?:\\u[dD][c-fC-F][^\\]{2}|(?=[^\\]|\\[^u]|\\u[^\\]{4})))*+",
    re.DOTALL,
)

Decode = Callable[[str], Any]
R = TypeVar("R", bound=msgspec.Struct)


def decode_in_pieces(text: str, decode: Decode, window: int = WINDOW) -> Any:
    """Returns what `decode(text)` returns, or raises its errors with the right position. A member's name
    longer than the window is refused."""
    if len(text) <= 2 * window:
        return decode(text)
    window = max(window, _LEAST)
    spans = _long_strings(text, window)
    if not spans:
        return decode(text)
    whole: list[str] = []
    mistake: json.JSONDecodeError | None = None
    try:
        whole += (_string(text, start, end, window) for start, end in spans)
    except json.JSONDecodeError as error:
        mistake = error
    # Each long string is replaced by a random word that occurs nowhere else.
    word = secrets.token_hex(16)
    parts, at = [], 0
    for index, (start, end) in enumerate(spans):
        parts += [text[at:start], f"{word}{index:08}"]
        at = end
    try:
        value = decode("".join([*parts, text[at:]]))
    except json.JSONDecodeError as error:
        place = _place(error.pos, spans, len(word) + 8)
        if mistake is None or place < mistake.pos:
            raise json.JSONDecodeError(error.msg, text, place) from None
    if mistake is not None:
        raise mistake
    holder = [value]
    _put_back(holder, word, whole)
    return holder[0]


def _long_strings(text: str, window: int) -> list[tuple[int, int]]:
    """Returns the spans of the strings that are longer than a window, without quotes. A string without an end
    is left to the decoder."""
    spans: list[tuple[int, int]] = []
    at = 0
    while at < len(text):
        found = _TO_OPEN_STRING.match(text, at, at + 2 * window)
        if found is None or found[1] is None:
            at += 2 * window if found is None else max(found.end() - at, 1)
            continue
        if found.start(1) > at:  # match again from the string's beginning
            at = found.start(1)
            continue
        start = end = at + 1
        while end < len(text) and text[end] != '"':
            reached = _IN_TEXT.match(text, end, end + window)
            end = reached.end() if reached is not None and reached.end() > end else end + 2
        if end >= len(text):
            break
        spans.append((start, end))
        at = end + 1
    return spans


def _string(text: str, start: int, end: int, window: int) -> str:
    pieces: list[str] = []
    while start < end:
        cut = end
        if end - start > window:
            found = _UNITS.match(text, start, start + window)
            # No whole unit: the decoder will say what is wrong with this escape.
            cut = found.end() if found is not None and found.end() > start else start + _LEAST
        try:
            pieces.append(json.loads(f'"{text[start:cut]}"'))
        except json.JSONDecodeError as error:
            raise json.JSONDecodeError(error.msg, text, start + error.pos - 1) from None
        start = cut
    return "".join(pieces)


def _place(place: int, spans: list[tuple[int, int]], length: int) -> int:
    """Translates a position in the decoded text, where each long string was replaced by `length` characters,
    to one in the whole text."""
    for start, end in spans:
        if place <= start:
            break
        place += end - start - length
    return place


def _put_back(holder: list[Any], word: str, whole: list[str]) -> None:
    """Replaces the words by their strings, level by level."""
    level: list[Any] = [holder]
    while level:
        deeper: list[Any] = []
        for each in level:
            if isinstance(each, dict) and any(name.startswith(word) for name in each):
                raise InvalidRequest("the body has an unknown member: its name is longer than any that is known")
            for key, child in list(each.items() if isinstance(each, dict) else enumerate(each)):
                if isinstance(child, dict | list):
                    deeper.append(child)
                elif isinstance(child, str) and child.startswith(word):
                    each[key] = whole[int(child[len(word) :])]
        level = deeper


# A body's structuring marks, each with the text and whole strings before it. The last group is a string
# without end.
_NEXT_MARK = re.compile(
    rb"""(?:[^"\[\]{},:]++|"[^"\\]*+(?:\\.[^"\\]*+)*+")*+(?:([\[{])|([\]}])|(,)|(:)|(")|\Z)""", re.DOTALL
)
_OPENS, _CLOSES, _ITEM, _MEMBER, _STRING = 1, 2, 3, 4, 5
_IN_STRING = re.compile(rb"""[^"\\]*+(?:\\.[^"\\]*+)*+""", re.DOTALL)
# No other thread runs during a match, so none covers more than this.
_WINDOW_BYTES = 256 << 10
# msgspec reads this much within a millisecond, during which no other thread runs.
_AT_ONCE_BYTES = 64 << 10


def parse_object(body: bytes | bytearray, limits: RequestLimits) -> dict[str, Any]:
    max_depth = limits.json_depth
    if (
        len(body) <= _AT_ONCE_BYTES
        and _has_few_marks(body, limits)
        and (plain := _faultless(body, max_depth)) is not None
    ):
        return plain
    if not body or body.isspace():
        raise InvalidRequest("the body is empty; it must be a JSON object")
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not UTF-8: {error.reason} at byte {error.start}") from None
    _check_counts(body, limits)
    try:
        value = decode_in_pieces(text, _decode)
    except RecursionError:
        raise _too_deep(max_depth) from None
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not JSON: {error.msg} at line {error.lineno} column {error.colno}") from None
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object")
    _check(value, max_depth, surrogates="\\u" in text)
    return value


_read_at_once = msgspec.json.Decoder().decode


def _faultless(body: bytes | bytearray, max_depth: int) -> dict[str, Any] | None:
    """Returns the object if it certainly has no fault, otherwise None. Each colon of the body must be inside
    a kept string or belong to a kept member; one more means that a member was given twice."""
    if b"\\u" in body:
        return None
    try:
        value = _read_at_once(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if type(value) is not dict:
        return None
    colons, depth = 0, 0
    level: list[Any] = [value]
    while level:
        depth += 1
        deeper: list[Any] = []
        for each in level:
            children = each
            if type(each) is dict:
                colons += len(each) + "".join(each).count(":")
                children = each.values()
            for child in children:
                kind = type(child)
                if kind is str:
                    colons += child.count(":")
                elif kind is dict or kind is list:
                    deeper.append(child)
                elif kind is int and child.bit_length() > 64:
                    return None
        level = deeper
    return value if depth <= max_depth and colons == body.count(b":") else None


def _has_few_marks(body: bytes | bytearray, limits: RequestLimits) -> bool:
    if len(body) <= min(limits.json_containers, limits.json_items, limits.json_members):
        return True
    return (
        body.count(b"[") + body.count(b"{") <= limits.json_containers
        and body.count(b",") <= limits.json_items
        and body.count(b":") <= limits.json_members
    )


def _check_counts(body: bytes | bytearray, limits: RequestLimits) -> None:
    """Checks the numbers of values before parsing, because an empty array of two bytes takes thirty times as
    much memory.

    Marks inside strings are told apart only when the plain counts exceed a limit.
    """
    if _has_few_marks(body, limits):
        return
    depth = containers = items = members = 0
    for kind in _marks(body):
        if kind == _OPENS:
            depth += 1
            containers += 1
        elif kind == _CLOSES:
            depth -= 1
        elif kind == _ITEM:
            items += 1
        elif kind == _MEMBER:
            members += 1
        if depth < 0:
            return  # closed more often than opened: not JSON, and the decoder stops here
        if depth > limits.json_depth:
            raise _too_deep(limits.json_depth)
        if containers > limits.json_containers:
            raise InvalidRequest(f"the body has more than {limits.json_containers} objects and arrays")
        if items > limits.json_items:
            raise InvalidRequest(f"the body has more than {limits.json_items} items in its objects and arrays")
        if members > limits.json_members:
            raise InvalidRequest(f"the body has more than {limits.json_members} members in its objects")


def _marks(body: bytes | bytearray) -> Iterator[int]:
    """Yields the structuring marks outside of strings, in order."""
    at, in_string = 0, False
    while at < len(body):
        end = min(len(body), at + _WINDOW_BYTES)
        if in_string:
            found = _IN_STRING.match(body, at, end)
            at = found.end() if found is not None else at
            if at < end:
                in_string = body[at : at + 1] != b'"'
                at += 1 + in_string  # skips a backslash at the window's end with what it escapes
            continue
        for found in _NEXT_MARK.finditer(body, at, end):
            if found.lastindex == _STRING:
                at, in_string = found.end(), True
                break
            if found.lastindex is not None:
                yield found.lastindex
        else:
            at = end


def _too_deep(max_depth: int) -> InvalidRequest:
    return InvalidRequest(f"the body is nested deeper than {max_depth} levels")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise InvalidRequest(f"{_printable(key)}: given twice", _printable(key))
            seen.add(key)
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise InvalidRequest(f"the body is not JSON: {name} is not a number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise InvalidRequest(f"the number {text[:40]} is too large")
    return value


def _integer(text: str) -> int:
    if len(text) > 40:
        raise InvalidRequest(f"the number {text[:40]}… is too large")
    return int(text)


def _check(value: dict[str, Any], max_depth: int, *, surrogates: bool) -> None:
    """Checks depth, and that strings are text, level by level and without recursion."""
    level: list[Any] = [value]
    depth = 0
    while level:
        depth += 1
        if depth > max_depth:
            raise _too_deep(max_depth)
        deeper: list[Any] = []
        for item in level:
            if surrogates and isinstance(item, dict):
                for key in item:
                    _check_text(key)
            for child in item.values() if isinstance(item, dict) else item:
                if isinstance(child, dict | list):
                    deeper.append(child)
                elif surrogates and isinstance(child, str):
                    _check_text(child)
        level = deeper


def _check_text(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"a string has half a surrogate pair (\\u{ord(text[error.start]):04x}), which is not a character"
        ) from None


_decode = json.JSONDecoder(
    object_pairs_hook=_object, parse_constant=_refuse_constant, parse_float=_finite, parse_int=_integer
).decode


def _printable(key: str) -> str:
    return key[:100].encode("utf-8", "backslashreplace").decode()


def read_request(
    body: Mapping[str, Any], request_type: type[R], table: FieldTable, *, refuse_unknown: bool
) -> tuple[R, list[str]]:
    """Returns the typed request and the names of the unknown fields that were ignored."""
    try:
        return msgspec.convert(body, request_type), []
    except msgspec.ValidationError:
        # either an unknown field, which the configuration may allow, or a mistake that is explained below
        pass
    fields = _fields_of(request_type)
    known: dict[str, Any] = {}
    ignored: list[str] = []
    for name, value in body.items():
        if name in INTERNAL:
            raise InvalidRequest(f"{name}: internal to the server, not accepted from a client", name)
        if name in fields:
            known[name] = value
        elif table.takes_without_effect(request_type, name):
            continue
        elif (why := table.refusal_of(request_type, name, value)) is not None:
            raise InvalidRequest(why, name)
        elif refuse_unknown:
            raise InvalidRequest(f"{name}: unknown field", name)
        else:
            ignored.append(name)
    try:
        return msgspec.convert(known, request_type), ignored
    except msgspec.ValidationError as error:
        raise explain(str(error), request_type, known) from None


@functools.cache
def _fields_of(request_type: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(request_type.__struct_encode_fields__)
