"""The two ends of every message stream, on libzmq: an inbox binds and receives, an outbox connects and sends.

A socket has one direction (ZMQ PUSH/PULL): a reply travels to the asker's own inbox, whose endpoint the question
names. So no end keeps per-connection state, a restarted process is simply a new endpoint, and any thread may send.
High-water marks are explicit, and a message that cannot be queued is an error to its sender, never a silent drop.

There are two kinds of inbox. `Inbox` has a thread of its own. An asyncio event loop reads `LoopInbox`. All sockets of a
process share one ZMQ context, and with it one I/O thread, one key pair and one authenticator (`wire.curve`): only
processes that `admit` has named are heard.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

import msgspec
import zmq

from tandem.base.errors import ConfigurationError, InternalError, NodeLost
from tandem.wire.curve import Authenticator, Context, ProcessKeys

logger = logging.getLogger(__name__)

M = TypeVar("M")

# A frame this large is a mistake or an attack: the longest legitimate one is a prompt of a few million ids.
MAX_FRAME_BYTES = 64 << 20
SEND_QUEUE_FRAMES = 100_000
# Unread messages of one connection in an inbox. More of them wait on their way, and then with their sender.
RECEIVE_QUEUE_FRAMES = 10_000
# The most sockets of a process. ZMQ's own default is 1023.
MAX_SOCKETS = 8192
# A lost machine closes no connection. If nothing came on a connection for KEEPALIVE_IDLE_S, the kernel probes it
# this often and this far apart, and closes it if no probe is answered.
KEEPALIVE_IDLE_S = 60
KEEPALIVE_PROBES = 3
KEEPALIVE_INTERVAL_S = 10
# The time between two attempts to reach an endpoint doubles from the first value to the second.
RECONNECT_S = 0.05
RECONNECT_MAX_S = 1.0
# One attempt's time-out. The kernel alone would wait longer after each attempt, and might notice a repaired link half a
# minute late.
CONNECT_S = 2.0
# A LoopInbox handles at most this much in one turn of the loop. A message for many sequences can take milliseconds.
MESSAGES_PER_TURN = 256
_POLLIN = int(zmq.POLLIN)  # ZMQ's own is of an enumeration, which is slow
TURN_S = 0.005


def raise_descriptor_limit() -> None:
    """Raises the limit of descriptors to the system's own. Every connection takes one, a stranger's too until it is
    closed, and many systems begin with 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class ProcessSockets:
    """What all sockets of this process share. The ZMQ context begins with its first user and ends with its last; the
    keys stay."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._keys: ProcessKeys | None = None
        self.context: Context | None = None
        self.authenticator: Authenticator | None = None

    @property
    def keys(self) -> ProcessKeys:
        with self._lock:
            if self._keys is None:
                self._keys = ProcessKeys()
            return self._keys

    @property
    def deaf(self) -> str | None:
        """Why no new connection is admitted any more; None while they are."""
        authenticator = self.authenticator
        return authenticator.died if authenticator is not None else None

    def enter(self) -> Context:
        keys = self.keys
        with self._lock:
            if self.context is None:
                self.context = zmq.Context()
                self.context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
                self.authenticator = Authenticator(self.context, keys)
            self._users += 1
            return self.context

    def leave(self) -> None:
        """The last user waits here until its lingering messages have left."""
        with self._lock:
            self._users -= 1
            if self._users == 0 and self.context is not None and self.authenticator is not None:
                context, self.context = self.context, None
                authenticator, self.authenticator = self.authenticator, None
                authenticator.close()
                context.term()


shared = ProcessSockets()


def public_key() -> str:
    """The key by which other processes admit this one. The secret half of the pair never leaves the process."""
    return shared.keys.public


def admit(keys: Iterable[str]) -> None:
    """Names all processes that may speak to this one, by their public keys. Each call replaces the last one's keys.
    This process's own key need not be among them."""
    shared.keys.admit(keys)


def accompany(keys: Iterable[str]) -> None:
    """Names processes that belong to this one, by their public keys. They may speak to it, too, whatever `admit`
    names."""
    shared.keys.accompany(keys)


def _bind_pull_socket(context: Context, host: str, port: int, name: str) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.PULL)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVHWM, RECEIVE_QUEUE_FRAMES)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_IDLE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, KEEPALIVE_PROBES)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_INTERVAL_S)
    socket.setsockopt(zmq.IPV6, ":" in host)
    shared.keys.protect_listener(socket)
    address = f"[{host}]" if ":" in host else host
    try:
        socket.bind(f"tcp://{address}:{port or '*'}")
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise ConfigurationError(f"{name}: cannot listen on {host}:{port or 'any port'}: {error}") from error
    return socket


class _Reader(Generic[M]):
    """The part of both inboxes that handles frames.

    A frame that does not decode is counted in `malformed` and dropped: nothing that a peer sends ends the stream. An
    exception out of `on_message` is logged and counted in `handler_errors`, and the stream goes on.
    """

    def __init__(
        self, host: str, message_type: Any, on_message: Callable[[M], None], *, name: str, port: int = 0
    ) -> None:
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(message_type)
        self._on_message = on_message
        self._name = name
        self.malformed = 0
        self.handler_errors = 0
        self._context = shared.enter()
        try:
            self._socket = _bind_pull_socket(self._context, host, port, name)
        except BaseException:
            shared.leave()
            raise
        self.endpoint: str = shared.keys.endpoint_of(self._socket)

    def _handle(self, frames: list[bytes]) -> None:
        try:
            if len(frames) != 1:
                raise msgspec.DecodeError(f"{len(frames)} frames, expected 1")
            message = self._decoder.decode(frames[0])
        # msgspec refuses deep nesting with the interpreter's RecursionError.
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self.malformed += 1
            logger.warning("%s: refused a malformed frame of %d bytes: %s", self._name, len(frames[0]), error)
            return
        try:
            self._on_message(message)
        except Exception:
            self.handler_errors += 1
            logger.exception("%s: handling %s failed", self._name, type(message).__name__)


class Inbox(_Reader[M]):
    """Receives messages of one type in a thread of its own, and calls `on_message` there.

    It has its address at once. Messages that arrive before `listen` wait, unless it `listens` from the start.
    """

    def __init__(
        self,
        host: str,
        message_type: Any,
        on_message: Callable[[M], None],
        *,
        name: str,
        port: int = 0,
        listens: bool = True,
    ) -> None:
        super().__init__(host, message_type, on_message, name=name, port=port)
        self._died: str | None = None
        # An inproc pair lets close() wake the thread; else the thread would have to poll with a timeout.
        stop_address = f"inproc://stop-{id(self)}"
        self._stop_receiver = self._context.socket(zmq.PAIR)
        self._stop_receiver.bind(stop_address)
        self._stop_sender = self._context.socket(zmq.PAIR)
        self._stop_sender.connect(stop_address)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._receive, name=name, daemon=True)
        if listens:
            self.listen()

    @property
    def died(self) -> str | None:
        """Why the thread ended although nothing closed the Inbox, or why no new peer is heard; None while it serves."""
        return self._died or shared.deaf

    def listen(self) -> None:
        self._thread.start()

    def _receive(self) -> None:
        try:
            self._receive_until_closed()
        except Exception as error:
            # The owner looks at `died`: an unnoticed end would leave everything waiting.
            self._died = f"{type(error).__name__}: {error}"
            logger.exception("%s: the receiving thread died", self._name)

    def _receive_until_closed(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._stop_receiver, zmq.POLLIN)
        while not self._closed.is_set():
            ready = dict(poller.poll())
            if self._stop_receiver in ready:
                return
            self._handle(self._socket.recv_multipart())

    def close(self) -> None:
        """Stops receiving, and returns when the thread has ended. Idempotent. Raises InternalError if it does not
        end."""
        if self._closed.is_set():
            return
        self._closed.set()
        if self._thread.is_alive():
            self._stop_sender.send(b"")
            self._thread.join(timeout=5)
        if self._thread.is_alive():
            raise InternalError(f"{self._name}: the receiving thread did not end within 5 s of close()")
        for socket in (self._socket, self._stop_receiver, self._stop_sender):
            socket.close(linger=0)
        shared.leave()


class LoopInbox(_Reader[M]):
    """Receives messages of one type on an asyncio event loop: it is made, read and closed there.

    It has its address at once; messages that arrive before `listen` wait. The loop watches ZMQ's descriptor, which
    becomes readable once for all messages that have come. So the inbox reads all of them before the loop waits
    again, in several turns if there are many.
    """

    def __init__(
        self, host: str, message_type: Any, on_message: Callable[[M], None], *, name: str, port: int = 0
    ) -> None:
        super().__init__(host, message_type, on_message, name=name, port=port)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._descriptor = int(self._socket.getsockopt(zmq.FD))
        self._next_turn: asyncio.Handle | None = None
        self._closed = False

    def listen(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._descriptor, self._read)
        self._next_turn = self._loop.call_soon(self._read_on)

    def _read_on(self) -> None:
        self._next_turn = None
        self._read()

    def _read(self) -> None:
        loop = self._loop
        if self._next_turn is not None or loop is None:
            return
        until = time.monotonic() + TURN_S
        for _ in range(MESSAGES_PER_TURN):
            # Cheaper than the error of a socket that has none.
            if not self._socket.getsockopt(zmq.EVENTS) & _POLLIN:  # type: ignore[operator]
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._handle(frames)
            if self._socket.closed:  # `on_message` has closed the inbox
                return
            if time.monotonic() > until:
                break
        self._next_turn = loop.call_soon(self._read_on)

    def close(self) -> None:
        """Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._next_turn is not None:
            self._next_turn.cancel()
        if self._loop is not None:
            self._loop.remove_reader(self._descriptor)
        self._socket.close(linger=0)
        shared.leave()


class Outbox:
    """Sends messages to endpoints, without blocking, from any thread.

    It connects on first use and keeps the connection until `forget`. Messages to one endpoint arrive in the order of
    sending. Delivery is not confirmed: a sender that needs to know asks for an answer and sets a deadline.
    """

    def __init__(self, *, unacknowledged_s: float = 0.0) -> None:
        """If the other side's kernel has acknowledged nothing for `unacknowledged_s`, the connection is made again,
        and the messages on their way are lost. 0: the kernel tries for a quarter of an hour, with growing pauses."""
        self._unacknowledged_s = unacknowledged_s
        self._encoder = msgspec.msgpack.Encoder()
        self._context = shared.enter()
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._lock = threading.Lock()
        self._closed = False

    def send(self, endpoint: str, message: msgspec.Struct) -> None:
        """Raises NodeLost if the endpoint's queue is full, because its reader has been gone or stuck for long, or if no
        connection with it is possible.

        After close() it sends nothing and raises nothing.
        """
        self.send_frame(endpoint, self._encoder.encode(message))

    def send_frame(self, endpoint: str, frame: bytes) -> None:
        """As `send`, for a message that is already encoded."""
        with self._lock:
            if self._closed:
                return
            socket = self._sockets.get(endpoint)
            if socket is None:
                socket = self._connect(endpoint)
            try:
                socket.send(frame, zmq.NOBLOCK)
            except zmq.Again:
                raise NodeLost(f"{endpoint} has not read {SEND_QUEUE_FRAMES} messages; it is gone or stuck") from None

    def _connect(self, endpoint: str) -> zmq.Socket[bytes]:
        try:
            socket = self._context.socket(zmq.PUSH)
        except zmq.ZMQError as error:  # the process has too many sockets, or no descriptor is left
            raise NodeLost(f"cannot connect to {endpoint!r}: {error}") from error
        socket.setsockopt(zmq.IPV6, "[" in endpoint)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, SEND_QUEUE_FRAMES)
        socket.setsockopt(zmq.RECONNECT_IVL, int(RECONNECT_S * 1000))
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, int(RECONNECT_MAX_S * 1000))
        socket.setsockopt(zmq.CONNECT_TIMEOUT, int(CONNECT_S * 1000))
        if self._unacknowledged_s:
            socket.setsockopt(zmq.TCP_MAXRT, int(self._unacknowledged_s * 1000))
        try:
            socket.connect(shared.keys.protect_caller(socket, endpoint))
        except (zmq.ZMQError, NodeLost) as error:
            socket.close(linger=0)
            if isinstance(error, NodeLost):
                raise
            raise NodeLost(f"cannot connect to {endpoint!r}: {error}") from error
        self._sockets[endpoint] = socket
        return socket

    def forget(self, endpoint: str) -> None:
        """Drops the connection and the messages that are queued on it."""
        with self._lock:
            socket = self._sockets.pop(endpoint, None)
        if socket is not None:
            # Another thread carries out `close`, and a new connection to the same address could overtake it.
            with contextlib.suppress(zmq.ZMQError):  # the socket was never connected
                socket.disconnect(socket.getsockopt_string(zmq.LAST_ENDPOINT))
            socket.close(linger=0)

    def close(self, linger_ms: int = 200) -> None:
        """Idempotent. Queued messages have up to `linger_ms` to leave; the last user of the process's sockets waits for
        them."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            sockets, self._sockets = self._sockets, {}
        for socket in sockets.values():
            socket.close(linger=linger_ms)
        shared.leave()
