"""Makes vLLM's noise a function of a request's seed and the token's position, as everywhere in Tandem, so that a sampled answer goes on at
another node as it would have gone on here.

vLLM draws a request's noise from one generator, which begins with its seed and moves on with every step. Here it is set before each step
in which the request samples. A request that is in the middle of its prompt samples in vLLM's step too, and the token is thrown away; it
then draws from the batch's generator, because on CPUs vLLM cannot take such a draw back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from tandem.engine.vllm.requests import VllmRequest

_SEEDS = 1 << 63


def seed_at(seed: int, position: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {position}".encode()).digest()[:8], "big") % _SEEDS


def seed_every_step(core: Any, live: Mapping[str, VllmRequest]) -> None:
    """Does nothing for a runner of another process, or one that has no generators."""
    executor = core.model_executor
    worker = getattr(getattr(executor, "driver_worker", None), "worker", None)
    runner: Any = getattr(worker, "model_runner", None)
    if not hasattr(getattr(runner, "input_batch", None), "generators"):
        return
    sample = executor.sample_tokens

    def sample_tokens(*args: Any, **named: Any) -> Any:
        batch, held = runner.input_batch, {}
        for index, generator in list(batch.generators.items()):
            request = live.get(batch.req_ids[index])
            if runner.discard_request_mask.np[index]:
                held[index] = batch.generators.pop(index)
            elif request is not None:
                position = request.theirs.num_computed_tokens
                generator.manual_seed(seed_at(request.ours.facts.sampling.seed, position))
        try:
            return sample(*args, **named)
        finally:
            batch.generators.update(held)

    executor.sample_tokens = sample_tokens
