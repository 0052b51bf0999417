"""The places of what runs when nothing else does: the lines of batches.

It never stands in line. It gets places while no request waits, at most half of them, and gives one up as soon as a request
waits for a place.
"""

from __future__ import annotations

import math
from collections import deque

from tandem.base.errors import TandemError
from tandem.router.dispatch.slots import Slots, TenantAccount


class IdlePlaces:
    def __init__(self) -> None:
        self.account = TenantAccount("")  # of all of it together, beside the tenants'
        self._resting: deque[Slots] = deque()  # those that gave places up

    def __bool__(self) -> bool:
        """Whether some of it waits to go on."""
        return bool(self._resting)

    @property
    def held(self) -> int:
        return self.account.held

    def room(self, held: int, capacity: int) -> int:
        """How many more places it may have, of those that are free."""
        if self._resting:
            return 0
        return max(0, min(capacity - held, math.ceil(capacity / 2) - self.held))

    def rest(self, slots: Slots) -> None:
        """One of its sequences has paused."""
        if slots not in self._resting:
            self._resting.append(slots)

    def leave(self, slots: Slots, count: int) -> None:
        slots.wanted -= count
        slots.paused = slots.wanted
        if slots.wanted == 0:
            self._resting.remove(slots)

    def next(self) -> Slots:
        """Takes a resting sequence, to go on."""
        slots = self._resting.popleft()
        slots.paused -= 1
        if slots.wanted > 1:
            self._resting.append(slots)
        return slots

    def refuse_all(self, error: TandemError) -> None:
        for slots in list(self._resting):
            slots.refuse(error)

    def send_to_rest(self, first: Slots, *, for_a_place: bool) -> bool:
        """Pauses some of it for the first request in line: one for its place, or as many as have the blocks that it
        lacks, which are free with their nodes' next statuses. Returns whether it paused any."""
        wanted = 1 if for_a_place else first.kv_tokens
        paused = False
        for slots in reversed(list(self.account.requests)):
            while wanted > 0 and slots.give_way():
                paused = True
                wanted -= 1 if for_a_place else slots.kv_tokens
        return paused
