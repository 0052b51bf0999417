"""The pools of simulated nodes and the machines that they run on; pools grow and shrink as the product's autoscaler decides."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping

import msgspec

from tandem.cluster.pools.autoscaling.autoscaler import Autoscaler
from tandem.cluster.pools.autoscaling.rules import PoolBounds, Resize
from tandem.cluster.tasks import Clock
from tandem.decode_node.node import DecodeRules
from tandem.node.requests import RoleRules
from tandem.prefill_node.node import PrefillRules
from tandem.simulator.machine import SharedCores, SharedMachine
from tandem.simulator.network import Network
from tandem.simulator.node import NextLook, SimulatedNode
from tandem.simulator.outcome import AnswerLog, NodeLoad, SizeChange
from tandem.simulator.setup import SimulationSetup
from tandem.wire.nodes import ENGINE_ROLES, NodeInfo, NodeState, Role
from tandem.wire.requests import NodeStatus, TokenBatch

_RULES: Mapping[Role, Callable[[], RoleRules]] = {
    Role.PREFILL: PrefillRules,
    Role.DECODE: lambda: DecodeRules(Role.DECODE),
    Role.AGGREGATED: lambda: DecodeRules(Role.AGGREGATED),
}


class VirtualClock(Clock):
    def now(self) -> float:
        return asyncio.get_running_loop().time()


@dataclasses.dataclass(slots=True)
class _SimulatedPool:
    role: Role
    wanted: int
    nodes: list[SimulatedNode] = dataclasses.field(default_factory=list)
    going: list[SimulatedNode] = dataclasses.field(default_factory=list)
    starting: int = 0


class SimulatedPools:
    def __init__(
        self,
        setup: SimulationSetup,
        network: Network,
        outcome: AnswerLog,
        tell: Callable[[TokenBatch], None],
        on_members: Callable[[], None],
    ) -> None:
        self._setup = setup
        self._config, self._costs = setup.config, setup.costs
        self._network = network
        self._outcome = outcome
        self._tell = tell
        self._on_members = on_members
        self._machines_left = setup.machines
        self._shared = SharedMachine() if setup.one_machine else None
        self._shared_cores = SharedCores()
        used = Counter(core for of_role in setup.cores.values() for one in of_role for core in one)
        self._contended = {core for core, nodes in used.items() if nodes > 1}
        self._free: list[Role] = []  # one entry per free machine: the role of its last node
        self._count = 0
        self._loop = asyncio.get_running_loop()
        self._pools = {role: _SimulatedPool(role, setup.config.pools.of(role).first_size) for role in ENGINE_ROLES}
        self._tasks: set[asyncio.Task[None]] = set()
        self._gone: list[NodeLoad] = []
        self.changes: list[SizeChange] = []
        self.role_changes = 0
        self.by_id: dict[str, SimulatedNode] = {}
        self.next_look = NextLook()
        for pool in self._pools.values():
            for _ in range(pool.wanted):
                self._take_machine(pool.role)
                self._add(pool)

    @property
    def nodes(self) -> list[SimulatedNode]:
        """All nodes that routers know, draining ones included."""
        return list(self.by_id.values())

    def statuses(self) -> list[NodeStatus]:
        return [node.status() for pool in self._pools.values() for node in pool.nodes]

    def _add(self, pool: _SimulatedPool) -> None:
        costs, engine = self._costs[pool.role], self._config.engine_of(pool.role)
        of_role = self._setup.cores.get(pool.role, ())
        cores = of_role[len(pool.nodes)] if len(pool.nodes) < len(of_role) else frozenset[str]()
        scheduler, cache = engine.scheduler, engine.cache
        self._count += 1
        name = f"{pool.role.value}-{self._count}"
        blocks = costs.blocks * costs.block_size // cache.block_size
        longest = min(costs.max_model_len, scheduler.max_model_len or costs.max_model_len)
        model = self._config.router.model_name
        info = NodeInfo(
            name,
            pool.role,
            self._count,
            f"sim://{name}",
            f"sim://{name}",
            model,
            longest,
            cache.block_size,
            pin_seconds=scheduler.pins_for_s,
        )
        node = SimulatedNode(
            self._loop,
            info,
            _RULES[pool.role](),
            msgspec.structs.replace(costs, blocks=blocks, block_size=cache.block_size),
            scheduler,
            cache,
            self._network,
            self._outcome,
            self._tell,
            self.next_look,
            machine=self._shared_cores if not self._contended.isdisjoint(cores) else self._shared,
            by_steps=self._setup.by_steps,
        )
        self._shared_cores.bind(node, cores)
        pool.nodes.append(node)
        self.by_id[name] = node

    # --- for the autoscaler

    def bounds(self) -> list[PoolBounds]:
        return [
            PoolBounds(
                role=role,
                wanted=pool.wanted,
                min_nodes=limits.min,
                max_nodes=limits.max,
                is_settled=not pool.starting and not pool.going,
                is_waiting=len(pool.nodes) + pool.starting < pool.wanted,
            )
            for role, pool in self._pools.items()
            if (limits := self._config.pools.of(role)).max is not None
        ]

    async def resize(self, resize: Resize) -> None:
        pool = self._pools[resize.role]
        self.changes.append(SizeChange(self._loop.time(), resize.role.value, resize.size, resize.why))
        pool.wanted = resize.size
        while len(pool.nodes) > pool.wanted:
            node = min(pool.nodes, key=lambda node: (len(node.held()), node.info.node_id))
            pool.nodes.remove(node)
            pool.going.append(node)
            node.state = NodeState.DRAINING
        self._fill()

    def _fill(self) -> None:
        for pool in self._pools.values():
            while len(pool.nodes) + pool.starting < pool.wanted and self._take_machine(pool.role):
                pool.starting += 1
                task = self._loop.create_task(self._start(pool))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    def _take_machine(self, role: Role) -> bool:
        if self._free:
            self.role_changes += self._free.pop() is not role
            return True
        if self._machines_left is None:
            return True
        if self._machines_left == 0:
            return False
        self._machines_left -= 1
        return True

    async def _start(self, pool: _SimulatedPool) -> None:
        await asyncio.sleep(self._costs[pool.role].start_s)
        pool.starting -= 1
        self._add(pool)
        self._on_members()

    def retire(self) -> None:
        """Removes the draining nodes that have no work left, and reuses their machines. Must be called periodically."""
        for pool in self._pools.values():
            for node in [node for node in pool.going if node.is_idle]:
                pool.going.remove(node)
                del self.by_id[node.info.node_id]
                self._gone.append(node.load())
                self._free.append(pool.role)
                self._on_members()
        self._fill()

    def autoscaler(self, say: Callable[[str], None]) -> Autoscaler | None:
        """The product's autoscaler for these pools; None if no pool may change its size."""
        if not self.bounds():
            return None
        # These pools do not know the router's queue, so the autoscaler is told that nothing waits there.
        return Autoscaler(self._config, VirtualClock(), self.statuses, lambda: 0.0, self.bounds, self.resize, say)

    async def stop(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def bytes_moved(self) -> float:
        return self._network.bytes_moved

    def loads(self) -> list[NodeLoad]:
        return [*self._gone, *(node.load() for node in self.by_id.values())]
