"""`tandem config`: the whole configuration as a tandem.yaml, with the origin of each value."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import yaml

from tandem.cluster.config import DERIVED
from tandem.cluster.settings.combined import Settings
from tandem.cluster.settings.names import Path, dotted, fields_of, known_settings, section_type, value_at
from tandem.router.config import HIDDEN_KEY

_SECRET: dict[Path, Callable[[Any], Any]] = {
    ("router", "api_keys"): lambda keys: [{**key, "key": HIDDEN_KEY} for key in keys]
}


def render(settings: Settings) -> str:
    return "\n".join(_lines(settings.config, (), settings.origins)) + "\n"


def _lines(section: msgspec.Struct, prefix: Path, origins: dict[Path, str]) -> Iterator[str]:
    indent = "  " * len(prefix)
    kind: type[msgspec.Struct] = type(section)
    for name, info in fields_of(kind).items():
        path = (*prefix, name)
        if path in DERIVED:
            continue
        value = getattr(section, name)
        if section_type(info.type) is not None:
            yield f"{indent}{name}:"
            yield from _lines(value, path, origins)
        else:
            origin = f"  # {origins[path]}" if path in origins else ""
            yield f"{indent}{name}: {scalar(_plain(path, value))}{origin}"


def as_values(settings: Settings) -> dict[str, Any]:
    """Returns every setting by name with its value and origin; the origin of one that was not set is "default"."""
    return {
        dotted(path): {
            "value": _plain(path, value_at(settings.config, path)),
            "origin": settings.origins.get(path, "default"),
        }
        for path in known_settings()
        if path not in DERIVED
    }


def _plain(path: Path, value: Any) -> Any:
    plain = msgspec.to_builtins(value)
    return _SECRET[path](plain) if path in _SECRET else plain


def scalar(value: Any) -> str:
    text = yaml.safe_dump(msgspec.to_builtins(value), default_flow_style=True, width=10**6, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("...").strip()
