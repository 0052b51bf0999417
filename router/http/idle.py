"""Which connections could give way to new ones when there are as many as are allowed."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

from tandem.base.shares import Shares

C = TypeVar("C")


class IdleConnections(Generic[C]):
    """Connections without a request in progress, by the key that their last request had, each key's longest
    idle first.

    Those without a key give way first. A client that has not sent a whole header yet is among them, but the
    latest to come gives way last, so it has time to send its header. For that the others must not fill the
    connections: a key that has more than half of them, idle or with requests, gives way before all.
    """

    def __init__(self, busy: Shares) -> None:
        """`busy`: connections with a request in progress, by key."""
        self._busy = busy
        self._idle: dict[str, OrderedDict[C, None]] = {"": OrderedDict()}
        self._keyed: OrderedDict[C, str] = OrderedDict()  # those with a key, and which
        self._largest = ""  # the key that had more than half when it was last looked at

    def add(self, connection: C, owner: str) -> None:
        """One that is idle already keeps its place. `owner`: the key's name, "" without one."""
        if not owner:
            self._idle[""].setdefault(connection)
        elif connection not in self._keyed:
            self._keyed[connection] = owner
            self._idle.setdefault(owner, OrderedDict())[connection] = None
            if self._has_most(owner):
                self._largest = owner

    def remove(self, connection: C) -> None:
        owner = self._keyed.pop(connection, "")
        idle = self._idle[owner]
        idle.pop(connection, None)
        if owner and not idle:
            del self._idle[owner]

    def _has_most(self, owner: str) -> bool:
        return 2 * (len(self._idle.get(owner, ())) + self._busy.of(owner)) > self._busy.limit

    def take_longest(self) -> C | None:
        """Removes and returns the one that gives way next."""
        found: C | None = None
        if self._largest in self._idle and self._largest and self._has_most(self._largest):
            found = next(iter(self._idle[self._largest]))
        elif self._idle[""]:
            found = next(iter(self._idle[""]))
        elif self._keyed:
            found = next(iter(self._keyed))
        if found is not None:
            self.remove(found)
        return found
