"""Which rank of a node this is, and what it may ask of the others. How they are reached is the node's affair."""

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
        """To every other rank, in order. Copies them."""
        ...

    def cause_of(self, error: Exception) -> Exception:
        """What made a collective raise, if a rank's end did; else the error itself."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Shard:
    rank: int
    size: int
    collectives: Collectives
    lead: Lead | None = None  # rank 0's
    device: str = "cpu"  # where collectives take their tensors

    def least(self, number: int) -> int:
        """The smallest that any rank has."""
        return int(self.collectives.gather(torch.tensor([number], device=self.device)).min())
