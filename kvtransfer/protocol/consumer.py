"""The consumer of one node: takes its engine's commands and producers' messages, and acts on its transfers."""

from __future__ import annotations

import logging
from collections.abc import Callable

from tandem.base.errors import TransferError
from tandem.kvtransfer.base import Handoff, LoadFailure
from tandem.kvtransfer.config import MAX_LEASE_S
from tandem.kvtransfer.protocol import commands
from tandem.kvtransfer.protocol.cache_map import Mapping
from tandem.kvtransfer.protocol.generations import SourceGenerations
from tandem.kvtransfer.protocol.incoming import DeclinedTransfers, IncomingTransfers, Quarantine, Verifier
from tandem.kvtransfer.protocol.links import ProducerLink, ProducerLinks, Registrar
from tandem.kvtransfer.protocol.pulling import PullLoop
from tandem.kvtransfer.protocol.receiving import IncomingTransfer, ReceivePhase
from tandem.kvtransfer.protocol.side import Answers, LinkPace, NodeSide, Outcome, Patience, PeerKey, key_of
from tandem.kvtransfer.protocol.transport import Activity, Direction
from tandem.wire.handoff import (
    CancelTransfer,
    DestinationRegistered,
    Envelope,
    HandoffAccepted,
    HandoffNotice,
    KVArrived,
    LeaseRenewed,
    ProcessIdentity,
    Refusal,
    RefusalCode,
    TransferClosed,
    TransferPace,
    Welcome,
)

logger = logging.getLogger(__name__)


class Consumer:
    def __init__(
        self,
        side: NodeSide,
        *,
        finished: Callable[[str, Handoff], None],
        failed: Callable[[str, LoadFailure], None],
        released: Callable[[frozenset[int]], None],
        distrusted: Callable[[str], None],
        has_ended: Callable[[ProcessIdentity], bool],
    ) -> None:
        me, settings, send, clock = side.me, side.settings, side.send, side.clock
        self._side = side
        self._answers = Answers(me, send, side.recorder)
        self._ticked_at = clock()
        self._links = ProducerLinks(side)
        self.generations = SourceGenerations(side, self._links, distrusted)
        self._declined = DeclinedTransfers(me, settings, send, clock)
        self._incoming = IncomingTransfers(
            side, self._links, self._declined, finished=finished, failed=failed, released=released
        )
        self._quarantine = Quarantine(side, self._links, self._incoming, has_ended=has_ended)
        self._pulling: PullLoop | None = None  # set if the consumer reads
        if side.direction is Direction.PULL:
            self._pulling = PullLoop(side, self._links, self._incoming, broken=self._on_connection_broken)
        self._verifier = Verifier(side)
        self._patience = Patience(settings.patience_s, clock)
        self._tokens_per_s: float | None = None  # our engine's rate for prompt tokens
        self._registrar = Registrar(
            side,
            self._links,
            receivings=self._incoming.with_peer,
            unreachable=lambda link, reason: self._leave(link, Outcome.TIMED_OUT, reason),
        )

    @property
    def is_idle(self) -> bool:
        """True if nothing here has a deadline."""
        has_reads = self._pulling is not None and self._pulling.has_leaving
        is_empty = self._incoming.is_empty and self._declined.is_empty and not has_reads
        return is_empty and not self.generations.awaits_confirmation

    # ── commands of our own engine ──

    def begin(self, command: commands.BeginReceive) -> None:
        receiving = self._incoming.open(command)
        if receiving is None:
            return
        suspicion = self._links.suspicion_of(receiving.peer)
        if self._links.is_left_out(receiving.peer):
            reason = f"{receiving.peer.node_id} is left out: too many of its blocks arrived wrong"
            self._incoming.give_up(receiving, Outcome.CORRUPTED, reason)
        elif suspicion is not None:
            self._incoming.give_up(receiving, Outcome.PEER_LOST, suspicion)
        elif (link := self._links.get(receiving.peer)) is not None:
            if link.pace is not None:
                # The link was slow a moment ago, and may be slow still.
                num_bytes = receiving.num_blocks * self._side.geometry.memory.block_bytes
                link.pace.waiting[receiving.transfer_id] = num_bytes
                self._give_up_slow(link)
            self._registrar.advance(receiving)
        else:
            self._leave_unused(receiving.peer)
            self._links.open(command.peer)

    def _leave_unused(self, opened: PeerKey) -> None:
        """Drops unused links with nodes that may be gone for good, and with other incarnations of the node whose
        link is opened. A request does not say which of two incarnations is the later one, or whether the other has
        ended."""
        limit = self._side.clock() - self._side.settings.keep_link_s
        for link in self._links:
            may_be_gone = link.key.node_id == opened.node_id or link.stamp_at < limit
            if may_be_gone and not self._incoming.with_peer(link.key):
                self._drop(link.key)

    def cancel(self, command: commands.CancelReceive) -> None:
        receiving = self._incoming.of_request(command.request_id)
        if receiving is not None:
            self._incoming.abort(receiving)

    def decline(self, command: commands.DeclineTransfer) -> None:
        self._declined.add(command.transfer_id, command.peer)

    def computes_at(self, command: commands.ComputesAt) -> None:
        self._tokens_per_s = command.tokens_per_s

    # ── messages of producers ──

    def hear(self, envelope: Envelope) -> bool:
        """Takes the generation that a message names, before the message. Returns whether it is news."""
        if envelope.generation:
            for receiving in self._incoming.with_peer(key_of(envelope)):
                if receiving.arrived_of < envelope.generation:
                    receiving.num_arrived = 0
        return self.generations.hear(envelope)

    def on_welcome(self, message: Welcome) -> None:
        link = self._hear(message)
        if link is None:
            return
        now, settings = self._side.clock(), self._side.settings
        mapping = self._side.geometry.mapping_to(message.fingerprint, message.memory)
        difference = None if isinstance(mapping, Mapping) else mapping
        if difference is None and not 0 < message.lease_s <= MAX_LEASE_S:
            difference = f"the producer's lease is {message.lease_s} s"
        if difference is not None:
            logger.error("%s cannot send KV here: %s", link.key.node_id, difference)
            self._leave(link, Outcome.INCOMPATIBLE, difference)
            return
        if self._pulling is not None:
            try:
                self._pulling.connect(link.key, message.memory)
            except TransferError as error:
                logger.error("cannot reach the KV memory of %s: %s", link.key.node_id, error)
                self._leave(link, Outcome.MOVE_FAILED, str(error))
                return
        link.take_stamp(message.stamp, now)
        link.greeting_since = None
        link.asked_at = now - settings.renew_s  # so that the leases on this link are renewed at once
        link.memory = message.memory
        link.process = message.process
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
        if receiving is not None and receiving.stage is ReceivePhase.REGISTERING:
            receiving.stage = ReceivePhase.WAITING
            receiving.confirmed_at = self._side.clock()

    def on_renewed(self, message: LeaseRenewed) -> None:
        link = self._hear(message)
        if link is None:
            return
        link.take_stamp(message.stamp, self._side.clock())
        link.tokens_per_s = message.tokens_per_s
        self.generations.confirmed(link.key, message.found_wrong)
        for transfer_id in message.waiting:
            if (receiving := self._mine(transfer_id, link.key)) is not None:
                receiving.deadline = self._side.clock() + self._side.settings.timeout_s
        for transfer_id in message.unknown:
            receiving = self._mine(transfer_id, link.key)
            # While CONFIRMING, the producer's answer to our acceptance is on its way, and decides.
            if receiving is not None and receiving.stage in (ReceivePhase.WAITING, ReceivePhase.READING):
                self._incoming.give_up(receiving, Outcome.LEASE_EXPIRED, "the producer no longer holds the transfer")
        self._registrar.advance_all(link)

    def on_arrived(self, message: KVArrived) -> None:
        key = key_of(message.envelope)
        self._links.hear(key)
        receiving = self._mine(message.transfer_id, key)
        if receiving is None or receiving.quarantined is not None or self._pulling is not None:
            return
        if receiving.outcome is Outcome.CORRUPTED:
            return  # nothing more of this transfer is trusted
        if message.start <= receiving.num_arrived < message.count <= len(receiving.order):
            self.generations.took(receiving.command.peer, message.envelope.generation)  # used even if the rest fails
            receiving.arrived_of = message.envelope.generation
            self._verify(receiving, message.start, message.count, message.checksums)

    def _verify(self, receiving: IncomingTransfer, start: int, count: int, packed: bytes) -> bool:
        """Returns whether grains `start` to `count` are what was sent. If not, gives the transfer up."""
        try:
            problem = self._verifier.problem(receiving, start, count, packed)
        except TransferError as error:
            self._incoming.give_up(receiving, Outcome.MOVE_FAILED, str(error))
            return False
        if problem is not None:
            logger.error("%s from %s: %s", receiving.command.request_id, receiving.peer.node_id, problem)
            self._links.found_wrong(receiving.peer)
            self._incoming.give_up(receiving, Outcome.CORRUPTED, problem)
        return problem is None

    def on_pace(self, message: TransferPace) -> None:
        link = self._hear(message)
        if link is None or self._pulling is not None or not message.bytes_per_s > 0:
            return
        link.pace = LinkPace(message.bytes_per_s, message.in_flight, message.waiting, self._side.clock())

    def on_notice(self, message: HandoffNotice) -> None:
        key = key_of(message.envelope)
        self._links.hear(key)
        receiving = self._incoming.get(message.transfer_id)
        if receiving is None:
            self._answer_late_notice(message)
        elif receiving.peer != key:
            self._answers.refuse(
                message.envelope, message.transfer_id, RefusalCode.FOREIGN, "this transfer is with another node"
            )
        elif not receiving.is_registered:
            self._side.recorder.refused("unasked_notice")
        elif receiving.stage is ReceivePhase.CLOSING:
            self._side.recorder.refused("late_notice")  # the cancellation that was sent answers it
        elif receiving.notice is not None:
            self._side.recorder.refused("repeated_notice")
        elif (difference := self._difference(receiving, message)) is not None:
            self._refuse_mismatch(receiving, difference)
        elif self._pulling is not None:
            problem = self._pulling.begin(receiving, message)
            if problem is not None:
                self._refuse_mismatch(receiving, problem)
        elif self._verify(receiving, 0, len(receiving.order), message.checksums):
            self._incoming.accept(receiving)
            self._finish(receiving, message)

    def _finish(self, receiving: IncomingTransfer, notice: HandoffNotice) -> None:
        self.generations.took(receiving.command.peer, notice.envelope.generation)
        self._incoming.finish(receiving, notice)

    def _difference(self, receiving: IncomingTransfer, notice: HandoffNotice) -> str | None:
        geometry = self._side.geometry
        return receiving.mismatch(notice, geometry.memory.block_bytes, geometry.vocab_size)

    def _answer_late_notice(self, message: HandoffNotice) -> None:
        sender = message.envelope
        mine = self._side.me.envelope(sender.sender_epoch)
        accepted = self._incoming.was_accepted(message.transfer_id)
        if accepted:
            self._side.recorder.refused("repeated_notice")
            self._side.send(sender.reply_to, HandoffAccepted(mine, message.transfer_id))
        else:
            self._side.recorder.refused("unknown_notice" if accepted is None else "late_notice")
            self._side.send(sender.reply_to, CancelTransfer(mine, message.transfer_id))

    def _refuse_mismatch(self, receiving: IncomingTransfer, difference: str) -> None:
        self._side.recorder.refused("notice_mismatch")
        logger.error(
            "refused the KV of %s from %s: %s", receiving.command.request_id, receiving.peer.node_id, difference
        )
        self._incoming.give_up(receiving, Outcome.MISMATCHED, f"the handoff does not verify: {difference}")

    def on_closed(self, message: TransferClosed) -> None:
        key = key_of(message.envelope)
        self._links.hear(key)
        self._declined.closed(message.transfer_id)
        receiving = self._mine(message.transfer_id, key)
        if message.is_void and self._incoming.is_used(message.transfer_id):
            self.generations.distrust(f"{key.node_id} says that KV is wrong which a request here has")
        if receiving is None:
            return
        if message.is_void:
            receiving.num_arrived = 0
        if message.handed_over and receiving.stage is ReceivePhase.CONFIRMING and receiving.notice is not None:
            if self._verify(receiving, 0, len(receiving.order), receiving.notice.checksums):
                self._finish(receiving, receiving.notice)
        else:
            self._incoming.end(receiving, Outcome.CLOSED_BY_PEER, f"closed by the producer: {message.reason}")

    def on_refused(self, message: Refusal) -> None:
        key = key_of(message.envelope)
        if message.code is RefusalCode.WRONG_EPOCH:
            known = {link.key for link in self._links} | {other.peer for other in self._incoming}
            for peer in known:
                if peer.node_id == key.node_id and peer.epoch == message.addressed_epoch:
                    self.suspect(peer, "another incarnation answers at the producer's address")
            return
        link = self._links.hear(key)
        if link is None:
            return
        if message.code in (RefusalCode.INCOMPATIBLE, RefusalCode.HANDSHAKE_FAILED):
            if not link.is_ready:
                logger.error("%s refused the handshake: %s", key.node_id, message.reason)
                incompatible = message.code is RefusalCode.INCOMPATIBLE
                self._leave(link, Outcome.INCOMPATIBLE if incompatible else Outcome.MOVE_FAILED, message.reason)
        elif message.code is RefusalCode.HANDSHAKE_REQUIRED:
            if link.is_ready:
                link.greeting_since = self._side.clock()
                self._links.greet(link)
        else:
            receiving = self._mine(message.transfer_id, key)
            if receiving is not None:
                self._incoming.give_up(receiving, Outcome.REFUSED, f"refused by the producer: {message.reason}")

    # ── peers ──

    def silent_links(self) -> list[ProducerLink]:
        """Returns the links with producers that have owed an answer for `probe_s`."""
        return self._links.silent()

    def suspect(self, key: PeerKey, reason: str, *, proven: bool = False) -> None:
        """This producer seems to be gone: its requests go on without it, and blocks to which it may write stay in
        quarantine. If its end is `proven`, the blocks are safe so soon that the requests wait for that."""
        self._links.suspect(key, reason)
        self._stop_reading(key)
        for receiving in self._incoming.with_peer(key):
            self._incoming.give_up(receiving, Outcome.PEER_LOST, reason)
            if receiving in self._incoming and not proven:
                self._incoming.stop_waiting(receiving)

    def _on_connection_broken(self, key: PeerKey, reason: str) -> None:
        link = self._links.get(key)
        if link is not None:
            self._leave(link, Outcome.MOVE_FAILED, reason)

    def _leave(self, link: ProducerLink, outcome: Outcome, reason: str) -> None:
        """The producer lives, but no transfer with it can work: drop the link and give its transfers up."""
        self._drop(link.key)
        for receiving in self._incoming.with_peer(link.key):
            self._incoming.give_up(receiving, outcome, reason)

    def _drop(self, key: PeerKey) -> None:
        self._links.drop(key)
        self._stop_reading(key)

    def _stop_reading(self, key: PeerKey) -> None:
        if self._pulling is not None:
            self._pulling.leave(key)

    def _mine(self, transfer_id: str, key: PeerKey) -> IncomingTransfer | None:
        receiving = self._incoming.get(transfer_id)
        return receiving if receiving is not None and receiving.peer == key else None

    def _hear(self, message: Welcome | DestinationRegistered | LeaseRenewed | TransferPace) -> ProducerLink | None:
        link = self._links.hear(key_of(message.envelope))
        if link is None:
            self._side.recorder.refused("unknown_peer")
        return link

    # ── slow links ──

    def _give_up_slow(self, link: ProducerLink) -> None:
        """Gives up the transfers over this link for which waiting takes longer than computing the rest here."""
        now, pace = self._side.clock(), link.pace
        if pace is None or now >= pace.at + self._side.settings.keep_pace_s:
            link.pace = None
            return
        waiting = {
            transfer_id: receiving
            for transfer_id in pace.waiting
            if (receiving := self._mine(transfer_id, link.key)) is not None
            and receiving.stage is not ReceivePhase.CLOSING
        }
        pace.waiting = {transfer_id: pace.waiting[transfer_id] for transfer_id in waiting}
        rate = self._tokens_per_s or link.tokens_per_s

        def is_over(transfer_id: str, expected_s: float) -> bool:
            receiving = waiting[transfer_id]
            missing = receiving.command.num_tokens - receiving.valid_tokens(self._side.geometry.block_size)
            return self._patience.is_over(expected_s, missing, rate)

        for transfer_id in pace.leave(now, is_over):
            receiving = waiting[transfer_id]
            reason = "its link is so slow that computing the rest takes less"
            logger.warning("%s from %s: %s", receiving.command.request_id, link.key.node_id, reason)
            self._incoming.give_up(receiving, Outcome.TOO_SLOW, reason)
            if receiving in self._incoming:
                self._incoming.stop_waiting(receiving)

    # ── the loop's turn ──

    def pump(self) -> Activity:
        return self._pulling.pump() if self._pulling is not None else Activity.NONE

    def tick(self) -> None:
        now, settings = self._side.clock(), self._side.settings
        since, self._ticked_at = now - self._ticked_at, now
        # In a longer interval the process may have been stopped for a part of it.
        ran_s = min(since, settings.margin_s / 4)
        self._declined.tick()
        self.generations.ask_all()
        for link in self._links:
            self._registrar.tick(link)
        if self._pulling is not None:
            self._pulling.measure()
        for link in self._links:
            if since > settings.pace_s:
                link.pace = None  # this process may have been what was slow
            self._give_up_slow(link)
        for receiving in self._incoming:
            if receiving.is_registered and since > settings.lease_s / 2:
                # This process stood still. Give the producer time to be heard.
                receiving.extend_lease(now + settings.lease_s)
            self._incoming.tick(receiving)
            self._registrar.remind(receiving)
        self._quarantine.tick(ran_s)

    def shutdown(self) -> bool:
        """Gives every transfer up. False while a producer may still write."""
        for receiving in self._incoming:
            self._incoming.give_up(receiving, Outcome.SHUTDOWN, "the node shuts down")
        return self._incoming.is_empty
