"""Rank 0's supervisor: starts a node's other ranks on all of its machines, watches them, and ends them together.

The node's own process is rank 0: it has the scheduler and the requests, and takes all calls. The other ranks only compute: `send` gives
them each step's arrays.

`RankProcesses` watches the ranks of this machine. On each other machine a keeper (`node.ranks.keeper`) does, and this module is rank 0's
end of the link to it. A failure on any machine ends the node: the collectives that wait raise, and `lost` is called, so that an
idle node learns of it, too. A machine is lost if it sends nothing, or does not get a step, for `silence_s`.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tandem.base.errors import ConfigurationError, InternalError, NodeLost, TandemError
from tandem.base.logs import LogsConfig
from tandem.base.progress import LastProgress, Report
from tandem.node.ranks.link import LetterFromMachine, LetterToMachine, Numbers, Relay, SendingEnd, step_of
from tandem.node.ranks.messages import (
    BeginRanks,
    EndRanks,
    FromMachine,
    FromRank,
    LeadBeat,
    LineBytes,
    MachineBeat,
    MachineProgress,
    PrepareRanks,
    RankHere,
    RankProgress,
    RankReady,
    RanksEnded,
    RanksFailed,
    RanksPrepared,
    ToMachine,
)
from tandem.node.ranks.processes import END_S, TICK_S, RankPlan, RankProcesses, RankShare, check_devices, ranks_on
from tandem.wire.endpoints import key_of, shown
from tandem.wire.sockets import Inbox, Outbox, accompany

if TYPE_CHECKING:
    from tandem.engine.config import EngineConfig
    from tandem.engine.model.shard import Shard
    from tandem.node.ranks.group import GroupCollectives, MeetingPlace

logger = logging.getLogger(__name__)

_STILL_S = 300.0  # how long a start may make no progress; a busy machine takes long to load libraries


class _Machine:
    """Rank 0's record of another machine of the node."""

    def __init__(self, number: int, endpoint: str, ranks: range, outbox: Outbox) -> None:
        self.number = number
        self.ranks = ranks
        self.name = f"the machine of {_named(ranks)} ({shown(endpoint)})"
        self.link = SendingEnd(outbox, endpoint, LetterToMachine)  # type: ignore[arg-type]
        self.numbers = Numbers(self.name)
        self.relays: dict[int, Relay] = {}
        self.is_prepared = False
        self.heard = False  # whether a message has come since the last `look`
        self.silent_ticks = 0
        self.steps = 0  # how many steps have arrived there
        self.asked = 0  # the step that must arrive there for `behind_ticks` to begin again
        self.behind_ticks = 0
        self.has_ended = threading.Event()


def _named(ranks: range) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"


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
        contexts: int = 1,
        apart: bool = False,
        host: str = "127.0.0.1",
        keepers: Sequence[str] = (),
        silence_s: float,
        lost: Callable[[str], None],
        report: Report | None = None,
    ) -> None:
        """`shares`: the cores and threads of this machine's ranks. `apart`: each rank keeps the KV of its heads in its own memory on CPUs
        too, as it must on GPUs. `keepers`: the endpoints of the keepers on the other machines, which reach this one at `host`. `lost` is
        called once, from another thread, with the reason why the ranks were ended, but not after `stop`. `report` is called from other
        threads with the progress of the other ranks' loads."""
        machines = 1 + len(keepers)
        self._name = name
        self._size = size
        self._stages = stages
        self._contexts = contexts
        self._apart = apart or machines > 1
        self._engine = engine
        self._host = host
        self._most_ticks = max(1, round(silence_s / TICK_S))
        self._lost = lost
        self._report = report
        self._progress = LastProgress(time.monotonic)
        self._said: dict[int, set[type[FromRank]]] = {number: set() for number in range(1, size)}
        self._kinds: dict[int, str] = {}  # rank -> the kind of its device: cpu or cuda
        self._serves = False
        self._is_stopped = False
        self._folder = tempfile.mkdtemp(prefix="tandem-ranks-")
        self._meeting: MeetingPlace | None = None
        self._groups: list[GroupCollectives] = []
        here = ranks_on(0, machines, size)
        plan = RankPlan(name, here, size, engine, shares, logs, host if keepers else "127.0.0.1", stages, contexts)
        self._here = RankProcesses(plan, self, silence_s)
        self._far_lines: list[socket.socket] = []
        self._inbox: Inbox[LetterFromMachine] | None = None
        self._outbox: Outbox | None = None
        self._machines: list[_Machine] = []
        if keepers:
            self._meet(keepers)

    def _meet(self, keepers: Sequence[str]) -> None:
        """Opens the links to the keepers. Admits their keys besides those that the controller names."""
        accompany(map(key_of, keepers))
        self._outbox = outbox = Outbox()
        for number, endpoint in enumerate(keepers, 1):
            ranks = ranks_on(number, len(keepers) + 1, self._size)
            machine = _Machine(number, endpoint, ranks, outbox)
            self._machines.append(machine)
            for rank in ranks:
                ours, relayed = socket.socketpair()
                self._far_lines.append(ours)
                machine.relays[rank] = Relay(rank, relayed, machine.link.send)
                self._here.relays.append(machine.relays[rank])
        self._inbox = Inbox(self._host, LetterFromMachine, self._on_letter, name=f"{self._name}-ranks")

    # --- the thread that loads and steps

    def start(self) -> Shard:
        """Starts all ranks. Returns rank 0's Shard when they have found each other; each loads its part next."""
        from tandem.engine.model.checkpoint import choose_device
        from tandem.engine.model.shard import Shard
        from tandem.node.ranks.group import LOOPBACK, GroupCollectives, MeetingPlace, group_across, group_of_stage

        device = choose_device(self._engine.model.device)
        check_devices(self._engine.model.device, self._here.plan.ranks)
        self._apart = self._apart or device.type != "cpu"
        if not self._apart:
            self._here.kv_fd = os.memfd_create("tandem-kv")
        rendezvous, host = os.path.join(self._folder, "meeting"), LOOPBACK
        if self._machines:
            host, self._meeting = self._host, MeetingPlace(self._host)
            rendezvous = self._meeting.rendezvous
        self._here.start()
        self._prepare()
        for machine in self._machines:
            machine.link.send(BeginRanks(rendezvous))
        self._here.do(lambda: self._here.begin(rendezvous, apart=self._apart))
        self._wait_for(RankHere)
        self._check_kinds(device.type)
        try:
            group = GroupCollectives(0, self._size, rendezvous, device, host=host)
            parts = self._stages * self._contexts
            of_stage = group_of_stage(0, self._size, parts, rendezvous, device, host)
            across = group_across(0, self._size, self._contexts, rendezvous, device, host)
        except RuntimeError as error:
            raise self.cause_of(error) from error
        self._groups = [each for each in (group, of_stage, across) if each is not None]
        return Shard(
            0, self._size, group, self, str(device), self._here.kv_fd, self._stages, of_stage, self._contexts, across
        )

    def _prepare(self) -> None:
        """Returns when each machine has the model. It must have it before its ranks start, because ranks wait for each other only briefly."""
        if self._inbox is None:
            return
        for machine in self._machines:
            machine.link.send(PrepareRanks(self._inbox.endpoint, machine.number))
        self._wait_until(lambda: all(machine.is_prepared for machine in self._machines), "a machine")

    def _check_kinds(self, kind: str) -> None:
        for rank, other in self._kinds.items():
            if other != kind:
                raise ConfigurationError(
                    f"rank {rank} of a node would compute on {other}, and rank 0 on {kind}: set model.device to what all of its machines have"
                )

    def await_ready(self) -> None:
        """Returns when every other rank has loaded its part. Called after rank 0 has loaded its own."""
        self._wait_for(RankReady)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._here.watch_beats()
        self._serves = True
        for machine in self._machines:
            self._tell(machine, LeadBeat(True))

    def send(self, arrays: Sequence[np.ndarray]) -> None:
        if self._machines:
            step = step_of(arrays)
            for machine in self._machines:
                try:
                    machine.link.send(step)
                except NodeLost as error:
                    self._here.judge(error)
        self._here.send(arrays)

    def cause_of(self, error: Exception) -> Exception:
        return self._here.cause_of(error)

    @property
    def transfer_lines(self) -> list[socket.socket]:
        """The lines to the other ranks by which rank 0 orders transfers of their KV. Empty if all ranks share one KV cache."""
        return [*(self._here.lines[number] for number in sorted(self._here.lines)), *self._far_lines]

    @property
    def tier_lines(self) -> list[socket.socket]:
        """The lines to this machine's other ranks by which rank 0 orders copies of their KV to and from tiers."""
        return [self._here.tier_lines[number] for number in sorted(self._here.tier_lines)]

    @property
    def pids(self) -> list[int]:
        """The process ids of the other ranks on this machine."""
        return self._here.pids

    def stop(self) -> None:
        """Ends all other ranks. Returns when this machine's have ended, and each other machine has said so of its own or is late. Idempotent."""
        if self._is_stopped:
            return
        self._is_stopped = True
        self._here.stop()
        if self._inbox is not None:
            self._inbox.close()
        if self._outbox is not None:
            self._outbox.close()
        for line in self._far_lines:
            line.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _wait_for(self, said: type[FromRank]) -> None:
        self._wait_until(lambda: all(said in heard for heard in self._said.values()), "a rank")

    def _wait_until(self, holds: Callable[[], bool], what: str) -> None:
        self._progress.begin()
        changed = self._here.changed
        with changed:
            while self._here.verdict is None:
                if holds():
                    return
                if not (wait_s := self._progress.next_look(_STILL_S)):
                    raise InternalError(
                        f"{what} of {self._name} has made no progress for {_STILL_S:.0f} s, {self._progress}"
                    )
                changed.wait(wait_s)
            raise self._here.verdict

    # --- the thread that watches

    def rank_said(self, rank: int, message: RankHere | RankProgress | RankReady) -> None:
        if isinstance(message, RankProgress):
            self._progressed(f"rank {rank}: {message.what}", message.share)
        with self._here.changed:
            if isinstance(message, RankHere):
                self._kinds[rank] = message.device
            self._said[rank].add(type(message))
            self._here.changed.notify_all()

    def _progressed(self, what: str, share: float) -> None:
        self._progress.report(what, share)
        if self._report is not None:
            self._report(what, share)

    def look(self) -> None:
        if self._inbox is not None and self._inbox.died is not None:
            self._here.judge(InternalError(f"other machines are no longer heard: {self._inbox.died}"))
        seconds = self._most_ticks * TICK_S
        written = self._here.memory.written
        for machine in self._machines:
            self._tell(machine, LeadBeat(self._serves))
            machine.silent_ticks = 0 if machine.heard else machine.silent_ticks + 1
            machine.heard = False
            if machine.steps >= written:
                machine.behind_ticks = 0
            elif not machine.behind_ticks or machine.steps >= machine.asked:
                machine.asked, machine.behind_ticks = written, 1
            else:
                machine.behind_ticks += 1
            # Until all are ready, a process may be silent while it loads libraries, and `_wait_until` has its own deadline.
            if self._serves and machine.silent_ticks > self._most_ticks:
                self._here.judge(NodeLost(f"{machine.name} has said nothing for {seconds:.1f} s"))
            elif machine.behind_ticks > self._most_ticks:
                self._here.judge(NodeLost(f"{machine.name} has not got step {machine.asked} for {seconds:.1f} s"))

    def _tell(self, machine: _Machine, message: ToMachine) -> None:
        try:
            machine.link.send(message)
        except NodeLost as error:
            self._here.judge(error)

    def ending(self, verdict: TandemError | None) -> None:
        for machine in self._machines:
            self._tell(machine, EndRanks(at_once=verdict is not None))
        if verdict is not None:
            for group in self._groups:
                group.abort()

    def ended(self, verdict: TandemError | None) -> None:
        deadline = time.monotonic() + END_S + TICK_S
        if verdict is not None:
            self._lost(str(verdict))  # before the wait: a caller must not wait for a machine that may be lost
        for machine in self._machines:
            if not machine.has_ended.wait(max(0.0, deadline - time.monotonic())):
                logger.warning("%s does not say that its ranks have ended", machine.name)

    # --- the inbox's thread

    def _on_letter(self, letter: LetterFromMachine) -> None:
        machine = self._machines[letter.machine - 1]
        try:
            machine.numbers.check(letter.number)
        except NodeLost as error:
            self._here.judge(error)
            return
        machine.heard = True
        self._on_message(machine, letter.body)

    def _on_message(self, machine: _Machine, message: FromMachine) -> None:
        match message:
            case MachineBeat(steps):
                machine.steps = steps
            case LineBytes(rank, data):
                self._here.put(machine.relays[rank], data)
            case RanksPrepared():
                with self._here.changed:
                    machine.is_prepared = True
                    self._here.changed.notify_all()
            case MachineProgress(what, share):
                self._progressed(f"{machine.name}: {what}", share)
            case RanksFailed(why, operator):
                self._here.judge(ConfigurationError(why) if operator else NodeLost(why))
            case RanksEnded():
                machine.has_ended.set()
                if not self._is_stopped:
                    self._here.judge(NodeLost(f"{machine.name} has ended its ranks"))
            case _:
                self.rank_said(message.rank, message.said)
