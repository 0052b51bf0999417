"""NIXL as a Transport: a block is one descriptor, prepared once for each pool and then named by its index. Parts of
blocks are described for each transfer: there are far too many to prepare them all."""

from __future__ import annotations

import itertools
import logging
import os
import threading
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from tandem.kvtransfer.base import KVCacheMemory
from tandem.kvtransfer.nixl.agent import BlockArray, NixlAgent
from tandem.kvtransfer.nixl.lanes import name_lanes
from tandem.kvtransfer.protocol.identity import this_process
from tandem.kvtransfer.protocol.transport import HandleId, Move, RemoteId, Transport, run_bounds
from tandem.wire.errors import InternalError, TransferError
from tandem.wire.handoff import CacheMemory, ProcessIdentity

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_DIRECT_DEVICES = ("/dev/xpmem", "/dev/knem")  # of kernel modules that copy between processes


class _Remote(msgspec.Struct, frozen=True):
    name: str
    prepared: int
    memory: CacheMemory


class NixlTransport(Transport):
    """`_agent` posts what we move. Peers reach our memory through each agent of `_ways`, and are told of the last."""

    name = "nixl"

    def __init__(self, agent: NixlAgent) -> None:
        self.agent = agent  # the first
        self._agent = agent
        self._ways = [agent]
        self._way_numbers = itertools.count(1)
        self._process = this_process()
        self._prepared: int | None = None
        self._mine: CacheMemory | None = None
        self._remotes: dict[RemoteId, _Remote] = {}
        self._remote_ids = itertools.count()
        # Handles that were done when they were posted are asked about all the same, once.
        self._done: dict[HandleId, bool] = {}
        self._lanes_unnamed: set[RemoteId] = set()  # nothing has moved there yet
        self._to_name: dict[HandleId, RemoteId] = {}
        self._device: torch.device | None = None
        self._in_thread = threading.local()
        self._closed = False

    def register(self, memory: KVCacheMemory) -> CacheMemory:
        tensor = memory.tensor
        on_device = tensor.is_cuda
        self._device = tensor.device if on_device else None
        self._enter_device()
        self._mine = CacheMemory(
            agent_metadata=b"",
            memory_type="VRAM" if on_device else "DRAM",
            device_id=tensor.get_device() if on_device else 0,
            base_address=tensor.data_ptr(),
            num_blocks=memory.num_blocks,
            block_bytes=memory.block_bytes,
        )
        described = self._reachable_through(self._agent, self._mine)
        self._prepared = self._agent.prepare(None, described.memory_type, _blocks(described))
        return described

    def _enter_device(self) -> None:
        """UCX asks the calling thread for its CUDA context when memory is registered and when a peer's is unpacked. Finding
        none it gives CUDA's IPC up, in silence. A thread has one once it has launched something; to set the device is
        not enough."""
        if self._device is not None and not getattr(self._in_thread, "entered", False):
            import torch  # loaded already by what made the tensor; not needed where memory is the host's

            torch.cuda.set_device(self._device)  # another rank's is not the first one
            torch.zeros(1, device=self._device)
            torch.cuda.synchronize(self._device)
            self._in_thread.entered = True

    def _reachable_through(self, agent: NixlAgent, mine: CacheMemory) -> CacheMemory:
        agent.register(
            mine.memory_type, mine.base_address, mine.num_blocks * mine.block_bytes, mine.device_id
        )
        return msgspec.structs.replace(mine, agent_metadata=agent.metadata())

    # NIXL has no call that keeps one peer from writing. Neither giving back a registration nor forgetting the peer does:
    # over TCP UCX writes wherever a packet says. Ending the agent does, because its sockets and queue pairs end with it.

    def reopen(self) -> CacheMemory | None:
        if self._mine is None:
            raise InternalError("another way to a KV cache that was not registered")
        self._enter_device()
        agent = NixlAgent(
            f"{self._agent.name}-{next(self._way_numbers)}", self._agent.options, self._agent.host
        )
        try:
            described = self._reachable_through(agent, self._mine)
        except TransferError:
            agent.close()
            raise
        self._ways.append(agent)
        return described

    def close_earlier(self) -> bool:
        mine, newest = self._mine, self._ways[-1]
        if mine is None or self._agent is not newest:
            if self._remotes or self._done:
                return False  # what we move ourselves goes through the first
            if self._prepared is not None:
                self._agent.release_prepared(self._prepared)
            self._agent = newest
            if mine is not None:
                self._prepared = newest.prepare(None, mine.memory_type, _blocks(mine))
        earlier, self._ways = self._ways[:-1], [newest]
        for agent in earlier:
            agent.close()
        return True

    def shuts_out(self, peer: ProcessIdentity) -> bool:
        """Whether the writes of `peer` are carried out by this process, or by a network card for it. Within one machine and one
        PID namespace UCX lets a process write to another's memory by a system call. Between PID namespaces of one
        machine it cannot, but CUDA's IPC reaches another's GPU memory, and xpmem and knem any memory."""
        if peer.machine != self._process.machine:
            return True
        by_itself = self._device is not None or any(map(os.path.exists, _DIRECT_DEVICES))
        return peer.pid_namespace != self._process.pid_namespace and not by_itself

    def connect(self, memory: CacheMemory) -> RemoteId:
        self._enter_device()
        name = self._agent.add_remote(memory.agent_metadata)
        try:
            prepared = self._agent.prepare(name, memory.memory_type, _blocks(memory))
        except TransferError:
            self._agent.remove_remote(name)
            raise
        remote = RemoteId(next(self._remote_ids))
        self._remotes[remote] = _Remote(name, prepared, memory)
        self._lanes_unnamed.add(remote)
        return remote

    def disconnect(self, remote: RemoteId) -> None:
        known = self._remotes.pop(remote)
        self._lanes_unnamed.discard(remote)
        try:
            self._agent.release_prepared(known.prepared)
            self._agent.remove_remote(known.name)
        except TransferError as error:
            # The peer is as good as gone for us; what NIXL still holds of it goes with the agent.
            logger.warning("disconnecting from %s: %s", known.name, error)

    def post(self, remote: RemoteId, move: Move) -> HandleId:
        mine, known = self._mine, self._remotes[remote]
        if self._prepared is None or mine is None:
            raise InternalError("a transfer before the KV cache was registered")
        if move.unit_bytes == mine.block_bytes == known.memory.block_bytes:
            started, done = self._agent.start(
                move.operation.value, self._prepared, move.local, known.prepared, move.remote
            )
        else:
            local, remote_runs = _described(move, mine, known.memory)
            started, done = self._agent.start_described(
                move.operation.value,
                (mine.memory_type, local),
                (known.memory.memory_type, remote_runs),
                known.name,
            )
        handle = HandleId(started)
        self._done[handle] = done
        if remote in self._lanes_unnamed:
            self._to_name[handle] = remote
        return handle

    def is_done(self, handle: HandleId) -> bool:
        try:
            done = self._done[handle] or self._agent.is_done(handle)
        except TransferError:
            self._end(handle)
            raise
        if done:
            self._name_lanes(handle)
            self._end(handle)
        return done

    def _name_lanes(self, handle: HandleId) -> None:
        """UCX connects with the first transfer."""
        remote = self._to_name.get(handle)
        if remote in self._lanes_unnamed:
            self._lanes_unnamed.discard(remote)
            name_lanes(self._remotes[remote].name, on_device=self._device is not None)

    def _end(self, handle: HandleId) -> None:
        del self._done[handle]
        self._to_name.pop(handle, None)
        try:
            self._agent.release(handle)
        except TransferError as error:
            logger.warning("%s", error)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for handle in list(self._done):
            self._end(handle)
        for remote in list(self._remotes):
            self.disconnect(remote)
        try:
            if self._prepared is not None:
                self._agent.release_prepared(self._prepared)
        finally:
            for agent in self._ways:
                agent.close()


def _blocks(memory: CacheMemory) -> BlockArray:
    blocks = np.empty((memory.num_blocks, 3), dtype=np.uint64)
    blocks[:, 0] = memory.base_address + np.arange(memory.num_blocks, dtype=np.uint64) * memory.block_bytes
    blocks[:, 1] = memory.block_bytes
    blocks[:, 2] = memory.device_id
    return blocks


def _described(move: Move, mine: CacheMemory, theirs: CacheMemory) -> tuple[BlockArray, BlockArray]:
    """Units that follow each other on both sides are one descriptor."""
    first, counts = run_bounds(move.local, move.remote)
    runs = []
    for memory, units in ((mine, move.local), (theirs, move.remote)):
        described = np.empty((len(first), 3), dtype=np.uint64)
        described[:, 0] = memory.base_address + units[first] * move.unit_bytes
        described[:, 1] = counts * move.unit_bytes
        described[:, 2] = memory.device_id
        runs.append(described)
    return runs[0], runs[1]
