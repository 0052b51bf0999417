"""A world for a scheduler: peers that write at any allowed time, a connector, and a model that notices wrong KV.

`test_random_runs.py` draws its events at random. A request must end in one of three ways: with the answer that it would get alone, by an
abort, or with the error that the policy for failed loads prescribes.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any

from tandem.base.errors import RequestError
from tandem.engine.cache.group_manager import AttentionKind, KVCacheGroup
from tandem.engine.core import Engine
from tandem.engine.model.runner import LayerHooks, ModelInfo
from tandem.engine.request import Request, RequestStatus
from tandem.engine.scheduling.output import ModelOutput, SchedulerOutput
from tandem.kvtransfer.base import (
    BlockIds,
    ConnectorMetadata,
    ConnectorOutput,
    Handoff,
    KVCacheMemory,
    LoadFailure,
    TransferRequest,
    WorkerConnector,
)
from tandem.kvtransfer.config import LoadFailurePolicy
from tandem.wire.sampling import FinishReason, SamplingParams
from tests.engine.scheduling.driving import FULL, Driver, FakeConnector, consume, produce, sliding
from tests.engine.scheduling.model import STATE, VOCABULARY, WRONG, alone, next_token

EOS = 7
GARBAGE = -1

GROUPS: dict[str, tuple[KVCacheGroup, ...]] = {
    "full": (FULL,),
    "sliding": (sliding(6),),
    "hybrid": (FULL, sliding(6)),
    "two windows": (FULL, sliding(5), sliding(9)),
    "two block sizes": (sliding(11, block_size=8), FULL),
}

# Groups with recurrent states, beside attention and alone. They have their own list, because a run's number picks from the list above.
STATES = KVCacheGroup(AttentionKind.STATE, FULL.block_size, (1,), blocks_per_request=2)
GROUPS_WITH_STATES: dict[str, tuple[KVCacheGroup, ...]] = {
    "full and states": (FULL, STATES),
    "sliding and states": (sliding(6), STATES),
    "states": (STATES,),
}


class Source(enum.Enum):
    """Where a request's KV comes from."""

    HERE = enum.auto()
    HERE_AND_SENT = enum.auto()  # computed here and sent to a peer, so the connector keeps its blocks
    LATER = enum.auto()  # all of it from a peer, while other steps run
    LATER_IN_PART = enum.auto()
    # Some of it, while other steps run, and again each time it is admitted without blocks
    CACHED = enum.auto()
    AT_ONCE = enum.auto()  # some of it, before the step runs


@dataclasses.dataclass
class Load:
    request: Request
    tables: list[list[int]]
    start: int
    end: int
    written: bool | None = None  # whether the peer's last write was right; None: it has not written


class WorldConnector(FakeConnector):
    def __init__(self) -> None:
        super().__init__()
        self.sources: dict[str, Source] = {}
        self.deferrals: dict[str, int] = {}
        self.loads: dict[str, Load] = {}  # loads under way
        self.unreported: set[str] = set()  # requests whose loads have ended without the scheduler knowing yet
        self.loads_at_once: list[Load] = []  # loads of the step that is being planned
        self.found: dict[str, int] = {}
        self.loaded: set[str] = set()  # requests with a handoff, which comes only once
        self.kept: dict[str, tuple[Request, list[list[int]]]] = {}  # blocks kept for producers' requests

    def get_num_new_matched_tokens(self, request: TransferRequest, num_computed_tokens: int) -> tuple[int | None, bool]:
        request_id = request.request_id
        if self.deferrals.get(request_id, 0) > 0:
            self.deferrals[request_id] -= 1
            return None, False
        self.found[request_id] = num_computed_tokens
        left = request.num_tokens - num_computed_tokens
        match self.sources[request_id]:
            case Source.LATER if request_id not in self.loaded:
                return left, True
            case Source.LATER_IN_PART if request_id not in self.loaded:
                return left // 2, True
            case Source.CACHED:
                return min(left // 2, left - 1), True
            case Source.AT_ONCE:
                return left * 2 // 3, False
            case _:
                return 0, False

    def update_state_after_alloc(self, request: TransferRequest, block_ids: BlockIds, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, block_ids, num_external_tokens)
        assert isinstance(request, Request)
        if num_external_tokens:
            self.loaded.add(request.request_id)
            start = self.found[request.request_id]
            tables = [list(ids) for ids in block_ids]
            load = Load(request, tables, start, start + num_external_tokens)
            if self.sources[request.request_id] is Source.AT_ONCE:
                self.loads_at_once.append(load)
            else:
                assert request.request_id not in self.loads
                self.loads[request.request_id] = load

    def request_finished(self, request: TransferRequest, block_ids: BlockIds) -> bool:
        super().request_finished(request, block_ids)
        assert isinstance(request, Request)
        if request.request_id in self.loads or request.request_id in self.unreported:
            return True
        if self.sources[request.request_id] is Source.HERE_AND_SENT and any(block_ids):
            self.kept[request.request_id] = (request, [list(ids) for ids in block_ids])
            return True
        return False


class LazyDevice:
    """A model runner that runs each step as late as possible: when its result is needed. Everything that the step was planned with must
    stay true until then."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.queue: list[_Queued] = []
        self.num_with_work = 0
        self.kv_cache: Any = None
        self.grammars = None
        self.info = ModelInfo(
            name="fake", dtype="float32", device="cpu", vocab_size=VOCABULARY,
            max_model_len=driver.scheduler.max_model_len, eos_token_ids=frozenset({EOS}), num_layers=1, num_kv_heads=1,
            head_dim=1, groups=tuple(driver.model.groups), num_blocks=driver.scheduler.stats().total_blocks + 1
        )  # fmt: skip

    def start(self, step: SchedulerOutput, hooks: LayerHooks | None = None) -> _Queued:
        if not step.spec_token_ids:  # a request whose drafts are being verified is computed further than it reaches
            self._driver.scheduler.check_integrity()
        self.num_with_work += bool(step.num_scheduled_tokens)
        assert sum(job.step.total_num_scheduled_tokens > 0 for job in self.queue) <= 1
        job = _Queued(self, step)
        self.queue.append(job)
        return job

    def run_until(self, last: _Queued) -> None:
        while last.output is None:
            job = self.queue.pop(0)
            job.output = self._driver.model.execute(job.step)

    def run_all(self) -> None:
        if self.queue:
            self.run_until(self.queue[-1])

    def forget_requests(self) -> None: ...

    @property
    def kv_in_memory(self) -> int:
        return 0


@dataclasses.dataclass
class _Queued:
    device: LazyDevice
    step: SchedulerOutput
    output: ModelOutput | None = None

    def finish(self) -> ModelOutput:
        self.device.run_until(self)
        assert self.output is not None
        return self.output


class WorldWorker(WorkerConnector):
    def __init__(self, world: World) -> None:
        self._world = world

    def register_kv_caches(self, memory: KVCacheMemory) -> None: ...
    def bind_connector_metadata(self, metadata: ConnectorMetadata) -> None: ...

    def start_load_kv(self) -> None:
        self._world.begin_loads()

    def get_finished(self, finished_req_ids: set[str]) -> ConnectorOutput:
        return self._world.take_news()


class World:
    def __init__(
        self,
        groups: str = "full",
        *,
        ahead: bool = False,
        quick_peers: bool = False,
        on_failure: LoadFailurePolicy = LoadFailurePolicy.RECOMPUTE,
        with_connector: bool = True,
        clock: Callable[[], float] = lambda: 0.0,  # the engine's, by which it measures its steps
        now: Callable[[], float] = lambda: 0.0,  # the scheduler's
        **options: object,
    ) -> None:
        self.connector = WorldConnector()
        self.driver = Driver(
            groups=(GROUPS | GROUPS_WITH_STATES)[groups],
            connector=self.connector if with_connector else None,
            on_failure=on_failure,
            eos=[EOS],
            clock=now,
            **options,  # type: ignore[arg-type]
        )
        self.scheduler = self.driver.scheduler
        self.model = self.driver.model
        self.model.tolerant = True
        self.device = LazyDevice(self.driver)
        worker = WorldWorker(self) if with_connector else None
        self.engine = Engine(self.scheduler, self.device, worker, ahead=ahead, clock=clock)
        self.on_failure = on_failure
        self.quick_peers = quick_peers  # peers write at once when a load begins, and perhaps again later
        self.requests: dict[str, Request] = {}
        self.aborted: set[str] = set()
        self.news = ConnectorOutput()
        self.spoil_next = False  # whether the next load `AT_ONCE` fails
        self.quarantined: list[int] = []  # blocks of failed loads that a peer may still write to

    # --- events

    def add(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        source: Source = Source.HERE,
        *,
        deferrals: int = 0,
        num_moved: int = 0,
        **fields: object,
    ) -> None:
        request_id = f"r{len(self.requests)}"
        self.connector.sources[request_id] = source
        self.connector.deferrals[request_id] = deferrals
        answer = alone(prompt, max_tokens, [EOS])
        moved = answer[: min(num_moved, len(answer) - 1)]
        transfer = {Source.HERE_AND_SENT: produce(), Source.LATER: consume()}.get(source)
        try:
            self.requests[request_id] = self.driver.add(
                request_id, prompt, sampling=SamplingParams(max_tokens=max_tokens), output_token_ids=moved,
                transfer=transfer, **fields
            )  # fmt: skip
        except RequestError:
            assert len(prompt) + len(moved) >= self.scheduler.max_model_len

    def abort(self, which: int) -> None:
        live = sorted(self.scheduler.requests)
        if live:
            request_id = live[which % len(live)]
            self.driver.abort(request_id)
            self.aborted.add(request_id)

    def peer_writes(self, which: int, good: bool) -> None:
        """A peer writes a load's blocks. That may happen in any state of the request, until the scheduler learns that the load has ended."""
        loads = sorted(self.connector.loads)
        if loads:
            load = self.connector.loads[loads[which % len(loads)]]
            self._write(load, load.start, load.end, good)
            load.written = good

    def conclude(self, which: int, num_valid: int | None = None, *, spoil: bool = False, unsafe: bool = False) -> None:
        """Ends a load: whole, or with its first `num_valid` tokens only. `spoil`: one of its blocks is wrong. `unsafe`: a peer may still
        write to the blocks that are not valid."""
        loads = sorted(self.connector.loads)
        if not loads:
            return
        load = self.connector.loads.pop(loads[which % len(loads)])
        request_id = load.request.request_id
        self.connector.unreported.add(request_id)
        if not load.written:  # write only once: no other request writes to these blocks
            self._write(load, load.start, load.end, good=True)
        if num_valid is not None:
            valid = load.start + num_valid % (load.end - load.start + 1)
            self._write(load, valid, load.end, good=False)
            blocks = self._blocks_behind(load, valid) if unsafe else []
            self.quarantined += blocks
            self.news.failed_recving[request_id] = LoadFailure("drawn", valid, frozenset(blocks))
            return
        if spoil:
            self.news.invalid_block_ids.add(self._spoil(load))
        tokens = load.request.all_token_ids
        first = tokens[load.end] if load.end < len(tokens) else next_token(tokens)
        cached = self.connector.sources[request_id] is Source.CACHED
        self.news.finished_recving[request_id] = Handoff(None if cached else first, load.end)

    def _blocks_behind(self, load: Load, valid: int) -> list[int]:
        return [
            block
            for group, table in zip(self.model.groups, load.tables, strict=True)
            for block in (
                table
                if group.kind is AttentionKind.STATE
                else table[-(-valid // group.block_size) : -(-load.end // group.block_size)]
            )
            if block
        ]

    def peer_writes_late(self) -> None:
        """A peer writes to blocks in quarantine, which nothing else may use."""
        for group in self.model.groups:
            for block in self.quarantined:
                for position in (STATE, *range(group.block_size)):
                    self.model.kv[block, position] = GARBAGE

    def release(self, which: int) -> None:
        """A peer can no longer write to a block in quarantine."""
        if self.quarantined:
            self.peer_writes_late()
            self.news.released_blocks.add(self.quarantined.pop(which % len(self.quarantined)))

    def send(self, which: int) -> None:
        """A producer's connector frees blocks, whose content must be unchanged until now."""
        kept = sorted(self.connector.kept)
        if not kept:
            return
        self.device.run_all()  # it sends only KV that is computed
        request_id = kept[which % len(kept)]
        request, tables = self.connector.kept.pop(request_id)
        chain = self.model.chain(request_id, request.all_token_ids)
        # A step that ran ahead of a stop has moved the state on. Who sends a prompt's stops after one token, by its length.
        if request.num_computed_tokens and request.status is RequestStatus.FINISHED_LENGTH_CAPPED:
            state_of = chain[request.num_computed_tokens - 1]
            assert self.model.state_is(tables, state_of), f"{request_id} would send a stale state"
        for group, table in zip(self.model.groups, tables, strict=True):
            if group.kind is AttentionKind.STATE:
                continue
            for position in range(request.num_computed_tokens):
                if block := table[position // group.block_size]:
                    slot = block, position % group.block_size
                    assert self.model.kv[slot] == chain[position], f"{request_id} would send token {position} wrong"
        self.news.finished_sending.add(request_id)

    def reset_prefix_cache(self) -> None:
        self.scheduler.reset_prefix_cache()
        assert self.scheduler.stats().pinned_requests == 0

    def step(self) -> None:
        idle, before = not self.scheduler.has_work(), self.device.num_with_work
        updates = self.engine.step().updates
        assert not (idle and self.device.num_with_work > before), "a step did work where there was none"
        self.driver.record(updates)
        for update in updates:
            assert WRONG not in update.token_ids, f"{update} was read from wrong KV"
            if update.finish is FinishReason.ERROR:
                assert self.on_failure is LoadFailurePolicy.FAIL

    def settle(self) -> None:
        """Lets all loads and sends succeed. Then every request must end, and no block may be left in use."""
        self.connector.deferrals.clear()
        self.spoil_next = False
        tokens_to_go = sum(request.num_tokens + request.facts.sampling.max_tokens for request in self.requests.values())
        patience = 50 + 10 * tokens_to_go
        under_way = self.connector.loads, self.connector.kept
        while self.scheduler.has_unfinished_requests() or self.scheduler.has_work() or any(under_way):
            patience -= 1
            assert patience, f"no end: {list(self.scheduler.requests.values())}"
            self.release(0)
            self.conclude(0)
            self.send(0)
            assert self.scheduler.has_work() or not self.news.is_empty, "every request waits for another"
            self.step()
        while not self.news.is_empty:
            self.step()
        self.scheduler.end_pins()
        assert self.scheduler.stats().quarantined_blocks == len(self.quarantined)
        while self.quarantined:
            self.release(0)
        self.step()
        stats = self.scheduler.stats()
        assert stats.free_blocks == stats.total_blocks
        assert stats.quarantined_blocks == 0
        assert (stats.running, stats.waiting, stats.held_requests, stats.waiting_tokens) == (0, 0, 0, 0)
        encoded: Any = self.scheduler.encoded
        if encoded is not None:
            self.step()  # tells what was forgotten
            assert len(encoded) == len(self.model.encoded)
        for request_id, request in self.requests.items():
            self._check_answer(request_id, request)

    def _check_answer(self, request_id: str, request: Request) -> None:
        room = self.scheduler.max_model_len - request.num_prompt_tokens
        expected = alone(request.prompt_token_ids, min(request.facts.sampling.max_tokens, room), [EOS])
        found = self.driver.outputs[request_id]
        assert found == request.output_token_ids
        if request_id in self.aborted or request.status is RequestStatus.FINISHED_ERROR:
            assert found == expected[: len(found)]
        else:
            assert found == expected

    # --- the peers

    def _write(self, load: Load, start: int, end: int, good: bool) -> None:
        chain = self.model.chain(load.request.request_id, load.request.all_token_ids[: load.end])
        self.model.write(load.tables, chain if good else [GARBAGE] * load.end, start, end)

    def _spoil(self, load: Load) -> int:
        """Makes the last block of the load wrong, and returns that block."""
        group, table = self.model.groups[-1], load.tables[-1]
        last = load.end - 1
        if group.kind is AttentionKind.STATE:
            self.model.kv[table[0], STATE] = GARBAGE
            return table[0]
        block = table[last // group.block_size]
        start = max(load.start, last // group.block_size * group.block_size)
        for position in range(start, load.end):
            self.model.kv[block, position % group.block_size] = GARBAGE
        return block

    def begin_loads(self) -> None:
        if self.quick_peers:
            for load in self.connector.loads.values():
                if load.written is None:
                    self._write(load, load.start, load.end, good=True)
                    load.written = True
        for load in self.connector.loads_at_once:
            self._write(load, load.start, load.end, good=True)
            if self.spoil_next:
                self.spoil_next = False
                self.news.invalid_block_ids.add(self._spoil(load))
        self.connector.loads_at_once.clear()

    def take_news(self) -> ConnectorOutput:
        news, self.news = self.news, ConnectorOutput()
        self.connector.unreported.clear()
        return news
