"""The router's own record of which prompt prefixes it sent where: a guess at what each node has cached.

Only a guess, and only for routing: a node's cache decides for itself, by its own hashes. Each record forgets
the longest unused first, and holds no more blocks than the node has.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

DEFAULT_BLOCKS = 4096


def block_hashes(token_ids: Sequence[int], block_size: int, salt: str | None) -> list[int]:
    """One hash per full block, each of it and everything before it. Not cryptographic: see above."""
    parent = hash(salt)
    hashes: list[int] = []
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = hash((parent, *token_ids[start : start + block_size]))
        hashes.append(parent)
    return hashes


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
