"""The two ends of every message stream: an Inbox binds and receives, an Outbox connects and sends.

One direction per socket (ZMQ PUSH/PULL): a reply travels through the asker's own Inbox, whose endpoint the
question names. So no end keeps per-connection state, a restarted process is simply a new endpoint, and any
thread may send. High-water marks are explicit, and a message that cannot be queued is an error to its sender,
never a silent drop.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec
import zmq

from tandem.wire.errors import ConfigurationError, InternalError, NodeLost

logger = logging.getLogger(__name__)

M = TypeVar("M")

# A frame this large is a mistake or an attack: the longest legitimate one is a prompt of a few million ids.
MAX_FRAME_BYTES = 64 << 20
SEND_QUEUE_FRAMES = 100_000
# Of one Outbox; ZMQ's own limit is 1023.
MAX_SOCKETS = 4096
# A machine that is lost closes no connection. One that nothing comes through is asked after so long whether its other end
# is there still, so often, and that far apart.
KEEPALIVE_IDLE_S = 60
KEEPALIVE_PROBES = 3
KEEPALIVE_INTERVAL_S = 10
# Between two attempts to reach an endpoint, doubling from the one to the other.
RECONNECT_S = 0.05
RECONNECT_MAX_S = 1.0


def queue_is_full(endpoint: str, num_messages: int) -> NodeLost:
    return NodeLost(f"{endpoint} has not read {num_messages} messages; it is gone or stuck")


def _bind_pull_socket(
    context: zmq.Context[zmq.Socket[bytes]], host: str, port: int, name: str
) -> zmq.Socket[bytes]:
    """Ends the context when the address cannot be had."""
    socket = context.socket(zmq.PULL)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_IDLE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, KEEPALIVE_PROBES)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_INTERVAL_S)
    socket.setsockopt(zmq.IPV6, ":" in host)
    address = f"[{host}]" if ":" in host else host
    try:
        socket.bind(f"tcp://{address}:{port or '*'}")
    except zmq.ZMQError as error:
        socket.close(linger=0)
        context.term()
        raise ConfigurationError(f"{name}: cannot listen on {host}:{port or 'any port'}: {error}") from error
    return socket


def decode_frames(decoder: msgspec.msgpack.Decoder[M], frames: list[bytes], name: str) -> M | None:
    """The message; None, and a line in the log, when it is none of this channel's."""
    try:
        if len(frames) != 1:
            raise msgspec.DecodeError(f"{len(frames)} frames, expected 1")
        return decoder.decode(frames[0])
    # RecursionError: nesting that msgspec refuses by raising what the interpreter raises.
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        logger.warning("%s: refused a malformed frame of %d bytes: %s", name, len(frames[0]), error)
        return None


class Inbox(Generic[M]):
    """Receives messages of one type in a thread of its own, and hands each to `on_message` there.

    A frame that does not decode is counted in `malformed` and dropped; nothing a peer sends ends the thread.
    An exception out of `on_message` is logged and counted in `handler_errors`: the stream goes on. Should the
    thread end all the same, `died` says why.
    """

    def __init__(
        self,
        host: str,
        message_type: Any,
        on_message: Callable[[M], None],
        *,
        name: str,
        port: int = 0,
    ) -> None:
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(message_type)
        self._on_message = on_message
        self._name = name
        self.malformed = 0
        self.handler_errors = 0
        self.died: str | None = None  # why the thread ended although nobody closed the Inbox
        self._context = zmq.Context()
        self._socket = _bind_pull_socket(self._context, host, port, name)
        self.endpoint: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        # An inproc pair, so that close() wakes the thread instead of a timeout polling for it.
        stop_address = f"inproc://stop-{id(self)}"
        self._stop_receiver = self._context.socket(zmq.PAIR)
        self._stop_receiver.bind(stop_address)
        self._stop_sender = self._context.socket(zmq.PAIR)
        self._stop_sender.connect(stop_address)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._receive, name=name, daemon=True)
        self._thread.start()

    def _receive(self) -> None:
        try:
            self._receive_until_closed()
        except Exception as error:
            # Whoever owns the Inbox looks at `died`: an end that nobody notices would leave everybody waiting.
            self.died = f"{type(error).__name__}: {error}"
            logger.exception("%s: the receiving thread died", self._name)

    def _receive_until_closed(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._stop_receiver, zmq.POLLIN)
        while not self._closed.is_set():
            ready = dict(poller.poll())
            if self._stop_receiver in ready:
                return
            frames = self._socket.recv_multipart()
            message = decode_frames(self._decoder, frames, self._name)
            if message is None:
                self.malformed += 1
                continue
            try:
                self._on_message(message)
            except Exception:
                self.handler_errors += 1
                logger.exception("%s: handling %s failed", self._name, type(message).__name__)

    def close(self) -> None:
        """Stop receiving. Idempotent; returns when the thread has ended."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._stop_sender.send(b"")
        self._thread.join(timeout=5)
        if self._thread.is_alive():
            raise InternalError(f"{self._name}: the receiving thread did not end within 5 s of close()")
        for socket in (self._socket, self._stop_receiver, self._stop_sender):
            socket.close(linger=0)
        self._context.term()


class Outbox:
    """Sends messages to named endpoints, without blocking, from any thread.

    Connections are made on first use and kept until `forget`. Messages to one endpoint arrive in the order
    they were sent. Delivery is not confirmed: whoever needs to know asks for an answer and sets a deadline.
    """

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._lock = threading.Lock()
        self._closed = False

    def send(self, endpoint: str, message: msgspec.Struct) -> None:
        """Raises NodeLost when the endpoint's queue is full, as its reader has been gone or stuck for long, or when
        there can be no connection with it.

        After close() nothing is sent and nothing is raised: whoever closes has no use for what others still say.
        """
        self.send_frame(endpoint, self._encoder.encode(message))

    def send_frame(self, endpoint: str, frame: bytes) -> None:
        """The same, for a message that is encoded already."""
        with self._lock:
            if self._closed:
                return
            socket = self._sockets.get(endpoint)
            if socket is None:
                socket = self._connect(endpoint)
            try:
                socket.send(frame, zmq.NOBLOCK)
            except zmq.Again:
                raise queue_is_full(endpoint, SEND_QUEUE_FRAMES) from None

    def _connect(self, endpoint: str) -> zmq.Socket[bytes]:
        try:
            socket = self._context.socket(zmq.PUSH)
        except zmq.ZMQError as error:  # there are too many already, or no descriptor is left
            raise NodeLost(f"cannot connect to {endpoint!r}: {error}") from error
        socket.setsockopt(zmq.IPV6, "[" in endpoint)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, SEND_QUEUE_FRAMES)
        socket.setsockopt(zmq.RECONNECT_IVL, int(RECONNECT_S * 1000))
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, int(RECONNECT_MAX_S * 1000))
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            raise NodeLost(f"cannot connect to {endpoint!r}: {error}") from error
        self._sockets[endpoint] = socket
        return socket

    def forget(self, endpoint: str) -> None:
        """Drop the connection and whatever is queued on it."""
        with self._lock:
            socket = self._sockets.pop(endpoint, None)
        if socket is not None:
            # Closing alone is done by another thread, which a successor at the same address could overtake.
            with contextlib.suppress(zmq.ZMQError):  # it was never connected
                socket.disconnect(endpoint)
            socket.close(linger=0)

    def close(self, linger_ms: int = 200) -> None:
        """Idempotent. Waits up to `linger_ms` for queued messages to leave."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            sockets, self._sockets = self._sockets, {}
        for socket in sockets.values():
            socket.close(linger=linger_ms)
        self._context.term()
