"""A consumer's transfers and their ends: a failure is made safe before it counts.

Each BeginReceive is answered exactly once, with `finished` or with `failed`. A failure is reported only when
nobody can write to the blocks any more. With push: the producer said that it closed the transfer, or it is
certainly dead, or the last lease that it can hold by our word has ended by our clock, and we have run for
`Settings.margin_s` since: where our own process carries out a peer's writes, as with TCP, those that came while it stood
still land when it goes on. If that was for long they may be many, and it waits for a lease more, in which a producer that
lives says when they are over. With pull: our own reads are over.

What remains with push, and cannot be excluded from here: a producer that is frozen in the middle of one posted
write for longer than its lease, and then goes on. A post is bounded (`Settings.max_post_bytes`) and preceded by a
look at the lease, so that this is a matter of milliseconds inside the transport.

A pull is right only if the producer held the blocks until the last byte was read. Only it knows, so the
acceptance is a question, and TransferClosed with `handed_over` the answer that ends the transfer well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tandem.kvtransfer.base import Handoff, LoadFailure
from tandem.kvtransfer.protocol.commands import BeginReceive
from tandem.kvtransfer.protocol.declined import Declined
from tandem.kvtransfer.protocol.identity import PeerKey, Remembered
from tandem.kvtransfer.protocol.links import ProducerLinks
from tandem.kvtransfer.protocol.receiving import Receiving, Stage
from tandem.kvtransfer.protocol.side import Side
from tandem.kvtransfer.protocol.statistics import Outcome
from tandem.kvtransfer.protocol.transport import Direction
from tandem.wire.handoff import CancelTransfer, HandoffAccepted, HandoffNotice


class Incoming:
    def __init__(
        self,
        side: Side,
        links: ProducerLinks,
        declined: Declined,
        *,
        finished: Callable[[str, Handoff], None],
        failed: Callable[[str, LoadFailure], None],
    ) -> None:
        self._side = side
        self._links = links
        self._declined = declined
        self._reads = side.direction is Direction.PULL
        self._finished = finished
        self._failed = failed
        self._by_transfer: dict[str, Receiving] = {}
        self._by_request: dict[str, Receiving] = {}
        # True: accepted, so that a notice that comes again is answered again.
        self._over: Remembered[bool] = Remembered(
            side.settings.max_remembered, side.settings.remember_s, side.clock
        )

    def __iter__(self) -> Iterator[Receiving]:
        return iter(list(self._by_transfer.values()))

    def __contains__(self, receiving: Receiving) -> bool:
        return self._by_transfer.get(receiving.transfer_id) is receiving

    @property
    def is_empty(self) -> bool:
        return not self._by_transfer

    def get(self, transfer_id: str) -> Receiving | None:
        return self._by_transfer.get(transfer_id)

    def of_request(self, request_id: str) -> Receiving | None:
        return self._by_request.get(request_id)

    def with_peer(self, key: PeerKey) -> list[Receiving]:
        return [receiving for receiving in self._by_transfer.values() if receiving.peer == key]

    def was_accepted(self, transfer_id: str) -> bool | None:
        """Of one that is over; None when nothing is known of it."""
        return self._over.get(transfer_id)

    # ── the beginning ──

    def open(self, command: BeginReceive) -> Receiving | None:
        """None when its transfer id is in use, which has been reported."""
        if command.transfer_id in self._by_transfer:
            self._failed(
                command.request_id, LoadFailure("another request uses its transfer id", command.local_tokens)
            )
            return None
        now = self._side.clock()
        receiving = Receiving(command, began_at=now, deadline=now + self._side.settings.timeout_s)
        self._by_transfer[command.transfer_id] = receiving
        self._by_request[command.request_id] = receiving
        self._side.recorder.began()
        if not self._reads:
            self._side.transport.expect(
                command.transfer_id, [block for ids in command.block_ids for block in ids if block]
            )
        return receiving

    # ── the end ──

    def accept(self, receiving: Receiving) -> None:
        """Tell the producer that everything is here; again, until it is known to have heard."""
        receiving.asked_at = self._side.clock()
        self._tell(receiving, HandoffAccepted)

    def finish(self, receiving: Receiving, notice: HandoffNotice) -> None:
        self._forget(receiving, notice)
        self._side.recorder.received(notice.num_blocks, notice.num_bytes)
        self._finished(receiving.command.request_id, Handoff(notice.first_token, notice.num_tokens))

    def give_up(self, receiving: Receiving, outcome: Outcome, reason: str) -> None:
        """This transfer shall fail, as soon as its blocks are safe."""
        if receiving.stage is Stage.CLOSING:
            return
        if self._reads or not receiving.is_registered:
            # Nobody writes to our blocks but ourselves: the producer only has to hear of it.
            self._declined.add(receiving.transfer_id, receiving.command.peer)
            self.end(receiving, outcome, reason)
            return
        receiving.stage = Stage.CLOSING
        receiving.outcome, receiving.reason = outcome, reason
        self._ask_to_close(receiving)

    def end(self, receiving: Receiving, outcome: Outcome, reason: str) -> None:
        """Nobody else writes to the blocks: report the failure, once our own reads are over as well. What made us
        give up counts, not what confirmed it."""
        if receiving.stage is not Stage.CLOSING:
            receiving.stage = Stage.CLOSING
            receiving.outcome, receiving.reason = outcome, reason
        receiving.is_safe = True
        receiving.unread = []
        cancel = self._side.transport.cancel
        receiving.in_flight = [handle for handle in receiving.in_flight if not cancel(handle)]
        if receiving.in_flight:
            return
        self._forget(receiving, None)
        self._failed(
            receiving.command.request_id, LoadFailure(receiving.reason, receiving.command.local_tokens)
        )

    def tick(self, receiving: Receiving, ran_s: float) -> None:
        """Look at its deadlines, but for those of its registration. We have certainly run for `ran_s` since the last time."""
        now, settings = self._side.clock(), self._side.settings
        if receiving.is_safe:
            return  # only our own reads are waited for
        ask_again = now >= receiving.asked_at + settings.retry_s
        has_lease = receiving.leased_until is None or now < receiving.leased_until
        receiving.unleased_s = 0.0 if has_lease else receiving.unleased_s + ran_s
        if receiving.unleased_s >= settings.margin_s:
            self._declined.add(receiving.transfer_id, receiving.command.peer)
            self.end(receiving, Outcome.PEER_LOST, "the producer fell silent, and its lease has ended")
        elif receiving.stage is Stage.CLOSING:
            if ask_again:
                self._ask_to_close(receiving)
        elif now >= receiving.deadline:
            self.give_up(receiving, Outcome.TIMED_OUT, f"no KV within {settings.timeout_s:g} s")
        elif receiving.stage is Stage.CONFIRMING and ask_again:
            self.accept(receiving)

    def _ask_to_close(self, receiving: Receiving) -> None:
        receiving.asked_at = self._side.clock()
        link = self._links.get(receiving.peer)
        if link is not None:
            link.owes(receiving.asked_at)
        self._tell(receiving, CancelTransfer)

    def _tell(self, receiving: Receiving, kind: type[HandoffAccepted] | type[CancelTransfer]) -> None:
        peer = receiving.command.peer
        self._side.send(peer.endpoint, kind(self._side.me.envelope(peer.epoch), receiving.transfer_id))

    def _forget(self, receiving: Receiving, received: HandoffNotice | None) -> None:
        del self._by_transfer[receiving.transfer_id]
        del self._by_request[receiving.command.request_id]
        self._over.add(receiving.transfer_id, received is not None)
        if not self._reads:
            self._side.transport.expect_no_more(receiving.transfer_id)
        self._side.recorder.ended(receiving.trace(self._side.clock(), received))
