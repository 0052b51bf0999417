"""A node that reports a sick card leaves, and another one takes its place on another card or machine."""

from __future__ import annotations

import msgspec

from tandem.cluster.config import PoolConfig, PoolsConfig
from tandem.cluster.launcher import Host
from tandem.wire.nodes import NodeState, Role
from tandem.wire.requests import SickDevice
from tests.cluster.pools.helpers import FakeHosts, Rig, started
from tests.cluster.pools.pools_rig import DRAIN_S, machines, pools

SICK = (SickDevice("cuda:0", "Xid 79: it has fallen off the bus"),)


def cards(gpus: int) -> FakeHosts:
    return FakeHosts(Host("this machine", "10.0.0.1", tuple(range(8)), gpus=gpus, head=True))


def devices(rig: Rig) -> dict[str, str]:
    return {node.info.node_id: node.config.engine.model.device for node in rig.launcher.running}


def aggregated(nodes: int, **options: int) -> PoolsConfig:
    none = PoolConfig(nodes=0)
    return PoolsConfig(prefill=none, decode=none, aggregated=PoolConfig(nodes=nodes, **options))


async def test_another_node_takes_its_place_on_a_card_that_is_free() -> None:
    async with started(pools=aggregated(2), hosts=cards(3)) as rig:
        assert devices(rig) == {"aggregated-0": "cuda:0", "aggregated-1": "cuda:1"}
        rig.node("aggregated-0").sick = SICK
        await rig.clock.advance(5)
        assert rig.node("aggregated-0").drained_with is not None
        assert devices(rig) == {"aggregated-1": "cuda:1", "aggregated-2": "cuda:2"}
        assert rig.routed == {"aggregated-1", "aggregated-2"}
        assert any("aggregated-0 leaves 10.0.0.1" in each and "Xid 79" in each for each in await rig.decided())


async def test_without_a_free_card_it_waits_until_an_operator_says_that_one_was_mended() -> None:
    async with started(pools=aggregated(2), hosts=cards(2)) as rig:
        rig.node("aggregated-0").sick = SICK
        await rig.clock.advance(DRAIN_S)
        assert devices(rig) == {"aggregated-1": "cuda:1"}  # whose memory is given away
        await rig.controller.scale({Role.AGGREGATED: 2})
        await rig.clock.advance(5)
        assert devices(rig) == {"aggregated-1": "cuda:1", "aggregated-2": "cuda:0"}


async def test_ranks_need_cards_beside_each_other() -> None:
    async with started(pools=aggregated(1, tensor_parallel=2), hosts=cards(5)) as rig:
        rig.node("aggregated-0").sick = (SickDevice("cuda:1", "Xid 95: ..."),)
        await rig.clock.advance(5)
        assert devices(rig) == {"aggregated-1": "cuda:2"}


async def test_a_machine_that_offers_places_has_one_less() -> None:
    async with started(pools=pools(1, 1), hosts=machines("p", "d", "d")) as rig:
        (first,) = [node for node in rig.launcher.running if node.info.node_id == "decode-0"]
        first.sick = SICK
        await rig.clock.advance(5)
        (second,) = [node for node in rig.launcher.running if node.info.role is Role.DECODE]
        assert second.info.node_id == "decode-1"
        assert second.host.name != first.host.name
        # The place stays closed: with two nodes wanted, only one has room.
        await rig.clock.advance(DRAIN_S)
        assert rig.routed == {"prefill-0", "decode-1"}


async def test_a_node_that_fails_with_its_card_is_not_started_on_it_again_and_the_next_controller_knows_it() -> None:
    async with started(pools=aggregated(1), hosts=cards(2)) as rig:
        node = rig.node("aggregated-0")
        node.sick, node.state = SICK, NodeState.FAILED
        await rig.clock.advance(10)
        assert devices(rig) == {"aggregated-1": "cuda:1"}
        await rig.next_controller()
        await rig.clock.advance(5)
        rig.node("aggregated-1").sick = (msgspec.structs.replace(SICK[0], device="cuda:1"),)
        await rig.clock.advance(DRAIN_S)
        assert devices(rig) == {}
