"""One request's trace, while it grows. On the event loop only."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable

import msgspec

from tandem.router.policy.alternatives import Alternative
from tandem.router.tracing.clocks import Clocks
from tandem.router.tracing.record import Arrival, NodePart, TraceContext, TraceRecord, TraceSummary
from tandem.wire.nodes import NodeInfo
from tandem.wire.tracing import NodeTrace, Span, TracePhase

MAX_SPANS = 4096
MAX_ATTEMPTS = 64  # of all choices together: one that has more is not told of to the end


class RequestTrace:
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
        self.decisions: list[str] = []
        self.attempts: list[str] = []  # the request ids that nodes know it by
        self._spans: list[Span] = []
        self._arrivals: list[Arrival] = []
        self._expected: dict[tuple[str, str], NodeInfo] = {}  # (attempt, node) that will tell
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

    def attempt(self, request_id: str, nodes: Iterable[NodeInfo], decision: str) -> None:
        if len(self.attempts) < MAX_ATTEMPTS:
            self.attempts.append(request_id)
            self.decisions.append(decision)
            self._expected |= {(request_id, node.node_id): node for node in nodes}
            self._on_attempt(self, request_id)

    def considered(self, nodes: list[Alternative]) -> None:
        """At the first decision."""
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

    def flushed(self, now: float) -> None:
        """The text of what had arrived has left for the client, or as much of it as makes whole characters."""
        if self._unflushed_since is not None:
            self.span(TracePhase.FLUSH, self._unflushed_since, now, self._unflushed)
            self._unflushed_since, self._unflushed = None, 0

    def end(self, now: float, route: str, status: int | None) -> None:
        self.ended, self.route, self.status = now, route, status
        self._on_end(self)

    # --- the nodes' parts

    def add(self, told: NodeTrace, clocks: Clocks) -> bool:
        """False for a node that has nothing to do with it, or speaks again."""
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
