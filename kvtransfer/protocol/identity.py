"""Who we are to a peer, and what a request's tokens are known by."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from tandem.wire.handoff import Envelope

Clock = Callable[[], float]
V = TypeVar("V")


class PeerKey(NamedTuple):
    """One incarnation of one node."""

    node_id: str
    epoch: int


def key_of(envelope: Envelope) -> PeerKey:
    return PeerKey(envelope.sender_id, envelope.sender_epoch)


class Identity(NamedTuple):
    node_id: str
    epoch: int
    endpoint: str

    def envelope(self, receiver_epoch: int) -> Envelope:
        return Envelope(
            sender_id=self.node_id,
            sender_epoch=self.epoch,
            receiver_epoch=receiver_epoch,
            reply_to=self.endpoint,
        )


def token_hash(token_ids: Sequence[int], cache_salt: str | None, lora: str | None) -> bytes:
    """What both nodes must agree on before one's KV becomes the other's: the same tokens under the same model.

    Over all tokens, independent of block size, so that nodes with different blocks can compare.
    """
    digest = hashlib.sha256(np.asarray(token_ids, dtype="<i4").tobytes())
    for part in (cache_salt, lora):
        encoded = b"" if part is None else part.encode()
        digest.update(b"\0" if part is None else b"\1")
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.digest()


class Remembered(Generic[V]):
    """A bounded memory of things that are over, so that what comes late is recognised as late."""

    def __init__(self, limit: int, seconds: float, clock: Clock) -> None:
        self._limit = limit
        self._seconds = seconds
        self._clock = clock
        self._entries: OrderedDict[str, tuple[float, V]] = OrderedDict()

    def add(self, key: str, value: V) -> None:
        self._entries.pop(key, None)
        self._entries[key] = (self._clock() + self._seconds, value)
        while len(self._entries) > self._limit:
            self._entries.popitem(last=False)

    def get(self, key: str) -> V | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        expires, value = entry
        if expires <= self._clock():
            del self._entries[key]
            return None
        return value
