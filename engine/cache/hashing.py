"""Chained hashes of full blocks: equal hashes mean equal content, so the prefix cache finds a block by its hash.

A block's KV depends on every token up to its end. So a block's hash covers the hash of the block before it and its own tokens,
and one hash stands for the whole prefix. A request's chain is looked up from the left, and beyond the first miss nothing can
match. The first block's parent is the root, which is random for each process unless there is a seed; nodes that must agree on
hashes share a seed.

Extra keys are hashed with the tokens where equal tokens have different KV: the LoRA adapter in every block, media features in
the blocks that they touch, and the cache salt, which separates tenants, in the first block only, from where the chain carries
it on. Each kind has its own tag, so that no adapter can pass for a salt.

The four algorithms are two encodings under two digests. The plain ones hash a fixed binary layout: the parent's digest, the
tokens as little-endian 32-bit numbers, and then the tagged extra keys, each string with its length before it. The `_cbor` ones
hash the canonical CBOR of `[parent, [tokens], extra keys or null]`, which any other program can reproduce.
"""

from __future__ import annotations

import hashlib
import os
import struct
import sys
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Protocol

import cbor2
import xxhash

from tandem.base.errors import InvalidRequest
from tandem.engine.config import HashAlgorithm

Digest = Callable[[bytes], bytes]
ExtraKey = tuple[str, bytes] | tuple[str, bytes, int]

_ROOT_BYTES = 32


class Media(Protocol):
    """A run of placeholder tokens that stand for other content: a part of an image, or rows that replace embeddings."""

    @property
    def identifier(self) -> str:
        """A hash of the content."""

    @property
    def offset(self) -> int: ...
    @property
    def length(self) -> int: ...


class HashedContent(Protocol):
    """The fields of a request that decide the KV of its blocks."""

    @property
    def all_token_ids(self) -> Sequence[int]: ...
    @property
    def cache_salt(self) -> str | None: ...
    @property
    def lora(self) -> str | None: ...
    @property
    def media(self) -> Sequence[Media]:
        """In the prompt's order, without overlaps."""


def extra_keys(request: HashedContent, start: int, end: int) -> tuple[ExtraKey, ...]:
    """The extra keys of the block that holds tokens `start` to `end`."""
    keys: list[ExtraKey] = []
    if request.lora is not None:
        keys.append(("lora", _utf8(request.lora)))
    for place in range(bisect_right(request.media, start, key=_end_of), len(request.media)):
        media = request.media[place]
        if media.offset >= end:
            break
        keys.append(("media", _utf8(media.identifier), media.offset))
    if start == 0 and request.cache_salt is not None:
        keys.append(("salt", _utf8(request.cache_salt)))
    return tuple(keys)


class BlockHasher:
    """Extends a request's chain of block hashes. An engine has one for all requests."""

    def __init__(self, block_size: int, digest: Digest, root: bytes) -> None:
        self.block_size = block_size
        self.root = root
        self._digest = digest

    def extend(self, chain: list[bytes], request: HashedContent) -> None:
        """Appends the hashes of the full blocks that `chain` does not cover yet. Raises an InvalidRequest for an id that is not a
        token."""
        size = self.block_size
        first, last = len(chain), len(request.all_token_ids) // size
        if first >= last:
            return
        tokens = request.all_token_ids[first * size : last * size]
        parent = chain[-1] if chain else self.root
        if request.lora is None and request.cache_salt is None and not request.media:
            keys: list[tuple[ExtraKey, ...]] | None = None
        else:
            keys = [extra_keys(request, i * size, (i + 1) * size) for i in range(first, last)]
        try:
            chain += self.hash_blocks(parent, tokens, keys)
        except (OverflowError, TypeError) as error:
            raise InvalidRequest("every token id must be a number from 0 to 4294967295", "prompt") from error

    def hash_blocks(self, parent: bytes, tokens: Sequence[int], keys: list[tuple[ExtraKey, ...]] | None) -> list[bytes]:
        digest = self._digest
        step = 4 * self.block_size
        packed = _pack(tokens)
        hashes = []
        for i in range(len(packed) // step):
            content = parent + packed[i * step : (i + 1) * step]
            if keys is not None:
                content += b"".join(map(_pack_key, keys[i]))
            parent = digest(content)
            hashes.append(parent)
        return hashes


class CborBlockHasher(BlockHasher):
    """Hashes canonical CBOR instead of the fixed binary layout."""

    def hash_blocks(self, parent: bytes, tokens: Sequence[int], keys: list[tuple[ExtraKey, ...]] | None) -> list[bytes]:
        _pack(tokens)  # raises for an id that is not a token
        hashes = []
        for i in range(len(tokens) // self.block_size):
            block = list(tokens[i * self.block_size : (i + 1) * self.block_size])
            extra = (keys[i] or None) if keys is not None else None
            parent = self._digest(cbor2.dumps((parent, block, extra), canonical=True))
            hashes.append(parent)
        return hashes


def make_block_hasher(algorithm: HashAlgorithm, block_size: int, seed: str | None) -> BlockHasher:
    """With a seed the root is the seed's digest. Without one the root is random, so no other process can predict a hash."""
    digest: Digest
    digest = _sha256 if algorithm in (HashAlgorithm.SHA256, HashAlgorithm.SHA256_CBOR) else xxhash.xxh3_128_digest
    in_cbor = algorithm in (HashAlgorithm.SHA256_CBOR, HashAlgorithm.XXHASH_CBOR)
    if seed is None:
        root = digest(os.urandom(_ROOT_BYTES))
    else:
        root = digest(cbor2.dumps(seed, canonical=True) if in_cbor else _utf8(seed))
    return (CborBlockHasher if in_cbor else BlockHasher)(block_size, digest, root)


def _end_of(media: Media) -> int:
    return media.offset + media.length


def _sha256(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _pack(tokens: Sequence[int]) -> bytes:
    packed = array("I", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _pack_key(key: ExtraKey) -> bytes:
    tag, text = key[0].encode(), key[1]
    number = key[2] if len(key) == 3 else 0
    return struct.pack("<I", len(tag)) + tag + struct.pack("<QQ", len(text), number) + text
