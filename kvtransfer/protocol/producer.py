"""The producer's transfers: registrations are paired with requests, computed blocks are written, notices sent.

Who frees what: a transfer that the engine `kept` is named in `finished_sending` exactly once, when its phase
becomes CLOSED, and it becomes CLOSED only with nothing in flight. The ways there are an acceptance, the
consumer's cancellation, our own request's end without a first token, the end of the lease, the peer's death, a
failed write, and a registration that does not fit; each is counted under its `Outcome`.

The notice is a message of the side channel, sent when every write's handle is done, which with these transports
means that the bytes are at the consumer. It is not a notification of the transport's: those arrive by being
polled for, and one that is attached to a write may overtake another write of the same transfer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvtransfer.base import NULL_BLOCK_ID, TransferRecord
from kvtransfer.protocol import commands
from kvtransfer.protocol.answers import Answers, Ending
from kvtransfer.protocol.handshakes import ConsumerLink, Handshakes
from kvtransfer.protocol.identity import PeerKey, key_of
from kvtransfer.protocol.ledger import Ledger
from kvtransfer.protocol.registrations import Registrations
from kvtransfer.protocol.sending import Destination, Phase, Sending
from kvtransfer.protocol.side import Side
from kvtransfer.protocol.statistics import Outcome
from kvtransfer.protocol.transport import Activity, Direction
from kvtransfer.protocol.writing import MissingBlocks, Writer
from wire.errors import TransferError
from wire.handoff import (
    CancelTransfer,
    Envelope,
    HandoffAccepted,
    HandoffNotice,
    RefusalCode,
    Refused,
    TransferClosed,
)

logger = logging.getLogger(__name__)


class Producer:
    def __init__(self, side: Side, *, finished_sending: Callable[[str], None]) -> None:
        geometry, settings, clock, recorder = side.geometry, side.settings, side.clock, side.recorder
        self._side = side
        self._answers = Answers(side.me, side.send, recorder)
        self._writes = side.direction is Direction.PUSH
        self._writer = Writer(side.transport, settings, geometry.fingerprint.num_slots, clock, recorder)
        self._finished_sending = finished_sending
        self._handshakes = Handshakes(
            geometry, side.transport if self._writes else None, settings, clock, lost=self._on_link_replaced
        )
        self._ledger = Ledger(settings, clock, recorder)
        self.registrations = Registrations(
            geometry,
            self._ledger,
            self._handshakes,
            settings,
            self._answers,
            clock,
            to_write=self._writes,
            registered=self._pair,
        )
        # Those that may have something to post, or have something in flight: most transfers only wait.
        self._moving: dict[str, Sending] = {}
        self._unfenced: list[commands.Computed | commands.LayersComputed] = []

    @property
    def is_idle(self) -> bool:
        """Nothing has a deadline."""
        return not self._handshakes.has_leaving and all(
            sending.phase is Phase.CLOSED for sending in self._ledger
        )

    # ── commands of our own engine ──

    def plan(self, command: commands.PlanSend) -> None:
        known = self._ledger.of_request(command.request_id)
        if known is not None:
            known.set_source(command)
            return
        over = self._ledger.ending_of(command.transfer_id)
        sending = self._ledger.get(command.transfer_id) or self._ledger.open(command.transfer_id)
        if sending.source is not None:
            logger.error("requests %s and %s share a transfer id", sending.request_id, command.request_id)
            return
        sending.set_source(command)
        self._ledger.bind(command.request_id, sending)
        if over is not None:
            self._begin_closing(sending, Outcome.CANCELLED, over.reason)
        else:
            self._pair(sending)

    def extend(self, command: commands.ExtendSend) -> None:
        sending = self._ledger.of_request(command.request_id)
        if sending is not None:
            sending.extend_source(command.block_ids)

    def computed(self, command: commands.Computed) -> None:
        if command.fence is not None and not command.fence():
            self._unfenced.append(command)
            return
        for request_id, num_tokens in command.num_tokens.items():
            sending = self._ledger.of_request(request_id)
            if sending is not None and sending.source is not None:
                source = sending.source
                source.computed = max(source.computed, num_tokens)
                self._writer.computed(sending)
                self._moving[sending.transfer_id] = sending
                if source.computed >= source.plan.num_tokens and source.fully_computed_at is None:
                    source.fully_computed_at = command.at

    def computing(self, command: commands.LayersComputed) -> None:
        if command.fence is not None and not command.fence():
            self._unfenced.append(command)
            return
        for request_id, num_tokens in command.num_tokens.items():
            sending = self._ledger.of_request(request_id)
            if sending is not None and sending.phase is Phase.OPEN and self._writes:
                self._writer.computing(sending, num_tokens, command.slots)
                self._moving[sending.transfer_id] = sending

    def preempted(self, command: commands.Preempted) -> None:
        for unfenced in self._unfenced:
            for request_id in command.request_ids:
                unfenced.num_tokens.pop(request_id, None)
        for request_id in command.request_ids:
            sending = self._ledger.of_request(request_id)
            if sending is not None:
                sending.taint(command.at)

    def finish(self, command: commands.FinishSend) -> None:
        sending = self._ledger.of_request(command.request_id)
        if sending is None or sending.source is None:
            self._finished_sending(command.request_id)
            return
        sending.request_ended = True
        sending.kept = True
        sending.num_kept = sum(block != NULL_BLOCK_ID for ids in command.block_ids for block in ids)
        sending.waiting_since = self._side.clock()
        if sending.phase is Phase.OPEN:
            if sending.blocks_changed(command.block_ids):
                self._begin_closing(
                    sending, Outcome.MISMATCHED, "blocks were given up before the prompt's end"
                )
            else:
                sending.source.block_ids = [list(ids) for ids in command.block_ids]
                sending.source.first_token = command.first_token
        self._conclude(sending)

    def abandon(self, command: commands.AbandonSend) -> None:
        reason = "the request ended before its prompt was computed"
        sending = self._ledger.of_request(command.request_id)
        if sending is None:
            early = self._ledger.get(command.transfer_id)
            sending = early if early is not None and early.source is None else None
        if sending is None:
            self._ledger.ended(command.transfer_id, Ending(reason))
            if command.kept:
                self._finished_sending(command.request_id)
            return
        sending.request_id = command.request_id
        sending.request_ended = True
        sending.kept = command.kept
        if command.kept and sending.source is not None:
            sending.num_kept = sum(
                block != NULL_BLOCK_ID for ids in sending.source.block_ids for block in ids
            )
        self._begin_closing(sending, Outcome.ABORTED, reason)

    # ── messages of consumers ──

    def on_accepted(self, message: HandoffAccepted) -> None:
        key = key_of(message.envelope)
        self._handshakes.hear(key)
        sending = self._ledger.get(message.transfer_id)
        if sending is not None and not sending.belongs_to(key):
            self._side.recorder.refused("foreign_acceptance")
            return
        if sending is not None and sending.phase is Phase.NOTIFYING:
            self._record_handover(sending)
            self._begin_closing(sending, Outcome.SENT, "handed over")
        else:
            self._side.recorder.refused("late_acceptance")
        if not self._writes:
            over = self._ledger.ending_of(message.transfer_id) or Ending("this transfer is not known here")
            self._answers.closed(message.envelope, message.transfer_id, over)

    def on_cancel(self, message: CancelTransfer) -> None:
        key = key_of(message.envelope)
        self._handshakes.hear(key)
        over = Ending("cancelled by the consumer")
        sending = self._ledger.get(message.transfer_id)
        if sending is not None and not sending.belongs_to(key):
            self._answers.refuse(
                message.envelope, message.transfer_id, RefusalCode.FOREIGN, "somebody else's transfer"
            )
            return
        if sending is not None and sending.phase is not Phase.CLOSED:
            answered_by_close = sending.destination is not None
            self._begin_closing(sending, Outcome.CANCELLED, over.reason)
            if answered_by_close:
                return
        else:
            self._ledger.ended(message.transfer_id, over)
        self._answers.closed(message.envelope, message.transfer_id, over)

    def on_refused(self, message: Refused) -> None:
        """A message of ours reached somebody else than it was for."""
        if message.code is RefusalCode.WRONG_EPOCH:
            for link in self._handshakes:
                key = link.key
                if key.epoch == message.addressed_epoch and key.is_earlier_than(key_of(message.envelope)):
                    self.peer_gone(key, "the consumer was started anew")

    # ── peers ──

    def silent_peers(self) -> list[tuple[PeerKey, str]]:
        """Consumers with open transfers that should have renewed by now: (who, endpoint)."""
        limit = self._side.clock() - self._side.settings.silent_s
        waiting = {
            sending.destination.consumer
            for sending in self._ledger
            if sending.destination is not None and not sending.is_over
        }
        return [
            (link.key, link.endpoint)
            for link in self._handshakes
            if link.key in waiting and link.last_heard < limit
        ]

    def peer_gone(self, key: PeerKey, reason: str) -> None:
        """It is certain that this incarnation does not run any more."""
        self._handshakes.mark_dead(key)
        self._close_all_of(key, Outcome.PEER_LOST, reason)

    def _on_link_replaced(self, key: PeerKey, reason: str) -> None:
        self._close_all_of(key, Outcome.PEER_LOST, reason)

    def _close_all_of(self, key: PeerKey, outcome: Outcome, reason: str) -> None:
        for sending in self._ledger.to(key):
            self._begin_closing(sending, outcome, reason)

    # ── moving blocks ──

    def pump(self) -> Activity:
        """Post what is due, one operation per transfer, and look after what is in flight."""
        if self._unfenced:
            unfenced, self._unfenced = self._unfenced, []
            for command in unfenced:
                if isinstance(command, commands.Computed):
                    self.computed(command)
                else:
                    self.computing(command)
        activity = Activity.IN_FLIGHT if self._unfenced else Activity.NONE
        for sending in list(self._moving.values()):
            self._poll(sending)
            if sending.phase is Phase.OPEN and sending.has_due:
                self._post(sending)
            self._conclude(sending)
            if sending.phase is Phase.OPEN and self._writer.can_post(sending):
                activity = Activity.DUE
            elif sending.in_flight:
                activity = max(activity, Activity.IN_FLIGHT)
            else:
                del self._moving[sending.transfer_id]
        if self._handshakes.has_leaving:
            self._handshakes.close_idle(self._in_use)
            for sending in self._ledger:
                self._conclude(sending)
        return activity

    def _in_use(self, key: PeerKey) -> bool:
        return any(sending.in_flight for sending in self._ledger.to(key))

    def _post(self, sending: Sending) -> None:
        destination = sending.destination
        if destination is None:
            return
        if self._side.clock() >= destination.lease_until:
            self._begin_closing(sending, Outcome.LEASE_EXPIRED, "the consumer did not renew its lease")
            return
        link = self._handshakes.get(destination.consumer)
        if link is None or link.remote is None:
            self._begin_closing(sending, Outcome.PEER_LOST, "the consumer is gone")
            return
        try:
            self._writer.post(sending, link.remote)
        except MissingBlocks as error:
            self._begin_closing(sending, Outcome.MISMATCHED, str(error))
        except TransferError as error:
            self._on_move_failed(link, error)

    def _poll(self, sending: Sending) -> None:
        try:
            self._writer.poll(sending)
        except TransferError as error:
            link = self._handshakes.get(sending.destination.consumer) if sending.destination else None
            if link is not None:
                self._on_move_failed(link, error)
            else:
                self._begin_closing(sending, Outcome.MOVE_FAILED, str(error))

    def _on_move_failed(self, link: ConsumerLink, error: TransferError) -> None:
        """A connection with an error is not trusted again: everything through it ends, and it is closed before
        anybody is told that nothing is in flight."""
        logger.warning("writing KV to %s failed: %s", link.key.node_id, error)
        self._handshakes.leave(link.key)
        self._close_all_of(link.key, Outcome.MOVE_FAILED, str(error))

    # ── the life of a transfer ──

    def _pair(self, sending: Sending) -> None:
        """Both halves may be there now: do they belong together?"""
        source, destination = sending.source, sending.destination
        if source is None or destination is None:
            return
        if not sending.belongs_to(destination.consumer):
            sending.drop_destination()
            envelope = Envelope(*destination.consumer, self._side.me.epoch, destination.endpoint)
            self._answers.refuse(
                envelope, sending.transfer_id, RefusalCode.FOREIGN, "this transfer is for another node"
            )
        elif (source.plan.num_tokens, source.plan.token_hash) != (
            destination.num_tokens,
            destination.token_hash,
        ):
            self._side.recorder.refused("token_hash")
            self._begin_closing(sending, Outcome.MISMATCHED, "the two nodes were given different tokens")
        else:
            sending.paired_at = self._side.clock()
            self._moving[sending.transfer_id] = sending
            self._conclude(sending)

    def _conclude(self, sending: Sending) -> None:
        """Take the steps that have become possible."""
        if (
            sending.phase is Phase.OPEN
            and sending.source is not None
            and sending.source.is_complete
            and sending.everything_arrived
        ):
            sending.phase = Phase.NOTIFYING
            if sending.first_posted_at is not None:
                sending.tally.last_byte_s = self._side.clock() - sending.first_posted_at
                self._side.recorder.took("last_byte", sending.tally.last_byte_s)
            self._notify(sending)
        elif sending.phase is Phase.CLOSING and not sending.in_flight:
            destination = sending.destination
            if destination is None or not self._handshakes.is_leaving(destination.consumer):
                self._close(sending)
        if sending.phase is Phase.CLOSED and (sending.request_ended or sending.source is None):
            self._forget(sending)

    def _notify(self, sending: Sending) -> None:
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
                blocks * self._block_bytes_of(destination),
                blocks,
                [] if self._writes else source.blocks_for(destination),
            ),
        )

    def _record_handover(self, sending: Sending) -> None:
        source, destination = sending.source, sending.destination
        if source is not None and source.fully_computed_at is not None:
            sending.tally.handover_s = self._side.clock() - source.fully_computed_at
            self._side.recorder.took("handover", sending.tally.handover_s)
        if destination is not None and not self._writes:
            positions = destination.positions()
            num_bytes = len(positions) * destination.mapping.grain_bytes
            sending.tally.num_bytes, sending.tally.blocks = num_bytes, destination.num_blocks
            self._side.recorder.sent(destination.num_blocks, num_bytes)

    def _block_bytes_of(self, destination: Destination) -> int:
        return destination.mapping.grain_bytes * destination.mapping.their_parts

    def _begin_closing(self, sending: Sending, outcome: Outcome, reason: str) -> None:
        if not sending.is_over:
            sending.phase = Phase.CLOSING
            sending.outcome = outcome
            sending.reason = reason
        self._conclude(sending)

    def _close(self, sending: Sending) -> None:
        sending.phase = Phase.CLOSED
        self._side.recorder.ended(sending.outcome)
        if sending.request_id is not None:
            spans = sending.spans(self._side.clock())
            self._side.recorder.keep_spans(sending.request_id, spans)
        tally = sending.tally
        self._side.recorder.record(
            TransferRecord(
                request_id=sending.request_id or "",
                outcome=sending.outcome.value,
                num_bytes=tally.num_bytes,
                blocks=tally.blocks,
                descriptors=tally.descriptors,
                bytes_overlapped=tally.bytes_overlapped,
                first_byte_s=tally.first_byte_s,
                last_byte_s=tally.last_byte_s,
                handover_s=tally.handover_s,
            )
        )
        if sending.outcome is Outcome.LEASE_EXPIRED:
            self._side.recorder.lease_expired()
        handed_over = sending.outcome is Outcome.SENT
        self._ledger.ended(sending.transfer_id, Ending(sending.reason, handed_over))
        destination = sending.destination
        if destination is not None and not handed_over:
            self._side.send(
                destination.endpoint,
                TransferClosed(
                    self._side.me.envelope(destination.consumer.epoch), sending.transfer_id, sending.reason
                ),
            )

    def _forget(self, sending: Sending) -> None:
        """CLOSED, and no command will name the request any more."""
        self._ledger.forget(sending)
        if sending.kept and sending.request_id is not None:
            sending.kept = False
            self._side.recorder.freed(sending.num_kept, sending.outcome)
            self._finished_sending(sending.request_id)

    def tick(self) -> None:
        now = self._side.clock()
        for sending in self._ledger:
            destination, since = sending.destination, sending.waiting_since
            if sending.is_over:
                continue
            if destination is not None and now >= destination.lease_until:
                self._begin_closing(sending, Outcome.LEASE_EXPIRED, "the consumer did not renew its lease")
            elif destination is None and since is not None and now >= since + self._side.settings.lease_s:
                self._begin_closing(sending, Outcome.LEASE_EXPIRED, "no consumer registered")
            elif (
                sending.notice_sent_at is not None
                and now >= sending.notice_sent_at + self._side.settings.retry_s
            ):
                self._notify(sending)

    def shutdown(self) -> bool:
        """End everything that can end. False while something is in flight."""
        for sending in self._ledger:
            sending.request_ended = True
            self._poll(sending)
            self._begin_closing(sending, Outcome.SHUTDOWN, "the node shuts down")
        for link in self._handshakes:
            self._handshakes.leave(link.key)
        self._handshakes.close_idle(self._in_use)
        for sending in self._ledger:
            self._conclude(sending)
        return self._ledger.is_empty and not self._handshakes.has_leaving
