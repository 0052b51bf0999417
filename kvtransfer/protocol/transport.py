"""What must be able to move blocks between two nodes' KV caches.

Used by one thread only. Everything returns at once; a transport that completes a transfer while posting it is
welcome to, as long as a post is bounded by `Settings.max_post_bytes`.
"""

from __future__ import annotations

import abc
import enum
from collections.abc import Sequence
from typing import NewType

from kvtransfer.base import KVCacheMemory
from wire.handoff import CacheMemory

RemoteId = NewType("RemoteId", int)
HandleId = NewType("HandleId", int)


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
    def post(
        self,
        operation: Operation,
        remote: RemoteId,
        local_blocks: Sequence[int],
        remote_blocks: Sequence[int],
    ) -> HandleId:
        """Set `local_blocks[i]` ↔ `remote_blocks[i]` in motion. Ids have been checked against both pools."""

    @abc.abstractmethod
    def is_done(self, handle: HandleId) -> bool:
        """Whether every byte has arrived. True, or a TransferError, ends the handle's life."""

    @abc.abstractmethod
    def close(self) -> None:
        """Give everything back. Idempotent."""
