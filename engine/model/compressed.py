"""The contract of layers that keep one latent of a token for all heads instead of keys and values (multi-head latent attention).
`latents/` computes them, and is known by its name here. Without it such layers keep the keys and values that they make of latents."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, cast

import torch

from tandem.base.wings import find_wing
from tandem.engine.model.attention.gathered import GatheredAttention, GatheredCache, GroupReads, PagedStep
from tandem.engine.model.attention.interface import AttentionStep
from tandem.engine.model.attention.layers import AttentionLayer, CachePlan

LATENTS = "tandem.engine.model.latents.attention"
# The linear layer of an attention module that makes each head's keys and values of a latent. The absorbed form needs its matrix.
EXPANDS = "kv_b_proj"

Decodes = Callable[[int, torch.Tensor, torch.Tensor], None]
"""(layer, queries, out): attends the rows of decodes, and writes to `out`."""


class LatentLayer(Protocol):
    """How one layer makes keys and values from latents."""

    @property
    def to_keys(self) -> torch.Tensor | None:
        """None: the absorbed form is not used."""

    def absorbed(self, query: torch.Tensor) -> torch.Tensor:
        """Turns queries [heads, rows, key and rotary] into absorbed ones, [heads, rows, latent and rotary]."""

    def values_of(self, seen: torch.Tensor) -> torch.Tensor:
        """Turns attended latents [heads, rows, latent] into values [heads, rows, value]."""

    def kept_as(self, layer: AttentionLayer) -> AttentionLayer:
        """The same layer as the cache keeps it: one head of keys, a part of which is the values."""


class Latents(Protocol):
    """All layers of a model, by their index."""

    def __contains__(self, layer: object) -> bool: ...
    def __getitem__(self, layer: int) -> LatentLayer: ...

    def wrap(self, layers: Iterable[AttentionLayer]) -> None:
        """Wraps the layers' `expand_kv`, so that it does nothing within `without_expanding`."""

    def without_expanding(self, step: AttentionStep) -> AbstractContextManager[None]:
        """Inside, modules that run in this thread do not expand latents, if `step` expands them itself."""

    def attention(self, tensor: torch.Tensor, plan: CachePlan) -> GatheredAttention: ...

    def step(self, kept: GatheredCache, groups: list[GroupReads], decodes: Decodes) -> PagedStep:
        """A step whose `groups` have only the rows that `decodes` does not attend."""


class ProbedCall(NamedTuple):
    """A layer's call of attention while it was probed, and the right result."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    out: torch.Tensor
    seen: torch.Tensor  # the mask
    options: dict[str, Any]
    tolerance: float


class LatentsWing(Protocol):
    def expansion_of(
        self, module: Any, kept: tuple[torch.Tensor, torch.Tensor], call: ProbedCall
    ) -> LatentLayer | None:
        """`kept` is what the layer gave to the cache: how it made keys and values from that, if it is a latent; None otherwise."""

    def latents(self, layers: Mapping[int, LatentLayer]) -> Latents: ...


def latents_wing() -> LatentsWing | None:
    return cast("LatentsWing | None", find_wing(LATENTS))


def gathering(tensor: torch.Tensor, plan: CachePlan, latents: Latents | None) -> GatheredAttention:
    """Attention by gathering, for models with keys and values and for models with latents."""
    return latents.attention(tensor, plan) if latents is not None else GatheredAttention(tensor, plan)
