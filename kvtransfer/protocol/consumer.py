"""The consumer's transfers: destinations are registered, notices verified, and failures made safe before they count.

Each BeginReceive is answered exactly once, with `finished` or with `failed`. A failure is reported only when
nobody can write to the blocks any more. With push: the producer said that it closed the transfer, or it is
certainly dead, or the last lease that it can hold by our word has ended by our clock. With pull: our own reads
are over.

What remains with push, and cannot be excluded from here: a producer that is frozen in the middle of one posted
write for longer than its lease, and then goes on. A post is bounded (`Settings.max_post_bytes`) and preceded by a
look at the lease, so that this is a matter of milliseconds inside the transport.

A pull is right only if the producer held the blocks until the last byte was read. Only it knows, so the
acceptance is a question, and TransferClosed with `handed_over` the answer that ends the transfer well.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvtransfer.base import Handoff, LoadFailure
from kvtransfer.protocol import commands
from kvtransfer.protocol.answers import Answers
from kvtransfer.protocol.declined import Declined
from kvtransfer.protocol.identity import PeerKey, Remembered, key_of
from kvtransfer.protocol.links import ProducerLink, ProducerLinks
from kvtransfer.protocol.mapping import Mapping
from kvtransfer.protocol.reading import Reader
from kvtransfer.protocol.receiving import Receiving, Stage
from kvtransfer.protocol.registering import Registrar
from kvtransfer.protocol.settings import MAX_LEASE_S
from kvtransfer.protocol.side import Side
from kvtransfer.protocol.statistics import Outcome
from kvtransfer.protocol.transport import Activity, Direction
from wire.errors import TransferError
from wire.handoff import (
    CancelTransfer,
    DestinationRegistered,
    HandoffAccepted,
    HandoffNotice,
    LeaseRenewed,
    RefusalCode,
    Refused,
    TransferClosed,
    Welcome,
)

logger = logging.getLogger(__name__)


class Consumer:
    def __init__(
        self,
        side: Side,
        *,
        finished: Callable[[str, Handoff], None],
        failed: Callable[[str, LoadFailure], None],
    ) -> None:
        me, settings, send, clock = side.me, side.settings, side.send, side.clock
        self._side = side
        self._answers = Answers(me, send, side.recorder)
        self._reads = side.direction is Direction.PULL
        self._reader = Reader(side.transport, settings)
        self._finished = finished
        self._failed = failed
        self._links = ProducerLinks(me, side.geometry, settings, send, clock)
        self._registrar = Registrar(
            me,
            self._links,
            settings,
            send=send,
            clock=clock,
            receivings=self._with,
            unreachable=self._on_unreachable,
        )
        self._receivings: dict[str, Receiving] = {}  # by transfer id
        self._by_request: dict[str, Receiving] = {}
        # True: accepted, so that a notice that comes again is answered again.
        self._over: Remembered[bool] = Remembered(settings.max_remembered, settings.remember_s, clock)
        self._declined = Declined(me, settings, send, clock)

    @property
    def is_idle(self) -> bool:
        """Nothing has a deadline."""
        return not self._receivings and self._declined.is_empty and not self._reader.has_leaving

    # ── commands of our own engine ──

    def begin(self, command: commands.BeginReceive) -> None:
        if command.transfer_id in self._receivings:
            self._failed(
                command.request_id, LoadFailure("another request uses its transfer id", command.local_tokens)
            )
            return
        now = self._side.clock()
        receiving = Receiving(command, began_at=now, deadline=now + self._side.settings.timeout_s)
        self._receivings[command.transfer_id] = receiving
        self._by_request[command.request_id] = receiving
        self._side.recorder.began()
        if not self._reads:
            self._side.transport.expect(
                command.transfer_id, [block for ids in command.block_ids for block in ids if block]
            )
        death = self._links.death_of(receiving.peer)
        if death is not None:
            self._end(receiving, Outcome.PEER_LOST, death)
        elif self._links.get(receiving.peer) is not None:
            self._registrar.advance(receiving)
        else:
            for link in self._links:
                if link.key.node_id == receiving.peer.node_id:
                    self.peer_gone(link.key, "the router names a later incarnation of this node")
            self._links.open(command.peer)

    def cancel(self, command: commands.CancelReceive) -> None:
        receiving = self._by_request.get(command.request_id)
        if receiving is not None:
            self._give_up(receiving, Outcome.ABORTED, "the request was aborted")

    def decline(self, command: commands.DeclineTransfer) -> None:
        self._declined.add(command.transfer_id, command.peer)

    # ── messages of producers ──

    def on_welcome(self, message: Welcome) -> None:
        link = self._hear(message)
        if link is None:
            return
        now = self._side.clock()
        mapping = self._side.geometry.mapping_to(message.fingerprint, message.memory)
        difference = None if isinstance(mapping, Mapping) else mapping
        if difference is None and not 0 < message.lease_s <= MAX_LEASE_S:
            difference = f"the producer's lease is {message.lease_s} s"
        if difference is not None:
            logger.error("%s cannot send KV here: %s", link.key.node_id, difference)
            self._leave(link, Outcome.INCOMPATIBLE, difference)
            return
        if self._reads:
            try:
                self._reader.connect(link.key, message.memory)
            except TransferError as error:
                logger.error("cannot reach the KV memory of %s: %s", link.key.node_id, error)
                self._leave(link, Outcome.MOVE_FAILED, str(error))
                return
        link.take_stamp(message.stamp, now)
        if link.greeting_since is not None:
            self._side.recorder.took("handshake", now - link.greeting_since)
            link.greeting_since = None
        link.memory = message.memory
        link.block_size = message.fingerprint.block_size
        link.mapping = mapping if isinstance(mapping, Mapping) else None
        link.lease_s = message.lease_s
        self._registrar.advance_all(link)

    def on_registered(self, message: DestinationRegistered) -> None:
        link = self._hear(message)
        if link is None:
            return
        link.take_stamp(message.stamp, self._side.clock())
        receiving = self._mine(message.transfer_id, link.key)
        if receiving is not None and receiving.stage is Stage.REGISTERING:
            receiving.stage = Stage.WAITING
            receiving.confirmed_at = self._side.clock()
            self._side.recorder.took("register", self._side.clock() - receiving.began_at)

    def on_renewed(self, message: LeaseRenewed) -> None:
        link = self._hear(message)
        if link is None:
            return
        link.take_stamp(message.stamp, self._side.clock())
        for transfer_id in message.unknown:
            receiving = self._mine(transfer_id, link.key)
            # While confirming, the answer to our acceptance is on its way and knows better.
            if receiving is not None and receiving.stage in (Stage.WAITING, Stage.READING):
                self._give_up(receiving, Outcome.LEASE_EXPIRED, "the producer no longer holds the transfer")
        self._registrar.advance_all(link)

    def on_notice(self, message: HandoffNotice) -> None:
        key = key_of(message.envelope)
        self._links.hear(key)
        receiving = self._receivings.get(message.transfer_id)
        if receiving is None:
            self._answer_late_notice(message)
        elif receiving.peer != key:
            self._answers.refuse(
                message.envelope,
                message.transfer_id,
                RefusalCode.FOREIGN,
                "this transfer is with another node",
            )
        elif not receiving.is_registered:
            self._side.recorder.refused("unasked_notice")
        elif receiving.stage is Stage.CLOSING:
            self._side.recorder.refused("late_notice")  # it is being cancelled, and will be answered
        elif receiving.notice is not None:
            self._side.recorder.refused("repeated_notice")
        elif (difference := receiving.mismatch(message, self._side.geometry.memory.block_bytes)) is not None:
            self._refuse_mismatch(receiving, difference)
        elif self._reads:
            self._begin_reading(receiving, message)
        else:
            self._send_acceptance(receiving)
            self._finish(receiving, message)

    def _answer_late_notice(self, message: HandoffNotice) -> None:
        sender = message.envelope
        mine = self._side.me.envelope(sender.sender_epoch)
        accepted = self._over.get(message.transfer_id)
        if accepted:
            self._side.recorder.refused("repeated_notice")
            self._side.send(sender.reply_to, HandoffAccepted(mine, message.transfer_id))
        else:
            self._side.recorder.refused("unknown_notice" if accepted is None else "late_notice")
            self._side.send(sender.reply_to, CancelTransfer(mine, message.transfer_id))

    def _refuse_mismatch(self, receiving: Receiving, difference: str) -> None:
        self._side.recorder.refused("notice_mismatch")
        logger.error(
            "refused the KV of %s from %s: %s",
            receiving.command.request_id,
            receiving.peer.node_id,
            difference,
        )
        self._give_up(receiving, Outcome.MISMATCHED, f"the handoff does not verify: {difference}")

    def on_closed(self, message: TransferClosed) -> None:
        key = key_of(message.envelope)
        self._links.hear(key)
        self._declined.closed(message.transfer_id)
        receiving = self._mine(message.transfer_id, key)
        if receiving is None:
            return
        if message.handed_over and receiving.stage is Stage.CONFIRMING and receiving.notice is not None:
            self._finish(receiving, receiving.notice)
        else:
            self._end(receiving, Outcome.CLOSED_BY_PEER, f"closed by the producer: {message.reason}")

    def on_refused(self, message: Refused) -> None:
        key = key_of(message.envelope)
        if message.code is RefusalCode.WRONG_EPOCH:
            known = {link.key for link in self._links} | {other.peer for other in self._receivings.values()}
            for peer in known:
                if peer.epoch == message.addressed_epoch and peer.is_earlier_than(key):
                    self.peer_gone(peer, "the producer was started anew")
            return
        link = self._links.hear(key)
        if link is None:
            return
        if message.code in (RefusalCode.INCOMPATIBLE, RefusalCode.HANDSHAKE_FAILED):
            if not link.is_ready:
                logger.error("%s refused the handshake: %s", key.node_id, message.reason)
                incompatible = message.code is RefusalCode.INCOMPATIBLE
                self._leave(
                    link, Outcome.INCOMPATIBLE if incompatible else Outcome.MOVE_FAILED, message.reason
                )
        elif message.code is RefusalCode.HANDSHAKE_REQUIRED:
            if link.is_ready:
                link.greeting_since = self._side.clock()
                self._links.greet(link)
        else:
            receiving = self._mine(message.transfer_id, key)
            if receiving is not None:
                self._give_up(receiving, Outcome.REFUSED, f"refused by the producer: {message.reason}")

    # ── peers ──

    def silent_peers(self) -> list[tuple[PeerKey, str]]:
        """Producers that owe an answer for long: (who, endpoint)."""
        return self._links.silent()

    def peer_gone(self, key: PeerKey, reason: str) -> None:
        """It is certain that this incarnation does not run any more, so it cannot write."""
        self._links.mark_dead(key, reason)
        self._reader.leave(key)
        for receiving in self._with(key):
            self._end(receiving, Outcome.PEER_LOST, reason)

    def _on_unreachable(self, link: ProducerLink, reason: str) -> None:
        self._leave(link, Outcome.TIMED_OUT, reason)

    def _leave(self, link: ProducerLink, outcome: Outcome, reason: str) -> None:
        """There is no working with this producer, alive as it is."""
        self._links.drop(link.key)
        self._reader.leave(link.key)
        for receiving in self._with(link.key):
            self._give_up(receiving, outcome, reason)

    def _with(self, key: PeerKey) -> list[Receiving]:
        return [receiving for receiving in self._receivings.values() if receiving.peer == key]

    def _mine(self, transfer_id: str, key: PeerKey) -> Receiving | None:
        receiving = self._receivings.get(transfer_id)
        return receiving if receiving is not None and receiving.peer == key else None

    def _hear(self, message: Welcome | DestinationRegistered | LeaseRenewed) -> ProducerLink | None:
        link = self._links.hear(key_of(message.envelope))
        if link is None:
            self._side.recorder.refused("unknown_peer")
        return link

    # ── pull ──

    def _begin_reading(self, receiving: Receiving, notice: HandoffNotice) -> None:
        link = self._links.get(receiving.peer)
        if link is None or link.memory is None or link.mapping is None:
            return  # it is being given up
        mapping, source = link.mapping, notice.source_block_ids
        problem = self._side.geometry.check_table(
            receiving.command.num_tokens,
            receiving.first_blocks(mapping),
            source,
            link.block_size,
            link.memory,
        )
        places = receiving.places_in(source, mapping) if problem is None else None
        if places is None:
            self._refuse_mismatch(receiving, problem or "blocks are missing")
            return
        receiving.stage = Stage.READING
        receiving.notice = notice
        receiving.mapping = mapping
        receiving.unread = places[::-1]

    def pump(self) -> Activity:
        """Look after our own reads."""
        activity = Activity.NONE
        if not self._reads:
            return activity
        for receiving in list(self._receivings.values()):
            if receiving.stage is Stage.READING or receiving.in_flight:
                self._read_on(receiving)
            if receiving.stage is Stage.READING and receiving.unread:
                activity = Activity.DUE
            elif receiving.in_flight:
                activity = max(activity, Activity.IN_FLIGHT)
        if self._reader.has_leaving:
            self._reader.close_idle({other.peer for other in self._receivings.values() if other.in_flight})
        return activity

    def _read_on(self, receiving: Receiving) -> None:
        try:
            self._reader.advance(receiving)
        except TransferError as error:
            logger.warning("reading KV from %s failed: %s", receiving.peer.node_id, error)
            link = self._links.get(receiving.peer)
            if link is not None:
                self._leave(link, Outcome.MOVE_FAILED, str(error))
            self._give_up(receiving, Outcome.MOVE_FAILED, str(error))
        if receiving.in_flight or receiving.unread:
            return
        if receiving.stage is Stage.READING:
            receiving.stage = Stage.CONFIRMING
            receiving.asked_at = self._side.clock()
            self._send_acceptance(receiving)
        elif receiving.is_safe and receiving.transfer_id in self._receivings:
            self._end(receiving, receiving.outcome, receiving.reason)

    # ── the end of a transfer ──

    def _send_acceptance(self, receiving: Receiving) -> None:
        peer = receiving.command.peer
        self._side.send(
            peer.endpoint, HandoffAccepted(self._side.me.envelope(peer.epoch), receiving.transfer_id)
        )

    def _finish(self, receiving: Receiving, notice: HandoffNotice) -> None:
        self._forget(receiving, accepted=True)
        self._side.recorder.ended(Outcome.RECEIVED)
        self._side.recorder.received(notice.num_blocks, notice.num_bytes)
        self._side.recorder.took("receive", self._side.clock() - receiving.began_at)
        self._finished(receiving.command.request_id, Handoff(notice.first_token, notice.num_tokens))

    def _give_up(self, receiving: Receiving, outcome: Outcome, reason: str) -> None:
        """This transfer shall fail, as soon as its blocks are safe."""
        if receiving.stage is Stage.CLOSING:
            return
        if self._reads or not receiving.is_registered:
            # Nobody writes to our blocks but ourselves: the producer only has to hear of it.
            self._declined.add(receiving.transfer_id, receiving.command.peer)
            self._end(receiving, outcome, reason)
            return
        receiving.stage = Stage.CLOSING
        receiving.outcome, receiving.reason = outcome, reason
        self._ask_to_close(receiving)

    def _ask_to_close(self, receiving: Receiving) -> None:
        receiving.asked_at = self._side.clock()
        peer = receiving.command.peer
        link = self._links.get(receiving.peer)
        if link is not None:
            link.owes(receiving.asked_at)
        self._side.send(
            peer.endpoint, CancelTransfer(self._side.me.envelope(peer.epoch), receiving.transfer_id)
        )

    def _end(self, receiving: Receiving, outcome: Outcome, reason: str) -> None:
        """Nobody else writes to the blocks: report the failure, once our own reads are over as well. What made us
        give up counts, not what confirmed it."""
        if receiving.stage is not Stage.CLOSING:
            receiving.stage = Stage.CLOSING
            receiving.outcome, receiving.reason = outcome, reason
        receiving.is_safe = True
        receiving.unread = []
        if receiving.in_flight:
            return
        self._forget(receiving, accepted=False)
        self._side.recorder.ended(receiving.outcome)
        if receiving.outcome is Outcome.LEASE_EXPIRED:
            self._side.recorder.lease_expired()
        self._failed(
            receiving.command.request_id, LoadFailure(receiving.reason, receiving.command.local_tokens)
        )

    def _forget(self, receiving: Receiving, *, accepted: bool) -> None:
        del self._receivings[receiving.transfer_id]
        del self._by_request[receiving.command.request_id]
        self._side.recorder.keep_spans(receiving.command.request_id, receiving.spans(self._side.clock()))
        self._over.add(receiving.transfer_id, accepted)
        if not self._reads:
            self._side.transport.expect_no_more(receiving.transfer_id)

    def tick(self) -> None:
        now = self._side.clock()
        self._declined.tick()
        for link in self._links:
            self._registrar.tick(link)
        for receiving in list(self._receivings.values()):
            self._tick_receiving(receiving, now)

    def _tick_receiving(self, receiving: Receiving, now: float) -> None:
        if receiving.is_safe:
            return  # only our own reads are waited for
        ask_again = now >= receiving.asked_at + self._side.settings.retry_s
        if (
            receiving.leased_until is not None
            and now >= receiving.leased_until + self._side.settings.margin_s
        ):
            self._declined.add(receiving.transfer_id, receiving.command.peer)
            self._end(receiving, Outcome.PEER_LOST, "the producer fell silent, and its lease has ended")
        elif receiving.stage is Stage.CLOSING:
            if ask_again:
                self._ask_to_close(receiving)
        elif now >= receiving.deadline:
            self._give_up(receiving, Outcome.TIMED_OUT, f"no KV within {self._side.settings.timeout_s:g} s")
        elif receiving.stage is Stage.REGISTERING and ask_again:
            self._registrar.register_again(receiving)
        elif receiving.stage is Stage.CONFIRMING and ask_again:
            receiving.asked_at = now
            self._send_acceptance(receiving)

    def shutdown(self) -> bool:
        """Give everything up. False while somebody may still write."""
        for receiving in list(self._receivings.values()):
            self._give_up(receiving, Outcome.SHUTDOWN, "the node shuts down")
        return not self._receivings
