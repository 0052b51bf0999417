"""A node's producer and consumer behind one address, and the thread that runs them. Every message and every command
goes through that thread; it alone touches the transport and the protocol's state. `SideChannel` is the address at
which nodes send messages to nodes, about transfers and about tiers.

The thread sleeps until something arrives, or until it has to ask a peer for a sign. While transfers are open, it looks at deadlines every
`ProtocolSettings.tick_s`. While handles are in flight, it polls them at intervals that grow from POLL_MIN_S to
POLL_MAX_S.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from tandem.base.errors import InternalError, NodeLost
from tandem.kvtransfer.base import Handoff, LoadFailure
from tandem.kvtransfer.protocol import commands
from tandem.kvtransfer.protocol.commands import Command
from tandem.kvtransfer.protocol.consumer import Consumer
from tandem.kvtransfer.protocol.producer import Producer
from tandem.kvtransfer.protocol.settings import ProtocolSettings
from tandem.kvtransfer.protocol.side import Answers, Clock, NodeSide
from tandem.kvtransfer.protocol.transport import Activity
from tandem.kvtransfer.sources import ASK_S
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
# After this many messages and commands the thread moves blocks and looks at deadlines, however many are waiting.
ITEMS_PER_TURN = 256

MAX_ENDPOINTS = 1024
# A peer that got no message for this long may be gone for good, and each restart of a node is a new endpoint.
IDLE_S = 60.0
# Every question is sent again, so a lost one costs less than a connection that waits before it is tried again.
UNACKNOWLEDGED_S = 2.0

_OUT_OF_REACH = {
    Listener.REFUSES: "its address refuses connections",
    Listener.DOES_NOT_ANSWER: "it is silent, and its machine does not answer",
}


M = TypeVar("M")


class SideChannel(Generic[M]):
    """Sends and receives messages between nodes. Peers name their endpoints, so these are checked, and a bounded number
    of connections is kept."""

    def __init__(
        self,
        host: str,
        name: str,
        on_message: Callable[[M], None],
        clock: Callable[[], float] = time.monotonic,
        *,
        messages: Any = HandoffMessage,
    ) -> None:
        """`messages`: the type of the messages that arrive. `on_message` is called from the inbox's thread."""
        self._clock = clock
        self._inbox: Inbox[M] = Inbox(host, messages, on_message, name=name)
        self._outbox = Outbox(unacknowledged_s=UNACKNOWLEDGED_S)
        self._used: OrderedDict[str, float] = OrderedDict()  # when each was last used, the oldest first
        self._using = threading.Lock()  # held for every change of it
        self._probe = ListenerProbe()

    @property
    def endpoint(self) -> str:
        return self._inbox.endpoint

    @property
    def malformed(self) -> int:
        return self._inbox.malformed

    @property
    def died(self) -> str | None:
        """Why no more messages are received; None while they are."""
        return self._inbox.died

    def send(self, endpoint: str, message: msgspec.Struct) -> None:
        """Never blocks and never raises. A sender that needs an answer sends again, and has a deadline."""
        if endpoint not in self._used and address_of(endpoint) is None:
            return
        try:
            self._outbox.send(endpoint, message)
        except NodeLost as error:
            self.forget(endpoint)
            logger.warning("a %s was not sent: %s", type(message).__name__, error)
            return
        with self._using:
            now = self._clock()
            self._used[endpoint] = now
            self._used.move_to_end(endpoint)
            oldest, used_at = next(iter(self._used.items()))
            is_over = len(self._used) > MAX_ENDPOINTS or now - used_at > IDLE_S
        if is_over:
            self.forget(oldest)

    def forget(self, endpoint: str) -> None:
        """The peer has ended, or was not used for long: drop the connection and the messages that wait in it."""
        with self._using:
            self._used.pop(endpoint, None)
        self._outbox.forget(endpoint)

    def listener(self, endpoint: str) -> Listener:
        """Whether a connection to this endpoint is accepted. Never blocks."""
        seen = self._probe.look(endpoint)
        if seen is Listener.REFUSES:
            self.forget(endpoint)
        return seen

    def close(self) -> None:
        self._inbox.close()
        self._outbox.close()
        self._probe.close()


class Channel(Protocol):
    """How a node's messages to other nodes leave, and what is known of the ways there: see SideChannel."""

    @property
    def endpoint(self) -> str: ...
    @property
    def malformed(self) -> int: ...
    @property
    def died(self) -> str | None: ...
    def send(self, endpoint: str, message: msgspec.Struct) -> None: ...
    def forget(self, endpoint: str) -> None: ...
    def listener(self, endpoint: str) -> Listener: ...
    def close(self) -> None: ...


class Outcomes(msgspec.Struct, frozen=True):
    """Where the endpoint reports what happened. It calls these from its own thread."""

    finished_sending: Callable[[str], None]
    unwanted_sending: Callable[[str], None]
    finished_recving: Callable[[str, Handoff], None]
    failed_recving: Callable[[str, LoadFailure], None]
    distrusted: Callable[[str], None]  # everything in our cache, and why
    released_blocks: Callable[[frozenset[int]], None]


class TransferEndpoint:
    """`listener` says, without blocking, whether a connection to an address is accepted. If it is not, that is a reason
    to go on without the peer. `has_ended` says whether a process has certainly ended, which proves that it writes
    nothing any more."""

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
            side,
            finished_sending=outcomes.finished_sending,
            unwanted=outcomes.unwanted_sending,
            distrusted=outcomes.distrusted,
        )
        self.consumer = Consumer(
            side,
            finished=outcomes.finished_recving,
            failed=outcomes.failed_recving,
            released=outcomes.released_blocks,
            distrusted=outcomes.distrusted,
            has_ended=has_ended,
        )

    def receive(self, message: HandoffMessage) -> None:
        if message.envelope.receiver_epoch != self._side.me.epoch:
            self._refuse_epoch(message)
            return
        is_news = self.consumer.hear(message.envelope)
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
                if is_news:  # so that the producer need not tell it again
                    envelope = self._side.me.envelope(message.envelope.sender_epoch)
                    self._side.send(message.envelope.reply_to, RenewLease(envelope, message.stamp, []))
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
            # Else two nodes could refuse each other's refusals for ever.
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
            case commands.BeginGeneration():
                self._side.me.generation += 1
                self.consumer.generations.begin()
                self.producer.begin_generation()
            case commands.FoundWrong():
                self.consumer.generations.found_wrong(command.peer)
            case commands.VoidSend():
                self.producer.void(command)
            case commands.CallBackSend():
                self.producer.call_back(command)
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
        """Moves blocks. Returns how soon it must be called again."""
        return max(self.producer.pump(), self.consumer.pump())

    def tick(self) -> None:
        """Acts on every deadline. The caller calls it often while `is_idle` is False."""
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

    @property
    def seconds_until_ask(self) -> float:
        """Until the peers from which KV came are asked for a sign again."""
        return self.consumer.generations.seconds_until_ask

    def shutdown(self) -> bool:
        """Ends everything that can end now. False while a handle is in flight or a peer may write."""
        return self.producer.shutdown() & self.consumer.shutdown()


class _Stop:
    pass


class ProtocolLoop:
    """The protocol's thread and its queue. If a bug ends the thread, `failure` is set and `on_failure` is called
    from it."""

    def __init__(self, name: str, settings: ProtocolSettings, clock: Clock, on_failure: Callable[[], None]) -> None:
        self._name = name
        self._settings = settings
        self._clock = clock
        self._on_failure = on_failure
        self._queue: queue.SimpleQueue[HandoffMessage | Sequence[Command] | _Stop] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stop_grace_s = 0.0
        self._next_tick = 0.0
        self._poll_s = POLL_MIN_S
        self.handler_errors = 0
        self.failure: BaseException | None = None

    def start(self, endpoint: TransferEndpoint) -> None:
        """Starts the thread, which begins with the messages and commands that are in the queue."""
        self._thread = threading.Thread(target=self._run, args=(endpoint,), name=self._name, daemon=True)
        self._thread.start()

    def message(self, message: HandoffMessage) -> None:
        """Queues a peer's message. Any thread may call this."""
        self._put(message)

    def command(self, commands: Sequence[Command]) -> None:
        """Queues our own engine's commands, which are carried out in this order. Any thread may call this."""
        self._put(commands)

    def _put(self, item: HandoffMessage | Sequence[Command] | _Stop) -> None:
        self._queue.put(item)

    def _run(self, endpoint: TransferEndpoint) -> None:
        try:
            self._serve(endpoint)
        except BaseException as error:
            self.failure = error
            logger.exception("%s: the transfer thread died", self._name)
            self._on_failure()

    def _serve(self, endpoint: TransferEndpoint) -> None:
        wait_s: float | None = ASK_S
        while wait_s is not None:
            wait_s = self.turn(endpoint, wait_s)
        self._wind_down(endpoint)

    def turn(self, endpoint: TransferEndpoint, wait_s: float) -> float | None:
        """Waits up to `wait_s` for the first item, handles what has arrived, moves blocks and looks at deadlines.
        Returns how long the next turn may wait; None: the loop was stopped. The thread calls it again and again."""
        if not self._take(endpoint, wait_s):
            return None
        activity = endpoint.pump()
        now = self._clock()
        if now >= self._next_tick:
            endpoint.tick()
            self._next_tick = now + self._settings.tick_s
        if activity is Activity.IN_FLIGHT:
            poll_s = self._poll_s
            self._poll_s = min(2 * poll_s, POLL_MAX_S)
            return poll_s
        self._poll_s = POLL_MIN_S
        if activity is Activity.DUE:
            return 0.0
        if endpoint.is_idle:
            return max(endpoint.seconds_until_ask, self._next_tick - self._clock(), 0.0)
        return max(0.0, self._next_tick - self._clock())

    def _take(self, endpoint: TransferEndpoint, timeout: float) -> bool:
        """Handles what has arrived, at most ITEMS_PER_TURN; waits for the first item. False: stop."""
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
            # Our own half made the commands, so an error here is a bug and ends the thread.
            for command in item:
                endpoint.execute(command)
            return
        try:
            endpoint.receive(item)
        except Exception:
            # A peer's message must not end the thread, whatever error it causes.
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
        """Gives every transfer up, waits at most `grace_s` for what is in flight, and ends the thread. Idempotent.
        Raises InternalError if the thread does not end."""
        thread = self._thread
        if thread is None:
            return
        self._thread = None
        self._stop_grace_s = grace_s
        self._put(_Stop())
        thread.join(timeout=grace_s + 5)
        if thread.is_alive():
            raise InternalError(f"{self._name}: the transfer thread did not end within {grace_s + 5:g} s of stop()")
