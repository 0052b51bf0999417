"""What a controller keeps, in this process' memory."""

from __future__ import annotations


class MemoryStore:
    """A `cluster.hosts.StateStore` for controllers that all end with this process."""

    def __init__(self) -> None:
        self._state: bytes | None = None

    async def load(self) -> bytes | None:
        return self._state

    async def save(self, state: bytes) -> None:
        self._state = state
