"""Connections from a listening socket that several processes may share, taken so that each gets as many as the others.

The kernel wakes all of them for a connection, and whichever is first has it; idle ones are first in the same order every time. So a
process that has more connections than another lets the others be first, for a moment: one that is busy, or hangs, keeps none waiting.
How many each has stands in a page of memory that goes with the socket.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import mmap
import os
import socket
import struct
import time
from collections.abc import Awaitable, Callable

logger = logging.getLogger(__name__)

PLACES = 64  # processes that may share a socket
STAMP_S = 0.25
# One that has not said for so long how many it has is not waited for.
STALE_S = 1.0
# For each connection that it has more than another, and for all of them.
WAIT_S, LONGEST_WAIT_S = 0.002, 0.01
# Out of descriptors or memory: trying at once would be in vain.
EXHAUSTED_S = 1.0
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
ACCEPTS_AT_ONCE = 64
BACKLOG = 2048
_LOCK = struct.Struct("hhqqi4x")  # the kernel's struct flock


class Tally:
    """How many connections each process has. Each writes its own place alone, which is its own as long as it lives: the kernel gives
    its lock back."""

    def __init__(self, memory: int | None = None) -> None:
        """`memory`: a descriptor of another process's. It stays the caller's."""
        given = os.memfd_create("tandem-connections", os.MFD_CLOEXEC) if memory is None else memory
        try:
            if memory is None:
                os.ftruncate(given, mmap.PAGESIZE)
            # Opened by itself: a lock belongs to what was opened, and descriptors that were sent share that.
            self.descriptor = os.open(f"/proc/self/fd/{given}", os.O_RDWR | os.O_CLOEXEC)
        finally:
            if memory is None:
                os.close(given)
        self._page = mmap.mmap(self.descriptor, mmap.PAGESIZE)
        self._words = memoryview(self._page).cast(
            "d"
        )  # of each place: connections, and when that was written
        self._place = next((place for place in range(PLACES) if self._take(place)), None)
        self.set(None)

    def _take(self, place: int) -> bool:
        try:
            lock = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, place, 1, 0)
            fcntl.fcntl(self.descriptor, fcntl.F_OFD_SETLK, lock)
        except OSError:
            return False
        return True

    def set(self, connections: int | None) -> None:
        """None: it takes none, and no other waits for it."""
        if self._place is not None:
            self._words[2 * self._place] = float(connections or 0)
            self._words[2 * self._place + 1] = 0.0 if connections is None else time.monotonic()

    def lead(self, connections: int) -> int | None:
        """How many more those are than another one has. None: there is no other."""
        since = time.monotonic() - STALE_S
        others = [
            self._words[2 * place]
            for place in range(PLACES)
            if place != self._place and self._words[2 * place + 1] >= since
        ]
        return connections - int(min(others)) if others else None

    def close(self) -> None:
        """Idempotent."""
        if self._page.closed:
            return
        self.set(None)
        self._words.release()
        self._page.close()
        os.close(self.descriptor)


class Acceptor:
    """Takes connections and gives each to `open`, on the event loop that makes it. `connections`: how many it has that are open."""

    def __init__(
        self,
        listener: socket.socket,
        tally: Tally,
        open_one: Callable[[socket.socket], Awaitable[object]],
        connections: Callable[[], int],
    ) -> None:
        self._listener = listener
        self._tally = tally
        self._open_one = open_one
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None
        self._stamp: asyncio.TimerHandle | None = None
        self._closed = False
        self._keep_stamp()
        self._listener.setblocking(False)
        self._loop.add_reader(listener.fileno(), self._on_ready)

    @property
    def count(self) -> int:
        return self._connections() + len(self._opening)

    def _keep_stamp(self) -> None:
        self._tally.set(self.count)
        self._stamp = self._loop.call_later(STAMP_S, self._keep_stamp)

    def _on_ready(self) -> None:
        lead = self._tally.lead(self.count)
        if lead is not None and lead > 0:
            self._wait(min(lead * WAIT_S, LONGEST_WAIT_S))
            return
        self._accept(ACCEPTS_AT_ONCE if lead is None else 1)

    def _wait(self, seconds: float) -> None:
        self._loop.remove_reader(self._listener.fileno())
        self._pause = self._loop.call_later(seconds, self._go_on)

    def _go_on(self) -> None:
        self._pause = None
        self._loop.add_reader(self._listener.fileno(), self._on_ready)
        self._accept(1)

    def _accept(self, most: int) -> None:
        for _ in range(most):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                break
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    raise
                logger.error("no connection can be taken for %g s: %s", EXHAUSTED_S, error)
                self._wait(EXHAUSTED_S)
                break
            connection.setblocking(False)
            task = self._loop.create_task(self._begin(connection))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)
        self._tally.set(self.count)

    async def _begin(self, connection: socket.socket) -> None:
        try:
            await self._open_one(connection)
        except OSError as error:  # also of TLS; the client is gone, or does not speak it
            logger.debug("a connection did not begin: %s", error)
            connection.close()

    def close(self, *, takes_the_line: bool = False) -> None:
        """Takes no more; those that are in their handshake go on. `takes_the_line`: but for what waits in its line, which would be reset
        if no other process has the socket. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if takes_the_line:
            self._accept(BACKLOG)
        self._loop.remove_reader(self._listener.fileno())
        for timer in (self._pause, self._stamp):
            if timer is not None:
                timer.cancel()
        self._listener.close()
        self._tally.close()
