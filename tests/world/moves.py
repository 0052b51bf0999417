"""Moves of blocks between the memories of the world's nodes. A move takes its time, may stall, fail half-way, or flip a bit; what was
posted by a process that has ended may still arrive for a while."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable

import msgspec
import numpy as np

from tandem.base.errors import TransferError
from tandem.kvtransfer.base import KVCacheMemory
from tandem.kvtransfer.memory import flat_bytes
from tandem.kvtransfer.protocol.transport import HandleId, Move, Operation, RemoteId, Transport
from tandem.wire.handoff import CacheMemory, ProcessIdentity
from tests.world.process import Process


@dataclasses.dataclass
class MoveWeather:
    fails: float = 0.0
    flips: float = 0.0
    stalls: float = 0.0  # takes some seconds
    bytes_per_s: float = 50e6


class Fabric:
    """All nodes' memory, by the names in their metadata."""

    def __init__(self, rng: random.Random, note: Callable[[str], None]) -> None:
        self.rng = rng
        self.note = note
        self.weather = MoveWeather()
        self.bytes: dict[str, np.ndarray] = {}
        # How many of these blocks of a node's memory are free
        self.num_free_among: dict[str, Callable[[set[int]], int]] = {}
        self.on_broken: Callable[[str], None] = lambda what: None
        self.is_cut: Callable[[str, str], bool] = lambda source, target: False
        self.moved = 0
        self.flipped = 0
        self.machine_of: dict[str, str] = {}
        self.ways: dict[str, list[int]] = {}
        # When the link between two nodes is free again
        self.busy_until: dict[tuple[str, str], float] = {}


@dataclasses.dataclass
class _Posted:
    remote: str
    way: int
    state: str = "moving"


class WorldTransport(Transport):
    name = "world"

    def __init__(self, fabric: Fabric, process: Process, what: str = "") -> None:
        """`what`: which memory of the process it reaches, besides the device's."""
        self._fabric = fabric
        self._process = process
        self.memory_name = f"{process.name}{what}@{process.identity.pid}"
        self._remotes: dict[RemoteId, tuple[str, int]] = {}
        self._posted: dict[HandleId, _Posted] = {}
        self._ids = itertools.count(1)
        self.wake: Callable[[], None] = lambda: None
        self.flips: float | None = None  # how likely a bit flips on the way; None: as the weather is
        self.stall_s: Callable[[], float] = lambda: 0.0  # how much longer the next move takes
        self._ways = [0]  # through which our memory is reached

    def register(self, memory: KVCacheMemory) -> CacheMemory:
        flat = flat_bytes(memory.tensor).numpy()
        self._fabric.bytes[self.memory_name] = flat
        self._fabric.ways[self.memory_name] = self._ways
        self._fabric.machine_of[self.memory_name] = self._process.machine
        self._memory = CacheMemory(
            agent_metadata=f"{self.memory_name}#0".encode(),
            memory_type="DRAM",
            device_id=0,
            base_address=1 << 20,
            num_blocks=memory.num_blocks,
            block_bytes=len(flat) // memory.num_blocks,
        )
        self._process.on_end.append(self._on_end)
        return self._memory

    def _on_end(self) -> None:
        self._fabric.bytes.pop(self.memory_name, None)

    def connect(self, memory: CacheMemory) -> RemoteId:
        remote = RemoteId(next(self._ids))
        name, _, way = memory.agent_metadata.decode().rpartition("#")
        self._remotes[remote] = name, int(way)
        return remote

    def disconnect(self, remote: RemoteId) -> None:
        self._remotes.pop(remote)

    def post(self, remote: RemoteId, move: Move) -> HandleId:
        fabric, rng = self._fabric, self._fabric.rng
        handle = HandleId(next(self._ids))
        there, way = self._remotes[remote]
        posted = self._posted[handle] = _Posted(there, way)
        now = self._process.loop.time()
        link = (self.memory_name, there)
        at = max(now, fabric.busy_until.get(link, 0.0)) + 0.0001 + move.num_bytes / fabric.weather.bytes_per_s
        if rng.random() < fabric.weather.stalls:
            at += rng.uniform(0.5, 8.0)
        fabric.busy_until[link] = at
        at += self.stall_s()  # of this one alone: the link goes on
        fails = rng.random() < fabric.weather.fails
        flips = rng.random() < (fabric.weather.flips if self.flips is None else self.flips)
        self._process.loop.call_at(at, self._complete, posted, move, fails, flips)
        return handle

    def _complete(self, posted: _Posted, move: Move, fails: bool, flips: bool) -> None:
        fabric = self._fabric
        ours, theirs = fabric.bytes.get(self.memory_name), fabric.bytes.get(posted.remote)
        # A process that has ended moves nothing more, and nothing reaches the memory of one.
        if ours is None or theirs is None or not self._process.is_alive:
            posted.state = "failed"
            return
        source, target = self._process.machine, fabric.machine_of[posted.remote]
        if move.operation is Operation.WRITE and posted.way not in fabric.ways[posted.remote]:
            posted.state = "failed"
            return
        if fabric.is_cut(source, target) or fabric.is_cut(target, source):
            # An unreliable way: it is tried again until the link is back, as the transport's own library does.
            self._process.loop.call_later(0.5, self._complete, posted, move, fails, flips)
            return
        unit = move.unit_bytes
        count = len(move.local) // 2 if fails else len(move.local)
        local = (move.local[:count, None] * unit + np.arange(unit)).ravel()
        remote = (move.remote[:count, None] * unit + np.arange(unit)).ravel()
        if move.operation is Operation.WRITE:
            theirs[remote] = ours[local]
            written, where, name = theirs, remote, posted.remote
        else:
            ours[local] = theirs[remote]
            written, where, name = ours, local, self.memory_name
        if flips and count:
            written[where[len(where) // 2]] ^= 1
            fabric.flipped += 1
            fabric.note(f"a bit flips on its way to {name}")
        fabric.moved += move.num_bytes
        block_bytes = self._memory.block_bytes
        if fabric.num_free_among[name]({int(at) // block_bytes for at in where[::unit]}):
            fabric.on_broken(f"a {move.operation.value} of {move.transfer_id} lands in free blocks of {name}")
        posted.state = "failed" if fails else "done"
        self.wake()

    def is_done(self, handle: HandleId) -> bool:
        posted = self._posted[handle]
        if posted.state == "moving":
            return False
        del self._posted[handle]
        if posted.state == "failed":
            raise TransferError("the move failed")
        return True

    def reopen(self) -> CacheMemory | None:
        self._ways.append(self._ways[-1] + 1)
        return msgspec.structs.replace(self._memory, agent_metadata=f"{self.memory_name}#{self._ways[-1]}".encode())

    def close_earlier(self) -> bool:
        del self._ways[:-1]
        return True

    def shuts_out(self, peer: ProcessIdentity) -> bool:
        return peer.machine != self._process.machine

    def close(self) -> None:
        self._fabric.bytes.pop(self.memory_name, None)
