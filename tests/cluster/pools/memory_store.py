"""A controller's state store, in this process's memory."""

from __future__ import annotations

from tandem.base.errors import TandemError
from tandem.cluster.launcher import CheckKept


class MemoryStore:
    """A `cluster.launcher.StateStore` that several controllers of one test may use one after another."""

    def __init__(self) -> None:
        self.state: bytes | None = None
        self.error: TandemError | None = None  # raised by every call: the store is away
        self.save_error: TandemError | None = None  # raised by what writes: it is full

    async def load(self) -> bytes | None:
        if self.error is not None:
            raise self.error
        return self.state

    async def save(self, state: bytes, check: CheckKept | None = None) -> None:
        if error := self.error or self.save_error:
            raise error
        if check is not None:
            check(self.state)
        self.state = state
