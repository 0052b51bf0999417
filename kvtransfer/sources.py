"""From which peers this node has KV, and of which generation of their caches.

A node's cache begins a new generation when something in it may be wrong. Every message to a peer names the sender's
generation. So a node that has KV of an earlier one learns of it from whatever it hears next, and it asks its sources
again and again, so that it hears something: also after one of the two was away.

A tier that outlives the process keeps the list (`KeptSources`) before it stores anything that came after. The next
process asks each of them, and uses what the tier has once all of them have said that they distrust nothing of it
(`TierSources`). What a source does not confirm in time is forgotten: it may have found its KV wrong while this node was away,
and ended before it could say so.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping

import msgspec

from tandem.wire.nodes import PeerAddress

ASK_S = 5.0  # between two questions to a source
CONFIRM_S = 20.0  # what an earlier process has left is forgotten if a source has not confirmed it by then
# A source that is silent for so long has ended, and finds nothing wrong any more. Later processes do not ask it.
GONE_S = 600.0
MOST_SOURCES = 256  # remembered at a time; the one that was used longest ago is forgotten first


class SourceRecord(msgspec.Struct):
    peer: PeerAddress
    generation: int  # of its cache, when the oldest KV came that is here
    heard_at: float = 0.0
    confirmed: bool = True  # by itself, since this process knows of it
    gone: bool = False


class KVSources:
    """Those of one kind: peers that handed KV over, or whose tiers were copied from. Any thread may use it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()  # guards the fields from here on
        self._of: OrderedDict[tuple[str, int], SourceRecord] = OrderedDict()
        self.changes = 0

    def took(self, peer: PeerAddress, generation: int) -> None:
        """KV of this generation of the peer's cache is about to be used here."""
        with self._lock:
            self._enter(peer, generation, confirmed=True)

    def recall(self, peer: PeerAddress, generation: int) -> None:
        """KV that an earlier process took from this peer is here. The peer has yet to confirm it."""
        with self._lock:
            self._enter(peer, generation, confirmed=False)

    def _enter(self, peer: PeerAddress, generation: int, *, confirmed: bool) -> None:
        key = peer.node_id, peer.epoch
        source = self._of.pop(key, None)
        if source is None or generation < source.generation or source.gone:
            self.changes += 1
        if source is None:
            source = SourceRecord(peer, generation, confirmed=confirmed)
        source.generation = min(source.generation, generation)
        source.confirmed = source.confirmed and confirmed
        source.heard_at, source.gone = self._clock(), False
        self._of[key] = source
        if len(self._of) > MOST_SOURCES:
            self._of.popitem(last=False)

    def hear(self, key: tuple[str, int], generation: int) -> bool:
        """A message of this peer, by its node and incarnation, names the generation of its cache. Returns whether KV of an earlier one is here."""
        with self._lock:
            if (source := self._of.get(key)) is None:
                return False
            if source.generation < generation:
                return True
            self.changes += source.gone
            source.heard_at, source.confirmed, source.gone = self._clock(), True, False
            return False

    def is_confirmed(self, peer: PeerAddress) -> bool:
        with self._lock:
            source = self._of.get((peer.node_id, peer.epoch))
            return source is not None and source.confirmed

    @property
    def awaits_confirmation(self) -> bool:
        with self._lock:
            return any(not source.confirmed for source in self._of.values())

    def drop_unconfirmed(self) -> None:
        """Nothing that an earlier process took from those who have not confirmed it is used."""
        with self._lock:
            for key in [key for key, source in self._of.items() if not source.confirmed]:
                del self._of[key]
            self.changes += 1

    def clear(self) -> None:
        """Nothing that came from a peer so far is used any more."""
        with self._lock:
            self.changes += bool(self._of)
            self._of.clear()

    def to_ask(self) -> list[PeerAddress]:
        """Returns the peers to ask for a sign now."""
        limit = self._clock() - GONE_S
        with self._lock:
            for source in self._of.values():
                if source.confirmed and not source.gone and source.heard_at < limit:
                    source.gone = True
                    self.changes += 1
            return [source.peer for source in self._of.values()]

    def to_keep(self) -> list[tuple[PeerAddress, int]]:
        """Returns whom a later process has to ask, and what it has of them."""
        with self._lock:
            return [(source.peer, source.generation) for source in self._of.values() if not source.gone]


class KeptSources(msgspec.Struct, frozen=True):
    """What a tier keeps on its disk."""

    handed_over: list[tuple[PeerAddress, int]] = []
    copied: list[tuple[PeerAddress, int]] = []


class NodeSources:
    """All sources of a node, and whether what its tiers must forget is off their disks."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.handed_over = KVSources(clock)
        self.copied = KVSources(clock)
        self._unwritten: list[Callable[[], bool]] = []

    @property
    def changes(self) -> int:
        return self.handed_over.changes + self.copied.changes

    def of_kind(self) -> Mapping[str, KVSources]:
        return {"handed_over": self.handed_over, "copied": self.copied}

    def to_keep(self) -> KeptSources:
        return KeptSources(self.handed_over.to_keep(), self.copied.to_keep())

    def add_tier(self, forgets: Callable[[], bool]) -> None:
        """`forgets`: whether the tier has yet to write that something is forgotten. Any thread may call it."""
        self._unwritten.append(forgets)

    @property
    def all_written(self) -> bool:
        """Whether nothing that was to be forgotten would come back if this process ended now."""
        return not any(forgets() for forgets in self._unwritten)


class TierSources:
    """For one tier that outlives the process: what it has of which sources, and whether they confirm it."""

    def __init__(self, sources: NodeSources | None = None) -> None:
        self._sources = sources or NodeSources()
        self._awaited: list[tuple[KVSources, PeerAddress]] = []
        self._until = 0.0
        self._kept = KeptSources()  # what the disk says
        self._kept_at = self._sources.changes
        self._write: Callable[[KeptSources], None] | None = None

    def bind(self, write: Callable[[KeptSources], None], forgets: Callable[[], bool]) -> None:
        """`write` has the list written before anything else that is asked of the tier later."""
        self._write = write
        self._sources.add_tier(forgets)

    def found(self, kept: KeptSources) -> None:
        """An earlier process has left this with the tier's content. Called before the content may be used, by any thread."""
        self._kept, self._kept_at = kept, -1
        self._until = self._sources.clock() + CONFIRM_S
        awaited = []
        for kind, of_kind in self._sources.of_kind().items():
            for peer, generation in getattr(kept, kind):
                of_kind.recall(peer, generation)
                awaited.append((of_kind, peer))
        self._awaited = awaited

    @property
    def doubt(self) -> str:
        """Why the tier's content may not be used yet; "" if it may."""
        if self._awaited:
            self._awaited = [(of, peer) for of, peer in self._awaited if not of.is_confirmed(peer)]
        if not self._awaited:
            return ""
        return f"{self._awaited[0][1].node_id} has not confirmed the KV that an earlier process took from it"

    @property
    def is_over(self) -> bool:
        """Whether the sources had their time to confirm, and did not."""
        return bool(self.doubt) and self._sources.clock() >= self._until

    @property
    def all_written(self) -> bool:
        return self._sources.all_written

    def forgot(self) -> None:
        """The tier has forgotten everything, so its list is of no more use."""
        for of_kind, _ in self._awaited:
            of_kind.drop_unconfirmed()
        self._awaited, self._kept, self._kept_at = [], KeptSources(), -1

    def keep(self) -> None:
        """Called before a store is planned, so that the list is on the disk before the chunks are."""
        if self._kept_at == self._sources.changes or self._write is None:
            return
        self._kept_at, kept = self._sources.changes, self._sources.to_keep()
        if kept != self._kept:
            self._kept = kept
            self._write(kept)
