"""From an adapter's name to a folder on this machine: like a model's, in the process of each node."""

from __future__ import annotations

from pathlib import Path

from tandem.cluster.models.store import fetch_named
from tandem.wire.adapters import may_be_on_hub
from tandem.wire.errors import ConfigurationError
from tandem.wire.progress import Report


def adapter_place(name: str, where: str) -> str:
    """As every process may read it, whatever folder it runs in. A name on the hub stays as it is. Raises ConfigurationError."""
    try:
        local = Path(where).expanduser()
        if local.is_dir():
            return str(local.resolve())
        is_there = local.exists()
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigurationError(f"the adapter {name!r}: {where[:200]!r} cannot be read: {error}") from error
    if is_there:
        raise ConfigurationError(f"the adapter {name!r}: {where!r} is a file: name the folder it is in")
    if where.startswith((".", "/", "~")) or not may_be_on_hub(where):
        raise ConfigurationError(
            f"the adapter {name!r}: there is no folder {where[:200]!r}; name one that PEFT's save_pretrained wrote, or owner/name on "
            "the Hugging Face hub"
        )
    return where


def find_adapter_here(name: str, where: str, report: Report) -> str:
    """Its folder. What has a name on the hub is fetched once for each machine."""
    place = adapter_place(name, where)
    return place if Path(place).is_dir() else fetch_named(place, report)
