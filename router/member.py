"""What a router knows of one incarnation of a node: as it was announced, as it reports itself, and what was sent there since.

Every status and every request touches it, among a thousand others, so that what it lies in counts: one object with slots, and one view
that is written in place.
"""

from __future__ import annotations

import dataclasses

from tandem.router.policy.shortlist import Shortlist
from tandem.router.policy.views import NodeView
from tandem.router.rates import NodeRates
from tandem.wire.nodes import NodeInfo
from tandem.wire.requests import NodeStatus


@dataclasses.dataclass(slots=True, eq=False)
class Member:
    """Written by its pool alone."""

    info: NodeInfo
    joined_at: float
    status: NodeStatus | None = None
    status_at: float = 0.0
    heard_at: float | None = None
    lists_any: bool = False  # its status: nodes from which it takes nothing, or adapters
    lost: str | None = None  # why
    accepted_at: float | None = None  # when its machine last accepted a connection for it
    is_starved: bool = False  # silent, and neither lost nor in view
    is_deaf: bool = False  # it speaks, and does not acknowledge what it is sent
    foreign: str | None = None  # why no request of this router may ever run there
    view: NodeView | None = None  # None while it gets no new requests
    shortlist: Shortlist | None = None  # its view's, if it has an engine
    rates: NodeRates = dataclasses.field(default_factory=NodeRates)
    # Sent, and not yet part of a status: when, tokens to be computed, blocks that it may take.
    pending: dict[str, tuple[float, int, int]] = dataclasses.field(default_factory=dict)
    pending_tokens: int = 0  # their sums
    pending_blocks: int = 0

    def note_sent(self, request_id: str, at: float, tokens: int, blocks: int) -> None:
        self.note_answered(request_id)
        self.pending[request_id] = (at, tokens, blocks)
        self.pending_tokens += tokens
        self.pending_blocks += blocks

    def note_answered(self, request_id: str) -> bool:
        """Whether it was pending."""
        sent = self.pending.pop(request_id, None)
        if sent is None:
            return False
        self.pending_tokens -= sent[1]
        self.pending_blocks -= sent[2]
        return True

    def forget_sent_before(self, at: float) -> None:
        while self.pending:
            request_id, sent = next(iter(self.pending.items()))
            if sent[0] > at:
                return
            self.note_answered(request_id)

    def write_view(self, status: NodeStatus) -> None:
        """With every status and every request, so only what changes of this one node is touched."""
        view = self.view
        if view is None:
            return
        view.status = status
        if self.pending or view.pending_requests:
            view.pending_requests = len(self.pending)
            view.pending_tokens = self.pending_tokens
            view.pending_blocks = self.pending_blocks
        if self.shortlist is not None:
            self.shortlist.put(view)
