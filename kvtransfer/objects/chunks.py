"""Chunks as objects: what they are called, and what shows that one is whole and the right one.

An object is a checksum and a chunk. The checksum is of the era, the key and the chunk, so whatever else lies under a chunk's name does
not pass: torn, foreign, or copied there from another name.
"""

from __future__ import annotations

import enum
import time

import xxhash

from tandem.kvtransfer.objects.client import ObjectClient, StoreError
from tandem.kvtransfer.objects.eras import REQUEST_S
from tandem.kvtransfer.offload.policies import Key

_MAGIC = b"tandemo1"
HEAD_BYTES = len(_MAGIC) + 16
# The outcome of a store whose connection broke stays unknown for this long: the store may still do it.
UNSETTLED_S = 300.0


class ReadResult(enum.Enum):
    RIGHT = enum.auto()
    ABSENT = enum.auto()
    DAMAGED = enum.auto()


class ChunkStore:
    """Any thread may use it. Everything raises StoreError, and takes an era's name."""

    def __init__(self, client: ObjectClient, layout: str, chunk_bytes: int) -> None:
        self._client = client
        self._folder = f"kv/{layout}"
        self._probe = f"probes/{layout}"
        self._object_bytes = HEAD_BYTES + chunk_bytes
        self._unsettled_until = 0.0

    @property
    def is_unsettled(self) -> bool:
        """Whether something may still be stored that this node has given up."""
        return time.monotonic() < self._unsettled_until

    def has(self, era: str, key: Key, until: float) -> bool:
        return self._client.size(self._name(era, key), until) == self._object_bytes

    def read(self, era: str, key: Key, into: memoryview, until: float) -> ReadResult:
        """If it is not RIGHT, the content of `into` is undefined. A damaged object is deleted."""
        head = bytearray(HEAD_BYTES)
        fits = self._client.read(self._name(era, key), until, head, into)
        if fits is None:
            return ReadResult.ABSENT
        if fits and bytes(head) == _head(era, key, into):
            return ReadResult.RIGHT
        self.delete(era, key)
        return ReadResult.DAMAGED

    def write(self, era: str, key: Key, chunk: memoryview, until: float) -> None:
        """Leaves an object that is there as it is: another node has stored the same."""
        if self.has(era, key, until):
            return
        try:
            self._client.put(self._name(era, key), [_head(era, key, chunk), chunk], until)
        except StoreError:
            self._unsettled_until = time.monotonic() + UNSETTLED_S
            raise

    def delete(self, era: str, key: Key) -> None:
        self._client.delete(self._name(era, key), time.monotonic() + REQUEST_S)

    def probe(self, nonce: str) -> bool:
        """Stores a few bytes, and reads them. Returns whether that went well."""
        name, until = f"{self._probe}/{nonce}", time.monotonic() + REQUEST_S
        self._client.put(name, [nonce.encode()], until)
        found = self._client.get(name, until)
        self._client.delete(name, until)
        return found == nonce.encode()

    def _name(self, era: str, key: Key) -> str:
        return f"{self._folder}/{era}/{key.hex()}"


def _head(era: str, key: Key, chunk: memoryview) -> bytes:
    digest = xxhash.xxh3_128(era.encode() + len(key).to_bytes(2, "big") + key)
    digest.update(chunk)
    return _MAGIC + digest.digest()
