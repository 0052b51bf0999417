"""Nodes with ranks on several machines: their placement, their resources, and the effect of losing a machine."""

from __future__ import annotations

import pytest

from tandem.base.logs import LogsQuery
from tandem.cluster.config import PoolConfig
from tandem.wire.nodes import Role
from tests.cluster.pools.helpers import Rig, settle, started
from tests.cluster.pools.pools_rig import DRAIN_S, machine, machines, pool_of, pools


def spread(nodes: int | None) -> PoolConfig:
    return PoolConfig(nodes=nodes, tensor_parallel=4, machines=2, resources={"GPU": 4})


def hosts_of(rig: Rig, name: str) -> set[str]:
    node = rig.node(name)
    return {host.name for host in (node.host, *node.beside)}


async def test_a_spread_node_takes_a_place_on_each_of_its_machines() -> None:
    hosts = machines("p", "p", "p", "d")
    async with started(pools=pools(spread(2), 1), hosts=hosts) as rig:
        await settle()
        assert rig.routed == {"prefill-0", "decode-0"}
        node = rig.node("prefill-0")
        assert (node.host.name, [there.name for there in node.beside]) == ("1", ["2"])
        assert node.needs == {"GPU": 2}, "of each machine"
        assert [there.host for there in node.config.others] == ["10.0.0.2"]
        assert hosts.wanted == {Role.PREFILL: 4, Role.DECODE: 1}, "with the two that are to come"
        assert (await pool_of(rig, Role.PREFILL)).waiting_for_machines == 1
        hosts.join(machine("5", prefill=1))
        await settle()
        assert rig.routed == {"prefill-0", "prefill-1", "decode-0"}
        assert hosts_of(rig, "prefill-1") == {"3", "5"}


async def test_the_logs_of_its_machines_are_found_by_their_own_names_and_by_the_nodes() -> None:
    async with started(pools=pools(spread(1), 1), hosts=machines("p", "p", "d")) as rig:
        both = {"prefill-0", "prefill-0-machine1"}
        for name in ("prefill", "prefill-0"):
            assert (await rig.controller.logs(LogsQuery([name]))).pages.keys() == both
        assert (await rig.controller.logs(LogsQuery(["prefill-0-machine1"]))).pages.keys() == both - {"prefill-0"}
        assert both < (await rig.controller.logs(LogsQuery())).pages.keys()


@pytest.mark.parametrize("lost", ["1", "2"])
async def test_the_loss_of_either_machine_is_the_nodes_and_the_next_controllers_too(lost: str) -> None:
    hosts = machines("p", "p", "d")
    async with started(pools=pools(spread(1), 1), hosts=hosts) as rig:
        await settle()
        node = rig.node("prefill-0")
        await rig.next_controller()
        assert rig.node("prefill-0") is node
        assert not node.died.done()
        assert rig.routed == {"prefill-0", "decode-0"}
        rig.lose_machine(lost)
        await settle()
        assert rig.routed == {"decode-0"}
        assert any(f"its machine 10.0.0.{lost} is gone" in text for text in await rig.decided())
        hosts.join(machine("4", prefill=1))
        await settle()
        assert rig.routed == {"prefill-1", "decode-0"}, "the machine that is left, and the one that came"


async def test_a_pool_that_follows_the_machines_has_a_node_for_every_two() -> None:
    hosts = machines(*"ppppp", "d")
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
    async with started(pools=pools(spread(1), 1), hosts=machines("p", "p", "p", "d")) as rig:
        await settle()
        assert await rig.during(rig.controller.evacuate("10.0.0.2", DRAIN_S), 0.0) == {"prefill-0": True}
        await settle()
        assert rig.routed == {"prefill-1", "decode-0"}
        assert hosts_of(rig, "prefill-1") == {"1", "3"}
