"""Attention by a layer's own code, request by request, where ours computes something else.

The module that attends gets one request's rows at a time. What it hands to its cache is written to the request's blocks, and it gets
back the keys and values of all the tokens that these rows may read, with a mask that says which. It is slower than one product
over all requests, and right for whatever a layer makes of its keys.
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

from tandem.engine.model.attention.gathered import GatheredCache, Reads
from tandem.engine.model.caches import RowsOf, StepCache
from tandem.engine.model.runner import Batch, LayerHooks
from tandem.wire.errors import InternalError

MASK = "attention_mask"


class Place(msgspec.Struct, frozen=True):
    """Where a layer keeps something of each token, in a head's row of one of the block's two parts."""

    part: int
    begin: int
    dim: int


def places_for(dims: Sequence[int]) -> list[Place]:
    """Both parts are about equally long."""
    ends = [0, 0]
    places = []
    for dim in dims:
        part = ends.index(min(ends))
        places.append(Place(part, ends[part], dim))
        ends[part] += dim
    return places


class Sums(msgspec.Struct, frozen=True):
    """How a layer sums up the tokens of each window, to attend to the sum: what it makes of each token is kept."""

    rate: int  # tokens of a window
    # By the names that its code gives them: what is summed up, and by which weights.
    series: dict[str, tuple[Place, Place]]


class OwnLayer(msgspec.Struct, frozen=True):
    """A layer that attends by its own code, and the module that does."""

    index: int
    module: torch.nn.Module
    # It keeps a latent of so many elements and a rotary part in place of keys and values, and beside them what it picks tokens by.
    latent: tuple[int, int] | None = None
    # It attends to so many tokens, and to sums of all before; its keys are its values.
    window: int | None = None
    sums: Sums | None = None


class _Part(msgspec.Struct, frozen=True):
    """One request's rows."""

    start: int
    end: int
    context: int
    reads: dict[int, Reads]  # by group
    masks: dict[tuple[int, int | None], torch.Tensor]  # by group, and a layer's own window


class OwnStep:
    """One step of all these layers. See tandem.engine.model.caches.KeptTokens."""

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
        outs = []
        self._cache.kept = self
        if layer.sums is not None:
            self._cache.layers[layer.index] = _Unsummed(self, layer.index, layer.sums)
        try:
            for part in self._parts:
                self._now, self._cache.before = part, part.context - (part.end - part.start)
                of_part = RowsOf(part.start, part.end, rows, as_batch=False)
                arguments = {name: of_part(value) for name, value in given.arguments.items()}
                mine = inspect.BoundArguments(given.signature, OrderedDict(arguments))
                mine.arguments[MASK] = part.masks[group, layer.window]
                outs.append(forward(*mine.args, **mine.kwargs))
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
        """What a module returns beside its result: put together where it has the same of each row, else the last request's, which
        nothing goes on with (the weights that it gave to tokens). Numbers of tokens that were picked are fewer in a short request: its
        first are there more than once, which says no more."""
        rows = [part.end - part.start for part in self._parts]
        if all(isinstance(v, torch.Tensor) and v.ndim == 3 and not v.is_floating_point() for v in values):
            width = max(v.shape[2] for v in values)
            values = tuple(
                torch.cat([v, v[..., :1].expand(*v.shape[:2], width - v.shape[2])], 2) for v in values
            )
        alike = (
            all(isinstance(v, torch.Tensor) and v.ndim >= 2 for v in values)
            and len({v.shape[2:] for v in values}) == 1
        )
        if alike and [tuple(v.shape[:2]) for v in values] == [(1, count) for count in rows]:
            return torch.cat(values, dim=1)
        return values[-1]

    def exchange(
        self, layer: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        latent = self._latent[layer]
        if self._sums[layer] is not None:
            read = self._exchanged(layer, key[0])
            return read, read
        if latent is not None:
            read = self._exchanged(layer, torch.cat([key[0], value[0]], dim=-1))
            return read[..., : latent[0]], read[..., latent[0] :]
        return self._exchanged(layer, key[0]), self._exchanged(layer, value[0], part=1)

    def exchange_at(self, layer: int, place: Place, made: torch.Tensor) -> torch.Tensor:
        """Takes what was made of some tokens [1, rows, dim], and returns that of all up to the last of them."""
        return self._exchanged(layer, made, place.part, place.begin)[:, 0]

    def _exchanged(self, layer: int, made: torch.Tensor, part: int = 0, begin: int = 0) -> torch.Tensor:
        """`made` of the rows of one request [heads, rows, dim] is written; that of all its tokens [1, heads, tokens, dim] is read."""
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
    """Stands where a layer of DeepSeek V4 expects its cache. It finds all tokens there, from the first, as if none had been summed up: what
    it makes of them is the same, and nothing has to be taken back."""

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
        return None, None  # the first window has none before it

    def update_compressor_states(self, _name: str, compressed: torch.Tensor) -> torch.Tensor:
        return compressed


def among_picked(mask: torch.Tensor, picked: torch.Tensor | None) -> torch.Tensor:
    """A mask [1, 1, rows, keys] that shows, of what it showed, only the keys whose numbers each row has picked, [1, rows, some]."""
    if picked is None:
        return mask
    hidden = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device)
    hidden.scatter_(-1, picked[0].long(), value=False)
    return mask.masked_fill(hidden, torch.finfo(mask.dtype).min)


class _Current(threading.local):
    step: OwnStep | None = None


_current = _Current()


@contextmanager
def own_attention_through(step: OwnStep | None) -> Iterator[None]:
    """These layers' modules, run in this thread meanwhile, attend request by request. Without a step they run as they were made."""
    _current.step = step
    try:
        yield
    finally:
        _current.step = None


def wrap(layers: tuple[OwnLayer, ...]) -> None:
    """From here on the modules attend request by request, in a step."""
    for layer in layers:
        layer.module.forward = _wrapped(layer, layer.module.forward)


def takes_mask(module: torch.nn.Module) -> bool:
    return MASK in inspect.signature(module.forward).parameters


def _wrapped(layer: OwnLayer, forward: Callable[..., Any]) -> Callable[..., Any]:
    def attend(*args: Any, **kwargs: Any) -> Any:
        if _current.step is None:
            return forward(*args, **kwargs)
        return _current.step.compute(layer, forward, args, kwargs)

    return attend
