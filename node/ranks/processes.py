"""Starts, watches and ends the rank processes of one machine, in one thread.

If one rank ends, is silent, or does not take a step for `silence_s`, the thread ends all of them at once. It counts ticks, not seconds,
so a time when this process itself stood still does not count. If the thread dies, the kernel kills the ranks. Their `Owner` handles
everything that concerns the whole node: the supervisor (`node.ranks.supervisor`) on rank 0's machine, the keeper (`node.ranks.keeper`)
on any other.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np

from tandem.base.errors import ConfigurationError, InternalError, NodeLost, TandemError
from tandem.base.logs import LogsConfig
from tandem.machine.resources import usable_cores
from tandem.node.ranks.link import Eventfd, Relay
from tandem.node.ranks.memory import SharedMemory, create_memory
from tandem.node.ranks.messages import MOST_BYTES, FromRank, RankHere, RankOrders, RankProgress, RankReady, RankRefused

if TYPE_CHECKING:
    from tandem.engine.config import EngineConfig

logger = logging.getLogger(__name__)

TICK_S = 0.25
END_S = 2.0  # how long a rank may take to end by itself
_COMPLAINT_S = 0.1  # until the end of another rank on this machine is seen
_VERDICT_S = 1.0  # and until an error in this process has the verdict that explains it

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(FromRank).decode


class RankShare(msgspec.Struct, frozen=True):
    """The cores and threads of one rank."""

    cores: list[int]
    threads: int


def shares_of(cores: Sequence[int], threads: int, size: int) -> list[RankShare]:
    """Divides cores and threads among `size` ranks. Each gets its own cores if there are at least as many as ranks; else all share them."""
    each = max(1, (threads or len(cores) or usable_cores()) // size)
    if len(cores) < size:
        return [RankShare(list(cores), each) for _ in range(size)]
    bounds = [len(cores) * rank // size for rank in range(size + 1)]
    return [RankShare(list(cores[bounds[rank] : bounds[rank + 1]]), each) for rank in range(size)]


def ranks_on(machine: int, machines: int, size: int) -> range:
    """The ranks on one machine: each machine has equally many, in order."""
    each = size // machines
    return range(machine * each, (machine + 1) * each)


@dataclasses.dataclass
class RankPlan:
    """How one machine's ranks are to be started."""

    name: str  # the node's id
    ranks: range  # the ranks on this machine, with rank 0 if it is here
    size: int  # ranks of the whole node
    engine: EngineConfig  # its device is the device of the first of these ranks
    shares: Sequence[RankShare]  # one for each of these ranks
    logs: LogsConfig
    host: str  # the address where they listen for the other ranks
    stages: int = 1
    contexts: int = 1


class Owner(Protocol):
    """What watches over the whole node. Called in the thread that watches the ranks."""

    def rank_said(self, rank: int, message: RankHere | RankProgress | RankReady) -> None: ...
    def look(self) -> None:
        """Called every `TICK_S`."""

    def ending(self, verdict: TandemError | None) -> None:
        """This machine's ranks are being ended, because of `verdict`; None: because `stop` was called."""

    def ended(self, verdict: TandemError | None) -> None:
        """No process of this machine's ranks is left."""


class _Rank:
    def __init__(self, number: int, process: subprocess.Popen[bytes], control: socket.socket) -> None:
        self.number = number
        self.process = process
        self.control = control
        self.exit = os.pidfd_open(process.pid)
        self.speaks = True
        self.complaint = ""
        self.beat = 0
        self.silent_ticks = 0
        self.asked = 0  # the step that the rank must take for `behind_ticks` to begin again
        self.behind_ticks = 0


class RankProcesses:
    def __init__(self, plan: RankPlan, owner: Owner, silence_s: float) -> None:
        self.plan = plan
        self._owner = owner
        self._most_ticks = max(1, round(silence_s / TICK_S))
        # How long a rank's error waits for its cause: the end of another rank, or of another machine.
        elsewhere = plan.size > len(plan.ranks)
        self._complaint_s = _COMPLAINT_S + (silence_s + TICK_S if elsewhere else 0.0)
        self.changed = threading.Condition()
        self.verdict: TandemError | None = None
        self._stopping = False
        self._is_closed = False
        self._watching = False
        self._ranks: list[_Rank] = []
        # The time from which it counts, and the error
        self._complaint: tuple[float, TandemError] | None = None
        self._wakeup = Eventfd()
        self._tasks: collections.deque[Callable[[], None]] = collections.deque()
        self._memory_fd = create_memory()
        self._others = range(max(1, plan.ranks.start), plan.ranks.stop)
        self.memory = SharedMemory(self._memory_fd, self._others)
        # The descriptor of the KV cache that all ranks share; None: each keeps its own KV
        self.kv_fd: int | None = None
        # By rank, when each keeps its own KV: the sockets by which rank 0 orders transfers of that KV, and copies to and from tiers.
        self.lines: dict[int, socket.socket] = {}
        self.tier_lines: dict[int, socket.socket] = {}
        self.relays: list[Relay] = []
        self._thread = threading.Thread(target=self._run, name="rank-supervisor", daemon=True)

    # --- any thread

    def start(self) -> None:
        self._thread.start()

    def do(self, task: Callable[[], None]) -> None:
        """Runs the task in the thread that watches, soon."""
        self._tasks.append(task)
        self._wakeup.wake()

    def put(self, relay: Relay, data: bytes) -> None:
        relay.put(data)
        if relay.has_unsent:
            self._wakeup.wake()  # the thread that watches sends the rest when the socket has room

    def send(self, arrays: Sequence[np.ndarray]) -> None:
        """Gives all ranks of this machine the next step. Waits while a rank is two steps behind; raises the verdict if one has ended."""
        self.memory.write(arrays, lambda: self.verdict is None)
        for rank in self._ranks:
            try:
                rank.control.send(b"s")
            except OSError as error:
                raise self.cause_of(error) from error

    def watch_beats(self) -> None:
        """Begins to watch the beats; called when all ranks are ready."""
        for rank in self._ranks:
            rank.beat = self.memory.beat_of(rank.number)
        self._watching = True

    def judge(self, verdict: TandemError) -> None:
        """Ends all ranks because of `verdict`. Only the first verdict counts. Callable from any thread."""
        with self.changed:
            if self.verdict is not None or self._stopping:
                return
            self.verdict = verdict
            self.changed.notify_all()
        logger.error("the ranks of %s end together: %s", self.plan.name, verdict)
        self._wakeup.wake()

    def cause_of(self, error: Exception) -> Exception:
        """Waits for a verdict and returns it, because an error here may follow from a rank's end; else returns `error`."""
        with self.changed:
            self.changed.wait_for(lambda: self.verdict is not None, self._complaint_s + _VERDICT_S)
            return self.verdict or error

    @property
    def pids(self) -> list[int]:
        return [rank.process.pid for rank in self._ranks]

    def stop(self) -> None:
        """Ends the ranks and returns when no process of them is left. Idempotent."""
        with self.changed:
            self._stopping = True
        self._wakeup.wake()
        if self._thread.ident is not None:
            self._thread.join()
        with self.changed:
            if self._is_closed:
                return
            self._is_closed = True
        if self._thread.ident is None:
            os.close(self._memory_fd)
        for line in (*self.lines.values(), *self.tier_lines.values()):
            line.close()

    # --- the thread that watches

    def _run(self) -> None:
        self._lifeline, kept = os.pipe()
        try:
            self._watch()
        except Exception as error:
            logger.exception("the ranks of %s are no longer watched", self.plan.name)
            self.judge(InternalError(f"the ranks' supervisor failed: {error}"))
        finally:
            self._end(kept)

    def begin(self, rendezvous: str, *, apart: bool) -> None:
        """Starts the processes. `apart`: each rank keeps its own KV, so it gets a line for its transfers, and one for its tiers if the
        configuration has any."""
        for number in self._others:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            place = number - self.plan.ranks.start
            share = self.plan.shares[place]
            with contextlib.ExitStack() as to_close:
                to_close.enter_context(theirs)
                command = [sys.executable, "-P", "-m", "tandem.node.ranks.process"]
                named = [theirs.fileno(), self._memory_fd, self._lifeline]
                inherited = [] if self.kv_fd is None else [self.kv_fd]
                transfers = tiers = None
                if apart:
                    self.lines[number], transfers = _line(inherited, to_close)
                if apart and self.plan.engine.cache.tiers:
                    self.tier_lines[number], tiers = _line(inherited, to_close)
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
            self._ranks.append(_Rank(number, process, ours))
            orders = self._orders(number, place, rendezvous, transfers, tiers)
            with contextlib.suppress(OSError):  # the rank has already ended, which `_watch` notices
                ours.send(_encode(orders))

    def _orders(self, number: int, place: int, rendezvous: str, transfers: int | None, tiers: int | None) -> RankOrders:
        plan, share = self.plan, self.plan.shares[place]
        engine = plan.engine
        model = msgspec.structs.replace(
            engine.model, device=device_of_rank(engine.model.device, place), threads=share.threads
        )
        return RankOrders(
            f"{plan.name}-rank{number}",
            number,
            plan.size,
            rendezvous,
            plan.host,
            model,
            engine.cache,
            engine.scheduler,
            plan.logs,
            share.cores,
            plan.stages,
            plan.contexts,
            self.kv_fd,
            transfers,
            tiers,
        )

    def _watch(self) -> None:
        ticked = time.monotonic()
        while self.verdict is None:
            ready = {descriptor for descriptor, _ in self._poll().poll(TICK_S * 1000)}
            self._wakeup.clear()
            while self._tasks:
                self._tasks.popleft()()
            if self._stopping:
                return
            for rank in self._ranks:
                if rank.control.fileno() in ready and rank.speaks:
                    rank.speaks = self._hear(rank)
            for rank in self._ranks:
                if rank.exit in ready and not rank.complaint:
                    self.judge(NodeLost(_ended(rank)))
            for relay in self.relays:
                relay.flush()
                if relay.fileno() in ready:
                    relay.pass_on()
            now = time.monotonic()
            if self._complaint is not None and now >= self._complaint[0]:
                self.judge(self._complaint[1])
            if now - ticked >= TICK_S:
                ticked = now
                self._owner.look()
                if self._watching:
                    self._tick()

    def _poll(self) -> select.poll:
        poll = select.poll()
        poll.register(self._wakeup, select.POLLIN)
        for rank in self._ranks:
            if not rank.complaint:
                poll.register(rank.exit, select.POLLIN)
            if rank.speaks:
                poll.register(rank.control, select.POLLIN)
        for relay in self.relays:
            if not relay.is_over:
                poll.register(relay, select.POLLIN | (select.POLLOUT if relay.has_unsent else 0))
        return poll

    def _hear(self, rank: _Rank) -> bool:
        """Reads one message of a rank. Returns False when no further message will come."""
        try:
            packet = rank.control.recv(MOST_BYTES)
        except OSError:
            return False
        if not packet:
            return False
        message = _decode(packet)
        if not isinstance(message, RankRefused):
            self._owner.rank_said(rank.number, message)
        elif message.operator:
            self.judge(ConfigurationError(message.why))
        else:
            # When a rank ends, the collectives of the others raise. Delay this error, so that the end, its cause, is judged first.
            rank.complaint = f"rank {rank.number}: {message.why}"
            if self._complaint is None:
                self._complaint = time.monotonic() + self._complaint_s, InternalError(rank.complaint)
        return True

    def _tick(self) -> None:
        written = self.memory.written
        behind = self.memory.behind(written)
        for rank in self._ranks:
            beat = self.memory.beat_of(rank.number)
            rank.silent_ticks = 0 if beat != rank.beat else rank.silent_ticks + 1
            rank.beat = beat
            if rank.number not in behind:
                rank.behind_ticks = 0
            elif not rank.behind_ticks or rank.number not in self.memory.behind(rank.asked):
                rank.asked, rank.behind_ticks = written, 1
            else:
                rank.behind_ticks += 1
            seconds = self._most_ticks * TICK_S
            if rank.silent_ticks > self._most_ticks:
                self.judge(NodeLost(f"rank {rank.number} has not run for {seconds:.1f} s"))
            elif rank.behind_ticks > self._most_ticks:
                self.judge(NodeLost(f"rank {rank.number} has not taken step {rank.asked} for {seconds:.1f} s"))

    def _end(self, kept: int) -> None:
        """Ends the ranks: kills them if there is a verdict, else lets each end by itself for up to `END_S`."""
        os.close(kept)
        os.close(self._lifeline)
        for rank in self._ranks:
            if self.verdict is not None:
                rank.process.kill()
            rank.control.close()
        self._owner.ending(self.verdict)
        deadline = time.monotonic() + END_S
        for rank in self._ranks:
            try:
                rank.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                rank.process.kill()
                rank.process.wait()
            os.close(rank.exit)
        for relay in self.relays:
            relay.close()
        os.close(self._memory_fd)
        if self.kv_fd is not None:
            os.close(self.kv_fd)
        self._owner.ended(self.verdict)


def _line(inherited: list[int], to_close: contextlib.ExitStack) -> tuple[socket.socket, int]:
    """Makes a socket pair for a line to a rank. Returns our end, and the descriptor of the other end, which the rank inherits."""
    ours, far = socket.socketpair()
    to_close.enter_context(far)
    inherited.append(far.fileno())
    return ours, far.fileno()


def _ended(rank: _Rank) -> str:
    code = rank.process.poll()
    if code is None:
        return f"rank {rank.number} has ended"
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return f"rank {rank.number} has ended ({how})"


def with_memory_shared(engine: EngineConfig, ranks: int) -> EngineConfig:
    """The configuration of each of `ranks` ranks on one machine that keep their own KV. On CPUs they divide the host memory among
    themselves; a GPU has its own."""
    if ranks == 1 or engine.model.device.startswith("cuda"):
        return engine
    cache = msgspec.structs.replace(engine.cache, memory_share=engine.cache.share_on("cpu") / ranks)
    return msgspec.structs.replace(engine, cache=cache)


def device_of_rank(device: str, place: int) -> str:
    """The device of a machine's rank number `place`, from 0. `device` is the first rank's; the others have the GPUs that follow it."""
    kind, _, first = device.partition(":")
    if kind in ("cpu", "cuda"):
        return kind if kind == "cpu" else f"cuda:{int(first or 0) + place}"
    from tandem.engine.model.checkpoint import choose_device

    chosen = choose_device(device)
    return f"cuda:{(chosen.index or 0) + place}" if chosen.type == "cuda" else "cpu"


def check_devices(device: str, ranks: range) -> None:
    """Raises ConfigurationError if this machine has fewer GPUs than `ranks` need. Call it on the machine where they will run."""
    size = len(ranks)
    last = device_of_rank(device, size - 1)
    if last == "cpu":
        return
    import torch

    if torch.device(last).index >= torch.cuda.device_count():
        raise ConfigurationError(
            f"a node has {size} ranks on this machine (pools.<pool>.tensor_parallel times pipeline_parallel times context_parallel, shared by pools.<pool>.machines), "
            f"and of {torch.cuda.device_count()} CUDA devices here {size} do not follow one another from {device_of_rank(device, 0)} on: give "
            f"each node so many, on a Ray cluster with resources: {{GPU: {size}}}"
        )
