"""A model that keeps states, in one run and in parts: the logits must be the same.

What a model does between its attention and its mixers is not looked at. If any of that depended on other tokens too, or a state
did not hold all that the next token needs, a request's answer would be wrong as soon as its prompt is cut, and nothing would show.
So this is tried before the model serves a request, in blocks that are full of NaN where nothing was written.
"""

from __future__ import annotations

import logging

import msgspec
import torch
from transformers import PreTrainedModel

from tandem.engine.model.attention.gathered import GatheredAttention
from tandem.engine.model.attention.layers import AttentionLayer, plan_cache
from tandem.engine.model.batching import build_batch
from tandem.engine.model.recurrent.layout import LayerStates
from tandem.engine.model.recurrent.mixers import Mixers, OwnCache
from tandem.engine.model.states import RequestRows
from tandem.wire.errors import ConfigurationError, TandemError

log = logging.getLogger(__name__)

_BLOCK = 4
_LENGTHS = {"a": 23, "b": 9}
# Tokens of each request in each step: begun and gone on with, alone and together, one token and more.
_STEPS = ({"a": 5}, {"a": 1, "b": 1}, {"a": 3, "b": 2}, {"a": 1, "b": 1}, {"a": 13, "b": 5})
# Relative to the largest logit. In half precision two ways to the same result round at different places.
_TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 0.1, torch.float16: 0.05}


def checked(
    model: PreTrainedModel, layers: tuple[AttentionLayer, ...], mixers: Mixers, vocab_size: int
) -> Mixers:
    """The mixers as they can be computed: a chunk at once, or a token at a time. Raises ConfigurationError where neither is right."""
    name = model.config.get_text_config().model_type
    stepwise = msgspec.structs.replace(mixers, stepwise=True)
    try:
        with torch.inference_mode():
            if _largest_difference(model, layers, mixers, vocab_size) <= _TOLERANCE[model.dtype]:
                return mixers
            error = _largest_difference(model, layers, stepwise, vocab_size)
    except TandemError:
        raise
    except (
        Exception
    ) as problem:  # whatever a model's code raises that does not expect its rows to be taken apart
        lines = str(problem).strip().splitlines()
        raise ConfigurationError(
            f"a model of type {name} cannot be served: its states cannot be kept for each request by itself "
            f"({lines[0] if lines else type(problem).__name__})"
        ) from problem
    if error <= _TOLERANCE[model.dtype]:
        log.info("%s: a prompt that takes more than one step goes on token by token", name)
        return stepwise
    raise ConfigurationError(
        f"a model of type {name} cannot be served: a prompt that is read in parts gives other logits than one that is read "
        f"at once (they differ by {error:.2g} of the largest), so it keeps something that Tandem does not know"
    )


def _largest_difference(
    model: PreTrainedModel, layers: tuple[AttentionLayer, ...], mixers: Mixers, vocab_size: int
) -> float:
    from tandem.engine.model.transformers_forward import TransformersForward

    plan = plan_cache(layers, _BLOCK, mixers.layout, model.dtype)
    columns = {req_id: -(-length // _BLOCK) for req_id, length in _LENGTHS.items()}
    per_request = {req_id: count * len(plan.groups) + plan.state_blocks for req_id, count in columns.items()}
    tensor = torch.full(
        plan.shape(1 + sum(per_request.values())), float("nan"), dtype=model.dtype, device=model.device
    )
    tensor[0] = 0
    attention = GatheredAttention(tensor, plan)
    whole = TransformersForward(model, attention, mixers.num_layers)
    parts = TransformersForward(
        model, attention, mixers.num_layers, mixers, LayerStates(tensor, mixers.layout)
    )

    def run(steps: tuple[dict[str, int], ...], in_parts: bool) -> dict[str, torch.Tensor]:
        rows = RequestRows(2, max(_LENGTHS.values()) + 1, _BLOCK, len(plan.groups), plan.state_blocks)
        free = iter(range(1, 1 + sum(per_request.values())))
        for seed, (req_id, length) in enumerate(_LENGTHS.items()):
            tokens = [(7 + 13 * seed + 5 * i * i) % vocab_size for i in range(length)]
            tables = [[next(free) for _ in range(columns[req_id])] for _ in plan.groups]
            tables += [[next(free) for _ in range(plan.state_blocks)]] if plan.state_blocks else []
            # One token more than there are: so each of these predicts one of the prompt, and its logits are wanted.
            rows.add(req_id, tokens, length + 1, tables)
        everyone = {rows.row(req_id) for req_id in _LENGTHS}
        found: dict[str, list[torch.Tensor]] = {req_id: [] for req_id in _LENGTHS}
        for step in steps:
            batch, scheduled = build_batch(rows, step, {}, everyone, _BLOCK, tensor.device)
            if in_parts:
                logits = parts(batch, None)
            else:
                paged = attention.begin(batch)
                cache = OwnCache(model.config)
                logits = whole.compute(
                    batch.token_ids, batch.positions, paged, None, batch.logit_rows, None, cache
                )
            logits = logits.float().clone()
            for index, req_id in enumerate(scheduled.req_ids):
                begin, end = (int(n) for n in scheduled.query_start[index : index + 2])
                found[req_id].append(logits[begin:end])
                rows.num_computed[rows.row(req_id)] += end - begin
        return {req_id: torch.cat(pieces) for req_id, pieces in found.items()}

    expected = run(tuple({req_id: length} for req_id, length in _LENGTHS.items()), in_parts=False)
    tensor[1:] = float("nan")
    found = run(_STEPS, in_parts=True)
    differences = torch.cat(
        [(found[r] - expected[r]).abs().amax(-1) / expected[r].abs().amax() for r in found]
    )
    # A token that an expert's gate sends elsewhere, by rounding alone, is far off. What is wrong is wrong from there on.
    which = differences.max() if model.dtype == torch.float32 else differences.median()
    return float(which)
