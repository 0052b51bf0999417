"""A node's producer and consumer behind one address, where every message and every command enters, and the thread that runs them:
it alone touches the transport and the protocol's state. The address is a `SideChannel`'s, by which nodes speak to nodes, of transfers and
of tiers.

The thread sleeps until something arrives. While transfers are under way it looks at deadlines `ProtocolSettings.tick_s` apart,
and while handles are in flight it polls them at intervals that grow from POLL_MIN_S to POLL_MAX_S.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from tandem.kvtransfer.base import Handoff, LoadFailure
from tandem.kvtransfer.protocol import commands
from tandem.kvtransfer.protocol.commands import Command
from tandem.kvtransfer.protocol.consumer import Consumer
from tandem.kvtransfer.protocol.producer import Producer
from tandem.kvtransfer.protocol.side import Answers, Clock, NodeSide, ProtocolSettings
from tandem.kvtransfer.protocol.transport import Activity
from tandem.wire.errors import InternalError, NodeLost
from tandem.wire.handoff import (
    CancelTransfer,
    DestinationRegistered,
    HandoffAccepted,
    HandoffMessage,
    HandoffNotice,
    Hello,
    KVArrived,
    LeaseRenewed,
    ProcessIdentity,
    Refusal,
    RefusalCode,
    RegisterDestination,
    RenewLease,
    TransferClosed,
    TransferPace,
    Welcome,
)
from tandem.wire.listening import Listener, ListenerProbe, address_of
from tandem.wire.sockets import Inbox, Outbox

logger = logging.getLogger(__name__)

POLL_MIN_S = 0.0001
POLL_MAX_S = 0.0005
# Blocks are moved and deadlines looked at in between, however much peers have to say.
ITEMS_PER_TURN = 256

MAX_ENDPOINTS = 1024
# A peer that nothing was sent to for so long may be gone for ever, and each restart of a node is a new endpoint.
IDLE_S = 60.0
# Every question is asked again, so a lost one costs less than a connection that waits for its turn to try again.
UNACKNOWLEDGED_S = 2.0

_OUT_OF_REACH = {
    Listener.REFUSES: "its address refuses connections",
    Listener.DOES_NOT_ANSWER: "it is silent, and its machine does not answer",
}


M = TypeVar("M")


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


class Outcomes(msgspec.Struct, frozen=True):
    """Where the endpoint reports to. Called from its thread."""

    finished_sending: Callable[[str], None]
    unwanted_sending: Callable[[str], None]
    finished_recving: Callable[[str, Handoff], None]
    failed_recving: Callable[[str, LoadFailure], None]
    released_blocks: Callable[[frozenset[int]], None]


class TransferEndpoint:
    """`listener` says, without blocking, whether a connection to an address is accepted: if not, it is a reason to go on
    without the peer. `has_ended` says whether a process has certainly ended, which is proof that it writes nothing any more."""

    def __init__(
        self,
        side: NodeSide,
        *,
        listener: Callable[[str], Listener],
        has_ended: Callable[[ProcessIdentity], bool],
        outcomes: Outcomes,
    ) -> None:
        self._side = side
        self._answers = Answers(side.me, side.send, side.recorder)
        self._listener = listener
        self._has_ended = has_ended
        self.producer = Producer(
            side, finished_sending=outcomes.finished_sending, unwanted=outcomes.unwanted_sending
        )
        self.consumer = Consumer(
            side,
            finished=outcomes.finished_recving,
            failed=outcomes.failed_recving,
            released=outcomes.released_blocks,
            has_ended=has_ended,
        )

    def receive(self, message: HandoffMessage) -> None:
        if message.envelope.receiver_epoch != self._side.me.epoch:
            self._refuse_epoch(message)
            return
        match message:
            case Hello():
                self.producer.on_hello(message)
            case RegisterDestination():
                self.producer.on_register(message)
            case RenewLease():
                self.producer.on_renew(message)
            case HandoffAccepted():
                self.producer.on_accepted(message)
            case CancelTransfer():
                self.producer.on_cancel(message)
            case Welcome():
                self.consumer.on_welcome(message)
            case DestinationRegistered():
                self.consumer.on_registered(message)
            case LeaseRenewed():
                self.consumer.on_renewed(message)
            case KVArrived():
                self.consumer.on_arrived(message)
            case TransferPace():
                self.consumer.on_pace(message)
            case HandoffNotice():
                self.consumer.on_notice(message)
            case TransferClosed():
                self.consumer.on_closed(message)
            case Refusal():
                self.consumer.on_refused(message)

    def _refuse_epoch(self, message: HandoffMessage) -> None:
        if isinstance(message, Refusal):
            # Two nodes must not refuse each other's refusals for ever.
            self._side.recorder.refused(RefusalCode.WRONG_EPOCH.value)
            return
        self._answers.refuse_epoch(message.envelope)

    def execute(self, command: Command) -> None:
        match command:
            case commands.AnnounceSend():
                self.producer.announce(command)
            case commands.PlanSend():
                self.producer.plan(command)
            case commands.ExtendSend():
                self.producer.extend(command)
            case commands.LayersComputed() | commands.ComputedTokens():
                self.producer.computed(command)
            case commands.PreemptedRequests():
                self.producer.preempted(command)
            case commands.FinishSend():
                self.producer.finish(command)
            case commands.AbandonSend():
                self.producer.abandon(command)
            case commands.BeginReceive():
                self.consumer.begin(command)
            case commands.CancelReceive():
                self.consumer.cancel(command)
            case commands.DeclineTransfer():
                self.consumer.decline(command)
            case commands.ComputesAt():
                self.producer.computes_at(command)
                self.consumer.computes_at(command)

    def pump(self) -> Activity:
        """Move blocks. What it returns says how soon it wants to be called again."""
        return max(self.producer.pump(), self.consumer.pump())

    def tick(self) -> None:
        """Look at every deadline. To be called often while not `is_idle`."""
        self.producer.tick()
        self.consumer.tick()
        for consumer in self.producer.silent_links():
            if self._has_ended(consumer.hello.process):
                self.producer.peer_ended(consumer.key, "its process has ended")
        for producer in self.consumer.silent_links():
            if producer.process is not None and self._has_ended(producer.process):
                self.consumer.suspect(producer.key, "its process has ended", proven=True)
            elif (why := _OUT_OF_REACH.get(self._listener(producer.peer.endpoint))) is not None:
                self.consumer.suspect(producer.key, why)

    @property
    def is_idle(self) -> bool:
        return self.producer.is_idle and self.consumer.is_idle

    def shutdown(self) -> bool:
        """End everything that can end now. False while a handle is in flight or a peer may write."""
        return self.producer.shutdown() & self.consumer.shutdown()


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
