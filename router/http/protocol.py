"""HTTP/1.1 on one connection: uvicorn's protocol, with the limits that an application never gets to see.

A header that is too slow, too large or not HTTP is answered here, because no request ever comes of it.
"""

from __future__ import annotations

import asyncio
import http
import logging
import secrets
import sys
from collections.abc import Callable
from typing import Any, cast

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.server import ServerState

from tandem.router.config import Limits, Timeouts
from tandem.router.http.errors import error_body

logger = logging.getLogger(__name__)

# A client that is still sending when it is refused does not read the refusal yet. What it sends is dropped, within these.
LINGER_BYTES = 64 << 20
LINGER_S = 2.0

_CODES = {408: "request_timeout", 431: "header_too_large", 503: "overloaded"}


class _Connection(h11.Connection):
    """Refuses requests whose end two readers could see at two places: what one takes for the body's rest is the next
    request to the other.

    Holds an answer's head back until something of its body comes: one packet for both, and one system call.
    """

    head = b""

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        event = super().next_event()
        if isinstance(event, h11.Request):
            _check_framing(event)
        return event

    def send_with_data_passthrough(self, event: h11.Event) -> list[bytes] | None:
        """What `send` puts together."""
        data = super().send_with_data_passthrough(event)
        if isinstance(event, h11.Response):
            self.head = b"".join(data or [])
            return []
        if not self.head:
            return data
        head, self.head = self.head, b""
        return [head, *(data or [])]


def _check_framing(request: h11.Request) -> None:
    """What h11 lets pass. Lengths that differ or are none, and codings but `chunked`, it refuses itself."""
    names = {name for name, _ in request.headers}
    if b"transfer-encoding" not in names:
        return
    if b"content-length" in names:
        raise h11.RemoteProtocolError("Transfer-Encoding and Content-Length together; send one of them")
    if request.http_version < b"1.1":
        raise h11.RemoteProtocolError("Transfer-Encoding in HTTP/1.0, which has none; send Content-Length")


class _Transport:
    """The connection's own, whose end is the protocol's: `close` for all that uvicorn closes."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self._transport = transport
        self.close = close
        self.lingers = False
        # Without a call in between: every token is written here.
        self.write = transport.write
        self.write_eof = transport.write_eof
        self.abort = transport.abort
        self.pause_reading = transport.pause_reading
        self.resume_reading = transport.resume_reading
        self.get_extra_info = transport.get_extra_info
        self.get_write_buffer_size = transport.get_write_buffer_size

    def is_closing(self) -> bool:
        return self.lingers or self._transport.is_closing()

    def close_now(self) -> None:
        self._transport.close()


class GuardedProtocol(H11Protocol):
    """What it is told is set by `guarded`. No state that a client can leave it in lasts without one of its timers."""

    limits: Limits
    timeouts: Timeouts
    on_cut: Callable[[], None]

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.conn: _Connection = _Connection(h11.SERVER, config.h11_max_incomplete_event_size or 0)
        self._on_lost: Callable[[], None] | None = None
        self._header_timer: asyncio.TimerHandle | None = None
        self._heard = False  # anything at all
        self._rest_of: RequestResponseCycle | None = None  # answered, while its body is still coming
        self._rest_timer: asyncio.TimerHandle | None = None
        self._unsent_timer: asyncio.TimerHandle | None = None
        self._linger_timer: asyncio.TimerHandle | None = None
        self._dropped_bytes = 0  # while it lingers

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._closing = _Transport(cast("asyncio.Transport", transport), self._close)
        super().connection_made(cast("asyncio.Transport", self._closing))
        self.app_state = {**self.app_state, "connection": self}  # for event streams
        if len(self.connections) > self.limits.connections:
            self._refuse(503, f"more than {self.limits.connections} connections", retry_after=True)
            self._closing.close_now()  # whoever lingers is one more
            return
        self._start_header_timer()

    def _start_header_timer(self) -> None:
        self._header_timer = self.loop.call_later(self.timeouts.header, self._on_slow_header)

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            self._drop(data)
            return
        self._heard = True
        if self._header_timer is None and self.conn.their_state is h11.IDLE:
            self._start_header_timer()  # the first byte of another request on this connection
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop_header_timer()
        self._note_rest()
        if self._on_lost is not None:
            self._hear_hangup()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_header_timer()
        self._stop_rest_timer()
        self._stop_unsent_timer()
        self._stop_linger_timer()
        super().connection_lost(exc)
        if self._on_lost is not None:
            self._on_lost()

    def _close(self) -> None:
        """What the client sends is read to its end first, if it is in the middle of it: closed with bytes unread, TCP
        resets the connection, and the client loses the answer that it was about to read."""
        if self.conn.their_state in (h11.SEND_BODY, h11.ERROR):
            self._linger()
        else:
            self._closing.close_now()

    def _linger(self) -> None:
        if self.transport.is_closing():
            return
        self._closing.lingers = True
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # nothing can be said any more
            self.cycle.message_event.set()
        self.transport.write_eof()
        self.flow.resume_reading()
        self._linger_timer = self.loop.call_later(LINGER_S, self._closing.close_now)

    def _drop(self, data: bytes) -> None:
        self._dropped_bytes += len(data)
        if self._dropped_bytes > LINGER_BYTES:
            self._closing.close_now()

    def _stop_linger_timer(self) -> None:
        if self._linger_timer is not None:
            self._linger_timer.cancel()
            self._linger_timer = None

    def watch(self, on_lost: Callable[[], None]) -> None:
        """Calls it when the client is gone, which is only noticed while there is reading. Of one request at a time."""
        self._on_lost = on_lost
        self._hear_hangup()
        if self.cycle.disconnected:
            on_lost()

    def unwatch(self) -> None:
        self._on_lost = None

    def _hear_hangup(self) -> None:
        """uvicorn stops reading when the next request comes before its turn. Of that a header's size may lie here while
        reading goes on."""
        if self.flow.read_paused and len(self.conn.trailing_data[0]) <= self.limits.header_bytes:
            self.flow.resume_reading()

    def on_response_complete(self) -> None:
        cycle, rest_comes = self.cycle, self.conn.their_state is h11.SEND_BODY
        super().on_response_complete()
        if self.transport.is_closing():
            self._watch_unsent()
        elif rest_comes:
            self._rest_of = cycle
            self._rest_timer = self.loop.call_later(self.timeouts.body, self._on_endless_rest)

    def _note_rest(self) -> None:
        """The rest of a body that nobody wanted was read and dropped. From its end on the connection is idle."""
        if self._rest_of is None:
            return
        is_next = self.cycle is not self._rest_of
        if is_next or self.conn.their_state is not h11.SEND_BODY:
            self._stop_rest_timer()
        if not is_next and self.conn.their_state is h11.IDLE:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _stop_rest_timer(self) -> None:
        self._rest_of = None
        if self._rest_timer is not None:
            self._rest_timer.cancel()
            self._rest_timer = None

    def _on_endless_rest(self) -> None:
        logger.info(
            "%s: answered %g s ago, and its body is still not complete: the connection is closed",
            self._request_id(),
            self.timeouts.body,
        )
        self.transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_unsent()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self._stop_unsent_timer()

    def _watch_unsent(self) -> None:
        """While the client is behind, and after the last answer: closing waits for all of it to be taken."""
        unsent = self.transport.get_write_buffer_size()
        self._stop_unsent_timer()
        if unsent > 0:
            self._unsent_timer = self.loop.call_later(self.timeouts.slow_reader, self._on_unsent, unsent)

    def _stop_unsent_timer(self) -> None:
        if self._unsent_timer is not None:
            self._unsent_timer.cancel()
            self._unsent_timer = None

    def _on_unsent(self, before: int) -> None:
        """Nothing is written while this waits, so what is less has been taken."""
        if self.transport.get_write_buffer_size() < before:
            self._watch_unsent()
            return
        logger.warning(
            "%s: the client took nothing of its answer for %g s and is cut off",
            self._request_id(),
            self.timeouts.slow_reader,
        )
        self.on_cut()
        self.transport.abort()

    def _request_id(self) -> str:
        """Of the request that is being answered, or was answered last."""
        exchange: Any = self.cycle.scope.get("exchange") if self.cycle is not None else None
        return str(exchange.request_id) if exchange is not None else "-"

    def timeout_keep_alive_handler(self) -> None:
        """The answer has been there for long. If the client has not read it, closing would wait for it forever."""
        if self.transport.get_write_buffer_size() > 0:
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    def _on_slow_header(self) -> None:
        self._header_timer = None
        if self.transport.is_closing():
            return
        if not self._heard:
            self.transport.close()
            return
        self._refuse(408, f"the header was not complete within {self.timeouts.header:g} s")

    def try_write_chunk(self, data: bytes) -> bool:
        """A piece of a chunked body that has begun, straight to the connection. False when it must wait.

        Through h11 every token would cost as much again: its state machine does not move within a body, so there is
        nothing in it to be told.
        """
        if self.flow.write_paused or self.conn.head:
            return False
        if not self.cycle.disconnected and data:
            self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    async def until_writable(self) -> None:
        """Until then, or until the client is cut off."""
        await self.flow.drain()

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn for whatever h11 refuses. h11 says when it is the header's size; its 501 for a coding that it
        does not know is 400 here, because where such a body ends nobody can say."""
        error = sys.exc_info()[1]
        is_too_large = isinstance(error, h11.RemoteProtocolError) and error.error_status_hint == 431
        status = 431 if is_too_large else 400
        self._refuse(status, f"not a request that HTTP/1.1 allows: {error or msg}")

    def _refuse(self, status: int, message: str, *, retry_after: bool = False) -> None:
        """Written by hand: h11 has nothing to answer to, as it has seen no request."""
        self._stop_header_timer()
        request_id = secrets.token_hex(16)  # there was no request, so none that the client gave
        logger.info("%s: answered %d to %s: %s", request_id, status, _shown(self.client), message)
        body = error_body(message, status, _CODES.get(status, "invalid_http"))
        lines = [
            f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}",
            "content-type: application/json",
            f"content-length: {len(body)}",
            "connection: close",
            f"x-request-id: {request_id}",
            *(["retry-after: 1"] if retry_after else []),
        ]
        self.transport.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        self._linger()


def _shown(client: tuple[str, int] | None) -> str:
    return f"{client[0]}:{client[1]}" if client else "a client"


def guarded(limits: Limits, timeouts: Timeouts, on_cut: Callable[[], None]) -> type[GuardedProtocol]:
    """uvicorn makes protocols from a class alone, so the settings are the class's. `on_cut` is called for every client
    that is cut off because it does not read."""
    return type(
        "ConfiguredProtocol",
        (GuardedProtocol,),
        {"limits": limits, "timeouts": timeouts, "on_cut": staticmethod(on_cut)},
    )
