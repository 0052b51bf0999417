"""Which heads of keys and values a rank keeps. Pure."""

from __future__ import annotations


def heads_of_rank(total: int, rank: int, size: int) -> range:
    """An equal share, in order; where there are fewer heads than ranks, the one that the rank's queries ask for, which other
    ranks keep, too."""
    if total >= size:
        share = total // size
        return range(rank * share, (rank + 1) * share)
    head = rank * total // size
    return range(head, head + 1)


def fits(query_heads: int, kv_heads: int, size: int) -> bool:
    """Whether every rank gets as many queries as any other, and all the heads that they ask for."""
    return query_heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)
