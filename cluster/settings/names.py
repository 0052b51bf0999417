"""All settings with their paths and types, from the structs of `cluster.config`, and suggestions for misspelt names."""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Iterable
from functools import cache
from typing import Any

import msgspec

from tandem.base.settings import fixed_reason
from tandem.cluster.config import GONE, SHORTHANDS, TandemConfig

Path = tuple[str, ...]
"""The path of a setting, such as ("router", "port")."""


def section_type(annotation: Any) -> type[msgspec.Struct] | None:
    return annotation if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct) else None


@cache
def all_fields_of(section: type[msgspec.Struct]) -> dict[str, msgspec.structs.FieldInfo]:
    return {info.encode_name: info for info in msgspec.structs.fields(section)}


@cache
def fields_of(section: type[msgspec.Struct]) -> dict[str, msgspec.structs.FieldInfo]:
    """The settings and sections of a section, without fields that are fixed and sections that have nothing else."""

    def can_be_set(annotation: Any) -> bool:
        inner = section_type(annotation)
        return bool(fields_of(inner)) if inner is not None else fixed_reason(annotation) is None

    return {name: info for name, info in all_fields_of(section).items() if can_be_set(info.type)}


def leaves_of(section: type[msgspec.Struct], prefix: Path = ()) -> dict[Path, Any]:
    """Returns the type of every setting by its path."""
    leaves: dict[Path, Any] = {}
    for name, info in fields_of(section).items():
        inner = section_type(info.type)
        if inner is not None:
            leaves |= leaves_of(inner, (*prefix, name))
        else:
            leaves[(*prefix, name)] = info.type
    return leaves


@cache
def known_settings() -> dict[Path, Any]:
    return leaves_of(TandemConfig)


@cache
def no_settings() -> dict[Path, str]:
    """What is no setting, or none any more, for who sets it all the same: the value that holds and why no one needs
    another, or what to do instead."""
    found = {path: f"is no setting any more: {instead}" for path, instead in GONE.items()}

    def walk(section: msgspec.Struct, prefix: Path) -> None:
        for name, info in all_fields_of(type(section)).items():
            path, value = (*prefix, name), getattr(section, name)
            if section_type(info.type) is not None:
                walk(value, path)
            elif (reason := fixed_reason(info.type)) is not None:
                found[path] = f"is no setting, it is {json.dumps(msgspec.to_builtins(value))}: {reason}"

    walk(TandemConfig(), ())
    return found


@cache
def addressable() -> frozenset[Path]:
    """Returns the paths that a flag or a variable can set: every setting, and every section that has a shorthand."""
    sections: set[Path] = set()

    def walk(section: type[msgspec.Struct], prefix: Path) -> None:
        for name, info in fields_of(section).items():
            inner = section_type(info.type)
            if inner is not None:
                if inner in SHORTHANDS:
                    sections.add((*prefix, name))
                walk(inner, (*prefix, name))

    walk(TandemConfig, ())
    return frozenset(known_settings()) | sections


def value_at(config: TandemConfig, path: Path) -> Any:
    return functools.reduce(getattr, path, config)


def dotted(path: Iterable[str]) -> str:
    return ".".join(path)


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    candidates = sorted(candidates)
    close = difflib.get_close_matches(name, candidates, n=1, cutoff=0.6)
    if not close:  # the right last word in the wrong section
        last = name.rpartition(".")[2]
        close = [c for c in candidates if c.rpartition(".")[2] == last][:1]
    return f"; did you mean {close[0]}?" if close else ""
