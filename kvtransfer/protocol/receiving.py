"""One transfer, consumer's side."""

from __future__ import annotations

import dataclasses
import enum

from kvtransfer.base import NULL_BLOCK_ID
from kvtransfer.protocol.commands import BeginReceive, BlockTable
from kvtransfer.protocol.identity import PeerKey
from kvtransfer.protocol.statistics import Outcome
from kvtransfer.protocol.transport import HandleId
from wire.handoff import HandoffNotice
from wire.tracing import Phase, Span


class Stage(enum.Enum):
    CONNECTING = enum.auto()  # the producer has not been told: the handshake or a fresh stamp is missing
    REGISTERING = enum.auto()  # told, not confirmed
    WAITING = enum.auto()  # for the notice; with push the producer writes meanwhile
    READING = enum.auto()  # pull: we read
    CONFIRMING = enum.auto()  # pull: everything is read; did the producer hold the blocks to the end?
    CLOSING = enum.auto()  # given up; the blocks are not safe yet

    @property
    def is_leased(self) -> bool:
        return self in (Stage.WAITING, Stage.READING, Stage.CONFIRMING)


@dataclasses.dataclass(slots=True)
class Receiving:
    command: BeginReceive
    began_at: float
    deadline: float
    stage: Stage = Stage.CONNECTING
    # Until when, by our clock, the producer may take our word that it holds a lease: see wire.handoff on stamps.
    leased_until: float | None = None
    confirmed_at: float | None = None  # the producer has said that it knows our blocks
    asked_at: float = 0.0  # when the last question about this transfer alone was sent
    outcome: Outcome = Outcome.RECEIVED
    reason: str = ""
    is_safe: bool = False  # CLOSING: nobody else writes to the blocks; our own reads may
    notice: HandoffNotice | None = None  # pull: what is being read
    unread: list[tuple[int, int]] = dataclasses.field(default_factory=list)  # (ours, theirs), the last first
    in_flight: list[HandleId] = dataclasses.field(default_factory=list)

    @property
    def transfer_id(self) -> str:
        return self.command.transfer_id

    @property
    def peer(self) -> PeerKey:
        return PeerKey(self.command.peer.node_id, self.command.peer.epoch)

    @property
    def num_blocks(self) -> int:
        return sum(block != NULL_BLOCK_ID for ids in self.command.block_ids for block in ids)

    @property
    def is_registered(self) -> bool:
        """Whether the producer was ever told of our blocks."""
        return self.leased_until is not None

    def extend_lease(self, until: float) -> None:
        self.leased_until = max(self.leased_until or 0.0, until)

    def spans(self, now: float) -> list[Span]:
        """Where its time went, at its end."""
        spans = [Span(Phase.RECEIVE, self.began_at, now, self.command.num_tokens - self.command.local_tokens)]
        if self.confirmed_at is not None:
            spans.append(Span(Phase.REGISTER, self.began_at, self.confirmed_at))
        return spans

    def mismatch(self, notice: HandoffNotice, block_bytes: int) -> str | None:
        """Why the notice is not about what was asked for; None when it is."""
        mine = self.command
        if notice.num_tokens != mine.num_tokens:
            return f"it is about {notice.num_tokens} tokens, expected {mine.num_tokens}"
        if notice.token_hash != mine.token_hash:
            return "it is about other tokens"
        if (notice.num_blocks, notice.num_bytes) != (self.num_blocks, self.num_blocks * block_bytes):
            return (
                f"{notice.num_blocks} blocks of {notice.num_bytes} bytes in all, expected {self.num_blocks}"
            )
        if not 0 <= notice.first_token < 1 << 31:
            return f"the first token is {notice.first_token}"
        return None

    def pairs_with(self, source: BlockTable) -> list[tuple[int, int]] | None:
        """(our block, theirs) for every block that we lack; None when theirs has gaps where ours has none."""
        pairs = [
            (ours, theirs)
            for own_ids, their_ids in zip(self.command.block_ids, source, strict=True)
            for ours, theirs in zip(own_ids, their_ids, strict=True)
            if ours != NULL_BLOCK_ID
        ]
        return None if any(theirs == NULL_BLOCK_ID for _, theirs in pairs) else pairs
