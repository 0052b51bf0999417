"""Turns an adapter's name into a folder on this machine, in each node's process."""

from __future__ import annotations

from pathlib import Path

from tandem.base.errors import ConfigurationError
from tandem.base.progress import Report
from tandem.cluster.models.store import fetch_named
from tandem.wire.adapters import may_be_on_hub


def adapter_place(name: str, where: str) -> str:
    """Returns a location that every process can read from any working directory: an absolute path, or the name on the hub. Raises
    ConfigurationError."""
    try:
        local = Path(where).expanduser()
        if local.is_dir():
            return str(local.resolve())
        is_there = local.exists()
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigurationError(f"the adapter {name!r}: {where[:200]!r} cannot be read: {error}") from error
    if is_there:
        raise ConfigurationError(f"the adapter {name!r}: {where!r} is a file: name the folder that it is in")
    if where.startswith((".", "/", "~")) or not may_be_on_hub(where):
        raise ConfigurationError(
            f"the adapter {name!r}: there is no folder {where[:200]!r}; name one that PEFT's save_pretrained wrote, or owner/name on "
            "the Hugging Face hub"
        )
    return where


def find_adapter_here(name: str, where: str, report: Report) -> str:
    """Returns the adapter's folder. One on the hub is fetched once per machine."""
    place = adapter_place(name, where)
    return place if Path(place).is_dir() else fetch_named(place, report)
