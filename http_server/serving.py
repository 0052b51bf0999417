"""A router's server: the listening socket, which process accepts a connection, the open connections, and the
end.

Several processes may share the socket, and should get equally many connections. The kernel wakes all of them
for a connection, and the first to accept has it; idle processes wake in the same order every time. So a
process that has more connections than another waits for a moment and lets the others be first. The moment is
short, so a process that is busy or hangs keeps no client waiting. Each process's count stands in a page of
shared memory that goes with the socket.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import mmap
import os
import resource
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import islice
from typing import Any

import msgspec
from starlette.types import ASGIApp

from tandem.base.errors import ConfigurationError
from tandem.base.shares import Shares
from tandem.http_server.certificate import Certificate
from tandem.http_server.idle import IdleConnections
from tandem.http_server.protocol import HttpConnection
from tandem.http_server.settings import RefusalBody, ServerLimits, ServerTimeouts
from tandem.http_server.turns import Turns

logger = logging.getLogger(__name__)

PLACES = 64  # how many processes may share a socket
STAMP_S = 0.25
# A process whose count is older than this is not waited for.
STALE_S = 1.0
# The wait for each connection more than another process has, and the longest wait.
WAIT_S, LONGEST_WAIT_S = 0.002, 0.01
# How long to wait after running out of descriptors or memory.
EXHAUSTED_S = 1.0
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
ACCEPTS_AT_ONCE = 16  # streams go on after so many
HANDSHAKES = 64  # as many may be under way however many connections are open
BACKLOG = 2048
_LOCK = struct.Struct("hhqqi4x")  # the kernel's struct flock
# A router that leaves closes connections that are idle for longer than this.
LEAVING_IDLE_S = 5.0
# How long a router that leaves waits for connections in their TLS handshake.
LEAVING_ACCEPTED_S = 1.0
# How long a router answers at an address that it has given up.
FORMER_ADDRESS_S = 60.0
# Descriptors kept for nodes, the model's files, logs and Ray.
OTHER_DESCRIPTORS = 512


class Tally:
    """How many connections each process has, in shared memory. A process writes only its own place, which it
    holds by a file lock for as long as it lives; the kernel releases the lock."""

    def __init__(self, memory: int | None = None) -> None:
        """`memory`: a descriptor of another process's tally. The caller still owns it."""
        given = os.memfd_create("tandem-connections", os.MFD_CLOEXEC) if memory is None else memory
        try:
            if memory is None:
                os.ftruncate(given, mmap.PAGESIZE)
            # Opened again, because a lock belongs to the open file, which descriptors that were sent share.
            self.descriptor = os.open(f"/proc/self/fd/{given}", os.O_RDWR | os.O_CLOEXEC)
        finally:
            if memory is None:
                os.close(given)
        self._page = mmap.mmap(self.descriptor, mmap.PAGESIZE)
        self._words = memoryview(self._page).cast("d")  # for each place: connections, and when that was written
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
        """Writes this process's count. None: it accepts none, and no other process waits for it."""
        if self._place is not None:
            self._words[2 * self._place] = float(connections or 0)
            self._words[2 * self._place + 1] = 0.0 if connections is None else time.monotonic()

    def lead(self, connections: int) -> int | None:
        """Returns how many connections this process has more than the process with the fewest; None when
        there is no other."""
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
    """Accepts connections and passes each to `open_one`, on the event loop that makes it. `connections`: how
    many open connections this process has, of at most `most`."""

    def __init__(
        self,
        listener: socket.socket,
        tally: Tally,
        open_one: Callable[[socket.socket], Awaitable[object]],
        connections: Callable[[], int],
        most: int,
    ) -> None:
        self._listener = listener
        self._tally = tally
        self._open_one = open_one
        self._connections = connections
        self._most = most
        self._loop = asyncio.get_running_loop()
        self._opening: dict[asyncio.Task[None], None] = {}  # in the order in which they came
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
            self._opening[task] = None
            task.add_done_callback(self._opening.pop)
        self._limit_opening()
        self._tally.set(self.count)

    def _limit_opening(self) -> None:
        """Ends the connections that have been longest in their handshake where there are too many: clients that never finish one must not
        take the descriptors that nodes and files need."""
        surplus = len(self._opening) - max(HANDSHAKES, self._most - self._connections())
        for task in list(islice(self._opening, max(0, surplus))):
            task.cancel()

    async def _begin(self, connection: socket.socket) -> None:
        try:
            await self._open_one(connection)
        except OSError as error:  # TLS errors are OSErrors, too. The client is gone or does not speak TLS.
            logger.debug("a connection did not begin: %s", error)
            connection.close()

    def close(self, *, takes_the_line: bool = False) -> None:
        """Stops accepting; connections in their handshake go on. `takes_the_line`: first accepts what waits
        in the backlog, which would be reset if no other process has the socket. Idempotent."""
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


def limits_that_fit(limits: ServerLimits) -> ServerLimits:
    """Lowers the limit of connections to what the process's descriptors allow, after those that nodes and
    files need, so that idle clients never keep the router from its nodes."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return limits
    room = max(1, soft - OTHER_DESCRIPTORS if soft > 2 * OTHER_DESCRIPTORS else soft // 2)
    if room >= limits.connections:
        return limits
    logger.warning(
        "%d connections are taken at once and not %d: this process may have no more than "
        "%d open files; raise its limit (ulimit -n)",
        room,
        limits.connections,
        soft,
    )
    return msgspec.structs.replace(limits, connections=room)


def is_at(listener: socket.socket, host: str, port: int) -> bool:
    """Whether the socket listens at this address. Port 0 matches any port."""
    there = listener.getsockname()
    try:
        found = socket.getaddrinfo(host, port or there[1], listener.family, socket.SOCK_STREAM)
    except OSError:
        return False
    return any(address[:2] == there[:2] for *_, address in found)


def listen_beside(others: Sequence[socket.socket], host: str, port: int) -> socket.socket:
    """Listens at another address than `others`, which may have the same port on one address or on all. The
    kernel allows that if all sockets set SO_REUSEPORT, so `others` have it set for this moment only."""
    for there in others:
        there.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        return listen(host, port, shares=bool(others))
    finally:
        for there in others:
            there.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 0)


def listen(host: str, port: int, *, shares: bool = False) -> socket.socket:
    """Listens at an address. Raises ConfigurationError when the port is taken. `shares`: beside other sockets
    of this port, which have SO_REUSEPORT set."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named because asyncio turns Nagle's algorithm off only on sockets that say that they are
    # TCP. With it on, every answer of two writes would wait 40 ms for the client's delayed acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(shares))
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigurationError(
            f"router.port: cannot listen on {host}:{port}: {error.strerror or error}; end what listens there, or choose "
            "another port"
        ) from error
    listener.listen(BACKLOG)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 0)
    listener.setblocking(False)
    return listener


class HttpServer:
    """Serves an ASGI application, on the event loop that makes it. Signals are handled by the process, not
    here."""

    def __init__(
        self,
        app: ASGIApp,
        limits: ServerLimits,
        timeouts: ServerTimeouts,
        error_body: RefusalBody,
        on_cut: Callable[[], None],
        certificate: Certificate | None = None,
    ) -> None:
        """`on_cut`: called when a client that does not read is cut off. `certificate`: clients must speak TLS."""
        self.app = app
        self.limits = limits_that_fit(limits)
        self.timeouts = timeouts
        self.error_body = error_body
        self.connections: set[HttpConnection] = set()
        self.busy = Shares(self.limits.connections, alone=1)
        self.idle: IdleConnections[HttpConnection] = IdleConnections(self.busy)
        self.tasks: set[asyncio.Task[None]] = set()
        self.turns = Turns()  # for requests to begin
        self.stopping = False
        self._on_cut = on_cut
        self._certificate = certificate
        self._acceptor: Acceptor | None = None
        self._former: list[Acceptor] = []  # at addresses that this router has given up
        # Set when the last connection is closed. None until `leave` is called.
        self._emptied: asyncio.Event | None = None

    def on_cut(self) -> None:
        self._on_cut()

    def on_closed(self, connection: HttpConnection) -> None:
        self.connections.discard(connection)
        if self._emptied is not None and not self.connections:
            self._emptied.set()

    def begin(
        self,
        listener: socket.socket,
        tally: Tally,
        former: Sequence[tuple[socket.socket, Tally]] = (),
        on_former_closed: Callable[[], None] = lambda: None,
    ) -> None:
        """Begins to accept connections, and owns the sockets and tallies from now on. `former`: those of
        addresses that are given up, where it accepts for FORMER_ADDRESS_S more."""
        loop = asyncio.get_running_loop()
        certificate = self._certificate
        tls: dict[str, Any] = {}
        if certificate is not None:
            # A client has as long for its TLS handshake as for a header.
            tls = {"ssl": certificate.context, "ssl_handshake_timeout": self.timeouts.header}

        async def open_one(connection: socket.socket) -> None:
            await loop.connect_accepted_socket(lambda: HttpConnection(self, loop), connection, **tls)

        def accept(at: socket.socket, counted: Tally) -> Acceptor:
            return Acceptor(at, counted, open_one, lambda: len(self.connections), self.limits.connections)

        self._acceptor = accept(listener, tally)
        self._former = [accept(*each) for each in former]
        if former:
            loop.call_later(FORMER_ADDRESS_S, self._give_up_former, on_former_closed)

    def _give_up_former(self, then: Callable[[], None]) -> None:
        then()
        for acceptor in self._former:
            acceptor.close(takes_the_line=True)

    def _accept_no_more(self, *, takes_the_line: bool = False) -> None:
        for acceptor in (self._acceptor, *self._former):
            if acceptor is not None:
                acceptor.close(takes_the_line=takes_the_line)

    def look_at_certificate(self) -> None:
        """Loads a changed certificate. Must be called every few seconds."""
        if self._certificate is not None:
            self._certificate.reload_if_changed()

    async def leave(self, deadline: float) -> bool:
        """Accepts no new connection, and answers the last request on each open one. Returns False if some
        were still open at the deadline (on the event loop's clock)."""
        self._emptied = asyncio.Event()
        self.stopping = True
        self._accept_no_more(takes_the_line=True)
        for connection in list(self.connections):
            connection.expect_the_last(LEAVING_IDLE_S)
        try:
            async with asyncio.timeout_at(deadline):
                await asyncio.sleep(LEAVING_ACCEPTED_S)
                while self.connections:
                    self._emptied.clear()
                    await self._emptied.wait()
        except TimeoutError:
            return False
        return True

    async def end(self, grace_s: float) -> None:
        """Ends the server. Running answers have `grace_s` to be sent; clients that have not read them by then
        are cut off."""
        self.stopping = True
        if self._acceptor is None:
            return
        self._accept_no_more()
        for connection in list(self.connections):
            connection.shutdown()
        if self.tasks:
            _, unsent = await asyncio.wait(list(self.tasks), timeout=grace_s)
            for task in unsent:
                task.cancel()
            if unsent:
                await asyncio.wait(unsent, timeout=grace_s)
        for connection in list(self.connections):
            if connection.transport.get_write_buffer_size() > 0 or not connection.transport.is_closing():
                connection.transport.abort()
