"""Starts a node's other ranks, watches them, and ends them as one.

The scheduler, the requests and rank 0's part of the model are in the node's own process, so what asks a node anything asks one
process, and rank 0's KV is where a connector expects it. The others only compute: `send` gives them each step's arrays.

One thread starts them and watches until the end; the kernel ends them with it. A rank that ends, or is silent, or does not take a
step for `silence_s`, ends all of them at once: what waits for them in a collective raises, and `lost` is told for a node that is at
rest. Time for which this thread itself stood still does not count.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from tandem.machine.resources import usable_cores
from tandem.node.ranks.memory import SharedMemory, create_memory
from tandem.node.ranks.messages import (
    MOST_BYTES,
    FromRank,
    RankHere,
    RankOrders,
    RankProgress,
    RankReady,
    RankRefused,
)
from tandem.wire.errors import ConfigurationError, InternalError, NodeLost, TandemError
from tandem.wire.logs import LogsConfig
from tandem.wire.progress import LastProgress, Report

if TYPE_CHECKING:
    from tandem.engine.config import EngineConfig
    from tandem.engine.model.wide.shard import Shard
    from tandem.node.ranks.group import GroupCollectives

logger = logging.getLogger(__name__)

_TICK_S = 0.25
_STILL_S = 300.0  # without progress: a machine that does much else takes long to load libraries
_END_S = 2.0  # for a rank to end by itself
_COMPLAINT_S = 0.1  # between a rank's end and what the others make of it
_VERDICT_S = 1.0  # from a collective that raises until it is known why

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(FromRank).decode


class RankShare(msgspec.Struct, frozen=True):
    """What of its machine one rank computes with."""

    cores: list[int]
    threads: int


def shares_of(cores: Sequence[int], threads: int, size: int) -> list[RankShare]:
    """Each rank has cores of its own, where there are enough."""
    each = max(1, (threads or len(cores) or usable_cores()) // size)
    if len(cores) < size:
        return [RankShare(list(cores), each) for _ in range(size)]
    bounds = [len(cores) * rank // size for rank in range(size + 1)]
    return [RankShare(list(cores[bounds[rank] : bounds[rank + 1]]), each) for rank in range(size)]


class _Rank:
    def __init__(self, number: int, process: subprocess.Popen[bytes], control: socket.socket) -> None:
        self.number = number
        self.process = process
        self.control = control
        self.exit = os.pidfd_open(process.pid)
        self.said: set[type[FromRank]] = set()
        self.beat = 0
        self.silent_ticks = 0
        self.asked = 0  # a step that it had not taken
        self.behind_ticks = 0


class Ranks:
    def __init__(
        self,
        name: str,
        size: int,
        engine: EngineConfig,
        shares: Sequence[RankShare],
        logs: LogsConfig,
        *,
        stages: int = 1,
        apart: bool = False,
        silence_s: float,
        lost: Callable[[str], None],
        report: Report | None = None,
    ) -> None:
        """`apart`: on CPUs, too, each rank keeps its KV in memory of its own, as it must on GPUs. `lost` is called once, from another thread, with the reason why the ranks were ended, unless they were stopped; `report`, from
        there too, with how far the other ranks' loads have come."""
        self._name = name
        self._size = size
        self._stages = stages
        self._apart = apart
        self._engine = engine
        self._shares = shares
        self._logs = logs
        self._most_ticks = max(1, round(silence_s / _TICK_S))
        self._lost = lost
        self._report = report
        self._progress = LastProgress(time.monotonic)
        self._changed = threading.Condition()
        self._verdict: TandemError | None = None
        self._stopping = False
        self._watching = False  # beats count from when all are ready
        self._ranks: list[_Rank] = []
        self._started = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._memory_fd = create_memory()
        self._memory = SharedMemory(self._memory_fd, size)
        self._kv_fd: int | None = None  # on a CPU: the KV cache of all ranks, as long as rank 0 makes it
        # To each of the others, where there is no such cache: what moves its KV is told by this.
        self.transfer_lines: list[socket.socket] = []
        self.tier_lines: list[socket.socket] = []  # the same for what copies it to tiers
        self._folder = tempfile.mkdtemp(prefix="tandem-ranks-")
        self._group: GroupCollectives | None = None
        self._of_stage: GroupCollectives | None = None  # rank 0's, where a stage has several
        self._thread = threading.Thread(target=self._run, name="rank-supervisor", daemon=True)

    # --- the thread that loads and steps

    def start(self) -> Shard:
        """Returns when all ranks have found each other: then each loads its part."""
        from tandem.engine.model.checkpoint import choose_device
        from tandem.engine.model.wide.shard import Shard
        from tandem.node.ranks.group import GroupCollectives, group_of_stage

        device = choose_device(self._engine.model.device)
        _check_devices(self._engine.model.device, self._size)
        self._apart = self._apart or device.type != "cpu"
        if not self._apart:
            self._kv_fd = os.memfd_create("tandem-kv")
        self._thread.start()
        self._wait_for(RankHere)
        rendezvous = os.path.join(self._folder, "meeting")
        try:
            self._group = GroupCollectives(0, self._size, rendezvous, device)
            self._of_stage = group_of_stage(0, self._size, self._stages, rendezvous, device)
        except RuntimeError as error:
            raise self.cause_of(error) from error
        return Shard(0, self._size, self._group, self, str(device), self._kv_fd, self._stages, self._of_stage)

    def await_ready(self) -> None:
        """Returns when every rank has loaded its part: this one has."""
        self._wait_for(RankReady)
        shutil.rmtree(self._folder, ignore_errors=True)
        for rank in self._ranks:
            rank.beat = self._memory.beat_of(rank.number)
        self._watching = True

    def send(self, arrays: Sequence[np.ndarray]) -> None:
        self._memory.write(arrays, lambda: self._verdict is None)
        for rank in self._ranks:
            try:
                rank.control.send(b"s")
            except OSError as error:
                raise self.cause_of(error) from error

    def cause_of(self, error: Exception) -> Exception:
        with self._changed:
            self._changed.wait_for(lambda: self._verdict is not None, _VERDICT_S)
            return self._verdict or error

    @property
    def pids(self) -> list[int]:
        return [rank.process.pid for rank in self._ranks]

    def stop(self) -> None:
        """Idempotent. Returns when no other rank is left."""
        with self._changed:
            if self._stopping:
                return
            self._stopping = True
        os.eventfd_write(self._wake, 1)
        if self._thread.ident is not None:
            self._thread.join()
        else:
            os.close(self._memory_fd)
        os.close(self._wake)
        for line in (*self.transfer_lines, *self.tier_lines):
            line.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _wait_for(self, said: type[FromRank]) -> None:
        self._progress.begin()
        with self._changed:
            while self._verdict is None:
                if self._started and all(said in rank.said for rank in self._ranks):
                    return
                if not (wait_s := self._progress.next_look(_STILL_S)):
                    raise InternalError(
                        f"a rank of {self._name} has made no progress for {_STILL_S:.0f} s, {self._progress}"
                    )
                self._changed.wait(wait_s)
            raise self._verdict

    # --- the supervisor's thread

    def _run(self) -> None:
        lifeline, kept = os.pipe()
        try:
            self._begin(lifeline)
            os.close(lifeline)
            self._watch()
        except Exception as error:
            logger.exception("the ranks of %s are no longer watched", self._name)
            self._judge(InternalError(f"the ranks' supervisor failed: {error}"))
        finally:
            self._end(kept)

    def _begin(self, lifeline: int) -> None:
        rendezvous = os.path.join(self._folder, "meeting")
        for number in range(1, self._size):
            share = self._shares[number]
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with contextlib.ExitStack() as to_close:
                to_close.enter_context(theirs)
                command = [sys.executable, "-m", "tandem.node.ranks.process"]
                named = [theirs.fileno(), self._memory_fd, lifeline]
                inherited = [] if self._kv_fd is None else [self._kv_fd]
                transfers = tiers = None
                if self._apart:
                    transfers = _line_of(self.transfer_lines, inherited, to_close)
                if self._apart and self._engine.cache.tiers:
                    tiers = _line_of(self.tier_lines, inherited, to_close)
                process = subprocess.Popen(
                    [*command, *map(str, (os.getpid(), *named))],
                    pass_fds=named + inherited,
                    stdin=subprocess.DEVNULL,
                    env={
                        **os.environ,
                        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                        "OMP_NUM_THREADS": str(share.threads),
                    },
                )
            rank = _Rank(number, process, ours)
            self._ranks.append(rank)
            model = msgspec.structs.replace(
                self._engine.model,
                device=device_of_rank(self._engine.model.device, number),
                threads=share.threads,
            )
            orders = RankOrders(
                f"{self._name}-rank{number}",
                number,
                self._size,
                rendezvous,
                model,
                self._engine.cache,
                self._engine.scheduler,
                self._logs,
                share.cores,
                self._stages,
                self._kv_fd,
                transfers,
                tiers,
            )
            with contextlib.suppress(OSError):  # it has ended: seen below
                ours.send(_encode(orders))
        with self._changed:
            self._started = True

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        by_exit = {rank.exit: rank for rank in self._ranks}
        by_control = {rank.control.fileno(): rank for rank in self._ranks}
        for descriptor in (*by_exit, *by_control):
            poll.register(descriptor, select.POLLIN)
        ticked = time.monotonic()
        while self._verdict is None:
            ready = [descriptor for descriptor, _ in poll.poll(_TICK_S * 1000)]
            if self._stopping:
                return
            for descriptor in ready:
                if descriptor in by_control and not self._hear(by_control[descriptor]):
                    poll.unregister(descriptor)
            for descriptor in ready:
                if descriptor in by_exit:
                    self._judge(NodeLost(_ended(by_exit[descriptor])))
            if self._watching and time.monotonic() - ticked >= _TICK_S:
                ticked = time.monotonic()
                self._tick()

    def _hear(self, rank: _Rank) -> bool:
        """False when there are no more messages."""
        try:
            packet = rank.control.recv(MOST_BYTES)
        except OSError:
            return False
        if not packet:
            return False
        message = _decode(packet)
        if isinstance(message, RankRefused):
            if (cause := self._ended_before(rank)) is not None:
                self._judge(NodeLost(_ended(cause)))
            kind = ConfigurationError if message.operator else InternalError
            self._judge(kind(message.why if message.operator else f"rank {rank.number}: {message.why}"))
        if isinstance(message, RankProgress):
            what = f"rank {rank.number}: {message.what}"
            self._progress.report(what, message.share)
            if self._report is not None:
                self._report(what, message.share)
        with self._changed:
            rank.said.add(type(message))
            self._changed.notify_all()
        return True

    def _ended_before(self, complaining: _Rank) -> _Rank | None:
        """A rank that ends makes the collectives of the others raise: the end is the cause."""
        exits = select.poll()
        for rank in self._ranks:
            if rank is not complaining:
                exits.register(rank.exit, select.POLLIN)
        ended = {descriptor for descriptor, _ in exits.poll(_COMPLAINT_S * 1000)}
        return next((rank for rank in self._ranks if rank.exit in ended), None)

    def _tick(self) -> None:
        written = self._memory.written
        behind = self._memory.behind(written)
        for rank in self._ranks:
            beat = self._memory.beat_of(rank.number)
            rank.silent_ticks = 0 if beat != rank.beat else rank.silent_ticks + 1
            rank.beat = beat
            if rank.number not in behind:
                rank.behind_ticks = 0
            elif not rank.behind_ticks or rank.number not in self._memory.behind(rank.asked):
                rank.asked, rank.behind_ticks = written, 1
            else:
                rank.behind_ticks += 1
            seconds = self._most_ticks * _TICK_S
            if rank.silent_ticks > self._most_ticks:
                self._judge(NodeLost(f"rank {rank.number} has not run for {seconds:.1f} s"))
            elif rank.behind_ticks > self._most_ticks:
                self._judge(
                    NodeLost(f"rank {rank.number} has not taken step {rank.asked} for {seconds:.1f} s")
                )

    def _judge(self, verdict: TandemError) -> None:
        """The first one counts."""
        with self._changed:
            if self._verdict is not None or self._stopping:
                return
            self._verdict = verdict
            self._changed.notify_all()
        logger.error("the ranks of %s end together: %s", self._name, verdict)

    def _end(self, kept: int) -> None:
        """With a verdict at once, else by themselves."""
        os.close(kept)
        for rank in self._ranks:
            if self._verdict is not None:
                rank.process.kill()
            rank.control.close()
        if self._verdict is not None:
            for group in (self._group, self._of_stage):
                if group is not None:
                    group.abort()
        deadline = time.monotonic() + _END_S
        for rank in self._ranks:
            try:
                rank.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                rank.process.kill()
                rank.process.wait()
            os.close(rank.exit)
        os.close(self._memory_fd)
        if self._kv_fd is not None:
            os.close(self._kv_fd)
        if self._verdict is not None:
            self._lost(str(self._verdict))


def _line_of(ours: list[socket.socket], inherited: list[int], to_close: contextlib.ExitStack) -> int:
    """A new line to a rank: its end there, which the rank inherits."""
    line, far = socket.socketpair()
    to_close.enter_context(far)
    ours.append(line)
    inherited.append(far.fileno())
    return far.fileno()


def _ended(rank: _Rank) -> str:
    code = rank.process.poll()
    if code is None:
        return f"rank {rank.number} has ended"
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return f"rank {rank.number} has ended ({how})"


def device_of_rank(device: str, rank: int) -> str:
    """Rank 0 has the node's device, the others those that follow it."""
    if device == "cpu":
        return device
    from tandem.engine.model.checkpoint import choose_device

    chosen = choose_device(device)
    return f"cuda:{(chosen.index or 0) + rank}" if chosen.type == "cuda" else "cpu"


def _check_devices(device: str, size: int) -> None:
    import torch

    last = device_of_rank(device, size - 1)
    if last != "cpu" and torch.device(last).index >= torch.cuda.device_count():
        raise ConfigurationError(
            f"a node has {size} ranks (pools.<pool>.tensor_parallel times pipeline_parallel), and of {torch.cuda.device_count()} CUDA devices here {size} do not follow one "
            f"another from {device_of_rank(device, 0)} on: give each node so many, on a Ray cluster with resources: {{GPU: {size}}}"
        )
