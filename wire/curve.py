"""Which processes may speak to this one. Every connection between Tandem's processes is ZMQ's CURVE: encrypted, and
both sides prove who they are.

A process makes its own key pair, whose secret half never leaves it. The public half stands in its endpoints
(`wire.endpoints`), which travel by Ray in the records of nodes and routers. The controller tells each process the
keys of all others, and `admit` takes them. A connection with any other key ends before one of its messages is read.

A process with an admitted key is a member of the cluster, and each protocol says how far it believes a member.
Nothing here tells a router's key from a node's.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

import zmq
from zmq.utils import z85

from tandem.base.errors import ConfigurationError, NodeLost
from tandem.wire.endpoints import Endpoint, key_bytes, key_text, parse_endpoint

logger = logging.getLogger(__name__)

Context = zmq.Context[zmq.Socket[bytes]]

# A connection that has not proved by then that it belongs to a member is closed.
HANDSHAKE_S = 3.0
# A new process may speak before others know its key. At most this many connections with unknown keys wait for that,
# until HANDSHAKE_S is over.
MAX_HELD = 1024
# Strangers may come by the thousand, so the log has one line about them in this time.
LOG_PERIOD_S = 60.0
_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_ZAP_DOMAIN = b"tandem"


class ProcessKeys:
    """The key pair of this process, and the keys that it admits, its own among them."""

    def __init__(self) -> None:
        if not zmq.has("curve"):
            raise ConfigurationError(
                "this pyzmq was built without CURVE, which protects every connection between Tandem's processes: "
                "install pyzmq's wheel, or build it with libsodium"
            )
        public, secret = zmq.curve_keypair()
        self._public = z85.decode(public)
        self._secret = z85.decode(secret)
        self._own = frozenset({self._public})
        self._admitted = self._own
        self.on_change: Callable[[], None] = lambda: None

    @property
    def public(self) -> str:
        return key_text(self._public)

    def admit(self, keys: Iterable[str]) -> None:
        """Replaces the admitted keys. An open connection is not ended if its key is missing, but cannot be made
        again."""
        self._set(self._own | frozenset(map(key_bytes, keys)))

    def accompany(self, keys: Iterable[str]) -> None:
        """Admits, for as long as this process lives, the processes that belong to it: the controller does not name
        them."""
        self._own |= frozenset(map(key_bytes, keys))
        self._set(self._admitted | self._own)

    def _set(self, admitted: frozenset[bytes]) -> None:
        if admitted != self._admitted:
            self._admitted = admitted
            self.on_change()

    def __contains__(self, key: bytes) -> bool:
        return key in self._admitted

    def protect_listener(self, socket: zmq.Socket[bytes]) -> None:
        """Called before the socket is bound."""
        socket.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1000))
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without an authenticator, admits no key

    def protect_caller(self, socket: zmq.Socket[bytes], endpoint: str) -> str:
        """Called before the socket is connected to the returned address. Raises NodeLost for a text that is no
        endpoint. A host name is none: ZMQ would look it up in its I/O thread, and every other link would wait."""
        parsed = parse_endpoint(endpoint)
        if parsed is None:
            raise NodeLost(f"cannot connect to {endpoint!r}: it must be tcp://KEY@ADDRESS:PORT, with an IP address")
        socket.setsockopt(zmq.CURVE_SERVERKEY, key_bytes(parsed.key))
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self._public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._secret)
        return f"tcp://{parsed.address}"

    def endpoint_of(self, socket: zmq.Socket[bytes]) -> str:
        """Returns the endpoint of this process's bound listener."""
        host, _, port = socket.getsockopt_string(zmq.LAST_ENDPOINT).removeprefix("tcp://").rpartition(":")
        return str(Endpoint(self.public, host.strip("[]"), int(port)))


class _Question(NamedTuple):
    route: bytes
    request_id: bytes
    address: str
    key: bytes
    asked_at: float


class Authenticator:
    """Answers ZMQ's question whether a connection may be made (ZAP, ZeroMQ's RFC 27), in a thread of its own. There
    is one for each context.

    A stranger gets no answer, and ZMQ closes its connection when HANDSHAKE_S is over. If the process becomes a
    member in that time, it gets its answer then. If it becomes one later, it connects again by itself.
    """

    def __init__(self, context: Context, keys: ProcessKeys, clock: Callable[[], float] = time.monotonic) -> None:
        self._keys = keys
        self._clock = clock
        self._held: deque[_Question] = deque()
        self._dropped_since_logged = 0
        self._logged_at: float | None = None
        self.died: str | None = None
        self._zap = context.socket(zmq.ROUTER)
        self._zap.bind(_ZAP_ADDRESS)
        # An inproc pair lets a change wake the thread; else the thread would have to poll with a timeout.
        self._wake_end = context.socket(zmq.PAIR)
        self._wake_end.bind(f"inproc://wake-{id(self)}")
        self._waker = context.socket(zmq.PAIR)
        self._waker.connect(f"inproc://wake-{id(self)}")
        self._lock = threading.Lock()  # guards the waker
        self._closed = False
        keys.on_change = self._wake
        self._thread = threading.Thread(target=self._run, name="authenticator", daemon=True)
        self._thread.start()

    def _wake(self) -> None:
        with self._lock:
            if not self._closed:
                self._waker.send(b"")

    def close(self) -> None:
        """Returns when the thread has ended and its sockets are closed."""
        with self._lock:
            self._closed = True
            self._waker.send(b"close")
        self._thread.join()
        self._keys.on_change = lambda: None
        for socket in (self._zap, self._wake_end, self._waker):
            socket.close(linger=0)

    def _run(self) -> None:
        try:
            poller = zmq.Poller()
            poller.register(self._zap, zmq.POLLIN)
            poller.register(self._wake_end, zmq.POLLIN)
            while True:
                ready = dict(poller.poll(self._poll_ms()))
                if self._wake_end in ready:
                    if self._wake_end.recv() == b"close":
                        return
                    self._let_in_members()
                if self._zap in ready:
                    self._take(self._zap.recv_multipart())
                self._drop_late()
        except Exception as error:
            # Without this thread no connection is admitted; open ones go on. An inbox's owner looks at `died`.
            self.died = f"{type(error).__name__}: {error}"
            logger.exception("the authenticator's thread died: no new connection is admitted")

    def _poll_ms(self) -> int | None:
        if not self._held:
            return None
        left_s = self._held[0].asked_at + HANDSHAKE_S - self._clock()
        return math.ceil(max(0.0, left_s) * 1000)

    def _take(self, frames: list[bytes]) -> None:
        # route, "", version, request id, domain, address, identity, mechanism, credentials
        route, _, _, request_id, _, address, _, mechanism, *credentials = frames
        key = credentials[0] if mechanism == b"CURVE" and len(credentials) == 1 else b""
        question = _Question(route, request_id, address.decode("ascii", "replace"), key, self._clock())
        if key in self._keys:
            self._let_in(question)
        else:
            self._held.append(question)
            if len(self._held) > MAX_HELD:
                self._drop(self._held.popleft())

    def _let_in_members(self) -> None:
        """Called when the keys have changed, and not for each question: with many strangers, each would take as long
        as all of them."""
        held, self._held = self._held, deque()
        for question in held:
            if question.key in self._keys:
                self._let_in(question)
            else:
                self._held.append(question)

    def _drop_late(self) -> None:
        """Drops questions whose time is over. They are held in the order in which they came."""
        now = self._clock()
        while self._held and now - self._held[0].asked_at >= HANDSHAKE_S:
            self._drop(self._held.popleft())

    def _let_in(self, question: _Question) -> None:
        self._zap.send_multipart([question.route, b"", b"1.0", question.request_id, b"200", b"", b"", b""])

    def _drop(self, question: _Question) -> None:
        self._dropped_since_logged += 1
        now = self._clock()
        if self._logged_at is None or now - self._logged_at >= LOG_PERIOD_S:
            logger.warning(
                "%d connections came with keys that are none of this cluster's, the last from %s",
                self._dropped_since_logged,
                question.address,
            )
            self._logged_at, self._dropped_since_logged = now, 0
