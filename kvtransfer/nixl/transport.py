"""A Transport over NIXL. It translates NIXL's interface and errors into ours. Besides this file, only `nixl_check`
imports nixl.

A whole block is one descriptor. The descriptors of a pool are prepared once, and moves name them by index. Parts of
blocks are described for each move, because there are far too many to prepare them all.

This file uses NIXL's bindings directly, because NIXL's own Python wrapper fixes the progress thread's delay at 0, which
makes it spin. With a delay the thread sleeps in poll() until its sockets wake it. It cannot be left out: a peer's first
write needs an answer from this process, and so does every write over TCP.

The progress thread and our thread take turns at UCX's lock, and our thread holds it for milliseconds while it copies
host memory. By default UCX spins meanwhile, on the core that copies or that computes a forward pass. Hence
UCX_USE_MT_MUTEX.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from tandem.base.errors import ConfigurationError, InternalError, TransferError
from tandem.kvtransfer.base import KVCacheMemory
from tandem.kvtransfer.nixl.interfaces import listening_at
from tandem.kvtransfer.nixl.lanes import LANE_LOG, name_lanes
from tandem.kvtransfer.nixl.options import NixlOptions
from tandem.kvtransfer.protocol.processes import this_process
from tandem.kvtransfer.protocol.transport import HandleId, Move, RemoteId, Transport, UnitIds, run_bounds
from tandem.wire.handoff import CacheMemory, ProcessIdentity

if TYPE_CHECKING:
    import torch

BlockArray = npt.NDArray[np.uint64]
"""[N, 3]: address, length, device."""


@contextlib.contextmanager
def _translated(doing: str) -> Iterator[None]:
    """Raises every error of the bindings as TransferError. Their only common base is Exception, and bad arguments raise
    Python's own errors."""
    try:
        yield
    except Exception as error:
        raise TransferError(f"NIXL: {doing}: {type(error).__name__}: {error}") from error


def _load_bindings() -> Any:
    # UCX reads it once, when the first agent is made. A value that the operator has set stays.
    os.environ.setdefault("UCX_USE_MT_MUTEX", "y")
    LANE_LOG.before_loading()
    try:
        import nixl._bindings as bindings
    except ImportError as error:
        raise ConfigurationError(
            f"the nixl connector needs the package nixl, which does not load here: {error}"
        ) from error
    return bindings


class NixlAgent:
    """One NIXL agent with one backend. Only one thread at a time may use it."""

    def __init__(self, name: str, options: NixlOptions, host: str = "127.0.0.1", near: Sequence[str] = ()) -> None:
        """`host`: the node's address. UCX listens there alone. `near`: see `ConnectorContext`."""
        self._nixl = _load_bindings()
        self.name = name
        self.options = options
        self.host = host
        self.near = near
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = True
        config.pthrDelay = options.progress_ms * 1000
        config.useListenThread = False
        with _translated("making the agent"):
            self._agent = self._nixl.nixlAgent(name, config)
            plugins = self._agent.getAvailPlugins()
        if options.backend not in plugins:
            raise ConfigurationError(
                f"transfer.options.backend: NIXL has no {options.backend!r} here, only {', '.join(sorted(plugins))}"
            )
        with _translated(f"asking the backend {options.backend} for its parameters"):
            known, _ = self._agent.getPluginParams(options.backend)
        if unknown := options.parameters.keys() - known.keys():
            raise ConfigurationError(
                f"transfer.options.backend.{min(unknown)}: NIXL's {options.backend} has no such parameter, only "
                f"{', '.join(sorted(known)) or 'none'}"
            )
        with _translated(f"making the backend {options.backend}"), listening_at(host, near):
            self._backend = self._agent.createBackend(options.backend, dict(options.parameters))
        LANE_LOG.after_loading()
        self._memory_types = {"DRAM": self._nixl.DRAM_SEG, "VRAM": self._nixl.VRAM_SEG}
        self._operations = {"write": self._nixl.NIXL_WRITE, "read": self._nixl.NIXL_READ}
        self._registered: list[Any] = []

    def register(self, memory_type: str, address: int, num_bytes: int, device_id: int) -> None:
        with _translated("registering the KV cache"):
            described = self._nixl.nixlRegDList(self._memory_types[memory_type], [(address, num_bytes, device_id, "")])
            self._agent.registerMem(described, [self._backend])
        self._registered.append(described)

    def metadata(self) -> bytes:
        with _translated("describing the agent"):
            return bytes(self._agent.getLocalMD())

    def add_remote(self, metadata: bytes) -> str:
        with _translated("loading the peer's metadata"):
            return bytes(self._agent.loadRemoteMD(metadata)).decode()

    def remove_remote(self, name: str) -> None:
        with _translated("removing the peer"):
            self._agent.invalidateRemoteMD(name)

    def prepare(self, remote: str | None, memory_type: str, blocks: BlockArray) -> int:
        """Prepares descriptors that moves then name by index: ours if `remote` is None, else the peer's."""
        if memory_type not in self._memory_types:
            raise TransferError(f"memory of type {memory_type!r} is not known here")
        with _translated("preparing the blocks' descriptors"):
            described = self._nixl.nixlXferDList(self._memory_types[memory_type], blocks)
            owner = self._nixl.NIXL_INIT_AGENT if remote is None else remote
            return int(self._agent.prepXferDlist(owner, described, [self._backend]))

    def release_prepared(self, prepared: int) -> None:
        with _translated("releasing descriptors"):
            self._agent.releasedDlistH(prepared)

    def start(
        self, operation: str, local: int, local_blocks: UnitIds, remote: int, remote_blocks: UnitIds
    ) -> tuple[int, bool]:
        """Starts a move of prepared descriptors. Returns its handle, and whether it is done already."""
        with _translated(f"starting a {operation}"):
            handle = int(
                self._agent.makeXferReq(
                    self._operations[operation],
                    local,
                    local_blocks.astype(np.int32),
                    remote,
                    remote_blocks.astype(np.int32),
                    "",
                    [self._backend],
                    False,
                )
            )
        return self._post(operation, handle)

    def start_described(
        self, operation: str, local: tuple[str, BlockArray], remote: tuple[str, BlockArray], remote_name: str
    ) -> tuple[int, bool]:
        """As `start`, with descriptors (memory type, where) that were not prepared."""
        with _translated(f"starting a {operation}"):
            ours, theirs = (
                self._nixl.nixlXferDList(self._memory_types[memory_type], where)
                for memory_type, where in (local, remote)
            )
            handle = int(
                self._agent.createXferReq(self._operations[operation], ours, theirs, remote_name, "", [self._backend])
            )
        return self._post(operation, handle)

    def _post(self, operation: str, handle: int) -> tuple[int, bool]:
        try:
            with _translated(f"starting a {operation}"):
                return handle, bool(self._agent.postXferReq(handle) == self._nixl.NIXL_SUCCESS)
        except TransferError:
            self.release(handle)
            raise

    def is_done(self, handle: int) -> bool:
        with _translated("a transfer"):
            return bool(self._agent.getXferStatus(handle) == self._nixl.NIXL_SUCCESS)

    def release(self, handle: int) -> None:
        with _translated("releasing a transfer"):
            self._agent.releaseXferReq(handle)

    def close(self) -> None:
        """Gives the registrations back and ends the agent with its thread and its sockets. From then on nothing that a
        peer has sent to this agent over a network arrives. A peer on this machine may write to memory by itself."""
        registered, self._registered = self._registered, []
        try:
            for described in registered:
                with _translated("giving back the KV cache's registration"):
                    self._agent.deregisterMem(described, [self._backend])
        finally:
            self._agent = None


logger = logging.getLogger(__name__)

_DIRECT_DEVICES = ("/dev/xpmem", "/dev/knem")  # their kernel modules copy between processes


class _Remote(msgspec.Struct, frozen=True):
    name: str
    prepared: int
    memory: CacheMemory


class NixlTransport(Transport):
    """`_agent` posts our moves. Peers reach our memory through each agent of `_ways`, and are told of the last one."""

    name = "nixl"

    def __init__(self, agent: NixlAgent) -> None:
        self.agent = agent  # the first one; it may be closed
        self._agent = agent
        self._ways = [agent]
        self._way_numbers = itertools.count(1)
        self._process = this_process()
        self._prepared: int | None = None
        self._mine: CacheMemory | None = None
        self._remotes: dict[RemoteId, _Remote] = {}
        self._remote_ids = itertools.count()
        # By handle, whether the move was done when it was posted. `is_done` is called for those, too, once.
        self._done: dict[HandleId, bool] = {}
        self._lanes_unnamed: set[RemoteId] = set()  # peers to and from which nothing has moved
        self._to_name: dict[HandleId, RemoteId] = {}
        self._device: torch.device | None = None
        self._is_on_device = False
        self._in_thread = threading.local()
        self._closed = False

    def register(self, memory: KVCacheMemory) -> CacheMemory:
        tensor = memory.tensor
        on_device = tensor.is_cuda
        self._device = tensor.device if on_device else None
        self._is_on_device = on_device
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
        """Gives the calling thread a CUDA context. UCX asks for it when memory is registered and when a peer's is
        unpacked, and if there is none, silently goes without CUDA's IPC. A thread has a context once it has launched
        something; setting the device is not enough."""
        if self._device is not None and not getattr(self._in_thread, "entered", False):
            import torch  # the caller has loaded it to make the tensor; host memory needs none of it here

            torch.cuda.set_device(self._device)  # another rank's device is not the first one
            torch.zeros(1, device=self._device)
            torch.cuda.synchronize(self._device)
            self._in_thread.entered = True

    def _reachable_through(self, agent: NixlAgent, mine: CacheMemory) -> CacheMemory:
        agent.register(mine.memory_type, mine.base_address, mine.num_blocks * mine.block_bytes, mine.device_id)
        return msgspec.structs.replace(mine, agent_metadata=agent.metadata())

    # NIXL has no call that keeps one peer from writing. Giving back a registration does not, nor does forgetting the
    # peer: over TCP UCX writes wherever a packet says. Ending the agent does, because its sockets and queue pairs
    # end with it.

    def reopen(self) -> CacheMemory | None:
        if self._mine is None:
            raise InternalError("another way to a KV cache that was not registered")
        self._enter_device()
        agent = NixlAgent(
            f"{self._agent.name}-{next(self._way_numbers)}", self._agent.options, self._agent.host, self._agent.near
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
                return False  # our own moves still use `_agent`
            if self._prepared is not None:
                self._agent.release_prepared(self._prepared)
            self._agent = newest
            if mine is not None:
                self._prepared = newest.prepare(None, mine.memory_type, _blocks(mine))
        earlier, self._ways = self._ways[:-1], [newest]
        for agent in earlier:
            try:
                agent.close()
            except TransferError as error:
                logger.warning("closing %s: %s", agent.name, error)  # it has ended all the same
        return True

    def shuts_out(self, peer: ProcessIdentity) -> bool:
        """Whether this process, or a network card for it, carries out the writes of `peer`. Within one machine and one
        PID namespace, UCX lets a process write to another's memory by a system call. Between PID namespaces of a
        machine it cannot, but CUDA's IPC reaches another's GPU memory, and xpmem and knem reach any memory."""
        if peer.machine != self._process.machine:
            return True
        by_itself = self._is_on_device or any(map(os.path.exists, _DIRECT_DEVICES))
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
            # This transport uses the peer no more. What NIXL still holds of it goes with the agent.
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
                move.operation.value, (mine.memory_type, local), (known.memory.memory_type, remote_runs), known.name
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
        """Logs the lanes after a peer's first move, because UCX connects with that."""
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
    """Returns the descriptors of a move on both sides. Units that follow one another on both sides share one."""
    first, counts = run_bounds(move.local, move.remote)
    runs = []
    for memory, units in ((mine, move.local), (theirs, move.remote)):
        described = np.empty((len(first), 3), dtype=np.uint64)
        described[:, 0] = memory.base_address + units[first] * move.unit_bytes
        described[:, 1] = counts * move.unit_bytes
        described[:, 2] = memory.device_id
        runs.append(described)
    return runs[0], runs[1]
