"""A node's producer and consumer behind one address: every message and every command enters here."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from tandem.kvtransfer.base import Handoff, LoadFailure
from tandem.kvtransfer.protocol import commands
from tandem.kvtransfer.protocol.answers import Answers
from tandem.kvtransfer.protocol.consumer import Consumer
from tandem.kvtransfer.protocol.producer import Producer
from tandem.kvtransfer.protocol.side import Side
from tandem.kvtransfer.protocol.transport import Activity
from tandem.wire.handoff import (
    CancelTransfer,
    DestinationRegistered,
    HandoffAccepted,
    HandoffMessage,
    HandoffNotice,
    Hello,
    LeaseRenewed,
    RefusalCode,
    Refused,
    RegisterDestination,
    RenewLease,
    TransferClosed,
    Welcome,
)


class Outcomes(msgspec.Struct, frozen=True):
    """Where the endpoint reports to. Called from its thread."""

    finished_sending: Callable[[str], None]
    finished_recving: Callable[[str, Handoff], None]
    failed_recving: Callable[[str, LoadFailure], None]


class Endpoint:
    """`nobody_listens` says, without blocking, whether an address certainly has no listener
    any more: the process behind it has ended."""

    def __init__(self, side: Side, *, nobody_listens: Callable[[str], bool], outcomes: Outcomes) -> None:
        self._side = side
        self._answers = Answers(side.me, side.send, side.recorder)
        self._nobody_listens = nobody_listens
        self.producer = Producer(side, finished_sending=outcomes.finished_sending)
        self.consumer = Consumer(side, finished=outcomes.finished_recving, failed=outcomes.failed_recving)

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
            case HandoffNotice():
                self.consumer.on_notice(message)
            case TransferClosed():
                self.consumer.on_closed(message)
            case Refused():
                self.producer.on_refused(message)
                self.consumer.on_refused(message)

    def _refuse_epoch(self, message: HandoffMessage) -> None:
        if isinstance(message, Refused):
            # Two nodes must not refuse each other's refusals for ever.
            self._side.recorder.refused(RefusalCode.WRONG_EPOCH.value)
            return
        self._answers.refuse(
            message.envelope, "", RefusalCode.WRONG_EPOCH, "another incarnation of this node was addressed"
        )

    def execute(self, command: commands.Command) -> None:
        match command:
            case commands.PlanSend():
                self.producer.plan(command)
            case commands.ExtendSend():
                self.producer.extend(command)
            case commands.LayersComputed() | commands.Computed():
                self.producer.computed(command)
            case commands.Preempted():
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

    def pump(self) -> Activity:
        """Move blocks. What it returns says how soon it wants to be called again."""
        return max(self.producer.pump(), self.consumer.pump())

    def tick(self) -> None:
        """Look at every deadline. To be called often while not `is_idle`."""
        self.producer.tick()
        self.consumer.tick()
        for side in (self.producer, self.consumer):
            for key, address in side.silent_peers():
                if self._nobody_listens(address):
                    self.producer.peer_gone(key, "nobody listens at its address any more")
                    self.consumer.peer_gone(key, "nobody listens at its address any more")

    @property
    def is_idle(self) -> bool:
        return self.producer.is_idle and self.consumer.is_idle

    def shutdown(self) -> bool:
        """End everything that can end now. False while a handle is in flight or a peer may write."""
        return self.producer.shutdown() & self.consumer.shutdown()
