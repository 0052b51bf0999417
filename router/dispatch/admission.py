"""Which sequences may run, which wait, and which one is next.

A sequence is admitted when a decode node has the blocks that it may take, and while fewer than
`inflight_per_node` sequences per node run, so nodes get as much work as they can hold. A waiting sequence
holds nothing on any node. When the expected wait, here and in nodes' lines, is too long, the answer is 503
with Retry-After.

A tenant alone may have everything. Several share by their weights what is scarce:

- **Reading** (`reading.py`). Nodes get few prompts in advance, and the next one is that of the tenant for which the
  fewest tokens were computed. What a tenant alone had sent to nodes comes back when another comes.
- **Places and blocks.** The next goes to the tenant that holds the least KV; of those that hold about the same, up to one
  sequence, to the one for which the fewest tokens were computed. The tenant that holds most gives some up until each
  has its part: its latest sequences pause, and go on later from where they were. Background answers never pause,
  because other routers may be reading them from their node. So one tenant's have at most as many places as they leave
  free, which is a half.

What runs when nothing else does (the lines of batches) has no part in this: `idle_places.py`.
"""

from __future__ import annotations

import asyncio
import enum
import math
from collections.abc import Callable

from tandem.base.errors import DeadlineExceeded, TandemError
from tandem.router.dispatch.expected_wait import MIN_RETRY_AFTER_S, DeadlineOutOfReach, ExpectedWait, QueueFull
from tandem.router.dispatch.giving_way import pause_for
from tandem.router.dispatch.idle_places import IdlePlaces
from tandem.router.dispatch.line import WaitingLine
from tandem.router.dispatch.reading import NoReaders, Readers, ReadingShares
from tandem.router.dispatch.slots import AskedPlaces, Slots
from tandem.router.dispatch.tenants import TenantAccounts
from tandem.router.metrics import RouterMetrics

MOST_PASSED_OVER = 32
BETWEEN_PAUSES_S = 0.25
GRANTS_A_PASS = 16  # each begins a sequence; streams go on after so many


class _Scarce(enum.Enum):
    """What the first request in line lacks."""

    PLACES = enum.auto()
    BLOCKS = enum.auto()
    READING = enum.auto()


class Admission:
    """Gives out places, fairly between tenants. Within a tenant the request goes first that is due first
    (`WaitingLine`). A tenant has a share of the line, too.

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
        readers: Readers = NoReaders(),  # noqa: B008 (it has no state)
        weight_of: Callable[[str], float] = lambda tenant: 1.0,
    ) -> None:
        """`has_room(tokens, promised)`: whether a node has the blocks for a sequence of `tokens`, after the
        `promised` tokens of admitted sequences that have not begun.

        `is_paused`: an operator holds all requests back, so there is no place.

        `admit_within_s`: a request is refused if it would wait longer than this until its prompt is begun.
        """
        self._capacity = capacity
        self._timeout_s = timeout_s
        self._clock = clock
        self._metrics = metrics
        self._on_release = on_release
        self._has_room = has_room
        self._is_paused = is_paused
        self._by_priority = by_priority
        self._line = WaitingLine(max_queued, timeout_s)
        self.waits = ExpectedWait(self._line, readers, metrics, timeout_s, admit_within_s)
        self._accounts = TenantAccounts(weight_of, clock)
        self._reading = ReadingShares(self._accounts, readers, clock)
        self.idle_work = IdlePlaces()
        self._lacks: _Scarce | None = None  # what the last request that did not get a place lacked
        self._is_reading_scarce = False  # what tenants share: reading, or places and blocks
        self._paused_at = -math.inf  # when a sequence was last paused
        self._going_on = False  # a call of `pump` is due in the next pass of the event loop
        self.held = 0
        self.promised = 0  # tokens of sequences that have a place and have not begun

    # --- what others see

    @property
    def queued(self) -> int:
        """Sequences in line."""
        return self._line.queued

    @property
    def capacity(self) -> int:
        return self._capacity()

    @property
    def idle_room(self) -> int:
        """How many places are idle now, for what runs when nothing else does; those that it has do not count."""
        return 0 if self._line else self.idle_work.room(self.held, self._capacity())

    def oldest_wait_s(self) -> float:
        """How long the oldest request in line has waited."""
        now = self._clock()
        return max((now - slots.came for slots in self._line), default=0.0)

    # --- a request comes

    async def acquire(self, tenant: str, asked: AskedPlaces, deadline: float) -> Slots:
        """Returns when the first of the places is there; the others may come later. Waits until `deadline` or
        for `timeout_s`, whichever ends first. Raises QueueFull or DeadlineExceeded."""
        account, now = self._accounts.of(tenant), self._clock()
        slots = Slots(self, account, asked)
        if not self._by_priority:
            slots.priority = 0
        self._line.set_due(slots, now)
        self.waits.check(slots, now)
        self._accounts.come(account)
        at_once = 0
        while not self._line and slots.wanted and self._fits(slots):
            at_once += 1
            self._grant(slots)
        if slots.wanted and (why := self.waits.why_refused(tenant, slots.wanted, at_once)) is not None:
            slots.wanted = 0  # it never joined the line
            slots.release_all()
            self._accounts.leave(account)
            self._metrics.refusals.inc("queue_full")
            raise QueueFull(why, self.waits.retry_after_s(tenant))
        if slots.wanted:
            self._line.join(slots, now)
            self.pump()
        if slots.held:
            self._metrics.router_queue_time.observe(0)
            return slots
        await self._wait_for_first(slots, deadline)
        return slots

    async def _wait_for_first(self, slots: Slots, deadline: float) -> None:
        began = self._clock()
        start_by = math.inf if slots.first_by is None else slots.first_by - self.waits.reading_s(slots)
        timeout = min(self._timeout_s, deadline - began, start_by - began)
        slots.first = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(max(0.0, timeout)):
                await slots.first
        except TimeoutError:
            slots.release_all()
            self._metrics.deadlines.inc("queue")
            what = "requests are paused" if self._is_paused() else "no node had room for the request"
            why = f"{what}, and it waited for {max(0.0, timeout):.0f} s"
            retry_after_s = self.waits.retry_after_s(slots.account.name)
            if start_by - began <= timeout:
                raise DeadlineOutOfReach(f"{why} of its X-Tandem-Deadline", retry_after_s) from None
            if self._timeout_s < deadline - began:
                raise QueueFull(why, retry_after_s) from None
            raise DeadlineExceeded(why) from None
        except BaseException:
            slots.release_all()
            raise
        self._metrics.router_queue_time.observe(self._clock() - began)

    def acquire_idle(self, asked: AskedPlaces) -> Slots:
        """Returns all places for what runs when nothing else does, if as many blocks stay free as it may take. Raises
        QueueFull when they are not idle."""
        fits = self._has_room(2 * asked.kv_tokens, self.promised) or not self.held
        if not (fits and self.idle_room >= (asked.count if self.idle_work.held else 1)):
            raise QueueFull("every place is taken or wanted by requests that are waited for", MIN_RETRY_AFTER_S)
        slots = Slots(self, self.idle_work.account, asked, when_idle=True)
        for _ in range(asked.count):
            self._grant(slots)
        return slots

    def _fits(self, slots: Slots) -> bool:
        free = self._capacity() - self.held
        return (
            free > 0
            and slots.may_have_one_of(free)
            and (not self._reading.are_full(self.promised) or self._reading.may_go(slots))
            and self._has_room(slots.kv_tokens, self.promised)
        )

    def refuse_all(self, error: TandemError) -> None:
        """Refuses all requests in line."""
        for slots in list(self._line):
            slots.refuse(error)
        self.idle_work.refuse_all(error)

    # --- what `Slots` tell

    def leave(self, slots: Slots, count: int) -> None:
        if count == 0:
            return
        if slots.when_idle:
            self.idle_work.leave(slots, count)
            return
        self._line.leave(slots, count)
        self._accounts.leave(slots.account)
        self.on_sent()  # those behind it may have waited for its blocks
        self._on_release()

    def give_back(self, slots: Slots, count: int) -> None:
        self._free(slots, count)
        self.waits.on_end(count, self._clock())
        self.pump()
        self._on_release()

    def take_back(self, slots: Slots) -> None:
        """A sequence has paused for another tenant. The place is passed on by who asked for it."""
        self._metrics.sequences_paused.inc()
        if slots.when_idle:
            self._free(slots, 1)
            self.idle_work.rest(slots)
            return
        self._line.rejoin(slots)
        self._free(slots, 1)

    def on_pool_change(self) -> None:
        """A status came, or a node."""
        if self._line or self.idle_work:
            self.pump()
        else:
            self._reading.look()

    def on_sent(self) -> None:
        if self._line:
            self._pump_soon()

    def _grant(self, slots: Slots) -> None:
        self.held += 1
        slots.account.add(slots, 1)
        slots.was_free = not self._reading.holds_back
        slots.grant()

    def _free(self, slots: Slots, count: int) -> None:
        self.held -= count
        slots.account.add(slots, -count)
        if not slots.when_idle:
            self._accounts.leave(slots.account)

    # --- who is next

    def pump(self) -> None:
        """Gives out the free places. Called when a place is given back, a prompt was read, or a pool changes."""
        if self._line:
            self._reading.look()
        for _ in range(GRANTS_A_PASS):
            slots = self._next()
            if slots is None and self._make_way():
                slots = self._next()
            if slots is None:
                self._wake_resting()
                return
            self._line.next(slots, self._clock())
            self._grant(slots)
        if self._line:
            self._pump_soon()

    def _pump_soon(self) -> None:
        if not self._going_on:
            self._going_on = True
            asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        self._going_on = False
        self.pump()

    def _wake_resting(self) -> None:
        """Gives places back to what runs when nothing else does, once no request waits."""
        for _ in range(GRANTS_A_PASS):
            if self._line or not self.idle_work or self.held >= self._capacity():
                return
            self._grant(self.idle_work.next())

    def _next(self) -> Slots | None:
        """Returns the request whose turn it is, or None. A request whose blocks no node has is passed over, so
        that others can go on. After MOST_PASSED_OVER times the whole line waits for its blocks. No tenant that
        holds more passes over one that holds less."""
        self._lacks = None
        if not self._line:
            return None
        # Checked first, because counting a pool's room is costly and every status of every node calls this.
        if (free := self._capacity() - self.held) <= 0:
            self._note_lack(_Scarce.PLACES)
            return None
        turns = self._turns()
        if self._reading.are_full(self.promised):
            self._note_lack(_Scarce.READING)
            had_least = min(turns, key=lambda slots: (slots.priority, slots.account.time))
            turns = [had_least] if self._reading.may_go(had_least) else []
        passed: list[Slots] = []
        least = math.inf
        for slots in turns:
            account = slots.account
            if not slots.may_have_one_of(free):
                continue
            if account.load - slots.kv_tokens / account.weight > least:
                break
            if self._has_room(slots.kv_tokens, self.promised):
                for other in passed:
                    other.passed += 1
                return slots
            passed.append(slots)
            if slots.passed >= MOST_PASSED_OVER:
                break
            least = min(least, account.load)
        if passed:
            self._note_lack(_Scarce.BLOCKS)
        return None

    def _note_lack(self, lacks: _Scarce) -> None:
        self._lacks, self._is_reading_scarce = lacks, lacks is _Scarce.READING

    def _turns(self) -> list[Slots]:
        """The first requests of all lines, in the order of their turns."""
        turns = self._line.heads()
        if len(turns) > 1:
            # A few sequences that fill all nodes can at no moment be divided as the weights are, but over time.
            most = max(slots.kv_tokens / slots.account.weight for slots in turns)
            turns.sort(key=lambda slots: self._turn(slots, most))
        return turns

    def _turn(self, slots: Slots, most: float) -> tuple[int, float, float]:
        """Tenants go by what they share: reading, or places and blocks. `most`: of the KV by weight that one of them asks
        for. Those that hold as much, but for so much, go by the tokens that were computed for them."""
        account = slots.account
        return slots.priority, 0.0 if self._is_reading_scarce else account.load // most, account.time

    def _make_way(self) -> bool:
        """Pauses sequences for the first request in line that may have a place. Returns whether it did, so that the
        line is looked at again. Does nothing while no node serves at all."""
        lacks, capacity = self._lacks, self._capacity()
        if lacks is None or not capacity:
            return False
        now = self._clock()
        waits = now < self._paused_at + BETWEEN_PAUSES_S
        if lacks is _Scarce.READING:
            paused = not waits and self._reading.take_back(self._turns()[0])
        else:
            # The blocks of a paused sequence are free with a node's next status.
            for_a_place = lacks is _Scarce.PLACES
            if waits and not for_a_place:
                return False
            turns = self._turns()
            paused = self.idle_work.send_to_rest(turns[0], for_a_place=for_a_place)
            if not paused:
                waiting = next((slots for slots in turns if slots.may_have_one_of(1)), None)
                paused = waiting is not None and pause_for(waiting, self._accounts, for_a_place=for_a_place)
        if paused:
            self._paused_at = now
        return paused
