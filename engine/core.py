"""The engine's step: the scheduler plans it, the connector starts its transfers, the model computes it, the scheduler books the results.

Everything here runs in the step thread. The state is the scheduler's, the runner's and the connector's; the engine
fixes the order in which they are called. Steps run in the order in which they were planned. With async scheduling
(`ahead`), the engine plans and starts the next step before it reads the results of the last one:

    plan 1, start 1 │ plan 2, start 2, book 1 │ plan 3, start 3, book 2 │ ...
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from tandem.base.errors import InternalError, TandemError
from tandem.engine.contract import StepResult as StepResult
from tandem.engine.model.runner import FinishedStep, ModelInfo, ModelRunner, StartedStep, memory_of
from tandem.engine.request import Request, RequestStatus
from tandem.engine.scheduling.output import ModelOutput, SchedulerOutput
from tandem.engine.scheduling.scheduler import Scheduler
from tandem.engine.scheduling.state import SchedulerStats
from tandem.engine.tracing import StepTimes, Tracer
from tandem.kvtransfer.base import ConnectorOutput, TransferStats, WorkerConnector
from tandem.wire.kv_events import KVEvent
from tandem.wire.tracing import TransferTrace

if TYPE_CHECKING:
    from tandem.engine.model.adapter_book import AdapterBook

_NO_TRANSFERS = ConnectorOutput()


class IdleCheck(Protocol):
    """Checks what peers have sent, while no request is unfinished."""

    @property
    def lora(self) -> str | None:
        """The adapter that it computes with; None: the model alone, or nothing."""

    def received(self, request: Request) -> None:
        """The KV of the request's prompt, which a peer computed, has arrived."""

    def step(self) -> bool:
        """Computes a little; False: there is nothing to check."""

    def stand_aside(self) -> None:
        """Gives its blocks back, and goes on later."""


@dataclasses.dataclass(slots=True)
class _StepInFlight:
    plan: SchedulerOutput
    computing: StartedStep
    # `began` and `forward_began` are on the tracer's clock, 0 while no request is traced. `started` is on the engine's.
    began: float
    forward_began: float
    started: float


class Engine:
    """Joins a scheduler, a runner and the worker half of a connector. It is a `NodeEngine`, whose docstrings say what its methods are."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        worker: WorkerConnector | None,
        *,
        ahead: bool = False,
        debug: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`ahead` plans a step while the one before it runs, wherever the scheduler allows that."""
        self.scheduler, self.runner, self.worker = scheduler, runner, worker
        self.tracer: Tracer | None = None  # set between steps, while a request is traced
        self.idle_check: IdleCheck | None = None
        self._ahead, self._debug, self._clock = ahead, debug, clock
        self._open: _StepInFlight | None = None  # the step that computes while the next one is planned
        self._last_booked = self._last_finished = 0.0
        if worker is not None:
            worker.register_kv_caches(memory_of(runner))

    def add_request(self, request: Request) -> None:
        if self.idle_check is not None:
            self.idle_check.stand_aside()
        self.scheduler.add_request(request)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)

    def fail_request(self, request_id: str, error: TandemError) -> None:
        self.scheduler.finish_requests([request_id], RequestStatus.FINISHED_ERROR, error)

    def step(self) -> StepResult:
        began = self._now()
        plan = self.scheduler.schedule()
        before, self._open = self._open, None
        result = StepResult([], bool(plan.total_num_scheduled_tokens or plan.preempted_req_ids or before))
        if before is not None and plan.begins_loads:
            # A connector writes to blocks without waiting for the device. The open step may still use blocks that were
            # freed and then handed to such a load, so book it first.
            self._book(before, result)
            before = None
        started = self._start(plan, began)
        if before is not None:
            self._book(before, result)
        if self._ahead and self.scheduler.leave_open(plan):
            self._open = started
        else:
            self._book(started, result)
        if not result.progressed:
            result.ask_again = self.scheduler.has_work()
            if self._debug:
                self.scheduler.check_integrity()
        return result

    def _start(self, plan: SchedulerOutput, began: float) -> _StepInFlight:
        worker = self.worker
        if worker is not None:
            if plan.connector_metadata is None:
                raise InternalError("a step was planned without the connector's metadata")
            worker.bind_connector_metadata(plan.connector_metadata)
            if plan.preempted_req_ids:
                worker.handle_preemptions()
            worker.start_load_kv()
        forward_began, started = self._now(), self._clock()
        # The runner must learn of requests that ended or were preempted, even when there is nothing to compute.
        if plan.total_num_scheduled_tokens or plan.finished_req_ids or plan.preempted_req_ids:
            hooks = worker if worker is not None and worker.layerwise else None
            computing = self.runner.start(plan, hooks)
        else:
            computing = FinishedStep(ModelOutput(sampled_token_ids={}))
        if worker is not None:
            worker.wait_for_save()
        return _StepInFlight(plan, computing, began, forward_began, started)

    def _book(self, started: _StepInFlight, result: StepResult) -> None:
        """Waits for the model, then books transfers and results. The transfers go first: a failed load makes some of the
        model's results wrong."""
        plan, output = started.plan, started.computing.finish()
        forward_ended, finished = self._now(), self._clock()
        # A step that was planned ahead waited for the device until the step before it finished.
        self.scheduler.took(plan, finished - max(started.started, self._last_finished))
        self._last_finished = finished
        worker = self.worker
        transfers = worker.get_finished(plan.finished_req_ids) if worker is not None else _NO_TRANSFERS
        updates = self.scheduler.update_from_output(plan, output, transfers)
        if transfers.finished_recving and self.idle_check is not None:
            self._show_received(transfers, self.idle_check)
        result.updates += updates
        result.progressed = result.progressed or bool(updates) or not transfers.is_empty
        if self.tracer is not None:
            began = max(started.began, self._last_booked)
            forward_began = max(started.forward_began, self._last_booked)
            self._last_booked = self.tracer.clock()
            times = StepTimes(began, forward_began, forward_ended, self._last_booked)
            self.tracer.on_step(plan, output, transfers, times)

    def _show_received(self, transfers: ConnectorOutput, check: IdleCheck) -> None:
        for request_id, handoff in transfers.finished_recving.items():
            request = self.scheduler.requests.get(request_id)
            if handoff.first_token is not None and request is not None and request.num_external_tokens:
                check.received(request)

    def use_idle_time(self) -> bool:
        return self.idle_check is not None and self.is_idle and self.idle_check.step()

    def wind_down(self) -> None:
        check, self.idle_check = self.idle_check, None
        if check is not None:
            check.stand_aside()
        self.scheduler.end_pins()

    @property
    def is_idle(self) -> bool:
        """No request is unfinished, and no step is computing."""
        return self._open is None and not self.scheduler.has_unfinished_requests()

    def _now(self) -> float:
        return self.tracer.clock() if self.tracer is not None else 0.0

    def shutdown(self) -> None:
        started, self._open = self._open, None
        try:
            if started is not None:
                # The device reads and writes the cache until the step has finished.
                started.computing.finish()
        finally:
            if self.worker is not None:
                self.worker.shutdown()

    # --- what a node asks besides

    @property
    def info(self) -> ModelInfo:
        return self.runner.info

    @property
    def adapters(self) -> AdapterBook[Any] | None:
        return self.runner.adapters

    @property
    def follows_grammars(self) -> bool:
        return self.runner.grammars is not None

    @property
    def states_wait(self) -> bool:
        return self.runner.states_wait

    @property
    def caches_prefixes(self) -> bool:
        return self.scheduler.block_hasher is not None

    @property
    def lora_in_check(self) -> str | None:
        return self.idle_check.lora if self.idle_check is not None else None

    @property
    def peer_endpoint(self) -> str:
        return self.worker.peer_endpoint if self.worker is not None else ""

    @property
    def tier_endpoint(self) -> str:
        return self.worker.tier_endpoint if self.worker is not None else ""

    def stats(self) -> SchedulerStats:
        return self.scheduler.stats()

    def transfer_stats(self) -> TransferStats:
        return self.worker.stats() if self.worker is not None else TransferStats()

    def trace_of(self, request_id: str) -> TransferTrace | None:
        return self.worker.trace_of(request_id) if self.worker is not None else None

    def holds_blocks_of(self, request_id: str) -> bool:
        return self.scheduler.holds_blocks_of(request_id)

    def turn_ended(self, job_id: str, request_id: str, called: list[str] | None) -> None:
        self.scheduler.turn_ended(job_id, request_id, called)

    def tell_cache_events(self) -> None:
        self.scheduler.tell_cache_events()

    def take_cache_events(self) -> Sequence[KVEvent]:
        return self.scheduler.take_cache_events()

    def reset_prefix_cache(self) -> None:
        self.scheduler.reset_prefix_cache()

    @property
    def has_forgotten(self) -> bool:
        return self.scheduler.has_forgotten

    def seconds_until_due(self) -> float | None:
        return self.scheduler.seconds_until_sweep()
