"""The interface of a tier: what it keeps, and what copies blocks to and from it. A spec is chosen by name or module
path."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from tandem.base.errors import InternalError
from tandem.kvtransfer.base import ConnectorContext, KVCacheMemory
from tandem.kvtransfer.config import TierConfig
from tandem.kvtransfer.offload.manager import TierManager
from tandem.kvtransfer.offload.patience import STORE_S
from tandem.kvtransfer.registry import TIERS, find_factory
from tandem.kvtransfer.sources import TierSources
from tandem.wire.requests import TierStatus

if TYPE_CHECKING:
    from tandem.kvtransfer.offload.sharing import TierSharing


@dataclasses.dataclass(frozen=True, slots=True)
class Copy:
    """Blocks of the device, and the places of the tier to or from which they are copied. Place p is part p %
    block_factor of slot p // block_factor, and as large as one block."""

    job: int
    blocks: Sequence[int]
    places: Sequence[int]
    keys: Sequence[bytes] = ()  # the slots' keys, in order
    resets: int = 0  # how often the tier had forgotten everything when this copy was planned
    within_s: float = STORE_S  # it is given up after this time


class Mover(abc.ABC):
    """Copies between the device and the tier while the engine's steps run. The step thread calls it and never waits, and
    every copy ends in its time, done or not (`patience`)."""

    @abc.abstractmethod
    def submit(self, stores: Sequence[Copy], loads: Sequence[Copy]) -> None:
        """Queues copies. A store copies everything that was computed before this call. A load does not wait for stores
        that have not begun. The mover calls the context's `wake` when a copy has ended."""

    @abc.abstractmethod
    def take_ended(self) -> dict[int, bool | None]:
        """Returns the jobs that ended since the last call, and whether every byte of each is right. None: it was given
        up, and says nothing of what the tier has. None of them touches the device's blocks any more."""

    @property
    def left_out(self) -> str:
        """Why the tier is left out for now: it loads and stores nothing. "": it is used."""
        return ""

    def leave_out(self, why: str) -> None:
        """Leaves the tier out for a while, if it is used."""

    @property
    def given_up(self) -> int:
        """The number of copies that were given up since the start."""
        return 0

    @property
    def block_bytes(self) -> int:
        """The bytes of a block on all ranks together, if the node's ranks keep their parts apart; else 0."""
        return 0

    @property
    @abc.abstractmethod
    def stored_bytes(self) -> int: ...

    @property
    @abc.abstractmethod
    def loaded_bytes(self) -> int: ...

    @abc.abstractmethod
    def close(self) -> None:
        """Ends every copy. Idempotent."""


class TierSpec(Protocol):
    """One tier of one node."""

    @property
    def name(self) -> str: ...

    def open(self, memory: KVCacheMemory, wake: Callable[[], None]) -> tuple[TierManager, Mover]:
        """Called once, when the device's blocks are known. `wake` is thread-safe."""


class LastingSpec(abc.ABC):
    """A tier that outlives the process, so it says from which peers its KV came."""

    recall: TierSources
    whole_prefixes_only = False  # it holds no windows and no recurrent states


@dataclasses.dataclass(slots=True)
class Tier:
    """A tier, shared by the two halves of its connector. Each number has one writer among them, in the step thread."""

    spec: TierSpec
    block_factor: int
    asked_tokens: int = 0
    found_tokens: int = 0
    loaded_tokens: int = 0
    loading_seconds: float = 0.0
    sharing: TierSharing | None = None  # set if other nodes read this tier
    recall: TierSources | None = None  # set if the tier outlives the process
    _opened: tuple[TierManager, Mover] | None = None
    _slot_bytes: int = 0

    def open(self, memory: KVCacheMemory, wake: Callable[[], None]) -> None:
        self._opened = self.spec.open(memory, wake)
        self._slot_bytes = (self.mover.block_bytes or memory.block_bytes) * self.block_factor

    @property
    def manager(self) -> TierManager:
        return self._open[0]

    @property
    def mover(self) -> Mover:
        return self._open[1]

    @property
    def left_out(self) -> str:
        """Why the tier loads and stores nothing for now; "" if it does."""
        return (self.recall.doubt if self.recall is not None else "") or self.mover.left_out

    @property
    def _open(self) -> tuple[TierManager, Mover]:
        if self._opened is None:
            raise InternalError(f"the {self.spec.name} tier is used before the KV cache is known")
        return self._opened

    def status(self) -> TierStatus:
        """May be called from any thread."""
        manager, mover = self._open
        return TierStatus(
            name=self.spec.name,
            used_bytes=manager.used * self._slot_bytes,
            total_bytes=manager.capacity * self._slot_bytes,
            asked_tokens=self.asked_tokens,
            found_tokens=self.found_tokens,
            loaded_bytes=mover.loaded_bytes,
            stored_bytes=mover.stored_bytes,
            evicted_bytes=manager.evicted * self._slot_bytes,
            loaded_tokens=self.loaded_tokens,
            loading_seconds=self.loading_seconds,
            fetched_bytes=self.sharing.fetched_bytes if self.sharing is not None else 0,
            mirrored_bytes=self.sharing.mirrored_bytes if self.sharing is not None else 0,
            given_up=mover.given_up,
            left_out=self.left_out,
        )

    def close(self) -> None:
        try:
            if self.sharing is not None:
                self.sharing.close()
        finally:
            if self._opened is not None:
                self._opened[1].close()


SPECS = {
    "cpu": "tandem.kvtransfer.offload.cpu:create",
    "disk": "tandem.kvtransfer.offload.disk:create",
    "objects": "tandem.kvtransfer.objects:create",
    "synthetic": "tandem.kvtransfer.offload.synthetic:create",
}


def find_tiers_of_ranks(context: ConnectorContext) -> list[Tier]:
    """Makes the tiers of a node whose ranks keep their KV apart. Raises ConfigurationError."""
    tiers_of: Callable[[ConnectorContext], list[Tier]] = find_factory("cache.tiers", "factory", "tiers of ranks", TIERS)
    return tiers_of(context)


def create_tier(config: TierConfig) -> Tier:
    factory: Callable[[TierConfig], TierSpec] = find_factory("cache.tiers", "spec", config.kind, SPECS)
    return Tier(factory(config), config.block_factor)
