"""What a prefill node and a decode node that serve together take longer than alone, from the traces of all requests of some traffic.

On one machine they share its cores' caches and its memory, and the router and the clients compute there, too. So both are measured as
they serve: prompts of several lengths come at random moments, and their answers are streamed.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence
from itertools import pairwise

import msgspec
import numpy as np

from tandem.simulator.costs import BesideCost, CostModel
from tandem.simulator.profile_client import ProfiledRequest
from tandem.wire.nodes import Role

FEWEST_STEPS = 16  # that make a figure
FIT_TURNS = 60
NEAR = 0.01  # Errors below this weigh like this one where medians are fitted.
# How far off the costs of a node that computes alone may be, as the machine may have become faster or slower since they were measured. It
# matters where hardly any step is alone in the traffic.
COSTS_OFF = 0.1


@dataclasses.dataclass(slots=True)
class _Step:
    began: float
    ended: float
    tokens: int
    # By request: tokens, and tokens before them
    chunks: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    reads: bool = False

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    @property
    def is_known(self) -> bool:
        """Whether every request in it was traced."""
        return sum(count for count, _ in self.chunks.values()) == self.tokens


class _Busy:
    """When a node computed."""

    def __init__(self, steps: Sequence[_Step]) -> None:
        self._steps = steps
        self._begins = [step.began for step in steps]

    def seconds(self, begin: float, end: float) -> float:
        """The seconds from `begin` to `end` in which the node computed."""
        first = max(bisect.bisect_right(self._begins, begin) - 1, 0)
        last = bisect.bisect_left(self._begins, end)
        return sum(max(min(step.ended, end) - max(step.began, begin), 0.0) for step in self._steps[first:last])


@dataclasses.dataclass(frozen=True, slots=True)
class _Taken:
    """What one step took in traffic."""

    by_costs: float
    seconds: float
    beside: float  # the seconds of it in which the other node computed


def in_traffic(costs: CostModel, asked: Sequence[ProfiledRequest]) -> CostModel:
    """Returns the costs with what the traffic shows: what the nodes take longer while both compute, and what they take while the other
    one rests, because requests come and answers are streamed. `asked`: all requests of the traffic."""
    reading, writing = (_steps_of(asked, role) for role in (Role.PREFILL, Role.DECODE))
    reads, writes = _Busy(reading), _Busy(writing)
    reads_alone, reads_times, reads_more_s = _fit(
        [
            _Taken(_alone_s(costs, step), step.seconds, writes.seconds(step.began, step.ended))
            for step in reading
            if step.reads and step.is_known
        ],
        reads=True,
    )
    writes_alone, writes_times, _ = _fit(
        [
            _Taken(_alone_s(costs, step), following.began - step.began, reads.seconds(step.began, following.began))
            for step, following in pairwise(writing)
            # Without a request in both, the node may have rested in between.
            if step.is_known and not step.reads and step.chunks.keys() & following.chunks.keys()
        ],
        reads=False,
    )
    return msgspec.structs.replace(
        costs,
        prefill=costs.prefill.times(reads_alone),
        decode=costs.decode.times(writes_alone),
        beside=BesideCost(reads_times, reads_more_s, writes_times),
    )


def _steps_of(asked: Sequence[ProfiledRequest], role: Role) -> list[_Step]:
    """Returns a node's steps in order."""
    steps: dict[float, _Step] = {}
    for request in asked:
        context = 0
        for step in request.steps:
            if step.role == role:
                seen = steps.setdefault(step.began, _Step(step.began, step.ended, step.tokens + step.beside))
                seen.chunks[request.record.request_id] = step.tokens, context
                seen.reads |= step.reads
            context += step.tokens
    return sorted(steps.values(), key=lambda step: step.began)


def _alone_s(costs: CostModel, step: _Step) -> float:
    """The seconds that a step takes by the costs, if it only reads or only writes."""
    chunks = list(step.chunks.values())
    return costs.step_s(chunks) if step.reads else costs.step_s([], len(chunks), sum(before for _, before in chunks))


def _fit(steps: Sequence[_Taken], *, reads: bool) -> tuple[float, float, float]:
    """Returns how many times as long as by the costs a step takes while the other node rests; how many times as long as that while the other
    node computes; and how many seconds more it takes then, however short it is (only a step that `reads`).

    Fits each step's error relative to its length, by scoring. Most steps are only partly beside one of the other node, and all count:
    those that are wholly beside others are the short ones, and those beside many answers. Of steps that write it fits the mean (gamma
    errors): what a client waits for a token is a mean of steps, with the few long ones. Of steps that read it fits the median (absolute
    errors): most prompts are one step, and half of them wait no longer than the median. It stays the same when the machine is slow for
    some seconds of the traffic, by which the mean is a few percent too high for other traffic."""
    if len(steps) < FEWEST_STEPS:
        return 1.0, 1.0, 0.0
    are_beside = sum(step.beside > 0 for step in steps) >= FEWEST_STEPS
    by_costs, seconds, beside = np.array([dataclasses.astuple(step) for step in steps]).T
    share = beside / seconds
    values, least = np.array([0.0, 1.0, 0.0]), np.array([-np.inf, 1.0, 0.0])  # the first as a logarithm
    for _ in range(FIT_TURNS):
        alone, times, more_s = values
        slowdown = times + more_s / by_costs
        # Beside the other node, a step gets on 1/slowdown as fast.
        speed = 1.0 - share * (1.0 - 1.0 / slowdown)
        errors = seconds * speed / (by_costs * np.exp(alone)) - 1.0
        slope = share / slowdown**2 / speed
        weights = 1.0 / np.maximum(np.abs(errors), NEAR) if reads else np.ones_like(errors)
        costs_weigh = np.mean(weights * errors**2) / COSTS_OFF**2
        scale = np.sqrt(np.append(weights, costs_weigh))
        rows = np.vstack([np.array([np.ones_like(slope), slope, slope / by_costs]).T, [1.0, 0.0, 0.0]])
        rows, wanted = rows * scale[:, None], np.append(errors, -alone) * scale
        free = np.array([True, are_beside, are_beside and reads])
        while True:
            change = np.zeros(3)
            change[free] = np.linalg.lstsq(rows[:, free], wanted, rcond=None)[0]
            too_low = values + change < least
            if not too_low.any():
                break
            values[too_low] = least[too_low]
            free &= ~too_low
        values = values + change
    return float(np.exp(values[0])), float(values[1]), float(values[2])
