"""Push: the producer writes the blocks that have become due."""

from __future__ import annotations

from kvtransfer.base import NULL_BLOCK_ID
from kvtransfer.protocol.identity import Clock
from kvtransfer.protocol.sending import Sending, Write
from kvtransfer.protocol.settings import Settings
from kvtransfer.protocol.statistics import Recorder
from kvtransfer.protocol.transport import Operation, RemoteId, Transport
from wire.errors import TransferError


class MissingBlocks(TransferError):
    """The consumer asked for blocks that the request does not keep."""


class Writer:
    def __init__(
        self, transport: Transport, settings: Settings, block_bytes: int, clock: Clock, recorder: Recorder
    ) -> None:
        self._transport = transport
        self._block_bytes = block_bytes
        self._batch = max(1, settings.max_post_bytes // block_bytes)
        self._max_in_flight = settings.max_in_flight
        self._clock = clock
        self._recorder = recorder

    def can_post(self, sending: Sending) -> bool:
        return sending.has_due and len(sending.in_flight) < self._max_in_flight

    def post(self, sending: Sending, remote: RemoteId) -> None:
        destination, source = sending.destination, sending.source
        if destination is None or source is None or not self.can_post(sending):
            return
        now = self._clock()
        positions = sending.take_due(self._batch)
        local = [source.block_at(position) for position in positions]
        if NULL_BLOCK_ID in local:
            raise MissingBlocks("the consumer asked for blocks that are not kept here")
        handle = self._transport.post(
            Operation.WRITE, remote, local, [destination.block_at(position) for position in positions]
        )
        if sending.first_posted_at is None:
            sending.first_posted_at = now
            self._recorder.took("first_byte", now - max(destination.registered_at, sending.created_at))
        sending.in_flight.append(Write(handle, positions, now))
        self.poll(sending)

    def poll(self, sending: Sending) -> None:
        """A TransferError leaves the other handles in flight."""
        for write in list(sending.in_flight):
            try:
                done = self._transport.is_done(write.handle)
            except TransferError:
                sending.in_flight.remove(write)
                raise
            if done:
                self._settle(sending, write)

    def _settle(self, sending: Sending, write: Write) -> None:
        now = self._clock()
        sending.settle(write, now)
        computed_at = sending.source.fully_computed_at if sending.source is not None else None
        blocks = len(write.positions)
        self._recorder.sent(
            blocks, blocks * self._block_bytes, overlapped=computed_at is None or now <= computed_at
        )
