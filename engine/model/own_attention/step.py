"""Runs a layer's own attention code, request by request, if our attention computes something else.

The module gets one request's rows at a time. What it passes to its cache is written to the request's blocks. The cache returns the keys
and values of all tokens that these rows may read, with a mask of which. This is slower than one product over all requests, but correct
for anything that a layer does with its keys.
"""

from __future__ import annotations

import inspect
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import torch

from tandem.base.errors import InternalError
from tandem.engine.model.attention.gathered import GatheredAttention, GatheredCache, Reads
from tandem.engine.model.attention.interface import PagedAttention, own_eager
from tandem.engine.model.caches import RowsOf, StepCache
from tandem.engine.model.runner import Batch, LayerHooks

MASK = "attention_mask"


class Place(msgspec.Struct, frozen=True):
    """The place of one thing that a layer keeps of each token: a part of the block, and a range in a head's row."""

    part: int
    begin: int
    dim: int


def places_for(dims: Sequence[int]) -> list[Place]:
    """Distributes things of these sizes over a block's two parts, so that both are about equally long."""
    ends = [0, 0]
    places = []
    for dim in dims:
        part = ends.index(min(ends))
        places.append(Place(part, ends[part], dim))
        ends[part] += dim
    return places


class Sums(msgspec.Struct, frozen=True):
    """How a layer sums the tokens of each window and attends to the sums. The cache keeps what it computes from each token."""

    rate: int  # tokens in a window
    # The names in the layer's code of the summands and of their weights.
    series: dict[str, tuple[Place, Place]]


class OwnLayer(msgspec.Struct, frozen=True):
    """A layer that attends by its own code, and its module."""

    index: int
    module: torch.nn.Module
    # The sizes of the latent and the rotary part that it keeps instead of keys and values, with the index key that it picks tokens by.
    latent: tuple[int, int] | None = None
    # It attends to a window of this many tokens, and to sums of all tokens before. Its keys are its values.
    window: int | None = None
    sums: Sums | None = None


class _Part(msgspec.Struct, frozen=True):
    """One request's rows in a step."""

    start: int
    end: int
    context: int
    reads: dict[int, Reads]  # by group
    masks: dict[tuple[int, int | None], torch.Tensor]  # by group and the layer's own window

    @property
    def before(self) -> int:
        """The request's tokens that were computed before this step."""
        return self.context - (self.end - self.start)


class OwnStep:
    """All these layers' attention in one step. See tandem.engine.model.caches.KeptTokens."""

    def __init__(
        self,
        kept: GatheredCache,
        layers: tuple[OwnLayer, ...],
        batch: Batch,
        hooks: LayerHooks | None,
        cache: StepCache,
        dtype: torch.dtype,
    ) -> None:
        self._kept = kept
        self._batch = batch
        self._hooks = hooks
        self._cache = cache
        self._latent = {layer.index: layer.latent for layer in layers}
        self._sums = {layer.index: layer.sums for layer in layers}
        groups = {(kept.plan.group_of_layer[layer.index], layer.window) for layer in layers}
        self._parts = [self._part(request, groups, dtype) for request in range(batch.num_requests)]
        # A request may read blocks that another one fills in this step. Those are of tokens before its own first row, so it comes later.
        self._turns = sorted(range(len(self._parts)), key=lambda request: self._parts[request].before)
        self._now = self._parts[0]

    def _part(self, request: int, groups: set[tuple[int, int | None]], dtype: torch.dtype) -> _Part:
        start, end = (int(n) for n in self._batch.host_query_start[request : request + 2])
        context = int(self._batch.host_context_lens[request])
        reads, masks = {}, {}
        for group, window in groups:
            reads[group], seen = self._kept.reads_of_all(self._batch, group, request)
            if window is not None:
                places = torch.arange(context - seen.shape[1], context, device=seen.device)
                seen &= places > places[start - end :, None] - window
            mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
            masks[group, window] = mask.masked_fill_(~seen, torch.finfo(dtype).min)[None, None]
        return _Part(start, end, context, reads, masks)

    def compute(self, layer: OwnLayer, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        given = inspect.signature(forward).bind(*args, **kwargs)
        group = self._kept.plan.group_of_layer[layer.index]
        rows, before = self._parts[-1].end, self._cache.before
        if self._hooks is not None:
            self._hooks.wait_for_layer_load(layer.index)
        outs: list[Any] = [None] * len(self._parts)
        self._cache.kept = self
        if layer.sums is not None:
            self._cache.layers[layer.index] = _Unsummed(self, layer.index, layer.sums)
        try:
            for request in self._turns:
                part = self._parts[request]
                self._now, self._cache.before = part, part.before
                of_part = RowsOf(part.start, part.end, rows, as_batch=False)
                arguments = {name: of_part(value) for name, value in given.arguments.items()}
                mine = inspect.BoundArguments(given.signature, OrderedDict(arguments))
                mine.arguments[MASK] = part.masks[group, layer.window]
                outs[request] = forward(*mine.args, **mine.kwargs)
        finally:
            self._cache.kept, self._cache.before = None, before
        if self._hooks is not None:
            self._hooks.save_kv_layer(layer.index)
        return self._joined(outs)

    def _joined(self, outs: list[Any]) -> Any:
        if not isinstance(outs[0], tuple):
            return torch.cat(outs, dim=1)
        results, *others = zip(*outs, strict=True)
        return (torch.cat(results, dim=1), *map(self._beside, others))

    def _beside(self, values: tuple[Any, ...]) -> Any:
        """Joins what modules return besides their result. Values with one row per token are concatenated. Of other values, such as
        attention weights, the last request's is returned, because no layer reads them. A short request picks fewer tokens, so its first
        picks are repeated, which does not change the set."""
        rows = [part.end - part.start for part in self._parts]
        if all(isinstance(v, torch.Tensor) and v.ndim == 3 and not v.is_floating_point() for v in values):
            width = max(v.shape[2] for v in values)
            values = tuple(torch.cat([v, v[..., :1].expand(*v.shape[:2], width - v.shape[2])], 2) for v in values)
        alike = (
            all(isinstance(v, torch.Tensor) and v.ndim >= 2 for v in values) and len({v.shape[2:] for v in values}) == 1
        )
        if alike and [tuple(v.shape[:2]) for v in values] == [(1, count) for count in rows]:
            return torch.cat(values, dim=1)
        return values[-1]

    def exchange(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        latent = self._latent[layer]
        if self._sums[layer] is not None:
            read = self._exchanged(layer, key[0])
            return read, read
        if latent is not None:
            read = self._exchanged(layer, torch.cat([key[0], value[0]], dim=-1))
            return read[..., : latent[0]], read[..., latent[0] :]
        return self._exchanged(layer, key[0]), self._exchanged(layer, value[0], part=1)

    def exchange_at(self, layer: int, place: Place, made: torch.Tensor) -> torch.Tensor:
        """Stores what was computed from some tokens [1, rows, dim]; returns it for all tokens up to the last of them."""
        return self._exchanged(layer, made, place.part, place.begin)[:, 0]

    def _exchanged(self, layer: int, made: torch.Tensor, part: int = 0, begin: int = 0) -> torch.Tensor:
        """Writes `made` [heads, rows, dim] for one request's rows; returns it for all the request's tokens [1, heads, tokens, dim]."""
        now, kept = self._now, self._kept
        group, size = kept.plan.group_of_layer[layer], kept.plan.block_size
        slots = self._batch.slot_mapping[group][now.start : now.end]
        kept.write(layer, slots // size, slots % size, made, first=part, begin=begin)
        return kept.read(layer, part, now.reads[group], made, begin)

    def exchange_index(self, layer: int, index: torch.Tensor) -> torch.Tensor:
        latent = self._latent[layer]
        if latent is None:
            raise InternalError(f"layer {layer} picks tokens, and nothing was planned for that")
        return self.exchange_at(layer, Place(0, sum(latent), index.shape[-1]), index)


class _Unsummed:
    """The cache of a DeepSeek V4 layer. It returns all tokens from the first on, as if none had been summed, so the layer computes the
    same sums again each time, and nothing has to be undone after a rejected draft."""

    def __init__(self, step: OwnStep, layer: int, sums: Sums) -> None:
        self._step, self._layer, self._sums = step, layer, sums

    def store_compression_weights(
        self, name: str, kv: torch.Tensor, gate: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        summed, weights = (
            self._step.exchange_at(self._layer, place, made)
            for place, made in zip(self._sums.series[name], (kv, gate), strict=True)
        )
        whole = summed.shape[1] // self._sums.rate * self._sums.rate
        return summed[:, :whole], weights[:, :whole], 0

    def update_overlap_state(self, *_: Any) -> tuple[None, None]:
        return None, None  # the first window has no window before it

    def update_compressor_states(self, _name: str, compressed: torch.Tensor) -> torch.Tensor:
        return compressed


def among_picked(mask: torch.Tensor, picked: torch.Tensor | None) -> torch.Tensor:
    """Narrows a mask [1, 1, rows, keys] to the keys whose numbers each row has picked, [1, rows, some]."""
    if picked is None:
        return mask
    hidden = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device)
    hidden.scatter_(-1, picked[0].long(), value=False)
    return mask.masked_fill(hidden, torch.finfo(mask.dtype).min)


class _Current(threading.local):
    step: OwnStep | None = None  # within it, these layers' modules attend request by request


_current = _Current()


def _wrapped(layer: OwnLayer, forward: Callable[..., Any]) -> Callable[..., Any]:
    def attend(*args: Any, **kwargs: Any) -> Any:
        if _current.step is None:
            return forward(*args, **kwargs)
        return _current.step.compute(layer, forward, args, kwargs)

    return attend


class WrappedLayers(dict[int, OwnLayer]):
    """See engine.model.own_layers.OwnLayers."""

    def wrap(self) -> None:
        for layer in self.values():
            layer.module.forward = _wrapped(layer, layer.module.forward)

    @contextmanager
    def request_by_request(
        self, attention: PagedAttention, batch: Batch, hooks: LayerHooks | None, cache: StepCache, dtype: torch.dtype
    ) -> Iterator[None]:
        if not isinstance(attention, GatheredAttention):
            raise InternalError("layers that attend by their own code read what is gathered")
        _current.step = OwnStep(attention.kept, tuple(self.values()), batch, hooks, cache, dtype)
        try:
            yield
        finally:
            _current.step = None

    def attend(
        self,
        layer: int,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> Any:
        eager = own_eager(module)
        if eager is None:
            raise InternalError(f"layer {layer} attends by its own code, and there is none")
        if mask is not None:
            mask = among_picked(mask, kwargs.get("indices"))
        return eager(module, query, key, value, mask, **kwargs)
