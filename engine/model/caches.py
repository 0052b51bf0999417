"""The objects that a transformers model gets as its cache.

OwnCache    transformers' own cache for one request; the model runs with it unchanged
NotingCache notes, besides, which module passes a layer's keys and values
StepCache   for one step of many requests: attention takes keys and values from it

A model runs as one sequence over all requests' tokens. Modules that depend on earlier tokens get the rows of one request, or of
one group of requests, at a time (`RowsOf`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin, LinearAttentionLayer

from tandem.base.errors import InternalError


class RowsOf:
    """Cuts rows [start, end) out of every tensor that has a row for each of a step's `rows` tokens."""

    def __init__(self, start: int, end: int, rows: int, *, as_batch: bool) -> None:
        """With `as_batch` each row becomes a sequence of its own."""
        self._start, self._end, self._rows, self._as_batch = start, end, rows, as_batch

    def __call__(self, value: Any) -> Any:
        if isinstance(value, tuple | list):
            return type(value)(self(item) for item in value)
        if isinstance(value, dict):
            return {name: self(item) for name, item in value.items()}
        if not isinstance(value, torch.Tensor) or value.ndim < 2 or value.shape[:2] != (1, self._rows):
            return value
        mine = value[:, self._start : self._end]
        return mine.transpose(0, 1) if self._as_batch else mine

    def back(self, out: torch.Tensor) -> torch.Tensor:
        return out.transpose(0, 1) if self._as_batch else out


class OwnCache(DynamicCache):  # type: ignore[misc]
    """Transformers' own cache for one request, as the model would make it."""

    def __init__(self, config: Any, before: int = 0) -> None:
        """`before` tokens are added to the cache's reported length; nothing reads them."""
        super().__init__(config=config)
        self._before = before
        self.matrices: dict[int, torch.Tensor] = {}
        self.attending: int | None = None  # the layer whose keys were passed last
        self.given: tuple[torch.Tensor, ...] = ()  # see StepCache
        self.index_dims: dict[int, int] = {}  # by layer, the size of the index keys that it picks tokens by

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self.attending, self.given = layer_idx, (key_states, value_states)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def update_indexer(self, indexer_key_states: Any, layer_idx: int) -> Any:
        self.index_dims[layer_idx] = indexer_key_states.shape[-1]
        return super().update_indexer(indexer_key_states, layer_idx)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._before + int(super().get_seq_length(layer_idx))

    # MiniMax's layers keep a matrix here.
    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        return self.matrices.get(layer_idx)

    def set_linear_cache(self, layer_idx: int, linear_cache: torch.Tensor) -> None:
        self.matrices[layer_idx] = linear_cache


class NotingCache(OwnCache):
    """A cache that notes which module passes each layer's keys and values."""

    def __init__(self, config: Any, model: PreTrainedModel) -> None:
        super().__init__(config)
        self.model_type = config.model_type
        self._model = model
        self.running: list[torch.nn.Module] = []  # the modules that run, the innermost last
        self.keepers: dict[int, torch.nn.Module] = {}  # by layer, the module that passed keys and values
        # By layer, what the cache returned for these.
        self.kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @contextmanager
    def noting(self) -> Iterator[None]:
        def enter(module: torch.nn.Module, _args: Any) -> None:
            self.running.append(module)

        def leave(_module: torch.nn.Module, _args: Any, _out: Any) -> None:
            self.running.pop()

        handles = []
        for module in self._model.modules():
            handles.append(module.register_forward_pre_hook(enter))
            handles.append(module.register_forward_hook(leave))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @property
    def keeps_states(self) -> bool:
        """Whether the model keeps states, by the kinds of layers in transformers' cache, or by what it has kept."""
        return bool(self.matrices) or any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in self.layers)

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self.keepers[layer_idx] = self.running[-1]
        self.kept[layer_idx] = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return self.kept[layer_idx]


def attending_layer(module: torch.nn.Module, cache: OwnCache | StepCache | None) -> int | None:
    """Which layer `module` attends for. Layers may share a module, so the layer that passed keys to the cache last counts; the
    module's own index counts for a layer without keys."""
    if cache is not None and cache.attending is not None:
        attending, cache.attending = cache.attending, None
        return attending
    index = getattr(module, "layer_idx", None)
    return index if isinstance(index, int) else None


class KeptTokens(Protocol):
    """A request's keys and values for layers that attend by their own code."""

    def exchange(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores the keys and values of some tokens; returns those of all tokens up to the last of them."""

    def exchange_index(self, layer: int, index: torch.Tensor) -> torch.Tensor:
        """The same for the index keys that a layer picks tokens by."""


class StepCache(Cache):  # type: ignore[misc]
    """The model's cache for one step. It passes keys and values on to paged attention."""

    def __init__(self, num_layers: int, before: int | torch.Tensor = 0) -> None:
        """`before` is what a model adds to a row's number to get its position; a tensor has one number per row."""
        super().__init__(layers=[LinearAttentionLayer() for _ in range(num_layers)])
        self.attending: int | None = None
        self.before = before
        # Keys and values of the layer that attends next, or a latent and its rotary part.
        self.given: tuple[torch.Tensor, ...] = ()
        self.kept: KeptTokens | None = None  # set while a layer attends by its own code

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.attending = layer_idx
        if self.kept is not None:
            return self.kept.exchange(layer_idx, key_states, value_states)
        self.given = key_states, value_states
        return key_states, value_states

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        if self.kept is None:
            raise InternalError("a layer picks tokens outside of its attention")
        return self.kept.exchange_index(layer_idx, indexer_key_states)

    def get_seq_length(self, layer_idx: int = 0) -> int | torch.Tensor:
        return self.before

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0


def cache_parameter(parameters: Any) -> str | None:
    """The name of a model's cache parameter; None without one. Transformers 5.24 renamed it, and models from elsewhere may keep the
    older names."""
    return next((name for name in ("cache", "past_key_values", "cache_params") if name in parameters), None)
