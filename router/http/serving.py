"""The server's socket, its connections, and how it ends."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import time
from collections.abc import Callable, Sequence
from email.utils import formatdate
from typing import Any

import msgspec
from starlette.types import ASGIApp

from tandem.router.config import Limits, RouterConfig
from tandem.router.http.accepting import BACKLOG, Acceptor, Tally
from tandem.router.http.certificate import Certificate
from tandem.router.http.protocol import HttpConnection
from tandem.wire.errors import ConfigurationError

logger = logging.getLogger(__name__)

# A client that pauses for longer between two requests finds its connection closed by a router that leaves.
LEAVING_IDLE_S = 5.0
# For connections that were accepted last, and are in their handshake of TLS.
LEAVING_ACCEPTED_S = 1.0
# Clients that know the address from before find a router there for so long.
FORMER_ADDRESS_S = 60.0
# For nodes, the model's files, logs, and Ray.
OTHER_DESCRIPTORS = 512


def limits_that_fit(limits: Limits) -> Limits:
    """With no more connections than there are descriptors for, those left out that nodes and files need: clients that
    idle must not keep the router from its nodes."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return limits
    room = max(1, soft - OTHER_DESCRIPTORS if soft > 2 * OTHER_DESCRIPTORS else soft // 2)
    if room >= limits.connections:
        return limits
    logger.warning(
        "%d connections are taken at once and not router.limits.connections' %d: this process may have no more than "
        "%d open files; raise its limit (ulimit -n)",
        room,
        limits.connections,
        soft,
    )
    return msgspec.structs.replace(limits, connections=room)


def is_at(listener: socket.socket, host: str, port: int) -> bool:
    """Whether that is where it listens. Port 0 is any."""
    there = listener.getsockname()
    try:
        found = socket.getaddrinfo(host, port or there[1], listener.family, socket.SOCK_STREAM)
    except OSError:
        return False
    return any(address[:2] == there[:2] for *_, address in found)


def listen_beside(others: Sequence[socket.socket], host: str, port: int) -> socket.socket:
    """At another address than `others`, which may have the same port on one of several addresses, or on all: the kernel allows that to
    sockets that all say so, and these say it for this moment alone."""
    for there in others:
        there.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        return listen(host, port, shares=bool(others))
    finally:
        for there in others:
            there.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 0)


def listen(host: str, port: int, *, shares: bool = False) -> socket.socket:
    """Before anything is loaded, so that a taken port is said at once. `shares`: beside a socket of this port that shares it, too."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named: asyncio turns Nagle's algorithm off only on sockets that say that they are TCP, and
    # with it on every answer of two writes waits 40 ms for the client's delayed acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(shares))
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigurationError(
            f"router.port: cannot listen on {host}:{port}: {error.strerror or error}; choose another port"
        ) from error
    listener.listen(BACKLOG)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 0)
    listener.setblocking(False)
    return listener


class HttpServer:
    """Connections to an ASGI application, on the event loop that makes it. Signals belong to that process."""

    def __init__(self, app: ASGIApp, config: RouterConfig, on_cut: Callable[[], None]) -> None:
        self.app = app
        self.limits = limits_that_fit(config.limits)
        self.timeouts = config.timeouts
        self.connections: set[HttpConnection] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.stopping = False
        self._on_cut = on_cut
        tls = config.tls_certificate, config.tls_key
        self._certificate = Certificate(tls[0], tls[1]) if tls[0] is not None and tls[1] is not None else None
        self._acceptor: Acceptor | None = None
        self._former: list[Acceptor] = []  # at addresses that clients knew before
        self._date = (0, b"")  # of this second
        self._emptied: asyncio.Event | None = (
            None  # set when the last connection is closed, once it is waited for
        )

    def on_cut(self) -> None:
        self._on_cut()

    def on_closed(self, connection: HttpConnection) -> None:
        self.connections.discard(connection)
        if self._emptied is not None and not self.connections:
            self._emptied.set()

    def date(self) -> bytes:
        now = int(time.time())
        if now != self._date[0]:
            self._date = (now, formatdate(now, usegmt=True).encode())
        return self._date[1]

    def begin(
        self,
        listener: socket.socket,
        tally: Tally,
        former: Sequence[tuple[socket.socket, Tally]] = (),
        on_former_closed: Callable[[], None] = lambda: None,
    ) -> None:
        """All are its own from now on. `former`: of addresses that are given up, where it answers for a while."""
        loop = asyncio.get_running_loop()
        certificate = self._certificate
        tls: dict[str, Any] = {}
        if certificate is not None:
            # A client that does not come to an end with its handshake has as long as one with its header.
            tls = {"ssl": certificate.context, "ssl_handshake_timeout": self.timeouts.header}

        async def open_one(connection: socket.socket) -> None:
            await loop.connect_accepted_socket(lambda: HttpConnection(self, loop), connection, **tls)

        self._acceptor = Acceptor(listener, tally, open_one, lambda: len(self.connections))
        self._former = [Acceptor(*each, open_one, lambda: len(self.connections)) for each in former]
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
        """To be called every few seconds."""
        if self._certificate is not None:
            self._certificate.reload_if_changed()

    async def leave(self, deadline: float) -> bool:
        """Takes no new connection; requests that come on those that there are get an answer, the last on each. Whether all were
        closed by then."""
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
        """Answers that are under way have `grace_s` to be sent; clients that do not read them by then are cut off."""
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
