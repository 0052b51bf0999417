"""Finds out whether a process still listens at an address, without waiting and without the process's help.

The kernel accepts connections for a process that is stuck, stopped or starved. So if an address accepts, its process is
there, and so are the machine and the way to it: a caller that waits for an answer may go on waiting. If it refuses, the
process is gone, or a firewall refuses. If nothing answers, the machine is gone, or the way to it is cut. The last
two are reason enough to go on without the process, and no proof that it has ended.
"""

from __future__ import annotations

import enum
import errno
import logging
import os
import select
import socket
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from tandem.wire.endpoints import parse_endpoint

logger = logging.getLogger(__name__)

AGAIN_S = 1.0  # an address that has accepted is tried again after this long
ANSWER_S = 1.2  # a kernel answers at once; it sends a lost first packet again after a second
PATIENCE_S = 10.0  # an attempt is dropped after this long
_NO_WAY = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EHOSTDOWN)


class Listener(enum.Enum):
    UNKNOWN = enum.auto()  # not decided yet: call again
    ACCEPTS = enum.auto()
    REFUSES = enum.auto()
    DOES_NOT_ANSWER = enum.auto()


class ListenerProbe:
    """Keeps one attempt for each address. It drops old attempts at addresses that are not asked about any more."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.attempts: dict[str, _Attempt] = {}
        self.accepted: dict[str, float] = {}

    def look(self, endpoint: str) -> Listener:
        """Returns what is known of the address. Never blocks. An address that accepts is tried at most once a
        second."""
        self._drop_what_is_old()
        attempt = self.attempts.pop(endpoint, None)
        if attempt is None:
            if endpoint in self.accepted:
                return Listener.ACCEPTS
            attempt = self._begin(endpoint)
            if attempt is None:
                return Listener.UNKNOWN
        if not attempt.is_decided:
            self.attempts[endpoint] = attempt
            late = self._clock() >= attempt.began_at + ANSWER_S
            return Listener.DOES_NOT_ANSWER if late else Listener.UNKNOWN
        error = attempt.failed_at_once or attempt.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        attempt.connection.close()
        if error == 0:
            self.accepted[endpoint] = self._clock() + AGAIN_S
            return Listener.ACCEPTS
        return Listener.REFUSES if error == errno.ECONNREFUSED else Listener.DOES_NOT_ANSWER

    def _begin(self, endpoint: str) -> _Attempt | None:
        address = address_of(endpoint)
        if address is None:
            return None
        family, where = address
        try:
            connection = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            logger.warning("whether a process listens at %s could not be asked: %s", endpoint, error)
            return None
        connection.setblocking(False)
        code = connection.connect_ex(where)
        if code not in (0, errno.EINPROGRESS, errno.ECONNREFUSED, *_NO_WAY):  # as when no local port is left
            connection.close()
            logger.warning("whether a process listens at %s could not be asked: %s", endpoint, os.strerror(code))
            return None
        return _Attempt(connection, self._clock(), 0 if code == errno.EINPROGRESS else code)

    def _drop_what_is_old(self) -> None:
        """Drops what may never be asked about again."""
        now = self._clock()
        self.accepted = {endpoint: until for endpoint, until in self.accepted.items() if now < until}
        for endpoint, attempt in list(self.attempts.items()):
            if now >= attempt.began_at + PATIENCE_S:
                self.attempts.pop(endpoint).connection.close()

    def close(self) -> None:
        for attempt in self.attempts.values():
            attempt.connection.close()
        self.attempts.clear()


class _Attempt(NamedTuple):
    connection: socket.socket
    began_at: float
    failed_at_once: int  # the error that ended it as it began, as without a route: the socket keeps none

    @property
    def is_decided(self) -> bool:
        poller = select.poll()  # select() takes no descriptor above 1023
        poller.register(self.connection, select.POLLOUT)
        return bool(poller.poll(0))


def address_of(endpoint: str) -> tuple[socket.AddressFamily, tuple[Any, ...]] | None:
    """Returns the endpoint's socket family and address; None if it is no endpoint."""
    parsed = parse_endpoint(endpoint)
    if parsed is None:
        return None
    try:
        family, _, _, _, where = socket.getaddrinfo(
            parsed.host, parsed.port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )[0]
    except OSError:
        return None
    return family, where
