"""The hashes by which routers and nodes name a prompt's blocks: one for each block and everything before it, the same in
every process of a cluster.

A node's cache has hashes of its own, which other processes cannot compute. `block_hashes` serve routing alone: routers
compute them from prompts, nodes from the blocks that they cache. A wrong match costs time, and never changes an answer.
"""

from __future__ import annotations

import struct
import sys
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import xxhash

from tandem.wire.images import MediaFeature

_TOKEN_BYTES = 4


def root_hash(salt: str | None, lora: str | None = None) -> int:
    """Returns the parent of a prompt's first block: it stands for what changes all of the prompt's KV besides
    tokens."""
    if salt is None and lora is None:
        return 0
    return xxhash.xxh3_64_intdigest(repr((salt, lora)).encode("utf-8", "surrogatepass"))


def beside_media(parent: int, keys: Sequence[str]) -> int:
    """Returns the parent of a block with images, from its real one. `keys`: the images' keys, as KV events name
    them."""
    return root_hash(repr((parent, list(keys))))


def hashes_with_media(
    token_ids: Sequence[int], block_size: int, parent: int, media: Sequence[MediaFeature]
) -> list[int]:
    """As `block_hashes`, for a prompt with images, or with rows in place of tokens."""
    hashes: list[int] = []
    ends = [each.offset + each.length for each in media]
    begins = [each.offset for each in media]
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        end = start + block_size
        keys = [
            f"media:{each.identifier}:{each.offset}"
            for each in media[bisect_right(ends, start) : bisect_left(begins, end)]
        ]
        hashes += block_hashes(token_ids[start:end], block_size, beside_media(parent, keys) if keys else parent)
        parent = hashes[-1]
    return hashes


def block_hashes(token_ids: Sequence[int], block_size: int, parent: int) -> list[int]:
    """Returns one hash for each full block. `parent`: the hash of the block before them, or the root's."""
    packed = array("I", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    block, digest = struct.Struct(f"{_TOKEN_BYTES * block_size}s"), xxhash.xxh3_64_intdigest
    full = len(packed) - len(packed) % block_size
    return [parent := digest(content, parent) for (content,) in block.iter_unpack(packed[:full])]
