"""The routers that a node answers to: who was heard lately, what they are told, and when one counts as lost."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Protocol

import msgspec

from tandem.wire.errors import NodeLost
from tandem.wire.lines import Position
from tandem.wire.requests import NodeStatus

logger = logging.getLogger(__name__)


class RouterLine(Protocol):
    """The node's end of the line to its routers."""

    @property
    def malformed(self) -> int: ...
    @property
    def died(self) -> str | None:
        """Why nothing is received any more, although it was not closed."""
        ...

    @property
    def gaps(self) -> int:
        """How often messages were missing and asked for again."""
        ...

    def send(self, endpoint: str, message: msgspec.Struct) -> None:
        """Queues a message; raises NodeLost when the router does not read. The first one makes a connection, which is kept."""
        ...

    def received(self, endpoint: str) -> Position:
        """The router's last message that was delivered."""
        ...

    def forget(self, endpoint: str) -> None:
        """Drops the connection, and whatever is queued on it."""
        ...


class Routers:
    """Every method may be called from any thread. A router that is silent for too long, or does not read, is lost:
    `lost` is told once, and the router is a new one when it is heard again. Until then it is told nothing, and no
    connection to it is kept: what it does not read would pile up."""

    def __init__(
        self,
        line: RouterLine,
        status: Callable[[], NodeStatus],
        lost: Callable[[str], None],  # must not wait
        *,
        period_s: float,  # between two reports of the status to everyone
        silence_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._line = line
        self._status = status
        self._lost = lost
        self._period_s = period_s
        self._silence_s = silence_s
        self._clock = clock
        self._heard: dict[str, float] = {}  # by where it listens
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._report, name="node-status", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(5)

    @property
    def known(self) -> list[str]:
        """Those that were heard lately, by where they listen."""
        with self._lock:
            return list(self._heard)

    def heard(self, reply_to: str) -> bool:
        """True when it was not known before."""
        with self._lock:
            is_new = reply_to not in self._heard
            self._heard[reply_to] = self._clock()
        return is_new

    def tell(self, reply_to: str, message: msgspec.Struct) -> None:
        with self._lock:
            if reply_to not in self._heard:
                return
            try:
                self._line.send(reply_to, message)
            except NodeLost as error:
                logger.warning("router lost: %s", error)
                self._lose(reply_to)

    def tell_status(self, reply_to: str) -> None:
        self.tell(reply_to, self._status())

    def tell_all_status(self) -> None:
        for reply_to in self.known:
            self.tell_status(reply_to)

    def report(self) -> None:
        """Sends the status to every router that is not silent."""
        for reply_to in self.known:
            self._lose_if_silent(reply_to)
            self.tell_status(reply_to)

    def _report(self) -> None:
        while not self._closing.wait(self._period_s):
            try:
                self.report()
            except Exception:
                # Its routers would give up a node of which they hear nothing, and the controller would not replace it.
                logger.exception("the status was not sent to every router")

    def _lose_if_silent(self, reply_to: str) -> None:
        with self._lock:
            silent_s = self._clock() - self._heard.get(reply_to, self._clock())
            if silent_s > self._silence_s:
                logger.warning(
                    "router %s has been silent for %.0f s: aborting its requests", reply_to, silent_s
                )
                self._lose(reply_to)

    def _lose(self, reply_to: str) -> None:
        """Called under the lock, so that `lost` is called before anything that the router says later is acted on."""
        del self._heard[reply_to]
        self._line.forget(reply_to)
        self._lost(reply_to)
