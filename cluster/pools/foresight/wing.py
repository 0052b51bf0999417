"""Says what changes of sizes are expected to bring, and grades it, beside a controller. No change waits for it: what was not foretold before is
foretold beside the change, from the cluster as it was.

What is pending and what was graded is recorded with the cluster's state. What was measured for the pending one is kept here alone: the next
controller waits again and asks the routers, and what a router measured since the last look ends with it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

import msgspec

from tandem.base.errors import TandemError
from tandem.cluster.control import CoresView, Expectation, ForesightView
from tandem.cluster.pools.foresight.foretelling import Foreteller, cores_now_and_then
from tandem.cluster.pools.foresight.grading import grade, not_graded, said_of, score_of
from tandem.cluster.pools.foresight.watching import sizes_in, why_another, why_not_serving, words
from tandem.cluster.pools.router_supervisor import RouterSupervisor
from tandem.cluster.pools.state import ClusterState
from tandem.cluster.pools.supervisor import ProcessPhase
from tandem.cluster.pools.wings import Joints
from tandem.wire.forecasts import GRADED_REQUESTS, Forecast, ForecastScore, GradedForecast, MeasuredRequest
from tandem.wire.nodes import Role

logger = logging.getLogger(__name__)

NAME = "foresight"
LOOK_S = 2.0
SETTLE_S = 60.0  # from when the sizes serve; longer where requests take longer
LIMIT_S = 600.0  # for requests to come after that
REACH_S = 3600.0  # until the new sizes serve
KEPT = 100  # graded forecasts, which the score is of
SHOWN = 10
TOLD_S = 60.0  # a change that is ordered within this time after it was foretold is graded by that
_NOTHING_TOLD: tuple[Forecast | None, float] = (None, 0.0)  # the last forecast that an operator was told, and when


class Kept(msgspec.Struct, frozen=True):
    pending: Forecast | None = None
    graded: list[GradedForecast] = []


def _decoded(kept: bytes) -> Kept:
    try:
        return msgspec.msgpack.decode(kept, type=Kept)
    except msgspec.DecodeError as error:
        logger.warning("the forecasts that another version kept are forgotten: %s", error)
        return Kept()


def join(joints: Joints) -> None:
    grader = ForecastGrader(joints, Foreteller(joints))
    joints.begin.append(grader.begin)
    joints.foresight = grader


class ForecastGrader:
    """Implements `pools.wings.Foresight`."""

    def __init__(self, joints: Joints, foreteller: Foreteller) -> None:
        self._pools, self._clock, self._tasks = joints.pools, joints.clock, joints.tasks
        self._foreteller = foreteller
        self._runs = False
        self._read = (b"", Kept())  # the record as it was last read
        self._told_last = _NOTHING_TOLD
        self._not_foretold = ""  # why the last change was not, in a sentence
        self._told: dict[str, tuple[object, ForecastScore]] = {}  # by router: its process, and what it was told
        self._wait_for(None)

    def _wait_for(self, pending: Forecast | None) -> None:
        self._pending = pending  # that the rest is about
        self._since = self._clock.now()
        self._served_at: float | None = None
        self._measured: dict[tuple[str, str], tuple[float, MeasuredRequest]] = {}  # with when it ended

    def begin(self) -> None:
        """Starts the loop, once there is something to show."""
        if not self._runs and (NAME in self._pools.state.wings or self._not_foretold):
            self._runs = True
            self._tasks.spawn(self.run(), "grade forecasts")

    def view(self) -> ForesightView:
        kept = self._kept
        return ForesightView(self._score, kept.pending, kept.graded[-SHOWN:])

    @property
    def _kept(self) -> Kept:
        record = self._pools.state.wings.get(NAME, b"\x80")
        if record is not self._read[0]:
            self._read = record, _decoded(record)
        return self._read[1]

    # --- foretelling

    async def foretell(self, wanted: Mapping[Role, int]) -> Expectation:
        state = self._pools.state
        there = state.sizes | sizes_in(state)
        if all(there.get(role, 0) == size for role, size in wanted.items()):
            return Expectation()
        expected = await self._foreteller.foretell(state, self._pools.facts(), wanted, self._routers)
        if expected.forecast is not None:
            self._told_last = expected.forecast, self._clock.now()
        return expected

    def cores(self, wanted: Mapping[Role, int]) -> CoresView:
        return cores_now_and_then(self._pools.config, self._pools.state, self._pools.facts(), wanted)

    def changes(self, new: ClusterState, *, by_load: bool) -> None:
        before = self._pools.state
        wanted = {role: size for role, size in new.sizes.items() if size is not None and before.sizes.get(role) != size}
        if not wanted:
            return
        (told, at), self._told_last = self._told_last, _NOTHING_TOLD
        if told is not None and (by_load or told.sizes != sizes_in(new) or self._clock.now() - at > TOLD_S):
            told = None
        foretell = partial(self._foreteller.foretell, before, self._pools.facts(), wanted, self._routers)
        self._tasks.spawn(self._keep(foretell, told, before, new, by_load), "foretell a change")

    async def _keep(
        self,
        foretell: Callable[[], Awaitable[Expectation]],
        told: Forecast | None,
        before: ClusterState,
        new: ClusterState,
        by_load: bool,
    ) -> None:
        """Keeps what this change is expected to bring, if it is made."""
        expected = Expectation(told) if told is not None else await foretell()
        why, forecast = expected.not_foretold, expected.forecast
        if forecast is not None:
            try:
                why = await self._await_grade(msgspec.structs.replace(forecast, by_load=by_load))
            except TandemError as error:
                why = str(error)
        if sizes_in(self._pools.state) != sizes_in(new):
            return  # it was not made, or another one was
        change = f"{words(sizes_in(before))} → {words(sizes_in(new))}"
        self._not_foretold = f"{change}: not foretold: {why}" if why else ""
        if told is None and not why:
            self._pools.note(f"{change}: {expected.said}")
        self.begin()

    # --- grading

    async def _await_grade(self, forecast: Forecast) -> str:
        """Returns why the forecast is not kept; "" if it is."""
        why, ended = "", None

        def changed(state: ClusterState) -> ClusterState:
            nonlocal why, ended
            kept = self._kept
            if why := why_another(forecast, state):
                return state
            if kept.pending is not None:
                other = why_another(kept.pending, state) or "another change was foretold"
                ended = not_graded(kept.pending, other, time.time())
            return _with(state, Kept(forecast, [*kept.graded, *([ended] if ended else [])][-KEPT:]))

        await self._pools.update(changed)
        if ended is not None:
            self._pools.note(said_of(ended))
        return why

    async def _end(self, pending: Forecast, graded: GradedForecast) -> None:
        ends = False

        def changed(state: ClusterState) -> ClusterState:
            nonlocal ends
            kept = self._kept
            ends = kept.pending == pending  # or another was foretold meanwhile
            return _with(state, Kept(None, [*kept.graded, graded][-KEPT:])) if ends else state

        await self._pools.update(changed)
        if ends:
            self._pools.note(said_of(graded))

    @property
    def _score(self) -> ForecastScore:
        kept = self._kept
        return score_of(kept.graded, self._waits(kept.pending) if kept.pending is not None else self._not_foretold)

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
        pending = self._kept.pending
        if pending != self._pending:
            self._wait_for(pending)
        if pending is not None:
            graded = await self._outcome(pending)
            if graded is not None:
                await self._end(pending, graded)
        await self._tell(self._score)

    async def _outcome(self, pending: Forecast) -> GradedForecast | None:
        """Returns None while it is to be waited for."""
        state, now = self._pools.state, self._clock.now()
        if why := why_another(pending, state):
            return not_graded(pending, why, time.time())
        if why_not_serving(pending.sizes, state, self._pools.facts()):
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


def _with(state: ClusterState, kept: Kept) -> ClusterState:
    return msgspec.structs.replace(state, wings={**state.wings, NAME: msgspec.msgpack.encode(kept)})
