"""One hash for each block of a prompt and everything before it, the same in every process of a cluster.

A node's cache has hashes of its own, which other processes cannot foretell. These are for routing alone: routers make them of
prompts, nodes of the blocks that they cache, and a wrong match costs time and no answer.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

import xxhash

_TOKEN_BYTES = 4


def root_hash(salt: str | None, lora: str | None = None) -> int:
    """Before the first block: what besides tokens makes all of a prompt's KV another."""
    if salt is None and lora is None:
        return 0
    return xxhash.xxh3_64_intdigest(repr((salt, lora)).encode("utf-8", "surrogatepass"))


def block_hashes(token_ids: Sequence[int], block_size: int, parent: int) -> list[int]:
    """One for each full block. `parent`: that of the block before them, or the root."""
    packed = array("I", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    content = packed.tobytes()
    step = _TOKEN_BYTES * block_size
    digest = xxhash.xxh3_64_intdigest
    hashes: list[int] = []
    append = hashes.append
    for start in range(0, len(content) - step + 1, step):
        parent = digest(content[start : start + step], parent)
        append(parent)
    return hashes
