"""Finds out what a model's attention is by running it once, and refuses what cannot be served right.

A short prompt goes through the model with an attention function that records how each layer calls it and
compares what our kernel makes of the call with what the model's own eager attention makes of it. So nothing
needs to be known about an architecture beforehand, and one whose attention is more than keys, values, a window,
soft-capping and sinks is noticed before it serves a request.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Container
from typing import Any

import msgspec
import torch
from transformers import DynamicCache, PreTrainedModel

from tandem.engine.model.attention.interface import (
    PAGED,
    PROBED,
    MaskRule,
    attention_options,
    attention_through,
    rule_of,
)
from tandem.engine.model.attention.kernel import attend
from tandem.engine.model.attention.layers import AttentionLayer
from tandem.engine.model.recurrent.check import checked
from tandem.engine.model.recurrent.mixers import (
    Mixers,
    NotingCache,
    attending_layer,
    cache_parameter,
    keeps_states,
    wrap,
)
from tandem.wire.errors import ConfigurationError, TandemError

_PROBE_TOKENS = 8
# What a mask shows so far along is what it shows anywhere: beyond any window.
_FAR = 1 << 20
# The error allowed in an output whose largest value is 1. Rounding stays far below in every dtype; another attention is far above.
_TOLERANCE = 0.05

# A hybrid layer attends and keeps a state.
_ATTENDING_LAYER_TYPES = {"full_attention", "sliding_attention", "hybrid", "hybrid_sliding", None}


class ProbeResult(msgspec.Struct, frozen=True):
    layers: tuple[AttentionLayer, ...]  # in order
    vocab_size: int  # logits per token, which may be more than the tokenizer's tokens
    mixers: Mixers | None = None  # modules that keep a recurrent state, in models that have some


def probe_attention(model: PreTrainedModel) -> ProbeResult:
    """Raises ConfigurationError for a model that we can't serve."""
    config = model.config.get_text_config()
    parameters = inspect.signature(model.forward).parameters
    takes_positions = "position_ids" in parameters
    noting, options = _noting_cache(model, config, parameters)
    if not takes_positions and noting is None:
        raise _counts_by_itself(config)
    recorder = _Recorder(config, noting)
    tokens = torch.arange(_PROBE_TOKENS, device=model.device).remainder(config.vocab_size)[None]
    if takes_positions:
        options["position_ids"] = torch.arange(_PROBE_TOKENS, device=model.device)[None]
    model.set_attn_implementation(PROBED)
    try:
        with (
            torch.inference_mode(),
            attention_through(recorder.attention),
            noting.noting() if noting is not None else contextlib.nullcontext(),
        ):
            output = model(input_ids=tokens, use_cache=False, **options)
    except TandemError:
        raise
    except Exception as error:  # code that expects what only transformers' own attention gets
        lines = str(error).strip().splitlines()
        raise ConfigurationError(
            f"a model of type {config.model_type} cannot be served: its attention cannot be tried out by itself "
            f"({lines[0] if lines else type(error).__name__})"
        ) from error
    model.set_attn_implementation(PAGED)
    vocab_size = output.logits.shape[-1]
    mixers = noting.mixers() if noting is not None else None
    if mixers is None or not mixers.found:
        return ProbeResult(layers=recorder.layers(), vocab_size=vocab_size)
    layers = recorder.layers(besides=set(range(config.num_hidden_layers)))
    if layers and not takes_positions:
        raise _counts_by_itself(config)
    wrap(mixers)
    mixers = checked(model, layers, mixers, config.vocab_size)
    return ProbeResult(layers=layers, vocab_size=vocab_size, mixers=mixers)


def _noting_cache(
    model: PreTrainedModel, config: Any, parameters: Any
) -> tuple[NotingCache | None, dict[str, Any]]:
    """For a model whose layers keep states, the cache to run it with, and how it is given."""
    name = cache_parameter(parameters)
    if name is None or not keeps_states(config):
        return None, {}
    cache = NotingCache(config, model)
    return cache, {name: cache}


def _counts_by_itself(config: Any) -> ConfigurationError:
    return ConfigurationError(
        f"a model of type {config.model_type} cannot be served: it counts positions by itself, and cannot be told "
        "those of several requests"
    )


class _Recorder:
    def __init__(self, config: Any, cache: NotingCache | None = None) -> None:
        self._config = config
        self._cache = cache
        self._name = config.model_type
        self._layer_types = getattr(config, "layer_types", None)
        self._layers: dict[int, AttentionLayer] = {}
        self._windows: dict[MaskRule, int | None] = {}

    def attention(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        index = attending_layer(module, self._cache)
        if index is None:
            raise self._refusal("an attention module does not say which layer it is")
        if index in self._layers:
            raise self._refusal(f"layer {index} attends more than once, as an encoder-decoder does")
        window = self._window(index, kwargs.get("sliding_window"), attention_mask)
        options = attention_options(module, query, kwargs)
        positions = torch.arange(query.shape[2], device=query.device)
        distance = positions[:, None] - positions[None, :]
        seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        ours = attend(query, key, value, mask=seen, causal=False, **options)
        theirs, _ = _own_eager(module)(module, query, key, value, attention_mask, **kwargs)
        theirs = theirs.reshape(ours.shape[0], ours.shape[2], ours.shape[1], ours.shape[3]).transpose(1, 2)
        error = (ours.float() - theirs.float()).abs().max().item()
        if not error <= _TOLERANCE * max(theirs.float().abs().max().item(), 1e-6):
            raise self._refusal(
                f"the attention of layer {index} computes something that Tandem does not know"
            )
        self._layers[index] = AttentionLayer(
            index=index,
            num_query_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            key_dim=key.shape[3],
            value_dim=value.shape[3],
            window=window,
            scale=options["scale"],
            softcap=options["softcap"],
            sinks=options["sinks"] is not None,
        )
        return ours.transpose(1, 2), None

    def layers(self, besides: Container[int] = ()) -> tuple[AttentionLayer, ...]:
        """`besides`: layers that need not attend."""
        count = self._config.num_hidden_layers
        missing = [str(index) for index in range(count) if index not in self._layers and index not in besides]
        if missing:
            some = ", ".join(missing[:8]) + (" ..." if len(missing) > 8 else "")
            raise self._refusal(
                f"layers {some} do not use attention that can be paged (linear attention, a state space, or code "
                "that does not go through transformers' attention interface)"
            )
        self._compare_with_cache()
        return tuple(self._layers[index] for index in sorted(self._layers))

    def _compare_with_cache(self) -> None:
        """Where the mask shows more than transformers' own cache keeps, `generate` answers as no single pass does."""
        kept = DynamicCache(config=self._config).layers
        for index, layer in self._layers.items():
            cut = getattr(kept[index], "sliding_window", None) if index < len(kept) else None
            if cut is not None and (layer.window is None or layer.window > cut):
                sees = "all tokens" if layer.window is None else f"{layer.window} tokens"
                raise self._refusal(
                    f"layer {index} attends to {sees}, and transformers keeps a sliding window of {cut} for it"
                )

    def _window(self, index: int, told: int | None, mask: torch.Tensor | None) -> int | None:
        """What the mask shows, if transformers made it: not every layer tells its window to its attention."""
        kind = self._layer_types[index] if self._layer_types else None
        if kind not in _ATTENDING_LAYER_TYPES:
            raise self._refusal(f"layer {index} is of the kind {kind}")
        rule = rule_of(mask)
        if rule is not None and rule not in self._windows:
            # A rule that looks things up for each position has none so far along, and says nothing here.
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

        last, before = seen(_FAR - 1), seen(_FAR - 2)
        if last == _FAR and before == _FAR - 1:
            return None
        if last != before:
            raise self._refusal(f"how far layer {index} sees depends on where it is")
        return last

    def _refusal(self, why: str) -> ConfigurationError:
        return ConfigurationError(f"a model of type {self._name} cannot be served: {why}")


def _own_eager(module: torch.nn.Module) -> Callable[..., tuple[torch.Tensor, object]]:
    """The reference that the module's own source file gives."""
    function = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if function is None:
        raise ConfigurationError(f"{type(module).__name__} has no eager attention to check ours against")
    return function  # type: ignore[no-any-return]
