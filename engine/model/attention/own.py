"""Attention by a layer's own code, request by request, where ours computes something else.

The module that attends gets one request's rows at a time. What it hands to its cache is written to the request's blocks, and it gets
back the keys and values of all the tokens that these rows may read, with a mask that says which. It is slower than one product
over all requests, and right for whatever a layer makes of its keys.
"""

from __future__ import annotations

import inspect
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import torch

from tandem.engine.model.attention.gathered import GatheredCache, Reads
from tandem.engine.model.batch import Batch
from tandem.engine.model.caches import StepCache
from tandem.engine.model.rows import RowsOf
from tandem.engine.model.runner import LayerHooks
from tandem.wire.errors import InternalError

MASK = "attention_mask"


class OwnLayer(msgspec.Struct, frozen=True):
    """A layer that attends by its own code, and the module that does."""

    index: int
    module: torch.nn.Module
    # It keeps a latent of so many elements and a rotary part in place of keys and values, and beside them what it picks tokens by.
    latent: tuple[int, int] | None = None


class _Part(msgspec.Struct, frozen=True):
    """One request's rows."""

    start: int
    end: int
    context: int
    reads: dict[int, Reads]  # by group
    masks: dict[int, torch.Tensor]


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
        groups = {kept.plan.group_of_layer[layer.index] for layer in layers}
        self._parts = [self._part(request, groups, dtype) for request in range(batch.num_requests)]
        self._now = self._parts[0]

    def _part(self, request: int, groups: set[int], dtype: torch.dtype) -> _Part:
        start, end = (int(n) for n in self._batch.host_query_start[request : request + 2])
        context = int(self._batch.host_context_lens[request])
        reads, masks = {}, {}
        for group in groups:
            reads[group], seen = self._kept.reads_of_all(self._batch, group, request)
            mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
            masks[group] = mask.masked_fill_(~seen, torch.finfo(dtype).min)[None, None]
        return _Part(start, end, context, reads, masks)

    def compute(self, layer: OwnLayer, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        given = inspect.signature(forward).bind(*args, **kwargs)
        group = self._kept.plan.group_of_layer[layer.index]
        rows, before = self._parts[-1].end, self._cache.before
        if self._hooks is not None:
            self._hooks.wait_for_layer_load(layer.index)
        outs = []
        self._cache.kept = self
        try:
            for part in self._parts:
                self._now, self._cache.before = part, part.context - (part.end - part.start)
                of_part = RowsOf(part.start, part.end, rows, as_batch=False)
                arguments = {name: of_part(value) for name, value in given.arguments.items()}
                mine = inspect.BoundArguments(given.signature, OrderedDict(arguments))
                mine.arguments[MASK] = part.masks[group]
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
        part, kept = self._now, self._kept
        group = kept.plan.group_of_layer[layer]
        slots = self._batch.slot_mapping[group][part.start : part.end]
        size = kept.plan.block_size
        reads = part.reads[group]
        latent = self._latent[layer]
        if latent is None:
            kept.write(layer, slots // size, slots % size, key[0], value[0])
            return kept.read(layer, 0, reads, key[0]), kept.read(layer, 1, reads, value[0])
        both = torch.cat([key[0], value[0]], dim=-1)
        kept.write(layer, slots // size, slots % size, both)
        read = kept.read(layer, 0, reads, both)
        return read[..., : latent[0]], read[..., latent[0] :]

    def exchange_index(self, layer: int, index: torch.Tensor) -> torch.Tensor:
        part, kept = self._now, self._kept
        latent = self._latent[layer]
        if latent is None:
            raise InternalError(f"layer {layer} picks tokens, and nothing was planned for that")
        group = kept.plan.group_of_layer[layer]
        slots, size = self._batch.slot_mapping[group][part.start : part.end], kept.plan.block_size
        kept.write(layer, slots // size, slots % size, index, begin=sum(latent))
        return kept.read(layer, 0, part.reads[group], index, begin=sum(latent))[:, 0]


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
