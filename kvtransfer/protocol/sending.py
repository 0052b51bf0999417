"""One transfer, producer's side: what is due, what is in flight, what has arrived.

A transfer has two halves that may come in either order: the *destination*, which the consumer registered, and the
*source*, the blocks of our request. It moves blocks while both are there and the lease holds.
"""

from __future__ import annotations

import dataclasses
import enum

from kvtransfer.base import NULL_BLOCK_ID
from kvtransfer.protocol.commands import BlockTable, PlanSend
from kvtransfer.protocol.identity import PeerKey, key_of
from kvtransfer.protocol.statistics import Outcome
from kvtransfer.protocol.transport import HandleId
from wire.handoff import RegisterDestination
from wire.tracing import Phase as Traced
from wire.tracing import Span

Position = tuple[int, int]
"""(KV cache group, index in the request's block table)."""


class Phase(enum.Enum):
    OPEN = enum.auto()
    NOTIFYING = enum.auto()  # the notice is on its way; the consumer has not answered
    CLOSING = enum.auto()  # nothing more is posted; what is in flight is waited out
    CLOSED = enum.auto()


@dataclasses.dataclass(slots=True)
class Destination:
    consumer: PeerKey
    endpoint: str
    num_tokens: int
    token_hash: bytes
    first_block: list[int]
    block_ids: BlockTable
    lease_until: float
    registered_at: float

    def positions(self) -> list[Position]:
        return [
            (group, first + index)
            for group, (first, ids) in enumerate(zip(self.first_block, self.block_ids, strict=True))
            for index, block in enumerate(ids)
            if block != NULL_BLOCK_ID
        ]

    def block_at(self, position: Position) -> int:
        group, index = position
        return self.block_ids[group][index - self.first_block[group]]

    def is_same(self, message: RegisterDestination) -> bool:
        return (key_of(message.envelope), message.num_tokens, message.token_hash) == (
            self.consumer,
            self.num_tokens,
            self.token_hash,
        ) and (message.first_block, message.block_ids) == (self.first_block, self.block_ids)


@dataclasses.dataclass(slots=True)
class Source:
    plan: PlanSend
    block_ids: BlockTable
    computed: int = 0  # leading tokens whose KV is in the blocks
    fully_computed_at: float | None = None
    first_token: int | None = None  # known once the request has ended well

    @property
    def is_complete(self) -> bool:
        return self.first_token is not None

    def block_at(self, position: Position) -> int:
        """NULL_BLOCK_ID for a position that the table does not have."""
        group, index = position
        ids = self.block_ids[group] if group < len(self.block_ids) else []
        return ids[index] if index < len(ids) else NULL_BLOCK_ID

    def blocks_for(self, destination: Destination) -> BlockTable:
        """Our blocks beside the destination's: [g][i] holds block `first_block[g] + i`."""
        return [
            self.block_ids[group][first : first + len(ids)]
            for group, (first, ids) in enumerate(
                zip(destination.first_block, destination.block_ids, strict=True)
            )
        ]


@dataclasses.dataclass(slots=True)
class Write:
    """One posted operation, and what becomes of its positions."""

    handle: HandleId
    positions: list[Position]
    posted_at: float
    # The source blocks may have been overwritten while it ran: what arrived is not what was meant.
    tainted: bool = False
    done_at: float | None = None


class Sending:
    def __init__(self, transfer_id: str, block_size: int, created_at: float) -> None:
        self.transfer_id = transfer_id
        self.request_id: str | None = None
        self.created_at = created_at
        self.phase = Phase.OPEN
        self.outcome = Outcome.SENT
        self.reason = ""
        self.destination: Destination | None = None
        self.source: Source | None = None
        self.request_ended = False  # no further command will name the request
        self.kept = False  # the engine waits for `finished_sending`
        self.paired_at: float | None = None  # source and destination are both there, and belong together
        self.waiting_since: float | None = None  # complete, but no destination
        self.notice_sent_at: float | None = None
        self.first_posted_at: float | None = None
        self.in_flight: list[Write] = []
        self.arrived: list[Write] = []
        self._block_size = block_size
        self._unsent: list[Position] = []  # in descending order: the next one is at the end

    # ── the two halves ──

    def set_destination(self, destination: Destination, *, to_write: bool) -> None:
        self.destination = destination
        if to_write:
            self._unsent = sorted(destination.positions(), key=_send_order, reverse=True)

    def drop_destination(self) -> None:
        """A registration that was not meant for this request; nothing has been posted to it."""
        self.destination = None
        self._unsent = []

    def set_source(self, plan: PlanSend) -> None:
        """Again after a preemption: what arrived before stays arrived, the rest comes from the new blocks."""
        self.request_id = plan.request_id
        self.source = Source(plan, [list(ids) for ids in plan.block_ids])

    def belongs_to(self, key: PeerKey) -> bool:
        """Whether this consumer may speak for the transfer. The router's word counts, else who came first."""
        if self.source is not None:
            return (self.source.plan.peer.node_id, self.source.plan.peer.epoch) == key
        return self.destination is None or self.destination.consumer == key

    @property
    def is_over(self) -> bool:
        return self.phase in (Phase.CLOSING, Phase.CLOSED)

    def extend_source(self, block_ids: BlockTable) -> None:
        if self.source is not None:
            for table, new in zip(self.source.block_ids, block_ids, strict=True):
                table.extend(new)

    def taint(self, at: float) -> None:
        """From `at` on the source blocks may hold something else. What had arrived by then is good."""
        for write in self.in_flight:
            write.tainted = True
        late = [write for write in self.arrived if write.done_at is not None and write.done_at > at]
        self.arrived = [write for write in self.arrived if write not in late]
        self._put_back([position for write in late for position in write.positions])
        if self.source is not None:
            self.source.computed = 0
            self.source.fully_computed_at = None
            self.source.block_ids = [[] for _ in self.source.block_ids]

    def _put_back(self, positions: list[Position]) -> None:
        if positions:
            self._unsent = sorted({*self._unsent, *positions}, key=_send_order, reverse=True)

    # ── what is due ──

    def _is_computed(self, position: Position) -> bool:
        source = self.source
        if source is None:
            return False
        # The last block of a prompt is seldom full: it goes when the whole prompt is computed.
        return (
            source.computed >= source.plan.num_tokens
            or (position[1] + 1) * self._block_size <= source.computed
        )

    @property
    def has_due(self) -> bool:
        return bool(self._unsent) and self._is_computed(self._unsent[-1])

    def take_due(self, limit: int) -> list[Position]:
        due: list[Position] = []
        while len(due) < limit and self.has_due:
            due.append(self._unsent.pop())
        return due

    @property
    def everything_arrived(self) -> bool:
        return self.destination is not None and not self._unsent and not self.in_flight

    def settle(self, write: Write, now: float) -> None:
        """A write is over."""
        self.in_flight.remove(write)
        if write.tainted:
            self._put_back(write.positions)
        else:
            write.done_at = now
            self.arrived.append(write)

    def spans(self, now: float, block_bytes: int) -> list[Span]:
        """Where its time went, at its end."""
        spans = [Span(Traced.PLAN, self.created_at, self.paired_at if self.paired_at is not None else now)]
        for write in self.arrived:
            blocks = len(write.positions)
            ended = write.done_at if write.done_at is not None else now
            spans.append(
                Span(
                    Traced.WRITE,
                    write.posted_at,
                    ended,
                    blocks * self._block_size,
                    num_bytes=blocks * block_bytes,
                )
            )
        if self.notice_sent_at is not None:
            spans.append(Span(Traced.NOTICE, self.notice_sent_at, now))
        return spans

    def blocks_changed(self, final: BlockTable) -> bool:
        """Whether a block that was sent is no longer where the request's final table says: it may have been
        given to somebody else while it was read."""
        source, destination = self.source, self.destination
        if source is None or destination is None:
            return False
        return any(
            source.block_at(position) != _at(final, position)
            for write in self.arrived
            for position in write.positions
        )


def _send_order(position: Position) -> Position:
    """By index first: a chunk completes the same indices in every group."""
    group, index = position
    return (index, group)


def _at(table: BlockTable, position: Position) -> int:
    group, index = position
    return table[group][index] if group < len(table) and index < len(table[group]) else NULL_BLOCK_ID
