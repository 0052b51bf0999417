"""One step: the scheduler plans, the connector sets transfers in motion, the model computes, the results are booked.

Everything here runs in one thread, the one that steps. There is no other state than the scheduler's, the
runner's and the connector's; the engine only fixes the order in which they are called.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from engine.model.runner import ModelRunner
from engine.request import Request, RequestStatus
from engine.scheduling.output import ModelOutput, SchedulerOutput
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.update import RequestUpdate
from engine.tracing import StepTimes, Tracer
from kvtransfer.base import ConnectorOutput, KVCacheMemory, WorkerConnector
from wire.errors import InternalError

_NO_TRANSFERS = ConnectorOutput()


@dataclasses.dataclass(slots=True)
class StepResult:
    updates: list[RequestUpdate]
    # False when the step changed nothing: another one would not either, until something arrives from outside.
    progressed: bool
    # Nothing changed, yet a connector wants to be asked again, or has something to tell its other half.
    ask_again: bool = False


class Engine:
    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        worker: WorkerConnector | None,
        *,
        debug: bool = False,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.worker = worker
        self.tracer: Tracer | None = None  # there while a request is traced; set between steps
        self._debug = debug
        if worker is not None:
            info = runner.info
            worker.register_kv_caches(
                KVCacheMemory(
                    tensor=runner.kv_cache,
                    model=info.name,
                    num_layers=info.num_layers,
                    num_groups=len(info.groups),
                )
            )

    def add_request(self, request: Request) -> None:
        """Raises a RequestError for one that can never run here."""
        self.scheduler.add_request(request)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)

    def step(self) -> StepResult:
        tracer = self.tracer
        began = tracer.clock() if tracer is not None else 0.0
        plan = self.scheduler.schedule()
        worker = self.worker
        if worker is not None:
            if plan.connector_metadata is None:
                raise InternalError("a step was planned without the connector's metadata")
            worker.bind_connector_metadata(plan.connector_metadata)
            if plan.preempted_req_ids:
                worker.handle_preemptions()
            worker.start_load_kv()
        forward_began = tracer.clock() if tracer is not None else 0.0
        output = self._compute(plan)
        forward_ended = tracer.clock() if tracer is not None else 0.0
        transfers = _NO_TRANSFERS
        if worker is not None:
            worker.wait_for_save()
            transfers = worker.get_finished(plan.finished_req_ids)
        updates = self.scheduler.update_from_output(plan, output, transfers)
        progressed = bool(
            plan.total_num_scheduled_tokens or updates or plan.preempted_req_ids or not transfers.is_empty
        )
        if tracer is not None:
            times = StepTimes(began, forward_began, forward_ended, tracer.clock())
            tracer.on_step(plan, output, transfers, times)
        if self._debug and not progressed:
            self.scheduler.check_integrity()
        return StepResult(updates, progressed, ask_again=not progressed and self.scheduler.has_work())

    def _compute(self, plan: SchedulerOutput) -> ModelOutput:
        # The runner also has to hear of requests that ended or were preempted when there is nothing to compute.
        if not (plan.total_num_scheduled_tokens or plan.finished_req_ids or plan.preempted_req_ids):
            return ModelOutput(sampled_token_ids={})
        hooks = self.worker if self.worker is not None and self.worker.layerwise else None
        return self.runner.execute(plan, hooks)

    def shutdown(self) -> None:
        if self.worker is not None:
            self.worker.shutdown()
