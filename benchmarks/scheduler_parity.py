"""Whether the scheduler decides like vLLM's, which it follows: random runs through both, compared step by step.

    PYTHONPATH=. PYTHON_WITH_VLLM_0.19 -m benchmarks.scheduler_parity MODEL [--runs N] [--first N]

Runs in an environment with vLLM 0.19 and, for Tandem's side, msgspec, cbor2 and xxhash. MODEL is a local folder whose configuration vLLM reads;
nothing of it is loaded. In every step both must agree on who is scheduled, in which order, for how many tokens, in which blocks, with which
drafts, and on who is preempted, resumed and reported as finished. After every step the free queues must be equal to the last block.

Two differences are intended and left out of the runs: a request here may not grow beyond what the pool can hold, and blocks that were cached for a
step that was taken back are forgotten.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import random
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
import vllm.config as theirs
from vllm.sampling_params import SamplingParams as TheirSampling
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler as TheirScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request as TheirRequest
from vllm.v1.request import RequestStatus as TheirStatus
from vllm.v1.structured_output import StructuredOutputManager

from benchmarks.lib.harness import parser_of, report, run
from tandem.engine.cache.group_manager import AttentionKind, KVCacheGroup
from tandem.engine.config import CacheConfig, Reserve, SchedulerConfig, SchedulingPolicy
from tandem.engine.request import Request, RequestStatus
from tandem.engine.scheduling.output import ModelOutput
from tandem.engine.scheduling.scheduler import Scheduler
from tandem.wire.requests import RequestFacts
from tandem.wire.sampling import SamplingParams

CONTEXT = 512
REQUESTS = 25
STEPS = 150
Groups = list[tuple[AttentionKind, int | None]]
FULL, SLIDING = AttentionKind.FULL, AttentionKind.SLIDING


@dataclasses.dataclass(frozen=True)
class Settings:
    """What both schedulers are made with."""

    groups: Groups
    block_size: int
    blocks: int
    policy: str
    seqs: int
    budget: int
    threshold: int
    caching: bool
    reserve: Reserve

    @classmethod
    def drawn(cls, draw: random.Random) -> Settings:
        two = [(FULL, None), (SLIDING, draw.choice([5, 8, 13]))]
        choices: list[Groups] = [[(FULL, None)], [(FULL, None)], two, [(SLIDING, draw.choice([5, 9]))]]
        groups = draw.choice(choices)
        # With a window, vLLM's asks for blocks that become free again while the prompt is computed.
        windowed = any(window is not None for _, window in groups)
        return cls(
            groups,
            block_size=draw.choice([4, 8]),
            blocks=draw.choice([12, 20, 40, 80]),
            policy=draw.choice(["fcfs", "priority"]),
            seqs=draw.choice([2, 4, 8]),
            budget=draw.choice([8, 24, 64, 256]),
            threshold=draw.choice([0, 0, 6]),
            caching=len(groups) > 1 or draw.random() < 0.8,
            reserve=Reserve.NONE if windowed else draw.choice([Reserve.NONE, Reserve.PROMPT]),
        )


def our_scheduler(given: Settings) -> Scheduler:
    return Scheduler(
        SchedulerConfig(
            policy=SchedulingPolicy(given.policy),
            max_num_seqs=given.seqs,
            max_num_batched_tokens=given.budget,
            long_prefill_token_threshold=given.threshold,
            reserve=given.reserve,
        ),
        CacheConfig(block_size=given.block_size, prefix_caching=given.caching),
        [KVCacheGroup(kind, given.block_size, (i,), window) for i, (kind, window) in enumerate(given.groups)],
        given.blocks,
        CONTEXT,
        frozenset({2}),
    )


def their_scheduler(given: Settings, model: theirs.ModelConfig) -> Any:
    cache = theirs.CacheConfig(block_size=given.block_size, enable_prefix_caching=given.caching)
    cache.num_gpu_blocks = given.blocks
    config = theirs.VllmConfig(
        model_config=model,
        scheduler_config=theirs.SchedulerConfig(
            max_num_seqs=given.seqs,
            max_num_batched_tokens=given.budget,
            max_model_len=CONTEXT,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=False,
            long_prefill_token_threshold=given.threshold,
            policy=given.policy,
            scheduler_reserve_full_isl=given.reserve is Reserve.PROMPT,
        ),
        cache_config=cache,
        device_config=theirs.DeviceConfig("cpu"),
    )
    layout: dict[str, Any] = {"block_size": given.block_size, "num_kv_heads": 1, "head_size": 64}
    layout["dtype"] = torch.bfloat16
    specs = [
        FullAttentionSpec(**layout) if kind is FULL else SlidingWindowSpec(sliding_window=window, **layout)
        for kind, window in given.groups
    ]
    groups = [KVCacheGroupSpec([f"layer {i}"], spec) for i, spec in enumerate(specs)]
    return TheirScheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks=given.blocks, kv_cache_tensors=[], kv_cache_groups=groups),
        block_size=given.block_size,
        log_stats=False,
        structured_output_manager=StructuredOutputManager(config),
    )


class Pair:
    """Both schedulers, with the same requests and settings."""

    def __init__(self, draw: random.Random, model: theirs.ModelConfig) -> None:
        given = Settings.drawn(draw)
        self.ours, self.theirs = our_scheduler(given), their_scheduler(given, model)
        self._hasher = get_request_block_hasher(given.block_size, sha256) if given.caching else None

    def add(self, name: str, prompt: list[int], max_tokens: int, priority: int, arrival: float) -> None:
        self.ours.add_request(
            Request(
                name,
                RequestFacts(
                    prompt_token_ids=prompt,
                    sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
                    priority=priority,
                ),
                arrival_time=arrival,
            )
        )
        self.theirs.add_request(
            TheirRequest(
                request_id=name,
                prompt_token_ids=prompt,
                sampling_params=TheirSampling(max_tokens=max_tokens, ignore_eos=True, temperature=0),
                pooling_params=None,
                block_hasher=self._hasher,
                priority=priority,
                arrival_time=arrival,
            )
        )

    def abort(self, name: str) -> None:
        self.ours.finish_requests([name], RequestStatus.FINISHED_ABORTED)
        self.theirs.finish_requests(name, TheirStatus.FINISHED_ABORTED)

    def step(self, draw: random.Random) -> dict[str, Any]:
        """Runs one step through both. Returns where they differ."""
        step, other = self.ours.schedule(), self.theirs.schedule()
        mine, yours = _ours_of(step), _theirs_of(other)
        different = {name: (mine[name], yours[name]) for name in mine if mine[name] != yours[name]}
        if different:
            return different
        sampled: dict[str, list[int]] = {}
        for name in step.num_scheduled_tokens:
            request = self.ours.requests[name]
            if request.num_computed_tokens >= request.num_tokens:
                accepted = draw.randrange(len(step.spec_token_ids.get(name, ())) + 1)
                sampled[name] = [draw.randrange(100) for _ in range(1 + accepted)]
        drafts = {
            name: [draw.randrange(100) for _ in range(draw.randrange(1, 4))] for name in sampled if draw.random() < 0.3
        }
        names = list(step.num_scheduled_tokens)
        self.theirs.update_from_output(
            other,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: i for i, name in enumerate(names)},
                sampled_token_ids=[list(sampled.get(name, ())) for name in names],
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=[],
            ),
        )
        self.ours.update_from_output(step, ModelOutput(sampled, draft_token_ids=drafts))
        for name, proposal in drafts.items():
            if name in self.theirs.requests:
                self.theirs.requests[name].spec_token_ids = list(proposal)
        self.ours.check_integrity()
        queue = self.theirs.kv_cache_manager.block_pool.free_block_queue
        free = (list(self.ours.state.cache.pool.free_queue), [block.block_id for block in queue.get_all_free_blocks()])
        return {} if free[0] == free[1] else {"free queue": free}


def _ours_of(step: Any) -> dict[str, Any]:
    cached = step.cached_reqs
    return {
        "scheduled": list(step.num_scheduled_tokens.items()),
        "new": [(new.req_id, new.block_ids, new.num_computed_tokens) for new in step.new_reqs],
        "known": list(zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True)),
        "resumed": cached.resumed_req_ids,
        "drafts": step.spec_token_ids,
        "finished": step.finished_req_ids,
        "preempted": step.preempted_req_ids,
    }


def _theirs_of(step: Any) -> dict[str, Any]:
    def plain(blocks: Any) -> list[list[int]] | None:
        return None if blocks is None else [list(ids) for ids in blocks]

    cached = step.scheduled_cached_reqs
    return {
        "scheduled": list(step.num_scheduled_tokens.items()),
        "new": [(r.req_id, plain(r.block_ids), r.num_computed_tokens) for r in step.scheduled_new_reqs],
        "known": [
            (name, computed, plain(blocks))
            for name, computed, blocks in zip(
                cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
            )
        ],
        "resumed": set(cached.resumed_req_ids),
        "drafts": {name: list(drafts) for name, drafts in step.scheduled_spec_decode_tokens.items()},
        "finished": set(step.finished_req_ids),
        "preempted": set(step.preempted_req_ids or ()),
    }


def compare(number: int, model: theirs.ModelConfig) -> tuple[int, int, dict[str, Any]]:
    """Returns the numbers of steps and preemptions, and where the last step differed."""
    draw = random.Random(number)
    pair = Pair(draw, model)
    prefixes = [[draw.randrange(100) for _ in range(40)] for _ in range(2)]
    arrived = steps = 0
    while steps < STEPS and (arrived < REQUESTS or pair.ours.has_unfinished_requests()):
        steps += 1
        while arrived < REQUESTS and draw.random() < 0.4:
            prefix = draw.choice(prefixes)[: draw.randrange(30)]
            prompt = prefix + [draw.randrange(100) for _ in range(draw.randrange(1, 20))]
            max_tokens = draw.randrange(1, 15)
            room = pair.ours.max_model_len - max_tokens - 6
            if room > 0:
                pair.add(f"r{arrived:03}", prompt[:room], max_tokens, draw.randrange(-1, 2), float(arrived))
            arrived += 1
        if pair.ours.requests and draw.random() < 0.05:
            pair.abort(draw.choice(sorted(pair.ours.requests)))
        if different := pair.step(draw):
            return steps, pair.ours.stats().preemptions, different
    return steps, pair.ours.stats().preemptions, {}


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("model")
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--first", type=int, default=0, help="the number of the first run")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    init_none_hash(sha256)
    model = theirs.ModelConfig(model=options.model, dtype="bfloat16", max_model_len=CONTEXT, skip_tokenizer_init=True)
    total = preempted = 0
    for number in range(options.first, options.first + options.runs):
        steps, preemptions, different = compare(number, model)
        total, preempted = total + steps, preempted + preemptions
        if different:
            lines = [f"  {name}:\n    {mine}\n    {yours}" for name, (mine, yours) in different.items()]
            said = f"run {number}, step {steps}: the two differ (ours, theirs)"
            return report(options, different, said, *lines, failed=True)
    figures = {"runs": options.runs, "steps": total, "preemptions": preempted}
    return report(options, figures, f"{figures}: the same decisions, the same blocks, the same free queue")


if __name__ == "__main__":
    run(main)
