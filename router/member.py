"""What a router knows about one incarnation of a node: its announcement, its reports, and what was sent to it
since.

Every status and every request touches one of a thousand members, so the memory layout matters for speed: one
object with slots, and one view that is written in place.
"""

from __future__ import annotations

import dataclasses

from tandem.router.policy.shortlist import Shortlist
from tandem.router.policy.views import NodeRates, NodeView
from tandem.wire.nodes import NodeInfo
from tandem.wire.requests import NodeStatus


@dataclasses.dataclass(slots=True, eq=False)
class Member:
    """One incarnation of a node. Only its pool writes it."""

    info: NodeInfo
    epoch: int  # of `info`, at hand: it is compared with every status
    joined_at: float
    status: NodeStatus | None = None
    status_at: float = 0.0
    heard_at: float | None = None
    lists_any: bool = False  # its status lists adapters, or nodes from which it takes no KV
    lost: str | None = None  # why it is lost; None while it is not
    accepted_at: float | None = None  # when its machine last accepted a connection for it
    is_starved: bool = False  # silent; neither lost nor in view
    is_deaf: bool = False  # it sends messages but does not acknowledge what it is sent
    foreign: str | None = None  # why no request of this router may ever run there
    view: NodeView | None = None  # None while it gets no new requests
    shortlist: Shortlist | None = None  # where its view is filed, if it has an engine
    rates: NodeRates = dataclasses.field(default_factory=NodeRates)
    # By request id, sent and not yet part of a status: when, tokens to compute, blocks that it may take.
    pending: dict[str, tuple[float, int, int]] = dataclasses.field(default_factory=dict)
    pending_tokens: int = 0  # the sums over `pending`
    pending_blocks: int = 0

    def note_sent(self, request_id: str, at: float, tokens: int, blocks: int) -> None:
        self.note_answered(request_id)
        self.pending[request_id] = (at, tokens, blocks)
        self.pending_tokens += tokens
        self.pending_blocks += blocks

    def note_answered(self, request_id: str) -> bool:
        """Returns whether the request was pending."""
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
        """Copies the status and the pending sums to the view. Called with every status and every request, so
        it touches only what changes."""
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
