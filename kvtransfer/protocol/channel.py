"""The sockets between endpoints: an Inbox to be reached at, an Outbox to reach others."""

from __future__ import annotations

import errno
import logging
import select
import socket
import time
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from wire.errors import NodeLost
from wire.handoff import HandoffMessage
from wire.sockets import Inbox, Outbox

logger = logging.getLogger(__name__)

MAX_ENDPOINTS = 1024
# A peer that nothing was sent to for so long may be gone for ever, and each restart of a node is a new endpoint.
IDLE_S = 60.0
PROBE_AGAIN_S = 1.0


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
        if not endpoint.startswith("tcp://"):
            self.undeliverable += 1
            return
        try:
            self._outbox.send(endpoint, message)
        except NodeLost as error:
            self.undeliverable += 1
            self._forget(endpoint)
            logger.warning("a %s was not sent: %s", type(message).__name__, error)
            return
        now = self._clock()
        self._used[endpoint] = now
        self._used.move_to_end(endpoint)
        oldest, used_at = next(iter(self._used.items()))
        if len(self._used) > MAX_ENDPOINTS or now - used_at > IDLE_S:
            self._forget(oldest)

    def _forget(self, endpoint: str) -> None:
        self._used.pop(endpoint, None)
        self._outbox.forget(endpoint)

    def nobody_listens(self, endpoint: str) -> bool:
        """Whether a connection there was refused: the process that listened has ended."""
        refused = self._probe.refused(endpoint)
        if refused:
            self._forget(endpoint)
        return refused

    def close(self) -> None:
        self._inbox.close()
        self._outbox.close()
        self._probe.close()


class ListenerProbe:
    """Asks, without waiting, whether anybody listens at an address.

    A process that is merely stuck or stopped still has a listening socket, and the kernel accepts for it; an
    address that refuses has lost its process. An address that does not answer at all says nothing.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._attempts: dict[str, socket.socket] = {}
        self._not_before: dict[str, float] = {}

    def refused(self, endpoint: str) -> bool:
        """False while it is not known: ask again."""
        attempt = self._attempts.pop(endpoint, None)
        if attempt is None:
            if self._clock() < self._not_before.get(endpoint, 0.0):
                return False
            attempt = self._connect(endpoint)
            if attempt is None:
                return False
        if not select.select([], [attempt], [], 0)[1]:
            self._attempts[endpoint] = attempt
            return False
        refused = attempt.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNREFUSED
        attempt.close()
        self._not_before[endpoint] = self._clock() + PROBE_AGAIN_S
        if refused:
            del self._not_before[endpoint]
        return refused

    def _connect(self, endpoint: str) -> socket.socket | None:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(
                host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
            )[0]
        except (OSError, ValueError):
            return None  # a name: resolving it might wait
        attempt = socket.socket(family, kind, protocol)
        attempt.setblocking(False)
        attempt.connect_ex(address)
        return attempt

    def close(self) -> None:
        for attempt in self._attempts.values():
            attempt.close()
        self._attempts.clear()
