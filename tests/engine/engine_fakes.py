"""A model runner without a model: a request's next token is a function of its number of tokens."""

from __future__ import annotations

from tandem.base.errors import TandemError
from tandem.engine.cache.group_manager import AttentionKind, KVCacheGroup
from tandem.engine.config import CacheConfig, SchedulerConfig
from tandem.engine.model.runner import FinishedStep, LayerHooks, ModelInfo
from tandem.engine.scheduling.output import ModelOutput, SchedulerOutput
from tandem.engine.scheduling.scheduler import Scheduler
from tandem.kvtransfer.base import SchedulerConnector

EOS = 2
BLOCK_SIZE = 4
VECTOR = bytes(range(32))


def token_at(position: int) -> int:
    return 100 + position % 1000


class FakeRunner:
    def __init__(self, num_blocks: int = 64, max_model_len: int = 256) -> None:
        self.info = ModelInfo(
            name="fake", dtype="float32", device="cpu", vocab_size=2000, max_model_len=max_model_len,
            eos_token_ids=frozenset({EOS}), num_layers=1, num_kv_heads=1, head_dim=8,
            groups=(KVCacheGroup(AttentionKind.FULL, BLOCK_SIZE, (0,)),), num_blocks=num_blocks
        )  # fmt: skip
        self.kv_cache = None
        self.kv_in_memory = 0
        self.grammars = None
        self.adapters = None
        self.states_wait = False
        self.tokens: dict[str, int] = {}  # request id -> how many tokens it has
        self.error: Exception | None = None
        self.failing: dict[str, TandemError] = {}  # requests that the model can make nothing of
        self.preempted: list[str] = []  # the requests that the runner was told are preempted
        self.pooled: set[str] = set()  # the requests that end in a vector

    def forget_requests(self) -> None:
        self.tokens.clear()

    def start(self, step: SchedulerOutput, hooks: LayerHooks | None = None) -> FinishedStep:
        return FinishedStep(self._execute(step))

    def _execute(self, step: SchedulerOutput) -> ModelOutput:
        if self.error is not None:
            raise self.error
        for req_id in step.finished_req_ids:
            self.tokens.pop(req_id, None)
        self.preempted += step.preempted_req_ids
        computed: dict[str, int] = {}
        for new in step.new_reqs:
            self.tokens[new.req_id] = len(new.token_ids)
            computed[new.req_id] = new.num_computed_tokens
            if new.facts.pooling is not None:
                self.pooled.add(new.req_id)
        cached = step.cached_reqs
        for req_id, before in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            if req_id in cached.resumed_req_ids:
                self.tokens[req_id] = len(cached.resumed_token_ids[req_id])
            computed[req_id] = before
        sampled: dict[str, list[int]] = {}
        vectors: dict[str, bytes] = {}
        for req_id, count in step.num_scheduled_tokens.items():
            if computed[req_id] + count < self.tokens[req_id] or req_id in self.failing:
                continue
            if req_id in self.pooled:
                vectors[req_id] = VECTOR
            else:
                sampled[req_id] = [token_at(self.tokens[req_id])]
                self.tokens[req_id] += 1
        errors = {id: error for id, error in self.failing.items() if id in step.num_scheduled_tokens}
        return ModelOutput(sampled, errors=errors, vectors=vectors)


def make_scheduler(
    runner: FakeRunner, connector: SchedulerConnector | None = None, config: SchedulerConfig | None = None
) -> Scheduler:
    return Scheduler(
        config or SchedulerConfig(max_num_batched_tokens=64), CacheConfig(block_size=BLOCK_SIZE),
        groups=runner.info.groups, num_blocks=runner.info.num_blocks, max_model_len=runner.info.max_model_len,
        eos_token_ids=runner.info.eos_token_ids, connector=connector
    )  # fmt: skip
