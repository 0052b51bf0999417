"""Pools that grow, shrink and follow the machines, against a launcher without processes."""

from __future__ import annotations

import asyncio

import pytest

from cluster.config import PoolConfig, PoolsConfig, TandemConfig
from cluster.hosts import Host
from cluster.supervisor import Phase
from router.config import RouterConfig, RouterPlacement
from tests.cluster.helpers import TIMEOUTS, FakeHosts, FakeProcess, Rig, in_loop, settle
from wire.errors import ConfigurationError, Unavailable
from wire.nodes import NodeState, Role

PD = (("prefill-0", Role.PREFILL), ("decode-0", Role.DECODE))
DRAIN_S = TIMEOUTS.nodes.drain_s


def machine(name: str, *, prefill: int = 0, decode: int = 0, cores: int = 4) -> Host:
    slots = {Role.PREFILL: prefill, Role.DECODE: decode}
    return Host(
        name, f"10.0.0.{name}", tuple(range(cores)), slots={role: n for role, n in slots.items() if n}
    )


def pools(prefill: PoolConfig | int | None, decode: PoolConfig | int | None) -> PoolsConfig:
    def pool(given: PoolConfig | int | None) -> PoolConfig:
        return given if isinstance(given, PoolConfig) else PoolConfig(nodes=given)

    return PoolsConfig(prefill=pool(prefill), decode=pool(decode))


async def phases(rig: Rig) -> dict[str, str]:
    return {node.node_id: node.phase for node in (await rig.controller.view()).nodes}


async def pool_of(rig: Rig, role: Role):
    (pool,) = [pool for pool in (await rig.controller.view()).pools if pool.role is role]
    return pool


# --- scaling


@in_loop
async def test_a_pool_that_grows_gets_a_node_that_routers_learn_of() -> None:
    async with Rig(*PD) as rig:
        await rig.controller.start()
        assert await rig.controller.scale({Role.DECODE: 3}) == ["decode: from 1 to 3, 2 nodes more"]
        await settle()
        assert rig.routed == {"prefill-0", "decode-0", "decode-1", "decode-2"}
        assert (await rig.controller.view()).decisions[-1].text == "decode: from 1 to 3, 2 nodes more"


@in_loop
async def test_a_pool_that_shrinks_drains_its_youngest_node_before_it_ends() -> None:
    async with Rig(*PD) as rig:
        await rig.controller.start()
        await rig.controller.scale({Role.DECODE: 2})
        await settle()
        going = rig.launcher.node("decode-1")
        going.may_finish.clear()
        await rig.controller.scale({Role.DECODE: 1})
        await settle()
        assert (await phases(rig))["decode-1"] == Phase.DRAINING
        assert "decode-1" in rig.routed, "its streams go on: routers know that it drains from its own status"
        assert not going.stopped
        going.may_finish.set()
        await settle()
        assert going.stopped
        assert rig.routed == {"prefill-0", "decode-0"}
        assert "decode-1" not in await phases(rig)


@in_loop
async def test_what_a_node_does_not_finish_in_time_is_moved_before_the_node_ends() -> None:
    async with Rig(*PD) as rig:
        await rig.controller.start()
        await rig.controller.scale({Role.DECODE: 2})
        await settle()
        going = rig.launcher.node("decode-1")
        going.drains = False
        order: list[str] = []
        rig.launcher.router.on_members = lambda: (
            order.append("routers told") if "decode-1" not in rig.routed else None
        )
        going.on_stop = lambda: order.append("stopped")
        assert not await rig.controller.drain_node("decode-1", 7.0)
        await settle()
        assert going.drained_with == 7.0
        assert order == ["routers told", "stopped"]


@in_loop
async def test_a_node_that_is_still_starting_goes_before_one_that_serves() -> None:
    async with Rig(*PD) as rig:
        await rig.controller.start()
        rig.launcher.prepare["decode-1"] = lambda process, _: setattr(process, "starts_at_once", False)
        await rig.controller.scale({Role.DECODE: 2})
        await settle()
        await rig.controller.scale({Role.DECODE: 1})
        await settle()
        assert rig.launcher.node("decode-1").stopped
        assert rig.routed == {"prefill-0", "decode-0"}


@in_loop
async def test_ids_are_never_given_twice() -> None:
    async with Rig(*PD) as rig:
        await rig.controller.start()
        for size in (2, 1, 2):
            await rig.controller.scale({Role.DECODE: size})
            await settle()
        assert rig.routed == {"prefill-0", "decode-0", "decode-2"}


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        ({Role.DECODE: 0}, "pools.decode.min is 1"),
        ({Role.DECODE: 4}, "pools.decode.max is 3"),
        ({Role.PREFILL: -1}, "pools.prefill.min is 0"),
    ],
)
@in_loop
async def test_limits_are_kept(wanted: dict[Role, int], why: str) -> None:
    asked = pools(1, PoolConfig(nodes=1, min=1, max=3))
    async with Rig(pools=asked) as rig:
        await rig.controller.start()
        with pytest.raises(ConfigurationError, match=why):
            await rig.controller.scale(wanted)
        assert (await pool_of(rig, Role.DECODE)).max_nodes == 3


@in_loop
async def test_the_last_node_that_writes_answers_stays() -> None:
    async with Rig(*PD) as rig:
        await rig.controller.start()
        with pytest.raises(ConfigurationError, match="nobody could write answers"):
            await rig.controller.scale({Role.DECODE: 0})
        with pytest.raises(ConfigurationError, match="the last node that can write answers"):
            await rig.controller.drain_node("decode-0", DRAIN_S)
        with pytest.raises(ConfigurationError, match="the last node that can write answers"):
            await rig.controller.change_role("decode-0", Role.PREFILL)
        with pytest.raises(
            ConfigurationError, match="there is no node decode-9; there are: prefill-0, decode-0"
        ):
            await rig.controller.drain_node("decode-9", DRAIN_S)


# --- draining


@in_loop
async def test_a_drained_node_is_not_replaced_and_draining_it_twice_is_draining_it_once() -> None:
    async with Rig(("decode-0", Role.DECODE), ("decode-1", Role.DECODE)) as rig:
        await rig.controller.start()
        going = rig.launcher.node("decode-0")
        going.may_finish.clear()
        both = [asyncio.create_task(rig.controller.drain_node("decode-0", DRAIN_S)) for _ in range(2)]
        await settle()
        going.may_finish.set()
        assert await asyncio.gather(*both) == [True, True]
        await settle()
        assert rig.routed == {"decode-1"}
        assert (await pool_of(rig, Role.DECODE)).wanted == 1


@in_loop
async def test_a_node_that_dies_while_it_drains_is_not_brought_back() -> None:
    async with Rig(("decode-0", Role.DECODE), ("decode-1", Role.DECODE)) as rig:
        await rig.controller.start()
        going = rig.launcher.node("decode-0")
        going.may_finish.clear()
        drain = asyncio.create_task(rig.controller.drain_node("decode-0", DRAIN_S))
        await settle()
        going.die()
        await rig.clock.advance(DRAIN_S + TIMEOUTS.stop_s + 1)
        assert not await drain
        assert len(rig.launcher.nodes["decode-0"]) == 1
        assert rig.routed == {"decode-1"}


@in_loop
async def test_a_node_that_is_just_being_ended_does_not_outlive_the_controller() -> None:
    async with Rig(("decode-0", Role.DECODE), ("decode-1", Role.DECODE)) as rig:
        await rig.controller.start()
        going = rig.launcher.node("decode-1")
        going.may_stop.clear()
        await rig.controller.scale({Role.DECODE: 1})
        await settle()
        stop = asyncio.create_task(rig.controller.stop())
        await settle()
        going.may_stop.set()
        await stop
        assert going.stopped


# --- machines


@in_loop
async def test_nodes_without_a_machine_wait_are_counted_and_asked_for() -> None:
    hosts = FakeHosts(machine("1", prefill=1), machine("2", decode=1))
    async with Rig(pools=pools(1, 3), hosts=hosts) as rig:
        await rig.controller.start()
        await settle()
        assert hosts.wanted == {Role.PREFILL: 1, Role.DECODE: 3}
        decode = await pool_of(rig, Role.DECODE)
        assert (decode.wanted, decode.ready, decode.waiting_for_machines) == (3, 1, 2)
        assert (await phases(rig))["decode-1"] == "waiting"
        hosts.join(machine("3", decode=1))
        await settle()
        assert rig.routed == {"prefill-0", "decode-0", "decode-1"}
        assert rig.launcher.node("decode-1").host.name == "3"
        await rig.controller.scale({Role.DECODE: 2})
        await settle()
        assert hosts.wanted == {Role.PREFILL: 1, Role.DECODE: 2}


@in_loop
async def test_start_waits_for_the_machine_of_the_first_node_that_writes() -> None:
    hosts = FakeHosts(machine("1", prefill=1))
    async with Rig(pools=pools(1, 1), hosts=hosts) as rig:
        start = asyncio.create_task(rig.controller.start())
        await rig.clock.advance(TIMEOUTS.machines_s / 2)
        assert not start.done()
        hosts.join(machine("2", decode=1))
        await settle()
        await start
        assert rig.controller.url


@in_loop
async def test_a_machine_that_is_lost_takes_its_nodes_out_at_once_and_others_come_where_there_is_room() -> (
    None
):
    hosts = FakeHosts(machine("1", prefill=1), machine("2", decode=1), machine("3", decode=1))
    async with Rig(pools=pools(1, 2), hosts=hosts) as rig:
        await rig.controller.start()
        await settle()
        hosts.leave("2")
        await settle()
        assert rig.routed == {"prefill-0", "decode-1"}, "no time has passed"
        assert (await pool_of(rig, Role.DECODE)).waiting_for_machines == 1
        hosts.join(machine("4", decode=1))
        await settle()
        assert rig.routed == {"prefill-0", "decode-1", "decode-2"}
        assert any("its machine 10.0.0.2 is gone" in d.text for d in (await rig.controller.view()).decisions)


@in_loop
async def test_a_pool_without_a_size_follows_the_machines() -> None:
    hosts = FakeHosts(machine("1", prefill=1), machine("2", decode=2))
    async with Rig(pools=pools(None, None), hosts=hosts) as rig:
        await rig.controller.start()
        await settle()
        assert rig.routed == {"prefill-0", "decode-0", "decode-1"}
        hosts.join(machine("3", prefill=1, decode=1))
        await settle()
        assert rig.routed == {"prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2"}
        hosts.leave("2")
        await settle()
        assert rig.routed == {"prefill-0", "prefill-1", "decode-2"}
        assert (await pool_of(rig, Role.DECODE)).waiting_for_machines == 0
        assert await rig.controller.drain_node("prefill-1", DRAIN_S)
        await settle()
        assert rig.routed == {"prefill-0", "decode-2"}, "its place stays empty"
        hosts.join(machine("4", prefill=1))
        await settle()
        assert rig.routed == {"prefill-0", "prefill-2", "decode-2"}


@in_loop
async def test_nodes_of_one_machine_do_not_share_cores() -> None:
    hosts = FakeHosts(machine("1", prefill=1, decode=2, cores=8))
    async with Rig(pools=pools(1, 1), hosts=hosts) as rig:
        await rig.controller.start()
        await rig.controller.scale({Role.DECODE: 2})
        await settle()
        cores = [core for node in rig.launcher.running for core in node.config.cores]
        assert sorted(cores) == list(range(8))


# --- roles


@in_loop
async def test_a_node_changes_its_role_in_its_own_process() -> None:
    async with Rig(*PD, ("prefill-1", Role.PREFILL)) as rig:
        await rig.controller.start()
        node = rig.launcher.node("prefill-1")
        before = node.info
        node.may_finish.clear()
        change = asyncio.create_task(rig.controller.change_role("prefill-1", Role.DECODE))
        await settle()
        assert (await phases(rig))["prefill-1"] == Phase.DRAINING
        assert not change.done()
        node.may_finish.set()
        await change
        await settle()
        (member,) = [
            member for member in rig.launcher.router.memberships[-1] if member.node_id == "prefill-1"
        ]
        assert (member.role, member.epoch != before.epoch) == (Role.DECODE, True)
        assert len(rig.launcher.nodes["prefill-1"]) == 1, "nothing was loaded again"
        view = await rig.controller.view()
        assert {pool.role: (pool.wanted, pool.ready) for pool in view.pools} == {
            Role.PREFILL: (1, 1),
            Role.DECODE: (2, 2),
        }
        await rig.clock.advance(3 * TIMEOUTS.heartbeat_s)
        assert "prefill-1" in rig.routed, "it is watched under its new epoch"
        await rig.controller.change_role("prefill-1", Role.DECODE)
        assert node.info == member, "asked for twice, done once"


@in_loop
async def test_a_node_that_does_not_come_to_rest_is_started_anew_in_its_new_role() -> None:
    async with Rig(*PD, ("prefill-1", Role.PREFILL)) as rig:
        await rig.controller.start()
        stuck = rig.launcher.node("prefill-1")
        stuck.drains = False
        change = asyncio.create_task(rig.controller.change_role("prefill-1", Role.DECODE))
        await rig.clock.advance(TIMEOUTS.restart_backoff_s + 1)
        await change
        assert stuck.stopped
        assert rig.launcher.node("prefill-1").info.role is Role.DECODE


@in_loop
async def test_routers_are_not_told_again_of_a_node_whose_streams_they_moved() -> None:
    async with Rig(*PD, ("prefill-1", Role.PREFILL)) as rig:
        await rig.controller.start()
        rig.launcher.node("prefill-1").may_finish.clear()
        change = asyncio.create_task(rig.controller.change_role("prefill-1", Role.DECODE))
        await rig.clock.advance(DRAIN_S + TIMEOUTS.stop_s + 3 * TIMEOUTS.heartbeat_s)
        assert rig.routed == {"prefill-0", "decode-0"}, "though it still answers"
        await rig.clock.advance(60)
        await change
        assert "prefill-1" in rig.routed


@in_loop
async def test_a_node_that_changed_its_role_keeps_its_place() -> None:
    hosts = FakeHosts(machine("1", prefill=2), machine("2", decode=1))
    async with Rig(pools=pools(2, 1), hosts=hosts) as rig:
        await rig.controller.start()
        await rig.controller.change_role("prefill-1", Role.DECODE)
        await settle()
        assert hosts.wanted == {Role.PREFILL: 2, Role.DECODE: 1}
        rig.launcher.node("prefill-1").die()
        await rig.clock.advance(TIMEOUTS.restart_backoff_s)
        again = rig.launcher.node("prefill-1")
        assert (again.config.role, again.slot, again.host.name) == (Role.DECODE, Role.PREFILL, "1")


@in_loop
async def test_only_a_node_that_is_ready_changes_its_role() -> None:
    async with Rig(*PD) as rig:
        rig.launcher.prepare["prefill-0"] = lambda process, _: setattr(process, "starts_at_once", False)
        start = asyncio.create_task(rig.controller.start())
        await settle()
        with pytest.raises(Unavailable, match="prefill-0 is starting"):
            await rig.controller.change_role("prefill-0", Role.DECODE)
        rig.launcher.node("prefill-0").may_start.set()
        await start


# --- nodes that cannot start


@in_loop
async def test_a_node_that_was_left_out_shows_its_error_and_is_tried_again_when_its_pool_is_scaled() -> None:
    def broken(process: FakeProcess, earlier: int) -> None:
        process.start_error = Unavailable("no memory") if earlier < 3 else None

    async with Rig(*PD) as rig:
        rig.launcher.prepare["prefill-0"] = broken
        start = asyncio.create_task(rig.controller.start())
        await rig.clock.advance(100)
        await start
        (node,) = [n for n in (await rig.controller.view()).nodes if n.node_id == "prefill-0"]
        assert (node.phase, node.detail) == (Phase.LEFT_OUT, "no memory")
        lines = await rig.controller.scale({Role.PREFILL: 1})
        assert lines == ["prefill: stays at 1", "prefill-0 was left out and is tried again"]
        await settle()
        assert rig.routed == {"prefill-0", "decode-0"}


# --- a controller that comes back


@in_loop
async def test_a_controller_that_was_killed_comes_back_to_its_nodes_and_nobody_notices() -> None:
    async with Rig(*PD) as rig:
        await rig.controller.start()
        await rig.controller.scale({Role.DECODE: 2})
        await settle()
        told = len(rig.launcher.router.memberships)
        before = {node.info.node_id: node.info for node in rig.launcher.running}
        await rig.kill_controller()
        await rig.controller.start()
        await settle()
        assert {node.info.node_id: node.info for node in rig.launcher.running} == before
        assert len(rig.launcher.routers) == 1
        since = rig.launcher.router.memberships[told:]
        assert since, "it was told again"
        assert all({member.node_id for member in members} == set(before) for members in since)


@in_loop
async def test_what_was_being_drained_when_the_controller_was_killed_goes_all_the_same() -> None:
    async with Rig(("decode-0", Role.DECODE), ("decode-1", Role.DECODE)) as rig:
        await rig.controller.start()
        going = rig.launcher.node("decode-1")
        going.may_finish.clear()
        await rig.controller.scale({Role.DECODE: 1})
        await settle()
        await rig.kill_controller()
        start = asyncio.create_task(rig.controller.start())
        await settle()
        assert not going.stopped, "it still has work"
        going.may_finish.set()
        await start
        await settle()
        assert going.stopped
        assert rig.routed == {"decode-0"}


@in_loop
async def test_a_change_of_role_goes_on_when_the_controller_was_killed_in_it() -> None:
    async with Rig(*PD, ("prefill-1", Role.PREFILL)) as rig:
        await rig.controller.start()
        node = rig.launcher.node("prefill-1")
        node.may_finish.clear()
        change = asyncio.create_task(rig.controller.change_role("prefill-1", Role.DECODE))
        await settle()
        await rig.kill_controller()
        assert change.cancelled()
        node.may_finish.set()
        await rig.controller.start()
        await settle()
        assert node.info.role is Role.DECODE
        assert node.state is NodeState.READY
        assert rig.routed == {"prefill-0", "prefill-1", "decode-0"}


@in_loop
async def test_a_node_that_died_while_there_was_no_controller_is_replaced() -> None:
    async with Rig(*PD) as rig:
        await rig.controller.start()
        await settle()
        await rig.kill_controller()
        rig.launcher.node("prefill-0").die()
        await rig.controller.start()
        await settle()
        assert len(rig.launcher.nodes["prefill-0"]) == 2
        epochs = [m.epoch for m in rig.launcher.router.memberships[-1] if m.node_id == "prefill-0"]
        assert epochs == [rig.launcher.node("prefill-0").info.epoch]


# --- scaling by itself


@in_loop
async def test_a_crowded_pool_grows_by_itself_and_says_why() -> None:
    asked = pools(1, PoolConfig(nodes=1, min=1, max=2))
    async with Rig(pools=asked) as rig:
        await rig.controller.start()
        rig.launcher.node("decode-0").free_blocks = 2
        await rig.clock.advance(60)
        assert rig.routed == {"prefill-0", "decode-0", "decode-1"}
        texts = [decision.text for decision in (await rig.controller.view()).decisions]
        assert texts == ["decode: from 1 to 2: 98% of its blocks are taken, 90% may be"]
        await rig.clock.advance(300)
        assert (await pool_of(rig, Role.DECODE)).wanted == 2, "no room to spare, and not above its maximum"


@in_loop
async def test_a_pool_without_a_maximum_is_left_alone() -> None:
    async with Rig(*PD) as rig:
        await rig.controller.start()
        rig.launcher.node("decode-0").free_blocks = 2
        await rig.clock.advance(120)
        assert (await pool_of(rig, Role.DECODE)).wanted == 1


@in_loop
async def test_an_idle_pool_shrinks_to_its_minimum_without_a_failed_request() -> None:
    asked = pools(1, PoolConfig(nodes=3, min=2, max=4))
    async with Rig(pools=asked) as rig:
        await rig.controller.start()
        await rig.clock.advance(600)
        assert (await pool_of(rig, Role.DECODE)).wanted == 2
        assert rig.launcher.node("decode-2").drained_with is not None


# --- routers


@in_loop
async def test_every_host_has_a_router_where_that_is_asked_for() -> None:
    on_head = Host("h", "10.0.0.9", (0, 1), slots={}, head=True)
    hosts = FakeHosts(on_head, machine("1", prefill=1), machine("2", decode=1))
    router = RouterConfig(tokenizer_path="model", model_name="fake", placement=RouterPlacement.EVERY_HOST)
    async with Rig(pools=pools(1, 1), hosts=hosts, config=TandemConfig(router=router)) as rig:
        await rig.controller.start()
        await settle()
        by_name = {process.name: process for process in rig.launcher.routers}
        assert set(by_name) == {"router", "router-10.0.0.1", "router-10.0.0.2"}
        assert by_name["router"].host is None
        assert by_name["router-10.0.0.1"].config.inbox_host == "10.0.0.1", "where nodes reach it"
        assert all(process.node_ids == {"prefill-0", "decode-0"} for process in by_name.values())
        hosts.join(machine("3", decode=1))
        await rig.controller.scale({Role.DECODE: 2})
        await settle()
        (latest,) = [process for process in rig.launcher.routers if process.name == "router-10.0.0.3"]
        assert latest.node_ids == {"prefill-0", "decode-0", "decode-1"}
        hosts.leave("1")
        await settle()
        assert by_name["router-10.0.0.1"].stopped
        assert by_name["router-10.0.0.2"].node_ids == {"decode-0", "decode-1"}
        view = await rig.controller.view()
        assert {router.name for router in view.routers} == {"router", "router-10.0.0.2", "router-10.0.0.3"}
