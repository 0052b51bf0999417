"""Runs all ranks of a node in this process, each in a thread, with gloo between them. They compute what processes would compute."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from tandem.engine.model.runner import memory_of
from tandem.engine.model.shard import Shard
from tandem.engine.model.torch_runner import TorchRunner
from tandem.engine.model.wide.forward import follow
from tandem.kvtransfer.nixl.ranks.thread import RankTransfers
from tandem.kvtransfer.offload.ranks import RankTiers
from tandem.node.ranks.group import GroupCollectives, group_across, group_of_stage

CPU = torch.device("cpu")
Load = Callable[[Shard | None], TorchRunner]


class EndOfRank(Exception):
    """Raised by the function that loads a rank's part, to end this rank without steps."""


class _Queues:
    def __init__(self, others: int) -> None:
        self.queues: list[queue.SimpleQueue[list[np.ndarray] | None]] = [queue.SimpleQueue() for _ in range(others)]

    def send(self, arrays: Sequence[np.ndarray]) -> None:
        for one in self.queues:
            one.put([array.copy() for array in arrays])

    def cause_of(self, error: Exception) -> Exception:
        return error


@contextlib.contextmanager
def ranks_here(
    width: int,
    load: Load,
    stages: int = 1,
    lines: list[socket.socket] | None = None,
    tier_lines: list[socket.socket] | None = None,
    contexts: int = 1,
) -> Iterator[TorchRunner]:
    """Yields rank 0's runner; the other ranks follow its steps until the block ends. `width`: the number of ranks of all stages together;
    1 is a whole model. `contexts`: so many of them, or of their groups, have the same part of the model. `lines`: a list that makes each rank keep the KV of its heads apart, and gets the lines to the threads that move
    that KV. `tier_lines`: the same for the threads that copy it to tiers."""
    if width == 1:
        yield load(None)
        return
    lead = _Queues(width - 1)
    memory = os.memfd_create("kv")
    apart = [socket.socketpair() for _ in range(width - 1)] if lines is not None else []
    if lines is not None:
        lines += [ours for ours, _ in apart]
    for_tiers = [socket.socketpair() for _ in range(width - 1)] if tier_lines is not None else []
    if tier_lines is not None:
        tier_lines += [ours for ours, _ in for_tiers]
    problems: list[Exception] = []
    with tempfile.TemporaryDirectory() as folder:

        def shard(rank: int) -> Shard:
            group = GroupCollectives(rank, width, f"{folder}/meeting", CPU)
            within = group_of_stage(rank, width, stages * contexts, f"{folder}/meeting", CPU)
            across = group_across(rank, width, contexts, f"{folder}/meeting", CPU)
            group.gather(torch.zeros(1))  # one that ends at once must not while another is still connecting
            return Shard(
                rank, width, group, lead if rank == 0 else None, kv_memory=memory if lines is None else None,
                stages=stages, within_stage=within, contexts=contexts, across=across
            )  # fmt: skip

        def other(rank: int) -> None:
            try:
                mine = shard(rank)
                runner = load(mine)
                begun: list[RankTransfers | RankTiers] = []
                for kind, pairs in ((RankTransfers, apart), (RankTiers, for_tiers)):
                    if pairs:
                        line = pairs[rank - 1][1]
                        begun.append(kind(line, memory_of(runner), lambda: problems.append(EndOfRank())))
                        begun[-1].start()
                follow(runner.forward, lead.queues[rank - 1].get, mine, CPU)
                for one in begun:
                    one.stop(60)
            except EndOfRank:
                pass
            except Exception as error:
                problems.append(error)

        threads = [
            threading.Thread(target=other, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(1, width)
        ]
        for thread in threads:
            thread.start()
        try:
            yield load(shard(0))
        finally:
            for one in lead.queues:
                one.put(None)
            for thread in threads:
                thread.join(60)
            os.close(memory)
            for pair in (*apart, *for_tiers):
                for line in pair:
                    line.close()
    if problems:
        raise problems[0]
