"""Push: posts the writes of all transfers, asks whether they are done, and follows how many tokens and layers the
forward passes have computed. A write's source blocks are computed before it is posted."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from tandem.base.errors import TransferError
from tandem.kvtransfer.protocol import commands
from tandem.kvtransfer.protocol.checksums import Checksums
from tandem.kvtransfer.protocol.links import ConsumerLink, ConsumerLinks
from tandem.kvtransfer.protocol.outgoing import Ledger, OutgoingTransfers
from tandem.kvtransfer.protocol.sending import DestinationBlocks, MissingBlocks, OutgoingTransfer, SendPhase, Write
from tandem.kvtransfer.protocol.settings import ProtocolSettings
from tandem.kvtransfer.protocol.side import Clock, LinkPace, NodeSide, Outcome, PeerKey, Recorder
from tandem.kvtransfer.protocol.transport import Activity, Operation, RemoteId, Transport
from tandem.wire.handoff import TransferPace
from tandem.wire.tracing import TransferStage

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Writer:
    """Posts one transfer's writes. `slots`: how many layers lie side by side in a block."""

    _transport: Transport
    _settings: ProtocolSettings
    _slots: int
    _clock: Clock
    _recorder: Recorder
    _checksums: Checksums

    def can_post(self, sending: OutgoingTransfer) -> bool:
        """Whether one more post fits into what may be in flight to this consumer."""
        destination = sending.destination
        if destination is None or not sending.has_due:
            return False
        post_bytes = self._batch(destination) * destination.mapping.grain_bytes
        return destination.link.meter.has_room(self._settings, post_bytes, self._clock())

    def computing(self, sending: OutgoingTransfer, num_tokens: int, slots: int) -> None:
        """The first `slots` layers of a chunk that ends at `num_tokens` have been computed."""
        if sending.destination is not None:
            # The most grains of which one layer fits into one post.
            limit = min(self._settings.layerwise_posts, self._slots)
            sending.begin_layers(num_tokens, slots, limit * self._batch(sending.destination))

    def computed(self, sending: OutgoingTransfer) -> None:
        """All layers of the chunk have been computed."""
        if sending.layers is not None:
            sending.layers.computed = self._slots

    def _batch(self, destination: DestinationBlocks) -> int:
        mapping, meter = destination.mapping, destination.link.meter
        return meter.grains_of_a_post(self._settings, mapping.grain_bytes, mapping.runs_per_grain)

    def post(self, sending: OutgoingTransfer, remote: RemoteId) -> None:
        destination = sending.destination
        if destination is None or not self.can_post(sending):
            return
        slots: tuple[int, int] | None = None
        is_last = True
        if sending.layers is not None:
            positions, slots, is_last = sending.take_layers(self._slots, self._batch(destination))
        else:
            positions = sending.take_due(self._batch(destination))
        places = sending.places(positions)
        if places is None:
            raise MissingBlocks("the consumer asked for blocks that are not kept here")
        move = destination.mapping.move(Operation.WRITE, sending.transfer_id, places, slots)
        now = self._clock()
        handle = self._transport.post(remote, move)
        if sending.first_posted_at is None:
            sending.first_posted_at = now
            known_at = max(destination.registered_at, sending.created_at)
            sending.totals.waits[TransferStage.FIRST_BYTE] = now - known_at
        number = sending.num_posted
        write = Write(number, handle, positions, now, move.num_bytes, len(move.local), slots, is_last)
        sending.posted(write)
        if is_last:
            try:
                write.sums = sending.begin_sums(positions, self._checksums)
            except TransferError:
                write.tainted = True  # the consumer could not check what arrives of it
                raise
        self.poll(sending)

    def poll(self, sending: OutgoingTransfer) -> None:
        """Settles the writes that are done. After a TransferError the other handles are still in flight."""
        for write in list(sending.in_flight):
            try:
                done = self._transport.is_done(write.handle)
                if done:
                    # All ranks have copied, and computed their sums meanwhile: this waits briefly.
                    sums, write.sums = write.sums, None
                    sending.finish_sums(sums)
            except TransferError:
                sending.withdraw(write)
                raise
            if done:
                self._settle(sending, write)

    def _settle(self, sending: OutgoingTransfer, write: Write) -> None:
        now = self._clock()
        sending.settle(write, now)
        destination = sending.destination
        computed_at = sending.source.fully_computed_at if sending.source is not None else None
        blocks = 0
        if destination is not None and write.is_last:
            parts = destination.mapping.their_parts
            # A block counts with its first grain.
            blocks = sum(index % parts == 0 for _, index in write.positions)
        overlapped = write.num_bytes if computed_at is None or now <= computed_at else 0
        totals = sending.totals
        totals.num_bytes += write.num_bytes
        totals.blocks += blocks
        totals.descriptors += write.descriptors
        totals.bytes_overlapped += overlapped
        self._recorder.sent(blocks, write.num_bytes, descriptors=write.descriptors, overlapped=overlapped)


class PushLoop:
    def __init__(
        self, side: NodeSide, ledger: Ledger, links: ConsumerLinks, outgoing: OutgoingTransfers, writer: Writer
    ) -> None:
        self._side = side
        self._clock = side.clock
        self._ledger = ledger
        self._links = links
        self._outgoing = outgoing
        self._writer = writer
        # Transfers with something to write or in flight. Most transfers only wait, and cost nothing here.
        self._moving: dict[str, OutgoingTransfer] = {}

    def watch(self, sending: OutgoingTransfer) -> None:
        """There may be something to write now."""
        self._moving[sending.transfer_id] = sending

    def pump(self) -> Activity:
        """Posts what is due, one operation per transfer, and asks about writes in flight."""
        activity = Activity.NONE
        taken: set[PeerKey] = set()  # ways that those who do not wait for an idle one will fill
        for sending in sorted(self._moving.values(), key=lambda sending: sending.when_idle):
            self.poll(sending)
            to = sending.destination.link.key if sending.destination is not None else None
            waits = sending.when_idle and to in taken
            if sending.phase is SendPhase.OPEN and sending.has_due and not waits:
                self._post(sending)
            self._outgoing.tell_progress(sending)
            self._outgoing.conclude(sending)
            has_due = sending.phase is SendPhase.OPEN and to is not None and sending.has_due
            if has_due and to is not None and not sending.when_idle:
                taken.add(to)
            if has_due and not waits and self._writer.can_post(sending):
                activity = Activity.DUE
            elif sending.in_flight or has_due:
                # Other transfers' writes may fill the link, so this one must be looked at again.
                activity = max(activity, Activity.IN_FLIGHT)
            else:
                del self._moving[sending.transfer_id]
        self.close_idle_links()
        return activity

    def poll(self, sending: OutgoingTransfer) -> None:
        try:
            self._writer.poll(sending)
        except TransferError as error:
            if sending.destination is not None:
                self._on_failed(sending.destination.link, error)

    def tell_pace(self) -> None:
        """Tells each consumer whose link is slow how slow it is, and how many bytes have to go through it."""
        now, settings = self._clock(), self._side.settings
        for link in self._links:
            pace = link.meter.bytes_per_s(now)
            if pace is None or now < link.pace_told_at + settings.tell_pace_s:
                continue
            waiting = {
                sending.transfer_id: sending.waiting_bytes
                for sending in self._ledger.through(link)
                if sending.phase is SendPhase.OPEN
                and (sending.in_flight or sending.has_due)
                and not sending.when_idle  # no one waits for it
            }
            in_flight = link.meter.in_flight
            if LinkPace(pace, in_flight, waiting, now).longest_s > settings.pace_s:
                link.pace_told_at = now
                envelope = self._side.me.envelope(link.key.epoch)
                self._side.send(link.endpoint, TransferPace(envelope, pace, in_flight, waiting))

    def close_idle_links(self) -> None:
        """Closes leaving links whose last write has ended. Transfers that waited for that can end now."""
        if self._links.has_leaving:
            self._links.close_idle(self._in_use)
            for sending in self._ledger:
                self._outgoing.conclude(sending)

    def _in_use(self, link: ConsumerLink) -> bool:
        """Whether a transfer needs the link: for writes in flight, or, if the link has not failed, for writes to
        come."""
        return any(
            sending.in_flight or not (link.has_failed or sending.is_over) for sending in self._ledger.through(link)
        )

    def _post(self, sending: OutgoingTransfer) -> None:
        destination = sending.destination
        if destination is None:
            return
        if self._clock() >= destination.lease_until:
            self._outgoing.close(sending, Outcome.LEASE_EXPIRED, "the consumer did not renew its lease")
            return
        link = destination.link
        if link.has_failed or link.remote is None:
            self._outgoing.close(sending, Outcome.PEER_LOST, "the consumer is gone")
            return
        try:
            self._writer.post(sending, link.remote)
        except MissingBlocks as error:
            self._outgoing.close(sending, Outcome.MISMATCHED, str(error))
        except TransferError as error:
            self._on_failed(link, error)

    def _on_failed(self, link: ConsumerLink, error: TransferError) -> None:
        """A connection with an error is not trusted again. Every transfer through it ends, and it is closed before the
        consumers are told that nothing is in flight. If it cannot be closed yet, they are told that the transfers have
        failed."""
        logger.warning("writing KV to %s failed: %s", link.key.node_id, error)
        self._links.fail(link)
        if self._links.may_still_write(link):
            self._outgoing.refuse_all_through(link, str(error))
        self._outgoing.close_all_through(link, Outcome.MOVE_FAILED, str(error))


class Progress:
    """Applies forward passes to transfers. `advanced` is called with a transfer that may have more to write now."""

    def __init__(
        self,
        ledger: Ledger,
        writer: Writer,
        *,
        to_write: bool,
        has_windows: bool,
        advanced: Callable[[OutgoingTransfer], None],
    ) -> None:
        self._ledger = ledger
        self._writer = writer
        self._to_write = to_write
        # With windows, a request may have given blocks up without a command: only its final table shows it.
        self._owned_until_computed = not has_windows
        self._advanced = advanced
        # The commands of forward passes that the device has not finished, in its order. The device may finish the first
        # two between our look at the first fence and our look at the second. The second still waits its turn: else the
        # end of a chunk would count for the next chunk, whose layers have begun to go.
        self._unfenced: deque[commands.ComputedTokens | commands.LayersComputed] = deque()

    @property
    def waits_for_device(self) -> bool:
        return bool(self._unfenced)

    def take(self, command: commands.ComputedTokens | commands.LayersComputed) -> None:
        self._unfenced.append(command)
        self.look_at_device()

    def look_at_device(self) -> None:
        while self._unfenced:
            command = self._unfenced[0]
            if command.fence is not None and not command.fence():
                return
            self._unfenced.popleft()
            if isinstance(command, commands.ComputedTokens):
                self._computed(command)
            else:
                self._computing(command)

    def preempted(self, command: commands.PreemptedRequests) -> None:
        for unfenced in self._unfenced:
            for request_id in command.request_ids:
                unfenced.num_tokens.pop(request_id, None)
        for request_id in command.request_ids:
            sending = self._ledger.of_request(request_id)
            if sending is not None:
                sending.taint(command.at)

    def _computed(self, command: commands.ComputedTokens) -> None:
        for request_id, num_tokens in command.num_tokens.items():
            sending = self._ledger.of_request(request_id)
            if sending is not None and sending.source is not None:
                source = sending.source
                source.computed = max(source.computed, num_tokens)
                if self._owned_until_computed:
                    source.owned_until = max(source.owned_until, command.at)
                self._writer.computed(sending)
                self._advanced(sending)
                if source.computed >= source.plan.num_tokens and source.fully_computed_at is None:
                    source.fully_computed_at = command.at

    def _computing(self, command: commands.LayersComputed) -> None:
        for request_id, num_tokens in command.num_tokens.items():
            sending = self._ledger.of_request(request_id)
            if sending is not None and sending.phase is SendPhase.OPEN and self._to_write:
                self._writer.computing(sending, num_tokens, command.slots)
                self._advanced(sending)
