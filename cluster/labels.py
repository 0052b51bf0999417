"""The labels of machines, and which of them a pool's nodes may run on. Written as Ray's own `label_selector` is."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

_NAME = r"[a-zA-Z0-9](?:[a-zA-Z0-9_.-]{0,61}[a-zA-Z0-9])?"
_KEY = re.compile(rf"(?:[a-zA-Z0-9](?:[a-zA-Z0-9.-]{{0,251}}[a-zA-Z0-9])?/)?{_NAME}")
_CONDITION = re.compile(rf"(?P<other>!?)(?:in\((?P<several>{_NAME}(?:, ?{_NAME})*)\)|(?P<one>{_NAME}))")


def wrong_in(selector: Mapping[str, str]) -> Iterator[str]:
    """What is no label or no condition, each as the rest of a sentence."""
    for key, condition in selector.items():
        if not _KEY.fullmatch(key):
            yield f"has {key[:80]!r}, which no label can be called: letters, digits, '.', '_' and '-', perhaps after DOMAIN/"
        elif not _CONDITION.fullmatch(condition):
            yield f"has {condition[:80]!r} for {key}, and knows `VALUE`, `!VALUE`, `in(A, B)` and `!in(A, B)`"


def matches(labels: Mapping[str, str], selector: Mapping[str, str]) -> bool:
    """Whether a machine with these labels may be taken. `!` takes one without the label, too."""
    return all(_holds(labels.get(key), condition) for key, condition in selector.items())


def _holds(value: str | None, condition: str) -> bool:
    read = _CONDITION.fullmatch(condition)
    assert read is not None, "`wrong_in` comes first"
    wanted = [word.strip() for word in (read["several"] or read["one"]).split(",")]
    return (value in wanted) != bool(read["other"])
