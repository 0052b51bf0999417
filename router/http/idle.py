"""Which connections could give way to new ones when there are as many as are allowed."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

C = TypeVar("C")


class IdleConnections(Generic[C]):
    """Connections without a request in progress, the longest idle first. Connections of clients that have
    shown a key are kept apart, because they give way last.

    A client that has not sent a whole header yet counts as idle, and as one without a key. The latest to come
    is the last of them to give way, so a client has time to send its header however many strangers come.
    """

    def __init__(self) -> None:
        self._keyless: OrderedDict[C, None] = OrderedDict()
        self._keyed: OrderedDict[C, None] = OrderedDict()

    def add(self, connection: C, *, has_key: bool) -> None:
        """One that is idle already keeps its place."""
        (self._keyed if has_key else self._keyless).setdefault(connection)

    def remove(self, connection: C) -> None:
        self._keyless.pop(connection, None)
        self._keyed.pop(connection, None)

    def take_longest(self) -> C | None:
        """Removes and returns the one that gives way next."""
        for idle in (self._keyless, self._keyed):
            if idle:
                return idle.popitem(last=False)[0]
        return None
