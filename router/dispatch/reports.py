"""What the nodes of a request report of its prompt: when it was read, how much of it was cached, and its log-probabilities."""

from __future__ import annotations

from typing import Any

from tandem.api.sequence import SequenceSpec
from tandem.router.dispatch.ledger import RequestTimings
from tandem.router.dispatch.placement import Attempt, Placement, TokenSource
from tandem.wire.requests import TokenChunk
from tandem.wire.sampling import TokenLogprobs

_DECODE = TokenSource.DECODE  # looked up once instead of with every token


class PromptReports:
    def __init__(self, placement: Placement[Any], spec: SequenceSpec, timings: RequestTimings) -> None:
        self._placement = placement
        self._spec = spec
        self._timings = timings
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None

    def note(self, attempt: Attempt, source: TokenSource, chunk: TokenChunk) -> None:
        """Acts on the first report of each node of the attempt. Every later token costs two tests here."""
        timings = self._timings
        if source is _DECODE:
            if not attempt.decode_started:
                attempt.decode_started = True
                timings.handover_s = self._placement.on_decode_started(attempt)
        elif not attempt.prefill_reported:
            attempt.prefill_reported = True
            self._placement.on_prefill_reported(attempt)
        timings.preemptions += chunk.preemptions
        if chunk.cached_tokens is None and chunk.prompt_logprobs is None:
            return
        # A decode node that received the KV knows neither the prompt's log-probabilities nor how much of it
        # was cached.
        if self.prompt_logprobs is None:
            self.prompt_logprobs = chunk.prompt_logprobs
        if source is TokenSource.PREFILL or attempt.prefill is None or attempt.prefill_gave_up:
            if timings.cached_tokens is None:
                timings.node_wait_s = chunk.queue_s
            self._take_cached(chunk.cached_tokens)
        elif attempt.decode_cached is None:
            attempt.decode_cached = chunk.cached_tokens

    def prefill_gave_up(self, attempt: Attempt) -> None:
        """The decode node told the prefill node that it computes the prompt itself."""
        attempt.prefill_reported = attempt.prefill_gave_up = True
        self._take_cached(attempt.decode_cached)

    def first_token(self, attempt: Attempt, now: float) -> int | None:
        """Returns how many tokens of the prompt were computed for the attempt's first token; None for a later token."""
        if attempt.first_token_at is not None or not self._spec.is_measured:
            return None
        attempt.first_token_at = now
        cached = self._timings.cached_tokens or 0
        computed = len(self._spec.facts.prompt_token_ids) + attempt.base - cached
        self._placement.on_first_token(attempt, computed, self._timings.node_wait_s)
        return computed

    def _take_cached(self, cached_tokens: int | None) -> None:
        if self._timings.cached_tokens is None:
            self._timings.cached_tokens = cached_tokens
