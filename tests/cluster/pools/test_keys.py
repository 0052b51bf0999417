"""Every node gets the keys of the nodes and routers that exist, and admits no process that has ended."""

from __future__ import annotations

import asyncio

from tandem.cluster.config import TandemConfig
from tandem.router.config import RouterConfig, RouterPlacement
from tandem.wire.endpoints import key_of
from tests.cluster.pools.helpers import FakeHosts, FakeNode, Rig, key_of_fake, settle, started
from tests.cluster.pools.pools_rig import PD, machine, pools


def keys_of(rig: Rig) -> list[str]:
    """The public keys of all running processes."""
    nodes = [key_of(node.info.request_endpoint) for node in rig.launcher.running]
    routers = [
        key_of_fake(router.name, router.incarnation) for router in rig.launcher.routers if not router.died.done()
    ]
    return sorted(nodes + routers)


async def test_nodes_admit_all_nodes_and_routers() -> None:
    async with started(*PD) as rig:
        await rig.clock.advance(1)
        for node in rig.launcher.running:
            assert node.admitted[-1] == keys_of(rig)


async def test_a_node_admits_the_others_before_a_router_is_told_of_it() -> None:
    async with Rig(*PD) as rig:
        late = asyncio.Event()

        async def admit(self: FakeNode, keys: list[str]) -> None:
            self.admitted.append(keys)
            await late.wait()

        def slow(process: object, earlier: int) -> None:
            assert isinstance(process, FakeNode)
            process.admit = lambda keys: admit(process, keys)  # type: ignore[method-assign]

        rig.launcher.prepare["decode-0"] = slow
        start = asyncio.create_task(rig.controller.start())
        await rig.clock.advance(1)
        assert rig.routed == {"prefill-0"}
        late.set()
        await start
        await rig.clock.advance(1)
        assert rig.routed == {"prefill-0", "decode-0"}


async def test_nodes_hear_at_once_of_a_router_that_was_started_again_and_forget_the_dead_one() -> None:
    async with started(*PD) as rig:
        await rig.clock.advance(1)
        dead = key_of_fake("router", 0)
        rig.launcher.router.die()
        await rig.clock.advance(1.1)  # what it waits before it starts one again, and far less than a heartbeat
        for node in rig.launcher.running:
            assert dead not in node.admitted[-1]
            assert node.admitted[-1] == keys_of(rig)


async def test_a_node_that_did_not_answer_is_told_later() -> None:
    async with started(*PD) as rig:
        await rig.clock.advance(1)
        node = rig.launcher.node("decode-0")
        node.mute.set()
        rig.launcher.router.die()
        await rig.clock.advance(4)
        assert node.admitted[-1] != keys_of(rig)
        node.mute.clear()
        await rig.clock.advance(4)
        assert node.admitted[-1] == keys_of(rig)


async def test_a_controller_that_comes_back_takes_no_router_for_a_stranger() -> None:
    router = RouterConfig(tokenizer_path="model", model_name="fake", placement=RouterPlacement.EVERY_HOST)
    hosts = FakeHosts(machine("1", prefill=1), machine("2", decode=1))
    async with started(pools=pools(1, 1), hosts=hosts, config=TandemConfig(router=router)) as rig:
        await rig.clock.advance(1)
        known = {node.info.node_id: len(node.admitted) for node in rig.launcher.running}
        keys = keys_of(rig)
        assert len(keys) == 5
        await rig.next_controller()
        await rig.clock.advance(2)
        for node in rig.launcher.running:
            told = node.admitted[known[node.info.node_id] :]
            assert told
            assert all(admitted == keys for admitted in told)


async def test_a_node_that_is_gone_is_admitted_no_more() -> None:
    async with started(*PD, ("decode-1", PD[1][1])) as rig:
        await rig.clock.advance(1)
        gone = key_of(rig.launcher.node("decode-1").info.request_endpoint)
        await rig.controller.drain_node("decode-1", 1.0)
        await rig.clock.advance(1)
        await settle()
        for node in rig.launcher.running:
            assert gone not in node.admitted[-1]
