"""What a node has asked of other nodes' tiers, and what it has measured of them: rates of bytes and of answers."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

from tandem.kvtransfer.base import TransferRequest
from tandem.kvtransfer.offload.manager import StoreRoom
from tandem.kvtransfer.offload.policies import Key
from tandem.wire.handoff import CacheMemory
from tandem.wire.nodes import PeerAddress
from tandem.wire.sharing import ChunksFound

MAX_MISSED = 4096  # the most keys of one peer
MAX_ASKED = 16  # after this many answers without the key, it was evicted there

# A measurement older than this is made again.
RATE_LASTS_S = 60.0
WEIGHT = 0.3  # of the newest observation


class Rate:
    """A recent rate; None if nothing was observed for RATE_LASTS_S."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._value: float | None = None
        self._at = 0.0

    def observe(self, amount: float, seconds: float) -> None:
        rate = amount / max(seconds, 1e-6)
        known = self.value
        self._value = rate if known is None else (1 - WEIGHT) * known + WEIGHT * rate
        self._at = self._clock()

    @property
    def value(self) -> float | None:
        return self._value if self._clock() - self._at < RATE_LASTS_S else None


@dataclasses.dataclass(slots=True)
class KnownPeer:
    bytes_per_s: Rate
    answers_per_s: Rate
    memory: CacheMemory | None = None
    generation: int = 0  # the latest of its cache that we have heard of
    # Keys that a mirror asked for before they were ready, and how often. It asks again with the next stored chunks.
    missed: dict[Key, int] = dataclasses.field(default_factory=dict)

    def ask_again(self, keys: Iterable[Key], asked: Mapping[Key, int]) -> None:
        """Ask for these keys again with the next ones. `asked`: how often each was asked for and not there."""
        for key in keys:
            if (times := asked.get(key, 0)) < MAX_ASKED:
                self.missed[key] = times
        while len(self.missed) > MAX_MISSED:
            del self.missed[next(iter(self.missed))]


@dataclasses.dataclass(slots=True)
class PrefixQuestion:
    """Asks which parts of a prefix a peer has, for models whose missing keys do not say which parts are needed."""

    request: TransferRequest
    first: int  # the device has the blocks before this one
    end: int  # this tier has the prefix that ends before this block
    last: int
    is_open: bool = True

    @property
    def hashes(self) -> Sequence[bytes]:
        return self.request.block_hashes[self.first : self.last]

    def covers(self, other: PrefixQuestion) -> bool:
        """Whether the other question's request can use what is copied for this one: both could take the same blocks."""
        mine, its = self.request.block_hashes, other.request.block_hashes
        return self.first <= other.first and self.last == other.last and mine[self.last - 1] == its[other.last - 1]


@dataclasses.dataclass(slots=True)
class Fetch:
    number: int
    peer: PeerAddress
    room: StoreRoom  # the chunks that are being written; fewer once the peer lacks some
    asked_at: float
    for_mirror: bool
    checksum_every: int = 0
    generation: int = 0  # of the peer's cache when it answered
    requests: set[str] = dataclasses.field(default_factory=set)  # those that wait for the fetch
    is_reading: bool = False
    question: PrefixQuestion | None = None  # asked before the chunks are
    asked: dict[Key, int] = dataclasses.field(default_factory=dict)  # see `KnownPeer.missed`
    # Other fetches, which bring some of the chosen chunks. The requests wait for those next.
    others: list[int] = dataclasses.field(default_factory=list)


def which_of(found: ChunksFound, count: int) -> Sequence[int]:
    """Returns to which of the `count` asked keys the found slots belong; none if the answer makes no sense."""
    if found.which is None:
        return range(min(len(found.slots), count))
    which = found.which
    right = len(which) == len(found.slots) and all(a < b for a, b in itertools.pairwise(which))
    return which if right and which and which[0] >= 0 and which[-1] < count else []
