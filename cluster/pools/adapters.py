"""Which LoRA adapters a node is to have, as its supervisor knows it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping

AdapterPlaces = Mapping[str, str]
"""Where each adapter is, by name: a folder, or owner/name on the hub."""


@dataclasses.dataclass(frozen=True)
class WantedAdapters:
    of: Callable[
        [str], AdapterPlaces | None
    ]  # of a node, by its id; None: its configuration has no room for any
    changing: asyncio.Lock = dataclasses.field(
        default_factory=asyncio.Lock
    )  # held while nodes are told others
