"""Starting, watching, replacing, draining and stopping, against a launcher without processes."""

from __future__ import annotations

import asyncio

import pytest

from tandem.base.errors import ConfigurationError, InternalError, Unavailable
from tandem.wire.nodes import NodeState, PoolReport, Role, RouterQueue
from tests.cluster.pools.helpers import TIMEOUTS, Rig, settle, started
from tests.cluster.pools.pools_rig import PD


async def test_everything_starts_at_once_and_the_router_learns_of_all_nodes_and_is_told_of_none_that_is_down() -> None:
    async with Rig(*PD) as rig:
        rig.hold("prefill-0", "decode-0", "router")
        start = asyncio.create_task(rig.controller.start())
        await settle()
        assert len(rig.launcher.everything) == 3, "all were launched before any was ready"
        assert not start.done()
        told: list[list[str]] = []
        router = rig.launcher.router
        router.on_members = lambda: told.append([name for pool in router.pools.values() for name in pool.down])
        for process in rig.launcher.everything:
            process.may_start.set()
            await settle()
        await start
        assert rig.routed == {"prefill-0", "decode-0"}
        assert rig.controller.url == "http://127.0.0.1:8000"
        assert rig.events.of("progress", "decode-0") == ["loading the weights"]
        assert len(told) > 1
        assert not any(told)


async def test_a_node_that_dies_is_out_at_once_and_comes_back_with_a_new_epoch() -> None:
    async with started(*PD) as rig:
        await settle()
        first = rig.node("decode-0")
        first.die("signal 9")
        await settle()
        assert rig.routed == {"prefill-0"}, "no time has passed"
        assert first.stopped
        assert "signal 9" in rig.launcher.router.pools[Role.DECODE].down["decode-0"]
        await rig.clock.advance(TIMEOUTS.restart_backoff_s)
        assert rig.routed == {"prefill-0", "decode-0"}
        members = {member.node_id: member for member in rig.controller.members}
        assert members["decode-0"].epoch != first.info.epoch
        assert any("signal 9" in what for what in rig.events.of("trouble", "decode-0"))


async def test_restarts_of_a_node_that_keeps_dying_come_ever_later_until_one_has_served_for_long() -> None:
    async with started(*PD) as rig:
        expected = 1.0
        for earlier in range(1, 6):
            rig.node("decode-0").die()
            await rig.clock.advance(expected - 0.01)
            assert len(rig.launcher.nodes["decode-0"]) == earlier
            await rig.clock.advance(0.02)
            assert len(rig.launcher.nodes["decode-0"]) == earlier + 1
            expected = min(2 * expected, TIMEOUTS.restart_backoff_max_s)
        await rig.clock.advance(10 * TIMEOUTS.restart_backoff_max_s)
        rig.node("decode-0").die()
        await rig.clock.advance(TIMEOUTS.restart_backoff_s)
        assert len(rig.launcher.nodes["decode-0"]) == 7


@pytest.mark.parametrize("fails", ["at once", "never ends"])
async def test_three_failures_in_a_row_at_start_leave_a_node_out_while_the_rest_serves(fails: str) -> None:
    async with Rig(*PD) as rig:
        if fails == "at once":
            rig.refuse("prefill-0", Unavailable("no memory"))
        else:
            rig.hold("prefill-0")
        await rig.start(3 * (TIMEOUTS.start_s + TIMEOUTS.restart_backoff_max_s))
        assert len(rig.launcher.nodes["prefill-0"]) == 3
        assert all(node.stopped for node in rig.launcher.nodes["prefill-0"])
        assert rig.routed == {"decode-0"}
        (reason,) = rig.events.of("gave_up", "prefill-0")
        assert "3 times in a row" in reason
        why = "no memory" if fails == "at once" else "made no progress for 100 s"
        assert why in reason
        pool = rig.launcher.router.pools[Role.PREFILL]
        assert why in pool.left_out["prefill-0"]
        assert pool == PoolReport(Role.PREFILL, 1, left_out=pool.left_out)


async def test_a_mistake_in_the_settings_is_not_tried_again() -> None:
    async with Rig(*PD) as rig:
        rig.refuse("prefill-0", ConfigurationError("no such model"))
        await rig.start()
        assert len(rig.launcher.nodes["prefill-0"]) == 1
        assert rig.events.of("gave_up", "prefill-0") == ["no such model"]


@pytest.mark.parametrize(("name", "slow"), [("router", "decode-0"), ("decode-0", "prefill-0")])
async def test_what_cannot_come_to_serve_is_said_before_the_rest_has_started(name: str, slow: str) -> None:
    async with Rig(*PD) as rig:
        rig.refuse(name, ConfigurationError("it lacks a file"))
        rig.hold(slow)
        with pytest.raises(Unavailable, match=rf"{name}.*: it lacks a file"):
            await rig.start()


async def test_a_process_that_dies_while_it_starts_is_noticed_at_once() -> None:
    async with Rig(*PD) as rig:
        rig.hold("decode-0")
        start = asyncio.create_task(rig.controller.start())
        await settle()
        rig.launcher.prepare.clear()
        rig.node("decode-0").die("killed by the kernel")
        await rig.clock.advance(TIMEOUTS.restart_backoff_s)
        await start
        assert any("killed by the kernel" in what for what in rig.events.of("trouble", "decode-0"))


async def test_a_late_answer_is_reported_and_costs_nobody_the_node() -> None:
    """The node itself tells the routers."""
    async with started(*PD) as rig:
        node = rig.node("decode-0")
        node.mute.set()
        await rig.clock.advance(TIMEOUTS.heartbeat_s + TIMEOUTS.silence_s + 0.1)
        assert rig.routed == {"prefill-0", "decode-0"}
        assert any("does not answer" in what for what in rig.events.of("trouble", "decode-0"))
        node.mute.clear()
        await rig.clock.advance(TIMEOUTS.heartbeat_s + TIMEOUTS.silence_s)
        assert rig.routed == {"prefill-0", "decode-0"}
        assert len(rig.launcher.nodes["decode-0"]) == 1, "a pause is no reason to end it"


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda node: setattr(node, "state", NodeState.FAILED), "it failed: out of luck"),
        (lambda node: setattr(node, "step_age_s", TIMEOUTS.step_s + 1), "in one step for 51 s"),
        (lambda node: setattr(node, "epoch_in_status", 999), "another incarnation than the one that was started answers"),
    ],
)  # fmt: skip
async def test_a_node_that_cannot_be_trusted_is_replaced(spoil, why: str) -> None:
    async with started(*PD) as rig:
        first = rig.node("decode-0")
        spoil(first)
        await rig.clock.advance(TIMEOUTS.heartbeat_s + TIMEOUTS.restart_backoff_s + 0.1)
        assert first.stopped
        assert rig.node("decode-0") is not first
        assert any(why in what for what in rig.events.of("trouble", "decode-0"))


async def test_a_router_that_has_worked_is_never_given_up() -> None:
    async with started(*PD) as rig:
        rig.refuse("router", ConfigurationError("port 8000 is taken"), times=6)
        rig.launcher.router.die()
        await rig.clock.advance(10 * TIMEOUTS.restart_backoff_max_s)
        assert len(rig.launcher.routers) == 7
        assert rig.routed == {"prefill-0", "decode-0"}


@pytest.mark.parametrize("fault", ["", "does not finish", "does not answer"])
async def test_a_drain_says_whether_all_was_finished_and_ends_although_a_node_does_not_answer(fault: str) -> None:
    async with started(*PD) as rig:
        rig.node("decode-0").drains = fault != "does not finish"
        if fault == "does not answer":
            rig.node("decode-0").mute.set()
        limit_s = TIMEOUTS.nodes.drain_s + TIMEOUTS.stop_s + 1
        assert await rig.during(rig.controller.drain(), limit_s) == (not fault)
        assert rig.launcher.router.drained_with == TIMEOUTS.nodes.drain_s
        drained = [rig.node(name).drained_with is not None for name, _ in PD]
        assert drained == [True, fault != "does not answer"]


async def test_stop_while_everything_is_still_starting_ends_all_of_it() -> None:
    async with Rig(*PD) as rig:
        rig.hold("prefill-0", "decode-0", "router")
        start = asyncio.create_task(rig.controller.start())
        await settle()
        start.cancel()
        await asyncio.gather(start, return_exceptions=True)
        await rig.controller.stop()
        assert len(rig.launcher.everything) == 3
        assert all(process.stopped for process in rig.launcher.everything)
        await rig.controller.stop()


async def test_a_bug_in_supervision_fails_the_controller_and_one_while_starting_its_start() -> None:
    async def broken() -> None:
        raise RuntimeError("a bug")

    async with started(*PD) as rig:
        rig.node("decode-0").status = broken  # type: ignore[assignment, method-assign]
        failed = await rig.during(rig.controller.failed(), TIMEOUTS.heartbeat_s)
        assert "a bug" in failed
    async with Rig(*PD) as rig:
        rig.launcher.prepare["decode-0"] = lambda process, earlier: (_ for _ in ()).throw(RuntimeError("a bug"))
        with pytest.raises(InternalError, match="a bug"):
            await rig.start()


async def started_with_a_blind_router(rig: Rig) -> asyncio.Task[None]:
    """Starts a cluster whose router does not hear decode-0. The returned task waits for at most 30 s until it does."""
    blind = RouterQueue(out_of_view={"decode-0": "it has not reported its status yet"})
    rig.launcher.prepare["router"] = lambda router, earlier: setattr(router, "load", blind)
    await rig.start()
    return asyncio.create_task(rig.controller.until_in_view(30.0))


async def test_a_cluster_is_ready_when_its_router_hears_every_node() -> None:
    async with Rig(*PD) as rig:
        in_view = await started_with_a_blind_router(rig)
        await rig.clock.advance(0.9)
        assert not in_view.done()
        assert not rig.events.of("progress", "router"), "a short wait is not worth a word"
        await rig.clock.advance(1.0)
        assert "waiting for word of decode-0: it has not reported its status yet" in rig.events.of("progress", "router")
        rig.launcher.router.load = RouterQueue()
        await rig.clock.advance(TIMEOUTS.heartbeat_s)
        await in_view
        assert "sends requests to every node that serves" in rig.events.of("ready", "router")
        assert not rig.events.of("trouble", "router")


async def test_a_node_that_a_router_never_hears_is_told_of_and_the_rest_serves() -> None:
    async with Rig(*PD) as rig:
        in_view = await started_with_a_blind_router(rig)
        await rig.clock.advance(29.0)
        assert not in_view.done()
        await rig.clock.advance(2.0)
        await in_view
        unheard = "sends no requests to decode-0: it has not reported its status yet"
        assert rig.events.of("trouble", "router") == [unheard]


async def test_a_node_that_dies_is_not_waited_for_until_routers_hear_it() -> None:
    async with Rig(*PD) as rig:
        in_view = await started_with_a_blind_router(rig)
        await rig.clock.advance(2.0)
        rig.hold("decode-0")
        rig.node("decode-0").die()
        await settle()
        await in_view
