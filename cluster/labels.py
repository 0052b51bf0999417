"""Labels of machines, and selectors of the machines on which a pool's nodes may run, in the syntax of Ray's `label_selector`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

_NAME = r"[a-zA-Z0-9](?:[a-zA-Z0-9_.-]{0,61}[a-zA-Z0-9])?"
_KEY = re.compile(rf"(?:[a-zA-Z0-9](?:[a-zA-Z0-9.-]{{0,251}}[a-zA-Z0-9])?/)?{_NAME}")
_CONDITION = re.compile(rf"(?P<other>!?)(?:in\((?P<several>{_NAME}(?:, ?{_NAME})*)\)|(?P<one>{_NAME}))")


def wrong_in(selector: Mapping[str, str]) -> Iterator[str]:
    """Yields what is wrong in the selector, each as the end of a sentence."""
    for key, condition in selector.items():
        if not _KEY.fullmatch(key):
            yield f"has {key[:80]!r}, which is not a label's name: use letters, digits, '.', '_' and '-', optionally after DOMAIN/"
        elif not _CONDITION.fullmatch(condition):
            yield f"has {condition[:80]!r} for {key}: it must be `VALUE`, `!VALUE`, `in(A, B)` or `!in(A, B)`"


def matches(labels: Mapping[str, str], selector: Mapping[str, str]) -> bool:
    """Returns whether a machine with these labels matches. `!VALUE` also matches a machine without the label."""
    return all(_holds(labels.get(key), condition) for key, condition in selector.items())


def _holds(value: str | None, condition: str) -> bool:
    read = _CONDITION.fullmatch(condition)
    assert read is not None, "`wrong_in` comes first"
    wanted = [word.strip() for word in (read["several"] or read["one"]).split(",")]
    return (value in wanted) != bool(read["other"])
