"""torch.distributed: a process group of two, with a deadline for everything, whose errors it translates into ours.

This connector makes no default group: each group is a value of its own, and one that breaks harms no other.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from tandem.base.errors import ConfigurationError, TransferError

DATA_TAG, ABORT_TAG = 0, 1
# gloo tries this often to connect to a member that does not answer, each time for its whole time-out.
GLOO_TRIES = 5


@contextlib.contextmanager
def _translated(doing: str) -> Iterator[None]:
    """Raises torch.distributed's errors as TransferError. It raises RuntimeError and its subclasses, and ValueError for
    arguments."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise TransferError(f"torch.distributed: {doing}: {type(error).__name__}: {error}") from error


def choose_backend(wanted: str, device: torch.device) -> str:
    backend = ("nccl" if device.type == "cuda" else "gloo") if wanted == "auto" else wanted
    if backend == "nccl" and (device.type != "cuda" or not dist.is_nccl_available()):
        raise ConfigurationError(
            "transfer.options.backend: nccl needs a KV cache on a GPU and a torch that has NCCL; gloo needs neither"
        )
    if backend == "gloo" and (device.type != "cpu" or not dist.is_gloo_available()):
        raise ConfigurationError(
            "transfer.options.backend: gloo needs a KV cache in host memory and a torch that has gloo"
        )
    return backend


class StoreServer:
    """The store at which the two members find each other. It lives as long as the caller's end of the pair."""

    def __init__(self, host: str, timeout_s: float) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with _translated("opening a store"), socket.create_server((host, 0), family=family) as listening:
            self.host, self.port = host, listening.getsockname()[1]
            # Bound here, to one address: by itself the store would listen on all of them.
            self.store = TCPStore(
                host,
                self.port,
                is_master=True,
                timeout=timedelta(seconds=timeout_s),
                wait_for_workers=False,
                master_listen_fd=listening.detach(),
            )


def join_store(host: str, port: int, timeout_s: float) -> TCPStore:
    with _translated("reaching the peer's store"):
        return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)


class Group:
    """`rank` is 0 for the caller and 1 for the callee. One thread uses it; any thread may call `abort`."""

    def __init__(self, backend: str, store: TCPStore, rank: int, host: str, timeout_s: float) -> None:
        """Waits for the peer, and then for the connection, each for at most `timeout_s`. Raises TransferError."""
        self._backend = backend
        self._peer = 1 - rank
        with _translated("waiting for the peer"):
            store.set(f"here/{rank}", "")
            store.wait([f"here/{self._peer}"], timedelta(seconds=timeout_s))
        with _translated("making a group"):
            self._group: Any = (
                _nccl(store, rank, timeout_s) if backend == "nccl" else _gloo(store, rank, host, timeout_s)
            )

    def send(self, data: torch.Tensor, timeout_s: float) -> None:
        """Returns when the bytes have left. Raises TransferError."""
        with _translated("sending"):
            self._group.send([data], self._peer, DATA_TAG).wait(timedelta(seconds=timeout_s))

    def receive(self, data: torch.Tensor, timeout_s: float) -> None:
        """Returns when the bytes are here. Raises TransferError."""
        with _translated("receiving"):
            self._group.recv([data], self._peer, DATA_TAG).wait(timedelta(seconds=timeout_s))

    def abort(self) -> None:
        """Makes every thread that waits in this group raise at once. Any thread may call this."""
        with contextlib.suppress(RuntimeError):
            if self._backend == "nccl":
                self._group.abort()
            else:
                # gloo has no abort, but a receive that times out closes every connection of its group.
                nothing = torch.empty(1, dtype=torch.uint8)
                self._group.recv([nothing], self._peer, ABORT_TAG).wait(timedelta(milliseconds=1))


def _gloo(store: TCPStore, rank: int, host: str, timeout_s: float) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=timeout_s / GLOO_TRIES)
    options._devices = [gloo.create_device(hostname=host)]
    return gloo(store, rank, 2, options)


def _nccl(store: TCPStore, rank: int, timeout_s: float) -> Any:
    # A wait then blocks its thread and raises at its deadline. By default NCCL's watchdog ends the process instead.
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timedelta(seconds=timeout_s)
    return nccl(store, rank, 2, options)
