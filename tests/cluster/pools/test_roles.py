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
from tandem.router.config import RouterConfig, RouterPlacement
from tandem.wire.nodes import Role
from tests.cluster.pools.helpers import TIMEOUTS, FakeHosts, Rig, settle, started
from tests.cluster.pools.pools_rig import DRAIN_S, PD, machine, phases, pool_of, pools

# --- roles


async def test_a_node_changes_its_role_in_its_own_process() -> None:
    async with started(*PD, ("prefill-1", Role.PREFILL)) as rig:
        node = rig.launcher.node("prefill-1")
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
    async with started(*PD, ("prefill-1", Role.PREFILL)) as rig:
        stuck = rig.launcher.node("prefill-1")
        stuck.drains = False
        change = asyncio.create_task(rig.controller.change_role("prefill-1", Role.DECODE))
        await rig.clock.advance(TIMEOUTS.restart_backoff_s + 1)
        await change
        assert stuck.stopped
        assert rig.launcher.node("prefill-1").info.role is Role.DECODE


async def test_routers_are_not_told_again_of_a_node_whose_streams_they_moved() -> None:
    async with started(*PD, ("prefill-1", Role.PREFILL)) as rig:
        rig.launcher.node("prefill-1").may_finish.clear()
        change = asyncio.create_task(rig.controller.change_role("prefill-1", Role.DECODE))
        await rig.clock.advance(DRAIN_S + TIMEOUTS.stop_s + 3 * TIMEOUTS.heartbeat_s)
        assert rig.routed == {"prefill-0", "decode-0"}, "though it still answers"
        await rig.clock.advance(60)
        await change
        assert "prefill-1" in rig.routed


async def test_a_node_that_was_left_out_while_it_changed_its_role_starts_in_the_recorded_one() -> None:
    async with started(*PD, ("prefill-1", Role.PREFILL)) as rig:
        node = rig.launcher.node("prefill-1")
        node.may_finish.clear()
        change = asyncio.create_task(rig.controller.change_role("prefill-1", Role.DECODE))
        await settle()
        no_gpu = ConfigurationError("the device is gone")
        rig.launcher.prepare["prefill-1"] = lambda process, _: setattr(process, "start_error", no_gpu)
        node.die()
        await rig.clock.advance(DRAIN_S + 60)
        with pytest.raises(Unavailable, match="left out: the device is gone"):
            await change
        del rig.launcher.prepare["prefill-1"]
        await rig.controller.change_role("prefill-1", Role.DECODE)
        assert rig.launcher.node("prefill-1").info.role is Role.DECODE


async def test_a_node_that_changed_its_role_keeps_its_place() -> None:
    hosts = FakeHosts(machine("1", prefill=2), machine("2", decode=1))
    async with started(pools=pools(2, 1), hosts=hosts) as rig:
        await rig.controller.change_role("prefill-1", Role.DECODE)
        await settle()
        assert hosts.wanted == {Role.PREFILL: 2, Role.DECODE: 1}
        rig.launcher.node("prefill-1").die()
        await rig.clock.advance(TIMEOUTS.restart_backoff_s)
        again = rig.launcher.node("prefill-1")
        assert (again.config.role, again.slot, again.host.name) == (Role.DECODE, Role.PREFILL, "1")


async def test_a_node_has_its_pools_environment_and_no_role_of_a_pool_with_another() -> None:
    asked = pools(2, PoolConfig(nodes=1, env={"UCX_TLS": "tcp"}))
    async with started(pools=asked) as rig:
        assert rig.launcher.node("prefill-0").config.env == {}
        assert rig.launcher.node("decode-0").config.env == {"UCX_TLS": "tcp"}
        with pytest.raises(ConfigurationError, match=r"pools\.prefill\.env and pools\.decode\.env differ"):
            await rig.controller.change_role("prefill-1", Role.DECODE)
        assert rig.launcher.node("prefill-1").config.role is Role.PREFILL
        assert (await pool_of(rig, Role.DECODE)).wanted == 1


async def test_a_node_keeps_its_blocks_and_takes_no_role_of_a_pool_with_others() -> None:
    asked = pools(2, PoolConfig(nodes=1, cache={"block_size": 32}))
    async with started(pools=asked) as rig:
        assert rig.launcher.node("prefill-0").config.engine.cache.block_size == 16
        assert rig.launcher.node("decode-0").config.engine.cache.block_size == 32
        with pytest.raises(ConfigurationError, match=r"pools\.prefill\.cache and pools\.decode\.cache differ"):
            await rig.controller.change_role("prefill-1", Role.DECODE)


@pytest.mark.parametrize(
    ("ranks", "why"),
    [
        ((2, 1), r"pools\.prefill\.tensor_parallel and pools\.decode\.tensor_parallel differ"),
        ((2, 2), "a node of 2 ranks cannot change its role: scale prefill down and decode up"),
    ],
)
async def test_a_node_of_several_ranks_keeps_its_role(ranks: tuple[int, int], why: str) -> None:
    asked = pools(*(PoolConfig(nodes=nodes, tensor_parallel=width) for nodes, width in zip((2, 1), ranks, strict=True)))
    async with started(pools=asked) as rig:
        assert rig.launcher.node("prefill-1").config.tensor_parallel == ranks[0]
        with pytest.raises(ConfigurationError, match=why):
            await rig.controller.change_role("prefill-1", Role.DECODE)


async def test_a_node_of_another_engine_keeps_its_role() -> None:
    router = RouterConfig(tokenizer_path="model", model_name="fake")
    config = TandemConfig(router=router, model=ModelConfig(path="model", engine="vllm"))
    async with started(pools=pools(2, PoolConfig(nodes=1)), config=config) as rig:
        with pytest.raises(ConfigurationError, match="whose engine is vllm keeps its role: scale prefill down"):
            await rig.controller.change_role("prefill-1", Role.DECODE)


async def test_only_a_node_that_is_ready_changes_its_role() -> None:
    async with Rig(*PD) as rig:
        rig.launcher.prepare["prefill-0"] = lambda process, _: setattr(process, "starts_at_once", False)
        start = asyncio.create_task(rig.controller.start())
        await settle()
        with pytest.raises(Unavailable, match="prefill-0 is starting"):
            await rig.controller.change_role("prefill-0", Role.DECODE)
        rig.launcher.node("prefill-0").may_start.set()
        await start


# --- routers


async def test_every_host_has_a_router_where_that_is_asked_for() -> None:
    on_head = Host("h", "10.0.0.9", (0, 1), slots={}, head=True)
    hosts = FakeHosts(on_head, machine("1", prefill=1), machine("2", decode=1))
    router = RouterConfig(tokenizer_path="model", model_name="fake", placement=RouterPlacement.EVERY_HOST)
    async with started(pools=pools(1, 1), hosts=hosts, config=TandemConfig(router=router)) as rig:
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
    hosts = FakeHosts(machine("1", prefill=1), machine("2", decode=1))
    router = RouterConfig(tokenizer_path="model", model_name="fake", placement=RouterPlacement.EVERY_HOST)
    async with started(pools=pools(1, 1), hosts=hosts, config=TandemConfig(router=router)) as rig:
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
