"""The router's own record of which prompt prefixes it sent where: a guess at what each node has cached.

Only a guess, and only for routing: a node's cache decides for itself, by its own hashes. Each record forgets
the longest unused first, and holds no more blocks than the node has.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

DEFAULT_BLOCKS = 4096


def block_hashes(
    token_ids: Sequence[int], block_size: int, salt: str | None, known: Sequence[int] = ()
) -> list[int]:
    """One hash per full block, each of it and everything before it. Not cryptographic: see above.

    `known` are those of the first blocks, from an earlier call for the same tokens.
    """
    parent = known[-1] if known else hash(salt)
    hashes = list(known)
    # As bytes: hashing a slice of them takes a fifth of what a tuple of numbers takes.
    rest = array("q", token_ids[len(known) * block_size :]).tobytes()
    size = block_size * 8
    for start in range(0, len(rest) - size + 1, size):
        parent = hash((parent, rest[start : start + size]))
        hashes.append(parent)
    return hashes


class PromptHashes:
    """One prompt's block hashes, by block size, each computed once."""

    def __init__(self, token_ids: Sequence[int], salt: str | None) -> None:
        self._token_ids = token_ids
        self._salt = salt
        self._by_size: dict[int, list[int]] = {}

    def of(self, block_size: int) -> list[int]:
        hashes = self._by_size.get(block_size)
        if hashes is None:
            hashes = self._by_size[block_size] = block_hashes(self._token_ids, block_size, self._salt)
        return hashes

    def with_output(self, block_size: int, output: Sequence[int]) -> list[int]:
        """Those of the prompt and what was answered to it."""
        return block_hashes([*self._token_ids, *output], block_size, self._salt, self.of(block_size))


class PrefixRecord:
    def __init__(self) -> None:
        self._blocks: dict[str, OrderedDict[int, None]] = {}
        self._capacity: dict[str, int] = {}

    def set_capacity(self, node_id: str, blocks: int) -> None:
        if blocks > 0:
            self._capacity[node_id] = blocks

    def sent(self, node_id: str, hashes: Iterable[int]) -> None:
        blocks = self._blocks.setdefault(node_id, OrderedDict())
        for value in hashes:
            blocks[value] = None
            blocks.move_to_end(value)
        excess = len(blocks) - self._capacity.get(node_id, DEFAULT_BLOCKS)
        for _ in range(excess):
            blocks.popitem(last=False)

    def overlap(self, node_id: str, hashes: Sequence[int]) -> int:
        """How many leading blocks that node has likely cached."""
        blocks = self._blocks.get(node_id)
        if not blocks:
            return 0
        for count, value in enumerate(hashes):
            if value not in blocks:
                return count
        return len(hashes)

    def forget(self, node_id: str) -> None:
        self._blocks.pop(node_id, None)
        self._capacity.pop(node_id, None)
