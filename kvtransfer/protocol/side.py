"""What both sides of one node have in common: who it is, what moves its bytes, what its messages leave by, and what it says
to a message that it cannot act on, or has acted on already."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import msgspec

from tandem.kvtransfer.config import ChecksumPolicy
from tandem.kvtransfer.protocol.cache_map import PoolGeometry
from tandem.kvtransfer.protocol.checksums import Checksums
from tandem.kvtransfer.protocol.identity import Clock, Identity
from tandem.kvtransfer.protocol.settings import ProtocolSettings
from tandem.kvtransfer.protocol.statistics import Recorder
from tandem.kvtransfer.protocol.transport import Direction, Transport
from tandem.wire.handoff import Envelope, ProcessIdentity, Refusal, RefusalCode, TransferClosed

Send = Callable[[str, msgspec.Struct], None]
"""To an endpoint. Never blocks."""

Forget = Callable[[str], None]
"""No process is at this endpoint any more, or none that we still talk to: nothing is kept for it."""


@dataclasses.dataclass(frozen=True, slots=True)
class NodeSide:
    me: Identity
    geometry: PoolGeometry
    direction: Direction
    transport: Transport
    settings: ProtocolSettings
    send: Send
    forget: Forget
    clock: Clock
    recorder: Recorder
    process: ProcessIdentity
    checksums: Checksums
    checksum_policy: ChecksumPolicy


class TransferEnd(msgspec.Struct, frozen=True):
    """How a transfer ended, for those who ask late."""

    reason: str
    handed_over: bool = False


class Answers:
    def __init__(self, me: Identity, send: Callable[[str, msgspec.Struct], None], recorder: Recorder) -> None:
        self._me = me
        self._send = send
        self._recorder = recorder

    def say(self, question: Envelope, answer: msgspec.Struct) -> None:
        self._send(question.reply_to, answer)

    def back_to(self, question: Envelope) -> Envelope:
        return self._me.envelope(question.sender_epoch)

    def closed(self, question: Envelope, transfer_id: str, ending: TransferEnd) -> None:
        self.say(
            question,
            TransferClosed(
                self.back_to(question), transfer_id, ending.reason, handed_over=ending.handed_over
            ),
        )

    def refuse_epoch(self, question: Envelope) -> None:
        """Another incarnation was addressed. Our own epoch is a secret, and the sender has not shown that it knows it."""
        self._recorder.refused(RefusalCode.WRONG_EPOCH.value)
        envelope = msgspec.structs.replace(self.back_to(question), sender_epoch=0)
        reason = "another incarnation of this node was addressed"
        self.say(
            question,
            Refusal(envelope, "", RefusalCode.WRONG_EPOCH, reason, addressed_epoch=question.receiver_epoch),
        )

    def refuse(self, question: Envelope, transfer_id: str, code: RefusalCode, reason: str) -> None:
        self._recorder.refused(code.value)
        self.say(
            question,
            Refusal(
                self.back_to(question), transfer_id, code, reason, addressed_epoch=question.receiver_epoch
            ),
        )
