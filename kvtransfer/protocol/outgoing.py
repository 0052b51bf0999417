"""A producer's transfers, from the moment when both halves of one are there to its end.

Who frees what: a transfer that the engine `kept` is named in `finished_sending` exactly once, when its phase becomes
CLOSED, and it becomes CLOSED only with nothing in flight. An acceptance, the consumer's cancellation, our own request's
end without a first token, the end of the lease, the peer's death, a failed write, and a registration that does not fit
lead there; each is counted under its `Outcome`.

The notice is a message of the side channel. It is sent when every write's handle is done, which with these transports
means that the bytes are at the consumer. It is not a notification of the transport's: a node would have to poll for
those, and one that is attached to a write may overtake another write of the same transfer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tandem.base.errors import TransferError
from tandem.kvtransfer.protocol.links import ConsumerLink, ConsumerLinks
from tandem.kvtransfer.protocol.sending import MissingBlocks, OutgoingTransfer, SendPhase
from tandem.kvtransfer.protocol.settings import ProtocolSettings
from tandem.kvtransfer.protocol.side import (
    Answers,
    BoundedMemory,
    Clock,
    NodeSide,
    Outcome,
    PeerKey,
    Recorder,
    TransferEnd,
)
from tandem.kvtransfer.protocol.transport import Direction
from tandem.wire.handoff import Envelope, HandoffNotice, KVArrived, RefusalCode, TransferClosed
from tandem.wire.tracing import TransferStage


class Ledger:
    def __init__(self, settings: ProtocolSettings, clock: Clock, recorder: Recorder) -> None:
        self._settings = settings
        self._clock = clock
        self._recorder = recorder
        self._by_transfer: dict[str, OutgoingTransfer] = {}
        self._by_request: dict[str, OutgoingTransfer] = {}
        self.in_line: dict[str, str] = {}  # by transfer id: requests that have no blocks yet
        self._endings: BoundedMemory[TransferEnd] = BoundedMemory(settings.max_remembered, settings.remember_s, clock)

    def __iter__(self) -> Iterator[OutgoingTransfer]:
        return iter(list(self._by_transfer.values()))

    @property
    def is_empty(self) -> bool:
        return not self._by_transfer

    def get(self, transfer_id: str) -> OutgoingTransfer | None:
        return self._by_transfer.get(transfer_id)

    def of_request(self, request_id: str) -> OutgoingTransfer | None:
        return self._by_request.get(request_id)

    def to(self, key: PeerKey) -> list[OutgoingTransfer]:
        return [
            sending
            for sending in self._by_transfer.values()
            if sending.destination is not None and sending.destination.consumer == key
        ]

    def through(self, link: ConsumerLink) -> list[OutgoingTransfer]:
        return [
            sending
            for sending in self._by_transfer.values()
            if sending.destination is not None and sending.destination.link is link
        ]

    def open(self, transfer_id: str) -> OutgoingTransfer:
        sending = OutgoingTransfer(transfer_id, self._clock())
        self._by_transfer[transfer_id] = sending
        self._recorder.began()
        return sending

    def bind(self, request_id: str, sending: OutgoingTransfer) -> None:
        sending.request_id = request_id
        self._by_request[request_id] = sending

    def forget(self, sending: OutgoingTransfer) -> None:
        self._by_transfer.pop(sending.transfer_id, None)
        if sending.request_id is not None:
            self._by_request.pop(sending.request_id, None)

    def has_room(self, places: int) -> bool:
        """Whether one more registration, whose table has this many places, may wait here for its request."""
        early = [sending for sending in self._by_transfer.values() if sending.source is None]
        waiting = sum(
            len(ids) for sending in early if sending.destination is not None for ids in sending.destination.block_ids
        )
        settings = self._settings
        return len(early) < settings.max_early_registrations and waiting + places <= settings.max_early_places

    def ended(self, transfer_id: str, ending: TransferEnd) -> None:
        self._endings.add(transfer_id, ending)

    def ending_of(self, transfer_id: str) -> TransferEnd | None:
        return self._endings.get(transfer_id)


class OutgoingTransfers:
    def __init__(
        self,
        side: NodeSide,
        ledger: Ledger,
        links: ConsumerLinks,
        answers: Answers,
        *,
        finished_sending: Callable[[str], None],
        unwanted: Callable[[str], None],
    ) -> None:
        self._side = side
        self._ledger = ledger
        self._links = links
        self._answers = answers
        self._writes = side.direction is Direction.PUSH
        self._finished_sending = finished_sending
        self._unwanted = unwanted
        self._made_room_at = 0.0

    def pair(self, sending: OutgoingTransfer) -> None:
        """If both halves are there, checks that they belong together."""
        source, destination = sending.source, sending.destination
        if source is None or destination is None:
            return
        if not sending.belongs_to(destination.consumer):
            sending.drop_destination()
            envelope = Envelope(*destination.consumer, self._side.me.epoch, destination.endpoint)
            self._answers.refuse(
                envelope, sending.transfer_id, RefusalCode.FOREIGN, "this transfer is for another node"
            )
        elif (source.plan.num_tokens, source.plan.token_hash) != (destination.num_tokens, destination.token_hash):
            self._side.recorder.refused("token_hash")
            self.close(sending, Outcome.MISMATCHED, "the two nodes were given different tokens")
        else:
            sending.paired_at = self._side.clock()
            self.conclude(sending)

    def conclude(self, sending: OutgoingTransfer) -> None:
        """Takes the steps that have become possible: notice, end, `finished_sending`."""
        if (
            sending.phase is SendPhase.OPEN
            and sending.source is not None
            and sending.source.is_complete
            and sending.everything_arrived
        ):
            if not self._writes and sending.destination is not None:
                try:
                    order = sending.destination.order
                    sending.finish_sums(sending.begin_sums(order, self._side.checksums))
                except MissingBlocks as error:
                    self.close(sending, Outcome.MISMATCHED, str(error))
                    return
                except TransferError as error:
                    self.close(sending, Outcome.MOVE_FAILED, str(error))
                    return
            sending.phase = SendPhase.NOTIFYING
            if sending.first_posted_at is not None:
                sending.totals.waits[TransferStage.LAST_BYTE] = self._side.clock() - sending.first_posted_at
            self._notify(sending)
        elif sending.phase is SendPhase.CLOSING and not sending.in_flight:
            destination = sending.destination
            # A failed operation can do nothing more once its link has been disconnected.
            failed = destination is not None and destination.link.has_failed
            if destination is None or not (failed and self._links.is_leaving(destination.link)):
                self._end(sending)
        if sending.phase is SendPhase.CLOSED and (sending.request_ended or sending.source is None):
            self._forget(sending)

    def accepted(self, sending: OutgoingTransfer) -> None:
        self._record_handover(sending)
        self.close(sending, Outcome.SENT, "handed over")

    def close(self, sending: OutgoingTransfer, outcome: Outcome, reason: str) -> None:
        """Ends the transfer as soon as nothing is in flight. The first outcome and reason that are given count."""
        if not sending.is_over:
            sending.phase = SendPhase.CLOSING
            sending.outcome = outcome
            sending.reason = reason
            for write in list(sending.in_flight):
                if self._side.transport.cancel(write.handle):
                    sending.withdraw(write)
            if sending.request_id is not None and not sending.request_ended:
                self._unwanted(sending.request_id)
        self.conclude(sending)

    def close_all_to(self, key: PeerKey, outcome: Outcome, reason: str) -> None:
        for sending in self._ledger.to(key):
            self.close(sending, outcome, reason)

    def close_all_through(self, link: ConsumerLink, outcome: Outcome, reason: str) -> None:
        for sending in self._ledger.through(link):
            self.close(sending, outcome, reason)

    def refuse_all_through(self, link: ConsumerLink, reason: str) -> None:
        """Refuses these transfers, so that their consumers give them up. The consumers keep the blocks until these are
        safe."""
        for sending in self._ledger.through(link):
            if sending.phase is not SendPhase.CLOSED:
                envelope = Envelope(*link.key, self._side.me.epoch, link.endpoint)
                self._answers.refuse(envelope, sending.transfer_id, RefusalCode.MOVE_FAILED, reason)

    def tick(self) -> None:
        now, settings = self._side.clock(), self._side.settings
        for sending in self._ledger:
            destination, since = sending.destination, sending.waiting_since
            if sending.is_over:
                continue
            self.tell_progress(sending)
            if destination is not None and now >= destination.lease_until:
                self.close(sending, Outcome.LEASE_EXPIRED, "the consumer did not renew its lease")
            elif destination is None and since is not None and now >= since + settings.lease_s:
                self.close(sending, Outcome.LEASE_EXPIRED, "no consumer registered")
            elif sending.notice_sent_at is not None and now >= sending.notice_sent_at + settings.retry_s:
                self._notify(sending)
        if now >= self._made_room_at + settings.patience_s:
            self._make_room(now)

    def _make_room(self, now: float) -> None:
        """Two nodes that admit in different orders may wait for each other: a prompt here, for which the consumer keeps blocks, waits for
        the blocks of a computed one, and the computed one waits for blocks of the consumer. The KV that was computed last is given up,
        one transfer at a time, and its consumer computes it."""
        since = now - self._side.settings.patience_s
        starved = {
            sending.destination.consumer
            for sending in self._ledger
            if sending.destination is not None
            and sending.destination.registered_at <= since
            and (sending.lost_its_blocks or sending.transfer_id in self._ledger.in_line)
        }
        held = [
            (sending.waiting_since, sending)
            for sending in self._ledger
            if not sending.is_over
            and sending.destination is None
            and sending.waiting_since is not None
            and sending.waiting_since <= since
            and any(map(sending.belongs_to, starved))
        ]
        if held:
            self._made_room_at = now
            _, last = max(held, key=lambda waiting: waiting[0])
            self.close(last, Outcome.LEASE_EXPIRED, "its blocks were needed for another prompt of the same consumer")

    def _notify(self, sending: OutgoingTransfer) -> None:
        source, destination = sending.source, sending.destination
        if source is None or destination is None or source.first_token is None:
            return
        sending.notice_sent_at = self._side.clock()
        blocks = destination.num_blocks
        self._side.send(
            destination.endpoint,
            HandoffNotice(
                self._side.me.envelope(destination.consumer.epoch),
                sending.transfer_id,
                source.plan.num_tokens,
                source.plan.token_hash,
                source.first_token,
                blocks * destination.mapping.grain_bytes * destination.mapping.their_parts,
                blocks,
                [] if self._writes else source.blocks_for(destination),
                sending.checksums_between(0, len(destination.order)),
            ),
        )

    def tell_progress(self, sending: OutgoingTransfer, *, at_once: bool = False) -> None:
        """Tells the consumer which grains have arrived for good, if there are new ones and the last message is not too
        recent. A transfer that is soon over sends no such message."""
        destination, first = sending.destination, sending.first_posted_at
        if destination is None or first is None or not self._writes or sending.is_void:
            return
        now = self._side.clock()
        if not at_once and now < max(first, sending.told_at) + self._side.settings.progress_s:
            return
        start, count = sending.told, sending.num_final
        if count > start:
            sending.told, sending.told_at = count, now
            self._side.send(
                destination.endpoint,
                KVArrived(
                    self._side.me.envelope(destination.consumer.epoch),
                    sending.transfer_id,
                    start,
                    count,
                    sending.checksums_between(start, count),
                ),
            )

    def _record_handover(self, sending: OutgoingTransfer) -> None:
        source, destination = sending.source, sending.destination
        if source is not None and source.fully_computed_at is not None:
            sending.totals.waits[TransferStage.HANDOVER] = self._side.clock() - source.fully_computed_at
        if destination is not None and not self._writes:
            positions = destination.positions()
            num_bytes = len(positions) * destination.mapping.grain_bytes
            sending.totals.num_bytes, sending.totals.blocks = num_bytes, destination.num_blocks
            self._side.recorder.sent(destination.num_blocks, num_bytes)

    def _end(self, sending: OutgoingTransfer) -> None:
        sending.phase = SendPhase.CLOSED
        self._side.recorder.ended(sending.trace(self._side.clock()))
        self.tell_end(sending)

    def tell_end(self, sending: OutgoingTransfer) -> None:
        handed_over = sending.outcome is Outcome.SENT
        self._ledger.ended(sending.transfer_id, TransferEnd(sending.reason, handed_over, sending.is_void))
        destination = sending.destination
        if destination is None or self._links.has_ended(destination.consumer):
            return
        if not handed_over:
            self.tell_progress(sending, at_once=True)
            self._side.send(
                destination.endpoint,
                TransferClosed(
                    self._side.me.envelope(destination.consumer.epoch),
                    sending.transfer_id,
                    sending.reason,
                    is_void=sending.is_void,
                ),
            )

    def _forget(self, sending: OutgoingTransfer) -> None:
        """The transfer is CLOSED, and no command will name its request any more."""
        self._ledger.forget(sending)
        if sending.kept and sending.request_id is not None:
            sending.kept = False
            self._side.recorder.freed(sending.num_kept, sending.outcome)
            self._finished_sending(sending.request_id)
