"""Drives a model runner without a scheduler: the test says what each step computes, and the driver keeps the block tables.

It hands out blocks in random order and fills freed blocks with NaN, so that a request which reads a foreign block gets a wrong answer.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.engine.config import CacheConfig, ModelConfig, SchedulerConfig
from tandem.engine.model.loading import load_runner
from tandem.engine.model.runner import LayerHooks
from tandem.engine.model.shard import Shard
from tandem.engine.model.torch_runner import TorchRunner
from tandem.engine.scheduling.output import (
    CachedRequestData,
    EncoderInput,
    ModelOutput,
    NewRequestData,
    SchedulerOutput,
)
from tandem.wire.images import MediaFeature
from tandem.wire.pooling import Pooling
from tandem.wire.requests import RequestFacts
from tandem.wire.sampling import SamplingParams, TokenLogprobs

GREEDY = SamplingParams(temperature=0.0)


def load(
    path: Path | str, shard: Shard | None = None, *, native: bool = True, kept: Any = "auto", **settings: Any
) -> TorchRunner:
    """The model of this folder on one thread, with a small cache. `settings` are those of the model, the cache and the scheduler by
    their names; `kept` is the type in which the cache keeps numbers."""
    settings = {"dtype": "float32", "device": "cpu", "threads": 1, "block_size": 4, "memory_bytes": 8 << 20, "max_num_seqs": 4} | settings  # fmt: skip
    model, cache, scheduler = (
        {name: settings.pop(name) for name in kind.__struct_fields__ if name in settings}
        for kind in (ModelConfig, CacheConfig, SchedulerConfig)
    )
    assert not settings, f"no settings: {settings}"
    return load_runner(
        ModelConfig(path=str(path), **model),
        CacheConfig(dtype=kept, **cache),
        SchedulerConfig(**scheduler),
        native=native,
        shard=shard,
    )


@dataclasses.dataclass
class DrivenRequest:
    req_id: str
    tokens: list[int]
    num_prompt: int
    sampling: SamplingParams
    computed: int
    blocks: list[list[int]]  # per group; 0 for a block that was freed or never needed
    pooling: Pooling | None = None  # the request ends in a vector, not in tokens
    lora: str | None = None  # its adapter's identity
    media: Sequence[MediaFeature] = ()
    images: Sequence[bytes] = ()
    vector: list[float] | None = None
    borrowed: int = 0  # leading blocks of every group that belong to another request
    known: bool = False  # whether the runner has seen the request
    resumed: bool = False
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def pending(self) -> int:
        return len(self.tokens) - self.computed


class Driver:
    def __init__(self, runner: TorchRunner, seed: int = 0) -> None:
        self.runner = runner
        self.random = random.Random(seed)
        self.groups = runner.info.groups
        self.block_size = self.groups[0].block_size
        self.free = list(range(1, runner.info.num_blocks))
        self.random.shuffle(self.free)
        runner.kv_cache[1:] = float("nan")
        self.requests: dict[str, DrivenRequest] = {}
        self.drafts: dict[str, list[int]] = {}
        self.num_accepted = 0
        self.failing: set[str] = set()  # requests whose logits are expected to be NaN
        self.last: ModelOutput = ModelOutput({})
        self._keeps_states = any(group.blocks_per_request for group in self.groups)
        self.finished_ids: set[str] = set()
        self._preempted: set[str] = set()
        self.state_copies: list[tuple[int, int]] = []
        self._encoded: set[str] = set()

    def add(
        self,
        req_id: str,
        prompt: list[int],
        sampling: SamplingParams = GREEDY,
        *,
        output: list[int] | None = None,
        pooling: Pooling | None = None,
        prefix_of: str | None = None,
        shared_tokens: int = 0,
        lora: str | None = None,
        media: Sequence[MediaFeature] = (),
        images: Sequence[bytes] = (),
    ) -> DrivenRequest:
        """Adds a request. With `prefix_of`, its first tokens are a prefix hit and it shares that request's blocks. Recurrent states are
        copied; the other request's states must be those after these tokens."""
        request = DrivenRequest(
            req_id, prompt + (output or []), len(prompt), sampling, 0, [[] for _ in self.groups], pooling, lora, media,
            images
        )  # fmt: skip
        if prefix_of is not None:
            hit = shared_tokens // self.block_size
            other = self.requests[prefix_of]
            assert other.computed >= hit * self.block_size
            request.computed, request.borrowed = hit * self.block_size, hit
            request.blocks = [
                [] if group.blocks_per_request else list(table[:hit])
                for group, table in zip(self.groups, other.blocks, strict=True)
            ]
        self.requests[req_id] = request
        if prefix_of is not None and any(group.blocks_per_request for group in self.groups):
            assert other.computed == request.computed
            self._grow(request, request.computed)
            self.state_copies += zip(other.blocks[-1], request.blocks[-1], strict=True)
        return request

    def adopt(self, req_id: str, other: Driver) -> DrivenRequest:
        """Takes over a request from another node, and copies its computed KV block by block."""
        theirs = other.requests[req_id]
        request = DrivenRequest(
            req_id, list(theirs.tokens), theirs.num_prompt, theirs.sampling, theirs.computed, [[] for _ in self.groups],
            lora=theirs.lora, media=theirs.media, images=theirs.images
        )  # fmt: skip
        self.requests[req_id] = request
        self._grow(request, request.computed)
        for mine, given in zip(request.blocks, theirs.blocks, strict=True):
            for target, source in zip(mine, given, strict=False):
                if source:
                    self.runner.kv_cache[target] = other.runner.kv_cache[source]
        self._slide(request)  # nothing was copied into blocks that no later token reads
        return request

    def preempt(self, req_id: str) -> None:
        request = self.requests[req_id]
        self._release(request)
        request.blocks = [[] for _ in self.groups]
        request.computed, request.borrowed = 0, 0
        self.drafts.pop(req_id, None)
        if request.known:
            self._preempted.add(req_id)
            request.resumed = True

    def finish(self, req_id: str) -> DrivenRequest:
        request = self.requests.pop(req_id)
        self._release(request)
        self.finished_ids.add(req_id)
        self.drafts.pop(req_id, None)
        return request

    def finish_all(self) -> None:
        """Ends every request, and tells the runner."""
        for req_id in list(self.requests):
            self.finish(req_id)
        self.step({})

    def step(self, work: dict[str, int], hooks: LayerHooks | None = None, *, guesses: bool = True) -> ModelOutput:
        """Computes this many tokens of each request, with its drafts after its newest token. Without `guesses` the runner makes no drafts
        for the next step."""
        new: list[NewRequestData] = []
        cached = CachedRequestData()
        scheduled: dict[str, int] = {}
        drafts: dict[str, list[int]] = {}
        reached: set[str] = set()
        encoded: dict[str, EncoderInput] = {}
        for req_id, count in work.items():
            request = self.requests[req_id]
            assert 0 < count <= request.pending
            if count == request.pending:
                reached.add(req_id)
            if count == request.pending and self.drafts.get(req_id):
                drafts[req_id] = self.drafts.pop(req_id)
                count += len(drafts[req_id])
            scheduled[req_id] = count
            grown = self._grow(request, request.computed + count)
            if not request.known:
                blocks = [list(table) for table in request.blocks]
                new.append(
                    NewRequestData(
                        req_id,
                        RequestFacts(
                            prompt_token_ids=request.tokens[: request.num_prompt],
                            sampling=request.sampling,
                            lora=request.lora,
                            pooling=request.pooling,
                            media=list(request.media),
                        ),
                        list(request.tokens),
                        blocks,
                        request.computed,
                        request.media,
                    )
                )
                for part in request.media:
                    file = request.images[part.image]
                    encoded[part.identifier] = EncoderInput(part.identifier, file, part.part, part.length, part.columns)
                request.known = True
                continue
            cached.req_ids.append(req_id)
            cached.num_computed_tokens.append(request.computed)
            if request.resumed:
                cached.resumed_req_ids.add(req_id)
                cached.resumed_token_ids[req_id] = list(request.tokens)
                cached.new_block_ids.append([list(table) for table in request.blocks])
                request.resumed = False
            else:
                cached.new_block_ids.append(grown if any(grown) else None)
        started = self.runner.start(
            SchedulerOutput(
                new_reqs=new,
                cached_reqs=cached,
                num_scheduled_tokens=scheduled,
                total_num_scheduled_tokens=sum(scheduled.values()),
                spec_token_ids=drafts,
                finished_req_ids=self.finished_ids,
                preempted_req_ids=self._preempted,
                state_copies=self.state_copies,
                encoder_inputs=[one for name, one in encoded.items() if name not in self._encoded],
                draft_limits=None if guesses else {},
            ),
            hooks,
        )
        self.state_copies = []
        self._encoded |= encoded.keys()
        output = started.finish()
        self.finished_ids, self._preempted = set(), set()
        for req_id, count in scheduled.items():
            request = self.requests[req_id]
            proposed = drafts.get(req_id, [])
            request.computed += count
            assert (req_id in output.errors) == (req_id in self.failing)
            if req_id in output.errors:
                continue
            sampled = output.sampled_token_ids.get(req_id, [])
            if request.pooling is not None:
                assert not sampled
                assert (req_id in output.vectors) == (req_id in reached)
                if req_id in reached:
                    request.vector = np.frombuffer(output.vectors[req_id], "<f4").tolist()
                self._slide(request)
                continue
            if proposed:
                accepted = len(sampled) - 1
                assert sampled[:accepted] == proposed[:accepted]
                # Recurrent states are those before the drafts, and what was right is computed again.
                request.computed -= len(proposed) - (0 if self._keeps_states else accepted)
                self.num_accepted += accepted
            assert bool(sampled) == (req_id in reached)
            request.tokens.extend(sampled)
            request.logprobs.extend(output.logprobs.get(req_id, []))
            self._slide(request)
        self.drafts.update(output.draft_token_ids)
        self.last = output
        return output

    def generate(self, num_tokens: int, max_chunk: int = 1 << 30) -> dict[str, list[int]]:
        """Runs every request until it has `num_tokens` output tokens, in chunks of random size."""
        while unfinished := [r for r in self.requests.values() if len(r.output) < num_tokens]:
            work = {
                r.req_id: self.random.randint(1, min(r.pending, max_chunk)) if max_chunk < 1 << 30 else r.pending
                for r in unfinished
            }
            self.step(work)
        return {req_id: request.output[:num_tokens] for req_id, request in self.requests.items()}

    def expect(
        self, prompts: list[list[int]], tokens: list[list[int]], logprobs: list[list[float]], within: float = 2e-4
    ) -> None:
        """All prompts together, in chunks of random size. Tokens alone would hide an error that is smaller than the gap to the next best."""
        for index, prompt in enumerate(prompts):
            self.add(f"r{index}", prompt, SamplingParams(temperature=0.0, logprobs=0))
        assert list(self.generate(len(tokens[0]), max_chunk=11).values()) == tokens
        for index, expected in enumerate(logprobs):
            reported = [entry.logprob for entry in self.finish(f"r{index}").logprobs]
            assert reported[: len(expected)] == pytest.approx(expected, abs=within)
        self.step({})

    def live(self, prompts: list[list[int]], num_tokens: int) -> dict[str, list[int]]:
        """The answers to prompts that come one by one, are computed in chunks of random size beside others, and lose their blocks now and
        then for some steps."""
        waiting, paused, answers = list(range(len(prompts))), set[str](), {}
        while waiting or self.requests:
            if waiting and self.random.random() < 0.3:
                index = waiting.pop()
                self.add(str(index), prompts[index])
            for req_id in self.requests:
                if req_id in paused:
                    paused -= {req_id} if self.random.random() < 0.5 else set()
                elif self.random.random() < 0.05:
                    self.preempt(req_id)
                    paused.add(req_id)
            running = [r for r in self.requests.values() if r.req_id not in paused]
            self.step({r.req_id: self.random.randint(1, r.pending) for r in running if self.random.random() < 0.9})
            for req_id, request in list(self.requests.items()):
                if len(request.output) >= num_tokens:
                    answers[req_id] = self.finish(req_id).output
        self.step({})
        return answers

    def _grow(self, request: DrivenRequest, num_tokens: int) -> list[list[int]]:
        needed = -(-num_tokens // self.block_size)
        grown: list[list[int]] = []
        for group, table in zip(self.groups, request.blocks, strict=True):
            wanted = group.blocks_per_request or needed
            fresh = [self.free.pop() for _ in range(wanted - len(table))]
            table.extend(fresh)
            grown.append(fresh)
        return grown

    def _slide(self, request: DrivenRequest) -> None:
        """Frees the blocks that no later token reads. The runner is not told, and must not read them."""
        for group, table in zip(self.groups, request.blocks, strict=True):
            if group.window is None:
                continue
            outside = max(0, group.first_read(request.computed)) // self.block_size
            for index in range(request.borrowed, min(outside, len(table))):
                if table[index] and not self._shared(table[index], request):
                    self._give_back(table[index])
                    table[index] = 0

    def _shared(self, block: int, owner: DrivenRequest) -> bool:
        return any(block in table for other in self.requests.values() if other is not owner for table in other.blocks)

    def _release(self, request: DrivenRequest) -> None:
        for group, table in zip(self.groups, request.blocks, strict=True):
            for block in table if group.blocks_per_request else table[request.borrowed :]:
                if block and not self._shared(block, request):
                    self._give_back(block)

    def _give_back(self, block: int) -> None:
        self.runner.kv_cache[block] = float("nan")
        self.free.insert(self.random.randint(0, len(self.free)), block)


def answer_of(runner: TorchRunner, prompt: list[int], num_tokens: int, max_chunk: int = 1 << 30) -> list[int]:
    """The likeliest tokens after a prompt that runs alone."""
    driver = Driver(runner)
    driver.add("r", prompt)
    return driver.generate(num_tokens, max_chunk)["r"]
