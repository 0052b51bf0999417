"""The contract of layers that attend by their own code, because ours computes something else. `own_attention/` runs them, and is known by
its name here. Without it models with such layers are refused."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from tandem.base.wings import find_wing
from tandem.engine.model.attention.layers import AttentionLayer

if TYPE_CHECKING:
    from tandem.engine.model.attention.interface import PagedAttention
    from tandem.engine.model.caches import NotingCache, StepCache
    from tandem.engine.model.runner import Batch, LayerHooks

OWN_ATTENTION = "tandem.engine.model.own_attention.finding"

# A layer of this kind attends to the tokens that a smaller attention picks.
INDEXED = "indexed_attention"
# A layer of these kinds attends to a window, and to sums of the tokens before it.
SUMMING = {"compressed_sparse_attention", "heavily_compressed_attention"}


class OwnLayers(Protocol):
    """Such layers of a model, by their index."""

    def __contains__(self, layer: object) -> bool: ...

    def wrap(self) -> None:
        """Wraps the layers' modules, so that within `request_by_request` they attend so."""

    def request_by_request(
        self, attention: PagedAttention, batch: Batch, hooks: LayerHooks | None, cache: StepCache, dtype: torch.dtype
    ) -> AbstractContextManager[None]:
        """Inside, these layers' modules that run in this thread attend to one request's tokens at a time."""

    def attend(
        self,
        layer: int,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> Any: ...


class FoundLayer(Protocol):
    """What one such layer keeps besides keys and values."""

    @property
    def sums(self) -> object | None:
        """None: it keeps every token that it attends to."""


class OwnWing(Protocol):
    def find(
        self, config: Any, cache: NotingCache, index: int, kind: str | None, window: int | None
    ) -> tuple[AttentionLayer, FoundLayer] | None:
        """The layer whose module takes its mask as an argument and passes its keys to the cache; None for any other."""

    def among_picked(self, mask: torch.Tensor, picked: torch.Tensor | None) -> torch.Tensor:
        """Narrows a mask [1, 1, rows, keys] to the keys whose numbers each row has picked, [1, rows, some]."""

    def layers(self, found: Mapping[int, FoundLayer]) -> OwnLayers: ...


def own_wing() -> OwnWing | None:
    return cast("OwnWing | None", find_wing(OWN_ATTENTION))
