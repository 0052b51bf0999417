"""Routers whose configuration changes are replaced one by one, or the whole change is rolled back."""

from __future__ import annotations

import asyncio

import pytest

from tandem.base.errors import ConfigurationError
from tandem.cluster.config import TandemConfig
from tandem.cluster.control import RolloutView
from tandem.router.config import RouterConfig, RouterPlacement
from tandem.wire.nodes import Role, RouterQueue
from tests.cluster.pools.helpers import FakeHosts, FakeRouter, Rig, one_machine, settle, started
from tests.cluster.pools.pools_rig import EVERY_HOST, machine, pools, replace, seqs_of, with_seqs

LONG_S = 100.0


def with_router(rig: Rig, **changes: object) -> TandemConfig:
    """The rig's configuration with a change that needs new routers."""
    return replace(rig.config, router=replace(rig.config.router, **(changes or {"max_failovers": 7})))


def running(rig: Rig) -> dict[str, FakeRouter]:
    return {router.name: router for router in rig.launcher.routers if not router.died.done()}


def head_and_two() -> FakeHosts:
    return FakeHosts(one_machine(8), machine("1", prefill=1, decode=2), machine("2", prefill=1, decode=2))


async def rollout_of(rig: Rig) -> RolloutView | None:
    return (await rig.controller.view()).rollout


async def test_a_new_router_gets_the_old_ones_socket_and_the_old_one_finishes() -> None:
    async with started(pools=pools(1, 1)) as rig:
        old = rig.launcher.router
        old.may_leave.clear()
        change = await rig.controller.apply(with_router(rig), dry_run=False)
        assert (change.nodes, change.routers, change.refused) == ([], ["router.max_failovers"], [])
        assert change.replaced == ["router"]
        await rig.clock.advance(3.0)
        new = rig.launcher.router
        assert (new.name, new.config.max_failovers) == ("router~2", 7)
        assert new.door == "door of router 0"
        assert old.left_with is None, "the new one has not served for long enough"
        await rig.clock.advance(10.0)
        assert old.left_with == rig.config.router.timeouts.total
        view = await rig.controller.view()
        assert (view.rollout, view.revision) == (None, change.revision), "what it has does not keep the rollout"
        assert {node.node_id for node in view.nodes} == {"prefill-0", "decode-0"}, "nodes stay"
        assert [(router.name, router.phase) for router in view.routers] == [
            ("router", "draining"),
            ("router~2", "ready"),
        ]
        assert old.node_ids == new.node_ids, "both know the nodes"
        old.may_leave.set()
        await rig.clock.advance(3.0)
        assert list(running(rig)) == ["router~2"]
        await rig.controller.apply(with_router(rig, max_failovers=8), dry_run=False)
        await rig.clock.advance(30.0)
        assert list(running(rig)) == ["router"], "a name is free when its process is gone"


async def test_machines_routers_go_one_after_the_other_and_before_nodes() -> None:
    config = replace(EVERY_HOST, router=replace(EVERY_HOST.router, host="0.0.0.0"))
    async with started(pools=pools(1, 1), hosts=head_and_two(), config=config) as rig:
        await rig.controller.apply(with_seqs(with_router(rig)), dry_run=False)
        most = 0
        for _ in range(40):
            await rig.clock.advance(1.0)
            most = max(most, len(running(rig)))
            view = await rollout_of(rig)
            if view is not None and any(name.startswith("router") for name in view.left):
                assert not any(node.stopped for nodes in rig.launcher.nodes.values() for node in nodes)
        assert most == 4
        await rig.clock.advance(LONG_S)
        assert await rollout_of(rig) is None
        routers = running(rig)
        assert set(routers) == {"router~2", "router-10.0.0.1~2", "router-10.0.0.2~2"}
        assert {router.config.max_failovers for router in routers.values()} == {7}
        assert routers["router-10.0.0.1~2"].config.inbox_host == "10.0.0.1"
        assert seqs_of(rig) == {77: 2}


@pytest.mark.parametrize("why", ["no such template", "9 of its 20 responses"])
async def test_what_is_wrong_with_a_new_router_takes_all_back(why: str) -> None:
    async with started(pools=pools(1, 1)) as rig:
        old = rig.launcher.router
        if why == "no such template":
            rig.refuse("router~2", ConfigurationError("there is no such template"))
        else:
            answers = RouterQueue(answers=20, errors=9)
            rig.launcher.prepare["router~2"] = lambda router, _: setattr(router, "load", answers)
        await rig.controller.apply(with_seqs(with_router(rig)), dry_run=False)
        await rig.clock.advance(LONG_S)
        view = await rig.controller.view()
        assert (view.rollout, view.revision) == (None, 0)
        assert any("taken back: " in one.text and why in one.text for one in view.decisions)
        assert list(running(rig).values()) == [old]
        assert old.left_with is None, "it served all the time"
        assert old.node_ids == {"prefill-0", "decode-0"}, "no node was touched"
        assert (await rig.controller.configuration()).router == rig.config.router


async def test_a_router_whose_process_takes_long_to_end_is_not_started_again() -> None:
    async with started(pools=pools(1, 1)) as rig:
        old = rig.launcher.router
        old.may_stop.clear()
        await rig.controller.apply(with_router(rig), dry_run=False)
        await rig.clock.advance(20.0)
        assert old.left_with is not None
        await rig.controller.scale({Role.DECODE: 2})  # the controller looks at everything again
        await rig.clock.advance(20.0)
        assert [router.name for router in rig.launcher.routers] == ["router", "router~2"]
        old.may_stop.set()
        await rig.clock.advance(20.0)
        assert [router.name for router in (await rig.controller.view()).routers] == ["router~2"]


async def test_a_router_that_was_told_to_end_goes_when_another_one_has_its_place() -> None:
    async with started(pools=pools(1, 1)) as rig:
        old = rig.launcher.router
        rig.hold("router~2")
        old.load = RouterQueue(is_ending=True)
        await rig.clock.advance(3.0)
        new = rig.launcher.router
        assert (new.name, new.door, new.config) == ("router~2", "door of router 0", old.config)
        assert old.left_with is None, "nothing else serves yet"
        new.may_start.set()
        await rig.clock.advance(3.0)
        assert old.left_with is not None
        assert list(running(rig)) == ["router~2"]
        assert await rollout_of(rig) is None
        assert any("got SIGTERM" in text for text in await rig.decided())


async def test_a_rollout_judges_the_only_new_router_when_the_old_one_ends_by_itself() -> None:
    async with started(pools=pools(1, 1)) as rig:

        def broken(router: FakeRouter, _: int) -> None:
            router.start_error, router.starts_at_once = ConfigurationError("there is no such template"), False

        rig.launcher.prepare["router~2"] = broken
        old = rig.launcher.router
        await rig.controller.apply(with_router(rig), dry_run=False)
        await rig.clock.advance(1.0)
        old.load = RouterQueue(is_ending=True)
        await rig.clock.advance(2.0)
        rig.launcher.router.may_start.set()
        await rig.clock.advance(LONG_S)
        decided = await rig.decided()
        assert any("taken back: router~2" in text and "no such template" in text for text in decided)
        (router,) = running(rig).values()
        assert router.config == rig.config.router
        assert router.node_ids == {"prefill-0", "decode-0"}


async def test_a_new_router_that_comes_just_before_the_old_one_is_back_gets_its_socket_then() -> None:
    async with started(pools=pools(1, 1)) as rig:
        rig.launcher.router.die()
        rig.hold("router")
        await rig.clock.advance(1.5)
        rig.refuse("router~2", ConfigurationError("router.port: cannot listen: Address already in use"), times=1)
        await rig.controller.apply(with_router(rig), dry_run=False)
        await rig.clock.advance(0.5)
        running(rig)["router"].may_start.set()
        await rig.clock.advance(LONG_S)
        assert await rollout_of(rig) is None
        assert not any("taken back" in text for text in await rig.decided())
        assert list(running(rig)) == ["router~2"]
        assert rig.launcher.router.door == "door of router 1"


async def test_further_processes_get_the_socket_of_one_that_serves_and_know_each_other() -> None:
    """Their number changes while those that stay serve on, and one that dies is replaced."""
    async with started(pools=pools(1, 1)) as rig:
        first = rig.launcher.router
        await rig.controller.apply(with_router(rig, processes=3), dry_run=False)
        await rig.clock.advance(30.0)
        routers = running(rig)
        doors = {"router": "", "router~2": "door of router 0", "router~3": "door of router 0"}
        assert {name: router.door for name, router in routers.items()} == doors
        desks = {name: f"desk of {name} 0" for name in routers}
        assert [router.desks for router in routers.values()] == [desks] * 3
        assert [router.node_ids for router in routers.values()] == [{"prefill-0", "decode-0"}] * 3
        await rig.controller.apply(with_router(rig, processes=2), dry_run=False)
        await rig.clock.advance(30.0)
        second = running(rig)["router~2"]
        assert list(running(rig).values()) == [first, second]
        first.die("it was killed")
        await rig.clock.advance(10.0)
        assert running(rig)["router"].door == "door of router~2 0"
        assert running(rig)["router~2"] is second
        assert (first.left_with, second.left_with) == (None, None)
        assert second.desks == {"router": "desk of router 1", "router~2": "desk of router~2 0"}
        assert await rollout_of(rig) is None


@pytest.mark.parametrize(
    ("changes", "named", "desks"),
    [
        # It may be of another version.
        ({"env": {"PYTHONPATH": "/shared/next"}}, ["router.env.PYTHONPATH"], (["router~2"], ["router"])),
        ({"host": "0.0.0.0", "port": 8123}, ["router.host", "router.port"], (["router", "router~2"], ["router", "router~2"])),
    ],
    ids=["an environment of its own: they share the socket alone", "another address: it is the one to ask"],
)  # fmt: skip
async def test_a_router_that_differs_from_the_old_one_is_told_of_its_socket(
    changes: dict[str, object], named: list[str], desks: tuple[list[str], list[str]]
) -> None:
    async with started(pools=pools(1, 1)) as rig:
        old = rig.launcher.router
        old.may_leave.clear()
        wanted = with_router(rig, **changes)
        change = await rig.controller.apply(wanted, dry_run=False)
        assert (change.routers, change.refused) == (named, [])
        await rig.clock.advance(3.0)
        new = rig.launcher.router
        assert (new.name, new.door) == ("router~2", "door of router 0")
        assert (new.config.env, new.config.host, new.config.port) == (
            wanted.router.env, wanted.router.host, wanted.router.port,
        )  # fmt: skip
        assert (sorted(new.desks), sorted(old.desks)) == desks
        await rig.clock.advance(10.0)
        assert old.left_with is not None
        assert rig.controller.fleet.head_router.name == new.name, "clients are told of its address"
        old.may_leave.set()
        await rig.clock.advance(3.0)
        assert list(running(rig)) == ["router~2"]
        assert await rollout_of(rig) is None


async def test_machines_get_routers_and_lose_them_while_the_heads_stays() -> None:
    config = TandemConfig(router=RouterConfig("model", "fake", host="0.0.0.0"))
    async with started(pools=pools(1, 1), hosts=head_and_two(), config=config) as rig:
        heads = rig.launcher.router
        change = await rig.controller.apply(with_router(rig, placement=RouterPlacement.EVERY_HOST), dry_run=False)
        assert (change.routers, change.refused) == (["router.placement"], [])
        await rig.clock.advance(20.0)
        assert set(running(rig)) == {"router", "router-10.0.0.1", "router-10.0.0.2"}
        others = [router for router in running(rig).values() if router is not heads]
        for router in others:
            router.may_leave.clear()
        await rig.controller.apply(config, dry_run=False)
        await rig.clock.advance(20.0)
        assert all(router.left_with is not None for router in others)
        assert set(running(rig)) == {"router", "router-10.0.0.1", "router-10.0.0.2"}, "they finish what they have"
        await rig.next_controller(5.0)
        assert len(rig.launcher.routers) == 3, "a controller that comes back starts none of them again"
        for router in others:
            router.may_leave.set()
        await rig.clock.advance(20.0)
        assert list(running(rig).values()) == [heads]
        assert heads.left_with is None
        assert await rollout_of(rig) is None


async def test_a_new_router_gets_the_socket_of_one_that_the_next_controller_has_not_reached_yet() -> None:
    """Without it the new router finds its port taken, and the change would be taken back for that."""
    async with started(pools=pools(1, 1)) as rig:
        rig.hold("router~2")
        await rig.controller.apply(with_router(rig), dry_run=False)
        await settle()
        rig.launcher.routers = [router for router in rig.launcher.routers if router.name == "router"]
        await rig.kill_controller()  # its new router was recorded, and its process never came to be
        starting = asyncio.create_task(rig.controller.start())
        await settle()
        new = rig.launcher.router
        assert (new.name, new.door) == ("router~2", "door of router 0")
        new.may_start.set()
        await rig.clock.advance(LONG_S)
        await starting
        assert list(running(rig)) == ["router~2"]
        assert await rollout_of(rig) is None
