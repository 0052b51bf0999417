"""Which finished turns keep their blocks, because their job's next turn is expected to begin with them soon.

A job is an agent's work: a turn, a tool call, the next turn. Between two turns the blocks of the first are free, and other
requests take them; with a pin they stay. A pin is a bet that costs memory, so it is made for a known job whose turns
continue each other and whose tool is quick, it ends by itself, and it gives way when no request could run otherwise.

Here is the account alone: the blocks are given back by `Lifecycle`.

How long tools take is learned from the time between a turn's end and the arrival of its job's next turn (`ToolTimes`).
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from tandem.engine.request import Request
from tandem.wire.requests import TransferRole

WEIGHT = 0.3  # of the newest time
MOST_TOOLS = 4096

# The tools that a turn called, by name. None: no router has said so yet, or none reads calls.
Tools = Sequence[str] | None

_UNNAMED = ""


class ToolTimes:
    """A tool that was never seen gets the benefit of the doubt."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._expected: OrderedDict[tuple[str, bool], float] = OrderedDict()  # the tools seen last at the end

    def expected(self, tools: Tools) -> float | None:
        """The slowest tool decides: calls of one turn run beside each other. None: not one of them is known."""
        known = [seconds for key in _keys(tools) if (seconds := self._expected.get(key)) is not None]
        return max(known, default=None)

    def pin_s(self, tools: Tools) -> float:
        """How long to pin a turn that called these; 0: the next turn is not expected within the limit."""
        expected = self.expected(tools)
        return 0.0 if expected is not None and expected > self.limit_s else self.limit_s

    def took(self, tools: Tools, seconds: float) -> None:
        """Counts for the tool that was expected to be the slowest, and first of all for one that is not known."""
        key = max(_keys(tools), key=lambda key: self._expected.get(key, float("inf")))
        before = self._expected.pop(key, seconds)
        self._expected[key] = before + WEIGHT * (seconds - before)
        if len(self._expected) > MOST_TOOLS:
            self._expected.popitem(last=False)


def _keys(tools: Tools) -> list[tuple[str, bool]]:
    """A turn whose calls are unknown is one kind of tool, and a turn without calls another: a person reads it."""
    if tools is None:
        return [(_UNNAMED, False)]
    return [(name, True) for name in tools] or [(_UNNAMED, True)]


MOST_JOBS = 16384
# A prefill node pins a prompt before its answer is written. It hears of the answer's end from the router, within this time.
ANSWER_S = 60.0


@dataclasses.dataclass(slots=True)
class Pin:
    request: Request  # has ended
    until: float


@dataclasses.dataclass(slots=True)
class _Turn:
    """The last turn of a job that ended here."""

    request_id: str
    half: tuple[int, bytes]  # which of its blocks is in the middle, and the hash of all up to there
    ended_at: float | None  # None: its answer is being written elsewhere
    tools: Tools = None
    is_told: bool = False  # which tools it called: a router has said so
    is_over: bool = False  # the next turn has come
    continued: bool = True  # and began as this one did


class Pins:
    def __init__(self, limit_s: float, clock: Callable[[], float]) -> None:
        """`limit_s`: how long a pin lasts, and the longest tool that one is made for."""
        self.by_job: dict[str, Pin] = {}  # in the order in which they were made
        self.times = ToolTimes(limit_s)
        self.changed = False  # a pin came or went since the line was last put in order
        self._clock = clock
        self._turns: OrderedDict[str, _Turn] = OrderedDict()
        self._is_closed = False
        self._is_told = False  # a router has said which tools were called: turns are judged when it does

    def has(self, job_id: str | None) -> bool:
        return job_id in self.by_job

    def wanted_for(self, request: Request) -> float:
        """When the pin of a job's request that has its answer is to end; 0: it gets none. Notes the turn's end."""
        job_id, hasher = request.job_id, request.block_hasher
        if job_id is None or request.is_last_step or request.pooling is not None or hasher is None:
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

    def add(self, request: Request, until: float) -> None:
        """The caller has taken away the pin that the job had before."""
        assert request.job_id is not None
        self.by_job[request.job_id] = Pin(request, until)
        self.changed = True

    def remove(self, job_id: str) -> Request:
        self.changed = True
        return self.by_job.pop(job_id).request

    def arrived(self, request: Request) -> bool | None:
        """A request of a job has come: the tool has taken so long. Whether it continues the turn that is pinned, whose pin then
        lasts as long again, for the line; None without a pin."""
        job_id = request.job_id
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

    def ended(self, job_id: str, request_id: str, tools: Tools) -> bool:
        """A router says that the turn's answer is whole, and which tools it called. False: its pin is to go."""
        self._is_told = True
        turn = self._turns.get(job_id)
        if turn is None or turn.request_id != request_id or turn.is_over:
            return True
        now = self._clock()
        if turn.ended_at is None:
            turn.ended_at = now
        turn.tools, turn.is_told = tools, True
        seconds = self.times.pin_s(tools)
        if (pin := self.by_job.get(job_id)) is None:
            return True
        pin.until = now + seconds
        return seconds > 0

    def _learn(self, turn: _Turn, until: float, at_least: float = 0.0) -> None:
        """Where routers name tools, a turn whose tools none of them has named yet teaches nothing."""
        if turn.ended_at is not None and (turn.is_told or not self._is_told):
            self.times.took(turn.tools, max(until - turn.ended_at, at_least))

    def overdue(self) -> list[str]:
        """The jobs whose pins have ended, in that order. A turn that is late says that its tool takes longer than the limit."""
        if not self.by_job:
            return []
        now = self._clock()
        late = sorted((pin.until, job_id) for job_id, pin in self.by_job.items() if now >= pin.until)
        for until, job_id in late:
            turn = self._turns.get(job_id)
            if turn is not None and not turn.is_over:
                self._learn(turn, until, at_least=2 * self.times.limit_s)
        return [job_id for _, job_id in late]

    def first_to_give_way(self, besides: str | None) -> str | None:
        """The job whose pin ends first, and `besides` last of all."""
        return min(
            self.by_job, key=lambda job_id: (job_id == besides, self.by_job[job_id].until), default=None
        )

    def next_end(self) -> float | None:
        return min((pin.until for pin in self.by_job.values()), default=None)

    @property
    def is_due(self) -> bool:
        """A pin has ended, and has not been swept away."""
        until = self.next_end()
        return until is not None and until <= self._clock()

    def close(self) -> Iterable[str]:
        """No further pin is made. The jobs that have one."""
        self._is_closed = True
        return list(self.by_job)
