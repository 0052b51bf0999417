"""NIXL's interface and errors, translated into ours. Nothing else in Tandem imports nixl.

The bindings are used directly: NIXL's own Python wrapper fixes the progress thread's delay at 0, which makes it
spin. With a delay it sleeps in poll() until its sockets wake it; it has to exist all the same, because a peer's
first write needs an answer from this process, and so does every write over TCP.

That thread and ours take turns at UCX's lock, and the posting thread copies host memory under it, for milliseconds. UCX's
own choice is to spin meanwhile: on the core that copies, or that computes a forward pass. Hence a mutex.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from tandem.kvtransfer.nixl.interfaces import listening_at
from tandem.kvtransfer.nixl.lanes import LANE_LOG
from tandem.kvtransfer.nixl.options import NixlOptions
from tandem.kvtransfer.protocol.transport import UnitIds
from tandem.wire.errors import ConfigurationError, TransferError

BlockArray = npt.NDArray[np.uint64]
"""N x 3: address, length, device."""


@contextlib.contextmanager
def _translated(doing: str) -> Iterator[None]:
    """The bindings' own errors have nothing in common but Exception; bad arguments raise what Python raises."""
    try:
        yield
    except Exception as error:
        raise TransferError(f"NIXL: {doing}: {type(error).__name__}: {error}") from error


def _load_bindings() -> Any:
    # Read once, when the first agent is made; who sets it differently is obeyed.
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
    """One agent with one backend. To be used from one thread at a time."""

    def __init__(self, name: str, options: NixlOptions, host: str = "127.0.0.1") -> None:
        """`host`: the node's address, where alone UCX listens."""
        self._nixl = _load_bindings()
        self.name = name
        self.options = options
        self.host = host
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
        with _translated(f"making the backend {options.backend}"), listening_at(host):
            self._backend = self._agent.createBackend(options.backend, dict(options.parameters))
        LANE_LOG.after_loading()
        self._memory_types = {"DRAM": self._nixl.DRAM_SEG, "VRAM": self._nixl.VRAM_SEG}
        self._operations = {"write": self._nixl.NIXL_WRITE, "read": self._nixl.NIXL_READ}
        self._registered: list[Any] = []

    def register(self, memory_type: str, address: int, num_bytes: int, device_id: int) -> None:
        with _translated("registering the KV cache"):
            described = self._nixl.nixlRegDList(
                self._memory_types[memory_type], [(address, num_bytes, device_id, "")]
            )
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
        """Descriptors that transfers then name by index; ours when `remote` is None."""
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
        """A handle, and whether it is done already."""
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
        self,
        operation: str,
        local: tuple[str, BlockArray],
        remote: tuple[str, BlockArray],
        remote_name: str,
    ) -> tuple[int, bool]:
        """The same with descriptors (memory type, where) that were not prepared."""
        with _translated(f"starting a {operation}"):
            ours, theirs = (
                self._nixl.nixlXferDList(self._memory_types[memory_type], where)
                for memory_type, where in (local, remote)
            )
            handle = int(
                self._agent.createXferReq(
                    self._operations[operation], ours, theirs, remote_name, "", [self._backend]
                )
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
        """Give the registrations back and end the agent: its thread and its sockets go with it. Over a network nothing
        that a peer has sent to this agent lands any more; a peer on this machine may write to memory by itself."""
        registered, self._registered = self._registered, []
        try:
            for described in registered:
                with _translated("giving back the KV cache's registration"):
                    self._agent.deregisterMem(described, [self._backend])
        finally:
            self._agent = None
