"""Grades what changes of sizes were expected to bring, beside a controller.

What is pending and what was graded is recorded with the cluster's state. What was measured for the pending one is kept here alone: the next
controller waits again and asks the routers, and what a router measured since the last look ends with it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import msgspec

from tandem.base.errors import TandemError
from tandem.cluster.control import ForesightView
from tandem.cluster.pools.foresight.grading import grade, not_graded, said_of, score_of
from tandem.cluster.pools.foresight.watching import serves, why_another
from tandem.cluster.pools.router_supervisor import RouterSupervisor
from tandem.cluster.pools.state import ClusterState
from tandem.cluster.pools.supervisor import ProcessPhase
from tandem.cluster.pools.wings import Joints
from tandem.wire.forecasts import GRADED_REQUESTS, Forecast, ForecastScore, GradedForecast, MeasuredRequest

logger = logging.getLogger(__name__)

NAME = "foresight"
LOOK_S = 2.0
SETTLE_S = 60.0  # from when the sizes serve; longer where requests take longer
LIMIT_S = 600.0  # for requests to come after that
REACH_S = 3600.0  # until the new sizes serve
KEPT = 100  # graded forecasts, which the score is of
SHOWN = 10


class Kept(msgspec.Struct, frozen=True):
    pending: Forecast | None = None
    graded: list[GradedForecast] = []


def _kept(state: ClusterState) -> Kept:
    try:
        return msgspec.msgpack.decode(state.wings.get(NAME, b"\x80"), type=Kept)
    except msgspec.DecodeError as error:
        logger.warning("the forecasts that another version kept are forgotten: %s", error)
        return Kept()


def join(joints: Joints) -> None:
    grader = ForecastGrader(joints)
    joints.begin.append(grader.begin)
    joints.foresight = grader


class ForecastGrader:
    def __init__(self, joints: Joints) -> None:
        self._pools, self._clock, self._tasks = joints.pools, joints.clock, joints.tasks
        self._runs = False
        self._told: dict[str, tuple[object, ForecastScore]] = {}  # by router: its process, and what it was told
        self._wait_for(None)

    def _wait_for(self, pending: Forecast | None) -> None:
        self._pending = pending  # that the rest is about
        self._since = self._clock.now()
        self._served_at: float | None = None
        self._measured: dict[tuple[str, str], tuple[float, MeasuredRequest]] = {}  # with when it ended

    def begin(self) -> None:
        """Starts the loop, once there is a forecast."""
        if not self._runs and NAME in self._pools.state.wings:
            self._runs = True
            self._tasks.spawn(self.run(), "grade forecasts")

    def view(self) -> ForesightView:
        kept = _kept(self._pools.state)
        return ForesightView(self._score, kept.pending, kept.graded[-SHOWN:])

    async def keep(self, forecast: Forecast) -> None:
        state = self._pools.state
        pending = _kept(state).pending
        if pending == forecast:
            return  # it is told a second time
        if pending is not None:
            why = why_another(pending, state) or "another change was foretold"
            await self._end(not_graded(pending, why, time.time()), forecast)
        else:
            await self._record(lambda kept: msgspec.structs.replace(kept, pending=forecast))
        self.begin()

    async def _end(self, graded: GradedForecast, pending: Forecast | None = None) -> None:
        await self._record(lambda kept: Kept(pending, [*kept.graded, graded][-KEPT:]))
        self._pools.note(said_of(graded))

    async def _record(self, change: Callable[[Kept], Kept]) -> None:
        def changed(state: ClusterState) -> ClusterState:
            kept = msgspec.msgpack.encode(change(_kept(state)))
            return msgspec.structs.replace(state, wings={**state.wings, NAME: kept})

        await self._pools.update(changed)

    @property
    def _score(self) -> ForecastScore:
        kept = _kept(self._pools.state)
        return score_of(kept.graded, self._waits(kept.pending) if kept.pending is not None else "")

    def _waits(self, pending: Forecast) -> str:
        change = f"{pending.now} → {pending.then}"
        if self._pending != pending or self._served_at is None:
            return f"{change}: its forecast is graded when these nodes have served for a while"
        return f"{change}: its forecast is graded by {GRADED_REQUESTS} requests, and {len(self._measured)} have come"

    async def run(self) -> None:
        while True:
            try:
                await self._look()
            except TandemError as error:
                logger.warning("the forecast is looked at again: %s", error)
            await self._clock.sleep(LOOK_S)

    async def _look(self) -> None:
        pending = _kept(self._pools.state).pending
        if pending != self._pending:
            self._wait_for(pending)
        if pending is not None:
            graded = await self._outcome(pending)
            if graded is not None and pending == _kept(self._pools.state).pending:  # no other was told meanwhile
                await self._end(graded)
        await self._tell(self._score)

    async def _outcome(self, pending: Forecast) -> GradedForecast | None:
        """Returns None while it is to be waited for."""
        state, now = self._pools.state, self._clock.now()
        if why := why_another(pending, state):
            return not_graded(pending, why, time.time())
        if not serves(pending, state, self._pools.facts()):
            if self._served_at is not None:
                return not_graded(pending, "a node stopped serving", time.time())
            if now - self._since > REACH_S:
                return not_graded(pending, "these nodes did not all serve within an hour", time.time())
            return None
        if self._served_at is None:
            self._served_at = now
        opens = self._served_at + max(SETTLE_S, pending.longest_s)
        if now <= opens:
            return None
        await self._measure(self._served_at, now - opens)
        if len(self._measured) < GRADED_REQUESTS and now - opens < LIMIT_S:
            return None
        in_order = sorted(self._measured.values(), key=lambda ended: ended[0])
        return grade(pending, [request for _, request in in_order], time.time())

    async def _measure(self, served_at: float, within_s: float) -> None:
        """Asks for requests that ended within the last seconds, and takes those that began when the sizes served."""
        routers, score = self._routers, self._score
        answers = await asyncio.gather(*(router.follow_forecasts(score, within_s) for router in routers))
        now = self._clock.now()
        for router, answer in zip(routers, answers, strict=True):
            for request in answer:
                key = (router.name, request.request_id)
                began = now - request.ended_ago_s - request.total_s
                if key not in self._measured and began >= served_at:
                    self._measured[key] = (now - request.ended_ago_s, request)

    async def _tell(self, score: ForecastScore) -> None:
        """Tells the score to routers that do not know it."""
        for router in self._routers:
            known = (router.handle, score)
            if self._told.get(router.name, (None, ForecastScore())) != known and (
                score.said or router.name in self._told
            ):
                self._told[router.name] = known
                await router.follow_forecasts(score, 0.0)

    @property
    def _routers(self) -> list[RouterSupervisor]:
        return [router for router in self._pools.fleet.routers.values() if router.phase is ProcessPhase.READY]
