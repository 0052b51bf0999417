"""What a prefill node and a decode node that serve together take longer than alone, from the traces of all requests of some traffic.

On one machine they share its cores' caches and its memory, and the router and the clients compute there, too. So both are measured as
they serve: prompts of several lengths come at random moments, and their answers are streamed.
"""

from __future__ import annotations

import bisect
import dataclasses
import statistics
from collections.abc import Sequence
from itertools import pairwise

import msgspec

from tandem.simulator.costs import BesideCost, CostModel, line_through
from tandem.simulator.profile_client import ProfiledRequest
from tandem.wire.nodes import Role

# A step counts as beside the other node if that node computes for at least this share of it, and as alone if it rests for as much.
MOST_OF = 0.9
FEWEST_STEPS = 16  # that make a figure
GROUPS = 4  # of steps that read, by their length


@dataclasses.dataclass(slots=True)
class _Step:
    """One step of a node, with the work of every request in it."""

    began: float
    ended: float
    chunks: dict[str, tuple[int, int]]  # by request: tokens, and tokens before them
    reads: bool

    @property
    def seconds(self) -> float:
        return self.ended - self.began


class _Busy:
    """When a node computed."""

    def __init__(self, steps: Sequence[_Step]) -> None:
        self._steps = steps
        self._begins = [step.began for step in steps]

    def share(self, begin: float, end: float) -> float:
        """The share of the time from `begin` to `end` in which the node computed."""
        first = max(bisect.bisect_right(self._begins, begin) - 1, 0)
        last = bisect.bisect_left(self._begins, end)
        seconds = sum(
            max(min(step.ended, end) - max(step.began, begin), 0.0) for step in self._steps[first:last]
        )
        return seconds / (end - begin)


class _Ratio:
    """How many times as long as by the costs some steps took together."""

    def __init__(self) -> None:
        self._seconds = self._by_costs = 0.0
        self._steps = 0

    def add(self, seconds: float, by_costs: float) -> None:
        self._seconds += seconds
        self._by_costs += by_costs
        self._steps += 1

    @property
    def value(self) -> float:
        return self._seconds / self._by_costs if self._steps >= FEWEST_STEPS else 1.0


def in_traffic(costs: CostModel, asked: Sequence[ProfiledRequest]) -> CostModel:
    """Returns the costs with what the traffic shows: what the nodes take longer while both compute, and what a step that writes takes
    longer even while the other node rests, because requests come and answers are streamed. `asked`: all requests of the traffic."""
    reading, writing = (_steps_of(asked, role) for role in (Role.PREFILL, Role.DECODE))
    reads, writes = _Busy(reading), _Busy(writing)
    slope, per_step = _longer(
        [
            (_alone_s(costs, step), step.seconds)
            for step in reading
            if step.reads and writes.share(step.began, step.ended) >= MOST_OF
        ]
    )
    apart, beside = _Ratio(), _Ratio()
    for step, following in pairwise(writing):
        # Without a request in both, the node may have rested in between.
        if not step.reads and step.chunks.keys() & following.chunks.keys():
            share = reads.share(step.began, following.began)
            ratio = beside if share >= MOST_OF else apart if share <= 1 - MOST_OF else None
            if ratio is not None:
                ratio.add(following.began - step.began, _alone_s(costs, step))
    times = max(apart.value, 1.0)
    return msgspec.structs.replace(
        costs,
        decode=costs.decode.times(times),
        beside=BesideCost(1.0 + slope, per_step, max(beside.value / times, 1.0)),
    )


def _steps_of(asked: Sequence[ProfiledRequest], role: Role) -> list[_Step]:
    """Returns a node's steps in order. Leaves out a step with a request that was not traced."""
    steps: dict[float, _Step] = {}
    tokens: dict[float, int] = {}  # of each step, with those of requests that were not traced
    for request in asked:
        context = 0
        for step in request.steps:
            if step.role == role:
                seen = steps.setdefault(step.began, _Step(step.began, step.ended, {}, False))
                seen.chunks[request.record.request_id] = step.tokens, context
                seen.reads |= step.reads
                tokens[step.began] = step.tokens + step.beside
            context += step.tokens
    whole = (
        step
        for began, step in steps.items()
        if sum(count for count, _ in step.chunks.values()) == tokens[began]
    )
    return sorted(whole, key=lambda step: step.began)


def _alone_s(costs: CostModel, step: _Step) -> float:
    """The seconds that a step takes by the costs, if it only reads or only writes."""
    chunks = list(step.chunks.values())
    return (
        costs.step_s(chunks)
        if step.reads
        else costs.step_s([], len(chunks), sum(before for _, before in chunks))
    )


def _longer(steps: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """By how much a step takes longer than by the costs: as a share of its seconds, and in seconds however short it is. `steps`: the
    seconds by the costs and in traffic."""
    if len(steps) < FEWEST_STEPS:
        return 0.0, 0.0
    ordered = sorted(steps)
    size = len(ordered) / GROUPS
    groups = [ordered[round(size * group) : round(size * (group + 1))] for group in range(GROUPS)]
    means = [
        (statistics.fmean(by_costs for by_costs, _ in group), statistics.fmean(took for _, took in group))
        for group in groups
    ]
    per_step, slope = line_through([(by_costs, took - by_costs) for by_costs, took in means])
    return slope, per_step
