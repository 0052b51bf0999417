"""Where vLLM's ranks are processes of its executor: both ends of what such a node hands over.

The halves of the node's connector stay in its own process, which has none of the ranks' memory. Each rank has a thread that moves the
blocks of its heads as the node's transport says (`kvtransfer/nixl/ranks/`), over a line that the rank opens when it registers its cache.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from typing import TYPE_CHECKING, Any

from tandem.base.errors import ConfigurationError, InternalError
from tandem.base.wings import find_wing, is_there
from tandem.engine.vllm.layout import RankOf, VllmCache
from tandem.kvtransfer.base import ConnectorMetadata

if TYPE_CHECKING:
    import torch

_THREAD = "tandem.kvtransfer.nixl.ranks.thread"
_LINES_S = 60.0  # how long the ranks' lines may take; ranks open them before vLLM makes its scheduler
_CREDENTIALS = struct.Struct("3i")  # the peer's process, user and group
_NUMBER = struct.Struct("<i")


def check_ranks(made: Any) -> None:
    """`made`: vLLM's configuration. Raises ConfigurationError if the KV of its ranks is not handed over."""
    parallel = made.parallel_config
    ranks, instead = parallel.world_size, "or serve with nodes that do both (--aggregated N)"
    if ranks == 1:
        return
    if not is_there(_THREAD):
        raise ConfigurationError(
            f"vLLM runs {ranks} ranks, and this installation hands over the KV of one: set one, {instead}"
        )
    if made.scheduler_config.async_scheduling:
        raise ConfigurationError(
            f"vLLM plans a step before its {ranks} ranks have computed the one before, and such hand nothing over: set model.engine_args to "
            f"{{async_scheduling: false}}, {instead}"
        )
    if parallel.tensor_parallel_size != ranks or parallel.decode_context_parallel_size > 1:
        raise ConfigurationError(
            f"vLLM runs {ranks} ranks of which some have other layers or tokens than others, and those that share heads alone hand "
            f"their KV over: set tensor_parallel_size alone, {instead}"
        )
    if parallel.distributed_executor_backend != "mp" or parallel.nnodes > 1:
        raise ConfigurationError(
            f"vLLM runs {ranks} ranks that are not all its own processes on one machine, and such hand nothing over: set "
            f"distributed_executor_backend to mp, {instead}"
        )


class RanksDoor:
    """Where the ranks of this node open their lines. The address is no file, and ends with the process."""

    def __init__(self, name: str, ranks: int, patience_s: float = _LINES_S) -> None:
        self._ranks, self._patience_s = ranks, patience_s
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(_address(name))
        self._socket.listen()

    def lines(self) -> list[socket.socket]:
        """Returns one line to each rank, in rank order. Raises InternalError if one does not come."""
        until = time.monotonic() + self._patience_s
        found: dict[int, socket.socket] = {}
        while len(found) < self._ranks:
            try:
                self._socket.settimeout(max(0.001, until - time.monotonic()))
                line, _ = self._socket.accept()
            except TimeoutError:
                for line in found.values():
                    line.close()
                raise InternalError(f"{len(found)} of vLLM's {self._ranks} ranks opened a line for their KV") from None
            rank = self._rank_of(line, until)
            if 0 <= rank < self._ranks and rank not in found:
                found[rank] = line
            else:
                line.close()
        self.close()
        return [found[rank] for rank in range(self._ranks)]

    def _rank_of(self, line: socket.socket, until: float) -> int:
        """Returns -1 for what is no rank of this node."""
        _, user, _ = _CREDENTIALS.unpack(line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        if user != os.geteuid():
            return -1
        line.settimeout(max(0.001, until - time.monotonic()))
        try:
            said = line.recv(_NUMBER.size, socket.MSG_WAITALL)
        except OSError:
            return -1
        return int(_NUMBER.unpack(said)[0]) if len(said) == _NUMBER.size else -1

    def close(self) -> None:
        self._socket.close()


def _address(name: str) -> str:
    return f"\0tandem-ranks-{name}"


class RankHandover:
    """What stands for a `Handover` in the process of a rank."""

    def __init__(self, name: str, config: Any, of: RankOf) -> None:
        """`name`: of the node's door. `config`: vLLM's KVCacheConfig."""
        self._name, self._cache, self._of = name, VllmCache(config), of

    def register(self, cache: torch.Tensor) -> None:
        thread = find_wing(_THREAD)
        if thread is None:
            raise InternalError("ranks without their wing")
        memory = self._cache.memory(
            cache, "", 0, self._of
        )  # which model it is, and which tokens there are, the node says
        line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        line.connect(_address(self._name))
        line.sendall(_NUMBER.pack(self._of.rank))
        # The thread may run on any core of the node's. vLLM has bound this one to its own.
        computing = os.sched_getaffinity(0)
        os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))
        thread.RankTransfers(line, memory, lambda: os._exit(1)).start()
        os.sched_setaffinity(0, computing)

    def start_step(self, plan: ConnectorMetadata) -> None: ...

    def save(self) -> None: ...

    def collect(self, finished_req_ids: set[str]) -> tuple[set[str], set[str], set[str]]:
        return set(), set(), set()
