"""What the bodies of all requests may take together while they are read. Each by itself is bounded where it is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tandem.wire.errors import Overloaded


class BodyBudget:
    """Bytes as they have come, not as they were announced: an announcement takes nothing from anybody."""

    def __init__(self, limit: int, on_refused: Callable[[], None]) -> None:
        self._limit = limit
        self._on_refused = on_refused
        self.held = 0

    @contextmanager
    def share(self) -> Iterator[BodyShare]:
        """One request's. Whatever it took is given back at the end of the block, however that is reached."""
        share = BodyShare(self)
        try:
            yield share
        finally:
            self.held -= share.size

    def take(self, size: int) -> None:
        if self.held + size > self._limit:
            self._on_refused()
            raise Overloaded(
                f"the requests that are being read take up the {self._limit} bytes that there are for them; "
                "send this one again a little later"
            )
        self.held += size


class BodyShare:
    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self.size = 0

    def take(self, size: int) -> None:
        """Raises Overloaded when there is no room for it."""
        self._budget.take(size)
        self.size += size
