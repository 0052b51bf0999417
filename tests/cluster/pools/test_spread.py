"""Nodes with ranks on several machines: their placement, their resources, and the effect of losing a machine."""

from __future__ import annotations

import asyncio

import pytest

from tandem.base.logs import LogsQuery
from tandem.cluster.config import PoolConfig
from tandem.wire.nodes import Role
from tests.cluster.pools.helpers import FakeHosts, settle, started
from tests.cluster.pools.pools_rig import DRAIN_S, machine, pool_of, pools


def spread(nodes: int | None) -> PoolConfig:
    return PoolConfig(nodes=nodes, tensor_parallel=4, machines=2, resources={"GPU": 4})


async def test_a_spread_node_takes_a_place_on_each_of_its_machines() -> None:
    hosts = FakeHosts(*(machine(name, prefill=1) for name in "123"), machine("4", decode=1))
    async with started(pools=pools(spread(2), 1), hosts=hosts) as rig:
        await settle()
        assert rig.routed == {"prefill-0", "decode-0"}
        node = rig.launcher.node("prefill-0")
        assert (node.host.name, [there.name for there in node.beside]) == ("1", ["2"])
        assert node.needs == {"GPU": 2}, "of each machine"
        assert [there.host for there in node.config.others] == ["10.0.0.2"]
        assert hosts.wanted == {Role.PREFILL: 4, Role.DECODE: 1}, "with the two that are to come"
        assert (await pool_of(rig, Role.PREFILL)).waiting_for_machines == 1
        hosts.join(machine("5", prefill=1))
        await settle()
        assert rig.routed == {"prefill-0", "prefill-1", "decode-0"}
        assert {rig.launcher.node("prefill-1").host.name, *(h.name for h in rig.launcher.node("prefill-1").beside)} == {
            "3",
            "5",
        }


async def test_the_logs_of_its_machines_are_found_by_their_own_names_and_by_the_nodes() -> None:
    hosts = FakeHosts(machine("1", prefill=1), machine("2", prefill=1), machine("3", decode=1))
    async with started(pools=pools(spread(1), 1), hosts=hosts) as rig:
        both = {"prefill-0", "prefill-0-machine1"}
        for name in ("prefill", "prefill-0"):
            assert (await rig.controller.logs(LogsQuery([name]))).pages.keys() == both
        assert (await rig.controller.logs(LogsQuery(["prefill-0-machine1"]))).pages.keys() == both - {"prefill-0"}
        assert both < (await rig.controller.logs(LogsQuery())).pages.keys()


@pytest.mark.parametrize("lost", ["1", "2"])
async def test_the_loss_of_either_machine_is_the_nodes(lost: str) -> None:
    hosts = FakeHosts(machine("1", prefill=1), machine("2", prefill=1), machine("3", decode=1))
    async with started(pools=pools(spread(1), 1), hosts=hosts) as rig:
        await settle()
        assert rig.routed == {"prefill-0", "decode-0"}
        rig.lose_machine(lost)
        await settle()
        assert rig.routed == {"decode-0"}
        assert any(f"its machine 10.0.0.{lost} is gone" in d.text for d in (await rig.controller.view()).decisions)
        hosts.join(machine("4", prefill=1))
        await settle()
        assert rig.routed == {"prefill-1", "decode-0"}, "the machine that is left, and the one that came"


async def test_a_pool_that_follows_the_machines_has_a_node_for_every_two() -> None:
    hosts = FakeHosts(*(machine(name, prefill=1) for name in "12345"), machine("6", decode=1))
    async with started(pools=pools(spread(None), None), hosts=hosts) as rig:
        await settle()
        assert rig.routed == {"prefill-0", "prefill-1", "decode-0"}
        hosts.join(machine("7", prefill=1))
        await settle()
        assert rig.routed == {"prefill-0", "prefill-1", "prefill-2", "decode-0"}
        assert await rig.controller.drain_node("prefill-1", DRAIN_S)
        await settle()
        assert rig.routed == {"prefill-0", "prefill-2", "decode-0"}, "its two places stay empty"


async def test_a_machine_that_is_evacuated_takes_the_node_along() -> None:
    hosts = FakeHosts(*(machine(name, prefill=1) for name in "123"), machine("4", decode=1))
    async with started(pools=pools(spread(1), 1), hosts=hosts) as rig:
        await settle()
        going = asyncio.create_task(rig.controller.evacuate("10.0.0.2", DRAIN_S))
        await settle()
        assert (await going) == {"prefill-0": True}
        await settle()
        assert rig.routed == {"prefill-1", "decode-0"}
        assert {rig.launcher.node("prefill-1").host.name, *(h.name for h in rig.launcher.node("prefill-1").beside)} == {
            "1",
            "3",
        }


async def test_a_controller_that_comes_back_knows_its_machines() -> None:
    hosts = FakeHosts(machine("1", prefill=1), machine("2", prefill=1), machine("3", decode=1))
    async with started(pools=pools(spread(1), 1), hosts=hosts) as rig:
        await settle()
        node = rig.launcher.node("prefill-0")
        await rig.next_controller()
        await settle()
        assert rig.launcher.node("prefill-0") is node
        assert not node.died.done()
        assert rig.routed == {"prefill-0", "decode-0"}
        rig.lose_machine("2")
        await settle()
        assert rig.routed == {"decode-0"}
