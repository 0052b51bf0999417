"""This process's rank in its node, the KV heads that it keeps, and the collectives that it may use. The node implements the
collectives."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import nn

from tandem.engine.model.source import ModelSource

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Collectives(Protocol):
    """Every rank must call the same collectives in the same order, with tensors of one shape. They raise if a rank is gone."""

    def sum(self, tensor: torch.Tensor) -> None:
        """Sums the tensor over all ranks, in place."""

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns all ranks' tensors, [ranks, *shape], on every rank."""

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Overwrites the tensor with rank 0's."""

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        """Sends the tensor to one other rank, which must call `receive`."""

    def receive(self, tensor: torch.Tensor, rank: int) -> None:
        """Overwrites the tensor with one that another rank sends."""


class Lead(Protocol):
    """How rank 0 sends steps to the other ranks, between two collectives."""

    def send(self, arrays: Sequence[np.ndarray]) -> None:
        """Sends copies of the arrays to every other rank, in order."""

    def cause_of(self, error: Exception) -> Exception:
        """The error of the rank whose end made a collective raise; the error itself if no rank has ended."""


@dataclasses.dataclass(slots=True)
class StageLink:
    """Switches whether stages pass hidden states on: on in a step, off while each stage probes its own part. Counts the sums over the ranks
    that share matrices."""

    is_on: bool = False
    sums: int = 0

    def __enter__(self) -> None:
        self.is_on = True

    def __exit__(self, *_: object) -> None:
        self.is_on = False


@dataclasses.dataclass(frozen=True, slots=True)
class Shard:
    """One rank among the ranks of a model. A stage's ranks are consecutive, and stages are in order: of four ranks in two stages, 0 and 1
    have the first layers."""

    rank: int
    size: int
    collectives: Collectives
    lead: Lead | None = None  # only on rank 0
    device: str = "cpu"  # the device of the collectives' tensors
    # A descriptor of memory in which all ranks keep one KV cache, each its heads of every block. None: each has its own cache.
    kv_memory: int | None = None
    stages: int = 1
    # The collectives among the ranks that share the matrices of the same layers; None if these are all ranks, or one.
    within_stage: Collectives | None = None
    # How many ranks, or groups of ranks that share matrices, have the same part of the model, and each some of a step's rows. Ranks of one
    # group are consecutive.
    contexts: int = 1
    # With contexts: the collectives among the ranks with the same part of the model, one of each group.
    across: Collectives | None = None
    link: StageLink = dataclasses.field(default_factory=StageLink)

    @property
    def width(self) -> int:
        """The number of ranks that share the matrices of the same layers."""
        return self.size // (self.stages * self.contexts)

    @property
    def stage(self) -> int:
        return self.rank * self.stages // self.size

    @property
    def context(self) -> int:
        """This rank's place among those with the same part of the model."""
        return self.rank // self.width % self.contexts

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.stages - 1

    def of_stage(self) -> Shard:
        """This rank's place among the ranks that share the matrices of the same layers."""
        if self.width == self.size:
            return self
        collectives = self.within_stage or self.collectives
        return Shard(self.rank % self.width, self.width, collectives, None, self.device, self.kv_memory, link=self.link)

    def tell_all(self, told: bytes) -> list[bytes]:
        """Exchanges bytes: returns every rank's `told`, by rank. A collective."""
        lengths = self.collectives.gather(torch.tensor([len(told)], device=self.device)).flatten().tolist()
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(told)] = torch.tensor(list(told), dtype=torch.uint8)
        gathered = self.collectives.gather(padded.to(self.device)).cpu().numpy()
        return [row[:length].tobytes() for row, length in zip(gathered, lengths, strict=True)]

    def all_agree(self, is_right: bool) -> bool:
        """Whether it is right on every rank. A collective."""
        return bool(self.least(int(is_right)))

    def least(self, number: int) -> int:
        """The smallest of all ranks' numbers. A collective."""
        return int(self.collectives.gather(torch.tensor([number], device=self.device)).min())

    def total(self, number: int) -> int:
        """The sum of all ranks' numbers. A collective."""
        return int(self.collectives.gather(torch.tensor([number], device=self.device)).sum())


@dataclasses.dataclass(frozen=True, slots=True)
class MatrixPart:
    """The part of a linear layer's matrix that a rank has, or of the matrices of a layer's experts."""

    outputs: range
    inputs: range
    experts: range | None = None  # the experts of which it has that part


class ModelCut(Protocol):
    """How one rank's part of a model is loaded."""

    @property
    def device_map(self) -> bool:
        """Whether transformers must be told the device: when layers are cut, it places the parts by itself."""

    def loader(self, source: ModelSource) -> tuple[Any, dict[str, Any]] | None:
        """transformers' class that makes the part, and options for it; None for the model's own class."""

    def part(self, source: ModelSource, device: torch.device) -> AbstractContextManager[dict[str, Any]]:
        """Inside, transformers loads the part. Gives further options for it."""

    def is_elsewhere(self, key: str, model: PreTrainedModel) -> bool:
        """Whether another rank has a tensor of the checkpoint."""

    def part_of(self, model: PreTrainedModel, where: str) -> MatrixPart:
        """This rank's part of the linear layer with this name, which has the whole layer's sizes, or of the tensor of experts with this
        name, which was taken out of the model."""

    def finish(self, name: str, model: PreTrainedModel) -> None:
        """Joins the part with those of the other ranks."""


def heads_of_rank(total: int, rank: int, size: int) -> range:
    """A rank's share of the KV heads. With fewer heads than ranks it is the one head that the rank's queries read, which other ranks keep,
    too."""
    if total >= size:
        share = total // size
        return range(rank * share, (rank + 1) * share)
    head = rank * total // size
    return range(head, head + 1)


def fits(query_heads: int, kv_heads: int, size: int) -> bool:
    """Whether every rank gets the same number of query heads, and all KV heads that they read."""
    return query_heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)


def exchange_logits(logits: torch.Tensor, shard: Shard) -> torch.Tensor:
    """Sends the last stage's logits to rank 0; all ranks call it at a step's end. A step without logits sends a dummy, by which rank 0
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


class EmptyPart(nn.Module):
    """Replaces a part of the model that another stage has."""


def elsewhere(model: PreTrainedModel) -> set[int]:
    """The numbers of the layers that other stages have."""
    found: set[int] = set()
    for module in model.base_model.modules():
        if isinstance(module, nn.ModuleList):
            found |= {number for number, layer in enumerate(module) if isinstance(layer, EmptyPart)}
    return found
