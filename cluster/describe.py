"""Types and sizes in the operator's words."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from tandem.wire.errors import ConfigurationError

LARGEST = 2**63 - 1  # of the whole numbers that travel between processes

_CONTAINERS = (msgspec.inspect.ListType, msgspec.inspect.VarTupleType, msgspec.inspect.DictType)
_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}


def parse_size(text: str, what: str) -> int | None:
    """ "2GiB", "500 MB", "1073741824"; "null" is None."""
    if text.strip().lower() in ("null", "none"):
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", text.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise ConfigurationError(f"{what} must be a size such as 2GiB or 500MB, not {text!r}")
    size = float(match[1]) * _UNITS[match[2]]
    if size > LARGEST:
        raise ConfigurationError(
            f"{what} must be a size that a machine can have, such as 2GiB, not {text[:40]!r}"
        )
    return int(size)


def format_size(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def ranges(numbers: Sequence[int]) -> str:
    """0,1,2,3,8 as "0-3,8"; in the order given."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def sentence_for(annotation: Any, value: object, reason: str) -> str:
    """What a value of this type must be, and what was given instead. A list or mapping is not repeated, it may
    hold a key; `reason` says where in it the mistake is."""
    kind = msgspec.inspect.type_info(annotation)
    if isinstance(value, (list, dict)) and isinstance(kind, _CONTAINERS):
        return f"is not right: {reason}"
    choices = _choices(kind)
    hint = ""
    if choices and isinstance(value, str):
        close = difflib.get_close_matches(value, choices, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
    elif _is_text(kind) and isinstance(value, (int, float)):
        hint = "; put it in quotes"
    return f"must be {_words(kind)}, not {_shown(value)}{hint}"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _is_text(kind: msgspec.inspect.Type) -> bool:
    members = kind.types if isinstance(kind, msgspec.inspect.UnionType) else (kind,)
    return any(isinstance(member, msgspec.inspect.StrType) for member in members)


def _choices(kind: msgspec.inspect.Type) -> list[str]:
    members = kind.types if isinstance(kind, msgspec.inspect.UnionType) else (kind,)
    return [
        str(c.value) for member in members if isinstance(member, msgspec.inspect.EnumType) for c in member.cls
    ]


def _words(kind: msgspec.inspect.Type) -> str:
    match kind:
        case msgspec.inspect.UnionType():
            return " or ".join(_words(member) for member in kind.types)
        case msgspec.inspect.EnumType():
            return "one of " + ", ".join(str(choice.value) for choice in kind.cls)
        case msgspec.inspect.ListType() | msgspec.inspect.VarTupleType():
            return "a list"
        case msgspec.inspect.DictType():
            return "a mapping"
        case msgspec.inspect.IntType():
            return "a whole number"
        case msgspec.inspect.FloatType():
            return "a number"
        case msgspec.inspect.BoolType():
            return "true or false"
        case msgspec.inspect.StrType():
            return "text"
        case msgspec.inspect.NoneType():
            return "null"
        case _:
            return type(kind).__name__.removesuffix("Type").lower()
