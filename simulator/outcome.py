"""Records when every answer's tokens came, and makes the report of a simulation."""

from __future__ import annotations

import dataclasses
import math
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator

import msgspec

from tandem.base.errors import InternalError
from tandem.loadgen.metrics import Distribution, ServiceLevel
from tandem.simulator.costs import DecodeRun

# Gaps between tokens are counted in logarithmic classes of this width, because an hour of traffic may have a hundred million gaps.
_CLASS = math.log(1.002)
# A request keeps its inter-token limit if at most this share of its gaps is longer.
_SLOW_SHARE = 0.01


@dataclasses.dataclass(slots=True)
class AnswerTimes:
    asked_at: float
    prompt_tokens: int
    first_at: float | None = None
    last_at: float = 0.0
    tokens: int = 0
    slow_gaps: int = 0


class GapCounts:
    """A histogram of the gaps between tokens, in logarithmic classes."""

    def __init__(self) -> None:
        self._counts: defaultdict[int, int] = defaultdict(int)

    def add(self, seconds: float, count: int = 1) -> None:
        self._counts[_class_of(seconds)] += count

    def add_piece(self, first: float, last: float, steps: int, count: int) -> None:
        """Adds `steps` gaps that grow evenly from `first` to `last`, each `count` times."""
        begin, end = sorted((first, last))
        low, high = _class_of(begin), _class_of(end)
        if low == high or end == begin:
            self._counts[low] += steps * count
            return
        passed = 0
        for place in range(low, high):
            below = min(int((math.exp((place + 1) * _CLASS) - begin) / (end - begin) * (steps - 1)) + 1, steps)
            self._counts[place] += max(below - passed, 0) * count
            passed = max(passed, below)
        self._counts[high] += (steps - passed) * count

    def distribution(self) -> Distribution | None:
        total = sum(self._counts.values())
        if not total:
            return None
        ascending = [(_middle(place), count) for place, count in sorted(self._counts.items())]
        mean = math.fsum(seconds * count for seconds, count in ascending) / total

        def at(percent: float) -> float:
            left = percent / 100 * (total - 1)
            for seconds, count in ascending:
                if left < count:
                    return seconds * 1e3
                left -= count
            return ascending[-1][0] * 1e3

        return Distribution(mean * 1e3, at(50), at(90), at(95), at(99), ascending[-1][0] * 1e3)


def _class_of(seconds: float) -> int:
    return math.floor(math.log(max(seconds, 1e-9)) / _CLASS)


def _middle(place: int) -> float:
    return math.exp((place + 0.5) * _CLASS)


class NodeLoad(msgspec.Struct, frozen=True):
    node_id: str
    role: str
    seconds: float  # how long the node existed
    busy: float  # the share of this time in which it computed
    requests: int
    prompt_tokens_computed: int
    prompt_tokens_cached: int
    output_tokens: int
    preemptions: int
    most_blocks: float  # the largest share of its blocks in use, among its statuses


class SizeChange(msgspec.Struct, frozen=True):
    at: float
    role: str
    size: int
    why: str


class SimulationReport(msgspec.Struct, frozen=True):
    requests: int
    served: int
    refused: int
    failed: int
    seconds: float  # from the first arrival to the last token
    prompt_tokens: int
    cached_tokens: int  # prompt tokens found in the node's prefix cache
    output_tokens: int
    requests_per_s: float
    ttft_ms: Distribution | None
    itl_ms: Distribution | None
    tpot_ms: Distribution | None
    e2e_ms: Distribution | None
    slo: str | None
    attainment: float | None  # the share of all requests that kept the service level
    goodput_per_s: float | None
    bytes_moved: float
    nodes: list[NodeLoad]
    node_seconds: dict[str, float]  # by role
    changes: list[SizeChange]
    role_changes: int
    refusals: dict[str, int]  # requests that the router refused, by error code
    failures: dict[str, int]  # requests that failed later, by error code
    misses: dict[str, int]  # requests by the limit that they missed, or "refused" or "failed"
    given_up: bool  # the run was ended early, because too many requests had missed the limits
    lines: int = 0  # of a batch beside the traffic, answered

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


class AnswerLog:
    """Collects the times of all answers. `answer_s`: the time that a token takes from the node to the client."""

    def __init__(self, slo: ServiceLevel | None, answer_s: float) -> None:
        self._slo = slo
        self._answer_s = answer_s
        self._slow_s = slo.itl if slo is not None and slo.itl is not None else math.inf
        self.live: dict[str, AnswerTimes] = {}  # by the request's id on the nodes
        self.gaps = GapCounts()
        self.ttft, self.tpot, self.e2e = array("d"), array("d"), array("d")
        self.good = 0
        self.served = 0
        self.refusals: defaultdict[str, int] = defaultdict(int)
        self.failures: defaultdict[str, int] = defaultdict(int)
        self.misses: defaultdict[str, int] = defaultdict(int)
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.output_tokens = 0
        self.last_at = 0.0

    def on_token(self, request_id: str, now: float) -> None:
        times = self.live.get(request_id)
        if times is None:
            return
        if times.first_at is None:
            times.first_at = now
        else:
            gap = now - times.last_at
            self.gaps.add(gap)
            times.slow_gaps += gap > self._slow_s
        times.last_at = now
        times.tokens += 1

    def on_run(self, request_ids: Iterable[str], began: float, run: DecodeRun, first: int, last: int) -> None:
        """Books a token for each of these requests in each step of the run from `first` to before `last`. A request's first gap is counted
        from its last token, which may lie before the run."""
        listed = [times for request_id in request_ids if (times := self.live.get(request_id)) is not None]
        slow = 0
        for begin, end, count in run.gaps(first + 1, last):
            self.gaps.add_piece(begin, end, count, len(listed))
            slow += _num_above(self._slow_s, begin, end, count)
        first_at, last_at = began + run.seconds(first + 1), began + run.seconds(last)
        for times in listed:
            gap = first_at - times.last_at
            self.gaps.add(gap)
            times.slow_gaps += slow + (gap > self._slow_s)
            times.last_at = last_at
            times.tokens += last - first

    def on_end(self, request_id: str, cached_tokens: int) -> tuple[float, float]:
        """Ends an answer. Returns the seconds to its first and to its last token."""
        times = self.live.pop(request_id)
        if times.first_at is None:
            raise InternalError(f"{request_id} has ended and no token of it was seen")
        self.served += 1
        ttft = times.first_at - times.asked_at + self._answer_s
        e2e = times.last_at - times.asked_at + self._answer_s
        tpot = (times.last_at - times.first_at) / (times.tokens - 1) if times.tokens > 1 else None
        self.ttft.append(ttft)
        self.e2e.append(e2e)
        if tpot is not None:
            self.tpot.append(tpot)
        self.prompt_tokens += times.prompt_tokens
        self.cached_tokens += cached_tokens
        self.output_tokens += times.tokens
        self.last_at = max(self.last_at, times.last_at)
        missed = [name for name, is_kept in self._kept(times, ttft, tpot or 0.0, e2e) if not is_kept]
        self.good += not missed
        for name in missed:
            self.misses[name] += 1
        return ttft, e2e

    def _kept(self, times: AnswerTimes, ttft: float, tpot: float, e2e: float) -> Iterator[tuple[str, bool]]:
        slo = self._slo
        if slo is None:
            return
        yield "ttft", slo.ttft is None or ttft <= slo.ttft
        yield "tpot", slo.tpot is None or tpot <= slo.tpot
        yield "e2e", slo.e2e is None or e2e <= slo.e2e
        yield "itl", times.slow_gaps <= _SLOW_SHARE * (times.tokens - 1)

    def on_refused(self, code: str) -> None:
        self.refusals[code] += 1
        self.misses["refused"] += 1

    def on_failed(self, request_id: str, code: str) -> None:
        self.live.pop(request_id, None)
        self.failures[code] += 1
        self.misses["failed"] += 1

    @property
    def bad(self) -> int:
        """How many ended requests have missed the service level."""
        return self.served - self.good + sum(self.refusals.values()) + sum(self.failures.values())


def _num_above(limit: float, first: float, last: float, steps: int) -> int:
    """How many of `steps` gaps, which grow evenly from `first` to `last`, are longer than `limit`."""
    low, high = min(first, last), max(first, last)
    if high <= limit:
        return 0
    if low > limit or steps == 1:
        return steps
    return steps - 1 - math.floor((limit - low) / (high - low) * (steps - 1))
