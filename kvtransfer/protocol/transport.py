"""What must be able to move blocks between two nodes' KV caches.

Used by one thread only. Everything returns at once; a transport that completes a transfer while posting it is
welcome to, as long as a post is bounded by `Settings.max_post_bytes`.
"""

from __future__ import annotations

import abc
import enum
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, NewType

import msgspec
import numpy as np
import numpy.typing as npt

from tandem.kvtransfer.base import KVCacheMemory
from tandem.wire.handoff import CacheMemory, ProcessIdentity

RemoteId = NewType("RemoteId", int)
HandleId = NewType("HandleId", int)
UnitIds = npt.NDArray[np.int64]


class Operation(enum.StrEnum):
    WRITE = "write"
    READ = "read"


class Activity(enum.IntEnum):
    """What moving blocks needs next."""

    NONE = 0
    IN_FLIGHT = 1  # look again soon
    DUE = 2  # there is more to post: at once


class Direction(enum.StrEnum):
    PUSH = "push"  # the producer writes
    PULL = "pull"  # the consumer reads


class CutAxis(msgspec.Struct, frozen=True):
    """Where in a block the heads lie, or the layers: so many, and so many bytes from one to the next in our blocks and in the peer's."""

    count: int
    ours: int
    theirs: int


class Move(msgspec.Struct, frozen=True):
    """One operation: unit `local[i]` of our pool ↔ unit `remote[i]` of the peer's.

    Unit u is the `unit_bytes` bytes at u × `unit_bytes` from the beginning of its pool. It is a whole block where
    both nodes' blocks mean the same, and a part of one where they do not, or where a layer goes alone.
    """

    operation: Operation
    transfer_id: str
    unit_bytes: int
    local: UnitIds
    remote: UnitIds
    heads: CutAxis | None = None  # of a pool in shards, ours or the peer's: each unit is of one head
    grain_units: int = (
        1  # so many in a row are one grain's; every grain has the same ones, from its first unit on
    )
    # Where a pool's shards are of pipeline stages: each unit is of one layer, too, and each grain of one group.
    layers: CutAxis | None = None
    groups: UnitIds | None = None

    @property
    def num_bytes(self) -> int:
        return self.unit_bytes * len(self.local)


class IndexRange(msgspec.Struct, frozen=True):
    """Heads, or the slots of layers in a block."""

    first: int
    count: int

    @property
    def end(self) -> int:
        return self.first + self.count


class ShardPart(msgspec.Struct, frozen=True):
    """What one shard has of every block: some heads, and of each group's layers those in some slots, which lie in it from its first slot
    on. `slots` is empty where it has all layers."""

    heads: IndexRange
    slots: tuple[IndexRange, ...] = ()

    @property
    def width(self) -> int:
        """How many slots a block has in it, where it has not all layers; else 0."""
        return max((of_group.count for of_group in self.slots), default=0)

    def slots_of(self, group: int, of: int) -> IndexRange:
        """Where a block of the group has layers in `of` slots."""
        return self.slots[group] if self.slots else IndexRange(0, of)


class ShardSums(NamedTuple):
    """A checksum of each of some grains for each head, or for each slot and head, that one rank has: [grains, slots or 1, heads],
    unsigned."""

    part: ShardPart
    sums: npt.NDArray[np.uint64]


def _forget_nothing() -> None:
    pass


class AskedSums(NamedTuple):
    """Checksums that other ranks are taking. One of the two is called, once."""

    wait: Callable[[], list[ShardSums]] = list  # raises TransferError where they do not come
    forget: Callable[[], None] = _forget_nothing


class Transport(abc.ABC):
    """Failures of what is underneath are raised as TransferError, whatever they were."""

    name: str

    @abc.abstractmethod
    def register(self, memory: KVCacheMemory) -> CacheMemory:
        """Make our KV cache reachable; returns what a peer needs to know. Once, before anything else."""

    @abc.abstractmethod
    def connect(self, memory: CacheMemory) -> RemoteId:
        """Get ready to move blocks to and from this memory."""

    @abc.abstractmethod
    def disconnect(self, remote: RemoteId) -> None:
        """Forget it. Called with nothing in flight, unless a transfer failed: what that left must be stopped here."""

    @abc.abstractmethod
    def post(self, remote: RemoteId, move: Move) -> HandleId:
        """Set a move in motion. Its units have been checked against both pools."""

    @abc.abstractmethod
    def is_done(self, handle: HandleId) -> bool:
        """Whether every byte has arrived. True, or a TransferError, ends the handle's life."""

    def cancel(self, handle: HandleId) -> bool:
        """This move is not wanted any more. True ends the handle's life: from now on it touches no memory.
        False: it cannot be taken back, and must be asked for until it is done."""
        return False

    @abc.abstractmethod
    def close(self) -> None:
        """Give everything back. Idempotent."""

    @property
    def malformed_frames(self) -> int:
        """Frames that did not decode, on sockets of its own."""
        return 0

    # A transport of several ranks, each with memory of its own.

    def may_still_write(self, remote: RemoteId) -> bool:
        """After a write failed: whether anything of it may still land there, which `disconnect` could not stop. As long as it may, the
        peer is not told that the transfer is closed."""
        return False

    def stop_writing(self, remote: RemoteId) -> None:
        """Nothing is in flight there but what has failed: begin to stop that, where it takes a while. To be called again, until nothing
        `may_still_write`."""

    def sums_elsewhere(
        self, blocks: Sequence[int], parts: Sequence[int], grain: int, on_device: bool, by_layer: bool
    ) -> AskedSums:
        """Begins to take the checksums of what other ranks keep of these grains: of each head, or of each head of each layer."""
        return AskedSums()

    # A transport that has a copy of the KV cache which peers see instead of it.

    is_staged = False

    def as_peers_see(self, memory: KVCacheMemory) -> KVCacheMemory:
        """Where their bytes come from and go to."""
        return memory

    def landed(self, blocks: Sequence[int]) -> None:
        """What a peer wrote to these blocks is whole, was checked, and stays as it is: it must be in the cache when this
        returns. Only a staged transport is told."""

    # A transport whose peer's writes are carried out by this process can refuse those that come too late, which
    # what writes to memory from outside cannot.

    def expect(self, transfer_id: str, blocks: Sequence[int]) -> None:
        """From now on a peer may write to these blocks of ours, for this transfer. Any thread of ours may ask."""

    def expect_no_more(self, transfer_id: str) -> bool:
        """True: from now on no write for this transfer lands here. False: this transport cannot refuse one."""
        return False

    # A transport that writes to memory from outside can at least close the way that the writes take.

    def reopen(self) -> CacheMemory | None:
        """Make our KV cache reachable in another way as well; peers are told of it and use it from then on. None: there
        is only one way."""
        return None

    def close_earlier(self) -> bool:
        """Close every way to our KV cache but the newest: whatever peers have posted to them lands nowhere any more.
        False: not now, because moves of our own still need one."""
        return False

    def shuts_out(self, peer: ProcessIdentity) -> bool:
        """Whether `close_earlier` stops the writes of this peer."""
        return False


def run_bounds(*columns: UnitIds) -> tuple[UnitIds, UnitIds]:
    """Rows in which every column goes on from the row before are one run: where each begins, and how many rows it has."""
    begins = np.ones(len(columns[0]), dtype=bool)
    begins[1:] = np.any([np.diff(column) != 1 for column in columns], axis=0)
    first = np.flatnonzero(begins)
    return first, np.diff(np.append(first, len(begins)))


def runs_of(*columns: UnitIds | Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The value of each column where a run begins, and how many rows it has."""
    arrays = [np.asarray(column) for column in columns]
    first, counts = run_bounds(*arrays)
    yield from zip(*(array[first].tolist() for array in arrays), counts.tolist(), strict=True)
