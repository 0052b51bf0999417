"""When each thing happened to one request, and the router's metrics of it."""

from __future__ import annotations

from collections.abc import Callable

from tandem.router.dispatch.attempt import SequenceSpec
from tandem.router.metrics import RouterMetrics
from tandem.router.policy import RoutingDecision
from tandem.router.recent import RequestAccount
from tandem.wire.sampling import FinishReason


class RequestTimings:
    """A part of a prompt that is read ahead has no answer, so it counts in none of the figures of answers."""

    def __init__(
        self, metrics: RouterMetrics, clock: Callable[[], float], spec: SequenceSpec, came: float | None
    ) -> None:
        """`came`: when it began to wait for a place."""
        self._metrics = metrics
        self._clock = clock
        self._spec = spec
        self.started_at = clock()
        self._came = self.started_at if came is None else came
        self._arrived_at = self.started_at if spec.arrived is None else spec.arrived
        self._submitted_at: float | None = None  # the first time
        self._first_token_at: float | None = None
        self._last_token_at: float | None = None
        self._longest_gap_s = 0.0  # between two reports of its tokens
        self._router_wait_s = 0.0  # for a place
        self.node_wait_s = 0.0  # in the line of the node that read the prompt
        self.handover_s = 0.0
        self.cached_tokens: int | None = None  # of the prompt
        self.preemptions = 0

    def submitted(self, at: float) -> None:
        if self._submitted_at is None:
            self._submitted_at = at
            self._router_wait_s = max(at - self._came, 0.0)

    def tokens(self, count: int) -> float:
        """So many more have come. Returns the time."""
        now = self._clock()
        if self._spec.reads_ahead:
            self._first_token_at = self._last_token_at = now
            return now
        self._metrics.generation_tokens.inc(count)
        if self._last_token_at is not None:
            gap = now - self._last_token_at
            self._metrics.inter_token_latency.observe(gap)
            if gap > self._longest_gap_s:
                self._longest_gap_s = gap
        else:
            self._first_token_at = now
            self._metrics.time_to_first_token.observe(now - self._arrived_at)
            self._metrics.queue_time.observe(self._router_wait_s + self.node_wait_s)
            self._metrics.prompt_tokens.inc(len(self._spec.prompt_token_ids))
        self._last_token_at = now
        return now

    def ended(self, finish: FinishReason, output_tokens: int) -> None:
        if self._spec.reads_ahead:
            return
        now, metrics = self._clock(), self._metrics
        metrics.requests_finished.inc(finish.value)
        metrics.request_prompt_tokens.observe(len(self._spec.prompt_token_ids))
        metrics.request_generation_tokens.observe(output_tokens)
        metrics.request_max_tokens.observe(self._spec.sampling.max_tokens)
        if self.preemptions:
            metrics.requests_preempted.inc()
        if self._first_token_at is None or self._last_token_at is None:
            return
        metrics.decode_time.observe(now - self._first_token_at)
        if self._submitted_at is not None:
            metrics.inference_time.observe(max(now - self._submitted_at - self.node_wait_s, 0.0))
        if output_tokens > 1:
            taken = self._last_token_at - self._first_token_at
            metrics.time_per_output_token.observe(taken / (output_tokens - 1))

    def account(
        self,
        time_of_day: float,
        finish: FinishReason,
        output_tokens: int,
        decision: RoutingDecision | None,
        failovers: int,
    ) -> RequestAccount:
        """Of a request that has just ended; `decision` is its last."""
        now, spec = self._clock(), self._spec
        submitted = now if self._submitted_at is None else self._submitted_at
        first = now if self._first_token_at is None else self._first_token_at
        prefill_s = max(first - submitted, 0.0)
        node_wait_s = min(self.node_wait_s, prefill_s)
        handover_s = min(self.handover_s, now - first)
        prefill = decision.prefill if decision is not None else None
        decode = decision.decode if decision is not None else None
        return RequestAccount(
            request_id=spec.label,
            ended_at=time_of_day,
            reading_s=max(self._came - self._arrived_at, 0.0),
            router_wait_s=max(submitted - self._came, 0.0),
            node_wait_s=node_wait_s,
            prefill_s=prefill_s - node_wait_s,
            handover_s=handover_s,
            decode_s=now - first - handover_s,
            prompt_tokens=len(spec.prompt_token_ids),
            cached_tokens=self.cached_tokens or 0,
            output_tokens=output_tokens,
            longest_gap_s=self._longest_gap_s,
            prefill_node=prefill.node_id if prefill is not None else "",
            decode_node=decode.node_id if decode is not None else "",
            decision=decision.reason if decision is not None else "",
            preemptions=self.preemptions,
            failovers=failovers,
            finish=finish.value,
            traced=spec.trace is not None,
        )
