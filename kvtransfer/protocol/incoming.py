"""A consumer's transfers, from BeginReceive to their ends.

Each BeginReceive is answered exactly once, with `finished` or with `failed`. A failed push is made safe first: the
consumer asks the producer to close the transfer, and the producer answers when nothing is in flight. That may take
long, over a slow link or if the producer is gone, and the request does not wait for it. After
`ProtocolSettings.silent_s`, or at once if the producer seems to be gone, the failure is reported with the blocks to
which a write may still come, and these stay in quarantine (see `Quarantine`). The end of a lease is a reason to give
a transfer up. It frees nothing, because a slow write may arrive after it. With pull nothing but our own reads writes
to our blocks.

A pull is right only if the producer held the blocks until the last byte was read. Only the producer knows that. So the
acceptance is a question, and TransferClosed with `handed_over` is the answer that ends the transfer well.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec

from tandem.base.errors import TransferError
from tandem.kvtransfer.base import Handoff, LoadFailure
from tandem.kvtransfer.protocol.checksums import unpack
from tandem.kvtransfer.protocol.commands import BeginReceive
from tandem.kvtransfer.protocol.links import ProducerLinks
from tandem.kvtransfer.protocol.receiving import IncomingTransfer, ReceivePhase
from tandem.kvtransfer.protocol.settings import ProtocolSettings
from tandem.kvtransfer.protocol.side import BoundedMemory, Clock, Identity, NodeSide, Outcome, PeerKey
from tandem.kvtransfer.protocol.transport import Direction
from tandem.wire.handoff import CancelTransfer, HandoffAccepted, HandoffNotice, ProcessIdentity
from tandem.wire.nodes import PeerAddress

logger = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class _DeclinedTransfer:
    peer: PeerAddress
    until: float
    asked_at: float


class DeclinedTransfers:
    """Transfers that the consumer does not want. It tells each producer so until it answers, for a bounded time: if the
    producer never hears it, its own lease ends the wait."""

    def __init__(
        self, me: Identity, settings: ProtocolSettings, send: Callable[[str, msgspec.Struct], None], clock: Clock
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
        """Returns why the grains from `start` to `end` are not what was sent. None: they are, and count as arrived.

        `packed` has the checksums of those grains in this range that carry one. Grains that were compared before are
        not compared again. Raises TransferError if they cannot be compared.
        """
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
                    self._arrived(receiving, place)
                else:
                    # The grains before it that carry no checksum are not trusted either.
                    receiving.num_arrived = 0
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


class _Over(NamedTuple):
    accepted: bool  # a repeated notice then gets the acceptance again
    is_used: bool


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
        self._over: BoundedMemory[_Over] = BoundedMemory(
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
        """Whether a transfer that is over was accepted; None if this node does not know it."""
        over = self._over.get(transfer_id)
        return over.accepted if over is not None else None

    def is_used(self, transfer_id: str) -> bool:
        """Whether any KV of the transfer is in use here, all of it or what had arrived before it failed."""
        over = self._by_transfer.get(transfer_id) or self._over.get(transfer_id)
        return over is not None and over.is_used

    # ── the beginning ──

    def open(self, command: BeginReceive) -> IncomingTransfer | None:
        """Returns the new transfer; None if its transfer id is in use, which it reports as a failure."""
        if command.transfer_id in self._by_transfer:
            self._failed(command.request_id, LoadFailure("another request uses its transfer id", command.local_tokens))
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
        """Tells the producer that everything is here. Sent again until the producer is known to have heard it."""
        receiving.asked_at = self._side.clock()
        self._tell(receiving, HandoffAccepted)

    def finish(self, receiving: IncomingTransfer, notice: HandoffNotice) -> None:
        self._side.recorder.ended(receiving.trace(self._side.clock(), notice))
        self._forget(receiving, accepted=True)
        self._side.recorder.received(notice.num_blocks, notice.num_bytes)
        self._finished(receiving.command.request_id, Handoff(notice.first_token, notice.num_tokens))

    def abort(self, receiving: IncomingTransfer) -> None:
        """The request has ended, so its blocks can wait until they are safe."""
        receiving.aborted = True
        self.give_up(receiving, Outcome.ABORTED, "the request was aborted")

    def give_up(self, receiving: IncomingTransfer, outcome: Outcome, reason: str) -> None:
        """Begin to end this transfer as failed."""
        if receiving.stage is ReceivePhase.CLOSING:
            return
        if self._reads or not receiving.is_registered:
            # Nothing but our own reads can write to our blocks, so the producer only has to be told.
            self._declined.add(receiving.transfer_id, receiving.command.peer)
            self.end(receiving, outcome, reason)
            return
        self._begin_closing(receiving, outcome, reason)
        self._ask_to_close(receiving)

    def end(self, receiving: IncomingTransfer, outcome: Outcome, reason: str) -> None:
        """No peer writes to the blocks: they are free as soon as our own reads are over, too. Reports the reason for
        which the transfer was given up, not the one that made it safe."""
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
        """Stop waiting for the producer to say that the transfer is closed. If the transport can refuse late writes,
        the transfer ends now. Else the failure is reported with the blocks to which something may still write, and the
        request goes on without them."""
        if not self._reads and self._side.transport.expect_no_more(receiving.transfer_id):
            self._declined.add(receiving.transfer_id, receiving.command.peer)
            self.end(receiving, receiving.outcome, receiving.reason)
            return
        if receiving.quarantined is not None or receiving.aborted:
            return
        valid, geometry = self._valid_tokens(receiving), self._side.geometry
        has_states = geometry.state_blocks > 0
        receiving.quarantined = receiving.unsafe_blocks(geometry.block_size, valid, has_states=has_states)
        self._side.recorder.quarantined(len(receiving.quarantined))
        self._fail(receiving, receiving.quarantined)
        del self._by_request[receiving.command.request_id]

    def tick(self, receiving: IncomingTransfer) -> None:
        """Acts on the transfer's deadlines, except those of its registration."""
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
        if receiving.num_arrived:  # in use from now on, also if our own cache has begun a new generation since
            receiving.is_used = True
            self._side.sources.handed_over.took(receiving.command.peer, receiving.arrived_of)
        self._failed(receiving.command.request_id, LoadFailure(receiving.reason, self._valid_tokens(receiving), unsafe))

    def _forget(self, receiving: IncomingTransfer, *, accepted: bool) -> None:
        del self._by_transfer[receiving.transfer_id]
        if self._by_request.get(receiving.command.request_id) is receiving:
            del self._by_request[receiving.command.request_id]
        self._over.add(receiving.transfer_id, _Over(accepted, accepted or receiving.is_used))
        if not self._reads:
            self._side.transport.expect_no_more(receiving.transfer_id)


class Quarantine:
    """Finds out when nothing can write any more to the blocks of a push that was given up, if its producer does not
    say so.

    There are two proofs besides the producer's own word:

    - *Its process has ended*, and so have its other ranks' processes if each rank writes. A node on the same machine
      and in the same PID namespace can see that. What the processes had sent before may still lie in a socket or a
      shared queue of ours, so the proof counts after we have run for `ProtocolSettings.margin_s`.
    - *We have closed the way that its writes take.* The transport makes our memory reachable in another way, we tell
      every other producer of it, and when the last transfer over the earlier way has ended, the transport closes that.
      Nothing is lost by it. So we do it for any producer that was silent for a lease and that the transport can shut
      out in this way: on another machine, or in another container of this one.

    A producer that writes to our memory by itself (on this machine, in this PID namespace), and is stopped but not
    dead, leaves its blocks in quarantine until it goes on.

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
        self._ended: dict[ProcessIdentity, float] = {}  # how long we have run since we saw each end
        self._look_at = 0.0
        self._reopen_at = 0.0  # no new attempt to reopen before this
        self._closing_before: int | None = None  # ways of earlier generations than this are to be closed

    def tick(self, ran_s: float) -> None:
        """`ran_s`: how long this process has certainly run since the last call."""
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
        self._ended = {process: since + ran_s for process, since in self._ended.items() if process in processes}
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
            return  # some transfers over that way may still end well
        try:
            if not self._side.transport.close_earlier():
                return
        except TransferError as error:
            logger.warning("earlier ways to the KV cache were not closed, and are tried again: %s", error)
            self._closing_before = None
            return
        self._closing_before = None
        for receiving in earlier:
            if not receiving.is_safe and self._is_shut_out(receiving):
                self._end(receiving)

    def _end(self, receiving: IncomingTransfer) -> None:
        logger.info("nothing writes to the blocks of %s any more", receiving.command.request_id)
        self._incoming.end(receiving, receiving.outcome, receiving.reason)
