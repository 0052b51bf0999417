"""One transfer on the producer's side: which grains are due, in flight, and arrived.

A transfer has two halves that come in either order: the *destination*, which the consumer registered, and the *source*,
the blocks of our request. Grains (see `cache_map`) move while both are there and the lease holds: whole ones once
they are computed, or layer by layer while a chunk is being computed (`Layers`).
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

from tandem.base.errors import TransferError
from tandem.kvtransfer.base import NULL_BLOCK_ID, count_blocks
from tandem.kvtransfer.protocol.cache_map import GrainPlace, Mapping
from tandem.kvtransfer.protocol.checksums import Checksums, ChecksumSample, PendingSums, pack
from tandem.kvtransfer.protocol.commands import BlockTable, PlanSend
from tandem.kvtransfer.protocol.links import ConsumerLink
from tandem.kvtransfer.protocol.side import Outcome, PeerKey, key_of
from tandem.kvtransfer.protocol.transport import HandleId
from tandem.wire.handoff import RegisterDestination
from tandem.wire.tracing import Span, TracePhase, TransferRecord, TransferTrace

Position = tuple[int, int]
"""(KV cache group, index of the grain in the request)."""


class SendPhase(enum.Enum):
    OPEN = enum.auto()
    NOTIFYING = enum.auto()  # the notice was sent; the consumer has not answered
    CLOSING = enum.auto()  # nothing more is posted; the transfer waits for what is in flight
    CLOSED = enum.auto()


@dataclasses.dataclass(slots=True)
class DestinationBlocks:
    link: ConsumerLink
    endpoint: str
    num_tokens: int
    token_hash: bytes
    first_block: list[int]
    block_ids: BlockTable
    lease_until: float
    registered_at: float
    checksum_every: int = 0
    order: list[Position] = dataclasses.field(init=False)  # all grains, in the order of sending
    sample: ChecksumSample = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.order = sorted(self.positions(), key=send_order)
        self.sample = ChecksumSample.of(len(self.order), self.checksum_every, self.token_hash)

    @property
    def consumer(self) -> PeerKey:
        return self.link.key

    @property
    def mapping(self) -> Mapping:
        return self.link.mapping

    def positions(self) -> list[Position]:
        """Returns every grain of the request that has a block at the consumer."""
        mapping = self.mapping
        return mapping.positions(self.num_tokens, self.first_block, self.block_ids, mapping.their_parts)

    @property
    def num_blocks(self) -> int:
        return count_blocks(self.block_ids)

    def is_same(self, message: RegisterDestination) -> bool:
        return (key_of(message.envelope), message.num_tokens, message.token_hash) == (
            self.consumer,
            self.num_tokens,
            self.token_hash,
        ) and (message.first_block, message.block_ids) == (self.first_block, self.block_ids)


@dataclasses.dataclass(slots=True)
class SourceBlocks:
    plan: PlanSend
    block_ids: BlockTable
    computed: int = 0  # leading tokens whose KV is in the blocks
    # As far as we know, the blocks have belonged to the request all the time until then.
    owned_until: float = 0.0
    fully_computed_at: float | None = None
    first_token: int | None = None  # set when the request has ended well

    @property
    def is_complete(self) -> bool:
        return self.first_token is not None

    def blocks_for(self, destination: DestinationBlocks) -> BlockTable:
        """Returns our blocks for the destination's tokens: [g][0] has the first token of its `first_block[g]`."""
        mapping = destination.mapping
        last = -(-mapping.grains(self.plan.num_tokens) // mapping.our_parts)
        return [
            self.block_ids[group]
            if mapping.is_state(group, len(self.block_ids))
            else self.block_ids[group][first * mapping.their_parts // mapping.our_parts : last]
            for group, first in enumerate(destination.first_block)
        ]


@dataclasses.dataclass(frozen=True, slots=True)
class TakenSums:
    places: list[int]  # in `DestinationBlocks.order`
    pending: PendingSums


@dataclasses.dataclass(slots=True)
class Write:
    """One posted operation and its positions."""

    number: int  # counts the writes of a transfer
    handle: HandleId
    positions: list[Position]
    posted_at: float
    num_bytes: int
    descriptors: int
    slots: tuple[int, int] | None = None  # None: whole grains
    is_last: bool = True  # no part of these positions is still to be posted
    # The source blocks may have been overwritten while the write ran, so the wrong bytes may have arrived.
    tainted: bool = False
    done_at: float | None = None
    sums: TakenSums | None = None  # its positions' checksums while they are computed


@dataclasses.dataclass(slots=True)
class SendTotals:
    """What one transfer has moved so far, and how long that took."""

    num_bytes: int = 0
    blocks: int = 0
    descriptors: int = 0
    bytes_overlapped: int = 0
    waits: dict[str, float] = dataclasses.field(default_factory=dict)  # by TransferStage


@dataclasses.dataclass(slots=True)
class Layers:
    """A chunk that is sent layer by layer. Its positions are no longer in `_unsent`."""

    positions: list[Position]  # those that still have something to post
    computed: int  # slots that are computed, so may be posted
    posted: int = 0


class MissingBlocks(TransferError):
    """The consumer asked for blocks that the request does not keep."""


class OutgoingTransfer:
    def __init__(self, transfer_id: str, created_at: float) -> None:
        self.transfer_id = transfer_id
        self.request_id: str | None = None
        self.created_at = created_at
        self.phase = SendPhase.OPEN
        self.outcome = Outcome.SENT
        self.reason = ""
        self.destination: DestinationBlocks | None = None
        self.source: SourceBlocks | None = None
        self.request_ended = False  # no further command will name the request
        self.is_void = False  # nothing that has arrived may be used
        self.kept = False  # the engine keeps the blocks until `finished_sending`
        self.paired_at: float | None = None  # when source and destination were found to belong together
        self.num_kept = 0  # blocks that `finished_sending` frees
        # Since when the source is complete, for a missing destination.
        self.waiting_since: float | None = None
        self.notice_sent_at: float | None = None
        self.first_posted_at: float | None = None
        self.in_flight: list[Write] = []
        self.arrived: list[Write] = []
        self.layers: Layers | None = None
        self.totals = SendTotals()
        self.num_posted = 0
        self.sums: dict[int, int] = {}  # by the place in `DestinationBlocks.order`
        self.told = 0  # the last KVArrived told the consumer of this many grains
        self.told_at = 0.0
        self._places: dict[Position, int] = {}  # in `DestinationBlocks.order`
        self._final: set[int] = set()  # places from `_num_final` on that have arrived for good
        self._num_final = 0
        self._not_final: list[Write] = []  # arrived writes of complete positions that are not yet final
        self._returning: list[Position] = []  # see `_put_back`
        self._unsent: list[Position] = []  # in descending order: the next one is the last

    # ── the two halves ──

    def set_destination(self, destination: DestinationBlocks, *, to_write: bool) -> None:
        self.destination = destination
        self._places = {position: place for place, position in enumerate(destination.order)}
        if to_write:
            self._unsent = destination.order[::-1]

    def drop_destination(self) -> None:
        """The registration was not meant for this request. Nothing has been posted to it."""
        self.destination = None
        self._unsent = []
        self._places = {}

    def set_source(self, plan: PlanSend) -> None:
        """Called again after a preemption: arrived grains stay arrived, the rest comes from the new blocks."""
        self.request_id = plan.request_id
        self.source = SourceBlocks(plan, [list(ids) for ids in plan.block_ids])

    @property
    def when_idle(self) -> bool:
        return self.source is not None and self.source.plan.when_idle

    def belongs_to(self, key: PeerKey) -> bool:
        """Whether this consumer may speak for the transfer: the one that the router named, or before its plan is
        here, the one that registered first."""
        if self.source is not None:
            return (self.source.plan.peer.node_id, self.source.plan.peer.epoch) == key
        return self.destination is None or self.destination.consumer == key

    @property
    def is_over(self) -> bool:
        return self.phase in (SendPhase.CLOSING, SendPhase.CLOSED)

    @property
    def lost_its_blocks(self) -> bool:
        """The request was preempted, and has no blocks until it is admitted again."""
        return self.source is not None and not any(self.source.block_ids)

    def extend_source(self, block_ids: BlockTable) -> None:
        if self.source is not None:
            for table, new in zip(self.source.block_ids, block_ids, strict=True):
                table.extend(new)

    def taint(self, at: float) -> None:
        """From `at` on the source blocks may hold other KV. Writes that had arrived by then are good."""
        for write in self.in_flight:
            write.tainted = True
        late = [write for write in self.arrived if write.done_at is not None and write.done_at > at]
        self.arrived = [write for write in self.arrived if write not in late]
        self._not_final = [write for write in self._not_final if write not in late]
        again = [write for write in self.in_flight if write.tainted] + late
        self._returning += [position for write in again for position in write.positions]
        if self.layers is not None:
            self._returning += self.layers.positions
            self.layers = None
        # A position may have good layers among its writes, but its grain is written again as a whole.
        again_at = set(self._returning)
        self._not_final = [write for write in self._not_final if again_at.isdisjoint(write.positions)]
        self._put_back()
        if self.source is not None:
            self.source.computed = 0
            self.source.fully_computed_at = None
            self.source.block_ids = [[] for _ in self.source.block_ids]

    def _put_back(self) -> None:
        """Make the returning grains due again, but not while an older write to the same places may still arrive."""
        if self._returning and not any(write.tainted for write in self.in_flight):
            self._unsent = sorted({*self._unsent, *self._returning}, key=send_order, reverse=True)
            self._returning = []

    # ── what is due ──

    def _end_of(self, num_tokens: int) -> int:
        """Returns the first grain that the first `num_tokens` tokens do not fill. A prompt's last grain is seldom full:
        it goes when the whole prompt is computed."""
        if self.source is None or self.destination is None:
            return 0
        mapping = self.destination.mapping
        if num_tokens >= self.source.plan.num_tokens:
            return mapping.all_grains(self.source.plan.num_tokens)
        return num_tokens // mapping.grain

    @property
    def has_due(self) -> bool:
        if self.layers is not None:
            return self.layers.posted < self.layers.computed
        return bool(self._unsent) and self._unsent[-1][1] < self._due_end

    @property
    def _due_end(self) -> int:
        return self._end_of(self.source.computed) if self.source is not None else 0

    @property
    def waiting_bytes(self) -> int:
        """The bytes that are computed and not posted."""
        if self.destination is None:
            return 0
        end, grains = self._due_end, len(self.layers.positions) if self.layers is not None else 0
        grains += sum(index < end for _, index in self._unsent)
        return grains * self.destination.mapping.grain_bytes

    def take_due(self, limit: int) -> list[Position]:
        return self._take_below(self._due_end, limit)

    def _take_below(self, end: int, limit: int) -> list[Position]:
        taken: list[Position] = []
        while self._unsent and len(taken) < limit and self._unsent[-1][1] < end:
            taken.append(self._unsent.pop())
        return taken

    def begin_layers(self, num_tokens: int, slots: int, limit: int) -> None:
        """The running step will bring the request to `num_tokens` tokens, and has finished the first `slots` layers of
        its chunk. Grains that were computed before go first, as whole ones."""
        if self.layers is None:
            if self.has_due:
                return
            positions = self._take_below(self._end_of(num_tokens), limit)
            if not positions:
                return
            self.layers = Layers(positions, 0)
        self.layers.computed = max(self.layers.computed, slots)

    def take_layers(self, all_slots: int, batch: int) -> tuple[list[Position], tuple[int, int] | None, bool]:
        """Takes what is due of the chunk, at most as many bytes as `batch` whole grains have. Returns the positions,
        their layers (None: all), and whether nothing of these positions remains to be posted."""
        layers = self.layers
        if layers is None:
            return [], None, True
        if layers.computed < all_slots:
            most = max(1, all_slots * batch // len(layers.positions))
            slots = (layers.posted, min(layers.computed, layers.posted + most))
            layers.posted = slots[1]
            return layers.positions, slots, False
        # All layers are computed: from here on, fewer and larger writes are better.
        most = max(1, all_slots * batch // (all_slots - layers.posted))
        positions, layers.positions = layers.positions[:most], layers.positions[most:]
        if not layers.positions:
            self.layers = None
        return positions, (layers.posted, all_slots) if layers.posted else None, True

    def places(self, positions: Sequence[Position]) -> list[GrainPlace] | None:
        """Returns where the grains lie; None if the request no longer keeps one of their blocks."""
        source, destination = self.source, self.destination
        if source is None or destination is None:
            return None
        mapping = destination.mapping
        our_parts, their_parts = mapping.our_parts, mapping.their_parts
        places, groups, tokens = [], len(destination.block_ids), destination.num_tokens
        for group, index in positions:
            ours = _at(source.block_ids, group, mapping.block_of(group, index, tokens, groups, our_parts))
            if ours == NULL_BLOCK_ID:
                return None
            there = mapping.block_of(group, index, tokens, groups, their_parts)
            theirs = destination.block_ids[group][there - destination.first_block[group]]
            places.append(GrainPlace(ours, index % our_parts, theirs, index % their_parts, group))
        return places

    @property
    def everything_arrived(self) -> bool:
        return (
            self.destination is not None
            and not self._unsent
            and not self._returning
            and not self.in_flight
            and self.layers is None
        )

    def posted(self, write: Write) -> None:
        self.num_posted += 1
        self.in_flight.append(write)
        if self.destination is not None:
            self.destination.link.meter.posted(write.num_bytes, write.posted_at)

    def withdraw(self, write: Write) -> None:
        """The write is no longer in flight, and has not arrived."""
        if write.sums is not None:
            write.sums.pending.forget()
            write.sums = None
        self.in_flight.remove(write)
        if self.destination is not None:
            self.destination.link.meter.withdrawn(write.num_bytes)

    def settle(self, write: Write, now: float) -> None:
        """The write has arrived."""
        self.in_flight.remove(write)
        if self.destination is not None:
            self.destination.link.meter.moved(write.num_bytes, now)
        if write.tainted:
            self._put_back()
        else:
            write.done_at = now
            self.arrived.append(write)
            if write.is_last:
                self._not_final.append(write)

    # ── what has arrived for good ──

    @property
    def num_final(self) -> int:
        """Leading grains that are at the consumer and will not be written again.

        A write is final if the blocks that it read are known to have been the request's until it was done, and if no
        earlier write is in flight, which may carry the earlier layers of the same grains.
        """
        source = self.source
        if self._not_final and source is not None:
            first = self.in_flight[0].number if self.in_flight else self.num_posted
            waiting = []
            for write in self._not_final:
                if write.number < first and write.done_at is not None and write.done_at < source.owned_until:
                    self._final.update(self._places[position] for position in write.positions)
                else:
                    waiting.append(write)
            self._not_final = waiting
            while self._num_final in self._final:
                self._final.remove(self._num_final)
                self._num_final += 1
        return self._num_final

    def carrying(self, positions: Sequence[Position]) -> list[tuple[int, Position]]:
        """Returns the positions whose grains carry a checksum, each with its place in the order of sending."""
        if self.destination is None or not self.destination.checksum_every:
            return []
        sample = self.destination.sample
        numbered = ((self._places[position], position) for position in positions)
        return [(place, position) for place, position in numbered if place in sample]

    def checksums_between(self, start: int, end: int) -> bytes:
        """Returns the packed checksums of those grains in this range that carry one."""
        if self.destination is None:
            return b""
        return pack([self.sums[place] for place in self.destination.sample.between(start, end)])

    def begin_sums(self, positions: Sequence[Position], checksums: Checksums) -> TakenSums | None:
        """Begins to compute the checksums of computed grains; a push does so while they are on their way. Returns None
        if no grain carries one. Raises MissingBlocks."""
        carrying = self.carrying(positions)
        if not carrying or self.destination is None:
            return None
        places = self.places([position for _, position in carrying])
        if places is None:
            raise MissingBlocks("the consumer asked for blocks that are not kept here")
        pending = checksums.begin(
            [place.our_block for place in places],
            [place.our_part for place in places],
            self.destination.mapping,
            groups=[place.group for place in places],
        )
        return TakenSums([place for place, _ in carrying], pending)

    def finish_sums(self, taken: TakenSums | None) -> None:
        """Waits for the other ranks' part. Raises TransferError if it does not come."""
        if taken is not None:
            self.sums.update(zip(taken.places, taken.pending.wait(), strict=True))

    def trace(self, now: float) -> TransferTrace:
        totals = self.totals
        record = TransferRecord(
            request_id=self.request_id or "",
            outcome=self.outcome.value,
            num_bytes=totals.num_bytes,
            blocks=totals.blocks,
            descriptors=totals.descriptors,
            bytes_overlapped=totals.bytes_overlapped,
            waits=totals.waits,
        )
        return TransferTrace(record, self._spans(now))

    def _spans(self, now: float) -> list[Span]:
        spans = [Span(TracePhase.PLAN, self.created_at, self.paired_at if self.paired_at is not None else now)]
        grain = self.destination.mapping.grain if self.destination is not None else 0
        for write in self.arrived:
            ended = write.done_at if write.done_at is not None else now
            # A layer-by-layer chunk's tokens count with their last write.
            tokens = len(write.positions) * grain if write.is_last else 0
            spans.append(Span(TracePhase.WRITE, write.posted_at, ended, tokens, num_bytes=write.num_bytes))
        if self.notice_sent_at is not None:
            spans.append(Span(TracePhase.NOTICE, self.notice_sent_at, now))
        return spans

    def blocks_changed(self, final: BlockTable) -> bool:
        """Whether the request's final table has another block where one was sent, or is being sent: another request may
        have written to that block while it was read."""
        source, destination = self.source, self.destination
        if source is None or destination is None:
            return False
        mapping, tokens, groups = destination.mapping, destination.num_tokens, len(destination.block_ids)
        return any(
            _at(source.block_ids, group, block) != _at(final, group, block)
            for write in (*self.arrived, *self.in_flight)
            if not write.tainted
            for group, index in write.positions
            for block in (mapping.block_of(group, index, tokens, groups, mapping.our_parts),)
        )


def send_order(position: Position) -> Position:
    """Sorts by index first, because a chunk completes the same indices in every group."""
    group, index = position
    return (index, group)


def _at(table: BlockTable, group: int, index: int) -> int:
    """Returns NULL_BLOCK_ID for a place that the table does not have."""
    return table[group][index] if group < len(table) and index < len(table[group]) else NULL_BLOCK_ID
