"""Mixers: the modules that keep recurrent states. They are computed request by request.

The model runs as one sequence over all requests' tokens. A mixer's result for a token depends on the request's earlier tokens, so its
rows are taken apart. Requests with one token form one batch, with their states side by side; a longer chunk is computed alone, from
its request's state. A request whose rows begin at its first token has no state yet: its blocks hold another request's, which is not
read.

A state cannot go back. So the state that is kept is the one after a request's last known token. Drafts are computed from it, and the
states after them are dropped; accepted drafts are known tokens of the next step, which computes them again.

The mixers are found by running the model with a transformers cache that notes which module reads and writes each state. Nothing needs
to be known about an architecture.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from tandem.base.errors import ConfigurationError
from tandem.engine.model.caches import OwnCache, RowsOf, StepCache
from tandem.engine.model.recurrent.layout import (
    CONV,
    MATRIX,
    RECURRENT,
    LayerStates,
    State,
    StateKey,
    StateLayout,
)
from tandem.engine.model.runner import Batch, LayerHooks


class Mixer(msgspec.Struct, frozen=True):
    """A module, and the states that only it reads and writes."""

    module: torch.nn.Module
    states: tuple[State, ...]


class Mixers(msgspec.Struct, frozen=True):
    """All mixers of a model."""

    found: tuple[Mixer, ...]
    layout: StateLayout
    layers: dict[int, int]  # how many states transformers' cache has for each layer
    num_layers: int  # layers of all kinds
    # The mixers continue from a state one token at a time; several tokens at once only from a prompt's beginning.
    stepwise: bool = False


class NotingCache(OwnCache):
    """A cache that notes which module reads and writes each state."""

    def __init__(self, config: Any, model: PreTrainedModel) -> None:
        super().__init__(config)
        self._name = config.model_type
        self._model = model
        self._running: list[torch.nn.Module] = []
        self._owners: dict[StateKey, torch.nn.Module] = {}
        self.keepers: dict[int, torch.nn.Module] = {}  # by layer, the module that passed keys and values
        # By layer, what the cache returned for these.
        self.kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @contextmanager
    def noting(self) -> Iterator[None]:
        def enter(module: torch.nn.Module, _args: Any) -> None:
            self._running.append(module)

        def leave(_module: torch.nn.Module, _args: Any, _out: Any) -> None:
            self._running.pop()

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
        """Whether the model keeps states, by the kinds of layers in transformers' cache."""
        return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in self.layers)

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self.keepers[layer_idx] = self._running[-1]
        self.kept[layer_idx] = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return self.kept[layer_idx]

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Any:
        self._note((layer_idx, CONV, state_idx))
        return super().get_conv_state(layer_idx, state_idx)

    def update_conv_state(self, conv_states: Any, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Any:
        self._note((layer_idx, CONV, state_idx))
        return super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Any:
        self._note((layer_idx, RECURRENT, state_idx))
        return super().get_recurrent_state(layer_idx, state_idx)

    def update_recurrent_state(
        self, recurrent_states: Any, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Any:
        self._note((layer_idx, RECURRENT, state_idx))
        return super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **kwargs)

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        self._note((layer_idx, MATRIX, 0))
        return super().get_linear_cache(layer_idx)

    def set_linear_cache(self, layer_idx: int, linear_cache: torch.Tensor) -> None:
        self._note((layer_idx, MATRIX, 0))
        super().set_linear_cache(layer_idx, linear_cache)

    def _note(self, key: StateKey) -> None:
        if not self._running or self._owners.setdefault(key, self._running[-1]) is not self._running[-1]:
            raise ConfigurationError(
                f"a model of type {self._name} cannot be served: the state of layer {key[0]} is used by more than one module"
            )

    def mixers(self) -> Mixers:
        """The mixers that were noted, with their states."""
        of_module: dict[torch.nn.Module, list[State]] = {}
        for key, module in self._owners.items():
            value = self._value(key)
            if value is None:
                continue  # read but never written: a layer with only a convolution has no other state
            state = State(*key, shape=tuple(value.shape[1:]), dtype=value.dtype)
            of_module.setdefault(module, []).append(state)
        found = tuple(Mixer(module, tuple(states)) for module, states in of_module.items())
        layers = {
            index: getattr(layer, "number_of_states", 1)
            for index, layer in enumerate(self.layers)
            if isinstance(layer, LinearAttentionCacheLayerMixin)
        }
        layout = StateLayout.of(tuple(state for mixer in found for state in mixer.states))
        return Mixers(found, layout, layers, len(self.layers))

    def _value(self, key: StateKey) -> torch.Tensor | None:
        layer, kind, number = key
        if kind == MATRIX:
            return self._matrices.get(layer)
        states = self.layers[layer].conv_states if kind == CONV else self.layers[layer].recurrent_states
        value: torch.Tensor | None = states[number]
        return value


class _Part(msgspec.Struct, frozen=True):
    """Rows of a step that a mixer computes in one call."""

    start: int
    end: int
    table: torch.Tensor  # int64 [requests, blocks per request]
    single: bool  # one token of each request; otherwise all rows are one request's
    begins: bool  # the rows begin with their request's first token, so there is no state before
    drafts: int = 0  # how many of the last rows are drafts


class RecurrentStep:
    """All mixers' work in one step."""

    def __init__(
        self, mixers: Mixers, store: LayerStates, batch: Batch, hooks: LayerHooks | None, cache: StepCache
    ) -> None:
        self._cache = cache
        self._store = store
        self._hooks = hooks
        self._parts = list(_parts_of(batch))
        self._stepwise = mixers.stepwise

    def compute(self, mixer: Mixer, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        layers = sorted({state.layer for state in mixer.states})
        if self._hooks is not None:
            for layer in layers:
                self._hooks.wait_for_layer_load(layer)
        rows = self._parts[-1].end
        outs = [self._compute_part(part, mixer, forward, args, kwargs, rows) for part in self._parts]
        if self._hooks is not None:
            for layer in layers:
                self._hooks.save_kv_layer(layer)
        if isinstance(outs[0], tuple):
            return (torch.cat([out[0] for out in outs], dim=1), *outs[0][1:])
        return torch.cat(outs, dim=1)

    def _compute_part(
        self, part: _Part, mixer: Mixer, forward: Callable[..., Any], args: Any, kwargs: Any, rows: int
    ) -> Any:
        states, count = mixer.states, part.table.shape[0]
        if part.begins:
            device = part.table.device
            values = {s.key: torch.zeros(count, *s.shape, dtype=s.dtype, device=device) for s in states}
        else:
            values = self._store.load(states, part.table)
        outs = []
        for start, end in self._pieces(part):
            cut = RowsOf(start, end, rows, as_batch=part.single)
            self._cache.put(states, values, part.begins and start == part.start)
            out = forward(
                *(cut(value) for value in args), **{name: cut(value) for name, value in kwargs.items()}
            )
            values = self._cache.taken(states)
            # Anything else that a module returns belongs to one request, and no layer uses it.
            outs.append(cut.back(out[0] if isinstance(out, tuple) else out))
            if end == part.end - part.drafts:
                self._store.save(states, part.table, values)
        joined = torch.cat(outs, dim=1)
        return (joined, *([None] * (len(out) - 1))) if isinstance(out, tuple) else joined

    def _pieces(self, part: _Part) -> list[tuple[int, int]]:
        known = part.end - part.drafts
        whole = [(part.start, known)] + ([(known, part.end)] if part.drafts else [])
        if not self._stepwise or part.single:
            return whole
        pieces: list[tuple[int, int]] = []
        for start, end in whole:
            alone = part.begins and start == part.start  # from the first token on it takes all tokens at once
            pieces += [(start, end)] if alone else [(row, row + 1) for row in range(start, end)]
        return pieces


def _parts_of(batch: Batch) -> Iterator[_Part]:
    table, starts = batch.block_tables[-1].long(), batch.host_query_start
    contexts, drafts = batch.host_context_lens, batch.host_num_drafts
    # Decodes are sorted by length, so requests with only their first token come first.
    begin = int((contexts[: batch.num_decodes] == 1).sum())
    if begin:
        yield _Part(0, begin, table[:begin], True, True)
    if begin < batch.num_decodes:
        yield _Part(begin, batch.num_decodes, table[begin : batch.num_decodes], True, False)
    for request in range(batch.num_decodes, batch.num_requests):
        start, end = int(starts[request]), int(starts[request + 1])
        begins = end - start == int(contexts[request])
        guesses = int(drafts[request]) if drafts is not None else 0
        yield _Part(start, end, table[request : request + 1], False, begins, guesses)


class _Current(threading.local):
    step: RecurrentStep | None = None


_current = _Current()


@contextmanager
def mixing_through(step: RecurrentStep | None) -> Iterator[None]:
    """Inside, mixers that run in this thread keep their states in the blocks of `step`'s requests. With None they run unchanged."""
    _current.step = step
    try:
        yield
    finally:
        _current.step = None


def wrap(mixers: Mixers) -> None:
    """Wraps the mixers' modules, so that within `mixing_through` they are computed request by request."""
    for mixer in mixers.found:
        mixer.module.forward = _wrapped(mixer, mixer.module.forward)


def _wrapped(mixer: Mixer, forward: Callable[..., Any]) -> Callable[..., Any]:
    def mix(*args: Any, **kwargs: Any) -> Any:
        step = _current.step
        if step is None:
            return forward(*args, **kwargs)
        return step.compute(mixer, forward, args, kwargs)

    return mix
