"""Which ended turns keep their blocks, because their job's next turn is expected to begin with the same tokens soon.

A job is an agent's work: a turn, a tool call, the next turn. Between two turns the first one's blocks are free, and other
requests may take them; a pin keeps them. A pin costs memory on a guess. So only turns of a known job get one, if its turns
continue each other and its tool is quick; a pin ends by itself, and it is broken when no request could run otherwise.

The scheduler knows them as `parts.TurnPins`.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable

from tandem.engine.request import Request
from tandem.engine.scheduling.lifecycle import ANSWERED
from tandem.engine.scheduling.pins.policy import Continuum
from tandem.engine.scheduling.pins.tools import Tools, ToolTimes
from tandem.engine.scheduling.state import Totals
from tandem.wire.requests import TransferRole

MOST_JOBS = 16384
# A prefill node pins a prompt before the decode node has written the answer. The router reports the answer's end, and the pin
# lasts at least this long to wait for it.
ANSWER_S = 60.0


@dataclasses.dataclass(slots=True)
class Pin:
    request: Request  # an ended one
    until: float


@dataclasses.dataclass(slots=True)
class _Turn:
    """The last turn of a job that ended on this node."""

    request_id: str
    half: tuple[int, bytes]  # the index of its middle block, and that block's chained hash
    ended_at: float | None  # None while a decode node writes its answer
    tools: Tools = None
    is_told: bool = False  # a router has named its tools
    is_over: bool = False  # the job's next turn has arrived
    continued: bool = True  # False when the next turn did not begin with the same tokens


class Pins:
    """The pins of a node and the last turn of each job. Time passes only by `clock`."""

    def __init__(
        self, limit_s: float, clock: Callable[[], float], free: Callable[[Request], None], totals: Totals
    ) -> None:
        """`limit_s` is how long a pin lasts, and the longest tool that one is made for. `free` takes the blocks of a turn whose pin has
        ended: they stay in the prefix cache until they are taken, as after any request."""
        self.policy = Continuum(self)
        self.by_job: dict[str, Pin] = {}  # in the order in which they were made
        self.times = ToolTimes(limit_s)
        self.changed = False  # a pin was added or removed since the queues were last put in order
        self._clock = clock
        self._free = free
        self._totals = totals
        self._turns: OrderedDict[str, _Turn] = OrderedDict()
        self._is_closed = False
        # Some router has named a turn's tools. From then on a turn is judged when its tools are named, not when it ends.
        self._is_told = False

    def has(self, job_id: str | None) -> bool:
        return job_id in self.by_job

    @property
    def pinned(self) -> dict[str, Request]:
        return {job_id: pin.request for job_id, pin in self.by_job.items()}

    def keep(self, request: Request) -> bool:
        job_id = request.facts.job_id
        if job_id is None or request.status not in ANSWERED or request.is_distrusted:
            return False
        if self.has(job_id):
            self._unpin(job_id, "next_turn")
        until = self._wanted_for(request)
        if until:
            self.by_job[job_id] = Pin(request, until)
            self.changed = True
            self._totals.pins_made += 1
        return bool(until)

    def _unpin(self, job_id: str, why: str) -> None:
        self._free(self.by_job.pop(job_id).request)
        self.changed = True
        ended = self._totals.pins_ended
        ended[why] = ended.get(why, 0) + 1

    def end_all(self, why: str) -> None:
        for job_id in list(self.by_job):
            self._unpin(job_id, why)

    def _wanted_for(self, request: Request) -> float:
        """Notes the end of a job's turn. Returns the time at which its pin is to end; 0 for no pin."""
        job_id, hasher = request.facts.job_id, request.block_hasher
        if job_id is None or request.facts.is_last_step or request.facts.pooling is not None or hasher is None:
            return 0.0
        hashes = request.block_hashes[: request.num_computed_tokens // hasher.block_size]
        if not hashes:
            return 0.0
        now, before = self._clock(), self._turns.pop(job_id, None)
        transfer = request.transfer
        is_sent_away = transfer is not None and transfer.role is TransferRole.PRODUCE
        middle = (len(hashes) - 1) // 2
        turn = _Turn(request.request_id, (middle, hashes[middle]), None if is_sent_away else now)
        self._turns[job_id] = turn
        if len(self._turns) > MOST_JOBS:
            self._turns.popitem(last=False)
        if self._is_closed or (before is not None and not before.continued):
            return 0.0
        seconds = self.times.limit_s if self._is_told else self.times.pin_s(None)
        return now + (max(seconds, ANSWER_S) if is_sent_away else seconds) if seconds else 0.0

    def arrived(self, request: Request) -> None:
        """A job's next turn has arrived, which tells how long its tool took. If it does not continue the pinned one, the pin ends."""
        continues = self._continues(request)
        if continues:
            self._totals.pins_met += 1
        elif continues is False and request.facts.job_id is not None:
            self._unpin(request.facts.job_id, "other_prompt")

    def _continues(self, request: Request) -> bool | None:
        """Returns whether the turn continues the pinned one; None without a pin. If it does, the pin's time begins again, so that it
        lasts while the turn waits in line."""
        job_id = request.facts.job_id
        if job_id is None or (turn := self._turns.get(job_id)) is None:
            return None
        now = self._clock()
        if not turn.is_over:
            self._learn(turn, now)
            turn.is_over = True
        place, block_hash = turn.half
        hashes = request.block_hashes
        turn.continued = len(hashes) > place and hashes[place] == block_hash
        pin = self.by_job.get(job_id)
        if pin is None:
            return None
        if turn.continued and now < pin.until:
            pin.until = now + self.times.limit_s
        return turn.continued

    def turn_ended(self, job_id: str, request_id: str, tools: Tools) -> bool:
        self._is_told = True
        turn = self._turns.get(job_id)
        if turn is None or turn.request_id != request_id or turn.is_over:
            return False
        now = self._clock()
        if turn.ended_at is None:
            turn.ended_at = now
        turn.tools, turn.is_told = tools, True
        seconds = self.times.pin_s(tools)
        if (pin := self.by_job.get(job_id)) is None:
            return False
        pin.until = now + seconds
        if not seconds:
            self._unpin(job_id, "slow_tool")
        return not seconds

    def _learn(self, turn: _Turn, until: float, at_least: float = 0.0) -> None:
        """Learns a tool's time from a turn. If routers name tools here, a turn whose tools were not named is ignored."""
        if turn.ended_at is not None and (turn.is_told or not self._is_told):
            self.times.took(turn.tools, max(until - turn.ended_at, at_least))

    def overdue(self) -> list[str]:
        """Returns the jobs whose pins have ended, the earliest first. The tools of turns whose next turn has not arrived are
        noted as slower than the limit."""
        if not self.by_job:
            return []
        now = self._clock()
        late = sorted((pin.until, job_id) for job_id, pin in self.by_job.items() if now >= pin.until)
        for until, job_id in late:
            turn = self._turns.get(job_id)
            if turn is not None and not turn.is_over:
                self._learn(turn, until, at_least=2 * self.times.limit_s)
        return [job_id for _, job_id in late]

    def sweep(self) -> bool:
        for job_id in self.overdue():
            self._unpin(job_id, "time")
        changed, self.changed = self.changed, False
        return changed

    def give_way(self, besides: str | None) -> bool:
        job_id = min(self.by_job, key=lambda job_id: (job_id == besides, self.by_job[job_id].until), default=None)
        if job_id is None:
            return False
        self._unpin(job_id, "memory")
        return True

    def next_end(self) -> float | None:
        return min((pin.until for pin in self.by_job.values()), default=None)

    @property
    def is_due(self) -> bool:
        """A pin's time is over, and it has not been removed yet."""
        until = self.next_end()
        return until is not None and until <= self._clock()

    def close(self) -> None:
        self._is_closed = True
        self.end_all("closing")
