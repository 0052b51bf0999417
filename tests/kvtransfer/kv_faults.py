"""Injects faults into a real transport and real sockets, at random moments drawn from a seed."""

from __future__ import annotations

import dataclasses
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from tandem.base.errors import TransferError
from tandem.kvtransfer.base import ConnectorContext, KVCacheMemory, SchedulerConnector, WorkerConnector
from tandem.kvtransfer.nixl import transport_over
from tandem.kvtransfer.nixl.options import NixlOptions
from tandem.kvtransfer.nixl.staging import StagedTransport
from tandem.kvtransfer.nixl.transport import BlockArray, NixlAgent, NixlTransport
from tandem.kvtransfer.protocol.endpoint import SideChannel
from tandem.kvtransfer.protocol.halves import SchedulerHalf, Surroundings, WorkerHalf
from tandem.kvtransfer.protocol.settings import ProtocolOptions
from tandem.kvtransfer.protocol.transport import Direction, HandleId, Move, RemoteId, Transport
from tandem.wire.handoff import CacheMemory, HandoffMessage


@dataclasses.dataclass
class Faults:
    """The probability of each fault, per call or message."""

    seed: int = 0
    connect_fails: float = 0.0
    post_fails: float = 0.0
    move_fails: float = 0.0
    move_sticks: float = 0.0  # it stalls for longer than a tick and shorter than a lease
    lost: float = 0.0
    doubled: float = 0.0
    late: float = 0.0  # a late message, which others overtake

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)

    def strikes(self, probability: float) -> bool:
        return self.chance.random() < probability


FAULTS: dict[str, dict[str, float]] = {
    "none": {},
    "set-up fails": {"connect_fails": 0.5},
    "a move cannot be started": {"post_fails": 0.15},
    "a move fails": {"move_fails": 0.15},
    "moves are stuck for a while": {"move_sticks": 0.5},
    "messages are lost": {"lost": 0.2},
    "messages are doubled": {"doubled": 0.5},
    "messages overtake each other": {"late": 0.5},
    "everything at once": {
        "connect_fails": 0.05,
        "post_fails": 0.03,
        "move_fails": 0.03,
        "move_sticks": 0.2,
        "lost": 0.1,
        "doubled": 0.1,
        "late": 0.2,
    },
}


class FaultyTransport(Transport):
    name = "faulty"

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self.faults = Faults()
        self._stuck: dict[HandleId, float] = {}
        self._doomed: set[HandleId] = set()
        self.live: set[HandleId] = set()
        self.disconnects = 0

    @property
    def is_staged(self) -> bool:  # type: ignore[override]
        return self._inner.is_staged

    def register(self, memory: KVCacheMemory) -> CacheMemory:
        return self._inner.register(memory)

    def connect(self, memory: CacheMemory) -> RemoteId:
        if self.faults.strikes(self.faults.connect_fails):
            raise TransferError("injected: no connection")
        return self._inner.connect(memory)

    def disconnect(self, remote: RemoteId) -> None:
        self.disconnects += 1
        self._inner.disconnect(remote)

    def post(self, remote: RemoteId, move: Move) -> HandleId:
        if self.faults.strikes(self.faults.post_fails):
            raise TransferError("injected: not posted")
        handle = self._inner.post(remote, move)
        self.live.add(handle)
        if self.faults.strikes(self.faults.move_sticks):
            self._stuck[handle] = time.monotonic() + self.faults.chance.uniform(0.01, 0.2)
        if self.faults.strikes(self.faults.move_fails):
            self._doomed.add(handle)
        return handle

    def is_done(self, handle: HandleId) -> bool:
        if time.monotonic() < self._stuck.get(handle, 0.0):
            return False
        try:
            done = self._inner.is_done(handle)
        except TransferError:
            self.live.discard(handle)
            raise
        if done:
            self.live.discard(handle)
            self._stuck.pop(handle, None)
            if handle in self._doomed:
                self._doomed.discard(handle)
                raise TransferError("injected: the move failed")
        return done

    def cancel(self, handle: HandleId) -> bool:
        over = self._inner.cancel(handle)
        if over:
            self.live.discard(handle)
            self._stuck.pop(handle, None)
            self._doomed.discard(handle)
        return over

    def close(self) -> None:
        self._inner.close()


def _as_inside(name: str) -> Callable[..., Any]:
    return lambda transport, *given: getattr(transport._inner, name)(*given)


for _name in vars(Transport):
    if callable(getattr(Transport, _name)) and not _name.startswith("_") and _name not in vars(FaultyTransport):
        setattr(FaultyTransport, _name, _as_inside(_name))


class FaultySend:
    def __init__(self, send: Callable[[str, msgspec.Struct], None]) -> None:
        self._send = send
        self.faults = Faults()
        self._timers: list[threading.Timer] = []

    def __call__(self, endpoint: str, message: msgspec.Struct) -> None:
        faults = self.faults
        if faults.strikes(faults.lost):
            return
        if faults.strikes(faults.doubled):
            self._send(endpoint, message)
        if faults.strikes(faults.late):
            timer = threading.Timer(faults.chance.uniform(0.0, 0.1), self._send, (endpoint, message))
            timer.daemon = True
            timer.start()
            self._timers = [other for other in self._timers if other.is_alive()] + [timer]
            return
        self._send(endpoint, message)

    def join(self) -> None:
        for timer in self._timers:
            timer.join()


def nixl(context: ConnectorContext) -> tuple[SchedulerConnector, WorkerConnector]:
    agent = NixlAgent(f"{context.node_id}-{context.epoch:x}", NixlOptions())
    return _create(context, transport_over(agent, context.rank_lines))


def device_nixl(context: ConnectorContext) -> tuple[SchedulerConnector, WorkerConnector]:
    """A NIXL connector for the fake device of tests.engine.model, whose memory is host memory."""
    return _create(context, _for_device(context))


def staged_nixl(context: ConnectorContext) -> tuple[SchedulerConnector, WorkerConnector]:
    """As `device_nixl`, but through a staging copy in host memory."""
    return _create(context, StagedTransport(_for_device(context)))


class HostAgent(NixlAgent):
    """Takes the fake device's memory for what it is: the host's."""

    def register(self, memory_type: str, address: int, num_bytes: int, device_id: int) -> None:
        super().register("DRAM", address, num_bytes, device_id)

    def prepare(self, remote: str | None, memory_type: str, blocks: BlockArray) -> int:
        return super().prepare(remote, "DRAM", blocks)


def _for_device(context: ConnectorContext) -> Transport:
    return NixlTransport(HostAgent(f"{context.node_id}-{context.epoch:x}", NixlOptions()))


def nccl(context: ConnectorContext) -> tuple[SchedulerConnector, WorkerConnector]:
    # Imported here: it is a wing.
    from tandem.kvtransfer.nccl.options import NcclOptions
    from tandem.kvtransfer.nccl.transport import NcclTransport

    return _create(context, NcclTransport(context.node_id, context.host, NcclOptions()))


def _create(context: ConnectorContext, inner: Transport) -> tuple[SchedulerConnector, WorkerConnector]:
    transport = FaultyTransport(inner)
    options = ProtocolOptions(layerwise_tokens=8)
    sends: list[FaultySend] = []

    def channel(host: str, name: str, on_message: Callable[[HandoffMessage], None]) -> SideChannel:
        made = SideChannel(host, name, on_message)
        sends.append(FaultySend(made.send))
        made.send = sends[0]  # type: ignore[method-assign]
        return made

    around = Surroundings(channel=channel)
    worker = WorkerHalf(context, transport, Direction(context.config.direction), options, around)
    faulty: Any = worker
    faulty.faulty_transport, faulty.faulty_send = transport, *sends
    return SchedulerHalf(context.block_size), worker


def inject(worker: WorkerConnector, faults: Faults) -> None:
    faulty: Any = worker
    faulty.faulty_transport.faults = faulty.faulty_send.faults = faults
