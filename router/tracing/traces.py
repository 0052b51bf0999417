"""Decides which requests are traced, collects one trace per request, and keeps the last ones. Runs on the
event loop only.

The offset of a node's monotonic clock from the router's is measured by pings: the node wrote its answer at
some moment between sending and receiving, so the shortest round trip is the most precise (`Clocks`).
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable

import msgspec

from tandem.router.config import TracingConfig
from tandem.router.policy.choose import Alternative
from tandem.router.tracer import ASK_HEADER, SHORT_ID, RequestTracer
from tandem.router.tracing.record import (
    Arrival,
    NodePart,
    TraceContext,
    TraceList,
    TraceRecord,
    TraceSummary,
    parse_context,
)
from tandem.wire.nodes import NodeInfo
from tandem.wire.sampling import SamplingParams
from tandem.wire.tracing import ClockReading, NodeTrace, Span, TracePhase

# Half a minute of readings, at two pings a second. That is fresh enough: clocks drift apart by about 10 µs
# per second.
READINGS = 64


class Offset(msgspec.Struct, frozen=True):
    """What to subtract from the node's times, precise to `error_s`."""

    seconds: float
    error_s: float


class Clocks:
    """The offsets of nodes' clocks, measured by pings."""

    def __init__(self) -> None:
        self._readings: dict[tuple[str, int], deque[Offset]] = {}

    def heard(self, reading: ClockReading, now: float) -> None:
        trip = now - reading.asked_at
        if trip < 0:  # not an answer to this router's ping
            return
        middle = (now + reading.asked_at) / 2
        readings = self._readings.setdefault((reading.node_id, reading.epoch), deque(maxlen=READINGS))
        readings.append(Offset(reading.clock - middle, trip / 2))

    def offset(self, node_id: str, epoch: int) -> Offset | None:
        """Returns the offset, or None before the first reading. On one machine both clocks are the same; if
        all readings allow an offset of 0, the times are taken as exact."""
        readings = self._readings.get((node_id, epoch))
        if not readings:
            return None
        best = min(readings, key=lambda reading: reading.error_s)
        if all(abs(reading.seconds) <= reading.error_s for reading in readings):
            return Offset(0.0, 0.0)
        return best

    def forget(self, node_id: str, epoch: int) -> None:
        self._readings.pop((node_id, epoch), None)


MAX_SPANS = 4096
MAX_ATTEMPTS = 64  # of all choices together; further attempts are not traced


class RequestTrace:
    """One request's trace while it grows. It is complete when the request has ended and all its nodes have
    reported."""

    def __init__(
        self,
        request_id: str,
        context: TraceContext,
        model: str,
        began: float,
        began_unix_s: float,
        *,
        tenant: str | None = None,
        on_attempt: Callable[[RequestTrace, str], None],
        on_end: Callable[[RequestTrace], None],
    ) -> None:
        self._on_attempt = on_attempt
        self._on_end = on_end
        self.request_id = request_id
        self.tenant = tenant
        self.context = context
        self.span_id = secrets.token_hex(8)
        self.model = model
        self.began = began
        self.began_unix_s = began_unix_s
        self.answer_id = ""
        self.route = ""
        self.ended: float | None = None
        self.status: int | None = None
        self.prompt_tokens = 0
        self.max_tokens: int | None = None
        self.temperature: float | None = None
        self.finish_reasons: list[str] = []
        self.decisions: list[str] = []
        self.attempts: list[str] = []  # the request ids under which nodes know it
        self._spans: list[Span] = []
        self._arrivals: list[Arrival] = []
        # by attempt and node id: the nodes that have still to report
        self._expected: dict[tuple[str, str], NodeInfo] = {}
        self._parts: list[NodePart] = []
        self._alternatives: list[Alternative] = []
        self._output_tokens = 0
        self._unflushed_since: float | None = None
        self._unflushed = 0
        self._dropped = 0

    # --- the router's own part

    def span(self, phase: TracePhase, start: float, end: float, tokens: int = 0) -> None:
        if len(self._spans) < MAX_SPANS:
            self._spans.append(Span(phase, start, end, tokens))
        else:
            self._dropped += 1

    def planned(self, prompt_tokens: int, sampling: SamplingParams | None) -> None:
        self.prompt_tokens = prompt_tokens
        if sampling is not None:
            self.max_tokens, self.temperature = sampling.max_tokens, sampling.temperature

    def attempt(self, request_id: str, nodes: Iterable[NodeInfo], decision: str) -> None:
        if len(self.attempts) < MAX_ATTEMPTS:
            self.attempts.append(request_id)
            self.decisions.append(decision)
            self._expected |= {(request_id, node.node_id): node for node in nodes}
            self._on_attempt(self, request_id)

    def considered(self, nodes: list[Alternative]) -> None:
        """Notes the nodes that the first decision considered; later decisions are not noted."""
        self._alternatives = self._alternatives or nodes

    def arrived(self, at: float, node_id: str, tokens: int) -> None:
        self._output_tokens += tokens
        self._unflushed += tokens
        if self._unflushed_since is None:
            self._unflushed_since = at
        if len(self._arrivals) < MAX_SPANS:
            self._arrivals.append(Arrival(at, node_id, tokens))
        else:
            self._dropped += 1

    def finished(self, reason: str) -> None:
        self.finish_reasons.append(reason)

    def flushed(self, now: float) -> None:
        if self._unflushed_since is not None:
            self.span(TracePhase.FLUSH, self._unflushed_since, now, self._unflushed)
            self._unflushed_since, self._unflushed = None, 0

    def end(self, now: float, route: str, status: int | None) -> None:
        self.ended, self.route, self.status = now, route, status
        self._on_end(self)

    # --- the nodes' parts

    def add(self, told: NodeTrace, clocks: Clocks) -> bool:
        """Adds a node's part. Returns False for a node that took no part or has reported already."""
        node = self._expected.get((told.request_id, told.node_id))
        if node is None or node.epoch != told.epoch:
            return False
        del self._expected[told.request_id, told.node_id]
        offset = clocks.offset(told.node_id, told.epoch)
        off = offset.seconds if offset is not None else 0.0
        spans = [
            msgspec.structs.replace(span, start=span.start - off, end=span.end - off) if off else span
            for span in told.spans
        ]
        self._parts.append(
            NodePart(
                told.node_id,
                node.role,
                told.request_id,
                spans,
                off,
                offset.error_s if offset is not None else None,
                told.dropped,
                told.transfer,
            )
        )
        return True

    @property
    def is_complete(self) -> bool:
        return self.ended is not None and not self._expected

    # --- as it is shown

    def record(self) -> TraceRecord:
        return TraceRecord(
            request_id=self.request_id,
            answer_id=self.answer_id,
            trace_id=self.context.trace_id,
            span_id=self.span_id,
            parent_id=self.context.parent_id,
            trace_state=self.context.state,
            route=self.route,
            model=self.model,
            began=self.began,
            began_unix_s=self.began_unix_s,
            ended=self.ended,
            status=self.status,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self._output_tokens,
            decisions=list(self.decisions),
            router=list(self._spans),
            arrivals=list(self._arrivals),
            nodes=list(self._parts),
            missing=sorted({node_id for _, node_id in self._expected}),
            dropped=self._dropped,
            alternatives=self._alternatives,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            finish_reasons=list(self.finish_reasons),
        )

    def summary(self) -> TraceSummary:
        return TraceSummary(
            request_id=self.request_id,
            answer_id=self.answer_id,
            trace_id=self.context.trace_id,
            route=self.route,
            began_unix_s=self.began_unix_s,
            seconds=self.ended - self.began if self.ended is not None else None,
            status=self.status,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self._output_tokens,
        )


# How long an ended trace waits for nodes that still confirm a transfer; it is then exported without their
# parts.
NODES_TELL_WITHIN_S = 2.0


class Traces(RequestTracer):
    """Keeps the last `keep` traces. Beyond that it drops one, complete or not: the oldest of the tenant that
    has most."""

    def __init__(
        self,
        config: TracingConfig,
        model: str,
        export: Callable[[TraceRecord], None] | None = None,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._config = config
        self.draws = config.sample > 0
        self._model = model
        self._export = export
        self._draw = draw
        self._loop = asyncio.get_running_loop()
        self._ring: deque[RequestTrace] = deque()
        self._kept: Counter[str | None] = Counter()  # how many are in the ring, by tenant
        self.by_attempt: dict[str, RequestTrace] = {}
        self._timers: dict[RequestTrace, asyncio.TimerHandle] = {}
        self.clocks = Clocks()

    def begin(
        self, request_id: str, headers: list[tuple[bytes, bytes]], tenant: str | None = None
    ) -> RequestTrace | None:
        parent, state, asked = b"", b"", False
        for name, value in headers:
            if name == b"traceparent":
                parent = value
            elif name == b"tracestate":
                state = value
            elif name == ASK_HEADER:
                asked = value.strip() not in (b"", b"0")
        context = parse_context(parent, state) if parent else None
        wanted = asked or (context is not None and context.sampled)
        if not wanted and context is None and self._config.sample:
            # A caller's decision not to sample holds for the whole trace.
            wanted = self._draw() < self._config.sample
        if not wanted:
            return None
        now = time.monotonic()
        trace = RequestTrace(
            request_id,
            context or TraceContext.new(),
            self._model,
            now,
            time.time(),
            tenant=tenant,
            on_attempt=self._on_attempt,
            on_end=self._on_end,
        )
        self._ring.append(trace)
        self._kept[tenant] += 1
        if len(self._ring) > self._config.keep:
            self._drop_one()
        return trace

    def _drop_one(self) -> None:
        """Drops the oldest trace of the tenant that has most, so a tenant that traces every request drops
        only its own."""
        most = max(self._kept.values())
        index = next(at for at, trace in enumerate(self._ring) if self._kept[trace.tenant] == most)
        trace = self._ring[index]
        del self._ring[index]
        self._kept[trace.tenant] -= 1
        if not self._kept[trace.tenant]:
            del self._kept[trace.tenant]
        self._forget(trace)

    def _forget(self, trace: RequestTrace) -> None:
        for request_id in trace.attempts:
            self.by_attempt.pop(request_id, None)

    def _on_attempt(self, trace: RequestTrace, request_id: str) -> None:
        self.by_attempt[request_id] = trace

    def _on_end(self, trace: RequestTrace) -> None:
        if trace.is_complete:
            self._hand_on(trace)
        elif self._export is not None:
            self._timers[trace] = self._loop.call_later(NODES_TELL_WITHIN_S, self._hand_on, trace)
        elif trace not in self._ring:
            # it was dropped from the ring before its attempts began, so they are forgotten here
            self._forget(trace)

    def on_node_trace(self, told: NodeTrace) -> None:
        trace = self.by_attempt.get(told.request_id)
        if trace is not None and trace.add(told, self.clocks) and trace.is_complete:
            self._hand_on(trace)

    def on_clock(self, reading: ClockReading) -> None:
        self.clocks.heard(reading, time.monotonic())

    def on_node_left(self, node_id: str, epoch: int) -> None:
        self.clocks.forget(node_id, epoch)

    def _hand_on(self, trace: RequestTrace) -> None:
        self._forget(trace)
        timer = self._timers.pop(trace, None)
        if timer is not None:
            timer.cancel()
        if self._export is not None:
            self._export(trace.record())

    # --- what is asked of it

    def find(self, name: str, tenant: str | None = None) -> TraceRecord | None:
        """Finds the latest trace with this request id, answer id, trace id or attempt id, or with a request id
        that begins so. With `tenant`, only among its own."""
        own = [trace for trace in reversed(self._ring) if tenant is None or trace.tenant == tenant]
        for trace in own:
            if name in (trace.request_id, trace.answer_id, trace.context.trace_id) or name in trace.attempts:
                return trace.record()
        if len(name) < SHORT_ID:
            return None
        return next((trace.record() for trace in own if trace.request_id.startswith(name)), None)

    def list(self, tenant: str | None = None) -> TraceList:
        return TraceList(
            [trace.summary() for trace in reversed(self._ring) if tenant is None or trace.tenant == tenant]
        )

    def close(self) -> None:
        """Exports the traces that still wait for nodes, without waiting any longer."""
        for trace in list(self._timers):
            self._hand_on(trace)
