"""Pull: the consumer reads the blocks that a notice names."""

from __future__ import annotations

from tandem.kvtransfer.protocol.identity import PeerKey
from tandem.kvtransfer.protocol.receiving import Receiving
from tandem.kvtransfer.protocol.settings import Settings
from tandem.kvtransfer.protocol.transport import Operation, RemoteId, Transport
from tandem.wire.errors import InternalError, TransferError
from tandem.wire.handoff import CacheMemory


class Reader:
    def __init__(self, transport: Transport, settings: Settings) -> None:
        self._transport = transport
        self._settings = settings
        self._remotes: dict[PeerKey, RemoteId] = {}
        # Connections that are over, while reads through them may still be in flight.
        self._leaving: dict[PeerKey, RemoteId] = {}

    @property
    def has_leaving(self) -> bool:
        return bool(self._leaving)

    def connect(self, key: PeerKey, memory: CacheMemory) -> None:
        if key in self._leaving:
            raise TransferError("an earlier connection with this node is still being closed")
        if key not in self._remotes:
            self._remotes[key] = self._transport.connect(memory)

    def leave(self, key: PeerKey) -> None:
        remote = self._remotes.pop(key, None)
        if remote is not None:
            self._leaving[key] = remote

    def close_idle(self, in_use: set[PeerKey]) -> None:
        for key, remote in list(self._leaving.items()):
            if key not in in_use:
                del self._leaving[key]
                self._transport.disconnect(remote)

    def advance(self, receiving: Receiving) -> None:
        """Look after what is in flight, post what is next. A TransferError leaves the other handles in flight."""
        self._poll(receiving)
        if not receiving.unread or len(receiving.in_flight) >= self._settings.max_in_flight:
            return
        remote = self._remotes.get(receiving.peer)
        if remote is None:
            raise TransferError("the connection with the producer is gone")
        mapping = receiving.mapping
        if mapping is None:
            raise InternalError("a read without a mapping")
        batch = self._settings.grains_of_a_post(mapping.grain_bytes, mapping.runs_per_grain)
        places = [receiving.unread.pop() for _ in range(min(batch, len(receiving.unread)))]
        receiving.in_flight.append(
            self._transport.post(remote, mapping.move(Operation.READ, receiving.transfer_id, places))
        )
        self._poll(receiving)

    def _poll(self, receiving: Receiving) -> None:
        for handle in list(receiving.in_flight):
            try:
                done = self._transport.is_done(handle)
            except TransferError:
                receiving.in_flight.remove(handle)
                raise
            if done:
                receiving.in_flight.remove(handle)
