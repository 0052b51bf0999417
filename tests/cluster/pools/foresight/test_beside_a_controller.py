"""A controller grades what a change of its pools was expected to bring."""

from __future__ import annotations

import pytest

from tandem.cluster.config import TandemConfig
from tandem.cluster.control import ForesightView
from tandem.cluster.pools.foresight import wing
from tandem.cluster.pools.foresight.wing import LIMIT_S, SETTLE_S
from tandem.router.config import RouterConfig
from tandem.wire.forecasts import Forecast, MeasuredRequest
from tandem.wire.nodes import Role
from tests.cluster.pools.foresight.test_grading import forecast
from tests.cluster.pools.helpers import TIMEOUTS, FakeRouter, Rig, started
from tests.cluster.pools.pools_rig import PD, replace

MINUTE = SETTLE_S + 10.0
CALM = replace(TIMEOUTS, heartbeat_s=5.0, silence_s=9.0, unresponsive_s=20.0)


class Traffic:
    """What one router has answered: requests that end at these times, each of which took so long."""

    def __init__(self, rig: Rig, router: FakeRouter, name: str = "r") -> None:
        self._now, self._name = rig.clock.now, name
        self._ended: list[tuple[float, float, float]] = []
        router.took = self.latest

    def add(self, count: int, first_token_s: float, *, every_s: float = 0.5, total_s: float = 2.0) -> None:
        start = max([self._now(), *(ended for ended, _, _ in self._ended)])
        self._ended += [(start + every_s * (index + 1), first_token_s, total_s) for index in range(count)]

    def latest(self) -> list[MeasuredRequest]:
        return [
            MeasuredRequest(f"{self._name}{index}", self._now() - ended, total_s, first_s, 0.03)
            for index, (ended, first_s, total_s) in enumerate(self._ended)
            if ended <= self._now()
        ]


async def foresight(rig: Rig) -> ForesightView:
    found = (await rig.controller.view()).foresight
    assert found is not None
    return found


async def scaled(rig: Rig, prefill: int = 2, said: Forecast | None = None) -> None:
    await rig.controller.scale({Role.PREFILL: prefill})
    await rig.controller.keep_forecast(said or forecast())


async def test_what_comes_after_the_change_is_compared_with_what_was_said() -> None:
    async with started(*PD) as rig:
        traffic = Traffic(rig, rig.launcher.router)
        traffic.add(50, 5.0)  # as slow as before
        await scaled(rig)
        assert "is graded when these nodes have served for a while" in (await foresight(rig)).score.said[0]
        await rig.clock.advance(MINUTE)
        traffic.add(70, 1.1)
        await rig.clock.advance(20.0)
        assert "graded by 60 requests, and 40 have come" in (await foresight(rig)).score.said[0]
        await rig.clock.advance(20.0)
        view = await foresight(rig)
        assert view.pending is None
        (graded,) = view.graded
        assert (graded.requests, graded.figures[0].came, graded.figures[0].inside) == (60, 1.1, True)
        assert (view.score.graded, view.score.figures[0].inside) == (1, 1)
        assert rig.launcher.router.forecasts == view.score, "routers show it, too"
        assert "inside the forecast" in (await rig.decided())[-1]


async def test_requests_that_began_before_the_sizes_served_do_not_count() -> None:
    async with started(*PD, timeouts=CALM) as rig:
        rig.hold("prefill-1")
        traffic = Traffic(rig, rig.launcher.router)
        await scaled(rig)
        await rig.clock.advance(50.0)
        rig.node("prefill-1").may_start.set()
        await rig.clock.advance(MINUTE)
        traffic.add(40, 9.0, total_s=90.0)
        traffic.add(25, 1.0)
        await rig.clock.advance(LIMIT_S - 20.0)
        assert not (await foresight(rig)).graded
        await rig.clock.advance(30.0)
        (graded,) = (await foresight(rig)).graded
        assert (graded.requests, graded.figures[0].came) == (25, 1.0), "ten minutes are enough"


async def test_where_requests_take_long_it_waits_as_long_as_the_longest() -> None:
    async with started(*PD, timeouts=CALM) as rig:
        traffic = Traffic(rig, rig.launcher.router)
        await scaled(rig, said=forecast(longest_s=300.0))
        await rig.clock.advance(MINUTE)
        traffic.add(100, 1.0)
        await rig.clock.advance(200.0)
        assert not (await foresight(rig)).graded, "only short ones can have begun and ended yet"
        traffic.add(100, 1.0, every_s=1.0)
        await rig.clock.advance(150.0)
        assert (await foresight(rig)).graded[0].requests == 60


@pytest.mark.parametrize(
    "why",
    [
        "too few requests came: 0", "the sizes were changed again, to 1 prefill, 1 decode", "decode was paused",
        "a node stopped serving",
    ],
)  # fmt: skip
async def test_what_happens_meanwhile_is_why_it_is_not_graded(why: str) -> None:
    async with started(*PD, timeouts=CALM) as rig:
        await scaled(rig)
        await rig.clock.advance(MINUTE)
        if "too few" in why:
            await rig.clock.advance(LIMIT_S)
        elif "again" in why:
            await rig.controller.scale({Role.PREFILL: 1})
        elif "paused" in why:
            await rig.controller.pause(["decode"])
        else:
            rig.hold("prefill-0")
            rig.node("prefill-0").die()
        await rig.clock.advance(10.0)
        view = await foresight(rig)
        assert view.graded[0].not_graded.startswith(why)
        assert (view.pending, view.score.graded, view.score.not_graded) == (None, 0, 1)
        assert f"was not graded: {why}" in view.score.said[0]


async def test_nodes_that_never_serve_leave_it_ungraded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wing, "REACH_S", 60.0)
    async with started(*PD, timeouts=CALM) as rig:
        rig.hold("prefill-1")
        await scaled(rig)
        await rig.clock.advance(55.0)
        assert not (await foresight(rig)).graded
        await rig.clock.advance(10.0)
        assert "did not all serve" in (await foresight(rig)).graded[0].not_graded


async def test_a_second_change_takes_the_place_of_the_first() -> None:
    async with started(*PD) as rig:
        await scaled(rig)
        await rig.controller.keep_forecast(forecast())  # the answer was lost, and it is told again
        assert not (await foresight(rig)).graded
        await scaled(rig, 3, forecast(sizes={Role.PREFILL: 3, Role.DECODE: 1}))
        view = await foresight(rig)
        assert view.graded[0].not_graded == "the sizes were changed again, to 3 prefill, 1 decode"
        assert view.pending is not None
        assert view.pending.sizes[Role.PREFILL] == 3


async def test_the_next_controller_goes_on_and_keeps_the_score() -> None:
    async with started(*PD) as rig:
        traffic = Traffic(rig, rig.launcher.router)
        await scaled(rig)
        await rig.clock.advance(MINUTE)
        traffic.add(60, 1.0)
        await rig.clock.advance(40.0)
        await scaled(rig, 1, forecast(sizes={Role.PREFILL: 1, Role.DECODE: 1}))
        await rig.next_controller()
        view = await foresight(rig)
        assert view.score.graded == 1
        assert view.pending is not None
        await rig.clock.advance(MINUTE)
        traffic.add(60, 3.0)
        await rig.clock.advance(40.0)
        view = await foresight(rig)
        assert [one.figures[0].inside for one in view.graded] == [True, False]
        assert rig.launcher.router.forecasts == view.score


async def test_the_requests_of_all_routers_count() -> None:
    async with started(*PD, config=TandemConfig(router=RouterConfig("model", "fake", processes=2))) as rig:
        await rig.clock.advance(5.0)
        traffics = [Traffic(rig, each) for each in rig.launcher.routers]
        await scaled(rig)
        await rig.clock.advance(MINUTE)
        for traffic, first_token_s in zip(traffics, (1.0, 1.2), strict=True):
            traffic.add(30, first_token_s)
        await rig.clock.advance(30.0)
        (graded,) = (await foresight(rig)).graded
        assert (graded.requests, graded.figures[0].came) == (60, 1.2)
        assert all(each.forecasts.graded == 1 for each in rig.launcher.routers)


async def test_what_a_router_told_before_it_died_counts_and_the_next_one_shows_the_score() -> None:
    async with started(*PD) as rig:
        traffic = Traffic(rig, rig.launcher.router)
        await scaled(rig)
        await rig.clock.advance(MINUTE)
        traffic.add(30, 1.0)
        await rig.clock.advance(20.0)
        rig.launcher.router.die()
        await rig.clock.advance(20.0)
        Traffic(rig, rig.launcher.router, "after").add(40, 1.2)
        await rig.clock.advance(40.0)
        (graded,) = (await foresight(rig)).graded
        assert (graded.requests, graded.figures[0].came) == (60, 1.2)
        rig.launcher.router.die()
        await rig.clock.advance(20.0)
        assert rig.launcher.router.forecasts.graded == 1
