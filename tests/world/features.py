"""What the nodes and routers of a schedule have switched on: a policy of the scheduler, pins, news of caches, sibling routers. Everything
here is drawn from a generator of its own."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec

from tandem.engine.config import SchedulingPolicy
from tandem.router.processes.wing import SiblingReports
from tests.world.router import WorldRouter

PIN_S = 1.0  # a prefill node pins for much longer, until it hears of the answer's end


class _Siblings:
    """Reports from one router to the others of its machine: they may be lost, and are late."""

    def __init__(self, features: Features, router: WorldRouter) -> None:
        self.hears: dict[str, Callable[[str, bytes], None]] = {}
        self._features, self._router = features, router

    def report(self, what: str, report: msgspec.Struct) -> None:
        body, desk = msgspec.msgpack.encode(report), self._router.process.name
        for other, siblings in self._features.siblings.values():
            if other is not self._router and self._features.rng.random() > 0.05:
                other.process.later(
                    self._features.rng.uniform(0.0001, 0.005),
                    lambda siblings=siblings: siblings.hears[what](desk, body),
                )


STATES = 0.15  # of the schedules: the model has recurrent layers


def has_states(seed: int) -> bool:
    return random.Random(f"states {seed}").random() < STATES


class Features:
    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(f"features {seed}")
        self.policy = rng.choice([SchedulingPolicy.FCFS, *SchedulingPolicy])
        self.has_news = rng.random() < 0.6
        self.has_jobs = self.policy is SchedulingPolicy.CONTINUUM
        self._has_siblings = rng.random() < 0.6
        self.has_states = has_states(seed)
        self._jobs = 0
        self.siblings: dict[str, tuple[WorldRouter, _Siblings]] = {}

    @property
    def scheduler(self) -> dict[str, Any]:
        return {"policy": self.policy, "pin_seconds": PIN_S}

    def join(self, router: WorldRouter) -> None:
        """The router tells its siblings what it sends, and hears of theirs."""
        if not self._has_siblings:
            return
        siblings: Any = _Siblings(self, router)
        self.siblings[router.process.name] = router, siblings
        router.dispatcher.report_to_siblings(SiblingReports(siblings, router.pool, router.chooser))

    def new_job(self) -> str | None:
        if not self.has_jobs or self.rng.random() < 0.2:
            return None
        self._jobs += 1
        return f"x/job-{self._jobs}"

    def is_last_step(self) -> bool:
        return self.has_jobs and self.rng.random() < 0.15

    def called(self) -> list[str] | None:
        """The tools that an answer calls; None: it was not parsed."""
        return self.rng.choice([None, [], ["search"], ["search", "build"]])
