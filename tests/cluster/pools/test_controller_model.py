"""Random sequences of commands and of failures of machines, nodes and the controller: when nothing more happens, the
cluster reaches its wanted state."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Coroutine
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tandem.base.errors import TandemError, Unavailable
from tandem.cluster.config import PoolConfig, PoolsConfig
from tandem.cluster.launcher import Host
from tandem.cluster.pools import plan, state
from tandem.cluster.pools.supervisor import ProcessPhase
from tandem.wire.nodes import Role
from tests.cluster.pools.helpers import FakeHosts, FakeNode, Rig, settle

ROLES = st.sampled_from([Role.PREFILL, Role.DECODE])
LONG_S = 150.0
MAX_HOSTS = 5


class Cluster(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.hosts_made = 0
        self.ends_abruptly = False
        self.under_way: list[asyncio.Task[Any]] = []

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(work)

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            if not self.ends_abruptly:
                self.run(self.check_when_quiet())
            self.run(self.end())
        self.loop.close()

    async def end(self) -> None:
        stop = asyncio.create_task(self.rig.controller.stop())
        await self.rig.clock.advance(LONG_S)
        await stop
        for task in self.under_way:
            task.cancel()
        await asyncio.gather(*self.under_way, return_exceptions=True)
        assert all(process.died.done() for process in self.rig.launcher.everything)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, left

    # --- events

    def new_host(self, prefill: int, decode: int, spare_cores: int) -> Host:
        self.hosts_made += 1
        slots = {Role.PREFILL: prefill, Role.DECODE: decode}
        cores = tuple(range(max(1, prefill + decode + spare_cores)))
        return Host(f"h{self.hosts_made}", f"10.0.0.{self.hosts_made}", cores, slots=slots)

    @initialize(prefill=st.sampled_from([None, 0, 1, 2]), decode=st.sampled_from([None, 1, 2]))
    def begin(self, prefill: int | None, decode: int | None) -> None:
        async def begin() -> None:
            self.rig = Rig(
                pools=PoolsConfig(
                    prefill=PoolConfig(nodes=prefill), decode=PoolConfig(nodes=decode, max=None)
                ),
                hosts=FakeHosts(self.new_host(1, 1, 2)),
            )
            await self.rig.controller.start()
            await settle()

        self.run(begin())

    async def ask(self, request: Coroutine[Any, Any, Any]) -> None:
        """Sends a command's request without waiting for the result."""

        async def answered() -> None:
            with contextlib.suppress(TandemError):  # refused, with a reason
                await request

        self.under_way.append(asyncio.create_task(answered()))
        await settle()

    @rule(role=ROLES, size=st.integers(0, 4))
    def scale(self, role: Role, size: int) -> None:
        self.run(self.ask(self.rig.controller.scale({role: size})))

    def live(self) -> list[FakeNode]:
        return self.rig.launcher.running

    @precondition(lambda self: self.live())
    @rule(data=st.data(), at_once=st.booleans())
    def drain(self, data: st.DataObject, at_once: bool) -> None:
        node = data.draw(st.sampled_from(self.live()))
        if not at_once:
            node.may_finish.clear()
        self.run(self.ask(self.rig.controller.drain_node(node.info.node_id, 20.0)))

    @precondition(lambda self: self.live())
    @rule(data=st.data(), role=ROLES, at_once=st.booleans())
    def change_role(self, data: st.DataObject, role: Role, at_once: bool) -> None:
        node = data.draw(st.sampled_from(self.live()))
        if not at_once:
            node.may_finish.clear()
        self.run(self.ask(self.rig.controller.change_role(node.info.node_id, role)))

    @precondition(lambda self: len(self.rig.hosts.hosts) < MAX_HOSTS)
    @rule(prefill=st.integers(0, 2), decode=st.integers(0, 2), spare=st.integers(-1, 3))
    def host_joins(self, prefill: int, decode: int, spare: int) -> None:
        self.rig.hosts.join(self.new_host(prefill, decode, spare))
        self.run(settle())

    @precondition(lambda self: self.rig.hosts.hosts)
    @rule(data=st.data(), nodes_notice=st.booleans())
    def host_leaves(self, data: st.DataObject, nodes_notice: bool) -> None:
        host = self.rig.hosts.leave(data.draw(st.sampled_from([h.name for h in self.rig.hosts.hosts])))
        for node in self.live():
            if node.host.name == host.name and nodes_notice:
                node.die("its machine is gone")
            elif node.host.name == host.name:
                node.mute.set()
        self.run(settle())

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def node_dies(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.live())).die()
        self.run(settle())

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def node_stops_answering(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.live())).mute.set()
        self.run(settle())

    @rule(role=ROLES, index=st.integers(0, 8), times=st.integers(1, 2))
    def starts_fail(self, role: Role, index: int, times: int) -> None:
        if f"{role.value}-{index}" in self.rig.launcher.prepare:
            return  # a node that has failed three times in a row is left out
        failing = {"left": times}

        def prepare(process: Any, earlier: int) -> None:
            if failing["left"]:
                failing["left"] -= 1
                process.start_error = Unavailable("not now")

        self.rig.launcher.prepare[f"{role.value}-{index}"] = prepare

    @rule()
    def controller_is_killed(self) -> None:
        async def killed() -> None:
            self.rig.hosts.forget_waiters()
            await self.rig.kill_controller()
            await self.ask(self.rig.controller.start())

        self.run(killed())

    @rule(seconds=st.sampled_from([0.5, 2.0, 10.0, 60.0]))
    def time_passes(self, seconds: float) -> None:
        self.run(self.rig.clock.advance(seconds))

    # --- invariants

    @invariant()
    def one_process_for_each_id(self) -> None:
        if hasattr(self, "rig"):
            ids = Counter(node.info.node_id for node in self.live())
            assert not [node_id for node_id, count in ids.items() if count > 1]

    @invariant()
    def no_machine_holds_more_than_it_offers(self) -> None:
        if hasattr(self, "rig"):
            taken = Counter((node.host.name, node.slot) for node in self.live())
            for host in self.rig.hosts.hosts:
                for role in Role:
                    assert taken[host.name, role] <= (host.slots or {}).get(role, 0)

    @rule(abruptly=st.booleans())
    def will_end(self, abruptly: bool) -> None:
        """Sets how the controller ends at last. Even if it is stopped in the middle of something, it must leave no process behind."""
        self.ends_abruptly = abruptly

    @rule()
    def when_quiet(self) -> None:
        self.run(self.check_when_quiet())

    async def check_when_quiet(self) -> None:
        for node in self.live():
            node.may_finish.set()
        await self.rig.clock.advance(LONG_S)
        assert not await self.failure()
        kept = state.decode(await self.rig.store.load() or b"")
        view = await self.rig.controller.view()
        hosts = self.rig.hosts.hosts
        assert not [record for record in kept.nodes if record.leaving], "what had to go is gone"
        running = {node.info.node_id: node for node in self.live()}
        placed = {record.node_id: record for record in kept.nodes if record.placement is not None}
        assert set(running) == set(placed), "every process belongs to a node, and every node has one"
        assert {node.node_id for node in view.nodes if node.phase == ProcessPhase.READY} == set(placed)
        assert self.rig.routed == set(placed), "routers know them all"
        for node_id, record in placed.items():
            assert running[node_id].config.role is record.role
            assert record.placement is not None
            assert running[node_id].host.name == record.placement.host
        offered = Counter({(h.name, role): n for h in hosts for role, n in (h.slots or {}).items()})
        offered -= Counter((slot.host, slot.role) for slot in kept.closed)
        taken = Counter((r.placement.host, r.placement.slot) for r in placed.values() if r.placement)
        for pool in view.pools:
            mine = kept.staying(pool.role)
            assert len(mine) == pool.wanted == plan.wanted_size(kept, hosts, pool.role, self.rig.config.pools)
            if kept.sizes[pool.role] is not None:
                assert pool.wanted == kept.sizes[pool.role]
            waiting = [record for record in mine if record.placement is None]
            room = sum(n - taken[key] for key, n in offered.items() if key[1] is pool.role)
            assert not (waiting and room > 0), f"{waiting} wait although there is room: {offered} {taken}"
        assert +Counter(self.rig.hosts.wanted) == +Counter(plan.needed_slots(kept, self.rig.config.pools))
        self.check_cores()

    def check_cores(self) -> None:
        for host in self.rig.hosts.hosts:
            given = [core for n in self.live() if n.host.name == host.name for core in n.config.cores]
            assert all(node.config.cores for node in self.live())
            if len(host.cores) >= sum((host.slots or {}).values()):
                assert len(given) == len(set(given)), f"{host.name}: {given}"

    async def failure(self) -> str:
        return (await self.rig.controller.view()).failure


TestCluster = pytest.mark.slow(Cluster.TestCase)  # hundreds of steps, minutes of the controller's time each
TestCluster.settings = settings(max_examples=10, stateful_step_count=20, deadline=None)
