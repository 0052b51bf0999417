"""torch.distributed between the ranks of one node: gloo on CPUs, NCCL on GPUs. A group of its own, not the process's default one:
a process may hold several."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_MEETING = timedelta(seconds=120)  # for all ranks to come
# A collective waits for the slowest rank's part of a step. One that has ended makes it raise, and the supervisor ends one that hangs.
_LONGEST = timedelta(hours=1)


class GroupCollectives:
    def __init__(self, rank: int, size: int, rendezvous: str, device: torch.device) -> None:
        # torch's stubs know less of groups that are made by hand than torch does.
        torch_groups: Any = dist
        store = torch_groups.FileStore(rendezvous, size)
        store.set_timeout(_MEETING)
        self._size = size
        self._notices_ends = device.type == "cpu"
        self._group: Any
        if device.type == "cpu":
            options = torch_groups.ProcessGroupGloo._Options()
            # Ranks of one machine: no other one may reach them.
            options._devices = [torch_groups.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
            options._timeout = _LONGEST
            self._group = torch_groups.ProcessGroupGloo(store, rank, size, options)
        else:
            torch.cuda.set_device(device)
            self._group = torch_groups.ProcessGroupNCCL(
                store, rank, size, torch_groups.ProcessGroupNCCL.Options()
            )

    def sum(self, tensor: torch.Tensor) -> None:
        self._group.allreduce([tensor]).wait()

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        gathered = tensor.new_empty(self._size * tensor.numel())
        self._group._allgather_base(gathered, tensor.reshape(-1)).wait()
        return gathered.view(self._size, *tensor.shape)

    def broadcast(self, tensor: torch.Tensor) -> None:
        self._group.broadcast([tensor], 0).wait()

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        self._group.send([tensor], rank, 0).wait()

    def receive(self, tensor: torch.Tensor, rank: int) -> None:
        self._group.recv([tensor], rank, 0).wait()

    def abort(self) -> None:
        """From another thread: what waits in it raises. Gloo notices by itself that a rank has ended."""
        if not self._notices_ends:
            self._group.abort()


def group_of_stage(
    rank: int, size: int, stages: int, rendezvous: str, device: torch.device
) -> GroupCollectives | None:
    """The ranks of this one's stage among themselves; None where it is alone there, or there is one stage."""
    width = size // stages
    if stages == 1 or width == 1:
        return None
    return GroupCollectives(rank % width, width, f"{rendezvous}-of-stage-{rank // width}", device)
