"""Builders and fakes for driving a scheduler without a model."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tandem.engine.cache.group_manager import AttentionKind, KVCacheGroup
from tandem.engine.config import CacheConfig, SchedulerConfig
from tandem.engine.request import Request, RequestStatus
from tandem.engine.scheduling.output import ModelOutput, SchedulerOutput
from tandem.engine.scheduling.scheduler import Scheduler
from tandem.engine.scheduling.state import StepWatcher
from tandem.kvtransfer.base import (
    BlockIds,
    ConnectorMetadata,
    ConnectorOutput,
    Handoff,
    LoadFailure,
    ScheduledStep,
    SchedulerConnector,
    TransferRequest,
)
from tandem.kvtransfer.config import LoadFailurePolicy
from tandem.wire.nodes import PeerAddress
from tandem.wire.requests import KVTransferParams, TokenChunk, TransferRole
from tandem.wire.sampling import SamplingParams
from tests.engine.made_requests import made_request
from tests.engine.scheduling.model import FakeModel

BLOCK = 4
FULL = KVCacheGroup(AttentionKind.FULL, BLOCK, (0,))


def sliding(window: int, block_size: int = BLOCK) -> KVCacheGroup:
    return KVCacheGroup(AttentionKind.SLIDING, block_size, (1,), window)


def produce(transfer_id: str = "t") -> KVTransferParams:
    return KVTransferParams(transfer_id, TransferRole.PRODUCE, PeerAddress("peer", 1, "tcp://peer"))


def consume(transfer_id: str = "t") -> KVTransferParams:
    return KVTransferParams(transfer_id, TransferRole.CONSUME, PeerAddress("peer", 1, "tcp://peer"))


class FakeConnector(SchedulerConnector):
    """Answers as the test says, and records the calls. `offers`, by request and used once: the tokens from outside beyond those found
    here, and whether they arrive later; None defers the answer."""

    def __init__(self) -> None:
        self.offers: dict[str, tuple[int | None, bool]] = {}
        self.keeps: set[str] = set()  # requests whose blocks it keeps when they finish
        self.calls: list[tuple[object, ...]] = []
        self.blocks: dict[str, list[list[int]]] = {}  # each request's block tables, as the connector was told
        self.pending = False
        self.on_finished: Callable[[TransferRequest], bool] | None = None

    def on_new_request(self, request: TransferRequest) -> None:
        self.calls.append(("new", request.request_id))

    def get_num_new_matched_tokens(self, request: TransferRequest, num_computed_tokens: int) -> tuple[int | None, bool]:
        self.calls.append(("match", request.request_id, num_computed_tokens))
        return self.offers.get(request.request_id, (0, False))

    def update_state_after_alloc(self, request: TransferRequest, block_ids: BlockIds, num_external_tokens: int) -> None:
        self.calls.append(("alloc", request.request_id, num_external_tokens))
        if num_external_tokens:
            self.offers.pop(request.request_id, None)
        self.blocks[request.request_id] = [list(ids) for ids in block_ids]

    def build_connector_meta(self, step: ScheduledStep) -> ConnectorMetadata:
        for request_id in step.num_scheduled_tokens:
            for table, new in zip(self.blocks[request_id], step.new_block_ids(request_id), strict=False):
                table.extend(new)
        return ConnectorMetadata()

    def update_connector_output(self, output: ConnectorOutput) -> None:
        self.calls.append(("output",))

    def request_finished(self, request: TransferRequest, block_ids: BlockIds) -> bool:
        self.calls.append(("finished", request.request_id, [list(ids) for ids in block_ids]))
        if self.on_finished is not None:
            return self.on_finished(request)
        return request.request_id in self.keeps

    def forget_after(self, request: TransferRequest, num_tokens: int) -> None:
        self.calls.append(("forget", request.request_id, num_tokens))

    def call_back(self, request: TransferRequest) -> None:
        self.calls.append(("call back", request.request_id))

    def reset_cache(self) -> None:
        self.calls.append(("reset",))

    def has_pending_work(self) -> bool:
        return self.pending

    def asked(self, what: str, request_id: str) -> list[tuple[object, ...]]:
        return [call[2:] for call in self.calls if call[:2] == (what, request_id)]


class Driver:
    """Drives a scheduler with a fake model and perhaps a fake connector. Audits the scheduler after every step."""

    def __init__(
        self,
        *,
        num_blocks: int = 100,
        groups: Sequence[KVCacheGroup] = (FULL,),
        connector: FakeConnector | None = None,
        on_failure: LoadFailurePolicy = LoadFailurePolicy.RECOMPUTE,
        max_model_len: int = 1000,
        eos: Iterable[int] = (),
        caching: bool = True,
        checkpoint_tokens: int = BLOCK,
        clock: Callable[[], float] = lambda: 0.0,
        watcher: StepWatcher | None = None,
        encoder_tokens: int | None = None,
        is_timed: bool = False,
        **config: object,
    ) -> None:
        self.connector = connector
        self.model = FakeModel(groups)
        self.scheduler = Scheduler(
            SchedulerConfig(**config),  # type: ignore[arg-type]
            CacheConfig(
                block_size=BLOCK,
                prefix_caching=caching,
                checkpoint_tokens=checkpoint_tokens,
                hash_seed="tests",
                encoder_tokens=encoder_tokens or 1,
            ),
            groups,
            num_blocks,
            max_model_len,
            frozenset(eos),
            connector,
            on_failure,
            clock,
            reads_images=encoder_tokens is not None,
            is_timed=is_timed,
        )
        if watcher is not None:
            self.scheduler.watch_with(watcher)
        self._arrivals = itertools.count()
        self.outputs: dict[str, list[int]] = {}
        self.updates: dict[str, list[TokenChunk]] = {}

    def add(
        self,
        request_id: str,
        prompt: int | Sequence[int] = 6,
        max_tokens: int = 4,
        *,
        sampling: SamplingParams | None = None,
        arrival_time: float | None = None,
        **fields: object,
    ) -> Request:
        """Adds a request. A number as `prompt` stands for that many tokens that no other request has."""
        tokens = unique_tokens(request_id, prompt) if isinstance(prompt, int) else prompt
        request = made_request(
            request_id,
            tokens,
            sampling or SamplingParams(max_tokens=max_tokens),
            arrival_time=float(next(self._arrivals)) if arrival_time is None else arrival_time,
            block_hasher=self.scheduler.block_hasher,
            **fields,
        )
        self.model.salts[request_id] = (request.cache_salt, request.lora)
        self.model.media[request_id] = request.image_parts
        self.scheduler.add_request(request)
        self.outputs[request_id] = request.output_token_ids
        return request

    def schedule(self) -> SchedulerOutput:
        return self.scheduler.schedule()

    def finish(self, step: SchedulerOutput, transfers: ConnectorOutput | None = None) -> list[TokenChunk]:
        return self.book(step, self.model.execute(step), transfers)

    def book(
        self, step: SchedulerOutput, output: ModelOutput, transfers: ConnectorOutput | None = None
    ) -> list[TokenChunk]:
        updates = self.scheduler.update_from_output(step, output, transfers)
        self.record(updates)
        return updates

    def record(self, updates: list[TokenChunk]) -> None:
        for update in updates:
            self.updates.setdefault(update.request_id, []).append(update)
            tokens = self.outputs[update.request_id]
            assert update.start == len(tokens)
            tokens += update.token_ids
        self.scheduler.check_integrity()

    def step(self, transfers: ConnectorOutput | None = None) -> tuple[SchedulerOutput, list[TokenChunk]]:
        step = self.schedule()
        return step, self.finish(step, transfers)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def run(self, most: int = 1000) -> int:
        """Steps until no work is left; returns the number of steps."""
        for count in range(most):
            if not self.scheduler.has_work():
                return count
            self.step()
        raise AssertionError("there is no end to it")

    def abort(self, *request_ids: str) -> list[str]:
        ended = self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)
        self.scheduler.check_integrity()
        return ended

    def arrive(self, request: Request, start: int, end: int) -> None:
        """A peer writes the request's KV from token `start` to `end`."""
        assert self.connector is not None
        chain = self.model.chain(request.request_id, request.all_token_ids[:end])
        self.model.write(self.connector.blocks[request.request_id], chain, start, end)

    @property
    def running(self) -> list[str]:
        return [
            request_id
            for request_id, request in self.scheduler.requests.items()
            if request.status is RequestStatus.RUNNING
        ]

    @property
    def free_blocks(self) -> int:
        return self.scheduler.stats().free_blocks


def connected(
    offers: Mapping[str, tuple[int | None, bool]] | None = None, keeps: Iterable[str] = (), **options: Any
) -> tuple[Driver, FakeConnector]:
    """A driver whose connector offers these tokens, and keeps the blocks of these requests."""
    connector = FakeConnector()
    connector.offers.update(offers or {})
    connector.keeps.update(keeps)
    return Driver(connector=connector, **options), connector


def unique_tokens(request_id: str, count: int) -> list[int]:
    return [1_000_000 + 1000 * (sum(map(ord, request_id)) % 1000) + i for i in range(count)]


def received(request_id: str, first_token: int, num_tokens: int) -> ConnectorOutput:
    return ConnectorOutput(finished_recving={request_id: Handoff(first_token, num_tokens)})


def failed(request_id: str, valid_tokens: int = 0, reason: str = "lost", unsafe: Iterable[int] = ()) -> ConnectorOutput:
    return ConnectorOutput(failed_recving={request_id: LoadFailure(reason, valid_tokens, frozenset(unsafe))})


def sent(*request_ids: str) -> ConnectorOutput:
    return ConnectorOutput(finished_sending=set(request_ids))
