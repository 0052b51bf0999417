"""Finds the shape of a model's attention by running it once, and checks that parts of a prompt, beside another, give the same logits."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import msgspec
import numpy as np
import torch
from transformers import EncoderDecoderCache, PreTrainedModel

from tandem.base.errors import ConfigurationError
from tandem.engine.model.attention.interface import PAGED, PROBED, attend_by, attention_options, attention_through
from tandem.engine.model.attention.layers import AttentionLayer, plan_cache
from tandem.engine.model.batching import RequestRows, StepOnDevice, build_batch
from tandem.engine.model.caches import OwnCache, attending_layer, cache_parameter
from tandem.engine.model.crossed.encoding import EncodedPrompts, eagerly
from tandem.engine.model.crossed.forward import CrossedForward, CrossedModel
from tandem.engine.model.staging import to_device

_BLOCK = 4
# Of each request of the check: tokens that the encoder reads, and the decoder's.
_SIDES = {"a": (23, 9), "b": (6, 12)}
# The tokens of each request in each step: parts of the encoder's, of both, and of the decoder's, alone and together.
_STEPS = ({"a": 9}, {"a": 13, "b": 7}, {"a": 3, "b": 1}, {"a": 1, "b": 1}, {"a": 1, "b": 5}, {"a": 5, "b": 4})
# Relative to the largest logit; see tandem.engine.model.check.
_TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 0.1, torch.float16: 0.05}


def find(model: PreTrainedModel, opening: tuple[int, ...], never: tuple[int, ...]) -> CrossedModel:
    """Raises a ConfigurationError for a model that gives other logits in parts than at once."""
    with torch.inference_mode():
        attend_by(model, PROBED)
        layers, width, expected = _run(model)
        attend_by(model, PAGED)
        positions = getattr(model.config, "max_position_embeddings", None)
        found = CrossedModel(model, layers, width, opening, positions, never)
        error = _difference(found, expected)
    if not error <= _TOLERANCE[model.dtype]:
        raise ConfigurationError(
            f"a model of type {model.config.model_type} cannot be served: a prompt that is read in parts gives other logits than one "
            f"that is read at once (they differ by {error:.2g} of the largest), so it keeps something that Tandem does not know"
        )
    return found


def _tokens(model: PreTrainedModel) -> dict[str, tuple[list[int], list[int]]]:
    size = model.config.vocab_size
    made = {}
    for seed, (name, lengths) in enumerate(_SIDES.items()):
        read, written = ([3 + (7 + 13 * seed + 5 * i * i) % (size - 3) for i in range(n)] for n in lengths)
        made[name] = read, written
    return made


def _run(model: Any) -> tuple[tuple[AttentionLayer, ...], int, dict[str, torch.Tensor]]:
    """Runs each request at once. Returns the decoder's layers, the width of the encoder's rows, and the logits."""
    name = cache_parameter(inspect.signature(model.forward).parameters) or ""
    recorder = _Recorder(model.config.model_type)
    logits, width = {}, 0
    for request, (read, written) in _tokens(model).items():
        recorder.caches = own, crossing = OwnCache(None), OwnCache(None)
        with attention_through(recorder.attention):
            output = model(
                input_ids=torch.tensor([read], device=model.device),
                decoder_input_ids=torch.tensor([written], device=model.device),
                use_cache=False,
                **{name: EncoderDecoderCache(own, crossing)},
            )
        logits[request] = output.logits[0].float()
        width = output.encoder_last_hidden_state.shape[-1]
    return tuple(layer for _, layer in sorted(recorder.layers.items())), width, logits


class _Recorder:
    """Attends as the model does, and notes the shape of each of the decoder's layers."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self.layers: dict[int, AttentionLayer] = {}
        self.caches: tuple[OwnCache, ...] = ()

    def attention(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        of = next((cache for cache in self.caches if cache.attending is not None), None)
        if of is not None:  # None: the encoder attends
            layer = AttentionLayer(
                index=attending_layer(module, of) or 0,
                num_query_heads=query.shape[1],
                num_kv_heads=key.shape[1],
                key_dim=key.shape[3],
                value_dim=value.shape[3],
                window=None,
                scale=attention_options(module, query, kwargs)["scale"],
            )
            if self.layers.setdefault(layer.index, layer) != layer:
                raise ConfigurationError(
                    f"a model of type {self._kind} cannot be served: the two kinds of attention of layer {layer.index} have unlike sizes"
                )
        return eagerly(module, query, key, value, *args, **kwargs)


def _difference(found: CrossedModel, expected: dict[str, torch.Tensor]) -> float:
    plan = plan_cache(found.layers, _BLOCK)
    tokens = _tokens(found.model)
    columns = {name: -(-sum(lengths) // _BLOCK) for name, lengths in _SIDES.items()}
    device = found.model.device
    # Blocks that nothing has written hold NaN.
    shape = plan.shape(1 + sum(columns.values()))
    tensor = torch.full(shape, float("nan"), dtype=found.model.dtype, device=device)
    tensor[0] = 0
    forward = CrossedForward(msgspec.structs.replace(found, never=()), tensor, plan)
    encoding = EncodedPrompts(found)
    rows = RequestRows(len(_SIDES), max(map(sum, _SIDES.values())) + 1, _BLOCK, 1)
    free = iter(range(1, shape[0]))
    for name, (read, written) in tokens.items():
        blocks = [next(free) for _ in range(columns[name])]
        rows.add(name, read + written, len(read) + len(found.opening), [blocks])
    most = 0.0
    for step in _STEPS:
        batch, scheduled = build_batch(rows, step, {}, set(), _BLOCK, device)
        batch = encoding.prepare(batch, scheduled, rows, StepOnDevice(lambda _: None))  # type: ignore[arg-type, return-value]
        assert batch.encoder_lens is not None
        whose = np.repeat(np.arange(batch.num_requests), np.diff(batch.host_query_start))
        places = batch.host.positions - batch.encoder_lens[whose]
        wanted = np.flatnonzero(places >= 0)
        batch = dataclasses.replace(
            batch, logit_rows=to_device(wanted, device), host=dataclasses.replace(batch.host, logit_rows=wanted)
        )
        logits = forward(batch, None).float()
        for ours, row in zip(logits, wanted.tolist(), strict=True):
            theirs = expected[scheduled.req_ids[whose[row]]][places[row]]
            error = float((ours - theirs).abs().amax() / theirs.abs().amax())
            most = error if not error <= most else most
        for index, row in enumerate(scheduled.rows.tolist()):
            rows.num_computed[row] = batch.host_context_lens[index]
    return most
