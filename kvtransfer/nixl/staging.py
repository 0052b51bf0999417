"""Moves KV on a GPU through host memory: blocks are copied there before they are sent, and copied back when they have
arrived.

This is for machines whose network cannot reach a GPU's memory. UCX would stage the bytes, too, but piece by piece;
whole runs in page-locked memory are several times faster. Every block has its place in a host copy of the cache, as
large as the cache, so peers see an ordinary cache in host memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from tandem.base.errors import ConfigurationError, InternalError
from tandem.kvtransfer.base import KVCacheMemory, flat_bytes
from tandem.kvtransfer.protocol.transport import HandleId, Move, Operation, RemoteId, Transport, UnitIds, runs_of
from tandem.wire.handoff import CacheMemory, ProcessIdentity

if TYPE_CHECKING:
    import torch


class StagedTransport(Transport):
    """Wraps another transport. A cache in host memory needs no staging, and gets none."""

    is_staged = True

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self.name = inner.name
        self._device: torch.Tensor | None = None  # the cache's bytes
        self._host: torch.Tensor | None = None
        self._stream: Any = None
        self._block_bytes = 0
        self._locked = False

    def register(self, memory: KVCacheMemory) -> CacheMemory:
        return self._inner.register(self.as_peers_see(memory))

    def as_peers_see(self, memory: KVCacheMemory) -> KVCacheMemory:
        tensor = memory.tensor
        if not tensor.is_cuda:
            return memory
        import torch  # the caller has loaded it to make the tensor

        if self._host is None:
            cuda: Any = torch.cuda
            self._block_bytes = memory.block_bytes
            self._device = flat_bytes(tensor)
            self._host = torch.empty(self._device.shape[0], dtype=torch.uint8)
            # torch's own allocator for page-locked memory would take the next power of two.
            status = cuda.cudart().cudaHostRegister(self._host.data_ptr(), self._host.numel(), 0)
            if int(status) != 0:
                raise ConfigurationError(
                    f"transfer.options.staging is host, and {self._host.numel() / 2**30:.1f} GiB of the host's memory, as "
                    f"much as the KV cache has, cannot be page-locked (CUDA's error {int(status)}): give the cache less "
                    "with --kv-memory, or raise the limit of locked memory"
                )
            self._locked = True
            self._stream = cuda.Stream(tensor.device)
        host = self._host.view(tensor.dtype).as_strided(tuple(tensor.shape), tensor.stride())
        return msgspec.structs.replace(memory, tensor=host)

    def post(self, remote: RemoteId, move: Move) -> HandleId:
        """Copies the move's units now, at most one post's: computed KV does not change after it is posted."""
        if move.operation is not Operation.WRITE and self._device is not None:
            raise InternalError("staged KV is written to peers, and never read from them")
        self._copy(move.local, move.unit_bytes, to_host=True)
        return self._inner.post(remote, move)

    def landed(self, blocks: Sequence[int]) -> None:
        self._copy(np.unique(np.asarray(blocks, dtype=np.int64)), self._block_bytes, to_host=False)

    def _copy(self, units: UnitIds, size: int, *, to_host: bool) -> None:
        """Returns when the copy is complete, so nothing reads the device's blocks for it afterwards."""
        device, host = self._device, self._host
        if device is None or host is None or not len(units):
            return
        import torch

        with torch.cuda.stream(self._stream):
            for first, count in runs_of(units):
                part = slice(first * size, (first + count) * size)
                if to_host:
                    host[part].copy_(device[part], non_blocking=True)
                else:
                    device[part].copy_(host[part], non_blocking=True)
        self._stream.synchronize()

    def close(self) -> None:
        self._inner.close()
        if self._locked and self._host is not None:
            import torch

            self._locked = False
            cuda: Any = torch.cuda
            cuda.cudart().cudaHostUnregister(self._host.data_ptr())

    # ── passed on to the other transport ──

    def connect(self, memory: CacheMemory) -> RemoteId:
        return self._inner.connect(memory)

    def disconnect(self, remote: RemoteId) -> None:
        self._inner.disconnect(remote)

    def is_done(self, handle: HandleId) -> bool:
        return self._inner.is_done(handle)

    def cancel(self, handle: HandleId) -> bool:
        return self._inner.cancel(handle)

    def expect(self, transfer_id: str, blocks: Sequence[int]) -> None:
        self._inner.expect(transfer_id, blocks)

    def expect_no_more(self, transfer_id: str) -> bool:
        return self._inner.expect_no_more(transfer_id)

    def reopen(self) -> CacheMemory | None:
        return self._inner.reopen()

    def close_earlier(self) -> bool:
        return self._inner.close_earlier()

    def shuts_out(self, peer: ProcessIdentity) -> bool:
        return self._inner.shuts_out(peer)

    def may_still_write(self, remote: RemoteId) -> bool:
        return self._inner.may_still_write(remote)

    def stop_writing(self, remote: RemoteId) -> None:
        self._inner.stop_writing(remote)

    @property
    def malformed_frames(self) -> int:
        return self._inner.malformed_frames
