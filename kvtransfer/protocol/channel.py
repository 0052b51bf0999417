"""The sockets between endpoints: an Inbox to be reached at, an Outbox to reach others."""

from __future__ import annotations

import errno
import logging
import select
import socket
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from tandem.wire.errors import NodeLost
from tandem.wire.handoff import HandoffMessage
from tandem.wire.sockets import Inbox, Outbox

logger = logging.getLogger(__name__)

MAX_ENDPOINTS = 1024
# A peer that nothing was sent to for so long may be gone for ever, and each restart of a node is a new endpoint.
IDLE_S = 60.0
PROBE_AGAIN_S = 1.0
# A machine that was lost does not even refuse.
PROBE_PATIENCE_S = 10.0


class SideChannel:
    """Endpoints are named by peers, so what they name is checked, and how many are kept is bounded."""

    def __init__(
        self,
        host: str,
        name: str,
        on_message: Callable[[HandoffMessage], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._inbox: Inbox[HandoffMessage] = Inbox(host, HandoffMessage, on_message, name=name)
        self._outbox = Outbox()
        self._used: OrderedDict[str, float] = OrderedDict()  # when last; the longest ago first
        self._probe = ListenerProbe()
        self.undeliverable = 0

    @property
    def endpoint(self) -> str:
        return self._inbox.endpoint

    @property
    def malformed(self) -> int:
        return self._inbox.malformed

    @property
    def died(self) -> str | None:
        """Why nothing is received any more; None while it is."""
        return self._inbox.died

    def send(self, endpoint: str, message: msgspec.Struct) -> None:
        """Never blocks and never raises: whoever needs an answer asks again, and has a deadline."""
        if endpoint not in self._used and _address_of(endpoint) is None:
            self.undeliverable += 1
            return
        try:
            self._outbox.send(endpoint, message)
        except NodeLost as error:
            self.undeliverable += 1
            self.forget(endpoint)
            logger.warning("a %s was not sent: %s", type(message).__name__, error)
            return
        now = self._clock()
        self._used[endpoint] = now
        self._used.move_to_end(endpoint)
        oldest, used_at = next(iter(self._used.items()))
        if len(self._used) > MAX_ENDPOINTS or now - used_at > IDLE_S:
            self.forget(oldest)

    def forget(self, endpoint: str) -> None:
        """Nobody is there any more: drop the connection and what waits in it."""
        self._used.pop(endpoint, None)
        self._outbox.forget(endpoint)

    def refuses(self, endpoint: str) -> bool:
        """Whether a connection there was refused. The process that listened has ended, or something between us and it
        refuses on its behalf."""
        refused = self._probe.refused(endpoint)
        if refused:
            self.forget(endpoint)
        return refused

    def close(self) -> None:
        self._inbox.close()
        self._outbox.close()
        self._probe.close()


class ListenerProbe:
    """Asks, without waiting, whether anybody listens at an address.

    A process that is merely stuck or stopped still has a listening socket, and the kernel accepts for it. An address
    that refuses has lost its process, or there is a firewall: reason enough to go on without it, and no proof. An
    address that does not answer at all says nothing.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._attempts: dict[str, _Attempt] = {}
        self._not_before: dict[str, float] = {}

    def refused(self, endpoint: str) -> bool:
        """False while it is not known: ask again."""
        self._drop_what_is_old()
        attempt = self._attempts.pop(endpoint, None)
        if attempt is None:
            if endpoint in self._not_before:
                return False
            attempt = self._begin(endpoint)
            if attempt is None:
                return False
        if not attempt.is_decided:
            self._attempts[endpoint] = attempt
            return False
        refused = attempt.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNREFUSED
        attempt.connection.close()
        if not refused:
            self._not_before[endpoint] = self._clock() + PROBE_AGAIN_S
        return refused

    def _begin(self, endpoint: str) -> _Attempt | None:
        address = _address_of(endpoint)
        if address is None:
            return None
        family, where = address
        try:
            connection = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            logger.warning("whether anybody listens at %s was not asked: %s", endpoint, error)
            return None
        connection.setblocking(False)
        connection.connect_ex(where)
        return _Attempt(connection, self._clock())

    def _drop_what_is_old(self) -> None:
        """Nobody may ever ask about these addresses again."""
        now = self._clock()
        self._not_before = {endpoint: at for endpoint, at in self._not_before.items() if now < at}
        for endpoint, attempt in list(self._attempts.items()):
            if now >= attempt.began_at + PROBE_PATIENCE_S:
                self._attempts.pop(endpoint).connection.close()

    def close(self) -> None:
        for attempt in self._attempts.values():
            attempt.connection.close()
        self._attempts.clear()


class _Attempt(NamedTuple):
    connection: socket.socket
    began_at: float

    @property
    def is_decided(self) -> bool:
        poller = select.poll()  # select() takes no descriptor above 1023
        poller.register(self.connection, select.POLLOUT)
        return bool(poller.poll(0))


def _address_of(endpoint: str) -> tuple[socket.AddressFamily, tuple[Any, ...]] | None:
    """None for what is no address, and for a name: resolving it might wait."""
    if not endpoint.startswith("tcp://"):
        return None
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    try:
        family, _, _, _, where = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )[0]
    except (OSError, ValueError):
        return None
    return family, where
