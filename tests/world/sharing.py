"""Tiers that nodes share: copies from another node's tier, and mirrors of running requests. The product's, over the world's network
and moves. Everything here is drawn from a generator of its own."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import msgspec

from tandem.kvtransfer.base import ConnectorContext
from tandem.kvtransfer.config import ChecksumPolicy, TransferConfig
from tandem.kvtransfer.offload.exchange import ChecksummedAnswer, Exchange, RemoteRead
from tandem.kvtransfer.sources import ASK_S
from tandem.router.config import PolicyName
from tandem.wire.nodes import Role
from tandem.wire.sharing import LEASE_S, SharingMessage
from tests.world.moves import Fabric, WorldTransport
from tests.world.network import Network, WorldChannel
from tests.world.process import Process, Timer

SHARE = 0.6  # of the schedules whose nodes have a tier in memory
STALLS = 0.15  # of the copies


class Sharing:
    """What the nodes of a schedule share."""

    def __init__(self, seed: int, has_memory: bool) -> None:
        rng = random.Random(f"sharing {seed}")
        self.exists = has_memory and rng.random() < SHARE
        self.remote, self.mirror = rng.choice([(True, False), (True, True), (True, True), (False, True)])
        # Without checksums nothing but leases and generations keeps foreign bytes out.
        self.checksums = rng.choice([ChecksumPolicy.ALL, ChecksumPolicy.OFF])
        # A node copies what it lacks, so requests go to nodes that lack something
        self.spreads = self.exists and self.remote and rng.random() < 0.8
        self._stalls = random.Random(f"stalls {seed}")
        self.stalls = self._stalls.random() < 0.5  # until all is well, some copies outlive their lease

    def stall_s(self) -> float:
        """How much longer the next copy takes."""
        if not self.stalls or self._stalls.random() > STALLS:
            return 0.0
        return self._stalls.uniform(0.5, 1.3) * LEASE_S

    @property
    def router_settings(self) -> dict[str, PolicyName]:
        return {"policy": PolicyName.ROUND_ROBIN} if self.spreads else {}

    def layout(self, nodes: list[tuple[str, Role]]) -> list[tuple[str, Role]]:
        if not self.spreads or len(nodes) > 3:
            return nodes
        role = nodes[0][1]
        return [(f"{role.value}-{i}", role) for i in range(2)] + [node for node in nodes if node[1] is not role]

    def context(self, context: ConnectorContext) -> ConnectorContext:
        if not self.exists:
            return context
        transfer: TransferConfig = msgspec.structs.replace(context.config, checksums=self.checksums)
        return msgspec.structs.replace(context, remote=self.remote, mirror=self.mirror, config=transfer)


class WorldExchange(Exchange):
    """Takes the turns of the exchange's thread on the world's clock."""

    def __init__(
        self,
        context: ConnectorContext,
        network: Network,
        fabric: Fabric,
        process: Process,
        are_let_go: Callable[[Iterable[int]], int],
        stall_s: Callable[[], float],
    ) -> None:
        """`are_let_go`: how many of these places wait for no copy."""
        transport = WorldTransport(fabric, process, " tier")
        transport.stall_s = stall_s
        transport.flips = 0.03 if context.config.checksums is ChecksumPolicy.ALL else 0.0
        fabric.num_free_among[transport.memory_name] = are_let_go
        self._timer = Timer(process, self._take_turn)
        transport.wake = lambda: self._timer.within(0.0)
        super().__init__(
            context.node_id,
            context.epoch,
            "10.0.0.1",
            transport,
            context.wake,
            process.clock,
            lambda host, name, on_message, clock: WorldChannel(network, process, on_message, SharingMessage),
        )

    def _start(self) -> None:
        self._timer.within(0.0)

    def read(self, reading: RemoteRead) -> None:
        super().read(reading)
        self._timer.within(0.0)

    def answer(self, answer: ChecksummedAnswer) -> None:
        super().answer(answer)
        self._timer.within(0.0)

    def _take_turn(self) -> float:
        self.turn(0.0)
        while not self._posted.empty():
            self.turn(0.0)
        return ASK_S
