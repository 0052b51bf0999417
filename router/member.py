"""One incarnation of a node, as the pool knows it."""

from __future__ import annotations

import msgspec

from tandem.router.policy.shortlist import Shortlist
from tandem.router.policy.views import NodeRates, NodeView
from tandem.wire.nodes import NodeInfo, NodeState
from tandem.wire.requests import NO_COUNTERS, NodeCounters, NodeStatus


class Member(NodeView, eq=False):
    """Every status and every request touches one of a thousand members, so all that
    they read and write is one object."""

    epoch: int = 0  # of `info`, at hand: it is compared with every status
    joined_at: float = 0.0
    counters: NodeCounters = NO_COUNTERS  # the last that a status had
    counters_at: float | None = None  # when they came; None: no status had any yet
    status_at: float | None = None  # when `status` came; None: none has, and it says that the node starts
    heard_at: float | None = None
    lists_any: bool = False  # its status lists adapters, or nodes from which it takes no KV
    lost: str | None = None  # why it is lost; None while it is not
    accepted_at: float | None = None  # when its machine last accepted a connection for it
    is_starved: bool = False  # silent; neither lost nor in view
    is_deaf: bool = False  # it sends messages but does not acknowledge what it is sent
    foreign: str | None = None  # why no request of this router may ever run there
    is_in_view: bool = False  # new requests may go to it
    shortlist: Shortlist | None = None  # where it is filed while it is in view, if it has an engine
    # By request id, sent and not yet part of a status: when, tokens to compute, blocks that it may take.
    # `pending_requests`, `pending_tokens` and `pending_blocks` are its sums.
    pending: dict[str, tuple[float, int, int]] = msgspec.field(default_factory=dict)

    @classmethod
    def of(cls, info: NodeInfo, joined_at: float) -> Member:
        counts = (0,) * 7  # free_blocks to held_blocks
        status = NodeStatus(info.node_id, info.role, info.epoch, NodeState.STARTING, *counts, 0.0, None)
        return cls(info, status, NodeRates(), epoch=info.epoch, joined_at=joined_at)

    @property
    def has_reported(self) -> bool:
        return self.status_at is not None

    @property
    def reported(self) -> NodeStatus | None:
        """Its last status; None before the first."""
        return self.status if self.has_reported else None

    def note_sent(self, request_id: str, at: float, tokens: int, blocks: int) -> None:
        self.note_answered(request_id)
        self.pending[request_id] = (at, tokens, blocks)
        self.pending_requests += 1
        self.pending_tokens += tokens
        self.pending_blocks += blocks

    def note_answered(self, request_id: str) -> bool:
        """Returns whether the request was pending."""
        sent = self.pending.pop(request_id, None)
        if sent is None:
            return False
        self.pending_requests -= 1
        self.pending_tokens -= sent[1]
        self.pending_blocks -= sent[2]
        return True

    def forget_sent_before(self, at: float) -> None:
        while self.pending:
            request_id, sent = next(iter(self.pending.items()))
            if sent[0] > at:
                return
            self.note_answered(request_id)

    def forget_sent(self) -> None:
        self.pending.clear()
        self.pending_requests = self.pending_tokens = self.pending_blocks = 0

    def file(self) -> None:
        """Files it again in its shortlist, after its status or its sums have changed."""
        if self.shortlist is not None:
            self.shortlist.put(self)
