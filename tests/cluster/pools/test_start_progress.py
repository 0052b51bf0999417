"""A start or load may take any time while it reports progress; `timeouts.start_s` limits only the time without any."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.base.errors import Unavailable
from tandem.wire.nodes import Role
from tests.cluster.adapters.test_adapters import with_room
from tests.cluster.pools.helpers import TIMEOUTS, FakeProcess, FakeRouter, Rig, in_loop, settle, started
from tests.cluster.pools.pools_rig import PD, pools

LIMIT_S = 20.5  # no sum of whole seconds
PATIENT = msgspec.structs.replace(TIMEOUTS, start_s=LIMIT_S)

Script = list[tuple[int, str | None]]
"""Pauses, and what the process says after each."""

scripts: st.SearchStrategy[Script] = st.lists(
    st.tuples(st.integers(0, 28), st.sampled_from([None, "downloading", "loading"])), max_size=12
)


def stands_still(script: Script) -> bool:
    """Whether some pause between two different reports is longer than the limit."""
    silent, last = 0, "loading the weights"
    for pause, word in script:
        silent += pause
        if silent > LIMIT_S:
            return True
        if word not in (None, last):
            silent, last = 0, word
    return False


@given(scripts)
@settings(max_examples=10)  # minutes of the cluster's clock each
@in_loop
async def test_a_node_that_starts_is_ended_if_and_only_if_it_stood_still(script: Script) -> None:
    async with Rig(*PD, timeouts=PATIENT) as rig:
        rig.hold("decode-0")
        starting = asyncio.create_task(rig.controller.start())
        await settle()
        rig.launcher.prepare.clear()
        node = rig.node("decode-0")
        for pause, word in script:
            await rig.clock.advance(pause)
            if word is not None and not node.stopped:
                node.report(word, 0.0)
        assert node.stopped == stands_still(script)
        node.may_start.set()
        await rig.clock.advance(TIMEOUTS.restart_backoff_max_s)
        await starting
        said = rig.events.of("trouble", "decode-0")
        assert bool(said) == stands_still(script)
        assert all("made no progress for 20.5 s" in each for each in said)


async def test_what_a_start_took_is_announced_and_stays_what_it_was() -> None:
    """The planner reads the announced time, to start nodes before they are needed. A restarted controller has not measured it."""
    async with Rig(*PD, timeouts=PATIENT) as rig:
        rig.hold("decode-0", "prefill-0")
        starting = asyncio.create_task(rig.controller.start())
        await rig.clock.advance(7)
        rig.node("prefill-0").may_start.set()
        await rig.clock.advance(13)
        rig.node("decode-0").may_start.set()
        await starting

        def announced() -> dict[str, float]:
            return {info.node_id: info.start_s for info in rig.launcher.router.memberships[-1]}

        assert announced() == {"prefill-0": 7.0, "decode-0": 20.0}
        await rig.kill_controller()
        await rig.clock.advance(5)
        await rig.start(1)
        assert announced() == {"prefill-0": 7.0, "decode-0": 20.0}
        await rig.controller.change_role("prefill-0", Role.DECODE)
        await rig.clock.advance(1)
        assert announced() == {"prefill-0": 7.0, "decode-0": 20.0}, "its process is the same"


async def test_what_a_silent_node_did_last_is_told() -> None:
    async with Rig(*PD, timeouts=PATIENT) as rig:
        rig.hold("decode-0")
        starting = asyncio.create_task(rig.controller.start())
        await rig.clock.advance(10)
        rig.clock.stand_still(10 * LIMIT_S)
        await rig.clock.advance(0)
        assert not rig.node("decode-0").stopped, "the controller stood still itself"
        rig.node("decode-0").report("downloading me/model", 0.41)
        rig.launcher.prepare.clear()
        await rig.clock.advance(LIMIT_S + TIMEOUTS.restart_backoff_max_s)
        await starting
        (said,) = rig.events.of("trouble", "decode-0")
        what = "starting decode-0 (timeouts.start_s) made no progress for 20.5 s, at 'downloading me/model', 41% of it"
        assert what in said


async def test_a_router_that_fetches_its_model_is_waited_for() -> None:
    async with Rig(*PD, timeouts=PATIENT) as rig:
        rig.hold("router")
        starting = asyncio.create_task(rig.controller.start())
        await settle()
        router: FakeRouter = rig.launcher.router
        await with_news(rig, router)
        router.may_start.set()
        await starting
        assert rig.launcher.routers == [router]


async def until_done(rig: Rig, task: asyncio.Task[object]) -> None:
    for _ in range(10):
        await rig.clock.advance(TIMEOUTS.heartbeat_s)
        if task.done():
            return task.result()  # type: ignore[return-value]
    raise AssertionError("it is still under way")


async def with_news(rig: Rig, process: FakeProcess) -> None:
    for percent in range(1, 6):
        await rig.clock.advance(LIMIT_S - 1)
        process.report("loading", percent / 100)


async def test_a_change_of_role_that_loads_is_waited_for() -> None:
    async with started(pools=pools(2, 1), timeouts=PATIENT) as rig:
        node = rig.node("prefill-1")
        node.may_load.clear()
        change = asyncio.create_task(rig.controller.change_role("prefill-1", Role.DECODE))
        await with_news(rig, node)
        assert not change.done()
        node.may_load.set()
        await rig.clock.advance(0)
        await change
        assert rig.node("prefill-1") is node


async def test_adapters_that_are_downloaded_are_waited_for_while_that_goes_on() -> None:
    async with started(*PD, config=with_room(), timeouts=PATIENT) as rig:
        node = rig.node("decode-0")
        node.may_load.clear()
        change = asyncio.create_task(rig.controller.adapters({"sql": "/adapters/sql"}, []))
        await with_news(rig, node)
        assert not change.done()
        node.may_load.set()
        await until_done(rig, change)
        assert change.result() == {"sql": "/adapters/sql"}

        node.may_load.clear()
        change = asyncio.create_task(rig.controller.adapters({"law": "/adapters/law"}, []))
        await rig.clock.advance(LIMIT_S)
        node.may_load.set()
        with pytest.raises(Unavailable, match=r"made no progress for 20\.5 s"):
            await until_done(rig, change)
