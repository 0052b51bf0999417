"""The main program of a rank other than 0: `python -m tandem.node.ranks.process`. Only `node.ranks.processes` starts it.

It never outlives its node. The kernel kills it with the thread that started it, and it ends when its lifeline closes: a pipe that the
process that started it holds open. So no rank is left over, even if it is stopped or waits in a collective.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from tandem.base.errors import ConfigurationError
from tandem.base.logs import begin_logging
from tandem.machine.resources import bind, threads_here
from tandem.node.near import near_device
from tandem.node.ranks.memory import SharedMemory
from tandem.node.ranks.messages import MOST_BYTES, FromRank, RankHere, RankOrders, RankProgress, RankReady, RankRefused

if TYPE_CHECKING:
    from tandem.engine.model.torch_runner import TorchRunner
    from tandem.kvtransfer.registry import RankThread

BEAT_S = 0.1
_CLOSE_S = 1.0
_SIGNAL_WITH_PARENT = 1  # PR_SET_PDEATHSIG

_encode = msgspec.msgpack.Encoder().encode


def main() -> None:
    parent, packets, memory_fd, lifeline = (int(text) for text in sys.argv[1:])
    ctypes.CDLL(None).prctl(_SIGNAL_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        return  # the parent ended before this process asked the kernel to end with it
    # A terminal sends SIGINT to all processes; the node decides how it ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=packets)
    orders = msgspec.msgpack.decode(control.recv(MOST_BYTES), type=RankOrders)
    begin_logging(orders.logs, orders.name)
    memory = SharedMemory(memory_fd, range(orders.rank, orders.rank + 1))
    threading.Thread(target=_live, args=(memory, orders.rank, lifeline), name="rank-life", daemon=True).start()
    anywhere = os.sched_getaffinity(0)
    if orders.cores:
        bind(threads_here(), orders.cores)
    try:
        _serve(orders, control, memory, anywhere)
    except Exception as error:
        operator = isinstance(error, ConfigurationError)
        why = str(error) if operator else f"{type(error).__name__}: {error}"
        _tell(control, RankRefused(why[: MOST_BYTES // 2], operator))
        if not operator:
            raise


def _serve(orders: RankOrders, control: socket.socket, memory: SharedMemory, anywhere: Collection[int]) -> None:
    from tandem.engine.model.checkpoint import choose_device
    from tandem.engine.model.loading import load_runner
    from tandem.engine.model.shard import Shard
    from tandem.engine.model.wide.forward import follow
    from tandem.node.ranks.group import GroupCollectives, group_across, group_of_stage

    device = choose_device(orders.model.device)
    _tell(control, RankHere(device.type))
    meeting = (orders.rendezvous, device)
    collectives = GroupCollectives(orders.rank, orders.size, *meeting, host=orders.host)
    parts = orders.stages * orders.contexts
    of_stage = group_of_stage(orders.rank, orders.size, parts, *meeting, orders.host)
    across = group_across(orders.rank, orders.size, orders.contexts, *meeting, orders.host)
    shard = Shard(
        orders.rank,
        orders.size,
        collectives,
        device=str(device),
        kv_memory=orders.kv_memory,
        stages=orders.stages,
        within_stage=of_stage,
        contexts=orders.contexts,
        across=across,
    )
    runner = load_runner(
        orders.model,
        orders.cache,
        orders.scheduler,
        lambda what, share: _tell(control, RankProgress(what, share)),
        shard=shard,
    )
    transfers = _begin_transfers(orders, runner, anywhere)
    _tell(control, RankReady())
    taken = 0

    def receive() -> Sequence[np.ndarray] | None:
        nonlocal taken
        if not control.recv(1):
            return None
        taken += 1
        return memory.read(orders.rank, taken)

    follow(runner.forward, receive, shard, device)
    for one in transfers:
        one.stop(_CLOSE_S)


def _begin_transfers(orders: RankOrders, runner: TorchRunner, anywhere: Collection[int]) -> list[RankThread]:
    """Starts the threads that move this rank's KV. They may run on any core. An error that stops them ends the process, and so the node."""
    from tandem.engine.model.runner import memory_of
    from tandem.kvtransfer.nixl.ranks.thread import RankTransfers
    from tandem.kvtransfer.registry import find_tiers_of_rank
    from tandem.node.ranks.group import LOOPBACK

    host = "" if orders.host == LOOPBACK else orders.host
    memory = memory_of(runner)
    begun: list[RankThread] = []
    if orders.transfers is not None:
        near = near_device(runner.info.device)
        begun.append(RankTransfers(socket.socket(fileno=orders.transfers), memory, _end, host, near))
    if orders.tiers is not None:
        begun.append(find_tiers_of_rank()(socket.socket(fileno=orders.tiers), memory, _end))
    computing = os.sched_getaffinity(0)
    os.sched_setaffinity(0, anywhere)
    for one in begun:
        one.start()
    os.sched_setaffinity(0, computing)
    return begun


def _end() -> None:
    os._exit(1)


def _tell(control: socket.socket, message: FromRank) -> None:
    try:
        control.send(_encode(message))
    except OSError:
        os._exit(1)  # the process that started this rank has ended


def _live(memory: SharedMemory, rank: int, lifeline: int) -> None:
    ended = select.poll()
    ended.register(lifeline, 0)  # no event but the hang-up, when the other end closes
    while not ended.poll(BEAT_S * 1000):
        memory.beat(rank)
    os._exit(1)


if __name__ == "__main__":
    main()
