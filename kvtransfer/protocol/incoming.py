"""A consumer's transfers and their ends.

Each BeginReceive is answered exactly once, with `finished` or with `failed`. A failure of a push is made safe first:
the producer is asked to close the transfer, and answers when nothing is in flight. That may take long, over a slow
link or from a producer that is gone, and the request does not wait for it: after `ProtocolSettings.silent_s`, or at once when
the producer is suspected to be gone, the failure is reported with the blocks that a write may still land in, and these
stay in quarantine (see `Quarantine`). The end of a lease is a reason to give a transfer up. It frees nothing, because
a write that is merely slow may land after it. With pull nothing but our own reads writes to our blocks.

A pull is right only if the producer held the blocks until the last byte was read. Only it knows, so the
acceptance is a question, and TransferClosed with `handed_over` the answer that ends the transfer well.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator

import msgspec

from tandem.kvtransfer.base import Handoff, LoadFailure
from tandem.kvtransfer.protocol.checksums import unpack
from tandem.kvtransfer.protocol.commands import BeginReceive
from tandem.kvtransfer.protocol.links import ProducerLinks
from tandem.kvtransfer.protocol.receiving import IncomingTransfer, ReceivePhase
from tandem.kvtransfer.protocol.side import (
    BoundedMemory,
    Clock,
    Identity,
    NodeSide,
    PeerKey,
    ProtocolSettings,
)
from tandem.kvtransfer.protocol.statistics import Outcome
from tandem.kvtransfer.protocol.transport import Direction
from tandem.wire.errors import TransferError
from tandem.wire.handoff import CancelTransfer, HandoffAccepted, HandoffNotice, ProcessIdentity
from tandem.wire.nodes import PeerAddress

logger = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class _DeclinedTransfer:
    peer: PeerAddress
    until: float
    asked_at: float


class DeclinedTransfers:
    """Tells each producer until it answers, for a bounded time: if it never hears, its own lease ends the wait."""

    def __init__(
        self,
        me: Identity,
        settings: ProtocolSettings,
        send: Callable[[str, msgspec.Struct], None],
        clock: Clock,
    ) -> None:
        self._me = me
        self._settings = settings
        self._send = send
        self._clock = clock
        self._transfers: dict[str, _DeclinedTransfer] = {}

    @property
    def is_empty(self) -> bool:
        return not self._transfers

    def add(self, transfer_id: str, peer: PeerAddress) -> None:
        now = self._clock()
        self._transfers[transfer_id] = _DeclinedTransfer(peer, now + self._settings.silent_s, now)
        self._ask(transfer_id, peer)

    def closed(self, transfer_id: str) -> None:
        self._transfers.pop(transfer_id, None)

    def tick(self) -> None:
        now = self._clock()
        for transfer_id, declined in list(self._transfers.items()):
            if now >= declined.until:
                del self._transfers[transfer_id]
            elif now >= declined.asked_at + self._settings.retry_s:
                declined.asked_at = now
                self._ask(transfer_id, declined.peer)

    def _ask(self, transfer_id: str, peer: PeerAddress) -> None:
        self._send(peer.endpoint, CancelTransfer(self._me.envelope(peer.epoch), transfer_id))


class Verifier:
    def __init__(self, side: NodeSide) -> None:
        self._checksums = side.checksums
        self._recorder = side.recorder
        self._transport = side.transport

    def problem(self, receiving: IncomingTransfer, start: int, end: int, packed: bytes) -> str | None:
        """Why the grains from `start` to `end` are not what was sent; None when they are, and then they count as arrived.
        `packed` has a checksum for each of them that carries one. What was compared before is not compared again. Raises TransferError
        when they cannot be compared."""
        mapping = receiving.mapping
        if mapping is None:
            return "it was never registered"
        places, expected = receiving.sample.between(start, end), unpack(packed)
        if len(places) != len(expected):
            return f"{len(expected)} checksums came for {len(places)} blocks"
        known = sum(place < receiving.num_arrived for place in places)
        places, expected = places[known:], expected[known:]
        blocks, parts = receiving.where(places)
        groups = [receiving.order[place][0] for place in places]
        found = self._checksums.of(blocks, parts, mapping, groups=groups, arrived=True) if places else []
        for place, block, right, got in zip(places, blocks, expected, found, strict=True):
            if right != got:
                if receiving.sample.every == 1:
                    self._arrived(receiving, min(place, end))
                else:
                    receiving.num_arrived = (
                        0  # those before it that were not looked at are not believed either
                    )
                self._recorder.wrong_kv(receiving.peer.node_id)
                return f"block {block} arrived from {receiving.peer.node_id} with other bytes than were sent"
        self._recorder.checked(len(places))
        self._arrived(receiving, end)
        return None

    def _arrived(self, receiving: IncomingTransfer, end: int) -> None:
        if end > receiving.num_arrived:
            if self._transport.is_staged:
                self._transport.landed(receiving.where(range(receiving.num_arrived, end))[0])
            receiving.num_arrived = end


class IncomingTransfers:
    def __init__(
        self,
        side: NodeSide,
        links: ProducerLinks,
        declined: DeclinedTransfers,
        *,
        finished: Callable[[str, Handoff], None],
        failed: Callable[[str, LoadFailure], None],
        released: Callable[[frozenset[int]], None],
    ) -> None:
        self._side = side
        self._links = links
        self._declined = declined
        self._reads = side.direction is Direction.PULL
        self._finished = finished
        self._failed = failed
        self._released = released
        self._by_transfer: dict[str, IncomingTransfer] = {}
        self._by_request: dict[str, IncomingTransfer] = {}
        # True: accepted, so that a notice that comes again is answered again.
        self._over: BoundedMemory[bool] = BoundedMemory(
            side.settings.max_remembered, side.settings.remember_s, side.clock
        )

    def __iter__(self) -> Iterator[IncomingTransfer]:
        return iter(list(self._by_transfer.values()))

    def __contains__(self, receiving: IncomingTransfer) -> bool:
        return self._by_transfer.get(receiving.transfer_id) is receiving

    @property
    def is_empty(self) -> bool:
        return not self._by_transfer

    def get(self, transfer_id: str) -> IncomingTransfer | None:
        return self._by_transfer.get(transfer_id)

    def of_request(self, request_id: str) -> IncomingTransfer | None:
        return self._by_request.get(request_id)

    def with_peer(self, key: PeerKey) -> list[IncomingTransfer]:
        return [receiving for receiving in self._by_transfer.values() if receiving.peer == key]

    def was_accepted(self, transfer_id: str) -> bool | None:
        """For a transfer that is over; None when nothing is known of it."""
        return self._over.get(transfer_id)

    # ── the beginning ──

    def open(self, command: BeginReceive) -> IncomingTransfer | None:
        """None when its transfer id is in use, which has been reported."""
        if command.transfer_id in self._by_transfer:
            self._failed(
                command.request_id, LoadFailure("another request uses its transfer id", command.local_tokens)
            )
            return None
        now = self._side.clock()
        receiving = IncomingTransfer(command, began_at=now, deadline=now + self._side.settings.timeout_s)
        self._by_transfer[command.transfer_id] = receiving
        self._by_request[command.request_id] = receiving
        self._side.recorder.began()
        if not self._reads:
            self._side.transport.expect(
                command.transfer_id, [block for ids in command.block_ids for block in ids if block]
            )
        return receiving

    # ── the end ──

    def accept(self, receiving: IncomingTransfer) -> None:
        """Tell the producer that everything is here; again, until it is known to have heard."""
        receiving.asked_at = self._side.clock()
        self._tell(receiving, HandoffAccepted)

    def finish(self, receiving: IncomingTransfer, notice: HandoffNotice) -> None:
        self._side.recorder.ended(receiving.trace(self._side.clock(), notice))
        self._forget(receiving, accepted=True)
        self._side.recorder.received(notice.num_blocks, notice.num_bytes)
        self._finished(receiving.command.request_id, Handoff(notice.first_token, notice.num_tokens))

    def abort(self, receiving: IncomingTransfer) -> None:
        """Its request has ended, so that its blocks can wait until they are safe."""
        receiving.aborted = True
        self.give_up(receiving, Outcome.ABORTED, "the request was aborted")

    def give_up(self, receiving: IncomingTransfer, outcome: Outcome, reason: str) -> None:
        """This transfer shall fail."""
        if receiving.stage is ReceivePhase.CLOSING:
            return
        if self._reads or not receiving.is_registered:
            # Nothing can write to our blocks but our own reads: the producer only has to be told.
            self._declined.add(receiving.transfer_id, receiving.command.peer)
            self.end(receiving, outcome, reason)
            return
        self._begin_closing(receiving, outcome, reason)
        self._ask_to_close(receiving)

    def end(self, receiving: IncomingTransfer, outcome: Outcome, reason: str) -> None:
        """No peer writes to the blocks: they are free as soon as our own reads are over as well. What made us give up
        counts, not what confirmed it."""
        if receiving.stage is not ReceivePhase.CLOSING:
            self._begin_closing(receiving, outcome, reason)
        receiving.is_safe = True
        receiving.unread = []
        cancel = self._side.transport.cancel
        receiving.in_flight = {
            handle: num_bytes for handle, num_bytes in receiving.in_flight.items() if not cancel(handle)
        }
        if receiving.in_flight:
            return
        if receiving.quarantined is None:
            self._fail(receiving, frozenset())
        else:
            self._side.recorder.quarantined(-len(receiving.quarantined))
            self._released(receiving.quarantined)
        self._forget(receiving, accepted=False)

    def stop_waiting(self, receiving: IncomingTransfer) -> None:
        """For the producer's word that it is closed. What the transport can refuse lands nowhere from now on. Else the
        failure is reported with the blocks that something may still write to, and the request goes on without them."""
        if not self._reads and self._side.transport.expect_no_more(receiving.transfer_id):
            self._declined.add(receiving.transfer_id, receiving.command.peer)
            self.end(receiving, receiving.outcome, receiving.reason)
            return
        if receiving.quarantined is not None or receiving.aborted:
            return
        valid = self._valid_tokens(receiving)
        receiving.quarantined = receiving.unsafe_blocks(self._side.geometry.block_size, valid)
        self._side.recorder.quarantined(len(receiving.quarantined))
        self._fail(receiving, receiving.quarantined)
        del self._by_request[receiving.command.request_id]

    def tick(self, receiving: IncomingTransfer) -> None:
        """Look at its deadlines, but for those of its registration."""
        now, settings = self._side.clock(), self._side.settings
        ask_again = now >= receiving.asked_at + settings.retry_s
        if receiving.stage is ReceivePhase.CLOSING:
            if now >= receiving.closing_since + settings.silent_s:
                self.stop_waiting(receiving)
                ask_again = now >= receiving.asked_at + settings.renew_s
            if ask_again and not receiving.is_safe:
                self._ask_to_close(receiving)
        elif receiving.leased_until is not None and now >= receiving.leased_until + settings.margin_s:
            self.give_up(receiving, Outcome.PEER_LOST, "the producer fell silent, and its lease has ended")
            if receiving in self:
                self.stop_waiting(receiving)
        elif now >= receiving.deadline:
            self.give_up(receiving, Outcome.TIMED_OUT, f"no KV within {settings.timeout_s:g} s")
        elif receiving.stage is ReceivePhase.CONFIRMING and ask_again:
            self.accept(receiving)

    def _begin_closing(self, receiving: IncomingTransfer, outcome: Outcome, reason: str) -> None:
        receiving.stage = ReceivePhase.CLOSING
        receiving.closing_since = self._side.clock()
        receiving.outcome, receiving.reason = outcome, reason

    def _ask_to_close(self, receiving: IncomingTransfer) -> None:
        receiving.asked_at = self._side.clock()
        self._tell(receiving, CancelTransfer)

    def _tell(self, receiving: IncomingTransfer, kind: type[HandoffAccepted] | type[CancelTransfer]) -> None:
        peer = receiving.command.peer
        self._side.send(peer.endpoint, kind(self._side.me.envelope(peer.epoch), receiving.transfer_id))

    def _valid_tokens(self, receiving: IncomingTransfer) -> int:
        return receiving.valid_tokens(self._side.geometry.block_size)

    def _fail(self, receiving: IncomingTransfer, unsafe: frozenset[int]) -> None:
        self._side.recorder.ended(receiving.trace(self._side.clock(), None))
        self._failed(
            receiving.command.request_id,
            LoadFailure(receiving.reason, self._valid_tokens(receiving), unsafe),
        )

    def _forget(self, receiving: IncomingTransfer, *, accepted: bool) -> None:
        del self._by_transfer[receiving.transfer_id]
        if self._by_request.get(receiving.command.request_id) is receiving:
            del self._by_request[receiving.command.request_id]
        self._over.add(receiving.transfer_id, accepted)
        if not self._reads:
            self._side.transport.expect_no_more(receiving.transfer_id)


class Quarantine:
    """When nothing can write any more to the blocks of a push that was given up, although its producer does not say so.

    There are two proofs beside the producer's own word:

    - *Its process has ended*, and so have those of its other ranks, where each of them writes by itself. A node on the same machine,
      in the same PID namespace, can see that. What the processes had sent before may still lie in a socket or a shared queue of ours,
      so we run for `ProtocolSettings.margin_s` before it counts.
    - *We have closed the way that its writes take.* The transport makes our memory reachable in another way, every other
      producer is told of it, and when the last transfer that uses the earlier way has ended, that is closed. Nothing is
      lost by it, so it is done for any producer that is silent for a lease and that the transport shuts out by it: of another
      machine, or of another container of this one.

    A producer that writes to our memory by itself (of this machine and PID namespace), and is stopped and not dead, leaves its
    blocks in quarantine until it goes on.

    `has_ended` says whether a process has certainly ended.
    """

    def __init__(
        self,
        side: NodeSide,
        links: ProducerLinks,
        incoming: IncomingTransfers,
        *,
        has_ended: Callable[[ProcessIdentity], bool],
    ) -> None:
        self._side = side
        self._links = links
        self._incoming = incoming
        self._has_ended = has_ended
        self._ended: dict[ProcessIdentity, float] = {}  # and for how long we have run since
        self._look_at = 0.0
        self._reopen_at = 0.0  # not before, if it has failed
        self._closing_before: int | None = None  # ways of an earlier generation than this are to be closed

    def tick(self, ran_s: float) -> None:
        """We have certainly run for `ran_s` since the last time."""
        closing = [
            receiving
            for receiving in self._incoming
            if receiving.stage is ReceivePhase.CLOSING and not receiving.is_safe
        ]
        self._free_after_processes(closing, ran_s)
        if self._closing_before is None:
            self._reopen(closing)
        else:
            self._close_earlier(self._closing_before)

    # ── processes ──

    def _free_after_processes(self, closing: list[IncomingTransfer], ran_s: float) -> None:
        now = self._side.clock()
        processes = {process for receiving in closing for process in receiving.processes}
        self._ended = {
            process: since + ran_s for process, since in self._ended.items() if process in processes
        }
        unknown = processes - self._ended.keys()
        if unknown and now >= self._look_at:
            self._look_at = now + self._side.settings.retry_s
            self._ended |= dict.fromkeys(filter(self._has_ended, unknown), 0.0)
        for receiving in closing:
            ran = [self._ended.get(process, -1.0) for process in receiving.processes]
            if ran and min(ran) >= self._side.settings.margin_s:
                self._end(receiving)

    # ── ways ──

    def _reopen(self, closing: list[IncomingTransfer]) -> None:
        now = self._side.clock()
        if now < self._reopen_at or not any(map(self._needs_closing, closing)):
            return
        self._reopen_at = now + self._side.settings.lease_s
        try:
            memory = self._side.transport.reopen()
        except TransferError as error:
            logger.warning("the KV cache stays reachable in one way only: %s", error)
            return
        if memory is not None:
            self._links.reopened(memory)
            self._closing_before = self._links.generation

    def _needs_closing(self, receiving: IncomingTransfer) -> bool:
        since = receiving.closing_since + self._side.settings.lease_s
        return (
            receiving.is_left
            and self._side.clock() >= since
            and self._is_shut_out(receiving)
            and self._links.is_silent(receiving.peer)
        )

    def _is_shut_out(self, receiving: IncomingTransfer) -> bool:
        return bool(receiving.processes) and all(map(self._side.transport.shuts_out, receiving.processes))

    def _close_earlier(self, generation: int) -> None:
        earlier = [receiving for receiving in self._incoming if receiving.is_registered_before(generation)]
        if not all(receiving.is_left for receiving in earlier):
            return  # some of them may still end well
        if not self._side.transport.close_earlier():
            return
        self._closing_before = None
        for receiving in earlier:
            if not receiving.is_safe and self._is_shut_out(receiving):
                self._end(receiving)

    def _end(self, receiving: IncomingTransfer) -> None:
        logger.info("nothing writes to the blocks of %s any more", receiving.command.request_id)
        self._incoming.end(receiving, receiving.outcome, receiving.reason)
