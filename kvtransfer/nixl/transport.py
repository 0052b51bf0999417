"""NIXL as a Transport: a block is one descriptor, prepared once for each pool and then named by its index. Parts of
blocks are described for each transfer: there are far too many to prepare them all."""

from __future__ import annotations

import itertools
import logging
import threading
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from tandem.kvtransfer.base import KVCacheMemory
from tandem.kvtransfer.nixl.agent import BlockArray, NixlAgent
from tandem.kvtransfer.nixl.lanes import name_lanes
from tandem.kvtransfer.protocol.transport import HandleId, Move, RemoteId, Transport
from tandem.wire.errors import InternalError, TransferError
from tandem.wire.handoff import CacheMemory

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


class _Remote(msgspec.Struct, frozen=True):
    name: str
    prepared: int
    memory: CacheMemory


class NixlTransport(Transport):
    name = "nixl"

    def __init__(self, agent: NixlAgent) -> None:
        self._agent = agent
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
        memory_type, device_id = ("VRAM", tensor.get_device()) if on_device else ("DRAM", 0)
        self._agent.register(
            memory_type, tensor.data_ptr(), memory.num_blocks * memory.block_bytes, device_id
        )
        described = CacheMemory(
            agent_metadata=self._agent.metadata(),
            memory_type=memory_type,
            device_id=device_id,
            base_address=tensor.data_ptr(),
            num_blocks=memory.num_blocks,
            block_bytes=memory.block_bytes,
        )
        self._prepared = self._agent.prepare(None, memory_type, _blocks(described))
        self._mine = described
        return described

    def _enter_device(self) -> None:
        """UCX asks the calling thread for its CUDA context when memory is registered and when a peer's is unpacked. Finding
        none it gives CUDA's IPC up, in silence. A thread has one once it has launched something; to set the device is
        not enough."""
        if self._device is not None and not getattr(self._in_thread, "entered", False):
            import torch  # loaded by whoever made the tensor; this package does without where memory is the host's

            torch.zeros(1, device=self._device)
            torch.cuda.synchronize(self._device)
            self._in_thread.entered = True

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
            self._agent.close()


def _blocks(memory: CacheMemory) -> BlockArray:
    blocks = np.empty((memory.num_blocks, 3), dtype=np.uint64)
    blocks[:, 0] = memory.base_address + np.arange(memory.num_blocks, dtype=np.uint64) * memory.block_bytes
    blocks[:, 1] = memory.block_bytes
    blocks[:, 2] = memory.device_id
    return blocks


def _described(move: Move, mine: CacheMemory, theirs: CacheMemory) -> tuple[BlockArray, BlockArray]:
    """Units that follow each other on both sides are one descriptor."""
    begins = np.ones(len(move.local), dtype=bool)
    begins[1:] = (np.diff(move.local) != 1) | (np.diff(move.remote) != 1)
    first = np.flatnonzero(begins)
    lengths = np.diff(np.append(first, len(move.local))) * move.unit_bytes
    runs = []
    for memory, units in ((mine, move.local), (theirs, move.remote)):
        described = np.empty((len(first), 3), dtype=np.uint64)
        described[:, 0] = memory.base_address + units[first] * move.unit_bytes
        described[:, 1] = lengths
        described[:, 2] = memory.device_id
        runs.append(described)
    return runs[0], runs[1]
