"""One transfer on the consumer's side: its phase, its lease, and which grains have arrived."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

from tandem.kvtransfer.base import NULL_BLOCK_ID, count_blocks
from tandem.kvtransfer.protocol.cache_map import GrainPlace, Mapping
from tandem.kvtransfer.protocol.checksums import ChecksumSample
from tandem.kvtransfer.protocol.commands import BeginReceive, BlockTable
from tandem.kvtransfer.protocol.side import Outcome, PeerKey
from tandem.kvtransfer.protocol.transport import HandleId
from tandem.wire.handoff import HandoffNotice, ProcessIdentity
from tandem.wire.tracing import Span, TracePhase, TransferRecord, TransferStage, TransferTrace


class ReceivePhase(enum.Enum):
    CONNECTING = enum.auto()  # not registered: the handshake or a fresh stamp is missing
    REGISTERING = enum.auto()  # registration sent, not confirmed
    WAITING = enum.auto()  # for the notice; with push the producer writes meanwhile
    READING = enum.auto()  # pull: we read
    # Pull: everything is read, and we ask whether the producer held the blocks to the end.
    CONFIRMING = enum.auto()
    CLOSING = enum.auto()  # given up; something may still write to the blocks

    @property
    def is_leased(self) -> bool:
        """Whether each renewal names the transfer. A closing one is named because the answers show that the producer
        lives."""
        return self in (ReceivePhase.WAITING, ReceivePhase.READING, ReceivePhase.CONFIRMING, ReceivePhase.CLOSING)


_NOTHING = ChecksumSample(0, 0, 0)


@dataclasses.dataclass(slots=True)
class IncomingTransfer:
    command: BeginReceive
    began_at: float
    deadline: float
    stage: ReceivePhase = ReceivePhase.CONNECTING
    # Until when, by our clock, the producer may believe that it holds a lease of ours: see wire.handoff on stamps.
    leased_until: float | None = None
    generation: int = 0  # the way to our memory that the registration used: see `ProducerLinks`
    processes: frozenset[ProcessIdentity] = frozenset()  # the producer's processes that write to our memory
    connected_at: float | None = None  # when we knew the producer's memory
    confirmed_at: float | None = None  # when the producer said that it knows our blocks
    asked_at: float = 0.0  # when we last sent a question about this transfer alone
    outcome: Outcome = Outcome.RECEIVED
    reason: str = ""
    aborted: bool = False  # the request has ended, so its blocks can wait until they are safe
    closing_since: float = 0.0
    is_safe: bool = False  # CLOSING: no peer writes to the blocks; our own reads may
    quarantined: frozenset[int] | None = None  # the unsafe blocks that the reported failure named
    is_used: bool = False  # some of what had arrived is in use since the failure was reported
    notice: HandoffNotice | None = None  # pull: names the blocks that are being read
    mapping: Mapping | None = None  # between our blocks and the producer's
    # Push: grains in the order of sending, as (group, index in the request).
    order: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    sample: ChecksumSample = _NOTHING
    num_arrived: int = 0  # leading grains that are here for good and were found right
    arrived_of: int = 0  # the generation of the producer's cache whose KV they are
    unread: list[GrainPlace] = dataclasses.field(default_factory=list)  # in descending order
    # Pull: our reads, and their bytes.
    in_flight: dict[HandleId, int] = dataclasses.field(default_factory=dict)

    @property
    def transfer_id(self) -> str:
        return self.command.transfer_id

    @property
    def peer(self) -> PeerKey:
        return PeerKey(self.command.peer.node_id, self.command.peer.epoch)

    @property
    def num_blocks(self) -> int:
        return count_blocks(self.command.block_ids)

    def know_mapping(self, mapping: Mapping, checksum_every: int) -> None:
        """Takes the mapping between our blocks and the producer's, before the producer is told of ours."""
        if self.mapping is not None:
            return
        self.mapping = mapping
        mine = self.command
        self.order = sorted(
            mapping.positions(mine.num_tokens, mine.first_block, mine.block_ids, mapping.our_parts),
            key=lambda grain: (grain[1], grain[0]),
        )
        self.sample = ChecksumSample.of(len(self.order), checksum_every, self.command.token_hash)

    def where(self, places: Sequence[int]) -> tuple[list[int], list[int]]:
        """Returns the block of each of these grains, and which part of the block it is."""
        blocks: list[int] = []
        parts: list[int] = []
        mapping, mine = self.mapping, self.command
        if mapping is None:
            return blocks, parts
        for place in places:
            group, index = self.order[place]
            block = mapping.block_of(group, index, mine.num_tokens, len(mine.block_ids), mapping.our_parts)
            blocks.append(mine.block_ids[group][block - mine.first_block[group]])
            parts.append(index % mapping.our_parts)
        return blocks, parts

    def valid_tokens(self, block_size: int) -> int:
        """Returns how many leading tokens have their KV here, in whole blocks, whatever becomes of the rest. With
        recurrent states, keys and values are of no use without the states, which come last."""
        local = self.command.local_tokens
        if self.mapping is None or not self.num_arrived:
            return local
        if self.num_arrived == len(self.order):
            return self.command.num_tokens
        if self.mapping.state_blocks:
            return local
        tokens = self.order[self.num_arrived][1] * self.mapping.grain
        return max(local, tokens // block_size * block_size)

    def unsafe_blocks(self, block_size: int, valid_tokens: int, *, has_states: bool) -> frozenset[int]:
        """Returns the blocks that hold anything after the first `valid_tokens` tokens. Recurrent states, the last group, are those after
        the last token, so none of their blocks is safe."""
        last = len(self.command.block_ids) - 1
        return frozenset(
            block
            for group, (first, ids) in enumerate(zip(self.command.first_block, self.command.block_ids, strict=True))
            for index, block in enumerate(ids, start=first)
            if block != NULL_BLOCK_ID and ((has_states and group == last) or index * block_size >= valid_tokens)
        )

    @property
    def is_registered(self) -> bool:
        """Whether the producer was told of our blocks."""
        return self.leased_until is not None

    def is_registered_before(self, generation: int) -> bool:
        return self.is_registered and self.generation < generation

    @property
    def is_left(self) -> bool:
        """Whether only its blocks still wait for this transfer to end."""
        return self.stage is ReceivePhase.CLOSING and (self.aborted or self.quarantined is not None)

    def extend_lease(self, until: float) -> None:
        self.leased_until = max(self.leased_until or 0.0, until)

    def trace(self, now: float, received: HandoffNotice | None) -> TransferTrace:
        """Returns the trace of a transfer that ends now. `received`: None if it failed."""
        began, connected, confirmed = self.began_at, self.connected_at, self.confirmed_at
        spans = [Span(TracePhase.RECEIVE, began, now, self.command.num_tokens - self.command.local_tokens)]
        waits: dict[str, float] = {}
        if connected is not None:
            waits[TransferStage.HANDSHAKE] = connected - began
            if connected > began:
                spans.append(Span(TracePhase.HANDSHAKE, began, connected))
        if connected is not None and confirmed is not None:
            waits[TransferStage.REGISTER] = confirmed - connected
            spans.append(Span(TracePhase.REGISTER, connected, confirmed))
        if received is not None:
            waits[TransferStage.RECEIVE] = now - began
        record = TransferRecord(
            request_id=self.command.request_id,
            outcome=self.outcome.value,
            num_bytes=received.num_bytes if received is not None else 0,
            blocks=received.num_blocks if received is not None else 0,
            waits=waits,
        )
        return TransferTrace(record, spans)

    def mismatch(self, notice: HandoffNotice, block_bytes: int, vocab_size: int) -> str | None:
        """Returns why the notice does not fit what was asked for; None if it fits."""
        mine = self.command
        if notice.num_tokens != mine.num_tokens:
            return f"it is about {notice.num_tokens} tokens, expected {mine.num_tokens}"
        if notice.token_hash != mine.token_hash:
            return "it is about other tokens"
        if (notice.num_blocks, notice.num_bytes) != (self.num_blocks, self.num_blocks * block_bytes):
            return f"{notice.num_blocks} blocks of {notice.num_bytes} bytes in all, expected {self.num_blocks}"
        if not 0 <= notice.first_token < vocab_size:
            return f"the first token is {notice.first_token}, and the vocabulary has {vocab_size}"
        return None

    def first_blocks(self, mapping: Mapping) -> list[int]:
        """Returns, for each group, the place of the producer's block in which our first block begins."""
        return [first * mapping.our_parts // mapping.their_parts for first in self.command.first_block]

    def places_in(self, source: BlockTable, mapping: Mapping) -> list[GrainPlace] | None:
        """Returns every grain that we lack; None if the producer has gaps where we have none."""
        mine = self.command
        ours, theirs = mapping.our_parts, mapping.their_parts
        end = mapping.grains(mine.num_tokens)
        places = []
        groups = len(mine.block_ids)
        for group, (first, ids, their_first, their_ids) in enumerate(
            zip(mine.first_block, mine.block_ids, self.first_blocks(mapping), source, strict=True)
        ):
            last = len(ids) if mapping.is_state(group, groups) else end
            for index in range(first * ours, min(last, (first + len(ids)) * ours)):
                block = ids[index // ours - first]
                if block == NULL_BLOCK_ID:
                    continue
                their_block = their_ids[index // theirs - their_first]
                if their_block == NULL_BLOCK_ID:
                    return None
                places.append(GrainPlace(block, index % ours, their_block, index % theirs, group))
        return places
