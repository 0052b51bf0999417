"""What a node that reads other nodes' tiers has asked of them, and what it has measured: bytes a second, answers a second."""

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

MAX_MISSED = 4096  # keys of a peer
MAX_ASKED = 16  # answers without a key; it was given up there

# What was measured longer ago is measured again.
RATE_LASTS_S = 60.0
WEIGHT = 0.3  # of the newest observation


class Rate:
    """Something a second, as measured lately; None when it was not."""

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
    # What a mirror asked for and was not ready, and how often: it is asked for with what is stored next.
    missed: dict[Key, int] = dataclasses.field(default_factory=dict)

    def ask_again(self, keys: Iterable[Key], asked: Mapping[Key, int]) -> None:
        """Next time; `asked`: how often each was asked for before, and not there."""
        for key in keys:
            if (times := asked.get(key, 0)) < MAX_ASKED:
                self.missed[key] = times
        while len(self.missed) > MAX_MISSED:
            del self.missed[next(iter(self.missed))]


@dataclasses.dataclass(slots=True)
class PrefixQuestion:
    """What a peer has of a prefix, where that does not follow from what is missing here."""

    request: TransferRequest
    first: int  # the device has the blocks before it
    end: int  # and this tier has the prefix that ends with the block before this one
    last: int
    is_open: bool = True

    @property
    def hashes(self) -> Sequence[bytes]:
        return self.request.block_hashes[self.first : self.last]

    def covers(self, other: PrefixQuestion) -> bool:
        """Whether what is copied for this one will do for the other: both could take all of the same blocks."""
        mine, its = self.request.block_hashes, other.request.block_hashes
        return (
            self.first <= other.first
            and self.last == other.last
            and mine[self.last - 1] == its[other.last - 1]
        )


@dataclasses.dataclass(slots=True)
class Fetch:
    number: int
    peer: PeerAddress
    room: StoreRoom  # what is being written; less of it when the peer has not got all
    asked_at: float
    for_mirror: bool
    checksum_every: int = 0
    requests: set[str] = dataclasses.field(default_factory=set)  # that wait for it
    is_reading: bool = False
    question: PrefixQuestion | None = None  # which comes before it
    asked: dict[Key, int] = dataclasses.field(default_factory=dict)  # see KnownPeer
    others: list[int] = dataclasses.field(default_factory=list)  # that bring some of what was chosen


def which_of(found: ChunksFound, count: int) -> Sequence[int]:
    """Which of so many keys that were asked for its slots are of; none where that makes no sense."""
    if found.which is None:
        return range(min(len(found.slots), count))
    which = found.which
    right = len(which) == len(found.slots) and all(a < b for a, b in itertools.pairwise(which))
    return which if right and which and which[0] >= 0 and which[-1] < count else []
