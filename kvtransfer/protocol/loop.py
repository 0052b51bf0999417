"""The thread that runs an endpoint: it alone touches the transport and the protocol's state.

It sleeps until something arrives. While transfers are under way it looks at deadlines `ProtocolSettings.tick_s` apart,
and while handles are in flight it polls them at intervals that grow from POLL_MIN_S to POLL_MAX_S.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence

from tandem.kvtransfer.protocol.commands import Command
from tandem.kvtransfer.protocol.endpoint import TransferEndpoint
from tandem.kvtransfer.protocol.identity import Clock
from tandem.kvtransfer.protocol.settings import ProtocolSettings
from tandem.kvtransfer.protocol.transport import Activity
from tandem.wire.errors import InternalError
from tandem.wire.handoff import HandoffMessage

logger = logging.getLogger(__name__)

POLL_MIN_S = 0.0001
POLL_MAX_S = 0.0005
# Blocks are moved and deadlines looked at in between, however much peers have to say.
ITEMS_PER_TURN = 256


class _Stop:
    pass


class ProtocolLoop:
    """`failure` is set when the thread has died of a bug; `on_failure` is called then, from the thread."""

    def __init__(
        self, name: str, settings: ProtocolSettings, clock: Clock, on_failure: Callable[[], None]
    ) -> None:
        self._name = name
        self._settings = settings
        self._clock = clock
        self._on_failure = on_failure
        self._queue: queue.SimpleQueue[HandoffMessage | Sequence[Command] | _Stop] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stop_grace_s = 0.0
        self.handler_errors = 0
        self.failure: BaseException | None = None

    def start(self, endpoint: TransferEndpoint) -> None:
        """What was posted before is handled now."""
        self._thread = threading.Thread(target=self._run, args=(endpoint,), name=self._name, daemon=True)
        self._thread.start()

    def message(self, message: HandoffMessage) -> None:
        """From a peer. Any thread."""
        self._queue.put(message)

    def command(self, commands: Sequence[Command]) -> None:
        """From our own engine. Any thread; carried out in this order."""
        self._queue.put(commands)

    def _run(self, endpoint: TransferEndpoint) -> None:
        try:
            self._serve(endpoint)
        except BaseException as error:
            self.failure = error
            logger.exception("%s: the transfer thread died", self._name)
            self._on_failure()

    def _serve(self, endpoint: TransferEndpoint) -> None:
        next_tick = 0.0
        poll_s = POLL_MIN_S
        activity = Activity.NONE
        while True:
            timeout: float | None
            if activity is Activity.IN_FLIGHT:
                timeout = poll_s
                poll_s = min(2 * poll_s, POLL_MAX_S)
            elif activity is Activity.DUE:
                timeout = 0.0
                poll_s = POLL_MIN_S
            else:
                timeout = None if endpoint.is_idle else max(0.0, next_tick - self._clock())
                poll_s = POLL_MIN_S
            if not self._take(endpoint, timeout):
                break
            activity = endpoint.pump()
            now = self._clock()
            if now >= next_tick:
                endpoint.tick()
                next_tick = now + self._settings.tick_s
        self._wind_down(endpoint)

    def _take(self, endpoint: TransferEndpoint, timeout: float | None) -> bool:
        """Handle what has arrived, up to a turn's worth, waiting for the first item. False: stop."""
        for _ in range(ITEMS_PER_TURN):
            try:
                item = self._queue.get(timeout=timeout) if timeout != 0.0 else self._queue.get_nowait()
            except queue.Empty:
                return True
            if isinstance(item, _Stop):
                return False
            self._handle(endpoint, item)
            timeout = 0.0
        return True

    def _handle(self, endpoint: TransferEndpoint, item: HandoffMessage | Sequence[Command]) -> None:
        if isinstance(item, Sequence):
            # Commands are our own: an error here is a bug of ours and ends the thread.
            for command in item:
                endpoint.execute(command)
            return
        try:
            endpoint.receive(item)
        except Exception:
            # A peer's message must not end the thread, whatever it found.
            self.handler_errors += 1
            logger.exception("%s: handling %s failed", self._name, type(item).__name__)

    def _wind_down(self, endpoint: TransferEndpoint) -> None:
        until = self._clock() + self._stop_grace_s
        while not endpoint.shutdown() and self._clock() < until:
            endpoint.pump()
            try:
                item = self._queue.get(timeout=POLL_MAX_S)
            except queue.Empty:
                endpoint.tick()
                continue
            if not isinstance(item, _Stop):
                self._handle(endpoint, item)

    def stop(self, grace_s: float) -> None:
        """Give every transfer up, wait at most `grace_s` for what is in flight, end the thread. Idempotent."""
        thread = self._thread
        if thread is None:
            return
        self._thread = None
        self._stop_grace_s = grace_s
        self._queue.put(_Stop())
        thread.join(timeout=grace_s + 5)
        if thread.is_alive():
            raise InternalError(
                f"{self._name}: the transfer thread did not end within {grace_s + 5:g} s of stop()"
            )
