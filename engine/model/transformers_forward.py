"""The general forward pass: runs any transformers decoder on a batch as one sequence. Paged attention and the mixers keep the requests
apart; the rest of the model only sees rows."""

from __future__ import annotations

import inspect
from collections.abc import Container, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import msgspec
import torch
from transformers import PreTrainedModel

from tandem.base.errors import InternalError
from tandem.engine.model.adapters import UpdatedLayers
from tandem.engine.model.attention.interface import (
    AttentionCall,
    AttentionStep,
    PagedAttention,
    attention_options,
    attention_through,
)
from tandem.engine.model.attention.layers import AttentionLayer
from tandem.engine.model.caches import OwnCache, StepCache, attending_layer, cache_parameter
from tandem.engine.model.compressed import Latents
from tandem.engine.model.own_layers import OwnLayers
from tandem.engine.model.pieces import take_rotary
from tandem.engine.model.runner import Around, Batch, LayerHooks
from tandem.engine.model.states import Mixers, StatesInCache

# In steps of at most this many tokens, each of torch's operations is too small for two threads.
_SHORT = 16


class ModelParts(msgspec.Struct, frozen=True):
    """The parts of a model in which a token depends on other tokens, as probing found them."""

    layers: tuple[AttentionLayer, ...]
    own: OwnLayers | None = None  # those of `layers` that attend by their own code
    mixers: Mixers | None = None
    latents: Latents | None = None  # if all layers keep latents
    counts: bool = False  # the model counts positions itself, on from its cache's length

    @property
    def num_layers(self) -> int:
        """The number of layers of all kinds, as transformers counts them."""
        last = max((layer.index for layer in self.layers), default=-1)
        return max(last + 1, self.mixers.num_layers if self.mixers is not None else 0)


class TransformersForward:
    """Runs the model with batch size 1 over all tokens of the batch. Only attention and mixers know which request a row belongs to."""

    def __init__(
        self,
        model: PreTrainedModel,
        attention: PagedAttention,
        parts: ModelParts,
        states: StatesInCache | None = None,
        adapted: UpdatedLayers | None = None,
        threads: int = 0,
        around: Around | None = None,
    ) -> None:
        """`states` are given if the model has mixers that keep their states in the KV cache. A pass is computed inside `around`. With `threads`, torch uses that many in
        long steps and one in short steps: its idle threads spin for a while, on cores that the CPU kernels need next."""
        self._model = model
        self.attention = attention
        self.parts, self._states = parts, states
        self.adapted = adapted
        self.num_layers = len(parts.layers)
        self._readers = frozenset(layer.index for layer in parts.layers if layer.reads_of is not None)
        parameters = inspect.signature(model.forward).parameters
        self._picks_rows = "logits_to_keep" in parameters
        self._takes_positions = "position_ids" in parameters
        self._cache_name = cache_parameter(parameters)
        self._around = around
        self._hidden: torch.Tensor | None = None
        self._threads = threads

    def __call__(self, batch: Batch, hooks: LayerHooks | None) -> torch.Tensor:
        if self._threads:
            torch.set_num_threads(1 if batch.num_tokens <= _SHORT else self._threads)
        step = self.attention.begin(batch)
        cache = self._step_cache(batch.positions)
        own: AbstractContextManager[None] = nullcontext()
        if self.parts.own is not None:
            own = self.parts.own.request_by_request(self.attention, batch, hooks, cache, self._model.dtype)
        with (
            self.adapting(batch.adapter_slots, batch.adapter_slots_used),
            self._states.mixing(batch, hooks, cache) if self._states is not None else nullcontext(),
            own,
            self._noting_hidden(batch.hidden_rows),
            self._around(batch) if self._around is not None else nullcontext(),
        ):
            return self.compute(
                batch.token_ids,
                batch.positions,
                step,
                hooks,
                batch.logit_rows,
                cache,
                self._embeddings(batch) if batch.image_rows is not None else None,
                batch.rope_positions,
            )

    def adapting(self, slots: torch.Tensor | None, used: int) -> AbstractContextManager[None]:
        """See UpdatedLayers.step."""
        return self.adapted.step(slots, used) if self.adapted is not None else nullcontext()

    def _embeddings(self, batch: Batch) -> torch.Tensor:
        """The tokens' embeddings. Rows from the vision tower or from requests replace those of placeholders."""
        embed: Any = self._model.get_input_embeddings()
        rows: torch.Tensor = embed(batch.token_ids)
        if batch.image_rows is not None and batch.image_states is not None:
            rows[batch.image_rows] = batch.image_states[:, : rows.shape[1]].to(rows.dtype)
        return rows

    @property
    def hidden(self) -> torch.Tensor:
        if self._hidden is None:
            raise InternalError("hidden states are asked for that were not kept")
        return self._hidden

    @contextmanager
    def _noting_hidden(self, rows: torch.Tensor | None) -> Iterator[None]:
        """Keeps `rows` of the hidden states below the head, which are the output of transformers' model without a head."""
        self._hidden = None
        if rows is None:
            yield
            return

        def note(_module: Any, _inputs: Any, output: Any) -> None:
            self._hidden = output[0][0][rows]

        hook = self._model.base_model.register_forward_hook(note)
        try:
            yield
        finally:
            hook.remove()

    def compute(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        step: AttentionStep,
        hooks: LayerHooks | None = None,
        logit_rows: torch.Tensor | None = None,  # None: all
        cache: OwnCache | StepCache | None = None,
        embeddings: torch.Tensor | None = None,  # None: the tokens'
        rope_positions: torch.Tensor | None = None,  # None: `positions`
    ) -> torch.Tensor:
        picks = self._picks_rows and logit_rows is not None
        options: dict[str, Any] = {"logits_to_keep": logit_rows} if picks else {}
        if self._takes_positions:
            options["position_ids"] = positions[None] if rope_positions is None else rope_positions[:, None]
        if cache is None:
            cache = self._step_cache(positions)
        if self._cache_name is not None:
            options[self._cache_name] = cache
        hooked = _HookedStep(step, hooks, cache, self.parts.own, self._readers, self.parts.latents or ())
        latents = self.parts.latents
        expanding = latents.without_expanding(step) if latents is not None else nullcontext()
        with attention_through(hooked.attention), expanding:
            if embeddings is None:
                options["input_ids"] = token_ids[None]
            else:
                options["inputs_embeds"] = embeddings[None]
            output = self._model(use_cache=False, **options)
        logits: torch.Tensor = output.logits[0]
        return logits if picks or logit_rows is None else logits[logit_rows]

    def _step_cache(self, positions: torch.Tensor) -> StepCache:
        before: int | torch.Tensor = 0
        if self.parts.counts:
            before = positions - torch.arange(len(positions), device=positions.device)
        if self._states is not None:
            return self._states.step_cache(self.parts.num_layers, before)
        return StepCache(self.parts.num_layers, before)


def run_without_attention(model: PreTrainedModel, tokens: int, rows: int, device: torch.device) -> None:
    """Runs a forward pass of `tokens` tokens, with logits for `rows` of them, and attention that computes nothing."""

    def nothing(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, None]:
        take_rotary(query, key)  # a rotary embedding that waits must not be left for the next pass
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None

    parameters = inspect.signature(model.forward).parameters
    with torch.inference_mode(), attention_through(nothing):
        numbers = torch.arange(tokens, device=device)[None]
        options: dict[str, Any] = {}
        if "logits_to_keep" in parameters:
            options["logits_to_keep"] = numbers[0, :rows]
        if "position_ids" in parameters:
            options["position_ids"] = numbers
        model(input_ids=torch.zeros_like(numbers), use_cache=False, **options)


class _HookedStep:
    def __init__(
        self,
        step: AttentionStep,
        hooks: LayerHooks | None,
        cache: OwnCache | StepCache,
        own: OwnLayers | None,
        readers: frozenset[int],
        latent: Container[int],
    ) -> None:
        self._step = step
        self._hooks = hooks
        self._cache = cache
        self._own = own
        self._readers = readers
        self._latent = latent

    def attention(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        layer = attending_layer(module, self._cache)
        if layer is None:
            raise InternalError("an attention module does not say which layer it is")
        if self._own is not None and layer in self._own:
            result: tuple[torch.Tensor, None] = self._own.attend(
                layer, module, query, key, value, attention_mask, **kwargs
            )
            return result
        hooks = self._hooks if layer not in self._readers else None
        if hooks is not None:
            hooks.wait_for_layer_load(layer)
        how = AttentionCall(
            **attention_options(module, query, kwargs),
            rotary=take_rotary(query, key),
            latent=torch.cat(self._cache.given, dim=-1)[0, 0] if layer in self._latent else None,
        )
        out = self._step.attend(layer, query[0], key[0], value[0], how)
        if hooks is not None:
            hooks.save_kv_layer(layer)
        return out[None], None
