"""A controller grades what a change of its pools was expected to bring."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec
import pytest

from tandem.base.errors import ConfigurationError
from tandem.cluster.config import TandemConfig
from tandem.cluster.control import Expectation, ForesightView
from tandem.cluster.pools.foresight import foretelling, wing
from tandem.cluster.pools.foresight.wing import LIMIT_S, SETTLE_S, TOLD_S
from tandem.cluster.wings import NodeCores
from tandem.router.config import RouterConfig
from tandem.wire.forecasts import Forecast, MeasuredRequest
from tandem.wire.nodes import Role
from tests.cluster.pools.foresight.test_grading import forecast
from tests.cluster.pools.helpers import FakeHosts, FakeRouter, Rig, one_machine, started
from tests.cluster.pools.pools_rig import PD

MINUTE = SETTLE_S + 10.0


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


class Simulator:
    """Says the same of every change, or raises. Implements `cluster.wings.ForesightWing`."""

    def __init__(self) -> None:
        self.says: Exception | Callable[[Mapping[Role, int]], Forecast] = lambda sizes: forecast(sizes=dict(sizes))
        self.asked: list[tuple[list[bytes], dict[Role, int], dict[Role, int]]] = []
        self.cores: tuple[NodeCores, NodeCores] = {}, {}

    def foretell(
        self,
        told: Sequence[bytes],
        there: Mapping[Role, int],
        wanted: Mapping[Role, int],
        config: TandemConfig,
        cores: tuple[NodeCores, NodeCores],
    ) -> Forecast:
        self.cores = cores
        self.asked.append((list(told), dict(there), dict(wanted)))
        if isinstance(self.says, Exception):
            raise self.says
        return self.says({**there, **wanted})


@pytest.fixture(autouse=True)
def simulator(monkeypatch: pytest.MonkeyPatch) -> Simulator:
    """Simulates at once, where the product has a thread."""

    def at_once(name: str, work: Callable[[], Forecast]) -> Future[Forecast]:
        done: Future[Forecast] = Future()
        try:
            done.set_result(work())
        except Exception as error:
            done.set_exception(error)
        return done

    found = Simulator()
    monkeypatch.setattr(foretelling, "foresight", lambda: found)
    monkeypatch.setattr(foretelling, "in_own_thread", at_once)
    return found


@contextlib.asynccontextmanager
async def serving(**more: Any) -> AsyncIterator[Rig]:
    """One prefill and one decode node, whose routers remember something."""
    async with started(*PD, **more) as rig:
        for router in rig.launcher.routers:
            router.recalls = b"what came"
        yield rig


async def scaled(rig: Rig, prefill: int = 2) -> None:
    await rig.controller.scale({Role.PREFILL: prefill})
    await rig.clock.advance(0.5)


async def test_what_comes_after_the_change_is_compared_with_what_was_said() -> None:
    async with serving() as rig:
        traffic = Traffic(rig, rig.launcher.router)
        traffic.add(50, 5.0)  # as slow as before
        await scaled(rig)
        assert "its forecast is graded by 60 requests, and 0 have come" in (await foresight(rig)).score.said[0]
        await rig.clock.advance(MINUTE)
        traffic.add(70, 1.1)
        await rig.clock.advance(20.0)
        assert "graded by 60 requests, and 39 have come" in (await foresight(rig)).score.said[0]
        await rig.clock.advance(20.0)
        view = await foresight(rig)
        assert view.pending is None
        (graded,) = view.graded
        assert (graded.requests, graded.figures[0].came, graded.figures[0].inside) == (60, 1.1, True)
        assert (view.score.graded, view.score.figures[0].inside) == (1, 1)
        assert rig.launcher.router.forecasts == view.score, "routers show it, too"
        decided = [decision.text for decision in (await rig.controller.view()).decisions]
        assert "inside the forecast" in decided[-1]


async def test_requests_that_began_before_the_sizes_served_do_not_count() -> None:
    async with serving() as rig:
        rig.launcher.prepare["prefill-1"] = lambda node, earlier: setattr(node, "starts_at_once", False)
        traffic = Traffic(rig, rig.launcher.router)
        await scaled(rig)
        await rig.clock.advance(50.0)
        rig.launcher.node("prefill-1").may_start.set()
        await rig.clock.advance(MINUTE)
        traffic.add(40, 9.0, total_s=90.0)
        traffic.add(30, 1.0)
        await rig.clock.advance(LIMIT_S + 10.0)
        (graded,) = (await foresight(rig)).graded
        assert (graded.requests, graded.figures[0].came) == (30, 1.0)


async def test_where_requests_take_long_it_waits_as_long_as_the_longest(simulator: Simulator) -> None:
    simulator.says = lambda sizes: forecast(longest_s=300.0)
    async with serving() as rig:
        traffic = Traffic(rig, rig.launcher.router)
        await scaled(rig)
        await rig.clock.advance(MINUTE)
        traffic.add(100, 1.0)
        await rig.clock.advance(200.0)
        assert not (await foresight(rig)).graded, "only short ones can have begun and ended yet"
        traffic.add(100, 1.0, every_s=1.0)
        await rig.clock.advance(150.0)
        assert (await foresight(rig)).graded[0].requests == 60


async def test_ten_minutes_are_enough() -> None:
    async with serving() as rig:
        traffic = Traffic(rig, rig.launcher.router)
        await scaled(rig)
        await rig.clock.advance(MINUTE)
        traffic.add(25, 1.0)
        await rig.clock.advance(LIMIT_S - 20.0)
        assert not (await foresight(rig)).graded
        await rig.clock.advance(20.0)
        assert (await foresight(rig)).graded[0].requests == 25


async def pause(rig: Rig) -> None:
    await rig.controller.pause(["decode"])


async def lose_a_node(rig: Rig) -> None:
    rig.launcher.prepare["prefill-0"] = lambda node, earlier: setattr(node, "starts_at_once", False)
    rig.launcher.node("prefill-0").die()


async def no_requests(rig: Rig) -> None:
    await rig.clock.advance(LIMIT_S)


@pytest.mark.parametrize(
    ("what", "why"),
    [(no_requests, "too few requests came: 0"), (pause, "decode was paused"), (lose_a_node, "a node stopped serving")],
)
async def test_what_happens_meanwhile_is_why_it_is_not_graded(what: Callable[..., object], why: str) -> None:
    async with serving() as rig:
        await scaled(rig)
        await rig.clock.advance(MINUTE)
        await what(rig)  # type: ignore[misc]
        await rig.clock.advance(10.0)
        view = await foresight(rig)
        assert view.graded[0].not_graded.startswith(why)
        assert (view.score.graded, view.score.not_graded) == (0, 1)
        assert any(f"was not graded: {why}" in line for line in view.score.said)


async def test_nodes_that_never_serve_leave_it_ungraded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wing, "REACH_S", 300.0)
    async with serving() as rig:
        rig.launcher.prepare["prefill-1"] = lambda node, earlier: setattr(node, "starts_at_once", False)
        await scaled(rig)
        await rig.clock.advance(310.0)
        assert "did not all serve" in (await foresight(rig)).graded[0].not_graded


async def test_a_second_change_takes_the_place_of_the_first() -> None:
    async with serving() as rig:
        await scaled(rig)
        await scaled(rig)  # the answer was lost, and it is ordered again
        assert not (await foresight(rig)).graded
        await rig.clock.advance(10.0)
        await scaled(rig, 3)
        view = await foresight(rig)
        assert view.graded[0].not_graded == "the sizes were changed again, to 3 prefill, 1 decode"
        assert view.pending.sizes[Role.PREFILL] == 3


async def test_the_requests_of_all_routers_count() -> None:
    router = RouterConfig("model", "fake", processes=2)
    async with serving(config=TandemConfig(router=router)) as rig:
        await rig.clock.advance(5.0)
        for each in rig.launcher.routers:
            each.recalls = b"what came"
        traffics = [Traffic(rig, each) for each in rig.launcher.routers]
        await scaled(rig)
        await rig.clock.advance(MINUTE)
        for traffic, first_token_s in zip(traffics, (1.0, 1.2), strict=True):
            traffic.add(30, first_token_s)
        await rig.clock.advance(30.0)
        (graded,) = (await foresight(rig)).graded
        assert (graded.requests, graded.figures[0].came) == (60, 1.2)
        assert all(each.forecasts.graded == 1 for each in rig.launcher.routers)


async def test_what_a_router_told_before_it_died_counts() -> None:
    async with serving() as rig:
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


async def test_the_next_controller_goes_on_and_keeps_the_score_and_a_later_router_shows_it() -> None:
    async with serving() as rig:
        traffic = Traffic(rig, rig.launcher.router)
        await scaled(rig)
        await rig.clock.advance(MINUTE)
        traffic.add(60, 1.0)
        await rig.clock.advance(40.0)
        await scaled(rig, 1)
        await rig.next_controller()
        view = await foresight(rig)
        assert view.score.graded == 1
        assert view.pending is not None
        await rig.clock.advance(MINUTE)
        traffic.add(60, 3.0)
        await rig.clock.advance(40.0)
        view = await foresight(rig)
        assert [one.figures[0].inside for one in view.graded] == [True, False]
        rig.launcher.router.die()
        await rig.clock.advance(20.0)
        assert rig.launcher.router.forecasts == view.score


BOTH = {Role.PREFILL: 1, Role.DECODE: 1, Role.AGGREGATED: 0}


async def test_a_change_is_foretold_from_the_cluster_before_it_and_waits_for_nothing(simulator: Simulator) -> None:
    """On whichever way it is ordered: here it is a request to /admin/scale."""
    async with serving() as rig:
        await rig.controller.scale({Role.PREFILL: 2})
        assert simulator.asked == [], "the order was answered before"
        await rig.clock.advance(0.5)
        assert simulator.asked == [([b"what came"], BOTH, {Role.PREFILL: 2})]
        view = await rig.controller.view()
        assert view.decisions[-1].text.startswith(
            "1 prefill, 1 decode → 2 prefill, 1 decode: expected, by the last 60 req"
        )
        pending = (await foresight(rig)).pending
        assert not pending.by_load


async def test_what_an_operator_was_told_is_what_is_graded(simulator: Simulator) -> None:
    async with serving() as rig:
        told = await rig.controller.foretell({Role.PREFILL: 2})
        assert told.said.startswith("expected, by the last 60 requests: first token, p90 ")
        assert (await foresight(rig)).pending is None, "nothing has changed yet"
        await scaled(rig)
        assert len(simulator.asked) == 1
        assert (await foresight(rig)).pending == told.forecast
        assert (await rig.controller.foretell({Role.PREFILL: 2})) == Expectation(), "it is so already"


async def test_what_was_told_long_ago_or_of_other_sizes_is_foretold_again(simulator: Simulator) -> None:
    async with serving() as rig:
        await rig.controller.foretell({Role.PREFILL: 3})
        await scaled(rig)
        await rig.clock.advance(10.0)
        await rig.controller.foretell({Role.PREFILL: 3})
        await rig.clock.advance(TOLD_S + 1.0)
        await scaled(rig, 3)
        assert [wanted[Role.PREFILL] for _, _, wanted in simulator.asked] == [3, 2, 3, 3]


async def test_every_way_to_another_size_is_foretold(simulator: Simulator) -> None:
    async with serving() as rig:
        await scaled(rig)
        await rig.clock.advance(10.0)
        await rig.controller.drain_node("prefill-1", 1.0)
        await rig.clock.advance(10.0)
        config = await rig.controller.configuration()
        pools = msgspec.structs.replace(config.pools, decode=msgspec.structs.replace(config.pools.decode, nodes=2))
        wanted = msgspec.structs.replace(config, pools=pools)
        change = await rig.controller.apply(wanted, dry_run=True)
        assert change.sizes == {Role.DECODE: 2}
        await rig.clock.advance(10.0)
        assert len(simulator.asked) == 2, "a dry run changes nothing"
        await rig.controller.apply(wanted, dry_run=False)
        await rig.clock.advance(10.0)
        await rig.controller.change_role("decode-1", Role.PREFILL)
        await rig.clock.advance(1.0)
        assert [wanted for _, _, wanted in simulator.asked] == [
            {Role.PREFILL: 2},
            {Role.PREFILL: 1},
            {Role.DECODE: 2},
            {Role.PREFILL: 2, Role.DECODE: 1},
        ]


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (ConfigurationError("12 requests are known"), "12 requests are known"),
        (ZeroDivisionError("division by zero"), "ZeroDivisionError: division by zero"),
    ],
)
async def test_what_cannot_be_foretold_is_a_sentence_and_the_change_is_made(
    simulator: Simulator, error: Exception, why: str
) -> None:
    simulator.says = error
    async with serving() as rig:
        assert (await rig.controller.foretell({Role.PREFILL: 2})).not_foretold == why
        await scaled(rig)
        await rig.clock.advance(10.0)
        view = await foresight(rig)
        assert view.pending is None
        assert view.score.said == [f"1 prefill, 1 decode → 2 prefill, 1 decode: not foretold: {why}"]
        assert rig.launcher.router.forecasts.said == view.score.said, "routers show it, too"
        assert "prefill-1" in rig.routed


async def test_the_simulator_knows_which_nodes_share_cores(simulator: Simulator) -> None:
    async with started(*PD, hosts=FakeHosts(one_machine(2))) as rig:
        rig.launcher.router.recalls = b"what came"
        await rig.controller.foretell({Role.PREFILL: 3, Role.DECODE: 1})
        told = await rig.controller.cores({Role.PREFILL: 3})
    now, then = simulator.cores
    assert (told.now, told.then) == (now, then), "`tandem what-if` is told the same"
    assert {*now} == {*then} == {Role.PREFILL, Role.DECODE}
    ((prefill,), (decode,)) = now[Role.PREFILL], now[Role.DECODE]
    assert prefill.isdisjoint(decode)
    first, *others = then[Role.PREFILL]
    assert (first, [decode]) == (prefill, then[Role.DECODE])
    assert {*others} == {prefill, decode}, "each on the core with the fewest nodes"


async def test_a_router_that_says_nothing_and_a_cluster_that_is_changing_are_reasons(simulator: Simulator) -> None:
    async with serving() as rig:
        rig.launcher.router.recalls = b""
        assert "router did not tell" in (await rig.controller.foretell({Role.PREFILL: 2})).not_foretold
        assert "encoder" in (await rig.controller.foretell({Role.ENCODE: 1})).not_foretold
        rig.launcher.prepare["prefill-1"] = lambda node, earlier: setattr(node, "starts_at_once", False)
        await scaled(rig)
        found = await rig.controller.foretell({Role.PREFILL: 1})
        assert found.not_foretold == "1 of 2 prefill nodes serve now"
        assert simulator.asked == []


async def test_a_change_that_was_refused_leaves_no_forecast(simulator: Simulator) -> None:
    async with serving() as rig:
        await rig.controller.foretell({Role.DECODE: 0})
        with pytest.raises(ConfigurationError):
            await rig.controller.scale({Role.DECODE: 0})
        await rig.clock.advance(5.0)
        assert (await foresight(rig)).pending is None
