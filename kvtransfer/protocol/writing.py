"""Push: one transfer's writes, posted and looked after."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.kvtransfer.protocol.checksums import Checksums
from tandem.kvtransfer.protocol.identity import Clock
from tandem.kvtransfer.protocol.sending import DestinationBlocks, OutgoingTransfer, Position, Write
from tandem.kvtransfer.protocol.settings import ProtocolSettings
from tandem.kvtransfer.protocol.statistics import Recorder
from tandem.kvtransfer.protocol.transport import Operation, RemoteId, Transport
from tandem.wire.errors import TransferError


class MissingBlocks(TransferError):
    """The consumer asked for blocks that the request does not keep."""


class Writer:
    """`slots` is how many layers lie side by side in a block."""

    def __init__(
        self,
        transport: Transport,
        settings: ProtocolSettings,
        slots: int,
        clock: Clock,
        recorder: Recorder,
        checksums: Checksums,
    ) -> None:
        self._transport = transport
        self._settings = settings
        self._slots = slots
        self._clock = clock
        self._recorder = recorder
        self._checksums = checksums

    def can_post(self, sending: OutgoingTransfer) -> bool:
        """One more post fits into what may be in flight to this consumer."""
        destination = sending.destination
        if destination is None or not sending.has_due:
            return False
        meter = destination.link.meter
        meter.bytes_per_s(self._clock())
        post = self._batch(destination) * destination.mapping.grain_bytes
        most = self._settings.bytes_of_a_link(post, meter.last_measured)
        return not meter.in_flight or meter.in_flight + post <= most

    def computing(self, sending: OutgoingTransfer, num_tokens: int, slots: int) -> None:
        """The first `slots` layers of a chunk that ends at `num_tokens` have been computed."""
        if sending.destination is not None:
            # So many that one layer of them is not more than one post.
            limit = min(self._settings.layerwise_posts, self._slots)
            sending.begin_layers(num_tokens, slots, limit * self._batch(sending.destination))

    def computed(self, sending: OutgoingTransfer) -> None:
        """All layers have been."""
        if sending.layers is not None:
            sending.layers.computed = self._slots

    def _batch(self, destination: DestinationBlocks) -> int:
        """Grains of one post."""
        mapping, pace = destination.mapping, destination.link.meter.last_measured
        return self._settings.grains_of_a_post(mapping.grain_bytes, mapping.runs_per_grain, pace)

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
            sending.tally.first_byte_s = now - max(destination.registered_at, sending.created_at)
        number = sending.num_posted
        sending.posted(Write(number, handle, positions, now, move.num_bytes, len(move.local), slots, is_last))
        if is_last:
            self.sum_up(sending, positions)
        self.poll(sending)

    def sum_up(self, sending: OutgoingTransfer, positions: Sequence[Position]) -> None:
        """Take the checksums of what has been computed, which for a push is while it is on its way. Raises MissingBlocks."""
        carrying = sending.carrying(positions)
        if not carrying or sending.destination is None:
            return
        places = sending.places([position for _, position in carrying])
        if places is None:
            raise MissingBlocks("the consumer asked for blocks that are not kept here")
        sums = self._checksums.of(
            [place.our_block for place in places],
            [place.our_part for place in places],
            sending.destination.mapping,
        )
        sending.sums.update(zip((place for place, _ in carrying), sums, strict=True))

    def poll(self, sending: OutgoingTransfer) -> None:
        """A TransferError leaves the other handles in flight."""
        for write in list(sending.in_flight):
            try:
                done = self._transport.is_done(write.handle)
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
        tally = sending.tally
        tally.num_bytes += write.num_bytes
        tally.blocks += blocks
        tally.descriptors += write.descriptors
        tally.bytes_overlapped += overlapped
        self._recorder.sent(blocks, write.num_bytes, descriptors=write.descriptors, overlapped=overlapped)
