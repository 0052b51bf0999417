"""Pull: the consumer reads the blocks that a notice names, for all transfers."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

from tandem.base.errors import InternalError, TransferError
from tandem.kvtransfer.protocol.cache_map import Mapping
from tandem.kvtransfer.protocol.incoming import IncomingTransfers
from tandem.kvtransfer.protocol.links import ProducerLinks
from tandem.kvtransfer.protocol.receiving import IncomingTransfer, ReceivePhase
from tandem.kvtransfer.protocol.settings import ProtocolSettings
from tandem.kvtransfer.protocol.side import Clock, LinkMeter, LinkPace, NodeSide, Outcome, PeerKey
from tandem.kvtransfer.protocol.transport import Activity, Operation, RemoteId, Transport
from tandem.wire.handoff import CacheMemory, HandoffNotice


class Reader:
    def __init__(self, transport: Transport, settings: ProtocolSettings, clock: Clock) -> None:
        self._transport = transport
        self._settings = settings
        self._clock = clock
        self._remotes: dict[PeerKey, RemoteId] = {}
        # The meters of current connections and of leaving ones.
        self.meters: dict[PeerKey, LinkMeter] = {}
        # Connections that no new read uses, while earlier reads may still be in flight.
        self._leaving: dict[PeerKey, RemoteId] = {}

    @property
    def has_leaving(self) -> bool:
        return bool(self._leaving)

    def connect(self, key: PeerKey, memory: CacheMemory) -> None:
        if key in self._leaving:
            raise TransferError("an earlier connection with this node is still being closed")
        if key not in self._remotes:
            self._remotes[key] = self._transport.connect(memory)
            self.meters[key] = LinkMeter(self._settings.pace_s)

    def leave(self, key: PeerKey) -> None:
        remote = self._remotes.pop(key, None)
        if remote is not None:
            self._leaving[key] = remote

    def close_idle(self, in_use: set[PeerKey]) -> None:
        for key, remote in list(self._leaving.items()):
            if key not in in_use:
                del self._leaving[key], self.meters[key]
                self._transport.disconnect(remote)

    def can_post(self, receiving: IncomingTransfer) -> bool:
        """Whether one more read fits into what may be in flight from this producer."""
        post_bytes = self._batch(receiving) * self._mapping_of(receiving).grain_bytes
        return self.meters[receiving.peer].has_room(self._settings, post_bytes, self._clock())

    def _batch(self, receiving: IncomingTransfer) -> int:
        """The number of grains in one read."""
        mapping, meter = self._mapping_of(receiving), self.meters[receiving.peer]
        return meter.grains_of_a_post(self._settings, mapping.grain_bytes, mapping.runs_per_grain)

    def _mapping_of(self, receiving: IncomingTransfer) -> Mapping:
        if receiving.mapping is None:
            raise InternalError("a read without a mapping")
        return receiving.mapping

    def advance(self, receiving: IncomingTransfer, *, waits: bool) -> None:
        """Asks about reads in flight, and posts the next one unless it `waits`. After a TransferError the other handles are still in
        flight."""
        self._poll(receiving)
        if waits or not receiving.unread:
            return
        remote = self._remotes.get(receiving.peer)
        if remote is None:
            raise TransferError("the connection with the producer is gone")
        if not self.can_post(receiving):
            return
        count = min(self._batch(receiving), len(receiving.unread))
        places = [receiving.unread.pop() for _ in range(count)]
        move = self._mapping_of(receiving).move(Operation.READ, receiving.transfer_id, places)
        receiving.in_flight[self._transport.post(remote, move)] = move.num_bytes
        self.meters[receiving.peer].posted(move.num_bytes, self._clock())
        self._poll(receiving)

    def _poll(self, receiving: IncomingTransfer) -> None:
        for handle in list(receiving.in_flight):
            try:
                done = self._transport.is_done(handle)
            except TransferError:
                del receiving.in_flight[handle]
                raise
            if done:
                num_bytes = receiving.in_flight.pop(handle)
                self.meters[receiving.peer].moved(num_bytes, self._clock())


logger = logging.getLogger(__name__)


class PullLoop:
    """Reads for all transfers. `broken` is called if a connection with a producer can no longer be trusted."""

    def __init__(
        self,
        side: NodeSide,
        links: ProducerLinks,
        incoming: IncomingTransfers,
        *,
        broken: Callable[[PeerKey, str], None],
    ) -> None:
        self._geometry = side.geometry
        self._settings = side.settings
        self._clock = side.clock
        self._links = links
        self._incoming = incoming
        self._reader = Reader(side.transport, side.settings, side.clock)
        self._broken = broken

    @property
    def has_leaving(self) -> bool:
        return self._reader.has_leaving

    def connect(self, key: PeerKey, memory: CacheMemory) -> None:
        """Raises TransferError."""
        self._reader.connect(key, memory)

    def leave(self, key: PeerKey) -> None:
        self._reader.leave(key)

    def begin(self, receiving: IncomingTransfer, notice: HandoffNotice) -> str | None:
        """Begins to read the blocks that the notice names; or returns why they do not fit what was asked for."""
        link = self._links.get(receiving.peer)
        if link is None or link.memory is None or link.mapping is None:
            return None  # the transfer is being given up
        mapping, source = link.mapping, notice.source_block_ids
        problem = self._geometry.check_table(
            receiving.command.num_tokens, receiving.first_blocks(mapping), source, link.block_size, link.memory
        )
        if problem is not None:
            return problem
        places = receiving.places_in(source, mapping)
        if places is None:
            return "blocks are missing"
        receiving.stage = ReceivePhase.READING
        receiving.notice = notice
        receiving.mapping = mapping
        receiving.unread = places[::-1]
        return None

    def pump(self) -> Activity:
        activity = Activity.NONE
        reading = [
            receiving for receiving in self._incoming if receiving.stage is ReceivePhase.READING or receiving.in_flight
        ]
        in_flight: Counter[PeerKey] = Counter()
        for receiving in reading:
            in_flight[receiving.peer] += sum(receiving.in_flight.values())
        for key, meter in self._reader.meters.items():
            meter.withdrawn(meter.in_flight - in_flight[key])  # reads that failed or were taken back
        taken: set[PeerKey] = set()  # ways that those who do not wait for an idle one will fill
        for receiving in sorted(reading, key=lambda receiving: receiving.command.when_idle):
            when_idle = receiving.command.when_idle
            waits = when_idle and receiving.peer in taken
            self._read_on(receiving, waits=waits)
            has_due = receiving.stage is ReceivePhase.READING and bool(receiving.unread)
            if has_due and not when_idle:
                taken.add(receiving.peer)
            if has_due and not waits and self._reader.can_post(receiving):
                activity = Activity.DUE
            elif receiving.in_flight or has_due:
                activity = max(activity, Activity.IN_FLIGHT)
        if self._reader.has_leaving:
            self._reader.close_idle({other.peer for other in self._incoming if other.in_flight})
        return activity

    def measure(self) -> None:
        """Notes of each slow link its rate and how many bytes have to be read through it."""
        now = self._clock()
        for link in self._links:
            meter = self._reader.meters.get(link.key)
            pace = meter.bytes_per_s(now) if meter is not None else None
            if meter is None or pace is None or link.mapping is None:
                continue
            waiting = {
                receiving.transfer_id: len(receiving.unread) * link.mapping.grain_bytes
                for receiving in self._incoming.with_peer(link.key)
                if receiving.stage is ReceivePhase.READING and not receiving.command.when_idle
            }
            measured = LinkPace(pace, meter.in_flight, waiting, now)
            if measured.longest_s > self._settings.pace_s:
                link.pace = measured

    def _read_on(self, receiving: IncomingTransfer, *, waits: bool) -> None:
        try:
            self._reader.advance(receiving, waits=waits)
        except TransferError as error:
            logger.warning("reading KV from %s failed: %s", receiving.peer.node_id, error)
            self._broken(receiving.peer, str(error))
            self._incoming.give_up(receiving, Outcome.MOVE_FAILED, str(error))
        if receiving.in_flight or receiving.unread:
            return
        if receiving.stage is ReceivePhase.READING:
            receiving.stage = ReceivePhase.CONFIRMING
            self._incoming.accept(receiving)
        elif receiving.is_safe and receiving in self._incoming:
            self._incoming.end(receiving, receiving.outcome, receiving.reason)
