"""The same bits on a GPU: what decides the order of sums, and a trial on the card itself, before the model serves."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from pathlib import Path

import torch

from tandem.engine.model.batching import RequestRows, build_batch
from tandem.engine.model.cuda import triton_ops
from tandem.engine.model.cuda.flashinfer import FlashInferAttention
from tandem.engine.model.runner import Forward
from tandem.machine.digests import digest_of

_LIBRARIES = ("triton", "flashinfer-python")
# One request is longer than a tile of products, and than one of attention.
_LENGTHS = {"a": 150, "b": 41}
_IN_PARTS: tuple[dict[str, int], ...] = (
    {"a": 5}, {"a": 1, "b": 1}, {"a": 70, "b": 3}, {"a": 1, "b": 20}, {"a": 73, "b": 17},
)  # fmt: skip


def way_of_computing(device: torch.device, block_size: int) -> str:
    """Equal names give equal bits. Where a window begins, tiles begin with its first block, so the blocks' size is part of it."""
    made_by = [f"{name}-{importlib.metadata.version(name)}" for name in _LIBRARIES]
    ours = digest_of(Path(triton_ops.__file__))[:12]
    card = torch.cuda.get_device_name(device).replace(" ", "-")
    return "-".join([card, f"torch-{torch.__version__}", *made_by, ours, f"blocks-of-{block_size}"])


def first_other_bits(
    attention: FlashInferAttention, forward: Forward, replayed: Forward, max_model_len: int
) -> str | None:
    """Computes two requests each alone and in one piece, and then in parts, beside each other, with and without recorded steps. Returns
    where a logit has other bits; None if none has. The cache must be empty, and is so again afterwards."""
    tensor, plan = attention.tensor, attention.plan
    of_each = (tensor.shape[0] - 1) // (len(_LENGTHS) * len(plan.groups))
    most = min(of_each * plan.block_size, max_model_len - 1)
    columns = -(-min(most, max(_LENGTHS.values())) // plan.block_size)

    def run(compute: Forward, steps: Sequence[dict[str, int]]) -> dict[str, torch.Tensor]:
        rows = RequestRows(len(_LENGTHS), columns * plan.block_size + 1, plan.block_size, len(plan.groups))
        free = iter(range(1, tensor.shape[0]))
        for req_id, length in _LENGTHS.items():
            tokens = [(3 + 7 * place * place) % 97 for place in range(min(most, length))]
            # The prompt counts one token more than it has, so that every token gets logits.
            tables = [[next(free) for _ in range(columns)] for _ in plan.groups]
            rows.add(req_id, tokens, len(tokens) + 1, tables)
        everyone = {rows.row(req_id) for req_id in _LENGTHS}
        found: dict[str, list[torch.Tensor]] = {req_id: [] for req_id in _LENGTHS}
        for step in steps:
            left = {req_id: int((rows.num_tokens - rows.num_computed)[rows.row(req_id)]) for req_id in step}
            work = {req_id: min(count, left[req_id]) for req_id, count in step.items() if left[req_id]}
            if not work:
                continue
            batch, scheduled = build_batch(rows, work, {}, everyone, plan.block_size, tensor.device)
            logits = compute(batch, None)
            for index, req_id in enumerate(scheduled.req_ids):
                begin, end = (int(n) for n in scheduled.query_start[index : index + 2])
                found[req_id].append(logits[begin:end].clone())
                rows.num_computed[rows.row(req_id)] += end - begin
        return {req_id: torch.cat(each) for req_id, each in found.items()}

    try:
        alone = run(forward, [{req_id: length} for req_id, length in _LENGTHS.items()])
        for compute, how in ((forward, "in parts and in a batch"), (replayed, "in recorded steps")):
            for req_id, logits in run(compute, _IN_PARTS).items():
                if not torch.equal(logits, alone[req_id]):
                    return how
    finally:
        tensor[1 : 1 + len(_LENGTHS) * columns * len(plan.groups)].zero_()
    return None
