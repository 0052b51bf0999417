"""Pull: the consumer reads the blocks that a notice names."""

from __future__ import annotations

from collections import Counter

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

    def advance(self, receiving: Receiving, bytes_in_flight: Counter[PeerKey]) -> None:
        """Look after what is in flight, post what is next. `bytes_in_flight`: all reads from each producer. A
        TransferError leaves the other handles in flight."""
        self._poll(receiving)
        mapping = receiving.mapping
        if not receiving.unread:
            return
        if mapping is None:
            raise InternalError("a read without a mapping")
        batch = self._settings.grains_of_a_post(mapping.grain_bytes, mapping.runs_per_grain)
        in_flight = bytes_in_flight[receiving.peer]
        if in_flight and in_flight + batch * mapping.grain_bytes > self._settings.max_link_bytes:
            return
        remote = self._remotes.get(receiving.peer)
        if remote is None:
            raise TransferError("the connection with the producer is gone")
        places = [receiving.unread.pop() for _ in range(min(batch, len(receiving.unread)))]
        move = mapping.move(Operation.READ, receiving.transfer_id, places)
        receiving.in_flight[self._transport.post(remote, move)] = move.num_bytes
        bytes_in_flight[receiving.peer] += move.num_bytes
        self._poll(receiving)

    def _poll(self, receiving: Receiving) -> None:
        for handle in list(receiving.in_flight):
            try:
                done = self._transport.is_done(handle)
            except TransferError:
                del receiving.in_flight[handle]
                raise
            if done:
                del receiving.in_flight[handle]
