"""The consumer's transfers: destinations are registered, notices verified, and failures made safe before they count.

Each BeginReceive is answered exactly once, with `finished` or with `failed`. A failure is reported only when
nobody can write to the blocks any more: the producer said that it closed the transfer, or it is certainly dead,
or the last lease that it can hold by our word has ended by our clock.

What remains, and cannot be excluded from here: a producer that is frozen in the middle of one posted write for
longer than its lease, and then goes on. A post is bounded (`Settings.max_post_bytes`) and preceded by a look at
the lease, so that this is a matter of milliseconds inside the transport.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from kvtransfer.base import Handoff, LoadFailure
from kvtransfer.protocol import commands
from kvtransfer.protocol.declined import Declined
from kvtransfer.protocol.geometry import PoolGeometry
from kvtransfer.protocol.identity import Clock, Identity, PeerKey, Remembered, key_of
from kvtransfer.protocol.links import ProducerLink
from kvtransfer.protocol.receiving import Receiving, Stage
from kvtransfer.protocol.settings import Settings
from kvtransfer.protocol.statistics import Outcome, Recorder
from wire.handoff import (
    CancelTransfer,
    DestinationRegistered,
    HandoffAccepted,
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

logger = logging.getLogger(__name__)

Send = Callable[[str, msgspec.Struct], None]


class Consumer:
    def __init__(
        self,
        me: Identity,
        geometry: PoolGeometry,
        settings: Settings,
        *,
        send: Send,
        clock: Clock,
        recorder: Recorder,
        finished: Callable[[str, Handoff], None],
        failed: Callable[[str, LoadFailure], None],
    ) -> None:
        self._me = me
        self._geometry = geometry
        self._settings = settings
        self._send = send
        self._clock = clock
        self._recorder = recorder
        self._finished = finished
        self._failed = failed
        self._links: dict[PeerKey, ProducerLink] = {}
        self._dead: Remembered[str] = Remembered(settings.max_remembered, settings.remember_s, clock)
        self._receivings: dict[str, Receiving] = {}  # by transfer id
        self._by_request: dict[str, Receiving] = {}
        # True: accepted, so that a notice that comes again is answered again.
        self._over: Remembered[bool] = Remembered(settings.max_remembered, settings.remember_s, clock)
        self._declined = Declined(me, settings, send, clock)

    @property
    def open_transfers(self) -> int:
        return len(self._receivings)

    @property
    def is_idle(self) -> bool:
        return not self._receivings and self._declined.is_empty

    # ── commands of our own engine ──

    def begin(self, command: commands.BeginReceive) -> None:
        now = self._clock()
        if command.transfer_id in self._receivings:
            self._failed(
                command.request_id, LoadFailure("another request uses its transfer id", command.local_tokens)
            )
            return
        receiving = Receiving(command, began_at=now, deadline=now + self._settings.timeout_s)
        self._receivings[command.transfer_id] = receiving
        self._by_request[command.request_id] = receiving
        dead = self._dead.get(_name(receiving.peer))
        if dead is not None:
            self._end(receiving, Outcome.PEER_LOST, dead)
            return
        if receiving.peer not in self._links:
            for key in [key for key in self._links if key.node_id == receiving.peer.node_id]:
                self.peer_gone(key, "the router names a later incarnation of this node")
            self._links[receiving.peer] = ProducerLink(command.peer, greeting_since=now)
            self._greet(self._links[receiving.peer])
        self._advance(receiving)

    def cancel(self, command: commands.CancelReceive) -> None:
        receiving = self._by_request.get(command.request_id)
        if receiving is not None:
            self._give_up(receiving, Outcome.ABORTED, "the request was aborted")

    def decline(self, command: commands.DeclineTransfer) -> None:
        self._declined.add(command.transfer_id, command.peer)

    # ── messages of producers ──

    def on_welcome(self, message: Welcome) -> None:
        link = self._hear(key_of(message.envelope))
        if link is None:
            self._recorder.refused("unknown_peer")
            return
        now = self._clock()
        difference = self._geometry.difference(message.fingerprint, message.memory)
        if difference is not None:
            logger.error("%s cannot send KV here: %s", link.key.node_id, difference)
            self._leave(link, Outcome.INCOMPATIBLE, difference)
            return
        link.take_stamp(message.stamp, now)
        if link.greeting_since is not None:
            self._recorder.took("handshake", now - link.greeting_since)
            link.greeting_since = None
        link.memory = message.memory
        link.lease_s = message.lease_s
        self._advance_all(link)

    def on_registered(self, message: DestinationRegistered) -> None:
        link = self._hear(key_of(message.envelope))
        if link is None:
            self._recorder.refused("unknown_peer")
            return
        now = self._clock()
        link.take_stamp(message.stamp, now)
        receiving = self._mine(message.transfer_id, link.key)
        if receiving is not None and receiving.stage is Stage.REGISTERING:
            receiving.stage = Stage.WAITING
            receiving.registered_at = now
            self._recorder.took("register", now - receiving.began_at)

    def on_renewed(self, message: LeaseRenewed) -> None:
        link = self._hear(key_of(message.envelope))
        if link is None:
            self._recorder.refused("unknown_peer")
            return
        link.take_stamp(message.stamp, self._clock())
        for transfer_id in message.unknown:
            receiving = self._mine(transfer_id, link.key)
            if receiving is not None and receiving.stage is Stage.WAITING:
                self._give_up(receiving, Outcome.LEASE_EXPIRED, "the producer no longer holds the transfer")
        self._advance_all(link)

    def on_notice(self, message: HandoffNotice) -> None:
        key = key_of(message.envelope)
        self._hear(key)
        receiving = self._receivings.get(message.transfer_id)
        if receiving is None:
            self._answer_late_notice(message)
        elif receiving.peer != key:
            self._recorder.refused("foreign_notice")
            self._refuse(message, RefusalCode.FOREIGN, "this transfer is with another node")
        elif receiving.stage is Stage.CLOSING:
            self._recorder.refused("late_notice")  # it is being cancelled, and will be answered
        elif receiving.stage is Stage.CONNECTING:
            self._recorder.refused("unasked_notice")
        elif (difference := receiving.mismatch(message, self._geometry.memory.block_bytes)) is not None:
            self._recorder.refused("notice_mismatch")
            logger.error(
                "refused the KV of %s from %s: %s", receiving.command.request_id, key.node_id, difference
            )
            self._give_up(receiving, Outcome.MISMATCHED, f"the handoff does not verify: {difference}")
        else:
            self._accept(receiving, message)

    def _answer_late_notice(self, message: HandoffNotice) -> None:
        envelope = message.envelope
        accepted = self._over.get(message.transfer_id)
        if accepted:
            self._recorder.refused("repeated_notice")
            self._send(
                envelope.reply_to,
                HandoffAccepted(self._me.envelope(envelope.sender_epoch), message.transfer_id),
            )
        else:
            self._recorder.refused("unknown_notice" if accepted is None else "late_notice")
            self._send(
                envelope.reply_to,
                CancelTransfer(self._me.envelope(envelope.sender_epoch), message.transfer_id),
            )

    def on_closed(self, message: TransferClosed) -> None:
        key = key_of(message.envelope)
        self._hear(key)
        self._declined.closed(message.transfer_id)
        receiving = self._mine(message.transfer_id, key)
        if receiving is not None:
            self._end(receiving, Outcome.CLOSED_BY_PEER, f"closed by the producer: {message.reason}")

    def on_refused(self, message: Refused) -> None:
        key = key_of(message.envelope)
        if message.code is RefusalCode.WRONG_EPOCH:
            known = {*self._links, *(receiving.peer for receiving in self._receivings.values())}
            for peer in known:
                if peer.epoch == message.addressed_epoch and peer != key:
                    self.peer_gone(peer, "the producer was started anew")
            return
        link = self._hear(key)
        if link is None:
            self._recorder.refused("unknown_peer")
            return
        if message.code in (RefusalCode.INCOMPATIBLE, RefusalCode.HANDSHAKE_FAILED):
            if not link.is_ready:
                logger.error("%s refused the handshake: %s", key.node_id, message.reason)
                outcome = (
                    Outcome.INCOMPATIBLE if message.code is RefusalCode.INCOMPATIBLE else Outcome.MOVE_FAILED
                )
                self._leave(link, outcome, message.reason)
        elif message.code is RefusalCode.HANDSHAKE_REQUIRED:
            if link.is_ready:
                link.greeting_since = self._clock()
                self._greet(link)
        else:
            receiving = self._mine(message.transfer_id, key)
            if receiving is not None:
                self._give_up(receiving, Outcome.REFUSED, f"refused by the producer: {message.reason}")

    # ── peers ──

    def silent_peers(self) -> list[tuple[PeerKey, str]]:
        """Producers that owe an answer for long: (who, endpoint)."""
        limit = self._clock() - self._settings.silent_s
        return [
            (link.key, link.peer.endpoint)
            for link in self._links.values()
            if link.owed_since is not None and link.owed_since < limit
        ]

    def peer_gone(self, key: PeerKey, reason: str) -> None:
        """It is certain that this incarnation does not run any more, so it cannot write."""
        self._dead.add(_name(key), reason)
        self._links.pop(key, None)
        for receiving in self._with(key):
            self._end(receiving, Outcome.PEER_LOST, reason)

    def _leave(self, link: ProducerLink, outcome: Outcome, reason: str) -> None:
        """There is no talking to this producer, alive as it is."""
        del self._links[link.key]
        for receiving in self._with(link.key):
            self._give_up(receiving, outcome, reason)

    def _with(self, key: PeerKey) -> list[Receiving]:
        return [receiving for receiving in self._receivings.values() if receiving.peer == key]

    def _hear(self, key: PeerKey) -> ProducerLink | None:
        link = self._links.get(key)
        if link is not None:
            link.heard()
        return link

    def _mine(self, transfer_id: str, key: PeerKey) -> Receiving | None:
        receiving = self._receivings.get(transfer_id)
        return receiving if receiving is not None and receiving.peer == key else None

    # ── registering ──

    def _greet(self, link: ProducerLink) -> None:
        link.ask(self._clock())
        self._send(
            link.peer.endpoint,
            Hello(self._me.envelope(link.peer.epoch), self._geometry.fingerprint, self._geometry.memory),
        )

    def _advance_all(self, link: ProducerLink) -> None:
        for receiving in self._with(link.key):
            self._advance(receiving)

    def _advance(self, receiving: Receiving) -> None:
        link = self._links.get(receiving.peer)
        if receiving.stage is not Stage.CONNECTING or link is None or not link.is_ready:
            return
        if link.has_fresh_stamp(self._clock()):
            receiving.stage = Stage.REGISTERING
            self._register(receiving, link)
        elif link.owed_since is None:
            self._renew(link)

    def _register(self, receiving: Receiving, link: ProducerLink) -> None:
        command = receiving.command
        receiving.asked_at = self._clock()
        self._extend_lease(receiving, link)
        if link.owed_since is None:
            link.owed_since = receiving.asked_at
        self._send(
            link.peer.endpoint,
            RegisterDestination(
                self._me.envelope(link.peer.epoch),
                link.stamp,
                command.transfer_id,
                command.num_tokens,
                command.token_hash,
                command.first_block,
                command.block_ids,
            ),
        )

    def _renew(self, link: ProducerLink) -> None:
        held = [
            receiving
            for receiving in self._with(link.key)
            if receiving.stage in (Stage.WAITING, Stage.READING)
        ]
        for receiving in held:
            self._extend_lease(receiving, link)
        link.ask(self._clock())
        self._send(
            link.peer.endpoint,
            RenewLease(
                self._me.envelope(link.peer.epoch), link.stamp, [receiving.transfer_id for receiving in held]
            ),
        )

    def _extend_lease(self, receiving: Receiving, link: ProducerLink) -> None:
        receiving.leased_until = max(receiving.leased_until or 0.0, link.leases_until)

    # ── the end of a transfer ──

    def _accept(self, receiving: Receiving, notice: HandoffNotice) -> None:
        command = receiving.command
        self._forget(receiving, accepted=True)
        self._send(
            command.peer.endpoint, HandoffAccepted(self._me.envelope(command.peer.epoch), command.transfer_id)
        )
        self._recorder.ended(Outcome.RECEIVED)
        self._recorder.received(notice.num_blocks, notice.num_bytes)
        self._recorder.took("receive", self._clock() - receiving.began_at)
        self._finished(command.request_id, Handoff(notice.first_token, notice.num_tokens))

    def _give_up(self, receiving: Receiving, outcome: Outcome, reason: str) -> None:
        """This transfer shall fail, as soon as its blocks are safe."""
        if receiving.stage is Stage.CLOSING:
            return
        receiving.outcome, receiving.reason = outcome, reason
        if not receiving.may_be_written:
            self._declined.add(receiving.transfer_id, receiving.command.peer)
            self._end(receiving, outcome, reason)
            return
        receiving.stage = Stage.CLOSING
        self._ask_to_close(receiving)

    def _ask_to_close(self, receiving: Receiving) -> None:
        receiving.asked_at = self._clock()
        peer = receiving.command.peer
        link = self._links.get(receiving.peer)
        if link is not None and link.owed_since is None:
            link.owed_since = receiving.asked_at
        self._send(peer.endpoint, CancelTransfer(self._me.envelope(peer.epoch), receiving.transfer_id))

    def _end(self, receiving: Receiving, outcome: Outcome, reason: str) -> None:
        """The blocks are safe: report the failure. What made us give up counts, not what confirmed it."""
        if receiving.stage is Stage.CLOSING:
            outcome, reason = receiving.outcome, receiving.reason
        self._forget(receiving, accepted=False)
        self._recorder.ended(outcome)
        if outcome is Outcome.LEASE_EXPIRED:
            self._recorder.lease_expired()
        self._failed(receiving.command.request_id, LoadFailure(reason, receiving.command.local_tokens))

    def _forget(self, receiving: Receiving, *, accepted: bool) -> None:
        del self._receivings[receiving.transfer_id]
        del self._by_request[receiving.command.request_id]
        self._over.add(receiving.transfer_id, accepted)

    def tick(self) -> None:
        now = self._clock()
        self._declined.tick()
        for link in list(self._links.values()):
            self._tick_link(link, now)
        for receiving in list(self._receivings.values()):
            self._tick_receiving(receiving, now)

    def _tick_link(self, link: ProducerLink, now: float) -> None:
        stages = {receiving.stage for receiving in self._with(link.key)}
        if not stages:
            link.owed_since = None  # nobody waits for what it may still owe
            if link.greeting_since is not None:
                del self._links[link.key]
            return
        waiting_since = link.greeting_since if link.greeting_since is not None else link.owed_since
        too_late = waiting_since is not None and now >= waiting_since + self._settings.handshake_timeout_s
        if too_late and Stage.CONNECTING in stages:
            self._leave(link, Outcome.TIMED_OUT, "the producer did not answer the handshake")
            return
        if link.greeting_since is not None and now >= link.asked_at + self._settings.retry_s:
            self._greet(link)
        if link.stamp and stages & {Stage.WAITING, Stage.READING}:
            if now >= link.asked_at + self._settings.renew_s:
                self._renew(link)
        elif link.is_ready and Stage.CONNECTING in stages and now >= link.asked_at + self._settings.retry_s:
            self._renew(link)

    def _tick_receiving(self, receiving: Receiving, now: float) -> None:
        link = self._links.get(receiving.peer)
        unsafe_until = (receiving.leased_until or 0.0) + self._settings.margin_s
        if receiving.may_be_written and now >= unsafe_until:
            self._declined.add(receiving.transfer_id, receiving.command.peer)
            self._end(receiving, Outcome.PEER_LOST, "the producer fell silent, and its lease has ended")
        elif receiving.stage is Stage.CLOSING:
            if now >= receiving.asked_at + self._settings.retry_s:
                self._ask_to_close(receiving)
        elif now >= receiving.deadline:
            self._give_up(receiving, Outcome.TIMED_OUT, f"no KV within {self._settings.timeout_s:g} s")
        elif (
            receiving.stage is Stage.REGISTERING
            and link is not None
            and now >= receiving.asked_at + self._settings.retry_s
        ):
            if link.has_fresh_stamp(now):
                self._register(receiving, link)
            elif link.is_ready and now >= link.asked_at + self._settings.retry_s:
                self._renew(link)

    def shutdown(self) -> bool:
        """Give everything up. False while a producer may still write."""
        for receiving in list(self._receivings.values()):
            self._give_up(receiving, Outcome.SHUTDOWN, "the node shuts down")
        return not self._receivings

    def _refuse(self, message: HandoffNotice, code: RefusalCode, reason: str) -> None:
        envelope = message.envelope
        self._send(
            envelope.reply_to,
            Refused(
                self._me.envelope(envelope.sender_epoch),
                message.transfer_id,
                code,
                reason,
                addressed_epoch=self._me.epoch,
            ),
        )


def _name(key: PeerKey) -> str:
    return f"{key.epoch}/{key.node_id}"
