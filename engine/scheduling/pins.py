"""Which ended turns keep their blocks, because their job's next turn is expected to begin with the same tokens soon.

A job is an agent's work: a turn, a tool call, the next turn. Between two turns the first one's blocks are free, and other
requests may take them; a pin keeps them. A pin costs memory on a guess. So only turns of a known job get one, if its turns
continue each other and its tool is quick; a pin ends by itself, and it is broken when no request could run otherwise.

This file only keeps account of the pins; `Lifecycle` frees the blocks.

`ToolTimes` learns how long tools take from the time between a turn's end and the arrival of its job's next turn.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from tandem.engine.request import Request
from tandem.wire.requests import TransferRole

WEIGHT = 0.3  # of the newest time in a tool's average
MOST_TOOLS = 4096

# The names of the tools that a turn called; empty when it called none. None: no router has told, or none parses calls.
Tools = Sequence[str] | None

_UNNAMED = ""


class ToolTimes:
    """How long each tool takes. A tool that was never seen is assumed to be quick."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        # Seconds by tool, the least recently seen first.
        self._expected: OrderedDict[tuple[str, bool], float] = OrderedDict()

    def expected(self, tools: Tools) -> float | None:
        """The time of the slowest tool, because the calls of one turn run in parallel. None when none of them is known."""
        known = [seconds for key in _keys(tools) if (seconds := self._expected.get(key)) is not None]
        return max(known, default=None)

    def pin_s(self, tools: Tools) -> float:
        """How long to pin a turn that called `tools`; 0 when its next turn is not expected within the limit."""
        expected = self.expected(tools)
        return 0.0 if expected is not None and expected > self.limit_s else self.limit_s

    def took(self, tools: Tools, seconds: float) -> None:
        """A turn's calls took this long. The time counts for one of the tools: an unknown one, else the one expected to be the
        slowest."""
        key = max(_keys(tools), key=lambda key: self._expected.get(key, float("inf")))
        before = self._expected.pop(key, seconds)
        self._expected[key] = before + WEIGHT * (seconds - before)
        if len(self._expected) > MOST_TOOLS:
            self._expected.popitem(last=False)


def _keys(tools: Tools) -> list[tuple[str, bool]]:
    """The keys of a turn's tools. Turns whose calls are unknown share one key; turns without calls, which a person answers,
    share another."""
    if tools is None:
        return [(_UNNAMED, False)]
    return [(name, True) for name in tools] or [(_UNNAMED, True)]


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
    """The pins of a node and the last turn of each job. Time passes only by `clock`; the caller ends the pins that `overdue` returns."""

    def __init__(self, limit_s: float, clock: Callable[[], float]) -> None:
        """`limit_s` is how long a pin lasts, and the longest tool that one is made for."""
        self.by_job: dict[str, Pin] = {}  # in the order in which they were made
        self.times = ToolTimes(limit_s)
        self.changed = False  # a pin was added or removed since the queues were last put in order
        self._clock = clock
        self._turns: OrderedDict[str, _Turn] = OrderedDict()
        self._is_closed = False
        # Some router has named a turn's tools. From then on a turn is judged when its tools are named, not when it ends.
        self._is_told = False

    def has(self, job_id: str | None) -> bool:
        return job_id in self.by_job

    def wanted_for(self, request: Request) -> float:
        """Notes the end of a job's turn. Returns the time at which its pin is to end; 0 for no pin."""
        job_id, hasher = request.facts.job_id, request.block_hasher
        if (
            job_id is None
            or request.facts.is_last_step
            or request.facts.pooling is not None
            or hasher is None
        ):
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
        """Adds a pin. The caller has removed the one that the job had before."""
        assert request.facts.job_id is not None
        self.by_job[request.facts.job_id] = Pin(request, until)
        self.changed = True

    def remove(self, job_id: str) -> Request:
        self.changed = True
        return self.by_job.pop(job_id).request

    def arrived(self, request: Request) -> bool | None:
        """A job's next turn has arrived, which tells how long its tool took. Returns whether the turn continues the pinned one;
        None without a pin. If it does, the pin's time begins again, so that it lasts while the turn waits in line."""
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

    def ended(self, job_id: str, request_id: str, tools: Tools) -> bool:
        """A router reports that the turn's answer is complete, and which tools it called. Returns False when the caller must
        remove the turn's pin."""
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

    def first_to_give_way(self, besides: str | None) -> str | None:
        """The job whose pin is broken first: the one that ends first, and `besides` only when there is no other. None without
        pins."""
        return min(
            self.by_job, key=lambda job_id: (job_id == besides, self.by_job[job_id].until), default=None
        )

    def next_end(self) -> float | None:
        return min((pin.until for pin in self.by_job.values()), default=None)

    @property
    def is_due(self) -> bool:
        """A pin's time is over, and it has not been removed yet."""
        until = self.next_end()
        return until is not None and until <= self._clock()

    def close(self) -> Iterable[str]:
        """No further pin is made. Returns the jobs that have one, for the caller to remove."""
        self._is_closed = True
        return list(self.by_job)
