"""Formats sizes and counts for operators, and parses sizes of memory and of pools."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tandem.base.errors import ConfigurationError
from tandem.cluster.config import MOST_NODES
from tandem.wire.nodes import Role

LARGEST = 2**63 - 1  # the largest whole number in messages between processes

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_size(text: str, what: str) -> int | None:
    """Parses "2GiB", "500 MB" or "1073741824"; returns None for "null". Raises ConfigurationError."""
    if text.strip().lower() in ("null", "none"):
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", text.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise ConfigurationError(f"{what} must be a size such as 2GiB or 500MB, not {text!r}")
    size = float(match[1]) * _UNITS[match[2]]
    if size > LARGEST:
        raise ConfigurationError(f"{what} must be a size that a machine can have, such as 2GiB, not {text[:40]!r}")
    return int(size)


_LINK = re.compile(r"(^|: |\(|\. )?\[([^]]*)\]\(([\w.-]+\.md)[^)]*\)")


def without_links(text: str) -> str:
    """A description without Markdown's links. One that stands by itself says where to look; one within a sentence keeps its words."""

    def said(link: re.Match[str]) -> str:
        before, words, page = link.groups()
        if before is None:
            return f"{words} (docs/{page})"
        return f"{before}{'See' if before in ('', '. ') else 'see'} docs/{page}"

    return _LINK.sub(said, text)


def format_size(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def format_seconds(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.1f} ms"


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def ranges(numbers: Sequence[int]) -> str:
    """Formats 0,1,2,3,8 as "0-3,8". Keeps the order of the numbers."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def busy(load: float, cores: int) -> str:
    """Returns "this machine is busy (...)" for a load average that is high for so many cores, else ""."""
    return f"this machine is busy (load {load:.0f} on {counted(cores, 'core')})" if load > 1.5 * cores else ""


def parse_sizes(words: Sequence[str]) -> dict[Role, int]:
    """Parses `prefill=3 decode=2`."""
    sizes: dict[Role, int] = {}
    for word in words:
        name, _, count = word.partition("=")
        role = parse_role(name)
        if not (count.isascii() and count.isdecimal()) or int(count) > MOST_NODES:
            raise ConfigurationError(
                f"{word[:40]!r} does not say how many: write {role.value}=N, with N from 0 to {MOST_NODES}"
            )
        if role in sizes:
            raise ConfigurationError(f"{role.value} is given twice: leave one out")
        sizes[role] = int(count)
    return sizes


def parse_role(name: str) -> Role:
    try:
        return Role(name)
    except ValueError:
        roles = ", ".join(role.value for role in Role)
        raise ConfigurationError(f"there is no pool {name!r}: it must be one of {roles}") from None
