"""HTTP/1.1 on one connection: passes its requests to an ASGI application, one after the other, and holds the
limits that the application never sees.

A head that is too slow, too large or not HTTP is answered here, because it never becomes a request. In every
state that a client can leave its connection in, a timer runs.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import Callable
from typing import Protocol, cast

from starlette.types import ASGIApp

from tandem.base.errors import Overloaded
from tandem.base.shares import Shares
from tandem.http_server.call import END_OF_HEAD, STATUS_LINES, HttpCall, LengthBody, RequestHead
from tandem.http_server.chunked import ChunkedBody, FramingError
from tandem.http_server.idle import IdleConnections
from tandem.http_server.settings import RefusalBody, ServerLimits, ServerTimeouts
from tandem.http_server.timer import ConnectionTimer
from tandem.http_server.turns import Turns
from tandem.http_server.unsent import UnsentWatch

logger = logging.getLogger(__name__)

# A client that is still sending does not read a refusal yet. What it sends is dropped, up to these limits.
LINGER_BYTES = 64 << 20
LINGER_S = 2.0

_EMPTY_LINES = re.compile(rb"(?:\r\n)*")
_TLS_RECORD = b"\x16\x03"
_CODES = {408: "request_timeout", 431: "header_too_large", 503: "overloaded"}


class Server(Protocol):
    """What a connection needs of its server."""

    app: ASGIApp
    limits: ServerLimits
    timeouts: ServerTimeouts
    error_body: RefusalBody
    connections: set[HttpConnection]
    idle: IdleConnections[HttpConnection]
    busy: Shares  # connections with a request in progress, by its key
    tasks: set[asyncio.Task[None]]
    turns: Turns  # for requests to begin
    stopping: bool

    def on_cut(self) -> None: ...

    def on_closed(self, connection: HttpConnection) -> None: ...


class HttpConnection(asyncio.Protocol):
    """One client's connection. It is idle between requests; a request that arrives during an answer stays in
    the buffer.

    When there are as many connections as are allowed, an idle one gives way to a new one (`idle`). One with a
    request in progress never does, so a key has only a share of those (`shares`)."""

    transport: asyncio.Transport
    write: Callable[[bytes], None]

    def __init__(self, server: Server, loop: asyncio.AbstractEventLoop) -> None:
        self.server = server
        self.client: tuple[str, int] | None = None
        self.write_paused = False
        self._loop = loop
        self._buffer = bytearray()
        self._searched = 0  # how much of the buffer was searched for a head's end
        self._call: HttpCall | None = None  # the call that is being answered, or whose body is still arriving
        self._last_id = "-"  # the id of the request that was answered last
        self._read_paused = False  # a call has more than it has read, or the next request is long
        self._rest: asyncio.Task[None] | None = None  # reads a body that came in many short chunks
        self._reads = True  # whether the transport does
        self._writable: asyncio.Future[None] | None = None
        self._on_lost: Callable[[], None] | None = None
        self._owner = ""  # the key of its last request
        self._heard = False  # whether the client has sent anything at all
        self._closing = False
        self._dropped_bytes = 0  # bytes dropped while it lingers
        # While it waits for a head, for the rest of an unread body, or idle; never two of these.
        self._timer = ConnectionTimer(loop)

    @property
    def stopping(self) -> bool:
        return self.server.stopping

    # --- what comes

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        # Bound directly, without a method in between, because every token is written through it.
        self.write = self.transport.write
        self._unsent = UnsentWatch(self.transport, self._loop, self.server.timeouts.slow_reader, self._cut_off)
        peer = transport.get_extra_info("peername")
        self.client = (str(peer[0]), int(peer[1])) if isinstance(peer, tuple) else None
        self.server.connections.add(self)
        if len(self.server.connections) > self.server.limits.connections:
            longest_idle = self.server.idle.take_longest()
            if longest_idle is None:
                limit = self.server.limits.connections
                self._refuse(503, f"more than {limit} connections, each with a request in progress", retry_after=True)
                self.transport.close()  # lingering would keep it among the connections
                return
            longest_idle.give_way()
        self._note_idle()
        self._timer.set(self.server.timeouts.header, self._on_slow_header)

    def data_received(self, data: bytes) -> None:
        if self._closing:
            self._drop(data)
            return
        self._heard = True
        self._buffer += data
        self._read()

    def _note_idle(self) -> None:
        self.server.idle.add(self, self._owner)

    def enter(self, owner: str) -> None:
        """The request in progress is this key's. Raises Overloaded when the key has its share of connections
        with requests already. `leave` ends it."""
        self._owner = owner
        busy = self.server.busy
        if not busy.fits(owner, 1):
            raise Overloaded(
                f"requests of this key are in progress on {busy.of(owner)} of {busy.limit} connections "
                "that a key may have, and more would leave other keys too few; send this one again a little later"
            )
        busy.take(owner, 1)

    def leave(self, owner: str) -> None:
        self.server.busy.take(owner, -1)

    def give_way(self) -> None:
        """Ends an idle connection at once, for a new one."""
        self._closing = True
        self._timer.stop()
        self.server.connections.discard(self)
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.server.on_closed(self)
        self.server.idle.remove(self)
        self._closing = True
        self._timer.close()
        self._unsent.stop()
        self._buffer.clear()
        if self._call is not None:
            self._call.hang_up()
        self._wake_writer()
        if self._on_lost is not None:
            self._on_lost()

    def _read(self) -> None:
        try:
            while self._buffer and not self._closing:
                call = self._call
                if call is None:
                    if not self._next_call():
                        return
                elif not call.body.complete:
                    if not call.take(self._buffer):
                        self._read_rest_if(has_rest=call.body.has_rest)
                        return
                    if call.complete:
                        self._become_idle()
                else:
                    # The next request, before its turn. Reading goes on, up to a head's size, so that a
                    # disconnect is noticed.
                    if len(self._buffer) > self.server.limits.header_bytes:
                        self.pause_reading()
                    return
        except FramingError as error:
            self._refuse(400, f"not a request that HTTP/1.1 allows: {error}")

    def _read_rest_if(self, *, has_rest: bool) -> None:
        """Where the buffer has more of a body, reads it in turns with all other connections, and nothing new meanwhile."""
        if has_rest and self._rest is None:
            self._rest = self._loop.create_task(self._read_rest())
            self._rest.add_done_callback(self.server.tasks.discard)
            self.server.tasks.add(self._rest)
            self._set_reading()

    async def _read_rest(self) -> None:
        try:
            while not self._closing and self._call is not None and self._call.body.has_rest:
                await self.server.turns.turn()
                self._read()
        finally:
            self._rest = None
            self._set_reading()

    def _next_call(self) -> bool:
        """Begins the next request. Returns False when its head is not complete or was refused."""
        if (empty := _EMPTY_LINES.match(self._buffer)) is not None:
            del self._buffer[: empty.end()]
        if self._buffer.startswith(_TLS_RECORD):  # whose client would wait for the end of a header that never comes
            raise FramingError("it begins as TLS does, and this port has none: its address begins with http://")
        found = END_OF_HEAD.search(self._buffer, max(0, self._searched - 3))
        limit = self.server.limits.header_bytes
        if (found.end() if found is not None else len(self._buffer)) > limit:
            self._refuse(431, f"the header has more than the {limit} bytes that are read")
            return False
        if found is None:
            self._searched = len(self._buffer)
            if self._timer.then in (None, self._on_idle):
                self._timer.set(self.server.timeouts.header, self._on_slow_header)
            return False
        self._timer.stop()
        head = RequestHead(self._buffer[: found.end()])
        del self._buffer[: found.end()]
        self._searched = 0
        self.server.idle.remove(self)
        body = ChunkedBody(limit) if head.chunked else LengthBody(head.content_length or 0)
        call = self._call = HttpCall(self, head, body)
        call.task = self._loop.create_task(self._run(call))
        self.server.tasks.add(call.task)
        return True

    async def _run(self, call: HttpCall) -> None:
        try:
            await call.run(self.server.app, self.server.turns)
        finally:
            if call.task is not None:  # not by a callback, which the loop would have to call
                self.server.tasks.discard(call.task)
                call.task = None

    def pause_reading(self) -> None:
        self._read_paused = True
        self._set_reading()

    def resume_reading(self) -> None:
        if self._read_paused:
            self._read_paused = False
            self._set_reading()

    def _set_reading(self) -> None:
        reads = not self._read_paused and self._rest is None
        if reads == self._reads or self.transport.is_closing():
            return
        self._reads = reads
        if reads:
            self.transport.resume_reading()
        else:
            self.transport.pause_reading()

    def whole_body(self) -> bytes | None:
        return self._call.whole_body() if self._call is not None else None

    def watch(self, on_lost: Callable[[], None]) -> None:
        """Calls `on_lost` when the client disconnects, at once if it has already. A disconnect is only
        noticed while the connection reads. Only one watcher at a time."""
        self._on_lost = on_lost
        if len(self._buffer) <= self.server.limits.header_bytes:
            self.resume_reading()
        if self._call is None or self._call.disconnected:
            on_lost()

    def unwatch(self) -> None:
        self._on_lost = None

    # --- what leaves

    def pause_writing(self) -> None:
        self.write_paused = True
        self._unsent.start()

    def resume_writing(self) -> None:
        self.write_paused = False
        self._wake_writer()
        if not self._closing:
            self._unsent.stop()

    async def until_writable(self) -> None:
        """Waits until the client is ready for more, or was cut off."""
        if self.write_paused and not self.transport.is_closing():
            if self._writable is None:
                self._writable = self._loop.create_future()
            await asyncio.shield(self._writable)

    def _wake_writer(self) -> None:
        if self._writable is not None:
            self._writable.set_result(None)
            self._writable = None

    def try_write_chunk(self, data: bytes) -> bool:
        return self._call is not None and self._call.try_write_chunk(data)

    def on_answered(self, call: HttpCall) -> None:
        self._last_id = call.request_id
        self._note_idle()
        if not call.keep_alive or self.server.stopping:
            self.close()
        elif not call.body.complete:
            self.resume_reading()
            self._timer.set(self.server.timeouts.body, self._on_endless_rest)
        else:
            self._become_idle()

    def on_upgraded(self) -> None:
        """The connection speaks another protocol now: bytes after the head belong to it."""
        self.resume_reading()
        self._loop.call_soon(self._read)

    def _become_idle(self) -> None:
        """Waits for the next request, or begins the one that arrived during the last answer."""
        self._call = None
        self._note_idle()
        self._timer.set(max(1.0, self.server.timeouts.keep_alive), self._on_idle)
        self.resume_reading()
        if self._buffer:
            self._loop.call_soon(self._read)

    # --- its end

    def shutdown(self) -> None:
        """Takes no further request. A running answer is the last one on this connection."""
        if self._call is None or self._call.complete:
            self.close()
        else:
            self._call.keep_alive = False
            self._call.end_upgraded()

    def expect_the_last(self, idle_s: float) -> None:
        """Answers one more request if it arrives within `idle_s`, and closes the connection with that
        answer."""
        if self._call is not None:
            self._call.end_upgraded()
        elif self._timer.then == self._on_idle:
            self._timer.set(idle_s, self._on_idle)

    def close(self) -> None:
        """Closes the connection. A client in the middle of sending is read to its end first: if bytes were
        left unread, TCP would reset the connection, and the client would lose the answer that it is about to
        read."""
        if self._closing:
            return
        self._timer.stop()
        if self._call is not None and not self._call.body.complete:
            self._linger()
        else:
            self._closing = True
            self.transport.close()
        self._unsent.start()

    def break_off(self) -> None:
        """Ends a call whose application failed: with 500 if no answer has begun, otherwise by cutting the
        answer short."""
        if self._call is not None and not self._call.answering:
            self._refuse(500, "internal error")
        else:
            self._closing = True
            self.transport.close()
            self._unsent.start()

    def _linger(self) -> None:
        if self._closing:
            return
        self._closing = True
        self._note_idle()
        self._timer.stop()
        if self._call is not None and not self._call.complete:
            self._call.hang_up()  # no answer can be sent any more
        if self.transport.can_write_eof():  # TLS connections cannot
            self.transport.write_eof()
        self.resume_reading()
        self._timer.set(LINGER_S, self.transport.close)

    def _drop(self, data: bytes) -> None:
        self._dropped_bytes += len(data)
        if self._dropped_bytes > LINGER_BYTES:
            self.transport.close()

    def _refuse(self, status: int, message: str, *, retry_after: bool = False) -> None:
        """Refuses what is not a request, or a request whose end is unknown, and closes the connection. A request that was
        answered gets no second answer: its client would take it for that of its next request."""
        self._timer.stop()
        self._buffer.clear()
        call = self._call
        request_id = call.request_id if call is not None else secrets.token_hex(16)
        logger.info("%s: answered %d to %s: %s", request_id, status, _shown(self.client), message)
        if call is None or not call.answering:
            body = self.server.error_body(
                message, status, _CODES.get(status, "invalid_http" if status < 500 else "internal_error")
            )
            lines = [
                b"content-type: application/json",
                b"content-length: %d" % len(body),
                b"connection: close",
                b"x-request-id: " + request_id.encode(),
                *([b"retry-after: 1"] if retry_after else []),
            ]
            self.transport.write(STATUS_LINES[status] + b"\r\n".join(lines) + b"\r\n\r\n" + body)
        self._linger()

    # --- timers

    def _on_slow_header(self) -> None:
        if not self._heard:
            self.close()
            return
        self._refuse(408, f"the header was not complete within {self.server.timeouts.header:g} s")

    def _on_endless_rest(self) -> None:
        logger.info(
            "%s: answered %g s ago, and its body is still not complete: the connection is closed",
            self._last_id,
            self.server.timeouts.body,
        )
        self.transport.abort()

    def _on_idle(self) -> None:
        """Closes an idle connection. A client that has not read its last answer by now is cut off, because
        closing would wait for it forever."""
        if self.transport.get_write_buffer_size() > 0:
            self.transport.abort()
        else:
            self.close()

    def _cut_off(self) -> None:
        """Ends a client that takes nothing: closing would wait for it forever."""
        request_id = self._call.request_id if self._call is not None else self._last_id
        logger.warning(
            "%s: the client took nothing of its answer for %g s and is cut off",
            request_id,
            self.server.timeouts.slow_reader,
        )
        self.server.on_cut()
        self.transport.abort()


def _shown(client: tuple[str, int] | None) -> str:
    return f"{client[0]}:{client[1]}" if client else "a client"
