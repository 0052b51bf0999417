"""What nodes have reported about one request: its tokens, merged by index from either node, which a choice
reads, its timings, and the router's metrics of it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

from tandem.api.logprob_store import LogprobStore
from tandem.api.sequence import SequenceSpec
from tandem.base.errors import InternalError
from tandem.router.metrics import RouterMetrics
from tandem.router.policy.views import RoutingDecision
from tandem.router.recent import RequestAccount
from tandem.wire.requests import TokenChunk
from tandem.wire.sampling import FinishReason

# Shared by all requests without log-probabilities; nothing is ever added to it.
_NO_LOGPROBS = LogprobStore()


class MergedChunk(enum.Enum):
    NEWS = enum.auto()  # merged: it brought tokens, the end, or nothing new
    HELD = enum.auto()  # held until the report before it has come
    DIFFERS = enum.auto()  # dropped: it contradicts a known token


# Looked up once: every token passes here, and looking up a member of an enumeration takes longer than
# comparing it.
_NEWS, _HELD, _DIFFERS = MergedChunk


class TokenLedger:
    """Merges the reports of two nodes. Invariant: `tokens` is a gapless prefix of the output; `logprobs` is
    as long, if log-probabilities are wanted.

    A chunk that would leave a gap, or lacks log-probabilities for new tokens, is held until another chunk
    brings what is missing: the decode node may report the first token, without log-probabilities, before the
    prefill node's report arrives.

    The first report of a token counts. It may have been shown already, so a later, different report changes
    nothing.
    """

    def __init__(self, *, wants_logprobs: bool) -> None:
        self.tokens: list[int] = []
        self.logprobs = LogprobStore() if wants_logprobs else _NO_LOGPROBS
        self.finish: FinishReason | None = None
        self.stop_token: int | None = None
        self._wants_logprobs = wants_logprobs
        self._held: list[TokenChunk] = []

    def accept(self, chunk: TokenChunk, *, may_differ: bool = False) -> MergedChunk:
        """Merges a chunk or holds it. `may_differ`: take a chunk's new tokens even if its known tokens differ
        from ours."""
        merged = self._merge(chunk, may_differ)
        if merged is _HELD:
            self._held.append(chunk)
        while merged is _NEWS and self._held:
            held, self._held = self._held, []
            differs = False
            for waiting in held:
                again = self._merge(waiting, may_differ)
                if again is _HELD:
                    self._held.append(waiting)
                differs = differs or again is _DIFFERS
            if differs:
                return _DIFFERS
            if len(self._held) == len(held):
                break
        return merged

    def _merge(self, chunk: TokenChunk, may_differ: bool) -> MergedChunk:
        tokens, ids, start = self.tokens, chunk.token_ids, chunk.start
        have = len(tokens)
        if start != have:
            if start < 0:
                raise InternalError(f"a node reported tokens from index {start}")
            if start > have:
                return _HELD
            known = have - start
            if tokens[start : start + len(ids)] != ids[:known] and not may_differ:
                return _DIFFERS
            ids = ids[known:]
        if ids:
            if self._wants_logprobs:
                if chunk.logprobs is None:
                    return _HELD
                self.logprobs.extend(chunk.logprobs[len(chunk.token_ids) - len(ids) :])
            tokens.extend(ids)
        finish = chunk.finish
        if finish is not None and (finish is FinishReason.STOP or finish is FinishReason.LENGTH):
            self.finish = finish
            self.stop_token = chunk.stop_token
        return _NEWS

    @property
    def waiting(self) -> bool:
        """Whether a chunk is held that cannot be merged yet."""
        return bool(self._held)

    @property
    def reported(self) -> int:
        """The number of tokens that were reported without a gap, merged or held."""
        have = len(self.tokens)
        for chunk in sorted(self._held, key=lambda chunk: chunk.start):
            if chunk.start <= have:
                have = max(have, chunk.start + len(chunk.token_ids))
        return have

    def drop_held(self) -> None:
        """Drops held chunks because another attempt begins, which reports everything from the last merged
        token on."""
        self._held.clear()


class RequestTimings:
    """When each thing happened to a request, and the metrics made of it. A prompt's part that is read ahead
    has no answer, so it counts in no metric of answers."""

    def __init__(
        self, metrics: RouterMetrics, clock: Callable[[], float], spec: SequenceSpec, came: float | None
    ) -> None:
        """`came`: when the request began to wait for a place."""
        self._metrics = metrics
        self._clock = clock
        self._spec = spec
        self._is_measured = spec.is_measured  # looked up once instead of with every token
        self.started_at = clock()
        self._came = self.started_at if came is None else came
        self.arrived_at = self.started_at if spec.arrived is None else spec.arrived
        self.submitted_at: float | None = None  # of the first attempt
        self.first_token_at: float | None = None
        self._last_token_at: float | None = None
        self._longest_gap_s = 0.0  # between two reports of its tokens
        self._router_wait_s = 0.0  # for a place
        self.node_wait_s = 0.0  # in the line of the node that computes the prompt
        self.handover_s = 0.0
        self.cached_tokens: int | None = None  # of the prompt
        self.preemptions = 0

    def submitted(self, at: float) -> None:
        if self.submitted_at is None:
            self.submitted_at = at
            self._router_wait_s = max(at - self._came, 0.0)

    def tokens(self, count: int) -> float:
        """Notes that `count` more tokens have arrived. Returns the time."""
        now = self._clock()
        if not self._is_measured:
            self.first_token_at = self._last_token_at = now
            return now
        self._metrics.generation_tokens.inc(count=count)
        if self._last_token_at is not None:
            gap = now - self._last_token_at
            self._metrics.inter_token_latency.observe(gap)
            if gap > self._longest_gap_s:
                self._longest_gap_s = gap
        else:
            self.first_token_at = now
            self._metrics.time_to_first_token.observe(now - self.arrived_at)
            self._metrics.queue_time.observe(self._router_wait_s + self.node_wait_s)
            self._metrics.prompt_tokens.inc(count=len(self._spec.facts.prompt_token_ids))
        self._last_token_at = now
        return now

    def ended(self, finish: FinishReason, output_tokens: int) -> None:
        if not self._is_measured:
            return
        now, metrics = self._clock(), self._metrics
        metrics.requests_finished.inc(finish.value)
        metrics.request_prompt_tokens.observe(len(self._spec.facts.prompt_token_ids))
        metrics.request_generation_tokens.observe(output_tokens)
        metrics.request_max_tokens.observe(self._spec.facts.sampling.max_tokens)
        if self.preemptions:
            metrics.requests_preempted.inc()
        if self.first_token_at is None or self._last_token_at is None:
            return
        metrics.decode_time.observe(now - self.first_token_at)
        if self.submitted_at is not None:
            metrics.inference_time.observe(max(now - self.submitted_at - self.node_wait_s, 0.0))
        if output_tokens > 1:
            taken = self._last_token_at - self.first_token_at
            metrics.time_per_output_token.observe(taken / (output_tokens - 1))

    def account(
        self,
        time_of_day: float,
        finish: FinishReason,
        output_tokens: int,
        decision: RoutingDecision | None,
        failovers: int,
    ) -> RequestAccount:
        """Sums up a request that has just ended. `decision`: its last routing decision."""
        now, spec = self._clock(), self._spec
        submitted = now if self.submitted_at is None else self.submitted_at
        first = now if self.first_token_at is None else self.first_token_at
        prefill_s = max(first - submitted, 0.0)
        node_wait_s = min(self.node_wait_s, prefill_s)
        handover_s = min(self.handover_s, now - first)
        prefill = decision.prefill if decision is not None else None
        decode = decision.decode if decision is not None else None
        return RequestAccount(
            request_id=spec.label,
            ended_at=time_of_day,
            reading_s=max(self._came - self.arrived_at, 0.0),
            router_wait_s=max(submitted - self._came, 0.0),
            node_wait_s=node_wait_s,
            prefill_s=prefill_s - node_wait_s,
            handover_s=handover_s,
            decode_s=now - first - handover_s,
            prompt_tokens=len(spec.facts.prompt_token_ids),
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
