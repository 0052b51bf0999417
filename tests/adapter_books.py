"""A node's book of adapters without an engine that would read any."""

from __future__ import annotations

from pathlib import Path

from tandem.base.errors import ConfigurationError
from tandem.engine.model.adapter_book import AdapterBook
from tandem.engine.model.adapters import Adapter

PLENTY = 1 << 40


class PlainBook(AdapterBook[Adapter]):
    """`forgets` is the identities of what it has forgotten, in order."""

    def __init__(self, free_memory=lambda: PLENTY) -> None:
        super().__init__(free_memory)
        self.forgets: list[str] = []

    def read(self, name: str, folder: Path) -> Adapter:
        raise ConfigurationError(f"the adapter {name!r} ({folder}) is no adapter")

    def forgotten(self, adapter: Adapter) -> None:
        self.forgets.append(adapter.identity)
