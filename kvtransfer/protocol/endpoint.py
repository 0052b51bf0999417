"""A node's producer and consumer behind one address: every message and every command enters here."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from tandem.kvtransfer.base import Handoff, LoadFailure
from tandem.kvtransfer.protocol import commands
from tandem.kvtransfer.protocol.consumer import Consumer
from tandem.kvtransfer.protocol.producer import Producer
from tandem.kvtransfer.protocol.side import Answers, NodeSide
from tandem.kvtransfer.protocol.transport import Activity
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
from tandem.wire.listening import Listener

_OUT_OF_REACH = {
    Listener.REFUSES: "its address refuses connections",
    Listener.DOES_NOT_ANSWER: "it is silent, and its machine does not answer",
}


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
                self.producer.registrations.on_hello(message)
            case RegisterDestination():
                self.producer.registrations.on_register(message)
            case RenewLease():
                self.producer.registrations.on_renew(message)
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

    def execute(self, command: commands.Command) -> None:
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
