"""Pools that grow, shrink and follow the machines, against a launcher without processes."""

from __future__ import annotations

import asyncio
import logging

import msgspec
import pytest

from tandem.base.errors import ConfigurationError, DeadlineExceeded, Unavailable
from tandem.base.logs import LogsQuery
from tandem.cluster.config import PoolConfig
from tandem.cluster.pools.event_log import KEPT, EventKind, EventLog, replay
from tandem.cluster.pools.supervisor import ProcessPhase
from tandem.wire.endpoints import key_of
from tandem.wire.nodes import Role
from tests.cluster.pools.helpers import (
    TIMEOUTS,
    FakeNode,
    FakeProcess,
    RecordedEvents,
    Rig,
    key_of_fake,
    settle,
    started,
)
from tests.cluster.pools.pools_rig import DRAIN_S, EVERY_HOST, PD, PDD, machine, machines, phases, pool_of, pools

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


async def test_who_follows_sees_each_event_once_and_in_order() -> None:
    log = EventLog(RecordedEvents())
    log.progress("decode-0", "loading", 0.1)
    log.ready("router", "http://r")
    first = log.after(0)
    assert [(one.number, one.kind) for one in first] == [(1, EventKind.PROGRESS), (2, EventKind.READY)]
    log.trouble("decode-0", "died")
    log.gave_up("decode-0", "no memory")
    assert [one.kind for one in log.after(first[-1].number)] == [EventKind.TROUBLE, EventKind.GAVE_UP]
    assert log.after(log.latest) == []


async def test_of_a_name_s_progress_only_the_latest_is_kept() -> None:
    log = EventLog(RecordedEvents())
    for step in range(3):
        log.progress("decode-0", f"step {step}", step / 3)
        log.progress("prefill-0", f"step {step}", step / 3)
    assert [(one.name, one.what) for one in log.after(0)] == [("decode-0", "step 2"), ("prefill-0", "step 2")]


async def test_who_waits_is_woken_by_what_is_new_and_else_by_the_time() -> None:
    log = EventLog(RecordedEvents())
    await log.wait_after(0, 0.01)
    assert log.after(0) == []
    waiting = asyncio.create_task(log.wait_after(0, 60))
    await asyncio.sleep(0)
    log.ready("router", "http://r")
    await waiting
    await log.wait_after(0, 60)  # something newer is there already
    await log.wait_after(99, 60)
    assert [one.number for one in log.after(99)] == [1], "who followed an earlier controller sees all of this one"


async def test_old_events_are_forgotten_and_replaying_says_what_was_said_there() -> None:
    there, here = RecordedEvents(), RecordedEvents()
    log = EventLog(there)
    log.progress("router", "loading", 0.5)
    log.ready("router", "http://r")
    log.trouble("router", "died")
    log.gave_up("prefill-0", "no model")
    replay(log.after(0), here)
    assert here.happened == there.happened
    for number in range(2 * KEPT):
        log.trouble("decode-0", str(number))
    kept = log.after(0)
    assert (len(kept), kept[-1].number) == (KEPT, 2 * KEPT + 4)


async def test_routers_are_told_what_is_paused_and_the_next_controller_knows_it() -> None:
    async with started(*PDD) as rig:
        assert await rig.controller.pause(["decode-1"]) == ["decode-1"]
        await settle()
        assert rig.launcher.router.paused == ["decode-1"]
        assert (await rig.controller.view()).paused == ["decode-1"]
        await rig.next_controller()
        assert rig.launcher.router.paused == ["decode-1"]
        assert "decode-1" in rig.routed, "a paused node stays a member"
        await rig.controller.drain_node("decode-1", 1.0)
        await settle()
        assert (await rig.controller.view()).paused == rig.launcher.router.paused == [], "it took its pause along"
        assert await rig.controller.pause(["decode-0"]) == ["decode-0"]
        assert await rig.controller.pause([]) == ["aggregated", "decode", "decode-0", "encode", "prefill"]
        assert await rig.controller.resume([]) == []
        await settle()
        assert rig.launcher.router.paused == []


async def test_a_node_is_resumed_as_it_was_paused() -> None:
    async with started(*PD) as rig:
        await rig.controller.pause(["decode"])
        with pytest.raises(ConfigurationError, match="paused with its pool: resume decode"):
            await rig.controller.resume(["decode-0"])
        with pytest.raises(ConfigurationError, match="no node decode-7"):
            await rig.controller.pause(["decode-7"])
        assert await rig.controller.resume(["decode"]) == []


async def test_caches_are_emptied_and_routers_forget_what_was_there() -> None:
    async with started(*PD) as rig:
        assert await rig.controller.reset_cache([]) == ["decode-0", "prefill-0"]
        assert await rig.controller.reset_cache(["prefill"]) == ["prefill-0"]
        assert [rig.node(name).resets for name in ("prefill-0", "decode-0")] == [2, 1]
        rig.node("decode-0").mute.set()
        with pytest.raises(Unavailable, match="decode-0 did not confirm"):
            await rig.during(rig.controller.reset_cache([]), TIMEOUTS.unresponsive_s + TIMEOUTS.silence_s)
        assert rig.launcher.router.forgot == [["decode-0", "prefill-0"], ["prefill-0"], ["prefill-0"]]


async def test_the_log_lines_of_those_that_are_named_and_of_all_are_collected() -> None:
    async with started(*PD) as rig:
        for name in ("prefill-0", "decode-0"):
            rig.node(name).log.handle(logging.LogRecord("x", logging.INFO, "", 0, f"of {name}", (), None))
        found = await rig.controller.logs(LogsQuery())
        assert {"controller", "prefill-0", "decode-0"} < found.pages.keys()
        assert found.pages["decode-0"].lines[0].message == "of decode-0"
        assert found.silent == {}
        assert (await rig.controller.logs(LogsQuery(["prefill"]))).pages.keys() == {"prefill-0"}
        assert (await rig.controller.logs(LogsQuery(["controller"]))).pages.keys() == {"controller"}
        with pytest.raises(ConfigurationError, match="no node decode-7"):
            await rig.controller.logs(LogsQuery(["decode-7"]))
        rig.node("decode-0").mute.set()
        found = await rig.during(rig.controller.logs(LogsQuery()), TIMEOUTS.silence_s)
        assert "decode-0" not in found.pages
        assert "reading decode-0's log" in found.silent["decode-0"]
        assert "prefill-0" in found.pages, "one that does not answer keeps no other from it"


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


def with_content(content: str, from_start: int = 0):  # type: ignore[no-untyped-def]
    def prepare(process: FakeProcess, earlier: int) -> None:
        if earlier >= from_start:
            process.info = msgspec.structs.replace(process.info, content=content)  # type: ignore[attr-defined]

    return prepare


async def test_a_node_with_other_weights_is_left_out_and_the_rest_serves() -> None:
    async with Rig(*PDD) as rig:
        rig.launcher.prepare["decode-1"] = with_content("others")
        await rig.start(100)
        (node,) = [n for n in (await rig.controller.view()).nodes if n.phase == ProcessPhase.LEFT_OUT]
        assert node.node_id == "decode-1"
        assert "its model is not the one that this cluster serves" in node.detail
        assert "`tandem apply`" in node.detail
        assert rig.routed == {"prefill-0", "decode-0"}
        assert all("decode-1" not in {m.node_id for m in told} for told in rig.launcher.router.memberships)


async def test_where_the_same_bits_are_required_a_node_that_computes_otherwise_is_left_out() -> None:
    async with Rig(*PD) as rig:
        rig.launcher.prepare["prefill-0"] = with_content("files+avx512")
        rig.launcher.prepare["decode-0"] = with_content("files+avx512")
        await rig.start()
        rig.launcher.prepare["decode-0"] = with_content("files+avx2")
        rig.node("decode-0").die()
        await rig.clock.advance(100)
        (node,) = [n for n in (await rig.controller.view()).nodes if n.phase == ProcessPhase.LEFT_OUT]
        assert "model.exact is require: it computes by avx2, and they by avx512" in node.detail
        assert rig.routed == {"prefill-0"}


async def test_a_node_that_comes_back_with_other_weights_stays_away() -> None:
    """The model's folder has changed. The controller tries the node again, because it has worked before. So does the next one."""
    async with started(*PD) as rig:
        rig.launcher.prepare["decode-0"] = with_content("others", from_start=1)
        rig.node("decode-0").die()
        await rig.clock.advance(100)
        assert rig.routed == {"prefill-0"}
        assert (await phases(rig))["decode-0"] == ProcessPhase.LEFT_OUT
    async with started(*PD) as rig:
        await rig.kill_controller()
        rig.launcher.prepare["decode-0"] = with_content("others", from_start=1)
        await rig.start()
        rig.node("decode-0").die()
        rig.node("prefill-0").die()
        await rig.clock.advance(100)
        assert rig.routed == {"prefill-0"}


async def test_every_node_loads_the_commit_that_the_name_stood_for_at_the_start() -> None:
    async with Rig(*PD) as rig:
        rig.commit = "a" * 40
        await rig.start()
        rig.commit = "b" * 40  # upstream pushes
        await rig.controller.scale({Role.DECODE: 2})
        await settle()
        await rig.next_controller()
        rig.node("prefill-0").die()
        await rig.clock.advance(10)
        await rig.controller.scale({Role.DECODE: 3})
        await settle()
        nodes = [node for nodes in rig.launcher.nodes.values() for node in nodes]
        assert len(nodes) == 5
        assert {node.config.engine.model.path for node in nodes} == {f"org/model@{'a' * 40}"}
        decisions = (await rig.controller.view()).decisions
        assert any("a" * 40 in decision.text for decision in decisions)
