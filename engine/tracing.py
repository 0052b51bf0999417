"""Records where the time of traced requests goes on this node. The engine calls the tracer only while a request is traced.

Each trace is handed on once: when its request has ended here, and so has the transfer that its blocks were kept for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from tandem.engine.scheduling.output import ModelOutput, SchedulerOutput
from tandem.kvtransfer.base import ConnectorOutput
from tandem.wire.requests import Submit
from tandem.wire.tracing import Span, TracePhase, TransferRecord, TransferTrace

# A step makes two spans, so this is enough for an answer of 2,000 tokens. Later spans are dropped and counted.
MAX_SPANS = 4096
# At most this many finished requests wait for their transfer before their trace is handed on. A transfer ends with its
# lease at the latest.
MAX_AWAITED = 64

TraceOf = Callable[[str], TransferTrace | None]
"""Returns the trace of a request's transfer; None before the transfer has ended, or without one."""


@dataclasses.dataclass(slots=True, frozen=True)
class FinishedTrace:
    submit: Submit
    spans: list[Span]
    dropped: int  # spans beyond MAX_SPANS
    transfer: TransferRecord | None


Done = Callable[[FinishedTrace], None]


@dataclasses.dataclass(slots=True, frozen=True)
class StepTimes:
    began: float
    forward_began: float
    forward_ended: float
    ended: float


@dataclasses.dataclass(slots=True)
class _TracedRequest:
    submit: Submit
    admitted_at: float
    spans: list[Span] = dataclasses.field(default_factory=list)
    dropped: int = 0
    transfer: TransferRecord | None = None
    # Since when the request has waited for its next step; None while it is scheduled.
    waits_since: float | None = None
    waits_as: TracePhase = TracePhase.QUEUE
    # The prompt is computed, so further steps are decode steps.
    writes: bool = False

    def add(self, span: Span) -> None:
        if len(self.spans) < MAX_SPANS:
            self.spans.append(span)
        else:
            self.dropped += 1


class Tracer:
    """Any thread may call `arrived`; only the step thread calls the other methods."""

    def __init__(self, clock: Callable[[], float], trace_of: TraceOf, done: Done) -> None:
        self.clock = clock
        self._trace_of = trace_of
        self._done = done
        self._arrivals: dict[str, float] = {}
        self._live: dict[str, _TracedRequest] = {}
        # Requests that have ended while their transfer goes on, the oldest first.
        self._awaited: dict[str, _TracedRequest] = {}

    @property
    def active(self) -> bool:
        return bool(self._live or self._awaited)

    def arrived(self, request_id: str) -> None:
        self._arrivals[request_id] = self.clock()

    def refused(self, request_id: str) -> None:
        self._arrivals.pop(request_id, None)

    def admitted(self, submit: Submit) -> None:
        now = self.clock()
        traced = _TracedRequest(submit, now, waits_since=now)
        traced.add(Span(TracePhase.INBOX, self._arrivals.pop(submit.request_id, now), now))
        self._live[submit.request_id] = traced

    def on_step(self, plan: SchedulerOutput, output: ModelOutput, transfers: ConnectorOutput, times: StepTimes) -> None:
        for request_id, traced in self._live.items():
            if request_id in plan.preempted_req_ids:
                traced.waits_since, traced.waits_as, traced.writes = times.began, TracePhase.PREEMPTED, False
            tokens = plan.num_scheduled_tokens.get(request_id, 0)
            if tokens:
                self._on_work(traced, tokens, plan.total_num_scheduled_tokens - tokens, times)
                traced.writes = traced.writes or bool(output.sampled_token_ids.get(request_id))
            if request_id in transfers.finished_recving or request_id in transfers.failed_recving:
                self._on_received(
                    request_id, traced, complete=request_id in transfers.finished_recving, now=times.ended
                )
        if self._awaited:
            over = {*transfers.finished_sending, *transfers.finished_recving, *transfers.failed_recving}
            for request_id in over & self._awaited.keys():
                self._conclude(request_id, self._awaited.pop(request_id))

    def _on_work(self, traced: _TracedRequest, tokens: int, beside: int, times: StepTimes) -> None:
        if traced.waits_since is not None:
            traced.add(Span(traced.waits_as, traced.waits_since, times.began))
            traced.waits_since = None
        phase = TracePhase.DECODE if traced.writes else TracePhase.PREFILL
        traced.add(Span(TracePhase.STEP, times.began, times.ended, tokens, beside))
        traced.add(Span(phase, times.forward_began, times.forward_ended, tokens, beside))

    def _on_received(self, request_id: str, traced: _TracedRequest, *, complete: bool, now: float) -> None:
        spans = self._transfer_spans(request_id, traced)
        asked = min((span.start for span in spans), default=now)
        traced.add(Span(TracePhase.QUEUE, traced.admitted_at, max(asked, traced.admitted_at)))
        for span in spans:
            traced.add(span)
        traced.waits_since = max((span.end for span in spans), default=now)
        traced.waits_as = TracePhase.RESUME if complete else TracePhase.QUEUE
        traced.writes = complete

    def ended(self, request_id: str, *, is_held: bool) -> None:
        """A request has ended. With `is_held` its blocks are kept for a transfer, and the trace waits until the connector
        reports that transfer's end."""
        traced = self._live.pop(request_id, None)
        if traced is None:
            return
        if not is_held:
            self._conclude(request_id, traced)
            return
        self._awaited[request_id] = traced
        if len(self._awaited) > MAX_AWAITED:
            oldest = next(iter(self._awaited))
            self._conclude(oldest, self._awaited.pop(oldest))

    def _conclude(self, request_id: str, traced: _TracedRequest) -> None:
        for span in self._transfer_spans(request_id, traced):
            traced.add(span)
        self._done(FinishedTrace(traced.submit, traced.spans, traced.dropped, traced.transfer))

    def _transfer_spans(self, request_id: str, traced: _TracedRequest) -> list[Span]:
        transfer = self._trace_of(request_id)
        if transfer is None:
            return []
        traced.transfer = transfer.record
        return transfer.spans
