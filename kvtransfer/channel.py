"""The sockets by which nodes speak to nodes, of transfers and of tiers: an Inbox to be reached at, an Outbox to reach others."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

from tandem.wire.errors import NodeLost
from tandem.wire.handoff import HandoffMessage
from tandem.wire.listening import Listener, ListenerProbe, address_of
from tandem.wire.sockets import Inbox, Outbox

logger = logging.getLogger(__name__)

M = TypeVar("M")

MAX_ENDPOINTS = 1024
# A peer that nothing was sent to for so long may be gone for ever, and each restart of a node is a new endpoint.
IDLE_S = 60.0
# Every question is asked again, so a lost one costs less than a connection that waits for its turn to try again.
UNACKNOWLEDGED_S = 2.0


class SideChannel(Generic[M]):
    """Endpoints are named by peers, so what they name is checked, and how many are kept is bounded."""

    def __init__(
        self,
        host: str,
        name: str,
        on_message: Callable[[M], None],
        clock: Callable[[], float] = time.monotonic,
        *,
        messages: Any = HandoffMessage,
    ) -> None:
        """`messages`: the type of what arrives."""
        self._clock = clock
        self._inbox: Inbox[M] = Inbox(host, messages, on_message, name=name)
        self._outbox = Outbox(unacknowledged_s=UNACKNOWLEDGED_S)
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
        """Never blocks and never raises: a sender that needs an answer asks again, and has a deadline."""
        if endpoint not in self._used and address_of(endpoint) is None:
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
        """The peer has ended: drop the connection and what waits in it."""
        self._used.pop(endpoint, None)
        self._outbox.forget(endpoint)

    def listener(self, endpoint: str) -> Listener:
        """Whether a connection there is accepted. Never blocks."""
        seen = self._probe.look(endpoint)
        if seen is Listener.REFUSES:
            self.forget(endpoint)
        return seen

    def close(self) -> None:
        self._inbox.close()
        self._outbox.close()
        self._probe.close()
