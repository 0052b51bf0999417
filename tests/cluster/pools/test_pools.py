"""Pools that grow, shrink and follow the machines, against a launcher without processes."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from tandem.base.errors import ConfigurationError, DeadlineExceeded
from tandem.cluster.config import PoolConfig
from tandem.cluster.pools.supervisor import ProcessPhase
from tandem.wire.nodes import Role
from tests.cluster.pools.helpers import TIMEOUTS, Rig, settle, started
from tests.cluster.pools.pools_rig import DRAIN_S, PD, PDD, machine, machines, phases, pool_of, pools

DD = (("decode-0", Role.DECODE), ("decode-1", Role.DECODE))
SHORT = msgspec.structs.replace(TIMEOUTS, machines_s=40.0)

# --- scaling


async def test_a_pool_that_grows_gets_a_node_and_one_that_shrinks_drains_its_youngest_before_it_ends() -> None:
    async with started(*PD) as rig:
        assert await rig.controller.scale({Role.DECODE: 3}) == ["decode: from 1 to 3, 2 nodes more"]
        await settle()
        assert rig.routed == {"prefill-0", "decode-0", "decode-1", "decode-2"}
        assert (await rig.decided())[-1] == "decode: from 1 to 3, 2 nodes more"
        going = rig.node("decode-2")
        going.may_finish.clear()
        await rig.controller.scale({Role.DECODE: 2})
        await settle()
        assert (await phases(rig))["decode-2"] == ProcessPhase.DRAINING
        assert "decode-2" in rig.routed, "its streams go on: routers know that it drains from its own status"
        assert not going.stopped
        going.may_finish.set()
        await settle()
        assert going.stopped
        assert rig.routed == {"prefill-0", "decode-0", "decode-1"}
        assert "decode-2" not in await phases(rig)


async def test_what_a_node_does_not_finish_in_time_is_moved_before_the_node_ends() -> None:
    async with started(*PDD) as rig:
        going = rig.node("decode-1")
        going.drains = False
        order: list[str] = []
        rig.launcher.router.on_members = lambda: order.append("routers told") if "decode-1" not in rig.routed else None
        going.on_stop = lambda: order.append("stopped")
        assert not await rig.controller.drain_node("decode-1", 7.0)
        await settle()
        assert going.drained_with == 7.0
        assert order == ["routers told", "stopped"]


async def test_a_node_that_is_still_starting_goes_before_one_that_serves() -> None:
    async with started(*PD) as rig:
        rig.hold("decode-1")
        for size in (2, 1):
            await rig.controller.scale({Role.DECODE: size})
            await settle()
        assert rig.node("decode-1").stopped
        assert rig.routed == {"prefill-0", "decode-0"}


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        ({Role.DECODE: 0}, "pools.decode.min is 1"),
        ({Role.DECODE: 4}, "pools.decode.max is 3"),
        ({Role.PREFILL: -1}, "pools.prefill.min is 0"),
    ],
)
async def test_limits_are_kept(wanted: dict[Role, int], why: str) -> None:
    async with started(pools=pools(1, PoolConfig(nodes=1, min=1, max=3))) as rig:
        with pytest.raises(ConfigurationError, match=why):
            await rig.controller.scale(wanted)
        assert (await pool_of(rig, Role.DECODE)).max_nodes == 3


async def test_the_last_node_that_writes_answers_stays() -> None:
    async with started(*PD) as rig:
        controller, last = rig.controller, "the last node that can decode"
        unknown = "there is no node decode-9; there are: prefill-0, decode-0"
        for order, why in (
            (controller.scale({Role.DECODE: 0}), "no node would be left to decode"),
            (controller.drain_node("decode-0", DRAIN_S), last),
            (controller.change_role("decode-0", Role.PREFILL), last),
            (controller.drain_node("decode-9", DRAIN_S), unknown),
        ):
            with pytest.raises(ConfigurationError, match=why):
                await order


# --- draining


async def test_a_drained_node_is_not_replaced_and_draining_it_twice_is_draining_it_once() -> None:
    async with started(*DD) as rig:
        going = rig.node("decode-0")
        going.may_finish.clear()
        both = [asyncio.create_task(rig.controller.drain_node("decode-0", DRAIN_S)) for _ in range(2)]
        await settle()
        going.may_finish.set()
        assert await asyncio.gather(*both) == [True, True]
        await settle()
        assert rig.routed == {"decode-1"}
        assert (await pool_of(rig, Role.DECODE)).wanted == 1


async def test_a_node_that_dies_while_it_drains_is_not_brought_back() -> None:
    async with started(*DD) as rig:
        going = rig.node("decode-0")
        going.may_finish.clear()
        drain = asyncio.create_task(rig.controller.drain_node("decode-0", DRAIN_S))
        await settle()
        going.die()
        await rig.clock.advance(DRAIN_S + TIMEOUTS.stop_s + 1)
        assert not await drain
        assert len(rig.launcher.nodes["decode-0"]) == 1
        assert rig.routed == {"decode-1"}


async def test_a_node_that_is_just_being_ended_does_not_outlive_the_controller() -> None:
    async with started(*DD) as rig:
        going = rig.node("decode-1")
        going.may_stop.clear()
        await rig.controller.scale({Role.DECODE: 1})
        await settle()
        stop = asyncio.create_task(rig.controller.stop())
        await settle()
        going.may_stop.set()
        await stop
        assert going.stopped


# --- machines


async def test_nodes_without_a_machine_wait_are_counted_and_asked_for() -> None:
    hosts = machines("p", "d")
    async with started(pools=pools(1, 3), hosts=hosts) as rig:
        await settle()
        assert hosts.wanted == {Role.PREFILL: 1, Role.DECODE: 3}
        decode = await pool_of(rig, Role.DECODE)
        assert (decode.wanted, decode.ready, decode.waiting_for_machines) == (3, 1, 2)
        assert (await phases(rig))["decode-1"] == "waiting"
        hosts.join(machine("3", decode=1))
        await settle()
        assert rig.routed == {"prefill-0", "decode-0", "decode-1"}
        assert rig.node("decode-1").host.name == "3"
        await rig.controller.scale({Role.DECODE: 2})
        await settle()
        assert hosts.wanted == {Role.PREFILL: 1, Role.DECODE: 2}


@pytest.mark.parametrize("comes", [True, False])
async def test_start_waits_for_the_machine_of_the_first_node_that_writes_and_not_longer_than_was_asked(
    comes: bool,
) -> None:
    hosts = machines("p")
    async with Rig(pools=pools(1, 1), hosts=hosts, timeouts=SHORT) as rig:
        start = asyncio.create_task(rig.controller.start())
        await rig.clock.advance(SHORT.machines_s / 2)
        assert not start.done()
        if comes:
            hosts.join(machine("2", decode=1))
            await settle()
            await start
            assert rig.controller.url
            return
        await rig.clock.advance(SHORT.machines_s / 2 + 1)
        with pytest.raises(DeadlineExceeded, match=r"waiting for machines .*timeouts\.machines_s"):
            await start


async def test_a_node_may_take_longer_to_start_than_machines_to_come() -> None:
    """A large model: `timeouts.start_s` is the limit that was set for it."""
    async with Rig(*PD, timeouts=msgspec.structs.replace(SHORT, start_s=2 * SHORT.machines_s)) as rig:
        rig.hold("decode-0")
        start = asyncio.create_task(rig.controller.start())
        await rig.clock.advance(1.5 * SHORT.machines_s)
        assert not start.done()
        rig.node("decode-0").may_start.set()
        await start


async def test_a_pool_without_a_size_follows_the_machines() -> None:
    hosts = machines("p", "dd")
    async with started(pools=pools(None, None), hosts=hosts) as rig:
        await settle()
        assert rig.routed == {"prefill-0", "decode-0", "decode-1"}
        hosts.join(machine("3", prefill=1, decode=1))
        await settle()
        assert rig.routed == {"prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2"}
        rig.lose_machine("2")
        await settle()
        assert rig.routed == {"prefill-0", "prefill-1", "decode-2"}
        assert (await pool_of(rig, Role.DECODE)).waiting_for_machines == 0
        assert await rig.controller.drain_node("prefill-1", DRAIN_S)
        await settle()
        assert rig.routed == {"prefill-0", "decode-2"}, "its place stays empty"
        hosts.join(machine("4", prefill=1))
        await settle()
        assert rig.routed == {"prefill-0", "prefill-2", "decode-2"}
