"""Simulates two pools that serve a given load, second by second, and report what real nodes report."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

from tandem.cluster.config import AutoscalingConfig, SloConfig, TandemConfig
from tandem.cluster.pools.autoscaling.autoscaler import Autoscaler
from tandem.cluster.pools.autoscaling.rules import PoolBounds, Resize
from tandem.wire.nodes import Role
from tandem.wire.requests import NodeCounters, NodeStatus
from tandem.wire.step_costs import ALONE, TERMS, StepCosts
from tests.cluster.pools.helpers import FakeClock, status_of

START_S = 20.0  # how long a node takes to load its model
DRAIN_S = 5.0
PROMPT = 500
READS_PER_S = 5000.0  # prompt tokens that one node computes in a second
BLOCKS = 1000
BLOCKS_PER_REQUEST = 20
STEP_S = 0.02  # an empty decode step, and the time that each answer in it adds
STEP_PER_ANSWER_S = 0.001
COSTS = StepCosts(tuple(STEP_S if term == ALONE else 0.0 for term in range(TERMS)), rows_seen=1)


@dataclass
class SimulatedPool:
    role: Role
    size: int
    minimum: int
    maximum: int
    wanted: int = 0
    ready_at: float | None = None  # when the node that starts or leaves has done so
    counters: NodeCounters = field(default_factory=NodeCounters)
    waiting_tokens: float = 0.0
    answers: float = 0.0
    epochs: int = 0

    def __post_init__(self) -> None:
        self.wanted = self.size

    def settle(self, now: float) -> None:
        if self.ready_at is not None and now >= self.ready_at:
            self.size, self.ready_at = self.wanted, None
            self.epochs += 1

    @property
    def serving(self) -> int:
        return min(self.size, self.wanted)

    def statuses(self) -> list[NodeStatus]:
        n = self.serving
        used = min(BLOCKS, int(self.answers / n * BLOCKS_PER_REQUEST))
        return [
            status_of(
                f"{self.role.value}-{index}", self.role, epoch=self.epochs, counters=self.counters,
                free_blocks=BLOCKS - used, total_blocks=BLOCKS, running=int(self.answers / n),
                waiting=math.ceil(self.waiting_tokens / n / PROMPT), waiting_tokens=int(self.waiting_tokens / n),
            )
            for index in range(n)
        ]  # fmt: skip


class Simulation:
    """`requests_per_s` at each second; each is a prompt of PROMPT tokens and an answer of `answer_s`."""

    def __init__(
        self,
        requests_per_s: Callable[[float], float],
        *,
        answer_s: float = 10.0,
        seed: int | None = 0,  # None: perfectly even arrivals
        prefill: tuple[int, int, int] = (1, 1, 8),  # at first, min, max
        decode: tuple[int, int, int] = (1, 1, 8),
        slo: SloConfig | None = None,
    ) -> None:
        self.requests_per_s = requests_per_s
        self.answer_s = answer_s
        self.random = None if seed is None else random.Random(seed)
        self.clock = FakeClock()
        self.pools = {
            Role.PREFILL: SimulatedPool(Role.PREFILL, *prefill),
            Role.DECODE: SimulatedPool(Role.DECODE, *decode),
        }
        self.decisions: list[tuple[float, Resize, int]] = []  # time, decision, previous size
        slo = slo or SloConfig(ttft_s=2.0, inter_token_s=0.06)
        config = TandemConfig(slo=slo, autoscaling=AutoscalingConfig())
        self.said: list[str] = []
        self.router_wait_s = 0.0
        self.autoscaler = Autoscaler(
            config, self.clock, self.statuses, lambda: self.router_wait_s, self.view, self.resize, self.said.append
        )

    def statuses(self) -> list[NodeStatus]:
        return [status for pool in self.pools.values() for status in pool.statuses()]

    def view(self) -> list[PoolBounds]:
        return [
            PoolBounds(pool.role, pool.wanted, pool.minimum, pool.maximum, pool.ready_at is None, is_waiting=False)
            for pool in self.pools.values()
        ]

    async def resize(self, resize: Resize) -> None:
        pool = self.pools[resize.role]
        assert all(other.ready_at is None for other in self.pools.values()), "one change at a time"
        assert pool.minimum <= resize.size <= pool.maximum
        self.decisions.append((self.clock.now(), resize, pool.wanted))
        grows = resize.size > pool.wanted
        pool.wanted = resize.size
        pool.ready_at = self.clock.now() + (START_S if grows else DRAIN_S)

    def second(self) -> None:
        now = self.clock.now()
        for pool in self.pools.values():
            pool.settle(now)
        arrived = self._arrivals(self.requests_per_s(now))
        self._read(self.pools[Role.PREFILL], arrived)
        self._write(self.pools[Role.DECODE], arrived)

    def _arrivals(self, mean: float) -> float:
        if self.random is None:
            return mean
        count, product, limit = 0, self.random.random(), math.exp(-mean)
        while product > limit:
            count += 1
            product *= self.random.random()
        return count

    def _read(self, pool: SimulatedPool, arrived: float) -> None:
        pool.waiting_tokens += arrived * PROMPT
        done = min(pool.waiting_tokens, pool.serving * READS_PER_S)
        pool.waiting_tokens -= done
        each = done / pool.serving
        was = pool.counters
        pool.counters = NodeCounters(
            prompt_tokens_computed=was.prompt_tokens_computed + int(each),
            step_seconds=was.step_seconds + each / READS_PER_S,
            steps=was.steps + 1,
        )

    def _write(self, pool: SimulatedPool, arrived: float) -> None:
        pool.answers = max(0.0, pool.answers + arrived - pool.answers / self.answer_s)
        step = STEP_S + STEP_PER_ANSWER_S * pool.answers / pool.serving
        steps = int(1 / step) if pool.answers >= 0.5 else 0
        was = pool.counters
        pool.counters = NodeCounters(
            steps=was.steps + steps,
            step_seconds=was.step_seconds + steps * step,
            decode_steps=was.decode_steps + steps,
            decode_seconds=was.decode_seconds + steps * step,
            step_costs=COSTS,
            output_tokens=was.output_tokens + int(steps * pool.answers / pool.serving),
        )

    def turns(self, role: Role) -> int:
        """How often the pool changed between growing and shrinking."""
        directions = [resize.size > before for _, resize, before in self.decisions if resize.role is role]
        return sum(one != other for one, other in pairwise(directions))

    def sizes(self) -> dict[Role, int]:
        return {role: pool.wanted for role, pool in self.pools.items()}
