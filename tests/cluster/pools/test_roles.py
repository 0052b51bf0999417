"""The controller changes nodes' roles, and keeps a router on every machine."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from tandem.base.errors import ConfigurationError, Unavailable
from tandem.cluster.config import PoolConfig, TandemConfig
from tandem.cluster.launcher import Host
from tandem.cluster.pools.supervisor import ProcessPhase
from tandem.engine.config import ModelConfig
from tandem.router.config import RouterConfig
from tandem.wire.nodes import Role
from tests.cluster.pools.helpers import TIMEOUTS, FakeHosts, Rig, settle, started
from tests.cluster.pools.pools_rig import DRAIN_S, EVERY_HOST, PD, PPD, machine, machines, phases, pool_of, pools

# --- roles


async def test_a_node_changes_its_role_in_its_own_process() -> None:
    async with started(*PPD) as rig:
        node = rig.node("prefill-1")
        before = node.info
        node.may_finish.clear()
        change = asyncio.create_task(rig.controller.change_role("prefill-1", Role.DECODE))
        await settle()
        assert (await phases(rig))["prefill-1"] == ProcessPhase.DRAINING
        assert not change.done()
        node.may_finish.set()
        await change
        await settle()
        (member,) = [member for member in rig.launcher.router.memberships[-1] if member.node_id == "prefill-1"]
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


async def test_a_node_that_does_not_come_to_rest_is_started_anew_in_its_new_role() -> None:
    async with started(*PPD) as rig:
        stuck = rig.node("prefill-1")
        stuck.drains = False
        await rig.during(rig.controller.change_role("prefill-1", Role.DECODE), TIMEOUTS.restart_backoff_s + 1)
        assert stuck.stopped
        assert rig.node("prefill-1").info.role is Role.DECODE


async def test_routers_are_not_told_again_of_a_node_whose_streams_they_moved() -> None:
    async with started(*PPD) as rig:
        rig.node("prefill-1").may_finish.clear()
        change = asyncio.create_task(rig.controller.change_role("prefill-1", Role.DECODE))
        await rig.clock.advance(DRAIN_S + TIMEOUTS.stop_s + 3 * TIMEOUTS.heartbeat_s)
        assert rig.routed == {"prefill-0", "decode-0"}, "though it still answers"
        await rig.clock.advance(60)
        await change
        assert "prefill-1" in rig.routed


async def test_a_node_that_was_left_out_while_it_changed_its_role_starts_in_the_recorded_one() -> None:
    async with started(*PPD) as rig:
        node = rig.node("prefill-1")
        node.may_finish.clear()
        change = asyncio.create_task(rig.controller.change_role("prefill-1", Role.DECODE))
        await settle()
        rig.refuse("prefill-1", ConfigurationError("the device is gone"))
        node.die()
        await rig.clock.advance(DRAIN_S + 60)
        with pytest.raises(Unavailable, match="left out: the device is gone"):
            await change
        rig.launcher.prepare.clear()
        await rig.controller.change_role("prefill-1", Role.DECODE)
        assert rig.node("prefill-1").info.role is Role.DECODE


async def test_a_node_that_changed_its_role_keeps_its_place() -> None:
    hosts = machines("pp", "d")
    async with started(pools=pools(2, 1), hosts=hosts) as rig:
        await rig.controller.change_role("prefill-1", Role.DECODE)
        await settle()
        assert hosts.wanted == {Role.PREFILL: 2, Role.DECODE: 1}
        rig.node("prefill-1").die()
        await rig.clock.advance(TIMEOUTS.restart_backoff_s)
        again = rig.node("prefill-1")
        assert (again.config.role, again.slot, again.host.name) == (Role.DECODE, Role.PREFILL, "1")


@pytest.mark.parametrize(
    ("prefill", "decode", "engine", "why"),
    [
        ({}, {"env": {"UCX_TLS": "tcp"}}, "tandem", r"pools\.prefill\.env and pools\.decode\.env differ"),
        ({}, {"cache": {"block_size": 32}}, "tandem", r"pools\.prefill\.cache and pools\.decode\.cache differ"),
        ({"tensor_parallel": 2}, {}, "tandem", r"prefill\.tensor_parallel and pools\.decode\.tensor_parallel differ"),
        ({"tensor_parallel": 2}, {"tensor_parallel": 2}, "tandem", "a node of 2 ranks cannot change its role: scale"),
        ({}, {}, "vllm", "whose engine is vllm keeps its role: scale prefill down"),
    ],
)  # fmt: skip
async def test_a_node_that_was_made_for_its_pool_keeps_its_role(
    prefill: dict[str, object], decode: dict[str, object], engine: str, why: str
) -> None:
    config = TandemConfig(router=RouterConfig("model", "fake"), model=ModelConfig(path="model", engine=engine))
    asked = pools(PoolConfig(nodes=2, **prefill), PoolConfig(nodes=1, **decode))
    async with started(pools=asked, config=config) as rig:
        for name, pool in (("prefill-1", asked.prefill), ("decode-0", asked.decode)):
            made = rig.node(name).config
            assert (made.env, made.tensor_parallel) == (pool.env, pool.tensor_parallel)
            assert made.engine.cache.block_size == pool.cache.get("block_size", 16)
        with pytest.raises(ConfigurationError, match=why):
            await rig.controller.change_role("prefill-1", Role.DECODE)
        assert rig.node("prefill-1").config.role is Role.PREFILL
        assert (await pool_of(rig, Role.DECODE)).wanted == 1


async def test_only_a_node_that_is_ready_changes_its_role() -> None:
    async with Rig(*PD) as rig:
        rig.hold("prefill-0")
        start = asyncio.create_task(rig.controller.start())
        await settle()
        with pytest.raises(Unavailable, match="prefill-0 is starting"):
            await rig.controller.change_role("prefill-0", Role.DECODE)
        rig.node("prefill-0").may_start.set()
        await start


# --- routers


async def test_every_host_has_a_router_where_that_is_asked_for() -> None:
    on_head = Host("h", "10.0.0.9", (0, 1), slots={}, head=True)
    hosts = FakeHosts(on_head, machine("1", prefill=1), machine("2", decode=1))
    async with started(pools=pools(1, 1), hosts=hosts, config=EVERY_HOST) as rig:
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
        rig.lose_machine("1")
        await rig.clock.advance(2 * TIMEOUTS.silence_s)  # no node there answers whether it hears the others
        assert by_name["router-10.0.0.1"].stopped
        assert by_name["router-10.0.0.2"].node_ids == {"decode-0", "decode-1"}
        view = await rig.controller.view()
        assert {router.name for router in view.routers} == {"router", "router-10.0.0.2", "router-10.0.0.3"}


async def test_a_machine_that_comes_back_gets_a_router_of_its_own_when_the_last_one_has_ended() -> None:
    hosts = machines("p", "d")
    async with started(pools=pools(1, 1), hosts=hosts, config=EVERY_HOST) as rig:
        await settle()
        (first,) = [process for process in rig.launcher.routers if process.name == "router-10.0.0.1"]
        first.may_stop.clear()
        again = rig.lose_machine("1")
        await rig.clock.advance(2 * TIMEOUTS.silence_s)
        hosts.join(msgspec.structs.replace(again, name="1 again"))
        await settle()
        first.may_stop.set()
        await settle()
        hosts.join(machine("3", decode=1))  # it looks again
        await settle()
        assert [process.died.done() for process in rig.launcher.routers if process.name == first.name] == [True, False]
        assert not rig.events.of("trouble", first.name)
