"""The keeper: the process that starts, watches and ends a node's ranks on a machine other than rank 0's.

It knows no requests. It obeys rank 0 over a link and admits no other key. If it hears nothing from rank 0 for `_ORPHAN_SILENCES` times
`timeouts.nodes.rank_silence_s`, it ends its ranks by itself, because no order can reach a machine that is cut off. If the keeper
dies, the kernel kills its ranks with the thread that started them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import msgspec

from tandem.base.errors import ConfigurationError, InternalError, NodeLost, TandemError, Unavailable
from tandem.base.progress import Report
from tandem.machine.resources import core_quota
from tandem.node.config import NodeConfig
from tandem.node.ranks.link import LetterFromMachine, LetterToMachine, Numbers, Relay, SendingEnd, arrays_of
from tandem.node.ranks.messages import (
    BeginRanks,
    EndRanks,
    FromMachine,
    LeadBeat,
    LineBytes,
    MachineBeat,
    MachineProgress,
    OneStep,
    PrepareRanks,
    RankHere,
    RankProgress,
    RankReady,
    RankSaid,
    RanksEnded,
    RanksFailed,
    RanksPrepared,
)
from tandem.node.ranks.processes import (
    TICK_S,
    RankPlan,
    RankProcesses,
    check_devices,
    ranks_on,
    shares_of,
    with_memory_shared,
)
from tandem.wire.sockets import Inbox, Outbox, admit

logger = logging.getLogger(__name__)

# While rank 0 loads libraries, its process may send nothing for a long time.
_ORPHAN_SILENCES, _ORPHAN_LOADING_S = 5, 60.0

FindModel = Callable[[str, Report], str]


class RankKeeper:
    def __init__(self, config: NodeConfig, machine: int, find_model: FindModel | None = None) -> None:
        """`machine`: this machine's number within the node; 0 is rank 0's machine."""
        self._config = config
        self._machine = machine
        self._find_model = find_model
        self._place = config.others[machine - 1]
        self._lead = ""  # rank 0's public key
        self._inbox: Inbox[LetterToMachine] | None = None
        self._outbox = Outbox()
        self._link: SendingEnd | None = None
        self._numbers = Numbers("rank 0")
        self._processes: RankProcesses | None = None
        self._relays: dict[int, Relay] = {}
        self._heard = False  # whether rank 0 has sent a message since the last `look`
        self._serves = False
        self._silent_ticks = 0
        silence_s = config.timeouts.rank_silence_s
        self._most_ticks = max(1, round(_ORPHAN_SILENCES * silence_s / TICK_S))
        self._over = threading.Event()

    # --- any thread

    def open(self, lead: str) -> str:
        """Admits rank 0, whose public key is `lead`, and returns the endpoint for it. Idempotent; raises Unavailable for another key."""
        if self._inbox is None:
            self._lead = lead
            admit([lead])
            name = f"{self._config.node_id}-machine{self._machine}"
            self._inbox = Inbox(self._place.host, LetterToMachine, self._on_letter, name=name)
        elif lead != self._lead:
            raise Unavailable(f"{self._config.node_id} was another process when its ranks were begun here")
        return self._inbox.endpoint

    def hold(self, timeout_s: float) -> bool:
        """Waits up to `timeout_s` for the ranks here to end, and returns whether they have."""
        return self._over.wait(timeout_s)

    @property
    def pids(self) -> list[int]:
        return self._processes.pids if self._processes is not None else []

    def stop(self) -> None:
        """Ends the ranks here and returns when no process of them is left. Idempotent."""
        processes, self._processes = self._processes, None
        if processes is not None:
            processes.stop()
        inbox, self._inbox = self._inbox, None
        if inbox is not None:
            inbox.close()
        self._outbox.close()
        self._over.set()

    # --- the inbox's thread

    def _on_letter(self, letter: LetterToMachine) -> None:
        if self._processes is None and not isinstance(letter.body, PrepareRanks):
            return
        try:
            self._numbers.check(letter.number)
            self._heard = True
            self._on_message(letter)
        except TandemError as error:
            if self._processes is not None:
                self._processes.judge(error)

    def _on_message(self, letter: LetterToMachine) -> None:
        message, processes = letter.body, self._processes
        if isinstance(message, PrepareRanks):
            self._prepare(message)
            return
        if processes is None:
            raise InternalError("a message to ranks that nothing keeps")
        match message:
            case OneStep():
                processes.send(arrays_of(message))
            case LineBytes(rank, data):
                processes.put(self._relays[rank], data)
            case LeadBeat(serves):
                if serves and not self._serves:
                    self._serves = True
                    processes.do(processes.watch_beats)
            case BeginRanks(rendezvous):
                processes.do(lambda: self._begin(processes, rendezvous))
            case EndRanks(at_once):
                if at_once:
                    processes.judge(NodeLost("rank 0 ends its node"))
                else:
                    threading.Thread(target=processes.stop, name="end-ranks", daemon=True).start()

    def _prepare(self, message: PrepareRanks) -> None:
        config = self._config
        self._link = SendingEnd(
            self._outbox,
            message.lead,
            lambda number, body: LetterFromMachine(self._machine, number, body),  # type: ignore[arg-type]
        )
        # Under a CPU quota only the number of threads matters, so do not bind them to cores.
        cores = [] if core_quota() is not None else self._place.cores
        ranks = ranks_on(self._machine, config.machines, config.ranks)
        engine = config.engine
        threads = len(self._place.cores) or engine.model.threads
        # The configuration names a device on a machine with GPUs. Detecting one here would load libraries that only ranks need.
        device = "cpu" if self._place.device == "auto" else self._place.device
        model = msgspec.structs.replace(engine.model, device=device, threads=threads)
        plan = RankPlan(
            config.node_id,
            ranks,
            config.ranks,
            with_memory_shared(msgspec.structs.replace(engine, model=model), len(ranks)),
            shares_of(cores, threads, len(ranks)),
            config.logs,
            self._place.host,
            config.pipeline_parallel,
            config.context_parallel,
        )
        self._processes = RankProcesses(plan, self, config.timeouts.rank_silence_s)
        self._processes.start()
        threading.Thread(target=self._find, args=(self._processes,), name="find-model", daemon=True).start()

    # --- the find-model thread: it may fetch the model from the network

    def _find(self, processes: RankProcesses) -> None:
        try:
            plan = processes.plan
            if self._find_model is not None:
                path = self._find_model(plan.engine.model.path, self._report)
                model = msgspec.structs.replace(plan.engine.model, path=path)
                plan.engine = msgspec.structs.replace(plan.engine, model=model)
            check_devices(plan.engine.model.device, plan.ranks)
        except TandemError as error:
            processes.judge(error)
        except Exception as error:
            logger.exception("the model was not found")
            processes.judge(InternalError(f"{type(error).__name__}: {error}"))
        else:
            self._say(RanksPrepared())

    def _report(self, what: str, share: float) -> None:
        self._say(MachineProgress(what, share))

    # --- the thread that watches

    def _begin(self, processes: RankProcesses, rendezvous: str) -> None:
        processes.begin(rendezvous, apart=True)
        for rank, line in processes.lines.items():
            self._relays[rank] = Relay(rank, line, self._say)
        processes.relays += self._relays.values()

    def rank_said(self, rank: int, message: RankHere | RankProgress | RankReady) -> None:
        self._say(RankSaid(rank, message))

    def look(self) -> None:
        processes, inbox = self._processes, self._inbox
        if processes is None or inbox is None:
            return
        self._say(MachineBeat(processes.memory.written))
        self._silent_ticks = 0 if self._heard else self._silent_ticks + 1
        self._heard = False
        most = self._most_ticks
        if not self._serves:
            most = max(most, round(_ORPHAN_LOADING_S / TICK_S))
        if self._silent_ticks > most:
            processes.judge(NodeLost(f"rank 0 has said nothing for {most * TICK_S:.1f} s"))
        if inbox.died is not None:
            processes.judge(InternalError(f"rank 0 is no longer heard: {inbox.died}"))

    def ending(self, verdict: TandemError | None) -> None:
        if verdict is not None:
            self._say(RanksFailed(str(verdict), isinstance(verdict, ConfigurationError)))

    def ended(self, verdict: TandemError | None) -> None:
        self._say(RanksEnded())
        self._over.set()

    def _say(self, message: FromMachine) -> None:
        if self._link is None:
            return
        try:
            self._link.send(message)
        except NodeLost as error:
            if self._processes is not None:
                self._processes.judge(error)
