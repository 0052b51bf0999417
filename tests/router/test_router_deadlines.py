"""Every wait ends: with a status code before the first byte, with an error event after it."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tandem.base.errors import DeadlineExceeded, TandemError
from tandem.router.config import Timeouts
from tandem.router.dispatch.admission import Admission
from tandem.router.dispatch.generation import Generation
from tandem.router.dispatch.placement import Alarms
from tandem.router.dispatch.slots import AskedPlaces
from tandem.router.metrics import RouterMetrics
from tests.router.conftest import StartRouter, error_of


def test_no_first_token_before_the_requests_own_deadline(start_router: StartRouter) -> None:
    router = start_router(timeouts=Timeouts(total=0.3, token_idle=0.1))
    router.nodes["p0"].set(pause_at=0)
    assert error_of(router.complete(), 504)["code"] == "deadline_exceeded"
    assert router.metric("tandem_deadlines_exceeded_total", phase="total") == 1
    assert router.metric("tandem_deadlines_exceeded_total", phase="token_idle") == 0
    for node in router.nodes.values():
        node.wait_until(lambda node=node: node.submits[0].request_id in node.cancels, "cancelled")  # type: ignore[misc]


def test_the_whole_took_too_long(start_router: StartRouter) -> None:
    router = start_router(timeouts=Timeouts(total=1.0))
    router.nodes["d0"].set(pause_at=3)
    with router.stream(max_tokens=20) as events:
        bodies = events.rest()
    assert bodies[-1]["error"]["code"] == "deadline_exceeded"
    assert sum(len(body["choices"][0]["text"]) for body in bodies[:-1]) == 3
    assert router.nodes["d0"].submits[0].timeout_s <= 1.0


def test_a_node_that_gives_no_token_and_does_not_answer(start_router: StartRouter) -> None:
    router = start_router(prefill=0, timeouts=Timeouts(token_idle=0.15), max_failovers=0)
    router.nodes["d0"].set(pause_at=2)
    with router.stream(max_tokens=20) as events:
        events.text(count=2)
        router.nodes["d0"].set(wedged=True)
        bodies = events.rest()
    assert bodies[-1]["error"]["code"] == "node_lost"
    assert "no token for 0.15 s, and no answer from d0" in bodies[-1]["error"]["message"]


async def test_an_alarm_rings_when_its_time_has_come_whatever_others_do() -> None:
    alarms, rung = Alarms(time.monotonic), asyncio.Event()
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    when, stopped = time.monotonic() + 0.05, list[float]()

    def fails() -> None:
        raise RuntimeError("of another request")

    def ring() -> None:
        assert time.monotonic() >= when
        rung.set()

    alarms.set(when, fails)
    alarms.set(when, lambda: stopped.append(when)).clear()
    alarms.set(when, fails)
    alarms.set(when, ring)
    async with asyncio.timeout(10):
        await rung.wait()
    assert not stopped


async def test_an_alarm_of_a_slow_clock_is_set_again_a_few_times_only() -> None:
    """A loop's clock and a router's may drift apart."""

    def clock() -> float:
        return 0.9 * time.monotonic()

    alarms, rung, due, done = Alarms(clock), list[float](), clock() + 0.1, asyncio.Event()

    def ring() -> None:
        rung.append(clock())
        if rung[-1] < due:
            alarms.set(due, ring)
        else:
            done.set()

    alarms.set(due, ring)
    async with asyncio.timeout(10):
        await done.wait()
    assert len(rung) < 20


@pytest.mark.parametrize("ahead_s", [1000.0, -1000.0])
async def test_sequences_without_a_place_end_at_their_deadline_by_the_routers_clock(ahead_s: float) -> None:
    loop = asyncio.get_running_loop()
    failed: asyncio.Future[TandemError] = loop.create_future()

    def clock() -> float:
        return time.monotonic() + ahead_s

    class Life:
        def __init__(self, deadline: float, on_end: Any) -> None:
            self.spec, self._on_end, self.ended = SimpleNamespace(deadline=deadline), on_end, False
            self.ledger = SimpleNamespace(tokens=[])

        def start(self) -> None:
            pass

        def fail(self, error: TandemError) -> None:
            self._on_end(self)
            failed.set_result(error)

    admission = Admission(lambda: 1, 10, 60.0, clock, RouterMetrics(), lambda: None)
    deadline = clock() + 0.05
    slots = await admission.acquire("", AskedPlaces(2), deadline)
    specs = cast("Any", [deadline, deadline])
    make = cast("Any", lambda deadline, on_news, on_end: Life(deadline, on_end))
    Generation(make, specs, slots, eager=False, clock=clock).start()
    assert not failed.done()
    async with asyncio.timeout(5):
        assert isinstance(await failed, DeadlineExceeded)
    assert clock() >= deadline
    assert loop.time() + ahead_s < deadline + 4
