"""The requests that wait for a place: each tenant's in an order of their own."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator

from tandem.base.shares import Shares
from tandem.router.dispatch.slots import Slots


class WaitingLine:
    """Each tenant has a line, and one for its background answers. In it the requests of one priority stand in the
    order in which they are due: by when their first token must come, or, if they do not say, by when they
    would have waited for too long, so none waits for ever. What has paused is due first.
    """

    def __init__(self, most: int, patience_s: float) -> None:
        # A tenant's first request may be as wide as half the line.
        self.shares = Shares(most, alone=most // 2)
        self._patience_s = patience_s
        self._queues: OrderedDict[tuple[str, bool], deque[Slots]] = OrderedDict()  # in the order of their turns
        self.queued = 0  # sequences
        self._pauses = 0

    def __bool__(self) -> bool:
        return bool(self._queues)

    def __len__(self) -> int:
        return len(self._queues)

    def __iter__(self) -> Iterator[Slots]:
        return (slots for queue in self._queues.values() for slots in queue)

    @property
    def tenants(self) -> set[str]:
        return {name for name, _ in self._queues}

    def heads(self) -> list[Slots]:
        """The first request of each line, in the order of their turns."""
        return [queue[0] for queue in self._queues.values()]

    def before(self, slots: Slots) -> int:
        """How many sequences stand before the request, if it joins its line now."""
        own = self._queues.get(slots.line, ())
        return sum([other.wanted for other in own if not _is_after(other, slots)])

    def set_due(self, slots: Slots, now: float) -> None:
        late = now + self._patience_s
        slots.due = late if slots.first_by is None or slots.held else min(slots.first_by, late)

    def join(self, slots: Slots, now: float) -> None:
        slots.came = now
        self._stand_in(slots)
        self._count(slots, slots.wanted)
        self.shares.take(slots.account.name, slots.wanted)

    def rejoin(self, slots: Slots) -> None:
        """One of its sequences has paused."""
        self._count(slots, 1)
        queue = self._queues.get(slots.line)
        if queue is not None and slots in queue:
            queue.remove(slots)
        self._pauses += 1
        slots.due = -float(self._pauses)
        self._stand_in(slots)

    def next(self, slots: Slots, now: float) -> None:
        """Takes the next of its sequences out of the line, at whose head the request stands."""
        queue = self._queues[slots.line]
        queue.popleft()
        slots.passed = 0
        self._count(slots, -1)
        if slots.paused:
            slots.paused -= 1
        else:
            self.shares.take(slots.account.name, -1)
        if slots.wanted > 1:
            if not slots.paused:
                slots.due = now + self._patience_s
            self._stand_in(slots)
        if queue:
            self._queues.move_to_end(slots.line)
        else:
            del self._queues[slots.line]

    def leave(self, slots: Slots, count: int) -> None:
        self.shares.take(slots.account.name, -min(count, slots.wanted - slots.paused))
        slots.wanted -= count
        slots.paused = min(slots.paused, slots.wanted)
        self._count(slots, -count)
        if slots.wanted == 0:
            queue = self._queues[slots.line]
            queue.remove(slots)
            if not queue:
                del self._queues[slots.line]

    def _count(self, slots: Slots, count: int) -> None:
        self.queued += count
        slots.account.in_line += count

    def _stand_in(self, slots: Slots) -> None:
        queue = self._queues.setdefault(slots.line, deque())
        place = len(queue)
        while place and _is_after(queue[place - 1], slots):
            place -= 1
        queue.insert(place, slots)


def _is_after(other: Slots, slots: Slots) -> bool:
    return (other.priority, other.due) > (slots.priority, slots.due)
