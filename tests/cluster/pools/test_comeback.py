"""Nodes that were left out start again, and a controller continues after it was killed."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from tandem.base.errors import ConfigurationError, Unavailable
from tandem.cluster.config import ControllerConfig, TandemConfig
from tandem.cluster.control import SupervisedNode
from tandem.cluster.launcher import CheckKept
from tandem.cluster.pools.state import UnknownState, decode
from tandem.cluster.pools.supervisor import ProcessPhase
from tandem.wire.nodes import Role
from tests.cluster.pools.helpers import TIMEOUTS, FakeHosts, Rig, one_machine, settle, started
from tests.cluster.pools.pools_rig import DRAIN_S, PD, PPD, machines, needs_rollouts, pool_of, pools, replace


async def view_of(rig: Rig, name: str) -> SupervisedNode:
    (node,) = [node for node in (await rig.controller.view()).nodes if node.node_id == name]
    return node


# --- nodes that cannot start


async def test_a_node_that_was_left_out_is_not_tried_again_only_to_go() -> None:
    async with Rig(*PPD) as rig:
        rig.refuse("prefill-1", ConfigurationError("no such device"))
        await rig.start()
        assert await rig.controller.scale({Role.PREFILL: 1}) == ["prefill: from 2 to 1, 1 node drained"]
        await settle()
        assert len(rig.launcher.nodes["prefill-1"]) == 1
        assert rig.routed == {"prefill-0", "decode-0"}


async def test_a_left_out_node_of_a_pool_that_follows_the_machines_is_tried_again_by_its_role() -> None:
    async with Rig(pools=pools(1, None), hosts=machines("pdd")) as rig:
        rig.refuse("decode-1", Unavailable("no memory"), times=6)
        await rig.start(100.0)
        with pytest.raises(Unavailable, match="decode-1 did not start: no memory"):
            await rig.during(rig.controller.change_role("decode-1", Role.DECODE), 100.0)
        await rig.controller.change_role("decode-1", Role.DECODE)
        assert "decode-1" in rig.routed
        pool = await pool_of(rig, Role.DECODE)
        assert (pool.wanted, pool.ready) == (2, 2)


async def test_what_a_node_has_worked_with_is_no_mistake() -> None:
    """The previous node's memory may not be free yet when the next one starts."""
    async with started(*PD) as rig:
        rig.refuse("decode-0", ConfigurationError("only 1 MiB is free"), times=3)
        rig.node("decode-0").die()
        await rig.clock.advance(10)
        assert rig.routed == {"prefill-0", "decode-0"}
        node = await view_of(rig, "decode-0")
        assert (node.phase, node.restarts) == (ProcessPhase.READY, 1)
        assert "only 1 MiB is free" in node.detail, "what an operator would ask"


# --- a controller that comes back


@pytest.mark.parametrize("is_reached", [True, False])
async def test_a_drain_waits_until_a_new_controller_reaches_what_runs_and_says_if_it_does_not(is_reached: bool) -> None:
    """`tandem down` asks again when the controller was killed while it drained: what runs would be cut off."""
    async with started(*PD) as rig:
        running = [rig.launcher.router, *map(rig.launcher.node, ("prefill-0", "decode-0"))]
        for process in running:
            process.starts_at_once = False
        await rig.kill_controller()
        start = asyncio.create_task(rig.controller.start())
        drain = asyncio.create_task(rig.controller.drain())
        await rig.clock.advance(1.0)
        assert not drain.done()
        for process in running[: None if is_reached else 2]:
            process.may_start.set()
        await rig.clock.advance(0.0 if is_reached else TIMEOUTS.nodes.drain_s)
        assert await drain == is_reached
        assert all(process.drained_with is not None for process in running) == is_reached
        rig.launcher.node("decode-0").may_start.set()
        await start


async def test_a_cluster_that_has_not_served_yet_has_nothing_to_finish() -> None:
    async with Rig(*PD) as rig:
        rig.launcher.prepare["router"] = rig.launcher.prepare["decode-0"] = lambda process, _: setattr(
            process, "starts_at_once", False
        )
        start = asyncio.create_task(rig.controller.start())
        await settle()
        assert await rig.controller.drain()
        start.cancel()
        await asyncio.gather(start, return_exceptions=True)


async def test_a_controller_that_was_killed_comes_back_to_its_nodes_and_nobody_notices() -> None:
    async with started(*PD) as rig:
        for size in range(2, 31):  # more decisions than are kept
            await rig.controller.scale({Role.DECODE: 2 + size % 2})
        await settle()
        told = len(rig.launcher.router.memberships)
        before = {node.info.node_id: node.info for node in rig.launcher.running}
        decisions = (await rig.controller.view()).decisions
        await rig.next_controller()
        assert {node.info.node_id: node.info for node in rig.launcher.running} == before
        assert len(rig.launcher.routers) == 1
        since = rig.launcher.router.memberships[told:]
        assert since, "it was told again"
        assert all({member.node_id for member in members} == set(before) for members in since)
        after = (await rig.controller.view()).decisions
        assert after[:-1] == decisions[1:], "what the one before it decided"
        assert "took over" in after[-1].text


async def test_a_node_that_was_left_out_stays_so_for_the_next_controller() -> None:
    async with Rig(*PD) as rig:
        rig.refuse("prefill-0", Unavailable("no memory"), times=3)
        await rig.start(100)
        await rig.next_controller(100)
        node = await view_of(rig, "prefill-0")
        assert (node.phase, node.detail) == (ProcessPhase.LEFT_OUT, "no memory")
        assert len(rig.launcher.nodes["prefill-0"]) == 3
        lines = await rig.controller.scale({Role.PREFILL: 1})
        assert lines == ["prefill: stays at 1", "prefill-0 was left out and is tried again"]
        await settle()
        assert rig.routed == {"prefill-0", "decode-0"}
        await rig.next_controller()
        assert rig.routed == {"prefill-0", "decode-0"}, "it was asked for, and served"


async def test_an_order_whose_record_was_not_confirmed_is_not_carried_out_by_the_next_controller() -> None:
    async with started(pools=pools(1, 1), hosts=FakeHosts(one_machine(16))) as rig:
        await rig.clock.advance(1.0)
        save = rig.store.save

        async def save_without_an_answer(kept: bytes, check: CheckKept | None = None) -> None:
            await save(kept, check)
            rig.store.save = save  # type: ignore[method-assign]
            raise Unavailable("Ray's control store did not answer in time")

        rig.store.save = save_without_an_answer  # type: ignore[method-assign]
        with pytest.raises(Unavailable):
            await rig.controller.scale({Role.DECODE: 3})
        await rig.clock.advance(1.0)
        await rig.next_controller()
        await rig.clock.advance(20.0)
        assert [node.node_id for node in (await rig.controller.view()).nodes] == ["prefill-0", "decode-0"]


@pytest.mark.parametrize("order", ["scale", "pause", "reset", "apply"])
async def test_an_order_before_the_record_was_read_changes_what_was_recorded(order: str) -> None:
    """Ray restarts a controller while its control store is still away: a command reaches it first."""
    async with started(pools=pools(1, 2), hosts=FakeHosts(one_machine(16))) as rig:
        await rig.clock.advance(1.0)
        await rig.controller.scale({Role.DECODE: 3})
        await rig.clock.advance(1.0)
        await rig.kill_controller()
        nodes = list(rig.launcher.running)
        wanted = replace(rig.config, pools=pools(1, 3), slo=replace(rig.config.slo, ttft_s=7.0))
        orders = {
            "scale": lambda: rig.controller.scale({Role.PREFILL: 2}),
            "pause": lambda: rig.controller.pause(["decode-2"]),
            "reset": lambda: rig.controller.reset_cache([]),
            "apply": lambda: rig.controller.apply(wanted, dry_run=False),
        }
        given = asyncio.create_task(orders[order]())
        await settle()
        await rig.start(1.0)
        told = await given
        await rig.clock.advance(20.0)
        running = rig.launcher.running
        assert running[: len(nodes)] == nodes, "they served, and no order named them"
        assert len(running) - len(nodes) == (order == "scale")
        if order == "reset":
            assert told == sorted(node.config.node_id for node in nodes)


async def test_what_could_not_be_recorded_is_recorded_later() -> None:
    """The next controller tells routers what is recorded: of an incarnation that has ended, and no more of the one that serves."""
    async with started(*PD) as rig:
        await rig.clock.advance(1.0)
        rig.store.save_error = Unavailable("no space left on device")
        rig.node("decode-0").die()
        await rig.clock.advance(10.0)
        now = rig.node("decode-0").info
        assert now.epoch in [member.epoch for member in rig.launcher.router.memberships[-1]]
        rig.store.save_error = None
        await rig.clock.advance(5.0)
        record = decode(rig.store.state).known("decode-0")
        assert record.info.epoch == now.epoch


@pytest.mark.parametrize("served", [False, True])
async def test_a_node_that_goes_on_a_machine_that_is_not_seen_ends(served: bool) -> None:
    """It would keep its place there when the machine is seen again, and no controller would know it."""
    async with Rig(pools=pools(1, 2), hosts=machines("pd", "d")) as rig:
        rig.launcher.prepare["decode-0"] = lambda process, _: setattr(process, "starts_at_once", served)
        start = asyncio.create_task(rig.controller.start())
        await rig.clock.advance(1.0)
        await rig.kill_controller()
        await asyncio.gather(start, return_exceptions=True)
        (there,) = [node for node in rig.launcher.running if node.host.name == "2"]
        rig.hosts.leave("2")
        rig.hosts.forget_waiters()
        start = asyncio.create_task(rig.controller.start())
        await rig.clock.advance(TIMEOUTS.unresponsive_s)
        if served:
            assert not there.stopped, "routers hear it"
            await rig.controller.drain_node("decode-0", 1.0)
        assert there.stopped
        start.cancel()
        await asyncio.gather(start, return_exceptions=True)


async def test_a_controller_that_cannot_record_anything_takes_over_all_the_same() -> None:
    async with Rig(*PD) as rig:
        rig.commit = "1"
        await rig.start()
        await rig.clock.advance(1.0)
        await rig.kill_controller()
        rig.store.save_error = Unavailable("no space left on device")
        start = asyncio.create_task(rig.controller.start())
        await rig.clock.advance(5.0)
        view = await rig.controller.view()
        assert [node.node_id for node in view.nodes if node.phase == "ready"] == ["prefill-0", "decode-0"]
        assert [(router.name, router.phase) for router in view.routers] == [("router", "ready")]
        rig.store.save_error = None
        await rig.clock.advance(5.0)
        await start
        assert rig.routed == {"prefill-0", "decode-0"}


async def away(config: TandemConfig, commit: str) -> tuple[TandemConfig, str]:
    raise Unavailable("the hub does not answer")


async def test_a_controller_whose_start_failed_tries_to_take_over_again() -> None:
    """No command is there any more that would end the deployment for it."""
    async with Rig(*PD) as rig:
        fix_model, rig.controller.pools.fix_model = rig.controller.pools.fix_model, away
        with pytest.raises(Unavailable, match="the hub"):
            await rig.start()
        recovered = asyncio.create_task(rig.controller.recovered())
        await rig.clock.advance(5.0)
        assert not recovered.done()
        rig.controller.pools.fix_model = fix_model
        await rig.clock.advance(5.0)
        await recovered
        assert rig.routed == {"prefill-0", "decode-0"}


async def test_an_order_before_a_controller_has_taken_over_ends_nothing() -> None:
    """It does not know yet what runs, so a node that is to leave would be ended with its requests."""
    async with started(*PPD) as rig:
        await rig.kill_controller()
        fix_model, rig.controller.pools.fix_model = rig.controller.pools.fix_model, away
        with pytest.raises(Unavailable, match="the hub"):
            await rig.start()
        going = rig.node("prefill-1")
        going.may_finish.clear()
        with pytest.raises(Unavailable, match="has not taken over"):
            await rig.controller.drain_node("prefill-1", 5.0)
        assert not going.stopped
        rig.controller.pools.fix_model = fix_model
        await rig.during(rig.controller.recovered(), 5.0)
        assert (going.drained_with, going.stopped) == (DRAIN_S, False)
        going.may_finish.set()
        await settle()
        assert going.stopped


async def test_a_controller_that_comes_back_before_the_control_store_waits_for_it_and_takes_over() -> None:
    """If it gave up, no controller would look after the nodes any more."""
    async with started(*PD) as rig:
        await rig.kill_controller()
        hosts = rig.hosts
        rig.store.error = Unavailable("away")
        known, hosts.hosts = hosts.hosts, []
        start = asyncio.create_task(rig.controller.start())
        await rig.clock.advance(2 * TIMEOUTS.start_s)
        assert not start.done()
        rig.store.error, hosts.error = None, Unavailable("away too")
        await rig.clock.advance(2 * TIMEOUTS.start_s)
        assert not start.done()
        hosts.error, hosts.hosts = None, known
        await rig.clock.advance(5)
        await start
        assert rig.routed == {"prefill-0", "decode-0"}
        assert len(rig.launcher.nodes["decode-0"]) == 1, "as it was"
        rig.node("decode-0").die()
        await rig.clock.advance(10)
        assert rig.routed == {"prefill-0", "decode-0"}


async def test_a_node_whose_machine_goes_while_it_is_adopted_is_out_of_the_routers_view() -> None:
    async with started(pools=pools(1, 1), hosts=machines("pd")) as rig:
        for node in rig.launcher.running:
            node.starts_at_once = False  # it answers the next controller too late
        await rig.kill_controller()
        start = asyncio.create_task(rig.controller.start())
        await settle()
        assert rig.routed == {"prefill-0", "decode-0"}, "routers are told what they were told last"
        rig.lose_machine("1")
        await rig.clock.advance(60.0)
        assert rig.routed == set()
        start.cancel()
        await asyncio.gather(start, return_exceptions=True)


# --- a controller of another version


@needs_rollouts
async def test_a_controller_that_does_not_know_a_setting_names_it_and_touches_nothing() -> None:
    async with started(*PD) as rig:
        await rig.controller.apply(replace(rig.config, debug=True), dry_run=False)
        await settle()
        kept = await rig.store.load()
        assert kept is not None
        tree = msgspec.msgpack.decode(kept)
        written = tree["revision"]["config"]
        assert written.keys() == {"timeouts", "router", "debug"}, "the version before reads it: it names no defaults"
        written["cache"] = {"of_a_later_version": 8}
        later = msgspec.msgpack.encode(tree)
        await rig.store.save(later)
        before = {name: len(processes) for name, processes in rig.launcher.nodes.items()}
        with pytest.raises(UnknownState, match=r"of_a_later_version.*revision.config.cache"):
            await rig.next_controller()
        with pytest.raises(Unavailable, match="of_a_later_version"):
            await rig.controller.scale({Role.DECODE: 2})
        assert await rig.store.load() == later
        assert {name: len(processes) for name, processes in rig.launcher.nodes.items()} == before
        await rig.store.save(kept)
        await rig.next_controller()


async def test_the_controllers_environment_is_that_of_its_process() -> None:
    """The applied environment does not count, because the process for it may not have started."""
    async with started(*PD) as rig:
        wanted = replace(rig.config, controller=ControllerConfig(env={"PYTHONPATH": "/later"}, start_s=7))
        change = await rig.controller.apply(wanted, dry_run=False)
        assert (change.controller, change.at_once) == (["controller.env.PYTHONPATH"], ["controller.start_s"])
        assert (await rig.controller.configuration()).controller == ControllerConfig(start_s=7)

        rig.config = wanted  # what the next process is made with
        await rig.next_controller()
        assert (await rig.controller.configuration()).controller == wanted.controller


async def test_a_node_that_does_not_start_on_a_machine_that_is_seen_again_is_replaced() -> None:
    """It ended while its machine was not seen. The controller goes on with all others."""
    async with started(pools=pools(1, 2), hosts=machines("pd", "d")) as rig:
        (there,) = [node for node in rig.launcher.running if node.host.name == "2"]
        name = there.info.node_id
        gone = rig.hosts.leave("2")
        await rig.kill_controller()
        start = asyncio.create_task(rig.controller.start())
        await rig.clock.advance(TIMEOUTS.unresponsive_s)
        rig.refuse(name, Unavailable("no memory"), times=2)
        there.died.set_result("out of memory")
        rig.hosts.join(gone)
        await rig.clock.advance(TIMEOUTS.unresponsive_s)
        await start
        assert (await rig.controller.view()).failure == ""
        assert name in rig.routed
        assert [node for node in rig.launcher.nodes[name][1:] if not node.stopped] == [rig.node(name)]
