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

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        """To one other, which must receive it."""
        ...

    def receive(self, tensor: torch.Tensor, rank: int) -> None:
        """In place, from one other."""
        ...


class Lead(Protocol):
    """How rank 0 reaches the others between two collectives."""

    def send(self, arrays: Sequence[np.ndarray]) -> None:
        """Sends the arrays to every other rank, in order. Copies them."""
        ...

    def cause_of(self, error: Exception) -> Exception:
        """The end of the rank that made a collective raise; else the error itself."""
        ...


@dataclasses.dataclass(slots=True)
class StageLink:
    """Whether stages pass on what their layers make: in a step, and not while each tries its own part."""

    is_on: bool = False

    def __enter__(self) -> None:
        self.is_on = True

    def __exit__(self, *_: object) -> None:
        self.is_on = False


@dataclasses.dataclass(frozen=True, slots=True)
class Shard:
    """The ranks of a stage follow one another, and so do the stages: of four ranks in two stages, 0 and 1 have the first layers."""

    rank: int
    size: int
    collectives: Collectives
    lead: Lead | None = None  # rank 0's
    device: str = "cpu"  # where collectives take their tensors
    # A descriptor of memory in which the ranks keep one KV cache, each its heads of every block; None: each has a cache of its own.
    kv_memory: int | None = None
    stages: int = 1
    # Those of one stage among themselves; None: there is one stage.
    within_stage: Collectives | None = None
    link: StageLink = dataclasses.field(default_factory=StageLink)

    @property
    def width(self) -> int:
        """Ranks of a stage."""
        return self.size // self.stages

    @property
    def stage(self) -> int:
        return self.rank // self.width

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.stages - 1

    def of_stage(self) -> Shard:
        """Among the ranks of its stage, which have parts of the same layers."""
        if self.stages == 1:
            return self
        collectives = self.within_stage or self.collectives
        return Shard(
            self.rank % self.width,
            self.width,
            collectives,
            None,
            self.device,
            self.kv_memory,
            link=self.link,
        )

    def tell_all(self, told: bytes) -> list[bytes]:
        """What every rank tells, by rank."""
        lengths = self.collectives.gather(torch.tensor([len(told)], device=self.device)).flatten().tolist()
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(told)] = torch.tensor(list(told), dtype=torch.uint8)
        gathered = self.collectives.gather(padded.to(self.device)).cpu().numpy()
        return [row[:length].tobytes() for row, length in zip(gathered, lengths, strict=True)]

    def least(self, number: int) -> int:
        """The smallest value that any rank has."""
        return int(self.collectives.gather(torch.tensor([number], device=self.device)).min())

    def total(self, number: int) -> int:
        """The sum of the values that all ranks have."""
        return int(self.collectives.gather(torch.tensor([number], device=self.device)).sum())


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


def exchange_logits(logits: torch.Tensor, shard: Shard) -> torch.Tensor:
    """On every rank at a step's end: the last stage's logits, on rank 0. Something comes of a step that makes none, too: with it rank 0
    knows that every layer has written its keys and values."""
    source = (shard.stages - 1) * shard.width
    if shard.rank not in (0, source):
        return logits
    given = logits.contiguous() if len(logits) else logits.new_zeros(1)
    if shard.rank == source:
        shard.collectives.send(given, 0)
        return logits
    received = torch.empty_like(given)
    shard.collectives.receive(received, source)
    return received if len(logits) else logits
