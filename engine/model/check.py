"""Checks before a model serves that its logits are the same in one run and in chunks, alone and in a batch with other requests.

Probing looks only at attention and mixers. If anything else in the model depended on other tokens or on the number of rows before a
token, or if a state lacked something that the next token needs, answers would be silently wrong as soon as a prompt is cut or a
batch has two requests.
"""

from __future__ import annotations

import logging

import msgspec
import torch
from transformers import PreTrainedModel

from tandem.base.errors import ConfigurationError, TandemError
from tandem.engine.cache.group_manager import AttentionKind, KVCacheGroup
from tandem.engine.model.attention.interface import PAGED, PROBED, AttentionCall, attend_by
from tandem.engine.model.attention.kernel import attend
from tandem.engine.model.attention.layers import plan_cache
from tandem.engine.model.batching import RequestRows, build_batch
from tandem.engine.model.caches import OwnCache
from tandem.engine.model.compressed import gathering
from tandem.engine.model.transformers_forward import ModelParts, TransformersForward

log = logging.getLogger(__name__)

_BLOCK = 4
_LENGTHS = {"a": 23, "b": 9}
# The tokens of each request in each step: first and later chunks, alone and together, of one token and of several.
_STEPS = ({"a": 5}, {"a": 1, "b": 1}, {"a": 3, "b": 2}, {"a": 1, "b": 1}, {"a": 13, "b": 5})
# Relative to the largest logit. In half precision two correct computations round at different places.
_TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
# The lengths of two requests in one batch. The second begins far along (at most _FAR), which exposes a model that counts positions from the
# first row.
_BESIDE = (5, 7)
_FAR = 1 << 20


def checked(model: PreTrainedModel, parts: ModelParts, vocab_size: int) -> ModelParts:
    """Returns the parts with how they must be computed. Raises a ConfigurationError if no way gives the right logits."""
    name = model.config.get_text_config().model_type
    try:
        with torch.inference_mode():
            if parts.mixers is None and parts.own is None:
                return _counted(model, parts, vocab_size)
            return _cut_up(model, parts, vocab_size)
    except TandemError:
        raise
    # A model's code may raise anything when its rows are taken apart.
    except Exception as problem:
        lines = str(problem).strip().splitlines()
        what = "states" if parts.mixers is not None else "tokens"
        raise ConfigurationError(
            f"a model of type {name} cannot be served: its {what} cannot be kept for each request by itself "
            f"({lines[0] if lines else type(problem).__name__})"
        ) from problem


def _cut_up(model: PreTrainedModel, parts: ModelParts, vocab_size: int) -> ModelParts:
    """Checks a model with mixers or layers that attend by their own code: with chunks, and else one token at a time."""
    name, tolerance = model.config.get_text_config().model_type, _TOLERANCE[model.dtype]
    error = _difference_in_parts(model, parts, vocab_size)
    if error <= tolerance:
        return parts
    if parts.mixers is not None:
        stepwise = msgspec.structs.replace(parts, mixers=parts.mixers.token_by_token())
        error = _difference_in_parts(model, stepwise, vocab_size)
        if error <= tolerance:
            log.info("%s: a prompt that takes more than one step goes on token by token", name)
            return stepwise
    raise ConfigurationError(
        f"a model of type {name} cannot be served: a prompt that is read in parts gives other logits than one that is read "
        f"at once (they differ by {error:.2g} of the largest), so it keeps something that Tandem does not know"
    )


def _difference_in_parts(model: PreTrainedModel, parts: ModelParts, vocab_size: int) -> float:
    layout = parts.mixers.layout if parts.mixers is not None else None
    plan = plan_cache(parts.layers, _BLOCK, layout, model.dtype)
    columns = {req_id: -(-length // _BLOCK) for req_id, length in _LENGTHS.items()}
    per_request = {req_id: count * len(plan.groups) + plan.state_blocks for req_id, count in columns.items()}
    # Blocks that nothing has written hold NaN.
    tensor = torch.full(plan.shape(1 + sum(per_request.values())), float("nan"), dtype=model.dtype, device=model.device)
    tensor[0] = 0
    attention = gathering(tensor, plan, parts.latents)
    states = parts.mixers.bound_to(tensor) if parts.mixers is not None else None
    cut = TransformersForward(model, attention, parts, states)

    def run(steps: tuple[dict[str, int], ...], in_parts: bool) -> dict[str, torch.Tensor]:
        rows = RequestRows(2, max(_LENGTHS.values()) + 1, _BLOCK, len(plan.groups), plan.state_blocks)
        free = iter(range(1, 1 + sum(per_request.values())))
        for seed, (req_id, length) in enumerate(_LENGTHS.items()):
            tokens = [(7 + 13 * seed + 5 * i * i) % vocab_size for i in range(length)]
            tables = [[next(free) for _ in range(columns[req_id])] for _ in plan.groups]
            tables += [[next(free) for _ in range(plan.state_blocks)]] if plan.state_blocks else []
            # The prompt counts one token more than it has, so that every token predicts a prompt token and gets logits.
            rows.add(req_id, tokens, length + 1, tables)
        everyone = {rows.row(req_id) for req_id in _LENGTHS}
        found: dict[str, list[torch.Tensor]] = {req_id: [] for req_id in _LENGTHS}
        for step in steps:
            batch, scheduled = build_batch(rows, step, {}, everyone, _BLOCK, tensor.device)
            if in_parts:
                logits = cut(batch, None)
            else:
                own = OwnCache(model.config)
                logits = cut.compute(
                    batch.token_ids, batch.positions, attention.begin(batch), None, batch.logit_rows, own
                )
            logits = logits.float().clone()
            for index, req_id in enumerate(scheduled.req_ids):
                begin, end = (int(n) for n in scheduled.query_start[index : index + 2])
                found[req_id].append(logits[begin:end])
                rows.num_computed[rows.row(req_id)] += end - begin
        return {req_id: torch.cat(pieces) for req_id, pieces in found.items()}

    # Layers that attend by their own code need transformers' mask.
    attend_by(model, PROBED)
    expected = run(tuple({req_id: length} for req_id, length in _LENGTHS.items()), in_parts=False)
    attend_by(model, PAGED)
    tensor[1:] = float("nan")
    found = run(_STEPS, in_parts=True)
    return _difference(model, list(found.values()), list(expected.values()))


def _difference(model: PreTrainedModel, found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    each = torch.cat(
        [(ours - theirs).abs().amax(-1) / theirs.abs().amax() for ours, theirs in zip(found, expected, strict=True)]
    )
    # Rounding alone may send a token to another expert, whose logits are then far off. A real mistake also spoils the tokens after
    # it.
    return float(each.max() if model.dtype == torch.float32 else each.median())


def _counted(model: PreTrainedModel, parts: ModelParts, vocab_size: int) -> ModelParts:
    """Finds out whether the model uses the positions that it is given, or counts rows on from its cache's length."""
    config = model.config.get_text_config()
    longest = getattr(config, "max_position_embeddings", None) or _FAR
    begins = (0, max(0, min(int(longest), _FAR) - _BESIDE[1]))
    positions = [torch.arange(count, device=model.device) + begin for begin, count in zip(begins, _BESIDE, strict=True)]
    tokens = [(7 + 5 * place * place) % vocab_size for place in positions]
    plan = plan_cache(parts.layers, _BLOCK)
    nothing = torch.zeros(plan.shape(1), dtype=model.dtype, device=model.device)
    attention = gathering(nothing, plan, parts.latents)
    alone = []
    for begin, mine, place in zip(begins, tokens, positions, strict=True):
        forward = TransformersForward(model, attention, parts)
        step = _AmongRows(parts, place, torch.zeros_like(place))
        alone.append(forward.compute(mine, place, step, cache=OwnCache(model.config, begin)).float().clone())
    everywhere = torch.cat(positions)
    whose = torch.repeat_interleave(torch.arange(2, device=model.device), torch.tensor(_BESIDE, device=model.device))
    error = 0.0
    for counts in (False, True):
        tried = msgspec.structs.replace(parts, counts=counts)
        forward = TransformersForward(model, attention, tried)
        step = _AmongRows(parts, everywhere, whose)
        together = forward.compute(torch.cat(tokens), everywhere, step).float()
        error = _difference(model, [together[: _BESIDE[0]], together[_BESIDE[0] :]], alone)
        if error <= _TOLERANCE[model.dtype]:
            return tried
    raise ConfigurationError(
        f"a model of type {config.model_type} cannot be served: two requests beside each other give other logits than each alone "
        f"(they differ by {error:.2g} of the largest), so its layers look at more than Tandem tells them"
    )


class _AmongRows:
    """A step's attention without a cache: each request sees only its own rows. See AttentionStep."""

    def __init__(self, parts: ModelParts, positions: torch.Tensor, whose: torch.Tensor) -> None:
        self._of = {layer.index: layer for layer in parts.layers}
        self._positions, self._whose = positions, whose

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, how: AttentionCall
    ) -> torch.Tensor:
        asks, keys = self._positions[:, None], self._positions[None]
        seen = (self._whose[:, None] == self._whose[None]) & (keys <= asks)
        window, chunked = self._of[layer].window, self._of[layer].chunked
        if window is not None:
            kind = AttentionKind.CHUNKED if chunked else AttentionKind.SLIDING
            seen &= keys >= KVCacheGroup(kind, 1, (), window).first_read(asks)
        out = attend(
            query[None],
            key[None],
            value[None],
            mask=seen,
            causal=False,
            scale=how.scale,
            softcap=how.softcap,
            sinks=how.sinks,
        )
        return out[0].transpose(0, 1)
