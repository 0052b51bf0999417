"""Says in plain words what is wrong with a client's field: msgspec's message, the field's type and its value become one sentence,
in the words that settings are refused in."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from tandem.base.errors import InvalidRequest
from tandem.base.settings import STEP, kinds_at, limits_of, refusal_of, words_of, written

_FIELD = re.compile(
    r"^Object (?P<what>contains unknown|missing required) field `(?P<field>.*?)`(?: - at `\$\.?(?P<path>[^`]*)`)?$",
    re.DOTALL,
)
_AT = re.compile(r"^(?P<what>.*) - at `(?P<key>key in )?\$\.?(?P<path>.*)`$", re.DOTALL)
_ITEMS = "[...]"  # how msgspec names a value of a mapping
_LONGEST_PATTERN = 80

_ABSENT: Any = object()


def explain(text: str, request_type: Any, body: Any) -> InvalidRequest:
    """`text` is msgspec's message about `body`, which should have been a `request_type`."""
    if match := _FIELD.match(text):
        name = f"{match['path']}.{match['field']}" if match["path"] else match["field"]
        what = "unknown field" if match["what"].startswith("contains") else "is required"
        return InvalidRequest(f"{name}: {what}", name)
    if match := _AT.match(text):
        path = match["path"]
        shown = path.removesuffix(_ITEMS)
        sentence = _sentence(match["what"], request_type, path, body)
        if match["key"]:
            sentence = f"its names: {sentence}"
        elif path != shown:
            sentence = f"its values: {sentence}"
        return InvalidRequest(f"{shown}: {sentence}", path)
    return InvalidRequest(f"the body {_sentence(text, request_type, '', body)}")


def _sentence(what: str, request_type: Any, path: str, body: Any) -> str:
    kinds = [kind for kind in kinds_at(request_type, path) if not isinstance(kind, msgspec.inspect.NoneType)]
    value = _value_at(body, path)
    if "of length" in what and (said := _length(kinds, value)):
        return said
    if "matching regex" in what and (said := _pattern(kinds, value)):
        return said
    if not kinds:
        return what[:1].lower() + what[1:]
    if value is not _ABSENT:
        return refusal_of(kinds, value, what)
    limits = limits_of(kinds) if ", got" not in what else ""
    return f"must {limits or f'be {words_of(kinds)}'}"


def _value_at(body: Any, path: str) -> Any:
    value = body
    for step in STEP.findall(path):
        place: Any = step
        if step.startswith("["):
            if not step[1:-1].isdigit():
                return _ABSENT  # msgspec does not say which
            place = int(step[1:-1])
        try:
            value = value[place]
        except (KeyError, IndexError, TypeError):
            return _ABSENT
    return value


def _length(kinds: Sequence[msgspec.inspect.Type], value: Any) -> str | None:
    """Says how many characters, items or members there must be."""
    for kind in kinds:
        match value, kind:
            case str(), msgspec.inspect.StrType(min_length=low, max_length=high):
                unit = "character"
            case list(), msgspec.inspect.CollectionType(min_length=low, max_length=high):
                unit = "item"
            case dict(), msgspec.inspect.DictType(min_length=low, max_length=high):
                unit = "member"
            case _:
                continue
        if value == "" and low == 1:
            return "must not be empty"
        if low is not None and len(value) < low:
            return f"must have at least {low} {unit}{'s' * (low > 1)}, not {len(value)}"
        if high is not None and len(value) > high:
            return f"must have at most {high} {unit}s, not {len(value)}"
    return None


def _pattern(kinds: Sequence[msgspec.inspect.Type], value: Any) -> str | None:
    for kind in kinds:
        if isinstance(kind, msgspec.inspect.StrType) and kind.pattern is not None and isinstance(value, str):
            given = repr(value if len(value) <= _LONGEST_PATTERN else value[: _LONGEST_PATTERN - 3] + "...")
            return f"must match {written(kind.pattern)}, not {given}"
    return None
