"""Every node gets the keys of the nodes and routers that exist, and admits no process that has ended."""

from __future__ import annotations

import asyncio

from tandem.wire.endpoints import key_of
from tests.cluster.pools.helpers import FakeNode, Rig, key_of_fake, started
from tests.cluster.pools.pools_rig import EVERY_HOST, PD, PDD, machines, pools


def keys_of(rig: Rig) -> list[str]:
    """The public keys of all running processes."""
    nodes = [key_of(node.info.request_endpoint) for node in rig.launcher.running]
    routers = [router for router in rig.launcher.routers if not router.died.done()]
    return sorted(nodes + [key_of_fake(router.name, router.incarnation) for router in routers])


async def test_nodes_admit_all_nodes_and_routers_and_hear_at_once_of_those_that_come_and_go() -> None:
    async with started(*PDD) as rig:
        await rig.clock.advance(1)
        for node in rig.launcher.running:
            assert node.admitted[-1] == keys_of(rig)
        dead = key_of_fake("router", 0)
        rig.launcher.router.die()
        await rig.clock.advance(1.1)  # what it waits before it starts one again, and far less than a heartbeat
        for node in rig.launcher.running:
            assert dead not in node.admitted[-1]
            assert node.admitted[-1] == keys_of(rig)
        await rig.controller.drain_node("decode-1", 1.0)
        await rig.clock.advance(1)
        assert len(keys_of(rig)) == 3
        for node in rig.launcher.running:
            assert node.admitted[-1] == keys_of(rig)
        late = rig.node("decode-0")
        late.mute.set()
        rig.launcher.router.die()
        await rig.clock.advance(4)
        assert late.admitted[-1] != keys_of(rig)
        late.mute.clear()
        await rig.clock.advance(4)
        assert late.admitted[-1] == keys_of(rig)


async def test_a_node_admits_the_others_before_a_router_is_told_of_it() -> None:
    async with Rig(*PD) as rig:
        late = asyncio.Event()

        def slow(process: FakeNode, earlier: int) -> None:
            async def admit(keys: list[str]) -> None:
                process.admitted.append(keys)
                await late.wait()

            process.admit = admit

        rig.launcher.prepare["decode-0"] = slow
        start = asyncio.create_task(rig.controller.start())
        await rig.clock.advance(1)
        assert rig.routed == {"prefill-0"}
        late.set()
        await start
        await rig.clock.advance(1)
        assert rig.routed == {"prefill-0", "decode-0"}


async def test_a_controller_that_comes_back_takes_no_router_for_a_stranger() -> None:
    async with started(pools=pools(1, 1), hosts=machines("p", "d"), config=EVERY_HOST) as rig:
        await rig.clock.advance(1)
        known = {node.info.node_id: len(node.admitted) for node in rig.launcher.running}
        keys = keys_of(rig)
        assert len(keys) == 5
        await rig.next_controller(2)
        for node in rig.launcher.running:
            told = node.admitted[known[node.info.node_id] :]
            assert told
            assert all(admitted == keys for admitted in told)
