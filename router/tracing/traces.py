"""Which requests are traced, and the last traces. On the event loop only."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, deque
from collections.abc import Callable

from tandem.router.config import TracingConfig
from tandem.router.tracing.clocks import Clocks
from tandem.router.tracing.record import TraceContext, TraceList, TraceRecord, parse_context
from tandem.router.tracing.trace import RequestTrace
from tandem.wire.tracing import ClockReading, NodeTrace

# A client that asks for one trace, without a tracing system of its own.
ASK_HEADER = b"x-tandem-trace"
# After the answer, nodes still confirm a transfer. What they have not told by then is exported without it.
NODES_TELL_WITHIN_S = 2.0


class Traces:
    """Beyond `keep` one is forgotten, complete or not: the oldest of the tenant that has most."""

    def __init__(
        self,
        config: TracingConfig,
        model: str,
        export: Callable[[TraceRecord], None] | None = None,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._config = config
        self._model = model
        self._export = export
        self._draw = draw
        self._loop = asyncio.get_running_loop()
        self._ring: deque[RequestTrace] = deque()
        self._kept: Counter[str | None] = Counter()  # in the ring, by tenant
        self._by_attempt: dict[str, RequestTrace] = {}
        self._timers: dict[RequestTrace, asyncio.TimerHandle] = {}
        self.clocks = Clocks()

    def begin(
        self, request_id: str, headers: list[tuple[bytes, bytes]], tenant: str | None = None
    ) -> RequestTrace | None:
        """None for one that is not traced: nothing of all this happens for it."""
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
            # A caller who decided against it has decided for the whole trace.
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
        """The oldest of the tenant that has most: one that has all of its requests traced drops its own."""
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
            self._by_attempt.pop(request_id, None)

    def _on_attempt(self, trace: RequestTrace, request_id: str) -> None:
        self._by_attempt[request_id] = trace

    def _on_end(self, trace: RequestTrace) -> None:
        if trace.is_complete:
            self._hand_on(trace)
        elif self._export is not None:
            self._timers[trace] = self._loop.call_later(NODES_TELL_WITHIN_S, self._hand_on, trace)
        elif trace not in self._ring:
            self._forget(trace)  # it left before its attempts came, and nothing else forgets them

    def on_node_trace(self, told: NodeTrace) -> None:
        trace = self._by_attempt.get(told.request_id)
        if trace is not None and trace.add(told, self.clocks) and trace.is_complete:
            self._hand_on(trace)

    def on_clock(self, reading: ClockReading) -> None:
        self.clocks.heard(reading, time.monotonic())

    def _hand_on(self, trace: RequestTrace) -> None:
        self._forget(trace)
        timer = self._timers.pop(trace, None)
        if timer is not None:
            timer.cancel()
        if self._export is not None:
            self._export(trace.record())

    # --- what is asked of it

    def find(self, name: str, tenant: str | None = None) -> TraceRecord | None:
        """By the request's id, the answer's, the trace's, or one that a node's log has. The latest, if several. With a
        tenant, only among its own."""
        for trace in reversed(self._ring):
            if tenant is not None and trace.tenant != tenant:
                continue
            if name in (trace.request_id, trace.answer_id, trace.context.trace_id) or name in trace.attempts:
                return trace.record()
        return None

    def list(self, tenant: str | None = None) -> TraceList:
        """A tenant's own, or all."""
        return TraceList(
            [trace.summary() for trace in reversed(self._ring) if tenant is None or trace.tenant == tenant]
        )

    def close(self) -> None:
        """What waits for a node's word waits no longer."""
        for trace in list(self._timers):
            self._hand_on(trace)
