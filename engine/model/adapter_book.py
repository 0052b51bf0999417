"""Which LoRA adapters a node has, and what it keeps of them. Every engine that serves adapters has one book.

It has all adapters that are served, those that a request still uses, and replaced ones for a while: routers planned requests with
them before they heard of the new ones, and streams of a node that dies go on with them. An unloaded adapter is forgotten when nothing
uses it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from tandem.machine.resources import free_memory
from tandem.wire.adapters import identity_of

# How long a replaced adapter is kept after its last request came: half an hour, which a request lives (the default of
# `router.timeouts.total`), after the half hour that the slowest node may take to load the new one.
KEEP_REPLACED_S = 3600.0
MOST_REPLACED = 8  # of one name
LOOK_AT_MEMORY_S = 1.0  # it takes a moment until memory that was given back counts as free


class KeptAdapter(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def digest(self) -> str: ...
    @property
    def identity(self) -> str: ...
    @property
    def num_bytes(self) -> int:
        """Of host memory."""


KeptT = TypeVar("KeptT", bound=KeptAdapter)


class AdapterBook(ABC, Generic[KeptT]):
    """Any thread may use `read`, `served` and `replaced`; only the step thread uses everything else."""

    def __init__(self, free_memory: Callable[[], int] = free_memory) -> None:
        self._free_memory = free_memory
        self._look_at = 0.0  # no look at the memory before this
        self._adapters: dict[str, KeptT] = {}  # by identity
        self.served: dict[str, str] = {}  # digests by name; the dict is replaced, never changed
        # The replaced adapters that are kept: digests by name, the newest first. Replaced like `served`.
        self.replaced: dict[str, tuple[str, ...]] = {}
        # The same by identity, in the order in which they were replaced, each with when it was last asked for.
        self._replaced: dict[str, float] = {}

    @abstractmethod
    def read(self, name: str, folder: Path) -> KeptT:
        """Reads an adapter and checks what can be checked without the step thread. Raises a ConfigurationError."""

    def forgotten(self, adapter: KeptT) -> None:
        """Nothing uses the adapter any more, and nothing will."""

    def serve(self, read: Iterable[KeptT], kept: Collection[str] = (), now: float = 0.0) -> None:
        """Serves the adapters in `read` from now on, and those already served whose names are in `kept`; no others. Raises a
        ConfigurationError, and changes nothing, for an adapter that the engine does not take."""
        served = {name: digest for name, digest in self.served.items() if name in kept}
        for adapter in read:
            self._adapters[adapter.identity] = adapter
            served[adapter.name] = adapter.digest
        for name, digest in self.served.items():
            if served.get(name, digest) != digest:
                self._replaced[identity_of(name, digest)] = now
        for identity in list(self._replaced):
            adapter = self._adapters[identity]
            if served.get(adapter.name) in (None, adapter.digest):  # unloaded, or served again
                del self._replaced[identity]
        self._list_replaced()  # first, so that a thread that reads both finds each adapter in one of them
        self.served = served

    def _list_replaced(self) -> None:
        replaced: dict[str, tuple[str, ...]] = {}
        for adapter in map(self._adapters.__getitem__, reversed(self._replaced)):
            replaced[adapter.name] = (*replaced.get(adapter.name, ()), adapter.digest)
        self.replaced = replaced

    def has(self, identity: str) -> bool:
        return identity in self._adapters

    def asked_for(self, identity: str, now: float) -> None:
        """A request for this adapter has come."""
        if identity in self._replaced:
            self._replaced[identity] = now

    @property
    def has_others(self) -> bool:
        """Whether the node still has adapters that are no longer served."""
        return len(self._adapters) > len(self.served)

    def forget_others(self, used: Collection[str], now: float) -> None:
        """Forgets the adapters that are neither served, nor in `used`, which has identities, nor kept because they were replaced."""
        if leaving := self._leaving([identity for identity in self._replaced if identity not in used], now):
            for identity in leaving:
                del self._replaced[identity]
            self._list_replaced()
        served = {identity_of(name, digest) for name, digest in self.served.items()}
        for identity in self._adapters.keys() - served - self._replaced.keys() - set(used):
            self.forgotten(self._adapters.pop(identity))

    def _leaving(self, unused: list[str], now: float) -> set[str]:
        """The replaced adapters that are kept no longer. `unused`: those that no request uses, in the order in which they were replaced."""
        leaving = {each for each in unused if now >= self._replaced[each] + KEEP_REPLACED_S}
        kept = Counter(self._adapters[each].name for each in self._replaced.keys() - leaving)
        for identity in unused:
            name = self._adapters[identity].name
            if kept[name] > MOST_REPLACED and identity not in leaving:
                leaving.add(identity)
                kept[name] -= 1
        if now >= self._look_at:
            self._look_at = now + LOOK_AT_MEMORY_S
            # Together they may take as much memory as they leave free.
            if unused and self._free_memory() < sum(self._adapters[each].num_bytes for each in self._replaced):
                leaving.add(unused[0])
        return leaving

    def seconds_until_look(self, now: float) -> float | None:
        """When `forget_others` has something to look at, even on a node that does nothing else; None: nothing is kept."""
        return max(0.0, self._look_at - now) if self._replaced else None
