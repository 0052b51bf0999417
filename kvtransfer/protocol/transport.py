"""The interface of whatever moves blocks between two nodes' KV caches.

The protocol's thread alone calls it, and every method returns at once. A transport may complete a transfer while it
posts it, because `ProtocolSettings.max_post_bytes` bounds a post.
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
    """What the loop that moves blocks has to do next."""

    NONE = 0
    IN_FLIGHT = 1  # ask again soon whether moves are done
    DUE = 2  # post more, at once


class Direction(enum.StrEnum):
    PUSH = "push"  # the producer writes
    PULL = "pull"  # the consumer reads


class CutAxis(msgspec.Struct, frozen=True):
    """Where in a block the heads lie, or the layers: how many there are, and how many bytes lie from one to the next in
    our blocks and in the peer's."""

    count: int
    ours: int
    theirs: int


class Move(msgspec.Struct, frozen=True):
    """One operation: unit `local[i]` of our pool ↔ unit `remote[i]` of the peer's.

    Unit u is the `unit_bytes` bytes at u × `unit_bytes` from the beginning of its pool. A unit is a whole block if both
    nodes' blocks have the same layout. It is a part of one if they do not, or if a layer goes alone.
    """

    operation: Operation
    transfer_id: str
    unit_bytes: int
    local: UnitIds
    remote: UnitIds
    heads: CutAxis | None = None  # if our pool or the peer's is in shards: each unit belongs to one head
    # This many units in a row make one grain. Every grain has the same ones, counted from its first unit.
    grain_units: int = 1
    # If the shards of a pool belong to pipeline stages: each unit also belongs to one layer, and each grain to one
    # group.
    layers: CutAxis | None = None
    groups: UnitIds | None = None

    @property
    def num_bytes(self) -> int:
        return self.unit_bytes * len(self.local)


class IndexRange(msgspec.Struct, frozen=True):
    """A range of heads, or of the slots of layers in a block."""

    first: int
    count: int

    @property
    def end(self) -> int:
        return self.first + self.count


class ShardPart(msgspec.Struct, frozen=True):
    """What one shard has of every block: some heads, and, for each group, the layers in some slots of a block of all
    layers. In the shard they begin at slot 0. `slots` is empty if the shard has all layers."""

    heads: IndexRange
    slots: tuple[IndexRange, ...] = ()

    @property
    def width(self) -> int:
        """The slots of a block in this shard; 0 if the shard has all layers."""
        return max((of_group.count for of_group in self.slots), default=0)

    def slots_of(self, group: int, of: int) -> IndexRange:
        """The slots of a block of all layers whose layers of the group are in this shard. `of`: how many slots have
        some."""
        return self.slots[group] if self.slots else IndexRange(0, of)


class ShardSums(NamedTuple):
    """One rank's checksums of some grains, unsigned: [grains, slots or 1, heads]. There is one for each of its
    heads, or for each of its slots and heads."""

    part: ShardPart
    sums: npt.NDArray[np.uint64]


def _forget_nothing() -> None:
    pass


class AskedSums(NamedTuple):
    """Checksums that other ranks are computing. The caller calls one of the two, once."""

    wait: Callable[[], list[ShardSums]] = list  # raises TransferError if they do not come
    forget: Callable[[], None] = _forget_nothing


class Transport(abc.ABC):
    """A transport raises every failure of the library beneath it as TransferError."""

    name: str

    @abc.abstractmethod
    def register(self, memory: KVCacheMemory) -> CacheMemory:
        """Makes our KV cache reachable and returns what a peer needs to reach it. Called once, before anything else."""

    @abc.abstractmethod
    def connect(self, memory: CacheMemory) -> RemoteId:
        """Prepares moves to and from a peer's memory. `memory` comes from the peer: its metadata is unchecked."""

    @abc.abstractmethod
    def disconnect(self, remote: RemoteId) -> None:
        """Drops the peer's memory. The caller has nothing in flight there, except what failed: this must stop it."""

    @abc.abstractmethod
    def post(self, remote: RemoteId, move: Move) -> HandleId:
        """Begins a move. The caller has checked its units against both pools."""

    @abc.abstractmethod
    def is_done(self, handle: HandleId) -> bool:
        """Whether every byte has arrived. The handle is gone after True or a TransferError."""

    def cancel(self, handle: HandleId) -> bool:
        """The caller no longer wants this move. True: the move touches no memory from now on, and the handle is gone.
        False: the move cannot be taken back, and the caller must go on asking `is_done`."""
        return False

    @abc.abstractmethod
    def close(self) -> None:
        """Releases everything. Idempotent."""

    @property
    def malformed_frames(self) -> int:
        """Frames that did not decode, on sockets of the transport's own."""
        return 0

    # For a transport over several ranks that each have their own memory.

    def may_still_write(self, remote: RemoteId) -> bool:
        """After a write failed: whether parts of it may still arrive there, which `disconnect` could not stop. While it
        is True, the producer does not tell the peer that the transfer is closed."""
        return False

    def stop_writing(self, remote: RemoteId) -> None:
        """Begins to stop failed writes, if that takes a while. The caller has nothing else in flight there, and calls
        again until `may_still_write` is False."""

    def sums_elsewhere(
        self, blocks: Sequence[int], parts: Sequence[int], grain: int, on_device: bool, by_layer: bool
    ) -> AskedSums:
        """Asks the other ranks for checksums of their part of these grains: one for each head, or for each head of each
        layer. Does not wait for them."""
        return AskedSums()

    # For a transport whose peers reach a copy of the KV cache instead of the cache.

    is_staged = False

    def as_peers_see(self, memory: KVCacheMemory) -> KVCacheMemory:
        """Returns the memory that peers' bytes come from and go to."""
        return memory

    def landed(self, blocks: Sequence[int]) -> None:
        """A peer has written these blocks; they were checked and stay as they are. They must be in the cache when this
        returns. Only called on a staged transport."""

    # For a transport whose own process carries out a peer's writes: it can refuse those that come too late. A transport
    # whose peers write to memory from outside cannot.

    def expect(self, transfer_id: str, blocks: Sequence[int]) -> None:
        """From now on a peer may write to these blocks of ours, for this transfer."""

    def expect_no_more(self, transfer_id: str) -> bool:
        """True: from now on no write for this transfer arrives here. False: this transport cannot refuse writes."""
        return False

    # For a transport whose peers write to memory from outside: it can close the way that their writes take.

    def reopen(self) -> CacheMemory | None:
        """Makes our KV cache reachable in another way as well, and returns it for peers to use from then on. None:
        there is only one way. Raises TransferError."""
        return None

    def close_earlier(self) -> bool:
        """Closes every way to our KV cache but the newest: writes that peers have posted to the others arrive nowhere.
        False: not now, because moves of our own still need one. Raises TransferError, and then a later call closes them."""
        return False

    def shuts_out(self, peer: ProcessIdentity) -> bool:
        """Whether `close_earlier` stops this peer's writes."""
        return False


def run_bounds(*columns: UnitIds) -> tuple[UnitIds, UnitIds]:
    """Splits the rows into runs: in a run every column grows by one from row to row. Returns the rows where runs begin
    and the runs' lengths."""
    begins = np.ones(len(columns[0]), dtype=bool)
    begins[1:] = np.any([np.diff(column) != 1 for column in columns], axis=0)
    first = np.flatnonzero(begins)
    return first, np.diff(np.append(first, len(begins)))


def runs_of(*columns: UnitIds | Sequence[int]) -> Iterator[tuple[int, ...]]:
    """For each such run: the value of each column in its first row, and its length."""
    arrays = [np.asarray(column) for column in columns]
    first, counts = run_bounds(*arrays)
    yield from zip(*(array[first].tolist() for array in arrays), counts.tolist(), strict=True)
