"""torch.distributed between the ranks of one node: gloo on CPUs, NCCL on GPUs. It does not use the process's default group, because a
process may hold several groups.

Ranks on one machine find each other through a file, and gloo listens on 127.0.0.1, out of reach of other machines. Ranks on several
machines find each other at rank 0's address, and each listens at its machine's address; torch does not authenticate what arrives there.
"""

from __future__ import annotations

import contextlib
import os
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tandem.kvtransfer.nixl.interfaces import addresses

_MEETING = timedelta(seconds=120)  # how long a rank waits for all others to join
# A collective waits for the slowest rank's part of a step. It raises if a rank ends, and the supervisor ends a rank that hangs.
_LONGEST = timedelta(hours=1)
_AT_ONCE = timedelta(milliseconds=1)
_NO_RANK_SENDS = 1 << 20  # a message tag that no rank uses
_OF_MACHINES = "tcp://"
LOOPBACK = "127.0.0.1"

# torch's type stubs lack the groups and stores that a program constructs itself.
torch_groups: Any = dist


class MeetingPlace:
    """The store where ranks on several machines find each other. It serves as long as this object lives."""

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family)
        port = listener.getsockname()[1]
        self._store = torch_groups.TCPStore(
            host, port, None, True, _MEETING, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        self.rendezvous = f"{_OF_MACHINES}{host}:{port}"


def _store_at(rendezvous: str, size: int, name: str) -> Any:
    if not rendezvous.startswith(_OF_MACHINES):
        return torch_groups.FileStore(f"{rendezvous}-{name}", size)
    host, _, port = rendezvous.removeprefix(_OF_MACHINES).rpartition(":")
    store = torch_groups.TCPStore(host, int(port), None, False, _MEETING, wait_for_workers=False)
    return torch_groups.PrefixStore(name, store)


class GroupCollectives:
    def __init__(
        self, rank: int, size: int, rendezvous: str, device: torch.device, *, host: str = LOOPBACK, name: str = "all"
    ) -> None:
        """Joins the group; waits up to `_MEETING` for the other ranks. `host`: the address of this machine where this rank listens for the
        others. `name` tells this group from others at the same `rendezvous`."""
        store = _store_at(rendezvous, size, name)
        store.set_timeout(_MEETING)
        self._size = size
        self._is_gloo = device.type == "cpu"
        self._spans_machines = rendezvous.startswith(_OF_MACHINES)
        self._group: Any
        if self._is_gloo:
            options = torch_groups.ProcessGroupGloo._Options()
            options._devices = [torch_groups.ProcessGroupGloo.create_device(hostname=host)]
            options._timeout = _LONGEST
            self._group = torch_groups.ProcessGroupGloo(store, rank, size, options)
        else:
            if self._spans_machines and (interface := addresses().get(host)) is not None:
                os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
            torch.cuda.set_device(device)
            self._group = torch_groups.ProcessGroupNCCL(store, rank, size, torch_groups.ProcessGroupNCCL.Options())

    def sum(self, tensor: torch.Tensor) -> None:
        self._group.allreduce([tensor]).wait()

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        gathered = tensor.new_empty(self._size * tensor.numel())
        self._group._allgather_base(gathered, tensor.reshape(-1)).wait()
        return gathered.view(self._size, *tensor.shape)

    def broadcast(self, tensor: torch.Tensor) -> None:
        self._group.broadcast(tensor, 0).wait()

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        self._group.send([tensor], rank, 0).wait()

    def receive(self, tensor: torch.Tensor, rank: int) -> None:
        self._group.recv([tensor], rank, 0).wait()

    def abort(self) -> None:
        """Makes the collectives that wait in this group raise. Called from another thread."""
        if not self._is_gloo:
            self._group.abort()
        elif self._spans_machines:
            # Gloo notices that a rank on this machine has ended, but not that a machine is lost, because no connection closes
            # then. A receive that times out makes gloo close all its connections.
            with contextlib.suppress(RuntimeError):
                self._group.recv([torch.zeros(1)], 1, _NO_RANK_SENDS).wait(_AT_ONCE)


def group_of_stage(
    rank: int, size: int, stages: int, rendezvous: str, device: torch.device, host: str = LOOPBACK
) -> GroupCollectives | None:
    """The group of the ranks in this rank's stage. None if the stage has one rank, or the node has one stage. With contexts, each of them
    counts as a stage."""
    width = size // stages
    if stages == 1 or width == 1:
        return None
    name = f"stage-{rank // width}"
    return GroupCollectives(rank % width, width, rendezvous, device, host=host, name=name)


def group_across(
    rank: int, size: int, contexts: int, rendezvous: str, device: torch.device, host: str = LOOPBACK
) -> GroupCollectives | None:
    """The group of the ranks with the same part of the model, one of each context. None with one context."""
    width = size // contexts
    if contexts == 1:
        return None
    name = f"context-{rank % width}"
    return GroupCollectives(rank // width, contexts, rendezvous, device, host=host, name=name)
