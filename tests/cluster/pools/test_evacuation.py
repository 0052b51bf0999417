"""A machine that is about to leave is emptied: its nodes drain, others start elsewhere, and nothing new starts there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from tandem.base.errors import ConfigurationError, Unavailable
from tandem.cluster.config import TandemConfig
from tandem.cluster.pools.state import decode
from tandem.router.config import RouterConfig, RouterPlacement
from tests.cluster.pools.helpers import FakeHosts, FakeRouter, Rig, settle, started
from tests.cluster.pools.pools_rig import DRAIN_S, machine, needs_rollouts, pools


def hosts_of(rig: Rig) -> dict[str, str]:
    return {node.info.node_id: node.host.name for node in rig.launcher.running}


async def test_its_nodes_go_and_their_pools_keep_their_sizes() -> None:
    hosts = FakeHosts(machine("1", prefill=1), machine("2", decode=1), machine("3", decode=1))
    async with started(pools=pools(1, 1), hosts=hosts) as rig:
        where = hosts_of(rig)["decode-0"]
        going = asyncio.create_task(rig.controller.evacuate(f"10.0.0.{where}", DRAIN_S))
        await rig.clock.advance(1)
        assert await going == {"decode-0": True}
        await rig.clock.advance(1)
        assert rig.routed == {"prefill-0", "decode-1"}
        assert hosts_of(rig)["decode-1"] != where
        (pool,) = [p for p in (await rig.controller.view()).pools if p.role.value == "decode"]
        assert pool.wanted == 1


@asynccontextmanager
async def evacuating_the_last_writer() -> AsyncIterator[tuple[Rig, asyncio.Task[dict[str, bool]]]]:
    """Yields while the only decode node's machine is emptied and the next decode node is still starting."""
    hosts = FakeHosts(machine("1", prefill=1), machine("2", decode=1), machine("3", decode=1))
    async with started(pools=pools(1, 1), hosts=hosts) as rig:
        where = hosts_of(rig)["decode-0"]
        rig.launcher.prepare["decode-1"] = lambda process, _: setattr(process, "starts_at_once", False)
        yield rig, asyncio.create_task(rig.controller.evacuate(f"10.0.0.{where}", DRAIN_S))


async def test_the_last_that_writes_answers_waits_for_the_next_one() -> None:
    async with evacuating_the_last_writer() as (rig, going):
        await rig.clock.advance(DRAIN_S / 4)
        assert rig.launcher.node("decode-0").drained_with is None
        assert "decode-0" in rig.routed
        rig.launcher.node("decode-1").may_start.set()
        await rig.clock.advance(1)
        assert await going == {"decode-0": True}
        assert rig.launcher.node("decode-0").drained_with is not None


async def test_where_none_takes_over_it_goes_all_the_same() -> None:
    """The machine will be ended soon, even if its node has work left."""
    hosts = FakeHosts(machine("1", prefill=1), machine("2", decode=1))
    async with started(pools=pools(1, 1), hosts=hosts) as rig:
        going = asyncio.create_task(rig.controller.evacuate("10.0.0.2", DRAIN_S))
        await rig.clock.advance(DRAIN_S)
        assert await going == {"decode-0": True}
        assert rig.launcher.node("decode-0").drained_with == DRAIN_S / 2
        assert rig.hosts.wanted.values()  # a machine is asked for
        hosts.join(machine("4", decode=1))
        await rig.clock.advance(1)
        assert rig.routed == {"prefill-0", "decode-1"}


async def test_nothing_comes_to_it_while_it_is_there_and_it_is_forgotten_with_it() -> None:
    hosts = FakeHosts(machine("1", prefill=1), machine("2", decode=2), machine("3", decode=2))
    async with started(pools=pools(1, 2), hosts=hosts) as rig:
        going = asyncio.create_task(rig.controller.evacuate("10.0.0.2", DRAIN_S))
        await rig.clock.advance(DRAIN_S)
        await going
        assert {hosts_of(rig)[name] for name in rig.routed} == {"1", "3"}
        assert len(rig.routed) == 3
        hosts.leave("2")
        hosts.join(machine("5", decode=1))
        await rig.clock.advance(1)
        going = asyncio.create_task(rig.controller.evacuate("10.0.0.5", 1.0))
        await rig.clock.advance(1)
        await going
        kept = await rig.store.load()
        assert kept is not None
        assert decode(kept).evacuated == ["5"]


async def test_a_controller_that_comes_back_goes_on_with_it() -> None:
    hosts = FakeHosts(machine("1", prefill=1), machine("2", decode=1), machine("3", decode=1))
    async with started(pools=pools(1, 2), hosts=hosts) as rig:
        rig.launcher.node("decode-0").may_finish.clear()
        where = hosts_of(rig)["decode-0"]
        going = asyncio.create_task(rig.controller.evacuate(f"10.0.0.{where}", DRAIN_S))
        await settle()
        going.cancel()
        await rig.kill_controller()
        rig.launcher.node("decode-0").may_finish.set()
        await rig.controller.start()
        await rig.clock.advance(1)
        assert where not in {hosts_of(rig)[name] for name in rig.routed}


async def test_the_next_controller_waits_for_another_that_writes_answers_too() -> None:
    async with evacuating_the_last_writer() as (rig, going):
        await settle()
        going.cancel()
        await rig.kill_controller()
        start = asyncio.create_task(rig.controller.start())
        await rig.clock.advance(DRAIN_S / 4)
        assert rig.launcher.node("decode-0").drained_with is None
        rig.launcher.node("decode-1").may_start.set()
        await rig.clock.advance(1)
        await start
        assert rig.routed == {"prefill-0", "decode-1"}


async def test_its_router_takes_nothing_new_when_its_nodes_are_done() -> None:
    router = RouterConfig(tokenizer_path="model", model_name="fake", placement=RouterPlacement.EVERY_HOST)
    hosts = FakeHosts(machine("1", prefill=1), machine("2", decode=1), machine("3", decode=1))
    async with started(pools=pools(1, 2), hosts=hosts, config=TandemConfig(router=router)) as rig:

        def drained() -> dict[str, bool]:
            return {r.name: r.drained_with is not None for r in rig.launcher.routers if isinstance(r, FakeRouter)}

        rig.launcher.node("decode-0").may_finish.clear()
        where = hosts_of(rig)["decode-0"]
        going = asyncio.create_task(rig.controller.evacuate(f"10.0.0.{where}", DRAIN_S))
        await settle()
        assert not any(drained().values())
        rig.launcher.node("decode-0").may_finish.set()
        await rig.clock.advance(1)
        await going
        assert [name for name, was in drained().items() if was] == [f"router-10.0.0.{where}"]


@needs_rollouts
async def test_a_rollout_does_not_wait_for_nodes_on_a_machine_that_is_about_to_go() -> None:
    """The pool has a node for each place, and the machine's places count no more."""
    hosts = FakeHosts(machine("1", prefill=1, decode=1), machine("2", decode=2))
    async with started(pools=pools(1, None), hosts=hosts) as rig:
        going = asyncio.create_task(rig.controller.evacuate("10.0.0.2", DRAIN_S))
        await rig.clock.advance(1)
        await going
        config = msgspec.structs.replace(
            rig.config, scheduler=msgspec.structs.replace(rig.config.scheduler, max_num_seqs=77)
        )
        hosts.join(machine("3", decode=1))
        await rig.clock.advance(1)
        await rig.controller.apply(config, dry_run=False)
        await rig.clock.advance(160.0)
        assert (await rig.controller.view()).rollout is None
        assert [node.config.engine.scheduler.max_num_seqs for node in rig.launcher.running] == [77] * 3


@needs_rollouts
async def test_a_rollout_whose_old_nodes_went_with_their_machine_is_judged_by_new_ones() -> None:
    hosts = FakeHosts(machine("1", prefill=1, decode=1))
    async with started(pools=pools(1, 1), hosts=hosts) as rig:
        rig.launcher.prepare |= dict.fromkeys(
            ["prefill-1", "decode-1"], lambda process, _: setattr(process, "start_error", Unavailable("never"))
        )
        config = msgspec.structs.replace(
            rig.config, scheduler=msgspec.structs.replace(rig.config.scheduler, max_num_seqs=77)
        )
        await rig.controller.apply(config, dry_run=False)
        going = asyncio.create_task(rig.controller.evacuate("10.0.0.1", DRAIN_S))
        await rig.clock.advance(100.0)
        await going
        view = (await rig.controller.view()).rollout
        assert view is not None, "nothing has served with the new configuration"
        assert view.waits == "no new node that decodes has served yet"
        hosts.join(machine("2", prefill=2, decode=2))
        await rig.clock.advance(160.0)
        assert (await rig.controller.view()).rollout is None
        assert rig.routed == {"prefill-2", "decode-2"}, "it was taken back"


async def test_a_machine_that_is_not_there_is_said() -> None:
    async with started(pools=pools(1, 1), hosts=FakeHosts(machine("1", prefill=1, decode=1))) as rig:
        with pytest.raises(ConfigurationError, match=r"no machine 10\.0\.0\.9; there are: 10\.0\.0\.1"):
            await rig.controller.evacuate("10.0.0.9", 1.0)
