"""Where a request's time went, as the process that spent it saw it. Every transfer has a `TransferTrace`; only traced
requests have the rest."""

from __future__ import annotations

import enum

import msgspec


class TracePhase(enum.StrEnum):
    # the router
    READ = "read"  # until the body has arrived and was checked
    TOKENIZE = "tokenize"  # the prompt is rendered and encoded
    WAIT = "wait"  # until the router admits the request
    ROUTE = "route"  # until nodes are chosen and told
    FLUSH = "flush"  # from the tokens' arrival until their text is on the connection
    # a node
    INBOX = "inbox"  # arrived, until the running step is over
    QUEUE = "queue"  # in line, until the first step that works on it
    PREEMPTED = "preempted"  # it has lost its blocks and is in line again
    STEP = "step"  # one step that worked on it, with planning and booking
    PREFILL = "prefill"  # the forward pass of a step that read its prompt
    DECODE = "decode"  # the forward pass of a step that made its tokens
    RESUME = "resume"  # from the KV's arrival until the step that continues from it
    # a transfer
    # The two nodes learn each other's memory, once for all transfers between them.
    HANDSHAKE = "handshake"
    REGISTER = "register"  # until the prefill node knows the decode node's blocks
    PLAN = "plan"  # until both nodes' blocks are known
    WRITE = "write"  # one write of KV, from posting until every byte has arrived
    NOTICE = "notice"  # from the notice until the decode node has accepted it
    RECEIVE = "receive"  # the decode node's whole wait for KV


class Span(msgspec.Struct, frozen=True, array_like=True):
    """One phase, in seconds on the recording process's monotonic clock."""

    phase: TracePhase
    start: float
    end: float
    tokens: int = 0  # this request's
    beside: int = 0  # other requests' tokens in the same step
    num_bytes: int = 0

    @property
    def seconds(self) -> float:
        return self.end - self.start


class TransferStage(enum.StrEnum):
    """What a transfer waits for."""

    # The decode node sees:
    HANDSHAKE = "handshake"  # until it knew the prefill node's memory; 0 if it did before
    REGISTER = "register"  # from then, until the prefill node knew its blocks
    RECEIVE = "receive"  # from having its blocks to a handoff that verifies
    # The prefill node sees:
    FIRST_BYTE = "first_byte"  # from knowing both nodes' blocks to the first write
    LAST_BYTE = "last_byte"  # from the first write to the end of the last one
    HANDOVER = "handover"  # from the end of the last forward pass to the decode node's acceptance


class TransferRecord(msgspec.Struct, frozen=True):
    """One transfer that has ended, as one of its two nodes saw it."""

    request_id: str
    outcome: str  # "sent", "received", or why it ended otherwise
    num_bytes: int
    blocks: int
    descriptors: int = 0  # runs of bytes that were written
    bytes_overlapped: int = 0  # bytes that had arrived before the prompt's last forward pass ended
    # Seconds, by TransferStage. A stage that this node does not see, or that the transfer did not reach, is missing.
    waits: dict[str, float] = {}


class TransferTrace(msgspec.Struct, frozen=True):
    """A transfer's record, and its phases as spans."""

    record: TransferRecord
    spans: list[Span] = []


class NodeTrace(msgspec.Struct, frozen=True, tag="trace"):
    """A node's part in one traced request. Sent once, when the request and its transfer are over on this node."""

    node_id: str
    epoch: int
    request_id: str
    spans: list[Span]
    dropped: int = 0  # spans beyond the most that one request may have
    transfer: TransferRecord | None = None


class ClockReading(msgspec.Struct, frozen=True, tag="clock"):
    """The answer to a Ping with `asked_at`: the node's monotonic clock."""

    node_id: str
    epoch: int
    asked_at: float  # as the Ping said
    clock: float
