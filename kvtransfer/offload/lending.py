"""A node's tier as its peers read it: which chunks they may read, each question's under a lease, and who has copied from here."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Sequence

from tandem.kvtransfer.offload.exchange import ChecksummedAnswer, Exchange
from tandem.kvtransfer.offload.manager import TierManager
from tandem.kvtransfer.offload.prefixes import Prefixes
from tandem.kvtransfer.protocol.side import PeerKey, key_of
from tandem.wire.handoff import Envelope
from tandem.wire.nodes import PeerAddress
from tandem.wire.sharing import LEASE_S, AskChunks, AskPrefix, ChunksFound, ChunksRead, PrefixFound, TierForgotten

MAX_READERS = 64  # the most peers that are remembered


@dataclasses.dataclass(slots=True)
class _Lease:
    until: float
    slots: Sequence[int]


class ChunkLender:
    """Only the step thread uses it."""

    def __init__(
        self,
        manager: TierManager,
        exchange: Exchange,
        prefixes: Prefixes,
        layout: str,
        block_factor: int,
        clock: Callable[[], float],
    ) -> None:
        self._manager = manager
        self._exchange = exchange
        self._prefixes = prefixes
        self._layout = layout
        self._factor = block_factor
        self._clock = clock
        self._leases: OrderedDict[tuple[PeerKey, int], _Lease] = OrderedDict()  # the first to end comes first
        self._readers: OrderedDict[PeerKey, PeerAddress] = OrderedDict()

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    def answer(self, ask: AskChunks, *, is_distrusted: bool) -> None:
        """`is_distrusted`: what is cached here may be wrong, so none of it is lent."""
        reader = sender_of(ask.envelope)
        lease = key_of(ask.envelope), ask.number
        slots: list[int] = []
        which: list[int] | None = None
        if ask.layout == self._layout and lease not in self._leases and not is_distrusted:
            if ask.skips:
                which = [i for i, wanted in enumerate(ask.keys) if self._manager.lookup((wanted,))]
                keys = [ask.keys[i] for i in which]
            else:
                keys = ask.keys[: self._manager.lookup(ask.keys)]
            slots = self._manager.prepare_load(keys)
        if slots:
            self._leases[lease] = _Lease(self._clock() + LEASE_S, slots)
            self._readers[lease[0]] = reader
            if len(self._readers) > MAX_READERS:
                self._readers.popitem(last=False)
        memory = None if ask.knows_memory else self._exchange.memory
        envelope = self._exchange.envelope(ask.envelope.sender_epoch)
        found = ChunksFound(envelope, ask.number, slots, memory, which=which)
        if slots and ask.checksum_every:
            self._exchange.answer(ChecksummedAnswer(reader, found, self._factor, ask.checksum_every))
        else:
            self._exchange.send(reader, found)

    def answer_prefix(self, ask: AskPrefix) -> None:
        same = ask.layout == self._layout
        has = self._prefixes.parts_of(self._manager, ask.hashes) if same else []
        envelope = self._exchange.envelope(ask.envelope.sender_epoch)
        self._exchange.send(sender_of(ask.envelope), PrefixFound(envelope, ask.number, has))

    def on_read(self, message: ChunksRead) -> None:
        self._let_go((key_of(message.envelope), message.number))

    def end_leases(self, now: float) -> None:
        while self._leases and next(iter(self._leases.values())).until <= now:
            self._let_go(next(iter(self._leases)))

    def _let_go(self, lease: tuple[PeerKey, int]) -> None:
        if (ended := self._leases.pop(lease, None)) is not None:
            self._manager.complete_load(ended.slots)

    def tell_forgotten(self) -> None:
        """Tells the readers that what they have copied from here is of an earlier generation."""
        readers, self._readers = self._readers, OrderedDict()
        for reader in readers.values():
            self._exchange.send(reader, TierForgotten(self._exchange.envelope(reader.epoch)))


def sender_of(envelope: Envelope) -> PeerAddress:
    return PeerAddress(envelope.sender_id, envelope.sender_epoch, envelope.reply_to)
