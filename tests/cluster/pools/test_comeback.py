"""Nodes that were left out start again, and a controller continues after it was killed."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from tandem.base.errors import ConfigurationError, Unavailable
from tandem.cluster.config import ControllerConfig, TandemConfig
from tandem.cluster.launcher import CheckKept
from tandem.cluster.pools.state import UnknownState, decode
from tandem.cluster.pools.supervisor import ProcessPhase
from tandem.wire.nodes import Role
from tests.cluster.pools.helpers import TIMEOUTS, FakeHosts, FakeProcess, Rig, one_machine, settle, started
from tests.cluster.pools.memory_store import MemoryStore
from tests.cluster.pools.pools_rig import DRAIN_S, PD, machine, needs_rollouts, pools

replace = msgspec.structs.replace

# --- nodes that cannot start


async def test_a_node_that_was_left_out_is_not_tried_again_only_to_go() -> None:
    async with Rig(*PD, ("prefill-1", Role.PREFILL)) as rig:
        rig.launcher.prepare["prefill-1"] = lambda process, _: setattr(
            process, "start_error", ConfigurationError("no such device")
        )
        await rig.controller.start()
        assert await rig.controller.scale({Role.PREFILL: 1}) == ["prefill: from 2 to 1, 1 node drained"]
        await settle()
        assert len(rig.launcher.nodes["prefill-1"]) == 1
        assert rig.routed == {"prefill-0", "decode-0"}


async def test_a_left_out_node_of_a_pool_that_follows_the_machines_is_tried_again_by_its_role() -> None:
    hosts = FakeHosts(machine("1", prefill=1, decode=2))
    async with Rig(pools=pools(1, None), hosts=hosts) as rig:
        rig.launcher.prepare["decode-1"] = lambda node, earlier: setattr(
            node, "start_error", Unavailable("no memory") if earlier < 6 else None
        )
        start = asyncio.create_task(rig.controller.start())
        await rig.clock.advance(100.0)
        await start
        again = asyncio.create_task(rig.controller.change_role("decode-1", Role.DECODE))
        await rig.clock.advance(100.0)
        with pytest.raises(Unavailable, match="decode-1 did not start: no memory"):
            await again
        await rig.controller.change_role("decode-1", Role.DECODE)
        assert "decode-1" in rig.routed
        (pool,) = [pool for pool in (await rig.controller.view()).pools if pool.role is Role.DECODE]
        assert (pool.wanted, pool.ready) == (2, 2)


async def test_what_a_node_has_worked_with_is_no_mistake() -> None:
    """The previous node's memory may not be free yet when the next one starts."""
    async with started(*PD) as rig:
        rig.launcher.prepare["decode-0"] = lambda process, earlier: (
            setattr(process, "start_error", ConfigurationError("only 1 MiB is free")) if earlier < 3 else None
        )
        rig.launcher.node("decode-0").die()
        await rig.clock.advance(10)
        assert rig.routed == {"prefill-0", "decode-0"}
        (node,) = [n for n in (await rig.controller.view()).nodes if n.node_id == "decode-0"]
        assert (node.phase, node.restarts) == (ProcessPhase.READY, 1)
        assert "only 1 MiB is free" in node.detail, "what an operator would ask"


# --- a controller that comes back


async def test_a_drain_waits_until_a_new_controller_reaches_what_runs() -> None:
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
        for process in running:
            process.may_start.set()
        assert await drain
        assert all(process.drained_with is not None for process in running)
        await start


async def test_a_drain_says_what_a_new_controller_did_not_reach_in_time() -> None:
    async with started(*PD) as rig:
        rig.launcher.node("decode-0").starts_at_once = False
        await rig.kill_controller()
        start = asyncio.create_task(rig.controller.start())
        drain = asyncio.create_task(rig.controller.drain())
        await rig.clock.advance(TIMEOUTS.nodes.drain_s)
        assert not await drain
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
        await rig.controller.scale({Role.DECODE: 2})
        await settle()
        told = len(rig.launcher.router.memberships)
        before = {node.info.node_id: node.info for node in rig.launcher.running}
        await rig.next_controller()
        await settle()
        assert {node.info.node_id: node.info for node in rig.launcher.running} == before
        assert len(rig.launcher.routers) == 1
        since = rig.launcher.router.memberships[told:]
        assert since, "it was told again"
        assert all({member.node_id for member in members} == set(before) for members in since)


async def test_a_controller_shows_what_the_one_before_it_decided() -> None:
    async with started(*PD) as rig:
        for size in range(2, 30):  # more than are kept
            await rig.controller.scale({Role.DECODE: 2 + size % 2})
        await settle()
        before = (await rig.controller.view()).decisions
        await rig.next_controller()
        after = (await rig.controller.view()).decisions
        assert after[:-1] == before[1:]
        assert "took over" in after[-1].text


async def test_a_node_that_was_left_out_stays_so_for_the_next_controller() -> None:
    def broken(process: FakeProcess, earlier: int) -> None:
        process.start_error = Unavailable("no memory") if earlier < 3 else None

    async with Rig(*PD) as rig:
        rig.launcher.prepare["prefill-0"] = broken
        start = asyncio.create_task(rig.controller.start())
        await rig.clock.advance(100)
        await start
        await rig.kill_controller()
        start = asyncio.create_task(rig.controller.start())
        await rig.clock.advance(100)
        await start
        (node,) = [n for n in (await rig.controller.view()).nodes if n.node_id == "prefill-0"]
        assert (node.phase, node.detail) == (ProcessPhase.LEFT_OUT, "no memory")
        assert len(rig.launcher.nodes["prefill-0"]) == 3
        lines = await rig.controller.scale({Role.PREFILL: 1})
        assert lines == ["prefill: stays at 1", "prefill-0 was left out and is tried again"]
        await settle()
        assert rig.routed == {"prefill-0", "decode-0"}
        await rig.next_controller()
        await settle()
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
        orders = {
            "scale": lambda: rig.controller.scale({Role.PREFILL: 2}),
            "pause": lambda: rig.controller.pause(["decode-2"]),
            "reset": lambda: rig.controller.reset_cache([]),
            "apply": lambda: rig.controller.apply(
                replace(rig.config, pools=pools(1, 3), slo=replace(rig.config.slo, ttft_s=7.0)), dry_run=False
            ),
        }
        given = asyncio.create_task(orders[order]())
        await settle()
        start = asyncio.create_task(rig.controller.start())
        await rig.clock.advance(1.0)
        await start
        told = await given
        await rig.clock.advance(20.0)
        running = rig.launcher.running
        assert running[: len(nodes)] == nodes, "they served, and no order named them"
        assert len(running) - len(nodes) == (order == "scale")
        if order == "reset":
            assert told == sorted(node.config.node_id for node in nodes)


async def test_what_could_not_be_recorded_is_recorded_later() -> None:
    """The next controller tells routers what is recorded: of an incarnation that has ended, and no more of the one that serves."""
    async with Rig(*PD) as rig:
        store = MemoryStore()
        rig.store = store
        rig.controller = rig.new_controller()
        await rig.controller.start()
        await rig.clock.advance(1.0)
        store.save_error = Unavailable("no space left on device")
        rig.launcher.node("decode-0").die()
        await rig.clock.advance(10.0)
        now = rig.launcher.node("decode-0").info
        assert now.epoch in [member.epoch for member in rig.launcher.router.memberships[-1]]
        store.save_error = None
        rig.hosts.join(one_machine(8))  # what is wanted is looked at again
        await rig.clock.advance(5.0)
        assert store.state is not None
        record = decode(store.state).known("decode-0")
        assert record.info is not None
        assert record.info.epoch == now.epoch


@pytest.mark.parametrize("served", [False, True])
async def test_a_node_that_goes_on_a_machine_that_is_not_seen_ends(served: bool) -> None:
    """It would keep its place there when the machine is seen again, and no controller would know it."""
    hosts = FakeHosts(machine("1", prefill=1, decode=1), machine("2", decode=1))
    async with Rig(pools=pools(1, 2), hosts=hosts) as rig:
        rig.launcher.prepare["decode-0"] = lambda process, _: setattr(process, "starts_at_once", served)
        start = asyncio.create_task(rig.controller.start())
        await rig.clock.advance(1.0)
        await rig.kill_controller()
        await asyncio.gather(start, return_exceptions=True)
        (there,) = [node for node in rig.launcher.running if node.host.name == "2"]
        hosts.leave("2")
        hosts.forget_waiters()
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
        store = MemoryStore()
        rig.store = store
        rig.controller = rig.new_controller()
        rig.commit = "1"
        await rig.controller.start()
        await rig.clock.advance(1.0)
        await rig.kill_controller()

        async def full(state: bytes, check: CheckKept | None = None) -> None:
            raise Unavailable("no space left on device")

        save, store.save = store.save, full  # type: ignore[method-assign]
        start = asyncio.create_task(rig.controller.start())
        await rig.clock.advance(5.0)
        view = await rig.controller.view()
        assert [node.node_id for node in view.nodes if node.phase == "ready"] == ["prefill-0", "decode-0"]
        assert [(router.name, router.phase) for router in view.routers] == [("router", "ready")]
        store.save = save  # type: ignore[method-assign]
        await rig.clock.advance(5.0)
        await start
        assert rig.routed == {"prefill-0", "decode-0"}


async def test_a_controller_whose_start_failed_tries_to_take_over_again() -> None:
    """No command is there any more that would end the deployment for it."""
    async with Rig(*PD) as rig:

        async def away(config: TandemConfig, commit: str) -> tuple[TandemConfig, str]:
            raise Unavailable("the hub does not answer")

        fix_model, rig.fix_model = rig.fix_model, away  # type: ignore[method-assign]
        rig.controller = rig.new_controller()
        with pytest.raises(Unavailable, match="the hub"):
            await rig.controller.start()
        recovered = asyncio.create_task(rig.controller.recovered())
        await rig.clock.advance(5.0)
        assert not recovered.done()
        rig.controller.pools.fix_model = fix_model
        await rig.clock.advance(5.0)
        await recovered
        assert rig.routed == {"prefill-0", "decode-0"}


async def test_an_order_before_a_controller_has_taken_over_ends_nothing() -> None:
    """It does not know yet what runs, so a node that is to leave would be ended with its requests."""
    async with started(*PD, ("prefill-1", Role.PREFILL)) as rig:
        await rig.kill_controller()
        fix_model = rig.controller.pools.fix_model

        async def away(config: TandemConfig, commit: str) -> tuple[TandemConfig, str]:
            raise Unavailable("the hub does not answer")

        rig.controller.pools.fix_model = away
        with pytest.raises(Unavailable, match="the hub"):
            await rig.controller.start()
        going = rig.launcher.node("prefill-1")
        going.may_finish.clear()
        with pytest.raises(Unavailable, match="has not taken over"):
            await rig.controller.drain_node("prefill-1", 5.0)
        assert not going.stopped
        recovered = asyncio.create_task(rig.controller.recovered())
        rig.controller.pools.fix_model = fix_model
        await rig.clock.advance(5.0)
        await recovered
        assert (going.drained_with, going.stopped) == (DRAIN_S, False)
        going.may_finish.set()
        await settle()
        assert going.stopped


async def test_a_controller_that_comes_back_before_the_control_store_waits_for_it_and_takes_over() -> None:
    """If it gave up, no controller would look after the nodes any more."""
    async with started(*PD) as rig:
        await rig.kill_controller()
        store, hosts = rig.store, rig.hosts
        store.error = Unavailable("away")  # type: ignore[attr-defined]
        machines, hosts.hosts = hosts.hosts, []
        start = asyncio.create_task(rig.controller.start())
        await rig.clock.advance(2 * TIMEOUTS.start_s)
        assert not start.done()
        store.error = None  # type: ignore[attr-defined]
        hosts.error = Unavailable("away too")
        await rig.clock.advance(2 * TIMEOUTS.start_s)
        assert not start.done()
        hosts.error, hosts.hosts = None, machines
        await rig.clock.advance(5)
        await start
        assert rig.routed == {"prefill-0", "decode-0"}
        assert len(rig.launcher.nodes["decode-0"]) == 1, "as it was"
        rig.launcher.node("decode-0").die()
        await rig.clock.advance(10)
        assert rig.routed == {"prefill-0", "decode-0"}


async def test_a_node_whose_machine_goes_while_it_is_adopted_is_out_of_the_routers_view() -> None:
    hosts = FakeHosts(machine("1", prefill=1, decode=1))
    async with started(pools=pools(1, 1), hosts=hosts) as rig:
        await settle()
        assert rig.routed == {"prefill-0", "decode-0"}
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
async def test_what_is_kept_names_no_defaults_so_that_the_version_before_reads_it() -> None:
    async with started(*PD) as rig:
        await rig.controller.apply(replace(rig.config, debug=True), dry_run=False)
        await settle()
        kept = await rig.store.load()
        assert kept is not None
        tree = msgspec.msgpack.decode(kept)
        assert tree["revision"]["config"].keys() == {"timeouts", "router", "debug"}


@needs_rollouts
async def test_a_controller_that_does_not_know_a_setting_names_it_and_touches_nothing() -> None:
    async with started(*PD) as rig:
        await rig.controller.apply(replace(rig.config, debug=True), dry_run=False)
        await settle()
        kept = await rig.store.load()
        assert kept is not None
        tree = msgspec.msgpack.decode(kept)
        tree["revision"]["config"]["cache"] = {"of_a_later_version": 8}
        later = msgspec.msgpack.encode(tree)
        await rig.store.save(later)
        before = {name: len(processes) for name, processes in rig.launcher.nodes.items()}

        await rig.kill_controller()
        with pytest.raises(UnknownState, match=r"of_a_later_version.*revision.config.cache"):
            await rig.controller.start()
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
    hosts = FakeHosts(machine("1", prefill=1, decode=1), machine("2", decode=1))
    async with Rig(pools=pools(1, 2), hosts=hosts) as rig:
        await rig.controller.start()
        await rig.kill_controller()
        (there,) = [node for node in rig.launcher.running if node.host.name == "2"]
        name = there.info.node_id
        hosts.leave("2")
        hosts.forget_waiters()
        start = asyncio.create_task(rig.controller.start())
        await rig.clock.advance(TIMEOUTS.unresponsive_s)
        rig.launcher.prepare[name] = lambda process, earlier: setattr(
            process, "start_error", Unavailable("no memory") if earlier < 2 else None
        )
        there.died.set_result("out of memory")
        hosts.join(machine("2", decode=1))
        await rig.clock.advance(TIMEOUTS.unresponsive_s)
        await start
        assert (await rig.controller.view()).failure == ""
        assert name in rig.routed
        assert [node for node in rig.launcher.nodes[name][1:] if not node.stopped] == [rig.launcher.node(name)]
