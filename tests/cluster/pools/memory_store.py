"""What a controller keeps, in this process' memory."""

from __future__ import annotations

from tandem.wire.errors import TandemError


class MemoryStore:
    """A `cluster.launcher.StateStore` for controllers that all end with this process."""

    def __init__(self) -> None:
        self.state: bytes | None = None
        self.error: TandemError | None = None  # it is away

    async def load(self) -> bytes | None:
        if self.error is not None:
            raise self.error
        return self.state

    async def save(self, state: bytes) -> None:
        if self.error is not None:
            raise self.error
        self.state = state
