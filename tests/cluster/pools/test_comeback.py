"""What comes back: nodes that were left out, and a controller that was killed."""

from __future__ import annotations

import asyncio

from cluster.pools.supervisor import Phase
from tests.cluster.pools.helpers import FakeProcess, Rig, in_loop, settle
from tests.cluster.pools.pools_rig import PD
from wire.errors import Unavailable
from wire.nodes import NodeState, Role

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
