"""Finds out how a model attends by running it once, and refuses a model that cannot be served correctly.

A short prompt runs through the model with an attention function that records how each layer calls it. It compares our kernel's
result for the call with the model's own eager attention. So nothing needs to be known about an architecture in advance, and a
model whose attention is more than keys, values, a window, soft-capping and sinks is refused before it serves a request.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Container
from typing import Any, cast

import msgspec
import torch
from transformers import DynamicCache, PreTrainedModel

from tandem.base.errors import ConfigurationError, TandemError
from tandem.engine.model.attention.interface import (
    PAGED,
    PROBED,
    MaskRule,
    attend_by,
    attention_options,
    attention_through,
    own_eager,
    rule_of,
)
from tandem.engine.model.attention.kernel import attend
from tandem.engine.model.attention.layers import AttentionLayer
from tandem.engine.model.caches import NotingCache, attending_layer, cache_parameter
from tandem.engine.model.check import checked
from tandem.engine.model.compressed import LatentLayer, Latents, ProbedCall, latents_wing
from tandem.engine.model.own_layers import INDEXED, SUMMING, FoundLayer, OwnLayers, own_wing
from tandem.engine.model.shard import elsewhere
from tandem.engine.model.states import Mixers, StateNoting, states_wing
from tandem.engine.model.transformers_forward import ModelParts

_PROBE_TOKENS = 8
# A position beyond any window, where a mask shows the same as at every later one.
_FAR = 1 << 20
# The error allowed in an output whose largest value is 1. Rounding stays far below it in every dtype; a different attention is
# far above.
_TOLERANCE = 0.05
# An additive mask below this hides a key.
_HIDDEN = -1e3

# A hybrid layer attends and also keeps a state.
_ATTENDING_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention", "hybrid", "hybrid_sliding", None}


class ProbeResult(msgspec.Struct, frozen=True):
    parts: ModelParts
    vocab_size: int  # logits per token; may be more than the tokenizer has tokens


def probe_attention(model: PreTrainedModel) -> ProbeResult:
    """Runs the model once and returns its parts. Raises a ConfigurationError for a model that cannot be served."""
    config = model.config.get_text_config()
    parameters = inspect.signature(model.forward).parameters
    takes_positions = "position_ids" in parameters
    name = cache_parameter(parameters)
    noting = _noting_cache(config, model) if name is not None else None
    options: dict[str, Any] = {name: noting} if name is not None else {}
    if not takes_positions and (noting is None or not noting.keeps_states):
        raise _counts_by_itself(config)
    recorder = _Recorder(config, noting)
    tokens = torch.arange(_PROBE_TOKENS, device=model.device).remainder(config.vocab_size)[None]
    if takes_positions:
        options["position_ids"] = torch.arange(_PROBE_TOKENS, device=model.device)[None]
    attend_by(model, PROBED)
    try:
        with (
            torch.inference_mode(),
            attention_through(recorder.attention),
            noting.noting() if noting is not None else contextlib.nullcontext(),
        ):
            output = model(input_ids=tokens, use_cache=False, **options)
    except TandemError:
        raise
    except Exception as error:  # the model's code may need arguments that only transformers' own attention gets
        lines = str(error).strip().splitlines()
        raise ConfigurationError(
            f"a model of type {config.model_type} cannot be served: its attention cannot be tried out by itself "
            f"({lines[0] if lines else type(error).__name__})"
        ) from error
    attend_by(model, PAGED)
    mixers = _mixers_of(noting) if noting is not None else None
    everything = set(range(config.num_hidden_layers)) if mixers is not None else elsewhere(model)
    layers = recorder.layers(besides=everything)
    if layers and not takes_positions:
        raise _counts_by_itself(config)
    parts = ModelParts(layers, recorder.own_layers(), mixers, recorder.latents())
    if parts.latents is not None:
        parts.latents.wrap(parts.layers)
    if mixers is not None:
        mixers.wrap()
    if parts.own is not None:
        parts.own.wrap()
    return ProbeResult(checked(model, parts, config.vocab_size), output.logits.shape[-1])


def _noting_cache(config: Any, model: PreTrainedModel) -> NotingCache:
    states = states_wing()
    return states.noting_cache(config, model) if states is not None else NotingCache(config, model)


def _mixers_of(noting: NotingCache) -> Mixers | None:
    if states_wing() is not None:
        return cast("StateNoting", noting).mixers()
    if noting.keeps_states:
        raise ConfigurationError(
            f"a model of type {noting.model_type} cannot be served: it keeps recurrent states, and this installation has no "
            "engine/model/recurrent"
        )
    return None


def _counts_by_itself(config: Any) -> ConfigurationError:
    return ConfigurationError(
        f"a model of type {config.model_type} cannot be served: it counts positions by itself, and cannot be told "
        "those of several requests"
    )


class _Recorder:
    def __init__(self, config: Any, cache: NotingCache | None) -> None:
        self._config = config
        self._cache = cache
        self._name = config.model_type
        self._layer_types = getattr(config, "layer_types", None)
        self._layers: dict[int, AttentionLayer] = {}
        self._windows: dict[MaskRule, int | None] = {}
        self._expansions: dict[int, LatentLayer] = {}
        self._own: dict[int, FoundLayer] = {}

    def attention(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, Any]:
        index = attending_layer(module, self._cache)
        if index is None:
            raise self._refusal("an attention module does not say which layer it is")
        eager = own_eager(module)
        if eager is None:
            raise self._refusal(f"{type(module).__name__} has no eager attention to check ours against")
        if index in self._layers:
            self._leave_to_itself(index, f"layer {index} attends more than once, as an encoder-decoder does")
            return eager(module, query, key, value, attention_mask, **kwargs)
        if self._kind(index) in (INDEXED, *SUMMING):
            self._leave_to_itself(index, f"layer {index} keeps more than its code hands over")
            if attention_mask is not None and (wing := own_wing()) is not None:
                attention_mask = wing.among_picked(attention_mask, kwargs.get("indices"))
            return eager(module, query, key, value, attention_mask, **kwargs)
        window = self._window(index, kwargs.get("sliding_window"), attention_mask)
        chunked = self._kind(index) == "chunked_attention"
        options = attention_options(module, query, kwargs)
        positions = torch.arange(query.shape[2], device=query.device)
        distance = positions[:, None] - positions[None, :]
        seen = distance >= 0
        if chunked and window is not None:
            seen &= positions[None, :] >= positions[:, None] // window * window
        elif window is not None:
            seen &= distance < window
        ours = attend(query, key, value, mask=seen, causal=False, **options)
        theirs, weights = eager(module, query, key, value, attention_mask, **kwargs)
        result, theirs = theirs, theirs.reshape(ours.shape[0], ours.shape[2], ours.shape[1], ours.shape[3])
        error = (ours.transpose(1, 2).float() - theirs.float()).abs().max().item()
        if not error <= _TOLERANCE * max(theirs.float().abs().max().item(), 1e-6):
            unknown = f"the attention of layer {index} computes something that Tandem does not know"
            if attention_mask is None or not (attention_mask[..., 0, 1] < _HIDDEN).all():
                raise self._refusal(unknown)
            self._leave_to_itself(index, unknown)
            return result, weights
        call = ProbedCall(query, key, value, ours, seen, options, _TOLERANCE)
        expansion = self._expansion(index, module, call)
        if expansion is not None:
            self._expansions[index] = expansion
        self._layers[index] = AttentionLayer(
            index=index,
            num_query_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            key_dim=key.shape[3],
            value_dim=value.shape[3],
            window=window,
            chunked=chunked,
            reads_of=self._read_by(index, key),
            scale=options["scale"],
            softcap=options["softcap"],
            sinks=options["sinks"] is not None,
        )
        return ours.transpose(1, 2), None

    def _read_by(self, index: int, key: torch.Tensor) -> int | None:
        """The other layer whose keys these are; None if they are the layer's own."""
        if self._cache is None or index in self._cache.kept:
            return None
        return next((other for other, (kept, _) in self._cache.kept.items() if kept is key), None)

    def _expansion(self, index: int, module: torch.nn.Module, call: ProbedCall) -> LatentLayer | None:
        """How the layer made keys and values from a latent, if that is what it gave to the cache; None otherwise."""
        wing = latents_wing()
        if wing is None or self._cache is None or index not in self._cache.kept:
            return None
        return wing.expansion_of(module, self._cache.kept[index], call)

    def _leave_to_itself(self, index: int, why: str) -> None:
        """Lets the layer's module attend by its own code, or refuses the model."""
        known, wing = self._layers.get(index), own_wing()
        if wing is None:
            raise self._refusal(f"{why}, and this installation has no engine/model/own_attention")
        window = known.window if known is not None else None
        found = None
        if self._cache is not None:
            found = wing.find(self._config, self._cache, index, self._kind(index), window)
        if found is None:
            raise self._refusal(why)
        self._layers[index], self._own[index] = found

    def layers(self, besides: Container[int] = ()) -> tuple[AttentionLayer, ...]:
        """The layers that attend. Those in `besides` need not; any other layer must."""
        count = self._config.num_hidden_layers
        missing = [index for index in range(count) if index not in self._layers]
        for index in missing:
            if self._cache is not None and index in self._cache.keepers:
                self._leave_to_itself(index, f"layer {index} does not say which tokens it may see")
        some = [str(index) for index in missing if index not in self._layers and index not in besides]
        if some:
            raise self._refusal(
                f"layers {', '.join(some[:8])}{' ...' if len(some) > 8 else ''} do not use attention that can be paged (linear "
                "attention, a state space, or code that does not go through transformers' attention interface)"
            )
        self._compare_with_cache()
        kept = self._expansions if self._all_keep_latents else {}
        return tuple(
            kept[index].kept_as(layer) if index in kept else layer for index, layer in sorted(self._layers.items())
        )

    @property
    def _all_keep_latents(self) -> bool:
        return bool(self._expansions) and self._expansions.keys() == self._layers.keys()

    def latents(self) -> Latents | None:
        """None unless all layers keep latents, because all blocks must be of one kind."""
        wing = latents_wing()
        return wing.latents(self._expansions) if wing is not None and self._all_keep_latents else None

    def own_layers(self) -> OwnLayers | None:
        wing = own_wing()
        return wing.layers(self._own) if wing is not None and self._own else None

    def _kind(self, index: int) -> str | None:
        """The layer's type. Transformers numbers each attention as a layer where layers attend more than once."""
        kinds = self._layer_types
        return kinds[index] if kinds and index < len(kinds) else None

    def _compare_with_cache(self) -> None:
        """Refuses a model whose mask shows more tokens than transformers' own cache keeps: its `generate` gives another answer than a
        single pass."""
        kept = DynamicCache(config=self._config).layers
        for index, layer in self._layers.items():
            cut = getattr(kept[index], "sliding_window", None) if index < len(kept) else None
            if index in self._own and self._own[index].sums is not None:
                continue  # the layer keeps the window itself, besides the sums
            if cut is not None and (layer.window is None or layer.window > cut):
                sees = "all tokens" if layer.window is None else f"{layer.window} tokens"
                raise self._refusal(
                    f"layer {index} attends to {sees}, and transformers keeps a sliding window of {cut} for it"
                )

    def _window(self, index: int, told: int | None, mask: torch.Tensor | None) -> int | None:
        """The window, read from the mask if transformers made it, because not every layer passes its window on."""
        kind = self._kind(index)
        if kind not in _ATTENDING_LAYER_TYPES:
            raise self._refusal(f"layer {index} is of the kind {kind}")
        rule = rule_of(mask)
        if rule is not None and rule not in self._windows:
            # A rule that looks each position up in a table fails this far along, and tells nothing.
            with contextlib.suppress(IndexError, RuntimeError):
                self._windows[rule] = self._window_by(rule, index)
        if rule in self._windows:
            return self._windows[rule]
        if kind == "sliding_attention" and told is None:
            told = getattr(self._config, "sliding_window", None)
            if told is None:
                raise self._refusal(f"layer {index} has a sliding window of unknown size")
        return None if kind == "full_attention" else told

    def _window_by(self, rule: MaskRule, index: int) -> int | None:
        zero = torch.zeros(1, dtype=torch.int64)
        keys = torch.arange(_FAR)

        def seen(position: int) -> int:
            row = rule(zero, zero, torch.tensor([position]), keys[: position + 1])
            count = int(row.sum())
            if count == 0 or not row[-count:].all():
                raise self._refusal(f"layer {index} sees other tokens than the last ones")
            return count

        if self._kind(index) == "chunked_attention":
            chunk = int(self._config.attention_chunk_size)
            if any(seen(p) != p % chunk + 1 for p in (0, chunk - 1, chunk, 2 * chunk + 1, _FAR - 1)):
                raise self._refusal(f"layer {index} sees other tokens than those of its chunk")
            return chunk
        last, before = seen(_FAR - 1), seen(_FAR - 2)
        if last == _FAR and before == _FAR - 1:
            return None
        if last != before:
            raise self._refusal(f"how far layer {index} sees depends on where it is")
        return last

    def _refusal(self, why: str) -> ConfigurationError:
        return ConfigurationError(f"a model of type {self._name} cannot be served: {why}")
