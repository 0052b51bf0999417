"""What several owners share, such as the bytes of bodies being read: how much of it one of them may hold."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary


class Shares:
    """A limited amount of something, and what each owner holds of it.

    An owner may take more as long as it then holds no more than is still free. So one owner gets at most a
    half, each of two a third, and something is always left for the next. An owner's first holding may be as
    large as `alone`, whatever others hold, if it is free. Where `alone` is at most half of the limit, no
    single owner can keep another's first holding out.

    The owner "" stands for all clients where there are no keys. It may hold everything.
    """

    def __init__(self, limit: int, alone: int) -> None:
        self.limit = limit
        self._alone = alone
        self._of: dict[str, int] = {}
        self.held = 0

    def of(self, owner: str) -> int:
        return self._of.get(owner, 0)

    def fits(self, owner: str, size: int, *, has: int = 0) -> bool:
        """Whether the owner may take this much. `has`: how much of what it holds is part of the same
        holding."""
        free = self.limit - self.held - size
        if free < 0 or not owner:
            return free >= 0
        own = self.of(owner)
        return own + size <= free or (own == has and own + size <= self._alone)

    def part(self, size: int) -> str:
        """What is taken up if this much does not fit: all, or the owner's part."""
        return "this key's part of" if self.held + size <= self.limit else "all"

    def take(self, owner: str, size: int) -> None:
        """Counts an amount. A negative one is given back."""
        self.held += size
        own = self._of.get(owner, 0) + size
        if own:
            self._of[owner] = own
        else:
            self._of.pop(owner, None)


class OneAtATime:
    """Costly work in threads, of which each owner does one piece at a time. Several would take the cores, and
    the interpreter, from the event loop.

    The owner "" stands for all clients where there are no keys, and is not limited.
    """

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[tuple[int, str], asyncio.Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def turn(self, owner: str) -> AsyncIterator[None]:
        if not owner:
            yield
            return
        # By event loop, too: a lock belongs to one.
        lock = self._locks.setdefault((id(asyncio.get_running_loop()), owner), asyncio.Lock())
        async with lock:
            yield
