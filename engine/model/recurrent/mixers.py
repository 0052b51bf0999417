"""The modules that keep recurrent states, computed request by request.

A model runs as one sequence over all requests' tokens. A module that keeps a state must not: what it makes of a token depends on
the tokens before. So its rows are taken apart. Requests with one token form one batch, with their states side by side; a longer
chunk is computed alone, from its request's state. A request whose rows begin at its first token has no state before: whatever lies
in its blocks is left from another request, and is not read.

Which modules these are is found by running the model with a cache of transformers' own that notes who reads and writes states.
Nothing is known of an architecture.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin, LinearAttentionLayer

from tandem.engine.model.batch import Batch
from tandem.engine.model.recurrent.layout import LayerStates, State, StateKey, StateLayout
from tandem.engine.model.runner import LayerHooks
from tandem.wire.errors import ConfigurationError, InternalError

CONV, RECURRENT, MATRIX = "conv", "recurrent", "matrix"


class Mixer(msgspec.Struct, frozen=True):
    """A module, and the states that it alone reads and writes."""

    module: torch.nn.Module
    states: tuple[State, ...]


class Mixers(msgspec.Struct, frozen=True):
    """A model's."""

    found: tuple[Mixer, ...]
    layout: StateLayout
    layers: dict[int, int]  # how many states transformers' cache has for a layer
    num_layers: int  # of all kinds
    stepwise: bool = (
        False  # they go on from a state one token at a time, and read more tokens only from the beginning
    )


def keeps_states(config: Any) -> bool:
    """By transformers' own account of what the model's cache holds."""
    try:
        layers = DynamicCache(config=config).layers
    except Exception:  # a configuration that its cache does not understand says nothing here
        return False
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers)


class OwnCache(DynamicCache):  # type: ignore[misc]
    """Transformers' own cache, of one request, as a model would make it."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self._matrices: dict[int, torch.Tensor] = {}
        self.attending: int | None = None  # the layer whose keys it was given last

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self.attending = layer_idx
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    # MiniMax keeps a matrix of its own for each layer.
    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        return self._matrices.get(layer_idx)

    def set_linear_cache(self, layer_idx: int, linear_cache: torch.Tensor) -> None:
        self._matrices[layer_idx] = linear_cache


def attending_layer(module: torch.nn.Module, cache: OwnCache | StepCache | None) -> int | None:
    """Layers may share a module. The cache is told which one attends."""
    if cache is not None and cache.attending is not None:
        return cache.attending
    index = getattr(module, "layer_idx", None)
    return index if isinstance(index, int) else None


class NotingCache(OwnCache):
    """It notes which module it served."""

    def __init__(self, config: Any, model: PreTrainedModel) -> None:
        super().__init__(config)
        self._name = config.model_type
        self._model = model
        self._running: list[torch.nn.Module] = []
        self._owners: dict[StateKey, torch.nn.Module] = {}

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
        """What was noted."""
        of_module: dict[torch.nn.Module, list[State]] = {}
        for key, module in self._owners.items():
            value = self._value(key)
            if value is None:
                continue  # looked for, and never kept: a layer with a convolution has no other state
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
    """Rows of a step that a mixer computes together."""

    start: int
    end: int
    table: torch.Tensor  # int64 [requests, blocks of each]
    single: bool  # a token of each request; else all rows are one's
    begins: bool  # with a request's first token: there is no state before


class StepCache(Cache):  # type: ignore[misc]
    """Stands where a model expects its cache, for one step: attention goes its own way, and each mixer finds the states of the
    requests whose rows it computes."""

    def __init__(self, mixers: Mixers) -> None:
        super().__init__(layers=[LinearAttentionLayer() for _ in range(mixers.num_layers)])
        self._mixers = mixers
        self._matrices: dict[int, torch.Tensor | None] = {}
        self.attending: int | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.attending = layer_idx
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        return self._matrices.get(layer_idx)

    def set_linear_cache(self, layer_idx: int, linear_cache: torch.Tensor) -> None:
        self._matrices[layer_idx] = linear_cache

    def put(self, states: tuple[State, ...], values: dict[StateKey, torch.Tensor], begins: bool) -> None:
        """What the next run of a mixer finds. It writes to the very tensors."""
        for layer in {state.layer for state in states}:
            self.layers[layer] = LinearAttentionLayer(number_of_states=self._mixers.layers.get(layer, 1))
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
        """What it left there."""
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


class RecurrentStep:
    """One step of all mixers."""

    def __init__(self, mixers: Mixers, store: LayerStates, batch: Batch, hooks: LayerHooks | None) -> None:
        self.cache = StepCache(mixers)
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
        stepwise = self._stepwise and not (part.begins or part.single)
        pieces = (
            [(row, row + 1) for row in range(part.start, part.end)] if stepwise else [(part.start, part.end)]
        )
        outs = []
        for start, end in pieces:
            cut = _Cut(start, end, part.single, rows)
            self.cache.put(states, values, part.begins)
            out = forward(
                *(cut(value) for value in args), **{name: cut(value) for name, value in kwargs.items()}
            )
            values = self.cache.taken(states)
            # What else a module returns is of one request alone, and nothing that a layer goes on with.
            outs.append(cut.back(out[0] if isinstance(out, tuple) else out))
        self._store.save(states, part.table, values)
        joined = torch.cat(outs, dim=1)
        return (joined, *([None] * (len(out) - 1))) if isinstance(out, tuple) else joined


class _Cut:
    """Some rows of whatever has one for each token; single rows as a batch."""

    def __init__(self, start: int, end: int, single: bool, rows: int) -> None:
        self._start, self._end, self._single, self._rows = start, end, single, rows

    def __call__(self, value: Any) -> Any:
        if isinstance(value, tuple | list):
            return type(value)(self(item) for item in value)
        if not isinstance(value, torch.Tensor) or value.ndim < 2 or value.shape[:2] != (1, self._rows):
            return value
        mine = value[:, self._start : self._end]
        return mine.transpose(0, 1) if self._single else mine

    def back(self, out: torch.Tensor) -> torch.Tensor:
        return out.transpose(0, 1) if self._single else out


def _parts_of(batch: Batch) -> Iterator[_Part]:
    table, starts = batch.block_tables[-1].long(), batch.host_query_start
    contexts = batch.host_context_lens
    # Decodes are in the order of their lengths: those that begin come first.
    begin = int((contexts[: batch.num_decodes] == 1).sum())
    if begin:
        yield _Part(0, begin, table[:begin], True, True)
    if begin < batch.num_decodes:
        yield _Part(begin, batch.num_decodes, table[begin : batch.num_decodes], True, False)
    for request in range(batch.num_decodes, batch.num_requests):
        start, end = int(starts[request]), int(starts[request + 1])
        begins = end - start == int(contexts[request])
        yield _Part(start, end, table[request : request + 1], False, begins)


class _Current(threading.local):
    step: RecurrentStep | None = None


_current = _Current()


@contextmanager
def mixing_through(step: RecurrentStep | None) -> Iterator[None]:
    """Mixers that run in this thread meanwhile keep their states in `step`'s requests. Without one they run as they were made."""
    _current.step = step
    try:
        yield
    finally:
        _current.step = None


def wrap(mixers: Mixers) -> None:
    """From here on the modules are computed request by request, in a step."""
    for mixer in mixers.found:
        mixer.module.forward = _wrapped(mixer, mixer.module.forward)


def _wrapped(mixer: Mixer, forward: Callable[..., Any]) -> Callable[..., Any]:
    def mix(*args: Any, **kwargs: Any) -> Any:
        step = _current.step
        if step is None:
            return forward(*args, **kwargs)
        return step.compute(mixer, forward, args, kwargs)

    return mix


def cache_parameter(parameters: Any) -> str | None:
    """By which name a model takes its cache."""
    return next((name for name in ("past_key_values", "cache_params") if name in parameters), None)
