"""Nodes move to machines that have the resources which their pool needs now."""

from __future__ import annotations

import pytest

from tandem.cluster.config import PoolConfig, TandemConfig
from tandem.cluster.launcher import Offer
from tandem.wire.nodes import Role
from tests.cluster.pools.helpers import TIMEOUTS, FakeHosts, Rig, one_machine, started
from tests.cluster.pools.pools_rig import machine, pools, replace

ENOUGH_S = 100.0


def changed(config: TandemConfig, **decode: object) -> TandemConfig:
    return replace(config, pools=replace(config.pools, decode=replace(config.pools.decode, **decode)))


def three_machines() -> FakeHosts:
    """One machine in zone b and two in zone a; the first decode nodes are on these two."""
    head = replace(one_machine(8), slots={}, fits=frozenset())
    hosts = FakeHosts(head, *(machine(name, prefill=1, decode=2) for name in "123"))
    resources = {"prefill": 1.0, "decode": 2.0}
    names = [host.name for host in hosts.hosts[1:]]
    hosts.offers = {
        name: Offer(resources | ({"GPU": 2.0} if zone == "b" else {}), {"zone": zone})
        for name, zone in zip(names, "baa", strict=True)
    }
    return hosts


def places_of(rig: Rig, role: Role) -> list[str]:
    return sorted(node.host.name for node in rig.launcher.running if node.config.role is role)


async def labelled(rig: Rig, zone: str, seconds: float) -> None:
    """Decode nodes are wanted in this zone, for so long."""
    await rig.controller.apply(changed(rig.config, label_selector={"zone": zone}), dry_run=False)
    await rig.clock.advance(seconds)


@pytest.mark.parametrize("wanted", [{"label_selector": {"zone": "b"}}, {"resources": {"GPU": 1}}])
async def test_a_pool_moves_to_machines_that_fit_and_none_of_its_places_is_empty_meanwhile(
    wanted: dict[str, dict[str, object]],
) -> None:
    hosts = three_machines()
    only = hosts.hosts[1].name
    async with started(pools=pools(1, 2), hosts=hosts) as rig:
        assert only not in places_of(rig, Role.DECODE)
        change = await rig.controller.apply(changed(rig.config, **wanted), dry_run=False)
        assert change.refused == []
        fewest = 2
        for _ in range(int(ENOUGH_S)):
            await rig.clock.advance(1.0)
            view = await rig.controller.view()
            fewest = min(fewest, sum(node.role == "decode" and node.phase == "ready" for node in view.nodes))
        assert (view.rollout, view.revision) == (None, change.revision)
        assert places_of(rig, Role.DECODE) == [only, only]
        assert fewest >= 1
        new = [node for node in rig.launcher.running if node.config.role is Role.DECODE]
        assert all(node.needs == wanted.get("resources", {}) for node in new)


async def test_where_no_machine_fits_no_node_goes_and_in_the_end_all_is_taken_back() -> None:
    patient = replace(TIMEOUTS, machines_s=90.0)
    async with started(pools=pools(1, 2), hosts=three_machines(), timeouts=patient) as rig:
        before = {node.info.node_id for node in rig.launcher.running}
        await labelled(rig, "c", 60.0)
        view = await rig.controller.view()
        assert view.rollout is not None
        assert "no machine has what a node needs with the new configuration" in view.rollout.waits
        serving = {node.info.node_id for node in rig.launcher.running if node.config.role is Role.DECODE}
        assert serving <= before, "the old ones serve"
        assert len(serving) == 2
        await rig.clock.advance(90.0)
        view = await rig.controller.view()
        assert view.rollout is None
        assert any("taken back: decode: no machine has" in one.text for one in view.decisions)
        assert (await rig.controller.configuration()).pools == rig.config.pools
        assert len(places_of(rig, Role.DECODE)) == 2


async def test_a_machine_that_comes_in_time_is_used() -> None:
    hosts = three_machines()
    async with started(pools=pools(1, 1), hosts=hosts) as rig:
        await labelled(rig, "c", 60.0)
        late = machine("4", prefill=1, decode=2)
        hosts.offers[late.name] = Offer({"prefill": 1.0, "decode": 2.0}, {"zone": "c"})
        hosts.join(late)
        await rig.clock.advance(ENOUGH_S)
        assert (await rig.controller.view()).rollout is None
        assert places_of(rig, Role.DECODE) == [late.name]


async def test_a_pool_that_follows_the_machines_does_not_shrink_before_its_new_places_serve() -> None:
    hosts = three_machines()
    kept = [host.name for host in hosts.hosts[2:4]]
    async with started(pools=replace(pools(1, 1), decode=PoolConfig(nodes=None)), hosts=hosts) as rig:
        assert len(places_of(rig, Role.DECODE)) == 6
        await labelled(rig, "a", 0.0)
        fewest = 6
        for _ in range(int(ENOUGH_S)):
            await rig.clock.advance(1.0)
            fewest = min(fewest, len(places_of(rig, Role.DECODE)))
        assert (await rig.controller.view()).rollout is None
        assert places_of(rig, Role.DECODE) == sorted(kept * 2)
        assert fewest >= 3


async def test_a_controller_that_comes_back_in_the_middle_finds_old_and_new_nodes_where_they_are() -> None:
    hosts = three_machines()
    async with started(pools=pools(1, 2), hosts=hosts) as rig:
        await labelled(rig, "b", 4.0)
        running = {id(node) for node in rig.launcher.running}
        await rig.next_controller()
        assert running <= {id(node) for node in rig.launcher.running}, "none was lost"
        await rig.clock.advance(ENOUGH_S)
        assert (await rig.controller.view()).rollout is None
        assert places_of(rig, Role.DECODE) == [hosts.hosts[1].name] * 2
