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
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import msgspec
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin, LinearAttentionLayer

from tandem.base.errors import ConfigurationError, InternalError
from tandem.engine.model.caches import NotingCache, RowsOf, StepCache
from tandem.engine.model.recurrent.layout import CONV, MATRIX, RECURRENT, LayerStates, State, StateKey, StateLayout
from tandem.engine.model.runner import Batch, LayerHooks


class StateCache(StepCache):
    """It also holds the states of the requests whose rows a mixer computes next."""

    def __init__(self, num_layers: int, states_of: Mapping[int, int], before: int | torch.Tensor) -> None:
        """`states_of` is how many states transformers' cache has for each layer."""
        super().__init__(num_layers, before)
        self._states_of = states_of
        self._matrices: dict[int, torch.Tensor | None] = {}

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        return self._matrices.get(layer_idx)

    def set_linear_cache(self, layer_idx: int, linear_cache: torch.Tensor) -> None:
        self._matrices[layer_idx] = linear_cache

    def put(self, states: tuple[State, ...], values: dict[StateKey, torch.Tensor], begins: bool) -> None:
        """Sets the states for the next run of a mixer, which writes to these tensors. With `begins` they count as empty."""
        for layer in {state.layer for state in states}:
            self.layers[layer] = LinearAttentionLayer(number_of_states=self._states_of.get(layer, 1))
        for state in states:
            place, value = self.layers[state.layer], values[state.key]
            if state.kind == MATRIX:
                self._matrices[state.layer] = None if begins else value
                continue
            place.has_previous_state[state.number] = not begins
            place.device, place.dtype = value.device, value.dtype
            if state.kind == CONV:
                place.conv_states[state.number] = value
                place.conv_kernel_size[state.number] = state.shape[-1]
                place.is_conv_states_initialized[state.number] = True
            else:
                place.recurrent_states[state.number] = value
                place.is_recurrent_states_initialized[state.number] = True

    def taken(self, states: tuple[State, ...]) -> dict[StateKey, torch.Tensor]:
        """Returns the states that the mixer has left."""
        left: dict[StateKey, torch.Tensor] = {}
        for state in states:
            place = self.layers[state.layer]
            if state.kind == MATRIX:
                value = self._matrices.get(state.layer)
            elif state.kind == CONV:
                value = place.conv_states[state.number]
            else:
                value = place.recurrent_states[state.number]
            if value is None:
                raise InternalError(f"layer {state.layer} kept no state")
            left[state.key] = value
        return left


class Mixer(msgspec.Struct, frozen=True):
    """A module, and the states that only it reads and writes."""

    module: torch.nn.Module
    states: tuple[State, ...]


class ModelMixers(msgspec.Struct, frozen=True):
    """All mixers of a model. See engine.model.states.Mixers."""

    found: tuple[Mixer, ...]
    layout: StateLayout
    layers: dict[int, int]  # how many states transformers' cache has for each layer
    num_layers: int  # layers of all kinds
    # The mixers continue from a state one token at a time; several tokens at once only from a prompt's beginning.
    stepwise: bool = False

    def token_by_token(self) -> ModelMixers:
        return msgspec.structs.replace(self, stepwise=True)

    def wrap(self) -> None:
        for mixer in self.found:
            mixer.module.forward = _wrapped(mixer, mixer.module.forward)

    def bound_to(self, kv_cache: torch.Tensor) -> BoundMixers:
        return BoundMixers(self, LayerStates(kv_cache, self.layout))


class BoundMixers(msgspec.Struct, frozen=True):
    """See engine.model.states.StatesInCache."""

    mixers: ModelMixers
    store: LayerStates

    def step_cache(self, num_layers: int, before: int | torch.Tensor) -> StateCache:
        return StateCache(num_layers, self.mixers.layers, before)

    def mixing(self, batch: Batch, hooks: LayerHooks | None, cache: StepCache) -> AbstractContextManager[None]:
        assert isinstance(cache, StateCache)
        return mixing_through(RecurrentStep(self.mixers, self.store, batch, hooks, cache))


class StateNotingCache(NotingCache):
    """A cache that notes, besides, which module reads and writes each state."""

    def __init__(self, config: Any, model: PreTrainedModel) -> None:
        super().__init__(config, model)
        self._owners: dict[StateKey, torch.nn.Module] = {}

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Any:
        self._note((layer_idx, CONV, state_idx))
        return super().get_conv_state(layer_idx, state_idx)

    def update_conv_state(self, conv_states: Any, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Any:
        self._note((layer_idx, CONV, state_idx))
        return super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Any:
        self._note((layer_idx, RECURRENT, state_idx))
        return super().get_recurrent_state(layer_idx, state_idx)

    def update_recurrent_state(self, recurrent_states: Any, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Any:
        self._note((layer_idx, RECURRENT, state_idx))
        return super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **kwargs)

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        self._note((layer_idx, MATRIX, 0))
        return super().get_linear_cache(layer_idx)

    def set_linear_cache(self, layer_idx: int, linear_cache: torch.Tensor) -> None:
        self._note((layer_idx, MATRIX, 0))
        super().set_linear_cache(layer_idx, linear_cache)

    def _note(self, key: StateKey) -> None:
        if not self.running or self._owners.setdefault(key, self.running[-1]) is not self.running[-1]:
            raise ConfigurationError(
                f"a model of type {self.model_type} cannot be served: the state of layer {key[0]} is used by more than one module"
            )

    def mixers(self) -> ModelMixers | None:
        """The mixers that were noted, with their states; None without any."""
        of_module: dict[torch.nn.Module, list[State]] = {}
        for key, module in self._owners.items():
            value = self._value(key)
            if value is None:
                continue  # read but never written: a layer with only a convolution has no other state
            state = State(*key, shape=tuple(value.shape[1:]), dtype=value.dtype)
            of_module.setdefault(module, []).append(state)
        if not of_module:
            return None
        found = tuple(Mixer(module, tuple(states)) for module, states in of_module.items())
        layers = {
            index: getattr(layer, "number_of_states", 1)
            for index, layer in enumerate(self.layers)
            if isinstance(layer, LinearAttentionCacheLayerMixin)
        }
        layout = StateLayout.of(tuple(state for mixer in found for state in mixer.states))
        return ModelMixers(found, layout, layers, len(self.layers))

    def _value(self, key: StateKey) -> torch.Tensor | None:
        layer, kind, number = key
        if kind == MATRIX:
            return self.matrices.get(layer)
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
        self, mixers: ModelMixers, store: LayerStates, batch: Batch, hooks: LayerHooks | None, cache: StateCache
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
            out = forward(*(cut(value) for value in args), **{name: cut(value) for name, value in kwargs.items()})
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
def mixing_through(step: RecurrentStep) -> Iterator[None]:
    """Inside, mixers that run in this thread keep their states in the blocks of `step`'s requests. Outside they run unchanged."""
    _current.step = step
    try:
        yield
    finally:
        _current.step = None


def _wrapped(mixer: Mixer, forward: Callable[..., Any]) -> Callable[..., Any]:
    def mix(*args: Any, **kwargs: Any) -> Any:
        step = _current.step
        if step is None:
            return forward(*args, **kwargs)
        return step.compute(mixer, forward, args, kwargs)

    return mix
