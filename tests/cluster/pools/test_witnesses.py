"""A process that serves is not ended because the controller cannot reach it: routers vouch for nodes, and clients and nodes
for routers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec
import pytest

from tandem.cluster.launcher import Host
from tandem.wire.nodes import NodeSighting, NodeState, Role
from tests.cluster.pools.helpers import TIMEOUTS, FakeHosts, FakeNode, Rig, endpoint_of, settle, started
from tests.cluster.pools.pools_rig import EVERY_HOST, PD, machine, machines, pool_of, pools

QUICK = msgspec.structs.replace(TIMEOUTS, start_s=30.0)
FOR_GOOD = 2 * QUICK.start_s  # longer than any wait
LONG_ENOUGH = TIMEOUTS.unresponsive_s + 2 * (TIMEOUTS.silence_s + TIMEOUTS.heartbeat_s)


async def test_a_node_that_routers_hear_is_left_as_it_is() -> None:
    """Calls to it fail; its tokens flow."""
    async with started(*PD, timeouts=QUICK) as rig:
        node = rig.node("decode-0")
        node.mute.set()
        node.silent_s = 0.1
        await rig.clock.advance(FOR_GOOD)
        assert not node.stopped
        assert rig.routed == {"prefill-0", "decode-0"}
        said = rig.events.of("trouble", "decode-0")
        assert said[1:] == ["does not answer the controller, but routers hear it: it is kept"], (
            "once, and not every second"
        )
        node.silent_s = None  # now it is silent to all
        await rig.clock.advance(LONG_ENOUGH)
        assert node.stopped
        assert rig.node("decode-0") is not node
        assert "routers have not heard from it for" in rig.events.of("trouble", "decode-0")[-1]


@pytest.mark.parametrize("trouble", [{"step_age_s": TIMEOUTS.step_s + 1}, {"state": NodeState.FAILED}])
async def test_what_routers_hear_of_it_may_be_the_reason_to_replace_it(trouble: dict[str, object]) -> None:
    async with started(*PD, timeouts=QUICK) as rig:
        node = rig.node("decode-0")
        node.mute.set()
        node.silent_s = 0.1
        await rig.clock.advance(LONG_ENOUGH)
        assert not node.stopped
        for name, value in trouble.items():
            setattr(node, name, value)
        await rig.clock.advance(LONG_ENOUGH)
        assert node.stopped


async def test_a_node_is_left_alone_while_no_router_can_be_asked() -> None:
    """All processes are silent, so the controller itself must be cut off."""
    async with started(*PD, timeouts=QUICK) as rig:
        for process in rig.launcher.everything:
            process.mute.set()
        await rig.clock.advance(FOR_GOOD)
        assert not any(process.stopped for process in rig.launcher.everything)
        rig.launcher.router.serves = True  # all along, and the nodes heard it
        for process in rig.launcher.everything:
            process.mute.clear()
        await rig.clock.advance(LONG_ENOUGH)
        assert rig.routed == {"prefill-0", "decode-0"}
        assert len(rig.launcher.everything) == 3, "nothing was started again"


@pytest.mark.parametrize("heard_by", ["clients", "nodes"])
async def test_a_router_that_somebody_hears_is_left_as_it_is(heard_by: str) -> None:
    async with started(*PD, timeouts=QUICK) as rig:
        router, node = rig.launcher.router, rig.node("decode-0")
        router.mute.set()
        if heard_by == "clients":
            router.serves = True
        else:
            node.heard = [endpoint_of("router", 0)]
        await rig.clock.advance(FOR_GOOD)
        assert not router.stopped
        assert len(rig.events.of("trouble", "router")) == 1
        router.serves, node.heard = False, [endpoint_of("router-10.0.0.9", 0)]  # another one
        await rig.clock.advance(LONG_ENOUGH)
        assert router.stopped
        assert rig.launcher.router is not router


async def test_one_router_vouches_for_a_node_although_another_does_not_hear_it() -> None:
    async with started(pools=pools(1, 1), hosts=machines("p", "d"), config=EVERY_HOST, timeouts=QUICK) as rig:
        await settle()
        node = rig.node("decode-0")
        *near, far = rig.launcher.routers
        assert near
        node.mute.set()
        node.silent_s = 0.1
        far.hears = lambda info: NodeSighting(info.node_id, info.epoch, 1e6)
        await rig.clock.advance(FOR_GOOD)
        assert not node.stopped
        for one in near:
            one.mute.set()
            one.serves = True
        await rig.clock.advance(LONG_ENOUGH)
        assert node.stopped, "the one that can be asked does not hear it"


@dataclass
class CutOff:
    """Three machines. The controller lost sight of one of them, but routers still receive messages from its node."""

    rig: Rig
    node: FakeNode
    machine: Host
    hosts: FakeHosts
    routed: set[str]  # before

    async def kill_controller_for(self, seconds: float) -> None:
        """Kills the controller. The next one starts at once, and cannot reach the machine either."""
        await self.rig.next_controller(seconds)

    async def is_seen_again(self) -> None:
        self.node.mute.clear()
        self.hosts.join(self.machine)
        await self.rig.clock.advance(LONG_ENOUGH)


@asynccontextmanager
async def cut_off(sizes: tuple[int | None, int | None]) -> AsyncIterator[CutOff]:
    hosts = machines("p", "d", "d")
    async with started(pools=pools(*sizes), hosts=hosts, timeouts=QUICK) as rig:
        await settle()
        (node,) = [node for node in rig.launcher.running if node.host.name == "2"]
        routed = rig.routed
        node.mute.set()
        node.silent_s = 0.1
        yield CutOff(rig, node, hosts.leave("2"), hosts, routed)


@pytest.mark.parametrize("sizes", [(1, 2), (None, None)], ids=["sizes", "follows machines"])
async def test_a_controller_that_was_killed_meanwhile_leaves_a_machine_that_it_never_saw_as_it_is(
    sizes: tuple[int | None, int | None],
) -> None:
    async with cut_off(sizes) as cut:
        rig, node = cut.rig, cut.node
        name = node.info.node_id
        await cut.kill_controller_for(FOR_GOOD)
        assert not node.stopped
        assert len(rig.launcher.nodes[name]) == 1, "none was started beside it"
        assert rig.routed == cut.routed
        await cut.is_seen_again()
        assert not node.stopped
        assert len(rig.launcher.nodes[name]) == 1
        assert rig.routed == cut.routed
        # Now it ends, as any other.
        node.die()
        await rig.clock.advance(LONG_ENOUGH)
        assert len(rig.launcher.nodes[name]) == 2
        assert rig.routed == cut.routed


async def test_what_such_a_machine_had_is_given_up_when_routers_no_longer_hear_it() -> None:
    async with cut_off((None, None)) as cut:
        rig, node = cut.rig, cut.node
        await cut.kill_controller_for(LONG_ENOUGH)
        before = rig.routed
        assert node.info.node_id in before
        node.silent_s = None
        await rig.clock.advance(LONG_ENOUGH)
        assert rig.routed == before - {node.info.node_id}
        assert any("its machine 10.0.0.2 is gone" in text for text in await rig.decided())
        assert node.stopped, "Ray ends it when its machine is seen again"


@pytest.mark.parametrize("sizes", [(1, 2), (None, None)], ids=["sizes", "follows machines"])
async def test_a_machine_that_is_not_seen_keeps_what_routers_hear(sizes: tuple[int | None, int | None]) -> None:
    """Ray takes a machine for dead if its control network is cut, while its nodes still send tokens."""
    async with cut_off(sizes) as cut:
        rig, node = cut.rig, cut.node
        await rig.clock.advance(FOR_GOOD)
        assert not node.stopped
        assert rig.routed == cut.routed
        kept = "the machine 10.0.0.2 is not seen, but its processes are heard: it is kept"
        assert [text for text in await rig.decided() if "not seen" in text] == [kept], "once"
        await cut.is_seen_again()
        assert not node.stopped
        assert rig.routed == cut.routed
        # Now it is gone for all.
        rig.lose_machine("2")
        node.silent_s = None
        await settle()
        assert rig.routed == cut.routed - {node.info.node_id}
        assert any("its machine 10.0.0.2 is gone" in text for text in await rig.decided())


async def test_nothing_is_placed_on_a_machine_that_is_not_seen() -> None:
    hosts = machines("p", "dd")
    async with started(pools=pools(1, 1), hosts=hosts) as rig:
        await settle()
        hosts.leave("2")
        await settle()
        await rig.controller.scale({Role.DECODE: 2})
        await settle()
        assert rig.routed == {"prefill-0", "decode-0"}
        assert (await pool_of(rig, Role.DECODE)).waiting_for_machines == 1
        hosts.join(machine("3", decode=1))
        await settle()
        assert rig.routed == {"prefill-0", "decode-0", "decode-1"}


async def test_a_controller_that_stood_still_holds_nobody_responsible_for_it() -> None:
    """The controller is stopped for minutes while it asks its processes. When it continues, all deadlines have passed at once."""
    async with started(*PD, timeouts=QUICK) as rig:
        for process in rig.launcher.everything:
            process.mute.set()  # an answer is under way
        await settle()
        rig.clock.stand_still(FOR_GOOD)
        await rig.clock.advance(0.1)
        for process in rig.launcher.everything:
            process.mute.clear()
        await rig.clock.advance(LONG_ENOUGH)
        assert not any(process.stopped for process in rig.launcher.everything)
