"""A machine that is about to leave is emptied: its nodes drain, others start elsewhere, and nothing new starts there."""

from __future__ import annotations

import asyncio

import pytest

from tandem.base.errors import ConfigurationError, Unavailable
from tandem.cluster.pools.state import decode
from tandem.wire.nodes import Role
from tests.cluster.pools.helpers import Rig, settle, started
from tests.cluster.pools.pools_rig import (
    DRAIN_S,
    EVERY_HOST,
    machine,
    machines,
    needs_rollouts,
    pool_of,
    pools,
    seqs_of,
    with_seqs,
)


def hosts_of(rig: Rig) -> dict[str, str]:
    return {node.info.node_id: node.host.name for node in rig.launcher.running}


async def evacuated(rig: Rig, name: str, seconds: float = 1.0) -> dict[str, bool]:
    return await rig.during(rig.controller.evacuate(f"10.0.0.{name}", DRAIN_S), seconds)


async def test_its_nodes_go_and_their_pools_keep_their_sizes() -> None:
    async with started(pools=pools(1, 1), hosts=machines("p", "d", "d")) as rig:
        where = hosts_of(rig)["decode-0"]
        assert await evacuated(rig, where) == {"decode-0": True}
        await rig.clock.advance(1)
        assert rig.routed == {"prefill-0", "decode-1"}
        assert hosts_of(rig)["decode-1"] != where
        assert (await pool_of(rig, Role.DECODE)).wanted == 1
        with pytest.raises(ConfigurationError, match=r"no machine 10\.0\.0\.9; there are: 10\.0\.0\.1"):
            await rig.controller.evacuate("10.0.0.9", 1.0)


@pytest.mark.parametrize("is_killed", [False, True])
async def test_the_last_that_writes_answers_waits_for_the_next_one_also_under_the_next_controller(
    is_killed: bool,
) -> None:
    async with started(pools=pools(1, 1), hosts=machines("p", "d", "d")) as rig:
        rig.hold("decode-1")
        where = hosts_of(rig)["decode-0"]
        going: asyncio.Task[object] = asyncio.create_task(rig.controller.evacuate(f"10.0.0.{where}", DRAIN_S))
        await settle()
        if is_killed:
            going.cancel()
            await rig.kill_controller()
            going = asyncio.create_task(rig.controller.start())
        await rig.clock.advance(DRAIN_S / 4)
        assert rig.node("decode-0").drained_with is None
        assert "decode-0" in rig.routed
        rig.node("decode-1").may_start.set()
        await rig.clock.advance(1)
        assert await going == (None if is_killed else {"decode-0": True})
        assert rig.node("decode-0").drained_with is not None
        assert rig.routed == {"prefill-0", "decode-1"}


async def test_where_none_takes_over_it_goes_all_the_same() -> None:
    """The machine will be ended soon, even if its node has work left."""
    hosts = machines("p", "d")
    async with started(pools=pools(1, 1), hosts=hosts) as rig:
        assert await evacuated(rig, "2", DRAIN_S) == {"decode-0": True}
        assert rig.node("decode-0").drained_with == DRAIN_S / 2
        assert (await pool_of(rig, Role.DECODE)).waiting_for_machines == 1
        hosts.join(machine("4", decode=1))
        await rig.clock.advance(1)
        assert rig.routed == {"prefill-0", "decode-1"}


async def test_nothing_comes_to_it_while_it_is_there_and_it_is_forgotten_with_it() -> None:
    hosts = machines("p", "dd", "dd")
    async with started(pools=pools(1, 2), hosts=hosts) as rig:
        await evacuated(rig, "2", DRAIN_S)
        assert {hosts_of(rig)[name] for name in rig.routed} == {"1", "3"}
        assert len(rig.routed) == 3
        hosts.leave("2")
        hosts.join(machine("5", decode=1))
        await rig.clock.advance(1)
        await evacuated(rig, "5")
        assert decode(rig.store.state).evacuated == ["5"]


async def test_a_controller_that_comes_back_goes_on_with_it() -> None:
    async with started(pools=pools(1, 2), hosts=machines("p", "d", "d")) as rig:
        rig.node("decode-0").may_finish.clear()
        where = hosts_of(rig)["decode-0"]
        going = asyncio.create_task(rig.controller.evacuate(f"10.0.0.{where}", DRAIN_S))
        await settle()
        going.cancel()
        await rig.kill_controller()
        rig.node("decode-0").may_finish.set()
        await rig.start()
        await rig.clock.advance(1)
        assert where not in {hosts_of(rig)[name] for name in rig.routed}


async def test_its_router_takes_nothing_new_when_its_nodes_are_done() -> None:
    async with started(pools=pools(1, 2), hosts=machines("p", "d", "d"), config=EVERY_HOST) as rig:

        def drained() -> list[str]:
            return [router.name for router in rig.launcher.routers if router.drained_with is not None]

        rig.node("decode-0").may_finish.clear()
        where = hosts_of(rig)["decode-0"]
        going = asyncio.create_task(rig.controller.evacuate(f"10.0.0.{where}", DRAIN_S))
        await settle()
        assert drained() == []
        rig.node("decode-0").may_finish.set()
        await rig.clock.advance(1)
        await going
        assert drained() == [f"router-10.0.0.{where}"]


@needs_rollouts
async def test_a_rollout_does_not_wait_for_nodes_on_a_machine_that_is_about_to_go() -> None:
    """The pool has a node for each place, and the machine's places count no more."""
    hosts = machines("pd", "dd")
    async with started(pools=pools(1, None), hosts=hosts) as rig:
        await evacuated(rig, "2")
        hosts.join(machine("3", decode=1))
        await rig.clock.advance(1)
        await rig.controller.apply(with_seqs(rig.config), dry_run=False)
        await rig.clock.advance(80.0)
        assert (await rig.controller.view()).rollout is None
        assert seqs_of(rig) == {77: 3}


@needs_rollouts
async def test_a_rollout_whose_old_nodes_went_with_their_machine_is_judged_by_new_ones() -> None:
    hosts = machines("pd")
    async with started(pools=pools(1, 1), hosts=hosts) as rig:
        for name in ("prefill-1", "decode-1"):
            rig.refuse(name, Unavailable("never"))
        await rig.controller.apply(with_seqs(rig.config), dry_run=False)
        await evacuated(rig, "1", 60.0)
        rollout = (await rig.controller.view()).rollout
        assert rollout is not None, "nothing has served with the new configuration"
        assert rollout.waits == "no new node that decodes has served yet"
        hosts.join(machine("2", prefill=2, decode=2))
        await rig.clock.advance(100.0)
        assert (await rig.controller.view()).rollout is None
        assert rig.routed == {"prefill-2", "decode-2"}, "it was taken back"
