"""Of two controllers of one deployment only the later one records and acts.

Ray replaces a controller that it takes for dead, and a process that stood still may wake up when its successor has begun. Each controller
writes its name into what it records, first of all when it takes over. A record that is neither its own nor the one that it read at first is
the proof that a later one has begun: the older one records nothing more, decides nothing more, and ends. So is a record that was there
and has gone, which the end of the deployment deletes.
"""

from __future__ import annotations

import asyncio
import logging
import secrets

import msgspec

from tandem.base.errors import TandemError, Unavailable
from tandem.cluster.launcher import StateStore
from tandem.cluster.tasks import Clock

logger = logging.getLogger(__name__)

STOOD_STILL_S = 1.0  # who has slept for this much longer than it meant to may have been replaced
_ASK_AGAIN_S = 1.0


class LaterController(Unavailable):
    """Another controller has taken over this deployment, or has ended it."""


class _Record(msgspec.Struct):
    writer: str = ""


class Turn:
    def __init__(self, store: StateStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self.name = secrets.token_hex(8)
        self._read: bytes | None = None  # what the predecessor recorded last
        self._has_recorded = False
        self._over: asyncio.Future[LaterController] = asyncio.get_running_loop().create_future()

    async def load(self) -> bytes | None:
        self._read = await self._store.load()
        return self._read

    async def save(self, state: bytes) -> None:
        """Raises LaterController if a later controller has begun."""
        await self._store.save(state, self._check)
        self._has_recorded = True

    def _check(self, kept: bytes | None) -> None:
        if kept is None:
            if self._read is None and not self._has_recorded:
                return
            error = LaterController("this deployment has been ended: `tandem serve` starts it again")
        elif kept == self._read or _writer(kept) == self.name:
            return
        else:
            error = LaterController("another controller has taken over this deployment: ask again")
        if not self._over.done():
            self._over.set_result(error)
        raise error

    async def over(self) -> None:
        """Raises LaterController once it is known that a later controller has begun."""
        raise await asyncio.shield(self._over)

    async def confirm(self) -> None:
        """Returns once this is certainly the latest controller; never if it is not."""
        while True:
            try:
                self._check(await self._store.load())
                return
            except LaterController:
                await asyncio.Event().wait()
            except TandemError as error:
                logger.warning("cannot see yet whether a later controller has begun; asking again: %s", error)
            await self._clock.sleep(_ASK_AGAIN_S)


def _writer(kept: bytes) -> str:
    return msgspec.msgpack.decode(kept, type=_Record).writer


class TurnClock(Clock):
    """A controller's clock. When it shows that the process stood still, nothing goes on before the turn is confirmed."""

    def __init__(self, clock: Clock, turn: Turn) -> None:
        self._clock = clock
        self._turn = turn
        self._stood_still = False

    def now(self) -> float:
        return self._clock.now()

    async def sleep(self, seconds: float) -> None:
        until = self.now() + seconds
        await self._clock.sleep(seconds)
        self._stood_still |= self.now() - until > STOOD_STILL_S
        if self._stood_still:
            await self._turn.confirm()
            self._stood_still = False
