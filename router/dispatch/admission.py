"""Which sequences may run, which wait, and which one is next.

A sequence is admitted when a decode node has the blocks that it may take, and while fewer than
`inflight_per_node` sequences per node run, so nodes get as much work as they can hold. A waiting sequence
holds nothing on any node. When the expected wait, here and in nodes' lines, is too long, the answer is 503
with Retry-After.

A tenant alone may have all places. When others wait, those with fewer places go first, and the tenant with
most gives places up until each has an even part: its latest sequences pause, and go on later from where they
were. Background answers never pause, because other routers may be reading them from their node. So one
tenant's have at most as many places as they leave free, which is a half.

What runs when nothing else does (the lines of batches) never stands in line. It gets places while no request waits, at most
half of them, and gives one up as soon as a request waits for a place.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from tandem.base.errors import DeadlineExceeded, Overloaded, TandemError
from tandem.base.shares import Shares
from tandem.router.metrics import RouterMetrics
from tandem.router.policy.views import Average

MIN_RETRY_AFTER_S = 1
MOST_PASSED_OVER = 32
BETWEEN_PAUSES_S = 0.25
GRANTS_A_PASS = 16  # each begins a sequence; streams go on after so many
MAX_RETRY_AFTER_S = 60


class QueueFull(Overloaded):
    """A refusal with the time after which the client should try again."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Slots:
    """The places of one HTTP request. Each of its sequences needs one; they come one at a time, in the
    tenant's turns."""

    def __init__(
        self,
        admission: Admission,
        tenant: str,
        wanted: int,
        tokens: int,
        priority: int,
        *,
        background: bool = False,
        when_idle: bool = False,
    ) -> None:
        self._admission = admission
        self._on_place: Callable[[], None] | None = None
        self._on_refused: Callable[[TandemError], None] | None = None
        self._on_give_way: Callable[[], bool] | None = None
        self.tenant = tenant
        self.background = background  # a background answer, which has a line of its own within its tenant's
        self.when_idle = when_idle  # it runs when nothing else does
        self.wanted = wanted  # places that it still waits for
        self.paused = 0  # how many of these are for sequences that gave their place to another tenant
        # The expected length of its longest sequence, which decides how many blocks it needs.
        self.tokens = tokens
        self.priority = priority  # lower goes first
        self.came = 0.0  # when it joined the line
        self.held = 0
        self.passed = 0  # how often others were admitted before it because their blocks were free
        self.unbegun = 0  # held places on which no sequence has begun
        self.first: asyncio.Future[None] | None = None  # set with the first place; `acquire` waits for it

    def listen(
        self,
        on_place: Callable[[], None],
        on_refused: Callable[[TandemError], None],
        on_give_way: Callable[[], bool] | None = None,
    ) -> None:
        """Sets the callbacks: `on_place` for each further place, `on_refused` when no more will come, and
        `on_give_way` when another tenant needs a place; it pauses a sequence, calls `pause_one`, and returns
        True, or returns False."""
        self._on_place, self._on_refused, self._on_give_way = on_place, on_refused, on_give_way

    def unlisten(self) -> None:
        self._on_place = self._on_refused = self._on_give_way = None

    @property
    def line(self) -> tuple[str, bool]:
        return self.tenant, self.background

    def give_way(self) -> bool:
        return self._on_give_way is not None and self._on_give_way()

    def pause_one(self) -> None:
        """A sequence that had begun gives its place up, and stands first in its tenant's line for another."""
        self.held -= 1
        self.wanted += 1
        self.paused += 1
        self._admission.take_back(self)

    def grant(self, count: int) -> None:
        self.wanted -= count
        self.held += count
        self.unbegun += count
        self._admission.promised += count * self.tokens
        if self.first is not None and not self.first.done():
            self.first.set_result(None)
        if self._on_place is not None:
            for _ in range(count):
                self._on_place()

    def refuse(self, error: TandemError) -> None:
        if self.first is not None and not self.first.done():
            self.first.set_exception(error)
        elif self._on_refused is not None:
            self._on_refused(error)

    def begin_one(self) -> None:
        """A sequence begins on a held place. From here on its nodes' statuses count its blocks."""
        if self.unbegun > 0:
            self.unbegun -= 1
            self._admission.promised -= self.tokens

    def release_one(self) -> None:
        """A sequence that had begun has ended."""
        if self.held > 0:
            self.held -= 1
            self._admission.give_back(self, 1)

    def drop_one(self) -> None:
        """A sequence has ended without having begun."""
        if self.wanted > 0:
            self._admission.leave(self, 1)
        else:
            self.begin_one()
            self.release_one()

    def release_all(self) -> None:
        self._admission.leave(self, self.wanted)
        while self.unbegun:
            self.begin_one()
        count, self.held = self.held, 0
        if count:
            self._admission.give_back(self, count)


@dataclass(slots=True)
class TenantPlaces:
    """A tenant that holds places: how many, how many of them for background answers, and with which requests, in the
    order in which they got their first."""

    held: int = 0
    in_background: int = 0
    requests: dict[Slots, None] = field(default_factory=dict)

    def add(self, slots: Slots, count: int) -> None:
        self.held += count
        self.in_background += count if slots.background else 0
        if count > 0:
            self.requests[slots] = None
        elif slots.held == 0:
            self.requests.pop(slots, None)


_NO_PLACES = TenantPlaces()


class Admission:
    """Gives out places, fairly between tenants: the next place goes to the tenant that has fewest, among
    equals to the one that has waited longest since its last one, and within the tenant to the request that has
    waited longest since its last one. A tenant has a share of the line, too (`shares`).

    A place is for one sequence. A request with several sequences begins with its first place and goes to the
    end of its tenant's line for the next. So it keeps no place empty while it waits for others, no request
    waits for all of its places, and no more requests than the line is long overtake it before each of them.

    If nodes schedule by priority, the line does too: turns are taken among requests of one priority, and a
    request waits for all those with a lower number.
    """

    def __init__(
        self,
        capacity: Callable[[], int],
        max_queued: int,
        timeout_s: float,
        clock: Callable[[], float],
        metrics: RouterMetrics,
        on_release: Callable[[], None],
        has_room: Callable[[int, int], bool] = lambda tokens, promised: True,
        is_paused: Callable[[], bool] = lambda: False,
        *,
        by_priority: bool = False,
        admit_within_s: float | None = None,
        wait_at_nodes: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`has_room(tokens, promised)`: whether a node has the blocks for a sequence of `tokens`, after the
        `promised` tokens of admitted sequences that have not begun.

        `is_paused`: an operator holds all requests back, so there is no place.

        `admit_within_s`: a request is refused if it would wait longer than this until its prompt is begun.
        `wait_at_nodes`: the part of that wait that a request spends in a node's line.
        """
        self._capacity = capacity
        # A tenant's first request may be as wide as half the line.
        self._line = Shares(max_queued, alone=max_queued // 2)
        self._timeout_s = timeout_s
        self._clock = clock
        self._metrics = metrics
        self._on_release = on_release
        self._has_room = has_room
        self._is_paused = is_paused
        self._by_priority = by_priority
        self._admit_within_s = admit_within_s
        self._wait_at_nodes = wait_at_nodes
        # By tenant, background answers apart, in the order of their turns.
        self._queues: OrderedDict[tuple[str, bool], deque[Slots]] = OrderedDict()
        self._places: dict[str, TenantPlaces] = {}  # by tenant, while it holds any
        self.idle_work = TenantPlaces()  # what runs when nothing else does
        self._resting: deque[Slots] = deque()  # those of it that gave places up
        self._paused_at = -math.inf  # when a sequence was last paused
        self._going_on = False  # a call of `pump` is due in the next pass of the event loop
        self._between_ends = Average()
        self._last_end: float | None = None
        self.held = 0
        self.queued = 0  # sequences
        self.promised = 0  # tokens of sequences that have a place and have not begun

    async def acquire(
        self,
        tenant: str,
        count: int,
        deadline: float,
        tokens: int = 0,
        priority: int = 0,
        *,
        background: bool = False,
    ) -> Slots:
        """Returns when the first of `count` places is there; the others may come later. `tokens`: the length
        that each sequence is expected to reach, which decides how many blocks it needs. Waits until
        `deadline` or for `timeout_s`, whichever ends first. Raises QueueFull or DeadlineExceeded."""
        self._refuse_a_long_wait(tenant)
        slots = Slots(
            self, tenant, count, tokens, priority if self._by_priority else 0, background=background
        )
        at_once = 0
        while not self._queues and at_once < count and self._fits(slots):
            at_once += 1
            self._grant(slots)
        rest = count - at_once
        if rest and (why := self._why_refused(tenant, rest, at_once)) is not None:
            slots.wanted = 0  # it never joined the line
            slots.release_all()
            self._metrics.refusals.labels(reason="queue_full").inc()
            raise QueueFull(why, self.retry_after_s(tenant))
        if rest:
            slots.came = self._clock()
            _stand_in(self._queues.setdefault(slots.line, deque()), slots)
            self.queued += rest
            self._line.take(tenant, rest)
            self.pump()
            at_once = slots.held
        if at_once:
            self._metrics.router_queue_time.observe(0)
            return slots
        began = self._clock()
        timeout = min(self._timeout_s, deadline - began)
        slots.first = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(max(0.0, timeout)):
                await slots.first
        except TimeoutError:
            slots.release_all()
            self._metrics.deadlines.labels(phase="queue").inc()
            what = "requests are paused" if self._is_paused() else "no node had room for the request"
            why = f"{what}, and it waited for {timeout:.0f} s"
            if self._timeout_s < deadline - began:
                raise QueueFull(why, self.retry_after_s(tenant)) from None
            raise DeadlineExceeded(why) from None
        except BaseException:
            slots.release_all()
            raise
        self._metrics.router_queue_time.observe(self._clock() - began)
        return slots

    def acquire_idle(self, count: int, tokens: int = 0) -> Slots:
        """Returns all `count` places for what runs when nothing else does, if as many blocks stay free as it may take. Raises
        QueueFull when they are not idle."""
        work = self.idle_work
        fits = self._has_room(2 * tokens, self.promised) or not self.held
        if not (fits and self.idle_room >= (count if work.held else 1)):
            raise QueueFull(
                "every place is taken or wanted by requests that are waited for", MIN_RETRY_AFTER_S
            )
        slots = Slots(self, "", count, tokens, 0, when_idle=True)
        for _ in range(count):
            self._grant(slots)
        return slots

    @property
    def idle_room(self) -> int:
        """How many places are idle now, for what runs when nothing else does; those that it has do not count."""
        if self._queues or self._resting:
            return 0
        capacity = self._capacity()
        return max(0, min(capacity - self.held, math.ceil(capacity / 2) - self.idle_work.held))

    @property
    def has_waiting(self) -> bool:
        return bool(self._queues or self._resting)

    def _refuse_a_long_wait(self, tenant: str) -> None:
        """Raises QueueFull when the request would begin too late: its work would delay others and then be
        thrown away."""
        if self._admit_within_s is None:
            return
        wait = self._wait_at_nodes() + (self._expected_wait_s(tenant) if self.queued else 0.0)
        if wait > self._admit_within_s:
            self._metrics.refusals.labels(reason="long_wait").inc()
            raise QueueFull(
                f"a request would wait for about {wait:.1f} s before its prompt is read; router.admit_within is {self._admit_within_s:g} s",
                _in_bounds(wait - self._admit_within_s),
            )

    def oldest_wait_s(self) -> float:
        """How long the oldest request in line has waited."""
        now = self._clock()
        return max((now - slots.came for queue in self._queues.values() for slots in queue), default=0.0)

    @property
    def capacity(self) -> int:
        return self._capacity()

    def _fits(self, slots: Slots) -> bool:
        free = self._capacity() - self.held
        return free > 0 and self._may_have_more(slots, free) and self._has_room(slots.tokens, self.promised)

    def _may_have_more(self, slots: Slots, free: int) -> bool:
        """Whether the request may have one of `free` places, which a background answer of a tenant that has
        others may only if enough are left."""
        own = self._of(slots.tenant).in_background
        return not (slots.background and slots.tenant and own) or own + 1 <= free - 1

    def _why_refused(self, tenant: str, count: int, at_once: int) -> str | None:
        line = self._line
        if not line.fits(tenant, count):
            if line.held + count > line.limit:
                return f"{line.held} sequences wait already, and no more than {line.limit} may"
            return (
                f"{line.of(tenant)} sequences of this key wait already, and more would leave other keys too little "
                f"of the line, where {line.limit} may wait (router.limits.queued)"
            )
        wait = self._expected_wait_s(tenant)
        if at_once == 0 and wait > self._timeout_s:
            return f"{self.queued} sequences wait already, and this one would for about {wait:.0f} s"
        return None

    def leave(self, slots: Slots, count: int) -> None:
        """Takes `count` of its sequences out of the line."""
        if count == 0:
            return
        if slots.when_idle:
            slots.wanted -= count
            slots.paused = slots.wanted
            if slots.wanted == 0:
                self._resting.remove(slots)
            return
        self._line.take(slots.tenant, -min(count, slots.wanted - slots.paused))
        slots.wanted -= count
        slots.paused = min(slots.paused, slots.wanted)
        self.queued -= count
        if slots.wanted == 0:
            queue = self._queues[slots.line]
            queue.remove(slots)
            if not queue:
                del self._queues[slots.line]
        self._on_release()

    def give_back(self, slots: Slots, count: int) -> None:
        self._free(slots, count)
        now = self._clock()
        # The time between two ends says how fast the line moves, but only while there is a line.
        if self._last_end is not None and self.queued:
            self._between_ends.observe((now - self._last_end) / count)
        self._last_end = now if self.queued else None
        self.pump()
        self._on_release()

    def take_back(self, slots: Slots) -> None:
        """A sequence has paused for another tenant. The place is passed on by who asked for it."""
        self._free(slots, 1)
        self._metrics.sequences_paused.inc()
        if slots.when_idle:
            if slots not in self._resting:
                self._resting.append(slots)
            return
        self.queued += 1
        queue = self._queues.setdefault(slots.line, deque())
        if slots in queue:
            queue.remove(slots)
        _stand_in(queue, slots, first=True)

    def _grant(self, slots: Slots) -> None:
        self.held += 1
        if slots.when_idle:
            self.idle_work.add(slots, 1)
        else:
            self._places.setdefault(slots.tenant, TenantPlaces()).add(slots, 1)
        slots.grant(1)

    def _free(self, slots: Slots, count: int) -> None:
        self.held -= count
        if slots.when_idle:
            self.idle_work.add(slots, -count)
            return
        places = self._places[slots.tenant]
        places.add(slots, -count)
        if not places.held:
            del self._places[slots.tenant]

    def _of(self, tenant: str) -> TenantPlaces:
        return self._places.get(tenant, _NO_PLACES)

    def refuse_all(self, error: TandemError) -> None:
        """Refuses all requests in line."""
        for queue in list(self._queues.values()):
            for slots in list(queue):
                slots.refuse(error)
        for slots in list(self._resting):
            slots.refuse(error)

    def pump(self) -> None:
        """Gives out the free places. Called when a place is given back or a pool changes."""
        for _ in range(GRANTS_A_PASS):
            line = self._next_line()
            if line is None and self._make_way():
                line = self._next_line()
            if line is None:
                self._wake_resting()
                return
            queue = self._queues[line]
            slots = queue.popleft()
            slots.passed = 0
            self.queued -= 1
            if slots.paused:
                slots.paused -= 1
            else:
                self._line.take(slots.tenant, -1)
            if slots.wanted > 1:
                _stand_in(queue, slots, first=slots.paused > 0)
            if queue:
                self._queues.move_to_end(line)
            else:
                del self._queues[line]
            self._grant(slots)
        if self._queues and not self._going_on:
            self._going_on = True
            asyncio.get_running_loop().call_soon(self._go_on)

    def _wake_resting(self) -> None:
        """Gives places back to what runs when nothing else does, once no request waits."""
        for _ in range(GRANTS_A_PASS):
            if self._queues or not self._resting or self.held >= self._capacity():
                return
            slots = self._resting.popleft()
            slots.paused -= 1
            if slots.wanted > 1:
                self._resting.append(slots)
            self._grant(slots)

    def _go_on(self) -> None:
        self._going_on = False
        self.pump()

    def _turns(self) -> list[Slots]:
        """The first requests of all lines, in the order of their turns."""
        turns = [queue[0] for queue in self._queues.values()]
        if len(turns) > 1:
            turns.sort(key=lambda slots: (slots.priority, self._of(slots.tenant).held))
        return turns

    def _next_line(self) -> tuple[str, bool] | None:
        """Returns the line whose turn it is, or None. A request whose blocks no node has is passed over, so
        that others can go on. After MOST_PASSED_OVER times the whole line waits for its blocks. No tenant that
        has more places passes over one that has fewer."""
        if not self._queues or (free := self._capacity() - self.held) <= 0:
            # Checked first, because counting a pool's room is costly and every status of every node calls this.
            return None
        passed: list[Slots] = []
        fewest: int | None = None
        for slots in self._turns():
            held = self._of(slots.tenant).held
            if not self._may_have_more(slots, free):
                continue
            if fewest is not None and held > fewest + 1:
                return None
            if self._has_room(slots.tokens, self.promised):
                for other in passed:
                    other.passed += 1
                return slots.line
            if slots.passed >= MOST_PASSED_OVER:
                return None
            passed.append(slots)
            fewest = held if fewest is None else min(fewest, held)
        return None

    def _make_way(self) -> bool:
        """Pauses a sequence of a tenant that has more places than one that waits, and at least two more.
        Returns whether it did. Does nothing while no node serves at all."""
        if not self._queues:
            return False
        capacity, now = self._capacity(), self._clock()
        if capacity and self.idle_work.held and self._send_to_rest(now, for_a_place=self.held >= capacity):
            return True
        # Where places are free, blocks are missing. Those of a paused sequence are free with a node's next status.
        if not capacity or (self.held != capacity and now < self._paused_at + BETWEEN_PAUSES_S):
            return False
        waiting = next((slots for slots in self._turns() if self._may_have_more(slots, 1)), None)
        if waiting is None:
            return False
        few = self._of(waiting.tenant).held
        for other in sorted(self._places.values(), key=lambda places: places.held, reverse=True):
            if other.held < few + 2:
                return False
            for slots in reversed(other.requests):
                if slots.priority >= waiting.priority and slots.give_way():
                    self._paused_at = now
                    return True
        return False

    def _send_to_rest(self, now: float, *, for_a_place: bool) -> bool:
        """Pauses sequences of what runs when nothing else does, for the first request in line: one for its place, or as many as
        have the blocks that it lacks, which are free with their nodes' next statuses. Returns whether a place is free now."""
        if not for_a_place and now < self._paused_at + BETWEEN_PAUSES_S:
            return False
        wanted = 1 if for_a_place else self._turns()[0].tokens
        for slots in reversed(list(self.idle_work.requests)):
            while wanted > 0 and slots.give_way():
                self._paused_at = now
                wanted -= 1 if for_a_place else slots.tokens
        return for_a_place and self.held < self._capacity()

    def retry_after_s(self, tenant: str) -> int:
        """About how long the tenant's line takes, in whole seconds from MIN_RETRY_AFTER_S to
        MAX_RETRY_AFTER_S."""
        return _in_bounds(self._expected_wait_s(tenant))

    def _expected_wait_s(self, tenant: str) -> float:
        tenants = len({tenant, *(name for name, _ in self._queues)})
        before = min(self.queued + 1, (self._line.of(tenant) + 1) * tenants)
        return before * (self._between_ends.value or 0.0)


def _in_bounds(retry_after_s: float) -> int:
    return min(MAX_RETRY_AFTER_S, max(MIN_RETRY_AFTER_S, math.ceil(retry_after_s)))


def _stand_in(queue: deque[Slots], slots: Slots, *, first: bool = False) -> None:
    """Inserts at the end of the requests with the same priority, or at their beginning."""
    place = len(queue)
    while place and queue[place - 1].priority + first > slots.priority:
        place -= 1
    queue.insert(place, slots)
