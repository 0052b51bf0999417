"""The autoscaler beside a controller: when it may resize a pool."""

from __future__ import annotations

import asyncio

from msgspec.structs import replace

from tandem.cluster.config import AutoscalingConfig, PoolConfig, TandemConfig
from tandem.cluster.launcher import CheckKept
from tandem.router.config import RouterConfig
from tandem.wire.nodes import Role, RouterQueue
from tests.cluster.pools.helpers import FakeHosts, settle, started
from tests.cluster.pools.pools_rig import PD, machine, pool_of, pools

QUICK = AutoscalingConfig(grow_after_s=3.0, shrink_after_s=20.0, settle_s=1.0)


async def test_what_waits_for_the_end_of_a_pause_makes_no_pool_grow() -> None:
    config = TandemConfig(router=RouterConfig("model", "fake"), autoscaling=QUICK)
    async with started(pools=pools(1, PoolConfig(nodes=1, min=1, max=3)), config=config) as rig:
        rig.launcher.router.load = RouterQueue(9, 60.0)
        save, may_save = rig.store.save, asyncio.Event()

        async def save_late(kept: bytes, check: CheckKept | None = None) -> None:
            await may_save.wait()
            await save(kept, check)

        rig.store.save = save_late
        pausing = asyncio.create_task(rig.controller.pause([]))
        await rig.clock.advance(20.0)
        may_save.set()
        await pausing
        await rig.clock.advance(60.0)
        assert (await pool_of(rig, Role.DECODE)).wanted == 1, "also while the pause was being recorded"
        await rig.controller.resume([])
        await rig.clock.advance(30.0)
        assert (await pool_of(rig, Role.DECODE)).wanted > 1


async def test_no_pool_grows_while_everything_finishes_for_the_end() -> None:
    config = TandemConfig(
        router=RouterConfig(tokenizer_path="model", model_name="fake"),
        autoscaling=AutoscalingConfig(grow_after_s=3.0, settle_s=1.0),
    )
    limits = pools(1, PoolConfig(nodes=1, min=1, max=3))
    async with started(pools=limits, config=config) as rig:
        rig.launcher.router.load = RouterQueue(9, 60.0)
        rig.launcher.router.may_finish.clear()
        drain = asyncio.create_task(rig.controller.drain())
        await rig.clock.advance(30.0)
        assert not drain.done()
        assert (await pool_of(rig, Role.DECODE)).wanted == 1
        rig.launcher.router.may_finish.set()
        assert await drain


async def test_a_pool_that_got_a_limit_is_scaled_by_its_load_from_now_on() -> None:
    async with started(pools=pools(1, 1)) as rig:
        scaled = replace(rig.config, pools=pools(1, PoolConfig(nodes=2, min=1, max=3)), autoscaling=QUICK)
        await rig.controller.apply(scaled, dry_run=False)
        await settle()
        rig.launcher.router.load = RouterQueue(9, 60.0)
        await rig.clock.advance(30.0)
        assert len(rig.routed) == 4


async def test_a_crowded_pool_grows_by_itself_and_says_why() -> None:
    async with started(pools=pools(1, PoolConfig(nodes=1, min=1, max=2))) as rig:
        rig.node("decode-0").free_blocks = 2
        await rig.clock.advance(60)
        assert rig.routed == {"prefill-0", "decode-0", "decode-1"}
        assert await rig.decided() == ["decode: from 1 to 2: 98% of its blocks are taken, more than 90%"]
        await rig.clock.advance(120)
        assert (await pool_of(rig, Role.DECODE)).wanted == 2, "no room to spare, and not above its maximum"


async def test_one_node_that_keeps_dying_does_not_keep_the_pools_from_growing() -> None:
    async with started(pools=pools(PoolConfig(nodes=2), PoolConfig(nodes=1, min=1, max=2))) as rig:
        rig.node("decode-0").free_blocks = 2
        for _ in range(40):
            if rig.node("prefill-1").died.done() is False:
                rig.node("prefill-1").die("its device is broken")
            await rig.clock.advance(3.0)
        assert "decode-1" in rig.routed


async def test_a_pool_without_a_maximum_is_left_alone() -> None:
    async with started(*PD) as rig:
        rig.node("decode-0").free_blocks = 2
        await rig.clock.advance(60)
        assert (await pool_of(rig, Role.DECODE)).wanted == 1


async def test_an_idle_pool_shrinks_to_its_minimum_without_a_failed_request() -> None:
    config = TandemConfig(router=RouterConfig("model", "fake"), autoscaling=QUICK)
    async with started(pools=pools(1, PoolConfig(nodes=3, min=2, max=4)), config=config) as rig:
        await rig.clock.advance(250)
        assert (await pool_of(rig, Role.DECODE)).wanted == 2
        assert rig.node("decode-2").drained_with is not None


async def test_a_machine_that_never_comes_pins_no_pool() -> None:
    """A decode node waits for one: meanwhile the prefill pool grows, and the decode pool shrinks again when it has room to spare."""
    limits = pools(PoolConfig(nodes=1, min=1, max=2), PoolConfig(nodes=1, min=1, max=3))
    config = TandemConfig(router=RouterConfig("model", "fake"), autoscaling=QUICK)
    async with started(pools=limits, hosts=FakeHosts(machine("1", prefill=2, decode=1)), config=config) as rig:
        rig.node("decode-0").free_blocks = 2
        await rig.clock.advance(60)
        decode = await pool_of(rig, Role.DECODE)
        assert (decode.wanted, decode.waiting_for_machines) == (2, 1)
        rig.node("prefill-0").free_blocks = 2
        await rig.clock.advance(60)
        assert (await pool_of(rig, Role.PREFILL)).wanted == 2
        for name in ("decode-0", "prefill-0"):
            rig.node(name).free_blocks = 90
        await rig.clock.advance(300)
        decode = await pool_of(rig, Role.DECODE)
        assert (decode.wanted, decode.waiting_for_machines) == (1, 0)
