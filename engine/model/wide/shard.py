"""Which rank of a node this is, which heads of keys and values it keeps, and what it may ask of the others. The node
decides how it reaches them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch


class Collectives(Protocol):
    """Every rank calls the same ones in the same order, with tensors of one shape. A rank that is missing makes them raise."""

    def sum(self, tensor: torch.Tensor) -> None:
        """In place, over all ranks."""
        ...

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """[ranks, *tensor's shape], the same on every rank."""
        ...

    def broadcast(self, tensor: torch.Tensor) -> None:
        """In place, rank 0's."""
        ...


class Lead(Protocol):
    """How rank 0 reaches the others between two collectives."""

    def send(self, arrays: Sequence[np.ndarray]) -> None:
        """Sends the arrays to every other rank, in order. Copies them."""
        ...

    def cause_of(self, error: Exception) -> Exception:
        """The end of the rank that made a collective raise; else the error itself."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Shard:
    rank: int
    size: int
    collectives: Collectives
    lead: Lead | None = None  # rank 0's
    device: str = "cpu"  # where collectives take their tensors
    # A descriptor of memory in which the ranks keep one KV cache, each its heads of every block; None: each has a cache of its own.
    kv_memory: int | None = None

    def least(self, number: int) -> int:
        """The smallest value that any rank has."""
        return int(self.collectives.gather(torch.tensor([number], device=self.device)).min())


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
